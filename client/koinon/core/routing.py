"""Maps keys to the nodes that serve them, as far as this client knows.

A ``Routing`` is an immutable snapshot: operations in flight keep theirs. The ``Router`` replaces it
when a newer table arrives, or when a refusal names a primary of a higher epoch than the snapshot's.
Epochs only rise, so two nodes that contradict each other cannot send a client back and forth.
``revision`` counts the replacements, and ``changed`` has the revision at which each partition last
changed: an operation that was refused under revision r is retried as soon as one of its own
partitions has changed since. If only other partitions change, it keeps its back-off.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from koinon_proto.contract.errors import (
    KoinonError,
    NotPrimaryError,
    PartitionOfflineError,
    UnknownKeyspaceError,
)
from koinon_proto.contract.table import NodeStatus, Table, TableUpdate, apply_update
from koinon_proto.partitioner import Partitioner, partitioner_of

if TYPE_CHECKING:  # NumPy is imported only by operations of many rows
    import numpy as np
    from numpy.typing import NDArray

    Rows = NDArray[np.int64]
    PartitionIds = NDArray[np.uint32]

_FEW_ROWS = 32
_LIVE = (NodeStatus.ACTIVE, NodeStatus.DRAINING)


@dataclass(frozen=True, kw_only=True, eq=False)
class Routing:
    """One revision: the table, with the newer primaries that refusals have named."""

    table: Table
    partitioner: Partitioner
    """Of the keyspace ``default``."""
    revision: int
    owner_of: list[str]
    """The address that serves each partition; '' if there is none."""
    addresses: tuple[str, ...]
    """The distinct owners; index 0 is ''."""
    changed: list[int]
    """The revision at which each partition's owner, epoch or status last changed."""
    redis_addresses: dict[str, str]
    """The RESP addresses of the nodes that have one, by the node's gRPC address."""
    learned: dict[int, NotPrimaryError] = field(default_factory=dict)
    """Partitions whose owner comes from a refusal that is newer than the table."""

    @cached_property
    def owner_index(self) -> NDArray[np.intp]:
        """``owner_of`` as indices into ``addresses``."""
        import numpy as np

        index = {address: i for i, address in enumerate(self.addresses)}
        return np.array([index[address] for address in self.owner_of], np.intp)

    def group(self, partition_ids: PartitionIds) -> list[tuple[str, Rows | None]]:
        """Group rows by the owner of their partition; return each owner with its row numbers in
        order (None: all rows).
        """
        import numpy as np

        if len(partition_ids) <= _FEW_ROWS:
            by_address: dict[str, list[int]] = {}
            for row, partition_id in enumerate(partition_ids.tolist()):
                by_address.setdefault(self.owner_of[partition_id], []).append(row)
            if len(by_address) == 1:
                return [(next(iter(by_address)), None)]
            return [(address, np.array(rows)) for address, rows in by_address.items()]
        owners = self.owner_index[partition_ids]
        present = np.flatnonzero(np.bincount(owners, minlength=len(self.addresses)))
        if len(present) == 1:
            return [(self.addresses[present[0]], None)]
        return [(self.addresses[i], np.flatnonzero(owners == i)) for i in present.tolist()]

    def changed_since(self, partition_ids: PartitionIds | Sequence[int], revision: int) -> bool:
        """Return whether one of these partitions has changed since ``revision``."""
        return self.revision > revision and any(
            self.changed[partition_id] > revision for partition_id in partition_ids
        )

    def owned_by(self, addresses: Sequence[str]) -> PartitionIds:
        """Return the partitions that these addresses serve."""
        import numpy as np

        places = [i for i, address in enumerate(self.addresses) if address in addresses]
        return np.flatnonzero(np.isin(self.owner_index, places)).astype(np.uint32)

    def is_live(self, address: str) -> bool:
        """Return whether the node at this address is live: known and not fenced, or not yet in the
        table.
        """
        known = [node for node in self.table.nodes.values() if node.address == address]
        return not known or any(node.status in _LIVE for node in known)

    def offline(self, partition_id: int) -> PartitionOfflineError | UnknownKeyspaceError:
        """Return the error for a partition without an owner."""
        row = self.table.rows[partition_id]
        if row.unused:
            return UnknownKeyspaceError()
        reason = row.offline_reason.name.lower().replace("_", " ")
        return PartitionOfflineError(
            partition_id=partition_id, reason=reason if row.offline_reason else "no primary yet"
        )


