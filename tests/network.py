"""Store servers that listen on TCP, and what it takes to talk to them."""

from __future__ import annotations

import secrets
import socket
import ssl
from pathlib import Path
from typing import Any

import msgspec

from servers import TlsFiles, free_port
from serving import make_config
from tierkv.resp import Parser, Value, encode_command
from tierkv.server_config import ServerConfig
from tierkv.transport import Address

ROLES = ("engine", "reader", "admin")


def make_tokens(directory: Path) -> dict[str, Path]:
    """Write a token for each role and return the files."""
    files = {}
    for role in ROLES:
        files[role] = directory / f"{role}-token"
        files[role].write_text(secrets.token_hex(16) + "\n")
        files[role].chmod(0o600)
    return files


def insecure_config(directory: Path, **listen: Any) -> ServerConfig:
    """A server on the loopback, without TLS; without tokens too, unless ``listen`` names them."""
    return with_listen(make_config(directory), tcp=f"127.0.0.1:{free_port()}", insecure=True, **listen)


def tls_config(directory: Path, files: TlsFiles, tokens: dict[str, Path], **listen: Any) -> ServerConfig:
    """A server on the loopback, with TLS and tokens."""
    named = {f"{role}_token_file": path for role, path in tokens.items()}
    options = {"tcp": f"127.0.0.1:{free_port()}", "tls_cert": files.cert, "tls_key": files.key} | named | listen
    return with_listen(make_config(directory), **options)


def with_listen(config: ServerConfig, **listen: Any) -> ServerConfig:
    """Return a configuration with other fields in its ``listen`` part."""
    return msgspec.structs.replace(config, listen=msgspec.structs.replace(config.listen, **listen))


def address_of(config: ServerConfig, token_file: Path | None = None, files: TlsFiles | None = None) -> Address:
    """Return where a client of ``config`` finds the server over TCP."""
    host, port = host_port(config)
    return Address(host=host, port=port, tls=files is not None, token_file=token_file, ca_file=files and files.ca)


def host_port(config: ServerConfig) -> tuple[str, int]:
    assert config.listen.tcp is not None, "this server does not listen on TCP"
    host, _, port = config.listen.tcp.rpartition(":")
    return host, int(port)


class Wire:
    """A connection with nothing between: bytes out, values in.

    Args:
        config: of the server.
        files: for TLS.
        unix: over the unix socket, not TCP.
    """

    def __init__(self, config: ServerConfig, files: TlsFiles | None = None, *, unix: bool = False) -> None:
        if unix:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.connect(str(config.socket))
        else:
            self.sock = socket.create_connection(host_port(config), 20)
        self.sock.settimeout(20)
        if files is not None:
            context = ssl.create_default_context(cafile=files.ca)
            self.sock = context.wrap_socket(self.sock, server_hostname="127.0.0.1")
        self._parser = Parser()
        self._values: list[Value] = []

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def reply(self) -> Value:
        """Return the next reply.

        Raises:
            EOFError: the server has closed the connection.
        """
        while not self._values:
            data = self.sock.recv(1 << 16)
            if not data:
                raise EOFError
            self._values += self._parser.feed(data)
        return self._values.pop(0)

    def call(self, *words: bytes | str | int) -> Value:
        self.send(encode_command(words))
        return self.reply()

    def ended(self) -> bool:
        """Return whether the server closes the connection, whatever it says before."""
        try:
            while True:
                self.reply()
        except (EOFError, ConnectionResetError):
            return True

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()
