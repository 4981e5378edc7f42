"""How the disk tier makes room: budget, quotas, the hook for what goes, the volume's reserve, limits that change."""

from __future__ import annotations

import functools
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from records import Clock, fetch, make_chain, make_namespace, payload_of, wait_until
from tierkv.errors import ConfigError
from tierkv.keys import tenant_digest
from tierkv.payload import Header
from tierkv.policy.lru import ChainLRU
from tierkv.tiers import disk_space
from tierkv.tiers.base import Limits, Pin, Record, Ref, Status
from tierkv.tiers.disk import MIN_BUDGET, DiskTier

MIB = 1 << 20
NAMESPACE = make_namespace(payload_nbytes=256 << 10)
NS_ID = NAMESPACE.ns_id()
COST = 256 * 1024 + 4096
BUDGET = 32 * MIB
A, B = tenant_digest(b"a"), tenant_digest(b"b")


@contextmanager
def opened(path: Path, limits: Limits | int, **options: object) -> Iterator[DiskTier]:
    tier = DiskTier(path, limits, **options)  # type: ignore[arg-type]
    tier.add_namespace(NAMESPACE)
    try:
        yield tier
    finally:
        tier.close()


def blocks_of(path: Path) -> int:
    return sum(p.stat().st_blocks * 512 for p in path.rglob("*") if p.is_file())


# Quotas


def test_a_tenant_at_its_quota_makes_room_among_its_own(tmp_path: Path) -> None:
    limits = Limits(budget=BUDGET, tenant_nbytes={b"": 10 * COST, B: 20 * COST})
    with opened(tmp_path, limits) as tier:
        others, records = make_chain(NAMESPACE, 20, salt="b")
        assert tier.store(NS_ID, records) == [Status.OK] * 20
        first, records = make_chain(NAMESPACE, 6, salt="a")
        assert tier.store(NS_ID, records) == [Status.OK] * 6
        second, records = make_chain(NAMESPACE, 4, seed=1, salt="a")
        assert tier.store(NS_ID, records) == [Status.OK] * 4
        fetch(tier, NAMESPACE, first)
        third, records = make_chain(NAMESPACE, 3, seed=2, salt="a")
        assert tier.store(NS_ID, records) == [Status.OK] * 3
        assert tier.match(NS_ID, first) == [True] * 6, "it was used later"
        assert tier.match(NS_ID, second) == [True] + [False] * 3, "from the leaf up"
        assert all(tier.match(NS_ID, others + third))
        assert {t: u.nbytes for t, u in tier.usage(NS_ID).items()} == {A: 10 * COST, B: 20 * COST}
        long, records = make_chain(NAMESPACE, 14, seed=3, salt="a")
        assert tier.store(NS_ID, records) == [Status.OK] * 10 + [Status.DROPPED] * 4, "a prefix stays"
        assert tier.match(NS_ID, long) == [True] * 10 + [False] * 4
        assert all(tier.match(NS_ID, others))


def test_a_namespace_at_its_quota_leaves_others_alone(tmp_path: Path) -> None:
    other = make_namespace("other", payload_nbytes=128 << 10)
    limits = Limits(budget=BUDGET, namespace_nbytes={NS_ID: 8 * COST})
    with opened(tmp_path, limits) as tier:
        tier.add_namespace(other)
        refs, records = make_chain(other, 60)
        assert tier.store(other.ns_id(), records) == [Status.OK] * 60
        for seed in range(5):
            _, records = make_chain(NAMESPACE, 5, seed=seed)
            assert tier.store(NS_ID, records) == [Status.OK] * 5
            assert sum(u.nbytes for u in tier.usage(NS_ID).values()) <= 8 * COST
        assert sum(u.num_entries for u in tier.usage(NS_ID).values()) == 8
        assert all(tier.match(other.ns_id(), refs))
        assert tier.stat().num_evicted == 17


