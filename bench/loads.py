"""Benchmarks of a TPC-H table loaded by Spark into Koinon and into Redis, and read back, in one
run.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from bench.figures import Aim, Figure
from bench.measuring import latencies, steady_clients
from bench.peers import servers
from koinon.local import LocalCluster, Setup

NODES = 3
READS = 5
REDIS_ROWS, REDIS_IN_FLIGHT = 1_000, 4
CLIENTS_ALONE_S = 5.0
TREE = Path(__file__).resolve().parents[1]
WHOLE, FROM_FIRST = "whole job", "from the first lot to merged"
AIMS = (
    Aim(WHOLE, "second job", 5.0, ("Redis Cluster, pipelines", "second job")),
    Aim(WHOLE, "second job", 0.8, ("one Redis, Arrow and MSET", "second job")),
)


def measure(
    *,
    table: str = "orders",
    rows: int = 1_500_000,
    copies: int = 1,
    encoding: str = "json",
    clients: bool = False,
    redis: bool = True,
) -> Iterator[Figure]:
    """Measure a bulk load of a table as `koinon ingest` does it, reading back, and Redis.

    Redis has two jobs: pipelines of the cluster's client within ``foreachPartition``, as users
    write it, and the fastest that we could write, Arrow batches as MSETs into one server; both with
    an append-only file that is synced every second. Java compiles frequent code only while it runs,
    so the job is measured twice in one Spark. ``clients`` adds latencies of single operations
    beside the load.
    """
    from demo.tpch import LINEITEM, ORDERS, make_table
    from koinon.ingest.session import spark_session
    from koinon.ingest.settings import Settings

    source = {one.name: one for one in (ORDERS, LINEITEM)}[table]
    os.environ["PYTHONPATH"] = f"{TREE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"

    def settings(coordinators: str) -> Settings:
        key = ",".join(source.key)
        return Settings(coordinators=coordinators, key=key, value=None, encoding=encoding)

    with tempfile.TemporaryDirectory(prefix="koinon-bench-") as scratch, spark_session() as spark:
        file = make_table(Path(scratch), source, rows)
        frame = spark.read.parquet(str(file))
        count = frame.count()
        for column, some in (("warm-up", frame.limit(1_000)), ("first job", frame),
                             ("second job", frame)):  # fmt: skip
            warm = column == "warm-up"
            with LocalCluster(
                nodes=NODES, coordinators=1, setup=Setup(replication_factor=copies)
            ) as cluster:
                total, path = (some.count(), None) if warm else (count, file)
                job = _load(some, settings(cluster.coordinators), total, path)
                figures = [*job, *_read_back(spark, cluster.coordinators, total)]
                if not warm:
                    yield from (f._replace(column=column) for f in figures)
        if clients:
            yield from _beside_clients(frame, settings, count, file)
        if redis and not servers.missing("redis"):
            key = f"concat_ws(':', {', '.join(source.key)})"
            value = "to_json(struct(*))"
            yield from _redis(
                frame.selectExpr(f"cast({key} as binary) k", f"cast({value} as binary) v"), count
            )


# --- Koinon --------------------------------------------------------------------------------------


def _load(frame: Any, settings: Any, rows: int, file: Path | None) -> Iterator[Figure]:
    """Load as ``koinon ingest`` does; tasks read ``file`` themselves, if given."""
    from koinon.ingest.job import Job
    from koinon.ingest.opened_rows import open_rows
    from koinon.ingest.progress import Phase
    from koinon.operate.loads_client import LoadsClient

    parts = None
    if file is not None:
        spark, paths = frame.sparkSession, [str(file)]
        parts = open_rows(spark, paths, "parquet", settings, conf={}, keep_malformed=False).parts
    with LoadsClient(settings.coordinators) as loads:
        job = Job(frame=frame, settings=settings, loads=loads, rows_total=rows, parts=parts)
        outcome = job.run(lambda _: None)
    if outcome.error is not None:
        raise outcome.error
    assert outcome.rows == rows, f"{outcome.rows} of {rows} rows were loaded"
    phases = (Phase.STARTING, Phase.STAGING, Phase.PREPARING, Phase.MERGING)
    spent = {phase: outcome.seconds.get(phase, 0.0) for phase in phases}
    for phase, seconds in spent.items():
        yield Figure(f"seconds: {phase.name.lower()}", "", seconds, "s")
    whole = sum(spent.values())
    yield Figure(WHOLE, "", rows / whole, "rows/s")
    yield Figure(FROM_FIRST, "", rows / (whole - spent[Phase.STARTING]), "rows/s")


def _read_back(spark: Any, coordinators: str, rows: int) -> Iterator[Figure]:
    """Read and count all rows without keeping them."""
    frame = spark.read.format("koinon").option("coordinators", coordinators).load()
    for _ in range(READS):
        began = time.monotonic()
        frame.write.format("noop").mode("overwrite").save()
        read = time.monotonic()
        assert frame.count() >= rows
        yield Figure("read back", "", rows / (read - began), "rows/s")
        yield Figure("count()", "", rows / (time.monotonic() - read), "rows/s")


# --- clients beside the load ---------------------------------------------------------------------


def _beside_clients(
    frame: Any, settings: Callable[[str], Any], rows: int, file: Path
) -> Iterator[Figure]:
    with LocalCluster(nodes=NODES, coordinators=1) as cluster:
        with steady_clients(cluster.coordinators) as alone:
            time.sleep(CLIENTS_ALONE_S)
        with steady_clients(cluster.coordinators) as beside:
            for _ in _load(frame, settings(cluster.coordinators), rows, file):
                pass
    for column, spans in (("alone", alone), ("beside the load", beside)):
        for kind, took in spans.items():
            yield from latencies(f"single {kind}s", column, took)


# --- Redis ---------------------------------------------------------------------------------------


def _redis(pairs: Any, rows: int) -> Iterator[Figure]:
    """Measure both Redis jobs; the one with Arrow twice, since Spark's first run is slower."""
    for name, column, count, job in (
        ("one Redis, Arrow and MSET", "first job", 1, _by_arrow),
        ("one Redis, Arrow and MSET", "second job", 1, _by_arrow),
        ("Redis Cluster, pipelines", "second job", NODES, _by_pipelines),
    ):
        with servers.RedisServers(count) as redis:
            began = time.monotonic()
            job(pairs, *redis.addresses[0])
            yield Figure(name, column, rows / (time.monotonic() - began), "rows/s")
            assert redis.records() == rows


