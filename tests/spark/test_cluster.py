"""Spark and a cluster of real processes. Keys begin with the name of their test: the cluster is
shared.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from koinon.client import Client
from koinon.local import LocalCluster, Setup
from koinon.operate.loads_client import LoadsClient, LoadState
from koinon.spark import partition_id
from tests.kit.clusters import running_cluster
from tests.kit.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def write(df: DataFrame, cluster: LocalCluster, mode: str = "append", **options: str) -> None:
    given = {"coordinators": cluster.coordinators, **options}
    df.write.format("koinon").options(**given).mode(mode).save()


def read(spark: SparkSession, cluster: LocalCluster, **options: str) -> DataFrame:
    return spark.read.format("koinon").options(coordinators=cluster.coordinators, **options).load()


def numbered(spark: SparkSession, prefix: str, rows: int, partitions: int = 3) -> DataFrame:
    return spark.range(0, rows, numPartitions=partitions).selectExpr(
        f"concat('{prefix}:', lpad(id, 7, '0')) key", "concat('v', id) value"
    )


def expected(prefix: str, rows: int) -> dict[bytes, bytes]:
    return {f"{prefix}:{i:07}".encode(): f"v{i}".encode() for i in range(rows)}


def stored(client: Client, prefix: str) -> dict[bytes, bytes]:
    return {entry.key: entry.value for entry in client.scan(prefix=f"{prefix}:".encode())}


@pytest.fixture
def loads(cluster: LocalCluster) -> Iterator[LoadsClient]:
    with LoadsClient(cluster.coordinators) as connected:
        yield connected


def test_cluster_rows_are_written_and_read_back(
    spark: SparkSession, cluster: LocalCluster, client: Client
) -> None:
    write(numbered(spark, "trip", 20_000), cluster)
    rows = expected("trip", 20_000)
    assert stored(client, "trip") == rows
    back = read(spark, cluster, prefix="trip:", metadata="true")
    assert {bytes(r.key): bytes(r.value) for r in back.collect()} == rows
    assert back.where("_version > 0 and _expires_at is null").count() == 20_000
    assert back.where(back._partition_id != partition_id(back.key)).count() == 0
    assert read(spark, cluster, prefix="trip:", keysOnly="true").count() == 20_000


def test_cluster_keys_are_read_alone(spark: SparkSession, cluster: LocalCluster) -> None:
    write(numbered(spark, "alone", 1_000), cluster)
    some = read(spark, cluster, keys="alone:0000007,alone:nowhere")
    assert [bytes(row.value) for row in some.collect()] == [b"v7"]


def test_cluster_overwrite_of_a_prefix_replaces_it(
    spark: SparkSession, cluster: LocalCluster, client: Client
) -> None:
    client.put(b"other:kept", b"1")
    write(numbered(spark, "over", 3_000), cluster)
    write(numbered(spark, "over", 500), cluster, "overwrite", prefix="over:")
    assert stored(client, "over") == expected("over", 500)
    write(numbered(spark, "over", 0), cluster, "overwrite", prefix="over:")
    assert stored(client, "over") == {}
    assert client.get(b"other:kept") == b"1"


def test_cluster_duplicates_fail_and_leave_nothing_but_with_order_the_greatest_stays(
    spark: SparkSession, cluster: LocalCluster, client: Client, loads: LoadsClient
) -> None:
    df = spark.range(0, 9_000, numPartitions=3).selectExpr(
        "concat('twice:', id % 5000) k", "cast(id as string) v", "id at"
    )
    given = {"keyColumn": "k", "valueColumn": "v"}
    with pytest.raises(Exception, match="4000 rows have the key of another row, such as 'twice:"):
        write(df, cluster, **given)
    assert stored(client, "twice") == {}
    assert loads.loads()[-1].state is LoadState.ABORTED
    write(df, cluster, **given, orderBy="at")
    assert stored(client, "twice") == {
        b"twice:%d" % i: b"%d" % (i + 5_000 if i < 4_000 else i) for i in range(5_000)
    }


def test_cluster_rows_expire(spark: SparkSession, cluster: LocalCluster, client: Client) -> None:
    write(numbered(spark, "brief", 300), cluster, ttl="1h")
    entry = client.get_entry(b"brief:0000001")
    assert entry is not None
    assert entry.expires_at_ms is not None
    write(numbered(spark, "brief", 300), cluster, ttl="1ms")
    wait_until(lambda: not stored(client, "brief"))
    assert read(spark, cluster, prefix="brief:").count() == 0


def test_cluster_rows_expire_each_at_its_time_and_rows_delete_keys(
    spark: SparkSession, cluster: LocalCluster, client: Client
) -> None:
    write(numbered(spark, "mixed", 3_000), cluster)
    changes = spark.range(0, 4_000, numPartitions=3).selectExpr(
        "format_string('mixed:%07d', id) k",
        "if(id % 4 = 1, null, concat('new', id)) v",
        "id % 4 = 1 gone",
        "case id % 4 when 2 then timestamp '2100-01-01T00:00:00Z' "
        "when 3 then timestamp '2000-01-01T00:00:00Z' end lives",
    )
    options = {"keyColumn": "k", "valueColumn": "v"}
    write(changes, cluster, **options, deleteColumn="gone", ttlColumn="lives")
    kept = {b"mixed:%07d" % i: b"new%d" % i for i in range(4_000) if i % 4 in (0, 2)}
    assert stored(client, "mixed") == kept
    back = read(spark, cluster, prefix="mixed:", metadata="true")
    expiring = back.where("_expires_at = timestamp '2100-01-01T00:00:00Z'")
    assert {int(bytes(row.key)[-7:]) % 4 for row in expiring.collect()} == {2}
    assert back.where("_expires_at is null").count() == 1_000


@pytest.mark.long
def test_cluster_python_workers_killed_while_they_write_change_nothing(
    spark: SparkSession, cluster: LocalCluster, client: Client, loads: LoadsClient
) -> None:
    known = {load.load_id for load in loads.loads()}
    killed: list[int] = []

    def strike() -> None:
        wait_until(lambda: any(load.load_id not in known for load in loads.loads()), timeout_s=120)
        killed.extend(pid for pid in _python_workers() if _kill(pid))

    striking = threading.Thread(target=strike)
    striking.start()
    write(numbered(spark, "killed", 100_000, 4), cluster, memoryBytes="1MiB")
    striking.join()
    assert killed
    assert stored(client, "killed") == expected("killed", 100_000)


def test_cluster_node_killed_while_rows_are_written_loses_none(
    spark: SparkSession,
) -> None:
    with running_cluster(nodes=3, coordinators=1, setup=Setup(replication_factor=3)) as cluster:

        def strike() -> None:
            with LoadsClient(cluster.coordinators) as loads:
                wait_until(lambda: bool(loads.loads()), timeout_s=120)
            cluster.kill("n2")

        striking = threading.Thread(target=strike)
        striking.start()
        write(numbered(spark, "node", 60_000, 4), cluster, memoryBytes="1MiB")
        striking.join()
        with cluster.client() as client:
            assert stored(client, "node") == expected("node", 60_000)


def test_cluster_stream_batches_are_applied_once(
    spark: SparkSession, cluster: LocalCluster, client: Client, tmp_path: Path
) -> None:
    def run() -> None:
        stream = (
            spark.readStream.schema("key string, value string")
            .json(str(tmp_path / "source"))
            .writeStream.format("koinon")
            .option("coordinators", cluster.coordinators)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert stream.awaitTermination(200)

    (tmp_path / "source").mkdir()
    lines = [json.dumps({"key": f"stream:{i}", "value": f"v{i}"}) for i in range(100)]
    (tmp_path / "source" / "a.json").write_text("\n".join(lines))
    run()
    client.put(b"stream:5", b"written since")
    for path in (tmp_path / "checkpoint" / "commits").iterdir():
        path.unlink()  # as if Spark had been killed before it noted the batch
    run()
    rows = {f"stream:{i}".encode(): f"v{i}".encode() for i in range(100)}
    assert stored(client, "stream") == {**rows, b"stream:5": b"written since"}


def _python_workers() -> list[int]:
    """Return the processes that Spark's Python daemons have forked below this process."""
    parents: dict[int, int] = {}
    daemons = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if b"pyspark.daemon" in (path / "cmdline").read_bytes():
                daemons.add(int(path.name))
        except OSError:  # it has ended meanwhile
            continue
    return [pid for pid in daemons if parents.get(pid) in daemons and _is_ours(pid, parents)]


def _is_ours(pid: int, parents: dict[int, int]) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = parents.get(pid, 0)
    return False


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
