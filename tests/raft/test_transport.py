"""Messages on the wire, and what every transport between members promises."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, get_args

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from koinon_coordinator.core.raft import (
    AppendRequest,
    Configuration,
    Entry,
    EntryKind,
    HeartbeatReply,
    Message,
)
from koinon_coordinator.raft import (
    RaftTransport,
    StreamRaftTransport,
    TransportConfig,
    message_codec,
)
from koinon_coordinator.raft.errors import MemberStoppedError
from koinon_coordinator.raft.message_codec import MalformedMessageError, from_proto, to_proto
from koinon_coordinator.services.peer_port import PeerPort
from koinon_proto.v1 import raft_pb2_grpc
from koinon_proto.v1.raft_pb2 import RaftBatch, RaftExchangeReply, RaftHello, RaftMessage
from tests.kit.addresses import free_address
from tests.kit.waiting import run, succeeds, until
from tests.proto.records import SCALARS, records

from . import test_scenarios_changes, test_scenarios_snapshots
from .framed import peer_port
from .group import Group
from .memory import MemoryRaftNetwork

# -- wire forms


def test_convert_every_message_comes_back() -> None:
    """Send the messages of two scenarios once more through the wire form."""
    seen: set[type[object]] = set()
    deliver = Group.deliver

    def checked(group: Group, message: Any) -> None:
        wire = RaftMessage.FromString(to_proto(message).SerializeToString())
        assert from_proto(wire, message.sender, message.to) == message
        seen.add(type(message))
        deliver(group, message)

    Group.deliver = checked  # type: ignore[method-assign,assignment]
    try:
        test_scenarios_snapshots.test_snapshot_lagging_follower_catches_up_in_chunks()
        test_scenarios_changes.test_transfer_target_takes_over_once_it_has_caught_up()
    finally:
        Group.deliver = deliver  # type: ignore[method-assign]
    assert len(seen) == 9


ENTRIES = st.lists(st.tuples(SCALARS[int], st.sampled_from(EntryKind), SCALARS[bytes]), max_size=3)
SPECIAL: dict[Any, st.SearchStrategy[Any]] = {
    Configuration: st.just(Configuration(voters={"a": "a:1"}, learners={"b": "b:1"})),
    "entries": st.just(()),
}


@pytest.mark.parametrize("kind", [*get_args(Message)])
@given(data=st.data())
def test_convert_any_message_comes_back(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(records(kind, SPECIAL))
    if isinstance(message, AppendRequest):
        entries = data.draw(ENTRIES)
        first = message.previous_index + 1
        message = replace(
            message,
            term=2**32,
            previous_term=0,
            entries=tuple(Entry(first + i, *e) for i, e in enumerate(sorted(entries))),
        )
    wire = RaftMessage.FromString(to_proto(message).SerializeToString())
    envelope = {"term": message.term, "sender": message.sender, "to": message.to}
    name = wire.WhichOneof("body")
    assert name is not None
    assert message_codec._BODIES[name].decode(getattr(wire, name), **envelope) == message


def test_convert_malformed_messages_are_refused() -> None:
    request = RaftMessage.AppendRequest
    malformed = [
        RaftMessage(term=1),
        RaftMessage(term=1, append_request=request(entry_terms=[1])),
        RaftMessage(
            append_request=request(entry_terms=[1], entry_kinds=[7], entry_data=[b""])  # type: ignore
        ),
        RaftMessage(snapshot_chunk=RaftMessage.SnapshotChunk(configuration=b"{}")),
    ]
    for message in malformed:
        with pytest.raises(MalformedMessageError):
            from_proto(message, "a", "b")


# -- transports: one contract


class Endpoint:
    """A member's side of a transport, which keeps what comes."""

    def __init__(self, member_id: str, address: str, store_id: str) -> None:
        self.member_id, self.address, self.store_id = member_id, address, store_id
        self.group = "koinon"
        self.received: list[Any] = []
        self.refused_by: list[str] = []
        self.pins: dict[str, str] = {}
        self.strangers: set[str] = set()
        self.stopped = False

    def listens_to(self, member_id: str, group: str) -> bool:
        return member_id not in self.strangers

    def on_messages(self, messages: Any) -> None:
        self.received.extend(messages)

    async def is_known_store(self, member_id: str, store_id: str) -> bool:
        if self.stopped:
            raise MemberStoppedError(reason="not running")
        return self.pins.setdefault(member_id, store_id) == store_id

    def on_store_refused(self, refused_by: str) -> None:
        self.refused_by.append(refused_by)


