"""A table merges updates in any order, twice or late, and ends the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koinon_proto.contract import convert
from koinon_proto.contract.errors import UnsupportedVersionError, WrongClusterError
from koinon_proto.contract.table import (
    NodeId,
    NodeInfo,
    NodeNumber,
    PartitionRow,
    Table,
    apply_update,
)
from koinon_proto.v1 import table_pb2
from tests.kit.tables import config_of, node_of, row_of

PARTITIONS = 8
CONFIG = config_of(PARTITIONS, cluster_id="c1")


def node(number: int, changed_at: int) -> NodeInfo:
    return node_of(number, node_epoch=changed_at, changed_at=changed_at)


def row(partition: int, changed_at: int) -> PartitionRow:
    member = NodeNumber(1 + partition % 2)
    return row_of(
        partition,
        member,
        primary_epoch=changed_at,
        partition_epoch=changed_at,
        changed_at=changed_at,
    )


def history(changes: list[int]) -> list[Table]:
    """A table before bootstrap, at bootstrap, and after a change of one partition each."""
    empty = Table(cluster=CONFIG, table_version=1, nodes={NodeNumber(1): node(1, 1)}, rows=())
    first = Table(
        cluster=CONFIG,
        table_version=2,
        nodes={NodeNumber(1): node(1, 1), NodeNumber(2): node(2, 2)},
        rows=tuple(row(p, 2) for p in range(PARTITIONS)),
    )
    tables = [empty, first]
    for partition in changes:
        last = tables[-1]
        version = last.table_version + 1
        rows = list(last.rows)
        rows[partition] = row(partition, version)
        tables.append(replace(last, table_version=version, rows=tuple(rows)))
    return tables


@given(
    changes=st.lists(st.integers(0, PARTITIONS - 1), max_size=6),
    deliveries=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30),
)
def test_table_updates_in_any_order_converge_and_never_go_back(
    changes: list[int], deliveries: list[tuple[int, int]]
) -> None:
    tables = history(changes)
    held: Table | None = None
    for at, base in deliveries:
        source = tables[at % len(tables)]
        before = held.table_version if held else 0
        update = source.since(base % (source.table_version + 1))
        by_wire = convert.table_after(held, convert.update_to_proto(update))
        held = apply_update(held, update)
        assert by_wire == held
        if held is not None:
            assert held.table_version >= before
            assert held == tables[held.table_version - 1]
    known = held.table_version if held else 0
    assert apply_update(held, tables[-1].since(known)) == tables[-1]


def test_table_update_of_other_cluster_is_refused() -> None:
    held = history([])[-1]
    foreign = replace(held, cluster=replace(CONFIG, cluster_id="c2"), table_version=99)
    with pytest.raises(WrongClusterError) as caught:
        apply_update(held, foreign.since(0))
    assert caught.value.expected_cluster_id == "c1"
    assert caught.value.actual_cluster_id == "c2"


def test_table_update_that_is_no_news_is_not_decoded_but_of_another_cluster_is_refused() -> None:
    held = history([3])[-1]
    late = convert.update_to_proto(history([3])[0].since(0))
    late.format_version = 9  # it is not looked at
    assert convert.table_after(held, late) is held
    late.cluster.cluster_id = "c2"
    with pytest.raises(WrongClusterError):
        convert.table_after(held, late)


def test_table_update_over_the_wire_is_the_same() -> None:
    update = history([3, 5])[-1].since(2)
    data = convert.update_to_proto(update).SerializeToString()
    assert convert.update_from_proto(table_pb2.TableUpdate.FromString(data)) == update
    assert [r.partition_id for r in update.rows] == [3, 5]


def test_table_update_of_unknown_format_is_refused_by_name() -> None:
    message = convert.update_to_proto(history([])[-1].since(0))
    message.format_version = 9
    with pytest.raises(UnsupportedVersionError, match="partition table has version 9"):
        convert.update_from_proto(message)


def test_table_primary_of_names_the_node() -> None:
    table = history([])[-1]
    primary = table.primary_of(3)
    assert primary is not None
    assert primary.node_id == "n2"
    assert table.by_id[NodeId("n2")] is primary
