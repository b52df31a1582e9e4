"""A blocking view of the cluster for a Spark task: the table, channels to its nodes, and retries.

All requests of bulk loads and bulk reads may be repeated without harm, so a request of unknown fate
is repeated. Any number of threads may share one ``Cluster``.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import grpc

from koinon.client import Client, connect
from koinon.core.retry import RetryAfter, RetryPolicy, final_error
from koinon.core.routing import Router, Routing
from koinon.core.target import DEFAULT_OPENED, OpenedKeyspace, Target, target_of
from koinon.driver.request_ids import operation
from koinon.driver.rpc.channels import Channels
from koinon.driver.rpc.reachability import why_unreachable
from koinon.driver.table_requests import TableRequests
from koinon.operate.coordinators import Coordinators
from koinon.operate.loads_client import LoadsClient
from koinon.options import parse_addresses
from koinon.spark.options import ClusterOptions
from koinon_proto.contract.errors import (
    KoinonError,
    TableBehindError,
    UnavailableError,
    UnknownFateError,
    UnknownKeyspaceError,
)
from koinon_proto.contract.keyspaces import DEFAULT
from koinon_proto.security.transport import Dialing
from koinon_proto.server import rpc
from koinon_proto.v1 import loads_pb2, loads_pb2_grpc, table_pb2_grpc

log = logging.getLogger(__name__)

ASK_S = 2.0
SILENT_S = 5.0
"""Coordinators that have not answered for this long are logged; retries continue."""
CALL_S = 30.0
"""The timeout of one call to a node; then the call is repeated, there or at the new owner."""
_STAGE = "/koinon.v1.Bulk/Stage"


class Cluster(Channels):
    """Knows the partitions' primaries, and calls nodes. For work in one keyspace."""

    def __init__(
        self,
        coordinators: str,
        *,
        timeout_s: float,
        dialing: Dialing | None = None,
        keyspace: OpenedKeyspace = DEFAULT_OPENED,
    ) -> None:
        """``timeout_s``: how long one step is retried while it is not served. ``keyspace``: by
        default ``default``.

        Raises:
            ConfigurationError: no address is given, or one is not host:port.
        """
        super().__init__(dialing)
        self.timeout_s = timeout_s
        self.keyspace = keyspace
        self._coordinators = coordinators
        self._router = Router()
        self._router.wanted_version = self.keyspace.table_version
        self._source = TableRequests(parse_addresses(coordinators), self._router)
        self._lock = threading.Lock()  # of the router's changes
        self._refreshing = threading.Lock()  # held by the one thread that asks for the table

    # --- the table ------------------------------------------------------------------------------

    def routing(self) -> Routing:
        """Return the routing as far as it is known; the first call asks for the table. The table is
        not older than the keyspace.

        Raises:
            ClusterNotReadyError: the cluster still waits for its first nodes when the time is over.
            UnavailableError: no address answered in time; the text names the option.
        """
        routing = self._router.routing
        if routing is None or self._is_behind(routing):
            routing = self._first_routing()
        return routing

    def target(self) -> Target:
        """Return the keyspace of the work.

        Raises:
            UnknownKeyspaceError: it has been dropped.
            ConfigurationError, PartitionerMismatchError: this build places its keys otherwise.
            KoinonError: as ``routing``.
        """
        return target_of(self.keyspace, self.routing())

    def _is_behind(self, routing: Routing) -> bool:
        return routing.table.table_version < self.keyspace.table_version

    def _first_routing(self) -> Routing:
        retries, told_at = Retries(self), time.monotonic() + SILENT_S
        while (routing := self._router.routing) is None or self._is_behind(routing):
            error = self.refresh(self._router.revision)
            if error is None and self._router.table_version < self._router.wanted_version:
                error = TableBehindError(
                    table_version=self._router.table_version,
                    required_version=self._router.wanted_version,
                )
            if error is None:
                continue
            try:
                retries.after([error], refresh=False, told=self._why)
            except UnavailableError as over:
                reason = f"option coordinators: {self._coordinators}: {over.reason}"
                raise UnavailableError(reason=reason) from None
            if time.monotonic() > told_at:
                told_at = math.inf
                log.warning(
                    "coordinators do not answer: still retrying coordinators=%s for_s=%g error=%s",
                    self._coordinators,
                    self.timeout_s,
                    self._why(error),
                )
        return routing

    def _why(self, error: KoinonError) -> KoinonError:
        """Return the reason why no coordinator sent the table; gRPC only reports failed
        connections. A thread of its own finds out, since the caller's may have an event loop, as in
        a notebook.
        """
        if not isinstance(error, UnknownFateError):
            return as_read(error)
        looking = why_unreachable(self._source.addresses(), self._dialing)
        with ThreadPoolExecutor(1) as one:
            return one.submit(asyncio.run, looking).result()

    def learn(self, errors: Sequence[KoinonError]) -> None:
        """Apply the primaries that refusals name."""
        with self._lock:
            self._router.learn(errors)

    def refresh(self, revision: int) -> KoinonError | None:
        """Ask for the table, unless another thread has updated it since ``revision``; return the
        last error if no address had a newer one.
        """
        with self._refreshing:
            if self._router.revision > revision:
                return None
            error: KoinonError | None = None
            for address in self._source.addresses():
                error = self._ask_table(address)
                if error is None and self._router.table_version >= self._router.wanted_version:
                    return None
            return error

    def _ask_table(self, address: str) -> KoinonError | None:
        stub = table_pb2_grpc.TableServiceStub(self.channel(address))
        reply = self._called(address, stub.GetTable, self._source.request(), ASK_S)
        if isinstance(reply, KoinonError):
            return reply
        with self._lock:
            return self._source.apply_reply(reply)

    # --- calls ----------------------------------------------------------------------------------

    def bulk(self, address: str, method: str, request: Any) -> Any:
        """Call a method of a node's Bulk service; return the reply or the error, never raise it. A
        call without an answer ends as UnknownFateError.
        """
        stub = loads_pb2_grpc.BulkStub(self.channel(address))
        return self._called(address, getattr(stub, method), request, CALL_S)

    def stage(self, address: str, request: bytes) -> loads_pb2.StageResponse | KoinonError:
        """Call Bulk.Stage with an encoded StageRequest, as ``bulk`` does."""
        method: Any = self.channel(address).unary_unary(
            _STAGE, response_deserializer=loads_pb2.StageResponse.FromString
        )
        reply: loads_pb2.StageResponse | KoinonError
        reply = self._called(address, method, request, CALL_S)
        return reply

    @staticmethod
    def _called(address: str, method: Any, request: Any, timeout_s: float) -> Any:
        with operation() as named:
            try:
                return method(request, timeout=timeout_s)
            except grpc.RpcError as failure:
                error = rpc.fate_of(failure, at=address, unimplemented="bulk loads and reads")
            except ValueError:  # the channel was closed meanwhile
                error = UnavailableError(reason=f"{address}: the connection was closed")
            named.name(error)
            return error


