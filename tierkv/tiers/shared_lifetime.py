"""How long entries of the shared tier live, and who has pinned them: kept in Redis, so that every node sees it.

Theory of operation. Beside its records a namespace has, where there is need (``docs/formats.md``)::

    <p>:<ns>:pins     sorted set: who wants what kept; the score is until when
    <p>:<ns>:until    sorted set: entries that expire at a time of their own; the score is that time
    <p>:<ns>:lock     string, for seconds: one node sweeps at a time

*Expiry* is Redis's own: ``PX`` at the store, set anew after a read where entries expire some time after their last use,
at the earliest of the times that apply (:meth:`Limits.expires`). A pinned entry has no expiry, so that no
``volatile-*`` policy evicts it either; renewals leave it alone (``PEXPIRE ... XX``). When its last pin is over any node
gives it the expiry back. Renewals are made by a thread of this module: a load does not wait for them. One that had not
heard of a pin or a time is put right by the next sweep.
"""

from __future__ import annotations

import random
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from tierkv.health import Repeated
from tierkv.keys import KEY_NBYTES
from tierkv.payload import HEADER_NBYTES, BadRecordError, ForeignRecordError, Header, unpack_stored
from tierkv.resp import Error, Value
from tierkv.tiers.base import Limits, Pin, Ref
from tierkv.tiers.redis_index import batches, pairs
from tierkv.tiers.redis_link import OnError, RedisLink
from tierkv.tiers.redis_names import Names
from tierkv.tiers.redis_wire import Command

#: Seconds for which what was read of pins and times is believed, and between two sweeps.
MARKS_S = 2.0
SWEEP_S = 5.0
#: Entries of one round trip, and of one sweep of a namespace.
_BATCH = 256
_LOCK_MS = 5000
#: Renewals that wait; more are left out, and those entries expire as if they had not been read.
_MAX_RENEWALS = 65_536

_TAIL = struct.Struct("<8s16sQ")


class Marked(NamedTuple):
    """A pin as it lies in Redis: of what entry, how large that is, and whose."""

    key: bytes
    anchor: bytes
    tenant: bytes
    nbytes: int
    owner: str

    def pack(self) -> bytes:
        return self.key + _TAIL.pack(self.anchor[:8], self.tenant, self.nbytes) + self.owner.encode()

    @classmethod
    def unpack(cls, member: bytes) -> Marked | None:
        """Return the pin that a member of the set is, or None for what is none."""
        if len(member) < KEY_NBYTES + _TAIL.size:
            return None
        anchor, tenant, nbytes = _TAIL.unpack_from(member, KEY_NBYTES)
        owner = member[KEY_NBYTES + _TAIL.size :].decode(errors="replace")
        return cls(member[:KEY_NBYTES], anchor, tenant, nbytes, owner)

    @property
    def ref(self) -> Ref:
        return Ref(self.key, self.anchor)


class Marks(NamedTuple):
    """The pins and the times of a namespace: by key, pins with their end; and when entries are to expire."""

    pins: dict[bytes, list[tuple[Marked, float]]]
    until: dict[bytes, float]

    def pins_of(self, key: bytes, now: float) -> tuple[Pin, ...]:
        """Return the pins that hold now."""
        return tuple(Pin(pin.owner, until) for pin, until in self.pins.get(key, ()) if until > now)

    def pinned(self, now: float) -> Iterator[Marked]:
        """Yield every entry with a pin that holds now, once."""
        for pins in self.pins.values():
            holding = next((pin for pin, until in pins if until > now), None)
            if holding:
                yield holding


