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
from tierkv.cli.prompt import PromptOptions, read_prompt
from tierkv.selection import Select

_EXAMPLES = """\b
Examples:
  tierkv match --tokens-file prompt.json
  tierkv match --text-file system-prompt.txt
  tierkv match --chat request.json --engine http://localhost:8000
  tierkv match --tokens 1,2,3 --salt alice --json | jq '.namespaces[0].tokens_loadable'"""


@click.command("match", epilog=_EXAMPLES)
@prompt_options
@namespace_option
@json_option
@offline_options
@server_option
def command(
    given: PromptOptions,
    namespace: str | None,
    as_json: bool,
    server: str | None,
) -> None:
    """Show how much of a prompt is stored in each namespace and where, how much of it an engine would load, and why it
    stops there.

    The prompt is given as token ids, as text or as a chat, whose token ids the tokenizer of the namespace's model
    makes, or a running engine (--engine). Looks and changes nothing: no use is noted, nothing is moved.
    """
    start = namespace_start(namespace)
    prompt = read_prompt(given)
    if prompt is None:
        raise click.UsageError("no prompt is given; give it with --tokens, --text or --chat")
    with connect(server) as client:
        known = namespaces(client, start)
        rows = client.ask("TKV.LOCATE", Select(keys=prompt.keys(known))) if known else []
    for row in rows:
        row["tokens"] = len(prompt.tokens(known[row["namespace"]]))
        row["tokens_loadable"] = _loadable(row)
    rows.sort(key=lambda row: (-row["tokens_stored"], row["namespace"]))
    lengths = {row["tokens"] for row in rows}
    if as_json:
        print_json({"tokens": max(lengths, default=prompt.num_given), "namespaces": rows})
    elif rows:
        _print(rows)
    if not any(row["num_stored"] for row in rows):
        raise NothingMatchedError(_why_nothing(rows, start))


def _loadable(row: dict[str, Any]) -> int:
    """Return the tokens that an engine would load: whole chunks, and never the last token, which it computes."""
    size: int = row["chunk_tokens"]
    stored, num_tokens = int(row["num_stored"]), int(row["tokens"])
    return min(stored, max(0, num_tokens - 1) // size) * size


def _why_nothing(rows: Sequence[dict[str, Any]], start: str) -> str:
    if not rows and start:
        return f"no namespace's id starts with {start!r}; 'tierkv stat' lists them"
    if not rows:
        return "nothing is stored here; 'tierkv ls' lists what is"
    best = max(rows, key=lambda row: row["tokens"] - row["chunk_tokens"])
    if best["tokens"] < best["chunk_tokens"]:
        return (
            f"the prompt's {best['tokens']} tokens are fewer than a chunk of {best['chunk_tokens']}; "
            f"only whole chunks are stored"
        )
    return "nothing of this prompt is stored; check its token ids, and its tenant's --salt"


def _print(rows: Sequence[dict[str, Any]]) -> None:
    from tierkv.cli import render

    cells = [
        (
            f"{row['namespace'][: render.NS_DIGITS]} {render.model_name(row['model'])}",
            f"{row['num_stored']:,} of {row['num_chunks']:,}",
            f"{row['tokens_loadable']:,} of {row['tokens']:,}",
            _where(row),
            _why(row),
        )
        for row in rows
    ]
    render.console().print(
        render.table(
            ("namespace", ">chunks", ">tokens loaded", "where (chunks)", "ends because"),
            cells,
            flexible="where (chunks)",
        )
    )


def _where(row: dict[str, Any]) -> str:
    """Return the runs of the stored chunks with their tiers, and where they stop."""
    stored = [",".join(chunk["tiers"]) for chunk in row["chunks"][: row["num_stored"]]]
    words, at = [], 0
    for tiers, run in groupby(stored):
        end = at + len(list(run)) - 1
        words.append(f"{at}-{end} {tiers}" if end > at else f"{at} {tiers}")
        at = end + 1
    return "; ".join(words)


def _why(row: dict[str, Any]) -> str:
    """Return why an engine would load no more than it would."""
    size, stored = row["chunk_tokens"], row["tokens_stored"]
    if row["num_stored"] < row["num_chunks"]:
        return f"chunk {row['num_stored']} is not stored"
    if row["tokens_loadable"] < stored:
        return "the last token is computed, with its chunk"
    rest = row["tokens"] - stored
    return f"the last {rest} tokens are no whole chunk of {size}" if rest > 1 else "the last token is computed"
