"""Which blocks hold a chunk: against a model of how vLLM gives blocks out and takes back what a window has passed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.hostindex import HostIndex
from tierkv.keys import chain_keys
from tierkv.layout import CHUNKED_LOCAL, BlockTable, LayerGroup, Layout
from tierkv.pool import HostPool, PoolShape, Segment
from tierkv_connector.blocks import NULL, RequestBlocks
from tierkv_connector.metadata import Span
from tierkv_connector.requests import RequestState
from tierkv_connector.spill import Spiller

CHUNK_TOKENS = 24
FULL = BlockTable(0, 4, "FullAttentionSpec")
TABLES = [
    FULL,
    BlockTable(1, 4, "SlidingWindowSpec", 24),
    BlockTable(2, 8, "SlidingWindowSpec", 40),
    BlockTable(3, 4, CHUNKED_LOCAL, 48),
    BlockTable(4, 12, "SlidingWindowSpec", 13),
]


def layout_of(tables: Sequence[BlockTable]) -> Layout:
    groups = [
        LayerGroup(t.kind, (f"layer.{t.group_id}",), 1, 1, (8,), (1,), (0,), t.window, t.group_id, t.block_tokens)
        for t in tables
    ]
    return Layout(groups[0], "uint8", tables[0].block_tokens, CHUNK_TOKENS, "FAKE", "vec", others=tuple(groups[1:]))


class Allocator:
    """vLLM's block tables of one request, one a group: as many blocks as tokens need, less what windows have passed."""

    def __init__(self, tables: Sequence[BlockTable]) -> None:
        self.tables = tables
        self.ids: list[list[int]] = [[] for _ in range(1 + max(t.group_id for t in tables))]
        self.last = 0

    def load(self, num_local: int, num_external: int) -> None:
        """As for a request that begins with ``num_local`` tokens on the GPU and loads ``num_external``."""
        total = num_local + num_external
        for table in self.tables:
            num_passed = table.first_needed(total) // table.block_tokens
            ids = self.ids[table.group_id]
            ids += [NULL] * num_passed
            self._grow(ids, total, table)

    def step(self, num_computed: int, num_new: int) -> None:
        """As for a step that computes ``num_new`` tokens."""
        for table in self.tables:
            ids = self.ids[table.group_id]
            num_passed = table.first_needed(num_computed) // table.block_tokens
            ids[:num_passed] = [NULL] * min(num_passed, len(ids))
            self._grow(ids, num_computed + num_new, table)

    def _grow(self, ids: list[int], num_tokens: int, table: BlockTable) -> None:
        while len(ids) * table.block_tokens < num_tokens:
            self.last += 1
            ids.append(self.last)


@st.composite
def some_tables(draw: st.DrawFn) -> list[BlockTable]:
    others = draw(st.lists(st.sampled_from(TABLES[1:]), unique=True))
    tables = [FULL, *others] if draw(st.booleans()) else others or [FULL]
    return draw(st.permutations(tables))


