"""A ``grpc.aio`` server whose methods are guarded, and that no path of a call can stop.

grpc.aio decodes the path of a call whose method is not registered as UTF-8, in the loop that serves
all calls: one that is not ends the loop, and with it the server, for good. Here all methods are
registered, so that whatever else is called needs no path to be answered: it is not there.

The hook for that is private to grpc.aio, and there since grpcio 1.84: a server that runs without it
says so in its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # private, so without types

from koinon_proto.server.guard import Guard

log = logging.getLogger(__name__)

_ANSWERING_MAX = 256
_HOOKS = ("_make_request_call_future", "_request_call")
_AioServer: Any = cygrpc.AioServer


class _Server(_AioServer):  # type: ignore[misc]  # its base has no type
    """Asks gRPC for calls of unknown methods, as its base does, but answers these at once."""

    def _make_request_call_future(self, method: bytes | None) -> Any:
        if method is not None:
            return super()._make_request_call_future(method)
        return asyncio.ensure_future(self._answer_unknown())

    async def _answer_unknown(self) -> None:
        """Never returns: the loop is not to see these calls. Raises once the server is stopped."""
        answering: set[asyncio.Task[None]] = set()
        while True:
            call = await self._request_call()
            task = asyncio.ensure_future(_say_unknown(call))
            answering.add(task)
            task.add_done_callback(answering.discard)
            while len(answering) >= _ANSWERING_MAX:
                await asyncio.wait(answering, return_when=asyncio.FIRST_COMPLETED)


async def _say_unknown(call: Any) -> None:
    context = cygrpc._ServicerContext(call, None, None, asyncio.get_running_loop())
    with contextlib.suppress(grpc.aio.AbortError, cygrpc.ExecuteBatchError):
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


class GuardedServer:
    """A server of grpc.aio; what is registered with it is called through the guard."""

    def __init__(self, guard: Guard, options: Sequence[tuple[str, Any]]) -> None:
        if not all(hasattr(_AioServer, hook) for hook in _HOOKS):
            log.warning("calls of unknown methods unguarded grpcio=%s", grpc.__version__)
        cygrpc.AioServer = _Server
        try:
            self._server = grpc.aio.server(options=options)
        finally:
            cygrpc.AioServer = _AioServer
        self._guard = guard

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """See grpc.aio.Server."""
        guarded = {n: self._guard.guarded(f"/{service}/{n}", h) for n, h in handlers.items()}
        served = {name: handler for name, handler in guarded.items() if handler is not None}
        self._server.add_registered_method_handlers(service, served)

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Do nothing: the generated code calls this beside the other, which is enough."""

    async def start(self) -> None:
        """See grpc.aio.Server."""
        await self._server.start()
        self._guard.start()

    async def stop(self, grace: float | None) -> None:
        """See grpc.aio.Server."""
        await self._server.stop(grace)
        self._guard.stop()
