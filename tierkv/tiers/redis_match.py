"""Which of many keys are stored: few round trips, few bytes, and no life renewed (EXISTS does not touch a key).

A run of up to 64 chunks has one hash tag, so one EXISTS asks for all of it and counts. Only where a run is there in
part are its keys asked for one by one: three round trips for a run, and for 8,192 keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

from tierkv.keys import ANCHOR_SPAN, KEY_NBYTES
from tierkv.tiers.base import Ref
from tierkv.tiers.redis_errors import code_of
from tierkv.tiers.redis_index import batches
from tierkv.tiers.redis_link import OnError, RedisLink
from tierkv.tiers.redis_names import Names
from tierkv.tiers.redis_wire import Packed

#: Runs asked for at a time: few first, since a match mostly ends early; then all that a batch may have.
_FIRST_RUNS = 8
_MORE_RUNS = 256


def match(link: RedisLink, names: Names, ns_id: bytes, refs: Sequence[Ref]) -> list[bool]:
    """Return for each ref whether it is stored.

    After a batch of runs (512 keys, then 16,384) with a miss no more is asked, and all that follows is False.
    """
    runs = _runs(refs)
    found: list[bool] = []
    for batch in (runs[:_FIRST_RUNS], *batches(runs[_FIRST_RUNS:], _MORE_RUNS)):
        there = _exist(link, names, ns_id, batch)
        if there is None:
            break
        found += there
        if not all(there):
            break
    return found + [False] * (len(refs) - len(found))


def exist(link: RedisLink, names: Names, ns_id: bytes, refs: Sequence[Ref]) -> list[bool] | None:
    """Return for each ref whether it is stored, None where Redis failed."""
    return _exist(link, names, ns_id, _runs(refs))


def _exist(link: RedisLink, names: Names, ns_id: bytes, runs: Sequence[Sequence[Ref]]) -> list[bool] | None:
    counts = link.ask([_exists(names, ns_id, run) for run in runs], OnError.IGNORE)
    if counts is None:
        return None
    single = [ref for run, count in zip(runs, counts, strict=True) if _in_part(run, count) for ref in run]
    answers = link.ask([_exists(names, ns_id, [ref]) for ref in single], OnError.IGNORE)
    if answers is None:
        return None
    one_by_one = iter(answers)
    found: list[bool] = []
    for run, count in zip(runs, counts, strict=True):
        found += [next(one_by_one) == 1 for _ in run] if _in_part(run, count) else [count == len(run)] * len(run)
    return found


def _in_part(run: Sequence[Ref], count: object) -> bool:
    # While a Cluster moves a slot nobody can count over both ends; keys alone are found.
    return 0 < count < len(run) if isinstance(count, int) else code_of(count) == "TRYAGAIN"


def _runs(refs: Sequence[Ref]) -> list[Sequence[Ref]]:
    """Return the refs in runs of one anchor, at most 64 each."""
    runs: list[Sequence[Ref]] = []
    for _, same in groupby(refs, key=attrgetter("anchor")):
        runs += batches(list(same), ANCHOR_SPAN)
    return runs


def _exists(names: Names, ns_id: bytes, run: Sequence[Ref]) -> Packed:
    """Return the EXISTS of a run, whose names share all but the key: packed here, as thousands are asked at a time."""
    start = names.run(ns_id, run[0].anchor)
    between = f"\r\n${len(start) + 2 * KEY_NBYTES}\r\n{start}"
    keys = between.join([ref.key.hex() for ref in run])
    return Packed(start.encode(), f"*{len(run) + 1}\r\n$6\r\nEXISTS{between}{keys}\r\n".encode())
