"""A leader that plans and starts moves by the room that its nodes have said."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from koinon_coordinator.core.cluster.commands import AcceptPlan, StartMoves
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_coordinator.core.decide.copy_progress import Progress, Stage
from koinon_coordinator.core.decide.move_scheduler import moves_by_node, next_step, waits_for
from koinon_coordinator.core.decide.plan_requests import PlanKind, PlanWish
from koinon_coordinator.core.decide.room import NodeUse, Room
from koinon_coordinator.core.planning.planner import RefusalCode
from koinon_coordinator.leader.mover import ROOM_RETRY_S
from koinon_proto.contract.cluster_errors import MembershipChangeError
from koinon_proto.contract.table import NodeNumber, PartitionId
from koinon_proto.v1.membership_pb2 import NodeStats, PartitionSizes
from tests.coordinator.kit.plans import REBALANCE, carry_out, counts, execute, with_newcomer
from tests.coordinator.kit.states import plan_of
from tests.coordinator.kit.support import LeaderContext, bootstrapped, fence, run_term, settled

MB = 1_000_000
N1, N3, N4 = NodeNumber(1), NodeNumber(3), NodeNumber(4)
P0, P1 = PartitionId(0), PartitionId(1)


def use(used: int, of: int, **fields: object) -> NodeUse:
    return NodeUse(used_bytes=used * MB, map_bytes=of * MB, **fields)  # type: ignore[arg-type]


def room_of(state: ClusterState, uses: dict[int, NodeUse], came: int = 0) -> Room:
    """Return the room; of partition 0 node 3 has received so many bytes."""
    progress = Progress(partition_id=P0, stage=Stage.SNAPSHOT, bytes=came)
    known = {NodeNumber(n): one for n, one in uses.items()}
    return Room(state, known, {N3: {P0: progress}} if came else {})


def queued(partitions: int = 2) -> ClusterState:
    """All of node 1 is to go to node 3."""
    state = bootstrapped([(1,)] * partitions, nodes=4)
    state.apply(plan_of(*[((1,), (3,))] * partitions))
    return state


# --- what is known ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("known", "bytes_of_p0"),
    [
        ({1: use(10, 100)}, 5 * MB),  # nothing was counted: its share of the node's store
        ({1: use(10, 100, counted={0: 4 * MB, 1: MB}, counted_bytes=5 * MB)}, 8 * MB),
        ({1: use(10, 100, counted={1: 5 * MB}, counted_bytes=5 * MB)}, 0),
        ({4: use(10, 100)}, 0),  # its node was not heard
    ],
)
def test_size_of_a_partition_is_its_share_of_what_its_node_stores(
    known: dict[int, NodeUse], bytes_of_p0: int
) -> None:
    assert room_of(bootstrapped([(1,)] * 2, nodes=4), known).size(P0) == bytes_of_p0


def test_size_of_a_partition_is_the_most_that_a_replica_in_sync_takes() -> None:
    state = bootstrapped([(1, 2, 3), (1, 2, 3)])
    fence(state, 3)
    counted = {
        n: use(size, 100, counted={0: size * MB}, counted_bytes=size * MB)
        for n, size in ((1, 3), (2, 7), (3, 9))
    }
    assert room_of(state, counted).size(P0) == 7 * MB
    assert room_of(state, {**counted, 2: use(80, 100)}).size(P0) == 3 * MB  # it counted nothing yet


@pytest.mark.parametrize(
    ("node", "left", "limit"),
    [
        (use(10, 100), 75 * MB, "85% of its --map-size-bytes, 100.0 MB"),
        (use(90, 100), -5 * MB, "85% of its --map-size-bytes, 100.0 MB"),
        (
            use(10, 100, disk_bytes=1000 * MB, disk_free_bytes=70 * MB, reusable_bytes=5 * MB),
            25 * MB,
            "its disk has 70.0 MB free",
        ),
    ],
)
def test_room_is_what_is_left_of_the_map_or_of_the_disk(
    node: NodeUse, left: int, limit: str
) -> None:
    assert room_of(bootstrapped([(1,)]), {1: node}).for_plans[N1] == (left, limit)


def test_room_for_plans_counts_moves_that_are_queued_or_under_way() -> None:
    state = queued()
    uses = {1: use(20, 100), 3: use(0, 100)}
    assert room_of(state, uses).for_plans[N3][0] == 65 * MB
    assert room_of(state, uses).for_plans[N1][0] == 85 * MB
    state.apply(StartMoves(partition_ids=(P0,)))
    assert room_of(state, uses, came=4 * MB).for_plans[N3][0] == 69 * MB


# --- moves that wait ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("used", "started"), [(0, (P0, P1)), (75, (P0,)), (80, (P0,)), (81, ()), (95, ())]
)
def test_moves_start_as_far_as_there_is_room(used: int, started: Sequence[PartitionId]) -> None:
    state = queued()
    room = room_of(state, {1: use(20, 100), 3: use(used, 100)})
    command = next_step(state, {}, 0.0, room)
    assert command == (StartMoves(partition_ids=tuple(started)) if started else None)


def test_running_moves_count_for_those_that_are_to_start() -> None:
    state = queued()
    state.apply(StartMoves(partition_ids=(P0,)))
    uses = {1: use(20, 100), 3: use(75, 100)}
    assert next_step(state, {}, 0.0, room_of(state, uses)) is None
    command = next_step(state, {}, 0.0, room_of(state, uses, came=5 * MB))
    assert command == StartMoves(partition_ids=(P1,))


def test_moves_say_that_they_wait_for_room_and_how_much_there_is() -> None:
    state = queued()
    uses = {1: use(20, 100), 3: use(85, 100)}
    load = moves_by_node(state.moves.values())
    assert waits_for(state, state.moves[P0], load, room_of(state, uses)) == (
        "waits for room on n3 (needs 10.0 MB, has 5.0 MB: 90% of its --map-size-bytes, 100.0 MB)"
    )
    state.apply(StartMoves(partition_ids=(P0,)))
    full = {1: use(20, 100), 3: use(99, 100)}
    said = waits_for(state, state.moves[P0], load, room_of(state, full))
    assert said.startswith("waits for room on n3 (needs 10.0 MB, has 1.0 MB: ")


def test_move_to_a_node_that_this_leader_has_not_heard_waits() -> None:
    state = queued()
    room = room_of(state, {1: use(20, 100)})
    assert next_step(state, {}, 0.0, room) is None
    said = waits_for(state, state.moves[P0], {}, room)
    assert said == "this leader has not heard yet how much room n3 has"


# --- the leader ---------------------------------------------------------------------------------


async def says(term: LeaderContext, node_id: str, used: int, of: int) -> None:
    stats = NodeStats(used_bytes=used * MB, map_bytes=of * MB)
    await term.heartbeat(node_id, stats=stats)


def test_moves_wait_for_room_and_go_on_by_themselves_once_there_is_some() -> None:
    async def test(term: LeaderContext) -> None:
        operations = term.leadership.operations
        for node_id in ("n1", "n2", "n3", "n4"):
            await says(term, node_id, 40, 100)
        await execute(term, REBALANCE)
        await says(term, "n4", 85, 100)
        for _ in range(10):
            await settled()
        assert term.count(StartMoves) == 0
        assert [one.node for one in operations.short_of_room()] == [N4] * 3
        assert all("room on n4" in view.waits_for for view in operations.moves()[1])
        await says(term, "n4", 85, 200)
        await term.pass_time(2)
        await settled()
        assert term.count(StartMoves) == 1
        assert not operations.short_of_room()

    run_term(test, state=with_newcomer())


def test_drain_without_room_elsewhere_is_refused_and_changes_nothing() -> None:
    async def test(term: LeaderContext) -> None:
        for node_id in ("n1", "n2"):
            await says(term, node_id, 60, 100)
        drain = PlanWish(kind=PlanKind.DRAIN, node_id="n1")
        with pytest.raises(MembershipChangeError, match="n2 has no room for 2 of the 2 replicas"):
            await execute(term, drain)
        assert not term.group.proposed

    run_term(test, state=bootstrapped([(1,), (1,), (2,), (2,)], nodes=2))


def test_sizes_that_a_node_has_counted_hold_until_it_says_others() -> None:
    async def test(term: LeaderContext) -> None:
        sizes = PartitionSizes(partition_ids=[0, 1], bytes=[3 * MB, MB])
        stats = NodeStats(used_bytes=8 * MB, map_bytes=100 * MB)
        for said in (sizes, None):
            await term.heartbeat(stats=stats, sizes=said)
        assert term.leadership.mover.room().size(P0) == 6 * MB

    run_term(test, state=bootstrapped([(1,), (1,)]))


def test_repair_without_room_is_planned_again_once_there_is_some(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def live(term: LeaderContext, seconds: float, map_mb: int) -> None:
        for _ in range(round(seconds)):
            for node_id in ("n1", "n2", "n4"):
                await says(term, node_id, 80, 100 if node_id != "n4" else map_mb)
            await term.pass_time(1)
            await settled()

    async def test(term: LeaderContext) -> None:
        await live(term, 8, 100)
        assert term.count(AcceptPlan) == 0
        refused = [r.message for r in caplog.records if "re-replication refused" in r.message]
        assert any(f"code={RefusalCode.NO_ROOM.value}" in line for line in refused)
        await live(term, ROOM_RETRY_S + 2, 1000)
        assert term.count(AcceptPlan) == 1

    state = bootstrapped([(1, 3), (2, 3)], nodes=4, rereplicate_after_ms=5_000)
    fence(state, 3)
    run_term(test, state=state)


def test_plan_to_a_small_node_is_carried_out_as_far_as_it_fits() -> None:
    async def test(term: LeaderContext) -> None:
        for node_id, of in (("n1", 1000), ("n2", 1000), ("n3", 1000), ("n4", 30)):
            await says(term, node_id, 40 if node_id != "n4" else 0, of)
        planned = await term.leadership.operations.plan(REBALANCE)
        assert [r.code for r in planned.plan.refusals] == [RefusalCode.NO_ROOM]
        await execute(term, REBALANCE)
        await carry_out(term, "n1", "n2", "n3", "n4")
        assert counts(term)[4] == 2

    run_term(test, state=with_newcomer())
