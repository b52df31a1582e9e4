"""Helpers of the coordinator's tests: small states, a clock to turn, a group of one, a term."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from random import Random
from typing import Any, TypeVar

from koinon_coordinator.config import BootstrapConfig, TimingConfig
from koinon_coordinator.core.cluster.commands import (
    AssignPartitions,
    Command,
    ConfirmRegistration,
    CreateCluster,
    FenceNode,
    HostedPartition,
    PartitionChange,
    PartitionsHosted,
    Registered,
    RegisterNode,
    Result,
)
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_coordinator.core.decide.registrations import Registration, Sender
from koinon_coordinator.core.decide.room import NodeUse
from koinon_coordinator.leader.context import LeaderContext as TermContext
from koinon_coordinator.leader.leadership import Leadership
from koinon_coordinator.leader.membership import NodeReport
from koinon_coordinator.state_machine import ReplicatedState
from koinon_coordinator.wire.state_codec import command_from_bytes
from koinon_proto.contract.errors import KoinonError, UnknownFateError
from koinon_proto.contract.table import (
    NO_NODE,
    ClusterConfig,
    NodeId,
    NodeNumber,
    PartitionId,
    PartitionRow,
)
from tests.kit.waiting import until

T = TypeVar("T")
TIMING = TimingConfig()
BOOTSTRAP = BootstrapConfig(partition_count=8)


def cluster_config(
    *,
    partitions: int = 8,
    replicas: int = 1,
    min_in_sync: int | None = None,
    nodes: int = 1,
    rereplicate_after_ms: int = 600_000,
) -> ClusterConfig:
    return ClusterConfig(
        cluster_id="c0ffee",
        partitioner="murmur2",
        partition_count=partitions,
        replication_factor=replicas,
        min_in_sync=(replicas + 1) // 2 if min_in_sync is None else min_in_sync,
        bootstrap_nodes=nodes,
        max_value_bytes=1024,
        rereplicate_after_ms=rereplicate_after_ms,
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
    replicas: Sequence[tuple[int, ...]],
    *,
    nodes: int = 3,
    min_in_sync: int | None = None,
    rereplicate_after_ms: int = 600_000,
) -> ClusterState:
    """A state with nodes n1.. (numbers 1..), all rows online."""
    state = ClusterState()
    config = cluster_config(
        partitions=len(replicas),
        replicas=len(replicas[0]),
        min_in_sync=min_in_sync,
        nodes=nodes,
        rereplicate_after_ms=rereplicate_after_ms,
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

    * None: applied;  an error: not appended, raised;  "lost": applied, but no answer comes.
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

    async def read_barrier(self) -> int:
        return len(self.proposed)

    def quorum_contact_at(self) -> float | None:
        return None if self.contact_age_s is None else self.clock() - self.contact_age_s


class LeaderContext:
    """A leadership that runs, with a clock to turn."""

    def __init__(
        self, bootstrap: BootstrapConfig = BOOTSTRAP, state: ClusterState | None = None
    ) -> None:
        self.clock = Clock()
        self.replicated = ReplicatedState()
        if state is not None:
            self.replicated.state = state
        self.group = GroupOfOne(self.replicated, self.clock)
        self.bootstrap = bootstrap
        self._answers: dict[str, list[HostedPartition]] = {}
        self.leadership = self.begin(1)

    def begin(self, term: int) -> Leadership:
        context = TermContext(
            number=term,
            group=self.group,
            replicated=self.replicated,
            clock=self.clock,
            random=Random(),
        )
        self.leadership = Leadership(context, self.bootstrap, TIMING)
        self.leadership.mover.batch_pause_s = 0.0  # a real clock's
        for record in self.replicated.state.nodes:  # as if each had been heard already
            self.leadership.mover.note_use(record.info.number, NodeUse())
        self.leadership.term.computed = at_once  # type: ignore[method-assign]
        return self.leadership

    async def pass_time(self, seconds: float) -> None:
        """Move the clock in steps of a tick, letting the leader tick at each."""
        for _ in range(round(seconds / TIMING.tick_s)):
            self.clock.now += TIMING.tick_s
            self.leadership._tick()
            for _ in range(5):
                await asyncio.sleep(0)

    async def register(self, node_id: str = "n1", **kwargs: object) -> Registered:
        return await self.leadership.members.register(request(node_id, **kwargs), "")  # type: ignore[arg-type]

    def sender(
        self, node_id: str = "n1", epoch: int = 1, registration_id: str | None = None
    ) -> Sender:
        """Return the node as the sender of a request; by its own registration, if none is named."""
        record = self.replicated.state.node_by_id(node_id)
        own = record.registration_id if record is not None else ""
        return Sender(
            cluster_id="",
            node_id=node_id,
            node_epoch=epoch,
            registration_id=own if registration_id is None else registration_id,
        )

    async def heartbeat(
        self,
        node_id: str = "n1",
        epoch: int = 1,
        answer: Sequence[HostedPartition] | None = None,
        **report: Any,
    ) -> list[HostedPartition]:
        return await self.leadership.members.heartbeat(
            self.sender(node_id, epoch), NodeReport(hosted=answer or (), **report), self.clock.now
        )

    async def live(self, seconds: float, *node_ids: str) -> None:
        """Let time pass while these nodes heartbeat, and host what they are given; the others are
        silent. The mover comes to its end in between.
        """
        answers = self._answers
        for _ in range(max(1, round(seconds / 0.2))):
            self.clock.now += 0.2
            for node_id in node_ids:
                record = self.replicated.state.node_by_id(node_id)
                assert record is not None
                epoch = record.info.node_epoch
                answers[node_id] = await self.heartbeat(node_id, epoch, answers.get(node_id))
            self.leadership._tick()
            await settled()

    async def propose(
        self, partition_id: int, *in_sync: int, to: int = NO_NODE
    ) -> tuple[PartitionId, ...]:
        """The partition's primary wants this in-sync set, and hands over."""
        state = self.replicated.state
        row = state.row(partition_id)
        assert row is not None
        primary = state.node(row.primary)
        assert primary is not None
        change = PartitionChange(
            partition_id=row.partition_id,
            primary_epoch=row.primary_epoch,
            partition_epoch=row.partition_epoch,
            in_sync=tuple(NodeNumber(n) for n in in_sync) or row.in_sync,
            hand_over_to=NodeNumber(to),
        )
        return await self.leadership.members.alter_partitions(
            self.sender(primary.info.node_id, primary.info.node_epoch), [change]
        )

    def count(self, kind: type[Command]) -> int:
        return sum(isinstance(c, kind) for c in self.group.proposed)