def test_where_all_is_pinned_stores_are_dropped(tmp_path: Path) -> None:
    clock = Clock()
    limits = Limits(budget=BUDGET, tenant_nbytes={b"": 6 * COST})
    with opened(tmp_path, limits, clock=clock) as tier:
        refs, records = make_chain(NAMESPACE, 6, salt="a")
        tier.store(NS_ID, records)
        tier.pin(NS_ID, refs, Pin("me", clock.now + 100))
        _, records = make_chain(NAMESPACE, 3, seed=1, salt="a")
        assert tier.store(NS_ID, records) == [Status.DROPPED] * 3
        assert tier.stat().num_dropped == 3
        assert all(tier.match(NS_ID, refs))
        clock.now += 101
        assert tier.store(NS_ID, records) == [Status.OK] * 3


def test_a_record_larger_than_a_quota_is_dropped_and_evicts_nothing(tmp_path: Path) -> None:
    limits = Limits(budget=BUDGET, tenant_nbytes={A: COST - 1}, namespace_nbytes={b"": 4 * COST})
    with opened(tmp_path, limits) as tier:
        refs, records = make_chain(NAMESPACE, 4, salt="b")
        tier.store(NS_ID, records)
        _, records = make_chain(NAMESPACE, 2, salt="a")
        assert tier.store(NS_ID, records) == [Status.DROPPED] * 2
        assert all(tier.match(NS_ID, refs))


def test_pins_have_a_quota(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path, Limits(budget=BUDGET, pinned_nbytes=3 * COST), clock=clock) as tier:
        refs, records = make_chain(NAMESPACE, 5)
        tier.store(NS_ID, records)
        assert tier.pin(NS_ID, refs, Pin("me", clock.now + 10)) == [True] * 3 + [False] * 2
        assert tier.stat().pinned_nbytes == 3 * COST
        clock.now += 11
        assert tier.stat().pinned_nbytes == 0
        assert tier.pin(NS_ID, refs[2:], Pin("me", clock.now + 10)) == [True] * 3


def test_pinned_leaves_in_the_way_are_met_once(tmp_path: Path) -> None:
    """A hundred pinned chunks that are the least recently used do not cost a hundred looks at every eviction."""

    asked: list[int] = []

    class Counting(ChainLRU[tuple[bytes, bytes]]):
        def victim(self, may_evict: object) -> tuple[bytes, bytes] | None:
            def counted(item: tuple[bytes, bytes]) -> bool:
                asked.append(1)
                return bool(may_evict(item))  # type: ignore[operator]

            return super().victim(counted)

    clock = Clock()
    num = BUDGET // COST
    with opened(tmp_path, BUDGET, clock=clock, policy=Counting) as tier:
        for seed in range(60):
            refs, records = make_chain(NAMESPACE, 1, seed=seed)
            tier.store(NS_ID, records)
            tier.pin(NS_ID, refs, Pin("me", clock.now + 1000))
        for seed in range(100, 100 + 2 * num):
            assert tier.store(NS_ID, make_chain(NAMESPACE, 1, seed=seed)[1]) == [Status.OK]
        assert tier.stat().num_evicted > num
        assert len(asked) < 3 * tier.stat().num_evicted + 100


# What is told of what goes


def test_the_hook_gets_whole_records_of_what_goes_for_room_and_of_nothing_else(tmp_path: Path) -> None:
    clock = Clock()
    told: list[tuple[Header, bytes, bytes]] = []
    gone_already: list[bool] = []
    num = BUDGET // COST
    tier: DiskTier

    def hook(record: Record) -> None:
        told.append((record.header, bytes(record.data), record.tokens))
        gone_already.append(not tier.match(NS_ID, [Ref(record.header.key, record.header.anchor)])[0])

    with opened(tmp_path, BUDGET, clock=clock, on_evict=hook) as tier:
        refs, records = make_chain(NAMESPACE, num)
        tier.store(NS_ID, records)
        tier.evict(NS_ID, refs[-5:])
        tier.expire_at(NS_ID, refs[-10:-5], clock.now)
        assert tier.match(NS_ID, refs).count(True) == num - 10
        tier.store(NS_ID, make_chain(NAMESPACE, 10, seed=1)[1])
        assert told == [], "there was room"
        tier.store(NS_ID, make_chain(NAMESPACE, 4, seed=2)[1])
        evicted = records[-14:-10]
        assert sorted(h.key for h, _, _ in told) == sorted(r.header.key for r in evicted)
        by_key = {header.key: (header, data, tokens) for header, data, tokens in told}
        for record in evicted:
            assert by_key[record.header.key] == (record.header, bytes(record.data), record.tokens)
        assert not any(gone_already)
        tier.drop_namespace(NS_ID)
        assert len(told) == 4
        stat = tier.stat()
        assert (stat.num_evicted, stat.num_expired, stat.num_removed) == (4, 5, 5 + num)


