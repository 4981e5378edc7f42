"""What a kind of fault is, and the registry of kinds.

A kind is one small class, or one instance of a parametrized one, in a module ``fire/kinds_*.py``, which registers it::

    class RedisFreezes(Kind):
        name, group, source = "redis freezes", "redis", "shared"

        def begin(self, stage, rng):
            self._before = stage.meddler.num_passed
            stage.redis.sigstop()

        def end(self, stage):
            stage.redis.sigcont()

        def struck(self, stage):
            return stage.meddler.num_waiting


    register(RedisFreezes())

The harness (``fire.harness.Harness``) does the rest, for each fault: it stores prompts in the tier that ``source``
names, adds requests for them and for new ones, calls :meth:`Kind.begin` before or between the steps that serve them,
adds more requests while the fault lasts, waits until all have finished, asks :meth:`Kind.struck`, calls
:meth:`Kind.end`, waits until everything is healthy again, and checks outputs, payloads, times and leaks.
"""

from __future__ import annotations

import importlib
import pkgutil
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fire.stage import Stage

#: Back-offs double up to this, in engines and server: faults follow each other faster here than in any field.
BACKOFF_MAX_S = 4.0


class Kind:
    """One kind of fault. Attributes are class attributes, or set by a parametrized kind's constructor.

    Attributes:
        name: in tables and for ``--kinds``, e.g. ``"redis freezes"``.
        group: the class of fault: ``"server"``, ``"redis"``, ``"disk"``, ``"network"`` or ``"engine"``.
        engine: whose requests are struck: ``"local"`` (shared memory with the server) or ``"inline"`` (over TCP,
            through ``stage.network``).
        both_engines: the other engine serves the same prompts at the same time.
        source: where the prompts that are to be hit lie when the fault begins: ``"disk"`` or ``"shared"``. The host
            pool is empty then.
        moments: :meth:`begin` comes after so many steps of the requests in flight, drawn between these two. A kind
            that arms a point inside an operation begins before the first step.
        kills_engine: :meth:`begin` ends the engine's process; requests in flight are lost with it, :meth:`end` has to
            bring another (``stage.restart_engine``), on which the harness runs them again.
        outlives: seconds that the harness lets pass, with requests, between begin and end, at least; :meth:`begin` may
            draw them.
        optional: why this kind cannot run here (no root, no tool); empty where it can.
    """

    name: str = ""
    group: str = ""
    engine: str = "local"
    both_engines: bool = False
    source: str = "disk"
    moments: tuple[int, int] = (0, 3)
    kills_engine: bool = False
    outlives: float = 0.0

    def optional(self, stage: Stage) -> str:
        """Return why this kind cannot run here, in a sentence; empty where it can."""
        return ""

    def begin(self, stage: Stage, rng: random.Random) -> None:
        """Begin the fault, or arm it where it begins inside an operation. ``rng``: from seed, kind and number."""
        raise NotImplementedError

    def end(self, stage: Stage) -> None:
        """End the fault: bring back what died, let go on what stands still. Idempotent."""
        raise NotImplementedError

    def struck(self, stage: Stage) -> int:
        """Return how often the fault struck since :meth:`begin`: passes of its point, replies changed, bytes lost.

        Asked before :meth:`end`, when every request has finished. A fault with 0 does not count and is tried again.
        """
        raise NotImplementedError


#: Every kind by its name, in the order of registration.
KINDS: dict[str, Kind] = {}


def register(kind: Kind) -> None:
    """Add a kind; two of one name are a mistake."""
    assert kind.name and kind.name not in KINDS, f"the name of kind {kind.name!r} is empty or taken"
    KINDS[kind.name] = kind


def load_kinds() -> dict[str, Kind]:
    """Import every ``fire/kinds_*.py`` and return the registry."""
    package = importlib.import_module("fire")
    for module in sorted(pkgutil.iter_modules(package.__path__), key=lambda m: m.name):
        if module.name.startswith("kinds_"):
            importlib.import_module(f"fire.{module.name}")
    return KINDS
