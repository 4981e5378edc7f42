"""Staging memory: where a payload waits between the slot it was copied from and the tier it goes to."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt


class Buffer:
    """A record's bytes, given back to its pool when the last holder lets go."""

    __slots__ = ("_holders", "_staging", "data")

    def __init__(self, staging: Staging, data: npt.NDArray[np.uint8]) -> None:
        self._staging = staging
        self._holders = 1
        self.data = data

    def hold(self) -> None:
        """Add a holder."""
        with self._staging._lock:
            self._holders += 1

    def release(self) -> None:
        """Remove a holder."""
        self._staging._release(self)


class Staging:
    """Reusable buffers within a byte budget. First touch of fresh pages is slow, so buffers are kept.

    Args:
        budget: bytes that all buffers in use may have together.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.in_use = 0
        self._lock = threading.Lock()
        self._free: dict[int, list[npt.NDArray[np.uint8]]] = {}
        self._free_nbytes = 0

    def take(self, nbytes: int) -> Buffer | None:
        """Return a buffer of ``nbytes``, or None if that would exceed the budget. Its contents are arbitrary."""
        with self._lock:
            if self.in_use + nbytes > self.budget:
                return None
            self.in_use += nbytes
            free = self._free.get(nbytes)
            if free:
                self._free_nbytes -= nbytes
                return Buffer(self, free.pop())
        return Buffer(self, np.zeros(nbytes, dtype=np.uint8))

    def _release(self, buffer: Buffer) -> None:
        with self._lock:
            buffer._holders -= 1
            if buffer._holders:
                return
            nbytes = buffer.data.nbytes
            self.in_use -= nbytes
            if self._free_nbytes + nbytes <= self.budget // 4:
                self._free.setdefault(nbytes, []).append(buffer.data)
                self._free_nbytes += nbytes
