"""What the connector costs where it has nothing to offer: throughput on short unrelated prompts, with it and without.

Two engines, one with the connector and one without, run the same batches in turn (the other one idle), so that a noisy
machine hits both alike. The figure is the median over the repeats of the ratio of the two times.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from bench_ttft import bench_model, engine_settings, random_prompt
from engines import EngineProcess, Ticker, Valkey, bench_env

BAR = 0.97


def connector(work: Path, shared_url: str) -> dict[str, Any]:
    """Return the connector's configuration: every tier on."""
    options = {
        "host_bytes": "1GiB",
        "disk_dir": str(work / "disk"),
        "disk_bytes": "2GiB",
        "shared_url": shared_url,
        "spill": {"shared": "through"},
    }
    return {"kv_connector": "TierKVConnector", "kv_role": "kv_both", "kv_connector_extra_config": options}


def main() -> int:
    """Run the benchmark; exit status 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=24, help="prompts a batch")
    parser.add_argument("--tokens", type=int, default=256, help="tokens a prompt")
    parser.add_argument("--max-tokens", type=int, default=8, help="tokens generated for each")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="tierkv-bench-"))
    model = bench_model()
    env = bench_env()
    rng = random.Random(7)
    times: dict[str, list[float]] = {"without": [], "with": []}
    try:
        with Valkey(work) as valkey, Ticker("overhead"):
            transfer = connector(work, valkey.url)
            with (
                EngineProcess(engine_settings(model), env, work / "without.log") as without,
                EngineProcess(engine_settings(model, kv_transfer_config=transfer), env, work / "with.log") as with_,
            ):
                engines = {"without": without, "with": with_}
                for repeat in range(args.repeats + 1):
                    batch = [random_prompt(rng, args.tokens) for _ in range(args.prompts)]
                    for name in sorted(engines, reverse=bool(repeat % 2)):
                        seconds = engines[name].many(batch, args.max_tokens)["total_s"]
                        if repeat:  # the first warms both up
                            times[name].append(seconds)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    ratios = [a / b for a, b in zip(times["without"], times["with"], strict=True)]
    ratio = statistics.median(ratios)
    console = Console(width=None if sys.stdout.isatty() else 120)
    for name, seconds in times.items():
        rate = args.prompts * (args.tokens + args.max_tokens) / statistics.median(seconds)
        console.print(f"{name:8} the connector: {statistics.median(seconds):.2f} s a batch, {rate:.0f} tokens/s")
    shown = ", ".join(f"{r:.3f}" for r in sorted(ratios))
    console.print(f"throughput with / without: median {ratio:.3f} of {shown} (bar: at least {BAR})")
    if args.json:
        args.json.write_text(json.dumps({"ratio": ratio, "ratios": ratios, "times_s": times}, indent=1))
    return 0 if ratio >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
