"""The asyncio member over in-memory and gRPC transports, in one process."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from koinon_coordinator.core.raft import Configuration, Entry, EntryKind, HardState, Role
from koinon_coordinator.raft import (
    GrpcRaftTransport,
    MemberRemovedError,
    MemberStoppedError,
    ProposalQueueFullError,
    ProposalUnknownError,
    RaftConfig,
    RaftMember,
    StorageFailedError,
    StoreChangedError,
    TransportConfig,
)
from koinon_proto.contract.errors import (
    ConfigurationError,
    DataDirectoryError,
    InvalidArgumentError,
    MembershipChangeError,
    NotLeaderError,
)
from koinon_proto.process.clock import boottime
from tests.kit.addresses import free_address
from tests.kit.waiting import run, until

from .memory import MemoryRaftNetwork, MemoryRaftStorage

UNUSED = Path("unused")


class Commands:
    """Keeps what it applies; `b"raise"` raises."""

    def __init__(self) -> None:
        self.applied: list[bytes] = []
        self.snapshots = 0  # that were taken of it
        self.restored = 0

    def apply(self, index: int, command: bytes) -> object:
        if command == b"raise":
            raise RuntimeError("told to")
        self.applied.append(command)
        return b"done " + command

    def snapshot(self) -> bytes:
        self.snapshots += 1
        return b"\n".join(self.applied)

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


# -- requests


def test_member_proposal_returns_what_apply_returned() -> None:
    async def test() -> None:
        async with group_of() as group:
            leader = await group.leader()
            results = await asyncio.gather(*(leader.propose(b"%d" % n) for n in range(200)))
            assert results == [b"done %d" % n for n in range(200)]
            index = await leader.read_barrier()
            assert leader.status().applied_index >= index
            await until(
                lambda: all(len(s.applied) == 200 for s in group.states.values()),
                "all have applied all",
            )

    run(test)


def test_member_follower_names_the_leader() -> None:
    async def test() -> None:
        async with group_of() as group:
            leader = await group.leader()
            follower = next(m for m in group.members.values() if m is not leader)
            await until(lambda: follower.status().leader_id, "it hears the leader")
            requests: list[Awaitable[object]] = [
                follower.propose(b"x"),
                follower.read_barrier(),
                follower.add_learner("z", "host-z:1"),
                follower.transfer_leadership(None),
            ]
            for request in requests:
                with pytest.raises(NotLeaderError) as caught:
                    await request
                assert caught.value.leader_id == leader.member_id
                assert caught.value.leader_address == f"host-{leader.member_id}:1"
            assert follower.quorum_contact_at() is None

    run(test)


def test_member_quorum_contact_is_recent_on_its_clock() -> None:
    async def test() -> None:
        async with group_of() as group:
            leader = await group.leader()
            await until(lambda: leader.quorum_contact_at() is not None, "a round is answered")
            contact = leader.quorum_contact_at()
            assert contact is not None
            assert contact <= boottime()

    run(test)


def test_member_bounds_are_typed_errors() -> None:
    async def test() -> None:
        async with group_of("a", pending_proposals_max=5, append_bytes_max=1000) as group:
            leader = await group.leader()
            with pytest.raises(InvalidArgumentError) as caught:
                await leader.propose(b"x" * 1001)
            assert (caught.value.limit, caught.value.actual) == (1000, 1001)
            outcomes = await asyncio.gather(
                *(leader.propose(b"x") for _ in range(9)), return_exceptions=True
            )
            refused = [o for o in outcomes if isinstance(o, ProposalQueueFullError)]
            assert len(refused) == 4
            assert refused[0].limit == 5
            assert "uncommitted proposals" in refused[0].resource
            assert refused[0].retriable

    run(test)


def test_member_bounds_of_bytes_and_reads_name_themselves() -> None:
    async def test() -> None:
        bounds = {"append_bytes_max": 1000, "pending_proposal_bytes_max": 2500}
        async with group_of("a", pending_reads_max=3, **bounds) as group:
            leader = await group.leader()
            for resource, limit, requests in (
                ("bytes of uncommitted", 2500, [leader.propose(b"x" * 900) for _ in range(3)]),
                ("open reads", 3, [leader.read_barrier() for _ in range(4)]),
            ):
                outcomes = await asyncio.gather(*requests, return_exceptions=True)
                (refused,) = (o for o in outcomes if isinstance(o, ProposalQueueFullError))
                assert resource in refused.resource
                assert refused.limit == limit

    run(test)


def test_member_isolated_leader_proposal_fate_is_unknown() -> None:
    async def test() -> None:
        async with group_of() as group:
            leader = await group.leader()
            group.network.isolate(leader.member_id)
            read = asyncio.create_task(leader.read_barrier())
            with pytest.raises(ProposalUnknownError) as caught:
                await leader.propose(b"lost")
            assert caught.value.maybe_applied
            with pytest.raises(NotLeaderError):
                await read
            assert [c[1] for c in group.calls if c[0] == leader.member_id][-1] == "follower"
            others = "".join(m for m in group.members if m != leader.member_id)
            successor = await group.leader(among=others)
            await successor.propose(b"kept")
            group.network.blocked.clear()
            state = group.states[leader.member_id]
            await until(lambda: b"kept" in state.applied, "the old leader catches up")
            assert b"lost" not in state.applied

    run(test)


def test_member_on_leader_comes_after_everything_earlier_is_applied() -> None:
    async def test() -> None:
        async with group_of() as group:
            leader = await group.leader()
            await asyncio.gather(*(leader.propose(b"%d" % n) for n in range(50)))
            seen: list[int] = []
            for member_id, member in group.members.items():
                state = group.states[member_id]
                member._on_leader = lambda _, s=state: seen.append(len(s.applied))
            await leader.stop()
            await until(lambda: seen, "a successor serves")
            assert seen[0] == 50

    run(test)


# -- stopping


def test_member_apply_that_raises_stops_it_loudly() -> None:
    async def test() -> None:
        async with group_of() as group:
            leader = await group.leader()
            with pytest.raises(ProposalUnknownError):
                await leader.propose(b"raise")
            with pytest.raises(RuntimeError, match="told to"):
                await leader.stopped()
            with pytest.raises(MemberStoppedError):
                await leader.propose(b"more")

    run(test)


def test_member_failed_save_stops_it() -> None:
    async def test() -> None:
        async with group_of() as group:
            leader = await group.leader()

            def broken(**_: object) -> None:
                raise StorageFailedError(path="data.mdb", reason="Input/output error")

            group.disks[leader.member_id].save = broken  # type: ignore[method-assign]
            with pytest.raises(ProposalUnknownError):
                await leader.propose(b"x")
            with pytest.raises(StorageFailedError):
                await leader.stopped()
            others = "".join(m for m in group.members if m != leader.member_id)
            assert await (await group.leader(among=others)).propose(b"y") == b"done y"

    run(test)


def test_member_leader_whose_disk_hangs_is_replaced() -> None:
    async def test() -> None:
        async with group_of(save_timeout_ms=300) as group:
            leader = await group.leader()
            disk, goes_on = group.disks[leader.member_id], threading.Event()
            save = disk.save

            def hangs(**what: Any) -> None:
                goes_on.wait()
                save(**what)

            disk.save = hangs  # type: ignore[method-assign]
            try:
                with pytest.raises(ProposalUnknownError):
                    await leader.propose(b"x")
                assert leader.status().pending_save_s > 0.3
                others = "".join(m for m in group.members if m != leader.member_id)
                assert await (await group.leader(among=others)).propose(b"y") == b"done y"
            finally:
                goes_on.set()
            state = group.states[leader.member_id]
            await until(lambda: b"y" in state.applied, "it catches up")
            assert leader.status().pending_save_s < 0.3

    run(test)


def test_member_stopped_by_its_owner_says_nothing() -> None:
    async def test() -> None:
        async with group_of("a") as group:
            leader = await group.leader()
            await leader.stop()
            await leader.stopped()
            await leader.stop()
            with pytest.raises(MemberStoppedError):
                leader.status()
            assert group.calls[-1][1] == "follower"

    run(test)


def test_member_restarted_replays_its_log_and_snapshot() -> None:
    async def test() -> None:
        async with group_of("a", snapshot_every_entries=10, retained_entries_max=2) as group:
            leader = await group.leader()
            for number in range(25):
                await leader.propose(b"%d" % number)
            assert group.states["a"].snapshots == 2
            await leader.stop()
            again = group.make("a")
            await again.start()
            await until(lambda: again.status().role is Role.LEADER, "it leads again")
            await again.read_barrier()
            assert group.states["a"].applied == [b"%d" % n for n in range(25)]

    run(test)


def test_member_applies_a_long_log_after_a_restart_in_many_turns_of_the_loop() -> None:
    """Heartbeats and votes are answered between them."""
    turn = 0
    applied_in: Counter[int] = Counter()

    class Slow(Commands):
        def apply(self, index: int, command: bytes) -> object:
            applied_in[turn] += 1
            ends_at = time.perf_counter() + 0.0002
            while time.perf_counter() < ends_at:
                pass
            return super().apply(index, command)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def test() -> None:
        count = 5000
        group = InProcessGroup("a")
        disk = group.disks["a"] = MemoryRaftStorage(Configuration(voters=group.addresses))
        disk.save(
            hard_state=HardState(term=1),
            snapshot_write=None,
            entries=[Entry(n + 1, 1, EntryKind.COMMAND, b"%d" % n) for n in range(count)],
        )
        member = group.make("a")
        member._state_machine = state = Slow()
        turns = asyncio.create_task(count_turns())
        try:
            await member.start()
            assert await (await group.leader()).propose(b"on") == b"done on"
            assert state.applied == [*(b"%d" % n for n in range(count)), b"on"]
            assert max(applied_in.values()) <= count / 10
        finally:
            turns.cancel()
            await member.stop()

    run(test)


# -- membership


def test_member_joins_is_promoted_and_removed() -> None:
    async def test() -> None:
        async with group_of(snapshot_every_entries=20, retained_entries_max=2) as group:
            leader = await group.leader()
            for number in range(50):
                await leader.propose(b"%d" % number)
            await group.make("d", joins=True).start()
            await leader.add_learner("d", "host-d:1")
            await until(lambda: len(group.states["d"].applied) == 50, "it has all")
            assert group.states["d"].restored == 1
            await leader.promote("d")
            status = leader.status().members["d"]
            assert status.is_voter
            assert status.lag_entries is not None
            await leader.remove_member("d")
            with pytest.raises(MemberRemovedError):
                await group.members["d"].stopped()
            with pytest.raises(MembershipChangeError):
                await leader.remove_member("d")

    run(test)


def test_member_refused_changes_name_their_subject_and_a_way_out() -> None:
    async def test() -> None:
        async with group_of() as group:
            leader = await group.leader()
            one, other = sorted(m for m in group.members if m != leader.member_id)
            refused: list[tuple[Awaitable[object], str]] = [
                (leader.add_learner(one, "new:1"), f"{one} is a member already, at host-{one}:1"),
                (leader.add_learner("d", f"host-{one}:1"), f"{one} is at host-{one}:1 already"),
                (leader.promote("d"), "d is not a learner; the learners are none"),
                (leader.remove_member("d"), "d is not a member, .* members are a, b and c"),
                (leader.transfer_leadership("d"), "d is not a voter .* voters are a, b and c"),
            ]
            for request, why in refused:
                with pytest.raises(MembershipChangeError, match=why):
                    await request
            group.network.isolate(other)
            await until(lambda: not leader.status().members[other].is_active, "it is silent")
            why = f"without {one} no majority answers: bring {other} back, or remove {other}"
            with pytest.raises(MembershipChangeError, match=why):
                await leader.remove_member(one)
            await leader.remove_member(other)
            assert await leader.propose(b"on") == b"done on"

    run(test)


def test_member_leader_removes_itself_and_the_group_goes_on() -> None:
    async def test() -> None:
        async with group_of() as group:
            leader = await group.leader()
            members = leader.status().members
            others = [member_id for member_id in members if member_id != leader.member_id]
            await until(
                lambda: all(leader.status().members[m].is_active for m in others),
                "the others are in touch",
            )
            await leader.remove_member(leader.member_id)
            with pytest.raises(MemberRemovedError):
                await leader.stopped()
            successor = await group.leader(among="".join(others))
            assert await successor.propose(b"on") == b"done on"

    run(test)


def test_member_transfer_hands_over() -> None:
    async def test() -> None:
        async with group_of() as group:
            leader = await group.leader()
            to = next(m for m in group.members if m != leader.member_id)
            await leader.transfer_leadership(to)
            assert (await group.leader(among=to)).member_id == to

    run(test)


def test_member_transfer_to_one_out_of_touch_is_given_up() -> None:
    async def test() -> None:
        async with group_of() as group:
            leader = await group.leader()
            to = next(m for m in group.members if m != leader.member_id)
            group.network.isolate(to)
            with pytest.raises(MembershipChangeError, match="did not take over"):
                await leader.transfer_leadership(to)
            assert await leader.propose(b"on") == b"done on"

    run(test)


# -- configuration


def member_config(**settings: Any) -> RaftConfig:
    members = {"a": "h:1", "b": "h:2", "c": "h:3"}
    return RaftConfig(
        **{"member_id": "a", "data_dir": UNUSED, "initial_members": members, **settings}
    )


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"initial_members": {"a": "h:1", "b": "h:2"}}, ["2 voters", "a, b"]),
        ({"member_id": "z"}, ["'z'", "'a', 'b', 'c'"]),
        ({"initial_members": {"a": "h:1", "b": "h:1", "c": "h:2"}}, ["one address"]),
        ({"election_timeout_min_ms": 700}, ["=700", "election_timeout_max_ms=600"]),
        ({"heartbeat_interval_ms": 350}, ["=350", "election_timeout_min_ms=300"]),
        ({"check_quorum_ms": 100}, ["heartbeat_interval_ms=75", "check_quorum_ms=100"]),
        ({"tick_interval_ms": 60}, ["=60", "heartbeat_interval_ms=75"]),
        ({"map_bytes_max": 1}, ["map_bytes_max=1"]),
        ({"pending_reads_max": 0}, ["pending_reads_max=0"]),
        ({"pending_proposal_bytes_max": 9}, ["append_bytes_max=1048576", "bytes_max=9"]),
        ({"append_bytes_max": 1 << 30}, ["append_bytes_max=1073741824", "a message's limit"]),
        ({"snapshot_chunk_bytes": 1 << 29}, ["snapshot_chunk_bytes=", "a message's limit"]),
        ({"member_id": "", "initial_members": {}}, ["member_id"]),
    ],
)
def test_config_that_contradicts_itself_is_refused(
    settings: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        member_config(**settings)
    for part in named:
        assert part in str(caught.value)


def test_transport_config_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="=400"):
        TransportConfig(reconnect_backoff_min_ms=400)
    with pytest.raises(ConfigurationError, match="batch_bytes_max"):
        TransportConfig(queue_bytes_max=1)


# -- with real directories


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


# -- over gRPC


def test_members_that_only_follow_know_one_anothers_stores() -> None:
    """Else one that lost its disk could vote for another that has never met it."""

    async def test() -> None:
        addresses = {member_id: free_address() for member_id in "abc"}
        disks = {m: MemoryRaftStorage(Configuration(voters=addresses)) for m in addresses}
        members, servers = {}, []
        for member_id, address in addresses.items():
            transport, server = GrpcRaftTransport(), grpc.aio.server()
            transport.add_to_server(server)
            server.add_insecure_port(address)
            await server.start()
            servers.append(server)
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
                await server.stop(0)

    run(test)
