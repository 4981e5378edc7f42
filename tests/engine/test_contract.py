"""The rules of vLLM's connector interface whose breach kills an engine, leaks or corrupts: one test a rule, by number.

``scripts/mutations.py`` takes our guard of each out and shows that its test fails then.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_process import CHUNK_TOKENS, Answer, Engine, EngineError, Lab, Prompts, drain, server_pid
from leaks import stop_process
from records import wait_until
from seeded_model import write_seeded_llama
from tierkv.layout import Shard
from tierkv_connector.compat import BlockTables
from tierkv_connector.connector import TierKVConnector
from tierkv_connector.metadata import TierKVMetadata
from tierkv_connector.syncload import SyncLoads

pytestmark = pytest.mark.engine

PROMPTS = Prompts(seed=99)
RECOMPUTE = {"kv_load_failure_policy": "recompute"}
NUM_CHUNKS = 4
Cold = Callable[..., Answer]


@pytest.fixture(scope="module")
def disk(module_lab: Lab) -> Path:
    return module_lab.disk("contract")


@pytest.fixture(scope="module")
def shared_engine(module_lab: Lab, model: Path, disk: Path) -> Engine:
    return module_lab.engine(model, {"disk_dir": disk}, transfer=RECOMPUTE)


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """An engine; after the test nothing may be held by a request."""
    yield shared_engine
    shared_engine.abort_all()
    wait_until(lambda: set(shared_engine.call("leases").values()) == {0})  # a fetch may be under way


def new_prompt(num_chunks: int = NUM_CHUNKS) -> list[int]:
    return PROMPTS.new(num_chunks * CHUNK_TOKENS + 20)


def stored(engine: Engine, disk: Path, num_chunks: int = NUM_CHUNKS) -> tuple[list[int], Answer]:
    """Return a prompt that is on the disk and nowhere else, and what a GPU hit of it gives."""
    prompt = new_prompt(num_chunks)
    engine.one(prompt)
    hit = engine.one(prompt)
    engine.counters()
    drain(disk)
    engine.clear_host()
    return prompt, hit


def test_01_the_question_is_asked_every_step_and_work_begins_before_it(engine: Engine, disk: Path) -> None:
    """It changes nothing however often it is asked; and what is fetched is there when the budget leaves room to ask."""
    prompt, hit = stored(engine, disk)
    for _ in range(4):
        engine.add(f"busy{_}", PROMPTS.new(2000), max_tokens=1)
    engine.step()
    engine.call("asked")
    engine.add("late", prompt)
    wait_until(lambda: None not in engine.call("in_host", prompt=prompt)[:NUM_CHUNKS])
    assert not engine.call("asked"), "nobody has asked for it yet, and all of it is fetched"
    engine.finish("late", *(f"busy{i}" for i in range(4)))
    engine.clear_host()
    stop_process(server_pid(disk))
    try:
        before = engine.call("stat")["counters"]["plans"]
        engine.call("asked")
        engine.add("waits", prompt)
        engine.step(300)
        ((name, num_computed, answer, times),) = engine.call("asked")
        assert (name, num_computed, answer) == ("waits", 0, None) and times >= 300
        planned = engine.call("stat")["counters"]["plans"] - before
        assert planned == 1, "it was planned when it came, and never by a question"
    finally:
        os.kill(server_pid(disk), signal.SIGCONT)
    assert engine.finish("waits")["waits"].bits == hit.bits


@pytest.mark.parametrize("sync_nbytes", [0, 1 << 30])
def test_02_the_last_token_is_never_claimed(engine: Engine, cold: Cold, sync_nbytes: int) -> None:
    """A claim of the whole prompt that is loaded within its step trips an assertion of vLLM's."""
    prompt = PROMPTS.new(NUM_CHUNKS * CHUNK_TOKENS)
    engine.one([*prompt, 1])
    engine.reset_gpu()
    engine.call("load_in_step", nbytes=sync_nbytes)
    engine.call("asked")
    try:
        answer = engine.one(prompt)
    finally:
        engine.call("load_in_step", nbytes=0)
    (claim,) = {row[2] for row in engine.call("asked") if row[2]}
    assert claim == answer.cached == (NUM_CHUNKS - 1) * CHUNK_TOKENS
    assert answer.distance(cold(prompt)) < 1e-4


