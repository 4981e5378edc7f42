"""Lists the chunks of stored prefixes for a copy, a page at a time: the latest prefixes first, parents before children.

A listing is taken once and kept while somebody reads it, 72 bytes a chunk; a page may be asked for again.
"""

from __future__ import annotations

import secrets
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

from tierkv.errors import NotFoundError
from tierkv.prefixes import Forest, Node
from tierkv.selection import Select
from tierkv.tiers.base import Ref
from tierkv_server.collector import PAUSE
from tierkv_server.lister import HOST, Lister

MAX_LISTINGS = 4
IDLE_S = 600.0
PAGE_CHUNKS = 4096
#: Key, anchor, when it expires (0: never).
_ROW = struct.Struct("<32s32sd")


class _Part(NamedTuple):
    """The chunks of one namespace that are meant; ``num_host`` more are in host pools alone."""

    ns_id: bytes
    packed: bytes
    num_host: int


class Chunks:
    """Answers which chunks the prefixes that fit a selection have, their ancestors included.

    Args:
        lister: says what is stored.
    """

    def __init__(self, lister: Lister) -> None:
        self._lister = lister
        self._listings: OrderedDict[str, tuple[float, list[_Part]]] = OrderedDict()
        self._lock = threading.Lock()

    def step(self, select: Select) -> dict[str, Any]:
        """Return a page: chunks of one namespace, as key, anchor and expiry, and the ``cursor`` of the next.

        ``num_total`` are those of all pages. ``num_host`` counts, on the first page of a namespace, the chunks that are
        in host pools alone.

        Raises:
            NotFoundError: the cursor is not known any more.
            RefusedError: a tier that is meant is not here.
        """
        name, number, start = _place(select.cursor) if select.cursor else (self._open(select), 0, 0)
        with self._lock:
            kept = self._listings.get(name)
            if kept is None:
                raise NotFoundError(
                    "this listing was not read on for too long, or the server was restarted; start again"
                )
            parts = kept[1]
            self._listings[name] = (time.monotonic(), parts)
            self._listings.move_to_end(name)
        num_total = sum(len(part.packed) for part in parts) // _ROW.size
        if number >= len(parts):
            return {"cursor": "", "num_total": num_total, "namespace": "", "num_host": 0, "chunks": []}
        part, end = parts[number], start + PAGE_CHUNKS
        rows = part.packed[start * _ROW.size : end * _ROW.size]
        follows = (number, end) if end * _ROW.size < len(part.packed) else (number + 1, 0)
        return {
            "cursor": f"{name}:{follows[0]}:{follows[1]}" if follows[0] < len(parts) else "",
            "num_total": num_total,
            "namespace": part.ns_id.hex(),
            "num_host": 0 if start else part.num_host,
            "chunks": [(key.hex(), anchor.hex(), until) for key, anchor, until in _ROW.iter_unpack(rows)],
        }

    def _open(self, select: Select) -> str:
        parts = list(self._parts(select))
        name, now = secrets.token_hex(8), time.monotonic()
        with self._lock:
            for old in [n for n, (used, _) in self._listings.items() if now - used > IDLE_S]:
                del self._listings[old]
            while len(self._listings) >= MAX_LISTINGS:
                self._listings.popitem(last=False)
            self._listings[name] = (now, parts)
        return name

    def _parts(self, select: Select) -> Iterator[_Part]:
        for ns_id, _, forest in self._lister.forests(select):
            with PAUSE:
                nodes = _ordered(forest, [p.leaf for p in self._lister.fitting(forest, select)])
                below = [node for node in nodes if not node.nbytes.keys() <= {HOST}]
                if nodes:
                    yield _Part(ns_id, b"".join(map(_row, below)), len(nodes) - len(below))


def _place(cursor: str) -> tuple[str, int, int]:
    name, number, start = cursor.split(":")
    return name, max(0, int(number)), max(0, int(start))


def _ordered(forest: Forest, leaves: list[Node]) -> list[Node]:
    """Return the chains of prefixes, each chunk once, parents first, the prefixes in the order of ``leaves``."""
    seen: set[bytes] = set()
    order: list[Node] = []
    for leaf in leaves:
        chain: list[Node] = []
        node: Node | None = leaf
        while node is not None and node.key not in seen:
            seen.add(node.key)
            chain.append(node)
            node = forest.parent(node)
        order += reversed(chain)
    return order


def _row(node: Node) -> bytes:
    lives = [until for tier, until in node.expires.items() if tier != HOST]
    return _ROW.pack(node.key, node.anchor or node.key, max(lives) if lives and all(lives) else 0.0)


def unpack_page(page: dict[str, Any]) -> list[tuple[Ref, float]]:
    """Return the chunks of a page: how each is asked for, and when it expires (0: never)."""
    return [(Ref(bytes.fromhex(key), bytes.fromhex(anchor)), float(until)) for key, anchor, until in page["chunks"]]
