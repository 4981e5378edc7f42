"""The scheduler half: random lives of an engine, purity of the question that vLLM asks, and each rule by an example."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

import scheduler_bench
from scheduler_bench import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    DEADLINE_S,
    IDENTITY,
    PAYLOAD_NBYTES,
    Bench,
    Request,
    small_world,
)
from tierkv.keys import ANCHOR_SPAN, chain_keys, root_key
from tierkv.messages import COMPUTED, EVICTED, USED
from tierkv_connector.costs import NUM_NEEDED, CostGate
from tierkv_connector.plan import TRANSITIONS, State
from tierkv_connector.scheduler import Scheduler

NUM_SEQUENCES = 600
NUM_PURE_SEQUENCES = 200
NUM_OPERATIONS = 200


SPILL = [("through", "through"), ("second-use", "second-use"), ("on-evict", "never"), ("never", "on-evict")]


def random_bench(seed: int, extra_seed: int | None = None) -> Bench:
    """A bench whose sizes follow from the seed: a GPU that is large or too small, a pool that is small or tiny."""
    bench = Bench(
        seed,
        num_slots=12 if seed % 5 else 5,
        num_blocks=40 if seed % 3 else 24,
        late_outputs=bool(seed % 2),
        extra_seed=extra_seed,
        sync_load_nbytes=seed % 4 * PAYLOAD_NBYTES,
    )
    bench.client.spill = dict(zip(("disk", "shared"), SPILL[seed % len(SPILL)], strict=True))
    bench.client.holder = "a session" if bench.client.spill["disk"] == "through" else ""
    bench.client.is_full = seed % 3 > 0
    return bench


def test_random_sequences_keep_every_invariant() -> None:
    scheduler_bench.seen_transitions.clear()
    num_loaded = num_none = num_sync = 0
    reasons: Counter[int] = Counter()
    for seed in range(NUM_SEQUENCES):
        with small_world():
            bench = random_bench(seed)
            history: list[str] = []
            try:
                for _ in range(NUM_OPERATIONS):
                    history.append(bench.do())
                    bench.check()
                bench.drain()
                bench.check()
                bench.check_idle()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, after {len(history)} operations, {history[-5:]}") from error
            finally:
                bench.close()
            num_loaded += bench.num_loaded_chunks
            num_none += bench.num_none
            num_sync += bench.num_sync_loads
            reasons.update(item.reason for kind, *words in bench.client.log if kind == "store" for item in words[0])
    assert reasons[COMPUTED] > NUM_SEQUENCES and reasons[EVICTED] > 100 and reasons[USED] > 5, reasons
    assert num_loaded > NUM_SEQUENCES, "the sequences load too little to say anything"
    assert num_none > NUM_SEQUENCES
    assert num_sync > NUM_SEQUENCES / 2
    assert scheduler_bench.seen_transitions == {(a, b) for a, then in TRANSITIONS.items() for b in then}


# -- purity


class DifferenceError(Exception):
    """Asking more often has changed something."""


def compare(seed: int) -> None:
    """Live through one sequence twice, asking once and asking often, and compare all that there is after every step.

    The bench that asks often also asks about any request at any position between the operations.

    Raises:
        DifferenceError: something differs.
    """
    curious = Random(seed + 2)
    with small_world():
        once, often = random_bench(seed), random_bench(seed, extra_seed=seed + 1)
        try:
            for number in range(NUM_OPERATIONS):
                ask_anything(often, curious)
                names = once.do(), often.do()
                one, other = once.dump(), often.dump()
                if names[0] != names[1] or one != other:
                    parts = [name for name in one if one[name] != other[name]]
                    raise DifferenceError(f"seed {seed}, operation {number} ({names[0]}): {parts}")
        finally:
            once.close()
            often.close()


def ask_anything(bench: Bench, rng: Random) -> None:
    for request in bench.requests.values():
        for _ in range(rng.randrange(3)):
            bench.sched.get_num_new_matched_tokens(request, rng.randrange(request.num_tokens))


def test_asking_changes_nothing() -> None:
    for seed in range(NUM_PURE_SEQUENCES):
        compare(seed)


def _reserve(sched: Scheduler, state: Any) -> None:
    if (entry := sched.index.reserve(bytes(32), state.root, 0, CHUNK_TOKENS)) is not None:
        sched.index.filled(entry, "host")


def _pin(sched: Scheduler, state: Any) -> None:
    if (entry := sched.index.get(state.keys[0])) is not None:
        sched.index.pin(entry)


def _send(sched: Scheduler, state: Any) -> None:
    if sched.client is not None:
        sched.client.match(0, 0, state.keys[0], state.keys)


def _use(sched: Scheduler, state: Any) -> None:
    if (entry := sched.index.get(state.keys[0])) is not None and entry.usable:
        sched.index.used(entry)


SIDE_EFFECTS: dict[str, Callable[[Scheduler, Any], object]] = {
    "allocates": _reserve,
    "pins": _pin,
    "promotes": lambda sched, state: sched._apply_replies(),
    "touches": lambda sched, state: sched.index.touch(state.keys),
    "counts a hit": _use,
    "sends": _send,
    "plans": lambda sched, state: sched.prefetch.advance(sched._plan),
    "counts": lambda sched, state: sched.counters.update(asked=1),
    "records": lambda sched, state: setattr(state, "store_next", 0),
    "waits anew": lambda sched, state: state.plan and setattr(state.plan, "deadline", sched._clock() + DEADLINE_S),
    "takes turns": lambda sched, state: sched.client and sched.client.next_lane(),
}


@pytest.mark.parametrize("kind", SIDE_EFFECTS)
def test_a_planted_side_effect_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pure, effect = Scheduler.get_num_new_matched_tokens, SIDE_EFFECTS[kind]

    def impure(self: Scheduler, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        answer = pure(self, request, num_computed_tokens)
        if (state := self.requests.get(request.request_id)) is not None:
            effect(self, state)
        return answer

    monkeypatch.setattr(Scheduler, "get_num_new_matched_tokens", impure)
    with pytest.raises(DifferenceError):
        for seed in range(10):
            compare(seed)


# -- each rule by an example


@pytest.fixture
def bench() -> Iterator[Bench]:
    with small_world():
        bench = Bench(num_slots=16, num_blocks=64)
        yield bench
        bench.check()
        bench.drain()
        bench.check()
        bench.check_idle()
        bench.close()


def prompt(num_chunks: int, family: int = 0, rest: int = 1) -> list[int]:
    return [100 * family + i % 97 for i in range(num_chunks * CHUNK_TOKENS + rest)]


def keys_of(tokens: list[int]) -> list[bytes]:
    return chain_keys(root_key(IDENTITY), tokens, CHUNK_TOKENS)


def store(bench: Bench, tokens: list[int], letter: bytes = b"d") -> list[bytes]:
    """Have the store server hold a prompt's chunks, and return their keys."""
    keys = keys_of(tokens)
    bench.stored.update(dict.fromkeys(keys, letter))
    return keys


