"""A wall clock that jumps: in the process that imports this first, ``time.time`` is off by what :func:`jump` says.

The monotonic clock goes on as before, as it does where an operator or NTP sets the time.
"""

from __future__ import annotations

import time

_real, _real_ns = time.time, time.time_ns
_offset_s = 0.0
_num_asked = 0


def jump(offset_s: float) -> None:
    """Be off by so many seconds from now on."""
    global _offset_s, _num_asked
    _offset_s, _num_asked = offset_s, 0


def num_asked() -> int:
    """Return how often the time was asked for since the last jump."""
    return _num_asked


def _time() -> float:
    global _num_asked
    _num_asked += 1
    return _real() + _offset_s


def _time_ns() -> int:
    return _real_ns() + int(_offset_s * 1e9)


time.time, time.time_ns = _time, _time_ns
