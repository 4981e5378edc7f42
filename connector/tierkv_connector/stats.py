"""What vLLM's own Prometheus endpoint, and its log, show of TierKV.

The scheduler half counts; once a step vLLM takes what was counted since the last time, as a :class:`TierKVStats`, to
the process that serves ``/metrics``. ``docs/metrics.md`` says what each metric is for.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

if TYPE_CHECKING:
    from tierkv_connector.scheduler import Scheduler

PREFIX = "vllm:tierkv_"
SOURCES = ("host", "disk", "shared")

#: Seconds of a copy between GPU and host pool, and of a prefetch: from a block over a PCIe link to a deadline.
_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
#: Observations of one kind that wait to be taken: an engine may run without anybody who takes them.
_MAX_OBSERVATIONS = 4096

#: Counters of the engine (docs/metrics.md, "engines[]") that say why a chunk went no further down.
_DROPS = (
    "not_spilled",
    "not_sent",
    "not_saved",
    "stores_stale",
    "stores_dropped",
    "stores_failed",
    "stores_lost",
)


class Metric(NamedTuple):
    """A metric.

    Attributes:
        kind: ``"counter"``, ``"gauge"`` or ``"histogram"``.
        text: its help.
        label, values: its label, besides vLLM's own, and what that may be.
    """

    kind: str
    text: str
    label: str = ""
    values: tuple[str, ...] = ("",)


METRICS = {
    "lookups": Metric("counter", "Requests that were looked up."),
    "loads": Metric("counter", "Loads, one a request and admission."),
    "load_failures": Metric("counter", "Loads that failed; their requests were computed, or failed (vLLM's policy)."),
    "chunks": Metric("counter", "Chunks that prompts needed beside what the GPU had.", "source", (*SOURCES, "missed")),
    "loaded_tokens": Metric("counter", "Tokens that vLLM was given instead of computing them.", "source", SOURCES),
    "loaded_bytes": Metric("counter", "Bytes of the payloads of chunks that were loaded.", "source", SOURCES),
    "load_bytes": Metric("counter", "Bytes copied from the host pool to the GPU."),
    "store_bytes": Metric("counter", "Bytes copied from the GPU to the host pool."),
    "dropped_chunks": Metric("counter", "Chunks that went no further down, by why.", "reason", _DROPS),
    "degraded_seconds": Metric("counter", "Seconds without a store server, although one is configured."),
    "connected": Metric("gauge", "1 while there is a store server."),
    "load_seconds": Metric("histogram", "Seconds that a request's copy to the GPU took."),
    "store_seconds": Metric("histogram", "Seconds that a chunk's copy from the GPU took."),
    "prefetch_seconds": Metric("histogram", "Seconds from a prefetch's start until nothing of it was on its way."),
}


def _key(name: str, value: str = "") -> str:
    return f"{name}:{value}" if value else name


@dataclass
class TierKVStats(KVConnectorStats):
    """What was counted in some time, as plain values that travel between processes.

    ``data``: ``sums`` and ``levels`` (a number a key), ``times`` (a list of seconds a key). A key is a metric's name,
    with its label's value behind a colon where it has one.
    """

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data: dict[str, Any] = {"sums": {}, "levels": {}, "times": {}}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add what was counted later, or elsewhere."""
        sums, times = self.data["sums"], self.data["times"]
        for key, number in other.data.get("sums", {}).items():
            sums[key] = sums.get(key, 0) + number
        for key, seconds in other.data.get("times", {}).items():
            times[key] = [*times.get(key, ()), *seconds]
        self.data["levels"].update(other.data.get("levels", {}))
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM's log says of it: what was counted, and for times their number and their mean."""
        found: dict[str, int | float] = {
            key: round(number, 3) if isinstance(number, float) else number for key, number in self.data["sums"].items()
        }
        for key, seconds in self.data["times"].items():
            found[f"{key} (count)"] = len(seconds)
            found[f"{key} (mean)"] = round(sum(seconds) / len(seconds), 6)
        return found

    def is_empty(self) -> bool:
        return not self.data["sums"] and not self.data["times"]


