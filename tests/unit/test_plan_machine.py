"""The plan's state machine against a reference model, in any order of vLLM's calls and the store server's replies.

The bench (:mod:`scheduler_bench`) plays vLLM, a GPU and the network, and checks after every rule who owns which pin,
slot and byte of the budgets. The reference here knows three things, and none of them from the scheduler half: which
call may take a plan from which state to which; what lies in the slots, from what was written there; and which loads are
under way, from what was claimed and what was reported.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from random import Random
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import scheduler_bench
from scheduler_bench import CHUNK_TOKENS, DEADLINE_S, IDENTITY, Bench, Output, Request, small_world
from tierkv.keys import chain_keys, root_key
from tierkv_connector.compat import KVConnectorTransferResults
from tierkv_connector.device import Done
from tierkv_connector.metadata import LoadJob, Piece, TierKVWorkerMetadata
from tierkv_connector.plan import TRANSITIONS, Plan, State
from tierkv_connector.scheduler import Scheduler
from tierkv_connector.worker import Worker

#: Which of vLLM's calls may take a plan from a state to another: what the words of :mod:`tierkv_connector.plan` mean.
CAUSES: dict[tuple[str, str], set[str]] = {
    ("READY", "MATCHING"): {"on_new_request", "build_connector_meta"},  # it starts, at once or when there is room
    ("MATCHING", "FETCHING"): {"build_connector_meta"},
    ("MATCHING", "READY"): {"build_connector_meta"},
    ("FETCHING", "READY"): {"build_connector_meta"},
    ("MATCHING", "LOADING"): {"update_state_after_alloc"},
    ("FETCHING", "LOADING"): {"update_state_after_alloc"},
    ("READY", "LOADING"): {"update_state_after_alloc"},
    ("DONE", "LOADING"): {"update_state_after_alloc"},
    ("LOADING", "DONE"): {"update_connector_output", "request_finished"},
    # Refused, aborted, reset, preempted, or planned again because its prefix left the GPU.
    ("MATCHING", "DONE"): {"update_state_after_alloc", "request_finished", "reset_cache", "build_connector_meta"},
    ("FETCHING", "DONE"): {"update_state_after_alloc", "request_finished", "reset_cache", "build_connector_meta"},
    ("READY", "DONE"): {"update_state_after_alloc", "request_finished", "reset_cache", "build_connector_meta"},
}
CALLS = {call for calls in CAUSES.values() for call in calls} | {"get_num_new_matched_tokens"}


class Reference:
    """What must be true of the scheduler half, from what went in and came out.

    Attributes:
        slots: the bytes that were written last into each slot; a reset of the cache changes the keys, not the bytes.
        dropped: chunks that an operator evicted, until they are written again.
        loading: loads that were claimed and not reported, by request.
        num_claims, num_jobs, num_reports: loads that were claimed, sent to the workers, reported by them.
        causes: the transitions that were made, and the calls that made them.
    """

    def __init__(self) -> None:
        self.slots: dict[int, bytes] = {}
        self.dropped: set[bytes] = set()
        self.loading: set[str] = set()
        self.num_claims = self.num_jobs = self.num_reports = 0
        self.causes: set[tuple[str, str, str]] = set()
        self._call = "nobody"

    def within(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``inner``, noting that it runs."""

        def call(sched: Scheduler, *args: Any) -> Any:
            before, self._call = self._call, name
            try:
                return inner(sched, *args)
            finally:
                self._call = before

        return call

    def transition(self, before: State, after: State) -> None:
        allowed = CAUSES.get((before.name, after.name), set())
        assert self._call in allowed, f"{self._call} took a plan from {before.name} to {after.name}"
        self.causes.add((before.name, after.name, self._call))

    def claimed(self, request: Request, num_tokens: int) -> None:
        if num_tokens:
            assert request.request_id not in self.loading, "a load was claimed while another was under way"
            self.loading.add(request.request_id)
            self.num_claims += 1

    def reported(self, req_ids: set[str]) -> None:
        assert req_ids <= self.loading, "a load was reported that nobody claimed, or twice"
        self.loading -= req_ids
        self.num_reports += len(req_ids)


