"""The protocol as clients that nobody here wrote see it: redis-py, redis-cli, and bytes by hand."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.backoff import NoBackoff
from redis.retry import Retry

from fake_engine import FakeEngine, wait_until
from network import Wire, host_port, insecure_config, make_tokens, tls_config
from servers import TlsFiles, make_certificates
from serving import make_config, serving
from tierkv import __version__, resp
from tierkv.resp import Error, Simple, encode_command
from tierkv.server_config import ServerConfig
from tierkv_server import commands
from tierkv_server.access import Role, may
from tierkv_server.server import Server

CHUNK = 32
PROMPT = list(range(1000, 1000 + 6 * CHUNK))
CLI = shutil.which("redis-cli")
BENCHMARK = shutil.which("redis-benchmark")

pytestmark = pytest.mark.usefixtures("no_leaks")
needs_cli = pytest.mark.skipif(CLI is None, reason="redis-cli is not installed")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def server(short_dir: Path) -> Iterator[Server]:
    """Over the unix socket, and over TCP on the loopback without tokens."""
    with serving(insecure_config(short_dir)) as server:
        yield server


@pytest.fixture
def engine(server: Server) -> Iterator[FakeEngine]:
    with FakeEngine(server.config.socket) as engine:
        engine.put(PROMPT)
        yield engine


class Secured:
    """A server over TLS with tokens."""

    def __init__(self, directory: Path, files: TlsFiles) -> None:
        paths = make_tokens(directory)
        self.files = files
        self.config = tls_config(directory, files, paths)
        self.tokens = {role: path.read_text().strip() for role, path in paths.items()}
        self.host, self.port = host_port(self.config)

    def redis(self, role: str, **options: Any) -> redis.Redis:
        """A redis-py client with a role's token as its password."""
        given = {"host": self.host, "port": self.port, "ssl": True, "ssl_ca_certs": str(self.files.ca)}
        given["retry"] = Retry(NoBackoff(), 0)
        return redis.Redis(**given | {"password": self.tokens[role]} | options)


@pytest.fixture
def secured(short_dir: Path, files: TlsFiles) -> Iterator[Secured]:
    secured = Secured(short_dir, files)
    with serving(secured.config):
        yield secured


# -- redis-py


@pytest.fixture(params=["unix", "tcp", "tls"])
def client(
    request: pytest.FixtureRequest, short_dir: Path, files: TlsFiles
) -> Iterator[tuple[ServerConfig, dict[str, Any]]]:
    """A server, and what redis-py needs to reach it."""
    if request.param == "tls":
        secured = Secured(short_dir, files)
        config = secured.config
        options: dict[str, Any] = {
            "host": secured.host,
            "port": secured.port,
            "ssl": True,
            "ssl_ca_certs": str(files.ca),
            "password": secured.tokens["admin"],
        }
    else:
        config = insecure_config(short_dir)
        host, port = host_port(config)
        options = {"unix_socket_path": str(config.socket)} if request.param == "unix" else {"host": host, "port": port}
    with serving(config):
        yield config, options


@pytest.mark.parametrize("protocol", [2, 3])
def test_redis_py(client: tuple[ServerConfig, dict[str, Any]], protocol: int) -> None:
    config, options = client
    with FakeEngine(config.socket) as engine, redis.Redis(protocol=protocol, **options) as r:
        keys = engine.put(PROMPT)
        assert r.ping() is True
        assert r.echo("hello") == b"hello"
        about = r.execute_command("HELLO", protocol)
        about = about if protocol == 3 else dict(zip(about[::2], about[1::2], strict=True))
        assert about[b"server"] == b"tierkv"
        assert about[b"version"] == __version__.encode()
        assert about[b"proto"] == protocol
        stat = json.loads(r.execute_command("TKV.STAT"))
        assert stat["server"]["num_engines"] == 1
        (row,) = json.loads(r.execute_command("TKV.LS"))
        assert row["tokens"] == 6 * CHUNK
        packed = b"".join(keys)
        assert r.execute_command("TKV.MATCH", bytes.fromhex(engine.ns), 0, keys[0], packed) == b"dddddd"
        pipe = r.pipeline(transaction=False)
        for i in range(500):
            pipe.execute_command("ECHO", i)
        assert pipe.execute() == [b"%d" % i for i in range(500)]
        for words, sentence in (
            (["GET", "x"], "unknown command"),
            (["TKV.LS", "not json"], "bad arguments"),
            (["TKV.EVICT"], "nothing was named"),
            (["TKV.FETCH", 0, b"", b"", b""], "this connection has no session"),
            (["ECHO"], "bad arguments"),
        ):
            with pytest.raises(redis.ResponseError, match=sentence):
                r.execute_command(*words)
        assert r.ping() is True  # an error is an answer: the connection lives


