"""Tables are pushed: to any number of watchers, each at its own pace, by any member."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from koinon_coordinator.config import BootstrapConfig
from koinon_coordinator.coordinator import Coordinator
from koinon_coordinator.core.cluster.commands import FenceNode, SetMoveSettings
from koinon_coordinator.services import cluster_services
from koinon_coordinator.services.cluster_services import TableService
from koinon_coordinator.state_machine import ReplicatedState
from koinon_coordinator.wire.rows import RowForms
from koinon_coordinator.wire.state_codec import command_to_bytes
from koinon_coordinator.wire.updates import UpdateCache
from koinon_proto.contract import convert
from koinon_proto.contract.errors import (
    ClusterNotReadyError,
    ResourceExhaustedError,
    WrongClusterError,
)
from koinon_proto.contract.table import (
    NO_NODE,
    MoveSettings,
    NodeId,
    NodeNumber,
    NodeStatus,
    Table,
    apply_update,
)
from koinon_proto.server.rpc import error_of
from koinon_proto.v1 import table_pb2
from tests.coordinator.kit.fake_node import Caller, FakeNode
from tests.coordinator.kit.served import FAST, online, with_coordinator
from tests.coordinator.kit.support import bootstrapped
from tests.kit.waiting import until


class Member:
    """A coordinator, as the service needs it, over a state of the test's own."""

    def __init__(self) -> None:
        self.replicated = ReplicatedState()
        self.stopping = False
        self.replicated.state = bootstrapped([(1,), (2,), (3,)])
        self._applied = 0

    def table(self) -> Table | None:
        return self.replicated.state.table()

    def watching(self) -> Any:
        return self.replicated.watching()

    def bootstrap_nodes(self) -> int:
        return 3

    def apply(self, command: Any) -> None:
        self._applied += 1
        self.replicated.apply(self._applied, command_to_bytes(command))

    def change(self, bytes_per_second: int) -> None:
        self.apply(SetMoveSettings(settings=MoveSettings(bytes_per_second=bytes_per_second)))

    def stop(self) -> None:
        self.stopping = True
        self.replicated.wake()


class Watcher:
    """A stream that takes ``updates``; while ``gate`` is closed it takes nothing."""

    def __init__(self) -> None:
        self.updates: list[table_pb2.TableUpdate] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.table: Table | None = None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def send_initial_metadata(self, _: tuple[tuple[str, str], ...]) -> None:
        pass

    async def write(self, update: table_pb2.TableUpdate) -> None:
        await self.gate.wait()
        self.updates.append(update)
        self.table = apply_update(self.table, convert.update_from_proto(update))

    async def abort(self, code: Any, details: str, metadata: Any) -> None:
        raise AssertionError((code, details))


def run_watch(test: Callable[[Member, TableService], Awaitable[None]]) -> None:
    async def whole() -> None:
        member = Member()
        await test(member, TableService(member, UpdateCache(RowForms())))  # type: ignore[arg-type]

    asyncio.run(asyncio.wait_for(whole(), 60))


@asynccontextmanager
async def watch(
    tables: TableService, cluster_id: str = "", known: int = 0
) -> AsyncIterator[Watcher]:
    watcher = Watcher()
    request = table_pb2.GetTableRequest(cluster_id=cluster_id, known_version=known)
    stream = asyncio.ensure_future(tables.WatchTable(request, watcher))
    await turn(5)
    try:
        yield watcher
    finally:
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)


async def turn(times: int = 10) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


def test_watch_sends_the_table_at_once_and_then_each_change() -> None:
    async def test(member: Member, tables: TableService) -> None:
        async with watch(tables) as watcher:
            assert len(watcher.updates) == 1
            member.change(1)
            await turn()
            member.apply(FenceNode(node_number=NodeNumber(1), node_epoch=1))
            await turn()
            assert [len(u.rows) for u in watcher.updates] == [3, 0, 1]
            assert watcher.table == member.table()
            member.change(1)  # changes nothing
            await turn()
            assert len(watcher.updates) == 3

    run_watch(test)


def test_watch_slow_watcher_skips_versions_and_holds_nobody() -> None:
    async def test(member: Member, tables: TableService) -> None:
        async with watch(tables) as slow, watch(tables) as fast:
            slow.gate.clear()
            for value in range(1, 101):
                member.change(value)
                await turn()
            assert len(fast.updates) == 101
            slow.gate.set()
            await turn()
            assert len(slow.updates) == 3  # the first, one that was held up, and all since
            assert slow.table == fast.table == member.table()

    run_watch(test)


