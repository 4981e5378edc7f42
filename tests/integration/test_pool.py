"""The host pool in real shared memory: seals, other processes, torn copies, and what is left after SIGKILL."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leaks import num_fds, shm_names
from tierkv import pool as pool_module
from tierkv.errors import ConfigError
from tierkv.pool import PAGE, HostPool, PoolShape, Segment, check_host_memory, check_machine

SHAPE = PoolShape(num_slots=4, num_parts=2, part_nbytes=PAGE + 100)


def make_pool(shape: PoolShape) -> HostPool:
    return HostPool(shape, [Segment.create(shape.segment_nbytes(rank)) for rank in range(shape.num_parts)])


@pytest.fixture
def pool() -> Iterator[HostPool]:
    pool = make_pool(SHAPE)
    yield pool
    pool.close()


#: What another process starts with: it maps the pool behind the descriptors that come on its socket.
PRELUDE = """
import socket, sys, time
import numpy as np
from tierkv.pool import HostPool, PoolShape
sock = socket.socket(fileno=int(sys.argv[1]))
shape = PoolShape(*map(int, sys.argv[2:5]))
_, fds, _, _ = socket.recv_fds(sock, 1, 16)
pool = HostPool.from_fds(shape, fds)
"""


@pytest.fixture(autouse=True)
def others(no_leaks: None) -> Iterator[None]:
    """Kill what a test that failed left running."""
    yield
    while Other.running:
        Other.running.pop().kill()


class Other:
    """Another process with the pool mapped. It says a line when it is ready, and reads a line to go on."""

    running: ClassVar[list[Other]] = []

    def __init__(self, pool: HostPool, program: str) -> None:
        self.running.append(self)
        mine, theirs = socket.socketpair()
        shape = pool.shape
        args = [str(theirs.fileno()), str(shape.num_slots), str(shape.num_parts), str(shape.part_nbytes)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + program, *args], pass_fds=[theirs.fileno()], env=env
        )
        theirs.close()
        self.sock = mine
        self.sock.settimeout(20)
        socket.send_fds(mine, [b"x"], pool.fds())

    def hear(self) -> bytes:
        """Return what it says next; empty at its end."""
        return self.sock.recv(100)

    def finish(self) -> int:
        """Wait for its end and return its exit code."""
        code = self.process.wait(20)
        self.sock.close()
        return code

    def kill(self) -> None:
        self.process.kill()
        self.finish()


def poll(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)


# -- segments


def test_a_segment_cannot_be_resized() -> None:
    segment = Segment.create(4 * PAGE)
    for nbytes in (0, PAGE, 5 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, nbytes)
    with pytest.raises(PermissionError):
        os.pwrite(segment.fd, b"x", 4 * PAGE)
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)  # nor sealed against its writers
    assert os.fstat(segment.fd).st_size == 4 * PAGE
    segment.close()


def test_a_segment_has_no_name_and_is_there_in_full() -> None:
    before = shm_names()
    segment = Segment.create(3 * PAGE)
    assert shm_names() == before
    assert str(Path(f"/proc/self/fd/{segment.fd}").readlink()) == "/memfd:tierkv (deleted)"
    assert os.fstat(segment.fd).st_blocks * 512 >= 3 * PAGE  # every page exists
    assert not segment.data.any()
    assert not os.get_inheritable(segment.fd)
    segment.close()


def test_close_is_idempotent_and_tolerates_views() -> None:
    segment = Segment.create(PAGE)
    view = segment.data[:10]
    segment.close()
    segment.close()
    view[:] = 7  # still mapped
    assert segment.fd == -1
    assert segment.data.nbytes == 0


def unsealed(nbytes: int) -> int:
    fd = os.memfd_create("tierkv-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    return fd


def regular_file(nbytes: int, directory: Path) -> int:
    path = directory / "file"
    path.write_bytes(bytes(nbytes))
    return os.open(path, os.O_RDWR)


def test_what_is_no_sealed_segment_of_that_shape_is_refused(tmp_path: Path) -> None:
    shape = PoolShape(2, 2, PAGE)
    open_before = num_fds()
    segments = [Segment.create(shape.segment_nbytes(rank)) for rank in range(2)]

    def good(rank: int) -> int:
        return os.dup(segments[rank].fd)

    cases = [
        ([good(0)], "came with 1 segments"),
        ([good(0), good(1), good(1)], "came with 3 segments"),
        ([], "came with 0 segments"),
        ([good(1), good(0)], "its description says"),
        ([good(0), unsealed(shape.segment_nbytes(1))], "not sealed"),
        ([good(0), regular_file(shape.segment_nbytes(1), tmp_path)], "not sealed"),
    ]
    for fds, words in cases:
        with pytest.raises(ConfigError, match=words):
            HostPool.from_fds(shape, fds)
    for segment in segments:
        segment.close()
    assert num_fds() == open_before  # descriptors are owned, whatever happens


# -- the pool


def test_slots_are_pages_of_their_own(pool: HostPool) -> None:
    assert SHAPE.cell_nbytes == 2 * PAGE
    for slot in range(SHAPE.num_slots):
        for rank, part in enumerate(pool.parts(slot)):
            assert len(part) == SHAPE.part_nbytes
            part[:] = bytes([10 * slot + rank + 1]) * len(part)
    into = np.empty(SHAPE.payload_nbytes, dtype=np.uint8)
    for slot in range(SHAPE.num_slots):
        assert pool.read(slot, 0, into)
        one, two = into[: SHAPE.part_nbytes], into[SHAPE.part_nbytes :]
        assert set(one) == {10 * slot + 1}
        assert set(two) == {10 * slot + 2}
    assert pool.generations.tolist() == [0] * SHAPE.num_slots  # payloads do not reach them


def test_a_read_of_another_generation_is_refused(pool: HostPool) -> None:
    into = np.empty(SHAPE.payload_nbytes, dtype=np.uint8)
    pool.generations[1] = 5
    assert pool.read(1, 5, into)
    assert not pool.read(1, 4, into)
    assert not pool.read(1, 6, into)
    assert pool.read(0, 0, into)


def test_another_process_reads_and_writes(pool: HostPool) -> None:
    pool.parts(2)[1][:5] = b"hello"
    pool.generations[3] = 77
    other = Other(
        pool,
        """
