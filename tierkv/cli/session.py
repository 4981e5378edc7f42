"""``tierkv session``: the sessions that requests' hints name."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from tierkv.cli import NothingMatchedError
from tierkv.cli.options import (
    hex_start,
    json_option,
    namespace_option,
    namespace_start,
    open_server,
    print_json,
    server_option,
)
from tierkv.errors import ConfigError, NotFoundError
from tierkv.sessions import SessionSelect, session_digest

_EXAMPLES = """\b
Examples:
  tierkv session ls --limit 20
  tierkv session release f41c2ba08e07
  tierkv session prefetch --name chat-4711 --salt alice"""


@click.group("session", epilog=_EXAMPLES)
def command() -> None:
    """Show and steer the sessions that requests name in their hints."""


@command.command("ls", short_help="List the sessions, last noted first.", epilog=_EXAMPLES)
@namespace_option
@click.option("--tenant", metavar="ID", help="Only this tenant's: its digest, or the start of it.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most N rows, last noted first.")
@json_option
@server_option
def ls(namespace: str | None, tenant: str | None, limit: int | None, as_json: bool, server: str | None) -> None:
    """List the sessions that engines told this server of since it started, last noted first."""
    select = SessionSelect(ns=namespace_start(namespace), tenant="" if tenant is None else hex_start(tenant, "tenant"))
    with open_server(server) as client:
        rows = client.ask("TKV.SESSIONS", select)
    if as_json:
        print_json({"sessions": rows[:limit]})
    elif rows:
        _print(rows[:limit], len(rows))
    if not rows:
        raise NothingMatchedError("no session fits; they appear once a request with a session hint has ended")


def _one(function: Callable[..., None]) -> Callable[..., None]:
    """Add what names one session."""
    for option in (
        server_option,
        json_option,
        click.option("--salt-file", metavar="FILE", help="Read the salt from FILE (without its last newline)."),
        click.option("--salt", metavar="TEXT", help="With --name: the cache_salt that the tenant sends."),
        click.option("--name", metavar="TEXT", help="The session as the application calls it, instead of its ID."),
        click.argument("session", metavar="[ID]", required=False),
    ):
        function = option(function)
    return function


@command.command("release", short_help="Let go of a session.", epilog=_EXAMPLES)
@_one
def release(as_json: bool, server: str | None, **named: str | None) -> None:
    """Let go of a session: what is held for it goes by the usual order from now on."""
    result = _order("release", server, **named)
    if as_json:
        print_json(result)
        return
    click.echo(f"Released session {result['id'][:12]}; engines told: {result['num_engines']}")


@command.command("prefetch", short_help="Bring a session near from the shared tier.", epilog=_EXAMPLES)
@_one
def prefetch(as_json: bool, server: str | None, **named: str | None) -> None:
    """Bring what the shared tier has of a session's last request to this node's disk.

    Its next request goes before others that wait for the host pool.
    """
    result = _order("prefetch", server, **named)
    if as_json:
        print_json(result)
        return
    from tierkv.cli import render

    click.echo(
        f"Bringing session {result['id'][:12]} near; looked at: {render.plural(result['num_chunks'], 'chunk')}; "
        f"engines told: {result['num_engines']}"
    )


def _order(
    order: str, server: str | None, *, session: str | None, name: str | None, salt: str | None, salt_file: str | None
) -> dict[str, Any]:
    if (session is None) == (name is None):
        raise click.UsageError("name one session: give its ID, or --name")
    if session is not None and (salt is not None or salt_file is not None):
        raise click.UsageError("a salt belongs to --name; an ID stands for one tenant's session")
    start = hex_start(session, "session") if session is not None else _digest(name or "", salt, salt_file).hex()
    with open_server(server) as client:
        try:
            reply = client.call("TKV.SESSION", order, msgspec.json.encode(SessionSelect(session=start)))
        except NotFoundError as error:
            raise NothingMatchedError(str(error)) from None
    result: dict[str, Any] = msgspec.json.decode(reply)
    return result


def _digest(name: str, salt: str | None, salt_file: str | None) -> bytes:
    from tierkv.keys import tenant_digest

    if salt is not None and salt_file is not None:
        raise click.UsageError("--salt and --salt-file are both given; give one of them")
    data = (salt or "").encode("utf-8", "surrogateescape")
    if salt_file is not None:
        try:
            data = Path(salt_file).expanduser().read_bytes().removesuffix(b"\n").removesuffix(b"\r")
        except OSError as error:
            raise ConfigError(
                f"salt_file={salt_file!r} cannot be read: {error.strerror}; name a file that you can read"
            ) from None
    return session_digest(tenant_digest(data), name)


def _print(rows: list[dict[str, Any]], total: int) -> None:
    from tierkv.cli import render

    console, now = render.console(), time.time()
    columns = ("id", ">turns", ">tokens", "last request", ">held", "until", "tenant", "namespace")
    cells = [
        (
            row["id"][:12],
            render.count(row["num_turns"]),
            render.count(row["tokens"]),
            render.age(row["noted"], now),
            render.size(row["held_nbytes"]),
            f"in {render.span(row['until'] - now)}" if row["until"] else "-",
            row["tenant"][:8] or "-",
            f"{row['namespace'][: render.NS_DIGITS]} {render.model_name(row['model'])}",
        )
        for row in rows
    ]
    console.print(render.table(columns, cells, flexible="namespace"))
    if len(rows) < total:
        console.print(f"{len(rows):,} of {render.plural(total, 'session')} shown")
