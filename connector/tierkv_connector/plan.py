"""Plans: the prefetch for one request, as an explicit state machine. Pure: no I/O, the clock is an argument.

::

    state      waits for                                   next
    ---------  ------------------------------------------  -------------------------------------------------------
    MATCHING   the server's answer to MATCH                FETCHING (something is stored), READY (nothing is, or
                                                           the server is out), LOADING, DONE (the request ended)
    FETCHING   chunks on their way into slots              READY (all have arrived or are missed), LOADING, DONE
    READY      vLLM to use what is in the host pool        MATCHING (it starts), LOADING (what is there is claimed),
                                                           DONE (refused, or the request ended)
    LOADING    the workers' copies to the GPU              DONE
    DONE       nothing                                     LOADING (preempted and claimed again in one step)

A plan begins READY; a request that is planned again gets a new one. A plan never answers vLLM: the host index does.
While a plan is MATCHING or FETCHING within its deadline, vLLM is told to ask again. A plan that awaits what another
engine is about to store stays FETCHING until all of it has been found, or is READY where it could not start yet.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

from tierkv.client import MatchReply
from tierkv.hostindex import Entry, Fetch


class State(Enum):
    """What a request's plan is doing."""

    MATCHING = auto()
    FETCHING = auto()
    READY = auto()
    LOADING = auto()
    DONE = auto()


TRANSITIONS: dict[State, frozenset[State]] = {
    State.MATCHING: frozenset({State.FETCHING, State.READY, State.LOADING, State.DONE}),
    State.FETCHING: frozenset({State.READY, State.LOADING, State.DONE}),
    State.READY: frozenset({State.LOADING, State.DONE, State.MATCHING}),
    State.LOADING: frozenset({State.DONE}),
    State.DONE: frozenset({State.LOADING}),
}


class Plan:
    """The prefetch for one request.

    Attributes:
        state: what it is doing.
        lane: the connection that its commands keep to.
        deadline: monotonic time until which vLLM is asked to wait.
        start, stop: the chunks it is about.
        gpu_run: leading chunks that were on the GPU when it was made.
        match: the outstanding MATCH, or None.
        next: first chunk that has not been asked for by FETCH.
        fetches: FETCH commands whose results have not been taken note of.
        shared_waits: entries that another plan's fetch fills and that this one wants.
        leased: entries that this plan keeps from eviction.
        awaited: another engine is said to store the chunks before this one in a moment; 0: nothing is awaited.
        queued: it waits for room in the budgets, and its request for it (as it awaits chunks).
        again: the outstanding question for the rest of what is awaited, or None.
        ask_at, pause_s: when that may be asked next, and how long after the one before.
        denied: the filter of stored keys said last that the next of them is not there.
    """

    __slots__ = (
        "again",
        "ask_at",
        "awaited",
        "deadline",
        "denied",
        "fetches",
        "gpu_run",
        "lane",
        "leased",
        "match",
        "next",
        "pause_s",
        "queued",
        "shared_waits",
        "start",
        "state",
        "stop",
    )

    def __init__(self, start: int, stop: int, gpu_run: int) -> None:
        self.state = State.READY
        self.lane = 0
        self.deadline = 0.0
        self.start = start
        self.stop = stop
        self.gpu_run = gpu_run
        self.match: MatchReply | None = None
        self.next = start
        self.fetches: list[Fetch] = []
        self.shared_waits: list[Entry] = []
        self.leased: list[Entry] = []
        self.awaited = 0
        self.queued = False
        self.again: MatchReply | None = None
        self.ask_at = self.pause_s = 0.0
        self.denied = False

    def to(self, state: State) -> None:
        """Move to ``state``. A transition that the table lacks is a fault of ours."""
        if state is self.state:
            return
        assert state in TRANSITIONS[self.state], f"a plan went from {self.state.name} to {state.name}"
        self.state = state

    def await_chunks(self, awaits: tuple[int, float] | None, now: float) -> None:
        """Wait for what another engine is about to store: so many chunks of the chain, up to a monotonic time."""
        if awaits is not None and now < awaits[1]:
            self.awaited = min(awaits[0], self.stop)
            self.deadline = awaits[1]
        if self.awaited <= self.start:
            self.awaited, self.deadline = 0, 0.0

    def stop_awaiting(self) -> int:
        """Await nothing any more, and return how many of the awaited chunks were not found."""
        matched = len(self.match.letters or b"") if self.match is not None else 0
        awaited, self.awaited = self.awaited, 0
        return max(0, awaited - self.start - matched)

    def pending(self, now: float) -> bool:
        """Return whether vLLM should wait for it: something is on its way, within the deadline. Pure."""
        if self.queued and self.state is State.READY:
            return now < self.deadline
        if self.state not in (State.MATCHING, State.FETCHING) or now >= self.deadline:
            return False
        match = self.match
        if match is not None and match.letters is None:
            return True
        if any(e.state == Entry.FILLING and e.fetch is not None and e.fetch.results is None for e in self.shared_waits):
            return True
        if self.failed():
            return False
        matched = len(match.letters or b"") if match is not None else 0
        if self.start + matched < min(self.awaited, self.stop):
            return True
        return any(f.results is None for f in self.fetches) or self.next < min(self.stop, self.start + matched)

    def failed(self) -> bool:
        """Return whether a chunk that was asked for is missing: what comes after it is of no use.

        Results of a plan come in order: what is still on its way comes after it.
        """
        return any(f.results is not None and not _all_hits(f.results, len(f.entries)) for f in self.fetches)

    def dump(self) -> dict[str, Any]:
        """Return the plan as plain values, for tests that compare it."""
        return {
            "state": self.state.name,
            "lane": self.lane,
            "deadline": self.deadline,
            "chunks": (self.start, self.next, self.stop, self.gpu_run),
            "match": self.match and (self.match.letters,),
            "fetches": [([e.slot for e in f.entries], f.results, f.released, f.applied) for f in self.fetches],
            "shared_waits": [e.key for e in self.shared_waits],
            "leased": [(e.key, e.slot) for e in self.leased],
            "awaited": (self.awaited, self.queued, self.again and (self.again.letters,), self.ask_at, self.denied),
        }


def _all_hits(results: bytes, count: int) -> bool:
    return len(results) == count and not results.strip(b"ds")
