"""Members in one process, with in-memory disks and network."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from koinon_coordinator.core.raft import Configuration
from koinon_coordinator.raft import (
    RaftConfig,
    RaftMember,
)
from tests.kit.waiting import until

from .memory import MemoryRaftNetwork, MemoryRaftStorage

UNUSED = Path("unused")


class Commands:
    """Keeps what it applies; `b"raise"` raises."""

    group_id = ""

    def __init__(self) -> None:
        self.applied: list[bytes] = []
        self.snapshots = 0  # that were taken of it
        self.restored = 0

    def apply(self, index: int, command: bytes) -> object:
        if command == b"raise":
            raise RuntimeError("told to")
        self.applied.append(command)
        return b"done " + command

    def capture(self) -> Callable[[], bytes]:
        self.snapshots += 1
        applied = tuple(self.applied)
        return lambda: b"\n".join(applied)

    def restore(self, snapshot: bytes) -> None:
        self.restored += 1
        self.applied = snapshot.split(b"\n")


class InProcessGroup:
    """Members with in-memory disks and network; each can be stopped and started again."""

    def __init__(self, members: str = "abc", **settings: Any) -> None:
        self.network = MemoryRaftNetwork()
        self.addresses = {member_id: f"host-{member_id}:1" for member_id in members}
        self.settings = settings
        self.disks: dict[str, MemoryRaftStorage] = {}
        self.members: dict[str, RaftMember] = {}
        self.states: dict[str, Commands] = {}
        self.calls: list[tuple[str, str, int]] = []

    def make(self, member_id: str, *, joins: bool = False) -> RaftMember:
        address = f"host-{member_id}:1"
        voters = {} if joins else self.addresses
        configuration = Configuration(voters=voters)
        disk = self.disks.setdefault(member_id, MemoryRaftStorage(configuration))
        state = self.states[member_id] = Commands()
        member = self.members[member_id] = RaftMember(
            RaftConfig(
                member_id=member_id, data_dir=UNUSED, initial_members=voters, **self.settings
            ),
            state,
            self.network.transport(address),
            on_leader=lambda term: self.calls.append((member_id, "leader", term)),
            on_follower=lambda term, _: self.calls.append((member_id, "follower", term)),
            storage=lambda: disk,
        )
        return member

    async def start(self) -> None:
        for member_id in self.addresses:
            await self.make(member_id).start()

    async def leader(self, *, among: str = "") -> RaftMember:
        """The member that on_leader was called for last, while that holds."""

        def serving() -> list[RaftMember]:
            found = []
            for member_id, member in self.members.items():
                calls = [call for call in self.calls if call[0] == member_id]
                if calls and calls[-1][1] == "leader" and member_id in (among or self.members):
                    found.append(member)
            return found

        await until(serving, "a leader serves")
        return serving()[-1]


@asynccontextmanager
async def group_of(members: str = "abc", **settings: Any) -> AsyncIterator[InProcessGroup]:
    group = InProcessGroup(members, **settings)
    await group.start()
    try:
        yield group
    finally:
        for member in group.members.values():
            await member.stop()


def member_config(**settings: Any) -> RaftConfig:
    members = {"a": "h:1", "b": "h:2", "c": "h:3"}
    return RaftConfig(
        **{"member_id": "a", "data_dir": UNUSED, "initial_members": members, **settings}
    )
