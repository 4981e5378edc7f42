"""The engine's side of the store server: commands out without waiting, replies applied by a thread of its own.

Theory of operation. The scheduler thread queues commands and never blocks; one *reader thread* owns every socket. A
*session* is a set of connections that live and die together: ``NUM_LANES`` lanes for MATCH and FETCH (a plan keeps to
one, so its replies come in order; a slow one does not hold up the others), one for STORE and answers, one for pushes,
and the lease socket. Any fault (an error, a framing error, no answer in time) ends the session: nobody waits for it any
more, and after a back-off the thread connects again, launching a server if this engine may.

A FETCH that was under way when its session ended brought nothing, but a server that is merely slow may still write its
slots: they are released when the session's lease socket ends (see ``tierkv_server.session``).

Where no memory can be shared (TCP), the session is *inline*: payloads travel on the lanes, the reader thread alone
writes slots (:mod:`tierkv.inline_client`), and there is no lease socket: slots are free when it ends a session.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from tierkv.admin_client import AdminClient as AdminClient
from tierkv.asked import REPORT_INTERVAL_S, AskedLog
from tierkv.errors import (
    BusyError,
    ConfigError,
    NotAdmittedError,
    ProtocolError,
    RefusedError,
    TierKVError,
    UnavailableError,
)
from tierkv.filter import KeyFilter
from tierkv.health import Health, Repeated
from tierkv.hostindex import Fetch
from tierkv.inline_client import InlineTransfers, merge_letters
from tierkv.launcher import Launcher
from tierkv.messages import FAREWELL, MORE_KEYS, USED, WHOLE_FILTER, Hello, RequestNote, StoreItem, Welcome
from tierkv.pool import HostPool
from tierkv.resp import Error, Parser, Simple, Value, encode_command
from tierkv.sessions import SessionTurn
from tierkv.sizes import format_size
from tierkv.threads import leave_compute_core
from tierkv.transport import Address, call, connect, read_reply, recv_records, tls_context

logger = logging.getLogger("tierkv")

NUM_LANES = 4
#: A server that has not answered a MATCH or FETCH for this long is out.
REPLY_TIMEOUT_S = 5.0
#: A STORE may wait for the disk longer than that.
STORE_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 2.0
#: A server that took this engine in and was lost again within this time has not been back: it must have had to answer.
SETTLE_S = 2 * REPLY_TIMEOUT_S
#: How long an engine's start waits for a server that it launches.
LAUNCH_TIMEOUT_S = 15.0
#: How long an engine that leaves waits for the server to take its last counters.
_FAREWELL_S = 0.5
_RECV_NBYTES = 1 << 18
_SEND_NBYTES = 1 << 18
#: Bytes that a lane sends before the others have their turn: payloads of stores do not hold up what requests wait for.
_TURN_NBYTES = 1 << 20

Reply = Callable[["bytes | None"], None]


class MatchReply:
    """The outstanding answer to a MATCH. ``letters``: None until it is known; one letter a chunk of the stored run."""

    __slots__ = ("letters",)

    def __init__(self) -> None:
        self.letters: bytes | None = None


class _Command:
    """What is to be sent on a lane, and who waits for its reply.

    Attributes:
        lane: index of the lane; ``NUM_LANES`` is that of stores.
        views: the bytes that are still to be sent.
        reply: called with the reply, or None where none will come.
        fetch: of a FETCH.
        items: of an inline STORE. Its bytes are made when it is its turn; until then evicted ones leave the list.
        sent_at: when its first bytes were given to the socket; 0 until then.
    """

    __slots__ = ("fetch", "items", "lane", "reply", "sent_at", "views")

    def __init__(
        self,
        lane: int,
        data: bytes,
        reply: Reply,
        fetch: Fetch | None = None,
        items: list[StoreItem] | None = None,
    ) -> None:
        self.lane = lane
        self.views = [memoryview(data)] if data else []
        self.reply = reply
        self.fetch = fetch
        self.items = items
        self.sent_at = 0.0

    def no_answer(self) -> None:
        """Tell that it was never sent: no answer will come, and nobody writes its slots."""
        if self.fetch is not None:
            self.fetch.released = True
        self.reply(None)


class _Lane:
    """One connection: what is to be sent, and who waits for which reply, in order."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self.sock = sock
        self.timeout_s = timeout_s
        self.out: deque[_Command] = deque()
        self.waiting: deque[_Command] = deque()
        self.answered_at = 0.0  # of the last reply: before it the server was busy with another command
        self.moved_at = 0.0  # of the last bytes that came: a lane is late when nothing comes, not when much is queued
        self.parser = Parser()

    def pending(self) -> bool:
        """Whether bytes have been taken off the socket that nobody has seen: no event will tell of them."""
        return isinstance(self.sock, ssl.SSLSocket) and self.sock.pending() > 0

    def late(self, now: float) -> bool:
        return bool(self.waiting) and now - max(self.waiting[0].sent_at, self.moved_at) > self.timeout_s


