"""Whatever bytes come: the codec, headers, index rows and the control stream neither crash, hang nor grow."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzzing import examples, mutated, pieces
from records import make_chain, make_namespace
from tierkv.errors import ProtocolError
from tierkv.keys import KEY_NBYTES
from tierkv.messages import Hello, Select, StoreItem
from tierkv.payload import HEADER_NBYTES, BadRecordError, ForeignRecordError, Header, open_record
from tierkv.resp import Bounds, Error, Parser, Placed, Simple, Value, encode, encode_command
from tierkv.tiers import follow
from tierkv.tiers.control_memory import unpack_refs
from tierkv.tiers.redis_index import Row, _decode, bucket_of

#: Small enough that bytes of a fuzzer reach every limit.
SMALL = Bounds(bulk=64, items=8, line=32, value=160)
MAX_DEPTH = 8

line_st = st.text(st.characters(codec="ascii", exclude_characters="\r\n"), max_size=12)
value_st: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.binary(max_size=40) | st.integers(-(2**63), 2**63 - 1) | line_st.map(Simple) | line_st.map(Error),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=10,
)
wire_st = mutated(st.lists(value_st, max_size=4).map(lambda values: b"".join(map(encode, values))))
inline_st = mutated(st.lists(st.binary(max_size=20), max_size=5).map(b"\r\n".join))


# -- a second parser, slow and plain, to compare with


class Refused(Exception):
    """The bytes are no RESP2 within the bounds."""


class Incomplete(Exception):
    """Bytes are missing."""


class Plain:
    """Reads values off whole bytes, recursively; knows nothing of pieces."""

    def __init__(self, data: bytes, bounds: Bounds, inline: bool) -> None:
        self.data, self.bounds, self.inline, self.at, self.begun = data, bounds, inline, 0, 0

    def values(self) -> Iterator[Value]:
        """Yield what is complete.

        Raises:
            Refused: and then comes something else.
        """
        while True:
            self.begun = self.at
            try:
                value = self.value(0)
            except Incomplete:
                return
            yield value

    def line(self) -> bytes:
        end = self.data.find(b"\n" if self.inline else b"\r\n", self.at)
        width = 1 if self.inline else 2
        if end < 0 or end + width - self.at > self.bounds.line:
            if len(self.data) - self.at >= self.bounds.line:
                raise Refused
            raise Incomplete
        line = self.data[self.at : end]
        self.at = end + width
        return line.removesuffix(b"\r") if self.inline else line

    def spent(self, more: int = 0) -> None:
        if self.at - self.begun + more > self.bounds.value:
            raise Refused

    def number(self, digits: bytes, least: int, most: int) -> int:
        if not re.fullmatch(rb"-?[0-9]+", digits) or len(digits) > 20 or not least <= int(digits) <= most:
            raise Refused
        return int(digits)

    def value(self, depth: int) -> Value:
        line = self.line()
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            return self.bulk(self.number(rest, -1, self.bounds.bulk))
        if kind == b"*":
            count = self.number(rest, -1, self.bounds.items)
            if count > 0 and depth >= MAX_DEPTH:
                raise Refused
            if count <= 0:
                self.spent()
                return None if count < 0 else []
            return [self.value(depth + 1) for _ in range(count)]
        if kind == b":":
            number = self.number(rest, -(10**20), 10**20)
            self.spent()
            return number
        if kind in (b"+", b"-"):
            self.spent()
            return (Simple if kind == b"+" else Error)(rest.decode("utf-8", "replace"))
        if self.inline and depth == 0:
            words: list[Value] = list(line.split())
            self.spent()
            if not words:
                self.begun = self.at
            return words or self.value(0)
        raise Refused

    def bulk(self, length: int) -> bytes | None:
        if length < 0:
            self.spent()
            return None
        if len(self.data) < self.at + length + 2:
            self.spent(length)
            raise Incomplete
        value, end = self.data[self.at : self.at + length], self.data[self.at + length : self.at + length + 2]
        if end != b"\r\n":
            raise Refused
        self.at += length + 2
        self.spent()
        return value


def outcome(values: Iterator[Value], *refusals: type[Exception]) -> tuple[list[Any], bool]:
    """Return the values, told apart by type, and whether it ended in a refusal."""
    found: list[Any] = []
    try:
        for value in values:
            found.append(_typed(value))
    except refusals:
        return found, True
    return found, False


def _typed(value: Value) -> Any:
    return [_typed(item) for item in value] if isinstance(value, list) else (type(value).__name__, value)


@examples(150)
@given(wire_st | inline_st | st.binary(max_size=200), st.booleans(), st.data())
def test_any_bytes_in_any_pieces_are_what_a_plain_parser_finds(wire: bytes, inline: bool, data: st.DataObject) -> None:
    parser = Parser(inline=inline, bounds=SMALL)

    def feed() -> Iterator[Value]:
        for piece in data.draw(pieces(wire)):
            yield from parser.feed(piece)
            held = parser.num_taken
            assert held <= SMALL.value + max(SMALL.line, SMALL.bulk) + 2, "more is held than the bounds allow"
            assert parser.mid_value or held == 0

    expected = outcome(Plain(wire, SMALL, inline).values(), Refused)
    assert outcome(feed(), ProtocolError) == expected


@examples(80)
@given(st.lists(value_st, max_size=3))
def test_what_is_encoded_is_parsed_again(values: list[Value]) -> None:
    wire = b"".join(map(encode, values))
    expected = [_typed(Error(" ".join(v.split())) if isinstance(v, Error) else v) for v in values]
    found, refused = outcome(Parser().feed(wire), ProtocolError)
    deep = any(_depth(value) > MAX_DEPTH for value in values)
    assert refused == deep
    if not deep and not any(_has_error(value) for value in values):
        assert found == expected


def _depth(value: Value) -> int:
    """Return how deep arrays that are not empty are nested."""
    return 1 + max(map(_depth, value)) if isinstance(value, list) and value else 0


def _has_error(value: Value) -> bool:
    return any(map(_has_error, value)) if isinstance(value, list) else isinstance(value, Error)


@examples(100)
@given(
    st.lists(st.lists(st.binary(max_size=30), min_size=1, max_size=5), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_placed_strings_arrive_whole_wherever_bytes_are_cut(
    commands: list[list[bytes]], rng: Any, damage: bool
) -> None:
    """Strings go to the sink's buffers or to the value, received there or fed, in pieces of any size."""
    rooms: list[bytearray] = []

    def sink(items: Sequence[Value], length: int) -> list[memoryview] | None:
        if rng.random() < 0.4:
            return None
        rooms.append(bytearray(length))
        cut = rng.randint(0, length)
        view = memoryview(rooms[-1])
        return [view[:cut], view[cut:]]

    parser, wire = Parser(sink=sink), b"".join(map(encode_command, commands))
    if damage:
        at = rng.randrange(len(wire))
        wire = wire[:at] + bytes([rng.randrange(256)]) + wire[at + 1 :]
    found: list[Value] = []
    at = 0
    try:
        while at < len(wire):
            step = rng.randint(1, 12)
            space = parser.space()
            if space is not None and rng.random() < 0.8:
                step = min(step, len(space), len(wire) - at)
                space[:step] = wire[at : at + step]
                found += parser.filled(step)
            else:
                found += parser.feed(wire[at : at + step])
            at += step
    except ProtocolError:
        assert damage
        return
    if not damage:
        left = iter(rooms)
        whole = [[bytes(next(left)) if isinstance(w, Placed) else w for w in c] for c in found if isinstance(c, list)]
        assert whole == commands and not parser.mid_value and next(left, None) is None


