"""What engines tell of requests reaches the disk's policy: NOTE on a real server, and what is to be seen of it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from admin_client import Client, admin_config
from fake_engine import FakeEngine, make_namespace, wait_until
from serving import make_config, serving
from tierkv.config import EngineConfig
from tierkv.errors import ConfigError, RefusedError
from tierkv.keys import tenant_digest
from tierkv.messages import RequestNote, Welcome
from tierkv.payload import record_nbytes
from tierkv.server_config import ServerConfig, SessionsConfig
from tierkv.sessions import SessionTurn, session_digest
from tierkv.toml_config import BadConfigError, load
from tierkv_server.server import Server

NAMESPACE = make_namespace(block_nbytes=16 << 10)
CHUNK_TOKENS = NAMESPACE.layout.chunk_tokens
RECORD_NBYTES = record_nbytes(NAMESPACE.payload_nbytes)
NS = NAMESPACE.ns_id()
TENANT = tenant_digest(b"")
RANDOM = random.Random(11)


def prompt(num_chunks: int) -> list[int]:
    return [RANDOM.randrange(1 << 20) for _ in range(num_chunks * CHUNK_TOKENS)]


@pytest.fixture
def config(short_dir: Path) -> ServerConfig:
    config = admin_config(short_dir)
    return msgspec.structs.replace(config, disk=msgspec.structs.replace(config.disk, bytes=16 << 20))


@pytest.fixture
def server(config: ServerConfig) -> Iterator[Server]:
    with serving(config) as server:
        yield server


@pytest.fixture
def engine(server: Server) -> Iterator[FakeEngine]:
    with FakeEngine(server.config.socket, NAMESPACE) as engine:
        yield engine


def note(engine: FakeEngine, tokens: list[int], **hint: object) -> None:
    engine.client.note(RequestNote(TENANT, b"".join(engine.keys(tokens)), **hint))  # type: ignore[arg-type]


def put(engine: FakeEngine, tokens: list[int]) -> bytes:
    """Store a prompt as an engine does, and return the letters."""
    engine.forget()
    keys = engine.keys(tokens)
    entries = [engine._fill(keys, i, "", 0) for i in range(len(keys))]
    replies = engine.store([engine._item(entry, keys, "") for entry in entries])
    return b"".join(engine.result(replies, i) for i in range(len(replies)))


def fill(server: Server, engine: FakeEngine) -> None:
    """Fill the disk with prompts that are asked for often, and have many others asked for once."""
    hot = [prompt(20) for _ in range(server.config.disk_bytes // RECORD_NBYTES // 20)]
    for turn in range(4):
        for tokens in hot:
            note(engine, tokens)
            for _ in range(8):
                note(engine, prompt(20))
            if not turn:
                assert set(put(engine, tokens)) == {ord("o")}
    rest = prompt(20)
    for _ in range(4):
        note(engine, rest)
    put(engine, rest)


def test_a_full_disk_declines_what_is_not_worth_it_and_says_so(server: Server, engine: FakeEngine) -> None:
    assert engine.welcome is not None and engine.welcome.policy == engine.client.policy == "learned"
    fill(server, engine)
    before = server.service.disk.stat().num_declined
    once = prompt(20)
    note(engine, once)
    assert put(engine, once) == b"n" * 20
    stat = server.service.disk.stat()
    assert stat.num_declined == before + 20 and stat.num_dropped == 0
    row = next(t for t in server.commands.inspector.stat()["tiers"] if t["name"] == "disk")
    assert (row["num_declined"], row["policy"]) == (stat.num_declined, "learned")
    for _ in range(6):
        note(engine, once)
    assert put(engine, once) == b"o" * 20, "it is asked for more often than others by now"
    stat = server.service.disk.stat()
    line = f'tierkv_tier_declined_total{{tier="disk"}} {float(stat.num_declined)}'
    wait_until(lambda: line in Client(server).get("/metrics"))  # they are a second old at most


def test_a_sessions_time_counts_as_far_as_its_tenant_may_hold_so_much(server: Server, engine: FakeEngine) -> None:
    own = msgspec.structs.replace(server.config, sessions=SessionsConfig(percent=20, tenant_percent=10))
    assert server.service.session_table is not None
    server.service.session_table.reconfigure(own)
    fill(server, engine)
    most = server.config.disk_bytes // 10 // RECORD_NBYTES
    short, long = prompt(most - 2), prompt(most + 2)
    name = session_digest(TENANT, "short")
    note(engine, short, session=name, retain_s=30.0)
    assert put(engine, short) == b"o" * (most - 2)
    note(engine, long, session=session_digest(TENANT, "long"), retain_s=30.0)
    assert put(engine, long) == b"n" * (most + 2)
    assert server.service.disk.release(NS, name.hex()), "the policy knows the session by its digest"
    note(engine, short, session=name, retain_s=30.0)
    engine.client.turn(SessionTurn(name, TENANT, b"".join(engine.keys(short)), 0.0, True))
    put(engine, prompt(1))  # what was sent before it has been taken
    assert not server.service.disk.release(NS, name.hex()), "the turn has released it"


def hold(engine: FakeEngine, took: Sequence[int] = (), gone: Sequence[int] = ()) -> bytes | None:
    """Tell the server which prompts the pool keeps and which it does not any more, and return its answer."""
    answers: list[bytes | None] = []
    engine.client.hold(engine.keys(took), engine.keys(gone), answers.append)
    wait_until(lambda: answers, what="no reply to HOLD")
    return answers[0]


def test_the_disk_does_without_what_the_only_engine_keeps_until_that_lets_go_of_it(
    server: Server, engine: FakeEngine
) -> None:
    assert engine.welcome is not None and engine.welcome.holds and engine.client.holder == engine.welcome.session
    assert hold(engine, prompt(2)) == b"0", "there is room: nothing that is offered is missing"
    fill(server, engine)
    tokens = prompt(20)
    for _ in range(6):
        note(engine, tokens)
    assert hold(engine, tokens) == b"1"
    assert put(engine, tokens) == b"n" * 20
    hold(engine, gone=tokens)
    assert put(engine, tokens) == b"o" * 20, "it is worth a write, had the pool not kept it"
    hold(engine, tokens)
    more = prompt(20)
    for _ in range(6):
        note(engine, more)
    assert put(engine, more) == b"o" * 20
    assert engine.match(tokens) == b"", "what the pool keeps went for it"


def test_with_a_second_engine_that_lacks_them_chunks_count_as_any_other(server: Server, engine: FakeEngine) -> None:
    fill(server, engine)
    tokens = prompt(20)
    for _ in range(6):
        note(engine, tokens)
    hold(engine, tokens)
    with FakeEngine(server.config.socket, NAMESPACE, engine_id="another") as other:
        assert put(engine, tokens) == b"o" * 20, "the other one has to get them from somewhere"
        assert other.match(tokens) == b"d" * 20
        more = prompt(20)
        for _ in range(6):
            note(engine, more)
        put(engine, more)
        assert engine.match(tokens) == b"d" * 20
    wait_until(lambda: len(server.service.sessions) == 1)
    more = prompt(20)
    for _ in range(6):
        note(engine, more)
    put(engine, more)
    assert engine.match(tokens) == b"", "since the other one has left"


def test_an_engine_that_has_left_keeps_nothing(server: Server, engine: FakeEngine) -> None:
    fill(server, engine)
    tokens = prompt(20)
    for _ in range(6):
        note(engine, tokens)
    with FakeEngine(server.config.socket, NAMESPACE, engine_id="another") as other:
        hold(other, tokens)
        hold(engine, tokens)
        assert put(engine, tokens) == b"n" * 20
    wait_until(lambda: len(server.service.sessions) == 1)
    assert put(engine, tokens) == b"n" * 20, "this one has them"
    hold(engine, gone=tokens)
    assert put(engine, tokens) == b"o" * 20


def test_no_more_is_kept_than_a_pool_has_room_for_and_nothing_is_said_of_it_where_it_is_of_no_use(
    server: Server, engine: FakeEngine, short_dir: Path
) -> None:
    tokens = prompt(engine.shape.num_slots + 10)
    assert hold(engine, tokens) == b"0"
    assert len(server.service.disk._catalog.order.held) == engine.shape.num_slots  # type: ignore[attr-defined]
    with FakeEngine(server.config.socket, NAMESPACE, inline=True) as remote:
        assert remote.client.holder == "", "it would send everything once more over the network"
    directory = short_dir / "other"
    directory.mkdir()
    with serving(make_config(directory, policy="lru")) as other, FakeEngine(other.config.socket, NAMESPACE) as plain:
        assert plain.welcome is not None and not plain.welcome.holds and plain.client.holder == ""


def test_an_engine_and_a_server_of_which_one_knows_no_holds_understand_each_other() -> None:
    """The field is optional in both directions, as new fields of the welcome are."""
    about = {"version": "1", "protocol": 1, "boot": "", "session": "s", "pid": 1, "disk_dir": "", "disk_bytes": 0}
    old = msgspec.json.encode(about | {"shared": ""})
    assert msgspec.json.decode(old, type=Welcome).holds is False
    assert msgspec.json.decode(msgspec.json.encode(about | {"shared": "", "later": 1}), type=Welcome).session == "s"


def test_lru_takes_everything(short_dir: Path) -> None:
    with serving(make_config(short_dir, disk_bytes=16 << 20, policy="lru")) as server:
        with FakeEngine(server.config.socket, NAMESPACE) as engine:
            assert engine.client.policy == "lru"
            for _ in range(server.config.disk_bytes // RECORD_NBYTES // 20 + 3):
                tokens = prompt(20)
                note(engine, tokens)
                assert put(engine, tokens) == b"o" * 20
        stat = server.service.disk.stat()
        assert stat.num_declined == 0 and stat.num_evicted > 20 and stat.policy == "lru"


def test_what_makes_no_sense_is_refused(server: Server, engine: FakeEngine) -> None:
    from tierkv.admin_client import AdminClient

    with AdminClient(server.config.socket) as client, pytest.raises(RefusedError, match="no session"):
        client.call("TKV.NOTE", msgspec.msgpack.encode(RequestNote(TENANT, b"")))
    session = next(iter(server.service.sessions.values()))
    for bad in (RequestNote(b"short", b""), RequestNote(TENANT, b"x"), RequestNote(TENANT, b"", b"short")):
        with pytest.raises((ValueError, msgspec.MsgspecError)):
            server.commands._note(
                type("C", (), {"need_session": lambda self: session})(),  # type: ignore[arg-type]
                [msgspec.msgpack.encode(bad)],
            )


def test_a_policy_is_chosen_by_name_and_checked_at_start(tmp_path: Path) -> None:
    path = tmp_path / "tierkv.toml"
    path.write_text('[disk]\npolicy = "s3fifo"\n')
    assert load(path).disk.policy == "s3fifo"
    path.write_text('[disk]\npolicy = "lruu"\n')
    with pytest.raises(BadConfigError, match="lruu"):
        load(path)
    config = EngineConfig.parse({"policy": {"host": "lru", "disk": "s3fifo"}})
    assert (
        config.policy == {"host": "lru", "disk": "s3fifo"}
        and "host policy lru, disk policy s3fifo" in config.describe()
    )
    for options, words in (
        ({"policy": "lru"}, "an object"),
        ({"policy": {"gpu": "lru"}}, "gpu"),
        ({"policy": {"host": "fifo"}}, "use one of learned, s3fifo, lru"),
        ({"policy": {"disk": "lru"}, "server": "off"}, "no effect"),
    ):
        with pytest.raises(ConfigError, match=words):
            EngineConfig.parse(options)
