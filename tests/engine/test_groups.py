"""Models with windows and several KV cache groups: a load from any tier equals a GPU hit, bit for bit.

Steps are short and their ends fall inside chunks, so that windows pass blocks while chunks are being computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engine_process import CHUNK_TOKENS, THROUGH, Answer, Engine, EngineError, Lab, Prompts, drain, shut_down
from records import wait_until
from seeded_kinds import write_seeded
from servers import RedisServer
from vllm_versions import wanted_minor

pytestmark = pytest.mark.engine

#: Model kinds, and the kinds of cache that vLLM keeps for them, one a group.
KINDS = {
    "qwen3": ["FullAttentionSpec"],
    "gemma3": ["FullAttentionSpec", "SlidingWindowSpec", "SlidingWindowSpec"],
    "mistral": ["SlidingWindowSpec"],
    "llama4": ["ChunkedLocalAttentionSpec"] * 3 + ["FullAttentionSpec"],
}
TIERS = ("host", "disk", "shared")
SETTINGS: dict[str, Any] = {
    "max_num_batched_tokens": 208,
    "env": {"VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE": "1"},
}
#: Words of a layer's KV in a chunk, in float32.
LAYER_WORDS = CHUNK_TOKENS * 2 * 64 * 2
PROMPTS = Prompts(seed=41)
LONG = PROMPTS.new(1042)
OTHER = PROMPTS.new(600)
SHARING = "sharing its beginning"
#: A prompt a tier, and how many chunks of it are there. Windows are of 96 tokens, chunks of local attention of 128.
CASES = {
    "inside the window": (dict.fromkeys(TIERS, PROMPTS.new(65)), 1),
    "just past the window": (dict.fromkeys(TIERS, PROMPTS.new(129)), 2),
    "past the window": (dict.fromkeys(TIERS, PROMPTS.new(340)), 5),
    "many windows long": (dict.fromkeys(TIERS, LONG), 16),
    SHARING: ({tier: OTHER[: 7 * CHUNK_TOKENS] + PROMPTS.new(90) for tier in TIERS}, 7),
}


class Observed(NamedTuple):
    """What engines gave, by (tier, case): from nothing, from a GPU hit, and from the tier with the counters' rises."""

    cold: dict[tuple[str, str], Answer]
    gpu: dict[tuple[str, str], Answer]
    tiers: dict[tuple[str, str], tuple[Answer, dict[str, int]]]


