"""A table of TPC-H by Spark into Koinon and into Redis, and back: rows per second, in one run.

    python -m bench.loads.ingest_bench [--table orders] [--rows 1500000] [--replication-factor 1]
                                 [--value o_comment] [--p99] [--json]

Koinon: ``koinon ingest orders.parquet --key o_orderkey`` into a fresh cluster of three nodes, with
staged and merged rows fsynced; lineitem's key is ``l_orderkey,l_linenumber``.

Redis, if ``redis-server`` is installed, has two jobs. One is the job that users write: pipelines of
the cluster's client within ``foreachPartition``, into a cluster of three. The other is the fastest
one that we could write: Arrow batches as MSETs of 1,000, into one server. Both servers have an
append-only file that is synced every second.

All jobs load the same rows: keys as text, and as values whole rows in JSON (for Redis made by Spark
itself), or one column. All run in one Spark, one after the other. Java compiles code that runs
often only while it runs. So each job but the slow pipelines is measured twice: first in a Spark
that has seen a thousand rows, then again. Both figures are shown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.loads import ingest_redis, ingest_steps
from bench.loads.ingest_clients import Clients
from bench.peers import redis_servers
from demo.tpch import LINEITEM, ORDERS, make_table
from koinon.ingest import row_groups
from koinon.ingest.job import Job
from koinon.ingest.progress import Phase, Snapshot
from koinon.ingest.session import spark_session
from koinon.ingest.settings import Settings
from koinon.local import LocalCluster
from koinon.operate.bulk_loads import LoadsClient

NODES = 3
TABLES = {table.name: table for table in (ORDERS, LINEITEM)}
ROWS = 1_500_000
READS = 5  # the median of so many reads is shown
RATES = ("staged_to_merged", "whole_job", "read_back", "count")
NOWHERE = "127.0.0.1:1"
REPOSITORY = Path(__file__).resolve().parents[2]
CLIENTS_ALONE_S = 5.0
PHASES = {
    Phase.STARTING: "start, to the first lot",
    Phase.STAGING: "read and stage",
    Phase.PREPARING: "prepare",
    Phase.MERGING: "merge",
}


@dataclass(kw_only=True)
class Report:
    """The figures of the second job: seconds by phase, and the share of all cores that was busy in
    it. Rates are in rows per second (for Redis of whole jobs), latencies in milliseconds.
    """

    table: str
    rows: int
    replication_factor: int
    encoding: str  # how whole rows are encoded
    value: str | None  # the column that is the value instead
    bytes: int = 0
    steps: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)
    staged_to_merged: float = 0.0
    whole_job: float = 0.0
    read_back: float = 0.0
    count: float = 0.0
    first: dict[str, float] = field(default_factory=dict)  # the rates of the first job
    redis_pipelines: float = 0.0
    redis_arrow: float = 0.0
    redis_missing: str = ""
    clients_alone: dict[str, Any] = field(default_factory=dict)
    clients_beside: dict[str, Any] = field(default_factory=dict)

    def settings(self, coordinators: str) -> Settings:
        """Return the settings of the write."""
        encoding = self.encoding if self.value is None else None
        key = ",".join(TABLES[self.table].key)
        return Settings(coordinators=coordinators, key=key, value=self.value, encoding=encoding)

    @property
    def what(self) -> str:
        return f"whole rows as {self.encoding}" if self.value is None else self.value


class BusyCores:
    """Measures which share of this machine's cores was busy, by phase."""

    def __init__(self) -> None:
        self.share: dict[str, float] = {}
        self._phase = Phase.STARTING
        self._at = self._times()

    def on_progress(self, snapshot: Snapshot) -> None:
        if snapshot.phase is self._phase:
            return
        now = self._times()
        busy, all_ = (later - before for later, before in zip(now, self._at, strict=True))
        if self._phase in PHASES:
            self.share[PHASES[self._phase]] = busy / all_ if all_ else 0.0
        self._phase, self._at = snapshot.phase, now

    @staticmethod
    def _times() -> tuple[float, float]:
        """Return the ticks in which cores were busy, and all ticks, summed over the cores."""
        try:
            first = Path("/proc/stat").read_text("ascii").splitlines()[0]
        except OSError:
            return 0.0, 0.0
        ticks = [float(number) for number in first.split()[1:9]]
        return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def tell(text: str) -> None:
    """Print the progress."""
    print(text, file=sys.stderr, flush=True)


