"""What the coordinator's tests share: small states, a clock to turn, a group of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from koinon_coordinator.config import BootstrapConfig, TimingConfig
from koinon_coordinator.convert import command_from_bytes
from koinon_coordinator.core.commands import (
    AssignPartitions,
    Command,
    ConfirmRegistration,
    CreateCluster,
    FenceNode,
    HostedPartition,
    PartitionsHosted,
    Registered,
    RegisterNode,
    Result,
)
from koinon_coordinator.core.decisions import Registration
from koinon_coordinator.core.state import ClusterState
from koinon_coordinator.replicated import ReplicatedState
from koinon_proto.errors import KoinonError, UnknownFateError
from koinon_proto.table import ClusterConfig, NodeId, NodeNumber, PartitionId, PartitionRow

TIMING = TimingConfig()
BOOTSTRAP = BootstrapConfig(partition_count=8)


def cluster_config(
    *, partitions: int = 8, replicas: int = 1, min_in_sync: int | None = None, nodes: int = 1
) -> ClusterConfig:
    return ClusterConfig(
        cluster_id="c0ffee",
        partitioner="murmur2",
        partition_count=partitions,
        replication_factor=replicas,
        min_in_sync=(replicas + 1) // 2 if min_in_sync is None else min_in_sync,
        bootstrap_nodes=nodes,
        max_value_bytes=1024,
    )


def register(
    node_id: str,
    *,
    store: str = "",
    last: int = 0,
    registration: str = "r1",
    known: int = 0,
    address: str = "",
    rack: str = "",
) -> RegisterNode:
    return RegisterNode(
        node_id=NodeId(node_id),
        address=address or f"{node_id}:1",
        rack=rack,
        store_id=store or f"store-{node_id}",
        last_node_epoch=last,
        registration_id=registration,
        known_node_epoch=known,
    )


def request(
    node_id: str,
    *,
    store: str = "",
    last: int = 0,
    registration: str = "r1",
    address: str = "",
) -> Registration:
    return Registration(
        node_id=node_id,
        address=address or f"{node_id}:1",
        rack="",
        store_id=store or f"store-{node_id}",
        last_node_epoch=last,
        registration_id=registration,
    )


def apply_all(state: ClusterState, commands: Iterable[Command]) -> list[Result]:
    return [state.apply(command) for command in commands]


def registered(result: Result) -> Registered:
    assert isinstance(result, Registered), result
    return result


def host_everything(state: ClusterState) -> None:
    """Every live node confirms its epoch and hosts what it was assigned."""
    for record in state.live_nodes:
        number, epoch = record.info.number, record.info.node_epoch
        state.apply(ConfirmRegistration(node_number=number, node_epoch=epoch))
        rows = state.assigned_to(number)
        if rows:
            state.apply(
                PartitionsHosted(node_number=number, node_epoch=epoch, hosted=hosted_of(rows))
            )


def hosted_of(rows: Iterable[PartitionRow]) -> tuple[HostedPartition, ...]:
    return tuple(
        HostedPartition(
            partition_id=PartitionId(row.partition_id),
            primary_epoch=row.primary_epoch,
            partition_epoch=row.partition_epoch,
        )
        for row in rows
    )


def bootstrapped(
    replicas: list[tuple[int, ...]], *, nodes: int = 3, min_in_sync: int | None = None
) -> ClusterState:
    """A state with nodes n1.. (numbers 1..), all rows online."""
    state = ClusterState()
    config = cluster_config(
        partitions=len(replicas), replicas=len(replicas[0]), min_in_sync=min_in_sync, nodes=nodes
    )
    state.apply(CreateCluster(config=config))
    for i in range(nodes):
        state.apply(register(f"n{i + 1}"))
    rows = tuple(tuple(NodeNumber(n) for n in row) for row in replicas)
    state.apply(AssignPartitions(replicas=rows))
    host_everything(state)
    return state


def fence(state: ClusterState, number: int) -> Result:
    record = state.node(NodeNumber(number))
    assert record is not None
    return state.apply(FenceNode(node_number=record.info.number, node_epoch=record.info.node_epoch))


class Clock:
    """A clock that moves only when told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class GroupOfOne:
    """Applies every proposal at once. ``fate`` may decide otherwise, by command:

    * None: applied;  an error: not appended, raised;  "lost": applied, but nobody hears of it.
    """

    def __init__(self, replicated: ReplicatedState, clock: Callable[[], float]) -> None:
        self.replicated = replicated
        self.clock = clock
        self.proposed: list[Command] = []
        self.contact_age_s: float | None = 0.0
        self.fate: Callable[[Command], KoinonError | str | None] = lambda _: None

    async def propose(self, command: bytes) -> object:
        decoded = command_from_bytes(command)
        fate = self.fate(decoded)
        if isinstance(fate, KoinonError):
            raise fate
        self.proposed.append(decoded)
        result = self.replicated.apply(len(self.proposed), command)
        if fate == "lost":
            raise UnknownFateError(reason="leadership was lost")
        return result

    def quorum_contact_at(self) -> float | None:
        return None if self.contact_age_s is None else self.clock() - self.contact_age_s
