"""The service behind the commands that engines send: match, fetch, store and evict over the tiers.

Knows nothing of sockets. Every method may be called from several threads. What moves between the tiers is in
:mod:`~tierkv_server.moves`, :mod:`~tierkv_server.fetch` and :mod:`~tierkv_server.store`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import msgspec

from tierkv.config import Spill
from tierkv.errors import UnavailableError
from tierkv.keys import anchor_index
from tierkv.layout import Namespace
from tierkv.messages import FROM_DISK, FROM_SHARED, MISSING, USED, HostEntry, HostStat, RequestNote, StoreItem
from tierkv.payload import record_nbytes
from tierkv.policy import WEIGHS_ABOVE, Hint
from tierkv.tiers.base import Record, Ref, Tier
from tierkv_server.events import FETCHED, KEPT, Events
from tierkv_server.fetch import Fetcher
from tierkv_server.filters import FilterPublisher
from tierkv_server.moves import Moves
from tierkv_server.reuse import ReuseTable
from tierkv_server.session import Session
from tierkv_server.sessions_table import SessionTable
from tierkv_server.store import Storer

#: Engines that have left and may come back, with what they hold.
MAX_LEFT = 1024
#: An engine that is back has this long to say what it has, and to drop what was evicted.
CATCH_UP_S = 30.0


class Service:
    """The tiers and the engines that use them.

    Args:
        disk: the disk tier; owned.
        shared: the shared tier or None; owned.
        spill: when chunks go to each tier; by default at once, to both.

    Attributes:
        ordering: returns, for a namespace id and the chunks that are evicted from every tier by order here (None: all
            of it), a context in which that is done; after it, other nodes hear of it.
        on_stored: called with a tier's name, a namespace id and the keys that are stored there now.
        filters: tells the engines what is stored; set by whoever runs the service.
        events: what happened lately.
        farewells: what engines that left had counted, until somebody takes it.
        session_table: the sessions that engines tell of; set likewise, owned.
    """

    def __init__(self, disk: Tier, shared: Tier | None, spill: Mapping[str, Spill] | None = None) -> None:
        self.disk = disk
        self.shared = shared
        self.sessions: dict[str, Session] = {}
        self.moves = Moves(disk, shared, spill or dict.fromkeys(("disk", "shared"), Spill.THROUGH))
        self.fetcher = Fetcher(self.moves)
        self.storer = Storer(self.moves)
        self.moves.on_stored = self._stored
        self.ordering: Callable[[bytes, Sequence[Ref] | None], AbstractContextManager[None]] = _alone
        self.on_stored: Callable[[str, bytes, Sequence[bytes]], None] = lambda tier, ns_id, keys: None
        self.filters: FilterPublisher | None = None
        self.session_table: SessionTable | None = None
        self.events = Events()
        self.reuse = ReuseTable(lambda: disk.stat().budget)
        self.farewells: deque[HostStat] = deque(maxlen=MAX_LEFT)
        self._left: OrderedDict[tuple[str, int, bytes], int] = OrderedDict()  # engines -> evictions they have heard of
        self._lock = threading.Lock()

    # -- engines

    def open_session(self, session: Session) -> None:
        """Take an engine in and make its namespace known to the tiers."""
        with self._lock:
            self.sessions[session.id] = session
            session.opened_at = self.moves.evictions.number
            session.since = self._left.pop(_engine(session), None)
        self.disk.joined(session.id, session.ns_id, session.hello.shape.num_slots)
        self.add_namespace(session.hello.namespace)

    def close_session(self, session: Session) -> None:
        """Let an engine go: waits until nobody uses its pool."""
        self.disk.left(session.id)
        with self._lock:
            if self.sessions.pop(session.id, None) is not None:
                # From here on it hears of no eviction, and did perhaps not of the last ones.
                self._left[_engine(session)] = session.opened_at if session.since is None else session.since
                while len(self._left) > MAX_LEFT:
                    self._left.popitem(last=False)
        if session.farewell is not None:
            self.farewells.append(session.farewell)
        session.end()

    def subscribed(self, session: Session) -> None:
        """Note that an engine takes pushes from now on."""
        if self.filters:
            self.filters.joined()
        if session.since is not None:  # not on this thread, which may be the one that reads its answers
            threading.Thread(target=self._catch_up, args=(session,), name="tierkv-catch-up", daemon=True).start()

    def _catch_up(self, session: Session) -> None:
        """Have an engine that was away drop what was evicted meanwhile. Until then it stores none of that."""
        since, ask = session.since, session.ask("list", b"")
        answer = ask.result(CATCH_UP_S) if ask else None
        if since is None or answer is None:
            return
        keys = [entry.key for entry in msgspec.msgpack.decode(answer, type=list[HostEntry])]
        doomed = [key for key in keys if not self.moves.evictions.allows(session.ns_id, key, since)]
        ask = session.ask("invalidate", b"".join(doomed))
        if ask and ask.result(CATCH_UP_S) is not None:  # behind all stores that it had queued
            session.since = None

    def add_namespace(self, namespace: Namespace) -> None:
        """Make a namespace known to every tier."""
        for tier in self.tiers():
            tier.add_namespace(namespace)

    def tiers(self) -> list[Tier]:
        """Return the tiers, nearest first."""
        return self.moves.tiers()

    # -- payloads

    def match(self, ns_id: bytes, refs: Sequence[Ref]) -> bytes:
        """Return a letter for each chunk of the longest stored prefix of ``refs``: the tier that has it."""
        letters = [FROM_DISK if there else MISSING for there in self.disk.match(ns_id, refs)]
        holes = [i for i, letter in enumerate(letters) if letter == MISSING]
        if holes and self.shared:
            for i, there in zip(holes, self.shared.match(ns_id, [refs[i] for i in holes]), strict=True):
                if not there:
                    break
                letters[i] = FROM_SHARED
        return b"".join(letters).split(MISSING, 1)[0]

    def fetch(self, session: Session, refs: Sequence[Ref], slots: Sequence[int]) -> bytes:
        """See :meth:`tierkv_server.fetch.Fetcher.fetch`."""
        started = time.perf_counter()
        letters = self.fetcher.fetch(session, refs, slots)
        self._note(session, "fetch", refs[-1].key if refs else b"", letters, started)
        return letters

    def store(self, session: Session, items: Sequence[StoreItem]) -> bytes:
        """See :meth:`tierkv_server.store.Storer.store`."""
        started = time.perf_counter()
        letters = self.storer.store(session, items)
        self._note(session, "store", items[-1].key if items else b"", letters, started)
        return letters

    def disk_evicts(self, record: Record) -> None:
        """See :meth:`tierkv_server.store.Storer.disk_evicts`."""
        self.storer.disk_evicts(record)

    def wants_evicted(self, ns_id: bytes, key: bytes) -> bool:
        """Take note of what the disk evicts for room, and return whether :meth:`disk_evicts` is to have the record."""
        self.events.note("expel", ns_id, key, {"disk": 1})
        return self.storer.wants_evicted(ns_id, key)

    def _note(self, session: Session, kind: str, last: bytes, letters: bytes, started: float) -> None:
        names = FETCHED if kind == "fetch" else KEPT
        chunks = {names[letter]: letters.count(letter) for letter in sorted(set(letters))}
        seconds = time.perf_counter() - started
        self.events.note(kind, session.ns_id, last, chunks, engine=session.hello.engine_id, seconds=seconds)

    def note(self, session: Session, note: RequestNote, keys: Sequence[bytes]) -> None:
        """Tell the disk's policy of a request, once; its session's time as far as its tenant may hold so much."""
        retain_s, hint = note.retain_s, None
        if note.session and retain_s is not None and self.session_table is not None:
            nbytes = len(keys) * record_nbytes(session.hello.namespace.payload_nbytes)
            retain_s = retain_s if self.session_table.affords(note.session, note.tenant, nbytes) else None
        if note.session or note.priority:
            hint = Hint(note.session.hex(), retain_s, note.release, note.priority)
        self.disk.note(session.ns_id, note.tenant, keys, hint)

    def weighs_above(self) -> bool:
        """Return whether engines are to tell what their host pools keep (:meth:`hold`)."""
        is_offered = self.moves.spill.policies.get(self.disk.name) is Spill.THROUGH
        return is_offered and self.disk.stat().policy in WEIGHS_ABOVE

    def hold(self, session: Session, took: Sequence[bytes], gone: Sequence[bytes]) -> bool:
        """Note what an engine's host pool keeps from now on, and what it does not any more.

        Returns whether what it keeps may be missing on the disk.
        """
        return self.disk.hold(session.id, took, gone)

    def use(self, session: Session, refs: Sequence[Ref], reason: int = USED) -> bytes:
        """See :meth:`tierkv_server.store.Storer.use`."""
        return self.storer.use(session, refs, reason)

    def _stored(self, tier: str, ns_id: bytes, keys: Sequence[bytes]) -> None:
        if self.filters:
            self.filters.add(ns_id, keys)
        if self.session_table and tier == self.disk.name:
            self.session_table.stored(ns_id, keys)
        self.on_stored(tier, ns_id, keys)

    # -- evict

    def evict(
        self, ns_id: bytes, refs: Sequence[Ref], tiers: Iterable[str], *, whole: bool = False, force: bool = False
    ) -> dict[str, int]:
        """Remove chunks from the disk and shared tiers among ``tiers`` and return how many each had.

        Other nodes hear of what is removed from both: their disks must not bring it back.

        Args:
            refs: the chunks, ancestors first.
            whole: they are all of the namespace: remove the namespace itself, pinned chunks too.
            force: remove pinned chunks too.
        """
        tiers = set(tiers)
        everywhere = self.shared is not None and {"disk", "shared"} <= tiers
        named = self._named(ns_id, refs, whole, force) if everywhere else []
        with self.ordering(ns_id, named):
            removed = self._evict_here(ns_id, refs, tiers, whole, force)
        self._remember_namespaces(ns_id if whole else None)
        return removed

    def _evict_here(
        self, ns_id: bytes, refs: Sequence[Ref], tiers: set[str], whole: bool, force: bool
    ) -> dict[str, int]:
        self._note_evicted(ns_id, None if whole else [ref.key for ref in refs])
        removed: dict[str, int] = {}
        for tier, writer in ((w.tier, w) for w in self.moves.writers()):
            if tier.name not in tiers:
                continue
            with writer.evict(ns_id, None if whole else {ref.key for ref in refs}):
                if whole:
                    removed[tier.name] = tier.drop_namespace(ns_id)
                else:
                    removed[tier.name] = tier.evict(ns_id, refs[::-1], force=force)
        self.events.note("evict", ns_id, refs[-1].key if refs and not whole else b"", removed)
        return removed

    def _named(self, ns_id: bytes, refs: Sequence[Ref], whole: bool, force: bool) -> Sequence[Ref] | None:
        """Return what other nodes hear of (None: all): what a pin keeps is not removed there either."""
        if whole or force:
            return None if whole else refs
        kept = {e.key for tier in self.tiers() for e in tier.entries(ns_id) if e.pins} if self._has_pins() else set()
        return [ref for ref in refs if ref.key not in kept]

    def _has_pins(self) -> bool:
        return any(tier.stat().pinned_nbytes for tier in self.tiers())

    def evicted_elsewhere(self, ns_id: bytes, keys: Sequence[bytes] | None) -> None:
        """Remove from this node what another node's operator evicted; None: the whole namespace.

        Raises:
            UnavailableError: the disk takes no deletions now.
        """
        self._note_evicted(ns_id, keys)
        doomed = None if keys is None else set(keys)
        with self.moves.disk_writer.evict(ns_id, doomed):
            if keys is None:
                num = self.disk.drop_namespace(ns_id)
            else:
                refs = [Ref(key, key) for key in keys]
                num = self.disk.evict(ns_id, refs, force=True)
                if num < len(refs) and any(self.disk.match(ns_id, refs)):
                    raise UnavailableError("the disk tier does not delete what was evicted")
        self._drop_queued_above(ns_id, doomed)
        if num:
            self.events.note("lost", ns_id, keys[-1] if keys else b"", {"disk": num})
        self._remember_namespaces(ns_id if keys is None else None)

    def _drop_queued_above(self, ns_id: bytes | None, keys: set[bytes] | None) -> None:
        """Drop what waits for the shared tier, and wait for the batch that is being written there.

        After the disk's part: what that evicted for room until then is queued here, with its bytes. And not within it,
        so that no store on disk waits for Redis.
        """
        if self.moves.shared_writer is not None:
            with self.moves.shared_writer.evict(ns_id, keys):
                pass

    def drop_disk(self) -> int:
        """Empty this node's disk: evictions were missed, and nobody can say which. Returns how many chunks went."""
        num = 0
        self.moves.evictions.note_everything()
        self.moves.seen.clear()
        with self.moves.disk_writer.evict(None, None):  # also what waits for a disk that has nothing of its namespace
            for ns_id in list(self.disk.namespaces()):
                dropped = self.disk.drop_namespace(ns_id)
                self.events.note("lost", ns_id, b"", {"disk": dropped})
                num += dropped
                self._remember_namespaces(ns_id)
        self._drop_queued_above(None, None)
        return num

    def _note_evicted(self, ns_id: bytes, keys: Sequence[bytes] | None) -> None:
        """Let no bytes that were read before now be stored under these keys."""
        self.moves.evictions.note(ns_id, keys)
        if keys is None:
            self.moves.seen.clear()
        for key in keys or ():
            self.moves.seen.discard((ns_id, key))

    def _remember_namespaces(self, dropped: bytes | None) -> None:
        for session in list(self.sessions.values()):
            if session.ns_id == dropped:
                self.add_namespace(session.hello.namespace)

    # -- state

    def shared_is_up(self) -> bool:
        """Return whether there is a shared tier that answers now."""
        return self.shared is not None and self.shared.stat().state != "out"

    def queued_nbytes(self) -> dict[str, int]:
        """Return the bytes that wait to be written, by tier."""
        return {writer.tier.name: writer.queued_nbytes for writer in self.moves.writers()}

    def num_dropped(self) -> dict[str, int]:
        """Return the stores that were dropped because a tier was behind or out, by tier."""
        return {writer.tier.name: writer.num_dropped for writer in self.moves.writers()}

    def refuse_stores(self) -> None:
        """Take no more stores, from now on: they are answered as dropped, and counted."""
        for writer in self.moves.writers():
            writer.refusing = True

    def drain(self, timeout_s: float) -> bool:
        """Wait until every queued store is written, and engines know; returns whether it was in time."""
        done = all([writer.drain(timeout_s) for writer in self.moves.writers()])
        return (self.filters is None or self.filters.flush(timeout_s)) and done

    def close(self) -> None:
        """End all sessions, stop the writers, close the tiers. Idempotent."""
        if self.filters:
            self.filters.close()
        if self.session_table:
            self.session_table.close()
        for session in list(self.sessions.values()):
            self.close_session(session)
        for writer in self.moves.writers():
            writer.close()
        for tier in self.tiers():
            tier.close()


def _engine(session: Session) -> tuple[str, int, bytes]:
    return session.hello.engine_id, session.hello.pid, session.ns_id


def _alone(ns_id: bytes, refs: Sequence[Ref] | None) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


def make_refs(keys: Sequence[bytes], start: int, anchor: bytes) -> list[Ref]:
    """Return refs for consecutive chunks of a chain.

    Args:
        keys: the chunks' keys.
        start: position of the first.
        anchor: the anchor key of the first, where that lies before ``start``.
    """
    refs = []
    for i, key in enumerate(keys):
        at = anchor_index(start + i) - start
        refs.append(Ref(key, keys[at] if at >= 0 else anchor))
    return refs
