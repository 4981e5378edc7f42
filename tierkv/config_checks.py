"""What cannot work in a configuration of the server although every value is possible: found at start, never later.

:func:`check` looks at what fields say of each other, and at the files they name. It opens no socket and writes nothing.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
import ssl
import stat
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from urllib.parse import urlsplit

from tierkv.server_config import Kind, ListenConfig, ServerConfig, SharedConfig
from tierkv.toml_config import Mistake, parse_address
from tierkv.urls import url_secrets

#: Shorter tokens can be guessed over a network: 16 characters of base64 are 96 bits.
MIN_TOKEN_CHARS = 16
MAX_TOKEN_CHARS = 1024
_MAX_SECRET_NBYTES = 4096
#: Who may not read or change a secret: all others; and a group, which may read it, may not change it.
_OTHERS = stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP
_TOKENS = ("engine_token_file", "reader_token_file", "admin_token_file")
#: Braces would make a hash tag of a Cluster, the others are wildcards of SCAN and of ACL rules.
_PREFIX = re.compile(r"[A-Za-z0-9._:/@+=-]{1,64}")
_ID = re.compile(r"[0-9a-f]{32}")


def check(config: ServerConfig, *, files: bool = True) -> list[Mistake]:
    """Return what cannot work.

    Args:
        files: look also at the directories, certificates and secrets that the configuration names.
    """
    found = [*_listen(config), *_quota(config)]
    if config.shared:
        found += _shared(config.shared)
    if files:
        found += _files(config)
        bad = {field for mistake in found for field in mistake.fields}
        found += [m for m in _contents(config, bad) if not bad.intersection(m.fields)]
    return found


def is_loopback(host: str) -> bool:
    """Return whether an address's host can be reached from this machine only."""
    bare = host.strip("[]")
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return bare == "localhost"


# -- what fields say of each other


def _listen(config: ServerConfig) -> Iterator[Mistake]:
    listen = config.listen
    if listen.socket_mode & 0o600 != 0o600:
        yield _mistake(f"{listen.socket_mode:04o} keeps the server's own user out; set 0o600 or 0o660", "socket_mode")
    yield from _pair(listen, "listen", "tls_cert", "tls_key")
    if listen.tls_client_ca and not listen.tls_cert:
        yield _mistake("has no effect without TLS; set tls_cert and tls_key too", "tls_client_ca", "tls_cert")
    if listen.tcp is None:
        for name in ("tls_cert", "tls_client_ca", "engine_token_file"):
            if getattr(listen, name):
                yield _mistake("has no effect without TCP; set tcp, or leave it out", name, "tcp")
        if listen.insecure:
            yield _mistake("has no effect without TCP; set tcp, or leave it out", "insecure", "tcp")
    else:
        yield from _tcp(listen, listen.tcp)
    if config.http and not is_loopback(parse_address(config.http.listen)[0]):
        yield from _open_http(config.http.listen, listen)
    if config.http and listen.tcp and parse_address(config.http.listen)[1] == parse_address(listen.tcp)[1]:
        yield Mistake(("http.listen", "listen.tcp"), "is the port of listen.tcp too; set another one")


def _tcp(listen: ListenConfig, address: str) -> Iterator[Mistake]:
    loopback = is_loopback(parse_address(address)[0])
    if listen.insecure:
        if not loopback:
            yield _mistake(
                f"TCP without TLS or token is for the loopback only, and tcp is {address!r}; set tls_cert, tls_key and "
                f"engine_token_file instead",
                "insecure",
                "tcp",
            )
        return
    if not listen.tls_cert:
        yield _mistake(
            f"{address!r} needs TLS; set tls_cert and tls_key" + (", or insecure = true" if loopback else ""),
            "tcp",
            "tls_cert",
        )
    if not any(getattr(listen, name) for name in _TOKENS):
        yield _mistake(
            f"{address!r} needs a token; set engine_token_file" + (", or insecure = true" if loopback else ""),
            "tcp",
            *_TOKENS,
        )


