"""The admin HTTP server beside a real store server with a real Redis, asked by a client that nobody here wrote."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from openapi_spec_validator import validate
from prometheus_client.parser import text_string_to_metric_families

from admin_client import ADMIN_TOKEN, CHANGE, JSON, READER_TOKEN, Client, admin_config, token_files
from fake_engine import FakeEngine, wait_until
from servers import RedisServer, server_binaries, start_redis
from serving import serving
from tierkv.client import AdminClient
from tierkv.errors import ConfigError
from tierkv.messages import Select
from tierkv.sessions import SessionTurn
from tierkv_server.admin import app as admin_app
from tierkv_server.admin import http as admin_http
from tierkv_server.admin import metrics, stats
from tierkv_server.admin.endpoints import ENDPOINTS
from tierkv_server.server import Server

CHUNK = 32
SYSTEM = list(range(4 * CHUNK))
A = [*SYSTEM, *range(1000, 1000 + 3 * CHUNK)]
B = [*SYSTEM, *range(2000, 2000 + 2 * CHUNK)]
C = list(range(5000, 5000 + 5 * CHUNK))
DOCS = Path(__file__).parents[2] / "docs"

pytestmark = pytest.mark.skipif(not server_binaries(), reason="neither Redis nor Valkey is installed")


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = start_redis(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    redis_server.client().flushall()
    return redis_server.url


@pytest.fixture
def server(short_dir: Path, redis_url: str) -> Iterator[Server]:
    with serving(admin_config(short_dir, redis_url)) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Client:
    return Client(server)


@pytest.fixture
def engine(server: Server) -> Iterator[FakeEngine]:
    with FakeEngine(server.config.socket) as engine:
        yield engine


@pytest.fixture
def filled(server: Server, engine: FakeEngine) -> FakeEngine:
    """An engine with A, B and C in its host pool, on the disk and in the Redis: 14 chunks."""
    for seed, tokens in enumerate((A, B, C)):
        engine.put(tokens, seed=seed)
    assert server.service.drain(20)
    fresh(server)
    return engine


def short_id(engine: FakeEngine, tokens: list[int]) -> str:
    return engine.keys(tokens)[-1].hex()[:12]


def settled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows in one order, without their times: Redis says how long ago something was, not when."""
    times = {"last_used", "expires"}
    return sorted(({k: v for k, v in row.items() if k not in times} for row in rows), key=lambda row: row["id"])


def ids(client: Client) -> set[str]:
    return {row["id"] for row in client.get("/v1/prefixes")["prefixes"]}


