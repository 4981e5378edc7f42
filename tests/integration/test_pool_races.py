"""Races of the pool, a tenth of what the full run does: slots are reused while the server holds them, and no byte is
wrong."""

from __future__ import annotations

import pytest

from races import RaceCounts, run_races
from servers import server_binaries

SECONDS = 25.0


@pytest.fixture(scope="module")
def counts() -> RaceCounts:
    return run_races(seed=1, seconds=SECONDS, redis=bool(server_binaries()))


def test_no_byte_is_wrong(counts: RaceCounts) -> None:
    assert not counts.problems
    assert counts.wrong_bytes == 0
    assert counts.slots_checked > 2000
    assert counts.payloads_checked > 300


def test_every_kind_of_round_was_run(counts: RaceCounts) -> None:
    assert len(counts.rounds) >= 13
    assert counts.kills >= 1 and counts.stops >= 2 and counts.restarts >= 2


def test_slots_were_reused_while_the_server_copied_them(counts: RaceCounts) -> None:
    assert counts.dropped_generations >= 100
    assert counts.reused_while_copied >= 5
    assert counts.torn_copies >= counts.reused_while_copied - counts.stops  # whoever was declared out told nobody


def test_the_server_wrote_slots_that_had_been_given_up(counts: RaceCounts) -> None:
    assert counts.quarantined >= 100
    assert counts.late_writes >= 100
    assert counts.writes_after_close >= 10
