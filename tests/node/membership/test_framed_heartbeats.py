"""The agent's connection of frames to a peer port: when it is opened, used and given up."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterator

import pytest

from koinon_node.membership.coordinator_calls import Channels
from koinon_node.membership.framed_heartbeats import FramedHeartbeats
from koinon_proto.contract.cluster_errors import NodeFencedError, NotLeaderError
from koinon_proto.contract.errors import (
    KoinonError,
    NotSentError,
    UnavailableError,
    UnknownFateError,
)
from koinon_proto.server.framed_greeting import FIRST_HEARTBEAT_BYTES_MAX
from koinon_proto.server.framed_stream import HEAD, IS_END, SIGN_OF_LIFE
from koinon_proto.v1.membership_pb2 import HeartbeatRequest, HeartbeatResponse, PartitionSizes
from tests.node.kit.heartbeat_port import HeartbeatPort, framed, refused

PATIENCE_S = 60.0
LEADER = "127.0.0.1:7000"
"""A coordinator, of which only the host counts here."""
Made = Callable[[int], bytes] | bytes | KoinonError | None


class Leader:
    """A coordinator that answers each heartbeat with the next of ``answers``: bytes, what makes
    them of the heartbeat's number, a refusal; None: it closes the connection.
    """

    def __init__(self) -> None:
        self.answers: queue.SimpleQueue[Made] = queue.SimpleQueue()
        self.heard: list[HeartbeatRequest] = []
        self.asked: list[str] = []  # by address: who was asked for its peer port
        self.refusal: KoinonError | None = None  # of that question
        self.now = 0.0
        self.port = HeartbeatPort(self._answer)

    def peer_port(self, address: str, timeout_s: float) -> int:
        self.asked.append(address)
        self.now += 1  # it takes its time
        if self.refusal is not None:
            raise self.refusal
        return self.port.number

    def _answer(self, request: HeartbeatRequest) -> bytes | None:
        self.heard.append(request)
        found = self.answers.get()
        if isinstance(found, KoinonError):
            raise found
        return found(request.call_number) if callable(found) else found


@pytest.fixture
def leader() -> Iterator[Leader]:
    made = Leader()
    yield made
    made.answers.put(None)
    made.port.close()


@pytest.fixture
def heartbeats(leader: Leader) -> Iterator[FramedHeartbeats]:
    made = FramedHeartbeats(Channels(), leader.peer_port, lambda: leader.now)
    yield made
    made.close()


def replied(number: int, lease_ms: int = 1) -> bytes:
    return framed(HeartbeatResponse(call_number=number, lease_ms=lease_ms).SerializeToString())


def ask(
    heartbeats: FramedHeartbeats, address: str = LEADER, timeout_s: float = PATIENCE_S
) -> HeartbeatResponse:
    return heartbeats.ask(address, HeartbeatRequest(node_id="n1"), timeout_s)[0]


def test_connection_is_opened_once_and_the_time_of_sending_is_after_that(
    heartbeats: FramedHeartbeats, leader: Leader
) -> None:
    leader.answers.put(lambda n: replied(n, 7))
    reply, sent_at = heartbeats.ask(LEADER, HeartbeatRequest(), PATIENCE_S)
    assert (reply.lease_ms, sent_at) == (7, 1.0)
    leader.answers.put(lambda n: SIGN_OF_LIFE + SIGN_OF_LIFE + replied(n, 8))
    assert ask(heartbeats).lease_ms == 8
    assert (leader.asked, leader.port.connections) == ([LEADER], 1)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (None, UnknownFateError),
        (lambda n: replied(n - 1), UnknownFateError),  # of another heartbeat: late, or doubled
        (lambda n: replied(n + 1), UnknownFateError),
        (replied(0), UnknownFateError),
        (framed(b"\xff\xff"), UnknownFateError),
        (HEAD.pack(0x7FFF_FFFF), UnknownFateError),
        (HEAD.pack(IS_END | 2) + b"\xff\xff", UnknownFateError),
        (lambda n: replied(n, 1 << 31), UnknownFateError),  # beyond its bound
        (refused(UnavailableError(reason="the coordinator is stopping")), UnknownFateError),
        (NotLeaderError(leader_id="c2", leader_address="h:1", term=3), NotLeaderError),
        (NodeFencedError(node_id="n1", node_epoch=1, current_node_epoch=2), NodeFencedError),
    ],
)
def test_connection_is_given_up_after_a_failure_and_opened_anew(
    heartbeats: FramedHeartbeats, leader: Leader, answer: Made, error: type[KoinonError]
) -> None:
    leader.answers.put(lambda n: replied(n))
    ask(heartbeats)
    leader.answers.put(answer)
    with pytest.raises(error):
        ask(heartbeats)
    leader.answers.put(lambda n: replied(n))
    assert ask(heartbeats).call_number == 1
    assert leader.port.connections == 2


def test_connection_that_was_cut_between_heartbeats_is_of_unknown_fate(
    heartbeats: FramedHeartbeats, leader: Leader
) -> None:
    leader.answers.put(lambda n: replied(n))
    ask(heartbeats)
    leader.port.cut()
    with pytest.raises(UnknownFateError):
        ask(heartbeats)


def test_answer_that_does_not_come_in_time_is_of_unknown_fate(
    heartbeats: FramedHeartbeats, leader: Leader
) -> None:
    with pytest.raises(UnknownFateError):
        ask(heartbeats, timeout_s=0.2)


def test_coordinator_that_does_not_lead_is_not_connected_to(
    heartbeats: FramedHeartbeats, leader: Leader
) -> None:
    leader.refusal = NotLeaderError(leader_id="c2", leader_address="h:1", term=3)
    with pytest.raises(NotLeaderError):
        ask(heartbeats)
    assert leader.port.connections == 0


def test_port_that_does_not_welcome_is_warned_of_once(
    heartbeats: FramedHeartbeats, leader: Leader, caplog: pytest.LogCaptureFixture
) -> None:
    leader.port.greeting = b"-ERR unknown command\r\n"
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with pytest.raises(NotSentError, match="unknown command"):
                ask(heartbeats)
    warnings = [record for record in caplog.records if record.name.startswith("koinon")]
    assert len(warnings) == 1
    leader.port.greeting = b"+OK\r\n"
    leader.answers.put(lambda n: replied(n))
    ask(heartbeats)


def test_connection_is_to_one_coordinator_and_by_one_identity(leader: Leader) -> None:
    class Changing(Channels):
        number = 1

        @property
        def version(self) -> int:
            return self.number

    channels = Changing()
    heartbeats = FramedHeartbeats(channels, leader.peer_port, lambda: leader.now)
    for address, version in ((LEADER, 1), ("127.0.0.1:7001", 1), ("127.0.0.1:7001", 2)):
        channels.number = version
        leader.answers.put(lambda n: replied(n))
        ask(heartbeats, address)
    assert leader.port.connections == 3
    heartbeats.close()


def test_large_heartbeat_is_not_the_first_on_its_connection(
    heartbeats: FramedHeartbeats, leader: Leader
) -> None:
    sizes = PartitionSizes(partition_ids=range(60_000), bytes=[1 << 20] * 60_000)
    request = HeartbeatRequest(node_id="n1", node_epoch=3, registration_id="r", sizes=sizes)
    for _ in range(3):
        leader.answers.put(lambda n: replied(n))
    for _ in range(2):
        heartbeats.ask(LEADER, request, PATIENCE_S)
    first, *others = leader.heard
    assert (first.node_id, first.node_epoch, first.registration_id) == ("n1", 3, "r")
    assert first.ByteSize() < FIRST_HEARTBEAT_BYTES_MAX
    assert [one.sizes == sizes for one in others] == [True, True]


def test_close_ends_a_call_that_waits_for_good(
    heartbeats: FramedHeartbeats, leader: Leader
) -> None:
    def answer(number: int) -> bytes:
        heartbeats.close()
        return b""

    leader.answers.put(answer)
    with pytest.raises(UnknownFateError):
        ask(heartbeats)
    with pytest.raises((NotSentError, UnknownFateError)):
        ask(heartbeats)
