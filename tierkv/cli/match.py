"""``tierkv match``: how much of a prompt is stored, and where."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import click

from tierkv.cli import NothingMatchedError
from tierkv.cli.options import (
    connect,
    json_option,
    namespace_option,
    namespace_start,
    namespaces,
    offline_options,
    print_json,
    prompt_options,
    server_option,
)
from tierkv.cli.prompt import read_prompt
from tierkv.selection import Select

_EXAMPLES = """\b
Examples:
  tierkv match --tokens-file prompt.json
  tierkv match --tokens 1,2,3 --salt alice --json | jq '.namespaces[0].tokens_stored'"""


@click.command("match", epilog=_EXAMPLES)
@prompt_options
@namespace_option
@json_option
@offline_options
@server_option
def command(
    tokens: str | None,
    tokens_file: str | None,
    salt: str | None,
    salt_file: str | None,
    namespace: str | None,
    as_json: bool,
    server: str | None,
) -> None:
    """Show how much of a prompt, given as token ids, is stored in each namespace, and where.

    Looks and changes nothing: no use is noted, nothing is moved.
    """
    start = namespace_start(namespace)
    prompt = read_prompt(tokens, tokens_file, salt, salt_file)
    if prompt is None:
        raise click.UsageError("no prompt is given; give its token ids with --tokens or --tokens-file")
    with connect(server) as client:
        known = namespaces(client, start)
        rows = client.ask("TKV.LOCATE", Select(keys=prompt.keys(known))) if known else []
    rows.sort(key=lambda row: (-row["tokens_stored"], row["namespace"]))
    if as_json:
        print_json({"tokens": len(prompt.tokens), "namespaces": rows})
    elif rows:
        _print(rows, len(prompt.tokens))
    if not any(row["num_stored"] for row in rows):
        raise NothingMatchedError(_why_nothing(rows, len(prompt.tokens), start))


def _why_nothing(rows: Sequence[dict[str, Any]], num_tokens: int, start: str) -> str:
    if not rows and start:
        return f"no namespace's id starts with {start!r}; 'tierkv stat' lists them"
    if not rows:
        return "nothing is stored here; 'tierkv ls' lists what is"
    smallest = min(row["chunk_tokens"] for row in rows)
    if num_tokens < smallest:
        return f"the prompt's {num_tokens} tokens are fewer than a chunk of {smallest}; only whole chunks are stored"
    return "nothing of this prompt is stored; check its token ids, and its tenant's --salt"


def _print(rows: Sequence[dict[str, Any]], num_tokens: int) -> None:
    from tierkv.cli import render

    cells = [
        (
            f"{row['namespace'][: render.NS_DIGITS]} {render.model_name(row['model'])}",
            f"{row['num_stored']:,} of {row['num_chunks']:,}",
            f"{row['tokens_stored']:,} of {num_tokens:,}",
            _where(row),
        )
        for row in rows
    ]
    render.console().print(
        render.table(("namespace", ">chunks", ">tokens", "where (chunks)"), cells, flexible="where (chunks)")
    )


def _where(row: dict[str, Any]) -> str:
    """Return the runs of the stored chunks with their tiers, and where they stop."""
    stored = [",".join(chunk["tiers"]) for chunk in row["chunks"][: row["num_stored"]]]
    words, at = [], 0
    for tiers, run in groupby(stored):
        end = at + len(list(run)) - 1
        words.append(f"{at}-{end} {tiers}" if end > at else f"{at} {tiers}")
        at = end + 1
    if row["num_stored"] < row["num_chunks"]:
        words.append(f"{row['num_stored']} not stored")
    return "; ".join(words)
