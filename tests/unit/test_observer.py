"""Metrics, KV events and the trace: over random lives of an engine, and each by an example."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import prometheus_client
import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from scheduler_bench import BLOCK_TOKENS, CHUNK_TOKENS, DEADLINE_S, PAYLOAD_NBYTES, Bench, Request, small_world
from tierkv.hostindex import Entry
from tierkv_connector import events as events_module
from tierkv_connector.events import EventQueue
from tierkv_connector.observer import Observer
from tierkv_connector.stats import METRICS, PREFIX, Collector, TierKVPromMetrics, TierKVStats
from tierkv_connector.trace import Tracer, trace_wanted

NUM_SEQUENCES = 40
NUM_OPERATIONS = 200


def now_of(bench: Bench) -> Callable[[], float]:
    return lambda: bench.now


def external(block_hash: bytes) -> Any:
    """Return a hash as vLLM's events have it."""
    return maybe_convert_block_hash(BlockHash(block_hash))


def random_bench(seed: int) -> Bench:
    return Bench(seed, num_slots=12 if seed % 3 else 5, num_blocks=40 if seed % 2 else 24, late_outputs=bool(seed % 2))


def replay(events: list[Any], view: set[Any]) -> None:
    """Do what a router does."""
    for event in events:
        hashes = set(event.block_hashes)
        if isinstance(event, BlockStored):
            assert view.isdisjoint(hashes), "stored twice"
            assert 0 < len(event.token_ids) == len(event.block_hashes) * event.block_size <= CHUNK_TOKENS
            view |= hashes
        else:
            assert isinstance(event, BlockRemoved) and hashes <= view, "removed and never stored"
            view -= hashes


def test_at_any_time_a_router_knows_what_is_in_the_host_pool() -> None:
    """And the trace and the metrics follow every life without a fault."""
    num_events = num_lines = 0
    for seed in range(NUM_SEQUENCES):
        with small_world():
            bench = random_bench(seed)
            sched, lines = bench.sched, list[str]()
            queue = EventQueue(sched.requests, CHUNK_TOKENS, BLOCK_TOKENS)
            sched.index.watcher = queue
            collector, tracer = Collector(sched, now_of(bench)), Tracer(sched, now_of(bench), lines.append)
            owners, note = note_hashes(bench)
            view: set[Any] = set()
            told: Counter[str] = Counter()
            try:
                for _ in range(NUM_OPERATIONS):
                    bench.do()
                    note()
                    follow(bench, tracer)
                    collector.stepped()
                    events = queue.take()
                    replay(events, view)
                    num_events += len(events)
                    ready = {k for k, e in sched.index._entries.items() if e.state == Entry.READY}
                    assert view == {external(h) for key in ready for h in owners[key]}, f"seed {seed}"
                    add(told, collector.take())
                assert told["chunks:missed"] == sched.counters["missed"]
                for source in ("host", "disk", "shared"):
                    assert told[f"chunks:{source}"] == sched.counters[f"{source}_hits"]
                    assert told[f"loaded_bytes:{source}"] == sched.counters[f"{source}_hits"] * PAYLOAD_NBYTES
                num_lines += len(lines)
            finally:
                bench.close()
    assert num_events > 500 and num_lines > 500


def note_hashes(bench: Bench) -> tuple[dict[bytes, tuple[bytes, ...]], Callable[[], object]]:
    """Return what holds vLLM's hashes of every chunk by its key, and a function that adds those of all requests."""
    owners: dict[bytes, tuple[bytes, ...]] = {}
    finish, per_chunk = bench.sched.request_finished, CHUNK_TOKENS // BLOCK_TOKENS

    def note(request: Any) -> None:
        state = bench.sched.requests.get(request.request_id)
        for i, key in enumerate(state.keys if state is not None else ()):
            owners[key] = tuple(request.block_hashes[i * per_chunk : (i + 1) * per_chunk])

    def request_finished(request: Any) -> Any:
        note(request)
        return finish(request)

    bench.sched.request_finished = request_finished  # type: ignore[method-assign]
    return owners, lambda: [note(state.request) for state in bench.sched.requests.values()]


def follow(bench: Bench, tracer: Tracer) -> None:
    """Tell the tracer of every request."""
    for req_id, state in bench.sched.requests.items():
        if req_id not in tracer._followed:
            tracer.added(state.request)
        tracer.admitted(state.request, 0, Counter(), 0)
    for req_id in tracer._followed.keys() - bench.sched.requests.keys():
        tracer.finished(SimpleNamespace(request_id=req_id))
    tracer.looked()


def add(told: Counter[str], stats: TierKVStats | None) -> None:
    if stats is not None:
        told.update(stats.data["sums"])


@pytest.fixture
def bench() -> Any:
    with small_world():
        bench = Bench(1, num_slots=12, num_blocks=40)
        yield bench
        bench.close()


