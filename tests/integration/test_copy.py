"""``tierkv copy``: between store servers with LMDB, and real Redis, in every direction."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cli_tools import as_json, refused, tierkv
from fake_engine import FakeEngine, make_namespace, wait_until
from network import address_of, make_tokens, tls_config
from servers import RedisServer, make_certificates, server_binaries, start_redis, start_tls_redis
from serving import make_config, serving
from store_process import start_store
from tierkv import copying
from tierkv.admin_client import AdminClient
from tierkv.copying import Copier
from tierkv.errors import NotFoundError, RefusedError
from tierkv.keys import tenant_digest
from tierkv.payload import HEADER_NBYTES
from tierkv.server_config import QuotaConfig, ServerConfig, SharedConfig
from tierkv.tiers.base import Pin, Ref, Tier
from tierkv.tiers.control import ControlFeed
from tierkv.tiers.shared import SharedTier
from tierkv_server.server import Server

CHUNK = 32
SYSTEM = list(range(4 * CHUNK))
A = [*SYSTEM, *range(1000, 1000 + 3 * CHUNK)]
B = [*SYSTEM, *range(2000, 2000 + 2 * CHUNK)]
C = list(range(5000, 5000 + 5 * CHUNK))
pytestmark = pytest.mark.skipif(not server_binaries(), reason="neither Redis nor Valkey is installed")


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("TIERKV_"):
            monkeypatch.delenv(name)


@pytest.fixture
def source(short_dir: Path) -> Iterator[Server]:
    (short_dir / "a").mkdir()
    with serving(make_config(short_dir / "a")) as server:
        yield server


@pytest.fixture
def target(short_dir: Path) -> Iterator[Server]:
    (short_dir / "b").mkdir()
    with serving(make_config(short_dir / "b")) as server:
        yield server


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = start_redis(tmp_path)
    yield server
    server.kill()


@pytest.fixture
def engine(source: Server) -> Iterator[FakeEngine]:
    """What the source has: 14 chunks without a tenant, 5 of alice's."""
    with FakeEngine(source.config.socket) as engine:
        for seed, tokens in enumerate((A, B, C)):
            engine.put(tokens, seed=seed)
        engine.put(C, seed=3, salt="alice")
        yield engine


def name(engine: FakeEngine, tokens: list[int], salt: str = "") -> str:
    return engine.keys(tokens, salt)[-1].hex()[:12]


def contents(tier: Tier, ns_id: bytes) -> dict[bytes, tuple[Any, ...]]:
    """What a tier has of a namespace, but for what a tier keeps for itself: record for record, byte for byte."""
    found = {}
    for entry in tier.entries(ns_id):
        ref = Ref(entry.key, entry.anchor)
        payload = bytearray(tier.namespaces()[ns_id].payload_nbytes)
        header = tier.fetch(ns_id, [ref], lambda _: [memoryview(payload)], quiet=True)[0].header  # noqa: B023
        found[entry.key] = (header, bytes(payload), tier.tokens(ns_id, ref))
    return found


@contextlib.contextmanager
def shared(redis: RedisServer, **options: Any) -> Iterator[SharedTier]:
    tier = SharedTier(SharedConfig(url=redis.url, **options))
    tier.namespaces()
    try:
        yield tier
    finally:
        tier.close()


# -- round trips


