"""Points in an engine's process at which it kills itself. The driver imports this where a test asks for it.

============  ==========================================================================================
store         a copy from the GPU to a slot: half of its layers are copied
load          a copy from a slot to the GPU: half of its layers are copied
pool-segment  the pool's memory has been made; nobody else has it
pool-offer    the workers offer the pool; the scheduler half has not mapped it
pool-hello    the store server has been sent the pool's descriptors, and has not answered
============  ==========================================================================================
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

POOL = ("pool-segment", "pool-offer", "pool-hello")


def arm(point: str, number: int) -> None:
    """Have this process end with SIGKILL at the ``number``-th pass of a point."""
    left = number

    def passed() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    if point in ("store", "load"):
        _in_the_middle(f"_{point}_piece", passed)
    else:
        _after(*_owner(point), passed)


def _in_the_middle(method: str, passed: Callable[[], None]) -> None:
    from tierkv_connector.device import CpuDevice

    copy = getattr(CpuDevice, method)

    def half_and_half(self: Any, piece: Any) -> None:
        layers = self._layers
        half = len(layers) // 2
        try:
            self._layers = layers[:half]
            copy(self, piece)
            passed()
            self._layers = layers[half:]
            copy(self, piece)
        finally:
            self._layers = layers

    setattr(CpuDevice, method, half_and_half)


def _owner(point: str) -> tuple[Any, str]:
    from tierkv.client import StoreClient
    from tierkv.pool import Segment
    from tierkv.rendezvous import PoolHost

    return {
        "pool-segment": (Segment, "create"),
        "pool-offer": (PoolHost, "__init__"),
        "pool-hello": (StoreClient, "_say_hello"),
    }[point]


def _after(owner: Any, name: str, passed: Callable[[], None]) -> None:
    call = getattr(owner, name)  # of a class method: bound

    def then(*args: Any, **options: Any) -> Any:
        result = call(*args, **options)
        passed()
        return result

    setattr(owner, name, staticmethod(then) if hasattr(call, "__self__") else then)
