"""Weights that change in a running engine: what was computed with others is never hit, and a version is shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine_process import Answer, Engine, Lab, Prompts, drain
from records import wait_until
from seeded_model import write_seeded_llama

pytestmark = pytest.mark.engine

PROMPTS = Prompts(seed=71)
NUM_CHUNKS = 4

Cold = Callable[..., Answer]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model after some training: other weights."""
    return write_seeded_llama(tmp_path_factory.mktemp("trained") / "seeded", seed=1)


@pytest.fixture(scope="module")
def fresh(module_lab: Lab, trained: Path) -> Iterator[Engine]:
    """An engine that was started with the trained weights, without connector."""
    engine = module_lab.engine(trained)
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def disk(module_lab: Lab) -> Path:
    return module_lab.disk("weights")


@pytest.fixture(scope="module")
def started(module_lab: Lab, model: Path, disk: Path) -> list[Engine]:
    """Two engines of one disk."""
    return [module_lab.engine(model, {"disk_dir": disk}) for _ in range(2)]


@pytest.fixture
def engines(started: list[Engine], model: Path) -> Iterator[list[Engine]]:
    """Two engines with the weights of their files and nothing on the GPU or in the host pool."""
    for engine in started:
        load(engine, model)
        assert engine.call("reset_all")
        engine.call("rejoin")
    yield started
    for engine in started:
        wait_until(lambda engine=engine: set(engine.call("leases").values()) == {0})


def load(engine: Engine, path: Path) -> None:
    engine.call("rpc", method="reload_weights", kwargs={"weights_path": str(path)})


def name_weights(engine: Engine, version: str) -> None:
    """Tell a version; before 0.27 vLLM has no call for that."""
    if not engine.call("takes_versions"):
        pytest.skip("this version of vLLM is not told what its weights are called")
    engine.call("name_weights", version=version)


def rises(engine: Engine, prompt: list[int]) -> tuple[Answer, dict[str, int]]:
    with engine.counting() as counters:
        answer = engine.one(prompt)
    return answer, {name: counters[name] for name in hits()}


def hits(**counts: int) -> dict[str, int]:
    return {"host_hits": 0, "disk_hits": 0, "spilled": 0, "stored": 0} | counts


def test_an_update_in_place_cuts_off_all_that_was_stored(
    engines: list[Engine], disk: Path, model: Path, trained: Path, fresh: Engine, cold: Cold
) -> None:
    engine, prompt = engines[0], PROMPTS.new(NUM_CHUNKS * 64 + 20)
    assert engine.one(prompt).bits == cold(prompt).bits
    engine.counters()
    drain(disk)
    load(engine, trained)
    stale, counters = rises(engine, prompt + PROMPTS.new(100))
    assert stale.cached, "vLLM hits what the old weights left on its GPU"
    assert counters == hits(), "and nothing of what is computed behind it is kept"
    assert engine.call("reset_all")
    expected, hit = fresh.run(prompt, prompt)
    assert expected.tokens != cold(prompt).tokens
    answer, counters = rises(engine, prompt)
    assert answer.cached == 0 and answer.bits == expected.bits
    assert counters == hits(spilled=NUM_CHUNKS), "nobody has said what these weights are called: they stay here"
    engine.reset_gpu()
    answer, counters = rises(engine, prompt)
    assert answer.bits == hit.bits
    assert counters == hits(host_hits=NUM_CHUNKS)


def test_engines_that_load_one_version_share_it_and_no_other(
    engines: list[Engine], disk: Path, trained: Path, fresh: Engine, cold: Cold
) -> None:
    first, second = engines
    prompt = PROMPTS.new(NUM_CHUNKS * 64 + 20)
    fresh.reset_gpu()
    expected, hit = fresh.run(prompt, prompt)
    first.one(prompt)
    first.counters()
    for engine in engines:
        load(engine, trained)
        assert engine.call("reset_all")
        name_weights(engine, "step-100")
    answer, counters = rises(first, prompt)
    assert answer.bits == expected.bits
    assert counters == hits(spilled=NUM_CHUNKS, stored=NUM_CHUNKS)
    drain(disk)
    answer, counters = rises(second, prompt)
    assert answer.bits == hit.bits
    assert counters == hits(disk_hits=NUM_CHUNKS)
    assert second.call("reset_all")
    name_weights(second, "step-101")
    answer, counters = rises(second, prompt)
    assert counters == hits(spilled=NUM_CHUNKS, stored=NUM_CHUNKS), "another version's chunks are not its"
    assert answer.bits == expected.bits


