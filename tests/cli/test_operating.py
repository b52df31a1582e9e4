"""Plans, moves, nodes and verify from the command line, against a coordinator of this process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import typer

from koinon.cli.console.units import bytes_per_second, partition_ids
from koinon.operate.judge.plan_costs import Costed
from koinon.operate.plans import Plan, PlannedMove
from koinon.operate.replicas import PartitionSize
from koinon.operate.unknown_outcomes import EFFECTS
from koinon_proto.contract.table import MoveSettings
from koinon_proto.v1 import admin_pb2
from tests.cli.conftest import Run
from tests.cli.fake_operator import FakeOperator

# --- plans --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moves", "at_once", "size", "seconds"),
    [
        (768, 64, 100, 3.6),  # 12 turns at n4, which receives nothing to speak of
        (768, 8, 100, 28.8),
        (2, 64, 300_000_000, 0.3 + 20),
        (0, 64, 0, 0.3),  # only who leads is changed
    ],
)
def test_estimate_has_the_turns_of_the_busiest_node_and_its_bytes(
    operator: FakeOperator, moves: int, at_once: int, size: int, seconds: float
) -> None:
    made = [
        PlannedMove(partition_id=p, origin=(1, 2, 3), target=(4, 2, 3), reason="")
        for p in range(moves)
    ]
    led = [PlannedMove(partition_id=moves, origin=(1, 2, 3), target=(2, 1, 3), reason="")]
    plan = Plan(
        plan_id="p",
        table_version=1,
        moves=(*made, *led),
        before=(),
        after=(),
        refusals=(),
    )
    settings = MoveSettings(moves_per_node=at_once)
    sizes = dict.fromkeys(range(moves), PartitionSize(records=1, bytes=size))
    costed = Costed(plan=plan, table=replace(operator.table, moves=settings), sizes=sizes)
    assert costed.seconds()[0] == pytest.approx(seconds, abs=0.01)


def test_leader_is_asked_where_it_answers_not_where_others_find_it(
    operator: FakeOperator, koinon: Run
) -> None:
    """Its own address may be a name that only containers know."""
    operator.advertised = "coordinator-1.invalid:7400"
    ended = koinon("rebalance", "--dry-run")
    assert ended.exit_code == 0, ended.output
    assert koinon("loads").exit_code == 0


# --- nodes --------------------------------------------------------------------------------------


def test_replace_and_factor_send_what_was_asked(operator: FakeOperator, koinon: Run) -> None:
    assert koinon("replace", "n1", "n4", "--yes").exit_code == 0
    fewer = koinon("set-replication-factor", "2", "--yes")
    assert fewer.exit_code == 0
    assert "2 copies; writes will need 1 of them in sync" in " ".join(fewer.stdout.split())
    asked = [r.plan for r in operator.requests if isinstance(r, admin_pb2.ExecutePlanRequest)]
    assert (asked[0].node_id, asked[0].with_node_id) == ("n1", "n4")
    assert asked[1].replication_factor == 2
    assert koinon("replace", "n1", "n9", "--yes").exit_code in (0, 1)


# --- calls without an answer --------------------------------------------------------------------


def test_plan_of_unknown_fate_stays_so_where_moves_cannot_be_asked_for(
    operator: FakeOperator, koinon: Run
) -> None:
    operator.silent = {"ExecutePlanRequest", "GetMovesRequest"}
    ended = koinon("rebalance", "--yes", "--timeout", "1s")
    assert ended.exit_code == 3
    assert "the moves of the plan may have been queued" in ended.stderr
    assert "nothing was changed" not in ended.stderr


def test_every_change_of_the_service_says_what_it_may_have_done() -> None:
    service = admin_pb2.DESCRIPTOR.services_by_name["Admin"]
    questions = {"GetStatus", "PlanMoves", "GetMoves", "GetAccess"}
    assert {method.name for method in service.methods} - questions <= set(EFFECTS)


# --- verify -------------------------------------------------------------------------------------


def test_verify_waits_for_positions_to_meet(operator: FakeOperator, koinon: Run) -> None:
    """The follower is behind, twice; then it has what the primary has."""
    looks = 0
    now = operator.copies[2].copies[0]

    def catch_up() -> None:
        nonlocal looks
        looks += 1
        operator.copies[2].copies[0] = now if looks > 2 else (now[0] - 1, 9, 5)

    operator.copies[2].on_checksums = catch_up
    ended = koinon("verify", "--partition", "0")
    assert ended.exit_code == 0
    assert "1 partition identical" in ended.stdout


# --- status -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rate"),
    [("50MB", 50_000_000), ("1GiB", 1 << 30), ("0", 0), ("off", 0), ("1.5k", 1500), ("7", 7)],
)
def test_rates_are_read_as_people_write_them(text: str, rate: int) -> None:
    assert bytes_per_second(text) == rate


@pytest.mark.parametrize("text", ["", "fast", "-1", "5XB", "0.1", "99999999TB", "9" * 400])
def test_rates_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        bytes_per_second(text)


def test_partition_lists_are_read() -> None:
    assert partition_ids("3") == [3]
    assert partition_ids("7,0-2") == [0, 1, 2, 7]
    assert partition_ids("5-5") == [5]
    for text in ("", "a", "1-", "-1", "1-x", "0-99999999", "5-3", "7,5-3", "9" * 5000):
        with pytest.raises(typer.BadParameter):
            partition_ids(text)
