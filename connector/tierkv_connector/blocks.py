"""The blocks of a request, seen in chunks: which blocks of which KV cache group hold which tokens. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tierkv.layout import BlockTable, Layout
from tierkv_connector.metadata import Span

#: vLLM's null block: it stands where a request has no block, because a window has passed it.
NULL = 0


class Claim(NamedTuple):
    """The part of a load that is in one chunk.

    Attributes:
        chunk: the chunk's position.
        num_tokens: tokens of it that are claimed.
        spans: the blocks to fill, a span a block table. Those that a window has passed already are left out.
    """

    chunk: int
    num_tokens: int
    spans: tuple[Span, ...]


_NOTHING = Span(0, ())


class RequestBlocks:
    """The blocks of one request.

    Args:
        layout: what a chunk is.
        tables: the layout's block tables.
        block_ids: for each KV cache group of the engine, the request's blocks, from its first token on.
    """

    def __init__(self, layout: Layout, tables: Sequence[BlockTable], block_ids: Sequence[Sequence[int]]) -> None:
        self._chunk_tokens = layout.chunk_tokens
        self._tables = [(t, t.per_chunk(layout.chunk_tokens), block_ids[t.group_id]) for t in tables]

    def whole(self, chunk: int, states: Mapping[int, int] | None = None) -> list[Span] | None:
        """Return all blocks of a chunk, or None where one is not there: not given out yet, or passed by a window.

        Args:
            chunk: the chunk's position.
            states: for each KV cache group with recurrent state, the block that holds the state after the chunk's
                last token; None where there is none, of which nothing is returned then.
        """
        spans = []
        for table, per_chunk, ids in self._tables:
            if table.recurrent:
                spans.append(Span(0, (states[table.group_id],)) if states else _NOTHING)
                continue
            blocks = tuple(ids[chunk * per_chunk : (chunk + 1) * per_chunk])
            if len(blocks) < per_chunk or NULL in blocks:
                return None
            spans.append(Span(0, blocks))
        return spans

    def claimed(self, num_tokens: int) -> list[Claim]:
        """Return the chunks of a claim of ``num_tokens``, for which vLLM has given out blocks.

        The blocks given out end with the claimed tokens; what stands before them was on the GPU.
        """
        size, (table, _, ids) = self._chunk_tokens, self._tables[0]
        block_tokens = table.block_tokens
        begin = (len(ids) - -(-num_tokens // block_tokens)) * block_tokens
        end = len(ids) * block_tokens
        chunks = range(begin // size, -(-end // size))
        columns = [
            self._state(chunks, end, table, ids)
            if table.recurrent
            else self._column(chunks, begin, num_tokens, table.block_tokens, per_chunk, ids)
            for table, per_chunk, ids in self._tables
        ]
        counts = [size] * len(chunks)
        counts[0] -= begin - chunks[0] * size
        counts[-1] -= chunks[-1] * size + size - end
        return list(map(Claim, chunks, counts, zip(*columns, strict=True)))

    def _state(self, chunks: range, end: int, table: BlockTable, ids: Sequence[int]) -> list[Span]:
        """Return the span of each chunk where only the state after the last token is loaded."""
        assert len(ids) * table.block_tokens == end, "the groups' blocks do not end at one token"
        assert end % self._chunk_tokens == 0, "a claim was cut to where no recurrent state is stored"
        assert ids[-1] != NULL, "the block for recurrent state is missing"
        return [_NOTHING] * (len(chunks) - 1) + [Span(0, (ids[-1],))]

    @staticmethod
    def _column(
        chunks: range, begin: int, num_tokens: int, block_tokens: int, per_chunk: int, ids: Sequence[int]
    ) -> list[Span]:
        """Return the span of each chunk in one block table."""
        start = len(ids) - -(-num_tokens // block_tokens)
        assert start * block_tokens == begin, "the groups' blocks do not begin at one token"
        if NULL in ids:
            while start < len(ids) and ids[start] == NULL:
                start += 1
            assert NULL not in ids[start:], "a block is missing inside what its layers look at"
        spans = []
        for at in range(chunks.start * per_chunk, chunks.stop * per_chunk, per_chunk):
            if at >= start:
                spans.append(Span(0, tuple(ids[at : at + per_chunk])))
            elif at + per_chunk > start:
                spans.append(Span(start - at, tuple(ids[start : at + per_chunk])))
            else:
                spans.append(_NOTHING)
        return spans
