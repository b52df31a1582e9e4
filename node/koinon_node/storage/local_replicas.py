"""This node's replicas: the open store, and the process's state in memory about it.

The code that leads, follows, reads or deletes copies shares these columns; each column's module
says who changes them. Any thread may read the store; the rest belongs to the event loop's thread.
"""

from __future__ import annotations

from koinon_node.config import Limits
from koinon_node.core.membership.disk_health import DiskHealth
from koinon_node.core.writes.pending_writes import PendingWrites
from koinon_node.core.writes.recent_writes import ROWS_MAX, RecentWrites
from koinon_node.core.writes.write_decisions import Primaries
from koinon_node.storage.store import Store


class LocalReplicas:
    """The replicas of an open store.

    Attributes:
        copies: the durable state of each partition's copy.
        primaries: the write positions of the partitions that this node leads.
        pending: the commit groups that are not complete.
        journal: the recently written keys, at most ``journal_rows``.
        disk: the health of the disk, by the commit groups that are out.
    """

    def __init__(
        self, store: Store, node_id: str, limits: Limits, journal_rows: int = ROWS_MAX
    ) -> None:
        self.store = store
        self.copies = store.copies()
        self.primaries = Primaries(
            self.copies.complete_through, self.copies.purge_floors, limits.tombstone_ms
        )
        self.pending = PendingWrites(node_id)
        self.journal = RecentWrites(self.copies.journal_floors(), journal_rows)
        self.disk = DiskHealth()
