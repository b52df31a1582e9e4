"""Decides on bulk loads by the state, before the leader proposes; keeps soft state of open loads:
when tasks last worked on them, and how much they have staged. Pure.

``core/cluster/load_rules.py`` has the effects of commands; this module chooses the command, or
raises a typed error. The idle time of a load is soft state: the leader counts it from the last
report or from its own beginning, without the time in which its process was paused.
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
"""A command to propose, or the answer if nothing has to change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadWish:
    """A request to open a load; ``timeout_ms`` 0: the default. ``owner``: the caller."""

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
    """Return the command that opens the load, or the existing load.

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
    """Return the command that commits the load, or the outcome of an earlier commit.

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
    """Return the command that aborts the load, or the outcome of an earlier abort.

    Raises:
        ClusterNotReadyError
        LoadClosedError: the load is committed, or unknown.
    """
    command = AbortLoad(load_id=load_id, reason=printable(reason)[:LOAD_TEXT_CHARS_MAX])
    check_bootstrapped(state)
    return _judged(state, command)


def decide_merged(
    state: ClusterState, load_id: int, partition_ids: Iterable[int], reporter: str = ""
) -> Decision:
    """Return the command that records merged partitions, or the load's state if nothing is new
    (UNKNOWN for a forgotten load). If the ``reporter`` is known, only partitions that it leads
    count: the primaries of the others report those.

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
    """Return the load if it is in the wanted state.

    Raises:
        LoadClosedError: the load is in another state, or unknown.
    """
    load = state.loads.get(load_id)
    if load is None or load.state is not wanted:
        raise closed(load_id, load)
    return load


def refusal(reason: Reason, command: LoadCommand, state: ClusterState) -> KoinonError:
    """Return the typed error for a rejected command, before or after it was proposed."""
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
    """Return the error with the load's state."""
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
    """Return the command if it would have an effect, else its outcome; raise if it is rejected."""
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
    """A leader's knowledge of the work on an open load."""

    touched_at: float
    held: bool = False  # an abort of the load is proposed
    staged: dict[int, tuple[int, int]] = field(default_factory=dict)  # rows, bytes by attempt


class Activity:
    """The reports of work on open loads, in one leader's term. Times are float seconds; ``now`` is
    an argument.
    """

    def __init__(self, now: float) -> None:
        self._looked_at = now
        self._works: dict[int, _Work] = {}

    def touch(
        self, load_id: int, now: float, *, attempt: int = 0, rows: int = 0, size_bytes: int = 0
    ) -> None:
        """Note that a job works on the load, and how much an attempt has staged so far."""
        work = self._works.setdefault(load_id, _Work(touched_at=now))
        work.touched_at = now
        is_room = attempt in work.staged or len(work.staged) < LOAD_ATTEMPTS_MAX
        if (rows or size_bytes) and is_room:
            work.staged[attempt] = rows, size_bytes

    def staged(self, load_id: int) -> tuple[int, int]:
        """Return the rows and bytes that the attempts have reported as staged to this leader,
        including failed attempts.
        """
        work = self._works.get(load_id)
        sizes = work.staged.values() if work is not None else ()
        return sum(rows for rows, _ in sizes), sum(size for _, size in sizes)

    def idle_s(self, load_id: int, now: float) -> float:
        """Return the seconds since the load was last touched, by this leader's knowledge."""
        work = self._works.get(load_id)
        return max(0.0, now - work.touched_at) if work is not None else 0.0

    def tick(self, now: float, loads: Mapping[int, Load], *, pause_s: float) -> list[Load]:
        """Return the open loads that were not touched within their timeout, until each is held. The
        timeout of a load that is new to this leader begins now.

        Ticks further apart than ``pause_s`` mean that this process was paused: no task could touch
        a load meanwhile, so that time does not count.
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
        """Note that the load's abort is proposed: ``tick`` does not return the load again."""
        if load_id in self._works:
            self._works[load_id].held = True

    def release(self, load_id: int) -> None:
        """Note that the abort was not appended to the log."""
        if load_id in self._works:
            self._works[load_id].held = False
