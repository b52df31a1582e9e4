"""Single operations in the Redis protocol, without I/O: commands, replies, deadlines."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import hiredis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from koinon.core import resp
from koinon.core.batching import Kind, PendingOperation
from koinon.core.node_clock import NodeClock, of_welcome
from koinon.driver.deadlines import Deadlines
from koinon.driver.resp.replies import error_of
from koinon_proto.contract import convert
from koinon_proto.contract.errors import ConditionFailedError, UnsupportedVersionError


def single(kind: Kind, key: bytes = b"key", **options: Any) -> PendingOperation:
    given: dict[str, Any] = {"deadline": 5.0, "timeout_ms": 5_000}
    return PendingOperation(kind, key, 0, **given | options)


def parsed(command: bytes) -> list[bytes]:
    reader = hiredis.Reader()
    reader.feed(command)
    arguments: list[bytes] = reader.gets()
    assert not reader.has_data()
    return arguments


def sent(operation: PendingOperation, clock: NodeClock | None = None) -> list[bytes]:
    return parsed(b"".join(resp.command(operation, 7, "id/1", clock)))


def test_command_of_each_kind_has_its_arguments_in_order() -> None:
    put = single(Kind.PUT, value=b"v", ttl_ms=9, if_version=0, durability="primary")
    assert sent(single(Kind.GET)) == [b"KOINON.GET", b"key", b"7", b"id/1"]
    assert sent(single(Kind.GET_ENTRY)) == [b"KOINON.ENTRY", b"key", b"7", b"id/1"]
    assert sent(put) == [b"KOINON.PUT", b"key", b"v", b"7", b"9", b"0", b"1", b"id/1", b""]
    plain = sent(single(Kind.PUT, value=b""))
    assert plain == [b"KOINON.PUT", b"key", b"", b"7", b"0", b"", b"0", b"id/1", b""]
    delete = single(Kind.DELETE, if_version=(1 << 64) - 1)
    version = b"18446744073709551615"
    assert sent(delete) == [b"KOINON.DELETE", b"key", b"7", version, b"0", b"id/1", b""]
    assert sent(single(Kind.EXISTS)) == [b"KOINON.EXISTS", b"key", b"7", b"id/1"]
    increment = sent(single(Kind.INCREMENT, by=-(1 << 63), ttl_ms=9))
    by = b"-9223372036854775808"
    assert increment == [b"KOINON.INCREMENT", b"key", by, b"9", b"7", b"0", b"id/1", b""]
    touch = sent(single(Kind.TOUCH, durability="primary"))
    assert touch == [b"KOINON.TOUCH", b"key", b"0", b"7", b"1", b"id/1", b""]
    get_or_put = sent(single(Kind.GET_OR_PUT, value=b"v", ttl_ms=9))
    assert get_or_put == [b"KOINON.GETORPUT", b"key", b"v", b"9", b"7", b"0", b"id/1", b""]


def test_write_says_until_when_it_may_be_taken_up_by_the_nodes_clock() -> None:
    clock = of_welcome(b"n1 70000", asked_at=2.0)
    assert clock is not None
    for kind in (Kind.PUT, Kind.DELETE, Kind.INCREMENT, Kind.TOUCH, Kind.GET_OR_PUT):
        assert sent(single(kind, deadline=5.0), clock)[-1] == b"73001"
    assert sent(single(Kind.GET, deadline=5.0), clock)[-1] == b"id/1"
    assert [of_welcome(reply, 2.0) for reply in (b"n1", b"n1 x", b"n1 " + b"9" * 30)] == [None] * 3


@given(
    asked_at=st.floats(0, 1e6),
    opening_s=st.floats(0, 1),
    way_s=st.floats(0, 10),
    ahead=st.floats(0, 1e9),
)
def test_time_of_the_node_is_never_before_the_deadline_and_late_by_the_opening_at_most(
    asked_at: float, opening_s: float, way_s: float, ahead: float
) -> None:
    """``ahead``: by so many seconds the node's clock is ahead of the client's."""
    clock = NodeClock(asked_at, int(1000 * (asked_at + opening_s + ahead)))
    deadline = asked_at + way_s
    taken_until = clock.ms_at(deadline) / 1000 - ahead
    assert deadline - 0.001 <= taken_until <= deadline + opening_s + 0.002


def test_hello_names_version_cluster_keyspace_and_token() -> None:
    assert parsed(resp.hello("c1")) == [b"KOINON.HELLO", b"2", b"c1", b"0"]
    assert parsed(resp.hello("c1", 7)) == [b"KOINON.HELLO", b"2", b"c1", b"7"]
    assert parsed(resp.hello("c1", 7, "t")) == [b"KOINON.HELLO", b"2", b"c1", b"7", b"t"]


@given(key=st.binary(min_size=1, max_size=500), value=st.binary(max_size=40_000))
def test_command_holds_any_key_and_value(key: bytes, value: bytes) -> None:
    assert sent(single(Kind.PUT, key, value=value))[1:3] == [key, value]
    assert sent(single(Kind.GET, key))[1] == key


def test_command_of_a_large_value_does_not_copy_it() -> None:
    value = b"x" * 100_000
    begin, middle, end = resp.command(single(Kind.PUT, value=value), 7, "id/1")
    assert middle is value
    assert len(begin) + len(end) < 200


@pytest.mark.parametrize(
    ("kind", "reply", "result"),
    [
        (Kind.GET, b"", b""),
        (Kind.GET, None, None),
        (Kind.GET_ENTRY, None, None),
        (Kind.GET_ENTRY, [b"v", b"18446744073709551615", b"0"], (b"key", b"v", 2**64 - 1, None)),
        (Kind.GET_ENTRY, [b"v", 5, 6], (b"key", b"v", 5, 6)),
        (Kind.PUT, b"18446744073709551615", 2**64 - 1),
        (Kind.DELETE, 1, True),
        (Kind.DELETE, 0, False),
        (Kind.EXISTS, 1, True),
        (Kind.TOUCH, 0, False),
        (Kind.INCREMENT, -(1 << 63), -(1 << 63)),
        (Kind.GET_OR_PUT, b"there", b"there"),
        (Kind.GET_OR_PUT, None, b""),
    ],
)
def test_reply_is_the_result(kind: Kind, reply: Any, result: Any) -> None:
    found = resp.result_of(single(kind), reply)
    assert found == result
    assert type(found) is type(result) or kind is Kind.GET_ENTRY


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("reply", ["OK", 7.0, [], [b"a"], [b"a", b"b", b"c"], [[], 1, 2], {}])
def test_reply_of_another_kind_is_refused(kind: Kind, reply: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (whatever it says)
        resp.result_of(single(kind), reply)


def test_error_line_gives_the_error_back_whole() -> None:
    error = ConditionFailedError(expected_version=3, current_version=4)
    whole = b64encode(convert.error_to_proto(error).SerializeToString()).decode()
    found = error_of(f"KOINON {whole} id/1")
    assert isinstance(found, ConditionFailedError)
    assert (found.expected_version, found.current_version) == (3, 4)


@pytest.mark.parametrize("line", ["ERR broken", "KOINON", "MOVED 1 host:1", "KOINON //8= id"])
def test_error_line_that_holds_no_error_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="ours"):
        error_of(line)


def test_error_line_of_a_command_that_is_not_known_is_of_another_version() -> None:
    assert isinstance(error_of("ERR unknown command 'KOINON.SCAN'"), UnsupportedVersionError)


async def test_deadlines_end_operations_in_turn_and_leave_out_what_has_ended() -> None:
    ended: list[bytes] = []
    now = 100.0

    deadlines = Deadlines(lambda: now)
    made = {
        key: single(Kind.GET, key, deadline=deadline)
        for key, deadline in ((b"late", 107.0), (b"gone", 103.0), (b"soon", 103.004))
    }
    for one in made.values():
        one.on_done = lambda one: ended.append(one.key)
        deadlines.add(one)
    deadlines.discard(made[b"gone"])
    deadlines._expire()
    assert ended == []
    now = 103.003
    deadlines._expire()
    assert ended == [], "never before its time"
    now = 103.5
    deadlines._expire()
    assert ended == [b"soon"]
    now = 110.0
    deadlines._expire()
    assert ended == [b"soon", b"late"]
    assert not deadlines._due
    deadlines.close()
