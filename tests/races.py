"""Races of the host pool: slots that are given away while somebody still reads or writes them.

One engine's scheduler half (in the bench's model of vLLM and of a GPU), its real store client and its real pool, and a
real store server in another process, whose copies stop in the middle (:mod:`held_store`). A round brings the server
into the middle of copies, has the engine give up on them in one of many ways, uses the pool on for other chunks, and
lets the server go on. Then every byte of the pool is what its key says, or one that only a held copy may have written::

    python tests/races.py --seconds 300 --seed 1
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

import scheduler_bench
import tierkv.client as client_module
import tierkv.health as health_module
from fake_engine import wait_until
from held_store import Gates
from leaks import stop_process
from scheduler_bench import CHUNK_TOKENS, IDENTITY, LAYOUT, PAYLOAD_NBYTES, Bench, Request, small_world
from servers import RedisServer, start_redis
from soak import SoakEngine
from store_process import answers
from tierkv import __version__
from tierkv.client import AdminClient, StoreClient
from tierkv.config import PROTOCOL_VERSION, Spill
from tierkv.hostindex import Entry, Fetch
from tierkv.keys import chain_keys, root_key
from tierkv.layout import Namespace, Shard
from tierkv.messages import Hello
from tierkv.pool import HostPool
from tierkv.server_config import ServerConfig

NUM_SLOTS = 48
NUM_BLOCKS = 160
DEADLINE_S = 0.15
#: Chunks of a prompt of the library, which the store server holds, and of one that nobody has seen.
LIBRARY_CHUNKS = 6
FRESH_CHUNKS = 5
NUM_LIBRARY = 12
CANARY = b"\xa5" * PAYLOAD_NBYTES
BUDGETS = {
    "MAX_PLANS": 8,
    "PLAN_NBYTES": 36 * PAYLOAD_NBYTES,
    "COMMAND_NBYTES": 4 * PAYLOAD_NBYTES,
    "STORE_NBYTES": 400 * PAYLOAD_NBYTES,
}
NAMESPACE = Namespace(IDENTITY.hex(), "races", LAYOUT, Shard())


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """Make the client's times short: a server that stands still is out soon, and tried again soon."""
    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (client_module, "REPLY_TIMEOUT_S", 0.6),
            (client_module, "STORE_TIMEOUT_S", 5.0),
            (client_module, "CONNECT_TIMEOUT_S", 0.5),
            (health_module, "BACKOFF_MIN_S", 0.02),
            (health_module, "BACKOFF_MAX_S", 0.1),
            (scheduler_bench, "DEADLINE_S", DEADLINE_S),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        stack.enter_context(mock.patch.object(StoreClient, "_patience_s", lambda self: 0.02))
        stack.enter_context(small_world(**BUDGETS))
        yield


@dataclass
class RaceCounts:
    """What a run came to, in chunks or slots where nothing else is said.

    Attributes:
        rounds: by kind.
        reused_while_copied: slots that had other contents while the server was in the middle of copying them.
        dropped_generations: copies that the server dropped because the slot's generation had moved.
        torn_copies: those of them that were in the middle when it moved: half of each chunk was copied.
        quarantined: slots that were given up while the server held them.
        late_writes: of these, those that it wrote after that.
        writes_after_close: slots that it wrote after the engine had left.
        slots_checked, payloads_checked: comparisons of a slot, and of what a tier returned, with what its key says.
        wrong_bytes: comparisons that failed.
        kills, stops, restarts: of the server.
        problems: sentences; empty where all is well.
    """

    seed: int = 0
    seconds: float = 0.0
    rounds: Counter[str] = field(default_factory=Counter)
    reused_while_copied: int = 0
    dropped_generations: int = 0
    torn_copies: int = 0
    quarantined: int = 0
    late_writes: int = 0
    writes_after_close: int = 0
    slots_checked: int = 0
    payloads_checked: int = 0
    payloads_by_tier: Counter[str] = field(default_factory=Counter)
    wrong_bytes: int = 0
    kills: int = 0
    stops: int = 0
    restarts: int = 0
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {name: dict(v) if isinstance(v, Counter) else v for name, v in vars(self).items()}