def as_read(error: KoinonError) -> KoinonError:
    """Return an error of unknown fate as one of a read, which may be repeated without harm."""
    return final_error(error, write=False, maybe_applied=False)


class Retries:
    """The retries of one step, within the cluster's timeout. ``progress`` starts the time anew."""

    def __init__(self, cluster: Cluster, stopped: threading.Event | None = None) -> None:
        self._cluster = cluster
        self._stopped = stopped or threading.Event()
        self._policy = RetryPolicy()
        self.progress()

    def progress(self) -> None:
        self._attempt = 0  # failed attempts since the last progress
        self._since = time.monotonic()  # time of the last progress

    def after(
        self,
        errors: Sequence[KoinonError],
        *,
        revision: int = 0,
        refresh: bool = True,
        told: Callable[[KoinonError], KoinonError] = as_read,
    ) -> None:
        """Wait before the step is retried after these errors, all of one attempt that was routed by
        ``revision``; fetch the table if an error asks for it. ``told`` converts the error that is
        named when the time is over.

        Raises:
            KoinonError: one of the errors is final.
            UnavailableError: the time is over, or the step was stopped.
        """
        self._cluster.learn(errors)
        waits = [self._again(error) for error in errors]
        self._attempt += 1
        if time.monotonic() - self._since > self._cluster.timeout_s:
            raise UnavailableError(
                reason=f"not served within {self._cluster.timeout_s:g} s (option timeout): "
                f"{told(errors[0])}"
            ) from as_read(errors[0])
        if self._stopped.wait(max(again.delay_s for again in waits)):
            raise UnavailableError(reason="stopped: another part of the task has failed")
        if refresh and any(again.refresh for again in waits):
            self._cluster.refresh(revision)

    def _again(self, error: KoinonError) -> RetryAfter:
        again = self._policy.decide(error, attempt=self._attempt, idempotent=True)
        if again is None:
            raise named(error, self._cluster.keyspace)
        return again


def named(error: KoinonError, keyspace: OpenedKeyspace) -> KoinonError:
    """Return the error; add the keyspace's name if it is unknown to the servers, which know only
    ids.
    """
    if isinstance(error, UnknownKeyspaceError) and not error.keyspace:
        return UnknownKeyspaceError(keyspace=keyspace.name)
    return error


def cluster_of(options: ClusterOptions) -> Cluster:
    """Return the cluster that the options name, for work in their opened keyspace."""
    return Cluster(
        options.coordinators,
        timeout_s=options.timeout_s,
        dialing=options.dialing(),
        keyspace=options.opened,
    )


Given = TypeVar("Given", bound=ClusterOptions)


def opened(options: Given) -> Given:
    """Look up the options' keyspace by its name; return the options with it. This is done once,
    when a job is planned: a keyspace that is dropped and created anew later is a different one.

    Raises:
        UnknownKeyspaceError: there is no keyspace of this name.
        UnavailableError: no address answered.
    """
    if options.keyspace in ("", DEFAULT):
        return options
    with _connected(options) as client:
        table = client.table()
    found = table.keyspaces.named(options.keyspace)
    known = OpenedKeyspace(found.keyspace_id, found.name, table.table_version)
    return replace(options, opened=known)


@contextmanager
def client_of(options: ClusterOptions) -> Iterator[Client]:
    """Yield a client for the keyspace that the options opened.

    Raises:
        UnknownKeyspaceError: it has been dropped, even if a new keyspace has its name.
        UnavailableError: no address answered.
    """
    with _connected(options) as client:
        # The client has opened the keyspace that had this name at that time: this one, or an
        # earlier one that is dropped and refuses every operation.
        found = client.table().keyspaces.get(options.opened.name)
        if found is None or found.keyspace_id != options.opened.keyspace_id:
            raise UnknownKeyspaceError(keyspace=options.opened.name)
        yield client


def _connected(options: ClusterOptions) -> Client:
    return connect(
        options.coordinators,
        timeout_ms=int(options.timeout_s * 1000),
        keyspace=options.keyspace,
        tls_bundle=options.tls_bundle,
        token_file=options.token_file,
    )


def loads_of(options: ClusterOptions, timeout_s: float) -> LoadsClient:
    """Return a client for bulk loads of the options' cluster."""
    return LoadsClient(
        Coordinators(options.coordinators, dialing=options.dialing()), timeout_s=timeout_s
    )
