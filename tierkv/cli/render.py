"""Tables and words for people. Piped output is neither coloured nor cut."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from tierkv.cli.options import flag
from tierkv.sizes import format_size

#: Wide enough that nothing is cut where there is no terminal.
_PIPE_WIDTH = 100_000
#: Characters of a namespace's id in tables.
NS_DIGITS = 8


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the command line how a closed pipe ends."""
        raise BrokenPipeError


def console() -> Console:
    """Return a console on standard output that prints text as it is, and with ``--quiet`` nothing."""
    tty = sys.stdout.isatty()
    return _Console(
        quiet=flag("quiet"),
        no_color=True if flag("no_color") else None,
        force_terminal=tty,
        width=None if tty else _PIPE_WIDTH,
        markup=False,
        highlight=False,
        emoji=False,
        soft_wrap=False,
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, flexible: str = "") -> Table:
    """Return a table. A column named with a leading ``>`` is right-aligned.

    Args:
        columns: the columns' names.
        rows: their cells.
        flexible: the column that a narrow terminal may cut.
    """
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for column in columns:
        name = column.lstrip(">")
        cut = name == flexible
        made.add_column(
            name,
            justify="right" if column.startswith(">") else "left",
            no_wrap=True,
            overflow="ellipsis",
            min_width=8 if cut else None,
        )
    for row in rows:
        made.add_row(*(clean(cell) for cell in row))
    return made


def clean(text: str) -> str:
    """Return ``text`` without characters that steer a terminal: names come from stores that others write to."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def count(number: int) -> str:
    """Return a count with thousands apart."""
    return f"{number:,}"


def size(nbytes: float) -> str:
    """Return bytes for people."""
    return format_size(nbytes)


def span(seconds: float) -> str:
    """Return a time span in its largest unit.

    >>> span(200)
    '3 min'
    """
    for unit, unit_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= unit_s:
            return f"{int(seconds // unit_s)} {unit}"
    return f"{int(max(0.0, seconds))} s"


def age(when: float, now: float) -> str:
    """Return how long ago ``when`` was; ``never`` for 0."""
    if when <= 0:
        return "never"
    return "just now" if now - when < 1 else f"{span(now - when)} ago"


def until(when: float, now: float) -> str:
    """Return how far ahead ``when`` is; ``-`` for 0."""
    return "-" if when <= 0 else f"in {span(when - now)}" if when > now else "over"


def sizes(nbytes: Mapping[str, int], tiers: Sequence[str]) -> list[str]:
    """Return a cell for each of ``tiers``: its bytes, or ``-``."""
    return [size(nbytes[tier]) if tier in nbytes else "-" for tier in tiers]


def model_name(model: str) -> str:
    """Return the part of a model's name that tells it from others in a narrow column."""
    return model.rstrip("/").rsplit("/", 1)[-1]


def plural(number: int, noun: str) -> str:
    """Return a count with its noun.

    >>> plural(2, "prefix")
    '2 prefixes'
    """
    ending = "" if number == 1 else "es" if noun.endswith("x") else "s"
    return f"{number:,} {noun}{ending}"