def families(client: Client) -> dict[str, dict[tuple[str, ...], float]]:
    """Scrape, and return each metric's samples by the values of their labels."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(client.get("/metrics")):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def fresh(server: Server) -> None:
    """Have the next request see what is now, not what was a moment ago."""
    assert server.admin is not None
    server.admin.stats.expire()


# -- what it says is what the store server says


def test_everything_is_as_the_command_line_has_it(server: Server, filled: FakeEngine, client: Client) -> None:
    with AdminClient(server.config.socket) as commands:
        stat, theirs = client.get("/v1/stat"), commands.ask("TKV.STAT")
        assert stat["tiers"] == theirs["tiers"] and stat["engines"] == theirs["engines"]
        assert stat["server"] | {"uptime_s": 0} == theirs["server"] | {"uptime_s": 0}
        listed = client.get("/v1/prefixes")
        assert settled(listed["prefixes"]) == settled(commands.ask("TKV.LS")) and listed["total"] == 3
        usage = client.get("/v1/usage")["usage"]
        assert usage == commands.ask("TKV.USAGE") and {row["tier"] for row in usage} == {"disk", "shared"}
        keys = {filled.ns: [key.hex() for key in filled.keys(A)]}
        located = client.post("/v1/locate", {"keys": keys})["namespaces"]
        assert located == commands.ask("TKV.LOCATE", Select(keys=keys))
    assert located == client.post("/v1/locate", {"tokens": A})["namespaces"]
    assert (located[0]["num_stored"], located[0]["num_chunks"]) == (7, 7)
    assert [row["id"] for row in client.get("/v1/namespaces")["namespaces"]] == [filled.ns]


def test_prefixes_are_filtered_sorted_and_paged(filled: FakeEngine, client: Client) -> None:
    filled.get(B)
    a, b, c = (short_id(filled, tokens) for tokens in (A, B, C))
    assert [row["id"] for row in client.get("/v1/prefixes?sort=tokens")["prefixes"]] == [a, b, c]
    assert client.get("/v1/prefixes?sort=hits&limit=1")["prefixes"][0]["id"] == b
    rest = client.get("/v1/prefixes?sort=tokens&limit=1&offset=2")
    assert (rest["total"], [row["id"] for row in rest["prefixes"]]) == (3, [c])
    assert ids(client) == {a, b, c}
    assert client.get(f"/v1/prefixes?prefix={a[:6]}")["total"] == 1
    assert client.get("/v1/prefixes?ns=0000")["total"] == 0
    filled.forget()
    assert client.get("/v1/prefixes?tier=host")["total"] == 0
    assert client.get("/v1/prefixes?tier=host&tier=disk")["total"] == 3


def test_one_prefix(filled: FakeEngine, client: Client) -> None:
    a = short_id(filled, A)
    row = client.get(f"/v1/prefixes/{a}")
    assert settled([row]) == settled([r for r in client.get("/v1/prefixes")["prefixes"] if r["id"] == a])
    assert "no stored prefix" in client.get("/v1/prefixes/000000000000", 404)["error"]
    assert "hexadecimal" in client.get("/v1/prefixes/xyz", 400)["error"]
    assert client.get(f"/v1/prefixes/{row['key']}")["id"] == a


def test_the_tree_has_every_chunk_once(filled: FakeEngine, client: Client) -> None:
    filled.get(A)
    (space,) = client.get("/v1/tree?sort=hits")["namespaces"]
    assert (space["id"], space["num_chunks"], space["num_hidden"]) == (filled.ns, 14, 0)
    system, other = space["roots"]
    assert (system["start"], system["num_chunks"], system["num_tokens"]) == (0, 4, 4 * CHUNK)
    assert system["num_prefixes"] == 2 and other["id"] == short_id(filled, C)
    assert [child["id"] for child in system["children"]] == [short_id(filled, A), short_id(filled, B)]
    assert [child["start"] for child in system["children"]] == [4, 4]
    payload = filled.shape.payload_nbytes
    assert [root["nbytes"]["host"] for root in space["roots"]] == [9 * payload, 5 * payload]
    assert space["nbytes"]["host"] == 14 * payload
    (cut,) = client.get("/v1/tree?limit=1")["namespaces"]
    assert cut["num_hidden"] == 1 and cut["roots"][0]["num_hidden"] == 2 and cut["roots"][0]["children"] == []


# -- changes


def test_evict_says_first_and_then_does(filled: FakeEngine, client: Client) -> None:
    a, b, c = (short_id(filled, tokens) for tokens in (A, B, C))
    plan = client.post("/v1/evict", {"prefix": a, "dry_run": True})
    assert plan["dry_run"] and plan["removed"] == {"host": 3, "disk": 3, "shared": 3} and ids(client) == {a, b, c}
    done = client.post("/v1/evict", {"prefix": a})
    assert done == plan | {"dry_run": False}
    assert short_id(filled, SYSTEM) not in ids(client) and ids(client) == {b, c}
    assert client.get("/v1/stat")["tiers"][1]["num_entries"] == 11
    assert "nothing stored fits" in client.post("/v1/evict", {"prefix": a}, 404)["error"]
    assert client.post("/v1/evict", {"tokens": C, "tiers": ["shared"]})["removed"] == {"shared": 5}
    assert client.post("/v1/evict", {"ns": filled.ns, "everything": True})["num_removed"] == 11 + 11 + 6
    assert ids(client) == set()


def test_pin_holds_against_eviction_until_it_is_taken_off(filled: FakeEngine, client: Client) -> None:
    a = short_id(filled, A)
    pinned = client.post("/v1/pin", {"prefix": a, "owner": "ops", "seconds": 3600})
    assert pinned["tiers"] == {"disk": 7, "shared": 7} and pinned["num_chunks"] == 7
    assert time.time() + 3500 < pinned["until"] < time.time() + 3700
    assert [pin["owner"] for pin in client.get(f"/v1/prefixes/{a}")["pins"]] == ["ops"]
    stat = client.get("/v1/stat")
    assert all(tier["pinned_nbytes"] > 0 for tier in stat["tiers"] if tier["name"] != "host")
    assert "pinned" in client.post("/v1/evict", {"prefix": a}, 409)["error"]
    assert client.post("/v1/evict", {"prefix": a, "force": True, "dry_run": True})["removed"]["disk"] == 3
    assert client.post("/v1/unpin", {"prefix": a, "owner": "ops"})["tiers"] == {"disk": 7, "shared": 7}
    assert client.post("/v1/evict", {"prefix": a})["removed"]["disk"] == 3


def test_ttl_sets_the_time_of_a_prefix(filled: FakeEngine, client: Client) -> None:
    c = short_id(filled, C)
    done = client.post("/v1/ttl", {"prefix": c, "seconds": 7200})
    assert done["tiers"] == {"disk": 5, "shared": 5}
    expires = client.get(f"/v1/prefixes/{c}")["expires"]
    assert abs(expires - done["until"]) < 2 and time.time() + 7000 < expires < time.time() + 7300


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/evict", {}, 400, ["nothing is named"]),
        ("/v1/evict", {"prefix": "XY"}, 400, ["$.prefix"]),
        ("/v1/evict", {"prefix": "ab", "tokens": [1]}, 400, ["give one of them"]),
        ("/v1/evict", {"tokens": [1], "keys": {"0" * 32: ["0" * 64]}}, 400, ["give one of them"]),
        ("/v1/evict", {"prefx": "ab"}, 400, ["prefx"]),
        ("/v1/evict", {"prefix": "ab", "tiers": ["gpu"]}, 400, ["$.tiers[0]", "gpu"]),
        ("/v1/evict", {"tokens": [1, 2, 3]}, 404, ["no whole chunk"]),
        ("/v1/evict", {"salt": "x"}, 400, ["salt", "tokens"]),
        ("/v1/evict", {"keys": {"0": ["1"]}}, 400, ["$.keys"]),
        ("/v1/evict", {"tokens": [-1]}, 400, ["$.tokens[0]"]),
        ("/v1/evict", {"tokens": [1 << 32]}, 400, ["$.tokens[0]"]),
        ("/v1/locate", {}, 400, ["no prompt"]),
        ("/v1/pin", {"prefix": "ab"}, 400, ["owner"]),
        ("/v1/pin", {"owner": "me", "seconds": 5}, 400, ["no prefix is named"]),
        ("/v1/pin", {"prefix": "ab", "owner": "me", "seconds": 0}, 400, ["/v1/unpin"]),
        ("/v1/pin", {"prefix": "ab", "owner": "me", "seconds": -1}, 400, ["$.seconds"]),
        ("/v1/pin", {"prefix": "ab", "owner": "a b", "seconds": 1}, 400, ["$.owner"]),
        ("/v1/pin", {"prefix": "abab", "owner": "me", "seconds": 9}, 404, ["no stored prefix"]),
        ("/v1/unpin", {"prefix": "abab"}, 404, ["no stored prefix"]),
        ("/v1/ttl", {"prefix": "ab"}, 400, ["seconds"]),
        ("/v1/evict", [], 400, ["array"]),
    ],
)
def test_bad_orders(client: Client, path: str, body: Any, status: int, words: list[str]) -> None:
    error = client.post(path, body, status)["error"]
    assert all(word in error for word in words), error


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/v1/prefixes?limit=0", 400, ["limit"]),
        ("/v1/prefixes?limit=x", 400, ["limit"]),
        ("/v1/prefixes?limit=1&limit=2", 400, ["twice"]),
        ("/v1/prefixes?sort=size", 400, ["sort", "size"]),
        ("/v1/prefixes?namespace=ab", 400, ["'namespace'", "ns"]),
        ("/v1/stat?x=1", 400, ["'x'", "none"]),
        ("/v1/tree?ns=zz", 400, ["ns"]),
        ("/v1/history?since=nan", 400, ["since"]),
        ("/v1/history?since=-1", 400, ["since"]),
        ("/v1/nothing", 404, ["/v1/nothing", "/openapi.json"]),
        ("/v1/evict", 405, ["GET"]),
        ("/../../etc/passwd", 404, ["here"]),
        ("/static/dashboard.js", 404, ["here"]),
    ],
)
def test_bad_questions(client: Client, path: str, status: int, words: list[str]) -> None:
    error = client.get(path, status)["error"]
    assert all(word in error for word in words), error


def test_bodies_are_json_and_bounded(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    assert client.request("POST", "/v1/locate", b"{}", {"content-type": "text/plain"}).status == 415
    assert client.request("POST", "/v1/locate", b"{}", {}).status == 415
    assert "not right" in client.request("POST", "/v1/locate", b"{", JSON).body["error"]
    monkeypatch.setattr(admin_app, "MAX_BODY_NBYTES", 1000)
    assert client.request("POST", "/v1/locate", b" " * 1001, JSON).status == 413
    host, port = client.address
    with socket.create_connection((host, port), timeout=20) as link:  # without saying how much will come
        link.sendall(b"POST /v1/locate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        link.sendall(b"Transfer-Encoding: chunked\r\n\r\n" + b"400\r\n" + b" " * 0x400 + b"\r\n0\r\n\r\n")
        assert link.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_million_tokens_are_not_too_many(filled: FakeEngine, client: Client) -> None:
    (row,) = client.post("/v1/locate", {"tokens": A + [49_999] * (1 << 20)})["namespaces"]
    assert row["num_stored"] == 7 and row["num_chunks"] == 7 + (1 << 15)


# -- the document


def schema_of(document: Mapping[str, Any], method: str, path: str, status: int) -> dict[str, Any]:
    """Return the schema of a reply, which takes no field that it does not name."""
    replies = document["paths"][path][method.lower()]["responses"]
    (content,) = replies[str(status)]["content"].values()
    components = msgspec.json.decode(msgspec.json.encode(document["components"]["schemas"]))
    for part in components.values():
        if "properties" in part:
            part["additionalProperties"] = False
    return {**content["schema"], "components": {"schemas": components}}


def test_the_document_is_openapi_and_has_every_route(client: Client) -> None:
    document = client.get("/openapi.json")
    validate(document)
    listed = {(m.upper(), path) for path, methods in document["paths"].items() for m in methods}
    assert {(e.method, e.path) for e in ENDPOINTS} < listed
    assert listed - {(e.method, e.path) for e in ENDPOINTS} == {
        ("GET", path) for path in ("/", "/dashboard.css", "/dashboard.js", "/icon.svg", "/openapi.json")
    }
    for method, path in listed:
        assert client.request(method, path.replace("{id}", "00"), b"", JSON).status not in (405, 500), path
    names = {p["name"] for p in document["paths"]["/v1/prefixes"]["get"]["parameters"]}
    assert names == {"ns", "prefix", "tenant", "tier", "sort", "limit", "offset"}


def test_replies_are_as_the_document_says(filled: FakeEngine, client: Client, server: Server) -> None:
    filled.get(A)
    fresh(server)
    document = client.get("/openapi.json")
    a = short_id(filled, A)
    client.post("/v1/pin", {"prefix": a, "owner": "ops", "seconds": 60})
    seen = set()

    def check(method: str, path: str, status: int, body: Any = None, route: str = "") -> None:
        answer = client.request(method, path, body and json.dumps(body).encode(), CHANGE)
        assert answer.status == status, answer
        route = route or path.partition("?")[0]
        jsonschema.validate(answer.body, schema_of(document, method, route, status))
        if status == 200:
            seen.add((method, route))

    for route in ("/healthz", "/readyz", "/v1/access", "/v1/stat", "/v1/history", "/v1/namespaces", "/v1/usage"):
        check("GET", route, 200)
    for route in ("/v1/prefixes", "/v1/tree?sort=hits", "/v1/reuse"):
        check("GET", route, 200)
    check("GET", f"/v1/prefixes/{a}", 200, route="/v1/prefixes/{id}")
    check("GET", "/v1/prefixes/0000", 404, route="/v1/prefixes/{id}")
    check("POST", "/v1/locate", 200, {"tokens": A})
    check("POST", "/v1/pin", 200, {"prefix": a, "owner": "me", "seconds": 60})
    check("POST", "/v1/unpin", 200, {"prefix": a})
    check("POST", "/v1/ttl", 200, {"prefix": a, "seconds": 60})
    filled.client.turn(SessionTurn(bytes(16), bytes(16), b"".join(filled.keys(A)), 60.0))
    wait_until(lambda: client.get("/v1/sessions")["total"], what="the session is not known")
    check("GET", "/v1/sessions?tenant=00", 200)
    check("POST", "/v1/sessions/prefetch", 200, {"session": "0000"})
    check("POST", "/v1/sessions/release", 200, {"session": "0000"})
    check("POST", "/v1/sessions/release", 404, {"session": "0000"})
    check("POST", "/v1/evict", 200, {"prefix": a})
    check("POST", "/v1/evict", 404, {"prefix": a})
    check("POST", "/v1/evict", 400, {"prefix": 5})
    assert {(e.method, e.path) for e in ENDPOINTS} - seen == {("GET", "/metrics")}


# -- metrics


def test_metrics_add_up_to_what_was_asked(server: Server, client: Client) -> None:
    asked = 0
    path = server.config.socket
    with FakeEngine(path, engine_id="one") as one, FakeEngine(path, engine_id="two") as two:
        for engine, tokens in ((one, A), (one, A), (two, A), (two, B), (one, C)):
            engine.get(tokens)
            asked += len(tokens) // CHUNK
            engine.put(tokens)
        one.forget()
        one.get(A)
        asked += 7
        fresh(server)
        found = families(client)["tierkv_chunks_total"]
        by_source = {source: found[one.ns, source] for source in ("host", "disk", "shared", "missed")}
        assert sum(by_source.values()) == asked == 7 + 7 + 7 + 6 + 5 + 7
        counters = one.counters + two.counters
        assert by_source == {s: counters[n] for s, n in stats.SOURCES.items()}
        assert by_source["disk"] >= 14 and by_source["missed"] >= 12
        tiers = families(client)
        assert tiers["tierkv_tier_hits_total"]["disk",] == by_source["disk"]
        assert tiers["tierkv_engines"][()] == 2


def test_metrics_do_not_fall_when_engines_leave(server: Server, client: Client) -> None:
    def total() -> float:
        fresh(server)
        return sum(families(client).get("tierkv_chunks_total", {}).values())

    for expected in (7, 20, 33):
        with FakeEngine(server.config.socket, engine_id=f"engine-{expected}") as engine:
            engine.get(A)
            assert total() == expected
            engine.get(B)  # nobody asks it for its counters any more
        wait_until(lambda: not server.service.sessions)
        assert total() == expected + 6
    assert client.get("/v1/stat")["engines"] == []


def test_metrics_are_those_of_the_statistics(server: Server, filled: FakeEngine, client: Client) -> None:
    filled.get(A)
    fresh(server)
    found, stat = families(client), client.get("/v1/stat")
    for tier in stat["tiers"]:
        for column in metrics.TIER_GAUGES:
            assert found[f"tierkv_{column.metric}"][tier["name"],] == tier.get(column.field, 0)
        if tier["name"] != "host":
            for column in metrics.TIER_COUNTERS:
                assert found[f"tierkv_{column.metric}_total"][tier["name"],] == tier[column.field]
        assert found["tierkv_tier_state"]["up", tier["name"]] == 1
    assert found["tierkv_engine_spilled_total"][filled.ns,] == 14
    assert found["tierkv_engine_slots"]["fake-engine", str(stat["engines"][0]["pid"])] == 64
    assert found["tierkv_namespace_info"]["fake/tiny-model", filled.ns] == 1


def test_no_statistic_is_without_a_metric(server: Server, filled: FakeEngine, client: Client) -> None:
    """Who adds a number to the statistics adds its metric, or says here why there is none."""
    stat = client.get("/v1/stat")

    def numbers(row: Mapping[str, Any]) -> set[str]:
        return {name for name, value in row.items() if isinstance(value, int | float) and not isinstance(value, bool)}

    server_fields = {c.field for c in (*metrics.SERVER_GAUGES, *metrics.SERVER_COUNTERS)}
    assert numbers(stat["server"]) - server_fields == {"pid"}
    tier_fields = {c.field for c in (*metrics.TIER_GAUGES, *metrics.TIER_COUNTERS)}
    for tier in stat["tiers"]:
        assert numbers(tier) - tier_fields - {metrics.TIER_SINCE.field} == set()
    assert set(stat["server"]["network"]) == {*metrics.CONNECTIONS, *(c.field for c in metrics.NETWORK_COUNTERS)}
    fleet_fields = {c.field for c in (*metrics.FLEET_GAUGES, *metrics.FLEET_COUNTERS)}
    assert set(stat["server"]["fleet"]) == fleet_fields
    engine_fields = {c.field for c in metrics.ENGINE_GAUGES}
    # what a pool holds is the host tier's row; what it evicted is a counter under another name
    elsewhere = {"pid", "num_entries", "payload_nbytes", "budget", "num_evicted"}
    assert numbers(stat["engines"][0]) - engine_fields == elsewhere


def test_every_metric_is_documented(server: Server, filled: FakeEngine, client: Client) -> None:
    text = (DOCS / "metrics.md").read_text()
    documented = set(re.findall(r"`(tierkv_[a-z_]+)`", text))
    every = list(text_string_to_metric_families(client.get("/metrics")))
    scraped = {f.name if f.type != "counter" else f"{f.name}_total" for f in every}
    own = {name for name in scraped if not name.startswith("tierkv_process_")}
    assert own == {name for name in documented if not name.startswith("tierkv_process_")}
    for column in metrics.ENGINE_COUNTERS:
        assert column.field == "evicted" or f"`{column.field}`" in text


def test_the_openmetrics_format_is_given_to_who_asks(client: Client) -> None:
    answer = client.request("GET", "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.body.endswith("# EOF\n")
    assert client.request("GET", "/metrics").headers["content-type"].startswith("text/plain")


# -- health


def test_health_and_readiness(server: Server, client: Client) -> None:
    assert client.get("/healthz") == {"status": "ok"}
    ready = wait_until(lambda: client.request("GET", "/readyz").body["tiers"] and client.get("/readyz"))
    assert ready["ready"] and not ready["degraded"]
    assert ready["tiers"] == {"disk": {"state": "up"}, "shared": {"state": "up"}}


def test_a_dead_redis_is_a_degraded_server(short_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "INTERVAL_S", 0.1)
    redis_server = start_redis(tmp_path)
    with serving(admin_config(short_dir, redis_server.url, **token_files(tmp_path))) as server:
        nobody, reader = Client(server), Client(server, READER_TOKEN)
        with FakeEngine(server.config.socket) as engine:
            engine.put(A)
            redis_server.kill()
            engine.put(C)  # somebody has to find out
            wait_until(lambda: nobody.get("/readyz")["degraded"])
        said, explained = nobody.get("/readyz"), reader.get("/readyz")
        assert said["ready"] and said["tiers"]["shared"] == {"state": "out"}
        assert said["reasons"] == ["the shared tier is out"]
        assert len(explained["reasons"][0]) > len("the shared tier is out: ") and explained["tiers"]["shared"]["reason"]
        found = families(reader)
        assert found["tierkv_tier_state"]["out", "shared"] == 1
        assert (found["tierkv_tier_up"]["shared",], found["tierkv_tier_up"]["disk",]) == (0, 1)
        since = found["tierkv_tier_out_since_seconds"]
        assert since["shared",] == reader.get("/v1/stat")["tiers"][2]["since"] > 0 == since["disk",]
        plan = Client(server, ADMIN_TOKEN).post("/v1/evict", {"tokens": C, "dry_run": True})
        assert "the shared tier is out" in plan["incomplete"][0]
        answer = Client(server, ADMIN_TOKEN).post("/v1/evict", {"tokens": C}, 503)
        assert "do it again later" in answer["error"] and answer["result"]["removed"]["disk"] == 5


# -- who may


WRONG_TOKEN = "wrong-" + 32 * "w"
ROLES = {"nobody": None, "reader": READER_TOKEN, "admin": ADMIN_TOKEN, "wrong": WRONG_TOKEN}
LOOK, EVICT = "/v1/stat", "/v1/evict"


@pytest.mark.parametrize(
    ("configured", "who", "look", "evict"),
    [
        ("none", "nobody", 200, 404),
        ("none", "wrong", 200, 404),
        ("both", "nobody", 401, 401),
        ("both", "wrong", 401, 401),
        ("both", "reader", 200, 403),
        ("both", "admin", 200, 404),
        ("admin", "nobody", 200, 401),
        ("admin", "wrong", 401, 401),
        ("admin", "admin", 200, 404),
        ("reader", "nobody", 401, 403),
        ("reader", "reader", 200, 403),
    ],
)
def test_roles_on_the_loopback(
    short_dir: Path, tmp_path: Path, configured: str, who: str, look: int, evict: int
) -> None:
    """404: it was allowed, and there is nothing to evict."""
    files = token_files(tmp_path)
    if configured != "both":
        files = {name: path for name, path in files.items() if name.startswith(configured)}
    with serving(admin_config(short_dir, **files)) as server:
        client = Client(server, ROLES[who])
        client.get(LOOK, look)
        client.get("/metrics", look)
        client.get("/healthz")
        client.post(EVICT, {"prefix": "abab"}, evict)
        if look == 200:
            access = client.get("/v1/access")
            assert access == {"may_read": True, "may_change": False, "asks_token": bool(files)} | (
                {"may_change": evict == 404} if files else {}
            )


def test_a_refusal_says_how_and_not_more(short_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(admin_config(short_dir, **token_files(tmp_path))) as server:
        answer = Client(server).request("GET", LOOK)
        assert answer.headers["www-authenticate"].startswith("Bearer ")
        assert "Authorization: Bearer" in answer.body["error"]
        wrong = Client(server, WRONG_TOKEN).request("GET", LOOK)
        assert "nobody's" in wrong.body["error"]
        assert not any(token in str(wrong) + caplog.text for token in (WRONG_TOKEN, READER_TOKEN, ADMIN_TOKEN))
        assert "1 wrong token" in caplog.text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (CHANGE, 404),
        (CHANGE | {"origin": "http://{host}"}, 404),
        (CHANGE | {"sec-fetch-site": "same-origin"}, 404),
        (JSON, 403),
        (CHANGE | {"origin": "http://evil.example"}, 403),
        (CHANGE | {"origin": "null"}, 403),
        (CHANGE | {"origin": "http://localhost:1"}, 403),
        (CHANGE | {"sec-fetch-site": "cross-site"}, 403),
        (CHANGE | {"sec-fetch-site": "same-site"}, 403),
        (CHANGE | {"host": "evil.example"}, 421),
        (CHANGE | {"host": "127.0.0.1.evil.example:9109"}, 421),
        ({"content-type": "text/plain", "x-tierkv-admin": "1"}, 415),
    ],
)
def test_pages_of_others_cannot_change_anything(client: Client, headers: dict[str, str], status: int) -> None:
    host = f"{client.address[0]}:{client.address[1]}"
    sent = {name: value.replace("{host}", host) for name, value in headers.items()}
    answer = client.request("POST", EVICT, b'{"prefix": "abab"}', sent)
    assert answer.status == status, answer
    assert not [name for name in answer.headers if name.lower().startswith("access-control")]


def test_pages_of_others_cannot_look(client: Client) -> None:
    for path in (LOOK, "/metrics", "/v1/tree"):
        assert client.request("GET", path, headers={"origin": "http://evil.example"}).status == 403
        assert client.request("GET", path, headers={"sec-fetch-site": "cross-site"}).status == 403
    for path in (LOOK, "/healthz", "/", "/openapi.json", "/dashboard.js"):
        assert client.request("GET", path, headers={"host": "evil.example"}).status == 421
        assert client.request("GET", path, headers={"host": "localhost"}).status == 200
    asked = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    answer = client.request("OPTIONS", EVICT, headers=asked)
    assert answer.status == 405 and "access-control-allow-origin" not in answer.headers


def test_every_reply_has_the_headers_that_browsers_act_on(client: Client) -> None:
    for path in ("/", "/dashboard.js", LOOK, "/v1/nothing", "/metrics"):
        headers = client.request("GET", path).headers
        assert "default-src 'none'" in headers["content-security-policy"], path
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"
        assert "set-cookie" not in headers and "server" not in headers


def make_certificate(directory: Path) -> dict[str, Path]:
    """Make a certificate for 127.0.0.1 and return the fields of a ListenConfig that name it."""
    cert, key = directory / "server.pem", directory / "server.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-out", str(cert), "-keyout", str(key)], check=True, capture_output=True)
    key.chmod(0o600)
    return {"tls_cert": cert, "tls_key": key}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


def test_off_the_loopback_there_are_tls_and_tokens(
    short_dir: Path, tmp_path: Path, certificate: dict[str, Path]
) -> None:
    config = admin_config(short_dir, listen="0.0.0.0:0", **token_files(tmp_path), **certificate)
    context = ssl.create_default_context(cafile=str(certificate["tls_cert"]))
    with serving(config) as server:
        assert server.admin is not None
        clients = [Client(server, token, context) for token in (None, READER_TOKEN, ADMIN_TOKEN)]
        for client in clients:
            client.address = ("127.0.0.1", server.admin.address[1])
        nobody, reader, admin = clients
        nobody.get("/healthz")
        nobody.get(LOOK, 401)
        reader.get(LOOK)
        assert reader.request("GET", LOOK, headers={"host": "node-7.cluster:9109"}).status == 200
        reader.post(EVICT, {"prefix": "abab"}, 403)
        admin.post(EVICT, {"prefix": "abab"}, 404)
        with socket.create_connection(nobody.address, timeout=20) as plain:
            plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert not plain.recv(100).startswith(b"HTTP/")


def test_a_reload_takes_new_tokens_and_certificates_up(
    short_dir: Path, tmp_path: Path, certificate: dict[str, Path]
) -> None:
    files = token_files(tmp_path)
    mine = {"tls_cert": tmp_path / "server.pem", "tls_key": tmp_path / "server.key"}
    for name, path in mine.items():
        path.touch(mode=0o600)
        path.write_bytes(certificate[name].read_bytes())
    with serving(admin_config(short_dir, listen="0.0.0.0:0", **files, **mine)) as server:
        assert server.admin is not None
        old = ssl.create_default_context(cafile=str(certificate["tls_cert"]))
        client = Client(server, READER_TOKEN, old)
        client.address = ("127.0.0.1", server.admin.address[1])
        client.get(LOOK)
        make_certificate(tmp_path)
        files["reader_token_file"].write_text("another-" + READER_TOKEN)
        server.reconfigure(server.config)
        with pytest.raises(ssl.SSLError):
            client.get(LOOK)
        renewed = Client(server, READER_TOKEN, ssl.create_default_context(cafile=str(mine["tls_cert"])))
        renewed.address = client.address
        renewed.get(LOOK, 401)
        renewed.token = "another-" + READER_TOKEN
        renewed.get(LOOK)
        mine["tls_cert"].write_text("no certificate")
        with pytest.raises(ConfigError):
            server.reconfigure(server.config)
        renewed.get(LOOK)  # with what there was before


@pytest.mark.parametrize(
    ("listen", "parts", "words"),
    [
        ("0.0.0.0:0", "", ["0.0.0.0:0", "no token", "admin_token_file"]),
        ("0.0.0.0:0", "tokens", ["no certificate", "tls_cert"]),
        ("0.0.0.0:0", "certificate", ["no token"]),
        ("nowhere.invalid:1", "", ["nowhere.invalid:1", "cannot be used"]),
        ("203.0.113.7:0", "tokens certificate", ["203.0.113.7:0", "cannot be used"]),
    ],
)
def test_addresses_that_are_refused_at_start(
    short_dir: Path, tmp_path: Path, certificate: dict[str, Path], listen: str, parts: str, words: list[str]
) -> None:
    fields = (token_files(tmp_path) if "tokens" in parts else {}) | (certificate if "certificate" in parts else {})
    with pytest.raises(ConfigError) as error:
        Server(admin_config(short_dir, listen=listen, **fields))
    assert all(word in str(error.value) for word in words), error.value
    with serving(admin_config(short_dir)) as server:  # nothing of the one before is left
        Client(server).get("/healthz")


def test_a_port_that_is_taken_is_refused(short_dir: Path, client: Client) -> None:
    with pytest.raises(ConfigError, match=f"{client.address[1]}.*in use"):
        Server(admin_config(short_dir / "other", listen=f"127.0.0.1:{client.address[1]}"))


def test_no_admin_server_without_its_table(short_dir: Path) -> None:
    config = msgspec.structs.replace(admin_config(short_dir), http=None)
    with serving(config) as server:
        assert server.admin is None
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("tierkv-admin")]


# -- slow and many


def test_a_slow_client_is_cut_and_holds_nobody_up(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_http, "PATIENCE_S", 0.4)
    monkeypatch.setattr(admin_http, "_LOOK_S", 0.1)
    monkeypatch.setattr(admin_app, "BODY_TIMEOUT_S", 0.4)
    monkeypatch.setattr(admin_http, "MAX_CONNECTIONS", 8)
    with serving(admin_config(short_dir)) as server, contextlib.ExitStack() as held:
        client = Client(server)
        mute = [held.enter_context(socket.create_connection(client.address, timeout=20)) for _ in range(4)]
        half = [held.enter_context(socket.create_connection(client.address, timeout=20)) for _ in range(4)]
        for link in half:
            link.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        waiting = [held.enter_context(socket.create_connection(client.address, timeout=20)) for _ in range(8)]
        seen: list[int] = []

        def all_cut() -> bool:
            assert server.admin is not None
            seen.append(server.admin.num_connections)
            return max(seen) > 0 and not seen[-1]

        wait_until(all_cut)
        assert max(seen) <= 8
        assert client.get("/healthz") == {"status": "ok"}
        for link in mute + half + waiting:
            with contextlib.suppress(ConnectionResetError):
                assert link.recv(1) == b""
        with socket.create_connection(client.address, timeout=20) as link:
            link.sendall(b"POST /v1/locate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
            link.sendall(b"Content-Length: 100\r\n\r\n{")
            assert link.recv(100).startswith(b"HTTP/1.1 408 ")


def test_a_client_that_takes_no_reply_is_cut(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_http, "PATIENCE_S", 0.5)
    monkeypatch.setattr(admin_http, "_LOOK_S", 0.1)
    with serving(admin_config(short_dir)) as server, socket.socket() as link:
        client = Client(server)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.settimeout(20)
        link.connect(client.address)
        link.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000)

        def connections() -> int:
            assert server.admin is not None
            return server.admin.num_connections

        wait_until(lambda: connections() == 1)
        wait_until(lambda: connections() == 0)
        with contextlib.suppress(ConnectionResetError):
            while link.recv(1 << 20):
                pass
        client.get("/healthz")


@pytest.mark.parametrize("listen", ["localhost:0", "[::1]:0", "127.0.0.2:0"])
def test_every_name_of_the_loopback_will_do(short_dir: Path, listen: str) -> None:
    with serving(admin_config(short_dir, listen=listen)) as server:
        client = Client(server)
        assert client.get("/v1/stat")["server"]["pid"] and client.get("/v1/access")["asks_token"] is False
        with socket.create_connection(client.address, timeout=20) as link:  # a probe of the old kind names no host
            link.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            assert link.recv(100).startswith(b"HTTP/1.1 200 ")


def test_garbage_and_large_heads_are_refused(client: Client) -> None:
    for sent in (b"\x16\x03\x01\x02\x00\x01\x00" * 10 + b"\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000):
        with socket.create_connection(client.address, timeout=20) as link:
            with contextlib.suppress(OSError):
                link.sendall(sent)
            with contextlib.suppress(ConnectionResetError):
                assert link.recv(200)[:12] in (b"", b"HTTP/1.1 400")
    client.get("/healthz")


def test_calls_are_bounded_and_serving_goes_on(
    server: Server, filled: FakeEngine, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many ask for a listing that hangs: engines are served, probes answered, the rest sent away."""
    monkeypatch.setattr(admin_app, "MAX_CALLS", 6)
    monkeypatch.setattr(admin_app, "CALL_TIMEOUT_S", 1.5)
    go, num_running = threading.Event(), []

    def hang(select: Select, offset: int) -> dict[str, Any]:
        num_running.append(1)
        go.wait(30)
        return {"total": 0, "prefixes": []}

    monkeypatch.setattr(server.commands.inspector, "page", hang)
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda: answers.append(client.request("GET", "/v1/prefixes").status)) for _ in range(10)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(answers) == 4)  # more than may wait
    assert answers == [503] * 4 and len(num_running) == admin_app.NUM_THREADS
    assert client.get("/healthz") == {"status": "ok"} and client.get("/readyz")["ready"]
    filled.forget()
    assert filled.get(A) == filled.expected(A, seed=0)
    wait_until(lambda: len(answers) == 10)  # nobody waits longer than the limit
    assert answers == [503] * 10
    go.set()
    for thread in threads:
        thread.join(20)
    monkeypatch.undo()
    wait_until(lambda: client.request("GET", "/v1/prefixes").status == 200)


