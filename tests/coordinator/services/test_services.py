"""The services over real gRPC, on a real Raft member of one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from koinon_coordinator.config import BootstrapConfig, CoordinatorConfig
from koinon_coordinator.coordinator import Coordinator
from koinon_coordinator.server import running
from koinon_coordinator.services.cluster_services import SERVICES, _bound_exposure
from koinon_coordinator.wire.rows import RowForms
from koinon_coordinator.wire.updates import UpdateCache
from koinon_proto.contract import convert
from koinon_proto.contract.cluster_errors import (
    DataDirectoryError,
    DuplicateNodeError,
    MembershipChangeError,
    NodeFencedError,
    PlanStaleError,
    RegistrationPendingError,
    UnknownNodeError,
)
from koinon_proto.contract.errors import (
    ClusterNotReadyError,
    ConfigurationError,
    InvalidArgumentError,
    UnavailableError,
    UnsupportedVersionError,
    WrongClusterError,
)
from koinon_proto.contract.table import MoveSettings, NodeId, NodeStatus
from koinon_proto.v1 import admin_pb2, membership_pb2
from tests.coordinator.kit.fake_node import Caller, FakeNode
from tests.coordinator.kit.served import online, with_coordinator
from tests.coordinator.kit.support import bootstrapped, fence
from tests.kit.addresses import free_address
from tests.kit.waiting import until


def test_services_node_joins_and_the_table_is_served_whole_and_as_a_delta(tmp_path: Path) -> None:
    async def test(coordinator: Coordinator, caller: Caller) -> None:
        with pytest.raises(ClusterNotReadyError) as not_ready:
            await caller.get_table()
        assert (not_ready.value.registered_nodes, not_ready.value.bootstrap_nodes) == (0, 1)
        node = FakeNode("n1", [caller.address])
        life = asyncio.ensure_future(node.run())
        await until(lambda: online(node) == 8)
        whole = await caller.get_table()
        assert (whole.base_version, len(whole.rows), len(whole.nodes)) == (0, 8, 1)
        cluster_id = whole.cluster.cluster_id
        delta = await caller.get_table(cluster_id, whole.table_version - 1)
        assert delta.base_version == whole.table_version - 1
        assert len(delta.rows) == 8
        assert not delta.nodes
        for known in (whole.table_version, whole.table_version + 99):
            empty = await caller.get_table(cluster_id, known)
            assert (len(empty.rows), len(empty.nodes)) == (0, 0)
            assert empty.table_version == whole.table_version
        with pytest.raises(WrongClusterError) as wrong:
            await caller.get_table("elsewhere")
        assert wrong.value.expected_cluster_id == cluster_id
        status = await caller.status()
        assert (status.is_leader, status.leader_id, status.member_id) == (True, "c1", "c1")
        assert [c.member_id for c in status.coordinators if c.voter and c.leader] == ["c1"]
        assert [(s.node_number, s.live, s.stats.records) for s in status.sessions] == [(1, True, 7)]
        assert len(status.table.rows) == 8
        life.cancel()
        await node.close()

    with_coordinator(tmp_path, test)


def test_services_refusals_are_typed_and_change_nothing(tmp_path: Path) -> None:
    async def test(coordinator: Coordinator, caller: Caller) -> None:
        node = FakeNode("n1", [caller.address])
        await node.register()
        await node.heartbeat()
        before = coordinator._replicated.capture()()
        register = caller.membership.Register
        for changes, error in (
            ({"protocol_version": 2}, UnsupportedVersionError),
            ({"cluster_id": "elsewhere"}, WrongClusterError),
            ({"node_id": ""}, InvalidArgumentError),
            ({"address": "nowhere"}, InvalidArgumentError),
        ):
            with pytest.raises(error):
                await caller.call(register, node.register_request(**changes))
        with pytest.raises(RegistrationPendingError):  # its own lease may be alive
            await caller.call(register, node.register_request())
        thief = node.register_request(address="127.0.0.1:9", registration_id="thief")
        with pytest.raises(RegistrationPendingError):
            await caller.call(register, thief)
        await node.heartbeat()
        with pytest.raises(DuplicateNodeError):
            await caller.call(register, thief)
        heartbeat = membership_pb2.HeartbeatRequest(node_id="n9", node_epoch=1)
        with pytest.raises(UnknownNodeError):
            await caller.heartbeat(heartbeat)
        heartbeat = membership_pb2.HeartbeatRequest(node_id="n1", node_epoch=9)
        with pytest.raises(NodeFencedError):
            await caller.heartbeat(heartbeat)
        assert coordinator._replicated.capture()() == before

    with_coordinator(tmp_path, test, bootstrap=BootstrapConfig(bootstrap_nodes=2))


def test_services_admin_refusals_are_typed(tmp_path: Path) -> None:
    async def test(coordinator: Coordinator, caller: Caller) -> None:
        admin = caller.admin
        for method, request, error in (
            (admin.AddCoordinator, admin_pb2.AddCoordinatorRequest(), InvalidArgumentError),
            (
                admin.AddCoordinator,
                admin_pb2.AddCoordinatorRequest(member_id="c1", address="h:1"),
                MembershipChangeError,
            ),
            (
                admin.RemoveCoordinator,
                admin_pb2.RemoveCoordinatorRequest(member_id="c9"),
                MembershipChangeError,
            ),
            (
                admin.RemoveCoordinator,
                admin_pb2.RemoveCoordinatorRequest(member_id="c1"),
                MembershipChangeError,
            ),
            (
                admin.TransferLeadership,
                admin_pb2.TransferLeadershipRequest(member_id="c9"),
                MembershipChangeError,
            ),
        ):
            with pytest.raises(error):
                await caller.call(method, request)
        assert coordinator.leads

    with_coordinator(tmp_path, test)


async def running_move(
    caller: Caller, condition: Callable[[admin_pb2.MoveStatus], bool]
) -> admin_pb2.MoveStatus:
    """Return the first move that runs and fulfils the condition, once there is one."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        status = await caller.call(caller.admin.GetMoves, admin_pb2.GetMovesRequest())
        for move in status.moves:
            if move.running and condition(move):
                found: admin_pb2.MoveStatus = move
                return found
    raise AssertionError("no such move")


