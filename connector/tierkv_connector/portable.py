"""How the ranks of an engine share out a payload, and payloads that do not depend on it (``portable_ranks``).

Theory of operation. Tensor parallel ranks divide the KV heads among them, in order. A payload is usually each rank's
part as it stands in that rank's memory, so only engines of the same shape understand it. A *portable* payload is one
KV head after the other, and of each head its layers' blocks: rank ``r`` of ``n`` holds the heads from
``r * heads / n``, a run of the payload, so the ranks' parts one behind the other are the same bytes for every ``n``.
Only where a worker finds the bytes in its memory differs (:func:`head_regions`); pool, store server, disk and Redis
see payloads as ever. Where ranks outnumber heads, several hold the same one: the first of them stores it, all load it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from tierkv import __version__
from tierkv.errors import ConfigError
from tierkv.layout import LayerGroup, Layout
from tierkv_connector.caches import CacheGroup, is_replicated
from tierkv_connector.device import Region, words

#: Backends whose cache is ``[blocks, KV heads, tokens, ...]``, each head's bytes apart from the others'.
BY_HEADS = ("CPU_ATTN", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
_KINDS = ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")


class Cut(NamedTuple):
    """How ranks share out a payload.

    Attributes:
        num_parts: parts of a payload, those of the first pipeline stage before those of the second.
        replicas: tensor parallel ranks that hold the same part, one after the other.
        portable: payloads are portable.
        num_heads: KV heads of a part of a portable payload; 0 where its bytes have no heads (MLA).
        num_stages: pipeline stages.
    """

    num_parts: int
    replicas: int = 1
    portable: bool = False
    num_heads: int = 0
    num_stages: int = 1

    def part_of(self, rank: int, stage: int = 0) -> int:
        """Return the part that the tensor parallel ``rank`` of a pipeline ``stage`` holds."""
        return stage * (self.num_parts // self.num_stages) + rank // self.replicas

    def stores(self, rank: int) -> bool:
        """Return whether the tensor parallel ``rank`` is the one of its stage that stores its part."""
        return rank % self.replicas == 0


def cut_over(groups: Sequence[CacheGroup], tp_size: int, model_config: Any, portable: bool, pp_size: int = 1) -> Cut:
    """Return how an engine's ranks share out a payload.

    Args:
        groups: what is stored of the model.
        tp_size: tensor parallel ranks.
        model_config: vLLM's.
        portable: as the user set ``portable_ranks``.
        pp_size: pipeline stages.

    Raises:
        ConfigError: payloads are to be portable, and those of this model cannot be.
    """
    if portable and pp_size > 1:
        raise _refused(f"its layers are shared out over {pp_size} pipeline stages")
    if is_replicated(groups):
        return Cut(pp_size, tp_size, portable, num_stages=pp_size)
    if not portable:
        return Cut(pp_size * tp_size, num_stages=pp_size)
    total = int(model_config.get_total_num_kv_heads())
    if total % tp_size and tp_size % total:
        raise _refused(f"its {total} KV heads cannot be shared out evenly over {tp_size} ranks")
    local = max(1, total // tp_size)
    for group in groups:
        for name, spec in group.specs.items():
            kind, num_heads = type(spec).__name__, getattr(spec, "num_kv_heads", 0)
            if kind not in _KINDS:
                raise _refused(f"its layer {name} keeps a cache of the kind {kind}, which has no KV heads")
            if num_heads != local:
                raise _refused(f"its layer {name} has {num_heads} KV heads a rank, and its configuration says {local}")
    return Cut(total // local, max(1, tp_size // total), True, local)


def canonical(layout: Layout, cut: Cut) -> Layout:
    """Return the layout of portable payloads of which ``layout`` is what one rank holds.

    Raises:
        ConfigError: it does not keep KV heads apart.
    """
    if not cut.num_heads:
        return layout

    def whole(group: LayerGroup, backend: str) -> LayerGroup:
        if backend not in BY_HEADS or len(group.shape) != 3 or group.shape[0] != cut.num_heads:
            raise _refused(
                f"its attention backend {backend} keeps a block with shape {group.shape}, in which TierKV does not "
                f"know the KV heads (it does of {', '.join(BY_HEADS)})"
            )
        return msgspec.structs.replace(
            group,
            num_kv_heads=cut.num_heads * cut.num_parts,
            block_nbytes=tuple(nbytes * cut.num_parts for nbytes in group.block_nbytes),
            shape=group.shape[1:],
            order=tuple(axis for axis in group.order if axis != 1),
        )

    others = tuple(whole(group, group.backend or layout.backend) for group in layout.others)
    return msgspec.structs.replace(layout, group=whole(layout.group, layout.backend), others=others)


def head_regions(
    layout: Layout, kv_caches: Mapping[str, torch.Tensor], num_blocks: int, num_heads: int
) -> list[Region]:
    """Return the regions of a rank's ``num_heads`` KV heads, in the order of their bytes in its part.

    Args:
        layout: of portable payloads.
        kv_caches: one tensor a layer, by the layer's name.
        num_blocks: vLLM's number of blocks.
        num_heads: KV heads of this rank.
    """
    places = {table.group_id: place for place, table in enumerate(layout.tables())}
    regions: list[Region] = []
    offset = 0
    for head in range(num_heads):
        for group in layout.groups:
            per_chunk = layout.chunk_tokens // layout.tokens_of(group)
            for name in group.layers:
                rows = words(_head(kv_caches[name], num_blocks, head), offset)
                nbytes = rows[0].numel() * rows.element_size()
                regions.append(Region(rows, offset, nbytes, per_chunk, places[group.table]))
                offset += regions[-1].nbytes
    return regions


def _head(cache: torch.Tensor, num_blocks: int, head: int) -> torch.Tensor:
    """Return a KV head of a cache as ``[num_blocks, ...]``, the axes of a block in the order of memory."""
    blocks = cache.unflatten(0, (num_blocks, cache.shape[0] // num_blocks))[:, :, head]
    inner = sorted(range(2, blocks.dim()), key=lambda d: (-blocks.stride(d), d))
    return blocks.permute(0, 1, *inner)


def _refused(why: str) -> ConfigError:
    return ConfigError(
        f"portable_ranks=true is not served by TierKV {__version__} for this model: {why}; leave it out, and share "
        f"between engines of one tensor_parallel_size"
    )


def same_but_for_names(layout: Layout, other: Layout) -> bool:
    """Return whether two pipeline stages keep as many layers of the same kinds: their names alone may differ."""

    def nameless(layout: Layout) -> Layout:
        bare = [msgspec.structs.replace(group, layers=("",) * len(group.layers)) for group in layout.groups]
        return msgspec.structs.replace(layout, group=bare[0], others=tuple(bare[1:]))

    return nameless(layout) == nameless(other)
