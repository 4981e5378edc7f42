"""Time to first token of one prompt: computed, from the GPU's cache, from host, disk and shared.

A model of realistic shape with seeded weights (hidden 1024, 8 layers, 16 heads, 2 KV heads, bfloat16: 4 KiB of KV a
token). Each repeat takes a fresh prompt through all tiers in turn; every figure is proven by the engine's counters.
The bar is a ratio to the GPU hit of the same run. ``--in-tree DIR`` runs vLLM's own offloading beside it: DIR holds
the module ``in_tree_on_cpu`` with the specs ``CpuPlatOffloadingSpec`` and ``CpuPlatTieringSpec``.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from demo_model import models_dir
from engines import EngineProcess, Ticker, Valkey, bench_env
from seeded_model import write_seeded_llama
from tierkv.client import AdminClient
from tierkv.config import socket_path

TIERS = ("host", "disk", "shared")
#: Ratios to the GPU hit: what vLLM's own tiers reach on such a machine, and what the shared tier may cost.
BARS = {"host": 2.1, "disk": 2.7, "shared": 3.6}
VOCAB = 32_000
Samples = dict[tuple[str, int], list[float]]


def bench_model() -> Path:
    """Return the directory of the model, made when it is missing."""
    path = models_dir() / "bench-1024x8"
    write_seeded_llama(
        path, hidden=1024, layers=8, heads=16, kv_heads=2, head_dim=64, vocab=VOCAB, intermediate=2816, dtype="bfloat16"
    )
    return path


def engine_settings(model: Path, **more: Any) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` that every engine of the run shares."""
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 16384,
        "enforce_eager": True,
        "block_size": 128,
    } | more


class TierKV:
    """An engine with the connector, and the means to empty one tier after the other."""

    def __init__(self, model: Path, work: Path, shared_url: str, env: dict[str, str]) -> None:
        self._disk = work / "disk"
        options = {
            "host_bytes": "1GiB",
            "disk_dir": str(self._disk),
            "disk_bytes": "4GiB",
            "shared_url": shared_url,
            "spill": {"shared": "through"},
        }
        transfer = {"kv_connector": "TierKVConnector", "kv_role": "kv_both", "kv_connector_extra_config": options}
        self.engine = EngineProcess(engine_settings(model, kv_transfer_config=transfer), env, work / "tierkv.log")
        self._admin = AdminClient(socket_path(self._disk))

    def hits(self) -> dict[str, int]:
        """Return the engine's hits by tier, in chunks."""
        counters = self._admin.ask("TKV.STAT")["engines"][0]["counters"]
        return {tier: counters.get(f"{tier}_hits", 0) for tier in TIERS}

    def drain(self) -> None:
        """Wait until everything is stored everywhere."""
        while self._admin.ask("TKV.STAT")["engines"][0]["counters"]["store_queue_nbytes"]:
            time.sleep(0.02)
        self._admin.call("TKV.DRAIN", 30)

    def forget(self, *tiers: str) -> None:
        """Empty tiers, and the GPU's cache."""
        self._admin.ask("TKV.EVICT", {"everything": True, "tiers": list(tiers)})
        self.engine.reset_gpu()

    def sample(self, prompt: list[int], samples: Samples) -> None:
        """Take one prompt through every tier and note the times."""
        self.note("cold", prompt, samples)
        self.note("GPU", prompt, samples)
        self.drain()
        self.engine.reset_gpu()
        self.note("host", prompt, samples)
        self.forget("host")
        self.note("disk", prompt, samples)
        self.forget("host", "disk")
        self.note("shared", prompt, samples)
        self.drain()

    def note(self, tier: str, prompt: list[int], samples: Samples) -> None:
        """Ask once, check that the tier answered and no other, and note the time to first token."""
        before = self.hits()
        answer = self.engine.ask(prompt=prompt)
        found = {t for t, n in self.hits().items() if n > before[t]}
        expected = {tier} if tier in TIERS else set()
        if found != expected or (tier != "cold") != bool(answer["num_cached"]):
            raise SystemExit(f"{tier}: answered by {sorted(found)}, {answer['num_cached']} tokens cached")
        samples[tier, len(prompt)].append(answer["ttft_s"])


