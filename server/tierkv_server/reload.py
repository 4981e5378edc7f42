"""Reloading: the configuration file is read again while the server runs.

What may change is applied, what may not keeps its value and is named; a file with a mistake changes nothing. Which
fields may change stands at each of them (:class:`tierkv.server_config.About`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from tierkv.config_checks import check
from tierkv.errors import ConfigError, RefusedError
from tierkv.server_config import PARTS, ServerConfig, show
from tierkv.toml_config import BadConfigError

logger = logging.getLogger("tierkv")


class Reconfigurable(Protocol):
    """What is reloaded: a server."""

    config: ServerConfig

    def reconfigure(self, config: ServerConfig) -> None:
        """Go on with ``config``, which differs in nothing that needs a restart. Tokens and certificates are read again.

        Raises:
            ConfigError: it cannot; what was there stays.
        """


class Reloader:
    """Reads a server's configuration again. Thread-safe.

    Args:
        server: what is reloaded.
        read: returns the configuration as it is written now, checked; None where it was not in a file.
    """

    def __init__(self, server: Reconfigurable, read: Callable[[], ServerConfig] | None = None) -> None:
        self.server = server
        self.can = read is not None
        self._read = read
        self._lock = threading.Lock()

    def reload(self) -> list[str]:
        """Read the file again and apply what may change; log and return a sentence for each thing that differs.

        Raises:
            RefusedError: there is no file.
            ConfigError: the file has mistakes, or cannot be followed without a restart; nothing has changed.
        """
        if self._read is None:
            raise RefusedError(
                "this server was started without a configuration file, so there is nothing to read again"
            )
        with self._lock:
            wanted = self._read()
            old = self.server.config
            new = restrict(old, wanted)
            if mistakes := check(new, files=False):  # such as TLS that would go while the open address stays
                raise BadConfigError("the file without what needs a restart", mistakes)
            changed, kept = differences(old, new), differences(new, wanted)
            self.server.reconfigure(new)
        said = [f"changed {line}" for line in changed]
        if kept:
            said.append("kept until the next start: " + ", ".join(kept))
        for line in said or ["nothing differs; tokens and certificates were read again"]:
            logger.info("configuration read again: %s", line)
        return said

    def try_reload(self) -> None:
        """Do as :meth:`reload` does; what stands against it is a line in the log."""
        try:
            self.reload()
        except (ConfigError, RefusedError) as error:
            logger.error("the configuration was not read again, and nothing has changed: %s", error)


def restrict(old: ServerConfig, wanted: ServerConfig) -> ServerConfig:
    """Return ``wanted`` with the values of ``old`` in the fields that a running server cannot change."""
    top = {f.name: getattr(wanted, f.name) for f in ServerConfig.fields() if f.about.reload}
    parts: dict[str, Any] = {}
    for part, kind in PARTS.items():
        have, want = getattr(old, part), getattr(wanted, part)
        if have is not None and want is not None:
            values = {f.name: getattr(want, f.name) for f in kind.fields() if f.about.reload}
            parts[part] = msgspec.structs.replace(have, **values)
    return msgspec.structs.replace(old, **top, **parts)


def differences(old: ServerConfig, new: ServerConfig) -> list[str]:
    """Return what differs, as ``disk.bytes from 20 GiB to 30 GiB``, without secrets."""
    before = {f"{part}{field.file_name}": (field, value) for part, field, value in old.values()}
    after = {f"{part}{field.file_name}": (field, value) for part, field, value in new.values()}
    lines = []
    for name in before | after:
        (field, was), (_, now) = before.get(name, after.get(name)), after.get(name, before.get(name))  # type: ignore[misc]
        if name not in after or name not in before:
            lines.append(f"{name} {'added' if name in after else 'removed'}")
        elif was != now:
            lines.append(f"{name} from {show(field, was)} to {show(field, now)}")
    return lines
