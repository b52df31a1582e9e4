"""Plans, moves, nodes and verify from the command line, against a coordinator of this process."""

from __future__ import annotations

import json

import pytest
import typer

from koinon.cli.console.units import bytes_per_second, partition_ids
from koinon.operate.unknown_outcomes import EFFECTS
from koinon_proto.contract.table import NodeNumber, NodeStatus, first_sequence
from koinon_proto.v1 import admin_pb2
from tests.cli.conftest import Run, kinds, three
from tests.cli.fake_operator import LOST, FakeOperator

# --- plans --------------------------------------------------------------------------------------


def test_rebalance_dry_run_shows_plan_sizes_and_balance_and_changes_nothing(
    operator: FakeOperator, koinon: Run
) -> None:
    operator.refusals = [
        admin_pb2.PlanRefusal(code="node_down", reason="n3 is down", partition_ids=[5, 6, 7])
    ]
    ended = koinon("rebalance", "--dry-run")
    assert ended.exit_code == 0, ended.output
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert ["n1", "n4", "copy", "2", "21", "21.0", "MB", "because"] in lines
    assert any(line[:3] == ["n3", "n1", "lead"] for line in lines)
    assert "3 moves, 2 new replicas, 21.0 MB to copy" in ended.stdout
    assert "30.0 MB/s a node, assumed" in ended.stdout
    assert "Left undone: n3 is down (partitions 5-7)" in ended.stdout
    assert "ExecutePlanRequest" not in kinds(operator)


def test_plan_json_has_every_move_and_no_question_is_asked(
    operator: FakeOperator, koinon: Run
) -> None:
    answer = json.loads(koinon("rebalance", "--dry-run", "--json").stdout)
    assert answer["executed"] is False
    assert answer["plan_id"] == "plan1"
    assert [m["partition_id"] for m in answer["moves"]] == [0, 1, 2]
    assert answer["moves"][0] == {
        "partition_id": 0,
        "from": ["n1", "n2", "n3"],
        "to": ["n4", "n2", "n3"],
        "reason": "because",
        "records": 10,
        "bytes": 10_000_000,
        "guessed": False,
    }
    assert answer["bytes"] == 21_000_000
    refused = koinon("rebalance", "--json")
    assert refused.exit_code == 2
    assert json.loads(refused.stdout) == {"error": "not carried out: --yes is missing"}
    assert "ExecutePlanRequest" not in kinds(operator)


def test_plan_all_shows_each_partition(koinon: Run) -> None:
    lines = koinon("rebalance", "--dry-run", "--all").stdout.splitlines()
    assert lines[1].split()[:7] == ["0", "n1", "n2", "n3", "n4", "n2", "n3"]


def test_plan_without_a_terminal_is_refused_and_says_why(
    operator: FakeOperator, koinon: Run
) -> None:
    ended = koinon("rebalance")
    assert ended.exit_code == 2
    assert "nobody is there to ask" in ended.stderr
    assert "--yes carries it out without asking, --dry-run only shows it." in ended.stderr
    assert not operator.moves


@pytest.mark.parametrize(("typed", "moves"), [("y\n", 3), ("n\n", 0)])
def test_plan_is_carried_out_as_a_person_says(
    operator: FakeOperator, koinon: Run, typed: str, moves: int
) -> None:
    ended = koinon("rebalance", typed=typed)
    assert len(operator.moves) == moves
    assert ended.exit_code == (0 if moves else 2)
    assert ("moves --watch" in ended.stderr) == bool(moves)


def test_plan_that_went_stale_is_shown_anew_and_asked_again(
    operator: FakeOperator, koinon: Run
) -> None:
    operator.stale_after_plan = 1
    ended = koinon("rebalance", typed="y\ny\n")
    assert ended.exit_code == 0, ended.output
    assert "The cluster has changed since this plan was made" in ended.stderr
    assert ended.stderr.count("Carry this out?") == 2
    executed = [r for r in operator.requests if isinstance(r, admin_pb2.ExecutePlanRequest)]
    assert [request.plan_id for request in executed] == ["plan1", "plan2"]
    assert len(operator.moves) == 3


