"""One fetch for many waiters: while a chunk comes from the shared tier for one engine, others wait for it here."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tierkv.payload import Header
from tierkv_server.session import Session

#: A waiter gives up after this long and asks the tier itself: whoever fetches for it may be stuck.
MAX_WAIT_S = 5.0

Name = tuple[bytes, bytes]


class Landed(NamedTuple):
    """Where a payload arrived: whose pool, which slot, under which generation."""

    session: Session
    slot: int
    generation: int
    header: Header


class Flight:
    """A fetch under way. ``landed`` is set when it is over: None where it brought nothing."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.landed: Landed | None = None


class Flights:
    """The fetches under way, by chunk. Every name that was claimed must be landed or given up: use as a context."""

    def __init__(self) -> None:
        self._flights: dict[Name, Flight] = {}
        self._lock = threading.Lock()
        self.num_joined = 0  #: chunks that another's fetch brought

    def claim(self, names: Sequence[Name]) -> tuple[list[int], dict[int, Flight]]:
        """Return the indexes of the names that the caller is to fetch, and the flights of the others."""
        mine: list[int] = []
        others: dict[int, Flight] = {}
        with self._lock:
            for i, name in enumerate(names):
                flight = self._flights.get(name)
                if flight is None:
                    self._flights[name] = Flight()
                    mine.append(i)
                else:
                    others[i] = flight
        return mine, others

    def land(self, name: Name, landed: Landed | None) -> None:
        """End a flight that the caller claimed; idempotent."""
        with self._lock:
            flight = self._flights.pop(name, None)
        if flight is not None:
            flight.landed = landed
            flight.over.set()

    def give_up(self, names: Iterable[Name]) -> None:
        """End flights that brought nothing."""
        for name in names:
            self.land(name, None)
