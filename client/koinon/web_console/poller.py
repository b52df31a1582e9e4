"""Polls the cluster once for all browsers, on one thread, and watches the table on another.

The first thread asks for the data of ``koinon top``, once a second while a browser is connected and
less often otherwise; every 15 seconds it also asks nodes for the sizes of partitions. The second
thread keeps a WatchTable stream open, so a change of the table is shown when it is applied, and no
version between two polls is missed. The threads share only their results with the event loop.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from koinon.driver.rpc.channels import Channels
from koinon.operate.admin import Admin
from koinon.operate.cluster_status import ClusterStatus
from koinon.operate.judge.dashboard import Observer, Overview, View
from koinon.operate.replicas import PartitionSize, Replicas
from koinon.web_console.live_state import moment_of
from koinon_proto.contract import convert
from koinon_proto.contract.errors import KoinonError
from koinon_proto.contract.table import Table, TableUpdate
from koinon_proto.server.rpc import in_words
from koinon_proto.v1 import table_pb2, table_pb2_grpc

log = logging.getLogger(__name__)
UNWATCHED_INTERVAL_S = 5.0
CPU_SHARE_MAX = 0.1
"""The greatest share of a core that polls may use: with many partitions there are fewer polls a
second.
"""
SIZES_INTERVAL_S = 15.0
NODE_TIMEOUT_S = 1.0
WATCH_PAUSE_S = 0.5
JOIN_S_MAX = 5.0


@dataclass(frozen=True, kw_only=True)
class Sink:
    """The receivers of the results; each is called on a thread of the poller. ``on_view`` also gets
    the moment that ``live_state.moment_of`` makes of the view.
    """

    on_view: Callable[[View, str], None]
    on_sizes: Callable[[dict[int, PartitionSize]], None]
    on_update: Callable[[TableUpdate], None]


class Poller:
    """The two threads; they run from ``start`` to ``stop``."""

    def __init__(self, admin: Admin, sink: Sink, interval_s: float) -> None:
        self._admin = admin
        self._sink = sink
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._watched = threading.Event()  # set while a browser is connected
        self._wake = threading.Event()  # ends the pause between two polls
        self._table: Table | None = None  # of the last poll; the watch begins from its version
        self._call: Any = None  # the open WatchTable stream
        self._channels = Channels()
        self._threads = [
            threading.Thread(target=self._poll_until_stopped, name="console-polls", daemon=True),
            threading.Thread(target=self._watch_until_stopped, name="console-table", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End both threads; returns after ``JOIN_S_MAX`` at the latest."""
        self._stopping.set()
        self._wake.set()
        if self._call is not None:
            self._call.cancel()
        for thread in self._threads:
            thread.join(JOIN_S_MAX)
        self._channels.close()

    def set_watched(self, watched: bool) -> None:
        """Set whether a browser is connected; when the first one connects, the next poll begins at
        once.
        """
        if watched and not self._watched.is_set():
            self._wake.set()
        (self._watched.set if watched else self._watched.clear)()

    # --- polls ------------------------------------------------------------------------------------

    def _poll_until_stopped(self) -> None:
        overview, sized_at = Overview(), -SIZES_INTERVAL_S
        with Observer(self._admin, timeout_s=NODE_TIMEOUT_S) as observer, Replicas() as nodes:
            while not self._stopping.is_set():
                self._wake.clear()
                began, used_s = time.monotonic(), time.thread_time()
                view = overview.update(observer.look())
                self._table = view.table or self._table
                self._sink.on_view(view, moment_of(view))
                if self._watched.is_set() and began - sized_at >= SIZES_INTERVAL_S:
                    sized_at = began
                    self._ask_sizes(nodes, view.status)
                pause_s = self._interval_s if self._watched.is_set() else UNWATCHED_INTERVAL_S
                pause_s = max(pause_s, (time.thread_time() - used_s) / CPU_SHARE_MAX)
                self._wake.wait(max(0.05, began + pause_s - time.monotonic()))

    def _ask_sizes(self, nodes: Replicas, status: ClusterStatus | None) -> None:
        table = status.table if status is not None else None
        if status is None or table is None or not table.bootstrapped:
            return
        used = [int(row.partition_id) for row in table.used_rows]
        with contextlib.suppress(KoinonError):  # without sizes the map lacks its colours by size
            self._sink.on_sizes(nodes.sizes(status, used))

    # --- changes of the table ---------------------------------------------------------------------

    def _watch_until_stopped(self) -> None:
        turn = 0
        while not self._stopping.wait(WATCH_PAUSE_S):
            table = self._table
            if table is None:
                continue
            turn += 1
            address = self._admin.addresses[turn % len(self._admin.addresses)]
            try:
                self._watch(address, table)
            except (grpc.RpcError, KoinonError) as error:
                reason = in_words(error) if isinstance(error, grpc.RpcError) else str(error)
                log.debug("table watch ended coordinator=%s error=%s", address, reason)

    def _watch(self, address: str, table: Table) -> None:
        """Pass on the updates of one WatchTable stream until it ends."""
        stub: Any = table_pb2_grpc.TableServiceStub(self._channels.channel(address))
        request = table_pb2.GetTableRequest(
            cluster_id=table.cluster.cluster_id, known_version=table.table_version
        )
        self._call = stub.WatchTable(request)
        if self._stopping.is_set():
            self._call.cancel()
        for update in self._call:
            self._sink.on_update(convert.update_from_proto(update))
