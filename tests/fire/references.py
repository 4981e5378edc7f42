"""What is right: prompts, what an engine without connector answers to them, and the KV that it computes."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine_process import BLOCK_TOKENS, CHUNK_TOKENS, VOCAB, Answer, Engine

MAX_TOKENS = 4
#: In float32, cold and hit differ by this much at most, in log probabilities and in KV (docs/testing.md).
TOLERANCE = 1e-3
_NUM_ROOTS = 8
_NUM_OLD = 24

Payload = npt.NDArray[np.uint8]


class Prompts:
    """Prompts that share prefixes: what follows a root, or a conversation that goes on."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        lengths = [rng.randint(1, 3) * CHUNK_TOKENS - rng.choice([0, 20]) for _ in range(_NUM_ROOTS)]
        self._roots = [_tokens(rng, num_tokens) for num_tokens in lengths]
        self.old: deque[list[int]] = deque(maxlen=_NUM_OLD)  # those that were stored once

    def new(self, rng: random.Random) -> list[int]:
        """Return a prompt of 130 to 500 tokens that ends as none did before."""
        head = rng.choice(self._roots)
        if self.old and rng.random() < 0.3:
            head = rng.choice(self.old)[: 4 * CHUNK_TOKENS]
        return head + _tokens(rng, rng.randint(80, 240))


class References:
    """Runs of an engine without connector, and what they computed; each prompt runs once."""

    def __init__(self, plain: Engine, keys_of: Engine, directory: Path) -> None:
        self.payloads: dict[str, Payload] = {}  #: by key in hex
        self._plain = plain
        self._keys_of = keys_of
        self._file = directory / "plain.npz"
        self._cold: dict[tuple[int, ...], tuple[Answer, float]] = {}
        self._hit: dict[tuple[tuple[int, ...], int], Answer] = {}
        self._keys: dict[tuple[int, ...], list[str]] = {}

    def keys(self, prompt: Sequence[int]) -> list[str]:
        """Return the keys of the prompt's chunks, in hex."""
        name = tuple(prompt)
        if name not in self._keys:
            self._keys[name] = self._keys_of.call("keys", prompt=list(prompt))
        return self._keys[name]

    def cold(self, prompt: Sequence[int]) -> Answer:
        """Return the answer of a run from nothing."""
        return self._run(prompt)[0]

    def seconds(self, prompts: Sequence[Sequence[int]]) -> float:
        """Return how long the runs of some prompts took, one after the other."""
        return sum(self._run(prompt)[1] for prompt in prompts)

    def seconds_now(self, prompts: Sequence[Sequence[int]]) -> float:
        """Return how long they take now: the machine may be busier than it was."""
        self._plain.reset_gpu()
        started = time.monotonic()
        self._plain.run(*prompts, max_tokens=MAX_TOKENS)
        return time.monotonic() - started

    def hit(self, prompt: Sequence[int], num_tokens: int) -> Answer:
        """Return the answer of a run that finds so many tokens on the GPU: whole blocks."""
        name = (tuple(prompt), num_tokens)
        if name not in self._hit:
            self._plain.reset_gpu()
            if num_tokens:
                self._plain.one(prompt[: num_tokens + 1], max_tokens=1)
            answer = self._plain.one(prompt, max_tokens=MAX_TOKENS)
            assert answer.cached == num_tokens, "the reference hits as much as was put there"
            self._hit[name] = answer
        return self._hit[name]

    def forget_hits(self) -> None:
        """Drop the runs with hits: their prompts come back rarely."""
        self._hit.clear()

    def payload_error(self, key: str, payload: bytes | Payload) -> float | None:
        """Return by how much a payload differs from what was computed; None for a key of no prompt that ran here."""
        wanted = self.payloads.get(key)
        if wanted is None:
            return None
        if len(payload) != len(wanted):
            return float("inf")
        found = np.frombuffer(payload, dtype=np.uint8) if isinstance(payload, bytes) else payload
        with np.errstate(invalid="ignore", over="ignore"):
            error = float(np.abs(found.view(np.float32) - wanted.view(np.float32)).max())
        return float("inf") if error != error else error

    def _run(self, prompt: Sequence[int]) -> tuple[Answer, float]:
        name = tuple(prompt)
        if name not in self._cold:
            self._plain.reset_gpu()
            started = time.monotonic()
            answer = self._plain.one(prompt, max_tokens=MAX_TOKENS)
            self._cold[name] = answer, time.monotonic() - started
            self._note_payloads(prompt)
        return self._cold[name]

    def _note_payloads(self, prompt: Sequence[int]) -> None:
        blocks = CHUNK_TOKENS // BLOCK_TOKENS
        self._plain.call("save_gpu", path=str(self._file), prompt=list(prompt), blocks_per_chunk=blocks)
        with np.load(self._file) as chunks:
            for i, key in enumerate(self.keys(prompt)):
                self.payloads.setdefault(key, chunks[str(i)])


def _tokens(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(num)]
