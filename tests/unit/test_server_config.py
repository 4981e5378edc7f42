"""The server's configuration: files, every mistake in them, what is shown, and that the documents say the same."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tierkv.cli import cli
from tierkv.config import Spill
from tierkv.errors import ConfigError
from tierkv.server_config import (
    PARTS,
    DiskConfig,
    Field,
    HttpConfig,
    Kind,
    ListenConfig,
    QuotaConfig,
    ServerConfig,
    SharedConfig,
)
from tierkv.sizes import MAX_DURATION_S, MAX_SIZE, parse_duration, parse_size
from tierkv.tiers.base import Limits
from tierkv.tiers.disk import MIN_BUDGET
from tierkv.toml_config import (
    MAX_FILE_NBYTES,
    BadConfigError,
    exact_duration,
    exact_size,
    example,
    load,
    merge,
    parse_address,
    parse_toml,
    read,
    to_data,
    to_toml,
)

ROOT = Path(__file__).parents[2]
ID = "0123456789abcdef" * 2
TOKEN = "correct-horse-battery-staple"


def write(directory: Path, text: str, name: str = "tierkv.toml") -> Path:
    path = directory / name
    path.write_text(text)
    return path


def secret(directory: Path, name: str, text: str = TOKEN, mode: int = 0o600) -> Path:
    path = write(directory, text, name)
    path.chmod(mode)
    return path


def mistakes(text: str, directory: Path, *, files: bool = False) -> list[str]:
    """Return the mistakes in a file."""
    try:
        load(write(directory, text), files=files)
    except BadConfigError as error:
        return error.mistakes
    return []


def only(text: str, directory: Path, *, files: bool = False) -> str:
    """Return the one mistake in a file."""
    found = mistakes(text, directory, files=files)
    assert len(found) == 1, found
    return found[0]


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A self-signed certificate and its key."""
    cert, key = tmp_path / "server.pem", tmp_path / "server.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=tierkv"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    key.chmod(0o600)
    return cert, key


# -- files


def test_an_empty_file_is_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = load(write(tmp_path, ""))
    assert config == load(None) == ServerConfig.make(tmp_path / "tierkv")
    assert config.socket == tmp_path / "tierkv" / "tierkv.sock"


