"""Operators' calls to the coordinators: the cluster's status, and changes of its coordinators,
nodes, replicas and bulk loads.

``Admin`` asks every known coordinator at once and prefers the leader's answer; a coordinator that
is down or paused costs no time while the leader answers. A call that may be repeated without harm
is repeated when the leader changes. A call that may not be repeated ends as ``ChangeFateError``,
and so does a repeatable change if no later attempt was answered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from koinon.core.closing import Closing
from koinon.driver.request_ids import operation
from koinon.operate.changes import AccessAdmin, KeyspaceAdmin
from koinon.operate.cluster_status import ClusterStatus, status_from_proto
from koinon.operate.consumer_groups import GroupAdmin
from koinon.operate.coordinators import ATTEMPT_TIMEOUT_S, RETRY_PAUSE_S, STEADY, Coordinators
from koinon.operate.loads_client import LoadsClient, LoadView
from koinon.operate.plans import MovesView, Plan, PlanRequest, moves_from_proto, plan_from_proto
from koinon_proto.contract import convert
from koinon_proto.contract.leader_search import Pace, Repeat
from koinon_proto.contract.table import MoveSettings, NodeStatus
from koinon_proto.security.transport import Dialing
from koinon_proto.v1 import admin_pb2, admin_pb2_grpc, groups_pb2_grpc

IMPATIENT = Pace(attempt_s=ATTEMPT_TIMEOUT_S, pause_s=RETRY_PAUSE_S)


class Admin(Closing):
    """A blocking connection to the coordinators for an operator's calls. Thread-safe."""

    def __init__(
        self,
        coordinators: str,
        *,
        timeout_ms: int = 5000,
        cluster_id: str = "",
        dialing: Dialing | None = None,
    ) -> None:
        """``timeout_ms``: for each call, with all its retries. ``cluster_id``: the expected
        cluster; coordinators of any other refuse the calls. '': the cluster of most of the
        addresses, found by the first call. ``dialing``: how to connect; by default as the
        environment says.

        Raises:
            ConfigurationError: no address is given, or one is not host:port.
        """
        self._timeout_s = timeout_ms / 1000
        self._coordinators = Coordinators(coordinators, cluster_id, dialing)
        self._loads = LoadsClient(self._coordinators, timeout_s=self._timeout_s)
        self.access = AccessAdmin(self.ask)
        self.keyspaces = KeyspaceAdmin(self.ask)
        self.groups = GroupAdmin(self._ask_groups)
        self.addresses = self._coordinators.addresses

    def close(self) -> None:
        self._coordinators.close()

    @operation()
    def status(self) -> ClusterStatus:
        """Return the status from the leader, or if there is none, from the best informed member.

        Raises:
            UnavailableError: no coordinator answered before the deadline.
        """
        answers = self._coordinators.ask_all(time.monotonic() + self._timeout_s)
        best = max(answers.values(), key=lambda s: (s.is_leader, s.term, s.applied_index))
        return status_from_proto(best, plain=not self._coordinators.uses_tls)

    def add_coordinator(self, member_id: str, address: str) -> None:
        """Add a running coordinator (started with ``--join``) to the group.

        Raises:
            MembershipChangeError: another change is under way, or the id is taken.
            UnavailableError: no leader could be reached before the deadline.
        """
        request = admin_pb2.AddCoordinatorRequest(member_id=member_id, address=address)
        self._at_leader("AddCoordinator", request)

    def remove_coordinator(self, member_id: str) -> None:
        """Remove a coordinator from the group. Raises as ``add_coordinator`` does."""
        request = admin_pb2.RemoveCoordinatorRequest(member_id=member_id)
        self._at_leader("RemoveCoordinator", request)

    def transfer_leadership(self, member_id: str = "") -> str:
        """Transfer the leadership to a member ('': the best caught-up one); return the new
        leader.
        """
        request = admin_pb2.TransferLeadershipRequest(member_id=member_id)
        reply = self._at_leader("TransferLeadership", request)
        return str(reply.leader_id)

    # --- replicas ---------------------------------------------------------------------------------

    def plan(self, request: PlanRequest) -> Plan:
        """Return the moves that would reach the request's aim, with the reasons. Changes nothing.

        Raises:
            UnknownNodeError, InvalidArgumentError, ClusterNotReadyError, MembershipChangeError
            UnavailableError: no leader could be reached before the deadline.
        """
        message = request.to_proto()
        reply = self._at_leader("PlanMoves", message, Repeat.READ)
        return plan_from_proto(reply)

    def execute(self, request: PlanRequest, plan_id: str) -> None:
        """Queue the moves of a plan that ``plan`` has returned.

        Raises:
            PlanStaleError: planning now gives another plan; nothing was queued.
            ChangeFateError: the leader went away; ``moves`` shows whether they are queued.
        """
        message = admin_pb2.ExecutePlanRequest(plan=request.to_proto(), plan_id=plan_id)
        self._at_leader("ExecutePlan", message)

    def moves(self) -> MovesView:
        """Return the moves that are queued or under way, and their settings."""
        message = admin_pb2.GetMovesRequest()
        reply = self._at_leader("GetMoves", message, Repeat.READ, IMPATIENT)
        return moves_from_proto(reply)

    def ask(self, method: str, message: Any, repeat: Repeat = Repeat.READ) -> Any:
        """Call a method of the leader; ``repeat`` says whether it is repeated if no answer
        comes.
        """
        return self._at_leader(method, message, repeat)

    def cancel_moves(self, partition_ids: Sequence[int] = ()) -> tuple[int, int]:
        """Drop queued moves and turn back those under way (no partitions given: all); return the
        number of each.
        """
        message = admin_pb2.CancelMovesRequest(partition_ids=partition_ids)
        reply = self._at_leader("CancelMoves", message)
        return reply.dropped, reply.turned_back

    def set_moves(
        self,
        *,
        paused: bool | None = None,
        bytes_per_second: int | None = None,
        moves_per_node: int | None = None,
    ) -> MoveSettings:
        """Change the settings of moves (None: unchanged); return the new settings."""
        given: dict[str, Any] = {
            "paused": paused,
            "bytes_per_second": bytes_per_second,
            "moves_per_node": moves_per_node,
        }
        message = admin_pb2.SetMovesRequest(
            **{name: value for name, value in given.items() if value is not None}
        )
        reply = self._at_leader("SetMoves", message, Repeat.CHANGE)
        return convert.settings_from_proto(reply)

    def set_node_status(self, node_id: str, status: NodeStatus) -> None:
        """Drain a node, make it ACTIVE again, or remove it for good (LEFT).

        Raises:
            UnknownNodeError
            MembershipChangeError: the node still has replicas, or has left.
        """
        message = admin_pb2.SetNodeStatusRequest(node_id=node_id, status=cast(Any, int(status)))
        self._at_leader("SetNodeStatus", message, Repeat.CHANGE)

    def restore_primaries(self) -> int:
        """Hand partitions back to their preferred primaries; return how many will change."""
        message = admin_pb2.RestorePrimariesRequest()
        reply = self._at_leader("RestorePrimaries", message, Repeat.CHANGE)
        return int(reply.wanted)

    def force_primaries(self, wanted: Mapping[int, str]) -> tuple[dict[int, int], dict[int, str]]:
        """Elect replicas that may lack acknowledged writes: node ids by partition.

        Returns:
            The new primary epochs by partition; and for refused partitions the reasons: the
                partition is not offline, or the node cannot lead it.

        Raises:
            UnknownNodeError, InvalidArgumentError: nothing was changed.
            ChangeFateError: the leader went away; the table shows the present primaries.
        """
        message = admin_pb2.ForcePrimariesRequest(
            primaries=[
                admin_pb2.PrimaryToForce(partition_id=partition_id, node_id=node_id)
                for partition_id, node_id in wanted.items()
            ]
        )
        reply = self._at_leader("ForcePrimaries", message)
        forced = {p.partition_id: p.primary_epoch for p in reply.primaries if not p.refused}
        return forced, {p.partition_id: p.refused for p in reply.primaries if p.refused}

    # --- bulk loads -------------------------------------------------------------------------------

    def loads(self) -> tuple[LoadView, ...]:
        """Return the bulk loads that are open or merging, and the last that ended, by their ids."""
        return self._loads.loads()

    def abort_load(self, load_id: int, *, reason: str = "") -> None:
        """Abort an open bulk load: no row becomes readable.

        Raises:
            LoadClosedError: it is committed, or there is no such load.
        """
        self._loads.abort(load_id, reason=reason)

    def _ask_groups(self, method: str, message: Any, repeat: Repeat = Repeat.READ) -> Any:
        return self._at_leader(method, message, repeat, stub=groups_pb2_grpc.GroupsStub)

    @operation()
    def _at_leader(
        self,
        method: str,
        request: Any,
        repeat: Repeat = Repeat.NOTHING,
        pace: Pace = STEADY,
        *,
        stub: Callable[[Any], Any] = admin_pb2_grpc.AdminStub,
    ) -> Any:
        """Call a method of the leader, found anew for each attempt."""
        return self._coordinators.ask_leader(
            stub,
            method,
            request,
            timeout_s=self._timeout_s,
            repeat=repeat,
            pace=pace,
        )
