"""RESP2, Redis's wire protocol, without I/O: bytes in, values out. One codec serves the server and its clients.

Theory of operation. :class:`Parser` holds the bytes that have arrived and a stack of arrays begun but not complete.
:meth:`Parser.feed` adds bytes and yields the values they complete, in order::

    "+OK\\r\\n"   Simple("OK")        "$3\\r\\nfoo\\r\\n"   b"foo"      "*2\\r\\n..."   [value, value]
    "-ERR x\\r\\n" Error("ERR x")      "$-1\\r\\n"         None         ":7\\r\\n"      7

A server also accepts *inline commands* (a line of words), so that a person can type at it. Anything else is a
:class:`ProtocolError`: the connection is not in step any more and must be closed.

A *sink* says of a bulk string, when its length is known, where its bytes are to go: payloads are received straight into
their slots. Whoever reads the socket asks :meth:`Parser.space` first, receives there if it is somewhere, and says how
much came with :meth:`Parser.filled`. In the value such a string is a :class:`Placed`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tierkv.errors import ProtocolError

MAX_BULK_NBYTES = 64 << 20
MAX_ARRAY_ITEMS = 1 << 20
MAX_LINE_NBYTES = 64 << 10
MAX_DEPTH = 8
#: Bytes that one command or reply may have on the wire, all its items together.
MAX_VALUE_NBYTES = 128 << 20


class Simple(str):
    """A simple string reply, such as ``OK``."""

    __slots__ = ()


class Error(str):
    """An error reply; by convention its first word is a code in capitals."""

    __slots__ = ()


class Placed(int):
    """Stands for a bulk string whose bytes went where the sink said; its length in bytes."""

    __slots__ = ()


Value = Simple | Error | int | bytes | None | list["Value"]

#: Returns, for a bulk string of a length in the outermost array, of which the items before it are given, the buffers
#: that its bytes go to (of that length together), or None to have them in the value.
Sink = Callable[[Sequence[Value], int], "Sequence[memoryview] | None"]


class Bounds(NamedTuple):
    """What a parser accepts: bytes of a bulk string, items of an array, bytes of a line, bytes of a whole value."""

    bulk: int
    items: int
    line: int
    value: int


class Parser:
    """Incremental RESP2 parser.

    Attributes:
        bounds: what is accepted from now on; may be changed between two values.

    Args:
        inline: accept inline commands (a server does).
        max_bulk_nbytes: longest bulk string accepted.
        bounds: all limits; by default those of this module.
        sink: where bulk strings go.
    """

    def __init__(
        self,
        *,
        inline: bool = False,
        max_bulk_nbytes: int = MAX_BULK_NBYTES,
        bounds: Bounds | None = None,
        sink: Sink | None = None,
    ) -> None:
        self.bounds = bounds or Bounds(max_bulk_nbytes, MAX_ARRAY_ITEMS, MAX_LINE_NBYTES, MAX_VALUE_NBYTES)
        self._buffer = bytearray()
        self._at = 0
        self._stack: list[tuple[list[Value], int]] = []  # arrays begun, and the items each still lacks
        self._bulk: int | None = None  # length of the bulk string whose bytes are awaited
        self._placing: int | None = None  # the same, of one that goes into ``_room``
        self._room: deque[memoryview] = deque()  # what of it has not come
        self._used = 0  # bytes of the value begun that have been parsed and deleted
        self._inline = inline
        self._sink = sink

    @property
    def mid_value(self) -> bool:
        """Whether a value has begun and is not complete."""
        return bool(self._buffer or self._stack) or self._bulk is not None or self._placing is not None

    @property
    def num_taken(self) -> int:
        """Bytes of the value begun that have arrived."""
        return self._used + len(self._buffer)

    def space(self) -> memoryview | None:
        """Return the buffer into which the next bytes may be received, or None where :meth:`feed` is to have them."""
        return self._room[0] if self._room and not self._buffer else None

    def filled(self, nbytes: int) -> Iterator[Value]:
        """Take note of bytes that were received into :meth:`space`; otherwise like :meth:`feed`."""
        self._used += nbytes
        self._fill_room(nbytes)
        return self.feed(b"") if not self._room else iter(())

    def feed(self, data: bytes | memoryview) -> Iterator[Value]:
        """Add bytes and yield the values that are complete now.

        Raises:
            ProtocolError: the bytes are not RESP2 or exceed a limit.
        """
        self._buffer += data
        while True:
            start = self._at
            done, value = self._item()
            self._used += self._at - start
            if self._used + (self._bulk or sum(map(len, self._room))) > self.bounds.value:
                raise ProtocolError(f"a command or reply is longer than {self.bounds.value} bytes")
            if not done:
                break
            while self._stack:
                items, missing = self._stack.pop()
                items.append(value)
                if missing > 1:
                    self._stack.append((items, missing - 1))
                    break
                value = items
            else:
                self._used = 0
                yield value
        del self._buffer[: self._at]
        self._at = 0

    def _item(self) -> tuple[bool, Value]:
        """Return (True, the next value that is no unfinished array) or (False, None) where bytes are missing."""
        while True:
            if self._bulk is not None:
                return self._take_bulk(self._bulk)
            if self._placing is not None:
                return self._take_placed(self._placing)
            begun = self._at
            line = self._line()
            if line is None:
                return False, None
            kind, rest = line[:1], line[1:]
            if kind == b"$":
                length = _length(rest, self.bounds.bulk, "bulk string")
                if length < 0:
                    return True, None
                self._begin_bulk(length)
            elif kind == b"*":
                count = _length(rest, self.bounds.items, "array")
                if count <= 0:
                    return True, None if count < 0 else []
                if len(self._stack) >= MAX_DEPTH:
                    raise ProtocolError(f"arrays are nested deeper than {MAX_DEPTH}")
                self._stack.append(([], count))
            elif kind == b"+":
                return True, Simple(rest.decode("utf-8", "replace"))
            elif kind == b"-":
                return True, Error(rest.decode("utf-8", "replace"))
            elif kind == b":":
                return True, _integer(rest)
            elif self._inline and not self._stack:
                words: list[Value] = list(line.split())
                if words:
                    return True, words
                self._used -= self._at - begun  # a blank line is part of no command
            else:
                raise ProtocolError(f"a value starts with {kind!r}, which is not RESP2")

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\r\n" if not self._inline else b"\n", self._at, self._at + self.bounds.line)
        if end < 0:
            if len(self._buffer) - self._at >= self.bounds.line:
                raise ProtocolError(f"a line is longer than {self.bounds.line} bytes")
            return None
        line = bytes(self._buffer[self._at : end])
        self._at = end + (1 if self._inline else 2)
        return line.removesuffix(b"\r") if self._inline else line

    def _begin_bulk(self, length: int) -> None:
        room = self._sink(self._stack[0][0], length) if self._sink and len(self._stack) == 1 and length else None
        if room is None:
            self._bulk = length
            return
        if sum(map(len, room)) != length:
            raise ValueError(f"a sink gave {sum(map(len, room))} bytes of room to a bulk string of {length}")
        self._placing, self._room = length, deque(view for view in room if len(view))

    def _fill_room(self, nbytes: int) -> None:
        view = self._room.popleft()
        if nbytes < len(view):
            self._room.appendleft(view[nbytes:])

    def _take_placed(self, length: int) -> tuple[bool, Value]:
        while self._room and (there := min(len(self._room[0]), len(self._buffer) - self._at)):
            self._room[0][:there] = self._buffer[self._at : self._at + there]
            self._at += there
            self._fill_room(there)
        if self._room or not self._ends_here(self._at):
            return False, None
        self._at, self._placing = self._at + 2, None
        return True, Placed(length)

    def _ends_here(self, at: int) -> bool:
        """Return whether a bulk string's end is there, and False where bytes are missing."""
        if len(self._buffer) < at + 2:
            return False
        if self._buffer[at : at + 2] != b"\r\n":
            raise ProtocolError("a bulk string does not end where its length says")
        return True

    def _take_bulk(self, length: int) -> tuple[bool, Value]:
        end = self._at + length
        if not self._ends_here(end):
            return False, None
        value = bytes(memoryview(self._buffer)[self._at : end])
        self._at, self._bulk = end + 2, None
        return True, value


