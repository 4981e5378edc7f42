"""Whether a directory may hold a database: it can be written, and its filesystem is a local one."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from tierkv.errors import ConfigError

#: Where LMDB's shared memory map or its locks do not work.
_NETWORK_FILESYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "gpfs", "lustre", "orangefs", "beegfs"}
    | {"coda", "gfs2", "ocfs2", "fuse"}
)
_LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs", "fuse.mergerfs", "fuse.zfs"})


def check_directory(path: Path, mounts: Path = Path("/proc/self/mounts")) -> None:
    """Create the tier's directory and see that it can be used.

    Args:
        path: the directory (option ``disk_dir``).
        mounts: the kernel's table of mounts.

    Raises:
        ConfigError: it cannot be created or written, or is on a network filesystem.
    """
    try:
        (path / "ns").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path / "ns") as file:
            file.write(b"tierkv")
    except OSError as error:
        raise ConfigError(
            f"disk_dir={path} cannot be created or written ({error.strerror or error}); "
            "set it to a directory on a local disk that this user may write"
        ) from None
    filesystem = filesystem_type(path, mounts)
    network = filesystem in _NETWORK_FILESYSTEMS or filesystem.startswith("fuse.")
    if network and filesystem not in _LOCAL_FUSE:
        raise ConfigError(
            f"disk_dir={path} is on a network filesystem ({filesystem}), where LMDB is not safe; "
            "set it to a directory on a local disk"
        )


def filesystem_type(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Return the type of the filesystem that ``path`` is on, or an empty string where that cannot be told."""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    target, best, found = path.resolve(), -1, ""
    for line in lines:
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[1]))
        depth = len(point.parts)
        if target.is_relative_to(point) and depth >= best:  # a later mount covers an earlier one
            best, found = depth, fields[2]
    return found
