"""Finds the coordinators' leader, over blocking gRPC.

All known coordinators are asked at once and the leader's answer is preferred: a coordinator that is
down or paused costs no time while the leader answers.

Addresses are reused: one of them may belong to another cluster by now, and lead there. So the
caller names the expected cluster, or it is that of most of the addresses; after that every request
names it.
"""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc

from koinon.driver.rpc.channels import Channels
from koinon.operate.unknown_outcomes import told
from koinon.options import parse_addresses
from koinon_proto.contract.cluster_errors import NotLeaderError
from koinon_proto.contract.errors import (
    ConfigurationError,
    KoinonError,
    NotSentError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
    UnknownFateError,
    WrongClusterError,
)
from koinon_proto.contract.leader_search import LeaderSearch, Pace, Repeat, Route
from koinon_proto.security.transport import Dialing
from koinon_proto.server import rpc
from koinon_proto.server.leader_calls import ask_leader
from koinon_proto.v1 import admin_pb2, admin_pb2_grpc

ATTEMPT_TIMEOUT_S = 2.0
_NO_OTHER_ANSWERS = (WrongClusterError, UnauthenticatedError, PermissionDeniedError)
"""Refusals that every coordinator would repeat."""
RETRY_PAUSE_S = 0.05
STEADY = Pace(pause_s=RETRY_PAUSE_S)


