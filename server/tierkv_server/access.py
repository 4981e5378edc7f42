"""Who may do what: roles, tokens, TLS.

A peer of the unix socket is of the server's own user (or root) and may do everything. A peer over TCP is nobody until
it has sent a token; the token's role says which commands it may send. Tokens come from files, are kept as digests, and
are compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import ssl
import threading
import time
from enum import StrEnum

from tierkv.errors import ConfigError
from tierkv.resp import MAX_ARRAY_ITEMS, MAX_BULK_NBYTES, MAX_LINE_NBYTES, MAX_VALUE_NBYTES, Bounds
from tierkv.server_config import ListenConfig
from tierkv.transport import load_token

logger = logging.getLogger("tierkv")

#: How long a connection may take to shake hands and to say who it is.
AUTH_DEADLINE_S = 10.0
#: The answer to a wrong token takes this long; with the last one that is answered the connection is closed.
AUTH_DELAY_S = 0.5
MAX_AUTH_TRIES = 3
#: Wrong tokens are logged once in this time, with their number.
_LOG_INTERVAL_S = 60.0


class Role(StrEnum):
    """What a peer may do. ``NOBODY`` has not authenticated."""

    NOBODY = "nobody"
    ENGINE = "engine"
    READER = "reader"
    ADMIN = "admin"


#: What each role accepts in one command. Before authentication: enough for HELLO with AUTH.
BOUNDS = {
    Role.NOBODY: Bounds(bulk=4 << 10, items=16, line=4 << 10, value=8 << 10),
    Role.READER: Bounds(bulk=16 << 20, items=1 << 10, line=MAX_LINE_NBYTES, value=16 << 20),
    Role.ENGINE: Bounds(MAX_BULK_NBYTES, MAX_ARRAY_ITEMS, MAX_LINE_NBYTES, MAX_VALUE_NBYTES),
    Role.ADMIN: Bounds(MAX_BULK_NBYTES, MAX_ARRAY_ITEMS, MAX_LINE_NBYTES, MAX_VALUE_NBYTES),
}

_EVERYBODY = (b"AUTH", b"HELLO", b"QUIT")
_KNOWN = (b"PING", b"ECHO", b"COMMAND", b"CLIENT", b"SELECT")
_READER = (
    *_KNOWN,
    b"TKV.MATCH",
    b"TKV.STAT",
    b"TKV.NS",
    b"TKV.LS",
    b"TKV.PAGE",
    b"TKV.SHOW",
    b"TKV.TREE",
    b"TKV.DU",
    b"TKV.LOCATE",
    b"TKV.CHUNKS",
    b"TKV.STORED",
    b"TKV.USAGE",
    b"TKV.REUSE",
    b"TKV.EVENTS",
    b"TKV.SLOW",
    b"TKV.SESSIONS",
)
_ENGINE = (
    *_KNOWN,
    b"TKV.HELLO",
    b"TKV.ATTACH",
    b"TKV.SUBSCRIBE",
    b"TKV.ANSWER",
    b"TKV.MATCH",
    b"TKV.FETCH",
    b"TKV.STORE",
    b"TKV.USE",
    b"TKV.NOTE",
    b"TKV.HOLD",
    b"TKV.TURN",
    b"TKV.ASKED",
    b"TKV.DRAIN",
)
_COMMANDS = {
    Role.NOBODY: frozenset(_EVERYBODY),
    Role.READER: frozenset(_EVERYBODY + _READER),
    Role.ENGINE: frozenset(_EVERYBODY + _ENGINE),
}


def may(role: Role, command: bytes) -> bool:
    """Return whether a role may send a command (in capitals). What is not listed here is the admin's."""
    return role is Role.ADMIN or command in _COMMANDS[role]


# -- tokens


