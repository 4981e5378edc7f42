"""Copies between a paged KV cache and the pool: any layout, failures, and the order of work on CUDA streams."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fake_cuda import MOVERS, FakeCuda, cuda_device
from tierkv.errors import ConfigError
from tierkv.health import Repeated
from tierkv.pool import HostPool, PoolShape, Segment
from tierkv_connector import cuda as cuda_module
from tierkv_connector import device as device_module
from tierkv_connector.cuda import BatchMover, CudaDevice, GatherMover, open_mover
from tierkv_connector.device import (
    CpuDevice,
    Device,
    Done,
    Region,
    block_matrix,
    make_regions,
    open_device,
)
from tierkv_connector.metadata import LoadJob, Piece, Span, StoreJob

NUM_BLOCKS = 6
BLOCKS_PER_CHUNK = 2
NUM_SLOTS = 3


def filled(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    data = np.random.Generator(np.random.PCG64(seed)).bytes(int(np.prod(shape)) * dtype.itemsize)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def plain() -> torch.Tensor:
    """[B, H, N, 2D], contiguous."""
    return filled((NUM_BLOCKS, 2, 4, 6))


def permuted() -> torch.Tensor:
    """The same logical shape; in memory the tokens of a block stand before its heads."""
    return filled((NUM_BLOCKS, 4, 2, 6)).permute(0, 2, 1, 3)


def shared_storage() -> torch.Tensor:
    """One of several layers in one allocation: an offset, and blocks further apart than they are long."""
    return filled((NUM_BLOCKS, 3, 2, 4, 6), torch.bfloat16)[:, 1]


def small_blocks() -> torch.Tensor:
    """Two blocks of the kernel make one of the manager."""
    return filled((2 * NUM_BLOCKS, 2, 2, 6), torch.float16)


def odd_bytes() -> torch.Tensor:
    """Blocks that are no whole number of 8-byte words."""
    return filled((NUM_BLOCKS, 1, 3, 5), torch.uint8)


def latent() -> torch.Tensor:
    """[B, N, C], as MLA keeps it."""
    return filled((NUM_BLOCKS, 4, 10), torch.bfloat16)


def single_head() -> torch.Tensor:
    """An axis of length one, whose stride says nothing."""
    return torch.as_strided(filled((NUM_BLOCKS, 24)), (NUM_BLOCKS, 1, 4, 6), (24, 999, 6, 1))


LAYOUTS = [plain, permuted, shared_storage, small_blocks, odd_bytes, latent, single_head]


def memory(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor in the order in which they stand in memory."""
    axes = sorted(range(tensor.dim()), key=lambda d: (-tensor.stride(d), d))
    return tensor.permute(axes).contiguous().view(torch.uint8).numpy().tobytes()


def block_bytes(cache: torch.Tensor, block: int) -> bytes:
    """The reference: a block's bytes, kernel block by kernel block."""
    ratio = cache.shape[0] // NUM_BLOCKS
    return b"".join(memory(cache[i]) for i in range(block * ratio, (block + 1) * ratio))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_is_a_row(layout: Callable[[], torch.Tensor]) -> None:
    cache = layout()
    matrix = block_matrix(cache, NUM_BLOCKS)
    assert matrix.shape[0] == NUM_BLOCKS
    for block in range(NUM_BLOCKS):
        assert matrix[block].view(torch.uint8).numpy().tobytes() == block_bytes(cache, block)
    before = cache.clone()
    matrix[1].zero_()  # the same memory, and no other block's
    assert block_bytes(cache, 1) == bytes(len(block_bytes(cache, 1)))
    for block in (0, 2, 3, 4, 5):
        assert block_bytes(cache, block) == block_bytes(before, block)


def test_regions_stand_one_after_the_other() -> None:
    caches = [plain(), latent(), odd_bytes()]
    regions = make_regions(caches, NUM_BLOCKS, BLOCKS_PER_CHUNK)
    assert [r.block_nbytes for r in regions] == [len(block_bytes(c, 0)) for c in caches] == [192, 80, 15]
    assert [r.cell_offset for r in regions] == [0, 384, 544]


