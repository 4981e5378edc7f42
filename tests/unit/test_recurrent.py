"""Recurrent state: what its blocks are in a chunk, where a hit may end, and that vLLM's own manager agrees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MambaSpec

from tierkv.errors import ConfigError
from tierkv.hostindex import HostIndex
from tierkv.layout import MARK_NBYTES, RECURRENT, BlockTable, LayerGroup, Layout, chunk_tokens_for
from tierkv.pool import HostPool, PoolShape, Segment
from tierkv_connector.blocks import RequestBlocks
from tierkv_connector.caches import describe, regions_of, served_groups
from tierkv_connector.metadata import Span
from tierkv_connector.recurrent import States

NUM_BLOCKS = 5
FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
STATE: dict[str, Any] = {
    "block_size": 16,
    "shapes": ((3, 4), (2, 5)),
    "dtypes": (torch.bfloat16, torch.float32),
    "page_size_padded": 4096,
}
MAMBA = MambaSpec(mamba_cache_mode="align", **STATE)
TABLES = (BlockTable(0, 4, "FullAttentionSpec"), BlockTable(1, 4, RECURRENT, 1), BlockTable(2, 8, RECURRENT, 1))
CHUNK = 8


def config(*specs: Any) -> Any:
    groups = [KVCacheGroupSpec([name], spec) for name, spec in zip("ab", specs, strict=False)]
    return SimpleNamespace(kv_cache_groups=groups, num_blocks=NUM_BLOCKS)


def vllm_config() -> Any:
    layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "FAKE"), head_size=64)
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"a": layer, "b": layer}),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        model_config=SimpleNamespace(dtype=torch.float32),
    )


def layout_of(tables: tuple[BlockTable, ...]) -> Layout:
    groups = [
        LayerGroup(t.kind, (str(t),), 1, 1, (8,), (1,), (0,), t.window, t.group_id, t.block_tokens) for t in tables
    ]
    return Layout(groups[0], "uint8", tables[0].block_tokens, CHUNK, "FAKE", "vec", others=tuple(groups[1:]))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "mamba_cache_mode='align' \\(here it is 'none'\\)"),
        ({"mamba_cache_mode": "all"}, "here it is 'all'"),
        ({"mamba_cache_mode": "align", "num_speculative_blocks": 2}, "speculative decoding of a model with recurrent"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        served_groups(config(FULL, MambaSpec(**STATE, **options)))


def test_a_payload_has_one_state_a_layer_without_padding_and_a_mark() -> None:
    page = torch.zeros(NUM_BLOCKS, 4096, dtype=torch.int8)
    state_nbytes = 3 * 4 * 2 + 2 * 5 * 4
    caches = {
        "a": torch.zeros(NUM_BLOCKS, 2, 16, 16),
        "b": page.as_strided((NUM_BLOCKS, 1, 1, state_nbytes), (4096, state_nbytes, state_nbytes, 1)),
    }
    groups = served_groups(config(FULL, MAMBA))
    layout = describe(groups, caches, NUM_BLOCKS, 1, 32, vllm_config())
    assert layout.part_nbytes == 2 * (2 * 16 * 16 * 4) + state_nbytes + MARK_NBYTES
    attention, state = regions_of(layout, caches, NUM_BLOCKS)
    assert (attention.num_blocks, state.num_blocks, state.nbytes) == (2, 1, state_nbytes)
    assert layout.others[0].dtype == "bfloat16[3x4]+float32[2x5]"
    assert describe(groups, caches, NUM_BLOCKS, 1, None, vllm_config()).chunk_tokens == 16, "states are at blocks' ends"
    others = served_groups(
        config(FULL, MambaSpec(**STATE | {"dtypes": (torch.float32,) * 2}, mamba_cache_mode="align"))
    )
    assert describe(others, caches, NUM_BLOCKS, 1, 32, vllm_config()).layout_id() != layout.layout_id()


def test_states_do_not_limit_the_length_of_a_chunk() -> None:
    assert chunk_tokens_for(TABLES, [8, 8, 8], 64) == 64
    assert chunk_tokens_for(TABLES, [8, 8, 8]) == 8


def test_a_chunk_has_the_blocks_with_its_states_or_none() -> None:
    blocks = RequestBlocks(layout_of(TABLES), TABLES, [[1, 2, 3, 4], [0, 0, 0, 5], [0, 6]])
    assert blocks.whole(1, {1: 5, 2: 6}) == [Span(0, (3, 4)), Span(0, (5,)), Span(0, (6,))]
    assert blocks.whole(1) == [Span(0, (3, 4)), Span(0, ()), Span(0, ())]


def test_of_a_claim_the_last_states_are_loaded() -> None:
    blocks = RequestBlocks(layout_of(TABLES), TABLES, [[1, 2, 3, 4], [0, 0, 0, 5], [0, 6]])
    first, last = blocks.claimed(16)
    assert [len(span.block_ids) for span in first.spans] == [2, 0, 0]
    assert last.spans == (Span(0, (3, 4)), Span(0, (5,)), Span(0, (6,)))


@pytest.mark.parametrize(
    ("ids", "num_tokens", "fault"),
    [
        ([[1, 2, 3, 4], [0, 0, 0, 5], [6]], 16, "the groups' blocks do not end at one token"),
        ([[1, 2, 3], [0, 0, 5]], 12, "cut to where no recurrent state is stored"),
        ([[1, 2], [0, 0]], 8, "the block for recurrent state is missing"),
    ],
)
def test_a_claim_that_vllm_took_otherwise_is_a_fault_and_not_a_load(
    ids: list[list[int]], num_tokens: int, fault: str
) -> None:
    tables = TABLES[: len(ids)]
    with pytest.raises(AssertionError, match=fault):
        RequestBlocks(layout_of(tables), tables, ids).claimed(num_tokens)


@pytest.fixture
def pool() -> Any:
    shape = PoolShape(6, 2, layout_of(TABLES).part_nbytes)
    pool = HostPool(shape, [Segment.create(shape.segment_nbytes(rank)) for rank in range(2)])
    yield pool
    pool.close()


def test_a_hit_ends_with_the_last_chunk_that_has_its_states(pool: HostPool) -> None:
    index, states = HostIndex(pool), States(layout_of(TABLES), pool)
    keys = [bytes([i]) * 32 for i in range(4)]
    entries = []
    for i, key in enumerate(keys):
        entry = index.reserve(key, keys[i - 1] if i else bytes(32), i, CHUNK)
        assert entry is not None
        states.mark(entry.slot, i == 1)
        index.filled(entry, "host")
        entries.append(entry)
    assert [states.last(index, keys, start, end) for start, end in ((0, 4), (0, 2), (0, 1), (2, 4))] == [2, 2, 0, 2]
    assert [states.may_add(entry) for entry in entries] == [True, False, True, True]
    index.pin(entries[0])
    assert not states.may_add(entries[0]), "somebody reads it"
    states.mark(entries[3].slot, True)
    assert states.last(index, keys, 0, 4) == 4
    states.mark(entries[3].slot, False)
    assert states.last(index, keys, 0, 4) == 2


def step(ids: list[list[int]], offers: list[tuple[int, int, int]]) -> Any:
    state = SimpleNamespace(get_block_ids=lambda req_id: ids, boundary_state_offloads={"r": offers})
    return SimpleNamespace(kv_connector_block_state=state)


def test_states_are_where_a_step_ends_and_where_vllm_says_so(pool: HostPool) -> None:
    states = States(layout_of(TABLES), pool)
    ids = [[1, 2, 3, 4], [0, 0, 0, 5], [0, 6]]
    assert states.of_step(step(ids, []), "r", 16) == {1: {1: 5, 2: 6}}
    assert states.of_step(step(ids, []), "r", 15) == {}, "it ends inside a block"
    assert states.of_step(step([[1, 2, 3], [0, 0, 5], [0, 6]], []), "r", 12) == {}, "it ends inside a chunk"
    assert states.of_step(step(ids, [(1, 7, 8), (2, 8, 8), (1, 9, 12)]), "r", 15) == {0: {1: 7, 2: 8}}
    assert states.of_step(step(ids, [(1, 7, 8)]), "r", 15) == {}, "a group lacks it"
    assert states.of_step(step(ids, [(1, 7, 12), (2, 8, 12)]), "r", 15) == {}, "it is inside a chunk"
    assert states.of_step(step(ids, [(1, 7, 16), (2, 8, 16)]), "r", 15) == {}, "the step does not get there"
    assert states.of_step(step([[1, 2, 3, 4], [0, 0, 0, 0], [0, 6]], []), "r", 16) == {}, "there is no block"


def test_vllms_manager_gives_out_the_block_that_a_load_fills_and_the_next_step_reads() -> None:
    """Three blocks are claimed: two are null, the third is the state's; the next step reads it and writes another."""
    manager = MambaManager(
        MambaSpec(mamba_cache_mode="align", **STATE),
        BlockPool(8, True, 16),
        enable_caching=True,
        kv_cache_group_id=0,
        scheduler_block_size=16,
    )
    manager.add_local_computed_blocks("r", [], 0, 48)
    manager.allocate_external_computed_blocks("r", 0, 48)
    ids = [block.block_id for block in manager.req_to_blocks["r"]]
    assert ids[:2] == [0, 0]
    table = BlockTable(0, 16, RECURRENT, 1)
    layout = Layout(layout_of((table,)).group, "uint8", 16, 16, "FAKE", "vec")
    claims = RequestBlocks(layout, (table,), [ids]).claimed(48)
    assert [claim.spans for claim in claims] == [(Span(0, ()),), (Span(0, ()),), (Span(0, (ids[2],)),)]
    manager.allocate_new_blocks("r", 60, 60)
    assert manager.last_state_block_idx["r"] == 2, "where the next step begins"
    assert manager.req_to_blocks["r"][3].block_id not in (0, ids[2])
