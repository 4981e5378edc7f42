"""Whether the disk works. Reading and writing fail apart: a full disk is read on, one that cannot be read is out."""

from __future__ import annotations

from pathlib import Path

import lmdb

from tierkv.health import Health
from tierkv.tiers.base import TierStat
from tierkv.tiers.environment import Environment

#: After one of these LMDB refuses the environment until it is opened again.
_BREAKING = (lmdb.PanicError, lmdb.CorruptedError, lmdb.PageNotFoundError)


class DiskHealth:
    """The health of reading and of writing, each with its back-off.

    The tier is ``read-only`` from a write that failed to one that worked, and ``out`` from a read that failed to one
    that worked. During a back-off nothing is tried; the first call after it tries.
    """

    def __init__(self, path: Path) -> None:
        self.reads = Health(f"The disk tier ({path})")
        self.writes = Health(f"Writing to the disk tier ({path})")

    def may_read(self) -> bool:
        return self.reads.available()

    def may_write(self) -> bool:
        return self.writes.available() and self.reads.available()

    def read_failed(self, error: BaseException, env: Environment) -> None:
        """Note that a read failed."""
        env.broken = env.broken or isinstance(error, _BREAKING)
        self.reads.failed(error)

    def write_failed(self, error: BaseException, env: Environment | None = None) -> None:
        """Note that a write failed, of an environment or of something else in the directory."""
        if env is not None and isinstance(error, _BREAKING):
            env.broken = True
        self.writes.failed(error)

    def mark(self, stat: TierStat) -> TierStat:
        """Return ``stat`` with the state, its reason and its begin."""
        at = self.reads if not self.reads.up else self.writes
        state = "out" if not self.reads.up else "read-only" if not self.writes.up else "up"
        return stat._replace(state=state, reason=at.reason, since=at.out_since)
