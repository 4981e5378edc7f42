"""Nodes of a fleet without engines: what each has on its disk and in its queue, and its part in the control stream.

The value of a chunk is a number: when its bytes were computed. So a test sees whether bytes outlived an eviction.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from tierkv.resp import Value
from tierkv.server_config import SharedConfig
from tierkv.tiers.base import Ref
from tierkv.tiers.control import ControlFeed, Event
from tierkv.tiers.redis_link import OnError, RedisLink
from tierkv.tiers.redis_names import Names
from tierkv.tiers.redis_wire import Command

NS_ID = bytes(range(16))
NAMES = Names()


def make_ref(number: int) -> Ref:
    """The ref of a test's chunk."""
    key = number.to_bytes(4, "big") * 8
    return Ref(key, key)


class Killed(BaseException):
    """The process of a node ends here."""


class World:
    """What an outside observer knows: the time, and when each chunk was evicted last."""

    def __init__(self) -> None:
        self._now = itertools.count(1)
        self.evicted: dict[bytes, int] = {}

    def tick(self) -> int:
        return next(self._now)


class Node:
    """One node. ``between`` is called at each question to Redis, for a test to let other things happen there."""

    def __init__(self, world: World, url: str, directory: Path, *, timeout_s: float = 10.0) -> None:
        self.world = world
        self.directory = directory
        directory.mkdir(exist_ok=True)
        self.timeout_s = timeout_s
        self.link = self.connect(url)
        self.disk: dict[bytes, int] = {}
        self.queue: list[tuple[Ref, int, int]] = []
        self.evictions = 0
        self.noted: dict[bytes, int] = {}
        self.applied: list[Event] = []
        self.gaps: list[str] = []
        self.news: list[bytes] = []
        self.num_news_lost = 0
        self.kill_after: int | None = None
        self.between: Callable[[], None] = lambda: None
        self.cut = False  #: this node does not reach Redis
        self.now = 1000.0
        self.feed = self.open_feed()

    def open_feed(self, **options: object) -> ControlFeed:
        options = {"clock": lambda: self.now, "block_s": 0.05} | options
        return ControlFeed(self.ask, (NAMES.control, NAMES.news), self.directory, self.delete, self, **options)  # type: ignore[arg-type]

    def ask(self, commands: Sequence[Command], on_error: OnError) -> list[Value] | None:
        self.between()
        return None if self.cut else self.link.ask(commands, on_error)

    def connect(self, url: str) -> RedisLink:
        return RedisLink(SharedConfig(url=url, timeout_s=self.timeout_s))

    def back_off_is_over(self) -> None:
        for health in (self.link.health, *(each.health for each in self.link._topology.known())):
            health._retry_at = 0.0

    # What the feed calls

    def apply(self, event: Event) -> None:
        keys = list(self.disk) if event.refs is None else [ref.key for ref in event.refs]
        self.remove(keys)
        self.applied.append(event)
        if self.kill_after is not None:
            self.kill_after -= 1
            if self.kill_after < 0:
                self.kill_after = None
                raise Killed

    def on_gap(self, reason: str) -> None:
        self.gaps.append(reason)
        self.remove([*self.disk, *(ref.key for ref, _, _ in self.queue)])

    def on_news(self, ns_id: bytes, heads: list[bytes]) -> None:
        assert ns_id == NS_ID
        self.news += heads

    def on_news_lost(self) -> None:
        self.num_news_lost += 1

    def delete(self, ns_id: bytes, refs: Sequence[Ref] | None) -> int | None:
        if refs is None:
            found = self.ask([("KEYS", f"{NAMES.records_of(ns_id)}*")], OnError.IGNORE)
            names = found[0] if found else None
        else:
            names = [NAMES.record(ns_id, ref) for ref in refs]
        if names is None:
            return None
        replies = self.ask([("UNLINK", name) for name in names], OnError.IGNORE)  # type: ignore[union-attr]
        return None if replies is None else sum(reply for reply in replies if isinstance(reply, int))

    # What a node does

    def remove(self, keys: Sequence[bytes]) -> None:
        self.evictions += 1
        for key in keys:
            self.noted[key] = self.evictions
            self.disk.pop(key, None)
        self.queue = [item for item in self.queue if item[0].key not in set(keys)]

    def store(self, ref: Ref) -> None:
        """Compute a chunk: it goes to the disk, and into the queue for Redis."""
        value = self.world.tick()
        self.disk[ref.key] = value
        self.queue.append((ref, value, self.evictions))

    def flush(self) -> None:
        """Write the queue to Redis."""
        queue, self.queue = self.queue, []
        for ref, value, since in queue:
            if self.noted.get(ref.key, 0) > since:
                continue
            with self.feed.writing(NS_ID, [ref]) as may:
                if may:
                    self.ask([("SET", NAMES.record(NS_ID, ref), str(value), "NX")], OnError.IGNORE)
                    self.feed.tell(NS_ID, [ref.key])

    def fetch(self, ref: Ref) -> bool:
        """Load a chunk from Redis, and keep it on the disk; returns whether it was there."""
        since = self.evictions
        replies = self.ask([("GET", NAMES.record(NS_ID, ref))], OnError.IGNORE)
        if not replies or not isinstance(replies[0], bytes):
            return False
        if self.noted.get(ref.key, 0) <= since:
            self.disk[ref.key] = int(replies[0])
        return True

    def evict(self, refs: Sequence[Ref]) -> bool:
        """Evict by order."""
        for ref in refs:
            self.world.evicted[ref.key] = self.world.tick()
        self.remove([ref.key for ref in refs])
        return self.feed.publish(NS_ID, refs)

    def drop(self) -> bool:
        """Evict the whole namespace by order."""
        for key in {*self.disk, *self.world.evicted}:
            self.world.evicted[key] = self.world.tick()
        self.remove(list(self.disk))
        return self.feed.publish(NS_ID, None)

    def restart(self) -> None:
        """Kill the process and start it again: the disk and the feed's files stay, the rest is gone."""
        self.queue, self.noted, self.evictions = [], {}, 0
        self.kill_after = None
        self.feed.close()
        self.feed = self.open_feed()

    def poll(self) -> bool:
        """Follow the stream; a node that is killed on the way starts again."""
        try:
            return self.feed.poll()
        except Killed:
            self.restart()
            return self.feed.poll()

    def close(self) -> None:
        self.feed.close()
        self.link.close()
