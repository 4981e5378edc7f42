"""``tierkv du``: bytes by namespace, tenant, depth or age, a column a tier."""

from __future__ import annotations

from typing import Any

import click

from tierkv.cli import NothingMatchedError
from tierkv.cli.options import (
    TIERS,
    connect,
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

_EXAMPLES = """\b
Examples:
  tierkv du                                     by namespace
  tierkv du --by tenant --limit 10              the ten largest tenants
  tierkv du --by depth --namespace 7e2f         how deep into prompts the bytes are
  tierkv du --by age                            how long ago they were used"""


@click.command("du", epilog=_EXAMPLES)
@click.option(
    "--by",
    type=click.Choice(("namespace", "tenant", "depth", "age")),
    default="namespace",
    help="What to sum up by [default: namespace].",
)
@namespace_option
@tenant_option
@tier_option
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most N rows.")
@json_option
@offline_options
@server_option
def command(
    by: str,
    namespace: str | None,
    tenant: str,
    tiers: tuple[str, ...],
    limit: int | None,
    as_json: bool,
    server: str | None,
) -> None:
    """Sum up what is stored, by namespace, by tenant, by depth or by age, with a column for each tier.

    A depth is how far from the start of their prompt chunks begin, in spans that double; an age is the time since they
    were used last.
    """
    select = Select(
        ns=namespace_start(namespace), tenant=tenant_start(tenant), tiers=list(tiers), by=by, limit=limit or 0
    )
    with connect(server) as store:
        found = store.ask("TKV.DU", select)
    if as_json:
        print_json(found)
    elif found["total"]["num_chunks"]:
        _print(found)
    if not found["total"]["num_chunks"]:
        raise NothingMatchedError("nothing that fits is stored; 'tierkv ls' lists what is stored")


def _print(found: dict[str, Any]) -> None:
    from tierkv.cli import render

    by, total = found["by"], found["total"]
    tiers = [tier for tier in TIERS if tier in total["nbytes"]]
    cells = [
        (
            *_name(row, by),
            render.count(row["num_chunks"]),
            *render.sizes(row["nbytes"], tiers),
            render.size(sum(row["nbytes"].values())),
        )
        for row in found["rows"]
    ]
    blank = [""] * (by != "namespace")
    sums = (*render.sizes(total["nbytes"], tiers), render.size(sum(total["nbytes"].values())))
    cells.append(("total", *blank, render.count(total["num_chunks"]), *sums))
    more = {"namespace": (), "tenant": ("tenant",), "depth": (">tokens",), "age": (">last used",)}[by]
    columns = ("namespace", *more, ">chunks", *(f">{tier}" for tier in tiers), ">all")
    console = render.console()
    console.print(render.table(columns, cells, flexible="namespace"))
    if len(found["rows"]) < found["num_rows"]:
        console.print(f"{len(found['rows']):,} of {render.plural(found['num_rows'], 'row')} shown")


def _name(row: dict[str, Any], by: str) -> list[str]:
    from tierkv.cli import render

    cells = [f"{row['namespace'][: render.NS_DIGITS]} {render.model_name(row['model'])}"]
    if by == "tenant":
        cells.append(row["tenant"] or "none")
    if by == "depth":
        cells.append(f"{row['from_token']:,} to {row['to_token'] - 1:,}")
    if by == "age":
        until, since = row["to_s"], render.span(row["from_s"])
        cells.append(f"{since} to {render.span(until)} ago" if until else f"over {since} ago, or unknown")
    return cells
