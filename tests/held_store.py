"""A store server whose copies stop on demand, in the middle: ``python held_store.py GATES``, configuration on stdin.

It is the real server. Two gates, in memory that the test maps too, stop it where a race needs it: a STORE between the
halves of its copy out of a slot, and a FETCH that has its slot and is about to write it. Nothing else is changed: what
is checked before and after is the product's own code.
"""

from __future__ import annotations

import mmap
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

#: Nobody is held longer than this, whatever a test forgets.
HANG_S = 30.0
_FIELDS = (
    "fetch",  # gate: 1 holds, 0 lets pass, -n: everybody waits up to n milliseconds
    "store",
    "fetch_held",  # how many are held now
    "store_held",
    "num_fetch_held",  # how often somebody was
    "num_store_held",
    "num_written",  # slots that fetches were about to write
    "num_torn",  # copies that were held and found their slot reused
    "slot",  # of the last copy that was held, and the generation that it began with
    "generation",
)


class Gates:
    """The gates and what is counted at them, as attributes; every process that opens the file sees the same.

    Args:
        path: the file; made where it is not there.
    """

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            data = mmap.mmap(fd, mmap.PAGESIZE)
        finally:
            os.close(fd)
        self.__dict__["_values"] = np.frombuffer(data, dtype=np.int64)

    def __getattr__(self, name: str) -> int:
        return int(self.__dict__["_values"][_FIELDS.index(name)])

    def __setattr__(self, name: str, value: int) -> None:
        self.__dict__["_values"][_FIELDS.index(name)] = value

    def open(self) -> None:
        """Let everybody pass."""
        self.fetch = self.store = 0


class _Numpy:
    """numpy, with a ``copyto`` that may be stopped half-way."""

    def __init__(self, copyto: Callable[..., None]) -> None:
        self.copyto = copyto

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def install(gates: Gates) -> None:
    """Put the gates into the code of this process."""
    import tierkv.pool as pool_module
    from tierkv.pool import HostPool
    from tierkv_server.fetch import Fetcher

    gates.fetch_held = gates.store_held = 0  # of the server before this one, which was killed
    local, lock, rng = threading.local(), threading.Lock(), random.Random(os.getpid())
    read, parts, fetch = HostPool.read, HostPool.parts, Fetcher.fetch

    def hold(gate: str) -> bool:
        waits_s = getattr(gates, gate)
        if waits_s < 0:
            time.sleep(rng.random() * -waits_s / 1000)
            return False
        if not waits_s:
            return False
        with lock:
            for name in (f"{gate}_held", f"num_{gate}_held"):
                setattr(gates, name, getattr(gates, name) + 1)
        until = time.monotonic() + HANG_S
        while getattr(gates, gate) > 0 and time.monotonic() < until:
            time.sleep(0.0005)
        with lock:
            setattr(gates, f"{gate}_held", getattr(gates, f"{gate}_held") - 1)
        return True

    def copyto(into: Any, source: Any) -> None:
        half = len(source) // 2 if getattr(local, "copy", None) else 0
        np.copyto(into[:half], source[:half])
        if half:
            gates.slot, gates.generation = local.copy
            local.was_held = hold("store")
        np.copyto(into[half:], source[half:])

    def held_read(self: HostPool, slot: int, generation: int, into: Any) -> bool:
        local.copy, local.was_held = (slot, generation), False
        try:
            whole = read(self, slot, generation, into)
        finally:
            local.copy = None
        if local.was_held and not whole:
            with lock:
                gates.num_torn += 1
        return whole

    def held_parts(self: HostPool, slot: int) -> list[memoryview]:
        if getattr(local, "fetching", False):
            with lock:
                gates.num_written += 1
            hold("fetch")
        return parts(self, slot)

    def marked_fetch(self: Fetcher, session: Any, refs: Sequence[Any], slots: Sequence[int]) -> bytes:
        local.fetching = True
        try:
            return fetch(self, session, refs, slots)
        finally:
            local.fetching = False

    pool_module.np = _Numpy(copyto)  # type: ignore[attr-defined]
    HostPool.read, HostPool.parts, Fetcher.fetch = held_read, held_parts, marked_fetch  # type: ignore[method-assign]


def main() -> int:
    """Serve, as ``python -m tierkv_server`` does."""
    install(Gates(Path(sys.argv[1])))
    from tierkv_server.__main__ import main as serve

    return serve()


if __name__ == "__main__":
    sys.exit(main())
