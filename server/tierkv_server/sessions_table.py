"""Sessions on a store server: which conversations engines told of, what is held for them, and bringing them near.

Engines tell of each turn (``TKV.TURN``) as soon as its request ends, often before its chunks are stored. So a hold is a
wish that a thread of its own makes true: it pins the leading chunks that are there, and again when chunks of them are
stored. Pins are of the owner ``session:<digest>`` and end by themselves; they outlive this server, the table does not.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tierkv.errors import NotFoundError, RefusedError
from tierkv.health import Repeated
from tierkv.keys import KEY_NBYTES
from tierkv.layout import Namespace
from tierkv.payload import record_nbytes
from tierkv.policy import prefetch_order
from tierkv.server_config import ServerConfig
from tierkv.sessions import Session, SessionBook, SessionLimits, SessionSelect, SessionTurn
from tierkv.tiers.base import Pin, Ref
from tierkv_server.moves import Moves

#: Pins follow a store within this time, all that were stored by then at once.
_SETTLE_S = 0.1
#: Sessions and prefixes that wait for the thread; more are dropped, and counted.
_MAX_WAITING = 4096
#: Chunks of holds that are waited for; each is a row of about 300 bytes.
_MAX_MISSING = 1 << 17
#: The digits that an order names a session by, at least.
_MIN_DIGITS = 4

MakeRefs = Callable[[Sequence[bytes], int, bytes], Sequence[Ref]]


class SessionTable:
    """The sessions of a store server. Thread-safe.

    Args:
        moves: the tiers, and the means to copy between them.
        make_refs: returns the refs of a chain (:func:`tierkv_server.service.make_refs`).
        config: what sessions may hold; :meth:`reconfigure` changes it.
        clock: seconds since 1970.

    Attributes:
        num_dropped: holds and prefetches that were given up because too many waited.
        num_brought: chunks that were brought from the shared tier to the disk ahead of their use.
    """

    def __init__(
        self, moves: Moves, make_refs: MakeRefs, config: ServerConfig, clock: Callable[[], float] = time.time
    ) -> None:
        self.num_dropped = 0
        self.num_brought = 0
        self._moves = moves
        self._make_refs = make_refs
        self._clock = clock
        self._book = SessionBook(_limits(config))
        self._missing: dict[tuple[bytes, bytes], set[bytes]] = {}  # chunk of holds that is not there -> sessions
        self._pinned: dict[bytes, tuple[bytes, bytes]] = {}  # session -> namespace, chain that was pinned for it
        self._holds: OrderedDict[bytes, None] = OrderedDict()  # sessions whose pins are to be looked at
        self._fetches: OrderedDict[bytes, tuple[bytes, bytes]] = OrderedDict()  # last key -> namespace, chain
        self._busy = False
        self._closed = False
        self._changed = threading.Condition()
        self._unforeseen = Repeated()
        self._thread = threading.Thread(target=self._run, name="tierkv-sessions", daemon=True)
        self._thread.start()

    def reconfigure(self, config: ServerConfig) -> None:
        """Go on with other limits, from the next turn on."""
        with self._changed:
            self._book.limits = _limits(config)

    def close(self) -> None:
        """Stop the thread; what waits is given up. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def settle(self, timeout_s: float) -> bool:
        """Wait until nothing waits for the thread, and return whether it was in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._holds or self._fetches or self._busy), timeout_s)

    # -- what engines tell

    def turn(self, namespace: Namespace, turn: SessionTurn) -> None:
        """Note a session's request."""
        ns_id, chunk_nbytes = namespace.ns_id(), record_nbytes(namespace.payload_nbytes)
        with self._changed:
            if turn.prefetch and turn.chain:
                self._wait_for(self._fetches, turn.chain[-KEY_NBYTES:], (ns_id, self._cut(turn.chain, chunk_nbytes)))
            if turn.session and turn.release:
                self._release(turn.session, ns_id, turn.chain)
            elif turn.session:
                now = self._clock()
                _, lost = self._book.note(
                    turn.session,
                    turn.tenant,
                    ns_id,
                    turn.chain,
                    len(turn.chain) // KEY_NBYTES,
                    chunk_nbytes,
                    now,
                    turn.retain_s or None,
                )
                for other in lost:
                    self._look_at(other.id)
                self._look_at(turn.session)
            self._changed.notify_all()

    def affords(self, session: bytes, tenant: bytes, nbytes: int) -> bool:
        """Return whether a session may hold so much, beside what its tenant and all others hold now."""
        with self._changed:
            self._expire()
            return self._book.affords(session, tenant, nbytes)

    def stored(self, ns_id: bytes, keys: Sequence[bytes]) -> None:
        """Take note of chunks that a tier has now: some may be waited for."""
        if not self._missing:
            return
        with self._changed:
            for key in keys:
                for session in self._missing.pop((ns_id, key), ()):
                    self._look_at(session)
            self._changed.notify_all()

    # -- what people ask

    def rows(self, select: SessionSelect, namespaces: Mapping[bytes, Namespace]) -> list[dict[str, Any]]:
        """Return a row for each session that fits, last noted first."""
        with self._changed:
            self._expire()
            found = [(s, s.until, s.num_held) for s in self._book if _fits(s, select)]
        rows = [_row(s, until, held, namespaces.get(s.ns_id)) for s, until, held in found]
        return sorted(rows, key=lambda row: -row["noted"])

    def release(self, select: SessionSelect) -> bytes:
        """Let go of the one session that is meant, and return its digest.

        Raises:
            RefusedError, NotFoundError: not one is meant.
        """
        with self._changed:
            session = self._one(select)
            self._release(session.id, session.ns_id, session.chain)
            self._changed.notify_all()
            return session.id

    def prefetch(self, select: SessionSelect) -> tuple[bytes, int]:
        """Bring the one session that is meant to this node's disk; returns its digest and the chunks that are queued.

        Raises:
            RefusedError, NotFoundError: not one is meant, or there is no shared tier to bring it from.
        """
        if self._moves.shared is None:
            raise RefusedError("this server has no shared tier to bring a session from; its disk has all there is")
        with self._changed:
            session = self._one(select)
            chain = self._cut(session.chain, session.chunk_nbytes)
            if chain:
                self._wait_for(self._fetches, chain[-KEY_NBYTES:], (session.ns_id, chain))
            self._changed.notify_all()
            return session.id, len(chain) // KEY_NBYTES

    def _one(self, select: SessionSelect) -> Session:
        if len(select.session) < _MIN_DIGITS:
            raise RefusedError(f"no session is named; give its id, {_MIN_DIGITS} digits of it at least")
        found = [s for s in self._book if _fits(s, select)]
        if len(found) > 1:
            raise RefusedError(f"{len(found)} sessions start with {select.session!r}; write more digits of the id")
        if not found:
            raise NotFoundError(f"no session {select.session!r} is known here; 'tierkv session ls' lists them")
        return found[0]

    # -- the lock is held

    def _release(self, session: bytes, ns_id: bytes, chain: bytes) -> None:
        self._book.release(session)
        self._moves.disk.release(ns_id, session.hex())
        if chain:  # pins of an earlier server's life are not in the table
            self._pinned.setdefault(session, (ns_id, chain))
        self._look_at(session)

    def _expire(self) -> None:
        for session in self._book.expire(self._clock()):
            self._pinned.pop(session.id, None)  # the pins' time is over too

    def _look_at(self, session: bytes) -> None:
        self._wait_for(self._holds, session, None)

    def _wait_for(self, queue: OrderedDict[bytes, Any], name: bytes, value: Any) -> None:
        if name not in queue and len(queue) >= _MAX_WAITING:
            self.num_dropped += 1
            return
        queue[name] = value

    def _cut(self, chain: bytes, chunk_nbytes: int) -> bytes:
        """Return the part of a chain that one tenant may have brought near."""
        return chain[: self._book.limits.tenant_nbytes // max(1, chunk_nbytes) * KEY_NBYTES]

    # -- the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._holds or self._fetches or self._closed)
                if not self._closed:
                    self._changed.wait_for(lambda: self._closed, _SETTLE_S)
                if self._closed:
                    return
                self._busy = True
                self._expire()
                holds, fetches = list(self._holds), list(self._fetches.values())
                self._holds.clear()
                self._fetches.clear()
            try:
                for session in holds:
                    self._pin(session)
                for ns_id, chain in self._most_worthy_first(fetches):
                    self.num_brought += self._moves.bring_down(
                        ns_id, self._make_refs(_keys(chain), 0, b""), lambda: self._closed
                    )
            except Exception:  # nothing here may stop the thread
                self._unforeseen.note("the sessions' thread failed in an unforeseen way", exc_info=True)

    def _most_worthy_first(self, fetches: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Return what is to be brought near, what the disk's policy expects most of first: queues may fill."""
        by_end = {(ns_id, chain[-KEY_NBYTES:]): (ns_id, chain) for ns_id, chain in fetches}
        order = prefetch_order([[end] for end in by_end], lambda _: False, lambda end: self._moves.disk.worth(*end))
        return [by_end[end] for end in order]

    def _pin(self, session_id: bytes) -> None:
        """Make the pins of a session what its last turn asked for, on the disk as far as that has it.

        Only there: Redis evicts by its own order whatever pins say, and what is used now and then does not expire.
        """
        with self._changed:
            session = self._book.get(session_id)
            ns_before, before = self._pinned.pop(session_id, (b"", b""))
            held, until, ns_id = b"", 0.0, b""
            if session is not None and session.num_held:
                held, until, ns_id = session.chain[: session.num_held * KEY_NBYTES], session.until, session.ns_id
                self._pinned[session_id] = (ns_id, held)
        disk, owner = self._moves.disk, f"session:{session_id.hex()}"
        kept = set(_keys(held)) if ns_before == ns_id else set()
        if over := [ref for ref in self._make_refs(_keys(before), 0, b"") if ref.key not in kept]:
            disk.unpin(ns_before, over, owner)
        if not held:
            return
        refs = self._make_refs(_keys(held), 0, b"")
        disk.pin(ns_id, refs, Pin(owner, until))
        there = disk.match(ns_id, refs)
        with self._changed:
            if len(self._missing) > _MAX_MISSING:
                self._missing.clear()  # they are looked at again with their sessions' next turns
            for ref, is_there in zip(refs, there, strict=True):
                if not is_there:
                    self._missing.setdefault((ns_id, ref.key), set()).add(session_id)


def _limits(config: ServerConfig) -> SessionLimits:
    own, nbytes = config.sessions, config.disk.bytes
    return SessionLimits(
        nbytes=nbytes * own.percent // 100,
        tenant_nbytes=nbytes * own.tenant_percent // 100,
        tenant_sessions=own.tenant_sessions,
        retain_s=own.retain_s,
    )


def _keys(chain: bytes) -> list[bytes]:
    return [chain[i : i + KEY_NBYTES] for i in range(0, len(chain), KEY_NBYTES)]


def _fits(session: Session, select: SessionSelect) -> bool:
    return (
        session.id.hex().startswith(select.session)
        and session.ns_id.hex().startswith(select.ns)
        and session.tenant.hex().startswith(select.tenant)
    )


def _row(session: Session, until: float, num_held: int, namespace: Namespace | None) -> dict[str, Any]:
    chunk_tokens = namespace.layout.chunk_tokens if namespace else 0
    return {
        "id": session.id.hex(),
        "tenant": session.tenant.hex() if session.tenant.strip(b"\0") else "",
        "namespace": session.ns_id.hex(),
        "model": namespace.model if namespace else "",
        "num_turns": session.num_turns,
        "noted": session.noted,
        "num_chunks": session.num_chunks,
        "tokens": session.num_chunks * chunk_tokens,
        "until": until,
        "num_held": num_held,
        "held_nbytes": num_held * session.chunk_nbytes,
    }
