"""One scheduler half with long prompts, real sizes of chunks and vLLM's own block pool, to see what its calls cost.

Nothing is copied and nobody answers by itself: the pool's memory is never touched, the network is a
:class:`scheduler_parts.FakeClient`. ``scripts/bench-scheduler`` measures time with it, and
``tests/unit/test_scheduler_cost.py`` counts operations.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from scheduler_parts import FakeClient
from tierkv.config import EngineConfig
from tierkv.filter import KeyFilter
from tierkv.keys import ANCHOR_SPAN, chain_keys, root_key
from tierkv.layout import TARGET_PAYLOAD_NBYTES, LayerGroup, Layout
from tierkv.pool import HostPool, PoolShape, Segment
from tierkv.rendezvous import Offer
from tierkv_connector.metadata import StoreJob, TierKVMetadata, TierKVWorkerMetadata
from tierkv_connector.scheduler import Scheduler

#: As vLLM has them on a GPU.
BLOCK_TOKENS = 16
#: Of the windows of a model with several KV cache groups.
WINDOW = 1024
IDENTITY = bytes(range(32))


class Shape(NamedTuple):
    """A model, as far as planning sees it.

    Attributes:
        num_groups: KV cache groups: one of full attention, the others of sliding windows.
        chunk_tokens: tokens of a chunk.
    """

    num_groups: int
    chunk_tokens: int

    def layout(self) -> Layout:
        """Return a layout whose payloads are about as large as they are by default."""
        per_chunk = self.chunk_tokens // BLOCK_TOKENS
        block_nbytes = TARGET_PAYLOAD_NBYTES // per_chunk // self.num_groups // 4096 * 4096
        groups = [
            LayerGroup(
                kind="SlidingWindowSpec" if table else "FullAttentionSpec",
                layers=(f"layer.{table}",),
                num_kv_heads=8,
                head_size=128,
                block_nbytes=(block_nbytes,),
                shape=(8, BLOCK_TOKENS, 256),
                order=(0, 1, 2),
                window=WINDOW if table else 0,
                table=table,
            )
            for table in range(self.num_groups)
        ]
        return Layout(groups[0], "bfloat16", BLOCK_TOKENS, self.chunk_tokens, "NONE", "cuda", others=tuple(groups[1:]))


class Prompt:
    """A request as the scheduler half sees it, with the block hashes that vLLM has computed before."""

    _numbers = itertools.count(1)

    def __init__(self, tokens: list[int], hashes: list[bytes], cache_salt: str | None = None) -> None:
        self.request_id = f"p{next(self._numbers)}"
        self.prompt_token_ids = self.all_token_ids = tokens
        self.num_tokens = self.num_prompt_tokens = len(tokens)
        self.block_hashes = hashes
        self.cache_salt = cache_salt
        self.skip_reading_prefix_cache = False
        self.kv_transfer_params = None
        self.lora_request = None

    @classmethod
    def make(cls, num_tokens: int, seed: int) -> Prompt:
        """Return a prompt that shares nothing with one of another seed."""
        tokens = [(seed * 7919 + i * 2654435761) % 128_000 for i in range(num_tokens)]
        hashes = [hashlib.sha256(struct.pack("<2I", seed, i)).digest() for i in range(num_tokens // BLOCK_TOKENS)]
        return cls(tokens, hashes)

    def again(self) -> Prompt:
        """Return another request with the same prompt."""
        return Prompt(self.prompt_token_ids, self.block_hashes, self.cache_salt)


class Filtered(FakeClient):
    """A client that has the server's filter of stored keys, as the real one."""

    def __init__(self) -> None:
        super().__init__()
        self.filter: KeyFilter | None = None
        self.num_denied = 0

    def denies(self, key: bytes) -> bool:
        self.num_denied += 1
        return self.filter is not None and key not in self.filter


