"""Checks changes of access against the state, before the leader proposes. Reads only."""

from __future__ import annotations

from koinon_coordinator.core.cluster.access_rules import fault
from koinon_coordinator.core.cluster.commands import AccessCommand, Reason
from koinon_proto.contract.access import AccessState
from koinon_proto.contract.errors import (
    ConditionFailedError,
    InvalidArgumentError,
    KoinonError,
    UnavailableError,
    UnknownKeyspaceError,
)
from koinon_proto.contract.keyspaces import Keyspaces


def check_change(state: AccessState, command: AccessCommand, keyspaces: Keyspaces) -> None:
    """Check that the command can change the state.

    Raises:
        InvalidArgumentError: a field of the command is not valid.
        UnknownKeyspaceError: a grant names a keyspace that was dropped.
        ConditionFailedError: the state has changed since the version that the command names.
    """
    wrong = fault(state, command, keyspaces)
    if wrong is None:
        return
    if wrong.reason is Reason.ACCESS_CHANGED:
        raise ConditionFailedError(expected_version=wrong.limit, current_version=wrong.actual)
    if wrong.reason is Reason.KEYSPACE_UNKNOWN:
        raise UnknownKeyspaceError()
    raise InvalidArgumentError(
        field=wrong.field, reason=wrong.text, limit=wrong.limit, actual=wrong.actual
    )


def refusal(
    state: AccessState, command: AccessCommand, keyspaces: Keyspaces, reason: Reason
) -> KoinonError:
    """Return the typed error for a change that was refused when it was applied."""
    try:
        check_change(state, command, keyspaces)
    except KoinonError as error:
        return error
    return UnavailableError(reason=f"refused, access was changed meanwhile: {reason.value}")
