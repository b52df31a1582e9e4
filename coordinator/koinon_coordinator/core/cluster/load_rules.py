"""Bulk loads in the replicated state: opened, committed, merged or aborted. Pure.

    OPEN --CommitLoad--> MERGING --PartitionsMerged, the last one--> DONE
      |                     (straight to DONE if there is nothing to merge)
      +----AbortLoad---> ABORTED

A load that is open or merging is *active*: the table lists it with its state. An ended load is kept
among the last ``ENDED_MAX``, without the fields for merging, so that its job gets the same answer
again; then it is forgotten.

The rules, which ``judge`` checks for every command on every member:

* a ``job_id`` names one load, whatever its state; a request with the same id and another mode,
prefix
  or batch is refused;
* the batches of a streaming query are applied in order and once each. The command that commits a
  batch records it for good as the last one: batches up to it are never opened again, and an open
  load of such a batch can only be aborted. A request for a batch that is open or being merged
  returns that load, whichever job asks: a batch never has two loads;
* a load is committed once. A repeated commit with the same attempts (known by their digest) gets
the
  same answer; a commit with other attempts is refused;
* in mode APPEND the partitions named by the commit are merged, in mode OVERWRITE all partitions of
  the load's keyspace, since existing records are deleted everywhere. A keyspace with an active load
  cannot be dropped.

``judge`` returns the outcome of a command that changes nothing. The leader calls it before it
proposes, and ``apply`` calls it again.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType

from koinon_coordinator.core.cluster.commands import (
    AbortLoad,
    CommitLoad,
    LoadCommand,
    LoadOutcome,
    OpenLoad,
    PartitionsMerged,
    Reason,
    Rejected,
)
from koinon_proto.contract.bulk_loads import (
    LOAD_ATTEMPTS_MAX,
    LOAD_TIMEOUT_MS,
    LoadMode,
    LoadState,
    StreamBatch,
    owner_digest,
)
from koinon_proto.contract.keyspaces import DEFAULT_ID, KeyspaceId, Keyspaces
from koinon_proto.contract.table import ActiveLoad, PartitionId

ACTIVE_MAX = 100
ENDED_MAX = 1_000
ATTEMPTS_MERGING_MAX = 500_000
"""The most attempts of all merging loads: every snapshot of the state has them, 8 bytes each."""
QUERIES_MAX = 100_000
DIGEST_BYTES = 16
ALREADY_APPLIED = LoadOutcome(load_id=0, state=LoadState.DONE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """One load. ``attempts`` and ``unmerged`` (ascending) are set while it is being merged; from
    the commit on ``attempts_digest``, ``committed_at`` (the commit's log index), ``partitions``
    (the number to merge), ``rows`` and ``bytes``. ``owner`` is the user that opened it, "" without
    authentication.
    """

    load_id: int
    job_id: str
    mode: LoadMode
    prefix: bytes = b""
    stream_batch: StreamBatch | None = None
    description: str = ""
    timeout_ms: int = LOAD_TIMEOUT_MS
    state: LoadState = LoadState.OPEN
    attempts: tuple[int, ...] = field(default=(), repr=False)
    attempts_digest: bytes = b""
    committed_at: int = 0
    partitions: int = 0
    unmerged: tuple[PartitionId, ...] = field(default=(), repr=False)
    rows: int = 0
    bytes: int = 0
    reason: str = ""
    owner: str = ""
    keyspace_id: KeyspaceId = DEFAULT_ID

    @property
    def outcome(self) -> LoadOutcome:
        return LoadOutcome(load_id=self.load_id, state=self.state)

    @property
    def partitions_merged(self) -> int:
        return self.partitions - len(self.unmerged)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadsImage:
    """All loads of the state: ``active`` by id, ``ended`` in the order of their ends, ``batches``
    (the last applied one) by query. A load's id is the log index of the command that opened it,
    plus ``id_base``.
    """

    active: tuple[Load, ...] = ()
    ended: tuple[Load, ...] = ()
    batches: tuple[StreamBatch, ...] = ()
    id_base: int = 0


NO_LOADS = LoadsImage()


class Loads:
    """The loads of the cluster, as the Raft log has made them; part of ``ClusterState``.

    Only ``apply`` changes anything.
    """

    def __init__(self, image: LoadsImage = NO_LOADS) -> None:
        self._active = {load.load_id: load for load in image.active}
        self._ended = {load.load_id: load for load in image.ended}
        self._jobs = {load.job_id: load.load_id for load in (*image.ended, *image.active)}
        self._batches = {batch.query_id: batch.batch_id for batch in image.batches}
        self._id_base = image.id_base

    # --- reading ------------------------------------------------------------------------------

    @property
    def active(self) -> Mapping[int, Load]:
        """The loads that are open or merging, ascending. A view, not a copy."""
        return MappingProxyType(self._active)

    def get(self, load_id: int) -> Load | None:
        """The load; None if it never existed, or ended so long ago that it is forgotten."""
        return self._active.get(load_id) or self._ended.get(load_id)

    def __iter__(self) -> Iterator[Load]:
        """Every known load, ascending."""
        known = {**self._ended, **self._active}
        return iter([known[load_id] for load_id in sorted(known)])

    def shown(self) -> tuple[ActiveLoad, ...]:
        """Return the active loads as the table shows them."""
        return tuple(
            ActiveLoad(
                load_id=load.load_id,
                merging=load.state is LoadState.MERGING,
                committed_at=load.committed_at,
                owner_digest=owner_digest(load.load_id, load.owner),
                keyspace_id=load.keyspace_id,
            )
            for load in self._active.values()
        )

    def id_at(self, index: int) -> int:
        """Return the id of what the command at this log index makes, which is never reused."""
        return self._id_base + index

    def are_active_in(self, keyspace_id: KeyspaceId) -> bool:
        """Return whether a load of this keyspace is open or merging."""
        return any(load.keyspace_id == keyspace_id for load in self._active.values())

    def image(self) -> LoadsImage:
        """Return all loads; ``Loads(image)`` equals this object."""
        return LoadsImage(
            active=tuple(self._active.values()),
            ended=tuple(self._ended.values()),
            batches=tuple(StreamBatch(q, self._batches[q]) for q in sorted(self._batches)),
            id_base=self._id_base,
        )

    # --- judging ------------------------------------------------------------------------------

    def judge(self, command: LoadCommand, keyspaces: Keyspaces) -> LoadOutcome | Rejected | None:
        """Return the outcome of a command that changes nothing, or its rejection; None if it would
        have an effect.
        """
        if isinstance(command, OpenLoad):
            return self._judge_open(command, keyspaces)
        load = self.get(command.load_id)
        if load is None:
            return Rejected(reason=Reason.LOAD_UNKNOWN)
        if isinstance(command, CommitLoad):
            return self._judge_commit(load, command, partitions_of(load, keyspaces))
        if isinstance(command, AbortLoad):
            return self._judge_abort(load)
        is_news = not set(command.partition_ids).isdisjoint(load.unmerged)
        return None if is_news else load.outcome

    def _judge_open(self, command: OpenLoad, keyspaces: Keyspaces) -> LoadOutcome | Rejected | None:
        load = self._opened_before(command)
        if load is not None:
            is_same = (load.mode, load.prefix, load.stream_batch, load.keyspace_id) == (
                command.mode,
                command.prefix,
                command.stream_batch,
                command.keyspace_id,
            )
            return load.outcome if is_same else Rejected(reason=Reason.LOAD_DIFFERS)
        batch = command.stream_batch
        if batch is not None and self._is_applied(batch):
            return ALREADY_APPLIED
        if len(self._active) >= ACTIVE_MAX:
            return Rejected(reason=Reason.TOO_MANY_LOADS)
        keyspace = keyspaces.by_id(command.keyspace_id)
        if keyspace is None or keyspace.is_dropping:
            return Rejected(reason=Reason.KEYSPACE_UNKNOWN)
        return None

    def _opened_before(self, command: OpenLoad) -> Load | None:
        """Return the job's own load, or the active load of its batch."""
        if command.job_id in self._jobs:
            return self.get(self._jobs[command.job_id])
        batch = command.stream_batch
        if batch is None:
            return None
        load = next((load for load in self._active.values() if load.stream_batch == batch), None)
        is_late = load is not None and load.state is LoadState.OPEN and self._is_applied(batch)
        return None if is_late else load

    def _judge_commit(
        self, load: Load, command: CommitLoad, partition_ids: range
    ) -> LoadOutcome | Rejected | None:
        if load.state is not LoadState.OPEN:
            is_same = load.attempts_digest == digest(command.attempts)
            return load.outcome if is_same else Rejected(reason=Reason.LOAD_CLOSED)
        if commit_fault(command, partition_ids) is not None:
            return Rejected(reason=Reason.BAD_VALUE)
        batch = load.stream_batch
        if batch is not None and self._is_applied(batch):
            return Rejected(reason=Reason.BATCH_APPLIED)
        if batch and batch.query_id not in self._batches and len(self._batches) >= QUERIES_MAX:
            return Rejected(reason=Reason.TOO_MANY_QUERIES)
        merging = sum(len(other.attempts) for other in self._active.values())
        if merging + len(command.attempts) > ATTEMPTS_MERGING_MAX:
            return Rejected(reason=Reason.TOO_MANY_ATTEMPTS)
        return None

    def _judge_abort(self, load: Load) -> LoadOutcome | Rejected | None:
        if load.state is LoadState.OPEN:
            return None
        is_aborted = load.state is LoadState.ABORTED
        return load.outcome if is_aborted else Rejected(reason=Reason.LOAD_CLOSED)

    def _is_applied(self, batch: StreamBatch) -> bool:
        last = self._batches.get(batch.query_id)
        return last is not None and batch.batch_id <= last

    # --- applying -----------------------------------------------------------------------------

    def apply(
        self, command: LoadCommand, *, index: int, keyspaces: Keyspaces
    ) -> LoadOutcome | Rejected:
        """Apply a committed command; return its result. ``index``: the command's index in the
        log.
        """
        if index < 1 and isinstance(command, OpenLoad):
            raise ValueError("a load's id is its command's log index, from 1 up")
        judged = self.judge(command, keyspaces)
        if judged is not None:
            return judged
        if isinstance(command, OpenLoad):
            load = _opened(command, self.id_at(index))
            self._jobs[load.job_id] = load.load_id
        elif isinstance(command, CommitLoad):
            load = self._active[command.load_id]
            load = _committed(load, command, partitions_of(load, keyspaces), self.id_at(index))
            if load.stream_batch is not None:
                self._batches[load.stream_batch.query_id] = load.stream_batch.batch_id
        elif isinstance(command, AbortLoad):
            load = replace(
                self._active[command.load_id], state=LoadState.ABORTED, reason=command.reason
            )
        else:
            load = _merged(self._active[command.load_id], command)
        self._put(load)
        return load.outcome

    def _put(self, load: Load) -> None:
        if not load.state.ended:
            self._active[load.load_id] = load
            return
        del self._active[load.load_id]
        self._ended[load.load_id] = replace(load, attempts=(), unmerged=())
        if len(self._ended) > ENDED_MAX:
            oldest = self._ended.pop(next(iter(self._ended)))
            del self._jobs[oldest.job_id]


def _opened(command: OpenLoad, load_id: int) -> Load:
    return Load(
        load_id=load_id,
        job_id=command.job_id,
        mode=command.mode,
        prefix=command.prefix,
        stream_batch=command.stream_batch,
        description=command.description,
        timeout_ms=command.timeout_ms,
        owner=command.owner,
        keyspace_id=command.keyspace_id,
    )


def _committed(load: Load, command: CommitLoad, partition_ids: range, committed_at: int) -> Load:
    to_merge = merged_partitions(load, command.partition_ids, partition_ids)
    return replace(
        load,
        state=LoadState.MERGING if to_merge else LoadState.DONE,
        attempts=command.attempts,
        attempts_digest=digest(command.attempts),
        committed_at=committed_at,
        partitions=len(to_merge),
        unmerged=to_merge,
        rows=command.rows,
        bytes=command.bytes,
    )


def _merged(load: Load, command: PartitionsMerged) -> Load:
    merged = set(command.partition_ids)
    left = tuple(p for p in load.unmerged if p not in merged)
    return replace(load, unmerged=left, state=LoadState.MERGING if left else LoadState.DONE)


def partitions_of(load: Load, keyspaces: Keyspaces) -> range:
    """Return the partitions of the load's keyspace, which exists while the load is active."""
    keyspace = keyspaces.by_id(load.keyspace_id)
    return keyspace.partition_ids if keyspace is not None else range(0)


def merged_partitions(
    load: Load, staged: Iterable[PartitionId], partition_ids: range
) -> tuple[PartitionId, ...]:
    """Return those of the load's partitions, ``partition_ids``, that have to be merged if
    ``staged`` have staged rows.
    """
    if load.mode is LoadMode.OVERWRITE:
        return tuple(map(PartitionId, partition_ids))
    return tuple(staged)


def commit_fault(command: CommitLoad, load_partitions: range) -> tuple[str, str, int, int] | None:
    """Return (field, reason, limit, value) of a commit that no state could accept, or None.
    ``load_partitions``: the partitions of the load's keyspace.
    """
    attempts, partition_ids = command.attempts, command.partition_ids
    if len(attempts) > LOAD_ATTEMPTS_MAX:
        return "attempts", "too many in one load", LOAD_ATTEMPTS_MAX, len(attempts)
    if 0 in attempts:
        return "attempts", "0 is the job itself, and no attempt", 0, 0
    if len(set(attempts)) != len(attempts):
        return "attempts", "an attempt is named twice", 0, 0
    if any(first >= second for first, second in pairwise(partition_ids)):
        return "partition_ids", "must be ascending, each one once", 0, 0
    for p in (*partition_ids[:1], *partition_ids[-1:]):
        if p not in load_partitions:
            last = load_partitions.stop - 1
            return "partition_ids", "there is no such partition in the load's keyspace", last, p
    if partition_ids and not attempts:
        return "attempts", "none is named, but partitions that were staged in", 0, 0
    return None


def digest(attempts: tuple[int, ...]) -> bytes:
    """Return a digest of a list of attempts."""
    packed = struct.pack(f"<{len(attempts)}Q", *attempts)
    return hashlib.blake2b(packed, digest_size=DIGEST_BYTES).digest()
