"""Kinds of use, and what their past says of them.

A :class:`Kind` is a combination of features that tell something of a return. Those of conversations are many
combinations of a few features, each seen rarely; they share one shape over time (a life table for each name and
domain) and differ by a factor for each feature, as in a proportional-hazards model. The factors are fitted by raking:
one feature after the other is scaled until what was seen equals what was expected. All other kinds have a table each,
drawn towards the tables of their coarser kinds.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import log, log2

from tierkv.policy.returns import NUM_STAGES, Returns, digits, evenly, profits, worths

Name = tuple[Hashable, ...]

_MAX_DOMAINS = 64
#: Counts that a table or a factor is drawn towards what is known without it.
_TABLE_STRENGTH = 128.0
_FACTOR_STRENGTH = 10.0
#: The chance of a return in an octave where nothing has been seen yet, by the kind's first word.
_PRIORS = {"again": 0.1, "fresh": 0.1, "unasked": 0.1, "shared": 0.3, "retain": 0.3, "over": 0.01}
_BODY = ("again", "fresh")
#: By how much more likely a return is at first after so many turns: who came back before comes back again.
_TURN_FACTORS = (0.5, 0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0)


def body_name(word: str, turn: int, pause: float, growth: int, num_chunks: int) -> Name:
    """Return the kind of a part of a conversation.

    Args:
        word: ``"fresh"`` for chunks asked for the first time, ``"again"`` for others.
        turn: which turn of the conversation it is, from 1; 0: it departs from the middle of another conversation.
        pause: seconds since the turn before.
        growth: chunks that this turn added.
        num_chunks: chunks of the whole prompt.
    """
    if turn <= 1:
        return (word, turn, -1, -digits(num_chunks, 8))
    level = turn if turn <= 4 else 5 if turn <= 7 else 6 if turn <= 12 else 7
    return (word, level, digits(growth, 7), digits(pause / 16, 6))


class Kind:
    """A kind of use.

    Attributes:
        number: from 0, in the order in which kinds came up.
        returns: what was seen of it; kinds that differ only by a factor share it.
        worths: expected hits per second of holding a chunk, by stage.
        chances: expected hits of holding a chunk for ever, by stage.
        profits: expected hits of holding a chunk for as long as that is wise, less the price of its room.
    """

    __slots__ = ("chances", "domain", "factor", "name", "number", "profits", "q", "returns", "worths")

    def __init__(self, number: int, domain: Hashable, name: Name, factor: float, returns: Returns) -> None:
        self.number = number
        self.domain = domain
        self.name = name
        self.factor = factor
        self.returns = returns
        self.q = [0.0] * NUM_STAGES
        self.worths = [0.0] * NUM_STAGES
        self.chances = self.profits = self.worths


class Experience:
    """The kinds that came up, and what was learned of them. Their number is bounded: about 400 in a domain."""

    def __init__(self) -> None:
        self.kinds: list[Kind] = []
        self._by_name: dict[tuple[Hashable, Name, float], Kind] = {}
        self._tables: dict[tuple[Hashable, Name], Returns] = {}
        self._domains: dict[Hashable, None] = {None: None}
        self._coarse: dict[Name, Returns] = {}
        self._factors: dict[tuple[int, Hashable], float] = {(1, turn): f for turn, f in enumerate(_TURN_FACTORS)}
        self._shapes: dict[tuple[Hashable, Hashable], list[float]] = {}
        self._priced: dict[tuple[Hashable, Hashable, int], tuple[list[float], list[float]]] = {}
        self._price = 0.0  # of a chunk's room for a second, in hits
        self._gains: dict[tuple[int, float], tuple[list[float], list[float]]] = {}

    def kind(self, domain: Hashable, name: Name, factor: float = 1.0) -> Kind:
        """Return the kind, made if it is new. Domains beyond the 64th are one."""
        kind = self._by_name.get((domain, name, factor))
        if kind is None and domain not in self._domains:
            if len(self._domains) <= _MAX_DOMAINS:
                self._domains[domain] = None
            else:
                domain = None
                kind = self._by_name.get((domain, name, factor))
        if kind is None:
            returns = self._tables.setdefault((domain, name), Returns())
            kind = self._by_name[(domain, name, factor)] = Kind(len(self.kinds), domain, name, factor, returns)
            self.kinds.append(kind)
            self._conclude(kind)
            self._gain(kind)
        return kind

    def learn(self) -> None:
        """Draw the conclusions from what was counted, in time proportional to the number of kinds."""
        self._coarse, self._shapes, self._priced = {}, {}, {}
        for (domain, name), table in self._tables.items():
            table.fade()
            for coarse in ((name[0], "in", domain), *(name[:n] for n in range(1, len(name)))):
                self._coarse.setdefault(coarse, Returns()).add(table)
        self._rake()
        for kind in self.kinds:
            self._conclude(kind)

    def set_price(self, price: float) -> None:
        """Say what room costs, in hits per chunk and second: what it brings otherwise. 0 where there is plenty."""
        self._price = price
        self._gains = {}
        for kind in self.kinds:
            self._gain(kind)

    def _gain(self, kind: Kind) -> None:
        gains = self._gains.get((id(kind.q), kind.factor))
        if gains is None:
            gains = profits(kind.q, kind.factor, 0.0), profits(kind.q, kind.factor, self._price)
            self._gains[id(kind.q), kind.factor] = gains
        kind.chances, kind.profits = gains

    def _rake(self) -> None:
        rows: list[tuple[Name, float, float]] = []  # features, returns seen, returns expected with the factors so far
        for (domain, name), table in self._tables.items():
            if name[0] in _BODY:
                hazard = [-log(1 - q) for q in self._shape(domain, name[0])]
                expected = sum((c - x / 2) * h for c, x, h in zip(table.came, table.left, hazard, strict=True))
                rows.append((name, sum(table.left), expected * self._product(name)))
        for i in range(4):
            seen: dict[Hashable, tuple[float, float]] = {}
            for name, actual, expected in rows:
                a, e = seen.get(name[i], (_FACTOR_STRENGTH, _FACTOR_STRENGTH))
                seen[name[i]] = (a + actual, e + expected)
            for value, (a, e) in seen.items():
                self._factors[i, value] = self._factors.get((i, value), 1.0) * a / e
            rows = [(name, actual, e * seen[name[i]][0] / seen[name[i]][1]) for name, actual, e in rows]

    def _product(self, name: Name) -> float:
        product = 1.0
        for i, value in enumerate(name):
            product *= self._factors.get((i, value), 1.0)
        return min(16.0, max(1 / 16, product))

    def _shape(self, domain: Hashable, word: Hashable) -> list[float]:
        """Return the chances of a return in each stage for what begins with ``word``, before the factors."""
        shape = self._shapes.get((domain, word))
        if shape is None:
            shape = evenly(_PRIORS[str(word)])
            for coarse in ((word,), (word, "in", domain)):
                if (table := self._coarse.get(coarse)) is not None:
                    shape = table.chances(shape, _TABLE_STRENGTH)
            self._shapes[domain, word] = shape
        return shape

    def _conclude(self, kind: Kind) -> None:
        """Set what the kind's chunks are worth."""
        name = kind.name
        if name[0] in _BODY:
            step = round(4 * log2(self._product(name)))
            priced = self._priced.get((kind.domain, name[0], step))
            if priced is None:
                product = 2.0 ** (step / 4)
                q = [1 - (1 - chance) ** product for chance in self._shape(kind.domain, name[0])]
                priced = self._priced[kind.domain, name[0], step] = (q, worths(q))
            q, values = priced
        else:
            q = self._shape(kind.domain, name[0])
            for n in range(2, len(name)):
                if (table := self._coarse.get(name[:n])) is not None:
                    q = table.chances(q, _TABLE_STRENGTH)
            q = kind.returns.chances(q, _TABLE_STRENGTH)
            values = worths(q)
        kind.q = q
        kind.worths = values if kind.factor == 1.0 else [worth * kind.factor for worth in values]
