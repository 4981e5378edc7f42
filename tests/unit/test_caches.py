"""vLLM's KV cache groups: which are served, what their layout is, and where their bytes are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1 import kv_cache_interface as vllm_caches
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from tierkv.errors import ConfigError
from tierkv.layout import BlockTable, Layout
from tierkv_connector import caches as caches_module
from tierkv_connector.caches import CacheGroup, describe, is_replicated, regions_of, served_groups
from tierkv_connector.compat import GpuCache, new_blocks

NUM_BLOCKS = 6
HEADS: dict[str, Any] = {"num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
FULL = FullAttentionSpec(block_size=16, **HEADS)
SLIDING = SlidingWindowSpec(block_size=16, sliding_window=64, **HEADS)
LOCAL = ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=128, **HEADS)
LATENT = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=20, dtype=torch.bfloat16)


def config(*groups: KVCacheGroupSpec) -> Any:
    return SimpleNamespace(kv_cache_groups=list(groups), num_blocks=NUM_BLOCKS)


def group(spec: Any, *layers: str, **flags: Any) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(list(layers), spec, **flags)


def vllm_config(backend: str = "FAKE_ATTN", quantized: dict[str, str] | None = None, **more: Any) -> Any:
    """What vLLM knows of its layers: their backends, and how the KV of some is quantized."""
    context = {}
    for name in ("a", "b", "c", "d"):
        context[name] = SimpleNamespace(
            get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend), head_size=64, **more
        )
        if quantized is not None:
            context[name].kv_cache_dtype = quantized.get(name, "auto")
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=context),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
    )


def described(groups: list[CacheGroup], caches: dict[str, torch.Tensor], **options: Any) -> Layout:
    layers = {name: options.pop(name) for name in ("backend", "quantized", "isa") if name in options}
    defaults = {"num_parts": 1, "wanted": None}
    return describe(groups, caches, NUM_BLOCKS, vllm_config=vllm_config(**layers), **(defaults | options))


def cache(num_bytes: int = 0) -> torch.Tensor:
    return torch.zeros(NUM_BLOCKS, 2, 16, 16)


def test_all_groups_of_attention_are_served() -> None:
    groups = served_groups(config(group(FULL, "a", "b"), group(SLIDING, "c"), group(LOCAL, "d")))
    assert [g.table for g in groups] == [
        BlockTable(0, 16, "FullAttentionSpec", 0),
        BlockTable(1, 16, "SlidingWindowSpec", 64),
        BlockTable(2, 16, "ChunkedLocalAttentionSpec", 128),
    ]
    assert [list(g.specs) for g in groups] == [["a", "b"], ["c"], ["d"]]


def test_groups_that_opt_out_are_left_alone() -> None:
    ring = SimpleNamespace(block_size=16, prefix_cacheable=False)
    groups = served_groups(config(group(ring, "ring"), group(FULL, "copy", enable_kv_transfer=False), group(FULL, "a")))
    assert [(g.group_id, list(g.specs)) for g in groups] == [(2, ["a"])]
    with pytest.raises(ConfigError, match="no KV cache that can be stored"):
        served_groups(config(group(ring, "ring")))


def test_a_group_without_the_flags_of_later_versions_takes_part() -> None:
    plain = SimpleNamespace(layer_names=["a"], kv_cache_spec=FULL)
    assert len(served_groups(SimpleNamespace(kv_cache_groups=[plain]))) == 1


@pytest.mark.parametrize("kind", ["CrossAttentionSpec", "RSWASpec", "SinkFullAttentionSpec"])
def test_other_kinds_are_refused_in_a_sentence(kind: str) -> None:
    spec = object.__new__(getattr(vllm_caches, kind))
    object.__setattr__(spec, "block_size", 16)
    with pytest.raises(ConfigError, match=rf"kind {kind}; .* serves FullAttentionSpec, .*Remove the connector"):
        served_groups(config(group(FULL, "a"), group(spec, "b")))


def test_a_group_in_host_memory_is_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match="in host memory"):
        served_groups(config(group(FULL, "a", host_resident=True)))


@pytest.mark.parametrize("groups", [(group(SLIDING, "a"),), (group(FULL, "a"), group(FULL, "b"))])
def test_windows_and_several_groups_want_a_vllm_that_takes_failed_requests(
    groups: tuple[KVCacheGroupSpec, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    served_groups(config(*groups))
    monkeypatch.setattr(caches_module, "KVConnectorTransferResults", None)
    with pytest.raises(ConfigError, match=r"use vLLM 0\.30 or later, or set disable_hybrid_kv_cache_manager=True"):
        served_groups(config(*groups))
    served_groups(config(group(FULL, "a", "b")))


def test_latents_alone_are_the_same_on_all_ranks() -> None:
    assert is_replicated(served_groups(config(group(LATENT, "a"))))
    assert not is_replicated(served_groups(config(group(LATENT, "a"), group(FULL, "b"))))
    assert not is_replicated(served_groups(config(group(FULL, "a"))))


def test_layers_of_several_shapes_in_one_group() -> None:
    index = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.uint8)
    uniform = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": LATENT, "b": index, "c": LATENT})
    groups = served_groups(config(group(uniform, "a", "b", "c")))
    caches = {
        "a": torch.zeros(NUM_BLOCKS, 16, 20, dtype=torch.bfloat16),
        "b": torch.zeros(NUM_BLOCKS, 16, 8, dtype=torch.uint8),
        "c": torch.zeros(NUM_BLOCKS, 16, 20, dtype=torch.bfloat16),
    }
    layout = described(groups, caches, wanted=32)
    assert [(g.layers, g.table, g.dtype, g.block_nbytes) for g in layout.groups] == [
        (("a", "c"), 0, "", (640, 640)),
        (("b",), 0, "uint8", (128,)),
    ]
    assert layout.dtype == "bfloat16"
    assert len(layout.tables()) == 1
    assert layout.part_nbytes == 2 * (640 + 640 + 128)
    regions = regions_of(layout, caches, NUM_BLOCKS)
    assert [(r.cell_offset, r.nbytes, r.table) for r in regions] == [(0, 1280, 0), (1280, 1280, 0), (2560, 256, 0)]


def test_groups_with_blocks_of_other_lengths() -> None:
    wide = SlidingWindowSpec(block_size=32, sliding_window=64, num_kv_heads=1, head_size=8, dtype=torch.float32)
    groups = served_groups(config(group(FULL, "a"), group(wide, "b")))
    caches = {"a": torch.zeros(NUM_BLOCKS, 2, 16, 16), "b": torch.zeros(NUM_BLOCKS, 1, 32, 16)}
    layout = described(groups, caches)
    assert [(t.block_tokens, t.window) for t in layout.tables()] == [(16, 0), (32, 64)]
    assert layout.chunk_tokens == 64, "no longer than the window"
    assert layout.part_nbytes == 4 * 2048 + 2 * 2048
    assert [(r.num_blocks, r.table) for r in regions_of(layout, caches, NUM_BLOCKS)] == [(4, 0), (2, 1)]
    with pytest.raises(ConfigError, match="not a whole number of blocks of 32"):
        described(groups, caches, wanted=48)


def test_ranks_count_towards_the_size_of_a_chunk() -> None:
    groups = served_groups(config(group(FULL, "a")))
    big = {"a": torch.zeros(NUM_BLOCKS, 2, 16, 8192)}
    assert described(groups, big).chunk_tokens == 64
    assert described(groups, big, num_parts=2).chunk_tokens == 32


def test_one_group_is_described_as_before_there_were_several() -> None:
    layout = described(served_groups(config(group(FULL, "a", "b"))), {"a": cache(), "b": cache()}, wanted=32)
    assert layout.canonical() == (
        b'{"backend":"FAKE_ATTN","block_tokens":16,"chunk_tokens":32,"dtype":"float32","group":{"block_nbytes":'
        b'[2048,2048],"head_size":8,"kind":"FullAttentionSpec","layers":["a","b"],"num_kv_heads":2,"order":[1,2,3],'
        b'"shape":[2,16,16]},"isa":"' + layout.isa.encode() + b'","version":1}'
    )


def test_a_backend_that_cannot_go_on_after_a_prefix_is_refused() -> None:
    with pytest.raises(ConfigError, match="CPU_MLA computes prompts from their first token only"):
        described(served_groups(config(group(FULL, "a"))), {"a": cache()}, backend="CPU_MLA")


# -- what is on the GPU


class Pool:
    """vLLM's block pool: which hash of which group is cached."""

    def __init__(self, *groups: set[int]) -> None:
        self.groups = groups
        self.num_lookups = 0

    def get_cached_block(self, block_hash: int, group_ids: list[int]) -> list[int] | None:
        self.num_lookups += 1
        return [block_hash] * len(group_ids) if all(block_hash in self.groups[g] for g in group_ids) else None


