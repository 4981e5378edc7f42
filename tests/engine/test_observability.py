"""What a real engine tells: metrics at vLLM's own endpoint, KV events under vLLM's own hashes, the trace of a request.

On the wanted version of vLLM (``TIERKV_VLLM``): see scripts/test-matrix.
"""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from api_server import api_server
from engine_process import CHUNK_TOKENS, Engine, Lab, Prompts, drain
from tierkv_connector.stats import METRICS, PREFIX, SOURCES
from vllm_versions import wanted

pytestmark = pytest.mark.engine

PROMPTS = Prompts(seed=12)
PAYLOAD_NBYTES = CHUNK_TOKENS * 4096
VERSION = tuple(int(word) for word in wanted().split(".")[:2])

offline = pytest.mark.skipif(
    VERSION < (0, 28), reason="before 0.28 vLLM's LLM class drops what was counted in a step without output"
)


def samples(text: str) -> dict[str, float]:
    """Return what Prometheus would read, by name, with our label's value behind a colon; vLLM's labels are left out."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values = [value for name, value in sample.labels.items() if name in ("source", "reason")]
            if "le" not in sample.labels:
                found[":".join([sample.name, *values])] = sample.value
    return found


def ours(text: str) -> dict[str, float]:
    """Return our own samples without the prefix."""
    return {name.removeprefix(PREFIX): value for name, value in samples(text).items() if name.startswith(PREFIX)}


# -- metrics


@pytest.fixture(scope="module")
def measured(module_lab: Lab, model: Path) -> Engine:
    return module_lab.engine(model, {"disk_dir": module_lab.disk()}, disable_log_stats=False)


def test_every_metric_is_there_from_the_start(measured: Engine) -> None:
    shown = ours(measured.call("metrics"))
    for name, metric in METRICS.items():
        suffix = {"counter": "_total", "gauge": "", "histogram": "_count"}[metric.kind]
        for value in metric.values:
            assert f"{name}{suffix}" + (f":{value}" if value else "") in shown


@offline
def test_metrics_say_what_each_tier_gave(measured: Engine, module_lab: Lab) -> None:
    """A prompt computed, then from the host pool, then from disk, then one of which the GPU has half a chunk."""
    engine, prompt = measured, PROMPTS.new(300)
    before = samples(engine.call("metrics"))
    with engine.counting() as counters:
        engine.one(prompt)
        engine.counters()
        drain(module_lab.disk())
        engine.reset_gpu()
        engine.one(prompt)
        engine.clear_host()
        engine.one(prompt)
        engine.reset_gpu()
        engine.one(prompt[: CHUNK_TOKENS + 33], max_tokens=1)
        engine.one(prompt)
        engine.one(PROMPTS.new(80))  # a step more: what was counted in the last one is told in the next
    told = {name: value - before.get(name, 0.0) for name, value in samples(engine.call("metrics")).items()}
    risen = {name.removeprefix(PREFIX): value for name, value in told.items() if name.startswith(PREFIX)}

    assert counters["host_hits"] == 4 + 1 + 3 and counters["disk_hits"] == 4 and counters["missed"] == 4 + 1
    assert {s: risen[f"chunks_total:{s}"] for s in (*SOURCES, "missed")} == {
        "host": 8, "disk": 4, "shared": 0, "missed": 5
    }  # fmt: skip
    assert {s: risen[f"loaded_bytes_total:{s}"] for s in SOURCES} == {
        "host": 8 * PAYLOAD_NBYTES, "disk": 4 * PAYLOAD_NBYTES, "shared": 0
    }  # fmt: skip
    assert {s: risen[f"loaded_tokens_total:{s}"] for s in SOURCES} == {
        "host": 8 * CHUNK_TOKENS - 32, "disk": 4 * CHUNK_TOKENS, "shared": 0
    }  # fmt: skip
    assert risen["lookups_total"] == 6
    assert risen["loads_total"] == risen["load_seconds_count"] == 4
    assert risen["load_bytes_total"] == sum(risen[f"loaded_tokens_total:{s}"] for s in SOURCES) * 4096
    assert risen["store_seconds_count"] == counters["spilled"] == 5
    assert risen["store_bytes_total"] == 5 * PAYLOAD_NBYTES
    assert risen["prefetch_seconds_count"] == counters["plans"] >= 1
    assert not any(value for name, value in risen.items() if name.startswith(("dropped_chunks", "load_failures")))
    assert risen["degraded_seconds_total"] == 0 and ours(engine.call("metrics"))["connected"] == 1
    check_against_vllm(told)


def check_against_vllm(told: dict[str, float]) -> None:
    """Check that our tokens are those that vLLM counted, in all and, where it knows them, by source."""
    tokens = {source: told[f"{PREFIX}loaded_tokens_total:{source}"] for source in SOURCES}
    assert sum(tokens.values()) == told["vllm:external_prefix_cache_hits_total"]
    if VERSION >= (0, 32):
        names = {"host": "host", "disk": "disk", "shared": "external_unspecified"}
        theirs = {s: told.get(f"vllm:prompt_tokens_cached_by_source_total:{names[s]}", 0.0) for s in SOURCES}
        assert theirs == tokens


def test_a_lost_store_server_shows(lab: Lab, model: Path) -> None:
    engine = lab.engine(model, {"server": "unix:///nonexistent/tierkv.sock"}, disable_log_stats=False)
    engine.one(PROMPTS.new(200))
    time.sleep(0.3)
    engine.one(PROMPTS.new(200))
    shown = ours(engine.call("metrics"))
    assert shown["connected"] == 0
    assert shown["degraded_seconds_total"] >= 0.3
    assert shown["dropped_chunks_total:not_sent"] >= 3
    engine.stop()


@offline
def test_a_failed_load_shows(lab: Lab, model: Path) -> None:
    engine = lab.engine(
        model, {"server": "off"}, disable_log_stats=False, transfer={"kv_load_failure_policy": "recompute"}
    )
    prompt = PROMPTS.new(200)
    engine.one(prompt)
    engine.reset_gpu()
    engine.call("fail_loads", num=1)
    engine.one(prompt)
    engine.one(PROMPTS.new(80))
    shown = ours(engine.call("metrics"))
    assert shown["load_failures_total"] == 1 and shown["loads_total"] == 1
    assert shown["load_seconds_count"] == 0, "a copy that failed has no duration"
    assert shown["degraded_seconds_total"] == 0, "an engine without a store server by choice is not degraded"
    engine.stop()


# -- KV events


def replay(events: list[dict[str, Any]], held: dict[str, set[Any]]) -> None:
    """Do what a router does: keep the hashes of what is stored, by medium."""
    for event in events:
        if event["type"] == "BlockStored":
            assert len(event["token_ids"]) == len(event["block_hashes"]) * event["block_size"]
            held.setdefault(event["medium"], set()).update(event["block_hashes"])
        elif event["type"] == "BlockRemoved":
            assert held[event["medium"]] >= set(event["block_hashes"]), "what was never stored is removed"
            held[event["medium"]] -= set(event["block_hashes"])
        else:
            held["GPU"] = set()


def check_view(engine: Engine, prompts: list[list[int]], held: dict[str, set[Any]]) -> int:
    """Check that a router knows exactly the prompts' chunks that are in the host pool; return how many there are."""
    num_there = 0
    for prompt in prompts:
        hashes = engine.call("block_hashes", prompt=prompt)
        for i, digest in enumerate(engine.call("in_host", prompt=prompt)):
            names = set(hashes[2 * i : 2 * i + 2])
            assert names and (names <= held["CPU"] if digest else names.isdisjoint(held["CPU"]))
            num_there += digest is not None
    assert len(held["CPU"]) == 2 * num_there
    return num_there


