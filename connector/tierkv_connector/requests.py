"""What the scheduler half knows of each request."""

from __future__ import annotations

from typing import Any

from tierkv.hostindex import Entry, KnownRun
from tierkv.keys import anchor_index, chain_keys
from tierkv_connector.extras import Content
from tierkv_connector.hints import Outcome
from tierkv_connector.plan import Plan
from tierkv_connector.roles import BOTH


class RequestState:
    """What is known of a request from when it is added until it finishes."""

    __slots__ = (
        "awaits",
        "content",
        "epoch",
        "keys",
        "load",
        "no_load",
        "outcome",
        "plan",
        "promised",
        "request",
        "role",
        "root",
        "run",
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
        self.role = BOTH
        self.content: Content | None = None  # what besides token ids decides its KV
        self.outcome: Outcome | None = None  # of its hints, where it brought any
        self.promised: set[int] | None = None  # chunks that another engine will wait for; None: none will
        self.awaits: tuple[int, float] | None = None  # how many of another engine's chunks it waits for, and until when
        self.plan: Plan | None = None
        self.run = KnownRun()
        self.load: list[Entry] | None = None  # pinned for the load under way
        self.no_load = False  # a load failed: never offer this request one again
        self.store_next: int | None = None  # first chunk whose store has not been planned; None before the first step

    @property
    def tiers(self) -> frozenset[str]:
        """The tiers that it may load from."""
        if self.content is not None and not self.content.known:
            return frozenset()
        return self.role.tiers if self.outcome is None else self.outcome.hints.tiers

    @property
    def store(self) -> str:
        """What of it is stored: ``"none"``, ``"prompt"``, or ``"all"``, generated tokens too."""
        if self.content is not None and not self.content.known:
            return "none"
        return self.role.store if self.outcome is None else self.outcome.hints.store

    def follow_outputs(self, chunk_tokens: int) -> None:
        """Give keys to whole chunks of generated tokens too: those that are sampled for good, so no drafts."""
        num_keys, stop = len(self.keys), self.request.num_tokens // chunk_tokens
        if stop <= num_keys:
            return
        all_tokens, first, last = self.request.all_token_ids, num_keys * chunk_tokens, stop * chunk_tokens
        if self.content is None:
            self.keys += chain_keys(self.parent(num_keys), list(all_tokens[first:last]), chunk_tokens)
        elif self.content.known:
            tokens = self.content.tokens(all_tokens, first, last)
            extras = {i - num_keys: each for i, each in (self.content.extras or {}).items()}
            self.keys += chain_keys(self.parent(num_keys), tokens, chunk_tokens, extras)

    def parent(self, i: int) -> bytes:
        return self.keys[i - 1] if i else self.root

    def anchor(self, i: int) -> bytes:
        return self.keys[anchor_index(i)]

    def public_anchor(self, i: int) -> bytes:
        """Return the anchor of a chunk that others may have; empty for one that stays in this engine."""
        return self.anchor(i) if self.shareable else b""

    def dump(self) -> dict[str, Any]:
        """Return the state as plain values, for tests that compare it."""
        return {
            "flags": (self.epoch, self.shareable, self.no_load, self.store_next, self.store, sorted(self.tiers)),
            "outcome": self.outcome and (self.outcome.gpu_tokens, dict(self.outcome.loaded), self.outcome.num_stored),
            "handoff": (sorted(self.promised or ()), self.awaits),
            "num_keys": len(self.keys),
            "content": self.content and (self.content.known, self.content.failed),
            "load": [e.key for e in self.load or ()],
            "plan": self.plan and self.plan.dump(),
        }
