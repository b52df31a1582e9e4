"""Consumer groups as programs use them, for the blocking and the asyncio client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Self, TypedDict

from koinon.core.atomic import PartitionOperations
from koinon.core.feeds import Change, FeedPart
from koinon.core.group_options import GroupOptions, Start, Strategy
from koinon.core.groups import KeyspaceChanges, OwnershipChange, split
from koinon.driver.batch import BatchBuilder
from koinon.driver.client_api import awaitable
from koinon.driver.group_consumer import GroupConsumer, as_stale
from koinon_proto.contract.errors import (
    ClientClosedError,
    InvalidArgumentError,
    UnknownKeyspaceError,
)
from koinon_proto.contract.groups import GROUP_SESSION_MS
from koinon_proto.contract.table import MAX_ATOMIC_OPERATIONS


class Changes:
    """Changes of one keyspace, as columns: entry i of each column belongs to change i. Iterating
    yields single changes.
    """

    def __init__(self, group: Any, read: KeyspaceChanges, parts: Sequence[FeedPart]) -> None:
        rows = slice(parts[0].start, parts[-1].end) if parts else slice(0, 0)
        self._group = group
        self._read = read
        self._parts = parts
        self.keyspace: str = read.target.name
        self.keys = read.batch.keys[rows]
        self.values = read.batch.values[rows]
        """None for a key that was deleted or has expired."""
        self.versions = read.batch.versions[rows]
        self.expires_at_ms = read.batch.expires_at_ms[rows]

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[Change]:
        return map(Change, self.keys, self.values, self.versions, self.expires_at_ms)

    def commit(self, *, timeout_ms: int | None = None) -> None:
        """Commit the positions after these changes: the next owner of the partitions begins there.

        May be repeated.

        Raises:
            StaleGenerationError: a partition has another owner now, or its keyspace was dropped,
                and its position was not committed; the other positions were. Continue with the
                next batch.
            UnavailableError: the deadline passed.
        """
        changed = {part.partition_id for part in self._parts if part.rows}
        positions = {
            part.partition_id: (self._read.generations[part.partition_id], part.after)
            for part in self._parts
            if part.partition_id in changed
        }
        result: None = self._group._run(
            self._group._consumer.commit(positions, timeout_ms) if positions else _nothing()
        )
        return result


async def _nothing() -> None:
    """Commit no position."""


class PartBatch(BatchBuilder):
    """An atomic batch of operations on keys in the changes' own partition and keyspace, which also
    commits the position after the changes; see :class:`BatchBuilder`. The keys need not have the
    same routing bytes.
    """

    def __init__(self, part: GroupPart) -> None:
        target, group = part._read.target, part._group
        self._part = part
        self._client = group._client
        try:
            limit = target.settings(self._client._engine.routing()).max_value_bytes
        except UnknownKeyspaceError as error:
            generation = part._read.generations[part.partition_id]
            raise as_stale(error, part.partition_id, generation) from None
        self._operations = PartitionOperations(part.partition_id, target.partitioner, limit)

    def commit(self, *, timeout_ms: int | None = None) -> None:
        """Write the operations and the position in one step, or nothing.

        After UnknownFateError the same part may be committed again: it is applied once.

        Raises:
            StaleGenerationError: the partition has another owner now. Nothing was written.
            CursorMovedError: a later position was committed before. Nothing was written.
            CheckFailedError: a check did not hold. Nothing was written.
            NotANumberError, NumberOverflowError: an increment failed. Nothing was written.
            UnknownFateError: no reply came within the deadline.
            UnavailableError: the deadline passed; nothing was written.
        """
        part, group = self._part, self._part._group
        assert isinstance(self._operations, PartitionOperations)
        row = part._read.generations[part.partition_id], part._parts[-1].after
        result: None = group._run(
            group._consumer.commit_batch(self._operations, part._read.target, row, timeout_ms)
        )
        return result


class GroupPart(Changes):
    """Changes of one partition, a part of a batch. The parts of a partition are committed in their
    order.
    """

    def __init__(self, group: Any, read: KeyspaceChanges, part: FeedPart) -> None:
        super().__init__(group, read, (part,))
        self.partition_id = part.partition_id

    def batch(self) -> PartBatch:
        """Return an atomic batch whose commit also commits the position after these changes. So the
        results are written exactly once, also if the consumer is killed at any moment.
        """
        return PartBatch(self)


class AsyncPartBatch(PartBatch):
    """The asyncio client's form of :class:`PartBatch`: ``commit`` is awaited."""

    commit = awaitable(PartBatch.commit)  # type: ignore[assignment]


class AsyncGroupPart(GroupPart):
    """The asyncio client's form of :class:`GroupPart`: ``commit`` is awaited."""

    commit = awaitable(GroupPart.commit)  # type: ignore[assignment]

    def batch(self) -> AsyncPartBatch:
        return AsyncPartBatch(self)


