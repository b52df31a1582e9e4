"""A replicator with the rows that a test gives it, its clock, and what it proposes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from koinon_node.config import Limits
from koinon_node.ports import RowChange
from koinon_proto.contract.table import PartitionRow, Table, first_sequence
from koinon_proto.v1 import replication_pb2 as wire
from tests.node.kit.held_writer import EPOCH, Bench, row_of, table_of, with_engine
from tests.node.kit.played_follower import turn

START = first_sequence(EPOCH)
Use = Callable[[Bench], Awaitable[None]]
TWO = row_of(0, (1, 2))
THREE = row_of(0, (1, 2, 3))
LEAVES = wire.FollowRequest(close=wire.ClosePartitions(leaves=True))


def with_rows(
    directory: Path, use: Use, *rows: PartitionRow, limits: Limits | None = None, **facts: Any
) -> None:
    """Run ``use`` with these rows adopted; partitions with others in sync are not served yet."""

    async def run(bench: Bench) -> None:
        await bench.lead_all(table_of(*rows, **facts))
        await use(bench)

    with_engine(directory, run, limits=limits, lead=False)


def newer(bench: Bench, *rows: PartitionRow, **facts: Any) -> Table:
    """Give the node a newer table with these rows."""
    table = table_of(*rows, version=bench.state.table().table_version + 1, **facts)
    bench.take_table(table)
    return table


async def tick(bench: Bench, seconds: float = 0.0) -> None:
    bench.now += seconds
    bench.replicator.tick()
    await turn()


def proposed(bench: Bench) -> RowChange:
    """Return the one change of the newest call."""
    (change,) = bench.coordinator.calls[-1][0]
    return change


def start(call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.create_task(call)


async def answered(task: asyncio.Task[Any]) -> bool:
    await turn()
    return task.done()
