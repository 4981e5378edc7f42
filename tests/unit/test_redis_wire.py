"""RESP2 on a socket: what is packed is what a command encodes to, however the bytes are cut on their way."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_redis import bulk
from records import Buffers, make_namespace
from tierkv.errors import ProtocolError
from tierkv.resp import Error, encode, encode_command
from tierkv.server_config import SharedConfig
from tierkv.tiers.base import Ref
from tierkv.tiers.redis_link import RedisLink, name_of
from tierkv.tiers.redis_match import _exists
from tierkv.tiers.redis_names import Names
from tierkv.tiers.redis_transfer import IN_FLIGHT_NBYTES, Fetch
from tierkv.tiers.redis_wire import Packed, Wire, pack

word_st = st.binary(max_size=40) | st.integers(0, 2**64) | st.text(max_size=20)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    a, b = socket.socketpair()
    with a, b:
        yield a, b


def wire_of(sock: socket.socket, seconds: float = 10.0) -> Wire:
    return Wire(sock, seconds, time.monotonic() + seconds)


def trickle(sock: socket.socket, data: bytes, cuts: list[int]) -> threading.Thread:
    """Send ``data`` in pieces, from another thread."""

    def send() -> None:
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            sock.sendall(data[start:end])

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@given(st.lists(st.lists(word_st, min_size=1, max_size=5), max_size=5), st.integers(0, 20_000))
def test_packed_commands_are_encoded_commands(commands: list[list[bytes | int | str]], size: int) -> None:
    payload = memoryview(bytes(size))
    packed = pack([*(tuple(c) for c in commands), ("SET", b"k", payload)])
    assert b"".join(packed) == b"".join(map(encode_command, commands)) + encode_command(["SET", b"k", bytes(size)])
    assert any(piece is payload for piece in packed) == (size > 4096), "a payload is not copied"


def test_a_packed_exists_is_an_encoded_exists() -> None:
    names, ns_id = Names("team:kv"), bytes(range(16))
    refs = [Ref(bytes([i]) * 32, bytes(range(32))) for i in range(5)]
    packed = _exists(names, ns_id, refs)
    assert packed.data == encode_command(["EXISTS", *(names.record(ns_id, ref) for ref in refs)])
    assert names.record(ns_id, refs[0]).encode().startswith(packed.name)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.lists(st.none() | st.binary(max_size=9000), min_size=1, max_size=4))
def test_bulk_strings_land_whole_however_they_are_cut(data: st.DataObject, values: list[bytes | None]) -> None:
    stream = b"".join(b"$-1\r\n" if v is None else bulk(v) for v in values)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    a, b = socket.socketpair()
    with a, b:
        thread = trickle(b, stream, cuts)
        wire = wire_of(a)
        for value in values:
            length = wire.bulk()
            assert length == (None if value is None else len(value))
            if value is not None:
                room, seen = bytearray(len(value)), bytearray()
                half = len(value) // 2
                wire.into(memoryview(room)[:half], seen.extend)
                wire.into(memoryview(room)[half:], seen.extend)
                wire.end()
                assert room == seen == value
        assert wire.clean
        thread.join(10)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers() | st.binary(max_size=50) | st.just(Error("ERR x")), min_size=1, max_size=20))
def test_replies_come_in_order(values: list[int | bytes | Error]) -> None:
    values = [v if not isinstance(v, int) else v % 2**60 for v in values]
    a, b = socket.socketpair()
    with a, b:
        b.sendall(b"".join(map(encode, values)))
        assert wire_of(a).replies(len(values)) == values


def test_large_commands_pass_through_a_small_socket(ends: tuple[socket.socket, socket.socket]) -> None:
    a, b = ends
    a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    payloads = [bytes([i]) * 100_000 for i in range(20)]
    commands = [("SET", b"key %d" % i, memoryview(p)) for i, p in enumerate(payloads)]
    expected = b"".join(encode_command(["SET", b"key %d" % i, p]) for i, p in enumerate(payloads))
    received = bytearray()

    def read() -> None:
        while len(received) < len(expected):
            received.extend(b.recv(30_000))

    thread = threading.Thread(target=read)
    thread.start()
    wire_of(a).send(pack(commands))
    thread.join(10)
    assert received == expected


@pytest.mark.parametrize(
    "reply",
    [
        b"?x\r\n",
        b":5\r\n",
        b"*1\r\n",
        b"$-2\r\n",
        b"$x\r\n",
        b"$\r\n",
        b"$99999999999\r\n",
        b"$1\r\nab\r\n",
        b"x" * 5000,
    ],
)
def test_what_is_no_bulk_string_is_an_error(ends: tuple[socket.socket, socket.socket], reply: bytes) -> None:
    a, b = ends
    b.sendall(reply)
    wire = wire_of(a)
    with pytest.raises(ProtocolError):
        wire.skip(wire.bulk() or 0)  # type: ignore[arg-type]
        wire.end()


def test_more_replies_than_commands_are_an_error(ends: tuple[socket.socket, socket.socket]) -> None:
    a, b = ends
    b.sendall(b":1\r\n:2\r\n")
    with pytest.raises(ProtocolError):
        wire_of(a).replies(1)


def test_a_trickle_ends_at_the_deadline_of_the_whole(ends: tuple[socket.socket, socket.socket]) -> None:
    a, b = ends
    stop = threading.Event()

    def drip() -> None:
        b.sendall(b"$1000\r\n")
        while not stop.wait(0.01):
            b.sendall(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    wire = Wire(a, 10.0, time.monotonic() + 0.3)
    assert wire.bulk() == 1000
    with pytest.raises(TimeoutError):
        wire.into(memoryview(bytearray(1000)))
    stop.set()
    thread.join(10)


def test_a_peer_that_takes_nothing_is_a_timeout(ends: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(TimeoutError):
        wire_of(ends[0], 0.1).send([memoryview(bytes(64 << 20))])


def test_the_end_of_the_stream_is_an_error(ends: tuple[socket.socket, socket.socket]) -> None:
    a, b = ends
    b.sendall(b"$10\r\nabc")
    b.close()
    wire = wire_of(a)
    assert wire.bulk() == 10
    with pytest.raises(ConnectionResetError):
        wire.into(memoryview(bytearray(10)))


class Script:
    """A wire to a Redis that has nothing, which counts what is asked and not answered yet."""

    clean = True

    def __init__(self) -> None:
        self.waiting: deque[bytes] = deque()
        self.most = 0
        self.order: list[bytes] = []

    def send(self, pieces: list[bytes]) -> None:
        commands = b"".join(pieces).split(b"*2\r\n$3\r\nGET\r\n")[1:]
        self.waiting += commands
        self.order += commands
        self.most = max(self.most, len(self.waiting))

    def bulk(self) -> None:
        self.waiting.popleft()


@pytest.mark.parametrize("payload_nbytes", [64 << 10, 1 << 20, 3 << 20, 16 << 20])
def test_replies_in_flight_are_bounded(payload_nbytes: int) -> None:
    namespace = make_namespace(payload_nbytes=payload_nbytes)
    refs = [Ref(i.to_bytes(32, "big"), bytes(32)) for i in range(300)]
    link = RedisLink(SharedConfig(url="redis://127.0.0.1:1"))
    fetch = Fetch(link, Names(), namespace.ns_id(), namespace, refs, Buffers(namespace, 0))
    script = Script()
    places = deque(reversed(range(300)))
    assert fetch._stream(script, places, False, {})  # type: ignore[arg-type]
    assert not places and not script.waiting
    assert len(script.order) == 300 and len(set(script.order)) == 300
    most = max(2, IN_FLIGHT_NBYTES // payload_nbytes)
    assert most - 1 <= script.most <= most
    link.close()


@pytest.mark.parametrize(
    "command, name",
    [
        (("GET", "k"), b"k"),
        (("HSET", b"k", "f", "v"), b"k"),
        (("OBJECT", "IDLETIME", "k"), b"k"),
        (("EVAL", "return 1", 1, "k"), b"k"),
        (("XREAD", "COUNT", 5, "STREAMS", "k", "0"), b"k"),
        (("XADD", "k", "*", "f", "v"), b"k"),
        (("PING",), b""),
        (("SCAN", 0), b""),
        (Packed(b"k", b""), b"k"),
    ],
)
def test_whom_a_command_is_for(command: tuple[str, ...] | Packed, name: bytes) -> None:
    assert name_of(command) == name
