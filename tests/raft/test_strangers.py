"""Messages of those who are no members: they change nothing, and leave nothing behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from koinon_coordinator.core.raft import (
    TERM_JUMP_MAX,
    TERM_MAX,
    Configuration,
    HardState,
    HeartbeatRequest,
    LostEntriesError,
    Role,
    VoteRequest,
)
from koinon_coordinator.raft import StreamRaftTransport
from koinon_coordinator.raft.message_codec import MalformedMessageError, from_proto
from koinon_proto.contract import bounds_gen
from koinon_proto.contract.cluster_errors import DataDirectoryError
from koinon_proto.contract.errors import UnavailableError
from koinon_proto.v1.raft_pb2 import RaftBatch, RaftExchangeReply, RaftHello, RaftMessage
from tests.kit.addresses import free_address
from tests.kit.waiting import run, until

from .framed import Listener, refusal_of, stream_to
from .group import Group
from .in_process import InProcessGroup
from .memory import MemoryRaftStorage
from .test_transport import Endpoint

LEADERLESS_S = 5.1


def vote_request(term: int, sender: str = "x", **given: Any) -> VoteRequest:
    fields: dict[str, Any] = {"last_index": 9, "last_term": 0, "pre_vote": False, "transfer": True}
    return VoteRequest(term=term, sender=sender, to="a", **{**fields, **given})


def heartbeat(sender: str, term: int, commit_index: int) -> HeartbeatRequest:
    return HeartbeatRequest(term=term, sender=sender, to="a", commit_index=commit_index, round_id=1)


# -- the core


def test_stranger_is_not_listened_to_while_there_is_a_leader() -> None:
    group = Group("abc")
    group.elect("b")
    assert group["a"].leader_id == "b"
    assert not group["a"].listens_to("x", group.now)
    assert not group["b"].listens_to("x", group.now + 1000)  # it leads
    for member_id in "abc":
        assert group["a"].listens_to(member_id, group.now)


def test_stranger_is_listened_to_by_one_without_a_leader_whose_configuration_may_be_old() -> None:
    group = Group("abc")
    group.elect("b")
    assert not group["a"].listens_to("x", group.now + LEADERLESS_S - 0.2)
    assert group["a"].listens_to("x", group.now + LEADERLESS_S)


def test_stranger_is_listened_to_by_one_that_has_no_configuration_yet() -> None:
    group = Group("abc")
    group.add_process("d")
    assert group["d"].listens_to("a", group.now)


def test_commit_index_beyond_the_log_stops_a_member_only_if_a_member_says_it() -> None:
    group = Group("abc")
    group.now += LEADERLESS_S
    group["a"].step(heartbeat("x", 1, 10**9), group.now)
    group.take("a")
    assert (group["a"].leader_id, group.network) == (None, [])
    with pytest.raises(LostEntriesError):
        group["a"].step(heartbeat("b", 1, 10**9), group.now)


def test_term_that_no_group_can_have_reached_is_not_taken_over() -> None:
    group = Group("abc", terms={"a": 3})
    group["a"].step(vote_request(3 + TERM_JUMP_MAX + 1, "b"), group.now)
    assert group["a"].term == 3
    group["a"].step(vote_request(3 + TERM_JUMP_MAX, "b"), group.now)
    assert group["a"].term == 3 + TERM_JUMP_MAX


# -- the wire


def test_numbers_that_no_member_sends_are_malformed() -> None:
    request: Any = RaftMessage.AppendRequest
    for message in (
        RaftMessage(term=(1 << 64) - 1, timeout_now=RaftMessage.TimeoutNow()),
        RaftMessage(term=1, vote_request=RaftMessage.VoteRequest(last_term=2)),
        RaftMessage(term=1, heartbeat_request=RaftMessage.HeartbeatRequest(commit_index=1 << 63)),
        RaftMessage(term=1, append_request=request(previous_term=2)),
        RaftMessage(
            term=3,
            append_request=request(entry_terms=[3, 2], entry_kinds=[1, 1], entry_data=[b"", b""]),
        ),
    ):
        with pytest.raises(MalformedMessageError):
            from_proto(message, "b", "a")


def hello(sender: str, address: str, receiver: str = "b", group: str = "") -> RaftBatch:
    return RaftBatch(
        hello=RaftHello(
            protocol_version=1,
            member_id=sender,
            store_id="store",
            receiver_id=receiver,
            address=address,
            group=group,
        ),
        messages=[
            RaftMessage(term=1, vote_request=RaftMessage.VoteRequest(pre_vote=True)),
        ],
    )


def test_stranger_is_refused_and_nothing_of_it_is_kept_or_dialled() -> None:
    async def test() -> None:
        transport, endpoint = StreamRaftTransport(), Endpoint("b", free_address(), "store")
        endpoint.strangers = {f"x{i}" for i in range(30)} | {"x" * 1000}
        transport.attach(endpoint)
        listener = await Listener(transport, endpoint.address).start()
        for name in sorted(endpoint.strangers):
            reply = await refusal_of(listener.port.port, hello(name, "127.0.0.1:9"))
            assert reply.refusal in (
                RaftExchangeReply.REFUSAL_NOT_MEMBER,
                RaftExchangeReply.REFUSAL_MALFORMED,
            )
            assert len(reply.detail) < 400
        assert (endpoint.received, endpoint.pins) == ([], {})
        kept = (transport._learned, transport._common.heard_at, transport._peers, transport._taken)
        assert kept == ({}, {}, {}, {})
        await transport.close()
        await listener.stop()

    run(test)


def test_newer_stream_of_a_member_stands_for_the_one_before() -> None:
    async def test() -> None:
        transport, endpoint = StreamRaftTransport(), Endpoint("b", free_address(), "store")
        transport.attach(endpoint)
        listener = await Listener(transport, endpoint.address).start()
        before = await stream_to(listener.port.port, hello("a", ""))
        await until(lambda: endpoint.received, "it is taken")
        newer = await stream_to(listener.port.port, hello("a", ""))
        with pytest.raises(UnavailableError):
            await before.receive()
        newer.send(RaftBatch(messages=hello("a", "").messages))
        await until(lambda: len(endpoint.received) == 3, "the newer one goes on")
        newer.close()
        await transport.close()
        await listener.stop()

    run(test)


# -- a member


def test_member_with_a_term_that_cannot_be_gone_on_from_says_what_to_do() -> None:
    async def test() -> None:
        group = InProcessGroup("a")
        disk = group.disks["a"] = MemoryRaftStorage(Configuration(voters=group.addresses))
        disk.save(hard_state=HardState(term=(1 << 64) - 1), snapshot_write=None, entries=())
        with pytest.raises(DataDirectoryError, match="recover-coordinators"):
            await group.make("a").start()
        disk.save(hard_state=HardState(term=1 << 60), snapshot_write=None, entries=())
        member = group.make("a")
        await member.start()
        await until(lambda: member.status().role is Role.LEADER, "it leads")
        await member.stop()

    asyncio.run(test())


def test_bound_of_terms_is_that_of_the_wire() -> None:
    assert TERM_MAX == bounds_gen.TERM
