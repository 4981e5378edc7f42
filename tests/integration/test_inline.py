"""Engines that share no memory with their server: payloads over TCP and TLS, verified at both ends."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fake_engine import FakeEngine, make_namespace, wait_until
from network import Wire, address_of, insecure_config, make_tokens, tls_config
from proxy import Proxy
from servers import TlsFiles, make_certificates, server_binaries, start_redis
from serving import alive, kill_launched, make_config, owner, serving
from tierkv import __version__, client, health
from tierkv.client import AdminClient
from tierkv.config import COMMAND_NBYTES, PROTOCOL_VERSION
from tierkv.errors import ProtocolError
from tierkv.hostindex import Entry, Fetch
from tierkv.inline_client import InlineTransfers, merge_letters
from tierkv.launcher import Launcher
from tierkv.messages import Hello, StoreItem
from tierkv.payload import checksum
from tierkv.pool import HostPool, PoolShape, Segment
from tierkv.resp import Error, Placed, encode_command
from tierkv.server_config import ServerConfig
from tierkv.transport import Address
from tierkv_server import inline
from tierkv_server.server import Server

CHUNK = 32
PROMPT = list(range(1000, 1000 + 6 * CHUNK))
#: Payloads of 256 KiB: larger than a receive, 32 a command.
LARGE = make_namespace("fake/large-model", block_nbytes=64 << 10)

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(params=["unix", "tcp", "tls"])
def place(request: pytest.FixtureRequest, short_dir: Path, files: TlsFiles) -> Iterator[tuple[Server, Address]]:
    """A server and the address of its inline engines."""
    if request.param == "unix":
        config = make_config(short_dir)
        address = Address(path=config.socket)
    elif request.param == "tcp":
        config = insecure_config(short_dir)
        address = address_of(config)
    else:
        tokens = make_tokens(short_dir)
        config = tls_config(short_dir, files, tokens)
        address = address_of(config, tokens["engine"], files)
    with serving(config) as server:
        yield server, address


@pytest.fixture
def server(short_dir: Path) -> Iterator[Server]:
    with serving(insecure_config(short_dir)) as server:
        yield server


@pytest.fixture
def engine(server: Server) -> Iterator[FakeEngine]:
    with FakeEngine(address_of(server.config)) as engine:
        yield engine


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time-outs and back-offs short enough for tests of faults."""
    monkeypatch.setattr(client, "REPLY_TIMEOUT_S", 0.5)
    monkeypatch.setattr(client, "CONNECT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(health, "BACKOFF_MIN_S", 0.05)
    monkeypatch.setattr(health, "BACKOFF_MAX_S", 0.2)


def through_proxy(config: ServerConfig) -> Proxy:
    return Proxy(("127.0.0.1", address_of(config).port))


def near(proxy: Proxy) -> Address:
    """Return where an engine finds the proxy."""
    return Address(host="127.0.0.1", port=proxy.port)


def start_fetch(engine: FakeEngine, tokens: Sequence[int], lane: int = 0) -> Fetch:
    """Send one FETCH for all chunks of a prompt and return it, unanswered."""
    keys = engine.keys(tokens)
    fetch = Fetch([engine._reserve(keys, i, "") for i in range(len(keys))])
    for i, entry in enumerate(fetch.entries):
        entry.fetch, entry.fetch_index = fetch, i
    engine.client.fetch(lane, 0, keys[0], fetch)
    return fetch


def answered(fetch: Fetch) -> bytes:
    wait_until(lambda: fetch.results is not None, what="no reply to FETCH")
    assert fetch.results is not None
    return fetch.results


def items_of(engine: FakeEngine, tokens: Sequence[int]) -> list[StoreItem]:
    """Fill slots with a prompt's chunks and return what a STORE of them says."""
    keys = engine.keys(tokens)
    return [engine._item(engine._fill(keys, i, "", 0), keys, "") for i in range(len(keys))]


# -- what was stored is fetched


@pytest.mark.parametrize("num_parts", [1, 3])
def test_what_was_stored_is_fetched(place: tuple[Server, Address], num_parts: int) -> None:
    server, address = place
    namespace = make_namespace(num_parts=num_parts, block_nbytes=48 << 10)
    with FakeEngine(address, namespace, inline=True) as engine:
        engine.put(PROMPT, seed=7)
        assert engine.match(PROMPT) == b"dddddd"
        engine.forget()
        assert engine.get(PROMPT) == engine.expected(PROMPT, seed=7)
        assert engine.last_sources == ["disk"] * 6
        assert engine.client.health.num_faults == 0
        with FakeEngine(address, namespace, engine_id="second", inline=True) as second:
            assert second.get(PROMPT) == engine.expected(PROMPT, seed=7)
    wait_until(lambda: not server.commands._inline.in_use, what="memory of sessions that have ended was kept")


def test_engines_with_and_without_shared_memory_share_one_store(short_dir: Path) -> None:
    config = insecure_config(short_dir)
    with serving(config), FakeEngine(config.socket) as close, FakeEngine(address_of(config)) as far:
        close.put(PROMPT[: 3 * CHUNK], seed=1)
        assert far.get(PROMPT) == close.expected(PROMPT[: 3 * CHUNK], seed=1)
        far.put(PROMPT, seed=1)
        close.forget()
        assert close.get(PROMPT) == far.expected(PROMPT, seed=1)


def test_many_payloads_at_a_time_on_every_lane(place: tuple[Server, Address]) -> None:
    """48 MiB through all lanes, commands of the largest size: what is fetched is what was stored."""
    _, address = place
    num = COMMAND_NBYTES // LARGE.payload_nbytes
    prompts = [[i, *range(1, num * CHUNK)] for i in range(6)]
    with FakeEngine(address, LARGE, num_slots=7 * num, inline=True) as engine:
        for seed, prompt in enumerate(prompts[:3]):
            engine.put(prompt, seed=seed)
        engine.forget()
        fetches = [start_fetch(engine, prompt, lane=engine.client.next_lane()) for prompt in prompts]
        assert [answered(fetch) for fetch in fetches] == [b"d" * num] * 3 + [b"-" * num] * 3
        for seed, (prompt, fetch) in enumerate(zip(prompts[:3], fetches, strict=False)):
            for entry in fetch.entries:
                engine.index.filled(entry, "disk")
            assert [engine.payload(entry.key) for entry in fetch.entries] == engine.expected(prompt, seed=seed)
        assert engine.client.health.num_faults == 0


def test_holes_and_misses(engine: FakeEngine) -> None:
    engine.put(PROMPT[: 2 * CHUNK])
    keys = engine.keys(PROMPT)
    engine.forget()
    fetch = start_fetch(engine, PROMPT)
    assert answered(fetch) == b"dd----"
    assert fetch.released
    assert bytes(engine.pool.parts(fetch.entries[1].slot)[0]) == engine.expected(PROMPT)[1]
    assert engine.client.match(0, 0, keys[0], keys) is not None


def test_what_is_stored_already_and_what_an_operator_evicts(server: Server, engine: FakeEngine) -> None:
    items = items_of(engine, PROMPT)
    assert engine.result(engine.store(items)) == b"oooooo"
    assert engine.result(engine.store(items)) == b"xxxxxx"
    with AdminClient(server.config.socket) as admin:
        (row,) = admin.ask("TKV.LS")
        assert (row["num_stored"], sorted(row["tiers"])) == (6, ["disk", "host"])
        report = admin.ask("TKV.EVICT", {"everything": True, "ns": engine.ns})
        assert report["removed"] == {"host": 6, "disk": 6}
        assert report["incomplete"] == []
    engine.index.apply_drops()
    assert engine.match(PROMPT) == b""


@pytest.mark.skipif(not server_binaries(), reason="neither Redis nor Valkey is installed")
def test_what_came_from_the_shared_tier_reaches_the_disk_although_its_slots_are_used_again(short_dir: Path) -> None:
    redis = start_redis(short_dir)
    try:
        config = insecure_config(short_dir)
        shared = make_config(short_dir, shared_url=redis.url).shared
        config = msgspec.structs.replace(config, shared=shared)
        prompts = [[i, *PROMPT[1:]] for i in range(4)]
        with serving(config) as server, FakeEngine(address_of(config)) as engine:
            for prompt in prompts:
                engine.put(prompt)
            assert server.service.drain(20)
            server.service.disk.drop_namespace(bytes.fromhex(engine.ns))
            server.service.disk.add_namespace(engine.namespace)
            engine.forget()
            fetches = [start_fetch(engine, prompt) for prompt in prompts]  # one lane: the same slots of the server
            assert [answered(fetch) for fetch in fetches] == [b"ssssss"] * 4
            assert server.service.drain(20)
            assert [engine.match(prompt) for prompt in prompts] == [b"dddddd"] * 4
    finally:
        redis.stop()


# -- generations: a slot that is reused is never stored under the old key


def test_a_stale_slot_is_not_sent(engine: FakeEngine) -> None:
    items = items_of(engine, PROMPT)
    engine.pool.generations[items[1].slot] += 1
    engine.pool.generations[items[4].slot] += 1
    assert engine.result(engine.store(items)) == b"ogoogo"
    engine.forget()
    assert answered(start_fetch(engine, PROMPT)) == b"d-dd-d"
    for slot in range(engine.shape.num_slots):
        engine.pool.generations[slot] += 1
    assert engine.result(engine.store(items)) == b"gggggg"


def test_a_slot_that_is_reused_while_it_is_copied_is_not_sent(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = items_of(engine, PROMPT[:CHUNK])
    copyto = np.copyto

    def overtaken(to: Any, source: Any) -> None:
        engine.pool.generations[items[0].slot] += 1
        copyto(to, source)

    monkeypatch.setattr("tierkv.pool.np.copyto", overtaken)
    assert engine.result(engine.store(items)) == b"g"
    monkeypatch.undo()
    assert engine.match(PROMPT[:CHUNK]) == b""


def test_what_is_sent_is_a_copy(short_dir: Path) -> None:
    """Slots that get other contents after their STORE has begun, while its bytes wait in a slow network."""
    config = insecure_config(short_dir)
    num = COMMAND_NBYTES // LARGE.payload_nbytes
    with serving(config), through_proxy(config) as proxy:
        address = near(proxy)
        with FakeEngine(address, LARGE, num_slots=2 * num) as engine:
            prompt = list(range(num * CHUNK))
            items = items_of(engine, prompt)
            proxy.freeze()
            replies = engine.store(items)
            wait_until(lambda: engine.client._inline and engine.client._inline._staging.nbytes, what="nothing was sent")
            time.sleep(0.1)  # the sockets' buffers are full
            for item in items:  # the scheduler has better use for the slots
                engine.pool.generations[item.slot] += 1
                engine.pool.parts(item.slot)[0][:] = bytes(LARGE.payload_nbytes)
            proxy.restore()
            assert engine.result(replies) == b"o" * num
            engine.index = type(engine.index)(engine.pool)
            assert engine.get(prompt) == engine.expected(prompt)


# -- damage on the way


def test_a_payload_that_arrives_damaged_is_a_miss(short_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = insecure_config(short_dir)
    with serving(config), through_proxy(config) as proxy, FakeEngine(near(proxy), LARGE) as engine:
        engine.put(PROMPT)
        engine.forget()
        proxy.replies.flip(LARGE.payload_nbytes * 3 // 2)  # in the second payload
        fetch = start_fetch(engine, PROMPT)
        assert answered(fetch) == b"d!dddd"
        assert fetch.released
        assert f"chunks from {near(proxy)} arrived damaged, and are misses: 1" in caplog.text
        for entry in fetch.entries:
            engine.index.drop(entry)
        assert engine.get(PROMPT) == engine.expected(PROMPT)
        assert (engine.client.health.num_faults, proxy.replies.num_faults) == (0, 1)


def test_a_payload_that_is_damaged_on_its_way_to_the_server_is_not_stored(short_dir: Path) -> None:
    config = insecure_config(short_dir)
    with serving(config), through_proxy(config) as proxy, FakeEngine(near(proxy), LARGE) as engine:
        items = items_of(engine, PROMPT)
        proxy.requests.flip(LARGE.payload_nbytes * 5 // 2)
        assert engine.result(engine.store(items)) == b"oo!ooo"
        assert engine.match(PROMPT) == b"dd"
        assert engine.result(engine.store(items)) == b"xxoxxx"
        engine.forget()
        assert engine.get(PROMPT) == engine.expected(PROMPT)


@pytest.mark.usefixtures("impatient")
def test_whatever_the_network_does_what_is_fetched_is_right(short_dir: Path) -> None:
    """Bits flipped and connections cut anywhere, in commands, lengths, letters, checksums and payloads alike."""
    config = insecure_config(short_dir)
    rng = random.Random(5)
    num_right = num_lost = 0
    with serving(config), through_proxy(config) as proxy, FakeEngine(near(proxy), num_slots=64) as engine:
        for i in range(60):
            prompt = [i % 20, *PROMPT[1:]]
            proxy.restore()
            wait_until(engine.client.connected, what="it did not come back")
            for direction in (proxy.requests, proxy.replies):
                fault = rng.choice([direction.flip, direction.flip, direction.cut])
                fault(rng.randrange(40_000))
            engine.put(prompt, wait=False)
            engine.forget()
            got = engine.get(prompt)
            assert got == engine.expected(prompt)[: len(got)]
            num_right, num_lost = num_right + len(got), num_lost + 6 - len(got)
            engine.forget()
        proxy.restore()
        assert proxy.requests.num_faults + proxy.replies.num_faults >= 20
        assert num_right >= 20
        assert num_lost >= 6
        wait_until(engine.client.connected, what="it did not come back")
        engine.put(PROMPT)
        engine.forget()
        assert engine.get(PROMPT) == engine.expected(PROMPT)


# -- leases: the reader thread is the only writer


@pytest.mark.usefixtures("impatient")
def test_slots_are_free_when_a_session_ends(short_dir: Path) -> None:
    """A server that is stopped in the middle: unlike with shared memory, nothing of it can come any more."""
    config = insecure_config(short_dir)
    with serving(config), through_proxy(config) as proxy, FakeEngine(near(proxy), LARGE) as engine:
        engine.put(PROMPT)
        engine.forget()
        proxy.freeze()
        fetch = start_fetch(engine, PROMPT)
        assert answered(fetch) == b""
        wait_until(lambda: fetch.released, what="the slots were not released with the session")
        before = [bytes(engine.pool.parts(entry.slot)[0]) for entry in fetch.entries]
        proxy.restore()
        wait_until(engine.client.connected, what="it did not come back")
        assert [bytes(engine.pool.parts(entry.slot)[0]) for entry in fetch.entries] == before
        for entry in fetch.entries:
            engine.index.drop(entry)
        assert engine.get(PROMPT) == engine.expected(PROMPT)


@pytest.mark.usefixtures("impatient")
def test_a_connection_that_is_cut_in_a_payload_is_a_miss(short_dir: Path) -> None:
    config = insecure_config(short_dir)
    with serving(config), through_proxy(config) as proxy, FakeEngine(near(proxy), LARGE) as engine:
        engine.put(PROMPT)
        engine.forget()
        proxy.replies.cut(300 << 10)  # in the second payload
        fetch = start_fetch(engine, PROMPT)
        assert answered(fetch) == b""
        wait_until(lambda: fetch.released)
        wait_until(engine.client.connected, what="it did not come back")
        for entry in fetch.entries:
            engine.index.drop(entry)
        assert engine.get(PROMPT) == engine.expected(PROMPT)


@pytest.mark.usefixtures("impatient")
def test_sigkill_of_the_server(short_dir: Path) -> None:
    config = msgspec.structs.replace(insecure_config(short_dir), linger_s=20.0)
    launcher = Launcher(config)
    try:
        with FakeEngine(address_of(config), launcher=launcher) as engine:
            engine.put(PROMPT)
            engine.forget()
            pid, boot = owner(config), engine.client.boot()
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not alive(pid))
            wait_until(lambda: engine.client.connected() and engine.client.boot() != boot, what="it was not launched")
            assert engine.get(PROMPT) == engine.expected(PROMPT)
    finally:
        kill_launched(config)


# -- limits and refusals


def test_what_an_inline_session_may_not_do(server: Server, engine: FakeEngine) -> None:
    assert engine.welcome
    keys = b"".join(engine.keys(PROMPT))
    with Wire(server.config) as wire:
        assert wire.call("TKV.ATTACH", engine.welcome.session) == "OK"
        for words, sentence in (
            ([b"TKV.FETCH", 0, keys[:32], keys, bytes(24)], "bad arguments"),
            ([b"TKV.FETCH", 0, keys[:32], keys * 4096], "an inline command moves at most"),
            ([b"TKV.STORE", msgspec.msgpack.encode([])], "bad arguments"),
            ([b"TKV.STORE", msgspec.msgpack.encode([]), bytes(16)], "a checksum of 16 bytes and a payload of 4096"),
        ):
            reply = wire.call(*words)
            assert isinstance(reply, Error) and sentence in reply, reply
        assert wire.call("TKV.STORE", msgspec.msgpack.encode([]), b"") == b""


def test_payloads_of_a_wrong_number_or_size_are_refused(server: Server, engine: FakeEngine) -> None:
    assert engine.welcome
    (item,) = items_of(engine, PROMPT[:CHUNK])
    payload = engine.payload(item.key)
    body = msgspec.msgpack.encode([item])
    with Wire(server.config) as wire:
        assert wire.call("TKV.ATTACH", engine.welcome.session) == "OK"
        for payloads in ([], [payload, payload], [payload[:-1]], [payload + b"x"]):
            reply = wire.call("TKV.STORE", body, checksum(payload), *payloads)
            assert isinstance(reply, Error), reply
        assert wire.call("TKV.STORE", body, bytes(16), payload) == b"!"
        assert engine.match(PROMPT) == b""
        assert wire.call("TKV.STORE", body, checksum(payload), payload) == b"o"
    assert engine.match(PROMPT) == b"d"


def test_a_hello_over_tcp_has_to_be_inline_and_sessions_keep_to_their_kind(server: Server) -> None:
    namespace = make_namespace()
    hello = Hello(
        version=__version__,
        protocol=PROTOCOL_VERSION,
        engine_id="e",
        pid=1,
        namespace=namespace,
        shape=PoolShape(2, 1, namespace.payload_nbytes),
    )
    with Wire(server.config) as wire:
        reply = wire.call("TKV.HELLO", msgspec.json.encode(hello))
        assert isinstance(reply, Error) and "has to say inline" in reply
        with FakeEngine(server.config.socket) as local:
            assert local.welcome
            reply = wire.call("TKV.ATTACH", local.welcome.session)
            assert isinstance(reply, Error) and "come over the unix socket" in reply
        body = msgspec.json.encode(msgspec.structs.replace(hello, inline=True))
        assert isinstance(wire.call("TKV.HELLO", body), bytes)
        reply = wire.call("TKV.HELLO", body)
        assert isinstance(reply, Error) and "opens a session once" in reply


def test_memory_for_inline_engines_is_bounded(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = insecure_config(short_dir)
    with serving(config) as server:
        one = PoolShape(inline.MAX_MOVERS * inline.num_slots(4096), 1, 4096).nbytes
        server.commands._inline = inline.InlineMemory(2 * one)
        with FakeEngine(address_of(config)) as first, FakeEngine(address_of(config)):
            assert server.commands._inline.in_use == 2 * one
            with pytest.raises(TimeoutError):  # an engine starts without the server, and tries again
                FakeEngine(address_of(config))
            first.close()
            wait_until(lambda: server.commands._inline.in_use == one)
            with FakeEngine(address_of(config)) as third:
                third.put(PROMPT)


def test_only_so_many_connections_of_a_session_move_payloads(server: Server, engine: FakeEngine) -> None:
    assert engine.welcome
    keys = b"".join(engine.keys(PROMPT))
    wires = [Wire(server.config) for _ in range(inline.MAX_MOVERS + 1)]
    replies = []
    for wire in wires:
        assert wire.call("TKV.ATTACH", engine.welcome.session) == "OK"
        replies.append(wire.call("TKV.FETCH", 0, keys[:32], keys))
    assert [isinstance(reply, list) for reply in replies] == [True] * inline.MAX_MOVERS + [False]
    wires[0].sock.close()
    wait_until(lambda: isinstance(wires[-1].call("TKV.FETCH", 0, keys[:32], keys), list))
    for wire in wires:
        wire.sock.close()


# -- pushes


def test_an_eviction_does_not_wait_for_payloads_that_are_queued(short_dir: Path) -> None:
    """Stores of evicted keys that have not been sent are not sent, and the answer overtakes the others."""
    config = insecure_config(short_dir)
    num = COMMAND_NBYTES // LARGE.payload_nbytes
    prompts = [[i, *range(1, num * CHUNK)] for i in range(6)]
    with (
        serving(config),
        through_proxy(config) as proxy,
        FakeEngine(near(proxy), LARGE, num_slots=8 * num) as engine,
        AdminClient(config.socket) as admin,
    ):
        items = [items_of(engine, prompt) for prompt in prompts]
        proxy.requests.nbytes_per_s = 2 << 20  # a command takes 4 s, an answer may take 2
        replies = [engine.store(some)[0] for some in items]
        report = admin.ask("TKV.EVICT", {"keys": {engine.ns: [key.hex() for key in engine.keys(prompts[5])]}})
        proxy.restore()
        assert report["removed"]["host"] == num
        assert report["incomplete"] == []
        assert [engine.result([reply]) for reply in replies] == [b"o" * num] * 5 + [b""]
        assert engine.match(prompts[4]) == b"d" * num
        assert engine.match(prompts[5]) == b""


def test_an_eviction_waits_for_a_store_of_its_keys_that_is_under_way(short_dir: Path) -> None:
    config = insecure_config(short_dir)
    with (
        serving(config) as server,
        through_proxy(config) as proxy,
        FakeEngine(near(proxy), LARGE) as engine,
        AdminClient(config.socket) as admin,
    ):
        items = items_of(engine, PROMPT)
        store, begun = server.service.store, threading.Event()

        def slow(*args: Any) -> bytes:
            begun.set()
            time.sleep(0.3)
            return store(*args)

        server.service.store = slow  # type: ignore[method-assign]
        replies = engine.store(items)
        assert begun.wait(20)
        report = admin.ask("TKV.EVICT", {"keys": {engine.ns: [key.hex() for key in engine.keys(PROMPT)]}})
        assert report["incomplete"] == []
        assert engine.result(replies) == b"oooooo"
        assert engine.match(PROMPT) == b"", "what was evicted came back"


# -- the client's own parts


def transfers() -> tuple[InlineTransfers, Fetch]:
    shape = PoolShape(4, 2, 64)
    pool = HostPool(shape, [Segment.create(shape.segment_nbytes(rank)) for rank in range(2)])
    entries = [Entry(bytes([i]) * 32, bytes(32), i, 16, i, 0) for i in range(3)]
    return InlineTransfers(pool), Fetch(entries)


def test_replies_that_make_no_sense_are_framing_errors() -> None:
    moves, fetch = transfers()
    digest = hashlib.md5(b"").digest()
    assert moves.place(fetch, [], 128) is None
    assert moves.place(fetch, [b"d-d"], 16) is None
    assert [len(part) for part in moves.place(fetch, [b"-dd", digest * 2], 128) or []] == [64, 64]
    for items, nbytes in (
        ([b"-dd", digest * 2], 127),
        ([b"--d", digest, Placed(128)], 128),
        ([b"dd", digest * 2], 128),
        ([b"ddd", digest * 2], 128),
        ([7, digest], 128),
    ):
        with pytest.raises(ProtocolError):
            moves.place(fetch, items, nbytes)  # type: ignore[arg-type]
    for reply in (b"ddd", None, [], [b"---"], [b"d--", digest], [b"d--", digest, b"x" * 128], [b"---", b"", Placed(1)]):
        with pytest.raises(ProtocolError):
            moves.verified(fetch, reply)  # type: ignore[arg-type]
    assert moves.verified(fetch, [b"---", b""]) == b"---"
    assert moves.verified(fetch, [b"d-!", digest, Placed(128)]) == b"!-!"
    moves._pool.close()


def test_letters_are_merged_in_order() -> None:
    assert merge_letters(b"ox", [True, False, True, False]) == b"ogxg"
    assert merge_letters(b"", [False, False]) == b"gg"
    assert merge_letters(b"", []) == b""
    assert merge_letters(None, [True]) is None
    assert merge_letters(b"o", [True, True]) is None


def test_a_client_of_an_old_server_that_says_nothing_is_bounded(short_dir: Path) -> None:
    """A peer that takes TCP connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = Address(host="127.0.0.1", port=mute.getsockname()[1])
        threads = threading.active_count()
        with pytest.raises(TimeoutError, match="no store server answers"):
            FakeEngine(address, start_s=0.0)
        assert threading.active_count() == threads


def test_commands_are_those_of_the_document(server: Server, engine: FakeEngine) -> None:
    """What a client of another make would send, byte by byte."""
    assert engine.welcome
    (item,) = items_of(engine, PROMPT[:CHUNK])
    payload = engine.payload(item.key)
    with Wire(server.config) as wire:
        wire.call("TKV.ATTACH", engine.welcome.session)
        wire.send(encode_command([b"TKV.STORE", msgspec.msgpack.encode([item]), checksum(payload), payload]))
        wire.send(encode_command([b"TKV.FETCH", 0, item.key, item.key + bytes(32)]))
        assert wire.reply() == b"o"
        assert wire.reply() == [b"d-", checksum(payload), payload]
