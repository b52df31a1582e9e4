"""Defects to plant in the real code, each one rule left out; the simulation must catch them all.

    python -m tests.simulation 0-60 --mutant NAME --failures-max 1

A method of the product is replaced before the first seed runs. Fourteen rules whose absence 60
seeds do not show have directed tests alone: sets whose fate is unknown (5), a takeover that is
complete (4), the metadata that goes before the data (15), a new leader's full session and quorum
(10), a late acknowledgement's epoch by itself, the leader's look at in_sync before it finishes a
move, the leases that a leader before has given when access is changed, a copy of an open directory
(3), a store of an earlier life (2), and of bulk loads that a step counts once all replicas have
it, that nothing is decided beside it, the order of commits, and that a sweep goes by the newest
table. Those of keyspaces are in ``keyspace_mutants``, those of change feeds in
``feed_mutants``, those of the write-ahead log in ``log_mutants``.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from koinon_coordinator.core.cluster import election, members, state
from koinon_coordinator.core.cluster.commands import AlterPartitions
from koinon_coordinator.leader import membership
from koinon_node.bulk_load import staged_chunks
from koinon_node.core.formats import chunk_keys
from koinon_node.core.formats.records import NO_SEQUENCE, PartitionEpochs
from koinon_node.core.membership.lease import LoopWatchdog
from koinon_node.core.replication import replica_sync, replica_tracker
from koinon_node.core.replication.copies import CopyState
from koinon_node.core.replication.in_sync_and_hand_over import Proposals, Why
from koinon_node.core.replication.replica_sync import ReplicaSync, Step
from koinon_node.core.replication.replica_tracker import ReplicaTracker
from koinon_node.core.writes.pending_writes import PendingWrites
from koinon_node.core.writes.write_decisions import Effects
from koinon_node.partition.expiry import Reclaimer
from koinon_node.partition.writes import Writes
from koinon_node.replication import primary_stream
from koinon_node.replication.catch_up import Fetcher
from koinon_node.replication.replicator import Replicator
from koinon_node.state import NodeState
from koinon_node.storage import merge_executor
from koinon_node.storage import store as store_module
from koinon_proto.contract.errors import UnknownFateError
from koinon_proto.contract.table import NO_NODE, NodeNumber, PartitionRow
from tests.simulation import (
    batchers,
    feed_mutants,
    feeds,
    half_deaths,
    keyspace_mutants,
    keyspaces,
    log_mutants,  # noqa: F401 (it plants into PLANTED)
)
from tests.simulation.agent import SimulatedAgent
from tests.simulation.cluster import SEEDS_WITH_BATCHES, Scenario
from tests.simulation.half_deaths import Act
from tests.simulation.planting import PLANTED, mutant, replace_method

SHOWN_BY = {
    "waits-only-for-followers-that-are-connected": 12,
    "ignores-its-own-tail": 48,
    "drops-batches-that-come-too-early": 12,
    "pages-leave-out-what-was-read-beyond-their-bound": 14,
    "hands-over-without-draining": 9,
    "serves-without-a-lease": 1,
    "reads-what-is-not-complete": 7,
    "counts-a-pass-before-its-end": 8,
    "snapshot-keeps-what-the-primary-lacks": 0,
    "merges-where-not-all-chunks-have-come": 13,
    "stages-for-loads-that-are-closed": 17,
    "takes-any-two-lineages-for-alike": 68,
    "takes-an-epoch-with-writes-for-one-without": 14,
    "takes-an-empty-disk-for-the-known-one": 3,
    "forgets-to-fence-by-epoch": 0,
    "begins-a-merge-anew-after-each-takeover": 67,
    "leads-on-with-a-disk-that-hangs": 53,
    "gives-up-what-it-leads-for-a-disk-that-all-share": 62,
    "gives-up-what-it-leads-for-a-disk-that-is-hardly-faster": 99,
    "leads-on-with-a-loop-that-does-not-turn": 84,
    "waits-for-followers-that-it-does-not-hear": 21,
    "splits-batches": 9,
    "catches-up-page-by-page-where-it-may-be-elected": 589,
    **dict.fromkeys(keyspace_mutants.NAMES, 2),
    "serves-keyspaces-that-are-dropped": 12,
    "tells-what-is-not-complete": 6,
    "goes-on-beyond-a-record-that-is-not-complete": 18,
    "goes-on-below-the-purge-floor": 26,
    "forgets-what-a-merge-step-has-written": 8,
    "keeps-no-tombstones-for-its-readers": 16,
    "extends-its-lease-before-it-applies-the-access-state": 1,
    "answers-a-change-of-access-once-it-is-committed": 1,
    "uses-segments-again-before-the-store-has-them": 1,
}
"""Seeds that showed the rarer ones when these were last looked for. They are tried first: where a
change of the product has made one harmless, any other of the test run's does as well, and the test
warns of what it costs to look for it.
"""

Likely = Callable[[int, Scenario], bool]


def _lasts(act: Act) -> Likely:
    return lambda seed, drawn: half_deaths.draw(seed)[2] is act and drawn.replicas > 1


def _merges_in_steps(_: int, drawn: Scenario) -> bool:
    return drawn.loaders > 0 and drawn.step_bytes < 1_000 and drawn.replicas > 1


def _has_small_pages(_: int, drawn: Scenario) -> bool:
    return drawn.page_bytes < 1_000 and drawn.replicas > 1


def _catches_up_with_batches(seed: int, drawn: Scenario) -> bool:
    in_pages = min(drawn.page_rows, drawn.page_bytes) < 1_000
    return seed % 10 in SEEDS_WITH_BATCHES and in_pages and drawn.replicas > 1


def _fails_often(_: int, drawn: Scenario) -> bool:
    return drawn.fault_interval_s < 1.0 and drawn.replicas > 1


def _has_keyspaces(seed: int, _: Scenario) -> bool:
    return seed % 20 in keyspaces.SEEDS


LIKELY: dict[str, Likely] = {
    "leads-on-with-a-disk-that-hangs": _lasts(Act.HANG_ONE),
    "gives-up-what-it-leads-for-a-disk-that-all-share": _lasts(Act.HANG_ALL),
    "gives-up-what-it-leads-for-a-disk-that-is-hardly-faster": _lasts(Act.SLOW_ALL),
    "waits-for-followers-that-it-does-not-hear": _lasts(Act.CUT_ONE_WAY),
    "leads-on-with-a-loop-that-does-not-turn": _lasts(Act.HANG_A_LOOP),
    "begins-a-merge-anew-after-each-takeover": _merges_in_steps,
    "merges-where-not-all-chunks-have-come": _merges_in_steps,
    "stages-for-loads-that-are-closed": lambda _, drawn: drawn.loaders > 1,
    "pages-leave-out-what-was-read-beyond-their-bound": _has_small_pages,
    "splits-batches": lambda seed, _: seed % 10 in SEEDS_WITH_BATCHES,
    "catches-up-page-by-page-where-it-may-be-elected": _catches_up_with_batches,
    "ignores-its-own-tail": _fails_often,
    "takes-any-two-lineages-for-alike": _fails_often,
    "takes-an-empty-disk-for-the-known-one": _fails_often,
    **dict.fromkeys(keyspace_mutants.NAMES, _has_keyspaces),
    **dict.fromkeys(feed_mutants.NAMES, lambda seed, _: seed % 10 in feeds.SEEDS),
}
"""Which seeds have what the rarer ones need. Of many seeds, these are run first."""


def likely_first(name: str, seeds: Iterable[int]) -> list[int]:
    """Return the seeds, those first that are likely to show the defect."""
    likely = LIKELY.get(name)
    if likely is None:
        return list(seeds)
    return sorted(seeds, key=lambda seed: not likely(seed, Scenario.draw(random.Random(seed))))


# --- the primary ------------------------------------------------------------------------------


@mutant
def acknowledges_without_its_followers() -> None:
    replace_method(ReplicaTracker, "covers", lambda _: lambda *_: True)


@mutant
def waits_only_for_followers_that_are_connected() -> None:
    def make(missing: Any) -> Any:
        def connected(self: ReplicaTracker, touched: Any, lasts: Any) -> Any:
            return missing(self, touched, lasts) & self.positioned[:, touched]

        return connected

    replace_method(ReplicaTracker, "missing", make)


@mutant
def carries_a_write_out_again_whose_answer_is_lost() -> None:
    """A write of unknown fate is repeated within the node, which answers for the second time."""

    def make(write: Any) -> Any:
        async def again(self: Writes, batch: Any) -> Any:
            try:
                return await write(self, batch)
            except UnknownFateError:
                return await write(self, batch)

        return again

    replace_method(Writes, "write", make)


@mutant
def widens_in_sync_before_catch_up() -> None:
    def make(_: Any) -> Any:
        def choose(self: Proposals, late: Any, reached: Any) -> Any:
            view = self._leading
            return view.replicas & ~view.in_sync & view.live[:, None] & view.led

        return choose

    replace_method(Proposals, "_choose_added", make)


@mutant
def hands_over_without_stopping() -> None:
    def make(stop: Any) -> Any:
        def go_on(self: Proposals, p: int, *rest: Any) -> None:
            stop(self, p, *rest)
            self._set_stopped(p, False)

        return go_on

    replace_method(Proposals, "_stop", make)


@mutant
def hands_over_without_draining() -> None:
    replace_method(ReplicaTracker, "drained", lambda _: lambda *_: True)


@mutant
def cuts_over_before_catch_up() -> None:
    """The wanted primary leads, and counts as in sync, as soon as it lives."""

    def can_lead(self: Proposals, row: PartitionRow, number: NodeNumber) -> bool:
        replica_tracker = self._leading
        return (
            number != replica_tracker.me
            and number in row.replicas
            and bool(replica_tracker.live[replica_tracker.slots[number]])
        )

    def begin(self: Proposals, p: int, now: float) -> None:
        to = self._wanted(self._row(p))
        if to != NO_NODE and not self._waits(p, now):
            self._stop(p, to, Why.WANTED, now)

    def make(propose: Any) -> Any:
        def widened(self: Proposals, p: int, in_sync: Any, to: NodeNumber = NO_NODE) -> Any:
            wider = in_sync if to in (NO_NODE, *in_sync) else (*in_sync, to)
            return propose(self, p, wider, to)

        return widened

    replace_method(Proposals, "_can_lead", lambda _: can_lead)
    replace_method(Proposals, "_begin_hand_over", lambda _: begin)
    replace_method(Proposals, "_propose", make)


@mutant
def serves_without_a_lease() -> None:
    replace_method(NodeState, "serving", lambda _: lambda self: self.lease.node_epoch != 0)


@mutant
def reads_what_is_not_complete() -> None:
    replace_method(PendingWrites, "incomplete", lambda _: lambda *_: [])
    replace_method(PendingWrites, "seen", lambda _: lambda *_: [])


@mutant
def purges_tombstones_that_followers_lack() -> None:
    def bounds(self: ReplicaTracker, partition_ids: Any) -> Any:
        return np.full(len(partition_ids), NO_SEQUENCE, np.uint64)

    def make(purge: Any) -> Any:
        def forgetful(self: Reclaimer, tombstones: Any) -> Any:
            floors = self._primaries.purge_floors
            before = floors.copy()
            future = purge(self, tombstones)
            floors[:] = before
            return future

        return forgetful

    replace_method(ReplicaTracker, "purge_bounds", lambda _: bounds)
    replace_method(Reclaimer, "_purge", make)


# --- half-deaths ------------------------------------------------------------------------------


@mutant
def leads_on_with_a_disk_that_hangs() -> None:
    replace_method(Proposals, "_leave_hanging_disk", lambda _: lambda *_: None)


@mutant
def gives_up_what_it_leads_for_a_disk_that_all_share() -> None:
    def anybody(self: ReplicaTracker, sent_at: float, within_s: float) -> Any:
        return np.ones(len(self.live), np.bool_)

    replace_method(ReplicaTracker, "durable_since", lambda _: anybody)
    replace_method(membership.Members, "_hanging", lambda _: lambda _: frozenset())


@mutant
def gives_up_what_it_leads_for_a_disk_that_is_hardly_faster() -> None:
    def make(durable_since: Any) -> Any:
        return lambda self, sent_at, within_s: durable_since(self, sent_at, np.inf)

    replace_method(ReplicaTracker, "durable_since", make)
    replace_method(membership.Members, "_hanging", lambda _: lambda _: frozenset())


@mutant
def leads_on_with_a_loop_that_does_not_turn() -> None:
    replace_method(LoopWatchdog, "silent_s", lambda _: lambda *_: 0.0)


@mutant
def waits_for_followers_that_it_does_not_hear() -> None:
    def make(_: Any) -> Any:
        def late(self: ReplicaTracker, now: float, timeout_s: float, *, spare: bool = False) -> Any:
            return (self.leaving | self.departing[:, None]) & self.required

        return late

    replace_method(ReplicaTracker, "late", make)


# --- the follower -----------------------------------------------------------------------------


@mutant
def follower_acknowledges_before_it_is_durable() -> None:
    def make(apply: Any) -> Any:
        def early(self: Any, receipt: Any, *rest: Any) -> None:
            apply(self, receipt, *rest)
            self._receipts.durable(receipt)

        return early

    replace_method(primary_stream.Link, "_apply", make)


@mutant
def joins_before_catch_up() -> None:
    replace_method(replica_sync, "step_after_repair", lambda _: lambda opened: Step.JOIN)


@mutant
def ignores_its_own_tail() -> None:
    def first_step(followed: Any, _: int) -> Step:
        return replica_sync.step_after_repair(followed.opened)

    replace_method(replica_sync, "first_step", lambda _: first_step)


@mutant
def counts_a_pass_before_its_end() -> None:
    def make(push: Any) -> Any:
        async def counted(self: Fetcher, page: Any, through: int, state: CopyState) -> None:
            if state is CopyState.DIRTY_TAIL:
                through, state = page.bound, CopyState.USABLE
                history = self._followed.opened.history
                epochs = PartitionEpochs(primary_epoch=self._epoch, history=history)
                await self._push(through, state, epochs=epochs)
            await push(self, page, through, state)

        return counted

    replace_method(Fetcher, "_push_page", make)


@mutant
def snapshot_keeps_what_the_primary_lacks() -> None:
    async def nothing(*_: Any) -> None:
        pass

    replace_method(Fetcher, "_clear_range", lambda _: nothing)


@mutant
def drops_batches_that_come_too_early() -> None:
    replace_method(ReplicaSync, "keep_back", lambda _: lambda *_: None)


@mutant
def pages_leave_out_what_was_read_beyond_their_bound() -> None:
    """Rows below the pass's start count for a page's bytes; those that follow are read in vain."""

    def make(fitting: Any) -> Any:
        def and_go_on(rows: Any, size: int) -> Any:
            taken = fitting(rows, size)
            del rows[len(taken) :]
            return taken

        return and_go_on

    replace_method(store_module, "_fitting", make)


@mutant
def takes_any_two_lineages_for_alike() -> None:
    def shorter(mine: Any, theirs: Any) -> int:
        point: int = min(mine.complete_through, theirs.complete_through)
        return point

    replace_method(replica_tracker, "common_point", lambda _: shorter)


@mutant
def takes_an_epoch_with_writes_for_one_without() -> None:
    def forgetful(self: PartitionEpochs, complete_through: int) -> int:
        return min(complete_through, self.unchanged_from)

    replace_method(PartitionEpochs, "unchanged_before", lambda _: forgetful)


# --- atomic batches ---------------------------------------------------------------------------


@mutant
def splits_batches() -> None:
    """Each half is a ticket of its own, in a group of its own."""

    def make(submit: Any) -> Any:
        def in_halves(
            self: Replicator, effects: Effects, size: int, *rest: Any, **options: Any
        ) -> Any:
            rows = list(effects.records.items())
            if len(rows) < batchers.GROUP_KEYS:
                return submit(self, effects, size, *rest, **options)
            submit(self, replace(effects, records=dict(rows[: len(rows) // 2])), size, *rest)
            self._writer.end_group()
            return submit(self, replace(effects, records=dict(rows[len(rows) // 2 :])), size, *rest)

        return in_halves

    replace_method(Replicator, "submit", make)


@mutant
def catches_up_page_by_page_where_it_may_be_elected() -> None:
    def never(_: Any) -> Any:
        return property(lambda _: False, lambda *_: None)

    replace_method(replica_sync.Followed, "holds", never)


# --- bulk loads -------------------------------------------------------------------------------


@mutant
def merges_where_not_all_chunks_have_come() -> None:
    """A follower that still catches up does what it can of a step."""

    def make(merge: Any) -> Any:
        def merge_of_some(*arguments: Any) -> None:
            with contextlib.suppress(merge_executor.MergeError):
                merge(*arguments)

        return merge_of_some

    replace_method(merge_executor, "merge", make)
    replace_method(primary_stream.Link, "_without_merges", lambda _: lambda *_: None)


@mutant
def stages_for_loads_that_are_closed() -> None:
    replace_method(NodeState, "check_load", lambda _: lambda *_: None)


@mutant
def begins_a_merge_anew_after_each_takeover() -> None:
    """The mark of how far a load is merged is not looked at, but for its end."""

    def make(read_mark: Any) -> Any:
        def whole_or_nothing(*arguments: Any) -> chunk_keys.Mark:
            mark = read_mark(*arguments)
            return mark if mark.merged else chunk_keys.Mark()

        return whole_or_nothing

    replace_method(staged_chunks, "read_mark", make)


# --- access -----------------------------------------------------------------------------------


@mutant
def extends_its_lease_before_it_applies_the_access_state() -> None:
    """The access state of a heartbeat's answer is applied when the next answer comes."""

    def make(apply: Any) -> Any:
        waiting: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

        def late(self: Any, state: Any) -> None:
            before, waiting[self] = waiting.get(self), state
            if before is not None:
                apply(self, before)

        return late

    replace_method(SimulatedAgent, "_apply_access", make)