def test_03_every_load_is_reported_once(engine: Engine, cold: Cold) -> None:
    """One that is well, one that fails, and one whose request is aborted meanwhile, after which no block is held."""
    prompts = [new_prompt() for _ in range(3)]
    engine.run(*prompts)
    engine.reset_gpu()
    engine.call("watch")
    engine.call("fail_loads", num=1)
    for name, prompt in zip(("fails", "aborted", "well"), prompts, strict=True):
        engine.add(name, prompt)
    engine.step()
    assert set(engine.call("states").values()) == {"WAITING_FOR_REMOTE_KVS"}
    engine.call("abort", names=["aborted"])
    answers = engine.finish("fails", "well")
    engine.call("idle")
    assert sorted(engine.call("seen")["reported"]) == ["aborted", "fails", "well"]
    for name, prompt in (("fails", prompts[0]), ("well", prompts[2])):
        assert answers[name].distance(cold(prompt)) < 1e-4
    assert engine.call("leases")["gpu_blocks"] == 0


def test_06_a_failed_load_is_told_in_the_one_way_that_this_vllm_takes(engine: Engine, cold: Cold) -> None:
    """By its request where vLLM has that (0.30), for with several groups bad blocks raise; and no such load is sync."""
    prompt = new_prompt()
    engine.one(prompt)
    engine.reset_gpu()
    engine.call("watch")
    engine.call("fail_loads", num=1)
    assert engine.one(prompt).distance(cold(prompt)) < 1e-4
    seen = engine.call("seen")
    (loaded,) = [job for loads in seen["loads"] for job in loads]
    blocks = sorted(block for piece in loaded for block in piece)
    told_by_request = tuple(map(int, engine.call("vllm_version").split(".")[:2])) >= (0, 30)
    assert seen["bad"] == ([] if told_by_request else blocks)
    assert SyncLoads(1 << 30, Shard(), num_tables=2).sync_nbytes == 0 < SyncLoads(1 << 30, Shard(), 1).sync_nbytes


def test_04_a_request_that_ends_keeps_no_blocks_of_ours(engine: Engine) -> None:
    """Not while it loads (vLLM would free them twice), nor where it never ran."""
    prompt = new_prompt()
    engine.one(prompt)
    engine.reset_gpu()
    engine.call("watch")
    engine.add("loading", prompt)
    engine.step()
    engine.add("never looked at", new_prompt())
    engine.call("abort", names=["loading", "never looked at"])
    engine.call("idle")
    engine.one(new_prompt())
    assert engine.call("seen")["kept"] == [False, False, False]
    assert engine.call("leases")["gpu_blocks"] == 0


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_05_a_load_that_failed_is_not_offered_again(engine: Engine, disk: Path, cold: Cold, tier: str) -> None:
    prompt, _ = stored(engine, disk)
    if tier == "host":
        engine.one(prompt)
        engine.reset_gpu()
    engine.call("fail_loads", num=1)
    engine.call("asked")
    with engine.counting() as counters:
        answer = engine.one(prompt)
    assert answer.distance(cold(prompt)) < 1e-4 and answer.reason == "length"
    assert [row[2] for row in engine.call("asked") if row[2] is not None] == [NUM_CHUNKS * CHUNK_TOKENS, 0]
    assert counters["load_failures"] == 1


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_05_the_other_policy_ends_that_request_alone(failing: Engine, module_lab: Lab, cold: Cold, tier: str) -> None:
    prompt, hit = stored(failing, module_lab.disk("failing"))
    if tier == "host":
        failing.one(prompt)
        failing.reset_gpu()
    other = new_prompt()
    failing.call("fail_loads", num=1)
    doomed, well = failing.run(prompt, other, batch=True)
    assert doomed.reason == "error" and well.distance(cold(other)) < 1e-4
    failing.call("idle")
    wait_until(lambda: set(failing.call("leases").values()) == {0})
    failing.reset_gpu()
    assert failing.one(prompt).bits == hit.bits, "what is stored was not at fault"


@pytest.fixture(scope="module")
def failing(module_lab: Lab, model: Path) -> Engine:
    return module_lab.engine(
        model, {"disk_dir": module_lab.disk("failing")}, transfer={"kv_load_failure_policy": "fail"}
    )


