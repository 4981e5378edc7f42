"""Reuse distances and what is made of them: against exact stack distances, replays of LRU, and bounds of memory."""

from __future__ import annotations

import hashlib
import json
import math
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench_policy_replay import Cost, Tier, replay
from bench_policy_traces import Request, read_trace, slow_chat
from fake_engine import make_namespace
from tierkv.asked import MAX_WAITING_KEYS, REPORT_KEYS, AskedLog
from tierkv.cli.report_advice import advise, enough, rate_at
from tierkv.cli.report_page import make_page
from tierkv.messages import SOURCES, AskedReport
from tierkv.payload import record_nbytes
from tierkv.policy import make_policy
from tierkv.reuse import ALL, HEAD_NBYTES, MAX_GROUPS, MAX_KEYS, OTHER, Counts, LruStack, ReuseSampler, head_of
from tierkv_connector.asked import note_asked
from tierkv_server.reuse import HALF_LIFE_S, HORIZON, MAX_ENGINES, SILENT_S, ReuseTable

#: A published trace of a chat service, where it lies beside the repository; scripts/bench-policy takes it too.
_TRACE = Path(__file__).parents[2].parent / "shared" / "data" / "conversation_trace.jsonl"
_NBYTES = 1000


def head(block: int, salt: int = 0) -> int:
    return head_of(hashlib.sha256(b"%d-%d" % (salt, block)).digest())


def zipf_stream(num: int, num_keys: int, exponent: float, seed: int) -> list[Request]:
    """Return single keys by Zipf's law."""
    rng = Random(seed)
    weights = [1 / (i + 1) ** exponent for i in range(num_keys)]
    return [Request(i, (key,)) for i, key in enumerate(rng.choices(range(num_keys), weights, k=num))]


STREAMS: dict[str, Callable[[], list[Request]]] = {
    "zipf": lambda: zipf_stream(150_000, 80_000, 0.9, 1),
    "chat": lambda: slow_chat(1),
}
if _TRACE.exists():
    STREAMS["trace"] = lambda: read_trace(_TRACE)


def sample(requests: Sequence[Request], max_keys: int, salt: int = 0) -> ReuseSampler:
    """Return what a sampler makes of requests; the keys' hashes, and so the sample, follow from ``salt``."""
    sampler = ReuseSampler(max_keys)
    heads: dict[int, int] = {}
    for _, chain in requests:
        sampler.asked("ns", len(chain))
        for block in chain:
            if block not in heads:
                heads[block] = head(block, salt)
        packed = [heads[block] for block in chain if heads[block] < sampler.stack.threshold]
        sampler.request("ns", _NBYTES, packed, len(packed))
    return sampler


# -- exactness


class Naive:
    """An LRU stack as a list, the last used last: distances as they are defined."""

    def __init__(self) -> None:
        self.stack: list[tuple[int, int]] = []

    def distance(self, ident: int) -> int | None:
        at = next((i for i, (other, _) in enumerate(self.stack) if other == ident), None)
        return None if at is None else sum(nbytes for _, nbytes in self.stack[at:])

    def touch(self, ident: int, nbytes: int) -> None:
        self.stack = [pair for pair in self.stack if pair[0] != ident] + [(ident, nbytes)]


@pytest.mark.parametrize("seed", range(8))
def test_distances_are_those_of_the_definition(seed: int) -> None:
    rng, naive = Random(seed), Naive()
    stack = LruStack(max_keys=200)  # more than there are keys: all are in the sample
    keys = [rng.getrandbits(60) << 8 | rng.randrange(3) for _ in range(150)]
    sizes = {key: rng.choice((1, 512, 4096, 10_000_019)) for key in keys}
    for _ in range(3000):  # renumbers seven times
        key = keys[min(int(rng.expovariate(1 / 40)), 149)]
        assert stack.distance(key) == naive.distance(key)
        stack.touch(key, sizes[key])
        naive.touch(key, sizes[key])
    assert stack.nbytes == sum(nbytes for _, nbytes in naive.stack) and stack.rate == 1.0


