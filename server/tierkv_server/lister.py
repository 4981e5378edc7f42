"""What people ask of a store without changing it: lists, chains, trees, sums, over all tiers and engines' host pools.

The engines' pools are asked through :meth:`Lister.ask_engines`, which a running server answers
(:class:`tierkv_server.inspect.Inspector`) and a store that no server runs does not.
"""

from __future__ import annotations

import bisect
import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from tierkv.errors import NotFoundError, RefusedError
from tierkv.layout import Namespace
from tierkv.messages import HostEntry, Select
from tierkv.prefixes import ID_DIGITS, Forest, Node, Prefix, sum_by_tier
from tierkv.tiers.base import EntryInfo, Fetched, Ref, Sink
from tierkv_server.admin.tree import make_tree
from tierkv_server.collector import PAUSE
from tierkv_server.service import make_refs
from tierkv_server.session import Session

HOST = "host"
TIER_NAMES = (HOST, "disk", "shared")
_SORTS: dict[str, Callable[[Prefix, Namespace], float]] = {
    "last_used": lambda p, _: p.last_used,
    "hits": lambda p, _: p.hits,
    "nbytes": lambda p, _: sum(p.nbytes.values()),
    "tokens": lambda p, namespace: _num_tokens(p.leaf, namespace),
    "created": lambda p, _: p.created,
}
TREE_SORTS = ("last_used", "hits", "nbytes")
DU_KEYS = ("namespace", "tenant", "depth", "age")
#: Ages (seconds since the last use) at which a row of a sum by age ends.
AGES_S = (60, 600, 3600, 6 * 3600, 86400, 7 * 86400)
_TREE_LIMIT = 200


class Readable(Protocol):
    """What of a tier's contract (:class:`tierkv.tiers.base.Tier`) is used to look at it."""

    name: str

    def namespaces(self) -> dict[bytes, Namespace]: ...

    def match(self, ns_id: bytes, refs: Sequence[Ref]) -> list[bool]: ...

    def entries(self, ns_id: bytes) -> Iterator[EntryInfo]: ...

    def fetch(
        self, ns_id: bytes, refs: Sequence[Ref], sink: Sink, *, quiet: bool = False, keep: bool = False
    ) -> list[Fetched]: ...


class Stores(Protocol):
    """The tiers that are looked at, nearest first."""

    def tiers(self) -> Sequence[Readable]:
        """Return them."""


