"""Drives one consistent cut on the nodes of a cluster, and reads the nodes' snapshots.

This module drives the protocol of docs/protocols.md (Backups). It opens a cut on every node that
leads a partition of the keyspaces, asks all nodes at once to hold their commits and to take a
snapshot, and releases them all once every node has its snapshot. An attempt that fails is repeated
with the newest table, until ``wait_s`` is over. A node keeps its snapshot while the stream that
opened the cut is open.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from koinon.backup.manifest import BackupError
from koinon.driver.request_ids import operation
from koinon.spark.cluster import Cluster
from koinon_proto.contract.cluster_errors import CutFailedError
from koinon_proto.contract.errors import (
    KoinonError,
    ResourceExhaustedError,
    UnavailableError,
    UnknownFateError,
)
from koinon_proto.contract.keyspaces import Keyspace
from koinon_proto.contract.table import NodeInfo, Table
from koinon_proto.server import rpc
from koinon_proto.v1 import backup_pb2, backup_pb2_grpc

OPEN_S_MAX = 15.0  # a node first empties its log into its store
MAKE_S_MAX = 2.0  # nodes hold their commits for less
_PAUSE_S, _PAUSE_S_MAX = 0.1, 1.0
_SAY_AFTER_S = 3.0


class NodeCut:
    """One node's part of a cut, from the opening of its stream until ``close``. Thread-safe."""

    def __init__(self, node: NodeInfo, channel: Any, request: backup_pb2.OpenCutRequest) -> None:
        self.node = node
        self._stub = backup_pb2_grpc.BackupStub(channel)
        self._cut = backup_pb2.CutRequest(cluster_id=request.cluster_id, cut=request.cut)
        self._stream = self._stub.OpenCut(request)
        self._first = threading.Event()  # set by the first event or by the end of the stream
        self._closed = False
        self.error: KoinonError | None = None  # the error that ended the stream
        self.grown_bytes = 0
        """The growth of the node's store file since its snapshot, in bytes."""
        self._reader = threading.Thread(target=self._attend, name="koinon-cut", daemon=True)
        self._reader.start()

    def wait_opened(self, timeout_s: float) -> None:
        """Wait until the node is ready to make the cut.

        Raises:
            UnavailableError: the node does not answer within ``timeout_s``.
            KoinonError: the node refuses the cut.
        """
        if not self._first.wait(timeout_s):
            raise UnavailableError(
                reason=f"node {self.node.node_id} did not open the cut within {timeout_s:g} s"
            )
        self.check()

    def check(self) -> None:
        """Raise the error that ended the stream, if the stream has ended."""
        if self.error is not None:
            raise self.error

    def make(self) -> Any:
        """Ask the node to hold its commits and to take its snapshot; return the call's future."""
        return self._stub.MakeCut.future(self._cut, timeout=MAKE_S_MAX)

    def release(self) -> Any:
        """Ask the node to complete the commits that it holds; return the call's future."""
        return self._stub.ReleaseCut.future(self._cut, timeout=MAKE_S_MAX)

    def pages(self, partition_id: int) -> Iterator[bytes]:
        """Yield the pages of a partition.

        Raises:
            KoinonError: the node has lost the snapshot, or no longer answers.
        """
        request = backup_pb2.ReadCutRequest(
            cluster_id=self._cut.cluster_id, cut=self._cut.cut, partition_id=partition_id
        )
        call = self._stub.ReadCut(request)
        try:
            for page in call:
                yield page.columns
        except grpc.RpcError as failure:
            self.check()
            error = rpc.fate_of(failure, at=self.node.node_id, unimplemented="backups")
            if isinstance(error, UnknownFateError):
                error = BackupError(
                    reason=f"node {self.node.node_id} is gone, and its part of the cut is lost "
                    f"({error.reason}): start the backup again"
                )
            raise error from failure
        finally:
            call.cancel()

    def close(self) -> None:
        """Close the stream, so that the node drops its snapshot."""
        self._closed = True
        self._stream.cancel()
        self._reader.join()

    def _attend(self) -> None:
        try:
            for event in self._stream:
                self.grown_bytes = event.grown_bytes
                self._first.set()
            error: KoinonError = UnavailableError(
                reason=f"node {self.node.node_id} ended the stream of the cut"
            )
        except grpc.RpcError as failure:
            error = rpc.fate_of(failure, at=self.node.node_id, unimplemented="backups")
            if isinstance(error, UnknownFateError):
                error = UnavailableError(reason=f"node {self.node.node_id}: {error.reason}")
        if not self._closed:
            self.error = error
        self._first.set()


