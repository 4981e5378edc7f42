"""Everything at once, on one engine: what a scheduler does to requests, and tiers that fail at random.

Requests with shared prefixes, of several tenants and adapters, on a GPU of a few dozen blocks: preempted all the time,
with drafts, with prompts cut into pieces, some of them aborted; the cache is reset; the server is killed or stands
still, Redis dies, freezes or lies, the disk fails. Every output is compared with a run without connector, no request is
served what its tenant and adapter never asked for, and at the end nothing is held.

    python -m fire.stress [--requests 2000] [--seed 1] [--plant bit|tenant|adapter]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from engine_process import BLOCK_TOKENS, CHUNK_TOKENS, VOCAB, Answer
from fire.checks import SERVER_SLACK, Holding, holding
from fire.kind import Kind, load_kinds
from fire.leak_run import NO_CACHES, private_nbytes
from fire.plants import PLANTS
from fire.references import TOLERANCE
from fire.stage import Stage
from lora_adapters import RANK, write_adapter
from vllm_versions import CANNOT_DRAFT, MIXES_ADAPTERS, wanted_minor

NUM_BLOCKS = 40
NUM_AT_A_TIME = 8
MAX_TOKENS = 30
MAX_PROMPT = 600
#: Groups of faults (:mod:`fire.kind`) that a stress run has: of what is below the engine.
GROUPS = ("server", "redis", "disk")
#: The connector's own cache is reset in what follows this share of a run, without faults: after that nothing below the
#: host pool is used, and no tier is tried that is out.
LAST_PART = 0.9
#: Private memory that the engine may gain from the first third of a run to the last.
MAX_NBYTES = 24 << 20
#: A run with fewer requests is too short to say anything of memory: allocators are still growing. Nor does it always
#: evict: the cache is reset now and then.
MIN_REQUESTS = 500
HEALTHY_S = 90.0
SETTLE_S = 20.0
_PROBLEMS_SHOWN = 20
_MODEL = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32}
SETTINGS: dict[str, Any] = {
    "enable_lora": True,
    "max_loras": 3,  # one more than there are: on a CPU vLLM lets the last one's weights act on requests without any
    "max_lora_rank": RANK,
    "max_model_len": MAX_PROMPT + MAX_TOKENS + BLOCK_TOKENS,
}
TIGHT: dict[str, Any] = {
    "num_gpu_blocks_override": NUM_BLOCKS,
    "max_num_batched_tokens": 256,
    "long_prefill_token_threshold": 128,
    "max_num_seqs": 6,
    "env": NO_CACHES,
}
if wanted_minor() not in CANNOT_DRAFT:
    TIGHT["speculative_config"] = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
    }

Lora = tuple[str, int, str]


class Domain(NamedTuple):
    """Who asks: nobody else's KV is served to them."""

    salt: str | None
    lora: Lora | None


class Asked(NamedTuple):
    """A request."""

    domain: Domain
    prompt: list[int]
    max_tokens: int


@dataclass
class Report:
    """What a run came to: numbers, and a sentence for each thing that is not as it should be."""

    num_requests: int = 0
    num_compared: int = 0
    num_aborted: int = 0
    num_preempted: int = 0
    resets: Counter[str] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)
    hits: dict[str, int] = field(default_factory=dict)
    num_evicted: int = 0
    worst: float = 0.0
    gained_nbytes: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


