"""A reader of change feeds, in some of the seeds: its copy is what the cluster holds in the end.

It reads a few messages of a partition's feed at a time, from where it has come to, of whichever
node it takes for the primary; calls are lost, late and cut short like all others. What a node tells
it counts as acknowledged from then on, so the checker of copies finds whatever a failover would
take back. Of each key versions never fall, and no position may branch off: no primary is forced.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from koinon_node.partition.change_feeds import Advance, FeedMessage, Position
from koinon_proto.contract.errors import HistoryBranchedError, KoinonError, SnapshotNeededError
from koinon_proto.contract.table import Table, apply_update
from tests.simulation.network import Network

SEEDS = (6, 8)
"""The last digits of the seeds that have a reader; the others go as they always did."""
NAME = "feed reader"
CALL_TIMEOUT_S = 2.5
PAUSE_S = 0.05
TAIL_BYTES = (0, 400, 1 << 20)
"""Of recent changes that a node keeps: nothing, a few, all."""


class Seen(NamedTuple):
    """The newest change of a key that the reader has received; ``value`` None is a delete."""

    version: int
    value: bytes | None


class FeedReader:
    """One reader of all partitions of ``default``."""

    def __init__(
        self,
        network: Network,
        coordinators: Sequence[str],
        partitions: int,
        rng: random.Random,
        stats: Counter[str],
        violated: Callable[[str], None],
    ) -> None:
        self._network = network
        self._coordinators = coordinators
        self._rng = rng
        self._stats = stats
        self._violated = violated
        self._table: Table | None = None
        self._positions = [Position(p) for p in range(partitions)]
        self.stopping = False
        self.reading = 0  # partitions
        self._copies: list[dict[bytes, Seen]] = [{} for _ in range(partitions)]

    async def run(self) -> None:
        """Go on until told to stop, in all partitions side by side."""
        self.reading = len(self._positions)
        async with asyncio.TaskGroup() as group:
            for partition_id in range(len(self._positions)):
                group.create_task(self._follow(partition_id))

    async def _follow(self, partition_id: int) -> None:
        while not self.stopping:
            await asyncio.sleep(self._rng.expovariate(1 / PAUSE_S))
            await self.read(partition_id)
        self.reading -= 1

    async def read(self, partition_id: int) -> bool:
        """Read on in a partition; return whether all is told that was there."""
        address = await self._primary_of(partition_id)
        if not address:
            return False
        position = self._positions[partition_id].copy()
        try:
            messages: list[FeedMessage] = await self._network.call(
                NAME, address, "changes", position, timeout_s=CALL_TIMEOUT_S
            )
        except KoinonError:
            self._table = None
            return False
        is_caught_up = False
        for message in messages:
            for advance in message.advances:
                self._take(partition_id, advance)
                is_caught_up |= advance.caught_up
            for error in message.refusals.values():
                self._refused(partition_id, error)
        return is_caught_up

    async def _primary_of(self, partition_id: int) -> str:
        if self._table is None:
            coordinator = self._rng.choice(self._coordinators)
            try:
                update = await self._network.call(NAME, coordinator, "table", 0, timeout_s=0.5)
            except KoinonError:
                return ""
            if update is None:  # that coordinator has none
                return ""
            self._table = apply_update(None, update)
        primary = self._table.primary_of(partition_id) if self._table is not None else None
        if primary is None:
            self._table = None
        return primary.node_id if primary is not None else ""

    def _take(self, partition_id: int, advance: Advance) -> None:
        copy = self._copies[partition_id]
        for change in advance.changes:
            self._stats["changes told"] += 1
            before = copy.get(change.key)
            if before is not None and change.sequence < before.version:
                self._violated(
                    f"the feed of partition {partition_id} went back: {change} after {before}"
                )
            copy[change.key] = Seen(change.sequence, change.value)
        self._positions[partition_id] = advance.position.copy()

    def _refused(self, partition_id: int, error: KoinonError) -> None:
        if isinstance(error, HistoryBranchedError):
            self._violated(f"a feed's position has branched off: {error}")
        if isinstance(error, SnapshotNeededError):
            self._stats["feeds begun anew"] += 1
            self._positions[partition_id] = Position(partition_id)
            self._copies[partition_id] = {}
        else:
            self._table = None

    def live(self, partition_id: int) -> dict[bytes, tuple[int, bytes]]:
        """Return the records of the reader's copy: {key: (version, value)}."""
        copy = self._copies[partition_id]
        return {key: (v, value) for key, (v, value) in copy.items() if value is not None}