def test_services_moves_are_planned_executed_shown_and_cancelled(tmp_path: Path) -> None:
    async def test(coordinator: Coordinator, caller: Caller) -> None:
        admin, nodes = caller.admin, [FakeNode(f"n{i}", [caller.address]) for i in (1, 2)]
        lives = [asyncio.ensure_future(node.run()) for node in nodes]
        await until(lambda: all(online(node) == 8 for node in nodes))
        newcomer = FakeNode("n3", [caller.address])
        newcomer.weight = 200
        lives.append(asyncio.ensure_future(newcomer.run()))
        await until(lambda: online(newcomer) == 8)
        assert newcomer.table is not None
        number = newcomer.table.by_id[NodeId("n3")].number
        assert newcomer.table.nodes[number].weight == 200

        one = admin_pb2.SetMovesRequest(moves_per_node=1)
        settings = await caller.call(admin.SetMoves, one)
        assert (settings.moves_per_node, settings.paused) == (1, False)
        wish = admin_pb2.PlanRequest(kind=admin_pb2.PLAN_KIND_REBALANCE)
        plan = await caller.call(admin.PlanMoves, wish)
        assert [(b.node_number, b.replicas) for b in plan.before] == [(1, 8), (2, 8), (number, 0)]
        assert {b.node_number: b.replicas for b in plan.after}[number] == 8
        table = coordinator.table()
        assert table is not None
        assert plan.table_version == table.table_version
        execute = admin_pb2.ExecutePlanRequest(plan=wish, plan_id=plan.plan_id)
        await caller.call(admin.ExecutePlan, execute)
        with pytest.raises(PlanStaleError) as stale:
            await caller.call(admin.ExecutePlan, execute)
        assert stale.value.plan_id == plan.plan_id

        running = await running_move(caller, lambda move: True)
        assert (running.plan_id, running.plan_moves) == (plan.plan_id, len(plan.moves))
        assert number in running.move.target
        newcomer.progress = [
            membership_pb2.ReplicaProgress(
                partition_id=running.move.partition_id,
                stage=membership_pb2.ReplicaProgress.STAGE_SNAPSHOT,
                records=5,
            )
        ]
        running = await running_move(caller, lambda move: bool(move.progress))
        assert list(running.progress_nodes) == [number]
        assert (running.progress[0].records, running.waits_for) == (5, "copying to n3")

        reply = await caller.call(admin.CancelMoves, admin_pb2.CancelMovesRequest())
        assert (reply.dropped, reply.turned_back) == (len(plan.moves) - 1, 1)
        for life in lives:
            life.cancel()
        for node in (*nodes, newcomer):
            await node.close()

    with_coordinator(
        tmp_path, test, bootstrap=BootstrapConfig(partition_count=8, bootstrap_nodes=2)
    )


