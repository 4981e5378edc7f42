"""Pins and expiries of the disk tier: written to ``life`` first, then believed."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import lmdb

from tierkv.tiers.base import Pin, Ref
from tierkv.tiers.disk_catalog import Catalog
from tierkv.tiers.disk_health import DiskHealth
from tierkv.tiers.environment import Environment, Life


class Lifetimes:
    """What :class:`tierkv.tiers.base.Tier` says of pins and expiry, for one environment a call.

    Args:
        catalog: what is stored.
        health: whether the disk may be written.
        write: the tier's write lock; every method takes it.
    """

    def __init__(self, catalog: Catalog, health: DiskHealth, write: threading.RLock) -> None:
        self._catalog = catalog
        self._health = health
        self._write = write

    def pin(self, env: Environment, refs: Sequence[Ref], pin: Pin) -> list[bool]:
        """Pin entries from the first ref on; a pin that is over already takes the owner's earlier one away."""
        with self._write:
            if pin.until <= self._catalog.clock():
                self.unpin(env, refs, pin.owner)
                return [False] * len(refs)
            num = self._pinnable(env, refs)
            entries = self._catalog.entries_of(env, refs[:num])
            lives = [(key, entry.until, (entry.pins or {}) | {pin.owner: pin.until}) for key, entry in entries]
            if not self._write_lives(env, lives):
                return [False] * len(refs)
            with self._catalog.lock:
                for key, _ in entries:
                    env.index.pin(key, pin)
            return [i < num for i in range(len(refs))]

    def _pinnable(self, env: Environment, refs: Sequence[Ref]) -> int:
        """Return how many refs, from the first on, are there and may be pinned within the pins' quota."""
        quota = self._catalog.limits.pinned_nbytes
        room = None if quota is None else quota - self._catalog.pinned_nbytes()
        new: set[bytes] = set()
        for i, entry in enumerate(self._catalog.find(env, refs)):
            if entry is None:
                return i
            if not entry.pins:
                new.add(refs[i].key)
                if room is not None and len(new) * env.cost > room:
                    return i
        return len(refs)

    def unpin(self, env: Environment, refs: Sequence[Ref], owner: str) -> int:
        """Take an owner's pins off, or all where ``owner`` is empty; returns how many entries had one."""
        with self._write:
            now, todo = self._catalog.clock(), []
            for key, entry in self._catalog.entries_of(env, refs):
                pins = {name: until for name, until in (entry.pins or {}).items() if until > now}
                owners = [name for name in pins if not owner or name == owner]
                if owners:
                    left = {name: until for name, until in pins.items() if name not in owners}
                    todo.append((key, entry.until, left, owners))
            if not self._write_lives(env, [(key, until, left) for key, until, left, _ in todo]):
                return 0
            with self._catalog.lock:
                for key, _, _, owners in todo:
                    env.index.unpin(key, owners)
                self._catalog.unpinned(env, [key for key, _, _, _ in todo])
            return len(todo)

    def expire_at(self, env: Environment, refs: Sequence[Ref], until: float) -> int:
        """Let entries expire at ``until`` (0: as the limits say); returns how many there were."""
        with self._write:
            entries = self._catalog.entries_of(env, refs)
            if not self._write_lives(env, [(key, until, entry.pins or {}) for key, entry in entries]):
                return 0
            with self._catalog.lock:
                for key, entry in entries:
                    entry.until = until
                    env.index.schedule(key, entry, self._catalog.limits)
            return len(entries)

    def forget_ended(self, env: Environment) -> None:
        """Bring what is written of pins that ended up to date. The write lock is held.

        Raises:
            lmdb.Error: the disk failed.
        """
        with self._catalog.lock:
            keys, env.index.unpinned = env.index.unpinned, set()
            entries = [(key, env.index.entries[key]) for key in keys if key in env.index.entries]
            rows = [(key, _life(entry.until, entry.pins or {})) for key, entry in entries]
        if rows:
            env.write_life(rows)

    def _write_lives(self, env: Environment, lives: Iterable[tuple[bytes, float, dict[str, float]]]) -> bool:
        """Write rows: key, when it expires, pins. False where that failed, or may not be tried."""
        rows = [(key, _life(until, pins)) for key, until, pins in lives]
        if not rows:
            return True
        if not self._health.may_write() or env.closed:
            return False
        try:
            env.write_life(rows)
        except (lmdb.Error, OSError) as error:
            self._health.write_failed(error, env)
            return False
        return True


def _life(until: float, pins: dict[str, float]) -> Life:
    return Life(until, sorted(pins.items()))
