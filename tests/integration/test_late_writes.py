"""A write that the network holds back is not applied once its time is over: on real processes, with
a relay between client and node that keeps what the client sends.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Literal

import pytest

import koinon
from koinon.local import LocalCluster
from koinon_proto.contract.errors import UnknownFateError
from koinon_proto.contract.table import PartitionStatus, Table
from tests.client.kit.fake_cluster import LoopThread
from tests.kit.addresses import free_addresses
from tests.kit.waiting import wait_until
from tests.node.kit.support import NodeProcess

KEYSPACE = "held"
TIMEOUT_MS = 1_000
PAST_THE_BOUND_S = 3.0


class Relay:
    """Hands bytes on between clients and one address. While it holds, it keeps what clients send;
    what is kept outlives the client's connection, as packets in a network do.
    """

    def __init__(self, thread: LoopThread) -> None:
        self._thread = thread
        self._held: list[tuple[float, asyncio.StreamWriter, bytes]] | None = None
        self.answered = 0  # bytes that came back from the node
        self.target = ""
        self._server = thread.run(asyncio.start_server(self._relay, "127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.target.rpartition(":")
        try:
            node_reader, node_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        back = asyncio.ensure_future(self._back(node_reader, writer))
        try:
            while data := await reader.read(65_536):
                if self._held is not None:
                    self._held.append((time.monotonic(), node_writer, data))
                else:
                    node_writer.write(data)
        except ConnectionError:
            pass
        await back  # the node's side stays open: what is held may still arrive

    async def _back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                self.answered += len(data)
                writer.write(data)
        except ConnectionError:
            pass
        writer.close()

    def hold(self) -> None:
        self._held = []

    def release(self, until: float) -> None:
        """Hand on what came until then; what came later is lost."""
        held, self._held = self._held or [], None
        for came_at, writer, data in held:
            if came_at < until:
                self._thread.loop.call_soon_threadsafe(writer.write, data)

    def close(self) -> None:
        self._thread.loop.call_soon_threadsafe(self._server.close)


@pytest.fixture(scope="module")
def relays() -> Iterator[dict[str, Relay]]:
    """By transport: the ways to the node."""
    thread = LoopThread()
    made = {"auto": Relay(thread), "grpc": Relay(thread)}
    yield made
    for relay in made.values():
        relay.close()
    thread.stop()


@pytest.fixture(scope="module")
def cluster(
    relays: dict[str, Relay], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    """A cluster with a keyspace that lies on one node, which others reach by the relays."""
    with LocalCluster(nodes=1, coordinators=1) as made, ExitStack() as ending:
        (redis,) = free_addresses(1)
        node = NodeProcess(
            tmp_path_factory.mktemp("held") / "data",
            made.coordinators,
            *("--pool", KEYSPACE, "--advertise", relays["grpc"].address),
            *("--redis-listen", redis, "--redis-advertise", relays["auto"].address),
            node_id="held1",
        )
        ending.callback(node.close)
        relays["grpc"].target, relays["auto"].target = node.address, redis
        wait_until(lambda: len(_table(made).nodes) == 2, "the node has registered")
        with made.admin() as admin:
            admin.keyspaces.create(KEYSPACE, partition_count=4, replication_factor=1, pool=KEYSPACE)
        wait_until(lambda: _is_online(made), "the keyspace is online")
        yield made


def _table(cluster: LocalCluster) -> Table:
    table = cluster.status().table
    assert table is not None
    return table


def _is_online(cluster: LocalCluster) -> bool:
    table = _table(cluster)
    ids = table.keyspaces.named(KEYSPACE).partition_ids
    return all(table.rows[p].status is PartitionStatus.ONLINE for p in ids)


def goes_by(relay: Relay, held: koinon.Keyspace, key: bytes) -> bool:
    """Write a record; return whether the answer came by the relay."""
    answered = relay.answered
    held.put(key, b"before")
    return relay.answered > answered


@pytest.mark.parametrize("transport", ["auto", "grpc"])
def test_write_that_is_held_back_beyond_its_time_never_happens(
    cluster: LocalCluster, relays: dict[str, Relay], transport: Literal["auto", "grpc"]
) -> None:
    relay, key = relays[transport], transport.encode()
    with koinon.connect(cluster.coordinators, transport=transport, timeout_ms=TIMEOUT_MS) as client:
        held = client.keyspace(KEYSPACE)
        wait_until(lambda: goes_by(relay, held, key), "the way to the node stands")
        relay.hold()
        until = time.monotonic() + TIMEOUT_MS / 1000
        with pytest.raises(UnknownFateError):
            held.put(key, b"held back")
        time.sleep(PAST_THE_BOUND_S)
        answered = relay.answered
        relay.release(until - 0.2)
        wait_until(lambda: relay.answered > answered, "the node answers what was held back")
        assert held.get(key) == b"before"


@pytest.mark.parametrize("transport", ["auto", "grpc"])
def test_write_that_is_held_back_within_its_time_happens(
    cluster: LocalCluster, relays: dict[str, Relay], transport: Literal["auto", "grpc"]
) -> None:
    relay, key = relays[transport], transport.encode()
    with koinon.connect(cluster.coordinators, transport=transport, timeout_ms=60_000) as client:
        held = client.keyspace(KEYSPACE)
        wait_until(lambda: goes_by(relay, held, key), "the way to the node stands")
        relay.hold()
        release = threading.Timer(0.5, relay.release, (math.inf,))
        release.start()
        held.put(key, b"after")
        assert held.get(key) == b"after"