@pytest.mark.parametrize("seed", range(4))
def test_a_sample_keeps_the_order_and_bytes_of_its_keys(seed: int) -> None:
    rng, naive = Random(seed), Naive()
    stack = LruStack(max_keys=50)
    for _ in range(4000):
        key = (rng.getrandbits(10) * 0x9E3779B97F4A7C15 & ALL) << 8
        stack.touch(key, 1 + key % 1000)
        naive.touch(key, 1 + key % 1000)
        naive.stack = [pair for pair in naive.stack if pair[0] >> 8 < stack.threshold]
        exact, scaled = naive.distance(key), stack.distance(key)
        assert (exact is None) == (scaled is None)
        if exact is not None and scaled is not None:
            own = 1 + key % 1000
            assert scaled == pytest.approx((exact - own) / stack.rate + own)
        assert len(stack) == len(naive.stack) <= 50
    assert stack.rate < 0.1


@pytest.mark.parametrize("name", STREAMS)
def test_a_sampled_curve_is_near_the_exact_one(name: str) -> None:
    requests = STREAMS[name]()
    distinct = len({block for _, chain in requests for block in chain})
    sizes = [_NBYTES * distinct / 2**10 * 2 ** (i / 2) for i in range(21)]
    exact = sample(requests, distinct + 1)
    assert exact.stack.rate == 1.0
    means = []
    for salt in range(3):
        sampled = sample(requests, MAX_KEYS, salt)
        assert len(sampled.stack) <= MAX_KEYS < distinct
        rates = sampled.counts().hit_rates(sizes)
        errors = [abs(a - b) for a, b in zip(rates, exact.counts().hit_rates(sizes), strict=True)]
        means.append(sum(errors) / len(errors))
        assert max(errors) < 0.05, (salt, errors)
    assert max(means) < 0.02 and sum(means) / 3 < 0.01, means


@pytest.mark.parametrize("name", [name for name in STREAMS if name != "zipf"])
def test_the_curve_is_what_lru_does(name: str) -> None:
    requests = STREAMS[name]()
    exact, sampled = sample(requests, 1 << 18).counts(), sample(requests, 8192).counts()
    for capacity in (1000, 10_000):
        rate = replay([Tier(make_policy("lru"), capacity)], requests).rates(Cost())["hit_rate"]
        assert isinstance(rate, float)
        assert exact.hit_rates([capacity * _NBYTES])[0] == pytest.approx(rate, abs=0.005)
        assert sampled.hit_rates([capacity * _NBYTES])[0] == pytest.approx(rate, abs=0.025)


def test_the_most_used_key_weighs_what_it_does_whether_or_not_it_is_in_the_sample() -> None:
    """A system prompt's first chunk is asked for by every request: in a small sample it is, or not."""
    rates = []
    for hot in range(12):  # whose hashes differ: some are in the sample
        sampler = ReuseSampler(max_keys=200)
        for i in range(10_000):
            chain = [head(hot), head(1000 + i), head(20_000 + i)]
            sampler.asked("ns", 3)
            sampler.request("ns", 1, chain, 3)
        rates.append(sampler.counts().hit_rates([1000])[0])
    assert all(rate == pytest.approx(1 / 3, abs=0.12) for rate in rates), rates


def test_an_ancestor_is_never_farther_than_its_descendant() -> None:
    sampler = ReuseSampler()
    sampler.request("ns", 10, [1, 2, 3], 3)
    sampler.request("ns", 10, [7], 1)
    sampler.request("ns", 10, [1, 2, 3], 3)  # 1 was the last used of its chain, under 7
    sampler.asked("ns", 7)
    assert sampler.counts().hit_rates([19, 21, 31, 42]) == pytest.approx([0, 1 / 7, 2 / 7, 3 / 7])


