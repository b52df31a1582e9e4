"""Watches this node's own disk while it serves, and logs when it hangs.

A disk counts as hanging when a commit has been out for the session timeout. Then
core/replication/in_sync_and_hand_over.py decides about the partitions that this node leads, and the
follower about the copies that it holds for others. Before that, followers are probed to show
whether their disks do better: see ``Sender.probe``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from koinon_node.storage.writer import Writer
from koinon_proto.contract.errors import UnavailableError
from koinon_proto.contract.table import Table

log = logging.getLogger(__name__)

HANGS_S_MIN = 1.5
"""The least time, in seconds, after which a disk counts as hanging."""
_PROBE_SHARE = 0.5  # of that time, after which followers are probed
_TELL_EVERY_S = 10.0
_PARTITIONS_MAX = 1 << 16  # a data key has two bytes for the partition


class DiskWatch:
    """Watches how long this node's own commits take. Belongs to the event loop."""

    def __init__(self, writer: Writer, node_id: str) -> None:
        self._writer = writer
        self._node_id = node_id
        self._hung_s = 0.0  # the duration logged last; 0: no hang is logged
        self._tell_at = 0.0  # when a hang is logged again, monotonic seconds

    def look(self, now: float, table: Table | None) -> bool:
        """Update the disk's health. Return whether followers should be probed."""
        disk = self._writer.disk
        timeout_s = HANGS_S_MIN
        if table is not None:
            timeout_s = max(timeout_s, table.cluster.session_timeout_ms / 1000)
        disk.look(now, timeout_s)
        if table is not None:  # else this node leads nothing and does not know the session timeout
            self._tell(now)
        return disk.out_s > _PROBE_SHARE * timeout_s

    def _tell(self, now: float) -> None:
        """Log that the disk hangs, or that it answers again."""
        disk = self._writer.disk
        if disk.hangs and (not self._hung_s or now >= self._tell_at):
            self._hung_s, self._tell_at = disk.out_s, now + _TELL_EVERY_S
            log.warning(
                "disk hangs commit_out_s=%.1f why=%s",
                disk.out_s,
                "a commit has not returned; others lead what they can until it has",
            )
        elif self._hung_s and not disk.hangs:
            log.warning("disk answers again hung_s=%.1f", self._hung_s)
            self._hung_s = 0.0

    def give_up(self, partition_ids: Sequence[int]) -> None:
        """Fail all that wait for writes of these partitions, which are handed over without them."""
        if not partition_ids:
            return
        log.warning("disk hangs: hands over partitions=%d", len(partition_ids))
        given_up = np.zeros(_PARTITIONS_MAX, np.bool_)
        given_up[partition_ids] = True
        reason = f"the disk of node {self._node_id} does not answer"
        self._writer.pending.give_up(given_up, UnavailableError(reason=reason))
