"""A thousand requests leave nothing behind in the engine and its server; ``scripts/test-leaks`` has ten thousand."""

from __future__ import annotations

from pathlib import Path

import pytest

from fire.leak_run import LeakRun

pytestmark = pytest.mark.engine


def test_a_thousand_requests_leave_nothing(short_dir: Path) -> None:
    report = LeakRun(short_dir, num_requests=1000, seed=2).run()
    assert not report.problems, report
    assert report.num_requests == 1000
    assert (
        report.before.keys() == report.after.keys() == report.gained_nbytes.keys() == {"the engine", "the store server"}
    )
