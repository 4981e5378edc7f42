"""When chunks go to which tier, and misses that nobody waits for: real engines, the servers that they launch, a Redis.

A tier's contents are counted in the tier: by the server's statistics and by Redis's own keys.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_process import CHUNK_TOKENS, Answer, Engine, Lab, Prompts, admin, drain, server_pid, shut_down
from leaks import stop_process
from records import wait_until
from servers import RedisServer
from tierkv.config import socket_path

pytestmark = pytest.mark.engine

PROMPTS = Prompts(seed=7)
PAYLOAD_NBYTES = 256 << 10

Cold = Callable[..., Answer]


@pytest.fixture(autouse=True)
def empty_redis(redis_server: RedisServer) -> None:
    redis_server.client().flushall()


def gpu_hit(reference: Engine, prompt: list[int]) -> Answer:
    """Run a prompt without connector, all of it on the GPU but what is computed again anyway."""
    reference.reset_gpu()
    reference.one(prompt, max_tokens=1)
    return reference.one(prompt)


def hits(counters: dict[str, int]) -> tuple[int, int, int, int]:
    """Return what a run hit in host, disk and shared tier, and what it missed."""
    return counters["host_hits"], counters["disk_hits"], counters["shared_hits"], counters["missed"]


def in_redis(redis: RedisServer, engine: Engine, *prompts: list[int]) -> int:
    """Return how many chunks of prompts Redis has."""
    names = {name.decode().rsplit(":", 1)[1] for name in redis.client().scan_iter("tierkv:1:*:{*}:*", count=1000)}
    return len(names & {key for prompt in prompts for key in engine.call("keys", prompt=prompt)})


def on_disk(engine: Engine, disk: Path, prompt: list[int]) -> list[bool]:
    """Return for each chunk of a prompt whether the server of ``disk`` has it on disk."""
    keys = engine.call("keys", prompt=prompt)
    with admin(disk) as client:
        rows = client.ask("TKV.LOCATE", {"keys": {engine.call("stat")["namespace"]: keys}})
    return ["disk" in chunk["tiers"] for chunk in rows[0]["chunks"]]


def tier(disk: Path, name: str) -> dict[str, Any]:
    """Return a tier's row of a server's statistics."""
    with admin(disk) as client:
        return next(dict(row) for row in client.ask("TKV.STAT")["tiers"] if row["name"] == name)


# -- second-use


def test_the_shared_tier_gets_what_was_used_twice(
    lab: Lab, model: Path, redis_server: RedisServer, reference: Engine
) -> None:
    """The default: disk at once, Redis at the second use; a hit on the GPU is one, too."""
    disk, other_disk = lab.disk("one"), lab.disk("two")
    host, gpu, once = (PROMPTS.new(276) for _ in range(3))
    engine = lab.engine(model, {"disk_dir": disk, "shared_url": redis_server.url})
    engine.run(host, gpu, once)
    engine.counters()
    drain(disk)
    assert tier(disk, "disk")["num_entries"] == 12
    assert in_redis(redis_server, engine, host, gpu, once) == 0

    with engine.counting() as counters:
        assert engine.one(gpu).cached == 4 * CHUNK_TOKENS
    assert hits(counters) == (0, 0, 0, 0)
    engine.reset_gpu()
    with engine.counting() as counters:
        assert engine.one(host).bits == gpu_hit(reference, host).bits
    assert hits(counters) == (4, 0, 0, 0)
    wait_until(lambda: in_redis(redis_server, engine, host, gpu) == 8)
    drain(disk)
    assert in_redis(redis_server, engine, once) == 0
    assert counters["stored"] == 0, "the server takes them from its disk: the engine sends nothing twice"

    far = lab.engine(model, {"disk_dir": other_disk, "shared_url": redis_server.url})
    for prompt in (host, gpu):
        with far.counting() as counters:
            assert far.one(prompt).bits == gpu_hit(reference, prompt).bits
        assert hits(counters) == (0, 0, 4, 0)
    with far.counting() as counters:
        assert far.one(once).cached == 0
    assert hits(counters) == (0, 0, 0, 4)


def test_a_second_engine_that_computes_a_prompt_is_a_second_use(
    lab: Lab, model: Path, redis_server: RedisServer, reference: Engine
) -> None:
    """Without a disk between, the first computation is declined, and the one by another engine of the node is not."""
    disk, prompt = lab.disk(), PROMPTS.new(276)
    options = {"disk_dir": disk, "shared_url": redis_server.url, "spill": {"disk": "never"}}
    for num_declined, num_stored in ((4, 0), (0, 4)):
        engine = lab.engine(model, options)
        with engine.counting() as counters:
            engine.one(prompt)
        assert hits(counters) == (0, 0, 0, 4)
        assert (counters.get("stores_declined", 0), counters["stored"]) == (num_declined, num_stored)
        drain(disk)
        assert in_redis(redis_server, engine, prompt) == num_stored
    assert tier(disk, "disk")["num_entries"] == 0
    engine.clear_host()
    with engine.counting() as counters:
        assert engine.one(prompt).bits == gpu_hit(reference, prompt).bits
    assert hits(counters) == (0, 0, 4, 0)


# -- on-evict


def test_the_disk_gets_what_leaves_a_small_host_pool(lab: Lab, model: Path, reference: Engine) -> None:
    """The pool has 8 chunks: what it has let go is on disk, what it may keep is not; and it comes back right."""
    disk = lab.disk()
    prompts = [PROMPTS.new(212) for _ in range(10)]
    options = {"spill": {"disk": "on-evict"}, "policy": {"host": "lru"}}  # what goes is what came first
    engine = lab.engine(model, {"disk_dir": disk, "host_bytes": 9 * PAYLOAD_NBYTES} | options)
    assert engine.call("stat")["num_slots"] == 8
    engine.run(*prompts[:1])
    engine.counters()
    assert tier(disk, "disk")["num_entries"] == 0, "the pool has room"
    with engine.counting() as counters:
        for prompt in prompts[1:]:
            engine.one(prompt)
            engine.counters()  # every chunk that was sent has been answered
    assert counters["missed"] == counters["spilled"] == 27
    num_evicted = engine.call("stat")["num_evicted"]
    assert num_evicted >= 22
    num_on_disk = 0
    for prompt in prompts:
        there, here = on_disk(engine, disk, prompt), [bool(d) for d in engine.call("in_host", prompt=prompt)]
        assert all(a or b for a, b in zip(there, here, strict=True)), "a chunk left the pool and is nowhere"
        num_on_disk += sum(there)
    assert num_evicted <= num_on_disk == tier(disk, "disk")["num_entries"] < 30
    assert num_on_disk == engine.counters()["stored"], "each was sent once"
    assert on_disk(engine, disk, prompts[-1]) == [False] * 3
    assert "not_saved" not in engine.counters()

    for prompt in prompts[:4]:
        engine.reset_gpu()
        with engine.counting() as counters:
            assert engine.one(prompt).bits == gpu_hit(reference, prompt).bits
        assert hits(counters) == (0, 3, 0, 0)
        assert counters["stored"] <= 8, "what came from the disk is not sent there again when it goes"
    assert all(on_disk(engine, disk, prompt) == [True] * 3 for prompt in prompts[:-2])


def test_what_a_burst_pushes_out_before_it_was_sent_is_counted(lab: Lab, model: Path) -> None:
    """The pool has 8 chunks, of which 4 are sent ahead: a prompt of 7 in one step pushes out 3 that were not."""
    disk = lab.disk()
    prompts = [PROMPTS.new(212), PROMPTS.new(212), PROMPTS.new(450)]
    engine = lab.engine(model, {"disk_dir": disk, "host_bytes": 9 * PAYLOAD_NBYTES, "spill": {"disk": "on-evict"}})
    for prompt in prompts:
        engine.one(prompt)
        engine.counters()
    num_nowhere = 0
    for prompt in prompts:
        there, here = on_disk(engine, disk, prompt), engine.call("in_host", prompt=prompt)
        num_nowhere += sum(not a and not b for a, b in zip(there, here, strict=True))
    assert engine.call("stat")["num_evicted"] == 5
    assert engine.counters()["not_saved"] == num_nowhere == 3


def test_the_disk_gets_what_leaves_although_it_was_declined_for_the_shared_tier(
    lab: Lab, model: Path, redis_server: RedisServer, reference: Engine
) -> None:
    """Each chunk is offered when it was computed, since Redis may want it; the disk still gets it when it goes."""
    disk, other_disk = lab.disk(), lab.disk("other")
    prompts = [PROMPTS.new(212) for _ in range(6)]
    options = {"disk_dir": disk, "shared_url": redis_server.url, "spill": {"disk": "on-evict"}}
    engine = lab.engine(model, options | {"host_bytes": 9 * PAYLOAD_NBYTES, "policy": {"host": "lru"}})
    with engine.counting() as counters:
        for prompt in prompts:
            engine.one(prompt)
            engine.counters()
    assert counters["stores_declined"] == 18
    assert on_disk(engine, disk, prompts[0]) == on_disk(engine, disk, prompts[1]) == [True] * 3
    assert in_redis(redis_server, engine, *prompts) == 0
    engine.reset_gpu()
    with engine.counting() as counters:
        assert engine.one(prompts[0]).bits == gpu_hit(reference, prompts[0]).bits
    assert hits(counters) == (0, 3, 0, 0)
    wait_until(lambda: in_redis(redis_server, engine, prompts[0]) == 3)
    far = lab.engine(model, options | {"disk_dir": other_disk})
    with far.counting() as counters:
        assert far.one(prompts[0]).bits == gpu_hit(reference, prompts[0]).bits
    assert hits(counters) == (0, 0, 3, 0)


def test_through_sends_what_the_pool_keeps_too(lab: Lab, model: Path) -> None:
    """The control of the test above: the default has everything on disk at once."""
    disk, prompt = lab.disk(), PROMPTS.new(212)
    engine = lab.engine(model, {"disk_dir": disk, "host_bytes": 9 * PAYLOAD_NBYTES})
    engine.one(prompt)
    engine.counters()
    assert on_disk(engine, disk, prompt) == [True] * 3


def test_what_a_full_disk_left_to_the_pool_gets_there_when_it_leaves_the_pool(
    lab: Lab, model: Path, reference: Engine
) -> None:
    """The disk has 63 chunks, the pool 100, and gives up what is worth least while less than 32 are free."""
    disk, old, filler = lab.disk(), PROMPTS.new(2390), PROMPTS.new(29 * CHUNK_TOKENS + 1)
    engine = lab.engine(model, {"disk_dir": disk, "host_bytes": 101 * PAYLOAD_NBYTES, "disk_bytes": 16 << 20})
    namespace = engine.call("stat")["namespace"]

    def evict(*tiers: str, prompt: list[int]) -> None:
        with admin(disk) as client:
            client.ask("TKV.EVICT", {"keys": {namespace: engine.call("keys", prompt=prompt)}, "tiers": list(tiers)})

    def run(prompt: list[int], **hints: int) -> None:
        engine.run(prompt, params={"tierkv": hints})
        engine.counters()  # every chunk that was sent has been answered

    run(filler)
    run(old, priority=-2)  # the first that the pool lets go of
    there = on_disk(engine, disk, old)
    assert 0 < sum(there) < 37, "the pool keeps what the disk has no room for"
    assert engine.counters()["stores_declined"] == 37 - sum(there)
    for prompt in (filler, old):
        evict("disk", prompt=prompt)
    evict("host", prompt=filler)
    assert tier(disk, "disk")["num_entries"] == 0 and all(engine.call("in_host", prompt=old))
    num_runs, others = 0, []
    while not all(there := on_disk(engine, disk, old)):
        assert all(a or b for a, b in zip(there, engine.call("in_host", prompt=old), strict=True)), "it is nowhere"
        num_runs += 1
        assert num_runs <= 12, "the pool has let go of it"
        others.append(PROMPTS.new(13 * CHUNK_TOKENS + 1))
        run(others[-1])
        for prompt in others:  # the disk has room for 26 beside the old one
            evict("disk", prompt=prompt)
    assert num_runs >= 2, "it is not sent ahead of its time"
    counters = engine.counters()
    assert "not_saved" not in counters
    engine.clear_host()
    with engine.counting() as counters:
        assert engine.one(old).bits == gpu_hit(reference, old).bits
    assert hits(counters) == (0, 37, 0, 0)


def test_what_only_the_pool_has_is_offered_when_its_engine_ends(lab: Lab, model: Path) -> None:
    """The disk is full of what is worth least; the next engine finds what its pool has kept from the disk."""
    disk, least, best = lab.disk(), PROMPTS.new(2390), PROMPTS.new(29 * CHUNK_TOKENS + 1)
    options = {"disk_dir": disk, "host_bytes": 101 * PAYLOAD_NBYTES, "disk_bytes": 16 << 20}
    engine = lab.engine(model, options)
    for prompt, priority in ((least, -2), (best, 2)):
        engine.run(prompt, params={"tierkv": {"priority": priority}})
        engine.counters()  # every chunk that was sent has been answered
    assert all(engine.call("in_host", prompt=best)) and not all(on_disk(engine, disk, best))
    engine.stop()
    engine = lab.engine(model, options)
    assert on_disk(engine, disk, best) == [True] * 29
    assert sum(on_disk(engine, disk, least)) < 37, "something had to go"


# -- never


def test_never_stores_nothing_and_reads_what_is_there(
    lab: Lab, model: Path, redis_server: RedisServer, reference: Engine
) -> None:
    disk, old, new = lab.disk(), PROMPTS.new(276), PROMPTS.new(276)
    options = {"disk_dir": disk, "shared_url": redis_server.url}
    engine = lab.engine(model, options)
    engine.one(old)
    engine.counters()
    drain(disk)
    engine.stop()
    shut_down(disk)

    engine = lab.engine(model, options | {"spill": {"disk": "never", "shared": "never"}})
    with engine.counting() as counters:
        engine.one(new)
        engine.reset_gpu()
        assert engine.one(new).bits == gpu_hit(reference, new).bits
    assert hits(counters) == (4, 0, 0, 4)
    assert counters["spilled"] == 4
    assert counters["stored"] == 0
    with engine.counting() as counters:
        assert engine.one(old).bits == gpu_hit(reference, old).bits
    assert hits(counters) == (0, 4, 0, 0)
    drain(disk)
    assert tier(disk, "disk")["num_entries"] == 4
    assert on_disk(engine, disk, new) == [False] * 4
    assert in_redis(redis_server, engine, old, new) == 0


def test_a_joiner_with_other_policies_is_told_which_hold(lab: Lab, model: Path) -> None:
    disk = lab.disk()
    lab.engine(model, {"disk_dir": disk, "spill": {"disk": "second-use"}}).ready()
    joiner = lab.engine(model, {"disk_dir": disk, "spill": {"disk": "never"}}).ready()
    sentence = "that store server's spill policies hold: disk second-use; this engine asked for others"
    assert joiner.log.read_text().count(sentence) == 1


# -- the filter of stored keys


@pytest.fixture(scope="module")
def disk(module_lab: Lab) -> Path:
    return module_lab.disk()


@pytest.fixture(scope="module")
def filtering(module_lab: Lab, model: Path, disk: Path) -> Engine:
    """An engine that has the filter of what its server's disk has."""
    engine = module_lab.engine(model, {"disk_dir": disk, "deadline_s": 3.0})
    engine.one(PROMPTS.new(100))
    engine.counters()
    drain(disk)
    return engine


