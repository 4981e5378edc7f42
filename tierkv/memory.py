"""How much memory this machine and this process's cgroup have."""

from __future__ import annotations

from pathlib import Path

_UNLIMITED = 1 << 60


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _meminfo(field: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return _UNLIMITED


def _cgroup_dirs() -> list[Path]:
    """Return this process's cgroup directories that may hold a memory limit, innermost first."""
    root = Path("/sys/fs/cgroup")
    found = [root, root / "memory"]
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            base = root / path.strip("/") if controllers == "" else root / "memory" / path.strip("/")
            found = [p for p in (base, *base.parents) if p.is_relative_to(root)] + found
    return found


def total_memory() -> int:
    """Return the bytes this process could ever use: the machine's memory or its cgroup's limit."""
    total = _meminfo("MemTotal")
    for directory in _cgroup_dirs():
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _read_int(directory / name)
            if limit is not None:
                total = min(total, limit)
    return total


def available_memory() -> int:
    """Return the bytes this process could use now without pushing anything out."""
    free = _meminfo("MemAvailable")
    for directory in _cgroup_dirs():
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _read_int(directory / limit_name), _read_int(directory / used_name)
            if limit is not None and used is not None and limit < _UNLIMITED:
                free = min(free, limit - used + _reclaimable(directory))
    return max(0, free)


def _reclaimable(directory: Path) -> int:
    try:
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))