class Known:
    """The prefixes that each domain's requests have had, in blocks: what may be cached for another one, at most."""

    def __init__(self) -> None:
        self._seen: dict[Domain, Counter[int]] = {}

    def note(self, domain: Domain, tokens: Sequence[int], num_noted: int = 0) -> None:
        """Note a request's tokens, of which the first ``num_noted`` have been noted before."""
        self._seen.setdefault(domain, Counter()).update(islice(_prefixes(tokens), num_noted // BLOCK_TOKENS, None))

    def num_tokens(self, domain: Domain, prompt: Sequence[int]) -> int:
        """Return how many leading tokens of a request's prompt, which was noted, another request has had too."""
        seen = self._seen[domain]
        return BLOCK_TOKENS * sum(1 for _ in takewhile(lambda prefix: seen[prefix] > 1, _prefixes(prompt)))


def _prefixes(tokens: Sequence[int]) -> Iterator[int]:
    value = 0
    for at in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        value = hash((value, *tokens[at : at + BLOCK_TOKENS]))
        yield value


class Faults:
    """One fault after another, while requests are served: each begins when all is well again after the last.

    Attributes:
        struck: how many faults of each kind did.
        problems: a sentence where not all was well again.
        over: no more faults.

    Args:
        stage: what they strike.
        kinds: in this order, again and again; none for no faults.
        rng: what is random.
        gap: requests that finish between two faults.
    """

    def __init__(self, stage: Stage, kinds: Sequence[Kind], rng: random.Random, gap: int) -> None:
        self.struck: Counter[str] = Counter()
        self.problems: list[str] = []
        self.over = False
        self._stage, self._kinds, self._rng, self._gap = stage, list(kinds), rng, gap
        self._now: Kind | None = None
        self._next = self._steps = 0
        self._until = self._since = 0.0
        self._healthy = True
        self._finished_at = 0

    @property
    def none(self) -> bool:
        """Whether everything is well, as far as is known."""
        return self._now is None and self._healthy

    def stepped(self, num_finished: int) -> None:
        """Begin or end a fault when it is time to."""
        if self.over:
            return
        if self._now is not None:
            self._steps -= 1
            if self._steps <= 0 and time.monotonic() >= self._until:
                self.end(num_finished)
        elif not self._healthy:
            self._look()
        elif self._kinds and num_finished >= self._finished_at + self._gap:
            self._begin(self._kinds[self._next % len(self._kinds)])
            self._next += 1

    def end(self, num_finished: int = 0) -> None:
        """End the fault that there is."""
        if self._now is None:
            return
        kind, self._now = self._now, None
        self.struck[kind.name] += min(1, kind.struck(self._stage))
        kind.end(self._stage)
        self._stage.meddler.forget()
        self._healthy, self._since, self._finished_at = False, time.monotonic(), num_finished

    def _begin(self, kind: Kind) -> None:
        kind.begin(self._stage, self._rng)
        self._now, self._steps = kind, self._rng.randint(10, 40)
        self._until = time.monotonic() + kind.outlives

    def _look(self) -> None:
        self._healthy = self._stage.is_healthy()
        if not self._healthy and time.monotonic() > self._since + HEALTHY_S and not self.problems:
            self.problems.append(f"{HEALTHY_S:g} s after a fault not everything is up again")


class Stress:
    """A run.

    Args:
        stage: with the one engine ``"local"``; entered.
        seed: everything random follows from it, but for the order of threads.
        num_requests: so many.
        kinds: faults; none for no faults.
        plant: a fault of the connector that the run is to find (:mod:`fire.plants`); empty for none.
        gap: requests that finish between two faults.
    """

    def __init__(
        self, stage: Stage, seed: int, num_requests: int, kinds: Sequence[Kind], plant: str = "", gap: int = 8
    ) -> None:
        self.report = Report(num_requests=num_requests)
        self._stage, self._engine, self._plant = stage, stage.engines["local"], plant
        self._rng = random.Random(f"{seed} {plant}")
        self._num_requests = num_requests
        self._faults = Faults(stage, kinds, self._rng, gap)
        loras: list[Lora | None] = [None]
        for number, name in enumerate(("a", "b") if wanted_minor() >= MIXES_ADAPTERS else (), 1):
            directory = stage.directory / f"lora-{name}"
            if not directory.exists():  # of another run on this stage
                write_adapter(directory, number, **_MODEL)
            loras.append((name, number, str(directory)))
        salts = (None, "a", "b") if len(loras) > 1 else (None, *"abcdefgh")
        self._domains = [Domain(salt, lora) for salt in salts for lora in loras]
        self._tree = self._grow_tree()
        self._known = Known()
        self._finished: list[tuple[Asked, Answer]] = []
        self._cold: dict[tuple[Any, ...], Answer] = {}
        self._memory: list[int] = []
        self._preempted: set[str] = set()
        self._num_over = 0  # requests that have ended, before those that are served now
        self._names = (f"s{seed}{plant}{i}" for i in range(1 << 60))

    def run(self) -> Report:
        """Do it, and return what it came to."""
        started, report = time.monotonic(), self.report
        self._warm_up()
        before, counters = self._holdings(), self._engine.counters()
        last = max(1, round((1 - LAST_PART) * self._num_requests))
        self._serve(self._num_requests - last)
        self._faults.end()
        self._stage.wait_healthy(self._poke)  # while others may have what this engine stores: that is how it heals
        self._faults.over = True
        self._serve(last)
        report.struck = self._faults.struck
        report.problems += self._faults.problems
        self._count(counters)
        self._compare()
        report.problems += self._left(before)
        report.seconds = time.monotonic() - started
        return report

    # -- requests

    def _grow_tree(self) -> list[list[int]]:
        rng = self._rng
        roots = [_tokens(rng, rng.randrange(60, 200)) for _ in range(3)]
        branches = [root + _tokens(rng, rng.randrange(60, 200)) for root in roots for _ in range(3)]
        return roots + branches + [b + _tokens(rng, rng.randrange(1, 120)) for b in branches for _ in range(3)]

    def _new(self) -> Asked:
        """Return a request: a prompt of the tree, or a conversation that goes on."""
        rng = self._rng
        max_tokens = rng.choice((1, 4, MAX_TOKENS))
        if self._finished and rng.random() < 0.25:
            asked, answer = rng.choice(self._finished[-50:])
            prompt = [*asked.prompt, *answer.tokens, *_tokens(rng, rng.randrange(1, 60))]
            if len(prompt) <= MAX_PROMPT:
                return Asked(asked.domain, prompt, max_tokens)
        return Asked(rng.choice(self._domains), rng.choice(self._tree), max_tokens)

    def _add(self, name: str, asked: Asked) -> None:
        self._engine.call(
            "add", name=name, prompt=asked.prompt, max_tokens=asked.max_tokens, salt=asked.domain.salt,
            lora=asked.domain.lora,
        )  # fmt: skip

    def _serve(self, num: int) -> None:
        rng, engine = self._rng, self._engine
        todo, running = num, dict[str, Asked]()
        while todo or running:
            while todo and len(running) < NUM_AT_A_TIME:
                todo -= 1
                name, asked = next(self._names), self._new()
                self._known.note(asked.domain, asked.prompt)
                running[name] = asked
                self._add(name, asked)
            if rng.random() < 0.015 and len(running) > 1:
                doomed = rng.choice(sorted(running))
                engine.call("abort", names=[doomed])
                del running[doomed]
                self.report.num_aborted += 1
            for name, answer in engine.step(rng.randrange(1, 4)).items():
                self._took(running.pop(name), answer)
            states = engine.call("states")
            self._preempted |= {name for name, state in states.items() if state == "PREEMPTED"}
            over = self._num_over + num - todo - len(running)
            self._meddle(over / self._num_requests)
            self._faults.stepped(over)
        self._num_over += num

    def _took(self, asked: Asked, answer: Answer) -> None:
        known = self._known.num_tokens(asked.domain, asked.prompt)
        if answer.cached > known:
            self.report.problems.append(
                f"a request of {len(asked.prompt)} tokens had {answer.cached} of them cached; requests of its tenant "
                f"{asked.domain.salt!r} and adapter {_name(asked.domain)!r} have had {known} of them before"
            )
        self._known.note(asked.domain, [*asked.prompt, *answer.tokens], len(asked.prompt))
        self._finished.append((asked, answer))

    def _meddle(self, progress: float) -> None:
        """What an operator, and vLLM's callers, do at any moment."""
        rng, engine, resets = self._rng, self._engine, self.report.resets
        if rng.random() < 0.01:
            running = rng.random() < 0.5
            name = "with requests that run" if running else "of vLLM's prefix cache"
            resets[name] += bool(engine.call("reset", running=running, connector=False))
        if self._faults.over and not resets["of the connector"]:
            engine.call("reset", running=rng.random() < 0.5, connector=True)
            resets["of the connector"] += 1
        if rng.random() < 0.01:
            engine.call("clear_host")
            if self._faults.none and rng.random() < 0.5:
                self._stage.evict("disk")
                resets["of the disk"] += 1
        if rng.random() < 0.01:
            engine.call("forget")  # what the test's own part of the engine remembers
        if self._plant == "bit" or (self._plant and not resets["planted"]):
            resets["planted"] += bool(engine.call("plant", what=self._plant, number=rng.randrange(1 << 30)))
        if len(self._memory) <= 12 * progress:
            self._memory.append(private_nbytes(engine.pid))

    def _warm_up(self) -> None:
        """Let the adapters be hashed, and everything happen once before anything is counted."""
        for domain in self._domains:
            self._engine.run(_tokens(self._rng, 2 * CHUNK_TOKENS + 1), max_tokens=2)
            self._engine.call("run", prompts=[_tokens(self._rng, 100)], max_tokens=8, lora=domain.lora)
        self._engine.call("adapters_known")
        self._engine.run(self._tree[-1], max_tokens=1)
        self._known.note(Domain(None, None), self._tree[-1])
        self._stage.wait_healthy(self._poke)
        self._poke()
        self._rest()
        self._engine.reset_gpu()

    def _poke(self) -> None:
        """Serve requests that write and read every tier, so that whatever is out is tried. Nothing else runs."""
        engine = self._engine
        engine.run(_tokens(self._rng, 2 * CHUNK_TOKENS + 1), max_tokens=1)
        engine.call("idle")
        engine.clear_host()
        stored = [asked for asked, _ in self._finished if asked.domain == Domain(None, None)]
        prompt = self._rng.choice([self._tree[-1], *(asked.prompt for asked in stored)])
        engine.run(prompt, max_tokens=1)

    def _rest(self) -> None:
        self._engine.call("idle")
        self._engine.counters()
        self._stage.store.drain()
        self._engine.call("forget")

    # -- judgement

    def _compare(self) -> None:
        """Compare every output with that of a run from nothing, without connector."""
        report, num_wrong = self.report, 0
        for asked, answer in self._finished:
            distance = answer.distance(self._expected(asked))
            report.num_compared += 1
            report.worst = max(report.worst, distance if distance < float("inf") else 0.0)
            if distance > TOLERANCE or answer.reason != "length":
                num_wrong += 1
                if num_wrong <= _PROBLEMS_SHOWN:
                    report.problems.append(
                        f"a request of {len(asked.prompt)} tokens, {answer.cached} of them cached, of tenant "
                        f"{asked.domain.salt!r} and adapter {_name(asked.domain)!r} was answered otherwise than "
                        f"without connector (distance {distance:g}, end {answer.reason!r})"
                    )
        if num_wrong > _PROBLEMS_SHOWN:
            report.problems.append(f"and {num_wrong - _PROBLEMS_SHOWN} more wrong answers")

    def _expected(self, asked: Asked) -> Answer:
        name = (tuple(asked.prompt), asked.domain.lora)
        if name not in self._cold:
            plain = self._stage.plain
            plain.reset_gpu()
            (answer,) = plain.call("run", prompts=[asked.prompt], max_tokens=MAX_TOKENS, lora=asked.domain.lora)
            self._cold[name] = Answer(**answer)
        whole, num = self._cold[name], asked.max_tokens
        return whole._replace(tokens=whole.tokens[:num], logprobs=whole.logprobs[:num], others=whole.others[:num])

    def _count(self, before: dict[str, int]) -> None:
        """Note what happened, and whether it was what the run is for."""
        report, engine = self.report, self._engine
        counters = engine.counters()
        report.hits = {
            tier: counters.get(f"{tier}_hits", 0) - before.get(f"{tier}_hits", 0) for tier in ("host", "disk", "shared")
        }
        report.num_evicted = engine.call("stat")["num_evicted"]
        report.problems += [f"nothing was hit in tier {tier}" for tier in ("host", "disk") if not report.hits[tier]]
        if self._num_requests >= MIN_REQUESTS and not report.num_evicted:
            report.problems.append("nothing was evicted from the host pool")
        report.num_preempted = len(self._preempted)
        if not report.num_aborted or not report.num_preempted:
            report.problems.append(f"{report.num_aborted} requests were aborted, {report.num_preempted} preempted")

    def _holdings(self) -> dict[str, tuple[int, Holding]]:
        pids = {"the engine": self._engine.pid, "the store server": self._stage.store.pid}
        return {who: (pid, holding(pid)) for who, pid in pids.items()}

    def _left(self, before: dict[str, tuple[int, Holding]]) -> list[str]:
        self._rest()
        deadline = time.monotonic() + SETTLE_S
        while (found := list(self._held(before))) and time.monotonic() < deadline:
            time.sleep(0.1)
        third = len(self._memory) // 3
        if self._num_requests >= MIN_REQUESTS:
            gained = statistics.median(self._memory[-third:]) - statistics.median(self._memory[:third])
            self.report.gained_nbytes = int(gained)
            if gained > MAX_NBYTES:
                found.append(f"the engine has gained {gained:,.0f} bytes of memory; {MAX_NBYTES:,} are allowed")
        return found

    def _held(self, before: dict[str, tuple[int, Holding]]) -> Iterator[str]:
        for what, num in self._engine.call("leases").items():
            if num:
                yield f"the engine holds {num} {what} for no request"
        for who, (pid, now) in self._holdings().items():
            pid_before, held = before[who]
            if pid != pid_before:  # it was started anew
                continue
            slack = SERVER_SLACK if who == "the store server" else 0
            for what, was, has in zip(Holding._fields, held, now, strict=True):
                if has > was + (slack if what in ("fds", "threads") else 0):
                    yield f"{who} has {has} {what}, and had {was}"


def _tokens(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(num)]


def _name(domain: Domain) -> str | None:
    return domain.lora[0] if domain.lora else None


def stress_kinds(stage: Stage, seed: int) -> list[Kind]:
    """Return the faults of a run, in an order that follows from the seed."""
    kinds = [kind for kind in load_kinds().values() if kind.group in GROUPS and not kind.optional(stage)]
    random.Random(seed).shuffle(kinds)
    return kinds


def stress_stage(directory: Path) -> Stage:
    """Return a stage with one engine, whose GPU is small."""
    return Stage(directory, names=("local",), settings=SETTINGS, tight=TIGHT)


def main() -> int:
    """Run, print what it came to, and return 1 if something was wrong."""
    parser = argparse.ArgumentParser(prog="scripts/test-stress", description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plant", choices=sorted(PLANTS), default="", help="a fault of the connector, to be found")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="tkv-stress-", dir="/tmp") as directory,
        stress_stage(Path(directory)) as stage,
    ):
        kinds = [] if args.plant else stress_kinds(stage, args.seed)
        report = Stress(stage, args.seed, args.requests, kinds, args.plant).run()
    print(f"{report.num_requests:,} requests in {report.seconds:.0f} s: {report.num_compared:,} outputs compared, "
          f"{report.num_aborted} aborted, {report.num_preempted} preempted; hits {report.hits}, "
          f"{report.num_evicted:,} slots evicted; log probabilities differ by up to {report.worst:.2g}; "
          f"{report.gained_nbytes:+,} bytes of memory")  # fmt: skip
    print(f"resets: {dict(report.resets)}")
    print(f"{report.struck.total()} faults struck: {dict(report.struck)}")
    for problem in report.problems:
        print(f"WRONG: {problem}")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