def test_plan_that_goes_stale_for_ever_ends(operator: FakeOperator, koinon: Run) -> None:
    operator.stale_after_plan = 100
    ended = koinon("rebalance", "--yes")
    assert ended.exit_code == 2
    assert "nothing was moved" in ended.stderr
    answer = json.loads(koinon("rebalance", "--yes", "--json").stdout)
    assert "nothing was moved" in answer["error"]


def test_nothing_to_move_is_said(operator: FakeOperator, koinon: Run) -> None:
    operator.planned = []
    ended = koinon("rebalance")
    assert ended.exit_code == 0
    assert "Nothing to move." in ended.stdout


def test_sizes_of_a_silent_primary_are_guessed_and_marked(
    operator: FakeOperator, koinon: Run
) -> None:
    operator.stop_node(1)
    operator.planned = operator.planned[:1]
    ended = koinon("rebalance", "--dry-run")
    assert "~" in ended.stdout
    assert "about" in ended.stdout


def test_sizes_that_were_counted_before_the_last_writes_are_marked_wherever_they_count(
    operator: FakeOperator, koinon: Run
) -> None:
    for copies in operator.copies.values():
        copies.stale = {1}
    lines = koinon("rebalance", "--dry-run").stdout.splitlines()
    copied = next(line.split() for line in lines if "copy" in line.split())
    assert copied[4:6] == ["~21", "~21.0"]
    receives = next(line.split() for line in lines if line.startswith("n4"))
    assert receives[-2:] == ["~21.0", "MB"]
    assert any("about 21.0 MB to copy" in line for line in lines)
    each = koinon("rebalance", "--dry-run", "--all").stdout.splitlines()
    assert "~" not in each[1]
    assert "~11" in each[2].split()
    moves = json.loads(koinon("rebalance", "--dry-run", "--json").stdout)["moves"]
    assert [move["guessed"] for move in moves] == [False, True, False]


def test_throttle_gives_the_estimate(operator: FakeOperator, koinon: Run) -> None:
    assert koinon("throttle", "1MB").exit_code == 0
    ended = koinon("rebalance", "--dry-run")
    assert "at least 21.0 s (1.0 MB/s a node, the throttle)" in ended.stdout


def test_wait_follows_to_the_end_and_over_a_change_of_leader(
    operator: FakeOperator, koinon: Run
) -> None:
    operator.steps_a_poll = 1
    ended = koinon("rebalance", "--wait", "--yes")
    assert ended.exit_code == 0, ended.output
    assert "3 of 3 moves done, 21.0 MB copied" in ended.stdout
    operator.not_leading = 3
    operator.planned = operator.planned[:1]
    assert koinon("rebalance", "--wait", "--yes").exit_code == 0


def test_wait_tells_moves_that_were_turned_back(operator: FakeOperator, koinon: Run) -> None:
    koinon("rebalance", "--yes")
    operator.step()
    assert koinon("cancel", "0").stdout.startswith("0 queued moves dropped, 1 under way")
    operator.steps_a_poll = 1
    ended = koinon("moves", "--watch")
    assert ended.exit_code == 1
    assert "2 of 3 moves done" in ended.stdout
    assert "1 turned back" in ended.stdout


def test_wait_tells_queued_moves_that_were_dropped(operator: FakeOperator, koinon: Run) -> None:
    operator.steps_a_poll = 1
    operator.drops_queued_at_poll = True
    ended = koinon("rebalance", "--wait", "--yes")
    assert ended.exit_code == 1
    assert "1 of 3 moves done" in ended.stdout
    assert "2 turned back or dropped" in ended.stdout


def test_watch_asks_for_the_sizes_of_what_is_queued(operator: FakeOperator, koinon: Run) -> None:
    assert koinon("rebalance", "--yes").exit_code == 0
    operator.steps_a_poll = 1
    ended = koinon("moves", "--watch")
    assert ended.exit_code == 0, ended.output
    assert "0 B of 21.0 MB" in ended.stderr
    assert "3 of 3 moves done, 21.0 MB copied" in ended.stdout


