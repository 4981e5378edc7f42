"""Fixtures that several test modules share."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from leaks import children, pool_files, shm_names

#: What a skip says where something that can be installed is not there.
_MISSING = ("is not installed", "is installed", "is missing", "may not be mounted")


def pytest_configure() -> None:
    """Take Ctrl-C, also where a shell started this in the background, and so do the programs that tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where everything has been installed (``TIERKV_ALL_TESTS``), a test that skips for want of it has failed."""
    report = yield
    if os.environ.get("TIERKV_ALL_TESTS") and report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        if any(words in reason for words in _MISSING):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} did not run: {reason}"
    return report


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory whose path is short enough for a socket's address, wherever pytest keeps its own."""
    path = Path(tempfile.mkdtemp(prefix="tkv-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Check that the test leaves no child process, no pool memory in this process and no name in /dev/shm."""
    before = children(), pool_files(), shm_names()
    yield
    deadline = time.monotonic() + 10
    while (after := (children(), pool_files(), shm_names())) and any(
        now - then for now, then in zip(after, before, strict=True)
    ):
        if time.monotonic() > deadline:
            left = [sorted(now - then) for now, then in zip(after, before, strict=True)]
            pytest.fail(f"left behind: processes {left[0]}, pool files {left[1]}, names in /dev/shm {left[2]}")
        time.sleep(0.02)
