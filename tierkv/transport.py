"""How a client reaches a store server: a unix socket, TCP, or TCP with TLS, and the token that it shows there."""

from __future__ import annotations

import contextlib
import socket
import ssl
import stat
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tierkv.errors import (
    BusyError,
    ConfigError,
    DamagedError,
    NotAdmittedError,
    NotFoundError,
    RefusedError,
    UnavailableError,
)
from tierkv.resp import Error, Parser, encode_command
from tierkv.unix import short_path

FORMS = "unix:///path/to/tierkv.sock, tkvs://host:port (TLS), or tkv://127.0.0.1:port (no TLS, this machine only)"
_LOOPBACK = ("localhost", "::1")
_RECV_NBYTES = 1 << 18
_ERRORS = {
    "BUSY": BusyError,
    "NOTFOUND": NotFoundError,
    "DAMAGED": DamagedError,
    "NOAUTH": NotAdmittedError,
    "WRONGPASS": NotAdmittedError,
    "NOPERM": NotAdmittedError,
}
#: A peer that does not acknowledge for this long is gone: seconds idle, between probes, and number of probes.
KEEPALIVE = (30, 10, 3)


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where a store server listens, and what a client shows there.

    Attributes:
        path: its unix socket; None for TCP.
        host, port, tls: of TCP.
        token_file: the token; read at each connection, so that a new one needs no restart.
        ca_file: who signed the server's certificate; None: an authority that this machine trusts.
        cert_file, key_file: the client's certificate, where the server asks for one.
    """

    path: Path | None = None
    host: str = ""
    port: int = 0
    tls: bool = False
    token_file: Path | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    @property
    def remote(self) -> bool:
        """Whether no memory can be shared over it."""
        return self.path is None

    def __str__(self) -> str:
        if self.path is not None:
            return str(self.path)
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tkvs' if self.tls else 'tkv'}://{host}:{self.port}"


def parse_address(
    server: str,
    *,
    token_file: Path | None = None,
    ca_file: Path | None = None,
    cert_file: Path | None = None,
    key_file: Path | None = None,
) -> Address:
    """Return the address that ``server`` and the files beside it describe.

    Raises:
        ConfigError: it has another form, or a file has no effect with it.
    """
    scheme, _, rest = server.partition("://")
    files = {"token_file": token_file, "ca_file": ca_file, "cert_file": cert_file, "key_file": key_file}
    if scheme == "unix" and rest.startswith("/") and len(rest) > 1:
        _check_files(server, files, ())
        return Address(path=Path(rest))
    if scheme not in ("tkv", "tkvs"):
        raise ConfigError(f"server={server!r} is not possible; write {FORMS}")
    host, port = _host_port(server, rest)
    if scheme == "tkv":
        if host not in _LOOPBACK and not host.startswith("127."):
            raise ConfigError(
                f"server={server!r} is without TLS, which is for this machine only (127.0.0.1); "
                f"write tkvs://{rest} for a server on another machine"
            )
        _check_files(server, files, ("token_file",))
        return Address(host=host, port=port, token_file=token_file)
    if token_file is None:
        raise ConfigError(
            f"server={server!r} needs a token; name the file that holds it (server_token_file, --token-file)"
        )
    if (cert_file is None) != (key_file is None):
        raise ConfigError(f"server={server!r} needs both a client certificate and its key, or neither")
    return Address(
        host=host, port=port, tls=True, token_file=token_file, ca_file=ca_file, cert_file=cert_file, key_file=key_file
    )


def _host_port(server: str, rest: str) -> tuple[str, int]:
    host, _, port = rest.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    good = bare and not set(bare) & set("/@?#[] ") and (bracketed or ":" not in bare)
    if not good or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"server={server!r} names no host and port; write {FORMS}")
    return bare, int(port)


def _check_files(server: str, files: dict[str, Path | None], useful: Sequence[str]) -> None:
    for name, path in files.items():
        if path is not None and name not in useful:
            raise ConfigError(
                f"the {name.replace('_', ' ')} {str(path)!r} has no effect with server={server!r}; leave it out"
            )


def load_token(path: Path, option: str) -> str:
    """Return the token in a file.

    Raises:
        ConfigError: it cannot be read, other users may read or write it, or it holds no token.
    """
    from tierkv.config_checks import read_token

    try:
        _check_mode(path, option)
        return read_token(path)
    except OSError as error:
        raise ConfigError(
            f"{option}={str(path)!r} cannot be read: {error.strerror}; name a file that this user can read"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None


def _check_mode(path: Path, option: str) -> None:
    """Check that a secret is one: others may neither read nor write it, and a group may not write it.

    Raises:
        ConfigError: they may.
        OSError: there is no such file.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ConfigError(
            f"{option}={str(path)!r} holds a secret that every user may read or change (mode {mode:04o}); "
            f"run chmod o-rw on it"
        )
    if mode & stat.S_IWGRP:
        raise ConfigError(
            f"{option}={str(path)!r} holds a secret that its group may change (mode {mode:04o}); run chmod g-w on it"
        )


