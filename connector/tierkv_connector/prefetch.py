"""Prefetches: asks the store server what it has for the plans, leases slots for it and has it fetched into them.

Runs on vLLM's scheduler thread and does no I/O on it: commands are queued for the store client's thread. Plans start in
the order in which vLLM has their requests, while the budgets of all plans have room.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from tierkv.client import StoreClient
from tierkv.config import COMMAND_NBYTES, MAX_PLANS, PLAN_NBYTES
from tierkv.hostindex import Entry, Fetch, HostIndex
from tierkv.keys import ANCHOR_SPAN
from tierkv.messages import FROM_DISK, FROM_SHARED
from tierkv_connector.costs import CostGate
from tierkv_connector.handoff import FIRST_PAUSE_S, ask_again
from tierkv_connector.hints import TIERS
from tierkv_connector.membership import Membership
from tierkv_connector.plan import Plan, State
from tierkv_connector.requests import RequestState

logger = logging.getLogger("tierkv")


class Prefetcher:
    """The plans of all requests.

    Args:
        index: the host index.
        membership: has the client of the store server.
        requests: those of the engine, by id.
        counters: the engine's.
        costs: says how much of a plan is worth fetching; None: all of it.
        chunk_tokens: tokens of a chunk.
        deadline_s: vLLM is asked to wait for a plan this long.
        clock: monotonic seconds.

    Attributes:
        plans: started and not over.
        unstarted: requests whose plans wait for room in the budgets, in vLLM's order.
        fetching: FETCH commands whose slots the store server may still write, and those not taken note of.
        fetch_nbytes: of the slots of these.
        num_leased: slots that plans keep from eviction.
    """

    def __init__(
        self,
        index: HostIndex,
        membership: Membership,
        requests: dict[str, RequestState],
        counters: Counter[str],
        costs: CostGate | None,
        *,
        chunk_tokens: int,
        deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.plans: dict[str, Plan] = {}
        self.unstarted: dict[str, RequestState] = {}
        self.fetching: list[Fetch] = []
        self.fetch_nbytes = 0
        self.num_leased = 0
        self._index = index
        self._membership = membership
        self._requests = requests
        self._counters = counters
        self._costs = costs
        self._chunk_tokens = chunk_tokens
        self._payload_nbytes = index.pool.shape.payload_nbytes
        self._num_slots = index.pool.shape.num_slots
        self._deadline_s = deadline_s
        self._clock = clock

    @property
    def client(self) -> StoreClient | None:
        """The client of the store server; None where there is none (yet)."""
        return self._membership.client

    def begin(self, state: RequestState) -> None:
        """Start a request's plan, or have it wait for room; leave it where the server is known to have nothing."""
        plan = state.plan
        assert plan is not None
        if self.client is None or not self.client.connected():
            return
        plan.await_chunks(state.awaits, self._clock())
        if not plan.awaited and self.client.denies(state.keys[plan.start]):
            self._counters["filtered"] += 1
            return
        if self._may_start():
            self._start(state, plan)
        else:
            plan.queued = bool(plan.awaited)
            self.unstarted[state.request.request_id] = state

    def put_first(self, state: RequestState) -> None:
        """Let a request's plan, if it waits for room, be the next to start."""
        if (req_id := state.request.request_id) in self.unstarted:
            self.unstarted = {req_id: state} | self.unstarted

    def advance(self, again: Callable[[RequestState], None]) -> None:
        """Send what the plans may fetch now, and end the plans for which nothing more will come.

        Args:
            again: plans a request once more, now that there is room for it.
        """
        now = self._clock()
        for req_id, plan in list(self.plans.items()):
            state = self._requests[req_id]
            letters = plan.match.letters if plan.match else b""
            # What comes after a chunk that another plan's fetch did not bring is of no use.
            plan.stop = min([plan.stop, *(e.position for e in plan.shared_waits if e.state == Entry.GONE)])
            if letters is not None and plan.state is State.MATCHING:
                if not state.tiers >= TIERS:
                    plan.stop = min(plan.stop, plan.start + _allowed(letters, state.tiers))
                if self._costs is not None and not plan.awaited:
                    self._cut(plan, letters[: plan.stop - plan.start], self._costs)
                plan.to(State.FETCHING if letters or plan.fetches or plan.awaited else State.READY)
            if plan.awaited and self.client is not None:
                if ask_again(plan, state, self.client, now):
                    self._counters["asked_again"] += 1
                letters = plan.match.letters if plan.match else b""
            if letters and plan.state is State.FETCHING and now < plan.deadline and not plan.failed():
                while self._fetch_next(state, plan, min(plan.stop, plan.start + len(letters))):
                    pass
            if not plan.failed():  # else it stays so: what comes after a missing chunk is of no use
                plan.fetches = [f for f in plan.fetches if not f.applied]
            plan.shared_waits = [e for e in plan.shared_waits if e.state == Entry.FILLING]
            if not plan.pending(now):
                del self.plans[req_id]
                plan.to(State.READY)
        while self.unstarted and self._may_start():
            again(self.unstarted.pop(next(iter(self.unstarted))))

    def end(self, state: RequestState, then: State = State.DONE) -> None:
        """End the prefetch and give its leases back; what has arrived stays in the host pool as any other."""
        plan = state.plan
        if plan is None:
            return
        for entry in plan.leased:
            self._index.unpin(entry)
        self.num_leased -= len(plan.leased)
        plan.leased = []
        self.plans.pop(state.request.request_id, None)
        self.unstarted.pop(state.request.request_id, None)
        plan.to(then)

    def apply(self) -> None:
        """Take note in the index of the fetches that have ended."""
        still = []
        for fetch in self.fetching:
            if fetch.results is not None and not fetch.applied:
                self._apply_fetch(fetch)
            if not fetch.applied or not fetch.released:
                still.append(fetch)
            else:
                self.fetch_nbytes -= len(fetch.entries) * self._payload_nbytes
                for entry in fetch.entries:
                    self._index.stopped(entry)
        self.fetching = still

    def dump(self) -> dict[str, Any]:
        """Return the state as plain values, for tests that compare it."""
        return {
            "plans": list(self.plans),
            "unstarted": list(self.unstarted),
            "fetching": [([e.slot for e in f.entries], f.results, f.released, f.applied) for f in self.fetching],
            "fetch_nbytes": self.fetch_nbytes,
            "num_leased": self.num_leased,
        }

    def _may_start(self) -> bool:
        return len(self.plans) < MAX_PLANS and self.fetch_nbytes < PLAN_NBYTES

    def _start(self, state: RequestState, plan: Plan) -> None:
        assert self.client is not None
        plan.to(State.MATCHING)
        plan.lane = self.client.next_lane()
        plan.deadline = plan.deadline or self._clock() + self._deadline_s
        self.plans[state.request.request_id] = plan
        self._counters["plans"] += 1
        plan.match = self.client.match(
            plan.lane, plan.start, state.anchor(plan.start), state.keys[plan.start : plan.stop]
        )
        plan.ask_at, plan.pause_s = self._clock() + FIRST_PAUSE_S, FIRST_PAUSE_S
        doubtful = self._costs is not None and self._costs.doubtful
        if state.tiers >= TIERS and not plan.awaited and not doubtful:  # else the answer says what is fetched
            self._fetch_next(state, plan, plan.stop)  # the first chunks without waiting for the answer

    def _cut(self, plan: Plan, letters: bytes, costs: CostGate) -> None:
        """Leave out the end of a plan that would be computed sooner than fetched."""
        worth = costs.worth(letters)
        if worth < len(letters):
            self._counters["cut"] += len(letters) - worth
            logger.debug("a plan of %d chunks is cut to %d, which computing does not overtake", len(letters), worth)
            plan.stop = min(plan.stop, plan.start + worth)

    def _fetch_next(self, state: RequestState, plan: Plan, stop: int) -> bool:
        """Lease slots for the next chunks and have them fetched; False where nothing was (more) to be done.

        One command: at most ``COMMAND_NBYTES``, consecutive chunks with one anchor, within the budget of all plans.
        """
        assert self.client is not None
        if not self.client.connected():
            plan.stop = plan.next  # nothing more will come: take no slots for it
            return False
        payload_nbytes = self._payload_nbytes
        first = plan.next
        entries: list[Entry] = []
        while plan.next < stop:
            i = plan.next
            key = state.keys[i]
            if (there := self._index.get(key)) is not None:
                if entries:
                    break
                if not there.usable and there.fetch is not None:
                    plan.shared_waits.append(there)
                plan.next = first = i + 1
                continue
            nbytes = (len(entries) + 1) * payload_nbytes
            if entries and (nbytes > COMMAND_NBYTES or i % ANCHOR_SPAN == 0):
                break
            if self.fetch_nbytes + nbytes > max(PLAN_NBYTES, payload_nbytes):
                break
            entry = None
            if 2 * self.num_leased < self._num_slots:
                parent, tokens = state.parent(i), self._chunk_tokens
                keep = self._index.admits(key, parent)
                entry = self._index.reserve(key, parent, i, tokens, state.public_anchor(i), state.tenant, keep=keep)
            if entry is None:
                plan.stop = i  # the pool is full of what others hold: claim what arrives, compute the rest
                break
            self._index.pin(entry)
            plan.leased.append(entry)
            self.num_leased += 1
            entries.append(entry)
            plan.next = i + 1
        if not entries:
            return False
        self._send_fetch(state, plan, first, entries)
        return True

    def _send_fetch(self, state: RequestState, plan: Plan, first: int, entries: list[Entry]) -> None:
        assert self.client is not None
        fetch = Fetch(entries)
        for i, entry in enumerate(entries):
            entry.fetch, entry.fetch_index = fetch, i
        plan.fetches.append(fetch)
        self.fetching.append(fetch)
        self.fetch_nbytes += len(entries) * self._payload_nbytes
        self.client.fetch(plan.lane, first, state.anchor(first), fetch)

    def _apply_fetch(self, fetch: Fetch) -> None:
        fetch.applied = True
        results = fetch.results or b""
        if self._costs is not None:
            self._costs.note_fetch(results, fetch.seconds)
        for i, entry in enumerate(fetch.entries):
            letter = results[i : i + 1]
            if letter == b"d":
                self._index.filled(entry, "disk")
            elif letter == b"s":
                self._index.filled(entry, "shared")
            else:
                self._index.drop(entry, filling=True)  # its slot is free once nobody can write it
                entry.fetch = None


def _allowed(letters: bytes, tiers: frozenset[str]) -> int:
    """Return how many of the chunks that a MATCH found are, from the first on, in a tier that may be loaded from."""
    names = {FROM_DISK[0]: "disk", FROM_SHARED[0]: "shared"}
    return next((i for i, letter in enumerate(letters) if names.get(letter) not in tiers), len(letters))
