"""The spill path: which chunks are copied to the host pool, and sent from there to the store server.

Chunks are planned in the metadata of the step that computes them, because their blocks may be given away right after.
When the workers report the copy, the chunk is ready in the host pool, and is sent.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tierkv.client import StoreClient
from tierkv.config import COMMAND_NBYTES, STORE_NBYTES
from tierkv.hostindex import Entry, HostIndex
from tierkv.layout import Layout
from tierkv.messages import DROPPED, EXISTS, FAILED, STALE, STORED, StoreItem
from tierkv_connector.compat import block_ids_of, scheduled
from tierkv_connector.metadata import Piece, StoreJob, TierKVWorkerMetadata
from tierkv_connector.requests import RequestState

#: A chunk and the request that computed it.
Spilled = tuple[Entry, RequestState]

#: Counter of each reply letter of STORE (tierkv.messages), in chunks.
_STORE_COUNTERS = {
    STORED: "stored",
    EXISTS: "stored",
    STALE: "stores_stale",
    DROPPED: "stores_dropped",
    FAILED: "stores_failed",
}


class StoreQueue:
    """Chunks on their way to the store server: their bytes, and what became of them. The reader thread counts."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.counters: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes

    def count(self, num_sent: int, letters: bytes | None) -> None:
        """Note the answer to a STORE; None: it will not come. What an operator evicted meanwhile was not sent."""
        with self._lock:
            if letters is None:
                self.counters["stores_lost"] += num_sent
                return
            self.counters.update({"stores_evicted": num_sent - len(letters)})
            self.counters.update(_STORE_COUNTERS.get(letters[i : i + 1], "stores_failed") for i in range(len(letters)))
            self.counters = +self.counters  # a name appears with its first count


class Spiller:
    """Plans copies from the GPU to the host pool, and sends what has arrived there.

    Attributes:
        copying: copies that the workers have not reported, by job id.
        queue: what is on its way to the store server.
    """

    def __init__(self, index: HostIndex, layout: Layout, counters: Counter[str]) -> None:
        self.copying: dict[int, Spilled] = {}
        self.queue = StoreQueue()
        self._index = index
        self._layout = layout
        self._counters = counters
        self._payload_nbytes = index.pool.shape.payload_nbytes
        self._next_job = 0

    def plan(self, scheduler_output: Any, requests: Mapping[str, RequestState], epoch: int) -> list[StoreJob]:
        """Return copies of the prompt chunks that this step completes; requests of another epoch store nothing."""
        size = self._layout.chunk_tokens
        jobs: list[StoreJob] = []
        for req_id, num_computed in scheduled(scheduler_output):
            state = requests.get(req_id)
            if state is None:
                continue
            if state.store_next is None:
                state.store_next = num_computed // size
                self._counters["missed"] += max(0, len(state.keys) - state.store_next)
            after = num_computed + scheduler_output.num_scheduled_tokens[req_id]
            end = min(len(state.keys), after // size)
            if state.store_next < end and state.epoch == epoch:
                self._plan_chunks(scheduler_output, state, end, jobs)
            state.store_next = max(state.store_next, end)
        return jobs

    def _plan_chunks(self, scheduler_output: Any, state: RequestState, end: int, jobs: list[StoreJob]) -> None:
        per_chunk = self._layout.blocks_per_chunk
        block_ids: list[int] | None = None
        assert state.store_next is not None
        for i in range(state.store_next, end):
            if self._index.get(state.keys[i]) is not None:
                continue
            if block_ids is None:
                block_ids = block_ids_of(scheduler_output, state.request.request_id)
                if block_ids is None:
                    return
            ids = block_ids[i * per_chunk : (i + 1) * per_chunk]
            if len(ids) < per_chunk or 0 in ids:  # block 0 is vLLM's null block: it holds nothing
                continue
            entry = self._index.reserve(state.keys[i], state.parent(i), i, self._layout.chunk_tokens)
            if entry is None:
                self._counters["not_spilled"] += 1  # every slot is in use
                continue
            self._next_job += 1
            self.copying[self._next_job] = (entry, state)
            jobs.append(StoreJob(self._next_job, Piece(entry.slot, 0, tuple(ids))))

    def copied(self, report: TierKVWorkerMetadata) -> list[Spilled]:
        """Take note of copies that the workers report, and return the chunks that are in the host pool now."""
        self._counters["spill_nbytes"] += report.store_nbytes
        arrived = []
        for job_id, num_ranks in report.stored.items():
            if num_ranks < self._index.pool.shape.num_parts or job_id not in self.copying:
                continue
            entry, state = self.copying.pop(job_id)
            if job_id in report.failed_stores:
                self._index.drop(entry, filling=True)
                self._index.stopped(entry)
                continue
            self._index.filled(entry, "host")
            if entry.state == Entry.READY:
                self._counters["spilled"] += 1
                arrived.append((entry, state))
        return arrived

    def send(self, arrived: Sequence[Spilled], client: StoreClient | None, epoch: int) -> None:
        """Send chunks to the store server, within the budget of the queue; what others must not see stays here."""
        batch: list[StoreItem] = []
        for entry, state in arrived:
            if client is None or not state.shareable or state.epoch != epoch:
                continue
            full = self.queue.nbytes + (len(batch) + 1) * self._payload_nbytes > STORE_NBYTES
            if full or not client.connected():
                self._counters["not_sent"] += 1
                continue
            batch.append(_item(entry, state))
            if len(batch) * self._payload_nbytes >= COMMAND_NBYTES:
                self._send_batch(batch, client)
                batch = []
        if batch:
            self._send_batch(batch, client)

    def _send_batch(self, batch: list[StoreItem], client: StoreClient | None) -> None:
        assert client is not None
        nbytes = len(batch) * self._payload_nbytes
        self.queue.add(nbytes)

        def done(letters: bytes | None) -> None:
            self.queue.add(-nbytes)
            self.queue.count(len(batch), letters)

        client.store(batch, self._index.dropped, done)

    def dump(self) -> dict[str, Any]:
        """Return the state as plain values, for tests that compare it."""
        return {
            "copying": {job_id: (e.key, e.slot, e.generation) for job_id, (e, _) in self.copying.items()},
            "next_job": self._next_job,
            "queue": (self.queue.nbytes, dict(self.queue.counters)),
        }


def _item(entry: Entry, state: RequestState) -> StoreItem:
    return StoreItem(
        key=entry.key,
        parent=entry.parent,
        anchor=state.anchor(entry.position),
        position=entry.position,
        num_tokens=entry.num_tokens,
        tenant=state.tenant,
        slot=entry.slot,
        generation=entry.generation,
    )
