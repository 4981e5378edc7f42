"""The free space of the disk tier's volume: a reserve of it is left to others."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from tierkv.sizes import format_size

logger = logging.getLogger("tierkv")

#: The volume is asked again after this time, or when this much was written since.
_ASK_S = 1.0
_ASK_NBYTES = 64 << 20


class FreeSpace:
    """Says by how much the tier's files may grow. Logs one line when the reserve is reached and one when it is over.

    Not thread-safe: the tier's write lock is held.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._free_nbytes = 0
        self._spent_nbytes = 0
        self._asked_at: float | None = None
        self._short = False

    def growth_nbytes(self, reserve_nbytes: int, wanted: int) -> int:
        """Return the bytes by which files may grow, of ``wanted``, so that ``reserve_nbytes`` of the volume stay free.

        Raises:
            OSError: the volume cannot be asked.
        """
        now = self._clock()
        left = self._free_nbytes - self._spent_nbytes - reserve_nbytes
        stale = self._asked_at is None or now - self._asked_at >= _ASK_S or self._spent_nbytes >= _ASK_NBYTES
        if stale or left < wanted:
            volume = os.statvfs(self._path)
            self._free_nbytes, self._spent_nbytes, self._asked_at = volume.f_bavail * volume.f_frsize, 0, now
            left = self._free_nbytes - reserve_nbytes
        return max(0, min(wanted, left))

    def spend(self, nbytes: int) -> None:
        """Note that files may have grown since the volume was asked."""
        self._spent_nbytes += nbytes

    def note(self, short: bool, reserve_nbytes: int) -> None:
        """Note whether a store had to do without growth."""
        if short and not self._short:
            logger.warning(
                "The volume of %s has reached its reserve (disk.reserve_bytes=%s): the disk tier's files stop growing, "
                "and stores that find no room among its own entries are dropped.",
                self._path,
                format_size(reserve_nbytes),
            )
        elif self._short and not short:
            logger.warning("The volume of %s has free space again: the disk tier grows as before.", self._path)
        self._short = short
