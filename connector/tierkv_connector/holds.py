"""What the store server is told of the host pool: which chunks it keeps, so that the disk need not keep them too.

Theory of operation. In each step in which that changed one message goes out, before the stores of what it names, and
nobody waits for the answer. In return what the pool is about to let go of is offered once more, from the moment on that
the server says that the disk may not have it: as many chunks ahead as the spill path has room for.
"""

from __future__ import annotations

import threading
from typing import Any

from tierkv.client import StoreClient
from tierkv.hostindex import Entry, HostIndex

#: Keys of each kind in a message: the server takes a microsecond for each, under the disk's lock.
_MAX_KEYS = 4096


class Holds:
    """Tells one session after the other what the host pool keeps.

    Args:
        index: the host index.
        is_wanted: whether the pool's own policy keeps only what is worth it: else all would be kept back from the disk.

    Attributes:
        offers_again: whether what leaves the pool may not be on the disk. Set by the reader thread.
        num_lost: chunks that left it then without having been offered.
    """

    def __init__(self, index: HostIndex, is_wanted: bool) -> None:
        self.offers_again = False
        self.num_lost = 0
        self._index = index
        self._is_wanted = is_wanted
        self._told = ""  # the session that knows
        self._num_pushed_out = 0  # by the index's count, as of the last step

    def tell(self, client: StoreClient) -> None:
        """Tell what has changed; a new session is told all."""
        if self.offers_again:
            self.num_lost += self._index.num_pushed_out - self._num_pushed_out
        self._num_pushed_out = self._index.num_pushed_out
        session = client.holder if self._is_wanted else ""
        if session != self._told:
            self._told, self.offers_again = session, False
            self._index.follow_kept(bool(session))
        took, gone = self._index.take_kept_changes()

        def answered(letter: bytes | None) -> None:
            if letter == b"1" and self._told == session:
                self.offers_again = True

        for at in range(0, max(len(took), len(gone)), _MAX_KEYS):
            client.hold(took[at : at + _MAX_KEYS], gone[at : at + _MAX_KEYS], answered)

    def let_go(self, client: StoreClient, wait_s: float) -> list[Entry]:
        """Say that the pool keeps nothing any more; returns what others may have of it and the disk may not have.

        Args:
            wait_s: seconds to wait for the answer; without one it is nothing.

        Returns:
            The best first.
        """
        if not self._told or self._told != client.holder:
            return []
        kept, letters, heard = self._index.kept(), list[bytes | None](), threading.Event()

        def answered(letter: bytes | None) -> None:
            letters.append(letter)
            heard.set()

        self._told = ""
        keys = [entry.key for entry in kept]
        *firsts, last = [keys[at : at + _MAX_KEYS] for at in range(0, len(keys), _MAX_KEYS)] or [[]]
        for some in firsts:
            client.hold([], some, lambda _: None)
        client.hold([], last, answered)
        heard.wait(wait_s)
        return kept if letters == [b"1"] else []

    def dump(self) -> dict[str, Any]:
        """Return the state as plain values, for tests that compare it."""
        return {"told": self._told, "offers_again": self.offers_again, "num_lost": self.num_lost}
