"""A bench for the scheduler half: a small model of vLLM's scheduler, of a GPU and of the store server around it.

Everything that happens is an operation of :meth:`Bench.do`, chosen by a seeded generator, so that two benches with one
seed live through the same. The contents of blocks and slots are modelled byte for byte: a block's bytes follow from all
tokens up to its end, so a wrong block, a slot reused too early or a missing fence shows as wrong bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

from scheduler_parts import BLOCK_NBYTES, BLOCK_TOKENS, BlockPool, FakeClient, Request
from tierkv.config import EngineConfig
from tierkv.hostindex import Entry
from tierkv.keys import anchor_index, chain_keys, root_key
from tierkv.layout import LayerGroup, Layout
from tierkv.messages import COMPUTED
from tierkv.pool import HostPool, PoolShape, Segment
from tierkv.rendezvous import Offer
from tierkv_connector import handoff as handoff_module
from tierkv_connector import prefetch as prefetch_module
from tierkv_connector import scheduler as scheduler_module
from tierkv_connector import spill as spill_module
from tierkv_connector.metadata import LoadJob, StoreJob, TierKVMetadata, TierKVWorkerMetadata
from tierkv_connector.plan import TRANSITIONS, Plan, State
from tierkv_connector.scheduler import RequestState, Scheduler

BLOCKS_PER_CHUNK = 2
CHUNK_TOKENS = BLOCK_TOKENS * BLOCKS_PER_CHUNK
PAYLOAD_NBYTES = BLOCK_NBYTES * BLOCKS_PER_CHUNK
DEADLINE_S = 2.0
IDENTITY = bytes(range(32))
BUDGETS = {
    "MAX_PLANS": 3,
    "PLAN_NBYTES": 6 * PAYLOAD_NBYTES,
    "COMMAND_NBYTES": 2 * PAYLOAD_NBYTES,
    "STORE_NBYTES": 5 * PAYLOAD_NBYTES,
}

LAYOUT = Layout(
    LayerGroup("FullAttentionSpec", ("layer.0",), 1, 4, (BLOCK_NBYTES,), (1, BLOCK_TOKENS, 8), (0, 1, 2)),
    "uint8",
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    "FAKE",
    "vec",
)

#: Transitions that plans have made while :func:`small_world` was in force.
seen_transitions: set[tuple[State, State]] = set()


@contextlib.contextmanager
def small_world(**budgets: int) -> Iterator[None]:
    """Make budgets small, and watch every transition of every plan."""
    to = Plan.to

    def watched(plan: Plan, state: State) -> None:
        before = plan.state
        to(plan, state)
        if before is not state:
            assert state in TRANSITIONS[before]
            seen_transitions.add((before, state))

    with contextlib.ExitStack() as stack:
        for name, value in (BUDGETS | budgets).items():
            for module in (prefetch_module, spill_module, handoff_module):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, value))
        stack.enter_context(mock.patch.object(Plan, "to", watched))
        stack.enter_context(mock.patch.object(scheduler_module.logger, "disabled", True))
        yield


@dataclass
class Output:
    """What a step sends back: the requests that ran, and what the workers report."""

    ran: list[tuple[Request, int]]
    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    report: TierKVWorkerMetadata | None = None


class Bench:
    """One engine around one scheduler half.

    Args:
        seed: decides all that happens in :meth:`do`.
        num_slots, num_blocks: sizes of the host pool and of the GPU.
        extra_seed: ask more often than vLLM would: 1 to 20 times where the bench without it asks once.
        sync_load_nbytes: loads of at most so many bytes are part of the step that needs them.
        late_outputs: schedule a step before the last one's output is known (asynchronous scheduling).
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        num_slots: int = 12,
        num_blocks: int = 24,
        extra_seed: int | None = None,
        late_outputs: bool = False,
        token_budget: int = 24,
        sync_load_nbytes: int = 0,
    ) -> None:
        self.rng = Random(seed)
        self.extra = None if extra_seed is None else Random(extra_seed)
        self.now = 100.0
        self.late_outputs = late_outputs
        self.token_budget = token_budget
        shape = PoolShape(num_slots, 1, PAYLOAD_NBYTES)
        self.pool = HostPool(shape, [Segment.create(shape.segment_nbytes(0))])
        self.gpu = BlockPool(num_blocks)
        self.client = FakeClient()
        config = EngineConfig(
            shape.nbytes, "auto", Path("/none"), 1 << 30, None, CHUNK_TOKENS, DEADLINE_S,
            sync_load_bytes=sync_load_nbytes,
        )  # fmt: skip
        self.sched = Scheduler.__new__(Scheduler)
        self.sched._setup(config, Offer(shape, LAYOUT), self.pool, "bench", lambda: self.now)
        self.sched.membership.identity = bytes(32)
        self.sched.index._clock = lambda: self.now
        self.sched.membership.found = (IDENTITY, self.client)  # type: ignore[assignment]
        self.sched.bind_block_pool(self.gpu)
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preempted: set[str] = set()
        self.stored: dict[bytes, bytes] = {}  # what the store server has: key -> letter
        self.contents: dict[bytes, bytes] = {}  # key -> payload
        self.private: set[bytes] = set()  # keys of what was computed after a reset: nobody else may see it
        self.keys: dict[str, list[bytes]] = {}
        self.answers: list[tuple[str, int, Any]] = []
        self.meta = TierKVMetadata()
        self.pending_loads: list[tuple[LoadJob, float]] = []
        self.pending_stores: list[StoreJob] = []
        self.ended: list[tuple[LoadJob | StoreJob, bool]] = []
        self.outputs: deque[Output] = deque()
        self.expected_loads: dict[str, list[tuple[int, int, int]]] = {}
        self.loads_under_way: dict[str, tuple[set[bytes], float]] = {}
        self.refuse_blocks = 0.0
        self.cut_claims = 0.0
        self.split_reports = 0.3
        self.origins: dict[tuple[int, int], str] = {}  # (slot, generation) -> tier that its payload came from
        self.hits: Counter[str] = Counter()
        self.told: list[dict[str, Any]] = []  # what requests were answered about their hints
        self.num_claimed = self.num_loaded_chunks = self.num_none = self.num_sync_loads = 0
        self._num_added = 0
        self._num_checked = 0

    def close(self) -> None:
        self.pool.close()

    # -- operations

    WEIGHTS: dict[str, float] = {  # noqa: RUF012
        "step": 30,
        "add": 9,
        "reply": 40,
        "tick": 4,
        "device": 24,
        "store_reply": 6,
        "probe": 8,
        "abort": 2,
        "push": 3,
        "server_loses": 2,
        "disconnect": 0.7,
        "connect": 4,
        "late_write": 2,
        "end_leases": 2,
        "reset": 0.8,
        "gpu_forgets": 4,
    }

    def do(self) -> str:
        """Let one thing happen, and return its name."""
        (name,) = self.rng.choices(list(self.WEIGHTS), list(self.WEIGHTS.values()))
        getattr(self, f"op_{name}")()
        return name

    def op_step(self) -> None:
        self.refuse_blocks = self.rng.choice((0.0, 0.0, 0.3))
        self.cut_claims = self.rng.choice((0.0, 0.0, 0.3))
        self.step()

    def op_add(self) -> None:
        if len(self.requests) >= 9:
            return
        request = self.new_request(self.random_tokens(), self.rng.choice(("", "", "", "other")))
        request.skip_reading_prefix_cache = self.rng.random() < 0.04
        request.pooling_params = object() if self.rng.random() < 0.04 else None
        request.kv_transfer_params = self.random_params()
        self.let_await(request)
        keys = self.add(request)
        for key in keys[: self.rng.choice((0, 0, len(keys), len(keys), self.rng.randint(0, len(keys))))]:
            self.stored.setdefault(key, self.rng.choice((b"d", b"s")))

    def let_await(self, request: Request) -> None:
        """Let some requests await chunks that another engine has promised, of their own prompt or of another."""
        params, rng = request.kv_transfer_params, self.rng
        if not isinstance(params, dict) or not isinstance(params.get("tierkv"), dict) or rng.random() < 0.5:
            return
        root = root_key(IDENTITY, self.sched._epoch_nonce, (request.cache_salt or "").encode())
        keys = chain_keys(root, request.prompt_token_ids, CHUNK_TOKENS) or [bytes(32)]
        ns_id = rng.choice((self.sched.membership.ns_id, self.sched.membership.ns_id, bytes(16)))
        params["tierkv"]["handoff"] = {"namespace": ns_id.hex(), "last_key": rng.choice([*keys, IDENTITY]).hex()}

    def random_params(self) -> object:
        """Hints as applications send them: right, wrong, or none."""
        rng = self.rng
        if rng.random() < 0.5:
            return rng.choice((None, None, {}, {"other": 1}, {"tierkv": {}}, {"tierkv": "nonsense"}))
        possible: dict[str, tuple[object, ...]] = {
            "session": ("a", "b", "c", "", 7),
            "priority": (-9, -1, 0, 2, "high", True),
            "retain_s": (0.2, 5, 1e9, -1, float("nan"), "soon"),
            "release": (True, False, "yes"),
            "store": ("none", "prompt", "all", "all", "some", 3),
            "load": ([], ["host"], ["host", "disk"], ["shared"], "none", ["gpu"], "disk", [["host"]]),
            "prefetch": ("disk", "host", True, "gpu"),
            "handoff": (True, True, True, False, {}, "soon"),
            "sesion": ("a",),
        }
        return {"tierkv": {name: rng.choice(values) for name, values in possible.items() if rng.random() < 0.5}}

    def random_tokens(self) -> list[int]:
        rng = self.rng
        family, variant = rng.randrange(2), rng.randrange(3)
        fork = rng.randint(0, 6)
        length = rng.choice((1, 7, 8, 9, 16, 17, rng.randint(1, 60), rng.randint(24, 60), rng.randint(40, 60)))
        return [family if i < fork * CHUNK_TOKENS else 10 + variant for i in range(length)]

    def op_reply(self) -> None:
        if lanes := self.client.outstanding():
            self.answer(self.rng.choice(lanes), bad=self.rng.random() < 0.05)

    def op_tick(self) -> None:
        self.now += self.rng.choice((0.01, 0.1, 0.3, 1.0, 2.5))

    def op_device(self) -> None:
        if self.rng.random() < 0.5 and self.pending_stores:
            self.run_store(self.rng.choice(self.pending_stores), ok=self.rng.random() > 0.08)
        elif self.pending_loads:
            self.run_load(self.rng.choice(self.pending_loads)[0], ok=self.rng.random() > 0.1)

    def op_store_reply(self) -> None:
        if self.client.uses:
            self.answer_use(wanted=self.rng.random())
        if self.client.stores:
            self.answer_store()

    def op_probe(self) -> None:
        """Ask about a waiting request at a position that vLLM may or may not be at."""
        if self.waiting:
            request = self.rng.choice(list(self.waiting))
            position = self.rng.choice((0, self.rng.randint(0, request.num_tokens // BLOCK_TOKENS))) * BLOCK_TOKENS
            if request.status == "waiting" and not request.num_computed:
                self.ask(request, min(position, request.num_tokens - 1))

    def op_abort(self) -> None:
        alive = [r for r in self.requests.values() if r.status != "finished"]
        if alive:
            self.finish(self.rng.choice(alive))

    def op_push(self) -> None:
        """The store server asks or evicts, at any moment."""
        held = [e.key for e in self.sched.index.snapshot()]
        known = held if held and self.rng.random() < 0.7 else list(self.contents)
        if not known:
            return
        keys = self.rng.sample(known, min(len(known), self.rng.randint(1, 4)))
        what = self.rng.choice(("invalidate", "invalidate", "has", "list", "stat"))
        if what == "invalidate":
            for key in keys:
                if self.rng.random() < 0.5:
                    self.stored.pop(key, None)
        self.push(what, keys)
        self.op_probe()

    def op_server_loses(self) -> None:
        if self.stored:
            del self.stored[self.rng.choice(list(self.stored))]

    def op_disconnect(self) -> None:
        self.client.disconnect()

    def op_connect(self) -> None:
        self.client.up = True

    def op_late_write(self) -> None:
        """A server that is merely slow writes slots of a session that has ended."""
        for fetch in self.client.lost:
            for entry in fetch.entries:
                self.write(entry.slot, b"\xee" * PAYLOAD_NBYTES)

    def op_end_leases(self) -> None:
        self.client.end_leases()

    def op_reset(self) -> None:
        self.reset(running_too=self.rng.random() < 0.5, connector_too=self.rng.random() < 0.6)

    def op_gpu_forgets(self) -> None:
        """Other requests have used the free blocks of the GPU."""
        for block in list(self.gpu.free)[: self.rng.randint(1, 12)]:
            self.gpu.forget(block)

    # -- requests

    def new_request(self, tokens: list[int], salt: str = "", max_outputs: int | None = None) -> Request:
        self._num_added += 1
        outputs = self.rng.randint(1, 3) if max_outputs is None else max_outputs
        return Request(f"r{self._num_added}", tokens, salt, outputs)

    def add(self, request: Request) -> list[bytes]:
        """Add a request, and return the keys of its chunks."""
        request.epoch = self.sched._epoch
        root = root_key(IDENTITY, self.sched._epoch_nonce, (request.cache_salt or "").encode())
        request.root = root
        keys = chain_keys(root, request.prompt_token_ids, CHUNK_TOKENS)
        self._note_contents(request, keys)
        self.keys[request.request_id] = keys
        if request.epoch:
            self.private.update(keys)
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.sched.on_new_request(request)
        return keys

    def _note_contents(self, request: Request, keys: Sequence[bytes]) -> None:
        for i, key in enumerate(keys):
            blocks = request.block_hashes[i * BLOCKS_PER_CHUNK : (i + 1) * BLOCKS_PER_CHUNK]
            self.contents[key] = b"".join(blocks)

    def _generate(self, request: Request) -> None:
        """A token is sampled; it may complete a chunk."""
        request.tokens.append(1000 + request.num_tokens)
        keys = self.keys[request.request_id]
        if request.num_tokens % CHUNK_TOKENS == 0:
            keys += chain_keys(
                keys[-1] if keys else request.root, request.tokens[len(keys) * CHUNK_TOKENS :], CHUNK_TOKENS
            )
            self._note_contents(request, keys)
            if request.epoch:
                self.private.update(keys)

    def submit(self, tokens: list[int], salt: str = "", max_outputs: int = 1) -> Request:
        request = self.new_request(tokens, salt, max_outputs)
        self.add(request)
        return request

    def finish(self, request: Request) -> None:
        """The request ends by itself or is aborted, in whatever state."""
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        keeps_blocks = request.status == "loading" and not request.recved
        request.status = "finished"
        self._check_told(request, self.sched.request_finished(request))
        if not keeps_blocks:
            self._free(request)

    def _free(self, request: Request) -> None:
        self.gpu.give(request.block_ids)
        request.block_ids = []
        del self.requests[request.request_id]

    def _preempt(self, request: Request) -> None:
        self.gpu.give(request.block_ids)
        request.block_ids = []
        request.num_computed = 0
        request.num_preemptions += 1
        request.status = "waiting"
        self.waiting.appendleft(request)
        self.preempted.add(request.request_id)

    def reset(self, running_too: bool = False, connector_too: bool = True) -> None:
        """``reset_prefix_cache(reset_running_requests=running_too, reset_connector=connector_too)``."""
        if running_too and any(r.status == "loading" or r.num_computed for r in self.waiting):
            running_too = False  # vLLM refuses
        if running_too:
            while self.running:
                self._preempt(self.running.pop())
        self.gpu.reset()
        if connector_too:
            nonce = (self.sched._epoch + 1).to_bytes(16, "big")  # repeatable
            with mock.patch.object(secrets, "token_bytes", lambda count: nonce[:count]):
                self.sched.reset_cache()
            assert not len(self.sched.index)
            assert not self.sched.prefetch.plans and not self.sched.prefetch.unstarted

    # -- vLLM's scheduler

    def ask(self, request: Request, num_computed: int) -> tuple[int | None, bool]:
        times = 1 if self.extra is None else self.extra.randint(1, 20)
        answer = self.sched.get_num_new_matched_tokens(request, num_computed)
        for _ in range(times - 1):
            assert self.sched.get_num_new_matched_tokens(request, num_computed) == answer
        self.answers.append((request.request_id, num_computed, answer))
        self._check_answer(request, num_computed, answer)
        return answer

    def step(self) -> TierKVMetadata:
        """Schedule, run and (with late outputs, only for the step before) take the output."""
        output = self.schedule()
        self.outputs.append(output)
        while len(self.outputs) > int(self.late_outputs):
            self._take_output(self.outputs.popleft())
        return self.meta

    def schedule(self) -> Output:
        budget, scheduled, new_blocks = self.token_budget, {}, {}
        preempted_now = False
        for request in list(self.running):
            count = min(budget, request.num_tokens - request.num_computed)
            if request not in self.running or count <= 0:
                continue
            blocks = self._grow(request, request.num_computed + count)
            while blocks is None:
                victim = self.running.pop()
                scheduled.pop(victim, None)
                new_blocks.pop(victim, None)
                self._preempt(victim)
                preempted_now = True
                if victim is request:
                    break
                blocks = self._grow(request, request.num_computed + count)
            if blocks is not None:
                scheduled[request] = count
                new_blocks[request] = blocks
                budget -= count
        new: list[Request] = []
        resumed: list[Request] = []
        if not preempted_now:
            self._schedule_waiting(budget, scheduled, new_blocks, new, resumed)
        return self._run(scheduled, new_blocks, new, resumed)

    def _schedule_waiting(
        self, budget: int, scheduled: dict[Request, int], new_blocks: dict[Request, list[int]], new: Any, resumed: Any
    ) -> None:
        skipped: list[Request] = []
        while self.waiting and budget > 0 and len(self.running) < 4:
            request = self.waiting[0]
            if request.status == "loading":
                if not request.recved:
                    skipped.append(self.waiting.popleft())
                    continue
                self._load_is_in(request)
            ext, load, hits = 0, False, []
            if not request.num_computed:
                if not request.skip_reading_prefix_cache:
                    hits = self.gpu.run(request.block_hashes, (request.num_tokens - 1) // BLOCK_TOKENS)
                answer, load = self.ask(request, len(hits) * BLOCK_TOKENS)
                if answer is None:
                    skipped.append(self.waiting.popleft())
                    continue
                ext = answer
                if ext and self.rng.random() < self.cut_claims:
                    ext = self.rng.randint(0, ext // BLOCK_TOKENS) * BLOCK_TOKENS
                    load = load and ext > 0
                num_computed = len(hits) * BLOCK_TOKENS + ext
            else:
                num_computed = request.num_computed
            count = 0 if load else min(budget, request.num_tokens - num_computed)
            refused = self.rng.random() < self.refuse_blocks
            if refused or self._admit(request, hits, num_computed + count) is None:
                break
            slots = {k: e.slot for k in self.keys[request.request_id] if (e := self.sched.index.peek(k)) is not None}
            blocks = SimpleNamespace(get_block_ids=lambda r=request: (list(r.block_ids),))
            self.sched.update_state_after_alloc(request, blocks, ext)
            if ext:
                self._expect_load(request, len(hits), ext, slots, waits=load)
            if load:
                request.num_computed = num_computed
                request.status, request.recved, request.failed = "loading", False, False
                skipped.append(self.waiting.popleft())
                continue
            self.waiting.popleft()
            self.running.append(request)
            (resumed if request.num_preemptions else new).append(request)
            if request.begun is None:
                request.begun = num_computed
            request.status, request.num_computed = "running", num_computed
            scheduled[request], new_blocks[request] = count, list(request.block_ids)
            self._cache_blocks(request, num_computed + count)
            budget -= count
        self.waiting.extendleft(reversed(skipped))

    def _grow(self, request: Request, num_tokens: int) -> list[int] | None:
        wanted = -(-num_tokens // BLOCK_TOKENS) - len(request.block_ids)
        blocks = self.gpu.take((), max(0, wanted))
        if blocks is not None:
            request.block_ids += blocks
            self._cache_blocks(request, num_tokens)
        return blocks

    def _admit(self, request: Request, hits: list[int], num_tokens: int) -> list[int] | None:
        had = request.block_ids or hits
        blocks = self.gpu.take(hits, max(0, -(-num_tokens // BLOCK_TOKENS) - len(had)))
        if blocks is not None:
            request.block_ids = list(had) + blocks
        return blocks

    def _cache_blocks(self, request: Request, num_tokens: int) -> None:
        for i in range(min(num_tokens, request.num_tokens) // BLOCK_TOKENS):
            self.gpu.cache(request.block_ids[i], request.block_hashes[i])

    def _load_is_in(self, request: Request) -> None:
        request.status = "waiting"
        request.recved = False
        assert self.state(request).no_load == request.failed, "a failed load is remembered, another is not"
        if request.failed:
            request.num_computed = 0
            if request.begun is None:
                request.loaded.clear()
            self.gpu.give(request.block_ids)
            request.block_ids = []
            return
        self._cache_blocks(request, request.num_computed)
        for i in range(request.num_computed // BLOCK_TOKENS):
            block = request.block_ids[i]
            assert self.gpu.data[block] == request.block_hashes[i], "a load left a block with other bytes"

    def _run(
        self, scheduled: dict[Request, int], new_blocks: dict[Request, list[int]], new: Any, resumed: Any
    ) -> Output:
        ids = {r.request_id: r for r in scheduled}
        cached = [r for r in scheduled if r not in new]
        scheduler_output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=r.request_id, num_computed_tokens=r.num_computed, block_ids=(new_blocks[r],))
                for r in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[r.request_id for r in cached],
                num_computed_tokens=[r.num_computed for r in cached],
                new_block_ids=[(new_blocks[r],) if new_blocks[r] else None for r in cached],
            ),
            num_scheduled_tokens={r.request_id: n for r, n in scheduled.items()},
            preempted_req_ids=self.preempted,
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda i: (list(ids[i].block_ids),) if i in ids else None
            ),
        )
        self.meta = self.sched.build_connector_meta(scheduler_output)
        self.preempted = set()
        self._check_meta()
        for job in list(self.pending_stores):
            if not set(self.meta.fence).isdisjoint(job.piece.block_ids):
                self.run_store(job)
        for job in self.meta.loads:
            assert bool(job.sync_id) == (job.req_id in ids), "a load of another kind than vLLM took it for"
            if job.sync_id:
                self.run_load(job)
        for request, count in scheduled.items():
            self._compute(request, count)
        for request in scheduled:
            for i in range(request.num_computed // BLOCK_TOKENS):
                assert self.gpu.data[request.block_ids[i]] == request.block_hashes[i], "attention over other bytes"
        self.pending_stores += self.meta.stores
        self.pending_loads += [(job, self.now) for job in self.meta.loads if not job.sync_id]
        return self._collect([(r, r.num_preemptions) for r in scheduled])

    def _compute(self, request: Request, count: int) -> None:
        first = request.num_computed // BLOCK_TOKENS
        request.num_computed += count
        for i in range(first, -(-request.num_computed // BLOCK_TOKENS)):
            full = (i + 1) * BLOCK_TOKENS <= request.num_computed
            self.gpu.data[request.block_ids[i]] = request.block_hashes[i] if full else b"\xcc" * BLOCK_NBYTES

    def _collect(self, ran: list[tuple[Request, int]]) -> Output:
        output = Output(ran)
        report = TierKVWorkerMetadata()
        keep: list[tuple[LoadJob | StoreJob, bool]] = []
        for job, ok in self.ended:
            if isinstance(job, StoreJob):
                report.stored[job.job_id] = 1
                if not ok:
                    report.failed_stores.add(job.job_id)
                continue
            if job.sync_id:  # on a device its event may pass later
                if self.rng.random() < self.split_reports:
                    keep.append((job, ok))
                else:
                    report.loaded[job.sync_id] = 1
                continue
            if not ok:
                report.failed_loads.add(job.req_id)
                if self.rng.random() < self.split_reports:  # the load's end is reported a step later than its failure
                    keep.append((job, True))
                    self.requests[job.req_id].failed = True
                    continue
                output.failed.add(job.req_id)
            output.loaded.add(job.req_id)
        self.ended = keep
        output.report = None if report.empty else report
        return output

    def _take_output(self, output: Output) -> None:
        for req_id in output.failed:
            self.requests[req_id].failed = True
        for request, num_preemptions in output.ran:
            if request.status != "running" or request.num_preemptions != num_preemptions:
                continue
            if request.num_computed == request.num_tokens:
                self._generate(request)
                if request.num_tokens - len(request.prompt_token_ids) >= request.max_outputs:
                    self.finish(request)
        self.sched.update_connector_output(output.loaded, output.report)
        for req_id in output.loaded:
            self.loads_under_way.pop(req_id)
            request = self.requests[req_id]
            request.recved = True
            if request.status == "finished":
                self._free(request)

    # -- the device

    def run_store(self, job: StoreJob, ok: bool = True) -> None:
        self.pending_stores.remove(job)
        data = b"".join(self.gpu.data[b] for b in job.piece.block_ids) if ok else b"\xdd" * PAYLOAD_NBYTES
        self.write(job.piece.slot, data)
        self.ended.append((job, ok))

    def run_load(self, job: LoadJob, ok: bool = True) -> None:
        self.pending_loads = [item for item in self.pending_loads if item[0] is not job]
        for piece in job.pieces:
            cell = self.payload(piece.slot)
            for j, block in enumerate(piece.block_ids):
                at = (piece.first + j) * BLOCK_NBYTES
                self.gpu.data[block] = cell[at : at + BLOCK_NBYTES] if ok else b"\xaa" * BLOCK_NBYTES
        self.ended.append((job, ok))

    def run_device(self) -> None:
        for job in list(self.pending_stores):
            self.run_store(job)
        for job, _ in list(self.pending_loads):
            self.run_load(job)

    def payload(self, slot: int) -> bytes:
        return bytes(self.pool.parts(slot)[0])

    def write(self, slot: int, data: bytes) -> None:
        self.pool.parts(slot)[0][:] = data

    # -- the store server

    def answer(self, lane: int = -1, *, bad: bool = False, letters: bytes | None = None) -> None:
        """Answer the oldest command of a lane, by what the server has, or with ``letters``."""
        if lane < 0:
            lane = self.client.outstanding()[0]
        command = self.client.lanes[lane].popleft()
        if command.reply is not None:
            run = b""
            for key in command.keys:
                if key not in self.stored:
                    break
                run += self.stored[key]
            command.reply.letters = run if letters is None else letters
            return
        fetch = command.fetch
        assert fetch is not None
        if letters is None:
            letters = b"".join(self.stored.get(key, b"-") for key in command.keys)
            if bad:
                at = self.rng.randrange(len(letters))
                letters = letters[:at] + b"!" + letters[at + 1 :]
        for entry, letter in zip(fetch.entries, letters, strict=True):
            self.write(entry.slot, self.contents[entry.key] if letter in b"ds" else b"\xbb" * PAYLOAD_NBYTES)
            self.origins[entry.slot, entry.generation] = "disk" if letter == ord("d") else "shared"
        fetch.results = letters
        fetch.released = True

    def answer_all(self) -> None:
        while lanes := self.client.outstanding():
            self.answer(lanes[0])

    def answer_store(self) -> None:
        items, done = self.client.stores.popleft()
        letters = b""
        for item in items:
            if int(self.pool.generations[item.slot]) != item.generation:
                letters += b"g"
                continue
            assert self.payload(item.slot) == self.contents[item.key], "a chunk was sent with other bytes"
            if item.key not in self.stored and self.client.spill["disk"] == "second-use" and item.reason == COMPUTED:
                letters += b"n"
                continue
            letters += b"x" if item.key in self.stored else b"o"
            self.stored.setdefault(item.key, b"d")
        done(letters)

    def settle_stores(self) -> None:
        """Answer what was sent to be stored or told of, and take note of the answers."""
        while self.client.uses or self.client.stores:
            while self.client.uses:
                self.answer_use()
            while self.client.stores:
                self.answer_store()
            self.step()

    def answer_use(self, wanted: float = 1.0) -> None:
        keys, reply = self.client.uses.popleft()
        reply(b"".join(b"w" if key not in self.stored and self.rng.random() < wanted else b"." for key in keys))

    def push(self, what: str, keys: Sequence[bytes] = ()) -> bytes:
        answer = self.sched._on_push(what, b"".join(keys))
        assert answer, f"the push {what!r} is not known"
        return answer

    # -- what must be true

    def state(self, request: Request) -> RequestState:
        return self.sched.requests[request.request_id]

    def _check_answer(self, request: Request, num_computed: int, answer: tuple[int | None, bool]) -> None:
        sched, count = self.sched, answer[0]
        state = sched.requests.get(request.request_id)
        if state is not None and not state.tiers:
            assert answer == (0, False), "a claim for a request that may not load"
            return
        if state is None or state.no_load or request.skip_reading_prefix_cache or request.epoch != sched._epoch:
            assert answer == (0, False), "a claim for a request that may not have one"
            return
        keys = self.keys[request.request_id][: len(state.keys)]
        num_prompt_chunks = len(request.prompt_token_ids) // CHUNK_TOKENS
        assert state.keys == keys and len(keys) >= (0 if request.pooling_params else num_prompt_chunks)
        first = num_computed // CHUNK_TOKENS
        if count is None:
            assert answer == (None, False)
            self.num_none += 1
            plan = state.plan
            assert plan is not None
            by_plan = (
                sched.prefetch.plans.get(request.request_id) is plan
                and plan.state in (State.MATCHING, State.FETCHING)
                and self.now < plan.deadline <= self.now + DEADLINE_S
            )
            by_plan = by_plan or (
                request.request_id in sched.prefetch.unstarted and plan.queued and self.now < plan.deadline
            )
            by_load = any(
                keys[first] in loading and self.now < began + DEADLINE_S
                for req_id, (loading, began) in self.loads_under_way.items()
                if req_id != request.request_id
            )
            assert by_plan or by_load, "vLLM was told to wait for nothing"
            return
        num_chunks = -(-(num_computed + count) // CHUNK_TOKENS) - num_computed // CHUNK_TOKENS
        assert answer == (count, count > 0 and num_chunks * PAYLOAD_NBYTES > sched.loads.sync.sync_nbytes)
        stop = min(len(keys), (request.num_tokens - 1) // CHUNK_TOKENS)
        end = first
        while end < stop and self.usable(keys[end]):
            end += 1
        assert count == max(0, end * CHUNK_TOKENS - num_computed), "the answer is not what is in the host pool"
        assert num_computed + count <= max(num_computed, request.num_tokens - 1)
        self.num_claimed += count > 0

    def usable(self, key: bytes) -> bool:
        entry = self.sched.index.peek(key)
        if entry is None or key in self.sched.index.dropped or not entry.usable:
            return False
        assert self.payload(entry.slot) == self.contents[key], "a chunk is offered with other bytes"
        return True

    def _expect_load(
        self, request: Request, num_hits: int, ext: int, slots: dict[bytes, int], waits: bool = True
    ) -> None:
        keys = self.keys[request.request_id]
        assert request.epoch == self.sched._epoch
        expected = []
        for i in range(num_hits, num_hits + ext // BLOCK_TOKENS):
            key = keys[i // BLOCKS_PER_CHUNK]
            assert self.payload(slots[key]) == self.contents[key]
            expected.append((slots[key], i % BLOCKS_PER_CHUNK, request.block_ids[i]))
        assert request.request_id not in self.expected_loads
        self.expected_loads[request.request_id] = expected
        chunks = range(num_hits // BLOCKS_PER_CHUNK, -(-(num_hits + ext // BLOCK_TOKENS) // BLOCKS_PER_CHUNK))
        if waits:
            self.loads_under_way[request.request_id] = ({keys[i] for i in chunks}, self.now)
        else:
            self.num_sync_loads += 1
        self.num_loaded_chunks += len(chunks)
        for i in chunks:
            slot = slots[keys[i]]
            origin = self.origins.pop((slot, int(self.pool.generations[slot])), "host")
            self.hits[origin + "_hits"] += 1
            if request.begun is None:
                first = max(num_hits, i * BLOCKS_PER_CHUNK)
                stop = min(num_hits + ext // BLOCK_TOKENS, (i + 1) * BLOCKS_PER_CHUNK)
                source = origin if origin in self.state(request).tiers else "host"
                request.loaded[source] += (stop - first) * BLOCK_TOKENS

    def _check_meta(self) -> None:
        for job in self.meta.loads:
            got = [(p.slot, p.first + j, b) for p in job.pieces for j, b in enumerate(p.block_ids)]
            assert got == self.expected_loads.pop(job.req_id)
        assert not self.expected_loads, "a claimed load was not sent to the workers"
        for job in self.meta.stores:
            entry = self.sched.spill.copying[job.job_id]
            assert entry.state == Entry.FILLING, "a request that lived through a reset stores nothing"
            assert 0 not in job.piece.block_ids and job.piece.first == 0
            owners = [r.request_id for r in self.running if set(job.piece.block_ids) <= set(r.block_ids)]
            states = [self.sched.requests[req_id] for req_id in owners if req_id in self.sched.requests]
            assert any(state.store != "none" for state in states), "a request that stores nothing stores"

    def _check_told(self, request: Request, told: dict[str, Any] | None) -> None:
        """Check what a request is answered about its hints."""
        params = request.kv_transfer_params
        if request.pooling_params is not None or not (isinstance(params, dict) and "tierkv" in params):
            assert (told is None) == (not isinstance(params, dict) or "tierkv" not in params)
            return
        assert told is not None
        about = told["tierkv"]
        hits = about["hit_tokens"]
        assert set(hits) == {"gpu", "host", "disk", "shared"} and min(hits.values()) >= 0
        if request.begun is None:
            assert not any(hits.values())
        else:
            assert sum(hits.values()) == request.begun, (hits, request.begun)
            assert {tier: hits[tier] for tier in ("host", "disk", "shared") if hits[tier]} == +request.loaded
        assert about["prompt_tokens"] == len(request.prompt_token_ids)
        if promise := about.get("handoff"):
            last = promise["tokens"] // CHUNK_TOKENS - 1
            assert promise["last_key"] == self.keys[request.request_id][last].hex()
            assert promise["tokens"] <= len(request.prompt_token_ids) and not self.sched.epochs.name
        self.told.append(about)

    def check(self) -> None:
        """Check what must be true between any two calls."""
        sched, index = self.sched, self.sched.index
        plans = [s.plan for s in sched.requests.values() if s.plan is not None]
        owners: list[Entry] = [e for plan in plans for e in plan.leased]
        assert sched.prefetch.num_leased == len(owners)
        for state in sched.requests.values():
            owners += state.load or ()
        for entries in sched.loads.ended_early.values():
            owners += entries
        for _, entries in sched.loads.sync._under_way.values():
            owners += entries
        owners += [*sched.spill._saving, *sched.spill.handoffs.kept]
        writers = [e for f in sched.prefetch.fetching for e in f.entries] + list(sched.spill.copying.values())
        reachable = {id(e): e for e in (*index._entries.values(), *owners, *writers)}
        for entry in reachable.values():
            assert entry.num_pins == sum(e is entry for e in owners), "a pin without an owner"
            if entry.state == Entry.FILLING or entry.doomed:
                assert any(e is entry for e in writers), "a slot that waits for nobody's copy"
        held = [e.slot for e in index._entries.values()]
        quarantined = [e.slot for e in reachable.values() if e.state == Entry.GONE and (e.num_pins or e.doomed)]
        assert sorted(index._free + held + quarantined) == list(range(self.pool.shape.num_slots))
        assert index.num_quarantined == len(quarantined)
        for entry in index._entries.values():
            assert not entry.usable or self.payload(entry.slot) == self.contents[entry.key]

        started = {id(p) for p in plans if p.state in (State.MATCHING, State.FETCHING)}
        assert {id(p) for p in sched.prefetch.plans.values()} == started
        assert len(sched.prefetch.plans) <= prefetch_module.MAX_PLANS
        nbytes = sum(len(f.entries) for f in sched.prefetch.fetching) * PAYLOAD_NBYTES
        assert sched.prefetch.fetch_nbytes == nbytes <= max(prefetch_module.PLAN_NBYTES, PAYLOAD_NBYTES)
        queued = sum(len(items) for items, _ in self.client.stores) * PAYLOAD_NBYTES
        kept = len(sched.spill.handoffs.kept) * PAYLOAD_NBYTES
        assert queued <= sched.spill.queue.nbytes <= spill_module.STORE_NBYTES + kept
        for state in sched.requests.values():
            plan = state.plan
            if plan is None or state.tiers >= {"disk", "shared"}:
                continue
            if state.tiers <= {"host"}:
                assert plan.match is None and not plan.fetches, "a request asks a tier that it may not load from"
            elif plan.match is None or plan.match.letters is None:
                assert not plan.fetches and plan.next == plan.start
        for command in self.client.log[self._num_checked :]:
            self._check_command(*command)
        self._num_checked = len(self.client.log)
        loading = {key for keys, _ in self.loads_under_way.values() for key in keys}
        assert set(sched.loads.loading) <= loading
        assert all(until <= self.now + DEADLINE_S for until in sched.loads.loading.values())
        for name in ("disk_hits", "shared_hits", "host_hits"):
            assert sched.counters[name] == self.hits[name]
        for request in self.requests.values():
            if request.status in ("running", "loading"):
                assert request.request_id not in sched._waiting
                assert request.request_id not in sched.prefetch.unstarted
                if (state := sched.requests.get(request.request_id)) is not None:
                    assert state.plan is not None and not state.plan.leased
                    loading_now = request.status == "loading" and not request.recved
                    assert state.plan.state is (State.LOADING if loading_now else State.DONE)

    def _check_command(self, kind: str, *words: Any) -> None:
        most = max(1, prefetch_module.COMMAND_NBYTES // PAYLOAD_NBYTES)
        if kind == "store":
            keys = [item.key for item in words[0]]
            assert len(keys) <= most
        elif kind == "drop":
            return
        elif kind == "hold":
            keys = [*words[0], *words[1]]
            assert keys and set(words[0]).isdisjoint(words[1])
        elif kind == "turn":
            keys = [words[0].chain[i : i + 32] for i in range(0, len(words[0].chain), 32)]
        else:
            _, start, anchor, chunks = words
            keys = [chunk[0] if kind == "fetch" else chunk for chunk in chunks]
            assert kind != "fetch" or len(keys) <= most
            chains = [chain for chain in self.keys.values() if chain[start : start + len(keys)] == keys]
            assert chains and anchor == chains[0][anchor_index(start)]
        assert self.private.isdisjoint(keys), "the store server was told of what is to stay on this host"

    def dump(self) -> dict[str, Any]:
        """Return the state of every tier, what was sent and what was answered, as plain values."""
        return {
            "scheduler": self.sched.dump(),
            "sent": list(self.client.log),
            "outstanding": [[c.kind for c in queue] for queue in self.client.lanes],
            "stores": len(self.client.stores),
            "uses": len(self.client.uses),
            "stored": dict(self.stored),
            "pool": hashlib.sha256(self.pool.segments[0].data).digest(),
            "gpu": list(self.gpu.data),
            "answers": self.answers[-50:],
            "num_answers": len(self.answers),
            "waiting": [r.request_id for r in self.waiting],
            "running": [r.request_id for r in self.running],
        }

    def drain(self) -> None:
        """Let everything end: all requests abort, all replies come, all copies and leases are over."""
        for request in list(self.requests.values()):
            if request.status != "finished":
                self.finish(request)
        self.late_outputs = False
        rounds = 0
        while (
            rounds < 3
            or self.ended
            or self.client.stores
            or self.client.uses
            or self.sched.spill._saving
            or self.sched.spill.handoffs.kept
        ):
            rounds += 1
            assert rounds < 100, "there is no end of stores"
            self.answer_all()
            while self.client.uses:
                self.answer_use()
            while self.client.stores:
                self.answer_store()
            self.client.end_leases()
            self.run_device()
            self.step()
        assert not self.requests and not self.outputs
        self.sched.on_new_request(self.new_request([1]))

    def check_idle(self) -> None:
        """Check that nothing is held by anybody."""
        sched, index = self.sched, self.sched.index
        prefetch = sched.prefetch
        assert not (prefetch.plans or prefetch.unstarted or prefetch.fetching)
        assert not (sched.loads.loading or sched.spill.copying or sched.loads.jobs)
        assert not (sched.requests or sched._waiting or sched.loads.ended_early or sched.loads.failed)
        assert (prefetch.fetch_nbytes, prefetch.num_leased, sched.spill.queue.nbytes) == (0, 0, 0)
        assert index.num_quarantined == 0
        assert not index.dropped
        assert all(e.state == Entry.READY and not e.num_pins for e in index._entries.values())
        assert index.num_free + len(index) == self.pool.shape.num_slots
        assert not sched.has_pending_stores()
