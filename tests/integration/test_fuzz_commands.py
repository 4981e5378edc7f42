"""Whatever is sent to a running server: it answers what is a command, survives what is none, and leaks nothing."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_engine import make_namespace, wait_until
from fuzzing import examples, mutated, pieces
from servers import free_port
from tierkv import __version__
from tierkv.config import PROTOCOL_VERSION
from tierkv.errors import ProtocolError
from tierkv.messages import Hello, RequestNote, StoreItem
from tierkv.pool import HostPool, PoolShape, Segment
from tierkv.resp import Error, Parser, Value, encode, encode_command
from tierkv.sessions import SessionTurn
from tierkv_server.access import BOUNDS, Role

TOKENS = {"engine": "engine-token-0123456", "reader": "reader-token-0123456", "admin": "admin-token-01234567"}
#: No reply takes longer; a server that says nothing for so long hangs.
HANG_S = 20.0
NAMESPACE = make_namespace()
SHAPE = PoolShape(4, 1, NAMESPACE.layout.part_nbytes)
NS = NAMESPACE.ns_id()


# -- the server


class Target:
    """A server in a process of its own, on its unix socket and on TCP."""

    def __init__(self, directory: Path) -> None:
        for role, token in TOKENS.items():
            (directory / role).write_text(token)
            (directory / role).chmod(0o600)
        self.port = free_port()
        self.socket = directory / "store" / "tierkv.sock"
        self.log_file = directory / "log"
        (directory / "tierkv.toml").write_text(
            f"""
            [disk]
            dir = "store"
            bytes = "16MiB"
            reserve_bytes = 0
            [listen]
            tcp = "127.0.0.1:{self.port}"
            insecure = true
            engine_token_file = "engine"
            reader_token_file = "reader"
            admin_token_file = "admin"
            """
        )
        command = [sys.executable, "-m", "tierkv.cli", "serve", "--config", str(directory / "tierkv.toml")]
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(command, stderr=log, stdin=subprocess.DEVNULL)
        wait_until(self.answers, what="the server did not start")
        self.join()  # what a first engine costs belongs to the beginning
        self.at_start = self.costs()

    def connect(self, role: str = "") -> socket.socket:
        """Return a connection: over the unix socket (no role), or over TCP with the role's token (``nobody``: none)."""
        if not role:
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(str(self.socket))
        else:
            sock = socket.create_connection(("127.0.0.1", self.port))
        sock.settimeout(HANG_S)
        if role in TOKENS:
            sock.sendall(encode_command(["AUTH", TOKENS[role]]))
            assert sock.recv(64) == b"+OK\r\n"
        return sock

    def answers(self) -> bool:
        assert self.process.poll() is None, f"the server ended:\n{self.log_file.read_text()[-3000:]}"
        with contextlib.suppress(ConnectionError, FileNotFoundError), self.connect() as sock:
            sock.sendall(b"PING\r\n")
            return sock.recv(64) == b"+PONG\r\n"
        return False

    def join(self) -> None:
        """Be an engine for a moment."""
        with self.connect() as sock, descriptors("pool lease") as fds:
            socket.send_fds(sock, [encode_command(["TKV.HELLO", hello()])], fds)
            assert sock.recv(1 << 16).startswith(b"$")
            sock.sendall(encode_command(["TKV.STORE", msgspec.msgpack.encode([item(i) for i in range(4)])]))
            assert sock.recv(1 << 16) == b"$4\r\noooo\r\n"

    def costs(self) -> dict[str, int]:
        """Return what the process has: descriptors, threads, kilobytes of its own memory."""
        proc = Path(f"/proc/{self.process.pid}")
        status = dict(re.findall(r"^(\w+):\s+(\d+)", (proc / "status").read_text(), re.MULTILINE))
        names = list(self._open(proc))
        pools = sum("memfd:" in name for name in names)
        return {
            "fds": len(names),
            "pools": pools,
            "threads": int(status["Threads"]),
            "anon_kb": int(status["RssAnon"]),
        }

    @staticmethod
    def _open(proc: Path) -> Iterator[str]:
        for fd in (proc / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                yield str(fd.readlink())

    def check(self) -> None:
        """Check that it lives, has nothing left of those who have gone, and met nothing that it did not foresee."""
        assert self.answers()

        def is_as_before() -> bool:
            now = self.costs()
            return all(now[name] <= self.at_start[name] for name in ("fds", "pools", "threads"))

        wait_until(is_as_before, what=f"left over: {self.costs()}, at start {self.at_start}")
        grown_kb = self.costs()["anon_kb"] - self.at_start["anon_kb"]
        assert grown_kb < 64 << 10, f"the server grew by {grown_kb} KiB"
        log = self.log_file.read_text()
        assert "Traceback" not in log and "unforeseen" not in log, log[-4000:]

    def end(self) -> None:
        self.process.terminate()
        assert self.process.wait(60) == 0


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with tempfile.TemporaryDirectory(prefix="tkv-", dir="/tmp") as directory:
        target = Target(Path(directory))
        try:
            yield target
            target.check()
            target.end()
        finally:
            target.process.kill()
            target.process.wait()


# -- what is sent


def hello(**fields: Any) -> bytes:
    about: dict[str, Any] = {
        "version": __version__,
        "protocol": PROTOCOL_VERSION,
        "engine_id": "fuzz",
        "pid": 1,
        "namespace": NAMESPACE,
        "shape": SHAPE,
    }
    return msgspec.json.encode(Hello(**(about | fields)))


def item(i: int = 0) -> StoreItem:
    return StoreItem(bytes([i]) * 32, bytes(32), bytes([i]) * 32, i, 32, bytes(16), i % 4, 0)


@contextlib.contextmanager
def descriptors(kinds: str) -> Iterator[list[int]]:
    """Yield descriptors of the given kinds, closed at the end."""
    with contextlib.ExitStack() as stack:
        fds = []
        for kind in kinds.split():
            if kind == "pool":
                pool = stack.enter_context(contextlib.closing(HostPool(SHAPE, [_segment()])))
                fds += pool.fds()
            elif kind == "lease":
                ours, theirs = socket.socketpair()
                stack.enter_context(ours)
                fds.append(stack.enter_context(theirs).fileno())
            elif kind == "pipe":
                reader, writer = os.pipe()
                stack.callback(os.close, writer)
                stack.callback(os.close, reader)
                fds.append(reader)
            elif kind == "loose":  # a memory file that nobody sealed, and shorter than a pool
                fd = os.memfd_create("tierkv-loose")
                stack.callback(os.close, fd)
                os.ftruncate(fd, 4096)
                fds.append(fd)
            else:
                fd = os.open(os.devnull, os.O_RDWR)
                stack.callback(os.close, fd)
                fds.append(fd)
        yield fds


def _segment() -> Segment:
    return Segment.create(SHAPE.segment_nbytes(0))


number_st = st.sampled_from([b"0", b"1", b"-1", b"63", b"64", b"4294967296", b"1e3", b"", b"x", b"9" * 40])
key_st = st.integers(0, 5).map(lambda i: bytes([i]) * 32)
keys_st = st.lists(key_st, max_size=5).map(b"".join) | st.binary(max_size=70)
ns_st = st.sampled_from([NS, bytes(16), b"", NS.hex().encode()])
slots_st = st.lists(st.integers(0, 5), max_size=5).map(lambda s: b"".join(i.to_bytes(4, "little") for i in s))
items_st = mutated(st.lists(st.integers(0, 5).map(item), max_size=4).map(msgspec.msgpack.encode), most=2)
hello_st = mutated(
    st.fixed_dictionaries(
        {},
        optional={
            "protocol": st.integers(0, 3),
            "inline": st.booleans(),
            "pid": st.integers(-1, 1 << 40),
            "shape": st.builds(
                PoolShape,
                st.sampled_from([0, 1, 4, 1 << 20, 1 << 40, -1]),
                st.sampled_from([0, 1, 2, 64, 1000]),
                st.sampled_from([0, 1, 2048, SHAPE.part_nbytes, 1 << 30, 1 << 62]),
            ),
        },
    ).map(lambda fields: hello(**fields)),
    most=1,
)
select_st = mutated(
    st.fixed_dictionaries(
        {},
        optional={
            "ns": st.sampled_from([NS.hex(), NS.hex()[:4], "", "zz"]),
            "prefix": st.sampled_from(["00", "0101", "", "x"]),
            "keys": st.dictionaries(
                st.sampled_from([NS.hex(), "00"]), st.lists(st.sampled_from(["00" * 32, "x"])), max_size=2
            ),
            "tiers": st.lists(st.sampled_from(["host", "disk", "shared", "x"]), max_size=3),
            "tenant": st.sampled_from(["", "00", "zz"]),
            "dry_run": st.booleans(),
            "everything": st.booleans(),
            "force": st.booleans(),
            "owner": st.sampled_from(["", "me", "x" * 500]),
            "seconds": st.sampled_from([0, -1, 1e9, 1e300, 5]),
            "older_s": st.sampled_from([0, -1, 1e300, 5]),
            "unused_s": st.sampled_from([0, 1e300, 5]),
            "min_nbytes": st.sampled_from([0, -1, 1 << 80, 5]),
            "pinned": st.sampled_from([None, True, False]),
            "sort": st.sampled_from(["", "hits", "nbytes", "x"]),
            "by": st.sampled_from(["", "tenant", "depth", "x"]),
            "limit": st.sampled_from([0, -1, 1, 1 << 80]),
            "free_nbytes": st.sampled_from([0, -1, 1, 1 << 60]),
            "cursor": st.sampled_from(["", "x", "aa:0", ":-1", "a:" + "9" * 5000]),
            "repair": st.booleans(),
            "since": st.sampled_from([0, -1, 1 << 60]),
        },
    ).map(msgspec.json.encode),
    most=1,
)
turn_st = mutated(
    st.builds(
        SessionTurn,
        st.sampled_from([b"", b"s" * 16, b"t" * 16, b"short"]),
        st.sampled_from([bytes(16), b"u" * 16, b""]),
        keys_st,
        st.sampled_from([0.0, 1.0, -1.0, 1e300, float("nan"), float("inf")]),
        st.booleans(),
        st.booleans(),
    ).map(msgspec.msgpack.encode),
    most=2,
)
note_st = mutated(
    st.builds(
        RequestNote,
        st.sampled_from([bytes(16), b"u" * 16, b""]),
        keys_st,
        st.sampled_from([b"", b"s" * 16, b"t" * 16, b"short"]),
        st.sampled_from([None, 0.0, 1.0, -1.0, 1e300, float("nan"), float("inf")]),
        st.booleans(),
        st.sampled_from([0, 2, -2, 9, -(1 << 40)]),
    ).map(msgspec.msgpack.encode),
    most=2,
)
asked_st = mutated(
    st.tuples(
        st.binary(min_size=8, max_size=8),
        *[st.integers(-1, 1 << 60)] * 3,
        st.lists(st.integers(-1, 1 << 60), min_size=5, max_size=5),
        st.lists(st.tuples(st.binary(max_size=40), st.integers(-1, 6), st.booleans()), max_size=3),
    ).map(msgspec.msgpack.encode),
    most=2,
)
session_st = mutated(
    st.fixed_dictionaries(
        {},
        optional={
            "session": st.sampled_from(["", (b"s" * 16).hex(), "7373", "73", "x", "7" * 500]),
            "ns": st.sampled_from([NS.hex(), "", "zz"]),
            "tenant": st.sampled_from(["", "00", "zz"]),
        },
    ).map(msgspec.json.encode),
    most=1,
)
anything_st = st.one_of(number_st, keys_st, ns_st, items_st, select_st, st.binary(max_size=30))
#: Commands with arguments that make sense now and then. AUTH waits half a second, SUBSCRIBE lets others wait.
_SHAPES: dict[bytes, list[st.SearchStrategy[bytes]]] = {
    b"PING": [],
    b"ECHO": [st.binary(max_size=20)],
    b"HELLO": [st.sampled_from([b"2", b"", b"4", b"x"])],
    b"COMMAND": [],
    b"CLIENT": [st.just(b"ID")],
    b"SELECT": [number_st],
    b"TKV.HELLO": [hello_st],
    b"TKV.ATTACH": [st.binary(max_size=40)],
    b"TKV.ANSWER": [number_st, st.binary(max_size=20)],
    b"TKV.MATCH": [ns_st, number_st, key_st, keys_st],
    b"TKV.FETCH": [number_st, key_st, keys_st, slots_st],
    b"TKV.STORE": [items_st],
    b"TKV.USE": [number_st, key_st, keys_st],
    b"TKV.DRAIN": [st.sampled_from([b"0", b"-1", b"nan", b"x", b"0.01"])],
    b"TKV.STAT": [],
    b"TKV.ROOM": [],
    b"TKV.NS": [],
    b"TKV.LS": [select_st],
    b"TKV.PAGE": [select_st],
    b"TKV.SHOW": [select_st],
    b"TKV.TREE": [select_st],
    b"TKV.DU": [select_st],
    b"TKV.VERIFY": [select_st],
    b"TKV.WARM": [select_st],
    b"TKV.COMPACT": [select_st],
    b"TKV.CHUNKS": [select_st],
    b"TKV.STORED": [ns_st, keys_st],
    b"TKV.EVENTS": [select_st],
    b"TKV.SLOW": [select_st],
    b"TKV.DUMP": [ns_st, key_st, key_st],
    b"TKV.RESTORE": [st.just(NAMESPACE.to_json()), st.binary(max_size=600)],
    b"TKV.LOCATE": [select_st],
    b"TKV.EVICT": [select_st],
    b"TKV.PIN": [select_st],
    b"TKV.UNPIN": [select_st],
    b"TKV.TTL": [select_st],
    b"TKV.USAGE": [select_st],
    b"TKV.NOTE": [note_st],
    b"TKV.HOLD": [keys_st, keys_st],
    b"TKV.TURN": [turn_st],
    b"TKV.ASKED": [asked_st],
    b"TKV.REUSE": [],
    b"TKV.SESSIONS": [session_st],
    b"TKV.SESSION": [st.sampled_from([b"release", b"prefetch", b"RELEASE", b"x", b""]), session_st],
    b"TKV.RELOAD": [],
    b"TKV.NOPE": [anything_st],
}


@st.composite
def command_st(draw: st.DrawFn) -> bytes:
    name = draw(st.sampled_from(sorted(_SHAPES)))
    args = [draw(arg) for arg in _SHAPES[name]]
    change = draw(st.integers(0, 9))
    if change == 0:
        args = args[:-1]
    elif change == 1:
        args.append(draw(anything_st))
    elif change == 2:
        name = name.lower()
    return encode_command([name, *args])


_value_st: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers(-5, 5) | st.binary(max_size=10), lambda inner: st.lists(inner, max_size=3), max_leaves=6
)
part_st = st.one_of(
    command_st(),
    command_st(),
    command_st(),
    mutated(command_st(), most=2),
    _value_st.map(encode),
    st.sampled_from([b"\r\n", b"PING\r\n", b"*0\r\n", b"*1\r\n$67108864\r\n", b"*1048576\r\n", b"GET / HTTP/1.1\r\n"]),
    st.binary(max_size=40),
)


