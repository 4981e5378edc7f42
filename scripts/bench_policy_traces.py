"""Requests to replay: traces from files, and made-up ones of several kinds, the same for the same seed."""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tierkv.policy import Hint

TOKENS_PER_BLOCK = 512


class Request(NamedTuple):
    """When, in seconds, and the prompt's full blocks, root first; equal ids are equal prefixes."""

    time: float
    chain: tuple[int, ...]


def read_trace(path: Path) -> list[Request]:
    """Read a trace of JSON lines with ``timestamp`` (ms), ``input_length`` and ``hash_ids``; full blocks only."""
    requests = []
    with path.open() as lines:
        for line in lines:
            record = json.loads(line)
            chain = record["hash_ids"][: record["input_length"] // TOKENS_PER_BLOCK]
            requests.append(Request(record["timestamp"] / 1000, tuple(chain)))
    return requests


def hints_of(requests: list[Request], seed: int = 0) -> list[Hint]:
    """Return the hints an application would give: back within (known to a factor of two), or over.

    A session is requests of which each extends an earlier one beyond its first two blocks.
    """
    rng = random.Random(seed)
    hints = [Hint(release=True)] * len(requests)
    ends: dict[int, int] = {}
    for i, (time, chain) in enumerate(requests):
        for j in range(len(chain) - 1, 1, -1):
            before = ends.pop(chain[j], None)
            if before is not None:
                hints[before] = Hint(retain_s=(time - requests[before].time) * 2 ** rng.uniform(-1, 1))
                break
        if len(chain) > 2:
            ends[chain[-1]] = i
    return hints


class _Ids:
    """Block ids that no one has used."""

    def __init__(self, first: int = 0) -> None:
        self._next = first

    def take(self, num: int) -> tuple[int, ...]:
        self._next += num
        return tuple(range(self._next - num, self._next))


def _sessions(
    rng: random.Random,
    ids: _Ids,
    *,
    seconds: float,
    rate: float,
    head: Callable[[], tuple[int, ...]],
    goes_on: Callable[[int], float],
    think_s: Callable[[], float],
    growth: Callable[[], int],
) -> list[Request]:
    """Sessions that begin at ``rate`` a second, and whose turns extend each other."""
    requests: list[Request] = []
    time, queue, num = 0.0, [], 0
    while time < seconds:
        time += rng.expovariate(rate)
        heapq.heappush(queue, (time, num, head() + ids.take(growth()), 1))
        num += 1
    while queue:
        time, n, chain, turn = heapq.heappop(queue)
        requests.append(Request(time, chain))
        if rng.random() < goes_on(turn):
            heapq.heappush(queue, (time + think_s(), n, chain + ids.take(growth() // 2), turn + 1))
    return [r for r in requests if r.time < seconds]


def _zipf(rng: random.Random, num: int, exponent: float = 1.0) -> Callable[[], int]:
    weights = [1 / (i + 1) ** exponent for i in range(num)]
    return lambda: rng.choices(range(num), weights)[0]


def shared_prompts(seed: int) -> list[Request]:
    """System prompts of 4 to 20 blocks, 300 of them, by Zipf; one-off questions."""
    rng, ids = random.Random(seed), _Ids()
    prompts = [ids.take(rng.randint(4, 20)) for _ in range(300)]
    pick = _zipf(rng, 300)
    return [Request(i * 0.3, prompts[pick()] + ids.take(rng.randint(1, 6))) for i in range(9000)]


def slow_chat(seed: int) -> list[Request]:
    """Conversations with minutes between turns, and a third that come back at all."""
    rng, ids = random.Random(seed), _Ids()
    system = ids.take(2)
    return _sessions(
        rng, ids, seconds=5400, rate=0.8, head=lambda: system, goes_on=lambda turn: min(0.85, 0.25 + 0.12 * turn),
        think_s=lambda: rng.lognormvariate(5.3, 0.9), growth=lambda: 1 + int(rng.expovariate(1 / 12)),
    )  # fmt: skip


def quick_chat(seed: int) -> list[Request]:
    """Conversations with seconds between turns, most of which go on."""
    rng, ids = random.Random(seed), _Ids()
    system = ids.take(3)
    return _sessions(
        rng, ids, seconds=3000, rate=0.5, head=lambda: system, goes_on=lambda turn: 0.85,
        think_s=lambda: rng.lognormvariate(2.5, 0.7), growth=lambda: 1 + int(rng.expovariate(1 / 6)),
    )  # fmt: skip


def agents(seed: int) -> list[Request]:
    """Agent loops: 30 steps on average, tools of seconds, of which one in eight takes minutes."""
    rng, ids = random.Random(seed), _Ids()
    systems = [ids.take(12) for _ in range(5)]
    return _sessions(
        rng, ids, seconds=3600, rate=0.08, head=lambda: rng.choice(systems), goes_on=lambda turn: 0.967,
        think_s=lambda: rng.uniform(120, 400) if rng.random() < 0.125 else rng.lognormvariate(1.8, 0.8),
        growth=lambda: 1 + int(rng.expovariate(1 / 5)),
    )  # fmt: skip


def documents(seed: int) -> list[Request]:
    """Questions on documents of 10 to 60 blocks, by Zipf, whose popularity moves on every 20 minutes."""
    rng, ids = random.Random(seed), _Ids()
    system, documents = ids.take(1), [ids.take(rng.randint(10, 60)) for _ in range(1500)]
    pick = _zipf(rng, 1500, 0.9)
    requests = []
    for i in range(7000):
        time = i * 0.5
        document = documents[(pick() + 400 * int(time // 1200)) % 1500]
        requests.append(Request(time, system + document + ids.take(rng.randint(1, 3))))
    return requests


def scans(seed: int) -> list[Request]:
    """Quick conversations, with bursts of a thousand one-off prompts every ten minutes."""
    ids = _Ids(1 << 30)
    bursts = [Request(600 * (b + 1) + i * 0.05, ids.take(20)) for b in range(4) for i in range(1000)]
    return sorted(quick_chat(seed) + bursts)


def flood(seed: int) -> list[Request]:
    """Shared prompts, and one tenant who sends ten one-off prompts of its own for each of the others' requests."""
    rng, ids = random.Random(seed), _Ids()
    noise_head = ids.take(3)
    noise = [Request(r.time + rng.random() * 0.3, noise_head + ids.take(12)) for r in shared_prompts(seed)[:3000]
             for _ in range(10)]  # fmt: skip
    return sorted(shared_prompts(seed)[:3000] + noise)


def loop(seed: int) -> list[Request]:
    """The same 400 prompts of 20 blocks in turn, over and over: what LRU is worst at."""
    ids = _Ids()
    prompts = [ids.take(20) for _ in range(400)]
    return [Request(i * 0.5, prompts[i % 400]) for i in range(6000)]


def shift(seed: int) -> list[Request]:
    """Half an hour of slow conversations, then shared prompts, then agents."""
    parts = (slow_chat(seed), shared_prompts(seed + 1), agents(seed + 2))
    requests, start = [], 0.0
    for n, part in enumerate(parts):
        cut = [r for r in part if r.time < 1800]
        requests += [Request(start + r.time, tuple(k + (n << 40) for k in r.chain)) for r in cut]
        start += 1800
    return requests


SYNTHETIC: dict[str, Callable[[int], list[Request]]] = {
    f.__name__.replace("_", "-"): f
    for f in (shared_prompts, slow_chat, quick_chat, agents, documents, scans, flood, loop, shift)
}


def one_off_scan(num: int, *, hot: tuple[int, ...], every: int) -> Iterator[Request]:
    """Yield ``num`` one-off prompts of one to three blocks, and the hot prefix once in ``every``."""
    fresh = 1 << 32
    for i in range(num):
        size = 1 + i % 3
        yield Request(i * 0.01, tuple(range(fresh, fresh + size)))
        fresh += size
        if i % every == 0:
            yield Request(i * 0.01, (*hot, fresh))
            fresh += 1