def test_a_silent_engine_costs_one_wait_for_all(server: Server, filled: FakeEngine, client: Client) -> None:
    asked = []
    inspector = server.commands.inspector
    stat = inspector.stat
    assert server.admin is not None
    server.admin.stats.asks = lambda: asked.append(1) or stat()
    filled.mute = True
    fresh(server)
    rows: list[Any] = []
    threads = [threading.Thread(target=lambda: rows.append(client.get("/v1/stat"))) for _ in range(6)]
    for thread in threads:
        thread.start()
    assert client.get("/healthz") == {"status": "ok"}
    for thread in threads:
        thread.join(30)
    filled.mute = False
    assert len(rows) == 6 and {row["server"]["num_silent_engines"] for row in rows} == {1}
    assert len(asked) <= 3  # the history's sampler may have asked too


def test_an_engine_that_does_not_answer_makes_an_eviction_incomplete(filled: FakeEngine, client: Client) -> None:
    filled.mute = True
    answer = client.post("/v1/evict", {"tokens": C}, 503)
    filled.mute = False
    assert "fake-engine did not answer" in answer["error"] and answer["result"]["removed"]["disk"] == 5
    # what it was told while it did not answer it does later
    wait_until(lambda: not client.post("/v1/locate", {"tokens": C})["namespaces"][0]["num_stored"])


