"""A proxy that a test puts between a client and a server, to do to their connection what networks do.

Everything is controlled while it runs. A fault holds for a *direction*: ``proxy.requests`` is what clients send,
``proxy.replies`` what comes back::

    with Proxy(("127.0.0.1", redis_port)) as proxy:
        tier = SharedTier(proxy.url)
        proxy.replies.cut(100)  # the connection ends after 100 more bytes of replies
        proxy.requests.flip(7)  # one bit of the eighth byte from now
        proxy.replies.delay_s = 0.2
        proxy.black_hole()  # half-open: what is sent is swallowed, nothing comes back
        proxy.restore()  # no fault any more; connections that lost bytes stay dead

Bytes are counted over all connections together, from the moment that a fault is set. A unix upstream gets the
descriptors that travel with the bytes, so that our own protocol passes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

#: Where a server listens: host and port, or the path of a unix socket.
Address = tuple[str, int] | Path

_RECV_NBYTES = 1 << 16
_MAX_FDS = 64
_STOP_S = 10.0
_CONNECT_S = 5.0


class Direction:
    """One direction of all connections: what passed, and what is to be done to it.

    Attributes:
        nbytes: bytes that passed since the start.
        delay_s: seconds that each piece waits before it is passed on.
        nbytes_per_s: the most that passes; None: no limit.
        edit: replaces each piece as it arrived (at most 64 KiB; a short reply is one piece); None: nothing.
        num_faults: flips and cuts that happened.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.num_faults = 0
        self._lock = threading.Lock()
        self._flips: dict[int, int] = {}  # offset in ``nbytes`` -> mask
        self._cuts: list[int] = []
        self.clear()

    def clear(self) -> None:
        """Undo every fault of this direction that has not happened yet."""
        with self._lock:
            self.delay_s = 0.0
            self.nbytes_per_s: float | None = None
            self.edit: Callable[[bytes], bytes] | None = None
            self._flips.clear()
            self._cuts.clear()

    def flip(self, at: int, mask: int = 1) -> None:
        """Flip bits of the byte that passes after ``at`` more; once."""
        with self._lock:
            self._flips[self.nbytes + at] = mask

    def cut(self, at: int) -> None:
        """Let ``at`` more bytes pass and then end the connection that carried the last of them; once.

        With 0 it is the connection that something is sent on next.
        """
        with self._lock:
            self._cuts = sorted([*self._cuts, self.nbytes + at])

    def _take(self, data: bytes) -> tuple[bytes, bool]:
        """Return what passes of ``data``, and whether the connection ends after it."""
        with self._lock:
            if self.edit is not None:
                data = self.edit(data)
            start, over = self.nbytes, False
            if self._cuts and self._cuts[0] <= start + len(data):
                data, over = data[: self._cuts.pop(0) - start], True
                self.num_faults += 1
            self.nbytes += len(data)
            flips = [at for at in self._flips if at < self.nbytes]
            if flips:
                changed = bytearray(data)
                for at in flips:
                    changed[at - start] ^= self._flips.pop(at)
                self.num_faults += len(flips)
                data = bytes(changed)
            return data, over