def _integer(digits: bytes) -> int:
    if not digits.removeprefix(b"-").isdigit() or len(digits) > 20:
        raise ProtocolError(f"{digits[:20]!r} is not an integer")
    return int(digits)


def _length(digits: bytes, most: int, what: str) -> int:
    length = _integer(digits)
    if not -1 <= length <= most:
        raise ProtocolError(f"{what} of length {length}; at most {most} is accepted")
    return length


def encode(value: Value | str | dict[str, Value | str]) -> bytes:
    """Return a value as RESP2. A plain ``str`` becomes a bulk string; a ``dict`` a map, which is RESP3's only."""
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, Simple):
        return b"+%s\r\n" % value.encode()
    if isinstance(value, Error):
        return b"-%s\r\n" % " ".join(value.split()).encode()
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, dict):
        return b"%%%d\r\n" % len(value) + b"".join(encode(k) + encode(v) for k, v in value.items())
    if isinstance(value, list):
        return b"*%d\r\n" % len(value) + b"".join(map(encode, value))
    data = value.encode() if isinstance(value, str) else value
    return b"$%d\r\n%s\r\n" % (len(data), data)


def encode_start(num_items: int, items: Sequence[bytes] = ()) -> bytes:
    """Return the start of an array of ``num_items``, of which the first are given; the others follow by themselves."""
    return b"*%d\r\n" % num_items + b"".join(b"$%d\r\n%s\r\n" % (len(i), i) for i in items)


def encode_command(words: Sequence[bytes | str | int]) -> bytes:
    """Return a command as RESP2: an array of bulk strings."""
    items = [w if isinstance(w, bytes) else str(w).encode() for w in words]
    return encode_start(len(items), items)