class Tokens:
    """The roles' tokens, as digests. Immutable.

    Args:
        tokens: the token of each role that has one.

    Raises:
        ConfigError: two roles have one token.
    """

    def __init__(self, tokens: dict[Role, str]) -> None:
        self._digests = {role: _digest(token.encode()) for role, token in tokens.items()}
        if len(set(self._digests.values())) < len(self._digests):
            raise ConfigError(
                "two of engine_token_file, reader_token_file and admin_token_file hold the same token; "
                "make one for each role"
            )

    @classmethod
    def load(cls, config: ListenConfig) -> Tokens:
        """Read the files that ``config`` names.

        Raises:
            ConfigError: one is not usable, or two hold the same token.
        """
        files = {
            Role.ENGINE: (config.engine_token_file, "engine_token_file"),
            Role.READER: (config.reader_token_file, "reader_token_file"),
            Role.ADMIN: (config.admin_token_file, "admin_token_file"),
        }
        return cls({role: load_token(path, option) for role, (path, option) in files.items() if path is not None})

    def __bool__(self) -> bool:
        return bool(self._digests)

    def has(self, role: Role) -> bool:
        """Return whether a role has a token."""
        return role in self._digests

    def role_of(self, token: bytes, wanted: Role | None = None) -> Role | None:
        """Return the role of ``token``, if it is ``wanted`` or none in particular is; None for a wrong token.

        Takes the same time for every token of a length.
        """
        given, found = _digest(token), None
        for role, digest in self._digests.items():
            if hmac.compare_digest(given, digest):
                found = role
        return found if wanted in (None, found) else None

    def holds(self, role: Role, credential: bytes) -> bool:
        """Return whether a token whose digest was ``credential`` still is the role's."""
        return hmac.compare_digest(self._digests.get(role, b""), credential)

    def credential(self, role: Role) -> bytes:
        """Return the digest of a role's token, for :meth:`holds`."""
        return self._digests[role]


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(b"tierkv-token:" + token).digest()


class Failures:
    """Counts wrong tokens and logs them, seldom, and never the token."""

    def __init__(self) -> None:
        self.num = 0
        self._num_logged = 0
        self._logged_at = float("-inf")
        self._lock = threading.Lock()

    def note(self, peer: str) -> None:
        """Note a wrong token from ``peer``."""
        with self._lock:
            self.num += 1
            now = time.monotonic()
            if now - self._logged_at < _LOG_INTERVAL_S:
                return
            num, self._num_logged, self._logged_at = self.num - self._num_logged, self.num, now
        logger.warning("%d wrong token%s since the last such line, the last from %s", num, "s"[num == 1 :], peer)


# -- TLS


def tls_context(config: ListenConfig) -> ssl.SSLContext | None:
    """Return the server's TLS as ``config`` says; None where it names no certificate.

    Raises:
        ConfigError: one of the files is not usable.
    """
    if config.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, password=lambda: "")  # no question on a terminal
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"tls_cert={str(config.tls_cert)!r} and tls_key={str(config.tls_key)!r} are no certificate and its key "
            f"({_reason(error)}); set two PEM files that fit, the key without a password"
        ) from None
    if config.tls_client_ca is not None:
        try:
            context.load_verify_locations(config.tls_client_ca)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"tls_client_ca={str(config.tls_client_ca)!r} holds no certificates ({_reason(error)}); set a PEM file"
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)


class Access:
    """Tokens and TLS as they are now, for everybody who asks.

    Attributes:
        tokens, tls: are replaced whole by :meth:`load`.
        failures: wrong tokens.

    Args:
        config: where they are.

    Raises:
        ConfigError: a file is not usable.
    """

    def __init__(self, config: ListenConfig) -> None:
        self.failures = Failures()
        self.load(config)

    def load(self, config: ListenConfig) -> None:
        """Read tokens and certificates (again). What was there stays where one is not usable.

        Raises:
            ConfigError: a file is not usable.
        """
        self.tokens, self.tls = Tokens.load(config), tls_context(config)
