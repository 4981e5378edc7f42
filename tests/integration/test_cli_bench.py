"""``tierkv bench`` against real servers: what it measures, what room it takes, and that it leaves nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cli_tools import Said, as_json, on_terminal, refused, tierkv
from fake_engine import FakeEngine, make_namespace, wait_until
from network import address_of, host_port, insecure_config, make_tokens, tls_config
from servers import RedisCluster, RedisServer, make_certificates, server_binaries, start_redis
from serving import make_config, serving
from store_process import store_server
from tierkv.admin_client import AdminClient
from tierkv.bench import space
from tierkv.bench.figures import Round, Tally, percentile
from tierkv.config import Spill
from tierkv.server_config import ServerConfig, SharedConfig
from tierkv.tiers.base import TierStat
from tierkv.tiers.shared import SharedTier
from tierkv_server.server import Server

KIB, MIB = 1 << 10, 1 << 20
USERS = list(range(3000, 3000 + 14 * 32))
#: Payloads of 1 MiB: the prompt takes 14 of the disk's 64 MiB.
LARGE = make_namespace("fake/large-model", block_nbytes=256 << 10)
FAST = ("--duration", "0.05", "--payload", "64KiB", "--size", "2MiB")
needs_redis = pytest.mark.skipif(not server_binaries(), reason="neither Redis nor Valkey is installed")
pytestmark = pytest.mark.usefixtures("no_leaks")


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
def redis(short_dir: Path) -> Iterator[RedisServer]:
    server = start_redis(short_dir)
    yield server
    server.kill()


@pytest.fixture
def engine(server: Server) -> Iterator[FakeEngine]:
    """Somebody's engine, whose chunks nobody may push out."""
    with FakeEngine(server.config.socket, LARGE) as engine:
        engine.put(USERS)
        yield engine


def namespaces(config: ServerConfig) -> list[str]:
    """Return the models of the namespaces that are there."""
    with AdminClient(config.socket) as client:
        return [row["model"] for row in client.ask("TKV.STAT")["namespaces"]]


def disk_stat(server: Server) -> TierStat:
    return server.service.disk.stat()


def keeps(engine: FakeEngine, tokens: list[int]) -> bool:
    """Return whether the disk has all of a prompt."""
    engine.forget()
    return engine.get(tokens) == engine.expected(tokens) and set(engine.last_sources) == {"disk"}


def start(config: ServerConfig, *args: str) -> subprocess.Popen[str]:
    """Run it in a process of its own, and return when it has stored something."""
    command = [sys.executable, "-m", "tierkv.cli", "bench", "--server", str(config.socket), "--duration", "30", *args]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def under_way() -> bool:
        assert process.poll() is None, process.communicate()
        with AdminClient(config.socket) as client:
            return bool(client.ask("TKV.DU", {"by": "namespace"})["total"]["num_chunks"])

    wait_until(under_way, what="nothing is measured")
    return process


def clients_of(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"tierkv.bench.client" in Path(f"/proc/{pid}/cmdline").read_bytes()]


# -- figures


@needs_redis
def test_both_tiers(short_dir: Path, redis: RedisServer) -> None:
    with serving(make_config(short_dir, shared_url=redis.url)) as server, FakeEngine(server.config.socket) as engine:
        engine.put(USERS)
        at = ("--server", server.config.socket)
        found = as_json("bench", *at, *FAST, "--payload", "1KiB", "--clients", "2")
        kinds = [(row["tier"], row["op"], row["payload_nbytes"]) for row in found["results"]]
        one = [(t, o) for t, o in (("disk", "store"), ("shared", "store"))]
        one += [(t, o) for t in ("disk", "shared") for o in ("match", "fetch")]
        assert kinds == [(t, o, n) for n in (64 * KIB, KIB) for t, o in one]
        for row in found["results"]:
            assert row["num_ops"] > 0 and row["num_chunks"] >= 2 * 16, row
            assert row["nbytes"] == (row["num_chunks"] * row["payload_nbytes"] if row["op"] != "match" else 0)
            assert 0 < row["median_s"] <= row["p99_s"] and row["seconds"] > 0
            assert row["ops_s"] == pytest.approx(row["num_ops"] / row["seconds"], rel=0.01)
            assert row["gb_s"] == pytest.approx(row["nbytes"] / row["seconds"] / 1e9, rel=0.01, abs=1e-4)
            assert row["client_cpu_s"] >= 0 and row["server_cpu_s"] >= 0  # it is this process
        assert (found["nbytes"], found["num_clients"], found["transport"]) == (2 * MIB, 2, "shared memory")
        assert found["skipped"] == [] and found["num_evicted"] == {"disk": 0, "shared": 0} and not found["num_left"]
        assert namespaces(server.config) == [engine.namespace.model]
        assert not [name for name in redis.client().hkeys("tierkv:namespaces") if name.decode() != engine.ns]
        assert keeps(engine, USERS)
        shown = tierkv("bench", *at, *FAST, "--op", "match")
        assert shown.code == 0 and not shown.err
        assert [line.split()[:2] for line in shown.out.splitlines()[3:]] == [["disk", "match"], ["shared", "match"]]


