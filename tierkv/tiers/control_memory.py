"""What a node remembers of the fleet's evictions: its place in the stream, its own evictions, and what it wrote.

The first two are files in the node's directory and outlive its process; the last needs to outlive nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from tierkv.keys import KEY_NBYTES
from tierkv.tiers.base import Ref
from tierkv.tiers.follow import Id, Place

logger = logging.getLogger("tierkv")

PLACE_FORMAT = "tierkv-control-1"
JOURNAL_FORMAT = "tierkv-journal-1"

#: Of a packed ref: the key, and as much of the anchor as names in Redis need.
ANCHOR_NBYTES = 8
REF_NBYTES = KEY_NBYTES + ANCHOR_NBYTES
#: Keys of one entry of the stream.
MAX_KEYS = 256
#: Entries that wait for Redis; beyond them whole namespaces are evicted in their place.
MAX_OWED = 1024
#: Seconds, and entries, for which what was announced is kept, to be announced again if Redis loses it.
KEEP_S = 600.0
MAX_KEPT = 256
#: Keys that this node may have written and not yet heard about; 65,536 are 20 MB at most.
MAX_WRITTEN = 65_536
#: Seconds for which a write is remembered after the stream was read up to it.
WRITTEN_S = 60.0


def pack_refs(refs: Iterable[Ref]) -> bytes:
    """Return refs as bytes, ``REF_NBYTES`` each."""
    return b"".join(ref.key + ref.anchor[:ANCHOR_NBYTES] for ref in refs)


def unpack_refs(data: bytes) -> list[Ref]:
    """Return the refs that :func:`pack_refs` packed; their anchors are the first 8 bytes, enough for names in Redis.

    Raises:
        ValueError: not a whole number of refs.
    """
    if len(data) % REF_NBYTES:
        raise ValueError(f"{len(data)} bytes are not a whole number of packed keys ({REF_NBYTES} bytes each)")
    return [
        Ref(data[i : i + KEY_NBYTES], data[i + KEY_NBYTES : i + REF_NBYTES]) for i in range(0, len(data), REF_NBYTES)
    ]


class StateFile:
    """A small file that is the old or the new one, whenever this process ends. Never raises; logs the first fault."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failing = False

    def read(self) -> bytes:
        """Return what it holds; nothing where there is none."""
        try:
            return self._path.read_bytes()
        except OSError:
            return b""

    def replace(self, data: bytes, *, sync: bool) -> None:
        """Write it anew; ``sync``: so that it also outlives the machine's end."""
        new = self._path.with_name(self._path.name + ".new")
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(data)
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
            new.replace(self._path)
        except OSError as error:
            if not self._failing:
                logger.warning("%s cannot be written (%s): a restart would not know of it.", self._path, error)
            self._failing = True
        else:
            self._failing = False


class _PlaceFile(msgspec.Struct):
    format: str
    last: str
    added: int | None
    written: float


class PlaceFile:
    """How far this node has applied the stream, in a small file that is replaced whole.

    Args:
        path: the file.

    Attributes:
        place: the place, or None where nothing is known (no file, another format, damaged).
        written: wall clock; this process and those before it wrote nothing to Redis after that time.
    """

    def __init__(self, path: Path) -> None:
        self._file = StateFile(path)
        self._lock = threading.Lock()
        self.place: Place | None = None
        self.written = 0.0
        with contextlib.suppress(msgspec.MsgspecError, ValueError):
            file = msgspec.json.decode(self._file.read(), type=_PlaceFile)
            if file.format == PLACE_FORMAT:
                self.place, self.written = Place(Id.parse(file.last), file.added), file.written

    def save(self, *, place: Place | None = None, written: float | None = None) -> None:
        """Note a new place, or that writes may follow until ``written``."""
        with self._lock:
            if place is not None:
                self.place = place
            if written is not None:
                self.written = max(self.written, written)
            at = self.place
            if at is not None:
                file = _PlaceFile(PLACE_FORMAT, str(at.last), at.added, self.written)
                self._file.replace(msgspec.json.encode(file), sync=False)


