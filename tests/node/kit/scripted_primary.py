"""A primary in memory for followers to follow, and a follower on a real store to follow it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from koinon_node.config import Limits
from koinon_node.core.formats import records
from koinon_node.core.formats.records import EpochStart, PartitionEpochs, Record
from koinon_node.core.membership.assignment import ServedPartitions
from koinon_node.core.membership.lease import Lease
from koinon_node.core.replication.copies import CopyState
from koinon_node.core.replication.epoch_history import Lineage, common_point
from koinon_node.partition.copy_drops import CopyDropper
from koinon_node.ports import PeerLostError
from koinon_node.replication.catch_up import crc_of
from koinon_node.replication.follower import Follower
from koinon_node.state import NodeState
from koinon_node.storage.environment import DATA_DB, PARTITIONS_DB
from koinon_node.storage.local_replicas import LocalReplicas
from koinon_node.storage.store import Store
from koinon_node.storage.writer import Writer
from koinon_node.store_config import StoreConfig
from koinon_proto.contract.convert import error_to_proto
from koinon_proto.contract.errors import KoinonError, TableBehindError
from koinon_proto.contract.keyspaces import Keyspace, KeyspaceId, KeyspaceList
from koinon_proto.contract.table import (
    MoveSettings,
    NodeInfo,
    NodeNumber,
    PartitionRow,
    Table,
    first_sequence,
)
from koinon_proto.v1 import replication_pb2 as wire
from tests.kit.tables import config_of, node_of, row_of, table_with
from tests.kit.waiting import until
from tests.node.kit.groups import writer_of

ME, P1, P2 = NodeNumber(1), NodeNumber(2), NodeNumber(3)
PARTITIONS = 4
WAIT_S = 60.0
Answer = TypeVar("Answer")


def a_table(
    version: int,
    rows: Sequence[PartitionRow],
    *,
    node_epoch: int = 1,
    moves: MoveSettings | None = None,
) -> Table:
    return table_with(
        rows,
        [
            node_of(number, node_epoch=node_epoch if number == ME else 1, changed_at=version)
            for number in (ME, P1, P2)
        ],
        version=version,
        config=config_of(len(rows), replication_factor=2, bootstrap_nodes=3),
        moves=moves or MoveSettings(),
    )


def in_keyspace(table: Table, ids: range, *, first_epoch: int) -> Table:
    """Return the table in which these partitions are of a keyspace that began with the epoch."""
    keyspace = Keyspace(
        keyspace_id=KeyspaceId(7),
        name="vip",
        base=ids.start,
        partition_count=len(ids),
        partitioner="murmur2",
        replication_factor=2,
        min_in_sync=1,
        max_value_bytes=1024,
        first_epoch=first_epoch,
    )
    cluster = replace(table.cluster, partition_count=ids.start)
    return replace(table, cluster=cluster, keyspace_list=KeyspaceList(keyspaces=(keyspace,)))


def a_row(
    partition_id: int,
    primary: NodeNumber = P1,
    epoch: int = 5,
    *,
    in_sync: bool = True,
    replicas: tuple[NodeNumber, ...] = (P1, ME, P2),
    adding: tuple[NodeNumber, ...] = (),
    partition_epoch: int = 0,
) -> PartitionRow:
    return row_of(
        partition_id,
        *replicas,
        in_sync=(primary, ME) if in_sync else (primary,),
        primary=primary,
        primary_epoch=epoch,
        partition_epoch=partition_epoch or epoch,
        adding=adding,
        changed_at=epoch,
    )


class ScriptedStream:
    """The follower's end; the primary's is ``requests`` and ``respond``."""

    def __init__(self, primary: ScriptedPrimary) -> None:
        self._primary = primary
        self._responses: asyncio.Queue[wire.FollowResponse | KoinonError] = asyncio.Queue()
        self.ended = False
        self.reached = asyncio.Event()
        if primary.is_reached:
            self.reached.set()
        self.batches = 0
        self.open: set[int] = set()

    def send(self, message: wire.FollowRequest) -> None:
        if self.ended:
            raise PeerLostError(reason="ended")
        self._primary.requests.append(message)
        self._primary.on_request(self, message)

    @property
    def queued_bytes(self) -> int:
        return 0

    async def connected(self) -> None:
        await self.reached.wait()

    async def receive(self) -> wire.FollowResponse:
        response = await self._responses.get()
        if isinstance(response, KoinonError):
            raise response
        return response

    def close(self, error: KoinonError | None = None) -> None:
        self.lose()

    def respond(self, response: wire.FollowResponse) -> None:
        self._responses.put_nowait(response)

    def lose(self) -> None:
        self.ended = True
        self._responses.put_nowait(PeerLostError(reason="lost"))


class Lead:
    """One partition as its primary holds it."""

    def __init__(self, epoch: int, history: tuple[EpochStart, ...]) -> None:
        self.epoch = epoch
        self.history = history
        self.rows: dict[bytes, bytes] = {}
        self.streamed = first_sequence(epoch)
        self.durable: int | None = None  # None: as far as streamed
        self.floor = 0

    @property
    def through(self) -> int:
        return self.streamed if self.durable is None else self.durable

    def value(self, key: bytes) -> bytes | None:
        row = self.rows.get(key)
        return None if row is None else records.decode_record(row).value


E4, E5, E6 = first_sequence(4), first_sequence(5), first_sequence(6)


def one_row(version: int = 1, **how: Any) -> Table:
    rows = [a_row(0, **how), *(a_row(p, replicas=(P1, P2)) for p in range(1, PARTITIONS))]
    return a_table(version, rows)


def all_rows(version: int = 1, **how: Any) -> Table:
    return a_table(version, [a_row(p, **how) for p in range(PARTITIONS)])


def value(sequence: int, text: bytes) -> bytes:
    return records.encode_record(sequence, text)


async def live(rig: Rig, primary: ScriptedPrimary, partition_id: int = 0) -> None:
    await until(lambda: partition_id in primary.positions(), "the copy has a position")


class ScriptedPrimary:
    """Answers by the contract, but for what a test has changed. Also the way to it: ports.Peers."""

    def __init__(self, number: NodeNumber = P1) -> None:
        self.number = number
        self.leads: dict[int, Lead] = {}
        self.requests: list[wire.FollowRequest] = []
        self.streams: list[ScriptedStream] = []
        self.page_rows = 1_000
        self.requires = False  # writes wait for whoever follows, it says
        self.page_requests: list[wire.ReadPageRequest] = []
        self.keys_requests: list[wire.ReadKeysRequest] = []
        self.before_page: Callable[[wire.ReadPageRequest], Awaitable[None]] | None = None
        self.before_keys: Callable[[wire.ReadKeysRequest], Awaitable[None]] | None = None
        self.spoil: Callable[[wire.RecordPage], None] | None = None
        self.refuse_openings = False
        self.silent = False  # streams batches to no follower
        self.is_reached = True  # by the streams that are begun from here on
        self.snapshots_only = False

    # --- what it leads ---------------------------------------------------------------------

    def lead(self, partition_id: int, epoch: int, history: Sequence[tuple[int, int]] = ()) -> Lead:
        starts = (*(EpochStart(*entry) for entry in history), EpochStart(epoch, 0))
        if history:
            starts = tuple(EpochStart(*entry) for entry in history)
        self.leads[partition_id] = lead = Lead(epoch, starts)
        return lead

    def write(self, partition_id: int, rows: dict[bytes, bytes | None]) -> int:
        """Write the rows and stream them; return the last sequence. None: a tombstone."""
        lead = self.leads[partition_id]
        previous, encoded = lead.streamed, {}
        for key, value in rows.items():
            lead.streamed += 1
            encoded[key] = (
                records.encode_tombstone(lead.streamed, 1)
                if value is None
                else records.encode_record(lead.streamed, value)
            )
        lead.rows.update(encoded)
        for stream in self.streams:
            if partition_id in stream.open and not self.silent:
                self.stream_batch(stream, partition_id, previous, lead.streamed, encoded)
        return lead.streamed

    def merge(self, partition_id: int, step: wire.MergeStep, effect: dict[bytes, bytes]) -> int:
        """Stream a merge step, which becomes the next; return its sequence. ``effect``: the values
        that it leaves.
        """
        lead = self.leads[partition_id]
        previous, lead.streamed = lead.streamed, lead.streamed + 1
        step.sequence = lead.streamed
        for key, value in effect.items():
            lead.rows[key] = records.encode_record(lead.streamed, value)
        for stream in self.streams:
            if partition_id in stream.open and not self.silent:
                merges = [step.SerializeToString()]
                self.stream_batch(stream, partition_id, previous, lead.streamed, {}, merges=merges)
        return lead.streamed

    def stream_batch(
        self,
        stream: ScriptedStream,
        partition_id: int,
        previous: int,
        last: int,
        rows: dict[bytes, bytes],
        *,
        epoch: int = 0,
        crc_off: int = 0,
        merges: Sequence[bytes] = (),
    ) -> None:
        stream.batches += 1
        head = records.prefix_of(partition_id)
        keys = [head + key for key in rows]
        crc = crc_of(keys, list(rows.values()), merges) ^ crc_off
        batch = wire.Batch(
            number=stream.batches,
            partition_ids=[partition_id],
            primary_epochs=[epoch or self.leads[partition_id].epoch],
            previous=[previous],
            last=[last],
            keys=keys,
            records=list(rows.values()),
            crc32=crc,
            merges=merges,
        )
        stream.respond(wire.FollowResponse(batch=batch))

    @property
    def stream(self) -> ScriptedStream:
        return self.streams[-1]

    # --- requests --------------------------------------------------------------------------

    def on_request(self, stream: ScriptedStream, message: wire.FollowRequest) -> None:
        kind = message.WhichOneof("kind")
        if kind == "close":
            stream.open -= set(message.close.partition_ids)
        if kind == "open":
            opened = wire.OpenedPartitions()
            for asked in message.open.partitions:
                self._answer(stream, asked, opened.partitions.add())
            stream.respond(wire.FollowResponse(opened=opened))

    def _answer(
        self, stream: ScriptedStream, asked: wire.OpenPartition, answer: wire.OpenedPartition
    ) -> None:
        lead = self.leads.get(asked.partition_id)
        answer.required = self.requires
        answer.partition_id, answer.primary_epoch = asked.partition_id, asked.primary_epoch
        if lead is None or lead.epoch != asked.primary_epoch or self.refuse_openings:
            answer.refusal.CopyFrom(
                error_to_proto(TableBehindError(table_version=1, required_version=2))
            )
            return
        theirs = [EpochStart(e.primary_epoch, e.previous_sequence) for e in asked.history]
        point = common_point(
            Lineage(lead.history, lead.streamed), Lineage(theirs, asked.complete_through)
        )
        for epoch, previous in lead.history:
            answer.history.add(primary_epoch=epoch, previous_sequence=previous)
        answer.records = len(lead.rows)
        if asked.needs_snapshot or point < lead.floor:
            answer.take_snapshot = True
            return
        last, unchanged_from = lead.history[-1], asked.complete_through
        if asked.HasField("unchanged_from"):
            unchanged_from = asked.unchanged_from
        if unchanged_from <= point == last.previous_sequence and not any(
            records.decode_record(row).sequence > point
            and records.decode_record(row).sequence < first_sequence(lead.epoch)
            for row in lead.rows.values()
        ):
            point = first_sequence(lead.epoch)
            answer.unchanged_from = last.previous_sequence
        answer.common_point, answer.stream_from = point, lead.streamed
        stream.open.add(asked.partition_id)

    # --- ports.Peers -----------------------------------------------------------------------

    async def follow(self, node: NodeInfo) -> ScriptedStream:
        assert node.number == self.number
        self.streams.append(ScriptedStream(self))
        return self.stream

    async def read_page(self, node: NodeInfo, request: wire.ReadPageRequest) -> wire.RecordPage:
        self.page_requests.append(request)
        if self.before_page is not None:
            await self.before_page(request)
        lead = self.leads[request.partition_id]
        rows = [
            (key, row)
            for key, row in sorted(lead.rows.items())
            if key > request.after_key or not request.after_key
            if records.decode_record(row).sequence > request.after_sequence
        ]
        chosen = rows[: self.page_rows]
        page = self._page(lead, chosen)
        page.end = len(chosen) == len(rows)
        page.last_key = chosen[-1][0] if chosen else request.after_key
        if self.spoil is not None:
            self.spoil(page)
        return page

    async def read_keys(self, node: NodeInfo, request: wire.ReadKeysRequest) -> wire.RecordPage:
        self.keys_requests.append(request)
        if self.before_keys is not None:
            await self.before_keys(request)
        lead = self.leads[request.partition_id]
        page = self._page(lead, [(key, lead.rows.get(key, b"")) for key in request.keys])
        if self.spoil is not None:
            self.spoil(page)
        return page

    def _page(self, lead: Lead, rows: Sequence[tuple[bytes, bytes]]) -> wire.RecordPage:
        keys, values = [key for key, _ in rows], [row for _, row in rows]
        return wire.RecordPage(
            keys=keys,
            records=values,
            crc32=crc_of(keys, values),
            bound=lead.through,
            purge_floor=lead.floor,
        )

    # --- what it was told ------------------------------------------------------------------

    def positions(self) -> dict[int, int]:
        """Return the newest position of each partition that the follower has told; 0: none yet."""
        found: dict[int, int] = defaultdict(int)
        for request in self.requests:
            acks = request.positions
            found.update(zip(acks.partition_ids, acks.sequences, strict=True))
        return found

    def count(self, kind: str) -> int:
        return sum(request.WhichOneof("kind") == kind for request in self.requests)

    def acknowledged(self) -> int:
        return max((r.ack.number for r in self.requests if r.HasField("ack")), default=0)


class Both:
    """The way to two primaries."""

    def __init__(self, *primaries: ScriptedPrimary) -> None:
        self._by_number = {primary.number: primary for primary in primaries}

    async def follow(self, node: NodeInfo) -> ScriptedStream:
        return await self._by_number[node.number].follow(node)

    async def read_page(self, node: NodeInfo, request: wire.ReadPageRequest) -> wire.RecordPage:
        return await self._by_number[node.number].read_page(node, request)

    async def read_keys(self, node: NodeInfo, request: wire.ReadKeysRequest) -> wire.RecordPage:
        return await self._by_number[node.number].read_keys(node, request)


class Rig:
    """A follower on a real store. ``now`` is the clock of leases and pacing."""

    def __init__(self, local: LocalReplicas, writer: Writer, peers: Any) -> None:
        self.store, self.writer, self.copies = local.store, writer, local.copies
        self.now = 100.0
        self.state = NodeState("n1", lambda: self.now)
        self.state.lease = Lease(node_epoch=1, until_s=1e9)
        self.journal, self.wall = local.journal, self.state.wall
        self.follower = Follower(local, self.state, writer, peers, Limits(), random.Random(7))
        self.drops = CopyDropper(local, self.state, self.follower)

    def publish(self, table: Table, node_epoch: int = 1) -> None:
        """Do what the agent's thread does before the loop hears of a table."""
        self.state.served = ServedPartitions(
            table=table,
            node_number=ME,
            node_epoch=node_epoch,
            epochs=np.zeros(len(table.rows), np.uint64),
        )

    def on_table(self, table: Table, node_epoch: int = 1) -> None:
        self.publish(table, node_epoch)
        self.follower.on_table(table, ME, node_epoch)
        self.drops.on_table(table, ME, node_epoch)

    async def put(
        self,
        partition_id: int,
        rows: dict[bytes, bytes],
        *,
        through: int,
        epochs: PartitionEpochs | None = None,
        state: CopyState = CopyState.USABLE,
    ) -> None:
        """Make the copy hold these encoded records, as if an earlier process had."""
        head = records.prefix_of(partition_id)
        ids, values = np.array([partition_id]), np.array([through], np.uint64)
        progress = records.encode_progress(values, np.zeros(1, np.uint64), int(state))
        metadata = dict(zip(records.progress_keys(ids), progress, strict=True))
        if epochs is not None:
            metadata[records.epochs_key(partition_id)] = records.encode_epochs(epochs)
            self.copies.epochs[partition_id] = epochs
        keys = [head + key for key in rows]
        await self.writer.submit(
            (
                (DATA_DB, keys, list(rows.values())),
                (PARTITIONS_DB, list(metadata), list(metadata.values())),
            ),
            len(keys),
            0,
        )
        self.copies.complete_through[partition_id] = through
        self.copies.states[partition_id] = int(state)
        self.journal.reset(partition_id, records.NO_SEQUENCE)
        self.follower._context.uncovered.add(partition_id)

    def before_scan(self, look: Callable[[], None]) -> None:
        """Have ``look`` called before each step of a deletion."""
        scan = self.store.scan_keys

        def scan_keys(partition_id: int, after: bytes, until: bytes, limit: int) -> list[bytes]:
            look()
            return scan(partition_id, after, until, limit)

        self.store.scan_keys = scan_keys  # type: ignore[method-assign, assignment]

    def rows(self, partition_id: int) -> dict[bytes, Record]:
        """Read what the store holds."""
        found = self.store.read_range(partition_id, b"", 0, 100_000, 1 << 30)
        assert found.end
        return {key[2:]: records.decode_record(row) for key, row in found.rows}

    def values(self, partition_id: int) -> dict[bytes, bytes]:
        rows = self.rows(partition_id)
        return {key: row.value for key, row in rows.items() if not row.tombstone}

    def durable(self, partition_id: int) -> tuple[int, CopyState, int]:
        """Read (complete_through, state, purge floor) from the store."""
        copy = self.store.read_copies([partition_id])[partition_id]
        return copy.complete_through, copy.state, copy.purge_floor

    def history(self, partition_id: int) -> tuple[EpochStart, ...]:
        return self.store.read_copies([partition_id])[partition_id].epochs.history


def follow(
    directory: Path, peers: Any, test: Callable[[Rig], Awaitable[Answer]], **config: Any
) -> Answer:
    """Run the test beside a follower on the store in ``directory``."""

    async def run() -> Answer:
        lost: list[str] = []
        store = Store(StoreConfig(directory=directory, **config))
        local = LocalReplicas(store, "n1", Limits())
        writer = writer_of(local, lost.append)
        await writer.start()
        rig = Rig(local, writer, peers)
        task = asyncio.create_task(rig.follower.run())
        try:
            return await test(rig)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            store.close(clean=await writer.stop())

    return asyncio.run(run())
