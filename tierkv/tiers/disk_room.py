"""How the disk tier makes room: budget, quotas, files, free space; and how entries are taken away.

Everything here runs under the tier's write lock. The narrowest bound comes first: a tenant at its quota gives up its
own entries, then a namespace, then the budget is met over all; then the files, which LMDB never shrinks, and the
volume.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import lmdb

from tierkv.tiers.base import Counters, Record
from tierkv.tiers.disk_catalog import Catalog
from tierkv.tiers.disk_held import Item
from tierkv.tiers.disk_mark import delete_files
from tierkv.tiers.disk_order import EVERYBODY, Group
from tierkv.tiers.disk_space import FreeSpace
from tierkv.tiers.environment import Environment

logger = logging.getLogger("tierkv")

#: Called with each record that goes to make room, before it is gone. See :class:`tierkv.tiers.disk.DiskTier`.
OnEvict = Callable[[Record], None]
#: Says of a namespace id and a key whether the hook is to have the record.
WantsEvicted = Callable[[bytes, bytes], bool]
Protected = Callable[[Item], bool]

TXN_NBYTES = 8 << 20
#: Allocated blocks may exceed the budget by this factor before files are deleted, and by ``_SHRINK_FACTOR`` where a
#: budget was lowered.
_FILE_FACTOR = 1.1
_SHRINK_FACTOR = 1.5
#: Pages of a file that hold no records, nor are free: trees and what two transactions left behind.
_TREE_SHARE = 64
_TREE_NBYTES = 1 << 20
#: Transactions' worth of free pages that the file being written keeps.
_SPARE_TXNS = 2


class Room:
    """Makes room in a catalog and takes entries away.

    Args:
        catalog: what is stored.
        counters: counts what goes, and why.
        space: the volume's free space.
        on_evict, wants_evicted: see :class:`tierkv.tiers.disk.DiskTier`.
        failed: called with what went wrong where that fails nothing else.
    """

    def __init__(
        self,
        catalog: Catalog,
        counters: Counters,
        space: FreeSpace,
        on_evict: OnEvict | None,
        wants_evicted: WantsEvicted,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._catalog = catalog
        self._counters = counters
        self._space = space
        self._on_evict = on_evict
        self._wants_evicted = wants_evicted
        self._failed = failed
        self._hook_failed = False

    @property
    def budget(self) -> int:
        return self._catalog.limits.budget or 0

    @property
    def txn_nbytes(self) -> int:
        """Bytes of the records that one transaction writes."""
        return min(TXN_NBYTES, self.budget // 8)

    # What is worth a write

    def choose(
        self, env: Environment, records: Sequence[Record], protected: Protected
    ) -> tuple[list[Record], set[bytes]]:
        """Evict what has to go for those of ``records`` that are worth it.

        A record for which every bound has room is taken as it is. For others the policy is asked; what it takes evicts
        one by one, so that the next is weighed against what is left.

        Args:
            records: parents before their children.

        Returns:
            What is to be written, and the keys of what is not worth it: a chunk that is refused, and, unless the
            host pools have it, those of ``records`` that hang from it.

        Raises:
            lmdb.Error, OSError: the disk failed.
        """
        if not records or env.cost > self.budget:
            return list(records), set()
        catalog, cost = self._catalog, env.cost
        self._sweep_if_short(env, len(records) * cost)
        is_tight = self._is_tight(env, len(records) * cost)
        free: dict[Group, int] = {EVERYBODY: self.budget - catalog.live_nbytes()}
        chosen: list[Record] = []
        refused: set[bytes] = set()
        lost: set[bytes] = set()  # of these, what is not in the host pools either: its children are of no use
        victims: list[Item] = []
        for record in records:
            header = record.header
            bounds = [*catalog.bounds(env, header.tenant), (EVERYBODY, self.budget - free[EVERYBODY], self.budget)]
            for group, nbytes, quota in bounds:
                free.setdefault(group, quota - nbytes)
            short = [group for group, _, quota in bounds if free[group] < cost <= quota]
            has_room = not short and not is_tight
            item = env.ns_id, header.key
            if header.parent in lost or not (has_room or catalog.admits(item)):
                refused.add(header.key)
                if not catalog.is_above(item):
                    lost.add(header.key)
                continue
            for group in short:
                if free[group] < cost:
                    picked = catalog.pick(group, cost - free[group], protected)
                    victims += picked
                    self._credit(free, picked)
            for group, _, _ in bounds:
                free[group] -= cost
            chosen.append(record)
        self.evict(victims, env)
        return chosen, refused

    def _credit(self, free: dict[Group, int], victims: Sequence[Item]) -> None:
        """Note in ``free`` what victims, picked and not yet deleted, give back."""
        for ns_id, key in victims:
            env = self._catalog.environments[ns_id]
            tenant = env.index.entries[key].tenant
            for group in (EVERYBODY, (ns_id,), (ns_id, tenant)):
                if group in free:
                    free[group] += env.cost

    def _sweep_if_short(self, env: Environment, nbytes: int) -> None:
        """Delete what has expired where it takes the room of ``nbytes``: it goes before anything alive."""
        catalog, limits = self._catalog, self._catalog.limits
        if limits.of_namespace(env.ns_id) is not None or limits.tenant_nbytes:
            self._sweep_for(env, nbytes)
        for other in list(catalog.environments.values()):
            excess = catalog.live_nbytes() + nbytes - self.budget
            if excess <= 0:
                break
            self._sweep_for(other, excess)

    def _is_tight(self, env: Environment, nbytes: int) -> bool:
        """Return whether the volume's reserve makes the tier evict for ``nbytes``, whatever the budget says."""
        return (
            self._space.growth_nbytes(self._catalog.limits.reserve_nbytes, nbytes) < nbytes
            and self._free_in_file(env) < nbytes
        )

    # Making room

    def make(self, env: Environment, records: Sequence[Record], protected: Protected) -> list[Record]:
        """Evict until ``records`` fit everywhere, or as many as can; returns those that do, in their order.

        Raises:
            lmdb.Error, OSError: the disk failed.
        """
        if not records or env.cost > self.budget:
            return []
        fitting: list[Record] = []
        for tenant in dict.fromkeys(record.header.tenant for record in records):
            ours = [record for record in records if record.header.tenant == tenant]
            fitting += ours[: self._make_for_tenant(env, tenant, len(ours), protected)]
        if len(fitting) < len(records):
            kept = {id(record) for record in fitting}
            fitting = [record for record in records if id(record) in kept]
        num = self._make_for_namespace(env, len(fitting), protected)
        num = self._make_in_budget(env, num, protected)
        return fitting[: self._make_on_volume(env, num, protected)]

    def _make_for_tenant(self, env: Environment, tenant: bytes, num: int, protected: Protected) -> int:
        quota = self._catalog.limits.of_tenant(tenant)
        if quota is None:
            return num
        return self._make_in_group(
            env, (env.ns_id, tenant), lambda: env.index.tenant_nbytes(tenant), quota, num, protected
        )

    def _make_for_namespace(self, env: Environment, num: int, protected: Protected) -> int:
        quota = self._catalog.limits.of_namespace(env.ns_id)
        if quota is None:
            return num
        return self._make_in_group(env, (env.ns_id,), lambda: env.index.live_nbytes, quota, num, protected)

    def _make_in_group(
        self, env: Environment, group: Group, have: Callable[[], int], quota: int, num: int, protected: Protected
    ) -> int:
        if env.cost > quota:
            return 0
        excess = have() + num * env.cost - quota
        if excess > 0:
            self._sweep_for(env, excess)
            excess = have() + num * env.cost - quota
            self.evict(self._catalog.pick(group, excess, protected), env)
        return max(0, min(num, (quota - have()) // env.cost))

    def _make_in_budget(self, env: Environment, num: int, protected: Protected) -> int:
        catalog, need = self._catalog, num * env.cost
        excess = catalog.live_nbytes() + need - self.budget
        for other in list(catalog.environments.values()) if excess > 0 else []:
            self._sweep_for(other, excess)
            excess = catalog.live_nbytes() + need - self.budget
            if excess <= 0:
                break
        if excess > 0:
            self.evict(catalog.pick(EVERYBODY, excess, protected), env)
        limit = int(_FILE_FACTOR * self.budget)
        while (excess := catalog.allocated_nbytes(but=env) + env.index.live_nbytes + need - limit) > 0:
            dead = self._mostly_dead(env)
            if dead is not None:
                self.evict_all(dead)
            elif not self.evict(catalog.pick(EVERYBODY, max(excess, self.txn_nbytes), protected), env):
                break
        room = min(
            self.budget - catalog.live_nbytes(), limit - catalog.allocated_nbytes(but=env) - env.index.live_nbytes
        )
        return max(0, min(num, room // env.cost))

    def _make_on_volume(self, env: Environment, num: int, protected: Protected) -> int:
        """Keep the volume's reserve: where the file may not grow, only pages that are free in it are written."""
        reserve, need = self._catalog.limits.reserve_nbytes, num * env.cost
        short = self._space.growth_nbytes(reserve, need) < need
        if short:
            free = self._free_in_file(env)
            if free < need:
                self._sweep_for(env, need - free)
                free = self._free_in_file(env)
                self.evict(self._catalog.pick((env.ns_id,), need - free, protected), env)
                env.age()
                free = self._free_in_file(env)
            num = min(num, (self._space.growth_nbytes(reserve, need) + max(0, free)) // env.cost)
        self._space.note(short, reserve)
        self._space.spend(num * env.cost)
        return num

    def _free_in_file(self, env: Environment) -> int:
        live = env.index.live_nbytes
        return env.allocated_nbytes - live - live // _TREE_SHARE - _TREE_NBYTES

    def make_after_full_map(self, env: Environment, num: int, protected: Protected) -> None:
        """Evict because LMDB found its map full, whatever we counted."""
        self.evict(self._catalog.pick(EVERYBODY, 2 * num * env.cost, protected), env)

    def _mostly_dead(self, writing: Environment) -> Environment | None:
        """Return the environment, not the one being written, that gives most back for the least."""
        dead = {
            env.ns_id: env.allocated_nbytes - env.index.live_nbytes
            for env in self._catalog.environments.values()
            if env is not writing and not env.index.foreign and env.index.live_nbytes * 2 < env.allocated_nbytes
        }
        worth = {
            ns_id: nbytes
            for ns_id, nbytes in dead.items()
            if nbytes >= self.budget // 64 and not self._catalog.environments[ns_id].index.num_pinned
        }
        return self._catalog.environments[max(worth, key=worth.__getitem__)] if worth else None

    # Limits that were lowered

    def trim(self, hooked: bool = True) -> bool:
        """Bring what is stored a step closer to limits that were lowered; returns whether there is more to do.

        Raises:
            lmdb.Error, OSError: the disk failed.
        """
        catalog, limits = self._catalog, self._catalog.limits
        for env in list(catalog.environments.values()):
            self.sweep(env)
            bounds: list[tuple[Group, int | None, int]] = [
                ((env.ns_id, tenant), limits.of_tenant(tenant), usage.nbytes)
                for tenant, usage in env.index.usage().items()
            ]
            bounds.append(((env.ns_id,), limits.of_namespace(env.ns_id), env.index.live_nbytes))
            for group, quota, nbytes in bounds:
                if quota is not None and self._trim_group(group, nbytes - quota, hooked):
                    return True
        if self._trim_group(EVERYBODY, catalog.live_nbytes() - self.budget, hooked):
            return True
        return self._shrink()

    def _trim_group(self, group: Group, excess: int, hooked: bool) -> bool:
        if excess <= 0:
            return False
        victims = self._catalog.pick(group, min(excess, TXN_NBYTES), lambda item: False)
        return bool(self.evict(victims, hooked=hooked))

    def _shrink(self) -> bool:
        """Delete an environment where files are far larger than the budget and the filesystem gave nothing back."""
        if self._catalog.allocated_nbytes() <= _SHRINK_FACTOR * self.budget + 4 * self.txn_nbytes:
            return False
        ours = [e for e in self._catalog.environments.values() if not e.index.foreign and not e.index.num_pinned]
        if not ours:
            return False
        self.evict_all(max(ours, key=lambda env: env.allocated_nbytes - env.index.live_nbytes))
        return True

    # Taking away

    def evict(self, items: Sequence[Item], writing: Environment | None = None, *, hooked: bool = True) -> int:
        """Delete victims that were picked to make room, and return how many.

        Raises:
            lmdb.Error: the disk failed; what was not deleted is as it was.
        """
        if hooked:
            self._tell(items)
        num = self.remove(items, writing)
        self._counters.count_evicted(num)
        return num

    def evict_all(self, env: Environment) -> None:
        """Delete a whole environment to make room."""
        self._tell([(env.ns_id, key) for key in env.index.entries])
        self._counters.count_evicted(self.destroy(env))

    def remove(self, items: Sequence[Item], writing: Environment | None = None) -> int:
        """Delete entries, one transaction an environment, and return how many.

        An environment that this leaves empty is deleted whole, unless it is ``writing``. Pages that ``writing`` is not
        about to use again are given back to the filesystem.

        Raises:
            lmdb.Error: the disk failed; what was not deleted is as it was.
        """
        by_env: dict[bytes, list[bytes]] = {}
        for ns_id, key in items:
            by_env.setdefault(ns_id, []).append(key)
        try:
            for ns_id, keys in by_env.items():
                env = self._catalog.environments[ns_id]
                if len(keys) == len(env.index.entries) and not env.index.foreign and env is not writing:
                    self.destroy(env)
                    continue
                places = [(key, env.index.entries[key].page) for key in keys]
                env.delete(keys)
                if env is not writing or env.allocated_nbytes > env.index.live_nbytes + _SPARE_TXNS * self.txn_nbytes:
                    env.punch(places)
                self._catalog.remove(env, keys)
        except lmdb.Error:
            self._catalog.give_back(items)
            raise
        return len(items)

    def sweep(self, env: Environment, most: int | None = None, keys: Iterable[bytes] | None = None) -> None:
        """Delete what has expired by now: all, ``most`` entries, or those of ``keys``.

        Raises:
            lmdb.Error: the disk failed; what has expired is a miss all the same, and deleted later.
        """
        self._catalog.advance_all(env)
        if keys is None:
            dead = list(islice(env.index.dead.items(), most))
        else:
            dead = [(key, env.index.dead[key]) for key in keys if key in env.index.dead]
        step = max(1, self.txn_nbytes // env.cost)
        for at in range(0, len(dead), step):
            batch = dead[at : at + step]
            env.delete(key for key, _ in batch)
            env.punch(batch)
            with self._catalog.lock:
                for key, _ in batch:
                    del env.index.dead[key]

    def _sweep_for(self, env: Environment, nbytes: int) -> None:
        """Delete as much of what has expired as makes room of ``nbytes``."""
        self.sweep(env, most=-(-nbytes // env.cost))

    def destroy(self, env: Environment) -> int:
        """Delete an environment with its files, and return how many entries it had."""
        num = len(env.index.entries)
        self._catalog.forget(env)
        try:
            env.close(clean=False)
            delete_files(env.directory)
        except OSError as error:
            self._failed(error)
        return num

    def _tell(self, items: Sequence[Item]) -> None:
        """Call the hook with the records of victims. What goes wrong with it concerns nobody here."""
        if self._on_evict is None:
            return
        for ns_id, key in items:
            env = self._catalog.environments[ns_id]
            try:
                if not self._wants_evicted(ns_id, key):  # a record is megabytes from a disk, under the write lock
                    continue
                with env.record(key) as record:
                    if record is not None:
                        self._on_evict(record)
            except Exception as error:
                if not self._hook_failed:
                    logger.warning("What is to happen with records that the disk evicts failed: %r.", error)
                self._hook_failed = True
