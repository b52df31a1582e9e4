"""Tells attached clients that the node is about to stop, and waits until they have disconnected.

A server that ends breaks off the requests that arrive at that moment, and their clients cannot know
whether they were executed. So the node first notifies each client that attends
(``KeyValue.Attend``; on the Redis protocol ``KOINON.HELLO``). The client sends no more requests,
and disconnects when all are answered.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from koinon_proto.server.admission import Places
from koinon_proto.v1 import kv_pb2

ATTENDING_MAX = 16_384


class GracefulDrain:
    """Notifies attached clients before the node stops. Belongs to the event loop."""

    def __init__(self) -> None:
        self._leaving = asyncio.Event()
        self._over = asyncio.Event()
        self._nobody = asyncio.Event()
        self._nobody.set()
        self._listeners: dict[int, Callable[[], None]] = {}  # callbacks, by attendance number
        self._attendances = 0
        self._places = Places(
            "clients that attend", places=ATTENDING_MAX, host=ATTENDING_MAX // 2, connection=16
        )

    def attend(self, peer: str, on_leaving: Callable[[], None]) -> Callable[[], None]:
        """Register ``on_leaving``, which is called when the node is about to stop (at once if it
        already is). Return a function that ends the attendance.

        Raises:
            ResourceExhaustedError: too many clients attend.
        """
        held = contextlib.ExitStack()
        held.enter_context(self._places.place(peer))
        self._attendances += 1
        number = self._attendances
        self._nobody.clear()

        def end() -> None:
            if self._listeners.pop(number, None) is not None:
                held.close()
                if not self._places.taken:
                    self._nobody.set()

        self._listeners[number] = on_leaving
        if self._leaving.is_set():
            on_leaving()
        return end

    async def serve(self, context: Any, clock_ms: int) -> None:
        """Serve a call of ``Attend`` until its client disconnects or the drain ends. ``clock_ms``:
        the node's time.

        Raises:
            ResourceExhaustedError: too many clients attend.
        """
        leaving = asyncio.Event()
        if self._leaving.is_set():
            await context.write(kv_pb2.AttendResponse(leaving=True))
            return
        end = self.attend(context.peer(), leaving.set)
        try:
            await context.write(kv_pb2.AttendResponse(clock_ms=clock_ms))
            await leaving.wait()
            await context.write(kv_pb2.AttendResponse(leaving=True))
            await self._over.wait()
        finally:
            end()

    async def end(self, *, least_s: float, most_s: float) -> None:
        """Notify all clients; return when they have disconnected, at the earliest after ``least_s``
        and at the latest after ``most_s``. Other requests are still served meanwhile.
        """
        self._leaving.set()
        for on_leaving in list(self._listeners.values()):
            on_leaving()
        await asyncio.sleep(least_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s - least_s):
                await self._nobody.wait()
        self._over.set()
