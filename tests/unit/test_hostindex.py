"""The host index: reserve, fill, evict, pin, drop, quarantine; and a stateful test against a simple model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tierkv.hostindex import Entry, Fetch, HostIndex
from tierkv.pool import HostPool, PoolShape, Segment

ROOT = bytes(32)


def make_pool(num_slots: int) -> HostPool:
    shape = PoolShape(num_slots=num_slots, num_parts=1, part_nbytes=64)
    return HostPool(shape, [Segment.create(shape.segment_nbytes(0))])


@pytest.fixture
def pool() -> Iterator[HostPool]:
    pool = make_pool(4)
    yield pool
    pool.close()


@pytest.fixture
def index(pool: HostPool) -> HostIndex:
    clock = iter(range(1, 10**6))
    return HostIndex(pool, clock=lambda: float(next(clock)))


def key(i: int) -> bytes:
    return i.to_bytes(32, "big")


def chain(index: HostIndex, first: int, count: int, *, fill: bool = True) -> list[Entry]:
    """Reserve (and fill) a chain of chunks with the keys ``first``, ``first + 1``, ..."""
    entries = []
    for position in range(count):
        parent = key(first + position - 1) if position else ROOT
        entry = index.reserve(key(first + position), parent, position, 16)
        assert entry is not None
        entries.append(entry)
    if fill:
        for entry in entries:
            index.filled(entry, "host")
    return entries


def assert_returned(index: HostIndex) -> None:
    """Every slot is free, each once."""
    assert sorted(index._free) == list(range(index.pool.shape.num_slots))
    assert index.num_quarantined == 0
    assert len(index) == 0


def test_a_reserved_chunk_is_usable_when_filled(index: HostIndex) -> None:
    entry = index.reserve(key(1), ROOT, 0, 16)
    assert entry is not None
    assert index.get(key(1)) is entry
    assert not entry.usable
    assert index.run_end([key(1)], 0, 1) == 0
    assert index.snapshot() == []
    index.filled(entry, "disk")
    assert entry.usable
    assert entry.source == "disk"
    assert index.run_end([key(1)], 0, 1) == 1
    assert index.snapshot() == [entry]
    assert index.get(key(2)) is None


def test_run_end_is_the_first_hole(index: HostIndex) -> None:
    chain(index, 10, 3)
    keys = [key(i) for i in (10, 11, 12, 13)]
    assert index.run_end(keys, 0, 4) == 3
    assert index.run_end(keys, 0, 2) == 2
    assert index.run_end(keys, 2, 4) == 3
    assert index.run_end(keys, 3, 4) == 3
    assert index.run_end(keys, 4, 4) == 4
    index.dropped.add(key(11))
    assert index.run_end(keys, 0, 4) == 1
    assert index.run_end(keys, 2, 4) == 3


def test_a_fetch_makes_chunks_usable_by_its_letters(index: HostIndex) -> None:
    entries = chain(index, 10, 4, fill=False)
    fetch = Fetch(entries)
    for i, entry in enumerate(entries):
        entry.fetch, entry.fetch_index = fetch, i
    keys = [entry.key for entry in entries]
    assert index.run_end(keys, 0, 4) == 0
    fetch.results = b"ds-!"
    assert [entry.usable for entry in entries] == [True, True, False, False]
    assert index.run_end(keys, 0, 4) == 2
    fetch.results = b""
    assert not any(entry.usable for entry in entries)


def test_the_generation_is_raised_before_a_slot_is_used_again(index: HostIndex, pool: HostPool) -> None:
    entries = chain(index, 10, 4)
    assert pool.generations.tolist() == [1, 1, 1, 1]
    payload = np.empty(64, dtype=np.uint8)
    assert all(pool.read(e.slot, e.generation, payload) for e in entries)
    new = index.reserve(key(99), ROOT, 0, 16)
    assert new is not None
    assert (new.slot, new.generation) == (entries[3].slot, 2)  # the leaf went
    assert not pool.read(entries[3].slot, entries[3].generation, payload)
    assert pool.read(new.slot, new.generation, payload)
    assert sorted(pool.generations.tolist()) == [1, 1, 1, 2]


def test_the_budget_is_exact(index: HostIndex, pool: HostPool) -> None:
    entries = chain(index, 10, 4)
    assert sorted(e.slot for e in entries) == [0, 1, 2, 3]
    assert index.num_free == 0
    for i in range(20, 40):
        entry = index.reserve(key(i), ROOT, 0, 16)
        assert entry is not None
        index.filled(entry, "host")
        assert (len(index), index.num_free, index.num_evicted) == (4, 0, i - 19)


def test_leaves_go_first_and_the_least_recently_used_of_them(index: HostIndex) -> None:
    chain(index, 10, 2)
    chain(index, 20, 2)
    index.touch([key(10), key(11)])
    gone = []
    for i in range(30, 34):
        before = {e.key for e in index.snapshot()}
        entry = index.reserve(key(i), ROOT, 0, 16)
        assert entry is not None
        index.filled(entry, "host")
        gone += [k for k in before if index.get(k) is None]
    assert gone == [key(21), key(20), key(11), key(10)]


def test_the_parent_of_a_new_chunk_never_makes_room_for_it(index: HostIndex) -> None:
    chain(index, 10, 4)
    assert index.reserve(key(14), key(13), 4, 16) is None  # without 13, 14 would be worth nothing
    assert index.run_end([key(10 + i) for i in range(4)], 0, 4) == 4
    assert index.num_evicted == 0


def test_pinned_and_filling_chunks_stay(index: HostIndex) -> None:
    pinned = chain(index, 10, 2)
    filling = chain(index, 20, 2, fill=False)
    for entry in pinned:
        index.pin(entry)
    assert index.reserve(key(30), ROOT, 0, 16) is None
    index.unpin(pinned[1])
    entry = index.reserve(key(30), ROOT, 0, 16)
    assert entry is not None
    assert entry.slot == pinned[1].slot
    index.filled(filling[0], "host")
    assert index.reserve(key(31), ROOT, 0, 16) is None  # its child is being filled


@pytest.mark.parametrize("order", ["unpin, stopped", "stopped, unpin"])
@pytest.mark.parametrize("by", ["stopped", "filled"])
def test_a_dropped_slot_is_quarantined_until_pins_and_filler_have_gone(index: HostIndex, order: str, by: str) -> None:
    (entry,) = chain(index, 10, 1, fill=False)
    index.pin(entry)
    index.pin(entry)
    index.drop(entry, filling=True)
    assert index.get(entry.key) is None
    assert (index.num_quarantined, index.num_free) == (1, 3)
    index.unpin(entry)
    for step in order.split(", "):
        assert (index.num_quarantined, index.num_free) == (1, 3)
        if step == "unpin":
            index.unpin(entry)
        elif by == "filled":
            index.filled(entry, "disk")
        else:
            index.stopped(entry)
    assert_returned(index)
    index.filled(entry, "disk")
    index.stopped(entry)
    index.drop(entry, filling=True)  # each a second time: nothing happens
    assert_returned(index)


def test_unpinned_more_often_than_pinned(index: HostIndex) -> None:
    (entry,) = chain(index, 10, 1)
    with pytest.raises(AssertionError):
        index.unpin(entry)


def test_a_dropped_key_is_never_answered(index: HostIndex) -> None:
    ready, filling = chain(index, 10, 1)[0], chain(index, 20, 1, fill=False)[0]
    index.dropped |= {ready.key, filling.key, key(77)}
    assert index.get(ready.key) is None
    assert index.get(filling.key) is None
    assert index.run_end([ready.key], 0, 1) == 0
    assert index.snapshot() == []
    assert index.apply_drops() == 1
    assert index.dropped == {filling.key}  # its filler is not done
    index.filled(filling, "host")
    assert index.get(filling.key) is None
    assert index.apply_drops() == 1
    assert index.dropped == set()
    assert index.apply_drops() == 0
    assert_returned(index)


def test_a_dropped_key_can_be_stored_anew(index: HostIndex) -> None:
    (old,) = chain(index, 10, 1, fill=False)
    index.dropped.add(old.key)
    new = index.reserve(old.key, ROOT, 0, 16)
    assert new is not None
    assert new.slot != old.slot
    assert index.get(old.key) is new
    assert index.num_quarantined == 1
    index.filled(old, "host")  # the old filler reports: that is not the new chunk
    assert not new.usable
    assert index.num_quarantined == 0
    index.filled(new, "host")
    assert index.apply_drops() == 0
    assert index.get(new.key) is new


def test_clear(index: HostIndex) -> None:
    ready, filling = chain(index, 10, 2), chain(index, 20, 1, fill=False)[0]
    index.pin(ready[0])
    index.dropped.add(key(77))
    index.clear()
    assert len(index) == 0
    assert index.dropped == set()
    assert (index.num_quarantined, index.num_free) == (2, 2)
    index.unpin(ready[0])
    index.stopped(filling)
    assert_returned(index)


def test_touch_notes_the_time(index: HostIndex) -> None:
    entries = chain(index, 10, 2)
    before = entries[0].last_used
    index.touch([key(10), key(11), key(12)])
    index.touch([key(10)])
    assert entries[0].last_used > entries[1].last_used > before


def test_a_fetched_chunk_is_a_hit_of_its_tier_once_and_of_the_host_after(index: HostIndex) -> None:
    entry = index.reserve(key(10), key(9), 0, 16)
    assert entry is not None
    index.filled(entry, "disk")
    assert [index.used(entry) for _ in range(3)] == ["disk", "host", "host"]
    assert entry.num_hits == 2


def test_peek_still_finds_what_was_dropped(index: HostIndex) -> None:
    (entry,) = chain(index, 10, 1)
    index.dropped.add(entry.key)
    assert index.get(entry.key) is None
    assert index.peek(entry.key) is entry
    index.apply_drops()
    assert index.peek(entry.key) is None


def test_questions_change_nothing(index: HostIndex) -> None:
    entries = chain(index, 10, 2)
    chain(index, 20, 1, fill=False)
    index.dropped.add(key(11))
    before = index.dump()
    for _ in range(3):
        index.get(key(10))
        index.get(key(99))
        index.run_end([key(10), key(11), key(20)], 0, 3)
        index.snapshot()
        _ = [e.usable for e in entries], len(index), index.num_free, index.num_quarantined
    assert index.dump() == before


NUM_SLOTS = 5
NUM_KEYS = 8


class HostIndexMachine(RuleBasedStateMachine):
    """Drives an index and, beside it, the plainest model of who may touch which slot.

    The model knows of every entry ever made whether it is in the index, who pins it, and whether somebody fills it.
    """

    @initialize()
    def start(self) -> None:
        self.pool = make_pool(NUM_SLOTS)
        self.index = HostIndex(self.pool, clock=lambda: 0.0)
        self.live: dict[bytes, Entry] = {}
        self.pins: dict[Entry, int] = {}
        self.filling: set[Entry] = set()
        self.ready: set[Entry] = set()
        self.generations = [0] * NUM_SLOTS

    def teardown(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.clear()
        for entry in list(self.filling):
            self.index.stopped(entry)
        for entry, count in list(self.pins.items()):
            for _ in range(count):
                self.index.unpin(entry)
        assert_returned(self.index)
        self.pool.close()

    def busy_slots(self) -> set[int]:
        """Slots that somebody may read or write, whatever the index says."""
        return {e.slot for e in self.filling} | {e.slot for e, count in self.pins.items() if count}

    def gone(self) -> None:
        """Take note of what the index evicted."""
        for k, entry in list(self.live.items()):
            if self.index._entries.get(k) is not entry:
                assert entry in self.ready, "a chunk being filled was evicted"
                assert not self.pins.get(entry), "a pinned chunk was evicted"
                assert not any(e.parent == k for e in self.live.values() if e.key in self.index._entries), (
                    "an ancestor was evicted before its descendants"
                )
                del self.live[k]
                self.ready.discard(entry)

    keys = st.integers(0, NUM_KEYS - 1)

    @rule(number=keys)
    def reserve(self, number: int) -> None:
        if self.index.get(key(number)) is not None:
            return  # the caller never does
        busy, free = self.busy_slots(), self.index.num_free
        parent = key(number - 1) if number % 4 else ROOT
        if (old := self.live.pop(key(number), None)) is not None:
            self.ready.discard(old)
        entry = self.index.reserve(key(number), parent, number % 4, 16)
        self.gone()
        if entry is None:
            assert not free
            return
        assert entry.slot not in busy, "a slot was reused while somebody may read or write it"
        assert entry.slot not in {e.slot for e in self.live.values()}
        self.generations[entry.slot] += 1
        assert entry.generation == self.generations[entry.slot]
        assert key(number) not in self.index.dropped
        self.live[key(number)] = entry
        self.filling.add(entry)

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), source=st.sampled_from(["host", "disk", "shared"]))
    def filled(self, data: st.DataObject, source: str) -> None:
        entry = self.pick(data, self.filling)
        self.filling.discard(entry)
        self.index.filled(entry, source)
        if self.live.get(entry.key) is entry:
            self.ready.add(entry)

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def filler_failed(self, data: st.DataObject) -> None:
        """The filler is done and brought nothing."""
        entry = self.pick(data, self.filling)
        self.filling.discard(entry)
        if self.live.get(entry.key) is entry:
            del self.live[entry.key]
            self.index.drop(entry)
        else:
            self.index.stopped(entry)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        entry = self.pick(data, set(self.live.values()))
        del self.live[entry.key]
        self.ready.discard(entry)
        self.index.drop(entry, filling=entry in self.filling)

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        entry = self.pick(data, self.ready)
        self.index.pin(entry)
        self.pins[entry] = self.pins.get(entry, 0) + 1

    @precondition(lambda self: any(self.pins.values()))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        entry = self.pick(data, {e for e, count in self.pins.items() if count})
        self.pins[entry] -= 1
        self.index.unpin(entry)

    @rule(number=keys)
    def operator_evicts(self, number: int) -> None:
        self.index.dropped.add(key(number))
        assert self.index.get(key(number)) is None

    @rule()
    def apply_drops(self) -> None:
        expected = [k for k in self.index.dropped if k in self.live and self.live[k] in self.ready]
        assert self.index.apply_drops() == len(expected)
        for k in expected:
            self.ready.discard(self.live.pop(k))
        assert self.index.dropped <= {e.key for e in self.filling}

    @rule(numbers=st.lists(keys, max_size=4))
    def touch(self, numbers: list[int]) -> None:
        self.index.touch([key(n) for n in numbers])

    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.live.clear()
        self.ready.clear()
        assert self.index.dropped == set()

    @staticmethod
    def pick(data: st.DataObject, entries: set[Entry]) -> Entry:
        return data.draw(st.sampled_from(sorted(entries, key=lambda e: (e.key, e.slot, e.generation))))

    @invariant()
    def slots_are_free_held_or_quarantined_each_once(self) -> None:
        if not hasattr(self, "index"):
            return
        index = self.index
        held = {e.slot for e in self.live.values()}
        free = index._free
        quarantined = self.busy_slots() - held
        assert len(held) == len(self.live)
        assert len(set(free)) == len(free)
        assert not set(free) & (held | quarantined)
        assert set(free) | held | quarantined == set(range(NUM_SLOTS))
        assert index.num_quarantined == len(quarantined)
        assert len(index) == len(self.live)
        assert self.pool.generations.tolist() == self.generations

    @invariant()
    def answers_are_what_is_ready_and_not_dropped(self) -> None:
        if not hasattr(self, "index"):
            return
        expected = {k for k, e in self.live.items() if e in self.ready and k not in self.index.dropped}
        assert {e.key for e in self.index.snapshot()} == expected
        for number in range(NUM_KEYS):
            assert self.index.run_end([key(number)], 0, 1) == int(key(number) in expected)


TestHostIndexMachine = HostIndexMachine.TestCase
TestHostIndexMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
