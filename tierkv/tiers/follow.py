"""Following a Redis stream, and knowing whether anything was missed. Pure: replies in, a verdict and entries out.

Theory of operation. A *place* is the id of the last entry that was read, and how many entries had ever been added to
the stream when that one was its last (Redis 7 counts them: ``entries-added``). A stream that goes on from a place has,
behind it, exactly as many entries as were added since. Everything else is told by the counts:

=================================================  ================================================================
what Redis says                                    verdict
=================================================  ================================================================
as many entries after the place as were added      ``ON``
its first entry is younger, and some were trimmed  ``TRIMMED``: entries that were never read may be gone
fewer were ever added, its last entry is older,    ``LOST``: another stream under the old name, or one that was moved
its first is younger though none was trimmed, or   back (FLUSHALL, eviction of the key, a restart without its data, a
the numbers do not add up                          failover to a replica that lacked the end)
no such key                                        ``MISSING``
=================================================  ================================================================

A place without a count (``added`` is None) is believed as it stands: whoever made it accepts what is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from tierkv.resp import Error, Value
from tierkv.tiers.redis_wire import Command


class Id(NamedTuple):
    """The id of an entry: milliseconds of Redis's clock, and a number within them."""

    ms: int = 0
    number: int = 0

    @classmethod
    def parse(cls, text: bytes | str) -> Id:
        """Return the id that ``text`` is (``b"1700000000000-0"``).

        Raises:
            ValueError: it is none.
        """
        ms, _, number = (text.decode() if isinstance(text, bytes) else text).partition("-")
        return cls(int(ms), int(number))

    def __str__(self) -> str:
        return f"{self.ms}-{self.number}"


class Place(NamedTuple):
    """How far a stream was read: its last entry, and how many were ever added up to it (None: not known)."""

    last: Id = Id()
    added: int | None = None


class Entry(NamedTuple):
    """An entry of a stream."""

    id: Id
    fields: dict[bytes, bytes]


class Info(NamedTuple):
    """What a stream is: entries in it, entries ever added, and the ids of its first and last entry ever."""

    length: int
    added: int
    first: Id
    last: Id


class Verdict(Enum):
    """How a stream relates to a place; see the module's docstring."""

    ON = "on"
    TRIMMED = "trimmed"
    LOST = "lost"
    MISSING = "missing"


class Reading(NamedTuple):
    """What one look at a stream gave.

    Attributes:
        verdict: whether ``entries`` go on from the place.
        entries: those behind the place, oldest first; not more than were asked for.
        place: after them.
        whole: there were no more.
        end: the place behind everything that was in the stream (nothing, where it is missing).
        reason: for people, where the verdict is not ``ON``.
    """

    verdict: Verdict
    entries: list[Entry]
    place: Place
    whole: bool
    end: Place
    reason: str = ""


class UnreadableError(Exception):
    """Redis answered with something else than a stream; the message is its error, or says what is odd."""


def look_commands(name: str, place: Place, count: int) -> list[Command]:
    """Return the three commands of a look at a stream; their replies go to :func:`look`."""
    info: Command = ("XINFO", "STREAM", name)
    return [info, ("XRANGE", name, f"({place.last}", "+", "COUNT", count), info]


def look(replies: Sequence[Value], place: Place, count: int) -> Reading:
    """Return what three replies say. Entries may be added at any time between them.

    Raises:
        UnreadableError: they are not a stream's.
    """
    before, after = _info(replies[0]), _info(replies[2])
    if before is None or after is None:
        return Reading(Verdict.MISSING, [], Place(), True, Place(), "the stream is gone")
    entries = _entries(replies[1])
    whole = len(entries) < count
    last = entries[-1].id if entries else place.last
    end = Place(after.last, after.added)
    if place.added is None:
        added = after.added if whole and before.added == after.added else None
        return Reading(Verdict.ON, entries, Place(last, added), whole, end)
    verdict, reason = _judge(before, after, len(entries), whole, place.last, place.added)
    return Reading(verdict, entries, Place(last, place.added + len(entries)), whole, end, reason)


def _judge(before: Info, after: Info, num: int, whole: bool, last: Id, added: int) -> tuple[Verdict, str]:
    if before.added < added or after.added < added or before.last < last or after.last < last:
        return Verdict.LOST, f"it ends at {after.last} with {after.added} entries; this node had read up to {last}"
    if before.length and before.first > last:
        if before.added == before.length:
            return Verdict.LOST, f"it begins at {before.first}, after what this node had read last ({last})"
        return Verdict.TRIMMED, f"it reaches back to {before.first} only; this node had read up to {last}"
    if num > after.added - added or (whole and num < before.added - added):
        return Verdict.LOST, f"{before.added - added} entries were added since {last}, and {num} are there"
    return Verdict.ON, ""


def _info(reply: Value) -> Info | None:
    if isinstance(reply, Error):
        if "no such key" in reply:
            return None
        raise UnreadableError(str(reply))
    items = reply if isinstance(reply, list) else []
    found = {bytes(k): v for k, v in zip(items[::2], items[1::2], strict=False) if isinstance(k, bytes)}
    try:
        length, added = found[b"length"], found[b"entries-added"]
        first, last = found[b"recorded-first-entry-id"], found[b"last-generated-id"]
    except KeyError as error:
        raise UnreadableError(f"XINFO STREAM does not say {error}; use Redis 7 or later, or Valkey") from None
    if not (
        isinstance(length, int) and isinstance(added, int) and isinstance(first, bytes) and isinstance(last, bytes)
    ):
        raise UnreadableError("XINFO STREAM answers in a way that this program does not know")
    return Info(length, added, Id.parse(first), Id.parse(last))


def _entries(reply: Value) -> list[Entry]:
    if isinstance(reply, Error):
        raise UnreadableError(str(reply))
    found = []
    for item in reply if isinstance(reply, list) else ():
        if not (isinstance(item, list) and len(item) == 2 and isinstance(item[0], bytes) and isinstance(item[1], list)):
            raise UnreadableError("XRANGE answers in a way that this program does not know")
        words = [word if isinstance(word, bytes) else b"" for word in item[1]]
        found.append(Entry(Id.parse(item[0]), dict(zip(words[::2], words[1::2], strict=False))))
    return found
