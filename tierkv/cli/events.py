"""``tierkv events``: follow stores, fetches and evictions."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from tierkv.cli import NothingMatchedError
from tierkv.cli.options import connect, flag, namespace_option, namespace_start, print_json, server_option
from tierkv.selection import Select

#: Events in one reply of the server.
MAX_REPLY = 1024
KINDS = ("store", "fetch", "evict", "expel", "lost")
_EXAMPLES = """\b
Examples:
  tierkv events                                 what is kept, and then what happens, until Ctrl-C
  tierkv events --kind evict --kind expel --once --limit 20
  tierkv events --once --json | jq -s 'map(.chunks.missing // 0) | add'"""


@click.command("events", epilog=_EXAMPLES)
@click.option("--kind", "kinds", multiple=True, type=click.Choice(KINDS), help="Only these; repeatable [default: all].")
@namespace_option
@click.option("--since", type=click.IntRange(min=0), default=0, metavar="N", help="Only events after number N.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Of what is kept, at most N, the latest.")
@click.option("--once", is_flag=True, help="Print what is kept, and leave.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 60),
    default=0.5,
    metavar="SECONDS",
    help="Time between two looks [default: 0.5].",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
@server_option
def command(
    kinds: tuple[str, ...],
    namespace: str | None,
    since: int,
    limit: int | None,
    once: bool,
    interval: float,
    as_json: bool,
    server: str | None,
) -> None:
    """Show what engines store and fetch, what is evicted by order (evict), to make room (expel), and by others (lost).

    The server keeps the last 4,096 events; there is one for each command of an engine. Prompts are not among them.
    """
    start, boot, num = namespace_start(namespace), "", 0
    held: list[dict[str, Any]] = []
    with connect(server) as store:
        while True:
            found = store.ask("TKV.EVENTS", Select(since=since))
            if boot and found["boot"] != boot:  # another server: its numbers begin at 1
                boot, since = "", 0
                continue
            boot = found["boot"]
            if found["num_lost"]:
                click.echo(f"tierkv: {found['num_lost']:,} more came and went in between", err=True)
            shown = [
                e for e in found["events"] if (not kinds or e["kind"] in kinds) and e["namespace"].startswith(start)
            ]
            num += len(shown)
            caught_up = len(found["events"]) < MAX_REPLY
            since = found["last"]
            if limit:  # until all that is kept has come
                shown = held = (held + shown)[-limit:]
                limit = None if caught_up else limit
            for event in shown if not limit else ():
                _print(event, as_json)
            sys.stdout.flush()
            if caught_up and once:
                break
            if caught_up:
                time.sleep(interval)
    if not num:
        raise NothingMatchedError("no event that fits is kept; 'tierkv events' waits for the next")


def _print(event: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(event)
    elif not flag("quiet"):
        click.echo(line(event))


def line(event: dict[str, Any]) -> str:
    """Return an event in a line: when, what, of whom, where in the store, what became of the chunks, how long."""
    from tierkv.cli import render

    when = time.strftime("%H:%M:%S", time.localtime(event["when"])) + f".{int(event['when'] % 1 * 1000):03d}"
    chunks = " ".join(f"{name} {num:,}" for name, num in event["chunks"].items()) or "nothing"
    took = f"  {event['seconds'] * 1000:.1f} ms" if event["seconds"] else ""
    where = f"{event['namespace'][: render.NS_DIGITS]}/{event['id'] or '*'}"
    return render.clean(f"{when}  {event['kind']:<5}  {event['engine'] or '-':<16}  {where:<21}  {chunks}{took}")
