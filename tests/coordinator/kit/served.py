"""A coordinator that leads a group of one and serves, on a port of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from koinon_coordinator.config import BootstrapConfig, CoordinatorConfig, TimingConfig
from koinon_coordinator.coordinator import Coordinator
from koinon_coordinator.server import running
from koinon_proto.contract.table import PartitionStatus
from tests.kit.addresses import free_address
from tests.kit.waiting import until

from .fake_node import Caller, FakeNode

FAST = TimingConfig(election_timeout_ms=60, raft_heartbeat_ms=20)
PATIENT = replace(FAST, lease_ms=20_000, session_timeout_ms=30_000)
"""For tests in which no lease or session is to end: on a busy machine those of a second would."""


def with_coordinator(
    data: Path,
    test: Callable[[Coordinator, Caller], Awaitable[None]],
    *,
    bootstrap: BootstrapConfig | None = None,
    timing: TimingConfig = PATIENT,
) -> None:
    """Run the test against a coordinator that leads a group of one."""

    async def whole() -> None:
        address = free_address()
        config = CoordinatorConfig(
            member_id="c1",
            listen=address,
            advertise=address,
            data=data,
            members={"c1": address},
            bootstrap=bootstrap or BootstrapConfig(partition_count=8),
            timing=timing,
        )
        async with running(config) as coordinator:
            caller = Caller(address)
            try:
                await until(lambda: coordinator.leads and coordinator.table() is not None)
                await test(coordinator, caller)
            finally:
                await caller.close()

    asyncio.run(asyncio.wait_for(whole(), 120))


def online(node: FakeNode) -> int:
    rows = node.table.rows if node.table is not None else ()
    return sum(row.status is PartitionStatus.ONLINE for row in rows)
