"""Copies between the GPU's paged KV cache and the host pool: one interface, a backend for CPU and one for CUDA.

A chunk's cell in the pool is, for each layer in order, its blocks in order, each as vLLM holds it in memory (opaque
bytes: :mod:`tierkv.layout` says what they mean). A *region* is one layer's cache seen as a matrix, one row a block.
Layers of several KV cache groups may share memory; their blocks do not, because all groups draw them from one pool.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from tierkv.errors import ConfigError
from tierkv.health import Repeated
from tierkv.pool import PoolShape, Segment
from tierkv.threads import leave_compute_core
from tierkv_connector.metadata import LoadJob, Piece, StoreJob

#: Every copy of a device that does not work fails.
_failures = Repeated()


class Done(NamedTuple):
    """A finished copy. ``nbytes`` moved in ``seconds``."""

    job: LoadJob | StoreJob
    ok: bool
    nbytes: int
    seconds: float


class Device(Protocol):
    """Copies for one rank. Methods are called on the worker's thread, and none waits for a copy on CUDA."""

    def store(self, jobs: Sequence[StoreJob]) -> None:
        """Copy blocks to slots, after the compute that was submitted before."""

    def load(self, jobs: Sequence[LoadJob]) -> None:
        """Copy slots to blocks, after the compute that was submitted before."""

    def load_now(self, jobs: Sequence[LoadJob]) -> list[LoadJob]:
        """Copy slots to blocks before the compute that is submitted next; return the jobs that failed."""

    def fence(self, block_ids: Sequence[int]) -> None:
        """Make what is submitted from now on wait until copies out of these blocks are over."""

    def finished(self) -> list[Done]:
        """Return the copies that have finished since the last call."""

    def close(self) -> None:
        """Wait for copies under way and give everything back. Idempotent."""


class Region(NamedTuple):
    """One layer.

    Attributes:
        cache: its cache as a matrix of 8-byte words (or bytes), one row a block.
        cell_offset: where its bytes begin in a cell.
        block_nbytes: bytes of a block.
        num_blocks: blocks a chunk.
        table: its block table, as an index of a piece's spans.
    """

    cache: torch.Tensor
    cell_offset: int
    block_nbytes: int
    num_blocks: int
    table: int

    @property
    def nbytes(self) -> int:
        """Bytes of a chunk."""
        return self.block_nbytes * self.num_blocks


def make_regions(
    kv_caches: Sequence[torch.Tensor], num_blocks: int, blocks_per_chunk: int, table: int = 0, offset: int = 0
) -> list[Region]:
    """Return the regions of the caches of one block table's layers, in the order of their bytes in a cell.

    Args:
        kv_caches: one tensor a layer, blocks along the first axis (``shape[0] / num_blocks`` of them a vLLM block).
        num_blocks: vLLM's number of blocks.
        blocks_per_chunk: blocks a chunk.
        table: the block table, as an index of a piece's spans.
        offset: where the first one's bytes begin in a cell.

    Raises:
        ConfigError: a block's bytes are not in one piece.
    """
    regions = []
    for cache in kv_caches:
        matrix = block_matrix(cache, num_blocks)
        if offset % matrix.element_size():  # behind layers whose blocks are no whole number of words
            matrix = matrix.view(torch.uint8)
        region = Region(matrix, offset, matrix.shape[1] * matrix.element_size(), blocks_per_chunk, table)
        regions.append(region)
        offset += region.nbytes
    return regions


def _nbytes_by_table(regions: Sequence[Region]) -> list[int]:
    """Return the bytes of one block of each block table, over all its layers."""
    nbytes = [0] * (1 + max(region.table for region in regions))
    for region in regions:
        nbytes[region.table] += region.block_nbytes
    return nbytes


def _moved(pieces: Sequence[Piece], nbytes: Sequence[int]) -> int:
    return sum(len(span.block_ids) * nbytes[i] for piece in pieces for i, span in enumerate(piece.spans))


