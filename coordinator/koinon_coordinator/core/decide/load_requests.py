"""Decides on bulk loads, from the state, before the leader proposes; and counts what it knows of
them beside the state: when tasks were at work on an open load, and how much they have staged. Pure.

``core/cluster/load_rules.py`` says what a command makes of a load; here is which command, and the
typed error where there is none. How long a load has been left alone is soft: the leader counts it,
from the last that it heard or from its own beginning, and leaves out the time in which it stood
still itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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
from koinon_coordinator.core.cluster.load_rules import (
    ACTIVE_MAX,
    ATTEMPTS_MERGING_MAX,
    QUERIES_MAX,
    Load,
    commit_fault,
    merged_partitions,
    partitions_of,
)
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_coordinator.core.decide.admin_requests import check_bootstrapped, check_partition
from koinon_coordinator.core.decide.registrations import check_printable
from koinon_proto.contract.bulk_loads import (
    LOAD_ATTEMPTS_MAX,
    LOAD_NAME_CHARS_MAX,
    LOAD_TEXT_CHARS_MAX,
    LOAD_TIMEOUT_MS,
    LOAD_TIMEOUT_MS_MAX,
    LOAD_TIMEOUT_MS_MIN,
    LoadMode,
    LoadState,
    StreamBatch,
)
from koinon_proto.contract.cluster_errors import LoadClosedError
from koinon_proto.contract.errors import (
    InvalidArgumentError,
    KoinonError,
    PartitionOfflineError,
    ResourceExhaustedError,
    UnavailableError,
    UnknownKeyspaceError,
)
from koinon_proto.contract.keyspaces import DEFAULT_ID, KeyspaceId
from koinon_proto.contract.table import MAX_KEY_BYTES, PartitionId, PartitionStatus
from koinon_proto.process.printable import printable

UNKNOWN = "unknown"
_FULL = {
    Reason.TOO_MANY_LOADS: ("bulk loads open or being merged", ACTIVE_MAX),
    Reason.TOO_MANY_ATTEMPTS: ("attempts of loads that are being merged", ATTEMPTS_MERGING_MAX),
    Reason.TOO_MANY_QUERIES: ("streaming queries that have applied a batch", QUERIES_MAX),
}
Decision = LoadCommand | LoadOutcome
"""A command to propose, or the answer where nothing has to change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadWish:
    """A request to open a load, as it came; ``timeout_ms`` 0: the usual. ``owner``: who asks."""

    job_id: str
    mode: int
    prefix: bytes = b""
    stream_batch: StreamBatch | None = None
    description: str = ""
    timeout_ms: int = 0
    owner: str = ""
    keyspace_id: KeyspaceId = DEFAULT_ID


# --- decisions ---------------------------------------------------------------------------------


def decide_open(state: ClusterState, wish: LoadWish) -> Decision:
    """Return the command that opens the load, or the load that there is already.

    Raises:
        ClusterNotReadyError, InvalidArgumentError, ResourceExhaustedError, UnknownKeyspaceError.
    """
    check_bootstrapped(state)
    _check_wish(wish)
    command = OpenLoad(
        job_id=wish.job_id,
        mode=LoadMode(wish.mode),
        prefix=wish.prefix,
        stream_batch=wish.stream_batch,
        description=printable(wish.description)[:LOAD_TEXT_CHARS_MAX],
        timeout_ms=wish.timeout_ms or LOAD_TIMEOUT_MS,
        owner=wish.owner,
        keyspace_id=wish.keyspace_id,
    )
    return _judged(state, command)


def decide_commit(state: ClusterState, command: CommitLoad) -> Decision:
    """Return the command that commits the load, or what came of it when it was committed before.

    Raises:
        ClusterNotReadyError, InvalidArgumentError, LoadClosedError, ResourceExhaustedError
        PartitionOfflineError: a partition that would have to be merged has no primary.
    """
    check_bootstrapped(state)
    decision = _judged(state, command)
    load = state.loads.get(command.load_id)
    if decision is not command or load is None:
        return decision
    load_partitions = partitions_of(load, state.keyspaces)
    for p in merged_partitions(load, command.partition_ids, load_partitions):
        row = state.row(p)
        if row is not None and row.status is PartitionStatus.OFFLINE:
            raise PartitionOfflineError(partition_id=p, reason=row.offline_reason.name.lower())
    return command


