"""What a tier asks of its policy: the interface that all policies share, and when a caller calls what."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

K = TypeVar("K", bound="tuple[bytes, ...] | bytes")

#: A hint's priority is cut to this range. One step is worth a factor of four in expected hits.
MAX_PRIORITY = 2


@dataclass(frozen=True, slots=True)
class Hint:
    """What an application says about one request. All of it is advice, and learned from when it turns out wrong.

    Attributes:
        session: a name for the conversation, unique in its domain; :meth:`Policy.release` takes it.
        retain_s: the application expects to be back within this many seconds.
        release: this request is the session's last.
        priority: -2 to 2; how much more a hit for this session counts than for others.
    """

    session: str = ""
    retain_s: float | None = None
    release: bool = False
    priority: int = 0


class Policy(Protocol[K]):
    """What to store, what to evict. One instance a tier; pure: no clock, no I/O, no locks, no randomness.

    The caller holds whatever lock guards its own index, and calls:

    - :meth:`note` once a request, with the whole chain of the request's keys (one call a namespace), when the request
      is looked up first. Never from a match that may be repeated: this is the one call that renews and teaches.
    - :meth:`admit` before a chunk is written, parents first; a chunk that is refused is not written.
    - :meth:`add` when it is stored, parents first; :meth:`remove` when it is gone, for whatever reason.
    - :meth:`touch` where an entry is read that no request was noted for; harmless after a :meth:`note`.
    - :meth:`victim` when room is needed, until there is enough, each time followed by :meth:`remove`.

    Budgets are the caller's: a policy counts entries, and orders entries of different sizes by hits an entry.
    """

    def note(self, chain: Sequence[K], now: float, *, hint: Hint | None = None, domain: Hashable = None) -> None:
        """Note that a request asks for ``chain`` (root first), stored or not.

        Args:
            now: seconds, from any origin; a step back counts as no time.
            hint: what the application says about the request.
            domain: whose return times are alike, such as a namespace; each learns for itself.
        """

    def admit(self, key: K, now: float, *, room: bool, above: bool = False) -> bool:
        """Return whether ``key`` is worth writing here. Changes nothing that a later answer depends on.

        Args:
            now: as in :meth:`note`.
            room: it fits without an eviction.
            above: the tier above holds it and is going to offer it again when it lets go of it.
        """

    def add(self, key: K, parent: K) -> None:
        """Note that ``key``, a child of ``parent``, is stored now. A second time: a touch."""

    def touch(self, chain: Iterable[K]) -> None:
        """Note a read of ``chain``, ancestors first. Keys that are not stored are passed over."""

    def remove(self, key: K) -> None:
        """Note that ``key`` is not stored any more; nothing happens where it was not."""

    def victim(self, may_evict: Callable[[K], bool]) -> K | None:
        """Return the entry to evict next, or None where nothing may go. The entry stays until :meth:`remove`.

        Never an entry with a stored child, and never one that ``may_evict`` refuses.
        """

    def is_leaf(self, key: K) -> bool:
        """Return whether ``key`` is stored and no child of it is: a caller with reasons of its own may remove it."""

    def release(self, session: str, domain: Hashable = None) -> bool:
        """Note that a session named in a hint is over; return whether it was known."""

    def worth(self, key: K) -> float:
        """Return the expected hits per second of keeping ``key`` from here on; 0 where nothing is known."""

    def dump(self) -> object:
        """Return the whole state as plain values, for tests that compare it before and after a question."""

    def __len__(self) -> int: ...

    def __contains__(self, key: object) -> bool: ...