def connect(address: Address, timeout_s: float, context: ssl.SSLContext | None = None) -> socket.socket:
    """Return a connection to a store server, authenticated where the address has a token.

    Args:
        timeout_s: for connecting, for the handshake, and for each later operation on the socket.
        context: of :func:`tls_context`, where there are several connections to one server.

    Raises:
        OSError: nobody answers.
        UnavailableError: it hung up.
        NotAdmittedError: it does not take the token, or its certificate is not trusted.
        ConfigError: a file that the address names is not usable.
    """
    if address.path is not None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            with short_path(address.path) as name:
                sock.connect(name)
        except BaseException:
            sock.close()
            raise
        return sock
    sock = socket.create_connection((address.host, address.port), timeout_s)
    try:
        tune_tcp(sock)
        if address.tls:
            sock = _wrap(sock, address, context or tls_context(address))
        if address.token_file is not None:
            _authenticate(sock, address, load_token(address.token_file, "token file"))
    except BaseException:
        sock.close()
        raise
    return sock


def tune_tcp(sock: socket.socket) -> None:
    """Send at once, and find out when the other side is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in zip((socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT), KEEPALIVE, strict=True):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def recv_records(sock: socket.socket, view: memoryview) -> int:
    """Receive into ``view`` what is there and return how many bytes; 0 at the end.

    Of TLS as many records as are there: one at a time has at most 16 KiB. The socket does not block.

    Raises:
        OSError: nothing is there (``ssl.SSLWantReadError``, ``BlockingIOError``), or the connection is of no use.
    """
    nbytes = sock.recv_into(view)
    if nbytes and isinstance(sock, ssl.SSLSocket):
        with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
            while nbytes < len(view) and (more := sock.recv_into(view[nbytes:])):
                nbytes += more
    return nbytes


def tls_context(address: Address) -> ssl.SSLContext:
    """Return what TLS needs for an address.

    Raises:
        ConfigError: a file that the address names is not usable.
    """
    try:
        context = ssl.create_default_context(cafile=address.ca_file)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"server_ca_file (--ca-file) {str(address.ca_file)!r} is not usable ({_reason(error)}); name a PEM file of "
            f"certificates that this user can read"
        ) from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if address.cert_file is not None:
        assert address.key_file is not None, "an address has both or neither"
        try:
            _check_mode(address.key_file, "key file")
            context.load_cert_chain(address.cert_file, address.key_file, password=lambda: "")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cert file={str(address.cert_file)!r} and key file={str(address.key_file)!r} are no "
                f"certificate and its key ({_reason(error)})"
            ) from None
    return context


def _wrap(sock: socket.socket, address: Address, context: ssl.SSLContext) -> ssl.SSLSocket:
    try:
        return context.wrap_socket(sock, server_hostname=address.host)
    except ssl.SSLCertVerificationError as error:
        raise NotAdmittedError(
            f"the certificate of the store server at {address} is not trusted ({error.verify_message.rstrip('.')}); "
            f"name the authority that signed it (server_ca_file, or --ca-file), and the host that stands in it"
        ) from None


def _authenticate(sock: socket.socket, address: Address, token: str) -> None:
    try:
        call(sock, [b"AUTH", token])
    except RefusedError as error:
        raise NotAdmittedError(
            f"the store server at {address} does not take the token in {address.token_file} ({error})"
        ) from None


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)


def read_reply(sock: socket.socket) -> bytes:
    """Read one reply from a blocking socket.

    Raises:
        RefusedError: the reply is an error (a more special one where its first word says so).
        UnavailableError: the connection ended.
        OSError: nothing came in time.
    """
    parser = Parser()
    while True:
        data = sock.recv(_RECV_NBYTES)
        if not data:
            raise UnavailableError("the store server closed the connection")
        for value in parser.feed(data):
            if isinstance(value, Error):
                code, _, sentence = value.partition(" ")
                raise _ERRORS.get(code, RefusedError)(sentence)
            return value if isinstance(value, bytes) else str(value).encode()


def call(sock: socket.socket, words: Sequence[bytes | str | int]) -> bytes:
    """Send a command on a blocking socket and return its reply; raises what :func:`read_reply` does."""
    sock.sendall(encode_command(words))
    return read_reply(sock)
