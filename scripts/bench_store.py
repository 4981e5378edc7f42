"""Medians of the store's tiers and transports, with the CPU they take, beside memcpy, a plain socket and redis-py.

Every figure of a run is measured in turns, a round each, so that what else the machine does falls on all of them alike.
GB/s is 1e9 bytes of payload a second; CPU is that of both sides, in milliseconds a GB.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import redis
from rich.console import Console
from rich.table import Table

from fake_engine import FakeEngine
from fake_engine import make_namespace as engine_namespace
from records import Buffers, make_chain, make_namespace
from servers import RedisServer, free_port, server_binaries, start_redis
from store_process import store_server
from tierkv.bench.process import cpu_seconds
from tierkv.config import Spill
from tierkv.hostindex import Fetch
from tierkv.keys import anchor_index
from tierkv.layout import Namespace
from tierkv.server_config import DiskConfig, ListenConfig, ServerConfig, SharedConfig
from tierkv.tiers.base import Limits, Record, Ref, Status, Tier
from tierkv.tiers.disk import DiskTier
from tierkv.tiers.shared import SharedTier
from tierkv.transport import parse_address

BATCH_NBYTES = 8 << 20
#: Rounds that are thrown away: first touch of fresh pages is many times slower.
WARM_UP = 2


@dataclass
class Bench:
    """One thing to measure. ``run`` does it once and returns the payload bytes it moved (0: only the time counts)."""

    name: str
    run: Callable[[], int]
    pids: tuple[int, ...] = ()
    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    nbytes: int = 0

    def once(self, count: bool) -> None:
        """Run it; keep the figures if ``count``."""
        cpu, began = self._cpu(), time.perf_counter()
        self.nbytes = self.run()
        took, cpu = time.perf_counter() - began, self._cpu() - cpu
        if count:
            self.seconds.append(took)
            self.cpu_s.append(cpu)

    def _cpu(self) -> float:
        return time.process_time() + sum(cpu_seconds(pid) or 0.0 for pid in self.pids)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def rate(self) -> float:
        """GB/s."""
        return self.nbytes / self.median_s / 1e9

    @property
    def cpu_ms_per_gb(self) -> float:
        return 1e3 * statistics.median(self.cpu_s) / (self.nbytes / 1e9)


def memcpy() -> Bench:
    """M: ``np.copyto`` of 256 MiB."""
    source = np.ones(256 << 20, dtype=np.uint8)
    target = np.zeros_like(source)

    def run() -> int:
        np.copyto(target, source)
        return source.nbytes

    return Bench("memcpy, 256 MiB (M)", run)


def plain_socket(nbytes: int, work: Path, stack: ExitStack) -> Bench:
    """S: a request of a few bytes and a reply of ``nbytes`` into a buffer, a peer in another process."""
    reader, writer = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        reader.close()
        payload = bytes(nbytes)
        while writer.recv(16):
            writer.sendall(payload)
        os._exit(0)
    writer.close()
    stack.callback(os.waitpid, pid, 0)
    stack.callback(reader.close)
    buffer = memoryview(bytearray(nbytes))
    count = max(1, (64 << 20) // nbytes)

    def run() -> int:
        for _ in range(count):
            reader.sendall(b"x")
            at = 0
            while at < nbytes:
                at += reader.recv_into(buffer[at:])
        return count * nbytes

    return Bench("plain socket, request and reply (S)", run, (pid,))


class TierBench:
    """Stores and fetches chains of one tier, in commands of 8 MiB as the server does."""

    def __init__(self, tier: Tier, namespace: Namespace, num: int) -> None:
        self._tier, self._ns = tier, namespace
        tier.add_namespace(namespace)
        self._refs, self._records = make_chain(namespace, num)
        self._sink = Buffers(namespace, num)
        self._step = max(1, BATCH_NBYTES // namespace.payload_nbytes)

    def put(self) -> int:
        """Store all of it."""
        for batch in self._batches(self._records):
            statuses = self._tier.store(self._ns.ns_id(), batch)
            assert all(s is Status.OK for s in statuses), statuses
        return len(self._records) * self._ns.payload_nbytes

    def clear(self) -> None:
        """Evict all of it."""
        self._tier.evict(self._ns.ns_id(), self._refs[::-1])

    def get(self) -> int:
        """Fetch all, verified, into buffers that were touched before."""
        for at in range(0, len(self._refs), self._step):
            refs = self._refs[at : at + self._step]
            results = self._tier.fetch(self._ns.ns_id(), refs, lambda i, at=at: self._sink(at + i))
            assert all(r.status is Status.OK for r in results), results
        return len(self._refs) * self._ns.payload_nbytes

    def _batches(self, records: list[Record]) -> Iterator[list[Record]]:
        for at in range(0, len(records), self._step):
            yield records[at : at + self._step]


def after(prepare: Callable[[], None], bench: Bench) -> Bench:
    """Let ``prepare`` come before each run, untimed."""
    once = bench.once

    def prepared(count: bool) -> None:
        prepare()
        once(count)

    bench.once = prepared  # type: ignore[method-assign]
    return bench


def tier_benches(name: str, tier: Tier, namespace: Namespace, num: int, pids: tuple[int, ...] = ()) -> list[Bench]:
    """Return a put and a get. The eviction before each put is not timed."""
    bench = TierBench(tier, namespace, num)
    put = after(bench.clear, Bench(f"{name} put", bench.put, pids))
    return [put, Bench(f"{name} get, verified", bench.get, pids)]


def redis_py(name: str, server: RedisServer, nbytes: int, num: int) -> list[Bench]:
    """redis-py as it comes, with hiredis: SET and GET of the same values, in pipelines of 8 MiB."""
    client = redis.Redis.from_url(server.url)
    values = [os.urandom(nbytes) for _ in range(num)]
    step = max(1, BATCH_NBYTES // nbytes)
    target = np.zeros(nbytes, dtype=np.uint8)

    def put() -> int:
        for at in range(0, num, step):
            pipe = client.pipeline(transaction=False)
            for i in range(at, min(num, at + step)):
                pipe.set(f"plain:{i}", values[i])
            pipe.execute()
        return num * nbytes

    def get() -> int:
        for at in range(0, num, step):
            pipe = client.pipeline(transaction=False)
            for i in range(at, min(num, at + step)):
                pipe.get(f"plain:{i}")
            for value in pipe.execute():
                np.copyto(target, np.frombuffer(value, dtype=np.uint8))
        return num * nbytes

    def clear() -> None:
        client.delete(*(f"plain:{i}" for i in range(num)))

    return [
        after(clear, Bench(f"{name}, redis-py and hiredis: SET", put, (server.pid,))),
        Bench(f"{name}, redis-py and hiredis: GET and copy", get, (server.pid,)),
    ]


class EngineBench:
    """An engine that stores and fetches through a server, over shared memory or over TCP."""

    def __init__(self, engine: FakeEngine, num: int) -> None:
        self._engine, self._num = engine, num
        self._round = 0
        self._tokens: list[int] = []

    def store(self) -> int:
        """Store a new chain, all commands sent at once; filling the slots is not part of it."""
        replies = self._engine.store(self._items)
        wait(lambda: all(replies))
        letters = b"".join(reply[0] or b"" for reply in replies)
        assert not letters.strip(b"o"), letters
        return self._num * self._engine.shape.payload_nbytes

    def prepare_store(self) -> None:
        self._round += 1
        self._engine.forget()
        chunk = self._engine.namespace.layout.chunk_tokens
        salt = sum(self._engine.engine_id.encode()) * 1_000  # engines of one namespace store different chains
        self._tokens = [salt + self._round * 1_000_003 % 65_521 + i for i in range(self._num * chunk)]
        keys = self._engine.keys(self._tokens)
        entries = [self._engine._fill(keys, i, "", 0) for i in range(self._num)]
        self._items = [self._engine._item(entry, keys, "") for entry in entries]

    def prepare_fetch(self) -> None:
        self._engine.forget()

    def fetch(self) -> int:
        """Fetch the chain, all commands sent at once, on one lane as a plan does."""
        engine, keys = self._engine, self._engine.keys(self._tokens)
        step = max(1, BATCH_NBYTES // engine.shape.payload_nbytes)
        fetches = []
        for at in range(0, self._num, step):
            entries = [engine._reserve(keys, i, "") for i in range(at, min(self._num, at + step))]
            fetches.append(Fetch(entries))
            for i, entry in enumerate(entries):
                entry.fetch, entry.fetch_index = fetches[-1], i
            engine.client.fetch(0, at, keys[anchor_index(at)], fetches[-1])
        wait(lambda: all(fetch.results is not None and fetch.released for fetch in fetches))
        for fetch in fetches:
            assert not (fetch.results or b"-").strip(b"d"), fetch.results
            for entry in fetch.entries:
                engine.index.filled(entry, "disk")
        return self._num * engine.shape.payload_nbytes


def wait(condition: Callable[[], bool]) -> None:
    """Wait for what the client's thread brings, without taking the processor from it."""
    while not condition():
        time.sleep(0.0002)