def warm(bench: Bench, tokens: list[int]) -> None:
    """Have a prompt in the host pool and not on the GPU."""
    bench.submit(tokens)
    for _ in range(8):
        bench.step()
        bench.run_device()
        bench.answer_all()
    bench.reset(connector_too=False)


def test_what_cannot_be_named_is_in_no_event() -> None:
    """vLLM's own prefix cache is off, so that it has no hashes; or they are of larger blocks than ours."""
    request = SimpleNamespace(block_hashes=[b"a", b"b"], all_token_ids=list(range(2 * CHUNK_TOKENS)), cache_salt=None)
    keys = [b"0" * 32, b"1" * 32]
    states: Any = {"r": SimpleNamespace(request=request, keys=keys, content=None)}
    queue = EventQueue(states, CHUNK_TOKENS, CHUNK_TOKENS)
    entries = [Entry(key, b"", i, CHUNK_TOKENS, i, 1) for i, key in enumerate(keys)]
    for entry in entries:
        queue.reserved(entry)
        queue.ready(entry)
    assert [(e.block_hashes, e.parent_block_hash) for e in queue.take()] == [
        ([external(b"a")], None),
        ([external(b"b")], external(b"a")),
    ]
    for hashes, hash_tokens in (([], CHUNK_TOKENS), ([b"a"], 2 * CHUNK_TOKENS)):
        request.block_hashes = hashes
        queue = EventQueue(states, CHUNK_TOKENS, hash_tokens)
        queue.reserved(entries[0])
        queue.ready(entries[0])
        queue.gone(entries[0])
        assert queue.take() == []


def test_an_adapter_is_named_as_vllm_names_it() -> None:
    lora = SimpleNamespace(name="lore", adapter_id=7)
    hashes = [bytes([i]) for i in range(4)]
    request = SimpleNamespace(block_hashes=hashes, all_token_ids=list(range(99)), cache_salt="s", lora_request=lora)
    keys = [b"0" * 32, b"1" * 32]
    states: Any = {"r": SimpleNamespace(request=request, keys=keys, content=None)}
    queue = EventQueue(states, CHUNK_TOKENS, CHUNK_TOKENS // 2)
    for i, key in enumerate(keys):
        entry = Entry(key, b"", i, CHUNK_TOKENS, i, 1)
        queue.reserved(entry)
        queue.ready(entry)
    assert [(e.lora_id, e.lora_name, e.extra_keys) for e in queue.take()] == [
        (7, "lore", [("lore", "s"), ("lore",)]),
        (7, "lore", [("lore",), ("lore",)]),
    ]


def test_events_that_nobody_takes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "_MAX_WAITING", 2)
    request = SimpleNamespace(
        block_hashes=[bytes([i]) for i in range(5)], all_token_ids=[0] * 5 * CHUNK_TOKENS, cache_salt="s"
    )
    keys = [bytes([i]) * 32 for i in range(5)]
    states: Any = {"r": SimpleNamespace(request=request, keys=keys, content=None)}
    queue, view = EventQueue(states, CHUNK_TOKENS, CHUNK_TOKENS), set[Any]()
    entries = [Entry(key, b"", i, CHUNK_TOKENS, i, 1) for i, key in enumerate(keys)]
    for entry in entries:
        queue.reserved(entry)
        queue.ready(entry)
    for entry in entries[1:]:
        queue.gone(entry)
    events = queue.take()
    assert events[0].extra_keys == [("s",)] and events[1].extra_keys is None
    assert (events[0].lora_id, events[0].lora_name) == (None, None)
    replay(events, view)
    assert view == {external(b"\0")}, "what was told is true, and what was not told is not taken back"


def test_stats_travel_and_add_up() -> None:
    first = TierKVStats(data={"sums": {"loads": 1}, "levels": {"connected": 0}, "times": {"load_seconds": [0.5]}})
    second = TierKVStats(
        data={"sums": {"loads": 2, "chunks:host": 3}, "levels": {"connected": 1}, "times": {"load_seconds": [1.5]}}
    )
    both = first.aggregate(TierKVStats(data=msgspec.msgpack.decode(msgspec.msgpack.encode(second.data))))
    assert both.data == {
        "sums": {"loads": 3, "chunks:host": 3},
        "levels": {"connected": 1},
        "times": {"load_seconds": [0.5, 1.5]},
    }
    assert both.reduce() == {"loads": 3, "chunks:host": 3, "load_seconds (count)": 2, "load_seconds (mean)": 1.0}
    assert not both.is_empty()
    both.reset()
    assert both.is_empty() and TierKVStats().is_empty()


