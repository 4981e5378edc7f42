"""Sessions on a real store server: holds, quotas, release, prefetch from a real Redis; by protocol, CLI and HTTP."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from admin_client import JSON, Client, admin_config
from fake_engine import FakeEngine, make_namespace, wait_until
from servers import RedisServer, start_redis
from serving import make_config, serving
from tierkv.admin_client import AdminClient
from tierkv.errors import NotFoundError, RefusedError
from tierkv.keys import tenant_digest
from tierkv.payload import record_nbytes
from tierkv.server_config import ServerConfig, SessionsConfig
from tierkv.sessions import SessionSelect, SessionTurn, session_digest
from tierkv.sizes import format_size
from tierkv.tiers.base import EntryInfo
from tierkv_server.server import Server

RANDOM = random.Random(5)
NAMESPACE = make_namespace(block_nbytes=16 << 10)
CHUNK_TOKENS = NAMESPACE.layout.chunk_tokens
RECORD_NBYTES = record_nbytes(NAMESPACE.payload_nbytes)
NS = NAMESPACE.ns_id()


def prompt(num_chunks: int) -> list[int]:
    return [RANDOM.randrange(1 << 20) for _ in range(num_chunks * CHUNK_TOKENS)]


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = start_redis(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def config(short_dir: Path) -> ServerConfig:
    return make_config(short_dir)


@pytest.fixture
def server(config: ServerConfig) -> Iterator[Server]:
    with serving(config) as server:
        yield server


@pytest.fixture
def engine(server: Server) -> Iterator[FakeEngine]:
    with FakeEngine(server.config.socket, NAMESPACE) as engine:
        yield engine


def turn(
    engine: FakeEngine, name: str, tokens: list[int], retain_s: float = 0.0, salt: str = "", **other: bool
) -> bytes:
    """Tell the server of a request; returns the session's digest."""
    tenant = tenant_digest(salt.encode())
    session = session_digest(tenant, name) if name else b""
    chain = b"".join(engine.keys(tokens, salt))
    engine.client.turn(SessionTurn(session, tenant, chain, retain_s, **other))
    return session


def settle(server: Server, engine: FakeEngine) -> None:
    """Wait until the server has taken what was sent and the sessions' thread has nothing to do."""
    engine.match([1] * CHUNK_TOKENS)
    done: list[bytes | None] = []
    engine.client.use(0, engine.keys([1] * CHUNK_TOKENS)[0], [], done.append)  # goes behind the turns, on their lane
    wait_until(lambda: done, what="no reply to USE")
    table = server.service.session_table
    assert table is not None and table.settle(20) and table.settle(20)


def stored(server: Server) -> dict[bytes, EntryInfo]:
    return {entry.key: entry for entry in server.service.disk.entries(NS)}


def held(server: Server, engine: FakeEngine, tokens: list[int], session: bytes, salt: str = "") -> list[bool]:
    """Return for each chunk of a prompt whether the session's pin is on it."""
    entries, owner = stored(server), f"session:{session.hex()}"
    return [
        key in entries and any(pin.owner == owner for pin in entries[key].pins) for key in engine.keys(tokens, salt)
    ]


def rows(server: Server, **select: str) -> list[dict[str, Any]]:
    with AdminClient(server.config.socket) as client:
        found: list[dict[str, Any]] = client.ask("TKV.SESSIONS", SessionSelect(**select))
    return found


def order(server: Server, verb: str, **select: str) -> dict[str, Any]:
    with AdminClient(server.config.socket) as client:
        reply = client.call("TKV.SESSION", verb, msgspec.json.encode(SessionSelect(**select)))
    result: dict[str, Any] = msgspec.json.decode(reply)
    return result


# -- holds


