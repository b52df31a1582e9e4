"""Registrations of nodes: leases that may be alive, duplicates, and hosts that moved."""

from __future__ import annotations

from dataclasses import replace

import pytest

from koinon_coordinator.core.cluster.commands import AssignPartitions, CreateCluster, SetNodeStatus
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_coordinator.core.decide import registrations
from koinon_coordinator.core.decide.registrations import (
    REDIS_PORTS_MAX,
    Sender,
    check_registration,
    check_sender,
    decide_bootstrap,
    decide_registration,
)
from koinon_coordinator.core.decide.sessions import Sessions
from koinon_proto.contract.cluster_errors import (
    DuplicateNodeError,
    NodeFencedError,
    RegistrationPendingError,
    UnknownNodeError,
)
from koinon_proto.contract.errors import InvalidArgumentError, ResourceExhaustedError
from koinon_proto.contract.table import NodeNumber, NodeStatus, RedisPort
from tests.coordinator.kit.support import (
    TIMING,
    bootstrapped,
    cluster_config,
    fence,
    register,
    request,
)

TIMES = TIMING.session_times()
N1 = NodeNumber(1)


def sessions_of(state: ClusterState, now: float) -> Sessions:
    """A leader that begins now."""
    live = [(r.info.number, r.confirmed) for r in state.live_nodes]
    return Sessions(TIMES, now, live=live)


def beat(sessions: Sessions, now: float) -> None:
    sessions.heard(N1, now)
    assert sessions.acknowledge(N1, now)


def pending_ms(state: ClusterState, sessions: Sessions, now: float, **kwargs: str) -> int:
    with pytest.raises(RegistrationPendingError) as refused:
        decide_registration(state, sessions, request("n1", last=1, **kwargs), now)
    return refused.value.retry_after_ms


def test_registration_restart_waits_out_the_last_acknowledged_lease() -> None:
    state = bootstrapped([(1,)])
    sessions = sessions_of(state, 0.0)
    beat(sessions, 5.0)
    wait_ms = pending_ms(state, sessions, 5.3)
    assert 690 <= wait_ms <= 701
    command = decide_registration(state, sessions, request("n1", last=1), 5.3 + wait_ms / 1000)
    assert command.known_node_epoch == 1


def test_registration_new_leader_waits_out_the_leases_of_earlier_leaders() -> None:
    state = bootstrapped([(1,)])
    sessions = sessions_of(state, 10.0)
    assert 1390 <= pending_ms(state, sessions, 10.0) <= 1401  # check-quorum + lease
    assert decide_registration(state, sessions, request("n1", last=1), 11.41)


def test_registration_of_a_fenced_node_waits_for_nothing() -> None:
    state = bootstrapped([(1,)])
    fence(state, 1)
    assert decide_registration(state, sessions_of(state, 10.0), request("n1", last=1), 10.0)


def test_registration_just_after_the_fence_was_applied_waits_for_nothing() -> None:
    """The state says fenced already, the sessions have not been told yet."""
    state = bootstrapped([(1,)])
    sessions = sessions_of(state, 0.0)
    beat(sessions, 5.0)
    sessions.hold(N1)
    fence(state, 1)
    assert decide_registration(state, sessions, request("n1", last=1), 5.1)


def test_registration_of_an_unconfirmed_epoch_waits_for_nothing() -> None:
    """No lease was ever given under it, and those before it were waited out before it was made."""
    state = bootstrapped([(1,)])
    state.apply(register("n1", last=1, known=1, registration="r2"))
    sessions = sessions_of(state, 10.0)
    assert decide_registration(state, sessions, request("n1", last=1, registration="r2"), 10.0)
    assert decide_registration(state, sessions, request("n1", last=2, registration="r3"), 10.0)


def test_registration_while_a_fence_is_proposed_waits_for_it() -> None:
    state = bootstrapped([(1,)])
    sessions = sessions_of(state, 0.0)
    sessions.hold(N1)
    assert pending_ms(state, sessions, 60.0) == 50


@pytest.mark.parametrize("elsewhere", [{"address": "other:1"}, {"store": "other-store"}])
def test_registration_id_of_a_node_that_lives_is_a_duplicate(elsewhere: dict[str, str]) -> None:
    state = bootstrapped([(1,)])
    before = state.image()
    sessions = sessions_of(state, 0.0)
    beat(sessions, 1.0)
    assert pending_ms(state, sessions, 1.1, **elsewhere) == pytest.approx(300, abs=1)
    beat(sessions, 1.2)
    with pytest.raises(DuplicateNodeError) as refused:
        decide_registration(state, sessions, request("n1", last=1, **elsewhere), 1.4)
    assert refused.value.other_address == "n1:1"
    assert state.image() == before


