"""Serves followers' streams: their greeting, their openings, and their acknowledgements.

A follower connects, identifies itself, and opens partitions. After the answer to an opening the
stream carries every write above the sequence that the answer names (group_sender.py). The
follower's statements go to the columns of ``leading``, which forget them when the stream ends;
commit_tracker.py completes groups accordingly.
"""

from __future__ import annotations

import logging

import numpy as np

from koinon_node.config import Limits
from koinon_node.core.formats.records import NO_SEQUENCE, BoolArray, EpochStart
from koinon_node.core.replication.replica_tracker import Answer, Asked
from koinon_node.ports import PeerLostError, PrimaryEnd
from koinon_node.replication.commit_tracker import CommitTracker
from koinon_node.replication.group_sender import FollowerStream
from koinon_node.storage.sizes import SizeEstimates
from koinon_proto.contract import convert
from koinon_proto.contract.cluster_errors import NodeFencedError
from koinon_proto.contract.errors import (
    InvalidArgumentError,
    KoinonError,
    NotPrimaryError,
    TableBehindError,
)
from koinon_proto.contract.table import NodeNumber, Table, registration_digest
from koinon_proto.contract.versions import check_node_protocol
from koinon_proto.v1 import replication_pb2

log = logging.getLogger(__name__)


class Followers:
    """The streams of the nodes that follow this one. Belongs to the event loop."""

    def __init__(self, commits: CommitTracker, sizes: SizeEstimates, limits: Limits) -> None:
        self._commits = commits
        self._leading = commits.leading
        self._sender = commits.sender
        self._sizes = sizes
        self._limits = limits

    # --- to them ---------------------------------------------------------------------------

    def on_table(self, table: Table, opened: BoolArray) -> None:
        """Close the partitions and streams that the newer table ended. ``opened``: the mask of open
        partitions before the table.
        """
        for follower in list(self._sender.streams.values()):
            info = table.nodes.get(follower.number)
            if info is not None and info.node_epoch > follower.node_epoch:
                follower.stream.close(_fenced(info.node_id, follower.node_epoch, info.node_epoch))
            elif follower.slot < len(opened):
                now = self._leading.opened[follower.slot, : opened.shape[1]]  # a table may grow
                closed = np.flatnonzero(opened[follower.slot] & ~now).tolist()
                if closed:
                    follower.send_closed(closed, table.not_primary(closed[0]))

    # --- from them -------------------------------------------------------------------------

    async def serve(self, stream: PrimaryEnd) -> None:
        """Serve one follower until its stream ends.

        Raises:
            KoinonError: the reason why the follower was refused or disconnected.
        """
        follower = self._admit(await stream.receive(), stream)
        try:
            while True:
                self._handle(follower, await stream.receive())
        except PeerLostError as error:
            log.info("follower lost node=%d reason=%s", follower.number, error)
        finally:
            if self._sender.streams.get(follower.number) is follower:
                del self._sender.streams[follower.number]
                self._leading.lose_follower(follower.slot)

    def _admit(self, request: replication_pb2.FollowRequest, stream: PrimaryEnd) -> FollowerStream:
        """Check the follower's identity; close an older stream of the same node."""
        leading, hello = self._leading, request.hello
        if request.WhichOneof("kind") != "hello":
            raise InvalidArgumentError(field="hello", reason="must be the first message")
        check_node_protocol(hello.protocol_version, "replication protocol")
        table = leading.table
        if table is None or not table.rows:
            raise TableBehindError(table_version=0, required_version=1)
        table.cluster.check_id(hello.cluster_id, required=True)
        if hello.to_node_number != leading.me:
            raise NotPrimaryError(
                partition_id=0,
                primary="",
                primary_address="",
                primary_epoch=0,
                table_version=table.table_version,
            )
        number = NodeNumber(hello.node_number)
        info = table.nodes.get(number)
        if info is None or hello.node_epoch > info.node_epoch:
            raise TableBehindError(
                table_version=table.table_version, required_version=table.table_version + 1
            )
        # Only the node itself knows its registration id; the table has a digest of it.
        is_stranger = registration_digest(hello.registration_id) != info.registration_digest
        if is_stranger or hello.node_epoch < info.node_epoch:
            raise _fenced(info.node_id, hello.node_epoch, info.node_epoch)
        slot = leading.slot_of(number)
        before = self._sender.streams.get(number)
        if before is not None:
            before.stream.close()
            leading.lose_follower(slot)
        follower = self._sender.streams[number] = FollowerStream(
            stream,
            number,
            hello.node_epoch,
            slot,
            self._limits.stream_bytes,
        )
        return follower

    def _handle(self, follower: FollowerStream, request: replication_pb2.FollowRequest) -> None:
        if self._sender.streams.get(follower.number) is not follower:
            raise PeerLostError(reason="the node has opened another stream")
        kind = request.WhichOneof("kind")
        leading, slot = self._leading, follower.slot
        if kind == "ack":
            now = self._commits.clock()
            for touched, lasts, sent_at in follower.acknowledged(request.ack.number):
                leading.acknowledge(slot, touched, lasts)
                leading.made_durable(slot, touched, sent_at, now)
            self._commits.advance()
        elif kind == "positions":
            positions = request.positions
            rows = len(positions.partition_ids)
            if not rows == len(positions.primary_epochs) == len(positions.sequences):
                raise InvalidArgumentError(field="positions", reason="columns of unequal length")
            leading.position(
                slot,
                np.array(positions.partition_ids, np.uint32),
                np.array(positions.primary_epochs, np.uint64),
                np.array(positions.sequences, np.uint64),
            )
            self._commits.advance()
            self._commits.kick.set()
        elif kind == "open":
            self._open(follower, request.open)
        elif kind == "close":
            partition_ids = np.array(request.close.partition_ids, np.uint32)
            if request.close.leaves:
                leading.depart(slot)
                self._commits.kick.set()
            else:
                leading.close(slot, partition_ids)
        else:
            raise InvalidArgumentError(field="kind", reason=f"{kind}: not expected here")

    def _open(self, follower: FollowerStream, request: replication_pb2.OpenPartitions) -> None:
        """Answer all openings in one message. Nothing is streamed between the answers and the
        sequences that they name.
        """
        answers = replication_pb2.OpenedPartitions()
        again = convert.error_to_proto(self._ask_again())
        for message in request.partitions:
            asked = Asked(
                message.partition_id,
                message.primary_epoch,
                message.complete_through,
                message.unchanged_from
                if message.HasField("unchanged_from")
                else message.complete_through,
                message.needs_snapshot,
                [EpochStart(e.primary_epoch, e.previous_sequence) for e in message.history],
            )
            opening = self._leading.open(follower.slot, asked)
            answer = answers.partitions.add(
                partition_id=asked.partition_id, primary_epoch=asked.primary_epoch
            )
            if opening.answer is Answer.ASK_AGAIN:
                answer.refusal.CopyFrom(again)
                continue
            if opening.answer is Answer.NOT_PRIMARY:
                assert self._leading.table is not None
                error = self._leading.table.not_primary(asked.partition_id)
                answer.refusal.CopyFrom(convert.error_to_proto(error))
                continue
            answer.take_snapshot = opening.answer is Answer.TAKE_SNAPSHOT
            answer.common_point, answer.stream_from = opening.common_point, opening.stream_from
            answer.required = opening.required
            answer.records, answer.bytes = self._sizes.of(asked.partition_id)
            known = self._leading.copies.epochs_of(asked.partition_id)
            for entry in known.history:
                answer.history.add(
                    primary_epoch=entry.primary_epoch, previous_sequence=entry.previous_sequence
                )
            if known.unchanged_from != NO_SEQUENCE:
                answer.unchanged_from = known.unchanged_from
            follower.announced[asked.partition_id] = 0
        follower.send(replication_pb2.FollowResponse(opened=answers))
        self._commits.kick.set()

    def _ask_again(self) -> KoinonError:
        table = self._leading.table
        version = table.table_version if table is not None else 0
        return TableBehindError(table_version=version, required_version=version + 1)


def _fenced(node_id: str, node_epoch: int, current: int) -> NodeFencedError:
    return NodeFencedError(node_id=node_id, node_epoch=node_epoch, current_node_epoch=current)
