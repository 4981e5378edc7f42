"""Store servers for tests: in a thread of this process, with faults in their tiers, or launched as an engine does."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fake_engine import wait_until
from faulty_tier import FaultyTier
from tierkv.config import Spill
from tierkv.server_config import ServerConfig
from tierkv.tiers.base import Tier
from tierkv_server import server as server_module
from tierkv_server.server import Server


def patient(config: ServerConfig, timeout_s: float = 10.0) -> ServerConfig:
    """Let Redis take this long: on a busy machine it is late now and then, which is not what most tests are about."""
    if config.shared is None:
        return config
    shared = msgspec.structs.replace(config.shared, timeout_s=timeout_s, connect_timeout_s=timeout_s)
    return msgspec.structs.replace(config, shared=shared)


def make_config(directory: Path, *, redis_timeout_s: float = 10.0, **other: Any) -> ServerConfig:
    """A server in ``directory`` that stores everything in every tier at once."""
    options: dict[str, Any] = {
        "disk_dir": directory / "store",
        "disk_bytes": 64 << 20,
        "socket": directory / "store" / "tierkv.sock",
        "spill": {"shared": Spill.THROUGH},
    }
    return patient(ServerConfig.make(**options | other), redis_timeout_s)


@contextlib.contextmanager
def serving(config: ServerConfig) -> Iterator[Server]:
    """Run a server in a thread of this process."""
    server = Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.leave()
        server.leave()  # without waiting for what is queued
        thread.join(20)
        assert not thread.is_alive()


def wrap_tiers(monkeypatch: pytest.MonkeyPatch) -> dict[str, FaultyTier]:
    """Put every tier that servers open from now on into a :class:`FaultyTier`; returns the latest by name."""
    wrapped: dict[str, FaultyTier] = {}

    def wrapping(make: Callable[..., Tier]) -> Callable[..., FaultyTier]:
        def wrap(*args: Any, **options: Any) -> FaultyTier:
            tier = FaultyTier(make(*args, **options))
            wrapped[tier.name] = tier
            return tier

        return wrap

    for name in ("DiskTier", "SharedTier"):
        monkeypatch.setattr(server_module, name, wrapping(getattr(server_module, name)))
    return wrapped


def owner(config: ServerConfig) -> int:
    """Return the process that wrote itself into the directory's lock; 0 for none."""
    try:
        return int((config.disk_dir / "lock").read_text() or 0)
    except FileNotFoundError:
        return 0


def alive(pid: int) -> bool:
    """Return whether a process runs. One that nobody has reaped does not."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def kill_launched(config: ServerConfig) -> None:
    """SIGKILL the launched server that owns the directory, if there is one, and wait until its lock is gone too."""
    pid = owner(config)
    if pid and alive(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGKILL)

    def gone() -> bool:
        return not (pid and alive(pid)) and (_unlocked(config) or owner(config) != pid)  # or its successor has it

    wait_until(gone, what="a launched server is still there")


def _unlocked(config: ServerConfig) -> bool:
    """Return whether nobody holds the directory's lock: the threads of a killed process die one by one."""
    with contextlib.suppress(FileNotFoundError), open(config.disk_dir / "lock", "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