@mutant
def answers_a_change_of_access_once_it_is_committed() -> None:
    replace_method(membership.Members, "behind_in_access", lambda _: lambda *_: [])


# --- the coordinators -------------------------------------------------------------------------


@mutant
def elects_a_replica_that_is_not_in_sync() -> None:
    def elect(row: Any, live: Any) -> Any:
        return next((n for n in row.replicas if n in live), NO_NODE)

    replace_method(election, "elect", lambda _: elect)


@mutant
def takes_an_empty_disk_for_the_known_one() -> None:
    replace_method(members, "is_known_store", lambda _: lambda *_: True)


@mutant
def forgets_to_fence_by_epoch() -> None:
    """A proposal counts for whatever the row is by then; a deposed primary acknowledges."""
    replace_method(NodeState, "still_leads", lambda _: lambda self, *_: self.serving())

    def make(alter: Any) -> Any:
        def careless(self: Any, command: AlterPartitions) -> Any:
            changes = tuple(
                replace(c, partition_epoch=row.partition_epoch, primary_epoch=row.primary_epoch)
                for c in command.changes
                if (row := self.row(c.partition_id)) is not None
            )
            return alter(self, replace(command, changes=changes))

        return careless

    state._APPLY[AlterPartitions] = make(state._APPLY[AlterPartitions])


MUTANTS = tuple(PLANTED)
