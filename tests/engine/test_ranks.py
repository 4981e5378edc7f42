"""Tensor and pipeline parallel ranks: one payload of all ranks, in every tier; one rank's failure is everybody's."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from engine_process import (
    BLOCK_TOKENS,
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
from leaks import left_in_shm, pool_files, shm_names
from records import wait_until
from seeded_model import write_seeded_llama
from servers import RedisServer

pytestmark = pytest.mark.engine

TIERS = ("host", "disk", "shared")
NUM_RANKS = 2
PROMPTS = Prompts(seed=31)
#: 1 to 32 tokens more than whole chunks: the GPU hits as far as we do.
CASES = {size: PROMPTS.new(size) for size in (65, 276, 1042)}
RECOMPUTE = {"kv_load_failure_policy": "recompute"}
#: Of the model of portable payloads: two ranks have two KV heads each.
HEADS: dict[str, int] = {"layers": 3, "heads": 4, "kv_heads": 4, "head_dim": 64}


def parallel(kind: str) -> dict[str, Any]:
    """Return the settings of an engine of two ranks, each with a thread of its own.

    A later stage has what it takes from the one before it once vLLM has warmed up, which it does for a compiled model:
    this one is "compiled" to what it is.
    """
    cores = sorted(os.sched_getaffinity(0))
    binding = f"{cores[0]}|{cores[-1]}" if len(cores) > 1 else "nobind"
    warm_up = {"enforce_eager": False, "compilation_config": {"mode": 1, "backend": "eager"}}
    return {
        f"{kind}_parallel_size": NUM_RANKS,
        "distributed_executor_backend": "mp",
        "env": {"VLLM_CPU_OMP_THREADS_BIND": binding},
    } | (warm_up if kind == "pipeline" else {})


def start(
    lab: Lab, model: Path, connector: dict[str, Any] | None = None, kind: str = "tensor", **options: Any
) -> Engine:
    """Start an engine of two ranks. They spin while they wait for each other: let others on these cores go first."""
    engine = lab.engine(model, connector, **parallel(kind), **options)
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
    names, server = shm_names(of_vllm=True), server_pid(disk)
    workers = ranks(engine)
    segments = set.union(*map(pool_files, workers))
    engine.add("left", CASES[276])
    os.kill(workers[1], signal.SIGKILL)
    with pytest.raises((EngineError, EngineDiedError)):
        engine.finish("left")
    engine.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}/maps").exists() for pid in [*workers, engine.pid]))
    assert not left_in_shm(names)

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


# -- portable payloads


class Portable(NamedTuple):
    """Engines of one and of two ranks that share portable payloads.

    Attributes:
        two: two ranks, over the first disk and the shared tier.
        one: one rank, beside it.
        stored: what two ranks stored of the cases, by key, before the other engine had any of it.
    """

    two: Engine
    one: Engine
    stored: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def by_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which each of two ranks holds two KV heads."""
    return write_seeded_llama(tmp_path_factory.mktemp("models") / "heads", **HEADS)


@pytest.fixture(scope="module")
def portable_options(module_lab: Lab, redis_server: RedisServer) -> dict[str, Any]:
    disk = module_lab.disk("portable")
    return {"disk_dir": disk, "shared_url": redis_server.url, "spill": THROUGH, "portable_ranks": True}


@pytest.fixture(scope="module")
def portable(
    module_lab: Lab, by_heads: Path, portable_options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Portable]:
    two = start(module_lab, by_heads, portable_options)
    two.run(*CASES.values(), max_tokens=1)
    drain(portable_options["disk_dir"])
    stored = saved(two, tmp_path_factory.mktemp("two"))
    one = module_lab.engine(by_heads, portable_options)
    yield Portable(two, one, stored)
    one.kill()
    two.kill()


def saved(engine: Engine, directory: Path) -> dict[str, np.ndarray]:
    """Return the payloads in an engine's host pool, by key."""
    path = directory / "host.npz"
    engine.call("save_host", path=str(path))
    with np.load(path) as payloads:
        return dict(payloads)