@pytest.mark.parametrize(
    "cache",
    [
        filled((NUM_BLOCKS, 2, 4, 8))[..., :6],  # a gap after each token
        filled((2, NUM_BLOCKS, 4, 6)).permute(1, 0, 2, 3),  # keys of all blocks, then values of all blocks
        filled((2, NUM_BLOCKS, 4, 6)),  # blocks along another axis
        filled((2 * NUM_BLOCKS, 3, 4, 6))[:, 1],  # a gap between the kernel's blocks of one block
        torch.zeros(1).expand(NUM_BLOCKS, 2, 4, 6),
    ],
)
def test_a_block_in_several_pieces_is_refused_in_a_sentence(cache: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match=r"shape \(.*\) and strides \(.*\).*choose another kv_cache_layout"):
        block_matrix(cache, NUM_BLOCKS)


def test_a_device_of_another_kind_is_refused_in_a_sentence() -> None:
    region = Region(torch.empty(NUM_BLOCKS, 8, device="meta"), 0, 32, 1, 0)
    with pytest.raises(ConfigError, match=r"on a 'meta' device.*'cuda' and 'cpu'"):
        open_device([region], PoolShape(1, 1, 32), SimpleNamespace())  # type: ignore[arg-type]


def make_pool(part_nbytes: int, num_slots: int = NUM_SLOTS) -> HostPool:
    shape = PoolShape(num_slots, 1, part_nbytes)
    return HostPool(shape, [Segment.create(shape.segment_nbytes(0))])


@contextlib.contextmanager
def cpu_device(caches: list[torch.Tensor]) -> Iterator[tuple[Device, HostPool]]:
    regions = make_regions(caches, NUM_BLOCKS, BLOCKS_PER_CHUNK)
    pool = make_pool(sum(r.block_nbytes for r in regions) * BLOCKS_PER_CHUNK)
    device = open_device(regions, pool.shape, pool.segments[0])
    assert isinstance(device, CpuDevice)
    try:
        yield device, pool
    finally:
        device.close()
        device.close()
        pool.close()


def wait(device: Device, count: int) -> list[Done]:
    """Return ``count`` finished copies: the load thread takes its time."""
    done: list[Done] = []
    thread = getattr(device, "_thread", None)
    while len(done) < count:
        done += device.finished()
        assert thread is None or thread.is_alive()
    return done


def payload(pool: HostPool, slot: int) -> bytes:
    return bytes(pool.parts(slot)[0])


def chunk_bytes(caches: list[torch.Tensor], blocks: tuple[int, ...]) -> bytes:
    """The reference: a payload is each layer's blocks, layer after layer."""
    return b"".join(block_bytes(cache, block) for cache in caches for block in blocks)


CACHES = [[layout] for layout in LAYOUTS] + [[plain, permuted, latent], [shared_storage, small_blocks]]


@pytest.mark.parametrize("layouts", CACHES)
def test_a_stored_chunk_is_its_blocks_layer_after_layer(layouts: list[Callable[[], torch.Tensor]]) -> None:
    caches = [layout() for layout in layouts]
    with cpu_device(caches) as (device, pool):
        device.store([StoreJob(7, Piece(2, 0, (5, 1))), StoreJob(8, Piece(0, 0, (2, 3)))])
        done = wait(device, 2)
        assert payload(pool, 2) == chunk_bytes(caches, (5, 1))
        assert payload(pool, 0) == chunk_bytes(caches, (2, 3))
        assert payload(pool, 1) == bytes(pool.shape.payload_nbytes)
        assert [(d.job.job_id, d.ok) for d in done if isinstance(d.job, StoreJob)] == [(7, True), (8, True)]
        assert all(d.nbytes == pool.shape.payload_nbytes and d.seconds >= 0 for d in done)
        assert device.finished() == []


@pytest.mark.parametrize("layouts", CACHES)
def test_what_is_loaded_is_what_was_stored(layouts: list[Callable[[], torch.Tensor]]) -> None:
    caches = [layout() for layout in layouts]
    original = [block_bytes(cache, block) for cache in caches for block in range(NUM_BLOCKS)]
    with cpu_device(caches) as (device, pool):
        device.store([StoreJob(1, Piece(0, 0, (0, 1))), StoreJob(2, Piece(1, 0, (2, 3)))])
        wait(device, 2)
        for cache in caches:
            block_matrix(cache, NUM_BLOCKS).zero_()
        device.load([LoadJob("r", (Piece(1, 0, (4, 5)), Piece(0, 1, (3,)), Piece(0, 0, (1,))))])
        (done,) = wait(device, 1)
        assert done.ok
        assert done.nbytes == 2 * pool.shape.payload_nbytes
    for at, cache in enumerate(caches):
        was = original[at * NUM_BLOCKS : (at + 1) * NUM_BLOCKS]
        empty = bytes(len(was[0]))
        assert [block_bytes(cache, i) for i in range(NUM_BLOCKS)] == [empty, was[0], empty, was[1], was[2], was[3]]


