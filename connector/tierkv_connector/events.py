"""KV events: which blocks are in the host pool, told to whoever routes requests, under vLLM's own block hashes.

vLLM publishes them beside its own (``--kv-events-config``), with another *medium*: ``GPU`` is its cache, ``CPU`` the
host pool of this engine. Disk and shared tier have none: they are not this engine's, every engine of the machine or the
fleet loads from them, so that they decide no route.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from tierkv.hostindex import Entry
from tierkv_connector.requests import RequestState

#: Events that wait to be taken. What is beyond them is told in no event; a router's view then lacks it.
_MAX_WAITING = 1 << 16


class _Chunk(NamedTuple):
    """What events say of a chunk.

    Attributes:
        hashes: of its blocks.
        parent: the hash before them; None for the first chunk.
        token_ids: its tokens.
        lora: its adapter, or None.
        extra: per block what else its hash is made of, as vLLM publishes it: the adapter's name, the salt.
    """

    hashes: tuple[Any, ...]
    parent: Any
    token_ids: list[int]
    lora: Any
    extra: list[tuple[Any, ...] | None]


def events_wanted(vllm_config: Any) -> bool:
    """Return whether this engine publishes KV events."""
    return bool(getattr(getattr(vllm_config, "kv_events_config", None), "enable_kv_cache_events", False))


class EventQueue:
    """Turns changes of the host index into vLLM's events. A watcher of :class:`tierkv.hostindex.HostIndex`.

    Args:
        requests: the requests that are known, by id; not owned.
        chunk_tokens: tokens a chunk.
        hash_tokens: tokens a block hash of vLLM's.
    """

    def __init__(self, requests: Mapping[str, RequestState], chunk_tokens: int, hash_tokens: int) -> None:
        from vllm.distributed import kv_events
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        self._requests = requests
        self._chunk_tokens = chunk_tokens
        self._hash_tokens = hash_tokens
        self._kinds = kv_events
        self._medium = kv_events.MEDIUM_CPU
        self._external = maybe_convert_block_hash
        self._coming: dict[bytes, _Chunk] = {}  # reserved, not there yet
        self._there: dict[bytes, tuple[Any, ...]] = {}  # told as stored: their hashes
        self._holders: Counter[Any] = Counter()  # how many chunks hold a block: they may differ in a later one
        self._events: list[Any] = []
        self._last: RequestState | None = None

    # -- the host index tells

    def reserved(self, entry: Entry) -> None:
        """A request's chunk is about to come: its hashes are known now, while the request is."""
        state = self._owner(entry)
        if state is not None and (chunk := self._chunk(state, entry.position)) is not None:
            self._coming[entry.key] = chunk

    def ready(self, entry: Entry) -> None:
        """A chunk is there."""
        chunk = self._coming.pop(entry.key, None)
        if chunk is None or len(self._events) >= _MAX_WAITING:
            return
        self._there[entry.key] = chunk.hashes
        self._holders.update(chunk.hashes)
        known = sum(self._holders[each] > 1 for each in chunk.hashes)  # a prefix: what follows a new block is new
        if known == len(chunk.hashes):
            return
        self._events.append(
            self._kinds.BlockStored(
                block_hashes=list(chunk.hashes[known:]),
                parent_block_hash=chunk.hashes[known - 1] if known else chunk.parent,
                token_ids=chunk.token_ids[known * self._hash_tokens :],
                block_size=self._hash_tokens,
                lora_id=chunk.lora and chunk.lora.adapter_id,
                medium=self._medium,
                lora_name=chunk.lora and chunk.lora.name,
                extra_keys=chunk.extra[known:] if any(chunk.extra) else None,
            )
        )

    def gone(self, entry: Entry) -> None:
        """A chunk is there no more, or will not come."""
        self._coming.pop(entry.key, None)
        hashes = self._there.pop(entry.key, None)
        if hashes is None:
            return
        self._holders.subtract(hashes)
        last = [each for each in hashes if not self._holders[each]]
        for each in last:
            del self._holders[each]
        if last:
            self._events.append(self._kinds.BlockRemoved(block_hashes=last, medium=self._medium))

    # -- vLLM asks

    def take(self) -> list[Any]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def _owner(self, entry: Entry) -> RequestState | None:
        """Return a request that has the chunk: nearly always the one that was asked about last."""
        states = (self._last, *self._requests.values()) if self._last is not None else self._requests.values()
        for state in states:
            if entry.position < len(state.keys) and state.keys[entry.position] == entry.key:
                self._last = state
                return state
        return None

    def _chunk(self, state: RequestState, position: int) -> _Chunk | None:
        request, per_chunk = state.request, self._chunk_tokens // self._hash_tokens
        first = position * per_chunk
        hashes = getattr(request, "block_hashes", ())[first : first + per_chunk]
        if len(hashes) < per_chunk or not per_chunk:
            return None  # vLLM's own prefix cache is off, or hashes larger blocks: it has no names for them
        begin, lora = position * self._chunk_tokens, getattr(request, "lora_request", None)
        names = (lora.name,) if lora else ()
        salt = (request.cache_salt,) if request.cache_salt and not position else ()
        extra: list[Any] = [(*names, *salt) or None, *[names or None] * (per_chunk - 1)]
        if state.content is not None:
            extra = extra_keys(request, range(begin, begin + self._chunk_tokens, self._hash_tokens))
        return _Chunk(
            hashes=tuple(self._external(each) for each in hashes),
            parent=self._external(request.block_hashes[first - 1]) if first else None,
            token_ids=list(request.all_token_ids[begin : begin + self._chunk_tokens]),
            lora=lora,
            extra=extra,
        )


def extra_keys(request: Any, blocks: range) -> list[Any]:
    """Return what vLLM's own events say of blocks with images or embeddings in them, a value a block.

    Args:
        request: vLLM's.
        blocks: the first token of each block, as far apart as blocks are long.
    """
    from vllm.v1.core import kv_cache_utils as theirs

    keys = [theirs.generate_block_hash_extra_keys(request, at, at + blocks.step, 0)[0] for at in blocks]
    shown = getattr(theirs, "to_event_extra_keys", None)  # from 0.31 on, keys have tags that events have not
    return list(shown(keys) or ()) if shown is not None else keys
