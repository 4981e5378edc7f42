"""The scheduler half: plans prefetches, answers vLLM from the host index, plans loads.

Runs on vLLM's scheduler thread and does no I/O on it: commands are queued for the store client's thread.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from tierkv import __version__
from tierkv.asked import AskedLog
from tierkv.chains import ChainMemo
from tierkv.client import StoreClient
from tierkv.config import EngineConfig
from tierkv.errors import ConfigError
from tierkv.hostindex import HostIndex
from tierkv.identity import FileHashes
from tierkv.keys import root_key, tenant_digest
from tierkv.messages import HostEntry, HostStat
from tierkv.policy import DEFAULT_POLICY, WEIGHS_ABOVE, make_policy
from tierkv.pool import HostPool
from tierkv.rendezvous import Offer, get_pool
from tierkv_connector.adapters import Adapters
from tierkv_connector.asked import note_asked
from tierkv_connector.compat import GpuCache, is_plain_prompt, new_blocks, pools_behind_prefixes, scheduled
from tierkv_connector.costs import CostGate
from tierkv_connector.epochs import Epochs
from tierkv_connector.extras import Content, Contents
from tierkv_connector.handoff import take_up
from tierkv_connector.hints import HintReader, Outcome
from tierkv_connector.loads import Loads
from tierkv_connector.membership import Membership
from tierkv_connector.metadata import LoadJob, TierKVMetadata, TierKVWorkerMetadata
from tierkv_connector.model import hashes_path, item_settings, lora_settings
from tierkv_connector.plan import Plan, State
from tierkv_connector.prefetch import Prefetcher
from tierkv_connector.recurrent import States
from tierkv_connector.requests import RequestState
from tierkv_connector.retention import Retention
from tierkv_connector.roles import Role
from tierkv_connector.spill import Spiller
from tierkv_connector.syncload import SyncLoads

logger = logging.getLogger("tierkv")

#: Waiting requests whose GPU prefix is looked at again in one step.
_REPLAN_CHECKS = 16


class Scheduler:
    """The engine's one scheduler half.

    Args:
        config: the engine's configuration.
        vllm_config, kv_cache_config: vLLM's.
        clock: monotonic seconds.

    Raises:
        ConfigError: the store server refuses this engine or cannot run as configured.
    """

    def __init__(
        self,
        config: EngineConfig,
        vllm_config: Any,
        kv_cache_config: Any,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        engine_id = vllm_config.kv_transfer_config.engine_id
        offer, fds = get_pool(engine_id)
        pool = HostPool.from_fds(offer.shape, fds)
        kv_role = vllm_config.kv_transfer_config.kv_role
        self._setup(config, offer, pool, engine_id, clock, lora_settings(vllm_config), kv_role)
        self.contents = Contents(self.layout.chunk_tokens, item_settings(vllm_config))
        self.hash_tokens = getattr(kv_cache_config, "hash_block_size", None) or offer.layout.block_tokens
        self._pools = pools_behind_prefixes(vllm_config)
        logger.info("TierKV %s: %s%s", __version__, config.describe(), self.role.describe())
        try:
            self.membership.start(vllm_config)
        except ConfigError:
            self.close()
            raise

    def _setup(
        self,
        config: EngineConfig,
        offer: Offer,
        pool: HostPool,
        engine_id: str,
        clock: Any,
        adapter_settings: Mapping[str, Any] = {},
        kv_role: str = "kv_both",
    ) -> None:
        self.config = config
        self.role = Role.of(kv_role, config.decode_blocks)
        self.layout = offer.layout
        self._chains = ChainMemo(offer.layout.chunk_tokens)
        self.pool = pool
        self.index = HostIndex(pool, make_policy(config.policy.get("host", DEFAULT_POLICY)))
        self.counters: Counter[str] = Counter()
        self.costs = CostGate(self.layout.chunk_tokens, pool.shape.payload_nbytes) if config.cost_gate else None
        self.asked = AskedLog(self.counters)
        self.requests: dict[str, RequestState] = {}
        self._engine_id = engine_id
        self._last_step: tuple[int, float, frozenset[str]] = 0, 0.0, frozenset()  # prompt tokens, when, whose
        self._clock = clock
        self._gpu = GpuCache(None, offer.layout, offer.layout.block_tokens)
        self.hash_tokens = offer.layout.block_tokens
        self.membership = Membership(
            config, engine_id, offer.layout, offer.namespace_shard, pool, self._on_push, self.asked
        )
        self.epochs = Epochs(config.weights_version)
        self._pools = False
        self.prefetch = Prefetcher(
            self.index,
            self.membership,
            self.requests,
            self.counters,
            self.costs,
            chunk_tokens=self.layout.chunk_tokens,
            deadline_s=config.deadline_s,
            clock=clock,
        )
        # With windows vLLM is told of failed loads by their requests, which goes for those that wait only.
        tables = offer.layout.tables()
        sync_nbytes = 0 if tables[0].window else config.sync_load_bytes
        self.states = States(offer.layout, pool)
        self.loads = Loads(
            self.index,
            self.requests,
            self.prefetch,
            self.states,
            self.layout,
            self.counters,
            SyncLoads(sync_nbytes, offer.shard, len(tables)),
            deadline_s=config.deadline_s,
            clock=clock,
        )
        host_policy = config.policy.get("host", DEFAULT_POLICY)
        self.spill = Spiller(self.index, offer.layout, self.counters, host_policy in WEIGHS_ABOVE)
        self.hints = HintReader(config.hints, clock, self.role.store)
        self.retention = Retention(self.index, config.hints, clock)
        self.adapters = Adapters(FileHashes(hashes_path()), adapter_settings)
        self.contents = Contents(self.layout.chunk_tokens, None)
        self._unhashed: dict[str, RequestState] = {}  # whose images or embeddings are being hashed
        self._waiting: dict[str, RequestState] = {}
        self._closed = False

    @property
    def client(self) -> StoreClient | None:
        """The client of the store server; None where there is none, or the model's identity is not known yet."""
        return self.membership.client

    def bind_block_pool(self, block_pool: Any) -> None:
        """Take note of vLLM's block pool."""
        self._gpu = GpuCache(block_pool, self.layout, self.hash_tokens)

    # -- vLLM's calls

    def on_new_request(self, request: Any) -> None:
        """Compute the request's keys and start its plan."""
        self._apply_replies()
        self.membership.adopt()
        if not self.epochs.clean and self._gpu.empty():
            self._new_epoch(self.epochs.gpu_was_emptied)
        tenant = (request.cache_salt or "").encode()
        hints = self.role.fit(self.hints.read(request, tenant_digest(tenant)))
        plain = is_plain_prompt(request, self._pools)
        root = self._root(request, tenant) if plain else None
        pooled = not plain and getattr(request, "pooling_params", None) is not None  # like all of this engine
        content = None if pooled else self.contents.of(request, root)
        if content is not None and not (content.awaited or content.known):
            root = None
        if root is None and hints is None:
            return
        state = self._new_state(request, tenant, root, content)
        if hints is not None:
            state.outcome = Outcome(hints)
            if root is None:
                hints.keep_to_gpu()
        if root is not None and content is not None and content.awaited:
            content.deadline = self._clock() + self.config.deadline_s
            self._unhashed[request.request_id] = self.requests[request.request_id] = state
            self._waiting[request.request_id] = state
        else:
            self._arrive(state)

    def _note_contents(self) -> None:
        """Go on with requests whose images or embeddings have been hashed, or that have waited for it long enough."""
        for req_id, state in list(self._unhashed.items()):
            content = state.content
            assert content is not None
            if content.awaited and (self._clock() >= content.deadline or req_id not in self._waiting):
                content.give_up()
            if content.awaited:
                continue
            del self._unhashed[req_id]
            if content.known and state.epoch == self._epoch and req_id in self._waiting:
                state.keys = content.keys
                self._arrive(state)
            elif state.outcome is not None:
                state.outcome.hints.keep_to_gpu()

    def _arrive(self, state: RequestState) -> None:
        """Plan a new request whose keys are known."""
        request = state.request
        if state.outcome is not None:
            take_up(state, self.membership.ns_id, self._clock() + self.config.deadline_s)
        elif not state.keys:
            return
        first = self.retention.arrived(state, self.client)
        self.requests[request.request_id] = state
        self._waiting[request.request_id] = state
        self._plan(state)
        note_asked(self.asked, state, self.client)
        if first:
            self.prefetch.put_first(state)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens past ``num_computed_tokens`` are in the host pool now, or None: ask again.

        Pure: it allocates, pins, promotes, touches, sends and records nothing.
        """
        unhashed = self._unhashed.get(request.request_id)
        if unhashed is not None and unhashed.content is not None and self._clock() < unhashed.content.deadline:
            return None, False
        state = self.requests.get(request.request_id)
        if state is None or state.no_load or state.epoch != self._epoch or request.skip_reading_prefix_cache:
            return 0, False
        if not state.tiers:
            return 0, False
        size = self.layout.chunk_tokens
        first = num_computed_tokens // size
        stop = min(len(state.keys), (request.num_tokens - 1) // size)
        if first >= stop:
            return 0, False
        now = self._clock()
        if self.loads.awaits(state.keys[first], now):
            return None, False
        plan = state.plan
        waits = plan is not None and plan.pending(now)  # before the index: what arrives in between is not overlooked
        end = self.index.run_end(state.keys, first, stop, state.run)
        if waits and plan is not None and plan.start <= end < min(stop, plan.stop):
            return None, False
        end = self.states.last(self.index, state.keys, first, end)
        num_tokens = end * size - num_computed_tokens
        if num_tokens <= 0:
            return 0, False
        return num_tokens, not self.loads.is_small(end - first)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Pin what is to be loaded and plan the load; or take note that the request goes on without one."""
        state = self.requests.get(request.request_id)
        if state is None:
            return
        if state.plan is not None and (num_late := state.plan.stop_awaiting()):
            self.counters["awaited_late"] += num_late
        if num_external_tokens:
            self.loads.claim(state, blocks.get_block_ids(), num_external_tokens)
        elif state.plan is not None and state.load is None:
            self.prefetch.end(state)
        self._waiting.pop(request.request_id, None)

    def build_connector_meta(self, scheduler_output: Any) -> TierKVMetadata:
        """Return this step's copies, and go on with the plans."""
        self.loads.plan_claims(scheduler_output)
        self._apply_replies()
        self.membership.adopt()
        self._note_contents()
        self._note_step(scheduler_output)
        loads = self.loads.take()
        fence = self._fence(scheduler_output, loads) if self.spill.copying else []
        stores = self.spill.plan(scheduler_output, self.requests, self._epoch, self.client)
        for req_id, _ in scheduled(scheduler_output):
            self._waiting.pop(req_id, None)
        for req_id in scheduler_output.preempted_req_ids or ():
            state = self.requests.get(req_id)
            if state is None or state.load is not None or req_id in scheduler_output.num_scheduled_tokens:
                continue  # the last two: vLLM has taken it up again in the same step
            self._waiting[req_id] = state
            self.prefetch.end(state)
            self._plan(state)
        self._replan_waiting()
        self.prefetch.advance(self._plan)
        self.spill.advance(self.client if self.role.stores else None)
        return TierKVMetadata(loads, stores, fence)

    def _note_step(self, scheduler_output: Any) -> None:
        """Measure how fast prompts are computed: the time between two steps without a pause between them."""
        if self.costs is None:
            return
        num_tokens, now = 0, self._clock()
        for req_id, num_computed in scheduled(scheduler_output):
            state = self.requests.get(req_id)
            if state is not None and num_computed < state.request.num_prompt_tokens:
                num_tokens += scheduler_output.num_scheduled_tokens.get(req_id, 0)
        tokens_before, began, who = self._last_step
        if not who.isdisjoint(scheduler_output.num_scheduled_tokens):
            self.costs.note_step(tokens_before, now - began)
        self._last_step = num_tokens, now, frozenset(scheduler_output.num_scheduled_tokens)

    @staticmethod
    def _fence(scheduler_output: Any, loads: Sequence[LoadJob]) -> list[int]:
        """Return the blocks that this step writes while copies out of the GPU may be under way."""
        return new_blocks(scheduler_output) + [b for job in loads for piece in job.pieces for b in piece.all_block_ids]

    def update_connector_output(self, loaded: set[str], report: TierKVWorkerMetadata | None) -> None:
        """Take note of loads and copies that have ended; send what was copied to the store server."""
        self._apply_replies()
        self.loads.reported(loaded, report)
        if report is not None:
            self.spill.computed(self.spill.copied(report), self.client)

    def request_finished(self, request: Any) -> dict[str, Any] | None:
        """Give back what the request held. A load under way goes on until the workers report it.

        Returns what its response is to say: nothing for a request without hints.
        """
        state = self.requests.pop(request.request_id, None)
        self._waiting.pop(request.request_id, None)
        self._unhashed.pop(request.request_id, None)
        if state is None:
            return None
        self.loads.request_finished(state)
        self.prefetch.end(state)
        if state.outcome is None:
            return None
        if state.epoch == self._epoch:
            self.retention.finished(state, self.client)
        num_prompt_tokens = getattr(request, "num_prompt_tokens", None) or len(request.prompt_token_ids or ())
        size = self.layout.chunk_tokens
        answer = state.outcome.answer(num_prompt_tokens, size)
        if state.promised and state.epoch == self._epoch:
            self.spill.handoffs.tell(state, answer, num_prompt_tokens // size, size, self.membership.ns_id)
        return answer

    def has_pending_stores(self) -> bool:
        """Return whether copies to the host pool are under way: vLLM is to keep stepping until they are reported."""
        return bool(self.spill.copying)

    def reset_cache(self) -> None:
        """Start a new epoch: nothing stored so far is answered any more, nothing of the old epoch is stored."""
        self._new_epoch(lambda: self.epochs.reset(gpu_is_empty=self._gpu.empty()))

    def weights_change(self) -> None:
        """Start an epoch of this engine's own: somebody is about to change its weights."""
        self._new_epoch(lambda: self.epochs.weights_change(gpu_is_empty=self._gpu.empty()))

    def weights_version(self, version: str) -> None:
        """Start the epoch of weights that are called ``version``."""
        self._new_epoch(lambda: self.epochs.tell(version, gpu_is_empty=self._gpu.empty()))

    def _new_epoch(self, begin: Callable[[], object]) -> None:
        """Begin an epoch, and drop what the last one had, where another one it is."""
        before = self._epoch
        begin()
        if self._epoch == before:
            return
        for state in self.requests.values():
            if state.load is None:
                self.prefetch.end(state)
        self.index.clear()
        self.loads.loading.clear()

    @property
    def _epoch(self) -> int:
        return self.epochs.number

    @property
    def _epoch_nonce(self) -> bytes:
        return self.epochs.name

    def close(self) -> None:
        """Leave the store server and unmap the pool. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.adapters.close()
        self.contents.close()
        if self.client is not None and self.role.stores:
            self.spill.offer_rest(self.client)
        self.membership.close()
        self.pool.close()

    # -- plans

    def _root(self, request: Any, tenant: bytes) -> bytes | None:
        """Return the root of the request's keys; None where its adapter is not known by its content (yet)."""
        root = root_key(self.membership.identity, self._epoch_nonce, tenant)
        return self.adapters.root(root, getattr(request, "lora_request", None))

    def _new_state(
        self, request: Any, tenant: bytes, root: bytes | None, content: Content | None = None
    ) -> RequestState:
        shareable = self.membership.shareable and self.epochs.shared
        keys: list[bytes] = []
        if root is not None:
            keys = content.keys if content else self._chains.keys(root, request.prompt_token_ids)
        state = RequestState(request, root or b"", keys, tenant_digest(tenant), self.epochs.of_new_requests, shareable)
        state.role, state.content = self.role, content
        return state

    def _plan(self, state: RequestState) -> None:
        """Touch what the request finds in the host pool, and start to fetch what it does not."""
        request, size = state.request, self.layout.chunk_tokens
        gpu_run = self._gpu.run(request)
        stop = min(len(state.keys), (request.num_tokens - 1) // size)
        start = self.index.run_end(state.keys, min(gpu_run, stop), stop, state.run)
        self.index.touch(state.keys[:start])
        if start and state.store != "none" and self.client is not None and self.client.connected():
            self.spill.note_use(state, start, self.client)
        state.plan = Plan(start, stop, gpu_run)
        if start >= stop or not state.shareable or state.no_load or state.epoch != self._epoch:
            return
        if not request.skip_reading_prefix_cache and not state.tiers <= {"host"}:
            self.prefetch.begin(state)

    def _apply_replies(self) -> None:
        """Take note in the index of what the reader thread has received."""
        self.index.apply_drops()
        self.spill.apply_answers()
        self.prefetch.apply()

    def _replan_waiting(self) -> None:
        """Plan again for waiting requests whose prefix on the GPU has shrunk since they were planned."""
        for req_id, state in list(self._waiting.items())[:_REPLAN_CHECKS]:
            plan = state.plan
            if plan is None or plan.state in (State.LOADING, State.DONE) or not plan.gpu_run:
                continue
            if not self._gpu.has(state.request, plan.gpu_run - 1):
                self.counters["replans"] += 1
                started = plan.state is not State.READY
                self.prefetch.end(state)
                self._plan(self.requests[req_id])
                if started and state.plan is not None:  # it goes on waiting, no longer than it would have
                    state.plan.deadline = min(state.plan.deadline, plan.deadline)

    # -- questions of the store server: the reader thread

    def _on_push(self, what: str, body: bytes) -> bytes:
        if what == "list":
            return msgspec.msgpack.encode(
                [
                    HostEntry(e.key, e.parent, e.position, e.num_tokens, e.last_used, e.num_hits, e.tenant)
                    for e in self.index.snapshot()
                ]
            )
        keys = [body[i : i + 32] for i in range(0, len(body), 32)]
        if what == "has":
            return bytes(int((entry := self.index.get(key)) is not None and entry.usable) for key in keys)
        if what == "invalidate":
            there = [key for key in keys if self.index.get(key) is not None]
            if (client := self.membership.any_client) is not None:
                client.drop(there, self.index.dropped)
            return str(len(there)).encode()
        if what == "session":
            return self.retention.take_order(body)
        if what == "stat":
            return msgspec.json.encode(self.stat())
        return b""

    def stat(self) -> HostStat:
        """Return this engine's counters. Safe from any thread."""
        shape = self.pool.shape
        counters = dict(self.counters) | dict(self.spill.queue.counters)
        counters["store_queue_nbytes"] = self.spill.queue.nbytes
        if self.client is not None and self.client.num_bad:
            counters["fetched_bad"] = self.client.num_bad
        if self.client is not None and (num := self.spill.num_not_saved(self.client)):
            counters["not_saved"] = num
        return HostStat(
            engine_id=self._engine_id,
            pid=os.getpid(),
            namespace=self.membership.ns_id.hex(),
            num_slots=shape.num_slots,
            num_entries=len(self.index),
            num_quarantined=self.index.num_quarantined,
            payload_nbytes=shape.payload_nbytes,
            budget=shape.nbytes,
            num_evicted=self.index.num_evicted,
            counters=counters,
            policy=self.config.policy.get("host", DEFAULT_POLICY),
        )

    def dump(self) -> dict[str, Any]:
        """Return the whole state as plain values, for tests that compare it."""
        return {
            "index": self.index.dump(),
            "requests": {req_id: state.dump() for req_id, state in self.requests.items()},
            **self.prefetch.dump(),
            "waiting": list(self._waiting),
            **self.loads.dump(),
            "spill": self.spill.dump(),
            "retention": self.retention.dump(),
            "epoch": (self.epochs.dump(), self.membership.identity, self.membership.shareable),
            "counters": dict(self.counters),
        }