def block_matrix(cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Return a layer's cache as ``[num_blocks, words]``, sharing memory.

    Raises:
        ConfigError: a block's bytes are not in one piece.
    """
    ratio, rest = divmod(cache.shape[0], num_blocks)
    inner = cache.shape[1:].numel()
    if rest or not _dense(cache) or (ratio > 1 and cache.stride(0) != inner):
        raise ConfigError(
            f"this attention backend keeps the KV cache with shape {tuple(cache.shape)} and strides "
            f"{tuple(cache.stride())}, in which a block is not one piece of memory; choose another kv_cache_layout"
        )
    size = cache.element_size()
    start, stride, row = cache.storage_offset() * size, cache.stride(0) * ratio * size, inner * ratio * size
    dtype = torch.int64 if not (start % 8 or stride % 8 or row % 8) else torch.uint8
    unit = dtype.itemsize
    flat = torch.empty(0, dtype=dtype, device=cache.device)
    return flat.set_(cache.untyped_storage(), start // unit, (num_blocks, row // unit), (stride // unit, 1))


def _dense(cache: torch.Tensor) -> bool:
    """Return whether the axes after the first cover their memory without gaps, in whatever order."""
    expected = 1
    for stride, size in sorted((cache.stride(d), cache.shape[d]) for d in range(1, cache.dim()) if cache.shape[d] != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def open_device(regions: Sequence[Region], shape: PoolShape, segment: Segment) -> Device:
    """Return the backend for the device that the caches are on. It copies from and to the cells of ``segment``."""
    kind = regions[0].cache.device.type
    if kind == "cpu":
        return CpuDevice(regions, shape, segment)
    if kind == "cuda":
        return CudaDevice(regions, shape, segment)
    raise ConfigError(f"the KV cache is on a {kind!r} device; TierKV copies from and to 'cuda' and 'cpu'")


def _cells(regions: Sequence[Region], shape: PoolShape, segment: Segment) -> list[torch.Tensor]:
    """Return for each region the segment as ``[slots, blocks, words]``."""
    data = segment.data[: shape.num_slots * shape.cell_nbytes].reshape(shape.num_slots, shape.cell_nbytes)
    views = []
    for region in regions:
        cells = data[:, region.cell_offset : region.cell_offset + region.nbytes]
        words = torch.from_numpy(cells).view(region.cache.dtype)
        views.append(words.unflatten(1, (region.num_blocks, -1)))
    return views


class CpuDevice:
    """Backend where the "GPU" is host memory: stores at once on the worker's thread, loads on a thread beside it.

    A store is over before the next step begins, so nothing needs a fence. Copies go through numpy, which releases the
    GIL and, unlike torch, starts no OpenMP threads beside those that compute.
    """

    def __init__(self, regions: Sequence[Region], shape: PoolShape, segment: Segment) -> None:
        cells = _cells(regions, shape, segment)
        self._layers = [(r.table, r.cache.numpy(), c.numpy()) for r, c in zip(regions, cells, strict=True)]
        self._block_nbytes = _nbytes_by_table(regions)
        self._done: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._todo: queue.SimpleQueue[LoadJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._load_loop, name="tierkv-load", daemon=True)
        self._thread.start()

    def store(self, jobs: Sequence[StoreJob]) -> None:
        for job in jobs:
            self._timed(job, (job.piece,), self._store_piece)

    def load(self, jobs: Sequence[LoadJob]) -> None:
        for job in jobs:
            self._todo.put(job)

    def load_now(self, jobs: Sequence[LoadJob]) -> list[LoadJob]:
        return [job for job in jobs if not self._timed(job, job.pieces, self._load_piece)]

    def fence(self, block_ids: Sequence[int]) -> None:
        pass

    def finished(self) -> list[Done]:
        done = []
        while not self._done.empty():
            done.append(self._done.get())
        return done

    def close(self) -> None:
        if self._thread.is_alive():
            self._todo.put(None)
            self._thread.join()
        self._layers = []

    def _load_loop(self) -> None:
        leave_compute_core()
        while (job := self._todo.get()) is not None:
            self._timed(job, job.pieces, self._load_piece)

    def _timed(self, job: LoadJob | StoreJob, pieces: Sequence[Piece], copy: Callable[[Piece], None]) -> bool:
        began, ok = time.perf_counter(), True
        try:
            for piece in pieces:
                copy(piece)
        except Exception:  # reported: vLLM recomputes, nothing here may raise into the engine
            _failures.note("a copy between the GPU and the host pool failed", exc_info=True)
            ok = False
        self._done.put(Done(job, ok, _moved(pieces, self._block_nbytes), time.perf_counter() - began))
        return ok

    def _store_piece(self, piece: Piece) -> None:
        spans = piece.spans
        for table, cache, cells in self._layers:
            first, ids = spans[table]
            np.take(cache, ids, axis=0, out=cells[piece.slot, first : first + len(ids)], mode="clip")

    def _load_piece(self, piece: Piece) -> None:
        spans = [(span.first, list(span.block_ids)) for span in piece.spans]
        for table, cache, cells in self._layers:
            first, ids = spans[table]
            if ids:
                cache[ids] = cells[piece.slot, first : first + len(ids)]


@dataclass(eq=False)
class _Copy:
    """A copy on its way: ``ended`` is the CUDA event after which nothing of it reads or writes any more."""

    job: LoadJob | StoreJob
    ok: bool
    began: Any
    ended: Any
    nbytes: int
    buffers: list[torch.Tensor]


class CudaDevice:
    """Backend for CUDA: gathers and scatters on the device, one transfer a chunk, all on two side streams.

    A store waits (on the device) for the compute submitted before it; whatever later writes its blocks waits (on the
    device) for its event. A load waits for the compute submitted before it: its blocks may still be in use by the
    request that had them, and vLLM may just have zeroed them. The host never waits.
    """

    def __init__(self, regions: Sequence[Region], shape: PoolShape, segment: Segment) -> None:
        self._regions = list(regions)
        self._device = regions[0].cache.device
        self._block_nbytes = _nbytes_by_table(regions)
        self._segment = segment.data
        _register(self._segment)
        cells = self._segment[: shape.num_slots * shape.cell_nbytes].reshape(shape.num_slots, shape.cell_nbytes)
        self._pool = torch.from_numpy(cells)[:, : shape.part_nbytes]
        self._store_stream: Any = torch.cuda.Stream(self._device)
        self._load_stream: Any = torch.cuda.Stream(self._device)
        self._pending: list[_Copy] = []

    def store(self, jobs: Sequence[StoreJob]) -> None:
        if jobs:
            self._store_stream.wait_stream(torch.cuda.current_stream(self._device))
        for job in jobs:
            self._submit(job, (job.piece,), self._store_stream, self._store_piece)

    def load(self, jobs: Sequence[LoadJob]) -> None:
        if jobs:
            self._load_stream.wait_stream(torch.cuda.current_stream(self._device))
        for job in jobs:
            self._submit(job, job.pieces, self._load_stream, self._load_piece)

    def load_now(self, jobs: Sequence[LoadJob]) -> list[LoadJob]:
        num_before = len(self._pending)
        self.load(jobs)
        stream = torch.cuda.current_stream(self._device)
        for copy in self._pending[num_before:]:
            stream.wait_event(copy.ended)
        return [copy.job for copy in self._pending[num_before:] if isinstance(copy.job, LoadJob) and not copy.ok]

    def fence(self, block_ids: Sequence[int]) -> None:
        reused = set(block_ids)
        stream = torch.cuda.current_stream(self._device)
        for copy in self._pending:
            if isinstance(copy.job, StoreJob) and not reused.isdisjoint(copy.job.piece.all_block_ids):
                stream.wait_event(copy.ended)
                self._load_stream.wait_event(copy.ended)

    def finished(self) -> list[Done]:
        done: list[Done] = []
        waiting: list[_Copy] = []
        for copy in self._pending:
            if copy.ended.query():
                seconds = copy.began.elapsed_time(copy.ended) / 1e3
                done.append(Done(copy.job, copy.ok, copy.nbytes, seconds))
            else:
                waiting.append(copy)
        self._pending = waiting
        return done

    def close(self) -> None:
        if self._regions:
            self._store_stream.synchronize()
            self._load_stream.synchronize()
            _unregister(self._segment)
            self._regions, self._pending = [], []

    def _submit(
        self,
        job: LoadJob | StoreJob,
        pieces: Sequence[Piece],
        stream: Any,
        copy: Callable[[Piece], torch.Tensor],
    ) -> None:
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        nbytes = _moved(pieces, self._block_nbytes)
        kept: list[torch.Tensor] = []  # device buffers live until the event has passed
        ok = True
        with torch.cuda.stream(stream):
            began.record(stream)
            try:
                for piece in pieces:
                    kept.append(copy(piece))
            except Exception:  # reported: vLLM recomputes, nothing here may raise into the engine
                _failures.note("a copy between the GPU and the host pool could not be started", exc_info=True)
                ok = False
            ended.record(stream)  # a failure too is reported only when nothing of it is under way any more
        self._pending.append(_Copy(job, ok, began, ended, nbytes, kept))

    def _views(self, cell: torch.Tensor, piece: Piece) -> list[torch.Tensor]:
        """Return each region's part of a cell on the device, the blocks of ``piece`` only."""
        views, spans = [], piece.spans
        for region in self._regions:
            first, ids = spans[region.table]
            blocks = cell[region.cell_offset : region.cell_offset + region.nbytes].view(region.cache.dtype)
            views.append(blocks.view(region.num_blocks, -1)[first : first + len(ids)])
        return views

    def _indices(self, piece: Piece) -> list[torch.Tensor]:
        """Return the block ids of each span on the device."""
        spans = piece.spans
        ids = torch.tensor(piece.all_block_ids, pin_memory=True).to(self._device, non_blocking=True)
        return list(ids.split([len(span.block_ids) for span in spans]))

    def _ranges(self, piece: Piece) -> list[tuple[int, int]]:
        """Return the parts of a cell that a piece has blocks of: where each begins and ends, as few as possible."""
        ranges: list[tuple[int, int]] = []
        spans = piece.spans
        for region in self._regions:
            if not spans[region.table].block_ids:
                continue
            begin, end = region.cell_offset, region.cell_offset + region.nbytes
            if ranges and ranges[-1][1] == begin:
                ranges[-1] = (ranges[-1][0], end)
            else:
                ranges.append((begin, end))
        return ranges

    def _store_piece(self, piece: Piece) -> torch.Tensor:
        cell = torch.empty(self._pool.shape[1], dtype=torch.uint8, device=self._device)
        indices = self._indices(piece)
        for region, view in zip(self._regions, self._views(cell, piece), strict=True):
            torch.index_select(region.cache, 0, indices[region.table], out=view)
        self._pool[piece.slot].copy_(cell, non_blocking=True)
        return cell

    def _load_piece(self, piece: Piece) -> torch.Tensor:
        cell = torch.empty(self._pool.shape[1], dtype=torch.uint8, device=self._device)
        for begin, end in self._ranges(piece):  # all of it, but for windows of which no block is wanted
            cell[begin:end].copy_(self._pool[piece.slot, begin:end], non_blocking=True)
        indices = self._indices(piece)
        for region, view in zip(self._regions, self._views(cell, piece), strict=True):
            if len(view):
                region.cache.index_copy_(0, indices[region.table], view)
        return cell


def _register(segment: Any) -> None:
    """Pin a segment for CUDA.

    Raises:
        ConfigError: the driver refuses.
    """
    status = torch.cuda.cudart().cudaHostRegister(segment.ctypes.data, segment.nbytes, 0)
    if int(status) != 0:
        raise ConfigError(
            f"CUDA cannot pin {segment.nbytes} bytes of the host pool (error {int(status)}); lower host_bytes, or "
            f"raise the limit of locked memory (ulimit -l)"
        )


def _unregister(segment: Any) -> None:
    torch.cuda.cudart().cudaHostUnregister(segment.ctypes.data)
