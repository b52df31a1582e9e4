"""A whole Spark driver, to be killed: writes numbered rows under a prefix.

    python -m tests.spark.job_process MASTER COORDINATORS PREFIX ROWS LOAD_TIMEOUT

Says "running" once Spark is up, and "saved" at the end.
"""

from __future__ import annotations

import sys


def main(master: str, coordinators: str, prefix: str, rows: int, load_timeout: str) -> None:
    from pyspark.sql import SparkSession

    from koinon.spark import register

    spark = (
        SparkSession.builder.master(master)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "600m")
        .config("spark.executor.memory", "512m")
        .config("spark.speculation", "true")
        .config("spark.speculation.interval", "50ms")
        .config("spark.speculation.multiplier", "1")
        .config("spark.speculation.quantile", "0.1")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    register(spark)
    print("running", flush=True)
    frame = spark.range(0, rows, numPartitions=6).selectExpr(
        f"concat('{prefix}:', lpad(id, 7, '0')) key", "concat('v', id) value"
    )
    frame.write.format("koinon").options(
        coordinators=coordinators, loadTimeout=load_timeout, memoryBytes="1MiB"
    ).mode("append").save()
    print("saved", flush=True)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
