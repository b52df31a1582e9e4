"""Backups on real processes: each is one moment of the cluster, and comes back as it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from koinon.backup.backup_check import check_backup
from koinon.backup.backup_job import BackupJob, BackupProgress
from koinon.backup.cut_sessions import NodeCut
from koinon.backup.destination import Destination
from koinon.backup.manifest import NAME, BackupDamagedError, BackupError, Manifest
from koinon.client import Client
from koinon.local import LocalCluster, Setup
from koinon.operate.plans import PlanKind, PlanRequest
from koinon.spark.cluster import Cluster
from koinon_proto.contract.errors import KoinonError
from koinon_proto.contract.table import NodeStatus
from tests.integration.causal_writers import CausalWriters, faults_of
from tests.integration.copies import is_settled
from tests.kit.clusters import running_cluster
from tests.kit.threads import Beside
from tests.kit.waiting import wait_until

PARTITIONS = 32
BACKUPS = int(os.environ.get("KOINON_TEST_BACKUPS", "12"))
TIMEOUT_S = 90.0
APART_S = 0.04
Rows = dict[bytes, tuple[bytes, int | None]]


@pytest.fixture(scope="module")
def served() -> Iterator[LocalCluster]:
    flags = ["--partitions", str(PARTITIONS)]
    with running_cluster(
        coordinators=1, setup=Setup(replication_factor=2, coordinator_flags=flags)
    ) as cluster:
        yield cluster


@pytest.fixture
def place(tmp_path: Path) -> Destination:
    return Destination(str(tmp_path / "backups"))


def backed_up(cluster: LocalCluster, place: Destination, **options: Any) -> Manifest:
    with Cluster(cluster.coordinators, timeout_s=TIMEOUT_S) as asked:
        return BackupJob(cluster=asked, destination=place, wait_s=TIMEOUT_S, **options).run()


def rows_in(place: Destination, manifest: Manifest, keyspace: str = "default") -> Rows:
    """Return the rows of a backup as anybody reads them, without Koinon."""
    found: Rows = {}
    for part in manifest.keyspace(keyspace).files:
        table = pq.read_table(Path(place.text) / manifest.backup_id / part.path)
        for row in table.to_pylist():
            expires = row["expires_at"]
            ms = None if expires is None else round(expires.timestamp() * 1000)
            found[row["key"]] = row["value"], ms
    return found


def rows_of(client: Any) -> Rows:
    return {entry.key: (entry.value, entry.expires_at_ms) for entry in client.scan()}


def koinon(cluster: LocalCluster, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "koinon.cli", *arguments],
        env={**os.environ, "KOINON_COORDINATORS": cluster.coordinators},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(command: subprocess.Popen[str], code: int = 0) -> str:
    out, errors = command.communicate(timeout=TIMEOUT_S)
    assert command.returncode == code, errors
    return out + errors


# --- one moment ----------------------------------------------------------------------------------


@pytest.fixture
def staggered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the nodes hear of a cut one long after the other, as a slow network would."""
    make = NodeCut.make

    def make_late(part: NodeCut) -> Any:
        time.sleep(APART_S)
        return make(part)

    monkeypatch.setattr(NodeCut, "make", make_late)


@pytest.mark.usefixtures("staggered")
def test_backups_amid_writes_hold_all_that_was_acknowledged_before_what_they_hold(
    served: LocalCluster, place: Destination
) -> None:
    """Also while primaries change hands."""
    with served.admin() as admin, CausalWriters(served) as writers:
        for number in range(BACKUPS):
            before = list(writers.acknowledged)
            if number % 3 == 1:
                node = f"n{1 + number // 3 % 3}"
                request = PlanRequest(kind=PlanKind.DRAIN, node_id=node)
                admin.execute(request, admin.plan(request).plan_id)
            manifest = backed_up(served, place)
            rows = {key: value for key, (value, _) in rows_in(place, manifest).items()}
            assert faults_of(rows.items()) == []
            for writer, acknowledged in enumerate(before):
                if acknowledged:
                    assert b"chain/%d/%07d" % (writer, acknowledged) in rows
            if number % 3 == 1:
                admin.cancel_moves()
                admin.set_node_status(node, NodeStatus.ACTIVE)
    assert not writers.errors
    assert min(writers.acknowledged) > BACKUPS


class BatchWriter(Beside):
    """Writes the same number into two records of one partition, as one batch."""

    def __init__(self, client: Client) -> None:
        self.written = 0
        self._client = client
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._write)]

    def _write(self) -> None:
        within = self._client.keyspace("pairs")
        while not self._stop.is_set():
            self.written += 1
            for group in range(4):
                value = b"%d" % self.written
                head = b"g%d/" % group
                within.batch(head + b"a").put(head + b"a", value).put(head + b"b", value).commit()


def test_backup_amid_atomic_batches_holds_each_whole(
    served: LocalCluster, place: Destination
) -> None:
    with served.admin() as admin, served.client() as client:
        admin.keyspaces.create("pairs", partition_count=4, partitioner="murmur2(until:2f)")
        with BatchWriter(client) as writer:
            for _ in range(3):
                seen = writer.written
                wait_until(lambda seen=seen: writer.written > seen + 5)  # type: ignore[misc]
                manifest = backed_up(served, place, keyspaces=["pairs"])
                rows = rows_in(place, manifest, "pairs")
                for group in range(4):
                    assert rows[b"g%d/a" % group] == rows[b"g%d/b" % group]
        admin.keyspaces.drop("pairs")


