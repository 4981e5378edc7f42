"""A tier's writer: one thread, a queue bounded in bytes. A tier that is behind drops stores and counts them.

A tier that is out for a moment (a stall, a failover), or may not be written to yet (the node has just started), loses
nothing that is queued: that waits, for ``patience_s`` at most. Then stores fail as they come, until one works again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from tierkv.errors import UnavailableError
from tierkv.health import Repeated
from tierkv.tiers.base import Offer, Record, Ref, Status, Tier
from tierkv_server.staging import Buffer

#: How long a batch of stores makes way for loads at most: a busy node stores too.
MAX_YIELD_S = 0.25
#: A plan's next fetch comes this soon after one; stores wait for that pause.
_QUIET_S = 0.01
#: How often a store that waits for others looks whether they hang, and a queue that waits for its tier whether to end.
_LOOK_S = 0.5
#: What is queued for a shared tier that is out fails after this time. With the back-off of :mod:`tierkv.health` and 1 s
#: for a try, one begins between 5 s and this, whatever the jitter: being away for less than 5 s loses nothing.
PATIENCE_S = 10.0


class Loads:
    """Counts the fetches under way, so that stores make way for them: requests wait for loads, nobody for a store."""

    def __init__(self) -> None:
        self._count = 0
        self._ended = 0.0
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._count -= 1
            self._ended = time.monotonic()
            self._changed.notify_all()

    def wait_for_none(self, timeout_s: float) -> None:
        """Return when no fetch has been under way for a moment, or after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (now := time.monotonic()) < deadline:
                if not self._count and now - self._ended >= _QUIET_S:
                    return
                self._changed.wait(min(deadline - now, _QUIET_S if not self._count else timeout_s))


class Staged(NamedTuple):
    """A record in staging memory; ``buffer`` holds its bytes."""

    record: Record
    buffer: Buffer


class Job(NamedTuple):
    """A record on its way to a tier.

    Attributes:
        ref, nbytes: of the record.
        since: number of evictions when its bytes were read: if its key was evicted later, it is not to be written.
        staged: the record, where it is in staging memory already.
        stage: brings it there when it is to be written; returns None where that is not to be had any more.
        offer: whether the tier's policy may decline it.
    """

    ns_id: bytes
    ref: Ref
    nbytes: int
    since: int
    staged: Staged | None = None
    stage: Callable[[], Staged | None] | None = None
    offer: Offer = Offer.ORDER


