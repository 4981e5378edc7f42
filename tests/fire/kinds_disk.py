"""The disk is full, slow, takes no writes, gives nothing back, or hangs: five kinds."""

from __future__ import annotations

import errno
import os
import random

from fire.kind import Kind, register
from fire.stage import Stage, draw_outage


class DiskFault(Kind):
    """LMDB suffers at a point of the server (:mod:`fire.store`), from some pass on until the end.

    Args:
        name: the kind's.
        points: where, one of them.
        do: ``"raise"``, ``"sleep"`` or ``"hang"``.
        args: an errno, or seconds; one of them.
    """

    group = "disk"
    moments = (0, 0)
    both_engines = True

    def __init__(self, name: str, points: tuple[str, ...], do: str, args: tuple[float, ...] = (0.0,)) -> None:
        self.name = name
        self._points, self._do, self._args = points, do, args

    def begin(self, stage: Stage, rng: random.Random) -> None:
        self.outlives = draw_outage(rng) if self._do == "hang" else 0.0
        stage.store.arm(rng.choice(self._points), self._do, rng.randint(1, 3), False, rng.choice(self._args))

    def end(self, stage: Stage) -> None:
        stage.store.disarm()

    def struck(self, stage: Stage) -> int:
        return stage.store.num_struck(wait_s=1.0)


class Full(Kind):
    """The volume is full to its last byte, with a file of somebody else."""

    name, group = "disk is full", "disk"
    moments = (0, 0)
    both_engines = True

    def optional(self, stage: Stage) -> str:
        return "" if stage.volume else "a filesystem may not be mounted here: needs root with CAP_SYS_ADMIN"

    def begin(self, stage: Stage, rng: random.Random) -> None:
        assert stage.volume is not None
        self._before = _no_room(stage)
        try:
            with open(stage.volume / "others", "wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))
        except OSError as error:
            assert error.errno == errno.ENOSPC
        free = os.statvfs(stage.volume)
        assert free.f_bavail * free.f_frsize < 1 << 16

    def end(self, stage: Stage) -> None:
        assert stage.volume is not None
        (stage.volume / "others").unlink(missing_ok=True)

    def struck(self, stage: Stage) -> int:
        return _no_room(stage) - self._before


def _no_room(stage: Stage) -> int:
    """Return how many records the disk did not take, or took in the place of others."""
    disk = next(tier for tier in stage.store.ask("TKV.STAT")["tiers"] if tier["name"] == "disk")
    return int(disk["num_dropped"] + disk["num_errors"] + disk["num_evicted"])


register(Full())
register(DiskFault("disk is slow", ("disk-read", "disk-write"), "sleep", (0.05, 0.3, 1.2)))
register(DiskFault("disk takes no writes", ("disk-write", "commit"), "raise", (errno.EROFS, errno.EIO)))
register(DiskFault("disk cannot be read", ("disk-read",), "raise", (errno.EIO,)))
register(DiskFault("disk hangs", ("disk-read", "disk-write", "commit"), "hang"))
