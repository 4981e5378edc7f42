"""Health of something that may fail: out for a back-off period after a fault, then tried again."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("tierkv")

BACKOFF_MIN_S = 0.5
BACKOFF_MAX_S = 30.0
#: What happens again and again without being a state is logged once in this time.
REPEAT_S = 60.0


class Health:
    """Says whether to try ``what`` now. Logs one line when a fault begins and one when it ends.

    The back-off doubles from ``BACKOFF_MIN_S`` to ``BACKOFF_MAX_S`` with every try that fails in a row, with a jitter
    of a quarter, so that many clients of one dead server do not return together. During the back-off nothing is tried:
    what fails then began before, and changes nothing. Nor does a success of what began before the last failure.

    Args:
        what: what it is, as a sentence begins with it.
        meanwhile: what happens until it is back, in a sentence.
        settle_s: seconds that it has to work for without a fault before it is called back. Until then it may be tried,
            the fault goes on, and the next failure doubles the back-off: for what seems to work before it is used.

    Thread-safety: every method may be called from any thread; a race costs at most one extra try.
    """

    def __init__(
        self,
        what: str,
        clock: Callable[[], float] = time.monotonic,
        rng: Callable[[], float] = random.random,
        *,
        meanwhile: str = "Serving goes on without it.",
        settle_s: float = 0.0,
    ) -> None:
        self.what = what
        self.reason = ""
        self.out_since = 0.0  #: seconds since 1970, 0 while it works
        self.num_faults = 0
        self._meanwhile = meanwhile
        self._settle_s = settle_s
        self._clock = clock
        self._rng = rng
        self._backoff_s = 0.0
        self._retry_at = 0.0
        self._failed_at = self._out_at = 0.0  # the last failure; and as out_since, by the clock
        self._works_since: float | None = None  # since the last failure
        self._lock = threading.Lock()

    @property
    def up(self) -> bool:
        """Whether the last try worked."""
        return not self.out_since

    def now(self) -> float:
        """Return the time in seconds by the clock that :meth:`worked` goes by."""
        return self._clock()

    def available(self) -> bool:
        """Return whether it may be tried now: it works, or its back-off is over."""
        return not self.out_since or self._clock() >= self._retry_at

    def retry_in_s(self) -> float:
        """Return the seconds until it may be tried again; 0 if it may be now."""
        return max(0.0, self._retry_at - self._clock()) if self.out_since else 0.0

    def failed(self, reason: object) -> None:
        """Note a fault: nobody tries again until the back-off is over."""
        with self._lock:
            self.num_faults += 1
            self.reason = " ".join(str(reason).split()).rstrip(".") or type(reason).__name__
            self._works_since = None
            now = self._failed_at = self._clock()
            if self.out_since and now < self._retry_at:
                return  # one of several that were under way
            self._backoff_s = min(BACKOFF_MAX_S, max(BACKOFF_MIN_S, 2 * self._backoff_s))
            self._retry_at = now + self._backoff_s * (0.75 + 0.5 * self._rng())
            if self.out_since:
                return
            self.out_since, self._out_at = time.time(), now
            logger.warning("%s is out: %s. %s", self.what, self.reason, self._meanwhile)

    def worked(self, began: float) -> None:
        """Note a success: the fault, if there was one, is over, or will be if nothing fails for a while.

        Args:
            began: when what worked was begun, by :meth:`now`. What began before the last failure proves nothing: it
                may have been answered before the fault and noted late.
        """
        if not self.out_since:
            return
        with self._lock:
            if not self.out_since or began < self._failed_at:
                return
            now = self._clock()
            if self._works_since is None:
                self._works_since = now
            if now - self._works_since < self._settle_s:
                return
            logger.warning("%s is back after %.1f s.", self.what, self._works_since - self._out_at)
            self.out_since, self.reason, self._backoff_s, self._retry_at = 0.0, "", 0.0, 0.0


class Repeated:
    """Logs what may happen thousands of times in a row: the first at once, then one line a minute with their number."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num = 0
        self._logged_at = float("-inf")
        self._lock = threading.Lock()

    def note(self, message: str, *args: object, exc_info: bool = False) -> None:
        """Log a warning, or an error with the exception that is being handled, unless one was logged lately."""
        with self._lock:
            now = self._clock()
            if now - self._logged_at < REPEAT_S:
                self._num += 1
                return
            num, self._num, self._logged_at = self._num, 0, now
        if num:
            message, args = message + " (and %d times more in the last minutes)", (*args, num)
        logger.log(logging.ERROR if exc_info else logging.WARNING, message, *args, exc_info=exc_info)
