"""A busy engine, in steps: from the one that first looks at a request to the one that gives its first token.

Another request generates all the time, so that the engine steps anyway. Nothing here depends on how fast threads are:
between two steps the test waits for what is to have come by then (a plan's data), and it says when a copy is over.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine_process import CHUNK_TOKENS, THROUGH, Answer, Engine, Lab, Prompts, admin, drain, server_pid
from leaks import stop_process
from records import wait_until
from servers import RedisServer

pytestmark = pytest.mark.engine

PROMPTS = Prompts(seed=17)
PAYLOAD_NBYTES = 256 << 10
#: Four chunks are loaded as a part of the step that needs them, five are waited for.
SMALL, LARGE = 4, 5
BUDGET = 512
#: Steps from the first look to the first token where everything is in the host pool, and a copy that is waited for is
#: over in the step after the one that begins it.
HOST_STEPS = {SMALL: 1, LARGE: 3}
COPY_STEPS = 1


@pytest.fixture(scope="module")
def disk(module_lab: Lab) -> Path:
    return module_lab.disk("steps")


@pytest.fixture(scope="module")
def shared_engine(module_lab: Lab, model: Path, disk: Path, redis_server: RedisServer) -> Engine:
    engine = module_lab.engine(
        model,
        {
            "disk_dir": disk,
            "shared_url": redis_server.url,
            "spill": THROUGH,
            "sync_load_bytes": SMALL * PAYLOAD_NBYTES,
        },
        max_num_batched_tokens=BUDGET,
    )
    engine.one(PROMPTS.new(100))
    return engine


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """The engine, in which one request generates."""
    shared_engine.clear_host()
    shared_engine.call("load_in", num_steps=COPY_STEPS)
    shared_engine.add("busy", PROMPTS.new(40), max_tokens=500)
    shared_engine.step_until(lambda: shared_engine.call("states") == {"busy": "RUNNING"})
    yield shared_engine
    shared_engine.abort_all()
    wait_until(lambda: set(shared_engine.call("leases").values()) == {0})


def stored(engine: Engine, disk: Path, tier: str, num_chunks: int) -> list[int]:
    """Return a prompt of which so many chunks are in ``tier``, and in no tier above."""
    prompt = PROMPTS.new(num_chunks * CHUNK_TOKENS + 20)
    engine.add("before", prompt, max_tokens=1)
    engine.finish("before")
    engine.counters()
    drain(disk)
    forget_gpu(engine, prompt)
    if tier != "host":
        engine.call("clear_host")
    if tier == "shared":
        with admin(disk) as client:
            client.ask("TKV.EVICT", {"tiers": ["disk"], "everything": True})
    engine.call("asked")
    return prompt


def forget_gpu(engine: Engine, prompt: list[int]) -> None:
    """Empty vLLM's prefix cache, which it refuses while a request runs: that one ends, and another takes its place."""
    engine.call("abort", names=["busy"])
    engine.call("idle")
    engine.reset_gpu()
    engine.add("busy", PROMPTS.new(40), max_tokens=500)
    engine.step_until(lambda: engine.call("states") == {"busy": "RUNNING"})


def num_steps(engine: Engine, name: str, between: Callable[[int], object] = lambda num: None) -> tuple[int, Answer]:
    """Step until a request for one token has it, and return its steps since vLLM first asked about it.

    Args:
        between: called after every step with their number since then.
    """
    num = 0
    for _ in range(100):
        finished = engine.step()
        num += bool(num or any(row[0] == name for row in engine.call("asked")))
        if name in finished:
            return num, finished[name]
        between(num)
    raise AssertionError(f"{name} has no token after 100 steps")


@pytest.mark.parametrize("num_chunks", [SMALL, LARGE])
@pytest.mark.parametrize("tier", ["host", "disk", "shared"])
def test_a_hit(engine: Engine, disk: Path, tier: str, num_chunks: int) -> None:
    """What came in time from below costs what is in the host pool costs; one step more is what may be."""
    prompt = stored(engine, disk, tier, num_chunks)
    with engine.counting() as counters:
        engine.add("counted", prompt, max_tokens=1)
        engine.call("wait_for_plan", name="counted")
        num, answer = num_steps(engine, "counted")
    assert answer.cached == num_chunks * CHUNK_TOKENS
    assert counters[f"{tier}_hits"] == num_chunks
    assert num == HOST_STEPS[num_chunks]


