"""The ``disk`` tier: LMDB on a local disk, one environment a namespace, all of whose records have one size.

Theory of operation. Under the tier's directory each namespace has ``ns/<32 hex digits>/`` with LMDB's two files and a
mark, ``tierkv.json``, that says the format and whether the environment was closed properly. Four named databases::

    records   key -> record (tierkv.payload), padded so that it fills whole pages
    tokens    key -> the chunk's token ids, 4 bytes each, where the user has them stored
    use       key -> last use (float64) and number of hits (uint64), little endian
    meta      b"format" -> b"tierkv-disk-1", b"namespace" -> the namespace as JSON

*Index.* What is stored is also known in memory, rebuilt from the records' headers at open, so that a match costs no I/O
and a process that was killed loses nothing.

*Crashes.* Writes are synced in the background, so a crash of the operating system may lose or tear pages. The mark
holds the machine's boot id while the environment is open and ``clean`` afterwards; an environment whose mark names
another boot is not even opened: it starts empty. The mark is a file of its own because it has to be read before a
database that may be torn is mapped.

*Budget.* The budget is exact over the pages of live records, and evicts leaves first over all namespaces. An LMDB file
never shrinks, so allocated blocks are bounded too (``_FILE_FACTOR``): where a file would grow past that, an environment
that is mostly dead is deleted whole, and until there is one the least recently used entries go. An LMDB transaction
reuses the pages freed two transactions earlier: a file overshoots its live records by a few transactions' bytes.

*Concurrency.* One write lock, one writer. Reads take a short read transaction a record and copy out within it; an
environment counts who is inside and is closed only when nobody is, because a view into a closed map kills the process.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import lmdb

from tierkv.errors import ConfigError
from tierkv.health import Health
from tierkv.layout import Namespace
from tierkv.payload import BadRecordError, ForeignRecordError
from tierkv.policy import ChainLRU
from tierkv.sizes import format_size
from tierkv.tiers.base import Counters, EntryInfo, Fetched, Record, Ref, Sink, Status, TierStat
from tierkv.tiers.environment import (
    CLEAN,
    Environment,
    IndexEntry,
    NotOursError,
    check_ours,
    delete_files,
    read_boot_id,
    read_mark,
)
from tierkv.tiers.filesystem import check_directory

logger = logging.getLogger("tierkv")

MIN_BUDGET = 16 << 20

_NS_NAME = re.compile(r"[0-9a-f]{32}")
_PAGE = 4096
_MIN_MAP = 64 << 20
_TXN_NBYTES = 8 << 20
#: Allocated blocks may exceed the budget by this factor before files are deleted, and by ``_OPEN_FACTOR`` at open,
#: where only a budget that was lowered meanwhile explains it.
_FILE_FACTOR = 1.1
_OPEN_FACTOR = 1.5


class DiskTier:
    """Records in LMDB databases below one directory, within an exact budget.

    Args:
        path: the directory; the caller is its only owner (it holds a lock on it).
        budget: bytes that live records may take, in whole pages. Files may take a tenth more, and a few transactions.
        clock: wall clock, seconds since 1970.
        sync_interval_s: seconds between background syncs of what changed.

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
        budget: int,
        *,
        clock: Callable[[], float] = time.time,
        sync_interval_s: float = 5.0,
    ) -> None:
        if budget < MIN_BUDGET:
            raise ConfigError(
                f"disk_bytes={format_size(budget)} is too small to hold anything; "
                f"set it to at least {format_size(MIN_BUDGET)}"
            )
        check_directory(path)
        self._root = path / "ns"
        self._budget = budget
        self._clock = clock
        self._sync_interval_s = sync_interval_s
        self._map_size = max(_MIN_MAP, -(-2 * budget // _PAGE) * _PAGE)
        self._txn_nbytes = min(_TXN_NBYTES, budget // 8)
        self._boot_id = read_boot_id()
        self._health = Health(f"The disk tier ({path})")
        self._counters = Counters()
        self._known: dict[bytes, Namespace] = {}
        self._environments: dict[bytes, Environment] = {}
        self._lru: ChainLRU[tuple[bytes, bytes]] = ChainLRU()
        self._write = threading.RLock()  # one writer at a time; taken before _lock
        self._lock = threading.Lock()  # the policy and the indexes; held for microseconds
        self._stop = threading.Event()
        self._open_all(path)
        self._thread = threading.Thread(target=self._sync_loop, name="tierkv-disk-sync", daemon=True)
        self._thread.start()

    # The contract

    def add_namespace(self, namespace: Namespace) -> None:
        """Make a namespace known. Its environment is created with its first record."""
        self._known.setdefault(namespace.ns_id(), namespace)

    def namespaces(self) -> dict[bytes, Namespace]:
        return {ns_id: env.namespace for ns_id, env in list(self._environments.items()) if env.index}

    def match(self, ns_id: bytes, refs: Sequence[Ref]) -> list[bool]:
        env = self._environments.get(ns_id)
        return [env is not None and ref.key in env.index for ref in refs]

    def fetch(self, ns_id: bytes, refs: Sequence[Ref], sink: Sink) -> list[Fetched]:
        env = self._environments.get(ns_id)
        if env is None or not env.enter():
            results = [Fetched(Status.MISS)] * len(refs)
        else:
            try:
                results = [self._fetch_one(env, ref, i, sink) for i, ref in enumerate(refs)]
            finally:
                env.leave()
            self._note_use(env, [ref.key for ref, r in zip(refs, results, strict=True) if r.status is Status.OK])
            self._discard(env, [ref.key for ref, r in zip(refs, results, strict=True) if r.status is Status.BAD])
        self._counters.count_fetched(results)
        return results

    def store(self, ns_id: bytes, records: Sequence[Record]) -> list[Status]:
        statuses: list[Status] = []
        with self._write:
            if ns_id in self._known and self._health.available() and not self._stop.is_set():
                try:
                    self._store_all(ns_id, records, statuses)
                    self._health.worked()
                except (lmdb.Error, OSError) as error:
                    self._failed(error, self._environments.get(ns_id))
        statuses += [Status.ERROR] * (len(records) - len(statuses))
        self._counters.count_stored(statuses)
        return statuses

    def evict(self, ns_id: bytes, refs: Sequence[Ref]) -> int:
        with self._write:
            env = self._environments.get(ns_id)
            if env is None or self._stop.is_set():
                return 0
            keys = [key for key in dict.fromkeys(ref.key for ref in refs) if key in env.index]
            num = self._try_remove([(ns_id, key) for key in keys])
            self._counters.count_evicted(num)
            return num

    def drop_namespace(self, ns_id: bytes) -> int:
        with self._write:
            env = self._environments.get(ns_id)
            if env is None or self._stop.is_set():
                return 0
            num = self._destroy(env)
            self._counters.count_evicted(num)
            return num

    def entries(self, ns_id: bytes) -> Iterator[EntryInfo]:
        env = self._environments.get(ns_id)
        if env is None:
            return
        with self._lock:
            snapshot = list(env.index.items())
        for key, entry in snapshot:
            yield entry.info(key, env.cost)

    def stat(self) -> TierStat:
        envs = list(self._environments.values())
        return self._counters.stat(
            self.name,
            self._health,
            num_entries=sum(len(env.index) for env in envs),
            nbytes=sum(env.live_nbytes for env in envs),
            budget=self._budget,
        )

    def close(self) -> None:
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        with self._write:
            for ns_id, env in list(self._environments.items()):
                env.close(clean=self._flush(env))
                del self._environments[ns_id]

    # Beyond the contract

    def tokens(self, ns_id: bytes, key: bytes) -> bytes:
        """Return the token ids stored with a chunk (``pack_tokens``), or nothing."""
        env = self._environments.get(ns_id)
        if env is None or not env.enter():
            return b""
        try:
            return env.tokens(key)
        except lmdb.Error as error:
            self._failed(error, env)
            return b""
        finally:
            env.leave()

    def allocated_nbytes(self) -> int:
        """Return the bytes that the data files of all namespaces take from the filesystem."""
        return sum(env.allocated_nbytes for env in list(self._environments.values()))

    # Reading

    def _fetch_one(self, env: Environment, ref: Ref, at: int, sink: Sink) -> Fetched:
        if ref.key not in env.index:
            return Fetched(Status.MISS)
        parts = sink(at)
        try:
            header = env.read(ref, parts)
        except BadRecordError as error:
            logger.warning("The disk tier deletes a record: %s", error)
            return Fetched(Status.BAD)
        except ForeignRecordError:
            self._unindex_foreign(env, ref.key)
            return Fetched(Status.MISS)
        except lmdb.Error as error:
            self._failed(error, env)
            return Fetched(Status.ERROR)
        return Fetched(Status.MISS) if header is None else Fetched(Status.OK, header)

    def _note_use(self, env: Environment, keys: Sequence[bytes]) -> None:
        now = self._clock()
        with self._lock:
            self._lru.touch([(env.ns_id, key) for key in keys])
            for key in keys:
                if (entry := env.index.get(key)) is not None:
                    entry.last_used = now
                    entry.num_hits += 1
                    env.used.add(key)

    def _unindex_foreign(self, env: Environment, key: bytes) -> None:
        """Forget a record that turned out to be another version's: it stays, and keeps its place in the budget."""
        with self._lock:
            if env.index.pop(key, None) is not None:
                self._lru.remove((env.ns_id, key))
                env.foreign[key] = env.cost

    def _discard(self, env: Environment, keys: Sequence[bytes]) -> None:
        if not keys:
            return
        with self._write:
            if self._environments.get(env.ns_id) is env:
                self._try_remove([(env.ns_id, key) for key in keys if key in env.index])

    # Writing; the write lock is held

    def _writable(self, ns_id: bytes) -> Environment:
        """Return the environment to write to, created if need be, opened again after an error that closed it.

        Raises:
            lmdb.Error, OSError: it cannot be opened.
        """
        env = self._environments.get(ns_id)
        if env is not None and env.broken:
            self._forget(env)
            env.close(clean=False)
            env = self._open(env.directory)
        if env is None:
            namespace = self._known[ns_id]
            env = Environment(self._root / ns_id.hex(), self._map_size, self._boot_id, namespace)
            self._environments[ns_id] = env
        return env

    def _store_all(self, ns_id: bytes, records: Sequence[Record], statuses: list[Status]) -> None:
        """Store ``records`` batch by batch and append their results to ``statuses``.

        Raises:
            lmdb.Error, OSError: the disk failed; the results of the batches before it are there.
        """
        env = self._writable(ns_id)
        keep = {(ns_id, r.header.key) for r in records} | {(ns_id, r.header.parent) for r in records}
        step = max(1, self._txn_nbytes // env.cost)
        for at in range(0, len(records), step):
            statuses += self._store_batch(env, records[at : at + step], keep.__contains__)

    def _store_batch(
        self, env: Environment, records: Sequence[Record], protected: Callable[[tuple[bytes, bytes]], bool]
    ) -> list[Status]:
        """Evict in one transaction, put in the next: pages that were freed are used again."""
        statuses = [Status.EXISTS if env.fits(record) else Status.ERROR for record in records]
        new: dict[bytes, int] = {}  # key -> where it is first in ``records``
        for i, record in enumerate(records):
            if statuses[i] is Status.EXISTS and record.header.key not in env.index:
                new.setdefault(record.header.key, i)
        todo = list(new.values())[: self._make_room(env, len(new), protected)]
        done = self._put(env, [records[i] for i in todo], protected)
        results = dict(zip((records[i].header.key for i in todo), done, strict=False))
        for i, record in enumerate(records):
            key = record.header.key
            if statuses[i] is Status.EXISTS and key in new and (key not in results or new[key] == i):
                statuses[i] = results.get(key, Status.DROPPED)
        return statuses

    def _put(
        self, env: Environment, records: Sequence[Record], protected: Callable[[tuple[bytes, bytes]], bool]
    ) -> list[Status]:
        """Write and index records; nothing is returned where the map is full even after an eviction."""
        if not records:
            return []
        try:
            done = env.put(records)
        except lmdb.MapFullError:
            self._evict(self._pick(2 * len(records) * env.cost, protected), env)
            try:
                done = env.put(records)
            except lmdb.MapFullError:
                return []
        with self._lock:
            for record, status in zip(records, done, strict=True):
                if status is Status.OK:
                    env.index[record.header.key] = IndexEntry(record.header)
                    self._lru.add((env.ns_id, record.header.key), (env.ns_id, record.header.parent))
        return done

    def _make_room(self, env: Environment, num: int, protected: Callable[[tuple[bytes, bytes]], bool]) -> int:
        """Evict until ``num`` records fit, in the budget and in the files, and return how many do."""
        if env.cost > self._budget:
            return 0
        need = num * env.cost
        excess = self._live_nbytes() + need - self._budget
        if excess > 0:
            self._evict(self._pick(excess, protected), env)
        while (excess := self._others_allocated(env) + env.live_nbytes + need - self._file_limit()) > 0:
            dead = self._mostly_dead(env)
            if dead is not None:
                self._counters.count_evicted(self._destroy(dead))
            elif not self._evict(self._pick(max(excess, self._txn_nbytes), protected), env):
                break
        room = min(
            self._budget - self._live_nbytes(),
            self._file_limit() - self._others_allocated(env) - env.live_nbytes,
        )
        return max(0, min(num, room // env.cost))

    def _pick(self, nbytes: int, protected: Callable[[tuple[bytes, bytes]], bool]) -> list[tuple[bytes, bytes]]:
        """Choose victims of at least ``nbytes``, or all there are. They are out of the policy, not yet deleted."""
        victims: list[tuple[bytes, bytes]] = []
        with self._lock:
            while nbytes > 0:
                victim = self._lru.victim(lambda item: not protected(item))
                if victim is None:
                    break
                self._lru.remove(victim)
                victims.append(victim)
                nbytes -= self._environments[victim[0]].cost
        return victims

    def _evict(self, items: Sequence[tuple[bytes, bytes]], writing: Environment | None = None) -> int:
        num = self._remove(items, writing)
        self._counters.count_evicted(num)
        return num

    def _try_remove(self, items: Sequence[tuple[bytes, bytes]]) -> int:
        try:
            return self._remove(items, None)
        except lmdb.Error as error:
            self._failed(error, None)
            return 0

    def _remove(self, items: Sequence[tuple[bytes, bytes]], writing: Environment | None) -> int:
        """Delete entries, one transaction an environment, and return how many.

        An environment that this leaves empty is deleted whole, unless it is ``writing``.

        Raises:
            lmdb.Error: the disk failed; what was not deleted is as it was, but for its place in the policy.
        """
        by_env: dict[bytes, list[bytes]] = {}
        for ns_id, key in items:
            by_env.setdefault(ns_id, []).append(key)
        try:
            for ns_id, keys in by_env.items():
                env = self._environments[ns_id]
                if len(keys) == len(env.index) and not env.foreign and env is not writing:
                    self._destroy(env)
                else:
                    env.delete(keys)
                    self._unindex(env, keys)
        except lmdb.Error:
            self._restore(items)
            raise
        return len(items)

    def _unindex(self, env: Environment, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                env.index.pop(key, None)
                env.used.discard(key)
                self._lru.remove((env.ns_id, key))

    def _restore(self, items: Sequence[tuple[bytes, bytes]]) -> None:
        """Give victims that could not be deleted back to the policy."""
        with self._lock:
            for ns_id, key in reversed(items):
                env = self._environments.get(ns_id)
                if env is not None and key in env.index and (ns_id, key) not in self._lru:
                    self._lru.add((ns_id, key), (ns_id, env.index[key].parent))

    def _destroy(self, env: Environment) -> int:
        """Delete an environment with its files, and return how many entries it had."""
        num = len(env.index)
        self._forget(env)
        try:
            env.close(clean=False)
            delete_files(env.directory)
        except OSError as error:
            self._failed(error, None)
        return num

    def _forget(self, env: Environment) -> None:
        with self._lock:
            self._environments.pop(env.ns_id, None)
            for key in env.index:
                self._lru.remove((env.ns_id, key))

    def _live_nbytes(self) -> int:
        return sum(env.live_nbytes for env in self._environments.values())

    def _others_allocated(self, env: Environment) -> int:
        return sum(other.allocated_nbytes for other in self._environments.values() if other is not env)

    def _file_limit(self) -> int:
        return int(_FILE_FACTOR * self._budget)

    def _mostly_dead(self, writing: Environment | None) -> Environment | None:
        """Return the environment, not the one being written, that gives most back for the least."""
        dead = {
            env.ns_id: env.allocated_nbytes - env.live_nbytes
            for env in self._environments.values()
            if env is not writing and not env.foreign and env.live_nbytes * 2 < env.allocated_nbytes
        }
        worth = {ns_id: nbytes for ns_id, nbytes in dead.items() if nbytes >= self._budget // 64}
        return self._environments[max(worth, key=worth.__getitem__)] if worth else None

    # Opening, syncing, closing

    def _open_all(self, path: Path) -> None:
        """Open what is there, and bring it within the budget.

        Raises:
            ConfigError: something there is not ours, or cannot be opened.
        """
        directory = self._root
        try:
            directories = [d for d in sorted(self._root.iterdir()) if _NS_NAME.fullmatch(d.name) and d.is_dir()]
            for directory in directories:
                check_ours(directory)
            for directory in directories:
                self._open(directory)
        except NotOursError as error:
            self._abandon()
            raise ConfigError(
                f"disk_dir={path} holds another version's database in {directory} ({error}), which is left as it is; "
                "set disk_dir to another directory, or remove that one"
            ) from None
        except (lmdb.Error, OSError) as error:
            self._abandon()
            raise ConfigError(
                f"disk_dir={path} holds a database in {directory} that cannot be opened ({error}); "
                "make it readable and writable for this user, or set disk_dir to another directory"
            ) from None
        self._fit()

    def _open(self, directory: Path) -> Environment | None:
        """Open an environment and index it. One that may be torn, or is damaged, is deleted instead: None."""
        mark = read_mark(directory)
        if mark is None:
            return None
        if mark.boot not in (CLEAN, self._boot_id):
            logger.warning("The disk tier starts empty in %s: the machine crashed while it was open.", directory)
            delete_files(directory)
            return None
        if not (directory / "data.mdb").exists():
            delete_files(directory)
            return None
        try:
            env = self._load(directory)
        except (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.NotFoundError) as error:
            logger.warning("The disk tier starts empty in %s: %s.", directory, error)
            delete_files(directory)
            return None
        self._counters.count_bad(env.num_bad)
        self._known[env.ns_id] = env.namespace
        with self._lock:
            self._environments[env.ns_id] = env
            for key, entry in sorted(env.index.items(), key=lambda item: (item[1].last_used, -item[1].position)):
                self._lru.add((env.ns_id, key), (env.ns_id, entry.parent))
        return env

    def _load(self, directory: Path) -> Environment:
        env = Environment(directory, self._map_size, self._boot_id)
        try:
            env.load()
        except BaseException:
            env.close(clean=False)
            raise
        return env

    def _fit(self) -> None:
        """Bring what was opened within a budget that may be smaller than the last one."""
        with self._write:
            excess = self._live_nbytes() - self._budget
            if excess > 0:
                with suppress(lmdb.Error):  # a disk that takes no deletion now will say so again at the first store
                    self._evict(self._pick(excess, lambda item: False))
            while self.allocated_nbytes() > _OPEN_FACTOR * self._budget + 4 * self._txn_nbytes:
                ours = [env for env in self._environments.values() if not env.foreign]
                if not ours:
                    break
                worst = max(ours, key=lambda env: env.allocated_nbytes - env.live_nbytes)
                self._counters.count_evicted(self._destroy(worst))

    def _abandon(self) -> None:
        for env in self._environments.values():
            with suppress(OSError):
                env.close(clean=self._flush(env))

    def _sync_loop(self) -> None:
        while not self._stop.wait(self._sync_interval_s):
            for env in list(self._environments.values()):
                if env.dirty or env.used:
                    self._flush(env)

    def _flush(self, env: Environment) -> bool:
        """Write use counters and sync; return whether all of it reached the disk."""
        try:
            # Nobody may wait for the write lock while inside an environment: who holds it may be closing that one.
            with self._write:
                if env.broken or env.closed:
                    return False
                self._write_use(env)
                env.enter()
            try:
                env.sync()
            finally:
                env.leave()
            return True
        except lmdb.Error as error:
            self._failed(error, env)
            return False

    def _write_use(self, env: Environment) -> None:
        with self._lock:
            used, env.used = env.used, set()
            entries = [(key, env.index[key]) for key in used if key in env.index]
            uses = [(key, entry.last_used, entry.num_hits) for key, entry in entries]
        if uses:
            env.write_use(uses)

    def _failed(self, error: BaseException, env: Environment | None) -> None:
        """Note a fault. After one of these LMDB refuses the environment until it is opened again."""
        if env is not None and isinstance(error, lmdb.PanicError | lmdb.CorruptedError | lmdb.PageNotFoundError):
            env.broken = True
        self._health.failed(error)
