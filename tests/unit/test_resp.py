"""The RESP codec: round trips, any cut of the bytes, and arbitrary bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tierkv import resp
from tierkv.errors import ProtocolError
from tierkv.resp import Bounds, Error, Parser, Placed, Simple, Value, encode, encode_command

line_st = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=30)
value_st = st.recursive(
    st.none()
    | st.binary(max_size=50)
    | st.integers(-(2**63), 2**63 - 1)
    | line_st.map(Simple)
    | line_st.map(lambda text: Error(" ".join(text.split()))),
    lambda inner: st.lists(inner, max_size=5),
    max_leaves=12,
).filter(lambda value: depth(value) <= resp.MAX_DEPTH)


def depth(value: Value) -> int:
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


def parse(pieces: Iterable[bytes], parser: Parser | None = None) -> list[Value]:
    parser = parser or Parser()
    return [value for piece in pieces for value in parser.feed(piece)]


def same(one: Value, other: Value) -> bool:
    """Equality that also tells ``Simple`` from ``Error``."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@given(st.lists(value_st, max_size=5))
def test_round_trip(values: list[Value]) -> None:
    parsed = parse([b"".join(map(encode, values))])
    assert same(parsed, values)


@given(st.lists(value_st, min_size=1, max_size=3), st.data())
def test_any_cut_of_the_bytes_gives_the_same_values(values: list[Value], data: st.DataObject) -> None:
    wire = b"".join(map(encode, values))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=8)))
    pieces = [wire[a:b] for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True)]
    assert same(parse(pieces), values)
    assert same(parse(bytes((byte,)) for byte in wire), values)
    inline = Parser(inline=True)
    assert same(parse(pieces, inline), values)


@given(st.lists(st.binary(max_size=40) | st.integers(0, 2**64) | st.text(max_size=20), min_size=1, max_size=6))
def test_a_command_is_an_array_of_bulk_strings(words: list[bytes | int | str]) -> None:
    expected = [w if isinstance(w, bytes) else str(w).encode() for w in words]
    assert parse([encode_command(words)]) == [expected]
    assert parse([encode_command(words)], Parser(inline=True)) == [expected]


def test_encodings_are_those_of_redis() -> None:
    assert encode(Simple("OK")) == b"+OK\r\n"
    assert encode(Error("ERR two\r\nlines")) == b"-ERR two lines\r\n"
    assert encode(-7) == b":-7\r\n"
    assert encode(None) == b"$-1\r\n"
    assert encode("é") == b"$2\r\n\xc3\xa9\r\n"
    assert encode([b"", [], 1]) == b"*3\r\n$0\r\n\r\n*0\r\n:1\r\n"
    assert parse([b"*-1\r\n$-1\r\n"]) == [None, None]


def test_values_come_as_soon_as_they_are_complete() -> None:
    parser = Parser()
    assert list(parser.feed(b"+OK\r\n:1\r\n*2\r\n$1\r\na")) == ["OK", 1]
    assert list(parser.feed(b"\r\n:2\r")) == []
    assert list(parser.feed(b"\n")) == [[b"a", 2]]


@given(st.binary(max_size=300), st.booleans(), st.integers(1, 50))
@example(b":--5\r\n", False, 50)
@example(b":-\r\n", False, 50)
@example(b"$--1\r\n", True, 50)
@example(b"*2\r\nPING\r\n", True, 50)
@example(b"*1\r\n" * 20, False, 50)
@example(b"\r\n\r\n\r\n", False, 50)
def test_arbitrary_bytes_parse_or_are_refused(data: bytes, inline: bool, step: int) -> None:
    parser = Parser(inline=inline)
    try:
        for at in range(0, len(data), step):
            list(parser.feed(data[at : at + step]))
    except ProtocolError as error:
        assert str(error)
    assert len(parser._buffer) <= len(data)


near_resp_st = st.lists(
    st.sampled_from([*(b"%c" % c for c in b"*$+-:012x \r\n"), b"\r\n", b"\r\n", b"-1", b"99999999"]),
    max_size=60,
).map(b"".join)


