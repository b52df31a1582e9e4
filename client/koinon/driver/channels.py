"""A client's gRPC channels: their options, and blocking ones by address, each made when it is first
asked for.
"""

from __future__ import annotations

import threading
from typing import Any

import grpc

from koinon.core.closing import Closing
from koinon.driver import forks
from koinon.driver.request_ids import naming
from koinon_proto.contract.errors import ForkedError
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


_NODE_OPTIONS = tuple({**dict(OPTIONS), "grpc.max_reconnect_backoff_ms": 200}.items())
"""A node that comes back is served from again soon."""


def open_channel(address: str) -> Any:
    """Return a ``grpc.aio.Channel`` of the running loop, or what does its work in a process in
    which gRPC's core cannot run. Its holder has said so (``forks.holds_channels``).
    """
    if forks.core_is_lost():
        from koinon.driver import http2

        return http2.Channel(address, connect_s_max=CONNECT_S_MAX)
    return grpc.aio.insecure_channel(address, options=_NODE_OPTIONS)


class Channels(Closing):
    """Ends with ``close``, or as a context. Thread-safe."""

    def __init__(self) -> None:
        self._channels_lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}

    def close(self) -> None:
        """Close all of them; a call under way ends as cancelled."""
        if forks.core_is_lost():  # they are the parent's
            return
        with self._channels_lock:
            channels = list(self._channels.values())
            self._channels.clear()
        for channel in channels:
            channel.close()

    def channel(self, address: str) -> grpc.Channel:
        """Return the channel to a server.

        Raises:
            ForkedError: gRPC was used before this process was forked.
        """
        if forks.core_is_lost():
            raise ForkedError
        forks.holds_channels(self)
        with self._channels_lock:
            if address not in self._channels:
                plain = grpc.insecure_channel(address, OPTIONS)
                self._channels[address] = naming(plain)
            return self._channels[address]
