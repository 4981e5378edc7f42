"""``tierkv serve``: a store server in the foreground."""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tierkv.errors import ConfigError, RefusedError

if TYPE_CHECKING:
    from tierkv.server_config import ServerConfig


_EXAMPLES = """\b
Examples:
  tierkv serve --disk-dir /var/cache/tierkv --disk-bytes 200GiB
  TIERKV_SHARED_URL=redis://cache:6379/0 tierkv serve --config /etc/tierkv.toml"""


@click.command("serve", epilog=_EXAMPLES)
@click.option("--config", "file", metavar="FILE", help="TOML file; the options below go before what it says.")
@click.option("--disk-dir", metavar="DIR", help="Directory of the disk tier [default: tierkv in your cache folder].")
@click.option("--disk-bytes", metavar="SIZE", help="Budget of the disk tier, such as 100GiB [default: 20GiB].")
@click.option(
    "--shared-url",
    metavar="URL",
    envvar="TIERKV_SHARED_URL",
    help="Redis or Valkey that the fleet shares; in TIERKV_SHARED_URL no password shows in the process list.",
)
@click.option("--socket", metavar="PATH", help="Unix socket to listen on [default: tierkv.sock in the directory].")
@click.option("--http", metavar="HOST:PORT", help="Address of the admin HTTP server [default: none].")
@click.option(
    "--set",
    "settings",
    metavar="NAME=VALUE",
    multiple=True,
    help="Set any field of the file, such as disk.ttl=7d or listen.tcp=127.0.0.1:6390; repeatable.",
)
def command(
    file: str | None,
    disk_dir: str | None,
    disk_bytes: str | None,
    shared_url: str | None,
    socket: str | None,
    http: str | None,
    settings: tuple[str, ...],
) -> int:
    """Run a store server in the foreground, until SIGTERM or Ctrl-C. SIGHUP reads the file again.

    Engines join it with "server": "unix:///PATH" in kv_connector_extra_config, or by using the same disk_dir.
    """
    from tierkv.toml_config import load, merge
    from tierkv_server.reload import Reloader
    from tierkv_server.server import DirectoryInUseError, Server
    from tierkv_server.signals import run_until_signal
    from tierkv_server.systemd import passed_socket, path_of

    path = Path(file) if file else None
    options: dict[str, Any] = {}
    for setting in settings:
        options = merge(options, _setting(setting))
    options = merge(options, _named(disk_dir, disk_bytes, shared_url, socket, http))
    listener = passed_socket()
    if listener is not None:
        options = merge(options, {"listen": {"socket": str(path_of(listener))}})

    def read() -> ServerConfig:
        return load(path, options)

    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the server listens to it
    config = read()
    _log_to_stderr(config.log_level)
    try:
        server = Server(config, listener=listener)
    except DirectoryInUseError as error:
        raise RefusedError(str(error)) from None
    run_until_signal(server, Reloader(server, read if path else None))
    return 0


def _named(
    disk_dir: str | None, disk_bytes: str | None, shared_url: str | None, socket: str | None, http: str | None
) -> dict[str, Any]:
    """Return the tables that the options with a name of their own describe.

    Raises:
        ConfigError: a value is not possible; the sentence names the option.
    """
    from tierkv.config import DEFAULT_DISK_BYTES, check_shared_url, parse_bytes, parse_directory

    if socket and socket.startswith("unix://") and not socket.startswith("unix:///"):
        raise ConfigError(f"socket={socket!r} is no path; write unix:///path/to/tierkv.sock, or the path alone")
    socket = socket.removeprefix("unix://") if socket else socket
    tables: dict[str, Any] = {}
    if disk_dir is not None:
        tables["disk"] = {"dir": str(parse_directory({"disk_dir": _absolute(disk_dir)}, "disk_dir"))}
    if disk_bytes is not None:
        nbytes = parse_bytes({"disk_bytes": disk_bytes}, "disk_bytes", DEFAULT_DISK_BYTES)
        tables.setdefault("disk", {})["bytes"] = nbytes
    if shared_url:
        tables["shared"] = {"url": check_shared_url(shared_url)}
    if socket is not None:
        tables["listen"] = {"socket": str(parse_directory({"socket": _absolute(socket)}, "socket"))}
    if http is not None:
        tables["http"] = {"listen": http}
    return tables


def _setting(text: str) -> dict[str, Any]:
    """Return the table that ``part.field=value`` describes. The value is TOML, or text that needs no quotes.

    Raises:
        ConfigError: it has another form.
    """
    from tierkv.toml_config import parse_toml

    name, equals, value = text.partition("=")
    if not equals or not name.replace(".", "").replace("_", "").isalnum():
        raise ConfigError(f"--set {name!r} is not NAME=VALUE; write it as in --set disk.bytes=100GiB")
    try:
        return parse_toml(f"{name} = {value}".encode(), "--set")
    except ConfigError:
        table: Any = value
        for key in reversed(name.split(".")):
            table = {key: table}
        assert isinstance(table, dict)
        return table


def _absolute(path: str) -> str:
    """Return ``path`` seen from here: what a relative one means is clear on a command line."""
    return str(Path(path).expanduser().absolute()) if path else path


def _log_to_stderr(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("tierkv")
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
