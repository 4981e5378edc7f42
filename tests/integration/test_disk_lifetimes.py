"""Expiry and pins of the disk tier: at once, over restarts, through kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import msgspec
import pytest

from records import Clock, fetch, make_chain, make_namespace, wait_until
from tierkv.tiers import disk_upkeep
from tierkv.tiers.base import Limits, Pin, Ref, Status
from tierkv.tiers.disk import DiskTier
from tierkv.tiers.disk_index import Index, IndexEntry

MIB = 1 << 20
BUDGET = 32 * MIB
NAMESPACE = make_namespace(payload_nbytes=64 << 10)
NS_ID = NAMESPACE.ns_id()
COST = 64 * 1024 + 4096


@contextmanager
def opened(path: Path, limits: Limits | int = BUDGET, **options: object) -> Iterator[DiskTier]:
    tier = DiskTier(path, limits, **options)  # type: ignore[arg-type]
    tier.add_namespace(NAMESPACE)
    try:
        yield tier
    finally:
        tier.close()


def store(tier: DiskTier, num: int, seed: int = 0, **options: object) -> list[Ref]:
    refs, records = make_chain(NAMESPACE, num, seed=seed, **options)  # type: ignore[arg-type]
    assert tier.store(NS_ID, records) == [Status.OK] * num
    return refs


def rows(tier: DiskTier, name: str) -> dict[bytes, bytes]:
    env = tier._environments[NS_ID]
    with env._env.begin() as txn:
        return {bytes(key): bytes(row) for key, row in txn.cursor(db=getattr(env, name))}


# Expiry


def test_time_since_the_store(tmp_path: Path) -> None:
    """A record made elsewhere long ago lives as long as one made now; the time of its store survives a restart."""
    clock = Clock()
    limits = Limits(budget=BUDGET, ttl_s=100.0)
    with opened(tmp_path, limits, clock=clock) as tier:
        old = store(tier, 2, created=clock.now - 1000.0)
        clock.now += 50
        young = store(tier, 2, seed=1, created=clock.now)
        clock.now += 49
        assert tier.match(NS_ID, old + young) == [True] * 4
    with opened(tmp_path, limits, clock=clock) as tier:
        assert tier.match(NS_ID, old + young) == [True] * 4
        clock.now += 2
        assert tier.match(NS_ID, old + young) == [False, False, True, True]
        clock.now += 49
        assert [r.status for r in fetch(tier, NAMESPACE, young)[0]] == [Status.MISS] * 2


def test_time_since_the_last_read(tmp_path: Path) -> None:
    clock = Clock()
    limits = Limits(budget=BUDGET, idle_s=100.0)
    with opened(tmp_path, limits, clock=clock) as tier:
        refs = store(tier, 3, created=clock.now)
        for _ in range(4):
            clock.now += 60
            fetch(tier, NAMESPACE, refs[:1])
            buffers = [bytearray(NAMESPACE.payload_nbytes)]
            tier.fetch(NS_ID, refs[2:], lambda i, b=buffers: [memoryview(b[i])], quiet=True)  # type: ignore[misc]
            tier.match(NS_ID, refs)
        assert tier.match(NS_ID, refs) == [True, False, False], "matches and quiet reads renew nothing"
    with opened(tmp_path, limits, clock=clock) as tier:
        clock.now += 99
        assert tier.match(NS_ID, refs[:1]) == [True], "the last read was written"
        clock.now += 2
        assert tier.match(NS_ID, refs[:1]) == [False]


def test_what_has_expired_is_swept_and_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_upkeep, "_SWEEP_S", 0.02)
    clock = Clock()
    with opened(tmp_path, Limits(budget=BUDGET, ttl_s=100.0), clock=clock) as tier:
        gone = store(tier, 300, created=clock.now)
        clock.now += 60
        kept = store(tier, 5, seed=1, created=clock.now)
        clock.now += 60
        assert tier.match(NS_ID, gone) == [False] * 300, "at once, whoever sweeps"
        wait_until(lambda: len(rows(tier, "_records")) == 5)
        wait_until(lambda: tier.stat().nbytes == 5 * COST)
        assert len(rows(tier, "_heads")) == 5
        stat = tier.stat()
        assert (stat.num_expired, stat.num_evicted, stat.num_removed, stat.num_entries) == (300, 0, 0, 5)
        assert all(tier.match(NS_ID, kept))
        assert tier.allocated_nbytes() < 100 * COST, "the pages are given back"
        clock.now += 60
        wait_until(lambda: not tier.namespaces() and not list((tmp_path / "ns").iterdir()))
        assert tier.stat().num_expired == 305


def test_a_store_deletes_of_the_expired_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many expire together, a store does not wait until all of them are gone from the disk."""
    monkeypatch.setattr(disk_upkeep, "_SWEEP_S", 1000.0)
    clock = Clock()
    num = BUDGET // COST
    with opened(tmp_path, Limits(budget=BUDGET, ttl_s=100.0), clock=clock, sync_interval_s=1000.0) as tier:
        refs = store(tier, num - 10)
        clock.now += 101
        store(tier, 5, seed=1)
        assert len(rows(tier, "_records")) == num - 5
        _, records = make_chain(NAMESPACE, num)
        assert tier.store(NS_ID, records[:5]) == [Status.OK] * 5, "its own keys"
        assert len(rows(tier, "_records")) == num - 5
        store(tier, 15, seed=2)
        assert len(rows(tier, "_records")) == num
        assert tier.match(NS_ID, refs).count(True) == 5
        assert (tier.stat().num_evicted, tier.stat().num_expired) == (0, num - 10)


