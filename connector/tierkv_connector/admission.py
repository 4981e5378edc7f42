"""What of a request is worth a slot of the host pool, or only passes through it.

Theory of operation. Every chunk passes through a slot on its way to the disk. One that the host pool's policy does not
want to keep does so *in transit*: its slot is the first to be used again once the server has answered for it. Where
nobody below takes it either (there is no server, or the disk declined the chunk before it), it is not copied at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tierkv.client import StoreClient
from tierkv.config import Spill
from tierkv.hostindex import Entry, HostIndex
from tierkv.messages import DECLINED
from tierkv_connector.requests import RequestState


def keeps(index: HostIndex, state: RequestState, i: int, client: StoreClient | None) -> bool | None:
    """Return whether the host pool keeps a chunk that was just computed; None: it is not even copied there."""
    key, parent = state.keys[i], state.parent(i)
    if index.admits(key, parent):
        return True
    if state.promised is not None:
        return False
    if client is None or not client.connected() or not state.shareable:
        return None
    if all(policy == Spill.NEVER for policy in client.spill.values()):
        return None
    above = index.get(parent)
    return None if above is not None and above.in_transit and above.declined else False


def answered(batch: Sequence[Entry], letters: bytes | None) -> None:
    """Take note of the answer to a STORE (None: it will not come). On the reader thread: plain attributes are set."""
    if letters is not None and len(letters) == len(batch):
        for entry, letter in zip(batch, letters, strict=True):
            entry.declined = bytes((letter,)) == DECLINED
    for entry in batch:
        entry.sending = False


def saves_ahead(spill: Mapping[str, str]) -> bool:
    """Return whether what the host pool lets go is to go to the disk, or to the shared tier with no disk between."""
    disk, shared = spill.get("disk"), spill.get("shared")
    return disk == Spill.ON_EVICT or (shared == Spill.ON_EVICT and disk == Spill.NEVER)
