"""Settings of a member and its transport that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from koinon_coordinator.raft import (
    TransportConfig,
)
from koinon_proto.contract.errors import (
    ConfigurationError,
)

from .in_process import member_config


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"initial_members": {"a": "h:1", "b": "h:2"}}, ["2 voters", "a, b"]),
        ({"member_id": "z"}, ["'z'", "'a', 'b', 'c'"]),
        ({"initial_members": {"a": "h:1", "b": "h:1", "c": "h:2"}}, ["one address"]),
        ({"election_timeout_min_ms": 700}, ["=700", "election_timeout_max_ms=600"]),
        ({"heartbeat_interval_ms": 350}, ["=350", "election_timeout_min_ms=300"]),
        ({"check_quorum_ms": 100}, ["heartbeat_interval_ms=75", "check_quorum_ms=100"]),
        ({"tick_interval_ms": 60}, ["=60", "heartbeat_interval_ms=75"]),
        ({"map_bytes_max": 1}, ["map_bytes_max=1"]),
        ({"pending_reads_max": 0}, ["pending_reads_max=0"]),
        ({"pending_proposal_bytes_max": 9}, ["append_bytes_max=1048576", "bytes_max=9"]),
        ({"append_bytes_max": 7 << 20}, ["append_bytes_max=7340032", "a message's limit"]),
        ({"snapshot_chunk_bytes": 1 << 29}, ["snapshot_chunk_bytes=", "a message's limit"]),
        ({"member_id": "", "initial_members": {}}, ["member_id"]),
    ],
)
def test_config_that_contradicts_itself_is_refused(
    settings: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        member_config(**settings)
    for part in named:
        assert part in str(caught.value)


def test_transport_config_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="=400"):
        TransportConfig(reconnect_backoff_min_ms=400)
    with pytest.raises(ConfigurationError, match="batch_bytes_max"):
        TransportConfig(queue_bytes_max=1)