def reply(sender: str, to: str, round_id: int = 1) -> HeartbeatReply:
    return HeartbeatReply(term=1, sender=sender, to=to, round_id=round_id)


async def send_until(transport: RaftTransport, condition: Callable[[], object]) -> None:
    """Say the same to `b` again and again, as Raft does, until it has had its effect."""

    def send() -> object:
        transport.send([reply("a", "b")])
        return condition()

    await until(send, "a message has its effect")


class Wires:
    """Makes transports of one kind that can reach one another."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.network = MemoryRaftNetwork()
        self.servers: list[Any] = []
        self.transports: list[RaftTransport] = []
        self.ports: list[PeerPort] = []

    async def make(self, member_id: str, store_id: str = "store") -> tuple[Endpoint, Any]:
        address = free_address()
        transport: Any
        if self.kind == "memory":
            transport = self.network.transport(address)
        else:
            transport = StreamRaftTransport()
            if self.kind == "frames":
                self.ports.append(await peer_port(transport))
            server = grpc.aio.server()
            transport.add_to_server(server)
            server.add_insecure_port(address)
            await server.start()
            self.servers.append(server)
        endpoint = Endpoint(member_id, address, store_id)
        transport.attach(endpoint)
        self.transports.append(transport)
        return endpoint, transport

    async def close(self) -> None:
        for transport in self.transports:
            await transport.close()
        for port in self.ports:
            await port.stop()
        for server in self.servers:
            await server.stop(0)


@pytest.fixture(params=["memory", "grpc", "frames"])
def wire_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def with_wires(kind: str, test: Callable[[Wires], Coroutine[Any, Any, None]]) -> None:
    async def wired() -> None:
        wires = Wires(kind)
        try:
            await test(wires)
        finally:
            await wires.close()

    run(wired)


def test_transport_delivers_to_the_peer_named(wire_kind: str) -> None:
    async def test(wires: Wires) -> None:
        (a, to_others), (b, _), (c, _) = [await wires.make(m) for m in "abc"]
        to_others.set_peers({"a": a.address, "b": b.address, "c": c.address})
        to_others.send([reply("a", "b", n) for n in range(1000)])
        to_others.send([reply("a", "nobody")])
        await until(lambda: len(b.received) == 1000, "all is there")
        assert b.received == [reply("a", "b", n) for n in range(1000)]
        assert c.received == []

    with_wires(wire_kind, test)


def test_transport_answers_a_sender_it_has_no_address_of(wire_kind: str) -> None:
    """As a member that joins must: it hears the leader before it knows the configuration."""

    async def test(wires: Wires) -> None:
        (a, from_a), (b, from_b) = await wires.make("a"), await wires.make("b")
        from_a.set_peers({"b": b.address})
        from_b.set_peers({})
        from_a.send([reply("a", "b")])
        await until(lambda: b.received, "it is there")
        from_b.send([reply("b", "a")])
        await until(lambda: a.received, "the answer is there")

    with_wires(wire_kind, test)


def test_transport_peer_that_is_configured_no_more_is_still_answered(wire_kind: str) -> None:
    """A leader that removes itself needs its followers' answers to commit that."""

    async def test(wires: Wires) -> None:
        (a, from_a), (b, from_b) = await wires.make("a"), await wires.make("b")
        from_a.set_peers({"a": a.address, "b": b.address})
        from_b.set_peers({"a": a.address, "b": b.address})
        from_a.send([reply("a", "b")])
        from_b.send([reply("b", "a")])
        await until(lambda: a.received and b.received, "both are there")
        from_b.set_peers({"b": b.address})
        from_b.send([reply("b", "a")])
        await until(lambda: len(a.received) == 2, "another is there")

    with_wires(wire_kind, test)


