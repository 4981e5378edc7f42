"""Copies between the GPU and the host pool, as the scheduler half plans them and a device makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Span(NamedTuple):
    """Blocks of one block table that hold a part of a chunk.

    Attributes:
        first: index within the chunk of the first block to copy.
        block_ids: the GPU's blocks, for block ``first`` of the chunk and those that follow.
    """

    first: int
    block_ids: tuple[int, ...]


class Piece(NamedTuple):
    """Part of a chunk to copy between its slot and the GPU.

    Attributes:
        slot: the slot.
        first, block_ids: the span of the layout's first block table.
        others: the spans of its further block tables, one each, in their order.
    """

    slot: int
    first: int
    block_ids: tuple[int, ...]
    others: tuple[Span, ...] = ()

    @classmethod
    def of(cls, slot: int, spans: Sequence[Span]) -> Piece:
        """Return the piece with one span a block table."""
        return cls(slot, *spans[0], tuple(spans[1:]))

    @property
    def spans(self) -> tuple[Span, ...]:
        return (Span(self.first, self.block_ids), *self.others)

    @property
    def all_block_ids(self) -> list[int]:
        """The blocks of all block tables. Tables draw them from one pool: no block is in two."""
        return [block for span in self.spans for block in span.block_ids]


@dataclass(frozen=True)
class LoadJob:
    """Slots to copy to the GPU for a request, reported as one.

    Attributes:
        sync_id: number of a load that this step's forward needs; 0 of one that the request waits for.
    """

    req_id: str
    pieces: tuple[Piece, ...]
    sync_id: int = 0


@dataclass(frozen=True)
class StoreJob:
    """Blocks to copy to a slot once this step has computed them."""

    job_id: int
    piece: Piece
