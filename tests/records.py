"""Small namespaces and records for tests of the tiers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from tierkv.keys import anchor_index, chain_keys, root_key, tenant_digest
from tierkv.layout import LayerGroup, Layout, Namespace, Shard
from tierkv.payload import HEADER_NBYTES, Header, checksum, record_nbytes
from tierkv.tiers.base import Fetched, Record, Ref, Tier

CHUNK_TOKENS = 16


def make_namespace(name: str = "model", payload_nbytes: int = 64 << 10, num_parts: int = 1) -> Namespace:
    """A namespace whose payloads have ``payload_nbytes`` over ``num_parts`` ranks."""
    group = LayerGroup(
        kind="FullAttentionSpec",
        layers=("layer.0",),
        num_kv_heads=1,
        head_size=64,
        block_nbytes=(payload_nbytes // num_parts,),
        shape=(2, CHUNK_TOKENS, 1, 64),
        order=(0, 1, 2, 3),
    )
    layout = Layout(group, "bfloat16", CHUNK_TOKENS, CHUNK_TOKENS, "FLASH_ATTN", "cuda")
    return Namespace(f"{name}-identity", name, layout, Shard(tp_size=num_parts, num_parts=num_parts))


def payload_of(key: bytes, nbytes: int) -> bytes:
    """The payload that a test stores under ``key``: the same in every process."""
    seed = int.from_bytes(key[:8], "little")
    return np.random.Generator(np.random.PCG64(seed)).bytes(nbytes)


def make_record(
    namespace: Namespace, key: bytes, parent: bytes, anchor: bytes, position: int, **fields: object
) -> Record:
    """A whole record; ``fields`` replace those of its header."""
    payload = payload_of(key, namespace.payload_nbytes)
    values: dict[str, object] = {
        "layout_id": namespace.layout.layout_id(),
        "ns_id": namespace.ns_id(),
        "key": key,
        "parent": parent,
        "anchor": anchor,
        "position": position,
        "num_tokens": CHUNK_TOKENS,
        "tenant": bytes(16),
        "created": time.time(),
        "raw_nbytes": len(payload),
        "checksum": checksum(payload),
    }
    header = Header(**(values | fields))  # type: ignore[arg-type]
    data = bytearray(record_nbytes(len(payload)))
    data[:HEADER_NBYTES] = header.pack()
    data[HEADER_NBYTES : HEADER_NBYTES + len(payload)] = payload
    return Record(header, memoryview(data), tokens=bytes(range(4)) * CHUNK_TOKENS)


def make_chain(
    namespace: Namespace, num: int, seed: int = 0, *, branch: int | None = None, salt: str = "", **fields: object
) -> tuple[list[Ref], list[Record]]:
    """A chain of ``num`` chunks, ancestors first.

    Args:
        seed: which chain; others have other tokens from the start.
        branch: from this chunk on the tokens differ from those of the chain without a branch; None: nowhere.
        salt: of the tenant.
        fields: replace those of the headers.
    """
    root = root_key(namespace.identity.encode(), tenant=salt.encode())
    tokens = [(seed * 1_000_003 + i) % 50_000 for i in range(num * CHUNK_TOKENS)]
    if branch is not None:
        tokens[branch * CHUNK_TOKENS :] = [50_000 + token for token in tokens[branch * CHUNK_TOKENS :]]
    keys = chain_keys(root, tokens, CHUNK_TOKENS)
    refs = [Ref(key, keys[anchor_index(i)]) for i, key in enumerate(keys)]
    values = {"tenant": tenant_digest(salt.encode())} | fields
    records = [
        make_record(namespace, ref.key, parent, ref.anchor, i, **values)
        for i, (ref, parent) in enumerate(zip(refs, [root, *keys], strict=False))
    ]
    return refs, records


class Clock:
    """A wall clock that stands still until a test moves it. Starts at the real time, in whole seconds."""

    def __init__(self) -> None:
        self.now = float(int(time.time()))

    def __call__(self) -> float:
        return self.now


class Buffers:
    """A sink that gives each ref its own buffer, cut into the ranks' parts."""

    def __init__(self, namespace: Namespace, num: int) -> None:
        self.cells = [bytearray(namespace.payload_nbytes) for _ in range(num)]
        self._part = namespace.layout.part_nbytes
        self.asked: list[int] = []

    def __call__(self, at: int) -> Sequence[memoryview]:
        self.asked.append(at)
        view = memoryview(self.cells[at])
        return [view[i : i + self._part] for i in range(0, len(view), self._part)]


def fetch(tier: Tier, namespace: Namespace, refs: Sequence[Ref]) -> tuple[list[Fetched], list[bytearray]]:
    """Fetch ``refs`` into fresh buffers; returns the results and the buffers."""
    buffers = Buffers(namespace, len(refs))
    return tier.fetch(namespace.ns_id(), refs, buffers), buffers.cells


def wait_until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Wait until ``condition()`` is true.

    Raises:
        TimeoutError: it did not become true in time.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s} s")
        time.sleep(0.02)