def test_events_say_what_is_in_the_host_pool(lab: Lab, model: Path) -> None:
    """In a pool of 8 slots, so that prompts push each other out; then from disk; then after a reset."""
    engine = lab.engine(
        model,
        {"disk_dir": lab.disk(), "host_bytes": f"{8 * 256 + 16}KiB"},
        kv_events_config={"enable_kv_cache_events": True, "publisher": "null"},
    )
    engine.call("events")
    prompts = [PROMPTS.new(300) for _ in range(4)]
    held: dict[str, set[Any]] = {"CPU": set(), "GPU": set()}
    everything: list[dict[str, Any]] = []
    for prompt in prompts:
        engine.one(prompt)
        engine.counters()
        events = engine.call("events")
        everything += events
        replay(events, held)
    drain(lab.disk())
    assert check_view(engine, prompts, held) == 8
    assert any(event["type"] == "BlockRemoved" and event["medium"] == "CPU" for event in everything)
    check_names(prompts, everything)

    engine.reset_gpu()
    with engine.counting() as counters:
        engine.one(prompts[0])
    assert counters["disk_hits"] == 4
    engine.one(PROMPTS.new(40))
    replay(engine.call("events"), held)
    assert check_view(engine, prompts, held) == 8
    assert {h for h in engine.call("block_hashes", prompt=prompts[0])[:8]} <= held["CPU"]

    engine.call("reset_all")
    engine.one(PROMPTS.new(40))
    replay(engine.call("events"), held)
    assert held["CPU"] == set()
    engine.stop()