class Talk(NamedTuple):
    """One connection: who, whether an engine says hello first, the bytes with the descriptors beside them."""

    role: str
    joins: bool
    parts: list[bytes]
    fds: str


talk_st = st.builds(
    Talk,
    role=st.sampled_from(["", "", "", "nobody", "engine", "reader", "admin"]),
    joins=st.booleans(),
    parts=st.lists(part_st, min_size=1, max_size=6),
    fds=st.sampled_from(
        ["", "", "pool lease", "pool", "lease", "lease pool", "pipe lease", "loose lease", "null " * 5]
    ),
)


def has(wire: bytes) -> bool:
    """Return whether bytes may ask for RESP3, whose maps the parser of these tests does not know."""
    return re.search(rb"(?i)HELLO(\r\n\$1\r\n| +)3", wire) is not None


def exchange(sock: socket.socket, parts: Sequence[bytes], fds: Sequence[int]) -> tuple[list[Value], bool]:
    """Send, end, and return the replies, and whether the connection was reset before its end."""
    replies: list[Value] = []
    parser = Parser()
    reset = False

    def receive() -> None:
        nonlocal reset
        try:
            while data := sock.recv(1 << 16):
                replies.extend(parser.feed(data))
        except ConnectionError:
            reset = True

    receiving = threading.Thread(target=receive)
    receiving.start()
    try:
        for i, part in enumerate(parts):
            if i == 0 and fds and sock.family == socket.AF_UNIX and part:
                sent = socket.send_fds(sock, [part], list(fds))
                sock.sendall(part[sent:])
            else:
                sock.sendall(part)
        sock.shutdown(socket.SHUT_WR)
    except OSError:
        reset = True  # the server hung up, as it may on what is no command
    receiving.join(HANG_S)
    assert not receiving.is_alive(), "the server neither answers nor hangs up"
    assert reset or not parser.mid_value, "half a reply"
    return replies, reset


