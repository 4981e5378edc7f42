"""``tierkv top``: what the tiers are doing now."""

from __future__ import annotations

import time
from typing import Any

import click

from tierkv.cli.options import connect, json_option, print_json, server_option
from tierkv.selection import Select

#: Counters of a tier whose rates are shown.
RATES = ("hits", "misses", "stored", "evicted", "dropped", "errors")
#: The hottest prefixes take a listing, which is not made at every look.
HOT_EVERY_S = 10.0
_EXAMPLES = """\b
Examples:
  tierkv top
  tierkv top --once --json | jq '.tiers[] | {name, hit_rate}'"""


@click.command("top", epilog=_EXAMPLES)
@click.option(
    "--interval",
    type=click.FloatRange(0.2, 60),
    default=2.0,
    metavar="SECONDS",
    help="Time between two looks [default: 2].",
)
@click.option(
    "--hot", type=click.IntRange(0, 50), default=5, metavar="N", help="The N most used prefixes [default: 5]."
)
@click.option("--once", is_flag=True, help="Look twice, print, and leave.")
@json_option
@server_option
def command(interval: float, hot: int, once: bool, as_json: bool, server: str | None) -> None:
    """Show chunks a second by tier, what waits to be written, engines, and the most used prefixes, until Ctrl-C."""
    if as_json and not once:
        raise click.UsageError("--json takes --once; 'tierkv events --json' follows")
    with connect(server) as store:
        hottest: list[dict[str, Any]] = []
        before, at, hot_at = store.ask("TKV.STAT"), time.monotonic(), float("-inf")

        def look() -> dict[str, Any]:
            nonlocal before, at, hottest, hot_at
            time.sleep(interval)
            now, then = store.ask("TKV.STAT"), time.monotonic()
            if hot and then - hot_at > HOT_EVERY_S:
                hottest, hot_at = store.ask("TKV.PAGE", Select(sort="hits", limit=hot))["prefixes"], then
            found = view(before, now, then - at, [row for row in hottest if row["hits"]])
            before, at = now, then
            return found

        if once:
            found = look()
            if as_json:
                print_json(found)
            else:
                from tierkv.cli import render

                render.console().print(screen(found))
            return
        from rich.live import Live

        from tierkv.cli import render

        with Live(console=render.console(), auto_refresh=False, screen=render.console().is_terminal) as live:
            while True:
                live.update(screen(look()), refresh=True)


def view(before: dict[str, Any], now: dict[str, Any], seconds: float, hot: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what happened between two statistics, ``seconds`` apart. A server that was restarted counts from 0."""
    old = {tier["name"]: tier for tier in before["tiers"]} if before["server"]["boot"] == now["server"]["boot"] else {}
    tiers = []
    for tier in now["tiers"]:
        rates = {}
        for name in RATES:
            gone_by = tier[f"num_{name}"] - old.get(tier["name"], {}).get(f"num_{name}", 0)
            rates[f"{name}_s"] = round(max(0, gone_by) / seconds, 3)
        asked = rates["hits_s"] + rates["misses_s"]
        about = {key: tier[key] for key in ("name", "state", "num_entries", "nbytes", "budget", "queued_nbytes")}
        tiers.append(about | rates | {"hit_rate": round(rates["hits_s"] / asked, 4) if asked else None})
    shown = ("id", "namespace", "model", "tokens", "hits", "last_used", "tiers")
    return {
        "seconds": round(seconds, 3),
        "num_engines": now["server"]["num_engines"],
        "tiers": tiers,
        "engines": [
            {key: engine[key] for key in ("engine_id", "num_entries", "num_slots", "num_quarantined")}
            for engine in now["engines"]
        ],
        "hottest": [{key: row[key] for key in shown} for row in hot],
    }


def screen(found: dict[str, Any]) -> Any:
    """Return a view for people."""
    from rich.console import Group

    from tierkv.cli import render

    parts: list[Any] = [
        f"{render.plural(found['num_engines'], 'engine')}; chunks a second over {found['seconds']:.1f} s"
    ]
    cells = [
        (
            tier["name"],
            tier["state"],
            *(f"{tier[f'{name}_s']:,.1f}" for name in RATES),
            "-" if tier["hit_rate"] is None else f"{tier['hit_rate']:.0%}",
            render.size(tier["queued_nbytes"]),
            render.size(tier["nbytes"]) + (f" of {render.size(tier['budget'])}" if tier["budget"] else ""),
        )
        for tier in found["tiers"]
    ]
    columns = ("tier", "state", *(f">{name}" for name in RATES), ">hit rate", ">queued", ">bytes")
    parts += ["", render.table(columns, cells)]
    if found["engines"]:
        pools = [
            (e["engine_id"], f"{e['num_entries']:,} of {e['num_slots']:,}", f"{e['num_quarantined']:,}")
            for e in found["engines"]
        ]
        parts += ["", render.table(("engine", ">slots used", ">quarantined"), pools)]
    if found["hottest"]:
        now = time.time()
        rows = [
            (
                row["id"],
                render.count(row["tokens"]),
                render.count(row["hits"]),
                ",".join(row["tiers"]),
                render.age(row["last_used"], now),
            )
            for row in found["hottest"]
        ]
        parts += ["", render.table(("hottest", ">tokens", ">hits", "tiers", "last access"), rows)]
    return Group(*parts)
