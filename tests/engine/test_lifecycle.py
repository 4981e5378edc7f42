"""Resets, aborts, engines without a store server, wrong options, and both ways for vLLM to find the connector."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_process import CHUNK_TOKENS, Answer, Engine, EngineError, Lab, Prompts, drain, server_pid
from leaks import stop_process
from records import wait_until

pytestmark = pytest.mark.engine

PROMPTS = Prompts(seed=6)

Cold = Callable[..., Answer]


@pytest.fixture(scope="module")
def disk(module_lab: Lab) -> Path:
    return module_lab.disk()


@pytest.fixture(scope="module")
def shared_engine(module_lab: Lab, model: Path, disk: Path) -> Engine:
    return module_lab.engine(model, {"disk_dir": disk})


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """An engine; after the test nothing may be held by a request."""
    shared_engine.abort_all()
    yield shared_engine
    shared_engine.call("idle")
    wait_until(lambda: set(shared_engine.call("leases").values()) == {0})


def goes_on(engine: Engine, cold: Cold) -> None:
    """Check that the engine serves, stores and loads."""
    prompt = PROMPTS.new(200)
    expected = cold(prompt)
    assert engine.one(prompt).distance(expected) < 1e-4
    engine.reset_gpu()
    with engine.counting() as counters:
        assert engine.one(prompt).distance(expected) < 1e-4
    assert counters["host_hits"] == 3


def test_aborting_a_request_that_waits_for_its_plan(engine: Engine, disk: Path, cold: Cold) -> None:
    prompt = PROMPTS.new(300)
    engine.one(prompt)
    engine.counters()
    drain(disk)
    engine.clear_host()
    stop_process(server_pid(disk))
    try:
        engine.add("doomed", prompt)
        engine.step(3)
        assert engine.call("states") == {"doomed": "WAITING"}
        assert engine.call("leases")["fetching"] > 0
        engine.call("abort", names=["doomed"])
        assert engine.call("leases")["num_leased"] == 0
        assert engine.one(PROMPTS.new(100)).reason == "length"
    finally:
        os.kill(server_pid(disk), signal.SIGCONT)
    goes_on(engine, cold)


def test_aborting_a_request_while_it_loads(engine: Engine, cold: Cold) -> None:
    prompt = PROMPTS.new(300)
    engine.one(prompt)
    engine.reset_gpu()
    engine.add("doomed", prompt)
    engine.step()
    assert engine.call("states") == {"doomed": "WAITING_FOR_REMOTE_KVS"}
    assert engine.call("leases")["pins"] == 4
    engine.call("abort", names=["doomed"])
    engine.call("idle")
    goes_on(engine, cold)


@pytest.mark.parametrize("num_steps", [0, 6])
def test_aborting_a_request_that_runs(engine: Engine, cold: Cold, num_steps: int) -> None:
    engine.add("doomed", PROMPTS.new(2000), max_tokens=100)
    engine.step_until(lambda: engine.call("states") == {"doomed": "RUNNING"})
    engine.step(num_steps)
    engine.call("abort", names=["doomed"])
    goes_on(engine, cold)


def test_aborting_a_request_that_was_never_looked_at(engine: Engine, cold: Cold) -> None:
    engine.add("doomed", PROMPTS.new(300))
    engine.call("abort", names=["doomed"])
    goes_on(engine, cold)


def test_two_requests_for_one_prefix_load_it_once(engine: Engine, cold: Cold) -> None:
    prompt, tails = PROMPTS.new(300), [PROMPTS.new(20), PROMPTS.new(20)]
    prompts = [prompt[:256] + tail for tail in tails]
    engine.one(prompt)
    engine.reset_gpu()
    with engine.counting() as counters:
        answers = engine.run(*prompts, batch=True)
    assert counters["host_hits"] == 4
    for answer, whole in zip(answers, prompts, strict=True):
        assert answer.cached == 4 * CHUNK_TOKENS
        assert answer.distance(cold(whole)) < 1e-4


@pytest.fixture(scope="module")
def resettable(module_lab: Lab, model: Path) -> Engine:
    return module_lab.engine(model, {"disk_dir": module_lab.disk("reset")})


def test_nothing_from_before_a_reset_is_hit(resettable: Engine, module_lab: Lab, cold: Cold) -> None:
    engine, prompt = resettable, PROMPTS.new(300)
    expected = cold(prompt)
    engine.one(prompt)
    engine.counters()
    drain(module_lab.disk("reset"))
    old_keys = engine.call("keys", prompt=prompt)
    assert engine.call("reset_all")
    assert set(engine.call("keys", prompt=prompt)).isdisjoint(old_keys)
    with engine.counting() as counters:
        answer = engine.one(prompt)
    assert answer.cached == 0
    assert counters["missed"] == 4
    assert answer.distance(expected) < 1e-4
    engine.reset_gpu()
    with engine.counting() as counters:
        assert engine.one(prompt).distance(expected) < 1e-4
    assert counters["host_hits"] == 4, "after it the host tier works as before"
    assert counters["stored"] == 0, "what is computed after a reset stays on this host"


def test_a_reset_while_a_request_loads(resettable: Engine, cold: Cold) -> None:
    engine, prompt = resettable, PROMPTS.new(300)
    engine.one(prompt)
    engine.reset_gpu()
    engine.add("loading", prompt)
    engine.step()
    assert engine.call("states") == {"loading": "WAITING_FOR_REMOTE_KVS"}
    engine.call("reset_all")
    answer = engine.finish("loading")["loading"]
    assert answer.distance(cold(prompt)) < 1e-4
    engine.call("idle")
    wait_until(lambda: set(engine.call("leases").values()) == {0})
    engine.reset_gpu()
    with engine.counting() as counters:
        assert engine.one(prompt).cached == 0
    assert counters["host_hits"] == 0, "a request that lived through a reset stored nothing"


def test_a_reset_while_a_request_runs(resettable: Engine, cold: Cold) -> None:
    """vLLM refuses to empty the GPU's part under a running request; ours is reset all the same."""
    engine, prompt = resettable, PROMPTS.new(2000)
    engine.add("running", prompt)
    engine.step()
    engine.call("reset_all")
    answer = engine.finish("running")["running"]
    assert answer.distance(cold(prompt)) < 1e-4
    wait_until(lambda: set(engine.call("leases").values()) == {0})
    assert engine.call("in_host", prompt=prompt) == [None] * (len(prompt) // CHUNK_TOKENS)


def test_without_a_store_server(lab: Lab, model: Path, cold: Cold) -> None:
    """Found by its module path alone: vLLM loads no plugin here."""
    no_plugin: dict[str, str | None] = {"VLLM_PLUGINS": ""}
    with pytest.raises(EngineError, match="TierKVConnector"):
        lab.engine(model, {"server": "off"}, env=no_plugin).ready()
    module = {"kv_connector_module_path": "tierkv_connector"}
    engine = lab.engine(model, {"server": "off"}, env=no_plugin, transfer=module)
    goes_on(engine, cold)
    assert not engine.call("connected")
    assert not list(lab.directory.rglob("tierkv.sock"))
    engine.stop()


def test_a_store_server_that_is_not_there(lab: Lab, model: Path, cold: Cold) -> None:
    """Found through the plugin: there is no module path."""
    engine = lab.engine(model, {"server": "unix:///nonexistent/tierkv.sock"})
    goes_on(engine, cold)
    assert not engine.call("connected")
    log = engine.log.read_text()
    assert log.count("the store server at /nonexistent/tierkv.sock is out") == 1
    assert "Serving goes on without it" in log
    engine.stop()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"host_byte": "1GiB", "server": "off"},
            "'host_byte' in kv_connector_extra_config is no option of TierKV",
        ),
        (
            {"host_bytes": "100TiB", "server": "off"},
            "host_bytes=100.0 TiB does not fit: this machine (or its cgroup) has",
        ),
        (
            {"disk_dir": "/dev/null/tierkv"},
            "disk_dir='/dev/null/tierkv' cannot be used: Not a directory; set disk_dir to a directory",
        ),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence_at_start(
    lab: Lab, model: Path, options: dict[str, Any], sentence: str
) -> None:
    engine = lab.engine(model, options)
    with pytest.raises(EngineError) as error:
        engine.ready()
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
    engine.stop()
