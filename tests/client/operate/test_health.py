"""Tests of the judgement on a cluster's status: problems and notes, the summary in one line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from koinon.operate.cluster_status import (
    ClusterStatus,
    CoordinatorView,
    ElectionsView,
    RoomWaitView,
    ScarceResource,
    SessionView,
)
from koinon.operate.judge.health import notes, problems, summary
from koinon.operate.loads_client import LoadMode, LoadState, LoadView
from koinon_proto.contract.table import (
    ActiveLoad,
    MoveSettings,
    NodeNumber,
    NodeStatus,
    OfflineReason,
    PartitionStatus,
    Table,
)
from tests.kit.tables import config_of, node_of, row_of, table_with

PARTITIONS = 12


def number(n: int) -> NodeNumber:
    return NodeNumber((n - 1) % 3 + 1)


def table_of(**changes: Any) -> Table:
    rows = [row_of(p, number(p), number(p + 1)) for p in range(PARTITIONS)]
    config = config_of(PARTITIONS, cluster_id="one", replication_factor=2, bootstrap_nodes=3)
    nodes = [node_of(n, address=f"host{n}:1") for n in (1, 2, 3)]
    return replace(table_with(rows, nodes, config=config), **changes)


def with_row(table: Table, p: int, **fields: Any) -> Table:
    rows = list(table.rows)
    rows[p] = replace(rows[p], **fields)
    return replace(table, rows=tuple(rows))


def with_node(table: Table, n: int, **fields: Any) -> Table:
    changed = replace(table.nodes[NodeNumber(n)], **fields)
    return replace(table, nodes={**table.nodes, NodeNumber(n): changed})


def status_of(table: Table | None = None, *, used: float = 0.1, **fields: Any) -> ClusterStatus:
    given: dict[str, Any] = {
        "member_id": "c1",
        "is_leader": True,
        "leader_id": "c1",
        "leader_address": "c1:1",
        "term": 1,
        "commit_index": 1,
        "applied_index": 1,
        "coordinators": tuple(coordinator(n) for n in (1, 2, 3)),
        "sessions": tuple(session(n, used if n == 2 else 0.1) for n in (1, 2, 3)),
        "table": table or table_of(),
        "lease_ms": 1000,
        "session_timeout_ms": 1500,
    }
    return ClusterStatus(**{**given, **fields})


def coordinator(n: int, *, voter: bool = True, active: bool = True) -> CoordinatorView:
    return CoordinatorView(
        member_id=f"c{n}",
        address=f"c{n}:1",
        voter=voter,
        leader=n == 1,
        active=active,
        match_index=1,
    )


def session(n: int, used: float, disk_free: int = 50_000_000_000) -> SessionView:
    return SessionView(
        node_number=n,
        live=True,
        heard_ms_ago=10,
        records=1,
        used_bytes=int(used * 1_000_000),
        map_bytes=1_000_000,
        disk_free_bytes=disk_free,
        disk_bytes=100_000_000_000,
        commit_out_ms=0,
        commit_ms=2,
        reads_per_second=0.0,
        writes_per_second=0.0,
    )


def test_healthy_cluster_has_no_problem_and_no_note() -> None:
    status = status_of()
    assert problems(status) == []
    assert notes(status) == []
    assert summary(status) == (
        "All is well. 12 partitions online on 3 nodes; 3 coordinators, c1 leads."
    )


@pytest.mark.parametrize("fields", [{}, {"leader_id": ""}])
def test_summary_says_that_moves_are_paused(fields: dict[str, Any]) -> None:
    line = summary(status_of(table_of(moves=MoveSettings(paused=True)), **fields))
    assert line.endswith(" Moves are paused: 'koinon admin resume' resumes them.")
    assert "paused" not in summary(status_of(**fields))


def test_servers_that_let_everybody_in_are_noted_whoever_asks() -> None:
    """Also while the one who asks comes by TLS."""
    status = status_of()
    open_one = replace(
        status.sessions[0], tls_mode="prefer", open_addresses=("10.0.0.1:7500", "10.0.0.1:6500")
    )
    status = replace(status, sessions=(open_one, *status.sessions[1:]))
    (note,) = notes(status)
    assert "n1 at 10.0.0.1:7500, 10.0.0.1:6500 (--tls prefer)" in note
    (note,) = notes(replace(status_of(), tls_mode="off", open_addresses=("10.0.0.9:7400",)))
    assert "c1 at 10.0.0.9:7400 (--tls off)" in note
    assert not problems(status)


def test_plain_connections_are_noted_where_others_could_reach_the_cluster() -> None:
    reachable = status_of(plain=True)  # host1:1, …
    assert ["there is no access control" in note for note in notes(reachable)] == [True]
    assert not problems(reachable)
    local = [
        with_local(status_of(plain=True), host) for host in ("127.0.0.1", "localhost", "[::1]")
    ]
    assert [notes(status) for status in local] == [[]] * 3
    assert notes(with_local(reachable, "127.example.com")) != []


def with_local(status: ClusterStatus, host: str) -> ClusterStatus:
    table = status.table
    assert table is not None
    for n in (1, 2, 3):
        table = with_node(table, n, address=f"{host}:{n}")
    coordinators = tuple(replace(c, address=f"{host}:9") for c in status.coordinators)
    return replace(status, table=table, coordinators=coordinators)


def test_silent_learner_is_told_apart_from_a_voter_that_has_died() -> None:
    voters = tuple(coordinator(n) for n in (1, 2))
    dead, new = coordinator(3, active=False), coordinator(4, voter=False, active=False)
    status = status_of(coordinators=(*voters, dead, new))
    first, second = problems(status)
    assert first == "coordinator c3 does not answer: start it again"
    assert second.startswith(
        "coordinator c4, which does not vote yet, does not answer: start it at"
    )
    assert "--join" in second
    assert "coordinators remove c4" in second
    assert not any("c4" in note for note in notes(status)), "to add it again does not help"
    alive = status_of(coordinators=(*voters, coordinator(3), coordinator(4, voter=False)))
    assert any("coordinators add c4 c4:1" in note for note in notes(alive))


FLAPPING = {"leader_changes": 7, "terms": 107, "watched_ms": 600_000}


def test_leadership_that_does_not_stay_is_a_problem_that_names_the_terms() -> None:
    seen = ElectionsView(**FLAPPING, quiet_ms=10_000)
    status = status_of(term=117, elections=seen)
    (found,) = problems(status)
    assert "7 changes of the leader in 10 min, from term 10 to 117" in found
    assert "--election-timeout-ms" in found
    assert notes(status) == []
    without_winner = replace(seen, leader_changes=1, terms=12)
    assert problems(status_of(term=20, elections=without_winner))


def test_leadership_that_stays_again_is_a_note() -> None:
    status = status_of(term=117, elections=ElectionsView(**FLAPPING, quiet_ms=180_000))
    assert problems(status) == []
    (note,) = notes(status)
    assert note.endswith("from term 10 to 117: c1 has led for 3 min")
    once = ElectionsView(leader_changes=1, terms=1, watched_ms=90_000, quiet_ms=5_000)
    assert notes(status_of(term=2, elections=once)) == [
        "1 change of the leader in 2 min, from term 1 to 2: c1 has led for 5 s"
    ]


def test_node_far_below_its_share_is_a_note_though_no_other_has_too_much() -> None:
    nodes = [node_of(n) for n in range(1, 11)]
    rows = [row_of(p, NodeNumber(p % 9 + 1)) for p in range(90)]
    rows[0] = row_of(0, NodeNumber(10))
    config = config_of(90, cluster_id="one", replication_factor=1, bootstrap_nodes=3)
    sparse = table_with(rows, nodes, config=config)
    (note,) = notes(status_of(sparse))
    assert "n10 has 1, by its weight 9" in note
    assert "koinon admin rebalance" in note
    for p in range(1, 6):
        rows[p] = row_of(p, NodeNumber(10))
    assert notes(status_of(table_with(rows, nodes, config=config))) == []


def test_summary_is_one_line_of_the_most_urgent_problem_and_its_cure() -> None:
    table = with_node(table_of(), 3, status=NodeStatus.FENCED)
    line = summary(status_of(with_row(table, 5, in_sync=(number(5),), primary=number(5))))
    assert "\n" not in line
    assert line.startswith("Attention: node n3 at host3:1 is down (8 replicas): start it")
    assert line.endswith("(1 more problem)")


def test_lost_store_is_more_urgent_than_what_is_offline_and_both_name_the_cure() -> None:
    table = with_node(table_of(), 3, status=NodeStatus.FENCED)
    lost = {
        "status": PartitionStatus.OFFLINE,
        "primary": NodeNumber(0),
        "offline_reason": OfflineReason.STORE_LOST,
        "in_sync": (),
    }
    alone = {
        "status": PartitionStatus.OFFLINE,
        "primary": NodeNumber(0),
        "offline_reason": OfflineReason.NO_LIVE_REPLICA,
        "in_sync": (number(3),),
    }
    found = problems(status_of(with_row(with_row(table, 4, **lost), 2, **alone)))
    assert found[0].startswith("1 partition lost every in-sync copy")
    assert "force-primary lost" in found[0]
    assert found[1] == "partitions: 1 offline of 12: start n3 again"


def test_lost_store_names_the_replicas_to_be_started_before_anything_is_forced() -> None:
    table = with_node(table_of(), 2, status=NodeStatus.FENCED)
    lost = {
        "status": PartitionStatus.OFFLINE,
        "primary": NodeNumber(0),
        "offline_reason": OfflineReason.STORE_LOST,
        "in_sync": (),
    }
    found = problems(status_of(with_row(table, 4, **lost)))  # of n2 and n3
    assert (
        "start n2, whose copies may be the best left; 'koinon admin force-primary lost" in found[0]
    )


def test_takeover_that_cannot_do_without_a_dead_replica_names_it() -> None:
    table = with_node(table_of(), 3, status=NodeStatus.FENCED)
    table = replace(table, cluster=replace(table.cluster, min_in_sync=2))
    three = (number(5), number(6), number(7))
    status = status_of(with_row(table, 5, status=PartitionStatus.ASSIGNED, replicas=three))
    assert problems(status)[0] == (
        "partitions: 1 starting of 12: fewer copies are in sync than a write needs without n3: "
        "start it again"
    )


def test_read_only_partition_names_the_node_whose_copy_is_in_sync_and_down() -> None:
    table = with_node(table_of(), 3, status=NodeStatus.FENCED)
    (first, *_) = problems(status_of(with_row(table, 5, in_sync=(number(6),), primary=number(6))))
    assert first.startswith("1 partition is read-only")
    assert "n3 is down: 1" in first


def test_no_leader_comes_before_everything() -> None:
    table = with_node(table_of(), 3, status=NodeStatus.FENCED)
    status = status_of(table, is_leader=False, leader_id="", sessions=())
    assert summary(status).startswith("Attention: no coordinator leads, so nothing is served: ")


@pytest.mark.parametrize(
    ("used", "as_problem", "as_note"),
    [(0.79, False, False), (0.81, False, True), (0.949, False, True), (0.96, True, False)],
)
def test_store_that_fills_is_noted_and_one_that_is_full_a_problem(
    used: float, as_problem: bool, as_note: bool
) -> None:
    status = status_of(used=used)
    assert any("store of node n2" in one for one in problems(status)) == as_problem
    assert any("store of node n2" in one for one in notes(status)) == as_note


def test_primaries_elsewhere_than_preferred_are_noted_where_they_could_return() -> None:
    table = with_row(table_of(), 0, primary=number(1))
    table = with_row(table, 1, primary=number(2), in_sync=(number(2),))  # it could not
    (note,) = notes(status_of(table))
    assert note.startswith("1 partition is led by another node than preferred")
    assert "koinon admin primaries" in note


def test_uneven_replicas_are_noted_by_weight_and_only_where_they_could_move() -> None:
    table = table_of()
    for p in range(PARTITIONS):
        if p % 3:
            table = with_row(table, p, replicas=(number(1), number(2)), primary=number(1))
            table = with_row(table, p, in_sync=table.rows[p].replicas)
    (note,) = notes(status_of(table))
    assert note.startswith("replicas lie unevenly (n1 has 12, by its weight 8; ")
    assert "koinon admin rebalance" in note
    moving = with_row(table, 0, adding=(number(2),))
    assert not any("unevenly" in note for note in notes(status_of(moving)))
    by_weight = with_node(with_node(table, 3, weight=10), 1, weight=120)
    assert notes(status_of(by_weight)) == []
    heavy = table_of()  # every node holds all: whatever the weights, nothing can move
    for p in range(PARTITIONS):
        heavy = with_row(heavy, p, replicas=(number(p), number(p + 1), number(p + 2)))
        heavy = with_row(heavy, p, in_sync=heavy.rows[p].replicas)
    assert notes(status_of(with_node(heavy, 3, weight=1000))) == []


@pytest.mark.parametrize(
    ("voters", "said"),
    [(1, "one coordinator alone votes"), (2, "2 coordinators vote, of which 0 may fail"), (3, "")],
)
def test_groups_of_coordinators_that_bear_less_than_they_could_are_noted(
    voters: int, said: str
) -> None:
    found = notes(status_of(coordinators=tuple(coordinator(n + 1) for n in range(voters))))
    assert [note[: len(said)] for note in found] == [said] * bool(said)


def test_coordinator_that_does_not_vote_yet_is_noted() -> None:
    group = (*(coordinator(n) for n in (1, 2, 3)), coordinator(4, voter=False))
    (note,) = notes(status_of(coordinators=group))
    assert "'koinon admin coordinators add c4 c4:1'" in note


def test_loads_are_noted_and_one_that_nobody_touches_with_its_end() -> None:
    table = table_of(
        loads=(ActiveLoad(load_id=7, merging=False), ActiveLoad(load_id=8, merging=True))
    )
    load = LoadView(
        load_id=7,
        job_id="job",
        state=LoadState.OPEN,
        mode=LoadMode.APPEND,
        prefix=b"",
        stream_batch=None,
        description="",
        partitions=0,
        partitions_merged=0,
        rows=1,
        bytes=1,
        idle_ms=20 * 60_000,
        timeout_ms=30 * 60_000,
        reason="",
    )
    found = notes(status_of(table), [load])
    assert found[0].startswith("bulk loads: 1 open, 1 being merged")
    assert "no task has touched load 7 for 20 min" in found[1]
    assert found[1].endswith("without that it ends in 10 min")
    assert len(notes(status_of(table), [replace(load, idle_ms=1000)])) == 1


def test_disk_that_hangs_is_named_first_with_what_nobody_else_can_lead() -> None:
    hung = replace(session(2, 0.1), commit_out_ms=12_300)
    sessions = (session(1, 0.1), hung, session(3, 0.1))
    (problem,) = problems(status_of(sessions=sessions))
    assert problem.startswith(
        "the disk of node n2 has not answered for 12 s, and 4 partitions that no other node can "
        "lead accept no writes: look at the disk; once it answers the node continues by itself"
    )
    table = table_of()
    for p in (2, 5, 8, 11):
        table = with_row(table, p, primary=number(p + 1), in_sync=(number(p + 1),))
    first, *_ = problems(status_of(table, sessions=sessions))
    assert "12 s; other nodes now lead its partitions: look at the disk" in first
    slowly = replace(hung, commit_out_ms=1_400)
    assert problems(status_of(sessions=(slowly,))) == []


@pytest.mark.parametrize(("commit_ms", "named"), [((2, 60, 3), True), ((40, 60, 50), False)])
def test_disk_that_is_many_times_slower_than_others_is_named(
    commit_ms: tuple[int, int, int], named: bool
) -> None:
    sessions = tuple(replace(session(n, 0.1), commit_ms=ms) for n, ms in enumerate(commit_ms, 1))
    found = problems(status_of(sessions=sessions))
    assert [problem.split(":")[0] for problem in found] == ["the disk of node n2 is slow"] * named


def test_disk_that_is_nearly_full_is_named_before_the_copies_that_fall_behind() -> None:
    behind = with_row(table_of(), 5, in_sync=(number(5),))
    full = session(3, 0.1, disk_free=12_000_000)
    found = problems(replace(status_of(behind), sessions=(session(1, 0.1), full)))
    assert [line.split(":")[0] for line in found] == [
        "the disk of node n3 has 12 MB left, and writes to it fail soon or already",
        "1 partition has fewer copies in sync than wanted (n3 is catching up",
    ]


def test_coordinator_whose_disk_is_nearly_full_is_named() -> None:
    ample = status_of(disk_free_bytes=6 << 30, disk_bytes=100 << 30)
    assert problems(ample) == []
    (found,) = problems(replace(ample, disk_free_bytes=12_000_000))
    assert found.startswith("the disk of coordinator c1 has 12 MB left")


def test_moves_that_wait_for_room_are_a_problem_and_a_rebalance_is_not_advised_then() -> None:
    wait = RoomWaitView(
        node_number=2, moves=64, needs_bytes=5_000_000, has_bytes=0, limit="90% of its map"
    )
    room, store = problems(status_of(used=0.96, room_waits=(wait,)))
    assert room.startswith(
        "64 moves wait for room on node n2 (they need 5.0 MB, it has 0.0 MB: 90% of its map): "
        "start it with a greater --map-size-bytes"
    )
    assert "koinon admin cancel" in room
    assert store.startswith("the store of node n2 is 96% full")
    assert "rebalance" not in store


@pytest.mark.parametrize(
    ("ahead_ms", "said"),
    [(499, ""), (-499, ""), (1_500, "is 1.5 s ahead of that of c1"), (-700, "is 0.7 s behind")],
)
def test_clock_that_differs_from_the_leaders_is_named(ahead_ms: int, said: str) -> None:
    sessions = (session(1, 0.1), replace(session(2, 0.1), clock_ahead_ms=ahead_ms))
    found = problems(status_of(sessions=sessions))
    assert len(found) == bool(said)
    assert all(f"the clock of node n2 {said}" in one for one in found)


def test_dead_node_that_holds_nothing_may_be_removed() -> None:
    table = with_node(table_of(), 3, status=NodeStatus.FENCED)
    for p in range(PARTITIONS):
        table = with_row(table, p, replicas=(number(1),), in_sync=(number(1),), primary=number(1))
    (line,) = problems(status_of(table))
    assert line == (
        "node n3 at host3:1 is down and holds nothing: start it, or 'koinon admin remove n3' takes "
        "it out for good"
    )


def test_resource_that_is_nearly_used_up_is_a_problem() -> None:
    scarce = ScarceResource(name="file descriptors", used=1_020, limit=1_024)
    healthy = status_of()
    sessions = tuple(replace(one, scarce=(scarce,)) for one in healthy.sessions[:1])
    found = problems(replace(healthy, sessions=(*sessions, *healthy.sessions[1:])))
    assert len(found) == 1
    assert found[0].startswith("node n1 has used 1,020 of 1,024 file descriptors: find the prog")
