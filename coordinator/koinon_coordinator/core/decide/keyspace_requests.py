"""Decides on keyspaces by the state, before the leader proposes: their settings, the placement of a
new one's partitions, and when a dropped one is forgotten. Decisions only read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

from koinon_coordinator.core.cluster.commands import (
    AlterKeyspace,
    CreateKeyspace,
    DropKeyspace,
    ForgetKeyspace,
    Reason,
)
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_coordinator.core.decide.admin_requests import REPLICATION_FACTOR_MAX, check_bootstrapped
from koinon_coordinator.core.decide.registrations import check_printable
from koinon_coordinator.core.planning.initial_placement import place
from koinon_proto.contract.cluster_errors import KeyspaceChangeError
from koinon_proto.contract.errors import (
    InvalidArgumentError,
    KoinonError,
    UnavailableError,
    UnknownKeyspaceError,
)
from koinon_proto.contract.keyspaces import (
    DEFAULT_ID,
    KEYSPACES_MAX,
    NAME_CHARS_MAX,
    QUOTA_MAX,
    Keyspace,
    check_keyspace_name,
    half_of,
)
from koinon_proto.contract.table import (
    MAX_BATCH_BYTES,
    MAX_PARTITION_COUNT,
    MAX_TTL_MS,
    NodeNumber,
    partition_count_fault,
)
from koinon_proto.partitioner import check_new, partitioner

PARTITION_COUNT = 64
"""The default of a keyspace: for a cluster of a few nodes with a few hundred keyspaces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alteration:
    """The new settings of a keyspace; None: unchanged."""

    min_in_sync: int | None = None
    max_value_bytes: int | None = None
    pool: str | None = None
    default_ttl_ms: int | None = None
    max_ttl_ms: int | None = None
    max_rows_per_s: int | None = None
    max_bytes_per_s: int | None = None


def decide_creation(state: ClusterState, wanted: Keyspace) -> CreateKeyspace | Keyspace:
    """Return the command that creates the keyspace, or the existing equal keyspace. Fields of
    ``wanted`` that are 0 or "" get defaults; its id, base, first epoch and fingerprint are ignored.

    Raises:
        ClusterNotReadyError, InvalidArgumentError, ConfigurationError
        KeyspaceChangeError: another keyspace has the name, or partition ids or nodes are lacking.
    """
    config = check_bootstrapped(state)
    check_keyspace_name(wanted.name)
    default = state.keyspaces.default
    known = partitioner(wanted.partitioner or default.partitioner.partition("(")[0], 1)
    factor = wanted.replication_factor or default.replication_factor
    keyspace = replace(
        wanted,
        keyspace_id=DEFAULT_ID,
        base=0,
        partition_count=wanted.partition_count or PARTITION_COUNT,
        partitioner=known.name,
        partitioner_fingerprint=known.fingerprint,
        replication_factor=factor,
        min_in_sync=wanted.min_in_sync or half_of(factor),
        max_value_bytes=wanted.max_value_bytes or config.max_value_bytes,
        is_dropping=False,
        first_epoch=0,
    )
    _check(keyspace)
    there = state.keyspaces.get(keyspace.name)
    if there is not None:
        return _as_wanted(there, keyspace)
    check_new(known)
    if len(state.keyspaces.all) > KEYSPACES_MAX:
        raise KeyspaceChangeError(reason=f"there are {KEYSPACES_MAX} keyspaces: drop one first")
    racks = _racks(state, keyspace)
    base = state.keyspaces.free_base(keyspace.partition_count, MAX_PARTITION_COUNT)
    if base is None:
        raise KeyspaceChangeError(
            reason=f"no {keyspace.partition_count} of the {MAX_PARTITION_COUNT} partitions that a "
            "cluster may have are free in a row: drop a keyspace, or ask for fewer partitions"
        )
    return CreateKeyspace(
        keyspace=replace(keyspace, base=base),
        replicas=place(
            racks,
            partition_count=keyspace.partition_count,
            replication_factor=factor,
            start_index=base,  # so that the rounding of different keyspaces hits different nodes
        ),
    )


def _as_wanted(there: Keyspace, wanted: Keyspace) -> Keyspace:
    """Return the existing keyspace if it has the wanted settings, else raise."""
    own = {name: getattr(there, name) for name in ("keyspace_id", "base", "first_epoch")}
    alike = replace(wanted, **own)
    if there == alike:
        return there
    differing = [f.name for f in fields(there) if getattr(there, f.name) != getattr(alike, f.name)]
    raise KeyspaceChangeError(
        reason=f"keyspace {there.name!r} is there already, with another {', '.join(differing)}"
    )


def _racks(state: ClusterState, keyspace: Keyspace) -> Mapping[NodeNumber, str]:
    """Return the racks of the nodes on which the keyspace's replicas are placed."""
    nodes = [
        record.info
        for record in state.live_nodes
        if not record.draining and record.info.pool == keyspace.pool
    ]
    if len(nodes) < keyspace.replication_factor:
        pools = sorted({record.info.pool for record in state.live_nodes})
        where = (
            f"in pool {keyspace.pool!r}" if keyspace.pool or len(pools) > 1 else "in the cluster"
        )
        raise KeyspaceChangeError(
            reason=f"{keyspace.replication_factor} replicas need as many live nodes that take any, "
            f"and there are {len(nodes)} {where}; live nodes are in "
            f"{', '.join(map(repr, pools)) or 'none'}"
        )
    return {info.number: info.rack for info in nodes}


