"""Changes who may do what, while this coordinator leads: decides, proposes, and answers when it is
applied.

From the answer on, a node serves by the state before for a lease at most: each heartbeat that is
acknowledged later brings the new one. A leader before this one may acknowledge heartbeats for
check-quorum after it was deposed, and knows nothing of the change: a new leader answers only then.
"""

from __future__ import annotations

import asyncio
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
from koinon_coordinator.core.decide.access import check_change, refusal
from koinon_coordinator.leader.context import LeaderContext
from koinon_proto.contract.access import AccessState

log = logging.getLogger(__name__)


class AccessChanges:
    """See the module's text. Every method raises NotLeaderError outside the term."""

    def __init__(self, term: LeaderContext, check_quorum_s: float) -> None:
        self._term = term
        self._check_quorum_s = check_quorum_s

    def state(self) -> AccessState:
        """Return all of it, the hashes of secrets included: for nodes and coordinators only."""
        self._term.check_cluster("")
        return self._term.state.access.state

    async def change(self, command: AccessCommand) -> int:
        """Commit the change; return the version of the access state with it.

        Raises:
            InvalidArgumentError, ConditionFailedError: nothing was changed.
            ResourceExhaustedError, UnavailableError: nothing was changed.
            UnknownFateError: it may have been changed, or may be later.
        """
        before = self.state()
        check_change(before, command)
        result = await self._term.committed(command)
        if isinstance(result, AccessChanged):
            alone_at = self._term.began_at + self._check_quorum_s
            await asyncio.sleep(max(0.0, alone_at - self._term.clock()))
            if result.version > before.version:
                log.info(
                    "access changed change=%s name=%s access_version=%d",
                    type(command).__name__,
                    _named(command),
                    result.version,
                )
            return result.version
        reason = result.reason if isinstance(result, Rejected) else Reason.BAD_ACCESS
        raise refusal(self._term.state.access.state, command, reason)


def _named(command: AccessCommand) -> str:
    """Return what a change is about. Its prefixes, which may say much of keys, stay untold."""
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
