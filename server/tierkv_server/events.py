"""What happened lately: stores, fetches and evictions, and which operations were slow or failed. Two bounded rings.

Noting costs an append; nothing is formatted before somebody asks. Prompts and token ids are never in here.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from tierkv.prefixes import ID_DIGITS

#: Events that are kept: about a minute of a busy node.
MAX_EVENTS = 4096
MAX_SLOW = 256
#: An operation that takes longer is slow. A command moves at most 8 MiB: 10 ms of a fast disk.
SLOW_S = 0.1
#: Events in one reply.
MAX_REPLY = 1024


#: What the letters of FETCH and STORE mean (:mod:`tierkv.messages`), by their code.
FETCHED = {ord("d"): "disk", ord("s"): "shared", ord("-"): "missing", ord("!"): "damaged"}
KEPT = {
    ord("o"): "stored",
    ord("x"): "there",
    ord("g"): "stale",
    ord("b"): "dropped",
    ord("n"): "declined",
    ord("e"): "failed",
}


class Event(NamedTuple):
    """Something that happened.

    Attributes:
        number: grows by one with each event.
        when: seconds since 1970.
        kind: ``store``, ``fetch``, ``evict`` (by order), ``expel`` (to make room) or ``lost`` (evicted elsewhere).
        engine: whose; empty where it was no engine.
        ns_id: the namespace.
        last: key of the last chunk it was about; empty where a whole namespace was meant.
        chunks: number of chunks by what became of them.
        seconds: how long it took.
    """

    number: int
    when: float
    kind: str
    engine: str
    ns_id: bytes
    last: bytes
    chunks: dict[str, int]
    seconds: float

    def describe(self) -> dict[str, Any]:
        """Return the event as it is sent."""
        return {
            "number": self.number,
            "when": self.when,
            "kind": self.kind,
            "engine": self.engine,
            "namespace": self.ns_id.hex(),
            "id": self.last.hex()[:ID_DIGITS],
            "chunks": self.chunks,
            "seconds": round(self.seconds, 6),
        }


class Events:
    """The rings. Thread-safe."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._slow: deque[Event] = deque(maxlen=MAX_SLOW)
        self._lock = threading.Lock()

    def note(
        self,
        kind: str,
        ns_id: bytes,
        last: bytes,
        chunks: dict[str, int],
        *,
        engine: str = "",
        seconds: float = 0.0,
    ) -> None:
        """Note that something happened just now."""
        with self._lock:
            event = Event(next(self._numbers), time.time(), kind, engine, ns_id, last, chunks, seconds)
            self._events.append(event)
            if seconds > SLOW_S or chunks.get("failed") or chunks.get("damaged") or chunks.get("dropped"):
                self._slow.append(event)

    def since(self, number: int, limit: int = 0) -> dict[str, Any]:
        """Return the events after ``number``, oldest first, and how many of them are not here any more.

        A number that is still to come (of a server that ran before) means all that are here.
        """
        with self._lock:
            events = list(self._events)
        newest = events[-1].number if events else 0
        if number > newest:
            number = 0
        found = [event for event in events if event.number > number]
        num_lost = found[0].number - number - 1 if found and number else 0
        shown = found[: min(limit or MAX_REPLY, MAX_REPLY)]
        last = shown[-1].number if shown else newest
        return {"last": last, "num_lost": num_lost, "events": [event.describe() for event in shown]}

    def slow(self, limit: int = 0) -> dict[str, Any]:
        """Return the operations that were slow or failed, the latest first."""
        with self._lock:
            found: Sequence[Event] = list(self._slow)[::-1]
        return {"slow_s": SLOW_S, "operations": [event.describe() for event in found[: limit or None]]}