def warm(bench: Bench, tokens: list[int]) -> list[bytes]:
    """Have a prompt's chunks in the host pool, spilled by a request that is over, and return their keys."""
    bench.submit(tokens)
    settle(bench)
    bench.gpu.reset()
    keys = keys_of(tokens)
    assert not bench.requests and all(bench.usable(key) for key in keys)
    bench.sched.counters.clear()
    return keys


def fetched(bench: Bench) -> list[bytes]:
    """Return the keys of all FETCH commands, in the order in which they were sent."""
    return [key for command in bench.client.log if command[0] == "fetch" for key, _, _ in command[4]]


def settle(bench: Bench, count: int = 12) -> None:
    """Let everything go on until nothing is left to do."""
    for _ in range(count):
        bench.answer_all()
        while bench.client.stores:
            bench.answer_store()
        bench.run_device()
        bench.step()


def test_what_is_stored_is_waited_for_and_loaded(bench: Bench) -> None:
    keys = store(bench, prompt(3))
    request = bench.submit(prompt(3))
    bench.step()
    assert bench.ask(request, 0) == (None, False)
    bench.answer_all()
    assert bench.ask(request, 0)[0] is None  # the third chunk is on its way in a second command
    bench.step()
    bench.answer_all()
    assert bench.ask(request, 0) == (3 * CHUNK_TOKENS, True)
    assert fetched(bench) == keys
    meta = bench.step()
    assert [job.req_id for job in meta.loads] == [request.request_id]
    settle(bench)
    assert bench.sched.counters["disk_hits"] == 3
    assert bench.sched.counters["missed"] == 0


