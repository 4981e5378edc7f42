"""``tierkv tree``: the stored prefixes as a tree of runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import click

from tierkv.cli import NothingMatchedError
from tierkv.cli.options import (
    connect,
    hex_start,
    json_option,
    namespace_option,
    namespace_start,
    offline_options,
    print_json,
    server_option,
)
from tierkv.selection import Select

SORTS = ("nbytes", "hits", "last_used")
_EXAMPLES = """\b
Examples:
  tierkv tree --limit 30                        the 30 largest runs
  tierkv tree --sort hits                       what is used most
  tierkv tree 4ab1c2d3e4f5                      one run and what continues it"""


@click.command("tree", epilog=_EXAMPLES)
@click.argument("prefix", metavar="[ID]", required=False)
@namespace_option
@click.option("--sort", type=click.Choice(SORTS), default=SORTS[0], help="What leads [default: nbytes].")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, metavar="N", help="Runs to show [default: 50].")
@json_option
@offline_options
@server_option
def command(
    prefix: str | None, namespace: str | None, sort: str, limit: int, as_json: bool, server: str | None
) -> None:
    """Draw the stored prefixes as a tree. A line is a run of chunks that no prefix leaves in between.

    Bytes and hits are of the run and all below it; tokens are its own. Evicting a line's id evicts the line and what
    is below it.
    """
    select = Select(
        ns=namespace_start(namespace),
        prefix="" if prefix is None else hex_start(prefix, "id"),
        sort=sort,
        limit=limit,
    )
    with connect(server) as store:
        found = store.ask("TKV.TREE", select)
    shown = [space for space in found["namespaces"] if space["num_chunks"]]
    if as_json:
        print_json(found)
    elif shown:
        from tierkv.cli import render

        console = render.console()
        for line in lines(shown, time.time()):
            console.print(line, soft_wrap=True)
    if not shown:
        raise NothingMatchedError("nothing that fits is stored; 'tierkv ns' lists the namespaces")


def lines(spaces: list[dict[str, Any]], now: float) -> Iterator[str]:
    """Yield the lines of the trees, without recursion: a tree may be as deep as the server makes it."""
    from tierkv.cli import render

    for space in spaces:
        held = ", ".join(f"{render.size(n)} {tier}" for tier, n in space["nbytes"].items())
        about = f"{space['id'][: render.NS_DIGITS]} {render.model_name(space['model'])}: "
        yield render.clean(f"{about}{render.plural(space['num_chunks'], 'chunk')}, {held}")
        todo = _below("", space["roots"], space["num_hidden"])
        while todo:
            indent, last, run = todo.pop()
            yield f"{indent}{'└─ ' if last else '├─ '}{_line(run, now) if isinstance(run, dict) else run}"
            if isinstance(run, dict):
                todo += _below(indent + ("   " if last else "│  "), run["children"], run["num_hidden"])


def _below(
    indent: str, children: list[dict[str, Any]], num_hidden: int
) -> list[tuple[str, bool, dict[str, Any] | str]]:
    """Return the lines below a run, the last one first, so that they are popped in order."""
    items: list[dict[str, Any] | str] = [*children]
    if num_hidden:
        items.append(f"{num_hidden:,} more")
    return [(indent, i == len(items) - 1, item) for i, item in enumerate(items)][::-1]


def _line(run: dict[str, Any], now: float) -> str:
    from tierkv.cli import render

    words = [
        run["id"],
        f"{run['num_tokens']:,} tokens",
        render.size(sum(run["nbytes"].values())),
        render.plural(run["hits"], "hit"),
        f"used {render.age(run['last_used'], now)}",
    ]
    if run["children"] or run["num_hidden"]:
        words.append(render.plural(run["num_prefixes"], "prefix"))
    if run["pins"]:
        words.append("pinned by " + ", ".join(pin["owner"] for pin in run["pins"]))
    return render.clean("  ".join(words))
