"""Tests of the progress of moves, as one view after the other shows it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from koinon.cli.operate.move_control import line
from koinon.operate.judge.moves_progress import MovesTracker
from koinon.operate.plans import CopyProgress, MovesView, MoveView, Plan, PlannedMove, Stage
from koinon.operate.replicas import PartitionSize
from koinon_proto.contract.errors import UnavailableError
from koinon_proto.contract.table import MoveSettings

MOVES = tuple(
    PlannedMove(partition_id=p, origin=(1, 2), target=(3 + p % 2, 2), reason="") for p in range(4)
)
PLAN = Plan(plan_id="a", table_version=1, moves=MOVES, before=(), after=(), refusals=())
SIZES = {p: PartitionSize(records=10, bytes=1_000) for p in range(4)}


def view(
    *moves: PlannedMove,
    running: int = 0,
    received: int = 0,
    cancelled: bool = False,
    plan_id: str = "a",
    waits_for: str = "",
) -> MovesView:
    """Return a view of these moves; the first ``running`` have received so many bytes each."""
    return MovesView(
        settings=MoveSettings(),
        moves=tuple(
            MoveView(
                move=move,
                plan_id=plan_id,
                plan_moves=4,
                running=at < running,
                cancelled=cancelled,
                progress=tuple(
                    CopyProgress(
                        node_number=number,
                        stage=Stage.SNAPSHOT,
                        records=0,
                        bytes=received,
                        records_total=0,
                        bytes_total=1_000,
                    )
                    for number in (move.added if at < running else ())
                ),
                waits_for=waits_for,
            )
            for at, move in enumerate(moves)
        ),
    )


def test_tracker_counts_what_disappears_as_done_and_tells_the_rate() -> None:
    tracker = MovesTracker(plan=PLAN, sizes=SIZES)
    first = tracker.update(view(*MOVES), 10.0)
    assert (first.done, first.moves, first.queued, first.seconds_left) == (0, 4, 4, None)
    assert first.whole.bytes_total == 4_000
    assert "0 B of 4.0 kB" in line(first)
    assert "/s" not in line(first), "the rate is not known yet"
    second = tracker.update(view(*MOVES[1:], running=1, received=500), 11.0)
    assert (second.done, second.running, second.queued) == (1, 1, 2)
    assert second.whole.bytes == 1_500
    assert second.bytes_per_second == pytest.approx(1_500)
    assert "1.5 kB of 4.0 kB at 1.5 kB/s" in line(second)
    assert second.seconds_left == pytest.approx(2_500 / 1_500)
    assert (second.nodes[3].copies_done, second.nodes[4].copies_done) == (1, 0)
    last = tracker.update(view(), 12.0)
    assert last.ended
    assert (last.done, last.whole.bytes, last.whole.copies_done) == (4, 4_000, 4)


def test_tracker_time_left_counts_what_is_queued_and_is_not_known_without_its_size() -> None:
    tracker = MovesTracker(sizes=(sizes := dict(SIZES)))
    tracker.update(view(*MOVES, running=1), 10.0)
    seen = tracker.update(view(*MOVES, running=1, received=500), 11.0)
    assert seen.seconds_left == pytest.approx(3_500 / 500)
    later = PlannedMove(partition_id=9, origin=(1, 2), target=(3, 2), reason="")
    unsized = tracker.update(view(*MOVES, later, running=1, received=800), 12.0)
    assert unsized.seconds_left is None
    sizes[8] = PartitionSize(records=1, bytes=100, guessed=True)
    tracker = MovesTracker(sizes=sizes)
    last = PlannedMove(partition_id=8, origin=(1, 2), target=(3, 2), reason="")
    tracker.update(view(MOVES[0], last, running=1), 10.0)
    guessed = tracker.update(view(MOVES[0], last, running=1, received=500), 11.0)
    assert guessed.seconds_left == pytest.approx(600 / 500)
    assert guessed.guessed
    assert "of ~1.1 kB" in line(guessed)
    assert "about 1.2 s left" in line(guessed)


def test_tracker_time_left_of_paused_moves_is_not_known() -> None:
    tracker = MovesTracker(plan=PLAN, sizes=SIZES)
    tracker.update(view(*MOVES, running=1), 10.0)
    halted = replace(view(*MOVES, running=1, received=500), settings=MoveSettings(paused=True))
    assert tracker.update(halted, 11.0).seconds_left is None


def test_tracker_moves_of_other_plans_do_not_count() -> None:
    tracker = MovesTracker(plan=PLAN, sizes=SIZES)
    snapshot = tracker.update(view(*MOVES, plan_id="b"), 1.0)
    assert snapshot.done == 4
    assert snapshot.ended


def test_tracker_without_a_plan_counts_what_was_done_before_it_looked() -> None:
    tracker = MovesTracker()
    snapshot = tracker.update(view(*MOVES[2:], running=1, waits_for="n3 is down"), 1.0)
    assert (snapshot.moves, snapshot.done) == (4, 2)
    assert snapshot.waits_for == {"n3 is down": 1}
    assert tracker.update(view(), 2.0).done == 4


def test_tracker_turned_back_moves_are_not_done() -> None:
    tracker = MovesTracker(plan=PLAN, sizes=SIZES)
    tracker.update(view(*MOVES), 1.0)
    tracker.update(view(*MOVES[:2], running=2, cancelled=True), 2.0)
    last = tracker.update(view(), 3.0)
    assert (last.done, last.turned_back) == (2, 2)
    assert last.whole.copies_done == 2


def test_tracker_moves_that_went_without_coming_to_their_targets_are_not_done() -> None:
    replicas: dict[int, tuple[int, ...]] = dict.fromkeys(range(4), (1, 2))
    tracker = MovesTracker(plan=PLAN, sizes=SIZES)
    tracker.update(view(*MOVES, running=1), 1.0, lambda: replicas)
    replicas[0] = MOVES[0].target
    last = tracker.update(view(MOVES[3]), 2.0, lambda: replicas)
    assert (last.done, last.turned_back, last.queued) == (1, 2, 1)
    assert last.whole.copies_done == 1


def test_tracker_move_is_done_though_another_one_has_begun_where_it_ended() -> None:
    tracker = MovesTracker(plan=PLAN, sizes=SIZES)
    tracker.update(view(MOVES[0]), 1.0)
    later = PlannedMove(partition_id=0, origin=MOVES[0].target, target=(5, 2), reason="")
    last = tracker.update(view(later, running=1, plan_id="b"), 2.0, lambda: {0: (5, 2, 3)})
    assert (last.done, last.turned_back) == (4, 0)


def test_tracker_that_cannot_learn_what_became_of_a_move_takes_the_view_again() -> None:
    def silent() -> dict[int, tuple[int, ...]]:
        raise UnavailableError(reason="no coordinator leads")

    tracker = MovesTracker(plan=PLAN, sizes=SIZES)
    with pytest.raises(UnavailableError):
        tracker.update(view(), 1.0, silent)
    last = tracker.update(view(), 2.0, lambda: dict.fromkeys(range(4), (1, 2)))
    assert (last.done, last.turned_back) == (0, 4)


def test_tracker_received_bytes_never_go_back() -> None:
    """A new leader does not know the progress until nodes tell it."""
    tracker = MovesTracker(plan=PLAN, sizes=SIZES)
    tracker.update(view(*MOVES, running=4, received=700), 1.0)
    again = tracker.update(view(*MOVES, running=4, received=0), 2.0)
    assert again.whole.bytes == 2_800
    assert again.bytes_per_second == 0
    assert again.seconds_left is None
