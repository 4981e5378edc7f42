"""Reuse distances, sampled: what an LRU cache of any size would have hit.

An access hits in an LRU cache of ``C`` bytes if what was used since the key's last use, and the key itself, are at most
``C`` bytes: its *reuse distance*. So one pass over the accesses gives the hit rate of every size at once. Measuring the
distance of each access takes memory that grows with the keys; here it is measured for a sample of them, after SHARDS
(Waldspurger et al., FAST '15): a key is in the sample if the number that its hash begins with is below a threshold, the
same for all accesses, and distances within the sample are scaled by the sampling rate. When more than ``max_keys`` keys
are in it, the threshold falls, and what was counted before is scaled down with it. So memory is constant.

Three things differ from the paper. Keys here are content hashes already. A request's chain of keys is one access: all
its distances are as of its arrival, and then its keys are touched leaf first, so that an ancestor is never farther away
than a descendant, and a chain's hits are a leading run as in :class:`tierkv.policy.lru.ChainLRU`. And what lies deeper
than a horizon is forgotten, so that keys that never come back do not push the rate down for ever.

Pure: no clock, no I/O, no locks.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Sequence

#: A key's place in the sample: its first 8 bytes, as a number.
HEAD_NBYTES = 8
_SPACE = 1 << (8 * HEAD_NBYTES)
#: The threshold of a sample of all keys.
ALL = _SPACE - 1
#: Keys of a sample by default. On Zipf streams and on a chat service's trace the mean error of a curve was 0.002 to
#: 0.012 with this, 0.006 on average over hashes (0.010 with half as many). A stack takes at most 420 bytes a key.
MAX_KEYS = 8192
#: Namespaces that are told apart. The counts of the one that was silent longest go to "other" when there are more.
MAX_GROUPS = 64
OTHER = ""
#: Buckets of distances in a factor of two: the curve's resolution is 4.4 %.
_PER_OCTAVE = 16
_GROUP_BITS = 8
_GROUP_MASK = (1 << _GROUP_BITS) - 1


def head_of(key: bytes) -> int:
    """Return what decides whether a key is in a sample."""
    return int.from_bytes(key[:HEAD_NBYTES], "big")


class LruStack:
    """The sampled keys in the order of their last use, each with its bytes.

    A Fenwick tree over the times of last use holds the bytes, so a distance, a touch and an eviction cost
    ``O(log max_keys)`` each: about 5 µs in all. Ids are a head with the number of a group (0 to 255) behind it.

    Args:
        max_keys: keys at most.
        horizon: bytes (of all keys, not of the sample) that are looked back at most.

    Attributes:
        threshold: heads below it are in the sample.
    """

    def __init__(self, max_keys: int = MAX_KEYS, horizon: float = math.inf) -> None:
        self.threshold: int = ALL
        self.horizon = horizon
        self._max_keys = max_keys
        self._times: OrderedDict[int, int] = OrderedDict()  # id -> time of last use, oldest first
        self._heap: list[int] = []  # negated ids, with some that are gone
        self._num_times = 2 * max_keys
        self._sizes = [0] * self._num_times
        self._tree = [0] * (self._num_times + 1)
        self._now = 0
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._times)

    @property
    def nbytes(self) -> float:
        """The bytes of all keys that were used, back to the horizon: an estimate."""
        return self._nbytes / self.rate

    @property
    def rate(self) -> float:
        """The share of all keys that is in the sample."""
        return (self.threshold + 1) / _SPACE

    def distance(self, ident: int) -> float | None:
        """Return the bytes used since a key's last use, its own with them; None: never, or beyond the horizon."""
        time = self._times.get(ident)
        if time is None:
            return None
        tree, at, older = self._tree, time, 0  # the bytes at times before it
        while at:
            older += tree[at]
            at &= at - 1
        own = self._sizes[time]
        return (self._nbytes - older - own) / self.rate + own

    def touch(self, ident: int, nbytes: int) -> None:
        """Make a key the one used last. One that is not (or no longer) below the threshold is passed over."""
        if ident >> _GROUP_BITS >= self.threshold:
            return
        before = self._times.pop(ident, None)
        if before is None:
            heapq.heappush(self._heap, -ident)
            if len(self._heap) > 2 * self._max_keys + 64:  # most are of keys that are gone
                self._heap = [-ident, *(-other for other in self._times)]
                heapq.heapify(self._heap)
        else:
            self._add(before, -self._sizes[before])
        if self._now == self._num_times:
            self._renumber()
        self._times[ident] = self._now
        self._sizes[self._now] = nbytes
        self._add(self._now, nbytes)
        self._now += 1
        if len(self._times) > self._max_keys:
            self.lower(-self._top() >> _GROUP_BITS)
        bound = self.horizon * self.rate
        while self._nbytes > bound and len(self._times) > 1:
            _, oldest = self._times.popitem(last=False)
            self._add(oldest, -self._sizes[oldest])

    def lower(self, threshold: int) -> None:
        """Let keys at or above ``threshold`` go, and take no more of them."""
        self.threshold = min(self.threshold, threshold)
        while self._times and (top := -self._top()) >> _GROUP_BITS >= self.threshold:
            heapq.heappop(self._heap)
            time = self._times.pop(top)
            self._add(time, -self._sizes[time])

    def _top(self) -> int:
        """Return the negated id of the key that would leave the sample first; there is one."""
        while -self._heap[0] not in self._times:
            heapq.heappop(self._heap)
        return self._heap[0]

    def _add(self, time: int, nbytes: int) -> None:
        self._nbytes += nbytes
        tree, at, size = self._tree, time + 1, self._num_times
        while at <= size:
            tree[at] += nbytes
            at += at & -at

    def _renumber(self) -> None:
        """Give the keys the first times, so that there are new ones."""
        sizes = [self._sizes[time] for time in self._times.values()]
        self._sizes = sizes + [0] * (self._num_times - len(sizes))
        for now, ident in enumerate(self._times):
            self._times[ident] = now
        tree = [0, *self._sizes]
        for at in range(1, self._num_times + 1):
            above = at + (at & -at)
            if above <= self._num_times:
                tree[above] += tree[at]
        self._tree, self._now = tree, len(sizes)


