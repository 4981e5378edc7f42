"""The ``shared`` tier: records in a Redis or Valkey that a fleet shares.

Theory of operation. Redis is authoritative: nothing here is state that another store server lacks. The names of keys
are written down in ``docs/formats.md`` and meant to last; ``ns`` is the namespace id, all numbers are in hex::

    tierkv:1:<ns>:{<anchor[:8]>}:<key>      string: a record without LMDB's padding (header and payload)
    tierkv:1:<ns>:idx:{<anchor[:1]>}        hash: key (32 raw bytes) -> msgpack array, see _Row
    tierkv:1:ns                             hash: <ns> -> the namespace as JSON

Braces are hash tags: on a Cluster a run of 64 chunks lies on one node. The records are what is stored. The index is
advisory: Redis may evict a record behind it, and a listing repairs it. Nothing outside the prefix is ever touched.

*Order.* A batch is read leaf to root, so that Redis's own LRU evicts leaves first. EXISTS does not renew life there.

*Faults.* redis-py retries nothing here. A connection that fails puts the tier out for a back-off period in which it
answers at once. A Redis that refuses writes only (full, a read-only replica) stops stores, and reads go on.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.connection import PythonRespSerializer
from redis.retry import Retry

from tierkv.errors import ConfigError
from tierkv.health import Health
from tierkv.keys import KEY_NBYTES
from tierkv.layout import Namespace
from tierkv.payload import HEADER_NBYTES, BadRecordError, ForeignRecordError, Header
from tierkv.tiers.base import Counters, EntryInfo, Fetched, Record, Ref, Sink, Status, TierStat, deliver
from tierkv.urls import redact_url, url_secrets

logger = logging.getLogger("tierkv")

T = TypeVar("T")

KEY_PREFIX = "tierkv:1:"

_NAMESPACES = b"tierkv:1:ns"
_BUCKETS = tuple(f"{i:02x}" for i in range(256))
_BATCH_KEYS = 512
_BATCH_NBYTES = 8 << 20
_PAGE_ROWS = 2048
_STAT_TTL_S = 5.0
_RESCAN_S = 60.0
_MAX_COUNTED = 100_000
_WRITES_OUT = "it takes no writes"

#: A command for Redis: its name and arguments.
_Command = tuple[Any, ...]
#: What the index says: bucket, key, and the row or None where it cannot be read.
_IndexRows = list[tuple[str, bytes, "_Row | None"]]


class _OnError(Enum):
    """What a reply that is an error means. A connection that fails is a fault of the tier in any case."""

    OUT = 1  #: the tier is out, nothing is returned
    STOP_WRITES = 2  #: Redis takes no writes; the error is among the replies
    IGNORE = 3  #: nothing; the error is among the replies


class _Row(msgspec.Struct, array_like=True, frozen=True):
    """What the index says about a record. Fields are only ever added, at the end."""

    parent: bytes
    anchor: bytes
    position: int
    num_tokens: int
    nbytes: int
    tenant: bytes
    created: float
    tokens: bytes | None = None

    @classmethod
    def of(cls, header: Header, tokens: bytes) -> _Row:
        return cls(
            header.parent,
            header.anchor,
            header.position,
            header.num_tokens,
            HEADER_NBYTES + header.raw_nbytes,
            header.tenant,
            header.created,
            tokens or None,
        )


class SharedTier:
    """Records in a Redis, shared with every other store server that uses it.

    Args:
        url: ``redis://[user:password@]host:port/db``, ``rediss://...`` or ``unix:///path?db=0``.
        timeout_s: seconds that one read from or write to Redis's socket may take.
        connect_timeout_s: seconds that connecting may take.
        clock: wall clock, seconds since 1970.

    Raises:
        ConfigError: the URL is not one. A Redis that is down is no error: the tier starts out.

    Notes:
        Thread-safe. A call takes at most one timeout more than the Redis needs to answer, and answers at once while
        the tier is out.
    """

    name = "shared"

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 1.0,
        connect_timeout_s: float = 0.5,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.url = redact_url(url)
        self._secrets = url_secrets(url)
        self._redis = redis.Redis(connection_pool=_make_pool(url, timeout_s, connect_timeout_s))
        self._clock = clock
        self._health = Health(f"The shared tier ({self.url})")
        self._writes = Health(f"Writing to the shared tier ({self.url})")
        self._counters = Counters()
        self._lock = threading.Lock()
        self._known: dict[bytes, Namespace] = {}
        self._hits: dict[tuple[bytes, bytes], int] = {}
        self._scanned_at: dict[bytes, float] = {}
        self._size = (0, 0)
        self._sized_at = float("-inf")
        self._closed = False
        self._ask([("PING",)])

    # The contract

    def add_namespace(self, namespace: Namespace) -> None:
        """Make a namespace known. Its description is written with its records."""
        self._known.setdefault(namespace.ns_id(), namespace)

    def namespaces(self) -> dict[bytes, Namespace]:
        """Return every namespace that was stored here; Redis may have evicted all its entries since."""
        replies = self._ask([("HGETALL", _NAMESPACES)])
        found = {}
        for name, description in (replies[0] if replies else {}).items():
            try:
                namespace = Namespace.from_json(description)
            except msgspec.MsgspecError:
                continue  # another version's
            if namespace.ns_id().hex().encode() == name:
                found[namespace.ns_id()] = namespace
                self.add_namespace(namespace)
        return found

    def match(self, ns_id: bytes, refs: Sequence[Ref]) -> list[bool]:
        """Return for each ref whether it is stored; after a batch with a miss no more is asked, and all is False."""
        found: list[bool] = []
        for batch in _batches(refs, _BATCH_KEYS):
            there = self._exist(ns_id, batch)
            if there is None:
                break
            found += there
            if not all(there):
                break
        return found + [False] * (len(refs) - len(found))

    def fetch(self, ns_id: bytes, refs: Sequence[Ref], sink: Sink) -> list[Fetched]:
        namespace = self._known.get(ns_id)
        if namespace is None:
            results = [Fetched(Status.MISS)] * len(refs)
        else:
            results = []
            nbytes = namespace.payload_nbytes
            for batch in _batches(list(enumerate(refs)), max(1, _BATCH_NBYTES // (HEADER_NBYTES + nbytes))):
                part = self._fetch_batch(ns_id, nbytes, batch, sink)
                if part is None:
                    break
                results += part
            results += [Fetched(Status.ERROR)] * (len(refs) - len(results))
            self._after_fetch(ns_id, refs, results)
        self._counters.count_fetched(results)
        return results

    def store(self, ns_id: bytes, records: Sequence[Record]) -> list[Status]:
        statuses: list[Status] = []
        namespace = self._known.get(ns_id)
        if namespace is not None and self._writes.available():
            nbytes = HEADER_NBYTES + namespace.payload_nbytes
            for batch in _batches(records, max(1, min(_BATCH_KEYS, _BATCH_NBYTES // nbytes))):
                part = self._store_batch(namespace, ns_id, nbytes, batch)
                if part is None:
                    break
                statuses += part
        statuses += [Status.ERROR] * (len(records) - len(statuses))
        self._counters.count_stored(statuses)
        return statuses

    def evict(self, ns_id: bytes, refs: Sequence[Ref]) -> int:
        num = sum(self._delete(ns_id, batch) or 0 for batch in _batches(refs, _BATCH_KEYS))
        self._counters.count_evicted(num)
        return num

    def drop_namespace(self, ns_id: bytes) -> int:
        num = 0
        for rows in self._index_pages(ns_id):
            num += self._delete(ns_id, [Ref(key, row.anchor) for _, key, row in rows if row]) or 0
        for keys in self._scan(ns_id):  # what the index did not know
            num += self._unlink(keys)
        names = [_index_name(ns_id, bucket) for bucket in _BUCKETS]
        self._ask([*(("UNLINK", name) for name in names), ("HDEL", _NAMESPACES, ns_id.hex())], _OnError.IGNORE)
        self._counters.count_evicted(num)
        self._sized_at = float("-inf")
        return num

    def entries(self, ns_id: bytes, *, repair: bool = False) -> Iterator[EntryInfo]:
        """Yield what is stored in a namespace, page by page.

        Index fields whose record has gone are removed. An index that is empty is built again from the records, at most
        once a minute, or now with ``repair``.
        """
        found = False
        if repair:
            self._rebuild_index(ns_id)
        for page in self._live_pages(ns_id):
            found = True
            yield from page
        if not found and not repair and self._may_rescan(ns_id) and self._rebuild_index(ns_id):
            for page in self._live_pages(ns_id):
                yield from page

    def stat(self) -> TierStat:
        num_entries, nbytes = self._measure()
        stat = self._counters.stat(self.name, self._health, num_entries=num_entries, nbytes=nbytes, budget=0)
        if self._health.up and not self._writes.up:
            stat = stat._replace(reason=f"{_WRITES_OUT}: {self._writes.reason}", since=self._writes.out_since)
        return stat

    def close(self) -> None:
        self._closed = True
        self._redis.connection_pool.disconnect()

    # Reading

    def _exist(self, ns_id: bytes, refs: Sequence[Ref]) -> list[bool] | None:
        replies = self._ask([("EXISTS", _record_name(ns_id, ref)) for ref in refs])
        return None if replies is None else [bool(reply) for reply in replies]

    def _fetch_batch(
        self, ns_id: bytes, nbytes: int, batch: Sequence[tuple[int, Ref]], sink: Sink
    ) -> list[Fetched] | None:
        """Fetch one batch; None where Redis failed. Asked leaf first, one MGET a hash tag."""
        runs: list[list[tuple[int, Ref]]] = []
        for item in reversed(batch):
            if runs and _tag(runs[-1][0][1]) == _tag(item[1]):
                runs[-1].append(item)
            else:
                runs.append([item])
        replies = self._ask([("MGET", *(_record_name(ns_id, ref) for _, ref in run)) for run in runs])
        if replies is None:
            return None
        results: dict[int, Fetched] = {}
        for run, values in zip(runs, replies, strict=True):
            for (at, ref), value in zip(run, values, strict=True):
                results[at] = Fetched(Status.MISS) if value is None else _open(value, ref, ns_id, nbytes, sink(at))
        return [results[at] for at, _ in batch]

    def _after_fetch(self, ns_id: bytes, refs: Sequence[Ref], results: Sequence[Fetched]) -> None:
        """Count hits, delete what is damaged, and take what is not there out of the index."""
        found = [ref for ref, result in zip(refs, results, strict=True) if result.status is Status.OK]
        with self._lock:
            for ref in found:
                item = (ns_id, ref.key)
                if item in self._hits or len(self._hits) < _MAX_COUNTED:
                    self._hits[item] = self._hits.get(item, 0) + 1
        bad = [ref for ref, result in zip(refs, results, strict=True) if result.status is Status.BAD]
        if bad:
            self._delete(ns_id, bad)
        gone = [ref for ref, result in zip(refs, results, strict=True) if result.status is Status.MISS]
        if gone:
            self._unindex(ns_id, gone)

    # Writing

    def _store_batch(
        self, namespace: Namespace, ns_id: bytes, nbytes: int, records: Sequence[Record]
    ) -> list[Status] | None:
        """Store one batch; None where Redis failed before anything was known."""
        there = self._exist(ns_id, [Ref(r.header.key, r.header.anchor) for r in records])
        if there is None:
            return None
        sound = [
            r.header.ns_id == ns_id and len(r.data) >= nbytes == HEADER_NBYTES + r.header.raw_nbytes for r in records
        ]
        statuses = [
            (Status.EXISTS if t else Status.OK) if s else Status.ERROR for t, s in zip(there, sound, strict=True)
        ]
        new = [i for i, status in enumerate(statuses) if status is Status.OK]
        if not new:
            return statuses

        commands: list[_Command] = [("HSETNX", _NAMESPACES, ns_id.hex(), namespace.to_json())]
        for i in new:
            header, data, tokens = records[i]
            name = _record_name(ns_id, Ref(header.key, header.anchor))
            commands.append(("SET", name, data[:nbytes], "NX"))
            commands.append(_index_command("HSET", header, tokens))
        replies = self._ask(commands, _OnError.STOP_WRITES)
        for at, i in enumerate(new):
            reply = None if replies is None else replies[1 + 2 * at]
            if replies is None or isinstance(reply, Exception):
                statuses[i] = Status.ERROR
            elif not reply:
                statuses[i] = Status.EXISTS  # another server was faster
        return statuses

    def _delete(self, ns_id: bytes, refs: Sequence[Ref]) -> int | None:
        """Delete records and their index fields; returns how many records there were, None where Redis failed."""
        if not refs:
            return 0
        num = self._unlink([_record_name(ns_id, ref) for ref in refs])
        self._unindex(ns_id, refs)
        return num

    def _unlink(self, names: Sequence[str | bytes]) -> int:
        replies = self._ask([("UNLINK", name) for name in names], _OnError.IGNORE)
        return sum(reply for reply in replies or () if isinstance(reply, int))

    def _unindex(self, ns_id: bytes, refs: Iterable[Ref]) -> None:
        buckets: dict[str, list[bytes]] = {}
        with self._lock:
            for ref in refs:
                buckets.setdefault(_bucket(ref.anchor), []).append(ref.key)
                self._hits.pop((ns_id, ref.key), None)
        self._ask([("HDEL", _index_name(ns_id, b), *keys) for b, keys in buckets.items()], _OnError.IGNORE)

    # Listing

    def _lengths(self, ns_ids: Sequence[bytes]) -> list[int]:
        """Return the fields of every index bucket of the namespaces, 256 numbers each; nothing where Redis failed."""
        names = [_index_name(ns_id, bucket) for ns_id in ns_ids for bucket in _BUCKETS]
        lengths: list[int] = []
        for batch in _batches(names, 8 * _BATCH_KEYS):
            replies = self._ask([("HLEN", name) for name in batch])
            if replies is None:
                return []
            lengths += replies
        return lengths

    def _measure(self) -> tuple[int, int]:
        """Return entries and bytes, at most a few seconds old; what was known last while the tier is out."""
        now = time.monotonic()
        if now - self._sized_at < _STAT_TTL_S:
            return self._size
        self._sized_at = now
        namespaces = self.namespaces()
        lengths = self._lengths(list(namespaces))
        if self._health.up:
            nums = [sum(lengths[i : i + 256]) for i in range(0, len(lengths), 256)]
            each = [HEADER_NBYTES + ns.payload_nbytes for ns in namespaces.values()]
            self._size = (sum(nums), sum(n * e for n, e in zip(nums, each, strict=False)))
        return self._size

    def _index_pages(self, ns_id: bytes) -> Iterator[_IndexRows]:
        """Yield the index in pages of a few thousand rows: several small buckets, or a part of a large one."""
        small: list[str] = []
        waiting = 0
        for bucket, length in zip(_BUCKETS, self._lengths([ns_id]), strict=False):
            if length > _PAGE_ROWS:
                yield from self._scan_bucket(ns_id, bucket)
            elif length:
                small.append(bucket)
                waiting += length
                if waiting >= _PAGE_ROWS:
                    yield self._whole_buckets(ns_id, small)
                    small, waiting = [], 0
        if small:
            yield self._whole_buckets(ns_id, small)

    def _whole_buckets(self, ns_id: bytes, buckets: list[str]) -> _IndexRows:
        replies = self._ask([("HGETALL", _index_name(ns_id, bucket)) for bucket in buckets])
        return [row for bucket, fields in zip(buckets, replies or (), strict=False) for row in _rows(bucket, fields)]

    def _scan_bucket(self, ns_id: bytes, bucket: str) -> Iterator[_IndexRows]:
        cursor = 0
        while True:
            replies = self._ask([("HSCAN", _index_name(ns_id, bucket), cursor, "COUNT", _PAGE_ROWS)])
            if replies is None:
                return
            cursor, fields = replies[0]
            yield _rows(bucket, fields)
            if not cursor:
                return

    def _live_pages(self, ns_id: bytes) -> Iterator[list[EntryInfo]]:
        """Yield what the index knows and Redis still has; the rest leaves the index."""
        for rows in self._index_pages(ns_id):
            whole = [(bucket, key, row) for bucket, key, row in rows if row is not None]
            names = [_record_name(ns_id, Ref(key, row.anchor)) for _, key, row in whole]
            # Under an LFU policy Redis knows no idle time, and says so with an error.
            replies = self._ask(
                [c for name in names for c in (("EXISTS", name), ("OBJECT IDLETIME", name))], _OnError.IGNORE
            )
            if replies is None:
                return
            live = [
                (*item, idle_s) for item, there, idle_s in zip(whole, replies[::2], replies[1::2], strict=True) if there
            ]
            stale = {(bucket, key) for bucket, key, _ in rows} - {(bucket, key) for bucket, key, _, _ in live}
            self._ask([("HDEL", _index_name(ns_id, bucket), key) for bucket, key in stale], _OnError.IGNORE)
            yield [self._info(ns_id, key, row, idle_s) for _, key, row, idle_s in live]

    def _info(self, ns_id: bytes, key: bytes, row: _Row, idle_s: object) -> EntryInfo:
        used = self._clock() - idle_s if isinstance(idle_s, int) else row.created
        return EntryInfo(
            key=key,
            parent=row.parent,
            anchor=row.anchor,
            position=row.position,
            num_tokens=row.num_tokens,
            nbytes=row.nbytes,
            tenant=row.tenant,
            created=row.created,
            last_used=max(used, row.created),
            num_hits=self._hits.get((ns_id, key), 0),
        )

    def _scan(self, ns_id: bytes) -> Iterator[list[bytes]]:
        """Yield the names of all records of a namespace, in batches. Walks the whole keyspace."""
        cursor, pattern = 0, f"{KEY_PREFIX}{ns_id.hex()}:{{*"
        while True:
            replies = self._ask([("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)])
            if replies is None:
                return
            cursor, names = replies[0]
            if names:
                yield names
            if not cursor:
                return

    def _may_rescan(self, ns_id: bytes) -> bool:
        now = time.monotonic()
        if now - self._scanned_at.get(ns_id, float("-inf")) < _RESCAN_S:
            return False
        self._scanned_at[ns_id] = now
        return True

    def _rebuild_index(self, ns_id: bytes) -> int:
        """Put every record of a namespace into the index, from its header, and return how many there are."""
        num = 0
        for names in self._scan(ns_id):
            heads = self._ask([("GETRANGE", name, 0, HEADER_NBYTES - 1) for name in names], _OnError.IGNORE)
            headers = [h for name, head in zip(names, heads or (), strict=False) if (h := _header(head, name, ns_id))]
            self._ask([_index_command("HSETNX", header, b"") for header in headers], _OnError.IGNORE)
            num += len(headers)
        return num

    # Asking Redis

    def _ask(self, commands: Sequence[_Command], on_error: _OnError = _OnError.OUT) -> list[Any] | None:
        """Send commands in one pipeline and return their replies, or None where Redis failed or is out."""
        if self._closed or not self._health.available():
            return None
        if not commands:
            return []
        pipe: Any = self._redis.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        try:
            replies: list[Any] = pipe.execute(raise_on_error=False)
        except (redis.RedisError, OSError, ValueError) as error:
            self._health.failed(self._scrub(error))
            return None
        fault = next((reply for reply in replies if isinstance(reply, Exception)), None)
        if fault is not None and on_error is _OnError.OUT:
            self._health.failed(self._scrub(fault))
            return None
        self._health.worked()
        if on_error is _OnError.STOP_WRITES:
            if fault is not None:
                self._writes.failed(self._scrub(fault))
            else:
                self._writes.worked()
        return replies

    def _scrub(self, error: object) -> str:
        text = str(error) or type(error).__name__
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def _make_pool(url: str, timeout_s: float, connect_timeout_s: float) -> redis.ConnectionPool:
    """Return a pool that gives its connections our timeouts and no retry, whatever the URL says.

    Raises:
        ConfigError: the URL is not one, or has an option that connections do not know.
    """
    fix = "write it as redis://user:password@host:6379/0, rediss://host:6379/0 or unix:///path/to.sock?db=0"
    try:
        parts = urlsplit(url)
        scheme, _ = parts.scheme, parts.port  # a port that is no number raises
        if scheme not in ("redis", "rediss", "unix"):
            raise ValueError(f"the scheme {scheme!r} is not redis, rediss or unix")
        if scheme == "unix" and not parts.path.strip("/"):
            raise ValueError("it names no socket")
        if scheme != "unix" and not parts.hostname:
            raise ValueError("it names no host")
        if scheme != "unix" and not re.fullmatch(r"/?\d*", parts.path):
            raise ValueError(f"the database {parts.path[1:]!r} is not a number")
        pool = redis.ConnectionPool.from_url(url)
        pool.connection_kwargs |= {
            "protocol": 2,
            "socket_timeout": timeout_s,
            "socket_connect_timeout": connect_timeout_s,
            "retry": Retry(NoBackoff(), 0),
            "retry_on_error": [],
            "retry_on_timeout": False,
            "health_check_interval": 0,
            "decode_responses": False,
            # hiredis's packer copies values; this one hands them to the socket as they are.
            "command_packer": PythonRespSerializer(6000, pool.get_encoder().encode),
        }
        pool.connection_class(**pool.connection_kwargs)  # does not connect; knows every option
    except (ValueError, TypeError, redis.RedisError) as error:
        reason = str(error)
        for secret in url_secrets(url):
            reason = reason.replace(secret, "***")
        raise ConfigError(f"shared_url={redact_url(url)} is not a Redis URL ({reason}); {fix}") from None
    return pool


def _tag(ref: Ref) -> bytes:
    return ref.anchor[:8]


def _bucket(anchor: bytes) -> str:
    return _BUCKETS[anchor[0]]


def _record_name(ns_id: bytes, ref: Ref) -> str:
    return f"{KEY_PREFIX}{ns_id.hex()}:{{{ref.anchor[:8].hex()}}}:{ref.key.hex()}"


def _index_name(ns_id: bytes, bucket: str) -> str:
    return f"{KEY_PREFIX}{ns_id.hex()}:idx:{{{bucket}}}"


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for at in range(0, len(items), size):
        yield items[at : at + size]


def _open(value: bytes, ref: Ref, ns_id: bytes, nbytes: int, parts: Sequence[memoryview]) -> Fetched:
    """Verify a record and copy its payload out."""
    try:
        if len(value) != HEADER_NBYTES + nbytes:
            Header.unpack(value)  # another version's may have another length
            raise BadRecordError(f"the record of key {ref.key.hex()[:16]} has {len(value)} bytes")
        return Fetched(Status.OK, deliver(memoryview(value), ref, ns_id, nbytes, parts))
    except BadRecordError as error:
        logger.warning("The shared tier deletes a record: %s", error)
        return Fetched(Status.BAD)
    except ForeignRecordError:
        return Fetched(Status.MISS)


def _rows(bucket: str, fields: dict[bytes, bytes]) -> _IndexRows:
    return [(bucket, key, _decode(bucket, value)) for key, value in fields.items()]


def _decode(bucket: str, value: bytes) -> _Row | None:
    try:
        row = msgspec.msgpack.decode(value, type=_Row)
    except msgspec.MsgspecError:
        return None
    return row if len(row.anchor) == KEY_NBYTES and _bucket(row.anchor) == bucket else None


def _header(head: bytes, name: bytes, ns_id: bytes) -> Header | None:
    """Return the header of the record called ``name``, if that is what it is."""
    try:
        header = Header.unpack(head)
    except (BadRecordError, ForeignRecordError):
        return None
    return header if _record_name(ns_id, Ref(header.key, header.anchor)).encode() == name else None


def _index_command(command: str, header: Header, tokens: bytes) -> _Command:
    row = msgspec.msgpack.encode(_Row.of(header, tokens))
    return (command, _index_name(header.ns_id, _bucket(header.anchor)), header.key, row)
