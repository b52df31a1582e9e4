"""Receives new tables at once over one WatchTable stream, kept open on a thread of its own.

Any coordinator serves the stream; the leader is preferred, since it applies changes first. A silent
stream may mean that nothing happens, or that its server is isolated. Heartbeats bring tables too,
and the agent reports their versions (``heard_elsewhere``). If the watch has missed one, and
whenever another coordinator leads, the stream is opened anew.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc

from koinon_proto.server.rpc import in_words
from koinon_proto.v1 import table_pb2, table_pb2_grpc

log = logging.getLogger(__name__)

_BACKOFF_MIN_S, _BACKOFF_MAX_S = 0.02, 0.5
_MISSED_AFTER_S = 0.5
"""The stream and heartbeats' replies race. A stream so many seconds behind a reply is stuck."""


class TableWatch:
    """Follows the table. ``held`` returns (cluster id, table version), ``leader`` the address to
    ask, ``on_update`` takes each update. All three are called on the watch's thread.
    """

    def __init__(
        self,
        held: Callable[[], tuple[str, int]],
        leader: Callable[[], str],
        on_update: Callable[[table_pb2.TableUpdate], None],
        connect: Callable[[str], grpc.Channel],
    ) -> None:
        self._held = held
        self._leader = leader
        self._on_update = on_update
        self._connect = connect
        self._lock = threading.Lock()
        self._address = ""  # of the present or last stream
        self._call: Any = None
        self._version = 0  # the newest received, or held when the stream was opened
        self._came = False  # whether this stream has brought an update
        self._missed: tuple[int, float] | None = None  # (version, when a heartbeat brought it)
        self._wake = threading.Event()  # ends a backoff
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if not self._thread.ident:
            self._thread.start()

    def stop(self) -> None:
        """End the stream and the thread."""
        self._stopping = True
        self._restart()
        if self._thread.ident:
            self._thread.join(timeout=5.0)

    def heard_elsewhere(self, leader: str, version: int) -> None:
        """Note that the leader acknowledged a heartbeat, and that the node holds this version
        now.
        """
        if not self._thread.ident:
            return
        if leader != self._address:
            self._missed = None
            self._restart()
        elif version <= self._version:
            self._missed = None
        elif self._missed is None or self._version >= self._missed[0]:
            self._missed = (version, time.monotonic())
        elif time.monotonic() - self._missed[1] > _MISSED_AFTER_S:
            log.info("watch is stuck: opens anew coordinator=%s", self._address)
            self._missed = None
            self._restart()

    def _restart(self) -> None:
        with self._lock:
            self._wake.set()
            if self._call is not None:
                self._call.cancel()

    def _run(self) -> None:
        backoff_s = _BACKOFF_MIN_S
        while not self._stopping:
            self._wake.clear()
            self._came = False
            try:
                self._follow()
            except grpc.RpcError as error:
                log.debug("watch ended coordinator=%s error=%s", self._address, in_words(error))
            if self._came:
                backoff_s = _BACKOFF_MIN_S
            if not self._stopping:
                self._wake.wait(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(backoff_s * 2, _BACKOFF_MAX_S)

    def _follow(self) -> None:
        """Pass on the updates of one stream, until it ends."""
        self._address = self._leader()
        cluster_id, version = self._held()
        self._version = max(self._version, version)
        channel = self._connect(self._address)
        try:
            stub: Any = table_pb2_grpc.TableServiceStub(channel)
            request = table_pb2.GetTableRequest(cluster_id=cluster_id, known_version=version)
            with self._lock:
                if self._stopping:
                    return
                self._call = stub.WatchTable(request)
            for update in self._call:
                self._came = True
                self._version = max(self._version, update.table_version)
                self._on_update(update)
        finally:
            with self._lock:
                self._call = None
            channel.close()