def test_a_hook_that_raises_stops_no_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def hook(record: Record) -> None:
        raise ValueError(record.header.key.hex())

    num = BUDGET // COST
    with opened(tmp_path, BUDGET, on_evict=hook) as tier:
        for seed in range(3):
            assert set(tier.store(NS_ID, make_chain(NAMESPACE, num, seed=seed)[1])) == {Status.OK}
        assert tier.stat().num_evicted == 2 * num
    assert len([r for r in caplog.records if "ValueError" in r.getMessage()]) == 1


def test_the_hook_sees_a_whole_environment_that_goes(tmp_path: Path) -> None:
    other = make_namespace("other", payload_nbytes=128 << 10)
    told: Counter[bytes] = Counter()
    with opened(tmp_path, BUDGET, on_evict=lambda record: told.update([record.header.key])) as tier:
        tier.add_namespace(other)
        stored: list[Ref] = []
        for seed in range(12):
            refs, records = make_chain(other, 20, seed=seed)
            tier.store(other.ns_id(), records)
            stored += refs
        for seed in range(40):
            tier.store(NS_ID, make_chain(NAMESPACE, 4, seed=seed)[1])
        assert list(tier.namespaces()) == [NS_ID]
        assert {ref.key for ref in stored} <= set(told)
        assert set(told.values()) == {1}
        assert tier.stat().num_evicted == sum(told.values())


# Limits that change


def test_a_smaller_budget_evicts_soon_and_gives_the_space_back(tmp_path: Path) -> None:
    with opened(tmp_path, 128 * MIB) as tier:
        chains = []
        for seed in range(40):
            refs, records = make_chain(NAMESPACE, 10, seed=seed)
            tier.store(NS_ID, records)
            chains.append(refs)
        tier.set_limits(Limits(budget=BUDGET))
        wait_until(lambda: tier.stat().nbytes <= BUDGET)
        wait_until(lambda: blocks_of(tmp_path) <= 1.35 * BUDGET)
        assert tier.stat().nbytes > BUDGET - 8 * MIB, "and no more than needed"
        assert tier.stat().num_evicted == 400 - tier.stat().num_entries
        kept = [all(tier.match(NS_ID, refs)) for refs in chains]
        assert kept[-10:] == [True] * 10
        left = [ref for refs in chains for ref in refs if tier.match(NS_ID, [ref])[0]]
        results, cells = fetch(tier, NAMESPACE, left)
        assert {r.status for r in results} == {Status.OK}
        assert [bytes(c) for c in cells] == [payload_of(r.key, NAMESPACE.payload_nbytes) for r in left]
        for seed in range(100, 120):
            assert tier.store(NS_ID, make_chain(NAMESPACE, 10, seed=seed)[1]) == [Status.OK] * 10
            assert tier.stat().nbytes <= BUDGET
            assert blocks_of(tmp_path) <= 1.1 * BUDGET + 3 * BUDGET // 8, "a tenth more, and a few transactions"
    with opened(tmp_path, BUDGET) as tier:
        entries = [Ref(e.key, e.anchor) for e in tier.entries(NS_ID)]
        assert {r.status for r in fetch(tier, NAMESPACE, entries)[0]} == {Status.OK}


