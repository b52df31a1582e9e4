"""What requests are held against before anything is done: the limits of keys, values and times."""

from __future__ import annotations

from typing import Any

from koinon_node.state import NodeState
from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.contract.table import MAX_KEY_BYTES, MAX_TTL_MS, ClusterConfig


def cluster_of(state: NodeState, request: Any) -> ClusterConfig:
    """Return the cluster's configuration, once it is known that the request is meant for it."""
    cluster = state.table().cluster
    cluster.check_id(request.cluster_id)
    return cluster


def check_key(key: bytes) -> None:
    """Raise InvalidArgumentError unless the key has 1 to 500 bytes."""
    if not 1 <= len(key) <= MAX_KEY_BYTES:
        raise InvalidArgumentError(
            field="key",
            reason="must have 1 to 500 bytes",
            limit=MAX_KEY_BYTES if key else 1,
            actual=len(key),
        )


def check_value(size: int, cluster: ClusterConfig, field: str = "value") -> None:
    """Raise InvalidArgumentError if a value of so many bytes is too long."""
    if size > cluster.max_value_bytes:
        raise InvalidArgumentError(
            field=field, reason="too long", limit=cluster.max_value_bytes, actual=size
        )


def check_ttl(ttl_ms: int, field: str = "ttl_ms") -> None:
    """Raise InvalidArgumentError if the time to live is longer than any may be."""
    if ttl_ms > MAX_TTL_MS:
        raise InvalidArgumentError(
            field=field, reason="more than a hundred years", limit=MAX_TTL_MS, actual=ttl_ms
        )