def gpu(pool: Pool, *specs: Any, chunk_tokens: int = 32, hash_tokens: int = 16) -> GpuCache:
    names = "abcd"[: len(specs)]
    groups = served_groups(config(*(group(spec, name) for spec, name in zip(specs, names, strict=True))))
    layout = described(groups, {name: cache() for name in names}, wanted=chunk_tokens)
    return GpuCache(pool, layout, hash_tokens)


REQUEST = SimpleNamespace(block_hashes=list(range(40)))


def test_a_run_on_the_gpu_ends_where_its_windows_are_there() -> None:
    everything = set(range(40))
    assert gpu(Pool(everything), FULL).run(REQUEST) == 20
    assert gpu(Pool(set(range(13))), FULL).run(REQUEST) == 6
    # The window of 64 tokens is the last four blocks: what is before it need not be there.
    assert gpu(Pool(everything, set(range(36, 40))), FULL, SLIDING).run(REQUEST) == 20
    assert gpu(Pool(everything, set(range(30, 38))), FULL, SLIDING).run(REQUEST) == 19
    assert gpu(Pool(everything, set(range(8, 12))), FULL, SLIDING).run(REQUEST) == 6
    assert gpu(Pool(everything, set(range(8, 11))), FULL, SLIDING).run(REQUEST) == 0
    assert gpu(Pool(everything, set()), FULL, SLIDING).run(REQUEST) == 0
    assert gpu(Pool(set(range(12)), everything), FULL, SLIDING).run(REQUEST) == 6
    assert gpu(Pool(set(range(8, 12))), SLIDING).run(REQUEST) == 6, "windows alone"
    # Of a chunk of local attention, all before the boundary is passed.
    assert gpu(Pool(everything, set()), FULL, LOCAL).run(REQUEST) == 20, "640 tokens are five whole chunks"
    assert gpu(Pool(set(range(38)), {32, 33, 34, 35, 36, 37}), FULL, LOCAL).run(REQUEST) == 19
    assert gpu(Pool(set(range(38)), {33, 34, 35, 36, 37}), FULL, LOCAL).run(REQUEST) == 16


