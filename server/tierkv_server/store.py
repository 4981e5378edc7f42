"""Stores: what engines offer, sorted by the spill policies, copied out of slots and written."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

from tierkv.messages import (
    DECLINED,
    DROPPED,
    EVICTED,
    EXISTS,
    FAILED,
    HANDOFF,
    NOTED,
    STORED,
    USED,
    WANTED,
    StoreItem,
)
from tierkv.payload import Header, checksum
from tierkv.pool import HostPool
from tierkv.tiers.base import Offer, Record, Ref, Status
from tierkv_server.moves import Moves
from tierkv_server.session import Session
from tierkv_server.writer import Job, Staged

#: Chunks that another engine waits for wait themselves for room so long, a command; its answer may take longer.
HANDOFF_WAIT_S = 10.0
#: How often they look for staging memory.
_STAGING_PAUSE_S = 0.01

_STORE_LETTER = {
    Status.OK: STORED,
    Status.EXISTS: EXISTS,
    Status.DROPPED: DROPPED,
    Status.DECLINED: DECLINED,
}


class Storer:
    """Answers offers and notes of use, and takes what the disk evicts."""

    def __init__(self, moves: Moves) -> None:
        self.moves = moves
        self.num_declined = 0  #: chunks offered that no tier's spill policy takes (yet)

    def store(self, session: Session, items: Sequence[StoreItem]) -> bytes:
        """Copy payloads out of slots and store them where the spill policies say; return a letter each.

        The disk has them when this returns; the shared tier's writer has them in its queue. What a tier has already is
        not copied.

        Raises:
            ValueError: a slot is outside of the pool.
            UnavailableError: the session has ended.
        """
        if self.moves.disk_writer.refusing:
            self.moves.disk_writer.num_dropped += len(items)
            return DROPPED * len(items)
        since = self.moves.evictions.number if session.since is None else session.since
        until = time.monotonic() + HANDOFF_WAIT_S
        letters: list[bytes] = [FAILED] * len(items)
        to_disk: list[tuple[int, Job]] = []
        with session.using() as pool:
            for item in items:
                if not 0 <= item.slot < pool.shape.num_slots:
                    raise ValueError(f"slot {item.slot} is outside of the engine's pool of {pool.shape.num_slots}")
            for i, (item, letter, tiers) in enumerate(self._sort_out(session.ns_id, items, until)):
                letters[i] = letter
                if not tiers:
                    continue
                patience = until if item.reason == HANDOFF else 0.0
                job = self._stage_in_time(session, pool, item, since, patience)
                if isinstance(job, bytes):
                    letters[i] = job
                    continue
                if "shared" in tiers and self.moves.shared_writer:
                    taken = self.moves.shared_writer.put(job, patience)
                    if item.reason == HANDOFF and not taken:
                        letters[i] = DROPPED
                if "disk" in tiers:
                    to_disk.append((i, job))
                elif job.staged:
                    job.staged.buffer.release()
        for (i, _), status in zip(to_disk, self._store_on_disk([j for _, j in to_disk]), strict=True):
            letters[i] = _STORE_LETTER.get(status, FAILED)
        return b"".join(letters)

    def _sort_out(
        self, ns_id: bytes, items: Sequence[StoreItem], until: float
    ) -> Iterator[tuple[StoreItem, bytes, list[str]]]:
        """Yield for each item what to answer if nothing goes wrong, and the tiers that are to store it."""
        refs = [Ref(item.key, item.anchor) for item in items]
        for item, ref, on_disk in zip(items, refs, self.moves.disk.match(ns_id, refs), strict=True):
            uses, name = self.moves.spill.uses, (ns_id, item.key)
            num_uses = uses.count(name) if item.reason == EVICTED else uses.note(name)  # to go is no use
            takes = self.moves.takers(item.reason, num_uses)
            if not takes and not on_disk:
                self.num_declined += 1
                yield item, DECLINED, []
                continue
            if on_disk and "shared" in takes:
                self.moves.spill_up(ns_id, ref, self.moves.evictions.number, num_uses, item.reason, until)
            known = {"disk"} if on_disk else set()
            if on_disk or (item.reason != HANDOFF and (ns_id, item.key) in self.moves.seen):
                known.add("shared")
            tiers = [name for name in takes if name not in known]
            yield item, EXISTS if on_disk or not tiers else STORED, tiers

    def use(self, session: Session, refs: Sequence[Ref], reason: int = USED) -> bytes:
        """Note that an engine used chunks of its host pool, or of its GPU; returns a letter each.

        ``WANTED``: a tier would store it now, send it. With ``HANDOFF`` another engine waits for them.
        """
        if reason == HANDOFF:
            return self._hand_off(session.ns_id, refs)
        ns_id, since, letters = session.ns_id, self.moves.evictions.number, []
        for ref, on_disk in zip(refs, self.moves.disk.match(ns_id, refs), strict=True):
            num_uses = self.moves.spill.uses.note((ns_id, ref.key))
            letter = NOTED
            if on_disk:
                self.moves.spill_up(ns_id, ref, since, num_uses, USED)
            else:
                takes = self.moves.takers(USED, num_uses)
                if "disk" in takes or ("shared" in takes and (ns_id, ref.key) not in self.moves.seen):
                    letter = WANTED
            letters.append(letter)
        return b"".join(letters)

    def _hand_off(self, ns_id: bytes, refs: Sequence[Ref]) -> bytes:
        """Bring what the disk has to the shared tier, and return what is to be sent: what lacks in either."""
        moves, since, until = self.moves, self.moves.evictions.number, time.monotonic() + HANDOFF_WAIT_S
        on_disk = list(moves.disk.match(ns_id, refs))
        for ref, there in zip(refs, on_disk, strict=True):
            if there:
                moves.spill_up(ns_id, ref, since, 0, HANDOFF, until)
        takes = moves.takers(HANDOFF, 0)
        holes = [ref for ref, there in zip(refs, on_disk, strict=True) if not there]
        above = list(moves.shared.match(ns_id, holes)) if moves.shared and holes and "disk" not in takes else []
        lacking = iter([not there for there in above] if above else [bool(takes)] * len(holes))
        return b"".join(NOTED if there or not next(lacking) else WANTED for there in on_disk)

    def wants_evicted(self, ns_id: bytes, key: bytes) -> bool:
        """Return whether a record that the disk evicts for room goes on to the shared tier."""
        moves = self.moves
        return moves.shared_writer is not None and moves.spill.on_evict() and (ns_id, key) not in moves.seen

    def disk_evicts(self, record: Record) -> None:
        """Take a record that the disk evicts for room, while its bytes are there, on to the shared tier."""
        header = record.header
        if self.moves.shared_writer is None or not self.wants_evicted(header.ns_id, header.key):
            return
        nbytes = len(record.data)
        buffer = self.moves.staging.take(nbytes)
        if buffer is None:
            self.moves.num_unstaged += 1
            return
        np.copyto(buffer.data, np.frombuffer(record.data, dtype=np.uint8))
        staged = Staged(Record(header, buffer.data.data, record.tokens), buffer)
        ref = Ref(header.key, header.anchor)
        self.moves.shared_writer.put(Job(header.ns_id, ref, nbytes, self.moves.evictions.number, staged))
        buffer.release()

    def _stage_in_time(
        self, session: Session, pool: HostPool, item: StoreItem, since: int, until: float
    ) -> Job | bytes:
        """Copy one payload to staging memory, waiting for room up to a monotonic time."""
        job = self._stage(session, pool, item, since)
        while job == DROPPED and time.monotonic() < until:
            time.sleep(_STAGING_PAUSE_S)
            job = self._stage(session, pool, item, since)
        return job

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

        staged = self.moves.copy(pool, item.slot, item.generation, describe, item.tokens)
        if isinstance(staged, bytes):
            return staged
        offer = Offer.ORDER if item.reason == HANDOFF else Offer.REQUEST  # somebody waits for it
        return Job(session.ns_id, Ref(item.key, item.anchor), len(staged.record.data), since, staged, offer=offer)

    def _store_on_disk(self, jobs: Sequence[Job]) -> list[Status]:
        try:
            return self.moves.disk_writer.write_now(jobs) if jobs else []
        finally:
            for job in jobs:
                if job.staged:
                    job.staged.buffer.release()
