"""What engines and the store server say to each other, as typed structs. ``docs/protocol.md`` has it in words.

Requests and replies that are few are JSON; what comes once a chunk is MessagePack (:class:`StoreItem`) or packed bytes.
"""

from __future__ import annotations

import msgspec

from tierkv.layout import Namespace
from tierkv.pool import PoolShape
from tierkv.selection import Select as Select

#: Reply letters of FETCH and MATCH, one a key.
FROM_DISK, FROM_SHARED, MISSING, BAD = b"d", b"s", b"-", b"!"
#: Reply letters of STORE, one an item.
STORED, EXISTS, STALE, DROPPED, FAILED, DECLINED = b"o", b"x", b"g", b"b", b"e", b"n"
#: Why a chunk is offered to be stored: it was computed, used again, is about to leave the host pool, or another engine
#: waits for it (which puts it into every tier but those that store nothing, and waits for room in their queues).
COMPUTED, USED, EVICTED, HANDOFF = 0, 1, 2, 3
#: Reply letters of USE, one a key: noted; a tier would store it now, send it.
NOTED, WANTED = b".", b"w"
#: Kinds of "filter" pushes: a whole filter, more keys, none any more (ask).
WHOLE_FILTER, MORE_KEYS, NO_FILTER = 0, 1, 2
#: Number of an ANSWER that nobody asked for: the counters of an engine that is about to leave.
FAREWELL = 0
#: What gave the chunks that requests asked for: vLLM's own cache, or the counter of each, in the order of a report.
SOURCES = ("gpu", "host_hits", "disk_hits", "shared_hits", "missed")


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

    ``spill`` says for each tier that is there when chunks go to it (:class:`tierkv.config.Spill`), ``policy`` what the
    disk keeps (:mod:`tierkv.policy`). ``holds``: the engine is to tell what its host pool keeps.
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
    policy: str = ""
    holds: bool = False


class RequestNote(msgspec.Struct, frozen=True, array_like=True):
    """What an engine tells once of each request that asks for chunks. New fields go to the end, with defaults.

    Attributes:
        tenant: 16-byte digest.
        chain: the keys of the request's chunks, 32 bytes each, from the first on, wherever they are.
        session: digest of the session that its hints named; empty for none.
        retain_s, release, priority: as hinted (:class:`tierkv.policy.Hint`).
    """

    tenant: bytes
    chain: bytes
    session: bytes = b""
    retain_s: float | None = None
    release: bool = False
    priority: int = 0


class StoreItem(msgspec.Struct, frozen=True, array_like=True):
    """One chunk to be stored from a slot. New fields go to the end, with defaults.

    Attributes:
        key, parent, anchor: 32 bytes each (:mod:`tierkv.keys`).
        position: index of the chunk in its chain.
        num_tokens: tokens of the chunk.
        tenant: 16-byte tenant digest.
        slot, generation: where its payload is; the copy counts only if the generation has not moved.
        tokens: the chunk's token ids, packed, where the user stores them; else empty.
        reason: why it is offered: ``COMPUTED``, ``USED``, ``EVICTED`` or ``HANDOFF``.
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
    reason: int = COMPUTED


class HostEntry(msgspec.Struct, frozen=True, array_like=True):
    """One chunk in an engine's host pool, for listings."""

    key: bytes
    parent: bytes
    position: int
    num_tokens: int
    last_used: float
    num_hits: int
    tenant: bytes = b""


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
    policy: str = ""


class AskedReport(msgspec.Struct, frozen=True, array_like=True):
    """What an engine's requests asked for since its last report. New fields go to the end, with defaults.

    Attributes:
        threshold: keys that begin with less than these 8 bytes are in the sample.
        num_asked: keys that the requests asked for, in the sample or not.
        num_below: those that were neither on the GPU nor in the host pool.
        num_lost: keys that requests asked for and that no report tells of.
        sources: what gave chunks, by :data:`SOURCES`; the GPU's are what was there as a request arrived.
        requests: of each request with a key in the sample: the first 8 bytes of those keys, root first, concatenated;
            how many of them, the last ones, were below the host pool; whether any key was, sampled or not.
    """

    threshold: bytes
    num_asked: int
    num_below: int
    num_lost: int
    sources: list[int]
    requests: list[tuple[bytes, int, bool]]