assert bytes(pool.parts(2)[1][:5]) == b"hello" and pool.generations[3] == 77
pool.parts(0)[0][-3:] = b"bye"
pool.generations[0] = 2**63 + 1
sock.send(b"done")
""",
    )
    assert other.hear() == b"done"
    assert other.finish() == 0
    assert bytes(pool.parts(0)[0][-3:]) == b"bye"
    assert int(pool.generations[0]) == 2**63 + 1


def test_no_torn_copy_is_accepted() -> None:
    """A writer uses slots again and again while this process copies from them.

    Contents follow from the generation, as a seqlock's must: raised before the slot is written, announced after.
    """
    shape = PoolShape(num_slots=2, num_parts=2, part_nbytes=64 << 10)
    pool = make_pool(shape)
    writer = Other(
        pool,
        """
words = [[np.frombuffer(part, dtype=np.uint64) for part in pool.parts(slot)] for slot in range(2)]
generation = 0
sock.setblocking(False)
sock.send(b"go")
while True:
    generation += 1
    for slot in range(2):
        pool.generations[slot] = generation
        for part in words[slot]:
            part[:] = generation
    if generation % 64 == 0:
        try:
            if sock.recv(1) == b"": break
        except BlockingIOError:
            pass
        time.sleep(0.0005)
""",
    )
    assert writer.hear() == b"go"
    into = np.empty(shape.payload_nbytes, dtype=np.uint8)
    words = into.view(np.uint64)
    accepted = refused = 0
    deadline = time.monotonic() + 20
    while (accepted < 200 or refused < 20) and time.monotonic() < deadline:
        slot = (accepted + refused) % 2
        generation = int(pool.generations[slot])
        if pool.read(slot, generation, into):
            # The writer raises a generation first and fills the slot then: what is there is this generation's or, not
            # yet overwritten, the one's before it. Nothing newer, and never a mixture with anything else.
            seen = set(np.unique(words).tolist())
            assert seen <= {generation, generation - 1}, (slot, generation, seen)
            accepted += 1
        else:
            refused += 1
    assert accepted >= 200 and refused >= 20, (accepted, refused)
    writer.sock.close()
    writer.process.wait(20)
    pool.close()


def test_an_announced_slot_is_copied_whole() -> None:
    """As the store server does: a slot and its generation are announced when it is full, and reused at any moment."""
    shape = PoolShape(num_slots=1, num_parts=1, part_nbytes=256 << 10)
    pool = make_pool(shape)
    engine = Other(
        pool,
        """
words = np.frombuffer(pool.parts(0)[0], dtype=np.uint64)
import random
generation = 0
while True:
    generation += 1
    pool.generations[0] = generation
    words[:] = generation
    try:
        sock.send(generation.to_bytes(8, "little"))
        if sock.recv(1) == b"": break
    except OSError:
        break
    for _ in range(random.randrange(300)):
        pass
