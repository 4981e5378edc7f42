"""Work in steps: a bar on standard error while it lasts, and a bound on its rate."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import click
import msgspec

from tierkv.cli.options import Store, flag
from tierkv.selection import Select


def steps(store: Store, command: str, select: Select, label: str, rate: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the reply of each step of a command, with a progress bar where standard error is a terminal.

    Args:
        rate: bytes a second at most; 0: as fast as it goes.
    """
    shown = sys.stderr.isatty() and not flag("quiet")
    first: dict[str, Any] = store.ask(command, select)
    bar: Any = click.progressbar(length=first["num_total"], label=label, file=sys.stderr) if shown else nullcontext()
    with bar as progress:
        reply, before = first, 0
        started, nbytes = time.monotonic(), 0
        while True:
            if progress is not None:
                progress.update(reply["num_done"] - before)
            before = reply["num_done"]
            yield reply
            if not reply["cursor"]:
                return
            nbytes += reply["nbytes"]
            if rate:
                time.sleep(max(0.0, started + nbytes / rate - time.monotonic()))
            reply = store.ask(command, msgspec.structs.replace(select, cursor=reply["cursor"]))
