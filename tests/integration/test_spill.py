"""When chunks go to which tier, one fetch for many waiters, and the filter of stored keys: a real server and Redis."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fake_engine import FakeEngine, make_namespace, wait_until
from servers import RedisServer, start_redis
from serving import patient
from tierkv.client import AdminClient
from tierkv.config import Spill
from tierkv.keys import anchor_index
from tierkv.layout import Namespace
from tierkv.messages import COMPUTED, EVICTED, HANDOFF, NOTED, STORED, USED, WANTED
from tierkv.payload import record_nbytes
from tierkv.server_config import ServerConfig
from tierkv_server.server import Server

CHUNK = 32
PROMPT = list(range(1000, 1000 + 4 * CHUNK))

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = start_redis(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture(autouse=True)
def empty_redis(redis_server: RedisServer) -> None:
    redis_server.client().flushall()


@contextlib.contextmanager
def serving(directory: Path, redis: RedisServer | None, disk_bytes: int = 64 << 20, **spill: str) -> Iterator[Server]:
    policies = {tier: Spill(policy.replace("_", "-")) for tier, policy in spill.items()}
    config = patient(ServerConfig.make(directory / "store", disk_bytes, redis.url if redis else None, spill=policies))
    config = msgspec.structs.replace(config, disk=msgspec.structs.replace(config.disk, reserve_bytes=0))
    server = Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.leave()
        thread.join()


def use(engine: FakeEngine, tokens: list[int], reason: int = USED) -> bytes:
    """Tell the server that a prompt's chunks were used in the host pool, and return its letters."""
    keys = engine.keys(tokens)
    replies: list[bytes | None] = []
    engine.client.use(0, keys[anchor_index(0)], keys, replies.append, reason)
    wait_until(lambda: replies, what="no reply to USE")
    return replies[0] or b""


def offer(engine: FakeEngine, tokens: list[int], reason: int) -> bytes:
    """Offer a prompt's chunks, which are in the pool, for a reason, and return the server's letters."""
    keys = engine.keys(tokens)
    entries = [entry for key in keys if (entry := engine.index.get(key)) is not None]
    items = [msgspec.structs.replace(engine._item(entry, keys, ""), reason=reason) for entry in entries]
    return engine.result(engine.store(items))


def drain(server: Server) -> None:
    with AdminClient(server.config.socket) as admin:
        assert admin.call("TKV.DRAIN", 20) == b"1"


def in_redis(redis: RedisServer, engine: FakeEngine, tokens: list[int]) -> int:
    """Return how many of a prompt's chunks Redis has."""
    names = [name.decode().rsplit(":", 1)[-1] for name in redis.client().keys(f"tierkv:1:{engine.ns}:{{*")]
    return len({key.hex() for key in engine.keys(tokens)} & set(names))


def tier(server: Server, name: str) -> Any:
    with AdminClient(server.config.socket) as admin:
        return next(t for t in admin.ask("TKV.STAT")["tiers"] if t["name"] == name)


# -- policies


def test_second_use_by_a_read_from_disk(short_dir: Path, redis_server: RedisServer) -> None:
    with serving(short_dir, redis_server, shared="second_use") as server, FakeEngine(server.config.socket) as engine:
        engine.put(PROMPT)
        drain(server)
        assert in_redis(redis_server, engine, PROMPT) == 0
        engine.forget()
        assert engine.get(PROMPT[: 2 * CHUNK]) == engine.expected(PROMPT[: 2 * CHUNK])
        drain(server)
        assert in_redis(redis_server, engine, PROMPT) == 2, "what was used twice, and no more"
        before = tier(server, "shared")["num_stored"]
        engine.forget()
        engine.get(PROMPT[: 2 * CHUNK])
        drain(server)
        assert tier(server, "shared")["num_stored"] == before, "it is there: not sent again"


def test_second_use_in_the_host_pool(short_dir: Path, redis_server: RedisServer) -> None:
    with serving(short_dir, redis_server, shared="second_use") as server, FakeEngine(server.config.socket) as engine:
        engine.put(PROMPT)
        assert use(engine, PROMPT) == NOTED * 4, "the disk has them: no need to send them"
        drain(server)
        assert in_redis(redis_server, engine, PROMPT) == 4


def test_second_use_of_a_tier_whose_disk_keeps_nothing(short_dir: Path, redis_server: RedisServer) -> None:
    with (
        serving(short_dir, redis_server, disk="never", shared="second_use") as server,
        FakeEngine(server.config.socket) as engine,
    ):
        engine.put(PROMPT, wait=False)
        assert offer(engine, PROMPT, COMPUTED)  # the second engine that computes it is a second use, too
        drain(server)
        assert in_redis(redis_server, engine, PROMPT) == 4
        other = list(range(50_000, 50_000 + 2 * CHUNK))
        replies = engine.put(other, wait=False)
        assert replies
        drain(server)
        assert in_redis(redis_server, engine, other) == 0
        assert use(engine, other) == WANTED * 2
        assert offer(engine, other, USED) == b"oo"
        drain(server)
        assert in_redis(redis_server, engine, other) == 2
        assert tier(server, "disk")["num_entries"] == 0