# -- history, start and stop


def test_history_is_sampled_and_bounded(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "INTERVAL_S", 0.05)
    monkeypatch.setattr(stats, "NUM_SAMPLES", 20)
    monkeypatch.setattr(stats, "MAX_AGE_S", 0.0)
    with serving(admin_config(short_dir)) as server, FakeEngine(server.config.socket) as engine:
        client = Client(server)
        engine.put(A)
        engine.get(A)
        wait_until(lambda: client.get("/v1/history")["chunks"]["host"][-1:] == [7])
        wait_until(lambda: len(client.get("/v1/history")["times"]) == 20)
        history = client.get("/v1/history")
        columns = [history["engines"], *history["chunks"].values(), *history["tiers"]["disk"].values()]
        assert {len(column) for column in columns} == {len(history["times"])} == {20}
        assert history["times"] == sorted(history["times"])
        assert history["tiers"]["disk"]["nbytes"][-1] == client.get("/v1/stat")["tiers"][1]["nbytes"] > 0
        newest = history["times"][-1]
        later = wait_until(lambda: client.get(f"/v1/history?since={newest}")["times"])
        assert later[0] > newest and len(later) < 20


@pytest.mark.usefixtures("no_leaks")
def test_nothing_is_left_of_it(short_dir: Path) -> None:
    with serving(admin_config(short_dir)) as server:
        client = Client(server)
        with socket.create_connection(client.address) as idle:
            client.get("/v1/stat")
            assert [t for t in threading.enumerate() if t.name.startswith("tierkv-admin")]
            idle.sendall(b"GET")
    assert not [t for t in threading.enumerate() if t.name.startswith("tierkv-admin")]
    with pytest.raises(OSError):
        client.get("/healthz")
