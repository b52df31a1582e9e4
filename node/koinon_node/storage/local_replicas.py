"""This node's replicas: the open store, and what the process keeps in memory about it.

Who leads, follows, reads or deletes a copy works on these columns; each part's module says who
changes them. The store is read from any thread, the rest belongs to the event loop's thread.
"""

from __future__ import annotations

from koinon_node.config import Limits
from koinon_node.core.membership.disk_health import DiskHealth
from koinon_node.core.writes.pending_writes import PendingWrites
from koinon_node.core.writes.recent_writes import ROWS_MAX, RecentWrites
from koinon_node.core.writes.write_decisions import Primaries
from koinon_node.storage.store import Store


class LocalReplicas:
    """The replicas of an open store, as they are when the process begins.

    Attributes:
        copies: what the store durably holds of each partition.
        primaries: the write positions of the partitions that this node leads.
        pending: the commit groups that are not complete.
        journal: the keys that were written last; ``journal_rows`` at most.
        disk: how long commit groups are on their way to the disk.
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
