"""Replays of requests against a real disk tier, alone or below a host index: what policies come to in the product."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from bench_policy_traces import Request
from records import CHUNK_TOKENS, Clock, fetch, make_namespace
from tierkv.hostindex import HostIndex
from tierkv.keys import anchor_index
from tierkv.payload import HEADER_NBYTES, Header, checksum, record_nbytes
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
    header = Header(
        layout_id=NAMESPACE.layout.layout_id(),
        ns_id=NS_ID,
        key=keys[i],
        parent=keys[i - 1] if i else bytes(32),
        anchor=keys[anchor_index(i)],
        position=i,
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


class StackReplay:
    """The same with a host index above, and what the connector does between the two, one request at a time."""

    def __init__(self, tier: DiskTier, index: HostIndex, clock: Clock) -> None:
        tier.add_namespace(NAMESPACE)
        self.tier = tier
        self.index = index
        self.num_asked = self.num_host = self.num_disk = self.num_written = 0
        self._clock = clock
        self._began = clock.now

    @property
    def num_hits(self) -> int:
        return self.num_host + self.num_disk

    def run(self, requests: Iterable[Request]) -> None:
        for time, blocks in requests:
            self._clock.now = max(self._clock.now, self._began + time)
            self.request([key_of(block) for block in blocks])

    def request(self, keys: Sequence[bytes]) -> None:
        """Make one request: what neither holds is computed, and what it needs passes through a slot."""
        index, refs = self.index, refs_of(keys)
        index.note(keys)
        self.tier.note(NS_ID, bytes(16), keys)
        on_disk = self.tier.match(NS_ID, refs)
        in_pool = [index.get(key) is not None for key in keys]
        hits = leading(a or b for a, b in zip(in_pool, on_disk, strict=True))
        self.num_asked += len(keys)
        self.num_host += sum(in_pool[:hits])
        self.num_disk += hits - sum(in_pool[:hits])
        index.touch(keys[: leading(in_pool)])
        for i in range(len(keys)):
            if index.get(keys[i]) is None:
                self._enter(keys, i)
        for at in range(hits, len(keys), _PER_COMMAND):
            stop = min(at + _PER_COMMAND, len(keys))
            records = [record_of(keys, i, bytes(16), self._clock.now) for i in range(at, stop)]
            self.num_written += self.tier.store(NS_ID, records, offer=Offer.REQUEST).count(Status.OK)

    def _enter(self, keys: Sequence[bytes], i: int) -> None:
        parent = keys[i - 1] if i else bytes(32)
        keep = self.index.admits(keys[i], parent)
        entry = self.index.reserve(keys[i], parent, i, CHUNK_TOKENS, keys[anchor_index(i)], keep=keep)
        if entry is not None:
            self.index.filled(entry, "host")