def test_redis_py_with_tokens(secured: Secured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "AUTH_DELAY_S", 0.01)
    for protocol in (2, 3):
        with secured.redis("reader", protocol=protocol) as r:
            assert r.execute_command("TKV.NS") == b"{}"
            with pytest.raises(redis.exceptions.NoPermissionError):
                r.execute_command("TKV.EVICT", "{}")
        with secured.redis("reader", username="reader", protocol=protocol) as r:
            assert r.execute_command("TKV.NS") == b"{}"
        for options in ({"username": "admin"}, {"password": "wrong"}, {"password": None}):
            with (
                secured.redis("reader", protocol=protocol, **options) as r,
                pytest.raises((redis.AuthenticationError, redis.ResponseError)),
            ):
                r.execute_command("TKV.NS")


# -- redis-cli


def cli(
    *args: str | Path | int, config: ServerConfig | None = None, stdin: str = "", env: dict[str, str] | None = None
) -> str:
    """Run redis-cli and return what it printed."""
    assert CLI
    where = ["-s", str(config.socket)] if config else []
    command = [CLI, *where, *map(str, args)]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, env=env)
    return done.stdout + done.stderr


@needs_cli
def test_redis_cli(server: Server, engine: FakeEngine) -> None:
    config = server.config
    host, port = host_port(config)
    assert cli("PING", config=config) == "PONG\n"
    assert cli("-h", host, "-p", port, "PING") == "PONG\n"
    assert cli("-2", "ECHO", "two words", config=config) == "two words\n"
    assert cli("-3", "ECHO", "two words", config=config) == "two words\n"
    (row,) = json.loads(cli("TKV.LS", config=config))
    assert row["id"] == engine.keys(PROMPT)[-1].hex()[:12]
    report = json.loads(cli("TKV.EVICT", json.dumps({"prefix": row["id"], "dry_run": True}), config=config))
    assert report["num_removed"] == 12
    assert "REFUSED nothing was named to evict" in cli("TKV.EVICT", config=config)
    assert "ERR unknown command 'NOPE'" in cli("NOPE", config=config)
    lines = "PING\nECHO a\nTKV.NS\n"
    assert cli(config=config, stdin=lines).splitlines()[:2] == ["PONG", "a"]
    assert "errors: 0, replies: 200" in cli("--pipe", config=config, stdin="PING\r\n" * 200)


@needs_cli
def test_redis_cli_shuts_it_down(short_dir: Path) -> None:
    config = make_config(short_dir)
    with serving(config) as server:
        assert "OK" in cli("SHUTDOWN", config=config)
        wait_until(lambda: server.leaving)


@needs_cli
def test_redis_cli_over_tls_with_a_token(secured: Secured) -> None:
    where = ["--tls", "--cacert", secured.files.ca, "-h", "localhost", "-p", secured.port]
    env = {"REDISCLI_AUTH": secured.tokens["reader"]}  # -a would show it to everybody
    assert cli(*where, "TKV.NS", env=env) == "{}\n"
    assert cli(*where, "-3", "TKV.NS", env=env) == "{}\n"
    assert "NOPERM the reader's token does not allow TKV.EVICT" in cli(*where, "TKV.EVICT", env=env)
    assert "NOAUTH authentication is required" in cli(*where, "TKV.NS")
    assert "WRONGPASS" in cli(*where, "TKV.NS", env={"REDISCLI_AUTH": "wrong"})
    assert "{}" in cli(*where, "--user", "reader", "TKV.NS", env=env)
    refused = cli("--tls", "--cacert", secured.files.other_ca, *where[3:], "PING", env=env)
    assert "certificate verify failed" in refused
    refused = cli("-h", "localhost", "-p", secured.port, "PING", env=env)
    assert "PONG" not in refused


