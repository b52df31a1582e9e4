"""Consumers of groups at real nodes, beside a stand-in that grants them partitions."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

import koinon
from koinon.client import Client
from koinon.core.feeds import PartitionPosition
from koinon.core.groups import KeyspaceChanges
from koinon.local import LocalCluster
from koinon.operate.admin import Admin
from koinon_proto.contract.errors import (
    ClientClosedError,
    InvalidArgumentError,
    MemberFencedError,
    StaleGenerationError,
    UnavailableError,
    UnknownKeyspaceError,
)
from koinon_proto.partitioner import partitioner
from tests.client.kit.scripted_groups import ScriptedGroups, scripted_groups

PARTITION_OF = partitioner("murmur2", 1024).partition_of
KEYS = [b"group/%d" % n for n in range(400)]
P, Q = PARTITION_OF(KEYS[0]), PARTITION_OF(KEYS[1])


@pytest.fixture
def groups() -> Iterator[ScriptedGroups]:
    with scripted_groups() as running:
        yield running


def next_changes(group: Any) -> Any:
    """Return the next batch with changes."""
    while not len(batch := next(group)):
        pass
    return batch


def wait_owning(group: Any) -> None:
    while not group.partitions:
        next(group)


def test_new_owner_begins_where_the_former_has_committed(
    client: Client, groups: ScriptedGroups
) -> None:
    key = KEYS[0]
    client.put(key, b"1")
    groups.grant("a", P, generation=1)
    told: list[Any] = []
    with client.group(
        "g",
        member="a",
        start="now",
        on_granted=lambda partitions: told.append(("granted", partitions)),
        on_revoked=lambda partitions: told.append(("revoked", partitions)),
    ) as first:
        wait_owning(first)
        assert told == [("granted", [P])]
        client.put(key, b"2")
        batch = next_changes(first)
        assert [(c.key, c.value) for c in batch] == [(key, b"2")]
        assert (batch.partitions, first.partitions) == ([P], [P])
        batch.commit()
        client.put(key, b"3")
        next_changes(first)
        groups.grant("a", Q, generation=2)
        while ("revoked", [P]) not in told:
            next(first)
        next(first)
        groups.wait_held("a", *sorted((Q,)))
        groups.grant("b", P, generation=3)
        with client.group("g", member="b", start="now") as second:
            assert next_changes(second).values == [b"3"], "it was not committed"


def test_replaced_owner_commits_nothing_although_it_was_told_nothing(
    client: Client, groups: ScriptedGroups
) -> None:
    key = KEYS[2]
    p = PARTITION_OF(key)
    groups.grant("a", p, generation=1)
    groups.grant("b", p, generation=2)
    with client.group("h", member="a", start="now") as zombie:
        wait_owning(zombie)
        client.put(key, b"1")
        late = next_changes(zombie)
        with client.group("h", member="b", start="now") as owner:
            assert next_changes(owner).values == [b"1"]
            with pytest.raises(StaleGenerationError):
                late.commit()
            (part,) = late.parts()
            with pytest.raises(StaleGenerationError):
                part.batch().increment(key).commit()
            next(zombie)
            assert zombie.partitions == []
    assert client.get(key) == b"1"


def test_results_are_written_with_the_position_once(client: Client, groups: ScriptedGroups) -> None:
    others = (b"count/%d" % n for n in itertools.count())
    counted = next(key for key in others if PARTITION_OF(key) == P)
    mine = [KEYS[0], *itertools.islice((k for k in others if PARTITION_OF(k) == P), 2)]
    groups.grant("a", P, generation=1)
    with client.group("r", member="a", start="now") as group:
        wait_owning(group)
        for key in mine:
            client.put(key, b"x")
        seen = 0
        while seen < len(mine):
            for part in next_changes(group).parts(at_most=1):
                if part.keys == [counted]:
                    continue  # the count's own change
                assert len(part) == 1
                count = part.batch().increment(counted)
                holding = group._consumer.membership.holdings[P]
                before = holding.committed
                count.commit()
                holding.committed = before  # as after a reply that was lost
                count.commit()
                with pytest.raises(InvalidArgumentError):
                    count.commit()
                seen += len(part)
    assert client.get(counted) == b"%d" % seen


def test_batch_in_hand_at_the_end_of_the_block_comes_again(
    client: Client, groups: ScriptedGroups
) -> None:
    groups.grant("a", P, generation=1)
    first = client.group("hand", member="a", start="now", on_revoked=lambda _: first.commit())
    with first:
        wait_owning(first)
        client.put(KEYS[0], b"1")
        next_changes(first)
        client.put(KEYS[0], b"2")
        next_changes(first)
    later = next(key for n in itertools.count() if PARTITION_OF(key := b"later/%d" % n) == P)
    client.put(later, b"3")
    groups.grant("b", P, generation=2)
    with client.group("hand", member="b", start="now") as second:
        assert next_changes(second).values[0] == b"2", "only the first was handled"


def test_batch_that_an_interrupt_keeps_from_the_caller_comes_again(
    client: Client, groups: ScriptedGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups.grant("a", P, generation=1)
    with client.group("g", member="a", start="now") as group:
        wait_owning(group)
        client.put(KEYS[0], b"1")
        run = group._run
        kept: list[Any] = []

        def interrupted(work: Any) -> Any:
            found = run(work)
            if not kept and isinstance(found, KeyspaceChanges):
                kept.append(found)
                raise KeyboardInterrupt  # as a signal handler may, once the loop has answered
            return found

        monkeypatch.setattr(group, "_run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next_changes(group)
        batch = next_changes(group)
        assert [(c.key, c.value) for c in batch] == [(KEYS[0], b"1")]
        batch.commit()
        client.put(KEYS[0], b"2")
        assert [c.value for c in next_changes(group)] == [b"2"]


def test_keyspace_that_nodes_know_to_be_dropped_is_revoked(
    cluster: LocalCluster, groups: ScriptedGroups
) -> None:
    """As where the coordinators' answer comes later than the end of the feed."""
    revoked: list[int] = []
    with Admin(cluster.coordinators, timeout_ms=30_000) as admin, cluster.client() as client:
        admin.keyspaces.create("dropped", partition_count=1)
        table = admin.status().table
        assert table is not None
        (p,) = table.keyspaces.named("dropped").partition_ids
        groups.grant("a", p, generation=1)
        with client.group(
            "d", keyspaces=["dropped"], member="a", on_revoked=revoked.extend
        ) as group:
            client.keyspace("dropped").put(b"k", b"1")
            late = next_changes(group)
            admin.keyspaces.drop("dropped")
            while not revoked:
                next(group)
            assert revoked == [p]
            for commit in (late.commit, lambda: late.parts()[0].batch().increment(b"n").commit()):
                with pytest.raises(StaleGenerationError):
                    commit()
            next(group)
            groups.refusal = UnknownKeyspaceError()
            with pytest.raises(UnknownKeyspaceError, match="dropped"):
                next_changes(group)