class Half:
    """A scheduler half.

    Args:
        shape: of the model.
        num_slots: of the host pool.
        gpu_blocks: of the GPU.
    """

    def __init__(self, shape: Shape, num_slots: int, gpu_blocks: int = 1 << 14) -> None:
        from vllm.v1.core.block_pool import BlockPool

        layout = shape.layout()
        pool_shape = PoolShape(num_slots, 1, layout.part_nbytes)
        self.pool = HostPool(pool_shape, [Segment.create(pool_shape.segment_nbytes(0), populate=False)])
        config = EngineConfig(pool_shape.nbytes, "auto", Path("/none"), 1 << 40, None, shape.chunk_tokens, 60.0)
        self.shape = shape
        self.client = Filtered()
        self.sched = Scheduler.__new__(Scheduler)
        self.sched._setup(config, Offer(pool_shape, layout), self.pool, "cost", lambda: 100.0)
        self.sched.membership.found = (IDENTITY, self.client)  # type: ignore[assignment]
        self.gpu = BlockPool(gpu_blocks, enable_caching=True, hash_block_size=BLOCK_TOKENS)
        self.sched.bind_block_pool(self.gpu)
        self._num_on_gpu = 1
        self.step([])  # takes up the identity

    def close(self) -> None:
        self.pool.close()

    def keys(self, prompt: Prompt) -> list[bytes]:
        return chain_keys(root_key(IDENTITY), prompt.prompt_token_ids, self.shape.chunk_tokens)

    # -- where prompts are

    def put_in_host(self, prompt: Prompt, num_chunks: int | None = None) -> None:
        """Have the first chunks of a prompt in the host pool."""
        parent, index = root_key(IDENTITY), self.sched.index
        keys = self.keys(prompt)[:num_chunks]
        index.note(keys)
        for i, key in enumerate(keys):
            if index.get(key) is None:
                entry = index.reserve(key, parent, i, self.shape.chunk_tokens, keys[i - i % ANCHOR_SPAN])
                assert entry is not None
                index.filled(entry, "host")
            parent = key

    def put_on_gpu(self, prompt: Prompt, groups: Sequence[int] | None = None) -> None:
        """Have a prompt's blocks in the GPU's prefix cache, in some KV cache groups (all of them)."""
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        for group in range(self.shape.num_groups) if groups is None else groups:
            for block_hash in prompt.block_hashes:
                block = self.gpu.blocks[self._num_on_gpu % self.gpu.num_gpu_blocks]
                self._num_on_gpu += 1
                self.gpu.cached_block_hash_to_block.insert(make_block_hash_with_group_id(block_hash, group), block)

    def deny_all(self) -> None:
        """Have the server's filter say that nothing is stored."""
        self.client.filter = KeyFilter(capacity=1 << 16)

    def answer(self, letter: bytes) -> None:
        """Answer every question that is out: of every chunk the same."""
        for lane in self.client.lanes:
            while lane:
                command = lane.popleft()
                if command.reply is not None:
                    command.reply.letters = letter * len(command.keys)
                if command.fetch is not None:
                    command.fetch.released = True
                    command.fetch.results = letter * len(command.keys)

    # -- vLLM's calls

    def add(self, prompt: Prompt) -> None:
        self.sched.on_new_request(prompt)

    def ask(self, prompt: Prompt, num_computed: int = 0) -> tuple[int | None, bool]:
        return self.sched.get_num_new_matched_tokens(prompt, num_computed)

    def finish(self, prompt: Prompt) -> None:
        self.sched.request_finished(prompt)

    def output(self, running: Sequence[tuple[Prompt, int, int]]) -> SimpleNamespace:
        """Return what vLLM says of a step.

        Args:
            running: request, tokens computed before, and tokens of this step, of each that runs.
        """
        blocks = {p.request_id: self._table(computed + num) for p, computed, num in running}
        return SimpleNamespace(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[p.request_id for p, _, _ in running],
                num_computed_tokens=[computed for _, computed, _ in running],
                new_block_ids=[None] * len(running),
                resumed_req_ids=set(),
            ),
            num_scheduled_tokens={p.request_id: num for p, _, num in running},
            preempted_req_ids=set(),
            finished_req_ids=set(),
            kv_connector_block_state=SimpleNamespace(get_block_ids=blocks.get),
        )

    def step(self, running: Sequence[tuple[Prompt, int, int]]) -> TierKVMetadata:
        """Return the metadata of a step (see :meth:`output`)."""
        return self.sched.build_connector_meta(self.output(running))

    def copied(self, jobs: Sequence[StoreJob]) -> None:
        """Report copies of chunks to the host pool."""
        self.sched.update_connector_output(set(), TierKVWorkerMetadata(stored={job.job_id: 1 for job in jobs}))

    def _table(self, num_tokens: int) -> tuple[list[int], ...]:
        num = -(-num_tokens // BLOCK_TOKENS)
        return tuple([1 + g * num + i for i in range(num)] for g in range(self.shape.num_groups))
