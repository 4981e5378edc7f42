"""A disk directory that no server owns, owned by this process for as long as a verb works on it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from tierkv.cli.offline import OfflineStore, open_offline
from tierkv.cli.options import Store
from tierkv.errors import RefusedError
from tierkv.layout import Namespace
from tierkv.selection import Select
from tierkv.server_config import DEFAULT_RESERVE_NBYTES
from tierkv.tiers.base import Limits
from tierkv.tiers.disk import MIN_BUDGET, DiskTier
from tierkv_server.compact import Compactor
from tierkv_server.server import DirectoryInUseError, lock_directory


def open_directory(disk: str) -> Store:
    """Return the store in a directory, to be changed; a client of the server that owns it, where one does.

    Raises:
        ConfigError: it is no disk directory.
        RefusedError: a server owns it and cannot be found.
    """
    looked_at = open_offline(disk, None)
    if not isinstance(looked_at, OfflineStore):
        return looked_at
    looked_at.close()
    return OwnedDirectory(Path(disk).expanduser().absolute())


class OwnedDirectory:
    """A disk directory, opened as a server opens it, but with limits that take nothing from what is there.

    Raises:
        ConfigError: it cannot be used.
        RefusedError: a server has just taken it.
    """

    def __init__(self, directory: Path) -> None:
        try:
            self._lock_fd = lock_directory(directory)
        except DirectoryInUseError as error:
            raise RefusedError(str(error)) from None
        try:
            nbytes = sum(path.stat().st_size for path in directory.glob("ns/*/data.mdb"))
            limits = Limits(budget=max(MIN_BUDGET, 2 * nbytes), reserve_nbytes=DEFAULT_RESERVE_NBYTES)
            self._disk = DiskTier(directory, limits)
        except BaseException:
            os.close(self._lock_fd)
            raise
        self._compactor = Compactor(self._disk, self._chosen)

    def _chosen(self, select: Select) -> dict[bytes, Namespace]:
        return {i: n for i, n in self._disk.namespaces().items() if i.hex().startswith(select.ns)}

    def call(self, *words: bytes | str | int) -> bytes:
        """Refuse: raw commands are a server's."""
        raise RefusedError(f"{words[0]!r} takes a running server; leave out --disk")

    def ask(self, command: str, body: Any = None) -> Any:
        """Answer a command as a server would."""
        if command != "TKV.COMPACT":
            raise RefusedError("this takes a running server; leave out --disk")
        return msgspec.to_builtins(self._compactor.step(Select() if body is None else body))

    def close(self) -> None:
        """Close the directory; a server may have it then. Idempotent."""
        self._compactor.close()
        self._disk.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __enter__(self) -> OwnedDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