def test_second_use_on_disk_declines_the_first_offer(short_dir: Path) -> None:
    with serving(short_dir, None, disk="second_use") as server, FakeEngine(server.config.socket) as engine:
        engine.put(PROMPT, wait=False)
        wait_until(lambda: server.service.storer.num_declined == 4)
        assert engine.match(PROMPT) == b""
        assert use(engine, PROMPT) == WANTED * 4
        assert offer(engine, PROMPT, USED) == b"oooo"
        assert engine.match(PROMPT) == b"dddd"
        assert use(engine, PROMPT) == NOTED * 4


def test_on_evict_takes_what_leaves_the_pool_only(short_dir: Path) -> None:
    with serving(short_dir, None, disk="on_evict") as server, FakeEngine(server.config.socket) as engine:
        assert engine.client.spill == {"disk": "on-evict"}
        engine.put(PROMPT, wait=False)
        assert offer(engine, PROMPT, COMPUTED) == b"nnnn"
        assert offer(engine, PROMPT, EVICTED) == b"oooo"
        assert engine.match(PROMPT) == b"dddd"


def test_to_leave_the_pool_is_no_use(short_dir: Path, redis_server: RedisServer) -> None:
    with (
        serving(short_dir, redis_server, disk="on_evict", shared="second_use") as server,
        FakeEngine(server.config.socket) as engine,
    ):
        engine.put(PROMPT, wait=False)
        wait_until(lambda: server.service.storer.num_declined == 4)
        assert offer(engine, PROMPT, EVICTED) == b"oooo"
        drain(server)
        assert engine.match(PROMPT) == b"dddd"
        assert in_redis(redis_server, engine, PROMPT) == 0
        use(engine, PROMPT)
        drain(server)
        assert in_redis(redis_server, engine, PROMPT) == 4


def test_on_evict_takes_what_the_disk_evicts_to_the_shared_tier(short_dir: Path, redis_server: RedisServer) -> None:
    namespace = make_namespace(block_nbytes=256 << 10)  # a payload is 1 MiB
    with (
        serving(short_dir, redis_server, disk_bytes=16 << 20, shared="on_evict") as server,
        FakeEngine(server.config.socket, namespace, num_slots=16) as engine,
    ):
        prompts = [[2000 + i] * (3 * CHUNK) for i in range(8)]
        for prompt in prompts:
            engine.put(prompt)
        drain(server)
        gone = [p for p in prompts if len(engine.match(p).replace(b"s", b"")) < 3]
        assert tier(server, "disk")["num_evicted"] >= 8
        assert sum(in_redis(redis_server, engine, p) for p in prompts) == tier(server, "disk")["num_evicted"]
        assert gone
        for prompt in prompts:  # nothing is lost, and every byte is right
            engine.forget()
            assert engine.get(prompt) == engine.expected(prompt)
            drain(server)  # what was promoted has pushed others out, which are on their way


def test_never_reads_what_is_there_and_stores_nothing(short_dir: Path, redis_server: RedisServer) -> None:
    with serving(short_dir, redis_server, shared="through") as server, FakeEngine(server.config.socket) as engine:
        engine.put(PROMPT)
        drain(server)
    with (
        serving(short_dir / "other", redis_server, disk="never", shared="never") as server,
        FakeEngine(server.config.socket) as engine,
    ):
        assert engine.get(PROMPT) == engine.expected(PROMPT)
        assert engine.last_sources == ["shared"] * 4
        other = list(range(70_000, 70_000 + CHUNK))
        engine.put(other, wait=False)
        drain(server)
        assert engine.match(other) == b""
        assert tier(server, "disk")["num_entries"] == 0, "not promoted either"


def test_a_store_that_the_shared_tier_missed_is_made_up_for(short_dir: Path, redis_server: RedisServer) -> None:
    """Redis lost what it had; the disk has it still, and a read brings it back."""
    with serving(short_dir, redis_server, shared="through") as server, FakeEngine(server.config.socket) as engine:
        engine.put(PROMPT)
        drain(server)
        redis_server.client().flushall()
        server.service.moves.seen.clear()  # or ten minutes later
        engine.forget()
        engine.get(PROMPT)
        drain(server)
        assert in_redis(redis_server, engine, PROMPT) == 4


