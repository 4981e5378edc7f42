"""Loads that are part of their step: how large they may be, and when their slots are free again."""

from __future__ import annotations

import pytest

from tierkv.hostindex import Entry
from tierkv.layout import Shard
from tierkv_connector.metadata import RankCounts, TierKVWorkerMetadata
from tierkv_connector.syncload import SYNC_S, SyncLoads

NO_ENTRIES: list[Entry] = []


def report(**fields: object) -> TierKVWorkerMetadata:
    return TierKVWorkerMetadata(**fields)  # type: ignore[arg-type]


def two_ranks() -> Shard:
    return Shard(tp_size=2, num_parts=2)


def test_a_number_that_is_given_holds() -> None:
    loads = SyncLoads(1000, Shard(), 1)
    list(loads.ended(report(load_nbytes=1 << 30, load_s=1.0)))
    assert loads.sync_nbytes == 1000
    assert SyncLoads(0, Shard(), 1).sync_nbytes == 0


def test_several_block_tables_have_none() -> None:
    for limit in (None, 1000):
        loads = SyncLoads(limit, Shard(), 2)
        list(loads.ended(report(load_nbytes=1 << 30, load_s=1.0)))
        assert loads.sync_nbytes == 0


@pytest.mark.parametrize(("shard", "num_parts"), [(Shard(), 1), (two_ranks(), 2), (Shard(tp_size=2, num_parts=1), 1)])
def test_what_is_measured_is_what_takes_two_milliseconds(shard: Shard, num_parts: int) -> None:
    """Ranks load side by side: the speed is that of one, and a payload the parts of all."""
    loads = SyncLoads(None, shard, 1)
    assert loads.sync_nbytes == 0, "nothing before the first load"
    list(loads.ended(report(load_nbytes=4_000_000, load_s=0.004)))
    assert loads.sync_nbytes == pytest.approx(1e9 * SYNC_S * num_parts, abs=num_parts)
    for _ in range(50):
        list(loads.ended(report(load_nbytes=2_000_000, load_s=0.004)))
    assert loads.sync_nbytes == pytest.approx(0.5e9 * SYNC_S * num_parts, rel=0.01)


def test_slots_are_free_when_every_rank_is_done() -> None:
    loads = SyncLoads(1000, two_ranks(), 1)
    first, second = loads.started("a", NO_ENTRIES), loads.started("b", NO_ENTRIES)
    assert list(loads.ended(report(loaded={first: 1, second: 2}))) == [("b", NO_ENTRIES, False)]
    assert list(loads.ended(report(loaded={first: 1}))) == [("a", NO_ENTRIES, False)]
    assert list(loads.ended(report(loaded={first: 2}))) == [], "nothing is free twice"


def test_a_failure_on_one_rank_is_that_of_the_load() -> None:
    loads = SyncLoads(1000, two_ranks(), 1)
    number = loads.started("a", NO_ENTRIES)
    assert list(loads.ended(report(loaded={number: 1}, failed_sync={number}))) == []
    assert list(loads.ended(report(loaded={number: 1}))) == [("a", NO_ENTRIES, True)]
    again = loads.started("a", NO_ENTRIES)
    assert list(loads.ended(report(loaded={again: 2}))) == [("a", NO_ENTRIES, False)]


def test_reports_of_ranks_are_put_together() -> None:
    one, other = report(loaded={1: 1, 2: 1}, failed_sync={1}), report(loaded={1: 1}, stored={5: 1})
    both = one.aggregate(other)
    assert (both.loaded, both.failed_sync, both.stored) == ({1: 2, 2: 1}, {1}, {5: 1})
    assert not one.empty and report().empty


def test_counts_of_ranks_may_come_one_at_a_time() -> None:
    counts = RankCounts(3)
    assert counts.ended({1: 1, 2: 3}) == [2]
    assert counts.ended({1: 1}) == []
    assert counts.ended({1: 1, 3: 2}) == [1]
    assert counts.ended({3: 1}) == [3]