class Lister:
    """Answers questions about what is stored.

    Args:
        stores: the tiers.
    """

    def __init__(self, stores: Stores) -> None:
        self._stores = stores

    def ask_engines(self, what: str, body: bytes, ns_id: bytes | None = None) -> list[tuple[Session, bytes]]:
        """Ask the engines (of a namespace) and return the answers that came in time: here there are no engines."""
        return []

    # -- namespaces and forests

    def namespaces(self) -> dict[bytes, Namespace]:
        """Return every namespace that a tier has, by id."""
        found: dict[bytes, Namespace] = {}
        for tier in reversed(self._stores.tiers()):
            found |= tier.namespaces()
        return found

    def chosen(self, select: Select) -> dict[bytes, Namespace]:
        """Return the namespaces that are meant."""
        return {i: n for i, n in self.namespaces().items() if i.hex().startswith(select.ns)}

    def tier_names(self, select: Select) -> list[str]:
        """Return the tiers that are meant.

        Raises:
            RefusedError: one of them is not here.
        """
        known = [HOST] + [tier.name for tier in self._stores.tiers()]
        for name in select.tiers:
            if name not in known:
                raise RefusedError(f"tier {name!r} is not here; this server has " + ", ".join(known))
        return select.tiers or known

    def readable(self) -> Sequence[Readable]:
        """Return the tiers but for the host pools: those are the engines' own."""
        return self._stores.tiers()

    def forest(self, ns_id: bytes) -> Forest:
        """Return the stored chunks of a namespace over all tiers."""
        forest = Forest()
        for tier in self._stores.tiers():
            with PAUSE:
                for entry in tier.entries(ns_id):
                    forest.add_entry(tier.name, entry)
        for session, body in self.ask_engines("list", b"", ns_id):
            nbytes = session.pool.shape.payload_nbytes
            for h in msgspec.msgpack.decode(body, type=list[HostEntry]):
                forest.add(HOST, h.key, h.parent, h.position, h.num_tokens, nbytes, h.num_hits, h.last_used)
                forest.nodes[h.key].tenant = forest.nodes[h.key].tenant or h.tenant
        with PAUSE:
            forest.link()
        return forest

    def forests(self, select: Select) -> Iterator[tuple[bytes, Namespace, Forest]]:
        """Yield the stored chunks of each namespace that is meant, over all tiers."""
        for ns_id, namespace in self.chosen(select).items():
            yield ns_id, namespace, self.forest(ns_id)

    def chain(self, select: Select) -> tuple[bytes, Namespace, list[Node]]:
        """Return the one stored prefix that is meant: its namespace, and its chunks from the first on.

        Raises:
            RefusedError: several are meant.
            NotFoundError: none is named, or none is stored.
        """
        found = []
        for ns_id, namespace, forest in self.forests(select):
            if select.prefix:
                key = forest.resolve(select.prefix)
            else:
                keys = [bytes.fromhex(k) for k in select.keys.get(ns_id.hex(), [])]
                key = next((k for k in reversed(keys) if k in forest.nodes), None)
            if key is not None:
                found.append((ns_id, namespace, forest.chain(key)))
        if len(found) > 1:
            raise RefusedError(f"this is stored in {len(found)} namespaces; name one of them too")
        if not found:
            named = f"no stored prefix has the id {select.prefix!r}" if select.prefix else "no stored prefix was named"
            raise NotFoundError(f"{named}; 'tierkv ls' lists what is stored")
        return found[0]

    # -- prefixes

    def ls(self, select: Select) -> list[dict[str, Any]]:
        """Return the stored prefixes that fit, one row a last chunk."""
        rows: list[dict[str, Any]] = self.page(select)["prefixes"]
        return rows

    def page(self, select: Select, offset: int = 0) -> dict[str, Any]:
        """Return the stored prefixes that fit, and how many there are in all: ``select.limit`` rows from ``offset`` on.

        Rows are made of those that are returned alone, and what is kept meanwhile is bounded by the last of them.

        Raises:
            RefusedError: the order is unknown.
        """
        rank = _SORTS.get(select.sort or "last_used")
        if rank is None:
            raise RefusedError(f"sort {select.sort!r} is unknown; sort by one of " + ", ".join(_SORTS))
        tiers, now = set(self.tier_names(select)), time.time()
        total = 0

        def fitting() -> Iterator[tuple[bytes, Namespace, Prefix]]:
            nonlocal total
            for ns_id, namespace, forest in self.forests(select):
                with PAUSE:
                    for prefix in forest.prefixes():
                        if _fits(prefix, select, tiers, now):
                            total += 1
                            yield ns_id, namespace, prefix

        if select.limit:
            first = heapq.nlargest(offset + select.limit, fitting(), key=lambda item: rank(item[2], item[1]))
        else:
            first = sorted(fitting(), key=lambda item: -rank(item[2], item[1]))
        return {"total": total, "prefixes": [_row(p, i, n) for i, n, p in first[offset:]]}

    def fitting(self, forest: Forest, select: Select) -> list[Prefix]:
        """Return the prefixes of a forest that fit, those that were used last first."""
        tiers, now = set(self.tier_names(select)), time.time()
        return sorted((p for p in forest.prefixes() if _fits(p, select, tiers, now)), key=lambda p: -p.last_used)

    def show(self, select: Select) -> dict[str, Any]:
        """Return one stored prefix, chunk by chunk.

        Raises:
            RefusedError, NotFoundError: not one prefix is meant.
        """
        ns_id, namespace, chain = self.chain(select)
        leaf = chain[-1]
        return {
            "id": leaf.key.hex()[:ID_DIGITS],
            "key": leaf.key.hex(),
            "namespace": ns_id.hex(),
            "model": namespace.model,
            "chunk_tokens": namespace.layout.chunk_tokens,
            "payload_nbytes": namespace.payload_nbytes,
            "tenant": leaf.tenant.hex() if leaf.tenant.strip(b"\0") else "",
            "depth_chunks": leaf.position + 1,
            "num_stored": len(chain),
            "nbytes": sum_by_tier(chain),
            "chunks": [_chunk(node) for node in chain],
        }

    def tree(self, select: Select) -> dict[str, Any]:
        """Return the stored prefixes as trees of runs: those of the namespaces meant, or what is at and below one.

        Raises:
            RefusedError: the order is unknown, or several chunks are meant.
            NotFoundError: ``select.prefix`` is not stored.
        """
        sort = select.sort or "nbytes"
        if sort not in TREE_SORTS:
            raise RefusedError(f"sort {sort!r} is unknown; sort a tree by one of " + ", ".join(TREE_SORTS))
        rows = []
        for ns_id, namespace, forest in self.forests(select):
            if select.prefix:
                key = forest.resolve(select.prefix)
                if key is None:
                    continue
                forest = forest.part(key)
            roots, num_hidden = make_tree(forest, sort, select.limit or _TREE_LIMIT)
            about = {"id": ns_id.hex(), "model": namespace.model, "chunk_tokens": namespace.layout.chunk_tokens}
            counts = {"nbytes": sum_by_tier(forest.nodes.values()), "num_chunks": len(forest.nodes)}
            rows.append(about | counts | {"num_hidden": num_hidden, "roots": roots})
        if select.prefix and not rows:
            raise NotFoundError(f"nothing stored fits the id {select.prefix!r}; 'tierkv ls' lists what is stored")
        return {"namespaces": sorted(rows, key=lambda row: -sum(row["nbytes"].values()))}

    def du(self, select: Select) -> dict[str, Any]:
        """Return chunks and bytes by tier, summed up by namespace, tenant, depth in the prompt, or age.

        Depths are spans of chunks that double: 0, 1, 2 to 3, 4 to 7, and so on. Ages are times since the last use.

        Raises:
            RefusedError: ``select.by`` is unknown.
        """
        by = select.by or "namespace"
        if by not in DU_KEYS:
            raise RefusedError(f"by {by!r} is unknown; sum up by one of " + ", ".join(DU_KEYS))
        tiers = self.tier_names(select)
        sums: dict[tuple[bytes, bytes, int], _Sum] = {}
        spaces = self.chosen(select)
        now = time.time()
        for ns_id in spaces:
            if by == "namespace":
                sums[ns_id, b"", 0] = _Sum()
            for node in self.forest(ns_id).nodes.values():
                if not select.tenant or node.tenant.hex().startswith(select.tenant):
                    tenant = node.tenant if by == "tenant" else b""
                    span = _span(node, by, now)
                    sums.setdefault((ns_id, tenant, span), _Sum()).add(node, tiers)
        total = _Sum()
        rows = []
        for (ns_id, tenant, span), each in sums.items():
            total.merge(each)
            row: dict[str, Any] = {"namespace": ns_id.hex(), "model": spaces[ns_id].model} | each.describe()
            if by == "tenant":
                row["tenant"] = tenant.hex() if tenant.strip(b"\0") else ""
            if by == "depth":
                chunk_tokens = spaces[ns_id].layout.chunk_tokens
                row["from_token"] = ((1 << span) >> 1) * chunk_tokens
                row["to_token"] = (1 << span) * chunk_tokens
            if by == "age":
                row["from_s"] = AGES_S[span - 1] if span else 0
                row["to_s"] = AGES_S[span] if span < len(AGES_S) else None
            rows.append(row)
        if by == "depth":
            rows.sort(key=lambda row: (row["namespace"], row["from_token"]))
        elif by == "age":
            rows.sort(key=lambda row: (row["namespace"], row["from_s"]))
        else:
            rows.sort(key=lambda row: (-sum(row["nbytes"].values()), row["namespace"]))
        return {"by": by, "total": total.describe(), "num_rows": len(rows), "rows": rows[: select.limit or None]}

    # -- prompts

    def locate(self, select: Select) -> list[dict[str, Any]]:
        """Return for each chunk of the prompt ``select.keys``, in each namespace, the tiers that have it."""
        rows = []
        namespaces = self.namespaces()
        for ns_hex, hex_keys in select.keys.items():
            namespace = namespaces.get(bytes.fromhex(ns_hex))
            if namespace is None:
                continue
            keys = [bytes.fromhex(k) for k in hex_keys]
            chunks = self._locate(bytes.fromhex(ns_hex), keys)
            run = next((i for i, tiers in enumerate(chunks) if not tiers), len(chunks))
            rows.append(
                {
                    "namespace": ns_hex,
                    "model": namespace.model,
                    "chunk_tokens": namespace.layout.chunk_tokens,
                    "num_chunks": len(keys),
                    "num_stored": run,
                    "tokens_stored": run * namespace.layout.chunk_tokens,
                    "chunks": [
                        {"id": key.hex()[:ID_DIGITS], "tiers": tiers} for key, tiers in zip(keys, chunks, strict=True)
                    ],
                }
            )
        return rows

    def _locate(self, ns_id: bytes, keys: Sequence[bytes]) -> list[list[str]]:
        refs = make_refs(keys, 0, b"")
        where: list[list[str]] = [[] for _ in keys]
        for _, answer in self.ask_engines("has", b"".join(keys), ns_id):
            for i, there in enumerate(answer):
                if there and HOST not in where[i]:
                    where[i].append(HOST)
        for tier in self._stores.tiers():
            for i, there in enumerate(tier.match(ns_id, refs)):
                if there:
                    where[i].append(tier.name)
        return where