def test_transport_member_with_another_store_is_refused(wire_kind: str) -> None:
    async def test(wires: Wires) -> None:
        (a, from_a), (b, _) = await wires.make("a", "new disk"), await wires.make("b")
        b.pins["a"] = "old disk"
        from_a.set_peers({"b": b.address})
        await send_until(from_a, lambda: a.refused_by)
        assert a.refused_by[0] == "b"
        assert b.received == []

    with_wires(wire_kind, test)


def test_transport_member_that_nobody_can_judge_is_not_refused(wire_kind: str) -> None:
    """The other one stops, or its disk fails, while it wants to remember a newcomer's store."""

    async def test(wires: Wires) -> None:
        a, from_a = await wires.make("a")
        b, _ = await wires.make("b")
        from_a.set_peers({"b": b.address})
        b.stopped = True
        for _ in range(20):
            from_a.send([reply("a", "b")])
            await asyncio.sleep(0.01)
        assert a.refused_by == []
        assert b.received == []
        b.stopped = False
        await send_until(from_a, lambda: b.received)

    with_wires(wire_kind, test)


def test_transport_member_refused_by_another_group_goes_on(wire_kind: str) -> None:
    """An address was reused: what a stranger remembers of our member's name means nothing."""

    async def test(wires: Wires) -> None:
        (a, from_a), (b, _) = await wires.make("a", "new disk"), await wires.make("b")
        (c, _) = await wires.make("c")
        b.pins["a"] = "old disk"
        b.group = "another"
        from_a.set_peers({"b": b.address, "c": c.address})
        from_a.send([reply("a", "b"), reply("a", "c")])
        await until(lambda: c.received, "the other message is there")
        assert b.received == []
        assert a.refused_by == []

    with_wires(wire_kind, test)


# -- gRPC alone


async def exchange(address: str, *batches: RaftBatch) -> RaftExchangeReply:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = raft_pb2_grpc.RaftStub(channel)
        return await stub.Exchange(iter(batches))  # type: ignore[no-any-return]


def hello(**changes: Any) -> RaftHello:
    fields = {
        "protocol_version": 1,
        "group": "koinon",
        "member_id": "a",
        "store_id": "store",
        "receiver_id": "b",
    }
    return RaftHello(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"protocol_version": 9}, RaftExchangeReply.REFUSAL_VERSION),
        ({"group": "other"}, RaftExchangeReply.REFUSAL_GROUP),
        ({"receiver_id": "c"}, RaftExchangeReply.REFUSAL_RECEIVER),
        ({"store_id": "changed"}, RaftExchangeReply.REFUSAL_STORE_CHANGED),
        ({"member_id": ""}, RaftExchangeReply.REFUSAL_MALFORMED),
    ],
)
def test_grpc_stream_with_a_wrong_hello_is_refused(changes: dict[str, Any], refusal: int) -> None:
    async def test(wires: Wires) -> None:
        b, _ = await wires.make("b")
        b.pins["a"] = "store"
        message = to_proto(reply("a", "b"))
        answer = await exchange(b.address, RaftBatch(hello=hello(**changes), messages=[message]))
        assert answer.refusal == refusal
        assert answer.detail
        assert b.received == []

    with_wires("grpc", test)


def test_grpc_stream_without_hello_or_with_nonsense_is_refused() -> None:
    async def test(wires: Wires) -> None:
        b, transport = await wires.make("b")
        good = to_proto(reply("a", "b"))
        first = await exchange(b.address, RaftBatch(messages=[good]))
        assert first.refusal == RaftExchangeReply.REFUSAL_MALFORMED
        second = await exchange(
            b.address, RaftBatch(hello=hello()), RaftBatch(messages=[good, RaftMessage(term=1)])
        )
        assert second.refusal == RaftExchangeReply.REFUSAL_MALFORMED
        assert b.received == []
        assert transport.counters["malformed_messages"] == 1

    with_wires("grpc", test)


def test_grpc_queue_is_bounded_and_drops_the_oldest() -> None:
    async def test() -> None:
        transport = StreamRaftTransport(config=TransportConfig(queue_messages_max=10))
        endpoint = Endpoint("a", "", "store")
        transport.attach(endpoint)
        address = free_address()
        transport.set_peers({"b": address})
        transport.send([reply("a", "b", n) for n in range(100)])
        assert transport.counters["dropped_queue_full"] == 90
        await transport.close()

    run(test)


