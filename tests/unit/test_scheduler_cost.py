"""What a call on the scheduler thread does for a long prompt, in operations: how often keys are hashed and looked up.

Time is measured by ``scripts/bench-scheduler``. Here nothing depends on the machine: twice the prompt is twice the
work, once; asked again, nothing is looked up again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest

from scheduler_cost import BLOCK_TOKENS, WINDOW, Half, Prompt, Shape
from tierkv import keys as keys_module
from tierkv.chains import RUN_TOKENS
from tierkv_connector.compat import GpuCache

CHUNK_TOKENS = 64
NUM_CHUNKS = 128
NUM_TOKENS = NUM_CHUNKS * CHUNK_TOKENS + 1
GROUPS = (1, 7)


class CountingDict(dict[bytes, Any]):
    """A dictionary that counts who is asked for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_lookups = 0

    def get(self, key: bytes, default: Any = None) -> Any:
        self.num_lookups += 1
        return super().get(key, default)


class Counts:
    """Operations on one half, since the last look.

    Attributes:
        half: the half.
    """

    def __init__(self, half: Half, monkeypatch: pytest.MonkeyPatch) -> None:
        self.half = half
        self._entries = CountingDict(half.sched.index._entries)
        half.sched.index._entries = self._entries
        self._num_hashes = self._num_blocks = 0
        sha256, get_cached_block = hashlib.sha256, half.gpu.get_cached_block

        def hash_counted(data: bytes) -> Any:
            self._num_hashes += 1
            return sha256(data)

        def block_counted(block_hash: Any, group_ids: Any) -> Any:
            self._num_blocks += len(group_ids)
            return get_cached_block(block_hash, group_ids)

        monkeypatch.setattr(keys_module.hashlib, "sha256", hash_counted)
        half.gpu.get_cached_block = block_counted

    def take(self) -> tuple[int, int, int]:
        """Return the hashes, the lookups in the host index, and the lookups in the GPU's prefix cache."""
        counts = self._num_hashes, self._entries.num_lookups, self._num_blocks
        self._num_hashes = self._num_blocks = self._entries.num_lookups = 0
        return counts


@pytest.fixture(params=GROUPS, ids="{} groups".format)
def half(request: pytest.FixtureRequest) -> Iterator[Half]:
    half = Half(Shape(request.param, CHUNK_TOKENS), 2 * NUM_CHUNKS, 1 << 13)
    yield half
    half.close()


@pytest.fixture
def counts(half: Half, monkeypatch: pytest.MonkeyPatch) -> Counts:
    return Counts(half, monkeypatch)


def test_keys_are_hashed_once(half: Half, counts: Counts) -> None:
    """One hash a chunk, and one for the root, however many KV cache groups there are; none for an answer or a step."""
    prompt = Prompt.make(NUM_TOKENS, 1)
    counts.take()
    half.add(prompt)
    hashes, _, _ = counts.take()
    assert hashes == NUM_CHUNKS + 1
    half.ask(prompt)
    half.step([])
    assert counts.take()[0] == 0
    half.add(prompt.again())
    rest = NUM_TOKENS % RUN_TOKENS // CHUNK_TOKENS
    assert counts.take()[0] == rest + 1, "what came before is looked up, but for the rest after its last whole run"


def test_a_miss_by_the_filter_is_one_question(half: Half, counts: Counts) -> None:
    half.deny_all()
    prompt = Prompt.make(NUM_TOKENS, 1)
    half.add(prompt)
    _, lookups, blocks = counts.take()
    assert (half.client.num_denied, half.client.num_commands("match")) == (1, 0)
    assert lookups <= 2, "the first chunk is not there: no other is looked for"
    assert blocks <= NUM_TOKENS.bit_length() + 1, "by bisection"
    assert half.ask(prompt) == (0, False)
    assert counts.take() == (0, 1, 0)


def test_what_is_in_the_host_pool_is_looked_up_once(half: Half, counts: Counts) -> None:
    """A touch and the run of chunks when it is planned; nothing when vLLM asks, as often as it likes."""
    prompt = Prompt.make(NUM_TOKENS, 1)
    half.put_in_host(prompt)
    counts.take()
    half.add(prompt)
    _, lookups, _ = counts.take()
    assert NUM_CHUNKS <= lookups <= 2 * NUM_CHUNKS
    for _ in range(20):
        assert half.ask(prompt) == (NUM_CHUNKS * CHUNK_TOKENS, True)
        assert half.ask(prompt, BLOCK_TOKENS) == (NUM_CHUNKS * CHUNK_TOKENS - BLOCK_TOKENS, True)
        assert half.ask(prompt, 3 * CHUNK_TOKENS) == ((NUM_CHUNKS - 3) * CHUNK_TOKENS, True)
    assert counts.take() == (0, 0, 0)


