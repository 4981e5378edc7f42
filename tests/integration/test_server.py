"""The store server: what engines store and fetch through it, who it refuses, and what its death and theirs leave."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from fake_engine import FakeEngine, make_namespace, wait_until
from leaks import num_fds, stop_process
from serving import alive, make_config, owner, serving
from tierkv import __version__, client, health
from tierkv.client import AdminClient
from tierkv.config import PROTOCOL_VERSION, shared_digest
from tierkv.errors import ConfigError, RefusedError, UnavailableError
from tierkv.hostindex import Fetch
from tierkv.keys import anchor_index
from tierkv.launcher import Launcher
from tierkv.messages import Hello, StoreItem
from tierkv.pool import PoolShape, Segment
from tierkv.resp import Error, Parser, Value, encode_command
from tierkv.server_config import ServerConfig, SharedConfig
from tierkv_server.server import DirectoryInUseError, Server

CHUNK = 32
PROMPT = list(range(1000, 1000 + 6 * CHUNK))
SHORT_LINGER_S = 0.3

pytestmark = pytest.mark.usefixtures("no_leaks")


# -- helpers


@pytest.fixture
def server(short_dir: Path) -> Iterator[Server]:
    with serving(make_config(short_dir)) as server:
        yield server


@pytest.fixture
def engine(server: Server) -> Iterator[FakeEngine]:
    with FakeEngine(server.config.socket) as engine:
        yield engine


@pytest.fixture
def launched(short_dir: Path) -> Iterator[ServerConfig]:
    """The configuration of servers that tests launch; none is left at the end."""
    config = make_config(short_dir, linger_s=SHORT_LINGER_S)
    yield config
    pid = owner(config)
    if pid and alive(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not (pid and alive(pid)), what="a launched server is still there")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time-outs and back-offs short enough for tests of faults."""
    monkeypatch.setattr(client, "REPLY_TIMEOUT_S", 0.3)
    monkeypatch.setattr(client, "CONNECT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(health, "BACKOFF_MIN_S", 0.05)
    monkeypatch.setattr(health, "BACKOFF_MAX_S", 0.2)


def start_fetch(engine: FakeEngine, tokens: list[int], slots: list[int] | None = None, lane: int = 0) -> Fetch:
    """Send one FETCH for all chunks of a prompt and return it, unanswered."""
    keys = engine.keys(tokens)
    entries = [engine._reserve(keys, i, "") for i in range(len(keys))]
    for entry, slot in zip(entries, slots or [], strict=False):
        entry.slot = slot
    fetch = Fetch(entries)
    for i, entry in enumerate(entries):
        entry.fetch, entry.fetch_index = fetch, i
    engine.client.fetch(lane, 0, keys[anchor_index(0)], fetch)
    return fetch


def answered(fetch: Fetch) -> bytes:
    wait_until(lambda: fetch.results is not None, what="no reply to FETCH")
    assert fetch.results is not None
    return fetch.results


def items_of(engine: FakeEngine, tokens: list[int]) -> list[StoreItem]:
    """Fill slots with a prompt's chunks and return what a STORE of them would say."""
    keys = engine.keys(tokens)
    return [engine._item(engine._fill(keys, i, "", 0), keys, "") for i in range(len(keys))]


class Raw:
    """A plain connection: bytes out, values in."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(20)
        self.sock.connect(str(path))
        self._parser = Parser()
        self._values: list[Value] = []

    def send(self, data: bytes, fds: list[int] | None = None) -> None:
        if fds:
            socket.send_fds(self.sock, [data], fds)
        else:
            self.sock.sendall(data)

    def reply(self) -> Value:
        """Return the next reply.

        Raises:
            EOFError: the server has closed the connection.
        """
        while not self._values:
            data = self.sock.recv(1 << 16)
            if not data:
                raise EOFError
            self._values += self._parser.feed(data)
        return self._values.pop(0)

    def call(self, *words: bytes | str | int) -> Value:
        self.send(encode_command(words))
        return self.reply()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()


# -- store, match, fetch


@pytest.mark.parametrize("num_parts", [1, 3])
def test_what_was_stored_is_fetched(server: Server, num_parts: int) -> None:
    namespace = make_namespace(num_parts=num_parts)
    with FakeEngine(server.config.socket, namespace) as engine:
        keys = engine.put(PROMPT, seed=7)
        assert len(keys) == 6
        assert engine.match(PROMPT) == b"dddddd"
        engine.forget()
        assert engine.get(PROMPT) == engine.expected(PROMPT, seed=7)
        assert engine.last_sources == ["disk"] * 6
        engine.forget()
        assert engine.match([*PROMPT[: 2 * CHUNK], 5, *PROMPT]) == b"dd"
        assert engine.get([*PROMPT[: 2 * CHUNK], 5, *PROMPT]) == engine.expected(PROMPT, seed=7)[:2]
        assert engine.match([1] * 100) == b""


def test_one_engine_fetches_what_another_stored(server: Server, engine: FakeEngine) -> None:
    engine.put(PROMPT)
    with FakeEngine(server.config.socket, engine_id="second") as second:
        assert second.welcome and engine.welcome
        assert second.welcome.boot == engine.welcome.boot
        assert second.welcome.session != engine.welcome.session
        assert second.get(PROMPT) == engine.expected(PROMPT)
        assert second.last_sources == ["disk"] * 6
        more = [*PROMPT, *range(CHUNK)]
        second.put(more)
    engine.forget()
    assert engine.get(more) == engine.expected(more)


def test_what_is_stored_already_is_not_written_again(engine: FakeEngine) -> None:
    items = items_of(engine, PROMPT)
    assert engine.result(engine.store(items)) == b"oooooo"
    assert engine.result(engine.store(items)) == b"xxxxxx"


def test_namespaces_and_tenants_are_apart(server: Server, engine: FakeEngine) -> None:
    engine.put(PROMPT)
    assert engine.match(PROMPT, salt="tenant") == b""
    with FakeEngine(server.config.socket, make_namespace("other/model")) as other:
        assert other.match(PROMPT) == b""
        other.put(PROMPT, seed=9)
        other.forget()
        assert other.get(PROMPT) == other.expected(PROMPT, seed=9)
    engine.forget()
    assert engine.get(PROMPT) == engine.expected(PROMPT)


def test_a_fetch_of_what_is_missing_brings_nothing(server: Server, engine: FakeEngine) -> None:
    assert answered(start_fetch(engine, PROMPT)) == b"------"
    engine.forget()
    engine.index = type(engine.index)(engine.pool)
    engine.put(PROMPT[: 3 * CHUNK])
    engine.forget()
    fetch = start_fetch(engine, PROMPT)
    assert answered(fetch) == b"ddd---"
    assert fetch.released


def test_a_fetch_of_what_was_evicted_brings_nothing(server: Server, engine: FakeEngine) -> None:
    engine.put(PROMPT)
    engine.forget()
    assert engine.match(PROMPT) == b"dddddd"
    with AdminClient(server.config.socket) as admin:
        report = admin.ask("TKV.EVICT", {"everything": True})
    assert report["removed"] == {"host": 0, "disk": 6}
    assert answered(start_fetch(engine, PROMPT)) == b"------"


def test_plans_on_several_lanes_keep_their_order(engine: FakeEngine) -> None:
    prompts = [[i, *PROMPT[1 : 2 * CHUNK]] for i in range(12)]
    for prompt in prompts:
        engine.put(prompt)
    engine.forget()
    fetches = [start_fetch(engine, prompt, lane=engine.client.next_lane()) for prompt in prompts]
    for prompt, fetch in zip(prompts, fetches, strict=True):
        assert answered(fetch) == b"dd"
        for entry in fetch.entries:
            engine.index.filled(entry, "disk")
        assert [engine.payload(entry.key) for entry in fetch.entries] == engine.expected(prompt)


def test_a_stale_slot_is_not_stored(server: Server, engine: FakeEngine) -> None:
    items = items_of(engine, PROMPT)
    engine.pool.generations[items[1].slot] += 1  # the slot gets other contents
    engine.pool.generations[items[4].slot] += 1
    assert engine.result(engine.store(items)) == b"ogoogo"
    assert engine.match(PROMPT) == b"d"
    assert server.service.moves.num_stale == 2
    assert server.service.moves.staging.in_use == 0
    engine.forget()
    assert answered(start_fetch(engine, PROMPT)) == b"d-dd-d"


@pytest.mark.parametrize("slot", [64, 2**31])
def test_a_slot_outside_of_the_pool_is_refused(
    server: Server, engine: FakeEngine, slot: int, caplog: pytest.LogCaptureFixture
) -> None:
    items = items_of(engine, PROMPT)
    bad = [*items[:-1], msgspec.structs.replace(items[-1], slot=slot)]
    assert engine.result(engine.store(bad)) == b""
    assert f"slot {slot} is outside of the engine's pool of 64" in caplog.text
    assert server.service.moves.staging.in_use == 0
    assert engine.match(PROMPT) == b""
    fetch = start_fetch(engine, list(range(CHUNK)), slots=[slot])
    assert answered(fetch) == b""
    wait_until(lambda: fetch.released, what="the slots of a refused FETCH were not released")
    assert engine.result(engine.store(items)) == b"oooooo"
    assert engine.client.health.num_faults == 0


def test_items_that_make_no_sense_are_refused_and_leave_nothing(server: Server, engine: FakeEngine) -> None:
    good = items_of(engine, PROMPT[:CHUNK])[0]
    replace = msgspec.structs.replace
    bad = [
        replace(good, key=b"short"),
        replace(good, parent=bytes(33)),
        replace(good, anchor=b""),
        replace(good, tenant=bytes(15)),
        replace(good, position=-1),
        replace(good, position=1 << 32),
        replace(good, num_tokens=1 << 32),
        replace(good, slot=-1),
        replace(good, slot=10**6),
    ]
    assert engine.welcome
    with Raw(server.config.socket) as raw:
        assert raw.call("TKV.ATTACH", engine.welcome.session) == "OK"
        for item in bad:
            reply = raw.call("TKV.STORE", msgspec.msgpack.encode([good, item]))
            assert isinstance(reply, Error), item
        for body in (b"", b"\xc1", msgspec.msgpack.encode([[1, 2]]), msgspec.msgpack.encode({"a": 1})):
            assert isinstance(raw.call("TKV.STORE", body), Error)
        for args in ([], [0], [0, b"", bytes(33), b""], [0, b"", bytes(32), b"abc"], ["x", b"", bytes(32), bytes(4)]):
            assert isinstance(raw.call("TKV.FETCH", *args), Error)
            assert isinstance(raw.call("TKV.MATCH", *args), Error)
        assert server.service.moves.staging.in_use == 0
        assert raw.call("TKV.STORE", msgspec.msgpack.encode([good])) == b"o"
        assert isinstance(raw.call("TKV.ATTACH", engine.welcome.session), Error)  # once is enough


def test_a_connection_without_a_session_has_no_pool(server: Server) -> None:
    with Raw(server.config.socket) as raw:
        for words in (
            ["TKV.FETCH", 0, b"", b"", b""],
            ["TKV.STORE", b"\x90"],
            ["TKV.SUBSCRIBE"],
            ["TKV.ANSWER", 1, b""],
        ):
            reply = raw.call(*words)
            assert isinstance(reply, Error)
            assert reply.startswith("REFUSED this connection has no session")
        assert isinstance(raw.call("TKV.ATTACH", "nonsense"), Error)


def test_tiers_answer_for_all_engines(server: Server, engine: FakeEngine) -> None:
    engine.put(PROMPT)
    with FakeEngine(server.config.socket, engine_id="second") as second, AdminClient(server.config.socket) as admin:
        second.get(PROMPT[: 4 * CHUNK])
        (row,) = admin.ask("TKV.LS")
        assert (row["depth_chunks"], row["depth_blocks"], row["tokens"]) == (6, 12, 6 * CHUNK)
        assert row["nbytes"]["host"] == (6 + 4) * engine.shape.payload_nbytes
        assert row["tiers"] == ["host", "disk"]
        assert admin.ask("TKV.LS", {"prefix": row["key"]}) == [row]  # more digits than are shown
        report = admin.ask("TKV.EVICT", {"prefix": row["id"]})
        assert report["removed"] == {"host": 10, "disk": 6}
        assert engine.get(PROMPT) == second.get(PROMPT) == []
        assert admin.ask("TKV.LS") == []


# -- joining


def test_hello_says_who_is_here(server: Server, engine: FakeEngine) -> None:
    welcome = engine.welcome
    assert welcome
    assert (welcome.version, welcome.protocol) == (__version__, PROTOCOL_VERSION)
    assert (welcome.pid, welcome.disk_dir) == (os.getpid(), str(server.config.disk_dir))
    assert (welcome.disk_bytes, welcome.shared) == (64 << 20, "")
    assert welcome.boot == server.commands.boot == engine.client.boot()


@pytest.mark.parametrize(
    ("hello", "words"),
    [
        ({"version": "0.0.1"}, [f"TierKV {__version__}", "the engine is TierKV 0.0.1", "use one version"]),
        ({"protocol": 99}, [f"protocol {PROTOCOL_VERSION}", "protocol 99", "or give the engine a disk_dir"]),
        (
            {"shared": shared_digest("redis://me:hunter2@other")},
            ["runs with none", "asks for another", "give both the same shared_url"],
        ),
    ],
)
def test_an_engine_that_wants_something_else_is_refused_in_a_sentence(
    server: Server, hello: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        FakeEngine(server.config.socket, **hello)
    sentence = str(caught.value)
    assert [word for word in words if word not in sentence] == [], sentence
    assert "\n" not in sentence
    assert f"pid {os.getpid()}" in sentence
    assert server.service.sessions == {}


def test_another_shared_url_is_refused_without_passwords(short_dir: Path) -> None:
    url = f"unix://me:hunter2@{short_dir}/nobody.sock"
    with serving(make_config(short_dir, shared_url=url)) as server:
        with FakeEngine(server.config.socket, shared=shared_digest(url)) as engine:
            assert engine.welcome and "hunter2" not in engine.welcome.shared
        for shared in (shared_digest(None), shared_digest("redis://other")):
            with pytest.raises(ConfigError, match=r"runs with the shared tier unix://me:\*\*\*@") as caught:
                FakeEngine(server.config.socket, shared=shared)
            assert "hunter2" not in str(caught.value)
        with FakeEngine(server.config.socket, shared=None):
            assert len(server.service.sessions) == 1  # one that does not care
        with AdminClient(server.config.socket) as admin:
            assert b"hunter2" not in admin.call("TKV.STAT")


@pytest.mark.usefixtures("impatient")
def test_of_differing_budgets_the_owners_holds_with_one_warning(
    short_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(short_dir)

    def warnings() -> list[str]:
        return [r.getMessage() for r in caplog.records if "disk_bytes" in r.getMessage()]

    with serving(config), FakeEngine(config.socket, disk_bytes=64 << 20) as engine:
        assert engine.welcome and engine.welcome.disk_bytes == 64 << 20
        assert warnings() == []
    with serving(config):
        engine = FakeEngine(config.socket, disk_bytes=128 << 20)
        assert engine.welcome and engine.welcome.disk_bytes == 64 << 20
        assert warnings() == [
            f"the store server of {config.disk_dir} runs with disk_bytes=64 MiB, which holds; "
            "this engine asked for 128 MiB"
        ]
    wait_until(lambda: not engine.client.connected())
    with serving(config) as server, engine:
        wait_until(engine.client.connected, what="the engine did not come back")
        assert len(warnings()) == 1  # not at every reconnect
        assert server.service.disk.stat().budget == 64 << 20


def hello_body(**changes: Any) -> bytes:
    namespace = make_namespace()
    hello = Hello(
        version=__version__,
        protocol=PROTOCOL_VERSION,
        engine_id="raw",
        pid=os.getpid(),
        namespace=namespace,
        shape=PoolShape(2, 1, namespace.layout.part_nbytes),
    )
    return msgspec.json.encode(msgspec.to_builtins(hello) | changes)


def test_a_garbage_hello_is_refused_and_others_live_on(server: Server, engine: FakeEngine) -> None:
    namespace = make_namespace()
    part = namespace.layout.part_nbytes
    shape = PoolShape(2, 1, part)
    segment = Segment.create(shape.segment_nbytes(0))
    plain = os.memfd_create("plain")
    os.ftruncate(plain, shape.segment_nbytes(0))
    lease, theirs = socket.socketpair()
    time.sleep(0.05)
    before = num_fds()
    lay = msgspec.to_builtins(namespace)
    no_blocks = lay | {"layout": lay["layout"] | {"block_tokens": 0}}
    fds = [segment.fd, theirs.fileno()]
    cases: list[tuple[bytes, list[int]]] = [
        (b"", fds),
        (b"\xff\x00", fds),
        (b"[]", fds),
        (b"{}", fds),
        (json.dumps({"version": __version__, "protocol": PROTOCOL_VERSION}).encode(), fds),
        (hello_body(), []),
        (hello_body(), [theirs.fileno()]),
        (hello_body(), [*fds, theirs.fileno()]),
        (hello_body(), [plain, theirs.fileno()]),  # could be truncated under the server
        (hello_body(), [theirs.fileno(), segment.fd]),
        (hello_body(shape={"num_slots": 3, "num_parts": 1, "part_nbytes": part}), fds),
        (hello_body(shape={"num_slots": 0, "num_parts": 1, "part_nbytes": part}), fds),
        (hello_body(shape={"num_slots": -1, "num_parts": 1, "part_nbytes": part}), fds),
        (hello_body(shape={"num_slots": 2, "num_parts": 0, "part_nbytes": part}), fds),
        (hello_body(shape={"num_slots": 2, "num_parts": 1, "part_nbytes": part - 1}), fds),
        (hello_body(shape={"num_slots": 2**62, "num_parts": 1, "part_nbytes": part}), fds),
        (hello_body(namespace=no_blocks), fds),
        (hello_body(namespace={}), fds),
    ]
    for body, descriptors in cases:
        with Raw(server.config.socket) as raw:
            raw.send(encode_command(["TKV.HELLO", body]), descriptors)
            reply = raw.reply()
            assert isinstance(reply, Error), body
            assert raw.call("PING") == "PONG"  # an answer, not the end
    assert list(server.service.sessions) == [engine.welcome.session if engine.welcome else ""]
    wait_until(lambda: num_fds() == before, what="descriptors of refused hellos were kept")
    engine.put(PROMPT)
    segment.close()
    os.close(plain)
    lease.close()
    theirs.close()


def test_descriptors_that_nobody_asked_for_are_closed(server: Server) -> None:
    read, write = os.pipe()
    with Raw(server.config.socket) as raw:
        for _ in range(20):
            raw.send(encode_command(["PING"]), [write] * 10)
            assert raw.reply() == "PONG"
        os.close(write)
        assert os.read(read, 1) == b""  # ours was the last
    os.close(read)


# -- the connection


@pytest.mark.parametrize(
    "garbage",
    [
        b"*9999999999\r\n",
        b"$99999999999\r\n",
        b"*1\r\n" * 20,
        b"*1\r\n:5\r\n",
        b"*2\r\n$4\r\nPING\r\n$-1\r\n",
        b":--5\r\n",
        b"+OK\r\n",
        b"$3\r\nabcde\r\n",
        b"\x80" * (70 << 10),
    ],
)
def test_a_connection_that_talks_garbage_is_closed_and_others_live_on(
    server: Server, engine: FakeEngine, garbage: bytes
) -> None:
    with Raw(server.config.socket) as raw, Raw(server.config.socket) as other:
        assert other.call("PING") == "PONG"
        with contextlib.suppress(BrokenPipeError):
            raw.send(garbage)
        with contextlib.suppress(ConnectionResetError), pytest.raises(EOFError):
            reply = raw.reply()
            assert isinstance(reply, Error)
            assert reply.startswith("ERR protocol: ")
            raw.reply()
        assert other.call("ECHO", "still here") == b"still here"
    assert engine.client.connected()
    assert engine.match(PROMPT) == b""


def test_random_bytes_never_take_the_server_down(server: Server, engine: FakeEngine) -> None:
    rng = random.Random(7)
    words = [b"TKV.HELLO", b"TKV.STORE", b"TKV.FETCH", b"TKV.EVICT", b"*3\r\n", b"$5\r\n", b"\r\n", b"{}", b"-1", b"\0"]
    words = [w for w in words if w != b"SHUTDOWN"]
    for _ in range(60):
        with Raw(server.config.socket) as raw, contextlib.suppress(OSError):
            raw.send(b"".join(rng.choice([*words, rng.randbytes(8)]) for _ in range(rng.randrange(1, 40))))
    engine.put(PROMPT)
    assert engine.match(PROMPT) == b"dddddd"
    wait_until(lambda: len(server._connections) == 6, what="connections were kept")  # those of the engine


@pytest.mark.parametrize("protocol", [2, 3])
def test_redis_py_can_talk_to_it(server: Server, engine: FakeEngine, protocol: int) -> None:
    engine.put(PROMPT)
    with redis.Redis(unix_socket_path=str(server.config.socket), protocol=protocol) as r:
        assert r.ping() is True
        assert r.execute_command("ECHO", "hello") == b"hello"
        stat = json.loads(r.execute_command("TKV.STAT"))
        assert stat["server"]["num_engines"] == 1
        assert [tier["name"] for tier in stat["tiers"]] == ["host", "disk"]
        assert stat["tiers"][1]["num_entries"] == 6
        assert stat["engines"][0]["engine_id"] == engine.engine_id
        (row,) = json.loads(r.execute_command("TKV.LS"))
        assert row["tokens"] == 6 * CHUNK
        with pytest.raises(redis.ResponseError, match="unknown command"):
            r.execute_command("GET", "x")
        with pytest.raises(redis.ResponseError, match="bad arguments"):
            r.execute_command("TKV.LS", "not json")
        pipe = r.pipeline(transaction=False)
        for _ in range(100):
            pipe.execute_command("PING")
        assert pipe.execute() == [True] * 100


def test_a_person_can_type_at_it(server: Server) -> None:
    with Raw(server.config.socket) as raw:
        raw.send(b"ping\r\n\r\ntkv.ns\r\nquit\r\n")
        assert [raw.reply(), raw.reply(), raw.reply()] == ["PONG", b"{}", "OK"]
        with pytest.raises(EOFError):
            raw.reply()


def test_shutdown_ends_it(short_dir: Path) -> None:
    config = make_config(short_dir)
    with serving(config) as server:
        with AdminClient(config.socket) as admin:
            assert admin.call("SHUTDOWN") == b"OK"
        wait_until(lambda: server._listener is None)
        assert not config.socket.exists()
    with pytest.raises(UnavailableError, match="no store server answers at "):
        AdminClient(config.socket)


def test_a_question_at_the_moment_of_joining_confuses_nobody(server: Server) -> None:
    """Pushes may follow the reply to SUBSCRIBE at once."""
    done = threading.Event()

    def ask() -> None:
        with AdminClient(server.config.socket) as admin:
            while not done.is_set():
                admin.ask("TKV.STAT")

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for i in range(25):
            with FakeEngine(server.config.socket, num_slots=2, engine_id=f"engine-{i}") as engine:
                assert engine.match(PROMPT) == b""
                assert (engine.client.health.num_faults, engine.client.health.reason) == (0, "")
    finally:
        done.set()
        for thread in threads:
            thread.join(20)


def test_an_engine_that_does_not_read_holds_nobody_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question larger than its socket's buffer must not block the server for ever."""
    namespace = make_namespace()
    segment = Segment.create(PoolShape(2, 1, namespace.layout.part_nbytes).segment_nbytes(0))
    lease, theirs = socket.socketpair()
    with Raw(server.config.socket) as deaf, AdminClient(server.config.socket) as admin:
        deaf.send(encode_command(["TKV.HELLO", hello_body()]), [segment.fd, theirs.fileno()])
        deaf.reply()
        assert deaf.call("TKV.SUBSCRIBE") == "OK"
        select = {"keys": {namespace.ns_id().hex(): [bytes(32).hex()] * 40_000}}
        (row,) = admin.ask("TKV.LOCATE", select)
        assert row["num_stored"] == 0
        wait_until(lambda: not server.service.sessions, what="the session of an engine that takes nothing was kept")
    segment.close()
    lease.close()
    theirs.close()


# -- places


@pytest.mark.parametrize("where", ["long directories", "a long name"])
def test_long_socket_paths(short_dir: Path, where: str) -> None:
    if where == "a long name":
        path = short_dir / ("s" * 80) / ("n" * 80)
    else:
        path = short_dir / "/".join(["directory" * 5] * 5) / "tierkv.sock"
    assert len(str(path)) > 108
    path.parent.mkdir(parents=True)
    with serving(make_config(short_dir, socket=path)) as server:
        assert path.is_socket()
        assert path.stat().st_mode & 0o777 == 0o600
        with FakeEngine(path) as engine, AdminClient(path) as admin:
            engine.put(PROMPT)
            assert admin.call("PING") == b"PONG"
            assert len(admin.ask("TKV.LS")) == 1
        assert server.config.socket == path
    assert not path.exists()


def test_a_name_that_fits_no_address_is_refused_in_a_sentence(short_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"^socket='.*n' cannot be used: .+; set another path$"):
        Server(make_config(short_dir, socket=short_dir / ("n" * 120)))


def test_something_that_is_no_socket_is_refused_and_untouched(short_dir: Path) -> None:
    path = short_dir / "precious"
    path.write_text("data")
    with pytest.raises(ConfigError) as caught:
        Server(make_config(short_dir, socket=path))
    assert str(caught.value) == (f"socket={str(path)!r} is something that is no socket; remove it or set another path")
    assert path.read_text() == "data"
    with serving(make_config(short_dir)):  # the directory was given back
        pass


def test_a_socket_that_is_in_use_is_refused(short_dir: Path, server: Server) -> None:
    with pytest.raises(ConfigError, match="belongs to a server that is running; set another path"):
        Server(make_config(short_dir, disk_dir=short_dir / "other", socket=server.config.socket))
    with AdminClient(server.config.socket) as admin:
        assert admin.call("PING") == b"PONG"


def test_a_socket_that_nobody_owns_is_replaced(short_dir: Path) -> None:
    config = make_config(short_dir)
    config.socket.parent.mkdir()
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(config.socket))
    stale.close()
    with serving(config), AdminClient(config.socket) as admin:
        assert admin.call("PING") == b"PONG"


