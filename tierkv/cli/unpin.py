"""``tierkv unpin``: take pins off a prefix."""

from __future__ import annotations

from typing import Any

import click

from tierkv.cli import NothingMatchedError
from tierkv.cli.lifetime import check, options, order, show
from tierkv.selection import Select

_EXAMPLES = """\b
Examples:
  tierkv unpin ccae6962a8f4                     everybody's pins
  tierkv unpin ccae6962a8f4 --owner ops"""


@click.command("unpin", epilog=_EXAMPLES)
@click.option("--owner", metavar="NAME", default="", help="Whose pins [default: everybody's].")
@options
def command(owner: str, as_json: bool, **given: Any) -> None:
    """Take pins off a stored prefix and its ancestors. It stays until room is needed or its time is over."""
    result = order("TKV.UNPIN", given, Select(owner=owner))
    would = "Would unpin" if result["dry_run"] else "Unpinned"
    show(result, as_json, f"{would} {result['id']}" + (f" for {owner}" if owner else ""))
    check(result, "a pin")
    if not result["dry_run"] and not any(result["tiers"].values()):
        whose = f"{owner!r} has no pin" if owner else "there is no pin"
        raise NothingMatchedError(f"{whose} on {result['id']}; 'tierkv show {result['id']}' lists pins")
