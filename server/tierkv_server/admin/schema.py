"""What the admin API takes and gives, as structs. The OpenAPI document is made of these.

Requests are decoded into them and nothing else is taken. Replies are what :class:`tierkv_server.inspect.Inspector`
returns; the structs describe it, and the tests hold the two against each other.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tierkv.messages import HostStat

TierName = Literal["host", "disk", "shared"]
HexStart = Annotated[str, Meta(pattern="^[0-9a-f]*$", max_length=64)]
NamespaceId = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Key = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Token = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
#: More than any model's context; with :data:`tierkv_server.admin.app.MAX_BODY_NBYTES` it bounds what a request costs.
MAX_TOKENS = 1 << 21
Owner = Annotated[str, Meta(min_length=1, max_length=64, pattern="^[!-~]+$")]
#: Ten years: whoever wants longer wants for ever, which a cache does not promise.
Seconds = Annotated[float, Meta(ge=0, le=10 * 365 * 86400.0)]


# -- requests


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No parameters."""


class ListQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which prefixes to list.

    ``ns``, ``prefix`` and ``tenant`` are hex ids or the start of one; empty: all. ``tier`` may be repeated.
    """

    ns: HexStart = ""
    prefix: HexStart = ""
    tenant: HexStart = ""
    tier: list[TierName] = []
    sort: Literal["last_used", "hits", "nbytes", "tokens"] = "last_used"
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 100
    offset: Annotated[int, Meta(ge=0)] = 0


class TreeQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which prefixes to show as a tree: the ``limit`` runs of chunks that lead in the order of ``sort``."""

    ns: HexStart = ""
    sort: Literal["last_used", "hits", "nbytes"] = "nbytes"
    limit: Annotated[int, Meta(ge=1, le=2_000)] = 200


class UsageQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose usage to show: hex ids or the start of one; empty: all."""

    ns: HexStart = ""
    tenant: HexStart = ""
    tier: list[TierName] = []


class HistoryQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``since``: only samples after this time (seconds since 1970)."""

    since: Annotated[float, Meta(ge=0)] = 0.0


class NamespaceQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``ns``: hex id of a namespace, or the start of one; empty: all."""

    ns: HexStart = ""


class LocateBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt to look for: its token ids with the tenant's salt, or the hex keys of its chunks by namespace id."""

    ns: HexStart = ""
    tokens: Annotated[list[Token], Meta(max_length=MAX_TOKENS)] = []
    salt: str = ""
    keys: dict[NamespaceId, list[Key]] = {}


