"""A node waits for its writer process when it starts: that process imports only what it uses."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import sys
import koinon_node.storage.writer_process
print(*{name.partition(".")[0] for name in sys.modules})
"""


def test_writer_process_imports_nothing_that_takes_long() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True
    )
    heavy = {"asyncio", "google", "grpc", "numpy", "prometheus_client", "pyarrow"}
    assert heavy.isdisjoint(ended.stdout.split())
    assert "lmdb" in ended.stdout.split()