class GroupBatch(Changes):
    """The next changes of a group's consumer, of one keyspace. A batch may be empty: it comes after
    a second without a change.
    """

    _part: type[GroupPart] = GroupPart

    def __init__(self, group: Any, read: KeyspaceChanges) -> None:
        super().__init__(group, read, read.parts)
        self.caught_up: bool = group._consumer.caught_up
        """True once every partition that the consumer owns has delivered all changes that there
        were when it was granted.
        """

    @property
    def partitions(self) -> list[int]:
        """The partitions that the changes are of."""
        return sorted({part.partition_id for part in self._parts if part.rows})

    def parts(self, at_most: int = MAX_ATOMIC_OPERATIONS) -> list[Any]:
        """Return the changes partition by partition, in parts of at most so many changes (more only
        if an atomic batch has more), each with a position of its own to commit.

        Raises:
            InvalidArgumentError: ``at_most`` is below 1.
        """
        if at_most < 1:
            raise InvalidArgumentError(field="at_most", reason="must be at least 1", limit=1)
        batch = self._read.batch
        return [
            self._part(self._group, self._read, piece)
            for part in self._parts
            if part.rows
            for piece in split(part, batch.keys, batch.versions, at_most)
        ]


class AsyncGroupBatch(GroupBatch):
    """The asyncio client's form of :class:`GroupBatch`: ``commit`` is awaited."""

    _part = AsyncGroupPart
    commit = awaitable(GroupBatch.commit)  # type: ignore[assignment]


OnChange = Callable[[Sequence[int]], object]
"""Called with partitions; for the asyncio client it may return an awaitable."""


class GroupArguments(TypedDict, total=False):
    """The optional arguments of ``Client.group``; :class:`Group` explains them."""

    keyspaces: Sequence[str]
    strategy: Strategy | None
    member: str | None
    session_ms: int
    start: Start
    on_granted: OnChange | None
    on_revoked: OnChange | None


class GroupMember:
    """A consumer in a group: the common part of :class:`Group` and :class:`AsyncGroup`."""

    def __init__(self, client: Any, name: str, arguments: GroupArguments) -> None:
        if unknown := arguments.keys() - GroupArguments.__annotations__.keys():
            raise TypeError(f"group() got an unexpected keyword argument {min(unknown)!r}")
        if isinstance(arguments.get("keyspaces", ()), str | bytes):
            raise InvalidArgumentError(field="keyspaces", reason="must be a list of names")
        self._client = client
        self._arguments = arguments
        self._options = GroupOptions(
            name=name,
            strategy=arguments.get("strategy"),
            member=arguments.get("member"),
            session_ms=arguments.get("session_ms", GROUP_SESSION_MS),
            start=arguments.get("start", "beginning"),
        )
        self._on_revoked = arguments.get("on_revoked")
        self._joined: GroupConsumer | None = None
        self._undelivered: KeyspaceChanges | OwnershipChange | None = None

    @property
    def _consumer(self) -> GroupConsumer:
        if self._joined is None:
            raise InvalidArgumentError(field="group", reason="use it as a context: `with group:`")
        return self._joined

    def _run(self, work: Any) -> Any:
        return self._client._run(work)

    async def _join(self) -> None:
        engine = self._client._engine
        named = self._arguments.get("keyspaces", ())
        targets = [await engine.open_keyspace(name) for name in named]
        self._joined = GroupConsumer(engine, targets or [self._client._target], self._options)

    async def _leave(self) -> None:
        if self._joined is not None:
            await self._joined.close(leaves=self._options.member is None)

    @property
    def member_id(self) -> str:
        """The member's id in the group: the given name, or a random one."""
        return self._consumer.member_id

    @property
    def members(self) -> int:
        """The number of the group's members, as this consumer was told last."""
        return self._consumer.members

    @property
    def is_idle(self) -> bool:
        """True if the group has more members than partitions, and none is left for this one."""
        return self._consumer.is_idle

    @property
    def partitions(self) -> list[int]:
        """The partitions that this consumer owns, as far as it knows."""
        return self._consumer.owned()

    def commit(self, *, timeout_ms: int | None = None) -> None:
        """Commit the positions after all batches that were delivered before the newest one, and
        after the newest one, too, once the next was asked for (in ``on_revoked`` during the
        iteration, for instance). The newest batch is committed by its own ``commit``. Errors are
        those of ``GroupBatch.commit``.
        """
        consumer = self._consumer
        result: None = self._run(consumer.commit(consumer.membership.uncommitted(), timeout_ms))
        return result

    def pause(self, partitions: Sequence[int]) -> None:
        """Deliver no changes of these partitions until ``resume``. They stay this consumer's."""
        result: None = self._run(self._call(lambda: self._consumer.pause(partitions)))
        return result

    def resume(self, partitions: Sequence[int]) -> None:
        """Deliver changes of these partitions again."""
        result: None = self._run(self._call(lambda: self._consumer.resume(partitions)))
        return result

    def begin_again(self, partition: int) -> None:
        """Begin an owned partition again, with a snapshot of all its records: after
        SnapshotNeededError or HistoryBranchedError, which name the partition. A partition that is
        not owned any more is left alone.

        Raises:
            UnknownFateError, UnavailableError: the deadline passed. The partition goes on from
                where it was, or raises its error again.
        """
        result: None = self._run(self._consumer.begin_again(partition))
        return result

    async def _next(self) -> KeyspaceChanges | OwnershipChange | None:
        """Return the next result; once more the one that an interrupted call did not deliver, or
        that a callback has not dealt with.
        """
        if self._undelivered is None:
            self._undelivered = await self._consumer.next()
        return self._undelivered

    def _told(self, change: OwnershipChange) -> Iterator[tuple[OnChange, Sequence[int]]]:
        """Yield the callbacks of a change with their partitions, revoked ones first. A callback
        that returned has no part in the change any more.
        """
        on_granted = self._arguments.get("on_granted")
        if change.revoked and self._on_revoked is not None:
            yield self._on_revoked, change.revoked
            change.revoked = []
        if change.granted and on_granted is not None:
            yield on_granted, change.granted
            change.granted = []

    @staticmethod
    async def _call(work: Callable[[], None]) -> None:
        work()


