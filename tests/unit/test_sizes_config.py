"""Sizes and configuration: defaults, and one sentence for every mistake."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv import config
from tierkv.config import EngineConfig, check_shared_url, shared_digest, socket_path
from tierkv.errors import ConfigError
from tierkv.sizes import MAX_SIZE, format_size, parse_size
from tierkv.urls import redact_url

# -- sizes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (0, 0),
        (1048576, 1048576),
        ("1048576", 1048576),
        ("8GiB", 8 << 30),
        ("8gib", 8 << 30),
        (" 8 GiB ", 8 << 30),
        ("8g", 8 << 30),
        ("8GB", 8 * 1000**3),
        ("1.5 GiB", 3 << 29),
        ("0.1k", 102),
        ("512 MB", 512 * 1000**2),
        ("3B", 3),
        ("2TiB", 2 << 40),
        ("1p", 1 << 50),
        ("9007199254740993", 9007199254740993),  # not exact as a float
    ],
)
def test_sizes(text: int | str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


NO_SIZES = ["", "GiB", "8XB", "8 GiBs", "-1", "1e9", "8,5GiB", "0x10", "8 G i B", "9" * 400, "9" * 20 + "TiB"]


@pytest.mark.parametrize("text", NO_SIZES)
def test_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


@pytest.mark.parametrize("value", [-1, 1.5, True, None, [], b"8", MAX_SIZE + 1])
def test_what_is_no_size_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(value)


@given(st.integers(0, 1 << 40), st.integers(0, 999), st.sampled_from([("KiB", 1024), ("kB", 1000), ("MiB", 1024**2)]))
def test_sizes_are_exact(whole: int, thousandths: int, unit: tuple[str, int]) -> None:
    name, factor = unit
    assert parse_size(f"{whole}.{thousandths:03} {name}") == int(Fraction(whole * 1000 + thousandths, 1000) * factor)


@given(st.integers(0, MAX_SIZE))
def test_formatted_sizes_can_be_read_back(nbytes: int) -> None:
    again = parse_size(format_size(nbytes))
    assert abs(again - nbytes) <= nbytes / 1000 * 51  # one decimal of a number from 1 up


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (8 << 30, "8 GiB"), (5000 << 40, "5000 TiB")],
)
def test_format(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


# -- defaults


def test_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(config, "total_memory", lambda: 40 << 30)
    c = EngineConfig.parse({})
    assert c == EngineConfig(
        host_bytes=4 << 30,
        server="auto",
        disk_dir=tmp_path / "tierkv",
        disk_bytes=20 << 30,
        shared_url=None,
        chunk_tokens=None,
        deadline_s=2.0,
    )
    assert c.socket == tmp_path / "tierkv" / "tierkv.sock" == socket_path(c.disk_dir)
    assert EngineConfig.parse(dict.fromkeys(EngineConfig.__struct_fields__, None) | {"server": "auto"}) == c


def test_the_default_host_pool_is_at_most_8_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "total_memory", lambda: 1 << 40)
    assert EngineConfig.parse({}).host_bytes == 8 << 30


def test_the_cache_folder_without_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert EngineConfig.parse({}).disk_dir == tmp_path / ".cache" / "tierkv"
    assert EngineConfig.parse({"disk_dir": "~/kv"}).disk_dir == tmp_path / "kv"


def test_every_option() -> None:
    options = {
        "host_bytes": "1.5GiB",
        "server": "auto",
        "disk_dir": "/var/lib/tierkv",
        "disk_bytes": 123456789,
        "shared_url": "rediss://me:secret@[::1]:6380/3?client_name=x",
        "chunk_tokens": 128,
        "deadline_s": 1,
    }
    c = EngineConfig.parse(options)
    assert (c.host_bytes, c.disk_bytes, c.chunk_tokens, c.deadline_s) == (3 << 29, 123456789, 128, 1.0)
    assert (c.disk_dir, c.shared_url) == (Path("/var/lib/tierkv"), options["shared_url"])


def test_the_socket_of_a_server_that_others_run() -> None:
    assert EngineConfig.parse({"server": "unix:///run/tierkv/x.sock"}).socket == Path("/run/tierkv/x.sock")


# -- mistakes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"host_byte": 1}, ["'host_byte'", "kv_connector_extra_config", "did you mean 'host_bytes'?"]),
        ({"disk-dir": "/x"}, ["'disk-dir'", "did you mean 'disk_dir'?"]),
        ({"zzz": 1}, ["'zzz'", "known are", "host_bytes", "deadline_s"]),
        ({7: 1}, ["7", "known are"]),
        ({"host_bytes": "lots"}, ["host_bytes='lots'", "such as '8GiB'"]),
        ({"host_bytes": -5}, ["host_bytes=-5", "negative"]),
        ({"host_bytes": 0}, ["host_bytes=0", "such as '8GiB'"]),
        ({"host_bytes": True}, ["host_bytes=True", "such as '8GiB'"]),
        ({"host_bytes": 1.5}, ["host_bytes=1.5", "such as '8GiB'"]),
        ({"host_bytes": "9" * 30 + "TiB"}, ["host_bytes=", "more than any machine", "such as '8GiB'"]),
        ({"disk_bytes": "0GiB"}, ["disk_bytes='0GiB'", "leave it out"]),
        ({"disk_bytes": []}, ["disk_bytes=[]", "such as '8GiB'"]),
        ({"server": "on"}, ["server='on'", "'auto', 'off' or 'unix:///path/to/socket'"]),
        ({"server": None}, ["server=None", "'auto'"]),
        ({"server": False}, ["server=False", "'off'"]),
        ({"server": "unix://relative"}, ["server='unix://relative'", "unix:///path"]),
        ({"server": "unix:///"}, ["server='unix:///'", "unix:///path"]),
        ({"server": "tcp://host:1"}, ["server='tcp://host:1'", "unix:///path"]),
        ({"disk_dir": ""}, ["disk_dir=''", "set a path"]),
        ({"disk_dir": 5}, ["disk_dir=5", "set a path"]),
        ({"disk_dir": "a\0b"}, ["disk_dir=", "set a path"]),
        ({"disk_dir": "kv"}, ["disk_dir='kv'", "relative", str(Path("kv").resolve())]),
        ({"disk_dir": "~no-such-user-here/kv"}, ["disk_dir='~no-such-user-here/kv'", "set an absolute path"]),
        ({"shared_url": "http://host"}, ["shared_url='http://host'", "redis://[user:password@]host:port/db"]),
        ({"shared_url": "host:6379"}, ["shared_url='host:6379'", "redis://"]),
        ({"shared_url": ""}, ["shared_url=''", "redis://"]),
        ({"shared_url": 6379}, ["shared_url=6379", "redis://"]),
        ({"shared_url": "redis://"}, ["shared_url='redis://'", "names no host"]),
        ({"shared_url": "redis:///0"}, ["shared_url='redis:///0'", "names no host"]),
        ({"shared_url": "redis://:6379"}, ["shared_url='redis://:6379'", "names no host"]),
        ({"shared_url": "unix:///"}, ["shared_url='unix:///'", "names no host"]),
        ({"shared_url": "redis://host:port/0"}, ["port 'port'", "1 to 65535"]),
        ({"shared_url": "redis://host:0"}, ["port '0'", "1 to 65535"]),
        ({"shared_url": "redis://host:70000"}, ["port '70000'", "1 to 65535"]),
        ({"chunk_tokens": 0}, ["chunk_tokens=0", "multiple of the block size"]),
        ({"chunk_tokens": -16}, ["chunk_tokens=-16", "multiple of the block size"]),
        ({"chunk_tokens": "64"}, ["chunk_tokens='64'", "multiple of the block size"]),
        ({"chunk_tokens": 64.0}, ["chunk_tokens=64.0", "multiple of the block size"]),
        ({"deadline_s": -1}, ["deadline_s=-1", "0 to 3600", "2"]),
        ({"deadline_s": float("nan")}, ["deadline_s=nan", "0 to 3600"]),
        ({"deadline_s": "2s"}, ["deadline_s='2s'", "0 to 3600"]),
        ({"deadline_s": True}, ["deadline_s=True", "0 to 3600"]),
        ({"server": "off", "disk_dir": "/x"}, ["disk_dir='/x'", "server='off'", "server='auto'"]),
        ({"server": "off", "disk_bytes": "1GiB"}, ["disk_bytes='1GiB'", "server='off'"]),
        ({"server": "unix:///s", "shared_url": "redis://h"}, ["shared_url='redis://h'", "server='unix:///s'"]),
    ],
)
def test_a_mistake_is_one_sentence(options: dict[Any, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.parse(options)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert [word for word in words if word not in sentence] == [], sentence


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost",
        "redis://localhost:6379",
        "redis://localhost:6379/0",
        "redis://localhost:6379?db=1",
        "redis://:secret@10.0.0.1:6379/0",
        "rediss://me:p%40ss@cache.example.com:6380/1",
        "redis://[::1]:6379",
        "redis://[::1]",
        "unix:///run/redis.sock",
        "unix:///run/redis:1.sock?db=2",
        "unix://me:secret@/run/redis.sock",
    ],
)
def test_urls_of_redis_are_taken(url: str) -> None:
    assert check_shared_url(url) == url


# -- secrets


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (None, ""),
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://me:secret@host:6379/0", "redis://me:***@host:6379/0"),
        ("redis://:secret@host", "redis://:***@host"),
        ("redis://me:sec:ret@host", "redis://me:***@host"),
        ("redis://me:sec@ret@host", "redis://me:***@host"),
        ("redis://me:sec/ret@host", "redis://me:***@host"),
        ("me:secret@host:6379", "me:***@host:6379"),
        ("redis://host?password=secret&db=1", "redis://host?password=***&db=1"),
        ("rediss://host?db=1&ssl_password=secret", "rediss://host?db=1&ssl_password=***"),
    ],
)
def test_redacted_urls(url: str | None, shown: str) -> None:
    assert redact_url(url) == shown


@pytest.mark.parametrize(
    "options",
    [
        {"shared_url": "http://me:hunter2@host"},
        {"shared_url": "me:hunter2@host:6379"},
        {"shared_url": "redis://me:hunter2@host:x"},
        {"shared_url": "redis://me:hunter2@"},
        {"shared_url": "redis://host:x?password=hunter2"},
        {"shared_url": "redis://me:hunter2@host", "server": "off"},
        {"shared_url": "redis://me:hunter2@host", "disk_byte": 1},
        {"shared_url": "redis://me:hunter2@host", "disk_bytes": "x"},
    ],
)
def test_a_password_is_never_in_a_sentence(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.parse(options)
    assert "hunter2" not in str(caught.value)


def test_the_description_has_no_password() -> None:
    line = EngineConfig.parse({"shared_url": "redis://me:hunter2@host/0", "host_bytes": "8GiB"}).describe()
    assert "hunter2" not in line
    assert "redis://me:***@host/0" in line
    assert "host 8 GiB, disk 20 GiB in " in line
    assert "\n" not in line
    assert EngineConfig.parse({"server": "off", "host_bytes": "8GiB"}).describe() == "host 8 GiB, no store server"
    assert "unix:///s" in EngineConfig.parse({"server": "unix:///s"}).describe()


def test_digests_of_urls_tell_them_apart_and_hide_them() -> None:
    urls = [None, "redis://a", "redis://b", "redis://me:hunter2@a"]
    digests = [shared_digest(url) for url in urls]
    assert len(set(digests)) == len(urls)
    assert all(len(digest) == 16 for digest in digests)
    assert shared_digest("redis://a") == digests[1]
