"""Stands for a GPU: runs what is submitted as late, and across its streams as crosswise, as it is allowed to."""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import torch

from tierkv.pool import HostPool, PoolShape, Segment
from tierkv_connector.cuda import BatchMover, CudaDevice, GatherMover, Mover, OpenMover
from tierkv_connector.device import Region
from tierkv_connector.jobs import Piece


class Ticket:
    """What a recorded event stands for."""

    done = False


class FakeStream:
    """A queue of work: functions, tickets to mark, and tickets to wait for."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.work: deque[tuple[str, Any]] = deque()
        cuda.streams.append(self)

    def wait_event(self, event: FakeEvent) -> None:
        if self.cuda.obeys(self):
            self.work.append(("wait", event.ticket))

    def wait_stream(self, other: FakeStream) -> None:
        event = FakeEvent()
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        while self.work:
            self.cuda.run_one()

    def runnable(self) -> bool:
        return bool(self.work) and (self.work[0][0] != "wait" or self.work[0][1].done)


class FakeEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        self.ticket = Ticket()
        self.ticket.done = True  # an event that was never recorded is over

    def record(self, stream: FakeStream) -> None:
        self.ticket = Ticket()
        stream.work.append(("mark", self.ticket))

    def query(self) -> bool:
        return self.ticket.done

    def elapsed_time(self, other: FakeEvent) -> float:
        return 1.0


class FakeCuda:
    """Stands for ``torch.cuda``. Runs the head of any stream that may run, at random.

    Attributes:
        deaf: a stream whose waits are left out, to show that they are needed.
        fails_at: copies that can be started; the next one raises.
        batches: of each batch of copies how many they were, and whether their order was free.
        pinned: what is registered, by address.
    """

    Event = FakeEvent

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.streams: list[FakeStream] = []
        self.deaf: FakeStream | None = None
        self.fails_at, self.num_copies = 1 << 30, 0
        self.batches: list[tuple[int, bool]] = []
        self.pinned: dict[int, int] = {}
        self.compute = FakeStream(self)
        self.current = self.compute

    def Stream(self, device: Any) -> FakeStream:
        return FakeStream(self)

    def current_stream(self, device: Any) -> FakeStream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def cudart(self) -> Any:
        def register(address: int, nbytes: int, flags: int) -> int:
            self.pinned[address] = nbytes
            return 0

        return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=self.pinned.pop)

    def run_all(self) -> None:
        while self.run_one():
            pass

    def obeys(self, stream: FakeStream) -> bool:
        return stream is not self.deaf

    def submit(self, work: Callable[[], None]) -> None:
        self.current.work.append(("run", work))

    def opener(self, mover: str) -> OpenMover:
        """Return what opens the mover of that name: the real one, whose copies are made by this machine."""

        def open_mover(regions: Sequence[Region], shape: PoolShape, segment: Segment) -> Mover:
            if mover == "batch":
                return BatchMover(regions, shape, segment, self.batch_copy)
            return LateGatherMover(self, regions, shape, segment)

        return open_mover

    def count_copy(self) -> None:
        self.num_copies += 1
        if self.num_copies > self.fails_at:
            raise RuntimeError("out of memory")

    def batch_copy(self, sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, any_order: bool) -> None:
        """Copy in some order when the current stream gets to it. Like the driver, it reads the arrays at once."""
        self.count_copy()
        copies = list(zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True))
        self.rng.shuffle(copies)
        self.batches.append((len(copies), any_order))
        for target, source, nbytes in copies:
            self.submit(lambda target=target, source=source, nbytes=nbytes: ctypes.memmove(target, source, nbytes))

    def run_one(self) -> bool:
        ready = [stream for stream in self.streams if stream.runnable()]
        if not ready:
            assert not any(stream.work for stream in self.streams), "streams wait for each other for ever"
            return False
        kind, what = self.rng.choice(ready).work.popleft()
        if kind == "run":
            what()
        elif kind == "mark":
            what.done = True
        return True


class LateGatherMover(GatherMover):
    """Copies by way of a cell on the device, when the fake machine gets to it; the copies are the real ones."""

    def __init__(self, cuda: FakeCuda, *args: Any) -> None:
        super().__init__(*args)
        self.cuda = cuda

    def _submit(self, piece: Piece, to_host: bool) -> None:
        self.cuda.count_copy()
        self.cuda.submit(lambda: GatherMover._submit(self, piece, to_host))


MOVERS = ["batch", "gather"]


def cuda_device(cuda: FakeCuda, regions: list[Region], pool: HostPool, mover: str = "batch") -> CudaDevice:
    """Return the CUDA backend on the fake machine; all but the making of the copies is the real thing."""
    return CudaDevice(regions, pool.shape, pool.segments[0], cuda.opener(mover))
