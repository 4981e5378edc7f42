"""A plot of hit rate and writes by size, as an SVG by hand: no plotting library is needed for a dozen lines."""

from __future__ import annotations

from math import log10
from pathlib import Path
from typing import Any

_WIDTH, _HEIGHT, _LEFT, _TOP = 400, 300, 50, 40
_COLOURS = {
    "learned": "#c0392b", "belady": "#222222", "lru": "#2471a3", "s3fifo": "#7fb3d5", "fifo": "#b0b0b0",
    "lru-blocks": "#85929e", "arc": "#229954", "s3fifo-blocks": "#d4ac0d", "sieve": "#af7ac5", "w-tinylfu": "#e67e22",
}  # fmt: skip


def write_plot(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write hit rate (left) and writes per block (right) over the size in blocks, a line a policy."""
    names = list(dict.fromkeys(row["policy"] for row in rows))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * (_WIDTH + _LEFT) + 150} {_HEIGHT + 2 * _TOP}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    hits = {n: [(r["blocks"], 100 * r["hit_rate"]) for r in rows if r["policy"] == n] for n in names}
    writes = {n: [(r["blocks"], r["writes_per_block"][0]) for r in rows if r["policy"] == n] for n in names}
    parts += _panel(_LEFT, "leading-run hit rate, %", hits, 1)
    parts += _panel(_LEFT + _WIDTH + _LEFT, "writes per block presented", writes, 2)
    for i, name in enumerate(names):
        x, y = 2 * (_WIDTH + _LEFT) + 15, _TOP + 20 * i + 10
        parts.append(f'<line x1="{x}" x2="{x + 20}" y1="{y}" y2="{y}" stroke="{_colour(name)}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 26}" y="{y + 4}">{name}</text>')
    path.write_text("\n".join([*parts, "</svg>", ""]))


def _colour(name: str) -> str:
    return _COLOURS.get(name, "#888888")


def _panel(left: int, title: str, lines: dict[str, list[tuple[int, float]]], digits: int) -> list[str]:
    sizes = sorted({x for points in lines.values() for x, _ in points})
    top = max(y for points in lines.values() for _, y in points) * 1.05
    span = max(log10(sizes[-1] / sizes[0]), 1e-9)

    def place(x: float, y: float) -> tuple[float, float]:
        return left + 10 + (_WIDTH - 30) * log10(x / sizes[0]) / span, _TOP + _HEIGHT * (1 - y / top)

    parts = [f'<text x="{left}" y="{_TOP - 15}" font-weight="bold">{title}</text>']
    for i in range(5):
        value = top * i / 4
        y = place(sizes[0], value)[1]
        parts.append(f'<line x1="{left}" x2="{left + _WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 4}" y="{y + 4:.1f}" text-anchor="end">{value:.{digits}f}</text>')
    for size in sizes:
        x = place(size, 0)[0]
        parts.append(f'<text x="{x:.1f}" y="{_TOP + _HEIGHT + 18}" text-anchor="middle">{size:,} blocks</text>')
    for name, points in lines.items():
        marks = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in points)
        width = 3 if name == "learned" else 1.5
        parts.append(f'<polyline points="{marks}" fill="none" stroke="{_colour(name)}" stroke-width="{width}"/>')
    return parts
