"""``tierkv report``: a page, in one file, that helps to size the tiers."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from tierkv import __version__
from tierkv.cli.options import connect, flag, json_option, offline_options, print_json, server_option
from tierkv.cli.report_advice import advise
from tierkv.errors import ConfigError
from tierkv.selection import Select

_EXAMPLES = """\b
Examples:
  tierkv report                                 writes tierkv-report.html
  tierkv report -o - | ssh desk 'cat > r.html'
  tierkv report --json | jq '.advice[]'
  tierkv report --disk /srv/tierkv              bytes only: curves are a running server's"""

#: Rows that a page's tables are made of: more are in ``tierkv du``.
_MAX_ROWS = 200


@click.command("report", epilog=_EXAMPLES)
@click.option(
    "--output",
    "-o",
    metavar="FILE",
    help="Write the page to FILE, or - for standard output [default: tierkv-report.html].",
)
@json_option
@offline_options
@server_option
def command(output: str | None, as_json: bool, server: str | None) -> None:
    """Write one HTML file that helps to size the tiers.

    What a larger or smaller host pool or disk would have hit, in a curve and in words; hits by tier over the last day;
    reuse distances; bytes by namespace, tenant and age. The file loads nothing and runs nothing: it can be sent and
    printed. With --json, what the page is made of is printed, and no page is written unless -o names one.
    """
    if as_json and output == "-":
        raise click.UsageError("--json and -o - both want standard output; name a file with -o")
    with connect(server) as store:
        report = _gather(store)
    if output is not None or not as_json:
        from tierkv.cli.report_page import make_page

        _write(output or "tierkv-report.html", make_page(report), said=not as_json)
    if as_json:
        print_json(report)


def _gather(store: Any) -> dict[str, Any]:
    """Return what there is to say; ``reuse`` and ``server`` are None of a store without a server."""
    from tierkv.cli.offline import OfflineStore

    stat = reuse = None
    if not isinstance(store, OfflineStore):
        stat, reuse = store.ask("TKV.STAT"), store.ask("TKV.REUSE")
    usage = {by: store.ask("TKV.DU", Select(by=by, limit=_MAX_ROWS)) for by in ("namespace", "tenant", "age")}
    return {
        "version": __version__,
        "created": time.time(),
        "server": stat and stat["server"],
        "tiers": stat["tiers"] if stat else [],
        "advice": advise(reuse),
        "reuse": reuse,
        "usage": usage,
    }


def _write(output: str, page: str, said: bool) -> None:
    """Write the page, whole or not at all.

    Raises:
        ConfigError: the file cannot be written.
    """
    if output == "-":
        sys.stdout.write(page)
        return
    file = Path(output)
    part = file.with_name(f".{file.name}.part")
    try:
        part.write_text(page, encoding="utf-8")
        part.replace(file)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConfigError(
            f"{output!r} cannot be written: {error.strerror}; name a file where you can with -o"
        ) from None
    if said and not flag("quiet"):
        click.echo(f"Wrote {output}")