def test_an_answer_looks_up_what_has_come_and_after_a_removal_all(half: Half, counts: Counts) -> None:
    prompt = Prompt.make(NUM_TOKENS, 1)
    half.put_in_host(prompt, NUM_CHUNKS // 2)
    half.deny_all()
    half.add(prompt)
    counts.take()
    assert half.ask(prompt) == (NUM_CHUNKS // 2 * CHUNK_TOKENS, True)
    assert counts.take() == (0, 1, 0), "the first chunk that was not there"
    half.put_in_host(prompt, NUM_CHUNKS // 2 + 3)
    counts.take()
    assert half.ask(prompt) == ((NUM_CHUNKS // 2 + 3) * CHUNK_TOKENS, True)
    assert counts.take() == (0, 4, 0), "the three that came, and one"
    keys = half.keys(prompt)
    entry = half.sched.index.get(keys[5])
    assert entry is not None
    half.sched.index.drop(entry)
    counts.take()
    assert half.ask(prompt) == (5 * CHUNK_TOKENS, True)
    assert counts.take() == (0, 6, 0)


def test_a_dropped_chunk_is_not_answered_though_it_was_known(half: Half) -> None:
    """An operator's eviction is in the drop set first: no memory of answers stands against it."""
    prompt = Prompt.make(NUM_TOKENS, 1)
    half.put_in_host(prompt)
    half.add(prompt)
    assert half.ask(prompt) == (NUM_CHUNKS * CHUNK_TOKENS, True)
    key = half.keys(prompt)[7]
    half.sched.index.dropped.add(key)
    assert half.ask(prompt) == (7 * CHUNK_TOKENS, True)
    half.step([])
    assert half.ask(prompt) == (7 * CHUNK_TOKENS, True)


@pytest.mark.parametrize("num_chunks", [32, 64, 128])
def test_work_grows_with_the_prompt_and_not_faster(half: Half, counts: Counts, num_chunks: int) -> None:
    prompt = Prompt.make(num_chunks * CHUNK_TOKENS + 1, 1)
    half.put_in_host(prompt)
    counts.take()
    half.add(prompt)
    half.ask(prompt)
    hashes, lookups, _ = counts.take()
    assert (hashes, lookups) == (num_chunks + 1, 2 * num_chunks)


def test_a_server_is_asked_in_one_question(half: Half, counts: Counts) -> None:
    prompt = Prompt.make(NUM_TOKENS, 1)
    half.add(prompt)
    assert half.client.num_commands("match") == 1
    assert half.ask(prompt) == (None, False)
    counts.take()
    for _ in range(20):
        assert half.ask(prompt) == (None, False)
    _, lookups, _ = counts.take()
    assert lookups <= 20, "one a question: the first that has not come"


def test_windows_that_are_gone_from_the_gpu_cost_a_bounded_search(half: Half, counts: Counts) -> None:
    prompt = Prompt.make(NUM_TOKENS, 1)
    half.put_on_gpu(prompt, groups=[0])
    counts.take()
    half.add(prompt)
    _, _, blocks = counts.take()
    assert half.ask(prompt)[0] is not None or half.shape.num_groups == 1 or half.client.num_commands("match")
    per_window = WINDOW // BLOCK_TOKENS
    assert blocks <= NUM_TOKENS.bit_length() + 1024 + half.shape.num_groups * per_window


def test_a_step_looks_at_who_runs_and_not_at_their_prompts(
    half: Half, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 requests that generate: nothing is hashed or looked up, of the host index or of the GPU."""
    half.deny_all()
    prompts = [Prompt.make(2 * CHUNK_TOKENS, seed) for seed in range(1, 257)]
    for prompt in prompts:
        half.add(prompt)
    half.copied(half.step([(prompt, 0, 2 * CHUNK_TOKENS) for prompt in prompts]).stores)
    counts.take()
    num_runs = 0
    run = GpuCache.run

    def counted(*args: Any) -> int:
        nonlocal num_runs
        num_runs += 1
        return run(*args)

    monkeypatch.setattr(GpuCache, "run", counted)
    for step in range(3):
        metadata = half.step([(prompt, 2 * CHUNK_TOKENS + step, 1) for prompt in prompts])
        assert not metadata.loads and not metadata.stores
    assert counts.take() == (0, 0, 0) and num_runs == 0
