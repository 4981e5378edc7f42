"""vLLM's KV caches: which groups of layers are served, and what the bytes of their blocks mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from tierkv import __version__
from tierkv.errors import ConfigError
from tierkv.layout import CHUNKED_LOCAL, RECURRENT, BlockTable, LayerGroup, Layout, chunk_tokens_for
from tierkv_connector import recurrent
from tierkv_connector.compat import KVConnectorTransferResults, quantized_format
from tierkv_connector.device import Region, block_matrix, make_regions

WINDOWED = {"SlidingWindowSpec": "sliding_window", CHUNKED_LOCAL: "attention_chunk_size"}
REPLICATED = "MLAAttentionSpec"
SERVED = ("FullAttentionSpec", REPLICATED, *WINDOWED, RECURRENT)
#: Attention backends that compute prompts from their first token only: vLLM turns its own prefix cache off with them.
FROM_THE_START = ("CPU_MLA",)


class CacheGroup(NamedTuple):
    """A KV cache group of vLLM that is stored and loaded.

    Attributes:
        group_id: its place among vLLM's groups.
        block_tokens: tokens a block.
        specs: vLLM's description of each of its layers, by name, in its order.
    """

    group_id: int
    block_tokens: int
    specs: dict[str, Any]

    @property
    def table(self) -> BlockTable:
        spec = next(iter(self.specs.values()))
        return BlockTable(self.group_id, self.block_tokens, _kind(spec), _window(spec))


def served_groups(kv_cache_config: Any) -> list[CacheGroup]:
    """Return the groups of a model that are stored and loaded: all but those that opt out.

    Raises:
        ConfigError: the model has a group that cannot be left out and is of a kind that is not served.
    """
    served = []
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        # What vLLM rebuilds by itself after a load, and scratch memory that no prefix hit brings back either.
        if not getattr(group, "enable_kv_transfer", True) or not getattr(spec, "prefix_cacheable", True):
            continue
        if getattr(group, "host_resident", False):
            raise ConfigError(
                f"vLLM keeps a KV cache group of this model in host memory (host_resident), which TierKV {__version__} "
                f"does not serve. Remove the connector for this model, or that option of vLLM"
            )
        specs = getattr(spec, "kv_cache_specs", None) or dict.fromkeys(group.layer_names, spec)
        for kind in {_kind(s) for s in specs.values()} - set(SERVED):
            raise ConfigError(
                f"this model has a KV cache of the kind {kind}; TierKV {__version__} serves {', '.join(SERVED)}. "
                f"Remove the connector for this model"
            )
        for one in specs.values():
            if _kind(one) == RECURRENT:
                recurrent.check(one)
        served.append(CacheGroup(group_id, spec.block_size, {name: specs[name] for name in group.layer_names}))
    if not served:
        raise ConfigError("this model has no KV cache that can be stored. Remove the connector for this model")
    if has_windows(served) and KVConnectorTransferResults is None:
        raise ConfigError(
            f"this model has windows of attention or {len(served)} KV cache groups, and this version of vLLM cannot be "
            f"told that a load for such a model failed; use vLLM 0.30 or later, or set "
            f"disable_hybrid_kv_cache_manager=True"
        )
    return served


def has_windows(groups: Sequence[CacheGroup]) -> bool:
    """Return whether blocks of a loaded prefix may be missing, or are not one list: a window, or several groups."""
    return len(groups) > 1 or bool(groups[0].table.window)


def is_replicated(groups: Sequence[CacheGroup]) -> bool:
    """Return whether all tensor parallel ranks hold the same KV: latents of MLA, which have no heads to share out."""
    return all(_kind(spec) == REPLICATED for group in groups for spec in group.specs.values())


def describe(
    groups: Sequence[CacheGroup],
    kv_caches: Mapping[str, torch.Tensor],
    num_blocks: int,
    num_parts: int,
    wanted: int | None,
    vllm_config: Any,
) -> Layout:
    """Return the layout of the chunks of registered caches.

    Args:
        groups: what is stored of the model.
        kv_caches: one tensor a layer, by the layer's name.
        num_blocks: vLLM's number of blocks.
        num_parts: ranks whose parts make a payload.
        wanted: ``chunk_tokens`` as the user set it.
        vllm_config: vLLM's configuration.

    Raises:
        ConfigError: ``wanted`` does not fit, a block is not one piece of memory, or the attention backend cannot go on
            where a load ends.
    """
    parts = [part for group in groups for part in _parts(group, kv_caches, num_blocks, vllm_config)]
    for part in parts:
        if part.backend in FROM_THE_START:
            raise ConfigError(
                f"vLLM's attention backend {part.backend} computes prompts from their first token only and cannot go "
                f"on where a load ends. Remove the connector, or run this model on a GPU or on a CPU with AMX"
            )
    tables = [group.table for group in groups]
    nbytes = [num_parts * sum(sum(p.block_nbytes) for p in parts if p.table == table.group_id) for table in tables]
    first = parts[0]
    layout = Layout(
        group=msgspec.structs.replace(first, block_tokens=0, dtype="", backend="", isa=""),
        dtype=first.dtype,
        block_tokens=first.block_tokens,
        chunk_tokens=chunk_tokens_for(tables, nbytes, wanted),
        backend=first.backend,
        isa=first.isa,
    )
    names = ("block_tokens", "dtype", "backend", "isa")
    others = []
    for part in parts[1:]:
        same = {name: type(getattr(part, name))() for name in names if getattr(part, name) == getattr(layout, name)}
        others.append(msgspec.structs.replace(part, **same))
    return msgspec.structs.replace(layout, others=tuple(others))


def regions_of(layout: Layout, kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> list[Region]:
    """Return the regions of registered caches, in the order of their bytes in a payload."""
    places = {table.group_id: place for place, table in enumerate(layout.tables())}
    regions: list[Region] = []
    offset = 0
    for group in layout.groups:
        caches = [kv_caches[name] for name in group.layers]
        regions += make_regions(caches, num_blocks, layout.blocks_of(group), places[group.table], offset)
        offset = regions[-1].cell_offset + regions[-1].nbytes
    assert offset + layout.mark_nbytes == layout.part_nbytes, "the regions are not what the layout says"
    return regions


def _parts(
    group: CacheGroup, kv_caches: Mapping[str, torch.Tensor], num_blocks: int, vllm_config: Any
) -> list[LayerGroup]:
    """Return the layers of a group, those of one shape together."""
    alike: dict[tuple[Any, ...], list[str]] = {}
    for name, spec in group.specs.items():
        cache, layer = kv_caches[name], _layer(vllm_config, name)
        what = _kind(spec), _heads(spec), _window(spec), _shape(cache), _order(cache), _dtype(spec, cache, layer)
        alike.setdefault(what, []).append(name)
    return [
        LayerGroup(
            kind=kind,
            layers=tuple(names),
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            block_nbytes=tuple(_block_nbytes(kv_caches[name], num_blocks) for name in names),
            shape=shape,
            order=order,
            window=window,
            table=group.group_id,
            block_tokens=group.block_tokens,
            dtype=dtype,
            backend=backend,
            isa=isa,
        )
        for (kind, (num_kv_heads, head_size), window, shape, order, dtype), names in alike.items()
        for backend, isa in [_backend(vllm_config, kind, names[0], kv_caches[names[0]], group.block_tokens)]
    ]


def _kind(spec: Any) -> str:
    return type(spec).__name__


def _window(spec: Any) -> int:
    if _kind(spec) == RECURRENT:
        return 1
    name = WINDOWED.get(_kind(spec))
    return int(getattr(spec, name)) if name else 0


def _heads(spec: Any) -> tuple[int, int]:
    return int(getattr(spec, "num_kv_heads", 1)), int(getattr(spec, "head_size", 0))


def _dtype(spec: Any, cache: torch.Tensor, layer: Any) -> str:
    """Return what the elements are: where KV is quantized what vLLM calls it, whose tensors then are of mere bytes."""
    if _kind(spec) == RECURRENT:
        return recurrent.content(spec)
    return quantized_format(layer) or str(cache.dtype).removeprefix("torch.")


def _layer(vllm_config: Any, name: str) -> Any:
    """Return vLLM's layer of that name; None where it has no such layer."""
    return vllm_config.compilation_config.static_forward_context.get(name)


