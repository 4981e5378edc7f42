"""A tenth of ``scripts/test-faults``: a fault of every kind under real engines; and that the harness sees what it looks
for. What is asserted of time is how long the connector held a request back, not what a clock on the wall says.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fire.checks import wrong_payloads
from fire.harness import MAX_TRIES, Harness, run_all
from fire.kind import Kind, load_kinds
from fire.stage import Stage
from tierkv.payload import HEADER_NBYTES, Header, checksum

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]

SEED = 1
KINDS = load_kinds()
GROUPS = sorted({kind.group for kind in KINDS.values()})


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    directory = Path(tempfile.mkdtemp(prefix="tkv-fire-", dir="/tmp"))  # short: there are sockets in it
    with Stage(directory) as stage:
        yield stage
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def harness(stage: Stage) -> Harness:
    return Harness(stage, SEED, wall_time=False)


@pytest.mark.parametrize("group", GROUPS)
def test_nobody_notices(stage: Stage, harness: Harness, group: str) -> None:
    kinds = [kind for kind in KINDS.values() if kind.group == group and not kind.optional(stage)]
    results = run_all(harness, kinds, [0], SEED, print)
    assert [problem for result in results for problem in result.problems] == []
    assert {result.kind for result in results if result.struck} == {kind.name for kind in kinds}
    assert sum(result.requests for result in results) >= 4 * len(kinds)
    assert sum(result.hits for result in results) > 0


def test_a_wrong_payload_in_a_host_pool_is_seen(stage: Stage, harness: Harness) -> None:
    prompt = harness.prompts.new(random.Random("flip"))
    harness.references.cold(prompt)
    engine = stage.engines["local"]
    engine.one(prompt)
    assert wrong_payloads(stage, harness.references, [prompt]) == []
    engine.call("flip", prompt=prompt, chunk=0, word=100, bit=28)
    (problem,) = wrong_payloads(stage, harness.references, [prompt])
    assert harness.references.keys(prompt)[0][:12] in problem and "host pool of the local engine" in problem
    engine.clear_host()


def test_damage_below_the_host_pool_is_seen(stage: Stage, harness: Harness) -> None:
    prompt = harness.prompts.new(random.Random("damage"))
    harness.references.cold(prompt)
    engine = stage.engines["local"]
    engine.one(prompt)
    engine.counters()
    stage.store.drain()
    assert wrong_payloads(stage, harness.references, [prompt]) == []
    key = harness.references.keys(prompt)[0]
    with stage.redis.client() as client:
        (name,) = client.keys(f"*{key}")
        client.setrange(name, 1000, b"damage")
    (problem,) = wrong_payloads(stage, harness.references, [prompt])
    assert key[:12] in problem and "the shared tier" in problem
    with stage.redis.client() as client:
        client.delete(name)


class Forgery(Kind):
    """Records in Redis get other payloads, with checksums that are right: nobody can know but who computes."""

    name, group, source, moments = "forgery", "test", "shared", (0, 0)

    def begin(self, stage: Stage, rng: random.Random) -> None:
        with stage.redis.client() as client:
            for name in client.scan_iter("tierkv:1:*:{*}:*", count=1000):
                if b":idx:" in name:
                    continue
                record = bytearray(client.get(name))
                payload = np.frombuffer(memoryview(record)[HEADER_NBYTES:], dtype=np.float32)
                payload *= -1
                header = Header.unpack(record)._replace(checksum=checksum(memoryview(record)[HEADER_NBYTES:]))
                client.set(name, header.pack() + record[HEADER_NBYTES:])

    def end(self, stage: Stage) -> None:
        """Undone by who strikes with it: what is wrong is to be found first."""

    def struck(self, stage: Stage) -> int:
        return 1


def test_wrong_answers_are_seen(stage: Stage, harness: Harness) -> None:
    for number in range(4):
        result = harness.strike(Forgery(), number)
        with stage.redis.client() as client:
            client.flushall()
        stage.evict("disk")
        for engine in stage.engines.values():
            engine.clear_host()
        wrong = " ".join(result.wrong)
        assert "in the shared tier is off by" in wrong
        if "was answered otherwise than without connector" in wrong:
            break  # else what was forged came too late for every request, each of which computed its prefix instead
    assert "was answered otherwise than without connector" in wrong
    assert "in the host pool of the local engine is off by" in wrong


def test_a_fault_that_does_not_strike_is_seen(harness: Harness) -> None:
    class Idle(Kind):
        name, group = "idle", "test"

        def begin(self, stage: Stage, rng: random.Random) -> None:
            pass

        def end(self, stage: Stage) -> None:
            pass

        def struck(self, stage: Stage) -> int:
            return 0

    result = harness.strike(Idle(), 0)
    assert (result.struck, result.tries) == (0, MAX_TRIES)
    assert "did not strike" in result.problems[0]


def test_what_an_engine_keeps_is_seen(stage: Stage, harness: Harness) -> None:
    assert harness.leaks() == []
    engine = stage.engines["local"]
    engine.call("idle")
    pid, spare = engine.pid, stage.engines["inline"].pid
    harness.baselines["the local engine", pid] = harness.baselines["the inline engine", spare]._replace(fds=0)
    problems = harness.leaks(settle_s=0.0)
    assert any(problem.startswith("the local engine has") and "fds" in problem for problem in problems)