def _parts(frame: Any, file: Path) -> list[row_groups.Part] | None:
    context = frame.sparkSession.sparkContext
    whole = frame.sparkSession.read.parquet(str(file)).schema
    return row_groups.parts_of(
        [str(file)],
        row_groups.fields_of(whole),
        kind="parquet",
        master=context.master,
        conf={},
        tasks=context.defaultParallelism,
    )


def load(frame: Any, coordinators: str, report: Report, file: Path | None = None) -> None:
    """Load rows as ``koinon ingest`` does; note the figures. ``file`` has the rows, if tasks may
    read it themselves.
    """
    settings = report.settings(coordinators)
    busy = BusyCores()
    with LoadsClient(coordinators) as loads:
        parts = None if file is None else _parts(frame, file)
        job = Job(frame=frame, settings=settings, loads=loads, rows_total=report.rows, parts=parts)
        outcome = job.run(busy.on_progress)
    if outcome.error is not None:
        raise outcome.error
    assert outcome.rows == report.rows, f"{outcome.rows} of {report.rows} rows were loaded"
    report.bytes = outcome.bytes
    report.seconds = {name: outcome.seconds.get(phase, 0.0) for phase, name in PHASES.items()}
    report.busy = busy.share
    whole = sum(report.seconds.values())
    report.whole_job = report.rows / whole
    report.staged_to_merged = report.rows / (whole - report.seconds[PHASES[Phase.STARTING]])


def read_back(spark: Any, coordinators: str, report: Report, *, times: int = 1) -> None:
    """Read everything without keeping it, and count it; note the medians."""
    frame = spark.read.format("koinon").option("coordinators", coordinators).load()
    reads, counts = [], []
    for _ in range(times):
        began = time.monotonic()
        frame.write.format("noop").mode("overwrite").save()
        read = time.monotonic()
        counted = frame.count()
        reads.append(read - began)
        counts.append(time.monotonic() - read)
        assert counted >= report.rows, f"{counted} of {report.rows} rows are there"
    report.read_back = report.rows / statistics.median(reads)
    report.count = report.rows / statistics.median(counts)


def measure_koinon(
    spark: Any, frame: Any, report: Report, file: Path, *, p99: bool = False, reads: int = 1
) -> None:
    """Load into a fresh cluster, and read back."""
    with LocalCluster(
        nodes=NODES, coordinators=1, replication_factor=report.replication_factor
    ) as cluster:
        cluster.wait_ready()
        if not p99:
            load(frame, cluster.coordinators, report, file)
        else:
            with Clients(cluster.coordinators) as alone:
                time.sleep(CLIENTS_ALONE_S)
            with Clients(cluster.coordinators) as beside:
                load(frame, cluster.coordinators, report, file)
            report.clients_alone, report.clients_beside = alone.report, beside.report
        tell(f"Koinon: {report.staged_to_merged:,.0f} rows/s")
        read_back(spark, cluster.coordinators, report, times=reads)


def measure_twice(spark: Any, frame: Any, report: Report, file: Path, *, p99: bool) -> None:
    """Measure in a Spark that has hardly worked yet, then again in the same one."""
    measure_koinon(spark, frame, report, file)
    report.first = {name: getattr(report, name) for name in RATES}
    measure_koinon(spark, frame, report, file, p99=p99, reads=READS)


def measure_redis(frame: Any, report: Report) -> None:
    """Measure the two jobs of Redis."""
    report.redis_missing = redis_servers.missing()
    if report.redis_missing:
        return
    value = "to_json(struct(*))" if report.value is None else report.value
    key = f"concat_ws(':', {', '.join(TABLES[report.table].key)})"
    pairs = frame.selectExpr(f"cast({key} as binary) key", f"cast({value} as binary) value")
    for name, servers, job in (
        ("redis_arrow", 1, ingest_redis.load_by_arrow),
        ("redis_arrow", 1, ingest_redis.load_by_arrow),  # the second job counts, as for Koinon
        ("redis_pipelines", NODES, ingest_redis.load_by_pipelines),
    ):
        with redis_servers.RedisServers(servers) as redis:
            began = time.monotonic()
            job(pairs, *redis.addresses[0])
            rate = report.rows / (time.monotonic() - began)
            assert redis.records() == report.rows
        setattr(report, name, rate)
        tell(f"{name}: {rate:,.0f} rows/s")


