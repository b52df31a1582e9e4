"""Three coordinator processes and their deaths, seen by nodes that go on heartbeating."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest

from koinon_proto.contract.cluster_errors import NotLeaderError
from koinon_proto.contract.errors import KoinonError
from koinon_proto.v1 import admin_pb2, membership_pb2
from tests.coordinator.kit.fake_node import Caller, FakeNode
from tests.kit.addresses import free_addresses
from tests.kit.waiting import until

PARTITIONS = 64


class Processes:
    """Coordinators ``c1..``, each with its directory and its log."""

    def __init__(self, root: Path, count: int = 3) -> None:
        self.root = root
        self.addresses = {f"c{i + 1}": a for i, a in enumerate(free_addresses(count))}
        self.initial = ",".join(f"{m}={a}" for m, a in self.addresses.items())
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.callers = {m: Caller(a) for m, a in self.addresses.items()}

    def start(self, member_id: str, *flags: str) -> None:
        flags = flags or ("--members", self.initial)
        with (self.root / f"{member_id}.log").open("ab") as log:
            self.running[member_id] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "koinon_coordinator", "--id", member_id),
                    *("--listen", self.addresses[member_id]),
                    *("--data", str(self.root / member_id)),
                    *("--bootstrap-nodes", "2", "--partitions", str(PARTITIONS)),
                    *flags,
                ],
                stderr=log,
                start_new_session=True,  # Linux shares CPU out by session
            )

    def signal(self, member_id: str, number: int) -> None:
        self.running[member_id].send_signal(number)

    def kill(self, member_id: str) -> None:
        process = self.running.pop(member_id)
        process.kill()
        process.wait()

    async def leader(self, *, other_than: str = "") -> str:
        """The id of the member that leads, by its own word."""
        found: list[str] = []

        async def ask(member_id: str) -> None:
            with contextlib.suppress(KoinonError, grpc.aio.AioRpcError):
                call = self.callers[member_id].admin.GetStatus
                status = await call(admin_pb2.GetStatusRequest(), timeout=0.5)
                if status.is_leader and member_id != other_than:
                    found.append(member_id)

        end = time.monotonic() + 60
        while not found:
            assert time.monotonic() < end, "no leader"
            await asyncio.gather(*(ask(m) for m in self.running))
            await asyncio.sleep(0.02)
        return found[0]

    def log(self, member_id: str) -> str:
        return (self.root / f"{member_id}.log").read_text()

    async def close(self) -> None:
        for caller in self.callers.values():
            await caller.close()
        for member_id in list(self.running):
            self.kill(member_id)


@contextlib.asynccontextmanager
async def living(processes: Processes, count: int = 2) -> AsyncIterator[list[FakeNode]]:
    """Nodes that live beside the processes, bootstrapped and hosting all they lead."""
    coordinators = list(processes.addresses.values())
    nodes = [FakeNode(f"n{i + 1}", coordinators) for i in range(count)]
    lives = [asyncio.ensure_future(node.run()) for node in nodes]
    try:
        await until(lambda: all(hosts_all(node) for node in nodes), what="all online")
        yield nodes
    finally:
        for life in lives:
            life.cancel()
        await asyncio.gather(*lives, return_exceptions=True)
        for node in nodes:
            await node.close()


def hosts_all(node: FakeNode) -> bool:
    rows = node.table.rows if node.table is not None else ()
    return len(rows) == PARTITIONS and all(row.status == 2 for row in rows)


def version_of(node: FakeNode) -> int:
    assert node.table is not None
    return node.table.table_version


def with_processes(
    root: Path, test: Callable[[Processes], Awaitable[None]], count: int = 3
) -> None:
    async def whole() -> None:
        processes = Processes(root, count)
        try:
            for member_id in processes.addresses:
                processes.start(member_id)
            await test(processes)
        finally:
            await processes.close()

    asyncio.run(asyncio.wait_for(whole(), 240))


def test_processes_leader_killed_then_all_killed_nodes_keep_their_sessions_and_the_table(
    tmp_path: Path,
) -> None:
    async def test(processes: Processes) -> None:
        async with living(processes) as nodes:
            for _ in range(2):
                version = version_of(nodes[0])
                leader = await processes.leader()
                acknowledged = [node.acknowledged_at for node in nodes]
                processes.kill(leader)
                await until(
                    lambda before=acknowledged: all(  # type: ignore[misc]
                        node.acknowledged_at > was + 1
                        for node, was in zip(nodes, before, strict=True)
                    )
                )
                assert version_of(nodes[0]) >= version
                processes.start(leader)
                await processes.leader()
            assert [(node.epochs, node.fenced) for node in nodes] == [([1], 0), ([1], 0)]
            before = await processes.callers[await processes.leader()].get_table()
            for member_id in list(processes.running):
                processes.kill(member_id)
            for member_id in processes.addresses:
                processes.start(member_id)
            after = await processes.callers[await processes.leader()].get_table()
            assert after.cluster.cluster_id == before.cluster.cluster_id
            assert after.table_version >= before.table_version
            assert len(after.rows) == PARTITIONS
            heard = [node.acknowledged_at for node in nodes]
            await until(
                lambda: all(n.acknowledged_at > was for n, was in zip(nodes, heard, strict=True))
            )
            assert len({frozenset(node.cluster_ids) for node in nodes}) == 1

    with_processes(tmp_path, test)


def test_processes_leader_stopped_for_long_fences_nobody_when_it_resumes(tmp_path: Path) -> None:
    async def test(processes: Processes) -> None:
        async with living(processes) as nodes:
            leader = await processes.leader()
            processes.signal(leader, signal.SIGSTOP)
            others = {m: p for m, p in processes.running.items() if m != leader}
            everyone, processes.running = processes.running, others
            second = await processes.leader()
            long_after = time.monotonic() + 2.5  # every session that the stopped one knows is over
            await until(lambda: all(node.acknowledged_at > long_after for node in nodes))
            processes.running = everyone
            processes.signal(leader, signal.SIGCONT)
            resumed_at = time.monotonic()
            await until(lambda: all(node.acknowledged_at > resumed_at + 1.0 for node in nodes))
            assert await processes.leader() == second
            assert [(node.epochs, node.fenced) for node in nodes] == [([1], 0), ([1], 0)]
            assert "node fenced" not in processes.log(leader) + processes.log(second)
            caller = processes.callers[leader]
            request = membership_pb2.HeartbeatRequest(node_id="n1", node_epoch=1)
            with pytest.raises(NotLeaderError) as refused:
                await caller.heartbeat(request)
            assert refused.value.leader_id == second

    with_processes(tmp_path, test)


def test_processes_only_leader_stopped_for_long_fences_nobody_when_it_resumes(
    tmp_path: Path,
) -> None:
    """A group of one has no other member to take over: its own clock is all that it has."""

    async def test(processes: Processes) -> None:
        async with living(processes) as nodes:
            processes.signal("c1", signal.SIGSTOP)
            await until(lambda: all(node.unanswered_s > 2.5 for node in nodes))
            processes.signal("c1", signal.SIGCONT)
            resumed_at = time.monotonic()
            await until(lambda: all(n.acknowledged_at > resumed_at + 0.5 for n in nodes))
            assert [(node.epochs, node.fenced) for node in nodes] == [([1], 0), ([1], 0)]

    with_processes(tmp_path, test, count=1)


def test_processes_stopped_cleanly_the_leader_hands_over_first(tmp_path: Path) -> None:
    async def test(processes: Processes) -> None:
        async with living(processes) as nodes:
            leader = await processes.leader()
            process = processes.running.pop(leader)
            for node in nodes:
                node.worst_gap_s = 0.0
            began_at = time.monotonic()
            process.send_signal(signal.SIGTERM)
            await until(lambda: process.poll() is not None)
            assert process.returncode == 0
            await processes.leader()
            await until(lambda: all(n.acknowledged_at > began_at + 0.5 for n in nodes))
            assert [(node.epochs, node.fenced) for node in nodes] == [([1], 0), ([1], 0)]
            assert "coordinator stopped" in processes.log(leader)

    with_processes(tmp_path, test)


def test_processes_member_added_and_leadership_transferred_and_member_removed(
    tmp_path: Path,
) -> None:
    async def test(processes: Processes) -> None:
        async with living(processes) as nodes:
            (address,) = free_addresses(1)
            processes.addresses["c4"] = address
            processes.callers["c4"] = Caller(address)
            processes.start("c4", "--join")
            leader = await processes.leader()
            caller = processes.callers[leader]
            add = admin_pb2.AddCoordinatorRequest(member_id="c4", address=address)
            await caller.call(caller.admin.AddCoordinator, add, 60)
            transfer = admin_pb2.TransferLeadershipRequest(member_id="c4")
            reply = await caller.call(caller.admin.TransferLeadership, transfer, 60)
            assert reply.leader_id == "c4"
            with pytest.raises(NotLeaderError) as refused:
                await caller.call(caller.admin.TransferLeadership, transfer)
            assert refused.value.leader_address == address
            caller = processes.callers[await processes.leader()]
            reply = await caller.call(caller.admin.TransferLeadership, transfer)
            assert reply.leader_id == "c4"  # it leads already
            remove = admin_pb2.RemoveCoordinatorRequest(member_id=leader)
            await caller.call(caller.admin.RemoveCoordinator, remove, 60)
            status = await caller.status()
            voters = {c.member_id for c in status.coordinators if c.voter}
            assert voters == {"c1", "c2", "c3", "c4"} - {leader}
            assert len((await processes.callers["c4"].get_table()).rows) == PARTITIONS
            assert [node.fenced for node in nodes] == [0, 0]

    with_processes(tmp_path, test)


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--members", "c1={a}", "--lease-ms", "1500"], 2, "lease-ms 1500"),
        (["--members", "c1={a}", "--data", "/dev/null/x"], 2, "/dev/null"),
        (["--members", "c1={a}", "--data", "/proc"], 2, "/proc/lock"),
    ],
)
def test_process_that_cannot_start_says_why_in_one_line(
    tmp_path: Path, flags: list[str], code: int, says: str
) -> None:
    (address,) = free_addresses(1)
    command = [sys.executable, "-m", "koinon_coordinator", "--id", "c1", "--listen", address]
    given = [flag.format(a=address) for flag in flags]
    data = [] if "--data" in given else ["--data", str(tmp_path / "c1")]
    done = subprocess.run(
        [*command, *data, *given], capture_output=True, text=True, timeout=120, env=os.environ
    )
    assert done.returncode == code
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("koinon coordinator: ")
    assert says in last
    assert "Traceback" not in done.stderr


def test_processes_follower_whose_times_contradict_the_clusters_ends_before_it_leads(
    tmp_path: Path,
) -> None:
    async def test(processes: Processes) -> None:
        async with living(processes):
            leader = await processes.leader()
            status = await processes.callers[leader].admin.GetStatus(admin_pb2.GetStatusRequest())
            follower = next(m for m in processes.addresses if m != leader)
            processes.kill(follower)
            times = {"raft-heartbeat": 220, "check-quorum": 500, "session-timeout": 2000}
            flags = [part for name, ms in times.items() for part in (f"--{name}-ms", str(ms))]
            processes.start(follower, "--members", processes.initial, *flags)
            ended = processes.running[follower]
            assert await asyncio.to_thread(ended.wait, 60) == 2
            last = processes.log(follower).strip().splitlines()[-1]
            assert "twice raft-heartbeat-ms 220 must be below check-quorum-ms 400" in last
            assert await processes.leader() == leader
            after = await processes.callers[leader].admin.GetStatus(admin_pb2.GetStatusRequest())
            assert after.term == status.term

    with_processes(tmp_path, test)


def test_processes_follower_with_other_settings_than_the_clusters_names_what_is_ignored(
    tmp_path: Path,
) -> None:
    async def test(processes: Processes) -> None:
        async with living(processes):
            leader = await processes.leader()
            follower = next(m for m in processes.addresses if m != leader)
            processes.kill(follower)
            flags = ("--max-value-bytes", "1000", "--rereplicate-after-ms", "0")
            processes.start(follower, "--members", processes.initial, *flags)
            ignored = [
                f"setting ignored setting={name} given={given}"
                for name, given in (("max_value_bytes", 1000), ("rereplicate_after_ms", 0))
            ]
            await until(lambda: all(line in processes.log(follower) for line in ignored))

    with_processes(tmp_path, test)


def test_process_whose_port_is_in_use_exits_with_2_and_names_it(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [sys.executable, "-m", "koinon_coordinator", "--id", "c1", "--listen", address]
        command += ["--data", str(tmp_path / "c1"), "--members", f"c1={address}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert address in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