def test_a_reply_that_arrives_during_the_question_is_not_overlooked(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader thread may run between any two steps of an answer."""
    store(bench, prompt(2))
    request = bench.submit(prompt(2))
    bench.step()
    look = bench.sched.index.run_end

    def interrupted(*args: Any) -> int:
        end = look(*args)
        bench.answer_all()
        return end

    monkeypatch.setattr(bench.sched.index, "run_end", interrupted)
    assert bench.sched.get_num_new_matched_tokens(request, 0) == (None, False)
    monkeypatch.undo()
    assert bench.ask(request, 0) == (2 * CHUNK_TOKENS, True)
    settle(bench)


def test_nothing_stored_keeps_nobody_waiting_after_the_answer(bench: Bench) -> None:
    request = bench.submit(prompt(2))
    assert bench.ask(request, 0) == (None, False)
    bench.answer_all()
    assert bench.ask(request, 0) == (0, False)
    settle(bench)
    assert bench.sched.counters["missed"] == 2
    assert bench.sched.counters["spilled"] == 2
    assert len(bench.stored) == 2


def test_the_last_token_is_never_claimed(bench: Bench) -> None:
    warm(bench, prompt(3))
    request = bench.submit(prompt(3, rest=0))
    assert bench.ask(request, 0) == (2 * CHUNK_TOKENS, True)
    assert bench.ask(bench.submit(prompt(0, rest=1)), 0) == (0, False)


def test_two_requests_that_want_one_key_share_one_fetch(bench: Bench) -> None:
    keys = store(bench, prompt(2))
    first, second = bench.submit(prompt(2)), bench.submit(prompt(2))
    assert fetched(bench) == keys
    assert bench.ask(second, 0) == (None, False)
    lanes = [command[1] for command in bench.client.log if command[0] == "match"]
    bench.answer(lanes[0])
    bench.answer(lanes[1])  # that all is stored, but nothing has arrived
    bench.step()
    assert bench.ask(second, 0) == (None, False)
    bench.answer_all()
    assert bench.ask(first, 0) == bench.ask(second, 0) == (2 * CHUNK_TOKENS, True)
    settle(bench)
    assert fetched(bench) == keys


def test_a_request_waits_for_anothers_load_and_hits_the_gpu(bench: Bench) -> None:
    warm(bench, prompt(3))
    bench.submit(prompt(3))
    follower = bench.submit(prompt(3))
    assert [len(job.pieces) for job in bench.step().loads] == [3]
    assert bench.ask(follower, 0) == (None, False)
    bench.step()
    settle(bench, 4)
    assert bench.num_loaded_chunks == 3  # one load
    assert bench.sched.counters["host_hits"] == 3


def test_the_wait_for_a_load_is_bounded_however_many_follow(bench: Bench) -> None:
    warm(bench, prompt(3))
    for _ in range(4):
        bench.submit(prompt(3))
    assert len(bench.step().loads) == 1
    bench.now += DEADLINE_S - 0.01
    assert len(bench.step().loads) == 0
    bench.now += 0.02
    assert len(bench.step().loads) == 3


def test_at_the_deadline_what_has_arrived_is_claimed(bench: Bench) -> None:
    store(bench, prompt(5))
    request = bench.submit(prompt(5))
    lane = bench.client.outstanding()[0]
    bench.answer(lane)  # MATCH
    bench.answer(lane)  # the first two chunks
    bench.step()
    bench.now += DEADLINE_S - 0.01
    assert bench.ask(request, 0) == (None, False)
    bench.now += 0.02
    assert bench.ask(request, 0) == (2 * CHUNK_TOKENS, True)
    assert sum(len(job.pieces) for job in bench.step().loads) == 2
    bench.step()
    assert bench.state(request).plan is not None
    settle(bench)
    assert bench.sched.counters["missed"] == 3


def test_a_chunk_that_is_lost_on_the_way_ends_the_plan(bench: Bench) -> None:
    keys = store(bench, prompt(6))
    request = bench.submit(prompt(6))
    bench.answer()
    del bench.stored[keys[1]]
    bench.answer()
    assert bench.ask(request, 0) == (CHUNK_TOKENS, True)
    settle(bench)
    assert fetched(bench) == keys[:2]


def test_nobody_waits_for_what_comes_after_a_lost_chunk(bench: Bench) -> None:
    keys = store(bench, prompt(6))
    request = bench.submit(prompt(6))
    bench.answer()
    bench.step()
    assert fetched(bench) == keys
    bench.answer(letters=b"d-")
    assert bench.client.outstanding()
    assert bench.ask(request, 0) == (CHUNK_TOKENS, True)
    bench.refuse_blocks = 1.0
    bench.step()
    assert bench.ask(request, 0) == (CHUNK_TOKENS, True)
    bench.refuse_blocks = 0.0
    assert [len(job.pieces) for job in bench.step().loads] == [1]


def test_a_server_that_goes_away_ends_the_wait_and_takes_no_slots(bench: Bench) -> None:
    other = warm(bench, prompt(4, family=1))
    keys, before = store(bench, prompt(6)), len(fetched(bench))
    request = bench.submit(prompt(6))
    bench.answer()
    bench.answer()
    bench.client.disconnect()
    bench.step()
    bench.step()
    assert request.status == "loading"
    assert bench.num_loaded_chunks == 2
    assert fetched(bench)[before:] == keys[:2]
    assert all(bench.usable(key) for key in other), "slots were taken for what cannot come"
    late = bench.submit(prompt(6, family=2))
    assert bench.ask(late, 0) == (0, False)


def test_slots_of_a_lost_fetch_come_back_with_the_lease(bench: Bench) -> None:
    store(bench, prompt(2))
    request = bench.submit(prompt(2))
    bench.client.disconnect()
    assert bench.ask(request, 0) == (0, False)
    bench.step()
    assert bench.sched.index.num_quarantined == 2
    assert bench.sched.prefetch.fetch_nbytes == 2 * PAYLOAD_NBYTES
    bench.op_late_write()
    bench.step()
    assert bench.sched.index.num_quarantined == 2
    bench.client.end_leases()
    bench.step()
    assert bench.sched.index.num_quarantined == 0
    assert bench.sched.prefetch.fetch_nbytes == 0


def test_a_plan_without_room_keeps_nobody_waiting_and_starts_later(bench: Bench) -> None:
    for family in range(5):
        store(bench, prompt(1, family))
    requests = [bench.submit(prompt(1, family)) for family in range(5)]
    assert [bench.ask(request, 0)[0] for request in requests] == [None, None, None, 0, 0]
    bench.refuse_blocks = 1.0
    bench.answer_all()
    bench.step()
    assert [bench.ask(request, 0)[0] for request in requests] == [CHUNK_TOKENS] * 3 + [None, None]
    bench.answer_all()
    assert [bench.ask(request, 0)[0] for request in requests] == [CHUNK_TOKENS] * 5
    bench.refuse_blocks = 0.0


def test_bytes_of_all_plans_are_bounded(bench: Bench) -> None:
    tokens = [prompt(4, family) for family in range(3)]
    for each in tokens:
        store(bench, each)
    requests = [bench.submit(each) for each in tokens]
    bench.refuse_blocks = 1.0
    assert len(fetched(bench)) == 6
    for _ in range(3):
        bench.answer_all()
        bench.step()
        bench.check()
    # At most half of the pool is leased: what comes after that is computed.
    assert len(fetched(bench)) == 8
    assert sum(bench.ask(request, 0)[0] or 0 for request in requests) == 8 * CHUNK_TOKENS
    bench.refuse_blocks = 0.0


def test_refused_or_ended_requests_give_their_leases_back(bench: Bench) -> None:
    store(bench, prompt(2))
    aborted, refused = bench.submit(prompt(2)), bench.submit(prompt(2, family=1), max_outputs=5)
    bench.answer_all()
    assert bench.sched.prefetch.num_leased == 4
    bench.finish(aborted)
    assert bench.sched.prefetch.num_leased == 2
    bench.step()
    assert refused.status == "running"
    assert bench.sched.prefetch.num_leased == 0
    assert len(bench.sched.index) == 4  # what has arrived stays, and the new request's chunks are on their way


def test_a_refusal_of_blocks_changes_nothing(bench: Bench) -> None:
    warm(bench, prompt(2))
    request = bench.submit(prompt(2))
    bench.refuse_blocks = 1.0
    for _ in range(5):
        assert not bench.step().loads
        assert bench.ask(request, 0) == (2 * CHUNK_TOKENS, True)
    bench.refuse_blocks = 0.0
    assert len(bench.step().loads) == 1


def preempted(bench: Bench, tokens: list[int]) -> Request:
    """Return a request that has run, and that vLLM has just preempted."""
    request = bench.submit(tokens, max_outputs=9)
    bench.answer_all()
    bench.step()
    bench.step()
    assert request.num_tokens > len(tokens)
    bench.running.remove(request)
    bench._preempt(request)
    bench.gpu.reset()
    return request


def test_a_preempted_request_is_planned_again(bench: Bench) -> None:
    request = preempted(bench, prompt(3))
    bench.run_device()
    bench.step()
    bench.sched.index.clear()  # what it had is only stored
    store(bench, prompt(3))
    bench.running.remove(request)
    bench._preempt(request)
    bench.gpu.reset()
    bench.refuse_blocks = 1.0
    before = len(fetched(bench))
    bench.step()
    assert len(fetched(bench)) > before
    assert bench.ask(request, 0) == (None, False)
    bench.answer_all()
    bench.step()
    bench.answer_all()
    assert bench.ask(request, 0) == (3 * CHUNK_TOKENS, True)
    bench.refuse_blocks = 0.0


def test_a_request_that_is_preempted_and_runs_again_in_one_step_gets_no_plan(bench: Bench) -> None:
    request = preempted(bench, prompt(3))
    bench.sched.index.clear()
    store(bench, prompt(3))
    plans = bench.sched.counters["plans"]
    bench.step()
    assert request.status == "running"
    assert bench.sched.counters["plans"] == plans
    assert not bench.sched._waiting


def test_a_prefix_that_leaves_the_gpu_is_planned_again(bench: Bench) -> None:
    keys = warm(bench, prompt(4))
    bench.submit(prompt(4))
    settle(bench)  # on the GPU
    bench.sched.index.clear()
    store(bench, prompt(4))
    bench.refuse_blocks = 1.0
    request = bench.submit(prompt(4))
    plan = bench.state(request).plan
    assert plan is not None and plan.gpu_run == plan.start == 4
    bench.step()
    assert bench.ask(request, 4 * CHUNK_TOKENS) == (0, False)
    bench.gpu.reset()
    before = len(fetched(bench))
    bench.step()
    bench.answer_all()
    bench.step()
    bench.answer_all()
    assert fetched(bench)[before:] == keys
    assert bench.ask(request, 0) == (4 * CHUNK_TOKENS, True)
    assert bench.sched.counters["replans"] == 1
    bench.refuse_blocks = 0.0


def test_a_prefix_on_the_gpu_is_not_fetched(bench: Bench) -> None:
    warm(bench, prompt(4))
    bench.submit(prompt(2))
    settle(bench)
    bench.sched.index.clear()
    keys = store(bench, prompt(4))
    before = len(fetched(bench))
    request = bench.submit(prompt(4))
    assert fetched(bench)[before:] == keys[2:]
    bench.answer_all()
    assert bench.ask(request, 2 * CHUNK_TOKENS) == (2 * CHUNK_TOKENS, True)


def test_a_chunk_that_is_half_on_the_gpu_is_loaded_in_part(bench: Bench) -> None:
    warm(bench, prompt(3))
    bench.submit(prompt(1, rest=BLOCK_TOKENS + 1))
    settle(bench)
    request = bench.submit(prompt(3))
    (job,) = bench.step().loads
    assert job.req_id == request.request_id
    assert [(piece.first, len(piece.block_ids)) for piece in job.pieces] == [(1, 1), (0, 2)]


def test_a_failure_that_is_known_before_the_load_has_ended_is_remembered(bench: Bench) -> None:
    warm(bench, prompt(2))
    request = bench.submit(prompt(2))
    bench.split_reports = 1.0
    (job,) = bench.step().loads
    bench.run_load(job, ok=False)
    bench.step()
    assert (request.status, request.recved) == ("loading", False)
    bench.step()
    assert request.recved
    assert bench.ask(request, 0) == (0, False)
    assert bench.step().loads == []
    assert request.status == "finished"
    assert bench.sched.counters["load_failures"] == 1


def test_an_abort_during_a_load_keeps_the_slots_until_it_is_reported(bench: Bench) -> None:
    keys = warm(bench, prompt(2))
    request = bench.submit(prompt(2))
    (job,) = bench.step().loads
    bench.finish(request)
    entries = [bench.sched.index.get(key) for key in keys]
    assert [entry and entry.num_pins for entry in entries] == [1, 1]
    bench.step()
    bench.run_load(job)
    bench.step()
    assert [entry and entry.num_pins for entry in entries] == [0, 0]
    assert not bench.requests


def test_a_fetched_chunk_is_a_hit_of_its_tier_once(bench: Bench) -> None:
    """Also where vLLM claims it before the scheduler half has taken note of its arrival."""
    store(bench, prompt(2), b"s")
    request = bench.submit(prompt(2))
    bench.answer_all()
    assert len(bench.step().loads) == 1
    settle(bench)
    assert request.request_id not in bench.requests
    bench.gpu.reset()
    bench.submit(prompt(2))
    settle(bench)
    counters = bench.sched.counters
    assert (counters["shared_hits"], counters["host_hits"], counters["disk_hits"]) == (2, 2, 0)


def test_an_eviction_takes_effect_at_once_and_a_claim_made_before_it_stands(bench: Bench) -> None:
    keys = warm(bench, prompt(3))
    request = bench.submit(prompt(3))
    assert bench.ask(request, 0) == (3 * CHUNK_TOKENS, True)
    assert bench.push("invalidate", keys[2:]) == b"1"
    assert bench.ask(request, 0) == (2 * CHUNK_TOKENS, True)
    assert bench.push("has", keys) == b"\1\1\0"
    answer = bench.ask(request, 0)
    bench.push("invalidate", keys)  # between the answer and the blocks
    request.block_ids = bench.gpu.take((), 4) or []
    blocks = SimpleNamespace(get_block_ids=lambda: (list(request.block_ids),))
    slots = {key: entry.slot for key in keys if (entry := bench.sched.index.peek(key)) is not None}
    bench.sched.update_state_after_alloc(request, blocks, answer[0] or 0)
    bench._expect_load(request, 0, answer[0] or 0, slots)
    request.num_computed, request.status = 2 * CHUNK_TOKENS, "loading"
    assert [len(job.pieces) for job in bench.step().loads] == [2]
    bench.check()
    settle(bench)


def test_a_reset_with_copies_under_way(bench: Bench) -> None:
    warm(bench, prompt(2))
    store(bench, prompt(3, family=1))
    loading, fetching = bench.submit(prompt(2)), bench.submit(prompt(3, family=1))
    computing = bench.submit(prompt(2, family=2), max_outputs=5)
    bench.step()
    lanes = bench.client.outstanding()
    bench.answer(lanes[-1])
    bench.answer(lanes[-1])
    bench.step()
    assert (loading.status, fetching.status, computing.status) == ("loading", "waiting", "running")
    assert bench.pending_stores
    bench.reset()
    bench.check()
    assert bench.ask(fetching, 0) == (0, False)
    assert not bench.sched.prefetch.plans
    sent = bench.client.num_commands("store")
    settle(bench)
    assert bench.client.num_commands("store") == sent
    new = bench.submit(prompt(2, family=3))
    assert bench.ask(new, 0) == (0, False)
    settle(bench)
    assert bench.client.num_commands("store") == sent, "what is computed after a reset stays on this host"
    bench.gpu.reset()
    again = bench.submit(prompt(2, family=3))
    assert bench.ask(again, 0) == (2 * CHUNK_TOKENS, True)


def test_what_is_in_the_host_pool_is_not_stored_again(bench: Bench) -> None:
    warm(bench, prompt(2))
    request = bench.submit(prompt(2), max_outputs=5)
    request.skip_reading_prefix_cache = True
    assert bench.step().stores == []
    assert request.status == "running"


def test_a_chunk_with_the_null_block_is_not_stored(bench: Bench) -> None:
    request = bench.submit(prompt(2))
    bench.answer_all()
    output = SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=request.request_id, num_computed_tokens=0, block_ids=([0, 1, 2, 3],))
        ],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[]),
        num_scheduled_tokens={request.request_id: 2 * CHUNK_TOKENS},
        preempted_req_ids=set(),
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda req_id: ([0, 1, 2, 3],)),
    )
    (job,) = bench.sched.build_connector_meta(output).stores
    assert job.piece.block_ids == (2, 3)
    report = scheduler_bench.TierKVWorkerMetadata(stored={job.job_id: 1}, failed_stores={job.job_id})
    bench.sched.update_connector_output(set(), report)
    assert len(bench.sched.index) == 0


def test_blocks_that_are_given_out_again_are_fenced_while_copies_are_under_way(bench: Bench) -> None:
    request = bench.submit(prompt(2))
    bench.answer_all()
    assert len(bench.step().stores) == 2
    assert not bench.requests
    blocks = {block for job in bench.pending_stores for block in job.piece.block_ids}
    for block in list(bench.gpu.free):
        bench.gpu.free.move_to_end(block, last=block not in blocks)
    other = bench.submit(prompt(2, family=1))
    bench.answer_all()
    meta = bench.step()
    assert blocks <= set(meta.fence)
    settle(bench)
    assert request.num_computed and other.num_computed
    assert bench.step().fence == []


def test_the_queue_of_stores_is_bounded(bench: Bench) -> None:
    for family in range(4):
        bench.submit(prompt(2, family))
    for _ in range(6):
        bench.answer_all()
        bench.run_device()
        bench.step()
    assert sum(len(items) for items, _ in bench.client.stores) == 5
    assert bench.sched.counters["not_sent"] == 3
    assert bench.sched.stat().counters["store_queue_nbytes"] == 5 * PAYLOAD_NBYTES
    settle(bench)
    assert bench.sched.stat().counters["stored"] == 5


def test_stores_that_the_server_did_not_take_are_counted(bench: Bench) -> None:
    bench.submit(prompt(2))
    for _ in range(4):
        bench.answer_all()
        bench.run_device()
        bench.step()
    bench.client.disconnect()
    assert bench.sched.stat().counters["stores_lost"] == 2
    bench.submit(prompt(2, family=1))
    settle(bench)
    assert bench.sched.counters["not_sent"] == 2


def sent(bench: Bench, reason: int) -> list[bytes]:
    """Return the keys of all that was sent to the server for ``reason``."""
    stores = [command[1] for command in bench.client.log if command[0] == "store"]
    return [item.key for items in stores for item in items if item.reason == reason]


def test_a_second_use_is_told_once_and_what_the_server_wants_is_sent(bench: Bench) -> None:
    bench.client.spill = {"disk": "second-use", "shared": "never"}
    keys = warm(bench, prompt(3))
    bench.settle_stores()
    assert sent(bench, COMPUTED) == keys
    assert not bench.stored
    assert bench.sched.stat().counters["stores_declined"] == 3
    assert bench.client.num_commands("use") == 0
    for _ in range(3):
        bench.submit(prompt(3))
        settle(bench)
        bench.settle_stores()
    uses = [command[4] for command in bench.client.log if command[0] == "use"]
    assert uses == [tuple(keys)]
    assert sent(bench, USED) == keys
    assert set(bench.stored) == set(keys)


def test_with_on_evict_only_what_is_about_to_leave_the_pool_is_sent(bench: Bench) -> None:
    bench.client.spill = {"disk": "on-evict", "shared": "never"}
    first = warm(bench, prompt(2))
    assert sent(bench, COMPUTED) == sent(bench, EVICTED) == []
    for family in range(1, 15):
        warm(bench, prompt(2, family=family))
        for _ in range(3):
            bench.step()
            bench.settle_stores()
    assert not sent(bench, COMPUTED)
    gone = [key for key in bench.contents if bench.sched.index.get(key) is None]
    assert len(gone) >= 8 and set(gone) & set(first)
    assert set(gone) <= set(bench.stored), "all that left the pool was sent before, starts of prompts too"
    assert len(sent(bench, EVICTED)) <= len(gone) + 8, "what stays in the pool is not sent ahead of its time"


def test_stores_that_were_lost_with_their_server_are_sent_again(bench: Bench) -> None:
    keys = keys_of(prompt(3))
    bench.submit(prompt(3))
    for _ in range(4):
        bench.answer_all()
        bench.run_device()
        bench.step()
    assert sent(bench, COMPUTED) == keys
    bench.client.disconnect()
    bench.step()
    assert sent(bench, COMPUTED) == keys
    bench.client.up = True
    for _ in range(4):
        bench.step()
        bench.settle_stores()
    assert sent(bench, COMPUTED) == keys + keys
    assert set(bench.stored) == set(keys)


def test_what_was_computed_while_no_server_answered_is_sent_when_one_does(bench: Bench) -> None:
    bench.client.disconnect()
    keys = warm(bench, prompt(3))
    assert sent(bench, COMPUTED) == []
    bench.client.up = True
    for _ in range(4):
        bench.step()
        bench.settle_stores()
    assert set(bench.stored) == set(keys)


def test_commands_keep_within_an_anchor() -> None:
    count = ANCHOR_SPAN + 3
    with small_world(COMMAND_NBYTES=1 << 20, PLAN_NBYTES=1 << 20):
        bench = Bench(num_slots=3 * count, num_blocks=4 * count, token_budget=1024)
        keys = store(bench, prompt(count))
        request = bench.submit(prompt(count))
        settle(bench, 2)
        bench.check()
        sizes = [(command[2], len(command[4])) for command in bench.client.log if command[0] == "fetch"]
        assert sizes == [(0, ANCHOR_SPAN), (ANCHOR_SPAN, 3)]
        assert fetched(bench) == keys
        settle(bench)
        assert request.request_id not in bench.requests
        assert bench.sched.counters["disk_hits"] == count
        bench.close()


def test_requests_that_are_not_plain_prompts_are_left_alone(bench: Bench) -> None:
    warm(bench, prompt(2))
    pooling = bench.new_request(prompt(2))
    pooling.pooling_params = object()
    bench.add(pooling)
    unread = bench.new_request(prompt(2))
    unread.skip_reading_prefix_cache = True
    bench.add(unread)
    log = len(bench.client.log)
    assert bench.ask(pooling, 0) == bench.ask(unread, 0) == (0, False)
    assert len(bench.client.log) == log
    assert pooling.request_id not in bench.sched.requests


def test_tenants_do_not_see_each_other(bench: Bench) -> None:
    warm(bench, prompt(2))
    assert bench.ask(bench.submit(prompt(2)), 0)[0] == 2 * CHUNK_TOKENS
    other = bench.submit(prompt(2), salt="other")
    bench.answer_all()
    assert bench.ask(other, 0) == (0, False)


def test_without_an_identity_nothing_leaves_the_host(bench: Bench) -> None:
    found, bench.sched.membership.found = bench.sched.membership.found, None
    bench.sched.membership.identity = IDENTITY  # of this engine alone: any will do
    store(bench, prompt(2))
    request = bench.submit(prompt(2))
    assert bench.ask(request, 0) == (0, False)
    settle(bench)
    assert bench.client.log == []
    assert len(bench.sched.index) == 2
    bench.sched.membership.found = found
    assert not bench.sched.membership.shareable
    bench.submit(prompt(2, family=1))
    assert bench.sched.membership.shareable
    assert bench.client.num_commands("match") == 1


def test_unknown_requests_are_tolerated(bench: Bench) -> None:
    """With several connectors, each sees the others' requests."""
    stranger = Request("stranger", prompt(2))
    assert bench.sched.get_num_new_matched_tokens(stranger, 0) == (0, False)
    bench.sched.update_state_after_alloc(stranger, SimpleNamespace(get_block_ids=lambda: ([1],)), 0)
    bench.sched.update_connector_output({"stranger"}, scheduler_bench.TierKVWorkerMetadata(stored={77: 1}))
    bench.sched.request_finished(stranger)


def test_pushes_are_answered(bench: Bench) -> None:
    keys = warm(bench, prompt(2))
    assert bench.push("has", [keys[0], bytes(32), keys[1]]) == b"\1\0\1"
    assert bench.push("invalidate", [bytes(32)]) == b"0"
    assert len(scheduler_bench.scheduler_module.msgspec.msgpack.decode(bench.push("list"))) == 2
    assert b'"num_entries":2' in bench.push("stat")
    assert bench.sched._on_push("unheard of", b"") == b""


def test_a_plan_ends_in_the_states_of_the_table(bench: Bench) -> None:
    store(bench, prompt(2))
    request = bench.submit(prompt(2))
    plan = bench.state(request).plan
    assert plan is not None and plan.state is State.MATCHING
    bench.answer_all()
    bench.refuse_blocks = 1.0
    bench.step()
    assert plan.state is State.READY
    bench.refuse_blocks = 0.0
    bench.step()
    assert plan.state is State.LOADING
    bench.run_device()
    bench.step()
    assert plan.state is State.DONE


# -- what fetching costs


def measured(bench: Bench, compute_s: float, **fetch_s: float) -> None:
    """Let the engine have measured what computing a chunk takes, and fetching one, by the tier's letter."""
    costs = bench.sched.costs
    assert costs is not None
    for _ in range(NUM_NEEDED):
        costs.note_step(100 * CHUNK_TOKENS, 100 * compute_s)
        for letter, seconds in fetch_s.items():
            costs.note_fetch(letter.encode(), seconds)


def test_a_tier_that_is_slower_than_computing_is_not_fetched_from(bench: Bench) -> None:
    keys = store(bench, prompt(3))
    bench.stored.update(dict.fromkeys(keys, b"s"))
    measured(bench, 0.01, s=1.0)
    request = bench.submit(prompt(3))
    bench.step()
    assert not fetched(bench), "not even before it is known what is stored where"
    bench.answer_all()
    bench.step()
    assert not fetched(bench) and bench.sched.counters["cut"] == 3
    settle(bench)
    assert request.request_id not in bench.requests
    assert bench.sched.counters["missed"] == 3


def test_only_the_end_that_is_slow_is_computed(bench: Bench) -> None:
    keys = store(bench, prompt(3))
    bench.stored[keys[2]] = b"s"
    measured(bench, 0.01, d=0.001, s=1.0)
    request = bench.submit(prompt(3))
    bench.step()
    settle_plan(bench)
    assert fetched(bench) == keys[:2]
    assert bench.ask(request, 0) == (2 * CHUNK_TOKENS, True)
    assert bench.sched.counters["cut"] == 1


def settle_plan(bench: Bench) -> None:
    """Answer what is asked, and let the plans go on, without a load."""
    for _ in range(4):
        bench.answer_all()
        bench.sched._apply_replies()
        bench.sched.prefetch.advance(bench.sched._plan)


def test_the_speed_of_computing_is_that_of_steps_without_a_pause(bench: Bench) -> None:
    """Steps of 24 prompt tokens, 12 ms each; the pauses between requests do not count."""
    bench.token_budget = 24
    costs = bench.sched.costs = CostGate(CHUNK_TOKENS, PAYLOAD_NBYTES)
    bench.client.disconnect()
    for i in range(NUM_NEEDED):
        bench.submit([1000 * i + j for j in range(60)])
        for _ in range(6):
            bench.now += 0.012
            bench.step()
        bench.now += 100.0
    assert costs.chunk_s is None, "so short steps say nothing"
    bench.sched.costs = costs = CostGate(CHUNK_TOKENS, PAYLOAD_NBYTES)
    bench.token_budget = 64
    for i in range(2 * NUM_NEEDED):
        bench.submit([100_000 + 1000 * i + j for j in range(70)])
        for _ in range(4):
            bench.now += 0.032
            bench.step()
        bench.now += 100.0
    assert costs.chunk_s == pytest.approx(0.032 / 64 * CHUNK_TOKENS)


# -- loads that are part of their step


def test_a_small_load_is_part_of_its_step() -> None:
    with small_world():
        bench = Bench(sync_load_nbytes=3 * PAYLOAD_NBYTES)
        try:
            warm(bench, prompt(3))
            request = bench.submit(prompt(3))
            assert bench.ask(request, 0) == (3 * CHUNK_TOKENS, False)
            meta = bench.step()
            (job,) = meta.loads
            assert job.sync_id and request.status != "loading"
            settle(bench)
            assert bench.sched.counters["host_hits"] == 3
            bench.check_idle()
        finally:
            bench.close()


def test_a_small_claim_that_vllm_waits_for_is_reported() -> None:
    """A larger one that was cut: vLLM goes on with it as with what it was, and waits for a report."""
    with small_world():
        bench = Bench(sync_load_nbytes=2 * PAYLOAD_NBYTES)
        try:
            warm(bench, prompt(3))
            request = bench.submit(prompt(3))
            assert bench.ask(request, 0) == (3 * CHUNK_TOKENS, True)
            bench.cut_claims = 1.0
            bench.rng = SimpleNamespace(random=lambda: 0.5, randint=lambda a, b: 4)  # type: ignore[assignment]
            bench.step()
            ((job, _),) = bench.pending_loads
            assert not job.sync_id and len(job.pieces) == 2, "four blocks, of two chunks"
            bench.rng = Random(0)
            bench.cut_claims = 0.0
            settle(bench)
            bench.check_idle()
        finally:
            bench.close()
