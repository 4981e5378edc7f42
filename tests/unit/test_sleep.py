"""Sleep and wake as vLLM's worker calls for them: the memory of the KV cache goes, and comes back elsewhere."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec

from fake_engine import wait_until
from tierkv.config import EngineConfig
from tierkv.errors import ConfigError
from tierkv.pool import HostPool
from tierkv.rendezvous import get_pool
from tierkv_connector import worker as worker_module
from tierkv_connector.metadata import LoadJob, Piece, StoreJob, TierKVMetadata
from tierkv_connector.worker import Worker

NUM_BLOCKS = 6
SHAPE = (NUM_BLOCKS, 1, 16, 16)
SPEC = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)


def memory(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "tensor_rank", lambda parallel: 0)


class Engine:
    """The worker of an engine whose KV cache, of one layer, can be moved to other memory."""

    def __init__(self) -> None:
        engine_id = secrets.token_hex(8)
        vllm_config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(engine_id=engine_id),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
            compilation_config=SimpleNamespace(static_forward_context={}),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            model_config=SimpleNamespace(dtype=torch.float32),
        )
        kv_cache_config = SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(["a"], SPEC)], num_blocks=NUM_BLOCKS)
        config = EngineConfig.parse({"host_bytes": 1 << 20, "chunk_tokens": 32, "server": "off"})
        self.worker = Worker(config, vllm_config, kv_cache_config)
        self.cache = memory(0).clone()
        self.worker.register_kv_caches({"a": self.cache})
        offer, fds = get_pool(engine_id)
        self.pool = HostPool.from_fds(offer.shape, fds)

    def move(self, seed: int) -> torch.Tensor:
        """Give the cache other memory, as a wake may, and return the memory that it had."""
        old = torch.empty(0).set_(self.cache.untyped_storage(), 0, SHAPE)
        self.cache.set_(memory(seed).clone().untyped_storage(), 0, SHAPE)  # type: ignore[call-overload]
        return old

    def step(self, *, loads: Any = (), stores: Any = ()) -> Any:
        """Step until all of this step's copies are reported, and return the report."""
        metadata = TierKVMetadata(list(loads), list(stores))
        self.worker.before_forward(metadata)
        self.worker.start_loads(metadata)
        self.worker.after_forward(metadata)
        wait_until(lambda: self.worker.collect() or not self.worker._num_copies)
        return self.worker.take_report()

    def slot(self, number: int) -> bytes:
        return b"".join(bytes(part) for part in self.pool.parts(number))


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.worker.close()
    engine.pool.close()


def rows(cache: torch.Tensor, *blocks: int) -> bytes:
    return b"".join(cache[block].numpy().tobytes() for block in blocks)


def store(number: int, slot: int, *blocks: int) -> StoreJob:
    return StoreJob(number, Piece(slot, 0, blocks))


def load(name: str, slot: int, *blocks: int, sync_id: int = 0) -> LoadJob:
    return LoadJob(name, (Piece(slot, 0, blocks),), sync_id)


def test_what_is_copied_after_a_wake_is_the_new_memory(engine: Engine) -> None:
    engine.step(stores=[store(1, 0, 1, 2)])
    kept = rows(engine.cache, 1, 2)
    for seed in (1, 2):  # it sleeps again and again
        engine.worker.unregister_kv_caches()
        engine.worker.unregister_kv_caches()
        old = engine.move(seed)
        before = old.clone()
        engine.worker.restore_kv_caches()
        engine.worker.restore_kv_caches()
        engine.step(loads=[load("r", 0, 3, 4)], stores=[store(2, 1, 0, 5)])
        assert rows(engine.cache, 3, 4) == kept, "a chunk of before the sleep is in the new memory"
        assert engine.slot(1) == rows(engine.cache, 0, 5) == rows(memory(seed), 0, 5), "and what is stored is of it"
        assert torch.equal(old, before), "nothing has touched the old one"
        assert engine.worker.take_loaded() == {"r"} and not engine.worker.take_failed()


def test_a_sleep_waits_for_the_copies_under_way(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """And they are reported when the engine steps again, each once."""
    engine.step(stores=[store(1, 0, 1, 2)])
    device: Any = engine.worker._device
    copy, go_on, begun = device._load_piece, threading.Event(), threading.Event()

    def held(piece: Piece) -> None:
        begun.set()
        assert go_on.wait(60.0)
        copy(piece)

    monkeypatch.setattr(device, "_load_piece", held)
    engine.worker.start_loads(TierKVMetadata([load("r", 0, 3, 4)]))
    assert begun.wait(60.0)
    asleep = threading.Thread(target=engine.worker.unregister_kv_caches)
    asleep.start()
    assert asleep.is_alive() and not engine.worker._asleep
    go_on.set()
    asleep.join(60.0)
    assert engine.worker._asleep and rows(engine.cache, 3, 4) == rows(engine.cache, 1, 2)
    engine.move(1)
    engine.worker.restore_kv_caches()
    assert engine.worker.take_loaded() == {"r"} and not engine.worker.take_loaded()
    assert engine.worker.take_report() is not None


def test_nothing_is_copied_while_the_memory_is_gone(engine: Engine) -> None:
    """vLLM steps nobody then. What came all the same is reported as failed, and touches neither side."""
    engine.step(stores=[store(1, 0, 1, 2)])
    engine.worker.unregister_kv_caches()
    before, kept = engine.cache.clone(), engine.slot(1)
    report = engine.step(
        loads=[load("waits", 0, 3, 4), load("now", 0, 0, 5, sync_id=7)],
        stores=[store(2, 1, 1, 2)],
    )
    assert torch.equal(engine.cache, before) and engine.slot(1) == kept
    assert engine.worker.take_loaded() == {"waits"} == engine.worker.take_failed()
    assert {0, 5} <= engine.worker.take_bad_blocks()
    assert report.failed_loads == {"waits"} and report.failed_sync == {7} and report.failed_stores == {2}
    assert report.stored == {2: 1} and report.loaded == {7: 1}


def test_caches_that_are_registered_again_are_those_that_are_used(engine: Engine) -> None:
    engine.step(stores=[store(1, 0, 1, 2)])
    other, kept = memory(3).clone(), rows(engine.cache, 1, 2)
    engine.worker.register_kv_caches({"a": other})
    engine.step(loads=[load("r", 0, 3, 4)])
    assert rows(other, 3, 4) == kept
    with pytest.raises(ConfigError, match=r"is kept as .* now, and was as .*; start the engine anew"):
        engine.worker.register_kv_caches({"a": torch.zeros(NUM_BLOCKS, 1, 16, 16, dtype=torch.float16)})
