"""The bytes of commands and snapshots are a format: they may not change under one version."""

from __future__ import annotations

import pytest

from koinon_coordinator.convert import (
    command_from_bytes,
    command_to_bytes,
    hosted_from_proto,
    hosted_to_proto,
    image_from_bytes,
    image_to_bytes,
)
from koinon_coordinator.core.commands import (
    AssignPartitions,
    Command,
    ConfirmRegistration,
    CreateCluster,
    FenceNode,
    HostedPartition,
    PartitionsHosted,
)
from koinon_coordinator.core.state import EMPTY_IMAGE, ClusterState
from koinon_coordinator.replicated import ReplicatedState
from koinon_proto.errors import DataDirectoryError, UnsupportedVersionError
from koinon_proto.table import NodeNumber, PartitionId
from koinon_proto.v1 import state_pb2

from .support import bootstrapped, cluster_config, fence, register

N1, N2 = NodeNumber(1), NodeNumber(2)
HOSTED = HostedPartition(partition_id=PartitionId(5), primary_epoch=3, partition_epoch=300)

GOLDEN: list[tuple[Command, str]] = [
    (
        CreateCluster(config=cluster_config()),
        "0801122a0a280a0663306666656512076d75726d757232180820012801300138800840c80148dc0b"
        "50e807589003",
    ),
    (
        register("n1", last=4, known=5, rack="r"),
        "08011a1f0a026e3112046e313a311a0172220873746f72652d6e312804320272313805",
    ),
    (ConfirmRegistration(node_number=N1, node_epoch=2), "0801220408011002"),
    (AssignPartitions(replicas=((N1, N2), (N2, N1))), "08012a0c0a040a0201020a040a020201"),
    (FenceNode(node_number=N2, node_epoch=9), "0801320408021009"),
    (
        PartitionsHosted(node_number=N1, node_epoch=2, hosted=(HOSTED,)),
        "08013a0e080110021a01052201032a02ac02",
    ),
]
IDS = [type(command).__name__ for command, _ in GOLDEN]


@pytest.mark.parametrize(("command", "encoded"), GOLDEN, ids=IDS)
def test_command_bytes_are_the_golden_ones(command: Command, encoded: str) -> None:
    assert command_to_bytes(command).hex() == encoded
    assert command_from_bytes(bytes.fromhex(encoded)) == command


def test_snapshot_bytes_are_the_golden_ones_and_come_back_whole() -> None:
    state = bootstrapped([(1,), (2,)], nodes=2)
    fence(state, 2)
    encoded = image_to_bytes(state.image())
    assert encoded.hex() == SNAPSHOT
    assert image_from_bytes(encoded) == state.image()
    assert image_from_bytes(image_to_bytes(EMPTY_IMAGE)) == EMPTY_IMAGE


SNAPSHOT = (
    "080112280a0663306666656512076d75726d757232180220012801300238800840c80148dc0b50e807589003"
    "180720022a240a1c080112026e311a046e313a31280130023a0873746f72652d6e3140021202723120012a24"
    "0a1c080212026e321a046e323a31280130013a0873746f72652d6e32400712027231200132101201011a0101"
    "20012801300248025805321208011201021a010228023003480350015807"
)


def test_command_of_an_unknown_version_is_refused_by_name() -> None:
    message = state_pb2.Command.FromString(command_to_bytes(GOLDEN[0][0]))
    message.format_version = 7
    with pytest.raises(UnsupportedVersionError, match="coordinator command has version 7"):
        command_from_bytes(message.SerializeToString())


def test_command_of_an_unknown_kind_is_refused_by_name() -> None:
    unknown_field_99 = state_pb2.Command(format_version=1).SerializeToString() + b"\x9a\x06\x00"
    for encoded in (unknown_field_99, b"\x08\x01"):
        with pytest.raises(UnsupportedVersionError, match="unknown kind"):
            command_from_bytes(encoded)


def test_snapshot_of_an_unknown_version_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedVersionError, match="coordinator snapshot has version 0"):
        image_from_bytes(b"")


@pytest.mark.parametrize("decode", [command_from_bytes, image_from_bytes])
def test_bytes_that_are_no_message_are_refused(decode: object) -> None:
    with pytest.raises(DataDirectoryError, match="damaged"):
        decode(b"\xff\xff\xff")  # type: ignore[operator]


def test_host_command_comes_back_whole() -> None:
    assert hosted_from_proto(hosted_to_proto(HOSTED)) == HOSTED


def test_replicated_state_restored_from_a_snapshot_goes_on_alike() -> None:
    first, second = ReplicatedState(), ReplicatedState()
    first.state = bootstrapped([(1,), (2,)], nodes=2)
    second.restore(first.snapshot())
    command = command_to_bytes(register("n1", last=1, known=1, registration="r2"))
    assert first.apply(9, command) == second.apply(9, command)
    assert first.snapshot() == second.snapshot()
    assert isinstance(second.state, ClusterState)
