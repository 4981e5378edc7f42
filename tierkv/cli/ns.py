"""``tierkv ns``: the namespaces."""

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
    namespaces,
    offline_options,
    print_json,
    server_option,
)
from tierkv.selection import Select

_EXAMPLES = """\b
Examples:
  tierkv ns
  tierkv ns --json | jq -r '.namespaces[] | [.id, .model] | @tsv'
  tierkv ns --disk /var/lib/tierkv              no server is needed"""


@click.command("ns", epilog=_EXAMPLES)
@namespace_option
@json_option
@offline_options
@server_option
def command(namespace: str | None, as_json: bool, server: str | None) -> None:
    """List the namespaces: a model's weights and the layout of its KV cache, with what is stored of each.

    Engines share what is stored if and only if their namespaces are equal.
    """
    start = namespace_start(namespace)
    with connect(server) as store:
        known = namespaces(store, start)
        sums = {row["namespace"]: row for row in store.ask("TKV.DU", Select(ns=start, by="namespace"))["rows"]}
    rows = []
    for ns, about in known.items():
        row = sums.get(ns, {"num_chunks": 0, "chunks": {}, "nbytes": {}})
        rows.append(
            {
                "id": ns,
                "model": about.model,
                "identity": about.identity,
                "layout": about.layout.describe(),
                "chunk_tokens": about.layout.chunk_tokens,
                "payload_nbytes": about.payload_nbytes,
                "num_parts": about.shard.num_parts,
                "num_chunks": row["num_chunks"],
                "chunks": row["chunks"],
                "nbytes": row["nbytes"],
            }
        )
    rows.sort(key=lambda row: (-sum(row["nbytes"].values()), row["id"]))
    if as_json:
        print_json({"namespaces": rows})
    elif rows:
        _print(rows)
    if not rows:
        raise NothingMatchedError(
            f"no namespace's id starts with {start!r}; 'tierkv ns' lists all"
            if start
            else "there is no namespace yet; one appears with the first engine"
        )


def _print(rows: list[dict[str, Any]]) -> None:
    from tierkv.cli import render

    tiers = [tier for tier in TIERS if any(tier in row["nbytes"] for row in rows)]
    cells = [
        (
            row["id"][: render.NS_DIGITS],
            render.model_name(row["model"]),
            render.count(row["num_chunks"]),
            *render.sizes(row["nbytes"], tiers),
            render.size(row["payload_nbytes"]),
            row["layout"],
        )
        for row in rows
    ]
    columns = ("namespace", "model", ">chunks", *(f">{tier}" for tier in tiers), ">a chunk", "layout")
    render.console().print(render.table(columns, cells, flexible="layout"))