def test_07_blocks_that_are_given_out_again_are_fenced_and_the_null_block_is_nobodys(engine: Engine) -> None:
    """Copies out of the GPU are held under way, while new requests get the blocks that they read."""
    engine.call("watch", hold=True)
    first = engine.one(new_prompt())
    assert first.cached == 0 and engine.call("leases")["stores"]
    engine.reset_gpu()
    for _ in range(8):  # until blocks go round
        engine.one(PROMPTS.new(1200), max_tokens=1)
    seen = engine.call("seen")
    reading: set[int] = set()
    num_reused = 0
    for given, fence, stores in zip(seen["given"], seen["fences"], seen["stores"], strict=True):
        reused = reading.intersection(given)
        num_reused += len(reused)
        assert reused <= set(fence), "what writes these blocks would not wait for the copies that read them"
        reading.update(block for ids in stores for block in ids)
    assert num_reused > 0 and 0 not in reading
    engine.call("let_go")
    engine.call("idle")


def test_08_only_what_is_computed_is_stored(engine: Engine, cold: Cold) -> None:
    """vLLM hashes blocks when it gives them out; the chunks that a step did not reach are not in any store."""
    first, second = PROMPTS.new(1000), new_prompt()
    engine.add("first", first, max_tokens=1)
    engine.add("second", second, max_tokens=1)
    engine.step()  # 1024 tokens: all of one, 24 of the other
    assert engine.call("states")["second"] == "RUNNING"
    there = engine.call("in_host", prompt=second)
    assert there == [None] * NUM_CHUNKS
    assert None not in engine.call("in_host", prompt=first)
    engine.step(4)
    assert None not in engine.call("in_host", prompt=second)
    engine.reset_gpu()
    assert engine.one(second).distance(cold(second)) < 1e-4


STATES = ("unscanned", "planned", "loading", "running", "preempted", "finished")


@pytest.mark.parametrize("connector_too", [False, True])
@pytest.mark.parametrize("state", STATES)
def test_09_the_cache_is_reset_in_every_state(
    engine: Engine, disk: Path, cold: Cold, state: str, connector_too: bool
) -> None:
    prompt, _ = stored(engine, disk)
    if state == "loading":
        engine.one(prompt, max_tokens=1)
        engine.reset_gpu()
    if state == "planned":
        stop_process(server_pid(disk))
    engine.add("r", prompt, max_tokens=8)
    if state != "unscanned":
        engine.step()
    if state in ("running", "preempted"):
        engine.step_until(lambda: engine.call("states") == {"r": "RUNNING"})
    if state == "finished":
        answer = engine.finish("r")["r"]
    running_too = state == "preempted"
    engine.call("reset", running=running_too, connector=connector_too)
    if state == "planned":
        os.kill(server_pid(disk), signal.SIGCONT)
    if state != "finished":
        answer = engine.finish("r")["r"]
    assert answer.distance(cold(prompt)) < 1e-4 and answer.reason == "length"
    engine.call("idle")
    wait_until(lambda: set(engine.call("leases").values()) == {0})
    engine.reset_gpu()
    with engine.counting() as counters:
        again = engine.one(prompt)
    hits = counters["host_hits"] + counters["disk_hits"]
    assert hits == (0 if connector_too else NUM_CHUNKS), "what is stored is cut off by a reset of the connector alone"
    assert again.distance(cold(prompt)) < 1e-4
    engine.reset_gpu()
    engine.call("rejoin")  # the next test finds what the last one stored


