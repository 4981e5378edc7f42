"""The control stream: an eviction by order reaches every node of a fleet; and news of what is stored reaches filters.

Theory of operation. Two streams in Redis (``docs/formats.md``). On ``control`` a node announces what was evicted by
order; every node, the announcing one too, applies it: its disk, its queues, its engines' host pools. On ``news`` it
announces what it stored. One thread a node follows both (:mod:`tierkv.tiers.follow`).

*What holds.* When every node has applied the stream to its end, no node and no Redis has bytes that were computed
before the last eviction of their key. It may be less: a chunk that was stored again right after is sometimes removed
with the old one. It is a cache. Why it holds:

- ``publish`` deletes from Redis, announces, and deletes again, until the last deletion finds nothing. So whatever of
  the old bytes is in Redis after the last announcement was written after it, by a node that has it still to read.
- That node finds the key among those it wrote lately (:class:`~tierkv.tiers.control_memory.Written`) when it reads the
  announcement, and publishes the eviction once more: whoever had copied its late write removes it. A write that is
  under way then is waited for; what is still queued, the service drops (``apply``). A node writes nothing that it could
  not remember. This comes to an end: each turn needs another write between an announcement and its arrival.
- A process that ended forgot what it wrote, but noted up to when it might have written. Announcements up to then (and
  ``SKEW_S``, for clocks) are treated by its successor as if it had written everything in them.
- An order is in the node's journal before anything is done about it, and stays there until the node has read its own
  announcement back and some time after. Redis may be out (it is carried out when Redis is back), or lose the end of
  the stream (it is carried out again).
- A place is saved after what is before it was applied: a process that is killed between applies again.

*When the stream does not go on from where this node was* (``TRIMMED``, ``LOST`` or ``MISSING`` there):

- ``TRIMMED``: the node was away for longer than the stream reaches. What it missed nobody can say: ``on_gap``.
- ``LOST`` and the node had been following it, up to ``GRACE_S`` ago or up to an outage during which Redis itself was
  started: it has missed nothing that the announcing nodes do not announce again, for they notice too. It keeps its
  disk and reads what is new.
- ``LOST`` and the node was away: it cannot know what was announced meanwhile: ``on_gap``.
- A node without a saved place, where something was announced already: ``on_gap``; it has an empty disk, or one that has
  never heard of evictions.

What this does not cover: a node that died within moments of a late write and stayed away for longer than the stream
reaches; an announcement that Redis lost and whose node is gone for good.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from tierkv.health import Health, Repeated
from tierkv.resp import Error, Value
from tierkv.tiers.base import Ref
from tierkv.tiers.control_memory import Journal, Owed, PlaceFile, Written, unpack_refs
from tierkv.tiers.follow import Entry, Id, Place, Reading, UnreadableError, Verdict, look, look_commands
from tierkv.tiers.redis_link import OnError
from tierkv.tiers.redis_wire import Command

logger = logging.getLogger("tierkv")

#: Entries that the streams hold, about. At most (``MAX_KEYS`` keys of 40 bytes, and what Redis adds) ``control`` has
#: 25 MiB, ``news`` 11 MiB.
CONTROL_ENTRIES = 2048
NEWS_ENTRIES = 2048
#: Keys of an entry of ``news``, by their first bytes.
NEWS_KEYS = 512
HEAD_NBYTES = 8
#: A node that followed the stream this long ago has missed nothing that is not announced again.
GRACE_S = 120.0
#: Clocks of one fleet differ by less.
SKEW_S = 300.0
#: After a stream that was lost, entries up to this much older than the last that was read are read again.
REWIND_MS = 600_000
#: A process notes ahead that it may write for so long.
_WRITES_AHEAD_S = 30.0
_ROUNDS = 3
_PORTIONS = 16
_PAGE = 64
_NEWS_PAGE = 256
_WAIT_WRITES_S = 15.0
_EVICT, _DROP, _OPEN = b"evict", b"drop", b"open"

#: Sends commands to Redis in one pipeline; None where it is out.
Ask = Callable[[Sequence[Command], OnError], "list[Value] | None"]


class Event(NamedTuple):
    """An eviction that every node applies.

    Attributes:
        ns_id: the namespace.
        refs: the chunks; None: all of the namespace. Their anchors are the first 8 bytes.
    """

    ns_id: bytes
    refs: list[Ref] | None


class Fleet(Protocol):
    """What a feed tells its node. Called on the feed's thread; may be called again for what was applied already."""

    def apply(self, event: Event) -> None:
        """Remove the chunks from this node; when it returns nothing read before it is stored any more."""

    def on_gap(self, reason: str) -> None:
        """Remove everything from this node that an unknown eviction may have been about."""

    def on_news(self, ns_id: bytes, heads: list[bytes]) -> None:
        """Learn that keys that start with these 8 bytes were stored in the shared tier."""

    def on_news_lost(self) -> None:
        """Learn that news were missed: what is stored must be listed anew."""