@contextlib.contextmanager
def held(disk: Path) -> Iterator[None]:
    """Stop the store server: whoever asks it anything waits."""
    pid = server_pid(disk)
    stop_process(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def steps_to_first_token(engine: Engine, prompt: list[int]) -> int:
    """Run a prompt to its first token and return how many steps that took."""
    engine.add("first", prompt, max_tokens=1)
    deadline = time.monotonic() + 30
    num_steps = 0
    while time.monotonic() < deadline:
        num_steps += 1
        if "first" in engine.step():
            return num_steps
    raise AssertionError("it did not finish")


@pytest.mark.parametrize("num_tokens", [276, 2390])
def test_a_miss_that_the_filter_knows_costs_no_step(
    filtering: Engine, disk: Path, reference: Engine, num_tokens: int
) -> None:
    """Not even while the server is stopped. What is stored is asked for, and waited for: the control."""
    prompt = PROMPTS.new(num_tokens)
    reference.reset_gpu()
    num_steps = steps_to_first_token(reference, prompt)
    filtering.reset_gpu()
    filtering.call("asked")
    with filtering.counting() as counters:
        with held(disk):
            assert steps_to_first_token(filtering, prompt) == num_steps
        assert {answer for _, _, answer, _ in filtering.call("asked")} == {0}
    assert (counters["filtered"], counters.get("plans", 0)) == (1, 0)
    assert hits(counters) == (0, 0, 0, num_tokens // CHUNK_TOKENS)

    drain(disk)
    filtering.clear_host()
    with filtering.counting() as counters:
        with held(disk):
            assert steps_to_first_token(filtering, prompt) > num_steps
        assert filtering.call("asked")[0][2] is None
    assert (counters["filtered"], counters["plans"]) == (0, 1)


def test_a_prompt_that_begins_like_a_stored_one_is_asked_for(
    filtering: Engine, disk: Path, reference: Engine, cold: Cold
) -> None:
    """With that beginning in the host pool, the rest is known to be stored nowhere, and is not asked for."""
    prime = PROMPTS.new(140)
    prompt = prime[:128] + PROMPTS.new(100)
    filtering.one(prime, max_tokens=1)
    filtering.counters()
    drain(disk)
    for forget, plans, filtered, told in (
        (filtering.clear_host, 1, 0, (0, 2, 0, 1)),
        (filtering.reset_gpu, 0, 1, (2, 0, 0, 1)),
    ):
        forget()
        fresh = prompt[:128] + PROMPTS.new(100)
        with filtering.counting() as counters:
            answer = filtering.one(fresh)
        assert (counters.get("plans", 0), counters.get("filtered", 0)) == (plans, filtered)
        assert hits(counters) == told
        assert answer.distance(cold(fresh)) < 1e-4


def test_stat_shows_what_was_filtered(filtering: Engine, disk: Path) -> None:
    filtering.one(PROMPTS.new(100))
    num_filtered = filtering.counters()["filtered"]
    assert num_filtered
    command = [sys.executable, "-m", "tierkv.cli", "stat", "--server", str(socket_path(disk))]
    shown = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, check=True).stdout
    (row,) = json.loads(shown)["engines"]
    assert (row["pid"], row["counters"]["filtered"]) == (filtering.pid, num_filtered)
    table = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert f"filtered {num_filtered}" in table
