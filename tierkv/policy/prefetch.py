"""Prefetch order: which missing chunks are worth fetching first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tierkv.policy.base import K


def prefetch_order(
    chains: Iterable[Sequence[K]],
    is_held: Callable[[K], bool],
    worth: Callable[[K], float] | None = None,
) -> list[K]:
    """Return the keys to fetch, each once, ancestors before descendants.

    Args:
        chains: what is wanted, root first; of waiting requests in the order in which they will run.
        is_held: the key is there already.
        worth: orders the chains where no queue does (sessions that may return), by what their last chunk is worth;
            :meth:`tierkv.policy.Policy.worth` of the tier that knows them.

    >>> prefetch_order([[b"a", b"b"], [b"a", b"c"]], {b"a"}.__contains__)
    [b'b', b'c']
    """
    ordered = [chain for chain in chains if chain]
    if worth is not None:
        ordered.sort(key=lambda chain: worth(chain[-1]), reverse=True)
    return list(dict.fromkeys(key for chain in ordered for key in chain if not is_held(key)))
