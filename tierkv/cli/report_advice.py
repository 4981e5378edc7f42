"""What a report's curves come to, in sentences."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tierkv.sizes import format_size

#: Curves of fewer chunks than these are not worth a sentence: asked for, and in the sample.
MIN_ASKED, MIN_SAMPLED = 1000, 400
#: A difference (a share of chunks) that is worth memory or a disk, and one that nobody would notice.
_WORTH, _NOTHING = 0.02, 0.005
#: Sizes that are tried, as multiples of the present one.
_TIMES = (2, 4, 8)
_OPTION = {"host": "host_bytes", "disk": "disk_bytes"}
_WHAT = {"host": "host pool", "disk": "disk"}
_OF = {"host": "of all chunks that were asked for", "disk": "of the chunks that neither GPU nor host pool had"}


def enough(tier: Mapping[str, Any]) -> bool:
    """Return whether a tier's curve rests on enough chunks to say something of it."""
    return bool(tier["sizes"]) and tier["asked"] >= MIN_ASKED and tier["num_sampled"] >= MIN_SAMPLED


def rate_at(sizes: Sequence[float], rates: Sequence[float], nbytes: float) -> float:
    """Return a curve's value at a size, between its points by the logarithm of the size.

    >>> rate_at([1, 4], [0.0, 0.5], 2)
    0.25
    """
    if nbytes <= sizes[0]:
        return rates[0]
    if nbytes >= sizes[-1]:
        return rates[-1]
    i = bisect.bisect_right(sizes, nbytes)
    part = math.log(nbytes / sizes[i - 1]) / math.log(sizes[i] / sizes[i - 1])
    return rates[i - 1] + part * (rates[i] - rates[i - 1])


def advise(reuse: Mapping[str, Any] | None) -> list[str]:
    """Return a sentence or two for each tier; at least one in all.

    Args:
        reuse: the reply to ``TKV.REUSE``; None where there is no server.
    """
    if reuse is None:
        return ["Curves and hit rates are a running server's to know; this is what is stored without one."]
    tiers = reuse["tiers"]
    if not any(tier["asked"] for tier in tiers):
        return [
            "No engine has told of requests yet, so nothing is known of what larger or smaller tiers would have hit: "
            "write the report again when engines have served for a while."
        ]
    return [sentence for tier in tiers for sentence in _of_tier(tier)]


def _of_tier(tier: Mapping[str, Any]) -> list[str]:
    name, budget = tier["name"], tier["budget"]
    if not enough(tier):
        few = (
            f"{tier['asked']:,} chunks" if tier["asked"] < MIN_ASKED else f"a sample of {tier['num_sampled']:,} chunks"
        )
        return [f"Too little was asked of the {_WHAT[name]} to size it: {few}, and {MIN_ASKED:,} say something."]
    at = {times: rate_at(tier["sizes"], tier["hit_rates"], budget * times) for times in (0.25, 0.5, 1, *_TIMES)}
    each = " in each engine" if name == "host" and tier["num_engines"] > 1 else ""
    times = next((times for times in _TIMES if at[times] - at[1] >= _WORTH), None)
    return [_larger(name, budget, at, times, each) if times else _not_larger(name, budget, at, each)]


def _larger(name: str, budget: int, at: Mapping[float, float], times: int, each: str) -> str:
    """Say what the smallest step that is worth it brings, and where it ends."""
    size = f"{format_size(budget * times)}{each}"
    gain = f"would have hit {_points(at[times] - at[1])} more ({_percent(at[1])} to {_percent(at[times])} {_OF[name]})"
    if times == 2:
        sentence = f"Doubling {_OPTION[name]} to {size} {gain}."
    else:
        sentence = f"{times} times {_OPTION[name]}, {size}, {gain}; doubling it, {_points(at[2] - at[1])}."
    last = _TIMES[-1]
    if times == last:
        return sentence
    beyond = at[last] - at[times]
    if beyond < _WORTH:
        return (
            f"{sentence} Beyond that there is little to be had: {_points(beyond)} up to {format_size(budget * last)}."
        )
    return f"{sentence} {format_size(budget * last)} would have hit {_points(at[last] - at[1])} more."


def _not_larger(name: str, budget: int, at: Mapping[float, float], each: str) -> str:
    last = _TIMES[-1]
    sentence = (
        f"A larger {_WHAT[name]} would not help: {format_size(budget * last)}{each} would have hit "
        f"{_points(at[last] - at[1])} more than {format_size(budget)} ({_percent(at[1])} {_OF[name]})."
    )
    smaller = next((times for times in (0.25, 0.5) if at[1] - at[times] < _NOTHING), None)
    return f"{sentence} {format_size(budget * smaller)} would do as well." if smaller else sentence


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _points(share: float) -> str:
    points = round(100 * share, 1)
    return "nothing" if points <= 0 else f"{points:.1f} percentage point{'s' if points != 1 else ''}"
