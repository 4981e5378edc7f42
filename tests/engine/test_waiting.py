"""Requests that wait: for a store server that a test holds, for room on the GPU, after a preemption.

The GPU cache of this engine has 23 blocks, so that two long requests do not fit.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine_process import CHUNK_TOKENS, Answer, Engine, Lab, Prompts, drain, server_pid
from leaks import stop_process
from records import wait_until

pytestmark = pytest.mark.engine

DEADLINE_S = 3.0
NUM_BLOCKS = 23
PROMPTS = Prompts(seed=3)

Cold = Callable[..., Answer]


@pytest.fixture(scope="module")
def disk(module_lab: Lab) -> Path:
    return module_lab.disk()


@pytest.fixture(scope="module")
def shared_engine(module_lab: Lab, model: Path, disk: Path) -> Engine:
    engine = module_lab.engine(
        model,
        {"disk_dir": disk, "deadline_s": DEADLINE_S},
        num_gpu_blocks_override=NUM_BLOCKS + 1,
        max_model_len=704,
        max_num_batched_tokens=128,
        long_prefill_token_threshold=64,
    )
    engine.one(PROMPTS.new(100))  # the first forward takes seconds
    return engine


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """The engine at rest; after the test nothing may be held by a request."""
    shared_engine.abort_all()
    shared_engine.clear_host()
    shared_engine.call("asked")
    yield shared_engine
    wait_until(lambda: set(shared_engine.call("leases").values()) == {0})


@contextlib.contextmanager
def held(disk: Path) -> Iterator[Callable[[], None]]:
    """Stop the store server; the function that is given lets it go on before the end of the block."""
    pid = server_pid(disk)
    stop_process(pid)
    try:
        yield lambda: os.kill(pid, signal.SIGCONT)
    finally:
        os.kill(pid, signal.SIGCONT)


def answers_of(engine: Engine, name: str) -> list[int | None]:
    """Return what vLLM has been told about a request since it was last asked, one answer a change."""
    return [answer for request, _, answer, _ in engine.call("asked") if request == name]


def stored(engine: Engine, disk: Path, num_tokens: int) -> list[int]:
    """Return a prompt that is on disk and nowhere else."""
    prompt = PROMPTS.new(num_tokens)
    engine.one(prompt, max_tokens=1)
    engine.counters()
    drain(disk)
    engine.clear_host()
    engine.call("asked")
    return prompt


def test_a_held_server_keeps_one_request_waiting_and_no_other(
    engine: Engine, disk: Path, reference: Engine, cold: Cold
) -> None:
    prompt, other = stored(engine, disk, 330), PROMPTS.new(40)
    with engine.counting() as counters:
        with held(disk) as release:
            engine.add("held", prompt)
            engine.add("other", other)
            finished = engine.finish("other")
            assert set(finished) == {"other"}
            told = engine.call("asked")
            assert {answer for name, _, answer, _ in told if name == "held"} == {None}
            assert sum(times for name, _, _, times in told if name == "held") > 1
            release()
            finished |= engine.finish("held")
        assert answers_of(engine, "held") in ([None, 320], [320])
    assert counters["disk_hits"] == 5
    assert counters["host_hits"] == counters["shared_hits"] == 0
    assert finished["held"].cached == 5 * CHUNK_TOKENS
    assert finished["other"].distance(cold(other)) < 1e-4
    reference.reset_gpu()
    reference.one(prompt, max_tokens=1)
    hit = reference.one(prompt)
    assert hit.cached == finished["held"].cached
    assert finished["held"].bits == hit.bits


def test_a_server_that_is_held_past_the_deadline_costs_the_hit_and_nothing_else(
    engine: Engine, disk: Path, cold: Cold
) -> None:
    prompt = stored(engine, disk, 330)
    with engine.counting() as counters, held(disk):
        engine.add("held", prompt)
        finished = engine.finish("held")
        assert answers_of(engine, "held") == [None, 0]
    assert counters["disk_hits"] == counters["host_hits"] == 0
    assert counters["missed"] == 5
    assert finished["held"].cached == 0
    assert finished["held"].distance(cold(prompt)) < 1e-4
    drain(disk)
    engine.call("step")
    engine.clear_host()
    with engine.counting() as counters:
        assert engine.one(prompt).cached == 5 * CHUNK_TOKENS
    assert counters["disk_hits"] == 5


def test_a_deadline_claims_what_has_arrived(engine: Engine, disk: Path, cold: Cold) -> None:
    """The first chunks are in the host pool when the server stops: they are loaded, the rest is computed."""
    prompt = stored(engine, disk, 330)
    engine.one(prompt[: 2 * CHUNK_TOKENS + 1], max_tokens=1)
    engine.reset_gpu()
    engine.call("asked")
    with engine.counting() as counters, held(disk):
        engine.add("held", prompt)
        finished = engine.finish("held")
        assert answers_of(engine, "held") == [None, 2 * CHUNK_TOKENS]
    assert (counters["host_hits"], counters["disk_hits"], counters["missed"]) == (2, 0, 3)
    assert finished["held"].cached == 2 * CHUNK_TOKENS
    assert finished["held"].distance(cold(prompt)) < 1e-4


def test_a_request_that_is_preempted_while_its_plan_is_out(engine: Engine, disk: Path, cold: Cold) -> None:
    """Its blocks go to the older request one by one while it waits: what the GPU loses is fetched from disk."""
    old, young = PROMPTS.new(440), PROMPTS.new(270)
    with engine.counting() as counters:
        engine.add("old", old, max_tokens=130)
        engine.add("young", young, max_tokens=30)
        engine.step_until(lambda: engine.call("states")["young"] == "PREEMPTED")
        engine.counters()
        engine.call("clear_host")
        engine.call("asked")
        with held(disk) as release:
            engine.step_until(lambda: None in answers_of(engine, "young"))
            release()
            finished = engine.finish("old", "young")
        told = [(computed, answer) for name, computed, answer, _ in engine.call("asked") if name == "young"]
    assert counters["replans"] == 2
    assert counters["disk_hits"] == 2
    assert counters["host_hits"] == 0
    assert told[-1] == (160, 96), "half a chunk is on the GPU: the load begins in the middle of one"
    assert finished["old"].distance(cold(old, 130)) < 1e-4
    assert finished["young"].distance(cold(young, 30)) < 1e-4


def test_a_request_whose_gpu_prefix_is_evicted_while_it_waits(engine: Engine, disk: Path, cold: Cold) -> None:
    old, young = PROMPTS.new(450), stored(engine, disk, 330)
    engine.one(young, max_tokens=1)
    engine.call("clear_host")
    engine.add("old", old, max_tokens=200)
    engine.step_until(lambda: "RUNNING" in engine.call("states").values())
    with engine.counting() as counters:
        engine.add("young", young, max_tokens=8)
        finished = engine.finish("old")
        assert not counters
        told = answers_of(engine, "young")
        assert told[0] == 0, "at first all of it is on the GPU"
        finished |= engine.finish("young")
    assert counters["replans"] > 0
    assert counters["disk_hits"] > 0
    assert finished["young"].cached == 5 * CHUNK_TOKENS
    assert finished["old"].distance(cold(old, 200)) < 1e-4
    assert finished["young"].distance(cold(young)) < 1e-4