def test_a_larger_budget_is_used(tmp_path: Path) -> None:
    with opened(tmp_path, MIN_BUDGET) as tier:
        refs, records = make_chain(NAMESPACE, 30)
        tier.store(NS_ID, records)
        fetch(tier, NAMESPACE, refs[:3])
        tier.set_limits(Limits(budget=160 * MIB))  # more than the map was made for
        for seed in range(1, 20):
            assert tier.store(NS_ID, make_chain(NAMESPACE, 30, seed=seed)[1]) == [Status.OK] * 30
        assert tier.stat().num_entries == 600
        assert tier.stat().num_evicted == 0
        assert {r.status for r in fetch(tier, NAMESPACE, refs)[0]} == {Status.OK}
        assert [e.num_hits for e in sorted(tier.entries(NS_ID)) if e.num_hits > 1] == [2] * 3, "use was kept"


def test_quotas_that_are_lowered_hold_soon(tmp_path: Path) -> None:
    with opened(tmp_path, BUDGET) as tier:
        for salt in "ab":
            tier.store(NS_ID, make_chain(NAMESPACE, 30, salt=salt)[1])
        tier.set_limits(Limits(budget=BUDGET, tenant_nbytes={A: 10 * COST}, namespace_nbytes={b"": 35 * COST}))
        wait_until(lambda: sum(u.num_entries for u in tier.usage(NS_ID).values()) == 35)
        assert tier.usage(NS_ID)[A].num_entries <= 10
        assert tier.stat().num_evicted == 25


def test_an_impossible_budget_changes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, BUDGET) as tier:
        for limits in (Limits(budget=MIB), Limits()):
            with pytest.raises(ConfigError, match=r"disk_bytes=(1 MiB|none) is too small .*at least 16 MiB"):
                tier.set_limits(limits)
        assert tier.stat().budget == BUDGET


# What costs little


def calls_of(function: Callable[[], object]) -> int:
    """Return how many calls of Python or C functions a call makes."""
    calls = [0]

    def count(_: object, event: str, __: object) -> None:
        calls[0] += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls[0]


def test_a_match_of_many_keys_makes_few_calls(tmp_path: Path) -> None:
    small = make_namespace("small", payload_nbytes=4096)
    with opened(tmp_path, Limits(budget=BUDGET, ttl_s=3600.0, idle_s=3600.0)) as tier:
        tier.add_namespace(small)
        refs, records = make_chain(small, 2000)
        tier.store(small.ns_id(), records)
        assert all(tier.match(small.ns_id(), refs))
        few = calls_of(lambda: tier.match(small.ns_id(), refs[:2]))
        assert calls_of(lambda: tier.match(small.ns_id(), refs)) <= few + 20


def test_usage_and_stat_look_at_no_entries(tmp_path: Path) -> None:
    class Unseen(dict[bytes, object]):
        def __iter__(self) -> Iterator[bytes]:
            raise AssertionError("entries were counted one by one")

        items = values = keys = __iter__  # type: ignore[assignment]

    with opened(tmp_path, BUDGET) as tier:
        tier.store(NS_ID, make_chain(NAMESPACE, 20, salt="a")[1])
        index = tier._environments[NS_ID].index
        entries, index.entries = index.entries, Unseen(index.entries)  # type: ignore[assignment]
        assert tier.usage(NS_ID)[A] == (20, 20 * COST, 0)
        assert tier.stat().num_entries == 20
        index.entries = entries


# The volume