""",
    )
    into = np.empty(shape.payload_nbytes, dtype=np.uint8)
    words = into.view(np.uint64)
    accepted = refused = 0
    deadline = time.monotonic() + 20
    while (accepted < 200 or refused < 20) and time.monotonic() < deadline:
        generation = int.from_bytes(engine.hear(), "little")
        if (accepted + refused) % 2:
            engine.sock.send(b"x")  # it goes on before the copy
        if pool.read(0, generation, into):
            accepted += 1
            assert (words == generation).all(), "a torn copy was accepted"
        else:
            refused += 1
        if (accepted + refused - 1) % 2 == 0:
            engine.sock.send(b"x")
    assert accepted >= 200 and refused >= 1, (accepted, refused)
    engine.sock.close()
    engine.process.wait(20)
    pool.close()


# -- death


def holders(inodes: set[str]) -> set[int]:
    """Return the processes that hold one of these memory files by a descriptor or a mapping."""
    found = set()
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                maps = (directory / "maps").read_text()
                fds = [str(fd.stat().st_ino) for fd in (directory / "fd").iterdir() if "memfd:" in str(fd.readlink())]
            except OSError:
                continue
            mapped = [line.split()[4] for line in maps.splitlines() if "/memfd:tierkv" in line]
            if inodes & {*fds, *mapped}:
                found.add(int(directory.name))
    return found


OWNER = """
import os, socket, sys
from tierkv.pool import HostPool, PoolShape, Segment
shape = PoolShape(8, 2, 1 << 20)
pool = HostPool(shape, [Segment.create(shape.segment_nbytes(rank)) for rank in range(2)])
sock = socket.socket(fileno=int(sys.argv[1]))
socket.send_fds(sock, [b"x"], pool.fds())
sock.recv(1)
"""


@pytest.mark.parametrize("order", ["owner first", "user first"])
def test_nothing_is_left_after_sigkill(order: str) -> None:
    """The owner of a pool and a process that maps it are killed: neither a name nor memory stays."""
    names = shm_names()
    mine, theirs = socket.socketpair()
    mine.settimeout(20)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(theirs.fileno())], pass_fds=[theirs.fileno()], env=env)
    theirs.close()
    _, fds, _, _ = socket.recv_fds(mine, 1, 8)
    inodes = {str(os.fstat(fd).st_ino) for fd in fds}
    shape = PoolShape(8, 2, 1 << 20)
    pool = HostPool.from_fds(shape, fds)
    user = Other(pool, "sock.send(b'mapped'); sock.recv(1)")
    assert user.hear() == b"mapped"
    pool.close()  # from here on the two have it alone
    assert holders(inodes) == {owner.pid, user.process.pid}
    first, second = (owner, user.process) if order == "owner first" else (user.process, owner)
    first.send_signal(signal.SIGKILL)
    first.wait(20)
    poll(lambda: holders(inodes) == {second.pid})  # who is left still has it
    assert second.poll() is None
    second.send_signal(signal.SIGKILL)
    second.wait(20)
    poll(lambda: not holders(inodes))  # nobody has it: the kernel has freed it
    assert shm_names() == names
    mine.close()
    user.sock.close()


def test_memory_of_an_owner_that_died_can_still_be_read(pool: HostPool) -> None:
    other = Other(pool, "pool.parts(1)[0][:4] = b'last'; sock.send(b'written'); sock.recv(1)")
    assert other.hear() == b"written"
    other.kill()
    assert bytes(pool.parts(1)[0][:4]) == b"last"


# -- shapes and limits


@given(st.integers(0, 1 << 34), st.integers(1, 8), st.integers(1, 8 << 20))
def test_for_budget_is_the_largest_that_fits(host_bytes: int, num_parts: int, part_nbytes: int) -> None:
    try:
        shape = PoolShape.for_budget(host_bytes, num_parts, part_nbytes)
    except ConfigError as error:
        assert PoolShape(2, num_parts, part_nbytes).nbytes > host_bytes
        assert str(error).startswith("host_bytes=")
        return
    assert shape.num_slots >= 2
    assert shape.nbytes <= host_bytes
    assert PoolShape(shape.num_slots + 1, num_parts, part_nbytes).nbytes > host_bytes
    assert shape.nbytes == sum(shape.segment_nbytes(rank) for rank in range(num_parts))
    assert shape.cell_nbytes % mmap.PAGESIZE == 0
    assert all(shape.segment_nbytes(rank) % mmap.PAGESIZE == 0 for rank in range(num_parts))


def test_a_pool_of_fewer_than_two_slots_is_refused_in_a_sentence() -> None:
    least = PoolShape(2, 2, 4 << 20).nbytes
    assert PoolShape.for_budget(least, 2, 4 << 20).num_slots == 2
    with pytest.raises(ConfigError) as caught:
        PoolShape.for_budget(1 << 20, 2, 4 << 20)
    assert str(caught.value) == (
        "host_bytes=1 MiB holds fewer than two chunks of this model (8 MiB each); set host_bytes to at least 16.0 MiB"
    )


def test_a_pool_larger_than_memory_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "available_memory", lambda: 4 << 30)
    check_host_memory(1 << 30)
    check_host_memory((4 << 30) - (256 << 20))
    with pytest.raises(ConfigError) as caught:
        check_host_memory(8 << 30)
    assert str(caught.value) == (
        "host_bytes=8 GiB does not fit: this machine (or its cgroup) has 4 GiB of memory free; "
        "set host_bytes to at most 3.8 GiB"
    )
    with pytest.raises(ConfigError, match="at most 0 B"):
        monkeypatch.setattr(pool_module, "available_memory", lambda: 1 << 20)
        check_host_memory(1)


def test_this_machine_has_memory_but_not_an_exabyte() -> None:
    check_host_memory(1, reserve=0)
    with pytest.raises(ConfigError, match=r"^host_bytes=1048576 TiB does not fit"):
        check_host_memory(1 << 60)


def test_machines_that_reorder_stores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_machine()
    monkeypatch.setattr(pool_module.platform, "machine", lambda: "aarch64")
    with pytest.raises(ConfigError, match="this machine is aarch64"):
        check_machine()
