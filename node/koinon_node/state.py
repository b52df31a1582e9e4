"""State that the whole node process shares: its lease, the partitions that it serves, its clocks.

The agent's thread publishes the lease and the served partitions; the event loop reads them. Both
are immutable and replaced as a whole, so readers need no lock: an operation reads the value at its
start and compares it at its end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import Enum, auto
from functools import lru_cache

import numpy as np

from koinon_node.core.formats.records import BoolArray, U32Array
from koinon_node.core.membership.assignment import ServedPartitions
from koinon_node.core.membership.lease import NO_LEASE, Lease
from koinon_node.core.quotas import Quota, Quotas
from koinon_node.core.wall_time import WallTime
from koinon_proto.contract.access import Access
from koinon_proto.contract.cluster_errors import LoadClosedError
from koinon_proto.contract.errors import (
    ClusterNotReadyError,
    DeadlinePassedError,
    KoinonError,
    LeaseExpiredError,
    PartitionOfflineError,
    TableBehindError,
)
from koinon_proto.contract.keyspaces import Keyspace
from koinon_proto.contract.table import NO_NODE, OfflineReason, PartitionStatus, Table
from koinon_proto.partitioner import Partitioner, partitioner
from koinon_proto.process.clock import boottime

log = logging.getLogger(__name__)

_ALL_PARTITIONS = 65_536
_OFFLINE = {
    OfflineReason.NONE: "it has no primary",
    OfflineReason.NO_LIVE_REPLICA: "no live replica holds it",
    OfflineReason.STORE_LOST: "the store that held it is lost; an operator has to decide",
}


class WallClock:
    """Unix time in milliseconds: the machine's clock, filtered by core/wall_time.py.

    The primary's wall clock decides on expiry; operators are assumed to keep the nodes' clocks
    together (NTP).
    """

    def __init__(
        self,
        wall_ns: Callable[[], int] = time.time_ns,
        boot_s: Callable[[], float] = boottime,
    ) -> None:
        self._wall_ns = wall_ns
        self._boot_s = boot_s
        self._time = WallTime()
        self.telling = 0  # reads that found expired records whose removal is not durable yet

    def now_ms(self) -> int:
        wall_ms = self._wall_ns() / 1e6
        before_ms = self._time.now_ms
        change = self._time.look(wall_ms, self._boot_s(), held=self.telling > 0)
        if change is not None:
            log.warning(
                "wall clock jump is=%s machine_ms=%d believed_ms=%d before_ms=%d",
                change.name.lower(),
                wall_ms,
                self._time.now_ms,
                before_ms,
            )
        return int(self._time.now_ms)

    def keep_told(self) -> None:
        """Keep the clock from going back before now: records that still exist were reported as
        expired.
        """
        self._time.told_ms = self._time.now_ms


class Expired(list[bytes]):
    """The data keys that a read finds expired. As a context it covers the read and the removal of
    the records: from the first key on the clock does not step back.
    """

    def __init__(self, clock: WallClock) -> None:
        super().__init__()
        self._clock = clock

    def append(self, key: bytes) -> None:
        if not self:
            self._clock.telling += 1
        super().append(key)

    def __enter__(self) -> Expired:
        return self

    def __exit__(self, *_: object) -> None:
        self._clock.telling -= bool(self)


def partitioner_of(keyspace: Keyspace) -> Partitioner:
    """Return the keyspace's partitioner. The agent has checked that it works as in the whole
    cluster.
    """
    return _partitioner(keyspace.partitioner, keyspace.partition_count, keyspace.base)


@lru_cache(maxsize=2_048)
def _partitioner(name: str, partition_count: int, base: int) -> Partitioner:
    return partitioner(name, partition_count, base)


class Standing(Enum):
    """Where a partition is served, by this node's knowledge."""

    HERE = auto()
    CHANGING = auto()  # nowhere now: a hand-over is under way, or this node lacks its lease
    ELSEWHERE = auto()
    NOWHERE = auto()  # it has no primary


