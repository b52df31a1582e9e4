"""Commands out of bytes: whole whatever the cuts, and refused before they take room."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koinon_node.resp import wire
from koinon_node.resp.command_reader import CommandReader
from tests.node.kit.resp_client import packed

LIMIT = 10_000
arguments = st.one_of(
    st.binary(max_size=40), st.from_regex(rb"[*%~>|]?[0-9]{0,12}", fullmatch=True)
)
commands = st.lists(arguments, min_size=1, max_size=5)


@given(st.lists(commands, max_size=6), st.data())
def test_commands_come_out_as_they_went_in_wherever_the_bytes_are_cut(
    sent: list[list[bytes]], data: st.DataObject
) -> None:
    stream = b"".join(packed(*command) for command in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reader, taken = CommandReader(LIMIT), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        taken += reader.feed(stream[start:end])
    assert taken == sent


def fed(stream: bytes, size: int, limit: int = LIMIT) -> tuple[list[list[bytes]], CommandReader]:
    """Return the commands in a stream that comes in pieces of this size, and who has read it."""
    reader = CommandReader(limit)
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    return [command for piece in pieces for command in reader.feed(piece)], reader


@given(st.binary(max_size=200), st.integers(1, 200))
def test_garbage_comes_to_the_same_wherever_it_is_cut(garbage: bytes, size: int) -> None:
    whole, cut = fed(garbage, 200), fed(garbage, size)
    assert (whole[0], whole[1].fault) == (cut[0], cut[1].fault)
    assert all(type(argument) is bytes for command in whole[0] for argument in command)


@given(
    st.lists(arguments, min_size=40, max_size=200),
    st.integers(1_024, 9_000),
    st.none() | st.tuples(st.integers(0, 20_000), st.sampled_from(b"$*+-:0129a\r\n")),
)
def test_long_commands_come_to_the_same_wherever_they_are_cut(
    words: list[bytes], size: int, damage: tuple[int, int] | None
) -> None:
    stream = bytearray(packed(*words) + packed("PING"))
    if damage is not None:
        stream[damage[0] % len(stream)] = damage[1]
    whole, cut = fed(bytes(stream), 1, 1 << 20), fed(bytes(stream), size, 1 << 20)
    assert (whole[0], whole[1].fault) == (cut[0], cut[1].fault)
    assert whole[1].held_bytes == cut[1].held_bytes


@pytest.mark.parametrize("size", [1, 7, 1_000_000])
@pytest.mark.parametrize(
    ("sent", "fault"),
    [
        (b"*1000000000\r\n", "invalid multibulk length"),
        (b"*1048577\r\n", "invalid multibulk length"),
        (b"*a\r\n", "invalid multibulk length"),
        (b"*1" + b"0" * 40, "invalid multibulk length"),
        (b"*2\r\n*10000\r\n", "expected '$', got '*'"),
        (b"*2\r\n*100\r\n", "expected '$', got '*'"),
        (b"*9999\r\n" * 2, "expected '$', got '*'"),
        (b"*2\r\n$1\r\na\r\n*100\r\n", "expected '$', got '*'"),
        (b"*1\r\n$1\r\na\r\n*1000000000\r\n", "invalid multibulk length"),
        (b"*1\r\n:1\r\n", "expected '$', got ':'"),
        (b"*1\r\n\xff1\r\n", "expected '$', got '\\xff'"),
        (b"*1\r\n$-1\r\n", "invalid bulk length"),
        (b"*1\r\n$10001\r\n", "invalid bulk length"),
        (b"*2\r\n$6000\r\n" + b"a" * 6000 + b"\r\n$4000\r\n", "invalid bulk length"),
        (b'SET k "a\r\n', "unbalanced quotes in request"),
        (b'SET k "a"b\r\n', "unbalanced quotes in request"),
        (b"a" * 10_001, "too big inline request"),
        (b"POST / HTTP/1.1\r\n", "this is no HTTP server"),
        (b"Host: x\r\n", "this is no HTTP server"),
    ],
)
def test_what_is_no_command_is_refused_and_what_came_before_it_is_not(
    sent: bytes, fault: str, size: int
) -> None:
    taken, reader = fed(packed("SET", "a", "1") + packed("PING") + sent + packed("PING"), size)
    assert taken[:2] == [[b"SET", b"a", b"1"], [b"PING"]]
    assert reader.fault == fault
    assert reader.held_bytes == 0
    assert reader.feed(packed("PING")) == []


@pytest.mark.parametrize("size", [1, 7, 1_000_000])
@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"PING\r\n", [b"PING"]),
        (b"PING\n", [b"PING"]),
        (b"  set\tk  v \r\n", [b"set", b"k", b"v"]),
        (rb'SET k "a b\x41\n\"\q"' + b"\r\n", [b"SET", b"k", b'a bA\n"q']),
        (rb"SET k 'a \x41\'' ''" + b"\r\n", [b"SET", b"k", rb"a \x41'", b""]),
        (b"+OK\r\n", [b"+OK"]),
        (b"%1000000000\r\n", [b"%1000000000"]),
    ],
)
def test_lines_are_commands_between_others(sent: bytes, words: list[bytes], size: int) -> None:
    before, after = [b"GET", b"\r\n*"], [b"ECHO", b"x"]
    nothing = b"\r\n\n*0\r\n*-1\r\n"
    stream = packed(*before) + sent + nothing + packed(*after)
    assert fed(stream, size)[0] == [before, words, after]


def test_length_beyond_the_limit_is_refused_before_its_bytes_come() -> None:
    reader = CommandReader(LIMIT)
    assert reader.feed(b"*2\r\n$3\r\nGET\r\n$100000\r\n") == []
    assert reader.fault == "invalid bulk length"


@pytest.mark.parametrize("size", [1_009, 100_000, 100_000_000])
def test_large_commands_come_out_and_their_bytes_count_meanwhile(size: int) -> None:
    sent = [[b"*999999"] * 150, [b"a"], [b"b"] * 20_000, [b"\r\n*100\r\n" * 9, b"c" * 300_000]]
    taken, reader = fed(b"".join(packed(*command) for command in sent), size, 3_000_000)
    assert taken == sent
    reader.feed(b"*9999\r\n$1\r\na\r\n$500000\r\nbb")
    assert reader.held_bytes >= 3 + 2
    assert reader.coming_bytes == 500_000


def test_commands_come_one_by_one_and_the_next_may_have_another_limit() -> None:
    reader = CommandReader(200, one_by_one=True)
    assert reader.feed(packed("AUTH", "t") + packed("SET", "k", b"v" * 900)) == [[b"AUTH", b"t"]]
    reader.limit, reader.one_by_one = LIMIT, False
    assert reader.feed(b"") == [[b"SET", b"k", b"v" * 900]]


def test_nil_is_that_of_the_version_at_any_depth_and_never_within_a_value() -> None:
    inside = wire.bulk(b"$-1\r\n*-1\r\n")
    replies = [wire.NIL, inside, wire.array([wire.NIL, inside, wire.NIL_ARRAY]), wire.ONE]
    nil = b"_\r\n"
    expected = nil + inside + wire.array([nil, inside, nil]) + wire.ONE
    assert wire.in_resp3(b"".join(replies)) == expected
    assert wire.in_resp3(wire.OK) == wire.OK


def test_errors_stay_on_one_line() -> None:
    assert wire.error("ERR a\r\n+OK") == b"-ERR a  +OK\r\n"


def test_maps_are_arrays_in_the_second_version() -> None:
    pairs = [(wire.bulk(b"a"), wire.integer(1))]
    assert wire.map_of(pairs, resp3=True) == b"%1\r\n$1\r\na\r\n:1\r\n"
    assert wire.map_of(pairs, resp3=False) == b"*2\r\n$1\r\na\r\n:1\r\n"