@pytest.fixture(scope="module", params=KINDS if wanted_minor() >= (0, 30) else ["qwen3"])  # others are refused there
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def windowed(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeded(tmp_path_factory.mktemp("models") / kind, kind)


@pytest.fixture(scope="module")
def plain(module_lab: Lab, windowed: Path) -> Iterator[Engine]:
    """An engine of the kind without connector."""
    engine = module_lab.engine(windowed, **SETTINGS)
    yield engine
    engine.kill()


@pytest.fixture(scope="module")
def observed(kind: str, plain: Engine, module_lab: Lab, windowed: Path, redis_server: RedisServer) -> Observed:
    seen = Observed({}, {}, {})
    for name, (prompts, num_hits) in CASES.items():
        for tier, prompt in prompts.items():
            plain.reset_gpu()
            seen.cold[tier, name] = plain.one(prompt)
            plain.reset_gpu()
            plain.one(prompt[: num_hits * CHUNK_TOKENS + 1], max_tokens=1)
            seen.gpu[tier, name] = plain.one(prompt)

    disk = module_lab.disk(f"{kind}-first")
    options = {"disk_dir": disk, "shared_url": redis_server.url, "spill": THROUGH}
    first = module_lab.engine(windowed, options, **SETTINGS)
    first.run(OTHER, *(prompts["host"] for name, (prompts, _) in CASES.items() if name != SHARING), max_tokens=1)
    drain(disk)
    elsewhere = options | {"disk_dir": module_lab.disk(f"{kind}-second")}
    shared = module_lab.engine(windowed, elsewhere, **SETTINGS)
    run_cases(shared, "shared", seen)
    shared.stop()
    first.stop()
    shut_down(disk)
    return seen


@pytest.fixture(scope="module")
def engine(
    kind: str, observed: Observed, module_lab: Lab, windowed: Path, redis_server: RedisServer
) -> Iterator[Engine]:
    """An engine that finds everything on disk, and has it in its host pool from then on."""
    options = {"disk_dir": module_lab.disk(f"{kind}-first"), "shared_url": redis_server.url, "spill": THROUGH}
    engine = module_lab.engine(windowed, options, transfer={"kv_load_failure_policy": "recompute"}, **SETTINGS)
    run_cases(engine, "disk", observed)
    run_cases(engine, "host", observed)
    yield engine
    engine.kill()


def run_cases(engine: Engine, tier: str, seen: Observed) -> None:
    """Run every case's prompt with nothing on the GPU, and with what it loads in the tier."""
    for name, (prompts, _) in CASES.items():
        prompt = prompts[tier]
        engine.clear_host()
        if tier == "host":
            engine.one(OTHER if name == SHARING else prompt, max_tokens=1)
            engine.reset_gpu()
        with engine.counting() as counters:
            answer = engine.one(prompt)
        seen.tiers[tier, name] = answer, counters


def test_vllm_keeps_the_groups_apart(engine: Engine, kind: str) -> None:
    layout = engine.call("layout")
    assert sorted(group["kind"] for group in [layout["group"], *layout.get("others", [])]) == KINDS[kind]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", CASES)
def test_a_load_equals_a_gpu_hit_of_its_length(engine: Engine, observed: Observed, name: str, tier: str) -> None:
    answer, counters = observed.tiers[tier, name]
    num_hits = CASES[name][1]
    assert {t: counters[f"{t}_hits"] for t in TIERS} == dict.fromkeys(TIERS, 0) | {tier: num_hits}
    assert answer.cached == num_hits * CHUNK_TOKENS == observed.gpu[tier, name].cached
    assert answer.bits == observed.gpu[tier, name].bits
    assert answer.distance(observed.cold[tier, name]) < 1e-4
    assert not counters.get("not_spilled", 0), "every chunk is stored in the step that completes it"


def test_only_what_layers_look_at_is_loaded_and_it_matters(engine: Engine, observed: Observed) -> None:
    """Flip a bit of each group, at the end of the hit and at its beginning, which windows have passed."""
    prompt, num_hits = CASES["past the window"][0]["host"], CASES["past the window"][1]
    expected = observed.gpu["host", "past the window"].bits
    engine.one(prompt)
    layout = engine.call("layout")
    at = 0
    for group in [layout["group"], *layout.get("others", [])]:
        word = at * LAYER_WORDS + LAYER_WORDS // 2 + 65
        at += len(group["layers"])
        for chunk, matters in ((num_hits - 1, True), (0, not group.get("window"))):
            for flipped in (True, False):
                engine.call("flip", prompt=prompt, chunk=chunk, word=word, bit=28)
                engine.reset_gpu()
                with engine.counting() as counters:
                    answer = engine.one(prompt)
                assert counters["host_hits"] == num_hits
                assert (answer.bits != expected) == (flipped and matters), (group["kind"], chunk)


def test_a_load_that_fails_is_computed(engine: Engine, observed: Observed) -> None:
    prompt = CASES["past the window"][0]["host"]
    engine.reset_gpu()
    engine.call("fail_rank", rank=0, what="load")
    with engine.counting() as counters:
        answer = engine.one(prompt)
    assert counters["load_failures"] == 1
    assert answer.distance(observed.cold["host", "past the window"]) < 1e-4
    engine.reset_gpu()
    assert engine.one(prompt).bits == observed.gpu["host", "past the window"].bits
    assert not any(engine.call("leases").values())


def test_aborts_while_loads_are_under_way(engine: Engine, observed: Observed) -> None:
    for num_steps in (1, 2, 3):
        engine.clear_host()
        for i, (prompts, _) in enumerate(CASES.values()):
            engine.add(f"aborted{i}", prompts["disk"])
        engine.step(num_steps)
        engine.abort_all()
        wait_until(lambda: not any(engine.call("leases").values()))
    engine.reset_gpu()
    assert engine.one(LONG).distance(observed.cold["host", "many windows long"]) < 1e-4


#: Blocks that are too few for eight requests to grow.
FEW_BLOCKS = {"qwen3": 64, "gemma3": 110, "mistral": 36, "llama4": 150}


def test_preemption_and_loads_on_a_gpu_that_is_too_small(
    kind: str, plain: Engine, module_lab: Lab, windowed: Path
) -> None:
    """Blocks are given away all the time, within a step and to other groups: a copy too late or early shows."""
    few: dict[str, Any] = {"num_gpu_blocks_override": FEW_BLOCKS[kind], "max_model_len": 512}
    small = module_lab.engine(windowed, {"server": "off"}, **few, **SETTINGS)
    prompts = [PROMPTS.new(CHUNK_TOKENS * (n % 3 + 1) + 40) for n in range(8)]
    cold = []
    for prompt in prompts:
        plain.reset_gpu()
        cold.append(plain.one(prompt, max_tokens=128))
    for _ in range(2):
        for answer, expected in zip(small.run(*prompts, max_tokens=128, batch=True), cold, strict=True):
            assert answer.distance(expected) < 1e-4
        small.reset_gpu()
    counters = small.counters()
    assert counters["host_hits"] > 10
    assert counters["spilled"] > 10
    if kind != "mistral":  # requests with nothing but windows do not grow
        assert small.call("num_preemptions") > 0
    wait_until(lambda: not any(small.call("leases").values()))
    small.stop()


@pytest.mark.skipif(wanted_minor() < (0, 29), reason="vLLM for CPUs does not start models with latents")
def test_an_attention_backend_that_cannot_go_on_after_a_prefix_is_refused(lab: Lab, tmp_path: Path) -> None:
    """vLLM's reference backend for latents on CPUs computes every prompt from its first token: a load is ignored."""
    model = write_seeded(tmp_path / "deepseek", "deepseek")
    engine = lab.engine(model, {"server": "off"}, attention_config={"backend": "CPU_MLA"})
    with pytest.raises(EngineError, match=r"CPU_MLA computes prompts from their first token only"):
        engine.ready()
