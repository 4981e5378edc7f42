"""Faults that are planted in a connector, in its engine's process, to see that a run finds them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

#: A bit of a float32's exponent.
_BIT = 28


def plant(sched: Any, what: str, number: int) -> bool:
    """Plant a fault in a scheduler half; returns whether there was something to make wrong.

    Args:
        what: of :data:`PLANTS`.
        number: what is random about it follows from it.
    """
    return PLANTS[what](sched, random.Random(number))


def _flip_a_bit(sched: Any, rng: random.Random) -> bool:
    """One bit in each of some slots of the host pool, where no checksum looks."""
    entries = sorted((e for e in sched.index.snapshot() if not e.num_pins), key=lambda e: e.slot)
    if not entries:
        return False
    for entry in rng.sample(entries, min(len(entries), 8)):
        words = np.frombuffer(sched.pool.parts(entry.slot)[0], dtype=np.uint32)
        words[rng.randrange(len(words))] ^= np.uint32(1 << _BIT)
    return True


def _mix_tenants(sched: Any, rng: random.Random) -> bool:
    """Every tenant has the same keys: each is served what another one has stored."""
    root = sched._root
    sched._root = lambda request, tenant, *rest: root(request, b"", *rest)
    return True


def _mix_adapters(sched: Any, rng: random.Random) -> bool:
    """Every adapter has the model's own keys."""
    sched.adapters.root = lambda root, *rest: root
    return True


PLANTS: dict[str, Callable[[Any, random.Random], bool]] = {
    "bit": _flip_a_bit,
    "tenant": _mix_tenants,
    "adapter": _mix_adapters,
}
