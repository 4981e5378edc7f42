"""One LMDB environment of the disk tier: a namespace's records, its index in memory, and its mark.

See :mod:`tierkv.tiers.disk` for the databases in it and for what the mark is for.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import lmdb
import msgspec

from tierkv.layout import Namespace
from tierkv.payload import BadRecordError, ForeignRecordError, Header, open_record, record_nbytes
from tierkv.tiers.base import EntryInfo, Record, Ref, Status, deliver

DISK_FORMAT = "tierkv-disk-1"
CLEAN = "clean"

_MARK_NAME = "tierkv.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_USE = struct.Struct("<dQ")
_PAGE = 4096


class Mark(msgspec.Struct, frozen=True):
    """The content of ``tierkv.json``. ``boot`` is the boot id while the environment is open, else ``"clean"``."""

    format: str
    boot: str


class IndexEntry:
    """What the index knows about a stored chunk."""

    __slots__ = ("anchor", "created", "last_used", "num_hits", "num_tokens", "parent", "position", "tenant")

    def __init__(self, header: Header) -> None:
        self.parent = header.parent
        self.anchor = header.anchor
        self.position = header.position
        self.num_tokens = header.num_tokens
        self.tenant = header.tenant
        self.created = header.created
        self.last_used = header.created
        self.num_hits = 0

    def info(self, key: bytes, nbytes: int) -> EntryInfo:
        return EntryInfo(
            key=key,
            parent=self.parent,
            anchor=self.anchor,
            position=self.position,
            num_tokens=self.num_tokens,
            nbytes=nbytes,
            tenant=self.tenant,
            created=self.created,
            last_used=self.last_used,
            num_hits=self.num_hits,
        )


class NotOursError(Exception):
    """The directory holds something that this program did not write and must not touch."""


class Environment:
    """One namespace's LMDB environment and the index of what is in it.

    Notes:
        Not thread-safe by itself: whoever writes holds the tier's write lock, whoever reads is between :meth:`enter`
        and :meth:`leave`. Methods raise ``lmdb.Error`` or ``OSError``; a write that raised changed nothing.
    """

    def __init__(self, directory: Path, map_size: int, boot_id: str, namespace: Namespace | None = None) -> None:
        """Open the environment, or create it empty where ``namespace`` is given.

        Raises:
            lmdb.Error, OSError: it cannot be opened.
            NotOursError: it is of another format.
        """
        self.directory = directory
        self.index: dict[bytes, IndexEntry] = {}
        self.foreign: dict[bytes, int] = {}  # keys of records of another format version -> bytes they take
        self.used: set[bytes] = set()
        self.dirty = False
        self.broken = False
        self.num_bad = 0
        self._num_inside = 0
        self._closing = False
        self._gate = threading.Condition()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if namespace is not None:
            write_mark(directory, boot_id)
        self._env = lmdb.open(
            str(directory),
            map_size=map_size,
            mode=0o600,
            sync=False,
            metasync=False,
            readahead=True,  # values are large: cold reads are 5 to 10 times faster with it
            max_dbs=4,
            max_readers=512,
            lib_version=0,  # the file format of LMDB 0.9, whatever the binding's default becomes
        )
        try:
            self._meta = self._env.open_db(b"meta", create=namespace is not None)
            self.namespace = self._describe(namespace)
            write_mark(directory, boot_id)  # from here on something may be written
            self._env.reader_check()
            self._records, self._tokens, self._use = map(self._env.open_db, (b"records", b"tokens", b"use"))
        except BaseException:
            self._env.close()
            raise
        self.ns_id = self.namespace.ns_id()
        self.payload_nbytes = self.namespace.payload_nbytes
        self.record_nbytes = record_nbytes(self.payload_nbytes)
        self.cost = self.record_nbytes + 16

    @property
    def live_nbytes(self) -> int:
        """Bytes of the pages that hold live records."""
        return len(self.index) * self.cost + sum(self.foreign.values())

    @property
    def allocated_nbytes(self) -> int:
        """Bytes that the data file takes from the filesystem."""
        try:
            return (self.directory / "data.mdb").stat().st_blocks * 512
        except FileNotFoundError:
            return 0

    @property
    def closed(self) -> bool:
        return self._closing

    def fits(self, record: Record) -> bool:
        """Return whether a record is of this namespace and of its size."""
        return len(record.data) == self.record_nbytes and record.header.ns_id == self.ns_id

    def enter(self) -> bool:
        """Keep the environment open until :meth:`leave`; False where it is being closed."""
        with self._gate:
            if self._closing:
                return False
            self._num_inside += 1
            return True

    def leave(self) -> None:
        with self._gate:
            self._num_inside -= 1
            if not self._num_inside:
                self._gate.notify_all()

    def load(self) -> None:
        """Rebuild the index from the records' headers, and delete records that are damaged."""
        bad: list[bytes] = []
        with self._env.begin(buffers=True) as txn:
            for raw_key, record in txn.cursor(db=self._records):
                key = bytes(raw_key)
                try:
                    self.index[key] = IndexEntry(self._open_record(record, key))
                except ForeignRecordError:
                    self.foreign[key] = -(-(len(record) + 16) // _PAGE) * _PAGE
                except BadRecordError:
                    bad.append(key)
            for raw_key, use in txn.cursor(db=self._use):
                entry = self.index.get(bytes(raw_key))
                if entry is not None and len(use) == _USE.size:
                    entry.last_used, entry.num_hits = _USE.unpack(use)
        if bad:
            self.delete(bad)
            self.num_bad = len(bad)

    def put(self, records: Sequence[Record]) -> list[Status]:
        """Write records in one transaction. A key that is there is left alone. The index is not changed."""
        statuses = []
        with self._env.begin(write=True) as txn:
            for record in records:
                key = record.header.key
                stored = txn.put(key, record.data, overwrite=False, db=self._records)
                if stored and record.tokens:
                    txn.put(key, record.tokens, db=self._tokens)
                statuses.append(Status.OK if stored else Status.EXISTS)
        self.dirty = True
        return statuses

    def delete(self, keys: Iterable[bytes]) -> None:
        """Delete records in one transaction. The index is not changed."""
        with self._env.begin(write=True) as txn:
            for key in keys:
                txn.delete(key, db=self._records)
                txn.delete(key, db=self._tokens)
                txn.delete(key, db=self._use)
        self.dirty = True

    def read(self, ref: Ref, parts: Sequence[memoryview]) -> Header | None:
        """Copy a payload into ``parts`` and verify it there; None where the record has gone.

        Raises:
            BadRecordError, ForeignRecordError: as :func:`deliver`.
        """
        with self._env.begin(buffers=True) as txn:
            record = txn.get(ref.key, db=self._records)
            if record is None:
                return None
            self._open_record(record, ref.key)
            return deliver(record, ref, self.ns_id, self.payload_nbytes, parts)

    def tokens(self, key: bytes) -> bytes:
        """Return the token ids stored with a chunk, or nothing."""
        with self._env.begin() as txn:
            return bytes(txn.get(key, default=b"", db=self._tokens))

    def write_use(self, uses: Sequence[tuple[bytes, float, int]]) -> None:
        """Write the last use and the number of hits of keys."""
        with self._env.begin(write=True) as txn:
            for key, last_used, num_hits in uses:
                txn.put(key, _USE.pack(last_used, num_hits), db=self._use)
        self.dirty = True

    def sync(self) -> None:
        """Bring what was committed to the disk. Takes as long as the disk takes."""
        self.dirty = False
        try:
            self._env.sync(True)
        except lmdb.Error:
            self.dirty = True
            raise

    def close(self, *, clean: bool) -> None:
        """Close the environment when nobody is inside any more; ``clean`` promises that all was synced."""
        with self._gate:
            self._closing = True
            self._gate.wait_for(lambda: not self._num_inside)
        self._env.close()
        if clean:
            write_mark(self.directory, CLEAN)

    def _open_record(self, record: memoryview, key: bytes) -> Header:
        header = open_record(record, key=key, ns_id=self.ns_id, payload_nbytes=self.payload_nbytes)
        if len(record) != self.record_nbytes:
            raise BadRecordError(f"a record has {len(record)} bytes; expected {self.record_nbytes}")
        return header

    def _describe(self, namespace: Namespace | None) -> Namespace:
        with self._env.begin(write=namespace is not None) as txn:
            if namespace is not None:
                txn.put(b"format", DISK_FORMAT.encode(), db=self._meta)
                txn.put(b"namespace", namespace.to_json(), db=self._meta)
                return namespace
            stored = bytes(txn.get(b"format", default=b"", db=self._meta))
            if stored != DISK_FORMAT.encode():
                raise NotOursError(f"format {stored.decode(errors='replace')!r}")
            try:
                return Namespace.from_json(bytes(txn.get(b"namespace", default=b"", db=self._meta)))
            except msgspec.MsgspecError as error:
                raise NotOursError(f"a namespace that this program does not understand ({error})") from None


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
    if mark is not None and mark.format != DISK_FORMAT:
        raise NotOursError(f"format {mark.format!r}; this program reads {DISK_FORMAT!r}")


def write_mark(directory: Path, boot: str) -> None:
    """Replace the mark, durably."""
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