def test_what_is_used_and_not_counted_renews() -> None:
    sampler = ReuseSampler()
    sampler.request("ns", 10, [1], 1)
    for block in range(10, 15):
        sampler.request("ns", 10, [block], 1)
    sampler.request("ns", 10, [1, 99], 1)  # 1 is in the host pool: used, and not asked of the disk
    sampler.asked("ns", 7)
    sampler.request("ns", 10, [1], 1)
    sampler.asked("ns", 1)
    assert sampler.counts().hit_rates([11])[0] == pytest.approx(1 / 8)


# -- groups and counts


def test_groups_share_a_stack_and_keep_their_counts() -> None:
    sampler = ReuseSampler()
    for _ in range(2):
        for group, nbytes in (("a", 100), ("b", 300)):
            sampler.asked(group, 2)
            sampler.request(group, nbytes, [1, 2], 2)  # one model's keys in two layouts: not the same chunks
    a, b = sampler.groups()["a"], sampler.groups()["b"]
    # Of a: the two of b and its own; of b: the two of a and its own.
    assert a.hit_rates([650, 750, 850]) == pytest.approx([0, 0.25, 0.5])
    assert b.hit_rates([450, 530, 850]) == pytest.approx([0, 0.25, 0.5])
    assert sampler.counts().asked == 8 and sampler.counts().hit_rates([850]) == pytest.approx([0.5])


def test_the_groups_are_bounded_and_nothing_is_lost() -> None:
    sampler = ReuseSampler()
    for i in range(3 * MAX_GROUPS):
        sampler.asked(f"ns{i}", 5)
        sampler.request(f"ns{i}", 1, [i], 1)
    groups = sampler.groups()
    assert len(groups) <= MAX_GROUPS + 1 and OTHER in groups and f"ns{3 * MAX_GROUPS - 1}" in groups
    assert sampler.counts().asked == 15 * MAX_GROUPS and sampler.counts().num_sampled == 3 * MAX_GROUPS


def test_counts_decay_merge_and_stay_within_bounds() -> None:
    counts, other = Counts(), Counts()
    for distance in (1, 10, 100, None):
        counts.add(distance, 5.0)
    counts.asked = 10  # half of what the sample stands for
    assert all(0 <= rate <= 1 for rate in counts.hit_rates([0.5, 1, 2, 50, 1e6]))
    other.merge(counts)
    other.decay(0.5)
    assert other.asked == 5 and other.hit_rates([1e6]) == counts.hit_rates([1e6])
    assert Counts().hit_rates([1, 2]) == [0.0, 0.0]
    rates = counts.hit_rates([1.5**i for i in range(30)])
    assert rates == sorted(rates)


# -- memory, and what never comes back


def test_a_million_keys_take_bounded_memory() -> None:
    heads = np.random.default_rng(1).integers(0, ALL, 1_000_000, dtype=np.uint64)
    sampler = ReuseSampler()
    tracemalloc.start()
    for some in heads.reshape(1000, 1000):
        for key in some[some < np.uint64(sampler.stack.threshold)].tolist():  # what is not in the sample is not sent
            sampler.request("ns", 4 << 20, [key], 1)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(sampler.stack) <= 8192 and sampler.stack.rate < 0.02
    assert held < 420 * 8192, f"{held:,} bytes"


def test_one_off_keys_do_not_push_the_rate_down_for_ever() -> None:
    horizon = 20_000.0
    bounded, unbounded = ReuseSampler(2048, horizon), ReuseSampler(2048)
    for i in range(60_000):
        for sampler in (bounded, unbounded):
            sampler.asked("ns", 2)
            sampler.request("ns", 1, [head(i % 2000), head(1_000_000 + i)], 2)
    assert unbounded.stack.rate < 0.05 < 0.08 < bounded.stack.rate
    assert bounded.stack.nbytes <= horizon * 1.01 and len(bounded.stack) > 1000
    assert len(bounded.stack._heap) <= 2 * 2048 + 65, "keys that fell out leave the heap too"
    assert bounded.counts().hit_rates([5000])[0] == pytest.approx(0.5, abs=0.03)