class Breaking:
    """A half that raises whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("the test's fault")

    def __bool__(self) -> bool:
        return True


Output = SimpleNamespace(
    finished_recving=None, kv_connector_worker_meta=None, scheduled_new_reqs=[], finished_req_ids=set(),
    scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set(), num_computed_tokens=[]),
)  # fmt: skip
CALLS: dict[str, tuple[Any, ...]] = {
    "on_new_request": (SimpleNamespace(),),
    "get_num_new_matched_tokens": (SimpleNamespace(), 0),
    "update_state_after_alloc": (SimpleNamespace(request_id="r"), SimpleNamespace(), 0),
    "build_connector_meta": (Output,),
    "update_connector_output": (Output,),
    "request_finished": (SimpleNamespace(), []),
    "request_finished_all_groups": (SimpleNamespace(), ([],)),
    "get_external_cache_hit_sources": (SimpleNamespace(), 64),
    "take_events": (),
    "get_kv_connector_stats": (),
    "has_pending_push_work": (),
    "reset_cache": (),
    "bind_gpu_block_pool": (SimpleNamespace(),),
    "handle_preemptions": (TierKVMetadata(),),
    "wait_for_save": (),
    "build_connector_worker_meta": (),
    "unregister_kv_caches": (),
    "restore_kv_caches": (),
    "weights_change": (),
    "weights_version": ("step-1",),
}


@pytest.mark.parametrize("method", CALLS)
def test_10_an_exception_of_ours_does_not_reach_vllm(method: str, caplog: pytest.LogCaptureFixture) -> None:
    """What fails is said once; from then on the half answers that nothing is cached."""
    connector: Any = TierKVConnector.__new__(TierKVConnector)
    connector._broken, connector._claims, connector._tables = False, {}, BlockTables()
    connector._sched = connector._work = connector._seen = Breaking()
    connector._connector_metadata = TierKVMetadata()
    connector._kv_cache_config = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))]
    )
    first = getattr(connector, method)(*CALLS[method])
    assert connector._broken
    assert getattr(connector, method)(*CALLS[method]) == first
    assert caplog.text.count("TierKV failed in") == 1 and "serving goes on" in caplog.text
    expected = {"get_num_new_matched_tokens": (0, False), "request_finished": (False, None), "reset_cache": True}
    assert method not in expected or first == expected[method]


@pytest.mark.parametrize("method", ["load", "load_now", "store"])
def test_10_a_device_that_takes_no_copies_fails_them_and_nothing_else(engine: Engine, cold: Cold, method: str) -> None:
    """A load that cannot be started is reported: its request neither waits for ever nor reads what is not there."""
    prompt = new_prompt()
    engine.one(prompt)
    engine.reset_gpu()
    engine.call("load_in_step", nbytes=1 << 30 if method == "load_now" else 0)
    engine.call("break_device", method=method)
    longer = prompt + PROMPTS.new(100)
    try:
        assert engine.one(longer).distance(cold(longer)) < 1e-4
    finally:
        engine.call("load_in_step", nbytes=0)
    engine.call("idle")
    engine.reset_gpu()
    assert engine.one(longer).distance(cold(longer)) < 1e-4


def test_11_an_idle_engine_is_kept_stepping_for_copies_on_the_device_only(engine: Engine, disk: Path) -> None:
    engine.call("watch", hold=True)
    engine.one(new_prompt(), max_tokens=1)
    assert engine.call("pending"), "copies out of the GPU are under way"
    stop_process(server_pid(disk))
    try:
        engine.call("let_go")
        engine.call("idle")
        assert not engine.call("pending"), "what the store server has not written yet keeps no engine stepping"
        assert engine.call("stat")["counters"]["store_queue_nbytes"] > 0
    finally:
        os.kill(server_pid(disk), signal.SIGCONT)
    engine.counters()


def several(*connectors: dict[str, Any]) -> dict[str, Any]:
    """Return the transfer configuration of an engine with several connectors."""
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": list(connectors)}}


@pytest.mark.parametrize("ours_first", [True, False])
def test_12_beside_another_connector_each_stores_and_either_may_load(
    module_lab: Lab, cold: Cold, model: Path, ours_first: bool
) -> None:
    """The other one is vLLM's example: files, loaded within the step, of whole prompts only."""
    disk, files = module_lab.disk(f"multi-{ours_first}"), module_lab.directory / f"files-{ours_first}"
    options = {"disk_dir": str(disk), "chunk_tokens": CHUNK_TOKENS, "host_bytes": "64MiB", "deadline_s": 30.0}
    options |= {"cost_gate": False, "sync_load_bytes": 0, "disk_bytes": "256MiB"}
    ours = {"kv_connector": "TierKVConnector", "kv_role": "kv_both", "kv_connector_extra_config": options}
    other = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    other["kv_connector_extra_config"] = {"shared_storage_path": str(files)}
    order = (ours, other) if ours_first else (other, ours)
    engine = module_lab.engine(model, {}, transfer=several(*order), disable_hybrid_kv_cache_manager=True)
    prompt = new_prompt()
    expected = cold(prompt)
    with engine.counting() as counters:
        assert engine.one(prompt).distance(expected) < 1e-4
    num_files = len(list(files.rglob("*.safetensors")))
    assert counters["spilled"] == counters["stored"] == NUM_CHUNKS and num_files == 4, "both have stored it"
    engine.reset_gpu()
    with engine.counting() as counters:
        answer = engine.one(prompt)
    assert answer.distance(expected) < 1e-4
    if ours_first:
        assert (counters["host_hits"], answer.cached) == (NUM_CHUNKS, NUM_CHUNKS * CHUNK_TOKENS)
    else:
        assert (counters["host_hits"], counters["load_nbytes"], counters["missed"]) == (0, 0, 0)
        assert answer.cached >= NUM_CHUNKS * CHUNK_TOKENS, "the other one's blocks, which it loaded, are counted as its"
    longer = prompt[: 3 * CHUNK_TOKENS] + PROMPTS.new(100)
    engine.reset_gpu()
    with engine.counting() as counters:
        answer = engine.one(longer)
    assert answer.distance(cold(longer)) < 1e-4
    assert (counters["host_hits"], answer.cached) == (3, 3 * CHUNK_TOKENS), "what the other one has not, ours has"
    engine.call("fail_loads", num=1)
    engine.reset_gpu()
    assert engine.call("reset_all")
    wait_until(lambda: set(engine.call("leases").values()) == {0})
    engine.stop()


