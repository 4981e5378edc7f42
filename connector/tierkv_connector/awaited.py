"""What one engine tells another, by way of a router, of the chunks that it has stored for it. Pure.

The engine that computed a prompt answers, in its ``kv_transfer_params`` under ``tierkv``, a ``handoff``:
``{"namespace": ..., "last_key": ..., "tokens": ...}``. The one that goes on gets the same in its request's. It is a
promise, no permission: the second engine looks for the key among those that it computes itself, of the prompt and the
tenant in front of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tierkv.keys import KEY_NBYTES

NS_NBYTES = 16


class Awaited(NamedTuple):
    """The promise that chunks up to one of a namespace are stored, or will be in a moment.

    Attributes:
        ns_id: 16 bytes.
        last_key: 32 bytes: key of the last chunk.
    """

    ns_id: bytes
    last_key: bytes

    def shown(self, num_tokens: int) -> dict[str, Any]:
        """Return what travels. ``num_tokens`` is for people: how many tokens of the prompt the chunks hold."""
        return {"namespace": self.ns_id.hex(), "last_key": self.last_key.hex(), "tokens": num_tokens}


def read_awaited(value: Any) -> Awaited | None:
    """Return the promise that a request brought, None where it is none. Never raises."""
    if not isinstance(value, Mapping):
        return None
    ns_id, key = _digest(value.get("namespace"), NS_NBYTES), _digest(value.get("last_key"), KEY_NBYTES)
    return Awaited(ns_id, key) if ns_id and key else None


def without_answer(own: Any) -> Any:
    """Return a request's hints; of an engine's whole answer, which a router passed on as it came, the promise alone."""
    if isinstance(own, Mapping) and "hit_tokens" in own:
        return {name: own[name] for name in ("handoff",) if name in own}
    return own


def _digest(value: Any, nbytes: int) -> bytes:
    """Return the bytes of so many pairs of hexadecimal digits; empty where ``value`` is something else."""
    if not isinstance(value, str) or len(value) != 2 * nbytes:
        return b""
    try:
        digest = bytes.fromhex(value)
    except ValueError:
        return b""
    return digest if len(digest) == nbytes else b""  # spaces count for nothing in fromhex