class Volume:
    """Stands for ``os.statvfs``: a volume of a given size, of which the tier's files and others take their part."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size, self.others, self.num_asked = path, size, 0, 0

    def __call__(self, path: object) -> SimpleNamespace:
        self.num_asked += 1
        free = self.size - self.others - blocks_of(self.path)
        return SimpleNamespace(f_bavail=max(0, free) // 4096, f_frsize=4096)


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Volume:
    volume = Volume(tmp_path, 64 * MIB)
    monkeypatch.setattr(disk_space.os, "statvfs", volume)
    return volume


def test_the_reserve_of_the_volume_is_kept(tmp_path: Path, volume: Volume, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    reserve = 40 * MIB
    with opened(tmp_path, Limits(budget=256 * MIB, reserve_nbytes=reserve)) as tier:
        stored: list[Ref] = []
        for seed in range(60):
            refs, records = make_chain(NAMESPACE, 4, seed=seed)
            stored += [r for r, s in zip(refs, tier.store(NS_ID, records), strict=True) if s is Status.OK]
            assert volume.size - blocks_of(tmp_path) >= reserve - 4 * MIB, "but for what two transactions leave behind"
        assert len(stored) == 240, "its own entries make room"
        stat = tier.stat()
        assert (stat.num_dropped, stat.num_errors) == (0, 0)
        assert stat.num_evicted == 240 - stat.num_entries > 0
        assert stat.nbytes > 14 * MIB, "what may be used is used"
        assert all(tier.match(NS_ID, stored[-20:]))
        lines = [r.getMessage() for r in caplog.records if "reserve" in r.getMessage()]
        assert len(lines) == 1 and "disk.reserve_bytes=40 MiB" in lines[0]
        volume.size = 256 * MIB
        assert tier.store(NS_ID, make_chain(NAMESPACE, 80, seed=99)[1]) == [Status.OK] * 80
        assert tier.stat().num_evicted == stat.num_evicted
        assert len([r for r in caplog.records if "free space again" in r.getMessage()]) == 1


def test_a_volume_that_others_fill_takes_nothing_new(
    tmp_path: Path, volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_space, "_ASK_S", 0.0)
    clock = Clock()
    with opened(tmp_path, Limits(budget=256 * MIB, reserve_nbytes=8 * MIB), clock=clock) as tier:
        refs, records = make_chain(NAMESPACE, 20)
        tier.store(NS_ID, records)
        tier.pin(NS_ID, refs, Pin("me", clock.now + 100))
        volume.others = 64 * MIB
        before = blocks_of(tmp_path)
        assert tier.store(NS_ID, make_chain(NAMESPACE, 8, seed=1)[1]) == [Status.DROPPED] * 8
        assert tier.stat().num_dropped == 8
        assert blocks_of(tmp_path) - before <= 64 << 10
        assert all(tier.match(NS_ID, refs))
        volume.others = 0
        assert tier.store(NS_ID, make_chain(NAMESPACE, 8, seed=1)[1]) == [Status.OK] * 8


def test_the_volume_is_not_asked_at_every_store(tmp_path: Path, volume: Volume) -> None:
    volume.size = 1 << 40
    with opened(tmp_path, Limits(budget=256 * MIB, reserve_nbytes=MIB)) as tier:
        tier._room._space._clock = lambda: 0.0
        volume.num_asked = 0
        for seed in range(100):
            tier.store(NS_ID, make_chain(NAMESPACE, 1, seed=seed)[1])
        assert volume.num_asked == 1
        for seed in range(100, 500):
            tier.store(NS_ID, make_chain(NAMESPACE, 1, seed=seed)[1])
        assert volume.num_asked == 2, "after 64 MiB"


# Everything together, against a model

LARGE = make_namespace("large", payload_nbytes=1 * MIB)
LARGE_ID, LARGE_COST = LARGE.ns_id(), MIB + 4096


@functools.cache
def large_chain(seed: int, tenant: int) -> tuple[list[Ref], list[Record]]:
    return make_chain(LARGE, 6, seed=seed, salt="ab"[tenant], created=1e9)


chains = st.tuples(st.integers(0, 3), st.integers(0, 1))
spans = st.tuples(st.integers(0, 5), st.integers(1, 6))
operations = st.one_of(
    *[st.tuples(st.just("store"), chains, spans)] * 4,
    st.tuples(st.just("fetch"), chains, spans),
    *[st.tuples(st.just("pin"), chains, spans, st.sampled_from(["me", "you"]), st.integers(0, 300))] * 2,
    st.tuples(st.just("unpin"), chains, spans, st.sampled_from(["me", "you", ""])),
    st.tuples(st.just("expire"), chains, spans, st.integers(-10, 300)),
    st.tuples(st.just("evict"), chains, spans, st.booleans()),
    st.tuples(st.just("time"), st.integers(1, 120)),
    st.tuples(
        st.just("limits"),
        st.integers(16, 22),
        st.sampled_from([None, 6, 12]),
        st.sampled_from([None, 3, 8]),
        st.sampled_from([None, 4]),
        st.sampled_from([None, 100.0]),
        st.sampled_from([None, 150.0]),
    ),
    st.just(("reopen",)),
)


class Model:
    """What must be so of the entries that the tier says it has: when they end, and what holds them."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.limits = Limits(budget=20 * MIB)
        self.entries: dict[bytes, SimpleNamespace] = {}  # what was stored, whether it is still there or not
        self.last: set[bytes] = set()  # what was there after the operation before

    def held(self, key: bytes) -> bool:
        mine = any(until > self.clock.now for until in self.entries[key].pins.values())
        return mine or any(self.held(k) for k in self.last if self.entries[k].parent == key)

    def expired(self, key: bytes) -> bool:
        entry = self.entries[key]
        ends = self.limits.expires(entry.stored, entry.used, entry.until)
        return bool(ends) and ends <= self.clock.now and not self.held(key)

    def add(self, record: Record) -> None:
        header = record.header
        self.entries[header.key] = SimpleNamespace(
            parent=header.parent, tenant=header.tenant, stored=self.clock.now, used=0.0, until=0.0, pins={}
        )


