"""The tier contract in memory, written to be read: the model that every tier of ours is compared with.

It keeps what :mod:`tierkv.tiers.base` promises and nothing else: one lock, no index beside the entries, and victims are
found by looking at all of them. What a tier may do but need not (lose an entry at any moment) it never does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tierkv.health import Health
from tierkv.layout import Namespace
from tierkv.payload import HEADER_NBYTES, BadRecordError, ForeignRecordError, Header
from tierkv.policy import Hint
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
    deliver,
)


@dataclass
class Entry:
    """What is stored under a key. ``data`` is the record without padding; a test may replace it."""

    header: Header
    anchor: bytes
    data: bytes
    tokens: bytes
    stored: float
    last_used: float
    stamp: int  #: order of use, without ties
    num_hits: int = 0
    until: float = 0.0
    pins: dict[str, float] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return HEADER_NBYTES + self.header.raw_nbytes


class MemoryTier:
    """Records in a dictionary.

    Args:
        limits: what may be held, and for how long.
        clock: wall clock, seconds since 1970.
    """

    name = "memory"

    def __init__(self, limits: Limits | None = None, clock: Callable[[], float] = time.time) -> None:
        self.spaces: dict[bytes, dict[bytes, Entry]] = {}  #: namespace id -> key -> entry
        self._limits = limits or Limits()
        self._clock = clock
        self._known: dict[bytes, Namespace] = {}
        self._counters = Counters()
        self._health = Health("The memory tier")
        self._stamp = 0
        self._closed = False
        self._lock = threading.RLock()

    # The contract

    def add_namespace(self, namespace: Namespace) -> None:
        with self._lock:
            self._known.setdefault(namespace.ns_id(), namespace)

    def namespaces(self) -> dict[bytes, Namespace]:
        with self._lock:
            return {ns_id: self._known[ns_id] for ns_id in self.spaces if self._entries(ns_id)}

    def match(self, ns_id: bytes, refs: Sequence[Ref]) -> list[bool]:
        with self._lock:
            entries = self._entries(ns_id)
            return [ref.key in entries for ref in refs]

    def fetch(
        self, ns_id: bytes, refs: Sequence[Ref], sink: Sink, *, quiet: bool = False, keep: bool = False
    ) -> list[Fetched]:
        with self._lock:
            entries = self._entries(ns_id)
            results = [self._fetch_one(ns_id, entries.get(ref.key), ref, i, sink) for i, ref in enumerate(refs)]
            statuses = [result.status for result in results]
            if not keep:
                self._remove(ns_id, [ref.key for ref, s in zip(refs, statuses, strict=True) if s is Status.BAD])
            if quiet:
                self._counters.count_bad(statuses.count(Status.BAD))
                return results
            for ref, status in reversed(list(zip(refs, statuses, strict=True))):  # an ancestor is the more recent one
                if status is Status.OK:
                    self._use(entries[ref.key])
            self._counters.count_fetched(results)
            return results

    def note(self, ns_id: bytes, tenant: bytes, keys: Sequence[bytes], hint: Hint | None = None) -> None:
        """It has no policy: what was used longest ago goes."""

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
        with self._lock:
            self._sweep()
            family = {record.header.key for record in records} | {record.header.parent for record in records}
            statuses = [self._store_one(ns_id, record, family) for record in records]
            self._counters.count_stored(statuses)
            return statuses

    def evict(self, ns_id: bytes, refs: Sequence[Ref], *, force: bool = False) -> int:
        with self._lock:
            entries = self._entries(ns_id)
            keys = [ref.key for ref in refs if ref.key in entries and (force or not self._pins(entries[ref.key]))]
            num = self._remove(ns_id, keys)
            self._counters.count_removed(num)
            return num

    def drop_namespace(self, ns_id: bytes) -> int:
        with self._lock:
            num = len(self._entries(ns_id))
            self.spaces.pop(ns_id, None)
            self._counters.count_removed(num)
            return num

    def pin(self, ns_id: bytes, refs: Sequence[Ref], pin: Pin) -> list[bool]:
        with self._lock:
            entries = self._entries(ns_id)
            done: list[bool] = []
            for ref in refs:
                entry = entries.get(ref.key)
                if entry is None or not self._pin_one(entry, pin):
                    break
                done.append(True)
            return done + [False] * (len(refs) - len(done))

    def unpin(self, ns_id: bytes, refs: Sequence[Ref], owner: str = "") -> int:
        with self._lock:
            entries = self._entries(ns_id)
            num = 0
            for entry in [entries[key] for key in dict.fromkeys(ref.key for ref in refs) if key in entries]:
                owners = [pin.owner for pin in self._pins(entry) if owner in ("", pin.owner)]
                num += bool(owners)
                for name in owners:
                    del entry.pins[name]
            return num

    def expire_at(self, ns_id: bytes, refs: Sequence[Ref], until: float) -> int:
        with self._lock:
            entries = self._entries(ns_id)
            keys = {ref.key for ref in refs} & entries.keys()
            for key in keys:
                entries[key].until = until
            return len(keys)

    def entries(self, ns_id: bytes) -> Iterator[EntryInfo]:
        with self._lock:
            snapshot = [self._info(key, entry) for key, entry in self._entries(ns_id).items()]
        yield from snapshot

    def usage(self, ns_id: bytes) -> dict[bytes, Usage]:
        with self._lock:
            found: dict[bytes, Usage] = {}
            for entry in self._entries(ns_id).values():
                own = Usage(1, entry.nbytes, entry.nbytes if self._pins(entry) else 0)
                found[entry.header.tenant] = found.get(entry.header.tenant, Usage()) + own
            return found

    def tokens(self, ns_id: bytes, ref: Ref) -> bytes:
        with self._lock:
            entry = self._entries(ns_id).get(ref.key)
            return entry.tokens if entry else b""

    def set_limits(self, limits: Limits) -> None:
        with self._lock:
            self._sweep()  # what has expired does not come back
            self._limits = limits
            self._sweep()
            for ns_id in list(self.spaces):
                self._fit(ns_id, b"", 0, frozenset())
                for tenant in {entry.header.tenant for entry in self.spaces.get(ns_id, {}).values()}:
                    self._fit(ns_id, tenant, 0, frozenset())

    def retry_in_s(self) -> float:
        return self._health.retry_in_s()

    def stat(self) -> TierStat:
        with self._lock:
            live = [entry for ns_id in self.spaces for entry in self._entries(ns_id).values()]
            return self._counters.stat(
                self.name,
                self._health,
                num_entries=len(live),
                nbytes=sum(entry.nbytes for entry in live),
                budget=self._limits.budget or 0,
                pinned_nbytes=self._pinned_nbytes(),
            )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self.spaces.clear()

    # Entries

    def _entries(self, ns_id: bytes) -> dict[bytes, Entry]:
        """Return what is stored in a namespace and has not expired."""
        return {key: entry for key, entry in self.spaces.get(ns_id, {}).items() if not self._expired(entry)}

    def _expired(self, entry: Entry) -> bool:
        expires = self._expires(entry)
        return bool(expires) and expires <= self._clock() and not self._pins(entry)

    def _expires(self, entry: Entry) -> float:
        return self._limits.expires(entry.stored, entry.last_used, entry.until)

    def _pins(self, entry: Entry) -> list[Pin]:
        """Return the pins that hold now, by owner."""
        return [Pin(owner, until) for owner, until in sorted(entry.pins.items()) if until > self._clock()]

    def _info(self, key: bytes, entry: Entry) -> EntryInfo:
        header, pins = entry.header, tuple(self._pins(entry))
        return EntryInfo(
            key=key,
            parent=header.parent,
            anchor=entry.anchor,
            position=header.position,
            num_tokens=header.num_tokens,
            nbytes=entry.nbytes,
            tenant=header.tenant,
            created=header.created,
            last_used=entry.last_used,
            num_hits=entry.num_hits,
            expires=max([expires, *(pin.until for pin in pins)]) if (expires := self._expires(entry)) else 0.0,
            pins=pins,
        )

    def _use(self, entry: Entry) -> None:
        self._stamp += 1
        entry.stamp, entry.last_used = self._stamp, max(entry.last_used, self._clock())
        entry.num_hits += 1

    def _fetch_one(self, ns_id: bytes, entry: Entry | None, ref: Ref, at: int, sink: Sink) -> Fetched:
        if entry is None:
            return Fetched(Status.ERROR if self._closed else Status.MISS)
        try:
            nbytes = self._known[ns_id].payload_nbytes
            if len(entry.data) != HEADER_NBYTES + nbytes:
                Header.unpack(entry.data)  # another version's may have another length
                raise BadRecordError(f"a record has {len(entry.data)} bytes")
            return Fetched(Status.OK, deliver(memoryview(entry.data), ref, ns_id, nbytes, sink(at)))
        except BadRecordError:
            return Fetched(Status.BAD)
        except ForeignRecordError:
            return Fetched(Status.MISS)

    def _store_one(self, ns_id: bytes, record: Record, family: set[bytes]) -> Status:
        header, namespace = record.header, self._known.get(ns_id)
        nbytes = HEADER_NBYTES + header.raw_nbytes
        if self._closed or namespace is None or header.ns_id != ns_id:
            return Status.ERROR
        if header.raw_nbytes != namespace.payload_nbytes or len(record.data) < nbytes:
            return Status.ERROR
        if header.key in self.spaces.get(ns_id, {}):
            return Status.EXISTS
        if not self._fit(ns_id, header.tenant, nbytes, family):
            return Status.DROPPED
        now = self._clock()
        self._stamp += 1
        self.spaces.setdefault(ns_id, {})[header.key] = Entry(
            header, header.anchor, bytes(record.data[:nbytes]), record.tokens, now, now, self._stamp
        )
        return Status.OK

    def _remove(self, ns_id: bytes, keys: Sequence[bytes]) -> int:
        entries = self.spaces.get(ns_id, {})
        num = sum(entries.pop(key, None) is not None for key in keys)
        if not entries:
            self.spaces.pop(ns_id, None)
        return num

    def _sweep(self) -> None:
        for ns_id, entries in list(self.spaces.items()):
            self._counters.count_expired(self._remove(ns_id, [k for k, e in entries.items() if self._expired(e)]))

    # Pins

    def _pin_one(self, entry: Entry, pin: Pin) -> bool:
        """Pin an entry; False where the quota is reached, or the pin's time is over already."""
        if pin.until <= self._clock():
            entry.pins.pop(pin.owner, None)
            return False
        quota = self._limits.pinned_nbytes
        if not self._pins(entry) and quota is not None and self._pinned_nbytes() + entry.nbytes > quota:
            return False
        entry.pins[pin.owner] = pin.until
        return True

    def _pinned_nbytes(self) -> int:
        live = [entry for ns_id in self.spaces for entry in self._entries(ns_id).values()]
        return sum(entry.nbytes for entry in live if self._pins(entry))

    # Room

    def _fit(self, ns_id: bytes, tenant: bytes, nbytes: int, family: set[bytes] | frozenset[bytes]) -> bool:
        """Make room for ``nbytes`` more, within each limit among those whom it is for; nothing goes where it fails."""
        limits = self._limits
        plans = (
            (limits.of_tenant(tenant), lambda ns, e: ns == ns_id and e.header.tenant == tenant),
            (limits.of_namespace(ns_id), lambda ns, e: ns == ns_id),
            (limits.budget, lambda ns, e: True),
        )
        going: list[tuple[bytes, bytes]] = []
        for limit, whose in plans:
            while limit is not None and self._held(whose, going) + nbytes > limit:
                victim = self._victim(whose, going, family)
                if victim is None:
                    if nbytes:
                        return False
                    break
                going.append(victim)
        for victim_ns, key in going:
            self._counters.count_evicted(self._remove(victim_ns, [key]))
        return True

    def _all(self, going: Sequence[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes, Entry]]:
        for ns_id, entries in self.spaces.items():
            for key, entry in entries.items():
                if (ns_id, key) not in going:
                    yield ns_id, key, entry

    def _held(self, whose: Callable[[bytes, Entry], bool], going: Sequence[tuple[bytes, bytes]]) -> int:
        return sum(entry.nbytes for ns_id, _, entry in self._all(going) if whose(ns_id, entry))

    def _victim(
        self,
        whose: Callable[[bytes, Entry], bool],
        going: Sequence[tuple[bytes, bytes]],
        family: set[bytes] | frozenset[bytes],
    ) -> tuple[bytes, bytes] | None:
        """Return the least recently used of the entries that are leaves, not pinned and of no relative of the store."""
        parents = {(ns_id, entry.header.parent) for ns_id, _, entry in self._all(going)}
        may_go = [
            (entry.stamp, ns_id, key)
            for ns_id, key, entry in self._all(going)
            if whose(ns_id, entry) and (ns_id, key) not in parents and key not in family and not self._pins(entry)
        ]
        return min(may_go)[1:] if may_go else None
