"""Portable payloads at the level of bytes: whatever ranks store them, in whatever memory order, they are the same."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MLAAttentionSpec, SlidingWindowSpec

from tierkv.errors import ConfigError
from tierkv.layout import Layout, Namespace, Shard
from tierkv.pool import HostPool, PoolShape, Segment
from tierkv_connector.caches import CacheGroup, describe, regions_of, served_groups
from tierkv_connector.device import CpuDevice, words
from tierkv_connector.jobs import LoadJob, Piece, StoreJob
from tierkv_connector.portable import Cut, canonical, cut_over, head_regions

NUM_BLOCKS, TOKENS, WIDTH = 5, 4, 6
LAYERS = ("a", "b", "c")
CHUNK_BLOCKS = 2

#: How a rank keeps [blocks, heads, tokens, width] in memory.
Keep = Callable[[torch.Tensor], torch.Tensor]


def heads_outside(whole: torch.Tensor) -> torch.Tensor:
    return whole.contiguous()


def tokens_outside(whole: torch.Tensor) -> torch.Tensor:
    return whole.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)


def among_layers(whole: torch.Tensor) -> torch.Tensor:
    """One of several layers in one allocation."""
    blocks, *rest = whole.shape
    shared = torch.zeros(blocks, 3, *rest, dtype=whole.dtype)
    shared[:, 1] = whole
    return shared[:, 1]


def small_blocks(whole: torch.Tensor) -> torch.Tensor:
    """Two blocks of the kernel make one of the manager."""
    blocks, heads, tokens, width = whole.shape
    split = whole.unflatten(2, (2, tokens // 2)).permute(0, 2, 1, 3, 4)
    return split.reshape(2 * blocks, heads, tokens // 2, width).contiguous()


def odd_bytes(whole: torch.Tensor) -> torch.Tensor:
    """Rows that are no whole number of 8-byte words."""
    return whole[..., : WIDTH - 1].contiguous().view(torch.uint8)[..., :5].contiguous()


KEEPS = [heads_outside, tokens_outside, among_layers, small_blocks, odd_bytes]


def kv_of(num_heads: int) -> list[torch.Tensor]:
    """The KV of a model, a layer each: [blocks, heads, tokens, width]."""
    data = np.random.Generator(np.random.PCG64(num_heads))
    shape = (NUM_BLOCKS, num_heads, TOKENS, WIDTH)
    return [torch.from_numpy(data.standard_normal(shape, dtype=np.float32)) for _ in LAYERS]


def groups_of(num_heads: int, kind: Any = FullAttentionSpec, **fields: Any) -> list[CacheGroup]:
    spec = kind(block_size=TOKENS, num_kv_heads=num_heads, head_size=WIDTH // 2, dtype=torch.float32, **fields)
    return served_groups(SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(list(LAYERS), spec)]))


def vllm_config(num_heads: int, backend: str = "FLASH_ATTN") -> Any:
    layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend), head_size=WIDTH // 2)
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(LAYERS, layer)),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: num_heads, dtype=torch.bfloat16),
    )


class Engine:
    """The devices of an engine's ranks, each with its KV heads of a model's KV, and the pool."""

    def __init__(self, kv: list[torch.Tensor], tp_size: int, keep: Keep) -> None:
        num_heads = kv[0].shape[1]
        config = vllm_config(num_heads)
        local = max(1, num_heads // tp_size)
        groups = groups_of(local)
        self.cut = cut_over(groups, tp_size, config.model_config, portable=True)
        first = [self.cut.part_of(rank) * local for rank in range(tp_size)]
        self.caches = [{n: keep(t[:, f : f + local]) for n, t in zip(LAYERS, kv, strict=True)} for f in first]
        layouts = [self._describe(groups, caches, config) for caches in self.caches]
        self.layout = layouts[0]
        assert all(layout == self.layout for layout in layouts)
        shape = PoolShape(2, self.cut.num_parts, self.layout.part_nbytes // self.cut.num_parts)
        self.pool = HostPool(shape, [Segment.create(shape.segment_nbytes(i)) for i in range(shape.num_parts)])
        self.devices = [
            CpuDevice(
                head_regions(self.layout, caches, NUM_BLOCKS, self.cut.num_heads),
                shape,
                self.pool.segments[self.cut.part_of(rank)],
            )
            for rank, caches in enumerate(self.caches)
        ]

    def _describe(self, groups: list[CacheGroup], caches: dict[str, torch.Tensor], config: Any) -> Layout:
        part = describe(groups, caches, NUM_BLOCKS, self.cut.num_parts, CHUNK_BLOCKS * TOKENS, config)
        return canonical(part, self.cut)

    def store(self, blocks: tuple[int, ...]) -> bytes:
        for rank, device in enumerate(self.devices):
            if self.cut.stores(rank):
                device.store([StoreJob(1, Piece(1, 0, blocks))])
        return b"".join(self.pool.parts(1))

    def load(self, payload: bytes, blocks: tuple[int, ...]) -> None:
        at = 0
        for part in self.pool.parts(0):
            part[:] = payload[at : at + len(part)]
            at += len(part)
        assert at == len(payload)
        for device in self.devices:
            assert device.load_now([LoadJob("r", (Piece(0, 0, blocks),), 1)]) == []

    def close(self) -> None:
        for device in self.devices:
            device.close()
        self.pool.close()


def payload_of(kv: list[torch.Tensor], keep: Keep, blocks: tuple[int, ...]) -> bytes:
    """The reference: head after head, layer after layer, block after block, as one rank with one head has them."""
    return b"".join(
        keep(layer[block : block + 1, head : head + 1]).contiguous().numpy().tobytes()
        for head in range(kv[0].shape[1])
        for layer in kv
        for block in blocks
    )


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize(("num_heads", "sizes"), [(4, (1, 2, 4)), (6, (1, 2, 3, 6)), (2, (1, 2, 4, 8)), (1, (1, 2, 3))])
def test_a_payload_is_the_same_bytes_over_any_ranks(num_heads: int, sizes: tuple[int, ...], keep: Keep) -> None:
    kv = kv_of(num_heads)
    expected = payload_of(kv, keep, (3, 1))
    namespaces = set()
    for tp_size in sizes:
        engine = Engine(kv, tp_size, keep)
        assert engine.cut == Cut(
            min(num_heads, tp_size), max(1, tp_size // num_heads), True, max(1, num_heads // tp_size)
        )
        assert engine.store((3, 1)) == expected
        engine.load(expected, (0, 4))
        for caches in engine.caches:
            for cache in caches.values():
                ratio = cache.shape[0] // NUM_BLOCKS
                blocks = cache.unflatten(0, (NUM_BLOCKS, ratio))
                assert torch.equal(blocks[[0, 4]], blocks[[3, 1]])
                assert not torch.equal(blocks[0], blocks[2])
        namespaces.add(Namespace("id", "model", engine.layout, Shard(portable=True)).ns_id())
        engine.close()
    assert len(namespaces) == 1


def test_the_order_of_memory_does_not_matter() -> None:
    """What a head has of a block is in one order, whether the heads of a token or the tokens of a head are together."""
    kv = kv_of(4)
    one, other = Engine(kv, 2, heads_outside), Engine(kv, 1, tokens_outside)
    assert one.store((2, 4)) == other.store((2, 4))
    assert one.layout == other.layout
    one.close()
    other.close()


def test_a_layout_that_is_not_portable_is_another_one() -> None:
    engine = Engine(kv := kv_of(4), 1, heads_outside)
    caches = dict(zip(LAYERS, kv, strict=True))
    plain = describe(groups_of(4), caches, NUM_BLOCKS, 1, CHUNK_BLOCKS * TOKENS, vllm_config(4))
    assert plain.part_nbytes == engine.layout.part_nbytes
    assert plain != engine.layout
    shards = Shard(), Shard(portable=True)
    assert len({Namespace("id", "model", layout, s).ns_id() for layout in (plain, engine.layout) for s in shards}) == 4
    about = Namespace("id", "model", engine.layout, Shard(portable=True))
    assert Namespace.from_json(about.to_json()) == about
    assert b"portable" not in Namespace("id", "model", plain, Shard(tp_size=2)).to_json()
    engine.close()


def test_the_order_within_a_head_is_a_part_of_the_layout() -> None:
    """The rows of a head are stored as they lie in memory: transposed they are other bytes."""
    cut, groups = Cut(1, 1, True, 4), groups_of(4)
    caches = [torch.zeros(NUM_BLOCKS, 4, TOKENS, WIDTH), torch.zeros(NUM_BLOCKS, 4, WIDTH, TOKENS).transpose(2, 3)]
    layouts = [
        canonical(describe(groups, dict.fromkeys(LAYERS, cache), NUM_BLOCKS, 1, None, vllm_config(4)), cut)
        for cache in caches
    ]
    assert [layout.group.order for layout in layouts] == [(2, 3), (3, 2)]
    assert layouts[0].layout_id() != layouts[1].layout_id()


def test_what_has_no_heads_is_portable_as_it_is() -> None:
    """MLA: every rank holds all of it. One stores it, and its bytes say nothing of the others."""
    groups = groups_of(1, MLAAttentionSpec)
    caches = {name: torch.zeros(NUM_BLOCKS, TOKENS, WIDTH) for name in LAYERS}
    layouts = []
    for tp_size in (1, 4):
        cut = cut_over(groups, tp_size, None, portable=True)
        assert cut == Cut(1, tp_size, True)
        assert [cut.stores(rank) for rank in range(tp_size)] == [True] + [False] * (tp_size - 1)
        layouts.append(canonical(describe(groups, caches, NUM_BLOCKS, 1, None, vllm_config(1)), cut))
    assert layouts[0] == layouts[1]
    assert regions_of(layouts[0], caches, NUM_BLOCKS)[-1].cell_offset > 0


def test_by_default_each_rank_has_a_part_of_its_own() -> None:
    assert cut_over(groups_of(1), 4, None, portable=False) == Cut(4)
    assert cut_over(groups_of(1, MLAAttentionSpec), 4, None, portable=False) == Cut(1, 4)


@pytest.mark.parametrize(
    ("total", "tp_size", "local", "sentence"),
    [
        (6, 4, 1, r"its 6 KV heads cannot be shared out evenly over 4 ranks"),
        (4, 6, 1, r"its 4 KV heads cannot be shared out evenly over 6 ranks"),
        (4, 2, 4, r"its layer a has 4 KV heads a rank, and its configuration says 2"),
    ],
)
def test_heads_that_cannot_be_shared_out_are_refused(total: int, tp_size: int, local: int, sentence: str) -> None:
    with pytest.raises(ConfigError, match=rf"^portable_ranks=true is not served .*: {sentence}; leave it out"):
        cut_over(groups_of(local), tp_size, vllm_config(total).model_config, portable=True)


def test_a_model_of_which_only_some_layers_have_heads_is_refused() -> None:
    latent = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=WIDTH, dtype=torch.float32)
    window = SlidingWindowSpec(block_size=TOKENS, num_kv_heads=2, head_size=3, dtype=torch.float32, sliding_window=8)
    groups = [KVCacheGroupSpec(["a"], window), KVCacheGroupSpec(["b"], latent)]
    with pytest.raises(ConfigError, match=r"its layer b keeps a cache of the kind MLAAttentionSpec, which has no KV"):
        cut_over(served_groups(SimpleNamespace(kv_cache_groups=groups)), 1, vllm_config(2).model_config, portable=True)


@pytest.mark.parametrize(
    ("backend", "shape"),
    [
        ("ROCM_ATTN", (NUM_BLOCKS, 2, TOKENS, WIDTH)),  # not known
        ("FLASH_ATTN", (NUM_BLOCKS, TOKENS, 2, WIDTH)),  # heads elsewhere
        ("FLASH_ATTN", (NUM_BLOCKS, 2, TOKENS * WIDTH)),  # no such axes
    ],
)
def test_a_backend_whose_heads_are_not_known_is_refused(backend: str, shape: tuple[int, ...]) -> None:
    caches = dict.fromkeys(LAYERS, torch.zeros(shape))
    part = describe(groups_of(2), caches, NUM_BLOCKS, 1, None, vllm_config(2, backend))
    with pytest.raises(ConfigError, match=rf"its attention backend {backend} keeps a block with shape .*KV heads"):
        canonical(part, Cut(1, 1, True, 2))


def test_axes_without_gaps_between_them_are_one() -> None:
    rows = torch.zeros(6, 4, 2, 8)
    assert words(rows, 0).shape == (6, 32)
    assert words(rows, 0).dtype == torch.int64
    assert words(rows, 4).dtype == torch.uint8
    assert words(rows[:, :, 1], 0).shape == (6, 4, 4)
    assert words(rows[:, :, :1], 0).shape == (6, 4, 4)
    assert words(rows[:, 1:2, :], 0).shape == (6, 8)


def test_stages_do_not_go_with_portable_payloads() -> None:
    for groups in (groups_of(4), groups_of(1, MLAAttentionSpec)):
        model = SimpleNamespace(get_total_num_kv_heads=lambda: 4)
        with pytest.raises(ConfigError, match="shared out over 2 pipeline stages"):
            cut_over(groups, 1, model, portable=True, pp_size=2)


def test_layers_with_another_backend_are_looked_at_too() -> None:
    caches = dict(zip(LAYERS, kv_of(4), strict=True))
    layout = describe(groups_of(4), caches, NUM_BLOCKS, 1, CHUNK_BLOCKS * TOKENS, vllm_config(4))
    assert canonical(layout, Cut(1, 1, True, 4)).group.num_kv_heads == 4
    others = (msgspec.structs.replace(layout.group, backend="ROCM_ATTN"),)
    with pytest.raises(ConfigError, match="its attention backend ROCM_ATTN keeps a block"):
        canonical(msgspec.structs.replace(layout, others=others), Cut(1, 1, True, 4))
