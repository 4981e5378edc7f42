"""Health of something that may fail: out for a back-off period after a fault, then tried again."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable

logger = logging.getLogger("tierkv")

BACKOFF_MIN_S = 0.5
BACKOFF_MAX_S = 30.0


class Health:
    """Says whether to try ``what`` now. Logs one line when a fault begins and one when it ends.

    The back-off doubles from ``BACKOFF_MIN_S`` to ``BACKOFF_MAX_S`` with every fault in a row, with a jitter of a
    quarter, so that many clients of one dead server do not return together.

    Thread-safety: attributes are read and written whole; a race costs at most one extra try.
    """

    def __init__(
        self,
        what: str,
        clock: Callable[[], float] = time.monotonic,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self.what = what
        self.reason = ""
        self.out_since = 0.0  #: seconds since 1970, 0 while it works
        self.num_faults = 0
        self._clock = clock
        self._rng = rng
        self._backoff_s = 0.0
        self._retry_at = 0.0

    @property
    def up(self) -> bool:
        """Whether the last try worked."""
        return not self.out_since

    def available(self) -> bool:
        """Return whether it may be tried now: it works, or its back-off is over."""
        return not self.out_since or self._clock() >= self._retry_at

    def retry_in_s(self) -> float:
        """Return the seconds until it may be tried again; 0 if it may be now."""
        return max(0.0, self._retry_at - self._clock()) if self.out_since else 0.0

    def failed(self, reason: object) -> None:
        """Note a fault: nobody tries again until the back-off is over."""
        self.num_faults += 1
        self.reason = " ".join(str(reason).split()).rstrip(".") or type(reason).__name__
        self._backoff_s = min(BACKOFF_MAX_S, max(BACKOFF_MIN_S, 2 * self._backoff_s))
        self._retry_at = self._clock() + self._backoff_s * (0.75 + 0.5 * self._rng())
        if not self.out_since:
            self.out_since = time.time()
            logger.warning("%s is out: %s. Serving goes on without it.", self.what, self.reason)

    def worked(self) -> None:
        """Note a success: the fault, if there was one, is over."""
        if self.out_since:
            logger.warning("%s is back after %.1f s.", self.what, time.time() - self.out_since)
            self.out_since, self.reason, self._backoff_s, self._retry_at = 0.0, "", 0.0, 0.0
