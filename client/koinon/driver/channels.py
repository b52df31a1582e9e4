"""A client's gRPC channels: their options, and blocking ones by address, each made when it is first
asked for.
"""

from __future__ import annotations

import threading

import grpc

from koinon.core.closing import Closing
from koinon.driver.request_ids import naming
from koinon_proto.server import rpc

CONNECT_S_MAX = 1.0
"""A connection that takes longer counts as failed: meanwhile another node may have taken over."""

OPTIONS = tuple(
    {
        **dict(rpc.CHANNEL_OPTIONS),
        # To gRPC this is the time that it gives an attempt to connect, not a pause between two. An
        # operator or a program may be far away; servers, which are near one another, use less.
        "grpc.min_reconnect_backoff_ms": round(CONNECT_S_MAX * 1000),
    }.items()
)


class Channels(Closing):
    """Ends with ``close``, or as a context. Thread-safe."""

    def __init__(self) -> None:
        self._channels_lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}

    def close(self) -> None:
        """Close all of them; a call under way ends as cancelled."""
        with self._channels_lock:
            channels = list(self._channels.values())
            self._channels.clear()
        for channel in channels:
            channel.close()

    def channel(self, address: str) -> grpc.Channel:
        """Return the channel to a server."""
        with self._channels_lock:
            if address not in self._channels:
                plain = grpc.insecure_channel(address, OPTIONS)
                self._channels[address] = naming(plain)
            return self._channels[address]