def test_registration_from_elsewhere_of_a_node_that_died_waits_for_its_session() -> None:
    state = bootstrapped([(1,)])
    sessions = sessions_of(state, 0.0)
    beat(sessions, 1.0)
    now = 1.1
    for _ in range(10):
        if now > sessions.ends_at(N1):
            break
        now += pending_ms(state, sessions, now, address="moved:1") / 1000
    assert now > sessions.ends_at(N1)
    fence(state, 1)
    sessions.close(N1)
    command = decide_registration(state, sessions, request("n1", last=1, address="moved:1"), now)
    assert command.address == "moved:1"


def test_registration_from_elsewhere_at_a_new_leader_is_not_yet_a_duplicate() -> None:
    state = bootstrapped([(1,)])
    sessions = sessions_of(state, 0.0)
    assert pending_ms(state, sessions, 0.1, address="other:1") == pytest.approx(300, abs=1)
    beat(sessions, 0.2)
    with pytest.raises(DuplicateNodeError):
        decide_registration(state, sessions, request("n1", last=1, address="other:1"), 0.4)


def test_registration_another_store_cannot_take_an_epoch_that_waits_for_its_answer() -> None:
    state = bootstrapped([(1,)])
    state.apply(register("n1", last=1, known=1, registration="r2"))
    sessions = sessions_of(state, 0.0)
    assert pending_ms(state, sessions, 0.1, store="empty", registration="r9") == pytest.approx(
        300, abs=1
    )
    moved = request("n1", last=1, registration="r2", address="moved:1")
    assert decide_registration(state, sessions, moved, 0.1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("node_id", ""),
        ("node_id", "a b"),
        ("node_id", "x" * 129),
        ("address", "nowhere"),
        ("address", "h:0"),
        ("address", "h:65536"),
        ("address", "h:²"),
        ("address", ":80"),
        ("store_id", ""),
        ("registration_id", ""),
        ("registration_id", "x" * 129),
        ("node_id", "n\x1b[2J"),
        ("address", "h\x1b[2J:80"),
        ("rack", "r\x1b[2J"),
        ("rack", "\u202egnp"),
        ("store_id", "s\n"),
        ("registration_id", "\x9b2J"),
    ],
)
def test_registration_with_a_bad_field_is_refused_by_its_name(field: str, value: str) -> None:
    good = request("n1")
    values = {name: getattr(good, name) for name in type(good).__slots__}
    with pytest.raises(InvalidArgumentError) as refused:
        check_registration(type(good)(**{**values, field: value}))
    assert refused.value.field == field


@pytest.mark.parametrize("weight", [0, -1, 10_001])
def test_registration_with_a_weight_out_of_bounds_is_refused(weight: int) -> None:
    with pytest.raises(InvalidArgumentError, match="weight"):
        check_registration(replace(request("n1"), weight=weight))


def test_registration_after_more_epochs_than_can_be_is_refused() -> None:
    check_registration(replace(request("n1"), last_node_epoch=1 << 48))
    with pytest.raises(InvalidArgumentError, match="last_node_epoch"):
        check_registration(replace(request("n1"), last_node_epoch=(1 << 48) + 1))


def test_registration_carries_the_nodes_weight_and_a_restart_may_change_it() -> None:
    state = bootstrapped([(1,)])
    fence(state, 1)
    heavier = replace(request("n1", last=1, registration="r2"), weight=300)
    state.apply(decide_registration(state, sessions_of(state, 0.0), heavier, 0.0))
    record = state.node(N1)
    assert record is not None
    assert record.info.weight == 300


def test_registration_carries_where_the_node_speaks_the_redis_protocol() -> None:
    state = bootstrapped([(1,)])
    fence(state, 1)
    again = replace(request("n1", last=1, registration="r2"), redis_address="h:6379")
    state.apply(decide_registration(state, sessions_of(state, 0.0), again, 0.0))
    record = state.node(N1)
    assert record is not None
    assert record.info.redis_address == "h:6379"
    with pytest.raises(InvalidArgumentError, match="redis_address"):
        check_registration(replace(again, redis_address="nowhere"))


