"""Small loads are part of the step that needs them: as quick as a hit on the GPU, and as exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine_process import CHUNK_TOKENS, Answer, Engine, Lab, Prompts, drain
from records import wait_until

pytestmark = pytest.mark.engine

PROMPTS = Prompts(seed=14)
PAYLOAD_NBYTES = 256 << 10
#: Four chunks are small, five are not.
SYNC_NBYTES = 4 * PAYLOAD_NBYTES

Cold = Callable[..., Answer]
Gpu = Callable[[list[int], int], Answer]


@pytest.fixture(scope="module")
def gpu(reference: Engine) -> Gpu:
    """A function that runs a prompt without connector, with so many chunks of it on the GPU."""

    def run(prompt: list[int], num_chunks: int) -> Answer:
        reference.reset_gpu()
        reference.one(prompt[: num_chunks * CHUNK_TOKENS + 1], max_tokens=1)
        answer = reference.one(prompt)
        assert answer.cached == num_chunks * CHUNK_TOKENS
        return answer

    return run


@pytest.fixture(scope="module")
def disk(module_lab: Lab) -> Path:
    return module_lab.disk("sync")


@pytest.fixture(scope="module")
def shared_engine(module_lab: Lab, model: Path, disk: Path) -> Engine:
    return module_lab.engine(
        model,
        {"disk_dir": disk, "sync_load_bytes": SYNC_NBYTES},
        transfer={"kv_load_failure_policy": "recompute"},
    )


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """The engine; after the test nothing may be held by a request."""
    yield shared_engine
    wait_until(lambda: not any(shared_engine.call("leases").values()))
    assert shared_engine.call("states") == {}


def stored(engine: Engine, num_tokens: int) -> list[int]:
    """Return a prompt that the host pool has, and the GPU has not."""
    prompt = PROMPTS.new(num_tokens)
    engine.one(prompt)
    engine.counters()
    engine.reset_gpu()
    return prompt


def steps(engine: Engine, prompt: list[int]) -> tuple[int, Answer, set[str]]:
    """Run a prompt for one token: how many steps that takes, its answer, and the states that it was seen in."""
    engine.add("counted", prompt, max_tokens=1)
    num, seen = 0, set()
    while True:
        num += 1
        finished = engine.step()
        if "counted" in finished:
            return num, finished["counted"], seen
        seen |= set(engine.call("states").values())


@pytest.mark.parametrize("num_tokens", [70, 276, 4 * CHUNK_TOKENS + 1, 4 * CHUNK_TOKENS])
def test_a_small_load_takes_no_step_of_its_own(engine: Engine, reference: Engine, gpu: Gpu, num_tokens: int) -> None:
    num_chunks = (num_tokens - 1) // CHUNK_TOKENS
    prompt = stored(engine, num_tokens)
    expected = gpu(prompt, num_chunks)
    with engine.counting() as counters:
        num, answer, seen = steps(engine, prompt)
    assert (num, seen) == (1, set()), "as many as a hit on the GPU"
    assert counters["host_hits"] == num_chunks and answer.cached == num_chunks * CHUNK_TOKENS
    engine.reset_gpu()
    assert engine.one(prompt).bits == expected.bits


def test_a_larger_load_is_waited_for(engine: Engine, gpu: Gpu) -> None:
    prompt = stored(engine, 5 * CHUNK_TOKENS + 20)
    num, answer, seen = steps(engine, prompt)
    assert num > 1 and "WAITING_FOR_REMOTE_KVS" in seen
    assert answer.cached == 5 * CHUNK_TOKENS
    engine.reset_gpu()
    assert engine.one(prompt).bits == gpu(prompt, 5).bits


def test_the_bytes_that_are_loaded_decide_the_answer(engine: Engine, gpu: Gpu) -> None:
    prompt = stored(engine, 276)
    expected = gpu(prompt, 4)
    assert engine.one(prompt).bits == expected.bits
    engine.call("flip", prompt=prompt, chunk=2, word=8192 + 65, bit=28)
    engine.reset_gpu()
    assert engine.one(prompt).bits != expected.bits
    engine.reset_gpu()
    engine.call("clear_host")


def test_what_is_on_disk_is_waited_for_and_loaded_at_once(engine: Engine, disk: Path, gpu: Gpu) -> None:
    prompt = stored(engine, 276)
    drain(disk)
    engine.clear_host()
    with engine.counting() as counters:
        engine.add("from disk", prompt)
        seen: set[str] = set()
        finished: dict[str, Answer] = {}
        while "from disk" not in finished:
            finished |= engine.step()
            seen |= set(engine.call("states").values())
    assert counters["disk_hits"] == 4 and "WAITING_FOR_REMOTE_KVS" not in seen
    assert finished["from disk"].bits == gpu(prompt, 4).bits


def test_part_of_it_on_the_gpu(engine: Engine, gpu: Gpu) -> None:
    """Two chunks and a half are on the GPU: the blocks that are given out begin in the middle of a chunk."""
    prompt = stored(engine, 276)
    engine.call("clear_host")
    engine.one(prompt)
    engine.counters()
    engine.reset_gpu()
    head = prompt[: 2 * CHUNK_TOKENS + CHUNK_TOKENS // 2]
    engine.one([*head, 1, 2], max_tokens=1)
    with engine.counting() as counters:
        num, answer, _ = steps(engine, prompt)
    assert num == 1 and counters["host_hits"] == 2
    assert answer.cached == 4 * CHUNK_TOKENS
    engine.reset_gpu()
    assert engine.one(prompt).bits == gpu(prompt, 4).bits


def test_followers_in_the_same_step_hit_what_is_being_loaded(engine: Engine, cold: Cold) -> None:
    head = stored(engine, 3 * CHUNK_TOKENS + 1)[: 3 * CHUNK_TOKENS]
    prompts = [head + PROMPTS.new(30) for _ in range(4)]
    with engine.counting() as counters:
        answers = engine.run(*prompts, batch=True)
    assert counters["host_hits"] == 3, "one of them loads"
    assert [answer.cached for answer in answers] == [3 * CHUNK_TOKENS] * 4
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.distance(cold(prompt)) < 1e-4


def test_a_load_that_fails_is_computed_and_never_offered_again(engine: Engine, cold: Cold) -> None:
    prompt = stored(engine, 276)
    engine.call("fail_loads", num=1)
    with engine.counting() as counters:
        answer = engine.one(prompt)
    assert counters["load_failures"] == 1
    assert answer.distance(cold(prompt)) < 1e-4
    engine.reset_gpu()
    with engine.counting() as counters:
        assert engine.one(prompt).distance(cold(prompt)) < 1e-4
    assert (counters["host_hits"], counters["load_failures"]) == (4, 0)


def test_an_abort_in_the_step_after(engine: Engine, cold: Cold) -> None:
    prompt = stored(engine, 276)
    engine.add("doomed", prompt, max_tokens=50)
    engine.step()
    assert engine.call("states") == {"doomed": "RUNNING"}
    engine.call("abort", names=["doomed"])
    engine.call("idle")
    engine.reset_gpu()
    assert engine.one(prompt).distance(cold(prompt)) < 1e-4


def test_a_load_that_cannot_be_planned_is_computed(lab: Lab, model: Path, cold: Cold) -> None:
    """A fault of ours in the step that would have loaded: the request must not take its blocks for loaded."""
    engine = lab.engine(
        model,
        {"server": "off", "sync_load_bytes": SYNC_NBYTES},
        transfer={"kv_load_failure_policy": "recompute"},
    )
    prompt = stored(engine, 276)
    engine.call("strand_next_load")
    assert engine.one(prompt).distance(cold(prompt)) < 1e-4
    assert "TierKV failed in _build_metadata" in engine.log.read_text()
    engine.reset_gpu()
    assert engine.one(prompt).distance(cold(prompt)) < 1e-4
    assert engine.call("states") == {}


def test_how_small_is_measured(lab: Lab, model: Path) -> None:
    """Nothing is, before a load has been seen; what takes two milliseconds is, then."""
    engine = lab.engine(model, {"server": "off", "sync_load_bytes": None})
    prompt = stored(engine, 70)
    first, _, _ = steps(engine, prompt)
    engine.reset_gpu()
    second, _, _ = steps(engine, prompt)
    assert (first > 1, second) == (True, 1)