def test_lowering_lets_keys_go_for_good() -> None:
    stack = LruStack()
    for block in range(1000):
        stack.touch(head(block) << 8, 1)
    stack.lower(ALL // 4)
    assert 180 < len(stack) < 320 and stack.nbytes == pytest.approx(1000, rel=0.3)
    stack.touch(ALL // 2 << 8, 1)
    stack.lower(ALL)
    assert stack.distance(ALL // 2 << 8) is None and stack.threshold == ALL // 4


# -- the engine's log


def keys_of(num: int, start: int = 0) -> list[bytes]:
    return [hashlib.sha256(b"%d" % i).digest() for i in range(start, start + num)]


def test_a_report_says_what_was_asked_and_found() -> None:
    counters: Counter[str] = Counter(missed=3)
    log = AskedLog(counters)
    assert log.take() is None
    keys = keys_of(10)
    log.note(keys, 2, 6)
    keys += keys_of(5, 10)  # generated since, and not asked for
    counters.update(host_hits=4, missed=4)
    report = log.take()
    assert report is not None and log.take() is None
    assert report.sources == [2, 4, 0, 0, 7] and (report.num_asked, report.num_below, report.num_lost) == (10, 4, 0)
    assert report.requests == [(b"".join(key[:8] for key in keys[:10]), 4, True)]
    log.note(keys_of(3), 0, 3)
    again = log.take()
    assert again is not None and again.sources == [0] * 5 and again.requests[0][1:] == (0, False)


def test_a_report_has_the_sample_that_the_server_asked_for() -> None:
    log, keys = AskedLog({}), keys_of(2000)
    log.answered(b"\x20" + bytes(7))
    log.answered(b"")  # no answer changes nothing
    log.answered(b"\x40" + bytes(7))  # an old one neither
    log.note(keys, 0, 1500)
    report = log.take()
    assert report is not None and report.threshold == b"\x20" + bytes(7)
    packed, num_below, below = report.requests[0]
    assert packed == b"".join(key[:8] for key in keys if key[0] < 0x20) and below
    assert num_below == sum(key[0] < 0x20 for key in keys[1500:]) and report.num_asked == 2000
    log.restart()
    log.note(keys, 0, 0)
    whole = log.take()
    assert whole is not None and len(whole.requests[0][0]) == 2000 * HEAD_NBYTES


def test_reports_and_what_waits_for_them_are_bounded() -> None:
    log, keys = AskedLog({}), keys_of(500)
    for _ in range(MAX_WAITING_KEYS // 500 + 10):
        log.note(keys, 0, 0)
    first = log.take()
    assert first is not None and REPORT_KEYS <= sum(len(p) for p, _, _ in first.requests) // 8 < REPORT_KEYS + 500
    assert first.num_lost == 10 * 500
    second = log.take()
    assert second is not None and second.num_lost == 0
    assert int.from_bytes(second.threshold, "big") == ALL // 2, "more is asked than can be told: the sample is smaller"


class _Client:
    def __init__(self, connected: bool = True) -> None:
        self._connected = connected

    def connected(self) -> bool:
        return self._connected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, (8, 2, 5)),
        ({"shareable": False}, (8, 2, 8)),  # no tier below the host pool has what stays in this engine
        ({"plan": SimpleNamespace(gpu_run=9, start=7, stop=7)}, (8, 7, 8)),  # all that can be claimed is there
        ({"store": "none"}, None),
        ({"keys": []}, None),
        ({"plan": None}, None),
    ],
)
def test_what_a_request_is_noted_as(change: dict[str, Any], expected: tuple[int, int, int] | None) -> None:
    plan = SimpleNamespace(gpu_run=2, start=5, stop=8)
    about: dict[str, Any] = {"keys": keys_of(8), "plan": plan, "shareable": True, "store": "prompt"} | change
    log = AskedLog({})
    note_asked(log, SimpleNamespace(**about), _Client())  # type: ignore[arg-type]
    report = log.take()
    found = report and (report.num_asked, report.sources[0], report.num_asked - report.num_below)
    assert found == expected
    for client in (None, _Client(connected=False)):
        note_asked(log, SimpleNamespace(**about), client)  # type: ignore[arg-type]
        assert log.take() is None


# -- the server's table


def session(engine_id: str = "one", num_slots: int = 100, namespace: Any = None, pid: int = 1) -> Any:
    namespace = namespace or make_namespace()
    hello = SimpleNamespace(
        engine_id=engine_id, pid=pid, namespace=namespace, shape=SimpleNamespace(num_slots=num_slots)
    )
    return SimpleNamespace(hello=hello, ns_id=namespace.ns_id())


def report_of(*chains: Sequence[int], found: int = 0, **other: Any) -> AskedReport:
    """Return a report of requests for whole chains of blocks, the first ``found`` of each on the host."""
    requests = [
        (b"".join(head(b).to_bytes(8, "big") for b in chain), len(chain) - found, found < len(chain))
        for chain in chains
    ]
    asked = sum(map(len, chains))
    about = {"threshold": b"\xff" * 8, "num_lost": 0, "sources": [0] * 5, "requests": requests}
    return AskedReport(**(about | {"num_asked": asked, "num_below": asked - found * len(chains)} | other))


def make_table(budget: int = 1 << 20) -> tuple[ReuseTable, list[float]]:
    now = [1e9]
    return ReuseTable(lambda: budget, lambda: now[0]), now


def tier_of(table: ReuseTable, name: str) -> Any:
    return next(tier for tier in table.describe({})["tiers"] if tier["name"] == name)


def test_the_table_tells_host_and_disk_apart() -> None:
    table, _ = make_table()
    engine = session()
    chain = list(range(40))
    table.note(engine, report_of(chain))
    table.note(engine, report_of(chain, found=30, sources=[10, 20, 6, 0, 4]))
    host, disk = tier_of(table, "host"), tier_of(table, "disk")
    payload = engine.hello.namespace.payload_nbytes
    assert host["asked"] == 80 and host["budget"] == 100 * payload and host["found"] == 0.75
    assert rate_at(host["sizes"], host["hit_rates"], 50 * payload) == 0.5, "all of the chain, the second time"
    assert rate_at(host["sizes"], host["hit_rates"], 8 * payload) == pytest.approx(0.1, abs=0.02)
    assert disk["num_sampled"] == disk["asked"] == 50 and disk["budget"] == 1 << 20 and disk["found"] == 0.6
    whole = rate_at(disk["sizes"], disk["hit_rates"], 45 * (record_nbytes(payload) + 16))
    assert whole == pytest.approx(10 / 50, abs=2e-3), "ten of fifty came down again"
    assert disk["distinct_nbytes"] == 40 * (record_nbytes(payload) + 16)


def test_each_engine_has_a_pool_of_its_own_and_all_share_the_disk() -> None:
    table, _ = make_table()
    one, two = session("one"), session("two")
    chain = list(range(10))
    table.note(one, report_of(chain))
    table.note(two, report_of(chain))
    host, disk = tier_of(table, "host"), tier_of(table, "disk")
    assert host["num_engines"] == 2 and host["hit_rates"][-1] == 0, "what another engine had is not in this one's pool"
    assert disk["hit_rates"][-1] == 0.5, "but on the disk"


def test_counts_survive_their_engine_and_engines_are_bounded() -> None:
    table, now = make_table()
    for i in range(3 * MAX_ENGINES):
        now[0] += SILENT_S / 8
        engine = session(f"engine-{i}", namespace=make_namespace(f"m/{i % 3}"))
        table.note(engine, report_of([1, 2, 3]))
        table.note(engine, report_of([1, 2, 3]))
    host = tier_of(table, "host")
    assert host["num_engines"] == MAX_ENGINES == len(table._hosts)
    assert host["asked"] == pytest.approx(3 * MAX_ENGINES * 6, rel=0.03), "an hour's decay"
    assert host["hit_rates"][-1] == 0.5
    assert len(host["namespaces"]) == 3
    assert sum(row["asked"] for row in host["namespaces"]) == pytest.approx(host["asked"], abs=2)


def test_engines_beyond_the_bound_do_not_push_others_out() -> None:
    table, now = make_table()
    engines = [session(f"engine-{i}") for i in range(MAX_ENGINES + 4)]
    for _ in range(2):
        for engine in engines:
            now[0] += 1
            table.note(engine, report_of([1, 2, 3]))
    host, disk = tier_of(table, "host"), tier_of(table, "disk")
    assert host["asked"] == MAX_ENGINES * 6 and host["hit_rates"][-1] == 0.5, "those that are followed are followed on"
    assert disk["asked"] == (MAX_ENGINES + 4) * 6


def test_a_request_that_goes_below_uses_its_whole_chain_there() -> None:
    """Also where none of its keys that do is in the sample; one that does not go below uses nothing."""
    disk_nbytes = record_nbytes(make_namespace().payload_nbytes) + 16
    for below, expected in ((True, 1), (False, 21)):
        table, _ = make_table()
        table.note(session(), report_of([1], range(10, 30)))
        packed = head(1).to_bytes(8, "big")
        table.note(session(), report_of(requests=[(packed, 0, below)], num_asked=2, num_below=int(below)))
        assert table._disk.stack.distance(head(1) << 8) == expected * disk_nbytes


def test_the_threshold_goes_back_to_the_engine_and_theirs_is_heeded() -> None:
    table, _ = make_table(1 << 40)
    engine = session(num_slots=1 << 20)
    threshold = table.note(engine, report_of(range(5)))
    assert threshold == b"\xff" * 8
    for start in range(0, 20_000, 1000):
        threshold = table.note(engine, report_of(range(start, start + 1000)))
    assert int.from_bytes(threshold, "big") == pytest.approx(ALL * 8192 / 20_000, rel=0.1), "the larger sample's"
    host = next(iter(table._hosts.values())).sampler
    assert host.stack.threshold <= int.from_bytes(threshold, "big") and len(host.stack) <= MAX_KEYS
    low = (ALL // 100).to_bytes(8, "big")
    assert table.note(engine, report_of(threshold=low)) == low, "an engine that tells of less has its reasons"


def test_history_is_by_minute_and_bounded_and_old_counts_fade() -> None:
    table, now = make_table()
    engine = session()
    for minute in range(3):
        table.note(engine, report_of([1], sources=[1, 2, 3, 4, 5]))
        table.note(engine, report_of([2], sources=[0, 0, 0, 0, minute]))
        now[0] += 60
    history = table.describe({})["history"]
    assert history["chunks"] == {
        "gpu": [1] * 3,
        "host": [2] * 3,
        "disk": [3] * 3,
        "shared": [4] * 3,
        "missed": [5, 6, 7],
    }
    assert [b - a for a, b in zip(history["times"], history["times"][1:], strict=False)] == [60, 60]
    before = tier_of(table, "host")
    now[0] += HALF_LIFE_S
    after = tier_of(table, "host")
    assert after["asked"] == before["asked"] // 2 and after["hit_rates"] == before["hit_rates"]
    for _ in range(2000):
        now[0] += 60
        table.note(engine, report_of([1], sources=[1, 0, 0, 0, 0]))
    assert len(table.describe({})["history"]["times"]) == 1440
    now[0] -= 10 * HALF_LIFE_S  # a clock that was set back
    assert tier_of(table, "host")["asked"] > 0


@pytest.mark.parametrize(
    "bad",
    [
        {"threshold": b"x"},
        {"num_asked": -1},
        {"num_below": 3, "num_asked": 2},
        {"num_lost": 1 << 60},
        {"sources": [0, 0]},
        {"sources": [0, 0, 0, 0, -1]},
        {"requests": [(b"1234567", 0, False)]},
        {"requests": [(b"12345678", 2, True)]},
        {"requests": [(b"12345678", 1, False)]},
        {"requests": [(b"12345678", -1, True)]},
        {"requests": [(bytes(8 << 17), 0, False), (bytes(8), 0, False)]},
    ],
)
def test_a_report_that_makes_no_sense_is_refused_and_changes_nothing(bad: dict[str, Any]) -> None:
    table, _ = make_table()
    before = table.describe({})
    with pytest.raises(ValueError):
        table.note(session(), report_of(**bad))
    assert table.describe({}) == before


def test_the_horizon_follows_the_disks_budget() -> None:
    budget = [1 << 20]
    table = ReuseTable(lambda: budget[0], lambda: 0.0)
    table.note(session(), report_of(range(3000)))
    assert tier_of(table, "disk")["distinct_nbytes"] <= HORIZON << 20
    budget[0] = 1 << 30
    table.note(session(), report_of(range(3000)))
    assert tier_of(table, "disk")["distinct_nbytes"] > HORIZON << 20
    assert tier_of(table, "disk")["sizes"][-1] == HORIZON << 30


# -- words and pictures


def curve_of(name: str, rates: Callable[[float], float], **other: Any) -> dict[str, Any]:
    budget = 8 << 30
    steps = [2 ** (step / 4) for step in range(-24, 13)]
    row = {
        "name": name,
        "num_engines": 1,
        "found": 0.3,
        "budget": budget,
        "asked": 50_000,
        "num_sampled": 9000,
        "rate": 0.2,
        "distinct_nbytes": 1 << 36,
        "sizes": [round(budget * step) for step in steps],
        "hit_rates": [rates(step) for step in steps],
        "namespaces": [],
    }
    return row | other


def reuse_of(*tiers: dict[str, Any]) -> dict[str, Any]:
    chunks: dict[str, list[int]] = {name.removesuffix("_hits"): [5, 0, 7] for name in SOURCES}
    history = {"interval_s": 60, "times": [60_000, 60_060, 60_300], "chunks": chunks}
    about = {"since": 0.0, "half_life_s": 86400.0, "num_lost": 0}
    return about | {"tiers": list(tiers), "history": history}


def growing(by_double: float) -> Callable[[float], float]:
    return lambda times: min(1.0, max(0.0, 0.3 + by_double * math.log2(times)))


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        (growing(0.1), ["Doubling host_bytes to 16 GiB", "10.0 percentage points", "30.0 % to 40.0 %", "64 GiB"]),
        (lambda t: 0.3 if t <= 1 else 0.4, ["Doubling", "Beyond that there is little", "nothing up to 64 GiB"]),
        (lambda t: 0.3 if t <= 2 else 0.4, ["4 times host_bytes, 32 GiB", "doubling it, nothing"]),
        (lambda t: 0.3 if t <= 4 else 0.4, ["8 times host_bytes, 64 GiB"]),
        (lambda t: 0.3, ["A larger host pool would not help", "nothing more", "2 GiB would do as well"]),
        (lambda t: 0.3 if t >= 1 else 0.2, ["would not help"]),
    ],
)
def test_a_curve_in_words(rates: Callable[[float], float], words: list[str]) -> None:
    sentences = advise(reuse_of(curve_of("host", rates), curve_of("disk", lambda t: 0.1)))
    assert len(sentences) == 2 and "larger disk would not help" in sentences[1]
    for word in words:
        assert word in sentences[0], sentences[0]
    assert ("as well" in sentences[0]) == ("as well" in words[-1])