def _open_http(address: str, listen: ListenConfig) -> Iterator[Mistake]:
    if not listen.reader_token_file and not listen.admin_token_file:
        yield Mistake(
            ("http.listen", "listen.reader_token_file", "listen.admin_token_file"),
            f"{address!r} can be reached from other machines; set listen.reader_token_file or listen.admin_token_file, "
            f"or listen on 127.0.0.1",
        )


def _shared(shared: SharedConfig) -> Iterator[Mistake]:
    if not _PREFIX.fullmatch(shared.prefix):
        yield Mistake(
            ("shared.prefix",),
            f"{shared.prefix!r} is not possible; set 1 to 64 letters, digits or any of . _ : / @ + = -",
        )
    yield from _pair(shared, "shared", "cert_file", "key_file")
    if not shared.url:  # missing: said already
        return
    scheme = shared.url.split(":", 1)[0]
    for name in ("ca_file", "cert_file", "key_file"):
        if getattr(shared, name) and not scheme.startswith("rediss"):
            yield Mistake(
                (f"shared.{name}", "shared.url"), f"has no effect with {scheme}://; write rediss:// in url for TLS"
            )
    if shared.password_file and url_secrets(shared.url):
        yield Mistake(("shared.password_file", "shared.url"), "the URL holds a password too; take it out of there")
    user = shared.username or _url_user(shared.url)
    if user and not shared.password_file and not url_secrets(shared.url):
        yield Mistake(("shared.password_file", "shared.url"), f"is missing for user {user!r}; set it")
    if shared.username and _url_user(shared.url) not in ("", shared.username):
        yield Mistake(("shared.username", "shared.url"), "the URL names another user; name one")


def _url_user(url: str) -> str:
    try:
        return urlsplit(url).username or ""
    except ValueError:
        return ""


def _quota(config: ServerConfig) -> Iterator[Mistake]:
    for table in ("namespaces", "tenants"):
        for name in getattr(config.quota, table):
            if not _ID.fullmatch(name):
                yield Mistake(
                    (f"quota.{table}.{name}",), "is no id; write its 32 hex digits in lower case, as 'tierkv stat' does"
                )


def _pair(struct: object, part: str, one: str, other: str) -> Iterator[Mistake]:
    for there, missing in ((one, other), (other, one)):
        if getattr(struct, there) and not getattr(struct, missing):
            yield Mistake((f"{part}.{there}", f"{part}.{missing}"), f"needs {missing} beside it")


def _mistake(sentence: str, *names: str) -> Mistake:
    return Mistake(tuple(f"listen.{name}" for name in names), sentence)


# -- files


def _files(config: ServerConfig) -> Iterator[Mistake]:
    """Yield what is wrong with the files that are named, as far as their names and modes say."""
    for part, field, value in config.values():
        kind, path = field.about.kind, f"{part}{field.file_name}"
        if not isinstance(value, Path):
            continue
        if kind is Kind.DIRECTORY:
            wrong = _no_directory(value)
        elif kind is Kind.SOCKET:
            wrong = _no_socket(value, config.disk.dir)
        else:
            wrong = _no_file(value, secret=kind is Kind.SECRET)
        if wrong:
            yield Mistake((path,), f"{str(value)!r} {wrong}")


def _no_directory(path: Path) -> str:
    try:
        there = next((p for p in (path, *path.parents) if p.exists()), Path("/"))
        if not there.is_dir():
            return f"is not possible: {str(there)!r} is no directory; set another"
    except OSError as error:
        return f"cannot be used: {error.strerror}; set another"
    if not os.access(there, os.W_OK | os.X_OK):
        what = "it" if there == path else f"it cannot be made: {str(there)!r}"
        return f"cannot be used: {what} cannot be written by this user; set another, or give it to this user"
    return ""


def _no_socket(path: Path, disk_dir: Path) -> str:
    try:
        if path.is_socket():
            return ""  # of the service manager, or of a server before: listening on it will tell
        if path.exists():
            return "is something that is no socket; remove it, or set another path"
    except OSError as error:
        return f"cannot be used: {error.strerror}; set another"
    if path.parent == disk_dir:
        return ""  # the server makes that one, and it is looked at itself
    if not path.parent.is_dir():
        return f"cannot be made: there is no directory {str(path.parent)!r}; make it, or set another path"
    wrong = _no_directory(path.parent)
    return f"cannot be made: its directory {wrong}" if wrong else ""


