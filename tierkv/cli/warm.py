"""``tierkv warm``: bring a prefix from the shared tier to this node's disk."""

from __future__ import annotations

import click
import msgspec

from tierkv.cli import IncompleteError, NothingMatchedError
from tierkv.cli.options import (
    Size,
    connect,
    json_option,
    namespace_option,
    namespace_start,
    one_prefix,
    print_json,
    prompt_options,
    server_option,
)
from tierkv.cli.progress import steps
from tierkv.cli.prompt import PromptOptions

_EXAMPLES = """\b
Examples:
  tierkv warm ccae6962a8f4
  tierkv warm --tokens-file system-prompt.json --rate 200MiB"""
_COUNTS = ("num_warmed", "num_there", "num_missing", "num_dropped", "nbytes")


@click.command("warm", epilog=_EXAMPLES)
@click.argument("prefix", metavar="[ID]", required=False)
@prompt_options
@namespace_option
@click.option("--rate", type=Size(), default=0, help="Copy at most SIZE a second.")
@click.option("--dry-run", is_flag=True, help="Say what would be copied, and copy nothing.")
@json_option
@server_option
def command(
    prefix: str | None,
    given: PromptOptions,
    namespace: str | None,
    rate: int,
    dry_run: bool,
    as_json: bool,
    server: str | None,
) -> None:
    """Bring a stored prefix, its ancestors included, from the shared tier to the disk of the server's node.

    What the disk has already is not copied. Loads of engines go first.
    """
    named = one_prefix(prefix, given)
    total = dict.fromkeys(_COUNTS, 0)
    num_chunks = 0
    with connect(server) as store:
        select = msgspec.structs.replace(named.select(store, namespace_start(namespace)), dry_run=dry_run)
        for reply in steps(store, "TKV.WARM", select, "Warming", rate):
            num_chunks = reply["num_total"]
            for name in _COUNTS:
                total[name] += reply[name]
    from tierkv.cli import render

    if as_json:
        print_json({"dry_run": dry_run, "num_chunks": num_chunks} | total)
    else:
        would = "Would copy" if dry_run else "Copied"
        copied = f"{render.plural(total['num_warmed'], 'chunk')} ({render.size(total['nbytes'])})"
        render.console().print(
            f"{would} {copied} of {num_chunks:,}; "
            f"{total['num_there']:,} were on the disk, {total['num_missing']:,} are not in the shared tier",
            soft_wrap=True,
        )
    if total["num_dropped"]:
        chunks = render.plural(total["num_dropped"], "chunk")
        raise IncompleteError(f"not stored: {chunks}; the disk has no room or fails")
    if not total["num_warmed"] and not total["num_there"]:
        raise NothingMatchedError("none of its chunks is in the shared tier; 'tierkv show ID' says where they are")
