"""How long a node may serve.

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


NO_LEASE = Lease(node_epoch=0, until_s=float("-inf"))
