"""A soak of the store server: clients that store, match, fetch and evict while the server is killed again and again.

Every payload that comes back is compared with what its key says it must be. Between kills the server's own figures are
read: bytes within the budget, the size of its files, its memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine, make_namespace, payload_bytes, wait_until
from servers import RedisServer, start_redis
from store_process import start_store
from tierkv.client import AdminClient
from tierkv.config import Spill
from tierkv.errors import ConfigError, TierKVError
from tierkv.hostindex import Entry, Fetch
from tierkv.keys import anchor_index
from tierkv.layout import Namespace
from tierkv.server_config import ServerConfig

CHUNK_TOKENS = 32
#: 2 layers of 2 blocks of 256 KiB: a payload of 1 MiB.
BLOCK_NBYTES = 256 << 10
#: A shared tier that evicts all the time.
REDIS_ARGS = ("--maxmemory", "512mb", "--maxmemory-policy", "allkeys-lru")
NUM_PROMPTS = 400
MAX_CHUNKS = 12


def soak_namespace(number: int) -> Namespace:
    """Return one of the namespaces of the soak; clients of equal parity share one."""
    return make_namespace(f"soak/model-{number % 2}", block_nbytes=BLOCK_NBYTES)


def prompt(number: int) -> list[int]:
    """Return a prompt: families share their first chunks."""
    rng = random.Random(number)
    family, num_chunks = number % 20, rng.randint(1, MAX_CHUNKS)
    shared = min(num_chunks, 1 + family % 4)
    return [1000 + family if i < shared * CHUNK_TOKENS else 5000 + number for i in range(num_chunks * CHUNK_TOKENS)]


class SoakEngine(FakeEngine):
    """A fake engine that outlives its server: slots of a lost fetch are free again when their lease ends."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._lost: list[Fetch] = []
        super().__init__(*args, **kwargs)

    def collect(self) -> None:
        """Take back the slots that nobody can write any more."""
        still = []
        for fetch in self._lost:
            if fetch.released:
                for entry in fetch.entries:
                    self.index.stopped(entry)
            else:
                still.append(fetch)
        self._lost = still

    def _fetch_entries(self, entries: Sequence[Entry], start: int, keys: Sequence[bytes]) -> None:
        fetch = Fetch(entries)
        for i, entry in enumerate(entries):
            entry.fetch, entry.fetch_index = fetch, i
        self.client.fetch(0, start, keys[anchor_index(start)], fetch)
        wait_until(lambda: fetch.results is not None, what="no reply to FETCH")
        letters = fetch.results or b"-" * len(entries)
        for letter, entry in zip(letters, entries, strict=True):
            if letter in b"ds":
                self.index.filled(entry, "disk" if letter == ord("d") else "shared")
            else:
                self.index.drop(entry, filling=True)
        self._lost.append(fetch)
        self.collect()


