"""In which order the disk tier's entries go, and what is worth writing. The only module that calls its policy.

Theory of operation. One policy orders all entries, and says where there is no room left whether a chunk is worth a
write. Chunks of a namespace of which no request was ever noted are written as they come, since nothing is known that
would speak against them. A namespace or a tenant at its quota makes room among its own: those are in a plain order of
last use beside, leaves first, so that the policy's memory of what is not stored (its ghosts) is there once.

Entries that a pin holds are taken out when they are met on the way to a victim, and come back when the pins are over,
so that they are not met at every turn.

Memory: what the policy says of itself (:mod:`tierkv.policy.learned`: 63 to 77 bytes a chunk or ghost, about 500 a
segment; ghosts are at most as many as chunks, or 65,536), 56 bytes for the pair that names a chunk here and 65 for the
key of a ghost; where a quota binds 400 bytes a chunk within it more.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

from tierkv.policy import WEIGHS_ABOVE, ChainLRU, Hint, Policy, make_policy
from tierkv.tiers.disk_held import Held, Item
from tierkv.tiers.disk_index import IndexEntry

PolicyFactory = Callable[[], Policy[Item]]
#: Whose entries: everybody's, a namespace's (its id), or a tenant's there (namespace id and tenant digest).
Group = tuple[()] | tuple[bytes] | tuple[bytes, bytes]

EVERYBODY: Group = ()
#: Chunks of a request that are noted: a policy takes 1 to 2 µs for each, under the catalog's lock.
MAX_NOTED = 8192
#: Entries of one chain that were used last within this time of each other were used together.
_TOGETHER_S = 1.0


class Order:
    """A policy over all entries, and an order of last use for each namespace or tenant that is at its quota.

    A group's order is made when the group first needs a victim. Not thread-safe.

    Args:
        policy: the name of a policy (:func:`tierkv.policy.make_policy`), or what makes one.
    """

    def __init__(self, policy: str | PolicyFactory) -> None:
        self.name = policy if isinstance(policy, str) else getattr(policy, "__name__", "own")
        self._all: Policy[Item] = make_policy(policy) if isinstance(policy, str) else policy()
        self._groups: dict[Group, ChainLRU[Item]] = {}
        self._clock = 0.0  # of the policy: never back, whatever the wall clock does
        self._clock_at: float | None = None  # the wall clock then
        self._noted: set[bytes] = set()  # namespaces whose requests are noted
        self.held = Held()
        self.weighs_above = self.name in WEIGHS_ABOVE
        self.is_full = False  #: something had to go for what came, or was not taken for that
        self._aside: dict[Item, IndexEntry] = {}  # held by pins, in no policy
        self._ends: list[tuple[float, Item]] = []  # when these may be looked at again

    # Requests

    def note(self, ns_id: bytes, tenant: bytes, keys: Sequence[bytes], now: float, hint: Hint | None) -> None:
        """Note that a request asks for a chain, root first, stored or not."""
        self._noted.add(ns_id)
        now = self._passed(now)
        chain = [(ns_id, key) for key in keys[:MAX_NOTED]]
        for policy in self._policies(ns_id, tenant):
            policy.note(chain, now, hint=hint, domain=ns_id)

    def release(self, ns_id: bytes, session: str) -> bool:
        """Note that a session is over; returns whether it was known."""
        return self._all.release(session, ns_id)

    def worth(self, item: Item) -> float:
        """Return the hits a second that holding a chunk is expected to bring; 0 where nothing is known."""
        return self._all.worth(item)

    def admits(self, item: Item, now: float) -> bool:
        """Return whether a chunk is worth a write where something has to go for it."""
        self.is_full = True
        if item[0] not in self._noted:
            return True
        return self._all.admit(item, self._passed(now), room=False, above=self.is_above(item))

    def is_above(self, item: Item) -> bool:
        """Return whether every engine keeps a chunk in its host pool and is going to offer it when it lets go of it."""
        return self.weighs_above and self.held.everywhere(item)

    def _passed(self, now: float) -> float:
        if self._clock_at is not None:
            self._clock += max(0.0, now - self._clock_at)
        self._clock_at = now
        return self._clock

    # What engines keep

    def hold(self, engine: str, took: Iterable[bytes], gone: Iterable[bytes]) -> bool:
        """Note what an engine keeps in its host pool; returns whether what it keeps may be missing here."""
        self.held.change(engine, took, gone, self._all.__contains__)
        return self.is_full

    # What is stored

    def add(self, ns_id: bytes, key: bytes, entry: IndexEntry) -> None:
        """Note a stored entry; ancestors come first."""
        item = ns_id, key
        for policy in self._policies(ns_id, entry.tenant):
            policy.add(item, (ns_id, entry.parent))
        self.held.added(item)

    def learn(self, entries: Iterable[tuple[bytes, bytes, IndexEntry]]) -> None:
        """Note what is stored already: namespace id, key, entry."""
        learn(self._all, list(entries))

    def remove(self, ns_id: bytes, key: bytes, tenant: bytes) -> None:
        """Note that an entry is gone, or is about to go."""
        self.take_out((ns_id, key), tenant)

    def take_out(self, item: Item, tenant: bytes) -> None:
        """Do so. The very object that :meth:`victim` returned counts as evicted by the policy that chose it."""
        self._aside.pop(item, None)
        self.held.removed(item)
        for policy in self._policies(item[0], tenant):
            policy.remove(item)

    def touch(self, ns_id: bytes, used: Sequence[tuple[bytes, IndexEntry]]) -> None:
        """Note that entries of one namespace were read, ancestors first."""
        items = [(ns_id, key) for key, _ in used]
        self._all.touch(items)
        if not self._groups:
            return
        if (policy := self._groups.get((ns_id,))) is not None:
            policy.touch(items)
        for tenant in {entry.tenant for _, entry in used}:
            if (policy := self._groups.get((ns_id, tenant))) is not None:
                policy.touch([(ns_id, key) for key, entry in used if entry.tenant == tenant])

    def ensure(self, group: Group, members: Callable[[], Iterable[tuple[bytes, IndexEntry]]]) -> None:
        """Have an order for a group other than everybody; ``members`` gives its entries, if there is none yet."""
        if not group or group in self._groups:
            return
        policy = self._groups[group] = ChainLRU()
        learn(policy, [(group[0], key, entry) for key, entry in members() if (group[0], key) not in self._aside])

    def victim(self, group: Group, may_evict: Callable[[Item], bool]) -> Item | None:
        """Return what goes next of a group that has an order, or None where nothing may."""
        if group:
            return self._groups[group].victim(may_evict)
        self.is_full = True
        found = self.held.first(lambda item: self._all.is_leaf(item) and may_evict(item)) if self.weighs_above else None
        return found or self._all.victim(may_evict)

    def forget_groups(self) -> None:
        """Drop the groups' orders: quotas changed, and those still needed are made again."""
        self._groups.clear()

    def __contains__(self, item: Item) -> bool:
        return item in self._all or item in self._aside

    # Pins

    def set_aside(self, item: Item, entry: IndexEntry) -> None:
        """Take out an entry that pins hold, until they are over (:meth:`put_back`, :meth:`put_back_ended`)."""
        self.take_out(item, entry.tenant)
        self._aside[item] = entry
        heapq.heappush(self._ends, (entry.hold, item))

    def put_back(self, items: Iterable[Item], now: float) -> None:
        """Put back those of ``items`` that were set aside and that no pin holds any more."""
        free = [(item, entry) for item in items if (entry := self._aside.get(item)) is not None and entry.hold <= now]
        for (ns_id, key), entry in sorted(free, key=lambda pair: pair[1].position):
            del self._aside[ns_id, key]
            self.add(ns_id, key, entry)

    def put_back_ended(self, now: float) -> None:
        """Put back all whose pins are over by now."""
        due: list[Item] = []
        while self._ends and self._ends[0][0] <= now:
            _, item = heapq.heappop(self._ends)
            entry = self._aside.get(item)
            if entry is None:
                continue
            if entry.hold > now:  # pinned again meanwhile, for longer
                heapq.heappush(self._ends, (entry.hold, item))
            else:
                due.append(item)
        self.put_back(dict.fromkeys(due), now)

    def _policies(self, ns_id: bytes, tenant: bytes) -> list[Policy[Item]]:
        if not self._groups:
            return [self._all]
        groups = (self._groups.get((ns_id,)), self._groups.get((ns_id, tenant)))
        return [self._all, *(policy for policy in groups if policy is not None)]


Stored = tuple[bytes, bytes, IndexEntry]


def learn(policy: Policy[Item], entries: Sequence[Stored]) -> None:
    """Tell a policy of stored entries, chain by chain: parents first, then in the order of their last use."""
    runs = _runs(entries)
    for run in sorted(runs, key=lambda run: run[0][2].position):
        for ns_id, key, entry in run:
            policy.add((ns_id, key), (ns_id, entry.parent))
    for run in runs:
        policy.touch([(ns_id, key) for ns_id, key, _ in run])


def _runs(entries: Sequence[Stored]) -> list[list[Stored]]:
    """Return runs of entries that were used together, each a chain from an ancestor down, longest unused first."""
    by_end: dict[Item, list[Stored]] = {}
    runs: list[list[Stored]] = []
    for stored in sorted(entries, key=lambda s: (s[2].last_used, s[2].position)):
        ns_id, key, entry = stored
        run = by_end.pop((ns_id, entry.parent), None)
        if run is None or entry.last_used - run[-1][2].last_used > _TOGETHER_S:
            run = []
            runs.append(run)
        run.append(stored)
        by_end[ns_id, key] = run
    return sorted(runs, key=lambda run: run[-1][2].last_used)
