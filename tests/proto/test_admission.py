"""Tests of admission: calls and connections that are admitted, wait, or are refused."""

from __future__ import annotations

import asyncio

import pytest

from koinon_proto.contract.errors import ResourceExhaustedError
from koinon_proto.server import admission
from koinon_proto.server.admission import Call, Lane, LaneLimits, Places, Share
from koinon_proto.server.connections import host_of

LIMITS = LaneLimits(
    connection=Share(calls=4, request_bytes=20, reply_bytes=100),
    host=Share(calls=8, request_bytes=30, reply_bytes=150),
    all=Share(calls=16, request_bytes=40, reply_bytes=200),
    waiting=6,
    message_bytes=10,
    patience_s=1.0,
)
A1, A2, A3 = "ipv4:10.0.0.1:1", "ipv4:10.0.0.1:2", "ipv4:10.0.0.1:3"
B1, B2, C1, D1 = "ipv4:10.0.0.2:1", "ipv4:10.0.0.2:2", "ipv4:10.0.0.3:1", "ipv4:10.0.0.4:1"


class Clock:
    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lane(clock: Clock) -> Lane:
    return Lane(LIMITS, clock)


async def begin(lane: Lane, peer: str, reply_bytes: int = 1) -> tuple[Call, asyncio.Task[None]]:
    """Return a call, and the task that waits for its admission."""
    call = lane.call(peer, reply_bytes)
    task = asyncio.ensure_future(call.admitted())
    await asyncio.sleep(0)
    return call, task


async def let_in(lane: Lane, peer: str, reply_bytes: int = 1) -> Call:
    call, task = await begin(lane, peer, reply_bytes)
    assert task.done()
    return call


async def test_calls_of_one_connection_wait_while_it_receives_its_share_and_others_go_on(
    lane: Lane,
) -> None:
    first, _second = await let_in(lane, A1), await let_in(lane, A1)
    third, waits = await begin(lane, A1)
    assert not waits.done()
    await let_in(lane, B1)  # another host
    first.received(2)  # it is known now how much it is: 2 + 10 of 20 leave no room for 10 more
    await asyncio.sleep(0)
    assert not waits.done()
    first.ended()
    await asyncio.sleep(0)
    assert waits.done()
    third.ended()


async def test_calls_that_end_leave_nothing_behind(lane: Lane) -> None:
    calls = [await let_in(lane, peer) for peer in (A1, A2, B1)]
    waiting, waits = await begin(lane, A1)
    another, waits_too = await begin(lane, A1)
    waits.cancel()
    calls[0].received(3)
    calls[0].hold(7)
    calls[0].replied(9)
    for call in (*calls, waiting, another, *calls):  # twice is as good as once
        call.ended()
    await asyncio.gather(waits, waits_too, return_exceptions=True)
    another.ended()
    lane.forget_idle()
    use = lane.all
    assert (use.calls, use.request_bytes, use.reply_bytes, lane.waiting) == (0, 0, 0, 0)
    for left in (lane._connections, lane._hosts, lane._queue, lane.receiving, lane.leaving):
        assert not left


async def test_the_first_call_of_a_connection_passes_its_hosts_limit_and_all_have_one(
    lane: Lane,
) -> None:
    for peer in (A1, A1, A2):
        await let_in(lane, peer)  # 30: the host's limit
    _, second_waits = await begin(lane, A2)
    assert not second_waits.done()
    await let_in(lane, A3)  # 40: the limit of all
    await let_in(lane, B1)  # 50: and a quarter
    _, waits = await begin(lane, C1)
    assert not waits.done()


async def test_connections_that_wait_are_let_in_by_turns(lane: Lane) -> None:
    held = [await let_in(lane, peer) for peer in (A1, A1, B1, B1, C1)]
    flood = [await begin(lane, A1) for _ in range(2)]
    _, other = await begin(lane, D1)
    for call in held[:2]:
        call.ended()
    await asyncio.sleep(0)
    assert [task.done() for _, task in flood] == [True, False]
    assert other.done()


async def test_too_many_that_wait_are_refused(lane: Lane) -> None:
    for peer in (A1, A1, B1, B1, C1):
        await let_in(lane, peer)
    for peer in (A1, A1, A2):
        await begin(lane, peer)
    with pytest.raises(ResourceExhaustedError, match="limit of 3"):
        await lane.call(A1).admitted()
    await begin(lane, B1)