def _span(node: Node, by: str, now: float) -> int:
    """Return which of a namespace's rows a chunk belongs to."""
    if by == "depth":
        return node.position.bit_length()
    return bisect.bisect_right(AGES_S, now - node.last_used) if by == "age" else 0


class _Sum:
    """Chunks and bytes by tier, and chunks whatever their tier."""

    def __init__(self) -> None:
        self.num = 0
        self.chunks: dict[str, int] = {}
        self.nbytes: dict[str, int] = {}

    def add(self, node: Node, tiers: Sequence[str]) -> None:
        here = False
        for tier in tiers:
            if (nbytes := node.nbytes.get(tier)) is not None:
                here = True
                self.chunks[tier] = self.chunks.get(tier, 0) + node.num_copies[tier]
                self.nbytes[tier] = self.nbytes.get(tier, 0) + nbytes
        self.num += here

    def merge(self, other: _Sum) -> None:
        self.num += other.num
        for mine, theirs in ((self.chunks, other.chunks), (self.nbytes, other.nbytes)):
            for tier, value in theirs.items():
                mine[tier] = mine.get(tier, 0) + value

    def describe(self) -> dict[str, Any]:
        return {"num_chunks": self.num, "chunks": self.chunks, "nbytes": self.nbytes}


def _fits(prefix: Prefix, select: Select, tiers: set[str], now: float) -> bool:
    leaf = prefix.leaf
    if select.prefix and not leaf.key.hex().startswith(select.prefix):
        return False
    if select.tenant and not leaf.tenant.hex().startswith(select.tenant):
        return False
    if tiers.isdisjoint(prefix.nbytes) or select.pinned not in (None, bool(leaf.pins)):
        return False
    if select.min_nbytes or select.max_nbytes:
        nbytes = sum(prefix.nbytes.values())
        if nbytes < select.min_nbytes or (select.max_nbytes and nbytes > select.max_nbytes):
            return False
    if select.older_s or select.newer_s or select.unused_s or select.used_s:
        return select.ages(now, prefix.created, prefix.last_used)
    return True