def test_every_field_of_a_file(tmp_path: Path) -> None:
    text = f"""
        linger = "1m"
        drain = 2.5
        log_level = "debug"
        [disk]
        dir = "store"
        bytes = "200GiB"
        reserve_bytes = 0
        sync = "500ms"
        spill = "on-evict"
        ttl = "7d"
        idle = "12h"
        [shared]
        url = "rediss://cache.example:6380/0"
        username = "tierkv"
        password_file = "redis-password"
        ca_file = "/etc/ca.pem"
        cert_file = "cert.pem"
        key_file = "cert.key"
        prefix = "fleet-7"
        spill = "through"
        ttl = 3600
        idle = "never"
        compression = "zstd"
        timeout = "1500ms"
        connect_timeout = 0.25
        [listen]
        socket = "../run/tierkv.sock"
        socket_mode = "0660"
        tcp = "[::]:6390"
        tls_cert = "server.pem"
        tls_key = "server.key"
        tls_client_ca = "clients.pem"
        engine_token_file = "engine"
        reader_token_file = "reader"
        admin_token_file = "admin"
        max_connections = 1000
        [http]
        listen = "127.0.0.1:9200"
        [quota]
        namespace_bytes = "50GiB"
        tenant_bytes = "5GiB"
        pinned_bytes = 0
        [quota.namespaces]
        "{ID}" = "1TiB"
        [quota.tenants]
        "{ID[::-1]}" = 0
    """
    config = load(write(tmp_path, text), files=False)
    assert config == ServerConfig(
        linger_s=60.0,
        drain_s=2.5,
        log_level="debug",
        disk=DiskConfig(
            dir=tmp_path / "store",
            bytes=200 << 30,
            reserve_bytes=0,
            sync_s=0.5,
            spill=Spill.ON_EVICT,
            ttl_s=7 * 86400.0,
            idle_s=12 * 3600.0,
        ),
        shared=SharedConfig(
            url="rediss://cache.example:6380/0",
            username="tierkv",
            password_file=tmp_path / "redis-password",
            ca_file=Path("/etc/ca.pem"),
            cert_file=tmp_path / "cert.pem",
            key_file=tmp_path / "cert.key",
            prefix="fleet-7",
            spill=Spill.THROUGH,
            ttl_s=3600.0,
            idle_s=None,
            compression="zstd",
            timeout_s=1.5,
            connect_timeout_s=0.25,
        ),
        listen=ListenConfig(
            socket=tmp_path.parent / "run" / "tierkv.sock",
            socket_mode=0o660,
            tcp="[::]:6390",
            tls_cert=tmp_path / "server.pem",
            tls_key=tmp_path / "server.key",
            tls_client_ca=tmp_path / "clients.pem",
            engine_token_file=tmp_path / "engine",
            reader_token_file=tmp_path / "reader",
            admin_token_file=tmp_path / "admin",
            max_connections=1000,
        ),
        http=HttpConfig(listen="127.0.0.1:9200"),
        quota=QuotaConfig(
            namespace_bytes=50 << 30,
            tenant_bytes=5 << 30,
            pinned_bytes=0,
            namespaces={ID: 1 << 40},
            tenants={ID[::-1]: 0},
        ),
    )
    assert isinstance(config.disk.spill, Spill), "a word that only looks like the policy"
    assert config.disk_limits() == Limits(
        budget=200 << 30,
        reserve_nbytes=0,
        ttl_s=7 * 86400.0,
        idle_s=12 * 3600.0,
        namespace_nbytes={bytes.fromhex(ID): 1 << 40, b"": 50 << 30},
        tenant_nbytes={bytes.fromhex(ID[::-1]): 0, b"": 5 << 30},
        pinned_nbytes=0,
    )
    # What is written back is the same configuration, in both forms; and a launched server gets the same.
    assert load(write(tmp_path, to_toml(config), "again.toml"), files=False) == config
    assert json.loads(json.dumps(to_data(config)))["disk"]["ttl"] == 7 * 86400.0
    passed = msgspec.json.decode(
        msgspec.json.encode(config, enc_hook=str), type=ServerConfig, dec_hook=lambda kind, value: kind(value)
    )
    assert passed == config


def test_overrides_go_before_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, '[disk]\nbytes = "1GiB"\ndir = "a"\n[shared]\nurl = "redis://a"\nttl = "1d"\n')
    config = load(path, {"disk": {"bytes": 1 << 26}, "shared": {"url": "redis://b"}, "http": {"listen": "localhost:1"}})
    assert (config.disk_bytes, config.disk_dir, config.shared_url) == (1 << 26, tmp_path / "a", "redis://b")
    assert config.shared and config.shared.ttl_s == 86400.0 and config.http == HttpConfig(listen="localhost:1")


def test_a_table_without_its_url_takes_it_from_elsewhere(tmp_path: Path) -> None:
    path = write(tmp_path, '[shared]\nttl = "1d"\n')
    assert load(path, {"shared": {"url": "redis://h"}}).shared_url == "redis://h"
    assert "$.shared.url: is missing" in only(path.read_text(), tmp_path)


