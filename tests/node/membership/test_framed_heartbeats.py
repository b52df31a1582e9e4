"""Heartbeats in frames: when a connection is used, and when gRPC is asked instead."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from koinon_node.membership.coordinator_calls import Channels
from koinon_node.membership.framed_heartbeats import (
    FramedHeartbeats,
    NoFramesError,
)
from koinon_proto.contract import convert
from koinon_proto.contract.cluster_errors import NotLeaderError
from koinon_proto.contract.errors import KoinonError, UnavailableError, UnknownFateError
from koinon_proto.server.framed_greeting import HEARTBEAT_BYTES_MAX, HEARTBEATS_COMMAND
from koinon_proto.server.framed_stream import HEAD, IS_END, SIGN_OF_LIFE
from koinon_proto.v1.membership_pb2 import HeartbeatRequest, HeartbeatResponse
from tests.kit.waiting import wait_until

PATIENCE_S = 60.0
LEADER = "127.0.0.1:7000"
"""A coordinator, of which only the host counts here."""


def framed(data: bytes) -> bytes:
    return HEAD.pack(len(data)) + data


def replied(number: int, *, lease_ms: int = 1, peer_port: int = 0) -> bytes:
    reply = HeartbeatResponse(call_number=number, lease_ms=lease_ms, peer_port=peer_port)
    return framed(reply.SerializeToString())


def refused(error: KoinonError) -> bytes:
    data = convert.error_to_proto(error).SerializeToString()
    return HEAD.pack(IS_END | len(data)) + data


class Port:
    """A peer port that answers each heartbeat with the next of ``answers``: bytes, or what makes
    them of the heartbeat's number; None: it closes the connection.
    """

    def __init__(self) -> None:
        self.greeting = b"+OK\r\n"
        self.answers: queue.SimpleQueue[bytes | Callable[[int], bytes] | None]
        self.answers = queue.SimpleQueue()
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.number: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.answers.put(None)
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Close all connections."""
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._open.append(sock)
                self.connections += 1
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError), sock.makefile("rb") as file:
            if file.readline() != HEARTBEATS_COMMAND:
                return
            sock.sendall(self.greeting)
            while len(head := file.read(HEAD.size)) == HEAD.size:
                request = HeartbeatRequest.FromString(file.read(HEAD.unpack(head)[0]))
                found = self.answers.get()
                if found is None:
                    return
                sock.sendall(found(request.call_number) if callable(found) else found)


@pytest.fixture
def port() -> Iterator[Port]:
    made = Port()
    yield made
    made.close()


@pytest.fixture
def frames() -> Iterator[FramedHeartbeats]:
    made = FramedHeartbeats(Channels())
    yield made
    made.close()


def standing(frames: FramedHeartbeats, port: Port) -> None:
    """Return once heartbeats go in frames."""

    def stands() -> bool:
        frames.learn(LEADER, port.number)
        return frames._standing(LEADER) is not None

    wait_until(stands, "a connection to stand")


def ask(frames: FramedHeartbeats, **fields: str) -> HeartbeatResponse:
    return frames.ask(LEADER, HeartbeatRequest(**fields), PATIENCE_S)  # type: ignore[arg-type]


def test_heartbeats_go_by_grpc_until_a_connection_stands(
    frames: FramedHeartbeats, port: Port
) -> None:
    with pytest.raises(NoFramesError):
        ask(frames)
    frames.learn(LEADER, 0)  # a build that has no such port
    with pytest.raises(NoFramesError):
        ask(frames)
    assert port.connections == 0
    standing(frames, port)
    port.answers.put(lambda n: replied(n, lease_ms=7))
    assert ask(frames).lease_ms == 7
    port.answers.put(lambda n: SIGN_OF_LIFE + SIGN_OF_LIFE + replied(n, lease_ms=8))
    assert ask(frames).lease_ms == 8
    assert port.connections == 1


def test_request_that_goes_by_grpc_afterwards_has_no_number(
    frames: FramedHeartbeats, port: Port
) -> None:
    standing(frames, port)
    port.answers.put(None)
    request = HeartbeatRequest(node_id="n1")
    with pytest.raises(NoFramesError):
        frames.ask(LEADER, request, PATIENCE_S)
    assert request == HeartbeatRequest(node_id="n1")


