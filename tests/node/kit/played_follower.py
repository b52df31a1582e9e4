"""A follower that the test plays, at the other end of a stream to a replicator."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from koinon_proto.contract.table import first_sequence
from koinon_proto.v1 import replication_pb2 as wire
from tests.node.kit.held_writer import EPOCH, WAIT_S, Bench
from tests.node.kit.streams import stream_pair


class PlayedFollower:
    """Speaks when the test says so; what the primary sent is in ``batches`` and ``others``."""

    def __init__(
        self,
        bench: Bench,
        number: int = 2,
        node_epoch: int = 1,
        registration_id: str = "",
    ) -> None:
        self.bench = bench
        self.batches: list[wire.Batch] = []
        self.others: list[wire.FollowResponse] = []
        self.end, primary = stream_pair()
        self.serving = asyncio.ensure_future(bench.replicator.followers.serve(primary))
        hello = wire.FollowHello(
            protocol_version=1,
            cluster_id="c",
            node_number=number,
            node_epoch=node_epoch,
            to_node_number=1,
            registration_id=registration_id,
        )
        self.end.send(wire.FollowRequest(hello=hello))

    def take(self) -> None:
        """Sort what has arrived."""
        while not self.end.inbox.empty():
            message = self.end.inbox.get_nowait()
            if message is None:
                self.end.inbox.put_nowait(None)
                return
            if message.WhichOneof("kind") == "batch":
                self.batches.append(message.batch)
            else:
                self.others.append(message)

    async def open(
        self,
        *partition_ids: int,
        epoch: int = EPOCH,
        complete_through: int = 0,
        needs_snapshot: bool = False,
        history: Sequence[tuple[int, int]] = (),
        unchanged_from: int | None = None,
    ) -> list[wire.OpenedPartition]:
        """Open the partitions; return the answers."""
        message = wire.OpenPartitions(
            partitions=[
                wire.OpenPartition(
                    partition_id=p,
                    primary_epoch=epoch,
                    complete_through=complete_through,
                    needs_snapshot=needs_snapshot,
                    unchanged_from=unchanged_from,
                    history=[
                        wire.EpochStart(primary_epoch=e, previous_sequence=s) for e, s in history
                    ],
                )
                for p in partition_ids
            ]
        )
        self.end.send(wire.FollowRequest(open=message))
        while True:
            answer = await asyncio.wait_for(self.end.receive(), WAIT_S)
            if answer.WhichOneof("kind") == "opened":
                return list(answer.opened.partitions)
            self.others.append(answer)

    async def position(self, *partition_ids: int, sequence: int = 0, epoch: int = EPOCH) -> None:
        """Say that these are complete here (through the epoch's beginning, unless told)."""
        rows = len(partition_ids)
        sequences = [sequence or first_sequence(epoch)] * rows
        positions = wire.PositionAcks(
            partition_ids=partition_ids, primary_epochs=[epoch] * rows, sequences=sequences
        )
        self.end.send(wire.FollowRequest(positions=positions))
        await turn()

    async def join(self, *partition_ids: int, epoch: int = EPOCH) -> None:
        """Open and be positioned at once: the copy is as the primary's."""
        answers = await self.open(*partition_ids, epoch=epoch)
        assert not any(answer.HasField("refusal") for answer in answers), answers
        await self.position(*partition_ids, sequence=answers[0].stream_from, epoch=epoch)

    async def acknowledge(self, number: int = 0) -> None:
        """Say that batches up to this one (or the last) are durable here."""
        self.take()
        number = number or self.batches[-1].number
        self.end.send(wire.FollowRequest(ack=wire.BatchAck(number=number)))
        await turn()

    async def leave(self) -> None:
        self.end.close()
        await turn()


async def turn() -> None:
    """Let everything run that can."""
    for _ in range(30):
        await asyncio.sleep(0)


async def joined(
    bench: Bench,
    *partition_ids: int,
    number: int = 2,
    epoch: int = EPOCH,
) -> PlayedFollower:
    """Return a follower whose copies of these partitions are as the primary's."""
    follower = PlayedFollower(bench, number)
    await follower.join(*partition_ids, epoch=epoch)
    return follower
