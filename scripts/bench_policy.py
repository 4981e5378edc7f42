"""Replay requests against the product's policies and what else there is; a table for people, JSON, a plot."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench_policy_baselines import BASELINES
from bench_policy_plot import write_plot
from bench_policy_replay import Cost, Tier, replay, replay_baseline
from bench_policy_stack import replay_stack
from bench_policy_traces import SYNTHETIC, Request, hints_of, one_off_scan, read_trace
from tierkv.policy import POLICIES, WEIGHS_ABOVE, make_policy

#: Ours against an OrderedDict, per block and decision.
OVERHEAD_BAR = 4.0
SCAN_BAR = 0.95


def progress(label: str, total: int) -> Callable[[int], None]:
    """Return a function that says on standard error how far a long replay is, if somebody looks."""
    if not sys.stderr.isatty():
        return lambda i: None

    def step(i: int) -> None:
        if i % 500 == 0:
            print(f"\r\x1b[K{label}: {100 * i // max(1, total)} %", end="", file=sys.stderr, flush=True)

    return step


def load(name: str, seed: int) -> list[Request]:
    """Return the requests of a file, or of a made-up kind."""
    kind = name.removeprefix("synthetic:")
    if kind == name:
        return read_trace(Path(name))
    if kind not in SYNTHETIC:
        sys.exit(f"bench-policy: no kind {kind!r}; there are {', '.join(SYNTHETIC)}")
    return SYNTHETIC[kind](seed)


def compare(args: argparse.Namespace, requests: list[Request], cost: Cost) -> list[dict[str, Any]]:
    """Replay every policy at every size."""
    rows = []
    hints = hints_of(requests, args.seed) if args.hints else None
    for capacity in args.blocks:
        for name in [*BASELINES, *sorted(POLICIES, key=list(POLICIES).index, reverse=True), "belady"]:
            if args.only and name not in args.only:
                continue
            step = progress(f"{name} at {capacity}", len(requests))
            if name in POLICIES:
                result = replay([Tier(make_policy(name), capacity)], requests, hints=hints, step=step)
            else:
                result = replay_baseline(name, capacity, requests, step)
            rows.append({"policy": name, "blocks": capacity, **result.rates(cost)})
    return rows


def compare_stacks(args: argparse.Namespace, requests: list[Request], cost: Cost) -> list[dict[str, Any]]:
    """Replay a host pool over a disk as the product stacks them, and each alone, by our policy and by LRU.

    Beside it the same with a disk that is not told what the pool keeps, and, as a limit, one that gives up at once
    whatever the pool takes.
    """
    rows = []
    hints = hints_of(requests, args.seed) if args.hints else None
    label = "+".join(map(str, args.stack))
    for name in ("lru", "learned"):
        for tier, capacity in enumerate(args.stack):
            step = progress(f"{name} alone", len(requests))
            result = replay([Tier(make_policy(name), capacity)], requests, hints=hints, step=step)
            saved = {"ttft_saved_s": sum(result.hits) * cost.saved_s(tier)}
            rows.append({"policy": name, "blocks": str(capacity), "spill": "alone", **result.rates(cost), **saved})
        for spill, tells in (("stacked", None), ("stacked, not told", False)):
            if tells is False and name not in WEIGHS_ABOVE:
                continue
            result = replay_stack(
                name, args.stack, requests, hints, progress(f"{name} {spill}", len(requests)), tells
            ).result
            rows.append({"policy": name, "blocks": label, "spill": spill, **result.rates(cost)})
        tiers = [Tier(make_policy(name), capacity) for capacity in args.stack]
        step = progress(f"{name} moved", len(requests))
        result = replay(tiers, requests, hints=hints, moves=True, step=step)
        rows.append({"policy": name, "blocks": label, "spill": "moved", **result.rates(cost)})
    return rows


def measure_overhead(num_entries: int, size: int, repeats: int = 5) -> dict[str, Any]:
    """Time our policy against an OrderedDict LRU in one run (CPU time), block by block alike, at ``num_entries``.

    Every prompt is asked for twice, the second time after half of what is held was asked for in between: in the steady
    state half of the blocks are hits, and half are written for an eviction.

    Args:
        size: blocks of a prompt.
    """
    num = num_entries // size
    step = num // 12
    chains = [[(c * size + i).to_bytes(32, "big") for i in range(size)] for c in range(num + repeats * step)]
    plain: OrderedDict[bytes, None] = OrderedDict()
    policy = make_policy()
    now, num_held, num_hits, num_evictions = 0.0, 0, 0, 0

    def batch(start: int, stop: int) -> list[list[bytes]]:
        ago = num // 4
        return [chain for c in range(start, stop) for chain in (chains[c], *chains[c - ago : c - ago + 1]) if c >= ago]

    def run_plain(requests: Sequence[list[bytes]]) -> None:
        for chain in requests:
            for key in chain:
                if key in plain:
                    plain.move_to_end(key)
                else:
                    if len(plain) >= num_entries:
                        plain.popitem(last=False)
                    plain[key] = None

    def run_ours(requests: Sequence[list[bytes]]) -> None:
        nonlocal now, num_held, num_hits, num_evictions
        for chain in requests:
            now += 0.02
            policy.note(chain, now)
            parent = b""
            for key in chain:
                if key in policy:
                    num_hits += 1
                else:
                    room = num_held < num_entries
                    if not policy.admit(key, now, room=room):
                        break
                    if room:
                        num_held += 1
                    else:
                        gone = policy.victim(parent.__ne__)
                        if gone is None:
                            break
                        policy.remove(gone)
                        num_evictions += 1
                    policy.add(key, parent)
                parent = key

    run_plain(batch(0, num))
    run_ours(batch(0, num))
    num_hits = num_evictions = num_blocks = 0
    times: list[list[float]] = [[], []]
    for start in range(num, num + repeats * step, step):
        requests = batch(start, start + step)
        num_blocks += len(requests) * size
        for run, ns in zip((run_plain, run_ours), times, strict=True):
            begin = time.process_time()
            run(requests)
            ns.append((time.process_time() - begin) / (len(requests) * size) * 1e9)
    return {
        "entries": len(policy),
        "prompt_blocks": size,
        "hits": num_hits / num_blocks,
        "evictions": num_evictions / num_blocks,
        "ours_ns_per_block": statistics.median(times[1]),
        "ordereddict_ns_per_block": statistics.median(times[0]),
        "ratio": statistics.median(ours / theirs for theirs, ours in zip(*times, strict=True)),
        "bar": OVERHEAD_BAR,
    }


def measure_scan(num: int, capacity: int = 1000, every: int = 2000) -> dict[str, Any]:
    """Return how much of a hot prefix stays while one-off prompts go by."""
    hot = tuple(range(20))
    figures: dict[str, Any] = {"prompts": num, "blocks": capacity}
    for name in POLICIES:
        requests = [Request(i * 0.5 - 40, hot) for i in range(40)]
        requests += one_off_scan(num, hot=hot, every=every)
        policy = make_policy(name)
        tier = Tier(policy, capacity)
        held = asked = 0
        step = progress(f"{name}, scan", len(requests))
        for i, (now, chain) in enumerate(requests):
            step(i)
            if i > 40 and chain[0] == hot[0]:
                asked += len(hot)
                held += next((n for n, key in enumerate(hot) if key not in policy), len(hot))
            replay([tier], [Request(now, chain)])
        figures[name] = held / max(1, asked)
    return figures


def print_rows(console: Console, rows: list[dict[str, Any]], requests: list[Request]) -> None:
    """Print the figures as a table."""
    limit = {row["blocks"]: row["hit_rate"] for row in rows if row["policy"] == "belady"}
    lru = {row["blocks"]: row["hit_rate"] for row in rows if row["policy"] == "lru"}
    num = sum(len(r.chain) for r in requests)
    table = Table(title=f"{len(requests)} requests, {num} blocks, leading-run hit rate")
    columns = (
        "blocks",
        "policy",
        "hit rate",
        "of lru",
        "of the limit",
        "writes/block",
        "tokens saved",
        "written",
        "TTFT saved",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "policy" else "right")
    for row in rows:
        spill = f" {row['spill']}" if "spill" in row else ""
        base, best = lru.get(row["blocks"], 0), limit.get(row["blocks"], 0)
        table.add_row(
            str(row["blocks"]),
            row["policy"] + spill,
            f"{100 * row['hit_rate']:.1f} %",
            f"{row['hit_rate'] / base:.2f}" if base and not spill else "",
            f"{row['hit_rate'] / best:.2f}" if best else "",
            " + ".join(f"{n:.2f}" for n in row["writes_per_block"]),
            f"{row['tokens_saved'] / 1e6:.1f} M",
            " + ".join(f"{n / 1e12:.1f} TB" for n in row["nbytes_written"]),
            f"{row['ttft_saved_s'] / len(requests):.2f} s",
        )
    console.print(table)


def main() -> int:
    """Run what was asked for; exit status 1 if a bar is missed."""
    parser = argparse.ArgumentParser(prog="bench-policy", description=__doc__)
    sizes = lambda text: [int(word) for word in text.split(",")]  # noqa: E731
    parser.add_argument("trace", nargs="?", metavar="TRACE", help="JSON lines, or synthetic:KIND")
    parser.add_argument("--blocks", type=sizes, default=[1000, 3000, 10_000, 30_000], help="sizes to replay at")
    parser.add_argument("--stack", type=sizes, metavar="HOST,DISK", help="sizes of a host pool and the disk below it")
    parser.add_argument("--only", type=lambda text: text.split(","), help="policies to replay")
    parser.add_argument("--hints", action="store_true", help="give our policy the hints an application would give")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overhead", type=int, metavar="ENTRIES", help="measure time against an OrderedDict")
    parser.add_argument("--scan", type=int, metavar="PROMPTS", help="scan with one-off prompts beside a hot prefix")
    parser.add_argument("--prefill", type=float, default=Cost.prefill_tokens_per_s, help="tokens/s, of the cost model")
    parser.add_argument("--token-nbytes", type=int, default=Cost.nbytes_per_token, help="KV bytes a token")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--plot", type=Path, help="write a plot (SVG) to this file")
    args = parser.parse_args()
    if args.stack and len(args.stack) != 2:
        parser.error("--stack takes two sizes, the host pool's and the disk's")
    console = Console(width=150 if not sys.stdout.isatty() else None)
    cost = Cost(args.prefill, args.token_nbytes)
    figures: dict[str, Any] = {}
    failed = False
    if args.trace:
        requests = load(args.trace, args.seed)
        rows = compare_stacks(args, requests, cost) if args.stack else compare(args, requests, cost)
        figures["replay"] = rows
        print_rows(console, rows, requests)
        if args.plot:
            write_plot(args.plot, rows)
    if args.overhead:
        figures["overhead"] = overheads = [measure_overhead(args.overhead, size) for size in (16, 32)]
        for over in overheads:
            failed |= over["ratio"] > OVERHEAD_BAR
            console.print(
                f"{over['entries']} entries, prompts of {over['prompt_blocks']} blocks, "
                f"{100 * over['hits']:.0f} % hits, {100 * over['evictions']:.0f} % evictions: "
                f"ours {over['ours_ns_per_block']:.0f} ns a block, "
                f"an OrderedDict {over['ordereddict_ns_per_block']:.0f} ns, "
                f"ratio {over['ratio']:.2f} (bar {OVERHEAD_BAR:g})"
            )
    if args.scan:
        figures["scan"] = scan = measure_scan(args.scan)
        failed |= scan["learned"] < SCAN_BAR
        kept = ", ".join(f"{name} {100 * scan[name]:.1f} %" for name in POLICIES)
        console.print(f"{args.scan} one-off prompts, {scan['blocks']} blocks; of the hot prefix stayed: {kept}")
    if not figures:
        parser.error("give a TRACE, --overhead or --scan")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
