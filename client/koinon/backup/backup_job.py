"""Makes a backup: takes one consistent cut, reads it partition by partition, and writes files.

This process writes the files of several partitions at once, and holds one row group of each in
memory. It writes the manifest last. If anything fails, it deletes the files of the backup, and the
nodes drop their snapshots.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime

from koinon.backup.cut_sessions import MadeCut, NodeCut, consistent_cut
from koinon.backup.destination import Destination, HashedFile
from koinon.backup.manifest import KeyspacePart, Manifest, PartitionPart
from koinon.backup.parquet_rows import PartitionWriter, batch_of, bytes_of
from koinon.spark.cluster import Cluster
from koinon.spark.writing.chunk_sender import Pace
from koinon_proto.contract.keyspaces import Keyspace

STREAMS_PER_NODE = 2
STREAMS_MAX = 8
LOOK_EVERY_S = 0.2


@dataclass(kw_only=True)
class BackupProgress:
    """Counts of a running backup: partitions, rows, and bytes of keys and values. Several threads
    write it under ``lock``.
    """

    partitions_total: int = 0
    partitions: int = 0
    rows: int = 0
    bytes: int = 0
    grown_bytes: int = 0
    """The growth of all nodes' store files since the cut, in bytes."""
    lock: threading.Lock = field(default_factory=threading.Lock)


class _StoppedError(Exception):
    """Ends a thread after another thread of the backup failed."""


