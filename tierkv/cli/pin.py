"""``tierkv pin``: keep a prefix."""

from __future__ import annotations

import getpass
import os
import re
from typing import Any

import click

from tierkv.cli import IncompleteError
from tierkv.cli.lifetime import check, options, order, show
from tierkv.cli.options import Span
from tierkv.errors import ConfigError, RefusedError
from tierkv.selection import Select

_OWNER = re.compile(r"[!-~]{1,64}")
_EXAMPLES = """\b
Examples:
  tierkv pin ccae6962a8f4 --for 7d
  tierkv pin --tokens-file system-prompt.json --for 30d --owner ops
  tierkv pin ccae6962a8f4 --for 1h --tier shared --dry-run"""


@click.command("pin", epilog=_EXAMPLES)
@click.option("--for", "seconds", type=Span(), required=True, help="How long, such as 12h or 30d.")
@click.option("--owner", metavar="NAME", help="Whose pin it is [default: your user name].")
@options
def command(seconds: float, owner: str | None, as_json: bool, **given: Any) -> None:
    """Keep a stored prefix, its ancestors included, on the disk and in the shared tier for a time.

    Until then neither a lack of room nor an expiry removes it, only 'tierkv evict --force'. Another pin of the same
    owner takes the place of his first. Pins have a quota: quota.pinned_bytes.
    """
    name = owner if owner is not None else _user()
    if not _OWNER.fullmatch(name):
        raise ConfigError(f"owner {name!r} is not possible; write 1 to 64 printable characters without spaces")
    result = order("TKV.PIN", given, Select(owner=name, seconds=seconds))
    from tierkv.cli import render

    if not (as_json or result["dry_run"] or any(result["tiers"].values())):
        _check_quota(result)  # refuses: "Pinned" would be no true word
    would = "Would pin" if result["dry_run"] else "Pinned"
    chunks = render.plural(result["num_chunks"], "chunk")
    show(result, as_json, f"{would} {result['id']} for {name}, for {render.span(seconds)}: {chunks}")
    check(result, "a pin")
    if not result["dry_run"]:
        _check_quota(result)


def _check_quota(result: dict[str, Any]) -> None:
    """See that every chunk that a tier has was pinned there.

    Raises:
        RefusedError, IncompleteError: none was, or not all.
    """
    short = [
        f"{result['tiers'][tier]:,} of {num:,} on {tier}"
        for tier, num in result["stored"].items()
        if result["tiers"][tier] < num
    ]
    if not short:
        return
    why = "the pins' quota (quota.pinned_bytes) is reached, or a chunk before the rest is missing"
    if not any(result["tiers"].values()):
        raise RefusedError(f"no chunk could be pinned: {why}; 'tierkv stat --json' shows what pins hold")
    raise IncompleteError(f"not all chunks could be pinned ({', '.join(short)}): {why}")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid-{os.getuid()}"
