"""Keyspaces at the Redis port of a real node: which one a connection's commands are in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from koinon_proto.contract.errors import TableBehindError, UnknownKeyspaceError
from koinon_proto.contract.keyspaces import Keyspace
from tests.kit.addresses import free_address
from tests.kit.waiting import wait_until
from tests.node.kit.keyspaces import create_keyspace, drop_keyspace
from tests.node.kit.resp_client import RespClient, packed, typed
from tests.node.kit.scripted_coordinator import Script, ScriptedCoordinator
from tests.node.kit.support import NodeProcess, running_node

RIDES, CARTS = 7, 8


@pytest.fixture(scope="module")
def coordinator() -> Iterator[ScriptedCoordinator]:
    with ScriptedCoordinator(Script()) as running:
        yield running


@pytest.fixture(scope="module")
def address() -> str:
    return free_address()


@pytest.fixture(scope="module")
def node(
    coordinator: ScriptedCoordinator, address: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NodeProcess]:
    data = tmp_path_factory.mktemp("resp_keyspaces") / "n1"
    with running_node(data, coordinator, "--redis-listen", address) as running:
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
    assert client.call("KOINON.HELLO", 2, "", keyspace_id) == b"n1"


@pytest.mark.usefixtures("rides")
def test_connection_that_names_a_keyspace_reads_and_writes_there_only(
    client: RespClient, address: str
) -> None:
    enter(client, RIDES)
    assert int(client.call(*put("k", "rides"))) > 0
    assert client.call("KOINON.INCREMENT", "n", 4, 0, 0, 0) == 4
    with RespClient(address) as other:
        assert other.call("KOINON.HELLO", 1, "") == b"n1"
        assert other.call("KOINON.GET", "k", 0) is None
        assert other.call("KOINON.EXISTS", "n", 0) == 0
        assert int(other.call(*put("k", "default"))) > 0
    assert client.call("KOINON.GET", "k", 0) == b"rides"
    assert client.call("KOINON.DELETE", "k", 0, "", 0) == 1


@pytest.mark.usefixtures("rides")
def test_commands_that_come_with_another_hello_are_each_in_the_keyspace_of_their_own(
    client: RespClient,
) -> None:
    """A run of commands ends where the keyspace changes."""
    commands = [
        *[put("turn", "d"), ("KOINON.HELLO", 2, "", RIDES), put("turn", "r")],
        *[("KOINON.GET", "turn", 0), ("KOINON.HELLO", 1, ""), ("KOINON.GET", "turn", 0)],
    ]
    client.send_bytes(b"".join(packed(*command) for command in commands))
    replies = [client.reply() for _ in commands]
    assert [replies[at] for at in (1, 3, 4, 5)] == [b"n1", b"r", b"n1", b"d"]


@pytest.mark.usefixtures("rides")
def test_watched_keys_are_forgotten_where_another_keyspace_is_entered(client: RespClient) -> None:
    assert client.call("SET", "{w}1", "1") == b"OK"
    assert client.call("WATCH", "{w}1") == b"OK"
    assert client.call("SET", "{w}1", "2") == b"OK"
    enter(client, RIDES)
    assert client.call("MULTI") == b"OK"
    assert client.call("SET", "{w}1", "3") == b"QUEUED"
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
