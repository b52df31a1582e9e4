"""Blocking channels to servers, by address, each made when it is first asked for."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

import grpc

from koinon.request_ids import naming
from koinon_proto import rpc


class Channels:
    """Ends with ``close``, or as a context. Thread-safe."""

    def __init__(self) -> None:
        self._channels_lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

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
                plain = grpc.insecure_channel(address, rpc.CHANNEL_OPTIONS)
                self._channels[address] = naming(plain)
            return self._channels[address]
