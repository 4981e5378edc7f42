"""The parts of the admin server that need neither a socket nor a store: sums of counters, readiness, the tree."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from records import make_chain, make_namespace
from tierkv.prefixes import Forest
from tierkv_server.admin import stats as stats_module
from tierkv_server.admin.api import Api
from tierkv_server.admin.stats import MAX_ENGINES, SOURCES, EngineTotals, Stats
from tierkv_server.admin.tree import MAX_DEPTH, make_tree


def engine(name: str, pid: int = 1, namespace: str = "aa", evicted: int = 0, **counters: int) -> dict[str, Any]:
    """A row of an engine in the statistics."""
    row = {"engine_id": name, "pid": pid, "namespace": namespace, "num_evicted": evicted}
    return row | {"counters": counters}


def statistics(
    disk: str = "up", shared: str | None = None, reason: str = "", engines: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Statistics with tiers in these states."""
    tiers = [{"name": "host", "state": "none", "reason": "no engine is connected"}]
    tiers += [{"name": "disk", "state": disk, "reason": reason}]
    tiers += [{"name": "shared", "state": shared, "reason": "" if shared == "up" else "gone"}] if shared else []
    rows = [tier | {"nbytes": 0, "queued_nbytes": 0} for tier in tiers]
    return {"server": {"num_engines": len(engines)}, "tiers": rows, "engines": list(engines)}


# -- sums


def test_sums_do_not_fall_when_engines_leave_or_begin_anew() -> None:
    totals = EngineTotals()
    totals.update([engine("a", missed=5, host_hits=2, store_queue_nbytes=99), engine("b", namespace="bb", missed=1)])
    assert totals.by_namespace() == {
        "aa": Counter(missed=5, host_hits=2, evicted=0),
        "bb": Counter(missed=1, evicted=0),
    }
    totals.update([])
    assert totals.by_namespace()["aa"]["missed"] == 5, "it left"
    totals.update([engine("a", missed=7, host_hits=2)])
    assert totals.by_namespace()["aa"]["missed"] == 7, "it came back, and had gone on counting"
    totals.update([engine("a", missed=1, evicted=3)])
    assert totals.by_namespace()["aa"] == Counter(missed=8, host_hits=2, evicted=3), "another began under its name"
    totals.update([engine("a", pid=2, missed=4)])
    assert totals.by_namespace()["aa"]["missed"] == 12, "another process is another engine"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans()), max_size=60))
def test_sums_are_what_was_counted_whatever_comes_and_goes(steps: list[tuple[int, int, bool]]) -> None:
    """Engines count, are asked or not, and restart under new pids: sums never fall, and lack only what nobody saw."""
    totals, live, pids, seen = EngineTotals(), Counter[int](), Counter[int](), Counter[tuple[int, int]]()
    before = 0
    for which, more, restarts in steps:
        if restarts:
            pids[which] += 1
            live[which] = 0
        live[which] += more
        asked = [w for w in live if (w + more) % 2]
        totals.update([engine(f"e{w}", pids[w], missed=live[w]) for w in asked])
        seen |= Counter({(w, pids[w]): live[w] for w in asked})
        total = sum(counters["missed"] for counters in totals.by_namespace().values())
        assert before <= total == seen.total()
        before = total


def test_memory_for_engines_that_left_is_bounded() -> None:
    totals = EngineTotals()
    for i in range(MAX_ENGINES + 500):
        totals.update([engine(f"engine-{i}", missed=2)])
    assert len(totals._last) == MAX_ENGINES
    assert totals.by_namespace()["aa"]["missed"] == 2 * (MAX_ENGINES + 500)


# -- asking once for many


def test_those_who_ask_together_share_one_answer() -> None:
    asked, go, now = [], threading.Event(), [100.0]

    def ask() -> Mapping[str, Any]:
        asked.append(1)
        go.wait(10)
        return statistics()

    stats = Stats(ask, clock=lambda: now[0])
    got: list[object] = []
    threads = [threading.Thread(target=lambda: got.append(stats.get())) for _ in range(8)]
    for thread in threads:
        thread.start()
    go.set()
    for thread in threads:
        thread.join(10)
    assert len(got) == 8 and len(asked) == 1
    now[0] += stats_module.MAX_AGE_S + 0.1
    stats.get()
    assert len(asked) == 2
    stats.get()
    assert len(asked) == 2
    now[0] += 0.1
    stats.expire()
    stats.get()
    assert len(asked) == 3, "after a change nobody gets what was before"


def test_a_fault_of_the_statistics_does_not_end_the_history(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stats_module, "INTERVAL_S", 0.01)
    monkeypatch.setattr(stats_module, "MAX_AGE_S", 0.0)
    calls, enough = [], threading.Event()

    def ask() -> Mapping[str, Any]:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("boom")
        if len(calls) > 4:
            enough.set()
        return statistics(engines=[engine("a", missed=len(calls))])

    stats = Stats(ask)
    stats.start()
    assert enough.wait(10)
    stats.close()
    history = stats.history()
    assert history["chunks"]["missed"][:3] == [1, 3, 4] and set(history["chunks"]) == set(SOURCES)
    assert "boom" in caplog.text


