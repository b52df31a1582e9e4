"""Keyspaces at the Redis port of a real node: which one a connection's commands are in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from koinon_proto.contract.errors import TableBehindError, UnknownKeyspaceError
from koinon_proto.contract.keyspaces import Keyspace
from koinon_proto.contract.table import NodeNumber, RedisPort, Table
from koinon_proto.partitioner import partitioner_of, slot_of
from koinon_proto.v1 import kv_pb2
from tests.kit.addresses import free_addresses
from tests.kit.waiting import wait_until
from tests.node.kit.keyspaces import create_keyspace, drop_keyspace
from tests.node.kit.resp_client import RespClient, packed, typed
from tests.node.kit.scripted_coordinator import Script, ScriptedCoordinator
from tests.node.kit.support import NodeProcess, running_node

RIDES, CARTS, SLOTS, GUESTS = 7, 8, 20, 30
OTHERS_PORT = "127.0.0.1:7002"
"""Where the node n2, which is not there, is said to serve the keyspace ``slots``."""


@pytest.fixture(scope="module")
def coordinator() -> Iterator[ScriptedCoordinator]:
    with ScriptedCoordinator(Script(primaries={5: 2})) as running:
        yield running


@pytest.fixture(scope="module")
def ports() -> dict[str, str]:
    """The node's ports, by keyspace."""
    return dict(zip(("default", "slots", "guests"), free_addresses(3), strict=True))


@pytest.fixture(scope="module")
def address(ports: dict[str, str]) -> str:
    return ports["default"]


