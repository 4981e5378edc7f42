"""The tier that other tests inject faults with: it does what was programmed, keeps the contract, and counts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from faulty_tier import Fail, Fault, FaultyTier, FlipBit, Full, Hang, Latency, Nil, WrongSize
from memory_tier import MemoryTier
from records import fetch, make_chain, make_namespace, payload_of, wait_until
from tier_subjects import KINDS, Servers, Subject, open_subject
from tierkv.tiers.base import Fetched, Pin, Status

NAMESPACE = make_namespace(payload_nbytes=8192, num_parts=2)
NS_ID = NAMESPACE.ns_id()
OK, MISS, EXISTS, BAD, DROPPED, ERROR, _ = Status


@pytest.fixture
def tier() -> FaultyTier:
    tier = FaultyTier(MemoryTier(), seed=3)
    tier.add_namespace(NAMESPACE)
    return tier


def read(tier: FaultyTier, num: int = 4) -> list[Status]:
    """Fetch a chain; what is delivered is right."""
    refs, _ = make_chain(NAMESPACE, num)
    results, cells = fetch(tier, NAMESPACE, refs)
    assert all(
        bytes(cell) == payload_of(ref.key, NAMESPACE.payload_nbytes)
        for ref, result, cell in zip(refs, results, cells, strict=True)
        if result.status is OK
    )
    return [result.status for result in results]


def asked(tier: FaultyTier) -> int:
    stat = tier.stat()
    return stat.num_hits + stat.num_misses + stat.num_errors


def test_a_failed_tier_answers_and_says_that_it_is_out(tier: FaultyTier) -> None:
    refs, records = make_chain(NAMESPACE, 4)
    tier.store(NS_ID, records)
    for operation in ("match", "fetch", "store", "evict", "pin", "unpin", "expire_at", "entries", "tokens"):
        tier.inject(operation, Fail("the disk is gone"))
    assert tier.match(NS_ID, refs) == [False] * 4
    assert read(tier) == [ERROR] * 4
    assert tier.store(NS_ID, records) == [ERROR] * 4
    assert tier.evict(NS_ID, refs, force=True) == tier.unpin(NS_ID, refs) == tier.expire_at(NS_ID, refs, 1.0) == 0
    assert tier.pin(NS_ID, refs, Pin("me", 1e12)) == [False] * 4
    assert (list(tier.entries(NS_ID)), tier.tokens(NS_ID, refs[0])) == ([], b"")
    stat = tier.stat()
    assert (stat.state, stat.reason, stat.num_errors, asked(tier)) == ("out", "the disk is gone", 8, 8)
    assert stat.since > 0
    tier.clear()
    assert read(tier) == [OK] * 4
    assert (tier.stat().state, tier.stat().reason, tier.stat().since) == ("up", "", 0.0)
    assert tier.num_faults["Fail"] == 9


def test_the_calls_that_suffer_can_be_named(tier: FaultyTier) -> None:
    _, records = make_chain(NAMESPACE, 4)
    tier.store(NS_ID, records)
    read(tier)
    tier.inject("fetch", Fail(), calls={1, 3})
    assert [read(tier)[0] for _ in range(5)] == [OK, ERROR, OK, ERROR, OK]
    assert tier.num_calls["fetch"] == 6


@pytest.mark.parametrize(("fault", "result"), [(Nil(), MISS), (FlipBit(), BAD), (WrongSize(), BAD)], ids=str)
def test_a_spoilt_read_is_a_miss_and_counted(tier: FaultyTier, fault: Fault, result: Status) -> None:
    refs, records = make_chain(NAMESPACE, 4)
    tier.store(NS_ID, records)
    tier.inject("fetch", fault, calls={0})
    assert read(tier) == [result] * 4
    left = [OK] * 4 if result is MISS else [MISS] * 4
    assert read(tier) == left
    stat = tier.stat()
    assert asked(tier) == 8
    assert (stat.num_hits, stat.num_bad) == (left.count(OK), 4 if result is BAD else 0)
    assert (stat.num_removed, stat.num_evicted) == (0, 0)
    assert tier.match(NS_ID, refs) == [status is OK for status in left]


def test_a_quiet_read_that_is_spoilt_counts_the_bad_one_only(tier: FaultyTier) -> None:
    refs, records = make_chain(NAMESPACE, 4)
    tier.store(NS_ID, records)
    tier.inject("fetch", FlipBit(), calls={0})
    results = tier.fetch(NS_ID, refs, lambda _: [memoryview(bytearray(4096))] * 2, quiet=True)
    assert results == [Fetched(BAD)] * 4
    assert (tier.stat().num_bad, asked(tier)) == (4, 0)


def test_a_hidden_entry_does_not_match(tier: FaultyTier) -> None:
    refs, records = make_chain(NAMESPACE, 4)
    tier.store(NS_ID, records)
    tier.inject("match", Nil(), calls={0})
    assert tier.match(NS_ID, refs) == [False] * 4
    assert tier.match(NS_ID, refs) == [True] * 4


def test_a_full_tier_drops_what_does_not_fit(tier: FaultyTier) -> None:
    _, records = make_chain(NAMESPACE, 4)
    tier.inject("store", Full(room=2), calls={0})
    tier.inject("store", Full(), calls={1})
    assert tier.store(NS_ID, records) == [OK, OK, DROPPED, DROPPED]
    assert tier.store(NS_ID, records) == [DROPPED] * 4
    assert tier.store(NS_ID, records) == [EXISTS, EXISTS, OK, OK]
    assert (tier.stat().num_dropped, tier.stat().num_stored) == (6, 4)


def test_one_hangs_and_others_go_on(tier: FaultyTier) -> None:
    _, records = make_chain(NAMESPACE, 4)
    event = threading.Event()
    tier.inject("store", Hang(event), calls={0})
    results: list[list[Status]] = []
    thread = threading.Thread(target=lambda: results.append(tier.store(NS_ID, records)))
    thread.start()
    wait_until(lambda: tier.num_faults["Hang"] == 1)
    assert read(tier) == [MISS] * 4
    assert tier.store(NS_ID, records[:1]) == [OK]
    assert results == []
    event.set()
    thread.join(10)
    assert results == [[EXISTS, OK, OK, OK]]


def test_a_chance_comes_from_the_seed() -> None:
    def lives(seed: int) -> list[list[Status]]:
        tier = FaultyTier(MemoryTier(), seed)
        tier.add_namespace(NAMESPACE)
        tier.store(NS_ID, make_chain(NAMESPACE, 8)[1])
        tier.inject("fetch", Nil(), chance=0.3)
        tier.inject("fetch", Fail(), chance=0.2)
        tier.inject("fetch", Latency(0.0), chance=0.5)
        return [read(tier, 8) for _ in range(20)]

    assert lives(1) == lives(1) != lives(2)
    flat = [status for life in lives(1) for status in life]
    assert {OK, MISS, ERROR} == set(flat)
    assert flat.count(MISS) < flat.count(OK)


def test_an_operation_suffers_only_what_it_can(tier: FaultyTier) -> None:
    for operation, fault in (("evict", FlipBit()), ("match", Full()), ("store", Nil()), ("nothing", Fail())):
        with pytest.raises(ValueError, match="cannot suffer"):
            tier.inject(operation, fault)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("servers"))
    yield servers
    servers.stop()


@pytest.fixture(params=KINDS)
def subject(request: pytest.FixtureRequest, servers: Servers, tmp_path: Path) -> Iterator[Subject]:
    with open_subject(request.param, servers, tmp_path, wrapped=True) as subject:
        subject.tier.add_namespace(NAMESPACE)
        yield subject


def test_what_was_damaged_on_its_way_into_a_tier_is_found_on_its_way_out(subject: Subject) -> None:
    tier = subject.tier
    assert isinstance(tier, FaultyTier)
    _, records = make_chain(NAMESPACE, 4)
    tier.inject("store", FlipBit(), calls={0})
    assert tier.store(NS_ID, records) == [OK] * 4
    assert read(tier) == [BAD] * 4
    assert read(tier) == [MISS] * 4
    assert tier.store(NS_ID, records) == [OK] * 4
    assert read(tier) == [OK] * 4
    assert (tier.stat().num_bad, asked(tier)) == (4, 12)
