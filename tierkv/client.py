"""The engine's side of the store server: commands out without waiting, replies applied by a thread of its own.

Theory of operation. The scheduler thread queues commands and never blocks; one *reader thread* owns every socket. A
*session* is a set of connections that live and die together: ``NUM_LANES`` lanes for MATCH and FETCH (a plan keeps to
one, so its replies come in order; a slow one does not hold up the others), one for STORE and answers, one for pushes,
and the lease socket. Any fault (an error, a framing error, no answer in time) ends the session: nobody waits for it any
more, and after a back-off the thread connects again, launching a server if this engine may.

A FETCH that was under way when its session ended brought nothing, but a server that is merely slow may still write its
slots: they are released when the session's lease socket ends (see ``tierkv_server.session``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tierkv.errors import ConfigError, ProtocolError, RefusedError, TierKVError, UnavailableError
from tierkv.health import Health
from tierkv.hostindex import Fetch
from tierkv.launcher import Launcher
from tierkv.messages import Hello, StoreItem, Welcome
from tierkv.resp import Error, Parser, Simple, Value, encode_command
from tierkv.sizes import format_size
from tierkv.threads import leave_compute_core
from tierkv.unix import short_path

logger = logging.getLogger("tierkv")

NUM_LANES = 4
#: A server that has not answered a MATCH or FETCH for this long is out.
REPLY_TIMEOUT_S = 5.0
#: A STORE may wait for the disk longer than that.
STORE_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 2.0
#: How long an engine's start waits for a server that it launches.
LAUNCH_TIMEOUT_S = 15.0
_RECV_NBYTES = 1 << 18

Reply = Callable[["bytes | None"], None]


class MatchReply:
    """The outstanding answer to a MATCH. ``letters``: None until it is known; one letter a chunk of the stored run."""

    __slots__ = ("letters",)

    def __init__(self) -> None:
        self.letters: bytes | None = None


class _Lane:
    """One connection: what is to be sent, and who waits for which reply, in order."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self.sock = sock
        self.timeout_s = timeout_s
        self.out: deque[memoryview] = deque()
        self.waiting: deque[tuple[float, Reply]] = deque()
        self.replied_at = 0.0  # time of the last reply: a lane is late when nothing comes, not when much is queued
        self.parser = Parser()


class _Session:
    """The connections of one HELLO."""

    def __init__(self, welcome: Welcome, lanes: list[_Lane], store: _Lane, push: _Lane, lease: socket.socket) -> None:
        self.welcome = welcome
        self.lanes = lanes
        self.store = store
        self.push = push
        self.lease = lease
        self.fetches: set[Fetch] = set()

    def all_lanes(self) -> list[_Lane]:
        return [*self.lanes, self.store, self.push]