def test_an_announced_length_takes_no_memory() -> None:
    parser = Parser()
    for piece in (b"*1048576\r\n", b"$67108864\r\n", b"x" * 100):
        assert list(parser.feed(piece)) == []
    assert parser.num_taken < 200


# -- records


NAMESPACE = make_namespace(payload_nbytes=8192)
REFS, RECORDS = make_chain(NAMESPACE, 1)
RECORD = bytes(RECORDS[0].data)


@examples(100)
@given(mutated(st.just(RECORD[:HEADER_NBYTES]), most=3) | st.binary(max_size=2 * HEADER_NBYTES))
def test_a_damaged_header_is_refused(data: bytes) -> None:
    record = (data + RECORD[len(data) :])[: len(RECORD)]
    whole = record == RECORD
    try:
        header = open_record(
            memoryview(record), key=REFS[0].key, ns_id=NAMESPACE.ns_id(), payload_nbytes=NAMESPACE.payload_nbytes
        )
    except (BadRecordError, ForeignRecordError) as error:
        assert str(error) and not whole
    else:
        assert header == RECORDS[0].header and record[:HEADER_NBYTES] == RECORD[:HEADER_NBYTES]


@examples(80)
@given(st.binary(max_size=400))
def test_any_bytes_are_no_header_by_accident(data: bytes) -> None:
    with pytest.raises((BadRecordError, ForeignRecordError)):
        Header.unpack(data)


