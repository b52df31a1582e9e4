"""The parts of a node by which records are read, of a row or of a page."""

from __future__ import annotations

from koinon_node.config import Limits
from koinon_node.core.pending_writes import PendingWrites
from koinon_node.primary.replicator import Replicator
from koinon_node.serving.read_budget import ReadBudget
from koinon_node.serving.reclaimer import Reclaimer
from koinon_node.serving.traffic import Traffic
from koinon_node.state import NodeState, WallClock
from koinon_node.storage.store import Store
from koinon_node.storage.writer import Writer


class RecordReader:
    """Holds them, for ``Reads`` and ``Scans``."""

    def __init__(
        self,
        state: NodeState,
        store: Store,
        writer: Writer,
        pending: PendingWrites,
        replicator: Replicator,
        reclaimer: Reclaimer,
        traffic: Traffic,
        budget: ReadBudget,
        limits: Limits,
        clock: WallClock,
    ) -> None:
        self._state = state
        self._store = store
        self._writer = writer
        self._pending = pending
        self._replicator = replicator
        self._reclaimer = reclaimer
        self._traffic = traffic
        self._budget = budget
        self._limits = limits
        self._clock = clock
