"""Loads that are part of the step which needs them: small ones, for which waiting costs more than loading.

Theory of operation. A request that waits for its load is scheduled two steps later. A small load is cheaper than that:
it is claimed as computed already, copied before the forward of the same step (on the device, behind which the compute
waits; the host never does), and nothing is reported of it. How large "small" is follows from the speed of the loads
seen: as much as takes ``SYNC_S``, about what a step takes on a GPU and no request notices.

vLLM may take a claim in another way than it was made (trimmed, for another kind of load, or not at all), so whether a
load is of this kind is read off the step: the request is a part of it, or waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tierkv.hostindex import Entry
from tierkv.layout import Shard
from tierkv_connector.metadata import RankCounts, TierKVWorkerMetadata

#: Seconds that such a load may take.
SYNC_S = 0.002
#: Weight of the latest loads in the measured speed.
_WEIGHT = 0.25


class SyncLoads:
    """The threshold, and the loads of this kind that are under way.

    Args:
        limit: bytes of the largest; None: by what is measured.
        shard: whose ranks load.
        num_tables: block tables of the model. With several vLLM has no way to be told that such a load failed.
    """

    def __init__(self, limit: int | None, shard: Shard, num_tables: int) -> None:
        self._limit = 0 if num_tables > 1 else limit
        self._num_parts = shard.num_parts
        self._ranks = RankCounts(shard.tp_size * shard.pp_size)
        self._bytes_per_s = 0.0  # of one rank
        self._under_way: dict[int, tuple[str, Sequence[Entry]]] = {}
        self._failed: set[int] = set()
        self._next = 0

    @property
    def sync_nbytes(self) -> int:
        """Bytes of payloads up to which a load is part of its step; 0 while nothing is known of its speed."""
        if self._limit is not None:
            return self._limit
        return int(self._bytes_per_s * SYNC_S) * self._num_parts

    def started(self, req_id: str, entries: Sequence[Entry]) -> int:
        """Take note of a load whose slots are pinned, and return its number."""
        self._next += 1
        self._under_way[self._next] = req_id, entries
        return self._next

    def ended(self, report: TierKVWorkerMetadata) -> Iterator[tuple[str, Sequence[Entry], bool]]:
        """Yield (request, slots, whether it failed) of each load that is over on every rank now."""
        if report.load_nbytes and report.load_s:
            speed = report.load_nbytes / report.load_s
            self._bytes_per_s += (speed - self._bytes_per_s) * (_WEIGHT if self._bytes_per_s else 1.0)
        self._failed |= report.failed_sync
        for number in self._ranks.ended(report.loaded):
            failed = number in self._failed
            self._failed.discard(number)
            if number in self._under_way:
                yield (*self._under_way.pop(number), failed)

    def dump(self) -> dict[str, object]:
        """Return the state as plain values, for tests that compare it."""
        loads = [(number, req_id, [e.key for e in entries]) for number, (req_id, entries) in self._under_way.items()]
        return {"under_way": loads, "failed": sorted(self._failed), "sync_nbytes": self.sync_nbytes}