@given(near_resp_st, st.booleans())
def test_bytes_that_are_nearly_resp_parse_or_are_refused(data: bytes, inline: bool) -> None:
    whole, cut = Parser(inline=inline), Parser(inline=inline)
    results: list[tuple[list[Value], str]] = []
    for parser, pieces in ((whole, [data]), (cut, [data[i : i + 1] for i in range(len(data))])):
        values: list[Value] = []
        fault = ""
        try:
            for piece in pieces:
                for value in parser.feed(piece):
                    values.append(value)
        except ProtocolError as error:
            fault = str(error)
        results.append((values, fault))
    assert same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


# -- limits


@pytest.mark.parametrize(
    "wire",
    [
        b"$%d\r\n" % (resp.MAX_BULK_NBYTES + 1),
        b"$-2\r\n",
        b"*%d\r\n" % (resp.MAX_ARRAY_ITEMS + 1),
        b"*-2\r\n",
        b"*1\r\n" * (resp.MAX_DEPTH + 1),
        b"+" + b"x" * resp.MAX_LINE_NBYTES,
        b":" + b"9" * 21 + b"\r\n",
        b":1.5\r\n",
        b":\r\n",
        b"$3\r\nabcd\r\n",
        b"%1\r\n",  # RESP3
        b"GET x\r\n",
    ],
)
def test_what_exceeds_a_limit_is_refused(wire: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse([wire])


def test_a_smaller_limit_of_bulk_strings() -> None:
    assert parse([b"$4\r\nabcd\r\n"], Parser(max_bulk_nbytes=4)) == [b"abcd"]
    with pytest.raises(ProtocolError, match="at most 4"):
        parse([b"$5\r\n"], Parser(max_bulk_nbytes=4))


def test_a_value_is_bounded_over_all_its_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resp, "MAX_VALUE_NBYTES", 1000)
    item = encode(bytes(90))
    parser = Parser()
    with pytest.raises(ProtocolError, match="longer than 1000 bytes"):
        parse([b"*1000\r\n", *[item] * 20], parser)
    with pytest.raises(ProtocolError, match="longer than 1000 bytes"):
        parse([b"*2\r\n$600\r\n" + bytes(600) + b"\r\n$600\r\n"])
    assert len(parse([item] * 100)) == 100  # each for itself


def test_a_long_line_is_refused_before_it_ends() -> None:
    parser = Parser(inline=True)
    with pytest.raises(ProtocolError, match="a line is longer"):
        for _ in range(100):
            list(parser.feed(b"x" * 1000))
    assert len(parser._buffer) <= resp.MAX_LINE_NBYTES + 1000


def test_parsed_bytes_are_let_go() -> None:
    parser = Parser()
    for _ in range(100):
        list(parser.feed(encode(bytes(10_000)) + b"$5\r\nab"))
        list(parser.feed(b"cde\r\n"))
        assert not parser._buffer


# -- inline commands


def test_inline_commands() -> None:
    parser = Parser(inline=True)
    assert parse([b"PING\r\n", b"tkv.stat  x\ty\n", b"\r\n\n", b" \r\n", b"*1\r\n$4\r\nPING\r\n"], parser) == [
        [b"PING"],
        [b"tkv.stat", b"x", b"y"],
        [b"PING"],
    ]


def test_inline_commands_are_for_servers() -> None:
    with pytest.raises(ProtocolError, match="not RESP2"):
        parse([b"PING\r\n"])


def test_no_inline_command_within_an_array() -> None:
    with pytest.raises(ProtocolError, match="not RESP2"):
        parse([b"*2\r\n$1\r\na\r\nPING\r\n"], Parser(inline=True))


# -- bounds


def test_bounds_may_change_between_values() -> None:
    parser = Parser(inline=True, bounds=Bounds(bulk=8, items=2, line=64, value=40))
    values = parser.feed(b"*2\r\n$4\r\nAUTH\r\n$3\r\nabc\r\n*3\r\n$4\r\nECHO\r\n$9\r\n123456789\r\n$1\r\nx\r\n")
    assert next(values) == [b"AUTH", b"abc"]
    parser.bounds = Bounds(bulk=9, items=3, line=64, value=80)
    assert list(values) == [[b"ECHO", b"123456789", b"x"]]
    parser.bounds = Bounds(bulk=8, items=3, line=64, value=80)
    with pytest.raises(ProtocolError, match="bulk string of length 9; at most 8"):
        list(parser.feed(b"*1\r\n$9\r\n"))


