"""The backend for CUDA: what a step stores is one batch of copies, and what it loads is another.

A store waits (on the device) for the compute submitted before it; whatever later writes its blocks waits (on the
device) for its event. A load waits for the compute submitted before it: its blocks may still be in use by the request
that had them, and vLLM may just have zeroed them. The host never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tierkv.errors import ConfigError
from tierkv.health import Repeated
from tierkv.pool import PoolShape, Segment
from tierkv_connector.device import Done, Region, moved, nbytes_by_table
from tierkv_connector.jobs import LoadJob, Piece, Span, StoreJob

#: Every copy of a device that does not work fails.
_failures = Repeated()

#: Copies ``sizes[i]`` bytes from ``sources[i]`` to ``targets[i]`` on the current stream, all in one call of the driver.
#: The last argument says that nothing on the device writes the sources.
BatchCopy = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], None]


def batch_copy() -> BatchCopy | None:
    """Return vLLM's call for a batch of copies, which its builds for CUDA have, or None."""
    try:
        from vllm import _custom_ops

        torch.ops._C_cache_ops.swap_blocks_batch  # noqa: B018  raises where this build has it not
    except (ImportError, AttributeError, RuntimeError):
        return None
    copy: BatchCopy = _custom_ops.swap_blocks_batch
    return copy


class Mover(Protocol):
    """Copies pieces on the current stream."""

    def move(self, pieces: Sequence[Piece], to_host: bool) -> object:
        """Submit the copies of ``pieces``; return what must live until they are over."""


class OpenMover(Protocol):
    """Opens what copies the rows of regions between their caches and a pinned segment of a pool."""

    def __call__(self, regions: Sequence[Region], shape: PoolShape, segment: Segment) -> Mover: ...