def test_grpc_peer_that_comes_later_is_reached() -> None:
    async def test() -> None:
        address = free_address()
        sender, receiver = StreamRaftTransport(), StreamRaftTransport()
        sender.attach(Endpoint("a", "", "store"))
        endpoint = Endpoint("b", address, "store")
        receiver.attach(endpoint)
        sender.set_peers({"b": address})
        await send_until(sender, lambda: sender.counters["stream_ends"] >= 2)
        server = grpc.aio.server()
        receiver.add_to_server(server)
        server.add_insecure_port(address)
        await server.start()
        await send_until(sender, lambda: endpoint.received)
        await sender.close()
        await receiver.close()
        await server.stop(0)

    run(test)


async def served(transport: StreamRaftTransport, address: str) -> Any:
    server = grpc.aio.server()
    transport.add_to_server(server)
    server.add_insecure_port(address)
    await server.start()
    return server


def test_grpc_configured_peers_know_a_member_that_says_nothing() -> None:
    """One that listens later, too."""

    async def test() -> None:
        first, later = free_address(), free_address()
        sender, receivers = StreamRaftTransport(), [StreamRaftTransport(), StreamRaftTransport()]
        sender.attach(Endpoint("a", "", "store"))
        endpoints = [Endpoint("b", first, "store"), Endpoint("c", later, "store")]
        for receiver, endpoint in zip(receivers, endpoints, strict=True):
            receiver.attach(endpoint)
        servers = [await served(receivers[0], first)]
        sender.set_peers({"b": first, "c": later})
        await until(lambda: endpoints[0].pins == {"a": "store"}, "b knows it")
        await until(lambda: sender.counters["stream_ends"] >= 1, "c was looked for")
        servers.append(await served(receivers[1], later))
        await until(lambda: endpoints[1].pins == {"a": "store"}, "c knows it")
        assert endpoints[0].received == endpoints[1].received == []
        for transport in (sender, *receivers):
            await transport.close()
        for server in servers:
            await server.stop(0)

    run(test)


def test_grpc_hello_is_repeated_for_one_who_took_the_member_for_a_stranger() -> None:
    async def test() -> None:
        address = free_address()
        sender = StreamRaftTransport(config=TransportConfig(hello_interval_ms=20))
        sender.attach(Endpoint("a", "", "store"))
        receiver, endpoint = StreamRaftTransport(), Endpoint("b", address, "store")
        hellos: list[str] = []

        async def is_known_store(member_id: str, store_id: str) -> bool:
            hellos.append(store_id)
            return True

        endpoint.is_known_store = is_known_store  # type: ignore[method-assign]
        receiver.attach(endpoint)
        server = await served(receiver, address)
        sender.set_peers({"b": address})
        await until(lambda: len(hellos) >= 3, "three hellos")
        assert sender.counters["stream_ends"] == 0
        await sender.close()
        await receiver.close()
        await server.stop(0)

    run(test)


def test_grpc_stream_that_was_idle_is_not_given_up_at_its_next_message() -> None:
    goes_on = False

    async def test() -> None:
        nonlocal goes_on
        address = free_address()
        sender = StreamRaftTransport(config=TransportConfig(silence_ms=100))
        sender.attach(Endpoint("a", "", "store"))
        receiver, endpoint = StreamRaftTransport(), Endpoint("b", address, "store")
        receiver.attach(endpoint)
        server = await served(receiver, address)
        sender.set_peers({"b": address})
        await until(lambda: endpoint.pins, "b knows it")
        ends = sender.counters["stream_ends"]

        def ended() -> bool:
            return sender.counters["stream_ends"] > ends

        for count in range(1, 4):
            await asyncio.sleep(0.15)  # longer than the silence
            sender.send([reply("a", "b", count)])
            await until(
                lambda n=count: len(endpoint.received) == n or ended(),  # type: ignore[misc]
                "it is there",
            )
        goes_on = not ended()

        def given_up() -> bool:
            sender.send([reply("a", "b")])
            return ended()

        await until(given_up, "one that is written to and never answers is given up")
        await sender.close()
        await receiver.close()
        await server.stop(0)

    def goes_on_after_idling() -> bool:
        run(test)
        return goes_on

    assert succeeds(goes_on_after_idling)  # answers come within the silence
