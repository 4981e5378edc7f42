"""``TIERKV_TRACE=1``: log lines that follow each request.

They say what was planned, matched, fetched, claimed and loaded, and why it went no further. The tracer looks at the
scheduler half once a step and changes nothing, so times are as vLLM's steps saw them.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tierkv.hostindex import Fetch
from tierkv.messages import FROM_DISK, FROM_SHARED
from tierkv_connector.plan import Plan, State
from tierkv_connector.requests import RequestState

if TYPE_CHECKING:
    from tierkv_connector.scheduler import Scheduler

logger = logging.getLogger("tierkv")

VARIABLE = "TIERKV_TRACE"

_TIER_OF = {FROM_DISK[0]: "disk", FROM_SHARED[0]: "shared"}


def trace_wanted(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether requests are to be traced."""
    return env.get(VARIABLE, "") not in ("", "0")


class _Followed:
    """What has been said of a request."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.started = 0.0
        self.matched = False
        self.arrived = False
        self.admitted = False
        self.fetches: dict[int, Fetch] = {}
        self.load_began: float | None = None
        self.load_tokens = 0


class Tracer:
    """Follows requests.

    Args:
        sched: the scheduler half.
        clock: monotonic seconds, the half's.
        say: takes a line.
    """

    def __init__(
        self,
        sched: Scheduler,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._sched = sched
        self._clock = clock
        self._log = say or logger.info
        self._followed: dict[str, _Followed] = {}

    def added(self, request: Any) -> None:
        """A request has come."""
        if request.request_id not in self._sched.requests:
            self._say(request.request_id, "keeps to vLLM's own cache: it has no whole chunk, or its kind is not served")
            return
        self._followed[request.request_id] = _Followed()
        self.looked()

    def looked(self) -> None:
        """Look at every request and say what is new."""
        for req_id, followed in self._followed.items():
            state = self._sched.requests.get(req_id)
            if state is None or state.plan is None:
                continue
            if state.plan is not followed.plan:
                self._planned(req_id, state, followed)
            self._progress(req_id, state.plan, followed)

    def admitted(self, request: Any, num_external_tokens: int, num_tokens: Counter[str], end: int) -> None:
        """VLLM has given the request blocks: it loads so many tokens, up to chunk ``end``, or computes."""
        state, followed = self._sched.requests.get(request.request_id), self._followed.get(request.request_id)
        if state is None or followed is None or (followed.admitted and not num_external_tokens):
            return
        followed.admitted = True
        if state.plan is not None:
            self._progress(request.request_id, state.plan, followed)
        if num_external_tokens:
            what = f"claimed {num_external_tokens} tokens ({_counts(num_tokens)}), up to chunk {end}"
            if state.load:
                followed.load_began, followed.load_tokens = self._clock(), num_external_tokens
            else:  # of which vLLM is told nothing more
                what += ", loaded with the step"
        else:
            end = followed.plan.gpu_run if followed.plan is not None else 0
            what = "claimed nothing"
        self._say(request.request_id, f"{what}; stopped there: {self._why(state, followed, end)}")

    def loaded(self, req_ids: set[str], failed: set[str]) -> None:
        """Loads have ended."""
        for req_id in req_ids:
            followed = self._followed.get(req_id)
            if followed is None or followed.load_began is None:
                continue
            took = _ms(self._clock() - followed.load_began)
            followed.load_began = None
            if req_id in failed:
                self._say(req_id, f"the load failed after {took}: vLLM computes, or fails the request")
            else:
                self._say(req_id, f"loaded {followed.load_tokens} tokens in {took}")

    def finished(self, request: Any) -> None:
        """A request has ended."""
        if self._followed.pop(request.request_id, None) is not None:
            self._say(request.request_id, "finished")

    def _planned(self, req_id: str, state: RequestState, followed: _Followed) -> None:
        plan = state.plan
        assert plan is not None
        followed.plan, followed.started = plan, self._clock()
        followed.matched = followed.arrived = plan.state is State.READY
        followed.admitted = False
        followed.fetches.clear()
        what = f"planned chunks {plan.start} to {plan.stop} of {len(state.keys)} ({plan.gpu_run} on the GPU, "
        what += f"{max(0, plan.start - plan.gpu_run)} in the host pool)"
        if plan.state is not State.READY:
            what += f", asking the store server, at most {self._sched.config.deadline_s:g} s"
        elif req_id in self._sched.prefetch.unstarted:
            what += ", waiting for the budget of prefetches"
        self._say(req_id, what)

    def _progress(self, req_id: str, plan: Plan, followed: _Followed) -> None:
        for fetch in plan.fetches:
            followed.fetches[id(fetch)] = fetch
        took = _ms(self._clock() - followed.started)
        letters = plan.match.letters if plan.match is not None else None
        if not followed.matched and letters is not None:
            followed.matched = True
            self._say(req_id, f"matched {len(letters)} chunks ({_tiers(letters)}) after {took}")
        if followed.matched and not followed.arrived and not plan.pending(self._clock()):
            followed.arrived = True
            asked = sum(len(fetch.entries) for fetch in followed.fetches.values())
            came = b"".join(fetch.results or b"" for fetch in followed.fetches.values())
            self._say(req_id, f"fetched {_num(came)} of {asked} chunks ({_tiers(came)}) after {took}")

    def _why(self, state: RequestState, followed: _Followed, end: int) -> str:
        """Return why no more than the chunks before ``end`` are claimed."""
        sched, plan = self._sched, followed.plan
        last = (state.request.num_tokens - 1) // sched.layout.chunk_tokens
        if end >= min(len(state.keys), last):
            return "the prompt has no further whole chunk before its last token"
        if state.request.skip_reading_prefix_cache:
            return "the request may not read the cache"
        if state.no_load:
            return "a load of it has failed"
        if state.epoch != sched._epoch:
            return "the cache was reset since it came"
        if not state.tiers:
            return "its hints allow no tier"
        if plan is None or plan.match is None:
            return self._why_not_asked(state, end)
        letters = plan.match.letters
        if letters is None:
            return "the store server had not answered"
        if plan.start + len(letters) <= end:
            return "no more is stored"
        if plan.failed():
            return "a chunk that was stored did not arrive"
        if self._clock() >= plan.deadline:
            return f"the deadline of {sched.config.deadline_s:g} s"
        if plan.stop <= end:
            return "the host pool had no slot for more"
        return "the chunk is not in the host pool"

    def _why_not_asked(self, state: RequestState, end: int) -> str:
        client = self._sched.client
        if not state.shareable:
            return "its keys are this engine's own, and no more is in the host pool"
        if state.tiers <= {"host"}:
            return "its hints allow the host pool only"
        if client is None or not client.connected():
            return "there is no store server, and no more is in the host pool"
        if client.denies(state.keys[end]):
            return "the filter of stored keys says that no more is stored"
        return "no prefetch was started"

    def _say(self, req_id: str, what: str) -> None:
        self._log(f"trace {req_id}: {what}")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _num(letters: bytes) -> int:
    return sum(letter in _TIER_OF for letter in letters)


def _tiers(letters: bytes) -> str:
    return _counts(Counter(_TIER_OF[letter] for letter in letters if letter in _TIER_OF))


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {num}" for name, num in counts.items()) or "none"
