"""What the scheduler half and the worker half of the connector tell each other, once a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from tierkv_connector.jobs import LoadJob, Piece, Span, StoreJob

__all__ = ["LoadJob", "Piece", "RankCounts", "Span", "StoreJob", "TierKVMetadata", "TierKVWorkerMetadata"]


@dataclass
class TierKVMetadata(KVConnectorMetadata):
    """Scheduler to workers.

    Attributes:
        loads: loads that start in this step.
        stores: copies to the host pool after this step's forward.
        fence: blocks that this step writes while copies out of them may be under way.
        stranded: requests that wait for a load which could not be planned, each with the blocks it was to fill: to be
            reported as failed.
        lost: blocks that this step's forward needs, and whose load could not be planned: likewise.
    """

    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)
    fence: list[int] = field(default_factory=list)
    stranded: dict[str, tuple[int, ...]] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)


@dataclass
class TierKVWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler.

    Attributes:
        stored: for each finished store job, how many ranks have finished it.
        failed_stores: store jobs whose copy failed on some rank.
        failed_loads: requests whose load, for which they wait, failed on some rank.
        loaded: for each load that a forward needed and that is over, how many ranks are done with it.
        failed_sync: those of them that failed on some rank.
        load_nbytes, load_s: bytes loaded, and the seconds that took, summed over ranks.
        store_nbytes, store_s: likewise for stores.
        load_times, store_times: seconds of each copy that did not fail: a request's load, a chunk's store.
    """

    stored: dict[int, int] = field(default_factory=dict)
    failed_stores: set[int] = field(default_factory=set)
    failed_loads: set[str] = field(default_factory=set)
    load_nbytes: int = 0
    load_s: float = 0.0
    store_nbytes: int = 0
    store_s: float = 0.0
    load_times: list[float] = field(default_factory=list)
    store_times: list[float] = field(default_factory=list)
    loaded: dict[int, int] = field(default_factory=dict)
    failed_sync: set[int] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> TierKVWorkerMetadata:
        """Add another rank's report."""
        assert isinstance(other, TierKVWorkerMetadata)
        return TierKVWorkerMetadata(
            _summed(self.stored, other.stored),
            self.failed_stores | other.failed_stores,
            self.failed_loads | other.failed_loads,
            self.load_nbytes + other.load_nbytes,
            self.load_s + other.load_s,
            self.store_nbytes + other.store_nbytes,
            self.store_s + other.store_s,
            self.load_times + other.load_times,
            self.store_times + other.store_times,
            _summed(self.loaded, other.loaded),
            self.failed_sync | other.failed_sync,
        )

    @property
    def empty(self) -> bool:
        return not (self.stored or self.failed_stores or self.failed_loads or self.load_nbytes or self.loaded)


class RankCounts:
    """Puts together what ranks report, each in a step of its own: their copies need not end in the same one.

    Args:
        num_ranks: how many report each copy.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._counts: dict[int, int] = {}

    def ended(self, report: dict[int, int]) -> list[int]:
        """Take note of a report, and return the copies that are over on every rank now."""
        over = []
        for number, count in report.items():
            count += self._counts.pop(number, 0)
            if count >= self._num_ranks:
                over.append(number)
            else:
                self._counts[number] = count
        return over


def _summed(one: dict[int, int], other: dict[int, int]) -> dict[int, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in one.keys() | other.keys()}
