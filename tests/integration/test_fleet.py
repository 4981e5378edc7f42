"""Evictions reach every node of a fleet: two real servers with a disk and an engine each, and one Redis."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fake_engine import FakeEngine, wait_until
from servers import RedisServer, start_redis
from serving import patient
from tierkv.client import AdminClient
from tierkv.config import Spill
from tierkv.server_config import ServerConfig
from tierkv_server.server import Server

CHUNK = 32
PROMPT = list(range(1000, 1000 + 4 * CHUNK))
OTHER = list(range(7000, 7000 + 3 * CHUNK))

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    server = start_redis(tmp_path)
    yield server
    server.kill()


@contextlib.contextmanager
def node(directory: Path, redis: RedisServer, redis_timeout_s: float = 10.0) -> Iterator[Server]:
    """A node whose stores go to disk and Redis at once."""
    config = ServerConfig.make(directory, 64 << 20, redis.url, spill={"shared": Spill.THROUGH})
    config = patient(config, redis_timeout_s)
    server = Server(msgspec.structs.replace(config, drain_s=1.0))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.leave()
        thread.join()


def admin(server: Server, command: str, body: Any = None) -> Any:
    with AdminClient(server.config.socket) as client:
        return client.ask(command, body)


def drain(server: Server) -> None:
    with AdminClient(server.config.socket) as client:
        assert client.call("TKV.DRAIN", 20) == b"1"


def evict(server: Server, engine: FakeEngine, tokens: list[int], **more: Any) -> Any:
    keys = [key.hex() for key in engine.keys(tokens)]
    return admin(server, "TKV.EVICT", {"keys": {engine.ns: keys}} | more)


def on_disk(server: Server, engine: FakeEngine, tokens: list[int]) -> int:
    """Return how many of a prompt's chunks the node's own disk has."""
    keys = set(engine.keys(tokens))
    return len(keys & {e.key for e in server.service.disk.entries(bytes.fromhex(engine.ns))})


def everywhere(first: Server, second: Server, redis: RedisServer, one: FakeEngine, two: FakeEngine) -> None:
    """Have two prompts on both disks, in both pools and in Redis."""
    one.put(PROMPT)
    one.put(OTHER)
    drain(first)
    assert len(two.get(PROMPT)) == 4 and len(two.get(OTHER)) == 3
    drain(second)
    for server, engine in ((first, one), (second, two)):
        assert on_disk(server, engine, PROMPT) == 4 and on_disk(server, engine, OTHER) == 3
    assert len(redis.client().keys(f"tierkv:1:{one.ns}:{{*")) >= 7


def applied(server: Server, num: int = 1) -> bool:
    """Return whether so many evictions of others are done with here: until then, what is stored anew may go as well."""
    feed = server.node.feed
    return feed is not None and feed.stat().num_applied >= num


def gone(server: Server, engine: FakeEngine, tokens: list[int]) -> bool:
    engine.index.apply_drops()
    return not on_disk(server, engine, tokens) and not any(engine.index.get(key) for key in engine.keys(tokens))


def test_an_eviction_reaches_the_other_node_and_its_neighbours_stay(short_dir: Path, redis_server: RedisServer) -> None:
    with (
        node(short_dir / "a", redis_server) as first,
        node(short_dir / "b", redis_server) as second,
        FakeEngine(first.config.socket, engine_id="one") as one,
        FakeEngine(second.config.socket, engine_id="two") as two,
    ):
        everywhere(first, second, redis_server, one, two)
        done = evict(first, one, PROMPT)
        assert done["removed"] == {"host": 4, "disk": 4, "shared": 4}
        wait_until(lambda: applied(second) and gone(second, two, PROMPT), what="the other node kept what was evicted")
        assert two.match(PROMPT) == b"" and one.match(PROMPT) == b""
        for engine in (one, two):
            engine.forget()
            assert engine.get(OTHER) == engine.expected(OTHER)
        one.put(PROMPT)  # computed again: it is new, and stays
        drain(first)
        two.forget()
        assert two.get(PROMPT) == two.expected(PROMPT)


def test_a_whole_namespace_goes_from_every_node(short_dir: Path, redis_server: RedisServer) -> None:
    with (
        node(short_dir / "a", redis_server) as first,
        node(short_dir / "b", redis_server) as second,
        FakeEngine(first.config.socket, engine_id="one") as one,
        FakeEngine(second.config.socket, engine_id="two") as two,
    ):
        everywhere(first, second, redis_server, one, two)
        admin(first, "TKV.EVICT", {"ns": one.ns, "everything": True})
        wait_until(lambda: applied(second) and gone(second, two, PROMPT) and gone(second, two, OTHER))
        assert not redis_server.client().keys(f"tierkv:1:{one.ns}:{{*")
        two.put(OTHER)
        drain(second)
        assert one.get(OTHER) == one.expected(OTHER)


def test_an_eviction_from_this_disk_is_this_nodes_own(short_dir: Path, redis_server: RedisServer) -> None:
    with (
        node(short_dir / "a", redis_server) as first,
        node(short_dir / "b", redis_server) as second,
        FakeEngine(first.config.socket, engine_id="one") as one,
        FakeEngine(second.config.socket, engine_id="two") as two,
    ):
        everywhere(first, second, redis_server, one, two)
        evict(first, one, PROMPT, tiers=["host", "disk"])
        one.forget()
        assert one.get(PROMPT) == one.expected(PROMPT)
        assert one.last_sources == ["shared"] * 4
        drain(second)
        assert on_disk(second, two, PROMPT) == 4


def test_a_node_that_was_away_does_not_bring_it_back(short_dir: Path, redis_server: RedisServer) -> None:
    with node(short_dir / "a", redis_server) as first, FakeEngine(first.config.socket, engine_id="one") as one:
        with (
            node(short_dir / "b", redis_server) as second,
            FakeEngine(second.config.socket, engine_id="two") as two,
        ):
            everywhere(first, second, redis_server, one, two)
        evict(first, one, PROMPT)
        with (
            node(short_dir / "b", redis_server) as second,
            FakeEngine(second.config.socket, engine_id="two") as two,
        ):
            wait_until(lambda: applied(second) and gone(second, two, PROMPT), what="it came back with what was evicted")
            assert on_disk(second, two, OTHER) == 3, "it had heard of everything: the rest of its disk stays"
            assert two.get(PROMPT) == []
            assert two.get(OTHER) == two.expected(OTHER)


def test_an_eviction_while_redis_is_out_is_carried_out_later(short_dir: Path, redis_server: RedisServer) -> None:
    with (
        node(short_dir / "a", redis_server, redis_timeout_s=0.5) as first,
        node(short_dir / "b", redis_server, redis_timeout_s=0.5) as second,
        FakeEngine(first.config.socket, engine_id="one") as one,
        FakeEngine(second.config.socket, engine_id="two") as two,
    ):
        everywhere(first, second, redis_server, one, two)
        redis_server.sigstop()
        try:
            done = evict(first, one, PROMPT)
        finally:
            redis_server.sigcont()
        assert done["removed"]["disk"] == 4
        assert any("shared" in sentence for sentence in done["incomplete"])
        wait_until(lambda: gone(second, two, PROMPT), timeout_s=90, what="the other node never heard of it")
        names = wait_until(lambda: [redis_server.client().keys(f"tierkv:1:{one.ns}:{{*")], timeout_s=60)[0]
        evicted = {key.hex().encode() for key in one.keys(PROMPT)}
        assert not evicted & {name.rsplit(b":", 1)[-1] for name in names}


def test_a_node_that_missed_what_nobody_knows_empties_its_disk(short_dir: Path, redis_server: RedisServer) -> None:
    with node(short_dir / "a", redis_server) as first, FakeEngine(first.config.socket, engine_id="one") as one:
        with (
            node(short_dir / "b", redis_server) as second,
            FakeEngine(second.config.socket, engine_id="two") as two,
        ):
            everywhere(first, second, redis_server, one, two)
        evict(first, one, PROMPT)
        redis_server.client().flushall()
        with (
            node(short_dir / "b", redis_server) as second,
            FakeEngine(second.config.socket, engine_id="two") as two,
        ):
            wait_until(lambda: gone(second, two, PROMPT) and gone(second, two, OTHER))
        assert on_disk(first, one, OTHER) == 3, "who was there all the time has missed nothing"


def test_what_is_queued_when_an_eviction_arrives_is_not_written(short_dir: Path, redis_server: RedisServer) -> None:
    with (
        node(short_dir / "a", redis_server) as first,
        node(short_dir / "b", redis_server) as second,
        FakeEngine(first.config.socket, engine_id="one") as one,
        FakeEngine(second.config.socket, engine_id="two") as two,
    ):
        one.put(PROMPT)
        drain(first)
        writer = second.service.moves.shared_writer
        assert writer is not None
        with writer._writing:  # the other node's queue stands still
            two.put(PROMPT)
            assert writer.queued_nbytes
            before = second.service.moves.evictions.number
            evict(first, one, PROMPT)
            wait_until(lambda: second.service.moves.evictions.number > before)
        wait_until(lambda: applied(second) and gone(second, two, PROMPT))
        drain(second)
        assert one.match(PROMPT) == two.match(PROMPT) == b""
