"""The store servers of this user that run on this machine, found without being told.

The kernel lists every unix socket that somebody listens on. Those called ``tierkv.sock`` whose file belongs to this
user are servers' default sockets; a server with another name for its socket is found only where it is named.
"""

from __future__ import annotations

import os
from pathlib import Path

from tierkv.config import default_disk_dir, socket_path
from tierkv.errors import ConfigError

#: Where the kernel lists its unix sockets: number, references, protocol, flags, type, state, inode, path.
TABLE = Path("/proc/net/unix")
_LISTENS = 0x10000  # __SO_ACCEPTCON
_MAX_LISTED = 8


def running_servers(table: Path | None = None) -> list[Path]:
    """Return the sockets of this user's servers, sorted."""
    try:
        lines = (table or TABLE).read_text(errors="surrogateescape").splitlines()[1:]
    except OSError:
        return []
    found = set()
    for line in lines:
        fields = line.split(maxsplit=7)
        if len(fields) < 8 or not int(fields[3], 16) & _LISTENS:
            continue
        path = Path(fields[7])
        if path.name == "tierkv.sock" and path.is_absolute() and _is_ours(path):
            found.add(path)
    return sorted(found)


def _is_ours(path: Path) -> bool:
    try:
        return path.is_socket() and path.stat().st_uid == os.geteuid()
    except OSError:
        return False


def find_server() -> Path:
    """Return the socket of the one server of this user that runs; where none does, the default one's.

    Raises:
        ConfigError: several run; the sentence lists them.
    """
    default = socket_path(default_disk_dir())
    found = running_servers()
    if len(found) > 1:
        listed = ", ".join(map(str, found[:_MAX_LISTED])) + (", ..." if len(found) > _MAX_LISTED else "")
        raise ConfigError(f"{len(found)} store servers of yours are running; name one with --server: {listed}")
    return found[0] if found else default
