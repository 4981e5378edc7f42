"""A server as an operator sees it: what it says, reloads, and does when it is told to leave or a manager started it."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_engine import FakeEngine, wait_until
from servers import RedisServer, free_port, server_binaries, start_redis
from tierkv import __version__
from tierkv.client import AdminClient
from tierkv.errors import RefusedError, TierKVError, UnavailableError
from tierkv.resp import encode_command
from tierkv_server.signals import EXIT_CUT_SHORT

CHUNK = 32
PROMPT = list(range(4 * CHUNK))

pytestmark = pytest.mark.usefixtures("no_leaks")
needs_redis = pytest.mark.skipif(not server_binaries(), reason="neither Redis nor Valkey is installed")


class Served:
    """A server started by ``tierkv serve --config``; its log is in a file."""

    def __init__(
        self, directory: Path, *options: str, env: dict[str, str] | None = None, before: str = "", **streams: Any
    ) -> None:
        self.directory = directory
        self.file = directory / "tierkv.toml"
        self.socket = directory / "store" / "tierkv.sock"
        self.log_file = directory / "log"
        command = [sys.executable, "-m", "tierkv.cli", "serve", *options]
        if before:  # Python that runs in the same process first
            command = [sys.executable, "-c", f"import os, sys; {before}; os.execv(sys.argv[1], sys.argv[1:])", *command]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("TIERKV_", "LISTEN_", "NOTIFY_"))}
        with self.log_file.open("ab") as log:
            streams = {"stderr": log, "stdin": subprocess.DEVNULL} | streams
            self.process = subprocess.Popen(command, env=environment | (env or {}), **streams)
        self.client: AdminClient | None = None

    def wait(self) -> Served:
        """Return when the server answers."""
        wait_until(self._answers, what="the server did not start")
        return self

    def _answers(self) -> bool:
        assert self.process.poll() is None, f"the server left: {self.log}"
        with contextlib.suppress(UnavailableError), AdminClient(self.socket) as client:
            return client.call("PING") == b"PONG"
        return False

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def ask(self, *words: str) -> Any:
        """Send a command and return its reply, decoded where it is JSON."""
        with AdminClient(self.socket) as client:
            return json.loads(client.call(*words))

    def budget(self) -> int:
        return int(next(tier["budget"] for tier in self.ask("TKV.STAT")["tiers"] if tier["name"] == "disk"))

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def says(self, *words: str) -> None:
        """Wait until a line of the log has all these words."""
        wait_until(lambda: any(all(w in line for w in words) for line in self.log.splitlines()), what=f"{words}")

    def ended(self) -> int:
        """Wait for the end and return the exit code."""
        return self.process.wait(timeout=60)


Start = Callable[..., Served]


@pytest.fixture
def start(short_dir: Path) -> Iterator[Start]:
    """Starts servers on a configuration; none is left at the end."""
    running: list[Served] = []

    def start(text: str = "", *options: str, **other: Any) -> Served:
        (short_dir / "tierkv.toml").write_text(f'{text}\n[disk]\ndir = "store"\nbytes = "64MiB"\n')
        words = ["--config", str(short_dir / "tierkv.toml"), *options]
        running.append(Served(short_dir, *words, **other))
        return running[-1]

    yield start
    for served in running:
        if served.process.poll() is None:
            served.process.kill()
        served.process.wait()


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    server = start_redis(tmp_path)
    yield server
    server.kill()


# -- start


def test_the_effective_configuration_is_the_first_line(start: Start) -> None:
    served = start("drain = 3", "--set", "disk.ttl=1d", "--set", "quota.tenant_bytes=8MiB").wait()
    first = served.log.splitlines()[0]
    assert f"serving on {served.socket}: disk 64 MiB in {served.directory}/store, no shared tier; stays" in first
    assert first.endswith("; drain=3s; disk.ttl=1d; quota.tenant_bytes=8 MiB")
    served.signal(signal.SIGTERM)
    assert served.ended() == 0
    assert [line.partition("INFO ")[2] for line in served.log.splitlines()[1:]] == ["SIGTERM: leaving", "stopped"]


def test_options_go_before_the_file(start: Start) -> None:
    served = start("", "--disk-bytes", "32MiB", env={"TIERKV_SHARED_URL": "redis://u:hunter2@127.0.0.1:1"}).wait()
    assert "disk 32 MiB" in served.log and "shared redis://u:***@127.0.0.1:1" in served.log
    assert served.budget() == 32 << 20
    arguments = Path(f"/proc/{served.process.pid}/cmdline").read_bytes()
    assert b"hunter2" not in arguments and "hunter2" not in served.log


def test_a_bad_configuration_is_refused_whole_and_nothing_is_made(start: Start) -> None:
    served = start('drain = "x"\nlinger = -1\n', "--set", "listen.tcp=0.0.0.0:1")
    assert served.ended() == 2
    assert "has 4 mistakes: $.drain: " in served.log and "$.linger: " in served.log
    assert served.log.count("$.listen.tcp: ") == 2 and served.log.count("\n") == 1
    assert not (served.directory / "store").exists()


@pytest.mark.parametrize("setting", ["disk.bytes", "=1", "disk bytes=1", "disk.dir.x=1", "nope=1", "disk=5"])
def test_a_setting_that_is_none(start: Start, setting: str) -> None:
    served = start("", "--set", setting)
    assert served.ended() == 2
    assert served.log.startswith("tierkv: ") and served.log.count("\n") == 1


# -- reload


def test_sighup_reads_the_file_again(start: Start) -> None:
    served = start().wait()
    assert served.budget() == 64 << 20
    served.file.write_text('log_level = "debug"\n[disk]\ndir = "elsewhere"\nbytes = "96MiB"\n')
    served.signal(signal.SIGHUP)
    served.says("changed disk.bytes from 64 MiB to 96 MiB")
    served.says("kept until the next start: disk.dir from", "elsewhere", "listen.socket")
    served.says("changed log_level from info to debug")
    assert served.budget() == 96 << 20 and not (served.directory / "elsewhere").exists()
    served.file.write_text("[disk]\nbytes = 0\n")
    served.signal(signal.SIGHUP)
    served.says("ERROR", "nothing has changed", "$.disk.bytes: 0 is not possible")
    assert served.budget() == 96 << 20
    served.signal(signal.SIGTERM)
    assert served.ended() == 0


def test_the_command_reload_answers_what_changed(start: Start) -> None:
    served = start('[shared]\nurl = "redis://127.0.0.1:1"\n').wait()
    assert served.ask("TKV.RELOAD") == []
    text = served.file.read_text().replace("64MiB", "65MiB").replace("127.0.0.1:1", "127.0.0.1:2")
    served.file.write_text(text + '[quota.tenants]\n"00112233445566778899aabbccddeeff" = "1MiB"\n')
    said = served.ask("TKV.RELOAD")
    assert said[:2] == [
        "changed disk.bytes from 64 MiB to 65 MiB",
        "changed quota.tenants from none to 00112233:1 MiB",
    ]
    assert len(said) == 3 and "kept until the next start: shared.url from redis://127.0.0.1:1" in said[2]
    served.file.write_text("[disk\n")
    with pytest.raises(TierKVError, match="is no TOML"):
        served.ask("TKV.RELOAD")
    assert served.budget() == 65 << 20


def test_tokens_are_exchanged_while_it_runs(start: Start, short_dir: Path) -> None:
    """The file's name stays, what is in it does not: old tokens are cut off, new ones let in."""
    port = free_port()
    token = short_dir / "admin"
    token.write_text("first-token-0123456789")
    token.chmod(0o600)
    served = start(f'[listen]\ntcp = "127.0.0.1:{port}"\ninsecure = true\nadmin_token_file = "admin"\n').wait()

    def say(link: socket.socket, *words: str) -> bytes:
        link.sendall(encode_command(words))
        return link.recv(4096)

    with socket.create_connection(("127.0.0.1", port), timeout=30) as link:
        assert say(link, "AUTH", "first-token-0123456789") == b"+OK\r\n" and say(link, "PING") == b"+PONG\r\n"
        token.write_text("short")
        with pytest.raises(TierKVError, match="5 characters"):
            served.ask("TKV.RELOAD")
        assert say(link, "PING") == b"+PONG\r\n", "a token that cannot be used changes nothing"
        token.write_text("other-token-0123456789")
        assert served.ask("TKV.RELOAD") == []
        assert link.recv(4096) == b"", "its token is not valid any more"
    with socket.create_connection(("127.0.0.1", port), timeout=30) as link:
        assert say(link, "AUTH", "first-token-0123456789").startswith(b"-WRONGPASS")
        assert say(link, "AUTH", "other-token-0123456789") == b"+OK\r\n"
    assert "token-0123456789" not in served.log


