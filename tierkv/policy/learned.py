"""Our own policy: what to keep follows from how soon chunks of its kind came back.

Theory of operation. A request's chain is cut into *segments*, runs of chunks with one past: a prefix that many requests
share, the body of a conversation, what the last turn added. Chunks of a segment are asked for together, so age and
statistics are the segment's, and what is stored of it is its start: a chunk costs one dictionary entry. A segment is of
a :class:`Kind` (for a conversation: its turn, growth and pace; for a shared prefix: its number of uses and their pace;
for a hinted session: what was promised), and a kind has a worth at each age, learned from all requests, whatever this
tier holds: what is not stored is remembered for a while (*ghosts*).

*Eviction* takes the last stored chunk of the least worthy segment on which nothing stored hangs, so a prefix stays
while anything stored hangs from it. Segments wait in *cells*, one for each kind and stage of age, and cells in a heap
by worth: finding a victim costs the logarithm of the number of cells, which is bounded, not of the number of chunks.

*Admission*: a write has to pay. What a chunk is expected to bring, less what the room that it takes up brings
otherwise (the worth of what goes at present, which is all that tells scarce memory from plenty), must be at least
``WRITE_COST`` hits.

Memory, measured at 23 chunks a segment: a chunk, stored or a ghost, 63 to 77 bytes beside its key, which the caller's
index holds anyway for what is stored (65 bytes for a ghost's key of 32). A segment's own share is about 500 bytes, so
lone chunks cost 600. Ghosts are at most as many as stored chunks, or 65,536.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import repeat
from math import sqrt
from typing import Generic

from tierkv.policy.base import MAX_PRIORITY, Hint, K
from tierkv.policy.kinds import Experience, Kind, body_name
from tierkv.policy.returns import ENDS, LAST_STAGE, digits
from tierkv.policy.segments import Cells, Cohort, Segment

MIN_GHOSTS = 1 << 16
MAX_SESSIONS = 1 << 14
#: What a write costs, in hits.
WRITE_COST = 0.125
#: Conclusions are drawn after every eighth of the requests so far, at most this many.
_MAX_LESSON = 256
#: Segments of one kind that are used within this many seconds age as one.
_COHORT_S = 1.0
#: Ages are looked at no more often than this.
_LOOK_S = 0.25

Group = tuple[Segment[K], int, bool]  # segment, how many of its first keys, whether they are known since now


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
        self._known: dict[K, Segment[K]] = {}  # of every key that is known, stored or ghost
        self._num_stored = 0
        self._cells: Cells[K] = Cells()
        self._num_children = self._cells.num_children
        self._experience = Experience()
        self._unasked = self._experience.kind(None, ("unasked",))
        self._nobody: Cohort[K] = Cohort(self._unasked, 0.0)  # of segments in the making
        self._filling = self._going = Segment(self._nobody, 0.0, [], None)  # of the last add, of the last victim
        self._newest: dict[Kind, Cohort[K]] = {}
        self._aging: tuple[deque[Cohort[K]], ...] = tuple(deque() for _ in range(LAST_STAGE))
        self._num_aging = self._num_aged = 0  # cohorts in these queues, and how many there were after the last look
        self._ghosts: OrderedDict[Segment[K], None] = OrderedDict()  # segments with keys that are not stored
        self._sessions: OrderedDict[tuple[Hashable, str], list[Segment[K]]] = OrderedDict()
        self._next_look = 0.0  # at which cohorts have grown older
        self._origin: float | None = None
        self._now = 0.0  # seconds since the first note
        self._num_notes = 0
        self._next_lesson = 16
        self._price = 0.0  # of a chunk's room for a second, in hits; 0 as long as nothing was evicted
        self._num_evicted = 0  # since the last lesson
        self._worth_evicted = 0.0

    # -- requests

    def note(self, chain: Sequence[K], now: float, *, hint: Hint | None = None, domain: Hashable = None) -> None:
        self._advance(now)
        groups = self._cut(list(chain))
        turn, pause, growth, varies = self._turn(groups)
        bodies: list[Segment[K]] = []
        fresh: list[Segment[K]] = []
        for segment, num, is_new in groups:
            if is_new:
                fresh.append(segment)
                continue
            cohort = segment.cohort
            cohort.kind.returns.left[cohort.stage] += sqrt(num)
            is_shared = not bodies and segment.uses >= turn
            if num < len(segment.keys):
                segment = self._split(segment, num)
            if is_shared:
                self._share(segment, domain)
            elif not bodies or not self._join(bodies[-1], segment):
                bodies.append(segment)
        for pieces, word, uses in ((bodies, "again", turn), (fresh, "fresh", 1)):
            if pieces:
                kind = self._hinted(domain, body_name(word, 0 if varies else turn, pause, growth, len(chain)), hint)
                for segment in pieces:
                    segment.uses, segment.turn, segment.gap, segment.is_end = uses, turn, pause, True
                    self._renew(segment, kind)
        if hint is not None and hint.session and not hint.release:
            self._remember(hint.session, domain, bodies + fresh)
        self._forget_ghosts()
        self._num_notes += 1
        if self._num_notes >= self._next_lesson:
            self._learn()

    def touch(self, chain: Iterable[K]) -> None:
        deepest: dict[Segment[K], int] = {}
        for key in chain:
            segment = self._known.get(key)
            if segment is not None and segment.num_stored and segment.cohort.kind is self._unasked:
                offset = segment.offset(key)
                if offset < segment.num_stored:
                    deepest[segment] = max(offset, deepest.get(segment, 0))
        for segment, offset in reversed(deepest.items()):  # a leaf is never used later than its ancestors
            if segment.cohort.stage or not self._cells.is_last(segment):
                self._renew(
                    self._split(segment, offset + 1) if offset + 1 < len(segment.keys) else segment, self._unasked
                )

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
        segment = self._known.get(key)
        return 0.0 if segment is None else segment.cohort.worth

    # -- what is stored

    def admit(self, key: K, now: float, *, room: bool, above: bool = False) -> bool:
        segment = self._known.get(key)
        cohort = self._nobody if segment is None else segment.cohort
        kind = cohort.kind
        if room:
            return kind.name[0] != "over"
        stage = cohort.stage
        if above or kind.profits[stage] < WRITE_COST:
            return False
        cells = self._cells
        return (cells.found or cells.lowest()) is None or kind.worths[stage] > cells.bar

    def add(self, key: K, parent: K) -> None:
        segment = self._filling
        if (num := segment.num_stored) == len(segment.keys) or segment.keys[num] is not key:
            segment = self._filling = self._known.get(key) or self._append_unasked(key, parent)
            num = segment.num_stored
            if num == len(segment.keys) or segment.keys[num] != key:
                offset = segment.offset(key)
                if offset < num:
                    self.touch((key,))
                    return
                self._split(segment, offset)
                num = 0
        cells = self._cells
        self._num_stored += 1
        segment.num_stored = num + 1
        if not num:
            segment.parent = parent
            self._num_children[parent] = self._num_children.get(parent, 0) + 1
            cells.found = None  # which may have got a child
        elif cells.found is segment:
            cells.found = None  # whose last stored chunk is another now, with a child perhaps
        if num + 1 == len(segment.keys):
            self._ghosts.pop(segment, None)
        if not segment.is_listed:
            cells.enlist(segment)

    def remove(self, key: K) -> None:
        segment = self._going
        if not (num := segment.num_stored) or segment.keys[num - 1] is not key:
            found = self._known.get(key)
            if found is None:
                return
            segment, num = found, found.num_stored
            if not num or segment.keys[num - 1] != key:
                offset = segment.offset(key)
                if offset >= num:
                    return
                num = offset + 1
                segment = self._split(segment, num)
        else:
            self._num_evicted += 1
            self._worth_evicted += self._cells.bar
        keys = segment.keys
        if num == len(keys):
            self._ghosts[segment] = None
        self._num_stored -= 1
        segment.num_stored = num - 1
        if num > 1:
            if not segment.is_listed:
                self._cells.enlist(segment, first=True)
            elif keys[num - 2] in self._num_children:
                self._cells.found = None
            return
        if segment.is_listed:
            self._cells.delist(segment)
        assert segment.parent is not None
        self._lose_child(segment.parent)

    def victim(self, may_evict: Callable[[K], bool]) -> K | None:
        refused: list[Segment[K]] = []
        found: K | None = None
        cells = self._cells
        while (segment := cells.found or cells.lowest()) is not None:
            key = segment.keys[segment.num_stored - 1]
            if may_evict(key):
                found, self._going = key, segment
                break
            self._cells.delist(segment)
            refused.append(segment)
        for segment in reversed(refused):
            self._cells.enlist(segment, first=True)
        return found

    def is_leaf(self, key: K) -> bool:
        segment = self._known.get(key)
        if segment is None or not segment.num_stored or key in self._num_children:
            return False
        return bool(segment.keys[segment.num_stored - 1] == key)

    def dump(self) -> object:
        return {
            key: (i < s.num_stored, s.time, s.cohort.stage, s.turn, s.uses, s.gap, s.cohort.kind.name, s.cohort.worth)
            for s in dict.fromkeys(self._known.values())
            for i, key in enumerate(s.keys)
        }

    def __len__(self) -> int:
        return self._num_stored

    def __contains__(self, key: object) -> bool:
        segment = self._known.get(key)  # type: ignore[call-overload]
        if segment is None:
            return False
        num = segment.num_stored
        if num == len(segment.keys):
            return True
        return bool(num) and bool(segment.keys[num] != key) and segment.offset(key) < num

    def __iter__(self) -> Iterator[K]:
        return (key for key in self._known if key in self)

    @property
    def num_ghosts(self) -> int:
        """How many keys are remembered that are not stored."""
        return len(self._known) - self._num_stored

    # -- segments

    def _cut(self, chain: list[K]) -> list[Group[K]]:
        """Cut the chain where its past changes, and make known what is new of it."""
        groups: list[Group[K]] = []
        known = self._known
        i, end = 0, len(chain)
        while i < end:
            segment = known.get(chain[i])
            if segment is None:
                segment = self._new(chain[i:], chain[i - 1] if i else None)
                num, is_new = len(segment.keys), True
            else:
                keys, is_new = segment.keys, False
                num = len(keys)
                if chain[i : i + num] != keys:
                    if keys[0] != chain[i]:  # no chain that begins at its root
                        if any(segment is other for other, _, _ in groups):
                            i += 1
                            continue
                        self._split(segment, segment.offset(chain[i]))
                    num = 0
                    for a, b in zip(keys, chain[i:], strict=False):
                        if a != b:
                            break
                        num += 1
            groups.append((segment, num, is_new))
            i += num
        return groups

    def _new(self, keys: list[K], parent: K | None) -> Segment[K]:
        """Make keys known up to the first that is known already; the first of them is not."""
        known = self._known
        segment = Segment(self._nobody, self._now, keys, parent)
        before = len(known)
        deque(map(known.setdefault, keys, repeat(segment)), maxlen=0)
        if len(known) - before < len(keys):
            own: dict[K, None] = {}
            for key in keys:
                if known[key] is not segment or key in own:
                    break
                own[key] = None
            for key in {key for key in keys if known[key] is segment and key not in own}:
                del known[key]
            segment.keys = list(own)
        return segment

    def _turn(self, groups: list[Group[K]]) -> tuple[int, float, int, bool]:
        """Return which turn of a conversation the request is, the pause before it, by how much it has grown, and
        whether it departs from the middle of another conversation.
        """
        growth = 0
        for segment, num, is_new in reversed(groups):
            if not is_new:
                is_own = 0 < segment.uses <= segment.turn
                is_whole = num == len(segment.keys)
                if is_own and (segment.turn > 1 or (segment.is_end and is_whole)):
                    return segment.turn + 1, self._now - segment.time, growth, False
                return 1, 0.0, growth, is_own and not is_whole
            growth += num
        return 1, 0.0, growth, False

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

    def _append_unasked(self, key: K, parent: K) -> Segment[K]:
        """Make a chunk known that is stored and that no request asked for."""
        segment = self._known.get(parent)
        if (
            segment is None
            or segment.cohort.kind is not self._unasked
            or segment.keys[-1] != parent
            or segment.num_stored < len(segment.keys)
            or segment.cohort.stage
            or parent in self._num_children
        ):
            segment = Segment(self._nobody, self._now, [key], parent)
        else:
            segment.keys.append(key)
        self._known[key] = segment
        self._renew(segment, self._unasked)
        self._forget_ghosts()
        return segment

    def _split(self, segment: Segment[K], num: int) -> Segment[K]:
        """Make the first ``num`` keys, some but not all, a segment of their own, and return it."""
        num_stored, cohort = segment.num_stored, segment.cohort
        cohort.leave(segment)
        head = segment.take_head(num)
        cohort.enter(segment)
        cohort.enter(head)
        keys = head.keys
        self._known.update(dict.fromkeys(keys, head))
        if num_stored > num:
            self._num_children[keys[-1]] = self._num_children.get(keys[-1], 0) + 1
        elif num_stored and segment.is_listed:
            self._cells.delist(segment)
            self._cells.enlist(head)
        if num_stored < num:
            self._ghosts[head] = None
        if segment.num_stored == len(segment.keys):
            self._ghosts.pop(segment, None)
        return head

    def _join(self, body: Segment[K], segment: Segment[K]) -> bool:
        """Append a segment to the one that it is a continuation of; return whether that was possible."""
        if segment.parent != body.keys[-1] or (segment.num_stored and body.num_stored < len(body.keys)):
            return False
        if segment.is_listed:
            self._cells.delist(segment)
        if segment.num_stored:
            body.num_stored += segment.num_stored
            self._lose_child(segment.parent)
        segment.cohort.leave(segment)
        segment.cohort = self._nobody
        self._known.update(dict.fromkeys(segment.keys, body))
        body.keys += segment.keys
        segment.keys, segment.num_stored = [], 0
        self._ghosts.pop(segment, None)
        return True

    def _lose_child(self, parent: K) -> None:
        left = self._num_children[parent] - 1
        if left:
            self._num_children[parent] = left
            return
        del self._num_children[parent]
        above = self._known.get(parent)
        if above is not None and above.num_stored and not above.is_listed:
            self._cells.enlist(above, first=True)

    def _renew(self, segment: Segment[K], kind: Kind) -> None:
        """Let the segment's age begin, as one of ``kind``."""
        if segment.is_listed:
            self._cells.delist(segment)
        if segment.cohort is not self._nobody:
            segment.cohort.leave(segment)
        segment.time = self._now
        cohort = self._newest.get(kind)
        if cohort is None or self._now >= cohort.time + _COHORT_S:
            cohort = self._newest[kind] = Cohort(kind, self._now)
            self._aging[0].append(cohort)
            self._num_aging += 1
        cohort.enter(segment)
        kind.returns.came[0] += segment.weight
        if segment.num_stored:
            self._cells.enlist(segment)
        if segment.num_stored < len(segment.keys):
            self._ghosts[segment] = None
            self._ghosts.move_to_end(segment)

    def _forget_ghosts(self) -> None:
        known, limit = self._known, max(MIN_GHOSTS, self._num_stored)
        while len(known) - self._num_stored > limit:
            segment, _ = self._ghosts.popitem(last=False)
            deque(map(known.__delitem__, segment.drop_ghosts()), maxlen=0)
            if not segment.keys:
                segment.cohort.leave(segment)
                segment.cohort = self._nobody

    # -- age

    def _advance(self, now: float) -> None:
        if self._origin is None:
            self._origin = now
        self._now = now = max(self._now, now - self._origin)
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_S
        for end, queue in zip(ENDS, self._aging, strict=True):
            while queue and queue[0].time + end <= now:
                self._grow_older(queue.popleft())
        if self._num_aging > 2 * self._num_aged + 1024:
            self._drop_empty_cohorts()

    def _grow_older(self, cohort: Cohort[K]) -> None:
        if self._newest.get(cohort.kind) is cohort:
            del self._newest[cohort.kind]
        self._num_aging -= 1
        if not cohort.num_members:
            return
        self._cells.grow_older(cohort)
        cohort.kind.returns.came[cohort.stage] += cohort.weight
        if cohort.stage < LAST_STAGE:
            self._aging[cohort.stage].append(cohort)
            self._num_aging += 1

    def _drop_empty_cohorts(self) -> None:
        for queue in self._aging:
            inhabited = [cohort for cohort in queue if cohort.num_members or self._newest.get(cohort.kind) is cohort]
            self._num_aging -= len(queue) - len(inhabited)
            queue.clear()
            queue.extend(inhabited)
        self._num_aged = self._num_aging

    def _learn(self) -> None:
        """Draw conclusions from what was counted. The next time is due later the more there is to conclude from."""
        experience = self._experience
        experience.learn()
        self._cells.reprice([kind.worths for kind in experience.kinds])
        if self._num_evicted:
            self._price = self._worth_evicted / self._num_evicted
        elif self._price and (lowest := self._cells.lowest()) is not None:
            self._price = min(self._price, lowest.cohort.worth)  # nothing was worth a write
        experience.set_price(self._price)
        self._num_evicted, self._worth_evicted = 0, 0.0
        self._next_lesson += max(16, min(self._num_notes // 8, _MAX_LESSON), len(experience.kinds) // 2)
