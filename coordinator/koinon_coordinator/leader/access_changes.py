"""Changes users, roles and tokens while this coordinator leads: decides, proposes, and answers once
the change is in force (``change_barrier``).
"""

from __future__ import annotations

import logging

from koinon_coordinator.core.cluster.commands import (
    AccessChanged,
    AccessCommand,
    AddToken,
    DropRole,
    DropToken,
    DropUser,
    PutRole,
    PutUser,
    Reason,
    Rejected,
    RestoreCertificate,
    RevokeCertificate,
)
from koinon_coordinator.core.decide.access_requests import check_change, refusal
from koinon_coordinator.core.decide.sessions import SessionTimes
from koinon_coordinator.leader.change_barrier import Behind, ChangeBarrier, in_force
from koinon_coordinator.leader.context import LeaderContext
from koinon_proto.contract.access import AccessState

log = logging.getLogger(__name__)


class AccessChanges:
    """Changes users, roles and tokens, during one term.

    Every method raises NotLeaderError outside the term.
    """

    def __init__(self, term: LeaderContext, times: SessionTimes, behind: Behind) -> None:
        self._term = term
        self._times = times
        self._behind = behind

    def state(self) -> AccessState:
        """Return the whole state, including hashes of secrets: for nodes and coordinators only."""
        self._term.check_cluster("")
        return self._term.state.access.state

    async def change(self, command: AccessCommand, wait_s: float = float("inf")) -> ChangeBarrier:
        """Commit the change, and wait until it is in force, for at most ``wait_s``. A change
        without an effect waits as well: it may repeat a change whose answer was lost.

        Raises:
            InvalidArgumentError, ConditionFailedError, UnknownKeyspaceError: nothing was changed.
            ResourceExhaustedError, UnavailableError: nothing was changed.
            UnknownFateError: the change may be committed, now or later.
        """
        before = self.state()
        check_change(before, command, self._term.state.keyspaces)
        result = await self._term.committed(command)
        if isinstance(result, AccessChanged):
            if result.version > before.version:
                log.info(
                    "access changed change=%s name=%s access_version=%d",
                    type(command).__name__,
                    _named(command),
                    result.version,
                )
            return await in_force(
                self._term,
                self._times,
                self._behind,
                version=result.version,
                wait_s=wait_s,
                what="access",
            )
        reason = result.reason if isinstance(result, Rejected) else Reason.BAD_ACCESS
        state = self._term.state
        raise refusal(state.access.state, command, state.keyspaces, reason)


def _named(command: AccessCommand) -> str:
    """Return the name of the changed object, for the log. Prefixes are left out, since they may
    reveal keys.
    """
    match command:
        case PutRole(role=role):
            return role.name
        case PutUser(user=user):
            return user.name
        case AddToken(token=token):
            return f"{token.id} of {token.user}"
        case DropRole(name=name) | DropUser(name=name):
            return name
        case DropToken(token_id=token_id):
            return token_id
        case RevokeCertificate(serial=serial) | RestoreCertificate(serial=serial):
            return serial