# -- mistakes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[disk\n", ["it is no TOML", "line 1"]),
        ("a = " + "[" * 5000, ["it is no TOML"]),
        ("a = " + "9" * 5000, ["it is no TOML"]),
        ("disk = 5", ["$.disk: 5 is no table", "[disk]"]),
        ("[[disk]]\nbytes = 1", ["$.disk: ", "is no table"]),
        ("disks = 5", ["$.disks: no such field", "'disk'"]),
        ("zzz = 5", ["$.zzz: no such field", "known are", "log_level", "quota"]),
        ("[disk]\nbyts = 1", ["$.disk.byts: no such field", "'bytes'"]),
        ("[disk]\nttl_s = 1", ["$.disk.ttl_s: no such field", "'ttl'"]),
        ("[disk]\nbytes = 0", ["$.disk.bytes: 0 is not possible", "size from 16 MiB"]),
        ("[disk]\nbytes = -1", ["$.disk.bytes: -1 is negative"]),
        ('[disk]\nbytes = "lots"', ["$.disk.bytes: 'lots' is not a size", "8GiB"]),
        ("[disk]\nbytes = 1.5", ["$.disk.bytes: 1.5 is not a size"]),
        ("[disk]\nbytes = true", ["$.disk.bytes: True is not a size"]),
        ("[disk]\nbytes = 2026-01-01", ["$.disk.bytes: ", "is not a size"]),
        ('[disk]\nttl = "7 parsecs"', ["$.disk.ttl: '7 parsecs' is not a duration", "7d"]),
        ("[disk]\nttl = 0", ["$.disk.ttl: 0 is not possible", "from 1s"]),
        ("[disk]\nttl = nan", ["$.disk.ttl: ", "duration"]),
        ("[disk]\nttl = " + "9" * 400, ["$.disk.ttl: ", "duration"]),
        ('[disk]\nsync = "never"', ["$.disk.sync: 'never' is not a duration"]),
        ("[disk]\nsync = 0", ["$.disk.sync: 0 is not possible", "100ms to 1h"]),
        ('[disk]\nspill = "second_use"', ["$.disk.spill: 'second_use'", "did you mean 'second-use'?"]),
        ('[disk]\nspill = "x"', ["$.disk.spill: 'x'", "through, on-evict, second-use, never"]),
        ("[disk]\nspill = 1", ["$.disk.spill: 1 is not possible", "quotes"]),
        ("[disk]\ndir = 1", ["$.disk.dir: 1 is not possible", "quotes"]),
        ('[disk]\ndir = ""', ["$.disk.dir: '' is no path"]),
        ('[disk]\ndir = "a\\u0000b"', ["$.disk.dir: ", "is no path"]),
        ('[disk]\ndir = "~no-such-user-here/x"', ["$.disk.dir: ", "no home"]),
        ('[shared]\nurl = "http://h"', ["$.shared.url: 'http://h' is not a Redis URL"]),
        ("[shared]\nurl = 5", ["$.shared.url: 5 is not possible"]),
        ('[shared]\nurl = "redis://h"\ncompression = "lz4"', ["$.shared.compression: 'lz4'", "off, zstd"]),
        ('[shared]\nurl = "redis://h"\nprefix = "a{b}"', ["$.shared.prefix: 'a{b}'", "letters"]),
        ('[shared]\nurl = "redis://h"\nprefix = ""', ["$.shared.prefix: ''", "letters"]),
        ('[shared]\nurl = "redis://h"\nprefix = "a*"', ["$.shared.prefix: 'a*'"]),
        ('[shared]\nurl = "redis://h"\ntimeout = 0', ["$.shared.timeout: 0 ", "10ms"]),
        ('[shared]\nurl = "redis://h"\nca_file = "c"', ["$.shared.ca_file: ", "no effect with redis://", "rediss://"]),
        ('[shared]\nurl = "rediss://h"\ncert_file = "c"', ["$.shared.cert_file: needs key_file"]),
        ('[shared]\nurl = "redis://u:p@h"\npassword_file = "p"', ["$.shared.password_file: ", "URL holds a password"]),
        ('[shared]\nurl = "redis://u@h"\nusername = "v"\npassword_file = "p"', ["$.shared.username: ", "another user"]),
        ('[shared]\nurl = "redis://u@h"', ["$.shared.password_file: is missing for user 'u'"]),
        ("[listen]\nsocket_mode = 0o066", ["$.listen.socket_mode: 0066", "0o600"]),
        ("[listen]\nsocket_mode = 0o1600", ["$.listen.socket_mode: ", "0o777"]),
        ('[listen]\nsocket_mode = "0999"', ["$.listen.socket_mode: '0999'", "0o600"]),
        ('[listen]\ntcp = "6390"', ["$.listen.tcp: '6390' is no address", "host:port"]),
        ('[listen]\ntcp = "::1:6390"', ["$.listen.tcp: '::1:6390' is no address", "[::1]"]),
        ('[listen]\ntcp = "h:70000"', ["$.listen.tcp: ", "1 to 65535"]),
        ('[listen]\ntls_cert = "c"\ntls_key = "k"', ["$.listen.tls_cert: has no effect without TCP"]),
        ("[listen]\ninsecure = true", ["$.listen.insecure: has no effect without TCP"]),
        ('[listen]\ninsecure = true\ntcp = "0.0.0.0:6390"', ["$.listen.insecure: ", "loopback only"]),
        ("[listen]\ninsecure = 1", ["$.listen.insecure: 1 ", "true or false"]),
        ("[listen]\nmax_connections = 0", ["$.listen.max_connections: 0 ", "8 to 65536"]),
        ("[listen]\nmax_connections = true", ["$.listen.max_connections: True "]),
        ('[http]\nlisten = "0.0.0.0:9109"', ["$.http.listen: '0.0.0.0:9109' can be reached", "reader_token_file"]),
        ('[http]\nlisten = "cache.example:9109"', ["$.http.listen: ", "can be reached"]),
        ("[quota]\ntenants = 5", ["$.quota.tenants: 5 is no table", "[quota.tenants]"]),
        ('[quota.tenants]\nabc = "1GiB"', ["$.quota.tenants.abc: is no id", "32 hex digits"]),
        (f'[quota.tenants]\n"{ID}" = "x"', [f"$.quota.tenants.{ID}: 'x' is not a size"]),
        ('log_level = "loud"', ["$.log_level: 'loud'", "debug, info, warning, error"]),
        ("drain = 1000", ["$.drain: 1000 ", "0s to 10m"]),
    ],
)
def test_a_mistake_is_one_sentence_with_its_path(text: str, words: list[str], tmp_path: Path) -> None:
    sentence = only(text, tmp_path)
    assert "\n" not in sentence and len(sentence) < 400
    assert [word for word in words if word not in sentence] == [], sentence