class Modelled(Bench):
    """A bench that tells a reference what goes in and out."""

    def __init__(self, reference: Reference, **sizes: Any) -> None:
        self.reference = reference
        super().__init__(**sizes)

    def write(self, slot: int, data: bytes) -> None:
        super().write(slot, data)
        self.reference.slots[slot] = data
        self.reference.dropped -= {key for key in self.reference.dropped if self.contents[key] == data}

    def push(self, what: str, keys: Any = ()) -> bytes:
        answer = super().push(what, keys)
        if what == "invalidate":
            self.reference.dropped |= set(keys) & set(self.contents)
        return answer

    def _check_answer(self, request: Request, num_computed: int, answer: tuple[int | None, bool]) -> None:
        super()._check_answer(request, num_computed, answer)
        if answer[0]:
            first, end = num_computed // CHUNK_TOKENS, -(-(num_computed + answer[0]) // CHUNK_TOKENS)
            for key in self.keys[request.request_id][first:end]:
                assert self.contents[key] in self.reference.slots.values(), "a claim of what nobody has brought"
                assert key not in self.reference.dropped, "a claim of what an operator evicted"

    def _run(self, *args: Any) -> Output:
        output = super()._run(*args)
        self.reference.num_jobs += len(self.meta.loads)
        assert {job.req_id for job in self.meta.loads} <= self.reference.loading, "a load that nobody claimed"
        return output

    def _take_output(self, output: Output) -> None:
        self.reference.reported(set(output.loaded))
        super()._take_output(output)


tokens = st.builds(
    lambda family, fork, variant, length: [family if i < fork * CHUNK_TOKENS else 10 + variant for i in range(length)],
    st.integers(0, 1),
    st.integers(0, 6),
    st.integers(0, 2),
    st.sampled_from([1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 3 * CHUNK_TOKENS, 4 * CHUNK_TOKENS + 3, 7 * CHUNK_TOKENS - 1]),
)
HINTS: list[object] = [
    None,
    None,
    {"tierkv": {"load": ["host"]}},
    {"tierkv": {"load": ["host", "disk"]}},
    {"tierkv": {"load": [], "store": "none"}},
    {"tierkv": {"store": "all", "session": "a", "retain_s": 5}},
]


