"""How long people wait for the command line: ``tierkv --help``, and its listings of 100,000 chunks on a real server.

Each command runs in a process of its own, as on a shell; figures are medians of its wall times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

import many_blocks
from servers import server_binaries, start_redis
from serving import make_config, serving

#: The most that each command may take, in seconds; the others have no bar.
BARS = {"--help": 0.15, "ls": 1.0}


def commands() -> dict[str, list[str]]:
    """Return what is measured: name and arguments."""
    prompt = " ".join(map(str, many_blocks.prompt(3)))
    key = many_blocks.keys(3)[-1].hex()[:12]
    return {
        "--help": ["--help"],
        "ls --help": ["ls", "--help"],
        "stat": ["stat"],
        "ls": ["ls"],
        "ls --json": ["ls", "--json"],
        "ls --limit 20": ["ls", "--limit", "20"],
        "tree": ["tree"],
        "du": ["du"],
        "ns": ["ns"],
        "show": ["show", key],
        "match": ["match", "--tokens", prompt],
    }


def once(args: list[str], socket: Path) -> float:
    """Run a command and return its seconds."""
    where = [] if "--help" in args else ["--server", str(socket)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TIERKV_")}
    command = [str(Path(sys.executable).with_name("tierkv")), *args, *where]
    started = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, env=environment, check=True)
    return time.perf_counter() - started


def main() -> int:
    """Measure and print; exit status 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="runs of each command that count (7)")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    args = parser.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="tierkv-bench-") as name:
        work = Path(name)
        redis = start_redis(work) if server_binaries() else None
        config = make_config(work / "one", disk_bytes=2 << 30, shared_url=redis.url if redis else None)
        with serving(config) as server:
            print(f"storing {many_blocks.NUM_CHUNKS:,} chunks", file=sys.stderr)
            many_blocks.fill(server)
            for what, words in commands().items():
                once(words, config.socket)
                figures[what] = statistics.median(once(words, config.socket) for _ in range(args.rounds))
        if redis:
            redis.kill()
    table = Table(title=f"{many_blocks.NUM_CHUNKS:,} chunks, {many_blocks.NUM_PROMPTS:,} prefixes")
    for column in ("tierkv", "seconds", "bar"):
        table.add_column(column, justify="left" if column == "tierkv" else "right")
    for what, seconds in figures.items():
        table.add_row(what, f"{seconds:.3f}", f"{BARS[what]:g}" if what in BARS else "")
    Console(width=80).print(table)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    return int(any(figures[what] > bar for what, bar in BARS.items()))


if __name__ == "__main__":
    sys.exit(main())