def test_failures_are_reported_and_do_not_stop_the_device(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "_failures", Repeated())  # nothing was logged a moment ago
    caches = [plain()]
    with cpu_device(caches) as (device, _):
        device.store([StoreJob(1, Piece(NUM_SLOTS, 0, (0, 1))), StoreJob(2, Piece(1, 0, (0, 1)))])
        device.load([LoadJob("bad", (Piece(1, 0, (NUM_BLOCKS, 1)),)), LoadJob("good", (Piece(1, 0, (2, 3)),))])
        outcome = {getattr(d.job, "req_id", None) or d.job.job_id: d.ok for d in wait(device, 4)}  # type: ignore[union-attr]
        assert outcome == {1: False, 2: True, "bad": False, "good": True}
    assert [block_bytes(caches[0], i) for i in (2, 3)] == [block_bytes(plain(), i) for i in (0, 1)]
    assert "copy between the GPU and the host pool failed" in caplog.text


def test_closing_waits_for_loads_under_way() -> None:
    caches = [plain()]
    with cpu_device(caches) as (device, _):
        device.store([StoreJob(1, Piece(0, 0, (0, 1)))])
        device.load([LoadJob(str(i), (Piece(0, 0, (4, 5)),)) for i in range(50)])
        device.close()
        assert len(device.finished()) == 51


# -- several block tables: groups of layers with blocks of their own, in memory that they share


def grouped() -> tuple[list[Region], list[torch.Tensor], list[torch.Tensor]]:
    """Two layers of one group, and one of another over the same memory, with blocks half as long."""
    memory_of_all = filled((2, NUM_BLOCKS, 2, 8, 6))
    first = [memory_of_all[0], memory_of_all[1]]
    second = [memory_of_all[0]]  # its pages are as long: half the tokens, twice the heads, say
    regions = make_regions(first, NUM_BLOCKS, 1)
    return regions + make_regions(second, NUM_BLOCKS, 2, 1, sum(r.nbytes for r in regions)), first, second


def test_groups_that_share_memory_are_stored_and_loaded_by_their_own_blocks() -> None:
    regions, first, second = grouped()
    assert [(r.cell_offset, r.nbytes, r.table) for r in regions] == [(0, 384, 0), (384, 384, 0), (768, 768, 1)]
    pool = make_pool(1536)
    device = open_device(regions, pool.shape, pool.segments[0])
    expected = chunk_bytes(first, (5,)) + chunk_bytes(second, (1, 3))
    device.store([StoreJob(1, Piece.of(2, [Span(0, (5,)), Span(0, (1, 3))]))])
    (done,) = wait(device, 1)
    assert done.nbytes == 1536
    assert payload(pool, 2) == expected
    for cache in first:
        cache.zero_()
    # A window has passed the first block of the second group.
    device.load([LoadJob("r", (Piece.of(2, [Span(0, (4,)), Span(1, (2,))]),))])
    (done,) = wait(device, 1)
    assert done.nbytes == 768 + 384
    got = chunk_bytes(first, (4,)) + chunk_bytes(second, (2,))
    assert got == expected[:768] + expected[1152:]
    assert not any(block_bytes(cache, i).strip(b"\0") for cache in first for i in (1, 3, 5))
    # It has passed all of it.
    device.load([LoadJob("r", (Piece.of(2, [Span(0, (3,)), Span(2, ())]),))])
    (done,) = wait(device, 1)
    assert done.ok and done.nbytes == 768
    assert chunk_bytes(first, (3,)) == expected[:768]
    device.close()
    pool.close()


