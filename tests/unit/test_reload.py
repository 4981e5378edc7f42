"""Reloading: what a running server takes, what it keeps, and a file that cannot be used; what signals ask for."""

from __future__ import annotations

import logging
import os
import pty
import signal
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.config import Spill
from tierkv.config_checks import check
from tierkv.errors import ConfigError, RefusedError
from tierkv.server_config import PARTS, HttpConfig, Kind, ListenConfig, QuotaConfig, ServerConfig, SharedConfig
from tierkv_server.reload import Reloader, differences, restrict
from tierkv_server.signals import EXIT_CUT_SHORT, Signals

replace = msgspec.structs.replace
OLD = ServerConfig.make(Path("/var/lib/tierkv"), 20 << 30, "redis://me:hunter2@one/0")


class FakeServer:
    """What is reloaded, and told to leave."""

    def __init__(self, config: ServerConfig = OLD) -> None:
        self.config = config
        self.configs: list[ServerConfig] = []
        self.leaving = False
        self.refuses = ""

    def reconfigure(self, config: ServerConfig) -> None:
        if self.refuses:
            raise ConfigError(self.refuses)
        self.configs.append(config)
        self.config = config

    def leave(self) -> None:
        self.leaving = True

    def describe(self) -> str:
        return self.config.describe()


def reloader(server: FakeServer, wanted: ServerConfig) -> Reloader:
    return Reloader(server, lambda: wanted)


def test_what_may_change_changes_and_the_rest_is_named(caplog: pytest.LogCaptureFixture) -> None:
    assert OLD.shared
    wanted = replace(
        OLD,
        disk=replace(OLD.disk, bytes=30 << 30, ttl_s=86400.0, dir=Path("/elsewhere"), sync_s=1.0),
        shared=replace(OLD.shared, url="redis://me:hunter3@two/0", spill=Spill.THROUGH),
        quota=QuotaConfig(tenants={"0" * 32: 1 << 30}),
        log_level="warning",
    )
    server = FakeServer()
    with caplog.at_level(logging.INFO, "tierkv"):
        said = reloader(server, wanted).reload()
    assert server.configs == [
        replace(
            OLD,
            disk=replace(OLD.disk, bytes=30 << 30, ttl_s=86400.0),
            shared=replace(OLD.shared, spill=Spill.THROUGH),
            quota=QuotaConfig(tenants={"0" * 32: 1 << 30}),
            log_level="warning",
        )
    ]
    assert said == [
        "changed log_level from info to warning",
        "changed disk.bytes from 20 GiB to 30 GiB",
        "changed disk.ttl from never to 1d",
        "changed shared.spill from second-use to through",
        "changed quota.tenants from none to 00000000:1 GiB",
        "kept until the next start: disk.dir from /var/lib/tierkv to /elsewhere, disk.sync from 5s to 1s, "
        "shared.url from redis://me:***@one/0 to redis://me:***@two/0",
    ]
    assert [record.getMessage() for record in caplog.records] == [f"configuration read again: {line}" for line in said]
    assert "hunter" not in caplog.text


def test_parts_come_and_go_with_a_restart_only() -> None:
    server = FakeServer()
    said = reloader(server, replace(OLD, shared=None, http=HttpConfig())).reload()
    assert server.config == OLD
    assert len(said) == 1 and "shared.url removed" in said[0] and "http.listen added" in said[0]


def test_tokens_are_read_again_where_nothing_differs(caplog: pytest.LogCaptureFixture) -> None:
    server = FakeServer()
    with caplog.at_level(logging.INFO, "tierkv"):
        assert reloader(server, OLD).reload() == []
    assert server.configs == [OLD]
    assert "nothing differs; tokens and certificates were read again" in caplog.text


def test_a_bad_file_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def read() -> ServerConfig:
        raise ConfigError("tierkv.toml has a mistake: $.disk.bytes: 'x' is not a size")

    server = FakeServer()
    with pytest.raises(ConfigError, match="a mistake"):
        Reloader(server, read).reload()
    Reloader(server, read).try_reload()
    assert "nothing has changed: tierkv.toml has a mistake: $.disk.bytes" in caplog.text
    server.refuses = "tls_cert is no certificate"
    reloader(server, replace(OLD, drain_s=1.0)).try_reload()
    assert "nothing has changed: tls_cert is no certificate" in caplog.text
    assert server.config == OLD and server.configs == []


def test_what_would_be_open_in_between_is_refused() -> None:
    """The new file is fine, and so was the old one; what of the new one could be followed without a restart is not."""
    files = {name: Path(f"/etc/tierkv/{name}") for name in ("tls_cert", "tls_key", "engine_token_file")}
    closed = replace(OLD, listen=replace(OLD.listen, tcp="0.0.0.0:6390", **files))
    opened = replace(OLD, listen=replace(OLD.listen, tcp="127.0.0.1:6390", insecure=True))
    assert check(closed, files=False) == check(opened, files=False) == []
    server = FakeServer(closed)
    with pytest.raises(ConfigError, match=r"without what needs a restart .*\$.listen.tcp: '0.0.0.0:6390' needs TLS"):
        reloader(server, opened).reload()
    assert server.config == closed and server.configs == []


