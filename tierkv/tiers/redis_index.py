"""The index of the shared tier: what its records are, for listings. Advisory, and repaired when it is wrong.

A namespace's index is up to 256 hashes, a bucket each (``tierkv/tiers/redis_names.py``); a field is a key, its value a
row. Redis may evict a record behind it, and a store that was cut short may leave a record without a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from tierkv.errors import UnavailableError
from tierkv.keys import KEY_NBYTES
from tierkv.payload import HEADER_NBYTES, BadRecordError, ForeignRecordError, Header, unpack_stored
from tierkv.resp import Error, Value
from tierkv.tiers.base import Ref
from tierkv.tiers.redis_link import OnError, RedisLink
from tierkv.tiers.redis_names import BUCKETS, Names, bucket_of
from tierkv.tiers.redis_wire import Command

T = TypeVar("T")

#: Commands of one pipeline.
BATCH_KEYS = 512
_PAGE_ROWS = 2048
_RESCAN_S = 60.0


class Row(msgspec.Struct, array_like=True, frozen=True):
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
    def of(cls, header: Header, tokens: bytes, nbytes: int) -> Row:
        return cls(
            header.parent,
            header.anchor,
            header.position,
            header.num_tokens,
            nbytes,
            header.tenant,
            header.created,
            tokens or None,
        )


class IndexRow(NamedTuple):
    """A field of the index: its bucket, its key, and the row, or None where it cannot be read."""

    bucket: str
    key: bytes
    row: Row | None


class LiveRow(NamedTuple):
    """A row whose record is there.

    ``idle_s`` are the seconds since its last use, None under an LFU policy; ``ttl_ms`` the milliseconds until it
    expires, -1 for never.
    """

    key: bytes
    row: Row
    idle_s: int | None
    ttl_ms: int = -1


class RedisIndex:
    """The index of every namespace behind one link.

    Args:
        link: to Redis.
        names: of its keys.
    """

    def __init__(self, link: RedisLink, names: Names) -> None:
        self._link = link
        self._names = names
        self._scanned_at: dict[bytes, float] = {}

    def add_command(self, header: Header, tokens: bytes, nbytes: int, command: str = "HSET") -> Command:
        """Return the command that indexes a record of ``nbytes`` bytes."""
        row = msgspec.msgpack.encode(Row.of(header, tokens, nbytes))
        return (command, self._names.index(header.ns_id, bucket_of(header.anchor)), header.key, row)

    def remove(self, ns_id: bytes, refs: Iterable[Ref]) -> list[Row]:
        """Take records out of the index and return the rows that this call removed."""
        refs = list(refs)
        names = [(self._names.index(ns_id, bucket_of(ref.anchor)), ref.key) for ref in refs]
        replies = self._link.ask([c for n, k in names for c in (("HGET", n, k), ("HDEL", n, k))], OnError.IGNORE)
        found = zip(refs, (replies or ())[::2], (replies or ())[1::2], strict=False)
        rows = [_decode(bucket_of(ref.anchor), v) for ref, v, num in found if num == 1 and isinstance(v, bytes)]
        return [row for row in rows if row is not None]

    def tokens(self, ns_id: bytes, ref: Ref) -> bytes:
        """Return the token ids that were stored with a record, packed, or nothing."""
        replies = self._link.ask([("HGET", self._names.index(ns_id, bucket_of(ref.anchor)), ref.key)], OnError.IGNORE)
        value = replies[0] if replies else None
        row = _decode(bucket_of(ref.anchor), value) if isinstance(value, bytes) else None
        return row.tokens or b"" if row else b""

    def drop(self, ns_id: bytes) -> None:
        """Remove the index of a namespace, and its name."""
        names = [self._names.index(ns_id, bucket) for bucket in BUCKETS]
        self._link.ask(
            [*(("UNLINK", name) for name in names), ("HDEL", self._names.namespaces, ns_id.hex())], OnError.IGNORE
        )

    def lengths(self, ns_ids: Sequence[bytes], *, strict: bool = False) -> list[int]:
        """Return the fields of every bucket of the namespaces, 256 numbers each; nothing where Redis failed.

        Buckets on a node that is out count as empty.

        Raises:
            UnavailableError: with ``strict``, Redis or one of its nodes failed.
        """
        names = [self._names.index(ns_id, bucket) for ns_id in ns_ids for bucket in BUCKETS]
        found: list[int] = []
        for batch in batches(names, 8 * BATCH_KEYS):
            replies = self._link.ask([("HLEN", name) for name in batch], OnError.IGNORE)
            _check(replies, strict)
            if replies is None:
                return []
            found += [reply if isinstance(reply, int) else 0 for reply in replies]
        return found

    def pages(self, ns_id: bytes, start: int = 0, *, strict: bool = False) -> Iterator[list[IndexRow]]:
        """Yield the index in pages of a few thousand rows: several small buckets, or a part of a large one.

        Begins with bucket ``start`` and goes round. Where Redis fails it ends early.

        Raises:
            UnavailableError: with ``strict``, in place of that.
        """
        small: list[str] = []
        waiting = 0
        lengths = list(zip(BUCKETS, self.lengths([ns_id], strict=strict), strict=False))
        for bucket, length in lengths[start:] + lengths[:start]:
            if length > _PAGE_ROWS:
                yield from self._scan_bucket(ns_id, bucket, strict)
            elif length:
                small.append(bucket)
                waiting += length
                if waiting >= _PAGE_ROWS:
                    yield self._whole_buckets(ns_id, small, strict)
                    small, waiting = [], 0
        if small:
            yield self._whole_buckets(ns_id, small, strict)

    def live_pages(
        self, ns_id: bytes, *, start: int = 0, on_gone: Callable[[list[Row]], object] | None = None
    ) -> Iterator[list[LiveRow]]:
        """Yield what the index knows and Redis still has; the rest leaves the index, and is told to ``on_gone``."""
        for rows in self.pages(ns_id, start):
            whole = [(item, item.row) for item in rows if item.row is not None]
            names = [self._names.record(ns_id, Ref(item.key, row.anchor)) for item, row in whole]
            # Under an LFU policy Redis knows no idle time, and says so with an error.
            replies = self._link.ask(
                [c for name in names for c in (("PTTL", name), ("OBJECT", "IDLETIME", name))], OnError.IGNORE
            )
            if replies is None:
                return
            live, gone = [], [item for item in rows if item.row is None]
            for (item, row), ttl_ms, idle_s in zip(whole, replies[::2], replies[1::2], strict=True):
                if ttl_ms == -2:
                    gone.append(item)
                elif isinstance(ttl_ms, int):
                    live.append(LiveRow(item.key, row, idle_s if isinstance(idle_s, int) else None, ttl_ms))
            nums = self._link.ask(
                [("HDEL", self._names.index(ns_id, item.bucket), item.key) for item in gone], OnError.IGNORE
            )
            removed = [item.row for item, num in zip(gone, nums or (), strict=False) if num == 1 and item.row]
            if removed and on_gone:
                on_gone(removed)
            yield live

    def scan(self, ns_id: bytes) -> Iterator[list[bytes]]:
        """Yield the names of all records of a namespace, in batches. Walks the whole keyspace of every node."""
        pattern = f"{self._names.records_of(ns_id)}*"
        for node in self._link.nodes():
            cursor = b"0"
            while True:
                replies = self._link.ask([("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)], node=node)
                if replies is None:
                    return
                cursor, names = _page(replies[0])
                if names:
                    yield names
                if cursor == b"0":
                    break

    def may_rebuild(self, ns_id: bytes) -> bool:
        """Return whether the last :meth:`rebuild` that this asked for is a minute ago, and note this one."""
        now = time.monotonic()
        if now - self._scanned_at.get(ns_id, float("-inf")) < _RESCAN_S:
            return False
        self._scanned_at[ns_id] = now
        return True

    def rebuild(self, ns_id: bytes) -> int:
        """Put every record of a namespace into the index, from its header, and return how many there are."""
        num = 0
        for names in self.scan(ns_id):
            heads = self._link.ask([("GETRANGE", name, 0, HEADER_NBYTES - 1) for name in names], OnError.IGNORE)
            found = [f for name, head in zip(names, heads or (), strict=False) if (f := self._header(head, name))]
            self._link.ask([self.add_command(h, b"", nbytes, "HSETNX") for h, nbytes in found], OnError.IGNORE)
            num += len(found)
        return num

    def _header(self, head: Value, name: bytes) -> tuple[Header, int] | None:
        """Return the header of the record called ``name`` and the record's length, if that is what it is."""
        if not isinstance(head, bytes):
            return None
        try:
            header, _, stored_nbytes = unpack_stored(head)
        except (BadRecordError, ForeignRecordError):
            return None
        if self._names.record(header.ns_id, Ref(header.key, header.anchor)).encode() != name:
            return None
        return header, HEADER_NBYTES + stored_nbytes

    def _whole_buckets(self, ns_id: bytes, buckets: list[str], strict: bool) -> list[IndexRow]:
        replies = self._link.ask([("HGETALL", self._names.index(ns_id, bucket)) for bucket in buckets], OnError.IGNORE)
        _check(replies, strict)
        return [row for bucket, fields in zip(buckets, replies or (), strict=False) for row in _rows(bucket, fields)]

    def _scan_bucket(self, ns_id: bytes, bucket: str, strict: bool) -> Iterator[list[IndexRow]]:
        cursor = b"0"
        while True:
            replies = self._link.ask([("HSCAN", self._names.index(ns_id, bucket), cursor, "COUNT", _PAGE_ROWS)])
            _check(replies, strict)
            if replies is None:
                return
            cursor, fields = _page(replies[0])
            yield _rows(bucket, list(fields))
            if cursor == b"0":
                return