def decide_abort(state: ClusterState, load_id: int, reason: str) -> Decision:
    """Return the command that aborts the load, or that it is aborted.

    Raises:
        ClusterNotReadyError
        LoadClosedError: it is committed, or not known.
    """
    command = AbortLoad(load_id=load_id, reason=printable(reason)[:LOAD_TEXT_CHARS_MAX])
    check_bootstrapped(state)
    return _judged(state, command)


def decide_merged(
    state: ClusterState, load_id: int, partition_ids: Iterable[int], reporter: str = ""
) -> Decision:
    """Return the command that records merged partitions, or the load's state if it says nothing
    new: of a load that is forgotten, UNKNOWN. Of a ``reporter`` that is known, only what it leads
    counts: who leads the others reports them.

    Raises:
        ClusterNotReadyError, InvalidArgumentError.
    """
    check_bootstrapped(state)
    named = sorted(set(partition_ids))
    for p in (*named[:1], *named[-1:]):
        check_partition(state, p)
    if (load := state.loads.get(load_id)) is None:
        return LoadOutcome(load_id=load_id, state=LoadState.UNKNOWN)
    if reporter:
        node = state.node_by_id(reporter)
        named = [p for p in named if node and (r := state.row(p)) and r.primary == node.info.number]
    if not named:
        return LoadOutcome(load_id=load_id, state=load.state)
    command = PartitionsMerged(load_id=load_id, partition_ids=tuple(PartitionId(p) for p in named))
    return _judged(state, command)


def load_in(state: ClusterState, load_id: int, wanted: LoadState) -> Load:
    """Return the load, which is in the wanted state.

    Raises:
        LoadClosedError: it is in another one, or not known.
    """
    load = state.loads.get(load_id)
    if load is None or load.state is not wanted:
        raise closed(load_id, load)
    return load


def refusal(reason: Reason, command: LoadCommand, state: ClusterState) -> KoinonError:
    """Return the typed error for a command that is refused, before it was proposed or after."""
    if reason in _FULL:
        resource, limit = _FULL[reason]
        return ResourceExhaustedError(resource=resource, limit=limit)
    if isinstance(command, OpenLoad):
        if reason is Reason.LOAD_DIFFERS:
            return InvalidArgumentError(
                field="job_id", reason=f"{reason.value}: choose another job_id for another load"
            )
        if reason is Reason.KEYSPACE_UNKNOWN:
            return UnknownKeyspaceError()
        return UnavailableError(reason=f"refused, the cluster has changed: {reason.value}")
    load = state.loads.get(command.load_id)
    if reason is Reason.BAD_VALUE and isinstance(command, CommitLoad) and load is not None:
        fault = commit_fault(command, partitions_of(load, state.keyspaces))
        if fault is not None:
            name, why, limit, actual = fault
            return InvalidArgumentError(field=name, reason=why, limit=limit, actual=actual)
    if reason is Reason.BATCH_APPLIED:
        return closed(command.load_id, load, f"{reason.value}; abort this load")
    return closed(command.load_id, load, _closed_reason(load, command))


def closed(load_id: int, load: Load | None, reason: str = "") -> LoadClosedError:
    """Return the error that says what became of a load."""
    if load is None:
        return LoadClosedError(load_id=load_id, state=UNKNOWN, reason=Reason.LOAD_UNKNOWN.value)
    return LoadClosedError(
        load_id=load_id, state=load.state.name.lower(), reason=reason or load.reason
    )


def _closed_reason(load: Load | None, command: LoadCommand) -> str:
    if load is None or load.state is LoadState.ABORTED:
        return ""
    if isinstance(command, CommitLoad):
        return "it was committed with other attempts"
    return "it is committed and can no longer be aborted"


def _judged(state: ClusterState, command: LoadCommand) -> Decision:
    """Return the command if it would have an effect, else what it comes to."""
    judged = state.loads.judge(command, state.keyspaces)
    if isinstance(judged, Rejected):
        raise refusal(judged.reason, command, state)
    return command if judged is None else judged