def test_services_nodes_and_primaries_are_changed_by_operators(tmp_path: Path) -> None:
    async def test(coordinator: Coordinator, caller: Caller) -> None:
        admin, nodes = caller.admin, [FakeNode(f"n{i}", [caller.address]) for i in (1, 2)]
        lives = [asyncio.ensure_future(node.run()) for node in nodes]
        await until(lambda: all(online(node) == 8 for node in nodes))

        def status(node_id: str, status: int) -> admin_pb2.SetNodeStatusRequest:
            return admin_pb2.SetNodeStatusRequest(node_id=node_id, status=status)  # type: ignore[arg-type]

        await caller.call(admin.SetNodeStatus, status("n2", NodeStatus.DRAINING))
        table = coordinator.table()
        assert table is not None
        assert table.by_id[NodeId("n2")].status is NodeStatus.DRAINING
        for request, error, says in (
            (status("n2", NodeStatus.LEFT), MembershipChangeError, "8 partitions"),
            (status("n9", NodeStatus.DRAINING), UnknownNodeError, "n9"),
            (status("n1", NodeStatus.FENCED), InvalidArgumentError, "status"),
        ):
            with pytest.raises(error, match=says):
                await caller.call(admin.SetNodeStatus, request)
        for kind, error in (
            (admin_pb2.PlanRequest(), InvalidArgumentError),
            (
                admin_pb2.PlanRequest(kind=admin_pb2.PLAN_KIND_DRAIN, node_id="n9"),
                UnknownNodeError,
            ),
        ):
            with pytest.raises(error):
                await caller.call(admin.PlanMoves, kind)
        with pytest.raises(InvalidArgumentError, match="pause"):
            await caller.call(admin.SetMoves, admin_pb2.SetMovesRequest(moves_per_node=0))
        force = admin_pb2.PrimaryToForce(partition_id=0, node_id="n2")
        forcing = admin_pb2.ForcePrimariesRequest(primaries=[force])
        (forced,) = (await caller.call(admin.ForcePrimaries, forcing)).primaries
        assert (forced.partition_id, forced.primary_epoch) == (0, 0)
        assert "nothing has to be forced" in forced.refused
        restored = await caller.call(admin.RestorePrimaries, admin_pb2.RestorePrimariesRequest())
        assert restored.wanted == 0
        for life in lives:
            life.cancel()
        for node in nodes:
            await node.close()

    with_coordinator(
        tmp_path, test, bootstrap=BootstrapConfig(partition_count=8, bootstrap_nodes=2)
    )


def test_services_before_there_is_a_table_nothing_can_be_planned(tmp_path: Path) -> None:
    async def test(_: Coordinator, caller: Caller) -> None:
        wish = admin_pb2.PlanRequest(kind=admin_pb2.PLAN_KIND_REBALANCE)
        with pytest.raises(ClusterNotReadyError):
            await caller.call(caller.admin.PlanMoves, wish)
        status = await caller.call(caller.admin.GetMoves, admin_pb2.GetMovesRequest())
        assert (len(status.moves), status.settings.moves_per_node) == (
            0,
            MoveSettings().moves_per_node,
        )

    with_coordinator(tmp_path, test)


ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"]


def test_services_operators_call_for_another_cluster_changes_nothing(tmp_path: Path) -> None:
    async def test(coordinator: Coordinator, caller: Caller) -> None:
        before = coordinator._replicated.capture()()
        cluster_id = (await caller.status()).table.cluster.cluster_id
        for method in ADMIN.methods:
            request = GetMessageClass(method.input_type)(cluster_id="elsewhere")
            with pytest.raises(WrongClusterError) as wrong:
                await caller.call(getattr(caller.admin, method.name), request)
            assert wrong.value.expected_cluster_id == cluster_id
        assert coordinator._replicated.capture()() == before

    with_coordinator(tmp_path, test)


def test_services_number_beyond_its_bound_is_refused_by_name(tmp_path: Path) -> None:
    async def test(_: Coordinator, caller: Caller) -> None:
        with pytest.raises(InvalidArgumentError) as refused:
            await caller.get_table("", 1 << 63)
        assert refused.value.field == "known_version"

    with_coordinator(tmp_path, test)


def test_services_health_and_reflection_are_on(tmp_path: Path) -> None:
    async def test(_: Coordinator, caller: Caller) -> None:
        health = health_pb2_grpc.HealthStub(caller.channel)
        for name in ("", *SERVICES):
            reply = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(caller.channel)
        ask = reflection_pb2.ServerReflectionRequest(file_containing_symbol="koinon.v1.Admin")
        async for answer in reflection.ServerReflectionInfo(iter([ask])):
            file = FileDescriptorProto.FromString(
                answer.file_descriptor_response.file_descriptor_proto[0]
            )
            assert file.package == "koinon.v1"

    with_coordinator(tmp_path, test)


