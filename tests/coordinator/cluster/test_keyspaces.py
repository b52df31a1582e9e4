"""Keyspaces in the replicated state, and what is decided about them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from koinon_coordinator.core.cluster.commands import (
    AbortLoad,
    AlterKeyspace,
    CreateKeyspace,
    DropKeyspace,
    ForgetKeyspace,
    KeyspaceChanged,
    LoadOutcome,
    OpenLoad,
    Reason,
    SetNodeStatus,
    SetReplicationFactor,
)
from koinon_coordinator.core.cluster.recovery import KEYSPACE_ID_JUMP, image_of, recovered
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_coordinator.core.decide.keyspace_requests import (
    Alteration,
    decide_alteration,
    decide_creation,
    decide_drop,
    decide_forgetting,
)
from koinon_coordinator.core.decide.plan_requests import PlanKind, PlanWish, accepted, plan
from koinon_coordinator.wire.state_codec import image_from_bytes, image_to_bytes
from koinon_proto.contract import convert
from koinon_proto.contract.bulk_loads import LoadMode
from koinon_proto.contract.cluster_errors import KeyspaceChangeError
from koinon_proto.contract.errors import InvalidArgumentError, UnknownKeyspaceError
from koinon_proto.contract.keyspaces import QUOTA_MAX, Keyspace, KeyspaceId, Keyspaces
from koinon_proto.contract.table import (
    MAX_TTL_MS,
    NodeNumber,
    NodeStatus,
    PartitionStatus,
    Table,
    apply_update,
)
from koinon_proto.v1 import table_pb2
from tests.coordinator.kit.states import ample_room, rejected, row_of
from tests.coordinator.kit.support import bootstrapped, fence, host_everything, register

PARTITIONS = 4


def wanted(name: str = "vip", **settings: object) -> Keyspace:
    """Return a keyspace as a request has it: 0 and "" are as usual."""
    given = convert.KEYSPACE.decode(table_pb2.Keyspace(name=name, partition_count=PARTITIONS))
    return replace(given, **settings)  # type: ignore[arg-type]


def with_nodes(nodes: int = 3, pools: dict[int, str] | None = None) -> ClusterState:
    """``default`` has two partitions with two copies each."""
    state = bootstrapped([(1, 2), (2, 1)], nodes=nodes)
    for number, pool in (pools or {}).items():
        command = register(f"n{number}", last=1, known=1, registration="r2")
        state.apply(replace(command, pool=pool))
    host_everything(state)
    return state


def created(state: ClusterState, keyspace: Keyspace) -> Keyspace:
    command = decide_creation(state, keyspace)
    assert isinstance(command, CreateKeyspace)
    result = state.apply(command)
    assert isinstance(result, KeyspaceChanged), result
    found = state.keyspaces.by_id(result.keyspace_id)
    assert found is not None
    host_everything(state)
    return found


def dropped(state: ClusterState, name: str) -> Keyspace:
    found = state.keyspaces.named(name)
    assert isinstance(state.apply(decide_drop(state, name, 0)), KeyspaceChanged)
    return found


def forgotten(state: ClusterState, keyspace: Keyspace) -> None:
    command = decide_forgetting(state, lambda node, keyspace_id: True)
    assert command == ForgetKeyspace(keyspace_id=keyspace.keyspace_id)
    assert isinstance(state.apply(command), KeyspaceChanged)


# --- creation -----------------------------------------------------------------------------------


def test_created_keyspace_has_rows_of_its_own_and_serves() -> None:
    state = with_nodes()
    vip = created(state, wanted(replication_factor=3, min_in_sync=3))
    assert list(vip.partition_ids) == [2, 3, 4, 5]
    assert (vip.partitioner, vip.max_value_bytes) == ("murmur2", 1024)
    rows = [row_of(state, p) for p in vip.partition_ids]
    assert all(sorted(row.replicas) == [1, 2, 3] and row.in_sync == row.replicas for row in rows)
    assert {row.status for row in rows} == {PartitionStatus.ONLINE}
    assert {row.primary for row in rows} == {1, 2, 3}
    assert state.keyspaces.min_in_sync(rows[0]) == 3
    assert state.keyspaces.min_in_sync(row_of(state, 0)) == 1
    default = state.keyspaces.default
    assert [state.keyspaces.of(p) for p in (1, 2, 5, 6)] == [default, vip, vip, None]


def test_creation_that_is_repeated_changes_nothing_and_another_of_the_name_is_refused() -> None:
    state = with_nodes()
    vip = created(state, wanted())
    before = state.image()
    assert decide_creation(state, wanted()) == vip
    with pytest.raises(KeyspaceChangeError, match="there already, with another replication_factor"):
        decide_creation(state, wanted(replication_factor=1))
    asked = replace(vip, keyspace_id=KeyspaceId(0), first_epoch=0)
    late = CreateKeyspace(keyspace=asked, replicas=())
    assert rejected(state.apply(late)) is Reason.KEYSPACE_EXISTS
    assert state.image() == before


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"name": ""}, "must begin with"),
        ({"name": "a/b"}, "must begin with"),
        ({"name": "n" * 65}, "too long"),
        ({"partition_count": 70_000}, "must be from 1 to 65536"),
        ({"partition_count": 3, "partitioner": "crc16"}, "power of two"),
        ({"replication_factor": 8}, "must be from 1 to 7"),
        ({"replication_factor": 2, "min_in_sync": 3}, "must be from 1 to 2"),
        ({"max_value_bytes": 1 << 30}, "must be from 1"),
        ({"pool": "a\x1b"}, "not printable"),
        ({"max_ttl_ms": MAX_TTL_MS + 1}, "max_ttl_ms: must be from 0"),
        ({"default_ttl_ms": MAX_TTL_MS + 1}, "default_ttl_ms: must be from 0"),
        ({"default_ttl_ms": 8, "max_ttl_ms": 7}, "default_ttl_ms: must be from 0 to 7"),
        ({"max_rows_per_s": QUOTA_MAX + 1}, "max_rows_per_s: must be from 0"),
        ({"max_bytes_per_s": QUOTA_MAX + 1}, "max_bytes_per_s: must be from 0"),
    ],
)
def test_creation_of_what_cannot_be_is_refused_by_name(
    settings: dict[str, object], says: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        decide_creation(with_nodes(), wanted(**settings))  # type: ignore[arg-type]


def test_creation_needs_nodes_of_the_pool_and_partitions_in_a_row() -> None:
    state = with_nodes(nodes=4, pools={3: "fast", 4: "fast"})
    with pytest.raises(KeyspaceChangeError, match="there are 2 in pool 'fast'"):
        decide_creation(state, wanted(replication_factor=3, pool="fast"))
    with pytest.raises(KeyspaceChangeError, match="no 65535 of the 65536"):
        decide_creation(state, wanted(partition_count=65_535))
    fast = created(state, wanted(pool="fast", replication_factor=2))
    assert {n for p in fast.partition_ids for n in row_of(state, p).replicas} == {3, 4}


def test_creation_is_checked_again_where_it_is_applied() -> None:
    state = with_nodes()
    command = decide_creation(state, wanted(replication_factor=3))
    assert isinstance(command, CreateKeyspace)
    fence(state, 3)
    assert rejected(state.apply(command)) is Reason.BAD_ASSIGNMENT
    for given in ({"base": 9}, {"first_epoch": 1}):
        bad = replace(command, keyspace=replace(command.keyspace, **given))  # type: ignore[arg-type]
        assert rejected(state.apply(bad)) is Reason.BAD_VALUE
    assert len(state.keyspaces) == 1


# --- alteration ---------------------------------------------------------------------------------


def test_alteration_sets_what_is_given_and_that_of_default_stands_in_the_configuration() -> None:
    state = with_nodes()
    created(state, wanted(replication_factor=3))
    for name in ("vip", "default"):
        command = decide_alteration(state, name, Alteration(max_value_bytes=77))
        assert isinstance(state.apply(command), KeyspaceChanged)
        version = state.table_version
        state.apply(command)
        assert state.table_version == version
        assert state.keyspaces.named(name).max_value_bytes == 77
    assert state.config is not None
    assert state.config.max_value_bytes == 77
    state.apply(decide_alteration(state, "default", Alteration(pool="fast")))
    with pytest.raises(InvalidArgumentError, match="name"):  # "" is no name of ``default`` here
        decide_alteration(state, "", Alteration(pool="x"))
    with pytest.raises(InvalidArgumentError, match="name"):
        decide_drop(state, "", 0)
    assert state.keyspaces.default.pool == "fast"
    with pytest.raises(UnknownKeyspaceError):
        decide_alteration(state, "other", Alteration(pool="x"))


def test_times_to_live_are_altered_one_by_one_and_taken_away_and_come_back_with_the_image() -> None:
    state = with_nodes()
    created(state, wanted(max_ttl_ms=9))
    for name in ("vip", "default"):
        for change in (Alteration(max_ttl_ms=20), Alteration(default_ttl_ms=20)):
            assert isinstance(state.apply(decide_alteration(state, name, change)), KeyspaceChanged)
        altered = state.keyspaces.named(name)
        assert (altered.default_ttl_ms, altered.max_ttl_ms, altered.unnamed_ttl_ms) == (20, 20, 20)
        with pytest.raises(InvalidArgumentError, match="default_ttl_ms: must be from 0 to 19"):
            decide_alteration(state, name, Alteration(max_ttl_ms=19))
        bad = AlterKeyspace(keyspace=replace(altered, max_ttl_ms=19))
        assert rejected(state.apply(bad)) is Reason.BAD_VALUE
        image = state.image()
        assert image_from_bytes(image_to_bytes(image)) == image
        assert ClusterState(image).keyspaces.named(name) == altered
        table = state.table()
        assert table is not None
        update = convert.update_from_proto(convert.update_to_proto(table.since(0)))
        known = apply_update(None, update)
        assert known is not None
        assert known.keyspaces.named(name) == altered
        state.apply(decide_alteration(state, name, Alteration(default_ttl_ms=0)))
        assert state.keyspaces.named(name).unnamed_ttl_ms == 20
        state.apply(decide_alteration(state, name, Alteration(max_ttl_ms=0)))
        assert state.keyspaces.named(name).unnamed_ttl_ms == 0
    with pytest.raises(InvalidArgumentError):
        decide_alteration(state, "vip", Alteration(min_in_sync=4))
    changed = replace(state.keyspaces.named("vip"), partitioner="md5")
    assert rejected(state.apply(AlterKeyspace(keyspace=changed))) is Reason.BAD_VALUE


def test_limits_a_second_are_altered_one_by_one_and_taken_away_and_come_back_with_the_image() -> (
    None
):
    state = with_nodes()
    created(state, wanted(max_rows_per_s=9))
    for name in ("vip", "default"):
        for change in (Alteration(max_rows_per_s=500), Alteration(max_bytes_per_s=QUOTA_MAX)):
            assert isinstance(state.apply(decide_alteration(state, name, change)), KeyspaceChanged)
        altered = state.keyspaces.named(name)
        assert (altered.max_rows_per_s, altered.max_bytes_per_s) == (500, QUOTA_MAX)
        image = state.image()
        assert image_from_bytes(image_to_bytes(image)) == image
        assert ClusterState(image).keyspaces.named(name) == altered
        table = state.table()
        assert table is not None
        update = convert.update_from_proto(convert.update_to_proto(table.since(0)))
        known = apply_update(None, update)
        assert known is not None
        assert known.keyspaces.named(name) == altered
        state.apply(decide_alteration(state, name, Alteration(max_rows_per_s=0)))
        altered = state.keyspaces.named(name)
        assert (altered.max_rows_per_s, altered.max_bytes_per_s) == (0, QUOTA_MAX)


def test_replication_factor_of_one_keyspace_is_planned_and_set_alone() -> None:
    state = with_nodes()
    vip = created(state, wanted(replication_factor=1))
    wish = PlanWish(kind=PlanKind.REPLICATION_FACTOR, replication_factor=3, keyspace="vip")
    moves = plan(state, wish, ample_room(state)).plan.moves
    assert [move.partition_id for move in moves] == list(vip.partition_ids)
    assert all(len(move.target) == 3 for move in moves)
    state.apply(SetReplicationFactor(replication_factor=3, keyspace_id=vip.keyspace_id))
    assert (state.keyspaces.named("vip").min_in_sync, state.keyspaces.default.min_in_sync) == (2, 1)


# --- plans --------------------------------------------------------------------------------------


def test_plans_keep_each_keyspace_even_and_in_its_pool() -> None:
    state = with_nodes(nodes=4, pools={4: "fast"})
    vip = created(state, wanted(partition_count=6, replication_factor=1))
    state.apply(decide_alteration(state, "vip", Alteration(pool="fast")))
    made = plan(state, PlanWish(kind=PlanKind.REBALANCE), ample_room(state)).plan
    of_vip = [move for move in made.moves if move.partition_id in vip.partition_ids]
    assert len(of_vip) == 6
    assert all(move.target == (4,) for move in of_vip)
    assert "pool 'fast'" in of_vip[0].reason
    drained = plan(state, PlanWish(kind=PlanKind.DRAIN, node_id="n1"), ample_room(state)).plan
    assert all(4 not in m.target for m in drained.moves if m.partition_id not in vip.partition_ids)
    assert any("keyspace vip" in refusal.reason for refusal in drained.refusals) or all(
        move.target == (4,) for move in drained.moves if move.partition_id in vip.partition_ids
    )


# --- dropping -----------------------------------------------------------------------------------


def test_dropped_keyspace_is_nobodys_and_its_moves_are_gone() -> None:
    state = with_nodes()
    vip = created(state, wanted(replication_factor=1))
    wish = PlanWish(kind=PlanKind.REPLICATION_FACTOR, replication_factor=2, keyspace="vip")
    for command in accepted("plan", plan(state, wish, ample_room(state)).plan):
        state.apply(command)
    assert state.moves
    dropped(state, "vip")
    assert not state.moves
    assert state.keyspaces.get("vip") is None
    for p in vip.partition_ids:
        row = row_of(state, p)
        assert (row.unused, row.in_sync, row.primary) == (True, (), 0)
    state.apply(DropKeyspace(keyspace_id=vip.keyspace_id))
    assert decide_drop(state, "vip", vip.keyspace_id) == DropKeyspace(keyspace_id=vip.keyspace_id)
    with pytest.raises(UnknownKeyspaceError):
        decide_drop(state, "vip", 0)
    with pytest.raises(KeyspaceChangeError):
        decide_drop(state, "default", 0)
    moves = plan(state, PlanWish(kind=PlanKind.REBALANCE), ample_room(state)).plan.moves
    assert not {move.partition_id for move in moves} & set(vip.partition_ids)


def test_partitions_return_only_when_every_node_has_erased_them_and_at_higher_epochs() -> None:
    state = with_nodes()
    vip = created(state, wanted())
    epochs = {p: row_of(state, p).primary_epoch for p in vip.partition_ids}
    dropped(state, "vip")
    assert decide_forgetting(state, lambda node, _: node != 3) is None
    second = created(state, wanted())
    assert second.keyspace_id != vip.keyspace_id
    assert second.base == vip.partition_ids.stop
    state.apply(SetNodeStatus(node_number=NodeNumber(3), status=NodeStatus.DRAINING))
    forgotten(state, vip)
    third = created(state, wanted("third"))
    assert (third.base, third.keyspace_id) == (vip.base, 3)
    assert all(row_of(state, p).primary_epoch > epochs[p] for p in third.partition_ids)


def test_rows_of_a_keyspace_begin_with_one_epoch_above_all_that_were_there() -> None:
    """So the epoch of a copy tells whether it is of the keyspace."""
    state = with_nodes()
    vip = created(state, wanted(replication_factor=2))
    assert vip.first_epoch == 1
    fence(state, row_of(state, vip.base).primary)
    epochs = [row_of(state, p).primary_epoch for p in vip.partition_ids]
    assert sorted(set(epochs)) == [1, 2]
    dropped(state, "vip")
    forgotten(state, vip)
    more = created(state, wanted("more", partition_count=PARTITIONS + 2))
    assert (more.base, more.first_epoch) == (vip.base, 3)
    assert {row_of(state, p).primary_epoch for p in more.partition_ids} == {3}
    image = state.image()
    assert image_from_bytes(image_to_bytes(image)) == image
    table = state.table()
    assert table is not None
    known = apply_update(None, convert.update_from_proto(convert.update_to_proto(table.since(0))))
    assert known is not None
    assert known.keyspaces.named("more") == more
    assert decide_creation(state, wanted("more", partition_count=PARTITIONS + 2)) == more
    change = decide_alteration(state, "more", Alteration(max_value_bytes=7))
    assert isinstance(state.apply(change), KeyspaceChanged)
    assert state.keyspaces.named("more").first_epoch == 3


def test_keyspace_is_not_dropped_under_a_bulk_load_nor_loaded_once_it_is_gone() -> None:
    state = with_nodes()
    vip = created(state, wanted())
    opening = OpenLoad(job_id="j", mode=LoadMode.OVERWRITE, keyspace_id=vip.keyspace_id)
    opened = state.apply(opening, 7)
    assert isinstance(opened, LoadOutcome)
    (shown,) = state.loads.shown()
    assert shown.keyspace_id == vip.keyspace_id
    drop = DropKeyspace(keyspace_id=vip.keyspace_id)
    assert rejected(state.apply(drop)) is Reason.KEYSPACE_LOADING
    state.apply(AbortLoad(load_id=opened.load_id, reason=""))
    assert isinstance(state.apply(drop), KeyspaceChanged)
    late = replace(opening, job_id="late")
    assert rejected(state.apply(late, 9)) is Reason.KEYSPACE_UNKNOWN


# --- what others see ----------------------------------------------------------------------------


def test_table_grows_and_changes_by_updates_as_by_whole_tables() -> None:
    state = with_nodes()
    tables = [state.table()]
    created(state, wanted())
    tables.append(state.table())
    dropped(state, "vip")
    tables.append(state.table())
    newest = state.table()
    assert newest is not None
    for table in tables:
        assert table is not None
        update = newest.since(table.table_version)
        through = convert.update_from_proto(convert.update_to_proto(update))
        assert apply_update(table, through) == newest
    whole = convert.update_from_proto(convert.update_to_proto(newest.since(0)))
    assert apply_update(None, whole) == newest


def test_image_comes_back_whole_and_recovery_gives_no_id_again() -> None:
    state = with_nodes()
    created(state, wanted())
    dropped(state, "vip")
    kept = created(state, wanted("kept"))
    image = state.image()
    assert image_from_bytes(image_to_bytes(image)) == image
    assert ClusterState(image).image() == image
    table = state.table()
    assert isinstance(table, Table)
    anew = ClusterState(recovered(image_of(table)))
    assert anew.keyspaces.named("kept") == kept
    for node in (1, 2, 3):
        command = register(f"n{node}", last=2, known=1, registration="r9")
        known = anew.node_by_id(f"n{node}")
        assert known is not None
        anew.apply(replace(command, known_node_epoch=known.info.node_epoch))
    assert created(anew, wanted("new")).keyspace_id > KEYSPACE_ID_JUMP
    assert all(row_of(anew, p).unused for p in range(2, 6))


def test_min_in_sync_among_fewer_replicas_is_what_it_was_without_keyspaces() -> None:
    for factor in range(1, 8):
        minimum = (factor + 1) // 2
        keyspace = wanted(replication_factor=factor, min_in_sync=minimum)
        for replicas in range(1, 8):
            before = max(1, min(minimum, (replicas + 1) // 2))
            assert keyspace.min_in_sync_among(replicas) == before


def test_partitions_without_a_keyspace_are_found_first_fit() -> None:
    state = with_nodes()
    config = state.config
    assert config is not None
    first, second = created(state, wanted("a")), created(state, wanted("b"))
    left = replace(state.image().keyspaces, keyspaces=(second,))
    keyspaces = Keyspaces(config, left)
    assert keyspaces.free_base(PARTITIONS, 100) == first.base
    assert keyspaces.free_base(PARTITIONS + 1, 100) == second.partition_ids.stop
    assert keyspaces.free_base(PARTITIONS + 1, second.partition_ids.stop) is None
