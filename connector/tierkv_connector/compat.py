"""What the connector needs of vLLM's inside, asked by probes instead of by version. The only place that knows."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import vllm

from tierkv import __version__
from tierkv.errors import ConfigError
from tierkv.layout import BlockTable, Layout
from tierkv_connector.versions import TESTED_VLLM

logger = logging.getLogger("tierkv")

#: Blocks of windows that one plan looks for on the GPU.
_MAX_LOOKUPS = 512
#: Ranks whose pool segments one message to the store server carries, beside its lease socket.
MAX_RANKS = 63

#: What vLLM calls KV that is not quantized.
_PLAIN_KV = ("auto", "float16", "bfloat16", "float32", "half", "float")

VLLM_VERSION = str(getattr(vllm, "__version__", "unknown"))

#: What a connector of ours cannot do without. All of it is there from 0.26 on.
_NEEDED_METHODS = (
    "bind_gpu_block_pool",
    "build_connector_worker_meta",
    "get_block_ids_with_load_errors",
    "handle_preemptions",
    "has_pending_push_work",
    "on_new_request",
    "reset_cache",
    "update_connector_output",
)


def _minor(version: str) -> tuple[int, int] | None:
    """Return major and minor of a released version; None of another (built from source, say)."""
    found = re.match(r"(\d+)\.(\d+)\.(?!dev)", version)
    return (int(found[1]), int(found[2])) if found else None


def _too_old(lacking: str) -> ConfigError:
    return ConfigError(
        f"TierKV {__version__} cannot work with vLLM {VLLM_VERSION}, which has no {lacking} for connectors; "
        f"it needs vLLM {TESTED_VLLM[0]} or later (tested up to {TESTED_VLLM[-1]})"
    )


try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorWorkerMetadata,
        SupportsHMA,
    )
except ImportError as error:
    name = re.search(r"cannot import name '(\w+)'", str(error))
    raise _too_old(name[1] if name else str(error)) from None

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
except ImportError:  # before 0.30
    KVConnectorTransferResults = None

__all__ = [
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorRole",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "SupportsHMA",
]


def check_interface(base: Any = KVConnectorBase_V1) -> None:
    """Check that vLLM calls connectors as TierKV needs it.

    Raises:
        ConfigError: it does not: its version is too old.
    """
    minor = _minor(VLLM_VERSION)
    if minor is not None and minor < (0, 26):
        raise _too_old("stable interface")
    for name in _NEEDED_METHODS:
        if not hasattr(base, name):
            raise _too_old(name)


def warn_if_untested() -> None:
    """Say once, in a sentence, that this version of vLLM is not one of those that the tests run with."""
    if not VLLM_VERSION.startswith(tuple(f"{minor}." for minor in TESTED_VLLM)):
        logger.warning(
            "TierKV %s is not tested with vLLM %s; it is with %s to %s",
            __version__,
            VLLM_VERSION,
            TESTED_VLLM[0],
            TESTED_VLLM[-1],
        )


def check_supported(vllm_config: Any) -> None:
    """Check that this engine is one that TierKV serves.

    Raises:
        ConfigError: it is not; the sentence says what to change.
    """
    check_interface()
    check_parallel(vllm_config.parallel_config)
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    if draft is not None and getattr(vllm_config.speculative_config, "method", "") != "ngram":
        raise ConfigError(
            f"speculative decoding with a draft model is not served by TierKV {__version__}; "
            f"use method='ngram', or leave speculative_config out"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            "calculate_kv_scales=True makes the KV of a prefix depend on the first request that an engine saw; "
            "use the scales of the checkpoint (calculate_kv_scales=False)"
        )


def check_parallel(parallel: Any) -> None:
    """Check that an engine's ranks are cut in a way that TierKV serves: tensor and pipeline parallel, on one host.

    Raises:
        ConfigError: they are not.
    """
    for name, what in (
        ("decode_context_parallel_size", "whose ranks have other tokens of a block each"),
        ("prefill_context_parallel_size", "whose ranks have other tokens of a block each"),
        ("nnodes_within_dp", "whose ranks share no host pool"),
    ):
        value = getattr(parallel, name, 1)
        if value != 1:
            raise ConfigError(
                f"{name}={value} is not served by TierKV {__version__}, {what}; use tensor_parallel_size and "
                f"pipeline_parallel_size on one host (data parallel replicas may share a disk_dir)"
            )
    num_ranks = parallel.tensor_parallel_size * getattr(parallel, "pipeline_parallel_size", 1)
    if num_ranks > MAX_RANKS:
        raise ConfigError(f"{num_ranks} ranks are not served by TierKV {__version__}; use at most {MAX_RANKS}")


def tensor_rank(parallel: Any) -> int:
    """Return this worker's rank among those that share a layer."""
    if parallel.tensor_parallel_size == 1:
        return 0
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def pipeline_rank(parallel: Any) -> int:
    """Return this worker's pipeline stage."""
    if getattr(parallel, "pipeline_parallel_size", 1) == 1:
        return 0
    from vllm.distributed.parallel_state import get_pp_group

    return int(get_pp_group().rank_in_group)