class Counts:
    """Accesses by reuse distance: estimates of all of them, from those in the sample.

    Attributes:
        asked: accesses, exactly.
        num_sampled: those that were in the sample.
    """

    def __init__(self) -> None:
        self.asked = 0.0
        self.num_sampled = 0.0
        self._weight = 0.0  # what the sample stands for; differs from asked by chance
        self._buckets: dict[int, float] = {}

    def add(self, distance: float | None, weight: float) -> None:
        """Count an access of the sample that stands for ``weight`` accesses; None: no size would have hit."""
        self.num_sampled += 1
        self._weight += weight
        if distance is not None:
            bucket = math.floor(math.log2(max(1.0, distance)) * _PER_OCTAVE)
            self._buckets[bucket] = self._buckets.get(bucket, 0.0) + weight

    def merge(self, other: Counts) -> None:
        """Add another's counts."""
        self.asked += other.asked
        self.num_sampled += other.num_sampled
        self._weight += other._weight
        for bucket, weight in other._buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0.0) + weight

    def decay(self, factor: float) -> None:
        """Let what was counted so far weigh less from now on."""
        self.asked *= factor
        self.num_sampled *= factor
        self._weight *= factor
        self._buckets = {bucket: weight * factor for bucket, weight in self._buckets.items()}

    def hit_rates(self, sizes: Sequence[float]) -> list[float]:
        """Return the share of accesses that an LRU cache of each of ``sizes`` (bytes, ascending) would have hit.

        Where the sample stands for more or fewer accesses than there were, it has too many or too few of the most used
        keys (a system prompt's), which are near: the difference is made up there (SHARDS-adj).
        """
        if not self.asked:
            return [0.0] * len(sizes)
        buckets = sorted(self._buckets.items())
        rates, at, hits, best = [], 0, self.asked - self._weight, 0.0
        for size in sizes:
            place = math.log2(max(1.0, size)) * _PER_OCTAVE
            while at < len(buckets) and buckets[at][0] + 1 <= place:
                hits += buckets[at][1]
                at += 1
            inside = hits
            if at < len(buckets) and buckets[at][0] < place:
                inside += buckets[at][1] * (place - buckets[at][0])
            best = max(best, min(1.0, inside / self.asked))
            rates.append(best)
        return rates


class ReuseSampler:
    """Measures the reuse distances of a stream of requests, by group (a namespace).

    The groups share one stack, as namespaces share a tier: a group's curve says what it would have hit had the tier all
    had so many bytes. Memory: that of the stack, and about 60 KiB a group, of which :data:`MAX_GROUPS` are kept.

    >>> sampler = ReuseSampler()
    >>> sampler.asked("ns", 4)
    >>> for chain in ([1, 2], [1, 3]):
    ...     sampler.request("ns", 100, chain, len(chain))
    >>> sampler.counts().hit_rates([100, 200])
    [0.0, 0.25]
    """

    def __init__(self, max_keys: int = MAX_KEYS, horizon: float = math.inf) -> None:
        self.stack = LruStack(max_keys, horizon)
        self._groups: OrderedDict[str, Counts] = OrderedDict()
        self._numbers: dict[str, int] = {}
        self._next_number = 0

    def asked(self, group: str, num: int) -> None:
        """Note that a group's requests asked for ``num`` keys, sampled or not."""
        self._group(group).asked += num

    def request(self, group: str, nbytes: int, heads: Sequence[int], num_counted: int) -> None:
        """Take one request's keys.

        Args:
            group: whose.
            nbytes: bytes of each key's entry.
            heads: of its keys, root first; those outside the sample are passed over.
            num_counted: so many of them, the last ones, are accesses; the others were only used.
        """
        counts = self._group(group)
        stack, number = self.stack, self._numbers[group]
        weight = 1 / stack.rate
        idents = [head << _GROUP_BITS | number for head in heads]
        for ident in idents[len(idents) - num_counted :]:
            if ident >> _GROUP_BITS < stack.threshold:
                counts.add(stack.distance(ident), weight)
        for ident in reversed(idents):
            stack.touch(ident, nbytes)

    def groups(self) -> dict[str, Counts]:
        """Return the counts of each group."""
        return dict(self._groups)

    def counts(self) -> Counts:
        """Return the counts of all groups together."""
        total = Counts()
        for counts in self._groups.values():
            total.merge(counts)
        return total

    def decay(self, factor: float) -> None:
        """See :meth:`Counts.decay`."""
        for counts in self._groups.values():
            counts.decay(factor)

    def _group(self, name: str) -> Counts:
        counts = self._groups.get(name)
        if counts is None:
            counts = self._groups[name] = Counts()
            self._numbers[name] = self._next_number & _GROUP_MASK
            self._next_number += 1
            if len(self._groups) > MAX_GROUPS:
                self._forget(next(g for g in self._groups if g != OTHER))
        self._groups.move_to_end(name)
        return counts

    def _forget(self, name: str) -> None:
        other = self._groups.setdefault(OTHER, Counts())
        self._numbers.setdefault(OTHER, 0)
        other.merge(self._groups.pop(name))
        del self._numbers[name]
