"""Run redis-py's own tests against three nodes: ``python -m tests.redis_py``, or ``make
test-redis-py``.

They are those of its source distribution on clusters, and on strings, keys and expiry. What they
may fail in is listed, with the reason, in ``known_failures.py``; what is listed and passes fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from koinon.local import Ports, Setup
from tests.integration.copies import is_settled
from tests.kit.clusters import running_cluster

VERSION = "8.1.0"
NODES = 3
NODE_PORT = 17_379
REDIS_PORTS = {"n1": "16379", "n2": "16380"}  # 1,000 below the node's own; unless they were taken
NEEDS_THESE = "tests/test_cluster.py::TestRedisClusterObj::test_cluster_retry_object"
FLAGS = ["--partitioner", "crc16", "--partitions", "256"]
FILES = ("test_cluster.py", "test_cluster_transaction.py", "test_commands.py", "test_pipeline.py")
HERE = Path(__file__).parent
BUILD = HERE.parent.parent / "build" / "redis-py"
READY_S = 60.0


def main() -> None:
    """Run them; exit as pytest does."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("arguments", nargs="*", help="for pytest, after --")
    sys.exit(run(unpacked(), parser.parse_args().arguments).returncode)


def run(
    sources: Path, arguments: Sequence[str], *, capture: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run the tests of the source distribution against a cluster that is made for them."""
    with running_cluster(
        nodes=NODES,
        coordinators=1,
        setup=Setup(coordinator_flags=FLAGS),
        ports=Ports(first_node=NODE_PORT),
    ) as cluster:
        cluster.wait_for(is_settled, timeout_s=READY_S, what="all are in sync")
        command = [
            *(sys.executable, "-m", "pytest", "-p", "known_failures", "-p", "no:cacheprovider"),
            *("-W", "ignore", "-m", "not onlynoncluster"),
            *("--redis-url", f"redis://{cluster.redis_address('n1')}/0"),
            *("--redis-cluster-nodes", str(NODES)),
            *(str(Path("tests") / name) for name in FILES),
            *arguments,
        ]
        ports = {name: cluster.redis_address(name).rpartition(":")[2] for name in REDIS_PORTS}
        if ports != REDIS_PORTS:
            command += ["--deselect", NEEDS_THESE]
        environment = {
            **os.environ,
            "KOINON_URL": f"koinon://{cluster.coordinators}",
            "PYTHONPATH": str(HERE),  # ``tests`` is theirs there
        }
        return subprocess.run(
            command, cwd=sources, env=environment, text=True, capture_output=capture, check=False
        )


def unpacked() -> Path:
    """Return the directory of the source distribution; fetch it where it is not there yet.

    Raises:
        subprocess.CalledProcessError: it cannot be fetched.
    """
    sources = BUILD / f"redis-{VERSION}"
    if not sources.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        fetch = ("-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:")
        wanted = ("--dest", str(BUILD), f"redis=={VERSION}")
        subprocess.run([sys.executable, *fetch, *wanted], check=True)
        with tarfile.open(BUILD / f"redis-{VERSION}.tar.gz") as archive:
            archive.extractall(BUILD, filter="data")
    return sources


if __name__ == "__main__":
    main()
