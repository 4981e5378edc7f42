"""The sockets that the server listens on: unix, and TCP where it is configured."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from tierkv.config_checks import check
from tierkv.errors import ConfigError
from tierkv.server_config import ServerConfig
from tierkv.toml_config import BadConfigError, parse_address
from tierkv.unix import short_path

_BACKLOG = 128


def listen(path: Path, mode: int = 0o600) -> socket.socket:
    """Return a unix socket that listens on ``path``. The caller has the directory's lock.

    A path longer than the kernel takes (107 bytes) is reached through the descriptor of its directory.

    Raises:
        ConfigError: the path is not usable, or something that is no socket stands there.
    """
    try:
        if not path.parent.is_dir():
            raise ConfigError(
                f"socket={str(path)!r}: there is no directory {path.parent}; make it, or set another path"
            )
        if path.is_socket():
            _check_stale(path)
            path.unlink()
        elif path.exists():
            raise ConfigError(f"socket={str(path)!r} is something that is no socket; remove it or set another path")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with short_path(path) as name:
                old = os.umask(0o777 & ~mode)
                try:
                    listener.bind(name)
                finally:
                    os.umask(old)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(f"socket={str(path)!r} cannot be used: {error.strerror or error}; set another path") from None
    return listener


def _check_stale(path: Path) -> None:
    """Refuse to take a socket on which somebody answers."""
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with probe, short_path(path) as name:
        try:
            probe.connect(name)
        except OSError:
            return
    raise ConfigError(f"socket={str(path)!r} belongs to a server that is running; set another path")


def check_tcp(config: ServerConfig) -> None:
    """Check that TCP, where it is configured, is protected: by TLS and tokens, or by being the loopback's.

    Raises:
        ConfigError: it is not, or a file for that is not usable.
    """
    if config.listen.tcp is None:
        return
    mistakes = [m for m in check(config) if any(field.startswith("listen.") for field in m.fields)]
    if mistakes:
        raise BadConfigError("the configuration", mistakes)


def listen_tcp(config: ServerConfig) -> list[socket.socket]:
    """Return sockets that listen on every address of ``listen.tcp``; none where there is no TCP.

    Raises:
        ConfigError: TCP is not protected as it has to be, or the address is not usable.
    """
    tcp = config.listen.tcp
    if tcp is None:
        return []
    check_tcp(config)
    host, port = parse_address(tcp)
    listeners: list[socket.socket] = []
    with contextlib.ExitStack() as undo:
        try:
            found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, address in dict.fromkeys((info[0], info[4]) for info in found):
                listener = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind(address)
                listener.listen(_BACKLOG)
                listeners.append(listener)
        except OSError as error:
            raise ConfigError(f"tcp={tcp!r} cannot be used: {error.strerror or error}; set another address") from None
        undo.pop_all()
    return listeners
