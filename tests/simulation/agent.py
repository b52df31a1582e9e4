"""A node's agent in virtual time: agent.py's order of events, as tasks of a thread of its own.

The access state and the table in a reply are applied before the lease is extended, which counts
from when the heartbeat was sent. Only the agent changes the table: what others bring are events,
which it takes in the order in which they came, while it does not wait for an answer itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from koinon_coordinator.core.cluster.commands import HostedPartition, PartitionChange, Registered
from koinon_coordinator.core.cluster.load_rules import Load
from koinon_coordinator.core.decide.registrations import Registration, Sender
from koinon_coordinator.leader.membership import NodeReport
from koinon_node.core.membership.assignment import Adoption, Assignment, HostCommand
from koinon_node.core.membership.lease import (
    NO_LEASE,
    PATIENCE_LEASES,
    LoopWatchdog,
    heartbeat_timeout_s,
)
from koinon_node.ports import PeerLostError, RowChange
from koinon_node.state import NodeState
from koinon_node.storage.opened_store import CLUSTER_ID, NODE_EPOCH, REGISTRATION_ID
from koinon_node.storage.store import Store
from koinon_proto.contract.access import Access, AccessState
from koinon_proto.contract.cluster_errors import (
    NodeFencedError,
    NotLeaderError,
    RegistrationPendingError,
    UnknownNodeError,
)
from koinon_proto.contract.errors import (
    KoinonError,
    StorageFullError,
    UnavailableError,
    UnknownFateError,
)
from koinon_proto.contract.table import (
    ClusterConfig,
    NodeId,
    NodeNumber,
    PartitionId,
    Table,
    TableUpdate,
    apply_update,
)
from koinon_proto.v1 import loads_pb2, membership_pb2
from tests.simulation.loop import Process
from tests.simulation.network import NOT_SENT, Network

Answer = TypeVar("Answer")
HEARTBEAT_S = 0.2
ALTER_TIMEOUT_S = 2.0
FAREWELL_TIMEOUT_S = 0.5
HAND_TABLE_TIMEOUT_S = 5.0


class Host(Protocol):
    """The event loop's side, as the agent needs it; as in agent.py."""

    process: Process  # its thread that runs the event loop

    async def adopt(self, adoptions: Sequence[Adoption]) -> None: ...
    async def put_meta(self, values: dict[bytes, str]) -> None: ...
    def on_table(self, table: Table, number: NodeNumber, node_epoch: int) -> None: ...
    def stats(self) -> membership_pb2.NodeStats: ...
    def erased(self) -> Sequence[int]: ...


