"""Fixtures: a fake cluster with loads, and one Spark session a process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.spark.fake_loads import LoadsCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def fake() -> Iterator[LoadsCluster]:
    cluster = LoadsCluster()
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """One session for all tests of this process: it takes seconds to start."""
    import pyspark
    from pyspark.sql import SparkSession

    from koinon import java
    from koinon.local.servers import environment
    from koinon.spark import register

    scratch = tmp_path_factory.mktemp("spark")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("JAVA_HOME", str(java.find_java(spark_version=pyspark.__version__).home))
        patch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
        session = (
            SparkSession.builder.master("local[2,2]")  # a task that fails is tried once more
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.memory", "1g")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.sql.warehouse.dir", str(scratch / "warehouse"))
            .config("spark.local.dir", str(scratch))
            .getOrCreate()
        )
        session.sparkContext.setLogLevel("OFF")
        register(session)
        yield session
        session.stop()