def test_a_directory_has_one_owner(short_dir: Path, server: Server) -> None:
    with pytest.raises(DirectoryInUseError, match=rf"is running \(pid {os.getpid()}\); use that server, stop it,"):
        Server(make_config(short_dir, socket=short_dir / "other.sock"))
    assert not (short_dir / "other.sock").exists()


@pytest.mark.parametrize("place", ["file/x", "file", "/proc/nowhere"])
def test_a_directory_that_cannot_be_used_is_one_sentence(short_dir: Path, place: str) -> None:
    (short_dir / "file").write_text("x")
    directory = short_dir / place
    with pytest.raises(ConfigError) as caught:
        Server(make_config(short_dir, disk_dir=directory))
    sentence = str(caught.value)
    assert sentence.startswith(f"disk_dir={str(directory)!r} cannot be used: ")
    assert sentence.endswith("; set disk_dir to a directory on a local disk that this user can write")
    assert "\n" not in sentence


def test_a_launched_server_that_cannot_run_says_why(short_dir: Path) -> None:
    (short_dir / "file").write_text("x")
    config = make_config(short_dir, disk_dir=short_dir / "file" / "x", socket=short_dir / "s")
    with pytest.raises(ConfigError, match=r"^disk_dir='.*/file/x' cannot be used: Not a directory; set disk_dir to"):
        FakeEngine(config.socket, launcher=Launcher(config))


