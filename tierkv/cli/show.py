"""``tierkv show``: a stored prefix, chunk by chunk."""

from __future__ import annotations

import time
from typing import Any

import click

from tierkv.cli.options import (
    TIERS,
    connect,
    json_option,
    namespace_option,
    namespace_start,
    offline_options,
    one_prefix,
    print_json,
    prompt_options,
    server_option,
)
from tierkv.cli.prompt import PromptOptions

_EXAMPLES = """\b
Examples:
  tierkv show ccae6962a8f4
  tierkv show --tokens-file prompt.json --salt alice
  tierkv show ccae --json | jq '.chunks[] | select(.tiers == ["shared"]) | .id'"""


@click.command("show", epilog=_EXAMPLES)
@click.argument("prefix", metavar="[ID]", required=False)
@prompt_options
@namespace_option
@json_option
@offline_options
@server_option
def command(
    prefix: str | None,
    given: PromptOptions,
    namespace: str | None,
    as_json: bool,
    server: str | None,
) -> None:
    """Show a stored prefix chunk by chunk: where each is, its bytes, hits, ages, expiry and pins.

    Payloads are not read: 'tierkv verify ID' does that.
    """
    start = namespace_start(namespace)
    named = one_prefix(prefix, given)
    with connect(server) as store:
        found = store.ask("TKV.SHOW", named.select(store, start))
    if as_json:
        print_json(found)
    else:
        _print(found)


def _print(found: dict[str, Any]) -> None:
    from tierkv.cli import render

    console, now, chunks = render.console(), time.time(), found["chunks"]
    missing = found["depth_chunks"] - found["num_stored"]
    tokens = found["chunk_tokens"] * (found["depth_chunks"] - 1) + chunks[-1]["tokens"]
    lines = [
        f"{found['id']}: {render.plural(found['num_stored'], 'chunk')} of {render.plural(tokens, 'token')}, "
        + ", ".join(f"{render.size(nbytes)} {tier}" for tier, nbytes in found["nbytes"].items()),
        f"namespace {found['namespace']} {found['model']}",
        f"tenant {found['tenant'] or 'none'}",
    ]
    if missing:
        them = f"{render.plural(missing, 'chunk')} before the first of these"
        are, back = ("is", "that is") if missing == 1 else ("are", "those are")
        lines.append(f"{them} {are} missing: it cannot be hit until {back} back")
    for line in lines:
        console.print(render.clean(line), soft_wrap=True)
    console.print()
    tiers = [tier for tier in TIERS if tier in found["nbytes"]]
    cells = [
        (
            str(chunk["position"]),
            chunk["id"],
            str(chunk["tokens"]),
            *render.sizes(chunk["nbytes"], tiers),
            render.count(chunk["hits"]),
            render.age(chunk["created"], now) if chunk["created"] else "-",
            render.age(chunk["last_used"], now),
            _expiry(chunk["expires"], now),
            " ".join(f"{pin['owner']}:{render.until(pin['until'], now)}" for pin in chunk["pins"]) or "-",
        )
        for chunk in chunks
    ]
    columns = (
        ">chunk",
        "id",
        ">tokens",
        *(f">{tier}" for tier in tiers),
        ">hits",
        "stored",
        "last access",
        "expires",
        "pins",
    )
    console.print(render.table(columns, cells, flexible="pins"))


def _expiry(expires: dict[str, float], now: float) -> str:
    """Return when the chunk expires, by tier where that differs."""
    from tierkv.cli import render

    times = {tier: render.until(when, now) for tier, when in expires.items()}
    if len(set(times.values())) <= 1:
        return next(iter(times.values()), "-")
    return " ".join(f"{tier}:{when}" for tier, when in times.items())
