"""Strikes, and checks that nobody noticed: no wrong token, no wrong byte, nobody late, nothing left behind."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_process import BLOCK_TOKENS, Answer, Engine, EngineDiedError, EngineError
from fire.checks import SERVER_SLACK, Holding, holding, wrong_payloads
from fire.kind import Kind
from fire.load import Flight, Load
from fire.references import MAX_TOKENS, TOLERANCE, Prompts, References
from fire.stage import DEADLINE_S, Stage
from tierkv.errors import TierKVError

#: Beyond the deadline and three times what a run without connector takes (on a machine that others use too).
LATE_S = 1.0
#: A fault that did not strike is tried again, this often in all.
MAX_TRIES = 4
FINISH_S = 90.0
SETTLE_S = 20.0
_NUM_HOT, _NUM_NEW = 4, 3


@dataclass
class Result:
    """What one fault came to.

    Attributes:
        kind, number: which.
        struck: how often the fault struck in it.
        requests: that were in flight, or came, while it lasted.
        hits: chunks that requests loaded from then until all was well again.
        wrong, late, leaks: a sentence for each.
        held_s: the longest time that the connector made vLLM wait for a request.
        seconds: all of it took; ``healthy_s`` of them until all was well again; ``phases`` says what the rest was.
        outcome: sentence where the fault did not strike, or could not be carried through; empty where it was.
        broken: it could not be carried through; in which state everything is, nobody knows.
    """

    kind: str
    number: int
    struck: int = 0
    tries: int = 0
    requests: int = 0
    hits: int = 0
    wrong: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    held_s: float = 0.0
    healthy_s: float = 0.0
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    outcome: str = ""
    broken: bool = False

    @property
    def problems(self) -> list[str]:
        """Everything that is not as it should be, in sentences."""
        return [*self.wrong, *self.late, *self.leaks, *([self.outcome] if self.outcome else [])]


class _Phases:
    """Notes how long the parts of a fault take."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self._since = time.monotonic()

    def ends(self, phase: str) -> None:
        now = time.monotonic()
        self._seconds[phase] = round(self._seconds.get(phase, 0.0) + now - self._since, 3)
        self._since = now


