"""``tierkv evict``: remove a prefix, a prompt, what is old, a tenant or a namespace from the tiers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click
import msgspec

from tierkv.cli import IncompleteError, NothingMatchedError
from tierkv.cli.options import (
    Size,
    Span,
    Store,
    connect,
    hex_start,
    json_option,
    namespace_option,
    namespace_start,
    namespaces,
    print_json,
    prompt_options,
    server_option,
    tenant_option,
    tenant_start,
    tier_option,
)
from tierkv.cli.prompt import Prompt, PromptOptions, read_prompt
from tierkv.errors import ConfigError, RefusedError
from tierkv.selection import Select

_EXAMPLES = """\b
Examples:
  tierkv evict ccae6962a8f4 --dry-run           say what would go
  tierkv evict --tokens-file prompt.json        a prompt, from every tier and engine
  tierkv evict --unused-for 7d --tier disk --yes
  tierkv evict --free 50GiB --tier disk --yes   what was used longest ago goes first
  tierkv evict --namespace 7e2f --yes           a model's, all of it"""


@click.command("evict", epilog=_EXAMPLES)
@click.argument("prefix", metavar="[ID]", required=False)
@prompt_options
@namespace_option
@tenant_option
@click.option("--older-than", type=Span(), default=0.0, help="What was stored longer ago than TIME, such as 7d.")
@click.option("--unused-for", type=Span(), default=0.0, help="What was not used for TIME.")
@click.option("--free", type=Size(), default=0, help="What was used longest ago, until SIZE is free on the tiers.")
@tier_option
@click.option("--force", is_flag=True, help="Pinned chunks too.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@click.option("--yes", is_flag=True, help="Remove more than one prefix or prompt without asking.")
@json_option
@server_option
def command(
    prefix: str | None,
    given: PromptOptions,
    namespace: str | None,
    tenant: str,
    older_than: float,
    unused_for: float,
    free: int,
    tiers: tuple[str, ...],
    force: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    server: str | None,
) -> None:
    """Remove a stored prefix (by its ID), a prompt, or what the options pick out.

    A prefix goes with all that continues it; chunks that other prefixes share stay, so that those still hit. Options
    narrow each other down; --namespace alone is the whole namespace. The host pools of connected engines are included,
    and other nodes remove it too where disk and shared tier are both meant. What is pinned stays, unless --force.
    """
    prompt = read_prompt(given)
    if prefix is not None and prompt is not None:
        raise click.UsageError("an id and a prompt are both given; give one of them")
    select = Select(
        ns=namespace_start(namespace),
        prefix="" if prefix is None else hex_start(prefix, "id"),
        tenant=tenant_start(tenant),
        tiers=list(tiers),
        older_s=older_than,
        unused_s=unused_for,
        free_nbytes=free,
        force=force,
        dry_run=dry_run,
    )
    picks = bool(tenant or older_than or unused_for or free)
    if prefix is None and prompt is None and namespace is None and not picks:
        raise click.UsageError("nothing is named; give an id, a prompt (--tokens, --text, --chat) or --namespace")
    with connect(server) as store:
        select = _complete(store, select, prompt, picks, as_json)
        if prefix is None and prompt is None and not (dry_run or yes):
            _confirm(store, select, as_json)
        result = store.ask("TKV.EVICT", select)
    _show(result, as_json)
    _check(result, prefix, tiers)


def _complete(store: Store, select: Select, prompt: Prompt | None, picks: bool, as_json: bool) -> Select:
    """Return ``select`` with the keys of the prompt, or with the one namespace that is meant.

    Raises:
        NothingMatchedError, IncompleteError: there is nothing to remove.
        RefusedError: several namespaces are meant.
    """
    if prompt is not None:
        keys = prompt.keys(namespaces(store, select.ns))
        if not any(keys.values()):
            _nothing(store, _why_no_keys(keys), select.dry_run, as_json)
        return msgspec.structs.replace(select, keys=keys)
    if select.prefix or not select.ns:
        return select
    found = list(namespaces(store, select.ns))
    if not found:
        sentence = f"no namespace's id starts with {select.ns!r}; 'tierkv ns' lists them"
        _nothing(store, sentence, select.dry_run, as_json)
    return msgspec.structs.replace(select, ns=_one(found, select.ns), everything=not picks)


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


def _nothing(client: Store, sentence: str, dry_run: bool, as_json: bool) -> NoReturn:
    """Say that there is nothing to remove, or that a tier which is out could not be asked.

    Raises:
        NothingMatchedError, IncompleteError: always one of them.
    """
    tiers = client.ask("TKV.STAT")["tiers"]
    out = [f"the {tier['name']} tier is out ({tier['reason']})" for tier in tiers if tier["state"] == "out"]
    result = {"dry_run": dry_run, "prefixes": [], "removed": {}, "nbytes": {}, "num_removed": 0}
    result |= {"num_pinned": 0, "pinned": [], "incomplete": out}
    _show(result, as_json)
    if out:
        raise IncompleteError("not everything was reached: " + "; ".join(out) + "; evict again later")
    raise NothingMatchedError(sentence)


def _confirm(client: Store, select: Select, as_json: bool) -> None:
    """Ask whether more than one prefix is meant.

    Raises:
        ConfigError: there is nobody to ask.
        RefusedError: the answer is no.
    """
    what = f"the whole namespace {select.ns}" if select.everything else "all that fits"
    if as_json or not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError(f"{what} would be removed and nobody can be asked; look at --dry-run, and add --yes")
    from tierkv.cli import render

    plan = client.ask("TKV.EVICT", msgspec.structs.replace(select, dry_run=True))
    if not plan["num_removed"]:
        return
    amount = f"{render.plural(plan['num_removed'], 'chunk')} ({render.size(sum(plan['nbytes'].values()))})"
    of = f" of namespace {select.ns}" if select.ns else ""
    if not click.confirm(f"Remove {amount}{of} from {', '.join(plan['removed'])}?", err=True):
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
    if result["num_pinned"]:
        chunks = render.plural(result["num_pinned"], "chunk")
        console.print(f"{chunks} stayed: {_named(result['pinned'])} pinned; --force removes them too", soft_wrap=True)


def _named(ids: Sequence[str]) -> str:
    return ", ".join(ids[:8]) + (", ... are" if len(ids) > 8 else " is" if len(ids) == 1 else " are")


def _check(result: dict[str, Any], prefix: str | None, tiers: Sequence[str]) -> None:
    if result["incomplete"]:
        raise IncompleteError("not everything was reached: " + "; ".join(result["incomplete"]) + "; evict again later")
    if not result["num_removed"]:
        if result["num_pinned"]:
            raise RefusedError(
                f"nothing was removed: {_named(result['pinned'])} pinned; unpin with 'tierkv unpin ID', or add --force"
            )
        if tiers:
            raise NothingMatchedError(f"nothing that fits is in {', '.join(tiers)}; 'tierkv ls' shows what is where")
        raise NothingMatchedError(
            f"nothing stored fits the id {prefix!r}; 'tierkv ls' lists what is stored"
            if prefix is not None
            else "nothing stored fits; 'tierkv match' shows what is stored of a prompt, 'tierkv ls' all prefixes"
        )