@dataclass(frozen=True, kw_only=True)
class MadeCut:
    """A consistent cut. ``owners`` maps each partition to its node's part of the cut, ``sequences``
    each partition to the last sequence in that node's snapshot. ``held_ms``: the longest time that
    a node held commits. ``cut_ms``: Unix time of this machine just after the cut.
    """

    table: Table
    keyspaces: Sequence[Keyspace]
    owners: Mapping[int, NodeCut]
    sequences: Mapping[int, int]
    held_ms: int
    cut_ms: int

    @property
    def nodes(self) -> list[NodeCut]:
        return list({id(part): part for part in self.owners.values()}.values())

    @property
    def grown_bytes(self) -> int:
        """The growth of all nodes' store files since the cut, in bytes."""
        return sum(part.grown_bytes for part in self.nodes)


@contextlib.contextmanager
def consistent_cut(
    cluster: Cluster,
    names: Sequence[str],
    *,
    wait_s: float,
    say: Callable[[str], None] = lambda _text: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[MadeCut]:
    """Make a consistent cut over all partitions of these keyspaces (none named: of all keyspaces).
    A context; the nodes keep their snapshots until it ends.

    Args:
        wait_s: for how long a cut that fails is retried, in seconds.
        say: receives one message when the cut takes longer than three seconds.
        stopped: asked between attempts; once it returns True, KeyboardInterrupt is raised.

    Raises:
        UnknownKeyspaceError: a keyspace does not exist.
        PermissionDeniedError: the caller may not make backups.
        ResourceExhaustedError: another backup is running.
        UnavailableError: every attempt within ``wait_s`` failed; the text names the last cause.
    """
    began, pause_s, said = time.monotonic(), _PAUSE_S, False
    while True:
        with contextlib.ExitStack() as opened:
            try:
                with operation():
                    made = _attempt(cluster, names, opened)
            except KoinonError as error:
                failure = error
            else:
                yield made
                return
        if not _may_pass(failure):
            raise failure
        now = time.monotonic()
        if now - began > wait_s:
            reason = f"no consistent cut within {wait_s:g} s; the last attempt failed: {failure}"
            raise UnavailableError(reason=reason) from failure
        if not said and now - began > _SAY_AFTER_S:
            said = True
            say(f"no consistent cut yet, retrying: {failure}")
        if stopped():
            raise KeyboardInterrupt
        time.sleep(pause_s)
        pause_s = min(_PAUSE_S_MAX, 1.5 * pause_s)


def _may_pass(error: KoinonError) -> bool:
    """Return whether another attempt may succeed soon. A backup that is already running is not
    waited for.
    """
    if isinstance(error, ResourceExhaustedError) and error.limit == 1:
        return False
    return error.retriable or error.stale_table or error.maybe_applied


def newest_table(cluster: Cluster) -> Table:
    """Ask the cluster for its table; return the newest table known afterwards."""
    error = cluster.refresh(cluster.routing().revision)
    if error is not None:
        raise UnavailableError(reason=f"no coordinator sent the newest table: {error}") from error
    return cluster.routing().table


def chosen_keyspaces(table: Table, names: Sequence[str]) -> list[Keyspace]:
    """Return the keyspaces with these names, or all live keyspaces if none is named."""
    return [table.keyspaces.named(name) for name in dict.fromkeys(names)] or list(table.keyspaces)


def _attempt(cluster: Cluster, names: Sequence[str], opened: contextlib.ExitStack) -> MadeCut:
    """Try once to make a cut; ``opened`` gets the streams that are to be closed after it."""
    table = newest_table(cluster)
    keyspaces = chosen_keyspaces(table, names)
    request = backup_pb2.OpenCutRequest(
        cluster_id=table.cluster.cluster_id,
        table_version=table.table_version,
        cut=secrets.randbits(63) + 1,
        keyspace_ids=[keyspace.keyspace_id for keyspace in keyspaces],
    )
    parts = []
    for node in _leaders(table, keyspaces):
        part = NodeCut(node, cluster.channel(node.address), request)
        opened.callback(part.close)
        parts.append(part)
    for part in parts:
        part.wait_opened(OPEN_S_MAX)
    owners, sequences, held_ms = _make_all(parts, keyspaces)
    cut_ms = time.time_ns() // 1_000_000
    # A keyspace created meanwhile is not in the cut, although it may hold writes that are older
    # than writes of the cut.
    now = chosen_keyspaces(newest_table(cluster), names)
    if {k.keyspace_id for k in now} != {k.keyspace_id for k in keyspaces}:
        raise CutFailedError(node_id="*", reason="a keyspace was created or dropped during the cut")
    return MadeCut(
        table=table,
        keyspaces=keyspaces,
        owners=owners,
        sequences=sequences,
        held_ms=held_ms,
        cut_ms=cut_ms,
    )


def _leaders(table: Table, keyspaces: Sequence[Keyspace]) -> list[NodeInfo]:
    """Return the nodes that lead a partition of the keyspaces.

    Raises:
        CutFailedError: a partition has no primary.
    """
    found: dict[int, NodeInfo] = {}
    for keyspace in keyspaces:
        for partition_id in keyspace.partition_ids:
            node = table.primary_of(partition_id)
            if node is None:
                raise CutFailedError(node_id="*", reason=f"partition {partition_id} is offline")
            found[int(node.number)] = node
    return list(found.values())


def _make_all(
    parts: Sequence[NodeCut], keyspaces: Sequence[Keyspace]
) -> tuple[dict[int, NodeCut], dict[int, int], int]:
    """Have all nodes make the cut, and release them as soon as all have answered. Return the owner
    and the sequence of each partition, and the longest time that a node held commits, in
    milliseconds.

    Raises:
        CutFailedError, KoinonError: the snapshots are no consistent cut. All nodes are released, or
            release themselves after their time limit.
    """
    calls = [(part, part.make()) for part in parts]
    made, errors = _answers(calls)
    # Released at once and in any case: clients wait for the held commits.
    released, late = _answers([(part, part.release()) for part, _ in made])
    if errors or late:
        raise (errors or late)[0]
    owners: dict[int, NodeCut] = {}
    sequences: dict[int, int] = {}
    for part, point in made:
        for partition_id, sequence in zip(point.partition_ids, point.sequences, strict=True):
            if partition_id in owners:
                reason = f"partition {partition_id} changed its primary during the cut"
                raise CutFailedError(node_id=part.node.node_id, reason=reason)
            owners[partition_id], sequences[partition_id] = part, sequence
    for keyspace in keyspaces:
        for partition_id in keyspace.partition_ids:
            if partition_id not in owners:
                reason = f"partition {partition_id} was served by no node during the cut"
                raise CutFailedError(node_id="*", reason=reason)
    return owners, sequences, max((reply.held_ms for _, reply in released), default=0)


def _answers(
    calls: Sequence[tuple[NodeCut, Any]],
) -> tuple[list[tuple[NodeCut, Any]], list[KoinonError]]:
    """Wait for the calls; return the answers, and the errors of the calls that failed."""
    found: list[tuple[NodeCut, Any]] = []
    errors: list[KoinonError] = []
    for part, call in calls:
        try:
            found.append((part, call.result()))
        except grpc.RpcError as failure:
            said = rpc.error_of(failure) or part.error  # the stream's own error may say less
            errors.append(
                said or rpc.fate_of(failure, at=part.node.node_id, unimplemented="backups")
            )
    return found, errors