def test_the_expired_make_room_first(tmp_path: Path) -> None:
    clock = Clock()
    num = BUDGET // COST
    with opened(tmp_path, Limits(budget=BUDGET), clock=clock) as tier:
        expiring, other = store(tier, num // 2), store(tier, num - num // 2, seed=1)
        tier.expire_at(NS_ID, expiring, clock.now + 10)
        fetch(tier, NAMESPACE, expiring)
        clock.now += 11
        new = store(tier, num // 2, seed=2)
        assert all(tier.match(NS_ID, other + new))
        assert tier.stat().num_evicted == 0
        assert tier.stat().num_expired == num // 2


def test_an_expiry_of_its_own_survives_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path, clock=clock) as tier:
        refs = store(tier, 4)
        assert tier.expire_at(NS_ID, refs[2:], clock.now + 100) == 2
        assert tier.expire_at(NS_ID, refs[3:], 0.0) == 1
        assert set(rows(tier, "_life")) == {refs[2].key}
    with opened(tmp_path, clock=clock) as tier:
        assert {e.key: e.expires for e in tier.entries(NS_ID) if e.expires} == {refs[2].key: clock.now + 100}
        clock.now += 100
        assert tier.match(NS_ID, refs) == [True, True, False, True]
        assert tier.stat().num_expired == 1


def test_limits_that_change_hold_at_once_for_what_is_there(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path, clock=clock) as tier:
        refs = store(tier, 3, created=clock.now)
        clock.now += 500
        store(tier, 2, seed=1, created=clock.now)
        tier.set_limits(Limits(budget=BUDGET, ttl_s=1000.0))
        clock.now += 499
        assert tier.match(NS_ID, refs) == [True] * 3
        tier.set_limits(Limits(budget=BUDGET, ttl_s=900.0))
        assert tier.match(NS_ID, refs) == [False] * 3
        assert len(list(tier.entries(NS_ID))) == 2
        tier.set_limits(Limits(budget=BUDGET))
        clock.now += 10_000
        assert len(list(tier.entries(NS_ID))) == 2


def test_many_that_expire_together_do_not_hold_up_one_match(tmp_path: Path) -> None:
    """A lookup looks at a bounded number of entries whose time may be over, and is right about all it is asked for."""
    clock = Clock()
    _, records = make_chain(NAMESPACE, 1)
    index = Index(COST)
    limits = Limits(ttl_s=10.0)
    for i in range(5000):
        index.add(i.to_bytes(32, "big"), IndexEntry(records[0].header, i, clock.now), limits)
    clock.now += 11
    assert len(index.advance(clock.now, limits, 256)) == 256
    assert index.get((4999).to_bytes(32, "big"), clock.now, limits) is None
    assert len(index.entries) == 5000 - 256


# Pins


def test_a_pin_and_its_ancestors_stay_when_room_is_needed(tmp_path: Path) -> None:
    clock = Clock()
    num = BUDGET // COST
    with opened(tmp_path, clock=clock) as tier:
        pinned = store(tier, 40)
        assert tier.pin(NS_ID, pinned[29:30], Pin("me", clock.now + 1000)) == [True], "one chunk, in the middle"
        for seed in range(1, 4):
            store(tier, num - 60, seed=seed)
        assert tier.match(NS_ID, pinned) == [True] * 30 + [False] * 10
        assert tier.evict(NS_ID, pinned) == 0, "its ancestors are needed too"
        clock.now += 1001
        store(tier, num - 20, seed=9)
        assert tier.match(NS_ID, pinned).count(True) <= 20, "after its end nothing holds them"


def test_a_pin_and_its_ancestors_do_not_expire(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path, Limits(budget=BUDGET, ttl_s=100.0), clock=clock) as tier:
        refs = store(tier, 10, created=clock.now)
        assert tier.pin(NS_ID, refs[5:6], Pin("me", clock.now + 1000)) == [True]
        clock.now += 200
        assert tier.match(NS_ID, refs) == [True] * 6 + [False] * 4
        assert [r.status for r in fetch(tier, NAMESPACE, refs[:6])[0]] == [Status.OK] * 6
        assert tier.pin(NS_ID, refs[4:5], Pin("you", clock.now + 1000)) == [True]
        assert tier.unpin(NS_ID, refs, "me") == 1
        assert tier.match(NS_ID, refs) == [True] * 5 + [False] * 5
        clock.now += 1000
        assert tier.match(NS_ID, refs) == [False] * 10
        assert tier.stat().num_expired == 10


def test_a_branch_is_held_by_the_longest_pin_below(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path, Limits(budget=BUDGET, ttl_s=10.0), clock=clock) as tier:
        trunk = store(tier, 4, created=clock.now)
        _, records = make_chain(NAMESPACE, 6, branch=4, created=clock.now)
        tier.store(NS_ID, records)
        branch = make_chain(NAMESPACE, 6, branch=4)[0][4:]
        tier.pin(NS_ID, trunk[:2], Pin("me", clock.now + 100))
        tier.pin(NS_ID, branch, Pin("you", clock.now + 200))
        clock.now += 150
        assert tier.match(NS_ID, trunk + branch) == [True] * 6
        tier.evict(NS_ID, branch[1:], force=True)
        assert tier.match(NS_ID, trunk + branch) == [True] * 5 + [False]
        tier.evict(NS_ID, branch[:1], force=True)
        assert tier.match(NS_ID, trunk + branch) == [False] * 6, "with the pinned entry its hold goes"


def test_a_hole_that_is_filled_is_held_by_what_is_below(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path, clock=clock) as tier:
        refs = store(tier, 5)
        tier.pin(NS_ID, refs[4:], Pin("me", clock.now + 100))
        assert tier.evict(NS_ID, refs[2:3], force=True) == 1
        assert tier.evict(NS_ID, refs[:4]) == 2, "above the hole nothing is below"
        _, records = make_chain(NAMESPACE, 5)
        tier.store(NS_ID, records)
        assert tier.evict(NS_ID, refs) == 0


def test_pins_survive_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    num = BUDGET // COST
    with opened(tmp_path, clock=clock) as tier:
        refs = store(tier, 10)
        tier.pin(NS_ID, refs, Pin("me", clock.now + 1000))
        tier.pin(NS_ID, refs[:2], Pin("you", clock.now + 100))
        tier.pin(NS_ID, refs[8:], Pin("them", clock.now + 1000))
        assert tier.unpin(NS_ID, refs, "them") == 2
    clock.now += 500
    with opened(tmp_path, clock=clock) as tier:
        assert {e.pins for e in tier.entries(NS_ID)} == {(Pin("me", clock.now + 500),)}, "an ended one is gone"
        assert tier.stat().pinned_nbytes == 10 * COST
        assert tier.usage(NS_ID)[bytes.fromhex(tenant_of(tier))].pinned_nbytes == 10 * COST
        for seed in range(1, 3):
            store(tier, num - 30, seed=seed)
        assert all(tier.match(NS_ID, refs))


def tenant_of(tier: DiskTier) -> str:
    (tenant,) = {e.tenant for e in tier.entries(NS_ID)}
    return tenant.hex()


def test_what_is_written_of_ended_pins_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_upkeep, "_SWEEP_S", 0.02)
    clock = Clock()
    with opened(tmp_path, clock=clock) as tier:
        refs = store(tier, 3)
        tier.pin(NS_ID, refs, Pin("me", clock.now + 10))
        tier.pin(NS_ID, refs[:1], Pin("you", clock.now + 20))
        assert msgspec.msgpack.decode(rows(tier, "_life")[refs[0].key]) == [
            0.0,
            [["me", clock.now + 10], ["you", clock.now + 20]],
        ]
        clock.now += 11
        wait_until(lambda: set(rows(tier, "_life")) == {refs[0].key})
        clock.now += 10
        wait_until(lambda: not rows(tier, "_life"))