class Coordinators(Channels):
    """Channels to the coordinators, and the present leader. Thread-safe."""

    def __init__(
        self, addresses: str, cluster_id: str = "", dialing: Dialing | None = None
    ) -> None:
        """``addresses``: ``HOST:PORT,HOST:PORT,…``; further coordinators are learnt from these.
        ``cluster_id``: the expected cluster; '': learnt from the addresses. ``dialing``: how to
        connect; by default as the environment says.

        Raises:
            ConfigurationError: no address is given, or one is not host:port.
        """
        super().__init__(dialing)
        self.addresses = parse_addresses(addresses)
        self.cluster_id = cluster_id  # '' until it is known

    def admin(self, address: str) -> Any:
        """Return the stub of a coordinator's Admin service."""
        return admin_pb2_grpc.AdminStub(self.channel(address))

    def ask_all(self, deadline: float) -> dict[str, admin_pb2.ClusterStatus]:
        """Ask known members for their status until the leader has answered, or all have; return the
        answers by address. ``deadline`` is by ``time.monotonic``. The first call waits until the
        expected cluster is known. Answers of other clusters do not count.

        Raises:
            ConfigurationError: the addresses belong to several clusters, none of them to most.
            WrongClusterError: all answers come from another cluster.
            NotSentError: no member answered.
        """
        arrived: queue.Queue[tuple[str, grpc.Future[admin_pb2.ClusterStatus]]] = queue.Queue()
        asked: set[str] = set()

        def ask(address: str) -> None:
            asked.add(address)
            left = max(0.001, min(ATTEMPT_TIMEOUT_S, deadline - time.monotonic()))
            future = self.admin(address).GetStatus.future(
                admin_pb2.GetStatusRequest(cluster_id=self.cluster_id), timeout=left
            )
            future.add_done_callback(lambda done: arrived.put((address, done)))

        for address in self.addresses:
            ask(address)
        answers: dict[str, admin_pb2.ClusterStatus] = {}
        reasons: list[str] = []
        wrong: KoinonError | None = None
        waiting = len(asked)
        while waiting and not self._is_enough(answers):
            address, future = arrived.get()
            waiting -= 1
            try:
                answer = future.result()
            except grpc.RpcError as failure:
                reasons.append(f"{address}: {rpc.in_words(failure)}")
                refusal = rpc.error_of(failure)
                wrong = refusal if isinstance(refusal, _NO_OTHER_ANSWERS) else wrong
                continue
            answers[address] = answer
            if answer.leader_address and answer.leader_address not in asked:
                ask(answer.leader_address)
                waiting += 1
        wrong = self._learn_cluster(answers) or wrong
        wrong = wrong or self._dialing.certificate_fault()
        if not answers and wrong is not None:
            raise wrong
        if not answers:
            raise NotSentError(reason=f"no coordinator answers ({'; '.join(sorted(reasons))})")
        return answers

    def _is_enough(self, answers: dict[str, admin_pb2.ClusterStatus]) -> bool:
        """Return whether the leader of the expected cluster has answered."""
        meant = self.cluster_id or self._of_most(answers)
        leads = {_cluster_of(answer) for answer in answers.values() if answer.is_leader}
        return bool(leads & {meant, ""}) if meant else False

    def _of_most(self, answers: dict[str, admin_pb2.ClusterStatus]) -> str:
        """Return the cluster of most of the given addresses; '' if there is none."""
        named = Counter(_cluster_of(answers[a]) for a in self.addresses if a in answers)
        return next((c for c, count in named.items() if c and 2 * count > len(self.addresses)), "")

    def _learn_cluster(
        self, answers: dict[str, admin_pb2.ClusterStatus]
    ) -> WrongClusterError | None:
        """Remember the expected cluster, and remove the answers of other clusters; return the error
        about them, if there were any.
        """
        meant = self.cluster_id or self._of_most(answers)
        named = sorted({_cluster_of(answer) for answer in answers.values()} - {""})
        if not meant and len(named) > 1:
            raise ConfigurationError(
                reason=f"coordinators: the addresses are those of clusters {' and '.join(named)}: "
                "name the addresses of one cluster"
            )
        self.cluster_id = meant = meant or "".join(named)
        # The first request names no cluster, so other clusters have answered it.
        others = [a for a, answer in answers.items() if _cluster_of(answer) not in ("", meant)]
        for address in others:
            other = _cluster_of(answers.pop(address))
        if not others:
            return None
        return WrongClusterError(expected_cluster_id=other, actual_cluster_id=meant)

    def _leader_address(self, deadline: float) -> str:
        """Return the address at which the leader has answered, or else its address according to the
        best informed member; '' if there is no leader. (The address by which other coordinators
        know it may not work from here.)

        Raises:
            NotSentError: no member answered.
        """
        answers = self.ask_all(deadline)
        address, best = max(answers.items(), key=lambda item: (item[1].is_leader, item[1].term))
        return address if best.is_leader else best.leader_address

    def ask_leader(
        self,
        stub: Callable[[grpc.Channel], Any],
        method: str,
        request: Any,
        *,
        timeout_s: float,
        repeat: Repeat,
        pace: Pace = STEADY,
        route: Route | None = None,
    ) -> Any:
        """Call a method of the leader of the expected cluster; return its answer.

        Args:
            timeout_s: for all attempts together, including the search for the leader.
            route: the leader as earlier calls have found it. Without it, members are asked for the
                leader before each attempt, and if none answers the first time, the call fails at
                once.

        Raises:
            UnavailableError: no member answered as the leader in time.
            ChangeFateError: a change was sent, and no answer came.
            KoinonError: as ``LeaderSearch.failure``.
        """
        deadline = time.monotonic() + timeout_s
        try:
            route = route or Route(current=self._leader_address(deadline))
        except UnavailableError as error:
            raise told(error, method, repeat) from error.__cause__
        search = LeaderSearch(route, repeat, pace=pace, deadline=deadline)

        def attempt() -> Any:
            search.asked = search.asked or self._leader_address(deadline)
            if not search.asked:
                raise NotSentError(reason="no coordinator leads")
            request.cluster_id = self.cluster_id
            call = getattr(stub(self.channel(search.asked)), method)
            return call(request, timeout=search.timeout_s(time.monotonic()))

        try:
            return ask_leader(search, attempt, partial(_fate_of, timeout_s))
        except NotLeaderError as error:
            raise told(UnavailableError(reason=str(error)), method, repeat) from error
        except (UnavailableError, UnknownFateError) as error:
            raise told(error, method, repeat) from error.__cause__


def _fate_of(timeout_s: float, failure: grpc.RpcError) -> KoinonError:
    fate = rpc.fate_of(failure)
    if isinstance(fate, UnknownFateError) and failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return UnknownFateError(reason=f"no answer within {timeout_s:g} s")
    return fate


def _cluster_of(answer: admin_pb2.ClusterStatus) -> str:
    return answer.table.cluster.cluster_id
