"""What a service manager and the server say to each other: a socket that is passed, and how the server is.

The protocols are systemd's (sd_listen_fds(3), sd_notify(3)); they need no library.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from tierkv.errors import ConfigError

_FIRST_FD = 3


def passed_socket() -> socket.socket | None:
    """Return the unix socket that the service manager listens on for this process, or None. The caller owns it.

    Raises:
        ConfigError: another kind or number of sockets is passed.
    """
    pid, num = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    os.environ.pop("LISTEN_FDNAMES", None)  # none of these is for our children
    if pid != str(os.getpid()) or not num.isdigit() or num == "0":
        return None
    if num != "1":
        raise ConfigError(f"{num} sockets were passed to the server; let the socket unit have one ListenStream")
    os.set_inheritable(_FIRST_FD, False)
    try:
        passed = socket.socket(fileno=_FIRST_FD)
        listens = passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ConfigError(f"what was passed to the server is no socket ({error.strerror})") from None
    if passed.family != socket.AF_UNIX or passed.type != socket.SOCK_STREAM or not listens:
        passed.close()
        raise ConfigError("the socket that was passed is no unix stream socket; write ListenStream=/path/of/the.sock")
    passed.setblocking(True)
    return passed


def path_of(listener: socket.socket) -> Path:
    """Return the path that a unix socket has."""
    name = listener.getsockname()
    return Path(os.fsdecode(name)) if isinstance(name, bytes) else Path(name)


def notify(*lines: str) -> None:
    """Tell the service manager how the server is, where one wants to know (``READY=1``, ``STATUS=...``)."""
    name = os.environ.get("NOTIFY_SOCKET", "")
    if not name.startswith(("/", "@")):
        return
    address = "\0" + name[1:] if name.startswith("@") else name
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as link:
        link.connect(address)
        link.send("\n".join(line.replace("\n", " ") for line in lines).encode())