def test_server_to_redis_to_server_is_exact(
    source: Server, target: Server, redis: RedisServer, engine: FakeEngine
) -> None:
    ns_id = engine.namespace.ns_id()
    before = contents(source.service.disk, ns_id)
    assert len(before) == 19
    plan = as_json("copy", source.config.socket, redis.url, "--dry-run")
    assert (plan["num_chunks"], plan["num_copied"], plan["num_there"]) == (19, 19, 0)
    with shared(redis) as tier:
        assert not tier.namespaces(), "so far nothing was done"
    done = as_json("copy", source.config.socket, redis.url)
    assert done == plan | {"dry_run": False}
    assert done["nbytes"] == 19 * engine.shape.payload_nbytes
    (row,) = done["namespaces"]
    assert (row["namespace"], row["model"], row["num_copied"]) == (engine.ns, "fake/tiny-model", 19)
    with shared(redis) as tier:
        assert contents(tier, ns_id) == before
        assert tier.namespaces() == {ns_id: engine.namespace}, "what the bytes mean travels"
        assert tier.usage(ns_id)[tenant_digest(b"alice")].num_entries == 5
    there = as_json("copy", redis.url, target.config.socket)
    assert (there["num_copied"], there["num_there"]) == (19, 0)
    assert contents(target.service.disk, ns_id) == before
    with FakeEngine(target.config.socket) as other:
        for seed, (tokens, salt) in enumerate(((A, ""), (B, ""), (C, ""), (C, "alice"))):
            assert other.match(tokens, salt) == b"d" * (len(tokens) // CHUNK)
            own = other.expected(tokens, seed, salt)
            assert other.get(tokens, salt)[-1] == own[-1]
        assert other.match(C, "bob") == b""
    again = as_json("copy", redis.url, target.config.socket)
    assert (again["num_copied"], again["num_there"], again["nbytes"]) == (0, 19, 0)
    assert tierkv("copy", redis.url, target.config.socket).code == 0


def test_redis_to_redis_and_prefixes(tmp_path: Path, redis: RedisServer, source: Server, engine: FakeEngine) -> None:
    (tmp_path / "other").mkdir()
    other = start_redis(tmp_path / "other")
    ns_id = engine.namespace.ns_id()
    try:
        as_json("copy", source.config.socket, redis.url)
        done = as_json("copy", redis.url, other.url, "--dst-redis-prefix", "mine")
        assert done["num_copied"] == 19
        with shared(redis) as one, shared(other, prefix="mine") as two:
            assert contents(two, ns_id) == contents(one, ns_id)
        names = {key.split(b":")[0] for key in other.client().scan_iter()}
        assert names == {b"mine"}
        # Within one Redis, from prefix to prefix.
        assert as_json("copy", other.url, other.url, "--src-redis-prefix", "mine")["num_copied"] == 19
        unix = f"redis+unix://{redis.socket}"
        if redis.socket.exists():
            assert as_json("copy", unix, other.url)["num_there"] == 19
        refused(tierkv("copy", other.url, other.url), 2, "are the same", other.url)
        refused(tierkv("copy", other.url, redis.url, "--src-redis-prefix", "a b"), 2, "SRC", "'a b'")
    finally:
        other.kill()


def test_server_to_server_over_tls_with_tokens(short_dir: Path, tmp_path: Path) -> None:
    files = make_certificates(tmp_path / "tls")
    tokens = []
    configs: list[ServerConfig] = []
    for part in ("a", "b"):
        (short_dir / part).mkdir()
        (tmp_path / part).mkdir()
        tokens.append(make_tokens(tmp_path / part))
        configs.append(tls_config(short_dir / part, files, tokens[-1]))
    with serving(configs[0]) as one, serving(configs[1]) as two, FakeEngine(one.config.socket) as engine:
        engine.put(A)
        urls = [str(address_of(config, None, files)) for config in configs]
        args = ["copy", *urls, "--src-ca-file", files.ca, "--dst-ca-file", files.ca]
        admin = ["--src-token-file", tokens[0]["admin"], "--dst-token-file", tokens[1]["admin"]]
        assert as_json(*args, *admin)["num_copied"] == 7
        ns_id = engine.namespace.ns_id()
        assert contents(two.service.disk, ns_id) == contents(one.service.disk, ns_id)
        refused(tierkv(*args), 2, "SRC", "needs a token")
        swapped = ["--src-token-file", tokens[1]["admin"], "--dst-token-file", tokens[1]["admin"]]
        refused(tierkv(*args, *swapped), 4, "does not take the token")
        reader = ["--src-token-file", tokens[0]["admin"], "--dst-token-file", tokens[1]["reader"]]
        assert as_json(*args, *reader, "--dry-run")["num_there"] == 7, "looking takes a reader's token"
        as_json("evict", name(engine, A), "--server", two.config.socket)
        said = tierkv(*args, *reader, "--make-room")
        refused(said, 4, "ended after 0 of 7 chunks", "the reader's token does not allow TKV.RESTORE")


def test_redis_over_tls_with_a_password(tmp_path: Path, source: Server, engine: FakeEngine) -> None:
    server, port, files = start_tls_redis(tmp_path, "--requirepass", "secret")
    server.password = "secret"
    try:
        word = tmp_path / "password"
        word.write_text("secret\n")
        word.chmod(0o600)
        url = f"rediss://127.0.0.1:{port}/0"
        args = ("copy", source.config.socket, url, "--dst-ca-file", files.ca)
        assert as_json(*args, "--dst-password-file", word)["num_copied"] == 19
        refused(tierkv(*args), 3, "does not answer", "DST")
        assert (
            as_json("copy", f"rediss://:secret@127.0.0.1:{port}/0", source.config.socket, "--src-ca-file", files.ca)[
                "num_there"
            ]
            == 19
        )
        said = tierkv("copy", f"rediss://:wrong@127.0.0.1:{port}/0", source.config.socket, "--src-ca-file", files.ca)
        assert said.code == 3 and "wrong" not in said.err
    finally:
        server.kill()


# -- what is copied


def test_the_selection(source: Server, target: Server, engine: FakeEngine) -> None:
    at = ("copy", source.config.socket, target.config.socket, "--dry-run")
    alice = tenant_digest(b"alice").hex()
    assert as_json(*at, "--tenant", alice[:8])["num_chunks"] == 5
    assert as_json(*at, "--prefix", name(engine, B))["num_chunks"] == 6
    assert as_json(*at, "--namespace", engine.ns[:6])["num_chunks"] == 19
    assert as_json(*at, name(engine, A), name(engine, C))["num_chunks"] == 12
    assert as_json(*at, name(engine, A), name(engine, B))["num_chunks"] == 9, "what they share is copied once"
    assert as_json(*at, name(engine, SYSTEM))["num_chunks"] == 4, "any stored chunk ends a prefix"
    assert as_json(*at, "--newer-than", "1h")["num_chunks"] == 19
    tierkv("pin", name(engine, B), "--for", "1h", "--server", source.config.socket)
    assert as_json(*at, "--pinned")["num_chunks"] == 6
    assert as_json(*at, "--not-pinned")["num_chunks"] == 17
    assert as_json(*at, "--tier", "disk")["num_chunks"] == 19
    for nothing in (["--older-than", "1h"], ["--unused-for", "1h"], ["--namespace", "ff"], ["--min-size", "1GiB"]):
        refused(tierkv(*at, *nothing), 1, "nothing that fits", "SRC")
        assert as_json(*at, *nothing, code=1)["namespaces"] == []
    refused(tierkv(*at, "00ff"), 1, "'00ff'")
    refused(tierkv(*at, name(engine, A), "--pinned"), 2, "one of them")
    refused(tierkv(*at, "--tier", "shared"), 4, "'shared' is not here")


def test_what_is_in_host_pools_alone_is_said(source: Server, target: Server, engine: FakeEngine) -> None:
    tierkv("evict", name(engine, B), "--tier", "disk", "--server", source.config.socket)
    said = tierkv("copy", source.config.socket, target.config.socket)
    assert said.code == 0 and "2 chunks more in engines' host pools alone" in said.out
    found = as_json("copy", source.config.socket, target.config.socket)
    assert (found["num_chunks"], found["num_host"], found["num_there"]) == (17, 2, 17)
    assert as_json("copy", source.config.socket, target.config.socket, name(engine, B))["num_host"] == 2


def test_parents_come_before_children_and_the_latest_prefixes_first(
    source: Server, target: Server, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.forget()
    time.sleep(0.02)
    engine.get(B)
    order: list[bytes] = []
    original = Copier._write

    def noted(self: Copier, namespace: Any, items: Any, records: Any) -> None:
        order.extend(item.ref.key for item in items)
        original(self, namespace, items, records)

    monkeypatch.setattr(Copier, "_write", noted)
    as_json("copy", source.config.socket, target.config.socket)
    assert len(order) == len(set(order)) == 19
    parents = {e.key: e.parent for e in source.service.disk.entries(engine.namespace.ns_id())}
    place = {key: i for i, key in enumerate(order)}
    assert all(place[parents[key]] < place[key] for key in order if parents[key] in place)
    assert order[:6] == engine.keys(B)


def test_expiry_travels_and_pins_do_not(source: Server, target: Server, redis: RedisServer, engine: FakeEngine) -> None:
    ns_id, disk = engine.namespace.ns_id(), source.service.disk
    refs = [Ref(e.key, e.anchor) for e in disk.entries(ns_id)]
    until = float(int(time.time()) + 5000)
    soon = {ref.key for ref in refs[:4]}
    disk.expire_at(ns_id, refs[:4], until)
    disk.pin(ns_id, [Ref(engine.keys(C)[0], engine.keys(C)[0])], Pin("ops", time.time() + 9000))
    expected = {ref.key: until if ref.key in soon else 0.0 for ref in refs}
    as_json("copy", source.config.socket, redis.url)
    with shared(redis) as tier:
        found = {e.key: e for e in tier.entries(ns_id)}
        assert {key: abs(e.expires - expected[key]) < 2 for key, e in found.items()} == dict.fromkeys(expected, True)
        assert not any(e.pins for e in found.values())
    as_json("copy", redis.url, target.config.socket)
    found = {e.key: e for e in target.service.disk.entries(ns_id)}
    assert {key: abs(e.expires - expected[key]) < 2 for key, e in found.items()} == dict.fromkeys(expected, True)
    target.service.disk.drop_namespace(ns_id)
    as_json("copy", redis.url, target.config.socket, "--no-ttl")
    assert {e.expires for e in target.service.disk.entries(ns_id)} == {0.0}


def test_a_damaged_chunk_is_not_copied_and_counted(
    source: Server, target: Server, redis: RedisServer, engine: FakeEngine
) -> None:
    ns_id = engine.namespace.ns_id()
    as_json("copy", source.config.socket, redis.url)
    key = engine.keys(A)[5]
    (record,) = [n for n in redis.client().scan_iter() if key.hex().encode() in n]
    redis.client().setrange(record, HEADER_NBYTES + 100, b"\xff\x00\xff")
    said = tierkv("copy", redis.url, target.config.socket)
    refused(said, 4, "1 chunks are damaged", "tierkv verify")
    found = as_json("copy", redis.url, target.config.socket, code=4)
    assert (found["num_bad"], found["num_there"], found["num_copied"]) == (1, 18, 0)
    assert redis.client().exists(record), "a copy deletes nothing at a Redis"
    assert not target.service.disk.match(ns_id, [Ref(key, engine.keys(A)[0])])[0]
    # On a server's disk, where it is deleted when it is read.
    index = source.service.disk._environments[ns_id].index  # type: ignore[attr-defined]
    page = index.entries[engine.keys(C)[2]].page
    with open(source.config.disk_dir / "ns" / engine.ns / "data.mdb", "r+b") as file:
        file.seek(page * 4096 + 1000)
        file.write(b"\xff\x00\xff\x00")
    tierkv("evict", "--namespace", engine.ns, "--yes", "--server", target.config.socket)
    found = as_json("copy", source.config.socket, target.config.socket, code=4)
    assert (found["num_bad"], found["num_copied"]) == (1, 18)
    assert target.service.disk.match(ns_id, [Ref(k, engine.keys(C)[0]) for k in engine.keys(C)]) == [
        i != 2 for i in range(5)
    ]


def test_what_went_meanwhile_or_was_changed_on_the_way(
    source: Server, target: Server, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, flipped = engine.keys(C)[4], engine.keys(C)[3]
    original = AdminClient.call

    def call(self: AdminClient, *words: Any) -> bytes:
        if words[0] == "TKV.DUMP" and words[2] == gone:
            source.service.disk.evict(words[1], [Ref(gone, gone)])
        reply = original(self, *words)
        if words[0] == "TKV.DUMP" and words[2] == flipped:
            reply = reply[:-1000] + bytes([reply[-1000] ^ 1]) + reply[-999:]
        return reply

    monkeypatch.setattr(AdminClient, "call", call)
    found = as_json("copy", source.config.socket, target.config.socket, name(engine, C), code=4)
    assert (found["num_copied"], found["num_gone"], found["num_bad"]) == (3, 1, 1)


# -- what does not fit


def test_another_layout_is_refused(source: Server, target: Server, engine: FakeEngine) -> None:
    other = make_namespace(chunk_tokens=64)
    with FakeEngine(target.config.socket, other) as there:
        there.put(A[: 4 * CHUNK])
        said = tierkv("copy", source.config.socket, target.config.socket)
        refused(said, 4, "19 chunks were refused", "do not fit", "chunks of 64", "--any-layout")
        found = as_json("copy", source.config.socket, target.config.socket, code=4)
        assert (found["num_refused"], found["num_copied"]) == (19, 0)
        assert as_json("copy", source.config.socket, target.config.socket, "--any-layout")["num_copied"] == 19


def test_what_has_no_room_is_refused_unless_room_is_made(source: Server, short_dir: Path, tmp_path: Path) -> None:
    (short_dir / "b").mkdir()
    big = make_namespace("big", block_nbytes=512 << 10)  # 2 MiB a chunk
    prompts = [[seed * 10_000 + i for i in range(4 * CHUNK)] for seed in range(3)]
    with serving(make_config(short_dir / "b", disk_bytes=16 << 20)) as target:
        with FakeEngine(source.config.socket, big, num_slots=16) as engine:
            for tokens in prompts:
                engine.put(tokens)
        args = ("copy", source.config.socket, target.config.socket)
        refused(tierkv(*args), 4, "12 chunks need", "room for 16 MiB", "--make-room")
        assert not list(target.service.disk.namespaces())
        found = as_json(*args, "--make-room")
        assert found["num_copied"] == 12
        stat = target.service.disk.stat()
        assert stat.num_evicted > 0 and stat.nbytes <= 16 << 20
    redis = start_redis(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    try:
        refused(tierkv("copy", source.config.socket, redis.url), 4, "12 chunks need", "--make-room")
        said = tierkv("copy", source.config.socket, redis.url, "--make-room")
        refused(said, 4, "the copy ended after", "of 12 chunks", "takes nothing more", "same command again")
        redis.client().config_set("maxmemory", "64mb")
        found = as_json("copy", source.config.socket, redis.url)
        assert found["num_copied"] > 0 < found["num_there"] and found["num_copied"] + found["num_there"] == 12
    finally:
        redis.kill()


def test_a_destination_that_drops_is_counted_and_left_after_a_while(
    source: Server, short_dir: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (short_dir / "b").mkdir()
    quota = QuotaConfig(tenant_bytes=2 * 8192 + 100)  # a record of 4 KiB takes two pages: two fit
    config = msgspec.structs.replace(make_config(short_dir / "b"), quota=quota)
    with serving(config) as target:
        args = ("copy", source.config.socket, target.config.socket, "--tenant", tenant_digest(b"alice").hex())
        with FakeEngine(target.config.socket) as there:
            there.put(A[: 2 * CHUNK], salt="alice")
            tierkv("pin", name(there, A[: 2 * CHUNK], "alice"), "--for", "1h", "--server", target.config.socket)
        refused(tierkv(*args), 4, "5 chunks were refused", "DROPPED")
        found = as_json(*args, code=4)
        assert (found["num_refused"], found["num_copied"]) == (5, 0)
        monkeypatch.setattr(copying, "MAX_REFUSALS", 3)
        refused(tierkv(*args), 4, "the copy ended after 3 of 5", "3 in a row", "DROPPED")


# -- broken off


def test_a_destination_that_is_killed_is_gone_on_with(source: Server, short_dir: Path) -> None:
    """kill -9 in the middle: the prefixes that were copied are usable, and the same command copies the rest."""
    (short_dir / "b").mkdir()
    config = make_config(short_dir / "b")
    big = make_namespace("big", block_nbytes=128 << 10)  # 512 KiB a chunk
    prompts = [[seed * 10_000 + i for i in range(4 * CHUNK)] for seed in range(20)]
    with FakeEngine(source.config.socket, big, num_slots=100) as engine:
        for tokens in prompts:
            engine.put(tokens)
        before = contents(source.service.disk, big.ns_id())
        keys = {tuple(engine.keys(tokens)) for tokens in prompts}
    assert len(before) == 80
    process = start_store(config, short_dir / "b.log")
    args = ("copy", source.config.socket, config.socket)
    try:
        wait_until(config.socket.exists)
        killer = threading.Thread(target=_kill_when, args=(config, process, 20))
        killer.start()
        said = tierkv(*args, "--rate", "8MiB")
        killer.join()
    finally:
        process.kill()
        process.wait()
    refused(said, 3, "the copy ended after", "of 80 chunks", "went away", "same command again", str(config.socket))
    with serving(config) as target:
        disk = target.service.disk
        stored = {e.key for e in disk.entries(big.ns_id())}
        assert 20 <= len(stored) < 80
        for chain in keys:
            there = [key in stored for key in chain]
            assert there == sorted(there, reverse=True), "no chunk without its parent"
        found = as_json(*args)
        assert (found["num_there"], found["num_copied"]) == (len(stored), 80 - len(stored))
        assert contents(disk, big.ns_id()) == before


def _kill_when(config: ServerConfig, process: Any, num_chunks: int) -> None:
    def enough() -> bool:
        with contextlib.suppress(Exception), AdminClient(config.socket) as admin:
            disk = next(t for t in admin.ask("TKV.STAT")["tiers"] if t["name"] == "disk")
            return bool(disk["num_entries"] >= num_chunks)
        return False

    wait_until(enough, timeout_s=60)
    process.kill()


def test_a_redis_that_goes_away_at_either_end(
    source: Server, target: Server, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = make_namespace("big", block_nbytes=512 << 10)
    prompts = [[seed * 10_000 + i for i in range(4 * CHUNK)] for seed in range(5)]
    with FakeEngine(source.config.socket, big, num_slots=30) as engine:
        for tokens in prompts:
            engine.put(tokens)
    original, batches = Copier._write, []

    def killing(self: Copier, namespace: Any, items: Any, records: Any) -> None:
        original(self, namespace, items, records)
        batches.append(len(items))
        if len(batches) == 2:
            redis.kill()

    with monkeypatch.context() as patch:
        patch.setattr(Copier, "_write", killing)
        said = tierkv("copy", source.config.socket, redis.url, "--json")
    refused_said = said._replace(out="")
    refused(refused_said, 3, "the copy ended after", "of 20 chunks", "went away", "same command again")
    assert f'"num_copied": {sum(batches[:2])}' in said.out, "what was done by then is counted"
    redis.start()
    assert as_json("copy", source.config.socket, redis.url)["num_copied"] == 20, "a Redis without persistence is empty"
    batches.clear()
    with monkeypatch.context() as patch:
        patch.setattr(Copier, "_write", killing)
        said = tierkv("copy", redis.url, target.config.socket)
    refused(said, 3, "the copy ended after", redis.url)
    assert 0 < target.service.disk.stat().num_entries < 20


def test_an_eviction_during_a_copy_to_a_redis_reaches_it(
    short_dir: Path, source: Server, redis: RedisServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is ordered to go at a node of the fleet while a copy writes it does not stay."""
    (short_dir / "node").mkdir()
    ns_id = engine.namespace.ns_id()
    original = SharedTier.store
    with serving(make_config(short_dir / "node", shared_url=redis.url)) as node:
        node.service.add_namespace(engine.namespace)

        def store(self: SharedTier, ns: bytes, records: Any) -> Any:
            if self is not node.service.shared:  # the order comes right before the write
                refs = [Ref(r.header.key, r.header.anchor) for r in records]
                node.service.evict(ns, refs, ["disk", "shared"])
            return original(self, ns, records)

        wait = ControlFeed._wait

        def late(self: ControlFeed) -> bool:
            heard = wait(self)
            if self is not node.node.feed:  # the copy ends before it hears of anything, unless it waits for that
                time.sleep(0.3)
            return heard

        monkeypatch.setattr(ControlFeed, "_wait", late)
        monkeypatch.setattr(SharedTier, "store", store)
        assert as_json("copy", source.config.socket, redis.url, name(engine, C))["num_copied"] == 5
        wait_until(lambda: not any(node.service.shared.stored(ns_id, [Ref(k, k) for k in engine.keys(C)])))  # type: ignore[union-attr]


def test_the_fleets_engines_hear_of_what_is_copied_to_their_redis(
    short_dir: Path, source: Server, redis: RedisServer, engine: FakeEngine
) -> None:
    (short_dir / "node").mkdir()
    with (
        serving(make_config(short_dir / "node", shared_url=redis.url)) as node,
        FakeEngine(node.config.socket) as other,
    ):
        keys = other.keys(A)
        wait_until(lambda: other.client.denies(keys[0]))
        as_json("copy", source.config.socket, redis.url)
        wait_until(lambda: not any(map(other.client.denies, keys)))
        assert other.match(A) == b"s" * 7 and other.get(A)[-1] == other.expected(A)[-1]
        assert node.service.shared is not None


# -- words


@pytest.mark.parametrize(
    "args, words",
    [
        (["copy"], ["SRC"]),
        (["copy", "a"], ["DST"]),
        (["copy", "http://x", "b"], ["SRC='http://x'", "redis://"]),
        (["copy", "redis://x:notaport/0", "b"], ["SRC", "redis://x:notaport"]),
        (["copy", "", "b"], ["SRC is empty"]),
        (["copy", "a", "b", "--src-redis-prefix", "x"], ["--src-redis-prefix", "'a'"]),
        (["copy", "redis://x", "b", "--src-token-file", "t"], ["--src-token-file", "is for a server"]),
        (["copy", "tkv://8.8.8.8:1", "b"], ["SRC", "TLS"]),
        (["copy", "a", "b", "--rate", "fast"], ["'fast'"]),
        (["copy", "a", "b", "xyz"], ["'xyz'", "hexadecimal"]),
        (["copy", "a", "b", "--src-token-file", "t"], ["SRC", "no effect"]),
    ],
)
def test_bad_usage(args: list[str], words: list[str]) -> None:
    refused(tierkv(*args), 2, *words)


def test_nobody_there(tmp_path: Path, source: Server, redis: RedisServer) -> None:
    refused(tierkv("copy", tmp_path / "none.sock", redis.url), 3, "none.sock", "check SRC")
    refused(tierkv("copy", source.config.socket, tmp_path / "none.sock"), 3, "none.sock", "check DST")
    refused(tierkv("copy", source.config.socket, "redis://127.0.0.1:1/0"), 3, "redis://127.0.0.1:1/0", "check DST")
    refused(tierkv("copy", source.config.socket, source.config.socket), 2, "are the same")
    refused(tierkv("copy", source.config.socket, redis.url), 1, "nothing that fits")
    assert tierkv("copy", source.config.socket, redis.url, "--quiet") == (1, "", "")


def test_tables_and_rates(source: Server, target: Server, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(copying, "_BATCH_CHUNKS", 4)
    clock = SimpleNamespace(monotonic=time.monotonic, time=time.time, sleep=slept.append)
    monkeypatch.setattr(copying, "time", clock)
    said = tierkv("copy", source.config.socket, target.config.socket, "--limit-rate", "1MiB", "--dry-run")
    assert said.code == 0 and "to copy" in said.out and not slept
    assert "copied" in tierkv("copy", source.config.socket, target.config.socket, "--rate", "4KiB").out
    assert len(slept) == 5 and 15 < max(slept) <= 19, "19 chunks of 4 KiB"


# -- the listing


def test_a_listing_comes_in_pages_of_one_namespace(
    source: Server, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv_server.chunks.PAGE_CHUNKS", 4)
    other = make_namespace("second")
    with FakeEngine(source.config.socket, other) as second, AdminClient(source.config.socket) as client:
        second.put(B)
        cursor, seen, nums = "", [], []
        while True:
            page = client.ask("TKV.CHUNKS", {"cursor": cursor} if cursor else {})
            assert page["num_total"] == 25
            seen += [(page["namespace"], key) for key, _, _ in page["chunks"]]
            nums.append(len(page["chunks"]))
            again = client.ask("TKV.CHUNKS", {"cursor": cursor}) if cursor else page
            assert again == page, "a page may be asked for again"
            cursor = page["cursor"]
            if not cursor:
                break
        assert len(seen) == len(set(seen)) == 25 and max(nums) == 4
        with pytest.raises(NotFoundError, match="start again"):
            client.ask("TKV.CHUNKS", {"cursor": "abc:0:0"})


def test_stored_asks_for_each_chunk(source: Server, engine: FakeEngine) -> None:
    keys = engine.keys(C)
    engine.forget()
    source.service.disk.evict(engine.namespace.ns_id(), [Ref(keys[1], keys[0])])
    with AdminClient(source.config.socket) as client:
        packed = b"".join(key + keys[0] for key in keys)
        assert client.call("TKV.STORED", engine.namespace.ns_id(), packed) == b"d-ddd"
        with pytest.raises(RefusedError, match="followed by its anchor"):
            client.call("TKV.STORED", engine.namespace.ns_id(), keys[0])
        with pytest.raises(RefusedError, match="seconds since 1970"):
            client.call("TKV.RESTORE", engine.namespace.to_json(), b"x" * 300, "-1")