class TierWriter:
    """Stores queued records in a tier, in batches of one namespace.

    Args:
        tier: where to.
        budget: bytes that may wait.
        batch_nbytes: bytes of one ``store`` call.
        keep: whether a job is still to be written; asked while no eviction can come between.
        loads: fetches under way: while there are any, the queue waits, ``MAX_YIELD_S`` a batch at most.
        stored: called after each batch with the tier, its jobs and what came of each.
        writing: returns a context around each write, whose value says whether the write may be made.
        patience_s: what is queued waits this long for a tier that is out.
    """

    def __init__(
        self,
        tier: Tier,
        budget: int,
        batch_nbytes: int,
        keep: Callable[[Job], bool],
        loads: Loads,
        stored: Callable[[Tier, Sequence[Job], Sequence[Status]], None],
        writing: Callable[[bytes, Sequence[Ref]], AbstractContextManager[bool]],
        *,
        patience_s: float = 0.0,
    ) -> None:
        self.tier = tier
        self._keep = keep
        self._stored = stored
        self._may_write = writing
        self._loads = loads
        self.num_dropped = 0  #: records that the queue had no room for
        self.queued_nbytes = 0
        self._budget = budget
        self._batch_nbytes = batch_nbytes
        self._patience_s = patience_s
        self._gives_up_at: float | None = None  # monotonic; None: the tier works
        self._refused = False  # the last write might not be made
        self._jobs: deque[Job] = deque()
        self._queued: set[tuple[bytes, bytes]] = set()
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        self._closed = False
        self._unforeseen = Repeated()
        self.refusing = False  #: take nothing more: the server is leaving
        self._thread = threading.Thread(target=self._run, name=f"tierkv-{tier.name}-writer", daemon=True)
        self._thread.start()

    def put(self, job: Job, until: float = 0.0) -> bool:
        """Queue a record and return whether it was taken. Its buffer, if it has one, is held until it is written.

        Args:
            until: monotonic time up to which it waits for room.
        """
        nbytes = job.nbytes
        name = (job.ns_id, job.ref.key)
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or name in self._queued or self.queued_nbytes + nbytes <= self._budget,
                max(0.0, until - time.monotonic()),
            )
            if name in self._queued:
                return True
            if self._closed or self.refusing or self.queued_nbytes + nbytes > self._budget:
                self.num_dropped += 1
                return False
            if job.staged:
                job.staged.buffer.hold()
            self._jobs.append(job)
            self._queued.add(name)
            self.queued_nbytes += nbytes
            self._changed.notify_all()
        return True

    def write_now(self, jobs: Sequence[Job]) -> list[Status]:
        """Store records of one namespace at once, past the queue, and return a status each.

        Who waits for a write that hangs in the tier is told that his failed: the tier says then that it takes none.
        """
        while not self._writing.acquire(timeout=_LOOK_S):
            if self.tier.stat().state != "up":
                return [Status.ERROR] * len(jobs)
        try:
            return self._store(jobs)
        finally:
            self._writing.release()

    def evict(self, ns_id: bytes | None, keys: set[bytes] | None) -> EvictGuard:
        """Return a context in which none of ``keys`` is queued, and no batch is being written.

        None stands for all keys, and for all namespaces.
        """
        return EvictGuard(self, ns_id, keys)

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything queued is written and return whether it was in time."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            return self._changed.wait_for(lambda: not self.queued_nbytes, timeout=max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Drop what is queued and stop the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._drop(lambda job: True)
            self._changed.notify_all()
        self._thread.join()

    def _drop(self, doomed: Callable[[Job], bool]) -> None:
        kept: deque[Job] = deque()
        for job in self._jobs:
            if doomed(job):
                self._done(job)
            else:
                kept.append(job)
        self._jobs = kept

    def _done(self, job: Job) -> None:
        self._queued.discard((job.ns_id, job.ref.key))
        self.queued_nbytes -= job.nbytes
        if job.staged:
            job.staged.buffer.release()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if self._closed:
                    return
            if self._waits_for_tier():
                continue
            self._loads.wait_for_none(MAX_YIELD_S)
            with self._writing:
                self._write_batch()

    def _waits_for_tier(self) -> bool:
        """Wait a moment where the tier takes no writes and did not long ago; returns whether it did."""
        refused, self._refused = self._refused, False
        wait_s = _LOOK_S if refused else min(self.tier.retry_in_s(), _LOOK_S)
        if not wait_s or not self._is_patient():
            return False
        with self._changed:
            self._changed.wait_for(lambda: self._closed, wait_s)
        return True

    def _is_patient(self) -> bool:
        """Return whether what is queued is to wait for the tier, which takes no writes."""
        now = time.monotonic()
        if self._gives_up_at is None:
            self._gives_up_at = now + self._patience_s
        return now < self._gives_up_at and not self.refusing

    def _write_batch(self) -> None:
        with self._changed:
            batch: list[Job] = []
            nbytes = 0
            while self._jobs and nbytes < self._batch_nbytes and (not batch or self._jobs[0].ns_id == batch[0].ns_id):
                batch.append(self._jobs.popleft())
                nbytes += batch[-1].nbytes
        if not batch:
            return
        results = self._store(batch)  # the tier counts what came of it
        failed = [job for job, status in zip(batch, results, strict=True) if status is Status.ERROR]
        if not failed:  # a part is not enough: of a Cluster one node may be out, or full, for hours
            self._gives_up_at = None
        may_wait = bool(failed) and (self._refused or self.tier.retry_in_s() > 0) and self._is_patient()
        again = failed if may_wait else []
        with self._changed:
            again = [] if self._closed else again
            self._jobs.extendleft(reversed(again))
            waiting = set(map(id, again))
            for job in batch:
                if id(job) not in waiting:
                    self._done(job)
            self._changed.notify_all()

    def _store(self, jobs: Sequence[Job]) -> list[Status]:
        results = [Status.MISS] * len(jobs)
        try:
            self._store_into(jobs, results)
        except UnavailableError:
            results = [Status.ERROR] * len(jobs)
        except Exception:  # a tier must not raise; if one does, serving goes on
            self._unforeseen.note("the %s tier failed in an unforeseen way", self.tier.name, exc_info=True)
            results = [Status.ERROR] * len(jobs)
        try:
            self._stored(self.tier, jobs, results)
        except Exception:  # neither the writer's thread nor a STORE goes with those who want to know
            self._unforeseen.note(
                "those who want to know what the %s tier has stored failed", self.tier.name, exc_info=True
            )
        return results

    def _store_into(self, jobs: Sequence[Job], results: list[Status]) -> None:
        """Store what is still to be stored; what has yet to be copied is not where the tier has it already."""
        ns_id = jobs[0].ns_id
        lazy = [i for i, job in enumerate(jobs) if job.staged is None]
        for i, there in zip(lazy, self.tier.match(ns_id, [jobs[i].ref for i in lazy]), strict=True):
            if there:
                results[i] = Status.EXISTS
        todo = [(i, job) for i, job in enumerate(jobs) if results[i] is Status.MISS and self._keep(job)]
        staged = [(i, ready) for i, job in todo if (ready := _ready(job))]
        try:
            if staged:
                with self._may_write(ns_id, [jobs[i].ref for i, _ in staged]) as may_write:
                    if not may_write:
                        self._refused = True
                        raise UnavailableError(f"nothing may be written to the {self.tier.name} tier now")
                    for offer in dict.fromkeys(jobs[i].offer for i, _ in staged):
                        part = [(i, ready.record) for i, ready in staged if jobs[i].offer is offer]
                        done = self.tier.store(ns_id, [record for _, record in part], offer=offer)
                        for (i, _), status in zip(part, done, strict=True):
                            results[i] = status
        finally:
            for i, ready in staged:
                if jobs[i].staged is None:
                    ready.buffer.release()


def _ready(job: Job) -> Staged | None:
    if job.staged is not None:
        return job.staged
    return job.stage() if job.stage else None


class EvictGuard:
    """Holds a writer still while keys are evicted from its tier, so that none of them is written after."""

    def __init__(self, writer: TierWriter, ns_id: bytes | None, keys: set[bytes] | None) -> None:
        self._writer = writer
        self._ns_id = ns_id
        self._keys = keys

    def __enter__(self) -> None:
        self._writer._writing.acquire()
        with self._writer._changed:
            self._writer._drop(self._doomed)
            self._writer._changed.notify_all()

    def __exit__(self, *_: object) -> None:
        self._writer._writing.release()

    def _doomed(self, job: Job) -> bool:
        return self._ns_id in (None, job.ns_id) and (self._keys is None or job.ref.key in self._keys)