def warm_up(spark: Any, frame: Any, report: Report) -> None:
    """Let Spark, its Python workers and the writer run once, into a cluster of their own."""
    some = frame.limit(1_000)
    few = replace(report, rows=some.count(), replication_factor=1)
    ingest_steps.measure(some, few.rows, report.settings(NOWHERE))
    with LocalCluster(nodes=1, coordinators=1) as cluster:
        cluster.wait_ready()
        load(some, cluster.coordinators, few)
        read_back(spark, cluster.coordinators, few)


def measure(options: argparse.Namespace) -> Report:
    """Return the figures of this machine."""
    os.environ["PYTHONPATH"] = f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with tempfile.TemporaryDirectory(prefix="koinon-bench-") as scratch, spark_session() as spark:
        table = TABLES[options.table]
        file = make_table(Path(scratch), table, options.rows)
        frame = spark.read.parquet(str(file))
        if options.value is not None:
            frame = frame.select(*table.key, options.value)
        report = Report(
            table=table.name,
            rows=frame.count(),
            replication_factor=options.replication_factor,
            encoding=options.encoding,
            value=options.value,
        )
        tell(f"{report.rows:,} rows of {table.name}; warming up")
        warm_up(spark, frame, report)
        report.steps = ingest_steps.measure(frame, report.rows, report.settings(NOWHERE))
        measure_twice(spark, frame, report, file, p99=options.p99)
        measure_redis(frame, report)
    return report


def _rate(what: str, report: Report, name: str) -> str:
    rate, first = getattr(report, name), report.first[name]
    return f"    {what:<26} {rate:>12,.0f} rows/s   (the first time {first:,.0f})"


def show(report: Report) -> None:
    """Print one report."""
    print(
        f"{report.rows:,} rows of {report.table}, {report.what}, {report.bytes / 1e6:,.0f} MB, "
        f"into {NODES} nodes, {report.replication_factor} copies each; "
        f"{os.cpu_count()} cores for everything"
    )
    print("  a task's steps without a cluster, each with those before it")
    for name, rate in report.steps.items():
        print(f"    {name:<26} {rate:>12,.0f} rows/s")
    print("  the load")
    for name, seconds in report.seconds.items():
        busy = f"   {report.busy[name]:.0%} of the cores busy" if name in report.busy else ""
        print(f"    {name:<26} {seconds:>10.2f} s{busy}")
    print(_rate("first lot staged to merged", report, "staged_to_merged"))
    print(_rate("the whole job", report, "whole_job"))
    print(f"  reading it back, the median of {READS}")
    print(_rate("all rows", report, "read_back"))
    print(_rate("count()", report, "count"))
    for name, rate in (
        ("Redis Cluster, pipelines", report.redis_pipelines),
        ("one Redis, Arrow and MSET", report.redis_arrow),
    ):
        if rate:
            print(
                f"  {name:<28} {rate:>12,.0f} rows/s; the whole job is "
                f"{report.whole_job / rate:.1f} times as fast, "
                f"from the first lot {report.staged_to_merged / rate:.1f} times"
            )
    if report.redis_missing:
        print(f"  no comparison with Redis: {report.redis_missing}")
    for name in report.clients_alone:
        alone, beside = report.clients_alone[name], report.clients_beside[name]
        print(
            f"  single {name}s: p50 / p99 {alone['p50_ms']:.1f} / {alone['p99_ms']:.1f} ms alone, "
            f"{beside['p50_ms']:.1f} / {beside['p99_ms']:.1f} ms beside the load "
            f"(longest {beside['longest_ms']:.0f} ms)"
        )


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--table", choices=tuple(TABLES), default=ORDERS.name)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--replication-factor", type=int, default=1)
    parser.add_argument("--encoding", choices=("json", "msgpack"), default="json")
    parser.add_argument("--value", help="a column, instead of whole rows")
    parser.add_argument("--p99", action="store_true", help="clients' latencies, load off and on")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report = measure(options)
    if options.json:
        print(json.dumps(asdict(report)))
    else:
        show(report)


if __name__ == "__main__":
    main()