def test_a_session_is_held_for_its_time(server: Server, engine: FakeEngine) -> None:
    tokens = prompt(3)
    engine.put(tokens)
    before = time.time()
    session = turn(engine, "chat", tokens, 60)
    settle(server, engine)
    assert held(server, engine, tokens, session) == [True] * 3
    (row,) = rows(server)
    assert before + 60 <= row["until"] <= time.time() + 60
    assert (row["id"], row["num_chunks"], row["num_held"], row["tokens"], row["num_turns"]) == (
        session.hex(), 3, 3, 3 * CHUNK_TOKENS, 1,
    )  # fmt: skip
    assert row["held_nbytes"] == 3 * RECORD_NBYTES and row["namespace"] == NS.hex() and row["tenant"] == ""
    (pin,) = next(iter(stored(server).values())).pins
    assert pin.until == row["until"]


def test_what_is_stored_after_the_turn_is_held_too(server: Server, engine: FakeEngine) -> None:
    tokens = prompt(4)
    engine.put(tokens[: 2 * CHUNK_TOKENS])
    session = turn(engine, "chat", tokens, 60)
    settle(server, engine)
    assert held(server, engine, tokens, session) == [True, True, False, False]
    engine.put(tokens)
    settle(server, engine)
    assert held(server, engine, tokens, session) == [True] * 4


def test_the_next_turn_takes_the_place_of_the_last(server: Server, engine: FakeEngine) -> None:
    first = prompt(3)
    second = first[:CHUNK_TOKENS] + prompt(2)
    engine.put(first), engine.put(second)
    session = turn(engine, "chat", first, 60)
    settle(server, engine)
    assert turn(engine, "chat", second, 60) == session
    settle(server, engine)
    assert held(server, engine, first, session) == [True, False, False]
    assert held(server, engine, second, session) == [True] * 3
    turn(engine, "chat", second)  # and does not expect to be back
    settle(server, engine)
    assert held(server, engine, second, session) == [False] * 3
    assert rows(server)[0]["num_turns"] == 3 and rows(server)[0]["until"] == 0


def test_a_release_ends_it_also_for_a_server_that_has_forgotten(config: ServerConfig) -> None:
    tokens = prompt(2)
    with serving(config) as server, FakeEngine(config.socket, NAMESPACE) as engine:
        engine.put(tokens)
        session = turn(engine, "chat", tokens, 60)
        settle(server, engine)
    with serving(config) as server, FakeEngine(config.socket, NAMESPACE) as engine:
        assert held(server, engine, tokens, session) == [True, True] and rows(server) == []
        turn(engine, "chat", tokens, release=True)
        settle(server, engine)
        assert held(server, engine, tokens, session) == [False, False]
        assert len(stored(server)) == 2, "what is released stays for as long as there is room"


def test_pins_end_by_themselves(server: Server, engine: FakeEngine) -> None:
    tokens = prompt(1)
    engine.put(tokens)
    session = turn(engine, "chat", tokens, 1.0)
    settle(server, engine)
    assert held(server, engine, tokens, session) == [True]
    wait_until(lambda: held(server, engine, tokens, session) == [False])
    assert rows(server)[0]["until"] == 0


