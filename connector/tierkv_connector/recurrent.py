"""Recurrent state: which chunks have one, and so may end a hit.

Theory of operation. A layer of this kind keeps one state after all tokens so far. vLLM writes it where a step ends,
and keeps it for others where that is a multiple of the block size (``mamba_cache_mode="align"``): most chunks have
none. Their payloads hold the KV of the other layers, which a longer hit needs; a hit ends with a chunk that has its
state. A *mark* at the end of a payload says whether it is there, in the host pool and in every tier below; the
scheduler half writes it when it plans the store. What is in the host pool without its state is replaced by a payload
that has it, once another request's step ends there.

A state is applied once: a claim ends before the last token, at the state's own position, and vLLM goes on from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tierkv import __version__
from tierkv.errors import ConfigError
from tierkv.hostindex import Entry, HostIndex
from tierkv.layout import MARK_NBYTES, Layout
from tierkv.pool import HostPool
from tierkv_connector.blocks import NULL
from tierkv_connector.compat import block_ids_of, boundary_states


def check(spec: Any) -> None:
    """Check that a KV cache group with recurrent state is kept in a way that TierKV serves.

    Raises:
        ConfigError: it is not.
    """
    mode = getattr(spec, "mamba_cache_mode", "none")
    if mode != "align":
        raise ConfigError(
            f"this model has recurrent state, which vLLM keeps where a prefix ends only with "
            f"enable_prefix_caching=True and mamba_cache_mode='align' (here it is {mode!r}); set both, or remove the "
            f"connector"
        )
    if getattr(spec, "num_speculative_blocks", 0):
        raise ConfigError(
            f"speculative decoding of a model with recurrent state is not served by TierKV {__version__}; "
            f"leave speculative_config out, or remove the connector"
        )


def content(spec: Any) -> str:
    """Return what a state is made of, element types and shapes in order: it stands for the dtype in a layout."""
    parts = zip(spec.dtypes, spec.shapes, strict=True)
    return "+".join(f"{str(dtype).removeprefix('torch.')}[{'x'.join(map(str, shape))}]" for dtype, shape in parts)


def isa() -> str:
    """Return the instruction set that decides which of vLLM's kernels for CPUs made a state.

    Some keep it in an order of their own, of which vLLM tells nothing.
    """
    if torch.cpu._is_amx_tile_supported():
        return "amx"
    if torch.cpu._is_avx512_bf16_supported():
        return "avx512_bf16"
    return str(torch.backends.cpu.get_cpu_capability()).lower()


class States:
    """Which chunks have their recurrent states; every one, of a model without any.

    Args:
        layout: what a chunk is.
        pool: the host pool, where the marks are.
    """

    def __init__(self, layout: Layout, pool: HostPool) -> None:
        self._tables = tuple(table for table in layout.tables() if table.recurrent)
        self._chunk_tokens = layout.chunk_tokens
        self._pool = pool
        self._at = layout.part_nbytes - MARK_NBYTES

    def of_step(self, scheduler_output: Any, req_id: str, end: int) -> dict[int, Mapping[int, int]]:
        """Return the chunks of a request whose states are on the GPU once a step is over.

        Args:
            scheduler_output: the step.
            req_id: the request.
            end: the request's tokens that are computed then.

        Returns:
            For each such chunk, by its position, the block in each group with recurrent state.
        """
        block_ids = block_ids_of(scheduler_output, req_id) if self._tables else None
        if block_ids is None:
            return {}
        found: dict[int, dict[int, int]] = {}
        for group_id, block, num_tokens in boundary_states(scheduler_output, req_id):
            found.setdefault(num_tokens, {})[group_id] = block
        for table in self._tables:
            num, rest = divmod(end, table.block_tokens)
            ids = block_ids[table.group_id]
            if not rest and 0 < num <= len(ids) and ids[num - 1] != NULL:  # what the step leaves behind
                found.setdefault(end, {})[table.group_id] = ids[num - 1]
        return {
            num_tokens // self._chunk_tokens - 1: blocks
            for num_tokens, blocks in found.items()
            if num_tokens <= end
            and not num_tokens % self._chunk_tokens
            and all(table.group_id in blocks for table in self._tables)
        }

    def mark(self, slot: int, there: bool) -> None:
        """Note in a slot whether the payload that is about to be copied to it has its states."""
        if self._tables:
            at = slot * self._pool.shape.cell_nbytes + self._at
            for segment in self._pool.segments:
                segment.data[at : at + MARK_NBYTES] = 0
                segment.data[at] = there

    def there(self, entry: Entry) -> bool:
        """Return whether a usable chunk has its states. Pure."""
        at = entry.slot * self._pool.shape.cell_nbytes + self._at
        return not self._tables or bool(self._pool.segments[0].data[at] == 1)

    def may_add(self, entry: Entry) -> bool:
        """Return whether a chunk that is there lacks its states, and can be replaced now by one that has them."""
        return entry.state == Entry.READY and not entry.num_pins and not self.there(entry)

    def last(self, index: HostIndex, keys: Sequence[bytes], start: int, end: int) -> int:
        """Return where a hit of the usable chunks of ``keys`` from ``start`` to ``end`` may end, ``start`` if nowhere.

        Pure.
        """
        while self._tables and end > start:
            entry = index.peek(keys[end - 1])
            if entry is not None and self.there(entry):
                break
            end -= 1
        return end
