"""The host pool: memory that the engine's workers, its scheduler and the store server map together.

Theory of operation. Each rank makes one *segment*: an anonymous memory file (memfd), which has no name anywhere, so
nothing can be left behind, and lives as long as a process holds its descriptor. A segment is ``num_slots`` cells of
``cell_nbytes`` (a multiple of the page size); slot ``i`` is cell ``i`` of every rank's segment, and holds one payload:
the ranks' parts, in rank order. Behind the cells of rank 0's segment stand the *generations*, one 64-bit counter a
slot. The scheduler raises a slot's generation before the slot gets other contents; whoever copied from a slot compares
the generation before and after, and drops the copy if it moved (a seqlock; on x86-64 plain loads and stores keep their
order). Segments are sealed against resizing, so a mapping can never fault.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import platform
import threading
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tierkv.errors import ConfigError
from tierkv.memory import available_memory
from tierkv.sizes import format_size
from tierkv.threads import leave_compute_core

PAGE = mmap.PAGESIZE
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_POPULATE_STEP = 64 << 20
#: Plain loads and stores keep their order here; other machines would need fences that Python does not have.
ORDERED_MACHINES = ("x86_64", "AMD64")


class PoolShape(msgspec.Struct, frozen=True):
    """The shape of a host pool.

    Attributes:
        num_slots: slots, each of which holds one payload.
        num_parts: ranks; a payload has one part a rank.
        part_nbytes: bytes of one rank's part.
    """

    num_slots: int
    num_parts: int
    part_nbytes: int

    @property
    def cell_nbytes(self) -> int:
        """Bytes of a cell: a part, rounded up to whole pages."""
        return -(-self.part_nbytes // PAGE) * PAGE

    @property
    def payload_nbytes(self) -> int:
        return self.part_nbytes * self.num_parts

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return sum(self.segment_nbytes(rank) for rank in range(self.num_parts))

    def segment_nbytes(self, rank: int) -> int:
        """Return the bytes of the segment of ``rank``."""
        generations = -(-self.num_slots * 8 // PAGE) * PAGE if rank == 0 else 0
        return self.num_slots * self.cell_nbytes + generations

    @classmethod
    def for_budget(cls, host_bytes: int, num_parts: int, part_nbytes: int) -> PoolShape:
        """Return the largest pool that ``host_bytes`` hold, over all ranks of the host.

        Raises:
            ConfigError: fewer than two payloads fit, or the machine has less memory than that.
        """
        shape = cls(0, num_parts, part_nbytes)
        num_slots = host_bytes // (shape.cell_nbytes * num_parts + 8)
        while num_slots and cls(num_slots, num_parts, part_nbytes).nbytes > host_bytes:
            num_slots -= 1
        if num_slots < 2:
            least = cls(2, num_parts, part_nbytes).nbytes
            raise ConfigError(
                f"host_bytes={format_size(host_bytes)} holds fewer than two chunks of this model "
                f"({format_size(part_nbytes * num_parts)} each); set host_bytes to at least {format_size(least)}"
            )
        return cls(num_slots, num_parts, part_nbytes)


def check_host_memory(host_bytes: int, reserve: int = 256 << 20) -> None:
    """Check that the machine and the cgroup have ``host_bytes`` of memory free now.

    Raises:
        ConfigError: they have not.
    """
    free = available_memory()
    if host_bytes > free - reserve:
        raise ConfigError(
            f"host_bytes={format_size(host_bytes)} does not fit: this machine (or its cgroup) has "
            f"{format_size(free)} of memory free; set host_bytes to at most {format_size(max(0, free - reserve))}"
        )


class Segment:
    """One rank's part of the pool, mapped here.

    Attributes:
        fd: the memory file; owned, closed by :meth:`close`.
        data: the whole mapping, as bytes.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        if os.fstat(fd).st_size != nbytes:
            raise ConfigError(f"a pool segment has {os.fstat(fd).st_size} bytes; its description says {nbytes}")
        if not _is_sealed(fd):
            raise ConfigError("a pool segment is not sealed against resizing; it could fault whoever maps it")
        self.fd = fd
        self._map = mmap.mmap(fd, nbytes)
        self.data: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)

    @classmethod
    def create(cls, nbytes: int, populate: bool = True) -> Segment:
        """Make a segment of ``nbytes`` and fault all of it in, with huge pages where the system gives them.

        Without ``populate`` a page is taken when it is first used.
        """
        fd = os.memfd_create("tierkv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            segment = cls(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        if populate:
            _populate(segment.data)
        return segment

    def close(self) -> None:
        """Unmap, and close the descriptor. Views that others still hold keep the memory until they go."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.data = np.empty(0, dtype=np.uint8)
            with contextlib.suppress(BufferError):  # a view is out: the mapping goes with the last one
                self._map.close()
            del self._map


def _is_sealed(fd: int) -> bool:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:  # not a memory file
        return False


def _populate(data: npt.NDArray[np.uint8]) -> None:
    """Fault in all pages, in parallel: first touch reaches 0.3 to 0.5 GB/s a thread."""
    libc = ctypes.CDLL(None, use_errno=True)
    base, nbytes = data.ctypes.data, data.nbytes
    libc.madvise(ctypes.c_void_p(base), ctypes.c_size_t(nbytes), _MADV_HUGEPAGE)
    starts = iter(range(0, nbytes, _POPULATE_STEP))
    lock = threading.Lock()

    def work() -> None:
        leave_compute_core()
        while True:
            with lock:
                at = next(starts, None)
            if at is None:
                return
            size = min(_POPULATE_STEP, nbytes - at)
            if libc.madvise(ctypes.c_void_p(base + at), ctypes.c_size_t(size), _MADV_POPULATE_WRITE):
                ctypes.memset(base + at, 0, size)  # before Linux 5.14

    threads = [threading.Thread(target=work, name="tierkv-populate") for _ in range(min(8, os.cpu_count() or 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class HostPool:
    """All segments of an engine's pool as one process sees them.

    Args:
        shape: the pool's shape.
        segments: one a rank, in rank order; owned from now on.
    """

    def __init__(self, shape: PoolShape, segments: Sequence[Segment]) -> None:
        self.shape = shape
        self.segments = list(segments)
        at = shape.num_slots * shape.cell_nbytes
        self.generations: npt.NDArray[np.uint64] = self.segments[0].data[at : at + 8 * shape.num_slots].view(np.uint64)

    @classmethod
    def from_fds(cls, shape: PoolShape, fds: Sequence[int]) -> HostPool:
        """Map the segments behind ``fds``, which are owned from now on.

        Raises:
            ConfigError: a descriptor is not a segment of that shape.
        """
        segments: list[Segment] = []
        try:
            if len(fds) != shape.num_parts or not fds:
                raise ConfigError(f"a pool of {shape.num_parts} ranks came with {len(fds)} segments")
            for rank, fd in enumerate(fds):
                segments.append(Segment(fd, shape.segment_nbytes(rank)))
        except BaseException:
            for segment in segments:
                segment.close()
            for fd in fds[len(segments) :]:
                os.close(fd)
            raise
        return cls(shape, segments)

    def fds(self) -> list[int]:
        return [segment.fd for segment in self.segments]

    def parts(self, slot: int) -> list[memoryview]:
        """Return the writable bytes of the payload in ``slot``: one view a rank, in rank order."""
        at = slot * self.shape.cell_nbytes
        return [s.data[at : at + self.shape.part_nbytes].data for s in self.segments]

    def read(self, slot: int, generation: int, into: npt.NDArray[np.uint8]) -> bool:
        """Copy the payload in ``slot`` to ``into`` and return whether it was that generation's throughout."""
        if int(self.generations[slot]) != generation:
            return False
        at, start, size = slot * self.shape.cell_nbytes, 0, self.shape.part_nbytes
        for segment in self.segments:
            np.copyto(into[start : start + size], segment.data[at : at + size])
            start += size
        return int(self.generations[slot]) == generation

    def close(self) -> None:
        """Unmap all segments and close their descriptors."""
        self.generations = np.empty(0, dtype=np.uint64)
        for segment in self.segments:
            segment.close()


def check_machine() -> None:
    """Check that this machine keeps the order of plain loads and stores, on which the generations rely.

    Raises:
        ConfigError: it does not.
    """
    if platform.machine() not in ORDERED_MACHINES:
        raise ConfigError(
            f"TierKV shares memory between processes without fences, which is right on x86-64 only; "
            f"this machine is {platform.machine()}"
        )