def num_commands(wire: bytes, role: str) -> tuple[int, bool]:
    """Return how many commands the bytes hold, and whether they end in what is none or more than the role may send."""
    number = 0
    try:
        for value in Parser(inline=True, bounds=BOUNDS[Role(role or "admin")]).feed(wire):
            if value == []:
                continue
            if not isinstance(value, list) or not all(isinstance(word, bytes) for word in value):
                return number, True
            if value[0].upper() in (b"POST", b"HOST:"):  # type: ignore[union-attr]
                return number, True
            number += 1
            if value[0].upper() == b"QUIT":  # type: ignore[union-attr]
                return number, False
    except ProtocolError:
        return number, True
    return number, False


@examples(150)
@given(talk_st, st.data())
def test_any_conversation(target: Target, talk: Talk, data: st.DataObject) -> None:
    """Each command has one reply, what is no command one error and the end; then everything is as it was."""
    wire = b"".join(talk.parts)
    if has(wire) or b"SHUTDOWN" in wire.upper():
        return
    with target.connect(talk.role) as sock, descriptors(talk.fds) as fds:
        joined = talk.joins and talk.role == ""
        if joined:
            with descriptors("pool lease") as own:
                socket.send_fds(sock, [encode_command(["TKV.HELLO", hello()])], own)
                assert sock.recv(1 << 16).startswith(b"$")
        replies, reset = exchange(sock, data.draw(pieces(wire)), fds)
    commands, broken = num_commands(wire, talk.role)
    expected = commands + broken
    assert len(replies) <= expected if reset else len(replies) == expected, (commands, broken, replies)
    for reply in replies:
        if isinstance(reply, Error):
            assert re.match(r"[A-Z]+ .", reply) and len(reply) < 4096, reply
            assert " failed: " not in reply, f"a fault that was not foreseen: {reply}"
            for token in TOKENS.values():
                assert token not in reply
    if talk.role == "nobody":
        assert all(isinstance(reply, Error) or reply == "OK" or isinstance(reply, list) for reply in replies)


