"""What a policy knows of chunks: runs of chunks with one past, in cohorts of one age, in cells of one worth.

A :class:`Segment` never moves while it ages: its :class:`Cohort` does, so that age costs little where much is used at
once.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from math import sqrt
from typing import Generic

from tierkv.policy.base import K
from tierkv.policy.kinds import Kind
from tierkv.policy.returns import NUM_STAGES


class Segment(Generic[K]):
    """A run of chunks of one chain with one past: each but the first is the child of the one before.

    Attributes:
        keys: the chunks, ancestors first: the first ``num_stored`` are stored, the others are ghosts.
        parent: the key that the first one is a child of; None as long as nobody said.
        cohort: the segments of its kind that were last used at about the same time.
        weight: what it counts for in its cohort.
        time: seconds at the last use.
        turn: which turn of its conversation used it last.
        uses: by how many requests it was used; more than ``turn`` where it is not a conversation's own.
        gap: smoothed seconds between its uses.
        is_end: its last key ended a request.
        is_listed: it waits to be evicted: its last stored chunk has no stored child.
    """

    __slots__ = (
        "_offsets",
        "cohort",
        "gap",
        "is_end",
        "is_listed",
        "keys",
        "num_stored",
        "parent",
        "time",
        "turn",
        "uses",
        "weight",
    )

    def __init__(self, cohort: Cohort[K], time: float, keys: list[K], parent: K | None) -> None:
        self.keys = keys
        self.parent = parent
        self.num_stored = 0
        self.cohort = cohort
        self.weight = 0.0
        self.time = time
        self.turn = 1
        self.uses = 0
        self.gap = 0.0
        self.is_end = False
        self.is_listed = False
        self._offsets: dict[K, int] | None = None

    def offset(self, key: K) -> int:
        """Return where a key is. A table is made for it, as rarely as the keys change."""
        if self._offsets is None or len(self._offsets) != len(self.keys):
            self._offsets = {k: i for i, k in enumerate(self.keys)}
        return self._offsets[key]

    def take_head(self, num: int) -> Segment[K]:
        """Return a segment of the first ``num`` keys, with the same past; the others stay here."""
        keys = self.keys
        head = Segment(self.cohort, self.time, keys[:num], self.parent)
        head.turn, head.uses, head.gap = self.turn, self.uses, self.gap
        head.num_stored = min(num, self.num_stored)
        self.parent = keys[num - 1]
        self.num_stored -= head.num_stored
        del keys[:num]
        self._offsets = None
        return head

    def drop_ghosts(self) -> list[K]:
        """Forget the keys that are not stored, and return them."""
        ghosts = self.keys[self.num_stored :]
        del self.keys[self.num_stored :]
        self.is_end = False
        self._offsets = None
        return ghosts


class Cohort(Generic[K]):
    """The segments of one kind that were last used at about the same time.

    Attributes:
        time: seconds, at which their age is taken to begin.
        stage: of their age, as far as it has been noticed.
        num_members: how many they are.
        weight: what they count for in the life table of their kind.
        listed: those that wait to be evicted, the longest unused first.
    """

    __slots__ = ("kind", "listed", "num_members", "stage", "time", "weight")

    def __init__(self, kind: Kind, time: float) -> None:
        self.kind = kind
        self.time = time
        self.stage = 0
        self.num_members = 0
        self.weight = 0.0
        self.listed: OrderedDict[Segment[K], None] = OrderedDict()

    @property
    def worth(self) -> float:
        return self.kind.worths[self.stage]

    def enter(self, segment: Segment[K]) -> None:
        """Take a segment in."""
        segment.cohort = self
        segment.weight = weight = sqrt(len(segment.keys))
        self.num_members += 1
        self.weight += weight

    def leave(self, segment: Segment[K]) -> None:
        """Let a member go."""
        self.num_members -= 1
        self.weight = self.weight - segment.weight if self.num_members else 0.0


class Cell(Generic[K]):
    """The cohorts of one kind and stage with something to evict, the longest unused first."""

    __slots__ = ("cohorts", "is_queued", "number", "worth")

    def __init__(self, number: int, worth: float) -> None:
        self.number = number
        self.worth = worth
        self.cohorts: OrderedDict[Cohort[K], None] = OrderedDict()
        self.is_queued = False  # the heap has an item of it


class Cells(Generic[K]):
    """All cells, and which segment is to lose a chunk next.

    A segment is listed as long as it has a stored chunk and the last of these is no stored segment's parent; those that
    are listed and do have a child are taken out when they come up.

    Attributes:
        num_children: of a key: the stored segments whose first key is its child.
        found: what :meth:`lowest` returned, as long as that has not changed.
        bar: what that one was worth.
    """

    def __init__(self) -> None:
        self.num_children: dict[K, int] = {}
        self._cells: dict[int, Cell[K]] = {}
        self._heap: list[tuple[float, int, Cell[K]]] = []  # the least worthy first
        self.found: Segment[K] | None = None
        self.bar = 0.0

    def enlist(self, segment: Segment[K], first: bool = False) -> None:
        """Let a segment wait among those of its cohort: as the last of them, or the first."""
        cohort = segment.cohort
        segment.is_listed = True
        listed = cohort.listed
        listed[segment] = None
        if len(listed) == 1:
            self._put(cohort)
        if first:
            listed.move_to_end(segment, last=False)
            self._cells[cohort.kind.number * NUM_STAGES + cohort.stage].cohorts.move_to_end(cohort, last=False)
            self.found = None

    def _put(self, cohort: Cohort[K]) -> None:
        number = cohort.kind.number * NUM_STAGES + cohort.stage
        cell = self._cells.get(number)
        if cell is None:
            cell = self._cells[number] = Cell(number, cohort.worth)
        cell.cohorts[cohort] = None
        if not cell.is_queued:
            cell.is_queued = True
            heapq.heappush(self._heap, (cell.worth, number, cell))
        if cell.worth <= self.bar:
            self.found = None

    def delist(self, segment: Segment[K]) -> None:
        """Take a segment out."""
        if segment is self.found:
            self.found = None
        cohort = segment.cohort
        del cohort.listed[segment]
        segment.is_listed = False
        if not cohort.listed:
            del self._cells[cohort.kind.number * NUM_STAGES + cohort.stage].cohorts[cohort]

    def grow_older(self, cohort: Cohort[K]) -> None:
        """Let a cohort come into its next stage."""
        if cohort.listed:
            self.found = None
            del self._cells[cohort.kind.number * NUM_STAGES + cohort.stage].cohorts[cohort]
        cohort.stage += 1
        if cohort.listed:
            self._put(cohort)

    def is_last(self, segment: Segment[K]) -> bool:
        """Return whether a segment is listed, and the last to go of its cell."""
        cohort = segment.cohort
        if not segment.is_listed or next(reversed(cohort.listed)) is not segment:
            return False
        cell = self._cells[cohort.kind.number * NUM_STAGES + cohort.stage]
        return next(reversed(cell.cohorts)) is cohort

    def lowest(self) -> Segment[K] | None:
        """Return the segment that is to lose its last stored chunk next."""
        if self.found is not None:
            return self.found
        heap, num_children = self._heap, self.num_children
        while heap:
            cell = heap[0][2]
            while cell.cohorts:
                segment = next(iter(next(iter(cell.cohorts)).listed))
                if segment.keys[segment.num_stored - 1] not in num_children:
                    self.found, self.bar = segment, cell.worth
                    return segment
                self.delist(segment)  # until its last stored chunk has no child any more
            heapq.heappop(heap)
            cell.is_queued = False
        return None

    def reprice(self, worths: Sequence[Sequence[float]]) -> None:
        """Order the cells by what their kinds are worth now: ``worths[kind][stage]``."""
        self.found = None
        self._heap = []
        for cell in self._cells.values():
            kind, stage = divmod(cell.number, NUM_STAGES)
            cell.worth = worths[kind][stage]
            cell.is_queued = bool(cell.cohorts)
            if cell.is_queued:
                self._heap.append((cell.worth, cell.number, cell))
        heapq.heapify(self._heap)

    @property
    def num_queued(self) -> int:
        """Items of the heap."""
        return len(self._heap)
