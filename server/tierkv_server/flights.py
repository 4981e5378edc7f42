"""One fetch for many waiters: while a chunk comes from the shared tier for one engine, others wait for it here."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tierkv.payload import Header
from tierkv_server.session import Session

#: A waiter gives up after this long and asks the tier itself: whoever fetches for it may be stuck. It has to be done
#: well before its engine takes the lane for dead (5 s).
MAX_WAIT_S = 2.0

Name = tuple[bytes, bytes]


class Landed(NamedTuple):
    """Where a payload arrived: whose pool, which slot, under which generation."""

    session: Session
    slot: int
    generation: int
    header: Header


class Flight:
    """A fetch under way. ``landed`` is set when it is over: None where it brought nothing.

    Args:
        since: number of evictions when it began: who joins it has to see that its chunk was not evicted later.
    """

    def __init__(self, since: int) -> None:
        self.since = since
        self.over = threading.Event()
        self.landed: Landed | None = None


class Flights:
    """The fetches under way, by chunk. Every name that was claimed must be landed or given up."""

    def __init__(self) -> None:
        self._flights: dict[Name, Flight] = {}
        self._lock = threading.Lock()
        self.num_joined = 0  #: chunks that another's fetch brought

    def claim(self, names: Sequence[Name], since: int) -> tuple[dict[int, Flight], dict[int, Flight]]:
        """Return the flights of the names that the caller is to fetch, by index, and those of the others."""
        mine: dict[int, Flight] = {}
        others: dict[int, Flight] = {}
        with self._lock:
            for i, name in enumerate(names):
                flight = self._flights.get(name)
                if flight is None:
                    mine[i] = self._flights[name] = Flight(since)
                else:
                    others[i] = flight
        return mine, others

    def land(self, name: Name, flight: Flight, landed: Landed | None) -> None:
        """End a flight that the caller claimed; idempotent. Another's, begun since, goes on."""
        with self._lock:
            if self._flights.get(name) is flight:
                del self._flights[name]
                flight.landed = landed
        flight.over.set()

    def give_up(self, flights: Iterable[tuple[Name, Flight]]) -> None:
        """End flights that brought nothing."""
        for name, flight in flights:
            self.land(name, flight, None)
