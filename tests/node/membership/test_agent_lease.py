"""The agent's lease: its beginning and what it covers, over a scripted channel and clock."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from koinon_node.config import NodeConfig
from koinon_node.core.membership.assignment import Adoption
from koinon_node.core.membership.lease import clock_ahead_ms, heartbeat_timeout_s
from koinon_node.membership.agent import Agent
from koinon_node.membership.coordinator_calls import Channels
from koinon_node.state import NodeState
from koinon_node.storage.opened_store import Identity
from koinon_node.store_config import StoreConfig
from koinon_proto.contract import convert
from koinon_proto.contract.access import AccessState
from koinon_proto.contract.table import (
    NodeNumber,
    Table,
)
from koinon_proto.v1 import membership_pb2, raft_pb2
from tests.kit.tables import config_of, node_of, row_of, table_with
from tests.kit.waiting import wait_until
from tests.node.kit.heartbeat_port import HeartbeatPort

LEASE_S = 1.0
START_S = 100.0
Heartbeat = membership_pb2.HeartbeatResponse


def table_of(version: int, primaries: Sequence[int]) -> Table:
    """A table of two nodes; this one, n1, has number 1."""
    rows = [
        row_of(p, primary, primary_epoch=version, partition_epoch=version, changed_at=version)
        for p, primary in enumerate(primaries)
    ]
    config = config_of(len(rows), cluster_id="cluster-a")
    return table_with(rows, [node_of(1), node_of(2)], version=version, config=config)


class HeldChannels(Channels):
    """Has one channel to whatever address."""

    def __init__(self, channel: Callable[[], Any]) -> None:
        super().__init__()
        self._channel = channel

    def blocking(self, address: str) -> Any:
        return self._channel()


class ScriptedChannel:
    """Registers n1 with ``table``; answers a heartbeat once the test has said how."""

    def __init__(self, table: Table) -> None:
        self.requests: list[membership_pb2.HeartbeatRequest] = []
        self.timeouts_s: list[float] = []
        self._table = table
        self._answers: list[Callable[[], Heartbeat]] = []
        self._answered = 0
        self._changed = threading.Condition()
        self._closed = False
        self._port = HeartbeatPort(self._heartbeat)

    def answer(self, how: Callable[[], Heartbeat]) -> None:
        """Answer the next heartbeat so; return when the agent has asked for the one after it."""
        wait_until(lambda: len(self.requests) > self._answered, "a heartbeat")
        with self._changed:
            asked = len(self.requests)  # the last of them waits
            self._answers.append(how)
            self._changed.notify_all()
        wait_until(lambda: len(self.requests) > asked, "the next heartbeat")

    def unary_unary(self, method: str, **_: Any) -> Callable[..., Any]:
        return self._register if method.endswith("Register") else self._get_peer_port

    def unary_stream(self, method: str, **_: Any) -> Callable[..., Any]:
        return lambda request: QuietStream()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._port.close()

    def _register(self, request: Any, timeout: float, **_: Any) -> membership_pb2.RegisterResponse:
        reply = membership_pb2.RegisterResponse(
            cluster_id="cluster-a",
            node_epoch=1,
            term=1,
            heartbeat_interval_ms=1,
            lease_ms=int(LEASE_S * 1000),
        )
        reply.table.CopyFrom(convert.update_to_proto(self._table.since(0)))
        return reply

    def _get_peer_port(self, request: Any, timeout: float) -> raft_pb2.GetPeerPortResponse:
        self.timeouts_s.append(timeout)
        return raft_pb2.GetPeerPortResponse(peer_port=self._port.number)

    def _heartbeat(self, request: membership_pb2.HeartbeatRequest) -> Heartbeat | None:
        with self._changed:
            self.requests.append(request)
            self._changed.wait_for(lambda: self._answers or self._closed)
            if not self._answers:
                return None
            how = self._answers.pop(0)
            self._answered += 1
        return how()


class QuietStream:
    """A watch that brings nothing until it is cancelled."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        self._cancelled.set()

    def __iter__(self) -> Iterator[Any]:
        self._cancelled.wait()
        return iter(())


class RecordingState(NodeState):
    """Records (lease's end, partitions served) after each change of either, and (lease's end,
    version of access) after each change of the lease.
    """

    history: list[tuple[float, frozenset[int]]]
    access_at: list[tuple[float, int]]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "lease" and hasattr(self, "access"):
            self.__dict__.setdefault("access_at", []).append((value.until_s, self.access.version))
        if name in ("lease", "served") and hasattr(self, "served"):
            self.__dict__.setdefault("history", []).append((self.lease.until_s, led(self)))


def led(state: NodeState) -> frozenset[int]:
    return frozenset(p for p, epoch in enumerate(state.served.epochs.tolist()) if epoch)


