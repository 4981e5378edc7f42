"""The store server dies or stops in the middle of what it does: twelve kinds."""

from __future__ import annotations

import random

from fire.kind import Kind, register
from fire.stage import Stage, draw_outage

#: Each operation, the latest pass of its point at which the fault comes, and where what is hit lies.
_OPERATIONS = {
    "match": (6, "disk"),
    "fetch": (8, "disk"),
    "store": (8, "disk"),
    "commit": (3, "disk"),
    "redis-write": (7, "disk"),
    "hello": (8, "disk"),
}
#: A commit of a few megabytes takes about as long: the signal comes before, in, or after it.
_COMMIT_S = 0.002


class ServerFault(Kind):
    """The server gets a signal at a pass of a point, drawn from the first ones.

    Args:
        point: of :mod:`fire.store`.
        do: ``"kill"`` or ``"stop"``.
    """

    group = "server"
    moments = (0, 0)
    both_engines = True

    def __init__(self, point: str, do: str) -> None:
        self.name = f"server {'dies' if do == 'kill' else 'stops'} in {point}"
        self.do = do
        self.point = point
        self.last, self.source = _OPERATIONS[point]

    def begin(self, stage: Stage, rng: random.Random) -> None:
        first = rng.randint(1, self.last)
        self.outlives = draw_outage(rng) if self.do == "stop" else 0.0
        after_s = rng.choice([0.0, rng.uniform(0, _COMMIT_S)]) if self.point == "commit" else 0.0
        order = (self.point, self.do, first, True, after_s)
        if self.point == "hello":
            stage.store.restart(order)  # engines come back, and say hello to a server that is armed
        else:
            stage.store.arm(*order)

    def end(self, stage: Stage) -> None:
        stage.store.revive()

    def struck(self, stage: Stage) -> int:
        return stage.store.num_struck(wait_s=stage.RECONNECT_S if self.point == "hello" else 2.0)


for _point in _OPERATIONS:
    for _do in ("kill", "stop"):
        register(ServerFault(_point, _do))