def engine_benches(name: str, engine: FakeEngine, num: int, pid: int) -> list[Bench]:
    bench = EngineBench(engine, num)
    return [
        after(bench.prepare_store, Bench(f"{name} store", bench.store, (pid,))),
        after(bench.prepare_fetch, Bench(f"{name} fetch", bench.fetch, (pid,))),
    ]


def match_benches(name: str, tier: Tier, namespace: Namespace, refs: list[Ref]) -> list[Bench]:
    """Match of the first 64 and of all of ``refs``, which are all stored."""

    def bench(num: int) -> Bench:
        def run() -> int:
            assert all(tier.match(namespace.ns_id(), refs[:num]))
            return 0

        return Bench(f"{name}: match of {num} keys", run)

    return [bench(64), bench(len(refs))]


def collect(args: argparse.Namespace, work: Path, stack: ExitStack) -> list[Bench]:
    """Start what is measured and return it, in the order of the table."""
    nbytes, num = args.nbytes, max(8, args.mib * (1 << 20) // args.nbytes)
    namespace = make_namespace("bench", nbytes)
    small = make_namespace("bench-match", 4096)
    refs, records = make_chain(small, args.keys)
    benches = [memcpy(), plain_socket(nbytes, work, stack)]

    disk = DiskTier(work / "disk", Limits(budget=4 << 30))
    stack.callback(disk.close)
    benches += tier_benches("disk", disk, namespace, num)
    disk.add_namespace(small)
    disk.store(small.ns_id(), records)
    benches += match_benches("disk", disk, small, refs)
    for name, binary in server_binaries().items():
        server = start_redis(work, binary=binary)
        stack.callback(server.kill)
        tier = SharedTier(SharedConfig(url=server.url, spill=Spill.THROUGH))
        stack.callback(tier.close)
        benches += tier_benches(name, tier, namespace, num, (server.pid,))
        benches += redis_py(name, server, nbytes, num)
        tier.add_namespace(small)
        for at in range(0, len(records), 512):
            tier.store(small.ns_id(), records[at : at + 512])
        benches += match_benches(name, tier, small, refs)
    return benches + transports(args, work, stack, num)


def transports(args: argparse.Namespace, work: Path, stack: ExitStack, num: int) -> list[Bench]:
    """Return store and fetch through a server: descriptors passed, and TCP without TLS on loopback."""
    directory = work / "server"
    port = free_port()
    listen = ListenConfig(socket=directory / "tierkv.sock", tcp=f"127.0.0.1:{port}", insecure=True)
    # Full after the first rounds: like the tier alone, it writes where it has written before.
    config = ServerConfig(listen=listen, disk=DiskConfig(dir=directory, bytes=4 * num * args.nbytes))
    pid = stack.enter_context(store_server(config, work / "server.err"))
    namespace = engine_namespace("bench/engine", block_nbytes=args.nbytes // 4)
    benches: list[Bench] = []
    for name, address in (("shared memory", config.socket), ("TCP", parse_address(f"tkv://127.0.0.1:{port}"))):
        engine = stack.enter_context(FakeEngine(address, namespace, num_slots=num + 2, engine_id=name))
        benches += engine_benches(f"server, {name}:", engine, num, pid)
    return benches


#: The least ratio to memcpy (M) or to a plain socket (S) that each figure is to reach.
BARS = {
    "disk put": ("M", 0.2),
    "disk get, verified": ("M", 0.45),
    "put": ("S", 0.45),
    "get, verified": ("S", 0.45),
    "server, shared memory: store": ("M", 0.6),
    "server, shared memory: fetch": ("M", 0.6),
}


def show(benches: list[Bench], console: Console) -> None:
    """Print the table."""
    table = Table(title="Payloads")
    for column in ("", "GB/s", "of M", "of S", "CPU ms/GB", "bar"):
        table.add_column(column, justify="left" if not column else "right")
    m, s = benches[0].rate, benches[1].rate
    for b in benches:
        if b.nbytes:
            of, bar = BARS.get(b.name) or BARS.get(b.name.split(" ", 1)[-1]) or ("", 0.0)
            goal = f"{bar:g} {of}" if of else ""
            table.add_row(
                b.name, f"{b.rate:.2f}", f"{b.rate / m:.2f}", f"{b.rate / s:.2f}", f"{b.cpu_ms_per_gb:.0f}", goal
            )
    console.print(table)
    table = Table(title="Matches")
    for column in ("", "ms"):
        table.add_column(column, justify="left" if not column else "right")
    for b in benches:
        if not b.nbytes:
            table.add_row(b.name, f"{1e3 * b.median_s:.2f}")
    console.print(table)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Medians of the store's tiers and transports.")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (7)")
    parser.add_argument("--nbytes", type=int, default=1 << 20, help="bytes of a payload (1 MiB)")
    parser.add_argument("--mib", type=int, default=128, help="payload that each figure moves a round, in MiB (128)")
    parser.add_argument("--keys", type=int, default=8192, help="keys of the long match (8192)")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tierkv-bench-") as work, ExitStack() as stack:
        benches = collect(args, Path(work), stack)
        for number in range(WARM_UP + args.rounds):
            print(f"round {number + 1} of {WARM_UP + args.rounds}", file=sys.stderr, flush=True)
            for bench in benches:
                bench.once(number >= WARM_UP)
    show(benches, Console(width=110))
    if args.json:
        rows = [
            {"name": b.name, "seconds": b.median_s}
            | ({"gb_per_s": b.rate, "cpu_ms_per_gb": b.cpu_ms_per_gb} if b.nbytes else {})
            for b in benches
        ]
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
