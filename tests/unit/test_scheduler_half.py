"""The scheduler half: random lives of an engine, purity of the question that vLLM asks, and each rule by an example."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import scheduler_bench
from scheduler_bench import BLOCK_TOKENS, BLOCKS_PER_CHUNK, CHUNK_TOKENS, DEADLINE_S, IDENTITY, Bench, small_world
from tierkv_connector.plan import TRANSITIONS, State
from tierkv_connector.scheduler import Scheduler

from tierkv.keys import ANCHOR_SPAN

NUM_SEQUENCES = 160
NUM_PURE_SEQUENCES = 60
NUM_OPERATIONS = 200


def random_bench(seed: int, extra_seed: int | None = None) -> Bench:
    """A bench whose sizes follow from the seed: a GPU that is large or too small, a pool that is small or tiny."""
    return Bench(
        seed,
        num_slots=12 if seed % 5 else 5,
        num_blocks=40 if seed % 3 else 24,
        late_outputs=bool(seed % 2),
        extra_seed=extra_seed,
    )


def test_random_sequences_keep_every_invariant() -> None:
    scheduler_bench.seen_transitions.clear()
    num_loaded = num_none = 0
    for seed in range(NUM_SEQUENCES):
        with small_world():
            bench = random_bench(seed)
            history: list[str] = []
            try:
                for _ in range(NUM_OPERATIONS):
                    history.append(bench.do())
                    bench.check()
                bench.drain()
                bench.check()
                bench.check_idle()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, after {len(history)} operations, {history[-5:]}") from error
            finally:
                bench.close()
            num_loaded += bench.num_loaded_chunks
            num_none += bench.num_none
    assert num_loaded > NUM_SEQUENCES, "the sequences load too little to say anything"
    assert num_none > NUM_SEQUENCES
    assert scheduler_bench.seen_transitions == {(a, b) for a, then in TRANSITIONS.items() for b in then}


# -- purity


class DifferenceError(Exception):
    """Asking more often has changed something."""


def compare(seed: int) -> None:
    """Live through one sequence twice, asking once and asking often, and compare all that there is after every step.

    The bench that asks often also asks about any request at any position between the operations.

    Raises:
        DifferenceError: something differs.
    """
    with small_world():
        once = random_bench(seed)
    with small_world():
        often = random_bench(seed, extra_seed=seed + 1)
    curious = Random(seed + 2)
    try:
        # Each bench lives in a world of its own, so that both get the same nonces.
        worlds = [small_world(), small_world()]
        nonces = [_nonces(), _nonces()]
        for number in range(NUM_OPERATIONS):
            names = []
            for world, nonce, bench in zip(worlds, nonces, (once, often), strict=True):
                with world if number < 0 else small_world(), _nonce_source(nonce):
                    if bench is often:
                        _ask_anything(often, curious)
                    names.append(bench.do())
            one, other = once.dump(), often.dump()
            if names[0] != names[1] or one != other:
                parts = [name for name in one if one[name] != other[name]]
                raise DifferenceError(f"seed {seed}, operation {number} ({names[0]}): {parts}")
    finally:
        once.close()
        often.close()