# -- readiness


@pytest.mark.parametrize(
    ("disk", "shared", "age_s", "ready", "degraded"),
    [
        ("up", None, 0, True, False),
        ("up", "up", 0, True, False),
        ("read-only", None, 0, True, True),
        ("out", "up", 0, True, True),
        ("up", "out", 0, True, True),
        ("out", None, 0, False, True),
        ("out", "out", 0, False, True),
        ("up", "up", 29, True, False),
        ("up", "up", 31, False, True),
    ],
)
def test_readiness(disk: str, shared: str | None, age_s: float, ready: bool, degraded: bool) -> None:
    now = [100.0]
    stats = Stats(lambda: statistics(disk, shared, "" if disk == "up" else "No space left"), clock=lambda: now[0])
    api = Api(None, stats)  # type: ignore[arg-type]  # nothing that is asked here needs it
    assert api.readyz(True).status == 503 and api.readyz(True).body["reasons"] == ["the server is starting"]
    stats.get()
    now[0] += age_s
    reply = api.readyz(explain=True)
    assert (reply.status, reply.body["ready"], reply.body["degraded"]) == (200 if ready else 503, ready, degraded)
    assert bool(reply.body["reasons"]) == degraded
    assert ("No space left" in str(reply.body)) == (disk != "up")
    assert "No space left" not in str(api.readyz(explain=False).body)


# -- the tree


def random_forest(rng: random.Random, num: int) -> Forest:
    """A forest of ``num`` chunks, some of them without their ancestors."""
    refs, _ = make_chain(make_namespace(payload_nbytes=4096), num)
    keys = [ref.key for ref in refs]
    forest, positions = Forest(), {}
    for i, key in enumerate(keys):
        parent = rng.choice(keys[:i]) if i and rng.random() < 0.9 else b"root"
        positions[key] = positions.get(parent, -1) + 1
        if rng.random() < 0.95:
            forest.add("disk", key, parent, positions[key], 16, rng.randrange(1, 9), rng.randrange(5), rng.random())
    forest.link()
    return forest


def walk(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for top in rows for row in (top, *walk(top["children"]))]


@pytest.mark.parametrize("sort", ["nbytes", "hits", "last_used"])
def test_a_tree_has_every_chunk_in_one_run_and_parents_lead(sort: str) -> None:
    rng = random.Random(7)
    for num in (0, 1, 2, 40, 150):
        forest = random_forest(rng, num)
        rows, hidden = make_tree(forest, sort, 10_000)
        every = walk(rows)
        assert hidden == 0 and not any(row["num_hidden"] for row in every)
        assert sum(row["num_chunks"] for row in every) == len(forest.nodes)
        assert sum(row["own_nbytes"]["disk"] for row in every) == sum(n.nbytes["disk"] for n in forest.nodes.values())
        assert sum(row["num_prefixes"] for row in rows) == len(forest.leaves())
        for row in every:
            assert row["nbytes"]["disk"] == row["own_nbytes"]["disk"] + sum(
                c["nbytes"]["disk"] for c in row["children"]
            )
            key = forest.resolve(row["id"])
            assert key is not None
            below = walk([row])
            assert len(forest.own_part(key)) == sum(r["num_chunks"] for r in below)


@pytest.mark.parametrize("sort", ["nbytes", "hits", "last_used"])
def test_a_cut_tree_shows_the_leading_runs_and_counts_the_rest(sort: str) -> None:
    def rank(row: dict[str, Any]) -> float:
        return float(row[sort] if sort != "nbytes" else row["nbytes"]["disk"])

    forest = random_forest(random.Random(3), 150)
    whole = sorted((rank(row) for row in walk(make_tree(forest, sort, 10_000)[0])), reverse=True)
    for limit in (1, 5, 20, len(whole)):
        rows, hidden = make_tree(forest, sort, limit)
        shown = walk(rows)
        assert len(shown) == limit
        assert sorted(map(rank, shown), reverse=True) == whole[:limit]
        assert len(rows) + hidden == len(make_tree(forest, sort, 10_000)[0])


def test_a_tree_is_not_deeper_than_its_readers_can_bear() -> None:
    """A chain with a side branch at every chunk."""
    refs, _ = make_chain(make_namespace(payload_nbytes=4096), 900)
    keys = [ref.key for ref in refs]
    forest = Forest()
    for i in range(0, 900, 2):
        parent = keys[i - 2] if i else b"root"
        forest.add("disk", keys[i], parent, i // 2, 16, 10, 1, 1.0)
        forest.add("disk", keys[i + 1], parent, i // 2, 16, 1, 0, 0.5)
    forest.link()
    rows, _ = make_tree(forest, "nbytes", 10_000)
    depth, row = 1, rows[0]
    while row["children"]:
        depth, row = depth + 1, row["children"][0]
    assert depth == MAX_DEPTH and row["num_hidden"] > 0