class PrefixBody(LocateBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A stored prefix: by its hex id (``prefix``, or the start of one), or by its prompt."""

    prefix: HexStart = ""
    tiers: list[TierName] = []
    dry_run: bool = False


class EvictBody(PrefixBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to evict: a prefix, a prompt, a tenant's chunks, or with ``everything`` the whole namespace ``ns``.

    ``force``: pinned entries too.
    """

    tenant: HexStart = ""
    everything: bool = False
    force: bool = False


class PinBody(PrefixBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to keep, for whom, and for how many seconds from now."""

    owner: Owner
    seconds: Seconds


class UnpinBody(PrefixBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose pins to take off; all owners', where none is named."""

    owner: Annotated[str, Meta(max_length=64)] = ""


class SessionQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which sessions to list: of a namespace and a tenant (hex ids or the start of one; empty: all)."""

    ns: HexStart = ""
    tenant: HexStart = ""
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 100
    offset: Annotated[int, Meta(ge=0)] = 0


class SessionBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one session that is meant: its hex id, or at least 4 digits of its start."""

    session: Annotated[str, Meta(pattern="^[0-9a-f]*$", min_length=4, max_length=32)]


class TtlBody(PrefixBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is to expire ``seconds`` from now; 0: as the tiers' limits say."""

    seconds: Seconds


# -- replies


class Error(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was wrong, in a sentence. ``result``: what was done nevertheless, where something was."""

    error: str
    result: dict[str, Any] | None = None


class Health(msgspec.Struct, frozen=True):
    """The process lives."""

    status: Literal["ok"]


class TierState(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tier's state; the reason is for those who may read."""

    state: str
    reason: str = ""


class Ready(msgspec.Struct, frozen=True):
    """Whether anything stored can be served. ``reasons`` says in sentences what is not as it should be."""

    ready: bool
    degraded: bool
    reasons: list[str]
    tiers: dict[str, TierState]


class Access(msgspec.Struct, frozen=True):
    """What the caller may do with the token it sent, and whether a token would change that."""

    may_read: bool
    may_change: bool
    asks_token: bool


class TierRow(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A tier: state, size and counters since the server's start (``docs/metrics.md``)."""

    name: TierName
    state: str
    reason: str
    since: float
    num_entries: int
    nbytes: int
    budget: int
    num_hits: int
    num_misses: int
    num_stored: int
    num_evicted: int
    num_dropped: int
    num_bad: int
    num_errors: int
    queued_nbytes: int
    num_expired: int = 0
    num_removed: int = 0
    pinned_nbytes: int = 0
    num_declined: int = 0
    policy: str = ""


class NamespaceRow(msgspec.Struct, frozen=True):
    """A namespace: ``layout`` in words, ``payload_nbytes`` of one chunk."""

    id: NamespaceId
    model: str
    layout: str
    payload_nbytes: int


class ServerRow(msgspec.Struct, frozen=True):
    """The server itself. ``fleet`` is empty where there is no shared tier."""

    version: str
    pid: int
    boot: str
    uptime_s: float
    disk_dir: str
    socket: str
    shared_url: str
    spill: dict[str, str]
    num_engines: int
    num_silent_engines: int
    num_stale: int
    num_unstaged: int
    num_declined: int
    num_joined: int
    num_brought: int
    network: dict[str, int]
    fleet: dict[str, int]


class Stat(msgspec.Struct, frozen=True):
    """What ``tierkv stat --json`` prints."""

    server: ServerRow
    tiers: list[TierRow]
    engines: list[HostStat]
    namespaces: list[NamespaceRow]


class Namespaces(msgspec.Struct, frozen=True):
    """Every namespace that a tier or an engine has."""

    namespaces: list[NamespaceRow]


class PinRow(msgspec.Struct, frozen=True):
    """A pin: ``until`` in seconds since 1970."""

    owner: str
    until: float


class Prefix(msgspec.Struct, frozen=True):
    """A stored prefix, named by its last chunk. Times are seconds since 1970; ``expires`` 0: never.

    ``num_stored`` chunks of ``depth_chunks`` are stored; ``nbytes`` counts them by tier; ``branch`` is the last chunk
    that other prefixes share.
    """

    id: str
    key: Key
    namespace: NamespaceId
    model: str
    depth_chunks: int
    depth_blocks: int
    tokens: int
    num_stored: int
    branch: str
    nbytes: dict[str, int]
    tiers: list[TierName]
    tenant: str
    created: float
    expires: float
    pins: list[PinRow]
    hits: int
    last_used: float


class Prefixes(msgspec.Struct, frozen=True):
    """``total`` fit; those from ``offset`` on are here."""

    total: int
    offset: int
    prefixes: list[Prefix]


class TreeNode(msgspec.Struct, frozen=True, kw_only=True):
    """A run of chunks that no prefix leaves in between: evicting ``id`` evicts the run and all below it.

    ``start``, ``num_chunks`` and ``num_tokens`` are the run's own; ``nbytes`` (by tier), ``hits``, ``last_used`` and
    ``num_prefixes`` are over the run and all below it. ``hits`` is what its most used chunk has, or the sum of what is
    below where that is more. ``num_hidden`` runs right below are not shown.
    """

    id: str
    start: int
    num_chunks: int
    num_tokens: int
    own_nbytes: dict[str, int]
    nbytes: dict[str, int]
    hits: int
    last_used: float
    num_prefixes: int
    pins: list[PinRow]
    num_hidden: int
    children: list[TreeNode]


class NamespaceTree(msgspec.Struct, frozen=True):
    """The stored prefixes of a namespace. ``num_hidden`` runs at the top are not shown."""

    id: NamespaceId
    model: str
    chunk_tokens: int
    nbytes: dict[str, int]
    num_chunks: int
    num_hidden: int
    roots: list[TreeNode]


class Tree(msgspec.Struct, frozen=True):
    """A tree for each namespace, largest first."""

    namespaces: list[NamespaceTree]


class ChunkPlace(msgspec.Struct, frozen=True):
    """Where a chunk is."""

    id: str
    tiers: list[TierName]


class Location(msgspec.Struct, frozen=True):
    """How much of a prompt a namespace has: the first ``num_stored`` of ``num_chunks`` whole chunks."""

    namespace: NamespaceId
    model: str
    chunk_tokens: int
    num_chunks: int
    num_stored: int
    tokens_stored: int
    chunks: list[ChunkPlace]


class Locations(msgspec.Struct, frozen=True):
    """A row for each namespace that the prompt has a whole chunk in, the longest first."""

    namespaces: list[Location]


class Evicted(msgspec.Struct, frozen=True):
    """What was removed (``dry_run``: would be): chunks and bytes by tier. ``num_pinned`` chunks stay for their pins.

    ``pinned`` has the ids of the pinned ones among them, at most 100.
    """

    dry_run: bool
    prefixes: list[str]
    removed: dict[str, int]
    nbytes: dict[str, int]
    num_removed: int
    num_pinned: int
    pinned: list[str]
    incomplete: list[str]


class Lifetime(msgspec.Struct, frozen=True):
    """What was done to a prefix of ``num_chunks`` chunks: ``tiers`` counts the chunks by tier.

    ``stored`` counts those that each tier has, ``nbytes`` their bytes.
    """

    dry_run: bool
    id: str
    namespace: NamespaceId
    num_chunks: int
    nbytes: dict[str, int]
    stored: dict[str, int]
    tiers: dict[str, int]
    incomplete: list[str]


class Pinned(Lifetime, frozen=True):
    """A pin: of whom, until when (seconds since 1970)."""

    owner: str
    until: float


class Expiry(Lifetime, frozen=True):
    """When it expires (seconds since 1970); 0: as the tiers' limits say."""

    until: float


class UsageRow(msgspec.Struct, frozen=True):
    """What a tenant (hex digest) has in a namespace of a tier."""

    namespace: NamespaceId
    model: str
    tenant: str
    tier: str
    num_entries: int
    nbytes: int
    pinned_nbytes: int


class Usages(msgspec.Struct, frozen=True):
    """Rows, largest first."""

    usage: list[UsageRow]


class SessionRow(msgspec.Struct, frozen=True):
    """A session: ``num_chunks`` and ``tokens`` of its last request, of whose chunks the first ``num_held`` are held.

    ``noted`` and ``until`` are seconds since 1970; ``until`` 0: nothing is held.
    """

    id: str
    tenant: str
    namespace: NamespaceId
    model: str
    num_turns: int
    noted: float
    num_chunks: int
    tokens: int
    until: float
    num_held: int
    held_nbytes: int


class Sessions(msgspec.Struct, frozen=True):
    """``total`` fit, last noted first; those from ``offset`` on are here."""

    total: int
    offset: int
    sessions: list[SessionRow]


class SessionReleased(msgspec.Struct, frozen=True):
    """A session that is not held any more, and the engines that were told."""

    id: str
    num_engines: int


class SessionPrefetched(SessionReleased, frozen=True):
    """A session, of which ``num_chunks`` chunks are brought to the disk where the shared tier has them."""

    num_chunks: int


class TierHistory(msgspec.Struct, frozen=True):
    """A tier's column of samples: bytes stored, bytes that wait to be written, whether it was up."""

    nbytes: list[int]
    queued_nbytes: list[int]
    up: list[bool]


class History(msgspec.Struct, frozen=True):
    """Samples of the last hour, oldest first; all lists are of one length.

    ``times`` are seconds since 1970. ``chunks`` are counters: the chunks that engines asked for, by what gave them
    (``host``, ``disk``, ``shared``, ``missed``), summed over all engines since the server's start.
    """

    interval_s: float
    times: list[float]
    engines: list[int]
    chunks: dict[str, list[int]]
    tiers: dict[str, TierHistory]


class NamespaceCurve(msgspec.Struct, frozen=True):
    """A namespace's part in a curve: what it would have hit, had the tier as a whole each of the sizes."""

    id: str
    model: str
    asked: int
    num_sampled: int
    hit_rates: list[float]


class ReuseCurve(msgspec.Struct, frozen=True):
    """What a tier of each of ``sizes`` (bytes) would have hit, by least recently used: shares of ``asked`` chunks.

    ``host``: of all chunks that requests asked for, by bytes of each engine's pool. ``disk``: of those that were
    neither on the GPU nor in the host pool. ``found``: the share that the tiers did find (``host``: GPU and host pool).
    """

    name: Literal["host", "disk"]
    num_engines: int
    found: float | None
    budget: int
    asked: int
    num_sampled: int
    rate: float
    distinct_nbytes: int
    sizes: list[int]
    hit_rates: list[float]
    namespaces: list[NamespaceCurve]


class SourceHistory(msgspec.Struct, frozen=True):
    """The chunks that requests asked for, by what gave them, in each interval from ``times`` (in s) on."""

    interval_s: int
    times: list[int]
    chunks: dict[str, list[int]]


class Reuse(msgspec.Struct, frozen=True):
    """Miss-ratio curves from sampled reuse distances (``docs/cli.md#report``), and the last day's hits.

    ``since`` in seconds since 1970; what was asked ``half_life_s`` ago counts half. ``num_lost`` chunks that requests
    asked for are missing.
    """

    since: float
    half_life_s: float
    num_lost: int
    tiers: list[ReuseCurve]
    history: SourceHistory
