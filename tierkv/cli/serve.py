"""``tierkv serve``: a store server in the foreground."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import click

from tierkv.errors import RefusedError
from tierkv.server_config import ServerConfig


@click.command("serve")
@click.option("--disk-dir", metavar="DIR", help="Directory of the disk tier [default: tierkv in your cache folder].")
@click.option("--disk-bytes", metavar="SIZE", help="Budget of the disk tier, such as 100GiB [default: 20GiB].")
@click.option(
    "--shared-url",
    metavar="URL",
    envvar="TIERKV_SHARED_URL",
    help="Redis or Valkey that the fleet shares; in TIERKV_SHARED_URL no password shows in the process list.",
)
@click.option("--socket", metavar="PATH", help="Unix socket to listen on [default: tierkv.sock in the directory].")
def command(disk_dir: str | None, disk_bytes: str | None, shared_url: str | None, socket: str | None) -> int:
    """Run a store server in the foreground, until SIGTERM or Ctrl-C.

    Engines join it with "server": "unix:///PATH" in kv_connector_extra_config, or by using the same disk_dir.
    """
    config = ServerConfig.parse(
        {
            "disk_dir": _absolute(disk_dir),
            "disk_bytes": disk_bytes,
            "shared_url": shared_url or None,
            "socket": _absolute(socket.removeprefix("unix://") if socket else socket),
        }
    )
    _log_to_stderr()
    from tierkv_server.server import DirectoryInUseError, Server, run_until_signal

    try:
        server = Server(config)
    except DirectoryInUseError as error:
        raise RefusedError(str(error)) from None
    run_until_signal(server)
    return 0


def _absolute(path: str | None) -> str | None:
    """Return ``path`` seen from here: what a relative one means is clear on a command line."""
    return str(Path(path).expanduser().absolute()) if path else path


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("tierkv")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