class Router:
    """Holds the newest ``Routing`` and replaces it."""

    def __init__(self) -> None:
        self.routing: Routing | None = None
        self.wanted_version = 0
        """The newest table version that a refusal has named."""

    @property
    def revision(self) -> int:
        return self.routing.revision if self.routing else 0

    @property
    def table_version(self) -> int:
        return self.routing.table.table_version if self.routing else 0

    def on_update(self, update: TableUpdate) -> bool:
        """Apply a table or a delta; return whether it was newer.

        Raises:
            WrongClusterError: it belongs to another cluster.
            ConfigurationError: it names a partitioner that this build does not know.
            PartitionerMismatchError: that partitioner gives other results here.
        """
        old = self.routing
        table = apply_update(old.table if old else None, update)
        if table is None or not table.bootstrapped or (old and table is old.table):
            return False
        chosen = old.partitioner if old else None
        if chosen is None:
            chosen = partitioner_of(table.keyspaces.default)
        learned = {
            p: error
            for p, error in (old.learned if old else {}).items()
            if p < len(table.rows) and error.primary_epoch > table.rows[p].primary_epoch
        }
        self.routing = _build(table, chosen, old, learned)
        return True

    def learn(self, errors: Iterable[KoinonError]) -> bool:
        """Apply the owners that refusals name; return whether any was newer."""
        routing = self.routing
        if routing is None:
            return False
        fresh: dict[int, NotPrimaryError] = {}
        for error in errors:
            if isinstance(error, NotPrimaryError):
                self.wanted_version = max(self.wanted_version, error.table_version)
                if self._is_news(routing, error):
                    fresh[error.partition_id] = error
        if not fresh:
            return False
        learned = {**routing.learned, **fresh}
        self.routing = _build(routing.table, routing.partitioner, routing, learned)
        return True

    @staticmethod
    def _is_news(routing: Routing, error: NotPrimaryError) -> bool:
        if not error.primary_address or error.partition_id >= len(routing.owner_of):
            return False
        known = routing.learned.get(error.partition_id) or routing.table.rows[error.partition_id]
        return error.primary_epoch > known.primary_epoch


def _build(
    table: Table, chosen: Partitioner, old: Routing | None, learned: dict[int, NotPrimaryError]
) -> Routing:
    revision = old.revision + 1 if old else 1
    address_of = {number: node.address for number, node in table.nodes.items()}
    owner_of = [address_of.get(row.primary, "") for row in table.rows]
    for partition_id, error in learned.items():
        owner_of[partition_id] = error.primary_address
    addresses = ("", *sorted({a for a in owner_of if a}))
    return Routing(
        table=table,
        partitioner=chosen,
        revision=revision,
        owner_of=owner_of,
        addresses=addresses,
        changed=_changed(old, table, owner_of, revision),
        redis_addresses=_redis_addresses(table),
        learned=learned,
    )


def _redis_addresses(table: Table) -> dict[str, str]:
    live = (node for node in table.nodes.values() if node.status in _LIVE)
    return {node.address: node.redis_address for node in live if node.redis_address}


def _changed(old: Routing | None, table: Table, owner_of: list[str], revision: int) -> list[int]:
    if old is None:
        return [revision] * len(owner_of)
    kept = min(len(old.changed), len(owner_of))
    changed = old.changed[:kept] + [revision] * (len(owner_of) - kept)  # rows of new keyspaces
    before, after = (
        zip(old.owner_of[:kept], old.table.rows[:kept], strict=True),
        zip(owner_of[:kept], table.rows[:kept], strict=True),
    )
    for p, ((old_owner, old_row), (owner, row)) in enumerate(zip(before, after, strict=True)):
        if owner != old_owner or not (
            row is old_row
            or (row.primary_epoch == old_row.primary_epoch and row.status == old_row.status)
        ):
            changed[p] = revision
    return changed


class RefreshSchedule:
    """The times at which the table may be requested again: soon after a change, else at growing
    intervals.

    The driver runs one refresh at a time and asks here how long to delay it, so that many callers
    that wait for the same change cost one request, and a long wait costs few.
    """

    def __init__(
        self, *, after_news_s: float = 0.005, first_s: float = 0.02, max_s: float = 0.1
    ) -> None:
        self._after_news_s = after_news_s
        self._first_s = first_s
        self._max_s = max_s
        self._interval_s = 0.0
        self._ended_at = 0.0

    def delay_s(self, now: float) -> float:
        """Return the delay of the next refresh in seconds."""
        return max(0.0, self._ended_at + self._interval_s - now)

    def on_end(self, news: bool, now: float) -> None:
        """Record the end of a refresh; ``news``: the table was newer."""
        self._ended_at = now
        if news:
            self._interval_s = self._after_news_s
        else:
            self._interval_s = min(self._max_s, max(self._first_s, 2 * self._interval_s))
