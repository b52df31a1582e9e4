"""The gRPC link to one node, and the outcomes of attempts on it.

gRPC reports UNAVAILABLE for requests that never left as well as for those cut off after they
arrived. So a request is handed to gRPC only while calls may be sent on the connection
(``attended_channel``); if it then ends without a typed error, it counts as sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import grpc

from koinon.driver import request_ids
from koinon.driver.rpc.attended_channel import PROTOCOL, Connection
from koinon_proto.contract.errors import (
    DeadlinePassedError,
    KoinonError,
    NotSentError,
    ResourceExhaustedError,
    UnknownFateError,
)
from koinon_proto.security.transport import PLAIN, Dialing
from koinon_proto.server import rpc
from koinon_proto.v1 import table_pb2

_SOON_S = 0.25


class Link:
    """The connection to one address. Belongs to one event loop."""

    def __init__(self, address: str, dialing: Dialing = PLAIN) -> None:
        self.address = address
        self._dialing = dialing
        self._connection = self._new_connection()
        # the attempt to connect, which callers share
        self._connecting: asyncio.Task[bool] | None = None
        # replaced connections that still have calls in flight
        self._retiring: dict[asyncio.Task[None], Connection] = {}
        self._closed = False

    def _new_connection(self) -> Connection:
        return Connection(self.address, self._on_leaving, self._dialing)

    def _on_leaving(self) -> None:
        """Send nothing more on the present connection: its node is about to stop. Calls in flight
        are waited for; others go to the node's successor, if it takes over this address.
        """
        if not self._closed:
            self._replace(Connection.retire)

    def drop(self) -> None:
        """Give up the calls in flight: the table says that the node is gone, and it does not reply.
        If packets vanish, the network itself may take many seconds to notice.
        """
        self._replace(Connection.drop)

    def _replace(self, end: Callable[[Connection], Coroutine[Any, Any, None]]) -> None:
        left, self._connection = self._connection, self._new_connection()
        task = asyncio.create_task(end(left))
        self._retiring[task] = left
        task.add_done_callback(self._retiring.pop)

    @property
    def silence_s(self) -> float:
        """Return for how many seconds the node has answered none of the calls in flight."""
        return self._connection.silence_s

    @property
    def last_request(self) -> request_ids.RequestId | None:
        """The id of the call begun last."""
        return self._connection.last_request

    def ready(self) -> bool:
        """Return whether a request handed to gRPC now would be sent; if not, begin to connect."""
        connection = self._connection
        return not (self._closed or connection.is_outdated()) and connection.may_send()

    async def connect(self) -> bool:
        """Wait for a connection; return whether requests may be sent. Callers share one attempt,
        which outlives them.
        """
        if self._closed or self.ready():
            return not self._closed
        if self._connecting is None:
            connection = self._connection
            if connection.version != self._dialing.version or connection.is_outdated():
                self._replace(Connection.retire)
            self._connecting = asyncio.create_task(self._connection.attend())
            self._connecting.add_done_callback(self._connected)
        try:
            return await asyncio.shield(self._connecting)
        except asyncio.CancelledError:
            if _cancelling():
                raise
            return False  # the link was closed or dropped meanwhile

    async def connect_soon(self) -> bool:
        """Like ``connect``, but also return False if connecting takes long: the caller then checks
        whether another node has taken over, and may come back; the attempt continues.
        """
        try:
            async with asyncio.timeout(_SOON_S):
                return await self.connect()
        except TimeoutError:
            return False

    def _connected(self, _task: object) -> None:
        self._connecting = None

    async def call(
        self, method: str, request: Any, timeout_s: float, *, write: bool = False
    ) -> Any:
        """Call a method of ``KeyValue`` by its name in ``attended_channel``; return the reply or
        the error.
        """
        connection = self._connection
        if not self.ready():  # permission may have ended since the caller checked
            return self.not_sent()
        if write:
            request.take_by_ms = connection.take_by_ms(timeout_s)
        with connection.sending():
            outcome = await self._call(connection, method, request, timeout_s, write=write)
        if isinstance(outcome, DeadlinePassedError):
            connection.refused_as_late()
        return outcome

    async def get_table(self, request: table_pb2.GetTableRequest, timeout_s: float) -> Any:
        """Return a ``TableUpdate`` or the error."""
        return await self._call_when_reached("get_table", request, timeout_s)

    async def get_status(self, request: Any, timeout_s: float) -> Any:
        """Return a ``ClusterStatus`` or the error."""
        return await self._call_when_reached("get_status", request, timeout_s)

    async def ask_group(self, method: str, request: Any, timeout_s: float) -> Any:
        """Call a method of ``Groups``, by its name in ``attended_channel``; return the reply or the
        error.
        """
        return await self._call_when_reached(method, request, timeout_s)

    async def _call_when_reached(self, method: str, request: Any, timeout_s: float) -> Any:
        """Call a method that may be repeated, so that it needs no permission to send."""
        connection = self._connection
        if self._closed or not await connection.reach():
            return self.not_sent()
        with connection.sending():
            return await self._call(connection, method, request, timeout_s)

    def not_sent(self) -> KoinonError:
        """Return the error that says why nothing was sent."""
        return (
            self._connection.refusal
            or self._dialing.certificate_fault()  # waiting would not help
            or NotSentError(reason=f"no connection to {self.address}")
        )

    async def _call(
        self,
        connection: Connection,
        method: str,
        request: Any,
        timeout_s: float,
        *,
        write: bool = False,
    ) -> Any:
        try:
            call = getattr(connection, method)
            metadata = (*request_ids.metadata(), *connection.metadata)
            return await call(request, timeout=timeout_s, metadata=metadata)
        except grpc.aio.AioRpcError as failure:
            return _error_of(failure, self.address, write=write)
        except grpc.aio.UsageError:  # the channel was closed before the request was handed over
            return self.not_sent()
        except asyncio.CancelledError:
            if not (self._closed or connection.dropped) or _cancelling():
                raise
            why = "the client was closed" if self._closed else f"{self.address} was fenced"
            return UnknownFateError(reason=f"{why} before the answer came")

    async def close(self) -> None:
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        for retiring in list(self._retiring):
            retiring.cancel()
        for connection in (self._connection, *self._retiring.values()):
            await connection.close()


def _cancelling() -> bool:
    """Return whether the running task itself is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _error_of(failure: grpc.aio.AioRpcError, address: str, *, write: bool) -> KoinonError:
    error = rpc.fate_of(failure, at=address, unimplemented=PROTOCOL)
    if error.maybe_applied and failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and not write:
        # One of gRPC's own limits. For a write, the reply may have exceeded it.
        return ResourceExhaustedError(resource=f"gRPC at {address} ({failure.details()})", limit=0)
    return error
