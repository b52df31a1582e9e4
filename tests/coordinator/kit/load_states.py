"""Short forms for tests of bulk loads: a state with a log, and commands that fit it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from koinon_coordinator.core.cluster.commands import (
    AbortLoad,
    Command,
    CommitLoad,
    LoadOutcome,
    OpenLoad,
    PartitionsMerged,
    Result,
)
from koinon_coordinator.core.cluster.load_rules import Load
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_proto.contract.bulk_loads import LoadMode, LoadState, StreamBatch
from koinon_proto.contract.table import PartitionId, Table

from .support import bootstrapped

OPEN, MERGING = LoadState.OPEN, LoadState.MERGING
DONE, ABORTED = LoadState.DONE, LoadState.ABORTED
PARTITIONS = 4
FIRST_INDEX = 11


def small_state() -> ClusterState:
    """Three nodes, four partitions with two replicas each, all online."""
    return bootstrapped([(1, 2), (2, 3), (3, 1), (1, 3)])


def partitions(*partition_ids: int) -> tuple[PartitionId, ...]:
    return tuple(PartitionId(p) for p in partition_ids)


def open_load(
    job_id: str = "job", mode: LoadMode = LoadMode.APPEND, *, batch: int | None = None, **more: Any
) -> OpenLoad:
    """``batch``: of the streaming query "q"."""
    stream_batch = None if batch is None else StreamBatch("q", batch)
    return OpenLoad(job_id=job_id, mode=mode, stream_batch=stream_batch, **more)


def commit_load(
    load_id: int, attempts: tuple[int, ...] = (7, 5), partition_ids: tuple[int, ...] = (0, 2)
) -> CommitLoad:
    return CommitLoad(
        load_id=load_id,
        attempts=attempts,
        partition_ids=partitions(*partition_ids),
        rows=100,
        bytes=2_000,
    )


def abort_load(load_id: int, reason: str = "enough") -> AbortLoad:
    return AbortLoad(load_id=load_id, reason=reason)


def merged(load_id: int, *partition_ids: int) -> PartitionsMerged:
    return PartitionsMerged(load_id=load_id, partition_ids=partitions(*partition_ids))


def outcome(load_id: int, state: LoadState) -> LoadOutcome:
    return LoadOutcome(load_id=load_id, state=state)


@dataclass
class Log:
    """A state to which commands are applied at ascending indices."""

    state: ClusterState = field(default_factory=small_state)
    index: int = FIRST_INDEX - 1

    def apply(self, command: Command) -> Result:
        self.index += 1
        return self.state.apply(command, self.index)

    def open(self, *args: Any, **kwargs: Any) -> int:
        """Open a load; return its id."""
        opened = self.apply(open_load(*args, **kwargs))
        assert isinstance(opened, LoadOutcome), opened
        assert opened.state is OPEN
        return opened.load_id

    def load(self, load_id: int) -> Load:
        load = self.state.loads.get(load_id)
        assert load is not None
        return load

    def table(self) -> Table:
        table = self.state.table()
        assert table is not None
        return table

    def in_state(self, state: LoadState, **kwargs: Any) -> int:
        """Bring a new load into the state; return its id."""
        load_id = self.open(**kwargs)
        if state is ABORTED:
            self.apply(abort_load(load_id))
        elif state is not OPEN:
            self.apply(commit_load(load_id))
        if state is DONE:
            self.apply(merged(load_id, *range(PARTITIONS)))
        assert self.load(load_id).state is state
        return load_id
