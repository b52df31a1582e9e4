"""Stops and starts the processes of a cluster one after the other, as an operator does."""

from __future__ import annotations

import time
from dataclasses import dataclass

from koinon.local import LocalCluster
from koinon.operate.admin import Admin
from koinon.operate.cluster_status import ClusterStatus
from koinon.operate.judge.health import problems

TIMEOUT_S = 60.0
STOP_S_MAX = 28.0
PATIENT = [
    *("--lease-ms", "4000", "--session-timeout-ms", "6000", "--check-quorum-ms", "1500"),
]
"""Flags of coordinators, where a lease is not what is looked at: a machine that is busy with other
tests ends those of a second by itself. The scenario ``stops`` of ``bench`` uses the defaults.
"""


@dataclass(frozen=True, kw_only=True)
class Restart:
    """The restart of a process: when it was told to stop, had ended, was started, and all was well
    again; all by ``time.monotonic``.
    """

    name: str
    stop_at: float
    ended_at: float
    start_at: float
    well_at: float


def is_well(status: ClusterStatus) -> bool:
    """Tell whether ``koinon admin status`` finds nothing wrong."""
    return status.is_leader and not problems(status)


def wait_well(cluster: LocalCluster) -> None:
    cluster.wait_ready(TIMEOUT_S)
    cluster.wait_for(is_well, timeout_s=TIMEOUT_S, what="nothing is wrong")


def restore_primaries(cluster: LocalCluster, admin: Admin) -> None:
    """Do as ``koinon admin primaries`` does; return when it is done."""
    deadline = time.monotonic() + TIMEOUT_S
    while admin.restore_primaries():
        assert time.monotonic() < deadline, "primaries do not return"
        time.sleep(0.1)
    wait_well(cluster)


def restart(cluster: LocalCluster, name: str, *, down_s: float = 0.0) -> Restart:
    """Stop the process by SIGTERM, start it again, and wait until all is well."""
    stop_at = time.monotonic()
    cluster.terminate(name, timeout_s=STOP_S_MAX)
    ended_at = time.monotonic()
    assert ended_at - stop_at < STOP_S_MAX, f"{name} did not end by itself"
    time.sleep(down_s)
    start_at = time.monotonic()
    cluster.restart(name)
    wait_well(cluster)
    return Restart(
        name=name,
        stop_at=stop_at,
        ended_at=ended_at,
        start_at=start_at,
        well_at=time.monotonic(),
    )