class NodeState:
    """The lease and what is served now, and the node's clocks: leases are measured by ``now`` and
    time-outs by ``monotonic``, both in seconds; records expire by ``wall``.

    The two masks over partitions and the quotas belong to the event loop: what is ``stopped`` is
    being handed over, and neither read nor written; what is in ``too_few`` has too few replicas for
    new writes. Beside each mask stands whether there is any.
    """

    def __init__(
        self,
        node_id: str,
        now: Callable[[], float] = boottime,
        monotonic: Callable[[], float] = time.monotonic,
        wall: WallClock | None = None,
    ) -> None:
        self.node_id = node_id
        self.now = now
        self.monotonic = monotonic
        self.wall = wall or WallClock()
        self.lease: Lease = NO_LEASE
        self.served = ServedPartitions()
        self.access = Access()  # replaced whole, by the agent
        self.registration_id = ""  # of the registration that made this process's node epoch
        self.stopped: BoolArray = np.zeros(_ALL_PARTITIONS, np.bool_)
        self.too_few: BoolArray = np.zeros(_ALL_PARTITIONS, np.bool_)
        self.any_stopped = self.any_too_few = False
        self.quotas = Quotas()

    def serving(self) -> bool:
        """Return whether the lease holds now."""
        return self.lease.valid(self.now())

    def confirmed(self, node_epoch: int) -> bool:
        """Return whether a heartbeat of this registration has been acknowledged. Before that the
        coordinators count the epoch as unused: a store that comes back without it counts as one
        that never got it, not as an old copy.
        """
        return self.lease.node_epoch == node_epoch

    def check_lease(self) -> None:
        """Raise LeaseExpiredError unless the lease holds now."""
        if not self.serving():
            raise LeaseExpiredError(node_id=self.node_id)

    def clock_ms(self) -> int:
        """Return the time in ms with which ``take_by_ms`` is compared."""
        return int(1000 * self.now())

    def check_in_time(self, take_by_ms: int) -> None:
        """Raise DeadlinePassedError if ``clock_ms`` is past ``take_by_ms``; 0: no deadline."""
        if take_by_ms and (late_ms := self.clock_ms() - take_by_ms) > 0:
            raise DeadlinePassedError(late_ms=late_ms)

    def quota(self, view: ServedPartitions, partition_id: int) -> Quota | None:
        """Return the quota of the partition's keyspace on this node, or None. Without any limited
        keyspace ``view.shares`` is empty, which is a quick check.
        """
        return self.quotas.of(view.shares, partition_id) if view.shares else None

    def check_load(self, load_id: int) -> None:
        """Raise LoadClosedError unless the bulk load is open, by the newest table."""
        table = self.served.table
        loads = table.loads if table is not None else ()
        for load in loads:
            if load.load_id == load_id:
                if load.merging:
                    raise LoadClosedError(load_id=load_id, state="merging")
                return
        raise LoadClosedError(
            load_id=load_id, state="unknown", reason="it has ended or never existed"
        )

    def table(self) -> Table:
        """Return the newest table.

        Raises:
            ClusterNotReadyError: this node has no bootstrapped table yet.
        """
        table = self.served.table
        if table is None or not table.bootstrapped:
            raise ClusterNotReadyError(
                registered_nodes=len(table.nodes) if table else 0,
                bootstrap_nodes=table.cluster.bootstrap_nodes if table else 0,
            )
        return table

    def still_serves(self, view: ServedPartitions, partition_ids: U32Array) -> bool:
        """Return whether the lease holds, this node leads the partitions in the epochs of ``view``,
        and none is being handed over. Then everything read until now came from the partitions'
        primary.
        """
        return (
            self.serving()
            and not (self.any_stopped and self.stopped[partition_ids].any())
            and (
                self.served.epochs is view.epochs or bool(self.served_as(view, partition_ids).all())
            )
        )

    def still_leads(self, view: ServedPartitions, partition_ids: U32Array) -> bool:
        """Return whether the lease holds and this node leads the partitions in the epochs of
        ``view``. Then writes that all in-sync replicas hold may be acknowledged, even while a
        partition is being handed over.
        """
        return self.serving() and (
            self.served.epochs is view.epochs or bool(self.led_as(view, partition_ids).all())
        )

    def led_as(self, view: ServedPartitions, partition_ids: U32Array) -> BoolArray:
        """Return a mask of the partitions that this node leads in the epochs of ``view``."""
        now = self.served
        if len(now.epochs) < len(view.epochs):  # the coordinators were recreated
            return np.zeros(len(partition_ids), np.bool_)
        led: BoolArray = now.epochs[partition_ids] == view.epochs[partition_ids]
        return led

    def served_as(self, view: ServedPartitions, partition_ids: U32Array) -> BoolArray:
        """Return a mask of the partitions that this node serves now, in the epochs of ``view``."""
        now = self.served
        if not self.serving() or len(now.epochs) < len(view.epochs):
            return np.zeros(len(partition_ids), np.bool_)
        epochs = view.epochs[partition_ids]
        same: BoolArray = (now.epochs[partition_ids] == epochs) & (epochs != 0)
        return same & ~self.stopped[partition_ids]

    def refusals(
        self, view: ServedPartitions, partition_ids: U32Array, sender_version: int
    ) -> dict[int, KoinonError]:
        """Return the refusals of the partitions that are not served in ``view``."""
        refused: BoolArray = view.epochs[partition_ids] == 0
        if self.any_stopped:
            refused = refused | self.stopped[partition_ids]
        if not refused.any():
            return {}
        return {
            p: self.refusal(view, p, sender_version)
            for p in np.unique(partition_ids[refused]).tolist()
        }

    def standing(self, partition_id: int) -> Standing:
        """Return where the partition is served now. A row whose primary has not reported yet that
        it serves counts as CHANGING: a client sent there too early would be sent back.
        """
        view = self.served
        if view.table is None or partition_id >= len(view.table.rows):
            return Standing.NOWHERE
        row = view.table.rows[partition_id]
        if row.primary == NO_NODE:
            return Standing.NOWHERE
        if view.epochs[partition_id] and self.serving() and not self.stopped[partition_id]:
            return Standing.HERE
        if row.primary == view.node_number or row.status is PartitionStatus.ASSIGNED:
            return Standing.CHANGING
        return Standing.ELSEWHERE

    def refusal(
        self, view: ServedPartitions, partition_id: int, sender_version: int
    ) -> KoinonError:
        """Return the reason why this node does not serve the partition."""
        if view.epochs[partition_id] and self.stopped[partition_id]:
            return PartitionOfflineError(
                partition_id=partition_id, reason="it is being handed over to another replica"
            )
        return refusal_of(view, partition_id, sender_version)


def refusal_of(view: ServedPartitions, partition_id: int, sender_version: int) -> KoinonError:
    """Return the reason why this node does not serve the partition: whose table is behind, and the
    primary.
    """
    table = view.table
    assert table is not None
    if sender_version > table.table_version:
        return TableBehindError(table_version=table.table_version, required_version=sender_version)
    row = table.rows[partition_id]
    if row.primary == NO_NODE:
        reason = _OFFLINE[row.offline_reason]
        return PartitionOfflineError(partition_id=partition_id, reason=reason)
    if row.primary == view.node_number:
        return PartitionOfflineError(
            partition_id=partition_id, reason="its primary has not taken it over yet"
        )
    return table.not_primary(partition_id)
