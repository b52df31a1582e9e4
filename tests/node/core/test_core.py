"""Leases, records and assignment: the pure rules."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from koinon_node.core.formats import records
from koinon_node.core.membership.assignment import Adoption, Assignment, HostCommand
from koinon_node.core.membership.lease import NO_LEASE, Lease
from koinon_node.membership import agent
from koinon_node.state import NodeState
from koinon_proto.contract.errors import UnsupportedVersionError
from koinon_proto.contract.table import (
    NodeId,
    NodeNumber,
    Table,
    first_sequence,
)
from tests.kit.tables import node_of, row_of, table_with
from tests.proto import records as any_records

ME = NodeNumber(1)
OTHER = NodeNumber(2)


def table_of(*primaries: tuple[NodeNumber, int], version: int = 1, node_epoch: int = 1) -> Table:
    nodes = [
        node_of(ME, node_epoch=node_epoch, changed_at=version),
        node_of(OTHER, changed_at=version),
    ]
    rows = [
        row_of(p, primary, primary_epoch=epoch, partition_epoch=version, changed_at=version)
        for p, (primary, epoch) in enumerate(primaries)
    ]
    return table_with(rows, nodes, version=version)


def led(assignment: Assignment) -> list[int]:
    epochs: list[int] = assignment.served().epochs.tolist()
    return epochs


def test_rule_10_leases_are_measured_by_a_clock_that_runs_through_suspend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def clock_gettime(clock: int) -> float:
        asked.append(clock)
        return 5.0

    monkeypatch.setattr(time, "clock_gettime", clock_gettime)
    state = NodeState("n1")
    state.lease = Lease(node_epoch=1, until_s=5.5)
    assert state.serving()
    assert asked == [time.CLOCK_BOOTTIME]


def test_lease_counts_from_send_time_and_ends_at_its_length() -> None:
    lease = NO_LEASE.renewed(1, sent_at=10.0, lease_s=1.0)
    assert lease.valid(10.99)
    assert not lease.valid(11.0)


def test_lease_late_reply_of_same_epoch_never_shortens_it() -> None:
    lease = NO_LEASE.renewed(1, 10.0, 1.0).renewed(1, 9.5, 1.0)
    assert lease.until_s == 11.0
    assert lease.renewed(2, 9.0, 1.0).until_s == 10.0


def test_assignment_row_names_node_is_led_only_after_adoption() -> None:
    assignment = Assignment(NodeId("n1"), {})
    assignment.on_registered(1)
    adoptions = assignment.on_table(table_of((ME, 1), (OTHER, 1)))
    assert adoptions == (Adoption(0, 1),)
    assert led(assignment) == [0, 0]
    assignment.on_adopted(adoptions)
    assert led(assignment) == [1, 0]
    assert assignment.on_table(table_of((ME, 1), (OTHER, 1), version=2)) == ()


def test_assignment_row_moves_away_is_dropped_at_once() -> None:
    assignment = Assignment(NodeId("n1"), {})
    assignment.on_registered(1)
    assignment.on_adopted(assignment.on_table(table_of((ME, 1))))
    assignment.on_table(table_of((OTHER, 2), version=2))
    assert led(assignment) == [0]


def test_assignment_epoch_bump_stops_serving_until_adopted_again() -> None:
    assignment = Assignment(NodeId("n1"), {})
    assignment.on_registered(1)
    assignment.on_adopted(assignment.on_table(table_of((ME, 1))))
    adoptions = assignment.on_table(table_of((ME, 2), version=2))
    assert led(assignment) == [0]
    assignment.on_adopted(adoptions)
    assert led(assignment) == [2]


@pytest.mark.parametrize("epoch", [2, 3])
def test_assignment_epoch_not_above_the_stores_is_refused(epoch: int) -> None:
    assignment = Assignment(NodeId("n1"), {0: 3})
    assignment.on_registered(1)
    assert assignment.on_table(table_of((ME, epoch))) == ()
    assert assignment.take_refused() == (Adoption(0, epoch),)
    assert led(assignment) == [0]


def test_assignment_fence_drops_all_and_old_epochs_never_return() -> None:
    assignment = Assignment(NodeId("n1"), {})
    assignment.on_registered(1)
    assignment.on_adopted(assignment.on_table(table_of((ME, 1))))
    assignment.on_fenced()
    assert led(assignment) == [0]
    assignment.on_registered(2)
    assert assignment.on_table(table_of((ME, 1), version=2, node_epoch=2)) == ()
    assert led(assignment) == [0]
    adoptions = assignment.on_table(table_of((ME, 2), version=3, node_epoch=2))
    assignment.on_adopted(adoptions)
    assert led(assignment) == [2]


def test_assignment_adoption_that_a_fence_overtook_is_not_led() -> None:
    assignment = Assignment(NodeId("n1"), {})
    assignment.on_registered(1)
    adoptions = assignment.on_table(table_of((ME, 1)))
    assignment.on_fenced()
    assignment.on_adopted(adoptions)
    assert led(assignment) == [0]


def test_assignment_table_of_another_node_epoch_is_not_led() -> None:
    assignment = Assignment(NodeId("n1"), {})
    assignment.on_registered(2)
    assert assignment.on_table(table_of((ME, 1), node_epoch=1)) == ()
    assert assignment.on_table(table_of((ME, 1), version=2, node_epoch=3)) == ()


def test_assignment_command_is_acknowledged_once_hosted() -> None:
    assignment = Assignment(NodeId("n1"), {})
    assignment.on_registered(1)
    adoptions = assignment.on_table(table_of((ME, 1)))
    command = HostCommand(0, 1, 1)
    assignment.on_commands([command])
    assert assignment.acknowledgements() == ()
    assignment.on_adopted(adoptions)
    assert assignment.acknowledgements() == (command,)
    newer = replace_epoch(command, 2)
    assignment.on_commands([newer])
    assignment.on_acknowledged([command])
    assert assignment.acknowledgements() == (newer,)
    assignment.on_acknowledged([newer])
    assert assignment.acknowledgements() == ()


def replace_epoch(command: HostCommand, partition_epoch: int) -> HostCommand:
    return command._replace(partition_epoch=partition_epoch)


def test_assignment_table_without_rows_leads_nothing() -> None:
    assignment = Assignment(NodeId("n1"), {})
    assignment.on_registered(1)
    assert assignment.on_table(replace(table_of((ME, 1)), rows=())) == ()
    assert led(assignment) == []


def test_record_roundtrip_keeps_sequence_expiry_and_value() -> None:
    plain, expiring = records.encode_records(np.array([5, 6], np.uint64), [b"a", b"b"], [0, 99])
    assert records.decode_record(plain) == records.Record(5, 0, 0, b"a")
    decoded = records.decode_record(expiring)
    assert decoded == records.Record(6, records.FLAG_EXPIRES, 99, b"b")
    assert decoded.expired(99)
    assert not decoded.expired(98)
    columns = records.encode_records(np.array([2**63], np.uint64), [b"\x00x\x00"], None)
    assert records.decode_record(columns[0]) == records.Record(2**63, 0, 0, b"\x00x\x00")


def test_record_unknown_flag_is_refused_by_name() -> None:
    record = bytes(8) + b"\x04" + b"value"
    with pytest.raises(UnsupportedVersionError, match="record flags"):
        records.decode_record(record)


def test_partition_metadata_roundtrip_and_unknown_version_is_refused() -> None:
    epochs = records.PartitionEpochs(primary_epoch=1)
    for epoch in range(2, 200):
        epochs = epochs.adopted(epoch, epoch << 40, clean=epoch % 2 == 0)
        assert records.decode_epochs(records.encode_epochs(epochs)) == epochs
    assert len(epochs.history) == records.EPOCH_HISTORY_MAX
    (data,) = records.encode_progress(np.array([7], np.uint64), np.array([3], np.uint64))
    assert records.decode_progress(data) == (7, 3, 0)
    with pytest.raises(UnsupportedVersionError, match="partition metadata"):
        records.decode_progress(b"\x09" + data[1:])


def test_epochs_without_a_write_are_known_back_to_the_last_write() -> None:
    one, two, three = (first_sequence(epoch) for epoch in (1, 2, 3))
    epochs = records.PartitionEpochs(primary_epoch=0).adopted(1, 0, clean=True)
    assert epochs.unchanged_from == 0
    assert epochs.adopted(2, one, clean=True).unchanged_from == 0
    written = epochs.adopted(2, one + 7, clean=True)
    assert written.unchanged_from == one + 7
    assert written.adopted(3, two, clean=True).unchanged_from == one + 7
    assert written.adopted(3, two, clean=True).adopted(4, three, clean=True) == (
        records.PartitionEpochs(
            primary_epoch=4,
            history=((1, 0), (2, one + 7), (3, two), (4, three)),  # type: ignore[arg-type]
            unchanged_from=one + 7,
        )
    )


def test_epoch_that_began_with_a_tail_is_where_the_past_ends() -> None:
    """A copy of before lacks that tail, however few were written since."""
    one, two = first_sequence(1), first_sequence(2)
    epochs = records.PartitionEpochs(primary_epoch=0).adopted(1, 0, clean=True)
    tail = epochs.adopted(2, one, clean=False)
    assert tail.unchanged_from == records.NO_SEQUENCE
    assert tail.adopted(3, two, clean=True).unchanged_from == two


def test_partition_keys_of_columns_match_the_single_ones() -> None:
    ids = np.array([0, 1, 255, 256, 65535], np.uint32)
    assert records.progress_keys(ids) == [records.progress_key(p) for p in ids.tolist()]
    assert records.data_keys(ids, [b"k"] * 5) == [records.head_of(p) + b"k" for p in ids.tolist()]


@given(any_records.records(HostCommand))
def test_assignment_any_host_command_comes_back_whole(command: HostCommand) -> None:
    assert agent._COMMAND.decode(agent._COMMAND.encode(command)) == command
