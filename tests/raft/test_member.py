"""The asyncio member over in-memory and gRPC transports, in one process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from koinon_coordinator.core.raft import Configuration, Entry, EntryKind, HardState, Role
from koinon_coordinator.raft import (
    MemberRemovedError,
    MemberStoppedError,
    ProposalQueueFullError,
    ProposalUnknownError,
    StorageFailedError,
)
from koinon_proto.contract.cluster_errors import MembershipChangeError, NotLeaderError
from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.process.clock import boottime
from tests.kit.waiting import until

from .in_process import Commands, InProcessGroup, group_of
from .memory import MemoryRaftStorage

# -- requests


async def test_member_proposal_returns_what_apply_returned() -> None:
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


async def test_member_follower_names_the_leader() -> None:
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


async def test_member_quorum_contact_is_recent_on_its_clock() -> None:
    async with group_of() as group:
        leader = await group.leader()
        await until(lambda: leader.quorum_contact_at() is not None, "a round is answered")
        contact = leader.quorum_contact_at()
        assert contact is not None
        assert contact <= boottime()


async def test_member_bounds_are_typed_errors() -> None:
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


async def test_member_bounds_of_bytes_and_reads_name_themselves() -> None:
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


async def test_member_isolated_leader_proposal_fate_is_unknown() -> None:
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


async def test_member_on_leader_comes_after_everything_earlier_is_applied() -> None:
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


# -- stopping


async def test_member_apply_that_raises_stops_it_loudly() -> None:
    async with group_of() as group:
        leader = await group.leader()
        with pytest.raises(ProposalUnknownError):
            await leader.propose(b"raise")
        with pytest.raises(RuntimeError, match="told to"):
            await leader.stopped()
        with pytest.raises(MemberStoppedError):
            await leader.propose(b"more")


async def test_member_failed_save_stops_it() -> None:
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


@pytest.mark.parametrize("leads", [True, False])
async def test_member_whose_disk_dies_while_nothing_is_proposed_stops(leads: bool) -> None:
    async with group_of(quiet_ms_max=300) as group:
        leader = await group.leader()
        followers = [m for m in group.members.values() if m is not leader]
        member = leader if leads else followers[0]

        def broken(**_: object) -> None:
            raise StorageFailedError(path="data.mdb", reason="input/output error")

        group.disks[member.member_id].save = broken  # type: ignore[method-assign]
        with pytest.raises(StorageFailedError):
            await member.stopped()
        await group.leader(among="".join(m for m in group.members if m != member.member_id))


async def test_member_that_leads_while_nothing_is_proposed_serves_its_term_once() -> None:
    async with group_of("a", quiet_ms_max=30) as group:
        leader = await group.leader()
        before = leader.status().commit_index
        await until(lambda: leader.status().commit_index > before + 2, "entries are appended")
        assert group.calls == [("a", "leader", leader.status().term)]
        assert not group.states["a"].applied


async def test_member_leader_whose_disk_hangs_is_replaced() -> None:
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
        await until(lambda: leader.status().pending_save_s < 0.3, "its disk answers")


async def test_member_stopped_by_its_owner_says_nothing() -> None:
    async with group_of("a") as group:
        leader = await group.leader()
        await leader.stop()
        await leader.stopped()
        await leader.stop()
        with pytest.raises(MemberStoppedError):
            leader.status()
        assert group.calls[-1][1] == "follower"


async def test_member_restarted_replays_its_log_and_snapshot() -> None:
    async with group_of("a", snapshot_every_entries=10, retained_entries_max=2) as group:
        leader = await group.leader()
        for number in range(25):
            await leader.propose(b"%d" % number)
            await until(lambda: not leader._snapshots.is_under_way, "no snapshot is being made")
        assert group.states["a"].snapshots == 2
        await leader.stop()
        again = group.make("a")
        await again.start()
        await until(lambda: again.status().role is Role.LEADER, "it leads again")
        await again.read_barrier()
        assert group.states["a"].applied == [b"%d" % n for n in range(25)]


async def test_member_goes_on_while_its_snapshot_is_encoded() -> None:
    may_end = threading.Event()

    class Slow(Commands):
        def capture(self) -> Callable[[], bytes]:
            encode = super().capture()

            def encode_later() -> bytes:
                assert may_end.wait(100)
                return encode()

            return encode_later

    group = InProcessGroup("a", snapshot_every_entries=10, retained_entries_max=2)
    member, state = group.make("a"), Slow()
    member._state_machine = group.states["a"] = state
    await member.start()
    leader = await group.leader()
    for number in range(35):
        await leader.propose(b"%d" % number)
    assert (len(state.applied), state.snapshots) == (35, 1)
    assert leader.status().snapshot_index == 0
    may_end.set()
    await until(lambda: group.disks["a"].load().snapshot.index, "it is durable")
    snapshot = group.disks["a"].load().snapshot
    assert snapshot.data.split(b"\n") == [b"%d" % n for n in range(snapshot.index - 1)]
    assert snapshot.index < 35  # of the moment at which it was captured
    await until(lambda: state.snapshots > 1, "the next one is due")
    await leader.propose(b"35")
    await leader.stop()
    again = group.make("a")
    await again.start()
    await until(lambda: again.status().role is Role.LEADER, "it leads again")
    await again.read_barrier()
    assert group.states["a"].applied == [b"%d" % n for n in range(36)]
    await again.stop()


async def test_member_makes_a_snapshot_of_few_entries_that_took_long_to_apply() -> None:
    """A restart would take as long for them."""

    class Slow(Commands):
        def apply(self, index: int, command: bytes) -> object:
            ends_at = time.thread_time() + 0.004
            while time.thread_time() < ends_at:
                pass
            return super().apply(index, command)

    group = InProcessGroup("a", snapshot_every_apply_ms=20)
    member = group.make("a")
    member._state_machine = group.states["a"] = state = Slow()
    await member.start()
    leader = await group.leader()
    for number in range(4):
        await leader.propose(b"%d" % number)
    assert state.snapshots == 0
    for number in range(2):
        await leader.propose(b"%d" % number)
    await until(lambda: state.snapshots == 1, "a snapshot is made")
    await leader.stop()


async def test_member_stops_if_its_state_cannot_be_encoded() -> None:
    class Broken(Commands):
        def capture(self) -> Callable[[], bytes]:
            def encode() -> bytes:
                raise RuntimeError("no bytes for this")

            return encode

    group = InProcessGroup("a", snapshot_every_entries=3)
    member = group.make("a")
    member._state_machine = Broken()
    await member.start()
    leader = await group.leader()
    with contextlib.suppress(ProposalUnknownError):  # the third may come too late to hear of it
        for number in range(3):
            await leader.propose(b"%d" % number)
    with pytest.raises(RuntimeError, match="no bytes"):
        await member.stopped()


async def test_member_applies_a_long_log_after_a_restart_in_many_turns_of_the_loop() -> None:
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


# -- membership


async def test_member_joins_is_promoted_and_removed() -> None:
    async with group_of(snapshot_every_entries=20, retained_entries_max=2) as group:
        leader = await group.leader()
        for number in range(50):
            await leader.propose(b"%d" % number)
        await group.make("d", joins=True).start()
        await leader.add_learner("d", "host-d:1")
        await until(lambda: len(group.states["d"].applied) == 50, "it has all")
        assert group.states["d"].restored >= 1
        await leader.promote("d")
        status = leader.status().members["d"]
        assert status.is_voter
        assert status.lag_entries is not None
        await leader.remove_member("d")
        with pytest.raises(MemberRemovedError):
            await group.members["d"].stopped()
        with pytest.raises(MembershipChangeError):
            await leader.remove_member("d")


async def test_member_refused_changes_name_their_subject_and_a_way_out() -> None:
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


async def test_member_leader_removes_itself_and_the_group_goes_on() -> None:
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


async def test_member_transfer_hands_over() -> None:
    async with group_of() as group:
        leader = await group.leader()
        to = next(m for m in group.members if m != leader.member_id)
        await leader.transfer_leadership(to)
        assert (await group.leader(among=to)).member_id == to


async def test_member_transfer_to_one_out_of_touch_is_given_up() -> None:
    async with group_of() as group:
        leader = await group.leader()
        to = next(m for m in group.members if m != leader.member_id)
        group.network.isolate(to)
        with pytest.raises(MembershipChangeError, match="did not take over"):
            await leader.transfer_leadership(to)
        assert await leader.propose(b"on") == b"done on"
