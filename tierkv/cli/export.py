"""``tierkv export``: stored prefixes into a safetensors file."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from tierkv.cli import NothingMatchedError
from tierkv.cli.options import (
    connect,
    flag,
    hex_start,
    json_option,
    namespace_option,
    namespace_start,
    namespaces,
    print_json,
    server_option,
)
from tierkv.errors import ConfigError, NotFoundError, RefusedError
from tierkv.selection import Select

_EXAMPLES = """\b
Examples:
  tierkv export prompt.safetensors ccae6962a8f4
  tierkv export two.safetensors ccae6962a8f4 bc02eb16bdd7"""


@click.command("export", epilog=_EXAMPLES)
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("prefixes", metavar="ID...", nargs=-1, required=True)
@namespace_option
@json_option
@server_option
def command(file: Path, prefixes: tuple[str, ...], namespace: str | None, as_json: bool, server: str | None) -> None:
    """Write stored prefixes of one namespace, their ancestors included, to FILE (safetensors).

    Payloads come from the disk or the shared tier and are verified; what is in host pools alone is not to be had.
    The file holds what was computed from prompts: treat it like them.
    """
    ids = [hex_start(prefix, "id") for prefix in prefixes]
    start = namespace_start(namespace)
    with connect(server) as store:
        shown = [store.ask("TKV.SHOW", Select(ns=start, prefix=prefix)) for prefix in ids]
        spaces = sorted({found["namespace"] for found in shown})
        if len(spaces) > 1:
            raise RefusedError(f"these prefixes are of {len(spaces)} namespaces; export each namespace's apart")
        chunks = {chunk["key"]: chunk for found in shown for chunk in found["chunks"]}
        missing = [c for c in chunks.values() if not {"disk", "shared"} & set(c["tiers"])]
        if missing:
            raise NothingMatchedError(
                f"{len(missing):,} of {len(chunks):,} chunks are in host pools alone, which are not exported"
            )
        about = namespaces(store, spaces[0])[spaces[0]]
        ordered = sorted(chunks.values(), key=lambda chunk: (chunk["position"], chunk["key"]))
        nbytes = _write(store, file, about, ordered)
    if as_json:
        print_json({"file": str(file), "namespace": spaces[0], "num_chunks": len(ordered), "nbytes": nbytes})
    elif not flag("quiet"):
        from tierkv.cli import render

        click.echo(f"Wrote {render.plural(len(ordered), 'chunk')} ({render.size(nbytes)}) to {file}")


def _write(store: Any, file: Path, namespace: Any, chunks: list[dict[str, Any]]) -> int:
    """Write the file and return its payloads' bytes.

    Raises:
        ConfigError: it cannot be written.
        NotFoundError: a chunk went meanwhile.
    """
    from tierkv.exchange import Writer
    from tierkv.payload import BadRecordError

    try:
        writer = Writer(file, namespace, len(chunks))
        shown = sys.stderr.isatty() and not flag("quiet")
        bar: Any = click.progressbar(chunks, label="Exporting", file=sys.stderr) if shown else nullcontext(chunks)
        try:
            with bar as todo:
                for chunk in todo:
                    key, anchor = bytes.fromhex(chunk["key"]), bytes.fromhex(chunk["anchor"])
                    writer.add(memoryview(store.call("TKV.DUMP", namespace.ns_id(), key, anchor)))
            writer.finish()
        finally:
            writer.give_up()
    except NotFoundError as error:
        raise NotFoundError(f"{error} any more: nothing was written; try again") from None
    except BadRecordError as error:
        raise RefusedError(f"nothing was written: {error}; see 'tierkv verify'") from None
    except OSError as error:
        raise ConfigError(f"{str(file)!r} cannot be written: {error.strerror}; name a file where you can") from None
    return len(chunks) * int(namespace.payload_nbytes)
