"""Tracks commit groups from their hand-over to completion, by the answers of disk and followers.

A group is sent to followers when it is handed over to the disk here, so that followers commit
concurrently. It is complete when it is durable here and on every required follower
(core/replication/replica_tracker.py). Until then its records are pending: reads of its keys wait,
and its rows count against the bounds. A group without required followers is complete once it is
durable here.

Groups complete in any order, except that groups of one partition complete in order: so a partition
that has lost its followers does not delay the others.

The writer calls ``on_handed_over`` and ``on_durable``; the code that handles followers' messages,
new tables and ticks calls ``advance``. This module calls none of them.

All methods belong to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import numpy as np

from koinon_node.core.formats import records
from koinon_node.core.formats.records import U32Array, U64Array
from koinon_node.core.membership.assignment import Adoption
from koinon_node.core.replication.in_sync_and_hand_over import Proposals
from koinon_node.core.replication.replica_tracker import ReplicaTracker
from koinon_node.core.writes.change_tail import ChangeTail
from koinon_node.core.writes.commit_group import CommitGroup, Ticket, end
from koinon_node.replication.group_sender import Sender
from koinon_node.state import NodeState
from koinon_node.storage.local_replicas import LocalReplicas
from koinon_proto.contract.errors import StorageFullError
from koinon_proto.process.measures import Histogram

log = logging.getLogger(__name__)


class CommitTracker:
    """Completes commit groups once they are durable here and on every required follower.

    ``on_ready`` is called with adopted partitions once they may be served. ``kick`` is set when a
    proposal may be due.
    """

    def __init__(
        self,
        local: LocalReplicas,
        state: NodeState,
        on_ready: Callable[[Sequence[Adoption]], None],
    ) -> None:
        self.state = state
        self.clock = state.monotonic
        self._store = local.store
        self._pending = local.pending
        self._primaries = local.primaries
        self._copies = local.copies
        self._on_ready = on_ready  # called with the adoptions that may be served now
        self.leading = ReplicaTracker(local.copies, local.primaries, local.pending)
        self.proposals = Proposals(self.leading, state, local.disk)
        self.journal = local.journal
        self.sender = Sender(self.leading, local.journal)
        self.kick = asyncio.Event()  # wakes the replicator, which then decides what to propose
        self._held = False  # while a backup's cut is made: groups become durable, none complete
        self.tail = ChangeTail()
        self.on_complete: Callable[[U32Array], None] | None = None
        """Called with the partitions of a complete group, while feeds follow any partition."""
        self.seconds = Histogram()  # from when a group was handed over

    # --- from the writer -------------------------------------------------------------------

    def on_handed_over(self, group: CommitGroup) -> None:
        """Send a group to followers, which was just handed over to the disk. Of refused tickets
        only the sequences are sent: else their gap would stay open until the next write.
        """
        leading = self.leading
        touched, lasts = group.sequences()
        if not len(touched):
            return
        if self.state.any_stopped and leading.broken[touched].any():
            kept = ~leading.broken[touched]  # queued tickets of broken partitions were refused
            touched, lasts = touched[kept], lasts[kept]
        if not leading.any_replicated or not self._primaries.replicated[touched].any():
            leading.send(group, touched, lasts)
            return
        touched, lasts = _each_once(touched, lasts)
        previous = leading.send(group, touched, lasts)
        self.sender.send(group, previous)

    def on_durable(self, group: CommitGroup, unstored: Sequence[Ticket], *, whole: bool) -> None:
        """Note that the group is durable here, except for the tickets ``unstored``, which found no
        room.
        """
        if not len(group.touched):
            self._pending.complete(group)
            return
        if whole:
            self._copies.complete_through[group.touched] = group.lasts
        else:
            self._on_failed(group, unstored)
        if self.tail:
            if whole:
                self.tail.append(group)
            else:  # its records include refused tickets' records
                ends = self._copies.complete_through[group.touched]
                self.tail.restart(group.touched.tolist(), np.maximum(ends, group.lasts).tolist())
        self._complete_groups()  # not ``_report_ready``: only followers make partitions ready

    def _on_failed(self, group: CommitGroup, unstored: Sequence[Ticket]) -> None:
        """Rule 8: hand over partitions with a write that a follower may have and this node could
        not store.
        """
        for p, copy in self._store.read_copies(np.unique(group.touched).tolist()).items():
            self._copies.complete_through[p] = copy.complete_through
        failed = [ticket.touched for ticket in unstored]
        if not len(group.spilled) or not failed:
            return
        broken = np.intersect1d(np.concatenate(failed), group.spilled)
        for ticket in group.tickets:
            ticket.spilled = ticket.sequenced and bool(np.isin(ticket.touched, broken).any())
        fresh = [p for p in broken.tolist() if not self.leading.broken[p]]
        if not fresh:
            return
        log.error("own commit failed after it was sent: hands over partitions=%d", len(fresh))
        self.proposals.break_off(fresh)
        reason = "a write before this one found no room"
        refusal = StorageFullError(node_id=self.state.node_id, reason=reason)
        self._pending.refuse_queued(self._broken_everywhere(), refusal)
        self.kick.set()

    def _broken_everywhere(self) -> records.BoolArray:
        mask = np.zeros(len(self._copies.complete_through), np.bool_)
        mask[: len(self.leading.broken)] = self.leading.broken
        return mask

    # --- completion ------------------------------------------------------------------------

    def hold(self) -> None:
        """Complete no group until ``release``. Meanwhile no write is acknowledged, and reads of
        written keys wait.
        """
        self._held = True

    def release(self) -> None:
        """Complete the held groups."""
        self._held = False
        self.advance(stuck_too=True)

    def advance(self, *, stuck_too: bool = False) -> None:
        """Complete groups, and report partitions that have become ready. With ``stuck_too`` also
        check stuck groups.
        """
        self._complete_groups(stuck_too=stuck_too)
        if stuck_too and not self._held:
            for group in self._pending.durable():
                if group.stuck:
                    self._complete_parts(group)
        self._report_ready()

    def _complete_groups(self, *, stuck_too: bool = False) -> None:
        if self._held:
            return
        for group in self.leading.now_complete(stuck_too=stuck_too):
            self.seconds.observe(max(0.0, self.clock() - group.sent_at))
            group.led_in = self.state.served.epochs if self.state.serving() else None
            self._pending.complete(group)
            if self.tail and self.on_complete is not None:
                self.on_complete(group.touched)
        if self.proposals.hand_overs:
            self.kick.set()

    def _complete_parts(self, group: CommitGroup) -> None:
        """Wake the waiters whose partitions of a stuck group are complete, and release the group's
        merge claims there. Such a partition counts as drained (``Proposals``) and may be handed
        over, so keep the epoch in which it became complete.
        """
        there = group.touched[~self.leading.missing(group.touched, group.lasts).any(axis=0)]
        if self.state.serving():
            epochs = self.state.served.epochs
            for p in there[there < len(epochs)].tolist():
                group.led_early.setdefault(p, int(epochs[p]))
        if group.claims:
            group.claims.difference_update(map(records.prefix_of, there.tolist()))
        waiting = []
        for part, waiter in group.waiting:
            mine = np.isin(group.touched, part)
            if self.leading.covers(group.touched[mine], group.lasts[mine]):
                end(waiter)
            elif not waiter.done():
                waiting.append((part, waiter))
        group.waiting = waiting

    def _report_ready(self) -> None:
        ready = self.leading.take_ready()
        if ready:
            self._on_ready([Adoption(p, int(self.leading.epochs[p])) for p in ready])


def _each_once(touched: U32Array, lasts: U64Array) -> tuple[U32Array, U64Array]:
    """Return each partition once, with its last entry."""
    order = np.argsort(touched, kind="stable")
    ordered = touched[order]
    ends = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))
    return ordered[ends], lasts[order][ends]
