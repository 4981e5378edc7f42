"""Requests under way, on one engine or two."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from engine_process import Answer, Engine, EngineDiedError
from fire.references import MAX_TOKENS

_NUMBERS = itertools.count()


@dataclass
class Flight:
    """A request that was served, or lost with its engine.

    Attributes:
        engine: the name of the engine.
        added: monotonic time; what the load was held up for meanwhile is added.
        seconds: from then until it had finished.
        answer: None while it is under way, and for one that is lost.
    """

    engine: str
    prompt: list[int]
    added: float
    seconds: float = 0.0
    answer: Answer | None = None


class Load:
    """Requests on engines that step in turn.

    Args:
        engines: by name.
        mortal: the name of the engine that may end; its requests are lost then. Another one's end is raised.

    Attributes:
        done: flights that have finished.
        lost: flights of an engine that has ended.
    """

    def __init__(self, engines: Mapping[str, Engine], mortal: str = "") -> None:
        self.done: list[Flight] = []
        self.lost: list[Flight] = []
        self._engines = dict(engines)
        self._mortal = mortal
        self._running: dict[str, Flight] = {}

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, prompts: Sequence[list[int]]) -> None:
        """Add a request for each prompt to every engine."""
        for name, engine in list(self._engines.items()):
            with self._mourning(name):
                for prompt in prompts:
                    request = f"f{next(_NUMBERS)}"
                    self._running[request] = Flight(name, prompt, time.monotonic())
                    engine.add(request, prompt, max_tokens=MAX_TOKENS)

    def step(self, num: int) -> None:
        """Let every engine with requests take so many steps."""
        for name, engine in list(self._engines.items()):
            if num and any(flight.engine == name for flight in self._running.values()):
                with self._mourning(name):
                    for request, answer in engine.step(num).items():
                        flight = self._running.pop(request)
                        flight.answer, flight.seconds = answer, time.monotonic() - flight.added
                        self.done.append(flight)

    @contextlib.contextmanager
    def held_up(self) -> Iterator[None]:
        """What the context takes is not counted as the requests' time."""
        started = time.monotonic()
        yield
        for flight in self._running.values():
            flight.added += time.monotonic() - started

    @contextlib.contextmanager
    def _mourning(self, name: str) -> Iterator[None]:
        try:
            yield
        except EngineDiedError:
            if name != self._mortal:
                raise
            del self._engines[name]
            for request, flight in list(self._running.items()):
                if flight.engine == name:
                    self.lost.append(self._running.pop(request))
