"""The contract of a tier of the store server: ``disk`` and ``shared``, and any later one.

Theory of operation. A tier maps (namespace, key) to a record (:mod:`tierkv.payload`). It is a cache: it may lose any
entry at any moment, and whoever asks treats that as a miss. Every method is synchronous, safe to call from several
threads, bounded in time, and **never raises because of its environment** (a full disk, a dead Redis, damaged bytes):
such a fault is a miss or a failed store, counted in :class:`TierStat`, and puts the tier out for a back-off period in
which it answers at once. Results are always per key. A record that fails verification is never delivered: it is
deleted where it is ours, and counted.

*Lifetime.* An entry ends when room is needed, by order (``evict``), or when it expires: ``ttl_s`` after it was written,
``idle_s`` after it was last read, or at a time set for it. A *pin* keeps an entry until its own time is over: nothing
but an order with ``force`` removes a pinned entry. An entry that has expired is a miss at once, whenever it is swept.

*After a crash.* A process that dies loses nothing that ``store`` had answered for; what the machine's crash may lose
each tier says for itself. What is lost is a miss.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
import xxhash

from tierkv.health import Health
from tierkv.layout import Namespace
from tierkv.payload import HEADER_NBYTES, BadRecordError, Header, open_record
from tierkv.policy import Hint


class Ref(NamedTuple):
    """How a chunk is asked for: its key, and the key of its anchor (:func:`tierkv.keys.anchor_index`)."""

    key: bytes
    anchor: bytes


class Record(NamedTuple):
    """A record to be stored.

    Attributes:
        header: the header, already packed at the start of ``data``.
        data: ``record_nbytes(payload)`` bytes: header, payload, padding. Valid until ``store`` returns.
        tokens: the chunk's token ids as ``pack_tokens`` gives them, or empty where the user does not store them.
    """

    header: Header
    data: memoryview
    tokens: bytes = b""


class Pin(NamedTuple):
    """Who wants an entry kept, and until when (seconds since 1970). An owner has one pin on an entry."""

    owner: str
    until: float


class EntryInfo(NamedTuple):
    """What a tier knows about a stored chunk. ``nbytes`` is what it costs there; times are seconds since 1970.

    ``expires`` is 0 for an entry that never does; ``pins`` are those that hold now.
    """

    key: bytes
    parent: bytes
    anchor: bytes
    position: int
    num_tokens: int
    nbytes: int
    tenant: bytes
    created: float
    last_used: float
    num_hits: int
    expires: float = 0.0
    pins: tuple[Pin, ...] = ()


class Usage(NamedTuple):
    """What a tenant has in a namespace of a tier, in the tier's own bytes."""

    num_entries: int = 0
    nbytes: int = 0
    pinned_nbytes: int = 0

    def __add__(self, other: Usage) -> Usage:  # type: ignore[override]
        return Usage(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Limits:
    """What a tier may hold, and for how long. All may change while it runs. None: no limit of that kind.

    Attributes:
        budget: bytes over all namespaces. None where somebody else sets it (Redis's ``maxmemory``).
        reserve_nbytes: bytes of the volume that stay free (disk).
        ttl_s: seconds after its store that an entry expires.
        idle_s: seconds after its last read (or its store) that an entry expires.
        namespace_nbytes: quota of a namespace: bytes by its id, ``b""`` for those that are not named.
        tenant_nbytes: quota of a tenant within a namespace: bytes by its digest, ``b""`` for those that are not named.
        pinned_nbytes: bytes that pins may hold, over all namespaces.

    A namespace or a tenant at its quota makes room among its own entries; one whose entries are all pinned has its
    stores dropped.
    """

    budget: int | None = None
    reserve_nbytes: int = 0
    ttl_s: float | None = None
    idle_s: float | None = None
    namespace_nbytes: Mapping[bytes, int] = field(default_factory=dict)
    tenant_nbytes: Mapping[bytes, int] = field(default_factory=dict)
    pinned_nbytes: int | None = None

    def of_namespace(self, ns_id: bytes) -> int | None:
        """Return the quota of a namespace in bytes."""
        return self.namespace_nbytes.get(ns_id, self.namespace_nbytes.get(b""))

    def of_tenant(self, tenant: bytes) -> int | None:
        """Return the quota of a tenant in bytes, within one namespace."""
        return self.tenant_nbytes.get(tenant, self.tenant_nbytes.get(b""))

    def expires(self, created: float, last_used: float, until: float = 0.0) -> float:
        """Return when an entry expires: the earliest of what applies, 0 for never."""
        times = [until] if until else []
        if self.ttl_s is not None:
            times.append(created + self.ttl_s)
        if self.idle_s is not None:
            times.append(max(created, last_used) + self.idle_s)
        return min(times, default=0.0)


class Status(IntEnum):
    """Result of an operation on one key."""

    OK = 0  #: fetched, or stored
    MISS = 1  #: not there
    EXISTS = 2  #: stored already; nothing was written
    BAD = 3  #: the bytes there failed verification; they were deleted if ours
    DROPPED = 4  #: no room, or the tier is behind; nothing was written
    ERROR = 5  #: the tier failed or is out; nothing was written or delivered
    DECLINED = 6  #: the tier's policy did not think it worth the room; nothing was written


class Offer(IntEnum):
    """Why a tier is given records, which decides whether its policy may decline them for lack of room."""

    ORDER = 0  #: somebody ordered it: all are stored that fit
    REQUEST = 1  #: a request computed or fetched it


class Fetched(NamedTuple):
    """Result of a fetch of one key; ``header`` is set if and only if ``status`` is ``Status.OK``."""

    status: Status
    header: Header | None = None


class TierStat(NamedTuple):
    """Counters since start, and the state now. Bytes in bytes, ``since`` in seconds since 1970 (0: never out).

    ``state`` is ``"up"``, ``"read-only"`` while writes fail, or ``"out"`` while a fault's back-off holds; ``reason``
    says the fault in a sentence. ``num_evicted`` went to make room, ``num_expired`` when their time was over, and
    ``num_removed`` by order. ``num_declined`` were offered and not worth their room to ``policy``, which is empty where
    somebody else decides what stays.
    """

    name: str
    state: str
    reason: str
    since: float
    num_entries: int
    nbytes: int
    budget: int
    num_hits: int
    num_misses: int
    num_stored: int
    num_evicted: int
    num_dropped: int
    num_bad: int
    num_errors: int
    num_expired: int = 0
    num_removed: int = 0
    pinned_nbytes: int = 0
    num_declined: int = 0
    policy: str = ""


class Counters:
    """The counters behind a :class:`TierStat`, safe to raise from several threads.

    Invariant: hits, misses and failed reads (a part of ``num_errors``) add up to the keys that were asked for. A record
    that failed verification is a miss as well as a bad one.
    """

    def __init__(self) -> None:
        self.num_hits = self.num_misses = self.num_stored = self.num_evicted = 0
        self.num_dropped = self.num_bad = self.num_errors = self.num_expired = self.num_removed = 0
        self.num_declined = 0
        self._lock = threading.Lock()

    def count_fetched(self, results: Iterable[Fetched]) -> None:
        """Count the results of a fetch."""
        statuses = [result.status for result in results]
        with self._lock:
            self.num_hits += statuses.count(Status.OK)
            self.num_bad += statuses.count(Status.BAD)
            self.num_misses += statuses.count(Status.MISS) + statuses.count(Status.BAD)
            self.num_errors += statuses.count(Status.ERROR)

    def count_stored(self, statuses: Sequence[Status]) -> None:
        """Count the results of a store."""
        with self._lock:
            self.num_stored += statuses.count(Status.OK)
            self.num_dropped += statuses.count(Status.DROPPED)
            self.num_declined += statuses.count(Status.DECLINED)
            self.num_errors += statuses.count(Status.ERROR)

    def count_evicted(self, num: int) -> None:
        """Count entries that were removed to make room."""
        with self._lock:
            self.num_evicted += num

    def count_removed(self, num: int) -> None:
        """Count entries that were removed by order."""
        with self._lock:
            self.num_removed += num

    def count_expired(self, num: int) -> None:
        """Count entries that were removed because their time was over."""
        with self._lock:
            self.num_expired += num

    def count_bad(self, num: int) -> None:
        """Count records that failed verification outside of a fetch."""
        with self._lock:
            self.num_bad += num

    def stat(
        self,
        name: str,
        health: Health,
        *,
        num_entries: int,
        nbytes: int,
        budget: int,
        pinned_nbytes: int = 0,
        policy: str = "",
    ) -> TierStat:
        """Return the counters with the state that ``health`` is in."""
        with self._lock:
            return TierStat(
                name=name,
                state="up" if health.up else "out",
                reason=health.reason,
                since=health.out_since,
                num_entries=num_entries,
                nbytes=nbytes,
                budget=budget,
                num_hits=self.num_hits,
                num_misses=self.num_misses,
                num_stored=self.num_stored,
                num_evicted=self.num_evicted,
                num_dropped=self.num_dropped,
                num_bad=self.num_bad,
                num_errors=self.num_errors,
                num_expired=self.num_expired,
                num_removed=self.num_removed,
                pinned_nbytes=pinned_nbytes,
                num_declined=self.num_declined,
                policy=policy,
            )


#: Returns, for the index of a ref in a fetch, the writable buffers of the ranks' parts, in order.
Sink = Callable[[int], "Sequence[memoryview]"]


class Tier(Protocol):
    """A place where records are kept. See the module's docstring for what every method promises."""

    name: str

    def add_namespace(self, namespace: Namespace) -> None:
        """Make a namespace known, so that its entries can be stored, and keep its description. Idempotent."""

    def namespaces(self) -> dict[bytes, Namespace]:
        """Return every namespace with entries here, by id."""

    def match(self, ns_id: bytes, refs: Sequence[Ref]) -> list[bool]:
        """Return for each ref whether it is stored here now. Touches nothing: only reads renew life."""

    def fetch(
        self, ns_id: bytes, refs: Sequence[Ref], sink: Sink, *, quiet: bool = False, keep: bool = False
    ) -> list[Fetched]:
        """Copy payloads into the buffers that ``sink`` gives, verified there, and note their use.

        A buffer whose result is not ``Status.OK`` may hold anything. ``quiet``: a read of our own (copying to another
        tier, verifying): it renews nothing and counts no hit or miss. ``keep``: what is damaged stays where it is.
        """

    def store(self, ns_id: bytes, records: Sequence[Record], *, offer: Offer = Offer.ORDER) -> list[Status]:
        """Store records of one namespace, write-once: a key that is there is left alone (``Status.EXISTS``).

        Stored entries expire as the tier's limits say. ``Status.DROPPED`` where there is no room that may be made;
        ``Status.DECLINED`` where something would have to go for it that is worth more. A tier with room takes all.
        """

    def note(self, ns_id: bytes, tenant: bytes, keys: Sequence[bytes], hint: Hint | None = None) -> None:
        """Note that a request asks for a chain, root first, stored or not: once a request, never from a match.

        Renews and teaches the tier's policy; what is stored expires as before.

        Args:
            tenant: digest of the request's tenant.
            hint: what its application says of it, within what its tenant may hold.
        """

    def release(self, ns_id: bytes, session: str) -> bool:
        """Note that a session that was named in a hint is over; returns whether the tier's policy knew it."""

    def worth(self, ns_id: bytes, key: bytes) -> float:
        """Return the hits a second that holding a chunk is expected to bring, stored or not; 0 where nothing is known.

        Orders what is to be brought here ahead of its use.
        """

    def joined(self, engine: str, ns_id: bytes, most: int) -> None:
        """Note an engine of a namespace, by a name of its own, whose host pool has room for ``most`` chunks."""

    def left(self, engine: str) -> None:
        """Note that an engine is gone, with all that it kept."""

    def hold(self, engine: str, took: Sequence[bytes], gone: Sequence[bytes]) -> bool:
        """Note which chunks an engine keeps in its host pool from now on, and which it does not any more.

        A tier whose policy weighs it does without what every engine of the namespace keeps, where room is needed.
        Returns whether that may be so: then an engine offers again what it is about to let go of.
        """

    def evict(self, ns_id: bytes, refs: Sequence[Ref], *, force: bool = False) -> int:
        """Remove the entries and return how many were there. Pinned ones stay, unless ``force``."""

    def drop_namespace(self, ns_id: bytes) -> int:
        """Remove a namespace with all its entries, pinned ones too, and return how many there were."""

    def pin(self, ns_id: bytes, refs: Sequence[Ref], pin: Pin) -> list[bool]:
        """Pin entries and return for each ref whether it is stored here and pinned now.

        ``refs`` are consecutive chunks, ancestors first; pinning stops where an entry is missing or the pins' quota is
        reached. A second pin of an owner replaces the first.
        """

    def unpin(self, ns_id: bytes, refs: Sequence[Ref], owner: str = "") -> int:
        """Take an owner's pins (all owners', if empty) off the entries and return how many entries had one."""

    def expire_at(self, ns_id: bytes, refs: Sequence[Ref], until: float) -> int:
        """Let entries expire at ``until`` (seconds since 1970; 0: as the limits say); returns how many there were."""

    def entries(self, ns_id: bytes) -> Iterator[EntryInfo]:
        """Yield what is stored in a namespace, in no order, from a snapshot. :func:`below` picks a prefix's."""

    def usage(self, ns_id: bytes) -> dict[bytes, Usage]:
        """Return what each tenant (digest) has in a namespace."""

    def tokens(self, ns_id: bytes, ref: Ref) -> bytes:
        """Return the token ids that were stored with a chunk (``pack_tokens``), or nothing."""

    def set_limits(self, limits: Limits) -> None:
        """Change the limits; entries beyond them go soon after."""

    def retry_in_s(self) -> float:
        """Return the seconds until a store is tried again after one that failed; 0: it may be tried now."""

    def stat(self) -> TierStat:
        """Return counters and state."""

    def close(self) -> None:
        """Give back every resource. Idempotent."""


def below(entries: Iterable[EntryInfo], key: bytes) -> list[EntryInfo]:
    """Return the entry of ``key`` and all that descend from it, ancestors first."""
    by_parent: dict[bytes, list[EntryInfo]] = {}
    found: list[EntryInfo] = []
    for entry in entries:
        if entry.key == key:
            found.append(entry)
        else:
            by_parent.setdefault(entry.parent, []).append(entry)
    at = [key]
    while at:
        children = by_parent.pop(at.pop(), [])
        found += children
        at += [child.key for child in children]
    return found


def deliver(record: memoryview, ref: Ref, ns_id: bytes, payload_nbytes: int, parts: Sequence[memoryview]) -> Header:
    """Copy the payload of ``record`` into ``parts`` and verify it there. Releases the GIL while it copies.

    Raises:
        BadRecordError: not the record of ``ref``, damaged, or the bytes that arrived do not match its checksum.
        ForeignRecordError: of a format version that this program does not know.
    """
    header = open_record(record, key=ref.key, ns_id=ns_id, payload_nbytes=payload_nbytes)
    source = np.frombuffer(record, dtype=np.uint8, count=payload_nbytes, offset=HEADER_NBYTES)
    digest, at = xxhash.xxh3_128(), 0
    for part in parts:
        np.copyto(np.frombuffer(part, dtype=np.uint8), source[at : at + len(part)])
        digest.update(part)
        at += len(part)
    if at != payload_nbytes or digest.digest() != header.checksum:
        raise BadRecordError(f"the payload of key {ref.key.hex()[:16]} does not match its checksum")
    return header
