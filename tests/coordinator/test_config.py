from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from koinon_coordinator.config import (
    BootstrapConfig,
    CoordinatorConfig,
    TimingConfig,
    parse_members,
)
from koinon_coordinator.coordinator import raft_config
from koinon_coordinator.core.cluster.commands import CreateCluster
from koinon_coordinator.state_machine import ReplicatedState
from koinon_coordinator.wire.state_codec import command_to_bytes
from koinon_proto.contract.errors import ConfigurationError
from koinon_proto.contract.table import ClusterConfig
from koinon_proto.partitioner import partitioner
from tests.coordinator.kit.support import cluster_config, register

THREE = {"c1": "h:1", "c2": "h:2", "c3": "h:3"}


def config(**changes: Any) -> CoordinatorConfig:
    values: dict[str, Any] = {
        "member_id": "c1",
        "listen": "h:1",
        "advertise": "h:1",
        "data": Path("data"),
        "members": THREE,
    }
    return CoordinatorConfig(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"lease_ms": 1500}, r"lease-ms 1500 .* session-timeout-ms 1500"),
        ({"lease_ms": 1100}, r"check-quorum-ms 400 \+ lease-ms 1100 = 1500 .* 1500"),
        ({"heartbeat_interval_ms": 1000}, r"heartbeat-interval-ms 1000 .* lease-ms 1000"),
        ({"raft_heartbeat_ms": 300}, r"raft-heartbeat-ms 300 .* election-timeout-ms 300"),
        ({"raft_heartbeat_ms": 200}, r"raft-heartbeat-ms 200 .* check-quorum-ms 400"),
        ({"lease_ms": 0}, r"lease-ms 0"),
        ({"replica_timeout_ms": 0}, r"replica-timeout-ms 0"),
        ({"rereplicate_after_ms": -1}, r"rereplicate-after-ms -1"),
    ],
)
def test_timing_that_contradicts_itself_is_refused_with_both_values(
    changes: dict[str, int], names: str
) -> None:
    with pytest.raises(ConfigurationError, match=names):
        TimingConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"replication_factor": 3}, r"replication-factor 3 .* bootstrap-nodes 1"),
        ({"replication_factor": 8, "bootstrap_nodes": 9}, "replication-factor 8 .* 1 to 7"),
        ({"replication_factor": 0}, "replication-factor 0 .* 1 to 7"),
        ({"bootstrap_nodes": 0}, "bootstrap-nodes 0"),
        ({"partition_count": 0}, "partitions 0 .* 65536"),
        ({"partition_count": 65537}, "partitions 65537 .* 65536"),
        ({"partitioner": "crc"}, "'crc'.*crc16.*md5.*murmur2"),
        ({"partitioner": "crc16", "partition_count": 1000}, "partitions 1000 .* two up to 16384"),
        ({"partitioner": "crc16", "partition_count": 32768}, "partitions 32768 .* up to 16384"),
        ({"partitioner": "crc16(until:2f)", "partition_count": 1000}, "partitions 1000 .* two"),
        ({"router": "until:/"}, "'until:/' .* hexadecimal"),
        ({"router": "tag", "partitioner": "murmur2(until:2f)"}, r"until:2f.* tag"),
        ({"max_value_bytes": 0}, "max-value-bytes 0"),
        ({"max_value_bytes": 1 << 30}, "max-value-bytes 1073741824 .* 8388608"),
    ],
)
def test_bootstrap_out_of_bounds_is_refused_with_both_values(
    changes: dict[str, Any], names: str
) -> None:
    with pytest.raises(ConfigurationError, match=names):
        BootstrapConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"members": {"c1": "h:1", "c2": "h:2"}}, "2 coordinators .* odd"),
        ({"members": {}}, "--members .* or --join"),
        ({"join": True}, "exclude"),
        ({"member_id": "c9"}, "'c9' is not among"),
        ({"listen": "h:²"}, "listen 'h:²'"),
        ({"members": {**THREE, "c3": "h"}}, "members 'h'"),
        ({"advertise": "h:9"}, "h:1 for 'c1', it advertises h:9"),
        ({"members": {**THREE, "c3": "h:1"}}, "same address"),
    ],
)
def test_coordinator_config_that_contradicts_itself_is_refused(
    changes: dict[str, Any], names: str
) -> None:
    with pytest.raises(ConfigurationError, match=names):
        config(**changes)


def test_coordinator_config_good_ones_are_taken() -> None:
    raft = raft_config(config())
    assert (raft.election_timeout_min_ms, raft.election_timeout_max_ms) == (300, 600)
    assert raft.initial_members == THREE
    assert raft_config(config(members={}, join=True)).initial_members == {}


