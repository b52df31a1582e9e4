"""Members and their directories: unusable, lost, and known to one another."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from koinon_coordinator.core.raft import Configuration, Role
from koinon_coordinator.raft import (
    MemberStoppedError,
    RaftConfig,
    RaftMember,
    StoreChangedError,
    StreamRaftTransport,
)
from koinon_proto.contract.cluster_errors import DataDirectoryError
from tests.kit.addresses import free_addresses
from tests.kit.waiting import run, until

from .framed import Listener
from .in_process import UNUSED, Commands, InProcessGroup, group_of, member_config
from .memory import MemoryRaftNetwork, MemoryRaftStorage


def test_member_whose_directory_is_unusable_does_not_start(tmp_path: Path) -> None:
    async def test() -> None:
        (tmp_path / "data.mdb").write_bytes(b"something")
        member = RaftMember(
            member_config(data_dir=tmp_path), Commands(), MemoryRaftNetwork().transport("h:1")
        )
        with pytest.raises(DataDirectoryError):
            await member.start()
        with pytest.raises(MemberStoppedError):
            await member.propose(b"x")

    run(test)


def test_member_that_lost_its_directory_stops_and_says_so() -> None:
    async def test() -> None:
        async with group_of() as group:
            leader = await group.leader()
            await leader.propose(b"x")
            follower_id = next(m for m in group.members if m != leader.member_id)
            await until(lambda: group.states[follower_id].applied, "all know one another")
            await group.members[follower_id].stop()
            del group.disks[follower_id]
            again = group.make(follower_id)
            await again.start()
            with pytest.raises(StoreChangedError, match="remove it and add it again"):
                await again.stopped()

    run(test)


def test_member_that_cannot_remember_a_store_says_so_and_does_not_call_it_another() -> None:
    class Full(MemoryRaftStorage):
        def pin_store(self, member_id: str, store_id: str) -> None:
            raise OSError(errno.ENOSPC, "no space left on device")

    async def test() -> None:
        group = InProcessGroup()
        group.disks["a"] = Full(Configuration(voters=group.addresses))
        member = group.make("a")
        await member.start()
        with pytest.raises(MemberStoppedError):
            await member.is_known_store("b", "store-of-b")
        await member.stop()

    asyncio.run(test())


def test_members_that_only_follow_know_one_anothers_stores() -> None:
    """Else one that lost its disk could vote for another that has never met it."""

    async def test() -> None:
        addresses = dict(zip("abc", free_addresses(3), strict=True))
        disks = {m: MemoryRaftStorage(Configuration(voters=addresses)) for m in addresses}
        members, servers = {}, []
        for member_id, address in addresses.items():
            transport = StreamRaftTransport()
            servers.append(await Listener(transport, address).start())
            # Only one of them ever campaigns.
            times = {"min": 300, "max": 600} if member_id == "a" else {"min": 9**6, "max": 9**7}
            members[member_id] = RaftMember(
                RaftConfig(
                    member_id=member_id,
                    data_dir=UNUSED,
                    initial_members=addresses,
                    election_timeout_min_ms=times["min"],
                    election_timeout_max_ms=times["max"],
                ),
                Commands(),
                transport,
                storage=lambda disk=disks[member_id]: disk,  # type: ignore[misc]
            )
            await members[member_id].start()
        try:
            await until(lambda: members["a"].status().role is Role.LEADER, "it leads")
            for one, other in ("bc", "cb"):
                store_id = disks[other].store_id
                await until(
                    lambda d=disks[one], m=other, s=store_id: d.pinned_stores().get(m) == s,  # type: ignore[misc]
                    "they know each other",
                )
        finally:
            for member in members.values():
                await member.stop()
            for server in servers:
                await server.stop()

    run(test)
