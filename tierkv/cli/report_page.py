"""The page that ``tierkv report`` writes: one file, with nothing that it loads and no script.

Names in it come from stores that others write to: whatever is put in is escaped here or in
:mod:`tierkv.cli.report_charts`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tierkv.cli.render import count, model_name, plural, size, span
from tierkv.cli.report_advice import enough, rate_at
from tierkv.cli.report_charts import WIDE, Bar, Line, bars, curve, text_of

_SOURCES = {"gpu": "GPU", "host": "host pool", "disk": "disk", "shared": "shared tier", "missed": "computed"}
_TIERS = ("host", "disk", "shared")
#: Bars of a history, and the minutes that one may stand for.
_MAX_BARS = 96
_BAR_MINUTES = (1, 2, 5, 10, 15, 30)
#: Namespaces that have a line of their own, and rows of a table.
_MAX_LINES = 4
_MAX_ROWS = 20

_STYLE = """\
:root {
  color-scheme: light dark;
  --bg: #f5f6f8; --card: #fff; --text: #1b222c; --faint: #5d6876; --line: #dfe3e8; --track: #e9ecf0;
  --gpu: #7a55c7; --host: #2f6fe0; --disk: #0f8f80; --shared: #c07f0c; --missed: #aab3bf;
  --n0: #c2417c; --n1: #6b7a12; --n2: #a2572b; --n3: #4c6a8a;
}
@media (prefers-color-scheme: dark) {
  :root {
    --bg: #12161b; --card: #1b2129; --text: #e6eaf0; --faint: #98a4b3; --line: #2e3742; --track: #29313b;
    --gpu: #a98bf0; --host: #5b97ff; --disk: #27b8a6; --shared: #e3a73a; --missed: #5f6b79;
    --n0: #f07fb0; --n1: #b9c84f; --n2: #dd9566; --n3: #8fb2d9;
  }
}
@media print {
  :root {
    color-scheme: light;
    --bg: #fff; --card: #fff; --text: #000; --faint: #444; --line: #ccc; --track: #eee;
    --gpu: #7a55c7; --host: #2f6fe0; --disk: #0f8f80; --shared: #c07f0c; --missed: #aab3bf;
    --n0: #c2417c; --n1: #6b7a12; --n2: #a2572b; --n3: #4c6a8a;
  }
  body { max-width: none; font-size: 12px; }
  figure, .card, tr { break-inside: avoid; }
  .scroll { overflow: visible; }
  h2 { break-after: avoid; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1180px; padding: 20px 16px 48px; background: var(--bg); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
  font-variant-numeric: tabular-nums;
}
h1, h2, h3, p, figure, ul { margin: 0; }
h1 { font-size: 22px; line-height: 1.25; }
h2 { font-size: 17px; margin: 30px 0 10px; }
figcaption, h3 { font-size: 15px; font-weight: 600; }
.faint, .note { color: var(--faint); font-size: 13px; }
.note { margin-top: 6px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; min-width: 0; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 12px; }
.advice { list-style: none; padding: 0; display: grid; gap: 8px; }
.advice li { border-left: 4px solid var(--host); padding: 2px 0 2px 12px; font-size: 17px; line-height: 1.4; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; }
.tiles b { display: block; font-size: 23px; line-height: 1.3; font-weight: 650; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; margin: 4px 0 8px; padding: 0; list-style: none; }
.legend { font-size: 13px; }
.legend li::before {
  content: ""; display: inline-block; width: 10px; height: 10px; margin-right: 6px; border-radius: 3px;
  background: currentColor;
}
.legend span { color: var(--text); }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { fill: var(--faint); font-size: 12px; }
svg text.now { fill: var(--text); font-weight: 650; }
svg .grid, svg .tick { stroke: var(--line); stroke-width: 1; }
svg .mark { stroke: var(--text); stroke-width: 1; stroke-dasharray: 4 4; }
svg polyline { fill: none; stroke: currentColor; stroke-width: 1.5; stroke-linejoin: round; }
svg polyline.host, svg polyline.disk { stroke-width: 3; }
svg .bar { fill: currentColor; }
svg .dot { fill: currentColor; stroke: var(--card); stroke-width: 2; }
svg .spot { fill: transparent; }
svg .spot:hover { fill: currentColor; fill-opacity: .35; }
svg g:hover .bar { opacity: .8; }
.gpu { color: var(--gpu); } .host { color: var(--host); } .disk { color: var(--disk); }
.shared { color: var(--shared); } .missed { color: var(--missed); }
.n0 { color: var(--n0); } .n1 { color: var(--n1); } .n2 { color: var(--n2); } .n3 { color: var(--n3); }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { padding: 4px 10px 4px 0; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--faint); font-weight: 600; font-size: 13px; }
td { overflow-wrap: anywhere; }
.num { text-align: right; white-space: nowrap; overflow-wrap: normal; }
td:first-child { min-width: 8em; }
.scroll { overflow-x: auto; }
.scroll svg { min-width: 640px; }
.share { width: 22%; min-width: 90px; }
.stack { display: flex; height: 12px; border-radius: 3px; overflow: hidden; background: var(--track); margin-top: 5px; }
.stack i { background: currentColor; }
details { margin-top: 8px; }
summary { cursor: pointer; font-size: 13px; color: var(--faint); }
:focus-visible { outline: 2px solid var(--host); outline-offset: 2px; }
"""


def make_page(report: Mapping[str, Any]) -> str:
    """Return the page.

    Args:
        report: what ``tierkv report --json`` prints.
    """
    reuse, server = report["reuse"], report["server"]
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(report["created"]))
    place = server["disk_dir"] if server else "a store that no server runs"
    sections = [
        f"<header><h1>What sizes suit these tiers</h1><p class='faint'>{text_of(place)} · {when} · TierKV "
        f"{text_of(report['version'])}</p></header>",
        "<h2>In short</h2><ul class='advice'>" + "".join(f"<li>{text_of(s)}</li>" for s in report["advice"]) + "</ul>",
    ]
    if reuse:
        sections += [_tiles(report), _curves(reuse), _history(reuse["history"]), _distances(reuse)]
    sections += [_stored(report["usage"]), _how(report)]
    body = "\n".join(section for section in sections if section)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>TierKV: sizes of the tiers, {when}</title>\n<style>\n{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _tiles(report: Mapping[str, Any]) -> str:
    rows = {row["name"]: row for row in report["tiers"]}
    tiles = []
    for tier in report["reuse"]["tiers"]:
        found = {"host": "found on GPU or host", "disk": "of the rest found on disk"}[tier["name"]]
        tiles.append((_percent(tier["found"]), found, f"{count(tier['asked'])} chunks asked for"))
    for name, row in rows.items():
        used = f"{size(row['nbytes'])} of {size(row['budget'])}" if row["budget"] else size(row["nbytes"])
        tiles.append((used, f"in the {_SOURCES.get(name, name)}", plural(row["num_entries"], "chunk")))
    cells = "".join(
        f"<div class='card'><b>{text_of(value)}</b>{text_of(what)}<div class='faint'>{text_of(more)}</div></div>"
        for value, what, more in tiles
    )
    return f"<h2>Now</h2><div class='tiles'>{cells}</div>"


# -- curves


def _curves(reuse: Mapping[str, Any]) -> str:
    cards = "".join(_curve_card(tier) for tier in reuse["tiers"])
    return f"<h2>What other sizes would have hit</h2><div class='grid'>{cards}</div>"


def _curve_card(tier: Mapping[str, Any]) -> str:
    name = tier["name"]
    title = {"host": "Host pool", "disk": "Disk"}[name]
    what = {
        "host": "of every chunk that requests asked for; by bytes of each engine's pool",
        "disk": "of the chunks that were neither on the GPU nor in the host pool",
    }[name]
    head = f"<figcaption>{title}</figcaption><p class='faint'>Share {what}.</p>"
    if not enough(tier):
        few = plural(tier["asked"], "chunk")
        return f"<figure class='card'>{head}<p>There is too little to draw a curve from: {few} so far.</p></figure>"
    sizes, rates, budget = tier["sizes"], tier["hit_rates"], tier["budget"]
    spaces = [row for row in tier["namespaces"] if row["num_sampled"] >= 100][:_MAX_LINES]
    lines = [
        Line(f"n{i}", _space(row), row["hit_rates"])
        for i, row in enumerate(spaces if len(tier["namespaces"]) > 1 else ())
    ]
    lines.append(Line(name, "all", rates))
    now = rate_at(sizes, rates, budget)
    summary = f"Hit rate by size: {_percent(rates[0])} at {size(sizes[0])}, {_percent(now)} now at {size(budget)}, "
    summary += f"{_percent(rates[-1])} at {size(sizes[-1])}."
    legend = _legend((line.css, line.name) for line in reversed(lines)) if len(lines) > 1 else ""
    picture = curve(f"Hit rates of a {title.lower()} by size", summary, sizes, lines, budget)
    found = f" The tiers did find {_percent(tier['found'])}." if tier["found"] is not None else ""
    note = f"<p class='note'>At the present size the curve is at {_percent(now)}.{found}</p>"
    return f"<figure class='card'>{head}{legend}{picture}{note}{_curve_table(tier)}</figure>"


def _curve_table(tier: Mapping[str, Any]) -> str:
    sizes, rates, budget = tier["sizes"], tier["hit_rates"], tier["budget"]
    rows = []
    for times in (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8):
        rate = rate_at(sizes, rates, budget * times)
        name = "now" if times == 1 else f"{times:g} ×" if times > 1 else f"1/{1 / times:g}"
        rows.append((name, size(budget * times), _percent(rate), _percent(1 - rate)))
    return f"<details><summary>The same in numbers</summary>{_table(('', '>size', '>hits', '>misses'), rows)}</details>"


def _distances(reuse: Mapping[str, Any]) -> str:
    cards = []
    for tier in reuse["tiers"]:
        if not enough(tier):
            continue
        title = {"host": "All chunks asked for", "disk": "Those below the host pool"}[tier["name"]]
        columns = _distance_bars(tier)
        never = columns[-1].shares["missed"]
        summary = f"{_percent(never)} were not used before, or longer ago than the last bar but one reaches."
        picture = bars(f"{title}: bytes used between two uses of a chunk", summary, columns)
        note = (
            "Bytes of other chunks that were used since a chunk's last use. "
            "The last bar: never before, or farther back than this looks."
        )
        cards.append(
            f"<figure class='card'><figcaption>{title}</figcaption>{picture}<p class='note'>{note}</p></figure>"
        )
    return f"<h2>Reuse distances</h2><div class='grid'>{''.join(cards)}</div>" if cards else ""


def _distance_bars(tier: Mapping[str, Any]) -> list[Bar]:
    sizes, rates, budget, name = tier["sizes"], tier["hit_rates"], tier["budget"], tier["name"]
    edges = [budget * times for times in (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)]
    columns, before = [], 0.0
    for i, edge in enumerate(edges):
        rate = rate_at(sizes, rates, edge)
        about = f"{'up to' if not i else f'{size(edges[i - 1])} to'} {size(edge)}: {_percent(rate - before)}"
        columns.append(Bar(f"≤ {size(edge)}" if i % 3 == 0 else "", about, {name: rate - before}))
        before = rate
    columns.append(Bar("never", f"farther, or never before: {_percent(1 - before)}", {"missed": 1 - before}))
    return columns


# -- over time


def _history(history: Mapping[str, Any]) -> str:
    columns = _history_bars(history)
    if not columns:
        return ""
    total = {name: sum(history["chunks"][name]) for name in _SOURCES}
    whole = sum(total.values()) or 1
    said = ", ".join(f"{_percent(num / whole)} {_SOURCES[name]}" for name, num in total.items())
    legend = _legend((name, f"{label} {_percent(total[name] / whole)}") for name, label in _SOURCES.items())
    hours = span(history["times"][-1] - history["times"][0] + history["interval_s"])
    picture = bars("What gave the chunks, over time", said, columns, top=1.0, width=WIDE)
    return (
        "<h2>Hits by tier over time</h2><figure class='card'>"
        f"<figcaption>What gave the chunks that requests asked for, the last {hours}</figcaption>{legend}"
        f"<div class='scroll'>{picture}</div>"
        "<p class='note'>Times are UTC. Where nothing was asked for it is blank.</p></figure>"
    )


def _history_bars(history: Mapping[str, Any]) -> list[Bar]:
    """Return a bar for each stretch of minutes, so many to a bar that there are at most :data:`_MAX_BARS`."""
    times, chunks = history["times"], history["chunks"]
    if not times or not any(sum(column) for column in chunks.values()):
        return []
    minutes = (times[-1] - times[0]) // 60 + 1
    step = 60 * next((n for n in _BAR_MINUTES if minutes <= n * (_MAX_BARS - 1)), _BAR_MINUTES[-1])
    first = times[0] // step * step
    sums = [dict.fromkeys(_SOURCES, 0) for _ in range((times[-1] - first) // step + 1)]
    for i, when in enumerate(times):
        for name in _SOURCES:
            sums[(when - first) // step][name] += chunks[name][i]
    every = max(1, -(-len(sums) // 8))
    columns = []
    for i, each in enumerate(sums):
        whole = sum(each.values())
        clock = time.strftime("%H:%M", time.gmtime(first + i * step))
        parts = ", ".join(f"{_SOURCES[name]} {_percent(num / whole)}" for name, num in each.items() if num)
        about = f"{clock}: {plural(whole, 'chunk')}{': ' if parts else ''}{parts}"
        shares = {name: num / whole for name, num in each.items()} if whole else {}
        columns.append(Bar(clock if i % every == 0 else "", about, shares))
    return columns


# -- what is stored


def _stored(usage: Mapping[str, Any]) -> str:
    cards = []
    for by, title, noun in (
        ("namespace", "By namespace", "namespace"),
        ("tenant", "By tenant", "tenant"),
        ("age", "By time since the last use", "last used"),
    ):
        rows = _merged_ages(usage[by]["rows"]) if by == "age" else usage[by]["rows"]
        if not rows:
            continue
        tiers = [tier for tier in _TIERS if tier in usage[by]["total"]["nbytes"]]
        largest = max(sum(row["nbytes"].values()) for row in rows) or 1
        cells: list[tuple[str | _Stack, ...]] = [
            (
                _row_name(row, by),
                count(row["num_chunks"]),
                *(size(row["nbytes"][tier]) if tier in row["nbytes"] else "-" for tier in tiers),
                _Stack({tier: row["nbytes"].get(tier, 0) / largest for tier in tiers}),
            )
            for row in rows[:_MAX_ROWS]
        ]
        columns = (noun, ">chunks", *(f">{tier}" for tier in tiers), "")
        more = usage[by]["num_rows"] - _MAX_ROWS if by != "age" else 0
        rest = f"<p class='note'>{plural(more, 'row')} more: tierkv du --by {by}</p>" if more > 0 else ""
        cards.append(
            f"<div class='card'><h3>{title}</h3><div class='scroll'>{_table(columns, cells)}</div>{rest}</div>"
        )
    if not cards:
        return "<h2>What is stored</h2><p class='card'>Nothing is stored.</p>"
    legend = _legend((tier, _SOURCES[tier]) for tier in _TIERS)
    return f"<h2>What is stored</h2>{legend}<div class='grid'>{''.join(cards)}</div>"


def _merged_ages(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of all namespaces together."""
    merged: dict[int, dict[str, Any]] = {}
    for row in rows:
        into = merged.setdefault(row["from_s"], dict(row) | {"num_chunks": 0, "nbytes": {}})
        into["num_chunks"] += row["num_chunks"]
        for tier, nbytes in row["nbytes"].items():
            into["nbytes"][tier] = into["nbytes"].get(tier, 0) + nbytes
    return [merged[start] for start in sorted(merged)]


