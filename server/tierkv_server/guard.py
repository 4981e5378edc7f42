"""What was evicted by order, so that bytes that were read before are not stored after."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

#: Evictions that are remembered; what is queued was read long after the oldest of so many.
MAX_EVICTED = 200_000


class Evictions:
    """Numbers evictions. A job that was read at number ``n`` must not be written if its key was evicted after ``n``."""

    def __init__(self) -> None:
        self.number = 0
        self._keys: OrderedDict[tuple[bytes, bytes], int] = OrderedDict()
        self._namespaces: dict[bytes, int] = {}
        self._lock = threading.Lock()

    def note(self, ns_id: bytes, keys: Sequence[bytes] | None) -> None:
        """Note an eviction of keys, or of a whole namespace (None)."""
        with self._lock:
            self.number += 1
            if keys is None:
                self._namespaces[ns_id] = self.number
                return
            for key in keys:
                self._keys.pop((ns_id, key), None)
                self._keys[ns_id, key] = self.number
            while len(self._keys) > MAX_EVICTED:
                self._keys.popitem(last=False)

    def allows(self, ns_id: bytes, key: bytes, since: int) -> bool:
        """Return whether a key was not evicted since number ``since``."""
        return max(self._keys.get((ns_id, key), 0), self._namespaces.get(ns_id, 0)) <= since