def _row(prefix: Prefix, ns_id: bytes, namespace: Namespace) -> dict[str, Any]:
    """Return the row of one prefix. Hits and last use are those of its own part: a neighbour's hit is not its hit."""
    leaf, layout = prefix.leaf, namespace.layout
    return {
        "id": leaf.key.hex()[:ID_DIGITS],
        "key": leaf.key.hex(),
        "namespace": ns_id.hex(),
        "model": namespace.model,
        "depth_chunks": leaf.position + 1,
        "depth_blocks": (leaf.position + 1) * layout.blocks_per_chunk,
        "tokens": _num_tokens(leaf, namespace),
        "num_stored": prefix.num_stored,
        "branch": prefix.branch.key.hex()[:ID_DIGITS] if prefix.branch else "",
        "nbytes": prefix.nbytes,
        "tiers": [tier for tier in TIER_NAMES if tier in prefix.nbytes],
        "tenant": leaf.tenant.hex() if leaf.tenant.strip(b"\0") else "",
        "created": prefix.created,
        "expires": max(leaf.expires.values(), default=0.0) if all(leaf.expires.values()) else 0.0,
        "pins": _pins(leaf),
        "hits": prefix.hits,
        "last_used": prefix.last_used,
    }


def _num_tokens(leaf: Node, namespace: Namespace) -> int:
    """Return the tokens from the start of the prompt to the end of its last chunk."""
    return leaf.position * namespace.layout.chunk_tokens + leaf.num_tokens


def _chunk(node: Node) -> dict[str, Any]:
    return {
        "id": node.key.hex()[:ID_DIGITS],
        "key": node.key.hex(),
        "parent": node.parent.hex(),
        "anchor": node.anchor.hex(),
        "position": node.position,
        "tokens": node.num_tokens,
        "tiers": [tier for tier in TIER_NAMES if tier in node.nbytes],
        "nbytes": node.nbytes,
        "copies": node.num_copies,
        "hits": node.num_hits,
        "created": node.created,
        "last_used": node.last_used,
        "expires": node.expires,
        "pins": _pins(node),
        "num_children": len(node.children),
    }


def _pins(node: Node) -> list[dict[str, Any]]:
    return [{"owner": owner, "until": until} for owner, until in sorted(node.pins.items())]
