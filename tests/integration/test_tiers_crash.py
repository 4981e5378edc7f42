"""What a tier still holds after its process, or its Redis, was killed. ``docs/tiers.md`` has the table."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from records import fetch, make_chain, make_namespace, payload_of, wait_until
from servers import RedisServer, server_binaries, start_redis
from tier_subjects import open_shared
from tierkv.tiers.base import Pin, Ref, Status, Tier
from tierkv.tiers.disk import DiskTier

NAMESPACE = make_namespace(payload_nbytes=16 << 10)
NS_ID = NAMESPACE.ns_id()
BUDGET = 64 << 20
FAR = 1e6

#: Stores, pins, lets expire and evicts, says so, and waits to be killed. Arguments: the kind of tier, and where it is.
CHILD = """
import sys, time
from pathlib import Path
from records import fetch, make_chain, make_namespace
from tierkv.tiers.base import Pin
from tier_subjects import open_shared
from tierkv.tiers.disk import DiskTier

kind, place, until = sys.argv[1], sys.argv[2], float(sys.argv[3])
namespace = make_namespace(payload_nbytes=16 << 10)
ns_id = namespace.ns_id()
tier = DiskTier(Path(place), 64 << 20, sync_interval_s=3600) if kind == "disk" else open_shared(place)
tier.add_namespace(namespace)
refs, records = make_chain(namespace, 8)
more, others = make_chain(namespace, 4, seed=1, salt="a")
tier.store(ns_id, records)
tier.store(ns_id, others)
fetch(tier, namespace, refs[:2])
tier.pin(ns_id, refs[:3], Pin("me", until))
tier.pin(ns_id, more, Pin("you", until))
tier.unpin(ns_id, more[2:], "you")
tier.expire_at(ns_id, refs[3:5], until)
tier.evict(ns_id, refs[6:])
print("ready", flush=True)
time.sleep(600)
"""


def start_child(kind: str, place: str, until: float) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", CHILD, kind, place, str(until)]
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    return child


def check_what_is_left(tier: Tier, until: float) -> None:
    refs, records = make_chain(NAMESPACE, 8)
    more, _ = make_chain(NAMESPACE, 4, seed=1, salt="a")
    entries = {entry.key: entry for entry in tier.entries(NS_ID)}
    assert entries.keys() == {ref.key for ref in [*refs[:6], *more]}
    results, cells = fetch(tier, NAMESPACE, [*refs, *more])
    assert [r.status for r in results] == [Status.OK] * 6 + [Status.MISS] * 2 + [Status.OK] * 4
    for ref, result, cell in zip([*refs, *more], results, cells, strict=True):
        assert result.status is Status.MISS or bytes(cell) == payload_of(ref.key, NAMESPACE.payload_nbytes)
    assert [entries[ref.key].pins for ref in refs[:6]] == [(Pin("me", until),)] * 3 + [()] * 3
    assert [entries[ref.key].pins for ref in more] == [(Pin("you", until),)] * 2 + [()] * 2
    assert [round(entries[ref.key].expires) for ref in refs[:6]] == [0, 0, 0, until, until, 0]
    assert tier.tokens(NS_ID, refs[0]) == records[0].tokens
    assert {u.num_entries for u in tier.usage(NS_ID).values()} == {6, 4}
    assert tier.stat().num_bad == 0
    assert tier.evict(NS_ID, refs) == 3, "pins hold"


def test_disk_loses_nothing_that_was_answered_when_its_process_is_killed(tmp_path: Path) -> None:
    until = float(int(time.time() + FAR))
    child = start_child("disk", str(tmp_path), until)
    child.kill()
    child.wait()
    tier = DiskTier(tmp_path, BUDGET)
    assert tier.namespaces() == {NS_ID: NAMESPACE}
    check_what_is_left(tier, until)
    tier.close()


@pytest.fixture(params=["redis", "valkey"])
def binary(request: pytest.FixtureRequest) -> str:
    found = server_binaries().get(request.param)
    if found is None:
        pytest.skip(f"{request.param} is not installed")
    return found


@pytest.fixture
def server(binary: str, tmp_path: Path) -> Iterator[RedisServer]:
    server = start_redis(tmp_path, binary=binary)
    yield server
    server.stop()


@pytest.fixture
def durable(binary: str, tmp_path: Path) -> Iterator[RedisServer]:
    """A server that writes everything down before it answers."""
    server = start_redis(tmp_path, "--appendonly", "yes", "--appendfsync", "always", binary=binary)
    yield server
    server.stop()


def test_shared_loses_nothing_when_a_store_server_is_killed(server: RedisServer) -> None:
    until = float(int(time.time() + FAR))
    child = start_child("shared", server.url, until)
    child.kill()
    child.wait()
    tier = open_shared(server.url)
    assert tier.namespaces() == {NS_ID: NAMESPACE}
    check_what_is_left(tier, until)
    tier.close()


def test_shared_is_what_redis_kept_after_redis_was_killed(durable: RedisServer) -> None:
    until = float(int(time.time() + FAR))
    child = start_child("shared", durable.url, until)
    tier = open_shared(durable.url)
    tier.add_namespace(NAMESPACE)
    durable.kill()
    refs, _ = make_chain(NAMESPACE, 2)
    assert {r.status for r in fetch(tier, NAMESPACE, refs)[0]} == {Status.ERROR}
    durable.start()
    wait_until(lambda: all(tier.match(NS_ID, refs)))
    check_what_is_left(tier, until)
    child.kill()
    child.wait()
    tier.close()


def test_a_redis_that_keeps_nothing_comes_back_empty_and_is_filled_again(server: RedisServer) -> None:
    tier = open_shared(server.url)
    tier.add_namespace(NAMESPACE)
    refs, records = make_chain(NAMESPACE, 8)
    assert tier.store(NS_ID, records) == [Status.OK] * 8
    assert tier.pin(NS_ID, refs, Pin("me", time.time() + FAR)) == [True] * 8
    server.kill()
    server.start()
    wait_until(lambda: tier.stat().state == "up" and tier.store(NS_ID, records) == [Status.OK] * 8)
    assert [entry.pins for entry in tier.entries(NS_ID)] == [()] * 8, "what was said of a lost entry is lost with it"
    assert {u.num_entries for u in tier.usage(NS_ID).values()} == {8}
    assert tier.evict(NS_ID, refs) == 8
    tier.close()


def test_a_redis_killed_in_the_middle_of_stores_delivers_nothing_damaged(durable: RedisServer) -> None:
    """Three times: what is found afterwards verifies, and what is stored again is there."""
    tier = open_shared(durable.url)
    tier.add_namespace(NAMESPACE)
    stop = threading.Event()
    chains = [make_chain(NAMESPACE, 10, seed) for seed in range(10)]
    stored: set[bytes] = set()

    def write() -> None:
        at = 0
        while not stop.is_set():
            refs, records = chains[at % 10]
            for ref, status in zip(refs, tier.store(NS_ID, records), strict=True):
                if status is Status.OK:
                    stored.add(ref.key)
            if at % 10 == 9:
                tier.evict(NS_ID, [r for refs, _ in chains[::2] for r in refs])
            at += 1

    thread = threading.Thread(target=write)
    thread.start()
    for _ in range(3):
        wait_until(lambda: len(stored) >= 20)
        durable.kill()
        stored.clear()
        durable.start()
    wait_until(lambda: len(stored) >= 20)
    stop.set()
    thread.join(30)
    refs: list[Ref] = [ref for chain, _ in chains for ref in chain]
    results, cells = fetch(tier, NAMESPACE, refs)
    assert {r.status for r in results} <= {Status.OK, Status.MISS}
    for ref, result, cell in zip(refs, results, cells, strict=True):
        assert result.status is Status.MISS or bytes(cell) == payload_of(ref.key, NAMESPACE.payload_nbytes)
    assert tier.stat().num_bad == 0
    assert Status.ERROR not in {s for _, records in chains for s in tier.store(NS_ID, records)}
    assert all(all(tier.match(NS_ID, chain)) for chain, _ in chains)
    tier.close()
