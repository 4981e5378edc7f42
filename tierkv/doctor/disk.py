"""The disk tier's directory: its file system, its room, and how fast it is."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tierkv.doctor import Finding, fail, ok, skip, warn
from tierkv.errors import ConfigError
from tierkv.sizes import format_size
from tierkv.tiers.filesystem import check_directory, filesystem_type

#: Written and read back for the measurement, in pieces of a payload's size.
SPEED_NBYTES = 256 << 20
_PIECE_NBYTES = 4 << 20
#: Below this a disk hit is slower than computing for most models: 100,000 tokens/s at 23 KB, 2,000 at 128 KB a token.
_SLOW_BYTES_PER_S = 200 << 20


def check(directory: Path, budget: int, reserve: int, *, speed: bool = False) -> Iterator[Finding]:
    """Look at the directory. It is made if it is not there.

    Args:
        directory: the disk tier's.
        budget, reserve: bytes that the tier may use, and that it leaves free on the volume.
        speed: write and read back :data:`SPEED_NBYTES` there, and delete them.
    """
    existed = directory.exists()
    try:
        check_directory(directory)
    except ConfigError as error:
        yield fail("disk", str(error), "name another directory with --disk")
        return
    yield ok("disk", f"{directory} can be written ({filesystem_type(directory) or 'unknown file system'})")
    yield _room(directory, budget, reserve)
    if speed:
        yield _speed(directory)
    if not existed:
        for path in (directory / "ns", directory):
            with contextlib.suppress(OSError):
                path.rmdir()


def _room(directory: Path, budget: int, reserve: int) -> Finding:
    used = sum(file.stat().st_size for file in directory.rglob("data.mdb"))
    free = shutil.disk_usage(directory).free
    wanted = max(0, budget - used)
    found = f"{format_size(free)} free, budget {format_size(budget)} of which {format_size(used)} are taken"
    if wanted + reserve > free:
        room = format_size(max(0, free - reserve) + used)
        return warn(
            "disk space",
            f"{found}, reserve {format_size(reserve)}",
            f"the tier will stop at {room}; set disk.bytes (disk_bytes) to that, or free space",
        )
    return ok("disk space", found)


def _speed(directory: Path) -> Finding:
    if shutil.disk_usage(directory).free < 2 * SPEED_NBYTES:
        return skip("disk speed", f"not measured: {format_size(2 * SPEED_NBYTES)} must be free for it")
    try:
        write, read = measure(directory)
    except OSError as error:
        return skip("disk speed", f"not measured: {error.strerror or error}")
    found = f"writes {format_size(int(write))}/s (synced), reads {format_size(int(read))}/s (past the page cache)"
    if read < _SLOW_BYTES_PER_S:
        return warn("disk speed", found, "a disk this slow loses to computing; use a local SSD, or no disk tier")
    return ok("disk speed", found)


def measure(directory: Path, nbytes: int = SPEED_NBYTES) -> tuple[float, float]:
    """Return bytes a second written, with a sync at the end, and read past the page cache where that can be.

    Raises:
        OSError: the file cannot be written or read.
    """
    with tempfile.NamedTemporaryFile(dir=directory, prefix="doctor-") as file:
        piece = mmap.mmap(-1, _PIECE_NBYTES)  # page-aligned, as O_DIRECT wants it
        piece.write(os.urandom(_PIECE_NBYTES))
        begin = time.perf_counter()
        for at in range(0, nbytes, _PIECE_NBYTES):
            os.pwrite(file.fileno(), piece, at)
        os.fsync(file.fileno())
        written = time.perf_counter()
        with contextlib.suppress(OSError, AttributeError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        fd = _open_direct(file.name)
        try:
            reading = time.perf_counter()
            for at in range(0, nbytes, _PIECE_NBYTES):
                os.preadv(fd, [piece], at)
            done = time.perf_counter()
        finally:
            os.close(fd)
            piece.close()
    return nbytes / (written - begin), nbytes / (done - reading)


def _open_direct(name: str) -> int:
    try:
        return os.open(name, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # not on every file system
        return os.open(name, os.O_RDONLY)
