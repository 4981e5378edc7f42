"""``tierkv evict``: remove a prefix, a prompt or a namespace from the tiers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click
import msgspec

from tierkv.cli import IncompleteError, NothingMatchedError
from tierkv.cli.options import (
    connect,
    hex_start,
    json_option,
    namespace_option,
    namespace_start,
    namespaces,
    print_json,
    prompt_options,
    server_option,
    tier_option,
)
from tierkv.cli.prompt import read_prompt
from tierkv.client import AdminClient
from tierkv.errors import ConfigError, RefusedError
from tierkv.messages import Select


@click.command("evict")
@click.argument("prefix", metavar="[ID]", required=False)
@prompt_options
@namespace_option
@tier_option
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@click.option("--yes", is_flag=True, help="Remove a whole namespace without asking.")
@json_option
@server_option
def command(
    prefix: str | None,
    tokens: str | None,
    tokens_file: str | None,
    salt: str | None,
    salt_file: str | None,
    namespace: str | None,
    tiers: tuple[str, ...],
    dry_run: bool,
    yes: bool,
    as_json: bool,
    server: str | None,
) -> None:
    """Remove a stored prefix (by its ID), a prompt (by its token ids) or, with --namespace alone, a whole namespace.

    A prefix goes with all that continues it; chunks that other prefixes share stay, so that those still hit.
    The host pools of connected engines are included.
    """
    start = namespace_start(namespace)
    prompt = read_prompt(tokens, tokens_file, salt, salt_file)
    if prefix is not None and prompt is not None:
        raise click.UsageError("an id and a prompt are both given; give one of them")
    if prefix is None and prompt is None and namespace is None:
        raise click.UsageError("nothing is named; give an id, --tokens, --tokens-file or --namespace")
    select = Select(ns=start, tiers=list(tiers), dry_run=dry_run)
    with connect(server) as client:
        if prefix is not None:
            select = msgspec.structs.replace(select, prefix=hex_start(prefix, "id"))
        elif prompt is not None:
            keys = prompt.keys(namespaces(client, start))
            if not any(keys.values()):
                _nothing(client, _why_no_keys(keys), dry_run, as_json)
            select = msgspec.structs.replace(select, keys=keys)
        else:
            found = list(namespaces(client, start))
            if not found:
                _nothing(client, f"no namespace's id starts with {start!r}; 'tierkv stat' lists them", dry_run, as_json)
            select = msgspec.structs.replace(select, ns=_one(found, start), everything=True)
            if not (dry_run or yes):
                _confirm(client, select, as_json)
        result = client.ask("TKV.EVICT", select)
    _show(result, as_json)
    _check(result, prefix, tiers)


def _why_no_keys(keys: dict[str, list[str]]) -> str:
    if not keys:
        return "nothing is stored here; 'tierkv ls' lists what is"
    return "the prompt has no whole chunk in any namespace, so nothing of it is stored"


def _one(found: Sequence[str], start: str) -> str:
    """Return the one namespace that was found.

    Raises:
        RefusedError: there are several.
    """
    if len(found) > 1:
        raise RefusedError(f"{len(found)} namespaces start with {start!r}; write more digits of the id")
    return found[0]


def _nothing(client: AdminClient, sentence: str, dry_run: bool, as_json: bool) -> NoReturn:
    """Say that there is nothing to remove, or that a tier which is out could not be asked.

    Raises:
        NothingMatchedError, IncompleteError: always one of them.
    """
    tiers = client.ask("TKV.STAT")["tiers"]
    out = [f"the {tier['name']} tier is out ({tier['reason']})" for tier in tiers if tier["state"] == "out"]
    result = {"dry_run": dry_run, "prefixes": [], "removed": {}, "nbytes": {}, "num_removed": 0, "incomplete": out}
    _show(result, as_json)
    if out:
        raise IncompleteError("not everything was reached: " + "; ".join(out) + "; evict again later")
    raise NothingMatchedError(sentence)


def _confirm(client: AdminClient, select: Select, as_json: bool) -> None:
    """Ask whether a whole namespace is meant.

    Raises:
        ConfigError: there is nobody to ask.
        RefusedError: the answer is no.
    """
    if as_json or not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError(f"the whole namespace {select.ns} would be removed and nobody can be asked; add --yes")
    from tierkv.cli import render

    plan = client.ask("TKV.EVICT", msgspec.structs.replace(select, dry_run=True))
    amount = f"{render.plural(plan['num_removed'], 'chunk')} ({render.size(sum(plan['nbytes'].values()))})"
    if not click.confirm(f"Remove {amount} of namespace {select.ns} from {', '.join(plan['removed'])}?", err=True):
        raise RefusedError("nothing was removed: you did not say yes")


def _show(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(result)
        return
    if not result["num_removed"]:
        return
    from tierkv.cli import render

    would = "Would remove" if result["dry_run"] else "Removed"
    ids = result["prefixes"]
    more = f" and {len(ids) - 8:,} more" if len(ids) > 8 else ""
    console = render.console()
    console.print(f"{would} {render.plural(len(ids), 'prefix')}: {', '.join(ids[:8])}{more}", soft_wrap=True)
    rows = [(tier, render.count(n), render.size(result["nbytes"][tier])) for tier, n in result["removed"].items()]
    console.print(render.table(("tier", ">chunks", ">bytes"), rows))


def _check(result: dict[str, Any], prefix: str | None, tiers: Sequence[str]) -> None:
    if result["incomplete"]:
        raise IncompleteError("not everything was reached: " + "; ".join(result["incomplete"]) + "; evict again later")
    if not result["num_removed"]:
        if tiers:
            raise NothingMatchedError(f"nothing that fits is in {', '.join(tiers)}; 'tierkv ls' shows what is where")
        raise NothingMatchedError(
            f"nothing stored fits the id {prefix!r}; 'tierkv ls' lists what is stored"
            if prefix is not None
            else "nothing stored fits; 'tierkv match' shows what is stored of a prompt, 'tierkv ls' all prefixes"
        )
