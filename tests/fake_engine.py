"""A fake engine: everything of a real one that the store server sees (pool, index, client, pushes), without a model.

The payload of a chunk is a function of its key and a seed, so that what comes back can be compared.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tierkv import __version__
from tierkv.asked import AskedLog
from tierkv.client import StoreClient
from tierkv.config import COMMAND_NBYTES, PROTOCOL_VERSION
from tierkv.hostindex import Entry, Fetch, HostIndex
from tierkv.keys import KEY_NBYTES, anchor_index, chain_keys, root_key, tenant_digest
from tierkv.launcher import Launcher
from tierkv.layout import LayerGroup, Layout, Namespace, Shard
from tierkv.messages import Hello, HostEntry, HostStat, StoreItem
from tierkv.pool import HostPool, PoolShape, Segment
from tierkv.transport import Address

TIMEOUT_S = 20.0


def make_namespace(
    model: str = "fake/tiny-model",
    *,
    block_tokens: int = 16,
    chunk_tokens: int = 32,
    block_nbytes: int = 1024,
    num_layers: int = 2,
    num_parts: int = 1,
) -> Namespace:
    """Return a namespace whose identity follows from ``model``."""
    group = LayerGroup(
        kind="FullAttentionSpec",
        layers=tuple(f"model.layers.{i}.attn" for i in range(num_layers)),
        num_kv_heads=2,
        head_size=8,
        block_nbytes=(block_nbytes,) * num_layers,
        shape=(2, block_tokens, 2, 8),
        order=(0, 1, 2, 3),
    )
    layout = Layout(group, "bfloat16", block_tokens, chunk_tokens, "FAKE_ATTN", "vec")
    identity = hashlib.sha256(model.encode()).hexdigest()
    return Namespace(identity, model, layout, Shard(tp_size=num_parts, num_parts=num_parts))


def payload_bytes(key: bytes, seed: int, nbytes: int) -> bytes:
    """Return the payload of a chunk: 4 KiB that follow from ``key`` and ``seed``, repeated."""
    pattern = hashlib.shake_256(key + seed.to_bytes(8, "little")).digest(min(4096, nbytes))
    return (pattern * -(-nbytes // len(pattern)))[:nbytes]


def wait_until(condition: Callable[[], Any], timeout_s: float = TIMEOUT_S, what: str = "") -> Any:
    """Return the first true value of ``condition``, asked until ``timeout_s`` is over.

    Raises:
        TimeoutError: it never came.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(what or "the condition did not come true in time")
        time.sleep(0.002)
    return value


