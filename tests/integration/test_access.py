"""Who comes in, what they may do, and what strangers may cost."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import socket
import ssl
import stat
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fake_engine import FakeEngine, wait_until
from leaks import stop_process
from network import Wire, address_of, host_port, insecure_config, make_tokens, tls_config, with_listen
from servers import TlsFiles, free_port, make_certificates
from serving import kill_launched, make_config, owner, serving
from tierkv.client import AdminClient
from tierkv.config import EngineConfig
from tierkv.errors import ConfigError, RefusedError, UnavailableError
from tierkv.launcher import Launcher
from tierkv.resp import Error, encode_command
from tierkv.transport import Address, load_token
from tierkv_server import access, commands, front
from tierkv_server.access import Role, Tokens, may
from tierkv_server.server import Server

CHUNK = 32
PROMPT = list(range(1000, 1000 + 6 * CHUNK))

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def tokens(short_dir: Path) -> dict[str, Path]:
    return make_tokens(short_dir)


@pytest.fixture
def server(short_dir: Path, tokens: dict[str, Path]) -> Iterator[Server]:
    """A server on the loopback without TLS, which asks for tokens."""
    named = {f"{role}_token_file": path for role, path in tokens.items()}
    with serving(insecure_config(short_dir, **named)) as server:
        yield server


@pytest.fixture
def tls_server(short_dir: Path, tokens: dict[str, Path], files: TlsFiles) -> Iterator[Server]:
    with serving(tls_config(short_dir, files, tokens)) as server:
        yield server


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting after a wrong token."""
    monkeypatch.setattr(commands, "AUTH_DELAY_S", 0.01)


def secret(path: Path) -> str:
    return path.read_text().strip()


# -- roles


def test_nobody_may_do_anything_before_authenticating(server: Server) -> None:
    with Wire(server.config) as wire:
        for name in [b"PING", b"ECHO", b"SHUTDOWN", b"NOPE", *server.commands._table]:
            if name not in (b"AUTH", b"HELLO", b"QUIT"):
                reply = wire.call(name, "x")
                assert isinstance(reply, Error) and reply.startswith("NOAUTH authentication is required"), name
        assert isinstance(wire.call("HELLO", 3), Error)
    assert server.service.sessions == {}


def test_each_role_may_send_what_is_its_own(server: Server, tokens: dict[str, Path]) -> None:
    replies: dict[str, set[str]] = {}
    for role, path in tokens.items():
        with Wire(server.config) as wire:
            assert wire.call("AUTH", secret(path)) == "OK"
            replies[role] = set()
            for name in server.commands._table:
                if name in (b"SHUTDOWN", b"QUIT", b"AUTH", b"TKV.DRAIN"):
                    continue
                reply = wire.call(name, "x", "y", "z", "u", "v")
                if not (isinstance(reply, Error) and reply.startswith("NOPERM")):
                    replies[role].add(name.decode())
            shutdown = wire.call("SHUTDOWN") if role != "admin" else ""
            assert role == "admin" or (isinstance(shutdown, Error) and shutdown.startswith("NOPERM"))
    common = {"PING", "ECHO", "COMMAND", "CLIENT", "SELECT", "HELLO", "TKV.MATCH"}
    read = ["STAT", "NS", "LS", "PAGE", "SHOW", "TREE", "DU", "LOCATE", "USAGE", "EVENTS", "SLOW", "REUSE", "SESSIONS"]
    read += ["CHUNKS", "STORED"]
    assert replies["reader"] == common | {f"TKV.{name}" for name in read}
    sent = {"HELLO", "ATTACH", "SUBSCRIBE", "ANSWER", "FETCH", "STORE", "USE", "NOTE", "HOLD", "TURN", "ASKED"}
    assert replies["engine"] == common | {f"TKV.{name}" for name in sent}
    assert replies["admin"] >= replies["reader"] | replies["engine"] | {"TKV.EVICT", "TKV.PIN"}


