"""What an engine does while a tier is out: throughput with the connector and without, during each long fault.

Two engines run the same batches in turn, so that a noisy machine hits both alike. Half of each batch is prompts that
are stored in the tier that is out, so that an engine that waited for it would show it; half is new. Measured is what
comes after ``--settle`` seconds of such batches: back-offs have grown by then. The figure is the median of the ratios
of times.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from bench_ttft import bench_model, engine_settings, random_prompt
from engines import EngineProcess, Ticker, Valkey, bench_env
from fire.supervised import Store
from tierkv.admin_client import AdminClient
from tierkv.config import Spill
from tierkv.server_config import ServerConfig

BAR = 0.95
CHUNK_TOKENS = 128
HEALTHY_S = 90.0


class Stage(NamedTuple):
    """What runs: two engines, a store server with points for faults, a Redis."""

    without: EngineProcess
    with_: EngineProcess
    store: Store
    valkey: Valkey


class Fault(NamedTuple):
    """A long fault. ``empties``: tiers in which nothing may be stored, so that the one that is out is asked."""

    name: str
    empties: tuple[str, ...]
    begin: Callable[[Stage], object]
    end: Callable[[Stage], object]


def go_on(stage: Stage) -> None:
    os.kill(stage.store.pid, signal.SIGCONT)
    stage.store.wait()


def hang_disk(stage: Stage) -> None:
    stage.store.arm("disk-read", "hang", 1, False)
    stage.store.arm("disk-write", "hang", 1, False)


FAULTS = (
    Fault("none", ("host",), lambda stage: None, lambda stage: None),
    Fault("server stopped", ("host",), lambda stage: stage.store.stop_now(), go_on),
    Fault("Redis frozen", ("host", "disk"), lambda stage: stage.valkey.freeze(), lambda stage: stage.valkey.thaw()),
    Fault("disk hung", ("host", "shared"), hang_disk, lambda stage: stage.store.disarm()),
)


class Bench:
    """The measurement.

    Args:
        stage: what runs.
        args: of the command line.
    """

    def __init__(self, stage: Stage, args: argparse.Namespace) -> None:
        self._stage = stage
        self._args = args
        self._rng = random.Random(7)

    def run(self, fault: Fault) -> dict[str, Any]:
        """Measure during one fault, and wait until it is over; returns its figures."""
        args, stage = self._args, self._stage
        stored = [self._prompt() for _ in range(args.stored)]
        known = stored[0]
        for at in range(0, len(stored), args.prompts):
            stage.with_.many(stored[at : at + args.prompts])
        self._drain()
        with AdminClient(stage.store.config.socket) as admin:
            admin.ask("TKV.EVICT", {"everything": True, "tiers": list(fault.empties)})
        times: dict[str, list[float]] = {"without": [], "with": []}
        num_tokens = 0
        fault.begin(stage)
        try:
            began = time.monotonic()
            while time.monotonic() < began + args.settle:
                self._batch(stored, times)
            times = {"without": [], "with": []}
            for _ in range(args.repeats):
                num_tokens = self._batch(stored, times)
        finally:
            fault.end(stage)
        self._wait_healthy(known)
        ratios = [a / b for a, b in zip(times["without"], times["with"], strict=True)]
        rates = {name: num_tokens / statistics.median(seconds) for name, seconds in times.items()}
        return {"fault": fault.name, "ratio": statistics.median(ratios), "ratios": ratios, "tokens_s": rates}

    def _batch(self, stored: list[list[int]], times: dict[str, list[float]]) -> int:
        """Run a batch on both engines, the one that goes first in turns; returns its tokens."""
        half = self._args.prompts // 2
        some = [stored.pop() for _ in range(min(half, len(stored)))]
        batch = some + [self._prompt() for _ in range(self._args.prompts - len(some))]
        self._rng.shuffle(batch)
        engines = {"without": self._stage.without, "with": self._stage.with_}
        num_tokens = 0
        for name in sorted(engines, reverse=bool(len(times["with"]) % 2)):
            done = engines[name].many(batch, self._args.max_tokens)
            times[name].append(done["total_s"])
            num_tokens = done["num_tokens"]
        return num_tokens

    def _prompt(self) -> list[int]:
        return random_prompt(self._rng, self._args.tokens)

    def _drain(self) -> None:
        with AdminClient(self._stage.store.config.socket) as admin:
            while admin.ask("TKV.STAT")["engines"][0]["counters"]["store_queue_nbytes"]:
                time.sleep(0.02)
            admin.call("TKV.DRAIN", 30)
        self._stage.with_.reset_gpu()

    def _wait_healthy(self, known: list[int]) -> None:
        """Wait until every tier is up: what is out is tried when somebody wants what is stored there (``known``)."""
        deadline = time.monotonic() + HEALTHY_S
        while True:
            with AdminClient(self._stage.store.config.socket) as admin:
                admin.ask("TKV.EVICT", {"everything": True, "tiers": ["host"]})
                self._stage.with_.reset_gpu()
                self._stage.with_.many([known, self._prompt()])
                stat = admin.ask("TKV.STAT")
            bad = [f"{row['name']}: {row['state']} ({row['reason']})" for row in stat["tiers"] if row["state"] != "up"]
            if not bad and stat["server"]["num_engines"]:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"after the fault not all is well: {', '.join(bad) or 'no engine is connected'}")
            time.sleep(0.2)


def server_config(work: Path, shared_url: str) -> ServerConfig:
    """Return the server's configuration: every chunk to every tier, a Redis that is given up after half a second."""
    config = ServerConfig.make(
        work / "disk", 2 << 30, shared_url, socket=work / "tierkv.sock", spill={"shared": Spill.THROUGH}
    )
    assert config.shared is not None
    shared = msgspec.structs.replace(config.shared, timeout_s=0.5, connect_timeout_s=0.5)
    return msgspec.structs.replace(config, shared=shared)


