"""The store server that runs: whether it answers, whether its tiers work, what it drops."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from tierkv import __version__
from tierkv.doctor import Finding, fail, ok, warn

#: A share of chunks dropped, or of hits missed, above which something is to be changed.
_MUCH = 0.05


def check(stat: dict[str, Any]) -> Iterator[Finding]:
    """Look at what ``TKV.STAT`` says."""
    server = stat["server"]
    yield _version(server)
    yield _engines(server)
    for tier in stat["tiers"]:
        yield _tier(tier)
        yield from _losses(tier)


def _version(server: dict[str, Any]) -> Finding:
    found = f"version {server['version']}, up for {int(server['uptime_s']):,} s, disk in {server['disk_dir']}"
    if server["version"] != __version__:
        return warn("server", found, f"this is version {__version__}: run the same on the server and its engines")
    return ok("server", found)


def _engines(server: dict[str, Any]) -> Finding:
    num, silent = server["num_engines"], server["num_silent_engines"]
    if silent:
        return warn("engines", f"{num} are connected, {silent} did not answer", "look whether they are stopped")
    if not num:
        return warn("engines", "none is connected", "an engine's log says why: look for lines with 'tierkv'")
    return ok("engines", f"{num} connected")


def _tier(tier: dict[str, Any]) -> Finding:
    name, state = f"{tier['name']} tier", tier["state"]
    if state == "out":
        since = f" for {max(0, int(time.time() - tier['since'])):,} s" if tier["since"] else ""
        return fail(name, f"is out{since}: {tier['reason']}", "mend that; it is tried again without a restart")
    if state == "none":
        return ok(name, f"is not there: {tier['reason']}")
    if state != "up":
        return warn(name, f"is {state}: {tier['reason']}", "mend that; it is tried again without a restart")
    return ok(name, f"is up, {tier['num_entries']:,} chunks")


def _losses(tier: dict[str, Any]) -> Iterator[Finding]:
    name = f"{tier['name']} tier"
    offered = tier["num_stored"] + tier["num_dropped"]
    if tier["num_dropped"] > _MUCH * offered:
        yield warn(
            name,
            f"dropped {tier['num_dropped']:,} of {offered:,} chunks: it is slower than the engines' spill",
            f"a faster {tier['name']} tier, or spill='second-use' for it",
        )
    if tier["num_bad"]:
        yield warn(
            name,
            f"{tier['num_bad']:,} payloads were damaged when they were read; they were deleted and computed again",
            "tierkv verify reads back the rest; look at the disk's or the machine's own log",
        )
