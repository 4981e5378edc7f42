"""S3-FIFO (Yang and others, SOSP '23), leaves first: three queues, of which the small one takes what is used once."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Generic

from tierkv.policy.base import Hint, K

_SMALL, _MAIN = 0, 1
_MAX_USES = 3
_MIN_GHOSTS = 64


class _Entry(Generic[K]):
    """A stored chunk. ``life`` tells its queue item from those of earlier lives; ``is_parked`` that it has none."""

    __slots__ = ("is_parked", "life", "parent", "queue", "uses")

    def __init__(self, parent: K, queue: int, life: int) -> None:
        self.parent = parent
        self.queue = queue
        self.life = life
        self.uses = 0
        self.is_parked = False


class S3Fifo(Generic[K]):
    """A small queue for newcomers (a tenth), a main queue for what was used again, ghosts of what was not.

    An entry with stored children that comes to the head of its queue is parked until the last of them has gone, and
    then is the next to be looked at. Every operation is constant, amortised; about 350 bytes a chunk with its ghost.
    """

    def __init__(self) -> None:
        self._entries: dict[K, _Entry[K]] = {}
        self._queues: tuple[deque[tuple[K, int]], deque[tuple[K, int]]] = (deque(), deque())
        self._num = [0, 0]
        self._num_children: dict[K, int] = {}
        self._ghosts: OrderedDict[K, None] = OrderedDict()
        self._num_lives = 0

    def note(self, chain: Sequence[K], now: float, *, hint: Hint | None = None, domain: Hashable = None) -> None:
        self.touch(chain)

    def touch(self, chain: Iterable[K]) -> None:
        for key in chain:
            if (entry := self._entries.get(key)) is not None and entry.uses < _MAX_USES:
                entry.uses += 1

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
        queue = _MAIN if key in self._ghosts else _SMALL
        self._ghosts.pop(key, None)
        self._num_lives += 1
        self._entries[key] = _Entry(parent, queue, self._num_lives)
        self._queues[queue].append((key, self._num_lives))
        self._num[queue] += 1
        self._num_children[parent] = self._num_children.get(parent, 0) + 1

    def remove(self, key: K) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self._num[entry.queue] -= 1
        if entry.queue == _SMALL:
            self._ghosts[key] = None
        while len(self._ghosts) > len(self._entries) + _MIN_GHOSTS:
            self._ghosts.popitem(last=False)
        self._num_children[entry.parent] -= 1
        if not self._num_children[entry.parent]:
            del self._num_children[entry.parent]
            above = self._entries.get(entry.parent)
            if above is not None and above.is_parked:
                above.is_parked = False
                self._queues[above.queue].appendleft((entry.parent, above.life))
        self._drop_dead_items()

    def victim(self, may_evict: Callable[[K], bool]) -> K | None:
        refused: list[tuple[int, tuple[K, int]]] = []
        found: K | None = None
        while found is None and (queue := self._next_queue()) is not None:
            item = self._queues[queue].popleft()
            key, life = item
            entry = self._entries.get(key)
            if entry is None or entry.life != life or entry.queue != queue or entry.is_parked:
                continue
            if key in self._num_children:
                entry.is_parked = True
            elif entry.uses and queue == _SMALL:
                self._move_to_main(key, entry)
            elif entry.uses:
                entry.uses -= 1
                self._queues[_MAIN].append(item)
            elif may_evict(key):
                found = key
                self._queues[queue].appendleft(item)
            else:
                refused.append((queue, item))
        for queue, item in reversed(refused):
            self._queues[queue].appendleft(item)
        return found

    def _next_queue(self) -> int | None:
        small, main = self._queues
        prefers_small = self._num[_SMALL] > len(self._entries) // 10
        if small and (prefers_small or not main):
            return _SMALL
        return _MAIN if main else _SMALL if small else None

    def _move_to_main(self, key: K, entry: _Entry[K]) -> None:
        self._num[_SMALL] -= 1
        self._num[_MAIN] += 1
        entry.queue, entry.uses = _MAIN, 0
        self._queues[_MAIN].append((key, entry.life))

    def _drop_dead_items(self) -> None:
        for queue, items in enumerate(self._queues):
            if len(items) > 2 * len(self._entries) + 64:
                live = [(k, n) for k, n in items if (e := self._entries.get(k)) and e.life == n and e.queue == queue]
                items.clear()
                items.extend(live)

    def is_leaf(self, key: K) -> bool:
        return key in self._entries and key not in self._num_children

    def dump(self) -> object:
        entries = {key: (e.parent, e.queue, e.uses) for key, e in self._entries.items()}
        return entries, list(self._ghosts)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)
