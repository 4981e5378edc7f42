"""The worker half: makes this rank's segment of the host pool and copies between it and the GPU."""

from __future__ import annotations

import logging
from typing import Any

import torch

from tierkv.config import EngineConfig
from tierkv.layout import LayerGroup, Layout, check_chunk_tokens, default_chunk_tokens
from tierkv.pool import HostPool, PoolShape, Segment, check_host_memory, check_machine
from tierkv.rendezvous import Offer, PoolHost
from tierkv.sizes import format_size
from tierkv_connector.compat import single_group
from tierkv_connector.device import Device, Region, make_regions, open_device
from tierkv_connector.metadata import LoadJob, TierKVMetadata, TierKVWorkerMetadata

logger = logging.getLogger("tierkv")


class Worker:
    """One rank.

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
        self._group = single_group(kv_cache_config)
        self._rank = 0
        self._pool: HostPool | None = None
        self._host: PoolHost | None = None
        self._device: Device | None = None
        self._report = TierKVWorkerMetadata()
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Make the segment for caches of this shape and offer it to the scheduler.

        Raises:
            ConfigError: ``host_bytes`` or ``chunk_tokens`` do not fit, or a block is not one piece of memory.
        """
        caches = [kv_caches[name] for name in self._group.layer_names]
        num_blocks = self._kv_cache_config.num_blocks
        regions = make_regions(caches, num_blocks, 1)
        layout = self._layout(caches, regions)
        regions = make_regions(caches, num_blocks, layout.blocks_per_chunk)
        shape = PoolShape.for_budget(self._config.host_bytes, 1, layout.part_nbytes)
        check_host_memory(shape.nbytes)
        segment = Segment.create(shape.segment_nbytes(self._rank))
        self._pool = HostPool(shape, [segment])
        self._device = open_device(regions, self._pool, self._rank, layout.blocks_per_chunk)
        engine_id = self._vllm_config.kv_transfer_config.engine_id
        self._host = PoolHost(engine_id, Offer(shape, layout), segment.fd)
        logger.info(
            "host pool of %s: %d slots of %s, %s",
            format_size(shape.nbytes),
            shape.num_slots,
            format_size(shape.payload_nbytes),
            layout.describe(),
        )

    def _layout(self, caches: list[torch.Tensor], regions: list[Region]) -> Layout:
        spec = self._group.kv_cache_spec
        block_nbytes = tuple(r.block_nbytes for r in regions)
        block_tokens = spec.block_size
        wanted = self._config.chunk_tokens
        chunk_tokens = (
            default_chunk_tokens(block_tokens, sum(block_nbytes))
            if wanted is None
            else check_chunk_tokens(wanted, block_tokens)
        )
        first = caches[0]
        inner = range(1, first.dim())
        group = LayerGroup(
            kind=type(spec).__name__,
            layers=tuple(self._group.layer_names),
            num_kv_heads=int(getattr(spec, "num_kv_heads", 1)),
            head_size=int(getattr(spec, "head_size", 0)),
            block_nbytes=block_nbytes,
            shape=tuple(first.shape[1:]),
            order=tuple(sorted(inner, key=lambda d: (-first.stride(d), d))),
        )
        backend, isa = _backend(self._vllm_config, self._group.layer_names[0], first)
        dtype = str(first.dtype).removeprefix("torch.")
        return Layout(group, dtype, block_tokens, chunk_tokens, backend, isa)

    # -- a step

    def before_forward(self, metadata: TierKVMetadata) -> None:
        """Order this step's writes after copies that still read the blocks."""
        if metadata.fence and self._device:
            self._device.fence(metadata.fence)

    def start_loads(self, metadata: TierKVMetadata) -> None:
        """Start this step's loads."""
        self._loaded.update(metadata.stranded)
        self._failed.update(metadata.stranded)
        if metadata.loads and self._device:
            self._device.load(metadata.loads)

    def after_forward(self, metadata: TierKVMetadata) -> None:
        """Start this step's copies to the host pool."""
        if metadata.stores and self._device:
            self._device.store(metadata.stores)

    def collect(self) -> None:
        """Take note of the copies that have finished."""
        for done in self._device.finished() if self._device else ():
            job, report = done.job, self._report
            if isinstance(job, LoadJob):
                self._loaded.add(job.req_id)
                report.load_nbytes += done.nbytes
                report.load_s += done.seconds
                if not done.ok:
                    report.failed_loads.add(job.req_id)
                    self._failed.add(job.req_id)
                    self._bad_blocks.update(b for piece in job.pieces for b in piece.block_ids)
            else:
                report.stored[job.job_id] = report.stored.get(job.job_id, 0) + 1
                report.store_nbytes += done.nbytes
                report.store_s += done.seconds
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
        """Return the blocks that failed loads did not fill."""
        blocks, self._bad_blocks = self._bad_blocks, set()
        return blocks

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
        if self._pool:
            self._pool.close()
            self._pool = None


def _backend(vllm_config: Any, layer_name: str, cache: torch.Tensor) -> tuple[str, str]:
    """Return the attention backend's name and the instruction set that it packs the cache for."""
    layer = vllm_config.compilation_config.static_forward_context.get(layer_name)
    backend = layer.get_attn_backend().get_name() if layer is not None else "unknown"
    if cache.device.type != "cpu":
        return backend, cache.device.type
    from vllm.v1.attention.backends import cpu_attn

    spec_dtype, block_tokens = cache.dtype, vllm_config.cache_config.block_size
    head_size = getattr(layer, "head_size", None)
    isa = cpu_attn._get_attn_isa(spec_dtype, block_tokens, head_size, vllm_config.cache_config.cache_dtype)
    return backend, str(isa)
