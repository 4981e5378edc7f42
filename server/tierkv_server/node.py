"""This node's part in its fleet: what other nodes evict and store, and what its own engines know of it.

An eviction by order that means every tier is published to all nodes; what others publish is removed here: from the
disk, from what is queued, from the engines' host pools. News of what others store go to the filters of the engines.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tierkv.tiers.base import Ref
from tierkv.tiers.control import ControlFeed, Event
from tierkv.tiers.shared import SharedTier
from tierkv_server.filters import FilterPublisher
from tierkv_server.inspect import EVICT_ROUNDS, Inspector
from tierkv_server.service import Service

logger = logging.getLogger("tierkv")

#: News that are this old are no news: engines ask.
MAX_SILENCE_S = 5.0
#: A node that has just started writes nothing before it has read the control stream, which takes milliseconds.
FIRST_READ_S = 2.0


class Node:
    """Connects a service with its fleet and its engines' filters.

    Args:
        service: this node's tiers and engines.
        inspector: reaches the engines' host pools.
        node_dir: where the node's place in the control stream is kept.

    Attributes:
        feed: follows the control stream; None without a shared tier.
    """

    def __init__(self, service: Service, inspector: Inspector, node_dir: Path) -> None:
        self._service = service
        self._inspector = inspector
        self.feed: ControlFeed | None = None
        if isinstance(service.shared, SharedTier):
            self.feed = service.shared.open_feed(node_dir, self)
            service.moves.writing = self._writing
            service.ordering = self.feed.ordering
            service.on_stored = self._tell
        service.filters = FilterPublisher(lambda: list(service.sessions.values()), self._stored_keys, self._is_live)

    def start(self) -> None:
        """Follow the fleet, until :meth:`close`."""
        if self.feed:
            self.feed.start()

    def close(self) -> None:
        """Stop following. Idempotent. The filters are the service's to close."""
        if self.feed:
            self.feed.close()

    @contextlib.contextmanager
    def _writing(self, ns_id: bytes, refs: Sequence[Ref]) -> Iterator[bool]:
        """See :meth:`ControlFeed.writing`; what is stored right after the start waits until the stream was read."""
        assert self.feed is not None
        deadline = time.monotonic() + FIRST_READ_S
        while self.feed.silent_s == float("inf") and self._service.shared_is_up() and time.monotonic() < deadline:
            time.sleep(0.01)
        with self.feed.writing(ns_id, refs) as may_write:
            yield may_write

    # -- what this node tells

    def _tell(self, tier: str, ns_id: bytes, keys: Sequence[bytes]) -> None:
        if self.feed and tier == "shared":
            self.feed.tell(ns_id, keys)

    def _is_live(self) -> bool:
        return self.feed is None or self.feed.silent_s < MAX_SILENCE_S

    def _stored_keys(self, ns_id: bytes) -> Iterator[bytes]:
        yield from (entry.key for entry in self._service.disk.entries(ns_id))
        if isinstance(self._service.shared, SharedTier):
            yield from self._service.shared.keys(ns_id)

    # -- what it is told, on the feed's thread

    def apply(self, event: Event) -> None:
        """Remove what another node's operator evicted."""
        keys = None if event.refs is None else [ref.key for ref in event.refs]
        self._invalidate(event.ns_id, keys)
        for _ in range(EVICT_ROUNDS):
            self._service.evicted_elsewhere(event.ns_id, keys)
            if not self._invalidate(event.ns_id, keys):  # once more: what was loaded before it was removed
                break

    def on_gap(self, reason: str) -> None:
        """Forget everything that an eviction which was missed may have been about."""
        num = 0
        self._invalidate_all()  # first: an engine that has answered sends no more stores of what it had
        for _ in range(EVICT_ROUNDS):
            num += self._service.drop_disk()
            if not self._invalidate_all():  # once more: what was loaded before it was removed
                break
        if num:
            logger.warning("evictions of other nodes were missed (%s): %d chunks left the disk tier", reason, num)
        else:
            logger.info("this node hears of the fleet's evictions from here on (%s)", reason)

    def on_news(self, ns_id: bytes, heads: list[bytes]) -> None:
        """Let engines know of what others stored."""
        if self._service.filters:
            self._service.filters.add(ns_id, heads)

    def on_news_lost(self) -> None:
        """Build the filters anew."""
        if self._service.filters:
            self._service.filters.rebuild()

    def _invalidate_all(self) -> int:
        return sum(self._invalidate(s, None) for s in {s.ns_id for s in list(self._service.sessions.values())})

    def _invalidate(self, ns_id: bytes, keys: Sequence[bytes] | None) -> int:
        """Have this node's engines drop chunks (None: all that they have); returns how many they had."""
        if keys is None:
            keys = self._inspector.host_keys(ns_id)
        if keys:
            with contextlib.suppress(ValueError):  # an engine of another version answers with nothing
                return self._inspector.invalidate(ns_id, keys)[0]
        return 0
