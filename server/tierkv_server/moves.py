"""What moves between tiers: the tiers, their writers, staging memory, and the copies between them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt

from tierkv.config import COMMAND_NBYTES, STORE_NBYTES, Spill
from tierkv.errors import UnavailableError
from tierkv.messages import DROPPED, HANDOFF, STALE
from tierkv.payload import HEADER_NBYTES, Header, record_nbytes
from tierkv.pool import HostPool
from tierkv.tiers.base import Offer, Record, Ref, Status, Tier
from tierkv_server.guard import Evictions
from tierkv_server.session import Session
from tierkv_server.spill import Seen, SpillPolicy
from tierkv_server.staging import Buffer, Staging
from tierkv_server.writer import MAX_YIELD_S, PATIENCE_S, Job, Loads, Staged, TierWriter


class Moves:
    """The tiers and the means to move payloads between them and the engines' pools.

    Args:
        disk: the disk tier.
        shared: the shared tier or None.
        spill: when chunks go to each tier.

    Attributes:
        on_stored: called with a tier's name, a namespace id and the keys that are stored there now.
        writing: returns a context around each write to the shared tier; its value says whether it may be made.
    """

    def __init__(self, disk: Tier, shared: Tier | None, spill: Mapping[str, Spill]) -> None:
        self.disk = disk
        self.shared = shared
        self.spill = SpillPolicy(spill)
        self.num_stale = 0  #: stores dropped because the slot was reused while they were copied
        self.num_unstaged = 0  #: stores dropped because staging memory was full
        self.on_stored: Callable[[str, bytes, Sequence[bytes]], None] = lambda tier, ns_id, keys: None
        self.writing: Callable[[bytes, Sequence[Ref]], AbstractContextManager[bool]] = _always
        # What both queues may hold, and room for the stores under way: a slow tier never takes that of another.
        self.staging = Staging(2 * STORE_NBYTES + 8 * COMMAND_NBYTES)
        self.loads = Loads()
        self.seen = Seen()  # in the shared tier
        self.evictions = Evictions()
        self.disk_writer = self._writer(disk)
        self.shared_writer = self._writer(shared) if shared else None

    def tiers(self) -> list[Tier]:
        """Return the tiers, nearest first."""
        return [self.disk, self.shared] if self.shared else [self.disk]

    def takers(self, reason: int, num_uses: int) -> list[str]:
        """Return the tiers that store a chunk that is offered for ``reason``, seen ``num_uses`` times by now."""
        return [tier.name for tier in self.tiers() if self.spill.takes(tier.name, reason, num_uses)]

    def writers(self) -> list[TierWriter]:
        """Return the tiers' writers, nearest first."""
        return [self.disk_writer, self.shared_writer] if self.shared_writer else [self.disk_writer]

    def promote(self, session: Session, ref: Ref, slot: int, generation: int, header: Header, since: int) -> None:
        """Queue a payload that came from the shared tier for this node's disk.

        It is copied when it is written, after the load that waits for it: unless the slot was reused by then.
        """

        def stage() -> Staged | None:
            try:
                with session.using() as pool:
                    staged = self.copy(pool, slot, generation, lambda _: header)
            except UnavailableError:
                return None
            return staged if isinstance(staged, Staged) else None

        nbytes = record_nbytes(session.hello.namespace.payload_nbytes)
        staged = stage() if session.hello.inline else None  # whose slot is used again with the next command
        self.disk_writer.put(Job(session.ns_id, ref, nbytes, since, staged, stage, Offer.REQUEST))
        if staged:
            staged.buffer.release()

    def spill_up(
        self, ns_id: bytes, ref: Ref, since: int, num_uses: int, reason: int | None = None, until: float = 0.0
    ) -> None:
        """Queue a chunk that the disk has for the shared tier, if its time has come and it is not there already.

        Args:
            until: of ``HANDOFF``: monotonic time up to which it waits for room.
        """
        if self.shared_writer is None or ((ns_id, ref.key) in self.seen and reason != HANDOFF):
            return
        if reason is None:
            wanted = self.spill.from_above("shared", num_uses)
        else:
            wanted = self.spill.takes("shared", reason, num_uses)
        namespace = self.disk.namespaces().get(ns_id) if wanted else None
        if namespace is None:
            return
        nbytes = namespace.payload_nbytes
        stage = functools.partial(self.copy_from_disk, ns_id, ref, nbytes)
        self.shared_writer.put(Job(ns_id, ref, record_nbytes(nbytes), since, stage=stage), until)

    def copy_from_disk(self, ns_id: bytes, ref: Ref, payload_nbytes: int) -> Staged | None:
        """Read a record of the disk into staging memory, verified; None where it is not to be had."""
        buffer = self.staging.take(record_nbytes(payload_nbytes))
        if buffer is None:
            self.num_unstaged += 1
            return None
        payload = buffer.data[HEADER_NBYTES : HEADER_NBYTES + payload_nbytes]
        header = self.disk.fetch(ns_id, [ref], lambda _: [payload.data], quiet=True)[0].header
        if header is None:
            buffer.release()
            return None
        return _finish(buffer, header, self.disk.tokens(ns_id, ref))

    def bring_down(self, ns_id: bytes, refs: Sequence[Ref], stop: Callable[[], bool]) -> int:
        """Copy what the shared tier has of a chain to this node's disk; returns how many chunks were queued for it.

        In batches that make way for loads. It ends at the first chunk that is in neither tier, where the disk's queue
        or staging memory is full, and when ``stop()`` says so.

        Args:
            refs: the chain, ancestors first.
        """
        namespace = self.disk.namespaces().get(ns_id)
        if namespace is None and self.shared is not None:
            namespace = self.shared.namespaces().get(ns_id)
        if self.shared is None or namespace is None:
            return 0
        self.disk.add_namespace(namespace)
        nbytes, num = namespace.payload_nbytes, 0
        per_batch = max(1, COMMAND_NBYTES // record_nbytes(nbytes))
        missing = [ref for ref, there in zip(refs, self.disk.match(ns_id, refs), strict=True) if not there]
        for at in range(0, len(missing), per_batch):
            self.loads.wait_for_none(MAX_YIELD_S)
            batch = missing[at : at + per_batch]
            if stop():
                break
            taken = self._bring_batch(ns_id, batch, nbytes)
            num += taken
            if taken < len(batch):
                break
        return num

    def _bring_batch(self, ns_id: bytes, refs: Sequence[Ref], payload_nbytes: int) -> int:
        assert self.shared is not None
        since = self.evictions.number
        buffers = [b for _ in refs if (b := self.staging.take(record_nbytes(payload_nbytes)))]
        end, num = HEADER_NBYTES + payload_nbytes, 0
        try:
            self.num_unstaged += len(refs) - len(buffers)
            refs = refs[: len(buffers)]
            found = self.shared.fetch(ns_id, refs, lambda i: [buffers[i].data[HEADER_NBYTES:end].data], quiet=True)
            for ref, buffer, fetched in zip(refs, buffers, found, strict=True):
                if fetched.header is None:
                    break
                staged = _finish(buffer, fetched.header, self.shared.tokens(ns_id, ref))
                if not self.disk_writer.put(Job(ns_id, ref, buffer.data.nbytes, since, staged)):
                    break
                self.seen.add((ns_id, ref.key))
                num += 1
        finally:
            for buffer in buffers:
                buffer.release()
        return num

    def copy(
        self,
        pool: HostPool,
        slot: int,
        generation: int,
        describe: Callable[[memoryview], Header],
        tokens: bytes = b"",
    ) -> Staged | bytes:
        """Copy a payload out of its slot to staging memory and put its header before it; a letter where that failed."""
        payload_nbytes = pool.shape.payload_nbytes
        buffer = self.staging.take(record_nbytes(payload_nbytes))
        if buffer is None:
            self.num_unstaged += 1
            return DROPPED
        payload = buffer.data[HEADER_NBYTES : HEADER_NBYTES + payload_nbytes]
        if not pool.read(slot, generation, payload):
            buffer.release()
            self.num_stale += 1
            return STALE
        return _finish(buffer, describe(payload.data), tokens)

    def stage(self, payload: npt.NDArray[np.uint8], header: Header, tokens: bytes = b"") -> Staged | None:
        """Copy a payload that is in memory to staging memory and put its header before it; None without room."""
        buffer = self.staging.take(record_nbytes(len(payload)))
        if buffer is None:
            self.num_unstaged += 1
            return None
        buffer.data[HEADER_NBYTES : HEADER_NBYTES + len(payload)] = payload
        return _finish(buffer, header, tokens)

    # -- writers

    def _writer(self, tier: Tier) -> TierWriter:
        writing = _always if tier is self.disk else self._write_to_shared
        # An engine waits for its stores to the disk; nobody waits for those to the shared tier.
        patience_s = 0.0 if tier is self.disk else PATIENCE_S
        return TierWriter(
            tier, STORE_NBYTES, COMMAND_NBYTES, self._keep, self.loads, self._stored, writing, patience_s=patience_s
        )

    def _write_to_shared(self, ns_id: bytes, refs: Sequence[Ref]) -> AbstractContextManager[bool]:
        return self.writing(ns_id, refs)

    def _keep(self, job: Job) -> bool:
        """Return whether nobody has evicted the job's key since its bytes were read."""
        return self.evictions.allows(job.ns_id, job.ref.key, job.since)

    def _stored(self, tier: Tier, jobs: Sequence[Job], results: Sequence[Status]) -> None:
        """Take note of what a writer's batch came to."""
        there = [job for job, r in zip(jobs, results, strict=True) if r in (Status.OK, Status.EXISTS)]
        if tier is self.shared:
            for job in there:
                self.seen.add((job.ns_id, job.ref.key))
        if there:
            self.on_stored(tier.name, there[0].ns_id, [job.ref.key for job in there])


def _always(ns_id: bytes, refs: Sequence[Ref]) -> AbstractContextManager[bool]:
    return contextlib.nullcontext(True)


def _finish(buffer: Buffer, header: Header, tokens: bytes) -> Staged:
    """Put the header before a payload in staging memory, and zeros behind it."""
    end = HEADER_NBYTES + header.raw_nbytes
    buffer.data[:HEADER_NBYTES] = np.frombuffer(header.pack(), dtype=np.uint8)
    buffer.data[end:] = 0
    return Staged(Record(header, buffer.data.data, tokens), buffer)
