"""A vLLM engine in a process of its own, under a test's control: obeys JSON lines, answers in JSON lines.

The process is forked from a *nursery*, which has imported vLLM once: importing takes longer than starting an engine.
Commands come on standard input, answers go to a descriptor of their own, vLLM's log to standard output and error.
See :class:`engine_process.Engine` for the other side.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

TIMEOUT_S = 30.0
#: Requests whose blocks a test can look at.
MAX_REMEMBERED = 512


class Driver:
    """The commands: every public method is one; its arguments and its result are JSON."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._count = 0
        self._finished: dict[str, dict[str, Any]] = {}
        self._asked: list[list[Any]] = []
        self._held: dict[str, list[float]] = {}
        self._claims: list[list[Any]] = []
        self._num_failing = 0
        self._events: list[dict[str, Any]] | None = None
        self._requests: dict[tuple[tuple[int, ...], str | None], Any] = {}
        self._watched: dict[str, list[Any]] = {}

    # -- requests

    def start(self, **settings: Any) -> int:
        """Start the engine and return this process's id."""
        from vllm import LLM

        if limit := os.environ.get("TIERKV_TEST_BACKOFF_MAX_S"):
            from tierkv import health

            health.BACKOFF_MAX_S = float(limit)
        from tierkv_connector import filecheck

        filecheck.WAIT_S = TIMEOUT_S  # tests count hits on machines that are busy with other tests
        if armed := os.environ.get("TIERKV_TEST_DIE_AT"):  # a point of fire.in_engine
            self.die_at(armed)
        self._llm = LLM(**settings)
        if self._in_process:
            self._remember_requests(self._core.scheduler)
            if self._core.scheduler.connector is not None:
                self._record(self._connector)
        return os.getpid()

    def run(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        salt: str | None = None,
        batch: bool = False,
        params: Any = None,
        skip_reading: bool = False,
        lora: list[Any] | None = None,
        inputs: dict[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        """Run prompts greedily, together or one at a time, and return their answers."""
        names = []
        for prompt in prompts:
            self._count += 1
            names.append(f"run{self._count}")
            self.add(names[-1], prompt, max_tokens, salt, params, skip_reading, lora, inputs)
            if not batch:
                self._finish(names[-1:])
        self._finish(names)
        return [self._finished.pop(name) for name in names]

    def add(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int,
        salt: str | None = None,
        params: Any = None,
        skip_reading: bool = False,
        lora: list[Any] | None = None,
        inputs: dict[str, Any] | None = None,
    ) -> None:
        """Add a request that :meth:`step` runs.

        Args:
            params: its ``kv_transfer_params``.
            skip_reading: it may not read any cache.
            lora: name, number and path of its adapter.
            inputs: what it has besides token ids, or instead of them (:func:`multimodal_models.with_inputs`).
        """
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, logprobs=4, detokenize=False)
        sampling.skip_reading_prefix_cache = skip_reading
        if params is not None:
            sampling.extra_args = {"kv_transfer_params": params}
        request: dict[str, Any] = {"prompt_token_ids": prompt}
        if inputs is not None:
            from multimodal_models import with_inputs

            request = with_inputs(prompt, inputs)
        if salt is not None:
            request["cache_salt"] = salt
        adapter = None
        if lora is not None:
            from vllm.lora.request import LoRARequest

            adapter = LoRARequest(*lora)
        self._llm.llm_engine.add_request(name, request, sampling, lora_request=adapter)

    def say(self, text: str | None = None, messages: Any = None, max_tokens: int = 2) -> dict[str, Any]:
        """Run a prompt that vLLM itself makes token ids of, and return these and how many of them were not computed."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        if messages is not None:
            (output,) = self._llm.chat(messages, sampling, use_tqdm=False)
        else:
            (output,) = self._llm.generate([text], sampling, use_tqdm=False)
        return {"tokens": list(output.prompt_token_ids), "cached": output.num_cached_tokens}

    def sample(self, prompt: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        """Run one prompt with sampling parameters of vLLM, and return all of its answers."""
        from vllm import SamplingParams

        params = SamplingParams(ignore_eos=True, detokenize=False, **sampling)
        (output,) = self._llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        rows = output.prompt_logprobs or []
        return {
            "tokens": [list(each.token_ids) for each in output.outputs],
            "prompt_logprobs": [row and {str(t): p.logprob.hex() for t, p in row.items()} for row in rows],
            "cached": output.num_cached_tokens,
        }

    def step(self, num: int = 1) -> dict[str, dict[str, Any]]:
        """Step ``num`` times and return the answers of the requests that have finished and were not returned yet."""
        for _ in range(num):
            if self._llm.llm_engine.has_unfinished_requests():
                self._step()
        finished, self._finished = self._finished, {}
        return finished

    def idle(self) -> None:
        """Step without a request until nothing is under way: what aborted requests left behind is reported here."""
        deadline = time.monotonic() + TIMEOUT_S
        while self._core.scheduler.has_requests() or self._sched.has_pending_stores():
            assert time.monotonic() < deadline, "the engine does not come to rest"
            self._step()

    def abort(self, names: list[str]) -> None:
        """Abort requests."""
        self._llm.llm_engine.abort_request(names)

    def states(self) -> dict[str, str]:
        """Return the scheduler's state of every request that it has."""
        return {_name(r.request_id): r.status.name for r in self._core.scheduler.requests.values()}

    def asked(self) -> list[list[Any]]:
        """Return what the connector answered vLLM since the last call: [request, tokens computed, answer, times]."""
        asked, self._asked = self._asked, []
        return asked

    def claims(self) -> list[list[Any]]:
        """Return the loads that vLLM has given blocks for since the last call.

        Of each: the request, how many of its tokens are loaded, how many it has then, and how often it had been
        preempted.
        """
        claims, self._claims = self._claims, []
        return claims

    def load_states_before(self, wrong: bool) -> None:
        """Load recurrent state of the chunk before the one that it is asked for of; or go on as ever."""
        from tierkv_connector.blocks import RequestBlocks

        state = getattr(RequestBlocks._state, "__wrapped__", RequestBlocks._state)

        @functools.wraps(state)
        def before(*args: Any) -> list[Any]:
            *rest, last = state(*args)
            return [*rest[:-1], last, rest[-1]] if rest else [last]

        RequestBlocks._state = before if wrong else state  # type: ignore[method-assign]

    def held(self) -> dict[str, float]:
        """Return for how many seconds the connector told vLLM to ask again, by request, since the last call."""
        held, self._held = self._held, {}
        return {name: last - first for name, (first, last) in held.items()}

    def die_at(self, point: str, number: int = 1) -> None:
        """Have this process end with SIGKILL at the ``number``-th pass of a point (:mod:`fire.in_engine`)."""
        from fire.in_engine import arm

        arm(point, number)

    def plant(self, what: str, number: int) -> bool:
        """Make the connector wrong in one way (:mod:`fire.plants`), so that a test can see that it is found."""
        from fire.plants import plant

        return plant(self._sched, what, number)

    def forget(self) -> None:
        """Forget past requests and questions, kept for tests that look back: memory is about to be measured."""
        self._requests.clear()
        self._asked.clear()
        self._claims.clear()

    def wait_at_most(self, seconds: float) -> None:
        """Set for how long requests wait for their plans from now on."""
        msgspec.structs.force_setattr(self._sched.config, "deadline_s", seconds)

    def reset_gpu(self) -> bool:
        """Empty vLLM's own prefix cache and nothing else."""
        return bool(self._llm.reset_prefix_cache())

    def reset(self, running: bool, connector: bool) -> bool:
        """Reset the prefix cache: with requests that run, or the connector's too."""
        return bool(self._llm.reset_prefix_cache(reset_running_requests=running, reset_connector=connector))

    def reset_all(self) -> bool:
        """Reset the prefix cache and the connector's, as for new weights."""
        return bool(self._llm.reset_prefix_cache(reset_connector=True))

    def rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> None:
        """Call a method of every worker by its name, as trainers do."""
        self._llm.collective_rpc(method, kwargs=kwargs or {})

    def double_weights(self) -> None:
        """Change the weights in place as nobody can see: by a function that is sent to the workers."""
        self._llm.collective_rpc(_double_weights)

    def rejoin(self) -> None:
        """Tell the connector that the weights are those of the start again, which from 0.27 on vLLM can be told."""
        self._connector.weights_version("default")

    def takes_versions(self) -> bool:
        """Return whether vLLM can be told what its weights are called."""
        return hasattr(self._llm.llm_engine, "set_weight_version")

    def name_weights(self, version: str) -> None:
        """Tell vLLM what its weights are called."""
        self._llm.llm_engine.set_weight_version(version)

    def sleep(self, level: int) -> None:
        """Put the engine to sleep. On a CPU vLLM does all of it but give memory back."""
        self._llm.sleep(level=level)

    def wake_up(self) -> None:
        """Wake the engine up."""
        self._llm.wake_up()

    def epoch(self) -> list[Any]:
        """Return number, name, whether it is shared, and whether it is clean, of the epoch that the engine is in."""
        number, name, shared, clean, _ = self._sched.epochs.dump()
        return [number, name.hex(), shared, clean]

    # -- the connector's scheduler half

    def stat(self) -> dict[str, Any]:
        """Return the engine's own statistics."""
        stat: dict[str, Any] = msgspec.to_builtins(self._sched.stat())
        return stat

    def layout(self) -> dict[str, Any]:
        """Return what a chunk's bytes mean."""
        layout: dict[str, Any] = msgspec.to_builtins(self._sched.layout)
        return layout

    def num_preemptions(self) -> int:
        """Return how often the requests that this process remembers were preempted."""
        return sum(request.num_preemptions for request in self._requests.values())

    def connected(self) -> bool:
        """Return whether there is a store server now."""
        return self._sched.client is not None and self._sched.client.connected()

    def settle(self) -> dict[str, int]:
        """Wait until the store server has answered every STORE, and return the counters."""
        self._wait(lambda: not self._sched.stat().counters["store_queue_nbytes"])
        return dict(self._sched.stat().counters)

    def wait_for_plan(self, name: str) -> None:
        """Wait, without a step, until everything that a request's plan has asked for is there."""
        (state,) = (s for req_id, s in self._sched.requests.items() if _name(req_id) == name)
        self._wait(lambda: state.plan is None or not state.plan.pending(self._sched._clock()))

    def load_in(self, num_steps: int) -> None:
        """Have loads that requests wait for over with their step, or so many steps later, however fast threads are."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        device, waiting = get_kv_transfer_group()._work._device, []
        finished = type(device).finished

        def finished_now() -> list[Any]:
            for each in [each for each in waiting if not each[1]]:
                waiting.remove(each)
                device._timed(each[0], each[0].pieces, device._load_piece)
            for each in waiting:
                each[1] -= 1
            return list(finished(device))

        device.load = lambda jobs: waiting.extend([job, num_steps] for job in jobs)
        device.finished = finished_now

    def forget_filter(self) -> None:
        """Know nothing of what the store server has, until its next filter: it has to be asked."""
        self._sched.client._session.known = None

    def adapters_known(self) -> None:
        """Wait until every adapter that a request brought has been hashed."""
        assert self._sched.adapters.wait(TIMEOUT_S)

    def clear_host(self) -> None:
        """Empty the host pool as if the engine were new: same keys, same store server."""
        self._sched.index.clear()

    def root(self) -> str:
        """Return the root of the keys of prompts without a salt."""
        from tierkv.keys import root_key

        return root_key(self._sched.membership.identity, self._sched._epoch_nonce, b"").hex()

    def keys(self, prompt: list[int], salt: str | None = None) -> list[str]:
        """Return the keys of a prompt's chunks."""
        return [key.hex() for key in self._keys(prompt, salt)]

    def in_host(self, prompt: list[int], salt: str | None = None) -> list[str | None]:
        """Return the digest of each chunk's payload in the host pool; None where it is not there."""
        found: list[str | None] = []
        for key in self._keys(prompt, salt):
            entry = self._sched.index.get(key)
            usable = entry is not None and entry.usable
            found.append(_digest([bytes(p) for p in self._sched.pool.parts(entry.slot)]) if usable else None)
        return found

    def on_gpu(self, prompt: list[int], salt: str | None = None) -> list[str | None]:
        """Return the digest of each chunk's bytes in the GPU's blocks, layer after layer; None where it is not there.

        The request must have run in this process: its block hashes say where its blocks are.
        """
        layout = self._sched.layout
        chunks = self._gpu_chunks(prompt, salt, layout.blocks_per_chunk)[: len(prompt) // layout.chunk_tokens]
        return [None if parts is None else _digest(parts) for parts in chunks]

    def save_gpu(self, path: str, prompt: list[int], blocks_per_chunk: int) -> None:
        """Write the bytes of each chunk in the GPU's blocks to an npz file, by number. Needs no connector."""
        chunks = self._gpu_chunks(prompt, None, blocks_per_chunk)
        _save(path, {str(i): b"".join(parts) for i, parts in enumerate(chunks) if parts is not None})

    def save_host(self, path: str) -> None:
        """Write every payload that a request may load from the host pool to an npz file, by its key in hex."""
        index, pool = self._sched.index, self._sched.pool
        self._sched._apply_replies()
        _save(path, {e.key.hex(): b"".join(map(bytes, pool.parts(e.slot))) for e in index.snapshot() if e.usable})

    def flip(
        self, prompt: list[int], chunk: int, word: int, bit: int, salt: str | None = None, part: int = 0
    ) -> list[float]:
        """Flip one bit of one float32 in the slot of a chunk, where no checksum looks; return it before and after."""
        entry = self._sched.index.get(self._keys(prompt, salt)[chunk])
        words = np.frombuffer(self._sched.pool.parts(entry.slot)[part], dtype=np.uint32)
        before = float(words.view(np.float32)[word])
        words[word] ^= np.uint32(1 << bit)
        return [before, float(words.view(np.float32)[word])]

    # -- what an engine tells

    def metrics(self) -> str:
        """Return what vLLM's ``/metrics`` shows of this process. Wants ``disable_log_stats=False``."""
        from prometheus_client import generate_latest

        return generate_latest().decode()

    def events(self) -> list[dict[str, Any]]:
        """Return the KV events that vLLM has published since the last call. The first call begins to record."""
        publisher = self._core.scheduler.kv_event_publisher
        if self._events is None:
            self._events, publish = [], publisher.publish

            def record(batch: Any) -> None:
                assert self._events is not None
                self._events += [msgspec.to_builtins(event) | {"type": type(event).__name__} for event in batch.events]
                publish(batch)

            publisher.publish = record
        events, self._events = self._events, []
        return json.loads(msgspec.json.encode(events).decode())

    def watched(self) -> bool:
        """Return whether anybody is told of the host index's changes."""
        return self._sched.index.watcher is not None

    def block_hashes(self, prompt: list[int], salt: str | None = None) -> list[str]:
        """Return vLLM's hashes of a prompt's blocks, as its events have them."""
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        hashes = [maybe_convert_block_hash(each) for each in self._requests[tuple(prompt), salt].block_hashes]
        shown: list[str] = json.loads(msgspec.json.encode(hashes).decode())
        return shown

    # -- what the connector says to vLLM and to its workers

    def watch(self, hold: bool = False) -> None:
        """Record it from now on.

        Args:
            hold: copies to the host pool end no more, as far as anybody is told, until :meth:`let_go`.
        """
        names = ("reported", "bad", "kept", "given", "fences", "stores", "loads")
        seen = self._watched = {name: [] for name in names}
        connector, worker, held = self._connector, self._worker, []
        took, ended, built = worker.take_loaded, connector.request_finished, connector.build_connector_meta
        finished, bad = worker._device.finished, worker.take_bad_blocks

        def take_bad_blocks() -> Any:
            blocks = bad()
            seen["bad"] += sorted(blocks)
            return blocks

        def take_loaded() -> Any:
            loaded = took()
            seen["reported"] += [_name(req_id) for req_id in loaded]
            return loaded

        def request_finished(request: Any, block_ids: Any) -> Any:
            answer = ended(request, block_ids)
            seen["kept"].append(answer[0])
            return answer

        def build_connector_meta(output: Any) -> Any:
            given = [list(ids) for new in output.scheduled_new_reqs for ids in new.block_ids]
            given += [list(ids) for new in output.scheduled_cached_reqs.new_block_ids for ids in new or ()]
            metadata = built(output)
            seen["given"].append([block for ids in given for block in ids])
            seen["fences"].append(list(metadata.fence))
            seen["stores"].append([list(job.piece.all_block_ids) for job in metadata.stores])
            seen["loads"].append([[list(p.all_block_ids) for p in job.pieces] for job in metadata.loads])
            return metadata

        def held_back() -> Any:
            done = finished()
            held.extend(each for each in done if hasattr(each.job, "job_id"))
            return [each for each in done if not hasattr(each.job, "job_id")]

        worker.take_loaded, connector.request_finished = take_loaded, request_finished
        worker.take_bad_blocks = take_bad_blocks
        connector.build_connector_meta = build_connector_meta
        if hold:
            worker._device.finished = held_back
            self._let_go = lambda: setattr(
                worker._device, "finished", lambda: [held.pop() for _ in list(held)] + finished()
            )

    def seen(self) -> dict[str, list[Any]]:
        """Return what was said since :meth:`watch`: lists, those of steps with an entry a step."""
        return self._watched

    def let_go(self) -> None:
        """Have the copies end that were held back."""
        self._let_go()

    def pending(self) -> bool:
        """Return whether the connector asks vLLM to go on stepping."""
        return bool(self._core.scheduler.connector.has_pending_push_work())

    def break_device(self, method: str) -> None:
        """Make the device raise when it is next to start copies."""
        device = self._worker._device
        original = getattr(device, method)

        def fail(jobs: Any) -> Any:
            if not jobs:
                return original(jobs)
            setattr(device, method, original)
            raise RuntimeError("the test's fault")

        setattr(device, method, fail)

    def embed(self, prompts: list[list[int]]) -> list[list[str]]:
        """Return the embedding of each prompt, one at a time, as hexadecimal floats."""
        outputs = [self._llm.embed([{"prompt_token_ids": prompt}], use_tqdm=False)[0] for prompt in prompts]
        return [[float(value).hex() for value in output.outputs.embedding] for output in outputs]

    # -- faults

    def fail_loads(self, num: int) -> None:
        """Make the next ``num`` loads fail in the worker: nothing is copied."""
        from tierkv_connector.device import Done

        device = self._worker._device
        load, load_now, finished, failed = device.load, device.load_now, device.finished, []
        self._num_failing = num

        def failing_load(jobs: Any) -> None:
            for job in jobs:
                if self._num_failing > 0:
                    self._num_failing -= 1
                    failed.append(Done(job, False, 0, 0.0))
                else:
                    load([job])

        def failing_load_now(jobs: Any) -> list[Any]:
            doomed = list(jobs)[: self._num_failing]
            self._num_failing -= len(doomed)
            failed.extend(Done(job, False, 0, 0.0) for job in doomed)
            return doomed + load_now(jobs[len(doomed) :])

        def finished_and_failed() -> list[Any]:
            done = finished() + failed
            failed.clear()
            return done

        device.load, device.load_now, device.finished = failing_load, failing_load_now, finished_and_failed

    def fail_rank(self, rank: int, what: str) -> None:
        """Make one rank's next copy of a chunk (``what``: load or store) fail; the other ranks go on."""
        self._llm.collective_rpc(_fail_next_copy, args=(rank, what))

    def blind(self) -> None:
        """Let the connector take any image for any other."""
        from tierkv_connector import extras

        extras.place_digest = lambda *_: bytes(32)

    def load_in_step(self, nbytes: int) -> None:
        """Make loads of up to ``nbytes`` a part of the step that needs them, and others be waited for."""
        self._sched.loads.sync._limit = nbytes

    def strand_next_load(self) -> None:
        """Make the scheduler half raise when it is to plan the next load, after vLLM has given blocks out for it."""

        def plan_load(*args: Any) -> None:
            raise RuntimeError("the test's fault")

        self._sched.loads.plan = plan_load

    def vllm_version(self) -> str:
        """Return the version of vLLM that runs here."""
        import vllm

        return str(vllm.__version__)

    # --

    def leases(self) -> dict[str, int]:
        """Return everything that requests hold; all zero where no request is left."""
        s, pool = self._sched, self._core.scheduler.kv_cache_manager.block_pool
        s._apply_replies()
        state = s.dump()
        names = (
            "requests",
            "plans",
            "unstarted",
            "waiting",
            "loading",
            "ended_loads",
            "failed_loads",
            "loads",
            "fetching",
        )
        return {name: len(state[name]) for name in names} | {
            "stores": int(s.has_pending_stores()),
            "fetch_nbytes": state["fetch_nbytes"],
            "num_leased": state["num_leased"],
            "pins": sum(e.num_pins for e in s.index._entries.values()),
            "quarantined": s.index.num_quarantined,
            "slots": s.pool.shape.num_slots - s.index.num_free - s.index.num_quarantined - len(s.index),
            "gpu_blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        }

    # --

    def close(self) -> None:
        """Shut the engine down as its user would."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()

    @property
    def _in_process(self) -> bool:
        return hasattr(self._llm.llm_engine.engine_core, "engine_core")

    @property
    def _core(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core

    @property
    def _sched(self) -> Any:
        return self._connector._sched

    @property
    def _connector(self) -> Any:
        """Ours, also where it is one of several."""
        connector = self._core.scheduler.connector
        return next(each for each in getattr(connector, "_connectors", [connector]) if hasattr(each, "_sched"))

    @property
    def _worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        group = get_kv_transfer_group()
        return next(each for each in getattr(group, "_connectors", [group]) if hasattr(each, "_work"))._work

    def _gpu_chunks(self, prompt: list[int], salt: str | None, blocks_per_chunk: int) -> list[list[bytes] | None]:
        """Return the parts of each whole chunk that the GPU has, layer after layer; None where it has it not whole."""
        hashes = self._requests[tuple(prompt), salt].block_hashes
        pool = self._core.scheduler.kv_cache_manager.block_pool
        caches = self._core.model_executor.driver_worker.worker.model_runner.kv_caches
        found: list[list[bytes] | None] = []
        for first in range(0, len(hashes) - blocks_per_chunk + 1, blocks_per_chunk):
            blocks = [pool.get_cached_block(h, [0]) for h in hashes[first : first + blocks_per_chunk]]
            ids = [block[0].block_id for block in blocks if block]
            parts = [cache[b].contiguous().numpy().tobytes() for cache in caches for b in ids]
            found.append(parts if all(blocks) else None)
        return found

    def _remember_requests(self, scheduler: Any) -> None:
        add = scheduler.add_request

        def add_request(request: Any) -> None:
            self._requests[tuple(request.prompt_token_ids or ()), request.cache_salt] = request
            if len(self._requests) > MAX_REMEMBERED:
                del self._requests[next(iter(self._requests))]
            add(request)

        scheduler.add_request = add_request

    def _record(self, connector: Any) -> None:
        ask = connector.get_num_new_matched_tokens

        def get_num_new_matched_tokens(request: Any, num_computed: int) -> Any:
            answer = ask(request, num_computed)
            row = [_name(request.request_id), num_computed, answer[0]]
            if self._asked and self._asked[-1][:3] == row:
                self._asked[-1][3] += 1
            else:
                self._asked.append([*row, 1])
            if answer[0] is None:
                now = time.monotonic()
                self._held.setdefault(row[0], [now, now])[1] = now
            return answer

        connector.get_num_new_matched_tokens = get_num_new_matched_tokens
        take = connector.update_state_after_alloc

        def update_state_after_alloc(request: Any, blocks: Any, num_external: int) -> None:
            if num_external:
                about = [num_external, request.num_tokens, request.num_preemptions]
                self._claims.append([_name(request.request_id), *about])
            take(request, blocks, num_external)

        connector.update_state_after_alloc = update_state_after_alloc

    def _keys(self, prompt: Sequence[int], salt: str | None) -> list[bytes]:
        from tierkv.keys import chain_keys, root_key

        s = self._sched
        root = root_key(s.membership.identity, s._epoch_nonce, (salt or "").encode())
        return chain_keys(root, prompt, s.layout.chunk_tokens)

    def _step(self) -> None:
        for output in self._llm.llm_engine.step():
            if not output.finished:
                continue
            completion = output.outputs[0]
            tokens = list(completion.token_ids)
            self._finished[output.request_id] = {
                "tokens": tokens,
                "logprobs": [row[t].logprob.hex() for t, row in zip(tokens, completion.logprobs, strict=True)],
                "others": [{str(t): p.logprob.hex() for t, p in row.items()} for row in completion.logprobs],
                "cached": output.num_cached_tokens,
                "reason": completion.finish_reason,
                "told": output.kv_transfer_params,
            }

    def _finish(self, names: Sequence[str]) -> None:
        while any(name not in self._finished for name in names):
            assert self._llm.llm_engine.has_unfinished_requests(), f"requests were lost: {names}"
            self._step()

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, "not in time"
            time.sleep(0.002)


def _name(request_id: str) -> str:
    """Return the name of a request as the test gave it; vLLM appends a random part."""
    return request_id.rsplit("-", 1)[0]


def _double_weights(worker: Any) -> None:
    for parameter in worker.model_runner.model.parameters():
        parameter.data.mul_(2.0)


def _fail_next_copy(worker: Any, rank: int, what: str) -> None:
    """In a rank's process: make its next copy of a chunk fail."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    if worker.rank != rank:
        return
    device = get_kv_transfer_group()._work._device
    name = f"_{what}_piece"
    copy = getattr(device, name)

    def fail(piece: Any) -> None:
        setattr(device, name, copy)
        raise RuntimeError("the test's fault")

    setattr(device, name, fail)


def _save(path: str, arrays: dict[str, bytes]) -> None:
    np.savez(path, **{name: np.frombuffer(data, dtype=np.uint8) for name, data in arrays.items()})


def _digest(parts: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def obey(answers: int) -> None:
    """Read commands until their end; answer each on the descriptor ``answers``."""
    driver = Driver()
    with os.fdopen(answers, "w") as out:
        for line in sys.stdin:
            command = json.loads(line)
            try:
                answer = {"result": getattr(driver, command.pop("op"))(**command)}
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
            print(json.dumps(answer), file=out, flush=True)
    driver.close()


def nursery(link: socket.socket) -> None:
    """Import vLLM; then fork a process for every message on ``link`` (its environment, with three descriptors)."""
    import vllm
    import vllm.v1.core.sched.scheduler
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401

    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    while True:
        data, fds, _, _ = socket.recv_fds(link, 1 << 16, 3)
        if not data:
            os._exit(0)
        pid = os.fork()
        if not pid:
            link.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            for fd, number in zip((fds[0], fds[2], fds[2]), (0, 1, 2), strict=True):
                os.dup2(fd, number)
            sys.stdin = os.fdopen(0)
            for name, value in json.loads(data).items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            os.set_inheritable(fds[1], False)
            obey(fds[1])
            sys.stdout.flush()
            os._exit(0)
        for fd in fds:
            os.close(fd)
        link.send(str(pid).encode())


if __name__ == "__main__":
    nursery(socket.socket(fileno=int(sys.argv[1])))
