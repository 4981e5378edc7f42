"""What engines' requests ask for: miss-ratio curves of the host pool and the disk, and what gave the chunks over time.

Engines report a sample of the keys (:mod:`tierkv.asked`). Two streams come of it:

- *host*: every key of every request. Each engine has a pool of its own, so each has a stack of its own, and the curve
  is the mean over the engines, for a pool of so many bytes in each.
- *disk*: the keys that are neither on the GPU nor in the host pool, of all engines together: they share the disk. A
  request that goes below uses all its chain: the disk keeps an ancestor at least as long as its descendants.

It is kept in memory: an engine that leaves leaves its counts, this server takes them along. Constant memory: a stack of
8,192 keys (3.5 MB at most) for the disk and one for each of 16 engines, the counts of 64 namespaces in each, and a day
of history.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

from tierkv.layout import Namespace
from tierkv.messages import SOURCES, AskedReport
from tierkv.payload import record_nbytes
from tierkv.reuse import HEAD_NBYTES, MAX_GROUPS, Counts, ReuseSampler
from tierkv_server.session import Session

#: Engines whose host pools are followed. Another takes the place of one that was silent so long, whose counts stay.
MAX_ENGINES = 16
SILENT_S = 600.0
#: Curves go from 1/64 of the present size to this many times of it, in steps of a quarter of a factor of two.
HORIZON = 8
_STEPS = range(-24, 13)
#: What was asked so long ago counts half.
HALF_LIFE_S = 86400.0
_DECAY_EVERY_S = 600.0
HISTORY_S = 60
NUM_HISTORY = 1440
#: Keys of one report at most; an engine's has about 4,096, and one request more.
MAX_HEADS = 1 << 17
_MAX_COUNT = 1 << 53


class _Host:
    """The host pool of one engine."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.heard = 0.0
        self.sampler = ReuseSampler(horizon=HORIZON * budget)