def test_a_command_that_nobody_knows_is_unknown_to_all_but_strangers(server: Server, tokens: dict[str, Path]) -> None:
    for role, path in tokens.items():
        with Wire(server.config) as wire:
            assert wire.call("AUTH", role, secret(path)) == "OK"
            assert wire.call("NOPE") == "ERR unknown command 'NOPE'"
            assert not may(Role(role), b"NOPE") or role == "admin"


def test_ways_to_authenticate(server: Server, tokens: dict[str, Path]) -> None:
    token = secret(tokens["reader"])
    for words in (
        ["AUTH", token],
        ["auth", "reader", token],
        ["AUTH", "default", token],
        ["HELLO", 3, "AUTH", "reader", token],
        ["HELLO", 2, "AUTH", "default", token, "SETNAME", "x"],
    ):
        with Wire(server.config) as wire:
            wire.send(encode_command(words) + encode_command(["TKV.NS"]))
            if words[:2] == ["HELLO", 3]:  # whose reply is RESP3's
                continue
            assert not isinstance(wire.reply(), Error), words
            assert wire.reply() == b"{}"
    for words in (
        ["AUTH", "admin", token],
        ["AUTH", "nobody", token],
        ["AUTH", "", token],
        ["AUTH", token + "x"],
        ["AUTH", token[:-1]],
        ["AUTH", ""],
        ["HELLO", 2, "AUTH", "admin", token],
    ):
        with Wire(server.config) as wire:
            reply = wire.call(*words)
            assert isinstance(reply, Error) and reply.startswith("WRONGPASS this token is not valid"), words
            assert str(wire.call("TKV.NS")).startswith("NOAUTH")


def test_a_wrong_token_does_not_take_a_role_away(server: Server, tokens: dict[str, Path]) -> None:
    with Wire(server.config) as wire:
        assert wire.call("AUTH", secret(tokens["reader"])) == "OK"
        assert str(wire.call("AUTH", "wrong" * 8)).startswith("WRONGPASS")
        assert wire.call("TKV.NS") == b"{}"
        assert wire.call("AUTH", secret(tokens["admin"])) == "OK"
        assert wire.call("TKV.PIN", json.dumps({"prefix": "aa", "owner": "me", "seconds": 1})) is not None


def test_peers_of_the_unix_socket_need_no_token(server: Server, tokens: dict[str, Path]) -> None:
    with Wire(server.config, unix=True) as wire:
        assert wire.call("TKV.NS") == b"{}"
        assert wire.call("AUTH", "reader", secret(tokens["reader"])) == "OK"  # who wants less has less
        assert str(wire.call("TKV.EVICT", "{}")).startswith("NOPERM the reader's token does not allow TKV.EVICT")


def test_a_server_without_tokens_has_nothing_to_authenticate_with(short_dir: Path) -> None:
    config = insecure_config(short_dir)
    with serving(config), Wire(config) as wire:
        assert str(wire.call("AUTH", "x" * 20)).startswith("ERR this server has no tokens")
        assert wire.call("TKV.NS") == b"{}"


# -- tokens