def test_what_is_stored_is_where_it_is_said_to_be(server: Server, engine: FakeEngine) -> None:
    """Counted by the server itself: stores, and hits of fetches."""
    before = disk_stat(server)
    found = as_json("bench", "--server", server.config.socket, *FAST, "--op", "store", "--op", "fetch")
    store, fetch = found["results"]
    after = disk_stat(server)
    assert (store["op"], fetch["op"]) == ("store", "fetch")
    assert after.num_stored - before.num_stored == store["num_chunks"]
    assert after.num_hits - before.num_hits == fetch["num_chunks"]
    assert after.num_entries == before.num_entries == 14


@pytest.mark.parametrize(
    "spill, measured, skipped",
    [
        ({"disk": Spill.THROUGH, "shared": Spill.SECOND_USE}, {"disk", "shared"}, {}),
        ({"disk": Spill.SECOND_USE, "shared": Spill.SECOND_USE}, {"disk", "shared"}, {}),
        ({"disk": Spill.ON_EVICT, "shared": Spill.ON_EVICT}, {"disk"}, {"shared": "on-evict"}),
        ({"disk": Spill.NEVER, "shared": Spill.ON_EVICT}, {"shared"}, {"disk": "never"}),
        ({"disk": Spill.NEVER, "shared": Spill.NEVER}, set(), {"disk": "never", "shared": "never"}),
    ],
)
@needs_redis
def test_under_every_spill_policy(
    short_dir: Path, redis: RedisServer, spill: Any, measured: set[str], skipped: dict[str, str]
) -> None:
    with serving(make_config(short_dir, shared_url=redis.url, spill=spill)) as server:
        found = as_json("bench", "--server", server.config.socket, *FAST, code=0 if measured else 4)
        assert {row["tier"] for row in found["results"]} == measured
        assert len(found["results"]) == 3 * len(measured)
        assert {row["tier"] for row in found["skipped"]} == set(skipped)
        for row in found["skipped"]:
            assert skipped[row["tier"]] in row["reason"]
        assert namespaces(server.config) == []


def test_a_tier_that_is_not_there(server: Server, short_dir: Path) -> None:
    refused(tierkv("bench", "--server", server.config.socket, "--tier", "shared"), 4, "shared", "the server has none")
    other = make_config(short_dir / "other", shared_url=f"unix://{short_dir}/nobody.sock")
    with serving(other):
        at = ("--server", other.socket)
        refused(tierkv("bench", *at, *FAST, "--tier", "shared"), 4, "the shared tier cannot be measured")
        found = as_json("bench", *at, *FAST, "--op", "store")
        assert [row["tier"] for row in found["results"]] == ["disk"] and "it is out" in found["skipped"][0]["reason"]


@pytest.mark.parametrize(
    "args, words",
    [
        (["--payload", "1"], ["--payload 1", "1KiB"]),
        (["--payload", "1GiB"], ["64MiB"]),
        (["--payload", "4MiB"] * 9, ["9 payload sizes"]),
        (["--duration", "2h"], ["--duration 7200s", "60s"]),
        (["--clients", "0"], ["--clients"]),
        (["--op", "walk"], ["walk"]),
        (["--tier", "host"], ["host"]),
    ],
)
def test_bad_usage(server: Server, args: list[str], words: list[str]) -> None:
    refused(tierkv("bench", "--server", server.config.socket, *args), 2, *words)


def test_a_bar_on_a_terminal(server: Server) -> None:
    args = ["bench", "--server", str(server.config.socket), *FAST]
    code, shown = on_terminal(args, {"COLUMNS": "100"})
    assert code == 0 and "Measuring" in shown and "disk fetch, 64 KiB" in shown and "100%" in shown
    code, shown = on_terminal([*args, "--quiet"], {"COLUMNS": "100"})
    assert (code, shown) == (0, "")


# -- room


