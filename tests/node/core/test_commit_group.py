"""The life of a commit group: forward only, each way in which it is cut short, what it holds."""

from __future__ import annotations

import asyncio
import gc
import itertools
from pathlib import Path

import numpy as np
import pytest

from koinon_node.core.writes.commit_group import NEXT, CommitGroup, GroupEvent, GroupState, Ticket
from koinon_node.core.writes.pending_writes import PendingWrites
from koinon_proto.contract.errors import (
    KoinonError,
    StorageFullError,
    UnavailableError,
    UnknownFateError,
)
from koinon_proto.contract.table import first_sequence
from tests.node.kit.groups import Ending, add, join, make_durable
from tests.node.kit.held_writer import EPOCH, Bench, settle, with_engine

P0, P1 = np.array([0], np.uint32), np.array([1], np.uint32)
HANDED_OVER = np.array([True, False])  # partition 0 is
ERROR = UnavailableError(reason="handed over")


def how(ticket: Ticket) -> str | type[BaseException]:
    assert isinstance(ticket.durable, Ending)
    ended = ticket.durable.how
    return type(ended) if isinstance(ended, BaseException) else ended


def own(pending: PendingWrites, after: int = 0) -> Ticket:
    """Queue the node's own work."""
    return join(pending, Ticket(durable=Ending(), after=after))


def primarys(pending: PendingWrites, touched: np.ndarray, after: int = 0) -> Ticket:
    """Queue a write of one key in one partition."""
    p = int(touched[0])
    lasts = np.array([1], np.uint64)
    return add(pending, {b"%dkey" % p: b"r"}, touched=touched, lasts=lasts, after=after)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(GroupState, GroupEvent)))
def test_group_takes_what_the_table_has_and_nothing_else(
    state: GroupState, event: GroupEvent
) -> None:
    group = CommitGroup(1, state)
    if (state, event) in NEXT:
        group.take(event)
        assert group.state is NEXT[state, event]
        assert group.state.value > state.value  # forward only
    else:
        with pytest.raises(KeyError):
            group.take(event)
        assert group.state is state


def test_group_goes_from_open_to_complete_and_counts_until_then() -> None:
    pending = PendingWrites("n1")
    primarys(pending, P0)
    own(pending)
    group = pending.seal()
    assert (group.state, pending.open.state) == (GroupState.SEALED, GroupState.OPEN)
    assert (pending.rows, pending.size) == (2, 2)
    assert pending.sealed
    assert pending.hand_over(5.0) is group
    assert not pending.sealed
    assert (group.state, group.sent_at) == (GroupState.OUT, 5.0)
    assert pending.made_durable(6.0) is group
    assert (group.state, group.committed_at) == (GroupState.DURABLE, 6.0)
    assert (pending.rows, pending.size) == (1, 1)  # of the primary's ticket
    assert pending.durable() == [group]
    ending = Ending()
    group.waiting.append((P0, ending))
    pending.complete(group)
    assert group.state is GroupState.COMPLETE
    assert ending.how == "done"
    assert (pending.rows, pending.size, pending.durable()) == (0, 0, [])
    with pytest.raises(KeyError):
        pending.complete(group)


def test_groups_are_handed_over_in_order_and_completed_in_any() -> None:
    pending = PendingWrites("n1")
    groups = []
    for _ in range(3):
        primarys(pending, P0)
        groups.append(pending.seal())
    assert [make_durable(pending) for _ in range(3)] == groups
    for group in (groups[1], groups[2], groups[0]):
        pending.complete(group)
    assert list(pending) == [pending.open]


