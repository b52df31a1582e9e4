"""The blocking class for bulk loads against coordinators of this process that lead or do not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import grpc
import pytest

from koinon.operate.loads_client import LoadMode, LoadsClient, LoadState, LoadView, StreamBatch
from koinon_proto.contract.cluster_errors import LoadClosedError, NotLeaderError
from koinon_proto.contract.errors import (
    ConfigurationError,
    KoinonError,
    ResourceExhaustedError,
    UnavailableError,
    UnknownFateError,
)
from koinon_proto.server import rpc
from koinon_proto.v1 import admin_pb2, admin_pb2_grpc, loads_pb2, loads_pb2_grpc
from tests.client.kit.fake_cluster import LoopThread

LOST = "lost"
Fate = KoinonError | str | None


class FakeCoordinator(admin_pb2_grpc.AdminServicer, loads_pb2_grpc.LoadsServicer):
    """One coordinator. ``group.leader`` leads; ``fates`` are what becomes of its next calls: an
    error is answered, ``LOST`` ends without an answer.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.address = ""
        self.asked_for_status = 0

    @rpc.typed_errors
    async def GetStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.asked_for_status += 1
        leader = self.group.leader
        return admin_pb2.ClusterStatus(
            is_leader=self is leader,
            leader_address=leader.address if leader is not None else "",
            term=1,
        )

    @rpc.typed_errors
    async def OpenLoad(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._enter(request, context)
        return loads_pb2.OpenLoadResponse(
            load_id=7, state=loads_pb2.LOAD_STATE_OPEN, table_version=3, cluster_id="c"
        )

    @rpc.typed_errors
    async def CommitLoad(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._enter(request, context)
        return loads_pb2.CommitLoadResponse(state=loads_pb2.LOAD_STATE_MERGING)

    @rpc.typed_errors
    async def AbortLoad(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._enter(request, context)
        return loads_pb2.AbortLoadResponse(state=loads_pb2.LOAD_STATE_ABORTED)

    @rpc.typed_errors
    async def TouchLoad(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._enter(request, context)
        return loads_pb2.TouchLoadResponse(state=loads_pb2.LOAD_STATE_OPEN)

    @rpc.typed_errors
    async def GetLoads(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._enter(request, context)
        reply = loads_pb2.GetLoadsResponse()
        reply.loads.add(load_id=7, state=cast(Any, 99), mode=cast(Any, 98))
        return reply

    async def _enter(self, request: Any, context: Any) -> None:
        group = self.group
        if group.leader is not self:
            group.refused += 1
            address = group.leader.address if group.leader is not None else ""
            raise NotLeaderError(leader_id="", leader_address=address, term=1)
        group.requests.append(request)
        fate = group.fates.pop(0) if group.fates else None
        if isinstance(fate, KoinonError):
            raise fate
        if fate == LOST:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection was cut")


class Group:
    """Coordinators that share a script. ``refused`` counts calls of those that do not lead."""

    def __init__(self, size: int = 2) -> None:
        self.thread = LoopThread()
        self.requests: list[Any] = []
        self.fates: list[Fate] = []
        self.refused = 0
        self.members = [FakeCoordinator(self) for _ in range(size)]
        self._servers = [self._serve(member) for member in self.members]
        self.leader: FakeCoordinator | None = self.members[0]

    @property
    def addresses(self) -> str:
        return ",".join(member.address for member in self.members)

    def _serve(self, member: FakeCoordinator) -> Any:
        async def start() -> Any:
            server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
            cast(Any, admin_pb2_grpc.add_AdminServicer_to_server)(member, server)
            cast(Any, loads_pb2_grpc.add_LoadsServicer_to_server)(member, server)
            member.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            await server.start()
            return server

        return self.thread.run(start())

    def stop(self, number: int) -> None:
        self.thread.run(self._servers[number].stop(None))

    def close(self) -> None:
        for server in self._servers:
            self.thread.run(server.stop(None))
        self.thread.stop()


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group()
    yield made
    made.close()


@pytest.fixture
def client(group: Group) -> Iterator[LoadsClient]:
    with LoadsClient(group.addresses, timeout_s=60.0, cluster_id="c") as made:
        yield made


def opened(client: LoadsClient) -> int:
    return client.open_load(job_id="j", mode=LoadMode.APPEND).load_id


def test_open_sends_all_that_it_is_given(group: Group, client: LoadsClient) -> None:
    answer = client.open_load(
        job_id="j",
        mode=LoadMode.OVERWRITE,
        prefix=b"p",
        stream_batch=StreamBatch("q", 0),
        description="d",
        timeout_ms=60_000,
    )
    assert (answer.load_id, answer.state) == (7, LoadState.OPEN)
    assert (answer.table_version, answer.cluster_id) == (3, "c")
    (request,) = group.requests
    assert (request.cluster_id, request.job_id, request.prefix) == ("c", "j", b"p")
    assert request.mode == loads_pb2.LOAD_MODE_OVERWRITE
    assert request.HasField("stream_batch")
    assert (request.stream_batch.query_id, request.stream_batch.batch_id) == ("q", 0)
    assert (request.description, request.timeout_ms) == ("d", 60_000)
    client.open_load(job_id="k", mode=LoadMode.APPEND)
    assert not group.requests[-1].HasField("stream_batch")


def test_commit_and_touch_send_all_that_they_are_given(group: Group, client: LoadsClient) -> None:
    client.touch(7, attempt=1 << 63, rows=5, size_bytes=6)
    client.commit(7, attempts=(9, 8), partition_ids=(0, 3), rows=10, size_bytes=20)
    touch, commit = group.requests
    assert (touch.load_id, touch.attempt, touch.rows, touch.bytes) == (7, 1 << 63, 5, 6)
    assert (list(commit.attempts), list(commit.partition_ids)) == ([9, 8], [0, 3])
    assert (commit.rows, commit.bytes) == (10, 20)


def test_leader_is_looked_for_once_and_followed_when_another_leads(
    group: Group, client: LoadsClient
) -> None:
    first, second = group.members
    opened(client)
    opened(client)
    asked = first.asked_for_status
    group.leader = second
    opened(client)
    opened(client)
    assert (group.refused, first.asked_for_status) == (1, asked)  # the refusal names the leader


def test_call_waits_while_nobody_leads(group: Group, client: LoadsClient) -> None:
    opened(client)
    group.leader = None
    elected = threading.Timer(0.2, setattr, (group, "leader", group.members[1]))
    elected.start()
    assert opened(client) == 7
    elected.join()


def test_leader_that_is_gone_is_replaced_by_the_next(group: Group, client: LoadsClient) -> None:
    opened(client)
    group.stop(0)
    group.leader = group.members[1]
    assert opened(client) == 7


@pytest.mark.parametrize(
    "fate", [LOST, UnknownFateError(reason="r"), ResourceExhaustedError(resource="r", limit=1)]
)
def test_call_that_may_be_repeated_is_repeated(
    group: Group, client: LoadsClient, fate: Fate
) -> None:
    group.fates = [fate, fate]
    state = client.commit(7, attempts=[1], partition_ids=[0])
    assert state is LoadState.MERGING
    assert len({request.SerializeToString() for request in group.requests}) == 1
    assert len(group.requests) == 3


def test_final_refusal_is_raised_at_once(group: Group, client: LoadsClient) -> None:
    group.fates = [LOST, LoadClosedError(load_id=7, state="aborted", reason="enough")]
    with pytest.raises(LoadClosedError, match="aborted: enough"):
        client.commit(7, attempts=[1], partition_ids=[0])
    assert len(group.requests) == 2


Call = Callable[[LoadsClient], object]


@pytest.mark.parametrize(
    ("fates", "call", "raised"),
    [
        ([LOST], opened, UnknownFateError),
        ([LOST], lambda client: client.get(7), UnavailableError),
        ([ResourceExhaustedError(resource="r", limit=1)], opened, ResourceExhaustedError),
        # It was refused when asked again, but the first time may still take effect.
        ([LOST, ResourceExhaustedError(resource="r", limit=1)], opened, UnknownFateError),
    ],
    ids=["lost", "read", "full", "lost, then full"],
)
def test_call_that_is_not_answered_until_its_time_is_over_says_what_is_known(
    group: Group, fates: list[Fate], call: Call, raised: type[KoinonError]
) -> None:
    group.fates = fates + fates[-1:] * 1_000
    with LoadsClient(group.addresses, timeout_s=1.0) as client, pytest.raises(raised):
        call(client)


def test_nobody_who_answers_is_unavailable_and_a_bad_address_a_mistake(group: Group) -> None:
    group.stop(0)
    nobody = pytest.raises(UnavailableError, match="no coordinator answers")
    with LoadsClient(group.members[0].address, timeout_s=0.3) as client, nobody:
        opened(client)
    with pytest.raises(ConfigurationError):
        LoadsClient("")


def test_values_of_a_newer_build_are_shown_as_unknown(client: LoadsClient) -> None:
    view = client.get(7)
    assert isinstance(view, LoadView)
    assert (view.state, view.mode, view.stream_batch) == (LoadState.UNKNOWN, None, None)


def test_threads_may_share_it(group: Group, client: LoadsClient) -> None:
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(opened(client))) for _ in range(16)]
    for thread in threads:
        thread.start()
    group.leader = group.members[1]
    for thread in threads:
        thread.join()
    assert found == [7] * 16


def test_check_opens_nothing(group: Group, client: LoadsClient) -> None:
    client.check(mode=LoadMode.APPEND, keyspace_id=3)
    (asked,) = group.requests
    assert (asked.only_check, asked.keyspace_id) == (True, 3)
