"""The contract of a tier of the store server: ``disk`` and ``shared``, and any later one.

Theory of operation. A tier maps (namespace, key) to a record (:mod:`tierkv.payload`). It is a cache: it may lose any
entry at any moment, and whoever asks treats that as a miss. Every method is synchronous, safe to call from several
threads, bounded in time, and **never raises because of its environment** (a full disk, a dead Redis, damaged bytes):
such a fault is a miss or a failed store, counted in :class:`TierStat`, and puts the tier out for a back-off period in
which it answers at once. Results are always per key. A record that fails verification is never delivered: it is
deleted where it is ours, and counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
import xxhash

from tierkv.health import Health
from tierkv.layout import Namespace
from tierkv.payload import HEADER_NBYTES, BadRecordError, Header, open_record


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


class EntryInfo(NamedTuple):
    """What a tier knows about a stored chunk. ``nbytes`` is what it costs there; times are seconds since 1970."""

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


class Status(IntEnum):
    """Result of an operation on one key."""

    OK = 0  #: fetched, or stored
    MISS = 1  #: not there
    EXISTS = 2  #: stored already; nothing was written
    BAD = 3  #: the bytes there failed verification; they were deleted if ours
    DROPPED = 4  #: no room, or the tier is behind; nothing was written
    ERROR = 5  #: the tier failed or is out; nothing was written or delivered


class Fetched(NamedTuple):
    """Result of a fetch of one key; ``header`` is set if and only if ``status`` is ``Status.OK``."""

    status: Status
    header: Header | None = None


class TierStat(NamedTuple):
    """Counters since start, and the state now. Bytes in bytes, ``since`` in seconds since 1970 (0: never out).

    ``state`` is ``"up"``, or ``"out"`` while a fault's back-off holds; ``reason`` says the fault in a sentence.
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


class Counters:
    """The counters behind a :class:`TierStat`, safe to raise from several threads.

    Invariant: hits, misses and failed reads (a part of ``num_errors``) add up to the keys that were asked for. A record
    that failed verification is a miss as well as a bad one.
    """

    def __init__(self) -> None:
        self.num_hits = self.num_misses = self.num_stored = self.num_evicted = 0
        self.num_dropped = self.num_bad = self.num_errors = 0
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
            self.num_errors += statuses.count(Status.ERROR)

    def count_evicted(self, num: int) -> None:
        """Count entries that were removed to make room, or by order."""
        with self._lock:
            self.num_evicted += num

    def count_bad(self, num: int) -> None:
        """Count records that failed verification outside of a fetch."""
        with self._lock:
            self.num_bad += num

    def stat(self, name: str, health: Health, *, num_entries: int, nbytes: int, budget: int) -> TierStat:
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

    def fetch(self, ns_id: bytes, refs: Sequence[Ref], sink: Sink) -> list[Fetched]:
        """Copy payloads into the buffers that ``sink`` gives, verified there, and note their use.

        A buffer whose result is not ``Status.OK`` may hold anything.
        """

    def store(self, ns_id: bytes, records: Sequence[Record]) -> list[Status]:
        """Store records of one namespace, write-once: a key that is there is left alone (``Status.EXISTS``)."""

    def evict(self, ns_id: bytes, refs: Sequence[Ref]) -> int:
        """Remove the entries and return how many were there."""

    def drop_namespace(self, ns_id: bytes) -> int:
        """Remove a namespace with all its entries and return how many there were."""

    def entries(self, ns_id: bytes) -> Iterator[EntryInfo]:
        """Yield what is stored in a namespace, in no order, from a snapshot."""

    def stat(self) -> TierStat:
        """Return counters and state."""

    def close(self) -> None:
        """Give back every resource. Idempotent."""


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