def connector(config: ServerConfig) -> dict[str, Any]:
    """Return the connector's configuration."""
    options = {"host_bytes": "64MiB", "server": f"unix://{config.socket}", "chunk_tokens": CHUNK_TOKENS}
    return {"kv_connector": "TierKVConnector", "kv_role": "kv_both", "kv_connector_extra_config": options}


def table(rows: list[dict[str, Any]]) -> Table:
    """Return the figures as a table."""
    shown = Table("fault", "without, tokens/s", "with, tokens/s", "ratio", "of", box=None)
    for row in rows:
        ratios = ", ".join(f"{ratio:.3f}" for ratio in sorted(row["ratios"]))
        rates = [f"{row['tokens_s'][name]:.0f}" for name in ("without", "with")]
        shown.add_row(row["fault"], *rates, f"{row['ratio']:.3f}", ratios)
    return shown


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench-faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=16, help="prompts a batch; half of them are stored")
    parser.add_argument("--tokens", type=int, default=3 * CHUNK_TOKENS, help="tokens a prompt")
    parser.add_argument("--max-tokens", type=int, default=8, help="tokens generated for each")
    parser.add_argument("--repeats", type=int, default=7, help="measured batches during each fault")
    parser.add_argument("--settle", type=float, default=20.0, help="seconds of batches before that")
    parser.add_argument("--stored", type=int, default=96, help="prompts stored before each fault, each used once")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


def main() -> int:
    """Run the benchmark; exit status 1 if the bar is missed."""
    args = parse()
    work = Path(tempfile.mkdtemp(prefix="tkv-bench-", dir="/tmp"))  # short: there is a socket in it
    model, env = bench_model(), bench_env()
    rows = []
    try:
        with Valkey(work) as valkey:
            config = server_config(work, valkey.url)
            store = Store(config, work / "server.log")
            store.start()
            try:
                settings = engine_settings(model, kv_transfer_config=connector(config))
                with (
                    Ticker("throughput during faults"),
                    EngineProcess(engine_settings(model), env, work / "without.log") as without,
                    EngineProcess(settings, env, work / "with.log") as with_,
                ):
                    bench = Bench(Stage(without, with_, store, valkey), args)
                    rows = [bench.run(fault) for fault in FAULTS]
            finally:
                store.close()
    finally:
        shutil.rmtree(work, ignore_errors=True)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table(rows))
    worst = min(row["ratio"] for row in rows)
    console.print(
        f"throughput with / without, the worst fault: {worst:.3f} (bar: at least {BAR}), {os.cpu_count()} cores"
    )
    if args.json:
        args.json.write_text(json.dumps({"worst": worst, "faults": rows}, indent=1))
    return 0 if worst >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