@given(some_tables(), st.integers(0, 12), st.integers(1, 12))
def test_a_claim_fills_every_block_that_was_given_out_for_it(
    tables: list[BlockTable], local_units: int, num_chunks: int
) -> None:
    unit = math.lcm(*(t.block_tokens for t in tables))
    num_local = local_units * unit
    total = (num_local // CHUNK_TOKENS + num_chunks) * CHUNK_TOKENS
    allocator = Allocator(tables)
    allocator.load(num_local, total - num_local)
    layout = layout_of(tables)
    claims = list(RequestBlocks(layout, layout.tables(), allocator.ids).claimed(total - num_local))
    assert [c.chunk for c in claims] == list(range(num_local // CHUNK_TOKENS, total // CHUNK_TOKENS))
    assert sum(c.num_tokens for c in claims) == total - num_local
    for place, table in enumerate(tables):
        per_chunk = CHUNK_TOKENS // table.block_tokens
        filled = {
            c.chunk * per_chunk + c.spans[place].first + i: block
            for c in claims
            for i, block in enumerate(c.spans[place].block_ids)
        }
        ids = allocator.ids[table.group_id]
        assert filled == {i: b for i, b in enumerate(ids) if b != NULL and i * table.block_tokens >= num_local}
        needed = range(max(num_local, table.first_needed(total)), total)
        assert {token // table.block_tokens for token in needed} <= filled.keys()


@given(some_tables(), st.lists(st.integers(1, 60), min_size=1, max_size=10))
def test_a_chunk_is_whole_where_no_window_has_passed_it(tables: list[BlockTable], steps: list[int]) -> None:
    layout = layout_of(tables)
    allocator, computed = Allocator(tables), 0
    for step in steps:
        allocator.step(computed, step)
        blocks = RequestBlocks(layout, layout.tables(), allocator.ids)
        for chunk in range((computed + step) // CHUNK_TOKENS + 2):
            first, stop = chunk * CHUNK_TOKENS, (chunk + 1) * CHUNK_TOKENS
            there = all(
                first // t.block_tokens >= t.first_needed(computed) // t.block_tokens
                and stop <= len(allocator.ids[t.group_id]) * t.block_tokens
                for t in tables
            )
            spans = blocks.whole(chunk)
            assert (spans is not None) == there
            for table, span in zip(tables, spans or [], strict=False):
                per_chunk = CHUNK_TOKENS // table.block_tokens
                ids = allocator.ids[table.group_id][chunk * per_chunk : (chunk + 1) * per_chunk]
                assert span == Span(0, tuple(ids))
        computed += step


def test_a_claim_that_vllm_cut_ends_where_its_blocks_end() -> None:
    tables = TABLES[:2]
    layout = layout_of(tables)
    allocator = Allocator(tables)
    allocator.load(8, 28)  # to token 36, in the middle of the second chunk
    claims = list(RequestBlocks(layout, tables, allocator.ids).claimed(28))
    assert [(c.chunk, c.num_tokens) for c in claims] == [(0, 16), (1, 12)]
    assert [[len(s.block_ids) for s in c.spans] for c in claims] == [[4, 3], [3, 3]]
    assert [[s.first for s in c.spans] for c in claims] == [[2, 3], [0, 0]]


def test_a_hole_inside_a_window_is_a_fault_and_not_a_load() -> None:
    tables = TABLES[:2]
    layout = layout_of(tables)
    allocator = Allocator(tables)
    allocator.load(0, 48)
    allocator.ids[1][-2] = NULL
    with pytest.raises(AssertionError, match="a block is missing inside"):
        list(RequestBlocks(layout, tables, allocator.ids).claimed(48))


def test_groups_whose_blocks_begin_elsewhere_are_a_fault_and_not_a_load() -> None:
    tables = TABLES[:2]
    layout = layout_of(tables)
    rng = Random(0)
    ids = [[rng.randrange(1, 99) for _ in range(12)], [rng.randrange(1, 99) for _ in range(11)]]
    with pytest.raises(AssertionError, match="do not begin at one token"):
        list(RequestBlocks(layout, tables, ids).claimed(24))


def test_groups_that_opted_out_are_not_looked_at() -> None:
    table = BlockTable(2, 4, "FullAttentionSpec")
    layout = layout_of([table])
    assert layout.tables() == (table,)
    blocks = RequestBlocks(layout, layout.tables(), [[], [7], [1, 2, 3, 4, 5, 6]])
    assert blocks.whole(0) == [Span(0, (1, 2, 3, 4, 5, 6))]


def test_what_a_window_has_passed_is_not_stored_and_counted() -> None:
    """Blocks longer than a window can be passed before their chunk is complete."""
    layout = layout_of([FULL, BlockTable(1, 4, "SlidingWindowSpec", 4)])
    allocator = Allocator(layout.tables())
    pool = HostPool(shape := PoolShape(4, 1, layout.part_nbytes), [Segment.create(shape.segment_nbytes(0))])
    counters: Counter[str] = Counter()
    spiller = Spiller(HostIndex(pool), layout, counters)
    tokens = list(range(2 * CHUNK_TOKENS))
    request = SimpleNamespace(request_id="r", prompt_token_ids=tokens)
    state = RequestState(request, bytes(32), chain_keys(bytes(32), tokens, CHUNK_TOKENS), b"", 0, True)
    jobs = []
    for computed, num_new in ((0, 20), (20, 28)):
        allocator.step(computed, num_new)
        step = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id="r", num_computed_tokens=computed)],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
            num_scheduled_tokens={"r": num_new},
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda req_id: allocator.ids),
        )
        jobs += spiller.plan(step, {"r": state}, 0)
    assert [(job.piece.block_ids, job.piece.others[0].block_ids) for job in jobs] == [
        (tuple(allocator.ids[0][6:]), tuple(allocator.ids[1][6:]))
    ]
    assert counters["not_spilled"] == 1
    pool.close()
