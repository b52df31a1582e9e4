"""Holds commands of Redis clients while their partition changes its primary.

Many of these clients treat a routing error as final; all of them follow only MOVED. So a planned
hand-over must not show them an error:

    old primary   stops, drains, proposes . . . . sees the row, whose primary serves -> MOVED
    commands      |---------------- are held here ---------------------------------|
    new primary                          sees the row, adopts, serves, says so

A node answers MOVED only once the new primary has reported that it serves: a client that came there
earlier would be held there, or sent back. Commands held longer than ``HOLD_S`` get TRYAGAIN.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from koinon_node.resp.error_replies import ChangingHandsError
from koinon_node.resp.outcomes import Read, Write
from koinon_node.resp.served_keyspace import ServedKeyspace
from koinon_node.state import NodeState, Standing
from koinon_proto.contract.errors import (
    KoinonError,
    LeaseExpiredError,
    NotPrimaryError,
    PartitionOfflineError,
    UnknownKeyspaceError,
)

HOLD_S = 2.0
"""The longest time that a command is held, in seconds; a hand-over takes some tens of ms."""
_POLL_S = 0.005
_OF_HAND_OVERS = (NotPrimaryError, PartitionOfflineError, LeaseExpiredError)
W = TypeVar("W", Read, Write)
T = TypeVar("T")


class HandOverWaits:
    """Holds commands while their partitions change primaries. Belongs to the event loop."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._polls: dict[
            int, asyncio.Task[None]
        ] = {}  # by partition: one poll serves all commands that wait

    def is_held(self, answer: bytes | KoinonError, partition_id: int) -> bool:
        """Return whether the command had no effect and its answer will soon change, because the
        partition changes its primary.
        """
        if isinstance(answer, NotPrimaryError):
            return self._state.standing(partition_id) in (Standing.HERE, Standing.CHANGING)
        is_one = isinstance(answer, _OF_HAND_OVERS)
        return is_one and self._state.standing(partition_id) is not Standing.NOWHERE

    def holds(
        self, served: ServedKeyspace, work: Read | Write, answer: bytes | KoinonError
    ) -> bool:
        """Return whether a command with this answer should be held."""
        if work.fails_at_once or not isinstance(answer, _OF_HAND_OVERS):
            return False
        try:
            return self.is_held(answer, _partition_of(served, work))
        except UnknownKeyspaceError:  # the keyspace was dropped meanwhile
            return False

    async def answered(
        self,
        served: ServedKeyspace,
        works: Sequence[W],
        answers: list[bytes | KoinonError],
        again: Callable[[ServedKeyspace, Sequence[W]], Awaitable[list[bytes | KoinonError]]],
    ) -> list[bytes | KoinonError]:
        """Return the answers to these commands. Held commands are executed by ``again``, in their
        order, once their partitions have settled.
        """
        until = asyncio.get_running_loop().time() + HOLD_S
        left = list(range(len(works)))
        while left := [at for at in left if self.holds(served, works[at], answers[at])]:
            if asyncio.get_running_loop().time() >= until:
                for at in left:
                    answers[at] = _took_too_long(answers[at])
                break
            await self._until_settled(_partition_of(served, works[left[0]]))
            newer = await again(served, [works[at] for at in left])
            for at, answer in zip(left, newer, strict=True):
                answers[at] = answer
        return answers

    async def result(self, partition_id: int, once: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``once``, which is called again after the partition has changed its
        primary.

        Raises:
            ChangingHandsError: the change took too long.
            KoinonError: ``once`` raised it.
        """
        until = asyncio.get_running_loop().time() + HOLD_S
        while True:
            try:
                return await once()
            except KoinonError as error:
                if not self.is_held(error, partition_id):
                    raise
                if asyncio.get_running_loop().time() >= until:
                    raise _took_too_long(error) from error
            await self._until_settled(partition_id)

    async def _until_settled(self, partition_id: int) -> None:
        """Wait until a node serves the partition, at most ``HOLD_S``."""
        poll = self._polls.get(partition_id)
        if poll is None:
            poll = self._polls[partition_id] = asyncio.create_task(self._poll(partition_id))
        await asyncio.shield(poll)

    async def _poll(self, partition_id: int) -> None:
        try:
            for _ in range(int(HOLD_S / _POLL_S)):
                await asyncio.sleep(_POLL_S)
                if self._state.standing(partition_id) is not Standing.CHANGING:
                    break
        finally:
            del self._polls[partition_id]

    def close(self) -> None:
        """Cancel the polls."""
        for poll in self._polls.values():
            poll.cancel()


def _partition_of(served: ServedKeyspace, work: Read | Write) -> int:
    """Return the partition of a command's keys, which all lie in one."""
    key = work.keys[0] if isinstance(work, Read) else work.rows[0].key
    return served.partitioner().partition_of(key)


def _took_too_long(error: bytes | KoinonError) -> ChangingHandsError:
    assert isinstance(error, KoinonError)
    given_up = ChangingHandsError(reason=str(error))
    given_up.__cause__ = error
    return given_up