def test_a_pin_that_cannot_be_written_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    with opened(tmp_path, clock=clock) as tier:
        refs = store(tier, 3)
        tier.pin(NS_ID, refs[:1], Pin("me", clock.now + 10))

        def full(*_: object) -> None:
            raise lmdb.DiskError("mdb_txn_commit: No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(tier._environments[NS_ID], "write_life", full)
            assert tier.pin(NS_ID, refs, Pin("you", clock.now + 10)) == [False] * 3
        assert tier.stat().state == "read-only"
        assert tier.unpin(NS_ID, refs, "me") == 0, "at once, during the back-off"
        assert tier.expire_at(NS_ID, refs, clock.now) == 0
        assert {e.key: e.pins for e in tier.entries(NS_ID) if e.pins} == {refs[0].key: (Pin("me", clock.now + 10),)}
        assert all(tier.match(NS_ID, refs))


CHILD = """
import sys, time
from pathlib import Path
from records import make_chain, make_namespace
from tierkv.tiers.base import Pin
from tierkv.tiers.disk import DiskTier

namespace = make_namespace(payload_nbytes=64 << 10)
tier = DiskTier(Path(sys.argv[1]), 32 << 20)
tier.add_namespace(namespace)
now = float(sys.argv[2])
for seed in range(1000):
    refs, records = make_chain(namespace, 4, seed=seed)
    tier.store(namespace.ns_id(), records)
    assert all(tier.pin(namespace.ns_id(), refs[:2], Pin(f"owner {seed}", now + 3600 + seed)))
    assert tier.expire_at(namespace.ns_id(), refs[3:], now + 7200 + seed) == 1
    print(seed, flush=True)
"""


def test_sigkill_loses_no_pin_and_no_expiry(tmp_path: Path) -> None:
    clock = Clock()
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path), str(clock.now)], env=variables, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    lines = [child.stdout.readline() for _ in range(20)]
    child.send_signal(signal.SIGKILL)
    lines += [line for line in child.stdout if line.endswith("\n")]
    child.wait()
    with opened(tmp_path, clock=clock) as tier:
        entries = {e.key: e for e in tier.entries(NS_ID)}
        for seed in map(int, lines):
            refs, _ = make_chain(NAMESPACE, 4, seed=seed)
            pin = Pin(f"owner {seed}", clock.now + 3600 + seed)
            assert [entries[ref.key].pins for ref in refs] == [(pin,), (pin,), (), ()]
            assert [entries[ref.key].expires for ref in refs] == [0.0, 0.0, 0.0, clock.now + 7200 + seed]
        assert len(lines) >= 20
        assert tier.stat().num_bad == 0