def test_a_run_on_the_gpu_is_a_hint_and_costs_little() -> None:
    long = SimpleNamespace(block_hashes=list(range(1 << 20)))
    everything = set(long.block_hashes)
    pool = Pool(everything, set())
    assert gpu(pool, FULL, SLIDING).run(long) == 0
    assert pool.num_lookups < 2000
    pool = Pool(everything, everything)
    assert gpu(pool, FULL, SLIDING).run(long) == 1 << 19
    assert pool.num_lookups < 40


def test_a_chunk_is_on_the_gpu_where_every_group_has_its_end() -> None:
    cached = gpu(Pool({0, 1, 2, 3}, {1}), FULL, SLIDING)
    assert cached.has(REQUEST, 0)
    assert not cached.has(REQUEST, 1)
    assert not cached.has(REQUEST, 20)


def test_hashes_of_another_length_say_nothing() -> None:
    cached = gpu(Pool(set(range(40))), FULL, hash_tokens=8)
    assert cached.run(REQUEST) == 0
    assert not cached.has(REQUEST, 0)


# -- layouts


def test_blocks_that_the_kernel_cuts_smaller() -> None:
    """Two blocks of the kernel make one of vLLM's: the bytes are those of both, and the shape is the kernel's."""
    groups = served_groups(config(group(FULL, "a")))
    whole = described(groups, {"a": cache()}, wanted=32)
    halves = described(groups, {"a": torch.zeros(2 * NUM_BLOCKS, 2, 8, 16)}, wanted=32)
    assert halves.group.block_nbytes == whole.group.block_nbytes == (2048,)
    assert halves.layout_id() != whole.layout_id()


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(NUM_BLOCKS, 2, 16, 16, dtype=torch.uint8),
        torch.zeros(NUM_BLOCKS, 2, 16, 16, dtype=torch.float8_e4m3fn),
        torch.zeros(NUM_BLOCKS, 16, 2, 16).permute(0, 2, 1, 3),
        torch.zeros(NUM_BLOCKS, 16, 2, 16),
    ],
)
def test_bytes_that_mean_something_else_have_another_layout(other: torch.Tensor) -> None:
    groups = served_groups(config(group(FULL, "a")))
    layouts = [described(groups, {"a": tensor}, wanted=32) for tensor in (cache(), other)]
    assert layouts[0].layout_id() != layouts[1].layout_id()


