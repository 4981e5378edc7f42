"""ChainLRU against a naive leaf-first LRU."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.policy import ChainLRU

NUM_KEYS = 24


def key(i: int) -> bytes:
    return bytes([i])


def parent(i: int) -> bytes:
    """Keys form a tree: a chain with branches, several roots."""
    return key(i // 2) if i % 5 else b"root"


class Naive:
    """The same promises, by looking at everything each time."""

    def __init__(self) -> None:
        self.used: dict[bytes, int] = {}
        self.parents: dict[bytes, bytes] = {}
        self._now = 0

    def use(self, k: bytes) -> None:
        self._now += 1
        self.used[k] = self._now

    def add(self, k: bytes, p: bytes) -> None:
        self.use(k)
        self.parents[k] = p

    def touch(self, chain: list[bytes]) -> None:
        for k in reversed(chain):
            if k in self.used:
                self.use(k)

    def remove(self, k: bytes) -> None:
        self.used.pop(k, None)
        self.parents.pop(k, None)

    def victim(self, pinned: set[bytes]) -> bytes | None:
        inner = set(self.parents.values())
        leaves = [k for k in self.used if k not in inner and k not in pinned]
        return min(leaves, key=self.used.__getitem__, default=None)


keys = st.integers(1, NUM_KEYS)
operations = st.one_of(
    st.tuples(st.just("add"), keys),
    st.tuples(st.just("touch"), st.lists(keys, max_size=6)),
    st.tuples(st.just("remove"), keys),
    st.tuples(st.just("victim"), st.sets(keys)),
    st.tuples(st.just("evict"), st.sets(keys)),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(operations, max_size=120))
def test_chain_lru_equals_the_naive_one(steps: list[tuple[str, object]]) -> None:
    lru: ChainLRU[bytes] = ChainLRU()
    naive = Naive()
    for name, argument in steps:
        if name == "add":
            assert isinstance(argument, int)
            lru.add(key(argument), parent(argument))
            naive.add(key(argument), parent(argument))
        elif name == "touch":
            chain = [key(i) for i in argument]  # type: ignore[attr-defined]
            lru.touch(chain)
            naive.touch(chain)
        elif name == "remove":
            lru.remove(key(argument))  # type: ignore[arg-type]
            naive.remove(key(argument))  # type: ignore[arg-type]
        else:
            pinned = {key(i) for i in argument}  # type: ignore[attr-defined]
            victim = lru.victim(lambda k, pinned=pinned: k not in pinned)
            assert victim == naive.victim(pinned)
            if name == "evict" and victim is not None:
                lru.remove(victim)
                naive.remove(victim)
        assert len(lru) == len(naive.used)
        assert set(lru) == set(naive.used)


@settings(max_examples=100, deadline=None)
@given(st.lists(keys, unique=True, min_size=1), st.lists(st.lists(keys, max_size=8), max_size=8))
def test_no_ancestor_goes_before_its_descendants(order: list[int], touches: list[list[int]]) -> None:
    lru: ChainLRU[bytes] = ChainLRU()
    for i in order:
        lru.add(key(i), parent(i))
    for chain in touches:
        lru.touch([key(i) for i in chain])
    parents = {key(i): parent(i) for i in order}
    while (victim := lru.victim(lambda _: True)) is not None:
        assert victim not in parents.values()
        lru.remove(victim)
        del parents[victim]
    assert not parents


def test_a_whole_chain_goes_leaf_first() -> None:
    lru: ChainLRU[bytes] = ChainLRU()
    for i in range(5):
        lru.add(key(i + 1), key(i))
    gone = []
    while (victim := lru.victim(lambda _: True)) is not None:
        lru.remove(victim)
        gone.append(victim)
    assert gone == [key(i) for i in (5, 4, 3, 2, 1)]


def test_pinned_entries_and_what_they_hang_from_stay() -> None:
    lru: ChainLRU[bytes] = ChainLRU()
    lru.add(b"a", b"")
    lru.add(b"b", b"a")
    assert lru.victim(lambda k: k != b"b") is None
    assert lru.victim(lambda _: True) == b"b"


@pytest.mark.parametrize("times", [1, 3])
def test_adding_again_is_a_touch(times: int) -> None:
    lru: ChainLRU[bytes] = ChainLRU()
    lru.add(b"a", b"")
    lru.add(b"b", b"")
    for _ in range(times):
        lru.add(b"a", b"")
    assert lru.victim(lambda _: True) == b"b"
    assert len(lru) == 2


def test_memory_stays_proportional_to_the_entries() -> None:
    lru: ChainLRU[bytes] = ChainLRU()
    for i in range(20_000):
        lru.add(i.to_bytes(4, "little"), b"")
        if i >= 100:
            lru.remove((i - 100).to_bytes(4, "little"))
    assert len(lru) == 100
    assert len(lru._heap) <= 2 * len(lru) + 65