def test_wrong_tokens_are_answered_late_counted_and_logged_seldom_without_them(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(commands, "AUTH_DELAY_S", access.AUTH_DELAY_S)
    monkeypatch.setattr(commands.time, "sleep", waits.append)
    caplog.set_level(logging.DEBUG)
    wrong = "hunter2-hunter2-hunter2"
    for _ in range(4):
        with Wire(server.config) as wire:
            for _ in range(access.MAX_AUTH_TRIES):
                assert str(wire.call("AUTH", wrong)).startswith("WRONGPASS")
            with pytest.raises(EOFError):  # enough
                wire.reply()
    monkeypatch.undo()
    assert waits == [access.AUTH_DELAY_S] * 12
    assert server.network()["wrong_tokens"] == 12
    (line,) = [r.getMessage() for r in caplog.records if "wrong token" in r.getMessage()]
    assert line.startswith("1 wrong token since the last such line, the last from 127.0.0.1 port ")
    assert wrong not in caplog.text


def test_every_token_is_compared_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the place of the first wrong character nor the role decides how many comparisons there are."""
    tokens = Tokens({role: role.value * 8 for role in (Role.ENGINE, Role.READER, Role.ADMIN)})
    compared: list[tuple[int, int]] = []
    compare = access.hmac.compare_digest

    def counting(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return compare(a, b)

    monkeypatch.setattr(access.hmac, "compare_digest", counting)
    for token in ("engine" * 8, "admin" * 8, "engine" * 7 + "enginf", "x", "", "x" * 1000):
        compared.clear()
        tokens.role_of(token.encode())
        assert compared == [(32, 32)] * 3
    assert tokens.role_of(b"reader" * 8) is Role.READER
    assert tokens.role_of(b"reader" * 8, Role.ADMIN) is None
    assert "reader" * 8 not in repr(vars(tokens))


@pytest.mark.parametrize(
    "content, mode, words",
    [
        ("x" * 32, 0o604, ["every user may read", "0604", "chmod"]),
        ("x" * 32, 0o602, ["every user may read or change", "0602"]),
        ("x" * 32, 0o620, ["its group may change", "0620"]),
        ("", 0o600, ["one line"]),
        ("short", 0o600, ["5 characters"]),
        ("two words that are long", 0o600, ["without spaces"]),
        ("x" * 20 + "\n" + "y" * 20, 0o600, ["one line"]),
        ("\xff" * 20, 0o600, ["without spaces"]),
        ("x" * 9000, 0o600, ["one line"]),
        (None, 0o600, ["cannot be read", "No such file"]),
    ],
)
def test_files_that_hold_no_token_are_refused_in_a_sentence(
    tmp_path: Path, content: str | None, mode: int, words: list[str]
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    with pytest.raises(ConfigError) as caught:
        load_token(path, "engine_token_file")
    sentence = str(caught.value)
    assert "engine_token_file" in sentence and "\n" not in sentence
    assert all(word in sentence for word in words), sentence
    assert not content or content not in sentence


def test_white_space_around_a_token_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0123456789abcdef\r\n")
    (tmp_path / "token").chmod(0o640)
    assert load_token(tmp_path / "token", "x") == "0123456789abcdef"


def test_two_roles_have_two_tokens(short_dir: Path, tokens: dict[str, Path]) -> None:
    tokens["reader"].write_text(tokens["admin"].read_text())
    with pytest.raises(ConfigError, match="same token"):
        Server(insecure_config(short_dir, reader_token_file=tokens["reader"], admin_token_file=tokens["admin"]))
    with pytest.raises(ConfigError, match="the same token"):
        Tokens({Role.READER: "x" * 16, Role.ADMIN: "x" * 16})


def test_a_new_token_is_taken_up_and_the_old_one_is_over(
    server: Server, tokens: dict[str, Path], short_dir: Path
) -> None:
    old = {role: secret(path) for role, path in tokens.items()}
    wires = {role: Wire(server.config) for role in tokens}
    unix = Wire(server.config, unix=True)
    for role, wire in wires.items():
        assert wire.call("AUTH", old[role]) == "OK"
    tokens["reader"].write_text("another-token-of-readers")
    server.reconfigure(server.config)
    assert wires["reader"].ended()
    assert wires["admin"].call("PING") == "PONG"
    assert wires["engine"].call("PING") == "PONG"
    assert unix.call("PING") == "PONG"
    with Wire(server.config) as wire:
        assert str(wire.call("AUTH", old["reader"])).startswith("WRONGPASS")
        assert wire.call("AUTH", "another-token-of-readers") == "OK"
    tokens["admin"].chmod(0o644)
    with pytest.raises(ConfigError, match="every user may read"):
        server.reconfigure(server.config)
    assert wires["admin"].call("PING") == "PONG"
    for wire in [*wires.values(), unix]:
        wire.sock.close()


def test_no_secret_is_in_the_log_the_process_list_or_proc(short_dir: Path, tokens: dict[str, Path]) -> None:
    """A server of its own, and a verb that uses a token."""
    config = insecure_config(short_dir)
    options = [f"listen.{role}_token_file={path}" for role, path in tokens.items()]
    options += [f"listen.tcp={config.listen.tcp}", "listen.insecure=true", f"disk.dir={short_dir}/store"]
    command = [sys.executable, "-m", "tierkv.cli", "serve"]
    command += [word for option in options for word in ("--set", option)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(config.socket.is_socket)
        about = [Path(f"/proc/{process.pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
        verb = [sys.executable, "-m", "tierkv.cli", "stat", "--server", str(address_of(config))]
        verb += ["--token-file", str(tokens["reader"])]
        done = subprocess.run(verb, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        with Wire(config) as wire:
            wire.call("AUTH", secret(tokens["admin"]) + "x")
    finally:
        process.terminate()
        _, log = process.communicate(timeout=30)
    assert "1 wrong token" in log
    for path in tokens.values():
        token = secret(path)
        assert token not in log + done.stdout + done.stderr
        assert not any(token.encode() in part for part in about)


# -- where the server listens


@pytest.mark.parametrize(
    "listen, words",
    [
        ({"tcp": "0.0.0.0:{port}", "insecure": True}, ["insecure", "loopback"]),
        ({"tcp": "[::]:{port}", "insecure": True}, ["insecure", "loopback"]),
        ({"tcp": "127.0.0.1:{port}"}, ["needs TLS", "needs a token"]),
        ({"tcp": "127.0.0.1:{port}", "engine_token_file": "engine"}, ["needs TLS"]),
        ({"tcp": "127.0.0.1:{port}", "tls_cert": "cert", "tls_key": "key"}, ["needs a token"]),
        ({"tcp": "127.0.0.1:{port}", "tls_cert": "cert", "engine_token_file": "engine"}, ["needs tls_key"]),
        ({"tcp": "127.0.0.1:{port}", "insecure": True, "admin_token_file": "world"}, ["others may read", "chmod"]),
        ({"tcp": "no.such.host.invalid:{port}", "tls_cert": "cert", "tls_key": "key", "engine_token_file": "engine"},
         ["no.such.host.invalid", "cannot be used"]),
    ],
)  # fmt: skip
def test_tcp_that_is_not_protected_is_refused_at_start(
    short_dir: Path, files: TlsFiles, tokens: dict[str, Path], listen: dict[str, Any], words: list[str]
) -> None:
    named = {"engine": tokens["engine"], "cert": files.cert, "key": files.key, "world": short_dir / "world"}
    named["world"].write_text("x" * 32)
    named["world"].chmod(0o644)
    options = {name: named.get(str(value), value) for name, value in listen.items()}
    options["tcp"] = options["tcp"].format(port=free_port())
    config = with_listen(make_config(short_dir), **options)
    with pytest.raises(ConfigError) as caught:
        Server(config)
    assert all(word in str(caught.value) for word in words), caught.value
    assert not config.socket.exists()
    with serving(make_config(short_dir)):  # everything was given back
        pass


def test_a_port_that_is_taken_is_a_sentence(short_dir: Path) -> None:
    config = insecure_config(short_dir)
    with (
        socket.create_server(host_port(config)),
        pytest.raises(ConfigError, match=r"tcp='.*' cannot be used: .*in use"),
    ):
        Server(config)


@pytest.mark.parametrize("mode", [0o600, 0o660])
def test_the_unix_socket_has_its_mode_and_wants_its_directory(short_dir: Path, mode: int) -> None:
    config = with_listen(make_config(short_dir), socket_mode=mode)
    with serving(config):
        assert stat.S_IMODE(config.socket.stat().st_mode) == mode
    config = make_config(short_dir, socket=short_dir / "missing" / "tierkv.sock")
    with pytest.raises(ConfigError, match=r"there is no directory .*/missing; make it, or set another path"):
        Server(config)
    assert not (short_dir / "missing").exists()


def test_ipv6(short_dir: Path) -> None:
    port = free_port()
    config = with_listen(make_config(short_dir), tcp=f"[::1]:{port}", insecure=True)
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with serving(config) as server, FakeEngine(Address(host="::1", port=port)) as engine:
        assert server.tcp_addresses == [("::1", port)]
        engine.put(PROMPT)
        assert engine.match(PROMPT) == b"dddddd"


# -- TLS


def test_an_engine_and_a_verb_over_tls(tls_server: Server, tokens: dict[str, Path], files: TlsFiles) -> None:
    config = tls_server.config
    host, port = host_port(config)
    options = {
        "server": f"tkvs://localhost:{port}",
        "server_token_file": str(tokens["engine"]),
        "server_ca_file": str(files.ca),
    }
    with FakeEngine(EngineConfig.parse(options).address) as engine:
        engine.put(PROMPT, seed=3)
        engine.forget()
        assert engine.get(PROMPT) == engine.expected(PROMPT, seed=3)
        command = [sys.executable, "-m", "tierkv.cli", "ls", "--json", "--server", f"tkvs://{host}:{port}"]
        env = os.environ | {"TIERKV_TOKEN_FILE": str(tokens["reader"]), "TIERKV_CA_FILE": str(files.ca)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
        assert done.returncode == 0, done.stderr
        (row,) = json.loads(done.stdout)["prefixes"]
        assert row["num_stored"] == 6
        command[3:5] = ["evict", "--namespace", engine.ns, "--yes"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
        assert done.returncode == 4
        assert "reader's token does not allow TKV.EVICT" in done.stderr


def test_certificates_that_do_not_fit_are_refused_in_a_sentence(
    short_dir: Path, tokens: dict[str, Path], files: TlsFiles, tmp_path: Path
) -> None:
    config = tls_config(short_dir, files, tokens, tcp=f"0.0.0.0:{free_port()}")
    good = msgspec.structs.replace(address_of(config, tokens["reader"], files), host="127.0.0.1")
    with serving(config):
        refuse_certificates(good, tokens, files, tmp_path)


def refuse_certificates(good: Address, tokens: dict[str, Path], files: TlsFiles, tmp_path: Path) -> None:
    AdminClient(good).close()
    change = msgspec.structs.replace
    with pytest.raises(RefusedError, match=r"is not trusted .*--ca-file"):
        AdminClient(change(good, ca_file=files.other_ca))
    with pytest.raises(RefusedError, match="is not trusted"):
        AdminClient(change(good, ca_file=None))
    with pytest.raises(RefusedError, match="is not trusted"):  # 127.0.0.1 and localhost are in it
        AdminClient(change(good, host="127.0.0.2"))
    with pytest.raises(ConfigError, match="is not usable"):
        AdminClient(change(good, ca_file=tmp_path / "none"))
    bare = tmp_path / "bare.key"
    bare.write_bytes(files.client_key.read_bytes())
    bare.chmod(0o644)
    with pytest.raises(ConfigError, match=r"key file=.*bare\.key.* holds a secret that every user may read"):
        AdminClient(change(good, cert_file=files.client_cert, key_file=bare))
    with pytest.raises(UnavailableError):
        AdminClient(change(good, tls=False))
    with pytest.raises(RefusedError, match=r"does not take the token in .*reader-token"):
        tokens["reader"].write_text("some-other-token-here")
        AdminClient(good)
    with pytest.raises(TimeoutError):  # an engine starts without, and tries again
        FakeEngine(change(good, ca_file=files.other_ca))


def test_old_versions_of_tls_are_refused(tls_server: Server, files: TlsFiles) -> None:
    context = ssl.create_default_context(cafile=files.ca)
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with socket.create_connection(host_port(tls_server.config)) as sock, pytest.raises(OSError):
        context.wrap_socket(sock, server_hostname="127.0.0.1")


def test_client_certificates(short_dir: Path, tokens: dict[str, Path], files: TlsFiles) -> None:
    config = tls_config(short_dir, files, tokens, tls_client_ca=files.ca)
    without = address_of(config, tokens["reader"], files)
    with serving(config):
        with pytest.raises(UnavailableError):
            AdminClient(without)
        address = msgspec.structs.replace(without, cert_file=files.client_cert, key_file=files.client_key)
        with AdminClient(address) as admin:
            assert admin.ask("TKV.NS") == {}
        address = msgspec.structs.replace(address, token_file=tokens["engine"])
        with FakeEngine(address) as engine:
            engine.put(PROMPT)


def test_new_certificates_are_taken_up(
    tls_server: Server, tokens: dict[str, Path], files: TlsFiles, short_dir: Path
) -> None:
    """For new connections; those that are there go on."""
    config = tls_server.config
    with AdminClient(address_of(config, tokens["reader"], files)) as before:
        others = make_certificates(short_dir / "others")
        listen = {"tls_cert": others.cert, "tls_key": others.key}
        tls_server.reconfigure(with_listen(config, **listen))
        assert before.ask("TKV.NS") == {}
        with AdminClient(address_of(config, tokens["reader"], others)) as after:
            assert after.ask("TKV.NS") == {}
        with pytest.raises(RefusedError, match="is not trusted"):
            AdminClient(address_of(config, tokens["reader"], files))
        with pytest.raises(ConfigError, match="no certificate"):
            tls_server.reconfigure(with_listen(config, tls_cert=others.cert, tls_key=files.key))
        AdminClient(address_of(config, tokens["reader"], others)).close()


def test_pushes_and_commands_at_a_time_over_tls(tls_server: Server, tokens: dict[str, Path], files: TlsFiles) -> None:
    """Two threads of the server use one TLS connection: the one that serves it, and those that ask the engine."""
    address = address_of(tls_server.config, tokens["engine"], files)
    done = threading.Event()

    def ask() -> None:
        with AdminClient(tls_server.config.socket) as admin:
            while not done.is_set():
                assert admin.ask("TKV.STAT")["server"]["num_silent_engines"] == 0

    with FakeEngine(address) as engine:
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for i in range(30):
                prompt = [i, *PROMPT[1:]]
                engine.put(prompt)
                engine.forget()
                assert engine.get(prompt) == engine.expected(prompt)
                engine.forget()
        finally:
            done.set()
            for thread in threads:
                thread.join(20)
        assert engine.client.health.num_faults == 0


def test_a_verb_does_not_wait_for_a_server_that_is_stopped(short_dir: Path, tokens: dict[str, Path]) -> None:
    config = insecure_config(short_dir, reader_token_file=tokens["reader"])
    launcher = Launcher(config)
    try:
        launcher.launch()
        wait_until(config.socket.is_socket)
        wait_until(lambda: not launcher.starting())
        stop_process(owner(config))
        for where in ([str(config.socket)], [str(address_of(config)), "--token-file", str(tokens["reader"])]):
            command = [sys.executable, "-m", "tierkv.cli", "stat", "--server", *where]
            done = subprocess.run(command, capture_output=True, text=True, timeout=25)
            assert done.returncode == 3
            assert "answer" in done.stderr and done.stderr.count("\n") == 1, done.stderr
    finally:
        kill_launched(config)


# -- what strangers may cost


def test_a_stranger_that_says_nothing_is_cut_off(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "AUTH_DEADLINE_S", 0.2)
    with Wire(server.config) as silent, Wire(server.config) as slow, Wire(server.config, unix=True) as local:
        slow.send(b"*2\r\n$4\r\nAUTH\r\n$32\r\nx")
        assert silent.ended()
        assert slow.ended()
        assert local.call("PING") == "PONG"
    wait_until(lambda: server.network()["cut_off"] == 2)


def test_a_tls_handshake_that_does_not_go_on_is_cut_off_and_holds_nobody_up(
    tls_server: Server, tokens: dict[str, Path], files: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "AUTH_DEADLINE_S", 0.5)
    stuck = [socket.create_connection(host_port(tls_server.config)) for _ in range(8)]
    stuck[0].sendall(b"\x16\x03\x01\x02\x00\x01")  # the start of a hello
    with AdminClient(address_of(tls_server.config, tokens["reader"], files)) as admin:
        assert admin.ask("TKV.NS") == {}
    for sock in stuck:
        sock.settimeout(20)
        assert sock.recv(100) == b""
        sock.close()
    plain = socket.create_connection(host_port(tls_server.config))
    plain.sendall(b"PING\r\n")
    plain.settimeout(20)
    with contextlib.suppress(ConnectionResetError):
        while plain.recv(100):
            pass
    plain.close()
    wait_until(lambda: tls_server.network()["cut_off"] == 8)
    wait_until(lambda: tls_server.network()["tcp"] == 0)


def test_a_strangers_commands_are_small(server: Server) -> None:
    for garbage in (
        encode_command(["AUTH", "x" * 5000]),
        b"*17\r\n",
        b"*2\r\n$4\r\nAUTH\r\n$100000000\r\n",
        b"AUTH " + b"x" * 5000,
        b"*3\r\n" + b"$3000\r\n%s\r\n" % bytes(3000) * 2 + b"$3000\r\n",
    ):
        with Wire(server.config) as wire:
            wire.send(garbage)
            reply = wire.reply()
            assert isinstance(reply, Error) and reply.startswith("ERR protocol: "), garbage[:30]
            assert wire.ended()
    assert server.network()["garbage"] == 5


def test_strangers_do_not_make_memory_grow(server: Server, tokens: dict[str, Path]) -> None:
    """Each sends as much as it is let, many times: what is kept is nothing."""

    def flood() -> None:
        for _ in range(50):
            with Wire(server.config) as wire:
                try:
                    wire.send(b"*2\r\n$4\r\nAUTH\r\n$2000\r\n" + b"x" * 1_000_000)
                except OSError:
                    continue

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    flood()
    before = resident()
    threads = [threading.Thread(target=flood) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: server.network()["tcp"] == 0)
    assert resident() - before < 32 << 20  # 200 MB were sent
    with Wire(server.config) as wire:
        assert wire.call("AUTH", secret(tokens["reader"])) == "OK"


def test_strangers_are_few_and_do_not_keep_others_out(
    server: Server, tokens: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "MAX_STRANGERS_OF_HOST", 4)
    wires = [Wire(server.config) for _ in range(4)]
    wait_until(lambda: server.network()["strangers"] == 4)
    with Wire(server.config) as fifth:
        reply = fifth.reply()
        assert isinstance(reply, Error) and "as many connections as it takes" in reply
        assert fifth.ended()
    with Wire(server.config, unix=True) as local:
        assert local.call("PING") == "PONG"
    assert wires[0].call("AUTH", secret(tokens["reader"])) == "OK"  # is no stranger any more
    with Wire(server.config) as another:
        assert another.call("AUTH", secret(tokens["reader"])) == "OK"
    for wire in wires:
        wire.sock.close()


def test_tcp_leaves_room_for_the_unix_socket(short_dir: Path) -> None:
    config = insecure_config(short_dir, max_connections=8)
    with serving(config) as server:
        wires = [Wire(config) for _ in range(6)]
        for wire in wires:
            assert wire.call("PING") == "PONG"
        with Wire(config) as seventh:
            assert seventh.ended()
        local = [Wire(config, unix=True) for _ in range(2)]
        for wire in local:
            assert wire.call("PING") == "PONG"
        with Wire(config, unix=True) as ninth:
            assert str(ninth.reply()).startswith("BUSY this server has as many connections")
        wait_until(lambda: server.network()["refused"] == 2)
        assert server.network() == {
            "unix": 2, "tcp": 6, "strangers": 0, "refused": 2, "cut_off": 0, "garbage": 0, "wrong_tokens": 0,
        }  # fmt: skip
        for wire in [*wires, *local]:
            wire.sock.close()
        wait_until(lambda: server.network()["unix"] == 0 and server.network()["tcp"] == 0)
        with Wire(config) as wire:
            assert wire.call("PING") == "PONG"


def test_a_browser_that_was_led_here_is_sent_away(short_dir: Path) -> None:
    config = insecure_config(short_dir)
    with serving(config) as server:
        for method in (b"POST / HTTP/1.1\r\n", b"GET /x HTTP/1.1\r\nHost: 127.0.0.1\r\n"):
            with Wire(config) as wire:
                wire.send(method + b"Content-Type: text/plain\r\n\r\nSHUTDOWN\r\n")
                assert wire.ended()
        assert not server.leaving


def test_a_connection_over_tcp_is_looked_after(server: Server) -> None:
    """Keepalive: a machine that vanished does not keep its connections for ever."""
    with Wire(server.config):
        wait_until(lambda: len(server._connections) == 1)
        (connection,) = server._connections
        sock = connection.stream._sock  # type: ignore[attr-defined]
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


# -- slow clients


def test_a_command_that_comes_too_slowly_is_cut_off(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "COMMAND_GRACE_S", 0.2)
    config = insecure_config(short_dir)
    with serving(config) as server:
        for unix in (True, False):
            with Wire(config, unix=unix) as wire, Wire(config, unix=unix) as idle:
                wire.send(b"*2\r\n$4\r\nECHO\r\n$10\r\nabc")
                assert wire.ended()
                assert idle.call("PING") == "PONG"  # one that says nothing is welcome to it
        assert server.network()["cut_off"] == 2


def test_a_command_that_comes_in_pieces_is_not_cut_off(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "COMMAND_GRACE_S", 1.0)
    config = insecure_config(short_dir)
    with serving(config), Wire(config) as wire:
        for _ in range(3):  # longer than the grace together, each in time
            for piece in (b"*2\r\n$4\r\nEC", b"HO\r\n$6\r\nabc", b"def\r\n"):
                wire.send(piece)
                time.sleep(0.2)
            assert wire.reply() == b"abcdef"


@pytest.mark.parametrize("kind", ["unix", "tcp", "tls"])
def test_a_client_that_takes_no_replies_is_cut_off(
    short_dir: Path, tokens: dict[str, Path], files: TlsFiles, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is kept for it: it is not read from either."""
    monkeypatch.setattr("tierkv_server.stream.SEND_STALL_S", 0.3)
    monkeypatch.setattr("tierkv_server.stream.PlainStream.send.__kwdefaults__", {"stall_s": 0.3}, raising=False)
    monkeypatch.setattr("tierkv_server.stream.TlsStream.send.__kwdefaults__", {"stall_s": 0.3}, raising=False)
    tls = files if kind == "tls" else None
    config = tls_config(short_dir, files, tokens) if tls else insecure_config(short_dir)
    with serving(config) as server, Wire(config, tls, unix=kind == "unix") as deaf:
        if tls:
            assert deaf.call("AUTH", secret(tokens["admin"])) == "OK"
        deaf.sock.settimeout(0.1)
        echo = encode_command(["ECHO", bytes(1 << 20)])
        with pytest.raises(OSError):
            for _ in range(200):
                try:
                    deaf.send(echo)
                except TimeoutError:
                    if server.network()["cut_off"]:
                        raise
        wait_until(lambda: server.network()["cut_off"] == 1)
        with Wire(config, unix=True) as other:
            assert other.call("PING") == "PONG"


def test_a_client_that_resets_its_connection_harms_nobody(server: Server, tokens: dict[str, Path]) -> None:
    for _ in range(20):
        wire = Wire(server.config)
        wire.send(encode_command(["AUTH", secret(tokens["admin"])]) + encode_command(["TKV.STAT"]) * 3)
        wire.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wire.sock.close()
    wait_until(lambda: server.network()["tcp"] == 0)
    with Wire(server.config, unix=True) as wire:
        assert wire.call("PING") == "PONG"


def test_a_server_that_is_full_keeps_no_engine_from_starting(short_dir: Path) -> None:
    config = with_listen(make_config(short_dir), max_connections=8)
    with serving(config), FakeEngine(config.socket), pytest.raises(TimeoutError):
        FakeEngine(config.socket, engine_id="second")  # its client is there, without a session, and tries again