def test_without_a_file_there_is_nothing_to_read() -> None:
    with pytest.raises(RefusedError, match="without a configuration file"):
        Reloader(FakeServer()).reload()


_other: dict[Kind, Any] = {
    Kind.TEXT: "other",
    Kind.WORD: "debug",
    Kind.FLAG: True,
    Kind.COUNT: 77,
    Kind.SIZE: 777,
    Kind.DURATION: 77.0,
    Kind.MODE: 0o660,
    Kind.ADDRESS: "127.0.0.1:7",
    Kind.URL: "redis://other",
    Kind.SIZES: {"1" * 32: 7},
}
_fields = [(part, field) for part, kind in {"": ServerConfig, **PARTS}.items() for field in kind.fields()]


@given(st.sets(st.sampled_from(range(len(_fields)))))
def test_only_reloadable_fields_change(chosen: set[int]) -> None:
    old = replace(
        OLD, http=HttpConfig(), shared=SharedConfig(url="redis://one"), listen=ListenConfig(socket=Path("/s"))
    )
    wanted, expected = old, old
    for i in chosen:
        part, field = _fields[i]
        value = _other.get(field.about.kind, Path("/other"))
        changed = _with(wanted, part, field.name, value)
        expected = _with(expected, part, field.name, value) if field.about.reload else expected
        wanted = changed
    assert restrict(old, wanted) == expected
    assert len(differences(old, wanted)) == len(chosen)
    assert len(differences(old, expected)) == sum(_fields[i][1].about.reload for i in chosen)


def _with(config: ServerConfig, part: str, name: str, value: Any) -> ServerConfig:
    if not part:
        return replace(config, **{name: value})
    return replace(config, **{part: replace(getattr(config, part), **{name: value})})


# -- signals


def signals(server: FakeServer, read: bool = True) -> tuple[Signals, list[int]]:
    ends: list[int] = []
    made = Reloader(server, (lambda: replace(server.config, drain_s=1.0)) if read else None)
    return Signals(server, made, ends.append), ends  # type: ignore[arg-type]


def test_the_first_signal_lets_the_server_finish_and_the_second_ends_it() -> None:
    server = FakeServer()
    taken, ends = signals(server)
    taken.take(signal.SIGTERM)
    assert server.leaving and ends == []
    taken.take(signal.SIGINT)
    assert ends == [EXIT_CUT_SHORT]


def test_a_server_that_cannot_finish_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[tuple[float, Any, tuple[Any, ...]]] = []

    class Timer:
        daemon = False

        def __init__(self, seconds: float, call: Any, args: tuple[Any, ...]) -> None:
            timers.append((seconds, call, args))

        def start(self) -> None:
            assert self.daemon, "it would keep a server that has left"

    monkeypatch.setattr("tierkv_server.signals.threading.Timer", Timer)
    server = FakeServer(replace(OLD, drain_s=7.0))
    taken, ends = signals(server)
    taken.take(signal.SIGTERM)
    (seconds, call, args) = timers[0]
    assert seconds == 7.0 + 15.0 and ends == []
    call(*args)
    assert ends == [EXIT_CUT_SHORT]


def test_sighup_reloads_or_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    server = FakeServer()
    signals(server)[0].take(signal.SIGHUP)
    assert server.config.drain_s == 1.0 and not server.leaving
    with caplog.at_level(logging.INFO, "tierkv"):
        signals(server, read=False)[0].take(signal.SIGHUP)
    assert "no configuration file" in caplog.text and not server.leaving


def test_sighup_of_a_terminal_that_is_gone_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = pty.openpty()
    monkeypatch.setattr("tierkv_server.signals.os.isatty", lambda fd, isatty=os.isatty: isatty(follower))
    try:
        server = FakeServer()
        taken, _ = signals(server, read=False)
        taken.take(signal.SIGHUP)
        assert not server.leaving
        os.close(leader)
        taken.take(signal.SIGHUP)
        assert server.leaving
    finally:
        os.close(follower)


def test_a_reload_that_fails_in_an_unforeseen_way_does_not_take_sigterm_with_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(FakeServer):
        def reconfigure(self, config: ServerConfig) -> None:
            raise AttributeError("a fault of ours")

    server = Broken()
    reader, writer = socket.socketpair()
    with writer:
        writer.send(bytes([signal.SIGHUP, signal.SIGTERM]))
    signals(server)[0].watch(reader)
    assert server.leaving and "a fault of ours" in caplog.text
