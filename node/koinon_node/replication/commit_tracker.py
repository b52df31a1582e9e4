"""Follows commit groups from their hand-over to their completion, as disk and followers answer.

A group is streamed when it is handed over to be committed here, so that followers commit beside
this node. It is complete when it is durable here and on every required follower
(core/replication/replica_tracker.py); until then its records are pending: reads of its keys wait,
and its rows count against the bounds. What needs no follower is complete as soon as it is committed
here.

Groups complete in any order, but for two that write one partition: a partition that has lost its
followers does not hold up the others.

Three hear of something and say so here: the writer (``on_handed_over``, ``on_durable``), followers
and the code that takes a table or the time (``advance``). Nothing here asks them for anything.

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

    ``on_ready`` is told which adopted partitions may be served, as they become so. ``kick`` is set
    when something may be worth a proposal.
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
        """The group is on its way to the disk: send it to followers as well. Of what was refused
        they are sent the sequences alone, whose gaps would stay open until the next write.
        """
        leading = self.leading
        touched, lasts = group.sequences()
        if not len(touched):
            return
        if self.state.any_stopped and leading.broken[touched].any():
            kept = ~leading.broken[touched]  # what was queued of the others was refused
            touched, lasts = touched[kept], lasts[kept]
        if not leading.any_replicated or not self._primaries.replicated[touched].any():
            leading.send(group, touched, lasts)
            return
        touched, lasts = _each_once(touched, lasts)
        previous = leading.send(group, touched, lasts)
        self.sender.send(group, previous)

    def on_durable(self, group: CommitGroup, unstored: Sequence[Ticket], *, whole: bool) -> None:
        """The group is durable here, but for tickets that found no room."""
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
            else:  # what it has refused is among its records
                ends = self._copies.complete_through[group.touched]
                self.tail.restart(group.touched.tolist(), np.maximum(ends, group.lasts).tolist())
        self._complete_groups()  # who is ready to be served is a matter of followers

    def _on_failed(self, group: CommitGroup, unstored: Sequence[Ticket]) -> None:
        """Rule 8: what a follower may have and this node could not store is handed over."""
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

    # --- from all that may complete something ----------------------------------------------

    def hold(self) -> None:
        """Complete no group until ``release``: no write is acknowledged meanwhile, and reads of the
        keys that it writes wait.
        """
        self._held = True

    def release(self) -> None:
        """Complete what has been held."""
        self._held = False
        self.advance(stuck_too=True)

    def advance(self, *, stuck_too: bool = False) -> None:
        """Take the consequences of what has become complete, and of who is ready."""
        self._complete_groups(stuck_too=stuck_too)
        if stuck_too and not self._held:
            for group in self._pending.durable():
                if group.stuck:
                    self._tell_parts(group)
        self._tell_ready()

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

    def _tell_parts(self, group: CommitGroup) -> None:
        """Tell those who wait for partitions of a group that is stuck for others of its; what it
        has merged in these waits for the others no more. A partition counts as drained from here on
        (``Proposals``), so that the epoch is kept in which its part became complete.
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

    def _tell_ready(self) -> None:
        ready = self.leading.take_ready()
        if ready:
            self._on_ready([Adoption(p, int(self.leading.epochs[p])) for p in ready])


def _each_once(touched: U32Array, lasts: U64Array) -> tuple[U32Array, U64Array]:
    """Return each partition once, with its last entry."""
    order = np.argsort(touched, kind="stable")
    ordered = touched[order]
    ends = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))
    return ordered[ends], lasts[order][ends]
