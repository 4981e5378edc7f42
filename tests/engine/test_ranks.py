"""Tensor parallel ranks: one payload of all ranks, in every tier; one rank's failure is everybody's."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engine_process import (
    CHUNK_TOKENS,
    THROUGH,
    Answer,
    Engine,
    EngineDiedError,
    EngineError,
    Lab,
    Prompts,
    drain,
    server_pid,
)
from leaks import pool_files, shm_names
from records import wait_until
from servers import RedisServer

pytestmark = pytest.mark.engine

TIERS = ("host", "disk", "shared")
NUM_RANKS = 2
PROMPTS = Prompts(seed=31)
#: 1 to 32 tokens more than whole chunks: the GPU hits as far as we do.
CASES = {size: PROMPTS.new(size) for size in (65, 276, 1042)}
RECOMPUTE = {"kv_load_failure_policy": "recompute"}


def tensor_parallel() -> dict[str, Any]:
    """Return the settings of an engine of two ranks, each with a thread of its own."""
    cores = sorted(os.sched_getaffinity(0))
    binding = f"{cores[0]}|{cores[-1]}" if len(cores) > 1 else "nobind"
    return {
        "tensor_parallel_size": NUM_RANKS,
        "distributed_executor_backend": "mp",
        "env": {"VLLM_CPU_OMP_THREADS_BIND": binding},
    }


def start(lab: Lab, model: Path, connector: dict[str, Any] | None = None, **options: Any) -> Engine:
    """Start an engine of two ranks. They spin while they wait for each other: let others on these cores go first."""
    engine = lab.engine(model, connector, **tensor_parallel(), **options)
    with contextlib.suppress(OSError):
        Path(f"/proc/{engine.ready().pid}/autogroup").write_text("5")
    return engine


class Observed(NamedTuple):
    """What engines of two ranks gave: by prompt, and by (tier, prompt) with the rises of the counters."""

    cold: dict[int, Answer]
    gpu: dict[int, Answer]
    tiers: dict[tuple[str, int], tuple[Answer, dict[str, int]]]


@pytest.fixture(scope="module")
def disk(module_lab: Lab) -> Path:
    return module_lab.disk("first")


@pytest.fixture(scope="module")
def options(disk: Path, redis_server: RedisServer) -> dict[str, Any]:
    return {"disk_dir": disk, "shared_url": redis_server.url, "spill": THROUGH}


@pytest.fixture(scope="module")
def engine(module_lab: Lab, model: Path, options: dict[str, Any]) -> Iterator[Engine]:
    engine = start(module_lab, model, options, transfer=RECOMPUTE)
    yield engine
    engine.kill()


@pytest.fixture(scope="module")
def observed(engine: Engine, module_lab: Lab, model: Path, disk: Path, options: dict[str, Any]) -> Observed:
    seen = Observed({}, {}, {})
    plain = start(module_lab, model)
    for size, prompt in CASES.items():
        seen.cold[size], seen.gpu[size] = plain.run(prompt, prompt)
    plain.stop()
    engine.run(*CASES.values(), max_tokens=1)
    run_cases(engine, "host", seen)
    drain(disk)
    for tier, elsewhere in (("disk", disk), ("shared", module_lab.disk("second"))):
        other = start(module_lab, model, options | {"disk_dir": elsewhere})
        run_cases(other, tier, seen)
        other.stop()
    return seen


def run_cases(engine: Engine, tier: str, seen: Observed) -> None:
    for size, prompt in CASES.items():
        engine.reset_gpu()
        with engine.counting() as counters:
            answer = engine.one(prompt)
        seen.tiers[tier, size] = answer, counters


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("size", CASES)
def test_a_load_equals_a_gpu_hit_of_its_length(observed: Observed, tier: str, size: int) -> None:
    answer, counters = observed.tiers[tier, size]
    num_hits = (size - 1) // CHUNK_TOKENS
    assert {t: counters[f"{t}_hits"] for t in TIERS} == dict.fromkeys(TIERS, 0) | {tier: num_hits}
    assert answer.cached == num_hits * CHUNK_TOKENS == observed.gpu[size].cached
    assert answer.bits == observed.gpu[size].bits
    assert answer.distance(observed.cold[size]) < 1e-4


def test_a_pool_is_a_segment_a_rank_and_no_more_than_it_may_be(engine: Engine) -> None:
    stat = engine.call("stat")
    assert stat["budget"] <= 64 << 20
    assert stat["num_slots"] * stat["payload_nbytes"] > 63 << 20
    workers = ranks(engine)
    segments = [pool_files(pid) for pid in workers]
    assert len(segments[1]) == 1
    assert len(segments[0]) == NUM_RANKS, "rank 0 hands them out"
    assert pool_files(engine.pid) == segments[0] > segments[1]


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_one_wrong_bit_of_a_rank_makes_the_comparison_fail(engine: Engine, observed: Observed, rank: int) -> None:
    prompt, expected = CASES[276], observed.gpu[276]
    for answers_right in (False, True):  # flipped, and flipped back
        before, after = engine.call("flip", prompt=prompt, chunk=2, word=4096 + 65, bit=28, part=rank)
        assert before != after
        engine.reset_gpu()
        with engine.counting() as counters:
            answer = engine.one(prompt)
        assert counters["host_hits"] == 4
        assert (answer.bits == expected.bits) == answers_right


@pytest.mark.parametrize("sync_nbytes", [0, 1 << 30], ids=["waited for", "in its step"])
@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_a_load_that_fails_on_one_rank_is_computed(engine: Engine, rank: int, sync_nbytes: int) -> None:
    engine.call("load_in_step", nbytes=sync_nbytes)
    prompt = PROMPTS.new(4 * CHUNK_TOKENS + 20)
    cold, gpu = engine.run(prompt, prompt)
    engine.call("fail_rank", rank=rank, what="load")
    engine.reset_gpu()
    with engine.counting() as counters:
        answer = engine.one(prompt)
    assert counters["load_failures"] == 1
    assert answer.distance(cold) < 1e-4
    engine.reset_gpu()
    with engine.counting() as counters:
        answer = engine.one(prompt)
    assert counters["host_hits"] == 4
    assert answer.bits == gpu.bits
    wait_until(lambda: not any(engine.call("leases").values()))


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_a_store_that_fails_on_one_rank_is_none(engine: Engine, rank: int) -> None:
    prompt = PROMPTS.new(2 * CHUNK_TOKENS + 1)
    engine.call("fail_rank", rank=rank, what="store")
    with engine.counting() as counters:
        expected = engine.one(prompt)
    assert [digest is None for digest in engine.call("in_host", prompt=prompt)] == [True, False]
    assert counters["spilled"] == 1
    engine.reset_gpu()
    answer = engine.one(prompt)
    assert answer.cached == 0
    assert answer.bits == expected.bits


def test_ranks_load_and_store_in_a_busy_engine(engine: Engine, observed: Observed) -> None:
    """Loads end on one rank before the other, while others compute and are aborted."""
    engine.clear_host()
    names = {f"busy{i}": prompt for i, prompt in enumerate([*CASES.values(), *[PROMPTS.new(300) for _ in range(4)]])}
    for name, prompt in names.items():
        engine.add(name, prompt)
    engine.step(2)
    engine.call("abort", names=["busy5"])
    finished = engine.finish(*(set(names) - {"busy5"}))
    for name, size in zip(names, CASES, strict=False):
        assert finished[name].distance(observed.cold[size]) < 1e-4
    wait_until(lambda: not any(engine.call("leases").values()))


@pytest.mark.usefixtures("observed")
def test_one_rank_and_two_do_not_share(engine: Engine, module_lab: Lab, model: Path, options: dict[str, Any]) -> None:
    single = module_lab.engine(model, options)
    with single.counting() as counters:
        answer = single.one(CASES[276])
    assert counters["missed"] == 4
    assert answer.cached == 0
    assert single.call("stat")["namespace"] != engine.call("stat")["namespace"]
    assert single.call("stat")["payload_nbytes"] == engine.call("stat")["payload_nbytes"], "the same KV, cut otherwise"
    single.stop()


def test_a_rank_that_dies_takes_its_engine_along_and_nothing_else(
    engine: Engine, module_lab: Lab, model: Path, disk: Path, options: dict[str, Any]
) -> None:
    single = module_lab.engine(model, options).ready()
    single.one(CASES[276])
    names, server = shm_names(), server_pid(disk)
    workers = ranks(engine)
    segments = set.union(*map(pool_files, workers))
    engine.add("left", CASES[276])
    os.kill(workers[1], signal.SIGKILL)
    with pytest.raises((EngineError, EngineDiedError)):
        engine.finish("left")
    engine.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}/maps").exists() for pid in [*workers, engine.pid]))
    assert shm_names() <= names

    wait_until(lambda: not pool_files(server) & segments, 30.0)
    drain(disk)
    single.clear_host()
    with single.counting() as counters:
        assert single.one(CASES[276]).cached == 4 * CHUNK_TOKENS
    assert counters["disk_hits"] == 4, "the store server serves on"
    assert server_pid(disk) == server
    single.stop()


def ranks(engine: Engine) -> list[int]:
    """Return the processes of an engine's ranks, in order."""
    found = {}
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                title = (directory / "cmdline").read_bytes().split(b"\0")[0].decode()
                parent = int((directory / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, ValueError):
                continue
            if parent == engine.pid and "Worker" in title:
                found[title] = int(directory.name)
    assert len(found) == NUM_RANKS, found
    return [found[title] for title in sorted(found)]
