"""What differs between versions of vLLM, on a real engine of the wanted one (``TIERKV_VLLM``): see scripts/test-matrix.

That loads give the right output, aborts, preemption, resets and start-up are tested beside this, on any version.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import vllm_versions
from engine_process import CHUNK_TOKENS, Answer, Engine, Lab, Prompts
from records import wait_until
from tierkv_connector import compat

pytestmark = pytest.mark.engine

PROMPTS = Prompts(seed=11)

Cold = Callable[..., Answer]


def stored(engine: Engine, num_tokens: int) -> list[int]:
    """Return a prompt that is in the host pool and not on the GPU."""
    prompt = PROMPTS.new(num_tokens)
    engine.one(prompt, max_tokens=1)
    engine.reset_gpu()
    return prompt


def check_rest(engine: Engine) -> None:
    """Check that nothing is held by a request, blocks of the GPU included."""
    engine.call("idle")
    wait_until(lambda: set(engine.call("leases").values()) == {0})


def test_the_engine_is_of_the_wanted_version(reference: Engine) -> None:
    assert reference.call("vllm_version") == vllm_versions.wanted()


def test_a_tested_version_starts_without_a_warning(lab: Lab, model: Path) -> None:
    engine = lab.engine(model, {"server": "off"}).ready()
    assert "is not tested with vLLM" not in engine.log.read_text()


@pytest.mark.parametrize("num_on_gpu", [0, 2])
def test_a_failed_load_is_recomputed_and_not_offered_again(lab: Lab, model: Path, cold: Cold, num_on_gpu: int) -> None:
    """With the policy ``recompute``, whether or not the GPU has a part of the prefix."""
    engine = lab.engine(model, {"server": "off"}, transfer={"kv_load_failure_policy": "recompute"})
    prompt = stored(engine, 300)
    expected = cold(prompt)
    if num_on_gpu:
        engine.one(prompt[: num_on_gpu * CHUNK_TOKENS + 1], max_tokens=1)
    engine.call("asked")
    engine.call("fail_loads", num=1)
    with engine.counting() as counters:
        answer = engine.one(prompt)
    assert answer.distance(expected) < 1e-4
    assert answer.reason == "length"
    assert counters["load_failures"] == 1
    offered = [tokens for _, _, tokens, _ in engine.call("asked") if tokens]
    assert offered == [(4 - num_on_gpu) * CHUNK_TOKENS], "what failed was offered once"
    check_rest(engine)
    engine.reset_gpu()
    with engine.counting() as counters:
        assert engine.one(prompt).distance(expected) < 1e-4
    assert counters["host_hits"] == 4, "another request may load it"
    check_rest(engine)


def test_a_failed_load_fails_its_request_where_that_is_the_policy(lab: Lab, model: Path, cold: Cold) -> None:
    """The policy ``fail``, vLLM's default: one request ends with an error, the next loads."""
    engine = lab.engine(model, {"server": "off"})
    prompt = stored(engine, 300)
    engine.call("fail_loads", num=1)
    engine.add("failing", prompt)
    assert engine.finish("failing")["failing"].reason == "error"
    check_rest(engine)
    engine.reset_gpu()
    with engine.counting() as counters:
        assert engine.one(prompt).distance(cold(prompt)) < 1e-4
    assert counters["host_hits"] == 4
    check_rest(engine)


def test_a_load_that_cannot_be_planned_is_computed(lab: Lab, model: Path, cold: Cold) -> None:
    """A fault of ours when blocks have been given out: the request must not take them for loaded."""
    engine = lab.engine(model, {"server": "off"}, transfer={"kv_load_failure_policy": "recompute"})
    prompt = stored(engine, 300)
    engine.call("strand_next_load")
    answer = engine.one(prompt)
    assert answer.distance(cold(prompt)) < 1e-4
    assert "TierKV failed in update_state_after_alloc" in engine.log.read_text()
    engine.reset_gpu()
    assert engine.one(prompt).distance(cold(prompt)) < 1e-4
    assert engine.call("states") == {}


def test_a_request_that_may_not_read_the_cache_loads_nothing(lab: Lab, model: Path, cold: Cold) -> None:
    engine = lab.engine(model, {"server": "off"})
    prompt = stored(engine, 300)
    with engine.counting() as counters:
        answer = Answer(**engine.call("run", prompts=[prompt], max_tokens=8, skip_reading=True)[0])
    assert counters["host_hits"] == 0
    assert answer.cached == 0
    assert answer.distance(cold(prompt)) < 1e-4
    engine.reset_gpu()
    assert engine.one(prompt).cached == 4 * CHUNK_TOKENS


def test_chunks_of_generated_tokens_are_those_of_a_prompt(lab: Lab, model: Path, cold: Cold) -> None:
    """The step that fills their last block gives out no block: their ids are from steps before."""
    engine = lab.engine(model, {"server": "off"})
    prompt = PROMPTS.new(100)
    told = engine.run(prompt, max_tokens=150, params={"tierkv": {"store": "all"}})[0]
    check_rest(engine)
    longer = prompt + told.tokens[:-1] + PROMPTS.new(30)
    engine.reset_gpu()
    with engine.counting() as counters:
        answer = engine.one(longer)
    assert counters["host_hits"] == (100 + 149) // CHUNK_TOKENS
    assert answer.distance(cold(longer)) < 1e-4


# -- versions that the tests do not run with


def test_another_version_is_warned_of_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(compat.logger, "propagate", True)
    monkeypatch.setattr(compat, "VLLM_VERSION", "0.34.1")
    compat.check_interface()
    compat.warn_if_untested()
    assert [record.getMessage().partition(" is ")[2] for record in caplog.records] == [
        "not tested with vLLM 0.34.1; it is with 0.26 to 0.33"
    ]
    caplog.clear()
    for minor in compat.TESTED_VLLM:
        monkeypatch.setattr(compat, "VLLM_VERSION", f"{minor}.7")
        compat.warn_if_untested()
    assert not caplog.records


def write_vllm(directory: Path, version: str, base: str) -> None:
    """Write a package ``vllm`` that has the module of the connectors' base class and nothing else."""
    module = directory / "vllm/distributed/kv_transfer/kv_connector/v1"
    module.mkdir(parents=True)
    for package in (module, *list(module.parents)[:4]):
        (package / "__init__.py").touch()
    (directory / "vllm/__init__.py").write_text(f"__version__ = {version!r}\n")
    (module / "base.py").write_text(base)


NAMES = "class KVConnectorBase_V1: pass\nKVConnectorMetadata = KVConnectorRole = KVConnectorWorkerMetadata = object\n"
NAMES += "class SupportsHMA: pass\n"


@pytest.mark.parametrize(
    ("version", "base", "lacking"),
    [
        ("0.25.1", NAMES, "stable interface"),
        ("0.26.0", "class KVConnectorBase_V1: pass\n", "KVConnectorMetadata"),
        ("0.1.dev7+gabc", NAMES, "bind_gpu_block_pool"),
    ],
)
def test_a_version_that_cannot_work_is_refused_in_a_sentence(
    tmp_path: Path, version: str, base: str, lacking: str
) -> None:
    write_vllm(tmp_path, version, base)
    program = (
        "from tierkv.errors import ConfigError\n"
        "try:\n"
        "    from tierkv_connector.compat import check_interface\n"
        "    check_interface()\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert f"cannot work with vLLM {version}" in done.stdout
    assert lacking in done.stdout
    assert "needs vLLM 0.26 or later" in done.stdout
    assert done.stdout.count("\n") == 1
