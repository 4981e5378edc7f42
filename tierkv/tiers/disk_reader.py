"""A disk tier's directory as it lies there, for tools: read only, while no server owns it.

Nothing is written: no mark, no lock of LMDB, no upgrade, no repair. What a server would throw away when it opens the
directory is not read, and :attr:`DiskReader.skipped` says why. The tier's limits are the server's configuration, so
expiry by ``ttl`` and ``idle`` is not known here; a time that an entry was given itself is.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import lmdb
import msgspec

from tierkv.errors import ConfigError, TierKVError
from tierkv.layout import Namespace
from tierkv.payload import HEADER_NBYTES, BadRecordError, ForeignRecordError, Header, record_nbytes
from tierkv.tiers.base import EntryInfo, Fetched, Pin, Ref, Sink, Status, deliver
from tierkv.tiers.disk_mark import CLEAN, DISK_FORMAT, NotOursError, read_boot_id, read_mark
from tierkv.tiers.environment import Life

_NS_NAME = re.compile(r"[0-9a-f]{32}")
_USE = struct.Struct("<dQ")


class OwnedError(TierKVError):
    """A server owns the directory. ``pid`` is its process, 0 where that is not known."""

    def __init__(self, directory: Path, pid: int) -> None:
        super().__init__(f"{directory} belongs to a store server that is running (pid {pid or 'unknown'})")
        self.pid = pid


class _Space:
    """One namespace's environment, opened read-only."""

    def __init__(self, directory: Path) -> None:
        self._env = lmdb.open(str(directory), readonly=True, lock=False, max_dbs=6, create=False, readahead=False)
        try:
            meta = self._env.open_db(b"meta", create=False)
            with self._env.begin() as txn:
                self.namespace = Namespace.from_json(txn.get(b"namespace", default=b"", db=meta))
            names = (b"records", b"heads", b"tokens", b"use", b"life")
            self.records, self.heads, self.tokens, self.use, self.life = (
                self._env.open_db(name, create=False) for name in names
            )
        except BaseException:
            self._env.close()
            raise
        self.cost = record_nbytes(self.namespace.payload_nbytes) + 16

    def begin(self) -> lmdb.Transaction:
        """Return a read transaction."""
        return self._env.begin(buffers=True)

    def close(self) -> None:
        self._env.close()


