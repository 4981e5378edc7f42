"""Launching a store server for an engine: detached, and elected by the lock of its directory."""

from __future__ import annotations

import logging
import subprocess
import sys

import msgspec

from tierkv.config import ServerConfig
from tierkv.errors import ConfigError

logger = logging.getLogger("tierkv")

_EXIT_BAD_CONFIG = 2


class Launcher:
    """Starts the server of one configuration, at most one process at a time.

    The server has a session of its own, no descriptor of the engine's, and outlives the engine by its linger. Where
    several engines launch at a time, the directory's lock elects one server and the others leave.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        """Start the server unless the one started before is still there. Returns at once.

        Raises:
            ConfigError: the server started before said why it cannot run.
        """
        if self.running():
            return
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tierkv_server"],  # -P: no module of the engine's working directory
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            close_fds=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(self.config, enc_hook=str))
        self._process.stdin.close()

    def running(self) -> bool:
        """Return whether the process started last is there; reaps it if not.

        Raises:
            ConfigError: it left because its configuration is not possible.
        """
        process = self._process
        if process is None:
            return False
        status = process.poll()
        if status is None:
            return True
        self._process = None
        assert process.stderr is not None
        reason = process.stderr.read().decode("utf-8", "replace").strip()
        process.stderr.close()
        if status == _EXIT_BAD_CONFIG and reason:
            raise ConfigError(reason.splitlines()[-1])
        if status not in (0, 3):
            last = reason.splitlines()[-1] if reason else "no reason given"
            logger.warning("the store server left with status %d: %s", status, last)
        return False
