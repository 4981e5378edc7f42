"""What the server knows of a connection: its bytes, who is behind it, its session."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tierkv.errors import RefusedError
from tierkv.resp import Parser, Value
from tierkv_server.access import BOUNDS, Role
from tierkv_server.inline import Mover, is_store
from tierkv_server.session import Session
from tierkv_server.stream import Stream


class Connection:
    """A connection.

    Args:
        stream: its bytes; owned by whoever serves it.
        peer: who is behind it, for people.
        host: the peer's address; empty for the unix socket, whose peers are of this machine and user.
        role: what it may do.

    Thread-safety: belongs to the thread that serves the connection.
    """

    def __init__(self, stream: Stream, peer: str, host: str, role: Role) -> None:
        self.stream = stream
        self.peer = peer
        self.host = host
        self.role = role
        self.credential = b""  #: digest of the token that it has shown
        self.num_wrong_tokens = 0
        self.since = time.monotonic()
        self.session: Session | None = None
        self.owns_session = False
        self.num_placed = 0  #: payloads of the command under way that were received into the session's memory
        self.after_reply: Callable[[], None] | None = None
        self.closing = False
        self.parser = Parser(inline=True, bounds=BOUNDS[role], sink=self._place)
        self._mover: Mover | None = None

    @property
    def local(self) -> bool:
        """Whether it came over the unix socket."""
        return not self.host

    def become(self, role: Role, credential: bytes) -> None:
        """Let it do what ``role`` may, for as long as the token with this digest is the role's."""
        self.role, self.credential = role, credential
        self.parser.bounds = BOUNDS[role]

    @property
    def fds(self) -> list[int]:
        """The descriptors that have arrived and nobody has taken."""
        return self.stream.fds

    def take_fds(self) -> list[int]:
        """Return the descriptors that have arrived, which the caller owns from now on."""
        fds, self.stream.fds = self.stream.fds, []
        return fds

    def replied(self) -> None:
        """Do what the last command left for the time after its reply."""
        todo, self.after_reply = self.after_reply, None
        if todo:
            todo()

    def need_session(self) -> Session:
        """Return the session.

        Raises:
            RefusedError: there is none.
        """
        if self.session is None:
            raise RefusedError("this connection has no session; send TKV.HELLO or TKV.ATTACH first")
        return self.session

    def mover(self) -> Mover:
        """Return what moves payloads over this connection, whose session is an inline one."""
        if self._mover is None:
            self._mover = Mover(self.need_session())
        return self._mover

    def give_back(self) -> None:
        """Give back what it holds of its session's memory. Nothing more is received. Idempotent."""
        self.parser = Parser()  # which holds views of it, and this connection
        if self._mover is not None:
            self._mover.close()
            self._mover = None

    def _place(self, items: Sequence[Value], nbytes: int) -> list[memoryview] | None:
        """Say where a bulk string of a command goes: the payloads of an inline STORE."""
        if self.session is None or not self.session.hello.inline or not is_store(items):
            return None
        return self.mover().place(len(items) - 3, nbytes)
