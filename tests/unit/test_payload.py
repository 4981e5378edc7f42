"""The record format: its bytes are fixed, and nothing that was damaged is believed."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc

import msgspec
import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from records import make_namespace, make_record, payload_of
from tierkv.payload import (
    CODEC_RAW,
    CODEC_SHUFFLE_ZSTD,
    FORMAT_VERSION,
    HEADER_NBYTES,
    BadRecordError,
    ForeignRecordError,
    Header,
    checksum,
    open_record,
    record_nbytes,
    unpack_stored,
)
from tierkv.tiers.base import Ref, deliver
from tierkv.tiers.compression import Codec, element_nbytes

HEADER = Header(
    layout_id=bytes(range(16)),
    ns_id=bytes(range(16, 32)),
    key=bytes(range(32, 64)),
    parent=bytes(range(64, 96)),
    anchor=bytes(range(96, 128)),
    position=7,
    num_tokens=64,
    tenant=bytes(range(128, 144)),
    created=1_700_000_000.5,
    raw_nbytes=4096,
    checksum=bytes(range(144, 160)),
)

GOLDEN = (
    "544945524b560d0a" + "0100" + "00" + "00" + "00010000"
    "000102030405060708090a0b0c0d0e0f"
    "101112131415161718191a1b1c1d1e1f"
    "202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f"
    "404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f"
    "606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f"
    "07000000"
    "40000000"
    "808182838485868788898a8b8c8d8e8f"
    "00002040fc54d941"
    "0010000000000000"
    "0010000000000000"
    "909192939495969798999a9b9c9d9e9f" + "00" * 40
)
GOLDEN_CHECK = "01c751655eaed84c"
GOLDEN_XXH3_128 = "f1f8a93f50849ac39408a4433b952d71"  # of the bytes 0 to 255

NAMESPACE = make_namespace(payload_nbytes=2048, num_parts=2)
NS_ID = NAMESPACE.ns_id()
KEY = bytes(range(32))
RECORD = make_record(NAMESPACE, KEY, bytes(32), KEY, 0, created=1.0)
BYTES = bytes(RECORD.data)


def open_and_deliver(record: bytes) -> tuple[Header, bytes]:
    buffer = bytearray(NAMESPACE.payload_nbytes)
    half = len(buffer) // 2
    parts = [memoryview(buffer)[:half], memoryview(buffer)[half:]]
    header = deliver(memoryview(record), Ref(KEY, KEY), NS_ID, NAMESPACE.payload_nbytes, parts)
    return header, bytes(buffer)


def repack(**changes: tuple[int, bytes]) -> bytes:
    """The record with bytes of its header replaced and the header's own checksum made right again."""
    head = bytearray(BYTES[: HEADER_NBYTES - 8])
    for at, value in changes.values():
        head[at : at + len(value)] = value
    return bytes(head) + xxhash.xxh3_64_intdigest(bytes(head)).to_bytes(8, "little") + BYTES[HEADER_NBYTES:]


def test_header_bytes_are_golden() -> None:
    packed = HEADER.pack()
    assert len(packed) == HEADER_NBYTES == 256
    assert packed[:248].hex() == GOLDEN
    assert packed[248:].hex() == GOLDEN_CHECK
    assert Header.unpack(packed) == HEADER


def test_checksum_is_golden() -> None:
    assert checksum(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert checksum(bytes(range(256))).hex() == GOLDEN_XXH3_128


def test_fields_stand_where_the_documentation_says() -> None:
    packed = HEADER.pack()
    assert struct.unpack_from("<I", packed, 12)[0] == HEADER_NBYTES
    assert packed[16:32] == HEADER.layout_id
    assert packed[48:80] == HEADER.key
    assert packed[112:144] == HEADER.anchor
    assert struct.unpack_from("<d", packed, 168)[0] == HEADER.created
    assert struct.unpack_from("<QQ", packed, 176) == (HEADER.raw_nbytes, HEADER.raw_nbytes)


def test_a_whole_record_is_delivered() -> None:
    header, payload = open_and_deliver(BYTES)
    assert header == RECORD.header
    assert payload == payload_of(KEY, NAMESPACE.payload_nbytes)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, (HEADER_NBYTES + NAMESPACE.payload_nbytes) * 8 - 1))
def test_any_flipped_bit_is_detected(bit: int) -> None:
    damaged = bytearray(BYTES)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises((BadRecordError, ForeignRecordError)):
        open_and_deliver(bytes(damaged))


def test_every_flipped_bit_of_the_header_is_detected() -> None:
    for bit in range(HEADER_NBYTES * 8):
        damaged = bytearray(BYTES)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises((BadRecordError, ForeignRecordError)):
            Header.unpack(bytes(damaged))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, HEADER_NBYTES + NAMESPACE.payload_nbytes - 1))
def test_a_truncated_record_is_bad(nbytes: int) -> None:
    with pytest.raises(BadRecordError):
        open_and_deliver(BYTES[:nbytes])


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=600))
def test_other_bytes_are_bad(data: bytes) -> None:
    with pytest.raises(BadRecordError):
        Header.unpack(data)


def test_padding_is_not_part_of_the_payload() -> None:
    bare = BYTES[: HEADER_NBYTES + NAMESPACE.payload_nbytes]
    assert open_and_deliver(bare)[1] == open_and_deliver(bare + b"\xff" * 100)[1]


@pytest.mark.parametrize(
    "at, value",
    [(8, (FORMAT_VERSION + 1).to_bytes(2, "little")), (10, b"\x01"), (11, b"\x01"), (12, b"\x00\x02\x00\x00")],
    ids=["version", "codec", "flags", "header length"],
)
def test_what_a_later_version_may_write_is_foreign_not_bad(at: int, value: bytes) -> None:
    with pytest.raises(ForeignRecordError):
        Header.unpack(repack(change=(at, value)))