_row = Row(bytes(32), b"\1" * 32, 1, 16, 100, bytes(16), 1.5, b"tokens")
_rows = st.just(msgspec.msgpack.encode(_row))


@examples(100)
@given(mutated(_rows) | st.binary(max_size=100), st.sampled_from(["01", "00", "ff"]))
def test_any_row_of_the_shared_index_is_one_or_none(data: bytes, bucket: str) -> None:
    row = _decode(bucket, data)
    if row is not None:
        assert len(row.anchor) == KEY_NBYTES and bucket_of(row.anchor) == bucket
        assert isinstance(row.position, int) and isinstance(row.created, float)


# -- messages


_item = StoreItem(bytes(32), bytes(32), bytes(32), 0, 16, bytes(16), 0, 0, tokens=b"x")


@examples(80)
@given(mutated(st.just(msgspec.msgpack.encode([_item]))) | st.binary(max_size=200))
def test_any_bytes_are_items_or_refused(data: bytes) -> None:
    try:
        items = msgspec.msgpack.decode(data, type=list[StoreItem])
    except (msgspec.MsgspecError, ValueError):
        return
    assert all(isinstance(item.key, bytes) for item in items)


@examples(80)
@given(mutated(st.just(b'{"ns":"ab","keys":{"ab":["00"]},"tiers":["disk"],"seconds":1e3}')) | st.binary(max_size=80))
def test_any_json_is_a_selection_or_refused(data: bytes) -> None:
    for kind in (Select, Hello):
        try:
            msgspec.json.decode(data, type=kind)
        except (msgspec.MsgspecError, ValueError):
            continue


# -- what comes from a Redis that others write to


_reply: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.binary(max_size=20)
    | st.integers(-5, 1 << 64)
    | st.sampled_from([b"length", b"entries-added", b"last-generated-id", b"first-entry", b"1-1", b"5-0", b"x-y"])
    | st.just(Error("WRONGTYPE x"))
    | st.just(Simple("OK")),
    lambda inner: st.lists(inner, max_size=8),
    max_leaves=24,
)
_info = st.fixed_dictionaries(
    {
        b"length": st.integers(0, 5),
        b"entries-added": st.integers(0, 9),
        b"last-generated-id": st.sampled_from([b"0-0", b"3-1", b"9-9"]),
        b"first-entry": st.none() | st.just([b"1-1", [b"a", b"b"]]),
        b"recorded-first-entry-id": st.sampled_from([b"0-0", b"1-1", b"5-0"]),
    }
).map(lambda info: [part for pair in info.items() for part in pair])
_entries = st.lists(st.tuples(st.sampled_from([b"1-1", b"2-0", b"9-9"]), st.just([b"k", b"v"])).map(list), max_size=3)


@examples(150)
@given(
    st.tuples(_info | _reply, _entries | _reply, _info | _reply),
    st.integers(0, 9),
    st.none() | st.integers(0, 9),
    st.integers(1, 3),
)
def test_any_reply_about_a_stream_is_judged_or_unreadable(
    replies: tuple[Any, Any, Any], last: int, added: int | None, count: int
) -> None:
    place = follow.Place(follow.Id(last, 0), added)
    try:
        reading = follow.look(list(replies), place, count)
    except follow.UnreadableError as error:
        assert str(error)
        return
    assert isinstance(reading.verdict, follow.Verdict)
    assert all(isinstance(entry.id, follow.Id) and isinstance(entry.fields, dict) for entry in reading.entries)


@examples(100)
@given(st.binary(max_size=200))
def test_any_bytes_are_packed_keys_or_refused(data: bytes) -> None:
    try:
        refs = unpack_refs(data)
    except ValueError:
        return
    assert all(len(ref.key) == KEY_NBYTES for ref in refs)
