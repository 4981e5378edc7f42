"""``tierkv verify``: read back what is stored and check it."""

from __future__ import annotations

from typing import Any

import click

from tierkv.cli import IncompleteError, NothingMatchedError
from tierkv.cli.options import (
    Size,
    connect,
    hex_start,
    json_option,
    namespace_option,
    namespace_start,
    offline_options,
    print_json,
    server_option,
)
from tierkv.cli.progress import steps
from tierkv.errors import RefusedError
from tierkv.selection import Select

_EXAMPLES = """\b
Examples:
  tierkv verify                                 everything, as fast as it goes
  tierkv verify --rate 100MiB --tier disk
  tierkv verify ccae6962a8f4 --repair           one prefix; delete what is damaged"""
_COUNTS = ("num_ok", "num_gone", "num_failed", "nbytes")
_MAX_SHOWN = 20


@click.command("verify", epilog=_EXAMPLES)
@click.argument("prefix", metavar="[ID]", required=False)
@namespace_option
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    type=click.Choice(("disk", "shared")),
    help="Only this tier; repeatable [default: all].",
)
@click.option("--repair", is_flag=True, help="Delete what is damaged: it is then a miss, and computed again.")
@click.option("--rate", type=Size(), default=0, help="Read at most SIZE a second.")
@json_option
@offline_options
@server_option
def command(
    prefix: str | None,
    namespace: str | None,
    tiers: tuple[str, ...],
    repair: bool,
    rate: int,
    as_json: bool,
    server: str | None,
) -> None:
    """Read stored records back and check them against their checksums: all, a namespace's, or one prefix's.

    Loads of engines go first. Without --repair nothing is changed; an engine never gets damaged bytes in any case.
    """
    select = Select(
        ns=namespace_start(namespace),
        prefix="" if prefix is None else hex_start(prefix, "id"),
        tiers=list(tiers),
        repair=repair,
    )
    total = dict.fromkeys(_COUNTS, 0)
    bad: list[dict[str, Any]] = []
    num_total = num_done = 0
    with connect(server) as store:
        for reply in steps(store, "TKV.VERIFY", select, "Verifying", rate):
            num_total, num_done = reply["num_total"], reply["num_done"]
            for name in _COUNTS:
                total[name] += reply[name]
            bad += reply["bad"]
            if reply["num_failed"] and not (reply["num_ok"] or reply["bad"]):
                break  # the tier is out: the rest would fail as well
    result = {"num_total": num_total, "num_done": num_done} | total | {"num_bad": len(bad), "bad": bad}
    if as_json:
        print_json(result)
    else:
        _print(result)
    _check(result, repair)


def _print(result: dict[str, Any]) -> None:
    from tierkv.cli import render

    console = render.console()
    if result["num_total"]:
        console.print(
            f"{render.plural(result['num_ok'], 'record')} sound ({render.size(result['nbytes'])} read), "
            f"{result['num_bad']:,} damaged, {result['num_gone']:,} gone meanwhile, {result['num_failed']:,} not read"
        )
    rows = [
        (b["id"], b["namespace"][: render.NS_DIGITS], b["tier"], "yes" if b["deleted"] else "no")
        for b in result["bad"][:_MAX_SHOWN]
    ]
    if rows:
        console.print(render.table(("damaged", "namespace", "tier", "deleted"), rows))
    if len(result["bad"]) > _MAX_SHOWN:
        console.print(f"and {len(result['bad']) - _MAX_SHOWN:,} more; --json has all")


def _check(result: dict[str, Any], repair: bool) -> None:
    if result["num_failed"]:
        left = result["num_total"] - result["num_done"] + result["num_failed"]
        from tierkv.cli import render

        records = render.plural(left, "record")
        raise IncompleteError(f"{records} could not be read: a tier is out or fails; see 'tierkv stat'")
    if result["num_bad"] and not repair:
        raise RefusedError(f"{result['num_bad']:,} damaged; 'tierkv verify --repair' deletes them")
    if not result["num_total"]:
        raise NothingMatchedError("nothing that fits is on the disk or in the shared tier; 'tierkv ls' lists what is")