def check_names(prompts: list[list[int]], events: list[dict[str, Any]]) -> None:
    """Check that our events name blocks as vLLM's own do: same hash, same parent, same tokens."""
    stored = [event for event in events if event["type"] == "BlockStored"]
    gpu = {tuple(e["block_hashes"]): e for e in stored if e["medium"] == "GPU"}
    theirs = {h for hashes in gpu for h in hashes}
    chunks = [e for e in stored if e["medium"] == "CPU"]
    assert len(chunks) == 4 * len(prompts)
    assert {h for e in chunks for h in e["block_hashes"]} <= theirs
    tokens = {tuple(p[i : i + CHUNK_TOKENS]) for p in prompts for i in range(0, 256, CHUNK_TOKENS)}
    assert {tuple(e["token_ids"]) for e in chunks} == tokens
    assert sum(e["parent_block_hash"] is None for e in chunks) == len(prompts)
    assert {e["parent_block_hash"] for e in chunks} - {None} <= theirs


def test_without_events_nothing_is_kept(measured: Engine) -> None:
    """Their bookkeeping is there only where somebody listens."""
    assert measured.call("watched") is False


# -- the trace


def traced(engine: Engine) -> list[str]:
    """Return the lines of the trace, without what comes before a request's name and without times."""
    lines = re.findall(r"trace \S+?: (.*)", engine.log.read_text())
    return [re.sub(r"[\d.]+ ms", "T ms", line) for line in lines]


def test_a_trace_follows_a_request(lab: Lab, model: Path) -> None:
    engine = lab.engine(model, {"disk_dir": lab.disk()}, env={"TIERKV_TRACE": "1"})
    prompt = PROMPTS.new(300)
    engine.one(prompt)
    engine.counters()
    drain(lab.disk())
    first = traced(engine)
    assert first[0].startswith("planned chunks 0 to 4 of 4 (0 on the GPU, 0 in the host pool)")
    assert first[-2].startswith("claimed nothing; stopped there: ")
    assert "no further whole chunk" not in first[-2]
    assert first[-1] == "finished"

    engine.reset_gpu()
    engine.one(prompt)
    assert traced(engine)[len(first) :] == [
        "planned chunks 4 to 4 of 4 (0 on the GPU, 4 in the host pool)",
        "claimed 256 tokens (host 256), up to chunk 4; stopped there: "
        "the prompt has no further whole chunk before its last token",
        "loaded 256 tokens in T ms",
        "finished",
    ]
    seen = len(traced(engine))
    engine.clear_host()
    engine.one(prompt + PROMPTS.new(100))
    assert traced(engine)[seen:] == [
        "planned chunks 0 to 6 of 6 (0 on the GPU, 0 in the host pool), asking the store server, at most 30 s",
        "matched 4 chunks (disk 4) after T ms",
        "fetched 4 of 6 chunks (disk 4) after T ms",
        "claimed 256 tokens (disk 256), up to chunk 4; stopped there: no more is stored",
        "loaded 256 tokens in T ms",
        "finished",
    ]
    engine.one(PROMPTS.new(20))
    assert "keeps to vLLM's own cache: it has no whole chunk, or its kind is not served" in traced(engine)
    engine.stop()