class RaceEngine(Bench):
    """The bench's engine with the real store client instead of a model of it.

    Args:
        socket: the store server's.
        seed: names it.
        counts: where comparisons are counted.
        contents: the payload of every chunk that was ever computed, by key; shared by all engines of a run.

    Attributes:
        fetches: every FETCH that was sent.
    """

    def __init__(self, socket: Path, seed: int, counts: RaceCounts, contents: dict[bytes, bytes]) -> None:
        super().__init__(seed, num_slots=NUM_SLOTS, num_blocks=NUM_BLOCKS, token_budget=1 << 12)
        self.counts = counts
        self.contents = contents
        self.fetches: list[Fetch] = []
        hello = Hello(
            version=__version__,
            protocol=PROTOCOL_VERSION,
            engine_id=f"races-{seed}",
            pid=os.getpid(),
            namespace=NAMESPACE,
            shape=self.pool.shape,
        )
        client = StoreClient(socket, hello, self.pool, None, self.sched._on_push)
        if client.start() is None:
            client.close()
            raise TimeoutError(f"no store server answers at {socket}")
        send = client.fetch

        def fetch(lane: int, start: int, anchor: bytes, fetch: Fetch) -> None:
            self.fetches.append(fetch)
            send(lane, start, anchor, fetch)

        client.fetch = fetch  # type: ignore[method-assign]
        self.client: Any = client
        self.sched.membership.found = (IDENTITY, client)

    @property
    def now(self) -> float:
        """The real time: the store server lives in it."""
        return time.monotonic()

    @now.setter
    def now(self, _: float) -> None:
        pass

    def close(self) -> None:
        """Leave the server, in whatever state."""
        self.client.close()
        super().close()

    def _check_answer(self, request: Request, num_computed: int, answer: tuple[int | None, bool]) -> None:
        """A claim is a fact: what is claimed lies in the pool, byte for byte."""
        for at in range(num_computed, num_computed + (answer[0] or 0), CHUNK_TOKENS):
            key = self.keys[request.request_id][at // CHUNK_TOKENS]
            entry = self.sched.index.peek(key)
            self.compare(key, b"" if entry is None else self.payload(entry.slot), "claimed")

    def compare(self, key: bytes, data: bytes, what: str) -> None:
        """Note whether a chunk's bytes are what its key says."""
        self.counts.slots_checked += 1
        if data != self.contents[key]:
            self.counts.wrong_bytes += 1
            self.counts.problems.append(f"the chunk {key.hex()[:12]} is {what} with other bytes than its key says")

    def check_slots(self) -> None:
        """Compare every chunk that is ready in the pool."""
        for entry in self.sched.index.snapshot():
            self.compare(entry.key, self.payload(entry.slot), "in the host pool")

    def in_use(self) -> set[int]:
        """Return the slots of chunks that are ready, or that the workers copy into."""
        copying = {entry.slot for entry in self.sched.spill.copying.values()}
        return copying | {entry.slot for entry in self.sched.index.snapshot()}

    # -- what a round does

    def go_on(self) -> None:
        """One step of the engine; its workers are quick."""
        self.run_device()
        self.step()

    def finish_all(self, timeout_s: float = 15.0) -> None:
        """Step until every request is over.

        Raises:
            TimeoutError: one is not.
        """
        until = time.monotonic() + timeout_s
        while self.requests:
            self.go_on()
            if time.monotonic() > until:
                raise TimeoutError(f"requests do not end: {[r.status for r in self.requests.values()]}")
        for _ in range(2):  # what was copied last is sent
            self.go_on()

    def serve(self, prompts: Sequence[list[int]]) -> None:
        """Have prompts computed (or loaded), with nothing of them on the GPU."""
        for tokens in prompts:
            self.gpu.reset()
            self.submit(list(tokens))
            self.finish_all()

    def wait_stored(self) -> None:
        """Wait until the store server has answered for all that was sent, or is out."""
        wait_until(lambda: not self.sched.spill.queue.nbytes, 15.0, "stores are not answered")

    def forget(self, prompts: Sequence[list[int]]) -> None:
        """Have the chunks of prompts leave the host pool and the GPU, as an operator's eviction from it does."""
        self.push("invalidate", [key for tokens in prompts for key in keys_of(tokens)])
        self.go_on()
        self.gpu.reset()

    def has_stored(self, tokens: list[int]) -> bool:
        """Return whether the store server says that it has a prompt, and would be asked for it."""
        keys = keys_of(tokens)
        reply = self.client.match(0, 0, keys[0], keys)
        wait_until(lambda: reply.letters is not None, 10.0, "no reply to MATCH")
        return len(reply.letters) == len(keys) and not self.client.denies(keys[0])

    @property
    def num_stale(self) -> int:
        return self.sched.spill.queue.counters["stores_stale"]


def keys_of(tokens: Sequence[int]) -> list[bytes]:
    """Return the keys of a prompt's chunks, before any reset of the cache."""
    return chain_keys(root_key(IDENTITY), tokens, CHUNK_TOKENS)


class Arena:
    """The store server of a run, its engine, and what is known of both.

    Args:
        directory: where everything lies; its path is short enough for a socket's.
        seed: decides the order and the details of the rounds.
        redis: the shared tier, or None.
    """

    def __init__(self, directory: Path, seed: int, redis: RedisServer | None) -> None:
        self.counts = RaceCounts(seed=seed)
        self.rng = random.Random(seed)
        self._directory = directory
        self._redis = redis
        self.gates = Gates(directory / "gates")
        self.gates.open()
        self._disk = Spill.THROUGH
        self._server: subprocess.Popen[bytes] | None = None
        self._num_engines = self._num_prompts = 0
        self._contents: dict[bytes, bytes] = {}
        self.library: list[list[int]] = []
        try:
            self.start_server()
            self.engine = self._new_engine()
        except BaseException:
            if self._server is not None:
                self.kill_server()
            raise

    # -- the server and the engine

    @property
    def config(self) -> ServerConfig:
        url = self._redis.url if self._redis else None
        return ServerConfig.make(
            self._directory / "store",
            64 << 20,
            url,
            self._directory / "store" / "tierkv.sock",
            spill={"disk": self._disk, "shared": Spill.THROUGH} if url else {},
        )

    def start_server(self) -> None:
        """Start a server, and wait until it answers."""
        script = Path(__file__).with_name("held_store.py")
        with open(self._directory / "server.err", "ab") as err:
            self._server = subprocess.Popen(
                [sys.executable, str(script), str(self._directory / "gates")],
                stdin=subprocess.PIPE,
                stdout=err,
                stderr=err,
            )
        assert self._server.stdin is not None
        self._server.stdin.write(msgspec.json.encode(self.config, enc_hook=str))
        self._server.stdin.close()
        wait_until(lambda: answers(self.config), 20.0, "the store server did not start")

    @property
    def pid(self) -> int:
        assert self._server is not None
        return self._server.pid

    def kill_server(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Kill the server, and wait until it has gone."""
        assert self._server is not None
        self._server.send_signal(number)
        try:
            self._server.wait(20)
        except subprocess.TimeoutExpired:
            self.counts.problems.append("the store server did not leave when it was told to")
            self._server.kill()
            self._server.wait()
        self.counts.kills += number is signal.SIGKILL

    def restart_server(self) -> None:
        """Start the next server; with a shared tier, every other one has no disk: what it fetches comes from there."""
        if self._redis is not None:
            self._disk = Spill.NEVER if self._disk is Spill.THROUGH else Spill.THROUGH
        self.start_server()
        self.counts.restarts += 1
        self.connected()

    def connected(self) -> None:
        """Wait until the engine has a session."""
        wait_until(self.engine.client.connected, 15.0, "the engine does not find the server again")

    def _new_engine(self) -> RaceEngine:
        self._num_engines += 1
        number = 1000 * self.counts.seed + self._num_engines
        return RaceEngine(self.config.socket, number, self.counts, self._contents)

    def replace_engine(self) -> None:
        """Close the engine, whatever it is doing, and start another."""
        self.counts.dropped_generations += self.engine.num_stale
        self.engine.close()
        self.engine = self._new_engine()

    def close(self) -> None:
        """Stop everything."""
        self.gates.open()
        self.counts.dropped_generations += self.engine.num_stale
        self.engine.close()
        if self._server is not None and self._server.poll() is None:
            self._server.send_signal(signal.SIGCONT)
            self.kill_server(signal.SIGTERM)

    # -- prompts

    def fresh(self, count: int) -> list[list[int]]:
        """Return prompts that nobody has seen."""
        found = []
        for _ in range(count):
            self._num_prompts += 1
            found.append([self._num_prompts] * (FRESH_CHUNKS * CHUNK_TOKENS + 1))
        return found

    def stock(self) -> None:
        """Have the store server hold a library of prompts, and no chunk of them anywhere above.

        Raises:
            TimeoutError: it does not take them, however often they are offered.
        """
        for _ in range(10):  # on a busy machine the impatient client may lose its session meanwhile
            self.connected()
            first, self._num_prompts = self._num_prompts, self._num_prompts + NUM_LIBRARY
            num_tokens = LIBRARY_CHUNKS * CHUNK_TOKENS + 1
            self.library = [[50_000 + first + i] * num_tokens for i in range(NUM_LIBRARY)]
            for tokens in self.library:
                self.engine.serve([tokens])
                self.engine.wait_stored()
                self.engine.forget([tokens])
            with AdminClient(self.config.socket) as admin:  # what waits for the shared tier is written, engines know
                admin.call("TKV.DRAIN", "10")
            if all(self.engine.has_stored(tokens) for tokens in self.library):
                return
        raise TimeoutError("the store server does not take what it is to hold")

    def churn(self, count: int = 12) -> None:
        """Serve fresh prompts: at least the whole pool gets other contents."""
        self.engine.serve(self.fresh(count))
        self.engine.check_slots()

    def audit(self, prompts: Sequence[list[int]]) -> None:
        """Read prompts as another engine does, and compare what the tiers return."""
        with SoakEngine(self.config.socket, NAMESPACE, num_slots=64, engine_id="auditor") as auditor:
            for tokens in prompts:
                auditor.forget()
                for key, payload in zip(auditor.keys(tokens), auditor.get(tokens), strict=False):
                    self.counts.payloads_checked += 1
                    if payload != self._contents[key]:
                        self.counts.wrong_bytes += 1
                        self.counts.problems.append(f"a tier returned {key.hex()[:12]} with other bytes")
                self.counts.payloads_by_tier.update(auditor.last_sources)

    # -- rounds of STORE: the slot gets other contents in the middle of the server's copy

    def round_store(self, reuse: Callable[[], None]) -> None:
        """Hold a copy out of a slot, have the slot reused, let the copy go on."""
        engine, gates = self.engine, self.gates
        stored = self.fresh(4)
        gates.store = 1
        engine.serve(stored)
        wait_until(lambda: gates.store_held or not engine.sched.spill.queue.nbytes, 10.0, "no copy was held")
        slot, generation, held = gates.slot, gates.generation, gates.store_held
        reuse()
        self.counts.reused_while_copied += bool(held) and int(engine.pool.generations[slot]) != generation
        gates.store = 0
        engine.wait_stored()
        engine.check_slots()
        self.audit(stored)

    def round_promote(self) -> None:
        """The same with a copy to the disk of what a fetch has just brought from the shared tier."""
        engine, gates = self.engine, self.gates
        if self._disk is Spill.THROUGH:
            self.kill_server()
            self.restart_server()
            self.stock()  # in the shared tier only
        self.kill_server()
        self.restart_server()
        gates.store = 1
        engine.serve(self.library[:3])
        wait_until(lambda: gates.store_held, 10.0, "nothing is copied to the disk of what was fetched")
        slot, generation = gates.slot, gates.generation
        self.churn()
        self.counts.reused_while_copied += int(engine.pool.generations[slot]) != generation
        gates.store = 0
        engine.wait_stored()
        engine.check_slots()

    def reuse_by_traffic(self) -> None:
        self.churn()

    def reuse_by_eviction(self) -> None:
        """An operator evicts everything from the host pool; what is computed next takes the slots."""
        engine = self.engine
        engine.push("invalidate", [entry.key for entry in engine.sched.index.snapshot()])
        engine.go_on()
        self.churn()

    def reuse_by_reset(self) -> None:
        """The cache is reset; what is computed next takes the slots, and is for nobody else."""
        self.engine.reset()
        self.churn()

    def reuse_while_stopped(self) -> None:
        """The server stands still in the middle of a copy."""
        stop_process(self.pid)
        self.counts.stops += 1
        self.gates.store = 0
        self.churn()
        os.kill(self.pid, signal.SIGCONT)

    # -- rounds of FETCH: the engine gives slots up while the server is about to write them

    def hold_fetches(self) -> list[Entry]:
        """Ask for the library until the server has slots in hand, and return what it holds.

        Raises:
            TimeoutError: it does not, however often it is asked.
        """
        engine, gates = self.engine, self.gates
        for _ in range(10):
            engine.forget(self.library)
            wait_until(lambda: all(fetch.released for fetch in engine.fetches), 10.0, "fetches are not answered")
            engine.fetches.clear()
            gates.fetch = 1
            for tokens in self.rng.sample(self.library, 4):
                engine.submit(list(tokens))
            num = len(engine.fetches)
            with contextlib.suppress(TimeoutError):
                wait_until(lambda num=num: gates.fetch_held == num, 0.4)
                if num >= 2 and engine.client.connected():
                    return [entry for fetch in engine.fetches for entry in fetch.entries]
            gates.fetch = 0
            self._abort_all()
            self.connected()
        raise TimeoutError("the server does not fetch what it holds")

    def give_up_at_the_deadline(self) -> None:
        """Time is over; an operator evicts what is on its way, and somebody asks for it again."""
        self.engine.finish_all()
        self._ask_again()

    def give_up_by_abort(self) -> None:
        self._abort_all()
        self._ask_again()

    def _abort_all(self) -> None:
        for request in list(self.engine.requests.values()):
            if request.status != "finished":
                self.engine.finish(request)
        self.engine.finish_all()

    def _ask_again(self) -> None:
        """Drop what is on its way; new requests for it take other slots."""
        engine = self.engine
        waiting = [f for f in engine.fetches if f.results is None]
        engine.push("invalidate", [entry.key for fetch in waiting for entry in fetch.entries])
        engine.gpu.reset()
        for tokens in self.library:
            engine.submit(list(tokens))
        engine.finish_all()

    def give_up_by_reset(self) -> None:
        self.engine.reset()
        self.engine.finish_all()

    def give_up_on_the_server(self) -> None:
        """It does not answer: the engine goes on without it."""
        engine = self.engine
        wait_until(lambda: not engine.client.connected(), 10.0, "the engine waits for a server that is stuck")
        wait_until(lambda: all(fetch.results is not None for fetch in engine.fetches), 10.0, "fetches are not given up")
        engine.finish_all()

    def stop_the_server(self) -> None:
        """The same, and the server really stands still."""
        stop_process(self.pid)
        self.counts.stops += 1
        self.give_up_on_the_server()

    def round_fetch(self, give_up: Callable[[], None]) -> None:
        """Have the server hold slots, give up on them, use the pool on, and let the server write."""
        engine, gates, counts = self.engine, self.gates, self.counts
        entries = self.hold_fetches()
        held = {entry.slot: entry for entry in entries}
        stopped = give_up == self.stop_the_server
        give_up()
        engine.go_on()
        given_up = {slot: entry for slot, entry in held.items() if engine.sched.index.peek(entry.key) is not entry}
        if not given_up:
            counts.problems.append("nothing was given up")
        for slot in given_up:
            engine.write(slot, CANARY)
        counts.quarantined += len(given_up)
        for _ in range(2):
            self.churn(8)
            if reused := engine.in_use() & given_up.keys():
                counts.problems.append(f"slots {sorted(reused)} were used while the server held them")
        lent = {entry.slot for fetch in engine.fetches if not fetch.released for entry in fetch.entries} | held.keys()
        before = {slot: engine.payload(slot) for slot in range(NUM_SLOTS) if slot not in lent}
        gates.open()
        if stopped:
            os.kill(self.pid, signal.SIGCONT)
        mine = [fetch for fetch in engine.fetches if any(held.get(e.slot) is e for e in fetch.entries)]
        wait_until(lambda: all(fetch.released for fetch in mine), 15.0, "the server does not give slots back")
        for slot, data in before.items():
            if engine.payload(slot) != data:
                counts.wrong_bytes += 1
                counts.problems.append(f"slot {slot} changed, which nobody had lent")
        for slot, entry in given_up.items():
            data = engine.payload(slot)
            if data != CANARY:
                counts.late_writes += 1
                engine.compare(entry.key, data, f"written late into slot {slot}")
        engine.check_slots()
        wait_until(self._all_back, 15.0, "slots do not come back")
        engine.check_slots()

    def _all_back(self) -> bool:
        self.engine.go_on()
        return not self.engine.sched.index.num_quarantined

    def round_kill(self, number: signal.Signals) -> None:
        """The server dies with slots in hand, or is told to leave: its leases end, and nobody writes any more."""
        engine, counts = self.engine, self.counts
        held = {entry.slot: entry for entry in self.hold_fetches()}
        if number is signal.SIGTERM:
            assert self._server is not None
            self._server.send_signal(number)
            time.sleep(0.05)
            self.churn(4)
            self.gates.open()
        self.kill_server(number)
        self.gates.open()
        wait_until(lambda: all(fetch.released for fetch in engine.fetches), 10.0, "leases do not end with the server")
        counts.quarantined += len(held)
        for slot in held:
            engine.write(slot, CANARY)
        engine.finish_all()
        self.churn()
        wait_until(self._all_back, 10.0, "slots do not come back")
        engine.check_slots()
        self.restart_server()

    def round_close(self) -> None:
        """The engine leaves while the server writes its slots: only those that were lent change."""
        engine, counts = self.engine, self.counts
        held = {entry.slot: entry for entry in self.hold_fetches()}
        kept = HostPool.from_fds(engine.pool.shape, [os.dup(fd) for fd in engine.pool.fds()])
        for slot in held:
            engine.write(slot, CANARY)
        before = {slot: bytes(kept.parts(slot)[0]) for slot in range(NUM_SLOTS)}
        self.replace_engine()
        self.gates.open()
        wait_until(lambda: not self.gates.fetch_held, 10.0, "the server is stuck")
        self.churn(4)
        for slot, data in before.items():
            after = bytes(kept.parts(slot)[0])
            if after != data and slot not in held:
                counts.wrong_bytes += 1
                counts.problems.append(f"slot {slot} changed after the engine had left, which nobody had lent")
            elif after != data:
                counts.writes_after_close += 1
                self.engine.compare(held[slot].key, after, "written after the engine had left")
        kept.close()

    def round_storm(self) -> None:
        """Everybody is slow now and then, and everything happens at once."""
        engine, gates, rng = self.engine, self.gates, self.rng
        gates.store, gates.fetch = -rng.choice((2, 20)), -rng.choice((2, 20, 400))
        for _ in range(40):
            what = rng.randrange(8)
            if what < 4:
                engine.submit(list(rng.choice(self.library)))
            elif what == 4:
                engine.submit(self.fresh(1)[0])
            elif what == 5 and engine.requests:
                request = rng.choice(list(engine.requests.values()))
                if request.status != "finished":
                    engine.finish(request)
            elif what == 6:
                keys = [entry.key for entry in engine.sched.index.snapshot()]
                engine.push("invalidate", rng.sample(keys, min(len(keys), 8)))
            else:
                engine.gpu.reset()
            for _ in range(rng.randrange(4)):
                engine.go_on()
            engine.check_slots()
        gates.open()
        engine.finish_all()
        engine.check_slots()
        wait_until(self._all_back, 15.0, "slots do not come back")

    def rounds(self) -> dict[str, Callable[[], None]]:
        """Return the kinds of rounds."""
        stores = (self.reuse_by_traffic, self.reuse_by_eviction, self.reuse_while_stopped, self.reuse_by_reset)
        fetches = (
            self.give_up_at_the_deadline,
            self.give_up_by_abort,
            self.give_up_by_reset,
            self.give_up_on_the_server,
            self.stop_the_server,
        )
        found: dict[str, Callable[[], None]] = {}
        found |= {f"store, {r.__name__}": lambda r=r: self.round_store(r) for r in stores}  # type: ignore[misc]
        found |= {f"fetch, {g.__name__}": lambda g=g: self.round_fetch(g) for g in fetches}  # type: ignore[misc]
        found["fetch, the server is killed"] = lambda: self.round_kill(signal.SIGKILL)
        found["fetch, the server is told to leave"] = lambda: self.round_kill(signal.SIGTERM)
        found["fetch, the engine leaves"] = self.round_close
        found["storm"] = self.round_storm
        if self._redis is not None:
            found["store, of what was fetched"] = self.round_promote
        return found

    def run_round(self, name: str) -> None:
        """Run one round; what a round breaks is not the next one's."""
        self.counts.rounds[name] += 1
        num_problems = len(self.counts.problems)
        try:
            self.stock()
            self.rounds()[name]()
            self.connected()
            self.audit(self.library[:4])
        except (AssertionError, TimeoutError) as error:
            self.counts.problems.append(str(error) or type(error).__name__)
        finally:
            self.gates.open()
        self.counts.problems[num_problems:] = [f"{name}: {words}" for words in self.counts.problems[num_problems:]]
        if self.engine.sched._epoch or self.counts.problems:
            self.replace_engine()


def run_races(seed: int, seconds: float, redis: bool = True) -> RaceCounts:
    """Run rounds of every kind, and again until the time is over; returns what they came to.

    Args:
        seed: decides the order and the details.
        seconds: how long, at least; every kind is run once.
        redis: with a shared tier, where a Redis or Valkey is installed.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tkv-", dir="/tmp") as work, impatient():
        server = start_redis(Path(work)) if redis else None
        arena = None
        try:
            arena = Arena(Path(work), seed, server)
            names = list(arena.rounds())
            while not arena.counts.problems:
                arena.rng.shuffle(names)
                for name in names:
                    arena.run_round(name)
                    if arena.counts.problems or (
                        time.monotonic() - started > seconds and len(arena.counts.rounds) == len(names)
                    ):
                        break
                if time.monotonic() - started > seconds:
                    break
        finally:
            if arena is not None:
                arena.close()
                arena.counts.torn_copies = arena.gates.num_torn
                arena.counts.seconds = round(time.monotonic() - started, 1)
            if server is not None:
                server.kill()
    return arena.counts


def main() -> int:
    """Race from the command line; exit status 1 where something was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="decides the order and the details (1)")
    parser.add_argument("--seconds", type=float, default=300.0, help="how long (300)")
    parser.add_argument("--no-redis", action="store_true", help="without a shared tier")
    args = parser.parse_args()
    logging.getLogger("tierkv").disabled = True
    counts = run_races(args.seed, args.seconds, not args.no_redis)
    print(json.dumps(counts.as_dict(), indent=2))
    return 1 if counts.problems else 0


if __name__ == "__main__":
    sys.exit(main())
