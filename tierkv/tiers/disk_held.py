"""What the engines of this machine hold in their host pools, as far as it makes the disk's copy the one to do without.

Theory of operation. An engine tells which chunks its host pool keeps, and which it lets go of and offers again before
their slots are used again. As long as *every* engine of a namespace keeps a chunk, nobody would read it from the disk:
it is not worth a write for which something else has to go, and of what is stored it goes first. So pool and disk
together hold more than the disk does. A copy for which there is room stays, for an engine that comes back without
memory; where several engines share a server, what only some of them keep is as any other chunk.

Memory: about 200 bytes a chunk that an engine keeps, at most one for each slot of its pool.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

#: A stored entry: namespace id and key.
Item = tuple[bytes, bytes]

#: Chunks that are looked at for one that may go first; those that may not, now, are looked at last the next time.
_MAX_LOOKED_AT = 16


class _Engine:
    """One engine: its namespace, how many chunks its pool has room for, and the keys that it keeps."""

    __slots__ = ("keys", "most", "ns_id")

    def __init__(self, ns_id: bytes, most: int) -> None:
        self.ns_id = ns_id
        self.most = most
        self.keys: set[bytes] = set()


class Held:
    """The chunks that engines keep, and those of them that are stored, first what came to be both last.

    A chain comes with its end last, and what a pool took last it is going to keep for longest.
    """

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = {}
        self._num_engines: Counter[bytes] = Counter()  # by namespace
        self._num_holders: dict[Item, int] = {}
        self._stored: OrderedDict[Item, None] = OrderedDict()

    def joined(self, engine: str, ns_id: bytes, most: int) -> None:
        """Note an engine, which keeps nothing yet, and never more than ``most`` chunks."""
        self._engines[engine] = _Engine(ns_id, most)
        self._num_engines[ns_id] += 1

    def left(self, engine: str) -> None:
        """Note that an engine is gone, and keeps nothing. Does nothing where it is not known."""
        gone = self._engines.pop(engine, None)
        if gone is None:
            return
        self._num_engines[gone.ns_id] -= 1
        if not self._num_engines[gone.ns_id]:
            del self._num_engines[gone.ns_id]
        for key in gone.keys:
            self._lose((gone.ns_id, key))

    def change(
        self, engine: str, took: Iterable[bytes], gone: Iterable[bytes], is_stored: Callable[[Item], bool]
    ) -> None:
        """Note what an engine keeps from now on, and what it does not any more; no more than its pool has room for."""
        holder = self._engines.get(engine)
        if holder is None:
            return
        for key in gone:
            if key in holder.keys:
                holder.keys.remove(key)
                self._lose((holder.ns_id, key))
        for key in took:
            if key in holder.keys or len(holder.keys) >= holder.most:
                continue
            holder.keys.add(key)
            item = holder.ns_id, key
            self._num_holders[item] = self._num_holders.get(item, 0) + 1
            if is_stored(item):
                self._push(item)

    def everywhere(self, item: Item) -> bool:
        """Return whether all engines of a chunk's namespace keep it, of which there is one at least."""
        return self._num_holders.get(item, 0) >= max(1, self._num_engines[item[0]])

    def added(self, item: Item) -> None:
        """Note that a chunk is stored now."""
        if item in self._num_holders:
            self._push(item)

    def removed(self, item: Item) -> None:
        """Note that a chunk is not stored any more."""
        self._stored.pop(item, None)

    def first(self, may_evict: Callable[[Item], bool]) -> Item | None:
        """Return a stored chunk that every engine keeps and that may go; the one that came last, of a few."""
        stored = self._stored
        for _ in range(min(len(stored), _MAX_LOOKED_AT)):
            item = next(iter(stored))
            if self.everywhere(item) and may_evict(item):
                return item
            stored.move_to_end(item)
        return None

    def __len__(self) -> int:
        return len(self._num_holders)

    def _push(self, item: Item) -> None:
        self._stored[item] = None
        self._stored.move_to_end(item, last=False)

    def _lose(self, item: Item) -> None:
        left = self._num_holders[item] - 1
        if left:
            self._num_holders[item] = left
        else:
            del self._num_holders[item]
            self._stored.pop(item, None)
