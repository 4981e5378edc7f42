"""Python's collector of cycles, paused while a listing makes hundreds of thousands of objects.

It would look at all of the process's objects again and again while they are made: half of a listing's time. They are in
no cycles, so nothing is missed: counting references frees them.
"""

from __future__ import annotations

import gc
import threading


class Pause:
    """A context in which the collector does not run by itself. May be entered by several threads, and again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num = 0
        self._ran = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._num:
                self._ran = gc.isenabled()
                gc.disable()
            self._num += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num -= 1
            if not self._num and self._ran:
                gc.enable()


#: The process has one collector.
PAUSE = Pause()
