"""What was evicted by order, so that bytes that were read before are not stored after."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

#: Evictions that are remembered. What was read before the oldest of so many is not stored, whatever it is.
MAX_EVICTED = 200_000


class Evictions:
    """Numbers evictions. A job that was read at number ``n`` must not be written if its key was evicted after ``n``."""

    def __init__(self) -> None:
        self.number = 0
        self._keys: OrderedDict[tuple[bytes, bytes], int] = OrderedDict()
        self._namespaces: dict[bytes, int] = {}
        self._everything = 0  # what was read before this number may have been evicted, whatever it is
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
                _, forgotten = self._keys.popitem(last=False)
                self._everything = max(self._everything, forgotten)

    def note_everything(self) -> None:
        """Note that evictions were missed: nobody can say of what."""
        with self._lock:
            self.number += 1
            self._everything = self.number

    def allows(self, ns_id: bytes, key: bytes, since: int) -> bool:
        """Return whether a key was not evicted since number ``since``."""
        last = max(self._keys.get((ns_id, key), 0), self._namespaces.get(ns_id, 0), self._everything)
        return last <= since