def test_silent_coordinators_end_the_session(client: Client, groups: ScriptedGroups) -> None:
    groups.grant("a", P, generation=1)
    with client.group("s", member="a", session_ms=1_000) as group:
        wait_owning(group)
        groups.is_silent = True
        while group.partitions:
            next(group)
        groups.is_silent = False
        groups.grant("a", P, generation=2)
        wait_owning(group)


def test_pause_and_resume(client: Client, groups: ScriptedGroups) -> None:
    groups.grant("a", P, generation=1)
    with client.group("p", member="a", start="now") as group:
        wait_owning(group)
        group.pause([P])
        client.put(KEYS[0], b"paused")
        assert not len(next(group))
        assert group.partitions == [P]
        group.resume([P])
        assert next_changes(group).values[-1] == b"paused"
        group.begin_again(P)
        assert KEYS[0] in next_changes(group).keys


def test_position_goes_back_only_to_begin_again(client: Client, groups: ScriptedGroups) -> None:
    groups.grant("a", P, generation=1)
    with client.group("back", member="a", start="now") as group:
        wait_owning(group)
        client.put(KEYS[0], b"1")
        first = next_changes(group)
        client.put(KEYS[0], b"2")
        second = next_changes(group)
        holding = group._consumer.membership.holdings[P]
        second.commit()
        newest = holding.committed
        first.commit()
        assert holding.committed == newest
        client.put(KEYS[0], b"3")
        (part,) = next_changes(group).parts()
        holding.committed = PartitionPosition(1)  # as if the reply to the commit was lost
        first.commit()
        part.batch().commit()
        assert holding.committed > newest, "the batch goes on from where the cursor is"
        holding.committed = newest
        group.begin_again(P)
        assert holding.committed == PartitionPosition()
        second.commit()
        assert holding.committed == PartitionPosition()
    groups.grant("b", P, generation=2)
    with client.group("back", member="b", start="now") as group:
        wait_owning(group)
        assert group._consumer.membership.holdings[P].committed == PartitionPosition()


