"""The context of one term, shared by all parts of a leadership: the state, the clock, proposals,
and tasks that end with the term.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, Protocol, TypeVar, cast

from koinon_coordinator.core.cluster.commands import Command, Result
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_coordinator.state_machine import ReplicatedState
from koinon_coordinator.wire.state_codec import command_to_bytes
from koinon_proto.contract.cluster_errors import NotLeaderError
from koinon_proto.contract.errors import (
    InvalidArgumentError,
    KoinonError,
    ResourceExhaustedError,
    UnavailableError,
    UnknownFateError,
)
from koinon_proto.contract.table import ClusterConfig, NodeId, NodeNumber
from koinon_proto.process.clock import boottime

log = logging.getLogger(__name__)

NEVER_APPENDED = (NotLeaderError, ResourceExhaustedError, UnavailableError, InvalidArgumentError)
"""The errors of ``propose`` for a command that is in no member's log and never will be."""
T = TypeVar("T")
C = TypeVar("C", bound=Command)


class Group(Protocol):
    """The part of the Raft member that a leader needs."""

    async def propose(self, command: bytes) -> object: ...

    async def read_barrier(self) -> int: ...

    def quorum_contact_at(self) -> float | None: ...


class LeaderContext:
    """One term's leader, for its parts. ``is_open`` from the creation of the cluster to the end of
    the term.
    """

    def __init__(
        self,
        *,
        number: int,
        group: Group,
        replicated: ReplicatedState,
        clock: Callable[[], float] = boottime,
        random: Random,
    ) -> None:
        self.number = number  # of the Raft term
        self.group = group
        self.replicated = replicated
        self.clock = clock
        self.random = random
        self.began_at = clock()  # monotonic seconds
        self.is_open = False  # set by Leadership.run, cleared by ``end``
        self._computing = asyncio.Lock()  # one computation in a thread at a time
        self._in_turn = asyncio.Lock()  # serializes ``decided``
        self._tasks: set[asyncio.Task[Any]] = set()  # unfinished; cancelled with the term

    @property
    def state(self) -> ClusterState:
        return self.replicated.state

    def check_cluster(self, cluster_id: str) -> ClusterConfig:
        """Return the configuration; refuse callers of another cluster, and all before the cluster
        exists.

        Raises:
            NotLeaderError, WrongClusterError.
        """
        config = self.state.config
        if config is None or not self.is_open:
            raise self.not_leader()
        config.check_id(cluster_id)
        return config

    async def caught_up(self) -> None:
        """Return once every command committed before this call is applied here: a thing that the
        state lacks then was never committed.

        Raises:
            NotLeaderError, ResourceExhaustedError, UnavailableError.
        """
        try:
            await self.group.read_barrier()
        except UnavailableError as error:
            raise UnavailableError(reason=str(error)) from error
        if not self.is_open:
            raise self.not_leader()

    async def propose(self, command: Command) -> Result:
        """Propose a command; return its result once it is applied here.

        Raises:
            NEVER_APPENDED: the command is in no member's log.
            UnknownFateError: the command may be applied, by this leader or a later one.
        """
        return cast(Result, await self.group.propose(command_to_bytes(command)))

    async def committed(self, command: Command) -> Result:
        """Propose a command in a task of the term, so that a cancelled caller leaves nothing
        half-done. All its errors have a wire form.
        """
        return await self._shielded(self.propose(command))

    async def decided(self, decide: Callable[[], C]) -> tuple[C, Result]:
        """Decide on and commit a command that replaces a value of the state. These commands run one
        at a time, from the decision to the application: otherwise a command could undo another
        one's change. Return the command, too.
        """

        async def decide_and_propose() -> tuple[C, Result]:
            async with self._in_turn:
                command = decide()
                return command, await self.propose(command)

        return await self._shielded(decide_and_propose())

    async def _shielded(self, proposing: Coroutine[Any, Any, T]) -> T:
        task = self.spawn(proposing)
        try:
            return await asyncio.shield(task)
        except UnavailableError as error:
            raise UnavailableError(reason=str(error)) from error
        except asyncio.CancelledError:
            if task.cancelled():
                raise UnknownFateError(reason="leadership ended meanwhile") from None
            raise

    async def outcome(self, task: asyncio.Task[T]) -> T:
        """Wait for work of this term. A cancelled caller does not cancel the work.

        Raises:
            NotLeaderError: the term ended first; it is unknown whether the work took effect.
        """
        try:
            return await asyncio.shield(task)
        except (UnknownFateError, UnavailableError) as error:
            raise self.not_leader() from error
        except asyncio.CancelledError:
            if task.cancelled():
                raise self.not_leader() from None
            raise

    async def computed(self, work: Callable[[], T]) -> T:
        """Run work in a thread that may take longer than a leader may be silent, one at a time;
        return its result. It must not read anything that changes meanwhile.
        """

        async def compute() -> T:
            async with self._computing:
                return await asyncio.to_thread(work)

        return await asyncio.shield(self.spawn(compute()))  # a thread cannot be cancelled

    def not_leader(self) -> NotLeaderError:
        return NotLeaderError(leader_id="", leader_address="", term=self.number)

    def node_name(self, number: NodeNumber) -> NodeId | NodeNumber:
        """The node's id, for logs."""
        record = self.state.node(number)
        return record.info.node_id if record is not None else number

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run the work in a task that ends with the term."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    async def end(self) -> None:
        """Close the term and cancel its tasks."""
        self.is_open = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, KoinonError):
            log.error("background work failed term=%d", self.number, exc_info=error)
