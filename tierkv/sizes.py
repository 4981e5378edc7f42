"""Byte sizes and durations as people write them (``"8GiB"``, ``1048576``; ``"7d"``, ``"30s"``, ``2.5``)."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {"": 1, "b": 1}
for _i, _p in enumerate("kmgtp", start=1):
    _UNITS |= {_p: 1024**_i, f"{_p}ib": 1024**_i, f"{_p}b": 1000**_i}

#: No machine has more; larger numbers do not fit into the messages and files that carry them.
MAX_SIZE = 1 << 62

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(value: int | str) -> int:
    """Return ``value`` in bytes. ``KiB`` is 1024, ``kB`` is 1000, a bare ``k`` is 1024.

    Raises:
        ValueError: not a size, negative, or more than ``MAX_SIZE``.

    >>> parse_size("1.5 GiB")
    1610612736
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{value!r} is not a size; write a number of bytes or a string such as '8GiB'")
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"{value} is negative; a size is 0 or more bytes")
        return _bounded(value)
    match = _SIZE.fullmatch(value)
    unit = match[2].lower() if match else None
    if match is None or unit not in _UNITS:
        raise ValueError(f"{value!r} is not a size; write a number of bytes or a string such as '8GiB'")
    return _bounded(int(Fraction(match[1]) * _UNITS[unit]))


_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
#: Longer ones do not fit into Redis's expiry in milliseconds beside a date.
MAX_DURATION_S = 100 * 365 * 86400.0


def parse_duration(value: float | str) -> float:
    """Return ``value`` in seconds. Units are ms, s, m, h, d, w; a bare number is seconds.

    Raises:
        ValueError: not a duration, negative, or more than a hundred years.

    >>> parse_duration("1.5h")
    5400.0
    """
    what = f"{value!r} is not a duration; write seconds, or a string such as '30s', '12h' or '7d'"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(what)
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None or match[2].lower() not in _SECONDS:
            raise ValueError(what)
        seconds = float(match[1]) * _SECONDS[match[2].lower()]
    else:
        seconds = float(value)
    if not 0 <= seconds <= MAX_DURATION_S:
        raise ValueError(f"{value!r} is no duration from 0 to a hundred years")
    return seconds


def format_duration(seconds: float) -> str:
    """Return ``seconds`` for people, in the largest unit that it is at least one of.

    >>> format_duration(5400)
    '1.5h'
    """
    for unit in ("w", "d", "h", "m", "s"):
        if seconds >= _SECONDS[unit]:
            return f"{round(seconds / _SECONDS[unit], 1):g}{unit}"
    return f"{seconds * 1000:.0f}ms" if seconds else "0s"


def _bounded(nbytes: int) -> int:
    if nbytes > MAX_SIZE:
        raise ValueError("it is more than any machine has; write a size such as '8GiB'")
    return nbytes


def format_size(nbytes: float) -> str:
    """Return ``nbytes`` for people, in binary units with at most one decimal.

    >>> format_size(1610612736)
    '1.5 GiB'
    """
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" or size == int(size) else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")
