from __future__ import annotations

from itertools import pairwise
from random import Random

from koinon_coordinator.core.cluster.state import ClusterState
from koinon_coordinator.core.decide.host_commands import HostCommands, HostingTimes
from koinon_proto.contract.table import NodeNumber
from tests.coordinator.kit.support import bootstrapped, fence, hosted_of, register

TIMES = HostingTimes(first_retry_s=0.4, last_retry_s=4.0)
N1 = NodeNumber(1)


def test_host_commands_first_asked_are_all_due_at_once() -> None:
    state = bootstrapped([(1,), (2,), (1,)], nodes=2)
    fence(state, 1)
    state.apply(register("n1", last=1, known=1, registration="r2"))
    hosting = HostCommands(TIMES, Random(1))
    due = hosting.due(N1, state.assigned_to(N1), 0.0)
    assert due == list(hosted_of(state.assigned_to(N1)))
    assert [command.partition_id for command in due] == [0, 2]
    assert hosting.due(N1, state.assigned_to(N1), 0.1) == []


def test_host_commands_unanswered_are_repeated_at_growing_intervals() -> None:
    state = _waiting_state()
    hosting = HostCommands(TIMES, Random(2))
    sent_at = [
        step / 100 for step in range(3000) if hosting.due(N1, state.assigned_to(N1), step / 100)
    ]
    gaps = [b - a for a, b in pairwise(sent_at)]
    assert all(0.29 <= gap <= 5.02 for gap in gaps)
    assert gaps[0] < 0.6
    assert gaps[1] > gaps[0]
    assert min(gaps[5:]) > 2.9


def test_host_commands_acknowledged_give_the_log_time_first() -> None:
    state = _waiting_state()
    hosting = HostCommands(TIMES, Random(3))
    due = hosting.due(N1, state.assigned_to(N1), 0.0)
    hosting.acknowledged(N1, due, 0.1)
    assert hosting.due(N1, state.assigned_to(N1), 4.0) == []
    assert hosting.due(N1, state.assigned_to(N1), 4.2) == due  # it never was committed


def test_host_commands_new_epochs_are_due_at_once() -> None:
    state = _waiting_state()
    hosting = HostCommands(TIMES, Random(4))
    first = hosting.due(N1, state.assigned_to(N1), 0.0)
    state.apply(register("n1", last=2, known=2, registration="r3"))
    second = hosting.due(N1, state.assigned_to(N1), 0.01)
    assert [c.partition_id for c in second] == [c.partition_id for c in first]
    assert all(b.primary_epoch == a.primary_epoch + 1 for a, b in zip(first, second, strict=True))


def test_host_commands_nothing_assigned_forgets_the_node() -> None:
    state = _waiting_state()
    hosting = HostCommands(TIMES, Random(5))
    first = hosting.due(N1, state.assigned_to(N1), 0.0)
    assert hosting.due(N1, (), 0.1) == []
    assert hosting.due(N1, state.assigned_to(N1), 0.2) == first


def _waiting_state() -> ClusterState:
    state = bootstrapped([(1,), (1,)], nodes=1)
    state.apply(register("n1", last=1, known=1, registration="r2"))
    return state
