"""The host index: which chunk is in which slot of the host pool. Lives in the engine's scheduler process.

Theory of operation. A slot is *free* or held by one :class:`Entry`. An entry is made by :meth:`HostIndex.reserve`
(which raises the slot's generation first) for a chunk that is about to be filled: by a worker's copy from the GPU, or
by the store server's fetch. It becomes *ready* when its filler reports success. A ready entry that nobody pins may be
evicted: first those *in transit*, which the policy does not want to keep or has given up, then by the policy. An entry
can be dropped at any time; its slot is free again only when nobody can read or write it any more: no pin, and its
filler is done (until then the slot is *quarantined*).

Only the scheduler thread calls methods that change the index. Two attributes are written by the store client's reader
thread, each whole and once: ``Fetch.results`` (what a fetch brought) and the contents of ``HostIndex.dropped`` (keys
evicted by an operator, which no answer may use from that moment on).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, Protocol

from tierkv.policy import Hint, Policy, make_policy
from tierkv.pool import HostPool

#: Chunks in transit that are looked at for one whose slot may be used again.
_MAX_LOOKED_AT = 256


class Fetch:
    """One FETCH command: chunks that the store server copies into slots.

    Attributes:
        entries: what it fills, in order.
        results: one letter an entry once the server has answered (``b"d"`` disk, ``b"s"`` shared, else a miss);
            empty when it is known that no answer will come; None until then. Written by the reader thread.
        released: the server has answered or cannot write any more. Written by the reader thread.
        seconds: from when the server could begin with it to its answer. Written by the reader thread.
        applied: the scheduler thread has taken note of the results.
    """

    __slots__ = ("applied", "entries", "released", "results", "seconds")

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = entries
        self.results: bytes | None = None
        self.released = False
        self.seconds = 0.0
        self.applied = False


class Entry:
    """A chunk in a slot. Read-only outside of :class:`HostIndex`, but for what the spill path notes of it.

    Attributes:
        anchor, tenant: what the store server is to know of it; no anchor: it is not for others.
        saved: the disk has it, or it was offered to the store server because it is about to go.
        num_sends: how often it was sent there.
        noted: its second use was reported.
        promised: another engine waits for it (``HANDOFF``).
        in_transit: the policy does not want to keep it, or has given it up: its slot is used again first.
        sending: a STORE of it has not been answered. Cleared by the reader thread.
        declined: no tier took it when it was last offered. Written by the reader thread.
    """

    __slots__ = (
        "anchor",
        "declined",
        "doomed",
        "fetch",
        "fetch_index",
        "generation",
        "in_transit",
        "key",
        "last_used",
        "noted",
        "num_hits",
        "num_pins",
        "num_sends",
        "num_tokens",
        "parent",
        "position",
        "promised",
        "saved",
        "sending",
        "slot",
        "source",
        "state",
        "tenant",
    )

    FILLING = 0
    READY = 1
    GONE = 2

    def __init__(self, key: bytes, parent: bytes, position: int, num_tokens: int, slot: int, generation: int) -> None:
        self.key = key
        self.parent = parent
        self.position = position
        self.num_tokens = num_tokens
        self.slot = slot
        self.generation = generation
        self.state = Entry.FILLING
        self.num_pins = 0
        self.doomed = False
        self.fetch: Fetch | None = None
        self.fetch_index = 0
        self.source = "host"
        self.num_hits = 0
        self.last_used = 0.0
        self.anchor = b""
        self.tenant = bytes(16)
        self.saved = False
        self.noted = False
        self.promised = False
        self.in_transit = False
        self.sending = False
        self.declined = False
        self.num_sends = 0

    @property
    def usable(self) -> bool:
        """Whether its payload is in the slot, verified. Pure: reads what the reader thread wrote, changes nothing."""
        if self.state == Entry.READY:
            return True
        fetch = self.fetch
        if self.state != Entry.FILLING or fetch is None or not fetch.results:
            return False
        return fetch.results[self.fetch_index] in b"ds"


class KnownRun:
    """How far a run of usable chunks of one chain went when it was last looked up. It holds while nothing is removed.

    It is a memory of answers, no state: every answer is the same without it.
    """

    __slots__ = ("_end", "_num_gone", "_start")

    def __init__(self) -> None:
        self._start = self._end = 0
        self._num_gone = -1

    def skip(self, start: int, stop: int, num_gone: int) -> int:
        """Return the first chunk to look up of a run from ``start``, as many entries having been removed so far."""
        return min(self._end, stop) if self._holds(start, num_gone) else start

    def note(self, start: int, end: int, num_gone: int) -> None:
        """Take note of a run that was looked up, or a part of which was known."""
        if self._holds(start, num_gone):
            self._end = max(self._end, end)
        else:
            self._start, self._end, self._num_gone = start, end, num_gone

    def _holds(self, start: int, num_gone: int) -> bool:
        return self._num_gone == num_gone and self._start <= start <= self._end


class Watcher(Protocol):
    """Is told of what changes, on the scheduler thread, by the method that changes it."""

    def reserved(self, entry: Entry) -> None:
        """A chunk has a slot and is about to be filled."""

    def ready(self, entry: Entry) -> None:
        """A chunk's payload is in its slot."""

    def gone(self, entry: Entry) -> None:
        """A chunk, ready or not, is no more."""