def test_a_load_that_is_part_of_its_step_is_told_alike(lab: Lab, model: Path) -> None:
    """VLLM reports nothing of it, and asks for its source before it is planned."""
    engine = lab.engine(
        model,
        {"disk_dir": lab.disk(), "sync_load_bytes": 16 * PAYLOAD_NBYTES},
        env={"TIERKV_TRACE": "1"},
        disable_log_stats=False,
    )
    prompt = PROMPTS.new(300)
    engine.one(prompt)
    engine.counters()
    drain(lab.disk())
    engine.clear_host()
    engine.one(prompt)
    engine.one(PROMPTS.new(80))
    shown, lines = samples(engine.call("metrics")), traced(engine)
    assert any(line.startswith("claimed 256 tokens (disk 256), up to chunk 4, loaded with the step;") for line in lines)
    assert not any("claimed nothing" in line for line in lines[3:-3])
    assert shown[f"{PREFIX}loaded_tokens_total:disk"] == 256
    assert shown[f"{PREFIX}loads_total"] == shown[f"{PREFIX}load_seconds_count"] == 1
    check_against_vllm(shown)
    engine.stop()


def test_without_the_variable_nothing_is_traced(measured: Engine) -> None:
    measured.one(PROMPTS.new(100))
    assert not traced(measured)


# -- vLLM's own server, in processes of its own


@pytest.fixture(scope="module")
def server_url(module_lab: Lab, model: Path) -> Iterator[str]:
    """An OpenAI server with its engine in another process: what is counted there has to reach its endpoint."""
    transfer = {
        "kv_connector": "TierKVConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"host_bytes": "64MiB", "chunk_tokens": CHUNK_TOKENS, "server": "off"},
    }
    log = module_lab.directory / "server.log"
    with api_server(model, log, transfer, "--skip-tokenizer-init", VLLM_SERVER_DEV_MODE="1") as url:
        yield url


def complete(url: str, prompt: list[int]) -> None:
    body = {"model": "m", "max_tokens": 2, "temperature": 0, "prompt": prompt, "detokenize": False, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=60).close()


def test_the_endpoint_of_vllm_shows_ours(server_url: str) -> None:
    prompt = PROMPTS.new(200)
    complete(server_url, prompt)
    urllib.request.urlopen(urllib.request.Request(f"{server_url}/reset_prefix_cache", method="POST"), timeout=30)
    complete(server_url, prompt)
    complete(server_url, PROMPTS.new(80))
    with urllib.request.urlopen(f"{server_url}/metrics", timeout=30) as reply:
        told = samples(reply.read().decode())
    assert told[f"{PREFIX}chunks_total:host"] == 3
    assert told[f"{PREFIX}loaded_tokens_total:host"] == 3 * CHUNK_TOKENS
    assert told[f"{PREFIX}loaded_bytes_total:host"] == 3 * PAYLOAD_NBYTES
    assert told[f"{PREFIX}load_seconds_count"] == told[f"{PREFIX}loads_total"] == 1
    assert told[f"{PREFIX}store_seconds_count"] >= 3
    assert told[f"{PREFIX}lookups_total"] == 3
    check_against_vllm(told)
