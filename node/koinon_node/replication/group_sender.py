"""The primary's ends of followers' streams, and the batches sent over them.

A batch is encoded once for all followers that get the same rows of a group. Its number derives from
the commit group's: within a stream the numbers rise, with gaps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np

from koinon_node.core.formats.records import (
    BoolArray,
    U32Array,
    U64Array,
    partitions_of_data_keys,
    sequences_of,
)
from koinon_node.core.replication.replica_tracker import ReplicaTracker
from koinon_node.core.writes.commit_group import CommitGroup
from koinon_node.core.writes.recent_writes import RecentWrites
from koinon_node.ports import PeerLostError, PrimaryEnd
from koinon_node.replication.catch_up import crc_of
from koinon_proto.contract import convert
from koinon_proto.contract.encoded_parts import as_field, with_bytes
from koinon_proto.contract.errors import KoinonError, ResourceExhaustedError
from koinon_proto.contract.table import MAX_PARTITION_COUNT, NodeNumber
from koinon_proto.v1 import replication_pb2

_ROW_OVERHEAD_BYTES = 16
_LARGE_RECORD_BYTES = 4_096
"""Larger records (on average) are sent beside their message, uncopied; smaller ones in it."""
_NO_PARTITIONS = np.zeros(0, np.uint32)

_NUMBERS = 16
"""Batch numbers per commit group: the first is the group's batch, the others are for probes."""


class GroupRows(NamedTuple):
    """A group as it is streamed: columns over partitions, each of them once, and columns over
    rows.
    """

    number: int  # of the batch
    touched: U32Array
    epochs: U64Array
    previous: U64Array  # the last sequences streamed before this group
    lasts: U64Array  # and with it
    keys: Sequence[bytes]
    records: Sequence[bytes]
    partition_ids: U32Array  # of rows
    merges: Mapping[int, bytes]  # merge steps, by partition
    sealed_at: float


class Lag(NamedTuple):
    """A follower's unacknowledged batches. ``age_s`` is the age of the oldest."""

    number: NodeNumber
    records: int
    bytes: int
    age_s: float


class _Sent(NamedTuple):
    number: int
    touched: U32Array
    lasts: U64Array
    size: int
    records: int
    sealed_at: float


class Encoded(NamedTuple):
    """An encoded batch: the bytes of its message in parts, and the bytes and number of its
    records.
    """

    parts: Sequence[bytes]
    size: int
    records: int


class Batches:
    """The messages of one group by the set of partitions; each is encoded once."""

    def __init__(self, group: GroupRows) -> None:
        self.group = group
        self._made: dict[bytes, Encoded] = {}

    def of(self, mask: BoolArray | None) -> Encoded:
        """Return the message for the partitions in the mask; None: for all partitions of the
        group.
        """
        key = b"" if mask is None else mask.tobytes()
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = self._make(self.group if mask is None else self._part(mask))
        return made

    def _part(self, mask: BoolArray) -> GroupRows:
        """Return the group restricted to the partitions in the mask."""
        group = self.group
        chosen = group.touched[mask]
        picked = np.isin(group.partition_ids, chosen).tolist()
        return group._replace(
            touched=chosen,
            epochs=group.epochs[mask],
            previous=group.previous[mask],
            lasts=group.lasts[mask],
            keys=list(compress(group.keys, picked)),
            records=list(compress(group.records, picked)),
        )

    def _make(self, group: GroupRows) -> Encoded:
        keys, records, chosen = group.keys, group.records, group.touched.tolist()
        merges = [group.merges[p] for p in chosen if p in group.merges] if group.merges else []
        record_bytes = sum(map(len, records))
        size = sum(map(len, keys)) + record_bytes + _ROW_OVERHEAD_BYTES * len(keys)
        size += sum(map(len, merges))
        large = record_bytes > _LARGE_RECORD_BYTES * len(records)
        batch = replication_pb2.Batch(
            number=group.number,
            partition_ids=chosen,
            primary_epochs=group.epochs.tolist(),
            previous=group.previous.tolist(),
            last=group.lasts.tolist(),
            keys=keys,
            records=() if large else records,
            crc32=crc_of(keys, records, merges),
            merges=merges,
        )
        parts = [batch.SerializeToString()]
        if large:
            parts = with_bytes(parts[0], batch.RECORDS_FIELD_NUMBER, records)
        return Encoded(
            as_field(replication_pb2.FollowResponse.BATCH_FIELD_NUMBER, parts),
            size,
            len(keys) + len(merges),
        )