def test_what_others_have_stored_is_not_pushed_out(server: Server, engine: FakeEngine) -> None:
    at = ("--server", server.config.socket)
    said = tierkv("bench", *at, "--size", "55MiB", "--payload", "64KiB")
    refused(said, 4, "the disk tier has 49.9 MiB free", "holds 55 MiB", "--allow-eviction")
    refused(tierkv("bench", *at, "--payload", "64MiB"), 4, "the disk tier has", "holds 64 MiB")
    refused(tierkv("bench", *at, "--size", "200MiB", "--payload", "64KiB"), 4, "holds 200 MiB")
    assert disk_stat(server).num_stored == 14
    found = as_json("bench", *at, "--duration", "0.05", "--payload", "64KiB", "--op", "store")
    assert 36 * MIB < found["nbytes"] < 46 * MIB, "what there is room for"
    assert found["num_evicted"] == {"disk": 0} and keeps(engine, USERS)


def test_eviction_is_said_where_it_is_allowed(server: Server, engine: FakeEngine) -> None:
    at = ("--server", server.config.socket)
    args = ("--duration", "0.05", "--payload", "64KiB", "--op", "store", "--size", "55MiB", "--allow-eviction")
    found = as_json("bench", *at, *args)
    assert found["num_evicted"]["disk"] > 0
    assert len(engine.match(USERS)) < 14, "what was used longest ago went first"
    refused(tierkv("bench", *at, *args[:6], "--size", "200MiB", "--allow-eviction"), 4, "no room for them", "--size")
    assert namespaces(server.config) == [engine.namespace.model]


def test_it_stops_where_a_tier_begins_to_evict(server: Server, engine: FakeEngine, monkeypatch: Any) -> None:
    """The room that was seen is not there: the same as engines that store meanwhile."""
    room = type(server.commands.inspector).room
    monkeypatch.setattr(
        type(server.commands.inspector),
        "room",
        lambda self: {"tiers": [row | {"free_nbytes": 1 << 30} for row in room(self)["tiers"]]},
    )
    said = tierkv("bench", "--server", server.config.socket, "--payload", "64KiB", "--size", "55MiB")
    refused(said, 4, "stopped: the disk tier began to evict", "--allow-eviction")
    assert namespaces(server.config) == [engine.namespace.model]


@needs_redis
def test_a_full_redis_is_left_alone(short_dir: Path) -> None:
    redis = start_redis(short_dir, "--maxmemory", "20mb", "--maxmemory-policy", "allkeys-lru")
    client = redis.client()
    for i in range(13):
        client.set(f"others:{i}", bytes(MIB))
    with serving(make_config(short_dir, shared_url=redis.url)) as server:
        at = ("--server", server.config.socket, "--duration", "0.05", "--payload", "64KiB")
        refused(tierkv("bench", *at, "--size", "8MiB"), 4, "the shared tier has", "--allow-eviction")
        found = as_json("bench", *at, "--op", "store")
        assert 0 < found["nbytes"] < 3 * MIB and found["num_evicted"]["shared"] == 0
        assert all(client.exists(f"others:{i}") for i in range(13))
        client.execute_command("ACL", "SETUSER", "default", "-info")
        refused(tierkv("bench", *at), 4, "the shared tier does not say", "INFO", "--allow-eviction")
    redis.kill()


@needs_redis
def test_what_redis_says_of_its_memory(short_dir: Path) -> None:
    redis = start_redis(short_dir, "--maxmemory", "0")
    tier = SharedTier(SharedConfig(url=redis.url))
    info: Any = redis.client().info("memory")
    free, num_evicted = tier.memory()
    assert free is not None and 0 < free <= info["total_system_memory"] and num_evicted == 0
    redis.client().config_set("maxmemory", "10mb")
    free, _ = tier.memory()
    assert free is not None and 4 * MIB < free < 10 * MIB
    redis.client().config_set("maxmemory-policy", "allkeys-lru")
    for i in range(20):
        redis.client().set(f"others:{i}", bytes(MIB))
    evicted: Any = redis.client().info("stats")
    assert tier.memory().num_evicted == evicted["evicted_keys"] > 0
    redis.kill()
    assert tier.memory() == (None, 0)
    tier.close()


@needs_redis
def test_the_fullest_node_of_a_cluster_counts_for_all(short_dir: Path) -> None:
    cluster = RedisCluster(short_dir, "--maxmemory", "40mb")
    tier = SharedTier(SharedConfig(url=cluster.url))
    cluster.nodes[1].client().config_set("maxmemory", "12mb")
    free, _ = tier.memory()
    assert free is not None and 3 * 6 * MIB < free < 3 * 12 * MIB
    tier.close()
    cluster.stop()