def test_spill_policies_change_while_engines_run(start: Start, no_leaks: None) -> None:
    served = start().wait()
    with FakeEngine(served.socket) as engine:
        engine.put(PROMPT)
        assert engine.match(PROMPT) == b"dddd"
        served.file.write_text('[disk]\ndir = "store"\nbytes = "64MiB"\nspill = "never"\n')
        assert served.ask("TKV.RELOAD") == ["changed disk.spill from through to never"]
        other = [token + 1000 for token in PROMPT]
        engine.put(other, wait=False)
        served.ask("TKV.DRAIN")
        assert engine.match(other) == b"" and engine.match(PROMPT) == b"dddd"


def test_without_a_file_sighup_is_ignored(short_dir: Path) -> None:
    served = Served(short_dir, "--disk-dir", str(short_dir / "store")).wait()
    try:
        served.signal(signal.SIGHUP)
        served.says("SIGHUP", "no configuration file")
        assert served.ask("TKV.NS") == {}
        with pytest.raises(RefusedError, match="without a configuration file"):
            served.ask("TKV.RELOAD")
    finally:
        served.signal(signal.SIGTERM)
        assert served.ended() == 0


@pytest.mark.parametrize("with_file", [True, False])
def test_a_server_whose_terminal_is_gone_leaves(short_dir: Path, with_file: bool) -> None:
    (short_dir / "tierkv.toml").write_text("")
    leader, follower = pty.openpty()
    options = ["--disk-dir", str(short_dir / "store")] + ["--config", str(short_dir / "tierkv.toml")] * with_file
    served = Served(short_dir, *options, stdin=follower, stderr=follower, start_new_session=True)
    os.close(follower)
    try:
        served.wait()
        os.close(leader)
        served.signal(signal.SIGHUP)  # which the kernel sends to whoever has it as the controlling terminal
        assert served.ended() == 0 and not served.socket.exists()
    finally:
        served.process.kill()
        served.process.wait()


