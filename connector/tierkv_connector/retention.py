"""What hints about sessions do in an engine: the policy of the host pool and the store server are told.

The one place that calls them for it. The scheduler thread calls everything but :meth:`Retention.take_order`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from tierkv.client import StoreClient
from tierkv.config import HintLimits
from tierkv.hostindex import HostIndex
from tierkv.messages import RequestNote
from tierkv.policy import Hint
from tierkv.sessions import SESSION_NBYTES, SessionBook, SessionLimits, SessionTurn
from tierkv_connector.requests import RequestState

#: Orders of the store server's operator: a session is over, or its next request goes first.
RELEASE, FIRST = b"r", b"p"
_MAX_FIRST = 1024


class Retention:
    """Sessions, as one engine knows them.

    Args:
        index: the host index.
        limits: what sessions may hold of the host pool.
        clock: monotonic seconds.
    """

    def __init__(self, index: HostIndex, limits: HintLimits, clock: Callable[[], float]) -> None:
        shape = index.pool.shape
        nbytes = shape.num_slots * shape.payload_nbytes
        self._index = index
        self._clock = clock
        self._chunk_nbytes = shape.payload_nbytes
        self._first: OrderedDict[bytes, None] = OrderedDict()  # sessions whose next request's plan goes first
        self._orders: deque[bytes] = deque(maxlen=_MAX_FIRST)
        self._book = SessionBook(
            SessionLimits(
                nbytes=int(limits.share * nbytes),
                tenant_nbytes=int(limits.tenant_share * nbytes),
                tenant_sessions=limits.tenant_sessions,
                retain_s=limits.max_retain_s,
            )
        )

    def arrived(self, state: RequestState, client: StoreClient | None) -> bool:
        """Tell the policy of a new request, and the server what is to be brought near for it.

        Returns whether the request's plan goes before others that wait.
        """
        self._obey()
        outcome = state.outcome
        if outcome is None:
            self._index.note(state.keys)
            _note_below(state, client)
            return False
        hints = outcome.hints
        retain_s = hints.retain_s if self._holds(state) else None
        session = hints.session.hex()
        self._index.note(state.keys, Hint(session, retain_s, hints.release, hints.priority))
        _note_below(state, client)
        first = hints.session in self._first
        self._first.pop(hints.session, None)
        if hints.prefetch:
            if hints.prefetch == "host" and hints.session and not hints.release:
                self._goes_first(hints.session)
            self._tell(state, client, prefetch=True)
        return first

    def finished(self, state: RequestState, client: StoreClient | None) -> None:
        """Tell the server of a session's turn that has ended."""
        if state.outcome is not None and state.outcome.hints.session:
            self._tell(state, client, prefetch=False)

    def take_order(self, body: bytes) -> bytes:
        """Take an operator's order, and return how many sessions it names. Safe from any thread."""
        if body[:1] not in (RELEASE, FIRST) or (len(body) - 1) % SESSION_NBYTES:
            return b"0"
        self._orders.extend(body[:1] + body[i : i + SESSION_NBYTES] for i in range(1, len(body), SESSION_NBYTES))
        return str((len(body) - 1) // SESSION_NBYTES).encode()

    def dump(self) -> dict[str, Any]:
        """Return the state as plain values, for tests that compare it."""
        return {
            "sessions": [(s.id, s.num_turns, s.noted, s.until, s.num_held) for s in self._book],
            "held_nbytes": self._book.held_nbytes,
            "first": list(self._first),
            "orders": list(self._orders),
        }

    def _holds(self, state: RequestState) -> bool:
        """Note a session's turn, and return whether its prompt is held in the host pool."""
        assert state.outcome is not None
        hints, now = state.outcome.hints, self._clock()
        if not hints.session:
            return False
        if hints.release:
            self._book.release(hints.session)
            return False
        self._book.expire(now)
        session, lost = self._book.note(
            hints.session, state.tenant, b"", b"", len(state.keys), self._chunk_nbytes, now, hints.retain_s, whole=True
        )
        for other in lost:  # their quota is used up: nothing speaks for them any more
            self._index.release(other.id.hex())
        if hints.retain_s is not None and state.keys and not session.num_held:
            hints.limited["retain_s"] = "not in the host pool: the prompt is larger than what its tenant may hold there"
        return session.num_held > 0

    def _goes_first(self, session: bytes) -> None:
        self._first[session] = None
        self._first.move_to_end(session)
        if len(self._first) > _MAX_FIRST:
            self._first.popitem(last=False)

    def _obey(self) -> None:
        while self._orders:
            order = self._orders.popleft()
            if order[:1] == FIRST:
                self._goes_first(order[1:])
            else:
                self._book.release(order[1:])
                self._first.pop(order[1:], None)
                self._index.release(order[1:].hex())

    def _tell(self, state: RequestState, client: StoreClient | None, *, prefetch: bool) -> None:
        """Tell the store server of a turn; what others must not see stays here."""
        assert state.outcome is not None
        hints = state.outcome.hints
        if client is None or not client.connected() or not state.shareable or not (state.keys or hints.release):
            return
        client.turn(
            SessionTurn(
                session=hints.session,
                tenant=state.tenant,
                chain=b"".join(state.keys),
                retain_s=hints.retain_s or 0.0,
                release=hints.release and not prefetch,
                prefetch=prefetch,
            )
        )


def _note_below(state: RequestState, client: StoreClient | None) -> None:
    """Tell the store server what a request asks for, once; what others must not see stays here."""
    if client is None or not client.connected() or not state.shareable or not state.keys:
        return
    if state.store == "none" and state.tiers <= {"host"}:
        return
    hints = state.outcome.hints if state.outcome is not None else None
    chain = b"".join(state.keys)
    if hints is None:
        client.note(RequestNote(state.tenant, chain))
    else:
        client.note(RequestNote(state.tenant, chain, hints.session, hints.retain_s, hints.release, hints.priority))
