"""Pairs of stream ends in memory: what one end sends, the other receives, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Generic, TypeVar, cast

from koinon_node.ports import PeerLostError
from koinon_proto.contract.errors import KoinonError
from koinon_proto.v1 import replication_pb2

Sent = TypeVar("Sent")
Received = TypeVar("Received")


class FakeStream(Generic[Sent, Received]):
    """One end. Messages arrive at once; ``error`` is what the other end closed it with."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[Received | None] = asyncio.Queue()
        self.other: FakeStream[Received, Sent]
        self.ended = False
        self.error: KoinonError | None = None
        self.queued_bytes = 0

    def send(self, message: Sent) -> None:
        if self.ended:
            raise PeerLostError(reason="the stream has ended")
        self.other.inbox.put_nowait(message)

    def send_encoded(self, parts: Sequence[bytes]) -> None:
        """Send as a primary's end does."""
        self.send(cast(Sent, replication_pb2.FollowResponse.FromString(b"".join(parts))))

    async def receive(self) -> Received:
        message = None if self.ended else await self.inbox.get()
        if message is None:
            raise self.error or PeerLostError(reason="the stream has ended")
        return message

    def close(self, error: KoinonError | None = None) -> None:
        if self.ended:
            return
        self.ended = self.other.ended = True
        self.other.error = error
        self.inbox.put_nowait(None)
        self.other.inbox.put_nowait(None)


FollowerSide = FakeStream[replication_pb2.FollowRequest, replication_pb2.FollowResponse]
PrimarySide = FakeStream[replication_pb2.FollowResponse, replication_pb2.FollowRequest]


def stream_pair() -> tuple[FollowerSide, PrimarySide]:
    """Return (the follower's end, the primary's end)."""
    follower: FollowerSide = FakeStream()
    primary: PrimarySide = FakeStream()
    follower.other, primary.other = primary, follower
    return follower, primary