async def test_answers_count_until_they_have_left_and_for_their_connection_first(
    lane: Lane,
) -> None:
    stopped = [await let_in(lane, A1) for _ in range(2)]
    stopped[0].hold(90)
    with pytest.raises(ResourceExhaustedError, match=r"of one connection .*limit of 100"):
        stopped[1].hold(90)
    stopped[0].replied(95)
    reader = await let_in(lane, B1)
    reader.hold(150)
    with pytest.raises(ResourceExhaustedError, match="limit of 250"):
        reader.hold(50)
    stopped[0].ended()
    assert lane.all.reply_bytes == 1 + 150  # one call has what it had reserved


async def test_a_members_connection_waits_for_itself_only(lane: Lane, clock: Clock) -> None:
    member = await let_in(lane, D1)
    member.received(1)
    member.trust()
    member.ended()
    for peer in (A1, A1, B1, B1, C1):
        await let_in(lane, peer)
    for _ in range(2):
        await let_in(lane, D1)
    _, waits = await begin(lane, D1)
    assert not waits.done()
    assert lane.call("ipv4:10.0.0.4:77").is_from_member_host()
    clock.s += 61
    assert not lane.call("ipv4:10.0.0.4:77").is_from_member_host()


async def test_slow_messages_are_cut_off_soon_if_other_connections_wait(
    lane: Lane, clock: Clock
) -> None:
    slow = [await let_in(lane, peer) for peer in (A1, A1, B1, B1, C1)]
    tasks = [asyncio.ensure_future(asyncio.sleep(60)) for _ in slow]
    for call, task in zip(slow, tasks, strict=True):
        call.task = task
    clock.s += 0.9
    _, waits = await begin(lane, A1)  # its own connection's
    lane.cut_slow()
    clock.s += 0.2
    lane.cut_slow()
    assert [call.is_cut for call in slow] == [False, False, True, True, True]
    waits.cancel()
    clock.s += 30
    lane.cut_slow()
    assert all(call.is_cut for call in slow)
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_connection_that_takes_no_answers_is_named(lane: Lane, clock: Clock) -> None:
    for peer, size in ((A1, 90), (B1, 20)):
        call = await let_in(lane, peer)
        call.received(1)
        call.replied(size)
    clock.s += 9
    assert lane.stuck_peer() is None
    clock.s += 2
    assert lane.stuck_peer() == A1  # half of what all may hold is held
    lane.all.limit = Share(calls=1, request_bytes=1, reply_bytes=10_000)
    assert lane.stuck_peer() is None
    clock.s += 60
    assert lane.stuck_peer() == A1


def test_places_are_a_connections_a_hosts_and_the_last_of_them_members(
    caplog: pytest.LogCaptureFixture,
) -> None:
    places = Places("streams", places=5, host=3, connection=2, reserved=1)
    taken = [places.place(peer) for peer in (A1, A1, A2, B1)]
    for place in taken:
        place.__enter__()
    for peer, limit in ((A1, 2), (A3, 3), (B1, 4)):
        with pytest.raises(ResourceExhaustedError, match=f"limit of {limit}"):
            places.place(peer).__enter__()
    assert caplog.messages == [f"no place resource='streams' limit=2 of={A1}"], "once a minute"
    lane = Lane(LIMITS)
    call = lane.call(B2)
    call.trust()
    admission.handling.set(call)
    with places.place(B2):
        assert places.taken == 5
        with pytest.raises(ResourceExhaustedError, match="limit of 5"):
            places.place(C1).__enter__()
    admission.handling.set(None)
    for place in taken:
        place.__exit__(None, None, None)
    assert not places._taken


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.7:5123", "10.0.0.7"),
        ("ipv6:%5B::1%5D:5123", "::/64"),
        ("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:80", "2001:db8:1:2::/64"),
        ("ipv6:%5B::ffff:10.0.0.7%5D:5123", "10.0.0.7"),
        ("unix:/tmp/x", "unix:/tmp/x"),
        ("ipv6:nonsense", "ipv6:nonsense"),
    ],
)
def test_host_of_a_peer(peer: str, host: str) -> None:
    assert host_of(peer) == host
