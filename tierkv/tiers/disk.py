"""The ``disk`` tier: LMDB on a local disk, one environment a namespace, all of whose records have one size.

Theory of operation. Under the tier's directory each namespace has ``ns/<32 hex digits>/`` with LMDB's two files and a
mark (:mod:`tierkv.tiers.disk_mark`). Six named databases, written down in ``docs/formats.md``::

    records   key -> record (tierkv.payload), padded so that it fills whole pages
    heads     key -> the record's header, the number of its first page, and when it was stored
    tokens    key -> the chunk's token ids, 4 bytes each, where the user has them stored
    use       key -> last use and number of hits
    life      key -> a time at which it expires, and its pins
    meta      the format, and the namespace's description

*Index.* What is stored is also known in memory (:mod:`tierkv.tiers.disk_index`), rebuilt from ``heads`` at open: a
match costs no I/O, opening does not read the records, and a process that was killed loses nothing.

*Crashes.* Writes are synced in the background, so a crash of the operating system may lose or tear pages. The mark
holds the machine's boot id while the environment is open and ``clean`` afterwards; an environment whose mark names
another boot is not even opened: it starts empty.

*Budget.* Budget and quotas are exact over the pages of live records (:mod:`tierkv.tiers.disk_room`). An LMDB file never
shrinks by itself: its free pages are used again, and those of namespaces that are not being written are given back to
the filesystem. Allocated blocks are bounded too. An LMDB transaction uses again the pages freed two transactions
earlier: a file overshoots its live records by a few transactions' bytes.

*Faults.* Where writing fails (a full disk, an error of the device) the tier is read-only for a back-off: stores answer
at once, and the next one after it tries. Where reading fails it is out, likewise. What takes seconds has failed too
(:mod:`tierkv.tiers.disk_health`): only who had asked before waits for a disk that hangs. Payloads are read with
``preadv``, so that a device's error is an answer; LMDB's own pages (under 1 %) are read by its map, where it kills the
process, and whoever launched the server launches it again.

*Concurrency.* One write lock, one writer. Reads take a short read transaction a record and copy out within it; an
environment counts who is inside and is closed only when nobody is. One thread syncs, sweeps and trims.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import lmdb

from tierkv.errors import ConfigError, RefusedError
from tierkv.health import Repeated
from tierkv.layout import Namespace
from tierkv.payload import BadRecordError, ForeignRecordError
from tierkv.policy import DEFAULT_POLICY, Hint
from tierkv.sizes import format_size
from tierkv.tiers.base import (
    Counters,
    EntryInfo,
    Fetched,
    Limits,
    Offer,
    Pin,
    Record,
    Ref,
    Sink,
    Status,
    TierStat,
    Usage,
)
from tierkv.tiers.disk_catalog import Catalog
from tierkv.tiers.disk_compact import Compaction, Slack, remove_leftovers, slack
from tierkv.tiers.disk_health import DiskHealth
from tierkv.tiers.disk_index import IndexEntry
from tierkv.tiers.disk_lifetimes import Lifetimes
from tierkv.tiers.disk_mark import NotOursError, read_boot_id
from tierkv.tiers.disk_memory import keep_freed_memory
from tierkv.tiers.disk_open import open_all, open_environment
from tierkv.tiers.disk_order import PolicyFactory
from tierkv.tiers.disk_room import OnEvict, Protected, Room, WantsEvicted
from tierkv.tiers.disk_space import FreeSpace
from tierkv.tiers.disk_upkeep import Upkeep
from tierkv.tiers.environment import PAGE_NBYTES, Environment
from tierkv.tiers.filesystem import check_directory

logger = logging.getLogger("tierkv")

MIN_BUDGET = 16 << 20

_MIN_MAP = 64 << 20
#: Records that are not in memory are read from the disk this far ahead.
_AHEAD_NBYTES = 8 << 20
#: How often a store that waits for others looks whether they hang.
_PATIENCE_S = 0.5


class DiskTier:
    """Records in LMDB databases below one directory, within an exact budget.

    Args:
        path: the directory; the caller is its only owner (it holds a lock on it).
        limits: what it may hold, or only its budget: bytes that live records may take, in whole pages. Files may take a
            tenth more, and a few transactions.
        clock: wall clock, seconds since 1970.
        sync_interval_s: seconds between background syncs of what changed.
        on_evict: called with each record that goes to make room (not one that expires, or goes by order), before it is
            gone. Header, padded record and token ids are valid during the call only; namespace and key are in the
            header. It runs under the tier's write lock: it copies and queues, or does nothing, and calls no tier. What
            it raises is logged once. Not called for what goes while the tier is being opened.
        wants_evicted: asked before that with namespace and key: the record is read only where it says yes.
        policy: the name of the policy that says what is worth a write and what goes (:mod:`tierkv.policy`), or what
            makes one.

    Raises:
        ConfigError: the directory cannot be used, is on a network filesystem, or holds another version's database, or
            the budget is impossible.

    Notes:
        Thread-safe, and bounded as :mod:`tierkv.tiers.base` promises; a store may wait for one being made.
    """

    name = "disk"

    def __init__(
        self,
        path: Path,
        limits: Limits | int,
        *,
        clock: Callable[[], float] = time.time,
        sync_interval_s: float = 5.0,
        on_evict: OnEvict | None = None,
        wants_evicted: WantsEvicted = lambda ns_id, key: True,
        policy: str | PolicyFactory = DEFAULT_POLICY,
    ) -> None:
        limits = _checked(limits)
        check_directory(path)
        keep_freed_memory()
        self._root = path / "ns"
        self._clock = clock
        self._map_size = _map_size(limits)
        self._boot_id = read_boot_id()
        self._health = DiskHealth(path)
        self._damage = Repeated()
        self._counters = Counters()
        self._write = threading.RLock()  # one writer at a time; taken before the catalog's lock
        self._catalog = Catalog(limits, clock, policy, self._counters.count_expired)
        self._environments = self._catalog.environments
        space = FreeSpace(self._root)
        self._room = Room(self._catalog, self._counters, space, on_evict, wants_evicted, self._health.write_failed)
        self._lifetimes = Lifetimes(self._catalog, self._health, self._write)
        self._upkeep = Upkeep(
            self._catalog, self._room, self._lifetimes, self._health, self._write, self._reopen, sync_interval_s
        )
        self._known: dict[bytes, Namespace] = {}
        self._compaction: Compaction | None = None
        self._compacting = threading.Lock()
        remove_leftovers(self._root)
        open_all(path, self._open, self._upkeep.close_one)
        with self._write, suppress(lmdb.Error, OSError):  # a disk that takes no deletion now says so at the next store
            while self._room.trim(hooked=False):
                pass
        self._upkeep.start()

    # The contract: what is there

    def add_namespace(self, namespace: Namespace) -> None:
        """Make a namespace known. Its environment is created with its first record."""
        self._known.setdefault(namespace.ns_id(), namespace)

    def namespaces(self) -> dict[bytes, Namespace]:
        return {ns_id: env.namespace for ns_id, env in list(self._environments.items()) if env.index.entries}

    def match(self, ns_id: bytes, refs: Sequence[Ref]) -> list[bool]:
        env = self._environment(ns_id)
        if env is None or not self._health.may_read():
            return [False] * len(refs)
        return self._catalog.stored(env, refs)

    def entries(self, ns_id: bytes) -> Iterator[EntryInfo]:
        env = self._environment(ns_id)
        if env is None:
            return
        now, limits = self._clock(), self._catalog.limits
        with self._catalog.lock:
            snapshot = list(env.index.entries.items())
        for key, entry in snapshot:
            if entry.hold > now or entry.expires(limits) > now:
                yield entry.info(key, env.cost, limits, now)

    def usage(self, ns_id: bytes) -> dict[bytes, Usage]:
        env = self._environment(ns_id)
        return {} if env is None else self._catalog.usage(env)

    def tokens(self, ns_id: bytes, ref: Ref) -> bytes:
        env = self._environment(ns_id)
        if env is None or not self._catalog.stored(env, [ref])[0] or not env.enter():
            return b""
        try:
            return env.tokens(ref.key)
        except lmdb.Error as error:
            self._health.read_failed(error, env)
            return b""
        finally:
            env.leave()

    def retry_in_s(self) -> float:
        return self._health.retry_in_s()

    def stat(self) -> TierStat:
        envs = list(self._environments.values())
        stat = self._counters.stat(
            self.name,
            self._health.writes,
            num_entries=sum(len(env.index.entries) for env in envs),
            nbytes=sum(env.index.live_nbytes for env in envs),
            budget=self._room.budget,
            pinned_nbytes=self._catalog.pinned_nbytes(),
            policy=self._catalog.order.name,
        )
        return self._health.mark(stat)

    def allocated_nbytes(self) -> int:
        """Return the bytes that the data files of all namespaces take from the filesystem."""
        return self._catalog.allocated_nbytes()

    # The contract: reading

    def fetch(
        self, ns_id: bytes, refs: Sequence[Ref], sink: Sink, *, quiet: bool = False, keep: bool = False
    ) -> list[Fetched]:
        env = self._environment(ns_id)
        if not self._health.may_read():
            results = [Fetched(Status.ERROR)] * len(refs)
        elif env is None or not env.enter():
            results = [Fetched(Status.MISS)] * len(refs)
        else:
            results = self._fetch_from(env, refs, sink, quiet, keep)
        if quiet:
            self._counters.count_bad(sum(r.status is Status.BAD for r in results))
        else:
            self._counters.count_fetched(results)
        return results

    def _fetch_from(self, env: Environment, refs: Sequence[Ref], sink: Sink, quiet: bool, keep: bool) -> list[Fetched]:
        began = self._health.reads.now()
        try:
            entries = self._catalog.find(env, refs)
            ahead = max(1, _AHEAD_NBYTES // env.cost)
            results = []
            for i, entry in enumerate(entries):
                for later in entries[i + ahead : i + ahead + 1] if i else entries[1 : ahead + 1]:
                    if later is not None:
                        env.prefetch(later.page)
                results.append(self._fetch_one(env, refs[i].key, entry, i, sink))
        finally:
            env.leave()
        found = [
            (ref.key, entry)
            for ref, entry, result in zip(refs, entries, results, strict=True)
            if result.status is Status.OK and entry is not None
        ]
        if found and not any(result.status is Status.ERROR for result in results):
            self._health.reads.worked(began)
        if found and not quiet:
            self._catalog.note_use(env, found)
        if not keep:
            self._discard(env, [ref.key for ref, r in zip(refs, results, strict=True) if r.status is Status.BAD])
        return results

    def _fetch_one(self, env: Environment, key: bytes, entry: IndexEntry | None, at: int, sink: Sink) -> Fetched:
        if entry is None:
            return Fetched(Status.MISS)
        if not self._health.may_read():  # since the one before failed
            return Fetched(Status.ERROR)
        parts = sink(at)
        try:
            with self._health.reading:
                header = env.read(key, entry.page, parts)
        except BadRecordError as error:
            self._damage.note("The disk tier has a damaged record: %s", str(error))
            return Fetched(Status.BAD)
        except ForeignRecordError:
            self._unindex_foreign(env, key)
            return Fetched(Status.MISS)
        except (lmdb.Error, OSError) as error:
            self._health.read_failed(error, env)
            return Fetched(Status.ERROR)
        return Fetched(Status.MISS) if header is None else Fetched(Status.OK, header)

    def _unindex_foreign(self, env: Environment, key: bytes) -> None:
        """Forget a record that turned out to be another version's: it stays, and keeps its place in the budget."""
        if key in env.index.entries:
            self._catalog.remove(env, [key])
            with self._catalog.lock:
                env.index.foreign.add(key)

    def _discard(self, env: Environment, keys: Sequence[bytes]) -> None:
        if not keys:
            return
        with self._write:
            if self._environments.get(env.ns_id) is env:
                self._try_remove(env, [key for key in dict.fromkeys(keys) if key in env.index.entries])

    # The contract: writing

    def store(self, ns_id: bytes, records: Sequence[Record], *, offer: Offer = Offer.ORDER) -> list[Status]:
        statuses: list[Status] = []
        if self._take_write_lock():
            began = self._health.writes.now()
            try:
                if ns_id in self._known and self._health.may_write() and not self._upkeep.stopping.is_set():
                    self._store_all(ns_id, records, offer, statuses)
                    if Status.OK in statuses:
                        self._health.writes.worked(began)
            except (lmdb.Error, OSError) as error:
                self._health.write_failed(error, self._environments.get(ns_id))
            finally:
                self._write.release()
        statuses += [Status.ERROR] * (len(records) - len(statuses))
        self._counters.count_stored(statuses)
        return statuses

    def _take_write_lock(self) -> bool:
        """Take the write lock, unless nothing may be written anyway: whoever has it may hang in the disk."""
        while not self._write.acquire(timeout=_PATIENCE_S):
            if not self._health.may_write():
                return False
        return True

    def _store_all(self, ns_id: bytes, records: Sequence[Record], offer: Offer, statuses: list[Status]) -> None:
        """Store ``records`` batch by batch and append their results to ``statuses``.

        Raises:
            lmdb.Error, OSError: the disk failed; the results of the batches before it are there.
        """
        env = self._writable(ns_id)
        keep = {(ns_id, r.header.key) for r in records} | {(ns_id, r.header.parent) for r in records}
        step = max(1, self._room.txn_nbytes // env.cost)
        for at in range(0, len(records), step):
            with self._health.writing:
                statuses += self._store_batch(env, records[at : at + step], offer, keep.__contains__)

    def _store_batch(
        self, env: Environment, records: Sequence[Record], offer: Offer, protected: Protected
    ) -> list[Status]:
        """Evict in one transaction, put in the next: pages that were freed are used again."""
        self._room.sweep(env, keys=[record.header.key for record in records])
        statuses = [Status.EXISTS if env.fits(record) else Status.ERROR for record in records]
        new: dict[bytes, int] = {}  # key -> where it is first in ``records``
        for i, record in enumerate(records):
            if statuses[i] is Status.EXISTS and record.header.key not in env.index.entries:
                new.setdefault(record.header.key, i)
        wanted = sorted((records[i] for i in new.values()), key=lambda record: record.header.position)
        results: dict[bytes, Status] = {}
        if offer is not Offer.ORDER:
            wanted, refused = self._room.choose(env, wanted, protected)
            results = dict.fromkeys(refused, Status.DECLINED)
        todo = self._room.make(env, wanted, protected)
        results |= zip((r.header.key for r in todo), self._put(env, todo, protected), strict=False)
        for i, record in enumerate(records):
            key = record.header.key
            if statuses[i] is Status.EXISTS and key in new:
                result = results.get(key, Status.DROPPED)
                if new[key] == i or result in (Status.DROPPED, Status.DECLINED):
                    statuses[i] = result
        return statuses

    def _put(self, env: Environment, records: Sequence[Record], protected: Protected) -> list[Status]:
        """Write and index records; nothing is returned where the map is full even after an eviction."""
        if not records:
            return []
        now = self._clock()
        try:
            done = env.put(records, now)
        except lmdb.MapFullError:
            self._room.make_after_full_map(env, len(records), protected)
            try:
                done = env.put(records, now)
            except lmdb.MapFullError:
                return []
        with self._catalog.lock:
            for record, result in zip(records, done, strict=True):
                if isinstance(result, IndexEntry):
                    self._catalog.add(env, record.header.key, result)
        return [Status.OK if isinstance(result, IndexEntry) else result for result in done]

    # The contract: what the policy is told

    def note(self, ns_id: bytes, tenant: bytes, keys: Sequence[bytes], hint: Hint | None = None) -> None:
        self._catalog.note(ns_id, tenant, keys, hint)

    def release(self, ns_id: bytes, session: str) -> bool:
        return self._catalog.release(ns_id, session)

    def worth(self, ns_id: bytes, key: bytes) -> float:
        return self._catalog.worth((ns_id, key))

    def joined(self, engine: str, ns_id: bytes, most: int) -> None:
        self._catalog.joined(engine, ns_id, most)

    def left(self, engine: str) -> None:
        self._catalog.left(engine)

    def hold(self, engine: str, took: Sequence[bytes], gone: Sequence[bytes]) -> bool:
        return self._catalog.hold(engine, took, gone)

    # The contract: taking away

    def evict(self, ns_id: bytes, refs: Sequence[Ref], *, force: bool = False) -> int:
        with self._write:
            env = self._environment(ns_id)
            if env is None:
                return 0
            now = self._clock()
            keys = [key for key, entry in self._catalog.entries_of(env, refs) if force or entry.hold <= now]
            num = self._try_remove(env, keys)
            self._counters.count_removed(num)
            return num

    def drop_namespace(self, ns_id: bytes) -> int:
        with self._write:
            env = self._environment(ns_id)
            if env is None:
                return 0
            num = self._room.destroy(env)
            self._counters.count_removed(num)
            return num

    # The contract: lifetimes and limits

    def pin(self, ns_id: bytes, refs: Sequence[Ref], pin: Pin) -> list[bool]:
        env = self._environment(ns_id)
        return [False] * len(refs) if env is None else self._lifetimes.pin(env, refs, pin)

    def unpin(self, ns_id: bytes, refs: Sequence[Ref], owner: str = "") -> int:
        env = self._environment(ns_id)
        return 0 if env is None else self._lifetimes.unpin(env, refs, owner)

    def expire_at(self, ns_id: bytes, refs: Sequence[Ref], until: float) -> int:
        env = self._environment(ns_id)
        return 0 if env is None else self._lifetimes.expire_at(env, refs, until)

    def set_limits(self, limits: Limits) -> None:
        """Change the limits; a thread of the tier's own evicts what is beyond them.

        Raises:
            ConfigError: the budget is impossible; nothing was changed.
        """
        limits = _checked(limits)
        with self._write:
            self._map_size = max(self._map_size, _map_size(limits))
            self._catalog.set_limits(limits)
        self._upkeep.trim()

    # Compaction

    def slack(self, ns_ids: Sequence[bytes]) -> dict[bytes, Slack]:
        """Return what compacting each of these namespaces would come to; those that are not here are left out.

        Raises:
            RefusedError: the disk could not be read.
        """
        with self._write:
            envs = [env for ns_id in ns_ids if (env := self._environment(ns_id)) is not None and not env.broken]
            try:
                return {env.ns_id: slack(env, self._catalog.limits.reserve_nbytes) for env in envs}
            except (lmdb.Error, OSError) as error:
                raise RefusedError(f"the disk could not be read ({error}); see 'tierkv stat'") from None

    def compact(self, ns_id: bytes) -> Compaction:
        """Begin to write a namespace's file anew, smaller; whoever asks makes its steps and ends it.

        Raises:
            RefusedError: there is not enough free space, another one is under way, or it cannot be done here.
        """
        env = self._environment(ns_id)
        if env is None:
            raise RefusedError("this namespace is not on the disk any more")
        with self._compacting:
            if self._compaction is not None and not self._compaction.ended:
                raise RefusedError("another compaction is under way")
            self._compaction = Compaction(
                env, self._catalog, self._write, self._health, self._discard_bad, self._boot_id
            )
            return self._compaction

    def _discard_bad(self, env: Environment, keys: Sequence[bytes]) -> None:
        """Delete records that a compaction found damaged."""
        self._counters.count_bad(len(keys))
        self._discard(env, keys)

    # Environments; the write lock is held

    def _environment(self, ns_id: bytes) -> Environment | None:
        return None if self._upkeep.stopping.is_set() else self._environments.get(ns_id)

    def _writable(self, ns_id: bytes) -> Environment:
        """Return the environment to write to: created if need be, opened again where an error or its size asks for it.

        Raises:
            lmdb.Error, OSError: it cannot be opened.
        """
        env = self._environments.get(ns_id)
        directory = self._root / ns_id.hex()
        if env is None or env.broken or env.map_size < self._map_size:
            env = self._reopen(directory)
        if env is None:
            env = Environment(directory, self._map_size, self._boot_id, self._known[ns_id])
            self._catalog.add_environment(env)
        return env

    def _reopen(self, directory: Path) -> Environment | None:
        """Open an environment, closing it first if it is open; None where there is nothing to open.

        Raises:
            lmdb.Error, OSError: it cannot be opened; its entries are misses until it can.
        """
        env = self._environments.get(bytes.fromhex(directory.name))
        if env is not None:
            if not env.broken:
                self._room.sweep(env)  # what has expired would come back with another limit
                self._upkeep.write_use(env)
            self._catalog.forget(env)
            env.close(clean=False)
        self._upkeep.lost.add(directory)
        try:
            env = self._open(directory)
        except NotOursError as error:
            raise OSError(f"{directory}: {error}") from None
        self._upkeep.lost.discard(directory)
        return env

    def _open(self, directory: Path) -> Environment | None:
        env = open_environment(directory, self._map_size, self._boot_id)
        if env is not None:
            self._counters.count_bad(env.num_bad)
            self._known[env.ns_id] = env.namespace
            self._catalog.add_environment(env)
        return env

    def _try_remove(self, env: Environment, keys: Sequence[bytes]) -> int:
        try:
            return self._room.remove([(env.ns_id, key) for key in keys])
        except (lmdb.Error, OSError) as error:
            self._health.write_failed(error, env)
            return 0

    def close(self) -> None:
        """Sync and close. Idempotent.

        After ten seconds it goes without the rest of the sync: the entries are then lost if the machine crashes before
        the system has written its cache, and else are not.
        """
        if self._compaction is not None:
            self._compaction.end()
        if not self._upkeep.stopping.is_set():
            self._upkeep.close(f"The disk tier ({self._root.parent})")


def _checked(limits: Limits | int) -> Limits:
    limits = Limits(budget=limits) if isinstance(limits, int) else limits
    if limits.budget is None or limits.budget < MIN_BUDGET:
        given = "none" if limits.budget is None else format_size(limits.budget)
        raise ConfigError(
            f"disk_bytes={given} is too small to hold anything; set it to at least {format_size(MIN_BUDGET)}"
        )
    return limits


def _map_size(limits: Limits) -> int:
    """Return the size of an environment's map: twice the budget, in whole pages."""
    return max(_MIN_MAP, -(-2 * (limits.budget or 0) // PAGE_NBYTES) * PAGE_NBYTES)
