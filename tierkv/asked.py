"""What an engine's requests ask for, sampled, on its way to the store server, which makes miss-ratio curves of it.

The scheduler thread only appends to a queue, whatever a request's length; the store client's thread picks the sample
and sends it, once a second. The server answers with the threshold of the sample that it can use: see
:mod:`tierkv.reuse`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from tierkv.messages import SOURCES, AskedReport
from tierkv.reuse import ALL, HEAD_NBYTES

#: A report is sent this often at most, and has one request more than that many keys at most.
REPORT_INTERVAL_S = 1.0
REPORT_KEYS = 4096
#: Keys of requests that wait for a report; those of more are lost, and counted.
MAX_WAITING_KEYS = 1 << 16
_ALL = ALL.to_bytes(HEAD_NBYTES, "big")


class AskedLog:
    """The requests that no report has told of.

    One thread (the scheduler's) calls :meth:`note`, another one everything else.

    Args:
        counters: the engine's counters, read with every report.
    """

    def __init__(self, counters: Mapping[str, int]) -> None:
        self._counters = counters
        self._requests: deque[tuple[list[bytes], int, int, int]] = deque()
        self._threshold = _ALL
        self._num_noted = 0  # keys, since the start; written by the scheduler's thread alone
        self._num_lost = 0  # the same
        self._num_taken = 0  # keys that a report has told of; written by the other thread
        self._told: dict[str, int] = {}

    def note(self, keys: list[bytes], num_gpu: int, num_found: int) -> None:
        """Note a new request. Costs the same for any number of keys: they are looked at by the other thread.

        Args:
            keys: of its whole chunks, root first; may grow afterwards.
            num_gpu: so many of them, from the first on, are on the GPU.
            num_found: so many are there or in the host pool: the rest goes to the store server.
        """
        num = len(keys)
        if self._num_noted - self._num_taken + num > MAX_WAITING_KEYS:
            self._num_lost += num
            return
        self._num_noted += num
        self._requests.append((keys, num, num_gpu, num_found))

    def take(self) -> AskedReport | None:
        """Return what is to be told now; None: nothing."""
        if not self._requests:
            return None
        threshold, requests = self._threshold, []
        asked = below = gpu = sampled = 0
        while self._requests and sampled < REPORT_KEYS:
            keys, num, num_gpu, num_found = self._requests.popleft()
            near = [key[:HEAD_NBYTES] for key in keys[:num_found] if key < threshold]
            far = [key[:HEAD_NBYTES] for key in keys[num_found:num] if key < threshold]
            asked, below, gpu = asked + num, below + num - num_found, gpu + num_gpu
            if near or far:
                requests.append((b"".join(near + far), len(far), num_found < num))
                sampled += len(near) + len(far)
        self._num_taken += asked
        if self._num_noted - self._num_taken > MAX_WAITING_KEYS // 2:  # more is asked than reports can tell
            self._threshold = (int.from_bytes(threshold, "big") // 2).to_bytes(HEAD_NBYTES, "big")
        return AskedReport(
            threshold=threshold,
            num_asked=asked,
            num_below=below,
            num_lost=self._since("lost", self._num_lost),
            sources=[gpu, *(self._since(name, self._counters.get(name, 0)) for name in SOURCES[1:])],
            requests=requests,
        )

    def answered(self, threshold: bytes) -> None:
        """Take the sample from now on that the server can use.

        Args:
            threshold: keys that begin with less are in it.
        """
        if len(threshold) == HEAD_NBYTES:
            self._threshold = min(self._threshold, threshold)

    def restart(self) -> None:
        """Begin with a sample of all keys again: the server may be another one."""
        self._threshold = _ALL

    def _since(self, name: str, now: int) -> int:
        before = self._told.get(name, 0)
        self._told[name] = now
        return max(0, now - before)
