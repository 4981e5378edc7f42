"""Where a client finds its server: addresses, the files beside them, and what engines are configured with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tierkv.config import EngineConfig
from tierkv.errors import ConfigError
from tierkv.transport import Address, parse_address

TOKEN = Path("/etc/tierkv/token")


@pytest.mark.parametrize(
    "server, files, expected",
    [
        ("unix:///run/x.sock", {}, Address(path=Path("/run/x.sock"))),
        ("tkv://127.0.0.1:6390", {}, Address(host="127.0.0.1", port=6390)),
        ("tkv://localhost:1", {"token_file": TOKEN}, Address(host="localhost", port=1, token_file=TOKEN)),
        ("tkv://[::1]:65535", {}, Address(host="::1", port=65535)),
        (
            "tkvs://h.example:6390",
            {"token_file": TOKEN},
            Address(host="h.example", port=6390, tls=True, token_file=TOKEN),
        ),
        (
            "tkvs://[2001:db8::1]:6390",
            {"token_file": TOKEN, "ca_file": Path("/ca"), "cert_file": Path("/c"), "key_file": Path("/k")},
            Address(
                host="2001:db8::1",
                port=6390,
                tls=True,
                token_file=TOKEN,
                ca_file=Path("/ca"),
                cert_file=Path("/c"),
                key_file=Path("/k"),
            ),
        ),
    ],
)
def test_addresses(server: str, files: dict[str, Path], expected: Address) -> None:
    address = parse_address(server, **files)
    assert address == expected
    assert str(address) == server.removeprefix("unix://")
    assert address.remote == (not server.startswith("unix"))
    options = {"server": server} | {f"server_{name}": str(path) for name, path in files.items()}
    assert EngineConfig.parse(options).address == expected


@pytest.mark.parametrize(
    "server, files, words",
    [
        ("unix://relative", {}, ["'unix://relative'", "unix:///path"]),
        ("unix:///", {}, ["unix:///path"]),
        ("unix:///s", {"token_file": TOKEN}, ["token file '/etc/tierkv/token'", "no effect"]),
        ("tcp://h:1", {}, ["'tcp://h:1'", "tkvs://host:port"]),
        ("tkv://h.example:1", {}, ["without TLS", "write tkvs://h.example:1"]),
        ("tkv://10.0.0.1:1", {}, ["without TLS"]),
        ("tkv://127.0.0.1", {}, ["names no host and port"]),
        ("tkv://127.0.0.1:0", {}, ["names no host and port"]),
        ("tkv://127.0.0.1:65536", {}, ["names no host and port"]),
        ("tkv://127.0.0.1:x", {}, ["names no host and port"]),
        ("tkv://:1", {}, ["names no host and port"]),
        ("tkv://::1:1", {}, ["names no host and port"]),
        ("tkv://127.0.0.1:1", {"ca_file": TOKEN}, ["ca file", "no effect"]),
        ("tkvs://h:1", {}, ["needs a token", "server_token_file", "--token-file"]),
        ("tkvs://me:secret@h:1", {"token_file": TOKEN}, ["names no host and port"]),
        ("tkvs://h:1/0", {"token_file": TOKEN}, ["names no host and port"]),
        ("tkvs://h:1", {"token_file": TOKEN, "cert_file": TOKEN}, ["both", "or neither"]),
    ],
)
def test_addresses_that_are_not_possible_are_refused_in_a_sentence(
    server: str, files: dict[str, Path], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_address(server, **files)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"server_token_file": "/t"}, ["server_token_file='/t'", "server='auto'", "no effect"]),
        ({"server": "off", "server_ca_file": "/t"}, ["server_ca_file='/t'", "server='off'"]),
        ({"server": "tkvs://h:1"}, ["needs a token"]),
        ({"server": "tkvs://h:1", "server_token_file": "t"}, ["server_token_file='t'", "relative"]),
        ({"server": "tkvs://h:1", "server_token_file": 7}, ["server_token_file=7"]),
        ({"server": "tkvs://h:1", "server_token_file": "/t", "disk_dir": "/d"}, ["disk_dir='/d'", "no effect"]),
        ({"server": "tkvs://h:1", "server_token": "/t"}, ["server_token", "server_token_file"]),
    ],
)
def test_options_of_an_engine_that_do_not_fit_are_refused(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.parse(options)
    assert all(word in str(caught.value) for word in words), caught.value


def test_where_an_engine_finds_its_server(tmp_path: Path) -> None:
    config = EngineConfig.parse({"disk_dir": str(tmp_path)})
    assert config.address == Address(path=tmp_path / "tierkv.sock")
    assert config.socket == tmp_path / "tierkv.sock"
    remote = EngineConfig.parse({"server": "tkvs://h:1", "server_token_file": "/t"})
    assert "tkvs://h:1" in remote.describe()
