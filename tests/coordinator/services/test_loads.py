"""The service of bulk loads over real gRPC, on a real Raft member of one, by the blocking class."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from koinon.operate.admin import Admin
from koinon.operate.loads_client import LoadsClient, OpenedLoad
from koinon_coordinator.config import TimingConfig
from koinon_coordinator.coordinator import Coordinator
from koinon_proto.contract import convert
from koinon_proto.contract.bulk_loads import (
    LOAD_ATTEMPTS_MAX,
    LOAD_TIMEOUT_MS,
    LoadMode,
    LoadState,
    StreamBatch,
)
from koinon_proto.contract.cluster_errors import LoadClosedError
from koinon_proto.contract.errors import (
    ClusterNotReadyError,
    InvalidArgumentError,
    PartitionOfflineError,
    WrongClusterError,
)
from koinon_proto.contract.table import ActiveLoad, apply_update
from koinon_proto.v1 import loads_pb2, loads_pb2_grpc
from tests.coordinator.kit.fake_node import Caller, FakeNode
from tests.coordinator.kit.served import FAST, PATIENT, online, with_coordinator
from tests.kit.waiting import until

T = TypeVar("T")
CALL_S = 60.0


class Bench:
    """A coordinator with a node, the blocking client, and the calls that nodes make."""

    def __init__(self, coordinator: Coordinator, caller: Caller, life: asyncio.Task[None]) -> None:
        self.coordinator = coordinator
        self.caller = caller
        self.life = life  # the node's
        self.client = LoadsClient(caller.address, timeout_s=CALL_S)
        make: Any = loads_pb2_grpc.LoadsStub
        self.stub = make(caller.channel)

    async def ask(self, method: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call the blocking client, in a thread."""
        return await asyncio.to_thread(method, *args, **kwargs)

    async def open(self, job_id: str = "job", mode: LoadMode = LoadMode.APPEND) -> OpenedLoad:
        return await self.ask(self.client.open_load, job_id=job_id, mode=mode)

    async def manifest(self, load_id: int) -> loads_pb2.LoadManifest:
        request = loads_pb2.GetManifestRequest(load_id=load_id)
        manifest: loads_pb2.LoadManifest = await self.caller.call(self.stub.GetManifest, request)
        return manifest

    async def report(self, load_id: int, *partition_ids: int) -> int:
        request = loads_pb2.ReportMergedRequest(load_id=load_id, partition_ids=partition_ids)
        return int((await self.caller.call(self.stub.ReportMerged, request)).state)

    async def loads_in_table(self, version: int) -> tuple[ActiveLoad, ...]:
        """Return the loads that a table of at least this version names."""
        update = await self.caller.get_table()
        assert update.table_version >= version
        table = apply_update(None, convert.update_from_proto(update))
        assert table is not None
        return table.loads


@contextlib.asynccontextmanager
async def benched(coordinator: Coordinator, caller: Caller) -> AsyncIterator[Bench]:
    node = FakeNode("n1", [caller.address])
    life = asyncio.ensure_future(node.run())
    await until(lambda: online(node) == 8)
    bench = Bench(coordinator, caller, life)
    try:
        yield bench
    finally:
        bench.client.close()
        life.cancel()
        await node.close()


def with_bench(
    data: Path, test: Callable[[Bench], Awaitable[None]], timing: TimingConfig = PATIENT
) -> None:
    async def whole(coordinator: Coordinator, caller: Caller) -> None:
        async with benched(coordinator, caller) as bench:
            await test(bench)

    with_coordinator(data, whole, timing=timing)