class BatchMover:
    """Copies straight between blocks and cells, by one call a step and direction.

    Args:
        regions: each with rows in one piece.
        shape: the pool's shape.
        segment: this rank's, pinned.
        copy: makes the copies.
    """

    def __init__(self, regions: Sequence[Region], shape: PoolShape, segment: Segment, copy: BatchCopy) -> None:
        self._copy = copy
        self._pool = segment.data.ctypes.data
        self._cell_nbytes = shape.cell_nbytes
        self._tables: list[_Addresses] = []
        for table in range(1 + max(region.table for region in regions)):
            ours = [region for region in regions if region.table == table]
            self._tables.append(
                _Addresses(
                    _column(region.cache.data_ptr() for region in ours),
                    _column(region.cache.stride(0) * region.cache.element_size() for region in ours),
                    _column(region.cell_offset for region in ours),
                    _column(region.block_nbytes for region in ours),
                    ours[0].num_blocks,
                )
            )
        widest = max(region.block_nbytes for region in regions)
        self._zero = torch.zeros(widest, dtype=torch.uint8, device=regions[0].cache.device)

    def move(self, pieces: Sequence[Piece], to_host: bool) -> object:
        gpu, host, sizes = (torch.from_numpy(array) for array in self.copies(pieces, to_host))
        if len(sizes):
            self._copy(*((gpu, host) if to_host else (host, gpu)), sizes, not to_host)
        return gpu, host, sizes

    def copies(
        self, pieces: Sequence[Piece], to_host: bool = False
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the addresses on the GPU and in the pool, and the bytes, of each copy; neighbours are one copy.

        To the host, what a piece leaves out of its cell (a state that was not kept) is zeroed.
        """
        parts = [self._of_span(piece.slot, table, *span) for piece in pieces for table, span in enumerate(piece.spans)]
        if to_host:
            parts += [self._zeros(piece.slot, *item) for piece in pieces for item in enumerate(piece.spans)]
        gpu, host, sizes = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        if not len(sizes):
            return gpu, host, sizes
        follows = (gpu[1:] == gpu[:-1] + sizes[:-1]) & (host[1:] == host[:-1] + sizes[:-1])
        first = np.flatnonzero(np.concatenate([[True], ~follows]))
        return gpu[first], host[first], np.add.reduceat(sizes, first)

    def _of_span(self, slot: int, table: int, first: int, block_ids: tuple[int, ...]) -> list[npt.NDArray[np.int64]]:
        at = self._tables[table]
        gpu = at.base + np.array(block_ids, dtype=np.int64) * at.stride
        return self._pairs(slot, at, gpu, np.arange(first, first + len(block_ids), dtype=np.int64))

    def _zeros(self, slot: int, table: int, span: Span) -> list[npt.NDArray[np.int64]]:
        at = self._tables[table]
        places = np.arange(at.num_blocks, dtype=np.int64)
        places = places[(places < span.first) | (places >= span.first + len(span.block_ids))]
        gpu = np.full((len(at.base), len(places)), self._zero.data_ptr(), dtype=np.int64)
        return self._pairs(slot, at, gpu, places)

    def _pairs(
        self, slot: int, at: _Addresses, gpu: npt.NDArray[np.int64], places: npt.NDArray[np.int64]
    ) -> list[npt.NDArray[np.int64]]:
        host = self._pool + slot * self._cell_nbytes + at.offset + places * at.nbytes
        return [gpu.ravel(), host.ravel(), np.broadcast_to(at.nbytes, gpu.shape).ravel()]


class _Addresses(NamedTuple):
    """The regions of a block table, one a row: where blocks begin, how far apart they are, the same in a cell; and the
    blocks of a chunk.
    """

    base: npt.NDArray[np.int64]
    stride: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    num_blocks: int


def _column(values: Any) -> npt.NDArray[np.int64]:
    return np.array(list(values), dtype=np.int64)[:, None]


class GatherMover:
    """Copies by way of a cell on the device: where a batch of copies is not to be had, or rows are in many pieces.

    One transfer a chunk, and as many gathers (or scatters) as there are regions.

    Args:
        regions: of any kind.
        shape: the pool's shape.
        segment: this rank's, pinned.
    """

    def __init__(self, regions: Sequence[Region], shape: PoolShape, segment: Segment) -> None:
        self._regions = list(regions)
        self._cells = torch.from_numpy(segment.data[: shape.num_slots * shape.cell_nbytes]).view(shape.num_slots, -1)
        # One a direction, each used by one stream: what follows on it may overwrite it.
        self._staging = [self._stage(shape.cell_nbytes) for _ in range(2)]

    def _stage(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._regions[0].cache.device)

    def move(self, pieces: Sequence[Piece], to_host: bool) -> object:
        for piece in pieces:
            self._submit(piece, to_host)
        return None

    def _submit(self, piece: Piece, to_host: bool) -> None:
        stage, cell, ids = self._staging[to_host], self._cells[piece.slot], self._upload(piece)
        ranges = self.ranges(piece, whole=to_host)
        if to_host:
            for region in self._regions:
                if len(piece.spans[region.table].block_ids) < region.num_blocks:  # a state that was not kept
                    stage[region.cell_offset : region.cell_offset + region.nbytes].zero_()
        if not to_host:
            for begin, end in ranges:
                stage[begin:end].copy_(cell[begin:end], non_blocking=True)
        for region, rows in zip(self._regions, self._rows(stage, piece), strict=True):
            if to_host:
                torch.index_select(region.cache, 0, ids[region.table], out=rows)
            elif len(rows):
                region.cache.index_copy_(0, ids[region.table], rows)
        if to_host:
            for begin, end in ranges:
                cell[begin:end].copy_(stage[begin:end], non_blocking=True)

    def _upload(self, piece: Piece) -> list[torch.Tensor]:
        """Return the block ids of each span on the device."""
        device = self._regions[0].cache.device
        ids = torch.tensor(piece.all_block_ids, dtype=torch.int64, pin_memory=device.type == "cuda")
        return list(ids.to(device, non_blocking=True).split([len(span.block_ids) for span in piece.spans]))

    def _rows(self, stage: torch.Tensor, piece: Piece) -> list[torch.Tensor]:
        """Return each region's part of the cell on the device, the blocks of ``piece`` only."""
        rows, spans = [], piece.spans
        for region in self._regions:
            first, ids = spans[region.table]
            part = stage[region.cell_offset : region.cell_offset + region.nbytes].view(region.cache.dtype)
            rows.append(part.view(region.num_blocks, *region.cache.shape[1:])[first : first + len(ids)])
        return rows

    def ranges(self, piece: Piece, whole: bool = False) -> list[tuple[int, int]]:
        """Return the parts of a cell that are blocks of ``piece``: where each begins and ends, as few as possible.

        Args:
            whole: the blocks that ``piece`` leaves out of a cell too.
        """
        ranges: list[tuple[int, int]] = []
        spans = piece.spans
        for region in self._regions:
            first, num = (0, region.num_blocks) if whole else (spans[region.table][0], len(spans[region.table][1]))
            if not num:
                continue
            begin = region.cell_offset + first * region.block_nbytes
            end = begin + num * region.block_nbytes
            if ranges and ranges[-1][1] == begin:
                ranges[-1] = (ranges[-1][0], end)
            else:
                ranges.append((begin, end))
        return ranges


@dataclass(eq=False)
class _Batch:
    """The copies of one direction and step: ``ended`` is the event after which none reads or writes any more."""

    jobs: list[tuple[LoadJob | StoreJob, bool, int]]  # whether it could be started, and bytes
    blocks: frozenset[int]  # that are read: of stores only
    began: Any
    ended: Any
    kept: object = None

    def done(self) -> list[Done]:
        """Return its jobs, each with its share of the time."""
        seconds = self.began.elapsed_time(self.ended) / 1e3
        total = sum(nbytes for _, _, nbytes in self.jobs) or 1
        return [Done(job, ok, nbytes, seconds * nbytes / total) for job, ok, nbytes in self.jobs]


class CudaDevice:
    """A device whose copies run on two streams beside the compute's, a batch of each kind a step.

    Args:
        regions: the layers.
        shape: the pool's shape.
        segment: this rank's; pinned until :meth:`close`.
        mover: opens what makes the copies; None: :func:`open_mover`.

    Raises:
        ConfigError: the pool cannot be pinned.
    """

    def __init__(
        self, regions: Sequence[Region], shape: PoolShape, segment: Segment, mover: OpenMover | None = None
    ) -> None:
        self._device = regions[0].cache.device
        self._block_nbytes = nbytes_by_table(regions)
        self._tables = {region.table: (region.cache.shape[0], region.num_blocks) for region in regions}
        self._num_slots = shape.num_slots
        self._segment = segment.data
        _register(self._segment)
        self._open_mover = partial(mover or open_mover, shape=shape, segment=segment)
        self.rebind(regions)
        self._store_stream: Any = torch.cuda.Stream(self._device)
        self._load_stream: Any = torch.cuda.Stream(self._device)
        self._pending: list[_Batch] = []
        self._open = True

    def store(self, jobs: Sequence[StoreJob]) -> None:
        self._submit([(job, (job.piece,)) for job in jobs], self._store_stream, to_host=True)

    def load(self, jobs: Sequence[LoadJob]) -> None:
        self._submit([(job, job.pieces) for job in jobs], self._load_stream, to_host=False)

    def load_now(self, jobs: Sequence[LoadJob]) -> list[LoadJob]:
        if not jobs:
            return []
        self.load(jobs)
        batch = self._pending[-1]
        torch.cuda.current_stream(self._device).wait_event(batch.ended)
        return [job for job, ok, _ in batch.jobs if not ok and isinstance(job, LoadJob)]

    def fence(self, block_ids: Sequence[int]) -> None:
        reused = set(block_ids)
        stream = torch.cuda.current_stream(self._device)
        for batch in self._pending:
            if not batch.blocks.isdisjoint(reused):
                stream.wait_event(batch.ended)
                self._load_stream.wait_event(batch.ended)

    def finished(self) -> list[Done]:
        over = [batch for batch in self._pending if batch.ended.query()]
        self._pending = [batch for batch in self._pending if batch not in over]
        return [done for batch in over for done in batch.done()]

    def rebind(self, regions: Sequence[Region]) -> None:
        self._mover = self._open_mover(regions)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._store_stream.synchronize()
            self._load_stream.synchronize()
            _unregister(self._segment)
            self._pending = []

    def _submit(
        self, jobs: Sequence[tuple[LoadJob | StoreJob, Sequence[Piece]]], stream: Any, *, to_host: bool
    ) -> None:
        """Start a batch. A job that is impossible, or all where the batch is, is reported as failed when it is over."""
        if not jobs:
            return
        self._after_compute(stream)
        good = [all(map(self._is_possible, pieces)) for _, pieces in jobs]
        moving = [piece for (_, pieces), ok in zip(jobs, good, strict=True) if ok for piece in pieces]
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        kept: object = None
        with torch.cuda.stream(stream):
            began.record(stream)
            try:
                kept = self._mover.move(moving, to_host) if moving else None
            except Exception:  # reported: vLLM recomputes, nothing here may raise into the engine
                _failures.note("a copy between the GPU and the host pool could not be started", exc_info=True)
                good = [False] * len(jobs)
            ended.record(stream)
        blocks = frozenset(block for piece in moving for block in piece.all_block_ids) if to_host else frozenset()
        told = [(job, ok, moved(pieces, self._block_nbytes)) for (job, pieces), ok in zip(jobs, good, strict=True)]
        self._pending.append(_Batch(told, blocks, began, ended, kept))

    def _after_compute(self, stream: Any) -> None:
        """Let ``stream`` wait for the compute submitted so far."""
        stream.wait_stream(torch.cuda.current_stream(self._device))

    def _is_possible(self, piece: Piece) -> bool:
        """Return whether a piece is within the pool and the cache: what is not must never reach the driver."""
        possible = 0 <= piece.slot < self._num_slots
        for table, (first, ids) in enumerate(piece.spans):
            num_blocks, per_chunk = self._tables[table]
            possible = possible and 0 <= first <= first + len(ids) <= per_chunk
            possible = possible and (not ids or (min(ids) >= 0 and max(ids) < num_blocks))
        if not possible:
            _failures.note(f"a copy between the GPU and the host pool is outside of them: {piece}")
        return possible


def open_mover(regions: Sequence[Region], shape: PoolShape, segment: Segment) -> Mover:
    """Return what copies the rows of these regions: in batches, where they are in one piece and vLLM has the call."""
    copy = batch_copy()
    if copy is None or any(region.cache.dim() > 2 for region in regions):
        return GatherMover(regions, shape, segment)
    return BatchMover(regions, shape, segment, copy)


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
