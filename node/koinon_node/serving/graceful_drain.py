"""Who may send this node calls, and that they hear when it is about to stop (KeyValue.Attend).

gRPC's own end of a server cuts off what arrives at that moment, and does not say whether it was
done. So whoever attends is told first; it sends nothing more, and goes when all that it sent is
answered.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from koinon_proto.server.admission import Places
from koinon_proto.v1 import kv_pb2

ATTENDING_MAX = 16_384


class GracefulDrain:
    """Belongs to the event loop."""

    def __init__(self) -> None:
        self._leaving = asyncio.Event()
        self._over = asyncio.Event()
        self._nobody = asyncio.Event()
        self._nobody.set()
        self._places = Places(
            "clients that attend", places=ATTENDING_MAX, host=ATTENDING_MAX // 2, connection=16
        )

    async def serve(self, context: Any) -> None:
        """Serve one who attends, until it goes, or all are sent away.

        Raises:
            ResourceExhaustedError: too many attend.
        """
        try:
            await self._serve(context)
        finally:
            if not self._places.taken:
                self._nobody.set()

    async def _serve(self, context: Any) -> None:
        if self._leaving.is_set():
            await context.write(kv_pb2.AttendResponse(leaving=True))
            return
        with self._places.place(context.peer()):
            self._nobody.clear()
            await context.write(kv_pb2.AttendResponse())
            await self._leaving.wait()
            await context.write(kv_pb2.AttendResponse(leaving=True))
            await self._over.wait()

    async def end(self, *, least_s: float, most_s: float) -> None:
        """Tell all that the node is about to stop; return when they have gone, within these times
        in any case. What comes by other ways is still served meanwhile.
        """
        self._leaving.set()
        await asyncio.sleep(least_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s - least_s):
                await self._nobody.wait()
        self._over.set()
