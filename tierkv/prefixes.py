"""Stored prefixes: the chunks of a namespace over all tiers, as a forest of chains.

Pure. A *prefix* is named by its last chunk: the first 12 hex digits of that chunk's key. A prefix's *own part* is what
no other stored prefix shares: from its last chunk up to, not including, the first chunk with another child. Evicting a
prefix evicts its own part and everything that continues it, so that its neighbours still hit.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tierkv.errors import RefusedError
from tierkv.tiers.base import EntryInfo

ID_DIGITS = 12
#: Most nodes have no child or no pin: they share these, which nobody changes.
_NO_KEYS: list[bytes] = []
_NO_PINS: dict[str, float] = {}


class Node:
    """A stored chunk: where it is and what is known of it.

    ``nbytes`` maps a tier to the bytes it costs there, ``num_copies`` to the copies there: each engine has a pool.
    ``pins`` and ``expires`` are the longest over the tiers; ``tenant`` is empty where it is not known.
    """

    __slots__ = (
        "anchor",
        "children",
        "created",
        "expires",
        "key",
        "last_used",
        "nbytes",
        "num_copies",
        "num_hits",
        "num_tokens",
        "parent",
        "pins",
        "position",
        "tenant",
    )

    def __init__(self, key: bytes, parent: bytes, position: int, num_tokens: int) -> None:
        self.key = key
        self.parent = parent
        self.position = position
        self.num_tokens = num_tokens
        self.nbytes: dict[str, int] = {}
        self.num_copies: dict[str, int] = {}
        self.children: list[bytes] = _NO_KEYS
        self.num_hits = 0
        self.last_used = 0.0
        self.created = 0.0
        self.expires: dict[str, float] = {}
        self.pins: dict[str, float] = _NO_PINS
        self.tenant = b""
        self.anchor = b""


class Prefix(NamedTuple):
    """A stored prefix.

    Attributes:
        leaf: its last chunk.
        own: the chunks that no other prefix shares, ancestors first.
        num_stored: chunks of its chain that are stored.
        nbytes: bytes of its whole chain by tier.
        branch: the last chunk that it shares with another prefix; None where it shares none.
    """

    leaf: Node
    own: list[Node]
    num_stored: int
    nbytes: dict[str, int]
    branch: Node | None

    @property
    def last_used(self) -> float:
        """When its own part was used last."""
        return max([node.last_used for node in self.own])

    @property
    def created(self) -> float:
        """When the first chunk of its own part was stored; 0 where no tier knows."""
        return min((node.created for node in self.own if node.created), default=0.0)

    @property
    def hits(self) -> int:
        """Hits of its own part: of its most used chunk."""
        return max([node.num_hits for node in self.own])


class Forest:
    """The stored chunks of one namespace."""

    def __init__(self) -> None:
        self.nodes: dict[bytes, Node] = {}
        self._roots: list[Node] = []  # chunks whose parent is not stored

    def add(
        self,
        tier: str,
        key: bytes,
        parent: bytes,
        position: int,
        num_tokens: int,
        nbytes: int,
        num_hits: int = 0,
        last_used: float = 0.0,
    ) -> None:
        """Note that ``key`` is stored in ``tier``. Hits add up over tiers, the last use is the latest."""
        node = self.nodes.get(key)
        if node is None:
            node = self.nodes[key] = Node(key, parent, position, num_tokens)
        node.nbytes[tier] = node.nbytes.get(tier, 0) + nbytes
        node.num_copies[tier] = node.num_copies.get(tier, 0) + 1
        node.num_hits += num_hits
        node.last_used = max(node.last_used, last_used)

    def add_entry(self, tier: str, entry: EntryInfo) -> None:
        """Note that ``tier`` has ``entry``."""
        e = entry
        node = self.nodes.get(e.key)
        if node is None:  # a large store's listing consists of this
            node = self.nodes[e.key] = Node(e.key, e.parent, e.position, e.num_tokens)
            node.nbytes[tier], node.num_copies[tier] = e.nbytes, 1
            node.num_hits, node.last_used, node.created = e.num_hits, e.last_used, e.created
        else:
            self.add(tier, e.key, e.parent, e.position, e.num_tokens, e.nbytes, e.num_hits, e.last_used)
            node.created = min(node.created, e.created) if node.created else e.created
        node.expires[tier] = e.expires
        node.tenant, node.anchor = e.tenant, e.anchor
        if e.pins:
            node.pins = dict(node.pins)
            for pin in e.pins:
                node.pins[pin.owner] = max(node.pins.get(pin.owner, 0.0), pin.until)

    def prefixes(self) -> Iterator[Prefix]:
        """Yield every stored prefix, in time that grows with the chunks, not with the lengths of the chains."""
        todo: list[tuple[Node, int, dict[str, int], Node | None]] = [(node, 0, {}, None) for node in self._roots]
        while todo:
            node, num, above, branch = todo.pop()
            own = [node]
            while len(node.children) == 1:
                node = self.nodes[node.children[0]]
                own.append(node)
            nbytes = sum_by_tier(own, above) if above or len(own) > 1 else node.nbytes
            num += len(own)
            if node.children:
                todo += [(self.nodes[key], num, nbytes, node) for key in node.children]
            else:
                yield Prefix(node, own, num, nbytes, branch)

    def part(self, key: bytes) -> Forest:
        """Return the forest of ``key``'s run and all that continues it; the chunks are this forest's."""
        part = Forest()
        part.nodes = {k: self.nodes[k] for k in self.own_part(key)}
        part._roots = list(part.nodes.values())[:1]
        return part

    def closed(self, nodes: Iterable[Node]) -> list[Node]:
        """Return those of ``nodes`` whose stored descendants are all among them too, parents first.

        Removing them leaves no chunk without its ancestors.
        """
        order = sorted(nodes, key=lambda node: node.position)
        keys = {node.key for node in order}
        for node in reversed(order):
            if not keys.issuperset(node.children):
                keys.discard(node.key)
        return [node for node in order if node.key in keys]

    def link(self) -> None:
        """Connect chunks with their parents; call once after the last :meth:`add`."""
        for node in self.nodes.values():
            if (parent := self.parent(node)) is None:
                self._roots.append(node)
            elif parent.children is _NO_KEYS:
                parent.children = [node.key]
            else:
                parent.children.append(node.key)

    def parent(self, node: Node) -> Node | None:
        """Return the stored chunk before ``node``, or None. A damaged entry cannot make a cycle: positions fall."""
        parent = self.nodes.get(node.parent)
        return parent if parent is not None and parent.position < node.position else None

    def leaves(self) -> list[Node]:
        """Return the last chunks of the stored prefixes: those without a stored child."""
        return [node for node in self.nodes.values() if not node.children]

    def chain(self, key: bytes) -> list[Node]:
        """Return the stored chunks from the first stored ancestor to ``key``, in order."""
        chain: list[Node] = []
        node = self.nodes.get(key)
        while node is not None:
            chain.append(node)
            node = self.parent(node)
        return chain[::-1]

    def resolve(self, prefix: str) -> bytes | None:
        """Return the key whose hex starts with ``prefix``, or None.

        Raises:
            RefusedError: several do.
        """
        found = [key for key in self.nodes if key.hex().startswith(prefix)]
        if len(found) > 1:
            raise RefusedError(f"{len(found)} stored chunks start with {prefix!r}; write more digits of the id")
        return found[0] if found else None

    def own_part(self, key: bytes) -> list[bytes]:
        """Return the keys to evict for the prefix that ends at ``key``: its own part and all that continues it."""
        top = self.nodes[key]
        while (parent := self.parent(top)) is not None and len(parent.children) == 1:
            top = parent
        return self.below(top.key)

    def below(self, key: bytes) -> list[bytes]:
        """Return ``key`` and its stored descendants, parents first."""
        found, todo = [], [key]
        while todo:
            node = self.nodes[todo.pop()]
            found.append(node.key)
            todo += node.children
        return found

    def prompt_part(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the keys to evict for a prompt whose chunks have ``keys``: none where all that is stored is shared.

        A prompt that is stored up to a chunk where others go on has no own part: removing that chunk's would remove
        theirs. One that ends there, whole, is the prefix of all of them and goes with them.
        """
        last = next((key for key in reversed(keys) if key in self.nodes), None)
        if last is None or (self.nodes[last].children and last != keys[-1]):
            return []
        return self.own_part(last)


