"""The leader's decisions on registrations, heartbeats and the first assignment, before it proposes.

Decisions only read. They return the command to propose, or raise a typed error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from koinon_coordinator.core.cluster.commands import (
    AssignPartitions,
    HostedPartition,
    PartitionChange,
    RegisterNode,
)
from koinon_coordinator.core.cluster.image import NodeRecord
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_coordinator.core.decide.sessions import NEVER, Sessions
from koinon_coordinator.core.planning.initial_placement import place
from koinon_proto.contract.addresses import NAME_CHARS_MAX, check_name, is_address
from koinon_proto.contract.cluster_errors import (
    DuplicateNodeError,
    MembershipChangeError,
    NodeFencedError,
    RegistrationPendingError,
    UnknownNodeError,
)
from koinon_proto.contract.errors import InvalidArgumentError, KoinonError, ResourceExhaustedError
from koinon_proto.contract.keyspaces import DEFAULT, check_keyspace_name
from koinon_proto.contract.table import DEFAULT_WEIGHT, NodeStatus, RedisPort
from koinon_proto.process.printable import printable

NODES_MAX = 4_096  # that have not left: every table lists them all
WEIGHT_MAX = 10_000
LAST_EPOCH_MAX = 1 << 48
"""The highest epoch that a store may state: far above any used one, and far below the largest
number.
"""
REDIS_PORTS_MAX = 64  # of a node: every table lists them all
CHANGES_MAX = 16_384  # rows of one proposal, which has to fit into a command
HELD_RETRY_MS = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Registration:
    """A node's request to join."""

    node_id: str
    address: str
    rack: str
    store_id: str
    last_node_epoch: int
    registration_id: str
    weight: int = DEFAULT_WEIGHT
    redis_address: str = ""
    pool: str = ""
    redis_ports: tuple[RedisPort, ...] = ()


def check_registration(request: Registration) -> None:
    """Raise InvalidArgumentError for a request that no state could accept."""
    check_name("node_id", request.node_id)
    check_requested_address("address", request.address)
    if request.redis_address:
        check_requested_address("redis_address", request.redis_address)
    _check_redis_ports(request.redis_ports)
    for field in ("store_id", "registration_id"):
        if not getattr(request, field):
            raise InvalidArgumentError(field=field, reason="must not be empty")
    for field in ("rack", "store_id", "registration_id", "pool"):
        _check_length(field, getattr(request, field))
        check_printable(field, getattr(request, field))
    if not 1 <= request.weight <= WEIGHT_MAX:
        raise InvalidArgumentError(
            field="weight",
            reason=f"must be from 1 to {WEIGHT_MAX}",
            limit=WEIGHT_MAX,
            actual=request.weight,
        )
    if request.last_node_epoch > LAST_EPOCH_MAX:
        raise InvalidArgumentError(
            field="last_node_epoch",
            reason="no store can have been registered so often: its meta data is damaged",
            limit=LAST_EPOCH_MAX,
            actual=request.last_node_epoch,
        )


def check_changes(changes: Sequence[PartitionChange], partitions: int) -> None:
    """Raise InvalidArgumentError for a primary's proposal that no state could accept."""
    if len(changes) > CHANGES_MAX:
        raise InvalidArgumentError(
            field="changes",
            reason="too many in one proposal",
            limit=CHANGES_MAX,
            actual=len(changes),
        )
    for change in changes:
        if not 0 <= change.partition_id < partitions:
            raise InvalidArgumentError(
                field="partition_id",
                reason="there is no such partition",
                limit=partitions - 1,
                actual=change.partition_id,
            )


def check_printable(field: str, text: str) -> None:
    """Raise InvalidArgumentError unless ``text`` can be shown to operators unescaped."""
    if not text.isprintable():
        raise InvalidArgumentError(field=field, reason=f"{printable(text)} is not printable")


def check_requested_address(field: str, address: str) -> None:
    """Raise InvalidArgumentError unless ``address`` is ``host:port``."""
    if not is_address(address):
        raise InvalidArgumentError(field=field, reason=f"{address!r} is not host:port")