class HeldHost:
    """The loop's side; what is adopted becomes ready when ``durable`` is set."""

    def __init__(self) -> None:
        self.adopting: list[Adoption] = []
        self.tables: list[tuple[int, int, int]] = []  # (version, number, node epoch)
        self.durable = asyncio.Event()
        self.failures: list[BaseException] = []
        self.on_ready: Callable[[Sequence[Adoption]], None] = lambda adoptions: None

    async def adopt(self, adoptions: Sequence[Adoption]) -> None:
        self.adopting += adoptions
        await self.durable.wait()
        self.on_ready(adoptions)

    def on_table(self, table: Table, number: NodeNumber, node_epoch: int) -> None:
        self.tables.append((table.table_version, number, node_epoch))

    def progress(self) -> Sequence[membership_pb2.ReplicaProgress]:
        return [membership_pb2.ReplicaProgress(partition_id=7, records=len(self.adopting))]

    def sizes(self) -> membership_pb2.PartitionSizes:
        return membership_pb2.PartitionSizes(partition_ids=[7], bytes=[70])

    def load(self, lag_s: float) -> membership_pb2.NodeLoad:
        return membership_pb2.NodeLoad(partition_ids=[7], lead=[700], follow=[0])

    def erased(self) -> Sequence[int]:
        return ()

    def on_fatal(self, error: BaseException) -> None:
        self.failures.append(error)

    async def put_meta(self, values: Mapping[bytes, str]) -> None:
        pass

    def stats(self) -> membership_pb2.NodeStats:
        return membership_pb2.NodeStats()


@dataclass
class Running:
    state: RecordingState
    host: HeldHost
    channel: ScriptedChannel
    loop: asyncio.AbstractEventLoop
    now_s: float = START_S
    agent: Agent | None = None

    def reply(
        self,
        table: Table | None = None,
        took_s: float = 0.0,
        access: AccessState | None = None,
        term: int = 1,
        wall_ms: int = 0,
    ) -> Callable[[], Heartbeat]:
        """A heartbeat that is acknowledged after so long."""

        def answer() -> Heartbeat:
            self.now_s += took_s
            reply = Heartbeat(term=term, lease_ms=int(LEASE_S * 1000), wall_ms=wall_ms)
            if table is not None:
                reply.table.CopyFrom(convert.update_to_proto(table.since(1)))
            if access is not None:
                reply.access.CopyFrom(convert.ACCESS.encode(access))
            return reply

        return answer

    def make_durable(self) -> None:
        self.loop.call_soon_threadsafe(self.host.durable.set)

    def answer_until_led(self, partitions: set[int]) -> None:
        """Answer heartbeats until these are served: the loop may tell late what has become ready,
        and the agent hears of it between two heartbeats.
        """
        while led(self.state) != partitions:
            self.channel.answer(self.reply())


