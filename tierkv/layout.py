"""Layout: what the bytes of a chunk mean, and the namespace in which such chunks are kept.

Two engines may exchange payloads only if every field here is equal. The canonical form is JSON with sorted keys and no
spaces; its SHA-256, cut to 16 bytes, is the *layout id*. A namespace is the model identity, the layout id and the
shard; its digest names directories and Redis keys. The fields are ours, not vLLM's ``repr``s, so that they stay equal
over vLLM versions that mean the same thing.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec

from tierkv.errors import ConfigError

LAYOUT_VERSION = 1
#: A payload of about this size is large enough for the disk and small enough not to stall a Redis.
TARGET_PAYLOAD_NBYTES = 4 << 20
MIN_CHUNK_TOKENS = 16
MAX_CHUNK_TOKENS = 256


class LayerGroup(msgspec.Struct, frozen=True):
    """One KV cache group: layers that share a block table.

    Attributes:
        kind: the kind of cache, e.g. ``"FullAttentionSpec"``.
        layers: layer names, in the order in which their bytes stand in a payload.
        num_kv_heads, head_size: of one layer on one rank.
        block_nbytes: bytes of one block of each layer, in the same order.
        shape, order: logical shape of one block, and its axes from the outermost to the innermost in memory.
    """

    kind: str
    layers: tuple[str, ...]
    num_kv_heads: int
    head_size: int
    block_nbytes: tuple[int, ...]
    shape: tuple[int, ...]
    order: tuple[int, ...]


class Layout(msgspec.Struct, frozen=True):
    """What the bytes of a chunk mean.

    Attributes:
        group: the KV cache group the chunk belongs to.
        dtype: element type of the cache, e.g. ``"bfloat16"``.
        block_tokens: tokens a block (vLLM's ``block_size``).
        chunk_tokens: tokens a chunk, a whole number of blocks.
        backend: name of the attention backend, which decides how a block is packed.
        isa: instruction set the backend packs for (``"cuda"`` on a GPU; ``"amx"``, ``"vec"``, ... on a CPU).
        version: version of this description.
    """

    group: LayerGroup
    dtype: str
    block_tokens: int
    chunk_tokens: int
    backend: str
    isa: str
    version: int = LAYOUT_VERSION

    @property
    def blocks_per_chunk(self) -> int:
        return self.chunk_tokens // self.block_tokens

    @property
    def part_nbytes(self) -> int:
        """Bytes of a chunk that one rank holds: every layer's blocks, layer after layer."""
        return sum(self.group.block_nbytes) * self.blocks_per_chunk

    def canonical(self) -> bytes:
        """Return the bytes that the layout id is the digest of."""
        return canonical_json(msgspec.to_builtins(self))

    def layout_id(self) -> bytes:
        """Return the 16-byte layout id."""
        return hashlib.sha256(b"tierkv-layout:" + self.canonical()).digest()[:16]

    def describe(self) -> str:
        """Return the layout in words, for listings."""
        g = self.group
        return (
            f"{len(g.layers)} layers of {g.kind}, {g.num_kv_heads} KV heads of {g.head_size}, {self.dtype}, "
            f"chunks of {self.chunk_tokens} tokens in blocks of {self.block_tokens}, {self.backend} ({self.isa})"
        )


class Shard(msgspec.Struct, frozen=True):
    """How a payload is cut over ranks and hosts.

    Attributes:
        tp_size, pp_size: tensor and pipeline parallel sizes of the engine.
        num_parts: ranks of this host whose parts make one payload.
        host_index, num_hosts: this host's share of the engine's ranks.
    """

    tp_size: int = 1
    pp_size: int = 1
    num_parts: int = 1
    host_index: int = 0
    num_hosts: int = 1


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
                "shard": msgspec.to_builtins(self.shard),
            }
        )
        return hashlib.sha256(b"tierkv-namespace:" + body).digest()[:16]

    def to_json(self) -> bytes:
        """Return the description that is stored beside the namespace's payloads."""
        return canonical_json(msgspec.to_builtins(self))

    @classmethod
    def from_json(cls, data: bytes) -> Namespace:
        """Return the namespace described by ``data``.

        Raises:
            msgspec.ValidationError: it does not describe one.
        """
        return msgspec.json.decode(data, type=cls)


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
