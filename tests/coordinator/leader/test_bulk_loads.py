"""Bulk loads in one term's leader, over a group of one that can lose, refuse or delay proposals."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from koinon_coordinator.core.cluster.commands import AbortLoad, CommitLoad, LoadOutcome, OpenLoad
from koinon_coordinator.core.decide.load_requests import LoadWish
from koinon_coordinator.leader import loading as loading_module
from koinon_proto.contract.bulk_loads import LoadMode, LoadState
from koinon_proto.contract.cluster_errors import LoadClosedError, NotLeaderError
from koinon_proto.contract.errors import (
    PartitionOfflineError,
    ResourceExhaustedError,
    UnknownFateError,
    WrongClusterError,
)
from tests.coordinator.kit.load_states import ABORTED, DONE, MERGING, OPEN, commit_load, small_state
from tests.coordinator.kit.support import LeaderContext, hold_proposals, run_term, settled
from tests.kit.waiting import until

APPEND = int(LoadMode.APPEND)
TIMEOUT_MS = 10_000


def with_term(test: Callable[[LeaderContext], Awaitable[None]]) -> LeaderContext:
    return run_term(test, state=small_state())


async def opened(term: LeaderContext, job_id: str = "job", timeout_ms: int = TIMEOUT_MS) -> int:
    wish = LoadWish(job_id=job_id, mode=APPEND, timeout_ms=timeout_ms)
    outcome = await term.leadership.loading.open(wish, "")
    assert outcome.state is OPEN
    return outcome.load_id


async def touch(term: LeaderContext, load_id: int, **staged: int) -> LoadState:
    given: dict[str, Any] = {"attempt": 0, "rows": 0, "size_bytes": 0, **staged}
    return await term.leadership.loading.touch(load_id, "", **given)


async def pass_time(term: LeaderContext, seconds: float) -> None:
    """The nodes stay alive, and the leader ticks."""
    await term.live(seconds, "n1", "n2", "n3")


def state_of(term: LeaderContext, load_id: int) -> LoadState:
    load = term.replicated.state.loads.get(load_id)
    assert load is not None
    return load.state


async def next_term(term: LeaderContext) -> asyncio.Task[None]:
    """Another leader, over the same state."""
    running = asyncio.ensure_future(term.begin(2).run())
    await until(lambda: term.leadership.term.is_open)
    return running


def test_leader_takes_a_load_through_its_life() -> None:
    async def test(term: LeaderContext) -> None:
        loading = term.leadership.loading
        load_id = await opened(term)
        assert await touch(term, load_id, attempt=7, rows=60, size_bytes=900) is OPEN
        assert await loading.commit(commit_load(load_id), "") is MERGING
        manifest = await loading.manifest(load_id, "")
        assert (manifest.attempts, manifest.unmerged) == ((7, 5), (0, 2))
        assert await loading.merged(load_id, [0], "") is MERGING
        assert (await loading.manifest(load_id, "")).unmerged == (2,)
        assert await loading.merged(load_id, [2, 0], "") is DONE
        assert await loading.merged(load_id, [2], "") is DONE
        with pytest.raises(LoadClosedError, match="is done"):
            await loading.manifest(load_id, "")
        with pytest.raises(LoadClosedError, match="is done"):
            await touch(term, load_id)

    with_term(test)


def test_leader_repeated_calls_propose_nothing() -> None:
    async def test(term: LeaderContext) -> None:
        loading = term.leadership.loading
        load_id = await opened(term)
        assert await opened(term) == load_id
        for _ in range(2):
            await loading.commit(commit_load(load_id), "")
            await loading.merged(load_id, [0], "")

    term = with_term(test)
    kinds = [type(c).__name__ for c in term.group.proposed if type(c).__name__ != "OpenLoad"]
    assert term.count(OpenLoad) == term.count(CommitLoad) == 1
    assert kinds.count("PartitionsMerged") == 1


def test_leader_two_calls_at_once_for_one_job_open_one_load() -> None:
    async def test(term: LeaderContext) -> None:
        proposed, gate = hold_proposals(term)
        calls = [asyncio.ensure_future(opened(term)) for _ in range(2)]
        await proposed.wait()
        await settled()
        gate.set()
        first, second = await asyncio.gather(*calls)
        assert first == second

    assert with_term(test).count(OpenLoad) == 2


EMPTY = LoadWish(job_id="empty", mode=int(LoadMode.OVERWRITE), timeout_ms=TIMEOUT_MS)


def test_leader_empties_a_keyspace_by_one_load_however_often_it_is_asked() -> None:
    async def test(term: LeaderContext) -> None:
        loading = term.leadership.loading
        first = await loading.empty(EMPTY, "")
        assert (await loading.empty(EMPTY, "")) == first
        assert first.state is MERGING
        manifest = await loading.manifest(first.load_id, "")
        partition_ids = range(term.replicated.state.partition_ids_end)
        assert (manifest.attempts, manifest.unmerged) == ((), tuple(partition_ids))
        assert await loading.merged(first.load_id, partition_ids, "") is DONE
        assert (await loading.empty(EMPTY, "")).state is DONE

    term = with_term(test)
    assert term.count(OpenLoad) == term.count(CommitLoad) == 1


def test_leader_that_cannot_commit_the_emptying_load_aborts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> None:
        raise PartitionOfflineError(partition_id=3, reason="no live replica holds it")

    async def test(term: LeaderContext) -> None:
        monkeypatch.setattr(loading_module, "decide_commit", refused)
        with pytest.raises(PartitionOfflineError):
            await term.leadership.loading.empty(EMPTY, "")
        (load,) = term.replicated.state.loads
        assert load.state is ABORTED

    with_term(test)


def test_leader_commit_that_an_abort_overtakes_is_refused_as_closed() -> None:
    async def test(term: LeaderContext) -> None:
        loading = term.leadership.loading
        load_id = await opened(term)
        proposed, gate = hold_proposals(term)
        aborting = asyncio.ensure_future(loading.abort(load_id, "enough", ""))
        await proposed.wait()
        committing = asyncio.ensure_future(loading.commit(commit_load(load_id), ""))
        await settled()
        gate.set()
        assert await aborting is ABORTED
        with pytest.raises(LoadClosedError, match="aborted: enough"):
            await committing

    with_term(test)


def test_leader_aborts_a_load_that_nobody_touches_and_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(term: LeaderContext) -> None:
        left, kept = await opened(term, "left"), await opened(term, "kept")
        for _ in range(4):
            await pass_time(term, 2.0)
            await touch(term, kept)
        assert state_of(term, left) is OPEN
        await pass_time(term, 2.2)
        assert (state_of(term, left), state_of(term, kept)) == (ABORTED, OPEN)
        load = term.replicated.state.loads.get(left)
        assert load is not None
        assert "nobody touched it for 10 s" in load.reason
        with pytest.raises(LoadClosedError, match="nobody touched it for 10 s"):
            await touch(term, left)

    with caplog.at_level(logging.WARNING):
        assert with_term(test).count(AbortLoad) == 1
    assert any("load aborted" in r.message and "left" in r.message for r in caplog.records)


def test_leader_opening_a_known_job_again_is_a_sign_of_life() -> None:
    async def test(term: LeaderContext) -> None:
        load_id = await opened(term)
        await pass_time(term, 8.0)
        await opened(term)
        await pass_time(term, 8.0)
        assert state_of(term, load_id) is OPEN

    with_term(test)


def test_leader_committed_load_is_never_aborted_however_long_it_takes() -> None:
    async def test(term: LeaderContext) -> None:
        load_id = await opened(term)
        await term.leadership.loading.commit(commit_load(load_id), "")
        await pass_time(term, 30.0)
        assert state_of(term, load_id) is MERGING

    assert with_term(test).count(AbortLoad) == 0


def test_new_leader_gives_an_open_load_its_full_time_again() -> None:
    async def test(term: LeaderContext) -> None:
        load_id = await opened(term)
        await touch(term, load_id, attempt=7, rows=60)
        await pass_time(term, 8.0)
        later = await next_term(term)
        (view,) = await term.leadership.loading.views(load_id, "")
        assert (view.idle_ms, view.rows) == (0, 0)  # what it has heard itself: nothing
        await pass_time(term, 9.0)
        assert state_of(term, load_id) is OPEN
        await pass_time(term, 1.2)
        assert state_of(term, load_id) is ABORTED
        later.cancel()

    with_term(test)


def test_leader_abort_that_was_not_appended_is_proposed_again() -> None:
    async def test(term: LeaderContext) -> None:
        load_id = await opened(term)
        full = ResourceExhaustedError(resource="proposals", limit=1)
        refused: list[AbortLoad] = []

        def refuse_once(command: object) -> ResourceExhaustedError | None:
            if not isinstance(command, AbortLoad) or refused:
                return None
            refused.append(command)
            return full

        term.group.fate = refuse_once
        await pass_time(term, 10.6)
        assert len(refused) == 1
        assert state_of(term, load_id) is ABORTED

    assert with_term(test).count(AbortLoad) == 1


def test_leader_abort_of_unknown_fate_is_not_proposed_again() -> None:
    async def test(term: LeaderContext) -> None:
        await opened(term)
        propose = term.group.propose

        async def forget(command: bytes) -> object:
            await propose(command)
            raise UnknownFateError(reason="leadership was lost")

        term.group.propose = forget  # type: ignore[method-assign]
        await pass_time(term, 12.0)

    assert with_term(test).count(AbortLoad) == 1


def test_leader_shows_what_is_staged_and_for_how_long_a_load_was_left() -> None:
    async def test(term: LeaderContext) -> None:
        load_id = await opened(term)
        await touch(term, load_id, attempt=7, rows=60, size_bytes=900)
        await touch(term, load_id, attempt=8, rows=5, size_bytes=100)
        await pass_time(term, 3.0)
        (view,) = await term.leadership.loading.views(0, "")
        assert (view.rows, view.bytes, view.idle_ms) == (65, 1_000, 3_000)
        await term.leadership.loading.commit(commit_load(load_id), "")
        (view,) = await term.leadership.loading.views(load_id, "")
        assert (view.rows, view.bytes, view.idle_ms) == (100, 2_000, 0)  # as committed
        assert await term.leadership.loading.views(999, "") == []

    with_term(test)


def test_leader_waits_for_what_was_committed_before_it_calls_a_load_unknown() -> None:
    async def test(term: LeaderContext) -> None:
        asked: list[int] = []

        async def behind() -> int:
            asked.append(1)
            return 0

        load_id = await opened(term)
        term.group.read_barrier = behind  # type: ignore[method-assign]
        assert await touch(term, load_id) is OPEN
        assert asked == []  # what is known to be open needs no proof
        with pytest.raises(LoadClosedError):
            await touch(term, 999)
        assert asked == [1]

        async def deposed() -> int:
            raise NotLeaderError(leader_id="", leader_address="", term=1)

        term.group.read_barrier = deposed  # type: ignore[method-assign]
        loading = term.leadership.loading
        for call in (
            touch(term, 999),
            loading.commit(commit_load(999), ""),
            loading.abort(999, "", ""),
            loading.views(999, ""),
            loading.manifest(999, ""),
        ):
            with pytest.raises(NotLeaderError):
                await call

    with_term(test)


def test_leader_refuses_a_caller_of_another_cluster() -> None:
    async def test(term: LeaderContext) -> None:
        loading, load_id = term.leadership.loading, await opened(term)
        wish = LoadWish(job_id="j", mode=APPEND)
        for call in (
            loading.open(wish, "elsewhere"),
            loading.touch(load_id, "elsewhere", attempt=0, rows=0, size_bytes=0),
            loading.commit(commit_load(load_id), "elsewhere"),
            loading.abort(load_id, "", "elsewhere"),
            loading.views(0, "elsewhere"),
            loading.manifest(load_id, "elsewhere"),
            loading.merged(load_id, [0], "elsewhere"),
        ):
            with pytest.raises(WrongClusterError):
                await call
        assert state_of(term, load_id) is OPEN

    with_term(test)


def test_leader_open_of_unknown_fate_says_so_and_its_repetition_finds_the_load() -> None:
    async def test(term: LeaderContext) -> None:
        term.group.fate = lambda c: "lost" if isinstance(c, OpenLoad) else None
        with pytest.raises(UnknownFateError):
            await opened(term)
        term.group.fate = lambda _: None
        outcome = await term.leadership.loading.open(LoadWish(job_id="job", mode=APPEND), "")
        assert outcome == LoadOutcome(load_id=outcome.load_id, state=OPEN)

    assert with_term(test).count(OpenLoad) == 1