def quantized_format(layer: Any) -> str:
    """Return how a layer's KV is quantized, in vLLM's words; empty where its cache holds plain numbers.

    Layers of one model may differ (``kv_cache_dtype_skip_layers``). One word has two meanings on some hardware: eight
    bits with another exponent bias on older AMD GPUs, and four bits packed as each family of NVIDIA GPUs reads them.
    """
    name = str(getattr(layer, "kv_cache_dtype", "auto"))
    if name in _PLAIN_KV:
        return ""
    from vllm.platforms import current_platform

    if name in ("fp8", "fp8_e4m3"):
        return "fp8_e4m3fnuz" if current_platform.is_fp8_fnuz() else "fp8_e4m3"
    if name.startswith("nvfp4"):
        capability = current_platform.get_device_capability()
        return f"{name}_sm{capability.to_int()}" if capability is not None else name
    return name


class BlockTables:
    """The block ids of scheduled requests where vLLM does not tell them when asked (before 0.30).

    Up to 0.28 a step says only which blocks are new, in 0.29 also whole tables, but not of a request that got no new
    block. Followed step by step they are the same for full attention, whose blocks stay until a request ends.
    """

    def __init__(self) -> None:
        self._tables: dict[str, tuple[list[int], ...]] = {}

    @contextlib.contextmanager
    def shown(self, scheduler_output: Any) -> Iterator[None]:
        """Let ``scheduler_output`` answer :func:`block_ids_of` for as long as the block lasts, as from 0.30 on."""
        theirs = getattr(scheduler_output, "kv_connector_block_state", None)
        if hasattr(theirs, "get_block_ids"):
            yield
            return
        self._follow(scheduler_output)
        scheduler_output.kv_connector_block_state = self
        try:
            yield
        finally:  # it travels to the workers
            if "kv_connector_block_state" in getattr(scheduler_output, "__dataclass_fields__", {}):
                scheduler_output.kv_connector_block_state = theirs
            else:
                del scheduler_output.kv_connector_block_state

    def get_block_ids(self, req_id: str) -> tuple[list[int], ...] | None:
        """Return a request's block ids, one list a KV cache group; None of a request that does not run."""
        return self._tables.get(req_id)

    def _follow(self, scheduler_output: Any) -> None:
        for req_id in scheduler_output.finished_req_ids:
            self._tables.pop(req_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            self._tables[new.req_id] = tuple(list(ids) for ids in new.block_ids)
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if req_id in cached.resumed_req_ids:
                self._tables[req_id] = tuple(list(ids) for ids in blocks or ())
            elif blocks and req_id in self._tables:
                for table, ids in zip(self._tables[req_id], blocks, strict=True):
                    table.extend(ids)


def block_ids_of(scheduler_output: Any, req_id: str) -> Sequence[list[int]] | None:
    """Return the block ids of a scheduled request, a list a KV cache group; None where this step does not know it."""
    state = scheduler_output.kv_connector_block_state
    ids = state.get_block_ids(req_id) if state is not None else None
    return ids or None


def boundary_states(scheduler_output: Any, req_id: str) -> Sequence[tuple[int, int, int]]:
    """Return the blocks that hold recurrent state of a request once a step is over, as vLLM offers them (from 0.30 on).

    Of each: KV cache group, block, and the tokens after which it is the state.
    """
    offers = getattr(scheduler_output.kv_connector_block_state, "boundary_state_offloads", None)
    return list(offers.get(req_id, ())) if offers else []


def scheduled(scheduler_output: Any) -> Iterable[tuple[str, int]]:
    """Yield (request id, tokens computed before this step) for each request scheduled in it."""
    for new in scheduler_output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = scheduler_output.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)


def new_blocks(scheduler_output: Any) -> list[int]:
    """Return the block ids given out in this step: what writes them must wait for copies of their old contents."""
    ids = [i for new in scheduler_output.scheduled_new_reqs for group in new.block_ids for i in group if i]
    for blocks in scheduler_output.scheduled_cached_reqs.new_block_ids:
        for group in blocks or ():
            ids += group
    for copy in getattr(scheduler_output, "kv_cache_block_copies", None) or ():  # of partly filled blocks, to new ones
        ids.append(copy.dst_block_id)
    return ids


