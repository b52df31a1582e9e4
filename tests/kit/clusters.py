"""Clusters of real processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from koinon.local import LocalCluster


def end_at_once(cluster: LocalCluster) -> None:
    """Kill all members, and let go of the directory: how they end is another test's subject."""
    if any(cluster.pid(name) is not None for name in cluster.names):
        cluster.stop(timeout_s=0.0)
    cluster.close()


@contextmanager
def running_cluster(*args: Any, **options: Any) -> Iterator[LocalCluster]:
    """Run a cluster inside the block, ready when it begins; arguments as of LocalCluster."""
    cluster = LocalCluster(*args, **options)
    try:
        cluster.start()
        cluster.wait_ready()
        yield cluster
    finally:
        end_at_once(cluster)