class Harness:
    """Faults on a stage, one after the other.

    Args:
        stage: what they strike; entered.
        seed: everything random follows from it.
        wall_time: look at the clock on the wall too, and not only at how long the connector held requests back.

    Attributes:
        baselines: what processes had when they were first looked at, by what they are and their ids.
    """

    def __init__(self, stage: Stage, seed: int, *, wall_time: bool = True) -> None:
        self.stage = stage
        self._seed = seed
        self._wall_time = wall_time
        self.prompts = Prompts(seed)
        self.references = References(stage.plain, stage.engines["inline"], stage.directory)
        self.baselines: dict[tuple[str, int], Holding] = {}
        self._warm_up()

    def strike(self, kind: Kind, number: int) -> Result:
        """Let one fault happen, until it has struck, and return what it came to."""
        result, started = Result(kind.name, number), time.monotonic()
        while not result.struck and result.tries < MAX_TRIES and not result.problems:
            rng = random.Random(f"{self._seed} {kind.name} {number} {result.tries}")
            result.tries += 1
            try:
                self._once(kind, rng, result)
            except (AssertionError, EngineDiedError, EngineError, TierKVError, OSError) as error:
                result.outcome, result.broken = f"{type(error).__name__}: {error}", True
        if not result.struck and not result.problems:
            result.outcome = f"the fault did not strike in {result.tries} tries"
        result.seconds = time.monotonic() - started
        return result

    # -- one fault

    def _once(self, kind: Kind, rng: random.Random, result: Result) -> None:
        clock = _Phases(result.phases)
        hot, new = self._prepare(kind, rng)
        clock.ends("prepare")
        before = self._hits(kind)
        load = Load(self._struck_engines(kind), mortal=kind.engine if kind.kills_engine else "")
        try:
            self._serve(kind, rng, hot, new, load)
            clock.ends("serve")
            result.struck = kind.struck(self.stage)
        finally:
            kind.end(self.stage)
        self._judge_flights(kind, load.done, result)
        clock.ends("end")
        result.healthy_s = self.stage.wait_healthy(lambda: self._poke(kind.engine, rng))
        clock.ends("heal")
        self._run_again([flight.prompt for flight in load.lost], kind, result)
        self._verify(kind, hot + new, result)
        clock.ends("verify")
        result.requests += len(load.done) + len(load.lost)
        result.hits += self._hits(kind) - (0 if kind.kills_engine else before)
        result.leaks += self.leaks()
        clock.ends("leaks")
        self.stage.meddler.forget()
        self.references.forget_hits()
        self.prompts.old.extend(hot[:2] + new)

    def _struck_engines(self, kind: Kind) -> dict[str, Engine]:
        engines = self.stage.engines
        return dict(engines) if kind.both_engines else {kind.engine: engines[kind.engine]}

    def _prepare(self, kind: Kind, rng: random.Random) -> tuple[list[list[int]], list[list[int]]]:
        """Store prompts that are to be hit in the tier that the kind names, and nowhere above it."""
        stage, engine = self.stage, self.stage.engines[kind.engine]
        hot = [self.prompts.new(rng) for _ in range(_NUM_HOT // 2)]
        old = list(self.prompts.old)
        hot += rng.sample(old, min(len(old), _NUM_HOT - len(hot)))
        new = [self.prompts.new(rng) for _ in range(_NUM_NEW)]
        for prompt in hot + new:
            self.references.cold(prompt)
        engine.run(*hot, max_tokens=1, batch=True)
        engine.counters()
        stage.store.drain()
        if kind.source == "shared":
            stage.evict("disk")
        for engine in self._struck_engines(kind).values():
            engine.clear_host()
            engine.call("asked")
            engine.call("held")
        return hot, new

    def _serve(
        self, kind: Kind, rng: random.Random, hot: Sequence[list[int]], new: Sequence[list[int]], load: Load
    ) -> None:
        """Serve requests, and let the fault begin among them."""
        first = [*hot[:-1], *new[:-1]]
        rng.shuffle(first)
        load.add(first)
        load.step(rng.randint(*kind.moments))
        with load.held_up():
            kind.begin(self.stage, rng)
        began = time.monotonic()
        load.step(rng.randint(0, 2))
        for wave in ([hot[-1], new[-1]], [hot[0]]):
            load.add(wave)
            load.step(rng.randint(1, 6))
        while load.num_running or time.monotonic() < began + kind.outlives:
            if not load.num_running:
                load.add([self._fresh(rng)])
            assert time.monotonic() < began + FINISH_S, f"{load.num_running} requests did not finish in {FINISH_S} s"
            load.step(2)

    # -- judgement

    def _judge_flights(self, kind: Kind, flights: Sequence[Flight], result: Result) -> None:
        prompts = [flight.prompt for flight in flights]
        self._compare([f.answer for f in flights if f.answer], prompts, result, "during the fault")
        allowed = 3 * self.references.seconds(prompts) + DEADLINE_S + LATE_S
        slow = [flight for flight in flights if self._wall_time and flight.seconds > allowed]
        if slow:
            allowed = max(allowed, 3 * self.references.seconds_now(prompts) + DEADLINE_S + LATE_S)
        result.late += [
            f"a request of {len(flight.prompt)} tokens took {flight.seconds:.2f} s on the {flight.engine} engine; "
            f"{allowed:.2f} s were allowed"
            for flight in slow
            if flight.seconds > allowed
        ]
        for name, engine in self._struck_engines(kind).items():
            if kind.kills_engine and name == kind.engine:
                continue
            held = engine.call("held")
            result.held_s = max([result.held_s, *held.values()])
            result.late += [
                f"the connector of the {name} engine held a request back for {seconds:.2f} s, with a deadline of "
                f"{DEADLINE_S:g} s"
                for seconds in held.values()
                if seconds > DEADLINE_S + LATE_S
            ]

    def _run_again(self, prompts: Sequence[list[int]], kind: Kind, result: Result) -> None:
        """Run what was lost with its engine on the one that came in its place."""
        if prompts:
            answers = self.stage.engines[kind.engine].run(*prompts, max_tokens=MAX_TOKENS, batch=True)
            self._compare(answers, prompts, result, "after the engine's end")

    def _compare(self, answers: Sequence[Answer], prompts: Sequence[list[int]], result: Result, when: str) -> None:
        """Compare answers of a batch with those of runs from nothing."""
        for answer, prompt in zip(answers, prompts, strict=True):
            distance = answer.distance(self.references.cold(prompt))
            if distance > TOLERANCE or answer.reason != "length":
                result.wrong.append(
                    f"{when}, a prompt of {len(prompt)} tokens, {answer.cached} of them cached, was answered otherwise "
                    f"than without connector (distance {distance:g}, end {answer.reason!r})"
                )

    def _verify(self, kind: Kind, prompts: Sequence[list[int]], result: Result) -> None:
        """Run what was in flight once more, one at a time, from the tiers below; and compare every byte in them."""
        engines = self._struck_engines(kind)
        for engine in engines.values():
            engine.counters()
        self.stage.store.drain()
        result.wrong += wrong_payloads(self.stage, self.references, prompts)
        for name, engine in engines.items():
            engine.clear_host()
            for prompt in prompts if name == kind.engine else prompts[-2:]:
                answer = engine.one(prompt, max_tokens=MAX_TOKENS)
                self._compare([answer], [prompt], result, f"after the fault, on the {name} engine")
                if answer.cached % BLOCK_TOKENS == 0 and answer.bits != self.references.hit(prompt, answer.cached).bits:
                    result.wrong.append(
                        f"after the fault, the {name} engine answered a prompt of {len(prompt)} tokens with other bits "
                        f"than one with {answer.cached} tokens of it on the GPU"
                    )

    def _hits(self, kind: Kind) -> int:
        counters = self.stage.engines[kind.engine].call("stat")["counters"]
        return sum(counters.get(f"{tier}_hits", 0) for tier in ("host", "disk", "shared"))

    # -- leaks

    def leaks(self, settle_s: float = SETTLE_S) -> list[str]:
        """Return a sentence for everything that is held although no request is there; waits for what is on its way."""
        deadline = time.monotonic() + settle_s
        while (found := list(self._leaks())) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _leaks(self) -> Iterator[str]:
        for name, engine in self.stage.engines.items():
            engine.call("idle")
            for what, num in engine.call("leases").items():
                if num:
                    yield f"the {name} engine holds {num} {what} for no request"
            yield from self._compared(f"the {name} engine", engine.pid, 0)
        yield from self._compared("the store server", self.stage.store.pid, SERVER_SLACK)

    def _compared(self, who: str, pid: int, slack: int) -> Iterator[str]:
        """Compare what a process has with what it had when it was first looked at, at rest."""
        now = holding(pid)
        before = self.baselines.setdefault((who, pid), now)
        for what, was, has in zip(Holding._fields, before, now, strict=True):
            if has > was + (slack if what in ("fds", "threads") else 0):
                yield f"{who} has {has} {what}, and had {was}"

    # -- requests beside

    def _warm_up(self) -> None:
        """The first forward takes seconds; and old prompts are to be there."""
        rng = random.Random(self._seed)
        prompts = [self.prompts.new(rng) for _ in range(4)]
        for prompt in prompts:
            self.references.cold(prompt)
        for engine in self.stage.engines.values():
            engine.run(*prompts, max_tokens=MAX_TOKENS)
            engine.counters()
        self.prompts.old.extend(prompts)
        self.stage.wait_healthy(lambda: None)
        keys = [[engine.call("keys", prompt=prompts[0]) for engine in self.stage.engines.values()]]
        assert all(each == keys[0][0] for each in keys[0]), "both engines have the same keys"
        for name in self.stage.engines:  # every path once, before anything is counted
            self._poke(name, rng)
        leaks = self.leaks()
        assert not leaks, leaks

    def _fresh(self, rng: random.Random) -> list[int]:
        prompt = self.prompts.new(rng)
        self.references.cold(prompt)
        return prompt

    def _poke(self, name: str, rng: random.Random) -> None:
        """Serve requests that ask and write every tier, so that whatever is out is tried."""
        engine = self.stage.engines[name]
        engine.run(self._fresh(rng), max_tokens=1)
        engine.clear_host()
        engine.run(rng.choice(self.prompts.old), max_tokens=1)


def run_all(
    harness: Harness, kinds: Sequence[Kind], numbers: Sequence[int], seed: int, say: Callable[[Result], Any]
) -> list[Result]:
    """Strike with every kind once for each of ``numbers``, in an order that follows from ``seed``.

    Ends early where a fault could not be carried through: what comes after it would say nothing.
    """
    results = []
    for number in numbers:
        order = list(kinds)
        random.Random(f"{seed} {number}").shuffle(order)
        for kind in order:
            results.append(harness.strike(kind, number))
            say(results[-1])
            if results[-1].broken:
                return results
    return results
