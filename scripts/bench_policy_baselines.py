"""Cache policies from the literature, without knowledge of chains, to measure ours against. Keys are ints.

Each has ``key in cache``, ``hit(key)`` for a key that is in, and ``insert(key)`` for one that is not, which returns
whether it was written.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence


class Fifo:
    """First in, first out."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keys: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, key: int) -> bool:
        return key in self.keys

    def hit(self, key: int) -> None:
        pass

    def insert(self, key: int) -> bool:
        if len(self.keys) >= self.capacity:
            self.keys.popitem(last=False)
        self.keys[key] = None
        return True


class Lru(Fifo):
    """Least recently used, by block: ancestors may go before their descendants."""

    def hit(self, key: int) -> None:
        self.keys.move_to_end(key)


class Sieve:
    """SIEVE (Zhang and others, NSDI '24): a hand that spares what was used since it last came by."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.older: dict[int, int] = {}  # towards the tail
        self.newer: dict[int, int] = {}
        self.used: dict[int, bool] = {}
        self.head = self.tail = self.hand = -1

    def __contains__(self, key: int) -> bool:
        return key in self.used

    def hit(self, key: int) -> None:
        self.used[key] = True

    def insert(self, key: int) -> bool:
        if len(self.used) >= self.capacity:
            self._evict()
        self.used[key] = False
        self.older[key], self.newer[key] = self.head, -1
        if self.head != -1:
            self.newer[self.head] = key
        self.head = key
        if self.tail == -1:
            self.tail = key
        return True

    def _evict(self) -> None:
        key = self.hand if self.hand != -1 else self.tail
        while self.used[key]:
            self.used[key] = False
            key = self.newer[key] if self.newer[key] != -1 else self.tail
        older, newer = self.older.pop(key), self.newer.pop(key)
        del self.used[key]
        if older != -1:
            self.newer[older] = newer
        if newer != -1:
            self.older[newer] = older
        self.hand = newer
        self.head = older if key == self.head else self.head
        self.tail = newer if key == self.tail else self.tail


class S3FifoBlocks:
    """S3-FIFO as published, by block."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.small: deque[int] = deque()
        self.main: deque[int] = deque()
        self.uses: dict[int, int] = {}
        self.ghosts: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, key: int) -> bool:
        return key in self.uses

    def hit(self, key: int) -> None:
        self.uses[key] = min(3, self.uses[key] + 1)

    def insert(self, key: int) -> bool:
        while len(self.uses) >= self.capacity:
            self._evict()
        (self.main if self.ghosts.pop(key, 0) is None else self.small).append(key)
        self.uses[key] = 0
        return True

    def _evict(self) -> None:
        if self.small and (len(self.small) >= self.capacity // 10 or not self.main):
            key = self.small.popleft()
            if self.uses[key] > 0:
                self.uses[key] = 0
                self.main.append(key)
                return
            self.ghosts[key] = None
            if len(self.ghosts) > self.capacity:
                self.ghosts.popitem(last=False)
        else:
            key = self.main.popleft()
            if self.uses[key] > 0:
                self.uses[key] -= 1
                self.main.append(key)
                return
        del self.uses[key]


class Arc:
    """ARC (Megiddo and Modha, FAST '03)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.target = 0.0
        self.t1, self.t2, self.b1, self.b2 = (OrderedDict[int, None]() for _ in range(4))

    def __contains__(self, key: int) -> bool:
        return key in self.t1 or key in self.t2

    def hit(self, key: int) -> None:
        self.t1.pop(key, None)
        self.t2[key] = None
        self.t2.move_to_end(key)

    def insert(self, key: int) -> bool:
        if key in self.b1:
            self.target = min(self.capacity, self.target + max(1, len(self.b2) / len(self.b1)))
            self._replace(False)
            del self.b1[key]
            self.t2[key] = None
        elif key in self.b2:
            self.target = max(0, self.target - max(1, len(self.b1) / len(self.b2)))
            self._replace(True)
            del self.b2[key]
            self.t2[key] = None
        else:
            self._make_room()
            self.t1[key] = None
        return True

    def _make_room(self) -> None:
        recent = len(self.t1) + len(self.b1)
        if recent >= self.capacity:
            if len(self.t1) < self.capacity:
                self.b1.popitem(last=False)
                self._replace(False)
            else:
                self.t1.popitem(last=False)
        else:
            total = recent + len(self.t2) + len(self.b2)
            if total >= self.capacity:
                if total >= 2 * self.capacity:
                    self.b2.popitem(last=False)
                self._replace(False)

    def _replace(self, in_b2: bool) -> None:
        if len(self.t1) + len(self.t2) < self.capacity:
            return
        if self.t1 and (len(self.t1) > self.target or (in_b2 and len(self.t1) == self.target) or not self.t2):
            self.b1[self.t1.popitem(last=False)[0]] = None
        else:
            self.b2[self.t2.popitem(last=False)[0]] = None


class WTinyLfu:
    """W-TinyLFU (Einziger and others, TOS '17): a window of 1 %, a segmented main part, admission by frequency.

    Frequencies are exact where the paper has a sketch, and halved after ten times the capacity.
    """

    def __init__(self, capacity: int) -> None:
        self.window_size = max(1, capacity // 100)
        self.main_size = capacity - self.window_size
        self.window, self.probation, self.protected = (OrderedDict[int, None]() for _ in range(3))
        self.frequency: Counter[int] = Counter()
        self.num_counted = 0

    def __contains__(self, key: int) -> bool:
        return key in self.window or key in self.probation or key in self.protected

    def hit(self, key: int) -> None:
        self._count(key)
        if key in self.window:
            self.window.move_to_end(key)
            return
        self.probation.pop(key, None)
        self.protected[key] = None
        self.protected.move_to_end(key)
        if len(self.protected) > self.main_size * 4 // 5:
            self.probation[self.protected.popitem(last=False)[0]] = None

    def insert(self, key: int) -> bool:
        self._count(key)
        self.window[key] = None
        if len(self.window) > self.window_size:
            candidate = self.window.popitem(last=False)[0]
            if len(self.probation) + len(self.protected) < self.main_size:
                self.probation[candidate] = None
            else:
                queue = self.probation or self.protected
                if self.frequency[candidate] > self.frequency[next(iter(queue))]:
                    queue.popitem(last=False)
                    self.probation[candidate] = None
        return True

    def _count(self, key: int) -> None:
        self.frequency[key] += 1
        self.num_counted += 1
        if self.num_counted >= 10 * (self.window_size + self.main_size):
            self.num_counted //= 2
            self.frequency = Counter({k: n // 2 for k, n in self.frequency.items() if n > 1})


class Belady:
    """The clairvoyant limit: what is needed last goes, or is not written at all."""

    def __init__(self, capacity: int, chains: Sequence[Sequence[int]]) -> None:
        self.capacity = capacity
        self.next_use: dict[int, int] = {}
        self.heap: list[tuple[int, int, int]] = []  # (-next use, -depth, key)
        self.step = 0
        last: dict[int, int] = {}
        self.following: list[list[int]] = [[] for _ in chains]
        for i in range(len(chains) - 1, -1, -1):
            self.following[i] = [last.get(key, len(chains)) for key in chains[i]]
            last.update(dict.fromkeys(chains[i], i))

    def __contains__(self, key: int) -> bool:
        return key in self.next_use

    def request(self, chain: Sequence[int]) -> int:
        """Serve a request, parents first, and return the number of writes."""
        num = 0
        never = len(self.following)
        for depth, (key, use) in enumerate(zip(chain, self.following[self.step], strict=True)):
            if key not in self.next_use:
                if use == never:
                    continue
                if len(self.next_use) >= self.capacity:
                    while self.next_use.get(self.heap[0][2]) != -self.heap[0][0]:
                        heapq.heappop(self.heap)
                    if self.heap[0] >= (-use, -depth, key):
                        continue
                    del self.next_use[heapq.heappop(self.heap)[2]]
                num += 1
            self.next_use[key] = use
            heapq.heappush(self.heap, (-use, -depth, key))
        self.step += 1
        return num


BASELINES = {
    "fifo": Fifo,
    "lru-blocks": Lru,
    "arc": Arc,
    "s3fifo-blocks": S3FifoBlocks,
    "sieve": Sieve,
    "w-tinylfu": WTinyLfu,
}