def test_tcp_needs_tls_and_a_token(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "127.0.0.1"):
        found = mistakes(f'[listen]\ntcp = "{host}:6390"', tmp_path)
        assert ["needs TLS" in m for m in found] == [True, False] and "needs a token" in found[1]
        assert [("insecure = true" in m) for m in found] == [host == "127.0.0.1"] * 2
    for host in ("127.0.0.1", "localhost", "[::1]"):
        assert mistakes(f'[listen]\ntcp = "{host}:6390"\ninsecure = true', tmp_path) == []


def test_every_mistake_is_said_and_none_that_follows_from_another(tmp_path: Path) -> None:
    text = """
        foo = 1
        [disk]
        bytes = "x"
        byte = 1
        [shared]
        url = "htp://u:hunter2@h"
        password_file = "nope"
        [listen]
        tcp = "nowhere"
        tls_cert = "nope"
    """
    found = mistakes(text, tmp_path, files=True)
    paths = [m.split(":")[0] for m in found]
    assert paths == [
        "$.foo",
        "$.disk.bytes",
        "$.disk.byte",
        "$.shared.url",
        "$.listen.tcp",
        "$.listen.tls_cert",  # needs tls_key
        "$.shared.password_file",
        "$.listen.tls_cert",  # cannot be read
    ]
    assert "hunter2" not in "".join(found)
    with pytest.raises(ConfigError, match=r"tierkv\.toml has 8 mistakes: \$\.foo: "):
        load(tmp_path / "tierkv.toml")