class DiskReader:
    """What a disk directory holds, as much of the tier's contract as looking at it takes.

    Args:
        path: the disk directory.

    Attributes:
        skipped: a sentence for each namespace that is not read.

    Raises:
        OwnedError: a server owns it.
        ConfigError: it is no disk directory, or cannot be read.

    Notes:
        While this is open no server starts on the directory.
    """

    name = "disk"

    def __init__(self, path: Path) -> None:
        self.skipped: list[str] = []
        self._spaces: dict[bytes, _Space] = {}
        self._lock_fd = _lock(path)
        try:
            if not (path / "ns").is_dir():
                raise ConfigError(
                    f"disk={str(path)!r} is no disk directory: it has no 'ns' in it; name a server's disk.dir"
                )
            for directory in sorted(path.joinpath("ns").iterdir()):
                if _NS_NAME.fullmatch(directory.name) and directory.is_dir():
                    self._open(directory)
        except OSError as error:
            self.close()
            raise ConfigError(f"disk={str(path)!r} cannot be read: {error.strerror}; run this as its owner") from None
        except BaseException:
            self.close()
            raise

    def _open(self, directory: Path) -> None:
        try:
            mark = read_mark(directory)
            if mark is None or not (directory / "data.mdb").exists():
                return
            if mark.format != DISK_FORMAT:
                raise NotOursError(f"format {mark.format!r}; this program reads {DISK_FORMAT!r}")
            if mark.boot not in (CLEAN, read_boot_id()):
                raise NotOursError("the machine crashed while it was open, so a server will start it empty")
            space = _Space(directory)
        except (NotOursError, lmdb.Error, msgspec.MsgspecError) as error:
            self.skipped.append(f"namespace {directory.name} is not read: {error}")
            return
        self._spaces[space.namespace.ns_id()] = space

    def close(self) -> None:
        """Let go of the directory. Idempotent."""
        for space in self._spaces.values():
            space.close()
        self._spaces.clear()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    # The contract

    def namespaces(self) -> dict[bytes, Namespace]:
        """Return every namespace that can be read, by id."""
        return {ns_id: space.namespace for ns_id, space in self._spaces.items()}

    def match(self, ns_id: bytes, refs: Sequence[Ref]) -> list[bool]:
        """Return for each ref whether it is stored."""
        space = self._spaces.get(ns_id)
        if space is None:
            return [False] * len(refs)
        with space.begin() as txn:
            return [txn.get(ref.key, db=space.heads) is not None for ref in refs]

    def entries(self, ns_id: bytes) -> Iterator[EntryInfo]:
        """Yield what is stored in a namespace."""
        space = self._spaces.get(ns_id)
        if space is None:
            return
        now = time.time()
        with space.begin() as txn:
            for raw_key, row in txn.cursor(db=space.heads):
                key = bytes(raw_key)
                try:
                    header = Header.unpack(row[:HEADER_NBYTES])
                except (BadRecordError, ForeignRecordError):
                    continue
                life = _life(txn.get(key, db=space.life))
                pins = tuple(Pin(owner, until) for owner, until in sorted(life.pins) if until > now)
                if life.until and life.until <= now and not pins:
                    continue
                used, hits = _use(txn.get(key, db=space.use))
                yield EntryInfo(
                    key=key,
                    parent=header.parent,
                    anchor=header.anchor,
                    position=header.position,
                    num_tokens=header.num_tokens,
                    nbytes=space.cost,
                    tenant=header.tenant,
                    created=header.created,
                    last_used=max(used, header.created),
                    num_hits=hits,
                    expires=life.until,
                    pins=pins,
                )

    def fetch(
        self, ns_id: bytes, refs: Sequence[Ref], sink: Sink, *, quiet: bool = False, keep: bool = False
    ) -> list[Fetched]:
        """Copy payloads out, verified. Always quiet, and nothing is deleted."""
        space = self._spaces.get(ns_id)
        if space is None:
            return [Fetched(Status.MISS)] * len(refs)
        results = []
        with space.begin() as txn:
            for i, ref in enumerate(refs):
                record = txn.get(ref.key, db=space.records)
                results.append(_deliver(record, ref, ns_id, space, sink(i)))
        return results


def _deliver(
    record: bytes | memoryview | None, ref: Ref, ns_id: bytes, space: _Space, parts: Sequence[memoryview]
) -> Fetched:
    if record is None:
        return Fetched(Status.MISS)
    try:
        return Fetched(Status.OK, deliver(memoryview(record), ref, ns_id, space.namespace.payload_nbytes, parts))
    except BadRecordError:
        return Fetched(Status.BAD)
    except ForeignRecordError:
        return Fetched(Status.MISS)


def _life(row: bytes | memoryview | None) -> Life:
    if row is not None:
        with suppress(msgspec.MsgspecError):
            return msgspec.msgpack.decode(row, type=Life)
    return Life()


def _use(row: bytes | memoryview | None) -> tuple[float, int]:
    if row is None or len(row) != _USE.size:
        return 0.0, 0
    last_used, num_hits = _USE.unpack(row)
    return float(last_used), int(num_hits)


def _lock(path: Path) -> int:
    """Keep servers off the directory and return the descriptor that does; -1 where no server ever had it.

    Raises:
        OwnedError: a server owns it.
        ConfigError: it cannot be read.
    """
    try:
        fd = os.open(path / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1
    except OSError as error:
        raise ConfigError(f"disk={str(path)!r} cannot be read: {error.strerror}; run this as its owner") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        os.close(fd)
        raise OwnedError(path, int(owner) if owner.isdigit() else 0) from None
    return fd