class Owed(msgspec.Struct, array_like=True):
    """An eviction of this node's. Fields are only ever added, at the end.

    Attributes:
        ns_id: the namespace.
        refs: packed, at most ``MAX_KEYS``; None: the whole namespace.
        at: wall clock when it was ordered.
        id: of its entry in the stream; empty while it waits to be announced.
        seen: this node has read it back: it was in the stream behind everything read before.
    """

    ns_id: bytes
    refs: bytes | None
    at: float
    id: str = ""
    seen: bool = False


class _JournalFile(msgspec.Struct, array_like=True):
    format: str
    owed: list[Owed]


class Journal:
    """The evictions that this node ordered: those that Redis has still to hear, and the last that it has heard.

    An eviction is written down before it is announced, so that neither a Redis that is out nor the end of this process
    makes it forgotten; and it is kept for a while after, because Redis may lose what it had heard.

    Thread-safe.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._file = StateFile(path)
        self._clock = clock
        self._lock = threading.Lock()
        self._owed: list[Owed] = []
        self._dirty = False  # what was read back is written down with the next change
        self._seen_early: OrderedDict[str, None] = OrderedDict()
        with contextlib.suppress(msgspec.MsgspecError):
            file = msgspec.msgpack.decode(self._file.read(), type=_JournalFile)
            if file.format == JOURNAL_FORMAT:
                self._owed = file.owed

    def add(self, ns_id: bytes, refs: Sequence[Ref] | None) -> list[Owed]:
        """Write an eviction down, in portions of ``MAX_KEYS``, and return them (or what took their place)."""
        now = self._clock()
        if refs is None:
            new = [Owed(ns_id, None, now)]
        else:
            new = [Owed(ns_id, pack_refs(refs[i : i + MAX_KEYS]), now) for i in range(0, len(refs), MAX_KEYS)]
        with self._lock:
            if refs is None:  # it covers what waits for this namespace
                self._owed = [owed for owed in self._owed if owed.id or owed.ns_id != ns_id]
            self._owed += new
            if sum(not owed.id for owed in self._owed) > MAX_OWED:
                new = self._condense(now)
            self._save()
        return new

    def announced(self, owed: Owed, id_: str) -> None:
        """Note the entry's id."""
        with self._lock:
            owed.id, owed.seen = id_, id_ in self._seen_early
            self._purge()
            self._save()

    def saw(self, id_: str) -> None:
        """Note that an entry was read back."""
        with self._lock:
            self._seen_early[id_] = None
            while len(self._seen_early) > MAX_KEPT:
                self._seen_early.popitem(last=False)
            for owed in self._owed:
                if owed.id == id_:
                    owed.seen = self._dirty = True

    def saw_all(self) -> None:
        """Note that everything announced was in the stream."""
        with self._lock:
            for owed in self._owed:
                owed.seen = bool(owed.id)
            self._dirty = True

    def again(self, missed_before: Id | None = None) -> int:
        """Let what Redis may have lost be announced again, and return how many entries that is.

        Args:
            missed_before: only what should have been read back, up to this id, and was not; None: everything recent.
        """
        with self._lock:
            self._purge()
            lost = [
                owed
                for owed in self._owed
                if owed.id and (missed_before is None or (not owed.seen and Id.parse(owed.id) <= missed_before))
            ]
            for owed in lost:
                owed.id, owed.seen = "", False
            if lost or self._dirty:
                self._save()
            return len(lost)

    def waiting(self) -> list[Owed]:
        """Return what Redis has still to hear, oldest first."""
        with self._lock:
            return [owed for owed in self._owed if not owed.id]

    def _condense(self, now: float) -> list[Owed]:
        """Let one order for each namespace that has many portions waiting stand for them."""
        counts: dict[bytes, int] = {}
        for owed in self._owed:
            if not owed.id:
                counts[owed.ns_id] = counts.get(owed.ns_id, 0) + 1
        largest = max(counts, key=lambda ns_id: counts[ns_id])
        logger.warning(
            "More than %d chunks that were evicted wait for Redis: namespace %s is evicted as a whole when it is back.",
            MAX_OWED * MAX_KEYS,
            largest.hex(),
        )
        self._owed = [owed for owed in self._owed if owed.id or owed.ns_id != largest]
        self._owed.append(Owed(largest, None, now))
        return [owed for owed in self._owed if not owed.id]

    def _purge(self) -> None:
        old = self._clock() - KEEP_S
        heard = [owed for owed in self._owed if owed.id and owed.at >= old][-MAX_KEPT:]
        kept = {id(owed) for owed in heard}
        self._owed = [owed for owed in self._owed if not owed.id or id(owed) in kept]

    def _save(self) -> None:
        self._dirty = False
        self._file.replace(msgspec.msgpack.encode(_JournalFile(JOURNAL_FORMAT, self._owed)), sync=True)


