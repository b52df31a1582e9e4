"""A node process as its operator sees it: exit codes, kill -9, SIGSTOP, garbage on its port."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from koinon_proto.contract.errors import LeaseExpiredError
from koinon_proto.server.rpc import error_of
from koinon_proto.v1 import kv_pb2
from tests.kit.waiting import wait_until
from tests.node.kit.scripted_coordinator import Script, ScriptedCoordinator
from tests.node.kit.support import WAIT_S, NodeProcess, partitions_of, running_node


def test_acknowledged_writes_survive_kill_9_of_the_node(tmp_path: Path) -> None:
    acknowledged: dict[bytes, int] = {}

    def write(node: NodeProcess, worker: int) -> None:
        for number in range(10**6):
            keys = [b"%d-%d-%d" % (worker, number, i) for i in range(20)]
            request = kv_pb2.BatchWriteRequest(
                keys=keys, values=keys, partition_ids=partitions_of(keys), want_versions=True
            )
            try:
                reply = node.kv.BatchWrite(request, timeout=WAIT_S)
            except grpc.RpcError:
                return
            acknowledged.update(zip(keys, reply.versions, strict=True))

    with ScriptedCoordinator() as coordinator:
        with running_node(tmp_path / "n1", coordinator) as node:
            workers = [threading.Thread(target=write, args=(node, n)) for n in range(4)]
            for worker in workers:
                worker.start()
            wait_until(lambda: len(acknowledged) > 2000, "some acknowledged writes")
            node.kill()
            for worker in workers:
                worker.join(WAIT_S)
        with running_node(tmp_path / "n1", coordinator) as node:
            keys = list(acknowledged)
            reply = node.kv.BatchGet(
                kv_pb2.BatchGetRequest(
                    keys=keys, partition_ids=partitions_of(keys), want_versions=True
                )
            )
            assert list(reply.values) == keys
            assert dict(zip(keys, reply.versions, strict=True)) == acknowledged


def test_paused_node_resumed_serves_nothing_under_its_old_lease(tmp_path: Path) -> None:
    """Requests that arrive while it is stopped wait in its socket and are the first it sees."""
    with (
        ScriptedCoordinator(Script(lease_ms=400)) as coordinator,
        running_node(tmp_path / "n1", coordinator) as node,
    ):
        wait_until(lambda: is_put(node, b"old"), "it serves")
        os.kill(node.process.pid, signal.SIGSTOP)
        resumed_at = time.monotonic() + 1.0
        coordinator.fence()
        answered = threading.Event()  # it registers again only then: what it serves is no lease's

        def wait(request: Any) -> None:
            answered.wait(WAIT_S)

        coordinator.script.on_register = wait
        calls = [node.kv.Get.future(kv_pb2.GetRequest(key=b"k"), timeout=WAIT_S) for _ in range(20)]
        calls.append(node.kv.Put.future(kv_pb2.PutRequest(key=b"k", value=b"new"), timeout=WAIT_S))
        calls.append(
            node.kv.Scan.future(kv_pb2.ScanRequest(partition_ids=range(16)), timeout=WAIT_S)
        )
        wait_until(lambda: time.monotonic() > resumed_at, "more than a lease")
        os.kill(node.process.pid, signal.SIGCONT)
        failures = [call.exception() for call in calls]
        answered.set()
        assert None not in failures, "it served"
        errors = [error_of(failure) for failure in failures]
        assert [type(error) for error in errors] == [LeaseExpiredError] * len(calls)


def is_put(node: NodeProcess, value: bytes) -> bool:
    try:
        node.kv.Put(kv_pb2.PutRequest(key=b"k", value=value), timeout=WAIT_S)
    except grpc.RpcError:  # its lease is short
        return False
    return True


def test_node_garbage_and_half_open_connections_leave_it_serving(tmp_path: Path) -> None:
    with ScriptedCoordinator() as coordinator, running_node(tmp_path / "n1", coordinator) as node:
        host, port = node.address.split(":")
        rng = random.Random(3)
        sockets = []
        try:
            for number in range(300):
                connection = socket.create_connection((host, int(port)), timeout=WAIT_S)
                sockets.append(connection)
                if number % 2:
                    connection.sendall(rng.randbytes(200))
            node.kv.Put(kv_pb2.PutRequest(key=b"k", value=b"v"), timeout=WAIT_S)
            with grpc.insecure_channel(node.address) as fresh:
                call: Any = fresh.unary_unary("/koinon.v1.KeyValue/Put")
                with pytest.raises(grpc.RpcError):
                    call(b"\xff\xff not a message", timeout=WAIT_S)
            assert node.kv.Get(kv_pb2.GetRequest(key=b"k"), timeout=WAIT_S).value == b"v"
        finally:
            for connection in sockets:
                connection.close()


def test_clean_stop_exits_0_and_ends_the_writer_process(tmp_path: Path) -> None:
    with ScriptedCoordinator() as coordinator, running_node(tmp_path / "n1", coordinator) as node:
        node.kv.Put(kv_pb2.PutRequest(key=b"k", value=b"v"))
        assert node.stop() == 0
        assert "node stopped" in node.errors()
        with running_node(tmp_path / "n1", coordinator) as again:
            assert again.kv.Get(kv_pb2.GetRequest(key=b"k")).value == b"v"


def test_node_whose_writer_dies_stops_loudly_with_1(tmp_path: Path) -> None:
    with ScriptedCoordinator() as coordinator, running_node(tmp_path / "n1", coordinator) as node:
        children = Path(f"/proc/{node.process.pid}/task/{node.process.pid}/children")
        (writer,) = children.read_text().split()
        os.kill(int(writer), signal.SIGKILL)
        assert node.process.wait(WAIT_S) == 1
        assert "store failed" in node.errors()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--listen", "nowhere"], "nowhere"),
        (["--coordinators", ""], "coordinators"),
        (["--durability", "never"], "never"),
        (["--map-size-bytes", "12"], "12"),
        (["--weight", "0"], "weight 0"),
        (["--weight", "10001"], "weight 10001"),
        (["--log-format", "xml"], "xml"),
    ],
)
def test_bad_flags_exit_2_with_one_line_naming_the_value(
    tmp_path: Path, flags: list[str], words: str
) -> None:
    base = ["--id", "n1", "--listen", "127.0.0.1:7999", "--data", str(tmp_path)]
    result = subprocess.run(
        [sys.executable, "-m", "koinon_node", *base, "--coordinators", "127.0.0.1:1", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_port_in_use_exits_2_and_names_it(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        node = NodeProcess(tmp_path / "n1", "127.0.0.1:1", "--listen", address)
        assert node.process.wait(WAIT_S) == 2
        last_line = node.errors().strip().splitlines()[-1]
        assert address in last_line
        assert "Traceback" not in node.errors()
        node.close()


def test_directory_that_cannot_be_made_exits_2_and_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    node = NodeProcess(tmp_path / "n1", "127.0.0.1:1", "--data", str(tmp_path / "file" / "n1"))
    assert node.process.wait(WAIT_S) == 2
    assert str(tmp_path / "file" / "n1") in node.errors()
    node.close()


def test_directory_in_use_or_torn_exits_2_and_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "n1").mkdir()
    (tmp_path / "n1" / "identity").write_bytes(b"\x00")
    node = NodeProcess(tmp_path / "n1", "127.0.0.1:1")
    assert node.process.wait(WAIT_S) == 2
    assert "data.mdb" in node.errors()
    node.close()
