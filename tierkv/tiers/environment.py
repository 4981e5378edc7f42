"""One LMDB environment of the disk tier: a namespace's records on disk, and the index of them in memory.

See :mod:`tierkv.tiers.disk` for the databases in it. Payloads are not read through LMDB's memory map but with
``preadv`` at the place in the file that was noted when they were written: a disk that fails answers with an error
there, where a map kills the process, and the binding touches every page of a value that it is asked for. While a read
transaction is open LMDB uses none of the pages that it may see again, and every record says on its first page where it
is and whose.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import lmdb
import msgspec
import numpy as np
import xxhash

from tierkv.layout import Namespace
from tierkv.payload import HEADER_NBYTES, BadRecordError, ForeignRecordError, Header, open_record, record_nbytes
from tierkv.tiers.base import Limits, Record, Status
from tierkv.tiers.disk_index import Index, IndexEntry
from tierkv.tiers.disk_mark import CLEAN, DISK_FORMAT, OLDER_FORMATS, NotOursError, write_mark

logger = logging.getLogger("tierkv")

PAGE_NBYTES = 4096
#: A data file begins with two of them.
_META_PAGES = 2
_USE = struct.Struct("<dQ")
#: Of a row of ``heads``, after the record's header: first page, time of the store.
_PLACE = struct.Struct("<Qd")
#: LMDB's header of a page: number, padding, flags, number of pages that belong together.
_PAGE_HEADER = struct.Struct("<QHHI")
_P_OVERFLOW = 0x04
#: Copied and hashed in pieces that stay in a core's second-level cache in between.
_PIECE_NBYTES = 256 << 10
#: A map is larger than the file by this, so that a larger budget's file takes deletions.
_SPARE_MAP = 64 << 20
#: What :meth:`Environment.adopt` exchanges: the files that are open, and what is known of them.
_FILES = ("_env", "_meta", "_records", "_tokens", "_use", "_heads", "_life", "_file", "_txn_id", "_disturbed")
#: A record whose store differs from its creation by less was stored when it was created.
_SAME_TIME_S = 1.0


class Life(msgspec.Struct, frozen=True, array_like=True):
    """A row of ``life``: when the entry was told to expire (0: it was not), and its pins."""

    until: float = 0.0
    pins: list[tuple[str, float]] = []


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
        self.map_size = map_size
        self.dirty = False
        self.broken = False
        self.syncing = False  # somebody is inside for as long as a sync takes; changed under the tier's write lock
        self.num_bad = 0
        self._num_inside = 0
        self._closing = False
        self._adopting = False
        self._gate = threading.Condition()
        self._txn_id = 0
        self._disturbed = False
        self._file = -1
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if namespace is not None:
            write_mark(directory, boot_id)
        self._env = lmdb.open(
            str(directory),
            map_size=max(map_size, self._file_nbytes() + _SPARE_MAP),
            mode=0o600,
            sync=False,
            metasync=False,
            readahead=True,  # values are large: cold reads are 5 to 10 times faster with it
            max_dbs=6,
            max_readers=512,
            lib_version=0,  # the file format of LMDB 0.9, whatever the binding's default becomes
        )
        try:
            self._meta = self._env.open_db(b"meta", create=namespace is not None)
            self.namespace, old = self._describe(namespace)
            write_mark(directory, boot_id)  # from here on something may be written
            self._env.reader_check()
            names = (b"records", b"tokens", b"use", b"heads", b"life")
            self._records, self._tokens, self._use, self._heads, self._life = map(self._env.open_db, names)
            self._file = os.open(directory / "data.mdb", os.O_RDWR | os.O_CLOEXEC)
            self.ns_id = self.namespace.ns_id()
            self.payload_nbytes = self.namespace.payload_nbytes
            self.record_nbytes = record_nbytes(self.payload_nbytes)
            self.cost = self.record_nbytes + 16
            self.index = Index(self.cost)
            self._txn_id = self._last_txn_id()
            if old:
                self._upgrade()
        except BaseException:
            self._close_files()
            raise

    @property
    def allocated_nbytes(self) -> int:
        """Bytes that the data file takes from the filesystem."""
        try:
            return (self.directory / "data.mdb").stat().st_blocks * 512
        except FileNotFoundError:
            return 0

    def _file_nbytes(self) -> int:
        try:
            return (self.directory / "data.mdb").stat().st_size
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
            self._gate.wait_for(lambda: not self._adopting)
            if self._closing:
                return False
            self._num_inside += 1
            return True

    def leave(self) -> None:
        with self._gate:
            self._num_inside -= 1
            if not self._num_inside:
                self._gate.notify_all()

    # Opening

    def load(self) -> None:
        """Rebuild the index from the rows of ``heads``; records whose row is damaged are deleted.

        Records themselves are not read: their headers are verified when they are.
        """
        bad: list[bytes] = []
        found: dict[bytes, IndexEntry] = {}
        with self._env.begin(buffers=True) as txn:
            for raw_key, row in txn.cursor(db=self._heads):
                key = bytes(raw_key)
                try:
                    found[key] = self._entry_of(key, row)
                except ForeignRecordError:
                    self.index.foreign.add(key)
                except BadRecordError:
                    bad.append(key)
            for raw_key, use in txn.cursor(db=self._use):
                if (entry := found.get(bytes(raw_key))) is not None and len(use) == _USE.size:
                    entry.last_used, entry.num_hits = _USE.unpack(use)
            for raw_key, row in txn.cursor(db=self._life):
                if (entry := found.get(bytes(raw_key))) is not None:
                    with suppress(msgspec.MsgspecError):
                        life = msgspec.msgpack.decode(row, type=Life)
                        entry.until, entry.pins = life.until, dict(life.pins) or None
        for key, entry in found.items():
            self.index.add(key, entry, Limits())
        if bad:
            self.delete(bad)
            self.num_bad += len(bad)

    def _entry_of(self, key: bytes, row: memoryview) -> IndexEntry:
        if len(row) != HEADER_NBYTES + _PLACE.size:
            raise BadRecordError(f"a row of {len(row)} bytes does not describe a record")
        header = Header.unpack(row)
        if header.key != key or header.ns_id != self.ns_id or header.raw_nbytes != self.payload_nbytes:
            raise BadRecordError(f"a row under key {key.hex()[:16]} belongs to key {header.key.hex()[:16]}")
        page, stored = _PLACE.unpack_from(row, HEADER_NBYTES)
        return IndexEntry(header, page, stored)

    def _upgrade(self) -> None:
        """Bring an environment of format 1 up to date, in one transaction: describe every record in ``heads``."""
        logger.warning("The disk tier upgrades %s to %s; it reads all of it once.", self.directory, DISK_FORMAT)
        bad = []
        with self._writing() as txn:
            for raw_key, record in txn.cursor(db=self._records):
                key = bytes(raw_key)
                try:
                    with suppress(ForeignRecordError):
                        self._open_record(record, key)
                    page = page_of(record)
                except BadRecordError:
                    bad.append(key)
                    continue
                header = bytes(record[:HEADER_NBYTES])
                created = Header.unpack(header).created if _is_ours(header) else 0.0
                txn.put(key, header + _PLACE.pack(page, created), db=self._heads)
            for key in bad:
                self._delete_rows(txn, key)
            txn.put(b"format", DISK_FORMAT.encode(), db=self._meta)
        self.num_bad += len(bad)

    def _describe(self, namespace: Namespace | None) -> tuple[Namespace, bool]:
        """Return the namespace, and whether the environment is of an older format."""
        with self._env.begin(write=namespace is not None) as txn:
            if namespace is not None:
                txn.put(b"format", DISK_FORMAT.encode(), db=self._meta)
                txn.put(b"namespace", namespace.to_json(), db=self._meta)
                return namespace, False
            stored = bytes(txn.get(b"format", default=b"", db=self._meta)).decode(errors="replace")
            if stored != DISK_FORMAT and stored not in OLDER_FORMATS:
                raise NotOursError(f"format {stored!r}; this program reads {DISK_FORMAT!r}")
            try:
                described = Namespace.from_json(bytes(txn.get(b"namespace", default=b"", db=self._meta)))
            except msgspec.MsgspecError as error:
                raise NotOursError(f"a namespace that this program does not understand ({error})") from None
            return described, stored != DISK_FORMAT

    # Writing

    def put(self, records: Sequence[Record], now: float) -> list[IndexEntry | Status]:
        """Write records in one transaction; returns the entry of each, to be indexed, or ``Status.EXISTS``."""
        results: list[IndexEntry | Status] = []
        with self._writing() as txn:
            for record in records:
                header = record.header
                if not txn.put(header.key, record.data, overwrite=False, db=self._records):
                    results.append(Status.EXISTS)
                    continue
                page = page_of(txn.get(header.key, db=self._records))
                stored = header.created if abs(now - header.created) < _SAME_TIME_S else now
                row = bytes(record.data[:HEADER_NBYTES]) + _PLACE.pack(page, stored)
                txn.put(header.key, row, db=self._heads)
                if record.tokens:
                    txn.put(header.key, record.tokens, db=self._tokens)
                results.append(IndexEntry(header, page, stored))
        return results

    def put_copies(self, copies: Sequence[tuple[Record, IndexEntry]]) -> list[int]:
        """Write records of another environment of this namespace, with what is known of each, in one transaction.

        Returns the first page of each here. None of the keys may be there.
        """
        pages = []
        with self._writing() as txn:
            for record, entry in copies:
                key = record.header.key
                txn.put(key, record.data, overwrite=False, db=self._records)
                pages.append(page_of(txn.get(key, db=self._records)))
                row = bytes(record.data[:HEADER_NBYTES]) + _PLACE.pack(pages[-1], entry.stored)
                txn.put(key, row, db=self._heads)
                if record.tokens:
                    txn.put(key, record.tokens, db=self._tokens)
                if entry.num_hits or entry.last_used != entry.created:
                    txn.put(key, _USE.pack(entry.last_used, entry.num_hits), db=self._use)
                if entry.until or entry.pins:
                    life = Life(entry.until, sorted((entry.pins or {}).items()))
                    txn.put(key, msgspec.msgpack.encode(life), db=self._life)
        return pages

    def delete(self, keys: Iterable[bytes]) -> None:
        """Delete records in one transaction. The index is not changed."""
        with self._writing() as txn:
            for key in keys:
                self._delete_rows(txn, key)

    def punch(self, places: Iterable[tuple[bytes, int]]) -> None:
        """Give the pages of records just deleted back to the filesystem; ``places`` are keys and first pages.

        To be called right after :meth:`delete`: LMDB uses these pages again in the second transaction from then, and
        writes them whole. A filesystem that cannot do it keeps them.
        """
        if self._disturbed:
            return
        for key, page in places:
            at = page * PAGE_NBYTES
            try:
                head = os.pread(self._file, _PAGE_HEADER.size + HEADER_NBYTES, at)
                self._check_head(head, key, page)
                if _fallocate(self._file, _PUNCH_HOLE, at, self.cost):
                    return
            except (BadRecordError, ForeignRecordError, OSError):
                continue

    def write_use(self, uses: Sequence[tuple[bytes, float, int]]) -> None:
        """Write the last use and the number of hits of keys."""
        with self._writing() as txn:
            for key, last_used, num_hits in uses:
                txn.put(key, _USE.pack(last_used, num_hits), db=self._use)

    def write_life(self, lives: Sequence[tuple[bytes, Life]]) -> None:
        """Write what keys were told about their life; nothing is kept of those that were told nothing."""
        with self._writing() as txn:
            for key, life in lives:
                if life == Life():
                    txn.delete(key, db=self._life)
                else:
                    txn.put(key, msgspec.msgpack.encode(life), db=self._life)

    def age(self) -> None:
        """Commit a transaction that changes next to nothing, so that pages just freed may be used by the one after."""
        with self._writing() as txn:
            txn.put(b"age", _PAGE_HEADER.pack(txn.id(), 0, 0, 0), db=self._meta)

    def sync(self) -> None:
        """Bring what was committed to the disk. Takes as long as the disk takes."""
        self.dirty = False
        try:
            self._env.sync(True)
        except lmdb.Error:
            self.dirty = True
            raise

    def reap_readers(self) -> int:
        """Free the slots of readers whose process is gone, so that they keep no pages; returns how many."""
        return int(self._env.reader_check())

    def compact_nbytes(self) -> int:
        """Return the bytes that a file with the entries in the index, and nothing else, takes."""
        with self._env.begin() as txn:
            others = [txn.stat(db) for db in (self._meta, self._heads, self._tokens, self._use, self._life)]
            trees = [*others, txn.stat(self._records), txn.stat()]
            pages = sum(tree["branch_pages"] + tree["leaf_pages"] for tree in trees)
            pages += sum(tree["overflow_pages"] for tree in others)
        return len(self.index.entries) * self.cost + (pages + _META_PAGES) * PAGE_NBYTES

    def adopt(self, other: Environment, settle: Callable[[], None], timeout_s: float) -> bool:
        """Go on with the files of ``other``, a copy of this environment, in place of this one's.

        Who reads is waited for, and who comes meanwhile waits. One rename decides: a process that is killed leaves the
        old file or the new one. Afterwards ``other`` has the files that were here, which have no name any more.

        Args:
            settle: called before anybody reads again; it notes the new places of the entries.
            timeout_s: how long readers may take; then False, and nothing has changed.

        Raises:
            OSError: the file could not be renamed; nothing has changed.
        """
        with self._gate:
            self._adopting = True
            try:
                if not self._gate.wait_for(lambda: not self._num_inside, timeout_s):
                    return False
                (other.directory / "data.mdb").replace(self.directory / "data.mdb")
                with suppress(OSError):  # whoever opens this next makes another one
                    (other.directory / "lock.mdb").replace(self.directory / "lock.mdb")
                for name in _FILES:
                    mine, theirs = getattr(self, name), getattr(other, name)
                    setattr(self, name, theirs)
                    setattr(other, name, mine)
                self.dirty = True
                settle()
                return True
            finally:
                self._adopting = False
                self._gate.notify_all()

    @contextmanager
    def _writing(self) -> Iterator[lmdb.Transaction]:
        with self._env.begin(write=True, buffers=True) as txn:
            if txn.id() != self._txn_id + 1:
                self._disturbed = True
            yield txn
        self._txn_id = self._last_txn_id()
        self.dirty = True

    def _delete_rows(self, txn: lmdb.Transaction, key: bytes) -> None:
        for database in (self._records, self._heads, self._tokens, self._use, self._life):
            txn.delete(key, db=database)

    def _last_txn_id(self) -> int:
        return int(self._env.info()["last_txnid"])

    # Reading

    def read(self, key: bytes, page: int, parts: Sequence[memoryview]) -> Header | None:
        """Copy a payload into ``parts`` and verify it there; None where the record has gone.

        Args:
            page: where its entry says that the record is.

        Raises:
            BadRecordError: not the record of ``key``, damaged, or the bytes that arrived do not match its checksum.
            ForeignRecordError: of a format version that this program does not know.
            OSError: the disk failed.
        """
        try:
            return self._read_once(key, page, parts)
        except (BadRecordError, ForeignRecordError):
            # It may have been deleted since, and its pages given back: a newer transaction says what is the case.
            return self._read_once(key, None, parts)

    def _read_once(self, key: bytes, page: int | None, parts: Sequence[memoryview]) -> Header | None:
        with self._env.begin(buffers=True) as txn:  # while it is open no page that it sees is used again
            if page is None or txn.id() != self._txn_id or self._disturbed:
                page = self._locate(txn, key)
            return None if page is None else self._copy(key, page, parts)

    def prefetch(self, page: int) -> None:
        """Have the system read a record from the disk, if it is not in memory, while others are being copied."""
        at = page * PAGE_NBYTES
        try:
            os.preadv(self._file, (bytearray(1),), at + self.cost - 1, os.RWF_NOWAIT)
        except OSError:  # not in memory, or this filesystem cannot tell
            with suppress(OSError):  # whoever reads it will see
                os.posix_fadvise(self._file, at, self.cost, os.POSIX_FADV_WILLNEED)

    @contextmanager
    def record(self, key: bytes) -> Iterator[Record | None]:
        """Give a whole record with its token ids, valid within the context; None where it is gone or not whole."""
        with self._env.begin(buffers=True) as txn:
            data = txn.get(key, db=self._records)
            try:
                header = self._open_record(data, key) if data is not None else None
            except (BadRecordError, ForeignRecordError):
                header = None
            tokens = bytes(txn.get(key, default=b"", db=self._tokens))
            yield None if header is None or data is None else Record(header, memoryview(data), tokens)

    def tokens(self, key: bytes) -> bytes:
        """Return the token ids stored with a chunk, or nothing."""
        with self._env.begin() as txn:
            return bytes(txn.get(key, default=b"", db=self._tokens))

    def _locate(self, txn: lmdb.Transaction, key: bytes) -> int | None:
        """Ask LMDB where a record is: something was written since, or what was read is not right."""
        record = txn.get(key, db=self._records)
        if record is None:
            return None
        self._open_record(record, key)
        return page_of(record)

    def _copy(self, key: bytes, page: int, parts: Sequence[memoryview]) -> Header:
        if sum(map(len, parts)) != self.payload_nbytes:
            raise BadRecordError(f"buffers of {sum(map(len, parts))} bytes for a payload of {self.payload_nbytes}")
        header, head = None, bytearray(_PAGE_HEADER.size + HEADER_NBYTES)
        digest, at = xxhash.xxh3_128(), page * PAGE_NBYTES
        for part in parts:
            for start in range(0, len(part), _PIECE_NBYTES):
                piece = part[start : start + _PIECE_NBYTES]
                wanted = (piece,) if header else (head, piece)
                num = os.preadv(self._file, wanted, at)
                if num != sum(map(len, wanted)):
                    raise OSError(errno.EIO, f"{self.directory / 'data.mdb'} ends within a record")
                if header is None:
                    header = self._check_head(head, key, page)
                digest.update(piece)
                at += num
        if header is None or digest.digest() != header.checksum:
            raise BadRecordError(f"the payload of key {key.hex()[:16]} does not match its checksum")
        return header

    def _check_head(self, head: bytes | bytearray, key: bytes, page: int) -> Header:
        """Return the header of the record that starts at ``page``, given the first bytes there."""
        if len(head) < _PAGE_HEADER.size + HEADER_NBYTES or _PAGE_HEADER.unpack_from(head)[0] != page:
            raise BadRecordError(f"page {page} of the data file says that it is another")
        header = Header.unpack(memoryview(head)[_PAGE_HEADER.size :])
        if header.key != key or header.ns_id != self.ns_id or header.raw_nbytes != self.payload_nbytes:
            raise BadRecordError(f"a record under key {key.hex()[:16]} belongs to key {header.key.hex()[:16]}")
        return header

    def _open_record(self, record: bytes | memoryview, key: bytes) -> Header:
        header = open_record(record, key=key, ns_id=self.ns_id, payload_nbytes=self.payload_nbytes)
        if len(record) != self.record_nbytes:
            raise BadRecordError(f"a record has {len(record)} bytes; expected {self.record_nbytes}")
        return header

    # Closing

    def close(self, *, clean: bool) -> None:
        """Close the environment when nobody is inside any more; ``clean`` promises that all was synced."""
        with self._gate:
            self._closing = True
            self._gate.wait_for(lambda: not self._num_inside)
        self._close_files()
        if clean:
            write_mark(self.directory, CLEAN)

    def _close_files(self) -> None:
        self._env.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def page_of(value: bytes | memoryview | None) -> int:
    """Return the number of the first page of a value that LMDB gave, which has pages of its own.

    LMDB writes its page header, which says the number, right before such a value.

    Raises:
        BadRecordError: the value is too small to have pages of its own.
    """
    if value is None or len(value) < PAGE_NBYTES - _PAGE_HEADER.size:
        raise BadRecordError("a record is too short to be one")
    address = np.frombuffer(value, dtype=np.uint8).__array_interface__["data"][0]
    page, _, flags, _ = _PAGE_HEADER.unpack(ctypes.string_at(address - _PAGE_HEADER.size, _PAGE_HEADER.size))
    if not flags & _P_OVERFLOW:
        raise BadRecordError("a record shares its page with others")
    return int(page)


def _is_ours(header: bytes) -> bool:
    with suppress(BadRecordError, ForeignRecordError):
        return bool(Header.unpack(header))
    return False


_PUNCH_HOLE = 0x03  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_libc_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_libc_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def _fallocate(file: int, mode: int, at: int, nbytes: int) -> int:
    return int(_libc_fallocate(file, mode, at, nbytes))