def test_another_keys_record_is_bad() -> None:
    with pytest.raises(BadRecordError, match="belongs to key"):
        open_record(BYTES, key=bytes(32), ns_id=NS_ID, payload_nbytes=NAMESPACE.payload_nbytes)


def test_another_namespaces_record_is_bad() -> None:
    with pytest.raises(BadRecordError):
        open_record(BYTES, key=KEY, ns_id=bytes(16), payload_nbytes=NAMESPACE.payload_nbytes)


def test_a_record_of_another_length_is_bad() -> None:
    with pytest.raises(BadRecordError, match="expected 4096"):
        open_record(BYTES, key=KEY, ns_id=NS_ID, payload_nbytes=4096)


@pytest.mark.parametrize("payload_nbytes", [1, 3824, 3825, 64 << 10, 1 << 20, (4 << 20) + 1])
def test_records_fill_whole_pages(payload_nbytes: int) -> None:
    nbytes = record_nbytes(payload_nbytes)
    assert (nbytes + 16) % 4096 == 0
    assert HEADER_NBYTES + payload_nbytes <= nbytes < HEADER_NBYTES + payload_nbytes + 4096


# Codec 1


WIDTHS = (1, 2, 4, 8)


def test_a_compressed_header_says_so_and_is_no_raw_one() -> None:
    packed = HEADER.pack(CODEC_SHUFFLE_ZSTD, 1234)
    assert packed[10] == 1
    assert struct.unpack_from("<QQ", packed, 176) == (HEADER.raw_nbytes, 1234)
    assert unpack_stored(packed) == (HEADER, CODEC_SHUFFLE_ZSTD, 1234)
    assert unpack_stored(HEADER.pack()) == (HEADER, CODEC_RAW, HEADER.raw_nbytes)
    with pytest.raises(ForeignRecordError, match="codec 1"):
        Header.unpack(packed)


def test_the_codec_is_golden() -> None:
    """Planes of the elements' bytes, the first bytes first, in one zstd frame: any zstd reads it."""
    payload = bytes(range(8)) * 512
    data = Codec(4096, 2).compress(memoryview(payload))
    assert data is not None
    planes = zstandard.ZstdDecompressor().decompress(data)
    assert planes == bytes((0, 2, 4, 6)) * 512 + bytes((1, 3, 5, 7)) * 512


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=1, max_size=64), st.sampled_from(WIDTHS), st.integers(1, 4), st.integers(1, 40))
def test_what_is_compressed_is_restored(seed: bytes, width: int, num_parts: int, elements: int) -> None:
    part = width * elements
    payload = (seed * (part * num_parts))[: part * num_parts]
    codec = Codec(len(payload), width)
    data = codec.compress(memoryview(payload))
    assert data is None or len(data) < len(payload)
    if data is not None:
        room = bytearray(len(payload))
        codec.restore(data, [memoryview(room)[i : i + part] for i in range(0, len(room), part)])
        assert room == payload


def test_noise_is_not_compressed() -> None:
    assert Codec(64 << 10, 2).compress(memoryview(payload_of(KEY, 64 << 10))) is None


def test_kv_like_bfloat16_gets_smaller_by_a_quarter_and_shuffling_is_why() -> None:
    values = np.random.Generator(np.random.PCG64(1)).standard_normal(1 << 18).astype(np.float32)
    payload = memoryview((values.view(np.uint32) >> 16).astype(np.uint16)).cast("B")
    shuffled, plain = Codec(len(payload), 2).compress(payload), Codec(len(payload), 1).compress(payload)
    assert shuffled is not None and len(payload) / len(shuffled) > 1.25
    assert plain is None or len(plain) > 1.05 * len(shuffled)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_other_bytes_are_no_frame(data: bytes) -> None:
    with pytest.raises(BadRecordError):
        Codec(4096, 2).restore(data, [memoryview(bytearray(4096))])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_frame_raises_or_gives_bytes_for_the_checksum_to_refuse(data: st.DataObject) -> None:
    payload = bytes(range(256)) * 16
    frame = bytearray(Codec(4096, 2).compress(memoryview(payload)) or b"")
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= 1 << data.draw(st.integers(0, 7))
    room = bytearray(4096)
    with contextlib.suppress(BadRecordError):
        Codec(4096, 2).restore(frame, [memoryview(room)])
        assert len(room) == 4096
    with pytest.raises(BadRecordError):
        Codec(4096, 2).restore(bytes(frame[:at]), [memoryview(room)])


def test_a_frame_of_another_size_is_refused_before_anything_is_allocated() -> None:
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(256 << 20))
    unsized = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(4096))
    tracemalloc.start()
    for data in (bomb, unsized, zstandard.ZstdCompressor().compress(bytes(4095))):
        with pytest.raises(BadRecordError, match="not 4096"):
            Codec(4096, 2).restore(data, [memoryview(bytearray(4096))])
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    good = zstandard.ZstdCompressor().compress(bytes(4096))
    with pytest.raises(BadRecordError):
        Codec(4096, 2).restore(good + b"more", [memoryview(bytearray(4096))])


@pytest.mark.parametrize(
    "dtype, width",
    [("bfloat16", 2), ("float16", 2), ("float32", 4), ("float64", 8), ("fp8_e4m3", 1), ("uint8", 1), ("", 1)],
)
def test_the_width_of_an_element(dtype: str, width: int) -> None:
    layout = msgspec.structs.replace(NAMESPACE.layout, dtype=dtype)
    assert element_nbytes(layout, 4096) == width
    assert element_nbytes(layout, 4095) == 1
