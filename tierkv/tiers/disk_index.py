"""What the disk tier knows in memory about the entries of one namespace: use, expiry, pins, what each tenant has.

Theory of operation. Three questions have to be cheap. *Is it there now?* A dictionary lookup: entries that have expired
are taken out when anybody asks, from a heap of the times at which something may expire. A time in the heap is never
late: what moves an expiry forward pushes a new one, what moves it back (a read) is found when the time comes. *May it
go?* An entry that is pinned, or has a pinned descendant, is *held* until that pin's end; the end is kept at every
ancestor, so that the question is one comparison. *How much has a tenant?* Counted as entries come and go.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from math import inf

from tierkv.payload import Header
from tierkv.tiers.base import EntryInfo, Limits, Pin, Usage

#: A time long over, which is not the 0 that stands for none.
_AT_ONCE = 1.0


class IndexEntry:
    """What is known about a stored chunk. Times are seconds since 1970.

    Attributes:
        page: number of the first page of its record in the data file.
        stored: when it was stored here.
        until: when it was told to expire, 0 if it was not.
        due: the time of its item in the heap of expiries, 0 if it has none.
        hold: until when it, or a descendant of it, is pinned.
        pins: owner -> until.
    """

    __slots__ = (
        "anchor",
        "created",
        "due",
        "hold",
        "last_used",
        "num_hits",
        "num_tokens",
        "page",
        "parent",
        "pins",
        "position",
        "stored",
        "tenant",
        "until",
    )

    def __init__(self, header: Header, page: int, stored: float) -> None:
        self.parent = header.parent
        self.anchor = header.anchor
        self.position = header.position
        self.num_tokens = header.num_tokens
        self.tenant = header.tenant
        self.created = header.created
        self.last_used = header.created
        self.num_hits = 0
        self.page = page
        self.stored = stored
        self.until = self.due = self.hold = 0.0
        self.pins: dict[str, float] | None = None

    def expires(self, limits: Limits) -> float:
        """Return when it expires if nothing holds it; infinity for never."""
        if limits.ttl_s is None and limits.idle_s is None:
            return self.until or inf
        return limits.expires(self.stored, self.last_used, self.until) or inf

    def info(self, key: bytes, nbytes: int, limits: Limits, now: float) -> EntryInfo:
        expires = self.expires(limits)
        pins = sorted(self.pins.items()) if self.pins else ()
        return EntryInfo(
            key=key,
            parent=self.parent,
            anchor=self.anchor,
            position=self.position,
            num_tokens=self.num_tokens,
            nbytes=nbytes,
            tenant=self.tenant,
            created=self.created,
            last_used=self.last_used,
            num_hits=self.num_hits,
            expires=0.0 if expires == inf else max(expires, self.hold),
            pins=tuple(Pin(owner, until) for owner, until in pins if until > now) if pins else (),
        )


class Index:
    """The entries of one namespace.

    Attributes:
        entries: key -> entry, of what is there.
        dead: keys of entries that have expired but still take their pages -> first page.
        foreign: keys of records of another format version.
        used: keys whose last use is not written yet.
        unpinned: keys of which pins ended that are still written.
        soonest: nothing in ``entries`` expires before this time.
        num_pinned: entries with a pin, those included whose last pin's end nobody has noticed yet (:meth:`lapse`).

    Notes:
        Not thread-safe: who changes it holds the tier's lock. ``entries`` and ``soonest`` may be read without.
    """

    def __init__(self, cost: int) -> None:
        self.cost = cost
        self.entries: dict[bytes, IndexEntry] = {}
        self.dead: dict[bytes, int] = {}
        self.foreign: set[bytes] = set()
        self.used: set[bytes] = set()
        self.unpinned: set[bytes] = set()
        self.soonest = inf
        self.num_pinned = 0
        self._usage: dict[bytes, list[int]] = {}  # tenant -> [entries, of these pinned]
        self._due: list[tuple[float, bytes]] = []
        self._ends: list[tuple[float, bytes]] = []  # of pins
        self._held: dict[bytes, set[bytes]] = {}  # parent -> its held children, whether the parent is there or not
        self._scheduled = True

    @property
    def live_nbytes(self) -> int:
        """Bytes of the pages that hold records."""
        return (len(self.entries) + len(self.dead) + len(self.foreign)) * self.cost

    def add(self, key: bytes, entry: IndexEntry, limits: Limits) -> None:
        """Add an entry, with the pins that it comes with."""
        self.entries[key] = entry
        count = self._usage.setdefault(entry.tenant, [0, 0])
        count[0] += 1
        if entry.pins:
            count[1] += 1
            self.num_pinned += 1
            for until in entry.pins.values():
                heapq.heappush(self._ends, (until, key))
        self._settle(key)
        self.schedule(key, entry, limits)

    def remove(self, key: bytes) -> IndexEntry | None:
        """Take an entry out and return it, or None where there is none."""
        entry = self.entries.pop(key, None)
        self.dead.pop(key, None)
        self.used.discard(key)
        self.unpinned.discard(key)
        if entry is None:
            return None
        count = self._usage[entry.tenant]
        count[0] -= 1
        if entry.pins:
            count[1] -= 1
            self.num_pinned -= 1
        if not count[0]:
            del self._usage[entry.tenant]
        if entry.hold:
            self._let_go(key, entry)
            self._settle(entry.parent)
        return entry

    def usage(self) -> dict[bytes, Usage]:
        """Return what each tenant has."""
        return {
            tenant: Usage(num, num * self.cost, pinned * self.cost) for tenant, (num, pinned) in self._usage.items()
        }

    def tenant_nbytes(self, tenant: bytes) -> int:
        """Return the bytes that a tenant's entries take."""
        return self._usage.get(tenant, (0, 0))[0] * self.cost

    # Expiry

    def schedule(self, key: bytes, entry: IndexEntry, limits: Limits) -> None:
        """See that the entry is looked at when it expires."""
        at = entry.expires(limits)
        if at < inf and (not entry.due or at < entry.due):
            entry.due = at
            heapq.heappush(self._due, (at, key))
            self.soonest = min(self.soonest, at)

    def unschedule(self) -> list[bytes]:
        """Make every lookup ask the entry, because the limits changed, until :meth:`scheduled`; returns all keys."""
        self._scheduled = False
        self.soonest = -inf
        return list(self.entries)

    def scheduled(self) -> None:
        """Note that every entry has been scheduled again."""
        self._scheduled = True
        self._note_soonest()

    def advance(self, now: float, limits: Limits, most: int) -> list[tuple[bytes, IndexEntry]]:
        """Take out what has expired, after looking at ``most`` entries; what is taken out is dead, and returned."""
        expired = []
        while most and self._due and self._due[0][0] <= now:
            most -= 1
            at, key = heapq.heappop(self._due)
            entry = self.entries.get(key)
            if entry is None or entry.due != at:
                continue
            entry.due = 0.0
            expires = entry.expires(limits)
            if expires > now or entry.hold > now:
                if expires < inf:
                    entry.due = max(expires, entry.hold) if expires <= now else expires
                    heapq.heappush(self._due, (entry.due, key))
                continue
            self.remove(key)
            self.dead[key] = entry.page
            expired.append((key, entry))
        self._note_soonest()
        return expired

    def is_due(self, now: float) -> bool:
        """Return whether :meth:`advance` has something to look at."""
        return bool(self._due) and self._due[0][0] <= now

    def get(self, key: bytes, now: float, limits: Limits) -> IndexEntry | None:
        """Return the entry if it is there and has not expired."""
        entry = self.entries.get(key)
        if entry is None or now < self.soonest or entry.hold > now or entry.expires(limits) > now:
            return entry
        return None

    def _note_soonest(self) -> None:
        self.soonest = -inf if not self._scheduled else self._due[0][0] if self._due else inf

    # Pins

    def pin(self, key: bytes, pin: Pin) -> None:
        """Pin an entry that is there; an owner's earlier pin is replaced."""
        entry = self.entries[key]
        if not entry.pins:
            entry.pins = {}
            self.num_pinned += 1
            self._usage[entry.tenant][1] += 1
        entry.pins[pin.owner] = pin.until
        heapq.heappush(self._ends, (pin.until, key))
        self._settle(key)

    def unpin(self, key: bytes, owners: Iterable[str]) -> None:
        """Take pins off an entry that is there."""
        entry = self.entries[key]
        if not entry.pins:
            return
        for owner in owners:
            entry.pins.pop(owner, None)
        if not entry.pins:
            entry.pins = None
            self.num_pinned -= 1
            self._usage[entry.tenant][1] -= 1
        self._settle(key)

    def lapse(self, now: float) -> None:
        """Take off the pins whose time is over."""
        while self._ends and self._ends[0][0] <= now:
            _, key = heapq.heappop(self._ends)
            entry = self.entries.get(key)
            over = [owner for owner, until in (entry.pins or {}).items() if until <= now] if entry else []
            if over:
                self.unpin(key, over)
                self.unpinned.add(key)

    def _settle(self, key: bytes) -> None:
        """Bring the hold of an entry, and of its ancestors as far as it matters, in line with the pins below."""
        while (entry := self.entries.get(key)) is not None:
            below = [self.entries[child].hold for child in self._held.get(key, ())]
            hold = max([*(entry.pins or {}).values(), *below], default=0.0)
            if hold == entry.hold:
                return
            if hold < entry.hold and entry.due:  # its expiry may be over, and have waited for the pins' end
                entry.due = max(hold, _AT_ONCE)
                heapq.heappush(self._due, (entry.due, key))
                self.soonest = min(self.soonest, entry.due)
            entry.hold = hold
            if hold:
                self._held.setdefault(entry.parent, set()).add(key)
            else:
                self._let_go(key, entry)
            key = entry.parent

    def _let_go(self, key: bytes, entry: IndexEntry) -> None:
        children = self._held.get(entry.parent)
        if children is not None:
            children.discard(key)
            if not children:
                del self._held[entry.parent]
