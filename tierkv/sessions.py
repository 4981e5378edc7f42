"""Sessions: conversations that applications name, and what is held for them. Pure: the clock is an argument.

Theory of operation. A *turn* of a session (one request) names its chain of chunks and, if the application expects to
be back, for how long the chain is to be held. The last turn's word counts: a turn without a time ends the hold. Holds
are bounded: of each tenant and of all together, in bytes, as shares of the tier that :class:`SessionLimits` says. Where
a hold does not fit, holds of the same tenant go first, longest ago first; where all together are full, those of the
tenant that holds most. What still does not fit is cut at the end of the chain: a prefix is of use without its rest.

A chunk counts for each session that holds it, shared or not: a tenant's sum is never less than what it really takes.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from tierkv.keys import KEY_NBYTES

SESSION_NBYTES = 16
#: Sessions and bytes of keys that a book remembers, whatever its limits: at most about 100 MB.
MAX_SESSIONS = 1 << 14
MAX_CHAIN_NBYTES = 64 << 20


def session_digest(tenant: bytes, session: str) -> bytes:
    """Return the 16-byte name of a session. It is of one tenant: nobody else's session has it.

    Args:
        tenant: 16-byte digest of the tenant (:func:`tierkv.keys.tenant_digest`).
        session: the application's name for it, which is never stored or shown.
    """
    name = session.encode("utf-8", "surrogatepass")
    return hashlib.sha256(b"tierkv-session-1" + tenant + name).digest()[:SESSION_NBYTES]


class SessionTurn(msgspec.Struct, frozen=True, array_like=True):
    """What an engine tells the store server of a session's request. New fields go to the end, with defaults.

    Attributes:
        session: its digest; empty where a prefix is to be brought near for nobody in particular.
        tenant: 16-byte digest.
        chain: the keys of the request's chunks, 32 bytes each, from the first on.
        retain_s: how long they are to be held; 0: not.
        release: the session is over.
        prefetch: bring what the shared tier has of the chain to the node's disk.
    """

    session: bytes
    tenant: bytes
    chain: bytes
    retain_s: float = 0.0
    release: bool = False
    prefetch: bool = False


class SessionSelect(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which sessions a listing or an order is about.

    Attributes:
        session: hex digest of a session, or the start of one; empty: all, of a listing only.
        ns: hex id of the namespace of its last turn, or the start of one; empty: all.
        tenant: hex digest of its tenant, or the start of one; empty: all.
    """

    session: str = ""
    ns: str = ""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What sessions may hold. Bytes are those of the tier.

    Attributes:
        nbytes: of all sessions.
        tenant_nbytes: of the sessions of one tenant.
        tenant_sessions: sessions of one tenant that are remembered.
        retain_s: the longest hold.
    """

    nbytes: int
    tenant_nbytes: int
    tenant_sessions: int
    retain_s: float


class Session:
    """A session that is remembered. Read-only outside of :class:`SessionBook`.

    Attributes:
        id: its digest.
        tenant: digest of its tenant.
        ns_id: the namespace of its chain.
        chain: the keys of its last turn, concatenated, ancestors first; empty where nobody keeps them.
        num_chunks: of its last turn.
        chunk_nbytes: what a chunk costs.
        num_turns: how often it was noted.
        noted: when it was noted last, in the clock of who calls.
        until: when its hold ends; 0 for none.
        num_held: leading chunks that are held.
    """

    __slots__ = (
        "chain",
        "chunk_nbytes",
        "id",
        "noted",
        "ns_id",
        "num_chunks",
        "num_held",
        "num_turns",
        "tenant",
        "until",
    )

    def __init__(self, session: bytes, tenant: bytes, ns_id: bytes) -> None:
        self.id = session
        self.tenant = tenant
        self.ns_id = ns_id
        self.chain = b""
        self.num_chunks = 0
        self.chunk_nbytes = 0
        self.num_turns = 0
        self.noted = 0.0
        self.until = 0.0
        self.num_held = 0

    @property
    def held_nbytes(self) -> int:
        return self.num_held * self.chunk_nbytes

    def keys(self) -> list[bytes]:
        """Return the keys of its last turn."""
        return [self.chain[i : i + KEY_NBYTES] for i in range(0, len(self.chain), KEY_NBYTES)]


class _Tenant:
    """A tenant's sessions, and those that hold something: longest ago first."""

    __slots__ = ("held", "nbytes", "sessions")

    def __init__(self) -> None:
        self.sessions: OrderedDict[bytes, None] = OrderedDict()
        self.held: OrderedDict[bytes, None] = OrderedDict()
        self.nbytes = 0