async def at_once(work: Callable[[], T]) -> T:
    """In place of a thread, for which ``settled`` could not wait."""
    return work()


async def settled() -> None:
    """Let everything that is due on the loop happen: nothing here waits for a real clock."""
    for _ in range(20):
        await asyncio.sleep(0)


def run_term(
    test: Callable[[LeaderContext], Awaitable[None]],
    bootstrap: BootstrapConfig = BOOTSTRAP,
    state: ClusterState | None = None,
) -> LeaderContext:
    """Run the test beside the leadership's own tasks (its ticks stand still with the clock)."""

    async def whole() -> LeaderContext:
        term = LeaderContext(bootstrap, state)
        running = asyncio.ensure_future(term.leadership.run())
        await until(lambda: term.leadership.term.is_open)
        try:
            await test(term)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        return term

    return asyncio.run(asyncio.wait_for(whole(), 60))


def hold_proposals(term: LeaderContext) -> tuple[asyncio.Event, asyncio.Event]:
    """Hold what is proposed from now on; return what says that there is some, and the gate."""
    proposed, gate, propose = asyncio.Event(), asyncio.Event(), term.group.propose

    async def hold(command: bytes) -> object:
        proposed.set()
        await gate.wait()
        return await propose(command)

    term.group.propose = hold  # type: ignore[method-assign]
    return proposed, gate
