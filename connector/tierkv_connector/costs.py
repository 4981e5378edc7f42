"""Whether a fetch beats computing: measured prefill speed against measured speed of each tier.

Theory of operation. Computing a chunk takes ``chunk_tokens`` divided by the engine's prefill speed; fetching it takes
its bytes divided by its tier's speed. Both are medians of what was seen last, so that a stall or a lucky page cache
does not decide. A plan fetches the run of chunks that saves the most time, which is nothing where a tier is slower
than computing. Fetching uses what is idle and computing what every request wants, so a fetch may take ``MARGIN`` times
as long. Every ``PROBE``-th plan is fetched all the same: a tier that has become faster is noticed.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

#: Measurements that count, and how many there must be before anything is decided.
NUM_KEPT = 32
NUM_NEEDED = 8
#: How much longer than computing a fetch may take.
MARGIN = 1.5
#: One in so many plans that would be cut is not.
PROBE = 16
#: Steps with fewer prompt tokens say more of what a step costs than of what a token does.
MIN_STEP_TOKENS = 64
#: The tiers' names by the letters of MATCH and FETCH.
TIERS: Mapping[str, str] = {"d": "disk", "s": "shared"}


class CostGate:
    """Keeps the measurements of one engine and decides.

    Args:
        chunk_tokens, payload_nbytes: of a chunk.
    """

    def __init__(self, chunk_tokens: int, payload_nbytes: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._payload_nbytes = payload_nbytes
        self._prefill: deque[float] = deque(maxlen=NUM_KEPT)
        self._fetch: dict[str, deque[float]] = {letter: deque(maxlen=NUM_KEPT) for letter in TIERS}
        self._num_cut = 0

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Note that a step computed so many tokens of prompts."""
        if num_tokens >= MIN_STEP_TOKENS and seconds > 0:
            self._prefill.append(seconds / num_tokens)

    def note_fetch(self, letters: bytes, seconds: float) -> None:
        """Note a fetch that brought all it was to bring, from one tier; of others nothing is learned.

        Args:
            letters: one a chunk, as FETCH answers.
            seconds: from when it could begin to its answer.
        """
        letter = letters[:1].decode()
        if letter in self._fetch and letters == letters[:1] * len(letters) and seconds > 0:
            self._fetch[letter].append(seconds / len(letters))

    @property
    def chunk_s(self) -> float | None:
        """Seconds that computing a chunk takes; None where that is not known yet."""
        if len(self._prefill) < NUM_NEEDED:
            return None
        return statistics.median(self._prefill) * self._chunk_tokens

    def fetch_s(self, letter: str) -> float | None:
        """Return the seconds that fetching a chunk of a tier takes; None where that is not known yet."""
        known = self._fetch.get(letter, ())
        return statistics.median(known) if len(known) >= NUM_NEEDED else None

    @property
    def doubtful(self) -> bool:
        """Whether a tier is so slow that what is stored where decides what is fetched."""
        compute = self.chunk_s
        costs = [self.fetch_s(letter) for letter in TIERS]
        return compute is not None and any(cost is not None and cost > compute * MARGIN for cost in costs)

    def worth(self, letters: bytes) -> int:
        """Return how many of the first chunks of a match should be fetched.

        Args:
            letters: the tier of each chunk, as MATCH answers.
        """
        compute = self.chunk_s
        if compute is None or not self.doubtful:
            return len(letters)
        costs = {letter: self.fetch_s(letter) for letter in TIERS}
        best = saved = 0.0
        stop = 0
        for i, letter in enumerate(letters.decode("latin-1"), 1):
            cost = costs.get(letter)
            saved += compute * MARGIN - cost if cost is not None else 0.0
            if saved >= best:
                best, stop = saved, i
        if stop < len(letters):
            self._num_cut += 1
            if self._num_cut % PROBE == 0:
                return len(letters)
        return stop

    def stat(self) -> dict[str, float]:
        """Return what is known, for people: prompt tokens a second, and bytes a second of each tier."""
        found: dict[str, float] = {}
        if (compute := self.chunk_s) is not None:
            found["prefill_tokens_per_s"] = self._chunk_tokens / compute
        for letter, name in TIERS.items():
            if cost := self.fetch_s(letter):
                found[f"{name}_bytes_per_s"] = self._payload_nbytes / cost
        return found
