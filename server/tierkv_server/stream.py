"""A connection's bytes: plain (unix, TCP) or TLS, with a deadline for everything that waits for the other side.

Theory of operation. One thread receives; several may send (replies and pushes), one message at a time. A plain socket
blocks, with the kernel's own time-out for sending. A TLS socket does not block: OpenSSL's objects are not for two
threads at a time, so each call into it is made under a lock, and waiting for the network is done outside of it.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from tierkv.transport import recv_records

#: A client that takes no bytes for this long is cut off.
SEND_STALL_S = 5.0
#: A message that is longer than a socket's buffer may take longer in all, at this rate in bytes a second.
MIN_RATE = 256 << 10
#: Bytes that are sent in one go.
_SEND_NBYTES = 256 << 10
_MAX_FDS = 64
_MAX_IOV = 64
#: How much, and for how long in seconds, is received and thrown away so that a last reply arrives.
_DRAIN_NBYTES, _DRAIN_S = 1 << 20, 0.5

T = TypeVar("T")


class Stream(Protocol):
    """A connection's bytes. Methods raise ``OSError`` (``TimeoutError`` past a deadline) when it is of no use any more.

    Attributes:
        fds: descriptors that have arrived; whoever takes them off the list owns them.
    """

    fds: list[int]

    def handshake(self, deadline: float) -> None:
        """Do what comes before the first byte. ``deadline``: monotonic seconds."""

    def recv(self, nbytes: int, deadline: float | None = None) -> bytes:
        """Return up to ``nbytes``, when some are there; nothing at the end. ``deadline``: monotonic seconds."""

    def recv_into(self, view: memoryview, deadline: float | None = None) -> int:
        """Receive into ``view`` and return how many bytes; 0 at the end."""

    def send(self, *data: bytes | memoryview, stall_s: float = SEND_STALL_S) -> None:
        """Send one message: all of ``data``, and nothing of another between."""

    def shutdown(self) -> None:
        """End it: whoever waits for it gives up. Safe from any thread."""

    def finish(self) -> None:
        """Let what was sent last arrive although bytes of the other side are unread: they are thrown away."""

    def close(self) -> None:
        """Close it and what has arrived with it."""


def send_deadline(nbytes: int, stall_s: float) -> float:
    """Return when a message has to be on its way: a client that takes a byte now and then is cut off too."""
    return time.monotonic() + stall_s + nbytes / MIN_RATE


def wait_for(fd: int, event: int, deadline: float | None) -> None:
    """Wait until a descriptor is ready.

    Raises:
        TimeoutError: the deadline has passed.
    """
    poll = select.poll()
    poll.register(fd, event)
    patience = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
    if not poll.poll(patience):
        raise TimeoutError("the other side is too slow")


class PlainStream:
    """A stream over a unix or TCP socket, owned from now on. Descriptors may come over a unix socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.fds: list[int] = []
        self._takes_fds = sock.family == socket.AF_UNIX
        self._sending = threading.Lock()
        sock.setblocking(True)
        self._stall_s = 0.0
        self._limit_stalls(SEND_STALL_S)

    def handshake(self, deadline: float) -> None:
        pass

    def recv(self, nbytes: int, deadline: float | None = None) -> bytes:
        if deadline is not None:
            wait_for(self._sock.fileno(), select.POLLIN, deadline)
        if not self._takes_fds:
            return self._sock.recv(nbytes)
        data, fds, _, _ = socket.recv_fds(self._sock, nbytes, _MAX_FDS)
        self.fds += fds
        while len(self.fds) > _MAX_FDS:  # more than any command takes: nobody will
            os.close(self.fds.pop())
        return data

    def recv_into(self, view: memoryview, deadline: float | None = None) -> int:
        if deadline is not None:
            wait_for(self._sock.fileno(), select.POLLIN, deadline)
        return self._sock.recv_into(view)

    def send(self, *data: bytes | memoryview, stall_s: float = SEND_STALL_S) -> None:
        with self._sending:
            self._limit_stalls(stall_s)
            deadline = send_deadline(sum(map(len, data)), stall_s)
            views = [memoryview(part) for part in data if len(part)]
            while views:
                if time.monotonic() > deadline:
                    raise TimeoutError("the other side takes its bytes too slowly")
                try:
                    sent = self._sock.sendmsg(views[:_MAX_IOV])
                except BlockingIOError:  # the kernel's own time-out
                    raise TimeoutError("the other side takes no bytes") from None
                views = skip(views, sent)

    def _limit_stalls(self, stall_s: float) -> None:
        if stall_s != self._stall_s:
            timeval = struct.pack("ll", int(stall_s), int(stall_s % 1 * 1e6))
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
            self._stall_s = stall_s

    def shutdown(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def finish(self) -> None:
        drain(self._sock)

    def close(self) -> None:
        self._sock.close()
        while self.fds:
            os.close(self.fds.pop())


class TlsStream:
    """A stream over TLS.

    Args:
        sock: a connected TCP socket, owned from now on.
        context: the server's.

    Raises:
        OSError: the other side is gone already.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        self.fds: list[int] = []  # none travel over TCP
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._over = False  # TLS has ended: what is sent now would go out in clear
        try:
            sock.setblocking(False)
            self._sock = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except BaseException:
            sock.close()
            raise
        self._fd = self._sock.fileno()

    def handshake(self, deadline: float) -> None:
        self._do(self._sock.do_handshake, deadline)

    def _do(self, action: Callable[[], T], deadline: float | None) -> T:
        """Call into OpenSSL, again and again as the network lets it."""
        while True:
            with self._lock:
                if self._over:
                    raise ConnectionAbortedError("this connection has been ended")
                try:
                    return action()
                except ssl.SSLWantReadError:
                    event = select.POLLIN
                except ssl.SSLWantWriteError:
                    event = select.POLLOUT
            wait_for(self._fd, event, deadline)

    def recv(self, nbytes: int, deadline: float | None = None) -> bytes:
        try:
            return self._do(lambda: self._sock.recv(nbytes), deadline)
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            return b""

    def recv_into(self, view: memoryview, deadline: float | None = None) -> int:
        try:
            return self._do(lambda: recv_records(self._sock, view), deadline)
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            return 0

    def send(self, *data: bytes | memoryview, stall_s: float = SEND_STALL_S) -> None:
        with self._sending:
            whole = send_deadline(sum(map(len, data)), stall_s)
            for part in data:
                view = memoryview(part)
                while len(view):
                    piece = view[:_SEND_NBYTES]
                    deadline = min(whole, time.monotonic() + stall_s)
                    sent = self._do(lambda piece=piece: self._sock.send(piece), deadline)  # type: ignore[misc]
                    view = view[sent:]

    def shutdown(self) -> None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # of the connection, not of its TLS

    def finish(self) -> None:
        self._say_goodbye()
        drain(self._sock)

    def close(self) -> None:
        self._say_goodbye()
        with self._lock:
            self._sock.close()

    def _say_goodbye(self) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._over = True
            self._sock.unwrap()  # sends what ends TLS, and does not wait for the other side's


def skip(views: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """Return what of ``views`` is left after ``nbytes`` of them."""
    for i, view in enumerate(views):
        if nbytes < len(view):
            return [view[nbytes:], *views[i + 1 :]]
        nbytes -= len(view)
    return []


def drain(sock: socket.socket) -> None:
    """Say that nothing more will be sent, and throw away what still comes, within bounds.

    A socket that is closed with bytes unread is reset, and its last reply lost.
    """
    deadline, left = time.monotonic() + _DRAIN_S, _DRAIN_NBYTES
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_WR)  # of the connection: a TLS socket has methods of its own
        while left > 0:
            wait_for(sock.fileno(), select.POLLIN, deadline)
            data = socket.socket.recv(sock, 1 << 16)
            if not data:
                return
            left -= len(data)
