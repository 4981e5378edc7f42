"""Many requests with shared prefixes, on a GPU cache and a host pool that hold a few of them, some of them aborted.

Blocks and slots change hands all the time here: a copy that read or wrote one too late would change somebody's output.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_process import CHUNK_TOKENS, Answer, Engine, Lab, Prompts
from records import wait_until

pytestmark = pytest.mark.engine

NUM_REQUESTS = 120
NUM_AT_A_TIME = 6


def make_requests(rng: random.Random, prompts: Prompts) -> list[tuple[list[int], int]]:
    """Return (prompt, tokens to generate): leaves of a tree, each prefix of which several requests share."""
    roots = [prompts.new(rng.randrange(100, 260)) for _ in range(3)]
    branches = [root + prompts.new(rng.randrange(60, 200)) for root in roots for _ in range(3)]
    leaves = [branch + prompts.new(rng.randrange(1, 100)) for branch in branches for _ in range(2)]
    return [(rng.choice(roots + branches + leaves), rng.choice([1, 4, 60])) for _ in range(NUM_REQUESTS)]


@pytest.mark.parametrize("num_slots", [8, 24])
def test_outputs_hold_under_churn(lab: Lab, model: Path, cold: Callable[..., Answer], num_slots: int) -> None:
    rng = random.Random(num_slots)
    requests = make_requests(rng, Prompts(seed=num_slots))
    engine = lab.engine(
        model,
        {"disk_dir": lab.disk(), "host_bytes": f"{num_slots * 256 + 16}KiB"},
        num_gpu_blocks_override=33,
        max_model_len=704,
        max_num_batched_tokens=256,
        max_num_seqs=NUM_AT_A_TIME,
    )
    names = [f"r{i}" for i in range(NUM_REQUESTS)]
    waiting, running, finished = list(zip(names, requests, strict=True)), set(), {}
    aborted: set[str] = set()
    preempted: set[str] = set()
    while waiting or running:
        while waiting and len(running) < NUM_AT_A_TIME:
            name, (prompt, max_tokens) = waiting.pop(0)
            engine.add(name, prompt, max_tokens)
            running.add(name)
        if rng.random() < 0.05:
            doomed = rng.choice(sorted(running))
            engine.call("abort", names=[doomed])
            aborted.add(doomed)
            running.discard(doomed)
        finished |= engine.step(rng.randrange(1, 4))
        running -= finished.keys()
        preempted |= {name for name, state in engine.call("states").items() if state == "PREEMPTED"}
    engine.call("idle")

    expected: dict[tuple[tuple[int, ...], int], Answer] = {}
    for name, (prompt, max_tokens) in zip(names, requests, strict=True):
        if name not in aborted:
            key = tuple(prompt), max_tokens
            if key not in expected:
                expected[key] = cold(prompt, max_tokens)
            assert finished[name].distance(expected[key]) < 1e-4, name
    wait_until(lambda: set(engine.call("leases").values()) == {0})
    check_that_it_was_tight(engine, num_slots, preempted, aborted)


def check_that_it_was_tight(engine: Engine, num_slots: int, preempted: set[str], aborted: set[str]) -> None:
    """Check that the test did what it is for."""
    stat = engine.call("stat")
    assert stat["num_slots"] == num_slots
    assert stat["payload_nbytes"] == CHUNK_TOKENS * 4096
    assert stat["num_evicted"] > 0
    assert stat["counters"]["host_hits"] > 0
    assert stat["counters"]["disk_hits"] > 0
    assert stat["counters"].get("load_failures", 0) == 0
    assert preempted and aborted
