"""The lease: until when a node may serve.

Invariant: a lease ends ``lease_s`` after the node *sent* the heartbeat that was acknowledged, on a
clock that runs through suspend (CLOCK_BOOTTIME in the driver), so that it always ends before the
coordinator's session for the node does. A lease belongs to one ``node_epoch``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """Leave to serve as ``node_epoch`` until ``until_s``."""

    node_epoch: int
    until_s: float

    def valid(self, now: float) -> bool:
        return now < self.until_s

    def renewed(self, node_epoch: int, sent_at: float, lease_s: float) -> Lease:
        """Return the lease after a heartbeat sent at ``sent_at`` was acknowledged; never a shorter
        one of the same epoch.
        """
        until_s = sent_at + lease_s
        if node_epoch == self.node_epoch:
            until_s = max(until_s, self.until_s)
        return Lease(node_epoch=node_epoch, until_s=until_s)


def heartbeat_timeout_s(lease_s: float, interval_s: float) -> float:
    """Return for how long a heartbeat's answer is waited for: as long as leaves, after an interval
    and this, a tenth of the lease to find another leader in.

    A leader that is short of CPU answers late, and never hears of a heartbeat that was given up
    before it came to it: to wait for less would lose leases, and the node would count as silent.
    """
    return max(lease_s / 3, 0.9 * lease_s - interval_s)


NO_LEASE = Lease(node_epoch=0, until_s=float("-inf"))
