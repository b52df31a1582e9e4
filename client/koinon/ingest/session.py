"""A Spark session for one job, without output, on a Java that this module finds.

Spark's Java process inherits standard output and error when it starts; both are redirected to a
file at that moment, to keep its messages off the terminal.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from koinon import java
from koinon.local.servers import environment, is_importable
from koinon_proto.contract.errors import ConfigurationError
from koinon_proto.process.child_python import SAFE_PATH
from koinon_proto.process.printable import flush

LOCAL_MASTER = "local[*]"
APP_NAME = "koinon ingest"
NEEDS = ("pyspark", "pyarrow")
DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    f"spark.executorEnv.{SAFE_PATH}": "1",
}
LOCAL_DEFAULTS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


def require_spark() -> None:
    """Raise ConfigurationError with the packages to install if Spark's packages are missing."""
    if missing := [name for name in NEEDS if not is_importable(name)]:
        raise ConfigurationError(
            reason=f"Spark is not installed ({', '.join(missing)}): pip install 'koinon[spark]'"
        )


@contextlib.contextmanager
def spark_session(
    *,
    master: str = LOCAL_MASTER,
    conf: Mapping[str, str] | None = None,
    verbose: bool = False,
    app_name: str = APP_NAME,
) -> Iterator[Any]:
    """Yield a SparkSession with the format ``koinon`` registered, and stop it afterwards.

    Without ``verbose``, output of Spark and its workers goes to a file that is deleted at the end.
    If Spark already runs in this process, its session is used and left running.

    Raises:
        ConfigurationError: Spark's packages are missing, or it does not start.
        JavaNotFoundError: there is no suitable Java.
    """
    require_spark()
    with _scratch() as scratch, _as_spark_wants_it():
        if not verbose:
            warnings.filterwarnings("ignore", module=r"pyspark\.")
        import pyspark
        from pyspark.sql import SparkSession

        java.use_java(spark_version=pyspark.__version__)
        log = None if verbose else Path(scratch) / "spark.log"
        builder = SparkSession.builder.appName(app_name).master(master)
        settings = {**DEFAULTS, **(LOCAL_DEFAULTS if master.startswith("local") else {})}
        if master.startswith("local"):
            settings["spark.local.dir"] = scratch
        for name, value in {**settings, **(conf or {})}.items():
            builder = builder.config(name, value)
        try:
            with _output_to(log), _java_ended_unless_started():
                session = builder.getOrCreate()
        except Exception as error:
            raise ConfigurationError(reason=_why_not_started(error, log)) from error
        try:
            from koinon.spark import register

            register(session)
            yield session
        finally:
            from py4j.protocol import Py4JError  # type: ignore[import-untyped]

            with contextlib.suppress(
                Py4JError, OSError
            ):  # a closed terminal has ended Spark as well
                session.stop()


def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="koinon-spark-", ignore_cleanup_errors=True)


@contextlib.contextmanager
def _as_spark_wants_it() -> Iterator[None]:
    """A context for Spark's environment: workers run this Python, find our packages, and import
    nothing from the working directory. At its end JAVA_HOME is restored.
    """
    names = ("JAVA_HOME", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "PYTHONPATH", SAFE_PATH)
    before = {name: os.environ.get(name) for name in names}
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _output_to(log: Path | None) -> Iterator[None]:
    """A context in which standard output and error, as child processes inherit them, go to the
    file.
    """
    if log is None:
        yield
        return
    flush()
    kept = [os.dup(1), os.dup(2)]
    try:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        yield
    finally:
        flush()
        for number, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)


@contextlib.contextmanager
def _java_ended_unless_started() -> Iterator[None]:
    """Kill the Java process that was started in the block if the block raises, for instance on
    Ctrl-C: PySpark knows the process only once it is connected, and Java ignores Ctrl-C.
    """
    from pyspark import SparkContext

    java_gateway: Any = importlib.import_module("pyspark.java_gateway")
    popen, started = java_gateway.Popen, []

    def noted(*args: Any, **kwargs: Any) -> Any:
        started.append(popen(*args, **kwargs))
        return started[-1]

    java_gateway.Popen = noted
    try:
        yield
    except BaseException:
        for process in started:
            process.kill()
            process.wait()
            SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
        raise
    finally:
        java_gateway.Popen = popen


def _why_not_started(error: Exception, log: Path | None) -> str:
    text = str(error).strip().splitlines() or [type(error).__name__]
    lines = log.read_text(errors="replace").splitlines() if log and log.exists() else []
    told = [line.strip() for line in lines if "Exception" in line or "rror" in line]
    detail = "; ".join(told[:3])
    return f"Spark does not start: {text[0]}" + (f" ({detail})" if detail else "")