def _by_pipelines(pairs: Any, host: str, port: int) -> None:
    """Write each partition's rows, one by one, into pipelines of the cluster's client."""

    def write(rows: Iterable[Any]) -> None:
        from redis.cluster import RedisCluster

        with RedisCluster(host=host, port=port) as client:
            pipeline, waiting = client.pipeline(), 0
            for row in rows:
                pipeline.set(bytes(row.k), bytes(row.v))
                waiting += 1
                if waiting == REDIS_ROWS:
                    pipeline.execute()
                    waiting = 0
            pipeline.execute()

    pairs.foreachPartition(write)


def _by_arrow(pairs: Any, host: str, port: int) -> None:
    """Send Arrow batches as MSETs, several in flight, to one server."""

    def write(batches: Iterator[Any]) -> Iterator[Any]:
        import hiredis
        import redis

        connection: Any = redis.Connection(host=host, port=port)  # type: ignore[no-untyped-call]
        connection.connect()
        in_flight = 0
        try:
            for batch in batches:
                keys, values = batch.column(0).to_pylist(), batch.column(1).to_pylist()
                for at in range(0, len(keys), REDIS_ROWS):
                    part = keys[at : at + REDIS_ROWS], values[at : at + REDIS_ROWS]
                    flat = [item for pair in zip(*part, strict=True) for item in pair]
                    connection.send_packed_command([hiredis.pack_command((b"MSET", *flat))])
                    in_flight += 1
                    if in_flight == REDIS_IN_FLIGHT:
                        connection.read_response()
                        in_flight -= 1
                yield batch.slice(0, 0)
            for _ in range(in_flight):
                connection.read_response()
        finally:
            connection.disconnect()

    pairs.mapInArrow(write, pairs.schema).count()
