"""Replays of requests against a real disk tier, alone or below a host index: what policies come to in the product."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from bench_policy_traces import Request
from records import CHUNK_TOKENS, Clock, fetch, make_namespace
from tierkv.hostindex import Entry
from tierkv.keys import anchor_index
from tierkv.payload import HEADER_NBYTES, Header, checksum, record_nbytes
from tierkv.policy import Hint
from tierkv.tiers.base import Offer, Record, Ref, Status
from tierkv.tiers.disk import DiskTier

PAYLOAD_NBYTES = 12 << 10
#: Bytes of the pages that a record takes.
COST = 16 << 10
NAMESPACE = make_namespace(payload_nbytes=PAYLOAD_NBYTES)
NS_ID = NAMESPACE.ns_id()
_PAYLOAD = bytes(range(256)) * (PAYLOAD_NBYTES // 256)
_CHECKSUM = checksum(_PAYLOAD)
#: As the engine's STORE commands have.
_PER_COMMAND = 64


@lru_cache(maxsize=1 << 18)
def key_of(block: int) -> bytes:
    """Return the key of a block of a trace."""
    return hashlib.sha256(b"block %d" % block).digest()


def record_of(keys: Sequence[bytes], i: int, tenant: bytes, now: float) -> Record:
    """Return the record of a chain's chunk."""
    return make_record(keys[i], keys[i - 1] if i else bytes(32), keys[anchor_index(i)], i, tenant, now)


def make_record(key: bytes, parent: bytes, anchor: bytes, position: int, tenant: bytes, now: float) -> Record:
    """Return a record whose payload is that of all."""
    header = Header(
        layout_id=NAMESPACE.layout.layout_id(),
        ns_id=NS_ID,
        key=key,
        parent=parent,
        anchor=anchor,
        position=position,
        num_tokens=CHUNK_TOKENS,
        tenant=tenant,
        created=now,
        raw_nbytes=PAYLOAD_NBYTES,
        checksum=_CHECKSUM,
    )
    data = bytearray(record_nbytes(PAYLOAD_NBYTES))
    data[:HEADER_NBYTES] = header.pack()
    data[HEADER_NBYTES : HEADER_NBYTES + PAYLOAD_NBYTES] = _PAYLOAD
    return Record(header, memoryview(data))


def refs_of(keys: Sequence[bytes]) -> list[Ref]:
    return [Ref(key, keys[anchor_index(i)]) for i, key in enumerate(keys)]


def leading(found: Iterable[bool]) -> int:
    """Return the length of a run."""
    num = 0
    for there in found:
        if not there:
            break
        num += 1
    return num


class Figures:
    """What a replay came to, in chunks."""

    def __init__(self) -> None:
        self.num_asked = self.num_hits = self.num_written = self.num_declined = 0

    def __repr__(self) -> str:
        return f"{self.num_hits} hits, {self.num_written} written, {self.num_declined} declined of {self.num_asked}"


class DiskReplay:
    """Requests as an engine without a host pool worth the name makes them, in a disk tier's time."""

    def __init__(self, tier: DiskTier, clock: Clock) -> None:
        tier.add_namespace(NAMESPACE)
        self.tier = tier
        self.figures = Figures()
        self._clock = clock
        self._began = clock.now

    def run(self, requests: Iterable[Request], tenant: Callable[[int], bytes] = lambda i: bytes(16)) -> Figures:
        """Replay, and return the figures so far. After each request what is stored is checked for holes in chains."""
        for number, (time, blocks) in enumerate(requests):
            self._clock.now = max(self._clock.now, self._began + time)
            self.request([key_of(block) for block in blocks], tenant(number))
        return self.figures

    def request(self, keys: Sequence[bytes], tenant: bytes = bytes(16)) -> int:
        """Make one request, and return its hits."""
        tier, figures, refs = self.tier, self.figures, refs_of(keys)
        tier.note(NS_ID, tenant, keys)
        hits = leading(tier.match(NS_ID, refs))
        if hits:
            results, _ = fetch(tier, NAMESPACE, refs[hits - 1 : hits])  # the bytes of one will do
            assert results[0].status is Status.OK
        figures.num_asked += len(keys)
        figures.num_hits += hits
        for at in range(hits, len(keys), _PER_COMMAND):
            stop = min(at + _PER_COMMAND, len(keys))
            records = [record_of(keys, i, tenant, self._clock.now) for i in range(at, stop)]
            statuses = tier.store(NS_ID, records, offer=Offer.REQUEST)
            figures.num_written += statuses.count(Status.OK)
            figures.num_declined += statuses.count(Status.DECLINED)
            if Status.DECLINED in statuses:
                break
        there = tier.match(NS_ID, refs)
        assert True not in there[leading(there) :], "a chunk went before its descendants"
        return hits


def orphans(tier: DiskTier) -> list[bytes]:
    """Return the keys of stored chunks whose parent is not stored."""
    entries = {entry.key: entry for entry in tier.entries(NS_ID)}
    return [key for key, entry in entries.items() if entry.position and entry.parent not in entries]


class DiskBelow:
    """A disk tier below the host pool of a :class:`bench_policy_stack.Stack`."""

    def __init__(self, tier: DiskTier, clock: Callable[[], float], engine: str = "engine", most: int = 1 << 20) -> None:
        tier.add_namespace(NAMESPACE)
        tier.joined(engine, NS_ID, most)
        self.tier = tier
        self._clock = clock
        self._engine = engine

    def note(self, keys: Sequence[bytes], hint: Hint | None) -> None:
        self.tier.note(NS_ID, bytes(16), keys, hint)

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return self.tier.match(NS_ID, refs_of(keys))

    def read(self, keys: Sequence[bytes]) -> None:
        refs = [Ref(key, key) for key in keys]
        results, _ = fetch(self.tier, NAMESPACE, refs[-1:])  # the bytes of one will do
        assert results[0].status is Status.OK

    def hold(self, took: Sequence[bytes], gone: Sequence[bytes]) -> bool:
        return self.tier.hold(self._engine, took, gone)

    def store(self, entries: Sequence[Entry]) -> list[bool]:
        records = [self._record(entry) for entry in entries]
        return [status is Status.OK for status in self.tier.store(NS_ID, records, offer=Offer.REQUEST)]

    def _record(self, entry: Entry) -> Record:
        return make_record(entry.key, entry.parent, entry.anchor, entry.position, bytes(16), self._clock())
