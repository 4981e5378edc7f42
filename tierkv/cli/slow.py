"""``tierkv slow``: operations that were slow, or failed."""

from __future__ import annotations

import time

import click

from tierkv.cli import NothingMatchedError
from tierkv.cli.options import Span, connect, json_option, print_json, server_option
from tierkv.selection import Select

_EXAMPLES = """\b
Examples:
  tierkv slow
  tierkv slow --over 1s --json"""


@click.command("slow", epilog=_EXAMPLES)
@click.option("--over", type=Span(), default=0.0, help="Only what took longer than TIME, such as 500ms.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most N, the latest.")
@json_option
@server_option
def command(over: float, limit: int | None, as_json: bool, server: str | None) -> None:
    """Show the latest of engines' fetches and stores that took more than 0.1 s, were dropped, failed or met damage.

    The server keeps the last 256.
    """
    with connect(server) as store:
        found = store.ask("TKV.SLOW", Select())
    rows = [row for row in found["operations"] if row["seconds"] > over or not over][: limit or None]
    if as_json:
        print_json({"slow_s": found["slow_s"], "operations": rows})
    elif rows:
        from tierkv.cli import render

        now = time.time()
        cells = [
            (
                render.age(row["when"], now),
                row["kind"],
                row["engine"] or "-",
                f"{row['seconds'] * 1000:,.0f} ms",
                " ".join(f"{name} {num:,}" for name, num in row["chunks"].items()),
                f"{row['namespace'][: render.NS_DIGITS]}/{row['id'] or '*'}",
            )
            for row in rows
        ]
        columns = ("when", "what", "engine", ">took", "chunks", "last chunk")
        render.console().print(render.table(columns, cells, flexible="chunks"))
    if not rows:
        raise NothingMatchedError("nothing was slow or failed lately")
