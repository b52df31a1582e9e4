"""Registration and heartbeats of real node processes against a scripted coordinator."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from koinon_node.membership.agent import _REMOVED_RETRY_S as REMOVED_RETRY_S
from koinon_node.storage.store import Store
from koinon_node.store_config import StoreConfig
from koinon_proto.contract.cluster_errors import (
    DuplicateNodeError,
    MembershipChangeError,
    NotLeaderError,
    RegistrationPendingError,
)
from koinon_proto.contract.errors import LeaseExpiredError, WrongClusterError
from koinon_proto.partitioner import partitioner
from koinon_proto.v1 import kv_pb2
from tests.kit.addresses import free_address
from tests.kit.waiting import succeeds, wait_until
from tests.node.kit.scripted_coordinator import Script, ScriptedCoordinator
from tests.node.kit.support import WAIT_S, NodeProcess, refusal, running_node

LEASE_MS = 1_500


def test_registration_is_repeated_with_one_id_until_its_reply_arrives(tmp_path: Path) -> None:
    script = Script()
    with ScriptedCoordinator(script) as coordinator:

        def lose_reply(request: Any) -> None:
            if len(coordinator.registrations) <= 2:
                raise NotLeaderError(leader_id="", leader_address="", term=1)

        script.on_register = lose_reply
        with running_node(tmp_path / "n1", coordinator) as node:
            ids = {r.registration_id for r in coordinator.registrations}
            assert len(coordinator.registrations) == 3
            assert len(ids) == 1
            assert coordinator.node_epoch == 1
            assert node.stop() == 0
        with Store(StoreConfig(directory=tmp_path / "n1")) as store:
            identity = store.identity()
            assert (identity.cluster_id, identity.node_epoch) == ("cluster-a", 1)
            assert identity.registration_id == ""


def test_registration_id_survives_a_kill_before_the_reply(tmp_path: Path) -> None:
    script = Script()
    with ScriptedCoordinator(script) as coordinator:

        def pending(request: Any) -> None:
            raise RegistrationPendingError(node_id="n1", retry_after_ms=20)

        script.on_register = pending
        node = NodeProcess(tmp_path / "n1", coordinator.address)
        wait_until(lambda: len(coordinator.registrations) >= 2, "two attempts")
        node.kill()
        node.close()
        script.on_register = lambda request: None
        with running_node(tmp_path / "n1", coordinator) as again:
            assert len({r.registration_id for r in coordinator.registrations}) == 1
            assert coordinator.node_epoch == 1
            again.kill()
        with running_node(tmp_path / "n1", coordinator):
            assert coordinator.node_epoch == 2
            last = coordinator.registrations[-1]
            assert last.last_node_epoch == 1
            assert last.cluster_id == "cluster-a"
            wait_until(lambda: coordinator.heartbeats[-1].node_epoch == 2, "a heartbeat")
            assert coordinator.heartbeats[-1].registration_id == last.registration_id


def test_agent_follows_the_leaders_address_past_dead_coordinators(tmp_path: Path) -> None:
    with ScriptedCoordinator() as leader, ScriptedCoordinator() as follower:

        def redirect(request: Any) -> None:
            raise NotLeaderError(leader_id="c2", leader_address=leader.address, term=1)

        follower.script.on_register = follower.script.on_heartbeat = redirect
        dead = free_address()
        node = NodeProcess(tmp_path / "n1", f"{dead},{follower.address}")
        wait_until(leader.hosted_all, "hosted at the leader")
        node.close()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            WrongClusterError(expected_cluster_id="cluster-a", actual_cluster_id="cluster-b"),
            ("cluster-a", "cluster-b"),
        ),
        (
            DuplicateNodeError(node_id="n1", address="here:1", other_address="there:2"),
            ("n1", "there:2"),
        ),
    ],
)
def test_node_refused_for_good_exits_with_2_and_one_clear_line(
    tmp_path: Path, error: Exception, words: tuple[str, ...]
) -> None:
    def refuse(request: Any) -> None:
        raise error

    with ScriptedCoordinator(Script(on_register=refuse)) as coordinator:
        node = NodeProcess(tmp_path / "n1", coordinator.address)
        assert node.process.wait(WAIT_S) == 2
        last_line = node.errors().strip().splitlines()[-1]
        assert all(word in last_line for word in words)
        assert "Traceback" not in node.errors()
        node.close()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            Script(partitioner="md5(until:2f)", partitioner_fingerprint=b"\xab" * 32),
            ("md5(until:2f)", "ab" * 32, partitioner("md5(until:2f)", 1).fingerprint.hex()),
        ),
        (Script(partitioner="murmur2(theirs:7)"), ("theirs:7", "koinon.routers")),
    ],
)
def test_node_that_would_place_keys_otherwise_ends_before_it_leads(
    tmp_path: Path, script: Script, words: tuple[str, ...]
) -> None:
    with ScriptedCoordinator(script) as coordinator:
        node = NodeProcess(tmp_path / "n1", coordinator.address)
        assert node.process.wait(WAIT_S) == 2
        last_line = node.errors().strip().splitlines()[-1]
        assert all(word in last_line for word in words)
        assert not coordinator.heartbeats
        node.close()


def test_node_that_was_removed_says_so_seldom_and_still_stops_at_once(tmp_path: Path) -> None:
    def refuse(request: Any) -> None:
        raise MembershipChangeError(reason="node 'n1' has left the cluster")

    with ScriptedCoordinator(Script(on_register=refuse)) as coordinator:
        node = NodeProcess(tmp_path / "n1", coordinator.address)
        wait_until(lambda: "has left the cluster" in node.errors(), "the refusal in the log")
        time.sleep(1.0)
        assert len(coordinator.registrations) == 1
        began = time.monotonic()
        assert node.stop() == 0
        assert time.monotonic() - began < REMOVED_RETRY_S / 2
        node.close()


def test_node_of_another_cluster_refuses_the_reply_and_names_both(tmp_path: Path) -> None:
    with ScriptedCoordinator() as coordinator:
        with running_node(tmp_path / "n1", coordinator) as node:
            assert node.stop() == 0
        coordinator.script.cluster_id = "cluster-b"
        node = NodeProcess(tmp_path / "n1", coordinator.address)
        assert node.process.wait(WAIT_S) == 2
        assert "'cluster-a'" in node.errors()
        assert "'cluster-b'" in node.errors()
        node.close()


def test_fenced_node_registers_again_without_restart_and_serves_in_a_new_epoch(
    tmp_path: Path,
) -> None:
    with ScriptedCoordinator() as coordinator, running_node(tmp_path / "n1", coordinator) as node:
        before = node.kv.Put(kv_pb2.PutRequest(key=b"k", value=b"1")).version
        coordinator.fence()
        wait_until(lambda: len(coordinator.registrations) >= 2, "a second registration")
        wait_until(coordinator.hosted_all, "hosted again")
        wait_until(lambda: serves(node), "serving again")
        after = node.kv.Put(kv_pb2.PutRequest(key=b"k", value=b"2")).version
        assert after >> 40 > before >> 40
        assert node.process.poll() is None


def serves(node: NodeProcess) -> bool:
    try:
        node.kv.Get(kv_pb2.GetRequest(key=b"k"), timeout=5)
    except grpc.RpcError:
        return False
    return True


def test_node_cut_off_from_coordinators_refuses_after_its_lease_and_says_so_in_health(
    tmp_path: Path,
) -> None:
    def silent(request: Any) -> None:
        raise NotLeaderError(leader_id="", leader_address="", term=1)

    with (
        ScriptedCoordinator(Script(lease_ms=300)) as coordinator,
        running_node(tmp_path / "n1", coordinator) as node,
    ):
        health = health_pb2_grpc.HealthStub(node.channel)

        def status() -> int:
            answer = health.Check(health_pb2.HealthCheckRequest(service="koinon.v1.KeyValue"))
            return int(answer.status)

        wait_until(lambda: serves(node), "serving")
        wait_until(lambda: status() == health_pb2.HealthCheckResponse.SERVING, "healthy")
        coordinator.script.on_heartbeat = silent
        cut_off = time.monotonic()
        wait_until(lambda: not serves(node), "refusing")
        assert time.monotonic() - cut_off < 30
        for call in (
            lambda: node.kv.Get(kv_pb2.GetRequest(key=b"k")),
            lambda: node.kv.Put(kv_pb2.PutRequest(key=b"k", value=b"v")),
            lambda: node.kv.Scan(kv_pb2.ScanRequest(partition_ids=[0])),
        ):
            assert isinstance(refusal(call), LeaseExpiredError)
        wait_until(lambda: status() == health_pb2.HealthCheckResponse.NOT_SERVING, "unhealthy")
        coordinator.script.on_heartbeat = lambda request: None
        wait_until(lambda: serves(node), "serving again, in the same epoch")
        assert coordinator.node_epoch == 1


def test_slow_coordinator_does_not_eat_the_lease(tmp_path: Path) -> None:
    """A member that takes a heartbeat and never answers it: the next is asked within the lease."""
    script = Script(lease_ms=LEASE_MS)
    with ScriptedCoordinator(script) as leader, ScriptedCoordinator(Script()) as slow:

        def redirect(request: Any) -> None:
            raise NotLeaderError(leader_id="c1", leader_address=leader.address, term=1)

        def to_the_slow_one(request: Any) -> None:
            leader.script.on_heartbeat = lambda request: None
            raise NotLeaderError(leader_id="c2", leader_address=slow.address, term=2)

        slow.script.on_register = redirect
        slow.script.on_heartbeat = lambda request: time.sleep(3 * LEASE_MS / 1000)
        node = NodeProcess(tmp_path / "n1", f"{slow.address},{leader.address}")

        def serves_all_the_time() -> bool:
            wait_until(lambda: serves(node), "serving")
            taken = len(slow.heartbeats)
            leader.script.on_heartbeat = to_the_slow_one
            wait_until(lambda: len(slow.heartbeats) > taken, "a heartbeat to the slow one")
            asked = len(leader.heartbeats)
            refused = 0
            while len(leader.heartbeats) < asked + 5:
                refused += not serves(node)
            return refused == 0

        assert succeeds(serves_all_the_time)
        assert leader.node_epoch == 1
        node.close()