def hit_sources(num_tokens: Mapping[str, int]) -> dict[Any, int]:
    """Return tokens by tier under vLLM's names of sources (from 0.32 on). It has none for a store of a fleet."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    names = {"host": CacheHitSource.HOST, "disk": CacheHitSource.DISK}
    return {names.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED): num for tier, num in num_tokens.items() if num}


def is_plain_prompt(request: Any, pools_behind_prefixes: bool = False) -> bool:
    """Return whether the whole prompt is here, and generation is asked for, or pooling of what a prefix may stand for.

    Salt, adapter (:mod:`tierkv_connector.adapters`), token ids and what stands for some of them
    (:mod:`tierkv_connector.extras`) then decide its KV. Streamed input keeps to vLLM's own prefix cache.

    Args:
        pools_behind_prefixes: see :func:`pools_behind_prefixes`.
    """
    pools = getattr(request, "pooling_params", None) is not None
    return (pools_behind_prefixes or not pools) and not getattr(request, "resumable", False)


def pools_behind_prefixes(vllm_config: Any) -> bool:
    """Return whether a pooling model gives the same where a prefix of its prompt is not computed.

    That is so with causal attention and pooling of the last token. With attention in both directions the KV of a prefix
    depends on what follows, and means and the like need every token's output; vLLM itself caches no prefix there.
    """
    cached = getattr(getattr(vllm_config, "cache_config", None), "enable_prefix_caching", False)
    return bool(cached and getattr(vllm_config.model_config, "is_prefix_caching_supported", False))


class GpuCache:
    """vLLM's own prefix cache, as far as planning asks it. Answers are hints: what to fetch, not what to claim.

    Args:
        block_pool: vLLM's block pool, or None where it is not known.
        layout: what a chunk is, and the block tables of the model.
        hash_tokens: tokens a block hash; unless the blocks of every table have as many, every answer is 0.
    """

    def __init__(self, block_pool: Any, layout: Layout, hash_tokens: int) -> None:
        tables = layout.tables()
        known = all(table.block_tokens == hash_tokens for table in tables)
        self._block_pool = block_pool
        self._pool = block_pool if known else None
        self._block_tokens = hash_tokens
        self._per_chunk = layout.chunk_tokens // layout.block_tokens
        self._all = [table.group_id for table in tables]
        self._whole = [table.group_id for table in tables if not table.window]
        self._windows = [table for table in tables if table.window]

    def empty(self) -> bool:
        """Return whether no request holds a block, and none is kept for another; True where that cannot be known."""
        pool, cached = self._block_pool, getattr(self._block_pool, "cached_block_hash_to_block", None)
        if cached is None:
            return True
        free: int = pool.get_num_free_blocks()
        return free >= pool.num_gpu_blocks - 1 and not len(cached)  # one is the null block

    def has(self, request: Any, chunk: int) -> bool:
        """Return whether the last block of the request's chunk ``chunk`` is in the GPU's prefix cache."""
        hashes = getattr(request, "block_hashes", ())
        block = (chunk + 1) * self._per_chunk - 1
        if self._pool is None or block >= len(hashes):
            return False
        return bool(self._pool.get_cached_block(hashes[block], self._all))

    def run(self, request: Any) -> int:
        """Return about how many leading chunks of the request are in the GPU's prefix cache.

        By bisection: vLLM frees a chain from its end, so what is cached is a prefix of it nearly always. Of windows,
        only what is needed at the end has to be there.
        """
        if self._pool is None:
            return 0
        hashes = getattr(request, "block_hashes", ())
        low, high = 0, len(hashes)
        if not self._whole:
            low = high
        while low < high:
            middle = (low + high) // 2
            if self._pool.get_cached_block(hashes[middle], self._whole):
                low = middle + 1
            else:
                high = middle
        return self._with_windows(hashes, low // self._per_chunk)

    def _with_windows(self, hashes: Any, num_chunks: int) -> int:
        """Return the longest run of at most ``num_chunks`` at whose end every window is there."""
        num_lookups = 0
        while num_chunks and self._windows:
            end = num_chunks * self._per_chunk
            for table in self._windows:
                first = table.first_needed(end * self._block_tokens) // self._block_tokens
                gone = next((i for i in range(end - 1, first - 1, -1) if not self._there(hashes[i], table)), None)
                num_lookups += end - (first if gone is None else gone)
                if gone is not None:
                    break
            else:
                return num_chunks
            if num_lookups > _MAX_LOOKUPS:
                return 0
            num_chunks = gone // self._per_chunk
        return num_chunks

    def _there(self, block_hash: Any, table: BlockTable) -> bool:
        assert self._pool is not None
        return bool(self._pool.get_cached_block(block_hash, [table.group_id]))