def test_held_chunks_stay_when_room_is_needed(short_dir: Path) -> None:
    config = msgspec.structs.replace(make_config(short_dir), sessions=SessionsConfig(percent=50, tenant_percent=50))
    config = msgspec.structs.replace(config, disk=msgspec.structs.replace(config.disk, bytes=16 << 20, reserve_bytes=0))
    num = (16 << 20) // RECORD_NBYTES
    with serving(config) as server, FakeEngine(config.socket, NAMESPACE, num_slots=64) as engine:
        tokens, other = prompt(6), prompt(6)
        engine.put(tokens), engine.put(other)
        session = turn(engine, "chat", tokens, 60)
        settle(server, engine)
        for _ in range(2 * num // 32):
            engine.put(prompt(32))
            engine.forget()
        assert len(engine.match(tokens)) == 6, "what is held has gone"
        assert len(engine.match(other)) < 6, "nothing had to go: this shows nothing"
        turn(engine, "chat", tokens, release=True)
        settle(server, engine)
        for _ in range(2 * num // 32):
            engine.put(prompt(32))
            engine.forget()
        assert len(engine.match(tokens)) < 6
        assert held(server, engine, tokens, session) == [False] * 6


# -- quotas


def test_a_tenant_holds_no_more_than_its_share(short_dir: Path) -> None:
    """Of 64 MiB one percent: five chunks of 128 KiB and their headers, less than six."""
    config = msgspec.structs.replace(make_config(short_dir), sessions=SessionsConfig(percent=2, tenant_percent=1))
    room = (64 << 20) // 100 // RECORD_NBYTES
    with serving(config) as server, FakeEngine(config.socket, NAMESPACE) as engine:
        long, small, others = prompt(room + 3), prompt(2), prompt(room)
        for tokens, salt in ((long, ""), (small, ""), (others, "other")):
            engine.put(tokens, salt=salt)
        first = turn(engine, "long", long, 60)
        settle(server, engine)
        assert held(server, engine, long, first) == [True] * room + [False] * 3, "its first chunks, as far as they fit"
        theirs = turn(engine, "x", others, 60, salt="other")
        second = turn(engine, "small", small, 60)
        settle(server, engine)
        assert held(server, engine, others, theirs, "other") == [True] * room, "another tenant's hold is not touched"
        assert held(server, engine, small, second) == [True] * 2
        assert held(server, engine, long, first) == [False] * (room + 3), "the tenant's oldest has made room"
        assert server.service.disk.stat().pinned_nbytes <= (64 << 20) * 2 // 100


def test_the_number_of_a_tenants_sessions_is_bounded(short_dir: Path) -> None:
    config = msgspec.structs.replace(make_config(short_dir), sessions=SessionsConfig(tenant_sessions=3))
    with serving(config) as server, FakeEngine(config.socket, NAMESPACE) as engine:
        tokens = prompt(1)
        engine.put(tokens)
        names = [turn(engine, f"s{i}", tokens, 60) for i in range(5)]
        settle(server, engine)
        assert [row["id"] for row in rows(server)] == [name.hex() for name in names[:1:-1]]
        assert [held(server, engine, tokens, name)[0] for name in names] == [False, False, True, True, True]


def test_nonsense_is_refused_and_nothing_comes_of_it(server: Server, engine: FakeEngine) -> None:
    digest, tenant = bytes(16), bytes(16)
    with AdminClient(server.config.socket) as client, pytest.raises(RefusedError, match="no session"):
        client.call("TKV.TURN", msgspec.msgpack.encode(SessionTurn(digest, tenant, b"")))
    turns: list[Any] = [
        SessionTurn(b"short", tenant, b""),
        SessionTurn(digest, b"short", b""),
        SessionTurn(digest, tenant, b"x" * 31),
        SessionTurn(digest, tenant, b"", -1.0),
        SessionTurn(digest, tenant, b"", float("nan")),
        SessionTurn(digest, tenant, b"", float("inf")),
    ]
    for wrong in turns:
        engine.client.turn(wrong)
    settle(server, engine)
    assert rows(server) == [] and engine.client.connected()
    for verb, select in (("release", {}), ("release", {"session": "abc"}), ("steal", {"session": "abcd"})):
        with pytest.raises(RefusedError):
            order(server, verb, **select)
    with pytest.raises(NotFoundError, match="no session 'abcd' is known here"):
        order(server, "release", session="abcd")
    with pytest.raises(RefusedError, match="no shared tier"):
        order(server, "prefetch", session="abcd")


# -- prefetch


@pytest.fixture
def other_node(redis_server: RedisServer, short_dir: Path) -> Iterator[Server]:
    """A server on another node's disk, with the same Redis, which is empty at first."""
    redis.Redis(port=redis_server.port).flushall()
    (short_dir / "b").mkdir()
    with serving(make_config(short_dir / "b", shared_url=redis_server.url)) as server:
        yield server


@pytest.fixture
def fleet(redis_server: RedisServer, short_dir: Path, other_node: Server) -> Iterator[Server]:
    """A server whose Redis holds what the other node stored."""
    (short_dir / "a").mkdir()
    with serving(make_config(short_dir / "a", shared_url=redis_server.url)) as server:
        yield server


def store_elsewhere(other_node: Server, tokens: list[int]) -> None:
    with FakeEngine(other_node.config.socket, NAMESPACE) as elsewhere:
        elsewhere.put(tokens)
        assert other_node.service.drain(20)


def test_a_prefix_is_brought_to_this_nodes_disk(fleet: Server, other_node: Server) -> None:
    tokens = prompt(5)
    store_elsewhere(other_node, tokens)
    with FakeEngine(fleet.config.socket, NAMESPACE) as engine:
        assert engine.match(tokens) == b"sssss"
        turn(engine, "", tokens, prefetch=True)
        settle(fleet, engine)
        assert fleet.service.drain(20)
        assert engine.match(tokens) == b"ddddd" and rows(fleet) == []
        assert engine.get(tokens) == engine.expected(tokens) and set(engine.last_sources) == {"disk"}
        shared = fleet.service.shared
        assert shared is not None and shared.stat().num_hits == 0, "a copy of our own is no hit"
        assert fleet.service.session_table is not None and fleet.service.session_table.num_brought == 5


def test_what_is_brought_is_held(fleet: Server, other_node: Server) -> None:
    tokens = prompt(3)
    store_elsewhere(other_node, tokens)
    with FakeEngine(fleet.config.socket, NAMESPACE) as engine:
        session = turn(engine, "chat", tokens, 60, prefetch=True)
        settle(fleet, engine)
        assert fleet.service.drain(20)
        wait_until(lambda: held(fleet, engine, tokens, session) == [True] * 3)


def test_an_operator_brings_a_session_near(fleet: Server, other_node: Server) -> None:
    tokens = prompt(4)
    store_elsewhere(other_node, tokens)
    with FakeEngine(fleet.config.socket, NAMESPACE) as engine:
        session = turn(engine, "chat", tokens)
        settle(fleet, engine)
        assert engine.match(tokens) == b"ssss"
        result = order(fleet, "prefetch", session=session.hex()[:8])
        assert result == {"id": session.hex(), "num_chunks": 4, "num_engines": 1}
        assert engine.orders == [b"p" + session]
        settle(fleet, engine)
        assert fleet.service.drain(20)
        assert engine.match(tokens) == b"dddd"


def test_what_is_evicted_meanwhile_is_not_brought_back(fleet: Server, other_node: Server) -> None:
    tokens = prompt(3)
    store_elsewhere(other_node, tokens)
    with FakeEngine(fleet.config.socket, NAMESPACE) as engine:
        service, brought = fleet.service, []
        put = service.moves.disk_writer.put

        def evict_first(job: Any) -> bool:
            if not brought:
                brought.append(job)
                service.evict(NS, [job.ref], ["disk"])  # alone: of this nobody else hears, who would tell us again
            return put(job)

        service.moves.disk_writer.put = evict_first  # type: ignore[method-assign]
        turn(engine, "", tokens, prefetch=True)
        settle(fleet, engine)
        assert service.drain(20)
        assert brought and brought[0].ref.key not in stored(fleet)


def test_a_redis_that_hangs_holds_nobody_up(redis_server: RedisServer, fleet: Server, other_node: Server) -> None:
    tokens, mine = prompt(3), prompt(2)
    store_elsewhere(other_node, tokens)
    with FakeEngine(fleet.config.socket, NAMESPACE) as engine:
        engine.put(mine)
        redis_server.sigstop()
        try:
            turn(engine, "", tokens, prefetch=True)
            session = turn(engine, "chat", mine, 60)
            assert engine.match(mine) == b"dd"
            wait_until(lambda: held(fleet, engine, mine, session) == [True, True])
        finally:
            redis_server.sigcont()
        settle(fleet, engine)


# -- people


def test_release_by_an_operator_tells_the_engines(server: Server, engine: FakeEngine) -> None:
    tokens = prompt(2)
    engine.put(tokens)
    session = turn(engine, "chat", tokens, 60)
    settle(server, engine)
    assert order(server, "release", session=session.hex()) == {"id": session.hex(), "num_engines": 1}
    settle(server, engine)
    assert engine.orders == [b"r" + session] and rows(server) == []
    assert held(server, engine, tokens, session) == [False, False]


def cli(server: Server, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tierkv.cli", "session", *args],
        env=os.environ | {"TIERKV_SERVER": str(server.config.socket)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_command_line(server: Server, engine: FakeEngine, tmp_path: Path) -> None:
    assert cli(server, "ls").returncode == 1
    tokens = prompt(2)
    engine.put(tokens), engine.put(tokens, salt="mine")
    session, mine = turn(engine, "chat", tokens, 60), turn(engine, "chat", tokens, 60, salt="mine")
    settle(server, engine)
    found = json.loads(cli(server, "ls", "--json").stdout)["sessions"]
    assert {row["id"] for row in found} == {session.hex(), mine.hex()} and all(row["num_held"] == 2 for row in found)
    table = cli(server, "ls").stdout
    assert session.hex()[:12] in table and "tiny-model" in table and format_size(2 * RECORD_NBYTES) in table
    tenant = tenant_digest(b"mine").hex()
    assert [r["id"] for r in json.loads(cli(server, "ls", "--json", "--tenant", tenant[:6]).stdout)["sessions"]] == [
        mine.hex()
    ]
    salt = tmp_path / "salt"
    salt.write_text("mine\n")
    done = cli(server, "release", "--name", "chat", "--salt-file", str(salt))
    assert done.returncode == 0 and mine.hex()[:12] in done.stdout, done.stderr
    assert [row["id"] for row in rows(server)] == [session.hex()]
    assert json.loads(cli(server, "release", session.hex()[:10], "--json").stdout)["id"] == session.hex()
    for args, code in [
        (("release", session.hex()[:10]), 1),
        (("release",), 2),
        (("release", "abcd", "--name", "x"), 2),
        (("release", "abcd", "--salt", "x"), 2),
        (("release", "--name", "x", "--salt", "x", "--salt-file", "y"), 2),
        (("release", "--name", "x", "--salt-file", str(tmp_path / "none")), 2),
        (("release", "not hex"), 2),
        (("prefetch", "abcd"), 4),
        (("ls", "--tenant", "zz"), 2),
    ]:
        done = cli(server, *args)
        assert done.returncode == code and done.stderr.startswith("tierkv: "), (args, done)


def test_http(short_dir: Path) -> None:
    config = admin_config(short_dir)
    with serving(config) as server, FakeEngine(config.socket, NAMESPACE) as engine:
        client, tokens = Client(server), prompt(2)
        engine.put(tokens)
        session = turn(engine, "chat", tokens, 60)
        settle(server, engine)
        answer = client.get("/v1/sessions?limit=1")
        assert (answer["total"], answer["offset"], answer["sessions"]) == (1, 0, rows(server))
        assert client.get("/v1/sessions?tenant=ff")["sessions"] == []
        which = {"session": session.hex()[:6]}
        client.post("/v1/sessions/release", which, 403, JSON)
        client.post("/v1/sessions/release", {"session": "ab"}, 400)
        client.post("/v1/sessions/prefetch", which, 409)
        assert client.post("/v1/sessions/release", which) == {"id": session.hex(), "num_engines": 1}
        client.post("/v1/sessions/release", which, 404)
