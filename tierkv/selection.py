"""What a listing, a match, an eviction or an order is about: the one argument of most ``TKV`` commands of tools."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

_Span = Annotated[float, Meta(ge=0)]
_Count = Annotated[int, Meta(ge=0)]


class Select(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Which chunks are meant. Which fields a command heeds is in ``docs/protocol.md``.

    Attributes:
        ns: hex id of a namespace, or the start of one; empty: all.
        prefix: hex id of a stored prefix, or the start of one; empty: not by prefix.
        keys: hex keys of a prompt's chunks, per namespace id, ancestors first; empty: not by prompt.
        tiers: the tiers meant; empty: all.
        tenant: hex digest of a tenant, or the start of one; empty: all.
        dry_run: say what would be done, do nothing.
        everything: with neither prefix nor keys: yes, the whole namespace is meant.
        force: evict pinned entries too.
        owner: of a pin.
        seconds: how long a pin holds, or when entries expire, from now on.
        older_s, newer_s: only what was stored at least, at most, so many seconds ago; 0: whenever.
        unused_s, used_s: only what was last used at least, at most, so many seconds ago; 0: whenever.
        min_nbytes, max_nbytes: only prefixes whose chunks have so many bytes over all tiers; 0: any size.
        pinned: only prefixes that are pinned, or (False) are not; None: both.
        sort: how rows are ordered; empty: most recently used first.
        by: what bytes are summed up by: ``namespace``, ``tenant``, ``depth`` or ``age``.
        limit: rows, runs or events at most; 0: all.
        free_nbytes: evict least recently used leaves until so many bytes are free.
        cursor: where a command that works in steps goes on; empty: at the start.
        repair: delete what turns out damaged.
        since: only events after the one with this number.
    """

    ns: str = ""
    prefix: str = ""
    keys: dict[str, list[str]] = {}
    tiers: list[str] = []
    tenant: str = ""
    dry_run: bool = False
    everything: bool = False
    force: bool = False
    owner: str = ""
    seconds: float = 0.0
    older_s: _Span = 0.0
    newer_s: _Span = 0.0
    unused_s: _Span = 0.0
    used_s: _Span = 0.0
    min_nbytes: _Count = 0
    max_nbytes: _Count = 0
    pinned: bool | None = None
    sort: str = ""
    by: str = ""
    limit: _Count = 0
    free_nbytes: _Count = 0
    cursor: str = ""
    repair: bool = False
    since: _Count = 0

    def ages(self, now: float, created: float, last_used: float) -> bool:
        """Return whether times (seconds since 1970; ``created`` 0: unknown) fit. What is unknown fits no age."""
        if (self.older_s or self.newer_s) and not created:
            return False
        return (
            (not self.older_s or created <= now - self.older_s)
            and (not self.newer_s or created >= now - self.newer_s)
            and (not self.unused_s or last_used <= now - self.unused_s)
            and (not self.used_s or last_used >= now - self.used_s)
        )
