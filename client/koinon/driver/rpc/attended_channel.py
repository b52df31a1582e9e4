"""One gRPC channel, and permission to send calls on it.

A server that closes its connections cuts off calls that arrive at that moment, without a sign
whether they were carried out. So a client opens a stream (``KeyValue.Attend``), its *attendance*:
it sends calls only while the attendance lasts; when the node announces on it that it is about to
stop, the client sends no more, and ends the attendance once all its calls are answered. The node
waits for that.
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
from koinon_proto.v1 import (
    admin_pb2_grpc,
    feed_pb2_grpc,
    groups_pb2_grpc,
    kv_pb2,
    kv_pb2_grpc,
    table_pb2_grpc,
)

READY = grpc.ChannelConnectivity.READY
_FAILED = (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN)

PROTOCOL = "the protocol koinon.v1"
"""The feature that a server lacks if it does not know a method, for the error."""
_NOT_LET_IN = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)
_END_S_MAX = 1.0


class Connection:
    """The channel, its calls, and the attendance. ``on_leaving`` is called once, when the node has
    announced that it is about to stop. Belongs to one event loop.
    """

    def __init__(
        self, address: str, on_leaving: Callable[[], None], dialing: Dialing = PLAIN
    ) -> None:
        self._now = asyncio.get_running_loop().time
        self.version = dialing.version
        """The version of the identity with which it was opened."""
        self.metadata = dialing.metadata
        self._channel = open_channel(address, dialing)
        kv = cast(Any, kv_pb2_grpc.KeyValueStub)(self._channel)
        self.batch_get, self.batch_write, self.scan = kv.BatchGet, kv.BatchWrite, kv.Scan
        self.batch_update, self.commit_batch = kv.BatchUpdate, kv.CommitBatch
        self.get_table = cast(Any, table_pb2_grpc.TableServiceStub)(self._channel).GetTable
        self.get_status = cast(Any, admin_pb2_grpc.AdminStub)(self._channel).GetStatus
        self.changes = cast(Any, feed_pb2_grpc.FeedStub)(self._channel).Changes
        cursors = cast(Any, groups_pb2_grpc.CursorsStub)(self._channel)
        self.claim_cursors, self.commit_cursors = cursors.Claim, cursors.Commit
        self.read_cursors, self.commit_with_cursor = cursors.Read, cursors.CommitBatch
        groups = cast(Any, groups_pb2_grpc.GroupsStub)(self._channel)
        self.attend_group, self.leave_group = groups.Attend, groups.Leave
        self._attend = kv.Attend
        self._on_leaving = on_leaving
        self._attendance: Any = None  # the Attend call, once it was answered
        self._left: Any = None  # the attendance that the node has ended
        self._listening: asyncio.Task[None] | None = None  # waits for the end of the attendance
        self.refusal: KoinonError | None = None
        """The error with which the node has refused this client, if it has."""
        self._clock: NodeClock | None = None  # the node's clock at the start of the attendance
        # the node refused a write as late that was in time: the clocks differ
        self._is_behind = False
        self._calls = 0  # calls in flight
        self._silent_since = 0.0  # while calls are in flight: when one last began or ended
        self.last_request: request_ids.RequestId | None = None  # the id of the call begun last
        self._dropped = False  # the calls in flight were given up
        self._idle = asyncio.Event()  # set while no call is in flight
        self._idle.set()

    def may_send(self) -> bool:
        """Return whether a call handed to gRPC now is sent, and not cut off by a stopping node."""
        return (
            self._attendance is not None and self._channel.get_state(try_to_connect=True) is READY
        )

    def take_by_ms(self, timeout_s: float) -> int:
        """Return the node's time in ms after which it must refuse a write that is sent now; 0:
        unknown.
        """
        return self._clock.ms_at(self._now() + timeout_s) if self._clock is not None else 0

    def is_outdated(self) -> bool:
        """Return whether the node's clock is no longer known well enough."""
        clock = self._clock
        return clock is not None and (self._is_behind or clock.is_old(self._now()))

    def refused_as_late(self) -> None:
        """Note that the node refused a write as late that was in time: the two clocks have drifted
        apart.
        """
        self._is_behind = True

    async def reach(self) -> bool:
        """Wait until the channel has connected or failed; return whether it is connected."""
        try:
            async with asyncio.timeout(CONNECT_S_MAX):
                state = self._channel.get_state(try_to_connect=True)
                while state is not READY:
                    if state in _FAILED:
                        return False
                    await self._channel.wait_for_state_change(state)
                    state = self._channel.get_state(try_to_connect=True)
        except (TimeoutError, grpc.aio.UsageError):  # the second: the channel was closed meanwhile
            return False
        return True

    async def attend(self) -> bool:
        """Connect and open the attendance; return whether the node has granted it."""
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
            # another server now has the address
            elif failure.code() is grpc.StatusCode.UNIMPLEMENTED:
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
        """Read the attendance until the node leaves or the connection is lost."""
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
        """Count a call as in flight within this context."""
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
        """Return for how many seconds the node has answered none of the calls in flight."""
        return self._now() - self._silent_since if self._calls else 0.0

    @property
    def dropped(self) -> bool:
        """True once the calls in flight were given up, because no answer will come."""
        return self._dropped

    async def drop(self) -> None:
        """Give up the calls in flight: their fate is unknown."""
        self._dropped = True
        await self.close()

    async def retire(self) -> None:
        """Close once all calls in flight have ended."""
        await self._idle.wait()
        await self.close()

    async def close(self) -> None:
        """Cancel the calls in flight and the attendance, and close the channel."""
        attendance = self._attendance or self._left
        if self._listening is not None:
            self._listening.cancel()
        if attendance is not None:
            await _end(attendance)
        await self._channel.close()


async def _end(call: Any) -> None:
    """Cancel the call and wait until gRPC has ended it. Otherwise gRPC would report the end to a
    loop that may be closed by then, and log an error.
    """
    call.cancel()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_S_MAX):
            await call.code()