def test_the_copy_of_a_second_use_is_not_made_after_an_eviction(short_dir: Path, redis_server: RedisServer) -> None:
    with serving(short_dir, redis_server, shared="second_use") as server, FakeEngine(server.config.socket) as engine:
        keys = engine.put(PROMPT)
        writer = server.service.moves.shared_writer
        assert writer is not None
        with writer._writing:  # the queue stands still
            use(engine, PROMPT)
            assert writer.queued_nbytes
            evicting = threading.Thread(target=evict, args=(server, engine, keys))
            evicting.start()
            wait_until(lambda: server.service.moves.evictions.number)
        evicting.join()
        drain(server)
        assert in_redis(redis_server, engine, PROMPT) == 0


def evict(server: Server, engine: FakeEngine, keys: list[bytes]) -> None:
    with AdminClient(server.config.socket) as admin:
        admin.ask("TKV.EVICT", {"keys": {engine.ns: [key.hex() for key in keys]}})


# -- one fetch for many waiters


def test_engines_that_want_one_chunk_at_a_time_share_one_fetch(short_dir: Path, redis_server: RedisServer) -> None:
    namespace = make_namespace(block_nbytes=64 << 10)
    with (
        serving(short_dir / "first", redis_server, shared="through") as first,
        FakeEngine(first.config.socket, namespace) as engine,
    ):
        engine.put(PROMPT)
        drain(first)
    with serving(short_dir / "second", redis_server, disk="never", shared="through") as server:
        engines = [FakeEngine(server.config.socket, namespace, engine_id=f"engine-{i}") for i in range(4)]
        try:
            check_sharing(server, redis_server, engines)
        finally:
            for engine in engines:
                engine.close()


def check_sharing(server: Server, redis_server: RedisServer, engines: list[FakeEngine]) -> None:
    """Freeze Redis while all of them ask, so that they wait for one another."""
    got: list[list[bytes]] = []
    redis_server.sigstop()
    threads = [threading.Thread(target=lambda e=engine: got.append(e.get(PROMPT))) for engine in engines]
    for thread in threads:
        thread.start()
    redis_server.sigcont()
    for thread in threads:
        thread.join()
    whole = [payloads for payloads in got if payloads]
    assert whole and all(payloads == engines[0].expected(PROMPT) for payloads in whole)
    num = tier(server, "shared")["num_hits"] + server.service.fetcher.flights.num_joined
    assert num == 4 * len(whole), "each chunk was read from Redis, or taken from who read it"


def test_a_flight_that_fails_leaves_its_waiters_to_themselves(namespace_pair: tuple[Namespace, Namespace]) -> None:
    from tierkv_server.flights import Flights

    flights = Flights()
    names = [(ns.ns_id(), b"k" * 32) for ns in namespace_pair]
    mine, others = flights.claim(names, 0)
    assert (list(mine), others) == ([0, 1], {})
    again, waiting = flights.claim(names, 0)
    assert again == {} and set(waiting) == {0, 1}
    flights.give_up((names[i], flight) for i, flight in mine.items())
    assert all(flight.over.is_set() and flight.landed is None for flight in waiting.values())
    assert list(flights.claim(names, 0)[0]) == [0, 1]


@pytest.fixture
def namespace_pair() -> tuple[Namespace, Namespace]:
    return make_namespace("one"), make_namespace("two")


# -- what another engine waits for


def test_what_is_handed_off_goes_to_every_tier_that_stores(short_dir: Path, redis_server: RedisServer) -> None:
    for disk, shared, there in (
        ("second_use", "on_evict", (4, 4)),
        ("never", "second_use", (0, 4)),
        ("on_evict", "never", (4, 0)),
    ):
        redis_server.client().flushall()
        directory = short_dir / disk
        directory.mkdir()
        with (
            serving(directory, redis_server, disk=disk, shared=shared) as server,
            FakeEngine(server.config.socket) as engine,
        ):
            engine.put(PROMPT, wait=False)
            assert offer(engine, PROMPT, HANDOFF) == STORED * 4
            drain(server)
            assert (tier(server, "disk")["num_entries"], in_redis(redis_server, engine, PROMPT)) == there
            assert use(engine, PROMPT, HANDOFF) == NOTED * 4, "nothing of it lacks"


def test_what_was_stored_before_is_brought_to_the_shared_tier(short_dir: Path, redis_server: RedisServer) -> None:
    """Also where this server believes that Redis has it, and Redis has lost it."""
    with serving(short_dir, redis_server, shared="second_use") as server, FakeEngine(server.config.socket) as engine:
        engine.put(PROMPT)
        for _ in range(2):
            assert in_redis(redis_server, engine, PROMPT) == 0
            assert use(engine, PROMPT, HANDOFF) == NOTED * 4
            drain(server)
            assert in_redis(redis_server, engine, PROMPT) == 4
            redis_server.client().flushall()
        other = list(range(80_000, 80_000 + 4 * CHUNK))
        assert use(engine, other, HANDOFF) == WANTED * 4


