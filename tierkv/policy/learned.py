"""Our own policy: what to keep follows from how soon chunks of its kind came back.

Theory of operation. A request's chain is cut into *segments*, runs of chunks with one past: a prefix that many requests
share, the body of a conversation, what the last turn added. Chunks of a segment are asked for together, so age and
statistics are the segment's, and a chunk costs a dictionary entry. A segment is of a :class:`Kind` (for a conversation:
its turn, growth and pace; for a shared prefix: its number of uses and their pace; for a hinted session: what was
promised), and a kind has a worth at each age, learned from all requests, whatever this tier holds: what is not stored
is remembered for a while (*ghosts*).

*Eviction* takes the last chunk of the least worthy segment whose last chunk has no stored child, so a prefix stays
while anything stored hangs from it. Segments wait in *cells*, one for each kind and octave of age, and cells in a heap
by worth: finding a victim costs the logarithm of the number of cells, which is bounded, not of the number of chunks.

*Admission* compares what is offered with what would have to go, which is all that tells scarce memory from plenty: a
write has to pay, so the newcomer must be worth ``_MARGIN`` times as much, and likely enough to be used at all.

Memory, measured at 23 chunks a segment: a stored chunk 113 bytes beside its key, which the caller's index holds anyway;
a ghost 64 and its key (65 for 32 bytes). Up to twice that just after a table has grown; a segment's own share is about
600 bytes, so lone chunks cost more. Ghosts are at most as many as stored chunks, or 65,536.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Generic

from tierkv.policy.base import MAX_PRIORITY, Hint, K
from tierkv.policy.kinds import Experience, Kind, body_name
from tierkv.policy.returns import ENDS, LAST_OCTAVE, NUM_OCTAVES, digits

MIN_GHOSTS = 1 << 16
MAX_SESSIONS = 1 << 14
#: A newcomer must be worth this much more than what goes for it, and as likely as this to be asked for while it stays.
_MARGIN = 1.4
_MIN_YIELD = 0.15
#: Conclusions are drawn after every eighth of the requests so far, at most this many.
_MAX_LESSON = 256
_MIN_YOUNG = 1024


class Segment(Generic[K]):
    """A run of chunks of one chain with one past.

    Attributes:
        keys: the chunks, ancestors first, stored or ghosts.
        top: no key from here on is stored.
        num_stored: how many of the keys are stored.
        time: seconds at the last use.
        octave: of the age since then, as far as it has been noticed.
        turn: which turn of its conversation used it last.
        uses: by how many requests it was used; more than ``turn`` where it is not a conversation's own.
        gap: smoothed seconds between its uses.
        is_end: its last key ended a request.
        cell: where it waits to be evicted, if it ends in a stored leaf.
    """

    __slots__ = ("cell", "gap", "is_end", "keys", "kind", "num_stored", "octave", "time", "top", "turn", "uses")

    def __init__(self, kind: Kind, time: float) -> None:
        self.keys: list[K] = []
        self.kind = kind
        self.time = time
        self.top = 0
        self.num_stored = 0
        self.octave = 0
        self.turn = 1
        self.uses = 0
        self.gap = 0.0
        self.is_end = False
        self.cell: Cell[K] | None = None


class Cell(Generic[K]):
    """The segments of one kind and octave that end in a stored leaf, the longest unused first."""

    __slots__ = ("is_queued", "number", "segments", "worth")

    def __init__(self, number: int, worth: float) -> None:
        self.number = number
        self.worth = worth
        self.segments: OrderedDict[Segment[K], None] = OrderedDict()
        self.is_queued = False  # the heap has an item of it


Group = tuple["Segment[K] | None", int, int]  # segment, start and stop in a chain


class Learned(Generic[K]):
    """Least worthy first, leaves first, with admission by the same measure.

    >>> policy: Learned[bytes] = Learned()
    >>> policy.note([b"a", b"b"], 0.0)
    >>> policy.admit(b"a", 0.0, room=True)
    True
    >>> policy.add(b"a", b"")
    >>> policy.victim(lambda key: True)
    b'a'
    """

    def __init__(self) -> None:
        self._segments: dict[K, Segment[K]] = {}  # of every key that is known, stored or ghost
        self._parents: dict[K, K] = {}  # of the stored keys
        self._num_children: dict[K, int] = {}  # stored ones
        self._experience = Experience()
        self._unasked = self._experience.kind(None, ("unasked",))
        self._aging: tuple[deque[tuple[Segment[K], float]], ...] = tuple(deque() for _ in range(LAST_OCTAVE))
        self._ghosts: OrderedDict[Segment[K], None] = OrderedDict()  # segments with keys that are not stored
        self._cells: dict[int, Cell[K]] = {}
        self._heap: list[tuple[float, int, Cell[K]]] = []  # the least worthy first
        self._sessions: OrderedDict[tuple[Hashable, str], list[Segment[K]]] = OrderedDict()
        self._last_lowest: Segment[K] | None = None  # what _lowest returned, while nothing has changed since
        self._max_young = _MIN_YOUNG
        self._origin: float | None = None
        self._now = 0.0  # seconds since the first note
        self._num_notes = 0
        self._next_lesson = 16
        self._bar = 0.0  # the worth of the last victim since the last lesson; 0 while there is room

    # -- requests

    def note(self, chain: Sequence[K], now: float, *, hint: Hint | None = None, domain: Hashable = None) -> None:
        self._advance(now)
        groups = self._cut(chain)
        turn, pause, growth = self._turn(chain, groups)
        body: Segment[K] | None = None
        fresh: Segment[K] | None = None
        for segment, start, stop in groups:
            keys = chain[start:stop]
            if segment is None:
                fresh = self._append(fresh, keys)
                continue
            segment.kind.returns.left[segment.octave] += len(keys) ** 0.5
            is_shared = segment.uses >= turn
            if len(keys) < len(segment.keys):
                segment = self._split(segment, keys)
            if is_shared:
                self._share(segment, domain)
            else:
                body = segment if body is None else self._join(body, segment)
        pieces = []
        for segment, word, uses in ((body, "again", turn), (fresh, "fresh", 1)):
            if segment is not None:
                segment.uses, segment.turn, segment.gap, segment.is_end = uses, turn, pause, True
                name = body_name(word, turn, pause, growth, len(chain))
                self._renew(segment, self._hinted(domain, name, hint))
                pieces.append(segment)
        if hint is not None and hint.session and not hint.release:
            self._remember(hint.session, domain, pieces)
        self._forget_ghosts()
        self._num_notes += 1
        if self._num_notes >= self._next_lesson:
            self._learn()

    def touch(self, chain: Iterable[K]) -> None:
        keys = [key for key in chain if key in self._parents]
        for segment, start, stop in reversed(self._cut(keys)):  # a leaf is never used later than its ancestors
            if segment is not None and segment.kind is self._unasked:
                if stop - start < len(segment.keys):
                    segment = self._split(segment, keys[start:stop])
                self._renew(segment, self._unasked)

    def release(self, session: str, domain: Hashable = None) -> bool:
        pieces = self._sessions.pop((domain, session), None)
        if pieces is None:
            return False
        over = self._experience.kind(domain, ("over",))
        for segment in pieces:
            if segment.keys:
                self._renew(segment, over)
        return True

    def worth(self, key: K) -> float:
        segment = self._segments.get(key)
        return 0.0 if segment is None else segment.kind.worths[segment.octave]

    # -- what is stored

    def admit(self, key: K, now: float, *, room: bool, above: bool = False) -> bool:
        segment = self._segments.get(key)
        kind = self._unasked if segment is None else segment.kind
        if room:
            return kind.name[0] != "over"
        if above or kind.yield_ < _MIN_YIELD:
            return False
        lowest = self._lowest()
        if lowest is None:
            return True
        worth = kind.worths[0 if segment is None else segment.octave]
        assert lowest.cell is not None
        return worth > _MARGIN * lowest.cell.worth

    def add(self, key: K, parent: K) -> None:
        if key in self._parents:
            self.touch((key,))
            return
        segment = self._segments.get(key)
        if segment is None:
            segment = self._append_unasked(key, parent)
        self._last_lowest = None
        self._parents[key] = parent
        self._num_children[parent] = self._num_children.get(parent, 0) + 1
        keys, top = segment.keys, segment.top
        segment.num_stored += 1
        segment.top = top + 1 if top < len(keys) and keys[top] == key else len(keys)
        if segment.num_stored == len(keys):
            self._ghosts.pop(segment, None)
        if segment.cell is None:
            self._list(segment)

    def remove(self, key: K) -> None:
        parent = self._parents.pop(key, None)
        if parent is None:
            return
        self._last_lowest = None
        segment = self._segments[key]
        if segment.num_stored == len(segment.keys):
            self._ghosts[segment] = None
        segment.num_stored -= 1
        if not segment.num_stored and segment.cell is not None:
            self._unlist(segment)
        num_children = self._num_children
        if num_children[parent] > 1:
            num_children[parent] -= 1
            return
        del num_children[parent]
        if parent in self._parents and (above := self._segments[parent]).cell is None:
            self._list(above, first=True)

    def victim(self, may_evict: Callable[[K], bool]) -> K | None:
        refused: list[Segment[K]] = []
        found: K | None = None
        while (segment := self._lowest()) is not None:
            key = segment.keys[segment.top - 1]
            if key not in self._num_children and may_evict(key):
                found = key
            elif segment.num_stored < segment.top:
                found = next(filter(may_evict, self._leaves(segment)), None)
            if found is not None:
                assert segment.cell is not None
                self._bar = segment.cell.worth
                break
            self._unlist(segment)
            refused.append(segment)
        for segment in reversed(refused):
            self._list(segment, first=True)
        return found

    def dump(self) -> object:
        return {
            key: (key in self._parents, s.time, s.octave, s.turn, s.uses, s.gap, s.kind.name, s.kind.worths)
            for key, s in self._segments.items()
        }

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, key: object) -> bool:
        return key in self._parents

    def __iter__(self) -> Iterator[K]:
        return iter(self._parents)

    @property
    def num_ghosts(self) -> int:
        """How many keys are remembered that are not stored."""
        return len(self._segments) - len(self._parents)

    # -- segments

    def _cut(self, chain: Sequence[K]) -> list[Group[K]]:
        """Cut the chain where its past changes."""
        groups: list[Group[K]] = []
        last: Segment[K] | None = None
        start = 0
        for i, segment in enumerate(map(self._segments.get, chain)):
            if segment is not last:
                if i:
                    groups.append((last, start, i))
                last, start = segment, i
        if chain:
            groups.append((last, start, len(chain)))
        return groups

    def _turn(self, chain: Sequence[K], groups: list[Group[K]]) -> tuple[int, float, int]:
        """Return which turn of a conversation the request is, the pause before it, and by how much it has grown."""
        growth = 0
        for segment, start, stop in reversed(groups):
            if segment is not None:
                goes_on = segment.turn > 1 or (segment.is_end and segment.keys[-1] == chain[stop - 1])
                if goes_on and 0 < segment.uses <= segment.turn:
                    return segment.turn + 1, self._now - segment.time, growth
                break
            growth += stop - start
        return 1, 0.0, growth

    def _share(self, segment: Segment[K], domain: Hashable) -> None:
        """Note a use of a segment that is not the conversation's own."""
        gap = self._now - segment.time
        if segment.uses > 1:
            gap = (segment.gap + gap) / 2
        segment.uses += 1
        segment.gap, segment.turn, segment.is_end = gap, 1, False
        self._renew(
            segment, self._experience.kind(domain, ("shared", digits(segment.uses, 6), digits(gap * 4, 17) // 2))
        )

    def _hinted(self, domain: Hashable, name: tuple[Hashable, ...], hint: Hint | None) -> Kind:
        if hint is None:
            return self._experience.kind(domain, name)
        factor = 4.0 ** max(-MAX_PRIORITY, min(MAX_PRIORITY, hint.priority))
        if hint.release:
            name = ("over",)
        elif hint.retain_s is not None:
            name = ("retain", digits(max(0.0, hint.retain_s), 17))
        return self._experience.kind(domain, name, factor)

    def _remember(self, session: str, domain: Hashable, pieces: list[Segment[K]]) -> None:
        self._sessions[domain, session] = pieces
        self._sessions.move_to_end((domain, session))
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)

    def _append(self, segment: Segment[K] | None, keys: Sequence[K], num_stored: int = 0) -> Segment[K]:
        if segment is None:
            segment = Segment(self._unasked, self._now)
        segment.keys += keys
        if num_stored:
            segment.num_stored += num_stored
            segment.top = len(segment.keys)
        self._segments.update(dict.fromkeys(keys, segment))
        return segment

    def _append_unasked(self, key: K, parent: K) -> Segment[K]:
        """Make a stored chunk known that no request asked for."""
        above = self._segments.get(parent)
        if above is not None and (above.kind is not self._unasked or above.keys[-1] != parent or above.octave):
            above = None
        segment = self._append(above, (key,))
        self._renew(segment, self._unasked)
        self._forget_ghosts()
        return segment

    def _split(self, segment: Segment[K], keys: Sequence[K]) -> Segment[K]:
        """Take ``keys``, some but not all of its keys, out of a segment, and return a segment of their own."""
        self._last_lowest = None
        num = len(keys)
        num_stored = sum(map(self._parents.__contains__, keys))
        piece = self._append(None, keys, num_stored)
        piece.kind, piece.uses, piece.gap, piece.turn = segment.kind, segment.uses, segment.gap, segment.turn
        piece.time, piece.octave = segment.time, segment.octave
        if segment.keys[0] == keys[0] and segment.keys[num - 1] == keys[-1]:
            del segment.keys[:num]
        elif segment.keys[-1] == keys[-1] and segment.keys[-num] == keys[0]:
            del segment.keys[-num:]
        else:
            segment.keys = [key for key in segment.keys if self._segments[key] is segment]
        segment.num_stored -= num_stored
        segment.top = len(segment.keys) if segment.num_stored else 0
        if not segment.num_stored and segment.cell is not None:
            self._unlist(segment)
        elif segment.num_stored and segment.cell is None:
            self._list(segment)
        if segment.num_stored == len(segment.keys):
            self._ghosts.pop(segment, None)
        return piece

    def _join(self, body: Segment[K], segment: Segment[K]) -> Segment[K]:
        if segment.cell is not None:
            self._unlist(segment)
        self._append(body, segment.keys, segment.num_stored)
        segment.keys = []
        self._ghosts.pop(segment, None)
        return body

    def _renew(self, segment: Segment[K], kind: Kind) -> None:
        """Let the segment's age begin, as one of ``kind``."""
        if segment.cell is not None:
            self._unlist(segment)
        segment.kind, segment.octave, segment.time = kind, 0, self._now
        kind.returns.came[0] += len(segment.keys) ** 0.5
        self._aging[0].append((segment, self._now))
        if segment.num_stored:
            self._list(segment)
        if segment.num_stored < len(segment.keys):
            self._ghosts[segment] = None
            self._ghosts.move_to_end(segment)

    def _forget_ghosts(self) -> None:
        limit = max(MIN_GHOSTS, len(self._parents))
        known, stored = self._segments, self._parents
        while len(known) - len(stored) > limit:
            self._last_lowest = None
            segment, _ = self._ghosts.popitem(last=False)
            keys = segment.keys
            segment.keys = [key for key in keys if key in stored] if segment.num_stored else []
            for key in keys if not segment.keys else [key for key in keys if key not in stored]:
                del known[key]
            segment.top, segment.is_end = len(segment.keys), False

    # -- age

    def _advance(self, now: float) -> None:
        if self._origin is None:
            self._origin = now
        self._now = now = max(self._now, now - self._origin)
        if len(self._aging[0]) > self._max_young:  # many uses within the first octave, all but the last of no account
            young = [(s, t) for s, t in self._aging[0] if s.time == t and s.octave == 0 and s.keys]
            self._aging[0].clear()
            self._aging[0].extend(young)
            self._max_young = 2 * len(young) + _MIN_YOUNG
        for age, queue in enumerate(self._aging):
            limit = now - ENDS[age]
            while queue and queue[0][1] <= limit:
                segment, time = queue.popleft()
                if segment.time == time and segment.octave == age and segment.keys:
                    self._grow_older(segment)

    def _grow_older(self, segment: Segment[K]) -> None:
        was_listed = segment.cell is not None
        if was_listed:
            self._unlist(segment)
        segment.octave = age = segment.octave + 1
        segment.kind.returns.came[age] += len(segment.keys) ** 0.5
        if age < LAST_OCTAVE:
            self._aging[age].append((segment, segment.time))
        if was_listed:
            self._list(segment)

    # -- cells

    def _list(self, segment: Segment[K], first: bool = False) -> None:
        self._last_lowest = None
        kind, age = segment.kind, segment.octave
        number = kind.number * NUM_OCTAVES + age
        cell = self._cells.get(number)
        if cell is None:
            cell = self._cells[number] = Cell(number, kind.worths[age])
        cell.segments[segment] = None
        if first:
            cell.segments.move_to_end(segment, last=False)
        segment.cell = cell
        if not cell.is_queued:
            cell.is_queued = True
            heapq.heappush(self._heap, (cell.worth, number, cell))

    def _unlist(self, segment: Segment[K]) -> None:
        assert segment.cell is not None
        self._last_lowest = None
        del segment.cell.segments[segment]
        segment.cell = None

    def _lowest(self) -> Segment[K] | None:
        """Return the segment that is to lose a chunk next: the last that it has stored, or the last before a hole."""
        if self._last_lowest is not None:
            return self._last_lowest
        heap, stored, num_children = self._heap, self._parents, self._num_children
        while heap:
            cell = heap[0][2]
            while cell.segments:
                segment = next(iter(cell.segments))
                keys, top = segment.keys, segment.top
                while keys[top - 1] not in stored:
                    top -= 1
                segment.top = top
                if keys[top - 1] not in num_children:
                    self._last_lowest = segment
                    return segment
                if segment.num_stored < top and next(self._leaves(segment), None) is not None:
                    return segment
                self._unlist(segment)  # until its last stored chunk has no child any more
            heapq.heappop(heap)
            cell.is_queued = False
        return None

    def _is_leaf(self, key: K) -> bool:
        return key in self._parents and key not in self._num_children

    def _leaves(self, segment: Segment[K]) -> Iterator[K]:
        """Yield the stored chunks of a segment that have no stored child, the last one first."""
        return filter(self._is_leaf, reversed(segment.keys[: segment.top]))

    def _learn(self) -> None:
        """Draw conclusions from what was counted. The next time is due later the more there is to conclude from."""
        self._experience.learn(self._bar)
        self._last_lowest = None
        self._bar = 0.0
        kinds = self._experience.kinds
        self._next_lesson += max(16, min(self._num_notes // 8, _MAX_LESSON), len(kinds) // 2)
        self._heap = []
        for cell in self._cells.values():
            kind, age = divmod(cell.number, NUM_OCTAVES)
            cell.worth = kinds[kind].worths[age]
            cell.is_queued = bool(cell.segments)
            if cell.is_queued:
                self._heap.append((cell.worth, cell.number, cell))
        heapq.heapify(self._heap)
