"""The watch and a primary's proposals, against scripted coordinators over real gRPC."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from koinon_node.config import NodeConfig
from koinon_node.membership.agent import Agent
from koinon_node.membership.coordinator_calls import PLAIN_CHANNELS, LeaderCalls
from koinon_node.ports import RowChange
from koinon_node.state import NodeState
from koinon_node.storage.opened_store import Identity
from koinon_node.store_config import StoreConfig
from koinon_proto.contract.cluster_errors import NodeFencedError, NotLeaderError
from koinon_proto.contract.errors import (
    InternalError,
    KoinonError,
    UnavailableError,
    UnknownFateError,
)
from koinon_proto.contract.table import NodeNumber, PartitionStatus
from koinon_proto.v1 import table_pb2, table_pb2_grpc
from tests.kit.addresses import free_address
from tests.kit.waiting import wait_until
from tests.node.kit.scripted_coordinator import Script, ScriptedCoordinator
from tests.node.kit.support import WAIT_S
from tests.node.membership.test_agent_lease import HeldHost, led


def test_stream_is_read_on_the_thread_that_asks_for_it() -> None:
    """Else gRPC reads it on another, and each looks several times a second whether to go on."""
    with PLAIN_CHANNELS.blocking(free_address()) as channel:
        stub: Any = table_pb2_grpc.TableServiceStub(channel)
        call = stub.WatchTable(table_pb2.GetTableRequest())
        assert "SingleThreaded" in type(call).__name__
        call.cancel()


class Member:
    """An agent on a loop of its own, and the proposals of its node."""

    def __init__(self, tmp_path: Path, coordinators: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.state = NodeState("n1")
        self.host = HeldHost()
        config = NodeConfig(
            node_id="n1",
            listen="127.0.0.1:1",
            advertise="127.0.0.1:1",
            coordinators=tuple(coordinators.split(",")),
            store=StoreConfig(directory=tmp_path),
            weight=250,
        )
        identity = Identity(store_id="s1", cluster_id="", node_epoch=0, registration_id="")
        self.agent = Agent(config, identity, {}, self.state, self.host)
        self.host.on_ready = self.agent.on_ready
        self.calls = LeaderCalls("n1", self.agent)

    def version(self) -> int:
        return self.state.served.table_version

    def alter(self, change: RowChange) -> frozenset[int]:
        """Propose it from the loop; what the loop has seen is checked there, before it goes on."""

        async def propose() -> frozenset[int]:
            rejected = await self.calls.alter_partitions([change])
            assert self.host.tables[-1][0] == self.version()
            return rejected

        return asyncio.run_coroutine_threadsafe(propose(), self.loop).result(WAIT_S)

    def end(self) -> None:
        self.agent.stop()
        asyncio.run_coroutine_threadsafe(self.calls.close(), self.loop).result(WAIT_S)
        self.loop.call_soon_threadsafe(self.host.durable.set)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@contextmanager
def member(
    tmp_path: Path, *coordinators: ScriptedCoordinator, dead: str = "", ready: bool = True
) -> Iterator[Member]:
    addresses = [*filter(None, [dead]), *(c.address for c in coordinators)]
    running = Member(tmp_path, ",".join(addresses))
    if ready:
        running.loop.call_soon_threadsafe(running.host.durable.set)
    running.agent.start(running.loop)
    try:
        wait_until(running.state.serving, "a lease")
        yield running
        assert running.host.failures == []
    finally:
        running.end()


def leads(node: Member, count: int) -> bool:
    return len(led(node.state)) == count


def has_version(node: Member, version: int) -> bool:
    return node.version() == version


def acknowledged(coordinator: ScriptedCoordinator, count: int) -> bool:
    return len(coordinator.acknowledged) == count


def change_of(coordinator: ScriptedCoordinator, partition_id: int, **fields: Any) -> RowChange:
    assert coordinator.table is not None
    row = coordinator.table.rows[partition_id]
    return RowChange(
        partition_id=partition_id,
        primary_epoch=row.primary_epoch,
        partition_epoch=fields.pop("partition_epoch", row.partition_epoch),
        in_sync=fields.pop("in_sync", row.in_sync),
        **fields,
    )


def not_leader(leader: ScriptedCoordinator | None = None) -> Callable[[Any], None]:
    def refuse(request: Any) -> None:
        address = leader.address if leader else ""
        raise NotLeaderError(leader_id="c" if leader else "", leader_address=address, term=1)

    return refuse


# --- the watch ---------------------------------------------------------------------------------


def test_watched_table_is_applied_without_waiting_for_a_heartbeat(tmp_path: Path) -> None:
    script = Script(heartbeats_bring_tables=False, heartbeat_interval_ms=60_000, lease_ms=120_000)
    with ScriptedCoordinator(script) as coordinator, member(tmp_path, coordinator) as node:
        wait_until(partial(leads, node, 16), "it leads all")
        wait_until(lambda: coordinator.watching, "it watches")
        for version in range(2, 20):
            coordinator.change_row(3, primary=NodeNumber(0), primary_epoch=version)
            wait_until(partial(has_version, node, version), "the change is applied")
        assert led(node.state) == frozenset(range(16)) - {3}
        # The first one twice: when it came, and when a heartbeat was acknowledged.
        assert [t[0] for t in node.host.tables] == [1, *range(1, 20)]
        assert all(t[1:] == (1, 1) for t in node.host.tables)


def test_watch_is_opened_at_the_new_leader(tmp_path: Path) -> None:
    with ScriptedCoordinator() as one, ScriptedCoordinator() as two:
        two.script.on_register = two.script.on_heartbeat = not_leader(one)
        with member(tmp_path, one, two) as node:
            wait_until(lambda: one.watching, "it watches the leader")
            with two._lock:
                two.table, two.node_epoch = one.table, one.node_epoch
            two.script.on_heartbeat = lambda request: None
            one.script.on_heartbeat = not_leader(two)
            wait_until(lambda: two.watching and not one.watching, "it watches the new leader")
            two.change_row(3, primary=NodeNumber(0))
            wait_until(lambda: node.version() == 2, "the change is applied")


def test_watch_that_misses_a_table_is_opened_anew(tmp_path: Path) -> None:
    with (
        ScriptedCoordinator(Script(watches_bring_tables=False)) as coordinator,
        member(tmp_path, coordinator) as node,
    ):
        wait_until(lambda: coordinator.watching, "it watches")
        coordinator.change_row(3, primary=NodeNumber(0))
        wait_until(lambda: node.version() == 2, "heartbeats bring it all the same")
        wait_until(lambda: len(coordinator.watches) >= 2, "a second watch")
        assert coordinator.watches[-1].known_version == 2
        assert coordinator.watches[-1].cluster_id == "cluster-a"


def test_watch_refused_is_tried_again_with_a_growing_pause(tmp_path: Path) -> None:
    with (
        ScriptedCoordinator(Script(on_watch=not_leader())) as coordinator,
        member(tmp_path, coordinator) as node,
    ):
        wait_until(lambda: len(coordinator.watches) >= 4, "tries")
        began, tried = time.monotonic(), len(coordinator.watches)
        coordinator.script.on_watch = lambda request: None
        wait_until(lambda: coordinator.watching, "it watches")
        assert len(coordinator.watches) - tried <= 2
        assert time.monotonic() - began < 30
        assert node.state.serving()


def test_agent_stops_at_once_while_the_watch_is_open(tmp_path: Path) -> None:
    with ScriptedCoordinator() as coordinator:
        with member(tmp_path, coordinator):
            wait_until(lambda: coordinator.watching, "it watches")
            began = time.monotonic()
        assert time.monotonic() - began < 30
        wait_until(lambda: not coordinator.watching, "the watch has ended")


# --- adoption ----------------------------------------------------------------------------------


def test_partitions_are_led_and_acknowledged_as_each_becomes_ready(tmp_path: Path) -> None:
    script = Script(heartbeat_interval_ms=60_000, lease_ms=120_000, status=PartitionStatus.ASSIGNED)
    with (
        ScriptedCoordinator(script) as coordinator,
        member(tmp_path, coordinator, ready=False) as node,
    ):
        wait_until(lambda: node.host.adopting, "it is told to adopt")
        adoptions = list(node.host.adopting)
        random.Random(1).shuffle(adoptions)
        for count, adoption in enumerate(adoptions, start=1):
            node.agent.on_ready([adoption])
            wait_until(partial(leads, node, count), "it is led")
            wait_until(partial(acknowledged, coordinator, count), "acknowledged at once")
        assert coordinator.hosted_all()
        assert coordinator.heartbeats[-1].progress[0].partition_id == 7
        assert coordinator.registrations[-1].weight == 250


def test_partition_that_left_the_rows_before_it_was_ready_is_ignored(tmp_path: Path) -> None:
    with (
        ScriptedCoordinator() as coordinator,
        member(tmp_path, coordinator, ready=False) as node,
    ):
        wait_until(lambda: node.host.adopting, "it is told to adopt")
        coordinator.change_row(3, primary=NodeNumber(0), primary_epoch=2)
        wait_until(lambda: node.version() == 2, "the change is applied")
        node.agent.on_ready(node.host.adopting)
        wait_until(partial(leads, node, 15), "the others are led")
        assert 3 not in led(node.state)


def test_fence_is_told_to_the_loop_and_drops_everything(tmp_path: Path) -> None:
    with ScriptedCoordinator() as coordinator, member(tmp_path, coordinator) as node:
        wait_until(partial(leads, node, 16), "it leads all")
        coordinator.script.on_register = not_leader()
        coordinator.fence()
        wait_until(lambda: node.host.tables[-1][2] == 0, "the loop hears of the fence")
        assert led(node.state) == frozenset()
        with pytest.raises(UnavailableError):
            node.alter(change_of(coordinator, 3))
        coordinator.script.on_register = lambda request: None
        wait_until(partial(leads, node, 16), "it leads all again")
        assert node.host.tables[-1][2] == coordinator.node_epoch


# --- proposals ---------------------------------------------------------------------------------


def test_proposal_returns_after_the_loop_has_seen_its_table(tmp_path: Path) -> None:
    with ScriptedCoordinator() as coordinator, member(tmp_path, coordinator) as node:
        wait_until(partial(leads, node, 16), "it leads all")
        for _ in range(20):
            assert node.alter(change_of(coordinator, 3)) == frozenset()
        assert coordinator.alterations[-1].node_epoch == 1
        assert node.alter(change_of(coordinator, 3, partition_epoch=1)) == frozenset((3,))
        assert node.alter(change_of(coordinator, 3, hand_over_to=NodeNumber(2))) == frozenset()
        assert node.version() == 22
        assert 3 not in led(node.state)


def test_proposal_finds_the_leader_past_members_that_are_dead_or_follow(tmp_path: Path) -> None:
    dead = free_address()
    with ScriptedCoordinator() as one, ScriptedCoordinator() as leader:
        one.script.on_alter = not_leader(leader)
        with member(tmp_path, one, dead=dead) as node:
            wait_until(partial(leads, node, 16), "it leads all")
            with leader._lock:
                leader.table, leader.node_epoch = one.table, one.node_epoch
            assert node.alter(change_of(one, 3)) == frozenset()
            assert len(leader.alterations) == 1


@pytest.mark.parametrize(
    ("answer", "seen"),
    [
        (NodeFencedError(node_id="n1", node_epoch=1, current_node_epoch=2), NodeFencedError),
        (UnknownFateError(reason="no quorum"), UnknownFateError),
        (InternalError(reason="a defect"), UnknownFateError),
        (NotLeaderError(leader_id="", leader_address="", term=1), NotLeaderError),
    ],
)
def test_proposal_refused_says_whether_it_may_be_committed(
    tmp_path: Path, answer: KoinonError, seen: type[KoinonError]
) -> None:
    def refuse(request: Any) -> None:
        raise answer

    with (
        ScriptedCoordinator(Script(on_alter=refuse)) as coordinator,
        member(tmp_path, coordinator) as node,
    ):
        wait_until(partial(leads, node, 16), "it leads all")
        with pytest.raises(KoinonError) as raised:
            node.alter(change_of(coordinator, 3))
        assert type(raised.value) is seen


def test_proposal_that_is_cut_off_or_never_answered_is_of_unknown_fate(tmp_path: Path) -> None:
    release = threading.Event()
    with ScriptedCoordinator() as coordinator, ScriptedCoordinator() as other:
        other.script.on_register = other.script.on_heartbeat = not_leader(coordinator)
        with member(tmp_path, coordinator, other) as node:
            wait_until(partial(leads, node, 16), "it leads all")
            coordinator.script.on_alter = lambda request: hold(release)
            change = change_of(coordinator, 3)
            with pytest.raises(UnknownFateError):
                node.alter(change)
            assert other.alterations == []
            release.set()


def hold(release: threading.Event) -> None:
    release.wait(WAIT_S)


def test_proposal_with_no_coordinator_in_reach_was_not_made(tmp_path: Path) -> None:
    with (
        ScriptedCoordinator(Script(lease_ms=60_000)) as coordinator,
        member(tmp_path, coordinator) as node,
    ):
        wait_until(partial(leads, node, 16), "it leads all")
        change = change_of(coordinator, 3)
        coordinator.__exit__()
        with pytest.raises(UnavailableError):
            node.alter(change)