@pytest.mark.skipif(BENCHMARK is None, reason="redis-benchmark is not installed")
def test_redis_benchmark(server: Server) -> None:
    """Many connections and deep pipelines: every reply comes."""
    assert BENCHMARK
    host, port = host_port(server.config)
    for where in (["-s", str(server.config.socket)], ["-h", host, "-p", str(port)]):
        command = [BENCHMARK, *where, "-n", "2000", "-c", "20", "-P", "16", "--csv", "ECHO", "hello"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert '"ECHO hello"' in done.stdout
    wait_until(lambda: not server._connections, what="connections were kept")


# -- by hand


def test_pipelined_commands_are_answered_in_order_however_they_are_cut(server: Server) -> None:
    commands = [encode_command(["ECHO", i]) for i in range(300)] + [b"ECHO inline\r\n"]
    data = b"".join(commands)
    with Wire(server.config, unix=True) as whole, Wire(server.config) as cut:
        whole.send(data)
        for at in range(0, len(data), 997):
            cut.send(data[at : at + 997])
        for wire in (whole, cut):
            assert [wire.reply() for _ in commands] == [*(b"%d" % i for i in range(300)), b"inline"]


def test_what_follows_quit_is_not_looked_at(server: Server) -> None:
    with Wire(server.config) as wire:
        wire.send(b"ping\r\nquit\r\nSHUTDOWN\r\n")
        assert [wire.reply(), wire.reply()] == ["PONG", "OK"]
        assert wire.ended()
    assert not server.leaving


@pytest.mark.parametrize(
    "garbage",
    [
        b"*9999999999\r\n",
        b"*-2\r\n",
        b"*1\r\n$99999999999\r\n",
        b"*1\r\n$-2\r\n",
        b"*1\r\n" * 20,
        b"*1\r\n:5\r\n",
        b"*1\r\n*1\r\n$4\r\nPING\r\n",
        b"*2\r\n$4\r\nPING\r\n$-1\r\n",
        b"*1\r\n$4\r\nPINGxx",
        b"*x\r\n",
        b":5\r\n",
        b"+OK\r\n",
        b"-ERR x\r\n",
        b"$4\r\nPING\r\n",
        b"x" * (resp.MAX_LINE_NBYTES + 1),
        b"*3\r\n" + b"$67108864\r\n" + bytes(16),
    ],
)
def test_a_framing_error_is_one_reply_and_the_end(server: Server, garbage: bytes) -> None:
    if garbage.endswith(bytes(16)):  # three strings of 64 MiB: more than a command may have
        garbage = b"*3\r\n" + (b"$%d\r\n" % (60 << 20) + bytes(60 << 20) + b"\r\n") * 2 + b"$%d\r\n" % (60 << 20)
    for unix in (True, False):
        with Wire(server.config, unix=unix) as wire, Wire(server.config, unix=unix) as other:
            wire.send(b"PING\r\n" + garbage + encode_command(["PING"]))
            assert wire.reply() == "PONG"
            reply = wire.reply()
            assert isinstance(reply, Error) and reply.startswith("ERR protocol: ")
            with pytest.raises(EOFError):
                wire.reply()
            assert other.call("PING") == "PONG"


def test_limits_of_a_command(server: Server) -> None:
    with Wire(server.config, unix=True) as wire:
        longest = bytes(resp.MAX_BULK_NBYTES)
        assert wire.call("ECHO", longest) == longest
        many = [b"ECHO", *([b"x"] * 100_000)]
        assert wire.call(*many) == b"x"
        assert str(wire.call("NOPE" * 100)).startswith("ERR unknown command 'NOPE")
        assert str(wire.call("TKV.MATCH", bytes(16), 0, bytes(32), bytes(32 * (1 << 17) + 32))).startswith("ERR bad")
    assert server.network()["garbage"] == 0


def test_an_empty_command_is_nothing(server: Server) -> None:
    with Wire(server.config) as wire:
        wire.send(b"\r\n*0\r\n   \r\n")
        assert wire.call("PING") == "PONG"


ANYTHING = st.one_of(
    st.binary(max_size=40),
    st.integers(-(2**40), 2**40),
    st.sampled_from(
        [b"", b"{}", b"[]", b"null", b'{"ns":"aa"}', bytes(16), bytes(32), bytes(64), b"\x90", b"\x91\xc0"]
    ),
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_any_arguments_are_answered(server: Server, engine: FakeEngine, data: st.DataObject) -> None:
    """No command with any arguments takes the server down, hangs, or leaves its connection out of step."""
    assert engine.welcome
    names = sorted(set(server.commands._table) - {b"SHUTDOWN", b"QUIT", b"TKV.DRAIN", b"TKV.SUBSCRIBE"})
    with Wire(server.config, unix=True) as wire:
        if data.draw(st.booleans()):
            assert wire.call("TKV.ATTACH", engine.welcome.session) == "OK"
        for _ in range(4):
            words = [data.draw(st.sampled_from(names)), *data.draw(st.lists(ANYTHING, max_size=5))]
            if words[0] == b"HELLO" and words[1:2] in ([3], [b"3"]):
                continue  # whose reply is RESP3's
            wire.call(*words)
        assert wire.call("ECHO", "in step") == b"in step"
    assert engine.client.health.num_faults == 0


# -- the hello


def test_another_version_is_told_which_one_is_here(server: Server) -> None:
    with Wire(server.config, unix=True) as wire:
        for body in ({"version": "0.0.1", "protocol": 1}, {"version": __version__, "protocol": 99}, {}):
            reply = wire.call("TKV.HELLO", json.dumps(body | {"something": "of the future"}))
            assert isinstance(reply, Error)
            assert reply.startswith("REFUSED this store server (pid ") and f"TierKV {__version__}, protocol 1" in reply


def test_every_reply_of_the_table_is_a_value_that_both_versions_have(server: Server, engine: FakeEngine) -> None:
    with Wire(server.config, unix=True) as wire:
        for name in sorted(set(server.commands._table) - {b"SHUTDOWN", b"QUIT", b"TKV.DRAIN", b"HELLO"}):
            reply = wire.call(name)
            assert isinstance(reply, Simple | Error | bytes | int | list), name


# -- the document


def test_the_document_names_every_command_with_its_roles(server: Server) -> None:
    text = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 4:
            for name in cells[0].split(","):
                rows[name.strip().strip("`").split()[0].upper().encode()] = cells[1]
    assert set(rows) == set(server.commands._table)
    letters = {Role.NOBODY: "-", Role.READER: "r", Role.ENGINE: "e", Role.ADMIN: "a"}
    for name, roles in rows.items():
        assert roles == " ".join(letter for role, letter in letters.items() if may(role, name)), name
