"""A relay before a real Redis that understands what passes: it can change, hold back or replace any reply."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from fake_redis import FakeRedis
from tierkv.resp import encode_command

#: Given a command and the bytes of Redis's reply, returns what the client gets; None ends the connection.
Edit = Callable[[list[bytes], bytes], bytes | None]

_UPSTREAM_TIMEOUT_S = 60.0


class Meddler(FakeRedis):
    """Passes every command on, one by one, over one connection to Redis for each that it has.

    Args:
        port: of the real Redis, on the loopback. It may be killed and come back.

    Attributes:
        edit: what becomes of replies; None: they pass.
        num_edited: replies that ``edit`` changed.
        num_passed: commands that came while Redis was to answer them.
        num_lost: commands that Redis did not answer: it was gone.
    """

    def __init__(self, port: int) -> None:
        super().__init__(self._pass)
        self.edit: Edit | None = None
        self.num_edited = self.num_passed = self.num_lost = 0
        self._redis_port = port
        self._own = threading.local()

    def forget(self) -> None:
        """Drop the record of commands, which holds the payloads that were written."""
        self.commands.clear()

    def _serve(self, link: socket.socket) -> None:
        try:
            super()._serve(link)
        finally:
            for own in (getattr(self._own, "file", None), getattr(self._own, "link", None)):
                if own is not None:
                    own.close()

    def _pass(self, command: list[bytes]) -> bytes | None:
        self.num_passed += 1
        try:
            reply = self._ask(command)
        except OSError:
            self.num_lost += 1
            return None
        edit = self.edit
        if edit is None:
            return reply
        changed = edit(command, reply)
        self.num_edited += changed != reply
        return changed

    def _ask(self, command: list[bytes]) -> bytes:
        link: socket.socket | None = getattr(self._own, "link", None)
        if link is None:
            link = socket.create_connection(("127.0.0.1", self._redis_port), _UPSTREAM_TIMEOUT_S)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._own.link, self._own.file = link, link.makefile("rb")
            self._links.append(link)
        link.sendall(encode_command(command))
        return self._reply()

    def _reply(self) -> bytes:
        """Read one reply, whole, as its bytes (RESP2)."""
        line: bytes = self._own.file.readline()
        if not line.endswith(b"\r\n"):
            raise ConnectionResetError("Redis hung up")
        if line[:1] == b"$" and line != b"$-1\r\n":
            body: bytes = self._own.file.read(int(line[1:]) + 2)
            return line + body
        if line[:1] == b"*":
            return line + b"".join(self._reply() for _ in range(max(0, int(line[1:]))))
        return line