def test_a_copy_that_is_over_with_its_step_costs_two(engine: Engine, disk: Path) -> None:
    engine.call("load_in", num_steps=0)
    prompt = stored(engine, disk, "host", LARGE)
    engine.add("counted", prompt, max_tokens=1)
    num, answer = num_steps(engine, "counted")
    assert (num, answer.cached) == (2, LARGE * CHUNK_TOKENS)


@pytest.mark.parametrize("num_chunks", [SMALL, LARGE])
def test_data_that_comes_after_the_first_look_costs_the_wait_and_no_step_after_it(
    engine: Engine, disk: Path, num_chunks: int
) -> None:
    prompt = stored(engine, disk, "disk", num_chunks)
    pid = server_pid(disk)
    stop_process(pid)
    waited = 3

    def between(num: int) -> None:
        if num == waited:
            resume(pid)
            engine.call("wait_for_plan", name="counted")

    try:
        engine.add("counted", prompt, max_tokens=1)
        num, answer = num_steps(engine, "counted", between)
    finally:
        resume(pid)
    assert answer.cached == num_chunks * CHUNK_TOKENS
    assert num == waited + HOST_STEPS[num_chunks]


def test_a_miss_that_the_filter_knows(engine: Engine) -> None:
    with engine.counting() as counters:
        engine.add("counted", PROMPTS.new(330), max_tokens=1)
        num, answer = num_steps(engine, "counted")
    assert (num, answer.cached) == (1, 0)
    assert counters["filtered"] == 1 and counters.get("plans", 0) == 0


def test_a_miss_that_the_server_is_asked_about(engine: Engine, disk: Path) -> None:
    """It is answered before the first look, or costs the step of that look."""
    pid = server_pid(disk)
    for in_time, steps in ((True, 1), (False, 2)):
        engine.call("forget_filter")
        if not in_time:
            stop_process(pid)

        def between(num: int) -> None:
            if num == 1:
                resume(pid)
                engine.call("wait_for_plan", name="counted")

        try:
            with engine.counting() as counters:
                engine.add("counted", PROMPTS.new(330), max_tokens=1)
                if in_time:
                    engine.call("wait_for_plan", name="counted")
                num, answer = num_steps(engine, "counted", between)
        finally:
            resume(pid)
        assert counters["plans"] == 1 and answer.cached == 0
        assert num == steps, f"in time: {in_time}"


@pytest.mark.parametrize("tier", ["disk", "shared"])
def test_while_others_use_the_whole_budget_the_fetch_is_done_before_the_first_look(
    engine: Engine, disk: Path, tier: str
) -> None:
    """VLLM does not ask for a request while those that run take all tokens of a step: the wait hides the fetch."""
    prompt = stored(engine, disk, tier, LARGE)
    engine.add("long", PROMPTS.new(4 * BUDGET), max_tokens=1)
    engine.step_until(lambda: engine.call("states")["long"] == "RUNNING")
    engine.add("counted", prompt, max_tokens=1)
    finished = engine.step()
    assert all(name != "counted" for name, *_ in engine.call("asked")), "the budget was not used up"
    engine.call("wait_for_plan", name="counted")
    assert None not in engine.call("in_host", prompt=prompt)
    answers = []
    num = 0
    while "counted" not in finished:
        finished |= engine.step()
        answers += [answer for name, _, answer, _ in engine.call("asked") if name == "counted"]
        num += bool(answers)
        assert num < 50
    assert answers[0] == LARGE * CHUNK_TOKENS, "the first answer was all of it"
    assert finished["counted"].cached == LARGE * CHUNK_TOKENS
    assert num == HOST_STEPS[LARGE]


def resume(pid: int) -> None:
    """Let a stopped server go on. Idempotent."""
    os.kill(pid, signal.SIGCONT)