def least_used(
    forests: Mapping[bytes, Forest], tiers: Sequence[str], nbytes: int, may_go: Callable[[bytes, Node], bool]
) -> dict[bytes, list[Node]]:
    """Return the chunks to evict from ``tiers`` to free ``nbytes`` bytes there, by namespace, parents first.

    Least recently used leaves first; a chunk becomes a leaf when all that continues it is to go. What ``may_go`` says
    no to stays, with its ancestors. Chunks that are in none of the tiers are passed over. All that may go, where that
    is less than ``nbytes``.
    """
    doomed: dict[bytes, list[Node]] = {}
    left = {(ns, key): len(node.children) for ns, forest in forests.items() for key, node in forest.nodes.items()}
    leaves = [
        (node.last_used, -node.position, key, ns)
        for ns, forest in forests.items()
        for key, node in forest.nodes.items()
        if not node.children and may_go(ns, node)
    ]
    heapq.heapify(leaves)
    while leaves and nbytes > 0:
        _, _, key, ns = heapq.heappop(leaves)
        node = forests[ns].nodes[key]
        if here := sum(node.nbytes.get(tier, 0) for tier in tiers):
            doomed.setdefault(ns, []).append(node)
            nbytes -= here
        parent = forests[ns].parent(node)
        if parent is not None:
            left[ns, parent.key] -= 1
            if not left[ns, parent.key] and may_go(ns, parent):
                heapq.heappush(leaves, (parent.last_used, -parent.position, parent.key, ns))
    return {ns: nodes[::-1] for ns, nodes in doomed.items()}


def sum_by_tier(nodes: Iterable[Node], start: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return the bytes of ``nodes`` by tier, added to those of ``start``."""
    total: dict[str, int] = dict(start or {})
    for node in nodes:
        for tier, nbytes in node.nbytes.items():
            total[tier] = total.get(tier, 0) + nbytes
    return total
