"""What the connector needs of vLLM's inside, asked by probes instead of by version. The only place that knows."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import vllm

from tierkv import __version__
from tierkv.errors import ConfigError

logger = logging.getLogger("tierkv")

TESTED_VLLM = ("0.32.",)


def check_supported(vllm_config: Any) -> None:
    """Check that this engine is one that TierKV serves.

    Raises:
        ConfigError: it is not; the sentence says what to change.
    """
    version = getattr(vllm, "__version__", "unknown")
    if not str(version).startswith(TESTED_VLLM):
        logger.warning("TierKV %s is not tested with vLLM %s; it is with %s*", __version__, version, TESTED_VLLM[0])
    role = vllm_config.kv_transfer_config.kv_role
    if role != "kv_both":
        raise ConfigError(f"kv_role={role!r} is not served by TierKV {__version__}; set kv_role='kv_both'")
    parallel = vllm_config.parallel_config
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if getattr(parallel, name) != 1:
            raise ConfigError(
                f"{name}={getattr(parallel, name)} is not served by TierKV {__version__}, which takes one rank an "
                f"engine; set {name}=1 (data parallel replicas may share a disk_dir)"
            )
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


def single_group(kv_cache_config: Any) -> Any:
    """Return the one KV cache group of a model.

    Raises:
        ConfigError: the model has several, or one of a kind that is not attention over the whole prefix.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(sorted({type(g.kv_cache_spec).__name__ for g in groups}))
        raise ConfigError(
            f"this model has {len(groups)} KV cache groups ({kinds}); TierKV {__version__} serves models with one. "
            f"Remove the connector for this model"
        )
    kind = type(groups[0].kv_cache_spec).__name__
    if kind not in ("FullAttentionSpec", "MLAAttentionSpec"):
        raise ConfigError(
            f"this model's KV cache is a {kind}; TierKV {__version__} serves full attention (FullAttentionSpec, "
            f"MLAAttentionSpec). Remove the connector for this model"
        )
    return groups[0]


def block_ids_of(scheduler_output: Any, req_id: str) -> list[int] | None:
    """Return the block ids of a scheduled request, or None where this step does not know it."""
    state = scheduler_output.kv_connector_block_state
    ids = state.get_block_ids(req_id) if state is not None else None
    return list(ids[0]) if ids else None


def scheduled(scheduler_output: Any) -> Iterable[tuple[str, int]]:
    """Yield (request id, tokens computed before this step) for each request scheduled in it."""
    for new in scheduler_output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = scheduler_output.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)


def new_blocks(scheduler_output: Any) -> list[int]:
    """Return the block ids given out in this step: what writes them must wait for copies of their old contents."""
    ids = [i for new in scheduler_output.scheduled_new_reqs for i in new.block_ids[0]]
    for blocks in scheduler_output.scheduled_cached_reqs.new_block_ids:
        if blocks:
            ids += blocks[0]
    return ids


def is_plain_prompt(request: Any) -> bool:
    """Return whether token ids and salt alone decide the KV of the request's prompt.

    Requests with adapters, images, prompt embeddings, pooling or streamed input keep to vLLM's own prefix cache.
    """
    return (
        request.prompt_token_ids is not None
        and getattr(request, "prompt_embeds", None) is None
        and getattr(request, "prompt_is_token_ids", None) is None
        and not getattr(request, "mm_features", None)
        and getattr(request, "lora_request", None) is None
        and getattr(request, "pooling_params", None) is None
        and not getattr(request, "resumable", False)
    )


class GpuCache:
    """vLLM's own prefix cache, as far as planning asks it. Answers are hints: what to fetch, not what to claim.

    Args:
        block_pool: vLLM's block pool, or None where it is not known.
        block_tokens: tokens a block.
        hash_tokens: tokens a block hash; another number than ``block_tokens`` makes every answer 0.
    """

    def __init__(self, block_pool: Any, block_tokens: int, hash_tokens: int) -> None:
        self._pool = block_pool if hash_tokens == block_tokens else None

    def has(self, request: Any, block: int) -> bool:
        """Return whether the request's block at index ``block`` is in the GPU's prefix cache."""
        hashes = getattr(request, "block_hashes", ())
        if self._pool is None or block >= len(hashes):
            return False
        return bool(self._pool.get_cached_block(hashes[block], [0]))

    def run(self, request: Any) -> int:
        """Return about how many leading blocks of the request are in the GPU's prefix cache.

        By bisection: vLLM frees a chain from its end, so what is cached is a prefix of it nearly always.
        """
        low, high = 0, len(getattr(request, "block_hashes", ())) if self._pool is not None else 0
        while low < high:
            middle = (low + high) // 2
            if self.has(request, middle):
                low = middle + 1
            else:
                high = middle
        return low
