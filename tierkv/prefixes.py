"""Stored prefixes: the chunks of a namespace over all tiers, as a forest of chains.

Pure. A *prefix* is named by its last chunk: the first 12 hex digits of that chunk's key. A prefix's *own part* is what
no other stored prefix shares: from its last chunk up to, not including, the first chunk with another child. Evicting a
prefix evicts its own part and everything that continues it, so that its neighbours still hit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tierkv.errors import RefusedError

ID_DIGITS = 12


class Node:
    """A stored chunk: where it is and what is known of it.

    ``nbytes`` maps a tier to the bytes it costs there, ``num_copies`` to the copies there: each engine has a pool.
    """

    __slots__ = (
        "children",
        "key",
        "last_used",
        "nbytes",
        "num_copies",
        "num_hits",
        "num_tokens",
        "parent",
        "position",
    )

    def __init__(self, key: bytes, parent: bytes, position: int, num_tokens: int) -> None:
        self.key = key
        self.parent = parent
        self.position = position
        self.num_tokens = num_tokens
        self.nbytes: dict[str, int] = {}
        self.num_copies: dict[str, int] = {}
        self.children: list[bytes] = []
        self.num_hits = 0
        self.last_used = 0.0


class Forest:
    """The stored chunks of one namespace."""

    def __init__(self) -> None:
        self.nodes: dict[bytes, Node] = {}

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

    def link(self) -> None:
        """Connect chunks with their parents; call once after the last :meth:`add`."""
        for node in self.nodes.values():
            if (parent := self.parent(node)) is not None:
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


def sum_by_tier(nodes: Iterable[Node]) -> dict[str, int]:
    """Return the bytes of ``nodes`` by tier."""
    total: dict[str, int] = {}
    for node in nodes:
        for tier, nbytes in node.nbytes.items():
            total[tier] = total.get(tier, 0) + nbytes
    return total