def test_several_engines_have_a_pool_each() -> None:
    row = curve_of("host", growing(0.1), num_engines=2)
    assert "16 GiB in each engine" in advise(reuse_of(row))[0]


def test_too_little_is_said() -> None:
    row = curve_of("host", growing(0.1), asked=17)
    assert not enough(row) and "17 chunks" in advise(reuse_of(row))[0]
    assert "nothing is known" in advise(reuse_of(curve_of("host", growing(0), asked=0)))[0]
    few = curve_of("disk", growing(0.1), num_sampled=20)
    assert "sample of 20" in advise(reuse_of(few))[0] and "disk" in advise(reuse_of(few))[0]
    assert len(advise(None)) == 1


def report_with(reuse: dict[str, Any] | None, model: str = "org/model", tenant: str = "ab" * 16) -> dict[str, Any]:
    row = {"namespace": "cd" * 16, "model": model, "num_chunks": 3, "nbytes": {"host": 10, "disk": 1 << 30}}
    rows = {
        "namespace": [row],
        "tenant": [row | {"tenant": tenant}],
        "age": [row | {"from_s": 0, "to_s": 60}, row | {"from_s": 604800, "to_s": None}],
    }
    return {
        "version": "0.1.0",
        "created": 1e9,
        "server": {"disk_dir": f"/srv/{model}", "spill": {"disk": "on-evict"}},
        "tiers": [{"name": "disk", "nbytes": 5, "budget": 10, "num_entries": 1}],
        "advice": advise(reuse),
        "reuse": reuse,
        "usage": {
            by: {"rows": rows[by], "num_rows": 30, "total": {"nbytes": {"host": 10, "disk": 1 << 30}}} for by in rows
        },
    }