def test_the_files_weights_come_back_by_their_name(engines: list[Engine], disk: Path, cold: Cold) -> None:
    """vLLM's own name for them is ``default``. To sleep it resets every cache, whether weights change or not."""
    engine, prompt = engines[0], PROMPTS.new(NUM_CHUNKS * 64 + 20)
    engine.one(prompt)
    engine.counters()
    drain(disk)
    for level in (1, 2):
        engine.call("sleep", level=level)
        engine.call("wake_up")
        answer, counters = rises(engine, prompt)
        assert (answer.cached, counters) == (0, hits(spilled=NUM_CHUNKS)), "nobody has said that they are the same"
        assert answer.bits == cold(prompt).bits
        engine.reset_gpu()
        name_weights(engine, "default")
        answer, counters = rises(engine, prompt)
        assert counters == hits(disk_hits=NUM_CHUNKS)
        assert answer.distance(cold(prompt)) < 1e-4


def test_a_version_that_is_told_before_the_reset_waits_for_it(
    engines: list[Engine], disk: Path, trained: Path, fresh: Engine
) -> None:
    """Behind KV of other weights nothing is stored under it, which engines that load it could hit."""
    engine, other = engines
    prompt = PROMPTS.new(NUM_CHUNKS * 64 + 20)
    engine.one(prompt)
    load(engine, trained)
    name_weights(engine, "step-7")
    stale, counters = rises(engine, prompt + PROMPTS.new(100))
    assert stale.cached and counters == hits()
    assert engine.call("reset_all")
    answer, counters = rises(engine, prompt)
    assert counters == hits(spilled=NUM_CHUNKS, stored=NUM_CHUNKS)
    drain(disk)
    load(other, trained)
    assert other.call("reset_all")
    name_weights(other, "step-7")
    answer, counters = rises(other, prompt)
    assert counters == hits(disk_hits=NUM_CHUNKS)
    fresh.reset_gpu()
    assert answer.bits == fresh.run(prompt, prompt)[1].bits


@pytest.mark.parametrize("connector_too", [False, True])
def test_a_change_that_nobody_sees_and_a_reset(
    engines: list[Engine], disk: Path, cold: Cold, connector_too: bool
) -> None:
    """A function that is sent to the workers says nothing; the reset of the connector is what cuts the old KV off."""
    engine, prompt = engines[0], PROMPTS.new(NUM_CHUNKS * 64 + 20)
    engine.one(prompt)
    engine.counters()
    engine.call("double_weights")
    if connector_too:
        assert engine.call("reset_all")
    else:
        engine.reset_gpu()
    answer, counters = rises(engine, prompt)
    if connector_too:
        assert (answer.cached, counters) == (0, hits(spilled=NUM_CHUNKS))
    else:
        assert counters == hits(host_hits=NUM_CHUNKS), "docs/guide.md says so: reset_connector=True is needed"


def test_a_reset_under_running_requests_keeps_nothing_until_one_that_empties_the_gpu(
    engines: list[Engine], cold: Cold
) -> None:
    """vLLM refuses to empty the GPU then: what is computed behind its blocks may be of other weights."""
    engine, prompt = engines[0], PROMPTS.new(NUM_CHUNKS * 64 + 20)
    engine.one(prompt)
    engine.add("running", PROMPTS.new(600), max_tokens=100)
    engine.step_until(lambda: engine.call("states") == {"running": "RUNNING"})
    assert not engine.call("reset_all")
    longer = prompt + PROMPTS.new(100)
    engine.call("abort", names=["running"])
    answer, counters = rises(engine, longer)
    assert answer.cached and counters == hits()
    assert engine.call("in_host", prompt=longer) == [None] * (len(longer) // 64)
    engine.reset_gpu()
    answer, counters = rises(engine, longer)
    assert counters == hits(spilled=len(longer) // 64)
    assert answer.bits == cold(longer).bits
