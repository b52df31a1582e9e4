"""One gRPC channel, and leave to send calls on it.

A server that closes its connections cuts off what arrives at that moment, and says of it neither
that it was done nor that it was not. So a client attends (``KeyValue.Attend``): it sends only what
it may, hears when the node is about to stop, sends no more, and ends its attendance when all that
it has sent is answered; the node waits for that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import grpc

from koinon.core.node_clock import NodeClock
from koinon.driver import request_ids
from koinon.driver.rpc.channels import CONNECT_S_MAX, open_channel
from koinon_proto.contract.errors import KoinonError, UnsupportedVersionError
from koinon_proto.security.transport import PLAIN, Dialing
from koinon_proto.server import rpc
from koinon_proto.v1 import admin_pb2_grpc, feed_pb2_grpc, kv_pb2, kv_pb2_grpc, table_pb2_grpc

READY = grpc.ChannelConnectivity.READY
_FAILED = (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN)

PROTOCOL = "the protocol koinon.v1"
"""What a server lacks that does not know a method."""
_NOT_LET_IN = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)
_END_S_MAX = 1.0


class Connection:
    """The channel, its calls, and the attendance. ``on_leaving`` is called once, when the node has
    said that it is about to stop. Belongs to one event loop.
    """

    def __init__(
        self, address: str, on_leaving: Callable[[], None], dialing: Dialing = PLAIN
    ) -> None:
        self._now = asyncio.get_running_loop().time
        self.version = dialing.version
        """Of the identity with which it was opened."""
        self.metadata = dialing.metadata
        self._channel = open_channel(address, dialing)
        kv = cast(Any, kv_pb2_grpc.KeyValueStub)(self._channel)
        self.batch_get, self.batch_write, self.scan = kv.BatchGet, kv.BatchWrite, kv.Scan
        self.batch_update, self.commit_batch = kv.BatchUpdate, kv.CommitBatch
        self.get_table = cast(Any, table_pb2_grpc.TableServiceStub)(self._channel).GetTable
        self.get_status = cast(Any, admin_pb2_grpc.AdminStub)(self._channel).GetStatus
        self.changes = cast(Any, feed_pb2_grpc.FeedStub)(self._channel).Changes
        self._attend = kv.Attend
        self._on_leaving = on_leaving
        self._attendance: Any = None  # the call, once it was answered
        self._left: Any = None  # the attendance that the node has ended
        self._listening: asyncio.Task[None] | None = None  # for the end of the attendance
        self.refusal: KoinonError | None = None
        """The error with which the node has refused this client, if it has."""
        self._clock: NodeClock | None = None  # the node's, as the attendance began
        self._is_behind = False  # a write was refused as late which was not: the clocks differ
        self._calls = 0  # under way
        self._silent_since = 0.0  # while calls are under way: when one began, or ended, last of all
        self.last_request: request_ids.RequestId | None = None  # for which a call was begun last
        self._dropped = False  # what was under way was given up
        self._idle = asyncio.Event()  # set while no call is under way
        self._idle.set()

    def may_send(self) -> bool:
        """Return whether a call handed to gRPC now is sent, and not cut off by a stopping node."""
        return (
            self._attendance is not None and self._channel.get_state(try_to_connect=True) is READY
        )

    def take_by_ms(self, timeout_s: float) -> int:
        """Return the node's time, in ms, until which it may take up a write that is sent now; 0: it
        is not known.
        """
        return self._clock.ms_at(self._now() + timeout_s) if self._clock is not None else 0

    def is_outdated(self) -> bool:
        """Return whether the node's clock is not known well enough any more."""
        clock = self._clock
        return clock is not None and (self._is_behind or clock.is_old(self._now()))

    def refused_as_late(self) -> None:
        """A write was refused as late that is not: the two clocks have come apart."""
        self._is_behind = True

    async def reach(self) -> bool:
        """Return whether there is a connection, once that is known."""
        try:
            async with asyncio.timeout(CONNECT_S_MAX):
                state = self._channel.get_state(try_to_connect=True)
                while state is not READY:
                    if state in _FAILED:
                        return False
                    await self._channel.wait_for_state_change(state)
                    state = self._channel.get_state(try_to_connect=True)
        except (TimeoutError, grpc.aio.UsageError):  # the second: it was closed meanwhile
            return False
        return True

    async def attend(self) -> bool:
        """Connect and ask for leave to send; return whether it was given."""
        if self.may_send():
            return True
        if not await self.reach():
            return False
        asked_at = self._now()
        call = self._attend(kv_pb2.AttendRequest(), metadata=self.metadata)
        try:
            async with asyncio.timeout(CONNECT_S_MAX):
                answer = await call.read()
        except grpc.aio.AioRpcError as failure:
            if failure.code() in _NOT_LET_IN:
                self.refusal = rpc.error_of(failure)
            elif failure.code() is grpc.StatusCode.UNIMPLEMENTED:  # another server has the address
                self.refusal = UnsupportedVersionError(what=PROTOCOL, version=0, supported=1)
            return False
        except TimeoutError:
            await _end(call)
            return False
        except BaseException:
            call.cancel()
            raise
        if answer is grpc.aio.EOF or answer.leaving:
            await _end(call)
            return False
        self.refusal = None
        self._clock = NodeClock(asked_at, answer.clock_ms) if answer.clock_ms else None
        self._attendance = call
        self._listening = asyncio.create_task(self._listen(call))
        return True

    async def _listen(self, call: Any) -> None:
        """Hear that the node leaves, or that the connection is gone."""
        leaves = False
        try:
            message = await call.read()
            leaves = message is not grpc.aio.EOF and message.leaving
        except grpc.aio.AioRpcError:
            pass
        finally:
            self._attendance = None
        if leaves:
            self._left = call
            self._on_leaving()

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """A call is under way inside."""
        if not self._calls:
            self._silent_since = self._now()
            self._idle.clear()
        self._calls += 1
        self.last_request = request_ids.given()
        try:
            yield
        finally:
            self._calls -= 1
            self._silent_since = self._now()
            if not self._calls:
                self._idle.set()

    @property
    def silence_s(self) -> float:
        """For how long the node has answered none of the calls that wait for it."""
        return self._now() - self._silent_since if self._calls else 0.0

    @property
    def dropped(self) -> bool:
        """True once the calls under way were given up, because no answer will come."""
        return self._dropped

    async def drop(self) -> None:
        """Give up what is under way: its fate is unknown."""
        self._dropped = True
        await self.close()

    async def retire(self) -> None:
        """Close once all that is under way has ended."""
        await self._idle.wait()
        await self.close()

    async def close(self) -> None:
        """Cut off what is under way, and the attendance with it."""
        attendance = self._attendance or self._left
        if self._listening is not None:
            self._listening.cancel()
        if attendance is not None:
            await _end(attendance)
        await self._channel.close()


async def _end(call: Any) -> None:
    """Cancel the call and wait until gRPC has ended it. Without the wait gRPC would report the end
    to a loop that may be closed by then, and log an error.
    """
    call.cancel()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_S_MAX):
            await call.code()