class _Session:
    """The connections of one HELLO. ``lease`` is None for an inline one."""

    def __init__(
        self, welcome: Welcome, lanes: list[_Lane], store: _Lane, push: _Lane, lease: socket.socket | None
    ) -> None:
        self.welcome = welcome
        self.lanes = lanes
        self.store = store
        self.push = push
        self.lease = lease
        self.fetches: set[Fetch] = set()
        self.known: KeyFilter | None = None  # what the server says is stored; None: ask

    def take_filter(self, message: bytes) -> None:
        """Take note of a "filter" push.

        Raises:
            ProtocolError: it is not one.
        """
        try:
            kind, body = msgspec.msgpack.decode(message, type=tuple[int, bytes])
            if kind == MORE_KEYS and self.known is not None:
                self.known.add_packed(body)
            else:
                self.known = KeyFilter(body) if kind == WHOLE_FILTER else None
        except (msgspec.MsgspecError, ValueError) as error:
            raise ProtocolError(f"a filter of stored keys makes no sense: {error}") from None

    def all_lanes(self) -> list[_Lane]:
        return [*self.lanes, self.store, self.push]

    def is_storing(self, keys: bytes) -> bool:
        """Return whether a STORE is under way of one of ``keys``, 32 bytes each."""
        under_way = {item.key for command in self.store.waiting for item in command.items or ()}
        return any(keys[i : i + 32] in under_way for i in range(0, len(keys), 32))

    def lane(self, index: int) -> _Lane:
        return self.store if index == NUM_LANES else self.lanes[index]