def check(tier: DiskTier, model: Model, *, may_go: bool, ordered: frozenset[bytes] = frozenset()) -> None:
    """Hold what the tier says against the model; ``may_go``: entries may have made room since the last check."""
    entries = {e.key: e for e in tier.entries(LARGE_ID)}
    there = set(entries)
    refs = [Ref(key, key) for key in model.entries]
    assert {r.key for r, found in zip(refs, tier.match(LARGE_ID, refs), strict=True) if found} == there
    for key in model.last - there - ordered:
        assert not model.held(key), "what is pinned, or above a pinned one, went"
        if not model.expired(key):
            assert may_go, "it went without need"
            below = [k for k in there if model.entries[k].parent == key]
            assert not below, "an ancestor went before its descendant"
    for key in there:
        assert key in model.last or key not in ordered
    model.last = there
    assert not [key for key in there if model.expired(key)]
    limits, usage = model.limits, tier.usage(LARGE_ID)
    num = Counter(model.entries[key].tenant for key in there)
    pinned = Counter(model.entries[key].tenant for key in there if entries[key].pins)
    assert {t: (u.num_entries, u.nbytes, u.pinned_nbytes) for t, u in usage.items()} == {
        t: (n, n * LARGE_COST, pinned[t] * LARGE_COST) for t, n in num.items()
    }
    for key in there:
        pins = {owner: until for owner, until in model.entries[key].pins.items() if until > model.clock.now}
        assert dict(entries[key].pins) == pins
    assert tier.stat().nbytes <= limits.budget  # type: ignore[operator]
    assert tier.stat().pinned_nbytes == sum(pinned.values()) * LARGE_COST
    if not any(pinned.values()):
        assert len(there) * LARGE_COST <= (limits.of_namespace(LARGE_ID) or BUDGET)
        for tenant, n in num.items():
            assert n * LARGE_COST <= (limits.of_tenant(tenant) or BUDGET)


