"""What the scheduler half and the worker half of the connector tell each other, once a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


class Piece(NamedTuple):
    """Part of a chunk to copy between its slot and the GPU.

    Attributes:
        slot: the slot.
        first: index within the chunk of the first block to copy.
        block_ids: the GPU's blocks, for block ``first`` of the chunk and those that follow.
    """

    slot: int
    first: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class LoadJob:
    """Slots to copy to the GPU for a request, reported as one."""

    req_id: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class StoreJob:
    """Blocks to copy to a slot once this step has computed them."""

    job_id: int
    piece: Piece


@dataclass
class TierKVMetadata(KVConnectorMetadata):
    """Scheduler to workers.

    Attributes:
        loads: loads that start in this step.
        stores: copies to the host pool after this step's forward.
        fence: blocks that this step writes while copies out of them may be under way.
        stranded: requests that wait for a load which could not be planned: to be reported as failed.
    """

    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)
    fence: list[int] = field(default_factory=list)
    stranded: list[str] = field(default_factory=list)


@dataclass
class TierKVWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler.

    Attributes:
        stored: for each finished store job, how many ranks have finished it.
        failed_stores: store jobs whose copy failed on some rank.
        failed_loads: requests whose load failed on some rank.
        load_nbytes, load_s: bytes loaded, and the seconds that took, summed over ranks.
        store_nbytes, store_s: likewise for stores.
    """

    stored: dict[int, int] = field(default_factory=dict)
    failed_stores: set[int] = field(default_factory=set)
    failed_loads: set[str] = field(default_factory=set)
    load_nbytes: int = 0
    load_s: float = 0.0
    store_nbytes: int = 0
    store_s: float = 0.0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> TierKVWorkerMetadata:
        """Add another rank's report."""
        assert isinstance(other, TierKVWorkerMetadata)
        stored = dict(self.stored)
        for job_id, count in other.stored.items():
            stored[job_id] = stored.get(job_id, 0) + count
        return TierKVWorkerMetadata(
            stored,
            self.failed_stores | other.failed_stores,
            self.failed_loads | other.failed_loads,
            self.load_nbytes + other.load_nbytes,
            self.load_s + other.load_s,
            self.store_nbytes + other.store_nbytes,
            self.store_s + other.store_s,
        )

    @property
    def empty(self) -> bool:
        return not (self.stored or self.failed_stores or self.failed_loads or self.load_nbytes)
