"""What thousands of requests leave behind in an engine and its store server: nothing.

Short requests with shared prefixes and salts, some of them aborted, on pools that hold a fraction of what is stored, so
that every tier evicts all the time. Descriptors, threads, segments, processes, slots and leases are counted at rest,
after a warm-up and at the end; private memory is sampled in between.

    python -m fire.leak_run [--requests 10000] [--seed 1]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_process import CHUNK_TOKENS, THROUGH, Engine, Lab, Prompts, admin, drain, server_pid
from fire.checks import SERVER_SLACK, Holding, holding
from seeded_model import write_seeded_llama
from servers import RedisServer, start_redis

#: Private memory that may be gained from the warm-up to the end, in bytes a request and at least in all: allocators
#: keep what the largest step needed, and a thread's first work makes an arena.
MAX_NBYTES_A_REQUEST = 512
MAX_NBYTES = 6 << 20
NUM_AT_A_TIME = 8
ENGINE, SERVER = "the engine", "the store server"
SETTLE_S = 20.0
_MODEL = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 64, "intermediate": 128}
_PAYLOAD_NBYTES = 64 << 10  # 64 tokens of K and V, 2 layers of 64 floats
_NUM_SLOTS = 24
_NUM_PROMPTS = 600
#: Without these an engine's memory grows by 100 KB a request also where it has no connector: PyTorch and oneDNN
#: remember kernels for a thousand shapes, and malloc has a pool of memory for each thread.
NO_CACHES: dict[str, str | None] = {
    "LRU_CACHE_CAPACITY": "16",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
    "MALLOC_ARENA_MAX": "1",
}
_SALTS = (None, None, "a", "b")
#: What may lie in the disk tier's directory.
_FILES = {"lock", "tierkv.sock", "server.log", "server.log.1", "ns", "control.json", "control.journal"}


@dataclass
class Report:
    """What the run came to: numbers, and a sentence for each thing that is not as it should be."""

    num_requests: int = 0
    num_aborted: int = 0
    evicted: dict[str, int] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    before: dict[str, Holding] = field(default_factory=dict)
    after: dict[str, Holding] = field(default_factory=dict)
    memory: dict[str, list[int]] = field(default_factory=dict)
    gained_nbytes: dict[str, int] = field(default_factory=dict)
    allowed_nbytes: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


class LeakRun:
    """A run.

    Args:
        directory: where everything goes.
        num_requests: after the warm-up, which is a quarter of it.
        seed: everything random follows from it.
    """

    def __init__(self, directory: Path, num_requests: int, seed: int) -> None:
        self._directory = directory
        self._num_requests = num_requests
        self._rng = random.Random(seed)
        prompts = Prompts(seed)
        roots = [prompts.new(self._rng.randrange(1, 3) * CHUNK_TOKENS) for _ in range(12)]
        self._prompts = [
            self._rng.choice(roots) + prompts.new(self._rng.randrange(8, 2 * CHUNK_TOKENS)) for _ in range(_NUM_PROMPTS)
        ]
        self._names = (f"r{i}" for i in range(1 << 60))
        self._report = Report()
        self._shm: set[Path] = set()

    def run(self) -> Report:
        """Do it, and return what it came to."""
        started = time.monotonic()
        (self._directory / "redis").mkdir()
        redis = start_redis(self._directory / "redis", "--maxmemory", "24mb", "--maxmemory-policy", "allkeys-lru")
        try:
            with Lab(self._directory) as lab:
                self._serve(lab, redis)
        finally:
            redis.stop()
        if left := [path for path in self._shm if path.exists()]:
            self._report.problems.append(f"in /dev/shm is left {', '.join(path.name for path in left)}")
        self._report.seconds = time.monotonic() - started
        return self._report

    def _serve(self, lab: Lab, redis: RedisServer) -> None:
        model = write_seeded_llama(self._directory / "model", **_MODEL)
        disk = lab.disk()
        options = {
            "disk_dir": disk,
            "disk_bytes": "16MiB",
            "host_bytes": _NUM_SLOTS * _PAYLOAD_NBYTES + (16 << 10),
            "shared_url": redis.url,
            "spill": THROUGH,
        }
        engine = lab.engine(model, options, max_num_seqs=NUM_AT_A_TIME, num_gpu_blocks_override=96, env=NO_CACHES)
        engine.ready()
        self._requests(engine, max(1, self._num_requests // 4))
        self._rest(engine, disk)
        self._report.num_requests = self._report.num_aborted = 0
        pids, report = {ENGINE: engine.pid, SERVER: server_pid(disk)}, self._report
        report.before = {who: holding(pid) for who, pid in pids.items()}
        report.memory = {who: [] for who in pids}
        num_parts = min(40, max(6, self._num_requests // 50))
        for part in range(num_parts):
            self._requests(engine, self._num_requests * (part + 1) // num_parts - report.num_requests)
            self._rest(engine, disk)
            for who, pid in pids.items():
                report.memory[who].append(private_nbytes(pid))
        self._judge(engine, disk, pids)
        self._shm = set().union(*(shm_of(pid) for pid in pids.values()))
        engine.stop()

    def _requests(self, engine: Engine, num: int) -> None:
        """Serve ``num`` requests, a twentieth of which is aborted."""
        rng, running = self._rng, set[str]()
        todo = num
        while todo or running:
            while todo and len(running) < NUM_AT_A_TIME:
                todo -= 1
                name = next(self._names)
                engine.add(name, rng.choice(self._prompts), rng.choice((1, 1, 3)), rng.choice(_SALTS))
                running.add(name)
            if rng.random() < 0.1:
                doomed = rng.choice(sorted(running))
                engine.call("abort", names=[doomed])
                running.discard(doomed)
                self._report.num_aborted += 1
            running -= engine.step(rng.randrange(1, 6)).keys()
        self._report.num_requests += num

    def _rest(self, engine: Engine, disk: Path) -> None:
        """Wait until nothing is under way, and have the test's own part of the engine forget what it was told."""
        engine.call("idle")
        engine.counters()
        drain(disk)
        engine.call("forget")

    # -- what is left

    def _judge(self, engine: Engine, disk: Path, pids: dict[str, int]) -> None:
        report = self._report
        report.after = {who: holding(pid) for who, pid in pids.items()}
        deadline = time.monotonic() + SETTLE_S
        while (found := list(self._left(engine, disk, pids))) and time.monotonic() < deadline:
            time.sleep(0.1)
        report.problems += found
        report.allowed_nbytes = max(MAX_NBYTES, MAX_NBYTES_A_REQUEST * self._num_requests)
        for who, samples in report.memory.items():
            third = max(1, len(samples) // 3)
            gained = report.gained_nbytes[who] = int(
                statistics.median(samples[-third:]) - statistics.median(samples[:third])
            )
            if gained > report.allowed_nbytes:
                report.problems.append(
                    f"{who} has gained {gained:,} bytes of memory over {self._num_requests:,} requests; "
                    f"{report.allowed_nbytes:,} are allowed"
                )
        self._check_that_it_was_tight(engine, disk)

    def _left(self, engine: Engine, disk: Path, pids: dict[str, int]) -> Iterator[str]:
        for what, num in engine.call("leases").items():
            if num:
                yield f"the engine holds {num} {what} for no request"
        self._report.after = {who: holding(pid) for who, pid in pids.items()}
        for who, before in self._report.before.items():
            slack = SERVER_SLACK if who == SERVER else 0
            for what, was, has in zip(Holding._fields, before, self._report.after[who], strict=True):
                if has > was + (slack if what in ("fds", "threads") else 0):
                    yield f"{who} has {has} {what}, and had {was}"
        with admin(disk) as client:
            stat = client.ask("TKV.STAT")
        if stat["server"]["num_engines"] != 1:
            yield f"the store server has {stat['server']['num_engines']} sessions of one engine"
        if queued := sum(tier["queued_nbytes"] for tier in stat["tiers"]):
            yield f"{queued} bytes are queued in the store server"
        if strange := {path.name for path in disk.iterdir()} - _FILES:
            yield f"in the disk tier's directory lies {', '.join(sorted(strange))}"

    def _check_that_it_was_tight(self, engine: Engine, disk: Path) -> None:
        """Check that the run did what it is for: hits and evictions in every tier, and aborts."""
        report, counters = self._report, engine.counters()
        with admin(disk) as client:
            rows: dict[str, dict[str, Any]] = {row["name"]: row for row in client.ask("TKV.STAT")["tiers"]}
        report.evicted = {"host": rows["host"]["num_evicted"], "disk": rows["disk"]["num_evicted"]}
        report.hits = {tier: counters.get(f"{tier}_hits", 0) for tier in ("host", "disk", "shared")}
        report.problems += [f"nothing was hit in tier {tier}" for tier, num in report.hits.items() if not num]
        report.problems += [f"nothing was evicted from tier {tier}" for tier, num in report.evicted.items() if not num]
        if not report.num_aborted:
            report.problems.append("nothing was aborted")


def shm_of(pid: int) -> set[Path]:
    """Return the files in /dev/shm that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {Path(line[line.index("/dev/shm/") :]) for line in lines if "/dev/shm/" in line}


def private_nbytes(pid: int) -> int:
    """Return the bytes of a process's own memory: no files, no shared segments."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise ValueError(f"process {pid} says nothing of its memory")


def main() -> int:
    """Run, print what it came to, and return 1 if something was left."""
    parser = argparse.ArgumentParser(prog="scripts/test-leaks", description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000, help="after a warm-up of a quarter of that")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tkv-leaks-", dir="/tmp") as directory:
        report = LeakRun(Path(directory), args.requests, args.seed).run()
    print(f"{report.num_requests:,} requests, {report.num_aborted:,} aborted, in {report.seconds:.0f} s")
    for who, samples in report.memory.items():
        print(f"{who}: private memory in MiB {' '.join(f'{nbytes / (1 << 20):.1f}' for nbytes in samples)}")
    print(f"hits {report.hits}, evicted {report.evicted}")
    for who, before in report.before.items():
        print(f"{who}: {before} before, {report.after[who]} after")
        print(f"{who}: {report.gained_nbytes[who]:+,} bytes of memory (allowed: {report.allowed_nbytes:,})")
    for problem in report.problems:
        print(f"LEAK: {problem}")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
