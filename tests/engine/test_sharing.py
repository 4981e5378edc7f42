"""Several engines: one directory, one Redis, tenants, other weights, weights that nobody can name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine_process import CHUNK_TOKENS, THROUGH, Answer, Engine, EngineError, Lab, Prompts, admin, drain, server_pid
from seeded_model import write_seeded_llama
from servers import RedisServer, free_port

pytestmark = pytest.mark.engine

PROMPTS = Prompts(seed=5)

Cold = Callable[..., Answer]


@pytest.fixture(scope="module")
def disk(module_lab: Lab) -> Path:
    return module_lab.disk()


@pytest.fixture(scope="module")
def owner(module_lab: Lab, model: Path, disk: Path, redis_server: RedisServer) -> Engine:
    """An engine with a store server; Python draws its hash seed."""
    return module_lab.engine(model, {"disk_dir": disk, "shared_url": redis_server.url, "spill": THROUGH}).ready()


def test_an_engine_joins_the_server_of_its_directory(
    lab: Lab, owner: Engine, model: Path, disk: Path, redis_server: RedisServer, cold: Cold
) -> None:
    """The owner's budget holds, and the joiner says so once. Both hit what the other one stores."""
    joiner = lab.engine(
        model,
        {"disk_dir": disk, "disk_bytes": "128MiB", "shared_url": redis_server.url, "spill": THROUGH},
        hash_seed="7",
    )
    prompts = [PROMPTS.new(200), PROMPTS.new(200)]
    for one, other, prompt in ((owner, joiner, prompts[0]), (joiner, owner, prompts[1])):
        one.one(prompt)
        one.counters()
        drain(disk)
        with other.counting() as counters:
            answer = other.one(prompt)
        assert answer.distance(cold(prompt)) < 1e-4
        assert (counters["disk_hits"], counters["host_hits"], counters["shared_hits"]) == (3, 0, 0)
    with admin(disk) as client:
        stat = client.ask("TKV.STAT")
    assert {engine["pid"] for engine in stat["engines"]} == {owner.pid, joiner.pid}
    assert stat["server"]["pid"] == server_pid(disk)
    log = joiner.log.read_text()
    assert log.count("runs with disk_bytes=256 MiB, which holds; this engine asked for 128 MiB") == 1
    assert "which holds" not in owner.log.read_text()


def test_a_joiner_with_another_shared_tier_is_refused_in_a_sentence(
    lab: Lab, owner: Engine, model: Path, disk: Path, redis_server: RedisServer
) -> None:
    url = f"redis://me:secret@127.0.0.1:{free_port()}/0"
    refused = lab.engine(model, {"disk_dir": disk, "shared_url": url, "spill": THROUGH})
    with pytest.raises(EngineError) as error:
        refused.ready()
    assert str(disk) in str(error.value)
    assert redis_server.url in str(error.value)
    assert "give both the same shared_url, or give this engine a disk_dir of its own" in str(error.value)
    assert "secret" not in refused.log.read_text().replace(f"'shared_url': '{url}'", "")
    assert owner.call("connected")


def test_two_store_servers_and_one_redis(
    lab: Lab, owner: Engine, model: Path, disk: Path, redis_server: RedisServer, cold: Cold
) -> None:
    other_disk = lab.disk()
    far = lab.engine(model, {"disk_dir": other_disk, "shared_url": redis_server.url, "spill": THROUGH}, hash_seed="7")
    prompts = [PROMPTS.new(200), PROMPTS.new(200)]
    for one, its_disk, other, prompt in ((owner, disk, far, prompts[0]), (far, other_disk, owner, prompts[1])):
        one.one(prompt)
        one.counters()
        drain(its_disk)
        other.call("forget_filter")  # what its server has heard by now is on its way
        with other.counting() as counters:
            answer = other.one(prompt)
        assert answer.distance(cold(prompt)) < 1e-4
        assert (counters["shared_hits"], counters["host_hits"], counters["disk_hits"]) == (3, 0, 0)
    assert server_pid(disk) != server_pid(other_disk)
    drain(other_disk)
    far.clear_host()
    with far.counting() as counters:
        far.one(prompts[0])
    assert (counters["disk_hits"], counters["shared_hits"]) == (3, 0), "what came from Redis is on this disk now"


def test_two_salts_never_share(owner: Engine, disk: Path, cold: Cold) -> None:
    prompt = PROMPTS.new(200)
    expected = cold(prompt)
    for salt in ("alice", "bob", None):
        with owner.counting() as counters:
            answer = owner.one(prompt, salt=salt)
        assert answer.cached == 0
        assert counters["missed"] == 3
        assert answer.distance(expected) < 1e-4
    drain(disk)
    for forget, tier in ((owner.reset_gpu, "host_hits"), (owner.clear_host, "disk_hits")):
        for salt in ("alice", "bob", None, "carol"):
            forget()
            with owner.counting() as counters:
                answer = owner.one(prompt, salt=salt)
            assert counters[tier] == (0 if salt == "carol" else 3)
            assert answer.distance(expected) < 1e-4
        owner.call("clear_host")
        with admin(disk) as client:
            carol = owner.call("keys", prompt=prompt, salt="carol")
            client.ask("TKV.EVICT", {"keys": {owner.call("stat")["namespace"]: carol}})
    all_keys = [key for salt in ("alice", "bob", "carol", None) for key in owner.call("keys", prompt=prompt, salt=salt)]
    assert len(set(all_keys)) == 12


def test_new_weights_under_the_same_path_miss(lab: Lab, cold: Cold, reference: Engine) -> None:
    path, disk, prompt = lab.directory / "model", lab.disk(), PROMPTS.new(200)
    write_seeded_llama(path)
    before = lab.engine(path, {"disk_dir": disk})
    assert before.one(prompt).bits == cold(prompt).bits
    before.counters()
    drain(disk)
    path.rename(lab.directory / "old")
    write_seeded_llama(path, seed=1)
    after = lab.engine(path, {"disk_dir": disk})
    with after.counting() as counters:
        answer = after.one(prompt)
    assert counters["missed"] == 3
    assert counters["disk_hits"] == counters["host_hits"] == 0
    assert answer.tokens != cold(prompt).tokens
    assert before.call("stat")["namespace"] != after.call("stat")["namespace"]
    before.clear_host()
    with before.counting() as counters:
        assert before.one(prompt).tokens == cold(prompt).tokens
    assert counters["disk_hits"] == 3


def test_weights_that_cannot_be_named_stay_in_this_engine(lab: Lab, model: Path) -> None:
    disk, prompt = lab.disk(), PROMPTS.new(200)
    engine = lab.engine(model, {"disk_dir": disk}, load_format="dummy")
    with engine.counting() as counters:
        first = engine.one(prompt)
        engine.reset_gpu()
        again = engine.one(prompt)
    assert counters["host_hits"] == 3
    assert counters["stored"] == 0
    assert again.cached == 3 * CHUNK_TOKENS
    assert again.distance(first) < 1e-4
    assert not engine.call("connected")
    assert not disk.exists()
    assert "load_format='dummy' does not read the weights from files: KV is kept on GPU and host only" in (
        engine.log.read_text()
    )
