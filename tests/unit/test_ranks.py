"""Ranks in one process, of tensors and of stages: their segments, what each copies, what becomes of their reports."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput

from records import wait_until
from tierkv.config import EngineConfig
from tierkv.errors import ConfigError
from tierkv.layout import Shard
from tierkv.pool import HostPool
from tierkv.rendezvous import get_pool
from tierkv_connector import worker as worker_module
from tierkv_connector.compat import MAX_RANKS, check_parallel
from tierkv_connector.metadata import LoadJob, Piece, StoreJob, TierKVMetadata
from tierkv_connector.worker import Worker

NUM_BLOCKS = 6
HEADS = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
LATENT = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=16, dtype=torch.float32)

_rank = threading.local()


@pytest.fixture(autouse=True)
def rank_of_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        worker_module, "tensor_rank", lambda parallel: getattr(_rank, "value", 0) % parallel.tensor_parallel_size
    )
    monkeypatch.setattr(
        worker_module, "pipeline_rank", lambda parallel: getattr(_rank, "value", 0) // parallel.tensor_parallel_size
    )


def on_rank(rank: int, work: Callable[[], object]) -> Any:
    """Run ``work`` on a thread that plays the process of a rank, and return what it gave or raise what it raised."""
    result: list[Any] = []

    def run() -> None:
        _rank.value = rank
        try:
            result.append(work())
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30.0)
    if isinstance(result[0], Exception):
        raise result[0]
    return result[0]


class Ranks:
    """The workers of one engine, each with a KV cache of its own.

    Args:
        spec: of every layer.
        caches: a layer a rank.
        heads: KV heads of the model, whose payloads are to be portable; 0 for others.
        stages: pipeline stages over which the ranks are shared out.
    """

    def __init__(
        self, spec: Any, caches: Sequence[torch.Tensor], host_bytes: int = 1 << 20, heads: int = 0, stages: int = 1
    ) -> None:
        self.engine_id = secrets.token_hex(8)
        options = {"host_bytes": host_bytes, "chunk_tokens": 32, "server": "off", "portable_ranks": bool(heads)}
        config = EngineConfig.parse(options)
        layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "CPU_ATTN"), head_size=8)
        vllm_config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(engine_id=self.engine_id),
            parallel_config=SimpleNamespace(tensor_parallel_size=len(caches) // stages, pipeline_parallel_size=stages),
            compilation_config=SimpleNamespace(static_forward_context={"a": layer} if heads else {}),
            model_config=SimpleNamespace(get_total_num_kv_heads=lambda: heads, dtype=torch.float32),
            cache_config=SimpleNamespace(cache_dtype="auto"),
        )
        self.caches = caches
        self.names = ["abcdef"[rank * stages // len(caches)] for rank in range(len(caches))]
        kv_cache_configs = [
            SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec([name], spec)], num_blocks=NUM_BLOCKS)
            for name in self.names
        ]
        self.workers = [Worker(config, vllm_config, each) for each in kv_cache_configs]

    def register(self) -> HostPool:
        for rank, start in enumerate(self.starts()):
            on_rank(rank, start)
        return self.take()

    def starts(self) -> list[Callable[[], None]]:
        """Return for each rank what starts it."""
        ranks = zip(self.workers, self.names, self.caches, strict=True)
        return [lambda w=worker, n=name, c=cache: w.register_kv_caches({n: c}) for worker, name, cache in ranks]  # type: ignore[misc]

    def take(self) -> HostPool:
        self.offer, fds = get_pool(self.engine_id)
        self.pool = HostPool.from_fds(self.offer.shape, fds)
        return self.pool

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
            worker.close()
        if hasattr(self, "pool"):
            self.pool.close()


def caches_of(num: int, shape: tuple[int, ...] = (NUM_BLOCKS, 1, 16, 16)) -> list[torch.Tensor]:
    return [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(num)]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(HEADS, caches_of(3))
    ranks.register()
    yield ranks
    ranks.close()


def parts(pool: HostPool, slot: int) -> list[bytes]:
    return [bytes(part) for part in pool.parts(slot)]


def rows(cache: torch.Tensor, *blocks: int) -> bytes:
    return b"".join(cache[b].numpy().tobytes() for b in blocks)


STORE = TierKVMetadata(stores=[StoreJob(7, Piece(1, 0, (2, 5)))])
LOAD = TierKVMetadata(loads=[LoadJob("r", (Piece(1, 0, (3, 4)),))])


def test_a_payload_is_the_parts_of_all_ranks(ranks: Ranks) -> None:
    assert ranks.offer.shard == Shard(tp_size=3, num_parts=3)
    assert ranks.pool.shape.num_parts == 3
    assert ranks.pool.shape.nbytes <= 1 << 20
    assert ranks.pool.shape.payload_nbytes == 3 * ranks.offer.layout.part_nbytes
    for worker in ranks.workers:
        worker.after_forward(STORE)
    assert parts(ranks.pool, 1) == [rows(cache, 2, 5) for cache in ranks.caches]
    expected = parts(ranks.pool, 1)
    for worker in ranks.workers:
        worker.start_loads(LOAD)
        wait_until(lambda worker=worker: worker.take_loaded() == {"r"})
    assert [rows(cache, 3, 4) for cache in ranks.caches] == expected


def test_what_all_ranks_hold_is_stored_once_and_loaded_by_all() -> None:
    latent = torch.randn((NUM_BLOCKS, 16, 16), generator=torch.Generator().manual_seed(0))
    ranks = Ranks(LATENT, [latent.clone(), latent.clone()])
    pool = ranks.register()
    try:
        assert ranks.offer.shard == Shard(tp_size=2, num_parts=1)
        assert pool.shape.payload_nbytes == ranks.offer.layout.part_nbytes == 2 * 1024
        ranks.workers[1].after_forward(STORE)
        assert ranks.workers[1].take_report() is None, "rank 0 stores"
        ranks.workers[0].after_forward(STORE)
        report = ranks.workers[0].take_report()
        assert report is not None and report.stored == {7: pool.shape.num_parts}
        assert parts(pool, 1) == [rows(latent, 2, 5)]
        for worker in ranks.workers:
            worker.start_loads(LOAD)
            wait_until(lambda worker=worker: worker.take_loaded() == {"r"})
        assert [rows(cache, 3, 4) for cache in ranks.caches] == [rows(latent, 2, 5)] * 2
    finally:
        ranks.close()


def test_a_head_that_two_ranks_hold_is_stored_once_and_loaded_by_both() -> None:
    """Portable payloads of a model with fewer KV heads than ranks."""
    first, second = caches_of(2)
    ranks = Ranks(HEADS, [first.clone(), first.clone(), second.clone(), second.clone()], heads=2)
    threads = [threading.Thread(target=on_rank, args=(rank, register)) for rank, register in enumerate(ranks.starts())]
    for thread in threads:  # those that store nothing wait for the segments of those who do
        thread.start()
    for thread in threads:
        thread.join(30.0)
    pool = ranks.take()
    try:
        assert ranks.offer.portable
        assert ranks.offer.shard == Shard(tp_size=4, num_parts=2)
        assert ranks.offer.namespace_shard == Shard(portable=True)
        assert pool.shape.payload_nbytes == ranks.offer.layout.part_nbytes == 2 * 2048
        for worker in ranks.workers:
            worker.after_forward(STORE)
        reports = [worker.take_report() for worker in ranks.workers]
        assert [report.stored if report else {} for report in reports] == [{7: 1}, {}, {7: 1}, {}]
        assert parts(pool, 1) == [rows(first, 2, 5), rows(second, 2, 5)]
        for worker in ranks.workers:
            worker.start_loads(LOAD)
            wait_until(lambda worker=worker: worker.take_loaded() == {"r"})
        assert [rows(cache, 3, 4) for cache in ranks.caches] == [rows(c, 2, 5) for c in (first, first, second, second)]
    finally:
        ranks.close()


def test_a_payload_is_the_parts_of_all_stages() -> None:
    ranks = Ranks(HEADS, caches_of(4), stages=2)
    pool = ranks.register()
    try:
        assert ranks.offer.shard == Shard(tp_size=2, pp_size=2, num_parts=4)
        for worker in ranks.workers:
            worker.after_forward(STORE)
        assert parts(pool, 1) == [rows(cache, 2, 5) for cache in ranks.caches]
        for worker in ranks.workers:
            worker.start_loads(LOAD)
            wait_until(lambda worker=worker: worker.take_loaded() == {"r"})
        assert [rows(cache, 3, 4) for cache in ranks.caches] == parts(pool, 1)
    finally:
        ranks.close()


def test_what_the_ranks_of_a_stage_hold_alike_is_stored_once_a_stage() -> None:
    first, second = (torch.randn((NUM_BLOCKS, 16, 16), generator=torch.Generator().manual_seed(i)) for i in range(2))
    ranks = Ranks(LATENT, [first.clone(), first.clone(), second.clone(), second.clone()], stages=2)
    threads = [threading.Thread(target=on_rank, args=(rank, register)) for rank, register in enumerate(ranks.starts())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    pool = ranks.take()
    try:
        assert ranks.offer.shard == Shard(tp_size=2, pp_size=2, num_parts=2)
        for worker in ranks.workers:
            worker.after_forward(STORE)
        assert [worker.take_report() is None for worker in ranks.workers] == [False, True, False, True]
        assert parts(pool, 1) == [rows(first, 2, 5), rows(second, 2, 5)]
        for worker in ranks.workers:
            worker.start_loads(LOAD)
            wait_until(lambda worker=worker: worker.take_loaded() == {"r"})
        assert [rows(cache, 3, 4) for cache in ranks.caches] == [rows(c, 2, 5) for c in (first, first, second, second)]
    finally:
        ranks.close()


def test_stages_of_different_sizes_are_refused_in_a_sentence() -> None:
    ranks = Ranks(HEADS, [*caches_of(1), torch.zeros(NUM_BLOCKS, 1, 16, 32)], stages=2)
    try:
        with pytest.raises(
            ConfigError, match=r"^rank 0 of pipeline stage 1 keeps .*; let each stage have as many layers"
        ):
            ranks.register()
    finally:
        ranks.close()


def test_payloads_of_pipeline_stages_are_not_portable() -> None:
    ranks = Ranks(HEADS, caches_of(2), heads=1, stages=2)
    try:
        with pytest.raises(
            ConfigError, match=r"portable_ranks=true is not served .* shared out over 2 pipeline stages"
        ):
            ranks.register()
    finally:
        ranks.close()


def test_ranks_that_differ_are_refused_in_a_sentence() -> None:
    ranks = Ranks(HEADS, [*caches_of(1), torch.zeros(NUM_BLOCKS, 1, 16, 32)])
    try:
        with pytest.raises(ConfigError, match=r"^rank 1 keeps its KV cache as .*, and rank 0 as .*not served"):
            ranks.register()
    finally:
        ranks.close()


def step(ranks: Ranks, aggregator: KVOutputAggregator, *whose: int) -> KVConnectorOutput:
    """End a step in which the ranks of ``whose`` have something to tell; return what the scheduler gets."""
    outputs: list[Any] = []
    for rank, worker in enumerate(ranks.workers):
        output = KVConnectorOutput()
        if rank in whose:
            loaded = worker.take_loaded()
            output = KVConnectorOutput(
                finished_recving=loaded,
                failed_recving=worker.take_failed(),
                kv_connector_worker_meta=worker.take_report(),
            )
        outputs.append(SimpleNamespace(kv_connector_output=output))
    aggregated: KVConnectorOutput = aggregator.aggregate(outputs).kv_connector_output  # type: ignore[arg-type, union-attr]
    return aggregated


def all_done(ranks: Ranks) -> None:
    for worker in ranks.workers:
        device: Any = worker._device
        wait_until(lambda device=device: not device._done.empty())


def test_a_load_is_reported_when_it_has_ended_on_all_ranks(ranks: Ranks) -> None:
    aggregator = KVOutputAggregator(3)
    for worker in ranks.workers:
        worker.start_loads(LOAD)
    all_done(ranks)
    assert not step(ranks, aggregator, 2).finished_recving
    assert not step(ranks, aggregator, 0).finished_recving
    output = step(ranks, aggregator, 0, 1, 2)
    assert output.finished_recving == {"r"}
    assert not output.failed_recving


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
def test_a_load_that_fails_on_one_rank_has_failed(ranks: Ranks, order: tuple[int, ...]) -> None:
    def fail(piece: Piece) -> None:
        raise RuntimeError("the test's fault")

    device: Any = ranks.workers[1]._device
    device._load_piece = fail
    aggregator = KVOutputAggregator(3)
    for worker in ranks.workers:
        worker.start_loads(LOAD)
    all_done(ranks)
    outputs = [step(ranks, aggregator, rank) for rank in order]
    assert [o.finished_recving for o in outputs] == [None, None, {"r"}]
    assert [o.failed_recving for o in outputs] == [set(), set(), {"r"}]
    told = [o.kv_connector_worker_meta.failed_loads for o in outputs if o.kv_connector_worker_meta]  # type: ignore[attr-defined]
    assert set.union(*told) == {"r"}


def test_a_store_counts_the_ranks_that_have_ended_it(ranks: Ranks) -> None:
    aggregator = KVOutputAggregator(3)
    for worker in ranks.workers:
        worker.after_forward(STORE)
    seen = [step(ranks, aggregator, *whose).kv_connector_worker_meta for whose in ((0, 2), (1,))]
    assert [report.stored for report in seen] == [{7: 2}, {7: 1}]  # type: ignore[union-attr]


def parallel(**sizes: int) -> Any:
    return SimpleNamespace(**({"tensor_parallel_size": 1} | sizes))


def test_shapes_that_are_served() -> None:
    check_parallel(parallel())
    check_parallel(parallel(tensor_parallel_size=8, pipeline_parallel_size=2, data_parallel_size=4, nnodes_within_dp=1))


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        (
            {"pipeline_parallel_size": 32, "tensor_parallel_size": 2},
            rf"^64 ranks are not served .*at most {MAX_RANKS}$",
        ),
        ({"decode_context_parallel_size": 2}, r"^decode_context_parallel_size=2 is not served .*on one host"),
        ({"prefill_context_parallel_size": 4}, r"^prefill_context_parallel_size=4 is not served"),
        ({"nnodes_within_dp": 2}, r"^nnodes_within_dp=2 is not served .*share no host pool"),
        ({"tensor_parallel_size": MAX_RANKS + 1}, rf"use at most {MAX_RANKS}$"),
    ],
)
def test_other_shapes_are_refused_in_a_sentence(sizes: dict[str, int], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_parallel(parallel(**sizes))


@pytest.mark.parametrize("window", [0, 64])
def test_by_what_vllm_is_told_of_a_load_that_failed(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the request where one waits for it, also by its blocks before 0.30; by its blocks where the step needs it."""
    spec: Any = HEADS
    if window:
        spec = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=window)
    ranks = Ranks(spec, caches_of(1))
    ranks.register()
    try:
        (worker,) = ranks.workers
        device: Any = worker._device
        device._load_piece = None  # not to be called: the copy fails
        for blocks in (set(), {3, 4}):
            worker.start_loads(LOAD)
            wait_until(lambda: worker.take_loaded() == {"r"})
            assert worker.take_failed() == {"r"}
            assert worker.take_bad_blocks() == blocks
            monkeypatch.setattr(worker_module, "KVConnectorTransferResults", None)
        monkeypatch.undo()
        job = replace(LOAD.loads[0], sync_id=1)
        worker.start_loads(TierKVMetadata(loads=[job], lost=[5]))
        assert worker.take_bad_blocks() == {3, 4, 5}
        assert not worker.take_loaded() and not worker.take_failed()
    finally:
        ranks.close()
