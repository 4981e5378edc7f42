"""What every policy promises, under any sequence of calls; and what ours keeps and refuses."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.policy import POLICIES, Hint, Learned, Policy, make_policy, prefetch_order
from tierkv.policy import learned as learned_module
from tierkv.policy.kinds import Experience
from tierkv.policy.returns import ENDS, NUM_STAGES, WIDTHS, Returns, evenly, profits, worths

NUM_KEYS = 40
ROOT = b"root"


def key(i: int) -> bytes:
    return i.to_bytes(4, "big")


def parent_of(i: int) -> bytes:
    """Keys form a tree: chains with branches, several roots."""
    return ROOT if i % 7 == 0 else key(i - 1 if i % 3 else i // 2)


def chain_of(i: int) -> list[bytes]:
    chain = [key(i)]
    while (above := parent_of(int.from_bytes(chain[0], "big"))) != ROOT:
        chain.insert(0, above)
    return chain


numbers = st.integers(1, NUM_KEYS)
hints = st.builds(
    Hint,
    session=st.sampled_from(["", "a", "b"]),
    retain_s=st.none() | st.floats(-5, 1e12),
    release=st.booleans(),
    priority=st.integers(-9, 9),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("note"), numbers, st.floats(-50, 3000), st.none() | hints),
        st.tuples(st.just("add"), numbers),
        st.tuples(st.just("touch"), st.lists(numbers, max_size=6)),
        st.tuples(st.just("remove"), numbers),
        st.tuples(st.just("evict"), st.sets(numbers)),
        st.tuples(st.just("admit"), numbers, st.booleans()),
        st.tuples(st.just("release"), st.sampled_from(["a", "b", "c"])),
    ),
    max_size=150,
)


def run(policy: Policy[bytes], what: list[tuple[Any, ...]]) -> list[object]:
    """Do the steps, check the promises after each, and return all answers."""
    stored: dict[bytes, bytes] = {}
    answers: list[object] = []
    now = 0.0
    for name, *rest in what:
        if name == "note":
            now += rest[1]
            policy.note(chain_of(rest[0]), now, hint=rest[2])
        elif name == "add":
            policy.add(key(rest[0]), parent_of(rest[0]))
            stored.setdefault(key(rest[0]), parent_of(rest[0]))
        elif name == "touch":
            policy.touch([key(i) for i in rest[0]])
        elif name == "remove":
            policy.remove(key(rest[0]))
            stored.pop(key(rest[0]), None)
        elif name == "admit":
            answers.append(policy.admit(key(rest[0]), now, room=rest[1]))
        elif name == "release":
            answers.append(policy.release(rest[0]))
        else:
            pinned = {key(i) for i in rest[0]}
            victim = policy.victim(lambda k, pinned=pinned: k not in pinned)
            leaves = {k for k in stored if k not in stored.values() and k not in pinned}
            assert victim in leaves if leaves else victim is None
            answers.append(victim)
            if victim is not None:
                policy.remove(victim)
                del stored[victim]
        assert len(policy) == len(stored)
        assert all(k in policy for k in stored)
        parents = set(stored.values())
        assert all(policy.is_leaf(key(i)) == (key(i) in stored and key(i) not in parents) for i in range(NUM_KEYS + 1))
    return answers


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=200, deadline=None)
@given(what=steps)
def test_promises_hold_and_results_repeat(name: str, what: list[tuple[Any, ...]]) -> None:
    assert run(make_policy(name), what) == run(make_policy(name), what)


@settings(max_examples=150, deadline=None)
@given(what=steps)
def test_what_is_remembered_agrees_with_itself_and_is_bounded(what: list[tuple[Any, ...]]) -> None:
    before = learned_module.MIN_GHOSTS
    learned_module.MIN_GHOSTS = 10
    try:
        policy: Learned[bytes] = Learned()
        run(policy, what)
        policy.note([key(1)], 1e9)  # ghosts are forgotten here, if not before
        segments = set(policy._known.values())
        assert sum(len(s.keys) for s in segments) == len(policy._known)
        for segment in segments:
            assert all(policy._known[k] is segment for k in segment.keys)
            assert [k in policy for k in segment.keys] == [i < segment.num_stored for i in range(len(segment.keys))]
            assert (segment in policy._ghosts) == (segment.num_stored < len(segment.keys))
            assert (segment in segment.cohort.listed) == segment.is_listed
            top = segment.keys[segment.num_stored - 1]
            assert segment.is_listed or not segment.num_stored or top in policy._num_children
        heads = Counter(s.parent for s in segments if s.num_stored)
        assert heads == policy._num_children
        for cohort in {s.cohort for s in segments}:
            members = [s for s in segments if s.cohort is cohort]
            assert cohort.num_members == len(members)
            assert cohort.weight == pytest.approx(sum(s.weight for s in members))
        assert policy.num_ghosts <= max(10, len(policy))
    finally:
        learned_module.MIN_GHOSTS = before


def test_ghosts_ages_and_heap_stay_bounded() -> None:
    policy: Learned[bytes] = Learned()
    tier = Tier(policy, 500)
    for i in range(30_000):
        tier.request([key(1), key(2), *(key(10 + 5 * i + n) for n in range(5))], i * 0.1)
    assert len(policy) <= 500
    assert policy.num_ghosts <= learned_module.MIN_GHOSTS
    num_cohorts = len({segment.cohort for segment in policy._known.values()})
    assert sum(map(len, policy._aging)) == policy._num_aging <= 3 * num_cohorts + 1100
    assert policy._cells.num_queued <= len(policy._experience.kinds) * NUM_STAGES
    assert len(policy._experience.kinds) < 400


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(numbers, st.floats(0, 100)), max_size=30), numbers, st.integers(1, 20))
def test_questions_change_nothing(notes: list[tuple[int, float]], asked: int, times: int) -> None:
    """Asking admit, worth or victim any number of times leaves all later answers as they were."""
    answers = []
    for repeat in (1, times):
        policy: Learned[bytes] = Learned()
        now = 0.0
        log: list[object] = []
        for i, pause in notes:
            now += pause
            policy.note(chain_of(i), now)
            policy.add(key(i), parent_of(i))
            for _ in range(repeat):
                answer = (policy.admit(key(asked), now, room=False), policy.worth(key(asked)))
                victim = policy.victim(lambda k, i=i: k != key(i))
            log.append((answer, victim))
        answers.append(log)
    assert answers[0] == answers[1]


class Tier:
    """The least that a tier does with its policy."""

    def __init__(self, policy: Policy[bytes], capacity: int) -> None:
        self.policy = policy
        self.capacity = capacity
        self.num_writes = 0

    def request(self, chain: list[bytes], now: float, hint: Hint | None = None) -> int:
        hits = next((n for n, k in enumerate(chain) if k not in self.policy), len(chain))
        self.policy.note(chain, now, hint=hint)
        for i in range(hits, len(chain)):
            if chain[i] in self.policy:
                continue
            above = chain[i - 1] if i else ROOT
            room = len(self.policy) < self.capacity
            if not self.policy.admit(chain[i], now, room=room):
                break
            if not room:
                victim = self.policy.victim(lambda k, above=above: k != above)
                if victim is None:
                    break
                self.policy.remove(victim)
            self.policy.add(chain[i], above)
            self.num_writes += 1
        return hits


def chain(name: int, num: int) -> list[bytes]:
    return [b"%d/%d" % (name, i) for i in range(num)]


def test_a_scan_of_one_off_prompts_leaves_a_hot_prefix() -> None:
    tier = Tier(Learned(), 200)
    hot = chain(0, 20)
    for i in range(40):
        tier.request(hot, i * 0.5)
    held = asked = 0
    for i in range(20_000):
        now = 20 + i * 0.01
        tier.request(chain(1 + i, 2), now)
        if i % 200 == 0:
            asked += len(hot)
            held += min(tier.request([*hot, b"q%d" % i], now), len(hot))
    assert held >= 0.95 * asked
    assert tier.num_writes < 0.5 * 40_000


def test_a_tenant_that_floods_leaves_the_others_prefix() -> None:
    tier = Tier(Learned(), 200)
    rng = random.Random(1)
    hot, own = chain(0, 20), chain(1, 3)
    held = asked = 0
    for i in range(12_000):
        now = i * 0.02
        if i % 20 == 0:
            hits = tier.request([*hot, b"q%d" % i], now)
            if i > 1000:
                asked += len(hot)
                held += min(hits, len(hot))
        else:
            tier.request([*own, *chain(100 + i, rng.randint(1, 12))], now)
    assert held >= 0.95 * asked


def test_admission_finds_out_whether_memory_is_scarce() -> None:
    """The same requests: nearly all is written where it fits, little where it does not."""
    writes = {}
    for capacity in (50, 20_000):
        tier = Tier(Learned(), capacity)
        rng = random.Random(2)
        for i in range(3000):
            tier.request(chain(rng.randrange(1500) if i % 2 else 10_000 + i, 4), i * 1.0)
        writes[capacity] = tier.num_writes
    assert writes[50] < 0.5 * writes[20_000]


def test_a_loop_that_does_not_fit_keeps_a_part() -> None:
    tier = Tier(Learned(), 400)
    hits = sum(tier.request(chain(i % 50, 20), i * 2.0) for i in range(2000))
    assert hits > 0.25 * 2000 * 20, "LRU has none"


def test_hints_keep_who_will_be_back_and_drop_who_will_not() -> None:
    tier = Tier(Learned(), 100)
    rng = random.Random(3)
    hits: dict[bool, int] = {True: 0, False: 0}
    due: list[tuple[float, int]] = []
    for i in range(4000):
        now = i * 1.0
        back = i % 10 == 0
        hint = Hint(session=f"s{i}", retain_s=60.0) if back else Hint(release=True)
        tier.request(chain(i, 10), now, hint)
        if back:
            due.append((now + rng.uniform(30, 60), i))
        while due and due[0][0] <= now:
            hits[True] += tier.request([*chain(due[0][1], 10), b"x%d" % i], now, Hint(release=True))
            due.pop(0)
    assert hits[True] > 0.8 * 400 * 10


def test_a_released_session_goes_first() -> None:
    policy: Learned[bytes] = Learned()
    for i, name in enumerate("ab"):
        policy.note(chain(i, 3), float(i), hint=Hint(session=name, retain_s=60))
        for above, k in zip([ROOT, *chain(i, 3)], chain(i, 3), strict=False):
            policy.add(k, above)
    assert policy.release("b")
    assert not policy.release("b")
    assert policy.victim(lambda _: True) == chain(1, 3)[-1]


def test_a_higher_priority_is_worth_more_and_no_more_than_the_limit() -> None:
    worth = []
    for priority in (-99, 0, 1, 2, 99):
        policy: Learned[bytes] = Learned()
        policy.note([b"a"], 0.0, hint=Hint(priority=priority))
        worth.append(policy.worth(b"a"))
    assert worth == sorted(worth)
    assert worth[3] == worth[4] == 16 * worth[1]


def test_a_chain_that_repeats_keys_or_skips_some_does_no_harm() -> None:
    policy: Learned[bytes] = Learned()
    a, b, c, d = chain(0, 4)
    for i, odd in enumerate(([a, b, c], [a, a, b], [b, c], [d, d, d], [a, d, c, b], [c, a], [d, a])):
        policy.note(odd, float(i))
        for above, k in zip([ROOT, *odd], odd, strict=False):
            policy.add(k, above)
    assert sorted(policy) == [a, b, c, d]
    assert sum(len(s.keys) for s in set(policy._known.values())) == 4


def test_a_gap_in_a_chain_is_closed_again() -> None:
    policy: Learned[bytes] = Learned()
    keys = chain(0, 6)
    policy.note(keys, 0.0)
    for above, k in zip([ROOT, *keys], keys, strict=False):
        policy.add(k, above)
    policy.remove(keys[2])
    assert [k in policy for k in keys] == [True, True, False, True, True, True]
    assert policy.victim(lambda _: True) in (keys[1], keys[5])
    policy.add(keys[2], keys[1])
    for k in reversed(keys):
        assert policy.victim(lambda _: True) == k
        policy.remove(k)
    assert not policy._num_children


def test_loaded_chunks_share_segments() -> None:
    """A tier that loads its index adds parents first, then touches each chunk, leaves first."""
    policy: Learned[bytes] = Learned()
    for n in range(3):
        for above, k in zip([ROOT, *chain(n, 50)], chain(n, 50), strict=False):
            policy.add(k, above)
    for n in (1, 2, 0):
        for k in reversed(chain(n, 50)):
            policy.touch((k,))
    assert len(set(policy._known.values())) == 3
    assert policy.victim(lambda _: True) == chain(1, 50)[-1]


def test_profits_are_expected_hits_less_the_price() -> None:
    q = [0.0] * NUM_STAGES
    q[0] = 0.5
    assert profits(q, 1.0, 0.0)[:2] == [0.5, 0.0]
    assert profits(q, 4.0, 0.01)[0] == pytest.approx(4 * 0.5 - 0.01 * 8 * 0.75)
    assert profits(q, 1.0, 1.0)[0] == 0.0


def test_what_the_tier_above_holds_is_written_only_where_there_is_room() -> None:
    policy: Learned[bytes] = Learned()
    policy.note([b"a"], 0.0)
    assert policy.admit(b"a", 0.0, room=True, above=True)
    assert not policy.admit(b"a", 0.0, room=False, above=True)


def test_domains_learn_their_own_times() -> None:
    policy: Learned[bytes] = Learned()
    for i in range(3000):
        now = i * 1.0
        policy.note(chain(i, 4), now, domain="once")
        policy.note(chain(10**6 + i, 4), now, domain="twice")
        if i >= 20:
            policy.note([*chain(10**6 + i - 20, 4), b"n%d" % i], now, domain="twice")
    policy.note(chain(7_000_001, 4), 3000.0, domain="once")
    policy.note(chain(7_000_002, 4), 3000.0, domain="twice")
    assert policy.worth(chain(7_000_002, 4)[0]) > 3 * policy.worth(chain(7_000_001, 4)[0])


def test_ages_are_noticed_within_a_quarter_second() -> None:
    policy: Learned[bytes] = Learned()
    policy.note([b"a"], 0.0)
    cohort = policy._known[b"a"].cohort
    for stage, end in enumerate(ENDS, 1):
        policy.note([b"b"], end - 0.01)
        assert cohort.stage == stage - 1
        policy.note([b"b"], end + 0.25)
        assert cohort.stage == stage


def test_domains_and_kinds_are_bounded() -> None:
    experience = Experience()
    for i in range(1000):
        experience.kind(f"d{i}", ("over",))
    assert len(experience.kinds) <= 66


def test_an_even_chance_is_the_same_however_finely_ages_are_told_apart() -> None:
    q = evenly(0.1)
    for start, end in [(8, 16), (16, 64), (512, 1024), (1024, 2048)]:
        first, last = ENDS.index(start) + 1, ENDS.index(end) + 1
        stays = math.prod(1 - chance for chance in q[first:last])
        assert stays == pytest.approx(0.9 ** math.log2(end / start))
    assert (q[0], q[-1]) == (pytest.approx(0.1), pytest.approx(0.1))


@given(st.lists(st.floats(0, 0.98), min_size=NUM_STAGES, max_size=NUM_STAGES))
def test_worths_equal_the_best_ratio_over_all_stops(q: list[float]) -> None:
    for b, worth in enumerate(worths(q)):
        alive, hits, time, best = 1.0, 0.0, 0.0, 0.0
        if min(1 - x for x in q[:b]) if b else 1:
            for chance, width in zip(q[b:], WIDTHS[b:], strict=True):
                hits += alive * chance
                time += alive * width * (1 - chance / 2)
                alive *= 1 - chance
                best = max(best, hits / time)
        product = 1.0
        for x in q:
            product *= 1 - x
        if product > 1e-6:  # below that, the tail is rounded
            assert worth == pytest.approx(best, rel=1e-6)


def test_a_life_table_is_drawn_to_its_prior() -> None:
    table = Returns()
    assert table.chances([0.1] * NUM_STAGES, 10) == pytest.approx([0.1] * NUM_STAGES)
    table.came[0], table.left[0] = 1000, 500
    assert table.chances([0.1] * NUM_STAGES, 10)[0] == pytest.approx(501 / 1010)


def test_policies_by_name() -> None:
    assert isinstance(make_policy(), Learned)
    with pytest.raises(ValueError, match="unknown; use one of learned, s3fifo, lru"):
        make_policy("mru")


def test_prefetch_order() -> None:
    chains = [[b"a", b"b"], [b"a", b"c"], []]
    assert prefetch_order(chains, {b"a"}.__contains__) == [b"b", b"c"]
    assert prefetch_order(chains, lambda _: False, {b"c": 2.0, b"b": 1.0}.__getitem__) == [b"a", b"c", b"b"]
