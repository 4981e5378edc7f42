"""Charts as inline SVG: no script, colours by class, so that one picture serves light, dark and paper."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from tierkv.sizes import format_size

#: Of a picture that has half a page's width, and of one that has all of it; their height.
NARROW, WIDE = 640, 1180
_HEIGHT = 280
_X0, _RIGHT, _Y0, _Y1 = 46, 14, _HEIGHT - 30, 26


class Line(NamedTuple):
    """One line of a curve chart: a class, a name, and its y values (shares)."""

    css: str
    name: str
    rates: Sequence[float]


class Bar(NamedTuple):
    """One stacked bar: its text on the axis (or none), what is shown over it, and a share for each class."""

    label: str
    about: str
    shares: Mapping[str, float]


def text_of(value: object) -> str:
    """Return text for a page: escaped, and without characters that nobody sees."""
    return escape("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value)))


def curve(name: str, summary: str, sizes: Sequence[int], lines: Sequence[Line], budget: int) -> str:
    """Return hit rates by size, the present size marked.

    Args:
        name: of the picture.
        summary: the same in words, for those who do not see it.
        sizes: bytes, ascending, more than one.
        lines: the last one is drawn on top, and has a dot at the present size.
        budget: the present size.
    """
    low, high, right = math.log2(sizes[0]), math.log2(sizes[-1]), NARROW - _RIGHT

    def x(nbytes: float) -> float:
        return _X0 + (right - _X0) * (math.log2(nbytes) - low) / (high - low)

    top = _nice_top(max(max(line.rates) for line in lines))

    def y(rate: float) -> float:
        return _Y0 - (_Y0 - _Y1) * min(1.0, rate / top)

    parts = [_y_axis(top, right)]
    for times in (1 / 64, 1 / 16, 1 / 4, 1, 2, 8):
        at = x(min(max(budget * times, sizes[0]), sizes[-1]))
        anchor = "end" if times == 8 else "start" if times == 1 / 64 else "middle"
        label = text_of(format_size(budget * times))
        mark = " now" if times == 1 else ""
        parts.append(f'<line class="tick" x1="{at:.1f}" y1="{_Y0}" x2="{at:.1f}" y2="{_Y0 + 4}"/>')
        parts.append(f'<text class="x{mark}" x="{at:.1f}" y="{_Y0 + 18}" text-anchor="{anchor}">{label}</text>')
    now = x(budget)
    parts.append(f'<line class="mark" x1="{now:.1f}" y1="{_Y1 - 6}" x2="{now:.1f}" y2="{_Y0}"/>')
    parts.append(f'<text class="now" x="{now:.1f}" y="{_Y1 - 12}" text-anchor="middle">now</text>')
    for line in lines:
        points = " ".join(f"{x(size):.1f},{y(rate):.1f}" for size, rate in zip(sizes, line.rates, strict=True))
        parts.append(f'<polyline class="{line.css}" points="{points}"><title>{text_of(line.name)}</title></polyline>')
    for size, rate in zip(sizes, lines[-1].rates, strict=True):
        about = text_of(f"{format_size(size)}: {100 * rate:.1f} %")
        css = "dot" if size == budget else "spot"
        radius = 5 if size == budget else 7
        parts.append(
            f'<circle class="{css} {lines[-1].css}" cx="{x(size):.1f}" cy="{y(rate):.1f}" r="{radius}">'
            f"<title>{about}</title></circle>"
        )
    return _svg(name, summary, NARROW, parts)


def bars(name: str, summary: str, columns: Sequence[Bar], top: float | None = None, width: int = NARROW) -> str:
    """Return stacked bars, the first class of each at the bottom.

    Args:
        top: the share at the top of the axis; by default a round one above the highest bar.
        width: of the picture.
    """
    right = width - _RIGHT
    top = top or _nice_top(max(sum(column.shares.values()) for column in columns))
    step = (right - _X0) / len(columns)
    thick = max(1.0, step - (1 if len(columns) > 40 else 3))
    parts = [_y_axis(top, right)]
    for i, column in enumerate(columns):
        left, base = _X0 + i * step + (step - thick) / 2, float(_Y0)
        rects = []
        for css, share in column.shares.items():
            height = (_Y0 - _Y1) * min(1.0, share / top)
            if height > 0.05:
                base -= height
                rects.append(
                    f'<rect class="bar {css}" x="{left:.1f}" y="{base:.1f}" width="{thick:.1f}" height="{height:.1f}"/>'
                )
        parts.append(f"<g><title>{text_of(column.about)}</title>{''.join(rects)}</g>")
        if column.label:
            at = min(max(left + thick / 2, _X0 + 16), right - 16)
            parts.append(
                f'<text class="x" x="{at:.1f}" y="{_Y0 + 18}" text-anchor="middle">{text_of(column.label)}</text>'
            )
    return _svg(name, summary, width, parts)


def _svg(name: str, summary: str, width: int, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    label = text_of(f"{name}. {summary}")
    return f'<svg role="img" viewBox="0 0 {width} {_HEIGHT}" aria-label="{label}">\n{body}\n</svg>'


def _y_axis(top: float, right: float) -> str:
    parts = []
    for i in range(5):
        share = top * i / 4
        at = _Y0 - (_Y0 - _Y1) * i / 4
        digits = 0 if top >= 0.2 else 1
        parts.append(f'<line class="grid" x1="{_X0}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{_X0 - 6}" y="{at + 4:.1f}" text-anchor="end">{100 * share:.{digits}f} %</text>')
    return "\n".join(parts)


def _nice_top(highest: float) -> float:
    """Return a round share at or above ``highest``, of which a quarter is round too."""
    return next((top for top in (0.02, 0.04, 0.08, 0.2, 0.4, 0.6, 0.8) if highest <= top), 1.0)
