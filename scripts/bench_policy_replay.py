"""Replay of requests against tiers that the product's policies rule, and against the baselines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench_policy_baselines import BASELINES, Belady
from bench_policy_traces import TOKENS_PER_BLOCK, Request
from tierkv.policy import Hint, Policy

ROOT = -1
Step = Callable[[int], None]


@dataclass(frozen=True)
class Cost:
    """What a hit saves. Defaults: an 8B model in fp16 (128 KiB a token), pinned memory over PCIe 4, one NVMe disk."""

    prefill_tokens_per_s: float = 10_000.0
    nbytes_per_token: int = 128 << 10
    tier_nbytes_per_s: tuple[float, ...] = (20e9, 3e9)

    @property
    def block_nbytes(self) -> int:
        return self.nbytes_per_token * TOKENS_PER_BLOCK

    def saved_s(self, tier: int) -> float:
        """Return the seconds of time to first token that one block saves when it comes from a tier."""
        load_s = self.block_nbytes / self.tier_nbytes_per_s[min(tier, len(self.tier_nbytes_per_s) - 1)]
        return TOKENS_PER_BLOCK / self.prefill_tokens_per_s - load_s


@dataclass
class Result:
    """What a replay came to. Per tier, the fastest first."""

    num_blocks: int = 0
    hits: list[int] = field(default_factory=lambda: [0])
    writes: list[int] = field(default_factory=lambda: [0])

    def rates(self, cost: Cost) -> dict[str, object]:
        """Return the figures for people and machines."""
        return {
            "hit_rate": sum(self.hits) / self.num_blocks,
            "hit_rate_by_tier": [n / self.num_blocks for n in self.hits],
            "writes_per_block": [n / self.num_blocks for n in self.writes],
            "tokens_saved": sum(self.hits) * TOKENS_PER_BLOCK,
            "nbytes_written": [n * cost.block_nbytes for n in self.writes],
            "ttft_saved_s": sum(n * cost.saved_s(tier) for tier, n in enumerate(self.hits)),
        }


@dataclass
class Tier:
    """A tier that holds ``capacity`` blocks, all of one size."""

    policy: Policy[int]
    capacity: int

    def offer(self, key: int, parent: int, now: float) -> tuple[bool, int | None]:
        """Store a block if the policy wants it and room can be made; return whether, and what went for it."""
        room = len(self.policy) < self.capacity
        if not self.policy.admit(key, now, room=room):
            return False, None
        gone = None
        if not room:
            gone = self.policy.victim(lambda other: other != parent)
            if gone is None:
                return False, None
            self.policy.remove(gone)
        self.policy.add(key, parent)
        return True, gone


def replay(
    tiers: Sequence[Tier],
    requests: Sequence[Request],
    *,
    hints: Sequence[Hint] | None = None,
    moves: bool = False,
    step: Step = lambda i: None,
) -> Result:
    """Replay requests: the leading run that any tier holds is a hit; the rest is offered to every tier.

    Args:
        moves: of stacked tiers: a block is offered to a tier when the one above lets go of it or does not take it, and
            what one takes is dropped below, so that each is held once. A limit, not what the product does
            (:mod:`bench_policy_stack`): a copy is all there is of it.
    """
    result = Result(0, [0] * len(tiers), [0] * len(tiers))
    parents: dict[int, int] = {}
    for i, (now, chain) in enumerate(requests):
        step(i)
        result.num_blocks += len(chain)
        for key in chain:
            tier = next((t for t, tier in enumerate(tiers) if key in tier.policy), None)
            if tier is None:
                break
            result.hits[tier] += 1
        for tier_ in tiers:
            tier_.policy.note(chain, now, hint=hints[i] if hints else None)
        parents.update(zip(chain, (ROOT, *chain), strict=False))
        _store(tiers, chain, parents, now, result)
        if moves:
            _drop_copies(tiers, chain)
    return result


def _store(tiers: Sequence[Tier], chain: Sequence[int], parents: dict[int, int], now: float, result: Result) -> None:
    """Offer each tier what it and those above lack of a chain, until none keeps one: what follows is of no use then."""
    for key in chain:
        above = False
        for t, tier in enumerate(tiers):
            if key not in tier.policy and not above:
                stored, gone = tier.offer(key, parents[key], now)
                result.writes[t] += stored
                _sink(tiers[t + 1 :], gone, parents, now, result)
            above = above or key in tier.policy
        if not above:
            break


def _drop_copies(tiers: Sequence[Tier], chain: Sequence[int]) -> None:
    """Let the fastest tier that holds a block be the only one, children first."""
    for key in reversed(chain):
        holders = [tier for tier in tiers if key in tier.policy]
        for tier in holders[1:]:
            tier.policy.remove(key)


def _sink(tiers: Sequence[Tier], key: int | None, parents: dict[int, int], now: float, result: Result) -> None:
    """Offer what a tier lets go of to those below, and so on."""
    for t, tier in enumerate(tiers, len(result.writes) - len(tiers)):
        if key is None or key in tier.policy:
            break
        stored, gone = tier.offer(key, parents[key], now)
        result.writes[t] += stored
        key = gone if stored else key


def replay_baseline(name: str, capacity: int, requests: Sequence[Request], step: Step = lambda i: None) -> Result:
    """Replay requests against a policy that does not know of chains, or the limit."""
    result = Result()
    if name == "belady":
        limit = Belady(capacity, [r.chain for r in requests])
        for i, (_, chain) in enumerate(requests):
            step(i)
            result.num_blocks += len(chain)
            result.hits[0] += _leading(limit, chain)
            result.writes[0] += limit.request(chain)
        return result
    cache = BASELINES[name](capacity)
    for i, (_, chain) in enumerate(requests):
        step(i)
        result.num_blocks += len(chain)
        result.hits[0] += _leading(cache, chain)
        for key in chain:
            if key in cache:
                cache.hit(key)
            else:
                result.writes[0] += cache.insert(key)
    return result


def _leading(cache: object, chain: Sequence[int]) -> int:
    contains = cache.__contains__  # type: ignore[operator]
    for n, key in enumerate(chain):
        if not contains(key):
            return n
    return len(chain)
