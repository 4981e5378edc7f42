"""LoRA adapters on a real engine: each hits its own KV in every tier, and never another's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_process import CHUNK_TOKENS, THROUGH, Answer, Engine, Lab, Prompts, drain
from lora_adapters import RANK, write_adapter
from servers import RedisServer

pytestmark = pytest.mark.engine

PROMPTS = Prompts(seed=13)
NUM_CHUNKS = 4


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Adapters by name: two that differ, and one that is the first under another path."""
    root = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(root / name, seed) for name, seed in (("a", 1), ("b", 2), ("same as a", 1))}


LORA_SETTINGS: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": RANK}


@pytest.fixture(scope="module")
def disk(module_lab: Lab) -> Path:
    return module_lab.disk("adapters")


@pytest.fixture(scope="module")
def engine(module_lab: Lab, model: Path, redis_server: RedisServer, disk: Path) -> Engine:
    options = {"disk_dir": disk, "shared_url": redis_server.url, "spill": THROUGH}
    return module_lab.engine(model, options, **LORA_SETTINGS)


@pytest.fixture(scope="module")
def plain(module_lab: Lab, model: Path) -> Iterator[Engine]:
    """An engine with the same adapters and without connector."""
    engine = module_lab.engine(model, **LORA_SETTINGS)
    yield engine
    engine.stop()


def run(engine: Engine, prompt: list[int], lora: tuple[str, int, str] | None, **more: Any) -> Answer:
    (answer,) = engine.call("run", prompts=[prompt], max_tokens=8, lora=lora, **more)
    return Answer(**answer)


def hits(counters: dict[str, int]) -> tuple[int, int, int, int]:
    return counters["host_hits"], counters["disk_hits"], counters["shared_hits"], counters["missed"]


def expected(plain: Engine, prompt: list[int], lora: tuple[str, int, str] | None) -> tuple[Answer, Answer]:
    """Return the answers of the engine without connector: from nothing, and with all whole chunks on its GPU."""
    plain.reset_gpu()
    cold = run(plain, prompt, lora)
    plain.reset_gpu()
    run(plain, prompt[: NUM_CHUNKS * CHUNK_TOKENS + 1], lora)
    hit = run(plain, prompt, lora)
    assert (cold.cached, hit.cached) == (0, NUM_CHUNKS * CHUNK_TOKENS)
    return cold, hit


def test_every_adapter_hits_its_own_in_every_tier(
    engine: Engine, plain: Engine, disk: Path, adapters: dict[str, str]
) -> None:
    prompt = PROMPTS.new(NUM_CHUNKS * CHUNK_TOKENS + 20)
    loras = [None, ("a", 1, adapters["a"]), ("b", 2, adapters["b"])]
    for lora in loras[1:]:  # the first request of an adapter has it hashed, and keeps to the GPU
        run(engine, PROMPTS.new(100), lora)
    engine.call("adapters_known")
    answers = {lora: expected(plain, prompt, lora) for lora in loras}
    assert len({tuple(cold.tokens) for cold, _ in answers.values()}) == 3, "the adapters say different things"
    for lora in loras:
        engine.clear_host()
        with engine.counting() as counters:
            cold = run(engine, prompt, lora)
        assert hits(counters) == (0, 0, 0, NUM_CHUNKS), f"{lora} found another's"
        assert cold.distance(answers[lora][0]) < 1e-4
    drain(disk)
    for tier, place in (("host", 0), ("disk", 1)):
        for lora in loras:
            if tier == "disk":
                engine.clear_host()
            engine.reset_gpu()
            if tier == "host":
                run(engine, prompt, lora)
                engine.reset_gpu()
            with engine.counting() as counters:
                answer = run(engine, prompt, lora)
            assert hits(counters)[place] == NUM_CHUNKS
            assert answer.bits == answers[lora][1].bits, (tier, lora)


def test_one_content_under_two_names_is_one(engine: Engine, disk: Path, adapters: dict[str, str]) -> None:
    prompt = PROMPTS.new(NUM_CHUNKS * CHUNK_TOKENS + 20)
    first, second = ("a", 1, adapters["a"]), ("another", 3, adapters["same as a"])
    for lora in (first, second):
        run(engine, PROMPTS.new(100), lora)
    engine.call("adapters_known")
    run(engine, prompt, first)
    engine.counters()
    drain(disk)
    engine.clear_host()
    with engine.counting() as counters:
        answer = run(engine, prompt, second)
    assert hits(counters) == (0, NUM_CHUNKS, 0, 0)
    engine.reset_gpu()
    assert answer.bits == run(engine, prompt, first).bits


def test_a_salt_called_like_an_adapter_and_an_adapter_with_a_salt_keep_apart(
    engine: Engine, disk: Path, adapters: dict[str, str]
) -> None:
    prompt = PROMPTS.new(NUM_CHUNKS * CHUNK_TOKENS + 20)
    lora = ("a", 1, adapters["a"])
    run(engine, PROMPTS.new(100), lora)
    engine.call("adapters_known")
    for given in ({"lora": lora}, {"lora": None, "salt": "a"}, {"lora": lora, "salt": "a"}, {"lora": None}):
        engine.clear_host()
        with engine.counting() as counters:
            run(engine, prompt, **given)
        assert hits(counters) == (0, 0, 0, NUM_CHUNKS), given
        engine.counters()
        drain(disk)


def test_an_adapter_whose_files_change_is_cached_no_more(engine: Engine, tmp_path: Path, disk: Path) -> None:
    lora = ("changing", 9, write_adapter(tmp_path / "changing", 5))
    prompt = PROMPTS.new(NUM_CHUNKS * CHUNK_TOKENS + 20)
    run(engine, PROMPTS.new(100), lora)
    engine.call("adapters_known")
    run(engine, prompt, lora)
    engine.counters()
    drain(disk)
    write_adapter(tmp_path / "changing", 6)
    engine.clear_host()
    with engine.counting() as counters:
        assert run(engine, prompt, lora).cached == 0
    assert hits(counters)[:3] == (0, 0, 0) and counters["stored"] == 0
    assert "files have changed" in engine.tail()
