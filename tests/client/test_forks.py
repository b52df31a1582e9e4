"""A process with channels starts others by fork and exec, as PySpark starts Java."""

import os
import subprocess
import sys

FORKS = 60
"""With gRPC's handlers about a third of the children crash."""

PROGRAM = f"""
import subprocess
import koinon
import grpc
from concurrent import futures

server = grpc.server(futures.ThreadPoolExecutor(1))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
with grpc.insecure_channel(f"127.0.0.1:{{port}}") as channel:
    grpc.channel_ready_future(channel).result(30)
    codes = [
        subprocess.run(["true"], preexec_fn=lambda: None, check=False).returncode
        for _ in range({FORKS})
    ]
assert not any(codes), codes
"""


def test_children_of_a_process_with_channels_live_to_exec() -> None:
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("GRPC_")}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