def test_regions_behind_odd_bytes() -> None:
    """Layers of whole words that stand behind one of none are copied by bytes."""
    caches = [odd_bytes(), plain(), latent()]
    regions = make_regions(caches[:1], NUM_BLOCKS, 1) + make_regions(caches[1:], NUM_BLOCKS, 1, 1, 15)
    assert [r.cache.dtype for r in regions] == [torch.uint8] * 3
    pool = make_pool(sum(r.nbytes for r in regions))
    device = open_device(regions, pool.shape, pool.segments[0])
    device.store([StoreJob(1, Piece.of(0, [Span(0, (4,)), Span(0, (2,))]))])
    wait(device, 1)
    assert payload(pool, 0) == block_bytes(caches[0], 4) + block_bytes(caches[1], 2) + block_bytes(caches[2], 2)
    device.close()
    pool.close()


def test_fences_are_over_the_blocks_of_every_group(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(0)
    monkeypatch.setattr(cuda_module.torch, "cuda", cuda)
    regions, _, _ = grouped()
    pool = make_pool(1536)
    device = cuda_device(cuda, regions, pool)
    device.store([StoreJob(1, Piece.of(0, [Span(0, (5,)), Span(0, (1, 3))]))])
    for block, waits in ((2, 0), (3, 1), (5, 1)):
        before = len(cuda.compute.work)
        device.fence([block])
        assert len(cuda.compute.work) - before == waits, block
    device.close()
    pool.close()


def test_only_the_parts_of_a_cell_that_are_wanted_travel() -> None:
    regions, _, _ = grouped()
    pool = make_pool(1536)
    mover = GatherMover(regions, pool.shape, pool.segments[0])
    both, none = Span(0, (1,)), Span(0, ())
    assert mover.ranges(Piece.of(0, [both, Span(0, (2, 3))])) == [(0, 1536)]
    assert mover.ranges(Piece.of(0, [both, none])) == [(0, 768)]
    assert mover.ranges(Piece.of(0, [none, Span(1, (2,))])) == [(1152, 1536)]
    pool.close()


# -- CUDA: the order of what is submitted, on a machine that runs it as late and as crosswise as it is allowed to


class CudaBench:
    """A GPU on which blocks are computed, stored, given away, zeroed and loaded, and what must come out of it."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch, mover: str = "batch") -> None:
        self.rng = Random(seed)
        self.cuda = FakeCuda(seed + 1)
        monkeypatch.setattr(cuda_module.torch, "cuda", self.cuda)
        self.caches = [torch.zeros(8, 2, dtype=torch.int64), torch.zeros(8, 1, dtype=torch.int64)]
        regions = make_regions(self.caches, 8, 2)
        self.pool = make_pool(sum(r.block_nbytes for r in regions) * 2, 4)
        self.device = cuda_device(self.cuda, regions, self.pool, mover)
        self.blocks = [0] * 8  # what each block holds once all that was submitted has run
        self.slots: dict[int, tuple[int, int]] = {}  # likewise; filled and reported slots only
        self.storing: dict[int, tuple[int, tuple[int, int]]] = {}
        self.loading: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.value = 0
        self.num_read = 0

    def compute(self, blocks: list[int], zero: bool = False) -> None:
        """A forward (or vLLM's zeroing) writes blocks."""
        for block in blocks:
            self.value += 1
            value = 0 if zero else self.value
            self.blocks[block] = value
            self.cuda.submit(lambda block=block, value=value: self._write(block, value))

    def _write(self, block: int, value: int) -> None:
        for cache in self.caches:
            cache[block] = value

    def attend(self, blocks: Sequence[int]) -> None:
        """A forward reads blocks, which must hold what they are to hold now."""
        expected = [self.blocks[block] for block in blocks]

        def read() -> None:
            got = [int(cache[block][0]) for cache in self.caches for block in blocks]
            self.num_read += 1
            assert got == expected * len(self.caches), "a forward attends over other bytes"

        self.cuda.submit(read)

    def step(self, number: int) -> None:
        """One step as the worker half runs it: fence, forward, stores, loads; each block of a load is zeroed before."""
        taken = {block for _, blocks in self.loading.values() for block in blocks}
        free = [block for block in range(8) if block not in taken]
        self.rng.shuffle(free)
        written, target = free[: self.rng.randint(1, 3)], tuple(free[3:5])
        reading = {slot for slot, _ in self.loading.values()}
        full = [slot for slot in self.slots if slot not in reading]
        load = bool(full) and len(target) == 2 and self.rng.random() < 0.5
        busy = reading | {slot for slot, _ in self.storing.values()}
        self.device.fence([*written, *(target if load else ())])
        self.compute(written + (list(target) if load else []), zero=False)
        if load:
            self.compute(list(target), zero=True)
            slot = self.rng.choice(full)
            busy.add(slot)
            now = self.rng.random() < 0.5
            job = LoadJob(f"r{number}", (Piece(slot, 1, target[1:]), Piece(slot, 0, target[:1])), int(now))
            self.loading[job.req_id] = (slot, target)
            self.blocks[target[0]], self.blocks[target[1]] = self.slots[slot]
            if now:
                assert self.device.load_now([job]) == []
                self.attend(target)
            else:
                self.device.load([job])
        empty = [slot for slot in range(4) if slot not in busy]
        if empty and self.rng.random() < 0.7:
            slot = self.rng.choice(empty)
            source = tuple(self.rng.sample([b for b in free if not load or b not in target], 2))
            self.slots.pop(slot, None)
            self.storing[number] = (slot, (self.blocks[source[0]], self.blocks[source[1]]))
            self.device.store([StoreJob(number, Piece(slot, 0, source))])
        for _ in range(self.rng.randrange(12)):
            self.cuda.run_one()
        self.collect()

    def collect(self) -> None:
        for done in self.device.finished():
            assert done.ok
            if isinstance(done.job, LoadJob):
                _, blocks = self.loading.pop(done.job.req_id)
                for block in blocks:
                    self.check_block(block)
            else:
                slot, values = self.storing.pop(done.job.job_id)
                self.slots[slot] = values
                cell = np.frombuffer(payload(self.pool, slot), dtype=np.int64)
                a, b = values
                assert cell.tolist() == [a, a, b, b, a, b], "a chunk was stored with other bytes"

    def check_block(self, block: int) -> None:
        for cache in self.caches:
            assert set(cache[block].tolist()) == {self.blocks[block]}, "a block has other bytes"

    def finish(self) -> None:
        self.cuda.run_all()
        self.collect()
        assert not self.loading and not self.storing
        for block in range(8):
            self.check_block(block)
        self.device.close()
        self.device.close()
        self.pool.close()


def live(
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    mover: str,
    spoil: Callable[[CudaBench], None] = lambda bench: None,
) -> int:
    """Run 40 steps and return how often a forward read what was loaded in its own step."""
    bench = CudaBench(seed, monkeypatch, mover)
    spoil(bench)
    for number in range(40):
        bench.step(number)
    bench.finish()
    return bench.num_read


@pytest.mark.parametrize("mover", MOVERS)
def test_copies_on_cuda_are_ordered(mover: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(live(seed, monkeypatch, mover) for seed in range(150)) > 300


def _load_now_is_load(bench: CudaBench) -> None:
    def load(jobs: Sequence[LoadJob]) -> list[LoadJob]:
        bench.device.load(jobs)
        return []

    bench.device.load_now = load  # type: ignore[method-assign]


def _no_fence(bench: CudaBench) -> None:
    bench.device.fence = lambda block_ids: None  # type: ignore[method-assign]


def _deaf(name: str) -> Callable[[CudaBench], None]:
    def spoil(bench: CudaBench) -> None:
        bench.cuda.deaf = getattr(bench.device, name) if name != "compute" else bench.cuda.compute

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(_no_fence, id="no fence"),
        pytest.param(_deaf("_store_stream"), id="stores do not wait for the compute"),
        pytest.param(_deaf("_load_stream"), id="loads wait for nothing"),
        pytest.param(_deaf("compute"), id="the compute does not wait for stores"),
        pytest.param(_load_now_is_load, id="the compute does not wait for what it is to read"),
    ],
)
@pytest.mark.parametrize("mover", MOVERS)
def test_without_one_of_the_waits_bytes_are_wrong(
    mover: str, spoil: Callable[[CudaBench], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError, match="other bytes"):
        for seed in range(150):
            live(seed, monkeypatch, mover, spoil)


def test_a_load_that_fails_half_way_is_reported_once_its_first_half_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are given away when it is reported: nothing may write them after that."""
    bench = CudaBench(0, monkeypatch, "gather")
    bench.cuda.fails_at = 1
    bench.device.load([LoadJob("r", (Piece(0, 0, (1,)), Piece(0, 1, (2,))))])
    assert bench.device.finished() == []
    bench.cuda.run_all()
    (done,) = bench.device.finished()
    assert (done.job.req_id, done.ok) == ("r", False)  # type: ignore[union-attr]
    assert bench.device.finished() == []
    bench.device.close()
    bench.pool.close()


@pytest.mark.parametrize("mover", MOVERS)
def test_a_load_that_the_forward_needs_fails_at_once(mover: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM is to hear of it in the same step; its slot is held until nothing of it is under way."""
    bench = CudaBench(0, monkeypatch, mover)
    bench.cuda.fails_at = 0
    job = LoadJob("r", (Piece(0, 0, (1,)), Piece(0, 1, (2,))), 1)
    assert bench.device.load_now([job]) == [job]
    assert bench.device.load_now([]) == []
    assert bench.device.finished() == []
    bench.cuda.run_all()
    (done,) = bench.device.finished()
    assert (done.job, done.ok) == (job, False)
    bench.device.close()
    bench.pool.close()


IMPOSSIBLE = [
    pytest.param(Piece(4, 0, (1, 2)), id="no such slot"),
    pytest.param(Piece(-1, 0, (1, 2)), id="a slot before the first"),
    pytest.param(Piece(0, 0, (1, 8)), id="no such block"),
    pytest.param(Piece(0, 0, (-1,)), id="a block before the first"),
    pytest.param(Piece(0, 1, (1, 2)), id="more blocks than a chunk has"),
    pytest.param(Piece(0, -1, (1, 2)), id="a place before the first"),
]


@pytest.mark.parametrize("piece", IMPOSSIBLE)
def test_what_is_outside_of_the_pool_or_the_cache_never_reaches_the_driver(
    piece: Piece, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is impossible fails alone: the driver gets addresses, and would write whatever is there."""
    bench = CudaBench(0, monkeypatch)
    bench.compute([1, 2])
    good, bad = StoreJob(1, Piece(3, 0, (1, 2))), StoreJob(2, piece)
    bench.device.store([bad, good])
    wanted = LoadJob("good", (Piece(3, 0, (5, 6)),), 1), LoadJob("bad", (Piece(3, 0, (3, 4)), piece), 2)
    bench.cuda.run_all()
    assert bench.device.load_now(wanted) == [wanted[1]]
    bench.cuda.run_all()
    assert [(done.job, done.ok) for done in bench.device.finished()] == [
        (bad, False),
        (good, True),
        (wanted[0], True),
        (wanted[1], False),
    ]
    assert [cache[[3, 4, 5, 6], 0].tolist() for cache in bench.caches] == [[0, 0, 1, 2]] * 2
    bench.device.close()
    bench.pool.close()


def test_a_step_makes_one_batch_of_copies_a_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are neighbours in the cache and in the cell are one copy; only loads may run in any order."""
    bench = CudaBench(0, monkeypatch)
    bench.device.store([StoreJob(1, Piece(0, 0, (1, 2))), StoreJob(2, Piece(1, 0, (5, 3)))])
    bench.device.load([LoadJob("a", (Piece(2, 0, (6, 7)), Piece(3, 1, (0,)))), LoadJob("b", (Piece(2, 0, (4,)),))])
    assert bench.cuda.batches == [(2 * 1 + 2 * 2, False), (2 * 1 + 2 * 1 + 2 * 1, True)]
    bench.device.store([])
    bench.device.load([])
    assert len(bench.cuda.batches) == 2
    bench.cuda.run_all()
    done = bench.device.finished()
    assert [d.nbytes for d in done] == [48, 48, 72, 24]
    assert sum(d.seconds for d in done) == pytest.approx(2 * 1e-3), "of two batches of a millisecond"
    bench.device.close()
    bench.pool.close()


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("layouts", CACHES)
def test_cuda_makes_of_any_layout_what_the_cpu_makes(
    layouts: list[Callable[[], torch.Tensor]], mover: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(0)
    monkeypatch.setattr(cuda_module.torch, "cuda", cuda)
    caches = [layout() for layout in layouts]
    regions = make_regions(caches, NUM_BLOCKS, BLOCKS_PER_CHUNK)
    pool = make_pool(sum(r.block_nbytes for r in regions) * BLOCKS_PER_CHUNK)
    device = cuda_device(cuda, regions, pool, mover)
    expected = chunk_bytes(caches, (5, 1)), chunk_bytes(caches, (2, 3))
    device.store([StoreJob(7, Piece(2, 0, (5, 1))), StoreJob(8, Piece(0, 0, (2, 3)))])
    cuda.run_all()
    assert (payload(pool, 2), payload(pool, 0), payload(pool, 1)) == (*expected, bytes(pool.shape.payload_nbytes))
    device.load([LoadJob("r", (Piece(2, 1, (4,)), Piece(0, 0, (0, 5))))])
    cuda.run_all()
    assert chunk_bytes(caches, (0, 5)) == expected[1]
    assert chunk_bytes(caches, (4,)) == chunk_bytes(caches, (1,))
    device.close()
    pool.close()


@pytest.mark.parametrize("mover", ["cpu", *MOVERS])
def test_of_a_state_that_was_not_kept_nothing_of_the_slots_last_owner_stays(
    mover: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention, state = filled((NUM_BLOCKS, 48), seed=1), filled((NUM_BLOCKS, 20), seed=2)
    regions = make_regions([attention], NUM_BLOCKS, BLOCKS_PER_CHUNK)
    regions += make_regions([state], NUM_BLOCKS, 1, 1, regions[-1].nbytes)
    stored = BLOCKS_PER_CHUNK * 48 * 4
    pool = make_pool(stored + 20 * 4 + 8)
    pool.segments[0].data[:] = 0xAB
    cuda = FakeCuda(0)
    monkeypatch.setattr(cuda_module.torch, "cuda", cuda)
    cpu = mover == "cpu"
    device: Device = (
        CpuDevice(regions, pool.shape, pool.segments[0]) if cpu else cuda_device(cuda, regions, pool, mover)
    )
    device.store([StoreJob(1, Piece.of(1, [Span(0, (3, 1)), Span(0, ())]))])
    cuda.run_all()
    assert payload(pool, 1) == chunk_bytes([attention], (3, 1)) + bytes(20 * 4) + b"\xab" * 8, "8: another writes them"
    assert payload(pool, 0) == payload(pool, 2) == b"\xab" * pool.shape.payload_nbytes
    device.close()
    pool.close()


def test_rows_in_several_pieces_go_by_way_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(1 << 12)
    one_piece = make_regions([plain()], NUM_BLOCKS, BLOCKS_PER_CHUNK)
    several = [Region(permuted()[:, 0], 0, 96, BLOCKS_PER_CHUNK, 0)]
    where = pool.shape, pool.segments[0]
    assert cuda_module.batch_copy() is None, "vLLM's build for CPUs has it not"
    assert isinstance(open_mover(one_piece, *where), GatherMover)
    monkeypatch.setattr(cuda_module, "batch_copy", lambda: lambda *args: None)
    assert isinstance(open_mover(one_piece, *where), BatchMover)
    assert isinstance(open_mover(several, *where), GatherMover)
    pool.close()


def test_the_pool_is_pinned_once_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = CudaBench(0, monkeypatch)
    data = bench.pool.segments[0].data
    assert bench.cuda.pinned == {data.ctypes.data: data.nbytes}
    bench.device.close()
    assert bench.cuda.pinned == {}
    bench.device.close()
    bench.pool.close()


def test_a_load_that_the_forward_needs_is_over_when_the_call_is(caplog: pytest.LogCaptureFixture) -> None:
    """Where the GPU is host memory."""
    caches = [plain()]
    with cpu_device(caches) as (device, _):
        device.store([StoreJob(1, Piece(1, 0, (0, 1)))])
        bad, good = LoadJob("bad", (Piece(1, 0, (NUM_BLOCKS, 1)),), 1), LoadJob("good", (Piece(1, 0, (2, 3)),), 2)
        assert device.load_now([bad, good]) == [bad]
        assert [block_bytes(caches[0], i) for i in (2, 3)] == [block_bytes(plain(), i) for i in (0, 1)]
        assert [(d.job, d.ok) for d in device.finished()][1:] == [(bad, False), (good, True)]


def test_a_pool_that_cannot_be_pinned_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(0)
    refusing = SimpleNamespace(cudaHostRegister=lambda *args: 2)
    monkeypatch.setattr(cuda, "cudart", lambda: refusing)
    monkeypatch.setattr(cuda_module.torch, "cuda", cuda)
    pool = make_pool(64)
    with pytest.raises(ConfigError, match=r"CUDA cannot pin .* \(error 2\); lower host_bytes"):
        CudaDevice(make_regions([torch.zeros(8, 4)], 8, 4), pool.shape, pool.segments[0])
    pool.close()