def decide_alteration(state: ClusterState, name: str, change: Alteration) -> AlterKeyspace:
    """Return the command that alters the keyspace.

    Raises:
        ClusterNotReadyError, InvalidArgumentError, UnknownKeyspaceError.
    """
    check_bootstrapped(state)
    _check_named(name)
    given = {
        field.name: value
        for field in fields(change)
        if (value := getattr(change, field.name)) is not None
    }
    after = replace(state.keyspaces.named(name), **given)
    _check(after)
    return AlterKeyspace(keyspace=after)


def decide_drop(state: ClusterState, name: str, keyspace_id: int) -> DropKeyspace:
    """Return the command that drops the keyspace; a request with the id may be repeated.

    Raises:
        ClusterNotReadyError, InvalidArgumentError
        UnknownKeyspaceError: no keyspace has this name (and this id, unless it is 0).
        KeyspaceChangeError: the keyspace is ``default``.
    """
    check_bootstrapped(state)
    _check_named(name)
    gone = state.keyspaces.by_id(keyspace_id) if keyspace_id else None
    if gone is not None and gone.is_dropping and gone.name == name:
        return DropKeyspace(keyspace_id=gone.keyspace_id)
    keyspace = state.keyspaces.named(name)
    if keyspace is state.keyspaces.default:
        raise KeyspaceChangeError(reason="the keyspace 'default' cannot be dropped")
    if keyspace_id not in (DEFAULT_ID, keyspace.keyspace_id):
        raise UnknownKeyspaceError(keyspace=name)
    return DropKeyspace(keyspace_id=keyspace.keyspace_id)


def _check_named(name: str) -> None:
    """Raise InvalidArgumentError if no keyspace is named: a change has no default keyspace."""
    if not name:
        raise InvalidArgumentError(field="name", reason="must not be empty")


def decide_forgetting(
    state: ClusterState, erased: Callable[[NodeNumber, int], bool]
) -> ForgetKeyspace | None:
    """Return the command that frees the partitions of a dropped keyspace without data on any node.

    ``erased(node, keyspace_id)``: whether the node's present process has reported that it holds
    none. A node that is down may hold some, and blocks the command until it has left the cluster
    for good.
    """
    members = [record.info.number for record in state.nodes if not record.left]
    for keyspace in state.keyspaces.dropping:
        if all(erased(number, keyspace.keyspace_id) for number in members):
            return ForgetKeyspace(keyspace_id=keyspace.keyspace_id)
    return None


def refusal(reason: Reason, name: str) -> KoinonError:
    """Return the typed error for a command that was refused when it was applied."""
    if reason is Reason.KEYSPACE_UNKNOWN:
        return UnknownKeyspaceError(keyspace=name)
    if reason is Reason.KEYSPACE_LOADING:
        return KeyspaceChangeError(
            reason=f"{reason.value}: wait for it, or abort it (koinon admin loads shows it)"
        )
    if reason is Reason.BAD_VALUE:
        return InvalidArgumentError(field="keyspace", reason=reason.value)
    return UnavailableError(reason=f"refused, the cluster has changed: {reason.value}")


# --- settings ----------------------------------------------------------------------------------


def _check(keyspace: Keyspace) -> None:
    """Raise InvalidArgumentError for settings that no keyspace can have."""
    fault = partition_count_fault(keyspace.partitioner, keyspace.partition_count)
    if fault:
        raise InvalidArgumentError(
            field="partition_count", reason=f"{keyspace.partition_count} {fault}"
        )
    _check_range("replication_factor", keyspace.replication_factor, 1, REPLICATION_FACTOR_MAX)
    _check_range("min_in_sync", keyspace.min_in_sync, 1, keyspace.replication_factor)
    _check_range("max_value_bytes", keyspace.max_value_bytes, 1, MAX_BATCH_BYTES // 2)
    longest_ms = keyspace.max_ttl_ms or MAX_TTL_MS
    _check_range("max_ttl_ms", keyspace.max_ttl_ms, 0, MAX_TTL_MS)
    _check_range("default_ttl_ms", keyspace.default_ttl_ms, 0, longest_ms)
    _check_range("max_rows_per_s", keyspace.max_rows_per_s, 0, QUOTA_MAX)
    _check_range("max_bytes_per_s", keyspace.max_bytes_per_s, 0, QUOTA_MAX)
    if len(keyspace.pool) > NAME_CHARS_MAX:
        raise InvalidArgumentError(
            field="pool", reason="too long", limit=NAME_CHARS_MAX, actual=len(keyspace.pool)
        )
    check_printable("pool", keyspace.pool)


def _check_range(field: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidArgumentError(
            field=field, reason=f"must be from {least} to {most}", limit=most, actual=value
        )
