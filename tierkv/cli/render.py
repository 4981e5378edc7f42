"""Tables and words for people. Piped output is neither coloured nor cut."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.style import Style

from tierkv.cli.options import flag
from tierkv.sizes import format_size

#: Wide enough that nothing is cut where there is no terminal.
_PIPE_WIDTH = 100_000
#: Characters of a namespace's id in tables.
NS_DIGITS = 8
_HEAD = Style(bold=True)
#: Between two columns.
_GAP = "  "
#: What a column that may be cut keeps.
_MIN_CUT = 8


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the command line how a closed pipe ends."""
        raise BrokenPipeError

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does, but a table at once: rich would look at each of its lines again."""
        if len(objects) != 1 or not isinstance(objects[0], Grid):
            super().print(*objects, **options)
        elif not self.quiet:
            self.file.write("\n".join(self._lines(objects[0])) + "\n")

    def _lines(self, grid: Grid) -> list[str]:
        if not self.is_terminal:
            return grid.lines(_PIPE_WIDTH)
        head, *lines = [
            line if _width(line) <= self.width else set_cell_size(line, self.width) for line in grid.lines(self.width)
        ]
        return [f"\x1b[1m{head}\x1b[0m" if self.color_system else head, *lines]


def console() -> Console:
    """Return a console on standard output that prints text as it is, and with ``--quiet`` nothing."""
    tty = sys.stdout.isatty()
    return _Console(
        quiet=flag("quiet"),
        color_system=None if flag("no_color") else "auto",
        force_terminal=tty,
        width=None if tty else _PIPE_WIDTH,
        markup=False,
        highlight=False,
        emoji=False,
        soft_wrap=False,
    )


class Grid:
    """A table. rich's own takes half a millisecond a row; listings have a hundred thousand."""

    def __init__(self, columns: Sequence[str], rows: Sequence[Sequence[str]], flexible: str) -> None:
        self._names = [column.lstrip(">") for column in columns]
        self._right = [column.startswith(">") for column in columns]
        self._rows = rows
        self._flexible = self._names.index(flexible) if flexible else -1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        head, *lines = self.lines(options.max_width)
        yield Segment(head + "\n", _HEAD)
        yield Segment("\n".join(lines) + "\n")

    def lines(self, width: int) -> list[str]:
        """Return the table's lines, the column that may be cut so that they fit into ``width``."""
        widths = [len(name) for name in self._names]
        for i in range(len(widths)):
            widths[i] = max([widths[i], *[_width(row[i]) for row in self._rows]])
        spare = width - sum(widths) - len(_GAP) * (len(widths) - 1)
        if self._flexible >= 0 and spare < 0:
            widths[self._flexible] = max(_MIN_CUT, widths[self._flexible] + spare)
        rule = "─" * (sum(widths) + len(_GAP) * (len(widths) - 1))
        return [self._line(self._names, widths), rule, *[self._line(row, widths) for row in self._rows]]

    def _line(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        padded = []
        for cell, width, right in zip(cells, widths, self._right, strict=True):
            blank = " " * (width - _width(cell))
            padded.append(blank + cell if right else cell + blank)
        if self._flexible >= 0 and _width(cells[self._flexible]) > widths[self._flexible]:
            padded[self._flexible] = set_cell_size(cells[self._flexible], widths[self._flexible] - 1) + "…"
        return _GAP.join(padded).rstrip()


def _width(text: str) -> int:
    return len(text) if text.isascii() else cell_len(text)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, flexible: str = "") -> Grid:
    """Return a table. A column named with a leading ``>`` is right-aligned.

    Args:
        columns: the columns' names.
        rows: their cells.
        flexible: the column that a narrow terminal may cut.
    """
    return Grid(columns, [[clean(cell) for cell in row] for row in rows], flexible)


def clean(text: str) -> str:
    """Return ``text`` without characters that steer a terminal: names come from stores that others write to."""
    if text.isprintable():
        return text
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
