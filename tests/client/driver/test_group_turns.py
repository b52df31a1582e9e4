"""A consumer of several keyspaces takes their changes in turn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from koinon.core.groups import KeyspaceChanges
from koinon.driver.group_consumer import GroupConsumer


class BusyFeed:
    """A feed that always has changes."""

    def __init__(self, partition_id: int) -> None:
        self._part = SimpleNamespace(partition_id=partition_id)

    def take(self) -> tuple[str, list[Any]]:
        return "changes", [self._part]


async def test_a_busy_keyspace_keeps_no_other_waiting() -> None:
    consumer: Any = GroupConsumer.__new__(GroupConsumer)
    consumer._closed, consumer._error = False, None
    consumer._engine = SimpleNamespace(closed=False, now=lambda: 0.0)
    consumer._feeds = {keyspace_id: BusyFeed(keyspace_id) for keyspace_id in (1, 2, 3)}
    consumer._followed = {p: SimpleNamespace(generation=1) for p in (1, 2, 3)}
    consumer._targets = {p: f"keyspace {p}" for p in (1, 2, 3)}
    consumer._follow_owned = lambda: None
    consumer.membership = SimpleNamespace(
        expire=lambda _: False, changes=lambda: None, deliver=lambda _: None
    )
    taken: list[KeyspaceChanges] = [consumer._take() for _ in range(6)]
    assert [str(changes.target) for changes in taken] == [f"keyspace {p}" for p in (1, 2, 3)] * 2
