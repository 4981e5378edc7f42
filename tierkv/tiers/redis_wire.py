"""RESP2 on a connected socket: whole commands out, replies in, all of it before one deadline.

Large words of a command (payloads) go from where they are straight to the socket, and bulk strings of replies may go
from the socket straight to where they belong. Replies of control commands go through :class:`tierkv.resp.Parser`.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from tierkv.errors import ProtocolError
from tierkv.resp import Error, Parser, Value

#: A command for Redis: its name, and arguments. What is large is a memoryview and is not copied.
Word = str | int | float | bytes | memoryview
Command = tuple[Word, ...]


class Packed(NamedTuple):
    """A command that is RESP2 already, and the name of a key of it, which says what node it is for."""

    name: bytes
    data: bytes


_COPY_NBYTES = 4096  # a word up to this size is copied beside its neighbours
_RECV_NBYTES = 64 << 10
_HEAD_NBYTES = 4096  # what is received of a reply before it is known where the rest goes
_IOV_MAX = 512
_TLS_NBYTES = 256 << 10


def pack(commands: Iterable[Command | Packed]) -> list[bytes | memoryview]:
    """Return commands as RESP2 in few buffers; large memoryviews among their words stay what they are."""
    pieces: list[bytes | memoryview] = []
    small: list[bytes | memoryview] = []
    for command in commands:
        if isinstance(command, Packed):
            small.append(command.data)
            continue
        small.append(b"*%d\r\n" % len(command))
        for word in command:
            data = word if isinstance(word, (bytes, memoryview)) else str(word).encode()
            small.append(b"$%d\r\n" % len(data))
            if isinstance(data, memoryview) and len(data) > _COPY_NBYTES:
                pieces += [b"".join(small), data]
                small = []
            else:
                small.append(data)
            small.append(b"\r\n")
    if small:
        pieces.append(b"".join(small))
    return pieces


class Wire:
    """One exchange on a socket.

    Args:
        sock: a connected socket, plain or TLS, with nothing to be read.
        timeout_s: seconds that one read or write may wait.
        until: monotonic time at which the exchange must be over.

    Notes:
        After any exception the socket is out of step and must be closed. Raises OSError (TimeoutError among them) where
        the peer fails, ProtocolError where it does not speak RESP2. An exchange reads either with :meth:`replies`, or
        with :meth:`bulk` and what goes with it, not with both.
    """

    def __init__(self, sock: socket.socket, timeout_s: float, until: float) -> None:
        self._sock = sock
        self._timeout_s = timeout_s
        self._until = until
        self._parser = Parser()
        self._bytes = bytearray(_HEAD_NBYTES)
        self._buffer = memoryview(self._bytes)
        self._start = self._end = 0

    def send(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Send buffers, whole and in order."""
        if isinstance(self._sock, ssl.SSLSocket):  # has no sendmsg
            for piece in pieces:
                view = memoryview(piece)
                for at in range(0, len(view), _TLS_NBYTES):
                    self._arm()
                    self._sock.sendall(view[at : at + _TLS_NBYTES])
            return
        waiting = deque(memoryview(piece) for piece in pieces)
        while waiting:
            self._arm()
            sent = self._sock.sendmsg([waiting[i] for i in range(min(len(waiting), _IOV_MAX))])
            while waiting and sent >= len(waiting[0]):
                sent -= len(waiting.popleft())
            if sent:
                waiting[0] = waiting[0][sent:]

    def replies(self, num: int) -> list[Value]:
        """Return the next ``num`` replies; errors are among them."""
        found: list[Value] = []
        while len(found) < num:
            self._arm()
            data = self._sock.recv(_RECV_NBYTES)
            if not data:
                raise ConnectionResetError("it closed the connection")
            found += self._parser.feed(data)
        if len(found) > num or self._parser.mid_value:
            raise ProtocolError(f"more than {num} replies came to {num} commands")
        return found

    def bulk(self) -> int | Error | None:
        """Return the length of the bulk string that comes next, None for nil, or an error reply.

        The string's bytes are taken with :meth:`into` or :meth:`skip`, and :meth:`end` follows them.
        """
        line = self._line()
        if line[:1] == b"-":
            return Error(line[1:].decode("utf-8", "replace"))
        if line == b"$-1":
            return None
        if line[:1] != b"$" or not line[1:].isdigit() or len(line) > 11:
            raise ProtocolError(f"{line[:20]!r} is no answer to a read")
        return int(line[1:])

    def status(self) -> None:
        """Take a simple string such as ``+OK``."""
        if self._line()[:1] != b"+":
            raise ProtocolError("a command that always succeeds did not")

    def into(self, view: memoryview, seen: Callable[[memoryview], object] = len) -> None:
        """Fill ``view`` with the next bytes of a bulk string, and call ``seen`` with each piece as it arrives."""
        at = min(len(view), self._end - self._start)
        if at:
            view[:at] = self._buffer[self._start : self._start + at]
            self._start += at
            seen(view[:at])
        while at < len(view):
            self._arm()
            num = self._sock.recv_into(view[at:])
            if not num:
                raise ConnectionResetError("it closed the connection")
            seen(view[at : at + num])
            at += num

    def skip(self, nbytes: int) -> None:
        """Leave out the next bytes of a bulk string."""
        scratch = memoryview(bytearray(min(nbytes, _RECV_NBYTES)))
        while nbytes:
            part = scratch[: min(nbytes, len(scratch))]
            self.into(part)
            nbytes -= len(part)

    def end(self) -> None:
        """Take the end of a bulk string."""
        while self._end - self._start < 2:
            self._more()
        tail = self._bytes[self._start : self._start + 2]
        self._start += 2
        if tail != b"\r\n":
            raise ProtocolError("a bulk string does not end where its length says")

    @property
    def clean(self) -> bool:
        """Whether nothing has come that was not taken."""
        return self._start == self._end

    def _line(self) -> bytes:
        while (at := self._bytes.find(b"\r\n", self._start, self._end)) < 0:
            if self._end - self._start >= _HEAD_NBYTES:
                raise ProtocolError("a reply's first line has no end")
            self._more()
        line = bytes(self._buffer[self._start : at])
        self._start = at + 2
        return line

    def _more(self) -> None:
        """Receive more into the buffer."""
        if self._start:
            rest = bytes(self._buffer[self._start : self._end])
            self._buffer[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        self._arm()
        num = self._sock.recv_into(self._buffer[self._end :])
        if not num:
            raise ConnectionResetError("it closed the connection")
        self._end += num

    def _arm(self) -> None:
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._sock.settimeout(min(left_s, self._timeout_s))
