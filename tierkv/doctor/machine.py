"""This machine: memory for the host pool, the limits of this user, pages, accelerators."""

from __future__ import annotations

import platform
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from tierkv.config import default_host_bytes
from tierkv.doctor import Finding, fail, ok, warn
from tierkv.memory import available_memory, total_memory
from tierkv.pool import ORDERED_MACHINES
from tierkv.sizes import format_size

#: What check_host_memory keeps free beside the pool (tierkv.pool).
_RESERVE = 256 << 20
#: An engine, its workers and a server's clients each take some; a server accepts 1,024 connections by default.
_LEAST_FILES = 4096


def check(host_bytes: int | None = None, root: Path = Path("/")) -> Iterator[Finding]:
    """Look at the machine.

    Args:
        host_bytes: of the engine that is to run here; None: the default.
        root: where ``proc``, ``sys`` and ``dev`` are.
    """
    yield _processor()
    yield _memory(host_bytes if host_bytes is not None else default_host_bytes(), default=host_bytes is None)
    yield _files(resource.getrlimit(resource.RLIMIT_NOFILE))
    yield _pages(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled")
    yield from _accelerator(root, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], host_bytes or default_host_bytes())


def _processor() -> Finding:
    machine = platform.machine()
    if machine in ORDERED_MACHINES:
        return ok("processor", machine)
    return fail(
        "processor",
        f"{machine}: the host pool is shared without fences, which is right on x86-64 only",
        "run engines and store server on x86-64",
    )


def _memory(host_bytes: int, *, default: bool) -> Finding:
    free, total = available_memory(), total_memory()
    what = f"host_bytes={format_size(host_bytes)}" + (" (the default)" if default else "")
    found = f"{format_size(free)} free of {format_size(total)}, {what}"
    if host_bytes > free - _RESERVE:
        most = format_size(max(0, free - _RESERVE))
        return fail("memory", found, f"set host_bytes to at most {most}, or give the machine or its cgroup more memory")
    return ok("memory", found)


def _files(limits: tuple[int, int]) -> Finding:
    soft, hard = limits
    if soft == resource.RLIM_INFINITY or soft >= _LEAST_FILES:
        return ok("open files", "unlimited" if soft == resource.RLIM_INFINITY else f"at most {soft:,}")
    return warn(
        "open files",
        f"at most {soft:,} (could be raised to {'any number' if hard == resource.RLIM_INFINITY else f'{hard:,}'})",
        f"a server with many engines needs more: ulimit -n {_LEAST_FILES}, or LimitNOFILE= of its service",
    )


def _pages(path: Path) -> Finding:
    """The pool asks for huge pages (madvise); whether memory files get them is the system's choice."""
    try:
        text = path.read_text()
    except OSError:
        return ok("huge pages", "this kernel gives memory files none; the pool works with small pages")
    chosen = re.search(r"\[(\w+)\]", text)
    word = chosen[1] if chosen else "?"
    if word in ("always", "advise", "within_size", "force"):
        return ok("huge pages", f"the host pool gets them (shmem_enabled is {word!r})")
    return warn(
        "huge pages",
        f"the host pool gets none (shmem_enabled is {word!r}): it is populated and copied a little slower",
        f"echo advise > {path}",
    )


def _accelerator(root: Path, memlock: int, host_bytes: int) -> Iterator[Finding]:
    if not (root / "dev/nvidiactl").exists():
        yield ok("accelerator", "no CUDA device: the pool need not be pinned")
        return
    if memlock == resource.RLIM_INFINITY or memlock >= host_bytes:
        shown = "unlimited" if memlock == resource.RLIM_INFINITY else format_size(memlock)
        yield ok("pinned memory", f"locked memory: {shown}")
        return
    yield warn(
        "pinned memory",
        f"locked memory is limited to {format_size(memlock)}, and the pool to be pinned has {format_size(host_bytes)}",
        "drivers that count pinned memory refuse it: ulimit -l unlimited, LimitMEMLOCK=infinity of the service, or "
        "--ulimit memlock=-1 of the container",
    )