@dataclass(kw_only=True)
class BackupJob:
    """One backup of these keyspaces (none: of all) to a destination.

    Attributes:
        bytes_per_second: the limit on keys and values read from all nodes together; 0: no limit.
        wait_s: for how long a cut that fails is retried, in seconds.
        made_by: the name of this program, for the manifest.
        on_progress: called several times a second.
        say: receives messages for the operator.
        stopped: asked several times a second; once it returns True, KeyboardInterrupt is raised.
    """

    cluster: Cluster
    destination: Destination
    keyspaces: Sequence[str] = ()
    bytes_per_second: int = 0
    wait_s: float = 60.0
    made_by: str = ""
    on_progress: Callable[[BackupProgress], None] = lambda _progress: None
    say: Callable[[str], None] = lambda _text: None
    stopped: Callable[[], bool] = lambda: False
    progress: BackupProgress = field(default_factory=BackupProgress)

    def __post_init__(self) -> None:
        self._ended = threading.Event()  # tells the reading threads to stop
        self._pace = Pace(self.bytes_per_second)
        self._pace_lock = threading.Lock()

    def run(self) -> Manifest:
        """Make the backup; return its manifest.

        Raises:
            BackupError: the destination cannot be written, or a node lost its snapshot.
            KoinonError: any error of ``consistent_cut`` or of a node. No backup is left behind.
        """
        began_ms = time.time_ns() // 1_000_000
        backup_id = new_backup_id(began_ms / 1000)
        with consistent_cut(
            self.cluster, self.keyspaces, wait_s=self.wait_s, say=self.say, stopped=self.stopped
        ) as cut:
            self.progress.partitions_total = len(cut.owners)
            try:
                parts = self._write_all(cut, backup_id)
                manifest = self._manifest(cut, backup_id, began_ms, parts)
                self.destination.finish(manifest)
            except BaseException:
                # the original error says more than a failure to clean up
                with contextlib.suppress(Exception):
                    self.destination.delete(backup_id)
                raise
        return manifest

    def _manifest(
        self, cut: MadeCut, backup_id: str, began_ms: int, parts: dict[int, PartitionPart]
    ) -> Manifest:
        return Manifest(
            backup_id=backup_id,
            cluster_id=cut.table.cluster.cluster_id,
            made_by=self.made_by,
            table_version=cut.table.table_version,
            began_ms=began_ms,
            cut_ms=cut.cut_ms,
            ended_ms=time.time_ns() // 1_000_000,
            held_ms=cut.held_ms,
            keyspaces=tuple(
                KeyspacePart(
                    settings=keyspace,
                    partitions=tuple(parts[p] for p in keyspace.partition_ids),
                )
                for keyspace in cut.keyspaces
            ),
        )

    def _write_all(self, cut: MadeCut, backup_id: str) -> dict[int, PartitionPart]:
        workers = min(STREAMS_MAX, STREAMS_PER_NODE * len(cut.nodes))
        pool = ThreadPoolExecutor(workers, thread_name_prefix="koinon-backup")
        try:
            calls = {
                pool.submit(self._write, cut, keyspace, partition_id, backup_id): partition_id
                for keyspace, partition_id in _interleaved(cut)
            }
            self._watch(cut, set(calls))
            return {partition_id: call.result() for call, partition_id in calls.items()}
        finally:
            self._ended.set()
            pool.shutdown(cancel_futures=True)

    def _watch(self, cut: MadeCut, calls: set[Future[PartitionPart]]) -> None:
        """Wait for the calls; raise the first error of a call or of a node."""
        while True:
            done, pending = wait(calls, LOOK_EVERY_S, FIRST_EXCEPTION)
            for call in done:
                error = call.exception()
                if error is not None and not isinstance(error, _StoppedError):
                    raise error
            for node in cut.nodes:
                node.check()
            self.progress.grown_bytes = cut.grown_bytes
            self.on_progress(self.progress)
            if not pending:
                return
            if self.stopped():
                raise KeyboardInterrupt

    def _write(
        self, cut: MadeCut, keyspace: Keyspace, partition_id: int, backup_id: str
    ) -> PartitionPart:
        """Read one partition from its node, and write its files."""

        def open_file(number: int) -> tuple[str, HashedFile]:
            path = f"{keyspace.name}/{partition_id:05d}-{number}.parquet"
            return path, self.destination.write(f"{backup_id}/{path}")

        writer = PartitionWriter(open_file)
        try:
            for page in self._pages(cut.owners[partition_id], partition_id):
                batch = batch_of(page)
                writer.add(batch)
                with self.progress.lock:
                    self.progress.rows += len(batch)
                    self.progress.bytes += bytes_of(batch)
            files = writer.close()
        except BaseException:
            # the original error says more than a failure to clean up
            with contextlib.suppress(OSError):
                writer.abort()
            raise
        with self.progress.lock:
            self.progress.partitions += 1
        return PartitionPart(
            partition_id=partition_id,
            sequence=cut.sequences[partition_id],
            rows=writer.digest.rows,
            bytes=writer.bytes,
            digest=writer.digest.value(),
            files=files,
        )

    def _pages(self, node: NodeCut, partition_id: int) -> Iterator[bytes]:
        """Yield the pages of a partition, at the pace of the whole backup."""
        for page in node.pages(partition_id):
            with self._pace_lock:
                delay_s = self._pace.delay_s(len(page))
            if self._ended.wait(delay_s) if delay_s else self._ended.is_set():
                raise _StoppedError
            yield page


def new_backup_id(now_s: float) -> str:
    """Return a new backup id; ids sort by ``now_s`` (Unix seconds)."""
    return f"{datetime.fromtimestamp(now_s, UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"


def _interleaved(cut: MadeCut) -> list[tuple[Keyspace, int]]:
    """Return all partitions, ordered so that successive partitions lie on different nodes: all
    nodes are read at the same time.
    """
    by_node: dict[int, list[tuple[Keyspace, int]]] = {}
    for keyspace in cut.keyspaces:
        for partition_id in keyspace.partition_ids:
            owner = id(cut.owners[partition_id])
            by_node.setdefault(owner, []).append((keyspace, partition_id))
    longest = max(map(len, by_node.values()), default=0)
    return [
        of_node[at] for at in range(longest) for of_node in by_node.values() if at < len(of_node)
    ]
