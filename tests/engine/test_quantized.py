"""Quantized KV: a load equals a GPU hit bit for bit, and nobody loads what was quantized in another way.

vLLM keeps scales (of a key, of a value) in its layers and reads them from the checkpoint. So engines differ in three
ways that bytes do not show: the format, its scales, and the layers that are left out.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_process import CHUNK_TOKENS, THROUGH, Answer, Engine, EngineError, Lab, Prompts, drain
from seeded_model import write_seeded_llama
from servers import RedisServer
from vllm_versions import wanted_minor

#: vLLM's major and minor version.
VERSION = wanted_minor()
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        not torch.cpu._is_avx512_supported(), reason="vLLM quantizes KV on CPUs with AVX-512 or AMX only"
    ),
]
TIERS = ("host", "disk", "shared")
NUM_LAYERS = 4
PROMPT = Prompts(seed=47).new(4 * CHUNK_TOKENS + 20)
NUM_HITS = 4
#: compressed-tensors' words for KV in 8 bits with scales in the checkpoint, and weights as they are.
_CHECKPOINT_SCALES = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {},
    "ignore": ["lm_head"],
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
}


class Kind(NamedTuple):
    """A way to quantize KV.

    Attributes:
        scale: in the checkpoint, of keys and values of every layer; 0 where it has none.
        settings: of vLLM.
        dtypes: of the layers, as the layout has them.
    """

    scale: float
    settings: dict[str, Any]
    dtypes: tuple[str, ...]


KINDS = {
    "not quantized": Kind(0.0, {}, ("float32",) * NUM_LAYERS),
    "e4m3": Kind(0.0, {"kv_cache_dtype": "fp8_e4m3"}, ("fp8_e4m3",) * NUM_LAYERS),
    "e5m2": Kind(0.0, {"kv_cache_dtype": "fp8_e5m2"}, ("fp8_e5m2",) * NUM_LAYERS),
    "but for one layer": Kind(
        0.0,
        {"kv_cache_dtype": "fp8_e4m3", "kv_cache_dtype_skip_layers": ["0"]},
        ("float32", *["fp8_e4m3"] * (NUM_LAYERS - 1)),
    ),
    "scales": Kind(0.02, {}, ("fp8_e4m3",) * NUM_LAYERS),
    "other scales": Kind(0.5, {}, ("fp8_e4m3",) * NUM_LAYERS),
}
if not os.environ.get("TIERKV_FULL"):
    del KINDS["e4m3"]


class Seen(NamedTuple):
    """What an engine of a kind gave.

    Attributes:
        first: from nothing, with what other kinds stored in disk and Redis, and what it found there.
        gpu: from a GPU hit.
        tiers: by tier: from there, and the counters' rises.
        layout: what its chunks' bytes mean.
    """

    first: tuple[Answer, dict[str, int]]
    gpu: Answer
    tiers: dict[str, tuple[Answer, dict[str, int]]]
    layout: dict[str, Any]


def counted(engine: Engine) -> tuple[Answer, dict[str, int]]:
    with engine.counting() as counters:
        answer = engine.one(PROMPT)
    return answer, counters


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[float, Path]:
    """The seeded llama, by the scales in its checkpoint."""
    directory = tmp_path_factory.mktemp("models")
    found = {}
    for scale in {kind.scale for kind in KINDS.values()}:
        found[scale] = path = write_seeded_llama(directory / str(scale), layers=NUM_LAYERS)
        if scale:
            weights = load_file(path / "model.safetensors")
            for layer, name in itertools.product(range(NUM_LAYERS), ("k_scale", "v_scale")):
                weights[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(scale)
            save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
            config = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps(config | {"quantization_config": _CHECKPOINT_SCALES}))
    return found


@pytest.fixture(scope="module")
def observed(models: dict[float, Path], module_lab: Lab, redis_server: RedisServer) -> dict[str, Seen]:
    """One engine a kind after the other, all on one disk and one Redis."""
    lab, seen = module_lab, {}
    options = {"shared_url": redis_server.url, "spill": THROUGH}
    for name, kind in KINDS.items():
        engine = lab.engine(models[kind.scale], options | {"disk_dir": lab.disk("one")}, **kind.settings)
        first, gpu, tiers = counted(engine), engine.one(PROMPT), {}
        engine.reset_gpu()
        tiers["host"] = counted(engine)
        drain(lab.disk("one"))
        engine.clear_host()
        tiers["disk"] = counted(engine)
        seen[name] = Seen(first, gpu, tiers, engine.call("layout"))
        engine.stop()
    return seen


@pytest.fixture(scope="module")
def elsewhere(
    observed: dict[str, Seen], models: dict[float, Path], module_lab: Lab, redis_server: RedisServer
) -> Iterator[Engine]:
    """An engine with scales and another disk."""
    options = {"shared_url": redis_server.url, "spill": THROUGH, "disk_dir": module_lab.disk("two")}
    engine = module_lab.engine(models[KINDS["scales"].scale], options, **KINDS["scales"].settings)
    observed["scales"].tiers["shared"] = counted(engine)
    yield engine
    engine.stop()


@pytest.mark.parametrize("name", KINDS)
def test_a_load_equals_a_gpu_hit_of_its_length(observed: dict[str, Seen], elsewhere: Engine, name: str) -> None:
    seen = observed[name]
    assert set(seen.tiers) == {"host", "disk", *(["shared"] if name == "scales" else [])}
    for tier, (answer, counters) in seen.tiers.items():
        hits = {t: counters[f"{t}_hits"] for t in TIERS}
        assert hits == dict.fromkeys(TIERS, 0) | {tier: NUM_HITS}
        assert answer.cached == NUM_HITS * CHUNK_TOKENS == seen.gpu.cached
        assert answer.bits == seen.gpu.bits


@pytest.mark.parametrize("name", KINDS)
def test_nobody_loads_what_was_quantized_in_another_way(observed: dict[str, Seen], name: str) -> None:
    """When each first ran the prompt, those before it had stored it on the same disk and in the same Redis."""
    answer, counters = observed[name].first
    assert {tier: counters[f"{tier}_hits"] for tier in TIERS} == dict.fromkeys(TIERS, 0)
    assert counters["missed"] == NUM_HITS
    assert answer.cached == 0
    others = [seen.gpu.bits for other, seen in observed.items() if other != name]
    assert observed[name].gpu.bits not in others, "what another kind stored would have been seen in the answer"


def test_the_layout_tells_formats_apart(observed: dict[str, Seen]) -> None:
    """Also those whose elements are of one size, and layers that are left out."""
    dtypes = {}
    for name, seen in observed.items():
        groups = [seen.layout["group"], *seen.layout["others"]]
        dtypes[name] = {layer: group["dtype"] or seen.layout["dtype"] for group in groups for layer in group["layers"]}
    assert {name: tuple(each[layer] for layer in sorted(each)) for name, each in dtypes.items()} == {
        name: kind.dtypes for name, kind in KINDS.items()
    }


@pytest.mark.parametrize("layer", [0, NUM_LAYERS - 1])
def test_one_wrong_bit_makes_the_comparison_fail(observed: dict[str, Seen], elsewhere: Engine, layer: int) -> None:
    expected = observed["scales"].gpu.bits
    # 64 tokens of two KV heads: of each block and head 512 words of keys, then as many of values.
    word, bit = layer * 4096 + 3 * 1024 + 512 + 65, 6
    for is_equal in (False, True):
        elsewhere.call("flip", prompt=PROMPT, chunk=2, word=word, bit=bit)
        elsewhere.reset_gpu()
        answer, counters = counted(elsewhere)
        assert counters["host_hits"] == NUM_HITS
        assert (answer.bits == expected) == is_equal


@pytest.mark.skipif(VERSION > (0, 27), reason="vLLM has no such option any more")
def test_scales_of_the_first_request_are_refused(lab: Lab, models: dict[float, Path]) -> None:
    engine = lab.engine(models[0.0], {"server": "off"}, kv_cache_dtype="fp8", calculate_kv_scales=True)
    with pytest.raises(EngineError, match="use the scales of the checkpoint"):
        engine.ready()
