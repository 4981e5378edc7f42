"""Which stores go to which tier: the spill policies, and the memory of uses that ``second-use`` needs."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping

from tierkv.config import Spill
from tierkv.messages import COMPUTED, EVICTED, HANDOFF, USED

#: Keys whose uses are remembered: at 4 MiB a chunk half a terabyte of payloads, at 200 bytes a key 26 MB.
MAX_REMEMBERED = 131_072
#: A chunk that was seen in a tier is not sent there again for this long, though that tier may have evicted it since.
SEEN_TTL_S = 600.0

Name = tuple[bytes, bytes]


class Uses:
    """How often chunks were used lately. The one used longest ago is forgotten first. Thread-safe."""

    def __init__(self, capacity: int = MAX_REMEMBERED) -> None:
        self._capacity = capacity
        self._counts: OrderedDict[Name, int] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, name: Name) -> int:
        """Count a use and return how many there were, this one included."""
        with self._lock:
            count = self._counts.pop(name, 0) + 1
            self._counts[name] = count
            if len(self._counts) > self._capacity:
                self._counts.popitem(last=False)
            return count

    def count(self, name: Name) -> int:
        """Return how many uses were noted."""
        return self._counts.get(name, 0)

    def __len__(self) -> int:
        return len(self._counts)


class Seen:
    """Chunks that a tier was found to hold not long ago, bounded. Thread-safe."""

    def __init__(self, capacity: int = MAX_REMEMBERED, ttl_s: float = SEEN_TTL_S) -> None:
        self._capacity = capacity
        self._ttl_s = ttl_s
        self._until: OrderedDict[Name, float] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, name: Name) -> None:
        with self._lock:
            self._until.pop(name, None)
            self._until[name] = time.monotonic() + self._ttl_s
            if len(self._until) > self._capacity:
                self._until.popitem(last=False)

    def discard(self, name: Name) -> None:
        with self._lock:
            self._until.pop(name, None)

    def clear(self) -> None:
        with self._lock:
            self._until.clear()

    def __contains__(self, name: Name) -> bool:
        return self._until.get(name, 0.0) > time.monotonic()


class SpillPolicy:
    """Says whether a chunk that an engine offers, or has used, is to be stored in a tier.

    Attributes:
        policies: for each tier that is there, when chunks go to it. May be replaced while it runs.
    """

    def __init__(self, policies: Mapping[str, Spill]) -> None:
        self.policies = dict(policies)
        self.uses = Uses()

    def takes(self, tier: str, reason: int, num_uses: int) -> bool:
        """Return whether ``tier`` stores a chunk that is offered.

        Args:
            reason: why it is offered (:data:`COMPUTED`, :data:`USED`, :data:`EVICTED`, :data:`HANDOFF`).
            num_uses: how often it was computed or used, this time included.
        """
        policy = self.policies.get(tier, Spill.NEVER)
        if reason == HANDOFF:
            return policy is not Spill.NEVER
        if policy is Spill.THROUGH:
            return True
        if policy is Spill.SECOND_USE:
            return reason == USED or num_uses > 1
        if policy is Spill.ON_EVICT:
            return reason == EVICTED and (tier == "disk" or not self._disk_stores())
        return False

    def from_above(self, tier: str, num_uses: int) -> bool:
        """Return whether a chunk that was read from the tier above or below ``tier`` is to be copied to it now."""
        policy = self.policies.get(tier, Spill.NEVER)
        return policy is Spill.THROUGH or (policy is Spill.SECOND_USE and num_uses > 1)

    def on_evict(self) -> bool:
        """Return whether what the disk evicts goes to the shared tier."""
        return self.policies.get("shared") is Spill.ON_EVICT and self._disk_stores()

    def counts_uses(self) -> bool:
        """Return whether any tier asks for a second use."""
        return Spill.SECOND_USE in self.policies.values()

    def _disk_stores(self) -> bool:
        return self.policies.get("disk", Spill.NEVER) is not Spill.NEVER


__all__ = ["COMPUTED", "EVICTED", "USED", "Seen", "SpillPolicy", "Uses"]
