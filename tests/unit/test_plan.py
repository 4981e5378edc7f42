"""Plans: the table of transitions, and when a request waits for its plan."""

from __future__ import annotations

from itertools import product

import pytest

from tierkv.client import MatchReply
from tierkv.hostindex import Entry, Fetch
from tierkv_connector import plan as plan_module
from tierkv_connector.plan import TRANSITIONS, Plan, State

DEADLINE = 10.0


def make_entry(position: int) -> Entry:
    return Entry(bytes([position]) * 32, bytes(32), position, 16, position, 1)


def make_fetch(count: int, results: bytes | None = None, first: int = 0) -> Fetch:
    fetch = Fetch([make_entry(first + i) for i in range(count)])
    for i, entry in enumerate(fetch.entries):
        entry.fetch, entry.fetch_index = fetch, i
    fetch.results = results
    return fetch


def make_plan(state: State = State.FETCHING, letters: bytes | None = b"dddd", next: int = 4, stop: int = 4) -> Plan:
    plan = Plan(0, stop, 0)
    plan.state = state
    plan.deadline = DEADLINE
    plan.match = MatchReply()
    plan.match.letters = letters
    plan.next = next
    return plan


@pytest.mark.parametrize(("before", "after"), list(product(State, State)))
def test_only_transitions_of_the_table_are_possible(before: State, after: State) -> None:
    plan = make_plan(before)
    if before is after or after in TRANSITIONS[before]:
        plan.to(after)
        assert plan.state is after
        return
    with pytest.raises(AssertionError, match=f"from {before.name} to {after.name}"):
        plan.to(after)
    assert plan.state is before


def test_the_table_is_the_one_in_the_documentation() -> None:
    """Each row of the module's table names exactly the states that may follow."""
    names = {state.name for state in State}
    rows: dict[str, str] = {}
    name = ""
    for line in (plan_module.__doc__ or "").split("::", 1)[1].split("---\n", 1)[1].split("\n\n")[0].splitlines():
        if (first := line.split(maxsplit=1)[0] if line.strip() else "") in names and line[4] != " ":
            name = first
        rows[name] = rows.get(name, "") + line[59:] + " "
    assert {name: {n for n in names if n in text} for name, text in rows.items()} == {
        state.name: {then.name for then in follow} for state, follow in TRANSITIONS.items()
    }


def test_a_plan_begins_ready_and_waits_for_nothing() -> None:
    plan = Plan(2, 5, 1)
    assert plan.state is State.READY
    assert (plan.start, plan.next, plan.stop, plan.gpu_run) == (2, 2, 5, 1)
    assert not plan.pending(0.0)
    assert not plan.failed()


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("now", [0.0, DEADLINE - 0.001, DEADLINE, DEADLINE + 1])
def test_only_a_started_plan_within_its_deadline_is_pending(state: State, now: float) -> None:
    plan = make_plan(state, letters=None)
    assert plan.pending(now) == (state in (State.MATCHING, State.FETCHING) and now < DEADLINE)


#: Letters of MATCH (None: no answer), results of each FETCH, state and results of a chunk that another plan fetches
#: ("-": there is none), next and stop; and whether the plan is pending.
PENDING: list[tuple[bytes | None, list[bytes | None], str, int, int, bool]] = [
    (None, [], "-", 0, 4, True),  # the answer to MATCH is out
    (None, [b"dd"], "-", 2, 4, True),
    (b"", [], "-", 0, 4, False),  # nothing is stored
    (b"", [None], "-", 2, 4, True),  # its first chunks were asked for at once
    (b"", [b"--"], "-", 2, 4, False),
    (b"dddd", [], "-", 0, 4, True),  # more is to be asked for
    (b"dddd", [None], "-", 2, 4, True),
    (b"dddd", [b"dd"], "-", 2, 4, True),
    (b"dddd", [b"dd", None], "-", 4, 4, True),
    (b"dddd", [b"dd", b"ds"], "-", 4, 4, False),  # all is here
    (b"dd", [b"dd"], "-", 2, 4, False),  # all that is stored
    (b"dddd", [b"d-"], "-", 2, 4, False),  # a hole: what comes after it is of no use
    (b"dddd", [b"d!"], "-", 2, 4, False),
    (b"dddd", [b""], "-", 2, 4, False),  # the session ended
    (b"dddd", [b"d-", None], "-", 4, 4, False),
    (b"dddd", [b"d-"], "on its way", 4, 4, True),
    (b"dddd", [b"dd"], "-", 2, 2, False),  # the pool took no more
    (b"dddd", [], "on its way", 4, 4, True),
    (b"dddd", [], "arrived", 4, 4, False),
    (b"dddd", [], "missing", 4, 4, False),
    (b"dddd", [], "ready", 4, 4, False),
    (b"dddd", [], "gone", 4, 4, False),
    (b"dddd", [b"dddd"], "on its way", 4, 4, True),
]


@pytest.mark.parametrize("state", [State.MATCHING, State.FETCHING])
@pytest.mark.parametrize("case", PENDING)
def test_pending(case: tuple[bytes | None, list[bytes | None], str, int, int, bool], state: State) -> None:
    letters, results, shared, next, stop, expected = case
    plan = make_plan(state, letters, next, stop)
    at = 0
    for result in results:
        count = len(result) if result else 2
        plan.fetches.append(make_fetch(count, result, at))
        at += count
    if shared != "-":
        other = make_fetch(1, {"arrived": b"d", "missing": b"-"}.get(shared), 3)
        other.entries[0].state = {"ready": Entry.READY, "gone": Entry.GONE}.get(shared, Entry.FILLING)
        plan.shared_waits.append(other.entries[0])
    before = plan.dump()
    assert plan.pending(0.0) == expected
    assert plan.pending(0.0) == expected
    assert not plan.pending(DEADLINE)
    assert plan.dump() == before


def test_a_chunk_that_the_workers_fill_is_not_waited_for() -> None:
    plan = make_plan()
    plan.shared_waits.append(make_entry(0))  # no fetch fills it
    assert not plan.pending(0.0)


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        (None, False),
        (b"dd", False),
        (b"ds", False),
        (b"d-", True),
        (b"-d", True),
        (b"d!", True),
        (b"", True),
        (b"d", True),
    ],
)
def test_failed(results: bytes | None, expected: bool) -> None:
    plan = make_plan()
    plan.fetches = [make_fetch(2, b"dd"), make_fetch(2, results)]
    assert plan.failed() == expected
