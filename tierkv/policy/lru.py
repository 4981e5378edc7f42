"""Least recently used, leaves first: what every peer does, and what the others are measured against."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Generic

from tierkv.policy.base import Hint, K


class ChainLRU(Generic[K]):
    """Least recently used, leaves first.

    A heap holds the leaves (entries without a stored child) by the time of their last use; an entry whose last child
    went becomes a leaf with the time of its own last use. Heap items are corrected when they surface, so a touch costs
    one dictionary lookup and an eviction O(log n). About 400 bytes an entry.

    >>> lru = ChainLRU()
    >>> lru.add(b"a", b"")
    >>> lru.add(b"b", b"a")
    >>> lru.add(b"c", b"")
    >>> lru.touch([b"a", b"b"])
    >>> lru.victim(lambda key: True)
    b'c'
    """

    def __init__(self) -> None:
        self._entries: dict[K, list[int]] = {}  # key -> [stamp of last use, token of its heap item or 0]
        self._parents: dict[K, K] = {}
        self._num_children: dict[K, int] = {}
        self._heap: list[tuple[int, int, K]] = []  # (stamp when pushed, token, key)
        self._stamp = 0
        self._token = 0

    def note(self, chain: Sequence[K], now: float, *, hint: Hint | None = None, domain: Hashable = None) -> None:
        self.touch(chain)

    def admit(self, key: K, now: float, *, room: bool, above: bool = False) -> bool:
        return True

    def release(self, session: str, domain: Hashable = None) -> bool:
        return False

    def worth(self, key: K) -> float:
        return 0.0

    def add(self, key: K, parent: K) -> None:
        if key in self._entries:
            self.touch((key,))
            return
        self._stamp += 1
        self._entries[key] = [self._stamp, 0]
        self._parents[key] = parent
        self._num_children[parent] = self._num_children.get(parent, 0) + 1
        self._push_if_leaf(key)

    def touch(self, chain: Iterable[K]) -> None:
        entries = self._entries
        for key in reversed(tuple(chain)):  # leaf first: an ancestor is always the more recent one
            if (entry := entries.get(key)) is not None:
                self._stamp += 1
                entry[0] = self._stamp

    def remove(self, key: K) -> None:
        if self._entries.pop(key, None) is None:
            return
        parent = self._parents.pop(key)
        left = self._num_children[parent] - 1
        if left:
            self._num_children[parent] = left
        else:
            del self._num_children[parent]
            self._push_if_leaf(parent)

    def victim(self, may_evict: Callable[[K], bool]) -> K | None:
        heap, refused, found = self._heap, [], None
        while heap:
            stamp, token, key = heap[0]
            entry = self._entries.get(key)
            if entry is None or entry[1] != token:
                heapq.heappop(heap)  # left behind by an earlier life of this key
            elif key in self._num_children:
                heapq.heappop(heap)
                entry[1] = 0
            elif entry[0] != stamp:
                heapq.heapreplace(heap, (entry[0], token, key))
            elif may_evict(key):
                found = key
                break
            else:
                refused.append(heapq.heappop(heap))
        for item in refused:
            heapq.heappush(heap, item)
        return found

    def num_children(self, key: K) -> int:
        """Return how many stored entries have ``key`` as their parent."""
        return self._num_children.get(key, 0)

    def is_leaf(self, key: K) -> bool:
        return key in self._entries and key not in self._num_children

    def dump(self) -> object:
        return list(self._entries), self.stamps()

    def stamps(self) -> dict[K, int]:
        """Return the logical time of last use of every entry, for tests that compare states."""
        return {key: entry[0] for key, entry in self._entries.items()}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def _push_if_leaf(self, key: K) -> None:
        entry = self._entries.get(key)
        if entry is None or entry[1] or key in self._num_children:
            return
        self._token += 1
        entry[1] = self._token
        heapq.heappush(self._heap, (entry[0], self._token, key))
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [(e[0], e[1], k) for k, e in self._entries.items() if e[1]]
            heapq.heapify(self._heap)
