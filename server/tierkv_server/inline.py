"""Inline sessions: payloads over the connection, for engines that share no memory with this server.

Theory of operation. Such a session's pool is memory of this server, a part of it for each connection that moves
payloads. FETCH brings payloads there as it would into an engine's pool (verified), and they are sent from there. A
STORE's payloads are received there, compared with the checksums that came before them, and stored as they would be
from an engine's pool. The service does not know the difference.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tierkv.config import COMMAND_NBYTES
from tierkv.errors import BusyError, RefusedError, UnavailableError
from tierkv.inline_client import CHECKSUM_NBYTES
from tierkv.messages import BAD, FROM_DISK, FROM_SHARED, StoreItem
from tierkv.payload import checksum
from tierkv.pool import HostPool, PoolShape, Segment
from tierkv.resp import MAX_BULK_NBYTES, Value, encode_start
from tierkv.sizes import format_size
from tierkv.tiers.base import Ref

if TYPE_CHECKING:
    from tierkv_server.service import Service
    from tierkv_server.session import Session

#: What all inline sessions may have together. Memory is taken when it is first used.
MAX_INLINE_NBYTES = 2 << 30
#: Connections of a session that may move payloads: an engine's lanes, and its connection for stores.
MAX_MOVERS = 5
_FOUND = FROM_DISK + FROM_SHARED


class Payloads(NamedTuple):
    """The reply to an inline FETCH: letters, checksums of the payloads that were found, and the payloads."""

    letters: bytes
    checksums: bytes
    payloads: list[memoryview]

    def views(self) -> list[bytes | memoryview]:
        """Return it as RESP2, the payloads as they are."""
        parts: list[bytes | memoryview] = []
        between = encode_start(2 + len(self.payloads), [self.letters, self.checksums])
        for payload in self.payloads:
            parts += [between + b"$%d\r\n" % len(payload), payload]
            between = b"\r\n"
        return [*parts, between]


class InlineMemory:
    """Counts what the pools of all inline sessions may take.

    Args:
        budget: bytes.
    """

    def __init__(self, budget: int = MAX_INLINE_NBYTES) -> None:
        self.in_use = 0
        self._budget = budget
        self._lock = threading.Lock()

    def make_pool(self, payload_nbytes: int) -> InlinePool:
        """Return the pool of a session whose payloads have ``payload_nbytes``.

        Raises:
            BusyError: there is no memory for it now.
            RefusedError: its payloads are too long for a command.
        """
        if payload_nbytes > MAX_BULK_NBYTES:
            raise RefusedError(
                f"chunks of {format_size(payload_nbytes)} are too long to travel over a connection (at most "
                f"{format_size(MAX_BULK_NBYTES)}); set a smaller chunk_tokens"
            )
        shape = PoolShape(MAX_MOVERS * num_slots(payload_nbytes), 1, payload_nbytes)
        with self._lock:
            if self.in_use + shape.nbytes > self._budget:
                raise BusyError(
                    f"this store server has no memory for another engine over TCP ({format_size(self.in_use)} of "
                    f"{format_size(self._budget)} are in use); use a server on this engine's machine, or another one"
                )
            self.in_use += shape.nbytes
        return InlinePool(shape, self)

    def give_back(self, nbytes: int) -> None:
        with self._lock:
            self.in_use -= nbytes


def num_slots(payload_nbytes: int) -> int:
    """Return how many payloads one inline command moves at most."""
    return max(1, -(-COMMAND_NBYTES // payload_nbytes))


class InlinePool(HostPool):
    """Memory of this server that stands for an engine's pool.

    Args:
        shape: one part a slot: a payload is in one piece here.
        memory: what it is counted in.
    """

    def __init__(self, shape: PoolShape, memory: InlineMemory) -> None:
        try:
            super().__init__(shape, [Segment.create(shape.segment_nbytes(0), populate=False)])
        except BaseException:
            memory.give_back(shape.nbytes)
            raise
        self._memory: InlineMemory | None = memory
        num = num_slots(shape.payload_nbytes)
        self._free = [range(i * num, (i + 1) * num) for i in range(MAX_MOVERS)]
        self._lock = threading.Lock()

    def claim(self) -> range:
        """Return slots for a connection.

        Raises:
            RefusedError: as many connections have some as may.
        """
        with self._lock:
            if not self._free:
                raise RefusedError(f"{MAX_MOVERS} connections of a session may move payloads over the connection")
            return self._free.pop()

    def give_back(self, slots: range) -> None:
        """Take slots back from a connection that is gone."""
        with self._lock:
            self._free.append(slots)

    def close(self) -> None:
        super().close()
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.give_back(self.shape.nbytes)


class Mover:
    """What a connection needs to move payloads: slots of its session's pool, from its first such command on.

    Thread-safety: belongs to the thread that serves the connection.
    """

    def __init__(self, session: Session) -> None:
        assert isinstance(session.pool, InlinePool)
        self._session = session
        self._pool = session.pool
        self._slots = range(0)

    def close(self) -> None:
        """Give the slots back. Idempotent."""
        if self._slots:
            self._pool.give_back(self._slots)
            self._slots = range(0)

    def place(self, index: int, nbytes: int) -> list[memoryview] | None:
        """Return where the payload at ``index`` of a STORE is to be received; None where it is not to come in."""
        try:
            slots = self._claim()
            with self._session.using() as pool:
                if index >= len(slots) or nbytes != pool.shape.payload_nbytes:
                    return None
                pool.generations[slots[index]] += 1
                return pool.parts(slots[index])
        except (RefusedError, UnavailableError):
            return None  # the command says so

    def fetch(self, service: Service, refs: Sequence[Ref]) -> Payloads:
        """Fetch payloads, to be sent.

        Raises:
            ValueError: more than a command moves.
            RefusedError: this connection moves none.
            UnavailableError: the session has ended.
        """
        slots = self._claim()[: len(refs)]
        self._check_number(len(refs))
        with self._session.using() as pool:
            for slot in slots:
                pool.generations[slot] += 1
            letters = service.fetch(self._session, refs, slots)
            payloads = [pool.parts(slots[i])[0] for i, letter in enumerate(letters) if letter in _FOUND]
            return Payloads(letters, b"".join(map(checksum, payloads)), payloads)

    def store(self, service: Service, items: Sequence[StoreItem], checksums: bytes, num_placed: int) -> bytes:
        """Store payloads that have been received and return a letter each: ``BAD`` where other bytes came.

        Raises:
            ValueError: the command does not fit together, or is more than one moves.
            RefusedError: this connection moves none.
            UnavailableError: the session has ended.
        """
        slots = self._claim()
        self._check_number(len(items))
        if num_placed != len(items) or len(checksums) != CHECKSUM_NBYTES * len(items):
            raise ValueError(
                f"an inline STORE has a checksum of {CHECKSUM_NBYTES} bytes and a payload of "
                f"{self._pool.shape.payload_nbytes} for each of its {len(items)} items"
            )
        with self._session.using() as pool:
            good = [
                i
                for i in range(len(items))
                if checksum(pool.parts(slots[i])[0]) == checksums[i * CHECKSUM_NBYTES : (i + 1) * CHECKSUM_NBYTES]
            ]
            here = [
                msgspec.structs.replace(items[i], slot=slots[i], generation=int(pool.generations[slots[i]]))
                for i in good
            ]
            stored = service.store(self._session, here)
        letters = bytearray(BAD * len(items))
        for i, letter in zip(good, stored, strict=True):
            letters[i] = letter
        return bytes(letters)

    def _claim(self) -> range:
        if not self._slots:
            self._slots = self._pool.claim()
        return self._slots

    def _check_number(self, num: int) -> None:
        if num > len(self._slots):
            raise ValueError(f"an inline command moves at most {len(self._slots)} payloads of this size; {num} came")


def is_store(items: Sequence[Value]) -> bool:
    """Return whether a command that has begun with ``items`` goes on with the payloads of an inline STORE."""
    return len(items) >= 3 and isinstance(items[0], bytes) and items[0].upper() == b"TKV.STORE"
