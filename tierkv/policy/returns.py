"""How likely a chunk is to be asked for again, and when: life tables, and what they say a chunk is worth.

Time since the last use is cut into stages, of half an octave where returns are common. For a kind of use,
:class:`Returns` counts how many chunks came into each stage without having been asked for, and how many of these were
asked for in it: the chance ``q[b]`` of a return in stage ``b`` for what is still out at its start. It is the life table
of survival analysis: what is forgotten early leaves no bias.

From the ``q`` follows what is worth keeping. Holding a chunk from age ``a`` to age ``t`` takes its expected time in the
cache and brings its expected hits; the *worth* at ``a`` is the best ratio over all ``t`` (the Gittins index): hits per
second of holding it for as long as that is wise. A chunk that is sure to return in ten minutes is worth more after nine
of them, and one that people come back to within a minute or never is worth nothing after two.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import log2

#: The age at which each stage but the last ends, in seconds: half an octave apart from 8 s to 17 minutes, an octave
#: from there to 18 hours. What is to be kept for half a minute must not be given up, or kept, for a whole one.
ENDS = (*(8.0 * 2 ** (n / 2) for n in range(15)), *(8.0 * 2**n for n in range(8, 14)))
NUM_STAGES = len(ENDS) + 1
LAST_STAGE = NUM_STAGES - 1
#: Seconds that a stage takes; the last is as long as all others.
WIDTHS = (ENDS[0], *(end - start for start, end in pairwise(ENDS)), ENDS[-1])
_NUM_OCTAVES = (1.0, *(log2(end / start) for start, end in pairwise(ENDS)), 1.0)

#: Counts are halved beyond this, so that a change of habits is learned within about as many returns.
_MAX_COUNT = 1 << 14


def digits(x: float, last: int) -> int:
    """Return the number of binary digits of ``x``, at most ``last``: 0 below 1, 1 below 2, 2 below 4.

    >>> digits(0.5, 9), digits(5.0, 9), digits(1e9, 9)
    (0, 3, 9)
    """
    return min(int(min(x, 1e9)).bit_length(), last)


class Returns:
    """The life table of one kind of use: about 1 KB. A count is a segment, weighed by the root of its length.

    Attributes:
        came: what came into each stage.
        left: what of it was asked for in that stage.
    """

    __slots__ = ("came", "left")

    def __init__(self) -> None:
        self.came = [0.0] * NUM_STAGES
        self.left = [0.0] * NUM_STAGES

    def chances(self, prior: Sequence[float], strength: float) -> list[float]:
        """Return ``q``: the chance of a return in each stage, drawn towards ``prior`` as by ``strength`` counts."""
        return [
            min(0.98, (left + strength * p) / (max(came, left) + strength))
            for came, left, p in zip(self.came, self.left, prior, strict=True)
        ]

    def add(self, other: Returns) -> None:
        """Add the counts of another table."""
        self.came = [a + b for a, b in zip(self.came, other.came, strict=True)]
        self.left = [a + b for a, b in zip(self.left, other.left, strict=True)]

    def fade(self) -> None:
        """Halve the counts where they are many."""
        if self.came[0] > _MAX_COUNT:
            self.came = [n / 2 for n in self.came]
            self.left = [n / 2 for n in self.left]


def evenly(chance: float) -> list[float]:
    """Return the chance of a return in each stage where it is ``chance`` in each octave, and before and after them."""
    return [1 - (1 - chance) ** num for num in _NUM_OCTAVES]


def worths(q: Sequence[float]) -> list[float]:
    """Return the worth, in expected hits per second, at the start of each stage. Linear in the number of stages."""
    alive, hits, time = 1.0, [0.0], [0.0]
    for chance, width in zip(q, WIDTHS, strict=True):
        hits.append(hits[-1] + alive * chance)
        time.append(time[-1] + alive * width * (1 - chance / 2))
        alive = max(alive * (1 - chance), 1e-6)
    hull = [NUM_STAGES]  # the upper hull of the later points (time, hits), the nearest last
    result = [0.0] * NUM_STAGES
    for b in range(LAST_STAGE, -1, -1):
        best = (hits[hull[-1]] - hits[b]) / (time[hull[-1]] - time[b])
        while len(hull) > 1:
            slope = (hits[hull[-2]] - hits[b]) / (time[hull[-2]] - time[b])
            if slope < best:
                break
            best = slope
            hull.pop()
        result[b] = best
        hull.append(b)
    return result


def profits(q: Sequence[float], factor: float, price: float) -> list[float]:
    """Return the expected hits, each counted ``factor`` times, less the price of the room, at the start of each stage.

    Args:
        price: of a second, in hits; a chunk is let go of as soon as that is better than to hold it.
    """
    result, value = [0.0] * NUM_STAGES, 0.0
    for b in range(LAST_STAGE, -1, -1):
        chance = q[b]
        value = max(0.0, chance * factor - price * WIDTHS[b] * (1 - chance / 2) + (1 - chance) * value)
        result[b] = value
    return result
