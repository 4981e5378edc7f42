"""Whether the disk works. Reading and writing fail apart: a full disk is read on, one that cannot be read is out."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import lmdb

from tierkv.health import Health
from tierkv.tiers.base import TierStat
from tierkv.tiers.environment import Environment

#: After one of these LMDB refuses the environment until it is opened again.
_BREAKING = (lmdb.PanicError, lmdb.CorruptedError, lmdb.PageNotFoundError)

#: A read of a record, or a write of a batch (8 MiB), that takes longer has failed. A local disk needs milliseconds; an
#: engine gives its server up after 5 s without an answer to a fetch, and 30 s to a store.
READ_S = 3.0
WRITE_S = 10.0


class Watch:
    """Notes as a fault what takes longer than ``limit_s``, when it is over or somebody asks. Used as a context.

    Thread-safe; a thread is in it once at a time.
    """

    def __init__(self, health: Health, what: str, limit_s: float) -> None:
        self.limit_s = limit_s
        self._health = health
        self._what = what
        self._begun: dict[int, float] = {}  # by thread

    def __enter__(self) -> None:
        self._begun[threading.get_ident()] = time.monotonic()

    def __exit__(self, *_: object) -> None:
        took_s = time.monotonic() - self._begun.pop(threading.get_ident())
        if took_s > self.limit_s:
            self._health.failed(f"{self._what} took {took_s:.1f} s")

    def hangs(self) -> bool:
        """Return whether something is under way for too long."""
        begun = list(self._begun.values())
        if not begun or time.monotonic() - min(begun) <= self.limit_s:
            return False
        if self._health.up:
            self._health.failed(f"{self._what} has not come back for {self.limit_s:g} s")
        return True


class DiskHealth:
    """The health of reading and of writing, each with its back-off.

    The tier is ``read-only`` from a write that failed to one that worked, and ``out`` from a read that failed to one
    that worked. During a back-off nothing is tried; the first call after it tries. What takes too long has failed:
    while it hangs nothing else is tried, and the first call after it has come back, and a back-off, tries.

    Attributes:
        reading: a context in which one record is read.
        writing: a context in which one batch is written.
    """

    def __init__(self, path: Path) -> None:
        self.reads = Health(f"The disk tier ({path})")
        self.writes = Health(
            f"Writing to the disk tier ({path})",
            meanwhile="What is stored is served on; nothing new is written there.",
        )
        self.reading = Watch(self.reads, "a read", READ_S)
        self.writing = Watch(self.writes, "a write", WRITE_S)

    def may_read(self) -> bool:
        return not self.reading.hangs() and self.reads.available()

    def may_write(self) -> bool:
        return not self.writing.hangs() and self.writes.available() and self.may_read()

    def retry_in_s(self) -> float:
        """Return the seconds until something is written again; 0 if it may be now."""
        return max(self.reads.retry_in_s(), self.writes.retry_in_s())

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
        for watch in (self.reading, self.writing):
            watch.hangs()  # nobody may have asked about it since
        at = self.reads if not self.reads.up else self.writes
        state = "out" if not self.reads.up else "read-only" if not self.writes.up else "up"
        return stat._replace(state=state, reason=at.reason, since=at.out_since)
