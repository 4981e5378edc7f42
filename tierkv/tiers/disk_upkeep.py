"""What the disk tier does on a thread of its own: sync, delete what has expired, trim to lower limits, reap readers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import lmdb

from tierkv.tiers.disk_catalog import Catalog
from tierkv.tiers.disk_health import DiskHealth
from tierkv.tiers.disk_lifetimes import Lifetimes
from tierkv.tiers.disk_room import Room
from tierkv.tiers.environment import Environment

logger = logging.getLogger("tierkv")

#: How often expired entries are deleted. They are misses at once.
_SWEEP_S = 1.0
#: How many are deleted while stores wait.
_SWEEP_ENTRIES = 64
#: How long closing may wait for the last sync.
_CLOSE_S = 10.0


class Upkeep:
    """The tier's thread, from :meth:`start` to :meth:`close`.

    Args:
        catalog, room, lifetimes, health: the tier's parts.
        write: the tier's write lock.
        reopen: opens an environment again that an error broke, or one that could not be opened then.
        sync_interval_s: seconds between syncs of what changed.
    """

    def __init__(
        self,
        catalog: Catalog,
        room: Room,
        lifetimes: Lifetimes,
        health: DiskHealth,
        write: threading.RLock,
        reopen: Callable[[Path], object],
        sync_interval_s: float,
    ) -> None:
        self._catalog = catalog
        self._room = room
        self._lifetimes = lifetimes
        self._health = health
        self._write = write
        self._reopen = reopen
        self._sync_interval_s = sync_interval_s
        self._wake = threading.Event()
        self._trimming = False
        self.stopping = threading.Event()
        self.lost: set[Path] = set()  # environments that could not be opened again
        self._thread = threading.Thread(target=self._run, name="tierkv-disk", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def trim(self) -> None:
        """Have what is beyond limits that were lowered evicted soon."""
        self._trimming = True
        self._wake.set()

    def close(self, what: str) -> None:
        """Sync and close all environments, within ``_CLOSE_S``."""
        self.stopping.set()
        self._wake.set()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            logger.warning("%s is left without its last sync, which has taken %g s so far.", what, _CLOSE_S)

    def _run(self) -> None:
        sync_at = time.monotonic() + self._sync_interval_s
        while not self.stopping.is_set():
            self._wake.wait(max(0.0, min(_SWEEP_S, sync_at - time.monotonic())))
            self._wake.clear()
            if self._health.may_write() and not self.stopping.is_set():
                self._keep_up()
                if time.monotonic() >= sync_at:
                    self._sync_all()
            if time.monotonic() >= sync_at:
                sync_at = time.monotonic() + self._sync_interval_s
        with self._write:
            envs = list(self._catalog.environments.values())
        for env in envs:
            self.close_one(env)
            self._catalog.environments.pop(env.ns_id, None)

    def _keep_up(self) -> None:
        try:
            for env in list(self._catalog.environments.values()):
                while self._look_after(env) and not self.stopping.is_set():
                    pass  # stores come in between
            for directory in list(self.lost):
                with self._write:
                    if directory in self.lost:  # a store may just have opened it
                        self._reopen(directory)
            while self._trimming and not self.stopping.is_set():
                with self._write:
                    self._trimming = self._room.trim()
        except (lmdb.Error, OSError) as error:
            self._health.write_failed(error)

    def _look_after(self, env: Environment) -> bool:
        """Delete some of what has expired in an environment, or repair it; returns whether there is more to delete."""
        with self._write:
            if self._catalog.environments.get(env.ns_id) is not env:
                return False
            if env.broken:
                self._reopen(env.directory)
                return False
            had_dead = bool(env.index.dead) or env.index.is_due(self._catalog.clock())
            self._room.sweep(env, most=_SWEEP_ENTRIES)
            if had_dead and not env.index.entries and not env.index.foreign:
                self._room.destroy(env)
                return False
            self._lifetimes.forget_ended(env)
            return bool(env.index.dead)

    def _sync_all(self) -> None:
        for env in list(self._catalog.environments.values()):
            if env.dirty or env.index.used:
                self.flush(env)
            if env.enter():
                try:
                    env.reap_readers()
                except lmdb.Error as error:
                    self._health.write_failed(error, env)
                finally:
                    env.leave()

    def flush(self, env: Environment) -> bool:
        """Write use counters and sync; return whether all of it reached the disk."""
        try:
            # Nobody may wait for the write lock while inside an environment: who holds it may be closing that one.
            with self._write:
                if env.broken or env.closed:
                    return False
                self.write_use(env)
                env.enter()
                env.syncing = True
            try:
                env.sync()
            finally:
                env.syncing = False
                env.leave()
            return True
        except (lmdb.Error, OSError) as error:
            self._health.write_failed(error, env)
            return False

    def write_use(self, env: Environment) -> None:
        """Write what was used since the last time. The write lock is held.

        Raises:
            lmdb.Error: the disk failed.
        """
        with self._catalog.lock:
            used, env.index.used = env.index.used, set()
            entries = [(key, env.index.entries[key]) for key in used if key in env.index.entries]
            uses = [(key, entry.last_used, entry.num_hits) for key, entry in entries]
        if uses:
            env.write_use(uses)

    def close_one(self, env: Environment) -> None:
        """Sync and close an environment."""
        clean = self.flush(env)
        with suppress(OSError):  # the mark that stays says that it was not closed properly, which is then the truth
            env.close(clean=clean)
