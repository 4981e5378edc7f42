"""The client of tools: one command at a time. Imports little, so that a command line starts at once."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import time
from pathlib import Path
from typing import Any

import msgspec

from tierkv.errors import NotAdmittedError, RefusedError, UnavailableError
from tierkv.resp import encode_command
from tierkv.transport import Address, call, connect, read_reply

#: A tool's server has to show in this time that it is alive; a listing may take longer.
ALIVE_TIMEOUT_S = 3.0
ADMIN_TIMEOUT_S = 60.0
#: A server that has not answered for this long is asked on another connection whether it is alive.
PROBE_EVERY_S = 4.0
#: Bytes of a command that is sent, or of a reply that has begun to come, may pause for so long.
_PAUSE_S = 10.0


class AdminClient:
    """A plain client for tools: one command at a time.

    A server that is stopped is noticed in a few seconds, also in the middle of a command; one that works on its answer
    has ``timeout_s``.

    Args:
        address: where the server is; a path is that of its unix socket.
        timeout_s: how long a reply may take.

    Raises:
        UnavailableError: nobody answers there.
        RefusedError: the token or the certificate is not taken.
    """

    def __init__(self, address: Address | Path, timeout_s: float = ADMIN_TIMEOUT_S) -> None:
        self._address = address if isinstance(address, Address) else Address(path=address)
        self._timeout_s = timeout_s
        try:
            self._sock = connect(self._address, min(ALIVE_TIMEOUT_S, timeout_s))
        except OSError as error:
            raise UnavailableError(
                _other_scheme(self._address)
                or f"no store server answers at {self._address} ({error.strerror or error}); start one with "
                f"'tierkv serve', or name its socket with --server"
            ) from None
        try:
            self._ask(b"PING")  # a server that is stopped takes connections too
            self._sock.settimeout(_PAUSE_S)
        except BaseException:
            self._sock.close()
            raise

    def call(self, *words: bytes | str | int) -> bytes:
        """Send a command and return its reply.

        Raises:
            RefusedError: the server's reply is an error.
            UnavailableError: the server went away or does not answer.
        """
        try:
            self._sock.sendall(encode_command(words))
            self._await()
            return read_reply(self._sock)
        except OSError as error:
            raise self._silent(error) from None

    def ask(self, command: str, body: Any = None) -> Any:
        """Send a command with a JSON body and return its JSON reply, decoded."""
        words = [command] if body is None else [command, msgspec.json.encode(body)]
        return msgspec.json.decode(self.call(*words))

    def close(self) -> None:
        self._sock.close()

    def _ask(self, word: bytes) -> None:
        """Send a word that a live server answers at once."""
        try:
            call(self._sock, [word])
        except NotAdmittedError:
            where = f"the store server at {self._address}"
            raise NotAdmittedError(f"{where} asks for a token; name the file with yours by --token-file") from None
        except (OSError, UnavailableError) as error:
            said = _other_scheme(self._address) if not isinstance(error, TimeoutError) else ""
            raise (UnavailableError(said) if said else self._silent(error)) from None

    def _await(self) -> None:
        """Wait until a reply begins.

        Raises:
            TimeoutError: it does not in time, or the server does nothing at all.
        """
        deadline = time.monotonic() + self._timeout_s
        while not self._readable(min(PROBE_EVERY_S, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"timed out after {self._timeout_s:g} s")
            with contextlib.suppress(RefusedError), connect(self._address, ALIVE_TIMEOUT_S) as probe:
                call(probe, [b"PING"])

    def _readable(self, timeout_s: float) -> bool:
        if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            return True
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(1e3 * max(0.0, timeout_s)))

    def _silent(self, error: OSError | UnavailableError) -> UnavailableError:
        if isinstance(error, UnavailableError):
            return error
        return UnavailableError(
            f"the store server at {self._address} does not answer ({error.strerror or error}); it may be stopped "
            f"or hang: look at its process, or name another socket with --server"
        )

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _other_scheme(address: Address) -> str:
    """Return what is wrong if somebody at a TCP address speaks TLS and was not asked to, or does not; else nothing."""
    if address.path is not None:
        return ""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # who it is does not matter: nothing is sent
    speaks_tls = False
    try:
        with socket.create_connection((address.host, address.port), ALIVE_TIMEOUT_S) as sock:
            context.wrap_socket(sock).close()
            speaks_tls = True
    except ssl.SSLError as error:
        speaks_tls = error.reason not in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")
        if not speaks_tls and address.tls:
            return (
                f"what answers at {address} does not speak TLS; check the port, or write tkv://host:port for a server "
                f"of this machine that has none"
            )
    except OSError:
        return ""
    if speaks_tls and not address.tls:
        secure = str(address).replace("tkv://", "tkvs://", 1)
        return f"what answers at {address} speaks TLS; write {secure}, with --token-file and perhaps --ca-file"
    return ""
