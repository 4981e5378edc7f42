"""Fetches: payloads from the tiers into slots of an engine's pool, nearest tier first, one fetch for many waiters."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from tierkv.errors import UnavailableError
from tierkv.messages import BAD, FROM_DISK, FROM_SHARED, MISSING
from tierkv.payload import BadRecordError
from tierkv.pool import HostPool
from tierkv.tiers.base import Fetched, Ref, Status, deliver
from tierkv_server.flights import MAX_WAIT_S, Flight, Flights, Landed
from tierkv_server.moves import Moves
from tierkv_server.session import Session
from tierkv_server.writer import Staged


class Fetcher:
    """Answers fetches, and passes on what was used to the tiers that want it."""

    def __init__(self, moves: Moves) -> None:
        self.moves = moves
        self.flights = Flights()

    def fetch(self, session: Session, refs: Sequence[Ref], slots: Sequence[int]) -> bytes:
        """Copy payloads into slots of the engine's pool, verified there, and return a letter each.

        Raises:
            ValueError: a slot is outside of the pool.
            UnavailableError: the session has ended.
        """
        with session.using() as pool, self.moves.loads:
            if any(not 0 <= slot < pool.shape.num_slots for slot in slots):
                raise ValueError(f"a slot is outside of the engine's pool of {pool.shape.num_slots}")
            return self._fetch(session, pool, refs, slots)

    def _fetch(self, session: Session, pool: HostPool, refs: Sequence[Ref], slots: Sequence[int]) -> bytes:
        ns_id, since = session.ns_id, self.moves.evictions.number
        found = self.moves.disk.fetch(ns_id, refs, lambda i: pool.parts(slots[i]))
        letters = [_fetch_letter(f, FROM_DISK) for f in found]
        for ref, fetched in zip(refs, found, strict=True):
            if fetched.header is not None:
                self.moves.spill_up(ns_id, ref, since, self.moves.spill.uses.note((ns_id, ref.key)))
        holes = [i for i, f in enumerate(found) if f.status != Status.OK]
        if holes and self.moves.shared:
            brought = self._fetch_shared(session, pool, [refs[i] for i in holes], [slots[i] for i in holes], since)
            for i, letter in zip(holes, brought, strict=True):
                if letter != MISSING:
                    letters[i] = letter
        return b"".join(letters)

    def _fetch_shared(
        self, session: Session, pool: HostPool, refs: Sequence[Ref], slots: Sequence[int], since: int
    ) -> list[bytes]:
        """Fetch from the shared tier what no other engine is fetching from there, and wait for the others' rest."""
        ns_id = session.ns_id
        names = [(ns_id, ref.key) for ref in refs]
        mine, others = self.flights.claim(names, since)
        letters = [MISSING] * len(refs)
        try:
            brought = self._fetch_mine(session, pool, refs, slots, list(mine), since, mine)
            for i, letter in zip(mine, brought, strict=True):
                letters[i] = letter
        finally:
            self.flights.give_up((names[i], flight) for i, flight in mine.items())
        deadline = time.monotonic() + MAX_WAIT_S
        late: list[int] = []
        for i, flight in others.items():
            flight.over.wait(max(0.0, deadline - time.monotonic()))
            if self._join(ns_id, pool, refs[i], slots[i], flight):
                letters[i] = FROM_SHARED
                self.flights.num_joined += 1
            else:
                late.append(i)
        for i, letter in zip(late, self._fetch_mine(session, pool, refs, slots, late, since, {}), strict=True):
            letters[i] = letter
        return letters

    def _fetch_mine(
        self,
        session: Session,
        pool: HostPool,
        refs: Sequence[Ref],
        slots: Sequence[int],
        mine: Sequence[int],
        since: int,
        flights: Mapping[int, Flight],
    ) -> list[bytes]:
        if not mine or self.moves.shared is None:
            return []
        ns_id = session.ns_id
        above = self.moves.shared.fetch(ns_id, [refs[i] for i in mine], lambda j: pool.parts(slots[mine[j]]))
        for i, fetched in zip(mine, above, strict=True):
            name = (ns_id, refs[i].key)
            if fetched.header is None:
                self.moves.seen.discard(name)
                continue
            generation = int(pool.generations[slots[i]])
            if i in flights:
                self.flights.land(name, flights[i], Landed(session, slots[i], generation, fetched.header))
            self.moves.seen.add(name)
            if self.moves.spill.from_above("disk", self.moves.spill.uses.note(name)):
                self.moves.promote(session, refs[i], slots[i], generation, fetched.header, since)
        return [_fetch_letter(fetched, FROM_SHARED) for fetched in above]

    def _join(self, ns_id: bytes, pool: HostPool, ref: Ref, slot: int, flight: Flight) -> bool:
        """Copy a payload that another engine's fetch brought, verified, and return whether that was to be had."""
        landed = flight.landed
        if landed is None or not self.moves.evictions.allows(ns_id, ref.key, flight.since):
            return False
        try:
            with landed.session.using() as source:
                staged = self.moves.copy(source, landed.slot, landed.generation, lambda _: landed.header)
        except UnavailableError:
            return False
        if not isinstance(staged, Staged):
            return False
        try:
            deliver(staged.record.data, ref, ns_id, pool.shape.payload_nbytes, pool.parts(slot))
        except BadRecordError:
            return False
        finally:
            staged.buffer.release()
        return True


def _fetch_letter(fetched: Fetched, tier: bytes) -> bytes:
    if fetched.status == Status.OK:
        return tier
    return BAD if fetched.status == Status.BAD else MISSING
