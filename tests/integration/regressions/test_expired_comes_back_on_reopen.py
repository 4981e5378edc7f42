"""What has expired does not come back when limits are raised, although its environment is opened again for that."""

from pathlib import Path

import pytest

from records import Clock, make_chain, make_namespace
from tierkv.tiers import disk_upkeep
from tierkv.tiers.base import Limits
from tierkv.tiers.disk import DiskTier


def test_a_larger_budget_brings_back_nothing_that_has_expired(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_upkeep, "_SWEEP_S", 3600.0)  # it has not come to delete it yet
    clock, namespace = Clock(), make_namespace()
    tier = DiskTier(short_dir, Limits(budget=64 << 20, ttl_s=100.0), clock=clock, sync_interval_s=3600.0)
    try:
        tier.add_namespace(namespace)
        ns_id = namespace.ns_id()
        refs, records = make_chain(namespace, 2, created=clock.now)
        tier.store(ns_id, records)
        clock.now += 200
        assert tier.match(ns_id, refs) == [False, False]
        with tier._write:  # before the tier's own thread comes to it
            tier.set_limits(Limits(budget=128 << 20))
            assert tier.match(ns_id, refs) == [False, False]
            other_refs, other = make_chain(namespace, 1, seed=1, created=clock.now)
            tier.store(ns_id, other)
            assert tier.match(ns_id, refs) == [False, False]
            assert tier.match(ns_id, other_refs) == [True]
    finally:
        tier.close()