def test_watch_where_nothing_moves_says_so(koinon: Run) -> None:
    ended = koinon("moves", "--watch")
    assert (ended.exit_code, ended.stdout.strip(), ended.stderr) == (0, "Nothing moves.", "")


def test_watch_for_programs_waits_too(operator: FakeOperator, koinon: Run) -> None:
    koinon("rebalance", "--yes")
    operator.steps_a_poll = 1
    ended = koinon("moves", "--watch", "--json")
    assert ended.exit_code == 0, ended.output
    assert json.loads(ended.stdout)["moves"] == []
    assert ended.stderr == ""


def test_leader_is_asked_where_it_answers_not_where_others_find_it(
    operator: FakeOperator, koinon: Run
) -> None:
    """Its own address may be a name that only containers know."""
    operator.advertised = "coordinator-1.invalid:7400"
    ended = koinon("rebalance", "--dry-run")
    assert ended.exit_code == 0, ended.output
    assert koinon("loads").exit_code == 0


# --- nodes --------------------------------------------------------------------------------------


def test_drain_moves_marks_and_can_be_undone(operator: FakeOperator, koinon: Run) -> None:
    ended = koinon("drain", "n2", "--yes")
    assert ended.exit_code == 0, ended.output
    assert operator.requests[0].kind == admin_pb2.PLAN_KIND_DRAIN
    assert operator.table.nodes[NodeNumber(2)].status is NodeStatus.DRAINING
    assert "koinon admin remove n2" in ended.stderr
    assert koinon("drain", "n2", "--undo").exit_code == 0
    assert operator.table.nodes[NodeNumber(2)].status is NodeStatus.ACTIVE


def test_drain_undo_as_a_dry_run_is_refused_and_undoes_nothing(
    operator: FakeOperator, koinon: Run
) -> None:
    ended = koinon("drain", "n2", "--undo", "--dry-run")
    assert ended.exit_code == 2
    assert "--undo moves nothing" in ended.stderr
    assert operator.requests == []


def test_remove_of_a_node_that_holds_something_is_refused(
    operator: FakeOperator, koinon: Run
) -> None:
    refused = koinon("remove", "n1", "--yes")
    assert refused.exit_code == 2
    assert "8 replicas" in refused.stderr
    assert koinon("remove", "n9", "--yes").exit_code == 1
    assert koinon("remove", "n4").exit_code == 2
    assert koinon("remove", "n4", "--yes").exit_code == 0
    assert operator.table.nodes[NodeNumber(4)].status is NodeStatus.LEFT


def test_replace_and_factor_send_what_was_asked(operator: FakeOperator, koinon: Run) -> None:
    assert koinon("replace", "n1", "n4", "--yes").exit_code == 0
    fewer = koinon("set-replication-factor", "2", "--yes")
    assert fewer.exit_code == 0
    assert "2 copies; writes will need 1 of them in sync" in " ".join(fewer.stdout.split())
    asked = [r.plan for r in operator.requests if isinstance(r, admin_pb2.ExecutePlanRequest)]
    assert (asked[0].node_id, asked[0].with_node_id) == ("n1", "n4")
    assert asked[1].replication_factor == 2
    assert koinon("replace", "n1", "n9", "--yes").exit_code in (0, 1)


def test_settings_of_moves_are_changed_one_by_one(operator: FakeOperator, koinon: Run) -> None:
    koinon("pause")
    koinon("throttle", "50MB")
    koinon("moves-per-node", "8")
    answer = json.loads(koinon("moves", "--json").stdout)
    assert answer == {
        "paused": True,
        "bytes_per_second": 50_000_000,
        "moves_per_node": 8,
        "moves": [],
    }
    assert koinon("resume").stdout == "Moves: 8 moves a node at once, 50.0 MB/s a node.\n"
    assert "3 partitions" in koinon("primaries").stdout


def test_moves_lists_what_is_under_way(operator: FakeOperator, koinon: Run) -> None:
    assert "Nothing moves." in koinon("moves").stdout
    koinon("rebalance", "--yes")
    operator.step()
    operator.moves[0].waits_for = "a replica on n4 is down"
    shown = koinon("moves").stdout
    assert "copying" in shown
    assert "a replica on n4 is down" in shown
    assert "3 moves: 1 under way, 2 queued" in shown
    copies = json.loads(koinon("moves", "--json").stdout)["moves"][0]["copies"]
    assert copies[0]["stage"] == "snapshot"
    answer = json.loads(koinon("cancel", "--json").stdout)
    assert answer == {"dropped": 2, "turned_back": 1}