@pytest.mark.parametrize(
    "answer",
    [
        None,
        lambda n: replied(n - 1),  # of another heartbeat: late, or doubled
        lambda n: replied(n + 1),
        replied(0),
        framed(b"\xff\xff"),
        HEAD.pack(0x7FFF_FFFF),
        HEAD.pack(IS_END | 2) + b"\xff\xff",
        lambda n: replied(n, peer_port=70_000),
        refused(UnavailableError(reason="the coordinator is stopping")),
    ],
)
def test_connection_that_breaks_is_given_up_for_grpc(
    frames: FramedHeartbeats,
    port: Port,
    answer: bytes | Callable[[int], bytes] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    standing(frames, port)
    port.answers.put(answer)
    with pytest.raises(NoFramesError):
        ask(frames)
    frames.learn(LEADER, port.number)
    assert frames._standing(LEADER) is None  # the next one is opened later
    assert port.connections == 1
    monkeypatch.setattr(frames, "_due_at", 0.0)
    standing(frames, port)
    port.answers.put(lambda n: replied(n))
    assert ask(frames).call_number == 1


def test_connection_that_was_cut_between_heartbeats_is_given_up_for_grpc(
    frames: FramedHeartbeats, port: Port
) -> None:
    standing(frames, port)
    port.answers.put(lambda n: replied(n))
    ask(frames)
    port.cut()
    with pytest.raises(NoFramesError):
        ask(frames)


def test_answer_that_does_not_come_is_of_unknown_fate_and_ends_the_connection(
    frames: FramedHeartbeats, port: Port
) -> None:
    standing(frames, port)
    with pytest.raises(UnknownFateError):
        frames.ask(LEADER, HeartbeatRequest(), 0.01)
    with pytest.raises(NoFramesError):
        ask(frames)


def test_refusal_is_the_coordinators_and_another_connection_may_follow(
    frames: FramedHeartbeats, port: Port
) -> None:
    standing(frames, port)
    port.answers.put(refused(NotLeaderError(leader_id="c2", leader_address="h:1", term=3)))
    with pytest.raises(NotLeaderError) as found:
        ask(frames)
    assert found.value.leader_address == "h:1"
    standing(frames, port)


def test_port_that_does_not_welcome_is_tried_later(
    frames: FramedHeartbeats, port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    port.greeting = b"-ERR unknown command\r\n"
    with caplog.at_level(logging.INFO):
        frames.learn(LEADER, port.number)

        def told() -> bool:
            assert frames._standing(LEADER) is None
            return "unknown command" in caplog.text

        wait_until(told, "the reason to be logged")
    frames.learn(LEADER, port.number)
    assert not frames._is_opening
    port.greeting = b"+OK\r\n"
    other = Port()
    standing(frames, other)  # a coordinator that starts again has another port
    other.close()


def test_connection_is_to_one_coordinator_and_by_one_identity(port: Port) -> None:
    class Changing(Channels):
        number = 1

        @property
        def version(self) -> int:
            return self.number

    channels = Changing()
    frames = FramedHeartbeats(channels)
    standing(frames, port)
    with pytest.raises(NoFramesError):
        frames.ask("127.0.0.1:7001", HeartbeatRequest(), PATIENCE_S)
    standing(frames, port)
    channels.number = 2
    with pytest.raises(NoFramesError):
        ask(frames)
    standing(frames, port)
    assert port.connections == 3
    frames.close()


def test_heartbeat_that_is_too_large_goes_by_grpc(frames: FramedHeartbeats, port: Port) -> None:
    standing(frames, port)
    with pytest.raises(NoFramesError):
        ask(frames, node_id="x" * HEARTBEAT_BYTES_MAX)
    port.answers.put(lambda n: replied(n))
    assert ask(frames).call_number == 1


def test_close_ends_a_call_that_waits(frames: FramedHeartbeats, port: Port) -> None:
    standing(frames, port)
    asked = threading.Event()

    def answer(number: int) -> bytes:
        asked.set()
        frames.close()
        return b""

    port.answers.put(answer)
    with pytest.raises(NoFramesError):
        ask(frames)
    assert asked.is_set()
    frames.learn(LEADER, port.number)
    assert not frames._is_opening