def in_tree(model: Path, work: Path, folder: Path, env: dict[str, str], args: argparse.Namespace) -> Samples:
    """Run vLLM's own offloading: its CPU tier, and its file system tier behind it."""
    samples: Samples = defaultdict(list)
    env = env | {"PYTHONPATH": str(folder)}
    for label, spec, options in (
        ("in-tree CPU", "CpuPlatOffloadingSpec", {}),
        ("in-tree fs", "CpuPlatTieringSpec", {"secondary_tiers": [{"type": "fs", "root_dir": str(work / "fs")}]}),
    ):
        # The fs tier is reached by a CPU tier too small for two prompts.
        nbytes = (1 << 30) if label == "in-tree CPU" else max(args.tokens) * 4096 * 3 // 2
        extra = {"cpu_bytes_to_use": nbytes, "spec_name": spec, "spec_module_path": "in_tree_on_cpu"} | options
        transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        with EngineProcess(engine_settings(model, kv_transfer_config=transfer), env, work / "in-tree.log") as engine:
            for length, prompt in prompts(args, seed=2):
                engine.ask(prompt=prompt)
                if label == "in-tree fs":  # two others push it out of the CPU tier
                    for i in range(2):
                        engine.ask(prompt=random_prompt(random.Random(f"{prompt[0]}{i}"), length))
                time.sleep(0.5)
                engine.reset_gpu()
                answer = engine.ask(prompt=prompt)
                if answer["num_cached"]:
                    samples[label, length].append(answer["ttft_s"])
    return samples


def random_prompt(rng: random.Random, length: int) -> list[int]:
    """Return a prompt that shares nothing with any other."""
    return [rng.randrange(VOCAB) for _ in range(length)]


def prompts(args: argparse.Namespace, seed: int) -> list[tuple[int, list[int]]]:
    """Return the prompts of a run, lengths interleaved."""
    rng = random.Random(seed)
    return [(length, random_prompt(rng, length)) for _ in range(args.repeats) for length in args.tokens]


def report(samples: Samples, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Print the table and return its figures."""
    table = Table(title=f"Time to first token, medians of {args.repeats}", title_justify="left")
    table.add_column("from")
    for length in args.tokens:
        table.add_column(f"{length} tokens", justify="right")
        table.add_column("to GPU hit", justify="right")
    table.add_column("bar", justify="right")
    figures: dict[str, Any] = {}
    for label in dict.fromkeys(label for label, _ in samples):
        row = []
        for length in args.tokens:
            values = samples.get((label, length))
            if not values:
                row += ["-", "-"]
                continue
            median = statistics.median(values)
            ratio = median / statistics.median(samples["GPU", length])
            figures[f"{label}/{length}"] = {"median_s": median, "ratio": ratio, "samples_s": values}
            row += [f"{median * 1e3:.0f} ms", f"{ratio:.2f}"]
        table.add_row(label, *row, f"≤ {BARS[label]}" if label in BARS else "")
    console.print(table)
    console.print("disk: read by LMDB from the page cache (written in the same run); shared: a Valkey on this machine")
    return figures


def main() -> int:
    """Run the benchmark; exit status 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=lambda s: [int(n) for n in s.split(",")], default=[4097, 8193])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--in-tree", type=Path, help="folder of in_tree_on_cpu.py, to run vLLM's own offloading beside")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    env = bench_env()
    work = Path(tempfile.mkdtemp(prefix="tierkv-bench-"))
    model = bench_model()
    samples: Samples = defaultdict(list)
    try:
        with Valkey(work, "3gb") as valkey:
            bench = TierKV(model, work, valkey.url, env)
            with bench.engine, Ticker("TierKV"):
                warm = random_prompt(random.Random(0), max(args.tokens))
                bench.sample(warm, defaultdict(list))
                for _, prompt in prompts(args, seed=1):
                    bench.sample(prompt, samples)
        if args.in_tree:
            with Ticker("vLLM's own offloading"):
                samples.update(in_tree(model, work, args.in_tree.resolve(), env, args))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    figures = report(samples, args, console)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    missed = [k for k, f in figures.items() if (bar := BARS.get(k.split("/")[0])) and f["ratio"] > bar]
    console.print(f"bars missed: {', '.join(missed)}" if missed else "all bars held")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
