"""``python -m tierkv_server``: a store server that an engine launches for itself.

The configuration comes on standard input as JSON, so that no secret stands in the process list. The log goes to
``server.log`` in the disk directory. Exit status 3: another server owns the directory (its engines may join that one).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from pathlib import Path

import msgspec

from tierkv.errors import ConfigError
from tierkv.launcher import REFUSAL
from tierkv.server_config import ServerConfig

EXIT_OK, EXIT_BAD_CONFIG, EXIT_IN_USE = 0, 2, 3


def main() -> int:
    """Read the configuration, detach from the engine, serve."""
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=ServerConfig, dec_hook=_decode)
    _detach()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until somebody listens to it
    from tierkv_server.reload import Reloader
    from tierkv_server.server import DirectoryInUseError, Server
    from tierkv_server.signals import run_until_signal

    try:
        # Only the owner writes to the directory, its log included.
        server = Server(config, on_owned=lambda: log_to(config.disk_dir / "server.log"))
        _silence()
        run_until_signal(server, Reloader(server))
    except DirectoryInUseError:
        return EXIT_IN_USE
    except ConfigError as error:
        sys.stderr.write(f"{REFUSAL}{error}\n")
        return EXIT_BAD_CONFIG
    return EXIT_OK


def log_to(path: Path) -> None:
    """Log to ``path``; the log of the run before is kept as ``path.1``."""
    with contextlib.suppress(OSError):
        if path.exists():
            path.replace(path.with_name(path.name + ".1"))
        handler = logging.FileHandler(path)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger = logging.getLogger("tierkv")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def _detach() -> None:
    """Keep nothing of the engine: session, working directory, CPU affinity."""
    os.chdir("/")
    with contextlib.suppress(OSError):
        os.setsid()
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def _silence() -> None:
    """Let go of the pipe on which the engine waited for a reason not to start."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)


def _decode(kind: type, value: object) -> object:
    if kind is Path:
        return Path(str(value))
    raise TypeError(f"a configuration has no {kind.__name__}")


if __name__ == "__main__":
    sys.exit(main())