# --- and back ------------------------------------------------------------------------------------


def test_backup_is_restored_into_other_partitions_with_all_rows_and_times(
    served: LocalCluster, place: Destination
) -> None:
    with served.client() as client:
        rows = {b"row/%05d" % n: b"value %d" % n * (n % 50) for n in range(5_000)}
        client.put_many(rows.items())
        client.put(b"lives", b"an hour", ttl_ms=3_600_000)
        client.put(b"gone", b"soon")
        client.delete(b"gone")
        before = rows_of(client)
        manifest = backed_up(served, place)
        assert rows_in(place, manifest) == before
        assert not check_backup(place, manifest, deep=True).faults
        client.delete_many(list(rows))
        told = ended(koinon(served, "restore", place.text), code=2)
        assert "has records" in told
        ended(
            koinon(
                *(served, "restore", place.text, "--keyspace", "default"),
                *("--as", "other", "--partitions", "7"),
            )
        )
        assert rows_of(client.keyspace("other")) == before
        assert client.table().keyspaces.named("other").partition_count == 7
        client.put(b"later", b"than the backup")
        ended(koinon(served, "restore", place.text, "--keyspace", "default", "--overwrite"))
        assert rows_of(client) == before


@pytest.mark.parametrize("damage", ["altered", "missing", "swapped", "manifest"])
def test_damaged_backup_is_found_and_nothing_of_it_is_restored(
    served: LocalCluster, place: Destination, damage: str
) -> None:
    with served.client() as client, served.admin() as admin:
        client.put_many([(b"row/%05d" % n, b"value %d" % n) for n in range(2_000)])
        manifest = backed_up(served, place)
        folder = Path(place.text) / manifest.backup_id
        first, second = (folder / part.path for part in manifest.files[:2])
        if damage == "altered":
            content = bytearray(first.read_bytes())
            content[len(content) // 2] ^= 1
            first.write_bytes(content)
        elif damage == "missing":
            first.unlink()
        elif damage == "swapped":
            whole_first = first.read_bytes()
            first.write_bytes(second.read_bytes())
            second.write_bytes(whole_first)
        else:
            whole = json.loads((folder / NAME).read_text())
            whole["backup"]["keyspaces"][0]["partitions"][0]["rows"] += 1
            (folder / NAME).write_text(json.dumps(whole))
        source = f"{place.text}/{manifest.backup_id}"
        if damage == "manifest":
            with pytest.raises(BackupDamagedError):
                place.manifest(manifest.backup_id)
        else:
            assert check_backup(place, manifest).faults
            ended(koinon(served, "backup", "verify", place.text, manifest.backup_id), code=1)
        ended(koinon(served, "restore", source, "--keyspace", "default", "--as", "lost"), code=3)
        assert admin.status().table.keyspaces.get("lost") is None  # type: ignore[union-attr]


# --- who dies ------------------------------------------------------------------------------------


def test_command_that_is_killed_holds_nothing_and_another_backup_succeeds(
    served: LocalCluster, place: Destination
) -> None:
    with served.client() as client:
        client.put_many([(b"big/%05d" % n, os.urandom(1_000)) for n in range(4_000)])
        command = koinon(served, "backup", "create", place.text, "--throttle", "200kB")
        wait_until(lambda: any(place.sizes(found.backup_id) for found in place.backups()))
        command.send_signal(signal.SIGKILL)
        command.communicate()
        client.put(b"after", b"the kill")
        assert [found.is_unfinished for found in place.backups()] == [True]
        manifest = backed_up(served, place)
        assert b"after" in rows_in(place, manifest)


def test_command_that_is_interrupted_leaves_nothing(
    served: LocalCluster, place: Destination
) -> None:
    with served.client() as client:
        client.put_many([(b"big/%05d" % n, os.urandom(1_000)) for n in range(4_000)])
    command = koinon(served, "backup", "create", place.text, "--throttle", "200kB")
    wait_until(lambda: bool(place.backups()))
    command.send_signal(signal.SIGINT)
    ended(command, code=130)
    assert place.backups() == []


def test_node_that_is_killed_ends_the_backup_and_the_next_one_succeeds(
    served: LocalCluster, place: Destination
) -> None:
    with served.client(timeout_ms=60_000) as client:
        client.put_many([(b"big/%05d" % n, os.urandom(1_000)) for n in range(4_000)])
        killed = threading.Event()

        def on_progress(progress: BackupProgress) -> None:
            if progress.rows and not killed.is_set():
                killed.set()
                served.kill("n2")

        with pytest.raises((BackupError, KoinonError)):
            backed_up(served, place, bytes_per_second=500_000, on_progress=on_progress)
        assert killed.is_set()
        assert place.backups() == []
        client.put(b"after", b"the kill")  # nothing is held
        served.restart("n2")
        served.wait_for(is_settled, timeout_s=TIMEOUT_S, what="all replicas are in sync")
        began = time.monotonic()
        manifest = backed_up(served, place)
        assert b"after" in rows_in(place, manifest), time.monotonic() - began