def _shape(cache: torch.Tensor) -> tuple[int, ...]:
    return tuple(cache.shape[1:])


def _order(cache: torch.Tensor) -> tuple[int, ...]:
    """Return the axes of a block from the outermost to the innermost in memory."""
    return tuple(sorted(range(1, cache.dim()), key=lambda d: (-cache.stride(d), d)))


def _block_nbytes(cache: torch.Tensor, num_blocks: int) -> int:
    matrix = block_matrix(cache, num_blocks)
    return int(matrix.shape[1] * matrix.element_size())


def _backend(vllm_config: Any, kind: str, layer_name: str, cache: torch.Tensor, block_tokens: int) -> tuple[str, str]:
    """Return the attention backend's name and the instruction set that it packs the cache for."""
    layer = _layer(vllm_config, layer_name)
    backend = layer.get_attn_backend().get_name() if layer is not None else "unknown"
    if cache.device.type != "cpu":
        return backend, cache.device.type
    if kind == RECURRENT:
        return backend, recurrent.isa()
    isa = getattr(layer, "isa", None)  # from 0.29 on vLLM says so itself
    if isa is None:
        from vllm.v1.attention.backends import cpu_attn

        head_size = getattr(layer, "head_size", None)
        # Of quantized KV too it packs for the model's own type.
        dtype = vllm_config.model_config.dtype
        isa = cpu_attn._get_attn_isa(dtype, block_tokens, head_size, vllm_config.cache_config.cache_dtype)
    return backend, str(isa)
