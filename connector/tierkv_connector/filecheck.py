"""Questions to a file system that may hang, asked by threads of their own: who asks waits for a moment, and no longer.

Theory of operation. ``stat`` of a file on a network file system can block for minutes, and a scheduler's step must not.
So a thread asks, and whoever needs the answer waits at most ``WAIT_S``, which on a file system that is well is a
hundred times what it takes. Only an answer to a question that was asked *after* the call began counts: what was true
before says nothing of now. While one of a name's questions is stuck, nobody waits for that name, and asks anew.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Hashable

from tierkv.threads import leave_compute_core

#: Seconds that a step waits for an answer.
WAIT_S = 0.02
#: Threads that ask. Each may be stuck on a file system; with all of them stuck nobody waits at all.
MAX_THREADS = 4


class _Question:
    """One question and its answer."""

    def __init__(self, name: Hashable, ask: Callable[[], bool]) -> None:
        self.name = name
        self.ask = ask
        self.answer: bool | None = None
        self.answered = threading.Event()


class FileChecks:
    """Threads that ask a file system.

    Args:
        wait_s: seconds that a caller waits; None: ``WAIT_S``.
    """

    def __init__(self, wait_s: float | None = None) -> None:
        self._wait_s = WAIT_S if wait_s is None else wait_s
        self._todo: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._under_way: dict[Hashable, _Question] = {}
        self._num_threads = 0
        self.num_late = 0

    def ask(self, name: Hashable, question: Callable[[], bool]) -> bool | None:
        """Return the answer to a question about ``name`` that is asked now; None where it does not come at once.

        An exception in the question is the answer False.
        """
        stuck = [q for q in self._under_way.values() if not q.answered.is_set()]
        if len(stuck) >= MAX_THREADS or any(q.name == name for q in stuck):
            self.num_late += 1
            return None
        self._under_way = {q.name: q for q in stuck}
        asked = self._under_way[name] = _Question(name, question)
        if self._num_threads <= len(stuck):
            self._num_threads += 1
            threading.Thread(target=self._run, name="tierkv-files", daemon=True).start()
        self._todo.put(asked)
        if not asked.answered.wait(self._wait_s):
            self.num_late += 1
            return None
        return asked.answer

    def close(self) -> None:
        """Have the threads end that are not stuck; the others end with the process."""
        for _ in range(self._num_threads):
            self._todo.put(None)
        self._num_threads = 0

    def _run(self) -> None:
        leave_compute_core()
        while (asked := self._todo.get()) is not None:
            try:
                asked.answer = asked.ask()
            except Exception:  # the file system's: what cannot be asked is not as it was
                asked.answer = False
            asked.answered.set()