# -- leaving


def to_frozen_redis(start: Start, redis_server: RedisServer, drain: str) -> tuple[Served, FakeEngine]:
    """Return a server that has stores queued for a Redis that is stopped, and the engine that sent them."""
    text = f'drain = "{drain}"\n[shared]\nurl = "{redis_server.url}"\nspill = "through"\ntimeout = "60s"\n'
    served = start(text).wait()
    engine = FakeEngine(served.socket)
    engine.put(PROMPT[:CHUNK])
    assert served.ask("TKV.DRAIN") == 1  # connected, and the namespace is known there
    redis_server.sigstop()
    engine.put(PROMPT)
    return served, engine


def num_records(redis_server: RedisServer) -> int:
    client = redis_server.client()
    return sum(client.type(key) == b"string" and client.strlen(key) >= 2048 for key in client.scan_iter("tierkv*"))


@needs_redis
def test_sigterm_writes_what_is_queued_and_stores_nothing_more(start: Start, redis_server: RedisServer) -> None:
    served, engine = to_frozen_redis(start, redis_server, "10m")
    with engine:
        served.signal(signal.SIGTERM)
        served.says("writing what is queued before leaving")
        other = [token + 1000 for token in PROMPT]
        engine.put(other[:CHUNK], wait=False)
        entry = engine.index.get(engine.keys(other)[0])
        assert entry is not None
        reply = engine.store([engine._item(entry, engine.keys(other), "")])
        assert engine.result(reply) == b"b", "a server that leaves stores nothing more"
        engine.forget()
        assert engine.get(PROMPT) == engine.expected(PROMPT), "loads go on until it is gone"
        redis_server.sigcont()
        assert served.ended() == 0
    assert num_records(redis_server) == len(PROMPT) // CHUNK
    assert "not everything was written" not in served.log
    assert not served.socket.exists()


@needs_redis
def test_sigterm_is_bounded(start: Start, redis_server: RedisServer) -> None:
    served, engine = to_frozen_redis(start, redis_server, "200ms")
    with engine:
        served.signal(signal.SIGTERM)
        served.says("leaving although not everything was written", "shared")
        redis_server.sigcont()  # closing waits for the answer that is awaited, as long as CLOSE_S
        assert served.ended() in (0, EXIT_CUT_SHORT)


