"""How much memory Redis has left, and how many keys it evicted: what it says itself (``INFO``)."""

from __future__ import annotations

from typing import NamedTuple

from tierkv.resp import Value
from tierkv.tiers.redis_link import OnError, RedisLink


class Memory(NamedTuple):
    """``free_nbytes``: what Redis may still take, None where it does not say; ``num_evicted``: keys since its start."""

    free_nbytes: int | None
    num_evicted: int


def measure(link: RedisLink) -> Memory:
    """Ask every node that has keys. Their free memory adds up as if each had as little as the fullest: keys spread.

    A Redis without a ``maxmemory`` may take what its machine has.
    """
    free: list[int | None] = []
    num_evicted = 0
    nodes = link.nodes()
    for node in nodes:
        replies = link.ask([("INFO", "memory"), ("INFO", "stats")], OnError.IGNORE, node=node) or ()
        fields = {name: value for reply in replies for name, value in _fields(reply)}
        limit = fields.get("maxmemory") or fields.get("total_system_memory")
        used = fields.get("used_memory")
        free.append(max(0, limit - used) if limit is not None and used is not None else None)
        num_evicted += fields.get("evicted_keys", 0)
    known = [nbytes for nbytes in free if nbytes is not None]
    return Memory(min(known) * len(known) if known and len(known) == len(nodes) else None, num_evicted)


def _fields(reply: Value) -> list[tuple[str, int]]:
    """Return the whole numbers in the text of an ``INFO``."""
    if not isinstance(reply, bytes):
        return []
    pairs = (line.split(":", 1) for line in reply.decode("utf-8", "replace").splitlines() if ":" in line)
    return [(name, int(value)) for name, value in pairs if value.strip().isdigit()]