@pytest.mark.parametrize(
    ("bootstrap", "copies", "min_in_sync", "warns"),
    [
        (BootstrapConfig(), 1, 1, "one copy: it cannot be served while its node is down"),
        (BootstrapConfig(bootstrap_nodes=2), 2, 1, "two copies: one node may fail"),
        (BootstrapConfig(bootstrap_nodes=3), 3, 2, ""),
        (BootstrapConfig(bootstrap_nodes=9), 3, 2, ""),
        (BootstrapConfig(bootstrap_nodes=3, replication_factor=1), 1, 1, ""),
        (BootstrapConfig(bootstrap_nodes=7, replication_factor=7), 7, 4, ""),
    ],
)
def test_replication_factor_is_three_where_nodes_are_and_what_was_asked_for(
    bootstrap: BootstrapConfig, copies: int, min_in_sync: int, warns: str
) -> None:
    cluster = bootstrap.cluster("x", TimingConfig())
    assert (cluster.replication_factor, cluster.min_in_sync) == (copies, min_in_sync)
    assert bool(bootstrap.few_copies_warning()) == bool(warns)
    assert warns in bootstrap.few_copies_warning()


def test_timing_of_replication_is_replicated_and_zero_means_never() -> None:
    timing = TimingConfig(replica_timeout_ms=700, rereplicate_after_ms=0)
    cluster = BootstrapConfig().cluster("x", timing)
    assert (cluster.replica_timeout_ms, cluster.rereplicate_after_ms) == (700, 0)
    in_force = TimingConfig().in_force(cluster)
    assert (in_force.replica_timeout_ms, in_force.rereplicate_after_ms) == (700, 0)


def test_timing_ticks_often_and_is_not_easily_called_a_pause() -> None:
    timing = TimingConfig()
    assert timing.tick_s == 0.02
    assert timing.session_times().pause_s == 0.25
    assert timing.resting_tick_s == pytest.approx(0.1)
    assert TimingConfig(heartbeat_interval_ms=40).tick_s == 0.01


def test_bootstrap_differences_name_what_differs_from_the_replicated() -> None:
    replicated = BootstrapConfig(partition_count=64).cluster("id", TimingConfig(lease_ms=900))
    ours = BootstrapConfig(partition_count=16, bootstrap_nodes=2)
    assert ours.differences(TimingConfig(), replicated) == {
        "partition_count": (16, 64),
        "bootstrap_nodes": (2, 1),
        "lease_ms": (1000, 900),
    }


def test_bootstrap_router_stands_in_the_partitioners_name_with_its_fingerprint() -> None:
    boot = BootstrapConfig(router="until:2F,1")
    cluster = boot.cluster("id", TimingConfig())
    assert cluster.partitioner == "murmur2(until:2f)"
    assert cluster.partitioner_fingerprint == partitioner("murmur2(until:2f)", 8).fingerprint
    same = BootstrapConfig(partitioner="murmur2(until:2f)")
    assert same.differences(TimingConfig(), cluster) == {}
    assert BootstrapConfig().differences(TimingConfig(), cluster) == {
        "partitioner": ("murmur2", "murmur2(until:2f)")
    }
    before_fingerprints = replace(cluster, partitioner_fingerprint=b"")
    assert same.differences(TimingConfig(), before_fingerprints) == {}


def test_bootstrap_differences_leave_out_a_replication_factor_that_nobody_asked_for() -> None:
    """An operator may have changed it; a flag that says otherwise is named all the same."""
    replicated = BootstrapConfig(bootstrap_nodes=3).cluster("id", TimingConfig())
    raised = replace(replicated, replication_factor=5)
    assert BootstrapConfig(bootstrap_nodes=3).differences(TimingConfig(), raised) == {}
    asked = BootstrapConfig(bootstrap_nodes=3, replication_factor=3)
    assert asked.differences(TimingConfig(), raised) == {"replication_factor": (3, 5)}


def test_timing_in_force_is_the_replicated_one_and_keeps_what_is_the_members_own() -> None:
    cluster = BootstrapConfig().cluster("id", TimingConfig(lease_ms=900, session_timeout_ms=1400))
    timing = TimingConfig(election_timeout_ms=350).in_force(cluster)
    assert (timing.lease_ms, timing.session_timeout_ms) == (900, 1400)
    assert timing.election_timeout_ms == 350


def test_timing_in_force_that_contradicts_the_members_own_is_refused() -> None:
    cluster = BootstrapConfig().cluster("id", TimingConfig())
    with pytest.raises(ConfigurationError, match=r"250.*check-quorum-ms 400"):
        TimingConfig(raft_heartbeat_ms=250, check_quorum_ms=600, session_timeout_ms=2000).in_force(
            cluster
        )


@pytest.mark.parametrize("text", ["c1", "c1=h:1,c1=h:2"])
def test_parse_members_bad_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="c1"):
        parse_members(text)


def test_parse_members_reads_pairs_in_order() -> None:
    assert parse_members("c1=h:1, c2=h:2,") == {"c1": "h:1", "c2": "h:2"}
    assert parse_members("") == {}


def test_replicated_state_tells_of_the_configuration_that_it_applies_or_restores() -> None:
    seen: list[ClusterConfig] = []
    state = ReplicatedState(seen.append)
    config = cluster_config()
    state.apply(1, command_to_bytes(CreateCluster(config=config)))
    state.apply(2, command_to_bytes(register("n1")))
    assert seen == [config]
    seen.clear()
    ReplicatedState(seen.append).restore(state.capture()())
    assert seen == [config]
