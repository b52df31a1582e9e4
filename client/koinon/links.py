"""One gRPC channel a node, and what an attempt on it came to.

gRPC says UNAVAILABLE for requests that never left as for those cut off after they arrived. So a
request is handed to gRPC only while the channel is READY; whatever then ends without a typed answer
counts as sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import grpc

from koinon.core.operations import ReadReply, WriteReply
from koinon.core.retry import NotSentError
from koinon.core.scanning import ScanReply
from koinon_proto import convert, rpc
from koinon_proto.errors import KoinonError, ResourceExhaustedError, UnknownFateError
from koinon_proto.v1 import admin_pb2_grpc, kv_pb2, kv_pb2_grpc, table_pb2, table_pb2_grpc

READY = grpc.ChannelConnectivity.READY
_FAILED = (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN)
CONNECT_S_MAX = 1.0
"""A connection that takes longer counts as failed: meanwhile another node may have taken over."""


_OPTIONS = tuple({**dict(rpc.CHANNEL_OPTIONS), "grpc.max_reconnect_backoff_ms": 200}.items())
"""A node that comes back is served from again soon."""


class Link:
    """The channel to one address. Belongs to one event loop."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        kv = cast(Any, kv_pb2_grpc.KeyValueStub)(self._channel)
        self._batch_get, self._batch_write, self._scan = kv.BatchGet, kv.BatchWrite, kv.Scan
        self._get_table = cast(Any, table_pb2_grpc.TableServiceStub)(self._channel).GetTable
        self._get_status = cast(Any, admin_pb2_grpc.AdminStub)(self._channel).GetStatus
        self._connecting: asyncio.Task[bool] | None = None
        self._closed = False

    def ready(self) -> bool:
        """Whether a request handed to gRPC now would be sent; begins to connect if not."""
        return not self._closed and self._channel.get_state(try_to_connect=True) is READY

    async def connect(self) -> bool:
        """Return whether there is a connection. Callers share one attempt, which outlives them."""
        if self._closed or self.ready():
            return not self._closed
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
            self._connecting.add_done_callback(self._connected)
        return await asyncio.shield(self._connecting)

    def _connected(self, _task: object) -> None:
        self._connecting = None

    async def _connect(self) -> bool:
        try:
            async with asyncio.timeout(CONNECT_S_MAX):
                state = self._channel.get_state(try_to_connect=True)
                while state is not READY:
                    if state in _FAILED:
                        return False
                    await self._channel.wait_for_state_change(state)
                    state = self._channel.get_state(try_to_connect=True)
        except TimeoutError:
            return False
        return True

    async def read(
        self, request: kv_pb2.BatchGetRequest, timeout_s: float
    ) -> ReadReply | KoinonError:
        reply = await self._call(self._batch_get, request, timeout_s)
        if isinstance(reply, KoinonError):
            return reply
        return ReadReply(
            values=reply.values,
            missing=reply.missing,
            versions=reply.versions,
            expires_at_ms=reply.expires_at_ms,
            refused=_refused(reply.refusals),
        )

    async def write(
        self, request: kv_pb2.BatchWriteRequest, timeout_s: float
    ) -> WriteReply | KoinonError:
        reply = await self._call(self._batch_write, request, timeout_s, write=True)
        if isinstance(reply, KoinonError):
            return reply
        return WriteReply(
            versions=reply.versions,
            absent=reply.absent,
            refused=_refused(reply.refusals),
            row_errors={e.row: convert.error_from_proto(e.error) for e in reply.row_errors},
        )

    async def scan(self, request: kv_pb2.ScanRequest, timeout_s: float) -> ScanReply | KoinonError:
        reply = await self._call(self._scan, request, timeout_s)
        if isinstance(reply, KoinonError):
            return reply
        cursor = (reply.next.partition_id, reply.next.after_key) if reply.HasField("next") else None
        return ScanReply(
            keys=reply.keys,
            values=reply.values,
            partition_ids=reply.partition_ids,
            versions=reply.versions,
            expires_at_ms=reply.expires_at_ms,
            next=cursor,
            refused=_refused(reply.refusals),
        )

    async def get_table(self, request: table_pb2.GetTableRequest, timeout_s: float) -> Any:
        """Return a ``TableUpdate`` or the error."""
        return await self._call_when_connected(self._get_table, request, timeout_s)

    async def get_status(self, request: Any, timeout_s: float) -> Any:
        """Return a ``ClusterStatus`` or the error."""
        return await self._call_when_connected(self._get_status, request, timeout_s)

    async def _call_when_connected(self, method: Any, request: Any, timeout_s: float) -> Any:
        if not await self.connect():
            return self.not_sent()
        return await self._call(method, request, timeout_s)

    def not_sent(self) -> NotSentError:
        return NotSentError(reason=f"no connection to {self.address}")

    async def _call(
        self, method: Callable[..., Any], request: Any, timeout_s: float, *, write: bool = False
    ) -> Any:
        try:
            return await method(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as failure:
            return _error_of(failure, self.address, write=write)
        except grpc.aio.UsageError:  # the channel was closed before the request was handed over
            return self.not_sent()
        except asyncio.CancelledError:
            if not self._closed or _cancelling():
                raise
            return UnknownFateError(reason="the client was closed before the answer came")

    async def close(self) -> None:
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        await self._channel.close()


def _cancelling() -> bool:
    """Whether the running task itself is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _error_of(failure: grpc.aio.AioRpcError, address: str, *, write: bool) -> KoinonError:
    typed = rpc.error_of(failure)
    if typed is not None:
        return typed
    reason = f"{address}: {failure.code().name.lower()}: {failure.details()}"
    if failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and not write:
        # One of gRPC's own limits. To a write it may be its reply that was over it.
        return ResourceExhaustedError(resource=f"gRPC at {address} ({failure.details()})", limit=0)
    return UnknownFateError(reason=reason)


def _refused(refusals: Sequence[kv_pb2.Refusal]) -> dict[int, KoinonError]:
    if not refusals:
        return {}
    return {r.partition_id: convert.error_from_proto(r.error) for r in refusals}