@needs_redis
def test_a_second_sigterm_ends_at_once(start: Start, redis_server: RedisServer) -> None:
    served, engine = to_frozen_redis(start, redis_server, "10m")
    with engine:
        served.signal(signal.SIGTERM)
        served.says("writing what is queued before leaving")
        served.signal(signal.SIGTERM)
        assert served.ended() == EXIT_CUT_SHORT
        assert "leaving at once: told twice" in served.log
    redis_server.sigcont()
    again = start().wait()  # nothing is damaged, and its socket is taken over
    with FakeEngine(again.socket) as engine:
        assert engine.get(PROMPT) == engine.expected(PROMPT)


def test_the_command_shutdown_drains_too(start: Start) -> None:
    served = start().wait()
    with AdminClient(served.socket) as client:
        assert client.call("SHUTDOWN") == b"OK"
    assert served.ended() == 0


# -- the service manager


@pytest.fixture
def manager(short_dir: Path) -> Iterator[socket.socket]:
    """The socket on which a service manager hears how its services are."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
        link.bind(str(short_dir / "notify"))
        link.settimeout(30)
        yield link


def test_a_service_manager_hears_how_the_server_is(start: Start, manager: socket.socket) -> None:
    served = start(env={"NOTIFY_SOCKET": manager.getsockname()})
    status = f"READY=1\nSTATUS=serving on {served.socket}: "
    assert manager.recv(4096).decode().startswith(status)
    served.signal(signal.SIGHUP)
    assert manager.recv(4096) == b"RELOADING=1"
    assert manager.recv(4096).decode().startswith(status)
    served.signal(signal.SIGTERM)
    assert manager.recv(4096) == b"STOPPING=1"
    assert served.ended() == 0


@pytest.fixture
def listener(short_dir: Path) -> Iterator[socket.socket]:
    """A unix socket that a service manager listens on."""
    (short_dir / "run").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(short_dir / "run" / "made.sock"))
        sock.listen(16)
        yield sock


def activated(listener: socket.socket, num: str = "1") -> dict[str, Any]:
    """Return how a process is started that gets ``listener`` as systemd would pass it."""
    fd = listener.fileno()
    before = f"os.dup2({fd}, 3); os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='{num}')"
    return {"before": before, "pass_fds": [fd]}


def test_socket_activation(start: Start, listener: socket.socket, short_dir: Path) -> None:
    path = short_dir / "run" / "made.sock"
    with socket.socket(socket.AF_UNIX) as early:  # it waits in the queue of a server that is not there yet
        early.connect(str(path))
        early.sendall(b"PING\r\n")
        served = start(**activated(listener))
        early.settimeout(60)
        assert early.recv(64) == b"+PONG\r\n"
    served.socket = path
    assert f"serving on {path}: " in served.log and not (short_dir / "store" / "tierkv.sock").exists()
    with FakeEngine(path) as engine:  # descriptors pass through it
        engine.put(PROMPT)
        engine.forget()
        assert engine.get(PROMPT) == engine.expected(PROMPT)
    assert served.ask("TKV.RELOAD") == [], "the socket's path counts as an option"
    served.signal(signal.SIGTERM)
    assert served.ended() == 0
    assert path.is_socket(), "it is the manager's"
    again = start(**activated(listener))
    again.socket = path
    assert again.wait().ask("TKV.STAT")["server"]["version"] == __version__


def test_what_else_is_passed_is_refused(start: Start, listener: socket.socket, tmp_path: Path) -> None:
    served = start(**activated(listener, "2"))
    assert served.ended() == 2 and "2 sockets were passed" in served.log
    with (tmp_path / "file").open("w") as file:
        served = start(**activated(file))  # type: ignore[arg-type]
        assert served.ended() == 2 and "is no socket" in served.log
    with socket.socket() as tcp:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        served = start(**activated(tcp))
        assert served.ended() == 2 and "no unix stream socket" in served.log


def test_sockets_passed_to_another_process_are_not_ours(start: Start) -> None:
    served = start(env={"LISTEN_PID": "1", "LISTEN_FDS": "1"}).wait()
    assert served.socket.is_socket()