def test_what_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(BadConfigError, match="cannot be read: No such file"):
        load(tmp_path / "none.toml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\0\0")
    with pytest.raises(BadConfigError, match="no text in UTF-8"):
        load(tmp_path / "binary")
    (tmp_path / "large").write_bytes(b"#" * (MAX_FILE_NBYTES + 1))
    with pytest.raises(BadConfigError, match="longer than 1 MiB"):
        load(tmp_path / "large")


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_toml_or_refused(data: bytes) -> None:
    try:
        table = parse_toml(data, "file")
    except BadConfigError as error:
        assert len(error.mistakes) == 1
        return
    config, _ = read(table, Path("/tmp"), files=False)
    assert isinstance(config, ServerConfig)


_leaf = (
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["never", "8GiB", "7d", "redis://a:b@c", "[::1]:1", "0660", "through", "\0", "~x/y", "a" * 300])
    | st.dates()
)
_names = [f.file_name for kind in (ServerConfig, *PARTS.values()) for f in kind.fields()]
_value = st.recursive(_leaf, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=5), v, max_size=3))
_tables = st.dictionaries(
    st.sampled_from([*PARTS, *_names]) | st.text(max_size=6),
    st.dictionaries(st.sampled_from(_names) | st.text(max_size=6), _value, max_size=4) | _value,
    max_size=5,
)


@given(_tables)
def test_any_tables_give_a_configuration_or_mistakes_with_paths(table: dict[str, Any]) -> None:
    config, found = read(table, Path("/tmp"), files=False)
    assert all(str(m).startswith("$.") and "\n" not in m.sentence for m in found)
    if not found:
        again = tomllib.loads(to_toml(config))
        assert to_data(read(again, Path("/"), files=False)[0]) == to_data(config)


# -- the files that are named


