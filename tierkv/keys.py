"""Keys: the 32-byte chained content hash of a chunk and of all tokens before it.

Theory of operation. A chain starts at a *root* and takes one link a chunk::

    root   = SHA-256( part(VERSION) + part(IDENTITY, model) + part(EPOCH, epoch) + part(TENANT, tenant) )
    key[0] = SHA-256( part(PARENT, root)     + part(TOKENS, tokens of chunk 0) + part(extra)... )
    key[i] = SHA-256( part(PARENT, key[i-1]) + part(TOKENS, tokens of chunk i) + part(extra)... )

``part(kind, data)`` is one byte of kind, the length of the data as 8 bytes little endian, and the data. Every part is
tagged and of known length, so no two different inputs give the same bytes: an adapter called "x" and a salt "x", or a
token moved from one chunk to the next, never meet. Tokens are 4 bytes each, little endian. Extras are sorted, so their
order does not matter.

The bytes are the same in every process, on every vLLM and Python version, and for ever: a change needs a new
``KEY_VERSION``, which is a part of the root. ``tests/unit/test_keys.py`` holds golden vectors.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

KEY_NBYTES = 32
KEY_VERSION = b"tierkv-key-1"

#: Every ``ANCHOR_SPAN`` chunks one ancestor lends its name to those that follow (see :func:`anchor_index`).
ANCHOR_SPAN = 64


class Part(IntEnum):
    """The kind of a part of a key. Values are part of the format: never reuse or renumber one."""

    VERSION = 1
    IDENTITY = 2
    EPOCH = 3
    TENANT = 4
    PARENT = 16
    TOKENS = 17
    LORA = 32
    MULTIMODAL = 33
    PROMPT_EMBEDS = 34


class Extra(NamedTuple):
    """What besides its tokens decides the KV of a chunk.

    Attributes:
        kind: ``Part.LORA``, ``Part.MULTIMODAL`` or ``Part.PROMPT_EMBEDS``.
        data: the content identity (of an adapter, an image, an embedding): bytes that name exactly this content.
        offset: first token it applies to, relative to the chunk (negative where it began in an earlier chunk).
    """

    kind: Part
    data: bytes
    offset: int = 0


def _head(kind: Part, nbytes: int) -> bytes:
    return bytes((kind,)) + nbytes.to_bytes(8, "little")


def _part(kind: Part, data: bytes) -> bytes:
    return _head(kind, len(data)) + data


def root_key(identity: bytes, epoch: bytes = b"", tenant: bytes = b"") -> bytes:
    """Return the 32-byte root of the chains of one model identity, epoch and tenant.

    Args:
        identity: content identity of the model (see :mod:`tierkv.identity`).
        epoch: life of one set of weights in an engine; empty for weights as they are in their files.
        tenant: the ``cache_salt`` of the request, as UTF-8; empty for none.
    """
    parts = (
        _part(Part.VERSION, KEY_VERSION),
        _part(Part.IDENTITY, identity),
        _part(Part.EPOCH, epoch),
        _part(Part.TENANT, tenant),
    )
    return hashlib.sha256(b"".join(parts)).digest()


def tenant_digest(tenant: bytes) -> bytes:
    """Return the 16-byte name under which a tenant is listed. The salt itself is never stored or shown.

    The digest of the empty tenant (no salt) is 16 zero bytes.
    """
    return hashlib.sha256(b"tierkv-tenant-1" + tenant).digest()[:16] if tenant else bytes(16)


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Return token ids as 4 bytes each, little endian.

    Raises:
        OverflowError: an id is negative or needs more than 32 bits.
    """
    return packed_view(tokens).tobytes()


def packed_view(tokens: Iterable[int]) -> memoryview:
    """Return what :func:`pack_tokens` gives without a copy, which is half the cost of a long prompt."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return memoryview(packed).cast("B")


def next_key(parent: bytes, tokens: bytes, extras: Iterable[Extra] = ()) -> bytes:
    """Return the key of the chunk that follows ``parent``.

    Args:
        parent: key of the chunk before it, or the root.
        tokens: the chunk's token ids as :func:`pack_tokens` gives them.
        extras: what else decides its KV, in any order.
    """
    parts = [_part(Part.PARENT, parent), _part(Part.TOKENS, tokens)]
    parts += [_part(e.kind, e.offset.to_bytes(8, "little", signed=True) + e.data) for e in sorted(extras)]
    return hashlib.sha256(b"".join(parts)).digest()


def chain_keys(
    root: bytes,
    tokens: Sequence[int],
    chunk_tokens: int,
    extras: dict[int, list[Extra]] | None = None,
    start: int = 0,
) -> list[bytes]:
    """Return the keys of the whole chunks of ``tokens``; a rest shorter than a chunk has none.

    Args:
        root: the chain's root, or with ``start`` the key of chunk ``start - 1``.
        tokens: token ids; chunk ``i`` is ``tokens[i * chunk_tokens : (i + 1) * chunk_tokens]``.
        chunk_tokens: tokens a chunk.
        extras: the extras of chunk ``i`` under ``i``.
        start: index of the first chunk to give a key; the chunks before it are already in ``root``.
    """
    step = chunk_tokens * 4
    num_chunks = len(tokens) // chunk_tokens
    packed = packed_view(tokens[start * chunk_tokens :] if start else tokens)[: max(0, num_chunks - start) * step]
    if not extras and len(root) == KEY_NBYTES:
        return packed_chain(root, packed, chunk_tokens)
    keys: list[bytes] = []
    parent = root
    for i, at in enumerate(range(0, len(packed), step), start):
        parent = next_key(parent, bytes(packed[at : at + step]), (extras or {}).get(i, ()))
        keys.append(parent)
    return keys


def packed_chain(root: bytes, packed: bytes | memoryview, chunk_tokens: int) -> list[bytes]:
    """Return what :func:`next_key` gives chunk after chunk, at a third of its cost: long prompts have thousands.

    Args:
        root: the chain's root, or the key of the chunk before: 32 bytes.
        packed: the tokens of whole chunks, as :func:`pack_tokens` or :func:`packed_view` gives them.
        chunk_tokens: tokens a chunk.
    """
    step, sha256 = 4 * chunk_tokens, hashlib.sha256
    parent_head, tokens_head = _head(Part.PARENT, KEY_NBYTES), _head(Part.TOKENS, step)
    keys: list[bytes] = []
    parent = root
    for (chunk,) in struct.iter_unpack(f"{step}s", packed):
        parent = sha256(parent_head + parent + tokens_head + chunk).digest()
        keys.append(parent)
    return keys


def anchor_index(position: int) -> int:
    """Return the position of the chunk whose key anchors the chunk at ``position``.

    Chunks of one run of ``ANCHOR_SPAN`` share an anchor: on a Redis Cluster the anchor is the hash tag, so that a
    run lies on one node and is matched and fetched in one round trip, and long chains still spread over the nodes.
    """
    return position - position % ANCHOR_SPAN
