"""What a process leaves behind: children, pool memory, names in /dev/shm, descriptors."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path


def children() -> set[int]:
    """Return the processes that this one started and that still run."""
    found = set()
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                fields = (directory / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[1]) == os.getpid() and fields[0] != "Z":
                found.add(int(directory.name))
    return found


def pool_files(pid: int | str = "self") -> set[str]:
    """Return the descriptors and mappings of pool segments that a process has, each by its inode."""
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if "memfd:tierkv" in str(fd.readlink()):
                found.add(str(fd.stat().st_ino))
        except OSError:
            continue
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "memfd:tierkv" in line:
            found.add(line.split()[4])
    return found


def processes(group: int, mark: str | None = None) -> set[int]:
    """Return the processes of a group, and those that were started with a mark in their environment."""
    found = set()
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            fields = (directory / "stat").read_text().rsplit(")", 1)[1].split()
            environ = (directory / "environ").read_bytes()
        except OSError:
            continue
        if fields[0] != "Z" and (int(fields[2]) == group or (mark and mark.encode() in environ)):
            found.add(int(directory.name))
    return found


def holders(segments: set[str]) -> set[int]:
    """Return the processes that have one of these pool segments open or mapped."""
    found = set()
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if segments & pool_files(directory.name):
                found.add(int(directory.name))
        except OSError:
            continue
    return found


def stop_process(pid: int) -> None:
    """Stop a process with SIGSTOP and wait until all its threads stand still: until then some may go on working."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        if all((task / "stat").read_text().rsplit(")", 1)[1].split()[0] in "TZ" for task in tasks):
            return
        time.sleep(0.002)
    raise TimeoutError(f"process {pid} does not stop")


def shm_names(of_vllm: bool = False) -> set[str]:
    """Return the names in /dev/shm, without those of Python's own multiprocessing.

    Args:
        of_vllm: those of vLLM's ranks too, which other tests may be running meanwhile.
    """
    names = {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith(("sem.", "psm_"))}
    return {name for name in names if of_vllm or not (name.startswith("vllm_dist_") or "-cpushm_" in name)}


def left_in_shm(before: set[str]) -> set[str]:
    """Return the names in /dev/shm that are new and that no process has mapped: those of other tests' engines are.

    Args:
        before: what :func:`shm_names` said of vLLM's too.
    """
    new = shm_names(of_vllm=True) - before
    if not new:
        return new
    mapped: set[str] = set()
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            mapped |= set(re.findall(r"/dev/shm/(\S+)", (directory / "maps").read_text()))
    return (new - mapped) & shm_names(of_vllm=True)


def num_fds() -> int:
    """Return how many descriptors this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1