def test_files_are_looked_at(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    text = """
        [listen]
        tcp = "0.0.0.0:6390"
        tls_cert = "server.pem"
        tls_key = "server.key"
        tls_client_ca = "server.pem"
        engine_token_file = "engine"
        admin_token_file = "admin"
        [shared]
        url = "rediss://h"
        password_file = "password"
    """
    secret(tmp_path, "engine", "e" * 16)
    secret(tmp_path, "admin", "a" * 16 + "\n", 0o440)
    secret(tmp_path, "password", "x", 0o640)
    assert mistakes(text, tmp_path, files=True) == []
    for name, content, mode, words in [
        ("engine", "e" * 15, 0o600, ["15 characters", "16 to 1024"]),
        ("engine", "", 0o600, ["one line"]),
        ("engine", "two words and more", 0o600, ["no token"]),
        ("engine", "a" * 16, 0o600, ["same token", "each role"]),
        ("engine", TOKEN, 0o604, ["has mode 0604", "chmod 600"]),
        ("engine", TOKEN, 0o620, ["has mode 0620"]),
        ("password", "x\ny", 0o600, ["one line"]),
        ("password", "x", 0o644, ["has mode 0644"]),
        ("server.key", "no key", 0o600, ["no certificate that can be used"]),
        ("server.pem", "no certificate", 0o600, []),
    ]:
        before = (tmp_path / name).read_bytes(), (tmp_path / name).stat().st_mode
        secret(tmp_path, name, content, mode)
        found = mistakes(text, tmp_path, files=True)
        assert len(found) == (2 if name == "server.pem" else 1), found  # it is the authority too
        assert [word for word in words if word not in found[0]] == [] and name in "".join(found), found
        assert TOKEN not in "".join(found)
        (tmp_path / name).write_bytes(before[0])
        (tmp_path / name).chmod(before[1])


def test_a_key_with_a_passphrase_asks_nobody(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    key = certificate[1]
    command = ["openssl", "ec", "-in", str(key), "-aes256", "-passout", "pass:x", "-out", str(key)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    secret(tmp_path, "engine")
    text = '[listen]\ntcp = "h:1"\ntls_cert = "server.pem"\ntls_key = "server.key"\nengine_token_file = "engine"'
    assert "no certificate that can be used" in only(text, tmp_path, files=True)


def test_directories_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "is no directory" in mistakes('[disk]\ndir = "file"', tmp_path, files=True)[0]
    assert "is no directory" in mistakes('[disk]\ndir = "file/x/y"', tmp_path, files=True)[0]
    assert "no socket" in only('[listen]\nsocket = "file"', tmp_path, files=True)
    assert "no directory" in only('[listen]\nsocket = "file/tierkv.sock"', tmp_path, files=True)
    assert "no directory" in only('[listen]\nsocket = "none/tierkv.sock"', tmp_path, files=True)
    assert mistakes('[disk]\ndir = "new"\n[listen]\nsocket = "new/a.sock"', tmp_path, files=True) == []
    assert mistakes('[disk]\ndir = "new/deep"', tmp_path, files=True) == []
    assert not (tmp_path / "new").exists(), "a check makes nothing"


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    assert "cannot be written" in mistakes('[disk]\ndir = "closed"', tmp_path, files=True)[0]


# -- values


@pytest.mark.parametrize("text", ["127.0.0.1:1", "localhost:65535", "[::1]:80", "a.b-c.example:9109"])
def test_addresses(text: str) -> None:
    host, port = parse_address(text)
    assert f"{host}:{port}" == text


@pytest.mark.parametrize(
    "text", ["", ":1", "a", "a:", "a:0", "a:-1", "a:1x", "[]:1", "::1:1", "[::1:1", "a b:1", "a:٣"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match=r"address|port"):
        parse_address(text)


@given(st.integers(0, MAX_SIZE))
def test_sizes_are_written_exactly(nbytes: int) -> None:
    assert parse_size(exact_size(nbytes)) == nbytes


@given(st.integers(0, int(MAX_DURATION_S) * 1000))
def test_durations_are_written_exactly(milliseconds: int) -> None:
    assert parse_duration(exact_duration(milliseconds / 1000)) == milliseconds / 1000


def test_merging_changes_neither() -> None:
    below = {"disk": {"bytes": 1}}
    assert merge(below, {"disk": {"dir": "x"}}) == {"disk": {"bytes": 1, "dir": "x"}}
    assert below == {"disk": {"bytes": 1}}


# -- what is shown


def test_the_description_is_one_line_without_secrets() -> None:
    config = ServerConfig.make(Path("/var/lib/tierkv"), 8 << 30, "redis://me:hunter2@host/0", linger_s=5.0)
    line = config.describe()
    assert line == (
        "serving on /var/lib/tierkv/tierkv.sock: disk 8 GiB in /var/lib/tierkv, shared redis://me:***@host/0; "
        "leaves 5 s after its last engine"
    )
    more = msgspec.structs.replace(
        config, http=HttpConfig(), drain_s=60.0, disk=DiskConfig(ttl_s=86400.0, spill=Spill.NEVER), linger_s=None
    )
    assert more.describe().endswith("; stays; http on 127.0.0.1:9109; drain=1m; disk.spill=never; disk.ttl=1d")
    for text in (to_toml(config), json.dumps(to_data(config))):
        assert "hunter2" not in text and "redis://me:***@host/0" in text


def invoke(*args: str, env: dict[str, str] | None = None) -> tuple[Any, str, str]:
    """Run the command line in this process; returns what the command returned and said."""
    result = CliRunner().invoke(cli, args, standalone_mode=False, env={"TIERKV_SHARED_URL": None} | (env or {}))
    if result.exception is not None:
        raise result.exception
    return result.return_value, result.stdout, result.stderr


def test_config_check(tmp_path: Path) -> None:
    path = write(tmp_path, '[disk]\ndir = "store"\n')
    code, out, _ = invoke("config", "check", str(path))
    assert code == 0 and f"{path}: fine." in out and f"disk 20 GiB in {tmp_path}/store" in out
    write(tmp_path, '[disk]\nbytes = 0\n[shared]\nurl = "redis://h"\npassword_file = "none"\n')
    code, out, err = invoke("config", "check", str(path))
    assert code == 2 and out == ""
    assert [line.split(": ")[:2] for line in err.splitlines()] == [
        [str(path), "$.disk.bytes"],
        [str(path), "$.shared.password_file"],
    ]
    assert invoke("config", "check", "--no-files", str(path))[2].count("\n") == 1


def test_config_show(tmp_path: Path) -> None:
    path = write(tmp_path, '[disk]\ndir = "store"\nttl = "1w"\n[shared]\nurl = "redis://h"\n')
    _, out, _ = invoke("config", "show", str(path), env={"TIERKV_SHARED_URL": "redis://:hunter2@other"})
    assert "hunter2" not in out
    shown = tomllib.loads(out)
    assert shown["disk"]["ttl"] == "7d" and shown["shared"]["url"] == "redis://:***@other"
    data = json.loads(invoke("config", "show", "--json", str(path))[1])
    assert data["disk"]["ttl"] == 604800.0 and data["disk"]["dir"] == str(tmp_path / "store") and data["http"] is None


# -- documents


def test_the_example_is_the_defaults_and_every_line_of_it_works(tmp_path: Path) -> None:
    text = invoke("config", "example")[1]
    assert text == example()
    assert "`" not in text and "# redis://[user@]host" in text and "# zstd: byte-shuffle" in text, "names as they are"
    assert not re.search(r"(?m)^# [a-z]", text.replace("# redis:", "").replace("# zstd:", "")), "sentences"
    assert load(write(tmp_path, text), files=False) == load(None, files=False)
    whole = re.sub(r'^#(?=[a-z_"\[])', "", text, flags=re.MULTILINE)
    config, found = read(tomllib.loads(whole), tmp_path, files=False)
    assert found == []
    for part, field, value in config.values():
        if field.default is not None and field.about.kind is not Kind.SIZES and not field.about.example:
            assert value == field.default, f"{part}{field.name} in the example is not its default"
        assert field.about.example == "" or value not in (None, field.default), field.name


def row(field: Field) -> str:
    """Return a field's row in the tables of docs/configuration.md."""
    about = field.about
    value = ", ".join(f"`{word}`" for word in about.words) or str(about.kind)
    if field.name in ("dir", "socket"):
        default = {"dir": "`tierkv` in your cache folder", "socket": "`tierkv.sock` in `disk.dir`"}[field.name]
    elif field.default is msgspec.NODEFAULT:
        default = "must be set"
    elif about.kind is Kind.SIZES:
        default = "empty"
    elif field.default is None:
        default = '`"never"`' if about.kind is Kind.DURATION else "none"
    elif about.kind is Kind.MODE:
        default = f"`0o{field.default:o}`"
    elif about.kind in (Kind.SIZE, Kind.DURATION):
        exact = exact_size if about.kind is Kind.SIZE else exact_duration
        default = f'`"{exact(field.default)}"`'
    else:
        default = f"`{json.dumps(field.default)}`"
    return f"| `{field.file_name}` | {value} | {default} | {'yes' if about.reload else 'no'} | {about.what} |"


def test_the_document_has_every_field_as_it_is() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    for heading, kind in {"At the top": ServerConfig, **{f"[{part}]": kind for part, kind in PARTS.items()}}.items():
        rows = re.findall(r"^\| `.*\|$", sections[heading], re.MULTILINE)
        assert rows == [row(field) for field in kind.fields()], f"section {heading} of docs/configuration.md"


def test_the_documents_example_is_possible(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    blocks = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        assert mistakes(block, tmp_path) == []


def test_the_least_budget_is_the_disk_tiers() -> None:
    assert next(field.about.least for field in DiskConfig.fields() if field.name == "bytes") == MIN_BUDGET


def test_every_value_of_every_part_is_known() -> None:
    """A new field needs its annotation, or files, the documents and reloading would not know it."""
    for kind in (ServerConfig, *PARTS.values()):
        known = {field.name for field in kind.fields()} | (set(PARTS) if kind is ServerConfig else set())
        assert known == set(kind.__struct_fields__)