@pytest.mark.parametrize("reason", [COMPUTED, HANDOFF])
def test_what_is_handed_off_waits_for_room_in_a_full_queue(
    short_dir: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    """The queue has room for two records, and is held up while eight come."""
    prompt = list(range(50_000, 50_000 + 8 * CHUNK))
    with (
        serving(short_dir, redis_server, disk="never", shared="through") as server,
        FakeEngine(server.config.socket) as engine,
    ):
        writer = server.service.moves.shared_writer
        assert writer is not None
        monkeypatch.setattr(writer, "_budget", 2 * record_nbytes(engine.shape.payload_nbytes))
        keys = engine.keys(prompt)
        entries = [engine._fill(keys, i, "", 0) for i in range(8)]
        items = [msgspec.structs.replace(engine._item(entry, keys, ""), reason=reason) for entry in entries]
        with writer.evict(bytes(16), set()):  # it writes nothing meanwhile
            replies = engine.store(items)
            if reason == COMPUTED:
                engine.result(replies)
            else:
                wait_until(lambda: writer.queued_nbytes == writer._budget)
                assert not replies[0], "a command is answered when there was room for all of it"
        engine.result(replies)
        drain(server)
        assert in_redis(redis_server, engine, prompt) == (8 if reason == HANDOFF else 2)
        assert writer.num_dropped == (0 if reason == HANDOFF else 6)


# -- the filter


def denied(engine: FakeEngine, tokens: list[int]) -> list[bool]:
    return [engine.client.denies(key) for key in engine.keys(tokens)]


def test_engines_know_what_is_not_stored(short_dir: Path) -> None:
    other = list(range(90_000, 90_000 + 4 * CHUNK))
    with serving(short_dir, None) as server, FakeEngine(server.config.socket) as engine:
        engine.put(PROMPT)
        drain(server)
        assert denied(engine, PROMPT) == [False] * 4
        assert denied(engine, other) == [True] * 4
        with FakeEngine(server.config.socket, engine_id="late") as late:
            wait_until(lambda: late.client.denies(late.keys(other)[0]))
            assert denied(late, PROMPT) == [False] * 4
            engine.put(other)
            drain(server)
            assert denied(late, other) == [False] * 4, "what others store is known a moment later"
            assert late.get(other) == late.expected(other)


def test_a_server_that_comes_back_publishes_what_its_disk_has(short_dir: Path) -> None:
    with serving(short_dir, None) as server, FakeEngine(server.config.socket) as engine:
        engine.put(PROMPT)
    with serving(short_dir, None) as server, FakeEngine(server.config.socket) as engine:
        drain(server)
        assert denied(engine, PROMPT) == [False] * 4
        assert denied(engine, list(range(90_000, 90_000 + CHUNK))) == [True]


def test_no_filter_denies_after_its_session(short_dir: Path) -> None:
    with serving(short_dir, None) as server, FakeEngine(server.config.socket) as engine:
        drain(server)
        wait_until(lambda: engine.client.denies(engine.keys(PROMPT)[0]))
    wait_until(lambda: not engine.client.connected())
    assert denied(engine, PROMPT) == [False] * 4


def test_other_nodes_stores_are_known_in_a_moment(short_dir: Path, redis_server: RedisServer) -> None:
    with (
        serving(short_dir / "one", redis_server, shared="through") as one,
        serving(short_dir / "two", redis_server, shared="through") as two,
        FakeEngine(one.config.socket, engine_id="one") as here,
        FakeEngine(two.config.socket, engine_id="two") as there,
    ):
        wait_until(lambda: all(denied(there, PROMPT)), what="the filter did not arrive")
        here.put(PROMPT)
        drain(one)
        wait_until(lambda: not any(denied(there, PROMPT)), what="the news did not arrive")
        assert there.get(PROMPT) == there.expected(PROMPT)
        assert there.last_sources == ["shared"] * 4


def test_while_redis_is_out_engines_ask(short_dir: Path, redis_server: RedisServer) -> None:
    with (
        serving(short_dir, redis_server, shared="through") as server,
        FakeEngine(server.config.socket) as engine,
    ):
        wait_until(lambda: all(denied(engine, PROMPT)))
        redis_server.sigstop()
        try:
            wait_until(lambda: not any(denied(engine, PROMPT)), what="a filter that nobody refreshes still denies")
        finally:
            redis_server.sigcont()
        wait_until(lambda: all(denied(engine, PROMPT)), timeout_s=60, what="the filter did not come back")
