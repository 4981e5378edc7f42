"""Planted faults: that all of them can be planted, that cheap ones are seen, and that one that is not seen is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import mutations
from mutations import MUTATIONS, CannotPlantError, Mutation, check, mutated

QUICK = "tests/unit/test_plan_machine.py::test_each_load_is_reported_once"
CHEAP = ("forget to report a load that failed", "leave the tenant out of the key")
if os.environ.get("TIERKV_FULL"):
    CHEAP += ("wait for what comes after a chunk that another's fetch did not bring",)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_it_can_be_planted(mutation: Mutation) -> None:
    source = (mutations.ROOT / mutation.path).read_text()
    changed = mutated(source, mutation)
    assert changed != source
    compile(changed, mutation.path, "exec")
    path, _, name = mutation.test.partition("::")
    assert f"def {name}(" in (mutations.ROOT / path).read_text(), "the test named for it is not there"


def test_names_are_unique() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 10


def test_cheap_faults_are_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [mutation for mutation in MUTATIONS if mutation.name in CHEAP]
    assert len(chosen) == len(CHEAP)
    assert check(chosen, tmp_path) == []
    assert capsys.readouterr().out.count("  killed ") == len(CHEAP)


def test_a_fault_that_survives_and_one_that_cannot_be_planted_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = "connector/tierkv_connector/worker.py"
    harmless = Mutation("say it in other words", path, (('"""One rank.', '"""A rank.'),), QUICK)
    stale = Mutation("change what is not there", path, (("this text is nowhere", ""),), QUICK)
    survived, unplanted = check([harmless, stale], tmp_path)
    assert "passes although the sources say it in other words" in survived
    assert "cannot be planted" in unplanted and "this text is nowhere" in unplanted
    out = capsys.readouterr().out
    assert "survived" in out and "error" in out
    with pytest.raises(CannotPlantError):
        mutated("twice twice", Mutation("x", path, (("twice", ""),), QUICK))