class FakeEngine:
    """An engine connected to the store server at ``address``.

    One thread (the test's) plays the scheduler; the client's reader thread answers pushes.

    Args:
        address: where the server is; a path is that of its unix socket.
        namespace: what its payloads mean.
        num_slots: slots of its host pool.
        engine_id: its name in listings.
        launcher: starts the server where none answers.
        hello: fields of the hello that differ from the usual (``shared``, ``version``, ...).

    Raises:
        ConfigError: the server refuses it.
        TimeoutError: nobody answers.
    """

    def __init__(
        self,
        address: Address | Path,
        namespace: Namespace | None = None,
        num_slots: int = 64,
        engine_id: str = "fake-engine",
        launcher: Launcher | None = None,
        start_s: float = TIMEOUT_S,
        **hello: Any,
    ) -> None:
        self.namespace = namespace or make_namespace()
        self.ns = self.namespace.ns_id().hex()
        shard = self.namespace.shard
        self.shape = PoolShape(num_slots, shard.num_parts, self.namespace.layout.part_nbytes)
        segments = [Segment.create(self.shape.segment_nbytes(rank)) for rank in range(shard.num_parts)]
        self.pool = HostPool(self.shape, segments)
        self.index = HostIndex(self.pool)
        self.engine_id = engine_id
        self.counters: Counter[str] = Counter()  #: in chunks, named as an engine names them
        self.last_sources: list[str] = []  #: where the chunks of the last :meth:`get` came from
        self.orders: list[bytes] = []  #: what operators said of sessions
        self.mute = False  #: answer no push before this is False again
        self.tells = False  #: tell the server what :meth:`get` asks for, as real engines do
        self.asked = AskedLog(self.counters)
        about: dict[str, Any] = {
            "version": __version__,
            "protocol": PROTOCOL_VERSION,
            "engine_id": engine_id,
            "pid": os.getpid(),
        } | hello
        self.client = StoreClient(
            address,
            Hello(namespace=self.namespace, shape=self.shape, **about),
            self.pool,
            launcher,
            self._pushed,
            self.asked,
        )
        try:
            self.welcome = self.client.start()
            if self.welcome is None:  # on a busy machine it is late: the client tries again by itself
                wait_until(self.client.connected, start_s, f"no store server answers at {address}")
                session = self.client._session
                self.welcome = session.welcome if session else None
            assert self.welcome is not None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the server and give the pool back."""
        self.mute = False
        self.client.close()
        self.pool.close()

    # -- what a scheduler does

    def keys(self, tokens: Sequence[int], salt: str = "") -> list[bytes]:
        """Return the keys of the whole chunks of a prompt."""
        return chain_keys(self._root(salt), tokens, self.namespace.layout.chunk_tokens)

    def put(self, tokens: Sequence[int], seed: int = 0, salt: str = "", wait: bool = True) -> list[bytes]:
        """Fill slots with a prompt's chunks, have them stored, and return their keys.

        Chunks that are in the pool already are left alone.

        Raises:
            AssertionError: with ``wait``, the server did not store one of them.
        """
        self.index.apply_drops()
        keys = self.keys(tokens, salt)
        entries = [self._fill(keys, i, salt, seed) for i in range(len(keys)) if self.index.get(keys[i]) is None]
        items = [self._item(entry, keys, salt) for entry in entries]
        replies = self.store(items)
        if wait:
            letters = b"".join(self.result(replies, i) for i in range(len(replies)))
            assert len(letters) == len(items) and set(letters) <= set(b"ox"), f"stored as {letters!r}"
        return keys

    def store(self, items: Sequence[StoreItem]) -> list[list[bytes | None]]:
        """Send STORE commands of bounded size and return a list for each, to which its reply is added."""
        step = max(1, COMMAND_NBYTES // self.shape.payload_nbytes)
        replies: list[list[bytes | None]] = []
        for at in range(0, len(items), step):
            replies.append([])
            self.client.store(items[at : at + step], self.index.dropped, replies[-1].append)
        return replies

    def result(self, replies: Sequence[list[bytes | None]], index: int = 0) -> bytes:
        """Wait for a reply and return it; empty where no answer will come."""
        wait_until(lambda: replies[index], what="no reply to STORE")
        return replies[index][0] or b""

    def match(self, tokens: Sequence[int], salt: str = "") -> bytes:
        """Return the server's letters for the longest stored prefix of a prompt; the host pool does not count."""
        keys = self.keys(tokens, salt)
        if not keys:
            return b""
        reply = self.client.match(0, 0, keys[0], keys)
        wait_until(lambda: reply.letters is not None, what="no reply to MATCH")
        return reply.letters or b""

    def get(self, tokens: Sequence[int], salt: str = "") -> list[bytes]:
        """Return the payloads of the longest prefix that is in the host pool or stored, one a chunk.

        What is not in the pool is fetched into it. :attr:`last_sources` says where each chunk came from.
        """
        self.index.apply_drops()
        keys = self.keys(tokens, salt)
        found = self.index.run_end(keys, 0, len(keys))
        if self.tells and keys:
            self.asked.note(keys, 0, found)
        self._fetch(keys, found, salt)
        end = self.index.run_end(keys, 0, len(keys))
        entries = [entry for key in keys[:end] if (entry := self.index.peek(key)) is not None]
        self.last_sources = [self.index.used(entry) for entry in entries]
        self.index.touch(keys[:end])
        self.counters.update(f"{source}_hits" for source in self.last_sources)
        self.counters["missed"] += len(keys) - end
        return [self.payload(keys[i]) for i in range(end)]

    def payload(self, key: bytes) -> bytes:
        """Return the bytes in the slot of a chunk, also of one that an operator has just dropped."""
        entry = self.index.peek(key)
        assert entry is not None, "this chunk is not in the pool"
        return b"".join(bytes(part) for part in self.pool.parts(entry.slot))

    def expected(self, tokens: Sequence[int], seed: int = 0, salt: str = "") -> list[bytes]:
        """Return the payloads that :meth:`put` wrote for a prompt."""
        return [payload_bytes(key, seed, self.shape.payload_nbytes) for key in self.keys(tokens, salt)]

    def forget(self) -> None:
        """Empty the host pool, as a restart does."""
        self.index.clear()

    def _root(self, salt: str) -> bytes:
        return root_key(bytes.fromhex(self.namespace.identity), b"", salt.encode())

    def _reserve(self, keys: Sequence[bytes], i: int, salt: str) -> Entry:
        parent = keys[i - 1] if i else self._root(salt)
        entry = self.index.reserve(keys[i], parent, i, self.namespace.layout.chunk_tokens)
        assert entry is not None, "the pool has no slot left; give the fake engine more"
        return entry

    def _fill(self, keys: Sequence[bytes], i: int, salt: str, seed: int) -> Entry:
        entry = self._reserve(keys, i, salt)
        data, at = payload_bytes(entry.key, seed, self.shape.payload_nbytes), 0
        for part in self.pool.parts(entry.slot):
            np.frombuffer(part, dtype=np.uint8)[:] = np.frombuffer(data[at : at + len(part)], dtype=np.uint8)
            at += len(part)
        self.index.filled(entry, "host")
        self.counters["spilled"] += 1
        return entry

    def _item(self, entry: Entry, keys: Sequence[bytes], salt: str) -> StoreItem:
        return StoreItem(
            key=entry.key,
            parent=entry.parent,
            anchor=keys[anchor_index(entry.position)],
            position=entry.position,
            num_tokens=entry.num_tokens,
            tenant=tenant_digest(salt.encode()),
            slot=entry.slot,
            generation=entry.generation,
        )

    def _fetch(self, keys: Sequence[bytes], start: int, salt: str) -> None:
        """Fetch what the server has of ``keys`` from ``start`` on."""
        if start == len(keys):
            return
        anchor = keys[anchor_index(start)]
        reply = self.client.match(0, start, anchor, keys[start:])
        wait_until(lambda: reply.letters is not None, what="no reply to MATCH")
        stop = start + len(reply.letters or b"")
        step = max(1, COMMAND_NBYTES // self.shape.payload_nbytes)
        for at in range(start, stop, step):
            entries = [self._reserve(keys, i, salt) for i in range(at, min(stop, at + step))]
            self._fetch_entries(entries, at, keys)

    def _fetch_entries(self, entries: Sequence[Entry], start: int, keys: Sequence[bytes]) -> None:
        fetch = Fetch(entries)
        for i, entry in enumerate(entries):
            entry.fetch, entry.fetch_index = fetch, i
        self.client.fetch(0, start, keys[anchor_index(start)], fetch)
        wait_until(lambda: fetch.results is not None, what="no reply to FETCH")
        letters = fetch.results or b"-" * len(entries)
        names = {ord("d"): "disk", ord("s"): "shared"}
        for letter, entry in zip(letters, entries, strict=True):
            if letter in names:
                self.index.filled(entry, names[letter])
            else:
                self.index.drop(entry, filling=not fetch.released)

    # -- pushes, on the reader thread

    def _pushed(self, what: str, body: bytes) -> bytes:
        while self.mute:
            time.sleep(0.01)
        keys = [body[i : i + KEY_NBYTES] for i in range(0, len(body), KEY_NBYTES)]
        if what == "list":
            return msgspec.msgpack.encode([_host_entry(e) for e in self.index.snapshot()])
        if what == "has":
            return bytes(self._has(key) for key in keys)
        if what == "invalidate":
            count = sum(self._has(key) for key in keys)
            self.client.drop(keys, self.index.dropped)
            return str(count).encode()
        if what == "session":
            self.orders.append(body)
            return b"1"
        if what == "stat":
            return msgspec.json.encode(self._stat())
        return b""

    def _has(self, key: bytes) -> bool:
        entry = self.index.get(key)
        return entry is not None and entry.usable

    def _stat(self) -> HostStat:
        return HostStat(
            engine_id=self.engine_id,
            pid=os.getpid(),
            namespace=self.ns,
            num_slots=self.shape.num_slots,
            num_entries=len(self.index.snapshot()),
            num_quarantined=self.index.num_quarantined,
            payload_nbytes=self.shape.payload_nbytes,
            budget=self.shape.nbytes,
            num_evicted=self.index.num_evicted,
            counters=dict(self.counters),
        )


def _host_entry(entry: Entry) -> HostEntry:
    return HostEntry(entry.key, entry.parent, entry.position, entry.num_tokens, entry.last_used, entry.num_hits)
