"""The follower's pure decisions."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from koinon_node.core.formats.records import EpochStart, PartitionEpochs
from koinon_node.core.replication.copies import Copies, CopyState
from koinon_node.core.replication.openings import (
    PULLED_MAX,
    REPORTED_MAX,
    SETTLED_MAX,
    ProgressStage,
    SettledBound,
    choose_openings,
    on_the_way,
    reported,
)
from koinon_node.core.replication.replica_sync import (
    NEXT,
    BadMessageError,
    Fate,
    Followed,
    Opened,
    Rank,
    ReplicaSync,
    Sent,
    Stage,
    Step,
    Want,
    Wanted,
    described,
    first_step,
    retry_delay_s,
)
from koinon_proto.contract.table import NO_NODE, NodeStatus, first_sequence
from tests.node.kit.scripted_primary import ME, P1, P2, a_row, a_table, in_keyspace

E5, E6, E7 = map(first_sequence, (5, 6, 7))


def seen(*epochs: int) -> Copies:
    """Return the copies of a store that has seen these epochs, of the first partitions."""
    through = np.zeros(8, np.uint64)
    through[: len(epochs)] = list(map(first_sequence, epochs))
    known = {p: PartitionEpochs(primary_epoch=epoch) for p, epoch in enumerate(epochs)}
    return Copies(through, np.zeros(8, np.uint64), np.zeros(8, np.uint8), known)


def opened(following: ReplicaSync, answer: Opened, step: Step) -> Followed:
    """Open partition 0 and take the answer."""
    following.want({0: Want(5, 5, Rank.IN_SYNC)})
    following.open(following.partitions[0], Sent(0, CopyState.USABLE, 0), 0.0)
    followed = following.answered(0)
    assert followed is not None
    followed.opened = answer
    followed.received = answer.stream_from
    followed.take(step)
    return followed


# --- whom to follow --------------------------------------------------------------------------


def test_wanted_is_what_the_rows_give_to_others_and_keep_here() -> None:
    rows = [
        a_row(0),
        a_row(1, P2, in_sync=False),
        a_row(2, in_sync=False, adding=(ME,)),
        a_row(3, ME),
        a_row(4, replicas=(P1, P2)),
        a_row(5, NO_NODE),
    ]
    found = Wanted().of(a_table(1, rows), ME, 1, seen())
    assert found == {
        P1: {0: Want(5, 5, Rank.IN_SYNC), 2: Want(5, 5, Rank.ADDING)},
        P2: {1: Want(5, 5, Rank.SETTLED)},
    }


def test_wanted_is_nothing_without_a_current_registration() -> None:
    table = a_table(1, [a_row(0)], node_epoch=3)
    assert Wanted().of(table, ME, 3, seen())
    assert not Wanted().of(table, ME, 4, seen())
    assert not Wanted().of(table, ME, 0, seen())
    fenced = replace(table.nodes[ME], status=NodeStatus.FENCED)
    assert not Wanted().of(replace(table, nodes={**table.nodes, ME: fenced}), ME, 3, seen())


def test_wanted_leaves_out_epochs_below_one_seen() -> None:
    table = a_table(1, [a_row(0, epoch=5)])
    assert Wanted().of(table, ME, 1, seen(*[5] * 6))
    assert not Wanted().of(table, ME, 1, seen(6))


def test_wanted_leaves_out_a_copy_of_the_past_until_it_is_erased() -> None:
    rows = [a_row(0, ME), a_row(1), a_row(2)]
    table = in_keyspace(a_table(1, rows), range(1, 3), first_epoch=5)
    copies, kept = seen(4, 4, 5), Wanted()
    for _ in range(2):
        assert kept.of(table, ME, 1, copies) == {P1: {2: Want(5, 5, Rank.IN_SYNC)}}
    copies.complete_through[1] = 0
    del copies.epochs[1]
    assert set(kept.of(table, ME, 1, copies)[P1]) == {1, 2}


def test_wanted_from_table_to_table_is_what_the_newest_says_alone() -> None:
    rng = random.Random(5)
    kept = Wanted()
    rows = [a_row(p) for p in range(6)]
    for version in range(1, 300):
        p = rng.randrange(6)
        rows[p] = a_row(
            p,
            rng.choice([P1, P2, ME, NO_NODE]),
            epoch=rng.randrange(4, 8),
            in_sync=rng.random() < 0.5,
            replicas=rng.choice([(P1, P2), (ME, P1, P2), (P2, ME)]),
        )
        node_epoch = 1 if rng.random() < 0.9 else 0
        table = a_table(version, list(rows))
        found = kept.of(table, ME, node_epoch, seen(*[5] * 6))
        assert found == Wanted().of(table, ME, node_epoch, seen(*[5] * 6))


# --- what comes first ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("through", "state", "tail_epoch", "common", "stream_from", "expected"),
    [
        (E5 + 9, CopyState.USABLE, 0, E5 + 9, E5 + 9, Step.JOIN),
        (E5 + 9, CopyState.USABLE, 0, E5 + 9, E5 + 12, Step.PULL),
        (E5 + 9, CopyState.USABLE, 0, E5 + 7, E5 + 7, Step.REPAIR),
        (E5 + 9, CopyState.DIRTY_TAIL, 0, E5 + 9, E5 + 9, Step.REPAIR),
        (E5 + 9, CopyState.DIRTY_TAIL, 4, E5 + 9, E5 + 9, Step.REPAIR),
        (E5 + 9, CopyState.DIRTY_TAIL, 5, E5 + 9, E5 + 12, Step.PULL),
        (0, CopyState.USABLE, 0, E5, E5 + 1, Step.PULL),
    ],
)
def test_first_step_repairs_before_it_pulls(
    through: int,
    state: CopyState,
    tail_epoch: int,
    common: int,
    stream_from: int,
    expected: Step,
) -> None:
    followed = Followed(0, Want(5, 5, Rank.IN_SYNC), sent=Sent(through, state, through))
    history = (EpochStart(5, 0),)
    followed.opened = Opened(common_point=common, stream_from=stream_from, history=history)
    assert first_step(followed, tail_epoch) is expected


def test_first_step_common_point_above_what_is_held_is_refused() -> None:
    followed = Followed(0, Want(6, 6, Rank.IN_SYNC), sent=Sent(E5 + 9, CopyState.USABLE, E5 + 9))
    level = Opened(common_point=E6, stream_from=E6, history=(EpochStart(6, E5 + 9),))
    followed.opened = level  # the epoch began right where the copy ends
    assert first_step(followed, 0) is Step.JOIN
    followed.opened = replace(level, history=(EpochStart(6, E5 + 10),))
    with pytest.raises(BadMessageError):
        first_step(followed, 0)


def test_first_step_copy_without_a_write_since_the_primary_parted_is_level() -> None:
    """It has led an epoch that the primary never heard of, and wrote nothing in it."""
    sent = Sent(E6, CopyState.USABLE, E5 + 9)
    followed = Followed(0, Want(7, 7, Rank.IN_SYNC), sent=sent)
    level = Opened(common_point=E7, stream_from=E7, history=(EpochStart(7, E5 + 9),))
    followed.opened = level
    assert first_step(followed, 0) is Step.JOIN
    for history in ((EpochStart(7, E5 + 8),), (EpochStart(7, E6 + 1),)):
        followed.opened = replace(level, history=history)
        with pytest.raises(BadMessageError):
            first_step(followed, 0)


def test_copy_with_a_tail_is_described_as_it_ends() -> None:
    epochs = PartitionEpochs(primary_epoch=6, history=(EpochStart(6, 7),), unchanged_from=7)
    assert described(E6, CopyState.USABLE, epochs).unchanged_from == 7
    assert described(E6, CopyState.DIRTY_TAIL, epochs).unchanged_from == E6
    assert described(E6 + 1, CopyState.USABLE, epochs).unchanged_from == E6 + 1


# --- batches ---------------------------------------------------------------------------------


def test_batch_fates_by_stage() -> None:
    following = ReplicaSync()
    assert following.fate_of(0, 5, E5, E5 + 1)[0] is Fate.IGNORE
    following.want({0: Want(5, 5, Rank.IN_SYNC)})
    assert following.fate_of(0, 5, E5, E5 + 1)[0] is Fate.IGNORE
    followed = opened(following, Opened(stream_from=E5), Step.PULL)
    assert following.fate_of(0, 5, E5, E5 + 1)[0] is Fate.KEEP_BACK
    assert following.fate_of(0, 4, E5 + 1, E5 + 2)[0] is Fate.IGNORE
    assert following.fate_of(0, 6, E5 + 1, E5 + 2)[0] is Fate.IGNORE
    followed.take(Step.JOIN)
    assert following.fate_of(0, 5, E5 + 1, E5 + 3)[0] is Fate.KEEP_BACK
    followed.take(Step.POSITION)
    assert following.fate_of(0, 5, E5 + 3, E5 + 4)[0] is Fate.APPLY
    followed.take(Step.DURABLE)
    assert following.fate_of(0, 5, E5 + 4, E5 + 5)[0] is Fate.APPLY
    assert followed.position == E5 + 5


@pytest.mark.parametrize("previous", [E5 + 1, E5 + 3])
def test_batch_that_does_not_follow_the_one_before_is_a_gap(previous: int) -> None:
    following = ReplicaSync()
    followed = opened(following, Opened(stream_from=E5 + 2), Step.JOIN)
    followed.take(Step.POSITION)
    assert following.fate_of(0, 5, previous, previous + 1)[0] is Fate.GAP
    assert followed.received == E5 + 2


def test_first_batch_of_an_epoch_follows_what_came_before_the_epoch() -> None:
    following = ReplicaSync()
    opened(following, Opened(stream_from=77), Step.JOIN)
    assert following.fate_of(0, 5, E5, E5 + 1)[0] is Fate.KEEP_BACK


def test_kept_back_too_much_is_dropped_and_no_position_follows() -> None:
    following = ReplicaSync()
    followed = opened(following, Opened(stream_from=E5), Step.JOIN)
    for number in range(6):
        if following.fate_of(0, 5, E5 + number, E5 + number + 1)[0] is Fate.KEEP_BACK:
            following.keep_back(followed, [b"\0\0k"], [bytes(1 << 20)])
    assert followed.overflowed
    assert not followed.joined
    assert following.kept_bytes == followed.kept_bytes == 0
    assert following.fate_of(0, 5, E5 + 6, E5 + 7)[0] is Fate.IGNORE


def test_position_waits_for_what_was_pulled() -> None:
    following = ReplicaSync()
    followed = opened(following, Opened(stream_from=E5), Step.PULL)
    followed.pulled(E5 + 3, 1, 10)
    followed.take(Step.JOIN)
    assert not followed.joined
    following.fate_of(0, 5, E5, E5 + 3)
    assert followed.joined


# --- openings --------------------------------------------------------------------------------


def test_partition_is_not_opened_again_before_it_was_answered() -> None:
    following = ReplicaSync()
    following.want({0: Want(5, 5, Rank.IN_SYNC)})
    following.open(following.partitions[0], Sent(0, CopyState.USABLE, 0), 0.0)
    ended, changed = following.want({0: Want(6, 6, Rank.IN_SYNC)})
    assert (ended, len(changed)) == ([], 1)
    following.close(changed[0])
    assert list(following.due(Rank.IN_SYNC, 0.0)) == []
    assert following.answered(0) is None  # to the opening that is over
    assert list(following.due(Rank.IN_SYNC, 0.0)) == changed


def test_row_that_changes_only_who_is_in_sync_ends_nothing() -> None:
    following = ReplicaSync()
    followed = opened(following, Opened(stream_from=E5), Step.JOIN)
    assert following.want({0: Want(5, 6, Rank.SETTLED)}) == ([], [])
    assert followed.stage is Stage.JOINING
    assert followed.want.rank is Rank.SETTLED


def following_of(**ranks: int) -> ReplicaSync:
    """Return a sync with so many waiting partitions of each rank, the most needed last."""
    following = ReplicaSync()
    wants: dict[int, Want] = {}
    for rank in reversed(Rank):
        for _ in range(ranks.get(rank.name, 0)):
            wants[len(wants)] = Want(5, 5, rank)
    following.want(wants)
    return following


def test_openings_go_by_rank_and_within_bounds() -> None:
    following = following_of(ADDING=10, SETTLED=30, IN_SYNC=50)
    chosen = choose_openings(following, {}, 0.0, paused=False)
    assert [f.want.rank for f in chosen[:50]] == [Rank.IN_SYNC] * 50
    assert [f.want.rank for f in chosen[50:]] == [Rank.SETTLED] * PULLED_MAX[Rank.SETTLED]
    chosen = choose_openings(following, {}, 0.0, settled_most=20, paused=False)
    assert len(chosen) == 50 + 20
    chosen = choose_openings(following_of(ADDING=60), {Rank.ADDING: 1}, 0.0, paused=False)
    assert len(chosen) == PULLED_MAX[Rank.ADDING] - 1
    adding = following_of(ADDING=10)
    assert choose_openings(adding, {}, 0.0, paused=True) == []
    assert choose_openings(adding, {Rank.SETTLED: 1}, 0.0, paused=False) == []


def test_opening_that_is_due_later_is_chosen_then_and_once() -> None:
    following = following_of(ADDING=2)
    early, late = following.partitions.values()
    following.close(late, 5.0)
    assert choose_openings(following, {}, 4.9, paused=False) == [early]
    assert following.index.next_due_at == 5.0
    assert choose_openings(following, {}, 5.0, paused=False) == [early, late]
    assert following.index.next_due_at is None
    following.close(late, 6.0)
    following.want({late.partition_id: Want(5, 6, Rank.IN_SYNC)})  # a newer row: at once, alone
    assert choose_openings(following, {}, 5.1, paused=False) == [late]
    assert choose_openings(following, {}, 6.1, paused=False) == [late]


def test_index_counts_what_is_followed_by_rank_and_stage() -> None:
    following = following_of(SETTLED=3)
    first, second, third = following.partitions.values()
    for followed in (first, second):
        following.open(followed, Sent(0, CopyState.USABLE, 0), 0.0)
        following.answered(followed.partition_id)
    first.take(Step.PULL)
    second.take(Step.JOIN)
    assert on_the_way([following]) == {Rank.IN_SYNC: 0, Rank.SETTLED: 2, Rank.ADDING: 0}
    assert list(following.index.joining.values()) == [second]
    following.want({p: Want(5, 6, Rank.ADDING) for p in range(3)})
    assert on_the_way([following])[Rank.ADDING] == 1  # what has only to join counts not
    following.want({})
    assert not any(following.index.counts.values())
    assert not following.index.joining
    assert [f for rank in Rank for f in following.due(rank, 9.0)] == []
    assert third.index is None


def test_many_are_opened_at_once_where_few_have_to_be_pulled() -> None:
    def answered(count: int, step: Step, rank: Rank = Rank.SETTLED) -> None:
        for _ in range(count):
            followed = Followed(0, Want(5, 5, rank))
            followed.open(Sent(0, CopyState.USABLE, 0))
            followed.take(step)
            bound.opened(followed)

    bound = SettledBound()
    at_first = bound.most  # nothing is known yet
    assert at_first == 2 * PULLED_MAX[Rank.SETTLED]
    answered(500, Step.JOIN, Rank.IN_SYNC)
    assert bound.most == at_first
    answered(500, Step.JOIN)
    assert bound.most == SETTLED_MAX
    answered(32, Step.REPLACE)
    assert bound.most < 2 * PULLED_MAX[Rank.SETTLED]
    answered(500, Step.PULL)
    assert bound.most == PULLED_MAX[Rank.SETTLED]


def test_heartbeats_tell_of_what_has_begun_and_of_moves_first() -> None:
    following = following_of(SETTLED=REPORTED_MAX, ADDING=2, IN_SYNC=1)
    waiting = reported(following.partitions.values())
    assert [p.stage for p in waiting] == [ProgressStage.WAITING] * 2  # of the moves
    for followed in following.partitions.values():
        following.open(followed, Sent(0, CopyState.USABLE, 0), 0.0)
        followed.take(Step.JOIN)
    told = reported(following.partitions.values())
    assert len(told) == REPORTED_MAX
    ranks = [following.partitions[one.partition_id].want.rank for one in told]
    assert ranks[:3] == [Rank.ADDING, Rank.ADDING, Rank.SETTLED]
    assert Rank.IN_SYNC not in ranks


def test_every_stage_can_be_closed_and_reached() -> None:
    reached = {Stage.WAITING, *NEXT.values()}
    assert reached == set(Stage)
    assert all((stage, Step.CLOSE) in NEXT for stage in Stage)
    followed = Followed(0, Want(5, 5, Rank.IN_SYNC))
    with pytest.raises(KeyError):
        followed.take(Step.POSITION)


def test_retry_of_a_copy_in_sync_never_waits_long() -> None:
    """A takeover waits for it (rule 4); a copy that only catches up can wait."""
    delays_s = {
        rank: [
            retry_delay_s(Followed(0, Want(5, 5, rank), attempts=attempts))
            for attempts in range(12)
        ]
        for rank in Rank
    }
    assert delays_s[Rank.IN_SYNC][0] == delays_s[Rank.ADDING][0] == 0.02
    assert max(delays_s[Rank.IN_SYNC]) == 0.1
    assert max(delays_s[Rank.SETTLED]) == max(delays_s[Rank.ADDING]) == 1.0
