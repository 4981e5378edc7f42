"""The filter of stored keys: it never denies a key that it was given."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.filter import FINGERPRINT_NBYTES, MAX_BITS, KeyFilter


def key(i: int) -> bytes:
    return hashlib.sha256(str(i).encode()).digest()


@given(st.sets(st.binary(min_size=32, max_size=32), max_size=200), st.integers(0, 1000))
def test_what_was_added_is_known(keys: set[bytes], capacity: int) -> None:
    known = KeyFilter(capacity=capacity)
    known.add(keys)
    assert all(k in known for k in keys)
    copy = KeyFilter(bytes(known.bits))
    assert all(k in copy for k in keys)


def test_one_in_a_hundred_others_passes_at_most() -> None:
    known = KeyFilter(capacity=20_000)
    assert known.capacity >= 20_000
    known.add(key(i) for i in range(20_000))
    passed = sum(key(i) in known for i in range(20_000, 60_000))
    assert 0 < passed < 400


def test_packed_fingerprints_are_the_keys_first_bytes() -> None:
    one, other = KeyFilter(capacity=10), KeyFilter(capacity=10)
    one.add([key(1), key(2)])
    other.add_packed(key(1)[:FINGERPRINT_NBYTES] + key(2)[:FINGERPRINT_NBYTES])
    assert one.bits == other.bits


def test_its_size_is_bounded() -> None:
    assert len(KeyFilter(capacity=1 << 40).bits) == MAX_BITS // 8
    assert key(1) not in KeyFilter(capacity=0)


@pytest.mark.parametrize("bits", [b"", bytes(3), bytes(1023)])
def test_a_size_that_is_no_power_of_two_is_refused(bits: bytes) -> None:
    with pytest.raises(ValueError, match="power of two"):
        KeyFilter(bits)


def test_half_a_fingerprint_is_refused() -> None:
    with pytest.raises(ValueError, match="8 bytes each"):
        KeyFilter().add_packed(b"abc")
