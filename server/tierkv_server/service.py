"""The service behind the commands that engines send: match, fetch and store over the tiers.

Knows nothing of sockets. Every method may be called from several threads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tierkv.config import COMMAND_NBYTES, STORE_NBYTES
from tierkv.errors import UnavailableError
from tierkv.keys import anchor_index
from tierkv.layout import Namespace
from tierkv.messages import BAD, DROPPED, EXISTS, FAILED, FROM_DISK, FROM_SHARED, MISSING, STALE, STORED, StoreItem
from tierkv.payload import HEADER_NBYTES, Header, checksum, record_nbytes
from tierkv.pool import HostPool
from tierkv.tiers.base import Fetched, Record, Ref, Status, Tier
from tierkv_server.session import Session
from tierkv_server.staging import Staging
from tierkv_server.writer import Job, Loads, Staged, TierWriter

logger = logging.getLogger("tierkv")

_STORE_LETTER = {
    Status.OK: STORED,
    Status.EXISTS: EXISTS,
    Status.DROPPED: DROPPED,
}
_MAX_EVICTED = 100_000


class Service:
    """The tiers and what moves between them.

    Args:
        disk: the disk tier; owned.
        shared: the shared tier or None; owned.
    """

    def __init__(self, disk: Tier, shared: Tier | None) -> None:
        self.disk = disk
        self.shared = shared
        self.sessions: dict[str, Session] = {}
        self.num_stale = 0  #: stores dropped because the slot was reused while they were copied
        self.num_unstaged = 0  #: stores dropped because staging memory was full
        # What both queues may hold, and room for the stores under way: a slow tier never takes that of another.
        self._staging = Staging(2 * STORE_NBYTES + 8 * COMMAND_NBYTES)
        self._loads = Loads()
        self._disk_writer = TierWriter(
            disk, STORE_NBYTES, COMMAND_NBYTES, self._keep, self._loads
        )  # what came from the shared tier
        self._shared_writer = (
            TierWriter(shared, STORE_NBYTES, COMMAND_NBYTES, self._keep, self._loads) if shared else None
        )
        self._evicted: dict[bytes, int] = {}
        self._evictions = 0
        self._lock = threading.Lock()

    # -- engines

    def open_session(self, session: Session) -> None:
        """Take an engine in and make its namespace known to the tiers."""
        with self._lock:
            self.sessions[session.id] = session
        self.add_namespace(session.hello.namespace)

    def close_session(self, session: Session) -> None:
        """Let an engine go: waits until nobody uses its pool."""
        with self._lock:
            self.sessions.pop(session.id, None)
        session.end()

    def add_namespace(self, namespace: Namespace) -> None:
        """Make a namespace known to every tier."""
        for tier in self.tiers():
            tier.add_namespace(namespace)

    def tiers(self) -> list[Tier]:
        """Return the tiers, nearest first."""
        return [self.disk, self.shared] if self.shared else [self.disk]

    # -- match

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

    # -- fetch

    def fetch(self, session: Session, refs: Sequence[Ref], slots: Sequence[int]) -> bytes:
        """Copy payloads into slots of the engine's pool, verified there, and return a letter each.

        Raises:
            ValueError: a slot is outside of the pool.
            UnavailableError: the session has ended.
        """
        with session.using() as pool, self._loads:
            if any(not 0 <= slot < pool.shape.num_slots for slot in slots):
                raise ValueError(f"a slot is outside of the engine's pool of {pool.shape.num_slots}")
            return self._fetch(session, pool, refs, slots)

    def _fetch(self, session: Session, pool: HostPool, refs: Sequence[Ref], slots: Sequence[int]) -> bytes:
        ns_id, since = session.ns_id, self._evictions
        found = self.disk.fetch(ns_id, refs, lambda i: pool.parts(slots[i]))
        letters = [_fetch_letter(f, FROM_DISK) for f in found]
        holes = [i for i, f in enumerate(found) if f.status != Status.OK]
        if holes and self.shared:
            above = self.shared.fetch(ns_id, [refs[i] for i in holes], lambda j: pool.parts(slots[holes[j]]))
            for i, fetched in zip(holes, above, strict=True):
                if fetched.header is not None:
                    letters[i] = FROM_SHARED
                    self._promote(session, pool, slots[i], fetched.header, since)
                elif fetched.status == Status.BAD:
                    letters[i] = BAD
        return b"".join(letters)

    def _promote(self, session: Session, pool: HostPool, slot: int, header: Header, since: int) -> None:
        """Queue a payload that came from the shared tier for this node's disk.

        It is copied when it is written, after the load that waits for it: unless the slot was reused by then.
        """
        generation = int(pool.generations[slot])

        def stage() -> Staged | None:
            try:
                with session.using() as pool:
                    staged = self._copy(pool, slot, generation, lambda _: header)
            except UnavailableError:
                return None
            return staged if isinstance(staged, Staged) else None

        nbytes = record_nbytes(pool.shape.payload_nbytes)
        self._disk_writer.put(Job(session.ns_id, header.key, nbytes, since, stage=stage))

    def _copy(
        self,
        pool: HostPool,
        slot: int,
        generation: int,
        describe: Callable[[memoryview], Header],
        tokens: bytes = b"",
    ) -> Staged | bytes:
        """Copy a payload out of its slot to staging memory and put its header before it; a letter where that failed."""
        payload_nbytes = pool.shape.payload_nbytes
        buffer = self._staging.take(record_nbytes(payload_nbytes))
        if buffer is None:
            self.num_unstaged += 1
            return DROPPED
        payload = buffer.data[HEADER_NBYTES : HEADER_NBYTES + payload_nbytes]
        if not pool.read(slot, generation, payload):
            buffer.release()
            self.num_stale += 1
            return STALE
        header = describe(payload.data)
        buffer.data[:HEADER_NBYTES] = np.frombuffer(header.pack(), dtype=np.uint8)
        buffer.data[HEADER_NBYTES + payload_nbytes :] = 0
        return Staged(Record(header, buffer.data.data, tokens), buffer)

    # -- store

    def store(self, session: Session, items: Sequence[StoreItem]) -> bytes:
        """Copy payloads out of slots and store them; return a letter each.

        The disk has them when this returns; the shared tier's writer has them in its queue.

        Raises:
            ValueError: a slot is outside of the pool.
            UnavailableError: the session has ended.
        """
        since = self._evictions
        letters: list[bytes] = [FAILED] * len(items)
        staged: list[tuple[int, Job]] = []
        with session.using() as pool:
            for item in items:
                if not 0 <= item.slot < pool.shape.num_slots:
                    raise ValueError(f"slot {item.slot} is outside of the engine's pool of {pool.shape.num_slots}")
            for i, item in enumerate(items):
                job = self._stage(session, pool, item, since)
                if isinstance(job, bytes):
                    letters[i] = job
                else:
                    staged.append((i, job))
        for (i, _), status in zip(staged, self._store_staged([j for _, j in staged]), strict=True):
            letters[i] = _STORE_LETTER.get(status, FAILED)
        return b"".join(letters)

    def _stage(self, session: Session, pool: HostPool, item: StoreItem, since: int) -> Job | bytes:
        """Copy one payload to staging memory; a letter where that was not to be."""

        def describe(payload: memoryview) -> Header:
            return Header(
                layout_id=session.hello.namespace.layout.layout_id(),
                ns_id=session.ns_id,
                key=item.key,
                parent=item.parent,
                anchor=item.anchor,
                position=item.position,
                num_tokens=item.num_tokens,
                tenant=item.tenant,
                created=time.time(),
                raw_nbytes=len(payload),
                checksum=checksum(payload),
            )

        staged = self._copy(pool, item.slot, item.generation, describe, item.tokens)
        if isinstance(staged, bytes):
            return staged
        return Job(session.ns_id, item.key, len(staged.record.data), since, staged)

    def _store_staged(self, jobs: Sequence[Job]) -> list[Status]:
        results = self._disk_writer.write_now(jobs)
        for job in jobs:
            assert job.staged is not None
            if self._shared_writer:
                self._shared_writer.put(job)
            job.staged.buffer.release()
        return results

    def _keep(self, job: Job) -> bool:
        """Return whether nobody has evicted the job's key since its bytes were read."""
        return self._evicted.get(job.key, 0) <= job.since

    # -- evict

    def evict(self, ns_id: bytes, refs: Sequence[Ref], tiers: Iterable[str], whole: bool) -> dict[str, int]:
        """Remove chunks from the disk and shared tiers among ``tiers`` and return how many each had.

        Args:
            refs: the chunks, ancestors first.
            whole: they are all of the namespace: remove the namespace itself.
        """
        keys = [ref.key for ref in refs]
        with self._lock:
            self._evictions += 1
            if len(self._evicted) > _MAX_EVICTED:
                self._evicted.clear()
            self._evicted.update(dict.fromkeys(keys, self._evictions))
        removed: dict[str, int] = {}
        for tier, writer in ((self.disk, self._disk_writer), (self.shared, self._shared_writer)):
            if tier is None or writer is None or tier.name not in tiers:
                continue
            with writer.evict(ns_id, keys):
                removed[tier.name] = tier.drop_namespace(ns_id) if whole else tier.evict(ns_id, refs[::-1])
        for session in list(self.sessions.values()):
            if whole and session.ns_id == ns_id:
                self.add_namespace(session.hello.namespace)
        return removed

    # -- state

    def queued_nbytes(self) -> dict[str, int]:
        """Return the bytes that wait to be written, by tier."""
        writers = {"disk": self._disk_writer, "shared": self._shared_writer}
        return {name: writer.queued_nbytes for name, writer in writers.items() if writer}

    def num_dropped(self) -> dict[str, int]:
        """Return the stores that were dropped because a tier was behind or out, by tier."""
        writers = {"disk": self._disk_writer, "shared": self._shared_writer}
        return {name: writer.num_dropped for name, writer in writers.items() if writer}

    def drain(self, timeout_s: float) -> bool:
        """Wait until every queued store is written and return whether it was in time."""
        writers = [w for w in (self._disk_writer, self._shared_writer) if w]
        return all([w.drain(timeout_s) for w in writers])

    def close(self) -> None:
        """End all sessions, stop the writers, close the tiers. Idempotent."""
        for session in list(self.sessions.values()):
            self.close_session(session)
        for writer in (self._disk_writer, self._shared_writer):
            if writer:
                writer.close()
        for tier in self.tiers():
            tier.close()


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


def _fetch_letter(fetched: Fetched, tier: bytes) -> bytes:
    if fetched.status == Status.OK:
        return tier
    return BAD if fetched.status == Status.BAD else MISSING
