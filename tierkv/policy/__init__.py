"""Which chunks a tier keeps: admission, eviction, prefetch order. Pure: the clock is an argument.

:mod:`~tierkv.policy.base` says what a policy promises and when a caller calls what. Each tier has its own instance,
made by :func:`make_policy`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tierkv.policy.base import MAX_PRIORITY, Hint, K, Policy
from tierkv.policy.learned import Learned
from tierkv.policy.lru import ChainLRU
from tierkv.policy.prefetch import prefetch_order
from tierkv.policy.s3fifo import S3Fifo

#: Policies by name; the first is the default.
POLICIES: Mapping[str, Callable[[], Policy[Any]]] = {"learned": Learned, "s3fifo": S3Fifo, "lru": ChainLRU}
DEFAULT_POLICY = "learned"
#: Policies whose admission depends on what the tier above keeps. Stacked with each other they hold the more together.
WEIGHS_ABOVE = frozenset({"learned"})


def make_policy(name: str = DEFAULT_POLICY) -> Policy[Any]:
    """Return a new policy.

    Raises:
        ValueError: there is none of that name; the message lists those that there are.
    """
    try:
        return POLICIES[name]()
    except KeyError:
        raise ValueError(f"policy={name!r} is unknown; use one of {', '.join(POLICIES)}") from None


__all__ = [
    "DEFAULT_POLICY",
    "MAX_PRIORITY",
    "POLICIES",
    "WEIGHS_ABOVE",
    "ChainLRU",
    "Hint",
    "K",
    "Learned",
    "Policy",
    "S3Fifo",
    "make_policy",
    "prefetch_order",
]
