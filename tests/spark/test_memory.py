"""A task's memory follows its buffer, not what it writes."""

from __future__ import annotations

import subprocess
import sys

from koinon.local.servers import environment

MIB = 1 << 20


def test_task_grows_by_its_buffers_however_much_it_writes() -> None:
    """The buffer, its copy in order, and messages on both sides of the wire, for they share the
    process here.
    """
    command = [sys.executable, "-m", "tests.spark.memory_probe", "8MiB", "400"]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120, env=environment()
    )
    assert int(ended.stdout) < 200 * MIB