def heads_first(chunk: np.ndarray) -> bytes:
    """Return a chunk's portable bytes, of what it is on a GPU: layers, blocks, heads, and a head's part of a block."""
    blocks = CHUNK_TOKENS // BLOCK_TOKENS
    return chunk.reshape(HEADS["layers"], blocks, HEADS["kv_heads"], -1).transpose(2, 0, 1, 3).tobytes()


def on_gpu(engine: Engine, prompt: list[int], directory: Path) -> list[bytes]:
    """Return the portable bytes of each chunk of a prompt in the GPU's blocks."""
    path = directory / "gpu.npz"
    engine.call("save_gpu", path=str(path), prompt=prompt, blocks_per_chunk=CHUNK_TOKENS // BLOCK_TOKENS)
    with np.load(path) as chunks:
        return [heads_first(chunks[str(i)].view(np.uint8)) for i in range(len(prompt) // CHUNK_TOKENS)]


@pytest.mark.parametrize("size", CASES)
def test_one_rank_loads_what_two_have_stored(portable: Portable, tmp_path: Path, size: int) -> None:
    with portable.one.counting() as counters:
        answer = portable.one.one(CASES[size])
    assert counters["disk_hits"] == (size - 1) // CHUNK_TOKENS
    assert counters["missed"] == 0
    stored = {payload.tobytes() for payload in portable.stored.values()}
    loaded = on_gpu(portable.one, CASES[size], tmp_path)[: answer.cached // CHUNK_TOKENS]
    assert loaded and set(loaded) <= stored, "the bytes on the GPU are those that two ranks had"
    assert answer.distance(portable.two.one(CASES[size])) < 1e-4


def test_two_ranks_load_what_one_has_stored(
    portable: Portable, portable_options: dict[str, Any], tmp_path: Path
) -> None:
    prompt = PROMPTS.new(4 * CHUNK_TOKENS + 20)
    computed = portable.one.one(prompt)
    expected = on_gpu(portable.one, prompt, tmp_path)
    drain(portable_options["disk_dir"])
    with portable.two.counting() as counters:
        answer = portable.two.one(prompt)
    assert (counters["disk_hits"], counters["missed"]) == (4, 0)
    assert answer.distance(computed) < 1e-4
    in_host = {payload.tobytes() for payload in saved(portable.two, tmp_path).values()}
    assert in_host >= set(expected)


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_one_wrong_bit_of_a_head_is_found(portable: Portable, rank: int) -> None:
    """The control: what two ranks load is what the answers are made of."""
    prompt = CASES[276]
    portable.two.reset_gpu()
    expected = portable.two.one(prompt)
    for answers_right in (False, True):  # flipped, and flipped back
        portable.two.call("flip", prompt=prompt, chunk=2, word=4096 + 65, bit=28, part=rank)
        portable.two.reset_gpu()
        answer = portable.two.one(prompt)
        assert answer.cached == 4 * CHUNK_TOKENS
        assert (answer.bits == expected.bits) == answers_right


def test_portable_payloads_go_through_the_shared_tier(
    portable: Portable, module_lab: Lab, by_heads: Path, portable_options: dict[str, Any], tmp_path: Path
) -> None:
    other = module_lab.engine(by_heads, portable_options | {"disk_dir": module_lab.disk("portable-2")})
    with other.counting() as counters:
        answer = other.one(CASES[276])
    assert (counters["shared_hits"], counters["missed"]) == (4, 0)
    assert answer.cached == 4 * CHUNK_TOKENS
    stored = {payload.tobytes() for payload in portable.stored.values()}
    assert set(on_gpu(other, CASES[276], tmp_path)[:4]) <= stored
    other.stop()


def test_portable_payloads_are_shared_with_those_who_ask_for_them(
    portable: Portable, module_lab: Lab, by_heads: Path, portable_options: dict[str, Any]
) -> None:
    assert portable.one.call("stat")["namespace"] == portable.two.call("stat")["namespace"]
    other = module_lab.engine(by_heads, portable_options | {"portable_ranks": False})
    with other.counting() as counters:
        assert other.one(CASES[276]).cached == 0
    assert counters["missed"] == 4
    other.stop()


# -- pipeline stages


@pytest.fixture(scope="module")
def staged(module_lab: Lab, model: Path) -> Iterator[Engine]:
    """An engine of two pipeline stages."""
    disk = module_lab.disk("staged")
    engine = start(module_lab, model, {"disk_dir": disk}, kind="pipeline", transfer=RECOMPUTE)
    yield engine
    engine.kill()


@pytest.mark.parametrize("size", CASES)
def test_stages_load_what_they_have_stored(
    staged: Engine, cold: Callable[[list[int]], Answer], module_lab: Lab, size: int
) -> None:
    """From the host pool and from the disk, bit for bit what a GPU hit gives."""
    prompt, num_hits = CASES[size], (size - 1) // CHUNK_TOKENS
    computed, on_gpu = staged.run(prompt, prompt)
    assert computed.distance(cold(prompt)) < 1e-4
    drain(module_lab.disk("staged"))
    for tier, clear in (("host", staged.reset_gpu), ("disk", staged.clear_host)):
        clear()
        with staged.counting() as counters:
            answer = staged.one(prompt)
        assert (counters[f"{tier}_hits"], counters["missed"]) == (num_hits, 0)
        assert answer.cached == on_gpu.cached == num_hits * CHUNK_TOKENS
        assert answer.bits == on_gpu.bits


@pytest.mark.parametrize("stage", range(NUM_RANKS))
def test_one_wrong_bit_of_a_stage_is_found(staged: Engine, stage: int) -> None:
    prompt = PROMPTS.new(4 * CHUNK_TOKENS + 20)
    _, expected = staged.run(prompt, prompt)
    staged.counters()
    for answers_right in (False, True):  # flipped, and flipped back
        staged.call("flip", prompt=prompt, chunk=2, word=4096 + 65, bit=28, part=stage)
        staged.reset_gpu()
        answer = staged.one(prompt)
        assert answer.cached == 4 * CHUNK_TOKENS
        assert (answer.bits == expected.bits) == answers_right


@pytest.mark.parametrize("what", ["load", "store"])
@pytest.mark.parametrize("stage", range(NUM_RANKS))
def test_what_fails_in_one_stage_has_failed(staged: Engine, stage: int, what: str) -> None:
    prompt = PROMPTS.new(4 * CHUNK_TOKENS + 20)
    if what == "store":
        staged.call("fail_rank", rank=stage, what="store")
    computed, on_gpu = staged.run(prompt, prompt)
    staged.counters()
    assert [digest is None for digest in staged.call("in_host", prompt=prompt)] == [
        what == "store",
        False,
        False,
        False,
    ]
    if what == "load":
        staged.call("fail_rank", rank=stage, what="load")
    staged.reset_gpu()
    with staged.counting() as counters:
        answer = staged.one(prompt)
    assert answer.distance(computed) < 1e-4
    assert counters["load_failures"] == (what == "load")
    staged.reset_gpu()
    answer = staged.one(prompt)
    assert (answer.cached, answer.bits) == (on_gpu.cached, on_gpu.bits)
    wait_until(lambda: not any(staged.call("leases").values()))


def test_stages_load_and_store_in_a_busy_engine(staged: Engine, cold: Callable[[list[int]], Answer]) -> None:
    """Two steps are under way at a time, while loads end in one stage before the other and requests are aborted."""
    staged.run(*CASES.values())
    staged.reset_gpu()
    names = {f"busy{i}": prompt for i, prompt in enumerate([*CASES.values(), *[PROMPTS.new(300) for _ in range(4)]])}
    for name, prompt in names.items():
        staged.add(name, prompt)
    staged.step(2)
    staged.call("abort", names=["busy5"])
    finished = staged.finish(*(set(names) - {"busy5"}))
    for name, prompt in names.items():
        assert name == "busy5" or finished[name].distance(cold(prompt)) < 1e-4
    wait_until(lambda: not any(staged.call("leases").values()))
