"""Gives disk space back: a namespace's records are copied into a new file, which then takes the old one's place.

Theory of operation. LMDB never shrinks its file. Pages of records that go are given back one by one where the
filesystem can do that (:meth:`Environment.punch`); the pages of the trees, those that the next transactions are to use,
and all of them on other filesystems stay. A :class:`Compaction` copies what is live, a step at a time, chain by chain,
into an environment in a directory of its own beside the namespace's, while the tier goes on. Every record is read as a
fetch reads it, and verified: what is damaged is deleted, and not copied.

*What changes meanwhile* is found by comparison: entries of the index are objects, and a key whose object is another,
or none, has changed since it was copied. So no store, no eviction and no read knows of a compaction. What has changed
is copied until little is left; the last of it is done under the tier's write lock, as long as one batch of stores holds
it. Then the file changes place (:meth:`Environment.adopt`): one rename, with nobody reading. The index stays, and with
it the order of eviction, quotas, pins, and what engines' filters know; only places in the file are noted anew.

*Crashes.* A process that is killed leaves the old file or the new one, and perhaps a directory that the next opening
removes (:func:`remove_leftovers`). After a crash of the machine the environment starts empty, as always.

*Space.* The copy takes as much of the volume as what is live, beside the budget and never from the reserve; where that
is not free nothing is begun, and a volume that fills up meanwhile ends the compaction with nothing changed.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import lmdb

from tierkv.errors import RefusedError
from tierkv.payload import HEADER_NBYTES, BadRecordError, ForeignRecordError
from tierkv.sizes import format_size
from tierkv.tiers.base import Record
from tierkv.tiers.disk_catalog import Catalog
from tierkv.tiers.disk_health import DiskHealth
from tierkv.tiers.disk_index import IndexEntry
from tierkv.tiers.environment import Environment, Life

logger = logging.getLogger("tierkv")

_LEFTOVER = re.compile(r"[0-9a-f]{32}\.compact-[0-9a-f]{8}")
#: Bytes of records that one step copies, or one record; and what may be left for the last, under the write lock.
STEP_NBYTES = 8 << 20
#: Written bytes after which a step brings them to the disk: the memory of the machine is not ours to fill.
_SYNC_NBYTES = 256 << 20
#: Where a namespace would give back less than this part of its file, copying all of it is not worth it.
WORTH_SHARE = 64
_WORTH_NBYTES = 1 << 20
#: Pages that the copy's own transactions leave free.
_SPARE_NBYTES = 1 << 20
#: How long readers may keep the new file from its place before the next try, and how many tries there are.
_ADOPT_S = 2.0
_MAX_ROUNDS = 64
#: What was stored while the last was copied is copied in turn, until it is little. Stores have to be slower than that.
_MAX_CHASES = 32
_CHASE_NBYTES = 64 << 20
_MOVED = "this namespace was removed, or opened anew, meanwhile; nothing was compacted"
_FOREIGN = "it holds records of another version of TierKV, which are left as they are"


class Slack(NamedTuple):
    """What compacting a namespace would come to, in bytes.

    Attributes:
        before_nbytes: what its file takes now.
        after_nbytes: what it would take.
        worth: whether that is worth a copy of all of it.
        reason: why it cannot be done, in a sentence; empty where it can.
    """

    num_chunks: int
    before_nbytes: int
    after_nbytes: int
    worth: bool
    reason: str

    @property
    def needed_nbytes(self) -> int:
        """Free space that the copy needs."""
        return self.after_nbytes + _SPARE_NBYTES


class _Copied(NamedTuple):
    """What was written of an entry, and what was known of it then."""

    entry: IndexEntry
    page: int
    last_used: float
    num_hits: int
    life: Life


class Compaction:
    """One namespace's compaction, from its first step to :meth:`end`.

    Args:
        env: the environment; the tier's, until another one is there.
        catalog, write, health: the tier's parts.
        discard: deletes records that turned out damaged.
        boot_id: of this boot.

    Attributes:
        num_total, num_done: chunks to copy, of those that there were at the start, and copied.
        num_bad: damaged records that were found, and deleted.
        before_nbytes, after_nbytes: what the file took at the start, and took when the new one came.
        done: the new file has taken the old one's place.
        ended: :meth:`end` was called.

    Raises:
        RefusedError: there is not enough free space, or it cannot be done here.

    Notes:
        Thread-safe: one step at a time, and :meth:`end` after it.
    """

    def __init__(
        self,
        env: Environment,
        catalog: Catalog,
        write: threading.RLock,
        health: DiskHealth,
        discard: Callable[[Environment, Sequence[bytes]], None],
        boot_id: str,
    ) -> None:
        self._env = env
        self._catalog = catalog
        self._write = write
        self._health = health
        self._discard = discard
        self._copied: dict[bytes, _Copied] = {}
        self._rounds = 0
        self._unsynced = 0
        self._lock = threading.Lock()
        self.ended = False
        self.done = False
        self.num_bad = 0
        with write:
            self._check_current()
            found = slack(env, catalog.limits.reserve_nbytes)
            entries = dict(env.index.entries)
        if found.reason:
            raise RefusedError(found.reason)
        self._todo = deque(chain_order(entries))
        self.before_nbytes = self.after_nbytes = found.before_nbytes
        self.num_total, self.num_done = len(self._todo), 0
        directory = env.directory.with_name(f"{env.directory.name}.compact-{secrets.token_hex(4)}")
        try:
            self._new = Environment(directory, env.map_size, boot_id, env.namespace)
        except (lmdb.Error, OSError) as error:
            shutil.rmtree(directory, ignore_errors=True)
            raise RefusedError(f"a new file cannot be made ({_why(error)}); nothing was changed") from None

    def step(self) -> int:
        """Copy a step, or let the copy take the file's place; returns the bytes that were written.

        Raises:
            RefusedError: it cannot go on. Nothing was changed; :meth:`end` is to follow.
        """
        with self._lock:
            if self.ended:
                raise RefusedError("this compaction was ended: nobody went on with it, or the server leaves")
            try:
                if self._todo:
                    return self._copy(self._next())
                self._sync()
                return self._finish()
            except (lmdb.Error, OSError) as error:
                raise RefusedError(f"the copy could not be written ({_why(error)}); nothing was changed") from None

    def end(self) -> None:
        """Remove what is not needed any more: the copy, or the old file. Idempotent."""
        with self._lock:
            if not self.ended:
                self.ended = True
                self._new.close(clean=False)  # without the write lock: an old file may take a while to go
                shutil.rmtree(self._new.directory, ignore_errors=True)

    # Copying

    def _next(self) -> list[bytes]:
        num = max(1, STEP_NBYTES // self._env.cost)
        return [self._todo.popleft() for _ in range(min(num, len(self._todo)))]

    def _copy(self, keys: Sequence[bytes]) -> int:
        """Copy records as they are now and return their bytes; those that have gone are passed over."""
        nbytes = len(keys) * self._env.cost
        self._need_room(nbytes)
        copies, bad = self._read(keys)
        if copies:
            before = [(e.last_used, e.num_hits, _life(e)) for _, e in copies]
            pages = self._new.put_copies(copies)
            for (record, entry), page, known in zip(copies, pages, before, strict=True):
                self._copied[record.header.key] = _Copied(entry, page, *known)
        if bad:
            self.num_bad += len(bad)
            self._discard(self._env, bad)
        self.num_done = min(self.num_total, self.num_done + len(keys))
        self._unsynced += nbytes
        if self._unsynced >= _SYNC_NBYTES:
            self._sync()
        return len(copies) * self._env.cost

    def _read(self, keys: Sequence[bytes]) -> tuple[list[tuple[Record, IndexEntry]], list[bytes]]:
        """Return the records of keys, verified, with their entries, and the keys of damaged ones.

        Raises:
            RefusedError: the environment is not there any more, or the disk cannot be read.
        """
        env, found, bad = self._env, [], []
        if not env.enter():
            raise RefusedError(_MOVED)
        try:
            for key in keys:
                entry = env.index.entries.get(key)
                if entry is None:
                    continue
                data = memoryview(bytearray(env.record_nbytes))
                try:
                    with self._health.reading:
                        header = env.read(key, entry.page, [data[HEADER_NBYTES : HEADER_NBYTES + env.payload_nbytes]])
                except BadRecordError:
                    if env.index.entries.get(key) is entry:  # else it has just gone, and its pages with it
                        bad.append(key)
                    continue
                if header is not None:
                    data[:HEADER_NBYTES] = header.pack()
                    found.append((Record(header, data, env.tokens(key)), entry))
        except ForeignRecordError:
            raise RefusedError(_FOREIGN) from None
        except (lmdb.Error, OSError) as error:
            self._health.read_failed(error, env)
            raise RefusedError(f"the disk could not be read ({_why(error)}); nothing was changed") from None
        finally:
            env.leave()
        return found, bad

    def _sync(self) -> None:
        self._new.sync()
        self._unsynced = 0

    # The last step

    def _finish(self) -> int:
        """Copy what has changed, and take the old file's place; where readers stay, not yet. Returns written bytes."""
        self._rounds += 1
        if self._rounds > _MAX_ROUNDS:
            raise RefusedError("readers do not leave the file; compact when it is quieter")
        nbytes = 0
        for _ in range(_MAX_CHASES):
            with self._write:
                self._check_current()
                gone, missing = self._changes()
                if len(missing) * self._env.cost <= STEP_NBYTES:
                    if not self._env.syncing:  # somebody is inside, for as long as a sync takes: readers would wait
                        nbytes += self._catch_up(gone, missing)
                        self.done = self._env.adopt(self._new, self._settle, _ADOPT_S)
                        self.after_nbytes = self._env.allocated_nbytes
                    return nbytes
            self._forget(gone)
            nbytes += self._copy(missing[: _CHASE_NBYTES // self._env.cost])
        raise RefusedError("stores come in faster than they are copied; compact when it is quieter")

    def _changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the keys whose copies are not what is stored, and those that have no right copy."""
        entries = dict(self._env.index.entries)
        gone = [key for key, copied in self._copied.items() if entries.get(key) is not copied.entry]
        stale = set(gone)
        missing = [key for key in entries if key in stale or key not in self._copied]
        return gone, missing

    def _forget(self, gone: Sequence[bytes]) -> None:
        """Take copies out that are not what is stored any more."""
        if gone:
            self._new.delete(gone)
            self._new.punch([(key, self._copied.pop(key).page) for key in gone])

    def _catch_up(self, gone: Sequence[bytes], missing: Sequence[bytes]) -> int:
        """Make the copy what is stored now; returns written bytes. The write lock is held."""
        self._forget(gone)
        nbytes = self._copy(missing) if missing else 0
        lives = [(key, _life(c.entry)) for key, c in self._copied.items() if _life(c.entry) != c.life]
        if lives:
            self._new.write_life(lives)
        return nbytes

    def _settle(self) -> None:
        """Note where everything is in the new file. Nobody reads."""
        index = self._env.index
        with self._catalog.lock:
            for key, copied in self._copied.items():
                if key in index.entries:
                    copied.entry.page = copied.page
                    if (copied.entry.last_used, copied.entry.num_hits) != (copied.last_used, copied.num_hits):
                        index.used.add(key)
            # What has expired since it was copied still takes its pages; what had before is not in the new file.
            index.dead = {key: self._copied[key].page for key in index.dead if key in self._copied}

    def _check_current(self) -> None:
        env = self._env
        if self._catalog.environments.get(env.ns_id) is not env or env.closed or env.broken:
            raise RefusedError(_MOVED)
        if env.index.foreign:
            raise RefusedError(_FOREIGN)

    def _need_room(self, nbytes: int) -> None:
        """See that the volume has so much to give, beside its reserve.

        Raises:
            RefusedError: it has not.
        """
        if why := _no_room(self._env.directory.parent, nbytes, self._catalog.limits.reserve_nbytes):
            raise RefusedError(why)


def slack(env: Environment, reserve_nbytes: int) -> Slack:
    """Return what compacting an environment would come to. The tier's write lock is held.

    Args:
        reserve_nbytes: of the volume, which are left to others.

    Raises:
        lmdb.Error, OSError: the disk failed.
    """
    before, after = env.allocated_nbytes, env.compact_nbytes()
    worth = before - after >= max(_WORTH_NBYTES, before // WORTH_SHARE)
    found = Slack(len(env.index.entries), before, after, worth, _FOREIGN if env.index.foreign else "")
    if found.reason:
        return found
    return found._replace(reason=_no_room(env.directory.parent, found.needed_nbytes, reserve_nbytes))


def _no_room(directory: Path, nbytes: int, reserve: int) -> str:
    """Return why the volume cannot take ``nbytes`` more beside its reserve, in a sentence; empty where it can."""
    volume = os.statvfs(directory)
    free = volume.f_bavail * volume.f_frsize
    if free - reserve >= nbytes:
        return ""
    kept = f", of which {format_size(reserve)} are its reserve (disk.reserve_bytes)" if reserve else ""
    return (
        f"the copy needs {format_size(nbytes)}, and the volume has {format_size(free)} free{kept}; make room on it, "
        f"or evict first"
    )


def chain_order(entries: Mapping[bytes, IndexEntry]) -> list[bytes]:
    """Return the keys chain by chain, ancestors first, so that a prefix is read in one sweep of the new file.

    Chains that were used last come first: what goes to make room meanwhile is then mostly not copied yet.
    """
    known = dict(entries)
    children: dict[bytes, list[bytes]] = {}
    roots = []
    for key, entry in known.items():
        if entry.parent in known and known[entry.parent].position < entry.position:
            children.setdefault(entry.parent, []).append(key)
        else:
            roots.append(key)
    order, todo = [], sorted(roots, key=lambda key: known[key].last_used)
    while todo:
        key = todo.pop()
        order.append(key)
        todo += children.get(key, ())
    return order


def remove_leftovers(root: Path) -> int:
    """Remove what compactions that were killed have left below ``root``, and return how many directories it was."""
    num = 0
    for path in [path for path in root.iterdir() if _LEFTOVER.fullmatch(path.name) and path.is_dir()]:
        with suppress(OSError):
            shutil.rmtree(path)
            num += 1
    if num:
        logger.info("The disk tier has removed what %d unfinished compactions left in %s.", num, root)
    return num


def _life(entry: IndexEntry) -> Life:
    return Life(entry.until, sorted((entry.pins or {}).items()))


def _why(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)) if isinstance(error, OSError) else str(error)