class Client:
    """One client's life: random operations until the time is over.

    Args:
        socket: the server's.
        number: which client; seeds its choices.
        stop_at: monotonic time at which it ends.
    """

    def __init__(self, socket: Path, number: int, stop_at: float) -> None:
        self._socket = socket
        self._rng = random.Random(number)
        self._stop_at = stop_at
        self._namespace = soak_namespace(number)
        self._name = f"soak-{number}"
        self.counts: Counter[str] = Counter()

    def run(self) -> dict[str, int]:
        """Live, and return what was done; ``bad`` counts payloads that were not what their key says."""
        engine = self._join()
        try:
            while time.monotonic() < self._stop_at:
                if not engine.client.connected():
                    self.counts["disconnected"] += 1
                    with contextlib.suppress(TimeoutError):
                        wait_until(engine.client.connected, timeout_s=1.0)
                    continue
                self._one(engine)
        finally:
            engine.close()
        return dict(self.counts)

    def _join(self) -> SoakEngine:
        while True:
            try:
                return SoakEngine(self._socket, self._namespace, num_slots=48, engine_id=self._name)
            except (TierKVError, TimeoutError, OSError):
                if time.monotonic() > self._stop_at:
                    raise
                time.sleep(0.1)

    def _one(self, engine: SoakEngine) -> None:
        what = self._rng.choices(["store", "fetch", "match", "evict"], [4, 6, 4, 1])[0]
        # A few prompts are popular: what is asked for is often stored.
        number = int(NUM_PROMPTS * self._rng.random() ** 2)
        tokens = prompt(number)
        self.counts[what] += 1
        if what == "store":
            engine.put(tokens, wait=False)
        elif what == "match":
            letters = engine.match(tokens)
            assert len(letters) <= len(tokens) // CHUNK_TOKENS and not letters.strip(b"ds")
        elif what == "evict":
            self._evict(engine, tokens)
        else:
            self._fetch(engine, tokens)

    def _fetch(self, engine: SoakEngine, tokens: list[int]) -> None:
        engine.forget()
        keys = engine.keys(tokens)
        for key, payload in zip(keys, engine.get(tokens), strict=False):
            self.counts["payloads"] += 1
            self.counts["bad"] += payload != payload_bytes(key, 0, len(payload))
        self.counts.update(f"from_{source}" for source in engine.last_sources)

    def _evict(self, engine: SoakEngine, tokens: list[int]) -> None:
        keys = engine.keys(tokens)
        body = {"keys": {engine.ns: [key.hex() for key in keys]}}
        with contextlib.suppress(TierKVError), AdminClient(self._socket) as admin:
            self.counts["evicted"] += admin.ask("TKV.EVICT", body)["num_removed"]


def _client_main(socket: str, number: int, stop_at: float, out: Any) -> None:
    try:
        out.put((number, Client(Path(socket), number, stop_at).run(), ""))
    except BaseException as error:  # the parent reports it
        out.put((number, {}, repr(error)))
        raise


@dataclass
class Report:
    """What a soak came to. Bytes; ``problems`` are sentences, empty where all is well."""

    seconds: float = 0.0
    kills: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    budget: int = 0
    max_live_nbytes: int = 0
    max_file_nbytes: int = 0
    rss_nbytes: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "counts": dict(sorted(self.counts.items()))}


