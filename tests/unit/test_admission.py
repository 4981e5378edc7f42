"""What the host pool keeps and what only passes through it, and what the store server is told of requests."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler_bench import CHUNK_TOKENS, Bench
from scheduler_parts import FakeClient
from tierkv.hostindex import Entry, HostIndex
from tierkv.keys import tenant_digest
from tierkv.messages import DECLINED, EVICTED, STORED
from tierkv.policy import POLICIES, make_policy
from tierkv.pool import HostPool, PoolShape, Segment
from tierkv_connector.admission import answered, keeps

NUM_SLOTS = 64
ROOT = bytes(32)


class Pool:
    """A host index and its time, used as the connector uses it."""

    def __init__(self, policy: str = "learned") -> None:
        shape = PoolShape(NUM_SLOTS, 1, 64)
        self.pool = HostPool(shape, [Segment.create(shape.segment_nbytes(0))])
        self.now = 100.0
        self.index = HostIndex(self.pool, make_policy(policy), clock=lambda: self.now)

    def request(self, keys: list[bytes], seconds: float = 1.0, *, sending: bool = False) -> list[Entry | None]:
        """Ask for a chain; what is missing passes through a slot, which the server has answered for, or not yet."""
        self.now += seconds
        self.index.note(keys)
        entries = []
        for i, key in enumerate(keys):
            entry = self.index.get(key)
            if entry is None:
                parent = keys[i - 1] if i else ROOT
                entry = self.index.reserve(key, parent, i, 16, keep=self.index.admits(key, parent))
                if entry is not None:
                    self.index.filled(entry, "host")
                    entry.sending = sending
            entries.append(entry)
        return entries

    def holds(self, keys: list[bytes]) -> int:
        return self.index.run_end(keys, 0, len(keys))


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.pool.close()


def chain(first: int, num: int) -> list[bytes]:
    return [i.to_bytes(32, "big") for i in range(first + 1, first + 1 + num)]


def warm(pool: Pool) -> list[bytes]:
    """Fill the pool with what is asked for again and again, among prompts that are not; returns the hottest chain."""
    hot = chain(0, 20)
    for turn in range(30):
        for other in range(4):
            pool.request(hot, 0.5)
            pool.request(chain(1000 * (other + 1), 11), 0.5)
            pool.request(chain(10**5 + 100 * turn + 10 * other, 3), 0.5)
    assert pool.holds(hot) == 20
    return hot


def test_a_long_one_off_prompt_passes_through_and_a_hot_prefix_stays() -> None:
    kept = {}
    for policy in ("learned", "lru"):
        pool = Pool(policy)
        hot = warm(pool)
        for i in range(30):
            pool.request(chain(10**6 * (i + 1), 60), 0.02)
        kept[policy] = pool.holds(hot)
        pool.pool.close()
    assert kept == {"learned": 20, "lru": 0}


def test_a_scan_of_short_prompts_leaves_a_hot_prefix(pool: Pool) -> None:
    hot = warm(pool)
    for i in range(3000):
        pool.request(chain(10**6 + 10 * i, 1 + i % 3), 0.05)
        if i % 40 == 39:
            assert pool.holds(hot) == 20
            pool.request(hot)
    assert pool.index.num_evicted > 4000, "more went by than the pool has slots"


def test_what_passes_through_goes_first_the_oldest_of_it_first(pool: Pool) -> None:
    warm(pool)
    entries = [e for e in pool.request(chain(10**6, 10), sending=True) if e is not None]
    assert len(entries) == pool.index.num_in_transit == 10 and all(e.in_transit for e in entries)
    answered(entries, STORED * 10)
    keys = [e.key for e in entries]
    held = {key for key in pool.index._entries if key not in keys}
    for gone in range(1, 6):
        entry = pool.index.reserve(b"x%31d" % gone, ROOT, 0, 16, keep=True)
        assert entry is not None
        pool.index.filled(entry, "host")
        assert [pool.index.get(key) is None for key in keys] == [True] * gone + [False] * (10 - gone)
    assert pool.index.num_in_transit == 5 and all(pool.index.get(key) is not None for key in held)


def test_a_slot_that_the_server_has_not_answered_for_is_not_used_again(pool: Pool) -> None:
    warm(pool)
    entries = [e for e in pool.request(chain(10**6, 4), sending=True) if e is not None]
    pool.request(chain(2 * 10**6, 4))
    assert all(pool.index.get(e.key) is e for e in entries)
    answered(entries, DECLINED * 3 + STORED)
    assert [e.declined for e in entries] == [True, True, True, False] and not any(e.sending for e in entries)
    pool.request(chain(3 * 10**6, 8))
    assert any(pool.index.get(e.key) is None for e in entries)
    answered(entries, None)
    answered(entries, b"")
    assert entries[0].declined, "no answer says nothing"


def test_what_is_asked_for_again_is_kept_as_far_as_it_is_worth_it(pool: Pool) -> None:
    warm(pool)
    keys = chain(10**6, 6)
    assert all(e is not None and e.in_transit for e in pool.request(keys))
    for _ in range(6):
        pool.request(keys)
    entries = [pool.index.get(key) for key in keys]
    assert all(e is not None and not e.in_transit for e in entries) and pool.index.num_in_transit == 0
    assert pool.holds(keys) == 6


@pytest.mark.parametrize("policy", POLICIES)
def test_what_the_policy_gives_up_is_there_until_its_slot_is_needed(policy: str) -> None:
    pool = Pool(policy)
    hot = warm(pool)
    before = len(pool.index)
    gone = pool.index.retire(5)
    assert len(gone) == 5 and all(e.in_transit for e in gone) and len(pool.index) == before
    assert not {e.key for e in gone} & set(hot[:15])
    by_key = {e.key: i for i, e in enumerate(gone)}
    assert all(by_key[e.parent] > i for i, e in enumerate(gone) if e.parent in by_key), "leaves first"
    pool.index.clear()
    assert pool.index.num_in_transit == 0 and pool.index.num_free == NUM_SLOTS
    pool.pool.close()


def state_of(keys: list[bytes], **other: Any) -> Any:
    parent = lambda i: keys[i - 1] if i else ROOT  # noqa: E731
    return SimpleNamespace(**{"keys": keys, "parent": parent, "promised": None, "shareable": True} | other)


def test_what_nobody_wants_is_not_copied(pool: Pool) -> None:
    warm(pool)
    keys = chain(10**6, 4)
    client: Any = FakeClient()
    assert [keeps(pool.index, state_of(keys), i, client) for i in range(4)] == [False] * 4, "the disk may want it"
    client.spill = {"disk": "never"}
    assert keeps(pool.index, state_of(keys), 0, client) is None
    assert keeps(pool.index, state_of(keys, promised=set()), 0, client) is False, "somebody waits for it"
    client.spill = {"disk": "through"}
    assert keeps(pool.index, state_of(keys, shareable=False), 0, client) is None
    assert keeps(pool.index, state_of(keys), 0, None) is None
    client.up = False
    assert keeps(pool.index, state_of(keys), 0, client) is None
    client.up = True
    first = pool.index.reserve(keys[0], ROOT, 0, 16, keep=False)
    assert first is not None
    pool.index.filled(first, "host")
    assert keeps(pool.index, state_of(keys), 1, client) is False
    answered([first], DECLINED)
    assert keeps(pool.index, state_of(keys), 1, client) is None, "neither wants what comes before it"


# The scheduler half


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(num_slots=8, num_blocks=64)
    yield bench
    bench.close()


def prompt(num_chunks: int, family: int) -> list[int]:
    return [100 * family + i % 97 for i in range(num_chunks * CHUNK_TOKENS + 1)]


def run(bench: Bench, tokens: list[int]) -> None:
    bench.submit(tokens)
    for _ in range(12):
        bench.answer_all()
        bench.run_device()
        bench.step()
        bench.settle_stores()
    bench.gpu.reset()
    bench.now += 1


def test_without_a_server_what_is_not_worth_a_slot_is_not_copied(bench: Bench) -> None:
    bench.client.up = False
    for _ in range(6):
        run(bench, prompt(8, 1))
    spilled = bench.sched.counters["spilled"]
    assert spilled == 8
    for family in range(2, 6):
        run(bench, prompt(8, family))
    assert bench.sched.counters["not_admitted"] >= 24 and bench.sched.counters["spilled"] < spilled + 8
    bench.check()


def test_each_request_is_told_once_with_its_whole_chain(bench: Bench) -> None:
    for _ in range(2):
        run(bench, prompt(3, 1))
    run(bench, prompt(0, 2))
    notes = bench.client.notes
    assert [len(note.chain) // 32 for note in notes] == [3, 3] and notes[0] == notes[1]
    assert notes[0].tenant == tenant_digest(b"") and notes[0].session == b"" and notes[0].retain_s is None
    bench.client.up = False
    run(bench, prompt(3, 1))
    assert len(notes) == 2


@pytest.mark.parametrize("shared", ["never", "second-use"])
def test_with_on_evict_what_only_passes_through_is_sent_at_once(bench: Bench, shared: str) -> None:
    bench.client.spill = {"disk": "on-evict", "shared": shared}
    for _ in range(6):
        run(bench, prompt(8, 1))
    bench.client.log.clear()
    bench.sched.index.admits = lambda key, parent: False  # type: ignore[method-assign]
    run(bench, prompt(3, 2))
    sent = [i for command in bench.client.log if command[0] == "store" for i in command[1] if i.reason == EVICTED]
    chain = bench.client.notes[-1].chain
    assert {chain[i : i + 32] for i in range(0, len(chain), 32)} <= {item.key for item in sent}
    bench.check()