# -- launching


def test_a_launched_server_has_nothing_of_its_engine(launched: ServerConfig, short_dir: Path) -> None:
    config = msgspec.structs.replace(launched, shared=SharedConfig(url=f"unix://me:hunter2@{short_dir}/nobody.sock"))
    read, write = os.pipe()
    os.set_inheritable(write, True)
    inherited = os.open(short_dir, os.O_RDONLY)
    os.set_inheritable(inherited, True)
    affinity = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(affinity)})
    try:
        engine = FakeEngine(config.socket, launcher=Launcher(config))
    finally:
        os.sched_setaffinity(0, affinity)
    with engine:
        assert engine.welcome
        pid = engine.welcome.pid
        assert pid == owner(config) != os.getpid()
        proc = Path(f"/proc/{pid}")
        os.close(write)
        assert os.read(read, 1) == b""  # it does not hold our pipe open
        targets = {fd.name: str(fd.readlink()) for fd in (proc / "fd").iterdir()}
        assert [targets[fd] for fd in "012"] == ["/dev/null"] * 3
        for target in targets.values():
            kind = target.split(":", 1)[0]
            ours = kind in ("socket", "/memfd", "anon_inode", "/dev/null", "/dev/urandom")
            assert ours or target.startswith(f"{config.disk_dir}/"), targets
        assert str((proc / "cwd").readlink()) == "/"
        assert os.getsid(pid) == os.getpgid(pid) == pid
        assert os.sched_getaffinity(pid) >= affinity
        command = (proc / "cmdline").read_bytes()
        assert b"hunter2" not in command
        assert str(config.disk_dir).encode() not in command
        assert str(short_dir).encode() not in command
        assert "hunter2" not in (config.disk_dir / "server.log").read_text()
    os.close(read)
    os.close(inherited)


