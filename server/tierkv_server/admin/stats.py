"""Statistics for the admin server: taken once for all who ask, summed over engines that left, and remembered an hour.

Asking costs the tiers and engines something (an engine that is stopped holds a question up for 2 s), so many dashboards
and scrapers share one answer.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tierkv.health import Repeated

#: Whoever asks within this time of another gets its answer.
MAX_AGE_S = 1.0
INTERVAL_S = 5.0
NUM_SAMPLES = 720
#: Statistics older than this say that something hangs: six samples, and what a stopped engine holds one up.
STALE_S = 6 * INTERVAL_S
#: Engines whose last counters are kept one by one; those of older ones are added up.
MAX_ENGINES = 1024

#: What gave the chunks that engines asked for: the counter of each.
SOURCES = {"host": "host_hits", "disk": "disk_hits", "shared": "shared_hits", "missed": "missed"}
#: Values of now among an engine's counters: they do not add up over time.
STATES = frozenset({"store_queue_nbytes"})


class EngineTotals:
    """Engines' counters by namespace, summed over all that this server has seen.

    An engine takes its counters with it when it leaves; its last ones are kept here, so that sums never fall. What one
    that was killed had counted since it was asked last is lost. Engines are told apart by id and process.
    """

    def __init__(self) -> None:
        self._last: OrderedDict[tuple[str, int, str], Counter[str]] = OrderedDict()
        self._gone: dict[str, Counter[str]] = {}

    def update(self, engines: Sequence[Mapping[str, Any]]) -> None:
        """Note the counters that engines have now (rows of ``stat``)."""
        for e in engines:
            name = (str(e["engine_id"]), int(e["pid"]), str(e["namespace"]))
            now = Counter({k: int(v) for k, v in e["counters"].items() if k not in STATES})
            now["evicted"] = int(e["num_evicted"])
            before = self._last.pop(name, Counter())
            if any(now[k] < v for k, v in before.items()):  # begun anew under the same name
                self._retire(name[2], before)
            self._last[name] = now
        while len(self._last) > MAX_ENGINES:
            (_, _, ns), counters = self._last.popitem(last=False)
            self._retire(ns, counters)

    def _retire(self, ns: str, counters: Counter[str]) -> None:
        self._gone.setdefault(ns, Counter()).update(counters)

    def by_namespace(self) -> dict[str, Counter[str]]:
        """Return the sums by namespace (hex id)."""
        total = {ns: Counter(counters) for ns, counters in self._gone.items()}
        for (_, _, ns), counters in self._last.items():
            total.setdefault(ns, Counter()).update(counters)
        return total


class Snapshot(NamedTuple):
    """Statistics of one moment: what ``Inspector.stat`` returned, and the engines' sums by namespace."""

    taken: float  #: monotonic
    stat: Mapping[str, Any]
    totals: Mapping[str, Counter[str]]

    def sources(self) -> dict[str, int]:
        """Return the chunks that engines asked for, by what gave them, over all namespaces."""
        return {name: sum(c[key] for c in self.totals.values()) for name, key in SOURCES.items()}


class TierSample(NamedTuple):
    """A tier at the time of a sample."""

    nbytes: int
    queued_nbytes: int
    up: bool


class Sample(NamedTuple):
    """What is remembered of a snapshot: not its engines, of which there may be many."""

    time: float  #: seconds since 1970
    num_engines: int
    chunks: Mapping[str, int]
    tiers: Mapping[str, TierSample]


class Stats:
    """The statistics of a server, and their last hour.

    Args:
        stat: asks for them; may take some seconds.
        farewells: returns the rows of engines that have left since it was called last.

    Thread-safety: every method may be called from any thread.
    """

    def __init__(
        self,
        stat: Callable[[], Mapping[str, Any]],
        clock: Callable[[], float] = time.monotonic,
        farewells: Callable[[], Sequence[Mapping[str, Any]]] = tuple,
    ) -> None:
        self.asks = stat
        self._farewells = farewells
        self._clock = clock
        self._totals = EngineTotals()
        self._asking = threading.Lock()
        self._newest: Snapshot | None = None
        self._valid_from = 0.0
        self._samples: deque[Sample] = deque(maxlen=NUM_SAMPLES)
        self._unforeseen = Repeated()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tierkv-admin-history", daemon=True)

    def start(self) -> None:
        """Take a sample every ``INTERVAL_S`` seconds from now on."""
        self._thread.start()

    def close(self) -> None:
        """Stop taking samples. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(INTERVAL_S)

    @property
    def newest(self) -> Snapshot | None:
        """The newest snapshot, however old. Never waits."""
        return self._newest

    def age_s(self) -> float:
        """Return the age of the newest snapshot; infinite before the first."""
        return self._clock() - self._newest.taken if self._newest else float("inf")

    def get(self, max_age_s: float | None = None) -> Snapshot:
        """Return a snapshot at most ``max_age_s`` old (default: ``MAX_AGE_S``), or begun after this call."""
        oldest = self._clock() - (MAX_AGE_S if max_age_s is None else max_age_s)
        with self._asking:  # those who wait here take what the first brings
            newest = self._newest
            if newest is not None and newest.taken >= max(oldest, self._valid_from):
                return newest
            taken = self._clock()
            stat = self.asks()
            self._totals.update(stat["engines"])
            self._totals.update(self._farewells())  # after what these engines may have said just before
            newest = self._newest = Snapshot(taken, stat, self._totals.by_namespace())
            return newest

    def expire(self) -> None:
        """Say that something was changed: nobody gets a snapshot of before."""
        self._valid_from = self._clock()

    def sample(self) -> None:
        """Add a snapshot to the history."""
        snapshot = self.get()
        rows = snapshot.stat["tiers"]
        tiers = {row["name"]: TierSample(row["nbytes"], row["queued_nbytes"], row["state"] == "up") for row in rows}
        num_engines = snapshot.stat["server"]["num_engines"]
        self._samples.append(Sample(time.time(), num_engines, snapshot.sources(), tiers))

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.sample()
            except Exception:  # a fault here must not end the history
                self._unforeseen.note(
                    "the statistics could not be taken; trying again in %g s", INTERVAL_S, exc_info=True
                )
            self._stop.wait(INTERVAL_S)

    def history(self, since: float = 0.0) -> dict[str, Any]:
        """Return the samples after ``since`` (seconds since 1970), in columns (``schema.History``)."""
        samples = [sample for sample in list(self._samples) if sample.time > since]
        names = dict.fromkeys(name for sample in samples for name in sample.tiers)
        tiers = {name: [sample.tiers.get(name, TierSample(0, 0, False)) for sample in samples] for name in names}
        return {
            "interval_s": INTERVAL_S,
            "times": [sample.time for sample in samples],
            "engines": [sample.num_engines for sample in samples],
            "chunks": {name: [sample.chunks[name] for sample in samples] for name in SOURCES},
            "tiers": {
                name: {
                    "nbytes": [tier.nbytes for tier in column],
                    "queued_nbytes": [tier.queued_nbytes for tier in column],
                    "up": [tier.up for tier in column],
                }
                for name, column in tiers.items()
            },
        }