def test_prometheus_has_every_metric_of_every_engine() -> None:
    registry = prometheus_client.CollectorRegistry()
    kinds = (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram)
    types = {kind: functools.partial(kind, registry=registry) for kind in kinds}
    config = SimpleNamespace(kv_transfer_config=None)
    prom = TierKVPromMetrics(config, types, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    data = {"sums": {"chunks:disk": 4, "of another version": 1}, "levels": {"connected": 1}, "times": {}}
    prom.observe(data | {"times": {"load_seconds": [0.003, 9.0]}}, engine_idx=1)

    def value(name: str, engine: str, **labels: str) -> float | None:
        return registry.get_sample_value(PREFIX + name, {"model_name": "m", "engine": engine} | labels)

    assert (value("chunks_total", "1", source="disk"), value("chunks_total", "0", source="disk")) == (4, 0)
    assert (value("connected", "1"), value("load_seconds_count", "1")) == (1, 2)
    assert (value("load_seconds_bucket", "1", le="0.005"), value("load_seconds_bucket", "1", le="5.0")) == (1, 1)
    assert {name for (_, key) in prom._children for name in [key.partition(":")[0]]} == set(METRICS)


def test_degraded_time_is_that_without_a_server_where_there_should_be_one(bench: Bench) -> None:
    now = [100.0]
    bench.sched.membership.adopt()
    collector = Collector(bench.sched, lambda: now[0])
    collector.stepped()
    now[0] += 5.0
    collector.stepped()
    bench.client.disconnect()
    collector.stepped()
    for _ in range(2):
        now[0] += 2.0
        collector.stepped()
    stats = collector.take()
    assert stats is not None
    assert (stats.data["sums"]["degraded_seconds"], stats.data["levels"]["connected"]) == (4.0, 0)


def test_a_fault_ends_what_is_told_and_nothing_else(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("tierkv"), "disabled", False)
    config = SimpleNamespace(kv_events_config=SimpleNamespace(enable_kv_cache_events=True))
    observer = Observer(bench.sched, config, BLOCK_TOKENS)
    assert bench.sched.index.watcher is not None

    def fail() -> None:
        raise RuntimeError("the test's fault")

    monkeypatch.setattr(observer._collector, "stepped", fail)
    for _ in range(3):
        observer.stepped()
    assert (observer.take_stats(), observer.take_events()) == (None, [])
    assert bench.sched.index.watcher is None
    assert caplog.text.count("metrics, events and traces end here; caching goes on") == 1
    warm(bench, list(range(2 * CHUNK_TOKENS + 1)))
    assert bench.sched.counters["spilled"] == 2


def test_sources_add_up_to_what_vllm_loads(bench: Bench) -> None:
    observer = Observer(bench.sched, SimpleNamespace(), BLOCK_TOKENS)
    tokens = list(range(3 * CHUNK_TOKENS + 1))
    warm(bench, tokens)
    request = bench.new_request(tokens)
    keys = bench.add(request)
    for key, source in zip(keys, ("host", "disk", "shared"), strict=False):
        entry = bench.sched.index.peek(key)
        assert entry is not None
        entry.source = source
    begin, num = BLOCK_TOKENS, 3 * CHUNK_TOKENS - BLOCK_TOKENS
    observer.asked(request, begin)
    observer.admitting(request, num)
    assert observer.sources(request, num) == {
        "host": CHUNK_TOKENS - BLOCK_TOKENS,
        "disk": CHUNK_TOKENS,
        "shared": CHUNK_TOKENS,
    }
    other = SimpleNamespace(request_id="b")
    assert observer.sources(other, 96) == {"host": 96}, "of a load that is not ours to tell"


def test_a_prefetch_that_is_over_within_a_step_is_timed(bench: Bench) -> None:
    observer = Observer(bench.sched, SimpleNamespace(), BLOCK_TOKENS)
    request = bench.new_request(list(range(3 * CHUNK_TOKENS + 1)))
    bench.add(request)
    observer.added(request)
    bench.answer_all()
    bench.step()
    observer.stepped()
    assert not bench.sched.prefetch.plans
    stats = observer.take_stats()
    assert stats is not None
    assert len(stats.data["times"]["prefetch_seconds"]) == stats.data["sums"]["lookups"] == 1


@pytest.mark.parametrize(("value", "wanted"), [("1", True), ("0", False), ("", False), (None, False)])
def test_the_trace_is_wanted_where_the_variable_says_so(value: str | None, wanted: bool) -> None:
    assert trace_wanted({} if value is None else {"TIERKV_TRACE": value}) is wanted


def lines_of(bench: Bench, request: Request, lines: list[str]) -> list[str]:
    prefix = f"trace {request.request_id}: "
    return [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]


def test_a_trace_says_that_the_deadline_ended_the_wait(bench: Bench) -> None:
    lines: list[str] = []
    tracer = Tracer(bench.sched, now_of(bench), lines.append)
    request = bench.new_request(list(range(3 * CHUNK_TOKENS + 1)))
    bench.add(request)
    tracer.added(request)
    bench.step()
    tracer.looked()
    bench.now += DEADLINE_S + 1
    tracer.admitted(request, 0, Counter(), 0)
    said = lines_of(bench, request, lines)
    assert said[0].endswith(f"asking the store server, at most {DEADLINE_S:g} s")
    assert said[-1] == "claimed nothing; stopped there: the store server had not answered"
