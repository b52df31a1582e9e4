"""The programs under docs/ do what their pages say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from koinon.local.servers import environment

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


@pytest.mark.long
def test_stream_is_enriched_partition_by_partition_from_one_node() -> None:
    pytest.importorskip("pyspark", reason="the spark extra is not installed")
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / "enrich_stream.py"), "--clicks", "5000"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "5,000 messages of 24 partitions are enriched, 0 had no user" in ended.stdout
    assert "asked 1 node" in ended.stdout