class Soak:
    """Runs the server, kills it, and looks at what it leaves.

    Args:
        directory: where everything lies.
        seconds: how long.
        kill_every_s: seconds between two kills.
        budget: of the disk.
        redis: the shared tier, or None.
    """

    def __init__(
        self, directory: Path, seconds: float, kill_every_s: float, budget: int, redis: RedisServer | None
    ) -> None:
        self._directory = directory
        self._seconds = seconds
        self._kill_every_s = kill_every_s
        self._config = ServerConfig.make(
            directory / "store",
            budget,
            redis.url if redis else None,
            spill={"shared": Spill.THROUGH},
        )
        self.report = Report(budget=budget)
        self._server: subprocess.Popen[bytes] | None = None

    def run(self) -> Report:
        """Soak and return the report."""
        started = time.monotonic()
        stop_at = started + self._seconds
        self._start_server()
        context = multiprocessing.get_context("spawn")
        out = context.Queue()
        clients = [
            context.Process(target=_client_main, args=(str(self._config.socket), i, stop_at, out)) for i in range(4)
        ]
        try:
            for client in clients:
                client.start()
            while time.monotonic() < stop_at:
                self._live_until(min(stop_at, time.monotonic() + self._kill_every_s))
                if time.monotonic() < stop_at:
                    self._kill_server()
                    self._start_server()
                self._show(started)
            for _ in clients:
                number, counts, error = out.get(timeout=60)
                self.report.counts.update(counts)
                if error:
                    self.report.problems.append(f"client {number} ended with {error}")
        finally:
            for client in clients:
                client.join(timeout=10)
                client.kill()
            self._stop_server()
        self.report.seconds = round(time.monotonic() - started, 1)
        self._judge()
        return self.report

    def _start_server(self) -> None:
        self._server = start_store(self._config, self._directory / "server.err")
        with contextlib.suppress(TimeoutError):
            wait_until(self._stat, what="the server did not start")

    def _kill_server(self) -> None:
        assert self._server is not None
        self._server.kill()
        self._server.wait()
        self.report.kills += 1

    def _stop_server(self) -> None:
        if self._server is None or self._server.poll() is not None:
            self.report.problems.append("the server was not running at the end")
            return
        self._server.send_signal(signal.SIGTERM)
        try:
            code = self._server.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._server.kill()
            code = -9
        if code:
            self.report.problems.append(f"the server ended with {code} at SIGTERM")

    def _stat(self) -> dict[str, Any] | None:
        try:
            with AdminClient(self._config.socket) as admin:
                return {tier["name"]: tier for tier in admin.ask("TKV.STAT")["tiers"]}
        except (TierKVError, ConfigError, OSError):
            return None

    def _live_until(self, moment: float) -> None:
        """Look at the server every second until ``moment``."""
        while time.monotonic() < moment:
            time.sleep(min(1.0, max(0.01, moment - time.monotonic())))
            assert self._server is not None
            if self._server.poll() is not None:
                said = (self._directory / "server.err").read_text(errors="replace")[-3000:]
                self.report.problems.append(f"the server died by itself, with {self._server.returncode}: {said}")
                self._start_server()
            stat = self._stat()
            if stat is None:
                continue
            self.report.max_live_nbytes = max(self.report.max_live_nbytes, stat["disk"]["nbytes"])
            self.report.max_file_nbytes = max(self.report.max_file_nbytes, file_nbytes(self._config.disk_dir))
            if stat["disk"]["nbytes"] > stat["disk"]["budget"]:
                self.report.problems.append(f"{stat['disk']['nbytes']} bytes are live, over the budget")
            if stat["disk"]["num_bad"]:
                self.report.problems.append(f"{stat['disk']['num_bad']} records on disk were bad")
        with contextlib.suppress(OSError):
            assert self._server is not None
            self.report.rss_nbytes.append(rss_nbytes(self._server.pid))

    def _show(self, started: float) -> None:
        r = self.report
        rss = r.rss_nbytes[-1] >> 20 if r.rss_nbytes else 0
        print(
            f"{time.monotonic() - started:6.0f} s  {r.kills} kills  live {r.max_live_nbytes >> 20} MiB  "
            f"files {r.max_file_nbytes >> 20} MiB  memory {rss} MiB  {len(r.problems)} problems",
            file=sys.stderr,
            flush=True,
        )

    def _judge(self) -> None:
        r = self.report
        if r.counts["bad"]:
            r.problems.append(f"{r.counts['bad']} payloads were not what their keys say")
        for what in ("store", "fetch", "match", "evict", "from_disk"):
            if r.counts[what] < 10:
                r.problems.append(f"only {r.counts[what]} of {what}: the soak says little")
        # A tenth over the budget, and a few transactions (docs/formats.md).
        if r.max_file_nbytes > 1.1 * r.budget + (64 << 20):
            r.problems.append(f"files of {r.max_file_nbytes} bytes for a budget of {r.budget}")
        half = len(r.rss_nbytes) // 2
        if half >= 3 and max(r.rss_nbytes[half:]) > 1.25 * max(r.rss_nbytes[:half]) + (64 << 20):
            r.problems.append("memory grew from one half of the soak to the other")


def file_nbytes(directory: Path) -> int:
    """Return the bytes that the files below ``directory`` take from the filesystem."""
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file():
                total += path.stat().st_blocks * 512
    return total


def rss_nbytes(pid: int) -> int:
    """Return the private memory of a process: neither the engines' pools nor the mapped database count.

    Raises:
        OSError: it has gone.
    """
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


def main() -> int:
    """Soak from the command line; exit status 1 where something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (30)")
    parser.add_argument("--kill-every", type=float, default=30.0, help="seconds between two kills of the server (30)")
    parser.add_argument("--budget", type=int, default=1 << 30, help="bytes of the disk tier (1 GiB)")
    parser.add_argument("--no-redis", action="store_true", help="without a shared tier")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tierkv-soak-") as work:
        redis = (
            None
            if args.no_redis
            else start_redis(Path(work), "--maxmemory", "512mb", "--maxmemory-policy", "allkeys-lru")
        )
        try:
            report = Soak(Path(work), 60 * args.minutes, args.kill_every, args.budget, redis).run()
        finally:
            if redis:
                redis.kill()
    print(json.dumps(report.as_dict(), indent=2))
    return 1 if report.problems else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