def test_roles_do_what_is_theirs_and_nothing_else(target: Target) -> None:
    """Over every command: an engine does not administrate, a reader changes nothing, nobody does anything."""
    refused: dict[str, set[bytes]] = {role: set() for role in ("", "admin", "engine", "reader", "nobody")}
    for role in refused:
        for name in sorted(_SHAPES):
            with target.connect(role) as sock:
                replies, _ = exchange(sock, [encode_command([name])], [])
            if replies and isinstance(replies[0], Error) and replies[0].startswith(("NOPERM", "NOAUTH")):
                refused[role].add(name)
    assert refused[""] == refused["admin"] == set()
    assert refused["nobody"] == set(_SHAPES), "even HELLO, without AUTH in it"
    changes = {b"TKV.EVICT", b"TKV.SESSION", b"TKV.PIN", b"TKV.UNPIN", b"TKV.TTL", b"TKV.RELOAD"}
    assert changes <= refused["engine"] and changes <= refused["reader"]
    assert {b"TKV.HELLO", b"TKV.STORE", b"TKV.FETCH", b"TKV.ATTACH", b"TKV.USE", b"TKV.ANSWER"} <= refused["reader"]
    assert b"TKV.TURN" in refused["reader"] and b"TKV.SESSIONS" in refused["engine"]


