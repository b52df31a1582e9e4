"""Creates, alters and drops keyspaces while this coordinator leads, and forgets dropped keyspaces
that all nodes have erased. A change is answered once it is in force (``change_barrier``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from koinon_coordinator.core.cluster.commands import (
    AlterKeyspace,
    CreateKeyspace,
    DropKeyspace,
    KeyspaceChanged,
    Reason,
    Rejected,
)
from koinon_coordinator.core.decide.keyspace_requests import (
    Alteration,
    decide_alteration,
    decide_creation,
    decide_drop,
    decide_forgetting,
    refusal,
)
from koinon_coordinator.core.decide.sessions import SessionTimes
from koinon_coordinator.leader.change_barrier import Behind, ChangeBarrier, in_force
from koinon_coordinator.leader.context import LeaderContext
from koinon_proto.contract.keyspaces import Keyspace
from koinon_proto.contract.table import NodeNumber

log = logging.getLogger(__name__)

CREATE_ATTEMPTS_MAX = 4  # while nodes change and other keyspaces are created


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyspaceMade:
    """A keyspace after a change, and whether the change is in force."""

    keyspace: Keyspace
    in_force: ChangeBarrier


class KeyspaceChanges:
    """Creates, alters and drops keyspaces, during one term.

    Every method raises NotLeaderError outside the term; those that propose also
    ResourceExhaustedError, UnavailableError (nothing was changed), UnknownFateError.
    """

    def __init__(
        self,
        term: LeaderContext,
        times: SessionTimes,
        behind: Behind,
        has_erased: Callable[[NodeNumber, int], bool],
    ) -> None:
        self._term = term
        self._times = times
        self._behind = behind
        self._has_erased = has_erased
        self._is_forgetting = False  # whether ForgetKeyspace is proposed

    async def create(self, wanted: Keyspace, wait_s: float) -> KeyspaceMade:
        """Create a keyspace. An existing keyspace with the wanted settings is returned likewise.

        Raises:
            ClusterNotReadyError, InvalidArgumentError, ConfigurationError, KeyspaceChangeError.
        """
        self._term.check_cluster("")
        attempts = 0
        while not isinstance(decided := decide_creation(self._term.state, wanted), Keyspace):
            attempts += 1
            result = await self._term.committed(decided)
            if isinstance(result, KeyspaceChanged) or attempts >= CREATE_ATTEMPTS_MAX:
                return await self._done(decided, result, wait_s, "created")
        return await self._made(decided, wait_s)

    async def alter(self, name: str, change: Alteration, wait_s: float) -> KeyspaceMade:
        """Change the given settings.

        Raises:
            ClusterNotReadyError, InvalidArgumentError, UnknownKeyspaceError.
        """
        self._term.check_cluster("")
        decided = await self._term.decided(
            lambda: decide_alteration(self._term.state, name, change)
        )
        return await self._done(*decided, wait_s, "altered")

    async def drop(self, name: str, keyspace_id: int, wait_s: float) -> KeyspaceMade:
        """Drop a keyspace with all its records.

        Raises:
            ClusterNotReadyError, UnknownKeyspaceError, KeyspaceChangeError.
        """
        self._term.check_cluster("")
        command = decide_drop(self._term.state, name, keyspace_id)
        return await self._done(command, await self._term.committed(command), wait_s, "dropped")

    def tick(self) -> None:
        """Forget a dropped keyspace that all nodes have erased."""
        state = self._term.state
        if self._is_forgetting or not state.bootstrapped or not state.keyspaces.dropping:
            return
        command = decide_forgetting(state, self._has_erased)
        if command is not None:
            self._is_forgetting = True
            self._term.spawn(self._forget(command.keyspace_id))

    async def _forget(self, keyspace_id: int) -> None:
        try:
            command = decide_forgetting(self._term.state, self._has_erased)
            if command is not None:
                await self._term.propose(command)
                log.info("keyspace erased everywhere keyspace_id=%d", keyspace_id)
        finally:
            self._is_forgetting = False

    async def _done(
        self,
        command: CreateKeyspace | AlterKeyspace | DropKeyspace,
        result: object,
        wait_s: float,
        done: str,
    ) -> KeyspaceMade:
        if not isinstance(result, KeyspaceChanged):
            reason = result.reason if isinstance(result, Rejected) else Reason.BAD_VALUE
            name = "" if isinstance(command, DropKeyspace) else command.keyspace.name
            raise refusal(reason, name)
        keyspace = self._term.state.keyspaces.by_id(result.keyspace_id)
        if keyspace is None:  # dropped, and forgotten since
            raise refusal(Reason.KEYSPACE_UNKNOWN, "")
        log.info(
            "keyspace changed keyspace=%s done=%s keyspace_id=%d first=%d last=%d",
            keyspace.name,
            done,
            keyspace.keyspace_id,
            keyspace.base,
            keyspace.partition_ids[-1],
        )
        return await self._made(keyspace, wait_s)

    async def _made(self, keyspace: Keyspace, wait_s: float) -> KeyspaceMade:
        return KeyspaceMade(
            keyspace=keyspace,
            in_force=await in_force(
                self._term,
                self._times,
                self._behind,
                version=self._term.state.table_version,
                wait_s=wait_s,
                what="keyspaces",
            ),
        )