@pytest.fixture(scope="module")
def node(
    coordinator: ScriptedCoordinator,
    ports: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[NodeProcess]:
    data = tmp_path_factory.mktemp("resp_keyspaces") / "n1"
    flags = ["--redis-listen", ports["default"]]
    for name in ("slots", "guests"):
        flags += ["--redis-listen", f"{name}={ports[name]}"]
    with running_node(data, coordinator, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def rides(coordinator: ScriptedCoordinator, node: NodeProcess) -> Keyspace:
    made = create_keyspace(coordinator, RIDES, "rides")
    wait_until(coordinator.hosted_all, "the node hosts the keyspace")
    return made


@pytest.fixture
def client(node: NodeProcess, address: str) -> Iterator[RespClient]:
    with RespClient(address) as connected:
        yield connected


def put(key: str, value: str) -> tuple[object, ...]:
    return "KOINON.PUT", key, value, 0, 0, "", 0


def enter(client: RespClient, keyspace_id: int) -> None:
    assert client.call("KOINON.HELLO", 2, "", keyspace_id).startswith(b"n1 ")


def test_connection_that_names_a_keyspace_reads_and_writes_there_only(
    client: RespClient, address: str, rides: Keyspace
) -> None:
    enter(client, RIDES)
    assert int(client.call(*put("k", "rides"))) > 0
    assert client.call("KOINON.INCREMENT", "n", 4, 0, 0, 0) == 4
    with RespClient(address) as other:
        assert other.call("KOINON.HELLO", 2, "", 0).startswith(b"n1 ")
        assert other.call("KOINON.GET", "k", 0) is None
        assert other.call("KOINON.EXISTS", "n", 0) == 0
        assert int(other.call(*put("k", "default"))) > 0
    assert client.call("KOINON.GET", "k", 0) == b"rides"
    everywhere = kv_pb2.ScanRequest(partition_ids=rides.partition_ids, keyspace_id=RIDES)
    page = client.call("KOINON.SCAN", everywhere.SerializeToString())
    assert sorted(kv_pb2.ScanResponse.FromString(page).values) == [b"4", b"rides"]
    at = partitioner_of(rides).partitions_of([b"k"])
    rows = kv_pb2.BatchGetRequest(keys=[b"k"], partition_ids=at, keyspace_id=RIDES)
    found = client.call("KOINON.GETMANY", rows.SerializeToString())
    assert list(kv_pb2.BatchGetResponse.FromString(found).values) == [b"rides"]
    assert client.call("KOINON.DELETE", "k", 0, "", 0) == 1


@pytest.mark.usefixtures("rides")
def test_commands_that_come_with_another_hello_are_each_in_the_keyspace_of_their_own(
    client: RespClient,
) -> None:
    """A run of commands ends where the keyspace changes."""
    commands = [
        *[put("turn", "d"), ("KOINON.HELLO", 2, "", RIDES), put("turn", "r")],
        *[("KOINON.GET", "turn", 0), ("KOINON.HELLO", 2, "", 0), ("KOINON.GET", "turn", 0)],
    ]
    client.send_bytes(b"".join(packed(*command) for command in commands))
    replies = [client.reply() for _ in commands]
    assert [replies[at].split()[0] for at in (1, 3, 4, 5)] == [b"n1", b"r", b"n1", b"d"]


@pytest.mark.usefixtures("rides")
def test_watched_keys_are_forgotten_where_another_keyspace_is_entered(client: RespClient) -> None:
    assert client.call("SET", "watched", "1") == b"OK"
    assert client.call("WATCH", "watched") == b"OK"
    assert client.call("SET", "watched", "2") == b"OK"
    enter(client, RIDES)
    assert client.call("MULTI") == b"OK"
    assert client.call("SET", "watched", "3") == b"QUEUED"
    assert client.call("EXEC") == [b"OK"]


def test_keyspace_that_is_gone_is_refused_also_where_another_has_its_name(
    coordinator: ScriptedCoordinator, client: RespClient
) -> None:
    carts = create_keyspace(coordinator, CARTS, "carts")
    wait_until(coordinator.hosted_all, "the node hosts the keyspace")
    enter(client, CARTS)
    assert int(client.call(*put("k", "old"))) > 0
    drop_keyspace(coordinator, carts)
    create_keyspace(coordinator, CARTS + 1, "carts")
    wait_until(coordinator.hosted_all, "the node hosts the keyspace")
    for command in (("KOINON.GET", "k", 0), put("k", "v"), ("KOINON.TOUCH", "k", 0, 0, 0)):
        error, _ = typed(client.call(*command))
        assert isinstance(error, UnknownKeyspaceError)
    assert client.call("PING") == b"PONG"  # what others sent on this connection is answered
    enter(client, CARTS + 1)
    assert client.call("KOINON.GET", "k", 0) is None


def test_keyspace_that_is_not_known_yet_is_asked_for_again_by_a_client_whose_table_is_newer(
    client: RespClient,
) -> None:
    enter(client, 99)
    for command in (("KOINON.GET", "k", 1 << 40), ("KOINON.PUT", "k", "v", 1 << 40, 0, "", 0)):
        error, _ = typed(client.call(*command))
        assert isinstance(error, TableBehindError)
    error, _ = typed(client.call("KOINON.GET", "k", 0))
    assert isinstance(error, UnknownKeyspaceError)


# --- ports of keyspaces ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slots(coordinator: ScriptedCoordinator, node: NodeProcess) -> Keyspace:
    """A keyspace that routes by Redis's slots; n2 leads every other partition of it."""
    made = create_keyspace(coordinator, SLOTS, "slots", primaries=(1, 2, 1, 2), partitioner="crc16")

    def listens(table: Table) -> Table:
        n2 = replace(table.nodes[NodeNumber(2)], redis_ports=(RedisPort("slots", OTHERS_PORT),))
        n2 = replace(n2, changed_at=table.table_version + 1)
        return replace(table, nodes={**table.nodes, n2.number: n2})

    coordinator.change_table(listens)
    wait_until(coordinator.hosted_all, "the node hosts the keyspace")
    return made


def in_quarter(quarter: int) -> str:
    return next(key for n in range(1_000) if slot_of((key := f"k{n}").encode()) // 4_096 == quarter)


@pytest.mark.usefixtures("slots")
def test_port_of_a_keyspace_names_the_ports_of_that_keyspace_on_other_nodes(
    ports: dict[str, str],
) -> None:
    own = int(ports["slots"].rpartition(":")[2])
    here, there = in_quarter(2), in_quarter(3)
    with RespClient(ports["slots"]) as guest:
        found = guest.call("CLUSTER", "SLOTS")
        assert [(first, last, node[1]) for first, last, node in found] == [
            *((0, 4_095, own), (4_096, 8_191, 7002)),
            *((8_192, 12_287, own), (12_288, 16_383, 7002)),
        ]
        nodes = guest.call("CLUSTER", "NODES").decode()
        assert f" {OTHERS_PORT}@" in nodes
        assert f" {ports['slots']}@" in nodes
        assert f" {ports['default']}@" not in nodes
        shards = [dict(zip(s[::2], s[1::2], strict=True)) for s in guest.call("CLUSTER", "SHARDS")]
        served = [dict(zip(n[::2], n[1::2], strict=True)) for s in shards for n in s[b"nodes"]]
        assert {node[b"port"] for node in served} == {own, 7002}
        moved = f"MOVED {slot_of(there.encode())} {OTHERS_PORT}"
        for command in (("GET", there), ("SET", there, "v"), ("WATCH", there)):
            assert str(guest.call(*command)) == moved
        assert guest.call("SET", here, "1") == b"OK"
        assert guest.call("GET", here) == b"1"
        assert guest.call("DBSIZE") == 1
        assert guest.call("SCAN", "0") == [b"0", [here.encode()]]


@pytest.mark.usefixtures("slots")
def test_what_guests_write_in_a_keyspace_our_own_clients_read_there(
    ports: dict[str, str], client: RespClient
) -> None:
    key = in_quarter(0)
    with RespClient(ports["slots"]) as guest:
        assert guest.call("SET", key, "guest") == b"OK"
    assert client.call("KOINON.GET", key, 0) is None
    enter(client, SLOTS)
    assert client.call("KOINON.GET", key, 0) == b"guest"
    with RespClient(ports["slots"]) as own:  # whoever names no keyspace means ``default``
        assert own.call("KOINON.HELLO", 2, "", 0).startswith(b"n1 ")
        assert own.call("KOINON.GET", key, 0) is None


def test_guest_of_a_keyspace_is_refused_before_it_is_there_and_once_it_is_another(
    coordinator: ScriptedCoordinator, node: NodeProcess, ports: dict[str, str]
) -> None:
    with RespClient(ports["guests"]) as guest:
        assert guest.call("PING") == b"PONG"
        for command in (("GET", "k"), ("SET", "k", "v"), ("SCAN", "0"), ("CLUSTER", "SLOTS")):
            assert "keyspace 'guests'" in str(guest.call(*command))
        made = create_keyspace(coordinator, GUESTS, "guests")
        wait_until(coordinator.hosted_all, "the node hosts the keyspace")
        assert guest.call("SET", "k", "old") == b"OK"
        assert "routes keys by murmur2" in str(guest.call("CLUSTER", "SLOTS"))
        drop_keyspace(coordinator, made)
        create_keyspace(coordinator, GUESTS + 1, "guests")
        wait_until(coordinator.hosted_all, "the node hosts the keyspace")
        assert str(guest.call("GET", "k")).startswith("ERR ")
        assert guest.is_closed()
    with RespClient(ports["guests"]) as guest:
        assert guest.call("GET", "k") is None
