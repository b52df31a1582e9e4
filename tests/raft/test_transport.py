"""Messages on the wire, and what every transport between members promises."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, get_args

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
from koinon_proto.server import framed_stream
from koinon_proto.v1.raft_pb2 import RaftBatch, RaftExchangeReply, RaftHello, RaftMessage
from tests.kit.addresses import free_address
from tests.kit.waiting import run, succeeds, until
from tests.proto.records import SCALARS, records

from . import test_scenarios_changes, test_scenarios_snapshots
from .framed import Listener, refusal_of
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

PATIENT = TransportConfig(hello_interval_ms=20, silence_ms=60_000)


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

    def __init__(self, kind: str, config: TransportConfig | None) -> None:
        self.network = MemoryRaftNetwork() if kind == "memory" else None
        self.listeners: dict[str, Listener] = {}  # by member
        self._config = config
        self._transports: list[RaftTransport] = []

    async def make(
        self, member_id: str, store_id: str = "store", *, listens: bool = True
    ) -> tuple[Endpoint, Any]:
        address = free_address()
        transport: Any
        if self.network is not None:
            transport = self.network.transport(address)
        else:
            transport = StreamRaftTransport(config=self._config)
            self.listeners[member_id] = Listener(transport, address)
            if listens:
                await self.listeners[member_id].start()
        endpoint = Endpoint(member_id, address, store_id)
        transport.attach(endpoint)
        self._transports.append(transport)
        return endpoint, transport

    async def close(self) -> None:
        for transport in self._transports:
            await transport.close()
        for listener in self.listeners.values():
            await listener.stop()


@pytest.fixture(params=["memory", "frames"])
def wire_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def with_wires(
    kind: str,
    test: Callable[[Wires], Coroutine[Any, Any, None]],
    config: TransportConfig | None = None,
) -> None:
    async def wired() -> None:
        wires = Wires(kind, config)
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


# -- streams of frames


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
def test_stream_with_a_wrong_hello_is_refused(changes: dict[str, Any], refusal: int) -> None:
    async def test(wires: Wires) -> None:
        b, _ = await wires.make("b")
        b.pins["a"] = "store"
        batch = RaftBatch(hello=hello(**changes), messages=[to_proto(reply("a", "b"))])
        answer = await refusal_of(wires.listeners["b"].port.port, batch)
        assert answer.refusal == refusal
        assert answer.detail
        assert b.received == []

    with_wires("frames", test)


def test_stream_without_hello_or_with_nonsense_is_refused() -> None:
    async def test(wires: Wires) -> None:
        b, transport = await wires.make("b")
        port = wires.listeners["b"].port.port
        good = to_proto(reply("a", "b"))
        first = await refusal_of(port, RaftBatch(messages=[good]))
        assert first.refusal == RaftExchangeReply.REFUSAL_MALFORMED
        second = await refusal_of(
            port, RaftBatch(hello=hello()), RaftBatch(messages=[good, RaftMessage(term=1)])
        )
        assert second.refusal == RaftExchangeReply.REFUSAL_MALFORMED
        assert b.received == []
        assert transport.counters["malformed_messages"] == 1

    with_wires("frames", test)


@pytest.mark.parametrize("count", [10, 4_000])
def test_messages_keep_their_order(count: int) -> None:
    """Also where they are more than the sockets hold. A stream may be lost with what is under way:
    then all are sent again.
    """

    async def test(wires: Wires) -> None:
        (_, from_a), (b, _) = await wires.make("a"), await wires.make("b")
        from_a.set_peers({"b": b.address})
        await until(lambda: from_a.open_streams() == 1, "the stream stands")
        sent: list[HeartbeatReply] = []
        ends, attempt = -1, 0

        def came() -> bool:
            nonlocal ends, attempt, sent
            if ends != from_a.counters["stream_ends"]:
                ends, attempt = from_a.counters["stream_ends"], attempt + 1
                sent = [reply("a", "b", 10_000 * attempt + n) for n in range(count)]
                from_a.send(sent)
            return sent[-1] in b.received

        await until(came, "the last one to come")
        assert [m for m in b.received if m.round_id // 10_000 == attempt] == sent

    with_wires("frames", test, PATIENT)


def test_queue_is_bounded_and_drops_the_oldest() -> None:
    async def test(wires: Wires) -> None:
        (_, from_a), (b, _) = await wires.make("a"), await wires.make("b", listens=False)
        from_a.set_peers({"b": b.address})
        from_a.send([reply("a", "b", n) for n in range(100)])
        assert from_a.counters["dropped_queue_full"] == 90
        await wires.listeners["b"].start()

    with_wires("frames", test, TransportConfig(queue_messages_max=10))


def test_peers_know_a_member_that_says_nothing() -> None:
    """One that listens later, too."""

    async def test(wires: Wires) -> None:
        (_, from_a), (b, _) = await wires.make("a"), await wires.make("b")
        c, _ = await wires.make("c", listens=False)
        from_a.set_peers({"b": b.address, "c": c.address})
        await until(lambda: b.pins == {"a": "store"}, "b knows it")
        await until(lambda: from_a.counters["stream_ends"] >= 2, "c was looked for")
        await wires.listeners["c"].start()
        await until(lambda: c.pins == {"a": "store"}, "c knows it")
        assert b.received == c.received == []

    with_wires("frames", test)


def test_hello_is_repeated_for_one_who_took_the_member_for_a_stranger() -> None:
    async def test(wires: Wires) -> None:
        (_, from_a), (b, _) = await wires.make("a"), await wires.make("b")
        hellos: list[str] = []

        async def is_known_store(member_id: str, store_id: str) -> bool:
            hellos.append(store_id)
            return True

        b.is_known_store = is_known_store  # type: ignore[method-assign]
        from_a.set_peers({"b": b.address})
        await until(lambda: len(hellos) >= 3, "three hellos")
        assert from_a.counters["stream_ends"] == 0

    with_wires("frames", test, PATIENT)


def test_stream_that_was_idle_is_not_given_up_at_its_next_message() -> None:
    goes_on = False

    async def test(wires: Wires) -> None:
        nonlocal goes_on
        (_, from_a), (b, _) = await wires.make("a"), await wires.make("b")
        from_a.set_peers({"b": b.address})
        await until(lambda: b.pins, "b knows it")
        ends = from_a.counters["stream_ends"]

        def ended() -> bool:
            return bool(from_a.counters["stream_ends"] > ends)

        for count in range(1, 4):
            await asyncio.sleep(0.15)  # longer than the silence
            from_a.send([reply("a", "b", count)])
            await until(
                lambda n=count: len(b.received) == n or ended(),  # type: ignore[misc]
                "it is there",
            )
        goes_on = not ended()

        def given_up() -> bool:
            from_a.send([reply("a", "b")])
            return ended()

        await until(given_up, "one that is written to and never answers is given up")

    def goes_on_after_idling() -> bool:
        with_wires("frames", test, TransportConfig(silence_ms=100))
        return goes_on

    assert succeeds(goes_on_after_idling)  # answers come within the silence


def test_port_that_has_moved_is_found_by_asking_again() -> None:
    async def test(wires: Wires) -> None:
        (_, from_a), (b, _) = await wires.make("a"), await wires.make("b")
        from_a.set_peers({"b": b.address})
        await send_until(from_a, lambda: b.received)
        listener = wires.listeners["b"]
        await until(lambda: listener.port.streams() == {"Raft/Exchange": 1}, "it is counted")
        await listener.move_port()
        b.received.clear()
        await send_until(from_a, lambda: b.received)
        assert listener.asked >= 2
        await from_a.close()
        await until(lambda: listener.port.streams() == {"Raft/Exchange": 0}, "b sees the end")

    with_wires("frames", test)


def test_port_where_another_service_answers_is_left_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(wires: Wires) -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            assert await reader.readline() == b"KOINON.RAFT 1\r\n"
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await writer.drain()
            writer.close()

        other = await asyncio.start_server(answer, "127.0.0.1", 0)
        (_, from_a), (b, _) = await wires.make("a"), await wires.make("b")
        listener = wires.listeners["b"]
        listener.named_port = other.sockets[0].getsockname()[1]
        from_a.set_peers({"b": b.address})
        await until(lambda: listener.asked >= 3, "it is tried again")
        listener.named_port = 0
        await send_until(from_a, lambda: b.received)
        other.close()

    with caplog.at_level(logging.INFO):
        with_wires("frames", test)
    assert caplog.text.count("400 Bad Request") == 1


class Pipe:
    """Carries connections to a port, or holds what comes, as a network does that is cut."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.goes = asyncio.Event()
        self.goes.set()
        self._server: Any = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner = await asyncio.open_connection("127.0.0.1", self._port)
        for source, target in ((reader, inner), (inner_reader, writer)):
            task = asyncio.ensure_future(self._copy(source, target))
            self._tasks.add(task)

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while piece := await source.read(65_536):
                await self.goes.wait()
                target.write(piece)
        except OSError:
            pass
        finally:
            target.close()

    def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()


def test_connection_that_is_cut_in_silence_is_opened_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framed_stream, "_SILENCE_S_MAX", 600.0)

    async def test(wires: Wires) -> None:
        (_, from_a), (b, _) = await wires.make("a"), await wires.make("b")
        listener = wires.listeners["b"]
        pipe = Pipe(listener.port.port)
        listener.named_port = await pipe.start()
        from_a.set_peers({"b": b.address})
        await send_until(from_a, lambda: b.received)
        pipe.goes.clear()
        listener.named_port = 0
        b.received.clear()
        await send_until(from_a, lambda: b.received)
        pipe.close()

    with_wires("frames", test)