def test_announced_bytes_take_no_memory(target: Target) -> None:
    """Clients that say how much will come, and send little of it."""
    before = target.costs()["anon_kb"]
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            sock = stack.enter_context(target.connect())
            sock.sendall(b"*1048576\r\n" + b"$67108864\r\n" + b"x" * 1000)
        assert target.answers()
        assert target.costs()["anon_kb"] - before < 32 << 10
    target.check()


def test_descriptors_that_nobody_wants_are_closed(target: Target) -> None:
    for _ in range(50):
        with target.connect() as sock, descriptors("null pipe lease loose " * 12) as fds:
            socket.send_fds(sock, [b"PING\r\nPING\r\n"], fds)
            assert sock.recv(64).startswith(b"+PONG")
    for _ in range(50):
        with target.connect() as sock, descriptors("null " * 20) as fds:
            socket.send_fds(sock, [b"*"], fds)  # and gone, mid-command
    target.check()


def test_engines_that_go_in_the_middle_of_everything(target: Target) -> None:
    """Hello, stores and fetches under way, and the connection is gone."""
    body = msgspec.msgpack.encode([item(i) for i in range(4)])
    keys, slots = b"".join(bytes([i]) * 32 for i in range(4)), b"".join(i.to_bytes(4, "little") for i in range(4))
    for cut in range(0, 400, 20):
        with target.connect() as sock, descriptors("pool lease") as fds:
            wire = encode_command(["TKV.STORE", body]) + encode_command(["TKV.FETCH", 0, bytes(32), keys, slots])
            socket.send_fds(sock, [encode_command(["TKV.HELLO", hello()])], fds)
            sock.sendall((wire * 3)[: len(wire) + cut])
    target.check()
