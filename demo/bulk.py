"""The act about bulk loads: Spark loads orders while clients write, and reads them back."""

from __future__ import annotations

import json
import tempfile
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

from demo.load import SingleWriter
from demo.play import RIDE_TIMEOUT_MS, Play, check_acknowledged
from demo.tpch import ORDERS, PRICE, make_table
from koinon.ingest.files import rows_of
from koinon.ingest.job import Job, Outcome
from koinon.ingest.progress import Phase, Snapshot
from koinon.ingest.session import spark_session
from koinon.ingest.settings import Settings
from koinon.operate.loads_client import LoadsClient, LoadState
from koinon.operate.wording import bytes_text, duration_text
from koinon.spark.encoding.keys import key_bytes

PREFIX_HEX = "80000000"
"""The prefix, in hex, of the keys of numbers from 0 to some billions."""

(KEY,) = ORDERS.key
CONF = {"spark.sql.shuffle.partitions": "8"}


def orders_come_and_go_back(play: Play) -> None:
    """Ingest TPC-H orders with Spark, read them back with Spark, and compare."""
    stage = play.stage
    rows = min(play.rows_max or ORDERS.rows_at_scale_1, ORDERS.rows_at_scale_1)
    stage.act(f"{rows:,} TPC-H orders come in by Spark while clients write, and are read back")
    with tempfile.TemporaryDirectory(prefix="koinon-demo-") as scratch:
        began = time.monotonic()
        path = make_table(Path(scratch), ORDERS, rows)
        made_s = time.monotonic() - began
        with spark_session(app_name="koinon demo", conf=CONF) as spark:
            total = rows_of(spark, [str(path)], "parquet") or 0
            stage.say(
                f"{bytes_text(path.stat().st_size)} of Parquet in {duration_text(made_s)}; "
                f"Spark {spark.version} is up {duration_text(time.monotonic() - began - made_s)} "
                "later."
            )
            source = spark.read.parquet(str(path))
            _ingest(play, source, total)
            _compare(play, spark, source, path, total)
    check_acknowledged(play)


def _ingest(play: Play, source: Any, total: int) -> None:
    """Load the orders, all or none, while single writes go on."""
    stage, coordinators = play.stage, play.cluster.coordinators
    settings = Settings(coordinators=coordinators, key=KEY, key_encoding="binary", encoding="json")
    with (
        LoadsClient(coordinators) as loads,
        SingleWriter(play.client, b"demo/f/", RIDE_TIMEOUT_MS) as single,
        stage.progress("ingesting", total) as advance,
    ):

        def on_progress(snapshot: Snapshot) -> None:
            merged = f"{snapshot.partitions_merged} of {snapshot.partitions} partitions"
            remark = merged if snapshot.phase is Phase.MERGING else ""
            advance(snapshot.rows, f"{snapshot.phase.value} {remark}".rstrip())

        job = Job(frame=source, settings=settings, loads=loads, rows_total=total, what="orders")
        outcome = job.run(on_progress)
    if outcome.error is not None:
        raise outcome.error
    play.acknowledged |= single.acknowledged
    stage.check(
        outcome.state is LoadState.DONE and outcome.rows == total,
        f"all {outcome.rows:,} are readable and on disk in each copy: {_in_words(outcome)}",
    )
    stage.check(
        not single.errors,
        f"{len(single.acknowledged):,} single writes went on meanwhile: {single.told}, "
        f"the slowest took {duration_text(single.slowest_s)}",
    )


def _in_words(outcome: Outcome) -> str:
    """Return the durations of the load's phases, and its rate without Spark's start, as text."""
    stages = (Phase.STAGING, Phase.PREPARING, Phase.MERGING)
    seconds = {phase: outcome.seconds.get(phase, 0.0) for phase in stages}
    parts = ", ".join(f"{phase.value} {duration_text(seconds[phase])}" for phase in stages)
    return f"{outcome.rows / max(sum(seconds.values()), 1e-6):,.0f} rows/s ({parts})"


def _compare(play: Play, spark: Any, source: Any, path: Path, total: int) -> None:
    """Read the orders with Spark, and compare each with its row in the file."""
    from pyspark.sql import functions as f

    stage = play.stage
    stored = (
        spark.read.format("koinon")
        .options(coordinators=play.cluster.coordinators, prefixHex=PREFIX_HEX)
        .load()
    )
    began = time.monotonic()
    stored.write.format("noop").mode("overwrite").save()
    rate = total / (time.monotonic() - began)
    began = time.monotonic()
    parsed = f.from_json(stored.value.cast("string"), source.schema)
    ours = stored.select(parsed.alias("ours")).select(f"ours.{KEY}", "ours")
    theirs = source.select(KEY, f.struct(*source.columns).alias("theirs"))
    both = ours.join(theirs, KEY, "full_outer")
    same = f.col("ours").eqNullSafe(f.col("theirs"))
    equal, unlike, price = both.agg(
        f.count_if(same), f.count_if(~same), f.sum(f"ours.{PRICE}")
    ).first()
    stage.check(
        (equal, unlike) == (total, 0),
        f"Spark reads them at {rate:,.0f} rows/s; {equal:,} are, column by column, those of the "
        f"file, {unlike:,} are not ({duration_text(time.monotonic() - began)})",
    )
    stage.check(
        price == _sum_in_file(path),
        f"their prices add up to {price:,}, to the cent what the file's do",
    )
    first = source.orderBy(KEY).first()
    value = play.client.get(key_bytes(first[KEY]), timeout_ms=RIDE_TIMEOUT_MS)
    stage.check(
        value is not None and Decimal(json.loads(value)[PRICE]) == first[PRICE],
        f"order {first[KEY]}, as any client reads it: {(value or b'').decode()[:80]}…",
    )


def _sum_in_file(path: Path) -> Decimal:
    """Add up the prices without Spark."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    total: Decimal = pc.sum(pq.read_table(path, columns=[PRICE]).column(0)).as_py()
    return total