def test_load_goes_from_open_to_done_and_the_table_tells(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        client = bench.client
        opened = await bench.open()
        config = bench.coordinator.table()
        assert config is not None
        assert opened.cluster_id == config.cluster.cluster_id
        assert opened.state is LoadState.OPEN
        load_id = opened.load_id
        assert await bench.loads_in_table(opened.table_version) == (
            ActiveLoad(load_id=load_id, merging=False),
        )
        touched = await bench.ask(client.touch, load_id, attempt=1 << 63, rows=5, size_bytes=50)
        assert touched is LoadState.OPEN
        attempts = [1 << 63, 3]
        for _ in range(2):
            state = await bench.ask(
                client.commit, load_id, attempts=attempts, partition_ids=[1, 6], rows=9
            )
            assert state is LoadState.MERGING
        (shown,) = await bench.loads_in_table(opened.table_version + 1)
        assert shown.merging
        manifest = await bench.manifest(load_id)
        assert (list(manifest.attempts), list(manifest.partition_ids)) == (attempts, [1, 6])
        assert await bench.report(load_id, 6) == LoadState.MERGING
        view = await bench.ask(client.get, load_id)
        assert view is not None
        assert (view.partitions, view.partitions_merged, view.rows) == (2, 1, 9)
        assert await bench.report(load_id, 1, 6) == LoadState.DONE
        view = await bench.ask(client.get, load_id)
        assert view is not None
        assert (view.state, view.partitions_merged) == (LoadState.DONE, 2)
        assert await bench.loads_in_table(opened.table_version + 2) == ()
        with pytest.raises(LoadClosedError, match="is done"):
            await bench.manifest(load_id)

    with_bench(tmp_path, test)


def test_load_with_all_that_can_be_said_of_it_is_shown_whole(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        client = bench.client
        opened = await bench.ask(
            client.open_load,
            job_id="j",
            mode=LoadMode.OVERWRITE,
            prefix=b"p\xff",
            stream_batch=StreamBatch("q", 0),
            description="what it is",
            timeout_ms=60_000,
        )
        (view,) = await bench.ask(client.loads)
        assert (view.load_id, view.job_id, view.mode) == (opened.load_id, "j", LoadMode.OVERWRITE)
        assert (view.prefix, view.stream_batch) == (b"p\xff", StreamBatch("q", 0))
        assert (view.description, view.timeout_ms) == ("what it is", 60_000)
        with Admin(bench.caller.address) as admin:
            await bench.ask(admin.abort_load, opened.load_id, reason="why not")
            (view,) = await bench.ask(admin.loads)
        assert (view.state, view.reason) == (LoadState.ABORTED, "why not")
        plain = await bench.open("plain")
        view_of_plain = await bench.ask(client.get, plain.load_id)
        assert view_of_plain is not None
        assert (view_of_plain.stream_batch, view_of_plain.timeout_ms) == (None, LOAD_TIMEOUT_MS)

    with_bench(tmp_path, test)


def test_batch_of_a_stream_is_applied_once(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        client = bench.client

        async def opened(job_id: str, batch_id: int) -> OpenedLoad:
            return await bench.ask(
                client.open_load,
                job_id=job_id,
                mode=LoadMode.APPEND,
                stream_batch=StreamBatch("q", batch_id),
            )

        first = await opened("a", 0)
        assert (await opened("replayed", 0)).load_id == first.load_id
        done = await bench.ask(client.commit, first.load_id, attempts=[], partition_ids=[])
        assert done is LoadState.DONE
        again = await opened("replayed", 0)
        assert (again.load_id, again.state) == (0, LoadState.DONE)
        assert (await opened("b", 1)).load_id > first.load_id

    with_bench(tmp_path, test)


def test_largest_commit_is_replicated_and_handed_out_whole(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        load_id = (await bench.open()).load_id
        attempts = [(1 << 64) - 1 - i for i in range(LOAD_ATTEMPTS_MAX)]
        state = await bench.ask(
            bench.client.commit, load_id, attempts=attempts, partition_ids=list(range(8))
        )
        assert state is LoadState.MERGING
        assert list((await bench.manifest(load_id)).attempts) == attempts
        other, more = (await bench.open("other")).load_id, [*attempts, 1]
        with pytest.raises(InvalidArgumentError) as refused:
            await bench.ask(bench.client.commit, other, attempts=more, partition_ids=[0])
        assert (refused.value.field, refused.value.limit) == ("attempts", LOAD_ATTEMPTS_MAX)

    with_bench(tmp_path, test)


def test_refusals_arrive_as_typed_errors(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        client = bench.client
        opened = await bench.open()
        with pytest.raises(InvalidArgumentError, match="another mode"):
            await bench.open(mode=LoadMode.OVERWRITE)
        with pytest.raises(LoadClosedError) as unknown:
            await bench.ask(client.touch, 999)
        assert (unknown.value.load_id, unknown.value.state) == (999, "unknown")
        assert await bench.ask(client.get, 999) is None
        elsewhere = LoadsClient(bench.caller.address, timeout_s=CALL_S, cluster_id="elsewhere")
        with pytest.raises(WrongClusterError):
            await bench.ask(elsewhere.touch, opened.load_id)
        elsewhere.close()
        assert await bench.ask(client.abort, opened.load_id) is LoadState.ABORTED
        assert await bench.ask(client.abort, opened.load_id) is LoadState.ABORTED
        with pytest.raises(LoadClosedError, match="aborted"):
            await bench.ask(client.commit, opened.load_id, attempts=[1], partition_ids=[0])

    with_bench(tmp_path, test)


def test_load_before_there_are_partitions_is_refused_as_not_ready(tmp_path: Path) -> None:
    async def test(_: Coordinator, caller: Caller) -> None:
        client = LoadsClient(caller.address, timeout_s=1.0)
        with pytest.raises(ClusterNotReadyError):
            await asyncio.to_thread(client.open_load, job_id="j", mode=LoadMode.APPEND)
        client.close()

    with_coordinator(tmp_path, test)


def test_commit_that_needs_an_offline_partition_is_refused_when_its_time_is_over(
    tmp_path: Path,
) -> None:
    async def test(bench: Bench) -> None:
        load_id = (await bench.open()).load_id
        bench.life.cancel()
        await until(lambda: _offline(bench.coordinator, 3))
        client = LoadsClient(bench.caller.address, timeout_s=1.0)
        with pytest.raises(PartitionOfflineError) as refused:
            await bench.ask(client.commit, load_id, attempts=[1], partition_ids=[3])
        assert refused.value.partition_id == 3
        view = await bench.ask(client.get, load_id)
        assert view is not None
        assert view.state is LoadState.OPEN
        client.close()

    with_bench(tmp_path, test, FAST)


def _offline(coordinator: Coordinator, partition_id: int) -> bool:
    table = coordinator.table()
    return table is not None and not table.rows[partition_id].primary


def test_loads_survive_a_restart_of_the_coordinator(tmp_path: Path) -> None:
    ids: list[int] = []

    async def first(bench: Bench) -> None:
        for job_id in ("open", "merging", "done"):
            ids.append((await bench.open(job_id)).load_id)
        await bench.ask(bench.client.commit, ids[1], attempts=[1], partition_ids=[5])
        await bench.ask(bench.client.commit, ids[2], attempts=[1], partition_ids=[])

    async def second(coordinator: Coordinator, caller: Caller) -> None:
        make: Any = loads_pb2_grpc.LoadsStub
        stub = make(caller.channel)
        reply = await caller.call(stub.GetLoads, loads_pb2.GetLoadsRequest())
        assert [(load.load_id, load.state) for load in reply.loads] == [
            (ids[0], LoadState.OPEN),
            (ids[1], LoadState.MERGING),
            (ids[2], LoadState.DONE),
        ]
        request = loads_pb2.OpenLoadRequest(job_id="open", mode=loads_pb2.LOAD_MODE_APPEND)
        assert (await caller.call(stub.OpenLoad, request)).load_id == ids[0]

    with_bench(tmp_path, first)
    with_coordinator(tmp_path, second)
