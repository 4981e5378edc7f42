"""What came of a measurement: rounds of clients' operations, and the figures of all of them. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec


class Round(msgspec.Struct, frozen=True):
    """What one client did in a round.

    Attributes:
        latencies: seconds of each operation.
        began, ended: monotonic times of the machine, which all of its processes share.
        cpu_s: CPU time of the client's process.
        num_chunks, nbytes: chunks it was about, and payload bytes that were moved.
        failed: why it ended early; empty for a good one.
        lost: the server went away.
    """

    latencies: list[float] = []
    began: float = 0.0
    ended: float = 0.0
    cpu_s: float = 0.0
    num_chunks: int = 0
    nbytes: int = 0
    failed: str = ""
    lost: bool = False


class Figure(msgspec.Struct, frozen=True):
    """What a kind of operation came to, over all rounds and clients.

    Attributes:
        tier, op: the tier, and ``store``, ``match`` or ``fetch``.
        payload_nbytes: of a chunk.
        num_ops, num_chunks, nbytes: what was done.
        seconds: how long it took, the time between rounds left out.
        median_s, p99_s: of one operation.
        ops_s: operations a second, all clients together.
        gb_s: 1e9 payload bytes a second; 0 for what moves none.
        client_cpu_s: CPU time of all clients.
        server_cpu_s: the server's; None where it runs elsewhere.
    """

    tier: str
    op: str
    payload_nbytes: int
    num_ops: int
    num_chunks: int
    nbytes: int
    seconds: float
    median_s: float
    p99_s: float
    ops_s: float
    gb_s: float
    client_cpu_s: float
    server_cpu_s: float | None


class Tally:
    """Adds up rounds of one kind of operation."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._latencies: list[float] = []
        self._num_chunks = self._nbytes = 0
        self._client_cpu_s = 0.0
        self._server_cpu_s: float | None = 0.0

    def add(self, rounds: Sequence[Round], server_cpu_s: float | None) -> None:
        """Add what the clients did at the same time, and the server's CPU time meanwhile (None: not known)."""
        self.seconds += max(r.ended for r in rounds) - min(r.began for r in rounds)
        for each in rounds:
            self._latencies += each.latencies
            self._num_chunks += each.num_chunks
            self._nbytes += each.nbytes
            self._client_cpu_s += each.cpu_s
        known = self._server_cpu_s is not None and server_cpu_s is not None
        self._server_cpu_s = (self._server_cpu_s or 0.0) + (server_cpu_s or 0.0) if known else None

    def figure(self, tier: str, op: str, payload_nbytes: int) -> Figure:
        """Return the figures. At least one operation was done."""
        return Figure(
            tier=tier,
            op=op,
            payload_nbytes=payload_nbytes,
            num_ops=len(self._latencies),
            num_chunks=self._num_chunks,
            nbytes=self._nbytes,
            seconds=self.seconds,
            median_s=statistics.median(self._latencies),
            p99_s=percentile(self._latencies, 99),
            ops_s=len(self._latencies) / self.seconds,
            gb_s=self._nbytes / self.seconds / 1e9,
            client_cpu_s=self._client_cpu_s,
            server_cpu_s=self._server_cpu_s,
        )


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the least of ``values`` that ``percent`` of them do not exceed.

    >>> percentile([3.0, 1.0, 2.0], 99)
    3.0
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
