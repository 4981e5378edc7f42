"""Layout: what the bytes of a chunk mean, and the namespace in which such chunks are kept.

Two engines may exchange payloads only if every field here is equal. The canonical form is JSON with sorted keys and no
spaces; its SHA-256, cut to 16 bytes, is the *layout id*. A namespace is the model identity, the layout id and the
shard; its digest names directories and Redis keys. The fields are ours, not vLLM's ``repr``s, so that they stay equal
over vLLM versions that mean the same thing.

A chunk holds its tokens' KV in every layer of the model, also in layers that look at a window only. Layers with
recurrent state have one block in it: the state after its last token, if there was one. Whether there was says the
*mark*, the last bytes of a part; without it the block's bytes mean nothing, and no hit ends with the chunk.
Fields that models with one KV cache group have no use for are left out of the canonical form where they have their
default.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from tierkv.errors import ConfigError

LAYOUT_VERSION = 1
#: The kind of cache whose window is a fixed chunk of the tokens, not one that slides.
CHUNKED_LOCAL = "ChunkedLocalAttentionSpec"
#: The kind of cache that holds one state after all tokens so far, not something of each token.
RECURRENT = "MambaSpec"
#: Bytes of the mark that says whether a chunk has its states; the first is 1 if it has.
MARK_NBYTES = 8
#: A payload of about this size is large enough for the disk and small enough not to stall a Redis.
TARGET_PAYLOAD_NBYTES = 4 << 20
MIN_CHUNK_TOKENS = 16
MAX_CHUNK_TOKENS = 256


class BlockTable(NamedTuple):
    """A KV cache group of the engine, as far as planning needs it: which blocks of a request hold which tokens.

    Attributes:
        group_id: its place among the engine's groups.
        block_tokens: tokens a block.
        kind: the kind of cache.
        window: tokens that its layers look at: of a sliding window, or of a chunk of local attention; 1 for recurrent
            state, which is that of the last token; 0 for all.
    """

    group_id: int
    block_tokens: int
    kind: str = ""
    window: int = 0

    @property
    def recurrent(self) -> bool:
        """Whether its blocks hold recurrent state: block ``i`` that after ``(i + 1) * block_tokens`` tokens."""
        return self.kind == RECURRENT

    def per_chunk(self, chunk_tokens: int) -> int:
        """Return the blocks of a chunk that its payload holds."""
        return 1 if self.recurrent else chunk_tokens // self.block_tokens

    def first_needed(self, num_tokens: int) -> int:
        """Return the first token whose KV, or the state after which, the token at position ``num_tokens`` looks at."""
        if not self.window:
            return 0
        if self.recurrent:
            return max(0, num_tokens - 1)
        if self.kind == CHUNKED_LOCAL:
            return num_tokens // self.window * self.window
        return max(0, num_tokens - self.window + 1)


class LayerGroup(msgspec.Struct, frozen=True):
    """Layers of one shape that share a block table: a KV cache group, or a part of one.

    Attributes:
        kind: the kind of cache, e.g. ``"FullAttentionSpec"``.
        layers: layer names, in the order in which their bytes stand in a payload.
        num_kv_heads, head_size: of one layer on one rank.
        block_nbytes: bytes of one block of each layer, in the same order.
        shape, order: logical shape of one block, and its axes from the outermost to the innermost in memory.
        window: tokens of a sliding window, or of a chunk of local attention; 1 for recurrent state; 0 for attention
            over the whole prefix.
        table: index of the KV cache group whose block table it uses.
        block_tokens, dtype, backend, isa: as in :class:`Layout`, where they differ from the first group's.
    """

    kind: str
    layers: tuple[str, ...]
    num_kv_heads: int
    head_size: int
    block_nbytes: tuple[int, ...]
    shape: tuple[int, ...]
    order: tuple[int, ...]
    window: int = 0
    table: int = 0
    block_tokens: int = 0
    dtype: str = ""
    backend: str = ""
    isa: str = ""


class Layout(msgspec.Struct, frozen=True):
    """What the bytes of a chunk mean.

    Attributes:
        group: the first group of layers; the only one of most models.
        dtype: element type of the cache, e.g. ``"bfloat16"``.
        block_tokens: tokens a block (vLLM's ``block_size``).
        chunk_tokens: tokens a chunk, a whole number of blocks of every group.
        backend: name of the attention backend, which decides how a block is packed.
        isa: instruction set the backend packs for (``"cuda"`` on a GPU; ``"amx"``, ``"vec"``, ... on a CPU).
        version: version of this description.
        others: further groups, whose bytes follow in a payload.
    """

    group: LayerGroup
    dtype: str
    block_tokens: int
    chunk_tokens: int
    backend: str
    isa: str
    version: int = LAYOUT_VERSION
    others: tuple[LayerGroup, ...] = ()

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        return (self.group, *self.others)

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks of the first group."""
        return self.chunk_tokens // self.block_tokens

    @property
    def part_nbytes(self) -> int:
        """Bytes of a chunk that one rank holds: every group's, of it every layer's blocks, layer after layer.

        A mark follows where the model has recurrent state.
        """
        return sum(sum(g.block_nbytes) * self.blocks_of(g) for g in self.groups) + self.mark_nbytes

    @property
    def mark_nbytes(self) -> int:
        """Bytes at the end of a part that say whether it has recurrent states; 0 where the model has none."""
        return MARK_NBYTES if any(g.kind == RECURRENT for g in self.groups) else 0

    def blocks_of(self, group: LayerGroup) -> int:
        """Return the blocks of ``group`` that a payload holds."""
        return BlockTable(group.table, self.tokens_of(group), group.kind).per_chunk(self.chunk_tokens)

    def tokens_of(self, group: LayerGroup) -> int:
        """Return the tokens of a block of ``group``."""
        return group.block_tokens or self.block_tokens

    def tables(self) -> tuple[BlockTable, ...]:
        """Return the block tables that the groups use, each once, in the groups' order."""
        tables = {g.table: BlockTable(g.table, self.tokens_of(g), g.kind, g.window) for g in reversed(self.groups)}
        return tuple(tables[group_id] for group_id in dict.fromkeys(g.table for g in self.groups))

    def canonical(self) -> bytes:
        """Return the bytes that the layout id is the digest of."""
        return canonical_json(_without_defaults(msgspec.to_builtins(self)))

    def layout_id(self) -> bytes:
        """Return the 16-byte layout id."""
        return hashlib.sha256(b"tierkv-layout:" + self.canonical()).digest()[:16]

    def describe(self) -> str:
        """Return the layout in words, for listings."""
        sizes = dict.fromkeys(self.tokens_of(g) for g in self.groups)
        return (
            f"{'; '.join(_in_words(self.groups))}, {self.dtype}, chunks of {self.chunk_tokens} tokens "
            f"in blocks of {' and '.join(map(str, sizes))}, {self.backend} ({self.isa})"
        )


class Shard(msgspec.Struct, frozen=True):
    """How a payload is cut over ranks and hosts.

    Attributes:
        tp_size, pp_size: tensor and pipeline parallel sizes of the engine.
        num_parts: ranks of this host whose parts make one payload.
        host_index, num_hosts: this host's share of the engine's ranks.
        portable: a payload is all KV heads, one after the other, whatever ranks made it; the other fields then have
            their defaults.
    """

    tp_size: int = 1
    pp_size: int = 1
    num_parts: int = 1
    host_index: int = 0
    num_hosts: int = 1
    portable: bool = False


class Namespace(msgspec.Struct, frozen=True):
    """The unit of listing, quota and files: payloads that mean the same to the same engines.

    Attributes:
        identity: hex digest of the model's content (:mod:`tierkv.identity`).
        model: the model's name as the user gave it; for people only, not part of the digest.
        layout: what a payload's bytes mean.
        shard: how a payload is cut.
    """

    identity: str
    model: str
    layout: Layout
    shard: Shard

    @property
    def payload_nbytes(self) -> int:
        """Bytes of one payload: the parts of every rank of this host."""
        return self.layout.part_nbytes * self.shard.num_parts

    def ns_id(self) -> bytes:
        """Return the 16-byte digest that names this namespace in files and in Redis."""
        body = canonical_json(
            {
                "identity": self.identity,
                "layout": self.layout.layout_id().hex(),
                "shard": _plain_shard(self.shard),
            }
        )
        return hashlib.sha256(b"tierkv-namespace:" + body).digest()[:16]

    def to_json(self) -> bytes:
        """Return the description that is stored beside the namespace's payloads."""
        about = msgspec.to_builtins(self)
        return canonical_json(about | {"layout": _without_defaults(about["layout"]), "shard": _plain_shard(self.shard)})

    @classmethod
    def from_json(cls, data: bytes) -> Namespace:
        """Return the namespace described by ``data``.

        Raises:
            msgspec.ValidationError: it does not describe one.
        """
        return msgspec.json.decode(data, type=cls)


def _plain_shard(shard: Shard) -> dict[str, Any]:
    """Return a shard's plain values, without what most shards are not and what was stored before has not."""
    plain: dict[str, Any] = msgspec.to_builtins(shard)
    return plain if shard.portable else {name: value for name, value in plain.items() if name != "portable"}


#: Fields that came with models of several KV cache groups; what was stored before has none of them.
_LATER_FIELDS = {"window": 0, "table": 0, "block_tokens": 0, "dtype": "", "backend": "", "isa": ""}


def _without_defaults(layout: dict[str, Any]) -> dict[str, Any]:
    """Return a layout's plain values without those of later fields that have their default."""

    def trim(group: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in group.items() if _LATER_FIELDS.get(name) != value}

    others = [trim(group) for group in layout["others"]]
    rest = {name: value for name, value in layout.items() if name not in ("group", "others")}
    return rest | {"group": trim(layout["group"])} | ({"others": others} if others else {})


def _in_words(groups: Sequence[LayerGroup]) -> list[str]:
    """Return a phrase for each kind of layers, however many groups they are spread over."""
    counts: dict[tuple[str, int, int, int], int] = {}
    for g in groups:
        kind = (g.kind, g.window, g.num_kv_heads, g.head_size)
        counts[kind] = counts.get(kind, 0) + len(g.layers)
    return [
        f"{count} layers of {kind}, one state"
        if kind == RECURRENT
        else f"{count} layers of {kind}{f' ({window} tokens)' * bool(window)}, {num_kv_heads} KV heads of {head_size}"
        for (kind, window, num_kv_heads, head_size), count in counts.items()
    ]


def canonical_json(value: Any) -> bytes:
    """Return JSON with sorted keys, no spaces and ASCII only: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def default_chunk_tokens(block_tokens: int, block_nbytes: int) -> int:
    """Return the tokens of a chunk whose payload is about 4 MiB: a whole number of blocks, 16 to 256 tokens.

    Args:
        block_tokens: tokens a block. A block longer than 256 tokens is a chunk of its own.
        block_nbytes: bytes of one block over all layers and all ranks of the host.
    """
    smallest = -(-MIN_CHUNK_TOKENS // block_tokens)
    largest = max(1, MAX_CHUNK_TOKENS // block_tokens)
    wanted = round(TARGET_PAYLOAD_NBYTES / block_nbytes)
    return block_tokens * max(smallest, min(largest, wanted))


def check_chunk_tokens(chunk_tokens: int, block_tokens: int) -> int:
    """Return ``chunk_tokens`` if it is a whole number of blocks.

    Raises:
        ConfigError: it is not.
    """
    if chunk_tokens <= 0 or chunk_tokens % block_tokens:
        fix = max(1, round(chunk_tokens / block_tokens)) * block_tokens
        raise ConfigError(
            f"chunk_tokens={chunk_tokens} is not a whole number of blocks of {block_tokens} tokens; "
            f"set chunk_tokens={fix}, or leave it out"
        )
    return chunk_tokens


def chunk_tokens_for(tables: Sequence[BlockTable], block_nbytes: Sequence[int], wanted: int | None = None) -> int:
    """Return the tokens of a chunk for a model with these block tables.

    A step frees the blocks that its windows have left behind. A chunk is no longer than its blocks live: whatever the
    steps in which its tokens are computed, all of them are there in the step that computes its last one.

    Args:
        tables: the model's block tables.
        block_nbytes: bytes of one block of each table, over all its layers and all ranks of the host.
        wanted: what the user asks for.

    Raises:
        ConfigError: ``wanted`` cannot be had.
    """
    unit = math.lcm(*(t.block_tokens for t in tables))
    unit_nbytes = sum(n * t.per_chunk(unit) for t, n in zip(tables, block_nbytes, strict=True))
    # States are there where steps end, which is at multiples of the block size: in longer chunks few would be.
    default = unit if any(t.recurrent for t in tables) else default_chunk_tokens(unit, unit_nbytes)
    tokens = default if wanted is None else check_chunk_tokens(wanted, unit)
    longest = tokens
    while longest > unit and not all(_lives(longest, table) for table in tables):
        longest -= unit
    if wanted is not None and longest < wanted:
        windows = ", ".join(str(w) for w in sorted({t.window for t in tables if not t.recurrent} - {0}))
        raise ConfigError(
            f"chunk_tokens={wanted} is too long for this model, whose layers look at windows of {windows} tokens: its "
            f"first blocks may be gone when its last token is computed; set chunk_tokens={longest}, or leave it out"
        )
    return longest


def _lives(chunk_tokens: int, table: BlockTable) -> bool:
    if table.recurrent:  # the one state that is wanted is the last
        return True
    if table.kind == CHUNKED_LOCAL:
        return not table.window % chunk_tokens  # at a boundary everything before it goes
    return not table.window or chunk_tokens < table.window + table.block_tokens
