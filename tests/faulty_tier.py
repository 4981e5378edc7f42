"""A tier around another one, whose faults a test programs: what a disk or a Redis does to us, without one.

It keeps the contract (:mod:`tierkv.tiers.base`): a fault is a miss or a failed store, it is counted, nothing raises.
What is tested with it is everything above a tier. Without faults it changes nothing, as the conformance suite shows::

    tier = FaultyTier(DiskTier(path, budget), seed=1)
    tier.inject("fetch", Fail(), calls={0, 2})  # the first and the third fetch from now
    tier.inject("fetch", FlipBit(), chance=0.1)  # one key in ten
    tier.inject("store", Hang(event))  # every store waits for the event
    tier.clear()
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tierkv.layout import Namespace
from tierkv.payload import HEADER_NBYTES, checksum
from tierkv.policy import Hint
from tierkv.tiers.base import (
    EntryInfo,
    Fetched,
    Limits,
    Offer,
    Pin,
    Record,
    Ref,
    Sink,
    Status,
    Tier,
    TierStat,
    Usage,
)

#: Nothing waits longer than this for an event that a test forgot.
HANG_S = 60.0


@dataclass(frozen=True)
class Latency:
    """The call takes so many seconds more."""

    seconds: float


@dataclass(frozen=True)
class Hang:
    """The call waits for an event (at most ``HANG_S``), and goes on then."""

    event: threading.Event


@dataclass(frozen=True)
class Fail:
    """The tier fails: nothing is read or written, and it says that it is out until a call works again."""

    reason: str = "an injected fault"


@dataclass(frozen=True)
class Nil:
    """What is fetched or matched is not there, although it is stored."""


@dataclass(frozen=True)
class FlipBit:
    """One bit changes on its way: in the slot (fetch), where it is found and the record deleted, or in what lies in the
    tier (store), where the next fetch finds it."""


@dataclass(frozen=True)
class WrongSize:
    """The record that a fetch finds is too short: half of the slot is written, and the record deleted."""


@dataclass(frozen=True)
class Full:
    """There is room for ``room`` more records of a store; the rest is dropped."""

    room: int = 0


Fault = Latency | Hang | Fail | Nil | FlipBit | WrongSize | Full

#: What each operation can suffer. Latency, Hang and Fail are for all of them.
_SUFFERS: dict[str, tuple[type, ...]] = {"fetch": (Nil, FlipBit, WrongSize), "match": (Nil,), "store": (FlipBit, Full)}
OPERATIONS = ("match", "fetch", "store", "evict", "drop_namespace", "pin", "unpin", "expire_at", "entries", "tokens")


class _Rule(NamedTuple):
    fault: Fault
    calls: frozenset[int] | None
    chance: float


class FaultyTier:
    """A tier with faults.

    Args:
        inner: the tier that does the work; closed with this one.
        seed: of the dice behind ``chance``, and of where a bit flips.

    Attributes:
        num_calls: calls of each operation so far, those that failed too.
        num_faults: calls (of faults that have a chance: keys) that suffered one, by name of the fault's class.
    """

    def __init__(self, inner: Tier, seed: int = 0) -> None:
        self.inner = inner
        self.name = inner.name
        self.num_calls: Counter[str] = Counter()
        self.num_faults: Counter[str] = Counter()
        self._rng = random.Random(seed)
        self._rules: dict[str, list[_Rule]] = {}
        self._delta: Counter[str] = Counter()  # what our statistics have more than the inner tier's
        self._reason, self._since = "", 0.0
        self._lock = threading.Lock()

    def inject(
        self, operation: str, fault: Fault, *, calls: Collection[int] | None = None, chance: float = 1.0
    ) -> None:
        """Add a fault.

        Args:
            operation: one of ``OPERATIONS``.
            calls: numbers of the calls that suffer, 0 for the next one; None: all.
            chance: of each call, and with Nil, FlipBit and WrongSize of each key.

        Raises:
            ValueError: this operation cannot suffer that.
        """
        if operation not in OPERATIONS or not isinstance(fault, (Latency, Hang, Fail, *_SUFFERS.get(operation, ()))):
            raise ValueError(f"{operation} cannot suffer {fault}")
        with self._lock:
            first = self.num_calls[operation]
            numbers = None if calls is None else frozenset(first + number for number in calls)
            self._rules.setdefault(operation, []).append(_Rule(fault, numbers, chance))

    def clear(self) -> None:
        """Take all faults back. Who hangs waits on for its event."""
        with self._lock:
            self._rules.clear()

    # The contract

    def add_namespace(self, namespace: Namespace) -> None:
        self.inner.add_namespace(namespace)

    def namespaces(self) -> dict[bytes, Namespace]:
        return self.inner.namespaces()

    def match(self, ns_id: bytes, refs: Sequence[Ref]) -> list[bool]:
        rules = self._begin("match")
        if rules is None:
            return [False] * len(refs)
        found = self.inner.match(ns_id, refs)
        return [there and not self._strikes(rules, Nil) for there in found]

    def fetch(
        self, ns_id: bytes, refs: Sequence[Ref], sink: Sink, *, quiet: bool = False, keep: bool = False
    ) -> list[Fetched]:
        rules = self._begin("fetch")
        if rules is None:
            results = [Fetched(Status.ERROR)] * len(refs)
            self._account((), () if quiet else results)
            return results
        parts: dict[int, Sequence[memoryview]] = {}

        def remember(at: int) -> Sequence[memoryview]:
            parts[at] = sink(at)
            return parts[at]

        before = self.inner.fetch(ns_id, refs, remember, quiet=quiet, keep=keep)
        results = [
            self._spoil(rules, result, parts[i]) if result.status is Status.OK else result
            for i, result in enumerate(before)
        ]
        spoilt = [
            new.status is Status.BAD and old.status is Status.OK for old, new in zip(before, results, strict=True)
        ]
        bad = [ref for ref, is_bad in zip(refs, spoilt, strict=True) if is_bad]
        if bad:
            self._more("num_removed", -self.inner.evict(ns_id, bad, force=True))
        if quiet:
            self._more("num_bad", len(bad))
        else:
            self._account(before, results)
        return results

    def note(self, ns_id: bytes, tenant: bytes, keys: Sequence[bytes], hint: Hint | None = None) -> None:
        self.inner.note(ns_id, tenant, keys, hint)

    def release(self, ns_id: bytes, session: str) -> bool:
        return self.inner.release(ns_id, session)

    def worth(self, ns_id: bytes, key: bytes) -> float:
        return self.inner.worth(ns_id, key)

    def joined(self, engine: str, ns_id: bytes, most: int) -> None:
        self.inner.joined(engine, ns_id, most)

    def left(self, engine: str) -> None:
        self.inner.left(engine)

    def hold(self, engine: str, took: Sequence[bytes], gone: Sequence[bytes]) -> bool:
        return self.inner.hold(engine, took, gone)

    def store(self, ns_id: bytes, records: Sequence[Record], *, offer: Offer = Offer.ORDER) -> list[Status]:
        rules = self._begin("store")
        if rules is None:
            self._more("num_errors", len(records))
            return [Status.ERROR] * len(records)
        room = min([rule.fault.room for rule in rules if isinstance(rule.fault, Full)], default=len(records))
        if room < len(records):
            self._note("Full")
        damaged = [self._damage(r) if self._strikes(rules, FlipBit) else r for r in records[:room]]
        statuses = self.inner.store(ns_id, damaged, offer=offer)
        dropped = len(records) - len(statuses)
        self._more("num_dropped", dropped)
        return statuses + [Status.DROPPED] * dropped

    def evict(self, ns_id: bytes, refs: Sequence[Ref], *, force: bool = False) -> int:
        return 0 if self._begin("evict") is None else self.inner.evict(ns_id, refs, force=force)

    def drop_namespace(self, ns_id: bytes) -> int:
        return 0 if self._begin("drop_namespace") is None else self.inner.drop_namespace(ns_id)

    def pin(self, ns_id: bytes, refs: Sequence[Ref], pin: Pin) -> list[bool]:
        return [False] * len(refs) if self._begin("pin") is None else self.inner.pin(ns_id, refs, pin)

    def unpin(self, ns_id: bytes, refs: Sequence[Ref], owner: str = "") -> int:
        return 0 if self._begin("unpin") is None else self.inner.unpin(ns_id, refs, owner)

    def expire_at(self, ns_id: bytes, refs: Sequence[Ref], until: float) -> int:
        return 0 if self._begin("expire_at") is None else self.inner.expire_at(ns_id, refs, until)

    def entries(self, ns_id: bytes) -> Iterator[EntryInfo]:
        return iter(()) if self._begin("entries") is None else self.inner.entries(ns_id)

    def usage(self, ns_id: bytes) -> dict[bytes, Usage]:
        return self.inner.usage(ns_id)

    def tokens(self, ns_id: bytes, ref: Ref) -> bytes:
        return b"" if self._begin("tokens") is None else self.inner.tokens(ns_id, ref)

    def set_limits(self, limits: Limits) -> None:
        self.inner.set_limits(limits)

    def retry_in_s(self) -> float:
        return self.inner.retry_in_s()

    def stat(self) -> TierStat:
        stat = self.inner.stat()
        with self._lock:
            stat = stat._replace(**{name: getattr(stat, name) + more for name, more in self._delta.items()})
            if self._reason:
                stat = stat._replace(state="out", reason=self._reason, since=self._since)
        return stat

    def close(self) -> None:
        self.inner.close()

    # Faults

    def _begin(self, operation: str) -> list[_Rule] | None:
        """Note a call, suffer what takes time, and return the rules that hold for it; None where it fails."""
        with self._lock:
            number = self.num_calls[operation]
            self.num_calls[operation] += 1
            rules = [
                rule
                for rule in self._rules.get(operation, ())
                if (rule.calls is None or number in rule.calls)
                and (isinstance(rule.fault, Nil | FlipBit | WrongSize) or self._rng.random() < rule.chance)
            ]
        for rule in rules:
            if isinstance(rule.fault, Latency):
                self._note("Latency")
                time.sleep(rule.fault.seconds)
            elif isinstance(rule.fault, Hang):
                self._note("Hang")
                rule.fault.event.wait(HANG_S)
        failed = next((rule.fault for rule in rules if isinstance(rule.fault, Fail)), None)
        with self._lock:
            if failed is not None:
                self.num_faults["Fail"] += 1
                self._reason, self._since = failed.reason, self._since or time.time()
                return None
            self._reason, self._since = "", 0.0
        return rules

    def _note(self, fault: str) -> None:
        with self._lock:
            self.num_faults[fault] += 1

    def _strikes(self, rules: Sequence[_Rule], kind: type) -> bool:
        """Return whether a fault that has a chance for each key strikes this one."""
        with self._lock:
            strikes = any(isinstance(rule.fault, kind) and self._rng.random() < rule.chance for rule in rules)
            self.num_faults[kind.__name__] += strikes
            return strikes

    def _spoil(self, rules: Sequence[_Rule], result: Fetched, parts: Sequence[memoryview]) -> Fetched:
        """Return what becomes of one payload that is in its slot."""
        assert result.header is not None
        if self._strikes(rules, Nil):
            return Fetched(Status.MISS)
        if self._strikes(rules, WrongSize):
            for part in parts:
                part[len(part) // 2 :] = bytes(len(part) - len(part) // 2)
            return Fetched(Status.BAD)
        if self._strikes(rules, FlipBit):
            self._flip(parts[self._rng.randrange(len(parts))])
            assert checksum(b"".join(bytes(part) for part in parts)) != result.header.checksum
            return Fetched(Status.BAD)
        return result

    def _damage(self, record: Record) -> Record:
        data = bytearray(record.data)
        self._flip(memoryview(data)[HEADER_NBYTES : HEADER_NBYTES + record.header.raw_nbytes])
        return record._replace(data=memoryview(data))

    def _flip(self, data: memoryview) -> None:
        with self._lock:
            data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)

    def _more(self, counter: str, num: int) -> None:
        with self._lock:
            self._delta[counter] += num

    def _account(self, before: Sequence[Fetched], after: Sequence[Fetched]) -> None:
        """Let the statistics say what was returned, not what the inner tier counted."""
        with self._lock:
            for sign, results in ((-1, before), (1, after)):
                for status in [result.status for result in results]:
                    name = {Status.OK: "num_hits", Status.ERROR: "num_errors"}.get(status, "num_misses")
                    self._delta[name] += sign
                    self._delta["num_bad"] += sign * (status is Status.BAD)
