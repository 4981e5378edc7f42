"""What ``pin``, ``unpin`` and ``ttl`` share: naming one prefix, and saying what came of an order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
import msgspec

from tierkv.cli import IncompleteError, NothingMatchedError
from tierkv.cli.options import (
    connect,
    json_option,
    namespace_option,
    namespace_start,
    one_prefix,
    print_json,
    prompt_options,
    server_option,
)
from tierkv.selection import Select

F = TypeVar("F", bound=Callable[..., Any])
#: The tiers that have lifetimes: a host pool is an engine's own.
TIERS = ("disk", "shared")


def options(function: F) -> F:
    """Add what the three verbs take: the prefix, the tiers, ``--dry-run``, ``--json`` and the server."""
    for option in (
        server_option,
        json_option,
        click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing."),
        click.option(
            "--tier",
            "tiers",
            multiple=True,
            type=click.Choice(TIERS),
            help="Only this tier; repeatable [default: all].",
        ),
        namespace_option,
        prompt_options,
        click.argument("prefix", metavar="[ID]", required=False),
    ):
        function = option(function)
    return function


def order(command: str, given: dict[str, Any], select: Select) -> dict[str, Any]:
    """Send an order about the prefix that the options in ``given`` name, and return what came of it.

    Raises:
        click.UsageError: no prefix is named, or two.
        NothingMatchedError: it is not stored in a tier that has lifetimes.
    """
    start = namespace_start(given["namespace"])
    named = one_prefix(given["prefix"], given["given"])
    with connect(given["server"]) as store:
        meant = named.select(store, start)
        select = msgspec.structs.replace(
            select,
            ns=meant.ns,
            prefix=meant.prefix,
            keys=meant.keys,
            tiers=list(given["tiers"]) or _tiers_there(store),
            dry_run=given["dry_run"],
        )
        result: dict[str, Any] = store.ask(command, select)
    return result


def _tiers_there(store: Any) -> list[str]:
    return [tier["name"] for tier in store.ask("TKV.STAT")["tiers"] if tier["name"] in TIERS]


def show(result: dict[str, Any], as_json: bool, sentence: str) -> None:
    """Print what an order came to: ``sentence``, and a row a tier."""
    if as_json:
        print_json(result)
        return
    from tierkv.cli import render

    console = render.console()
    console.print(render.clean(sentence), soft_wrap=True)
    done = {} if result["dry_run"] else result["tiers"]
    rows = [
        (tier, render.count(num), render.size(result["nbytes"][tier]), render.count(done[tier]) if done else "-")
        for tier, num in result["stored"].items()
    ]
    console.print(render.table(("tier", ">stored", ">bytes", ">done"), rows))


def check(result: dict[str, Any], what: str) -> None:
    """See that something was there to be changed, and that every tier answered.

    Raises:
        IncompleteError, NothingMatchedError: one of that is not so.
    """
    if result["incomplete"]:
        raise IncompleteError("not everything was reached: " + "; ".join(result["incomplete"]) + "; do it again later")
    if not any(result["stored"].values()):
        raise NothingMatchedError(
            f"{result['id']} is in no tier that {what} holds in ({', '.join(result['stored'])}); "
            f"'tierkv show {result['id']}' says where it is"
        )
