"""Where our threads run. vLLM binds its workers to cores, and threads started later inherit that."""

from __future__ import annotations

import contextlib
import os
import threading

_allowed: set[int] | None = None


def remember_cores() -> None:
    """Note the cores that this process may use, before anything binds it to fewer."""
    global _allowed
    if _allowed is None:
        _allowed = os.sched_getaffinity(0)


def leave_compute_core() -> None:
    """Let the calling thread run on every core that the process started with, not only on those it computes on."""
    cores = _allowed or set(range(os.cpu_count() or 1))
    with contextlib.suppress(OSError):
        os.sched_setaffinity(threading.get_native_id(), cores)