def _check(replies: Sequence[Value] | None, strict: bool) -> None:
    if strict and (replies is None or any(isinstance(reply, Error) for reply in replies)):
        raise UnavailableError("the shared tier's index could not be read to its end")


def batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield ``items`` in slices of ``size``."""
    for at in range(0, len(items), size):
        yield items[at : at + size]


def pairs(reply: Value) -> list[tuple[bytes, bytes]]:
    """Return the fields of a hash (a flat list) with their values; nothing for what is no hash."""
    items = [item for item in reply if isinstance(item, bytes)] if isinstance(reply, list) else []
    return list(zip(items[::2], items[1::2], strict=False))


def _page(reply: Value) -> tuple[bytes, list[bytes]]:
    """Return the cursor and the items of a page of a SCAN or HSCAN; the last page, empty, for what is none."""
    cursor, items = reply if isinstance(reply, list) and len(reply) == 2 else (b"0", [])
    found = [item for item in items if isinstance(item, bytes)] if isinstance(items, list) else []
    return (cursor if isinstance(cursor, bytes) else b"0"), found


def _rows(bucket: str, fields: Value) -> list[IndexRow]:
    return [IndexRow(bucket, key, _decode(bucket, value)) for key, value in pairs(fields)]


def _decode(bucket: str, value: bytes) -> Row | None:
    try:
        row = msgspec.msgpack.decode(value, type=Row)
    except msgspec.MsgspecError:
        return None
    return row if len(row.anchor) == KEY_NBYTES and bucket_of(row.anchor) == bucket else None