def test_what_a_cpu_packs_for_is_a_part_of_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends import cpu_attn

    groups, ids = served_groups(config(group(FULL, "a"), group(SLIDING, "b"))), set()
    for isa in ("amx", "vec", "vec16"):
        monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *args, isa=isa: isa)
        layout = described(groups, {"a": cache(), "b": cache()}, wanted=32)
        assert layout.isa == isa
        ids.add(layout.layout_id())
    assert len(ids) == 3


def test_what_vllm_packs_for_is_told_by_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = served_groups(config(group(FULL, "a")))
    assert described(groups, {"a": cache()}, isa="amx").isa == "amx"
    assert described(groups, {"a": cache()}, isa="vec").isa == "vec"


def test_quantized_kv_is_packed_for_the_type_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model in bfloat16 for AMX where there is AMX, whatever the elements of the cache are."""
    groups = served_groups(config(group(FULL, "a")))
    for has_amx, isa in ((True, "amx"), (False, "vec")):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has_amx=has_amx: has_amx)
        monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)
        wide = {"a": torch.zeros(NUM_BLOCKS, 2, 32, 16, dtype=torch.uint8)}
        blocks = [each._replace(block_tokens=32) for each in groups]
        assert described(blocks, wide, quantized={"a": "fp8"}).isa == isa


FORMATS = ("fp8_e4m3", "fp8_e5m2", "fp8_inc", "int8_per_token_head", "int4_per_token_head", "nvfp4", "turboquant_k8v4")


def test_formats_of_quantized_kv_are_told_apart() -> None:
    """vLLM's tensors are of bytes for all of them."""
    groups = served_groups(config(group(FULL, "a")))
    caches = {"a": torch.zeros(NUM_BLOCKS, 2, 16, 16, dtype=torch.uint8)}
    layouts = [described(groups, caches, quantized={"a": name}) for name in FORMATS]
    assert [layout.dtype for layout in layouts] == list(FORMATS)
    assert len({layout.layout_id() for layout in layouts}) == len(FORMATS)
    assert described(groups, caches, quantized={"a": "fp8"}) == layouts[0], "two words for one format"
    assert described(groups, caches).dtype == described(groups, caches, quantized={}).dtype == "uint8"
    for name in ("auto", "bfloat16", "float16"):
        assert described(groups, {"a": cache()}, quantized={"a": name}).dtype == "float32"


def test_layers_that_are_not_quantized_are_told_apart() -> None:
    groups = served_groups(config(group(FULL, "a", "b", "c")))
    caches = {name: torch.zeros(NUM_BLOCKS, 2, 16, 16, dtype=torch.uint8) for name in "abc"}
    some = [described(groups, caches, quantized=dict.fromkeys(names, "fp8")) for names in ((), "a", "b", "ab", "abc")]
    assert len({layout.layout_id() for layout in some}) == len(some)
    assert [(g.layers, g.dtype) for g in some[2].groups] == [(("a", "c"), ""), (("b",), "fp8_e4m3")]


def test_one_word_for_two_formats_of_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    groups = served_groups(config(group(FULL, "a")))
    caches = {"a": torch.zeros(NUM_BLOCKS, 2, 16, 16, dtype=torch.uint8)}

    def dtypes() -> list[str]:
        return [described(groups, caches, quantized={"a": name}).dtype for name in ("fp8", "fp8_e5m2", "nvfp4")]

    assert dtypes() == ["fp8_e4m3", "fp8_e5m2", "nvfp4"]
    monkeypatch.setattr(current_platform, "is_fp8_fnuz", lambda: True)
    assert dtypes() == ["fp8_e4m3fnuz", "fp8_e5m2", "nvfp4"]
    monkeypatch.setattr(current_platform, "is_fp8_fnuz", lambda: False)
    for number in (100, 120):
        capability = SimpleNamespace(to_int=lambda number=number: number)
        monkeypatch.setattr(current_platform, "get_device_capability", lambda capability=capability: capability)
        assert dtypes() == ["fp8_e4m3", "fp8_e5m2", f"nvfp4_sm{number}"]


# -- what a step gives out


def test_new_blocks_are_those_of_every_group() -> None:
    step = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(block_ids=([1, 2], [0, 0, 3]))],
        scheduled_cached_reqs=SimpleNamespace(new_block_ids=[None, ([4], []), ([], [5, 6])]),
    )
    assert new_blocks(step) == [1, 2, 3, 4, 5, 6]
