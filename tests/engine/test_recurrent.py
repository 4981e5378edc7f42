"""Models with recurrent state: a load from any tier equals a GPU hit, bit for bit, and ends where a state is.

Steps are short: their ends fall inside prompts, at the end of some chunks and inside of others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engine_process import CHUNK_TOKENS, THROUGH, Answer, Engine, EngineError, Lab, Prompts, drain, shut_down
from records import wait_until
from seeded_kinds import write_seeded
from servers import RedisServer
from tierkv.layout import MARK_NBYTES, RECURRENT
from vllm_versions import wanted_minor

#: vLLM's major and minor version.
VERSION = wanted_minor()
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(VERSION < (0, 30), reason="models with several KV cache groups are refused before vLLM 0.30"),
]


class Kind(NamedTuple):
    """A model kind, and how vLLM runs it.

    Attributes:
        step: tokens that a step computes at most. (vLLM's Mamba 2 for CPUs fails where a step passes a block's end.)
        block: tokens a block, which vLLM makes long enough for a state.
        dtype: of the model; what is not float32 is compared with a GPU hit only.
        few_blocks: blocks that are too few for two requests to grow; 0 where requests cannot be run together.
    """

    step: int
    block: int
    dtype: str
    few_blocks: int


KINDS = {
    "lfm2": Kind(208, 32, "float32", 0),
    "qwen3_next": Kind(208, 64, "bfloat16", 22),
    "granite": Kind(32, 32, "float32", 0),
    "mamba2": Kind(32, 32, "float32", 0),
}
#: With TIERKV_FULL=1 all of them.
if VERSION < (0, 32):  # before, its kernels for CPUs know no convolution over three tokens
    del KINDS["lfm2"]
SOME_KINDS = [kind for kind in KINDS if os.environ.get("TIERKV_FULL") or kind in ("lfm2", "qwen3_next")]
TIERS = ("host", "disk", "shared")
PROMPTS = Prompts(seed=43)
OTHER = PROMPTS.new(600)
SHARING = "sharing its beginning"
#: Its last token follows the state: what short convolutions keep is seen by tokens that are near alone.
STATE_AT_ITS_END = "a state at its last chunk's end"
NO_STATE_AT_ITS_END = "no state at its last chunk's end"
#: A prompt a tier.
CASES = {
    "one chunk": dict.fromkeys(TIERS, PROMPTS.new(65)),
    "ends with a chunk": dict.fromkeys(TIERS, PROMPTS.new(128)),
    STATE_AT_ITS_END: dict.fromkeys(TIERS, PROMPTS.new(321)),
    NO_STATE_AT_ITS_END: dict.fromkeys(TIERS, PROMPTS.new(370)),
    "many steps long": dict.fromkeys(TIERS, PROMPTS.new(1042)),
    SHARING: {tier: OTHER[: 7 * CHUNK_TOKENS] + PROMPTS.new(90) for tier in TIERS},
}


class Observed(NamedTuple):
    """What engines gave, by (tier, case): from nothing, from a GPU hit, and from the tier with the counters' rises."""

    cold: dict[tuple[str, str], Answer]
    gpu: dict[tuple[str, str], Answer]
    tiers: dict[tuple[str, str], tuple[Answer, dict[str, int]]]


def settings(kind: str, **more: Any) -> dict[str, Any]:
    return {
        "max_num_batched_tokens": KINDS[kind].step,
        "enable_prefix_caching": True,
        "dtype": KINDS[kind].dtype,
    } | more


