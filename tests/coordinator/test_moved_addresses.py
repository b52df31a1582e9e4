"""Coordinators that are started again with other addresses than their group knows them by."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from koinon.operate.cluster_status import status_from_proto
from koinon.operate.judge.health import problems
from koinon_coordinator.config import BootstrapConfig, CoordinatorConfig
from koinon_coordinator.server import running
from koinon_proto.contract.errors import ClusterNotReadyError
from tests.coordinator.kit.fake_node import Caller
from tests.coordinator.kit.served import PATIENT
from tests.kit.addresses import free_addresses
from tests.kit.waiting import until

IGNORED = "setting ignored"


def config(data: Path, members: Mapping[str, str]) -> CoordinatorConfig:
    return CoordinatorConfig(
        member_id="c1",
        listen=members["c1"],
        advertise=members["c1"],
        data=data,
        members=members,
        bootstrap=BootstrapConfig(partition_count=8),
        timing=PATIENT,
    )


def test_coordinator_that_is_alone_takes_its_new_address_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def led_at(address: str) -> None:
        async with running(config(tmp_path, {"c1": address})) as coordinator:
            await until(lambda: coordinator.leads and coordinator.table() is not None)
            await until(lambda: coordinator.raft_status().members["c1"].address == address)
            assert coordinator.raft_status().leader_address == address

    for address in free_addresses(2):
        asyncio.run(asyncio.wait_for(led_at(address), 120))
    assert IGNORED not in caplog.text


async def test_members_that_are_ignored_are_named_in_the_log_in_status_and_by_no_loss_of_data(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    addresses = free_addresses(6)
    before, after = (
        dict(zip(("c1", "c2", "c3"), some, strict=True)) for some in (addresses[:3], addresses[3:])
    )
    async with running(config(tmp_path, before)):
        assert IGNORED not in caplog.text
    async with running(config(tmp_path, after)):
        assert f"{IGNORED} setting=members" in caplog.text
        for told in (before["c1"], after["c1"], "recover-coordinators"):
            assert told in caplog.text
        caller = Caller(after["c1"])
        [_, moved, _] = problems(status_from_proto(await caller.status()))
        assert f"c1 was started with the address {after['c1']}" in moved
        assert f"looks for it at {before['c1']}" in moved
        with pytest.raises(ClusterNotReadyError, match="no table is known here"):
            await caller.get_table()
        await caller.close()
