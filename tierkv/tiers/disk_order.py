"""In which order the disk tier's entries go. The only module of the tier that calls its policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tierkv.policy.base import Policy
from tierkv.tiers.disk_index import IndexEntry

#: A stored entry: namespace id and key.
Item = tuple[bytes, bytes]
PolicyFactory = Callable[[], Policy[Item]]
#: Whose entries: everybody's, a namespace's (its id), or a tenant's there (namespace id and tenant digest).
Group = tuple[()] | tuple[bytes] | tuple[bytes, bytes]

EVERYBODY: Group = ()


class Order:
    """A policy over all entries, and one for each namespace or tenant that has to make room among its own.

    A group's policy is made when the group first needs a victim, with its entries in the order of their last use. Not
    thread-safe.
    """

    def __init__(self, factory: PolicyFactory) -> None:
        self._factory = factory
        self._all = factory()
        self._groups: dict[Group, Policy[Item]] = {}

    def add(self, ns_id: bytes, key: bytes, entry: IndexEntry) -> None:
        """Note a stored entry; ancestors come first."""
        for policy in self._policies(ns_id, entry.tenant):
            policy.add((ns_id, key), (ns_id, entry.parent))

    def learn(self, entries: Iterable[tuple[bytes, bytes, IndexEntry]]) -> None:
        """Note what is stored already: namespace id, key, entry."""
        learn(self._all, list(entries))

    def remove(self, ns_id: bytes, key: bytes, tenant: bytes) -> None:
        """Note that an entry is gone, or is about to go."""
        for policy in self._policies(ns_id, tenant):
            policy.remove((ns_id, key))

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
        """Have a policy for a group other than everybody; ``members`` gives its entries, if there is none yet."""
        if not group or group in self._groups:
            return
        policy = self._groups[group] = self._factory()
        learn(policy, [(group[0], key, entry) for key, entry in members()])

    def victim(self, group: Group, may_evict: Callable[[Item], bool]) -> Item | None:
        """Return what goes next of a group that has a policy, or None where nothing may."""
        return (self._groups[group] if group else self._all).victim(may_evict)

    def keep(self, items: Iterable[Item], group: Group) -> None:
        """Move entries that were in the way of a victim behind the others, so that they are not met at every turn."""
        (self._groups[group] if group else self._all).touch(items)

    def forget_groups(self) -> None:
        """Drop the groups' policies: quotas changed, and those still needed are made again."""
        self._groups.clear()

    def __contains__(self, item: Item) -> bool:
        return item in self._all

    def _policies(self, ns_id: bytes, tenant: bytes) -> list[Policy[Item]]:
        if not self._groups:
            return [self._all]
        groups = (self._groups.get((ns_id,)), self._groups.get((ns_id, tenant)))
        return [self._all, *(policy for policy in groups if policy is not None)]


def learn(policy: Policy[Item], entries: list[tuple[bytes, bytes, IndexEntry]]) -> None:
    """Tell a policy of stored entries: parents first, then in the order of their last use, leaves first."""
    for ns_id, key, entry in sorted(entries, key=lambda e: e[2].position):
        policy.add((ns_id, key), (ns_id, entry.parent))
    for ns_id, key, _ in sorted(entries, key=lambda e: (e[2].last_used, -e[2].position)):
        policy.touch([(ns_id, key)])
