"""Payloads over the connection: what an engine's client does where the server does not share its memory.

Theory of operation. The reader thread is the only one that touches slots here. FETCH: each payload is received straight
into its slot and verified there against the checksum that came before it. STORE: each payload is copied out of its
slot to a buffer of this client, the slot's generation is compared before and after (as the server does with shared
memory), and what is sent is that copy and its checksum. So a slot that is reused meanwhile is never sent under the old
key, and the slots of a FETCH are free again as soon as the reader thread has let go of its session.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from tierkv.errors import ProtocolError
from tierkv.hostindex import Fetch
from tierkv.messages import BAD, FROM_DISK, FROM_SHARED, STALE, StoreItem
from tierkv.payload import checksum
from tierkv.pool import HostPool
from tierkv.resp import Placed, Value, encode_start

CHECKSUM_NBYTES = 16
_FOUND = FROM_DISK + FROM_SHARED


class InlineTransfers:
    """Moves payloads between the slots of a pool and a connection. Belongs to the client's reader thread.

    Args:
        pool: the engine's host pool; not owned.
    """

    def __init__(self, pool: HostPool) -> None:
        self.num_bad = 0  #: payloads that arrived with other bytes than were sent
        self._pool = pool
        self._staging: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)

    # -- fetch: the reply is an array of letters, checksums of the payloads, and the payloads

    def place(self, fetch: Fetch, items: Sequence[Value], nbytes: int) -> list[memoryview] | None:
        """Return where the next payload of a reply goes: the parts of its slot. None for what is no payload.

        Raises:
            ProtocolError: the reply makes no sense.
        """
        if len(items) < 2:
            return None
        found = _found(fetch, items)
        at = len(items) - 2
        if at >= len(found) or nbytes != self._pool.shape.payload_nbytes:
            raise ProtocolError(f"a payload of {nbytes} bytes came that does not belong to the reply's letters")
        return self._pool.parts(fetch.entries[found[at]].slot)

    def verified(self, fetch: Fetch, reply: Value) -> bytes:
        """Return the letters of a reply whose payloads are in their slots; what arrived damaged is a miss.

        Raises:
            ProtocolError: the reply makes no sense.
        """
        if not isinstance(reply, list) or len(reply) < 2:
            raise ProtocolError("the reply to an inline FETCH is an array of letters, checksums and payloads")
        found = _found(fetch, reply)
        letters, checksums = reply[0], reply[1]
        assert isinstance(letters, bytes)
        assert isinstance(checksums, bytes)
        payloads = reply[2:]
        if len(payloads) != len(found) or not all(isinstance(payload, Placed) for payload in payloads):
            raise ProtocolError(f"{len(found)} payloads were to come, and {len(payloads)} did")
        result = bytearray(letters)
        for at, index in enumerate(found):
            digest = xxhash.xxh3_128()
            for part in self._pool.parts(fetch.entries[index].slot):
                digest.update(part)
            if digest.digest() != checksums[at * CHECKSUM_NBYTES : (at + 1) * CHECKSUM_NBYTES]:
                self.num_bad += 1
                result[index : index + 1] = BAD
        return bytes(result)

    # -- store

    def pack(self, items: Sequence[StoreItem]) -> tuple[list[memoryview], list[bool]]:
        """Return the STORE command of those items whose slots still hold them, and which those are.

        The command's payloads are in a buffer that the next call uses again.
        """
        size = self._pool.shape.payload_nbytes
        if self._staging.nbytes < len(items) * size:
            self._staging = np.empty(len(items) * size, dtype=np.uint8)
        payloads: list[npt.NDArray[np.uint8]] = []
        kept = []
        for item in items:
            at = len(payloads) * size
            payload = self._staging[at : at + size]
            kept.append(self._pool.read(item.slot, item.generation, payload))
            if kept[-1]:
                payloads.append(payload)
        sent = [item for item, there in zip(items, kept, strict=True) if there]
        sums = b"".join(checksum(payload.data) for payload in payloads)
        words = [b"TKV.STORE", msgspec.msgpack.encode(sent), sums]
        views = [memoryview(encode_start(len(words) + len(payloads), words))]
        for payload in payloads:
            views += [memoryview(b"$%d\r\n" % size), payload.data, memoryview(b"\r\n")]
        return views, kept


def merge_letters(letters: bytes | None, kept: Sequence[bool]) -> bytes | None:
    """Return a letter for every item of a STORE: the server's for those sent, ``STALE`` for the others."""
    if letters is None or len(letters) != sum(kept):
        return None
    answers = iter(letters)
    return b"".join(bytes([next(answers)]) if there else STALE for there in kept)


def _found(fetch: Fetch, items: Sequence[Value]) -> list[int]:
    """Return the indices of the chunks that a reply brings, from its letters.

    Raises:
        ProtocolError: letters or checksums do not fit what was asked for.
    """
    letters, checksums = items[0], items[1]
    if not isinstance(letters, bytes) or len(letters) != len(fetch.entries) or not isinstance(checksums, bytes):
        raise ProtocolError("an inline FETCH is answered with a letter a key")
    found = [i for i, letter in enumerate(letters) if letter in _FOUND]
    if len(checksums) != len(found) * CHECKSUM_NBYTES:
        raise ProtocolError("an inline FETCH is answered with a checksum a payload")
    return found
