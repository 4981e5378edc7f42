"""The client of tools: one command at a time. Imports little, so that a command line starts at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tierkv.errors import UnavailableError
from tierkv.transport import Address, call, connect

#: A tool's server has to show in this time that it is alive; a listing may take longer.
ALIVE_TIMEOUT_S = 3.0
ADMIN_TIMEOUT_S = 60.0


class AdminClient:
    """A plain client for tools: one command at a time.

    Args:
        address: where the server is; a path is that of its unix socket.
        timeout_s: how long a reply may take.

    Raises:
        UnavailableError: nobody answers there.
        RefusedError: the token or the certificate is not taken.
    """

    def __init__(self, address: Address | Path, timeout_s: float = ADMIN_TIMEOUT_S) -> None:
        self._address = address if isinstance(address, Address) else Address(path=address)
        try:
            self._sock = connect(self._address, ALIVE_TIMEOUT_S)
        except OSError as error:
            raise UnavailableError(
                f"no store server answers at {self._address} ({error.strerror or error}); start one with "
                f"'tierkv serve', or name its socket with --server"
            ) from None
        try:
            self.call("PING")  # a server that is stopped takes connections too
            self._sock.settimeout(timeout_s)
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
            return call(self._sock, words)
        except OSError as error:
            raise UnavailableError(
                f"the store server at {self._address} does not answer ({error.strerror or error}); it may be stopped "
                f"or hang: look at its process, or name another socket with --server"
            ) from None

    def ask(self, command: str, body: Any = None) -> Any:
        """Send a command with a JSON body and return its JSON reply, decoded."""
        words = [command] if body is None else [command, msgspec.json.encode(body)]
        return msgspec.json.decode(self.call(*words))

    def close(self) -> None:
        self._sock.close()

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