def test_queued_tickets_are_refused_with_what_builds_on_them_and_what_is_out_goes_on() -> None:
    pending = PendingWrites("n1")
    out = primarys(pending, P0)
    pending.seal()
    pending.hand_over(0.0)
    refused, kept = primarys(pending, P0), primarys(pending, P1)
    sealed = pending.seal()
    building = own(pending, after=sealed.number)
    pending.refuse_queued(HANDED_OVER, ERROR)
    assert (out.failed, kept.failed) == (None, None)
    assert refused.failed is ERROR
    assert isinstance(building.failed, StorageFullError)
    assert sealed.records == {b"1key": b"r"}
    assert sealed.frame()[2] == [(0, 0, ()), (0, 0, ())]
    assert sealed.sequences()[0].tolist() == [0, 1]  # of both: no gap is left
    assert {how(ticket) for ticket in (out, refused, kept, building)} == {""}  # not told yet


@pytest.mark.parametrize("is_primarys", [True, False])
def test_ticket_that_builds_on_a_refused_one_is_refused_on_the_spot(is_primarys: bool) -> None:
    pending = PendingWrites("n1")
    primarys(pending, P0)
    pending.refuse_queued(HANDED_OVER, ERROR)
    number = pending.open.number
    late = primarys(pending, P1, after=number) if is_primarys else own(pending, after=number)
    assert how(late) is StorageFullError
    assert (late.group is pending.open) is is_primarys  # by its sequences alone
    assert pending.open.records == {}
    assert (pending.rows, pending.size) == (1, 1)


def test_disk_that_hangs_ends_what_waits_for_what_is_handed_over_elsewhere() -> None:
    pending = PendingWrites("n1")
    out, out_kept, out_own = primarys(pending, P0), primarys(pending, P1), own(pending)
    group = pending.seal()
    pending.hand_over(0.0)
    queued, queued_kept = primarys(pending, P0), primarys(pending, P1)
    stored = group.stored = Ending()
    pending.give_up(HANDED_OVER, ERROR)
    assert how(out) is UnknownFateError
    assert how(queued) is UnavailableError
    assert how(out_kept) == how(out_own) == how(queued_kept) == ""
    assert stored.how is ERROR
    assert group.state is GroupState.OUT  # it goes on when the disk answers


def test_writer_that_ends_loses_what_is_not_durable_and_tells_all_that_wait() -> None:
    pending = PendingWrites("n1")
    tickets = [primarys(pending, P0)]
    durable = pending.seal()
    make_durable(pending)
    ending = Ending()
    durable.waiting.append((P0, ending))
    for _ in range(2):
        tickets.append(primarys(pending, P0))
        pending.seal()
    pending.hand_over(0.0)
    tickets.append(own(pending))
    pending.lose("the writer process ended")
    assert isinstance(ending.how, UnknownFateError)
    assert [how(ticket) for ticket in tickets[1:]] == [UnknownFateError] * 3
    states = [group.state for group in pending]
    assert states == [GroupState.DURABLE, *[GroupState.LOST] * 3]
    pending.complete(durable)  # followers may still say that they have it


def test_error_that_comes_twice_is_told_once() -> None:
    pending = PendingWrites("n1")
    ticket = primarys(pending, P0)
    first: KoinonError = UnknownFateError(reason="first")
    ticket.end(first)
    ticket.end(None)
    assert isinstance(ticket.durable, Ending)
    assert ticket.durable.how is first


def test_groups_that_looked_at_one_another_do_not_keep_each_other(tmp_path: Path) -> None:
    """Each write is decided upon the one before it, which is on its way, and never ends that."""

    async def use(bench: Bench) -> None:
        bench.channel.held = True
        gc.collect()
        of_others = sum(type(one) is CommitGroup for one in gc.get_objects())
        version = first_sequence(EPOCH)
        before = asyncio.create_task(bench.put(b"k"))
        await settle(before)
        for _ in range(20):
            version += 1
            after = asyncio.create_task(bench.put(b"k", if_version=version))
            await settle(after)
            bench.channel.commit_one()
            await before
            before = after
        gc.collect()
        alive = [one for one in gc.get_objects() if type(one) is CommitGroup]
        assert (
            len(alive) - of_others <= len(list(bench.pending)) + 1
        )  # and the one that the last looked at
        bench.channel.release()
        await before

    with_engine(tmp_path, use)
