"""The command line of the fault harness (``scripts/test-faults``)."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fire.harness import Harness, Result, run_all
from fire.kind import Kind, load_kinds
from fire.stage import Stage

#: Faults of each kind in a full run.
ROUNDS = 10
#: Seconds of pool races in a full run and in the shortest, and what their counters have to reach in each.
RACES_S, RACES_MIN_S = 60.0, 20.0
RACES_LEAST = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and return the exit status: 1 where anything was not as it should be."""
    args = _parse(argv)
    kinds = _choose(args.kinds)
    if args.list:
        print("\n".join(f"{kind.group:8}  {kind.name}" for kind in kinds))
        return 0
    numbers = [args.number] if args.number is not None else list(range(max(1, round(ROUNDS * args.share))))
    total = len(kinds) * len(numbers)
    directory = Path(tempfile.mkdtemp(prefix="tkv-fire-", dir="/tmp"))  # short: there are sockets in it
    started, num_done = time.monotonic(), 0
    _say(f"{total} faults of {len(kinds)} kinds, seed {args.seed}; starting three engines, a store server and a Redis")

    def show(result: Result) -> None:
        nonlocal num_done
        num_done += 1
        state = "PROBLEM" if result.problems else "ok"
        _say(
            f"[{time.monotonic() - started:5.0f} s] {num_done}/{total} {result.kind} {result.number}: struck "
            f"{result.struck}, {result.requests} requests, {result.hits} hits, {result.seconds:.1f} s, {state}"
        )
        for problem in result.problems:
            _say(f"    {problem}\n    again: {_again(args.seed, result)}")

    results: list[Result] = []
    failed = False
    try:
        with Stage(directory) as stage:
            here = {kind.name: kind.optional(stage) for kind in kinds}
            for name, why in here.items():
                if why:
                    _say(f"{name} is left out: {why}")
            chosen = [kind for kind in kinds if not here[kind.name]]
            results = run_all(Harness(stage, args.seed), chosen, numbers, args.seed, show)
        failed = any(result.problems for result in results)
    finally:
        if failed or args.keep or sys.exc_info()[0] is not None:
            _say(f"the logs are in {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    seconds = time.monotonic() - started
    print(table(kinds, results))
    if args.json:
        Path(args.json).write_text(json.dumps(report(args.seed, seconds, results), indent=2) + "\n")
    bad = [result for result in results if result.problems]
    print(f"{len(results)} faults in {seconds:.0f} s, {len(bad)} with problems")
    if bad:
        print(f"FAILED: {bad[0].kind} (number {bad[0].number}): {bad[0].problems[0]}")
        print(f"again:  {_again(args.seed, bad[0])}")
    whole = args.kinds is None and args.number is None
    return 1 if bad or (whole and not races(args.seed, max(RACES_MIN_S, RACES_S * args.share))) else 0


def races(seed: int, seconds: float) -> bool:
    """Race for the pool's slots (``tests/races.py``), say what it came to, and return whether all is well."""
    script = Path(__file__).parents[1] / "races.py"
    command = [sys.executable, str(script), "--seed", str(seed), "--seconds", str(seconds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    try:
        counts = json.loads(done.stdout)
    except ValueError:
        print(f"FAILED: the pool races ended with exit status {done.returncode} and no counts")
        return False
    print(
        f"pool races: {counts['dropped_generations']} generations dropped, {counts['late_writes']} late writes into "
        f"quarantined slots, {counts['slots_checked']} slots and {counts['payloads_checked']} payloads compared, "
        f"{counts['wrong_bytes']} wrong"
    )
    if counts["problems"]:
        print(f"FAILED: {counts['problems'][0]}\nagain:  python tests/races.py --seed {seed} --seconds {seconds:g}")
    few = [name for name in ("dropped_generations", "late_writes") if counts[name] < RACES_LEAST]
    if few:
        print(f"FAILED: fewer than {RACES_LEAST} {few[0]}: the races did not happen")
    return not counts["problems"] and not few


def table(kinds: Sequence[Kind], results: Sequence[Result]) -> str:
    """Return a line a kind: faults, strikes, requests during them, hits, and everything that has to be 0."""
    heads = ("kind", "faults", "struck", "requests", "hits", "wrong", "late", "leaks", "held s", "back s")
    rows = [heads]
    for kind in kinds:
        of = [result for result in results if result.kind == kind.name]
        if not of:
            continue
        sums = [sum(r.struck for r in of), sum(r.requests for r in of), sum(r.hits for r in of)]
        sums += [sum(len(r.wrong) for r in of), sum(len(r.late) for r in of), sum(len(r.leaks) for r in of)]
        longest = (max(r.held_s for r in of), max(r.healthy_s for r in of))
        rows.append((kind.name, str(len(of)), *map(str, sums), *(f"{s:.2f}" for s in longest)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    return "\n".join(f"{row[0]:{widths[0]}}  " + "  ".join(map(str.rjust, row[1:], widths[1:])) for row in rows)


def report(seed: int, seconds: float, results: Sequence[Result]) -> dict[str, Any]:
    """Return everything as plain values."""
    return {
        "seed": seed,
        "seconds": round(seconds, 1),
        "faults": len(results),
        "wrong": sum(len(r.wrong) for r in results),
        "late": sum(len(r.late) for r in results),
        "leaks": sum(len(r.leaks) for r in results),
        "unfinished": sum(bool(r.outcome) for r in results),
        "results": [vars(r) for r in results],
    }


def _again(seed: int, result: Result) -> str:
    return f"scripts/test-faults --seed {seed} --kinds {shlex.quote(result.kind)} --number {result.number}"


def _choose(wanted: str | None) -> list[Kind]:
    known = load_kinds()
    if wanted is None:
        return list(known.values())
    chosen = []
    for name in (part.strip() for part in wanted.split(",")):
        of = [kind for kind in known.values() if name in (kind.name, kind.group)]
        if not of:
            raise SystemExit(f"--kinds: there is no kind or class of kinds {name!r}; --list shows them")
        chosen += of
    return chosen


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    about = "Real engines under faults; docs/testing.md says how to read what it prints."
    parser = argparse.ArgumentParser(prog="scripts/test-faults", description=about)
    share = "of a full run, such as 0.1; one fault of each kind at least"
    parser.add_argument("--share", type=float, default=1.0, help=share)
    parser.add_argument("--kinds", help="names of kinds or of classes of kinds, separated by commas; without: all")
    parser.add_argument("--seed", type=int, default=1, help="everything random follows from it (1)")
    parser.add_argument("--number", type=int, help="this fault of each kind alone, as a failure names it")
    parser.add_argument("--json", metavar="FILE", help="write everything to a file too")
    parser.add_argument("--keep", action="store_true", help="leave the logs, also where all is well")
    parser.add_argument("--list", action="store_true", help="print the kinds and end")
    args = parser.parse_args(argv)
    if not 0 < args.share <= 10:
        parser.error(f"--share is {args.share:g}; it is a share of a full run, above 0 and at most 10")
    return args


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started and mounted ends with it
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
