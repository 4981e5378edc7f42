"""A filter of stored keys: what it does not know is not stored, so that a miss costs no question. Pure.

A Bloom filter over the first 8 bytes of keys (they are digests: their bytes are as good as any hash). With 16 bits a
key and 4 probes one key in 400 that is not stored looks stored, and costs a question in vain. Keys are only ever added;
what was evicted goes when the filter is built anew.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

FINGERPRINT_NBYTES = 8
NUM_PROBES = 4
BITS_PER_KEY = 16
MIN_BITS = 1 << 13
#: 8 MiB; with more keys than four millions (16 TiB of payloads of 4 MiB) the filter lets more pass.
MAX_BITS = 1 << 26

_LOW = (1 << 32) - 1


class KeyFilter:
    """Which keys may be stored.

    Args:
        bits: the filter's bytes, a power of two; None for an empty one.
        capacity: keys that an empty one is to take.

    >>> known = KeyFilter(capacity=10)
    >>> known.add([bytes(32)])
    >>> bytes(32) in known, bytes([7]) * 32 in known
    (True, False)
    """

    def __init__(self, bits: bytes | None = None, capacity: int = 0) -> None:
        if bits is None:
            num_bits = MIN_BITS
            while num_bits < min(capacity * BITS_PER_KEY, MAX_BITS):
                num_bits *= 2
            self.bits = bytearray(num_bits // 8)
        else:
            if not bits or len(bits) & (len(bits) - 1):
                raise ValueError(f"a filter's size is a power of two; {len(bits)} bytes came")
            self.bits = bytearray(bits)
        self._mask = 8 * len(self.bits) - 1

    @property
    def capacity(self) -> int:
        """How many keys it takes before it lets noticeably more pass."""
        return 8 * len(self.bits) // BITS_PER_KEY

    @property
    def may_grow(self) -> bool:
        """Whether one that is built anew may have more bits."""
        return 8 * len(self.bits) < MAX_BITS

    def add(self, keys: Iterable[bytes]) -> None:
        """Add keys (or their first 8 bytes)."""
        self.add_packed(b"".join(key[:FINGERPRINT_NBYTES] for key in keys))

    def add_packed(self, fingerprints: bytes) -> None:
        """Add keys whose first 8 bytes are concatenated.

        Raises:
            ValueError: not a whole number of them.
        """
        if len(fingerprints) % FINGERPRINT_NBYTES:
            raise ValueError(f"fingerprints are {FINGERPRINT_NBYTES} bytes each; {len(fingerprints)} bytes came")
        bits, mask = self.bits, self._mask
        for value in np.frombuffer(fingerprints, dtype="<u8").tolist():
            low, step = value & _LOW, (value >> 32) | 1
            for i in range(NUM_PROBES):
                at = (low + i * step) & mask
                bits[at >> 3] |= 1 << (at & 7)

    def __contains__(self, key: bytes) -> bool:
        value = int.from_bytes(key[:FINGERPRINT_NBYTES], "little")
        low, step = value & _LOW, (value >> 32) | 1
        bits, mask = self.bits, self._mask
        for i in range(NUM_PROBES):
            at = (low + i * step) & mask
            if not bits[at >> 3] & (1 << (at & 7)):
                return False
        return True