@contextmanager
def running_agent(tmp_path: Path, table: Table) -> Iterator[Running]:
    """Run an agent whose first heartbeat waits for its answer."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    state = RecordingState("n1", now=lambda: running.now_s)
    running = Running(state, HeldHost(), ScriptedChannel(table), loop)
    config = NodeConfig(
        node_id="n1",
        listen="127.0.0.1:1",
        advertise="127.0.0.1:1",
        coordinators=("127.0.0.1:2",),
        store=StoreConfig(directory=tmp_path),
    )
    agent = Agent(
        config,
        Identity(store_id="s1", cluster_id="", node_epoch=0, registration_id=""),
        {},
        state,
        running.host,
        channels=HeldChannels(lambda: running.channel),
    )
    running.host.on_ready = agent.on_ready
    running.agent = agent
    agent.start(loop)
    try:
        wait_until(lambda: running.channel.requests or running.host.failures, "the first heartbeat")
        yield running
        assert running.host.failures == []
    finally:
        agent.stop()
        loop.call_soon_threadsafe(running.host.durable.set)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        while tasks := asyncio.all_tasks(loop):  # what is adopted ends, as it is durable now
            loop.run_until_complete(asyncio.gather(*tasks))
        loop.close()


def test_agent_registered_without_an_acknowledged_heartbeat_holds_no_lease(
    tmp_path: Path,
) -> None:
    with running_agent(tmp_path, table_of(1, [1, 1])) as running:
        assert not running.state.serving()
        running.channel.answer(running.reply())
        assert running.state.serving()


def test_heartbeat_is_waited_for_for_most_of_a_lease(tmp_path: Path) -> None:
    """Else a leader that answers late would hear of no heartbeat: each is given up before it is
    read. After one that is never answered there is time to find another leader.
    """
    with running_agent(tmp_path, table_of(1, [1, 1])) as running:
        running.channel.answer(running.reply())
        for timeout_s in running.channel.timeouts_s:
            assert LEASE_S / 2 < timeout_s < 0.95 * LEASE_S
    assert heartbeat_timeout_s(1.0, 0.2) == pytest.approx(0.7)
    assert heartbeat_timeout_s(1.0, 0.9) == pytest.approx(1 / 3)


def test_lease_of_a_slow_heartbeat_is_counted_from_its_sending(tmp_path: Path) -> None:
    with running_agent(tmp_path, table_of(1, [1, 1])) as running:
        running.channel.answer(running.reply(took_s=0.75))
        assert running.state.lease.until_s == START_S + LEASE_S
        running.channel.answer(running.reply(took_s=0.75))
        assert running.state.lease.until_s == START_S + 0.75 + LEASE_S


def test_heartbeat_acknowledged_later_than_a_lease_gives_none(tmp_path: Path) -> None:
    with running_agent(tmp_path, table_of(1, [1, 1])) as running:
        running.channel.answer(running.reply(took_s=LEASE_S))
        assert not running.state.serving()


def test_lease_is_extended_only_after_the_replys_table_is_applied(tmp_path: Path) -> None:
    """Or a partition that the table takes away would be served under the new lease for a moment."""
    with running_agent(tmp_path, table_of(1, [1, 1])) as running:
        running.make_durable()
        running.answer_until_led({0, 1})
        moved = table_of(2, [1, 2])
        moved = replace(moved, rows=(table_of(1, [1, 1]).rows[0], moved.rows[1]))
        running.now_s += 0.5
        running.channel.answer(running.reply())  # to one sent before; the next is sent at this time
        before = running.state.lease.until_s
        running.channel.answer(running.reply(moved))
        after = [served for until_s, served in running.state.history if until_s > before]
        assert after
        assert [served for served in after if 1 in served] == []
        assert led(running.state) == {0}


def test_lease_is_extended_only_after_the_replys_access_state_is_applied(tmp_path: Path) -> None:
    """Or what was revoked would be let in under the new lease."""
    first, second = (AccessState(version=n, revoked_serials=("1f",) * (n - 1)) for n in (1, 2))
    with running_agent(tmp_path, table_of(1, [1, 1])) as running:
        assert running.state.access.version == 0
        running.channel.answer(running.reply(access=first))
        assert running.channel.requests[-1].access_version == 1
        running.now_s += 0.5
        running.channel.answer(running.reply())  # to one sent before; the next is sent at this time
        before = running.state.lease.until_s
        running.channel.answer(running.reply(access=second))
        after = [version for until_s, version in running.state.access_at if until_s > before]
        assert after == [2] * len(after)
        assert after
        assert running.state.access.is_revoked(0x1F)
        running.channel.answer(running.reply(access=first))  # answered late, by whoever led before
        assert running.state.access.version == 2


def test_partition_is_served_only_once_its_epoch_is_durable(tmp_path: Path) -> None:
    with running_agent(tmp_path, table_of(1, [1, 2])) as running:
        running.channel.answer(running.reply())
        running.channel.answer(running.reply())
        assert running.host.adopting == [Adoption(0, 1)]
        assert running.state.serving()
        assert led(running.state) == frozenset()
        running.make_durable()
        running.answer_until_led({0})


def test_heartbeats_tell_sizes_to_each_new_leader_and_now_and_then(tmp_path: Path) -> None:
    with running_agent(tmp_path, table_of(1, [1, 1])) as running:
        for how in (
            running.reply(),
            running.reply(),
            running.reply(term=2),
            running.reply(term=2, took_s=0.1),
            running.reply(term=2, took_s=6.0),
        ):
            running.channel.answer(how)
        told = [request.HasField("sizes") for request in running.channel.requests]
        assert told == [True, False, False, True, False, True]
        loads = [request.HasField("load") for request in running.channel.requests]
        assert loads == [False, True, False, False, True, False], "never beside the sizes"
        sizes = running.channel.requests[0].sizes
        assert (list(sizes.partition_ids), list(sizes.bytes)) == ([7], [70])


@pytest.mark.parametrize(
    ("leader_ms", "round_trip_ms", "ahead_ms"),
    [
        (1_000, 0, 0),
        (1_000, 500, 0),
        (400, 0, 600),
        (400, 500, 100),
        (400, 700, 0),  # the answer may have been on its way for all of it
        (1_700, 0, -700),
        (1_700, 500, -700),
    ],
)
def test_clock_is_ahead_by_what_the_round_trip_does_not_explain(
    leader_ms: int, round_trip_ms: int, ahead_ms: int
) -> None:
    assert clock_ahead_ms(leader_ms, 1_000, round_trip_ms) == ahead_ms


def test_heartbeat_shows_that_the_clock_is_not_the_leaders(tmp_path: Path) -> None:
    with running_agent(tmp_path, table_of(1, [1, 1])) as running:
        agent = running.agent
        assert agent is not None
        running.channel.answer(running.reply(wall_ms=1))
        assert agent.clock_ahead_ms > 1_000_000
