"""A node imports what it uses: each package that it does without leaves memory to the records."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import sys
import koinon_node.__main__
print(*sys.modules)
"""


def test_node_without_a_metrics_port_imports_no_web_server_and_no_mail() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True
    )
    imported = set(ended.stdout.split())
    assert {"koinon_node.node", "numpy", "grpc"} <= imported
    unused = {"cryptography", "email", "http.server", "prometheus_client", "pyarrow", "rich"}
    assert unused.isdisjoint(imported)