def test_a_module_in_the_working_directory_is_not_imported(
    launched: ServerConfig, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("logging.py", "tierkv_server.py", "msgspec.py"):
        (short_dir / name).write_text("raise SystemExit(77)")
    monkeypatch.chdir(short_dir)
    with FakeEngine(launched.socket, launcher=Launcher(launched)) as engine:
        assert engine.match(PROMPT) == b""


def test_of_several_launchers_at_a_time_one_server_is_left(launched: ServerConfig) -> None:
    launchers = [Launcher(launched) for _ in range(3)]
    for launcher in launchers:
        launcher.launch()
    wait_until(lambda: not any([launcher.starting() for launcher in launchers]), what="a server is still starting")
    assert launched.socket.is_socket()
    engines = [FakeEngine(launched.socket, launcher=launcher) for launcher in launchers]
    assert {engine.welcome.pid for engine in engines if engine.welcome} == {owner(launched)}
    assert holders(launched.disk_dir / "lock") == {owner(launched)}
    engines[0].put(PROMPT)
    assert [engine.match(PROMPT) for engine in engines] == [b"dddddd"] * 3
    for engine in engines:
        engine.close()
    wait_until(lambda: not alive(owner(launched)), what="the server did not leave")


def test_a_launched_server_is_no_descendant_of_its_engine(launched: ServerConfig) -> None:
    """vLLM kills an engine's descendants when it ends; other engines may be using the server."""
    with FakeEngine(launched.socket, launcher=Launcher(launched)) as engine:
        assert engine.welcome
        pid, ancestors = engine.welcome.pid, []
        while pid > 1:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
            ancestors.append(pid)
        assert os.getpid() not in ancestors


def holders(path: Path) -> set[int]:
    """Return the processes that have a file open."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if link.readlink() == path:
                found.add(int(link.parts[2]))
    return found


ENGINE = """
import sys
from pathlib import Path
import msgspec
from fake_engine import FakeEngine
from tierkv.server_config import ServerConfig, SharedConfig
from tierkv.launcher import Launcher
config = msgspec.json.decode(sys.argv[1], type=ServerConfig, dec_hook=lambda kind, value: kind(value))
engine = FakeEngine(config.socket, launcher=Launcher(config))
engine.put(list(map(int, sys.argv[2].split())))
print("ready", flush=True)
sys.stdin.read()
"""


def start_engine(config: ServerConfig) -> subprocess.Popen[str]:
    """Start an engine in a process of its own, which launches its server and stores a prompt."""
    args = [msgspec.json.encode(config, enc_hook=str).decode(), " ".join(map(str, PROMPT))]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-c", ENGINE, *args], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


def test_the_server_leaves_after_its_last_engine_was_killed(launched: ServerConfig) -> None:
    first, second = start_engine(launched), start_engine(launched)
    pid = owner(launched)
    first.kill()
    first.communicate()
    deadline = time.monotonic() + 2 * SHORT_LINGER_S
    while time.monotonic() < deadline:
        assert alive(pid), "it left its second engine"
        time.sleep(0.02)
    with AdminClient(launched.socket) as admin:
        assert admin.ask("TKV.STAT")["server"]["num_engines"] == 1
    second.kill()
    second.communicate()
    wait_until(lambda: not alive(pid), what="the server did not leave after its last engine was killed")
    assert not launched.socket.exists()
    with FakeEngine(launched.socket, launcher=Launcher(launched)) as engine:  # a restart finds what was stored
        assert engine.get(PROMPT) == engine.expected(PROMPT)
        assert engine.last_sources == ["disk"] * 6
    wait_until(lambda: not alive(owner(launched)))


# -- faults


@pytest.mark.usefixtures("impatient")
def test_sigkill_of_the_server_releases_its_leases_and_it_is_launched_again(
    launched: ServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "REPLY_TIMEOUT_S", 20.0)  # the fault shall be the death, not the silence
    with FakeEngine(launched.socket, launcher=Launcher(launched)) as engine:
        engine.put(PROMPT)
        engine.forget()
        pid, boot = owner(launched), engine.client.boot()
        stop_process(pid)
        fetch = start_fetch(engine, PROMPT)
        reply = engine.client.match(1, 0, engine.keys(PROMPT)[0], engine.keys(PROMPT))
        time.sleep(0.1)
        assert fetch.results is None
        assert not fetch.released
        os.kill(pid, signal.SIGKILL)
        assert answered(fetch) == b""
        wait_until(lambda: fetch.released, what="its leases did not end with the server")
        wait_until(lambda: reply.letters is not None)
        assert reply.letters == b""
        wait_until(engine.client.connected, what="the server was not launched again")
        assert engine.client.boot() != boot
        assert owner(launched) != pid
        wait_until(lambda: engine.client.health.up)  # a moment after the session is there
        for entry in fetch.entries:
            engine.index.drop(entry)
        assert engine.get(PROMPT) == engine.expected(PROMPT)
        assert engine.last_sources == ["disk"] * 6
        assert engine.index.num_free == engine.shape.num_slots - 6
    wait_until(lambda: not alive(owner(launched)))


@pytest.mark.usefixtures("impatient")
def test_a_stopped_server_keeps_its_leases_until_it_goes_on(launched: ServerConfig) -> None:
    launched = msgspec.structs.replace(launched, linger_s=5.0)
    with FakeEngine(launched.socket, launcher=Launcher(launched)) as engine:
        engine.put(PROMPT)
        engine.forget()
        pid, boot = owner(launched), engine.client.boot()
        stop_process(pid)
        try:
            fetch = start_fetch(engine, PROMPT)
            assert answered(fetch) == b""  # nobody waits for it any more
            assert not engine.client.health.up
            assert not engine.client.connected()
            faults = engine.client.health.num_faults
            wait_until(lambda: engine.client.health.num_faults >= faults + 2)  # it was tried again in between
            assert not fetch.released, "a stopped server may still write these slots"
            late = start_fetch(engine, [*range(CHUNK)])  # there is no server: nothing was sent, nothing is lent
            assert (late.results, late.released) == (b"", True)
            assert owner(launched) == pid
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: fetch.released, what="its leases did not end when it went on")
        wait_until(engine.client.connected)
        assert engine.client.boot() == boot
        for entry in [*fetch.entries, *late.entries]:
            engine.index.drop(entry)
        assert engine.get(PROMPT) == engine.expected(PROMPT)
        with AdminClient(launched.socket) as admin:
            wait_until(lambda: admin.ask("TKV.STAT")["server"]["num_engines"] == 1, what="dead sessions were kept")


@pytest.mark.usefixtures("impatient")
def test_a_server_that_answers_slowly_but_steadily_is_not_out(
    server: Server, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many commands queued on one lane take longer than the time-out together; each reply comes in time."""
    fetch = server.service.fetch

    def slow(*args: Any) -> bytes:
        time.sleep(0.06)
        return fetch(*args)

    monkeypatch.setattr(server.service, "fetch", slow)
    prompts = [[i, *PROMPT[1:CHUNK]] for i in range(20)]
    for prompt in prompts:
        engine.put(prompt)
    engine.forget()
    fetches = [start_fetch(engine, prompt) for prompt in prompts]
    assert [answered(f) for f in fetches] == [b"d"] * 20
    assert engine.client.health.num_faults == 0


def test_an_engine_without_a_server_is_told_at_once(short_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TimeoutError, match="no store server answers"):
        FakeEngine(short_dir / "nobody.sock", start_s=0.0)
    assert [r.levelno for r in caplog.records] == [logging.WARNING]  # once, not at every try


@pytest.mark.usefixtures("impatient")
def test_an_engine_joins_a_server_that_starts_later(short_dir: Path) -> None:
    config = make_config(short_dir)
    with serving(config):
        engine = FakeEngine(config.socket)
        engine.put(PROMPT)
    wait_until(lambda: not engine.client.connected())
    replies: list[bytes | None] = []
    items = items_of(engine, list(range(CHUNK)))
    engine.client.store(items, set(), replies.append)
    wait_until(lambda: replies, what="a store without a server was never answered")
    assert replies == [None]
    assert engine.match(PROMPT) == b""
    with serving(config), engine:
        wait_until(engine.client.connected, what="the engine did not join")
        assert engine.match(PROMPT) == b"dddddd"


def test_commands_of_a_closed_client_are_answered(server: Server, engine: FakeEngine) -> None:
    items = items_of(engine, PROMPT)
    engine.client.close()
    replies: list[bytes | None] = []
    engine.client.store(items, set(), replies.append)
    assert replies == [None]
    assert engine.match(PROMPT) == b""
    fetch = start_fetch(engine, list(range(CHUNK)))
    assert (fetch.results, fetch.released) == (b"", True)
    wait_until(lambda: not server.service.sessions, what="the session of an engine that left was kept")


def test_a_refused_admin_command_is_an_error_of_ours(server: Server) -> None:
    with AdminClient(server.config.socket) as admin:
        with pytest.raises(RefusedError, match="nothing was named to evict"):
            admin.ask("TKV.EVICT", {})
        with pytest.raises(RefusedError, match="tier 'tape' is not here; this server has host, disk"):
            admin.ask("TKV.LS", {"tiers": ["tape"]})
        assert admin.ask("TKV.LS") == []
