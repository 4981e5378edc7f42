"""The operator's verbs against real servers, with LMDB and with a real Redis, and on what no server runs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors import safe_open

from cli_tools import Said, as_json, refused, tierkv
from fake_engine import FakeEngine, make_namespace, payload_bytes, wait_until
from servers import RedisServer, server_binaries, start_redis
from serving import make_config, serving
from tierkv.admin_client import AdminClient
from tierkv.cli import discover, top
from tierkv.keys import tenant_digest
from tierkv.server_config import QuotaConfig
from tierkv.tiers.base import Ref
from tierkv_server.scans import MAX_SCANS
from tierkv_server.server import Server

CHUNK = 32
SYSTEM = list(range(4 * CHUNK))
A = [*SYSTEM, *range(1000, 1000 + 3 * CHUNK)]
B = [*SYSTEM, *range(2000, 2000 + 2 * CHUNK)]
C = list(range(5000, 5000 + 5 * CHUNK))
needs_redis = pytest.mark.skipif(not server_binaries(), reason="neither Redis nor Valkey is installed")


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("TIERKV_"):
            monkeypatch.delenv(name)


@pytest.fixture
def server(short_dir: Path) -> Iterator[Server]:
    with serving(make_config(short_dir)) as server:
        yield server


@pytest.fixture
def at(server: Server) -> tuple[str, Path]:
    """The options that name the server."""
    return ("--server", server.config.socket)


@pytest.fixture
def engine(server: Server) -> Iterator[FakeEngine]:
    with FakeEngine(server.config.socket) as engine:
        for seed, tokens in enumerate((A, B, C)):
            engine.put(tokens, seed=seed)
        yield engine


@pytest.fixture
def redis(short_dir: Path) -> Iterator[RedisServer]:
    server = start_redis(short_dir)
    yield server
    server.kill()


def name(engine: FakeEngine, tokens: list[int], salt: str = "") -> str:
    return engine.keys(tokens, salt)[-1].hex()[:12]


def drain(server: Server) -> None:
    with AdminClient(server.config.socket) as client:
        assert client.call("TKV.DRAIN", 10) == b"1"


def text(tokens: list[int]) -> str:
    return " ".join(map(str, tokens))


# -- on an empty store, and on none


@pytest.mark.parametrize(
    "args, code, words",
    [
        (["ns"], 1, ["no namespace yet"]),
        (["ns", "--namespace", "ab"], 1, ["'ab'"]),
        (["du"], 1, ["nothing that fits"]),
        (["show", "12ab"], 1, ["'12ab'", "tierkv ls"]),
        (["show", "--tokens", "1 2 3"], 1, ["no whole chunk"]),
        (["tree"], 1, ["nothing that fits"]),
        (["tree", "12ab"], 1, ["'12ab'"]),
        (["ls", "--pinned"], 1, ["no stored prefix fits"]),
        (["pin", "12ab", "--for", "1h"], 1, ["'12ab'"]),
        (["unpin", "12ab"], 1, ["'12ab'"]),
        (["ttl", "12ab", "--in", "1h"], 1, ["nothing stored fits"]),
        (["evict", "--unused-for", "1h", "--yes"], 1, ["nothing stored fits"]),
        (["evict", "--free", "1GiB", "--yes"], 1, ["nothing stored fits"]),
        (["verify"], 1, ["nothing that fits"]),
        (["verify", "12ab"], 1, ["'12ab'"]),
        (["warm", "12ab"], 4, ["no shared tier", "shared.url"]),
        (["events", "--once"], 1, ["no event"]),
        (["slow"], 1, ["nothing was slow"]),
        (["export", "/tmp/none.safetensors", "12ab"], 1, ["'12ab'"]),
    ],
)
def test_on_an_empty_store(at: tuple[str, Path], args: list[str], code: int, words: list[str]) -> None:
    refused(tierkv(*args, *at), code, *words)
    quiet = tierkv(*args, *at, "--quiet")
    assert quiet.code == code and not quiet.out and (not quiet.err or code != 1)


def test_an_empty_store_as_json(at: tuple[str, Path]) -> None:
    assert as_json("ns", *at, code=1) == {"namespaces": []}
    assert as_json("du", *at, code=1)["rows"] == []
    assert as_json("tree", *at, code=1) == {"namespaces": []}
    assert as_json("ls", "--sort", "hits", *at, code=1) == {"prefixes": [], "total": 0}
    assert as_json("verify", *at, code=1)["num_total"] == 0
    assert as_json("slow", *at, code=1)["operations"] == []
    assert as_json("top", "--once", "--interval", "0.2", *at)["hottest"] == []


@pytest.mark.parametrize(
    "args, words",
    [
        (["show"], ["no prefix is named"]),
        (["show", "xyz"], ["'xyz'", "hexadecimal"]),
        (["show", "12", "--tokens", "1"], ["give one of them"]),
        (["du", "--by", "colour"], ["colour"]),
        (["ls", "--older-than", "soon"], ["'soon'", "7d"]),
        (["ls", "--min-size", "big"], ["'big'", "8GiB"]),
        (["ls", "--unused-for", "0"], ["'0'", "no time"]),
        (["pin", "12ab"], ["--for"]),
        (["pin", "12ab", "--for", "1h", "--owner", "two words"], ["'two words'"]),
        (["pin", "12ab", "--for", "1h", "--tier", "host"], ["host"]),
        (["ttl", "12ab"], ["--in", "--clear"]),
        (["ttl", "12ab", "--in", "1h", "--clear"], ["either"]),
        (["evict", "--unused-for", "1h", "--namespace", "zz"], ["'zz'"]),
        (["verify", "--rate", "fast"], ["'fast'"]),
        (["verify", "--tier", "host"], ["host"]),
        (["top", "--json"], ["--once"]),
        (["import", "/no/such/file"], ["cannot be read"]),
        (["export", "/tmp/x"], ["ID"]),
        (["ls", "--disk", "/no/such", "--server", "x"], ["--server", "one of them"]),
        (["ls", "--disk", "/no/such"], ["no disk directory"]),
        (["ls", "--redis", "http://x"], ["http://x"]),
    ],
)
def test_bad_usage(args: list[str], words: list[str]) -> None:
    refused(tierkv(*args), 2, *words)


@pytest.mark.parametrize(
    "args",
    [["ns"], ["du"], ["tree"], ["show", "1a"], ["ls"], ["pin", "1a", "--for", "1h"], ["unpin", "1a"], ["verify"],
     ["ttl", "1a", "--clear"], ["warm", "1a"], ["events"], ["slow"], ["top"], ["export", "/tmp/x", "1a"],
     ["evict", "--free", "1", "--yes"]],
)  # fmt: skip
def test_no_server(args: list[str], tmp_path: Path) -> None:
    refused(tierkv(*args, "--server", tmp_path / "none.sock"), 3, "none.sock", "tierkv serve")


# -- looking


def test_ns_and_du(at: tuple[str, Path], engine: FakeEngine) -> None:
    with FakeEngine(at[1], make_namespace("fake/other", chunk_tokens=64)) as other:
        other.put(A[: 4 * CHUNK], salt="alice")
        spaces = {row["id"]: row for row in as_json("ns", *at)["namespaces"]}
        assert set(spaces) == {engine.ns, other.ns}
        row = spaces[engine.ns]
        assert row["model"] == "fake/tiny-model" and row["num_chunks"] == 14
        assert row["chunks"] == {"host": 14, "disk": 14}
        assert row["nbytes"]["host"] == 14 * engine.shape.payload_nbytes and "FullAttentionSpec" in row["layout"]
        assert [r["id"] for r in as_json("ns", "--namespace", other.ns[:8], *at)["namespaces"]] == [other.ns]
        found = as_json("du", *at)
        assert found["total"]["num_chunks"] == 16 and {r["namespace"] for r in found["rows"]} == set(spaces)
        tenants = {r["tenant"]: r for r in as_json("du", "--by", "tenant", "--tier", "disk", *at)["rows"]}
        assert set(tenants) == {"", tenant_digest(b"alice").hex()}
        assert tenants[""]["chunks"] == {"disk": 14}
        only = as_json("du", "--tenant", tenant_digest(b"alice").hex()[:6], "--tier", "disk", *at)
        assert only["total"]["chunks"] == {"disk": 2}
        depth = as_json("du", "--by", "depth", "--namespace", engine.ns, *at)["rows"]
        # SYSTEM's 4 chunks are there once, A goes on with 3, B with 2; C has 5
        assert [(r["from_token"], r["to_token"], r["num_chunks"]) for r in depth] == [
            (0, CHUNK, 2),
            (CHUNK, 2 * CHUNK, 2),
            (2 * CHUNK, 4 * CHUNK, 4),
            (4 * CHUNK, 8 * CHUNK, 6),
        ]
        assert sum(sum(r["nbytes"].values()) for r in depth) == sum(row["nbytes"].values())
        shown = tierkv("du", "--by", "tenant", "--limit", "1", *at).out
        assert "total" in shown and "1 of " in shown


def test_show(at: tuple[str, Path], engine: FakeEngine) -> None:
    keys = engine.keys(A)
    tierkv("pin", name(engine, SYSTEM), "--for", "1h", "--owner", "ops", *at)
    tierkv("ttl", name(engine, A), "--in", "2h", *at)
    found = as_json("show", name(engine, A), *at)
    assert [chunk["key"] for chunk in found["chunks"]] == [key.hex() for key in keys]
    assert (found["num_stored"], found["depth_chunks"]) == (7, 7)
    first, last = found["chunks"][0], found["chunks"][-1]
    assert first["tiers"] == ["host", "disk"] and first["pins"][0]["owner"] == "ops" and last["pins"] == []
    assert found["chunks"][3]["num_children"] == 2
    assert first["expires"] == {"disk": 0.0} and 7100 < last["expires"]["disk"] - time.time() < 7300
    assert found["chunks"][1]["parent"] == keys[0].hex()
    assert as_json("show", "--tokens", text(A), *at)["id"] == found["id"]
    shown = tierkv("show", keys[-1].hex(), *at).out
    assert "ops:in" in shown and f"{7 * CHUNK:,} tokens" in shown and "in 1 h" in shown
    tierkv("evict", name(engine, A), *at)
    assert as_json("show", name(engine, B), *at)["num_stored"] == 6


def test_one_is_no_plural(at: tuple[str, Path], engine: FakeEngine) -> None:
    prompt = [77] * CHUNK
    engine.put(prompt)
    assert f"{name(engine, prompt)}: 1 chunk of 32 tokens, " in tierkv("show", name(engine, prompt), *at).out
    assert "\n1 record sound " in "\n" + tierkv("verify", name(engine, prompt), *at).out
    assert ": 1 chunk\n" in tierkv("pin", name(engine, prompt), "--for", "1h", *at).out


def test_show_says_what_is_missing_before_it(at: tuple[str, Path], engine: FakeEngine, server: Server) -> None:
    key = engine.keys(C)[0]
    engine.forget()
    server.service.disk.evict(engine.namespace.ns_id(), [Ref(key, key)])
    shown = tierkv("show", name(engine, C), *at).out
    assert "1 chunk before the first of these is missing: it cannot be hit until that is back" in shown


def test_tree(at: tuple[str, Path], engine: FakeEngine) -> None:
    (space,) = as_json("tree", *at)["namespaces"]
    assert space["num_chunks"] == 14
    run = next(r for r in space["roots"] if r["children"])
    assert run["id"] == name(engine, SYSTEM) and run["num_chunks"] == 4 and run["num_prefixes"] == 2
    assert {child["id"] for child in run["children"]} == {name(engine, A), name(engine, B)}
    lines = tierkv("tree", *at).out.splitlines()
    assert len(lines) == 5 and lines[1].startswith("├─ ") and name(engine, SYSTEM) in lines[1]
    assert lines[2].startswith("│  ├─ ") and lines[3].startswith("│  └─ ") and lines[4].startswith("└─ ")
    (part,) = as_json("tree", name(engine, A), *at)["namespaces"]
    assert part["num_chunks"] == 3 and part["roots"][0]["id"] == name(engine, A)
    cut = tierkv("tree", "--limit", "1", *at).out
    assert cut.count("─ ") == 3 and "2 more" in cut and "1 more" in cut


def test_ls_filters_and_order(at: tuple[str, Path], engine: FakeEngine) -> None:
    engine.get(C)
    ids = {key: name(engine, tokens) for key, tokens in (("a", A), ("b", B), ("c", C))}

    def listed(*args: str) -> list[str]:
        return [row["id"] for row in as_json("ls", *args, *at)["prefixes"]]

    assert listed("--sort", "hits")[0] == ids["c"]
    assert listed("--sort", "tokens") == [ids["a"], ids["b"], ids["c"]]
    assert listed("--sort", "nbytes", "--limit", "2") == [ids["a"], ids["b"]]
    assert as_json("ls", "--limit", "1", *at)["total"] == 3
    sizes = {row["id"]: sum(row["nbytes"].values()) for row in as_json("ls", *at)["prefixes"]}
    assert listed("--min-size", str(sizes[ids["a"]])) == [ids["a"]]
    assert listed("--max-size", str(sizes[ids["c"]])) == [ids["c"]]
    assert set(listed("--used-within", "1h")) == set(listed("--newer-than", "1h")) == set(ids.values())
    for nothing in (["--unused-for", "1h"], ["--older-than", "1h"]):
        refused(tierkv("ls", *nothing, *at), 1, "no stored prefix fits")
    tierkv("pin", ids["b"], "--for", "1h", *at)
    assert listed("--pinned") == [ids["b"]] and set(listed("--not-pinned")) == {ids["a"], ids["c"]}
    assert "+ pinned" in tierkv("ls", *at).out
    assert "1 of 3 prefixes shown" in tierkv("ls", "--limit", "1", *at).out
    engine.put(B[:CHUNK], salt="alice")
    alice = tenant_digest(b"alice").hex()
    assert listed("--tenant", alice[:8], "--tier", "disk") == [name(engine, B[:CHUNK], "alice")]


# -- pins and times to live


def test_pin_unpin(at: tuple[str, Path], engine: FakeEngine) -> None:
    plan = as_json("pin", name(engine, A), "--for", "1h", "--owner", "me", "--dry-run", *at)
    assert plan["dry_run"] and plan["stored"] == {"disk": 7} and plan["tiers"] == {}
    assert plan["nbytes"]["disk"] > 0 and not as_json("ls", "--pinned", *at, code=1)["prefixes"]
    done = as_json("pin", name(engine, A), "--for", "1h", "--owner", "me", *at)
    assert done["tiers"] == {"disk": 7} and 3500 < done["until"] - time.time() < 3700
    refused(tierkv("evict", name(engine, A), *at), 4, "pinned", "--force")
    rest = as_json("evict", "--namespace", engine.ns, "--yes", *at)
    assert rest["num_pinned"] == 7 and rest["removed"] == {"host": 7, "disk": 7}
    assert set(rest["pinned"]) == {key.hex()[:12] for key in engine.keys(A)}
    refused(tierkv("unpin", name(engine, A), "--owner", "you", *at), 1, "'you'")
    assert as_json("unpin", name(engine, A), *at)["tiers"] == {"disk": 7}
    refused(tierkv("unpin", name(engine, A), *at), 1, "there is no pin")
    as_json("pin", name(engine, A), "--for", "1h", *at)
    assert as_json("evict", name(engine, A), "--force", *at)["removed"]["disk"] == 7


def test_a_pin_beyond_the_quota_is_said(short_dir: Path) -> None:
    config = make_config(short_dir)
    nbytes = 3 * 8192 + 100  # a record of 4 KiB takes two pages: three fit
    config = msgspec.structs.replace(config, quota=QuotaConfig(pinned_bytes=nbytes))
    with serving(config), FakeEngine(config.socket) as engine:
        engine.put(A)
        at = ("--server", config.socket)
        said = tierkv("pin", name(engine, A), "--for", "1h", *at)
        assert "Pinned" in said.out
        refused(said, 4, "3 of 7 on disk", "pinned_bytes")
        engine.put(C)
        refused(tierkv("pin", name(engine, C), "--for", "1h", *at), 4, "no chunk could be pinned", "tierkv stat")


def test_ttl(at: tuple[str, Path], engine: FakeEngine) -> None:
    done = as_json("ttl", name(engine, A), "--in", "1h", *at)
    assert done["tiers"] == {"disk": 3}, "what B shares keeps its time"
    assert as_json("ttl", "--tokens", text(A), "--clear", *at)["until"] == 0
    assert as_json("show", name(engine, A), *at)["chunks"][-1]["expires"] == {"disk": 0.0}
    engine.forget()
    as_json("ttl", name(engine, A), "--in", "200ms", *at)
    wait_until(lambda: name(engine, A) not in [r["id"] for r in as_json("ls", *at)["prefixes"]])
    assert len(engine.get(A)) == 4


def test_lifetimes_are_not_for_host_pools(at: tuple[str, Path], engine: FakeEngine) -> None:
    tierkv("evict", name(engine, C), "--tier", "disk", *at)
    refused(tierkv("pin", name(engine, C), "--for", "1h", *at), 1, "no tier that a pin holds in")


# -- evict


def test_evict_what_was_not_used(at: tuple[str, Path], engine: FakeEngine) -> None:
    time.sleep(1.0)
    engine.get(A)
    engine.forget()
    engine.get(B)  # reads the disk: B's chunks and the shared ones are used
    args = ("evict", "--unused-for", "900ms")
    refused(tierkv(*args, *at), 2, "all that fits", "--yes")
    plan = as_json(*args, "--dry-run", *at)
    done = as_json(*args, "--yes", *at)
    assert done == plan | {"dry_run": False}
    assert set(done["prefixes"]) == {name(engine, A), name(engine, C)}
    assert done["removed"] == {"host": 0, "disk": 8}, "the chunks that B shares with A stay"
    assert [row["id"] for row in as_json("ls", *at)["prefixes"]] == [name(engine, B)]


def test_evict_what_is_old_within_a_tenant(at: tuple[str, Path], engine: FakeEngine) -> None:
    engine.put(C, salt="alice")
    engine.forget()
    alice = tenant_digest(b"alice").hex()
    refused(tierkv("evict", "--older-than", "1h", "--tenant", alice, "--yes", *at), 1, "nothing stored fits")
    time.sleep(0.1)
    done = as_json("evict", "--older-than", "50ms", "--tenant", alice[:10], "--yes", *at)
    assert done["removed"]["disk"] == 5 and len(as_json("ls", *at)["prefixes"]) == 3
    assert engine.get(C) == engine.expected(C, seed=2)


def test_evict_to_free_bytes(at: tuple[str, Path], engine: FakeEngine) -> None:
    engine.forget()
    for tokens in (C, A, B):  # from now on B is the last one used, C the first
        engine.get(tokens)
        engine.forget()
        time.sleep(0.02)
    cost = as_json("du", *at)["total"]["nbytes"]["disk"] // 14
    done = as_json("evict", "--free", str(3 * cost), "--tier", "disk", "--yes", *at)
    assert done["removed"] == {"disk": 3} and done["nbytes"] == {"disk": 3 * cost}
    assert as_json("show", name(engine, C[: 2 * CHUNK]), *at)["num_stored"] == 2, "leaves of the oldest went first"
    as_json("pin", name(engine, A), "--for", "1h", *at)
    done = as_json("evict", "--free", "1GiB", "--tier", "disk", "--yes", *at)
    assert done["removed"] == {"disk": 4}, "C's rest and B's own: what A needs is pinned"
    assert len(engine.get(A)) == 7


@needs_redis
def test_other_nodes_hear_of_an_eviction(short_dir: Path, redis: RedisServer) -> None:
    one, two = (make_config(short_dir / n, shared_url=redis.url) for n in ("one", "two"))
    with serving(one) as first, serving(two), FakeEngine(one.socket) as engine, FakeEngine(two.socket) as other:
        engine.put(A)
        drain(first)
        assert len(other.get(A)) == 7 and set(other.last_sources) == {"shared"}
        time.sleep(0.02)
        done = as_json("evict", "--older-than", "10ms", "--yes", "--server", one.socket)
        assert done["removed"]["shared"] == done["removed"]["disk"] == 7
        wait_until(lambda: tierkv("ls", "--server", two.socket).code == 1, what="the other node did not hear of it")
        assert other.get(A) == []


# -- verify


def damage(server: Server, engine: FakeEngine, key: bytes) -> None:
    """Change a byte of a record's payload on the disk behind the server's back."""
    directory = server.config.disk_dir / "ns" / engine.ns
    data = (directory / "data.mdb").read_bytes()
    at = data.find(payload_bytes(key, 2, engine.shape.payload_nbytes)[:512])
    assert at > 0
    with (directory / "data.mdb").open("r+b") as file:
        file.seek(at + 100)
        file.write(bytes([data[at + 100] ^ 0xFF]))


def test_verify_finds_and_repairs(server: Server, at: tuple[str, Path], engine: FakeEngine) -> None:
    assert as_json("verify", *at)["num_ok"] == 14
    key = engine.keys(C)[2]
    damage(server, engine, key)
    said = tierkv("verify", *at)
    assert said.code == 4 and key.hex()[:12] in said.out and "--repair" in said.err
    found = as_json("verify", *at, code=4)
    assert (found["num_ok"], found["num_bad"]) == (13, 1), "a look changes nothing: the bad one is found again"
    assert found["bad"][0] | {"namespace": ""} == {
        "id": key.hex()[:12], "key": key.hex(), "namespace": "", "tier": "disk", "deleted": False
    }  # fmt: skip
    assert as_json("verify", name(engine, A), *at)["num_total"] == 7
    repaired = as_json("verify", name(engine, C), "--repair", "--rate", "1GiB", *at)
    assert repaired["num_bad"] == 1 and repaired["bad"][0]["deleted"]
    assert as_json("verify", *at)["num_total"] == 13
    engine.forget()
    assert engine.get(C) == engine.expected(C, seed=2)[:2]


def test_verify_in_steps(server: Server, at: tuple[str, Path], engine: FakeEngine, monkeypatch: Any) -> None:
    monkeypatch.setattr("tierkv_server.scans.STEP_NBYTES", 2 * engine.shape.payload_nbytes)
    with AdminClient(server.config.socket) as client:
        first = client.ask("TKV.VERIFY", {})
        assert (first["num_done"], first["num_ok"], first["num_total"]) == (2, 2, 14)
        again = [client.ask("TKV.VERIFY", {"cursor": first["cursor"]}) for _ in range(2)]
        assert again[0] == again[1] and again[0]["num_done"] == 4, "a step may be asked for again"
        for _ in range(MAX_SCANS):
            client.ask("TKV.VERIFY", {})
        with pytest.raises(Exception, match="start again"):
            client.ask("TKV.VERIFY", {"cursor": first["cursor"]})
    stat = as_json("stat", *at)
    assert {t["name"]: t["num_hits"] for t in stat["tiers"]}["disk"] == 0, "verifying counts no hit"
    assert as_json("verify", *at)["num_ok"] == 14


@needs_redis
def test_verify_when_the_shared_tier_is_out(short_dir: Path, redis: RedisServer) -> None:
    config = make_config(short_dir / "one", shared_url=redis.url)
    with serving(config) as server, FakeEngine(config.socket) as engine:
        engine.put(A)
        drain(server)
        at = ("--server", config.socket)
        assert as_json("verify", *at)["num_ok"] == 14
        with AdminClient(config.socket) as client:
            opened = client.ask("TKV.VERIFY", {"tiers": ["shared"], "prefix": name(engine, A)})
            assert opened["num_ok"] == 7
        names = [
            n for n in redis.client().scan_iter("tierkv:1:*") if b"{" in n and b"idx" not in n and b"fleet" not in n
        ]
        redis.client().setrange(names[0], 1000, b"damaged")
        assert as_json("verify", "--tier", "shared", *at, code=4)["num_bad"] == 1
        assert as_json("verify", "--tier", "shared", "--repair", *at)["num_bad"] == 1
        assert as_json("verify", "--tier", "shared", *at)["num_total"] == 6


# -- warm


@needs_redis
def test_warm(short_dir: Path, redis: RedisServer) -> None:
    one, two = (make_config(short_dir / n, shared_url=redis.url) for n in ("one", "two"))
    with serving(one) as first, FakeEngine(one.socket) as engine:
        engine.put(A)
        engine.put(C, seed=2)
        drain(first)
    with serving(two):
        at = ("--server", two.socket)
        plan = as_json("warm", name(engine, A), "--dry-run", *at)
        assert (plan["num_warmed"], plan["num_chunks"]) == (7, 7)
        done = as_json("warm", name(engine, A), *at)
        assert (done["num_warmed"], done["num_there"], done["nbytes"]) == (7, 0, 7 * engine.shape.payload_nbytes)
        assert as_json("warm", "--tokens", text(A), *at)["num_there"] == 7
        assert {r["id"]: r["tiers"] for r in as_json("ls", *at)["prefixes"]} == {
            name(engine, A): ["disk", "shared"],
            name(engine, C): ["shared"],
        }
        redis.kill()
        with FakeEngine(two.socket) as other:
            assert other.get(A) == other.expected(A) and set(other.last_sources) == {"disk"}


# -- events, slow, top


def test_events(server: Server, at: tuple[str, Path], engine: FakeEngine) -> None:
    engine.forget()
    engine.get(C)
    tierkv("evict", name(engine, C), *at)
    said = tierkv("events", "--once", "--json", *at)
    events = [json.loads(line) for line in said.out.splitlines()]
    assert [e["number"] for e in events] == list(range(1, len(events) + 1))
    kinds = [e["kind"] for e in events]
    assert kinds[-2:] == ["fetch", "evict"] and "store" in kinds
    assert events[-2]["chunks"] == {"disk": 5} and events[-2]["engine"] == "fake-engine"
    assert events[-2]["id"] == name(engine, C) and events[-1]["chunks"] == {"disk": 5}
    stored = sum(e["chunks"].get("stored", 0) for e in events)
    assert stored == 14
    only = tierkv("events", "--once", "--kind", "evict", "--namespace", engine.ns[:6], *at)
    assert only.out.count("\n") == 1 and "evict" in only.out and "disk 5" in only.out
    refused(tierkv("events", "--once", "--since", len(events), *at), 1, "no event")
    for limit in (1, 2, 1000):
        few = tierkv("events", "--once", "--json", "--limit", limit, *at).out.splitlines()
        assert [json.loads(line)["number"] for line in few] == [e["number"] for e in events][-limit:]
    with AdminClient(server.config.socket) as client:
        assert client.ask("TKV.EVENTS", {"since": 10_000})["events"][0]["number"] == 1, "of a server before this one"


def test_events_are_bounded_and_say_what_was_lost() -> None:
    from tierkv_server.events import MAX_EVENTS, MAX_REPLY, MAX_SLOW, Events

    events = Events()
    for _ in range(MAX_EVENTS + 500):
        events.note("fetch", bytes(16), bytes(32), {"failed": 1})
    found = events.since(100)
    assert found["num_lost"] == 400 and len(found["events"]) == MAX_REPLY and found["last"] == 500 + MAX_REPLY
    seen, last = 0, 0
    while (page := events.since(last))["events"]:
        seen, last = seen + len(page["events"]), page["last"]
    assert seen == MAX_EVENTS and len(events.slow()["operations"]) == MAX_SLOW


def test_the_latest_events_over_several_replies(server: Server, at: tuple[str, Path]) -> None:
    for number in range(2500):
        server.service.events.note("fetch", bytes(16), bytes(32), {"disk": number})
    said = tierkv("events", "--once", "--json", "--limit", 1500, *at)
    assert [json.loads(line)["chunks"]["disk"] for line in said.out.splitlines()] == list(range(1000, 2500))


def test_following_events(at: tuple[str, Path], engine: FakeEngine) -> None:
    command = [sys.executable, "-m", "tierkv.cli", "events", "--kind", "fetch", "--json", *map(str, at)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        engine.forget()
        engine.get(A)
        assert json.loads(process.stdout.readline())["chunks"] == {"disk": 7}
        engine.forget()
        engine.get(B)
        assert json.loads(process.stdout.readline())["chunks"] == {"disk": 6}
        process.send_signal(2)
        assert process.wait(timeout=30) == 130


def test_slow(server: Server, at: tuple[str, Path], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv_server.events.SLOW_S", 0.0)
    engine.forget()
    engine.get(B)
    (row,) = as_json("slow", *at)["operations"]
    assert (row["kind"], row["chunks"], row["engine"]) == ("fetch", {"disk": 6}, "fake-engine")
    assert "disk 6" in tierkv("slow", *at).out
    refused(tierkv("slow", "--over", "1h", *at), 1, "nothing was slow")
    server.service.moves.disk_writer.refusing = True
    engine.put([77] * CHUNK, wait=False)
    wait_until(lambda: as_json("slow", *at)["operations"][0]["chunks"] == {"dropped": 1})
    server.service.moves.disk_writer.refusing = False


def test_top(at: tuple[str, Path], engine: FakeEngine) -> None:
    engine.get(A)
    found = as_json("top", "--once", "--interval", "0.2", *at)
    assert [tier["name"] for tier in found["tiers"]] == ["host", "disk"] and found["num_engines"] == 1
    assert found["hottest"][0]["id"] == name(engine, A)
    shown = tierkv("top", "--once", "--interval", "0.2", *at).out
    assert name(engine, A) in shown and "hit rate" in shown and "fake-engine" in shown


def test_rates_are_differences() -> None:
    def stat(hits: int, misses: int, boot: str = "x") -> dict[str, Any]:
        tier = dict.fromkeys((f"num_{rate}" for rate in top.RATES), 0) | {"num_hits": hits, "num_misses": misses}
        about = {"name": "disk", "state": "up", "num_entries": 1, "nbytes": 1, "budget": 0, "queued_nbytes": 0}
        return {"server": {"boot": boot, "num_engines": 0}, "engines": [], "tiers": [tier | about]}

    row = top.view(stat(10, 10), stat(40, 20), 2.0, [])["tiers"][0]
    assert (row["hits_s"], row["misses_s"], row["hit_rate"]) == (15.0, 5.0, 0.75)
    row = top.view(stat(10, 10), stat(4, 0, "new"), 2.0, [])["tiers"][0]
    assert (row["hits_s"], row["misses_s"], row["hit_rate"]) == (2.0, 0.0, 1.0)
    assert top.view(stat(1, 1), stat(1, 1), 2.0, [])["tiers"][0]["hit_rate"] is None


# -- export and import


def test_export_and_import_are_exact(at: tuple[str, Path], engine: FakeEngine, tmp_path: Path, short_dir: Path) -> None:
    file = tmp_path / "two.safetensors"
    engine.put(A, salt="alice")
    result = as_json("export", file, name(engine, A), name(engine, B), *at)
    assert result["num_chunks"] == 9 and result["nbytes"] == 9 * engine.shape.payload_nbytes
    assert not list(tmp_path.glob("*.part"))
    with safe_open(str(file), "np") as tensors:
        metadata = tensors.metadata()
        chunks = json.loads(metadata["chunks"])
        assert metadata["format"] == "tierkv-export-1" and len(chunks) == 9
        for chunk in chunks:
            expected = payload_bytes(bytes.fromhex(chunk["key"]), _seed(engine, chunk["key"]), result["nbytes"] // 9)
            assert tensors.get_tensor(chunk["key"]).tobytes() == expected
    other = make_config(short_dir / "other")
    with serving(other):
        to = ("--server", other.socket)
        assert as_json("import", file, "--dry-run", *to)["num_stored"] == 9
        refused(tierkv("ls", *to), 1, "nothing is stored yet")
        done = as_json("import", file, *to)
        assert (done["num_stored"], done["num_there"], done["namespace"]) == (9, 0, engine.ns)
        assert as_json("import", file, *to)["num_there"] == 9
        for tokens in (A, B):
            before, after = (as_json("show", name(engine, tokens), *where)["chunks"] for where in (at, to))
            same = ("key", "parent", "anchor", "position", "tokens", "created")
            assert [[c[k] for k in same] for c in before] == [[c[k] for k in same] for c in after]
        with FakeEngine(other.socket) as reader:
            assert reader.get(A) == reader.expected(A, seed=0)
        again = tmp_path / "again.safetensors"
        as_json("export", again, name(engine, A), name(engine, B), *to)
        assert again.read_bytes() == file.read_bytes()


def _seed(engine: FakeEngine, key: str) -> int:
    return 0 if bytes.fromhex(key) in engine.keys(A) else 1


def test_import_refuses_what_does_not_fit(at: tuple[str, Path], engine: FakeEngine, tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    as_json("export", file, name(engine, C), *at)
    whole = file.read_bytes()

    def changed(data: bytes) -> Said:
        file.write_bytes(data)
        return tierkv("import", file, *at)

    start = 8 + int.from_bytes(whole[:8], "little")
    for data, word in (
        (b"", "cut off"),
        (whole[:100], "cut off"),
        (whole[:-1], "cut off"),
        (whole + b"x", "belong to no chunk"),
        (whole[: start + 5] + bytes([whole[start + 5] ^ 1]) + whole[start + 6 :], "checksum"),
        (whole.replace(b"tierkv-export-1", b"tierkv-export-9"), "tierkv-export-9"),
        (whole.replace(b'"U8"', b'"I8"', 1), "in its place"),
        (b"\xff" * 8 + whole[8:], "no safetensors file"),
        (whole[:8] + b"[" + whole[9:], "not understood"),
    ):
        refused(changed(data), 2, word)
    file.write_bytes(whole)
    tierkv("evict", "--namespace", engine.ns, "--yes", *at)
    namespace = make_namespace(chunk_tokens=64)
    with FakeEngine(at[1], namespace):
        engine.close()
        wait_until(lambda: as_json("stat", *at)["server"]["num_engines"] == 1)
        refused(tierkv("import", file, *at), 4, "do not fit", "--any-layout")
        assert as_json("import", file, "--any-layout", *at)["num_stored"] == 5


def test_a_record_is_checked_by_the_server_too(server: Server, engine: FakeEngine) -> None:
    key = engine.keys(C)[0]
    with AdminClient(server.config.socket) as client:
        record = client.call("TKV.DUMP", engine.namespace.ns_id(), key, key)
        for bad in (record[:-1], record[:300] + b"x" + record[301:], b"y" + record[1:], b""):
            with pytest.raises(Exception, match="does not fit"):
                client.call("TKV.RESTORE", engine.namespace.to_json(), bad)
        with pytest.raises(Exception, match="does not fit"):
            client.call("TKV.RESTORE", make_namespace("another").to_json(), record)
        assert client.call("TKV.RESTORE", engine.namespace.to_json(), record) == b"EXISTS"


def test_export_of_what_only_a_pool_has(at: tuple[str, Path], engine: FakeEngine, tmp_path: Path) -> None:
    tierkv("evict", name(engine, C), "--tier", "disk", *at)
    refused(tierkv("export", tmp_path / "x", name(engine, C), *at), 1, "host pools alone")
    refused(tierkv("export", tmp_path / "no" / "x", name(engine, A), *at), 2, "cannot be written")


# -- without a server


def test_offline_disk(short_dir: Path) -> None:
    config = make_config(short_dir)
    with serving(config) as server, FakeEngine(config.socket) as engine:
        for seed, tokens in enumerate((A, B, C)):
            engine.put(tokens, seed=seed)
        as_json("pin", name(engine, A), "--for", "1h", "--owner", "ops", "--server", config.socket)
        assert as_json("ls", "--disk", config.disk_dir)["prefixes"][0]["tiers"] == ["host", "disk"], (
            "its server is asked"
        )
        damage(server, engine, engine.keys(C)[2])
        engine.close()
        wait_until(lambda: not as_json("stat", "--server", config.socket)["server"]["num_engines"])
        online = {verb: as_json(*verb, "--server", config.socket) for verb in _verbs(engine)}
    before = snapshot(config.disk_dir)
    for verb, found in online.items():
        assert as_json(*verb, "--disk", config.disk_dir) == found, verb
    found = as_json("verify", "--disk", config.disk_dir, code=4)
    assert (found["num_ok"], found["num_bad"]) == (13, 1)
    refused(tierkv("verify", "--repair", "--disk", config.disk_dir), 2, "running server")
    (row,) = as_json("match", "--tokens", text(A), "--disk", config.disk_dir)["namespaces"]
    assert row["num_stored"] == 7
    assert snapshot(config.disk_dir) == before, "looking changed something"
    with serving(config), FakeEngine(config.socket) as engine:
        assert len(engine.get(A)) == 7


def _verbs(engine: FakeEngine) -> list[tuple[str, ...]]:
    return [("ls",), ("ns",), ("du", "--by", "depth"), ("tree",), ("show", name(engine, A))]


def snapshot(directory: Path) -> dict[str, tuple[int, int]]:
    files = [p for p in directory.rglob("*") if p.is_file()]
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in files}


def test_offline_refuses_a_directory_whose_server_is_not_found(short_dir: Path) -> None:
    config = make_config(short_dir, socket=short_dir / "other-name.sock")
    with serving(config):
        refused(tierkv("ls", "--disk", config.disk_dir), 4, str(config.disk_dir), str(os.getpid()), "--server")
        refused(tierkv("ls", "--disk", config.disk_dir, "--redis", "redis://localhost"), 4, "leave out --redis")


def test_offline_says_what_it_does_not_read(short_dir: Path) -> None:
    config = make_config(short_dir)
    with serving(config), FakeEngine(config.socket) as engine:
        engine.put(A)
    mark = config.disk_dir / "ns" / engine.ns / "tierkv.json"
    mark.write_text('{"format":"tierkv-disk-2","boot":"another-boot"}')
    refused_said = tierkv("ls", "--disk", config.disk_dir)
    assert refused_said.code == 1 and "crashed while it was open" in refused_said.err


@needs_redis
def test_offline_redis(short_dir: Path, redis: RedisServer) -> None:
    config = make_config(short_dir / "one", shared_url=redis.url)
    with serving(config) as server, FakeEngine(config.socket) as engine:
        engine.put(A)
        drain(server)
    rows = as_json("ls", "--redis", redis.url)["prefixes"]
    assert [(row["id"], row["tiers"]) for row in rows] == [(name(engine, A), ["shared"])]
    assert as_json("du", "--redis", redis.url)["total"]["chunks"] == {"shared": 7}
    assert as_json("verify", "--redis", redis.url)["num_ok"] == 7
    both = as_json("ns", "--redis", redis.url, "--disk", config.disk_dir)["namespaces"]
    assert both[0]["chunks"] == {"disk": 7, "shared": 7}
    url = redis.url
    redis.kill()
    refused(tierkv("ls", "--redis", url), 3, "no Redis answers")


# -- which server


def test_the_users_running_server_is_found(
    server: Server, engine: FakeEngine, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(short_dir / "cache"))
    table = short_dir / "unix"
    monkeypatch.setattr(discover, "TABLE", table)
    mine = [line for line in Path("/proc/net/unix").read_text().splitlines() if str(server.config.socket) in line]
    header = "Num       RefCount Protocol Flags    Type St Inode Path"
    table.write_text("\n".join([header, "0000000000000000: 00000002 00000000 00010000 0001 01 12345", *mine]) + "\n")
    assert server.config.socket.name == "tierkv.sock"
    assert as_json("ls")["total"] == 3
    with socket.socket(socket.AF_UNIX) as listener:
        other = short_dir / "cache" / "tierkv" / "tierkv.sock"
        other.parent.mkdir(parents=True)
        listener.bind(str(other))
        listener.listen()
        lines = [line for line in Path("/proc/net/unix").read_text().splitlines() if "tierkv.sock" in line]
        table.write_text("\n".join([header, *[line for line in lines if str(short_dir) in line]]) + "\n")
        refused(tierkv("ls"), 2, "2 store servers", str(other), str(server.config.socket), "--server")
    other.unlink()
    assert as_json("ls")["total"] == 3, "a socket whose file is gone is nobody's"
    table.write_text(header + "\n")
    refused(tierkv("ls"), 3, str(other))


# -- start-up and completion


def test_help_of_every_verb_has_examples_and_imports_nothing_heavy() -> None:
    from tierkv.cli import VERBS

    heavy = {"redis", "lmdb", "numpy", "rich", "xxhash", "asyncio", "torch", "tierkv_server"}
    script = (
        "import sys\nfrom tierkv.cli import main\n"
        f"for verb in {sorted(VERBS)!r}:\n    assert main([verb, '--help']) == 0\n"
        f"print('HEAVY', sorted({heavy!r} & {{name.split('.')[0] for name in sys.modules}}))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "HEAVY []" in done.stdout
    assert done.stdout.count("Examples:") == len(VERBS)


@pytest.mark.parametrize("typed, found", [("tierkv ver", "verify"), ("tierkv ls --so", "--sort")])
def test_completion(typed: str, found: str) -> None:
    env = os.environ | {"_TIERKV_COMPLETE": "bash_complete", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    done = subprocess.run([sys.executable, "-m", "tierkv.cli"], env=env, capture_output=True, text=True, timeout=60)
    assert f"plain,{found}" in done.stdout