@pytest.mark.parametrize(
    "wire, sentence",
    [
        (b"*3\r\n", "array of length 3; at most 2"),
        (b"x" * 64, "a line is longer than 64 bytes"),
        (b"*2\r\n$8\r\n12345678\r\n$8\r\n1234567", "longer than 20 bytes"),
    ],
)
def test_bounds_of_a_parser(wire: bytes, sentence: str) -> None:
    with pytest.raises(ProtocolError, match=sentence):
        parse([wire], Parser(inline=True, bounds=Bounds(bulk=8, items=2, line=64, value=20)))


def test_a_parser_knows_whether_a_value_has_begun_and_how_much_of_it_came() -> None:
    parser = Parser(inline=True)
    wire = b"*2\r\n$4\r\nECHO\r\n$5\r\nhello\r\n"
    for i in range(len(wire)):
        assert parser.mid_value == (i > 0)
        assert parser.num_taken == i
        values = list(parser.feed(wire[i : i + 1]))
    assert values == [[b"ECHO", b"hello"]]
    assert not parser.mid_value
    assert parser.num_taken == 0


# -- sinks


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=5), st.booleans(), st.data())
def test_what_a_sink_takes_arrives_there_however_it_is_cut(
    payloads: list[bytes], more: bool, data: st.DataObject
) -> None:
    """Received in pieces of any size, into the space where there is some, as whoever reads a socket does."""
    rooms = [bytearray(len(payload)) for payload in payloads]

    def sink(items: Sequence[Value], nbytes: int) -> list[memoryview] | None:
        if len(items) < 1:
            return None
        room = memoryview(rooms[len(items) - 1])
        assert nbytes == len(room)
        cut = data.draw(st.integers(0, nbytes))
        return [room[:cut], room[cut:]]  # either may be empty

    parser = Parser(sink=sink)
    rest = memoryview(encode([b"head", *payloads]) + (encode([b"next"]) if more else b""))
    values: list[Value] = []
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        space = parser.space()
        if space is None:
            values += parser.feed(bytes(rest[:size]))
        else:
            size = min(size, len(space))
            space[:size] = rest[:size]
            values += parser.filled(size)
        rest = rest[size:]
    placed = [Placed(len(p)) if p else b"" for p in payloads]
    assert values[0] == [b"head", *placed]
    assert [bytes(room) for room in rooms] == payloads
    assert values[1:] == ([[b"next"]] if more else [])
    assert not parser.mid_value


def test_a_sink_is_asked_for_the_outermost_array_alone_and_may_decline() -> None:
    asked: list[tuple[int, int]] = []

    def sink(items: Sequence[Value], nbytes: int) -> None:
        asked.append((len(items), nbytes))

    wire = encode([b"a", [b"bc"], b"def"]) + encode(b"ghij")
    assert parse([wire], Parser(sink=sink)) == [[b"a", [b"bc"], b"def"], b"ghij"]
    assert asked == [(0, 1), (2, 3)]


def test_a_sink_with_room_of_another_size_is_a_fault_of_ours() -> None:
    with pytest.raises(ValueError, match="3 bytes of room to a bulk string of 4"):
        parse([b"*1\r\n$4\r\n"], Parser(sink=lambda items, nbytes: [memoryview(bytearray(3))]))


def test_placed_strings_count_against_the_limit_and_end_where_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    def parser() -> Parser:
        return Parser(sink=lambda items, nbytes: [memoryview(bytearray(nbytes))])

    with pytest.raises(ProtocolError, match="does not end where its length says"):
        parse([b"*1\r\n$4\r\nabcdXX"], parser())
    monkeypatch.setattr(resp, "MAX_VALUE_NBYTES", 1000)
    with pytest.raises(ProtocolError, match="longer than 1000 bytes"):
        parse([b"*2\r\n$600\r\n" + bytes(600) + b"\r\n$600\r\n"], parser())