def step_ends(num_tokens: int, kind: str) -> set[int]:
    """Return where the steps end in which vLLM computes a prompt: at blocks' ends, the last one before it is over."""
    step, block, *_ = KINDS[kind]
    proof = (
        num_tokens if VERSION < (0, 32) else num_tokens - 1
    )  # before 0.32 a prompt that ends with a block has no stop
    ends, start, last = set(), 0, proof // block * block
    while start < last:
        end = min(start + step, num_tokens)
        start = min(last, end // block * block)
        ends.add(start)
    return ends


def num_hits(name: str, kind: str) -> int:
    """Return how many chunks of a case's prompt are hit: up to the last whose state was there when it was computed."""
    prompt = CASES[name]["host"]
    computed, shared = (len(OTHER), 7 * CHUNK_TOKENS) if name == SHARING else (len(prompt), len(prompt) - 1)
    ends = (e for e in step_ends(computed, kind) if e <= shared and not e % CHUNK_TOKENS)
    return max(ends, default=0) // CHUNK_TOKENS


@pytest.fixture(scope="module", params=SOME_KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeded(tmp_path_factory.mktemp("models") / kind, kind)


@pytest.fixture(scope="module")
def plain(module_lab: Lab, model: Path, kind: str) -> Iterator[Engine]:
    """An engine of the kind without connector."""
    engine = module_lab.engine(model, **settings(kind))
    yield engine
    engine.kill()


@pytest.fixture(scope="module")
def observed(kind: str, plain: Engine, module_lab: Lab, model: Path, redis_server: RedisServer) -> Observed:
    seen = Observed({}, {}, {})
    for name, prompts in CASES.items():
        for tier, prompt in prompts.items():
            if name != SHARING and tier != "host":
                seen.cold[tier, name], seen.gpu[tier, name] = seen.cold["host", name], seen.gpu["host", name]
                continue
            plain.reset_gpu()
            seen.cold[tier, name] = plain.one(prompt)
            plain.reset_gpu()
            plain.one(prompt[: num_hits(name, kind) * CHUNK_TOKENS + 1], max_tokens=1)
            seen.gpu[tier, name] = plain.one(prompt)

    disk = module_lab.disk(f"{kind}-first")
    options = {"disk_dir": disk, "shared_url": redis_server.url, "spill": THROUGH}
    first = module_lab.engine(model, options, **settings(kind))
    first.run(OTHER, *(prompts["host"] for name, prompts in CASES.items() if name != SHARING), max_tokens=1)
    drain(disk)
    elsewhere = options | {"disk_dir": module_lab.disk(f"{kind}-second")}
    shared = module_lab.engine(model, elsewhere, **settings(kind))
    run_cases(shared, "shared", seen)
    shared.stop()
    first.stop()
    shut_down(disk)
    return seen


@pytest.fixture(scope="module")
def engine(kind: str, observed: Observed, module_lab: Lab, model: Path, redis_server: RedisServer) -> Iterator[Engine]:
    """An engine that finds everything on disk, and has it in its host pool from then on."""
    options = {"disk_dir": module_lab.disk(f"{kind}-first"), "shared_url": redis_server.url, "spill": THROUGH}
    more = settings(kind, transfer={"kv_load_failure_policy": "recompute"})
    engine = module_lab.engine(model, options, **more)
    run_cases(engine, "disk", observed)
    run_cases(engine, "host", observed)
    yield engine
    engine.kill()


def run_cases(engine: Engine, tier: str, seen: Observed) -> None:
    """Run every case's prompt with nothing on the GPU, and with what it loads in the tier."""
    for name, prompts in CASES.items():
        prompt = prompts[tier]
        engine.clear_host()
        if tier == "host":
            engine.one(OTHER if name == SHARING else prompt, max_tokens=1)
            engine.reset_gpu()
        with engine.counting() as counters:
            answer = engine.one(prompt)
        seen.tiers[tier, name] = answer, counters


def groups(engine: Engine) -> list[dict[str, Any]]:
    layout = engine.call("layout")
    return [layout["group"], *layout.get("others", [])]


def test_vllm_keeps_recurrent_state(engine: Engine, kind: str) -> None:
    kinds = {group["kind"] for group in groups(engine)}
    assert kinds == ({RECURRENT} if kind == "mamba2" else {RECURRENT, "FullAttentionSpec"})


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", CASES)
def test_a_load_equals_a_gpu_hit_of_its_length(
    observed: Observed, engine: Engine, kind: str, name: str, tier: str
) -> None:
    answer, counters = observed.tiers[tier, name]
    hits = num_hits(name, kind)
    assert {t: counters[f"{t}_hits"] for t in TIERS} == dict.fromkeys(TIERS, 0) | {tier: hits}
    assert answer.cached == hits * CHUNK_TOKENS == observed.gpu[tier, name].cached
    assert answer.bits == observed.gpu[tier, name].bits
    if KINDS[kind].dtype == "float32":
        assert answer.distance(observed.cold[tier, name]) < 1e-4
    assert not counters.get("not_spilled", 0)


def test_the_last_state_alone_is_loaded_and_it_matters(engine: Engine, observed: Observed, kind: str) -> None:
    """Flip a bit in each group's part of the first and the last chunk of a hit."""
    prompt, hits, expected = (
        CASES[STATE_AT_ITS_END]["host"],
        num_hits(STATE_AT_ITS_END, kind),
        observed.gpu["host", STATE_AT_ITS_END].bits,
    )
    engine.one(prompt)
    at = 0
    for group in groups(engine):
        recurrent = group["kind"] == RECURRENT
        num_blocks = 1 if recurrent else CHUNK_TOKENS // KINDS[kind].block
        nbytes = group["block_nbytes"][0] * num_blocks
        word = (at + nbytes // 2) // 4 + 1
        at += sum(group["block_nbytes"]) * num_blocks
        for chunk, matters in ((hits - 1, True), (0, not recurrent)):
            for flipped in (True, False):
                engine.call(
                    "flip", prompt=prompt, chunk=chunk, word=word, bit=29 if KINDS[kind].dtype == "float32" else 30
                )
                engine.reset_gpu()
                with engine.counting() as counters:
                    answer = engine.one(prompt)
                assert counters["host_hits"] == hits
                assert (answer.bits != expected) == (flipped and matters), (group["kind"], group["layers"], chunk)
    engine.call("flip", prompt=prompt, chunk=hits - 1, word=at // 4, bit=0)  # the mark behind them
    engine.reset_gpu()
    with engine.counting() as counters:
        engine.one(prompt)
    ends = sorted(e // CHUNK_TOKENS for e in step_ends(len(prompt), kind) if not e % CHUNK_TOKENS)
    assert counters["host_hits"] == ends[-2], "a hit ends where the chunk before has its state"
    assert MARK_NBYTES == 8


def test_a_state_that_comes_later_is_added(engine: Engine, plain: Engine, kind: str) -> None:
    """A chunk that is there without its state is replaced in the host pool when a step ends with it."""
    base = PROMPTS.new(5 * CHUNK_TOKENS + 50)
    engine.one(base, max_tokens=1)
    first = max(e for e in step_ends(len(base), kind) if not e % CHUNK_TOKENS)
    engine.reset_gpu()
    engine.one(base[: 5 * CHUNK_TOKENS + 10], max_tokens=1)
    engine.reset_gpu()
    with engine.counting() as counters:
        answer = engine.one(base)
    assert counters["host_hits"] == 5
    assert (first < 5 * CHUNK_TOKENS) == (kind == "lfm2"), "of this kind the state was not there before"
    plain.reset_gpu()
    plain.one(base[: 5 * CHUNK_TOKENS + 1], max_tokens=1)
    assert answer.bits == plain.one(base).bits


def test_a_load_that_fails_is_computed(engine: Engine, observed: Observed, kind: str) -> None:
    prompt = CASES[STATE_AT_ITS_END]["host"]
    engine.one(prompt)
    engine.reset_gpu()
    engine.call("fail_rank", rank=0, what="load")
    with engine.counting() as counters:
        answer = engine.one(prompt)
    assert counters["load_failures"] == 1
    assert answer.bits == observed.cold["host", STATE_AT_ITS_END].bits
    engine.reset_gpu()
    assert engine.one(prompt).bits == observed.gpu["host", STATE_AT_ITS_END].bits
    assert not any(engine.call("leases").values())


def test_aborts_while_loads_are_under_way(engine: Engine, observed: Observed) -> None:
    for num_steps in (1, 2, 3):
        engine.clear_host()
        for i, prompts in enumerate(CASES.values()):
            engine.add(f"aborted{i}", prompts["disk"])
        engine.step(num_steps)
        engine.abort_all()
        wait_until(lambda: not any(engine.call("leases").values()))
    engine.clear_host()
    assert engine.one(CASES[STATE_AT_ITS_END]["host"]).bits == observed.gpu["host", STATE_AT_ITS_END].bits


def continued(plain: Engine, prompt: list[int], answer: Answer, claim: list[Any]) -> tuple[Any, Any]:
    """Return what a preempted request gave after its last load, and what an engine without connector gives.

    That one has as much of the prompt and of the answer on its GPU, as an own prompt.
    """
    _, num_loaded, num_tokens, _ = claim
    num = num_tokens - len(prompt)
    plain.reset_gpu()
    plain.one(prompt[: num_loaded + 1], max_tokens=1)
    expected = plain.one(prompt + answer.tokens[:num], max_tokens=len(answer.tokens) - num)
    assert expected.cached == num_loaded
    return (answer.tokens[num:], answer.logprobs[num:], answer.others[num:]), expected.bits


def test_a_preempted_request_loads_its_state_again(engine: Engine, plain: Engine, kind: str) -> None:
    """It goes on bit for bit; and does not where the state is that of another boundary."""
    prompt, num_loaded = PROMPTS.new(321), num_hits(STATE_AT_ITS_END, kind) * CHUNK_TOKENS
    engine.one(prompt, max_tokens=1)
    for wrong in (False, True):
        engine.reset_gpu()
        engine.call("claims")
        engine.add("preempted", prompt, max_tokens=24)
        engine.step_until(lambda: engine.call("states")["preempted"] == "RUNNING")
        engine.step(8)
        assert engine.call("reset", running=True, connector=False)
        assert engine.call("states") == {"preempted": "PREEMPTED"}
        engine.call("load_states_before", wrong=wrong)
        answer = engine.finish("preempted")["preempted"]
        engine.call("load_states_before", wrong=False)
        first, second = engine.call("claims")
        assert first == ["preempted", num_loaded, len(prompt), 0]
        assert (second[1], second[3]) == (num_loaded, 1)
        assert second[2] > len(prompt), "it had generated before it was preempted"
        got, expected = continued(plain, prompt, answer, second)
        assert (got == expected) == (not wrong)


@pytest.fixture(scope="module")
def small(kind: str, module_lab: Lab, model: Path) -> Iterator[Engine]:
    """An engine whose GPU is too small for two requests to grow."""
    if not KINDS[kind].few_blocks:
        pytest.skip("vLLM for CPUs runs requests of this kind one at a time, or not right together")
    few: dict[str, Any] = {"num_gpu_blocks_override": KINDS[kind].few_blocks, "max_model_len": 512}
    engine = module_lab.engine(model, {"server": "off"}, **settings(kind, **few))
    yield engine
    engine.stop()


def test_a_request_that_another_one_preempts_loads_its_state_again(small: Engine, plain: Engine, kind: str) -> None:
    """The younger one's blocks go to the older one; when that has ended it goes on alone, bit for bit."""
    old, young = PROMPTS.new(330), PROMPTS.new(330)
    small.run(old, young, max_tokens=1)
    small.reset_gpu()
    small.call("claims")
    small.add("old", old, max_tokens=150)
    small.add("young", young, max_tokens=60)
    finished = small.finish("old", "young")
    claims = [claim for claim in small.call("claims") if claim[0] == "young"]
    assert claims[0] == ["young", 320, 330, 0], "it had loaded a state"
    assert claims[-1][3] > 0, "it was preempted, and loaded one again"
    assert claims[-1][2] > 330, "it had generated before"
    got, expected = continued(plain, young, finished["young"], claims[-1])
    assert got == expected
    wait_until(lambda: not any(small.call("leases").values()))


def test_preemption_and_loads_on_a_gpu_that_is_too_small(small: Engine, plain: Engine) -> None:
    """Blocks with states are given away all the time, within a step and to other groups.

    In bfloat16 a token that is computed together with others may be routed to another expert, and have quite another
    log probability: those that do are few.
    """
    prompts = [PROMPTS.new(CHUNK_TOKENS * (n % 3 + 1) + 40) for n in range(6)]
    small.run(*prompts, max_tokens=1)
    small.reset_gpu()
    small.call("claims")
    with small.counting() as counters:
        answers = small.run(*prompts, max_tokens=96, batch=True)
    claims = small.call("claims")
    loaded = {name for name, _, _, num_preemptions in claims if not num_preemptions}
    again = [claim for claim in claims if claim[3] and claim[0] in loaded]
    assert len(loaded) == len(prompts)
    assert len(again) > 0, "requests with a loaded state were preempted, and loaded one again"
    assert counters["host_hits"] == sum(num // CHUNK_TOKENS for _, num, _, _ in claims)
    differ = [distance for each in zip(prompts, answers, strict=True) for distance in distances(plain, *each)]
    assert sum(distance > 0.3 for distance in differ) < 0.04 * len(differ)
    wait_until(lambda: not any(small.call("leases").values()))


def distances(plain: Engine, prompt: list[int], answer: Answer) -> list[float]:
    """Return how far each token's log probability is from what an engine without connector gives it after the others.

    Nothing of it goes another way after a token that differs.
    """
    about = plain.call("sample", prompt=prompt + answer.tokens, sampling={"max_tokens": 1, "prompt_logprobs": 0})
    rows = about["prompt_logprobs"][len(prompt) :]
    expected = [float.fromhex(row[str(token)]) for token, row in zip(answer.tokens, rows, strict=True)]
    return [abs(a - float.fromhex(b)) for a, b in zip(expected, answer.logprobs, strict=True)]


def test_an_engine_that_keeps_no_state_of_prefixes_is_refused(lab: Lab, tmp_path: Path) -> None:
    model = write_seeded(tmp_path / "model", SOME_KINDS[0])
    engine = lab.engine(model, {"server": "off"}, **settings(SOME_KINDS[0], enable_prefix_caching=False))
    with pytest.raises(EngineError, match=r"only with enable_prefix_caching=True and mamba_cache_mode='align'"):
        engine.ready()