class StoreClient:
    """An engine's client.

    Args:
        socket_path: the server's socket.
        hello: what the engine says of itself.
        pool_fds: descriptors of the pool's segments; not owned.
        launcher: starts a server where none answers; None if this engine may not.
        on_push: called on the reader thread with a question's name and body; returns the answer.
    """

    def __init__(
        self,
        socket_path: Path,
        hello: Hello,
        pool_fds: Sequence[int],
        launcher: Launcher | None,
        on_push: Callable[[str, bytes], bytes],
    ) -> None:
        self.health = Health(f"the store server at {socket_path}")
        self._path = socket_path
        self._hello = hello
        self._pool_fds = list(pool_fds)
        self._launcher = launcher
        self._on_push = on_push
        self._session: _Session | None = None
        self._old_leases: dict[socket.socket, set[Fetch]] = {}
        self._commands: deque[tuple[int, bytes, Reply, Fetch | None]] = deque()
        self._lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_fd, selectors.EVENT_READ, None)
        self._next_lane = 0
        self._warned_of: int | None = None  # the owner's disk budget that a warning was about
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tierkv-reader", daemon=True)

    # -- the scheduler thread

    def start(self) -> Welcome | None:
        """Connect, launching a server if need be, and start the reader thread.

        Returns None where no server can be had now: the engine starts without and tries again later.

        Raises:
            ConfigError: the server refuses this engine, or cannot run as configured.
        """
        deadline = time.monotonic() + LAUNCH_TIMEOUT_S
        welcome = None
        while welcome is None:
            try:
                self._open()
                assert self._session is not None
                welcome = self._session.welcome
            except RefusedError as error:
                raise ConfigError(str(error)) from None
            except (TierKVError, OSError) as error:
                if isinstance(error, ConfigError):
                    raise
                if self._launcher is None or time.monotonic() > deadline:
                    self.health.failed(error)
                    break
                self._launcher.launch()
                time.sleep(0.02)
        self._thread.start()
        return welcome

    def connected(self) -> bool:
        """Return whether there is a session now."""
        return self._session is not None

    def boot(self) -> str:
        """Return the boot id of the server of the current session; empty for none."""
        session = self._session
        return session.welcome.boot if session else ""

    def next_lane(self) -> int:
        """Return the lane that a new plan is to keep to."""
        self._next_lane = (self._next_lane + 1) % NUM_LANES
        return self._next_lane

    def match(self, lane: int, start: int, anchor: bytes, keys: Sequence[bytes]) -> MatchReply:
        """Ask for the longest stored prefix of ``keys``, the first at position ``start`` of its chain."""
        reply = MatchReply()

        def arrived(letters: bytes | None) -> None:
            reply.letters = letters or b""

        words: list[bytes | int] = [b"TKV.MATCH", self._hello.namespace.ns_id(), start, anchor, b"".join(keys)]
        self._queue(lane, words, arrived, None)
        return reply

    def fetch(self, lane: int, start: int, anchor: bytes, fetch: Fetch) -> None:
        """Have consecutive chunks copied into their slots; ``fetch`` is told when they are there."""

        def arrived(letters: bytes | None) -> None:
            whole = letters is not None and len(letters) == len(fetch.entries)
            fetch.results = letters if letters and whole else b""
            if letters is not None:
                fetch.released = True

        keys = b"".join(e.key for e in fetch.entries)
        slots = struct.pack(f"<{len(fetch.entries)}I", *(e.slot for e in fetch.entries))
        self._queue(lane, [b"TKV.FETCH", start, anchor, keys, slots], arrived, fetch)

    def store(self, items: Sequence[StoreItem], dropped: set[bytes], done: Reply) -> None:
        """Have chunks stored, except those that an operator evicted in the meantime.

        ``done`` is called on the reader thread with a letter an item sent, or None where no answer will come.
        """
        with self._lock:  # the drop set grows under this lock: an eviction's answer follows these items, or they stay
            items = [item for item in items if item.key not in dropped]
            if items and not self._closed:
                words = [b"TKV.STORE", msgspec.msgpack.encode(items)]
                self._commands.append((NUM_LANES, encode_command(words), done, None))
        if not items:
            done(b"")
        elif self._closed:
            done(None)
        else:
            self._wake()

    def drop(self, keys: Sequence[bytes], dropped: set[bytes]) -> None:
        """Add evicted keys to the drop set, in order with the stores that are queued."""
        with self._lock:
            dropped.update(keys)

    def close(self) -> None:
        """Leave the server and stop the reader thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join(timeout=CONNECT_TIMEOUT_S + 1)
        self._end("closed", log=False)
        self._send_commands()  # there is no session: each is told that no answer will come
        for lease in list(self._old_leases):
            self._release(lease)
        self._selector.close()
        os.close(self._wake_fd)

    def _queue(self, lane: int, words: Sequence[bytes | int], reply: Reply, fetch: Fetch | None) -> None:
        if self._session is None or self._closed:
            self._no_answer(reply, fetch)
            return
        with self._lock:
            self._commands.append((lane, encode_command(words), reply, fetch))
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake_fd, 1)

    # -- the reader thread

    def _run(self) -> None:
        leave_compute_core()
        while not self._closed:
            try:
                self._step()
            except Exception:  # nothing here may stop the thread: the engine would wait for ever
                logger.exception("the store client failed in an unforeseen way")
                self._end("an unforeseen fault")

    def _step(self) -> None:
        if self._session is None and self.health.available():
            self._reconnect()
        for key, events in self._selector.select(self._patience_s()):
            if key.fileobj == self._wake_fd:
                with contextlib.suppress(OSError):
                    os.eventfd_read(self._wake_fd)
            elif isinstance(key.data, _Lane):
                self._service_lane(key.data, events)
            else:
                self._lease_event(key.fileobj)  # type: ignore[arg-type]
        self._send_commands()
        self._check_timeouts()

    def _patience_s(self) -> float:
        if self._session is None:
            return min(1.0, self.health.retry_in_s() + 0.01)
        return 0.5

    def _reconnect(self) -> None:
        try:
            self._open()
            self.health.worked()
        except (TierKVError, OSError) as error:
            self.health.failed(error)
            if self._launcher is not None and isinstance(error, FileNotFoundError | ConnectionRefusedError):
                try:
                    self._launcher.launch()
                except (ConfigError, OSError) as reason:
                    self.health.failed(reason)

    def _open(self) -> None:
        """Say hello and open the lanes.

        Raises:
            OSError, UnavailableError: nobody answers.
            RefusedError: the server does not want this engine.
        """
        socks: list[socket.socket] = []
        lease, theirs = socket.socketpair()
        try:
            with theirs:
                push = self._connect(socks)
                body = msgspec.json.encode(self._hello)
                command = encode_command([b"TKV.HELLO", body])
                socket.send_fds(push, [command], [*self._pool_fds, theirs.fileno()])
            welcome = msgspec.json.decode(_read_reply(push), type=Welcome)
            for sock in [self._connect(socks) for _ in range(NUM_LANES + 1)]:
                _call(sock, [b"TKV.ATTACH", welcome.session])
            push.sendall(encode_command([b"TKV.SUBSCRIBE"]))  # a push may follow its reply at once: see _pushed
        except BaseException:
            for sock in [*socks, lease]:
                sock.close()
            raise
        lanes = [_Lane(s, REPLY_TIMEOUT_S) for s in socks[1:-1]]
        session = _Session(welcome, lanes, _Lane(socks[-1], STORE_TIMEOUT_S), _Lane(push, 0.0), lease)
        for lane in session.all_lanes():
            lane.sock.setblocking(False)
            self._selector.register(lane.sock, selectors.EVENT_READ, lane)
        self._selector.register(lease, selectors.EVENT_READ, "lease")
        self._session = session
        if self._hello.disk_bytes not in (None, welcome.disk_bytes) and self._warned_of != welcome.disk_bytes:
            self._warned_of = welcome.disk_bytes
            logger.warning(
                "the store server of %s runs with disk_bytes=%s, which holds; this engine asked for %s",
                welcome.disk_dir,
                format_size(welcome.disk_bytes),
                format_size(self._hello.disk_bytes or 0),
            )

    def _connect(self, socks: list[socket.socket]) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        socks.append(sock)
        sock.settimeout(CONNECT_TIMEOUT_S)
        with short_path(self._path) as name:
            sock.connect(name)
        return sock

    def _send_commands(self) -> None:
        with self._lock:
            commands, self._commands = self._commands, deque()
        session = self._session
        now = time.monotonic()
        for lane_index, data, reply, fetch in commands:
            if session is None:
                self._no_answer(reply, fetch)
                continue
            lane = session.store if lane_index == NUM_LANES else session.lanes[lane_index]
            lane.out.append(memoryview(data))
            lane.waiting.append((now, reply))
            if fetch is not None:
                session.fetches.add(fetch)
        if session:
            for lane in session.all_lanes():
                if lane.out and not self._flush(lane):
                    return

    def _flush(self, lane: _Lane) -> bool:
        """Send what the socket takes; False if the session ended."""
        try:
            while lane.out:
                sent = lane.sock.send(lane.out[0])
                if sent < len(lane.out[0]):
                    lane.out[0] = lane.out[0][sent:]
                    break
                lane.out.popleft()
        except BlockingIOError:
            pass
        except OSError as error:
            self._end(error)
            return False
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if lane.out else 0)
        if self._selector.get_key(lane.sock).events != wanted:
            self._selector.modify(lane.sock, wanted, lane)
        return True

    def _service_lane(self, lane: _Lane, events: int) -> None:
        session = self._session
        if session is None or lane not in session.all_lanes():
            return
        if events & selectors.EVENT_WRITE and not self._flush(lane):
            return
        if not events & selectors.EVENT_READ:
            return
        try:
            data = lane.sock.recv(_RECV_NBYTES)
            if not data:
                raise UnavailableError("it closed the connection")
            for value in lane.parser.feed(data):
                self._take(session, lane, value)
        except BlockingIOError:
            pass
        except (OSError, TierKVError) as error:
            self._end(error)

    def _take(self, session: _Session, lane: _Lane, value: Value) -> None:
        if lane is session.push:
            self._pushed(session, value)
            return
        if not lane.waiting:
            raise ProtocolError("a reply came that nobody asked for")
        _, reply = lane.waiting.popleft()
        lane.replied_at = time.monotonic()
        if isinstance(value, Error):  # an answer too: the command brought nothing and writes no slot any more
            logger.warning("the store server refused a command: %s", value)
            value = b"" if lane in session.lanes else None
        reply(value if isinstance(value, bytes) else None)
        if lane in session.lanes:
            session.fetches = {f for f in session.fetches if not f.released}

    def _pushed(self, session: _Session, value: Value) -> None:
        if isinstance(value, Simple):  # the reply to SUBSCRIBE
            return
        if not isinstance(value, list) or len(value) != 3:
            raise ProtocolError("a push is an array of three")
        what, number, body = value
        if not isinstance(what, bytes) or not isinstance(number, int) or not isinstance(body, bytes):
            raise ProtocolError("a push is a name, a number and a body")
        answer = self._on_push(what.decode(), body)
        with self._lock:
            words: list[bytes | int] = [b"TKV.ANSWER", number, answer]
            self._commands.append((NUM_LANES, encode_command(words), lambda _: None, None))

    def _check_timeouts(self) -> None:
        session, now = self._session, time.monotonic()
        for lane in session.all_lanes() if session else ():
            if lane.waiting and now - max(lane.waiting[0][0], lane.replied_at) > lane.timeout_s:
                self._end(f"it has not answered for {lane.timeout_s:g} s")
                return

    def _end(self, reason: object, log: bool = True) -> None:
        """End the session: nobody waits any more; leased slots wait for the lease socket."""
        session, self._session = self._session, None
        if session is None:
            return
        if log:
            self.health.failed(reason)
        for lane in session.all_lanes():
            self._selector.unregister(lane.sock)
            lane.sock.close()
            for _, reply in lane.waiting:
                reply(None)
        self._old_leases[session.lease] = {f for f in session.fetches if not f.released}

    def _lease_event(self, lease: socket.socket) -> None:
        try:
            if lease.recv(1):
                return
        except OSError:
            pass
        session = self._session
        if session is not None and session.lease is lease:
            self._end("it ended the session")
        self._release(lease)

    def _release(self, lease: socket.socket) -> None:
        """The server cannot write the slots of this lease any more."""
        for fetch in self._old_leases.pop(lease, ()):
            fetch.released = True
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(lease)
        lease.close()

    @staticmethod
    def _no_answer(reply: Reply, fetch: Fetch | None) -> None:
        """Tell that a command was never sent: no answer will come, and nobody writes its slots."""
        if fetch is not None:
            fetch.released = True
        reply(None)


def _read_reply(sock: socket.socket) -> bytes:
    """Read one reply from a blocking socket.

    Raises:
        RefusedError: the reply is an error.
        UnavailableError: the connection ended.
    """
    parser = Parser()
    while True:
        data = sock.recv(_RECV_NBYTES)
        if not data:
            raise UnavailableError("the store server closed the connection")
        for value in parser.feed(data):
            if isinstance(value, Error):
                raise RefusedError(value.split(" ", 1)[-1])
            return value if isinstance(value, bytes) else str(value).encode()


def _call(sock: socket.socket, words: Sequence[bytes | str | int]) -> bytes:
    sock.sendall(encode_command(words))
    return _read_reply(sock)


class AdminClient:
    """A plain client for tools: one command at a time, over a unix socket.

    Args:
        path: the server's socket.

    Raises:
        UnavailableError: nobody answers there.
    """

    def __init__(self, path: Path, timeout_s: float = 30.0) -> None:
        self._path = path
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.settimeout(timeout_s)
        try:
            with short_path(path) as name:
                self._sock.connect(name)
        except OSError as error:
            self._sock.close()
            raise UnavailableError(
                f"no store server answers at {path} ({error.strerror or error}); start one with 'tierkv serve', "
                f"or name its socket with --server"
            ) from None

    def call(self, *words: bytes | str | int) -> bytes:
        """Send a command and return its reply.

        Raises:
            RefusedError: the server's reply is an error.
            UnavailableError: the server went away or does not answer.
        """
        try:
            return _call(self._sock, words)
        except OSError as error:
            raise UnavailableError(
                f"the store server at {self._path} does not answer ({error.strerror or error}); it may be stopped or "
                f"hang: look at its process, or name another socket with --server"
            ) from None

    def ask(self, command: str, body: Any = None) -> Any:
        """Send a command with a JSON body and return its JSON reply, decoded."""
        words = [command] if body is None else [command, msgspec.json.encode(body)]
        return msgspec.json.decode(self.call(*words))

    def close(self) -> None:
        self._sock.close()

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
