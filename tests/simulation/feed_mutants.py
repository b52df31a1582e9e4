"""Planted defects of change feeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from koinon_node.core.writes.change_tail import ChangeTail
from koinon_node.core.writes.commit_group import CommitGroup
from koinon_node.partition.change_feeds import Feed
from tests.simulation.planting import mutant, replace_method

NAMES: Sequence[str] = (
    "tells-what-is-not-complete",
    "goes-on-beyond-a-record-that-is-not-complete",
    "goes-on-below-the-purge-floor",
    "forgets-what-a-merge-step-has-written",
    "keeps-no-tombstones-for-its-readers",
)


@mutant
def tells_what_is_not_complete() -> None:
    """A change is told as soon as it is durable at the primary."""

    def make(read: Any) -> Any:
        def eager(
            self: ChangeTail, p: int, epoch: int, after: int, through: int, **bounds: int
        ) -> Any:
            followed = self._followed.get(p)
            if followed is not None and followed.groups:
                through = max(through, followed.groups[-1].last)
            return read(self, p, epoch, after, through, **bounds)

        return eager

    replace_method(ChangeTail, "read", make)


@mutant
def goes_on_beyond_a_record_that_is_not_complete() -> None:
    """A page of a backfill is told although a record that it met may be lost in a failover."""

    def make(read_page: Any) -> Any:
        async def hasty(self: Feed, member: Any) -> Any:
            page = await read_page(self, member)
            page.newest = 0
            return page

        return hasty

    replace_method(Feed, "_read_page", make)


@mutant
def goes_on_below_the_purge_floor() -> None:
    def make(records: Any) -> Any:
        def unbounded(self: Feed, position: Any) -> Any:
            return records(self, position)._replace(purge_floor=0)

        return unbounded

    replace_method(Feed, "_records", make)


@mutant
def forgets_what_a_merge_step_has_written() -> None:
    def make(append: Any) -> Any:
        def careless(self: ChangeTail, group: CommitGroup) -> None:
            claims, group.claims = group.claims, set()
            append(self, group)
            group.claims = claims

        return careless

    replace_method(ChangeTail, "append", make)


@mutant
def keeps_no_tombstones_for_its_readers() -> None:
    """With one copy a delete leaves nothing, and nobody is told that the floor has risen."""

    def make(records: Any) -> Any:
        def unbounded(self: Feed, position: Any) -> Any:
            return records(self, position)._replace(purge_floor=0)

        return unbounded

    replace_method(Feed, "_records", make)
    replace_method(ChangeTail, "mark", lambda _: lambda self, mask: mask.fill(False))