class HostIndex:
    """Index over the slots of a pool.

    Args:
        pool: the pool; its generations are raised here.
        policy: what to keep; by default a new one of the default kind.
        clock: seconds since 1970, for listings.
    """

    def __init__(
        self,
        pool: HostPool,
        policy: Policy[bytes] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.pool = pool
        self.dropped: set[bytes] = set()
        self.num_evicted = 0
        self.num_unsaved = 0  #: of these, chunks that others may have and that were not saved
        self.num_pushed_out = 0  #: of these, chunks that others may have and that were kept until that moment
        self.watcher: Watcher | None = None
        self._clock = clock
        self._policy: Policy[bytes] = make_policy() if policy is None else policy
        self._transit: OrderedDict[bytes, Entry] = OrderedDict()  # first in, first out; in no other order
        self._kept_changes: dict[bytes, bool] | None = None  # key -> whether it is kept; None: nobody asks
        self._entries: dict[bytes, Entry] = {}
        self._free = list(range(pool.shape.num_slots - 1, -1, -1))
        self._num_quarantined = 0
        self._num_gone = 0  # entries ever removed: what was usable and is not any more is among them

    # -- questions: pure

    def get(self, key: bytes) -> Entry | None:
        """Return the entry of ``key``, filling or ready, or None. A dropped key has none."""
        entry = self._entries.get(key)
        return None if entry is None or key in self.dropped else entry

    def peek(self, key: bytes) -> Entry | None:
        """Return the entry of ``key`` even if an operator has just dropped it: a claim made before that stands."""
        return self._entries.get(key)

    def run_end(self, keys: Sequence[bytes], start: int, stop: int, known: KnownRun | None = None) -> int:
        """Return the end of the run of usable chunks of ``keys`` from ``start``, at most ``stop``.

        Args:
            known: what an earlier question about the same keys found; while it holds, only what may have come since
                is looked up.
        """
        entries, dropped = self._entries, self.dropped
        at = start if known is None or dropped else known.skip(start, stop, self._num_gone)
        end = stop
        for i in range(at, stop):
            entry = entries.get(keys[i])
            if entry is None or not entry.usable or (dropped and keys[i] in dropped):
                end = i
                break
        if known is not None and not dropped:
            known.note(start, end, self._num_gone)
        return end

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_quarantined(self) -> int:
        """Slots whose entry is gone but which somebody may still read or write."""
        return self._num_quarantined

    @property
    def num_in_transit(self) -> int:
        """Chunks whose slots are used again before the policy is asked."""
        return len(self._transit)

    def snapshot(self) -> list[Entry]:
        """Return the ready entries. Safe from any thread: one atomic copy."""
        return [e for e in list(self._entries.values()) if e.usable and e.key not in self.dropped]

    def dump(self) -> dict[str, Any]:
        """Return the whole state as plain values, for tests that compare it."""
        return {
            "entries": {
                k: (e.slot, e.generation, e.state, e.num_pins, e.doomed, e.source, e.num_hits, e.last_used)
                for k, e in self._entries.items()
            },
            "free": list(self._free),
            "quarantined": self._num_quarantined,
            "dropped": set(self.dropped),
            "evicted": self.num_evicted,
            "generations": self.pool.generations.tolist(),
            "policy": self._policy.dump(),
            "transit": list(self._transit),
            "kept_changes": None if self._kept_changes is None else dict(self._kept_changes),
        }

    # -- changes: the scheduler thread only

    def note(self, keys: Sequence[bytes], hint: Hint | None = None) -> None:
        """Note that a new request asks for a chain, root first, stored or not: once a request, never from a match."""
        now = self._clock()
        self._policy.note(keys, now, hint=hint)
        if self._transit:
            self._keep_again(keys, now)

    def _keep_again(self, keys: Sequence[bytes], now: float) -> None:
        """Let the policy have what is in transit of a chain that is asked for, as far as it is worth its room now."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                return
            if entry.in_transit:
                if not self._policy.admit(key, now, room=bool(self._free)):
                    return
                del self._transit[key]
                entry.in_transit = False
                entry.saved = entry.saved and not entry.declined  # it is offered again when it goes again
                self._keep(entry)

    def _keep(self, entry: Entry) -> None:
        self._policy.add(entry.key, entry.parent)
        self._note_kept(entry, True)

    def _give_up(self, entry: Entry) -> None:
        self._policy.remove(entry.key)
        self._note_kept(entry, False)

    def _note_kept(self, entry: Entry, is_kept: bool) -> None:
        if self._kept_changes is not None and entry.anchor:
            self._kept_changes[entry.key] = is_kept

    def follow_kept(self, follow: bool) -> None:
        """Begin to note which chunks that others may have are kept, with those that are now; or stop."""
        kept = (e.key for e in self._entries.values() if e.anchor and not e.in_transit)
        self._kept_changes = dict.fromkeys(kept, True) if follow else None

    def kept(self) -> list[Entry]:
        """Return the chunks that others may have and that are kept: of most worth first, ancestors before others."""
        kept = [e for e in self.snapshot() if e.anchor and not e.in_transit]
        return sorted(kept, key=lambda e: (-self._policy.worth(e.key), e.position))

    def take_kept_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the keys of chunks that the policy has come to keep since the last call, and those it gave up."""
        changes = self._kept_changes
        if not changes:
            return [], []
        self._kept_changes = {}
        return [key for key, kept in changes.items() if kept], [key for key, kept in changes.items() if not kept]

    def release(self, session: str) -> bool:
        """Note that a session that was named in a hint is over; returns whether it was known."""
        return self._policy.release(session)

    def admits(self, key: bytes, parent: bytes) -> bool:
        """Return whether a chunk is worth a slot for longer than it takes to pass it on. Its parent has to be, too."""
        return parent not in self._transit and self._policy.admit(key, self._clock(), room=bool(self._free))

    def reserve(
        self,
        key: bytes,
        parent: bytes,
        position: int,
        num_tokens: int,
        anchor: bytes = b"",
        tenant: bytes = bytes(16),
        *,
        keep: bool = True,
    ) -> Entry | None:
        """Make an entry for ``key`` in a free slot, evicting one if needed, and return it; None where nothing may go.

        Its parent never makes room for it: without its parent it would be worth nothing. The slot's generation is
        raised before this returns, so whoever still copies its old contents will know.

        Args:
            keep: it is to stay until the policy gives it up; else it is in transit.
        """
        if (old := self._entries.get(key)) is not None:  # dropped by an operator, not yet removed
            self.drop(old, filling=old.state == Entry.FILLING)
        slot = self._take_slot(parent)
        if slot is None:
            return None
        generation = int(self.pool.generations[slot]) + 1
        self.pool.generations[slot] = generation
        entry = Entry(key, parent, position, num_tokens, slot, generation)
        entry.last_used = self._clock()
        entry.anchor, entry.tenant = anchor, tenant
        self._entries[key] = entry
        if keep:
            self._keep(entry)
        else:
            entry.in_transit = True
            self._transit[key] = entry
        self.dropped.discard(key)
        if self.watcher is not None:
            self.watcher.reserved(entry)
        return entry

    def filled(self, entry: Entry, source: str) -> None:
        """Note that the entry's payload is in its slot, from ``"host"`` (spilled), ``"disk"`` or ``"shared"``."""
        if entry.state == Entry.FILLING:
            entry.source = source
            entry.saved = source == "disk"
            entry.state = Entry.READY
            entry.fetch = None
            if self.watcher is not None:
                self.watcher.ready(entry)
        elif entry.doomed:
            self._release(entry)

    def drop(self, entry: Entry, *, filling: bool = False) -> None:
        """Remove the entry. Its slot is free at once, or when its pins and its filler have gone.

        Args:
            filling: somebody may still write the slot; :meth:`filled` or :meth:`stopped` says when that is over.
        """
        if entry.state == Entry.GONE:
            return
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
            self._num_gone += 1
            if entry.in_transit:
                del self._transit[entry.key]
            else:
                self._give_up(entry)
            if self.watcher is not None:
                self.watcher.gone(entry)
        entry.state = Entry.GONE
        if filling or entry.num_pins:
            entry.doomed = filling
            self._num_quarantined += 1
        else:
            self._free.append(entry.slot)

    def stopped(self, entry: Entry) -> None:
        """Note that nobody writes the slot of a dropped entry any more."""
        if entry.doomed:
            self._release(entry)

    def _release(self, entry: Entry) -> None:
        entry.doomed = False
        if not entry.num_pins:
            self._num_quarantined -= 1
            self._free.append(entry.slot)

    def pin(self, entry: Entry) -> None:
        """Keep the slot's contents until :meth:`unpin`."""
        entry.num_pins += 1

    def unpin(self, entry: Entry) -> None:
        """Give back one pin."""
        entry.num_pins -= 1
        assert entry.num_pins >= 0, "a slot was unpinned more often than pinned"
        if entry.state == Entry.GONE and not entry.num_pins and not entry.doomed:
            self._num_quarantined -= 1
            self._free.append(entry.slot)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note a use of a chain, ancestors first."""
        keys = tuple(keys)
        self._policy.touch(keys)
        now = self._clock()
        for key in keys:
            if (entry := self._entries.get(key)) is not None:
                entry.last_used = now

    def used(self, entry: Entry) -> str:
        """Note that a ready entry's payload is used now, and return the tier that it came from for this use.

        The first use of what was fetched is a hit of the tier below, which has counted it; later ones are hits here.
        """
        source = entry.source
        entry.num_hits += source == "host"
        entry.source = "host"
        return source

    def apply_drops(self) -> int:
        """Remove the entries of the drop set and return how many there were."""
        if not self.dropped:
            return 0
        count = 0
        for key in list(self.dropped):
            entry = self._entries.get(key)
            if entry is not None and entry.state != Entry.FILLING:
                self.drop(entry)
                count += 1
            if entry is None or entry.state != Entry.FILLING:
                self.dropped.discard(key)
        return count

    def clear(self) -> None:
        """Drop every entry (a reset of the cache); those being filled are quarantined until their filler is done."""
        for entry in list(self._entries.values()):
            self.drop(entry, filling=entry.state == Entry.FILLING)
        self.dropped.clear()

    def retire(self, num: int) -> list[Entry]:
        """Have the policy give up ``num`` entries, and return them: leaves, and their ancestors after them.

        They are in transit then: there until their slots are needed, and kept again if they are asked for.
        """
        given_up: list[Entry] = []
        while len(given_up) < num:
            key = self._policy.victim(lambda k: self._may_evict(k) and not self._entries[k].sending)
            if key is None:
                break
            entry = self._entries[key]
            self._give_up(entry)
            entry.in_transit = True
            self._transit[key] = entry
            given_up.append(entry)
        return given_up

    def _take_slot(self, parent: bytes) -> int | None:
        if not self._free:
            victim = self._passed_through()
            if victim is None:
                victim = self._policy.victim(lambda key: key != parent and self._may_evict(key))
            if victim is None:
                return None
            self.num_evicted += 1
            entry = self._entries[victim]
            self.num_unsaved += bool(entry.anchor) and not entry.saved
            self.num_pushed_out += bool(entry.anchor) and not entry.in_transit
            self.drop(entry)
        return self._free.pop()

    def _passed_through(self) -> bytes | None:
        """Return what is in transit longest and needed no more; of a long prompt its start may go before its end."""
        for key, entry in islice(self._transit.items(), _MAX_LOOKED_AT):
            if self._may_evict(key) and not entry.sending:
                return key
        return None

    def _may_evict(self, key: bytes) -> bool:
        entry = self._entries[key]
        return entry.state == Entry.READY and not entry.num_pins
