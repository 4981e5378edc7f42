"""``tierkv ls``: the stored prefixes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import click

from tierkv.cli import NothingMatchedError
from tierkv.cli.options import (
    connect,
    hex_start,
    json_option,
    namespace_option,
    namespace_start,
    print_json,
    server_option,
    tier_option,
)
from tierkv.messages import Select


@click.command("ls")
@namespace_option
@tier_option
@click.option("--prefix", metavar="ID", help="Only prefixes whose id starts with ID.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most N rows, most recently used first.")
@json_option
@server_option
def command(
    namespace: str | None,
    tiers: tuple[str, ...],
    prefix: str | None,
    limit: int | None,
    as_json: bool,
    server: str | None,
) -> None:
    """List the stored prefixes, most recently used first.

    A prefix is named by its last chunk; bytes count all its chunks over all tiers.
    """
    select = Select(
        ns=namespace_start(namespace), prefix="" if prefix is None else hex_start(prefix, "prefix"), tiers=list(tiers)
    )
    with connect(server) as client:
        rows = client.ask("TKV.LS", select)
    shown = rows[:limit]
    if as_json:
        print_json({"prefixes": shown})
    elif shown:
        _print(shown, len(rows))
    if not rows:
        filtered = namespace is not None or prefix is not None or bool(tiers)
        raise NothingMatchedError(
            "no stored prefix fits; 'tierkv ls' without options lists all"
            if filtered
            else "nothing is stored yet; prefixes appear here once an engine has computed and stored a whole chunk"
        )


def _print(rows: Sequence[dict[str, Any]], total: int) -> None:
    from tierkv.cli import render

    console, now = render.console(), time.time()
    columns = ("id", ">blocks", ">tokens", ">bytes", "tiers", ">hits", "last access", "namespace")
    cells = [
        (
            row["id"],
            render.count(row["depth_blocks"]) + ("*" if _broken(row) else ""),
            render.count(row["tokens"]),
            render.size(sum(row["nbytes"].values())),
            ",".join(row["tiers"]),
            render.count(row["hits"]),
            render.age(row["last_used"], now),
            f"{row['namespace'][: render.NS_DIGITS]} {render.model_name(row['model'])}",
        )
        for row in rows
    ]
    console.print(render.table(columns, cells, flexible="namespace"))
    if any(_broken(row) for row in rows):
        console.print("* chunks before these are missing, so they cannot be hit until those are stored again")
    if len(rows) < total:
        console.print(f"{len(rows):,} of {render.plural(total, 'prefix')} shown")


def _broken(row: dict[str, Any]) -> bool:
    """Return whether the chain does not reach back to its first chunk."""
    return bool(row["num_stored"] < row["depth_chunks"])