class SimulatedAgent:
    """One life's agent."""

    def __init__(
        self,
        name: str,
        rack: str,
        store: Store,
        state: NodeState,
        host: Host,
        network: Network,
        coordinators: Sequence[str],
        rng: random.Random,
    ) -> None:
        identity = store.identity()
        self._name = name
        self._rack = rack
        self._store_id = identity.store_id
        self._cluster_id = identity.cluster_id
        self._last_node_epoch = identity.node_epoch
        self._registration_id = identity.registration_id
        self._epoch_registration_id = ""  # of the registration that made the current epoch
        self._node_epoch = 0
        self._state = state
        self._host = host
        self._network = network
        self._coordinators = list(coordinators)
        self._leader = rng.choice(self._coordinators)
        self._rng = rng
        self._assignment = Assignment(NodeId(name), store.seen_epochs)
        self._lease_s = 1.0
        self._left = False
        self._asked = False  # for a sign that the event loop turns, which has not come yet
        self._signs = 0  # that it has given
        self._events: deque[Callable[[], None]] = deque()
        self._came = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Register, heartbeat until fenced, again and again until the node leaves."""
        while not self._left:
            await self._register()
            await self._heartbeat_until_fenced()

    async def leave(self) -> None:
        """Give up the lease, then say farewell, which may reach no coordinator."""
        self._left = True
        await self._say_farewell()

    async def _say_farewell(self) -> None:
        self._state.lease = NO_LEASE
        node_epoch = self._node_epoch
        if not node_epoch:
            return

        def request() -> dict[str, Any]:
            return {"sender": self._sender(node_epoch)}

        with contextlib.suppress(KoinonError):
            await self._ask("leave", request, timeout_s=FAREWELL_TIMEOUT_S)

    def _sender(self, node_epoch: int) -> Sender:
        return Sender(
            cluster_id=self._cluster_id,
            node_id=self._name,
            node_epoch=node_epoch,
            registration_id=self._epoch_registration_id,
        )

    # --- events ------------------------------------------------------------------------------

    def _put(self, event: Callable[[], None]) -> None:
        self._events.append(event)
        self._came.set()

    async def _take_events(self, until: float) -> None:
        """Wait for the next heartbeat's time, or for something that is worth one at once."""
        for _ in range(len(self._events)):
            await self._take_event(until)
        while not self._assignment.acknowledgements():
            if self._state.now() >= until or not await self._take_event(until):
                return

    async def _pause(self, seconds: float) -> None:
        """Wait, taking events meanwhile."""
        until = self._state.now() + seconds
        while self._state.now() < until and await self._take_event(until):
            pass

    async def _take_event(self, until: float) -> bool:
        """Take the next event; return False if none came in time."""
        while not self._events:
            left_s = until - self._state.now()
            if left_s <= 0:
                return False
            self._came.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._came.wait()
        self._events.popleft()()
        return True

    # --- calls -------------------------------------------------------------------------------

    async def _ask(
        self, service: str, request: Callable[[], dict[str, Any]], timeout_s: float
    ) -> Any:
        """Ask once around; ``request`` is made anew for each attempt."""
        failure: KoinonError = UnavailableError(reason="nobody was asked")
        for _ in range(len(self._coordinators) + 1):
            try:
                return await self._network.call(
                    self._name,
                    self._leader,
                    service,
                    timeout_s=timeout_s,
                    may_double=True,
                    **request(),
                )
            except NotLeaderError as error:
                failure = error
                self._follow(error)
            except PeerLostError as error:
                failure = error
                self._pass_over()
        raise failure

    def _follow(self, error: NotLeaderError) -> None:
        if error.leader_address and error.leader_address != self._leader:
            self._leader = error.leader_address
        else:
            self._pass_over()

    def _pass_over(self) -> None:
        place = self._coordinators.index(self._leader)
        self._leader = self._coordinators[(place + 1) % len(self._coordinators)]

    # --- registration ------------------------------------------------------------------------

    async def _register(self) -> None:
        if not self._registration_id:
            self._registration_id = f"{self._rng.getrandbits(64):016x}"
            await self._persist({REGISTRATION_ID: self._registration_id})
        registration = Registration(
            node_id=self._name,
            address=f"{self._name}:1",
            rack=self._rack,
            store_id=self._store_id,
            last_node_epoch=self._last_node_epoch,
            registration_id=self._registration_id,
        )

        def request() -> dict[str, Any]:
            return {"request": registration, "cluster_id": self._cluster_id}

        while True:
            try:
                answer = await self._ask("register", request, timeout_s=1.5)
            except RegistrationPendingError as error:
                await self._pause(max(error.retry_after_ms, 10) / 1000)
            except (NotLeaderError, PeerLostError, UnavailableError):
                await self._pause(self._rng.uniform(0.02, 0.2))
            else:
                await self._on_registered(*answer)
                return

    async def _on_registered(
        self,
        registered: Registered,
        cluster: ClusterConfig,
        update: TableUpdate | None,
        access: AccessState | None,
    ) -> None:
        node_epoch = registered.node_epoch
        await self._persist(
            {CLUSTER_ID: cluster.cluster_id, NODE_EPOCH: str(node_epoch), REGISTRATION_ID: ""}
        )
        self._epoch_registration_id, self._registration_id = self._registration_id, ""
        self._state.registration_id = self._epoch_registration_id
        self._cluster_id = cluster.cluster_id
        self._node_epoch = self._last_node_epoch = node_epoch
        self._assignment.on_registered(node_epoch)
        if access is not None:
            self._apply_access(access)
        if update is not None:
            self._apply(update)
        else:
            self._publish()
        if self._watching is None:
            self._watching = asyncio.ensure_future(self._watch())

    async def _persist(self, values: dict[bytes, str]) -> None:
        """Have the event loop write it, and wait for that."""
        await self._host.process.spawn(self._host.put_meta(values))

    # --- heartbeats --------------------------------------------------------------------------

    async def _heartbeat_until_fenced(self) -> None:
        loop_watch = LoopWatchdog(self._state.now())
        while not self._left:
            sent_at = self._state.now()
            silent_s = loop_watch.silent_s(self._signs, sent_at)
            if silent_s > PATIENCE_LEASES * self._lease_s:
                await self._say_farewell()
                self._end_epoch()
                return
            self._ask_for_a_sign()
            try:
                await self._heartbeat()
            except (NodeFencedError, UnknownNodeError):
                self._end_epoch()
                return
            except KoinonError:
                await self._pause(self._rng.uniform(0.01, 0.05))
                continue
            await self._take_events(sent_at + HEARTBEAT_S)

    def _ask_for_a_sign(self) -> None:
        if not self._asked:
            self._asked = True
            self._host.process.call_soon(self._give_a_sign)

    def _give_a_sign(self) -> None:
        self._signs += 1
        self._asked = False

    def _end_epoch(self) -> None:
        self._state.lease = NO_LEASE
        self._node_epoch = 0
        self._assignment.on_fenced()
        self._publish()

    async def _heartbeat(self) -> None:
        acknowledgements = self._assignment.acknowledgements()
        hosted = [HostedPartition(**command._asdict()) for command in acknowledgements]
        node_epoch, table_version = self._node_epoch, self._version()
        erased = self._host.erased()
        sent_at = 0.0

        def request() -> dict[str, Any]:
            nonlocal sent_at
            sent_at = self._state.now()
            report = NodeReport(
                hosted=hosted,
                stats=self._host.stats(),
                access_version=self._state.access.version,
                table_version=table_version,
                erased=erased,
            )
            return {"sender": self._sender(node_epoch), "report": report}

        timeout_s = heartbeat_timeout_s(self._lease_s, HEARTBEAT_S)
        answer = await self._ask("heartbeat", request, timeout_s=timeout_s)
        commands, update, access, lease_ms = answer
        if self._left:
            return
        self._assignment.on_acknowledged(acknowledgements)
        if access is not None:
            self._apply_access(access)
        if update is not None:
            self._apply(update)
        self._assignment.on_commands(
            HostCommand(c.partition_id, c.primary_epoch, c.partition_epoch) for c in commands
        )
        self._lease_s = lease_ms / 1000
        confirmed = self._state.confirmed(node_epoch)
        self._state.lease = self._state.lease.renewed(node_epoch, sent_at, self._lease_s)
        if not confirmed:
            self._tell()

    def _apply_access(self, state: AccessState) -> None:
        if state.version > self._state.access.version:
            self._state.access = Access(state, self._state.access)

    # --- the table ---------------------------------------------------------------------------

    def _version(self) -> int:
        table = self._assignment.table
        return table.table_version if table else 0

    async def _watch(self) -> None:
        """Hear of new tables at once, from whichever coordinator answers."""
        at = self._leader
        version = 0
        while True:
            version = max(version, self._version())
            try:
                update = await self._network.call(self._name, at, "watch", version, timeout_s=2.0)
            except KoinonError:
                at = self._rng.choice([self._leader, *self._coordinators])
                version = 0
                await asyncio.sleep(0.05)
                continue
            if update is not None:
                version = update.table_version
                self._put(partial(self._apply, update))

    def _apply(self, update: TableUpdate) -> None:
        before = self._assignment.table
        table = apply_update(before, update)
        if table is None or (table is before and self._state.served.node_epoch == self._node_epoch):
            return
        adoptions = self._assignment.on_table(table)
        self._assignment.take_refused()
        self._publish()
        if adoptions:
            self._host.process.spawn(self._host.adopt(adoptions))

    def on_ready(self, adoptions: Sequence[Adoption]) -> None:
        """Tell the agent that these partitions have been taken over and may be led."""
        self._put(partial(self._ready, tuple(adoptions)))

    def _ready(self, adoptions: Sequence[Adoption]) -> None:
        self._assignment.on_adopted(adoptions)
        self._publish()

    def _publish(self) -> None:
        before, served = self._state.served, self._assignment.served()
        self._state.served = served
        if served.table is not before.table or served.node_epoch != before.node_epoch:
            self._tell()

    def _tell(self) -> None:
        served, host = self._state.served, self._host
        if served.table is not None:
            host.process.call_soon(
                host.on_table, served.table, served.node_number, served.node_epoch
            )

    # --- a primary's proposals (ports.CoordinatorCalls) --------------------------------------

    async def alter_partitions(self, changes: Sequence[RowChange]) -> frozenset[int]:
        """See ports.CoordinatorCalls; as coordinators.LeaderCalls."""
        if not self._state.served.node_epoch:
            await asyncio.sleep(0.05)
            raise UnavailableError(reason="the node is not registered")
        request = {
            "sender": self._sender(self._state.served.node_epoch),
            "changes": [_change(change) for change in changes],
        }
        version = self._state.served.table_version
        leader = self._leader
        failure: KoinonError = UnavailableError(reason="no coordinator can be reached")
        for _ in range(len(self._coordinators) + 1):
            try:
                rejected, update = await self._network.call(
                    self._name,
                    leader,
                    "alter",
                    version,
                    timeout_s=ALTER_TIMEOUT_S,
                    may_double=True,
                    **request,
                )
                await self._hand_table(update)
                return frozenset(rejected)
            except NotLeaderError as error:
                failure = error
                leader = error.leader_address or self._rng.choice(self._coordinators)
            except PeerLostError as error:
                if not error.reason.startswith(NOT_SENT):
                    raise UnknownFateError(reason=error.reason) from None
                failure = UnavailableError(reason=error.reason)
                leader = self._rng.choice(self._coordinators)
        await asyncio.sleep(self._rng.uniform(0.05, 0.1))
        raise failure

    async def load_manifest(self, cluster_id: str, load_id: int) -> loads_pb2.LoadManifest:
        load: Load = await self._ask_loads("manifest", load_id, cluster_id)
        return loads_pb2.LoadManifest(
            load_id=load.load_id,
            mode=cast(Any, int(load.mode)),
            prefix=load.prefix,
            attempts=load.attempts,
            partition_ids=load.unmerged,
        )

    async def report_merged(
        self, cluster_id: str, load_id: int, partition_ids: Sequence[int]
    ) -> None:
        await self._ask_loads("merged", load_id, partition_ids, cluster_id)

    async def _ask_loads(self, method: str, *arguments: Any) -> Any:
        leader = self._leader
        failure: KoinonError = UnavailableError(reason="no coordinator can be reached")
        for _ in range(len(self._coordinators) + 1):
            try:
                return await self._network.call(
                    self._name,
                    leader,
                    "loads",
                    method,
                    *arguments,
                    timeout_s=ALTER_TIMEOUT_S,
                    may_double=True,
                )
            except NotLeaderError as error:
                failure = error
                leader = error.leader_address or self._rng.choice(self._coordinators)
            except PeerLostError as error:
                failure = UnknownFateError(reason=error.reason)
                leader = self._rng.choice(self._coordinators)
        raise failure

    async def _hand_table(self, update: TableUpdate | None) -> None:
        """Return once the update, and all that came before it, is applied and has been seen."""
        seen: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def see() -> None:
            if not seen.done():
                seen.set_result(None)

        def apply() -> None:
            if update is not None:
                self._apply(update)
            self._host.process.call_soon(see)

        self._put(apply)
        try:
            async with asyncio.timeout(HAND_TABLE_TIMEOUT_S):
                await seen
        except TimeoutError:
            raise UnknownFateError(reason="the table in the answer is not applied yet") from None


def _change(change: RowChange) -> PartitionChange:
    return PartitionChange(
        partition_id=PartitionId(change.partition_id),
        primary_epoch=change.primary_epoch,
        partition_epoch=change.partition_epoch,
        in_sync=change.in_sync,
        hand_over_to=change.hand_over_to,
    )


async def while_no_room(work: Callable[[], Awaitable[Answer]]) -> Answer:
    """Do it, again and again while the disk is full."""
    while True:
        try:
            return await work()
        except StorageFullError:
            await asyncio.sleep(0.2)