def test_registration_carries_where_clients_of_redis_find_other_keyspaces() -> None:
    state = bootstrapped([(1,)])
    fence(state, 1)
    ports = (RedisPort("carts", "h:6381"), RedisPort("vip", "h:6380"))
    again = replace(
        request("n1", last=1, registration="r2"), redis_address="h:6379", redis_ports=ports
    )
    state.apply(decide_registration(state, sessions_of(state, 0.0), again, 0.0))
    record = state.node(N1)
    assert record is not None
    where = [record.info.redis_address_in(name) for name in ("default", "carts", "vip", "none")]
    assert where == ["h:6379", "h:6381", "h:6380", ""]


@pytest.mark.parametrize(
    "ports",
    [
        (RedisPort("default", "h:1"),),
        (RedisPort("vip", "h:1"), RedisPort("vip", "h:2")),
        (RedisPort("VIP", "h:1"),),
        (RedisPort("", "h:1"),),
        (RedisPort("vip", "nowhere"),),
        tuple(RedisPort(f"k{n}", f"h:{n + 1}") for n in range(REDIS_PORTS_MAX + 1)),
    ],
)
def test_registration_with_ports_of_redis_that_make_no_sense_is_refused(
    ports: tuple[RedisPort, ...],
) -> None:
    asked = request("n1", last=1, registration="r2")
    check_registration(replace(asked, redis_ports=(RedisPort("vip", "h:1"),)))
    with pytest.raises(InvalidArgumentError, match="redis_ports"):
        check_registration(replace(asked, redis_ports=ports))


def test_heartbeat_of_an_unknown_or_fenced_epoch_is_told_to_register() -> None:
    def sender(node_id: str, epoch: int, registration: str) -> Sender:
        return Sender(
            cluster_id="", node_id=node_id, node_epoch=epoch, registration_id=registration
        )

    state = bootstrapped([(1,)])
    assert check_sender(state, sender("n1", 1, "r1")).info.number == N1
    with pytest.raises(UnknownNodeError):
        check_sender(state, sender("n9", 1, "r1"))
    state.apply(register("n1", last=1, known=1, registration="r2"))
    for epoch, registration in ((1, "r1"), (2, "r1"), (1, "r2"), (2, "")):
        with pytest.raises(NodeFencedError) as refused:
            check_sender(state, sender("n1", epoch, registration))
        assert refused.value.current_node_epoch == 2
    check_sender(state, sender("n1", 2, "r2"))
    fence(state, 1)
    with pytest.raises(NodeFencedError):
        check_sender(state, sender("n1", 2, "r2"))


def test_bootstrap_waits_for_its_minimum_of_live_nodes_and_assigns_to_all() -> None:
    state = ClusterState()
    state.apply(CreateCluster(config=cluster_config(partitions=4, nodes=2)))
    sessions = Sessions(TIMES, 0.0)
    assert decide_bootstrap(state, sessions, 0.0) is None
    for i in range(3):
        state.apply(register(f"n{i + 1}"))
    sessions.open(NodeNumber(1), 0.0)
    assert decide_bootstrap(state, sessions, 0.1) is None  # two have no session
    sessions.open(NodeNumber(2), 0.0)
    sessions.open(NodeNumber(3), 0.0)
    assert decide_bootstrap(state, sessions, 9.0) is None  # all silent
    command = decide_bootstrap(state, sessions, 0.1)
    rows = tuple((NodeNumber(n),) for n in (1, 2, 3, 1))
    assert command == AssignPartitions(replicas=rows)
    state.apply(command)
    state.apply(register("n4"))
    sessions.open(NodeNumber(4), 0.2)
    assert decide_bootstrap(state, sessions, 0.3) is None  # once, never trickling


def test_bootstrap_leaves_out_a_node_that_is_being_drained() -> None:
    state = ClusterState()
    state.apply(CreateCluster(config=cluster_config(partitions=2, nodes=1)))
    sessions = Sessions(TIMES, 0.0)
    for i in (1, 2):
        state.apply(register(f"n{i}"))
        sessions.open(NodeNumber(i), 0.0)
    state.apply(SetNodeStatus(node_number=N1, status=NodeStatus.DRAINING))
    n2 = NodeNumber(2)
    assert decide_bootstrap(state, sessions, 0.1) == AssignPartitions(replicas=((n2,), (n2,)))


def test_registration_of_one_node_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    state = bootstrapped([(1,)])
    sessions = sessions_of(state, 0.0)
    monkeypatch.setattr(registrations, "NODES_MAX", 1)
    with pytest.raises(ResourceExhaustedError):
        decide_registration(state, sessions, request("n9"), 9.0)
    decide_registration(state, sessions, request("n1", last=1), 9.0)