def test_12_two_of_ours_are_refused_in_a_sentence(lab: Lab, model: Path) -> None:
    ours = {"kv_connector": "TierKVConnector", "kv_role": "kv_both"}
    one, other = (ours | {"kv_connector_extra_config": {"server": "off", "host_bytes": n}} for n in ("64MiB", "32MiB"))
    engine = lab.engine(model, {}, transfer=several(one, other))
    with pytest.raises(
        EngineError, match="a MultiConnector has TierKVConnector twice, and an engine has one host pool"
    ):
        engine.ready()


def test_a_burst_for_one_long_prefix_loads_it_once(engine: Engine, disk: Path, cold: Cold) -> None:
    """Whoever comes while it is fetched or loaded waits for that, and hits on the GPU: one fetch, one load."""
    prompt, _ = stored(engine, disk, num_chunks=20)
    names = [f"burst{i}" for i in range(10)]
    tails = [PROMPTS.new(30) for _ in names]
    engine.call("asked")
    with engine.counting() as counters:
        for name, tail in zip(names, tails, strict=True):
            engine.add(name, prompt[: 20 * CHUNK_TOKENS] + tail)
        answers = engine.finish(*names)
    assert {answers[name].cached for name in names} == {20 * CHUNK_TOKENS}
    assert (counters["disk_hits"], counters["host_hits"]) == (20, 0)
    assert counters["load_nbytes"] == 20 * engine.call("stat")["payload_nbytes"]
    claims = [row for row in engine.call("asked") if row[2]]
    assert len(claims) == 1, "one request loads, and what the others are told is that nothing is left to load"
    for name, tail in list(zip(names, tails, strict=True))[::4]:
        assert answers[name].distance(cold(prompt[: 20 * CHUNK_TOKENS] + tail)) < 1e-4


def test_13_keys_are_the_same_in_every_process(engine: Engine) -> None:
    """vLLM's own hashes are not, and they change between versions: no key of ours is one of them."""
    prompt = new_prompt()
    engine.one(prompt)
    keys = engine.call("keys", prompt=prompt)
    root = engine.call("root")
    code = (
        "import json, sys; from tierkv.keys import chain_keys;"
        "root, prompt, size = json.load(sys.stdin);"
        "print(json.dumps([key.hex() for key in chain_keys(bytes.fromhex(root), prompt, size)]))"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps([root, prompt, CHUNK_TOKENS]),
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(done.stdout) == keys
    assert set(keys).isdisjoint(str(each) for each in engine.call("block_hashes", prompt=prompt))


def test_14_other_weights_at_the_same_path_are_another_model(lab: Lab, cold: Cold) -> None:
    path, disk, prompt = lab.directory / "model", lab.disk(), new_prompt()
    write_seeded_llama(path)
    before = lab.engine(path, {"disk_dir": disk})
    before.one(prompt)
    before.counters()
    drain(disk)
    before.stop()
    path.rename(lab.directory / "old")
    write_seeded_llama(path, seed=1)
    after = lab.engine(path, {"disk_dir": disk})
    with after.counting() as counters:
        answer = after.one(prompt)
    assert (counters["disk_hits"], counters["missed"]) == (0, NUM_CHUNKS)
    assert answer.tokens != cold(prompt).tokens