class Lifetime:
    """Lifetimes and pins of the shared tier.

    Args:
        link: to Redis.
        names: of its keys.
        limits: what holds; may be replaced at any time.
        namespaces: returns the ids of the namespaces that are stored.
        clock: wall clock, seconds since 1970.
    """

    def __init__(
        self,
        link: RedisLink,
        names: Names,
        limits: Limits,
        namespaces: Callable[[], Iterable[bytes]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.limits = limits
        self._link, self._names = link, names
        self._namespaces = namespaces
        self._clock = clock
        self._marks: dict[bytes, tuple[float, Marks]] = {}
        self._renewals: dict[tuple[bytes, bytes], Header] = {}
        self._errands: dict[bytes, Callable[[], object]] = {}
        self._swept_at = time.monotonic()
        self._changed = threading.Condition()
        self._unforeseen = Repeated()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tierkv-shared-upkeep", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Make the renewals that wait, and stop. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def soon(self, errand: Callable[[], object], name: bytes) -> None:
        """Have something done by this tier's own thread, once for a name that waits already. Returns at once."""
        with self._changed:
            self._errands[name] = errand
            self._changed.notify_all()

    # Expiry

    def expiry_ms(self, header: Header) -> int | None:
        """Return the milliseconds after which a record that is stored now expires; None for never, 0: it has."""
        now = self._clock()
        marks = self.marks(header.ns_id)
        if marks.pins_of(header.key, now):
            return None
        until = marks.until.get(header.key, 0.0)
        return _left_ms(self.limits.expires(min(header.created, now), now, until if until > now else 0.0), now)

    def note_read(self, headers: Sequence[Header]) -> None:
        """Let entries that were read begin their life after the last use anew. Returns at once."""
        if self.limits.idle_s is None:
            return
        with self._changed:
            for header in headers:
                name = (header.ns_id, header.key)
                if name in self._renewals or len(self._renewals) < _MAX_RENEWALS:
                    self._renewals[name] = header
            self._changed.notify_all()

    def _renew(self, headers: Sequence[Header]) -> None:
        commands: list[Command] = []
        for header in headers:
            ms = self.expiry_ms(header)
            if ms is not None:
                commands.append(("PEXPIRE", self._names.record(header.ns_id, _ref(header)), ms, "XX"))
        for batch in batches(commands, 4 * _BATCH):
            self._link.ask(batch, OnError.IGNORE)

    def expire_at(self, ns_id: bytes, refs: Sequence[Ref], until: float) -> int:
        """Let entries expire at ``until`` (0: as the limits say) and return how many there were."""
        num = 0
        until = max(until, self._clock()) if until else 0.0
        for batch in batches(refs, _BATCH):
            members = [ref.key + ref.anchor[:8] for ref in batch]
            if until:
                words = [word for member in members for word in (repr(until), member)]
                command: Command = ("ZADD", self._names.until(ns_id), *words)
            else:
                command = ("ZREM", self._names.until(ns_id), *members)
            if self._link.ask([command], OnError.STOP_WRITES) is None:
                break
            there = self._apply_expiry(ns_id, batch)
            num += sum(there)
            if until and not all(there):  # of what is stored later it says nothing
                absent = [member for member, found in zip(members, there, strict=True) if not found]
                self._link.ask([("ZREM", self._names.until(ns_id), *absent)], OnError.IGNORE)
        return num

    def _apply_expiry(self, ns_id: bytes, refs: Sequence[Ref]) -> list[bool]:
        """Give entries the expiry that they should have now, and return which there are."""
        names = [self._names.record(ns_id, ref) for ref in refs]
        # The idle time first: the header's read ends it.
        asked = [c for name in names for c in (("OBJECT", "IDLETIME", name), ("GETRANGE", name, 0, HEADER_NBYTES - 1))]
        replies = self._link.ask(asked, OnError.IGNORE)
        if replies is None:
            return [False] * len(refs)
        marks, now = self.marks(ns_id, fresh=True), self._clock()
        there: list[bool] = []
        commands: list[Command] = []
        for ref, name, idle_s, head in zip(refs, names, replies[::2], replies[1::2], strict=True):
            stored = _stored(head)
            there.append(stored is not None)
            if stored is None:
                continue
            header, _ = stored
            used = now - idle_s if isinstance(idle_s, int) else now
            until = marks.until.get(ref.key, 0.0)
            expires = self.limits.expires(header.created, used, until if until > header.created else 0.0)
            if not expires or marks.pins_of(ref.key, now):
                commands.append(("PERSIST", name))
            else:
                commands.append(("PEXPIREAT", name, int(expires * 1000)))
        self._link.ask(commands, OnError.IGNORE)
        marks = self.marks(ns_id, fresh=True)  # whoever pinned one meanwhile means it
        pinned = [n for ref, n in zip(refs, names, strict=True) if marks.pins_of(ref.key, now)]
        self._link.ask([("PERSIST", name) for name in pinned], OnError.IGNORE)
        return there

    # Pins

    def marks(self, ns_id: bytes, *, fresh: bool = False) -> Marks:
        """Return the pins and times of a namespace, at most ``MARKS_S`` old; what was known last while Redis is out."""
        now = time.monotonic()
        at, known = self._marks.get(ns_id, (float("-inf"), Marks({}, {})))
        if not fresh and now - at < MARKS_S:
            return known
        asked = [("ZRANGE", name, 0, -1, "WITHSCORES") for name in (self._names.pins(ns_id), self._names.until(ns_id))]
        replies = self._link.ask(asked, OnError.IGNORE)
        if replies is None or any(isinstance(reply, Error) for reply in replies):
            return known
        pins: dict[bytes, list[tuple[Marked, float]]] = {}
        for member, score in pairs(replies[0]):
            pin = Marked.unpack(member)
            if pin:
                pins.setdefault(pin.key, []).append((pin, float(score)))
        found = Marks(pins, {member[:KEY_NBYTES]: float(score) for member, score in pairs(replies[1])})
        self._marks[ns_id] = (now, found)
        return found

    def pin(self, ns_id: bytes, refs: Sequence[Ref], pin: Pin) -> list[bool]:
        """Pin entries, ancestors first, up to the first that is missing or beyond the pins' quota."""
        done: list[bool] = []
        if pin.until <= self._clock():
            self.unpin(ns_id, refs, pin.owner)  # it replaces that owner's, and holds nothing itself
            return [False] * len(refs)
        for batch in batches(refs, _BATCH):
            part = self._pin_batch(ns_id, batch, pin)
            done += part
            if not all(part):
                break
        return done + [False] * (len(refs) - len(done))

    def _pin_batch(self, ns_id: bytes, refs: Sequence[Ref], pin: Pin) -> list[bool]:
        names = [self._names.record(ns_id, ref) for ref in refs]
        heads = self._link.ask([("GETRANGE", name, 0, HEADER_NBYTES - 1) for name in names], OnError.IGNORE)
        wanted: list[Marked] = []
        for ref, head in zip(refs, heads or (), strict=False):
            stored = _stored(head)
            if stored is None:
                break
            wanted.append(Marked(ref.key, ref.anchor[:8], stored[0].tenant, stored[1], pin.owner))
        if not wanted:
            return [False] * len(refs)
        before = self.marks(ns_id, fresh=True)
        old = [m for w in wanted for m, _ in before.pins.get(w.key, ()) if m.owner == pin.owner and m != w]
        key = self._names.pins(ns_id)
        commands: list[Command] = [("ZREM", key, *(m.pack() for m in old))] if old else []
        commands.append(("ZADD", key, *(word for w in wanted for word in (repr(pin.until), w.pack()))))
        commands += [c for name in names[: len(wanted)] for c in (("PERSIST", name), ("EXISTS", name))]
        written = self._link.ask(commands, OnError.STOP_WRITES)
        self._marks.pop(ns_id, None)
        if written is None or isinstance(written[len(commands) - 2 * len(wanted) - 1], Error):
            return [False] * len(refs)
        there = [reply == 1 for reply in written[-2 * len(wanted) :][1::2]]
        num = there.index(False) if False in there else len(there)
        num = min(num, self._fitting(wanted, {w.key for w in wanted} & set(before.pins)))
        if num < len(wanted):
            self._link.ask([("ZREM", key, *(w.pack() for w in wanted[num:]))], OnError.IGNORE)
            self._apply_expiry(ns_id, [w.ref for w in wanted[num:]])
        return [True] * num + [False] * (len(refs) - num)

    def _fitting(self, wanted: Sequence[Marked], held: set[bytes]) -> int:
        """Return how many of the pins just added the quota has room for; those of entries pinned before count nothing.

        Added first and counted then: whoever adds at the same time counts both.
        """
        quota = self.limits.pinned_nbytes
        if quota is None:
            return len(wanted)
        over = sum(self.pinned_nbytes(ns_id, fresh=True) for ns_id in self._namespaces()) - quota
        num = len(wanted)
        while num and over > 0:
            num -= 1
            over -= 0 if wanted[num].key in held else wanted[num].nbytes
        return num

    def unpin(self, ns_id: bytes, refs: Sequence[Ref], owner: str = "") -> int:
        """Take an owner's pins (all owners', if empty) off, and return how many entries had one."""
        num, now = 0, self._clock()
        marks = self.marks(ns_id, fresh=True)
        for batch in batches(refs, _BATCH):
            pins = [(m, t) for ref in batch for m, t in marks.pins.get(ref.key, ()) if owner in ("", m.owner)]
            if not pins:
                continue
            if self._link.ask([("ZREM", self._names.pins(ns_id), *(m.pack() for m, _ in pins))]) is None:
                break
            num += len({m.key for m, until in pins if until > now})
            self._apply_expiry(ns_id, list({m.key: m.ref for m, _ in pins}.values()))
        return num

    def unpinned(self, ns_id: bytes, refs: Sequence[Ref]) -> list[Ref]:
        """Return those of ``refs`` that nobody has pinned."""
        marks, now = self.marks(ns_id, fresh=True), self._clock()
        return [ref for ref in refs if not marks.pins_of(ref.key, now)]

    def pinned_nbytes(self, ns_id: bytes, *, fresh: bool = False) -> int:
        """Return the bytes of a namespace that pins hold."""
        return sum(pin.nbytes for pin in self.marks(ns_id, fresh=fresh).pinned(self._clock()))

    def forget(self, ns_id: bytes, refs: Sequence[Ref]) -> None:
        """Take entries that were removed by order out of the pins and times."""
        marks = self.marks(ns_id)
        pins = [m.pack() for ref in refs for m, _ in marks.pins.get(ref.key, ())]
        times = [ref.key + ref.anchor[:8] for ref in refs if ref.key in marks.until]
        commands: list[Command] = [("ZREM", self._names.pins(ns_id), *pins)] if pins else []
        if times:
            commands.append(("ZREM", self._names.until(ns_id), *times))
        if commands:
            self._link.ask(commands, OnError.IGNORE)
            self._marks.pop(ns_id, None)

    def drop_commands(self, ns_id: bytes) -> list[Command]:
        """Return the commands that forget all of this of a namespace."""
        names = (self._names.pins(ns_id), self._names.until(ns_id), self._names.usage(ns_id))
        return [("UNLINK", name) for name in names]

    # Sweeping

    def sweep(self, ns_id: bytes) -> None:
        """Give entries whose pins are over their expiry back, and end those whose time has come: some of them."""
        now = self._clock()
        marks = self.marks(ns_id, fresh=True)
        held = [self._names.record(ns_id, pin.ref) for pin in marks.pinned(now)]
        held = random.sample(held, min(len(held), 4 * _BATCH))  # who had not heard of a pin may have given it an expiry
        self._link.ask([("PERSIST", name) for name in held], OnError.IGNORE)
        over = [m for pins in marks.pins.values() for m, until in pins if until <= now][:_BATCH]
        late = [key for key, until in marks.until.items() if until <= now][:_BATCH]
        if not over and not late:
            return
        lock: Command = ("SET", self._names.lock(ns_id), "1", "NX", "PX", _LOCK_MS)
        taken = self._link.ask([lock], OnError.IGNORE)
        if not taken or taken[0] is None or isinstance(taken[0], Error):
            return
        name, refs = self._names.until(ns_id), {m.key: m.ref for m in over}
        found = self._link.ask([("ZRANGEBYSCORE", name, "-inf", repr(now), "LIMIT", 0, _BATCH)], OnError.IGNORE)
        members = [m for m in found[0] if isinstance(m, bytes)] if found and isinstance(found[0], list) else []
        refs |= {m[:KEY_NBYTES]: Ref(m[:KEY_NBYTES], m[KEY_NBYTES:]) for m in members}
        self._apply_expiry(ns_id, list(refs.values()))  # first: who dies here leaves it to the next
        commands: list[Command] = [("ZREM", name, *members)] if members else []
        if over:
            commands.append(("ZREM", self._names.pins(ns_id), *(m.pack() for m in over)))
        self._link.ask([*commands, ("UNLINK", self._names.lock(ns_id))], OnError.IGNORE)
        self._marks.pop(ns_id, None)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._renewals or self._errands or self._closed, timeout=1.0)
                renewals, self._renewals = list(self._renewals.values()), {}
                errands, self._errands = list(self._errands.values()), {}
            try:
                self._renew(renewals)
                if self._closed:
                    return
                for errand in errands:
                    errand()
                if time.monotonic() - self._swept_at >= SWEEP_S and self._link.up:
                    self._swept_at = time.monotonic()
                    for ns_id in list(self._namespaces()):
                        self.sweep(ns_id)
            except Exception:  # what lives too long or too short is better than a thread that is gone
                self._unforeseen.note("the shared tier's upkeep failed", exc_info=True)


def _ref(header: Header) -> Ref:
    return Ref(header.key, header.anchor)


def _left_ms(expires: float, now: float) -> int | None:
    return max(0, int((expires - now) * 1000)) if expires else None


def _stored(head: Value) -> tuple[Header, int] | None:
    """Return the header of a record, and its length in Redis, or None for what is none of this version."""
    try:
        header, _, nbytes = unpack_stored(head if isinstance(head, bytes) else b"")
    except (BadRecordError, ForeignRecordError):
        return None
    return header, HEADER_NBYTES + nbytes
