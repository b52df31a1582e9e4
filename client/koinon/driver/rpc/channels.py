"""A client's gRPC channels: their options, and a cache of blocking channels by address."""

from __future__ import annotations

import threading
from typing import Any

import grpc

from koinon.core.closing import Closing
from koinon.driver import forks
from koinon.driver.request_ids import naming
from koinon_proto.contract.errors import ForkedError
from koinon_proto.security.names import ANY_SERVER
from koinon_proto.security.transport import Dialing
from koinon_proto.security.transport import dialing as from_environment
from koinon_proto.server import rpc

CONNECT_S_MAX = 1.0
"""The timeout of connecting, after which another node may have taken over."""

OPTIONS = tuple(
    {
        **dict(rpc.CHANNEL_OPTIONS),
        # To gRPC this is the time for an attempt to connect, not a pause between two attempts. An
        # operator or a program may be far away; servers, which are near one another, use less.
        "grpc.min_reconnect_backoff_ms": round(CONNECT_S_MAX * 1000),
    }.items()
)


_NODE_OPTIONS = tuple({**dict(OPTIONS), "grpc.max_reconnect_backoff_ms": 200}.items())
"""Reconnect at least this often: a node that comes back is used again soon."""


def open_channel(address: str, dialing: Dialing) -> Any:
    """Return a ``grpc.aio.Channel`` of the running loop, or its replacement in a process in which
    gRPC's core cannot run. Its holder must have called ``forks.holds_channels``.
    """
    if forks.core_is_lost():
        from koinon.driver.rpc import http2

        return http2.Channel(address, dialing, connect_s_max=CONNECT_S_MAX)
    return dialing.aio_channel(address, ANY_SERVER, _NODE_OPTIONS)


class Channels(Closing):
    """Blocking channels by address, opened on first use. Ends with ``close``, or as a context.
    Thread-safe.
    """

    def __init__(self, dialing: Dialing | None = None) -> None:
        """``dialing``: how to connect; by default as the environment says.

        Raises:
            ConfigurationError: the environment's settings are invalid.
        """
        self._dialing = from_environment() if dialing is None else dialing
        self._channels_lock = threading.Lock()
        self._channels: dict[str, tuple[int, grpc.Channel]] = {}  # by the identity's version

    @property
    def uses_tls(self) -> bool:
        return self._dialing.uses_tls

    def close(self) -> None:
        """Close all channels; calls in flight end as cancelled."""
        if forks.core_is_lost():  # in a forked child they are the parent's
            return
        with self._channels_lock:
            channels = list(self._channels.values())
            self._channels.clear()
        for _, channel in channels:
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
            version, known = self._dialing.version, self._channels.get(address)
            if known is None or known[0] != version:
                opened = self._dialing.channel(address, ANY_SERVER, OPTIONS)
                known = version, naming(opened, self._dialing.metadata)
                self._channels[address] = known  # calls in flight keep the former channel
            return known[1]
