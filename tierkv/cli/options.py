"""Options that several verbs share, and what they mean."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from tierkv.client import AdminClient
from tierkv.config import default_disk_dir, socket_path
from tierkv.errors import ConfigError
from tierkv.layout import Namespace

F = TypeVar("F", bound=Callable[..., Any])

TIERS = ("host", "disk", "shared")
_HEX = re.compile(r"[0-9a-f]+")


def server_option(function: F) -> F:
    """Add ``--server``: the socket of the server to ask."""
    return click.option(
        "--server",
        metavar="SOCKET",
        envvar="TIERKV_SERVER",
        help="Path or unix:///path of the server's socket [TIERKV_SERVER; default: your own server's].",
    )(function)


def json_option(function: F) -> F:
    """Add ``--json``: one JSON object instead of a table."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")(function)


def namespace_option(function: F) -> F:
    """Add ``--namespace``: the start of a namespace's id."""
    return click.option(
        "--namespace", "namespace", metavar="ID", help="Only this namespace: its id, or the start of it."
    )(function)


def tier_option(function: F) -> F:
    """Add ``--tier``, repeatable."""
    return click.option(
        "--tier", "tiers", multiple=True, type=click.Choice(TIERS), help="Only this tier; repeatable [default: all]."
    )(function)


def prompt_options(function: F) -> F:
    """Add the options that give a prompt: ``--tokens``, ``--tokens-file``, ``--salt``, ``--salt-file``."""
    for option in (
        click.option("--salt-file", metavar="FILE", help="Read the salt from FILE (without its last newline)."),
        click.option("--salt", metavar="TEXT", help="The cache_salt that the prompt's tenant sends."),
        click.option("--tokens-file", metavar="FILE", help="Read the token ids from FILE, or - for standard input."),
        click.option("--tokens", metavar="IDS", help="The prompt's token ids: '1 2 3', '1,2,3' or a JSON list."),
    ):
        function = option(function)
    return function


def connect(server: str | None) -> AdminClient:
    """Return a client of the server that ``--server`` names.

    Raises:
        ConfigError: the name is of another form.
        UnavailableError: nobody answers there.
    """
    return AdminClient(server_path(server))


def server_path(server: str | None) -> Path:
    """Return the socket that ``--server`` names: by default that of the server of the default directory."""
    if server is None:
        return socket_path(default_disk_dir())
    scheme, separator, path = server.partition("://")
    if not separator:
        path = server
    if (separator and scheme != "unix") or not path:
        raise ConfigError(f"server={server!r} is not a socket; write a path or unix:///path/to/tierkv.sock")
    return Path(path).expanduser().absolute()


def hex_start(value: str, what: str) -> str:
    """Return ``value``, the start of an id, in lower case.

    Raises:
        ConfigError: it is not hexadecimal digits.
    """
    digits = value.strip().lower()
    if not _HEX.fullmatch(digits):
        raise ConfigError(f"{what} {value!r} is not hexadecimal digits; copy it from 'tierkv ls' or 'tierkv stat'")
    return digits


def namespace_start(value: str | None) -> str:
    """Return the start of a namespace's id that ``--namespace`` gives; empty for none."""
    return "" if value is None else hex_start(value, "namespace")


def namespaces(client: AdminClient, start: str) -> dict[str, Namespace]:
    """Return the namespaces whose hex id starts with ``start``, by id."""
    import msgspec

    found = msgspec.convert(client.ask("TKV.NS"), dict[str, Namespace])
    return {ns: namespace for ns, namespace in found.items() if ns.startswith(start)}


def print_json(value: object) -> None:
    """Print ``value`` as one line of JSON."""
    click.echo(json.dumps(value))