class Group(GroupMember):
    """A consumer in a group, of the blocking client. Made by :meth:`koinon.Client.group`; use it as
    a context. Iterating yields :class:`GroupBatch`. One thread iterates and commits. One of the
    client's addresses must be a coordinator's.

    Args:
        keyspaces: the names of the keyspaces to follow; by default the client's.
        strategy: ``"sticky"``, ``"range"`` or ``"round-robin"``: how partitions are shared; by
            default the group's, or ``"sticky"`` for a new group.
        member: a name for this consumer that outlives its process: when the process ends, its
            partitions stay reserved for ``session_ms``. By default a random name: then leaving the
            block gives the partitions to the others at once.
        session_ms: a consumer that the coordinators do not hear of for so many milliseconds loses
            its partitions. 1,000 to 300,000 (with ``member`` 3,600,000).
        start: where to begin a partition that the group has no position of: with a snapshot of its
            records (``"beginning"``), or with changes from now on (``"now"``).
        on_granted: called with partitions before their first change is delivered. If it (or
            ``on_revoked``) raises or is cancelled, the next step of the iteration calls it again.
        on_revoked: called with partitions that go to another consumer, and with all partitions when
            the block ends without an exception. During the call ``commit`` still commits them,
            unless they are lost: after a session without an answer of the coordinators.

    Raises:
        InvalidArgumentError: an argument is out of bounds.
        UnknownKeyspaceError: (entering) there is no such keyspace; (iterating) all of the
            keyspaces have been dropped.
        MemberFencedError: (iterating) another process has joined as the same ``member``.
        SnapshotNeededError, HistoryBranchedError: (iterating) a partition cannot continue from its
            position. Call ``begin_again`` with the error's partition, and iterate on.
        ResourceExhaustedError: (iterating) a node had no place for a feed of this consumer for a
            session (a minute at most). Iterating on waits for a place.
        PermissionDeniedError: (iterating) the caller may not ``feed`` all keys of a keyspace.
    """

    def __enter__(self) -> Self:
        self._run(self._join())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and self._on_revoked is not None and self.partitions:
                self._on_revoked(self.partitions)
        finally:
            with suppress(ClientClosedError):
                self._run(self._leave())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> GroupBatch:
        while True:
            found = self._run(self._next())
            if not isinstance(found, OwnershipChange):
                batch = GroupBatch(self, found or self._consumer.nothing())
                self._undelivered = None  # no signal handler runs between here and the caller
                return batch
            for told, partitions in self._told(found):
                told(partitions)
            self._undelivered = None


class AsyncGroup(GroupMember):
    """A consumer in a group, of the asyncio client. Made by :meth:`koinon.AsyncClient.group`; use
    it with ``async with`` and ``async for``, which yields :class:`GroupBatch`. One task iterates.
    """

    commit = awaitable(GroupMember.commit)  # type: ignore[assignment]
    pause = awaitable(GroupMember.pause)  # type: ignore[assignment]
    resume = awaitable(GroupMember.resume)  # type: ignore[assignment]
    begin_again = awaitable(GroupMember.begin_again)  # type: ignore[assignment]

    async def __aenter__(self) -> Self:
        await self._join()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and self._on_revoked is not None and self.partitions:
                await _awaited(self._on_revoked(self.partitions))
        finally:
            await self._leave()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AsyncGroupBatch:
        while True:
            found = await self._next()
            if not isinstance(found, OwnershipChange):
                self._undelivered = None
                return AsyncGroupBatch(self, found or self._consumer.nothing())
            for told, partitions in self._told(found):
                await _awaited(told(partitions))
            self._undelivered = None


async def _awaited(result: object) -> None:
    if isinstance(result, Awaitable):
        await result


for _shown in (AsyncGroup, Group, GroupBatch, GroupPart):
    _shown.__module__ = "koinon"
