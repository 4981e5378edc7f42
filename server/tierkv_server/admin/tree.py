"""The stored prefixes of a namespace as a tree of runs, cut to what a page can show. Pure.

A *run* is a chain of chunks without a branch in between: the system prompt that all share is one, each conversation
below it another. A run is named by its last chunk, and evicting that id removes the run and what is below it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from typing import Any

from tierkv.prefixes import ID_DIGITS, Forest, Node, sum_by_tier

#: Runs below this depth are left out: JSON is nested as deep as the tree, and its readers have stacks.
MAX_DEPTH = 100


class _Run:
    """A run with the sums over itself and all below it."""

    def __init__(self, nodes: list[Node], depth: int) -> None:
        self.nodes = nodes
        self.depth = depth
        self.own = Counter(sum_by_tier(nodes))
        self.nbytes = Counter(self.own)
        self.hits = self._own_hits = max(n.num_hits for n in nodes)
        self._hits_below = 0
        self.last_used = max(n.last_used for n in nodes)
        self.num_prefixes = 0 if nodes[-1].children else 1
        self.children: list[_Run] = []
        self.shown = False

    def add(self, child: _Run) -> None:
        self.children.append(child)
        self.nbytes.update(child.nbytes)
        self._hits_below += child.hits
        self.hits = max(self._own_hits, self._hits_below)
        self.last_used = max(self.last_used, child.last_used)
        self.num_prefixes += child.num_prefixes

    def rank(self, sort: str) -> float:
        return float(self.nbytes.total() if sort == "nbytes" else getattr(self, sort))

    def describe(self, sort: str) -> dict[str, Any]:
        """Return the run as :class:`tierkv_server.admin.schema.TreeNode` has it, with the children that are shown."""
        pins: dict[str, float] = {}
        for node in self.nodes:
            for owner, until in node.pins.items():
                pins[owner] = max(until, pins.get(owner, 0.0))
        shown = [child for child in self.children if child.shown]
        return {
            "id": self.nodes[-1].key.hex()[:ID_DIGITS],
            "start": self.nodes[0].position,
            "num_chunks": len(self.nodes),
            "num_tokens": sum(n.num_tokens for n in self.nodes),
            "own_nbytes": dict(self.own),
            "nbytes": dict(self.nbytes),
            "hits": self.hits,
            "last_used": self.last_used,
            "num_prefixes": self.num_prefixes,
            "pins": [{"owner": owner, "until": until} for owner, until in sorted(pins.items())],
            "num_hidden": len(self.children) - len(shown),
            "children": sorted(shown, key=lambda r: -r.rank(sort)),
        }


def make_tree(forest: Forest, sort: str, limit: int) -> tuple[list[dict[str, Any]], int]:
    """Return the ``limit`` leading runs as trees, and how many runs at the top are left out.

    A run is shown only below its parent; the leading ones are found from the top down, as a child never leads its
    parent: what is sorted by is summed (or the latest) over all below.

    Args:
        forest: linked.
        sort: ``"nbytes"``, ``"hits"`` or ``"last_used"``.
        limit: runs to show.
    """
    roots = _runs(forest)
    queue = [(-run.rank(sort), i, run) for i, run in enumerate(roots)]
    heapq.heapify(queue)
    num = len(queue)
    while queue and limit > 0:
        _, _, run = heapq.heappop(queue)
        run.shown, limit = True, limit - 1
        for child in run.children if run.depth < MAX_DEPTH else ():
            heapq.heappush(queue, (-child.rank(sort), num, child))
            num += 1
    shown = sorted((run for run in roots if run.shown), key=lambda r: -r.rank(sort))
    return _describe(shown, sort), len(roots) - len(shown)


def _describe(runs: list[_Run], sort: str) -> list[dict[str, Any]]:
    """Describe runs and all shown below them."""
    top = [run.describe(sort) for run in runs]
    todo = list(top)
    while todo:
        row = todo.pop()
        row["children"] = [child.describe(sort) for child in row["children"]]
        todo += row["children"]
    return top


def _runs(forest: Forest) -> list[_Run]:
    """Return the runs that begin a chain, with all below them summed up."""
    top: list[_Run] = []
    order: list[tuple[_Run | None, _Run]] = []
    todo: list[tuple[_Run | None, Node]] = [(None, n) for n in forest.nodes.values() if forest.parent(n) is None]
    while todo:
        above, node = todo.pop()
        nodes = [node]
        while len(node.children) == 1:
            node = forest.nodes[node.children[0]]
            nodes.append(node)
        run = _Run(nodes, above.depth + 1 if above else 1)
        order.append((above, run))
        todo += [(run, forest.nodes[key]) for key in node.children]
    for above, run in reversed(order):  # children come after their parents: sums are complete when they are added
        if above is None:
            top.append(run)
        else:
            above.add(run)
    return top
