"""The worker half: makes this rank's segment of the host pool and copies between it and the GPU."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from tierkv.config import EngineConfig
from tierkv.errors import ConfigError
from tierkv.health import Repeated
from tierkv.layout import Layout, Shard
from tierkv.pool import PoolShape, Segment, check_host_memory, check_machine
from tierkv.rendezvous import Offer, PoolHost, ask_offer, get_pool, put_segment
from tierkv.sizes import format_size
from tierkv_connector.caches import describe, regions_of, served_groups
from tierkv_connector.compat import KVConnectorTransferResults, pipeline_rank, tensor_rank
from tierkv_connector.device import Device, Done, Region, open_device
from tierkv_connector.metadata import LoadJob, StoreJob, TierKVMetadata, TierKVWorkerMetadata
from tierkv_connector.portable import Cut, canonical, cut_over, head_regions, same_but_for_names

logger = logging.getLogger("tierkv")

_faults = Repeated()

Job = TypeVar("Job", LoadJob, StoreJob)

#: Seconds between two looks at copies that have to be over before the memory goes.
_DRAIN_POLL_S = 0.0005


class Worker:
    """One rank.

    Local rank 0 decides what the host pool is; the others make their segments after it. Where several ranks hold the
    same KV there is one segment of it: the first of them makes it and stores to it, each loads from it.

    Args:
        config: the engine's configuration.
        vllm_config, kv_cache_config: vLLM's.

    Raises:
        ConfigError: the model or the machine is not one that TierKV serves.
    """

    def __init__(self, config: EngineConfig, vllm_config: Any, kv_cache_config: Any) -> None:
        check_machine()
        self._config = config
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._groups = served_groups(kv_cache_config)
        self._cut = Cut(1)
        self._rank = self._stage = 0
        self._segment: Segment | None = None
        self._host: PoolHost | None = None
        self._device: Device | None = None
        self._report = TierKVWorkerMetadata()
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._layout: Layout | None = None
        self._num_copies = 0  # given to the device and not collected
        self._refused: list[Done] = []
        self._asleep = False

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Make this rank's segment for caches of this shape; rank 0 offers all of them to the scheduler.

        Called again, with caches of the same shape elsewhere, it goes on with these.

        Raises:
            ConfigError: ``host_bytes`` or ``chunk_tokens`` do not fit, or a block is not one piece of memory.
            UnavailableError: another rank does not answer.
        """
        parallel, num_blocks = self._vllm_config.parallel_config, self._kv_cache_config.num_blocks
        self._rank, tp_size = tensor_rank(parallel), parallel.tensor_parallel_size
        self._stage, pp_size = pipeline_rank(parallel), getattr(parallel, "pipeline_parallel_size", 1)
        model_config = getattr(self._vllm_config, "model_config", None)
        cut = self._cut = cut_over(self._groups, tp_size, model_config, self._config.portable_ranks, pp_size)
        shard = Shard(tp_size=tp_size, pp_size=pp_size, num_parts=cut.num_parts)
        layout = describe(
            self._groups, kv_caches, num_blocks, shard.num_parts, self._config.chunk_tokens, self._vllm_config
        )
        part_nbytes = layout.part_nbytes
        if cut.num_heads:
            layout = canonical(layout, cut)
        self._kv_caches = kv_caches
        if self._device is not None:
            self._go_on_with(layout)
            return
        self._layout = layout
        if self._rank == self._stage == 0:
            shape = PoolShape.for_budget(self._config.host_bytes, shard.num_parts, part_nbytes)
            self._segment = self._offer(Offer(shape, layout, shard, cut.portable))
        else:
            shape = self._follow(layout, shard)
        assert self._segment is not None
        self._device = open_device(self._regions(layout), shape, self._segment)

    def _regions(self, layout: Layout) -> list[Region]:
        num_blocks = self._kv_cache_config.num_blocks
        if self._cut.num_heads:
            return head_regions(layout, self._kv_caches, num_blocks, self._cut.num_heads)
        return regions_of(layout, self._kv_caches, num_blocks)

    # -- sleep

    def unregister_kv_caches(self) -> None:
        """Keep off the caches' memory, which is about to go: wait for copies under way, and start none. Idempotent."""
        while self._num_copies:
            self.collect()
            time.sleep(_DRAIN_POLL_S)
        self._asleep = True

    def restore_kv_caches(self) -> None:
        """Go on with the caches, whose memory is there again, if elsewhere. Idempotent."""
        if self._asleep and self._layout is not None:
            self._go_on_with(self._layout)

    def _go_on_with(self, layout: Layout) -> None:
        if layout != self._layout:
            raise ConfigError(
                f"the KV cache is kept as {layout.describe()} now, and was as "
                f"{self._layout.describe() if self._layout else 'nothing'}; start the engine anew to change it"
            )
        self.unregister_kv_caches()
        assert self._device is not None
        self._device.rebind(self._regions(layout))
        self._asleep = False

    def _offer(self, offer: Offer) -> Segment:
        """Make rank 0's segment, and say what the pool is."""
        shape = offer.shape
        check_host_memory(shape.nbytes)
        segment = Segment.create(shape.segment_nbytes(0))
        self._host = PoolHost(self._engine_id, offer, segment.fd)
        logger.info(
            "host pool of %s: %d slots of %s, %s%s",
            format_size(shape.nbytes),
            shape.num_slots,
            format_size(shape.payload_nbytes),
            offer.layout.describe(),
            (f", tensor parallel over {offer.shard.tp_size} ranks" if offer.shard.tp_size > 1 else "")
            + (f", pipeline parallel over {offer.shard.pp_size} stages" if offer.shard.pp_size > 1 else "")
            + (", portable over ranks" if offer.portable else ""),
        )
        return segment

    def _follow(self, layout: Layout, shard: Shard) -> PoolShape:
        """Make another rank's segment as rank 0 says, or map that of the rank which stores what this one holds."""
        offer = ask_offer(self._engine_id)
        same = same_but_for_names(layout, offer.layout) if self._stage else layout == offer.layout
        if not same or shard != offer.shard:
            stage = f" of pipeline stage {self._stage}" if self._stage else ""
            hint = "; let each stage have as many layers (VLLM_PP_LAYER_PARTITION)" if stage else ""
            raise ConfigError(
                f"rank {self._rank}{stage} keeps its KV cache as {layout.describe()}, and rank 0 as "
                f"{offer.layout.describe()}; ranks that differ are not served{hint}"
            )
        part = self._cut.part_of(self._rank, self._stage)
        nbytes = offer.shape.segment_nbytes(part)
        if self._cut.stores(self._rank):
            self._segment = Segment.create(nbytes)
            put_segment(self._engine_id, part, self._segment.fd)
        else:
            _, fds = get_pool(self._engine_id)
            self._segment = Segment(fds.pop(part), nbytes)
            for fd in fds:
                os.close(fd)
        return offer.shape

    @property
    def _engine_id(self) -> str:
        return str(self._vllm_config.kv_transfer_config.engine_id)

    # -- a step

    def before_forward(self, metadata: TierKVMetadata) -> None:
        """Order this step's writes after copies that still read the blocks."""
        if metadata.fence and self._device:
            self._device.fence(metadata.fence)

    def start_loads(self, metadata: TierKVMetadata) -> None:
        """Start this step's loads."""
        self._loaded.update(metadata.stranded)
        self._failed.update(metadata.stranded)
        self._note_bad(block for blocks in metadata.stranded.values() for block in blocks)
        self._bad_blocks.update(metadata.lost)
        if metadata.loads and self._device:
            for job in self._give([job for job in metadata.loads if job.sync_id], self._device.load_now):
                self._report.failed_sync.add(job.sync_id)
                self._bad_blocks.update(block for piece in job.pieces for block in piece.all_block_ids)
            self._give([job for job in metadata.loads if not job.sync_id], self._device.load)

    def after_forward(self, metadata: TierKVMetadata) -> None:
        """Start this step's copies to the host pool."""
        if metadata.stores and self._device and self._cut.stores(self._rank):
            self._give(metadata.stores, self._device.store)

    def _give(self, jobs: Sequence[Job], give: Callable[[Sequence[Job]], Iterable[Job] | None]) -> list[Job]:
        """Start copies, and return those that have failed at once. Each is reported, whatever happens.

        All of them fail while the caches' memory is gone, and where the device does not take them.
        """
        self._num_copies += len(jobs)
        if not self._asleep:
            try:
                return list(give(jobs) or ())
            except Exception:
                _faults.note("copies between the GPU and the host pool could not be started", exc_info=True)
        self._refused += [Done(job, False, 0, 0.0) for job in jobs]
        return list(jobs)

    def collect(self) -> None:
        """Take note of the copies that have finished."""
        refused, self._refused = self._refused, []
        for done in refused + (self._device.finished() if self._device else []):
            job, report = done.job, self._report
            self._num_copies -= 1
            if isinstance(job, LoadJob):
                report.load_nbytes += done.nbytes
                report.load_s += done.seconds
                report.load_times += [done.seconds] if done.ok else []
                if job.sync_id:  # vLLM asks for no report, and a failure was told when it happened
                    report.loaded[job.sync_id] = report.loaded.get(job.sync_id, 0) + 1
                    continue
                self._loaded.add(job.req_id)
                if not done.ok:
                    report.failed_loads.add(job.req_id)
                    self._failed.add(job.req_id)
                    self._note_bad(block for piece in job.pieces for block in piece.all_block_ids)
            else:
                report.stored[job.job_id] = report.stored.get(job.job_id, 0) + 1
                report.store_nbytes += done.nbytes
                report.store_s += done.seconds
                report.store_times += [done.seconds] if done.ok else []
                if not done.ok:
                    report.failed_stores.add(job.job_id)

    def take_loaded(self) -> set[str]:
        """Return the requests whose load has ended since the last call, failed ones included: each exactly once."""
        self.collect()
        loaded, self._loaded = self._loaded, set()
        return loaded

    def take_failed(self) -> set[str]:
        """Return the requests among them whose load failed."""
        failed, self._failed = self._failed, set()
        return failed

    def take_bad_blocks(self) -> set[int]:
        """Return the blocks of which vLLM is to be told that a load did not fill them."""
        blocks, self._bad_blocks = self._bad_blocks, set()
        return blocks

    def _note_bad(self, blocks: Iterable[int]) -> None:
        """Note the blocks of a request that waited for its load, where vLLM is not told by the request (before 0.30).

        Told twice it would go on behind blocks that a window has passed, as if what stands before had been computed.
        What a step loaded for itself can be told by its blocks only.
        """
        if KVConnectorTransferResults is None:
            self._bad_blocks.update(blocks)

    def take_report(self) -> TierKVWorkerMetadata | None:
        """Return what the scheduler half is to know of this step."""
        self.collect()
        if self._report.empty:
            return None
        report, self._report = self._report, TierKVWorkerMetadata()
        return report

    def close(self) -> None:
        """Give everything back. Idempotent."""
        if self._device:
            self._device.close()
            self._device = None
        if self._host:
            self._host.close()
            self._host = None
        if self._segment:
            self._segment.close()
            self._segment = None
