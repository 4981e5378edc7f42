"""The ``shared`` tier: records in a Redis or Valkey that a fleet shares.

Theory of operation. Redis is authoritative: nothing here is state that another store server lacks. The names of keys
are made in :mod:`tierkv.tiers.redis_names`, written down in ``docs/formats.md`` and meant to last. The records are what
is stored. The index (:mod:`tierkv.tiers.redis_index`) is advisory: Redis may evict a record behind it, and a listing
repairs it. Nothing outside the prefix is ever touched.

*Order.* A batch is read leaf to root, so that Redis's own LRU evicts leaves first. EXISTS does not renew life there.

*Faults.* A connection that fails puts the tier out for a back-off period in which it answers at once. A Redis that
refuses writes only (full, a read-only replica) stops stores, and reads go on (:mod:`tierkv.tiers.redis_link`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from tierkv.layout import Namespace
from tierkv.payload import CODEC_SHUFFLE_ZSTD, HEADER_NBYTES
from tierkv.policy import Hint
from tierkv.resp import Error
from tierkv.server_config import SharedConfig
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
from tierkv.tiers.compression import Codec
from tierkv.tiers.control import ControlFeed, Fleet
from tierkv.tiers.redis_index import BATCH_KEYS, LiveRow, RedisIndex, Row, batches, pairs
from tierkv.tiers.redis_link import OnError, RedisLink
from tierkv.tiers.redis_match import exist, match
from tierkv.tiers.redis_memory import Memory, measure
from tierkv.tiers.redis_names import Names
from tierkv.tiers.redis_transfer import IN_FLIGHT_NBYTES, Fetch, codec_of
from tierkv.tiers.redis_wire import Command
from tierkv.tiers.shared_lifetime import Lifetime
from tierkv.tiers.shared_usage import SharedUsage

_STAT_TTL_S = 5.0
_MAX_COUNTED = 100_000
_WRITES_OUT = "it takes no writes"


class SharedTier:
    """Records in a Redis, shared with every other store server that uses it.

    Args:
        config: where it is and how to get in; a URL alone will do.
        limits: how long entries live. The budget is Redis's own.
        timeout_s: in place of the configuration's.
        clock: wall clock, seconds since 1970.

    Raises:
        ConfigError: the URL, an option or a file is wrong. A Redis that is down is no error: the tier starts out.

    Notes:
        Thread-safe. Every exchange has a deadline (:meth:`RedisLink.until`), and a tier that is out answers at once.
    """

    name = "shared"

    def __init__(
        self,
        config: SharedConfig | str,
        limits: Limits | None = None,
        *,
        timeout_s: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        config = SharedConfig(url=config) if isinstance(config, str) else config
        if timeout_s is not None:
            config = msgspec.structs.replace(config, timeout_s=timeout_s)
        self._names = Names(config.prefix)
        self._link = RedisLink(config)
        self._index = RedisIndex(self._link, self._names)
        self._compresses = config.compression == "zstd"
        self._codecs: dict[bytes, Codec] = {}
        self.lifetime = Lifetime(self._link, self._names, limits or Limits(), self.namespaces, clock)
        self.quotas = SharedUsage(self._link, self._names, self._index, self.lifetime, self._evict_for_room, clock)
        self.url = self._link.url
        self._clock = clock
        self._counters = Counters()
        self._lock = threading.Lock()
        self._known: dict[bytes, Namespace] = {}
        self._hits: dict[tuple[bytes, bytes], int] = {}
        self._size = (0, 0)
        self._sized_at = float("-inf")
        self._link.ask([("PING",)])

    # The contract

    def add_namespace(self, namespace: Namespace) -> None:
        """Make a namespace known. Its description is written with its records."""
        self._known.setdefault(namespace.ns_id(), namespace)

    def namespaces(self) -> dict[bytes, Namespace]:
        """Return every namespace that was stored here; Redis may have evicted all its entries since."""
        return self._stored_namespaces() or {}

    def _stored_namespaces(self) -> dict[bytes, Namespace] | None:
        replies = self._link.ask([("HGETALL", self._names.namespaces)])
        if replies is None:
            return None
        found = {}
        for name, description in pairs(replies[0]):
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
        return match(self._link, self._names, ns_id, refs)

    def stored(self, ns_id: bytes, refs: Sequence[Ref]) -> list[bool]:
        """Return for each ref whether it is stored, each asked for; all False where Redis fails."""
        found: list[bool] = []
        for batch in batches(refs, BATCH_KEYS):
            found += exist(self._link, self._names, ns_id, batch) or [False] * len(batch)
        return found

    def fetch(
        self, ns_id: bytes, refs: Sequence[Ref], sink: Sink, *, quiet: bool = False, keep: bool = False
    ) -> list[Fetched]:
        namespace = self._known.get(ns_id)
        if namespace is None:
            results = [Fetched(Status.MISS)] * len(refs)
        else:
            results = Fetch(self._link, self._names, ns_id, namespace, refs, sink).run()
            self._after_fetch(ns_id, refs, results, quiet, keep)
        if quiet:
            self._counters.count_bad(sum(result.status is Status.BAD for result in results))
        else:
            self._counters.count_fetched(results)
        return results

    def note(self, ns_id: bytes, tenant: bytes, keys: Sequence[bytes], hint: Hint | None = None) -> None:
        """Change nothing: what stays is Redis's own ``maxmemory-policy``."""

    def release(self, ns_id: bytes, session: str) -> bool:
        return False

    def worth(self, ns_id: bytes, key: bytes) -> float:
        return 0.0

    def joined(self, engine: str, ns_id: bytes, most: int) -> None:
        pass

    def left(self, engine: str) -> None:
        pass

    def hold(self, engine: str, took: Sequence[bytes], gone: Sequence[bytes]) -> bool:
        return False

    def store(self, ns_id: bytes, records: Sequence[Record], *, offer: Offer = Offer.ORDER) -> list[Status]:
        statuses: list[Status] = []
        namespace = self._known.get(ns_id)
        if namespace is not None and self._link.writes.available():
            nbytes = HEADER_NBYTES + namespace.payload_nbytes
            for batch in batches(records, max(1, min(BATCH_KEYS, IN_FLIGHT_NBYTES // nbytes))):
                part = self._store_batch(namespace, ns_id, nbytes, batch)
                statuses += [Status.ERROR] * len(batch) if part is None else part
        statuses += [Status.ERROR] * (len(records) - len(statuses))
        self._counters.count_stored(statuses)
        return statuses

    def evict(self, ns_id: bytes, refs: Sequence[Ref], *, force: bool = False) -> int:
        doomed = refs if force else self.lifetime.unpinned(ns_id, refs)
        num = sum(self._delete(ns_id, batch) for batch in batches(doomed, BATCH_KEYS))
        self._counters.count_removed(num)
        return num

    def drop_namespace(self, ns_id: bytes) -> int:
        num = 0
        for rows in self._index.pages(ns_id):
            num += self._delete(ns_id, [Ref(item.key, item.row.anchor) for item in rows if item.row])
        for names in self._index.scan(ns_id):  # what the index did not know
            num += self._unlink(names)
        self._index.drop(ns_id)
        self._link.ask(self.lifetime.drop_commands(ns_id), OnError.IGNORE)
        self._counters.count_removed(num)
        self._sized_at = float("-inf")
        return num

    def pin(self, ns_id: bytes, refs: Sequence[Ref], pin: Pin) -> list[bool]:
        return self.lifetime.pin(ns_id, refs, pin)

    def unpin(self, ns_id: bytes, refs: Sequence[Ref], owner: str = "") -> int:
        return self.lifetime.unpin(ns_id, refs, owner)

    def expire_at(self, ns_id: bytes, refs: Sequence[Ref], until: float) -> int:
        return self.lifetime.expire_at(ns_id, refs, until)

    def usage(self, ns_id: bytes) -> dict[bytes, Usage]:
        return self.quotas.usage(ns_id)

    def tokens(self, ns_id: bytes, ref: Ref) -> bytes:
        return self._index.tokens(ns_id, ref)

    def set_limits(self, limits: Limits) -> None:
        """Change the limits. Expiry changes for what is stored or read from now on."""
        self.lifetime.limits = limits

    def keys(self, ns_id: bytes) -> Iterator[bytes]:
        """Yield the keys of everything that the index knows of a namespace, for a filter.

        Raises:
            UnavailableError: Redis failed in the middle: what came is not all.
        """
        for page in self._index.pages(ns_id, strict=True):
            yield from (item.key for item in page if item.row is not None)

    def open_feed(self, node_dir: Path, fleet: Fleet) -> ControlFeed:
        """Return this node's part in the fleet's control stream; whoever asks starts and closes it."""
        names = (self._names.control, self._names.news)
        block_s = min(0.5, self._link.timeout_s / 2)
        return ControlFeed(self._link.ask, names, node_dir, self._delete_by_order, fleet, block_s=block_s)

    def entries(self, ns_id: bytes, *, repair: bool = False) -> Iterator[EntryInfo]:
        """Yield what is stored in a namespace, page by page.

        Index fields whose record has gone are removed. An index that is empty is built again from the records, at most
        once a minute, or now with ``repair``.
        """
        found = False
        if repair and self._index.rebuild(ns_id):
            self.quotas.recount_soon(ns_id)
        self.lifetime.marks(ns_id, fresh=True)
        for page in self._live_pages(ns_id):
            found = True
            yield from (self._info(ns_id, row) for row in page)
        if not found and not repair and self._index.may_rebuild(ns_id) and self._index.rebuild(ns_id):
            self.quotas.recount_soon(ns_id)
            for page in self._live_pages(ns_id):
                yield from (self._info(ns_id, row) for row in page)

    def retry_in_s(self) -> float:
        return max(self._link.state.retry_in_s(), self._link.writes.retry_in_s())

    def stat(self) -> TierStat:
        num_entries, nbytes = self._measure()
        stat = self._counters.stat(
            self.name,
            self._link.state,
            num_entries=num_entries,
            nbytes=nbytes,
            budget=0,
            pinned_nbytes=sum(map(self.lifetime.pinned_nbytes, self._known)),
        )
        writes = self._link.writes
        if self._link.up and not writes.up:
            reason = f"{_WRITES_OUT}: {writes.reason}"
            stat = stat._replace(state="read-only", reason=reason, since=writes.out_since)
        elif node := self._link.partly_out:
            stat = stat._replace(reason=f"{node.what} is out: {node.reason}", since=node.out_since)
        return stat

    def memory(self) -> Memory:
        """Return what Redis has left, and how much it evicted."""
        return measure(self._link)

    def close(self) -> None:
        self.lifetime.close()
        self._link.close()

    # Reading

    def _after_fetch(
        self, ns_id: bytes, refs: Sequence[Ref], results: Sequence[Fetched], quiet: bool, keep: bool
    ) -> None:
        """Count hits and renew lives, delete what is damaged, and take what is not there out of the index."""
        found = [] if quiet else [result.header for result in results if result.header is not None]
        if found:
            self.lifetime.note_read(found)
        with self._lock:
            for header in found:
                item = (ns_id, header.key)
                if item in self._hits or len(self._hits) < _MAX_COUNTED:
                    self._hits[item] = self._hits.get(item, 0) + 1
        bad = [ref for ref, result in zip(refs, results, strict=True) if result.status is Status.BAD]
        if bad and not keep:
            self._delete(ns_id, bad)
        gone = [ref for ref, result in zip(refs, results, strict=True) if result.status is Status.MISS]
        if gone:
            self._forget(ns_id, gone)

    # Writing

    def _store_batch(
        self, namespace: Namespace, ns_id: bytes, nbytes: int, records: Sequence[Record]
    ) -> list[Status] | None:
        """Store one batch; None where Redis failed before anything was known."""
        there = exist(self._link, self._names, ns_id, [Ref(r.header.key, r.header.anchor) for r in records])
        if there is None:
            return None
        sound = [
            r.header.ns_id == ns_id and len(r.data) >= nbytes == HEADER_NBYTES + r.header.raw_nbytes for r in records
        ]
        statuses = [
            (Status.EXISTS if t else Status.OK) if s else Status.ERROR for t, s in zip(there, sound, strict=True)
        ]
        for i, status in enumerate(statuses):
            if status is Status.OK and self.lifetime.expiry_ms(records[i].header) == 0:
                statuses[i] = Status.DROPPED  # its time is over already
        new = [i for i, status in enumerate(statuses) if status is Status.OK]
        ready = [(records[i], self._stored(namespace, records[i])) for i in new]
        admitted = self.quotas.admit([record.header for record, _ in ready], [len(data) for _, data in ready])
        for i, ok in zip(new, admitted, strict=True):
            statuses[i] = Status.OK if ok else Status.DROPPED
        new = [i for i, ok in zip(new, admitted, strict=True) if ok]
        ready = [item for item, ok in zip(ready, admitted, strict=True) if ok]
        if not ready:
            if not self._link.writes.up:  # who offers only what is there would never learn that it takes writes again
                self._link.ask([self._describe(namespace)], OnError.STOP_WRITES)
            return statuses
        for i, status in zip(new, self._write(namespace, ns_id, ready), strict=True):
            statuses[i] = status
        return statuses

    def _describe(self, namespace: Namespace) -> Command:
        """Return the command that writes a namespace's description where there is none."""
        return "HSETNX", self._names.namespaces, namespace.ns_id().hex(), namespace.to_json()

    def _write(self, namespace: Namespace, ns_id: bytes, ready: Sequence[tuple[Record, memoryview]]) -> list[Status]:
        """Write records, which are counted already, with their rows, and take off again what was not added."""
        refs = [Ref(record.header.key, record.header.anchor) for record, _ in ready]
        commands: list[Command] = [self._describe(namespace)]
        for ref, (record, data) in zip(refs, ready, strict=True):
            ms = self.lifetime.expiry_ms(record.header)
            expiry = () if ms is None else ("PX", max(ms, 1))
            commands.append(("SET", self._names.record(ns_id, ref), data, "NX", *expiry))
            commands.append(self._index.add_command(record.header, record.tokens, len(data)))
        replies = self._link.ask(commands, OnError.STOP_WRITES) or ()
        statuses = [Status.ERROR] * len(ready)
        for i, reply in enumerate(replies[1::2]):
            if not isinstance(reply, Error):
                statuses[i] = Status.EXISTS if reply is None else Status.OK  # another server may be faster
        rows = [reply == 1 for reply in replies[2::2]] or [False] * len(ready)
        uncounted = [(r.header.tenant, len(d)) for (r, d), added in zip(ready, rows, strict=True) if not added]
        self.quotas.count(ns_id, uncounted, -1)
        return statuses

    def _stored(self, namespace: Namespace, record: Record) -> memoryview:
        """Return the bytes of a record as they are to be stored: compressed, where configured and smaller."""
        header, data, _ = record
        raw = data[: HEADER_NBYTES + header.raw_nbytes]
        if not self._compresses:
            return raw
        codec = self._codecs.get(header.ns_id)
        if codec is None:
            codec = self._codecs.setdefault(header.ns_id, codec_of(namespace))
        small = codec.compress(raw[HEADER_NBYTES:])
        return raw if small is None else memoryview(header.pack(CODEC_SHUFFLE_ZSTD, len(small)) + small)

    # Removing

    def _delete(self, ns_id: bytes, refs: Sequence[Ref]) -> int:
        """Delete records and their index fields; returns how many records there were."""
        num = self._unlink([self._names.record(ns_id, ref) for ref in refs])
        self.lifetime.forget(ns_id, refs)
        self._forget(ns_id, refs)
        return num

    def _unlink(self, names: Sequence[str | bytes]) -> int:
        replies = self._link.ask([("UNLINK", name) for name in names], OnError.IGNORE)
        return sum(reply for reply in replies or () if isinstance(reply, int))

    def _delete_by_order(self, ns_id: bytes, refs: Sequence[Ref] | None) -> int | None:
        """Delete what every node evicts, pinned or not; returns how many there were, None where Redis failed."""
        if refs is None:
            num = self.drop_namespace(ns_id)
            return num if self._link.up and not self._link.partly_out else None
        replies = self._link.ask([("UNLINK", self._names.record(ns_id, ref)) for ref in refs], OnError.IGNORE)
        if replies is None or any(isinstance(reply, Error) for reply in replies):
            return None
        self.lifetime.forget(ns_id, refs)
        self._forget(ns_id, refs)
        return sum(reply for reply in replies if isinstance(reply, int))

    def _evict_for_room(self, ns_id: bytes, refs: Sequence[Ref]) -> int:
        """Remove entries for a quota and return how many bytes of the index went with them."""
        num = self._unlink([self._names.record(ns_id, ref) for ref in refs])
        self._counters.count_evicted(num)
        return self._forget(ns_id, refs)

    def _forget(self, ns_id: bytes, refs: Sequence[Ref]) -> int:
        """Take records out of the index and their tenants' usage, and return the bytes of the rows that went."""
        with self._lock:
            for ref in refs:
                self._hits.pop((ns_id, ref.key), None)
        return self._uncount(ns_id, self._index.remove(ns_id, refs))

    def _uncount(self, ns_id: bytes, rows: Sequence[Row]) -> int:
        if rows:
            self.quotas.count(ns_id, [(row.tenant, row.nbytes) for row in rows], -1)
        return sum(row.nbytes for row in rows)

    # Listing

    def _measure(self) -> tuple[int, int]:
        """Return entries and bytes, at most a few seconds old; what was known last while the tier is out."""
        now = time.monotonic()
        if now - self._sized_at < _STAT_TTL_S:
            return self._size
        self._sized_at = now
        namespaces = self._stored_namespaces()
        if namespaces is not None:
            lengths = self._index.lengths(list(namespaces))
            nums = [sum(lengths[i : i + 256]) for i in range(0, len(lengths), 256)]
            each = [HEADER_NBYTES + ns.payload_nbytes for ns in namespaces.values()]
            self._size = (sum(nums), sum(n * e for n, e in zip(nums, each, strict=False)))
        return self._size

    def _live_pages(self, ns_id: bytes) -> Iterator[list[LiveRow]]:
        return self._index.live_pages(ns_id, on_gone=lambda rows: self._uncount(ns_id, rows))

    def _info(self, ns_id: bytes, live: LiveRow) -> EntryInfo:
        row = live.row
        used = row.created if live.idle_s is None else self._clock() - live.idle_s
        return EntryInfo(
            key=live.key,
            parent=row.parent,
            anchor=row.anchor,
            position=row.position,
            num_tokens=row.num_tokens,
            nbytes=row.nbytes,
            tenant=row.tenant,
            created=row.created,
            last_used=max(used, row.created),
            num_hits=self._hits.get((ns_id, live.key), 0),
            expires=self._expires(ns_id, live, used),
            pins=self.lifetime.marks(ns_id).pins_of(live.key, self._clock()),
        )

    def _expires(self, ns_id: bytes, live: LiveRow, used: float) -> float:
        """Return when an entry goes; a pinned one has no expiry in Redis, but one of its own that comes back."""
        now, marks = self._clock(), self.lifetime.marks(ns_id)
        pins = marks.pins_of(live.key, now)
        if not pins:
            return now + live.ttl_ms / 1000 if live.ttl_ms >= 0 else 0.0
        own = self.lifetime.limits.expires(live.row.created, used, marks.until.get(live.key, 0.0))
        return max(own, *(pin.until for pin in pins)) if own else 0.0
