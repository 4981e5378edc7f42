"""The cost gate: when fetching loses to computing."""

from __future__ import annotations

import pytest

from tierkv_connector.costs import MARGIN, NUM_NEEDED, PROBE, CostGate

CHUNK_TOKENS, NBYTES = 100, 1_000_000


def gate(prefill: float = 1000.0, **fetch_s: float) -> CostGate:
    """A gate of an engine that computes so many tokens a second, with tiers (by letter) that take so long a chunk."""
    made = CostGate(CHUNK_TOKENS, NBYTES)
    for _ in range(NUM_NEEDED):
        made.note_step(1000, 1000 / prefill)
        for letter, seconds in fetch_s.items():
            made.note_fetch(letter.encode() * 3, 3 * seconds)
    return made


def test_nothing_is_cut_before_enough_is_known() -> None:
    fresh = CostGate(CHUNK_TOKENS, NBYTES)
    assert fresh.worth(b"ds" * 5) == 10
    for _ in range(NUM_NEEDED - 1):
        fresh.note_step(1000, 0.001)
        fresh.note_fetch(b"ss", 100.0)
    assert fresh.worth(b"ss") == 2
    fresh.note_step(1000, 0.001)
    assert fresh.worth(b"ss") == 2, "what a fetch costs is not known yet"
    fresh.note_fetch(b"ss", 100.0)
    assert fresh.worth(b"ss") == 0


@pytest.mark.parametrize(
    ("seconds", "kept"), [(0.05, 4), (0.1, 4), (0.1 * MARGIN, 4), (0.1 * MARGIN * 1.01, 0), (9.0, 0)]
)
def test_a_tier_is_used_while_it_is_not_much_slower_than_computing(seconds: float, kept: int) -> None:
    assert gate(s=seconds).worth(b"ssss") == kept


@pytest.mark.parametrize(
    ("letters", "kept"),
    [
        (b"ddd", 3),
        (b"dddss", 3),  # the end is slow: computed
        (b"ssddd", 0),  # two slow ones cost more than three fast ones save
        (b"sdddddddd", 9),  # one slow one is made up for by what follows
        (b"ddsddddddd", 10),
        (b"", 0),
    ],
)
def test_the_run_that_saves_most_is_fetched(letters: bytes, kept: int) -> None:
    """Computing may take 0.15 s a chunk; one of the disk saves 0.1 of that, one of the shared tier loses 0.35."""
    assert gate(d=0.05, s=0.5).worth(letters) == kept


def test_a_tier_that_is_not_known_is_tried() -> None:
    assert gate(s=9.0).worth(b"dd") == 2


def test_one_plan_in_many_looks_again() -> None:
    slow = gate(s=9.0)
    assert [slow.worth(b"ss") for _ in range(2 * PROBE)].count(2) == 2
    for _ in range(NUM_NEEDED * 4):
        slow.note_fetch(b"s", 0.01)
    assert slow.worth(b"ss") == 2, "it has become faster, and all is fetched again"


def test_a_stall_decides_nothing() -> None:
    steady = gate(s=0.01)
    for _ in range(NUM_NEEDED // 2):
        steady.note_fetch(b"s", 60.0)
    assert steady.worth(b"ssss") == 4


@pytest.mark.parametrize("letters", [b"sd", b"s-", b"-", b"!", b""])
def test_fetches_that_say_nothing_of_one_tier_are_passed_over(letters: bytes) -> None:
    unknown = gate()
    for _ in range(NUM_NEEDED):
        unknown.note_fetch(letters, 100.0)
    assert unknown.stat().keys() == {"prefill_tokens_per_s"}


def test_short_steps_say_nothing_of_prefill() -> None:
    unknown = CostGate(CHUNK_TOKENS, NBYTES)
    for _ in range(NUM_NEEDED):
        unknown.note_step(3, 0.02)
        unknown.note_step(1000, 0.0)
    assert unknown.chunk_s is None


def test_what_it_tells_people() -> None:
    assert gate(prefill=2000.0, d=0.001, s=0.01).stat() == pytest.approx(
        {"prefill_tokens_per_s": 2000.0, "disk_bytes_per_s": 1e9, "shared_bytes_per_s": 1e8}
    )
