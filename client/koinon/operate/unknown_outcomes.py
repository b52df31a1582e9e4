"""The possible effects of a call to the coordinators' leader that got no answer, by method."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from koinon_proto.contract.errors import KoinonError, UnavailableError, UnknownFateError
from koinon_proto.contract.leader_search import Repeat


@dataclass(kw_only=True, eq=False)
class ChangeFateError(UnknownFateError):
    """A change of the cluster was requested, and no answer came: it may have been made.

    ``effect`` is a clause that says what may have happened; ``shown_by`` is the command that shows
    whether it did; ``repeatable``: repeating the change does no harm.
    """

    template: ClassVar[str] = "{e.effect}: {e.reason}{e.request}"

    effect: str
    shown_by: str
    repeatable: bool


EFFECTS = {
    "AddCoordinator": ("the coordinator may have been added", "koinon admin coordinators"),
    "RemoveCoordinator": ("the coordinator may have been removed", "koinon admin coordinators"),
    "TransferLeadership": ("another coordinator may lead by now", "koinon admin coordinators"),
    "ExecutePlan": ("the moves of the plan may have been queued", "koinon admin moves"),
    "CancelMoves": ("moves may have been dropped or turned back", "koinon admin moves"),
    "SetMoves": ("the settings of moves may have been changed", "koinon admin moves"),
    "SetNodeStatus": ("the node's status may have been changed", "koinon admin nodes"),
    "RestorePrimaries": ("primaries may be changing", "koinon admin status"),
    "ForcePrimaries": (
        "partitions may have been given to other primaries",
        "koinon admin partitions",
    ),
    "CreateKeyspace": ("the keyspace may have been created", "koinon admin keyspaces"),
    "AlterKeyspace": ("the keyspace may have been altered", "koinon admin keyspaces"),
    "DropKeyspace": ("the keyspace may have been dropped", "koinon admin keyspaces"),
    "ChangeAccess": (
        "users, roles or tokens may have been changed",
        "koinon admin users, roles or tokens",
    ),
    "RaiseGeneration": ("the group's grants may have been made void", "koinon admin groups"),
    "DeleteGroup": ("the group may have been deleted", "koinon admin groups"),
    "OpenLoad": ("the load may have been opened", "koinon admin loads"),
    "TouchLoad": ("the load may have been kept alive", "koinon admin loads"),
    "CommitLoad": ("the load may have been committed", "koinon admin loads"),
    "AbortLoad": ("the load may have been aborted", "koinon admin loads"),
}
"""By method: the possible effect of a call without an answer, and the command that shows it."""
QUESTIONS = ("PlanMoves", "GetMoves", "GetAccess")
"""Methods that an operator may take for changes. GetLoads is none: jobs call it after a change."""
JOBS_CHANGES = ("OpenLoad", "TouchLoad", "CommitLoad", "AbortLoad")
"""Changes that jobs repeat by themselves: an earlier call may already have made one."""


def told(error: KoinonError, method: str, repeat: Repeat) -> KoinonError:
    """Convert the error of a call of the leader's ``method`` for operators.

    The error of a query, or of a change that no leader accepted, says that nothing was changed. A
    change whose answer was lost becomes a ChangeFateError: its possible effect, and the command
    that shows whether it took place.
    """
    never_taken = method in EFFECTS and method not in JOBS_CHANGES
    if (method in QUESTIONS or never_taken) and isinstance(error, UnavailableError):
        return replace(error, reason=f"{error.reason}; nothing was changed")
    if isinstance(error, UnknownFateError):
        effect, shown_by = EFFECTS[method]
        return ChangeFateError(
            reason=error.reason,
            effect=effect,
            shown_by=shown_by,
            repeatable=repeat is Repeat.CHANGE,
        )
    return error
