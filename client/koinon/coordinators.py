"""Finding the coordinators' leader, over blocking gRPC.

All known coordinators are asked at once and the leader's answer is preferred: one that is down or
paused costs nothing while the leader answers.
"""

from __future__ import annotations

import queue
import time
from typing import Any

import grpc

from koinon.channels import Channels
from koinon.options import parse_addresses
from koinon_proto import rpc
from koinon_proto.errors import KoinonError, UnavailableError
from koinon_proto.v1 import admin_pb2, admin_pb2_grpc

ATTEMPT_TIMEOUT_S = 2.0
RETRY_PAUSE_S = 0.05


class Coordinators(Channels):
    """Channels to the coordinators, and who of them leads. Thread-safe."""

    def __init__(self, addresses: str) -> None:
        """``addresses``: ``HOST:PORT,HOST:PORT,…``; the others are learnt from these.

        Raises:
            ConfigurationError: it names nobody, or one is not host:port.
        """
        super().__init__()
        self.addresses = parse_addresses(addresses)

    def admin(self, address: str) -> Any:
        """Return the stub of a coordinator's Admin service."""
        return admin_pb2_grpc.AdminStub(self.channel(address))  # type: ignore[no-untyped-call]

    def ask_all(self, deadline: float) -> dict[str, admin_pb2.ClusterStatus]:
        """Ask known members for their status until the leader has answered, or all have; return
        the answers by the addresses that gave them. ``deadline`` is by ``time.monotonic``.

        Raises:
            UnavailableError: nobody answered.
        """
        arrived: queue.Queue[tuple[str, grpc.Future]] = queue.Queue()
        asked: set[str] = set()

        def ask(address: str) -> None:
            asked.add(address)
            left = max(0.001, min(ATTEMPT_TIMEOUT_S, deadline - time.monotonic()))
            future = self.admin(address).GetStatus.future(
                admin_pb2.GetStatusRequest(), timeout=left
            )
            future.add_done_callback(lambda done: arrived.put((address, done)))

        for address in self.addresses:
            ask(address)
        answers: dict[str, admin_pb2.ClusterStatus] = {}
        reasons: list[str] = []
        waiting = len(asked)
        while waiting and not any(answer.is_leader for answer in answers.values()):
            address, future = arrived.get()
            waiting -= 1
            try:
                answer = future.result()
            except grpc.RpcError as failure:
                reasons.append(f"{address}: {why(failure)}")
                continue
            answers[address] = answer
            if answer.leader_address and answer.leader_address not in asked:
                ask(answer.leader_address)
                waiting += 1
        if not answers:
            raise UnavailableError(reason=f"no coordinator answers ({'; '.join(sorted(reasons))})")
        return answers

    def leader_address(self, deadline: float) -> str:
        """Return where the leader has answered, or else is by the best informed member; '' if none
        leads. (The address that it gives to the others may mean nothing here.)

        Raises:
            UnavailableError: nobody answered.
        """
        answers = self.ask_all(deadline)
        address, best = max(answers.items(), key=lambda item: (item[1].is_leader, item[1].term))
        return address if best.is_leader else best.leader_address


def why(failure: grpc.RpcError) -> str:
    """Return in words how a call failed."""
    error: KoinonError | None = rpc.error_of(failure)
    if error is not None:
        return str(error)
    call: Any = failure
    code = call.code()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "no answer in time"
    if code is grpc.StatusCode.UNAVAILABLE:
        return "not reachable"
    return f"{code.name}: {call.details()}"
