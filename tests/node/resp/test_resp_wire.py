"""Commands out of bytes: whole whatever the cuts, and refused before they take room."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koinon_node.resp import wire
from koinon_node.resp.wire import CommandReader, ProtocolError
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


@given(st.binary(max_size=200))
def test_garbage_is_commands_or_a_protocol_error(garbage: bytes) -> None:
    try:
        for command in CommandReader(LIMIT).feed(garbage):
            assert all(type(argument) is bytes for argument in command)
    except ProtocolError:
        pass


@pytest.mark.parametrize(
    "sent",
    [
        b"*1000000000\r\n",
        b"*10000\r\n",
        b"*2\r\n*10000\r\n",
        b"*2\r\n*100\r\n",
        b"*9999\r\n" * 2,
        b"*2\r\n$1\r\na\r\n*100\r\n",
        b"*2\r\n*1000000000\r\n",
        b"*1\r\n$1\r\na\r\n*1000000000\r\n",
        b"%1000000000\r\n",
        b"PING\r\n",
        b"+OK\r\n",
        b"*1\r\n:1\r\n",
        b"*1\r\n$-1\r\n",
        b"*-1\r\n",
    ],
)
def test_what_is_no_command_is_refused(sent: bytes) -> None:
    with pytest.raises(ProtocolError):
        CommandReader(LIMIT).feed(sent)
    reader = CommandReader(LIMIT)
    with pytest.raises(ProtocolError):
        list(map(reader.feed, [sent[at : at + 1] for at in range(len(sent))]))


def test_command_beyond_the_limit_is_refused_while_it_comes_in() -> None:
    reader = CommandReader(LIMIT)
    reader.feed(b"*2\r\n$3\r\nGET\r\n$100000\r\n")
    with pytest.raises(ProtocolError, match="more than 10000 bytes"):
        reader.feed(b"x" * LIMIT)


def test_large_commands_come_out_and_their_room_counts_meanwhile() -> None:
    sent = [[b"*999"] * 150, [b"a"], [b"b"] * 9_999, [b"*100\r\n"]]
    stream = b"".join(packed(*command) for command in sent)
    for size in (1, 7, len(stream)):
        reader = CommandReader(1_000_000)
        taken = [
            c for at in range(0, len(stream), size) for c in reader.feed(stream[at : at + size])
        ]
        assert taken == sent
    reader.feed(b"*9999\r\n$1")
    assert reader.held_bytes > 8 * 9_999


def test_errors_stay_on_one_line() -> None:
    assert wire.error("ERR a\r\n+OK") == b"-ERR a  +OK\r\n"


def test_maps_are_arrays_in_the_second_version() -> None:
    pairs = [(wire.bulk(b"a"), wire.integer(1))]
    assert wire.map_of(pairs, resp3=True) == b"%1\r\n$1\r\na\r\n:1\r\n"
    assert wire.map_of(pairs, resp3=False) == b"*2\r\n$1\r\na\r\n:1\r\n"
