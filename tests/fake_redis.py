"""A scripted Redis: real RESP on a real socket, with answers that a real one would never give."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from tierkv.resp import Parser

#: Returns the bytes of the reply to a command, or None to close the connection without one.
Answer = Callable[[list[bytes]], bytes | None]


class FakeRedis:
    """Answers every command with what ``answer`` returns; use it as a context.

    Attributes:
        commands: every command that came, in order, over all connections.
        num_connections: connections that were made.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.commands: list[list[bytes]] = []
        self.num_connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        self._links: list[socket.socket] = []

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def num_of(self, name: bytes) -> int:
        """Commands of one name that came so far."""
        return sum(command[0] == name for command in self.commands)

    def __enter__(self) -> FakeRedis:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        for link in (self._listener, *self._links):
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            self._links.append(link)
            self._start(self._serve, link)

    def _serve(self, link: socket.socket) -> None:
        parser = Parser()
        with link, contextlib.suppress(OSError):
            while data := link.recv(1 << 16):
                commands = [command for command in parser.feed(data) if isinstance(command, list)]
                self.commands += commands  # type: ignore[arg-type]
                for command in commands:
                    reply = self.answer(command)  # type: ignore[arg-type]
                    if reply is None:
                        return
                    link.sendall(reply)


def bulk(data: bytes) -> bytes:
    """A bulk string."""
    return b"$%d\r\n%s\r\n" % (len(data), data)
