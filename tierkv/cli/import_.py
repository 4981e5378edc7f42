"""``tierkv import``: prefixes from a safetensors file into a store."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tierkv.cli.options import connect, flag, json_option, namespaces, print_json, server_option
from tierkv.errors import RefusedError

if TYPE_CHECKING:
    from tierkv.exchange import Reader
    from tierkv.layout import Namespace

_EXAMPLES = """\b
Examples:
  tierkv import prompt.safetensors --dry-run    check the file and whether it fits
  tierkv import prompt.safetensors"""


@click.command("import", epilog=_EXAMPLES)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--any-layout", is_flag=True, help="Also where engines here keep this model in another layout.")
@click.option("--dry-run", is_flag=True, help="Check the file and whether it fits, and store nothing.")
@json_option
@server_option
def command(file: Path, any_layout: bool, dry_run: bool, as_json: bool, server: str | None) -> None:
    """Store the prefixes in FILE, which 'tierkv export' wrote, on the server's disk.

    Every payload is checked against its checksum, here and in the server. A file is refused where the server knows its
    model in other layouts only: no engine would ever find it. Import files of people you trust: a payload that was
    made up with a right checksum is not told from one that was computed.
    """
    from tierkv.exchange import Reader

    reader = Reader(file)
    try:
        with connect(server) as store:
            if not any_layout:
                check_fits(reader.namespace, namespaces(store, ""))
            replies = _restore(store, reader, dry_run)
    finally:
        reader.close()
    num_there = replies.count(b"EXISTS")
    nbytes = (len(replies) - num_there) * reader.namespace.payload_nbytes
    result = {
        "dry_run": dry_run,
        "file": str(file),
        "namespace": reader.namespace.ns_id().hex(),
        "model": reader.namespace.model,
        "num_chunks": len(reader.chunks),
        "num_stored": len(replies) - num_there,
        "num_there": num_there,
        "nbytes": nbytes,
    }
    if as_json:
        print_json(result)
    elif not flag("quiet"):
        from tierkv.cli import render

        would = "Would store up to" if dry_run else "Stored"
        chunks = f"{render.plural(len(replies) - num_there, 'chunk')} ({render.size(nbytes)})"
        there = f"; {num_there:,} were there" if num_there else ""
        click.echo(render.clean(f"{would} {chunks} of {reader.namespace.model}{there}"))


def _restore(store: Any, reader: Reader, dry_run: bool) -> list[bytes]:
    """Store every record and return the server's replies; with ``dry_run`` read and check the file alone."""
    described, replies = reader.namespace.to_json(), []
    shown = sys.stderr.isatty() and not flag("quiet")
    records: Any = reader.records()
    bar: Any = nullcontext(records)
    if shown:
        bar = click.progressbar(records, length=len(reader.chunks), label="Importing", file=sys.stderr)
    with bar as todo:
        for record in todo:
            replies.append(b"OK" if dry_run else store.call("TKV.RESTORE", described, record))
    return replies


def check_fits(namespace: Namespace, known: Mapping[str, Namespace], what: str = "the file's chunks") -> None:
    """See that an engine of the store could find what is imported.

    Raises:
        RefusedError: the store has this model in other layouts only.
    """
    if namespace.ns_id().hex() in known:
        return
    others = [other for other in known.values() if other.identity == namespace.identity]
    if others:
        theirs, ours = (f"{n.layout.describe()}, parts {n.shard.num_parts}" for n in (namespace, others[0]))
        raise RefusedError(
            f"{what} do not fit: they are {theirs}, and this store has the model as {ours}; "
            f"--any-layout stores them all the same"
        )
