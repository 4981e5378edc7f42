"""``tierkv compact``: give disk space back to the file system."""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

from tierkv.cli import NothingMatchedError
from tierkv.cli.options import (
    Size,
    Store,
    connect,
    json_option,
    namespace_option,
    namespace_start,
    print_json,
    server_option,
)
from tierkv.cli.progress import steps
from tierkv.errors import RefusedError
from tierkv.selection import Select

_EXAMPLES = """\b
Examples:
  tierkv compact --dry-run                      what each namespace would give back
  tierkv compact --namespace 7e2fcd30 --rate 200MiB
  tierkv compact --disk /var/cache/tierkv       while no server runs"""


@click.command("compact", epilog=_EXAMPLES)
@namespace_option
@click.option("--rate", type=Size(), default=0, help="Write at most SIZE a second.")
@click.option("--dry-run", is_flag=True, help="Say what would be given back, and what room that needs.")
@click.option("--disk", metavar="DIR", help="Compact a disk directory that no server owns; else that server is asked.")
@json_option
@server_option
def command(
    namespace: str | None, rate: int, dry_run: bool, disk: str | None, as_json: bool, server: str | None
) -> None:
    """Write the files of namespaces anew where much of them is not used, and give the rest back to the file system.

    Engines load and store meanwhile. The new file takes the old one's place when it is complete, so that an
    interruption changes nothing; until then the volume needs room for both. Namespaces that would give back less than
    a 64th of their file are left as they are.
    """
    select = Select(ns=namespace_start(namespace), dry_run=dry_run)
    rows: list[dict[str, Any]] = []
    with _open(server, disk) as store:
        for reply in steps(store, "TKV.COMPACT", select, "Compacting", rate):
            rows += reply["namespaces"]
    result = {
        "dry_run": dry_run,
        "before_nbytes": sum(row["before_nbytes"] for row in rows),
        "after_nbytes": sum(row["after_nbytes"] for row in rows),
        "freed_nbytes": sum(row["freed_nbytes"] for row in rows),
        "num_bad": sum(row["num_bad"] for row in rows),
        "namespaces": rows,
    }
    if as_json:
        print_json(result)
    elif rows:
        _print(result)
    _check(rows, namespace)


def _open(server: str | None, disk: str | None) -> Store:
    if disk is None:
        return connect(server)
    here = click.get_current_context().get_parameter_source("server")
    if server is not None and here is not ParameterSource.ENVIRONMENT:
        raise click.UsageError("--server and --disk are both given; give one of them")
    from tierkv.cli.owned import open_directory

    return open_directory(disk)


def _print(result: dict[str, Any]) -> None:
    from tierkv.cli import render

    console = render.console()
    rows = [
        (
            f"{row['namespace'][: render.NS_DIGITS]} {render.model_name(row['model'])}",
            render.count(row["num_chunks"]),
            render.size(row["before_nbytes"]),
            render.size(row["after_nbytes"]),
            render.size(row["freed_nbytes"]),
            "would be compacted" if row["state"] == "planned" else row["state"],
        )
        for row in result["namespaces"]
    ]
    columns = ("namespace", ">chunks", ">before", ">after", ">given back", "state")
    console.print(render.table(columns, rows, flexible="namespace"))
    if len(rows) > 1:
        freed, verb = render.size(result["freed_nbytes"]), "Would give back" if result["dry_run"] else "Gave back"
        console.print(f"{verb} {freed} of {render.size(result['before_nbytes'])}")
    if result["num_bad"]:
        console.print(f"{render.plural(result['num_bad'], 'damaged record')} deleted on the way")


def _check(rows: list[dict[str, Any]], namespace: str | None) -> None:
    """See that something was given back, and nothing was refused.

    Raises:
        RefusedError, NothingMatchedError: it is not so.
    """
    refused = [f"namespace {row['namespace'][:8]}: {row['reason']}" for row in rows if row["state"] == "refused"]
    if refused:
        raise RefusedError("not everything was compacted: " + "; ".join(refused))
    if not rows:
        what = "nothing is on the disk" if namespace is None else f"no namespace on the disk starts with {namespace!r}"
        raise NothingMatchedError(f"{what}; 'tierkv ns' lists what is stored")
    if not any(row["state"] in ("planned", "compacted") for row in rows):
        raise NothingMatchedError("there is nothing to give back: the files hold little but what is stored")
