"""How much is fuzzed: a few seconds in every run of the tests, hours where somebody asks for it.

``TIERKV_FUZZ=100 pytest tests/unit/test_fuzz_resp.py`` tries a hundred times as many examples.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

FACTOR = float(os.environ.get("TIERKV_FUZZ", "1"))


def examples(number: int) -> settings:
    """Return settings for ``number`` examples in an ordinary run."""
    return settings(
        max_examples=max(1, int(number * FACTOR)),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


@st.composite
def mutated(draw: st.DrawFn, data: st.SearchStrategy[bytes], most: int = 4) -> bytes:
    """Draw bytes and damage them: bits flipped, pieces cut out, doubled, replaced or put in."""
    wire = bytearray(draw(data))
    for _ in range(draw(st.integers(0, most))):
        at = draw(st.integers(0, len(wire)))
        end = min(len(wire), at + draw(st.integers(0, 16)))
        kind = draw(st.sampled_from(("flip", "cut", "double", "replace", "digits", "truncate")))
        if kind == "flip" and at < len(wire):
            wire[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del wire[at:end]
        elif kind == "double":
            wire[at:at] = wire[at:end]
        elif kind == "replace":
            wire[at:end] = draw(st.binary(max_size=16))
        elif kind == "digits":
            wire[at:at] = str(draw(st.sampled_from((0, 1, -1, 7, 4096, 1 << 20, 1 << 31, 1 << 63, 10**25)))).encode()
        elif kind == "truncate":
            del wire[at:]
    return bytes(wire)


@st.composite
def pieces(draw: st.DrawFn, wire: bytes, most: int = 8) -> list[bytes]:
    """Draw a way to cut bytes in pieces, some of them empty."""
    cuts = sorted(draw(st.lists(st.integers(0, len(wire)), max_size=most)))
    return [wire[a:b] for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True)]


def joined(parts: Sequence[bytes]) -> bytes:
    return b"".join(parts)