def test_services_garbage_connections_leave_the_server_serving(tmp_path: Path) -> None:
    async def test(_: Coordinator, caller: Caller) -> None:
        host, port = caller.address.split(":")
        streams = [await asyncio.open_connection(host, int(port)) for _ in range(200)]
        for _reader, writer in streams[::2]:
            writer.write(b"\x00GARBAGE\r\n\r\n" * 50)
        status = await caller.status()
        assert status.is_leader
        for _reader, writer in streams:
            writer.close()

    with_coordinator(tmp_path, test)


def test_coordinator_that_stops_meanwhile_answers_operators_with_an_error_of_the_wire(
    tmp_path: Path,
) -> None:
    async def test(coordinator: Coordinator, _: Caller) -> None:
        leadership = coordinator._leadership
        await coordinator.raft.stop()
        coordinator._leadership = leadership  # as it is until the end of its term was noticed
        try:
            for request in (
                coordinator.transfer_leadership(None, 1.0),
                coordinator.remove_member("c2"),
            ):
                with pytest.raises(UnavailableError) as caught:
                    await request
                assert type(caught.value) is UnavailableError, "a subclass has no wire form"
        finally:
            coordinator._leadership = None

    with_coordinator(tmp_path, test)


def test_coordinator_added_once_more_is_there_already(tmp_path: Path) -> None:
    async def test(coordinator: Coordinator, caller: Caller) -> None:
        address = coordinator.config.advertise
        again = admin_pb2.AddCoordinatorRequest(member_id="c1", address=address)
        await caller.call(caller.admin.AddCoordinator, again)
        elsewhere = admin_pb2.AddCoordinatorRequest(member_id="c1", address="127.0.0.1:1")
        with pytest.raises(MembershipChangeError, match="remove it first"):
            await caller.call(caller.admin.AddCoordinator, elsewhere)

    with_coordinator(tmp_path, test)


def test_server_second_one_on_the_port_or_the_directory_is_refused(tmp_path: Path) -> None:
    async def test(coordinator: Coordinator, _: Caller) -> None:
        config = coordinator.config
        values = {name: getattr(config, name) for name in type(config).__slots__}
        same_port = CoordinatorConfig(**{**values, "data": tmp_path / "other"})
        with pytest.raises(ConfigurationError, match="cannot"):
            async with running(same_port):
                pass
        address = free_address()
        same_directory = CoordinatorConfig(
            **{**values, "listen": address, "advertise": address, "members": {"c1": address}}
        )
        with pytest.raises(DataDirectoryError):
            async with running(same_directory):
                pass
        assert coordinator.leads

    with_coordinator(tmp_path / "c1", test)


def test_server_restarted_keeps_the_cluster_and_its_table(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    async def test(coordinator: Coordinator, caller: Caller) -> None:
        node = FakeNode("n1", [caller.address], address="127.0.0.1:9")
        if not seen:
            await node.register()
            await until(lambda: coordinator._replicated.state.bootstrapped)
        update = await caller.get_table()
        seen.append((update.cluster.cluster_id, update.table_version))
        await node.close()

    with_coordinator(tmp_path, test)
    with_coordinator(tmp_path, test)
    assert seen[0] == seen[1]


def test_update_cache_makes_each_update_once_a_version() -> None:
    state = bootstrapped([(1,), (2,)], nodes=2)
    cache = UpdateCache(RowForms())
    table = state.table()
    assert table is not None
    whole = cache.update(table, 0)
    assert cache.update(table, 0) is whole
    beyond = cache.update(table, 10_000)
    assert cache.update(table, 20_000) is beyond  # one entry, whatever callers claim to know
    for known in range(200):
        cache.update(table, known)
    assert len(cache._updates) <= 64
    fence(state, 1)
    later = state.table()
    assert later is not None
    assert cache.update(later, 0) is not whole
    assert convert.update_from_proto(cache.update(later, table.table_version)) == later.since(
        table.table_version
    )


async def test_unexpected_grpc_errors_have_no_typed_details() -> None:
    caller = Caller(free_address())
    with pytest.raises(grpc.aio.AioRpcError):
        await caller.status()
    await caller.close()


def test_what_a_node_says_of_its_ports_is_bounded() -> None:
    stats = membership_pb2.NodeStats(
        tls_mode="x" * 100, open_addresses=["a" * 1_000 for _ in range(100)]
    )
    _bound_exposure(stats)
    assert len(stats.tls_mode) == 16
    assert [len(address) for address in stats.open_addresses] == [300] * 8
    empty = membership_pb2.HeartbeatRequest()
    _bound_exposure(empty.stats)
    assert not empty.HasField("stats")
