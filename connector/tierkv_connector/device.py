"""Copies between the GPU's paged KV cache and the host pool: the interface, and the backend for CPU.

A chunk's cell in the pool is, for each layer in order, its blocks in order, each as vLLM holds it in memory (opaque
bytes: :mod:`tierkv.layout` says what they mean). A *region* is one layer's cache seen as a matrix, one row a block.
Layers of several KV cache groups may share memory; their blocks do not, because all groups draw them from one pool.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from tierkv.errors import ConfigError
from tierkv.health import Repeated
from tierkv.pool import PoolShape, Segment
from tierkv.threads import leave_compute_core
from tierkv_connector.jobs import LoadJob, Piece, StoreJob

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

    def rebind(self, regions: Sequence[Region]) -> None:
        """Go on with these caches, of the same shape. No copy may be under way."""

    def close(self) -> None:
        """Wait for copies under way and give everything back. Idempotent."""


class Region(NamedTuple):
    """One layer, or one KV head of it.

    Attributes:
        cache: its cache in 8-byte words (or bytes), one row a block. A row is one piece of memory, but for KV heads
            that a backend keeps token by token: there a row has several axes.
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
        matrix = words(block_matrix(cache, num_blocks), offset)
        region = Region(matrix, offset, matrix.shape[1] * matrix.element_size(), blocks_per_chunk, table)
        regions.append(region)
        offset += region.nbytes
    return regions


def nbytes_by_table(regions: Sequence[Region]) -> list[int]:
    """Return the bytes of one block of each block table, over all its layers."""
    nbytes = [0] * (1 + max(region.table for region in regions))
    for region in regions:
        nbytes[region.table] += region.block_nbytes
    return nbytes


def moved(pieces: Sequence[Piece], nbytes: Sequence[int]) -> int:
    """Return the bytes of ``pieces``, where a block of each table has ``nbytes``."""
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


def words(rows: torch.Tensor, offset: int) -> torch.Tensor:
    """Return ``rows`` in 8-byte words, or in bytes where they or their place in a cell are no whole number of words.

    Args:
        rows: ``[blocks, ...]``, axes from the outermost to the innermost in memory, elements without gaps.
        offset: where their bytes begin in a cell.

    Returns:
        The same memory, as few axes as it has gaps.
    """
    shape, strides = list(rows.shape), list(rows.stride())
    for axis in range(rows.dim() - 1, 1, -1):  # the axes of a row that have no gap between them become one
        if shape[axis - 1] == 1:
            del shape[axis - 1], strides[axis - 1]
        elif shape[axis] == 1 or strides[axis - 1] == strides[axis] * shape[axis]:
            inner = strides[axis] if shape[axis] > 1 else strides[axis - 1]
            shape[axis - 1 : axis + 1], strides[axis - 1 : axis + 1] = [shape[axis - 1] * shape[axis]], [inner]
    rows = rows.as_strided(shape, strides if shape[-1] > 1 else [*strides[:-1], 1])
    size = rows.element_size()
    places = [rows.storage_offset() * size, *(stride * size for stride in strides[:-1]), shape[-1] * size, offset]
    return rows.view(torch.uint8 if any(place % 8 for place in places) else torch.int64)


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
        from tierkv_connector.cuda import CudaDevice

        return CudaDevice(regions, shape, segment)
    raise ConfigError(f"the KV cache is on a {kind!r} device; TierKV copies from and to 'cuda' and 'cpu'")


def cells_of(regions: Sequence[Region], shape: PoolShape, segment: Segment) -> list[torch.Tensor]:
    """Return for each region the segment as ``[slots, blocks, ...]``, rows as its cache has them."""
    data = segment.data[: shape.num_slots * shape.cell_nbytes].reshape(shape.num_slots, shape.cell_nbytes)
    views = []
    for region in regions:
        cells = data[:, region.cell_offset : region.cell_offset + region.nbytes]
        rows = torch.from_numpy(cells).view(region.cache.dtype)
        views.append(rows.unflatten(1, (region.num_blocks, *region.cache.shape[1:])))
    return views


class CpuDevice:
    """Backend where the "GPU" is host memory: stores at once on the worker's thread, loads on a thread beside it.

    A store is over before the next step begins, so nothing needs a fence. Copies go through numpy, which releases the
    GIL and, unlike torch, starts no OpenMP threads beside those that compute.
    """

    def __init__(self, regions: Sequence[Region], shape: PoolShape, segment: Segment) -> None:
        self._shape, self._segment = shape, segment
        self.rebind(regions)
        self._block_nbytes = nbytes_by_table(regions)
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

    def rebind(self, regions: Sequence[Region]) -> None:
        cells = cells_of(regions, self._shape, self._segment)
        self._layers = [(r.table, r.cache.numpy(), c.numpy()) for r, c in zip(regions, cells, strict=True)]

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
        self._done.put(Done(job, ok, moved(pieces, self._block_nbytes), time.perf_counter() - began))
        return ok

    def _store_piece(self, piece: Piece) -> None:
        spans = piece.spans
        for table, cache, cells in self._layers:
            first, ids = spans[table]
            if len(ids) < cells.shape[1]:  # a state that was not kept: nothing of the chunk before may stay there
                cells[piece.slot] = 0
            if not ids:
                continue
            rows = cells[piece.slot, first : first + len(ids)]
            if cache.flags.c_contiguous:
                np.take(cache, ids, axis=0, out=rows, mode="clip")
            else:  # of which take would make a copy first, all of it
                rows[...] = cache[list(ids)]

    def _load_piece(self, piece: Piece) -> None:
        spans = [(span.first, list(span.block_ids)) for span in piece.spans]
        for table, cache, cells in self._layers:
            first, ids = spans[table]
            if ids:
                cache[ids] = cells[piece.slot, first : first + len(ids)]