class ReuseTable:
    """Reuse distances and sources of what all engines of this server asked for. Thread-safe.

    Args:
        disk_budget: returns the disk's budget now.
        clock: seconds since 1970.
    """

    def __init__(self, disk_budget: Callable[[], int], clock: Callable[[], float] = time.time) -> None:
        self._disk_budget = disk_budget
        self._clock = clock
        self._since = self._decayed = clock()
        self._disk = ReuseSampler()
        self._hosts: OrderedDict[tuple[str, int, bytes], _Host] = OrderedDict()
        self._gone: dict[str, Counts] = {}  # of engines that are not followed any more
        self._sources = [0.0] * len(SOURCES)
        self._num_lost = 0
        self._history: deque[list[int]] = deque(maxlen=NUM_HISTORY)  # a minute, and chunks by source
        self._lock = threading.Lock()

    def note(self, session: Session, report: AskedReport) -> bytes:
        """Take an engine's report, and return the threshold of the sample that it is to report from now on.

        Costs about 12 µs a sampled key.

        Raises:
            ValueError: the report makes no sense.
        """
        _check(report)
        hello = session.hello
        group, threshold = session.ns_id.hex(), int.from_bytes(report.threshold, "big")
        payload_nbytes = hello.namespace.payload_nbytes
        host_nbytes, disk_nbytes = payload_nbytes, record_nbytes(payload_nbytes) + 16  # as LMDB's pages
        budget = self._disk_budget()
        with self._lock:
            self._decay()
            self._count(report)
            host = self._host((hello.engine_id, hello.pid, session.ns_id), hello.shape.num_slots * payload_nbytes)
            self._disk.stack.horizon = HORIZON * budget
            stacks = [self._disk.stack, *([host.sampler.stack] if host else ())]
            for stack in stacks:
                stack.lower(threshold)
            self._disk.asked(group, report.num_below)
            if host:
                host.sampler.asked(group, report.num_asked)
            for packed, num_below, below in report.requests:
                heads = [int.from_bytes(packed[i : i + HEAD_NBYTES], "big") for i in range(0, len(packed), HEAD_NBYTES)]
                if host:
                    host.sampler.request(group, host_nbytes, heads, len(heads))
                if below:
                    self._disk.request(group, disk_nbytes, heads, num_below)
            used: int = max(stack.threshold for stack in stacks)
        return used.to_bytes(HEAD_NBYTES, "big")

    def describe(self, namespaces: Mapping[bytes, Namespace]) -> dict[str, Any]:
        """Return curves and history as plain values (``docs/protocol.md``).

        Args:
            namespaces: those that there are, for their models' names.
        """
        budget = self._disk_budget()
        with self._lock:
            self._decay()
            by_source = dict(zip(SOURCES, self._sources, strict=True))
            above = by_source["gpu"] + by_source["host_hits"]
            below = by_source["disk_hits"] + by_source["shared_hits"] + by_source["missed"]
            models = {ns_id.hex(): namespace.model for ns_id, namespace in namespaces.items()}
            samplers = [host.sampler for host in self._hosts.values()]
            host = self._curves(samplers, dict(self._gone), self._host_budget(), models)
            disk = self._curves([self._disk], {}, budget, models)
            return {
                "since": self._since,
                "half_life_s": HALF_LIFE_S,
                "num_lost": self._num_lost,
                "tiers": [
                    {"name": "host", "num_engines": len(samplers), "found": _share(above, above + below)} | host,
                    {"name": "disk", "num_engines": len(samplers), "found": _share(by_source["disk_hits"], below)}
                    | disk,
                ],
                "history": self._describe_history(),
            }

    # -- under the lock

    def _host(self, name: tuple[str, int, bytes], budget: int) -> _Host | None:
        """Return what follows an engine's pool; None where too many are followed."""
        host, now = self._hosts.get(name), self._clock()
        if host is None:
            if len(self._hosts) >= MAX_ENGINES and not self._retire(now - SILENT_S):
                return None
            host = self._hosts[name] = _Host(budget)
        host.heard = now
        self._hosts.move_to_end(name)
        return host

    def _retire(self, before: float) -> bool:
        """Let go of the engine that was silent longest, if it was not heard since ``before``."""
        name, host = next(iter(self._hosts.items()))
        if host.heard > before:
            return False
        del self._hosts[name]
        for group, counts in host.sampler.groups().items():
            self._gone.setdefault(group, Counts()).merge(counts)
        while len(self._gone) > MAX_GROUPS:
            del self._gone[next(iter(self._gone))]
        return True

    def _host_budget(self) -> int:
        """Return the size of an engine's pool: the largest, where they differ."""
        return max((host.budget for host in self._hosts.values()), default=0)

    def _count(self, report: AskedReport) -> None:
        self._num_lost += report.num_lost
        minute = int(self._clock()) // HISTORY_S * HISTORY_S
        if not self._history or self._history[-1][0] != minute:
            self._history.append([minute, *([0] * len(SOURCES))])
        for i, num in enumerate(report.sources):
            self._sources[i] += num
            self._history[-1][i + 1] += num

    def _decay(self) -> None:
        now = self._clock()
        passed = now - self._decayed
        if 0 <= passed < _DECAY_EVERY_S:
            return
        self._decayed = now
        factor = 0.5 ** (max(0.0, passed) / HALF_LIFE_S)
        self._sources = [num * factor for num in self._sources]
        for sampler in (self._disk, *(host.sampler for host in self._hosts.values())):
            sampler.decay(factor)
        for counts in self._gone.values():
            counts.decay(factor)

    def _curves(
        self, samplers: list[ReuseSampler], gone: dict[str, Counts], budget: int, models: Mapping[str, str]
    ) -> dict[str, Any]:
        groups: dict[str, Counts] = {}
        for each in (gone, *(sampler.groups() for sampler in samplers)):
            for group, counts in each.items():
                groups.setdefault(group, Counts()).merge(counts)
        total = Counts()
        for counts in groups.values():
            total.merge(counts)
        sizes = [round(budget * 2 ** (step / 4)) for step in _STEPS] if budget else []
        rows = [
            {"id": group, "model": models.get(group, ""), "asked": round(counts.asked)}
            | {"num_sampled": round(counts.num_sampled), "hit_rates": _rounded(counts.hit_rates(sizes))}
            for group, counts in groups.items()
            if counts.asked >= 0.5
        ]
        return {
            "budget": budget,
            "asked": round(total.asked),
            "num_sampled": round(total.num_sampled),
            "rate": min((sampler.stack.rate for sampler in samplers), default=1.0),
            "distinct_nbytes": round(sum(sampler.stack.nbytes for sampler in samplers)),
            "sizes": sizes,
            "hit_rates": _rounded(total.hit_rates(sizes)),
            "namespaces": sorted(rows, key=lambda row: -row["asked"]),
        }

    def _describe_history(self) -> dict[str, Any]:
        rows = list(self._history)
        names = [name.removesuffix("_hits") for name in SOURCES]
        return {
            "interval_s": HISTORY_S,
            "times": [row[0] for row in rows],
            "chunks": {name: [row[i + 1] for row in rows] for i, name in enumerate(names)},
        }


def _check(report: AskedReport) -> None:
    if len(report.threshold) != HEAD_NBYTES:
        raise ValueError(f"a threshold has {HEAD_NBYTES} bytes; {len(report.threshold)} came")
    if len(report.sources) != len(SOURCES):
        raise ValueError(f"chunks have {len(SOURCES)} sources; {len(report.sources)} came")
    counts = (report.num_asked, report.num_below, report.num_lost, *report.sources)
    if not all(0 <= num < _MAX_COUNT for num in counts) or report.num_below > report.num_asked:
        raise ValueError("counts of chunks are from 0 to 2^53, and what went below is a part of what was asked")
    if sum(len(packed) for packed, _, _ in report.requests) > MAX_HEADS * HEAD_NBYTES:
        raise ValueError(f"a report tells of {MAX_HEADS} keys at most")
    for packed, num_below, below in report.requests:
        if len(packed) % HEAD_NBYTES or not 0 <= num_below <= len(packed) // HEAD_NBYTES or (num_below and not below):
            raise ValueError("a request has 8 bytes of each sampled key, those that went below last")


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole >= 0.5 else None


def _rounded(rates: list[float]) -> list[float]:
    return [round(rate, 4) for rate in rates]