def step(tier: DiskTier, model: Model, op: tuple) -> None:  # type: ignore[type-arg]
    kind, *args = op
    if kind == "time":
        model.clock.now += args[0]
        check(tier, model, may_go=False)
        return
    if kind == "limits":
        budget, namespace, tenant, pins, ttl_s, idle_s = args
        model.limits = Limits(
            budget=budget * MIB,
            namespace_nbytes={} if namespace is None else {b"": namespace * LARGE_COST},
            tenant_nbytes={} if tenant is None else {b"": tenant * LARGE_COST},
            pinned_nbytes=None if pins is None else pins * LARGE_COST,
            ttl_s=ttl_s,
            idle_s=idle_s,
        )
        tier.set_limits(model.limits)
        wait_until(lambda: not tier._upkeep._trimming)
        check(tier, model, may_go=True)
        return
    (seed, tenant_at), (start, length), *rest = args
    refs, records = (part[start : start + length] for part in large_chain(seed, tenant_at))
    there = [ref.key in model.last for ref in refs]
    if kind == "store":
        now_fits = (
            tier.stat().nbytes + there.count(False) * LARGE_COST <= (model.limits.budget or 0)
            and not model.limits.namespace_nbytes
            and not model.limits.tenant_nbytes
        )
        statuses = tier.store(LARGE_ID, records)
        assert [s is Status.EXISTS for s in statuses] == there
        for record, status in zip(records, statuses, strict=True):
            if status is Status.OK:
                model.add(record)
        assert [ok or status is not Status.DROPPED for ok, status in zip(there, statuses, strict=True)] == [
            key in {e.key for e in tier.entries(LARGE_ID)} for key in (r.key for r in refs)
        ]
        assert Status.DROPPED not in statuses or not now_fits
        model.last |= {r.header.key for r, s in zip(records, statuses, strict=True) if s is Status.OK}
        check(tier, model, may_go=not now_fits)
    elif kind == "fetch":
        results, cells = fetch(tier, LARGE, refs)
        assert [r.status is Status.OK for r in results] == there
        for ref, found, cell in zip(refs, there, cells, strict=True):
            if found:
                assert bytes(cell[:4096]) == bytes(large_payload(ref.key))
                model.entries[ref.key].used = model.clock.now
        check(tier, model, may_go=False)
    elif kind == "pin":
        owner, seconds = rest
        before = tier.stat().pinned_nbytes
        pinned = tier.pin(LARGE_ID, refs, Pin(owner, model.clock.now + seconds))
        prefix = [*there, False].index(False)
        assert pinned == sorted(pinned, reverse=True) and sum(pinned) <= prefix
        if seconds > 0 and model.limits.pinned_nbytes is None:
            assert sum(pinned) == prefix
        elif seconds > 0:
            assert tier.stat().pinned_nbytes <= max(before, model.limits.pinned_nbytes or 0)
        for ref, ok, found in zip(refs, pinned, there, strict=True):
            if ok:
                model.entries[ref.key].pins[owner] = model.clock.now + seconds
            elif seconds == 0 and found:
                model.entries[ref.key].pins.pop(owner, None)
        check(tier, model, may_go=False)
    elif kind == "unpin":
        had = 0
        for ref in (ref for ref, found in zip(refs, there, strict=True) if found):
            pins = model.entries[ref.key].pins
            owners = [o for o, until in pins.items() if until > model.clock.now and rest[0] in ("", o)]
            had += bool(owners)
            for name in owners:
                del pins[name]
        assert tier.unpin(LARGE_ID, refs, rest[0]) == had
        check(tier, model, may_go=False)
    elif kind == "expire":
        until = model.clock.now + rest[0]
        assert tier.expire_at(LARGE_ID, refs, until) == sum(there)
        for ref, found in zip(refs, there, strict=True):
            if found:
                model.entries[ref.key].until = until
        check(tier, model, may_go=False)
    else:
        free = {
            ref.key for ref, found in zip(refs, there, strict=True) if found and (rest[0] or not model.held(ref.key))
        }
        assert tier.evict(LARGE_ID, refs, force=rest[0]) == len(free)
        check(tier, model, may_go=False, ordered=frozenset(free))


@functools.cache
def large_payload(key: bytes) -> bytes:
    return payload_of(key, LARGE.payload_nbytes)[:4096]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(operations, min_size=30, max_size=60))
def test_whatever_happens_bounds_are_exact_and_pins_hold(ops: list[tuple]) -> None:  # type: ignore[type-arg]
    with tempfile.TemporaryDirectory() as directory:
        clock = Clock()
        model = Model(clock)
        tier = DiskTier(Path(directory), model.limits, clock=clock)
        tier.add_namespace(LARGE)
        try:
            for op in ops:
                if op == ("reopen",):
                    tier.close()
                    tier = DiskTier(Path(directory), model.limits, clock=clock)
                    tier.add_namespace(LARGE)
                    check(tier, model, may_go=False)
                else:
                    step(tier, model, op)
        finally:
            tier.close()
        assert tier.stat().num_errors == tier.stat().num_bad == 0
