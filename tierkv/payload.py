"""Payload records: a fixed 256-byte header and the payload's bytes, as LMDB and Redis hold them.

The record is written down in ``docs/formats.md`` and meant to last. All numbers are little endian::

    offset  size  field
         0     8  magic  "TIERKV\\r\\n"
         8     2  format version (1)
        10     1  codec (0: raw bytes; 1: byte-shuffle and zstd, see tierkv.tiers.compression)
        11     1  flags (0)
        12     4  header length (256): the payload starts here
        16    16  layout id
        32    16  namespace id
        48    32  key
        80    32  parent key (the root for the first chunk of a chain)
       112    32  anchor key (see tierkv.keys.anchor_index)
       144     4  position of the chunk in its chain
       148     4  tokens of the chunk
       152    16  tenant digest (zeros: no tenant)
       168     8  created, seconds since 1970 (float64)
       176     8  raw length in bytes
       184     8  stored length in bytes (equal to the raw length for codec 0)
       192    16  xxh3-128 of the raw bytes
       208    40  reserved, zero
       248     8  xxh3-64 of the 248 bytes before: a header that was damaged is not believed

The header holds all that listing, chain-aware eviction and rebuilding an index need.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from tierkv.errors import TierKVError

MAGIC = b"TIERKV\r\n"
FORMAT_VERSION = 1
HEADER_NBYTES = 256
CODEC_RAW = 0
CODEC_SHUFFLE_ZSTD = 1

_HEADER = struct.Struct("<8sHBBI16s16s32s32s32sII16sdQQ16s40s")
_CHECK = struct.Struct("<Q")
assert _HEADER.size + _CHECK.size == HEADER_NBYTES


class BadRecordError(TierKVError):
    """The bytes are not a record of ours, or were damaged: a miss, and to be deleted."""


class ForeignRecordError(TierKVError):
    """A record of a format version that this program does not know: a miss, and not ours to delete."""


class Header(NamedTuple):
    """The header of a record; sizes in bytes, ``created`` in seconds since 1970."""

    layout_id: bytes
    ns_id: bytes
    key: bytes
    parent: bytes
    anchor: bytes
    position: int
    num_tokens: int
    tenant: bytes
    created: float
    raw_nbytes: int
    checksum: bytes

    def pack(self, codec: int = CODEC_RAW, stored_nbytes: int | None = None) -> bytes:
        """Return the 256 bytes of the header, of a raw record unless a codec and its stored length are given."""
        body = _HEADER.pack(
            MAGIC,
            FORMAT_VERSION,
            codec,
            0,
            HEADER_NBYTES,
            self.layout_id,
            self.ns_id,
            self.key,
            self.parent,
            self.anchor,
            self.position,
            self.num_tokens,
            self.tenant,
            self.created,
            self.raw_nbytes,
            self.raw_nbytes if stored_nbytes is None else stored_nbytes,
            self.checksum,
            bytes(40),
        )
        return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def unpack(cls, record: bytes | memoryview) -> Header:
        """Return the header at the start of ``record``, which is stored raw.

        Raises:
            BadRecordError: too short, not ours, or damaged.
            ForeignRecordError: ours, of a version or a codec that the caller does not read.
        """
        header, codec, _ = unpack_stored(record)
        if codec != CODEC_RAW:
            raise ForeignRecordError(f"a record uses codec {codec}, where records are raw")
        return header


def unpack_stored(record: bytes | memoryview) -> tuple[Header, int, int]:
    """Return the header at the start of ``record``, its codec, and the bytes of its payload as it is stored.

    Raises:
        BadRecordError: too short, not ours, or damaged.
        ForeignRecordError: ours, of a version this program does not know.
    """
    if len(record) < HEADER_NBYTES:
        raise BadRecordError(f"a record of {len(record)} bytes is shorter than its header ({HEADER_NBYTES})")
    head = bytes(record[:HEADER_NBYTES])
    fields = _HEADER.unpack_from(head)
    magic, version, codec, flags, header_nbytes = fields[:5]
    raw_nbytes, stored_nbytes = fields[14:16]
    if magic != MAGIC:
        raise BadRecordError(f"a record starts with {magic!r}, not with {MAGIC!r}")
    if version != FORMAT_VERSION:
        raise ForeignRecordError(f"a record has format version {version}; this program reads {FORMAT_VERSION}")
    if _CHECK.unpack_from(head, _HEADER.size)[0] != xxhash.xxh3_64_intdigest(head[: _HEADER.size]):
        raise BadRecordError("a record's header does not match its own checksum")
    known = codec == CODEC_SHUFFLE_ZSTD or (codec == CODEC_RAW and raw_nbytes == stored_nbytes)
    if not known or flags != 0 or header_nbytes != HEADER_NBYTES:
        raise ForeignRecordError(f"a record uses codec {codec}, flags {flags}, which this program does not know")
    return Header._make((*fields[5:15], fields[16])), codec, stored_nbytes


def checksum(payload: bytes | bytearray | memoryview) -> bytes:
    """Return the xxh3-128 of a payload's raw bytes (20 GB/s; releases the GIL)."""
    return xxhash.xxh3_128_digest(payload)


def record_nbytes(payload_nbytes: int) -> int:
    """Return the bytes of a record as LMDB stores it: header, payload, and padding up to ``k * 4096 - 16``.

    An LMDB value of that size fills whole pages, so that a freed value's pages fit the next one exactly.
    """
    pages = -(-(HEADER_NBYTES + payload_nbytes + 16) // 4096)
    return pages * 4096 - 16


def open_record(record: bytes | memoryview, *, key: bytes, ns_id: bytes, payload_nbytes: int) -> Header:
    """Return the header of ``record`` if it is the record of ``key`` and whole. The payload is not checked here.

    Raises:
        BadRecordError: another key's, another namespace's, of another length, or damaged.
        ForeignRecordError: of a version this program does not know.
    """
    header = Header.unpack(record)
    if header.key != key or header.ns_id != ns_id:
        raise BadRecordError(f"a record under key {key.hex()[:16]} belongs to key {header.key.hex()[:16]}")
    if header.raw_nbytes != payload_nbytes or len(record) < HEADER_NBYTES + payload_nbytes:
        raise BadRecordError(
            f"a record holds {header.raw_nbytes} bytes of payload in {len(record)}; expected {payload_nbytes}"
        )
    return header