def _no_file(path: Path, secret: bool) -> str:
    try:
        about = path.stat()
    except OSError as error:
        return f"cannot be read: {error.strerror}; name a file that this user can read"
    if not stat.S_ISREG(about.st_mode):
        return "is no file"
    if not os.access(path, os.R_OK):
        return "cannot be read by this user; give it to this user"
    if secret and about.st_mode & _OTHERS:
        mode = stat.S_IMODE(about.st_mode)
        return f"holds a secret and has mode {mode:04o}: others may read or change it; run 'chmod 600 {path}'"
    return ""


def _contents(config: ServerConfig, bad: set[str]) -> Iterator[Mistake]:
    """Yield what is wrong with what stands in the files; those in ``bad`` have been complained of."""
    listen, shared = config.listen, config.shared
    tokens: dict[str, str] = {}
    for name in _TOKENS:
        path: Path | None = getattr(listen, name)
        if path and f"listen.{name}" not in bad:
            try:
                tokens[name] = read_token(path)
            except ValueError as error:
                yield _mistake(str(error), name)
    for one, other in combinations(tokens, 2):
        if hmac.compare_digest(tokens[one].encode(), tokens[other].encode()):
            yield _mistake(f"holds the same token as {other}; each role has its own", one, other)
    if shared and shared.password_file and "shared.password_file" not in bad:
        try:
            read_secret(shared.password_file)
        except ValueError as error:
            yield Mistake(("shared.password_file",), str(error))
    for part, cert, key, ca in (
        ("listen", listen.tls_cert, listen.tls_key, listen.tls_client_ca),
        *([("shared", shared.cert_file, shared.key_file, shared.ca_file)] if shared else []),
    ):
        names = {"listen": ("tls_cert", "tls_key", "tls_client_ca"), "shared": ("cert_file", "key_file", "ca_file")}
        fields = [f"{part}.{name}" for name in names[part]]
        if cert and key and not bad.intersection(fields[:2]) and (wrong := _no_certificate(cert, key)):
            yield Mistake((fields[0], fields[1]), wrong)
        if ca and fields[2] not in bad and (wrong := _no_authority(ca)):
            yield Mistake((fields[2],), wrong)


def read_token(path: Path) -> str:
    """Return the token in a file.

    Raises:
        ValueError: there is none that a client could send, or it is too short.
        OSError: the file cannot be read.
    """
    token = read_secret(path)
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(f"{str(path)!r} holds no token: one line of printable characters without spaces")
    if not MIN_TOKEN_CHARS <= len(token) <= MAX_TOKEN_CHARS:
        raise ValueError(
            f"{str(path)!r} holds a token of {len(token)} characters, and it has to have {MIN_TOKEN_CHARS} to "
            f"{MAX_TOKEN_CHARS}; make one with 'openssl rand -hex 32'"
        )
    return token


def read_secret(path: Path) -> str:
    """Return the one line of a file that holds a secret, without the white space around it.

    Raises:
        ValueError: the file is empty, is no text, or has several lines.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(_MAX_SECRET_NBYTES + 1)
    try:
        text = data.decode().strip()
    except UnicodeDecodeError:
        raise ValueError(f"{str(path)!r} holds no text; write the secret on its only line") from None
    if not text or len(text.splitlines()) > 1 or len(data) > _MAX_SECRET_NBYTES:
        raise ValueError(f"{str(path)!r} does not hold one line; write the secret on its only line")
    return text


def _no_certificate(cert: Path, key: Path) -> str:
    try:
        # An encrypted key would ask at the terminal: an empty passphrase makes that an error.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: "")
    except (OSError, ValueError) as error:  # SSLError is an OSError
        return f"{str(cert)!r} with key {str(key)!r} is no certificate that can be used: {_reason(error)}"
    return ""


def _no_authority(ca: Path) -> str:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(ca)
    except (OSError, ValueError) as error:
        return f"{str(ca)!r} holds no certificates that can be used: {_reason(error)}"
    return ""


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
    return str(reason).replace("_", " ").lower()
