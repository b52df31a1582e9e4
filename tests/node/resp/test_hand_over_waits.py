"""Commands of Redis's clients while their partition changes hands, in a real node."""

from __future__ import annotations

import select
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from koinon_proto.contract.errors import KoinonError, NotPrimaryError, PartitionOfflineError
from koinon_proto.contract.table import NodeNumber, PartitionStatus, Table
from koinon_proto.partitioner import slot_of
from tests.kit.addresses import free_address
from tests.kit.waiting import wait_until
from tests.node.kit.resp_client import RespClient, packed, typed
from tests.node.kit.scripted_coordinator import Script, ScriptedCoordinator
from tests.node.kit.support import partitions_of, running_node

OTHERS, NOBODYS, CHANGING = 5, 6, 3
OTHERS_PORT = "127.0.0.1:7002"
COMMANDS: dict[str, list[tuple[str, ...]]] = {
    "read": [("GET", "{key}")],
    "reads": [("MGET", "{key}", "{key}")],
    "put": [("SET", "{key}", "v")],
    "writes": [("SET", "{key}", "v"), ("DEL", "{key}"), ("SETNX", "{key}", "v")],
    "all or nothing": [("MSETNX", "{key}", "v")],
    "transaction": [("MULTI",), ("SET", "{key}", "v"), ("EXEC",)],
    "watch": [("WATCH", "{key}")],
}


def key_in(partition_id: int) -> bytes:
    keys = (b"k%d" % n for n in range(10_000))
    return next(key for key in keys if partitions_of([key])[0] == partition_id)


KEY = key_in(CHANGING)


@pytest.fixture(scope="module")
def coordinator() -> Iterator[ScriptedCoordinator]:
    with ScriptedCoordinator(Script(primaries={OTHERS: 2, NOBODYS: 0})) as running:
        yield running


@pytest.fixture(scope="module")
def address(
    coordinator: ScriptedCoordinator, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    port, data = free_address(), Path(tmp_path_factory.mktemp("hand_over"))
    with running_node(data / "n1", coordinator, "--redis-listen", port):
        coordinator.change_table(_with_a_port)
        yield port


def _with_a_port(table: Table) -> Table:
    number = NodeNumber(2)
    version = table.table_version + 1
    other = replace(table.nodes[number], redis_address=OTHERS_PORT, changed_at=version)
    return replace(table, nodes={**table.nodes, number: other})


@pytest.fixture
def handing_over(coordinator: ScriptedCoordinator, address: str) -> Iterator[None]:
    """The partition was given to the other node, which has not said that it serves it; the node
    knows, as one of Koinon's own clients is told at once.
    """
    with RespClient(address) as own:
        _give(coordinator, 2, PartitionStatus.ASSIGNED)
        # A table before this one may be refused, too, until the node has taken its epoch over.
        wait_until(lambda: _is_refused(own, NotPrimaryError), "the node knows")
        yield
        _give(coordinator, 1, PartitionStatus.ONLINE)
        wait_until(lambda: not _is_refused(own), "the node leads it again")


def _give(coordinator: ScriptedCoordinator, number: int, status: PartitionStatus) -> None:
    assert coordinator.table is not None
    row = coordinator.table.rows[CHANGING]
    held = (NodeNumber(number),)
    coordinator.change_row(
        CHANGING,
        primary=NodeNumber(number),
        replicas=held,
        in_sync=held,
        primary_epoch=row.primary_epoch + 1,
        partition_epoch=row.partition_epoch + 1,
        status=status,
    )


def _is_refused(own: RespClient, *kinds: type[KoinonError]) -> bool:
    found = own.call("KOINON.GET", KEY, 0)
    expected = kinds or (NotPrimaryError, PartitionOfflineError)
    return isinstance(found, Exception) and isinstance(typed(found)[0], expected)


def _send(client: RespClient, commands: list[tuple[str, ...]]) -> None:
    named = [[word.format(key=KEY.decode()) for word in command] for command in commands]
    client.send_bytes(b"".join(packed(*command) for command in named))


@pytest.mark.usefixtures("handing_over")
@pytest.mark.parametrize("commands", COMMANDS.values(), ids=COMMANDS.keys())
def test_command_is_held_until_the_new_primary_serves_and_then_moved(
    coordinator: ScriptedCoordinator, address: str, commands: list[tuple[str, ...]]
) -> None:
    with RespClient(address) as guest, RespClient(address) as own:
        _send(guest, commands)
        queued = [guest.reply() for _ in commands[:-1] if commands[0] == ("MULTI",)]
        assert queued == [b"OK", b"QUEUED"][: len(queued)]
        assert _is_refused(own)  # Koinon's clients are not held: they have others to send
        assert not select.select([guest.socket], [], [], 0)[0]
        coordinator.change_row(CHANGING, status=PartitionStatus.ONLINE)
        for _ in range(len(commands) - len(queued)):
            assert str(guest.reply()) == f"MOVED {slot_of(KEY)} {OTHERS_PORT}"


@pytest.mark.usefixtures("handing_over")
@pytest.mark.parametrize("commands", COMMANDS.values(), ids=COMMANDS.keys())
def test_command_is_held_until_this_node_serves_again_and_then_carried_out(
    coordinator: ScriptedCoordinator, address: str, commands: list[tuple[str, ...]]
) -> None:
    with RespClient(address) as guest:
        _send(guest, commands)
        _give(coordinator, 1, PartitionStatus.ONLINE)
        for _ in commands:
            assert not isinstance(guest.reply(), Exception)


@pytest.mark.usefixtures("handing_over")
def test_hand_over_that_takes_too_long_asks_clients_to_try_again(address: str) -> None:
    kinds = ("read", "put", "all or nothing")
    with RespClient(address) as first, RespClient(address) as second, RespClient(address) as third:
        clients = (first, second, third)

        def are_told_of_the_other_primary() -> bool:
            for client, kind in zip(clients, kinds, strict=True):
                _send(client, COMMANDS[kind])
            found = [str(client.reply()) for client in clients]
            # A node that is slow to renew its lease says so instead; that is no hand-over.
            assert all(reply.startswith("TRYAGAIN ") for reply in found), found
            return all(f" partition {CHANGING} is led by" in reply for reply in found)

        wait_until(are_told_of_the_other_primary, "the hand-over to take too long")


def test_partition_without_a_primary_is_down_at_once(address: str) -> None:
    key = key_in(NOBODYS)
    with RespClient(address) as guest:
        for command in (("GET", key), ("SET", key, "v"), ("MSETNX", key, "v"), ("WATCH", key)):
            assert str(guest.call(*command)).startswith("CLUSTERDOWN ")
