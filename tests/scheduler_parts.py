"""Parts of a bench for the scheduler half: a store client whose network a test holds, vLLM's requests and block pool.

Their blocks are small, and the bytes of a block on the model GPU follow from all tokens up to its end.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tierkv.client import NUM_LANES, MatchReply
from tierkv.hostindex import Fetch
from tierkv.messages import USED, RequestNote, StoreItem
from tierkv.sessions import SessionTurn

BLOCK_TOKENS = 4
BLOCK_NBYTES = 32


@dataclass
class Command:
    """A command that the store server has not answered."""

    kind: str
    keys: list[bytes]
    reply: MatchReply | None = None
    fetch: Fetch | None = None


class FakeClient:
    """Stands for the store client; the network is this object. Replies come when the test says so.

    Attributes:
        log: every command ever sent, as plain values.
        lanes: commands without an answer, in order, a queue a lane.
        stores: STORE commands without an answer.
        lost: fetches whose session ended before an answer: the server may still write their slots.

    What the pool keeps is taken note of at once.
    """

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.lanes: list[deque[Command]] = [deque() for _ in range(NUM_LANES)]
        self.stores: deque[tuple[list[StoreItem], Callable[[bytes | None], None]]] = deque()
        self.uses: deque[tuple[list[bytes], Callable[[bytes | None], None]]] = deque()
        self.known: set[bytes] | None = None  # what the filter of stored keys says, if there is one
        self.spill: dict[str, str] = {"disk": "through", "shared": "through"}
        self.policy = ""  # of the server's disk: one that takes all that it is offered
        self.notes: list[RequestNote] = []
        self.holder = ""  # the session that wants to know what the pool keeps, if one does
        self.is_full = False  # whether the disk may lack what the pool keeps
        self.held: set[bytes] = set()  # what it was told of
        self.lost: list[Fetch] = []
        self.up = True
        self._lane = 0

    # -- what the scheduler half calls

    num_bad = 0

    def connected(self) -> bool:
        return self.up

    def denies(self, key: bytes) -> bool:
        return self.known is not None and key not in self.known

    def next_lane(self) -> int:
        self._lane = (self._lane + 1) % NUM_LANES
        return self._lane

    def match(self, lane: int, start: int, anchor: bytes, keys: Sequence[bytes]) -> MatchReply:
        self.log.append(("match", lane, start, anchor, tuple(keys)))
        reply = MatchReply()
        if self.up:
            self.lanes[lane].append(Command("match", list(keys), reply=reply))
        else:
            reply.letters = b""
        return reply

    def fetch(self, lane: int, start: int, anchor: bytes, fetch: Fetch) -> None:
        self.log.append(("fetch", lane, start, anchor, tuple((e.key, e.slot, e.generation) for e in fetch.entries)))
        if self.up:
            self.lanes[lane].append(Command("fetch", [e.key for e in fetch.entries], fetch=fetch))
        else:
            fetch.released = True
            fetch.results = b""

    def store(self, items: Sequence[StoreItem], dropped: set[bytes], done: Callable[[bytes | None], None]) -> None:
        items = [item for item in items if item.key not in dropped]
        self.log.append(("store", tuple(items)))
        if items and self.up:
            self.stores.append((items, done))
        else:
            done(None if items else b"")

    def use(
        self,
        start: int,
        anchor: bytes,
        keys: Sequence[bytes],
        reply: Callable[[bytes | None], None],
        reason: int = USED,
    ) -> None:
        self.log.append(("use" if reason == USED else "hand off", 0, start, anchor, tuple(keys)))
        if self.up:
            self.uses.append((list(keys), reply))
        else:
            reply(None)

    def note(self, note: RequestNote) -> None:
        self.notes.append(note)

    def hold(self, took: Sequence[bytes], gone: Sequence[bytes], reply: Callable[[bytes | None], None]) -> None:
        self.log.append(("hold", tuple(took), tuple(gone)))
        self.held |= set(took)
        self.held -= set(gone)
        reply(b"%d" % self.is_full if self.up else None)

    def turn(self, turn: SessionTurn) -> None:
        self.log.append(("turn", turn))

    def drop(self, keys: Sequence[bytes], dropped: set[bytes]) -> None:
        self.log.append(("drop", tuple(keys)))
        dropped.update(keys)

    def close(self) -> None:
        pass

    # -- what the test does

    def outstanding(self) -> list[int]:
        """Return the lanes in which a command waits for its answer."""
        return [lane for lane, queue in enumerate(self.lanes) if queue]

    def num_commands(self, kind: str) -> int:
        return sum(command[0] == kind for command in self.log)

    def disconnect(self) -> None:
        """End the session: every answer is lost, and slots of fetches stay with the server until its lease ends."""
        self.up = False
        for queue in self.lanes:
            while queue:
                command = queue.popleft()
                if command.reply is not None:
                    command.reply.letters = b""
                if command.fetch is not None:
                    command.fetch.results = b""
                    self.lost.append(command.fetch)
        for queue_of_others in (self.stores, self.uses):
            while queue_of_others:
                queue_of_others.popleft()[1](None)

    def end_leases(self) -> None:
        """Note that the server cannot write the slots of lost fetches any more."""
        for fetch in self.lost:
            fetch.released = True
        self.lost.clear()


class Request:
    """What the scheduler half sees of a vLLM request, and what the model of vLLM keeps of it."""

    def __init__(self, req_id: str, tokens: list[int], salt: str = "", max_outputs: int = 2) -> None:
        self.request_id = req_id
        self.prompt_token_ids = tokens
        self.cache_salt = salt or None
        self.skip_reading_prefix_cache = False
        self.pooling_params: object = None
        self.tokens = list(tokens)
        self.max_outputs = max_outputs
        self.status = "waiting"  # waiting, loading, running, finished
        self.num_computed = 0
        self.block_ids: list[int] = []
        self.num_preemptions = 0
        self.scheduled_before = False
        self.recved = False
        self.failed = False
        self.epoch = 0
        self.root = b""
        self.kv_transfer_params: object = None
        self.num_prompt_tokens = len(tokens)
        self.begun: int | None = None  # tokens that were there when it ran first
        self.loaded: Counter[str] = Counter()  # of these, those that were loaded, by the tier that gave them
        self._hashes: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def all_token_ids(self) -> list[int]:
        return self.tokens

    @property
    def block_hashes(self) -> list[bytes]:
        """The hash of each whole block and all tokens before it: also the bytes that its KV has on the model GPU."""
        while (len(self._hashes) + 1) * BLOCK_TOKENS <= len(self.tokens):
            at = len(self._hashes) * BLOCK_TOKENS
            parent = self._hashes[-1] if self._hashes else (self.cache_salt or "").encode()
            data = parent + repr(self.tokens[at : at + BLOCK_TOKENS]).encode()
            self._hashes.append(hashlib.sha256(data).digest()[:BLOCK_NBYTES])
        return self._hashes


class BlockPool:
    """vLLM's block pool, as far as it matters: reference counts, a prefix cache, least recently freed first."""

    def __init__(self, num_blocks: int) -> None:
        self.free: OrderedDict[int, None] = OrderedDict((i, None) for i in range(1, num_blocks))
        self.refs = [0] * num_blocks
        self.hashes: dict[int, bytes] = {}
        self.cached: dict[bytes, int] = {}
        self.data: list[bytes] = [bytes(BLOCK_NBYTES)] * num_blocks

    def get_cached_block(self, block_hash: bytes, group_ids: Sequence[int]) -> list[int] | None:
        block = self.cached.get(block_hash)
        return None if block is None else [block]

    def run(self, hashes: Sequence[bytes], stop: int) -> list[int]:
        blocks = []
        for block_hash in hashes[:stop]:
            if (block := self.cached.get(block_hash)) is None:
                break
            blocks.append(block)
        return blocks

    def take(self, hits: Sequence[int], count: int) -> list[int] | None:
        """Take the cached blocks ``hits`` and ``count`` new ones, or nothing where there are too few."""
        if len(self.free) - sum(not self.refs[block] for block in hits) < count:
            return None
        for block in hits:
            self.free.pop(block, None)
            self.refs[block] += 1
        new = []
        for _ in range(count):
            block, _ = self.free.popitem(last=False)
            self.forget(block)
            self.refs[block] = 1
            new.append(block)
        return new

    def forget(self, block: int) -> None:
        if (block_hash := self.hashes.pop(block, None)) is not None and self.cached.get(block_hash) == block:
            del self.cached[block_hash]

    def cache(self, block: int, block_hash: bytes) -> None:
        if block not in self.hashes and block_hash not in self.cached:
            self.hashes[block] = block_hash
            self.cached[block_hash] = block

    def give(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free[block] = None

    def reset(self) -> bool:
        """Forget the prefix cache if nobody uses a block, as vLLM does."""
        if any(self.refs):
            return False
        self.hashes.clear()
        self.cached.clear()
        return True
