"""What engines and the store server say to each other, as typed structs. ``docs/protocol.md`` has it in words.

Requests and replies that are few are JSON; what comes once a chunk is MessagePack (:class:`StoreItem`) or packed bytes.
"""

from __future__ import annotations

import msgspec

from tierkv.layout import Namespace
from tierkv.pool import PoolShape

#: Reply letters of FETCH and MATCH, one a key.
FROM_DISK, FROM_SHARED, MISSING, BAD = b"d", b"s", b"-", b"!"
#: Reply letters of STORE, one an item.
STORED, EXISTS, STALE, DROPPED, FAILED, DECLINED = b"o", b"x", b"g", b"b", b"e", b"n"
#: Reply letters of USE, one a key: noted; a tier would store it now, send it.
NOTED, WANTED = b".", b"w"


class Hello(msgspec.Struct, frozen=True, omit_defaults=True):
    """First message of an engine. With it travel the pool's descriptors (one a rank) and the lease socket.

    Attributes:
        version: TierKV's version; client and server must be equal.
        protocol: version of the protocol.
        engine_id: vLLM's engine id, for people.
        pid: the engine's process.
        namespace: what the engine's payloads mean.
        shape: the shape of its host pool.
        shared: digest of the shared tier's URL that the engine is configured with; None: any.
        disk_bytes: the disk budget that the engine is configured with; None: any.
        inline: the engine shares no memory with the server: no descriptors travel, payloads go over the connection.
    """

    version: str
    protocol: int
    engine_id: str
    pid: int
    namespace: Namespace
    shape: PoolShape
    shared: str | None = None
    disk_bytes: int | None = None
    inline: bool = False


class Welcome(msgspec.Struct, frozen=True):
    """The server's answer. ``session`` names the engine on its other connections; ``boot`` tells a restart.

    ``spill`` says for each tier that is there when chunks go to it (:class:`tierkv.config.Spill`).
    """

    version: str
    protocol: int
    boot: str
    session: str
    pid: int
    disk_dir: str
    disk_bytes: int
    shared: str
    spill: dict[str, str] = {}


class StoreItem(msgspec.Struct, frozen=True, array_like=True):
    """One chunk to be stored from a slot. New fields go to the end, with defaults.

    Attributes:
        key, parent, anchor: 32 bytes each (:mod:`tierkv.keys`).
        position: index of the chunk in its chain.
        num_tokens: tokens of the chunk.
        tenant: 16-byte tenant digest.
        slot, generation: where its payload is; the copy counts only if the generation has not moved.
        tokens: the chunk's token ids, packed, where the user stores them; else empty.
    """

    key: bytes
    parent: bytes
    anchor: bytes
    position: int
    num_tokens: int
    tenant: bytes
    slot: int
    generation: int
    tokens: bytes = b""


class HostEntry(msgspec.Struct, frozen=True, array_like=True):
    """One chunk in an engine's host pool, for listings."""

    key: bytes
    parent: bytes
    position: int
    num_tokens: int
    last_used: float
    num_hits: int


class HostStat(msgspec.Struct, frozen=True):
    """An engine's state and its counters since its start (``docs/metrics.md`` says what each counts, and in what)."""

    engine_id: str
    pid: int
    namespace: str
    num_slots: int
    num_entries: int
    num_quarantined: int
    payload_nbytes: int
    budget: int
    num_evicted: int
    counters: dict[str, int]


class Select(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which chunks a listing, a match or an eviction is about.

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
