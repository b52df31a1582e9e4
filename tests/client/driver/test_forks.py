"""Forks of a process that has used gRPC: those that exec, as PySpark starts Java, and those that go
on with their clients, as workers of multiprocessing do.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.client.kit.fake_cluster import FakeCluster

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


def run(program: str, *arguments: str) -> str:
    """Run a program to its end; return what it prints."""
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("GRPC_")}
    ended = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout


def test_children_of_a_process_with_channels_live_to_exec() -> None:
    run(PROGRAM)


CHILD_USES_CLIENTS = """
import multiprocessing, os, sys, threading
import koinon

addresses = sys.argv[1]
client = koinon.connect(addresses, timeout_ms=20_000)
closed = koinon.connect(addresses, timeout_ms=20_000)
rows = {b"k%d" % n: b"v" * 1_000 for n in range(300)}
client.put_many(rows)
closed.put(b"key", b"value")
closed.close()


def use(connected, name):
    assert connected.put(name, name)
    assert connected.get(name) == name
    assert connected.put_many(rows).ok
    assert connected.get_many(list(rows)) == list(rows.values())
    assert {entry.key for entry in connected.scan(prefix=b"k") } >= rows.keys()
    return connected.increment(b"counter")


def in_child(number):
    next(client.scan(page_rows=1))  # the first call, that connects; no page is read after it
    assert "2 nodes" in repr(client)
    assert client.scan().gi_frame.f_locals["pages"]._engine is client._engine
    counted = use(client, b"inherited %d" % number)
    with koinon.connect(addresses, timeout_ms=20_000) as fresh:
        counted = use(fresh, b"fresh %d" % number)
    try:
        closed.get(b"key")
    except koinon.ClientClosedError:
        return counted


def keep_busy():
    while not ended.is_set():
        client.put(b"busy", b"v")
        client.get_many([b"busy"])
        busy.append(client.get(b"busy"))


if __name__ == "__main__":
    busy, ended = [], threading.Event()
    other = threading.Thread(target=keep_busy)  # that every fork leaves in the middle of something
    other.start()
    forking = multiprocessing.get_context("fork")
    with forking.Pool(2) as pool:
        counted = pool.map(in_child, range(4), chunksize=1)
    assert max(counted) == 8, counted
    assert use(client, b"parent") == 9
    child = os.fork()  # that ends as Python does, with what it has inherited in its hands
    if child == 0:
        sys.exit(0 if use(client, b"grandchild") == 10 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert use(client, b"parent") == 11
    silent = os.fork()  # that uses nothing
    if silent == 0:
        sys.exit(0 if repr(client).endswith(", not connected yet>") else repr(client))
    assert os.waitpid(silent, 0)[1] == 0
    assert use(client, b"parent") == 12
    assert other.is_alive()  # nothing it did has failed
    ended.set()
    other.join()
    assert set(busy) == {b"v"}
    client.close()
"""


CHILD_IMPORTS = """
import os, sys
import koinon

client = koinon.connect(sys.argv[1], timeout_ms=20_000)
print(f"before: {'numpy' in sys.modules}", end=", ", flush=True)
child = os.fork()
if child == 0:
    there = set(sys.modules)
    client.put_many([(b"k%d" % n, b"v") for n in range(100)])
    client.get_many([b"k%d" % n for n in range(100)])
    ours = {name for name in set(sys.modules) - there if name.startswith(("koinon", "numpy", "h2"))}
    print(f"in the child: {sorted(ours)}", flush=True)
    os._exit(0)
os.waitpid(child, 0)
client.close()
"""


@pytest.mark.parametrize("speaks_resp", [False, True], ids=["grpc", "resp"])
def test_clients_work_in_forked_children_and_on_in_the_parent(speaks_resp: bool) -> None:
    cluster = FakeCluster(nodes=2, speaks_resp=speaks_resp)
    try:
        run(CHILD_USES_CLIENTS, cluster.seeds)
    finally:
        cluster.close()


CHILD_OPERATES = """
import os, sys
import koinon
from koinon.operate.admin import Admin

with Admin(sys.argv[1]) as admin:
    admin.status()
    if os.fork() == 0:
        try:
            admin.status()
        except koinon.ForkedError as error:
            print(error, flush=True)
        sys.exit()
    os.wait()
    admin.status()
"""


def test_child_imports_nothing_that_a_thread_of_the_parent_may_be_importing() -> None:
    cluster = FakeCluster(nodes=1)
    try:
        assert run(CHILD_IMPORTS, cluster.seeds).strip() == "before: False, in the child: []"
    finally:
        cluster.close()


def test_operators_calls_in_a_forked_child_are_refused_at_once() -> None:
    cluster = FakeCluster(nodes=1)
    try:
        assert "start the process by spawn" in run(CHILD_OPERATES, cluster.seeds)
    finally:
        cluster.close()


def test_child_of_a_process_that_uses_grpc_itself_does_without_its_core() -> None:
    program = """
import sys, os
import koinon.client  # before gRPC, whose handlers of forks would crash children
import grpc
from koinon.driver import forks

def lost_in_child():
    child = os.fork()
    if child == 0:
        os._exit(forks.core_is_lost())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

assert lost_in_child() == 0
with grpc.insecure_channel(sys.argv[1]) as channel:
    grpc.channel_ready_future(channel).result(30)
    assert lost_in_child() == 1
"""
    cluster = FakeCluster(nodes=1)
    try:
        run(program, cluster.seeds)
    finally:
        cluster.close()