class Written:
    """The keys that this node wrote to Redis lately: those that an eviction it has not heard of yet may be about.

    A write that was on its way when the eviction was carried out lands behind it. So what is in here when the eviction
    is heard of is evicted once more. Thread-safe; bounded: while it is full, :meth:`begin` says no.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        #: (namespace, key) -> [anchor, writes under way, time of the last one's end]
        self._keys: OrderedDict[tuple[bytes, bytes], list[float]] = OrderedDict()
        self._anchors: dict[tuple[bytes, bytes], bytes] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def begin(self, ns_id: bytes, refs: Sequence[Ref]) -> bool:
        """Note that these are about to be written, and return whether they may be."""
        with self._changed:
            if len(self._keys) + len(refs) > MAX_WRITTEN:
                return False
            for ref in refs:
                name = (ns_id, ref.key)
                self._keys.setdefault(name, [0, 0.0])[0] += 1
                self._anchors[name] = ref.anchor[:ANCHOR_NBYTES]
            return True

    def end(self, ns_id: bytes, refs: Sequence[Ref]) -> None:
        """Note that they were written, or were not."""
        now = self._clock()
        with self._changed:
            for ref in refs:
                name = (ns_id, ref.key)
                state = self._keys.get(name)
                if state:
                    state[0] -= 1
                    state[1] = now
                    self._keys.move_to_end(name)
            self._changed.notify_all()

    def take(self, ns_id: bytes | None, keys: Iterable[bytes] | None, timeout_s: float) -> dict[bytes, list[Ref]]:
        """Return, and forget, what was written of these, by namespace; waits for writes that are under way.

        Args:
            ns_id: the namespace; None: all of them.
            keys: the keys; None: all.
            timeout_s: how long to wait for writes at most.
        """
        wanted = None if keys is None else {(ns_id, key) for key in keys}
        deadline = self._clock() + timeout_s
        found: dict[bytes, list[Ref]] = {}
        with self._changed:
            if wanted is None:
                names = [name for name in self._keys if ns_id is None or name[0] == ns_id]
            else:
                names = [name for name in wanted if name in self._keys]  # type: ignore[misc]
            while any(name in self._keys and self._keys[name][0] for name in names):
                left_s = deadline - self._clock()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            for name in names:
                if self._keys.pop(name, None):
                    found.setdefault(name[0], []).append(Ref(name[1], self._anchors.pop(name)))
        return found

    def heard(self, at: float) -> None:
        """Forget what was written ``WRITTEN_S`` before ``at``, a time at which the stream had been read to its end."""
        with self._changed:
            while self._keys:
                name, (busy, ended) = next(iter(self._keys.items()))
                if busy or ended > at - WRITTEN_S:
                    return
                del self._keys[name]
                del self._anchors[name]
