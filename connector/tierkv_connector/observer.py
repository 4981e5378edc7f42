"""What is told about the scheduler half: metrics, KV events, and the trace.

None of it decides anything, and a fault in it ends it alone: serving and caching go on.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from tierkv.hostindex import Entry
from tierkv.messages import FROM_DISK
from tierkv_connector.events import EventQueue, events_wanted
from tierkv_connector.metadata import TierKVWorkerMetadata
from tierkv_connector.stats import Collector, TierKVStats
from tierkv_connector.trace import Tracer, trace_wanted

if TYPE_CHECKING:
    from tierkv_connector.scheduler import Scheduler

logger = logging.getLogger("tierkv")

T = TypeVar("T")


def _source(entry: Entry) -> str:
    """Return the tier that a usable chunk came from, also where the half has not taken note of its arrival yet."""
    if entry.state == Entry.FILLING and entry.fetch is not None and entry.fetch.results:
        return "disk" if entry.fetch.results[entry.fetch_index] == FROM_DISK[0] else "shared"
    return entry.source


class Observer:
    """Told by the connector what vLLM calls, after the scheduler half has done it.

    Args:
        sched: the half.
        vllm_config: vLLM's.
        hash_tokens: tokens a block hash of vLLM's.
    """

    def __init__(self, sched: Scheduler, vllm_config: Any, hash_tokens: int) -> None:
        self._sched = sched
        self._failed = False
        self._asked = ("", 0)
        self._claim = ("", Counter[str]())
        self._collector = Collector(sched)
        self._tracer = Tracer(sched) if trace_wanted() else None
        self._events = None
        if events_wanted(vllm_config):
            self._events = EventQueue(sched.requests, sched.layout.chunk_tokens, hash_tokens)
            sched.index.watcher = self._events

    def added(self, request: Any) -> None:
        """A request has come."""

        def note() -> None:
            if request.request_id in self._sched.requests:
                self._collector.looked_up()
            if self._tracer:
                self._tracer.added(request)

        self._try(note, None)

    def asked(self, request: Any, num_computed_tokens: int) -> None:
        """VLLM asks what can be loaded past so many tokens; where it takes the answer, the next call is that."""
        self._asked = request.request_id, num_computed_tokens

    def admitting(self, request: Any, num_external_tokens: int) -> None:
        """A request has blocks, and is to load so many tokens: told before the half plans that."""

        def note() -> None:
            self._claim = request.request_id, self._split(request, num_external_tokens)

        self._try(note, None)

    def admitted(self, request: Any, num_external_tokens: int) -> None:
        """The half has planned that load, or will with the step."""

        def note() -> None:
            num_tokens = self.sources(request, num_external_tokens)
            if num_external_tokens:
                self._collector.loads(num_tokens)
            if self._tracer:
                end = (self._asked[1] + num_external_tokens) // self._sched.layout.chunk_tokens
                self._tracer.admitted(request, num_external_tokens, num_tokens, end)

        self._try(note, None)

    def _split(self, request: Any, num_external_tokens: int) -> Counter[str]:
        """Return how many of the tokens past those that were asked about each tier gives."""
        found: Counter[str] = Counter()
        state, (req_id, begin) = self._sched.requests.get(request.request_id), self._asked
        if state is None or req_id != request.request_id:
            return found
        size, end = self._sched.layout.chunk_tokens, begin + num_external_tokens
        for chunk in range(begin // size, -(-end // size)):
            entry = self._sched.index.peek(state.keys[chunk])
            if entry is not None:
                found[_source(entry)] += min(end, (chunk + 1) * size) - max(begin, chunk * size)
        return found

    def stepped(self) -> None:
        """A step has been planned."""

        def note() -> None:
            self._collector.stepped()
            if self._tracer:
                self._tracer.looked()

        self._try(note, None)

    def ended(self, loaded: set[str], report: TierKVWorkerMetadata | None) -> None:
        """Loads and copies have ended."""

        def note() -> None:
            if report is not None:
                self._collector.copied(report.load_times, report.store_times)
            if self._tracer:
                self._tracer.loaded(loaded, report.failed_loads if report is not None else set())

        self._try(note, None)

    def finished(self, request: Any) -> None:
        """A request has ended."""
        if self._tracer:
            self._try(lambda: self._tracer.finished(request) if self._tracer else None, None)

    def sources(self, request: Any, num_external_tokens: int) -> Counter[str]:
        """Return how many of a load's tokens each tier gave; they are ``num_external_tokens`` in all.

        What the load's plan does not account for is counted as of the host pool, out of which all of it is loaded.
        """
        req_id, num_tokens = self._claim
        found = Counter(num_tokens) if req_id == request.request_id else Counter()
        found["host"] += num_external_tokens - found.total()
        return +found

    def take_events(self) -> list[Any]:
        """Return the KV events since the last call."""
        return self._try(self._events.take, []) if self._events else []

    def take_stats(self) -> TierKVStats | None:
        """Return what was counted since the last call."""
        return self._try(self._collector.take, None)

    def _try(self, action: Callable[[], T], default: T) -> T:
        if self._failed:
            return default
        try:
            return action()
        except Exception:
            self._failed = True
            self._sched.index.watcher = None
            logger.exception("TierKV's metrics, events and traces end here; caching goes on")
            return default