def _check_wish(wish: LoadWish) -> None:
    """Raise InvalidArgumentError for a request that no state could accept."""
    _check_length("job_id", wish.job_id, LOAD_NAME_CHARS_MAX, required=True)
    check_printable("job_id", wish.job_id)
    _check_length("description", wish.description, LOAD_TEXT_CHARS_MAX)
    if wish.stream_batch is not None:
        query_id = wish.stream_batch.query_id
        _check_length("stream_batch.query_id", query_id, LOAD_NAME_CHARS_MAX, required=True)
        check_printable("stream_batch.query_id", query_id)
    if wish.mode not in LoadMode.__members__.values():
        names = " or ".join(mode.name for mode in LoadMode)
        raise InvalidArgumentError(field="mode", reason=f"must be {names}, not {wish.mode}")
    if wish.prefix and wish.mode != LoadMode.OVERWRITE:
        raise InvalidArgumentError(
            field="prefix", reason="says what is replaced, which only mode OVERWRITE does"
        )
    if len(wish.prefix) > MAX_KEY_BYTES:
        raise InvalidArgumentError(
            field="prefix",
            reason="longer than a key can be",
            limit=MAX_KEY_BYTES,
            actual=len(wish.prefix),
        )
    if wish.timeout_ms and not LOAD_TIMEOUT_MS_MIN <= wish.timeout_ms <= LOAD_TIMEOUT_MS_MAX:
        is_short = wish.timeout_ms < LOAD_TIMEOUT_MS_MIN
        raise InvalidArgumentError(
            field="timeout_ms",
            reason="too short for a job to keep its load open" if is_short else "too long",
            limit=LOAD_TIMEOUT_MS_MIN if is_short else LOAD_TIMEOUT_MS_MAX,
            actual=wish.timeout_ms,
        )


def _check_length(name: str, value: str, chars_max: int, *, required: bool = False) -> None:
    if required and not value:
        raise InvalidArgumentError(field=name, reason="must not be empty")
    if len(value) > chars_max:
        raise InvalidArgumentError(
            field=name, reason="too long", limit=chars_max, actual=len(value)
        )


# --- soft state --------------------------------------------------------------------------------


@dataclass(slots=True)
class _Work:
    """The work on an open load that one leader knows of."""

    touched_at: float
    held: bool = False  # its abort is proposed
    staged: dict[int, tuple[int, int]] = field(default_factory=dict)  # rows, bytes by attempt


class Activity:
    """The work on open loads that jobs report, in one leader's term. Times are float seconds;
    ``now`` is an argument.
    """

    def __init__(self, now: float) -> None:
        self._looked_at = now
        self._works: dict[int, _Work] = {}

    def touch(
        self, load_id: int, now: float, *, attempt: int = 0, rows: int = 0, size_bytes: int = 0
    ) -> None:
        """Note that a job is at work on the load; an attempt has staged so much so far."""
        work = self._works.setdefault(load_id, _Work(touched_at=now))
        work.touched_at = now
        is_room = attempt in work.staged or len(work.staged) < LOAD_ATTEMPTS_MAX
        if (rows or size_bytes) and is_room:
            work.staged[attempt] = rows, size_bytes

    def staged(self, load_id: int) -> tuple[int, int]:
        """Return how many rows and bytes the attempts say they have staged, as far as this leader
        has heard; those of attempts that failed are among them.
        """
        work = self._works.get(load_id)
        sizes = work.staged.values() if work is not None else ()
        return sum(rows for rows, _ in sizes), sum(size for _, size in sizes)

    def idle_s(self, load_id: int, now: float) -> float:
        """Return for how long the load was not touched, as far as this leader knows."""
        work = self._works.get(load_id)
        return max(0.0, now - work.touched_at) if work is not None else 0.0

    def tick(self, now: float, loads: Mapping[int, Load], *, pause_s: float) -> list[Load]:
        """Return the open loads that were not touched for their time, until each is held. For one
        that is seen for the first time it begins now.

        Ticks further apart than ``pause_s`` mean that this process stood still: no task could touch
        anything meanwhile, so that time does not count.
        """
        gap, self._looked_at = now - self._looked_at, now
        if gap > pause_s:
            for work in self._works.values():
                work.touched_at += gap
        opened = {i: load for i, load in loads.items() if load.state is LoadState.OPEN}
        self._works = {i: self._works.get(i) or _Work(touched_at=now) for i in opened}
        return [
            load
            for i, load in opened.items()
            if not self._works[i].held and self.idle_s(i, now) * 1000 >= load.timeout_ms
        ]

    def hold(self, load_id: int) -> None:
        """The load's abort is proposed: ``tick`` does not name it again."""
        if load_id in self._works:
            self._works[load_id].held = True

    def release(self, load_id: int) -> None:
        """The abort was not appended."""
        if load_id in self._works:
            self._works[load_id].held = False