def test_watch_of_one_who_knows_more_is_answered_and_sent_only_what_is_newer() -> None:
    async def test(member: Member, tables: TableService) -> None:
        table = member.table()
        assert table is not None
        ahead = table.table_version + 2
        async with watch(tables, table.cluster.cluster_id, ahead) as watcher:
            for value in (1, 2):
                member.change(value)
                await turn()
            assert [u.table_version for u in watcher.updates] == [ahead - 2]
            assert not watcher.updates[0].rows
            member.change(3)
            await turn()
            assert watcher.updates[1].base_version == ahead

    run_watch(test)


def test_watch_goes_on_over_a_restore() -> None:
    async def test(member: Member, tables: TableService) -> None:
        async with watch(tables) as watcher:
            other = ReplicatedState()
            other.restore(member.replicated.capture()())
            settings = MoveSettings(paused=True)
            other.apply(1, command_to_bytes(SetMoveSettings(settings=settings)))
            member.replicated.restore(other.capture()())
            await turn()
            assert watcher.table is not None
            assert watcher.table.moves.paused
            member.change(7)
            await turn()
            assert watcher.table.moves.bytes_per_second == 7

    run_watch(test)


def test_watch_ends_when_the_member_stops_and_leaves_nothing_behind() -> None:
    async def test(member: Member, tables: TableService) -> None:
        request, watcher = table_pb2.GetTableRequest(), Watcher()
        stream = asyncio.ensure_future(tables.WatchTable(request, watcher))
        async with watch(tables):
            await turn()
            assert len(member.replicated._watchers) == 2
        assert len(member.replicated._watchers) == 1
        member.stop()
        await asyncio.wait_for(stream, 5)
        assert len(member.replicated._watchers) == 0

    run_watch(test)


async def refused(caller: Caller, **fields: Any) -> Exception:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        async for _ in caller.tables.WatchTable(table_pb2.GetTableRequest(**fields), timeout=30):
            pass
    error = error_of(failure.value)
    assert error is not None
    return error


def test_watch_refusals_are_typed_and_watchers_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_services, "WATCHES_MAX", 8)  # 4 of them for one connection

    async def test(_: Coordinator, caller: Caller) -> None:
        assert isinstance(await refused(caller), ClusterNotReadyError)
        node = FakeNode("n1", [caller.address])
        life = asyncio.ensure_future(node.run())
        await until(lambda: online(node) == 8)
        assert isinstance(await refused(caller, cluster_id="elsewhere"), WrongClusterError)
        streams = [caller.tables.WatchTable(table_pb2.GetTableRequest()) for _ in range(4)]
        for stream in streams:
            assert len((await stream.read()).rows) == 8
        assert isinstance(await refused(caller), ResourceExhaustedError)
        assert len((await caller.get_table()).rows) == 8  # others are answered all the same
        streams[0].cancel()

        async def watch_again() -> bool:
            stream = caller.tables.WatchTable(table_pb2.GetTableRequest())
            try:
                return bool((await stream.read()).rows)
            except grpc.aio.AioRpcError:
                return False

        end = time.monotonic() + 60
        while not await watch_again():
            assert time.monotonic() < end
        life.cancel()
        await node.close()

    with_coordinator(tmp_path, test)


def test_watch_over_the_wire_sees_a_fence_and_ends_when_the_server_stops(tmp_path: Path) -> None:
    async def test(coordinator: Coordinator, caller: Caller) -> None:
        nodes = [FakeNode(f"n{i}", [caller.address]) for i in (1, 2, 3)]
        lives = [asyncio.ensure_future(node.run()) for node in nodes]
        await until(lambda: all(online(node) == 8 for node in nodes))
        stream = caller.tables.WatchTable(table_pb2.GetTableRequest())
        table = apply_update(None, convert.update_from_proto(await stream.read()))
        lives[0].cancel()
        while table is not None and table.by_id[NodeId("n1")].status is not NodeStatus.FENCED:
            table = apply_update(table, convert.update_from_proto(await stream.read()))
        assert table is not None
        gone = table.by_id[NodeId("n1")].number
        assert all(row.primary not in (gone, NO_NODE) for row in table.rows)
        for life in lives:
            life.cancel()
        for node in nodes:
            await node.close()
        stopping = asyncio.ensure_future(coordinator.stop())
        while await stream.read() is not grpc.aio.EOF:
            pass
        assert await stream.code() is grpc.StatusCode.OK
        await stopping

    bootstrap = BootstrapConfig(partition_count=8, bootstrap_nodes=3)
    with_coordinator(tmp_path, test, bootstrap=bootstrap, timing=FAST)
