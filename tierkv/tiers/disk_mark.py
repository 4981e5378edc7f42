"""The mark of a disk environment: ``tierkv.json``, which says its format and whether it was closed properly.

It is a file of its own because it has to be read before a database that may be torn is mapped.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import msgspec

DISK_FORMAT = "tierkv-disk-2"
#: Formats that are brought up to ``DISK_FORMAT`` when they are opened.
OLDER_FORMATS = frozenset({"tierkv-disk-1"})
CLEAN = "clean"

_MARK_NAME = "tierkv.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Mark(msgspec.Struct, frozen=True):
    """The content of ``tierkv.json``. ``boot`` is the boot id while the environment is open, else ``"clean"``."""

    format: str
    boot: str


class NotOursError(Exception):
    """The directory holds something that this program did not write and must not touch."""


def read_boot_id() -> str:
    """Return the id of this boot; where there is none, one that no mark ever equals."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return f"unknown-{os.getpid()}-{time.time_ns()}"


def read_mark(directory: Path) -> Mark | None:
    """Return the mark, or None where there is none.

    Raises:
        NotOursError: there is one that this program does not understand.
    """
    try:
        return msgspec.json.decode((directory / _MARK_NAME).read_bytes(), type=Mark)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise NotOursError(f"its {_MARK_NAME} is not understood: {error}") from None


def check_ours(directory: Path) -> None:
    """See that a namespace directory is ours, or holds no database.

    Raises:
        NotOursError: it holds one that is not, or of another version.
    """
    mark = read_mark(directory)
    if mark is None and (directory / "data.mdb").exists():
        raise NotOursError(f"it has no {_MARK_NAME}")
    if mark is not None and mark.format != DISK_FORMAT and mark.format not in OLDER_FORMATS:
        raise NotOursError(f"format {mark.format!r}; this program reads {DISK_FORMAT!r}")


def write_mark(directory: Path, boot: str) -> None:
    """Replace the mark, durably.

    Raises:
        OSError: the disk is full or failed; the old mark is there.
    """
    temporary = directory / (_MARK_NAME + ".new")
    with open(temporary, "wb") as file:
        file.write(msgspec.json.encode(Mark(DISK_FORMAT, boot)))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(directory / _MARK_NAME)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete_files(directory: Path) -> None:
    """Delete our files, the mark last, and the directory if nothing else is in it."""
    for name in ("data.mdb", "lock.mdb", _MARK_NAME + ".new", _MARK_NAME):
        (directory / name).unlink(missing_ok=True)
    with suppress(OSError):
        directory.rmdir()