# -- what it leaves


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_and_removes_what_was_stored(server: Server, number: signal.Signals) -> None:
    process = start(server.config)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "")
    assert namespaces(server.config) == [] and disk_stat(server).num_entries == 0


def test_a_client_that_is_killed_ends_it(server: Server) -> None:
    process = start(server.config, "--clients", "2")
    os.kill(clients_of(process)[0], signal.SIGKILL)
    out, err = process.communicate(timeout=30)
    refused(Said(process.returncode, out, err), 4, "was ended by signal 9", "is removed")
    assert not out and namespaces(server.config) == [] and disk_stat(server).num_entries == 0


def test_a_server_that_goes_away(short_dir: Path) -> None:
    config = make_config(short_dir)
    with store_server(config, short_dir / "log") as pid:
        process = start(config, "--clients", "2")
        os.kill(pid, signal.SIGKILL)
        out, err = process.communicate(timeout=60)
        refused(Said(process.returncode, out, err), 3, "server")


def test_what_a_killed_run_left_is_removed_by_the_next(server: Server) -> None:
    process = start(server.config)
    clients = clients_of(process)
    process.kill()
    process.communicate(timeout=30)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in clients), what="a client stays")
    wait_until(lambda: not server.service.sessions, what="its session stays")
    assert len(namespaces(server.config)) == 1 and disk_stat(server).num_entries > 0
    found = as_json("bench", "--server", server.config.socket, *FAST, "--op", "match")
    assert found["num_left"] == 1
    assert namespaces(server.config) == [] and disk_stat(server).num_entries == 0


def test_what_is_over() -> None:
    host, now = socket.gethostname(), int(time.time())
    assert not space._is_over(f"tierkv-bench/{host}-{os.getpid()}-{now}"), "it runs"
    assert space._is_over(f"tierkv-bench/{host}-{1 << 30}-{now}")
    assert not space._is_over(f"tierkv-bench/other-host-1-{now}"), "nobody can tell"
    assert space._is_over(f"tierkv-bench/other-host-1-{now - 3 * 3600}")
    assert not space._is_over("tierkv-bench/x") and not space._is_over("tierkv-bench/a-b-c")


# -- over TCP


def test_over_tcp(short_dir: Path) -> None:
    config = insecure_config(short_dir)
    with serving(config) as server:
        host, port = host_port(server.config)
        found = as_json("bench", "--server", f"tkv://{host}:{port}", *FAST)
        assert found["transport"] == "inline" and len(found["results"]) == 3
        assert namespaces(config) == []


def test_over_tls_it_takes_the_admins_token(short_dir: Path) -> None:
    files, tokens = make_certificates(short_dir / "tls"), make_tokens(short_dir)
    with serving(tls_config(short_dir, files, tokens)) as server:
        host, port = host_port(server.config)
        at = ("--server", f"tkvs://{host}:{port}", "--ca-file", files.ca)
        for role in ("reader", "engine"):
            said = tierkv("bench", *at, "--token-file", tokens[role], *FAST)
            refused(said, 4, f"the {role}'s token does not allow", "the admin's")
        found = as_json("bench", *at, "--token-file", tokens["admin"], *FAST, "--clients", "2")
        assert [row["op"] for row in found["results"]] == ["store", "match", "fetch"]
        assert all(row["num_chunks"] >= 32 for row in found["results"])
        assert address_of(server.config).port == port and namespaces(server.config) == []


# -- arithmetic


def test_percentiles() -> None:
    values = [float(n) for n in range(1, 201)]
    assert (percentile(values, 99), percentile(values, 50), percentile(values, 100)) == (198.0, 100.0, 200.0)
    assert percentile([7.0], 99) == 7.0


def test_rounds_add_up() -> None:
    tally = Tally()
    tally.add([Round([0.1, 0.3], 10.0, 10.4, 0.2, 4, 4000), Round([0.2], 10.1, 10.5, 0.1, 2, 2000)], 0.3)
    tally.add([Round([0.5], 20.0, 20.5, 0.1, 1, 1000)], 0.2)
    figure = tally.figure("disk", "store", 1000)
    assert msgspec.structs.astuple(figure) == (
        "disk", "store", 1000, 4, 7, 7000, pytest.approx(1.0), 0.25, 0.5, pytest.approx(4.0), pytest.approx(7e-6),
        pytest.approx(0.4), pytest.approx(0.5),
    )  # fmt: skip
    tally.add([Round([0.5], 30.0, 30.5, 0.1, 1, 1000)], None)
    assert tally.figure("disk", "store", 1000).server_cpu_s is None, "what is not known in part is not known"
