"""A fiftieth of ``scripts/test-stress``, and that it finds what it looks for."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fire.kind import load_kinds
from fire.plants import PLANTS
from fire.stage import Stage
from fire.stress import Stress, stress_stage
from vllm_versions import MIXES_ADAPTERS, wanted_minor

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SEED = 1
NUM_REQUESTS = 40
NUM_PLANTED = 24
FAULTS = ("disk cannot be read", "redis freezes")
#: What a run says of each planted fault.
FOUND = {
    "bit": "was answered otherwise than without connector",
    "tenant": "of them cached; requests of its tenant",
    "adapter": "was answered otherwise than without connector",
}


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    directory = Path(tempfile.mkdtemp(prefix="tkv-stress-", dir="/tmp"))  # short: there are sockets in it
    with stress_stage(directory) as stage:
        yield stage
    shutil.rmtree(directory)


def test_every_output_is_right_and_nothing_is_left(stage: Stage) -> None:
    kinds = load_kinds()
    report = Stress(stage, SEED, NUM_REQUESTS, [kinds[name] for name in FAULTS], gap=4).run()
    assert report.problems == []
    assert report.num_compared == NUM_REQUESTS - report.num_aborted > 0
    assert report.num_preempted and report.num_aborted
    assert report.resets["of the connector"] == 1 and report.struck.total() > 0


@pytest.mark.parametrize("plant", sorted(FOUND) if os.environ.get("TIERKV_FULL") else ["bit", "tenant"])
def test_a_planted_fault_is_found(stage: Stage, plant: str) -> None:
    """After the test above: the engine is no good any more."""
    if plant == "adapter" and wanted_minor() < MIXES_ADAPTERS:
        pytest.skip("this vLLM does not mix adapters")
    stage.engines["local"].clear_host()
    report = Stress(stage, SEED, NUM_PLANTED, [], plant).run()
    assert any(FOUND[plant] in problem for problem in report.problems)


def test_every_fault_that_can_be_planted_is() -> None:
    assert FOUND.keys() == PLANTS.keys()
