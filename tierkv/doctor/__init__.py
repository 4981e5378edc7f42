"""What ``tierkv doctor`` looks at. Each module yields :class:`Finding`: a fact, how bad it is, and what to change."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Finding", "Level", "fail", "ok", "skip", "warn"]

Level = Literal["ok", "warn", "fail", "skip"]


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at.

    Attributes:
        about: what was looked at, in a word or two.
        level: ``"ok"``; ``"warn"`` (works, worse than it could); ``"fail"`` (does not work); ``"skip"`` (could not be
            looked at).
        found: what was seen.
        advice: what to change; empty where nothing needs to be.
    """

    about: str
    level: Level
    found: str
    advice: str = ""


def ok(about: str, found: str) -> Finding:
    """Return that something is as it should be."""
    return Finding(about, "ok", found)


def skip(about: str, found: str) -> Finding:
    """Return that something could not be looked at, and why."""
    return Finding(about, "skip", found)


def warn(about: str, found: str, advice: str) -> Finding:
    """Return that something works worse than it could, and what to change."""
    return Finding(about, "warn", found, advice)


def fail(about: str, found: str, advice: str) -> Finding:
    """Return that something does not work, and what to change."""
    return Finding(about, "fail", found, advice)
