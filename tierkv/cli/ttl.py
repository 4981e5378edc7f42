"""``tierkv ttl``: let a prefix expire."""

from __future__ import annotations

from typing import Any

import click

from tierkv.cli.lifetime import check, options, order, show
from tierkv.cli.options import Span
from tierkv.selection import Select

_EXAMPLES = """\b
Examples:
  tierkv ttl ccae6962a8f4 --in 2h
  tierkv ttl ccae6962a8f4 --clear               as the tiers' limits say again"""


@click.command("ttl", epilog=_EXAMPLES)
@click.option("--in", "seconds", type=Span(), help="How long from now, such as 30m or 7d.")
@click.option("--clear", is_flag=True, help="Take such a time off: it expires as the tiers' limits say.")
@options
def command(seconds: float | None, clear: bool, as_json: bool, **given: Any) -> None:
    """Let a stored prefix expire at a time of its own: its own part and what continues it, not what others share."""
    if (seconds is None) == (not clear):
        raise click.UsageError("give either --in TIME or --clear")
    result = order("TKV.TTL", given, Select(seconds=seconds or 0.0))
    from tierkv.cli import render

    would = "Would let" if result["dry_run"] else "Let"
    what = f"expire in {render.span(seconds)}" if seconds else "expire as its tiers say"
    chunks = render.plural(result["num_chunks"], "chunk")
    show(result, as_json, f"{would} {result['id']} {what}: {chunks}")
    check(result, "a time to live")
