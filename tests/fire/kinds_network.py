"""The network between an inline engine and its server cuts, delays, swallows, or flips bits: four kinds."""

from __future__ import annotations

import random

from fire.kind import Kind, register
from fire.stage import Stage


class NetworkFault(Kind):
    """A fault of the connections between the inline engine and the server; both know nothing of it."""

    group = "network"
    engine = "inline"

    def begin(self, stage: Stage, rng: random.Random) -> None:
        self._before = self._count(stage)
        self.spoil(stage, rng)

    def end(self, stage: Stage) -> None:
        stage.network.restore()

    def struck(self, stage: Stage) -> int:
        return self._count(stage) - self._before

    def spoil(self, stage: Stage, rng: random.Random) -> None:
        """Do it."""
        raise NotImplementedError

    def _count(self, stage: Stage) -> int:
        return stage.network.requests.num_faults + stage.network.replies.num_faults


class Cuts(NetworkFault):
    """A connection ends in the middle of a message: within a payload, a command, or an answer of a few bytes."""

    name = "network cuts"

    def spoil(self, stage: Stage, rng: random.Random) -> None:
        replies, requests = stage.network.replies, stage.network.requests
        direction, most = rng.choice([(replies, 200), (replies, 200_000), (requests, 3000), (requests, 100_000)])
        direction.cut(rng.randrange(most))


class FlipsBits(NetworkFault):
    """Single bits change on the way: in commands, in answers, in payloads."""

    name = "network flips bits"

    def spoil(self, stage: Stage, rng: random.Random) -> None:
        # Requests carry keys first, then what is stored; replies carry what is fetched.
        for direction, reach in ((stage.network.requests, 3000), (stage.network.replies, 600_000)):
            for _ in range(rng.randint(1, 4)):
                direction.flip(rng.randrange(reach), 1 << rng.randrange(8))


class Delays(NetworkFault):
    """Every piece takes longer: less than the deadline, or more."""

    name = "network delays"

    def spoil(self, stage: Stage, rng: random.Random) -> None:
        stage.network.replies.delay_s = rng.choice([0.02, 0.2, 0.6])
        stage.network.requests.delay_s = rng.choice([0.0, 0.1, 0.5])

    def _count(self, stage: Stage) -> int:
        return stage.network.requests.nbytes + stage.network.replies.nbytes


class BlackHole(NetworkFault):
    """Half-open: what is sent is swallowed, nothing comes back, and nobody says so."""

    name = "network swallows"

    def spoil(self, stage: Stage, rng: random.Random) -> None:
        stage.network.black_hole()

    def end(self, stage: Stage) -> None:
        stage.network.restore()
        stage.network.drop_connections()  # as a network that is back answers packets of connections it has forgotten

    def _count(self, stage: Stage) -> int:
        return stage.network.num_swallowed


for _kind in (Cuts(), FlipsBits(), Delays(), BlackHole()):
    register(_kind)