def _row_name(row: Mapping[str, Any], by: str) -> str:
    if by == "age":
        since, until = span(row["from_s"]), row["to_s"]
        if not row["from_s"]:
            return f"less than {span(until)} ago"
        return f"{since} to {span(until)} ago" if until else f"over {since} ago, or unknown"
    space = f"{row['namespace'][:8]} {model_name(row['model'])}"
    return space if by == "namespace" else f"{row['tenant'][:12] or 'none'} · {space}"


# -- pieces


class _Stack:
    """A cell with a bar of parts, as shares of its width."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        self.shares = shares

    def __str__(self) -> str:
        parts = "".join(
            f"<i class='{tier}' style='width:{100 * share / max(1.0, sum(self.shares.values())):.2f}%'></i>"
            for tier, share in self.shares.items()
        )
        return f"<div class='stack' aria-hidden='true'>{parts}</div>"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str | _Stack]]) -> str:
    """Return a table. A column named with a leading ``>`` is right-aligned."""
    css = ["num" if column.startswith(">") else "" for column in columns]
    head = "".join(
        f"<th class='{c}' scope='col'>{text_of(name.lstrip('>'))}</th>" for c, name in zip(css, columns, strict=True)
    )
    lines = []
    for row in rows:
        cells = "".join(
            f"<td class='share'>{cell}</td>" if isinstance(cell, _Stack) else f"<td class='{c}'>{text_of(cell)}</td>"
            for c, cell in zip(css, row, strict=True)
        )
        lines.append(f"<tr>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    items = "".join(f"<li class='{css}'><span>{text_of(label)}</span></li>" for css, label in entries)
    return f"<ul class='legend'>{items}</ul>"


def _space(row: Mapping[str, Any]) -> str:
    return f"{row['id'][:8]} {model_name(row['model'])}" if row["id"] else "others"


def _how(report: Mapping[str, Any]) -> str:
    reuse, server = report["reuse"], report["server"]
    if not reuse:
        return ""
    sample = " and ".join(
        f"{_percent(tier['rate'])} of the keys ({count(tier['num_sampled'])} accesses) for the {_SOURCES[tier['name']]}"
        for tier in reuse["tiers"]
    )
    passed, half = span(report["created"] - reuse["since"]), span(reuse["half_life_s"])
    points = [
        f"The curves are from reuse distances of a sample, chosen by the keys' hashes: {sample}. They are within about "
        "2 points of what a replay of every access gives.",
        "They are of a cache that drops what was used least recently. The host pool's own policy does a little better "
        "where memory is scarce: take its curve for a lower bound there.",
        "The host pool's counts what vLLM's own cache on the GPU hit, since the pool would have had it too. The disk's "
        "holds for the host pool as it is now: with a larger one, less comes down to the disk.",
        f"It began {passed} ago; what was asked {half} ago counts half. Restarting the store server begins anew.",
    ]
    policy = server["spill"].get("disk") if server else None
    if policy and policy != "through":
        points.append(f"The disk's is of a disk that stores every chunk; this one stores {policy}, so it holds less.")
    if reuse["num_lost"]:
        points.append(f"{plural(reuse['num_lost'], 'chunk')} that requests asked for came too fast to be counted.")
    items = "".join(f"<li>{text_of(point)}</li>" for point in points)
    return f"<h2>How this was measured</h2><ul class='card faint' style='padding-left:32px'>{items}</ul>"
