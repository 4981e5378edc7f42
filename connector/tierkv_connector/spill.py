"""The spill path: which chunks are copied to the host pool, and sent from there to the store server.

Chunks are planned in the metadata of the step that computes them, because their blocks may be given away right after.
When the workers report the copy, the chunk is ready in the host pool. When it is sent on is the store server's policy:
at once, and once more before it leaves the pool if the disk may not have it by then (:mod:`tierkv_connector.holds`);
when another request uses it, which the server is told; or when it is about to leave the pool.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tierkv.client import StoreClient
from tierkv.config import COMMAND_NBYTES, STORE_NBYTES, Spill
from tierkv.hostindex import Entry, HostIndex
from tierkv.layout import Layout
from tierkv.messages import (
    COMPUTED,
    DECLINED,
    DROPPED,
    EVICTED,
    EXISTS,
    FAILED,
    STALE,
    STORED,
    USED,
    WANTED,
    StoreItem,
)
from tierkv_connector.admission import answered, keeps, saves_ahead
from tierkv_connector.blocks import RequestBlocks
from tierkv_connector.compat import block_ids_of, scheduled
from tierkv_connector.handoff import Handoffs
from tierkv_connector.holds import Holds
from tierkv_connector.metadata import Piece, RankCounts, StoreJob, TierKVWorkerMetadata
from tierkv_connector.recurrent import States
from tierkv_connector.requests import RequestState

#: Counter of each reply letter of STORE (tierkv.messages), in chunks.
_STORE_COUNTERS = {
    STORED: "stored",
    EXISTS: "stored",
    STALE: "stores_stale",
    DROPPED: "stores_dropped",
    FAILED: "stores_failed",
    DECLINED: "stores_declined",
}
#: A chunk whose STORE was lost with its server is sent again, this often in all.
_MAX_SENDS = 3
#: With ``on-evict``, this share of the pool, or one command's worth, is sent before it is to go; this many at most.
_SAVE_AHEAD = 1 / 16
_MAX_AHEAD = 512
#: Seconds for which an engine that ends offers what only its pool may have: vLLM gives it little more than that.
LAST_OFFER_S = 2.0


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

    Args:
        weighs_above: whether the host pool's policy is one that the disk's is to go by.

    Attributes:
        copying: copies that the workers have not reported, by job id.
        queue: what is on its way to the store server.
        handoffs: what other engines wait for.
        holds: what the server is told of the pool.
    """

    def __init__(self, index: HostIndex, layout: Layout, counters: Counter[str], weighs_above: bool = True) -> None:
        self.copying: dict[int, Entry] = {}
        self.queue = StoreQueue()
        self.handoffs = Handoffs(index, counters, self._offer)
        self.holds = Holds(index, weighs_above)
        self._ranks = RankCounts(index.pool.shape.num_parts)
        self._failed: set[int] = set()  # copies that failed on some rank
        self._index = index
        self._layout = layout
        self._tables = layout.tables()
        self._states = States(layout, index.pool)
        self._counters = counters
        self._payload_nbytes = index.pool.shape.payload_nbytes
        self._next_job = 0
        self._unsent: deque[Entry] = deque(maxlen=index.pool.shape.num_slots)  # lost, or not sent while nobody listened
        self._wanted: deque[tuple[list[Entry], bytes]] = deque()  # answers to USE, from the reader thread
        self._saving: deque[Entry] = deque()  # pinned while they are sent; the reader thread takes note in _saved
        self._saved: deque[Entry] = deque()

    def plan(
        self,
        scheduler_output: Any,
        requests: Mapping[str, RequestState],
        epoch: int,
        client: StoreClient | None = None,
    ) -> list[StoreJob]:
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
                if state.outcome is not None:
                    state.outcome.begins(num_computed)
                if state.promised is not None:
                    state.store_next = 0
            after = num_computed + scheduler_output.num_scheduled_tokens[req_id]
            if state.store == "none":
                continue
            if state.store == "all" and state.epoch == epoch:
                state.follow_outputs(size)
            end = min(len(state.keys), after // size)
            if state.store_next < end and state.epoch == epoch:
                states = self._states.of_step(scheduler_output, req_id, after)
                self._plan_chunks(scheduler_output, state, end, states, jobs, client)
            state.store_next = max(state.store_next, end)
        return jobs

    def _plan_chunks(
        self,
        scheduler_output: Any,
        state: RequestState,
        end: int,
        states: Mapping[int, Mapping[int, int]],
        jobs: list[StoreJob],
        client: StoreClient | None,
    ) -> None:
        blocks: RequestBlocks | None = None
        assert state.store_next is not None
        for i in range(state.store_next, end):
            there = self._index.get(state.keys[i])
            if there is not None and not (i in states and self._states.may_add(there)):
                if state.promised is not None:
                    self.handoffs.finds(state, i, there)
                continue
            if blocks is None:
                block_ids = block_ids_of(scheduler_output, state.request.request_id)
                if block_ids is None:
                    return
                blocks = RequestBlocks(self._layout, self._tables, block_ids)
            spans = blocks.whole(i, states.get(i))
            if spans is None:  # a window has passed a part: the chunk took several steps, and is longer than that lives
                self._counters["not_spilled"] += 1
                if state.promised is not None:
                    self.handoffs.finds(state, i, None)
                continue
            keep = keeps(self._index, state, i, client) if there is None else not there.in_transit
            if keep is None:
                self._counters["not_admitted"] += end - i  # what follows is of no use without it
                return
            entry = self._index.reserve(
                state.keys[i],
                state.parent(i),
                i,
                self._layout.chunk_tokens,
                state.public_anchor(i),
                state.tenant,
                keep=keep,
            )
            if entry is None:
                self._counters["not_spilled"] += 1  # every slot is in use
                continue
            self._states.mark(entry.slot, i in states)
            self._next_job += 1
            self.copying[self._next_job] = entry
            if state.promised is not None:
                self.handoffs.computes(state, i, entry)
            if state.outcome is not None:
                state.outcome.num_stored += 1
            jobs.append(StoreJob(self._next_job, Piece.of(entry.slot, spans)))

    def spoil(self) -> None:
        """Take every copy under way as failed: a step did not get what it was to have loaded, and went on all the same.

        What it computed behind that is rubbish, of every request that shares it. vLLM computes it anew.
        """
        self._failed |= self.copying.keys()

    def copied(self, report: TierKVWorkerMetadata) -> list[Entry]:
        """Take note of copies that the workers report, and return the chunks that are in the host pool now."""
        self._counters["spill_nbytes"] += report.store_nbytes
        arrived = []
        self._failed |= report.failed_stores
        for job_id in self._ranks.ended(report.stored):
            failed = job_id in self._failed
            self._failed.discard(job_id)
            if job_id not in self.copying:
                continue
            entry = self.copying.pop(job_id)
            if failed:
                self._index.drop(entry, filling=True)
                self._index.stopped(entry)
                continue
            self._index.filled(entry, "host")
            if entry.state == Entry.READY:
                self._counters["spilled"] += 1
                arrived.append(entry)
        return arrived

    def computed(self, arrived: Sequence[Entry], client: StoreClient | None) -> None:
        """Send chunks that were just computed, unless every tier wants them later or never."""
        if client is None:
            return
        if not client.connected():
            self._unsent += [e for e in arrived if e.anchor]
            self._counters["not_sent"] += sum(bool(e.anchor) for e in arrived)
            return
        self.handoffs.send([e for e in arrived if e.promised], client)
        if {Spill.THROUGH, Spill.SECOND_USE} & set(client.spill.values()):
            self.send([e for e in arrived if not e.promised], client, COMPUTED)
        if saves_ahead(client.spill):  # what the pool does not keep is about to leave it
            self.send([e for e in arrived if e.in_transit and not e.promised], client, EVICTED)

    def send(self, entries: Sequence[Entry], client: StoreClient, reason: int) -> None:
        """Send chunks to the store server, within the budget of the queue; what others must not see stays here."""
        batch: list[Entry] = []
        for entry in entries:
            if not entry.anchor or entry.state != Entry.READY:
                continue
            if self.queue.nbytes + (len(batch) + 1) * self._payload_nbytes > STORE_NBYTES:
                self._counters["not_sent"] += 1
                continue
            batch.append(entry)
            if len(batch) * self._payload_nbytes >= COMMAND_NBYTES:
                self._send_batch(batch, client, reason)
                batch = []
        if batch:
            self._send_batch(batch, client, reason)

    def _send_batch(self, batch: list[Entry], client: StoreClient, reason: int) -> None:
        if reason == EVICTED:  # what was sent before may have been for another tier, or declined
            for entry in batch:
                entry.saved, entry.declined = True, False
                self._index.pin(entry)
                self._saving.append(entry)
        self._offer(batch, client, reason, self._saved.extend if reason == EVICTED else _nothing)

    def _offer(
        self, batch: Sequence[Entry], client: StoreClient, reason: int, over: Callable[[Sequence[Entry]], None]
    ) -> None:
        """Send chunks in one command; ``over`` is told when the server is done with their slots. From any thread."""
        nbytes = len(batch) * self._payload_nbytes
        self.queue.add(nbytes)
        for entry in batch:
            entry.num_sends += 1
            entry.sending = True

        def done(letters: bytes | None) -> None:
            self.queue.add(-nbytes)
            self.queue.count(len(batch), letters)
            answered(batch, letters)
            if letters is None:
                lost = [e for e in batch if e.num_sends < _MAX_SENDS]
                for entry in lost:
                    entry.saved = False
                self._unsent += lost
            over(batch)

        client.store([_item(entry, reason) for entry in batch], self._index.dropped, done)

    def note_use(self, state: RequestState, stop: int, client: StoreClient) -> None:
        """Tell the store server, once a chunk, that another request uses what is in the host pool.

        Args:
            stop: the request's chunks before this one are on the GPU or in the pool.
        """
        if Spill.SECOND_USE not in client.spill.values():
            return
        run: list[Entry] = []
        for i in range(stop):
            entry = self._index.get(state.keys[i])
            if entry is not None and entry.state == Entry.READY and entry.anchor and not entry.noted:
                entry.noted = True
                run.append(entry)
                continue
            self._send_use(run, client)
            run = []
        self._send_use(run, client)

    def _send_use(self, run: list[Entry], client: StoreClient) -> None:
        if not run:
            return

        def arrived(letters: bytes | None) -> None:
            if letters and WANTED in letters:
                self._wanted.append((run, letters))

        client.use(run[0].position, run[0].anchor, [e.key for e in run], arrived)

    def apply_answers(self) -> None:
        """Let go of slots that were kept until the server had their chunks: it has answered, or is out."""
        while self._saved:
            self._saving.remove(entry := self._saved.popleft())
            self._index.unpin(entry)
        self.handoffs.apply_answers()

    def advance(self, client: StoreClient | None) -> None:
        """Send what the server has asked for, what was lost, and what is about to leave the pool."""
        self.handoffs.advance(client)
        if client is None or not client.connected():
            return
        self.holds.tell(client)
        while self._wanted:
            run, letters = self._wanted.popleft()
            wanted = [e for i, e in enumerate(run) if letters[i : i + 1] == WANTED]
            self.send(wanted, client, USED)
        if self._unsent and 2 * self.queue.nbytes < STORE_NBYTES:
            lost = [self._unsent.popleft() for _ in range(min(len(self._unsent), _per_command(self._payload_nbytes)))]
            self.computed(lost, client)
        if saves_ahead(client.spill) or self.holds.offers_again:
            self._save_ahead(client)

    def _save_ahead(self, client: StoreClient) -> None:
        num_slots, per_command = self._index.pool.shape.num_slots, _per_command(self._payload_nbytes)
        wanted = min(max(per_command, min(int(num_slots * _SAVE_AHEAD), _MAX_AHEAD)), num_slots // 2)
        room = (STORE_NBYTES // 2 - self.queue.nbytes) // self._payload_nbytes
        num = wanted - self._index.num_free - self._index.num_in_transit
        if num > 0 and room > 0:
            victims = self._index.retire(min(num, room))
            self.holds.tell(client)  # before they come: of what the pool keeps the disk takes less
            again = self.holds.offers_again  # what the disk had then it may have done without since
            self.send([entry for entry in victims if again or not entry.saved], client, EVICTED)

    def offer_rest(self, client: StoreClient) -> None:
        """Offer what only the pool may have, the best first, before it goes with its engine: :data:`LAST_OFFER_S`."""
        deadline = time.monotonic() + LAST_OFFER_S
        rest = self.holds.let_go(client, LAST_OFFER_S) if client.connected() else []
        for at in range(0, len(rest), num := _per_command(self._payload_nbytes)):
            if not self._wait_for_queue(STORE_NBYTES // 2, deadline):
                break
            self._offer(rest[at : at + num], client, EVICTED, _nothing)
        self._wait_for_queue(0, deadline)

    def _wait_for_queue(self, nbytes: int, deadline: float) -> bool:
        """Wait until at most so many bytes are on their way; returns whether they are."""
        while self.queue.nbytes > nbytes and time.monotonic() < deadline:
            time.sleep(0.002)
        return self.queue.nbytes <= nbytes

    def num_not_saved(self, client: StoreClient) -> int:
        """Return how many chunks left the pool before they were offered to the tier that was to have them."""
        return self._index.num_unsaved if saves_ahead(client.spill) else self.holds.num_lost

    def dump(self) -> dict[str, Any]:
        """Return the state as plain values, for tests that compare it."""
        return {
            "copying": {job_id: (e.key, e.slot, e.generation) for job_id, e in self.copying.items()},
            "next_job": self._next_job,
            "waiting": ([e.key for e in self._unsent], len(self._wanted), len(self._saving), len(self._saved)),
            "queue": (self.queue.nbytes, dict(self.queue.counters)),
            "handoffs": self.handoffs.dump(),
            "holds": self.holds.dump(),
        }


def _per_command(payload_nbytes: int) -> int:
    return max(1, COMMAND_NBYTES // payload_nbytes)


def _nothing(batch: Sequence[Entry]) -> None:
    pass


def _item(entry: Entry, reason: int) -> StoreItem:
    return StoreItem(
        key=entry.key,
        parent=entry.parent,
        anchor=entry.anchor,
        position=entry.position,
        num_tokens=entry.num_tokens,
        tenant=entry.tenant,
        slot=entry.slot,
        generation=entry.generation,
        reason=reason,
    )