class StoreClient:
    """An engine's client.

    Args:
        address: where the server is; a path is that of its unix socket.
        hello: what the engine says of itself. Over TCP it is an inline one, whatever it says.
        pool: the host pool; not owned.
        launcher: starts a server where none answers; None if this engine may not.
        on_push: called on the reader thread with a question's name and body; returns the answer.
        asked: what requests ask for, to be told of.
    """

    def __init__(
        self,
        address: Address | Path,
        hello: Hello,
        pool: HostPool,
        launcher: Launcher | None,
        on_push: Callable[[str, bytes], bytes],
        asked: AskedLog | None = None,
    ) -> None:
        self._address = address if isinstance(address, Address) else Address(path=address)
        self.health = Health(
            f"the store server at {self._address}",
            meanwhile="Serving goes on without it, with what is on the GPU and in the host pool.",
            settle_s=SETTLE_S,
        )
        self._refusals = Repeated()
        self._unforeseen = Repeated()
        self._hello = msgspec.structs.replace(hello, inline=True) if self._address.remote else hello
        self._pool = pool
        self._inline = InlineTransfers(pool) if self._hello.inline else None
        self._launcher = launcher
        self._on_push = on_push
        self._asked = asked
        self._asked_at = float("-inf")  # of the last report; infinity while its answer is awaited, or none are taken
        self._session: _Session | None = None
        self._old_leases: dict[socket.socket, set[Fetch]] = {}
        self._commands: deque[_Command] = deque()
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

        Returns None where no server can be had now, or none that takes this engine's token and whose certificate it
        trusts: the engine starts without and tries again later.

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
            except (NotAdmittedError, BusyError) as error:
                self.health.failed(error)
                break
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

    @property
    def num_bad(self) -> int:
        """Payloads that arrived over a connection with other bytes than were sent, and were misses."""
        return self._inline.num_bad if self._inline else 0

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

        words: list[bytes | int] = [b"TKV.FETCH", start, anchor, b"".join(e.key for e in fetch.entries)]
        if self._inline is None:
            words.append(struct.pack(f"<{len(fetch.entries)}I", *(e.slot for e in fetch.entries)))
        self._queue(lane, words, arrived, fetch)

    def store(self, items: Sequence[StoreItem], dropped: set[bytes], done: Reply) -> None:
        """Have chunks stored, except those that an operator evicted in the meantime.

        ``done`` is called on the reader thread with a letter an item sent, or None where no answer will come.
        """
        with self._lock:  # the drop set grows under this lock: an eviction's answer follows these items, or they stay
            items = [item for item in items if item.key not in dropped]

            def answered(letters: bytes | None) -> None:
                session = self._session
                if letters and session and session.known:  # what this engine stored it need not be told
                    session.known.add(item.key for item in items)
                done(letters)

            if items and not self._closed:
                if self._inline is None:
                    words = [b"TKV.STORE", msgspec.msgpack.encode(items)]
                    self._commands.append(_Command(NUM_LANES, encode_command(words), answered))
                else:
                    self._commands.append(_Command(NUM_LANES, b"", answered, items=list(items)))
        if not items:
            done(b"")
        elif self._closed:
            done(None)
        else:
            self._wake()

    def use(self, start: int, anchor: bytes, keys: Sequence[bytes], reply: Reply, reason: int = USED) -> None:
        """Tell that consecutive chunks, the first at position ``start``, were used again, or are wanted elsewhere.

        Args:
            reply: called on the reader thread with a letter a key (``NOTED`` or ``WANTED``), or None.
            reason: ``USED``, or ``HANDOFF``.
        """
        words: list[bytes | int] = [b"TKV.USE", start, anchor, b"".join(keys)]
        self._queue(NUM_LANES, words if reason == USED else [*words, reason], reply, None)

    def note(self, note: RequestNote) -> None:
        """Tell of a request, before its chunks are stored; nobody waits for the answer."""
        self._queue(NUM_LANES, [b"TKV.NOTE", msgspec.msgpack.encode(note)], lambda _: None, None)

    def hold(self, took: Sequence[bytes], gone: Sequence[bytes], reply: Reply) -> None:
        """Tell which chunks the host pool keeps from now on, and which it does not any more.

        Args:
            reply: called on the reader thread with ``b"1"`` if what the pool keeps may be missing on the disk, ``b"0"``
                if not, or None.
        """
        self._queue(NUM_LANES, [b"TKV.HOLD", b"".join(took), b"".join(gone)], reply, None)

    def turn(self, turn: SessionTurn) -> None:
        """Tell of a session's request; nobody waits for the answer."""
        self._queue(NUM_LANES, [b"TKV.TURN", msgspec.msgpack.encode(turn)], lambda _: None, None)

    @property
    def spill(self) -> dict[str, str]:
        """When chunks go to each tier (:class:`tierkv.config.Spill`), as the server said; empty without a session."""
        session = self._session
        return session.welcome.spill if session else {}

    @property
    def policy(self) -> str:
        """The policy of the server's disk (:mod:`tierkv.policy`); empty without a session."""
        session = self._session
        return session.welcome.policy if session else ""

    @property
    def holder(self) -> str:
        """The session to which is told what the host pool keeps; empty where that is of no use.

        Over a network what the pool lets go of would be sent once more, with all its bytes.
        """
        session = self._session
        return session.welcome.session if session and session.welcome.holds and self._inline is None else ""

    def denies(self, key: bytes) -> bool:
        """Return whether the filter of stored keys says that ``key`` is in no tier; False where there is none."""
        session = self._session
        return session is not None and session.known is not None and key not in session.known

    def drop(self, keys: Sequence[bytes], dropped: set[bytes]) -> None:
        """Add evicted keys to the drop set, in order with the stores that are queued. For the reader thread."""
        with self._lock:
            dropped.update(keys)
            session = self._session
            if self._inline is not None:  # their bytes may wait for long: those of evicted keys are not sent at all
                gone = set(keys)
                for command in [*self._commands, *(session.store.out if session else ())]:
                    if command.items is not None and not command.sent_at:
                        command.items = [item for item in command.items if item.key not in gone]

    def close(self) -> None:
        """Leave the server and stop the reader thread. Idempotent."""
        if self._closed:
            return
        self._say_farewell()
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

    def _say_farewell(self) -> None:
        """Leave the server this engine's last counters, which nobody can ask for any more."""
        if self._session is None or not self._thread.is_alive():
            return
        heard = threading.Event()
        try:
            stat = self._on_push("stat", b"")
        except Exception:  # an engine that ends while it fails is to end
            self._unforeseen.note("the last statistics could not be made", exc_info=True)
            return
        self._queue(self.next_lane(), [b"TKV.ANSWER", FAREWELL, stat], lambda _: heard.set(), None)
        heard.wait(_FAREWELL_S)

    def _queue(self, lane: int, words: Sequence[bytes | int], reply: Reply, fetch: Fetch | None) -> None:
        command = _Command(lane, encode_command(words), reply, fetch)
        if self._session is None or self._closed:
            command.no_answer()
            return
        with self._lock:
            self._commands.append(command)
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
                self._unforeseen.note("the store client failed in an unforeseen way", exc_info=True)
                self._end("an unforeseen fault")
                time.sleep(0.05)

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
        self._report_asked()
        self._send_commands()
        self._check_timeouts()
        if self._session is not None:
            self.health.worked(self.health.now())

    def _patience_s(self) -> float:
        if self._session is None:
            return min(1.0, self.health.retry_in_s() + 0.01)
        return 0.5

    def _reconnect(self) -> None:
        began = self.health.now()
        try:
            self._open()
            self.health.worked(began)
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
            ConfigError: a file that the address names is not usable.
        """
        socks: list[socket.socket] = []
        lease: socket.socket | None = None
        try:
            context = tls_context(self._address) if self._address.tls else None
            for _ in range(NUM_LANES + 2):
                socks.append(connect(self._address, CONNECT_TIMEOUT_S, context))
                if len(socks) == 1:
                    lease = self._say_hello(socks[0])
                    welcome = msgspec.json.decode(read_reply(socks[0]), type=Welcome)
                else:
                    call(socks[-1], [b"TKV.ATTACH", welcome.session])
            push = socks.pop(0)
            push.sendall(encode_command([b"TKV.SUBSCRIBE"]))  # a push may follow its reply at once: see _pushed
        except BaseException:
            for sock in [*socks, *([lease] if lease else [])]:
                sock.close()
            raise
        lanes = [self._make_lane(sock) for sock in socks[:-1]]
        session = _Session(welcome, lanes, _Lane(socks[-1], STORE_TIMEOUT_S), _Lane(push, STORE_TIMEOUT_S), lease)
        for lane in session.all_lanes():
            lane.sock.setblocking(False)
            self._selector.register(lane.sock, selectors.EVENT_READ, lane)
        if lease is not None:
            self._selector.register(lease, selectors.EVENT_READ, "lease")
        self._session = session
        self._warn_of_budget(welcome)
        self._asked_at = float("-inf")
        if self._asked is not None:
            self._asked.restart()

    def _say_hello(self, sock: socket.socket) -> socket.socket | None:
        """Send the hello, with the pool's descriptors where they can travel, and return our end of the lease socket."""
        command = encode_command([b"TKV.HELLO", msgspec.json.encode(self._hello)])
        if self._inline is not None:
            sock.sendall(command)
            return None
        lease, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(sock, [command], [*self._pool.fds(), theirs.fileno()])
            except BaseException:
                lease.close()
                raise
        return lease

    def _make_lane(self, sock: socket.socket) -> _Lane:
        lane = _Lane(sock, REPLY_TIMEOUT_S)
        inline = self._inline
        if inline is not None:

            def place(items: Sequence[Value], nbytes: int) -> list[memoryview] | None:
                fetch = lane.waiting[0].fetch if lane.waiting else None
                return inline.place(fetch, items, nbytes) if fetch is not None else None

            lane.parser = Parser(sink=place)
        return lane

    def _warn_of_budget(self, welcome: Welcome) -> None:
        if self._hello.disk_bytes not in (None, welcome.disk_bytes) and self._warned_of != welcome.disk_bytes:
            self._warned_of = welcome.disk_bytes
            logger.warning(
                "the store server of %s runs with disk_bytes=%s, which holds; this engine asked for %s",
                welcome.disk_dir,
                format_size(welcome.disk_bytes),
                format_size(self._hello.disk_bytes or 0),
            )

    def _report_asked(self) -> None:
        """Tell what requests asked for: one report at a time, on the lane that no request waits for."""
        session, now = self._session, time.monotonic()
        if self._asked is None or session is None or now - self._asked_at < REPORT_INTERVAL_S:
            return
        asked, report = self._asked, self._asked.take()
        if report is None:
            return
        self._asked_at = float("inf")

        def answered(threshold: bytes | None) -> None:
            if threshold is not None and self._session is session:
                asked.answered(threshold)
                self._asked_at = now

        words: list[bytes | int] = [b"TKV.ASKED", msgspec.msgpack.encode(report)]
        with self._lock:
            self._commands.append(_Command(NUM_LANES, encode_command(words), answered))

    def _send_commands(self) -> None:
        with self._lock:
            commands, self._commands = self._commands, deque()
        session = self._session
        for command in commands:
            if session is None:
                command.no_answer()
            else:
                session.lane(command.lane).out.append(command)
        if session:
            for lane in session.all_lanes():
                if lane.out and not self._flush(session, lane):
                    return

    def _flush(self, session: _Session, lane: _Lane) -> bool:
        """Send what the socket takes, in turns with the other lanes; False if the session ended."""
        left = _TURN_NBYTES
        try:
            while lane.out and left > 0:
                command = lane.out[0]
                if not command.sent_at:
                    self._begin(session, lane, command)
                while command.views and left > 0:
                    view = command.views[0]
                    sent = lane.sock.send(view[:_SEND_NBYTES])
                    left -= sent
                    if sent == len(view):
                        command.views.pop(0)
                    else:
                        command.views[0] = view[sent:]
                if not command.views:
                    lane.out.popleft()
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError as error:
            self._end(error)
            return False
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if lane.out else 0)
        if self._selector.get_key(lane.sock).events != wanted:
            self._selector.modify(lane.sock, wanted, lane)
        return True

    def _begin(self, session: _Session, lane: _Lane, command: _Command) -> None:
        """A command's first bytes are about to be sent: from now on its reply is awaited."""
        if command.items is not None and self._inline is not None:
            command.views, kept = self._inline.pack(command.items)
            done = command.reply
            command.reply = lambda letters: done(merge_letters(letters, kept))
        command.sent_at = time.monotonic()
        lane.waiting.append(command)
        if command.fetch is not None:
            session.fetches.add(command.fetch)

    def _service_lane(self, lane: _Lane, events: int) -> None:
        session = self._session
        if session is None or lane not in session.all_lanes():
            return
        if events & selectors.EVENT_WRITE and not self._flush(session, lane):
            return
        if not events & selectors.EVENT_READ:
            return
        try:
            self._receive(session, lane)
            while self._session is session and lane.pending():
                self._receive(session, lane)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except (OSError, TierKVError) as error:
            self._end(error)

    def _receive(self, session: _Session, lane: _Lane) -> None:
        """Take what has arrived: payloads go to their slots, and values to who waits for them."""
        space = lane.parser.space()
        if space is not None:
            nbytes = recv_records(lane.sock, space)
            values = lane.parser.filled(nbytes)
        else:
            data = lane.sock.recv(_RECV_NBYTES)
            nbytes, values = len(data), lane.parser.feed(data)
        if not nbytes:
            raise UnavailableError("it closed the connection")
        lane.moved_at = time.monotonic()
        for value in values:
            self._take(session, lane, value)

    def _take(self, session: _Session, lane: _Lane, value: Value) -> None:
        if lane is session.push:
            self._pushed(session, value)
            return
        if not lane.waiting:
            raise ProtocolError("a reply came that nobody asked for")
        command = lane.waiting[0]
        if isinstance(value, Error):  # an answer too: the command brought nothing and writes no slot any more
            self._refusals.note("the store server refused a command, which brings nothing: %s", value)
            value = b"" if lane in session.lanes else None
        elif command.fetch is not None and self._inline is not None:
            value = self._verified(self._inline, command.fetch, value)
        lane.waiting.popleft()
        now = time.monotonic()
        if command.fetch is not None:
            command.fetch.seconds = now - max(command.sent_at, lane.answered_at)
        lane.answered_at = now
        command.reply(value if isinstance(value, bytes) else None)
        if lane in session.lanes:
            session.fetches = {f for f in session.fetches if not f.released}

    def _verified(self, inline: InlineTransfers, fetch: Fetch, value: Value) -> bytes:
        num_bad = inline.num_bad
        letters = inline.verified(fetch, value)
        if inline.num_bad > num_bad:
            logger.warning(
                "chunks from %s arrived damaged, and are misses: %d", self._address, inline.num_bad - num_bad
            )
        return letters

    def _pushed(self, session: _Session, value: Value) -> None:
        if isinstance(value, Simple):  # the reply to SUBSCRIBE, which nobody awaits, or to an inline client's answer
            if session.push.waiting:
                session.push.waiting.popleft()
            return
        if not isinstance(value, list) or len(value) != 3:
            raise ProtocolError("a push is an array of three")
        what, number, body = value
        if not isinstance(what, bytes) or not isinstance(number, int) or not isinstance(body, bytes):
            raise ProtocolError("a push is a name, a number and a body")
        if what == b"filter":
            session.take_filter(body)
            answer = b"1"
        else:
            answer = self._on_push(what.decode(), body)
        words: list[bytes | int] = [b"TKV.ANSWER", number, answer]
        command = _Command(NUM_LANES, encode_command(words), lambda _: None)
        if self._inline is None and what == b"invalidate":  # behind the stores that were queued before
            with self._lock:
                self._commands.append(command)
        elif what == b"invalidate" and session.is_storing(body):
            out = session.store.out
            out.insert(1 if out and out[0].sent_at else 0, command)
        else:  # past stores, which may wait for a disk: of them drop() has taken what must not follow this answer
            session.push.out.append(command)

    def _check_timeouts(self) -> None:
        session, now = self._session, time.monotonic()
        for lane in session.all_lanes() if session else ():
            if lane.late(now):
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
            lane.parser = Parser()  # no view of a slot is kept
            for command in lane.waiting:
                command.reply(None)
            for command in lane.out:
                if not command.sent_at:
                    command.no_answer()
        leased = {f for f in session.fetches if not f.released}
        if session.lease is not None:
            self._old_leases[session.lease] = leased
            return
        for fetch in leased:  # inline: this thread is the writer, and it has let go of the connections
            fetch.released = True

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