class FollowerStream:
    """The stream to one follower: sends batches, and counts the unacknowledged ones."""

    def __init__(
        self,
        stream: PrimaryEnd,
        number: NodeNumber,
        node_epoch: int,
        slot: int,
        bytes_max: int,
    ) -> None:
        self.stream = stream
        self.number = number
        self.node_epoch = node_epoch
        self.slot = slot
        self.announced = np.zeros(
            MAX_PARTITION_COUNT, np.uint64
        )  # by partition: the purge floor announced to this follower
        self._bytes_max = bytes_max  # unacknowledged bytes above which the stream is closed
        self.last_number = 0  # of the newest batch sent
        self.last_sent_at = float("-inf")  # when it was sent, monotonic seconds
        self._sent: deque[_Sent] = deque()  # not acknowledged, oldest first
        self._unacknowledged_bytes = self._unacknowledged = 0  # bytes and records of these

    def lag(self, now: float) -> Lag:
        """Return how far the follower's acknowledgements are behind."""
        age_s = max(0.0, now - self._sent[0].sealed_at) if self._sent else 0.0
        return Lag(self.number, self._unacknowledged, self._unacknowledged_bytes, age_s)

    def send(self, message: replication_pb2.FollowResponse) -> None:
        """Send a message. If the stream has ended nothing happens: its receiving task gets the
        error.
        """
        self._send_encoded((message.SerializeToString(),))

    def _send_encoded(self, parts: Sequence[bytes]) -> None:
        try:
            self.stream.send_encoded(parts)
        except PeerLostError:
            return

    def send_batch(self, batches: Batches, mask: BoolArray | None) -> None:
        """Send the group's rows of the partitions in the mask; None: of all. A follower with too
        many unacknowledged bytes loses its stream, and opens its partitions again.
        """
        parts, size, records = batches.of(mask)
        group = batches.group
        touched, lasts = group.touched, group.lasts
        if mask is not None:
            touched, lasts = touched[mask], lasts[mask]
        self.last_number, self.last_sent_at = group.number, group.sealed_at
        self._sent.append(_Sent(group.number, touched, lasts, size, records, group.sealed_at))
        self._unacknowledged_bytes += size
        self._unacknowledged += records
        if max(self._unacknowledged_bytes, self.stream.queued_bytes) > self._bytes_max + size:
            self.stream.close(
                ResourceExhaustedError(
                    resource="bytes sent and not acknowledged", limit=self._bytes_max
                )
            )
            return
        self._send_encoded(parts)

    def acknowledged(self, number: int) -> Iterable[tuple[U32Array, U64Array, float]]:
        """Yield (partitions, last sequences, time of sending) of the batches up to this number."""
        while self._sent and self._sent[0].number <= number:
            sent = self._sent.popleft()
            self._unacknowledged_bytes -= sent.size
            self._unacknowledged -= sent.records
            yield sent.touched, sent.lasts, sent.sealed_at

    def send_closed(self, partition_ids: Sequence[int], reason: KoinonError) -> None:
        """Tell the follower that the stream of these partitions has ended."""
        closed = replication_pb2.ClosedPartitions(
            partition_ids=partition_ids, reason=convert.error_to_proto(reason)
        )
        self.send(replication_pb2.FollowResponse(closed=closed))

    def send_floors(self, partition_ids: U32Array, floors: U64Array) -> None:
        """Announce the sequences through which the follower may purge tombstones."""
        self.announced[partition_ids] = floors
        message = replication_pb2.PurgeFloors(
            partition_ids=partition_ids.tolist(), sequences=floors.tolist()
        )
        self.send(replication_pb2.FollowResponse(floors=message))


class Sender:
    """The streams of all followers."""

    def __init__(self, leading: ReplicaTracker, journal: RecentWrites) -> None:
        self._leading = leading
        self._journal = journal
        # Of connected followers. ``Followers`` adds and removes them.
        self.streams: dict[NodeNumber, FollowerStream] = {}

    def send(self, group: CommitGroup, previous: U64Array) -> None:
        """Send the group, which has each partition once, to all followers that have its partitions
        open. ``previous``: the last sequences streamed before.
        """
        pending, touched, lasts, merges = group.records, group.touched, group.lasts, group.merges()
        keys = [key for key, record in pending.items() if record is not None]
        rows = [record for record in pending.values() if record is not None]
        partition_ids = partitions_of_data_keys(keys)
        self._journal.append(partition_ids, sequences_of(rows), keys)
        for p in merges.keys() & set(touched.tolist()) if merges else ():
            # The journal cannot know the keys that a merge step writes.
            self._journal.reset(p, int(lasts[touched == p][0]))
        leading = self._leading
        epochs = leading.epochs[touched]
        columns = touched, epochs, previous, lasts, keys, rows, partition_ids
        batches = Batches(GroupRows(group.number * _NUMBERS, *columns, merges, group.sent_at))
        spilled = np.zeros(len(touched), np.bool_)
        for follower in list(self.streams.values()):
            mask = leading.opened[follower.slot, touched]
            if mask.all():
                spilled[:] = True
                follower.send_batch(batches, None)
            elif mask.any():
                spilled |= mask
                follower.send_batch(batches, mask)
        group.spilled = touched[spilled]

    def probe(self, group: int, since: float, now: float) -> None:
        """Have each follower that was sent no batch since the time ``since`` make an empty batch
        durable, at the position of one of its copies. ``group`` is the number of the newest group
        handed over.
        """
        leading = self._leading
        for follower in list(self.streams.values()):
            positioned = np.flatnonzero(leading.positioned[follower.slot])[:1].astype(np.uint32)
            number = max(follower.last_number + 1, group * _NUMBERS)
            if follower.last_sent_at >= since or number >= (group + 1) * _NUMBERS:
                continue
            if not len(positioned):
                continue
            stands, epochs = leading.streamed[positioned], leading.epochs[positioned]
            rows = GroupRows(
                number, positioned, epochs, stands, stands, [], [], _NO_PARTITIONS, {}, now
            )
            follower.send_batch(Batches(rows), None)

    def lags(self, now: float) -> list[Lag]:
        """Return the lag of each follower, in the order of their numbers."""
        return [follower.lag(now) for _, follower in sorted(self.streams.items())]

    def announce_floors(self) -> None:
        """Announce risen purge floors to followers."""
        leading = self._leading
        floors = leading.copies.purge_floors[: len(leading.epochs)]
        for follower in self.streams.values():
            higher = floors > follower.announced[: len(floors)]
            risen = leading.positioned[follower.slot] & higher
            if risen.any():
                partition_ids = np.flatnonzero(risen).astype(np.uint32)
                follower.send_floors(partition_ids, floors[partition_ids])
