"""A session: one engine's life with this server, and its leases.

Theory of operation. An engine's HELLO brings the descriptors of its host pool and one end of a socket pair, the *lease
socket*. While a FETCH runs, the server writes into slots of that pool: the engine has leased them. The lease socket is
closed only when no writer is left, so its end of file tells the engine that nobody can write its slots any more,
whether the server ended the session, exited, or was killed (the kernel closes it then). A stopped server keeps it open.

An engine that shares no memory with this server has an *inline* session: its pool is memory of this server, through
which payloads pass on their way between tiers and its connections (:mod:`tierkv_server.inline`). It leases nothing.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Iterator

from tierkv.errors import UnavailableError
from tierkv.messages import Hello, HostStat
from tierkv.pool import HostPool
from tierkv.resp import encode
from tierkv_server.stream import Stream

#: An engine that takes nothing of a push for this long is treated as gone.
PUSH_STALL_S = 2.0


class Session:
    """One engine.

    Args:
        hello: what the engine said of itself.
        pool: its host pool, mapped here, or of an inline session the memory of its payloads; owned.
        lease: the server's end of its lease socket; owned. None of an inline session.
    """

    def __init__(self, hello: Hello, pool: HostPool, lease: socket.socket | None) -> None:
        self.id = secrets.token_hex(16)
        self.hello = hello
        self.pool = pool
        self.ns_id = hello.namespace.ns_id()
        self.farewell: HostStat | None = None  #: what it had counted when it left
        self.opened_at = 0  #: number of evictions when it was opened
        #: Of an engine that was here before: number of evictions that it had surely heard of; None when it knows all.
        self.since: int | None = None
        self._lease = lease
        self._users = 0
        self._ended = False
        self._idle = threading.Condition()
        self._push: Stream | None = None
        self._push_lock = threading.Lock()
        self._asks: dict[int, _Ask] = {}
        self._next_ask = 0

    @contextlib.contextmanager
    def using(self) -> Iterator[HostPool]:
        """Use the pool: the session does not end before this block does.

        Raises:
            UnavailableError: the session has ended.
        """
        with self._idle:
            if self._ended:
                raise UnavailableError("this engine's session has ended")
            self._users += 1
        try:
            yield self.pool
        finally:
            with self._idle:
                self._users -= 1
                self._idle.notify_all()

    def end(self) -> None:
        """Wait for the pool's last user, unmap it and give back all leases. Idempotent."""
        with self._idle:
            if self._ended:
                return
            self._ended = True
            self._idle.wait_for(lambda: self._users == 0)
        self.pool.close()
        if self._lease is not None:
            self._lease.close()
        for ask in list(self._asks.values()):
            ask.arrived.set()

    @property
    def subscribed(self) -> bool:
        """Whether it takes pushes now."""
        return self._push is not None and not self._ended

    def subscribe(self, connection: Stream) -> None:
        """Send pushes on ``connection`` from now on."""
        with self._push_lock:
            self._push = connection

    def ask(self, what: str, body: bytes) -> _Ask | None:
        """Send the engine a question; None where it cannot be asked. Wait with ``result``."""
        with self._push_lock:
            connection = self._push
            if connection is None or self._ended:
                return None
            self._next_ask += 1
            ask = self._asks[self._next_ask] = _Ask(self, self._next_ask)
            try:
                connection.send(encode([what.encode(), self._next_ask, body]), stall_s=PUSH_STALL_S)
            except OSError:  # gone, or stopped with its buffer full: half a push makes the connection useless
                self._asks.pop(ask.number, None)
                self._push = None
                connection.shutdown()
                return None
            return ask

    def answer(self, number: int, body: bytes) -> None:
        """Take the engine's answer to a question."""
        ask = self._asks.get(number)
        if ask is not None:
            ask.body = body
            ask.arrived.set()


class _Ask:
    """A question that an engine has been asked."""

    def __init__(self, session: Session, number: int) -> None:
        self.session = session
        self.number = number
        self.body: bytes | None = None
        self.arrived = threading.Event()

    def result(self, timeout_s: float) -> bytes | None:
        """Return the answer, or None if none came in time."""
        self.arrived.wait(timeout_s)
        self.session._asks.pop(self.number, None)
        return self.body