class PlanMachine(RuleBasedStateMachine):
    """Lives of an engine, chosen by hypothesis."""

    #: Over all lives: transitions with their calls, and what happened how often.
    causes: set[tuple[str, str, str]] = set()  # noqa: RUF012
    totals: Counter[str] = Counter()  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.reference = Reference()
        self.bench: Any = None

    @initialize(num_slots=st.sampled_from([5, 12]), num_blocks=st.sampled_from([24, 40]), late=st.booleans())
    def begin(self, num_slots: int, num_blocks: int, late: bool) -> None:
        self.stack.enter_context(small_world())
        watched, reference = Plan.to, self.reference

        def to(plan: Plan, state: State) -> None:
            before = plan.state
            watched(plan, state)
            if before is not state:
                reference.transition(before, state)

        self.stack.enter_context(mock.patch.object(Plan, "to", to))
        for name in CALLS:
            inner = getattr(Scheduler, name)
            if name == "update_state_after_alloc":
                inner = self._claiming(inner)
            self.stack.enter_context(mock.patch.object(Scheduler, name, reference.within(name, inner)))
        self.bench = Modelled(reference, num_slots=num_slots, num_blocks=num_blocks, late_outputs=late)

    def _claiming(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(sched: Scheduler, request: Request, blocks: Any, num_tokens: int) -> None:
            self.reference.claimed(request, num_tokens)
            inner(sched, request, blocks, num_tokens)

        return call

    # -- vLLM

    @precondition(lambda self: len(self.bench.requests) < 7)
    @rule(tokens=tokens)
    def add_what_is_stored(self, tokens: list[int]) -> None:
        self.add(tokens, "", None, 1, 1, 9, b"d")

    @precondition(lambda self: len(self.bench.requests) < 7)
    @rule(
        tokens=tokens,
        salt=st.sampled_from(["", "", "other"]),
        hints=st.sampled_from(HINTS),
        skip=st.integers(0, 15),
        num_outputs=st.integers(1, 3),
        num_stored=st.integers(0, 7),
        letter=st.sampled_from([b"d", b"s"]),
    )
    def add(
        self, tokens: list[int], salt: str, hints: object, skip: int, num_outputs: int, num_stored: int, letter: bytes
    ) -> None:
        request = self.bench.new_request(list(tokens), salt, num_outputs)
        request.kv_transfer_params = hints
        request.skip_reading_prefix_cache = not skip
        for key in self.bench.add(request)[:num_stored]:
            self.bench.stored.setdefault(key, letter)

    @rule(refuse=st.integers(0, 3), cut=st.sampled_from([0.0, 0.0, 0.5, 1.0]), seed=st.integers(0, 15))
    def step(self, refuse: int, cut: float, seed: int) -> None:
        """Schedule, with blocks refused and claims trimmed or zeroed, run what is scheduled, take an output."""
        self.bench.rng.seed(seed)
        self.bench.refuse_blocks = float(refuse == 3)
        self.bench.cut_claims = cut
        self.bench.step()
        self.bench.refuse_blocks = self.bench.cut_claims = 0.0

    @rule(
        count=st.integers(1, 4),
        device=st.booleans(),
        answers=st.booleans(),
        stores=st.booleans(),
        seed=st.integers(0, 3),
    )
    def go_on(self, count: int, device: bool, answers: bool, stores: bool, seed: int) -> None:
        """Some steps in which everything goes well, or one part stands still."""
        for _ in range(count):
            self.step(0, 0.0, seed)
            if answers:
                self.bench.answer_all()
            if device:
                self.bench.run_device()
            if stores:
                self.store_replies(1.0)
            self.bench.check()

    @precondition(lambda self: self.bench.requests)
    @rule(times=st.integers(1, 20), at=st.integers(0, 60), data=st.data())
    def ask(self, times: int, at: int, data: st.DataObject) -> None:
        """Ask any number of times, at any position, about anybody: nothing changes, and the answer stays."""
        before = self.bench.dump()
        request = data.draw(st.sampled_from(list(self.bench.requests.values())))
        position = min(at, request.num_tokens - 1)
        answers = {self.bench.sched.get_num_new_matched_tokens(request, position) for _ in range(times)}
        assert len(answers) == 1, "the answer changed although nothing had happened"
        assert self.bench.dump() == before, "a question changed something"
        if request.status == "waiting" and not request.num_computed and position % scheduler_bench.BLOCK_TOKENS == 0:
            self.bench._check_answer(request, position, answers.pop())

    @precondition(lambda self: any(r.status != "finished" for r in self.bench.requests.values()))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        alive = [r for r in self.bench.requests.values() if r.status != "finished"]
        self.bench.finish(data.draw(st.sampled_from(alive)))

    @precondition(lambda self: self.bench.running)
    @rule()
    def preempt(self) -> None:
        self.bench._preempt(self.bench.running.pop())

    @rule(running_too=st.booleans(), connector_too=st.sampled_from([False, False, False, True]))
    def reset(self, running_too: bool, connector_too: bool) -> None:
        """Rarely the connector too: what is computed after that is for this engine alone, and asks nobody."""
        self.bench.reset(running_too, connector_too and self.bench.num_loaded_chunks > 2)

    @rule(count=st.integers(1, 12))
    def gpu_forgets(self, count: int) -> None:
        for block in list(self.bench.gpu.free)[:count]:
            self.bench.gpu.forget(block)

    @rule()
    def calls_about_others(self) -> None:
        """Under MultiConnector a connector hears of requests that it does not know."""
        stranger = Request("stranger", [1] * 20)
        sched = self.bench.sched
        assert sched.get_num_new_matched_tokens(stranger, 0) == (0, False)
        sched.update_connector_output({"stranger"}, None)
        assert sched.request_finished(stranger) is None

    # -- the workers

    @precondition(lambda self: self.bench.pending_stores)
    @rule(ok=st.booleans(), data=st.data())
    def copy_ends(self, ok: bool, data: st.DataObject) -> None:
        self.bench.run_store(self.bench.pending_stores[_pick(data, self.bench.pending_stores)], ok=ok)

    @precondition(lambda self: self.bench.pending_loads)
    @rule(ok=st.booleans(), data=st.data())
    def load_ends(self, ok: bool, data: st.DataObject) -> None:
        job: LoadJob = self.bench.pending_loads[_pick(data, self.bench.pending_loads)][0]
        self.bench.run_load(job, ok=ok)
        self.totals["failed loads"] += not ok

    # -- the store server and the network

    @precondition(lambda self: self.bench.client.outstanding())
    @rule(data=st.data(), bad=st.booleans())
    def reply(self, data: st.DataObject, bad: bool) -> None:
        lanes = self.bench.client.outstanding()
        self.bench.answer(lanes[_pick(data, lanes)], bad=bad and bool(data.draw(st.integers(0, 3)) == 0))

    @rule()
    def replies(self) -> None:
        self.bench.answer_all()

    @rule(wanted=st.sampled_from([0.0, 1.0]))
    def store_replies(self, wanted: float) -> None:
        if self.bench.client.uses:
            self.bench.answer_use(wanted)
        if self.bench.client.stores:
            self.bench.answer_store()

    @rule(data=st.data(), server_too=st.booleans())
    def evict(self, data: st.DataObject, server_too: bool) -> None:
        """An operator evicts chunks: the push may come at any moment, also while they are on their way."""
        if not self.bench.contents:
            return
        keys = sorted(self.bench.contents)
        doomed = list({keys[_pick(data, keys)] for _ in range(3)})
        for key in doomed if server_too else ():
            self.bench.stored.pop(key, None)
        self.bench.push("invalidate", doomed)

    @rule(data=st.data())
    def server_loses(self, data: st.DataObject) -> None:
        if self.bench.stored:
            keys = sorted(self.bench.stored)
            del self.bench.stored[keys[_pick(data, keys)]]

    @precondition(lambda self: self.bench.client.up)
    @rule()
    def server_is_lost(self) -> None:
        """Every reply that is due never comes; slots stay leased."""
        self.totals["lost fetches"] += sum(c.fetch is not None for lane in self.bench.client.lanes for c in lane)
        self.bench.client.disconnect()

    @precondition(lambda self: not self.bench.client.up)
    @rule()
    def server_is_back(self) -> None:
        self.bench.client.up = True

    @precondition(lambda self: self.bench.client.lost)
    @rule()
    def late_write(self) -> None:
        self.bench.op_late_write()
        self.totals["late writes"] += 1

    @precondition(lambda self: self.bench.client.lost)
    @rule()
    def leases_end(self) -> None:
        self.bench.client.end_leases()

    @rule(seconds=st.sampled_from([0.01, 0.5, DEADLINE_S / 2, DEADLINE_S]))
    def time_passes(self, seconds: float) -> None:
        self.bench.now += seconds

    # -- what must be true

    @invariant()
    def holds(self) -> None:
        if self.bench is None:
            return
        self.bench.check()
        for req_id in self.reference.loading:
            state = self.bench.sched.requests.get(req_id)
            assert state is None or state.load is not None, "a load under way holds no pins"

    def teardown(self) -> None:
        try:
            if self.bench is not None:
                self.bench.drain()
                self.bench.check()
                self.bench.check_idle()
                reference = self.reference
                assert not reference.loading
                assert reference.num_claims == reference.num_jobs == reference.num_reports
                self.causes.update(reference.causes)
                self.totals["loads"] += reference.num_claims
                self.totals["waits"] += self.bench.num_none
        finally:
            if self.bench is not None:
                self.bench.close()
            self.stack.close()


def _pick(data: st.DataObject, values: Any) -> int:
    return data.draw(st.integers(0, len(values) - 1))


def test_the_machine_and_the_reference_agree() -> None:
    PlanMachine.causes.clear()
    PlanMachine.totals.clear()
    how = settings(
        max_examples=500,
        stateful_step_count=80,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        # Whoever only wants to know whether it fails (scripts/test-mutations) need not have the shortest failure.
        phases=[
            p for p in Phase if p not in (Phase.shrink, Phase.explain) or not os.environ.get("TIERKV_NO_SHRINKING")
        ],
    )
    PlanMachine.TestCase.settings = how
    PlanMachine.TestCase("runTest").runTest()  # type: ignore[attr-defined]
    made = {(before, after) for before, after, _ in PlanMachine.causes}
    assert made <= {(a.name, b.name) for a, then in TRANSITIONS.items() for b in then} == set(CAUSES)
    totals = PlanMachine.totals
    assert totals["loads"] > 20 and totals["waits"] > 20 and totals["failed loads"] > 0, totals
    assert totals["lost fetches"] > 5 and totals["late writes"] > 5, totals
    assert len(made) >= len(CAUSES) - 2, f"too few of the table's transitions were made: {sorted(made)}"


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


def prompt(num_chunks: int, family: int = 0) -> list[int]:
    return [100 * family + i % 97 for i in range(num_chunks * CHUNK_TOKENS + 1)]


def keys_of(tokens: list[int]) -> list[bytes]:
    return chain_keys(root_key(IDENTITY), tokens, CHUNK_TOKENS)


def fetched(bench: Bench) -> list[bytes]:
    return [key for command in bench.client.log if command[0] == "fetch" for key, _, _ in command[4]]


def test_what_follows_a_chunk_that_anothers_fetch_did_not_bring_is_not_waited_for(bench: Bench) -> None:
    keys = keys_of(prompt(6))
    bench.stored.update(dict.fromkeys(keys, b"d"))
    first = bench.submit(prompt(2))  # its fetch brings the first two chunks
    second = bench.submit(prompt(6))
    assert fetched(bench)[:2] == keys[:2]
    lanes = [command[1] for command in bench.client.log if command[0] == "match"]
    bench.answer(lanes[1])
    bench.refuse_blocks = 1.0
    bench.step()  # the second has passed over what the first fetches, and asked for what follows
    assert keys[2] in fetched(bench)
    bench.answer(lanes[0])
    bench.answer(lanes[0], letters=b"d-")
    bench.step()
    assert bench.client.outstanding() == [lanes[1]]  # nothing of the second's own has come
    assert bench.ask(second, 0) == (CHUNK_TOKENS, True)
    num_fetched = len(fetched(bench))
    bench.answer(lanes[1])
    bench.step()
    assert len(fetched(bench)) == num_fetched, "what follows the hole is still fetched"
    bench.refuse_blocks = 0.0
    assert bench.ask(first, 0) == (CHUNK_TOKENS, True)


def on_gpu(bench: Bench, tokens: list[int]) -> list[bytes]:
    """Have a prompt's chunks on the GPU and in the store server only, and return their keys."""
    bench.submit(tokens)
    for _ in range(12):
        bench.answer_all()
        bench.run_device()
        bench.step()
    assert not bench.requests
    bench.sched.index.clear()
    bench.client.log.clear()
    bench._num_checked = 0
    keys = keys_of(tokens)
    bench.stored.update(dict.fromkeys(keys, b"d"))
    return keys


@pytest.mark.parametrize("answered", [False, True])
def test_a_prefix_that_leaves_the_gpu_while_its_plan_is_under_way_is_planned_again(
    bench: Bench, answered: bool
) -> None:
    on_gpu(bench, prompt(2))
    keys = keys_of(prompt(5))
    bench.stored.update(dict.fromkeys(keys, b"d"))
    bench.refuse_blocks = 1.0
    request = bench.submit(prompt(5))
    before = bench.state(request).plan
    assert before is not None and before.gpu_run == before.start == 2
    if answered:
        bench.answer()
        bench.step()
    bench.now += 0.5
    bench.gpu.reset()
    bench.step()
    plan = bench.state(request).plan
    assert plan is not None and plan is not before and (plan.gpu_run, plan.start) == (0, 0)
    assert plan.deadline == before.deadline, "a plan that is made again waits no longer than the one before"
    assert bench.ask(request, 0) == (None, False)
    for _ in range(4):
        bench.answer_all()
        bench.step()
    assert sorted(fetched(bench)) == sorted(keys), "each chunk is fetched once"
    assert bench.ask(request, 0) == (5 * CHUNK_TOKENS, True)
    assert bench.sched.counters["replans"] == 1
    bench.refuse_blocks = 0.0


def test_the_table_and_its_causes_name_the_same_transitions() -> None:
    assert set(CAUSES) == {(a.name, b.name) for a, then in TRANSITIONS.items() for b in then}


class FakeDevice:
    """Copies end when the test says so, in any order, well or not."""

    def __init__(self) -> None:
        self.done: list[Done] = []

    def finished(self) -> list[Done]:
        done, self.done = self.done, []
        return done


def test_each_load_is_reported_once() -> None:
    """By the workers, whatever ends when, and however often they are asked."""
    rng = Random(1)
    worker, device = Worker.__new__(Worker), FakeDevice()
    worker._device, worker._report, worker._groups = device, TierKVWorkerMetadata(), [None]  # type: ignore[assignment]
    worker._loaded, worker._failed, worker._bad_blocks = set(), set(), set()
    worker._refused, worker._num_copies = [], 0
    under_way = [LoadJob(f"r{i}", (Piece(i, 0, (2 * i, 2 * i + 1)),)) for i in range(200)]
    failed = {job.req_id for job in under_way if rng.random() < 0.3}
    reported: Counter[str] = Counter()
    reported_failed: Counter[str] = Counter()
    rng.shuffle(under_way)
    while under_way:
        for _ in range(rng.randrange(4)):
            if under_way:
                job = under_way.pop()
                device.done.append(Done(job, job.req_id not in failed, 64, 0.001))
        reported.update(worker.take_loaded())
        report = worker.take_report()
        reported_failed.update(report.failed_loads if report else ())
    for _ in range(2):
        reported.update(worker.take_loaded())
    assert reported == Counter({f"r{i}": 1 for i in range(200)})
    assert reported_failed == Counter(dict.fromkeys(failed, 1))
    assert worker.take_failed() == failed
    blocks = {b for r in failed for b in (2 * int(r[1:]), 2 * int(r[1:]) + 1)}
    told_by_request = KVConnectorTransferResults is not None
    assert worker.take_bad_blocks() == (set() if told_by_request else blocks)