class _Link:
    """A client's connection and the one to the server behind it."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client, self.server = client, server
        self.asking = False  # the client sent last: more bytes of its are the same round trip
        self.dead = False  # bytes were swallowed: nothing passes any more
        self.ended = threading.Event()

    def end(self) -> None:
        """Hang up on both sides; the pumps see it and leave. Idempotent."""
        self.ended.set()
        for sock in (self.client, self.server):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class Proxy:
    """Listens on a port of the loopback, or on a unix socket, and passes everything on to ``upstream``.

    Args:
        upstream: the server. May be replaced at any time; new connections go there. One that refuses has the client's
            connection closed at once.
        listen: path of a unix socket to listen on; None: a free TCP port.

    Attributes:
        requests, replies: the two directions.
        num_connections: connections taken so far.
        num_swallowed: bytes that a black hole took.
        num_round_trips: how often a client sent something after it had received something, over all connections; its
            first words count. Pipelined commands are one, so long as no reply came before the last of them was sent.
    """

    def __init__(self, upstream: Address, *, listen: Path | None = None) -> None:
        self.upstream = upstream
        self.requests, self.replies = Direction(), Direction()
        self.num_connections = self.num_round_trips = self.num_swallowed = 0
        self._path = listen
        self._open = threading.Event()  # cleared: nothing is read
        self._open.set()
        self._stopping = threading.Event()
        self._swallow = False
        self._lock = threading.Lock()
        self._links: list[_Link] = []
        self._threads: list[threading.Thread] = []
        if listen is None:
            self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
            self.port: int = self._listener.getsockname()[1]
        else:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(str(listen))
            self._listener.listen(128)
            self.port = 0
        self._start(self._accept)

    @property
    def address(self) -> Address:
        """Where clients connect to."""
        return self._path or ("127.0.0.1", self.port)

    @property
    def url(self) -> str:
        """The address as a Redis URL."""
        return f"unix://{self._path}?db=0" if self._path else f"redis://127.0.0.1:{self.port}/0"

    @property
    def num_open(self) -> int:
        """Connections that are open now."""
        with self._lock:
            return len(self._links)

    def black_hole(self) -> None:
        """From now on swallow what is sent and answer nothing; new connections are taken, and end there too."""
        with self._lock:
            self._swallow = True
            for link in self._links:
                link.dead = True

    def freeze(self) -> None:
        """From now on read nothing: what is sent stays in the kernel's buffers until :meth:`restore`."""
        self._open.clear()

    def restore(self) -> None:
        """Undo every fault. Connections that a black hole swallowed bytes of stay dead, as they do in a network."""
        with self._lock:
            self._swallow = False
        self.requests.clear()
        self.replies.clear()
        self._open.set()

    def drop_connections(self) -> None:
        """End every connection that is open now."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.end()

    def close(self) -> None:
        """End everything and wait for the threads. Idempotent.

        Raises:
            TimeoutError: a thread does not end.
        """
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._open.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.drop_connections()
        while threads := self._running():
            for thread in threads:
                thread.join(_STOP_S)
                if thread.is_alive():
                    raise TimeoutError(f"{thread.name} of the proxy does not end")
        self._listener.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Threads

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name=f"proxy-{target.__name__}", daemon=True)
        with self._lock:
            self._threads.append(thread)
            thread.start()

    def _running(self) -> list[threading.Thread]:
        with self._lock:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            return list(self._threads)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = self._connect()
            except OSError:
                client.close()
                continue
            with self._lock:
                self.num_connections += 1
                link = _Link(client, server)
                link.dead = self._swallow
                self._links.append(link)
            if self._stopping.is_set():
                link.end()
            self._start(self._serve, link)

    def _connect(self) -> socket.socket:
        if isinstance(self.upstream, Path):
            server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                server.connect(str(self.upstream))
            except BaseException:
                server.close()
                raise
            return server
        server = socket.create_connection(self.upstream, timeout=_CONNECT_S)
        server.settimeout(None)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return server

    def _serve(self, link: _Link) -> None:
        """Pass replies on in this thread and requests in another; the last to leave closes the sockets."""
        back = threading.Thread(target=self._pump, args=(link, False), name="proxy-replies", daemon=True)
        back.start()
        self._pump(link, True)
        back.join()
        with self._lock:
            self._links.remove(link)
        link.client.close()
        link.server.close()

    def _pump(self, link: _Link, asking: bool) -> None:
        source, sink = (link.client, link.server) if asking else (link.server, link.client)
        direction = self.requests if asking else self.replies
        try:
            while self._pass_on(link, source, sink, direction, asking):
                pass
        except OSError:
            pass  # one of the two is gone, or the link was ended
        finally:
            link.end()

    def _pass_on(
        self, link: _Link, source: socket.socket, sink: socket.socket, direction: Direction, asking: bool
    ) -> bool:
        """Pass one piece on and return whether more may come."""
        self._open.wait()
        data, fds = _receive(source)
        try:
            self._open.wait()  # a freeze holds back what a read that was under way brought
            if not data:
                # A server behind a black hole may hang up; its client is not told.
                if link.dead and not asking:
                    link.ended.wait()
                return False
            if direction.delay_s:
                link.ended.wait(direction.delay_s)
            if link.dead:
                with self._lock:
                    self.num_swallowed += len(data)
                return True
            data, over = direction._take(data)
            self._count(link, asking)
            _send(sink, data, fds)
            if over:
                link.end()
                return False
            if direction.nbytes_per_s:
                link.ended.wait(len(data) / direction.nbytes_per_s)
            return True
        finally:
            for fd in fds:
                os.close(fd)

    def _count(self, link: _Link, asking: bool) -> None:
        with self._lock:
            if asking and not link.asking:
                self.num_round_trips += 1
            link.asking = asking


def _receive(source: socket.socket) -> tuple[bytes, list[int]]:
    if source.family != socket.AF_UNIX:
        return source.recv(_RECV_NBYTES), []
    data, fds, _, _ = socket.recv_fds(source, _RECV_NBYTES, _MAX_FDS)
    return data, list(fds)


def _send(sink: socket.socket, data: bytes, fds: list[int]) -> None:
    if not data:
        return
    if not fds or sink.family != socket.AF_UNIX:
        sink.sendall(data)
        return
    sent = socket.send_fds(sink, [data], fds)
    sink.sendall(data[sent:])
