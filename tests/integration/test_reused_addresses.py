"""Addresses are reused: what belongs to another cluster must do no harm to this one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from koinon.driver.rpc.channels import OPTIONS
from koinon_proto.v1 import admin_pb2, admin_pb2_grpc
from tests.kit.addresses import free_addresses
from tests.kit.waiting import wait_until

NAMES = ("c1", "c2", "c3")


class Coordinators:
    """One cluster's three coordinators, on addresses that another cluster uses as well."""

    def __init__(self, data: Path, addresses: dict[str, str]) -> None:
        self.data = data
        self.addresses = addresses
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *names: str) -> None:
        members = ",".join(f"{name}={address}" for name, address in self.addresses.items())
        for name in names:
            command = [sys.executable, "-m", "koinon_coordinator", "--id", name]
            command += ["--listen", self.addresses[name], "--data", str(self.data / name)]
            command += ["--members", members, "--log-level", "ERROR"]
            self.processes[name] = subprocess.Popen(command)

    def kill(self, *names: str) -> None:
        for name in names:
            self.processes[name].kill()
            self.processes[name].wait()

    def leader(self) -> str:
        """The leader's id, once every member that runs knows the cluster; else ""."""
        leader = ""
        for name, process in self.processes.items():
            if process.poll() is not None:
                continue
            with grpc.insecure_channel(self.addresses[name], OPTIONS) as channel:
                stub = admin_pb2_grpc.AdminStub(channel)
                try:
                    status = stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=1)
                except grpc.RpcError:
                    return ""
            if not status.HasField("table"):
                return ""
            leader = status.member_id if status.is_leader else leader
        return leader


@pytest.fixture
def on_the_same_addresses(tmp_path: Path) -> Iterator[Callable[[str], Coordinators]]:
    addresses = dict(zip(NAMES, free_addresses(len(NAMES)), strict=True))
    made: list[Coordinators] = []

    def make(cluster: str) -> Coordinators:
        made.append(Coordinators(tmp_path / cluster, addresses))
        return made[-1]

    yield make
    for coordinators in made:
        coordinators.kill(*coordinators.processes)


def test_coordinator_of_another_cluster_on_a_members_address_stops_nobody(
    on_the_same_addresses: Callable[[str], Coordinators],
) -> None:
    other, ours = on_the_same_addresses("other"), on_the_same_addresses("ours")
    other.start(*NAMES)
    wait_until(other.leader, "the other cluster is there")
    other.kill(*NAMES)
    ours.start(*NAMES)
    leader = wait_until(ours.leader, "our cluster is there")
    lost = next(name for name in NAMES if name != leader)
    ours.kill(lost)
    other.start(lost)  # a member that knows our members' names by other stores

    kept = [name for name in NAMES if name != lost]
    ours.kill(kept[0])  # a restart is the moment at which it hears the stranger anew
    ours.start(kept[0])
    wait_until(lambda: ours.leader() in kept, "our two members have a leader")
    assert all(ours.processes[name].poll() is None for name in kept)
