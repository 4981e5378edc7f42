"""The disk tier keeps what its policy says: replays against real LMDB, alone and below a host index."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from bench_policy_replay import Tier, replay
from bench_policy_stack import replay_stack
from bench_policy_traces import Request, slow_chat
from disk_replay import COST, NAMESPACE, NS_ID, DiskBelow, DiskReplay, key_of, leading, orphans, record_of, refs_of
from records import Clock, fetch
from tierkv.policy import POLICIES, Hint, make_policy
from tierkv.tiers.base import Limits, Offer, Pin, Status
from tierkv.tiers.disk import DiskTier
from tierkv.tiers.disk_order import MAX_NOTED

POOL, SCARCE, PLENTY = 256, 1024, 16384
HOT = list(range(10**6, 10**6 + 20))
A, B = b"a" * 16, b"b" * 16


@contextmanager
def opened(
    path: Path, num: int, policy: str = "learned", clock: Callable[[], float] | None = None, **limits: object
) -> Iterator[DiskTier]:
    tier = DiskTier(
        path,
        Limits(budget=num * COST, **limits),  # type: ignore[arg-type]
        clock=clock or Clock(),
        policy=policy,
        sync_interval_s=3600.0,
    )
    tier.add_namespace(NAMESPACE)
    try:
        yield tier
    finally:
        tier.close()


def hot_there(tier: DiskTier) -> int:
    return leading(tier.match(NS_ID, refs_of([key_of(block) for block in HOT])))


def scan(replayed: DiskReplay, clock: Clock, num: int, seed: int = 0, tenant: bytes = bytes(16)) -> None:
    """One-off prompts of one to three chunks; the hot prefix is asked for once in 100 of them, by somebody else."""
    rng = random.Random(seed)
    block = 10**7 * (seed + 1)
    for i in range(num):
        clock.now += 0.5
        if i % 100 == 99:
            replayed.request([key_of(b) for b in HOT])
        length = rng.randint(1, 3)
        replayed.request([key_of(b) for b in range(block, block + length)], tenant)
        block += length


@pytest.fixture(scope="module")
def chat() -> list[Request]:
    return slow_chat(0)[:700]


@pytest.mark.parametrize("policy", ["learned", "lru"])
def test_the_disk_does_in_lmdb_what_the_policy_does_in_a_simulation(
    tmp_path: Path, chat: list[Request], policy: str
) -> None:
    simulated = replay([Tier(make_policy(policy), SCARCE)], chat)
    clock = Clock()
    with opened(tmp_path, SCARCE, policy, clock) as tier:
        figures = DiskReplay(tier, clock).run(chat)
        assert (figures.num_asked, figures.num_hits, figures.num_written) == (
            simulated.num_blocks,
            simulated.hits[0],
            simulated.writes[0],
        )
        stat = tier.stat()
        assert (stat.num_stored, stat.num_declined) == (figures.num_written, figures.num_declined)
        assert (stat.num_entries, stat.policy, stat.num_dropped) == (SCARCE, policy, 0)
        assert stat.num_evicted == stat.num_stored - SCARCE
        assert orphans(tier) == []


def test_learned_hits_more_than_lru_for_fewer_writes_and_with_plenty_the_same(
    tmp_path: Path, chat: list[Request]
) -> None:
    found = {}
    for policy in ("learned", "lru"):
        for num in (SCARCE, PLENTY):
            clock = Clock()
            with opened(tmp_path / f"{policy}{num}", num, policy, clock) as tier:
                found[policy, num] = DiskReplay(tier, clock).run(chat)
    scarce, base = found["learned", SCARCE], found["lru", SCARCE]
    assert scarce.num_hits > 1.1 * base.num_hits, (scarce, base)
    assert scarce.num_written < 0.6 * base.num_written, (scarce, base)
    plenty, base = found["learned", PLENTY], found["lru", PLENTY]
    assert (plenty.num_hits, plenty.num_written) == (base.num_hits, base.num_written), "there is room for all"
    assert plenty.num_declined == 0


def test_a_scan_of_one_off_prompts_leaves_a_hot_prefix_on_the_disk(tmp_path: Path) -> None:
    kept = {}
    for policy in ("learned", "lru"):
        clock = Clock()
        with opened(tmp_path / policy, SCARCE, policy, clock) as tier:
            replayed = DiskReplay(tier, clock)
            for _ in range(20):
                clock.now += 1
                replayed.request([key_of(block) for block in HOT])
            kept[policy] = []
            for seed in range(4):
                scan(replayed, clock, 800, seed)
                scan_only = [key_of(b) for b in range(10**8 * (seed + 1), 10**8 * (seed + 1) + 2000)]
                for at in range(0, 2000, 2):  # nobody asks for the prefix meanwhile
                    clock.now += 0.1
                    replayed.request(scan_only[at : at + 2])
                kept[policy].append(hot_there(tier))
            assert orphans(tier) == []
    assert kept["learned"] == [len(HOT)] * 4
    assert max(kept["lru"]) < len(HOT), "the scan is long enough to show anything"


def test_a_tenant_that_floods_leaves_a_hot_prefix_on_the_disk(tmp_path: Path, chat: list[Request]) -> None:
    clock = Clock()
    with opened(tmp_path, SCARCE, "learned", clock) as tier:
        replayed = DiskReplay(tier, clock)
        for _ in range(20):
            clock.now += 1
            replayed.request([key_of(block) for block in HOT], A)
        for i, (_, blocks) in enumerate(chat[:400]):
            clock.now += 0.05
            replayed.request([key_of(3 * 10**8 + block) for block in blocks], B)
            if i % 50 == 49:
                replayed.request([key_of(block) for block in HOT], A)
        assert tier.stat().num_evicted + tier.stat().num_declined > SCARCE
        assert hot_there(tier) == len(HOT)


def test_a_tenant_at_its_quota_gives_up_its_own_whatever_they_are_worth(tmp_path: Path, chat: list[Request]) -> None:
    clock = Clock()
    with opened(tmp_path, SCARCE, "learned", clock, tenant_nbytes={B: 300 * COST}) as tier:
        replayed = DiskReplay(tier, clock)
        replayed.request([key_of(10**9 + i) for i in range(600)], A)
        replayed.run(chat[:200], lambda i: B)
        usage = tier.usage(NS_ID)
        assert usage[A].num_entries == 600 and usage[B].num_entries <= 300
        assert (
            tier.stat().num_declined > 0
            and tier.stat().num_evicted == tier.stat().num_stored - 600 - usage[B].num_entries
        )
        assert orphans(tier) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_no_ancestor_goes_first_whatever_else_takes_entries_away(tmp_path: Path, policy: str) -> None:
    """Forks, a quota, pins that end or are taken off, and expiry: after each request no chunk is without its parent."""
    rng, clock = random.Random(7), Clock()
    with opened(tmp_path, SCARCE, policy, clock, tenant_nbytes={B: 200 * COST}, idle_s=3000.0) as tier:
        replayed = DiskReplay(tier, clock)
        chains = [[rng.randrange(40)] + [rng.randrange(10**5) for _ in range(rng.randint(1, 30))] for _ in range(60)]
        for step in range(300):
            clock.now += rng.choice([0.1, 1.0, 30.0])
            stem = rng.choice(chains)
            blocks = stem[: rng.randint(1, len(stem))] + [rng.randrange(10**6) for _ in range(rng.randint(0, 12))]
            if rng.random() < 0.2:
                chains[rng.randrange(len(chains))] = blocks
            # a key names all that is before it, as a chain's hash does
            tenant = B if blocks[0] < 10 else A
            keys = [key_of(hash(tuple(blocks[: i + 1])) & (1 << 60) - 1) for i in range(len(blocks))]
            replayed.request(keys, tenant)
            refs = refs_of(keys)
            if rng.random() < 0.2:
                tier.pin(NS_ID, refs, Pin(f"owner {step}", clock.now + rng.choice([5.0, 200.0])))
            elif rng.random() < 0.2:
                tier.unpin(NS_ID, refs)
            assert orphans(tier) == []
            stored = tier.match(NS_ID, refs)
            assert leading(stored) == sum(stored)
        assert tier.stat().num_evicted > 100


def test_a_hint_keeps_a_session_and_its_release_lets_it_go(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path, SCARCE, "learned", clock) as tier:
        replayed = DiskReplay(tier, clock)
        scan(replayed, clock, 1500)
        session = [key_of(5 * 10**9 + i) for i in range(50)]
        tier.note(NS_ID, A, session, Hint("s", retain_s=60.0))
        records = [record_of(session, i, A, clock.now) for i in range(50)]
        assert tier.store(NS_ID, records, offer=Offer.REQUEST) == [Status.OK] * 50, "it said that it will be back"
        assert tier.release(NS_ID, "s") and not tier.release(NS_ID, "s"), "it is over, which was news once"
        scan(replayed, clock, 1500, seed=1)
        gone = [key_of(6 * 10**9 + i) for i in range(50)]
        tier.note(NS_ID, A, gone, Hint("t", release=True))
        assert (
            tier.store(NS_ID, [record_of(gone, i, A, clock.now) for i in range(50)], offer=Offer.REQUEST)
            == [Status.DECLINED] * 50
        )


def test_orders_are_never_declined_and_nothing_is_before_anything_was_noted(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path, SCARCE, "learned", clock) as tier:

        def store(first: int, offer: Offer) -> list[Status]:
            keys = [key_of(first + i) for i in range(10)]
            return tier.store(NS_ID, [record_of(keys, i, A, clock.now) for i in range(10)], offer=offer)

        for i in range(2 * SCARCE // 10):
            assert store(100 * i, Offer.REQUEST) == [Status.OK] * 10, "an engine that tells of no requests"
        assert tier.stat().num_evicted > 0
        tier.note(NS_ID, A, [key_of(1)])
        assert store(10**6, Offer.REQUEST) == [Status.DECLINED] * 10, "nobody asked for it"
        assert store(10**6, Offer.ORDER) == [Status.OK] * 10
        assert tier.stat().num_declined == 10 and tier.stat().num_dropped == 0


def test_a_restart_keeps_the_order(tmp_path: Path, chat: list[Request]) -> None:
    """The policy is built anew from the index: chains whole, what was used last goes last."""
    clock = Clock()
    with opened(tmp_path, SCARCE, "learned", clock) as tier:
        replayed = DiskReplay(tier, clock)
        replayed.run(chat[:300])
        for _ in range(5):
            clock.now += 10
            replayed.request([key_of(block) for block in HOT])
        assert hot_there(tier) == len(HOT)
        clock.now += 10
        refs = refs_of([key_of(block) for block in HOT])
        fetch(tier, NAMESPACE, refs)
        before = {entry.key for entry in tier.entries(NS_ID)}
    with opened(tmp_path, SCARCE, "learned", clock) as tier:
        assert {entry.key for entry in tier.entries(NS_ID)} == before
        policy = tier._catalog.order._all
        assert len(policy) == SCARCE and all((NS_ID, key) in policy for key in before)
        segments = {id(segment) for segment in policy._known.values()}  # type: ignore[attr-defined]
        assert len(segments) < SCARCE / 3, "a segment costs 500 bytes: chains come back in runs"
        first = [key_of(9 * 10**9 + i) for i in range(SCARCE - len(HOT))]
        assert set(tier.store(NS_ID, [record_of(first, i, A, clock.now) for i in range(len(first))])) == {Status.OK}
        assert hot_there(tier) == len(HOT), "it was used last"
        assert tier.stat().num_evicted == len(first)


def test_pinned_chunks_in_the_way_are_met_once_and_come_back(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path, SCARCE, "learned", clock) as tier:
        keys = [key_of(i) for i in range(SCARCE)]
        tier.store(NS_ID, [record_of([key], 0, A, clock.now) for key in keys])
        refs = [refs_of([key])[0] for key in keys]
        for ref in refs[:500]:
            tier.pin(NS_ID, [ref], Pin("me", clock.now + 100))
        order, asked = tier._catalog.order, []
        may_go = tier._catalog.may_go
        tier._catalog.may_go = lambda item, now: asked.append(item) or may_go(item, now)  # type: ignore[method-assign, func-returns-value]
        for i in range(100):
            assert tier.store(NS_ID, [record_of([key_of(10**6 + i)], 0, A, clock.now)]) == [Status.OK]
        assert len(asked) <= 700, "each pinned one once, and the victims"
        assert all(tier.match(NS_ID, refs[:500])) and len(order._aside) == 500
        assert tier.unpin(NS_ID, refs[:250]) == 250
        assert len(order._aside) == 250, "taken off: they may go"
        clock.now += 101
        tier.store(NS_ID, [record_of([key_of(10**7)], 0, A, clock.now)])
        assert not order._aside and len(order._all) == SCARCE


def test_a_note_is_bounded_and_counts_no_read(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path, SCARCE, "learned", clock) as tier:
        keys = [key_of(i) for i in range(MAX_NOTED + 500)]
        tier.note(NS_ID, A, keys)
        assert tier._catalog.order._all.num_ghosts == MAX_NOTED  # type: ignore[attr-defined]
        tier.store(NS_ID, [record_of(keys, i, A, clock.now) for i in range(3)])
        before = sorted(tier.entries(NS_ID))
        clock.now += 10
        tier.note(NS_ID, A, keys[:3])
        assert sorted(tier.entries(NS_ID)) == before, "only reads renew life"
        clock.now -= 1000
        tier.note(NS_ID, A, keys[:3])
        clock.now += 1
        tier.note(NS_ID, A, keys[:3])
        assert tier._catalog.order._clock == 11, "a wall clock that was set back is no time; it goes on from there"


@pytest.mark.parametrize("policy", ["learned", "lru"])
def test_a_host_pool_over_a_disk_does_what_the_replay_says_and_more_than_each_alone(
    tmp_path: Path, chat: list[Request], policy: str
) -> None:
    """Chunk for chunk: the same hits of either tier and the same writes as with a set in the place of LMDB."""
    simulated = replay_stack(policy, [POOL, SCARCE], chat)
    tiers: list[DiskTier] = []
    with ExitStack() as stack:

        def disk(num: int, clock: Callable[[], float], policy: str) -> DiskBelow:
            tiers.append(stack.enter_context(opened(tmp_path, num, policy, clock)))
            return DiskBelow(tiers[0], clock)

        real = replay_stack(policy, [POOL, SCARCE], chat, disk=disk)
        assert real.result == simulated.result
        assert real.num_offered_again == simulated.num_offered_again
        stat = tiers[0].stat()
        assert (stat.num_stored, stat.num_entries, stat.num_dropped) == (real.result.writes[1], SCARCE, 0)
    hits, writes = sum(real.result.hits), sum(real.result.writes)
    if policy == "lru":
        assert real.num_offered_again == 0, "it would keep all back from the disk"
        return
    assert real.num_offered_again > POOL
    alone = [replay([Tier(make_policy(policy), num)], chat).hits[0] for num in (POOL, SCARCE)]
    assert hits > max(alone), (hits, alone)
    lru = replay_stack("lru", [POOL, SCARCE], chat).result
    assert hits > 1.2 * sum(lru.hits) and writes < 0.5 * sum(lru.writes), (real.result, lru)


def test_what_every_engine_keeps_goes_first_and_is_not_written_for_others_room(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path, SCARCE, "learned", clock) as tier:
        replayed = DiskReplay(tier, clock)
        scan(replayed, clock, 1500)
        keys = [key_of(7 * 10**9 + i) for i in range(20)]
        for engine in "ab":
            tier.joined(engine, NS_ID, 1000)
        assert tier.hold("a", keys, []), "it is full by now"
        for _ in range(6):
            clock.now += 1
            tier.note(NS_ID, A, keys)

        def offer(keys: list[bytes], first: int = 0) -> list[Status]:
            records = [record_of(keys, i, A, clock.now) for i in range(first, len(keys))]
            return tier.store(NS_ID, records, offer=Offer.REQUEST)

        assert offer(keys) == [Status.OK] * 20, "only one of two engines keeps it"
        assert tier.evict(NS_ID, refs_of(keys)) == 20
        scan(replayed, clock, 100, seed=1)
        tier.hold("b", keys[:15], [])
        assert offer(keys) == [Status.DECLINED] * 15 + [Status.OK] * 5, "the pools have what comes before these"
        tier.hold("b", [], keys[:15])
        assert offer(keys) == [Status.OK] * 15 + [Status.EXISTS] * 5
        tier.hold("b", keys, [])
        others = [key_of(8 * 10**9 + i) for i in range(8)]
        for _ in range(6):
            clock.now += 1
            tier.note(NS_ID, A, others)
        assert offer(others) == [Status.OK] * 8
        assert tier.match(NS_ID, refs_of(keys)) == [True] * 12 + [False] * 8, "both have it: of the chain its end first"
        tier.left("b")
        assert offer(keys) == [Status.EXISTS] * 12 + [Status.DECLINED] * 8, "the only engine keeps it"
        tier.left("a")
        assert offer(keys) == [Status.EXISTS] * 12 + [Status.OK] * 8, "an engine that is gone keeps nothing"
        tier.left("a")
        assert tier.hold("a", keys, []) and len(tier._catalog.order.held) == 0, "nor does one that nobody knows"


def test_pins_hold_what_engines_keep(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path, SCARCE, "learned", clock) as tier:
        tier.joined("a", NS_ID, 1000)
        keys = [key_of(i) for i in range(SCARCE)]
        tier.store(NS_ID, [record_of([key], 0, A, clock.now) for key in keys])
        refs = [refs_of([key])[0] for key in keys[:40]]
        tier.hold("a", keys[:40], [])
        for ref in refs[:20]:
            tier.pin(NS_ID, [ref], Pin("me", clock.now + 100))
        for i in range(30):
            tier.store(NS_ID, [record_of([key_of(10**6 + i)], 0, A, clock.now)])
        assert tier.match(NS_ID, refs) == [True] * 20 + [False] * 20
        clock.now += 101
        for i in range(20):
            tier.store(NS_ID, [record_of([key_of(10**7 + i)], 0, A, clock.now)])
        assert tier.match(NS_ID, refs) == [False] * 40, "the pins are over"
        assert tier.stat().num_evicted == 50
