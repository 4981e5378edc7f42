"""Copies between the GPU's paged KV cache and the host pool: one interface, a backend for CPU and one for CUDA.

A chunk's cell in the pool is, for each layer in order, its blocks in order, each as vLLM holds it in memory (opaque
bytes: :mod:`tierkv.layout` says what they mean). A *region* is one layer's cache seen as a matrix, one row a block.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from tierkv.errors import ConfigError
from tierkv.pool import HostPool
from tierkv.threads import leave_compute_core
from tierkv_connector.metadata import LoadJob, Piece, StoreJob

logger = logging.getLogger("tierkv")


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

    def fence(self, block_ids: Sequence[int]) -> None:
        """Make what is submitted from now on wait until copies out of these blocks are over."""

    def finished(self) -> list[Done]:
        """Return the copies that have finished since the last call."""

    def close(self) -> None:
        """Wait for copies under way and give everything back. Idempotent."""


class Region(NamedTuple):
    """One layer: its cache as a matrix of 8-byte words (or bytes), one row a block, and where it is in a cell."""

    cache: torch.Tensor
    cell_offset: int
    block_nbytes: int


def make_regions(kv_caches: Sequence[torch.Tensor], num_blocks: int, blocks_per_chunk: int) -> list[Region]:
    """Return the regions of layer caches, in the order in which their bytes stand in a cell.

    Args:
        kv_caches: one tensor a layer, blocks along the first axis (``shape[0] / num_blocks`` of them a vLLM block).
        num_blocks: vLLM's number of blocks.
        blocks_per_chunk: blocks a chunk.

    Raises:
        ConfigError: a block's bytes are not in one piece.
    """
    regions, offset = [], 0
    for cache in kv_caches:
        matrix = block_matrix(cache, num_blocks)
        nbytes = matrix.shape[1] * matrix.element_size()
        regions.append(Region(matrix, offset, nbytes))
        offset += nbytes * blocks_per_chunk
    return regions


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


def open_device(regions: Sequence[Region], pool: HostPool, rank: int, blocks_per_chunk: int) -> Device:
    """Return the backend for the device that the caches are on."""
    kind = regions[0].cache.device.type
    if kind == "cpu":
        return CpuDevice(regions, pool, rank, blocks_per_chunk)
    if kind == "cuda":
        return CudaDevice(regions, pool, rank, blocks_per_chunk)
    raise ConfigError(f"the KV cache is on a {kind!r} device; TierKV copies from and to 'cuda' and 'cpu'")


def _cells(regions: Sequence[Region], pool: HostPool, rank: int, blocks_per_chunk: int) -> list[torch.Tensor]:
    """Return for each region the pool as ``[slots, blocks, words]``."""
    shape = pool.shape
    data = pool.segments[rank].data[: shape.num_slots * shape.cell_nbytes]
    views = []
    for region in regions:
        nbytes = region.block_nbytes * blocks_per_chunk
        cells = data.reshape(shape.num_slots, shape.cell_nbytes)[:, region.cell_offset : region.cell_offset + nbytes]
        words = torch.from_numpy(cells).view(region.cache.dtype)
        views.append(words.unflatten(1, (blocks_per_chunk, -1)))
    return views


class CpuDevice:
    """Backend where the "GPU" is host memory: stores at once on the worker's thread, loads on a thread beside it.

    A store is over before the next step begins, so nothing needs a fence. Copies go through numpy, which releases the
    GIL and, unlike torch, starts no OpenMP threads beside those that compute.
    """

    def __init__(self, regions: Sequence[Region], pool: HostPool, rank: int, blocks_per_chunk: int) -> None:
        cells = _cells(regions, pool, rank, blocks_per_chunk)
        self._layers = [(r.cache.numpy(), c.numpy()) for r, c in zip(regions, cells, strict=True)]
        self._block_nbytes = sum(r.block_nbytes for r in regions)
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

    def _timed(self, job: LoadJob | StoreJob, pieces: Sequence[Piece], copy: Callable[[Piece], None]) -> None:
        began, ok = time.perf_counter(), True
        try:
            for piece in pieces:
                copy(piece)
        except Exception:  # reported: vLLM recomputes, nothing here may raise into the engine
            logger.exception("a copy between the GPU and the host pool failed")
            ok = False
        num_blocks = sum(len(piece.block_ids) for piece in pieces)
        self._done.put(Done(job, ok, num_blocks * self._block_nbytes, time.perf_counter() - began))

    def _store_piece(self, piece: Piece) -> None:
        stop = piece.first + len(piece.block_ids)
        for cache, cells in self._layers:
            np.take(cache, piece.block_ids, axis=0, out=cells[piece.slot, piece.first : stop], mode="clip")

    def _load_piece(self, piece: Piece) -> None:
        stop, ids = piece.first + len(piece.block_ids), list(piece.block_ids)
        for cache, cells in self._layers:
            cache[ids] = cells[piece.slot, piece.first : stop]


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

    def __init__(self, regions: Sequence[Region], pool: HostPool, rank: int, blocks_per_chunk: int) -> None:
        self._regions = list(regions)
        self._blocks_per_chunk = blocks_per_chunk
        self._device = regions[0].cache.device
        self._block_nbytes = sum(r.block_nbytes for r in regions)
        shape = pool.shape
        self._segment = pool.segments[rank].data
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

    def fence(self, block_ids: Sequence[int]) -> None:
        reused = set(block_ids)
        stream = torch.cuda.current_stream(self._device)
        for copy in self._pending:
            if isinstance(copy.job, StoreJob) and not reused.isdisjoint(copy.job.piece.block_ids):
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
        nbytes = sum(len(piece.block_ids) for piece in pieces) * self._block_nbytes
        kept: list[torch.Tensor] = []  # device buffers live until the event has passed
        ok = True
        with torch.cuda.stream(stream):
            began.record(stream)
            try:
                for piece in pieces:
                    kept.append(copy(piece))
            except Exception:  # reported: vLLM recomputes, nothing here may raise into the engine
                logger.exception("a copy between the GPU and the host pool could not be started")
                ok = False
            ended.record(stream)  # a failure too is reported only when nothing of it is under way any more
        self._pending.append(_Copy(job, ok, began, ended, nbytes, kept))

    def _views(self, cell: torch.Tensor, piece: Piece) -> list[torch.Tensor]:
        """Return each region's part of a cell on the device, the blocks of ``piece`` only."""
        views = []
        for region in self._regions:
            nbytes = region.block_nbytes * self._blocks_per_chunk
            blocks = cell[region.cell_offset : region.cell_offset + nbytes].view(region.cache.dtype)
            rows = blocks.view(self._blocks_per_chunk, -1)
            views.append(rows[piece.first : piece.first + len(piece.block_ids)])
        return views

    def _store_piece(self, piece: Piece) -> torch.Tensor:
        cell = torch.empty(self._pool.shape[1], dtype=torch.uint8, device=self._device)
        index = torch.tensor(piece.block_ids, pin_memory=True).to(self._device, non_blocking=True)
        for region, view in zip(self._regions, self._views(cell, piece), strict=True):
            torch.index_select(region.cache, 0, index, out=view)
        self._pool[piece.slot].copy_(cell, non_blocking=True)
        return cell

    def _load_piece(self, piece: Piece) -> torch.Tensor:
        cell = self._pool[piece.slot].to(self._device, non_blocking=True)
        index = torch.tensor(piece.block_ids, pin_memory=True).to(self._device, non_blocking=True)
        for region, view in zip(self._regions, self._views(cell, piece), strict=True):
            region.cache.index_copy_(0, index, view)
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
