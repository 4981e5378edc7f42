"""What the scheduler half knows of each request."""

from __future__ import annotations

from typing import Any

from tierkv.hostindex import Entry
from tierkv.keys import anchor_index
from tierkv_connector.plan import Plan


class RequestState:
    """What is known of a request from when it is added until it finishes."""

    __slots__ = (
        "epoch",
        "keys",
        "load",
        "no_load",
        "plan",
        "request",
        "root",
        "shareable",
        "store_next",
        "tenant",
    )

    def __init__(self, request: Any, root: bytes, keys: list[bytes], tenant: bytes, epoch: int, shareable: bool):
        self.request = request
        self.root = root
        self.keys = keys
        self.tenant = tenant
        self.epoch = epoch
        self.shareable = shareable
        self.plan: Plan | None = None
        self.load: list[Entry] | None = None  # pinned for the load under way
        self.no_load = False  # a load failed: never offer this request one again
        self.store_next: int | None = None  # first chunk whose store has not been planned; None before the first step

    def parent(self, i: int) -> bytes:
        return self.keys[i - 1] if i else self.root

    def anchor(self, i: int) -> bytes:
        return self.keys[anchor_index(i)]

    def dump(self) -> dict[str, Any]:
        """Return the state as plain values, for tests that compare it."""
        return {
            "flags": (self.epoch, self.shareable, self.no_load, self.store_next),
            "load": [e.key for e in self.load or ()],
            "plan": self.plan and self.plan.dump(),
        }
