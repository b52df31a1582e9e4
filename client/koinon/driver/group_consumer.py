"""A member of a consumer group: attends at the coordinators, claims and commits cursors, follows.

    coordinators  <  attend (a task: one long poll after the other)  >  Membership (core/groups.py)
                                                                          |  partitions to claim
    primaries     <  claim (a task for each batch of grants)  < ----------+
    primaries     <  ChangeFeed (one for each keyspace)  >  next()  >  the caller

``next`` is called by the consumer, in the consumer's time: it says which partitions were granted or
revoked, or returns changes. So ownership changes between two batches only, and a revoked partition
is given back when the consumer asks for more after it was told.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
import uuid
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any

from koinon.core.atomic import PartitionOperations
from koinon.core.cursor_rows import (
    CommitWithCursor,
    CursorAction,
    CursorRows,
    CursorWork,
    StoredCursor,
)
from koinon.core.feeds import ChangeBatch, FeedPositions, PartitionPosition
from koinon.core.group_options import GroupOptions
from koinon.core.groups import BEGINNING, Grant, KeyspaceChanges, Membership, OwnershipChange
from koinon.core.target import Target
from koinon.driver import request_ids
from koinon.driver.change_feed import TIMEOUT_MS, ChangeFeed, FeedQuery
from koinon.driver.engine import Engine
from koinon.driver.rpc.group_messages import STRATEGIES, grants_of, held_to_proto
from koinon_proto.contract.errors import (
    ClientClosedError,
    CursorMovedError,
    InvalidArgumentError,
    KoinonError,
    NotSentError,
    StaleGenerationError,
    UnavailableError,
    UnknownKeyspaceError,
    UnsupportedVersionError,
)
from koinon_proto.contract.leader_search import LeaderSearch, Pace, Repeat, Route
from koinon_proto.server.leader_calls import ask_leader_aio
from koinon_proto.v1 import groups_pb2

_EMPTY_BATCH_S = 1.0
_AGAIN_S = 0.2  # before a claim or a request that failed is repeated
_LEAVE_S = 2.0
_ANSWER_S_MAX = 2.0  # for which an answer may be late, after a third of the session


class GroupConsumer:
    """One consumer of a group. Every call must come from the engine's event loop."""

    def __init__(self, engine: Engine, targets: Sequence[Target], options: GroupOptions) -> None:
        self._engine = engine
        self._options = options
        self.member_id = options.member or uuid.uuid4().hex
        self.membership = Membership(options.session_ms / 1000)
        self._targets = {target.keyspace_id: target for target in targets}
        self._incarnation = time.time_ns() // 1000
        self._group_id = 0
        self.members = 0
        self.is_idle = False
        self._route = Route(list(engine.discovery.seeds))
        self._no_coordinators: set[str] = set()  # addresses that do not know the service
        self._arrived = asyncio.Event()  # ``next`` may have something to return
        self._changed = asyncio.Event()  # the coordinators are to be told at once
        self._feeds: dict[int, ChangeFeed] = {}
        self._followed: dict[int, Grant] = {}  # the partitions in the feeds
        self._keyspace_of: dict[int, int] = {}  # of each partition that was ever granted
        self._is_telling = False  # ``next`` has returned an ownership change
        self._error: BaseException | None = None
        self._closed = False
        # Commits of positions without changes run alone: they must not come between an atomic
        # batch and the position that it expects.
        self._commits = 0
        self._may_commit = asyncio.Event()
        self._may_commit.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._spawn(self._attend())
        self._spawn(self._commit_progress())

    # --- for the consumer ------------------------------------------------------------------

    async def next(self) -> OwnershipChange | KeyspaceChanges | None:
        """Return an ownership change, or changes; None after a second without either. The next call
        says that the consumer has dealt with the last result.

        Raises:
            SnapshotNeededError, HistoryBranchedError: a partition cannot continue from its
                position; it waits for ``begin_again``.
            MemberFencedError: another process has the member's name.
            UnknownKeyspaceError: all of the member's keyspaces have been dropped.
            ResourceExhaustedError: for a session (a minute at most) a node had no place for a feed
                of this member, so partitions that it owns could not be followed. The next call
                goes on.
            KoinonError: the coordinators or a node have refused the member for good.
        """
        self._engine.check_loop()
        self.membership.asked()
        if self._is_telling:
            self._is_telling = False
            if self.membership.told():
                self._changed.set()
        deadline = self._engine.now() + _EMPTY_BATCH_S
        while True:
            self._arrived.clear()
            if (found := self._take()) is not None:
                return found
            try:
                async with asyncio.timeout(max(0.0, deadline - self._engine.now())):
                    await self._arrived.wait()
            except TimeoutError:
                return None

    def _take(self) -> OwnershipChange | KeyspaceChanges | None:
        if self._closed or self._engine.closed:
            raise ClientClosedError
        membership = self.membership
        if membership.expire(self._engine.now()):
            self._changed.set()
        change = membership.changes()
        self._follow_owned()
        if change:
            self._is_telling = True
            return change
        if self._error is not None:
            raise self._error
        for keyspace_id, feed in list(self._feeds.items()):
            try:
                taken = feed.take()
            except UnknownKeyspaceError:
                self._lose_keyspace(keyspace_id)
                return None  # ``next`` comes again, for the news
            except KoinonError as error:
                if (p := getattr(error, "partition_id", None)) in self._followed:
                    membership.holdings[p].is_paused = True
                    self._followed.pop(p)
                raise
            if taken is not None:
                batch, parts = taken
                membership.deliver(parts)
                # The others come first next time: a busy keyspace must not keep them waiting.
                self._feeds[keyspace_id] = self._feeds.pop(keyspace_id)
                held = {part.partition_id for part in parts}
                generations = {p: self._followed[p].generation for p in held}
                return KeyspaceChanges(self._targets[keyspace_id], batch, parts, generations)
        return None

    def nothing(self) -> KeyspaceChanges:
        """Return changes that are none."""
        empty = ChangeBatch(
            keys=(),
            values=(),
            versions=(),
            expires_at_ms=(),
            positions=FeedPositions(self._engine.cluster_id, 0, {}),
            caught_up=self.caught_up,
        )
        return KeyspaceChanges(next(iter(self._targets.values())), empty, (), {})

    @property
    def caught_up(self) -> bool:
        """True if all partitions that are followed have delivered what there was at first."""
        return all(feed.caught_up for feed in self._feeds.values())

    def owned(self) -> list[int]:
        """Return the partitions that this consumer owns now."""
        return self.membership.owned()

    def pause(self, partition_ids: Iterable[int]) -> None:
        """Deliver nothing of these partitions, which stay owned, until ``resume``."""
        self._set_paused(partition_ids, is_paused=True)

    def resume(self, partition_ids: Iterable[int]) -> None:
        """Deliver changes of these partitions again."""
        self._set_paused(partition_ids, is_paused=False)

    def _set_paused(self, partition_ids: Iterable[int], *, is_paused: bool) -> None:
        for p in partition_ids:
            holding = self.membership.holdings.get(p)
            if holding is not None:
                holding.is_paused = is_paused
        self._follow_owned()
        self._arrived.set()

    async def begin_again(self, p: int) -> None:
        """Follow an owned partition from its beginning, with a snapshot; leave one alone that is
        not owned any more. After an error the partition goes on from where it was.
        """
        if p not in self.membership.owned():
            return
        keyspace_id, generation = self.membership.holdings[p].grant
        target = self._targets[keyspace_id]
        nothing = PartitionOperations(p, target.partitioner, max_value_bytes=0)
        self.pause((p,))
        try:
            async with self._committing():
                await self._commit_after(nothing, target, (generation, BEGINNING), None)
            self.membership.begun_again(p, generation, self._engine.now())
        except StaleGenerationError as error:
            self._note_stale(p, generation, error)
        finally:
            if self.membership.holds(p, generation):
                self.resume((p,))

    # --- cursors ---------------------------------------------------------------------------

    async def commit(
        self, positions: Mapping[int, tuple[int, PartitionPosition]], timeout_ms: int | None = None
    ) -> None:
        """Commit the position of each partition, under the generation beside it.

        Raises:
            StaleGenerationError: a partition has another owner now. The other partitions were
                committed.
            UnavailableError: the deadline passed; a position may have been committed.
        """
        news = {p: row for p, row in positions.items() if self.membership.is_news(p, *row)}
        async with self._committing():
            failures = await self._commit(news, timeout_ms)
        for error in failures.values():
            raise error

    async def _commit(
        self, positions: Mapping[int, tuple[int, PartitionPosition]], timeout_ms: int | None
    ) -> dict[int, KoinonError]:
        """Commit positions; return the errors by partition."""
        failures: dict[int, KoinonError] = {}
        by_keyspace: dict[int, dict[int, tuple[int, PartitionPosition]]] = {}
        for p, row in positions.items():
            by_keyspace.setdefault(self._keyspace_of[p], {})[p] = row
        for keyspace_id, rows in by_keyspace.items():
            work = self._work(CursorAction.COMMIT, keyspace_id, rows)
            done = await self._run(work, timeout_ms)
            failures.update(done.failures)
            for p, (generation, position) in rows.items():
                if p not in done.failures:
                    now = self._engine.now()
                    self.membership.committed(p, generation, position, now)
        for p, error in failures.items():
            self._note_stale(p, positions[p][0], error)
        return failures

    async def commit_batch(
        self,
        batch: PartitionOperations,
        target: Target,
        row: tuple[int, PartitionPosition],
        timeout_ms: int | None,
    ) -> None:
        """Commit an atomic batch together with its partition's position.

        Raises:
            StaleGenerationError: the partition has another owner now; nothing was written.
            UnknownFateError: no reply came. A further commit of the same part is applied only if
                this one was not.
            KoinonError: as ``Batch.commit``.
        """
        p, (generation, position) = batch.partition_id, row
        async with self._committing():
            if not self.membership.holds(p, generation):
                raise StaleGenerationError(
                    partition_id=p, generation=generation, current_generation=0
                )
            if self.membership.holdings[p].committed >= position:
                raise InvalidArgumentError(
                    field="part",
                    reason="its position was committed before: parts are committed in their order",
                )
            await self._commit_after(batch, target, row, timeout_ms)
        self.membership.committed(p, generation, position, self._engine.now())

    async def _commit_after(
        self,
        batch: PartitionOperations,
        target: Target,
        row: tuple[int, PartitionPosition],
        timeout_ms: int | None,
    ) -> None:
        """Commit a batch and a position on the condition that the cursor is where this consumer has
        left it. A commit without a condition may have moved it late: then once more.
        """
        p, (generation, position) = batch.partition_id, row
        timeout_ms = self._engine.timeout_ms(timeout_ms)
        work = self._work(CursorAction.COMMIT, target.keyspace_id, {p: row})
        after = self.membership.holdings[p].committed
        while True:
            operation = CommitWithCursor(batch, work, after, self._engine.policy)
            with request_ids.operation():
                await self._engine.rows.run(operation, timeout_ms)
            error = operation.error and as_stale(operation.error, p, generation)
            if isinstance(error, CursorMovedError):
                after = (await self._stored(work, p, timeout_ms)).position
                if after < position or after > position == BEGINNING:
                    continue
                error = None if after == position else error  # an earlier attempt has written it
            if error is None:
                return
            self._note_stale(p, generation, error)
            raise error

    async def _stored(self, work: CursorWork, p: int, timeout_ms: int) -> StoredCursor:
        """Return the cursor of an owned partition, by claiming it once more."""
        again = self._work(CursorAction.CLAIM, work.keyspace_id, work.rows)
        done = await self._run(again, timeout_ms)
        for error in done.failures.values():
            raise error
        return done.cursors[p]

    def _note_stale(self, p: int, generation: int, error: KoinonError) -> None:
        if isinstance(error, StaleGenerationError):
            self.membership.refused(p, generation)
            self._changed.set()
            self._arrived.set()

    @contextlib.asynccontextmanager
    async def _committing(self) -> Any:
        """Wait until no position without changes is being committed, and begin none meanwhile."""
        await self._may_commit.wait()
        self._commits += 1
        try:
            yield
        finally:
            self._commits -= 1

    async def _commit_progress(self) -> None:
        """Commit the positions that advance without changes, now and then."""
        while True:
            await asyncio.sleep(self.membership.session_s)
            reached = {p: place for f in self._feeds.values() for p, place in f.positions.items()}
            due = self.membership.progress(reached, self._engine.now())
            if due and not self._commits:
                self._may_commit.clear()
                try:
                    with contextlib.suppress(KoinonError):  # ``next`` raises what ends the member
                        await self._commit(due, None)
                finally:
                    self._may_commit.set()

    def _work(
        self,
        action: CursorAction,
        keyspace_id: int,
        rows: Mapping[int, tuple[int, PartitionPosition]],
    ) -> CursorWork:
        return CursorWork(
            action=action,
            keyspace_id=keyspace_id,
            group_id=self._group_id,
            member_id=self.member_id,
            rows=rows,
            from_now=self._options.start == "now",
        )

    async def _run(self, work: CursorWork, timeout_ms: int | None) -> CursorRows:
        operation = CursorRows(work, self._engine.policy)
        with request_ids.operation():
            await self._engine.rows.run(operation, self._engine.timeout_ms(timeout_ms))
        for p, error in operation.failures.items():
            operation.failures[p] = as_stale(error, p, work.rows[p][0])
        return operation

    # --- feeds -----------------------------------------------------------------------------

    def _follow_owned(self) -> None:
        """Make the feeds follow the owned partitions that are not paused, and no others."""
        holdings = self.membership.holdings
        wanted = {
            p: holdings[p].grant for p in self.membership.owned() if not holdings[p].is_paused
        }
        gone = [p for p, grant in self._followed.items() if wanted.get(p) != grant]
        for feed in self._feeds.values() if gone else ():
            feed.remove(gone)
        for p in gone:
            del self._followed[p]
        fresh: dict[int, dict[int, PartitionPosition]] = {}
        for p, grant in wanted.items():
            if p not in self._followed:
                self._followed[p] = grant
                fresh.setdefault(grant.keyspace_id, {})[p] = holdings[p].delivered
        for keyspace_id, positions in fresh.items():
            self._feed(keyspace_id).add(positions)

    def _feed(self, keyspace_id: int) -> ChangeFeed:
        feed = self._feeds.get(keyspace_id)
        if feed is None:
            feed = self._feeds[keyspace_id] = ChangeFeed(
                self._engine,
                self._targets[keyspace_id],
                FeedQuery(is_partial=True),
                min(self._options.session_ms, TIMEOUT_MS),
                self._arrived,
            )
        return feed

    def _lose_keyspace(self, keyspace_id: int) -> None:
        """Hold nothing of a keyspace that was dropped, and go on with the others. The coordinators
        end the membership once none is left.
        """
        held = self.membership.holdings.items()
        self.membership.lose([p for p, one in held if one.grant.keyspace_id == keyspace_id])
        self._feeds.pop(keyspace_id).close()
        self._changed.set()
        self._arrived.set()

    # --- the coordinators ------------------------------------------------------------------

    async def _attend(self) -> None:
        """Ask the coordinators for grants, one request after the other, until closed or refused."""
        try:
            while not self._closed:
                await self._attend_once()
        except UnknownKeyspaceError:  # there is none of them any more
            names = ", ".join(target.name for target in self._targets.values())
            self._fail(UnknownKeyspaceError(keyspace=names))
        except KoinonError as error:
            self._fail(error)

    async def _attend_once(self) -> None:
        """Send one request and take its answer. It is given up when there is news to tell.

        Raises:
            KoinonError: the coordinators have refused this member for good.
        """
        now = self._engine.now()
        if self.membership.expire(now) or self.membership.overdue(now):
            self._arrived.set()
        self._changed.clear()
        request = self._request()
        asking = asyncio.create_task(self._ask("attend_group", request))
        waking = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait((asking, waking), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                return
            answer = asking.result()
        except KoinonError as error:
            if not (error.retriable or error.maybe_applied):
                raise
            await asyncio.sleep(_AGAIN_S)
            return
        finally:
            for task in (asking, waking):
                task.cancel()
            await asyncio.gather(asking, waking, return_exceptions=True)
        self._take_answer(answer, now)

    def _request(self) -> groups_pb2.AttendGroupRequest:
        options, membership = self._options, self.membership
        return groups_pb2.AttendGroupRequest(
            cluster_id=self._engine.cluster_id,
            group=options.name,
            member_id=self.member_id,
            incarnation=self._incarnation,
            number=membership.next_number(),
            is_static=options.member is not None,
            client_name=f"{socket.gethostname()}:{os.getpid()}"[:200],
            keyspace_ids=sorted(self._targets),
            strategy=STRATEGIES[options.strategy or ""],
            session_ms=options.session_ms,
            known_revision=membership.known_revision,
            held=held_to_proto(membership.held()),
            is_joining=not self._group_id,
        )

    def _take_answer(self, answer: groups_pb2.AttendGroupResponse, asked_at: float) -> None:
        self._group_id = answer.group_id
        self.members, self.is_idle = answer.members, answer.is_idle
        now, granted = self._engine.now(), grants_of(answer.granted)
        fresh = self.membership.answered(granted, answer.revision, asked_at, now)
        self._follow_owned()
        by_keyspace: dict[int, dict[int, Grant]] = {}
        for p in fresh:
            self._keyspace_of[p] = granted[p].keyspace_id
            by_keyspace.setdefault(granted[p].keyspace_id, {})[p] = granted[p]
        for keyspace_id, grants in by_keyspace.items():
            self._spawn(self._claim(keyspace_id, grants))
        self._arrived.set()

    async def _claim(self, keyspace_id: int, grants: Mapping[int, Grant]) -> None:
        """Claim the cursors of granted partitions; repeat until each is claimed or lost."""
        left = dict(grants)
        try:
            while left := {
                p: grant for p, grant in left.items() if self.membership.holds(p, grant.generation)
            }:
                rows = {p: (grant.generation, BEGINNING) for p, grant in left.items()}
                work = self._work(CursorAction.CLAIM, keyspace_id, rows)
                done = await self._run(work, self._options.session_ms)
                now = self._engine.now()
                for p, cursor in done.cursors.items():
                    self.membership.claimed(p, left.pop(p), cursor.position, now)
                for p, error in done.failures.items():
                    if isinstance(error, StaleGenerationError):
                        self._note_stale(p, left.pop(p).generation, error)
                    elif not isinstance(error, UnavailableError) and not error.retriable:
                        raise error
                self._arrived.set()
                await asyncio.sleep(_AGAIN_S if left else 0.0)
        except KoinonError as error:
            self._fail(error)

    async def _ask(self, method: str, request: Any) -> Any:
        """Ask the coordinators' leader.

        Raises:
            KoinonError: there was no answer in time, or a refusal.
        """
        third_s = self.membership.session_s / 3
        pace = Pace(attempt_s=third_s + min(_ANSWER_S_MAX, third_s), pause_s=0.05, pause_s_max=0.2)
        if method == "leave_group":
            pace = Pace(attempt_s=_LEAVE_S, pause_s=0.05)
        deadline = time.monotonic() + self.membership.session_s
        search = LeaderSearch(self._route, Repeat.UNANSWERED, pace=pace, deadline=deadline)

        async def attempt() -> Any:
            link = self._engine.link(search.asked)
            answer = await link.ask_group(method, request, search.timeout_s(time.monotonic()))
            if isinstance(answer, UnsupportedVersionError):  # a node, among the client's addresses
                self._no_coordinators.add(search.asked)
                if not self._no_coordinators.issuperset(self._route.addresses):
                    raise NotSentError(reason=f"{search.asked} is no coordinator")
            if isinstance(answer, KoinonError):
                raise answer
            return answer

        with request_ids.operation():
            return await ask_leader_aio(search, attempt)

    def _fail(self, error: BaseException) -> None:
        """End the membership with this error."""
        if self._error is None:
            self._error = error
        self.membership.lose(list(self.membership.holdings))
        self._arrived.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run this until it ends, or the consumer or the client is closed."""
        task = asyncio.create_task(work)
        for tasks in (self._tasks, self._engine.tasks):
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        task.add_done_callback(self._on_ended)

    def _on_ended(self, task: asyncio.Task[None]) -> None:
        """End the membership if its task ended with an exception that nobody expected."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def close(self, *, leaves: bool) -> None:
        """End the membership; with ``leaves`` the group's other members get its partitions at once.
        Idempotent.
        """
        if self._closed:
            return
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for feed in self._feeds.values():
            feed.close()
        if leaves and self._group_id and not self._engine.closed:
            request = groups_pb2.LeaveGroupRequest(
                cluster_id=self._engine.cluster_id,
                group=self._options.name,
                member_id=self.member_id,
                incarnation=self._incarnation,
            )
            with contextlib.suppress(KoinonError, TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    await self._ask("leave_group", request)


def as_stale(error: KoinonError, p: int, generation: int) -> KoinonError:
    """Return the error that a consumer gets for this one. A partition of a keyspace that was
    dropped is nobody's: its grant is as stale as one that another member's has replaced.
    """
    if isinstance(error, UnknownKeyspaceError):
        return StaleGenerationError(partition_id=p, generation=generation, current_generation=0)
    return error