def test_cancel_of_a_reversed_range_cancels_nothing(operator: FakeOperator, koinon: Run) -> None:
    koinon("rebalance", "--yes")
    ended = koinon("cancel", "5-3")
    assert ended.exit_code == 2
    assert "5-3 ends before it begins" in ended.stderr
    assert "CancelMovesRequest" not in kinds(operator)
    assert len(operator.moves) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ("throttle", "99999999TB"),
        ("moves-per-node", "5000000000"),
        ("set-replication-factor", "5000000000", "--yes"),
        ("loads", "abort", "99999999999999999999", "--yes"),
        ("status", "--timeout", "9" * 400 + "s"),
    ],
)
def test_numbers_that_fit_nowhere_are_wrong_usage(
    operator: FakeOperator, koinon: Run, arguments: tuple[str, ...]
) -> None:
    ended = koinon(*arguments)
    assert (ended.exit_code, type(ended.exception)) == (2, SystemExit)
    assert operator.requests == []


# --- calls without an answer --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("called", "silent", "shown_by"),
    [
        ("rebalance --yes", "ExecutePlanRequest", "koinon admin moves"),
        ("cancel", "CancelMovesRequest", "koinon admin moves"),
        ("pause", "SetMovesRequest", "koinon admin moves"),
        ("drain n1 --undo", "SetNodeStatusRequest", "koinon admin nodes"),
        ("primaries", "RestorePrimariesRequest", "koinon admin status"),
    ],
)
def test_change_without_an_answer_says_what_may_have_changed_and_what_shows_it(
    operator: FakeOperator, koinon: Run, called: str, silent: str, shown_by: str
) -> None:
    operator.silent = {silent}
    ended = koinon(*called.split(), "--timeout", "1s")
    assert ended.exit_code == 3
    assert "may" in ended.stderr
    assert "no answer within 1 s" in ended.stderr
    assert f"'{shown_by}' shows whether it was" in ended.stderr
    assert "write" not in ended.stderr
    assert "key" not in ended.stderr
    repeatable = silent in ("SetMovesRequest", "SetNodeStatusRequest", "RestorePrimariesRequest")
    assert ("repeat" in ended.stderr) == repeatable


@pytest.mark.parametrize(
    ("called", "silent"),
    [("rebalance --dry-run", "PlanRequest"), ("moves", "GetMovesRequest")],
)
def test_question_without_an_answer_says_that_nothing_was_changed(
    operator: FakeOperator, koinon: Run, called: str, silent: str
) -> None:
    operator.silent = {silent}
    ended = koinon(*called.split(), "--timeout", "1s")
    assert ended.exit_code == 3
    assert "no answer within 1 s; nothing was changed" in ended.stderr


@pytest.mark.parametrize("called", ["pause", "cancel", "rebalance --dry-run", "primaries"])
def test_call_that_no_leader_took_says_that_nothing_was_changed(
    operator: FakeOperator, koinon: Run, called: str
) -> None:
    operator.not_leading = 1_000_000
    ended = koinon(*called.split(), "--timeout", "1s")
    assert ended.exit_code == 3
    assert "nothing was changed" in ended.stderr


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


def test_verify_identical_copies(operator: FakeOperator, koinon: Run) -> None:
    ended = koinon("verify")
    assert ended.exit_code == 0, ended.output
    assert ended.stdout == (
        "8 partitions identical in 24 copies, 108 records each; 0 different, 0 not comparable.\n"
    )


def test_verify_names_the_copy_that_differs_and_fails(operator: FakeOperator, koinon: Run) -> None:
    through = first_sequence(1)
    operator.copies[2].copies[3] = (through + 3, 12, 1)
    ended = koinon("verify")
    assert ended.exit_code == 1
    assert "Different: partition 3 on n2: 12 records where the primary has 13 (n1)" in ended.stdout
    answer = json.loads(koinon("verify", "--json", "--partition", "0-3").stdout)
    assert (answer["identical"], answer["different"]) == (3, 1)
    assert answer["partitions"][0]["partition_id"] == 3
    assert koinon("verify", "--partition", "0-2").exit_code == 0
    assert koinon("verify", "--partition", "0-99").exit_code == 2


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