def test_partition_that_cannot_begin_again_goes_on(
    client: Client, groups: ScriptedGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups.grant("a", P, generation=1)
    with client.group("again", member="a", start="now") as group:
        wait_owning(group)
        client.put(KEYS[0], b"1")
        next_changes(group)
        group.begin_again(Q)  # not owned

        async def late(*_: Any) -> None:
            raise UnavailableError(reason="the deadline passed")

        with monkeypatch.context() as patch:
            patch.setattr(group._consumer, "_commit_after", late)
            with pytest.raises(UnavailableError):
                group.begin_again(P)
        client.put(KEYS[0], b"2")
        assert next_changes(group).values == [b"2"]
        groups.grant("b", P, generation=2)
        with client.group("again", member="b", start="now") as owner:
            wait_owning(owner)
            group.begin_again(P)
            while group.partitions:
                next(group)


def test_member_is_fenced_by_its_name(client: Client, groups: ScriptedGroups) -> None:
    groups.refusal = MemberFencedError(group="f", member_id="a")
    with client.group("f", member="a") as group, pytest.raises(MemberFencedError):
        next(group)


def test_closed_client_ends_the_iteration(cluster: LocalCluster, groups: ScriptedGroups) -> None:
    client = cluster.client()
    groups.grant("a", P, generation=1)
    with client.group("c", member="a") as group:
        wait_owning(group)
        client.close()
        with pytest.raises(ClientClosedError):
            next(group)


def test_no_change_comes_before_its_callbacks_are_done(
    client: Client, groups: ScriptedGroups
) -> None:
    told: list[Any] = []

    def tell(what: str, partitions: Any) -> None:
        told.append((what, list(partitions)))
        if len(told) in (1, 3):
            raise RuntimeError

    def wait_told(times: int) -> None:
        while len(told) < times:
            next(group)

    groups.grant("a", P, generation=1)
    with client.group(
        "told",
        member="a",
        on_granted=lambda partitions: tell("granted", partitions),
        on_revoked=lambda partitions: tell("revoked", partitions),
    ) as group:
        with pytest.raises(RuntimeError):
            next_changes(group)
        next(group)
        assert told == [("granted", [P])] * 2
        groups.grant("a", P, generation=2)
        with pytest.raises(RuntimeError):
            wait_told(3)
        wait_told(5)
        assert told[2:] == [("revoked", [P]), ("revoked", [P]), ("granted", [P])]


async def test_cancelled_callback_is_called_again_before_the_first_change(
    cluster: LocalCluster, groups: ScriptedGroups
) -> None:
    begun: list[Any] = []
    may_end = asyncio.Event()

    async def on_granted(partitions: Any) -> None:
        begun.append(partitions)
        await may_end.wait()

    groups.grant("a", P, generation=1)
    async with (
        koinon.aio.connect(cluster.coordinators) as client,
        client.group("y", member="a", on_granted=on_granted) as group,
    ):
        await client.put(KEYS[0], b"1")
        while len(begun) < 2:
            with contextlib.suppress(TimeoutError):
                assert not len(await asyncio.wait_for(anext(group), 0.2))
        may_end.set()
        async for batch in group:
            if len(batch):
                break
        assert begun == [[P]] * 3


async def test_asyncio_group(cluster: LocalCluster, groups: ScriptedGroups) -> None:
    told: list[Any] = []

    async def on_granted(partitions: Any) -> None:
        await asyncio.sleep(0)
        told.append(partitions)

    async with (
        koinon.aio.connect(cluster.coordinators) as client,
        client.group("x", start="now", on_granted=on_granted) as group,
    ):
        groups.grant(group.member_id, P, generation=1)
        async for _ in group:
            if told:
                break
        await client.put(KEYS[0], b"async")
        async for batch in group:
            if len(batch):
                break
        assert list(batch)[-1].value == b"async"
        await batch.commit()
        await group.commit()
        assert told == [[P]]
        member = group.member_id
    assert groups.left == [member]
