"""Copies stored chunks from one place to another: what is to be copied, what came of it, and in which order.

Theory of operation. A *place* is a store server or a Redis (:mod:`tierkv.cli.places`). First the chunks of the
selection are listed at the source, parents before children, and the destination is asked which of them it has; then the
others are read, verified here, and written. Keys are written once, so whatever ended a copy, doing it again goes on
where it stopped, and what was copied by then is usable: no chunk comes before its parent. One batch is read ahead while
another is written.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import NamedTuple, Protocol

import msgspec

from tierkv.errors import RefusedError, UnavailableError
from tierkv.layout import Namespace
from tierkv.payload import HEADER_NBYTES, BadRecordError, ForeignRecordError, checksum, open_record
from tierkv.selection import Select
from tierkv.sizes import format_size
from tierkv.tiers.base import Ref

#: Chunks whose presence is asked for at a time, and bytes and chunks of a batch that is read and written.
_ASK_CHUNKS = 512
BATCH_NBYTES = 8 << 20
_BATCH_CHUNKS = 64
#: Refusals in a row after which the destination is not asked any more.
MAX_REFUSALS = 16


class Item(NamedTuple):
    """A chunk to copy, and when it expires at the source (seconds since 1970; 0: never)."""

    ref: Ref
    until: float


class Page(NamedTuple):
    """Chunks of one namespace; ``num_host`` more are in host pools alone."""

    ns_id: bytes
    items: list[Item]
    num_host: int


class Fault(Enum):
    """Why a chunk was not read."""

    GONE = "gone"
    BAD = "bad"


class Wrote(NamedTuple):
    """What came of writing a chunk: ``copied``, ``there`` (it was, already) or ``refused``, and then why."""

    state: str
    why: str = ""


class Place(Protocol):
    """Where chunks are copied from, or to.

    Everything raises ``UnavailableError`` where the place does not answer any more.
    """

    name: str  #: for people, without secrets
    max_nbytes: int  #: the longest record that travels

    def identity(self) -> str:
        """Return what is the same for two names of one place."""

    def namespaces(self) -> dict[bytes, Namespace]:
        """Return every namespace that is known here, by id."""

    def pages(self, select: Select) -> Iterator[Page]:
        """Yield the chunks of the prefixes that fit, their ancestors included, parents first."""

    def chain(self, select: Select) -> Page:
        """Return the chunks of the one prefix that ``select.prefix`` names.

        Raises:
            NotFoundError, RefusedError: it is not one.
        """

    def stored(self, ns_id: bytes, refs: Sequence[Ref]) -> list[bool]:
        """Return for each chunk whether it is here."""

    def read(self, namespace: Namespace, refs: Sequence[Ref]) -> Iterator[bytes | Fault]:
        """Yield the record of each chunk: header, payload, packed token ids."""

    def write(self, namespace: Namespace, records: Sequence[tuple[bytes, float]]) -> Iterator[Wrote]:
        """Store records, each with the time when it is to expire (0: as the limits here say)."""

    def cost(self, namespace: Namespace) -> int:
        """Return the bytes that a chunk takes here."""

    def room(self) -> int | None:
        """Return the bytes that can be stored before something has to go; None where nobody knows."""

    def trouble(self) -> str:
        """Return why nothing is written here now, in a sentence; empty where it is."""

    def finish(self) -> None:
        """See that everybody who should knows of what was written."""

    def close(self) -> None:
        """Let go of it. Idempotent."""


class Tally(msgspec.Struct):
    """Chunks of one namespace by what became of them. In a dry run ``num_copied`` would be.

    Attributes:
        num_chunks: of the selection, those in host pools alone left out.
        num_there: the destination had.
        num_bad, num_gone: were damaged, or not there any more, when they were read.
        num_refused: the destination did not take; ``reason`` is the first of the reasons.
        num_host: are in host pools alone, which are not copied.
        nbytes: of the payloads that were copied.
    """

    namespace: str
    model: str
    num_chunks: int = 0
    num_copied: int = 0
    num_there: int = 0
    num_bad: int = 0
    num_gone: int = 0
    num_refused: int = 0
    num_host: int = 0
    nbytes: int = 0
    reason: str = ""

    def refuse(self, num: int, why: str) -> None:
        """Count chunks that the destination does not take."""
        self.num_refused += num
        self.reason = self.reason or why


#: Raises ``RefusedError`` where no engine at a place with the namespaces given could find the chunks of a namespace.
Fits = Callable[[Namespace, dict[str, Namespace]], None]


class Copier:
    """One copy.

    Args:
        source, destination: the places; the caller's to close.
        fits: raises ``RefusedError`` for a namespace that no engine at the destination could find.
        keep_ttl: what expires at the source expires then at the destination too.

    Attributes:
        tallies: by namespace id.
        todo: what :meth:`plan` found to copy, in order.
    """

    def __init__(self, source: Place, destination: Place, fits: Fits, *, keep_ttl: bool = True) -> None:
        self._source = source
        self._destination = destination
        self._fits = fits
        self._keep_ttl = keep_ttl
        self._spaces = source.namespaces()
        self._refused_in_a_row = 0
        self.tallies: dict[bytes, Tally] = {}
        self.todo: list[tuple[Namespace, Item]] = []

    @property
    def num_done(self) -> int:
        """Chunks of the plan that something became of."""
        return sum(t.num_copied + t.num_bad + t.num_gone + t.num_refused + t.num_there for t in self.tallies.values())

    @property
    def num_total(self) -> int:
        """Chunks of the selection."""
        return sum(t.num_chunks for t in self.tallies.values())

    # The plan

    def plan(self, select: Select, prefixes: Sequence[str] = ()) -> None:
        """Find out what is to be copied: the prefixes that fit ``select``, or those with the ids ``prefixes``.

        Raises:
            NotFoundError, RefusedError: an id is not one stored prefix's.
            UnavailableError: a place does not answer.
        """
        pages = (
            [self._source.chain(msgspec.structs.replace(select, prefix=prefix)) for prefix in prefixes]
            if prefixes
            else self._source.pages(select)
        )
        known = {ns_id.hex(): namespace for ns_id, namespace in self._destination.namespaces().items()}
        seen: set[tuple[bytes, bytes]] = set()
        refusals: dict[bytes, str] = {}
        for page in pages:
            namespace = self._spaces.get(page.ns_id)
            if namespace is None:  # stored since the copy began
                continue
            if page.ns_id not in self.tallies:
                self.tallies[page.ns_id] = Tally(page.ns_id.hex(), namespace.model)
                refusals[page.ns_id] = self._why_not(namespace, known)
            tally = self.tallies[page.ns_id]
            items = [item for item in page.items if (page.ns_id, item.ref.key) not in seen]
            seen.update((page.ns_id, item.ref.key) for item in items)
            tally.num_chunks += len(items)
            tally.num_host += page.num_host
            if refusals[page.ns_id]:
                tally.refuse(len(items), refusals[page.ns_id])
            else:
                self._plan_items(namespace, tally, items)

    def _why_not(self, namespace: Namespace, known: dict[str, Namespace]) -> str:
        """Return why a namespace is not copied, in a sentence; empty where it is."""
        try:
            self._fits(namespace, known)
        except RefusedError as error:
            return str(error)
        nbytes = HEADER_NBYTES + namespace.payload_nbytes + 4 * namespace.layout.chunk_tokens
        most = min(self._source.max_nbytes, self._destination.max_nbytes)
        if nbytes > most:
            return (
                f"its chunks of {format_size(nbytes)} are too long to travel over a connection (at most "
                f"{format_size(most)}); set a smaller chunk_tokens"
            )
        return ""

    def _plan_items(self, namespace: Namespace, tally: Tally, items: Sequence[Item]) -> None:
        for at in range(0, len(items), _ASK_CHUNKS):
            batch = items[at : at + _ASK_CHUNKS]
            there = self._destination.stored(namespace.ns_id(), [item.ref for item in batch])
            tally.num_there += sum(there)
            self.todo += [(namespace, item) for item, is_there in zip(batch, there, strict=True) if not is_there]

    def needed_nbytes(self) -> int:
        """Return what the plan takes at the destination."""
        costs = {ns_id: self._destination.cost(self._spaces[ns_id]) for ns_id in self.tallies}
        return sum(costs[namespace.ns_id()] for namespace, _ in self.todo)

    def check_room(self) -> None:
        """See that the plan fits without anything being evicted for it.

        Raises:
            RefusedError: it does not.
        """
        needed, room = self.needed_nbytes(), self._destination.room()
        if room is not None and needed > room:
            raise RefusedError(
                f"{len(self.todo):,} chunks need {format_size(needed)} at {self._destination.name}, which has room for "
                f"{format_size(room)}; narrow the selection, make room there, or let what is least used there go with "
                f"--make-room"
            )

    def count_planned(self) -> None:
        """Count what would be copied as if it were."""
        for namespace, _ in self.todo:
            tally = self.tallies[namespace.ns_id()]
            tally.num_copied += 1
            tally.nbytes += namespace.payload_nbytes

    # The copy

    def run(self, rate: int = 0) -> Iterator[int]:
        """Copy what was planned and yield after each batch how many chunks it had.

        Args:
            rate: payload bytes a second at most; 0: as fast as it goes.

        Raises:
            UnavailableError: a place does not answer any more; what was copied stays, and is counted.
            RefusedError: the destination takes nothing any more.
        """
        batches = list(self._batches())
        started, nbytes = time.monotonic(), 0
        with ThreadPoolExecutor(1, "tierkv-copy") as reader:
            ahead = reader.submit(self._read, *batches[0]) if batches else None
            for i, (namespace, items) in enumerate(batches):
                assert ahead is not None
                records, error = ahead.result()
                if error is None and i + 1 < len(batches):
                    ahead = reader.submit(self._read, *batches[i + 1])
                self._write(namespace, items, records)
                yield len(records)
                if error is not None:
                    raise error
                nbytes += len(records) * namespace.payload_nbytes
                if rate:
                    time.sleep(max(0.0, started + nbytes / rate - time.monotonic()))
        self._destination.finish()

    def _batches(self) -> Iterator[tuple[Namespace, list[Item]]]:
        batch: list[Item] = []
        of: Namespace | None = None
        for namespace, item in self.todo:
            most = max(1, min(_BATCH_CHUNKS, BATCH_NBYTES // namespace.payload_nbytes))
            if of is not None and (namespace is not of or len(batch) >= most):
                yield of, batch
                batch = []
            of = namespace
            batch.append(item)
        if of is not None and batch:
            yield of, batch

    def _read(
        self, namespace: Namespace, items: Sequence[Item]
    ) -> tuple[list[bytes | Fault], UnavailableError | RefusedError | None]:
        """Return the records of a batch, verified, as far as they could be read, and what ended it."""
        records: list[bytes | Fault] = []
        try:
            for item, record in zip(items, self._source.read(namespace, [i.ref for i in items]), strict=False):
                records.append(record if isinstance(record, Fault) else _verified(record, item.ref, namespace))
        except (UnavailableError, RefusedError) as error:
            return records, error
        return records, None

    def _write(self, namespace: Namespace, items: Sequence[Item], records: Sequence[bytes | Fault]) -> None:
        tally, now = self.tallies[namespace.ns_id()], time.time()
        ready: list[tuple[bytes, float]] = []
        for item, record in zip(items, records, strict=False):
            until = item.until if self._keep_ttl else 0.0
            if record is Fault.BAD:
                tally.num_bad += 1
            elif record is Fault.GONE or 0 < until <= now:
                tally.num_gone += 1
            elif isinstance(record, bytes):
                ready.append((record, until))
        for wrote in self._destination.write(namespace, ready) if ready else ():
            if wrote.state == "copied":
                tally.num_copied += 1
                tally.nbytes += namespace.payload_nbytes
            elif wrote.state == "there":
                tally.num_there += 1
            else:
                tally.refuse(1, wrote.why)
            self._watch(wrote)

    def _watch(self, wrote: Wrote) -> None:
        """See that the destination goes on taking chunks.

        Raises:
            RefusedError: it takes nothing now, or has refused many in a row.
        """
        if wrote.state != "refused":
            self._refused_in_a_row = 0
            return
        self._refused_in_a_row += 1
        why = self._destination.trouble()
        if not why and self._refused_in_a_row >= MAX_REFUSALS:
            why = f"it refused {self._refused_in_a_row} in a row: {wrote.why}"
        if why:
            raise RefusedError(f"{self._destination.name} takes nothing more ({why})")


def _verified(record: bytes, ref: Ref, namespace: Namespace) -> bytes | Fault:
    """Return a record that has come if it is sound, and its chunk's."""
    nbytes = namespace.payload_nbytes
    try:
        header = open_record(record, key=ref.key, ns_id=namespace.ns_id(), payload_nbytes=nbytes)
        if header.layout_id != namespace.layout.layout_id():
            return Fault.BAD
    except (BadRecordError, ForeignRecordError, struct.error):
        return Fault.BAD
    payload = memoryview(record)[HEADER_NBYTES : HEADER_NBYTES + nbytes]
    return record if checksum(payload) == header.checksum else Fault.BAD