EVIL = "<script>alert(1)</script>&\"'\x1b[31m"


def test_a_page_escapes_names_and_loads_nothing() -> None:
    spaces = [
        {"id": "cd" * 16, "model": EVIL, "asked": 9, "num_sampled": 500, "hit_rates": [0.5] * 37},
        {"id": "", "model": "", "asked": 9, "num_sampled": 500, "hit_rates": [0.1] * 37},
    ]
    reuse = reuse_of(curve_of("host", growing(0.1), namespaces=spaces), curve_of("disk", growing(0.01)))
    page = make_page(report_with(reuse, EVIL, "<b>"))
    assert "<script" not in page and "\x1b" not in page and page.count("<b>") == page.count("<div class='card'><b>")
    assert "script&gt;&amp;" in page and "others" in page
    assert page.count("<svg") == 5 and page.count("<polyline") == 4 and "prefers-color-scheme: dark" in page
    assert not [word for word in ("http:", "https:", "src=", "@import", "url(") if word in page]
    assert "stores on-evict" in page and "10 rows more: tierkv du --by tenant" in page


def test_a_page_without_curves_says_so() -> None:
    page = make_page(report_with(reuse_of(curve_of("host", growing(0.1), asked=3, found=None))))
    assert "too little to draw a curve from: 3 chunks" in page and "<polyline" not in page
    empty = report_with(None)
    empty["usage"] = {by: {"rows": [], "num_rows": 0, "total": {"nbytes": {}}} for by in ("namespace", "tenant", "age")}
    empty["server"], empty["tiers"] = None, []
    page = make_page(empty)
    assert "Nothing is stored" in page and "a running server&#x27;s to know" in page and "<svg" not in page


def test_a_pages_bars_are_what_the_history_says() -> None:
    reuse = reuse_of(curve_of("host", growing(0.1)))
    page = make_page(report_with(reuse))
    assert "16:40: 25 chunks: GPU 20.0 %, host pool 20.0 %" in page and "16:41: 0 chunks" in page
    long = reuse["history"] | {"times": [60 * i for i in range(1440)]}
    long["chunks"] = {name: [1] * 1440 for name in long["chunks"]}
    page = make_page(report_with(reuse | {"history": long}))
    assert page.split("Hits by tier over time")[1].split("</svg>")[0].count("<g>") == 48, "half an hour each"
    assert "the last 1 d" in page


def test_a_report_is_json() -> None:
    assert json.loads(json.dumps(report_with(reuse_of(curve_of("host", growing(0.1))))))