def decide_registration(
    state: ClusterState, sessions: Sessions, request: Registration, now: float
) -> RegisterNode:
    """Return the command that registers the node.

    The node's earlier process may still hold a lease. A restart at the same address with the same
    store waits for the lease's end. A registration from another address or with another store waits
    for the session's end, and is a duplicate if the earlier process sends a heartbeat meanwhile. A
    fenced node's leases were over before its fence was proposed, and an unconfirmed epoch never had
    one.

    Raises:
        InvalidArgumentError, DuplicateNodeError, RegistrationPendingError, MembershipChangeError.
    """
    check_registration(request)
    known = state.node_by_id(request.node_id)
    if known is not None:
        refusal = _refusal(known, sessions, request, now)
        if refusal is not None:
            raise refusal
    elif sum(not record.left for record in state.nodes) >= NODES_MAX:
        raise ResourceExhaustedError(resource="registered nodes", limit=NODES_MAX)
    return RegisterNode(
        **asdict(request),
        known_node_epoch=known.info.node_epoch if known is not None else 0,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sender:
    """The node that a request names as its sender: its epoch, and the registration that made it."""

    cluster_id: str
    node_id: str
    node_epoch: int
    registration_id: str


def check_sender(state: ClusterState, sender: Sender) -> NodeRecord:
    """Return the sender's record, if its registration made the node's current epoch.

    Raises:
        UnknownNodeError, NodeFencedError: the sender has to register (again).
    """
    record = state.node_by_id(sender.node_id)
    if record is None:
        raise UnknownNodeError(node_id=sender.node_id)
    claimed = sender.node_epoch, sender.registration_id
    if not record.live or claimed != (record.info.node_epoch, record.registration_id):
        raise NodeFencedError(
            node_id=sender.node_id,
            node_epoch=sender.node_epoch,
            current_node_epoch=record.info.node_epoch,
        )
    return record


def decide_bootstrap(
    state: ClusterState, sessions: Sessions, now: float
) -> AssignPartitions | None:
    """Return the first assignment of all partitions once enough nodes are live, else None."""
    config = state.config
    if config is None or state.bootstrapped:
        return None
    live = [
        record.info
        for record in state.live_nodes
        if not record.draining
        and record.info.pool == state.keyspaces.default.pool
        and sessions.is_live(record.info.number, now)
    ]
    if len(live) < max(config.bootstrap_nodes, config.replication_factor):
        return None
    return AssignPartitions(
        replicas=place(
            {info.number: info.rack for info in live},
            partition_count=config.partition_count,
            replication_factor=config.replication_factor,
        )
    )


def decide_hosted(
    state: ClusterState, record: NodeRecord, hosted: Iterable[HostedPartition]
) -> list[HostedPartition]:
    """Return the acknowledgements that are not recorded yet."""
    waiting = {row.partition_id: row for row in state.assigned_to(record.info.number)}
    return [
        h
        for h in hosted
        if (row := waiting.get(h.partition_id)) is not None
        and row.primary_epoch == h.primary_epoch
        and row.partition_epoch == h.partition_epoch
    ]


def _refusal(
    known: NodeRecord, sessions: Sessions, request: Registration, now: float
) -> KoinonError | None:
    info = known.info
    if info.status is NodeStatus.LEFT:
        return MembershipChangeError(reason=f"node {info.node_id!r} has left the cluster")
    if not known.live:
        return None
    if sessions.is_held(info.number):
        return RegistrationPendingError(node_id=info.node_id, retry_after_ms=HELD_RETRY_MS)
    if _is_elsewhere(known, request) and sessions.is_live(info.number, now):
        challenger = f"{request.address} {request.store_id}"
        if sessions.heard_since_challenge(info.number, challenger, now):
            return DuplicateNodeError(
                node_id=info.node_id, address=request.address, other_address=info.address
            )
        until = min(sessions.ends_at(info.number), now + sessions.times.heartbeat_interval_s * 1.5)
        return _pending(info.node_id, until, now)
    lease_ends_at = sessions.lease_ends_at(info.number)
    if lease_ends_at != NEVER and now < lease_ends_at:
        return _pending(info.node_id, lease_ends_at, now)
    return None


def _is_elsewhere(known: NodeRecord, request: Registration) -> bool:
    """Return whether the request comes from another address or store than the known one. A store
    that still waits for its answer may have moved to another address.
    """
    if known.info.store_id != request.store_id:
        return True
    is_waiting = not known.confirmed and known.registration_id == request.registration_id
    return known.info.address != request.address and not is_waiting


def _pending(node_id: str, until: float, now: float) -> RegistrationPendingError:
    wait_ms = max(1, math.ceil((until - now) * 1000))
    return RegistrationPendingError(node_id=node_id, retry_after_ms=wait_ms)


def _check_redis_ports(ports: Sequence[RedisPort]) -> None:
    field = "redis_ports"
    if len(ports) > REDIS_PORTS_MAX:
        raise InvalidArgumentError(
            field=field, reason="too many of one node", limit=REDIS_PORTS_MAX, actual=len(ports)
        )
    for port in ports:
        check_keyspace_name(port.keyspace, field)
        check_requested_address(field, port.address)
    if len({DEFAULT, *(port.keyspace for port in ports)}) <= len(ports):
        raise InvalidArgumentError(
            field=field, reason=f"one of each keyspace, and redis_address of {DEFAULT!r}"
        )


def _check_length(field: str, value: str) -> None:
    if len(value) > NAME_CHARS_MAX:
        raise InvalidArgumentError(
            field=field, reason="too long", limit=NAME_CHARS_MAX, actual=len(value)
        )
