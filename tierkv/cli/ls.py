"""``tierkv ls``: the stored prefixes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import click

from tierkv.cli import NothingMatchedError
from tierkv.cli.options import (
    Size,
    Span,
    connect,
    hex_start,
    json_option,
    namespace_option,
    namespace_start,
    offline_options,
    print_json,
    server_option,
    tenant_option,
    tenant_start,
    tier_option,
)
from tierkv.selection import Select

SORTS = ("last_used", "created", "hits", "nbytes", "tokens")
_EXAMPLES = """\b
Examples:
  tierkv ls --limit 20                          the 20 that were used last
  tierkv ls --sort nbytes --tier disk           the largest first, of those on the disk
  tierkv ls --unused-for 7d --min-size 1GiB     large and idle
  tierkv ls --pinned --json | jq -r '.prefixes[].id'"""


@click.command("ls", epilog=_EXAMPLES)
@namespace_option
@tenant_option
@tier_option
@click.option("--prefix", metavar="ID", help="Only prefixes whose id starts with ID.")
@click.option("--older-than", type=Span(), default=0.0, help="Only what was stored longer ago than TIME, such as 7d.")
@click.option("--newer-than", type=Span(), default=0.0, help="Only what was stored within TIME.")
@click.option("--unused-for", type=Span(), default=0.0, help="Only what was not used for TIME.")
@click.option("--used-within", type=Span(), default=0.0, help="Only what was used within TIME.")
@click.option("--min-size", type=Size(), default=0, help="Only prefixes of at least SIZE over all tiers.")
@click.option("--max-size", type=Size(), default=0, help="Only prefixes of at most SIZE over all tiers.")
@click.option("--pinned/--not-pinned", default=None, help="Only prefixes that are pinned, or that are not.")
@click.option(
    "--sort", type=click.Choice(SORTS), default=SORTS[0], help="Largest or latest first [default: last_used]."
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most N rows.")
@json_option
@offline_options
@server_option
def command(
    namespace: str | None,
    tenant: str,
    tiers: tuple[str, ...],
    prefix: str | None,
    older_than: float,
    newer_than: float,
    unused_for: float,
    used_within: float,
    min_size: int,
    max_size: int,
    pinned: bool | None,
    sort: str,
    limit: int | None,
    as_json: bool,
    server: str | None,
) -> None:
    """List the stored prefixes, most recently used first.

    A prefix is named by its last chunk; bytes count all its chunks over all tiers.
    """
    everything = Select(sort=sort, limit=limit or 0)
    select = Select(
        ns=namespace_start(namespace),
        prefix="" if prefix is None else hex_start(prefix, "prefix"),
        tenant=tenant_start(tenant),
        tiers=list(tiers),
        older_s=older_than,
        newer_s=newer_than,
        unused_s=unused_for,
        used_s=used_within,
        min_nbytes=min_size,
        max_nbytes=max_size,
        pinned=pinned,
        sort=sort,
        limit=limit or 0,
    )
    with connect(server) as store:
        page = store.ask("TKV.PAGE", select)
    rows = page["prefixes"]
    if as_json:
        print_json({"prefixes": rows, "total": page["total"]})
    elif rows:
        _print(rows, page["total"])
    if not rows:
        raise NothingMatchedError(
            "no stored prefix fits; 'tierkv ls' without options lists all"
            if select != everything
            else "nothing is stored yet; prefixes appear here once an engine has computed and stored a whole chunk"
        )


def _print(rows: Sequence[dict[str, Any]], total: int) -> None:
    from tierkv.cli import render

    console, now = render.console(), time.time()
    columns = ("id", ">blocks", ">tokens", ">bytes", "tiers", ">hits", "last access", "namespace")
    cells = [
        (
            row["id"],
            render.count(row["depth_blocks"]) + ("*" if _broken(row) else "") + ("+" if row["pins"] else ""),
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
    if any(row["pins"] for row in rows):
        console.print("+ pinned: 'tierkv show ID' says by whom and until when")
    if len(rows) < total:
        console.print(f"{len(rows):,} of {render.plural(total, 'prefix')} shown")


def _broken(row: dict[str, Any]) -> bool:
    """Return whether the chain does not reach back to its first chunk."""
    return bool(row["num_stored"] < row["depth_chunks"])
