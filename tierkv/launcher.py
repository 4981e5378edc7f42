"""Launching a store server for an engine: detached, and elected by the lock of its directory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import msgspec

from tierkv.errors import ConfigError
from tierkv.health import Repeated
from tierkv.server_config import ServerConfig

#: What the server writes before the sentence with which it refuses its configuration.
REFUSAL = "cannot start: "
#: A shell that starts the server in the background and ends: the server is nobody's child. An engine that ends kills
#: all of its descendants, whatever their session, and other engines may be using this server.
_ORPHAN = 'exec 3<&0; "$@" <&3 3<&- & exit 0'


class Launcher:
    """Starts the server of one configuration, at most one process at a time.

    The server has a session of its own, is no descendant of the engine, has no descriptor of the engine's but a pipe on
    which it says why it cannot start, and outlives the engine by its linger. Where several engines launch at a time,
    the directory's lock elects one server and the others leave.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self._pipe: int | None = None  # open while the server that was launched last is starting
        self._said = b""
        self._failures = Repeated()

    def launch(self) -> None:
        """Start the server unless the one started before is still starting. Returns at once.

        Raises:
            ConfigError: the server started before said why it cannot run.
            OSError: no process can be started now.
        """
        if self.starting():
            return
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            shell = subprocess.Popen(
                # -P: no module of the engine's working directory
                ["/bin/sh", "-c", _ORPHAN, "sh", sys.executable, "-P", "-m", "tierkv_server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=writer,
                start_new_session=True,
                close_fds=True,
            )
        except OSError:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        shell.communicate(msgspec.json.encode(self.config, enc_hook=str))
        os.set_blocking(reader, False)
        self._pipe, self._said = reader, b""

    def starting(self) -> bool:
        """Return whether the process launched last is neither serving nor gone.

        Raises:
            ConfigError: it left because its configuration is not possible.
        """
        if self._pipe is None:
            return False
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._pipe, 1 << 16):
                self._said += data
            os.close(self._pipe)
            self._pipe = None
            self._report()
            return False
        return True

    def _report(self) -> None:
        """Pass on what the server said before it let go of the pipe: nothing if it serves, or another does."""
        lines = self._said.decode("utf-8", "replace").strip().splitlines()
        if lines and lines[-1].startswith(REFUSAL):
            raise ConfigError(lines[-1].removeprefix(REFUSAL))
        if lines:
            self._failures.note("the store server could not start: %s", lines[-1])
