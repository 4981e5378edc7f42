"""``tierkv stat``: the server, its tiers and its engines."""

from __future__ import annotations

import time
from typing import Any

import click

from tierkv.cli.options import connect, json_option, print_json, server_option

_EXAMPLES = """\b
Examples:
  tierkv stat
  tierkv stat --json | jq '.tiers[] | {name, state, nbytes}'"""


@click.command("stat", epilog=_EXAMPLES)
@json_option
@server_option
def command(as_json: bool, server: str | None) -> None:
    """Show the server, its tiers, the engines that are connected, and the namespaces."""
    with connect(server) as client:
        stat = client.ask("TKV.STAT")
    if as_json:
        print_json(stat)
        return
    from tierkv.cli import render

    console = render.console()
    for line in _about(stat["server"], stat["tiers"]):
        console.print(render.clean(line), soft_wrap=True)
    console.print()
    console.print(_tiers(stat["tiers"]))
    for line in _troubles(stat["tiers"]):
        console.print(render.clean(line), soft_wrap=True)
    for rows in (_engines(stat["engines"]), _namespaces(stat["namespaces"])):
        if rows is not None:
            console.print()
            console.print(rows)


def _about(server: dict[str, Any], tiers: list[dict[str, Any]]) -> list[str]:
    from tierkv.cli import render

    engines = render.plural(server["num_engines"], "engine")
    if server["num_silent_engines"]:
        engines += f" ({server['num_silent_engines']} silent)"
    lines = [
        f"TierKV {server['version']}, pid {server['pid']}, up {render.span(server['uptime_s'])}, {engines}",
        f"socket  {server['socket']}",
        f"disk    {server['disk_dir']}",
        f"shared  {server['shared_url'] or 'none'}",
    ]
    policies = [f"{tier['name']} {tier['policy']}" for tier in tiers if tier["policy"]]
    if policies:
        lines.append(f"policy  {', '.join(policies)}")
    if server["num_stale"] or server["num_unstaged"]:
        lines.append(
            f"stores dropped: {server['num_stale']:,} whose slot was reused first, "
            f"{server['num_unstaged']:,} for lack of staging memory"
        )
    return lines


def _tiers(tiers: list[dict[str, Any]]) -> Any:
    from tierkv.cli import render

    columns = (
        "tier",
        "state",
        ">chunks",
        ">bytes",
        ">budget",
        ">hits",
        ">misses",
        ">stored",
        ">evicted",
        ">queued",
    )
    names = ("hits", "misses", "stored", "evicted")
    rows = [
        (
            t["name"],
            t["state"],
            render.count(t["num_entries"]),
            render.size(t["nbytes"]),
            render.size(t["budget"]) if t["budget"] else "-",
            *(render.count(t[f"num_{name}"]) for name in names),
            render.size(t["queued_nbytes"]),
        )
        for t in tiers
    ]
    return render.table(columns, rows)


def _troubles(tiers: list[dict[str, Any]]) -> list[str]:
    """Return a line for each tier that is out, declined or dropped stores, met damaged records or failed."""
    from tierkv.cli import render

    lines = []
    for tier in tiers:
        if tier["since"]:  # out, or up with a reservation
            lasted = render.span(time.time() - tier["since"])
            lines.append(f"{tier['name']}: {tier['state']}, for {lasted}: {tier['reason']}")
        if tier["num_declined"]:
            chunks = render.plural(tier["num_declined"], "chunk")
            lines.append(f"{tier['name']}: {chunks} declined, not worth their room")
        counts = [f"{render.count(tier[f'num_{name}'])} {name}" for name in ("dropped", "bad", "errors")]
        if tier["num_dropped"] or tier["num_bad"] or tier["num_errors"]:
            lines.append(f"{tier['name']}: " + ", ".join(counts))
    return lines


def _engines(engines: list[dict[str, Any]]) -> Any:
    from tierkv.cli import render

    if not engines:
        return None
    rows = [
        (
            e["engine_id"],
            str(e["pid"]),
            e["namespace"][: render.NS_DIGITS],
            f"{e['num_entries']:,} of {e['num_slots']:,}",
            render.size(e["budget"]),
            " ".join(f"{name} {value:,}" for name, value in e["counters"].items()),
        )
        for e in engines
    ]
    columns = ("engine", ">pid", "namespace", ">slots used", ">host pool", "counters")
    return render.table(columns, rows, flexible="counters")


def _namespaces(namespaces: list[dict[str, Any]]) -> Any:
    from tierkv.cli import render

    if not namespaces:
        return None
    rows = [
        (n["id"][: render.NS_DIGITS], render.model_name(n["model"]), render.size(n["payload_nbytes"]), n["layout"])
        for n in namespaces
    ]
    return render.table(("namespace", "model", ">chunk", "layout"), rows, flexible="layout")
