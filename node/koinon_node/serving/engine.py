"""Reads and writes of the partitions that this node leads; knows neither messages nor transport.

The parts: ``reads`` (rows by their keys), ``scans`` (pages), ``writes``, ``reclaimer`` (what has
expired). Each says which rules hold there.
"""

from __future__ import annotations

from koinon_node.config import Limits
from koinon_node.core.pending_writes import PendingWrites
from koinon_node.core.write_decisions import Primaries
from koinon_node.primary.replicator import Replicator
from koinon_node.serving.merge_waits import MergeWaits
from koinon_node.serving.read_budget import ReadBudget
from koinon_node.serving.reads import Reads
from koinon_node.serving.reclaimer import Reclaimer
from koinon_node.serving.scans import Scans
from koinon_node.serving.traffic import Traffic
from koinon_node.serving.writes import Writes
from koinon_node.state import NodeState, WallClock
from koinon_node.storage.index_sweeper import IndexSweeper
from koinon_node.storage.store import Store
from koinon_node.storage.writer import Writer


class Engine:
    """Makes the parts, and gives others the methods of these as its own: a call of one is a call of
    the part itself. All belong to the event loop's thread.
    """

    def __init__(
        self,
        state: NodeState,
        store: Store,
        writer: Writer,
        pending: PendingWrites,
        primaries: Primaries,
        replicator: Replicator,
        limits: Limits,
        clock: WallClock,
    ) -> None:
        self.traffic = traffic = Traffic()
        claims = MergeWaits(pending, replicator, len(primaries.epochs))
        self.waits = claims.waits
        reclaimer = Reclaimer(state, store, pending, primaries, replicator, clock, claims)
        self.reclaiming = IndexSweeper(reclaimer.look)
        self.remove_expired = reclaimer.remove_expired
        shared = (state, store, writer, pending)
        budget = ReadBudget(limits)
        reads = Reads(*shared, replicator, reclaimer, traffic, budget, limits, clock)
        self.read, self.read_now = reads.read, reads.read_now
        self.scan = Scans(*shared, replicator, reclaimer, traffic, budget, limits, clock).scan
        writes = Writes(*shared, primaries, replicator, claims, traffic, limits, clock)
        self.write, self.put, self.commit = writes.write, writes.put, writes.commit
        self.lengths_now = writes.lengths_now
        self.settle = writer.settle
        """Waits until the store itself shows what is durable of some partitions."""
        self.now_ms = clock.now_ms
        """The Unix time by which records expire here."""
