"""Unix sockets under paths of any length."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_MAX_NBYTES = 100  # the kernel takes 107


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Yield a name for ``path`` that fits into a socket address: a long one goes through its directory's descriptor.

    Raises:
        OSError: the directory of a long path cannot be opened.
    """
    if len(os.fsencode(path)) < _MAX_NBYTES:
        yield str(path)
        return
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)
