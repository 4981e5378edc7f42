"""A host pool over a disk, as the product stacks them: a host index and what the connector does between the two.

The pool is a real :class:`~tierkv.hostindex.HostIndex`. The disk is anything with the methods of :class:`Below`: here
:class:`SimulatedDisk`, the disk tier's own order of eviction without bytes; the tests have a disk tier on LMDB in its
place. One request at a time, ``STEP_CHUNKS`` chunks a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

from bench_policy_replay import Result, Step
from bench_policy_traces import Request
from tierkv.hostindex import Entry, HostIndex
from tierkv.policy import WEIGHS_ABOVE, Hint, make_policy
from tierkv.pool import HostPool, PoolShape, Segment
from tierkv.tiers.disk_held import Item
from tierkv.tiers.disk_order import EVERYBODY, Order

ROOT = bytes(32)
#: Chunks that a step computes or loads: 2,048 tokens in chunks of 512.
STEP_CHUNKS = 4
#: Chunks that are offered before their slots are needed (:mod:`tierkv_connector.spill`).
AHEAD_SHARE, MAX_AHEAD = 1 / 16, 512
_ENGINE = "engine"


@dataclass
class Clock:
    """Seconds; whoever replays sets them."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Below(Protocol):
    """A disk below a host pool."""

    def note(self, keys: Sequence[bytes], hint: Hint | None) -> None:
        """A request asks for a chain."""

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether it is stored."""

    def read(self, keys: Sequence[bytes]) -> None:
        """Chunks are loaded from it."""

    def hold(self, took: Sequence[bytes], gone: Sequence[bytes]) -> bool:
        """Note what the pool keeps; returns whether that may be missing here."""

    def store(self, entries: Sequence[Entry]) -> list[bool]:
        """Take or decline chunks; returns for each whether it was written."""


class SimulatedDisk:
    """What a disk tier of ``capacity`` chunks would hold: its :class:`Order`, and a set in place of LMDB."""

    def __init__(self, capacity: int, clock: Clock, policy: str) -> None:
        self.order = Order(policy)
        self.order.held.joined(_ENGINE, b"", 1 << 30)
        self._capacity = capacity
        self._clock = clock
        self._stored: set[bytes] = set()

    def note(self, keys: Sequence[bytes], hint: Hint | None) -> None:
        self.order.note(b"", b"", keys, self._clock.now, hint)

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self._stored for key in keys]

    def read(self, keys: Sequence[bytes]) -> None:
        self.order.touch(b"", [(key, _entry(b"")) for key in keys])

    def hold(self, took: Sequence[bytes], gone: Sequence[bytes]) -> bool:
        return self.order.hold(_ENGINE, took, gone)

    def store(self, entries: Sequence[Entry]) -> list[bool]:
        order, chosen, lost = self.order, [], set()
        protected = {(b"", key) for entry in entries for key in (entry.key, entry.parent)}
        room = self._capacity - len(self._stored)
        for entry in sorted(entries, key=lambda entry: entry.position):
            item: Item = (b"", entry.key)
            if entry.key in self._stored:
                continue
            if entry.parent in lost or not (room or order.admits(item, self._clock.now)):
                if not order.is_above(item):
                    lost.add(entry.key)
                continue
            if not room:
                gone = order.victim(EVERYBODY, lambda other: other not in protected)
                if gone is None:
                    continue
                order.take_out(gone, b"")
                self._stored.remove(gone[1])
            room = max(0, room - 1)
            chosen.append(entry)
        for entry in chosen:
            order.add(b"", entry.key, _entry(entry.parent))
            self._stored.add(entry.key)
        return [entry in chosen for entry in entries]


def _entry(parent: bytes) -> Any:
    return SimpleNamespace(tenant=b"", parent=parent)


class Stack:
    """Requests as an engine makes them, of a host pool over a disk.

    Args:
        index: the host index.
        below: the disk.
        tells: whether the disk is told what the pool keeps.
    """

    def __init__(self, index: HostIndex, below: Below, *, tells: bool) -> None:
        self.result = Result(0, [0, 0], [0, 0])
        self.num_offered_again = 0
        self.index = index
        self.below = below
        self._tells = tells
        self._may_be_missing = False
        num_slots = index.pool.shape.num_slots
        self._num_ahead = min(max(1, min(int(num_slots * AHEAD_SHARE), MAX_AHEAD)), num_slots // 2)
        index.follow_kept(tells)

    def request(self, keys: Sequence[bytes], hint: Hint | None = None) -> None:
        """Make one request: what the pool does not hold is loaded from the disk as far as it has it, or computed."""
        index, result = self.index, self.result
        index.note(keys, hint)
        self.below.note(keys, hint)
        in_pool = [index.get(key) is not None for key in keys]
        found = [a or b for a, b in zip(in_pool, self.below.has(keys), strict=True)]
        hits = found.index(False) if False in found else len(found)
        result.num_blocks += len(keys)
        result.hits[0] += sum(in_pool[:hits])
        result.hits[1] += hits - sum(in_pool[:hits])
        index.touch(keys[: in_pool.index(False) if False in in_pool else len(keys)])
        for at in range(0, hits, STEP_CHUNKS):
            self._load(keys, at, min(at + STEP_CHUNKS, hits))
            self._end_step()
        for at in range(hits, len(keys), STEP_CHUNKS):
            goes_on = self._compute(keys, at, min(at + STEP_CHUNKS, len(keys)))
            self._end_step()
            if not goes_on:
                break

    def _load(self, keys: Sequence[bytes], start: int, stop: int) -> None:
        missing = [i for i in range(start, stop) if self.index.get(keys[i]) is None]
        if missing:
            self.below.read([keys[i] for i in missing])
        for i in missing:
            self._enter(keys, i, "disk", self.index.admits(keys[i], _parent(keys, i)))

    def _compute(self, keys: Sequence[bytes], start: int, stop: int) -> bool:
        """Compute chunks, and offer them below; returns whether those that follow would be of use."""
        entries, goes_on = [], True
        for i in range(start, stop):
            if self.index.get(keys[i]) is not None:
                continue
            keep = self.index.admits(keys[i], _parent(keys, i))
            above = self.index.get(_parent(keys, i))
            if not keep and above is not None and above.in_transit and above.declined:
                goes_on = False
                break
            entry = self._enter(keys, i, "host", keep)
            if entry is not None:
                entries.append(entry)
        self._tell()
        self._offer(entries)
        return goes_on

    def _enter(self, keys: Sequence[bytes], i: int, source: str, keep: bool) -> Entry | None:
        entry = self.index.reserve(keys[i], _parent(keys, i), i, 1, keys[0], keep=keep)
        if entry is not None:
            self.index.filled(entry, source)
            self.result.writes[0] += keep
        return entry

    def _offer(self, entries: Sequence[Entry]) -> None:
        if not entries:
            return
        for entry, written, there in zip(
            entries, self.below.store(entries), self.below.has([e.key for e in entries]), strict=True
        ):
            entry.declined = not there
            self.result.writes[1] += written

    def _tell(self) -> None:
        took, gone = self.index.take_kept_changes()
        if took or gone:
            self._may_be_missing = self.below.hold(took, gone)

    def _end_step(self) -> None:
        self._tell()
        num = self._num_ahead - self.index.num_free - self.index.num_in_transit
        if self._may_be_missing and num > 0:
            given_up = self.index.retire(num)
            self._tell()
            self.num_offered_again += len(given_up)
            self._offer(given_up)


def _parent(keys: Sequence[bytes], i: int) -> bytes:
    return keys[i - 1] if i else ROOT


def replay_stack(
    policy: str,
    capacities: Sequence[int],
    requests: Iterable[Request],
    hints: Sequence[Hint] | None = None,
    step: Step = lambda i: None,
    tells: bool | None = None,
    disk: Callable[[int, Clock, str], Below] = SimulatedDisk,
) -> Stack:
    """Replay requests against a host pool of ``capacities[0]`` chunks over a disk of ``capacities[1]``.

    Args:
        tells: whether the disk is told what the pool keeps; by default as the product does with this policy.
    """
    clock, shape = Clock(), PoolShape(capacities[0], 1, 64)
    pool = HostPool(shape, [Segment.create(shape.segment_nbytes(0))])
    try:
        index = HostIndex(pool, make_policy(policy), clock)
        told = policy in WEIGHS_ABOVE if tells is None else tells
        stack = Stack(index, disk(capacities[1], clock, policy), tells=told)
        for i, (now, chain) in enumerate(requests):
            step(i)
            clock.now = max(clock.now, now)
            stack.request([block.to_bytes(32, "big") for block in chain], hints[i] if hints else None)
        return stack
    finally:
        pool.close()