class FeedStat(NamedTuple):
    """Counters of a feed since its start, in entries unless their names say otherwise.

    ``num_waiting`` are evictions that Redis has still to hear of; ``num_again`` those that were announced once more
    because Redis had lost them; ``num_late`` keys that were evicted once more because this node had written them.
    """

    num_published: int
    num_applied: int
    num_waiting: int
    num_again: int
    num_gaps: int
    num_late: int
    num_refused: int


class ControlFeed:
    """A node's part in the control stream.

    Args:
        ask: asks Redis, within bounds of time, and never raises.
        names: of the two streams; on a Cluster both have one hash tag.
        node_dir: where ``control.json`` and ``control.journal`` are kept.
        delete: removes chunks (None: a whole namespace) from Redis, pinned ones too, and returns how many there were,
            or None where Redis failed.
        fleet: what is told.
        block_s: seconds that Redis may hold an answer back; less than the link's timeout.
        clock, wall: monotonic time, and seconds since 1970.

    Notes:
        ``publish``, ``ordering``, ``writing`` and ``tell`` are called from any thread. Nothing raises because of Redis.
    """

    def __init__(
        self,
        ask: Ask,
        names: tuple[str, str],
        node_dir: Path,
        delete: Callable[[bytes, Sequence[Ref] | None], int | None],
        fleet: Fleet,
        *,
        block_s: float = 0.4,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._ask = ask
        self._control, self._news = names
        self._delete = delete
        self._fleet = fleet
        self._block_ms = max(1, int(block_s * 1000))
        self._clock, self._wall = clock, wall
        self._origin = os.urandom(8)
        self._file = PlaceFile(node_dir / "control.json")
        self._journal = Journal(node_dir / "control.journal", wall)
        self._written = Written(clock)
        self._forgotten_ms = int((self._file.written + SKEW_S) * 1000) if self._file.written else 0
        self._news_place: Place | None = None
        self._heard_at: float | None = None  # when the stream was last read to its end by this process
        self._publishing = threading.RLock()
        self._health = Health(
            "The fleet's control stream",
            clock,
            meanwhile="Evictions of other nodes reach this one, and its own reach them, when it is back.",
        )
        self._unforeseen = Repeated()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._counts = dict.fromkeys(FeedStat._fields, 0)

    # What the node does

    def start(self) -> None:
        """Follow the streams on a thread, until :meth:`close`."""
        self._thread = threading.Thread(target=self._run, name="tierkv-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop following. Idempotent."""
        self._stop.set()
        if self._thread and self._thread is not threading.current_thread():
            self._thread.join()

    def publish(self, ns_id: bytes, refs: Sequence[Ref] | None) -> bool:
        """Evict chunks (None: the whole namespace) from Redis and let every node do so; returns whether Redis knows.

        Called after they were removed from this node. Where Redis does not answer the order is kept, also over a
        restart, and carried out when it does.
        """
        if refs is not None and not refs:
            return True
        return self._carry_out(self._journal.add(ns_id, refs), ns_id, refs)

    @contextlib.contextmanager
    def ordering(self, ns_id: bytes, refs: Sequence[Ref] | None) -> Iterator[None]:
        """Return a context in which they are removed from this node: :meth:`publish`, the order written down before.

        A process that ends in the middle finds nothing left to evict here; what follows is its successor's to do.
        """
        if refs is not None and not refs:
            yield
            return
        with self._publishing:  # the feed's own thread, which carries out what waits, waits for this
            orders = self._journal.add(ns_id, refs)
            yield
            self._carry_out(orders, ns_id, refs)

    def _carry_out(self, orders: Sequence[Owed], ns_id: bytes, refs: Sequence[Ref] | None) -> bool:
        # What this node wrote of them until now goes with the deletions below.
        self._written.take(ns_id, None if refs is None else [ref.key for ref in refs], _WAIT_WRITES_S)
        return self._settle(orders)

    @contextlib.contextmanager
    def writing(self, ns_id: bytes, refs: Sequence[Ref]) -> Iterator[bool]:
        """Return a context in which these are written to Redis; its value says whether they may be.

        They may not while this node could not remember what it wrote: the stream has not been read yet, or for long.
        """
        if self._file.place is None or not self._written.begin(ns_id, refs):
            self._counts["num_refused"] += 1
            yield False
            return
        try:
            now = self._wall()
            if now + _WRITES_AHEAD_S / 2 > self._file.written:
                self._file.save(written=now + _WRITES_AHEAD_S)
            yield True
        finally:
            self._written.end(ns_id, refs)

    def tell(self, ns_id: bytes, keys: Sequence[bytes]) -> None:
        """Announce what was stored. What Redis does not take is lost; filters are refreshed from time to time."""
        heads = [key[:HEAD_NBYTES] for key in keys]
        entries = [b"".join(heads[i : i + NEWS_KEYS]) for i in range(0, len(heads), NEWS_KEYS)]
        add = ("XADD", self._news, "MAXLEN", "~", NEWS_ENTRIES, "*")
        self._ask([(*add, b"ns", ns_id, b"keys", entry) for entry in entries], OnError.IGNORE)

    @property
    def silent_s(self) -> float:
        """Seconds since the control stream was last read to its end; infinite where it never was."""
        return float("inf") if self._heard_at is None else self._clock() - self._heard_at

    def stat(self) -> FeedStat:
        """Return the counters."""
        return FeedStat(**(self._counts | {"num_waiting": len(self._journal.waiting())}))

    # Publishing

    def _settle(self, orders: Sequence[Owed]) -> bool:
        """Carry orders out in Redis and announce them; those that fail wait. Returns whether none does."""
        chunks = [owed for owed in orders if owed.refs is not None]
        wholes = [owed for owed in orders if owed.refs is None]
        portions = [[owed] for owed in wholes] + [chunks[i : i + _PORTIONS] for i in range(0, len(chunks), _PORTIONS)]
        with self._publishing:
            return all([self._announce(portion) for portion in portions])  # all of them are tried

    def _announce(self, portion: Sequence[Owed]) -> bool:
        """Delete, announce, delete, until the last deletion finds nothing."""
        portion = [owed for owed in portion if not owed.id]  # another thread may have been faster
        if not portion:
            return True
        if portion[0].refs is not None and self._delete_all(portion) is None:
            return False
        for _ in range(_ROUNDS):
            replies = self._ask([self._command(owed) for owed in portion], OnError.IGNORE)
            if replies is None or any(not isinstance(reply, bytes) for reply in replies):
                error = next((reply for reply in replies or () if isinstance(reply, Error)), None)
                if error is not None:
                    self._health.failed(error)
                return False
            num = self._delete_all(portion)
            if num is None:
                return False
            if not num:
                for owed, reply in zip(portion, replies, strict=True):
                    self._journal.announced(owed, bytes(reply).decode())  # type: ignore[arg-type]
                self._counts["num_published"] += len(portion)
                return True
        return False  # somebody stores them all the time; the feed goes on

    def _command(self, owed: Owed) -> Command:
        kind, refs = (_DROP, b"") if owed.refs is None else (_EVICT, owed.refs)
        return self._entry(kind, owed.ns_id, refs)

    def _entry(self, kind: bytes, ns_id: bytes = b"", refs: bytes = b"") -> Command:
        words = (b"kind", kind, b"node", self._origin, b"ns", ns_id, b"keys", refs)
        return ("XADD", self._control, "MAXLEN", "~", CONTROL_ENTRIES, "*", *words)

    def _delete_all(self, portion: Sequence[Owed]) -> int | None:
        num = 0
        for owed in portion:
            gone = self._delete(owed.ns_id, None if owed.refs is None else unpack_refs(owed.refs))
            if gone is None:
                return None
            num += gone
        return num

    # Following

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                heard = self.poll(wait=True)
            except Exception as error:  # a node that hears nothing is worse than one that tries again
                self._unforeseen.note("the control stream could not be followed", exc_info=True)
                self._health.failed(error)
                heard = False
            if not heard:
                self._stop.wait(max(0.25, self._health.retry_in_s()))

    def poll(self, *, wait: bool = False) -> bool:
        """Read both streams to their end, apply what is new, and settle what waits; returns whether Redis answered.

        Args:
            wait: let Redis hold its answer back until there is something.
        """
        if wait and self._heard_at is not None and not self._wait():
            return False
        while not self._stop.is_set():
            at, began = self._clock(), self._health.now()
            try:
                whole = self._read_control()
                news_whole = self._read_news() if whole is not None else None
            except UnreadableError as error:
                self._health.failed(error)
                return False
            if whole is None or news_whole is None:
                return False
            if whole and news_whole:
                break
        else:
            return False
        self._heard_at = at
        self._health.worked(began)
        self._written.heard(at)
        place = self._file.place
        if place is not None:
            self._counts["num_again"] += self._journal.again(missed_before=place.last)
        waiting = self._journal.waiting()
        return self._settle(waiting) if waiting else True

    def _wait(self) -> bool:
        """Return when there may be something to read; False where Redis did not answer."""
        control, news = self._file.place or Place(), self._news_place or Place()
        words = ("XREAD", "COUNT", 1, "BLOCK", self._block_ms, "STREAMS", self._control, self._news)
        return self._ask([(*words, str(control.last), str(news.last))], OnError.IGNORE) is not None

    def _read_control(self) -> bool | None:
        """Read a page and apply it; returns whether it was the last one, None where Redis failed."""
        known = self._file.place
        place = known or Place(Id(), 0)
        reading = self._look(self._control, place, _PAGE)
        if reading is None:
            return None
        if known is None and reading.verdict is not Verdict.MISSING:
            verdict = Verdict.ON if _unused(reading) else Verdict.TRIMMED
            reading = reading._replace(verdict=verdict, reason="this node has not followed it so far")
        if reading.verdict is not Verdict.ON:
            return self._find_place(reading, known)
        for entry in reading.entries:
            self._apply(entry)
        if reading.place != known:
            self._file.save(place=reading.place)
        return reading.whole

    def _look(self, name: str, place: Place, count: int) -> Reading | None:
        replies = self._ask(look_commands(name, place, count), OnError.IGNORE)
        return None if replies is None else look(replies, place, count)

    def _find_place(self, reading: Reading, known: Place | None) -> bool | None:
        """Go on after the stream did not: see the module's docstring. Returns as :meth:`_read_control`."""
        missing = reading.verdict is Verdict.MISSING
        followed = known is None if missing else False  # nothing was ever announced where there never was a stream
        if known is not None and reading.verdict is not Verdict.TRIMMED:
            followed = self._was_following()
        if missing:
            replies = self._ask([self._entry(_OPEN)], OnError.IGNORE)
            if replies is None or not isinstance(replies[0], bytes):
                if replies:
                    self._health.failed(replies[0])
                return None
        if followed:
            place = _rewound(known or Place(), reading.end)
            if known is not None:
                logger.warning(
                    "The fleet's control stream was lost (%s); this node had followed it and keeps its chunks. "
                    "Evictions of the last %g minutes are carried out again, by the nodes at which they were ordered.",
                    reading.reason,
                    REWIND_MS / 60_000,
                )
        else:
            place = Place() if missing else reading.end
            self._gap(reading.reason)
        if reading.verdict is Verdict.TRIMMED:
            self._journal.saw_all()  # what was trimmed had been there
        else:
            self._counts["num_again"] += self._journal.again()
        self._file.save(place=place)
        return False

    def _was_following(self) -> bool:
        """Return whether this process followed the stream until it, or Redis, ended."""
        silent_s = self.silent_s
        if silent_s <= GRACE_S:
            return True
        if self._heard_at is None:
            return False
        # The first word is no section; on a Cluster it leads to the node that has the stream.
        replies = self._ask([("INFO", self._control, "server")], OnError.IGNORE)
        text = replies[0] if replies else None
        for line in text.splitlines() if isinstance(text, bytes) else ():
            name, _, value = line.partition(b":")
            if name == b"uptime_in_seconds" and value.strip().isdigit():
                return int(value) + 1 < silent_s
        return False

    def _gap(self, reason: str) -> None:
        self._counts["num_gaps"] += 1
        self._fleet.on_gap(f"the fleet's control stream does not go on from where this node left it: {reason}")
        for ns_id, refs in self._written.take(None, None, _WAIT_WRITES_S).items():
            self._once_more(ns_id, refs)

    def _apply(self, entry: Entry) -> None:
        """Apply one entry to this node, and evict once more what this node may have written behind it."""
        self._journal.saw(str(entry.id))
        event = _event(entry)
        if event is None:
            return
        try:
            self._fleet.apply(event)
        except Exception as error:
            self._unforeseen.note("an eviction of another node could not be applied", exc_info=True)
            self._fleet.on_gap(f"an eviction could not be applied here ({error})")
        keys = None if event.refs is None else [ref.key for ref in event.refs]
        for ns_id, refs in self._written.take(event.ns_id, keys, _WAIT_WRITES_S).items():
            self._once_more(ns_id, refs)
        maybe_written = entry.id.ms <= self._forgotten_ms and entry.fields.get(b"node") != self._origin
        if maybe_written and self._delete(event.ns_id, event.refs) != 0:
            self._once_more(event.ns_id, event.refs)
        self._counts["num_applied"] += 1

    def _once_more(self, ns_id: bytes, refs: list[Ref] | None) -> None:
        self._counts["num_late"] += 0 if refs is None else len(refs)
        self.publish(ns_id, refs)

    def _read_news(self) -> bool | None:
        """Read a page of news; returns whether it was the last one, None where Redis failed."""
        place = self._news_place
        reading = self._look(self._news, place or Place(Id(), 0), _NEWS_PAGE)
        if reading is None:
            return None
        if place is None or reading.verdict is not Verdict.ON:
            # Everything in it is in the listing that follows; a stream that is not there yet begins with its first.
            self._news_place = reading.end
            if place is None or reading.verdict is not Verdict.MISSING or place.last != Id():
                self._fleet.on_news_lost()
            return True
        for entry in reading.entries:
            heads, ns_id = entry.fields.get(b"keys", b""), entry.fields.get(b"ns", b"")
            found = [heads[i : i + HEAD_NBYTES] for i in range(0, len(heads) - HEAD_NBYTES + 1, HEAD_NBYTES)]
            self._fleet.on_news(ns_id, found)
        self._news_place = reading.place
        return reading.whole


def _event(entry: Entry) -> Event | None:
    """Return what an entry says; None where it says nothing, or nothing that this program knows."""
    kind, ns_id = entry.fields.get(b"kind"), entry.fields.get(b"ns", b"")
    if len(ns_id) != 16 or kind not in (_EVICT, _DROP):
        return None
    if kind == _DROP:
        return Event(ns_id, None)
    try:
        return Event(ns_id, unpack_refs(entry.fields.get(b"keys", b"")))
    except ValueError:
        return None


def _unused(reading: Reading) -> bool:
    """Return whether nothing was ever announced in a stream that was read from its beginning."""
    return reading.end.added == len(reading.entries) and not any(map(_event, reading.entries))


def _rewound(known: Place, end: Place) -> Place:
    """Return where to go on in a stream that is not the one that was followed, or was moved back."""
    ms = min(known.last.ms, end.last.ms) if end.last.ms else known.last.ms
    return Place(Id(max(0, ms - REWIND_MS)), None)
