"""Work over many chunks in steps: a snapshot of what is to be looked at, and cursors into it.

A command does one step and returns a cursor for the next, so that no command is long and nobody has to wait. A step
may be asked for again. Snapshots are kept for the few that work at a time, and forgotten when nobody goes on.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tierkv.errors import NotFoundError
from tierkv.keys import KEY_NBYTES
from tierkv.tiers.base import Ref

#: Snapshots that are kept; 64 bytes a chunk each.
MAX_SCANS = 4
IDLE_S = 600.0
#: Payload bytes of one step, or one payload.
STEP_NBYTES = 8 << 20
MAX_STEP_CHUNKS = 256


class Segment(NamedTuple):
    """Chunks of one namespace in one tier: keys and anchors, packed, 64 bytes a chunk."""

    tier: str
    ns_id: bytes
    payload_nbytes: int
    packed: bytes

    def __len__(self) -> int:
        return len(self.packed) // (2 * KEY_NBYTES)

    def refs(self, start: int, stop: int) -> list[Ref]:
        """Return the refs of chunks ``start`` to ``stop``."""
        step = 2 * KEY_NBYTES
        rows = [self.packed[i : i + step] for i in range(start * step, min(stop * step, len(self.packed)), step)]
        return [Ref(row[:KEY_NBYTES], row[KEY_NBYTES:]) for row in rows]


def segment(tier: str, ns_id: bytes, payload_nbytes: int, refs: Iterable[Ref]) -> Segment:
    """Return the segment of ``refs``."""
    return Segment(tier, ns_id, payload_nbytes, b"".join(ref.key + ref.anchor for ref in refs))


class Step(NamedTuple):
    """What one step is about: ``refs`` of ``segment``, the chunks before and in all, and the next step's cursor."""

    segment: Segment | None
    refs: list[Ref]
    num_done: int
    num_total: int
    cursor: str


class Scan:
    """A snapshot."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = [s for s in segments if s.packed]
        self.num_total = sum(map(len, self.segments))
        self.used = time.monotonic()


class Scans:
    """The snapshots that are being worked on. Thread-safe."""

    def __init__(self) -> None:
        self._scans: dict[str, Scan] = {}
        self._lock = threading.Lock()

    def open(self, segments: Sequence[Segment]) -> str:
        """Take a snapshot in and return the cursor of its first step."""
        name = secrets.token_hex(8)
        with self._lock:
            now = time.monotonic()
            for old in [n for n, scan in self._scans.items() if now - scan.used > IDLE_S]:
                del self._scans[old]
            while len(self._scans) >= MAX_SCANS:
                del self._scans[min(self._scans, key=lambda n: self._scans[n].used)]
            self._scans[name] = Scan(segments)
        return f"{name}:0"

    def step(self, cursor: str) -> Step:
        """Return the step at ``cursor``.

        Raises:
            NotFoundError: its snapshot is forgotten.
            ValueError: it is no cursor.
        """
        name, _, place = cursor.partition(":")
        at = int(place)
        with self._lock:
            scan = self._scans.get(name)
            if scan is not None:
                scan.used = time.monotonic()
        if scan is None or at < 0:
            raise NotFoundError("this work was not gone on with for too long, or the server was restarted; start again")
        start = at
        for part in scan.segments:
            if start < len(part):
                num = max(1, min(MAX_STEP_CHUNKS, STEP_NBYTES // part.payload_nbytes))
                refs = part.refs(start, start + num)
                done = at + len(refs)
                follows = f"{name}:{done}" if done < scan.num_total else ""
                return Step(part, refs, done, scan.num_total, follows)
            start -= len(part)
        return Step(None, [], scan.num_total, scan.num_total, "")