def test_verify_says_what_cannot_be_compared(operator: FakeOperator, koinon: Run) -> None:
    operator.copies[1].not_usable = {1}
    operator.change_row(4, **LOST)
    operator.change_node(2, status=NodeStatus.FENCED)
    operator.copies[3].copies[0] = (5, 1, 1)
    ended = koinon("verify")
    assert ended.exit_code == 0
    assert "its node is down" in ended.stdout
    assert "it has no primary now" in ended.stdout
    assert "0 different, 8 not comparable" in ended.stdout


# --- status -------------------------------------------------------------------------------------


def test_status_says_what_is_wrong_and_what_to_do(operator: FakeOperator, koinon: Run) -> None:
    well = koinon("status")
    assert well.stdout.startswith("All is well.")
    assert "n4 holds nothing yet: 'koinon admin rebalance'" in well.stdout
    operator.change_row(1, in_sync=three(1)[:1])
    operator.change_row(2, **LOST)
    operator.change_node(3, status=NodeStatus.FENCED)
    operator.change_node(4, status=NodeStatus.DRAINING)
    said = " ".join(koinon("status").stdout.split())
    assert said.startswith("Attention: 1 partition lost every in-sync copy with its store (2): ")
    assert "force-primary lost" in said
    assert "node n3" in said
    assert "After 10 min others are given its replicas" in said
    assert "1 partition is read-only" in said
    assert "fewer copies in sync than wanted" in said
    assert "koinon admin remove n4" in said
    answer = json.loads(koinon("status", "--json").stdout)
    assert not answer["ok"]
    assert answer["partitions"]["under_replicated"] == 1
    assert said.startswith(answer["summary"])


def test_status_shows_addresses_and_racks_as_they_are(
    operator: FakeOperator, koinon: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    operator.change_node(1, address="[fd00::1]:7500", rack="[dim]a[/]")
    operator.advertised = "[fd00::9]:7400"
    shown = koinon("status").stdout
    assert "[fd00::1]:7500" in shown
    assert "[dim]a[/]" in shown
    assert "[fd00::9]:7400" in shown


def test_brief_status_is_one_line_and_an_exit_code(operator: FakeOperator, koinon: Run) -> None:
    well = koinon("status", "--brief")
    assert well.exit_code == 0
    assert well.stdout == (
        "All is well. 8 partitions online on 4 nodes; 1 coordinator, c1 leads.\n"
    )
    operator.change_node(3, status=NodeStatus.FENCED)
    ill = koinon("status", "-q")
    assert ill.exit_code == 1
    assert ill.stdout.startswith("Attention: node n3")
    assert ill.stdout.count("\n") == 1
    answer = koinon("status", "--brief", "--json")
    assert answer.exit_code == 1
    assert json.loads(answer.stdout) == {"ok": False, "summary": ill.stdout.strip()}
    assert koinon("status").exit_code == 0


@pytest.mark.parametrize("form", [(), ("--json",), ("--brief",)])
def test_status_without_a_leader_ends_with_1(
    operator: FakeOperator, koinon: Run, form: tuple[str, ...]
) -> None:
    operator.leaderless = True
    ended = koinon("status", *form)
    assert ended.exit_code == 1
    assert "no coordinator leads" in " ".join(ended.stdout.split())


def test_partitions_show_what_is_added_and_removed(operator: FakeOperator, koinon: Run) -> None:
    replicas = (NodeNumber(4), *three(0))
    operator.change_row(0, replicas=replicas, adding=(NodeNumber(4),), removing=(NodeNumber(1),))
    assert "+n4 -n1" in koinon("partitions").stdout
    row = json.loads(koinon("partitions", "--json").stdout.splitlines()[0])
    assert (row["adding"], row["removing"]) == (["n4"], ["n1"])


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
