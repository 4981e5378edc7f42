"""Loads: copies from the host pool to the GPU, from vLLM's claim to the workers' report.

Slots are pinned from the claim on until every rank has reported. A load that has failed is never offered to its request
again. While a chunk is being loaded for one request, others with the same prefix wait for it: they find it on the GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tierkv.hostindex import Entry, HostIndex
from tierkv.layout import Layout
from tierkv_connector.blocks import RequestBlocks
from tierkv_connector.compat import scheduled
from tierkv_connector.metadata import LoadJob, Piece, TierKVWorkerMetadata
from tierkv_connector.plan import State
from tierkv_connector.prefetch import Prefetcher
from tierkv_connector.recurrent import States
from tierkv_connector.requests import RequestState
from tierkv_connector.syncload import SyncLoads


class Loads:
    """The loads of all requests.

    Args:
        index: the host index.
        requests: those of the engine, by id.
        prefetch: ends the plan of a request that loads.
        states: which chunks a load may end with.
        layout: of the payloads.
        counters: the engine's.
        sync: which loads are part of the step that needs them.
        deadline_s: others wait for a load this long.
        clock: monotonic seconds.

    Attributes:
        loading: monotonic times until which others wait for the load of a chunk, by its key.
        jobs: for the workers, of this step.
        claims: small ones, until the step shows of which kind they are.
        ended_early: pinned slots of loads whose requests finished meanwhile.
        failed: requests of whose loads under way a failure is known.
    """

    def __init__(
        self,
        index: HostIndex,
        requests: dict[str, RequestState],
        prefetch: Prefetcher,
        states: States,
        layout: Layout,
        counters: Counter[str],
        sync: SyncLoads,
        *,
        deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.sync = sync
        self.loading: dict[bytes, float] = {}
        self.jobs: list[LoadJob] = []
        self.claims: list[tuple[RequestState, Sequence[Sequence[int]], int]] = []
        self.ended_early: dict[str, list[Entry]] = {}
        self.failed: set[str] = set()
        self._index = index
        self._requests = requests
        self._prefetch = prefetch
        self._states = states
        self._layout = layout
        self._tables = layout.tables()
        self._counters = counters
        self._deadline_s = deadline_s
        self._clock = clock

    def is_small(self, num_chunks: int) -> bool:
        """Return whether a load of so many chunks is part of the step that needs it. Pure."""
        return num_chunks * self._index.pool.shape.payload_nbytes <= self.sync.sync_nbytes

    def awaits(self, key: bytes, now: float) -> bool:
        """Return whether a request is to wait for another's load of a chunk. Pure."""
        return self.loading.get(key, 0.0) > now

    def claim(self, state: RequestState, block_ids: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Load the last ``num_tokens`` tokens of the blocks that vLLM has given a request."""
        if self.is_small(-(-num_tokens // self._layout.chunk_tokens)):
            self.claims.append((state, block_ids, num_tokens))
        else:
            self.plan(state, block_ids, num_tokens)

    def plan_claims(self, scheduler_output: Any) -> None:
        """Plan the small loads as vLLM took their claims: for this step, or for a request that waits for them."""
        claims, self.claims = self.claims, []
        if not claims:
            return
        steps = dict(scheduled(scheduler_output))
        for state, block_ids, num_tokens in claims:
            end = steps.get(state.request.request_id)
            if end is None:
                self.plan(state, block_ids, num_tokens)
                continue
            self.plan(state, [ids[: -(-end // self._layout.block_tokens)] for ids in block_ids], num_tokens)
            self._take_as_sync(state)

    def plan(self, state: RequestState, block_ids: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Pin the slots of the claimed tokens and queue their copy to the GPU."""
        self._prefetch.apply()  # not what an operator dropped just now: the claim was made before that
        claims = list(RequestBlocks(self._layout, self._tables, block_ids).claimed(num_tokens))
        entries, pieces = [], []
        for chunk, _, spans in claims:
            entry = self._index.peek(state.keys[chunk])
            assert entry is not None and entry.usable, "a claimed chunk is not in the host pool"
            pieces.append(Piece.of(entry.slot, spans))
            entries.append(entry)
        assert self._states.there(entries[-1]), "a claim ends with a chunk without recurrent state"
        for entry, claim in zip(entries, claims, strict=True):
            source = self._index.used(entry)
            self._counters[f"{source}_hits"] += 1
            if state.outcome is not None:
                state.outcome.loads(source, claim.num_tokens)
        wait_until = self._clock() + self._deadline_s
        for entry in entries:
            self._index.pin(entry)
            self.loading.setdefault(entry.key, wait_until)  # a second load of it makes nobody wait any longer
        self._index.touch(state.keys[: claims[-1].chunk + 1])
        self._prefetch.end(state, State.LOADING)
        state.load = entries
        self.jobs.append(LoadJob(state.request.request_id, tuple(pieces)))

    def take(self) -> list[LoadJob]:
        """Return this step's jobs, and begin the next step's."""
        jobs, self.jobs = self.jobs, []
        return jobs

    def reported(self, loaded: set[str], report: TierKVWorkerMetadata | None) -> None:
        """Take note of the loads that have ended."""
        if report is not None:
            self.failed |= report.failed_loads  # a rank may tell before the load has ended on all
        for req_id in loaded:
            self._ended(req_id, req_id in self.failed)
            self.failed.discard(req_id)
        if report is None:
            return
        self._counters["load_nbytes"] += report.load_nbytes
        for req_id, entries, failed in self.sync.ended(report):
            self._unpin(entries)
            if failed:
                self._has_failed(req_id)

    def request_finished(self, state: RequestState) -> None:
        """Let a load under way go on until the workers report it."""
        if state.load is not None:
            self.ended_early[state.request.request_id] = state.load

    def dump(self) -> dict[str, Any]:
        """Return the state as plain values, for tests that compare it."""
        return {
            "loading": dict(self.loading),
            "ended_loads": {req_id: [e.key for e in entries] for req_id, entries in self.ended_early.items()},
            "failed_loads": set(self.failed),
            "loads": list(self.jobs),
            "sync_loads": ([(state.request.request_id, num) for state, _, num in self.claims], self.sync.dump()),
        }

    def _take_as_sync(self, state: RequestState) -> None:
        """Make the load that was just planned a part of this step, of which vLLM expects no report."""
        job, entries = self.jobs.pop(), state.load or []
        state.load = None
        if state.plan is not None:
            state.plan.to(State.DONE)
        for entry in entries:
            self.loading.pop(entry.key, None)  # who comes later finds it on the GPU
        self.jobs.append(replace(job, sync_id=self.sync.started(job.req_id, entries)))

    def _ended(self, req_id: str, failed: bool) -> None:
        state = self._requests.get(req_id)
        entries = self.ended_early.pop(req_id, None)
        if entries is None and state is not None:
            entries, state.load = state.load, None
            if state.plan is not None and state.plan.state is State.LOADING:
                state.plan.to(State.DONE)
        for entry in entries or ():
            self.loading.pop(entry.key, None)
        self._unpin(entries or ())
        if failed:
            self._has_failed(req_id)

    def _unpin(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._index.unpin(entry)

    def _has_failed(self, req_id: str) -> None:
        """Take note that a request's load failed: it is never offered one again."""
        self._counters["load_failures"] += 1
        state = self._requests.get(req_id)
        if state is not None:
            state.no_load = True
            if state.outcome is not None:
                state.outcome.load_failed()
