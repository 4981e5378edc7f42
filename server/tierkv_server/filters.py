"""Publishes to the engines which keys are stored, so that most misses are known without a question.

Theory of operation. For each namespace that an engine uses there is a :class:`tierkv.filter.KeyFilter` over the disk
and the shared tier. An engine gets it whole when it subscribes and whenever it is built anew, and what is stored in
between a few milliseconds later. It is exact for the disk in that it never denies a chunk that is there. For the shared
tier it is as good as the news of other nodes: while those do not arrive, engines have no filter and ask.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from tierkv.errors import UnavailableError
from tierkv.filter import FINGERPRINT_NBYTES, KeyFilter
from tierkv.health import Repeated
from tierkv.messages import MORE_KEYS, NO_FILTER, WHOLE_FILTER
from tierkv_server.session import Session

#: Filters are built anew this often, so that what was evicted goes, and when they have taken more than their capacity.
REBUILD_S = 300.0
#: What is stored within this time goes to the engines in one message.
COALESCE_S = 0.01
#: Who wants to know that engines have been told waits for their answers this long.
FLUSH_S = 2.0
#: A filter for this many keys at least, and for twice the keys there are.
MIN_CAPACITY = 4096


class _Filter:
    """The filter of one namespace, and what its engines have not been told."""

    def __init__(self) -> None:
        self.keys: KeyFilter | None = None
        self.num_keys = 0
        self.built_at = float("-inf")
        self.more = b""


class FilterPublisher:
    """Keeps the filters and sends them, on a thread of its own: an engine that takes nothing holds up nobody else.

    Args:
        sessions: returns the engines.
        stored: yields the keys of a namespace in every tier; raises ``UnavailableError`` where it cannot say them all:
            engines have no filter then, until it can.
        is_live: whether the news of other nodes arrive (True where there is no shared tier).
    """

    def __init__(
        self,
        sessions: Callable[[], Iterable[Session]],
        stored: Callable[[bytes], Iterable[bytes]],
        is_live: Callable[[], bool] = lambda: True,
    ) -> None:
        self.num_sent = 0
        self._sessions = sessions
        self._stored = stored
        self._is_live = is_live
        self._filters: dict[bytes, _Filter] = {}
        self._told: dict[str, bool] = {}  # session id -> it has a filter
        self._changed = threading.Condition()
        self._unforeseen = Repeated()
        self._dirty = False
        self._flushed = 0
        self._wanted = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tierkv-filter", daemon=True)
        self._thread.start()

    def add(self, ns_id: bytes, keys: Sequence[bytes]) -> None:
        """Note that keys (or their first 8 bytes) are stored."""
        with self._changed:
            known = self._filters.get(ns_id)
            if known is None:
                return  # no engine uses it: it is built when one does
            fingerprints = b"".join(key[:FINGERPRINT_NBYTES] for key in keys)
            known.more += fingerprints
            self._dirty = True
            self._changed.notify_all()

    def joined(self) -> None:
        """Note that an engine subscribed."""
        with self._changed:
            self._dirty = True
            self._changed.notify_all()

    def rebuild(self) -> None:
        """Build every filter anew: news were missed."""
        with self._changed:
            for known in self._filters.values():
                known.built_at = float("-inf")
            self._dirty = True
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until the engines have been told all that was added before, and return whether it was in time."""
        with self._changed:
            self._wanted += 1
            ticket = self._wanted
            self._dirty = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._flushed >= ticket or self._closed, timeout_s)

    def close(self) -> None:
        """Stop. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._dirty or self._closed, timeout=1.0)
                if self._closed:
                    return
                hurry = self._wanted > self._flushed
            if not hurry:
                time.sleep(COALESCE_S)
            with self._changed:
                self._dirty = False
                ticket = self._wanted
            try:
                self._publish()
            except Exception:  # engines ask, then
                self._unforeseen.note("publishing the filter of stored keys failed in an unforeseen way", exc_info=True)
            with self._changed:
                self._flushed = ticket
                self._changed.notify_all()

    def _publish(self) -> None:
        sessions = [s for s in self._sessions() if s.subscribed]
        self._told = {s.id: self._told.get(s.id, False) for s in sessions}
        live = self._is_live()
        for ns_id in {s.ns_id for s in sessions}:
            mine = [s for s in sessions if s.ns_id == ns_id]
            if not live:
                self._tell([s for s in mine if self._told[s.id]], [NO_FILTER, b""], has_filter=False)
                continue
            self._publish_one(ns_id, mine)
        with self._changed:
            for gone in set(self._filters) - {s.ns_id for s in sessions}:
                del self._filters[gone]

    def _publish_one(self, ns_id: bytes, sessions: Sequence[Session]) -> None:
        with self._changed:
            known = self._filters.setdefault(ns_id, _Filter())
            more, known.more = known.more, b""
        now = time.monotonic()
        num_keys = known.num_keys + len(more) // FINGERPRINT_NBYTES
        full = known.keys is not None and known.keys.may_grow and num_keys > known.keys.capacity
        if known.keys is None or full or now - known.built_at > REBUILD_S or not any(self._told.values()):
            try:
                known.keys = self._rebuild(ns_id, known)
            except UnavailableError:  # half a listing would deny what is stored
                known.keys = None
                self._tell([s for s in sessions if self._told[s.id]], [NO_FILTER, b""], has_filter=False)
                return
            known.keys.add_packed(more)  # other nodes' too, which a listing may not have had
            self._tell(sessions, [WHOLE_FILTER, bytes(known.keys.bits)], has_filter=True)
            return
        known.keys.add_packed(more)
        known.num_keys += len(more) // FINGERPRINT_NBYTES
        new = [s for s in sessions if not self._told[s.id]]
        if more:
            self._tell([s for s in sessions if self._told[s.id]], [MORE_KEYS, more], has_filter=True)
        self._tell(new, [WHOLE_FILTER, bytes(known.keys.bits)], has_filter=True)

    def _rebuild(self, ns_id: bytes, known: _Filter) -> KeyFilter:
        keys = list(self._stored(ns_id))
        fresh = KeyFilter(capacity=max(MIN_CAPACITY, 2 * len(keys)))
        fresh.add(keys)
        known.num_keys = len(keys)
        known.built_at = time.monotonic()
        return fresh

    def _tell(self, sessions: Sequence[Session], message: list[object], *, has_filter: bool) -> None:
        """Send engines a message. Pushes arrive in order or end the session: what was sent need not be waited for."""
        body = msgspec.msgpack.encode(message)
        asks = [(s, s.ask("filter", body)) for s in sessions]
        with self._changed:
            waited_for = self._wanted > self._flushed
        deadline = time.monotonic() + (FLUSH_S if waited_for else 0.0)
        for session, ask in asks:
            self._told[session.id] = has_filter and ask is not None
            self.num_sent += 1
            if ask is not None:
                ask.result(max(0.0, deadline - time.monotonic()))
