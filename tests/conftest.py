"""Fixtures that several test modules share."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from leaks import children, pool_files, shm_names


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
