"""What the disk tier holds, over all namespaces: their environments, the order of eviction, the limits, the lock.

Everything here is in memory and takes microseconds. What it says is so at the time it is asked for: whatever has
expired by then is gone, and pins that have ended hold nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

from tierkv.policy import Hint
from tierkv.tiers.base import Limits, Ref, Usage
from tierkv.tiers.disk_held import Item
from tierkv.tiers.disk_index import IndexEntry
from tierkv.tiers.disk_order import Group, Order, PolicyFactory
from tierkv.tiers.environment import Environment

#: Entries that a lookup looks at because they may have expired; more are asked one by one, and left to the sweep.
_LOOKUP_STEPS = 256
_RESCHEDULE_STEPS = 2000

_key_of = itemgetter(0)


class Catalog:
    """The entries of all namespaces.

    Attributes:
        environments: by namespace id; changed under the tier's write lock and ``lock``.
        limits: replaced whole.
        lock: guards indexes and the order of eviction; held for microseconds, taken after the write lock.
    """

    def __init__(
        self,
        limits: Limits,
        clock: Callable[[], float],
        policy: str | PolicyFactory,
        count_expired: Callable[[int], None],
    ) -> None:
        self.environments: dict[bytes, Environment] = {}
        self.limits = limits
        self.clock = clock
        self.lock = threading.Lock()
        self.order = Order(policy)
        self._count_expired = count_expired

    # Lookups

    def stored(self, env: Environment, refs: Sequence[Ref]) -> list[bool]:
        """Return for each ref whether it is there now. A dictionary lookup a ref where nothing may have expired."""
        index, now = env.index, self.clock()
        if now >= index.soonest:
            self.advance(env, now, _LOOKUP_STEPS)
        if now < index.soonest:
            return list(map(index.entries.__contains__, map(_key_of, refs)))
        return [index.get(ref.key, now, self.limits) is not None for ref in refs]

    def find(self, env: Environment, refs: Sequence[Ref]) -> list[IndexEntry | None]:
        """Return the entry of each ref that is there now."""
        index, now = env.index, self.clock()
        if now >= index.soonest:
            self.advance(env, now, _LOOKUP_STEPS)
        return [index.get(ref.key, now, self.limits) for ref in refs]

    def entries_of(self, env: Environment, refs: Sequence[Ref]) -> list[tuple[bytes, IndexEntry]]:
        """Return the entries that are there now, each once, in the order of ``refs``."""
        found = self.find(env, refs)
        return list({ref.key: entry for ref, entry in zip(refs, found, strict=True) if entry is not None}.items())

    def advance(self, env: Environment, now: float, most: int) -> None:
        """Take out entries that have expired, after looking at no more than ``most``."""
        with self.lock:
            expired = env.index.advance(now, self.limits, most)
            for key, entry in expired:
                self.order.remove(env.ns_id, key, entry.tenant)
        if expired:
            self._count_expired(len(expired))

    def advance_all(self, env: Environment) -> None:
        """Take out everything that has expired by now, and pins that have ended."""
        now = self.clock()
        while env.index.is_due(now):
            self.advance(env, now, _LOOKUP_STEPS)
        with self.lock:
            env.index.lapse(now)

    def may_go(self, item: Item, now: float) -> bool:
        """Return whether no pin holds an entry."""
        entry = self.environments[item[0]].index.entries.get(item[1])
        return entry is None or entry.hold <= now

    # Sums

    def live_nbytes(self) -> int:
        """Bytes of the pages that hold records."""
        return sum(env.index.live_nbytes for env in self.environments.values())

    def pinned_nbytes(self) -> int:
        """Bytes of the entries that are pinned now."""
        now, total = self.clock(), 0
        with self.lock:
            for env in self.environments.values():
                env.index.lapse(now)
                total += env.index.num_pinned * env.cost
        return total

    def usage(self, env: Environment) -> dict[bytes, Usage]:
        """Return what each tenant has in a namespace now."""
        self.advance_all(env)
        with self.lock:
            return env.index.usage()

    def allocated_nbytes(self, but: Environment | None = None) -> int:
        """Bytes that the data files take from the filesystem, but for those of one environment."""
        return sum(env.allocated_nbytes for env in list(self.environments.values()) if env is not but)

    # Changes

    def add_environment(self, env: Environment) -> None:
        """Add an environment with what is in it."""
        with self.lock:
            self.environments[env.ns_id] = env
            self.order.learn((env.ns_id, key, entry) for key, entry in env.index.entries.items())
            for key, entry in env.index.entries.items():
                env.index.schedule(key, entry, self.limits)

    def forget(self, env: Environment) -> None:
        """Take an environment out, with everything in it."""
        with self.lock:
            self.environments.pop(env.ns_id, None)
            for key, entry in env.index.entries.items():
                self.order.remove(env.ns_id, key, entry.tenant)

    def add(self, env: Environment, key: bytes, entry: IndexEntry) -> None:
        """Add a stored entry. The lock is held."""
        env.index.add(key, entry, self.limits)
        self.order.add(env.ns_id, key, entry)

    def remove(self, env: Environment, keys: Sequence[bytes]) -> None:
        """Take out entries that were deleted."""
        with self.lock:
            for key in keys:
                entry = env.index.remove(key)
                if entry is not None:
                    self.order.remove(env.ns_id, key, entry.tenant)

    def note(self, ns_id: bytes, tenant: bytes, keys: Sequence[bytes], hint: Hint | None) -> None:
        """Note that a request asks for a chain, root first, stored or not."""
        now = self.clock()
        with self.lock:
            self.order.note(ns_id, tenant, keys, now, hint)

    def release(self, ns_id: bytes, session: str) -> bool:
        """Note that a session is over; returns whether it was known."""
        with self.lock:
            return self.order.release(ns_id, session)

    def joined(self, engine: str, ns_id: bytes, most: int) -> None:
        """Note an engine, which keeps nothing yet, and never more than ``most`` chunks."""
        with self.lock:
            self.order.held.joined(engine, ns_id, most)

    def left(self, engine: str) -> None:
        """Note that an engine keeps nothing any more, and is not asked for."""
        with self.lock:
            self.order.held.left(engine)

    def hold(self, engine: str, took: Sequence[bytes], gone: Sequence[bytes]) -> bool:
        """Note what an engine keeps in its host pool; returns whether what it keeps may be missing here."""
        with self.lock:
            return self.order.hold(engine, took, gone)

    def is_above(self, item: Item) -> bool:
        """Return whether every engine keeps a chunk in its host pool."""
        with self.lock:
            return self.order.is_above(item)

    def worth(self, item: Item) -> float:
        """Return the hits a second that holding a chunk is expected to bring; 0 where nothing is known."""
        with self.lock:
            return self.order.worth(item)

    def admits(self, item: Item) -> bool:
        """Return whether a chunk is worth a write where something has to go for it."""
        now = self.clock()
        with self.lock:
            return self.order.admits(item, now)

    def unpinned(self, env: Environment, keys: Iterable[bytes]) -> None:
        """Note that pins were taken off entries, before their time: they and their ancestors may go again. Locked."""
        now, entries = self.clock(), env.index.entries
        freed: dict[Item, None] = {}
        for key in keys:
            while (entry := entries.get(key)) is not None and entry.hold <= now and (env.ns_id, key) not in freed:
                freed[env.ns_id, key] = None
                key = entry.parent
        self.order.put_back(freed, now)

    def bounds(self, env: Environment, tenant: bytes) -> list[tuple[Group, int, int]]:
        """Return the quotas that hold for a tenant of a namespace, narrowest first: group, bytes it has, quota."""
        own, whole = self.limits.of_tenant(tenant), self.limits.of_namespace(env.ns_id)
        found: list[tuple[Group, int, int]] = []
        if own is not None:
            found.append(((env.ns_id, tenant), env.index.tenant_nbytes(tenant), own))
        if whole is not None:
            found.append(((env.ns_id,), env.index.live_nbytes, whole))
        return found

    def note_use(self, env: Environment, used: Sequence[tuple[bytes, IndexEntry]]) -> None:
        """Note that entries were read, ancestors first."""
        now = self.clock()
        with self.lock:
            self.order.touch(env.ns_id, used)
            for key, entry in used:
                entry.last_used = now
                entry.num_hits += 1
                if key in env.index.entries:
                    env.index.used.add(key)

    def set_limits(self, limits: Limits) -> None:
        """Replace the limits; from now on lookups go by the new ones."""
        timed = (limits.ttl_s, limits.idle_s) != (self.limits.ttl_s, self.limits.idle_s)
        with self.lock:
            self.limits = limits
            self.order.forget_groups()
            todo = [(env, env.index.unschedule()) for env in self.environments.values()] if timed else []
        for env, keys in todo:
            for at in range(0, len(keys), _RESCHEDULE_STEPS):
                with self.lock:
                    for key in keys[at : at + _RESCHEDULE_STEPS]:
                        if (entry := env.index.entries.get(key)) is not None:
                            env.index.schedule(key, entry, limits)
            with self.lock:
                env.index.scheduled()

    # Victims

    def pick(self, group: Group, nbytes: int, protected: Callable[[Item], bool]) -> list[Item]:
        """Choose victims of at least ``nbytes``, or all there are: out of the order, not yet deleted.

        Args:
            group: whose entries may go.
            protected: what may not go, besides what is pinned.
        """
        now = self.clock()
        victims: list[Item] = []
        held: list[Item] = []

        def may_evict(item: Item) -> bool:
            if protected(item):
                return False
            if not self.may_go(item, now):
                held.append(item)
                return False
            return True

        with self.lock:
            self.order.put_back_ended(now)
            self.order.ensure(group, lambda: self._members(group))
            while nbytes > 0:
                victim = self.order.victim(group, may_evict)
                for ns_id, key in held:
                    self.order.set_aside((ns_id, key), self.environments[ns_id].index.entries[key])
                held.clear()
                if victim is None:
                    break
                env = self.environments[victim[0]]
                self.order.take_out(victim, env.index.entries[victim[1]].tenant)
                victims.append(victim)
                nbytes -= env.cost
        return victims

    def give_back(self, items: Sequence[Item]) -> None:
        """Put victims that could not be deleted back into the order."""
        with self.lock:
            for ns_id, key in reversed(items):
                env = self.environments.get(ns_id)
                entry = env.index.entries.get(key) if env is not None else None
                if entry is not None and (ns_id, key) not in self.order:
                    self.order.add(ns_id, key, entry)

    def _members(self, group: Group) -> list[tuple[bytes, IndexEntry]]:
        env = self.environments.get(group[0]) if group else None
        entries = list(env.index.entries.items()) if env is not None else []
        return entries if len(group) < 2 else [item for item in entries if item[1].tenant == group[1]]
