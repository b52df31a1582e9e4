"""Replication streams over gRPC: for nodes that offer no Redis port, and those of builds before.

Streams hold the contract of ports.Stream over grpc.aio's calls. What is sent is serialised at once
and written by one task a stream, so that order is kept and the network's own flow control shows in
``queued_bytes``; what may queue up is the caller's to bound.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message

from koinon_node.ports import PeerLostError
from koinon_proto.contract.bounds import check, check_reply
from koinon_proto.contract.errors import InternalError, KoinonError
from koinon_proto.server.rpc import error_of, status_text
from koinon_proto.v1 import replication_pb2

log = logging.getLogger(__name__)

Out = TypeVar("Out", bound=Message)
In = TypeVar("In")


class _Reading(Generic[In]):
    """Reads messages one by one. A cancelled ``next`` loses none: the read goes on for the next
    caller (cancelling a call's own read would cancel the call).
    """

    def __init__(self, read: Callable[[], Coroutine[Any, Any, In]]) -> None:
        self._read = read
        self._task: asyncio.Task[In] | None = None

    async def next(self) -> In:
        if self._task is None:
            self._task = asyncio.ensure_future(self._read())
            self._task.add_done_callback(retrieved)
        message = await asyncio.shield(self._task)
        self._task = None
        return message

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


class _Outgoing:
    """Serialised messages on their way to the network, in order, written by ``pump``."""

    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()
        self._arrived = asyncio.Event()
        self.size = 0

    def put(self, message: bytes) -> None:
        self._messages.append(message)
        self.size += len(message)
        self._arrived.set()

    async def pump(self, write: Callable[[bytes], Coroutine[Any, Any, None]]) -> None:
        """Write what is put, until cancelled or until a write fails."""
        while True:
            while self._messages:
                message = self._messages[0]
                await write(message)
                self._messages.popleft()
                self.size -= len(message)
            self._arrived.clear()
            await self._arrived.wait()


class _End(Generic[Out, In]):
    """The common part of both ends of a stream."""

    def __init__(self, read: Callable[[], Coroutine[Any, Any, In]]) -> None:
        self._outgoing = _Outgoing()
        self._reading = _Reading(read)
        self._lost: KoinonError | None = None  # what ``receive`` raises, for ever
        self._sending_lost: PeerLostError | None = None

    @property
    def queued_bytes(self) -> int:
        return self._outgoing.size

    def send(self, message: Out) -> None:
        self.send_encoded((message.SerializeToString(),))

    def send_encoded(self, parts: Sequence[bytes]) -> None:
        if self._sending_lost is not None or self._lost is not None:
            raise self._sending_lost or lost(str(self._lost))
        self._outgoing.put(b"".join(parts))

    async def receive(self) -> In:
        if self._lost is not None:
            raise self._lost
        try:
            return await self._reading.next()
        except KoinonError as error:
            self._lost = self._lost or error
            raise self._lost from None
        except asyncio.CancelledError:
            if self._lost is not None:  # the read was given up, not the caller
                raise self._lost from None
            raise


class GrpcFollowerStream(_End[replication_pb2.FollowRequest, replication_pb2.FollowResponse]):
    """The caller's end."""

    def __init__(self, call: Any, address: str) -> None:
        super().__init__(self._read)
        self._call = call
        self._address = address
        self._pump = asyncio.ensure_future(self._outgoing.pump(call.write))
        self._pump.add_done_callback(self._pumped)

    async def _read(self) -> replication_pb2.FollowResponse:
        try:
            message: Any = await self._call.read()
        except grpc.RpcError as error:
            raise error_of_call(error, self._address) from None
        except asyncio.CancelledError:
            raise lost(f"the stream to {self._address} was closed") from None
        if message is grpc.aio.EOF:  # any other status than OK has been raised
            raise lost(f"{self._address} ended the stream")
        read: replication_pb2.FollowResponse = message
        check_reply(read)
        return read

    async def connected(self) -> None:
        try:
            await self._call.wait_for_connection()
        except grpc.RpcError as error:
            raise error_of_call(error, self._address) from None

    def _pumped(self, pump: asyncio.Future[None]) -> None:
        """The writes have ended: so has the call, and ``receive`` will say why."""
        retrieved(pump)
        self._sending_lost = lost(f"the stream to {self._address} has ended")

    def close(self, error: KoinonError | None = None) -> None:
        self._lost = self._lost or lost("closed here")
        self._pump.cancel()
        self._call.cancel()


# --- the primary's side ------------------------------------------------------------------------


class GrpcPrimaryStream(_End[replication_pb2.FollowResponse, replication_pb2.FollowRequest]):
    """The handler's end. ``run`` is the handler; who serves has a task of its own, because a lost
    connection cancels the handler, and is to be told by PeerLostError.
    """

    def __init__(self, context: Any) -> None:
        super().__init__(self._read)
        self._context = context
        self._first: replication_pb2.FollowRequest | None = None
        self._ended = asyncio.Event()
        self._why: KoinonError | None = None

    async def receive(self) -> replication_pb2.FollowRequest:
        if self._first is not None and self._lost is None:
            first, self._first = self._first, None
            return first
        return await super().receive()

    def put_back(self, message: replication_pb2.FollowRequest) -> None:
        """Have ``receive`` return a message that it has returned before."""
        self._first = message

    async def run(self, serving: asyncio.Future[None]) -> None:
        """Carry messages until either side ends the stream; raise why, if it was said."""
        pump = asyncio.ensure_future(self._outgoing.pump(self._context.write))
        pump.add_done_callback(self._pumped)
        serving.add_done_callback(self._served)
        try:
            await self._ended.wait()
        finally:
            pump.cancel()
            self._lose("the follower's stream was lost")
        if self._why is not None:
            raise self._why

    def close(self, error: KoinonError | None = None) -> None:
        if not self._ended.is_set():
            self._why = error
        self._lose("closed here")

    async def _read(self) -> replication_pb2.FollowRequest:
        try:
            message: Any = await self._context.read()
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.CancelledError):
            raise lost("the follower's stream was lost") from None
        if message is grpc.aio.EOF:
            raise lost("the follower ended the stream")
        read: replication_pb2.FollowRequest = message
        check(read)
        return read

    def _lose(self, reason: str) -> None:
        self._lost = self._lost or lost(reason)
        self._ended.set()
        self._reading.cancel()

    def _pumped(self, pump: asyncio.Future[None]) -> None:
        retrieved(pump)
        self._lose("the follower's stream was lost")

    def _served(self, serving: asyncio.Future[None]) -> None:
        """An expected error becomes the stream's status; a lost peer cannot be told."""
        error = None if serving.cancelled() else serving.exception()
        if error is None or isinstance(error, PeerLostError):
            self.close()
        elif isinstance(error, KoinonError):
            self.close(error)
        else:
            log.error("serving a follower failed", exc_info=error)
            self.close(InternalError(reason=f"{type(error).__name__}: {error}"))


# --- errors ------------------------------------------------------------------------------------


def lost(reason: str) -> PeerLostError:
    """Return that the other end is lost."""
    return PeerLostError(reason=reason)


def error_of_call(error: Any, address: str) -> KoinonError:
    """Return what the other side said, or that it is lost."""
    return error_of(error) or lost(f"{address}: {status_text(error)}")


def retrieved(task: asyncio.Future[Any]) -> None:
    """Look at the task's error, so that asyncio does not complain that it was never retrieved."""
    if not task.cancelled():
        task.exception()