class TierKVPromMetrics(KVConnectorPromMetrics):
    """Our metrics at vLLM's endpoint: every one is there from the start, at zero.

    Args:
        vllm_config, metric_types, labelnames, per_engine_labelvalues: vLLM's.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        types = {
            "counter": metric_types[prometheus_client.Counter],
            "gauge": metric_types[prometheus_client.Gauge],
            "histogram": metric_types[prometheus_client.Histogram],
        }
        self._children: dict[tuple[int, str], Any] = {}
        for name, metric in METRICS.items():
            labels = [*labelnames, metric.label] if metric.label else labelnames
            options = {"buckets": _BUCKETS_S} if metric.kind == "histogram" else {}
            family = types[metric.kind](
                name=PREFIX + name, documentation=f"TierKV: {metric.text}", labelnames=labels, **options
            )
            for engine, values in per_engine_labelvalues.items():
                for value in metric.values:
                    words = [*values, value] if metric.label else values
                    self._children[engine, _key(name, value)] = family.labels(*words)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take what one engine counted."""
        for key, number in transfer_stats_data.get("sums", {}).items():
            if (child := self._children.get((engine_idx, key))) is not None:
                child.inc(number)
        for key, number in transfer_stats_data.get("levels", {}).items():
            if (child := self._children.get((engine_idx, key))) is not None:
                child.set(number)
        for key, seconds in transfer_stats_data.get("times", {}).items():
            if (child := self._children.get((engine_idx, key))) is not None:
                for value in seconds:
                    child.observe(value)


class Collector:
    """Counts in the scheduler half what :data:`METRICS` has.

    Args:
        sched: the half; its counters are read, and nothing of it is changed.
        clock: monotonic seconds.
    """

    def __init__(self, sched: Scheduler, clock: Callable[[], float] = time.monotonic) -> None:
        self._sched = sched
        self._clock = clock
        self._last: Counter[str] = Counter()
        self._own: Counter[str] = Counter()
        self._times: dict[str, list[float]] = {}
        self._prefetches: dict[str, float] = {}
        self._degraded_since: float | None = None

    def looked_up(self) -> None:
        """Note that a new request was looked up. Its prefetch may be over before the next step."""
        self._own["lookups"] += 1
        self._note_started()

    def loads(self, num_tokens: Counter[str]) -> None:
        """Note a load that was planned, and how many of its tokens each tier gave."""
        self._own["loads"] += 1
        for source, num in num_tokens.items():
            self._own[_key("loaded_tokens", source)] += num

    def copied(self, load_times: Sequence[float], store_times: Sequence[float]) -> None:
        """Note how long copies took, in seconds: one a request's load, one a chunk's store."""
        self._observe("load_seconds", load_times)
        self._observe("store_seconds", store_times)

    def stepped(self) -> None:
        """Note, once a step, which prefetches are under way and whether there is a store server."""
        now, plans = self._clock(), self._sched.prefetch.plans
        for req_id in self._prefetches.keys() - plans.keys():
            self._observe("prefetch_seconds", [now - self._prefetches.pop(req_id)])
        self._note_started()
        self._follow_degradation(now)

    def _note_started(self) -> None:
        deadline_s = self._sched.config.deadline_s
        for req_id, plan in self._sched.prefetch.plans.items():
            self._prefetches[req_id] = plan.deadline - deadline_s

    def take(self) -> TierKVStats | None:
        """Return what was counted since the last call; None where nothing was."""
        counts = self._counts()
        stats = TierKVStats()
        sums = {key: number - self._last[key] for key, number in counts.items() if number != self._last[key]}
        self._last = counts
        if not sums and not self._times:
            return None
        stats.data["sums"], stats.data["times"] = sums, self._times
        stats.data["levels"] = {"connected": int(self._connected())}
        self._times = {}
        return stats

    def _counts(self) -> Counter[str]:
        """Return everything that has been counted since the start, by key."""
        sched, payload_nbytes = self._sched, self._sched.pool.shape.payload_nbytes
        theirs = Counter(dict(sched.counters) | dict(sched.spill.queue.counters))
        client = sched.client
        if client is not None:
            theirs["not_saved"] = sched.spill.num_not_saved(client)
        counts = Counter(self._own)
        for source in SOURCES:
            counts[_key("chunks", source)] = theirs[f"{source}_hits"]
            counts[_key("loaded_bytes", source)] = theirs[f"{source}_hits"] * payload_nbytes
        counts[_key("chunks", "missed")] = theirs["missed"]
        counts["load_failures"] = theirs["load_failures"]
        counts["load_bytes"] = theirs["load_nbytes"]
        counts["store_bytes"] = theirs["spill_nbytes"]
        for reason in _DROPS:
            counts[_key("dropped_chunks", reason)] = max(theirs[reason], self._last[_key("dropped_chunks", reason)])
        return counts

    def _connected(self) -> bool:
        return self._sched.client is not None and self._sched.client.connected()

    def _follow_degradation(self, now: float) -> None:
        if self._degraded_since is not None:
            self._own["degraded_seconds"] += now - self._degraded_since  # type: ignore[assignment]
            self._degraded_since = None
        if self._sched.config.server != "off" and not self._connected():
            self._degraded_since = now

    def _observe(self, name: str, seconds: Sequence[float]) -> None:
        if seconds:
            known = self._times.setdefault(name, [])
            known += seconds[: _MAX_OBSERVATIONS - len(known)]