class SessionBook:
    """The sessions of an engine, or of a store server. Not thread-safe.

    Args:
        limits: what they may hold; may be replaced at any time, and counts from the next turn on.

    >>> book = SessionBook(SessionLimits(nbytes=100, tenant_nbytes=50, tenant_sessions=10, retain_s=60))
    >>> session, lost = book.note(b"a" * 16, b"t" * 16, b"", b"", 8, 10, now=0.0, retain_s=30)
    >>> session.num_held, session.until
    (5, 30.0)
    """

    def __init__(self, limits: SessionLimits) -> None:
        self.limits = limits
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()
        self._tenants: dict[bytes, _Tenant] = {}
        self._ends: list[tuple[float, bytes]] = []
        self._chain_nbytes = 0
        self.held_nbytes = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def get(self, session: bytes) -> Session | None:
        """Return a session, if it is remembered."""
        return self._sessions.get(session)

    def note(
        self,
        session: bytes,
        tenant: bytes,
        ns_id: bytes,
        chain: bytes,
        num_chunks: int,
        chunk_nbytes: int,
        now: float,
        retain_s: float | None,
        *,
        whole: bool = False,
    ) -> tuple[Session, list[Session]]:
        """Note a turn; returns the session, and those whose hold ended for it.

        Args:
            session, tenant: digests.
            ns_id: the namespace of the chain.
            chain: its keys, concatenated; empty where they are of no use.
            num_chunks: its length.
            chunk_nbytes: what a chunk costs in the tier.
            now: seconds, from any origin.
            retain_s: how long it is to be held; None: not.
            whole: hold nothing of a chain that there is no room for, instead of a part.
        """
        lost = self.expire(now)
        known = self._sessions.get(session)
        if known is not None and known.tenant != tenant:  # a digest names its tenant: somebody else made this one up
            self._forget(known)
            lost.append(known)
            known = None
        if known is None:
            known = self._sessions[session] = Session(session, tenant, ns_id)
            self._tenants.setdefault(tenant, _Tenant()).sessions[session] = None
        self._end_hold(known)
        self._chain_nbytes += len(chain) - len(known.chain)
        known.ns_id, known.chain, known.num_chunks, known.chunk_nbytes = ns_id, chain, num_chunks, chunk_nbytes
        known.num_turns += 1
        known.noted = now
        self._sessions.move_to_end(session)
        self._tenants[tenant].sessions.move_to_end(session)
        lost += self._forget_old(known)
        if retain_s is not None and retain_s > 0:
            lost += self._hold(known, now + min(retain_s, self.limits.retain_s), whole)
        return known, lost

    def affords(self, session: bytes, tenant: bytes, nbytes: int) -> bool:
        """Return whether a session could hold ``nbytes`` instead of what it holds, with no other hold ending for it."""
        known = self._sessions.get(session)
        own = known.held_nbytes if known is not None and known.tenant == tenant else 0
        of_tenant = self._tenants[tenant].nbytes if tenant in self._tenants else 0
        return (
            of_tenant - own + nbytes <= self.limits.tenant_nbytes
            and self.held_nbytes - own + nbytes <= self.limits.nbytes
        )

    def release(self, session: bytes) -> Session | None:
        """Forget a session that is over, and return it as it was; None if it is not known."""
        known = self._sessions.get(session)
        if known is not None:
            self._forget(known)
        return known

    def expire(self, now: float) -> list[Session]:
        """End the holds whose time is over, and return their sessions."""
        ended = []
        while self._ends and self._ends[0][0] <= now:
            until, session = heapq.heappop(self._ends)
            known = self._sessions.get(session)
            if known is not None and known.until == until:
                self._end_hold(known)
                ended.append(known)
        return ended

    def _hold(self, session: Session, until: float, whole: bool) -> list[Session]:
        limits, tenant = self.limits, self._tenants[session.tenant]
        lost: list[Session] = []
        wanted = session.num_chunks * session.chunk_nbytes
        if whole and wanted > min(limits.tenant_nbytes, limits.nbytes):
            return lost
        while tenant.held and tenant.nbytes + wanted > limits.tenant_nbytes:
            lost.append(self._end_hold(self._sessions[next(iter(tenant.held))]))
        while self.held_nbytes and self.held_nbytes + wanted > limits.nbytes:
            most = max(self._tenants.values(), key=lambda t: t.nbytes)
            if most.nbytes <= tenant.nbytes + wanted:
                break  # this tenant would hold most: it takes nothing from others
            lost.append(self._end_hold(self._sessions[next(iter(most.held))]))
        room = min(limits.tenant_nbytes - tenant.nbytes, limits.nbytes - self.held_nbytes)
        session.num_held = max(0, min(session.num_chunks, room // max(1, session.chunk_nbytes)))
        if whole and session.num_held < session.num_chunks:
            session.num_held = 0
        if session.num_held:
            session.until = until
            tenant.held[session.id] = None
            tenant.nbytes += session.held_nbytes
            self.held_nbytes += session.held_nbytes
            heapq.heappush(self._ends, (until, session.id))
            if len(self._ends) > 2 * len(self._sessions) + 64:
                self._ends = [(s.until, s.id) for s in self._sessions.values() if s.until]
                heapq.heapify(self._ends)
        return lost

    def _end_hold(self, session: Session) -> Session:
        if session.until:
            tenant = self._tenants[session.tenant]
            del tenant.held[session.id]
            tenant.nbytes -= session.held_nbytes
            self.held_nbytes -= session.held_nbytes
            session.num_held, session.until = 0, 0.0
        return session

    def _forget_old(self, newest: Session) -> list[Session]:
        tenant, held = self._tenants[newest.tenant], []
        while len(tenant.sessions) > max(1, self.limits.tenant_sessions):
            held.append(self._sessions[next(iter(tenant.sessions))])
            self._forget(held[-1])
        while len(self._sessions) > 1 and (len(self._sessions) > MAX_SESSIONS or self._chain_nbytes > MAX_CHAIN_NBYTES):
            held.append(next(iter(self._sessions.values())))
            self._forget(held[-1])
        return held

    def _forget(self, session: Session) -> None:
        self._end_hold(session)
        self._chain_nbytes -= len(session.chain)
        del self._sessions[session.id]
        tenant = self._tenants[session.tenant]
        del tenant.sessions[session.id]
        if not tenant.sessions:
            del self._tenants[session.tenant]
