"""The bytes of commands and snapshots are a format: they may not change under one version."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koinon_coordinator.core.cluster.commands import (
    AbortLoad,
    AcceptPlan,
    AccessChanged,
    AddToken,
    AlterKeyspace,
    AlterPartitions,
    AssignPartitions,
    CancelMoves,
    Command,
    CommitLoad,
    ConfirmRegistration,
    CreateCluster,
    CreateGroup,
    CreateKeyspace,
    DeleteGroup,
    DropKeyspace,
    DropRole,
    DropToken,
    DropUser,
    FenceNode,
    FinishMoves,
    ForcePrimary,
    ForgetKeyspace,
    HostedPartition,
    LoadOutcome,
    Move,
    OpenLoad,
    PartitionChange,
    PartitionsHosted,
    PartitionsMerged,
    PutRole,
    PutUser,
    RaiseGeneration,
    RestoreCertificate,
    RevokeCertificate,
    SetMoveSettings,
    SetNodeStatus,
    SetReplicationFactor,
    StartMoves,
    WantPrimaries,
)
from koinon_coordinator.core.cluster.image import EMPTY_IMAGE, NodeRecord, StateImage
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_coordinator.core.decide.copy_progress import Progress, Stage
from koinon_coordinator.core.decide.keyspace_requests import Alteration
from koinon_coordinator.core.decide.load_requests import LoadWish
from koinon_coordinator.core.decide.registrations import Registration
from koinon_coordinator.core.planning.model import Plan, Refusal
from koinon_coordinator.services import admin_service, cluster_services, loads_service
from koinon_coordinator.state_machine import ReplicatedState
from koinon_coordinator.wire.rows import _ROW, RowForms
from koinon_coordinator.wire.state_codec import (
    command_from_bytes,
    command_to_bytes,
    image_from_bytes,
    image_to_bytes,
)
from koinon_proto.contract.access import (
    NO_ACCESS_STATE,
    Action,
    Effect,
    Grant,
    Role,
    Token,
    User,
)
from koinon_proto.contract.bulk_loads import LoadMode, StreamBatch
from koinon_proto.contract.cluster_errors import DataDirectoryError
from koinon_proto.contract.codec import Codec
from koinon_proto.contract.errors import UnsupportedVersionError
from koinon_proto.contract.groups import GroupStrategy
from koinon_proto.contract.keyspaces import Keyspace, KeyspaceId
from koinon_proto.contract.table import (
    NO_NODE,
    MoveSettings,
    NodeNumber,
    NodeStatus,
    PartitionId,
    registration_digest,
)
from koinon_proto.v1 import membership_pb2, state_pb2, table_pb2
from tests.coordinator.kit.load_states import ABORTED, Log, commit_load, merged
from tests.coordinator.kit.states import plan_of, restart, start
from tests.coordinator.kit.support import bootstrapped, cluster_config, fence, register
from tests.proto.records import records

N1, N2 = NodeNumber(1), NodeNumber(2)
HOSTED = HostedPartition(partition_id=PartitionId(5), primary_epoch=3, partition_epoch=300)

MOVE = Move(
    partition_id=PartitionId(5),
    origin=(N1,),
    target=(N2, N1),
    reason="balance",
    plan_id="p",
    plan_moves=3,
)
TURNED_BACK = replace(MOVE, partition_id=PartitionId(0), running=True, cancelled=True)
SOME = (PartitionId(0), PartitionId(300))

OPEN_LOAD = OpenLoad(
    job_id="j",
    mode=LoadMode.OVERWRITE,
    prefix=b"p\xff",
    stream_batch=StreamBatch("q", 5),
    description="d",
    timeout_ms=10_000,
)

ROLE = Role(
    name="r",
    grants=(
        Grant(effect=Effect.DENY, actions=(Action.READ, Action.WRITE), prefix=b"p\xff"),
        Grant(effect=Effect.ALLOW, actions=(Action.VIEW,)),
    ),
)
USER = User(name="u", roles=("r",), blocked=True, certificates_from_s=300)
TOKEN = Token(
    id="abcdefghij",
    user="u",
    sha256=bytes(32),
    created_s=300,
    expires_s=400,
    description="d",
)

VIP = Keyspace(
    keyspace_id=KeyspaceId(0),
    name="vip",
    base=8,
    partition_count=2,
    partitioner="md5(tag)",
    partitioner_fingerprint=b"f",
    replication_factor=2,
    min_in_sync=1,
    max_value_bytes=100,
    pool="p",
)
GOLDEN: list[tuple[Command, str]] = [
    (
        CreateCluster(config=cluster_config()),
        "080112310a2f0a0663306666656512076d75726d757232180820012801300138800840c80148dc0b"
        "50e80758900360e80768c0cf24",
    ),
    (
        replace(register("n1", last=4, known=5, rack="r"), weight=50),
        "08011a210a026e3112046e313a311a0172220873746f72652d6e3128043202723138054032",
    ),
    (ConfirmRegistration(node_number=N1, node_epoch=2), "0801220408011002"),
    (AssignPartitions(replicas=((N1, N2), (N2, N1))), "08012a0c0a040a0201020a040a020201"),
    (FenceNode(node_number=N2, node_epoch=9), "0801320408021009"),
    (
        PartitionsHosted(node_number=N1, node_epoch=2, hosted=(HOSTED,)),
        "08013a0e080110021a01052201032a02ac02",
    ),
    (
        AlterPartitions(
            node_number=N1,
            node_epoch=2,
            changes=(
                PartitionChange(
                    partition_id=PartitionId(5),
                    primary_epoch=3,
                    partition_epoch=300,
                    in_sync=(N1, N2),
                    hand_over_to=N2,
                ),
            ),
        ),
        "08014213080110021a0d0805100318ac02220201022802",
    ),
    (
        AcceptPlan(plan_id="p", moves=(MOVE, TURNED_BACK)),
        "08014a370a0170121708051201011a020201220762616c616e63652a0170400312191201011a0202"
        "01220762616c616e63652a0170300138014003",
    ),
    (StartMoves(partition_ids=SOME), "080152050a0300ac02"),
    (FinishMoves(partition_ids=SOME), "08015a050a0300ac02"),
    (CancelMoves(partition_ids=SOME), "080162050a0300ac02"),
    (
        SetMoveSettings(
            settings=MoveSettings(paused=True, bytes_per_second=1000, moves_per_node=2)
        ),
        "08016a090a07080110e8071802",
    ),
    (SetNodeStatus(node_number=N2, status=NodeStatus.LEFT), "0801720408021004"),
    (
        WantPrimaries(wishes=((PartitionId(5), N2), (PartitionId(0), NO_NODE))),
        "08017a080a04080510020a00",
    ),
    (
        ForcePrimary(partition_id=PartitionId(5), node_number=N2, partition_epoch=300),
        "08018201070805100218ac02",
    ),
    (SetReplicationFactor(replication_factor=3), "08018a01020803"),
    (OPEN_LOAD, "08019201160a016a10021a0270ff22050a017110052a016430904e"),
    (
        OpenLoad(job_id="j", mode=LoadMode.APPEND, stream_batch=StreamBatch("q", 0)),
        "080192010e0a016a100122030a017130c0ee6d",
    ),
    (
        CommitLoad(load_id=300, attempts=(7, 1 << 63), partition_ids=SOME, rows=5, bytes=600),
        "08019a011f08ac021210070000000000000000000000000000801a0300ac02200528d804",
    ),
    (AbortLoad(load_id=300, reason="r"), "0801a2010608ac02120172"),
    (PartitionsMerged(load_id=300, partition_ids=SOME), "0801aa010808ac02120300ac02"),
    (
        PutRole(role=ROLE, expected_version=0),
        "0801b2011a0a160a0172120a0802120201021a0270ff120508011201061000",
    ),
    (DropRole(name="r"), "0801ba01030a0172"),
    (PutUser(user=USER), "0801c2010d0a0b0a0175120172180120ac02"),
    (DropUser(name="u", expected_version=300), "0801ca01060a017510ac02"),
    (
        AddToken(token=TOKEN),
        "0801d2013c0a3a0a0a6162636465666768696a1201751a20" + "00" * 32 + "20ac02289003320164",
    ),
    (DropToken(token_id="abcdefghij"), "0801da010c0a0a6162636465666768696a"),
    (RevokeCertificate(serial="1f"), "0801e201040a023166"),
    (RestoreCertificate(serial="1f"), "0801ea01040a023166"),
    (
        CreateKeyspace(
            keyspace=VIP, replicas=((NodeNumber(1), NodeNumber(2)), (NodeNumber(2), NodeNumber(1)))
        ),
        "0801f2012d0a1f1203766970180820022a086d643528746167293201663802400148645201701204"
        "0a02010212040a020201",
    ),
    (
        AlterKeyspace(keyspace=replace(VIP, keyspace_id=KeyspaceId(3))),
        "0801fa01230a2108031203766970180820022a086d64352874616729320166380240014864520170",
    ),
    (
        DropKeyspace(keyspace_id=KeyspaceId(3)),
        "08018202020803",
    ),
    (
        ForgetKeyspace(keyspace_id=KeyspaceId(3)),
        "08018a02020803",
    ),
    (
        CreateGroup(name="g", strategy=GroupStrategy.STICKY, created_at_ms=300),
        "08019202080a0167100318ac02",
    ),
    (
        RaiseGeneration(group_id=300, generation=7, session_ms=30_000),
        "08019a020908ac02100718b0ea01",
    ),
    (DeleteGroup(group_id=300), "0801a2020308ac02"),
]
IDS = [type(command).__name__ for command, _ in GOLDEN]


@pytest.mark.parametrize(("command", "encoded"), GOLDEN, ids=IDS)
def test_command_bytes_are_the_golden_ones(command: Command, encoded: str) -> None:
    assert command_to_bytes(command).hex() == encoded
    assert command_from_bytes(bytes.fromhex(encoded)) == command


def test_every_kind_of_command_has_its_golden_bytes() -> None:
    kinds = {f.name for f in state_pb2.Command.DESCRIPTOR.oneofs_by_name["kind"].fields}
    written = {state_pb2.Command.FromString(bytes.fromhex(e)).WhichOneof("kind") for _, e in GOLDEN}
    assert written == kinds


def some_state() -> ClusterState:
    """Two moves, of which one runs; a node that drains; a partition that waits for its store."""
    state = bootstrapped([(1,), (2,), (1,)], nodes=2)
    state.apply(plan_of(((1,), (2,)), ((2,), (1,))))
    start(state)
    state.apply(SetMoveSettings(settings=MoveSettings(bytes_per_second=9, moves_per_node=4)))
    state.apply(SetNodeStatus(node_number=N2, status=NodeStatus.DRAINING))
    fence(state, 2)
    restart(state, 1, store="other")
    return state


def test_snapshot_bytes_are_the_golden_ones_and_come_back_whole() -> None:
    state = some_state()
    image = state.image()
    assert [record.draining for record in image.nodes] == [False, True]
    assert [move.running for move in image.moves] == [True, False]
    assert [entry.partition_id for entry in image.stranded] == [0, 2]
    encoded = image_to_bytes(image)
    assert encoded.hex() == SNAPSHOT
    assert image_from_bytes(encoded) == image
    assert image_from_bytes(image_to_bytes(EMPTY_IMAGE)) == EMPTY_IMAGE


SNAPSHOT = (
    "0801122f0a0663306666656512076d75726d757232180320012801300238800840c80148dc0b50e807589003"
    "60e80768c0cf24180b20022a210a1b080112026e311a046e313a31280230023a056f74686572400b48641202"
    "72322a280a1e080212026e321a046e323a31280130013a0873746f72652d6e32400a48641202723120013801"
    "321612020201280230043a010242010148035002580b6002321208011201021a01022802300348035001580a"
    "320f08021201012802300348035002580b3a191201011a0102220762616c616e63652a04706c616e30014002"
    "3a1908011201021a0101220762616c616e63652a04706c616e40024204100918044a0e10011a0873746f7265"
    "2d6e3120014a10080210011a0873746f72652d6e312001"
)


def test_snapshot_bytes_with_loads_are_the_golden_ones_and_come_back_whole() -> None:
    log = Log(bootstrapped([(1,), (2,)], nodes=2))
    merging = log.apply(OPEN_LOAD)
    log.in_state(ABORTED, job_id="k")
    log.open("l")
    assert isinstance(merging, LoadOutcome)
    log.apply(commit_load(merging.load_id, (7, 1 << 63), (1,)))
    log.apply(merged(merging.load_id, 0))
    image = log.state.image()
    assert [load.job_id for load in image.loads.active] == ["j", "l"]
    encoded = image_to_bytes(image)
    of_loads = state_pb2.StateSnapshot.FromString(encoded)
    for name in ("cluster", "nodes", "rows", "move_settings"):
        of_loads.ClearField(name)
    assert of_loads.SerializeToString(deterministic=True).hex() == SNAPSHOT_OF_LOADS
    assert image_from_bytes(encoded) == image


SNAPSHOT_OF_LOADS = (
    "0801180b2002524b080b12016a1802220270ff2a050a0171100532016438904e40024a100700000000000000"
    "00000000000000805210ed8c9c1b81e6a2d174a9902430a90a8a5802620101686470d00f80010f520d080e12016c18"
    "0138c0ee6d40015a15080c12016b180138c0ee6d40047a06656e6f75676862050a01711005"
)


def test_snapshot_with_access_comes_back_whole_and_without_is_the_one_of_the_build_before() -> None:
    state = some_state()
    assert state.image().access == NO_ACCESS_STATE  # its bytes are the golden ones, see above
    for command in (
        PutRole(role=ROLE),
        PutUser(user=USER),
        AddToken(token=TOKEN),
        RevokeCertificate(serial="1f"),
    ):
        assert isinstance(state.apply(command), AccessChanged)
    image = state.image()
    encoded = image_to_bytes(image)
    assert encoded.hex() == SNAPSHOT + SNAPSHOT_OF_ACCESS
    assert image_from_bytes(encoded) == image
    assert ClusterState(image_from_bytes(encoded)).image() == image


SNAPSHOT_OF_ACCESS = (
    "7267080412160a0172120a0802120201021a0270ff120508011201061a0b0a0175120172180120ac02"
    "223a0a0a6162636465666768696a1201751a20" + "00" * 32 + "20ac022890033201642a023166"
)


def test_snapshot_with_groups_comes_back_whole_and_without_is_the_one_of_the_build_before() -> None:
    state = some_state()
    state.apply(CreateGroup(name="g", strategy=GroupStrategy.RANGE, created_at_ms=300), 40)
    state.apply(RaiseGeneration(group_id=40, generation=0, session_ms=30_000))
    encoded = image_to_bytes(state.image())
    assert encoded.hex() == SNAPSHOT + "8a0110082812016718012001" + "28b0ea0130ac02"
    assert image_from_bytes(encoded) == state.image()
    assert ClusterState(image_from_bytes(encoded)).image() == state.image()


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


# --- nothing is lost, whatever it holds --------------------------------------------------------

SPECIAL: dict[Any, st.SearchStrategy[Any]] = {}
SPECIAL[NodeRecord] = records(NodeRecord, SPECIAL).map(
    lambda record: replace(
        record,
        info=replace(record.info, registration_digest=registration_digest(record.registration_id)),
    )
)


@pytest.mark.parametrize("kind", get_args(Command))
@given(data=st.data())
def test_any_command_comes_back_whole(kind: type[Command], data: st.DataObject) -> None:
    command = data.draw(records(kind, SPECIAL))
    assert command_from_bytes(command_to_bytes(command)) == command


@given(records(StateImage, SPECIAL))
def test_any_image_comes_back_whole(image: StateImage) -> None:
    assert image_from_bytes(image_to_bytes(image)) == image


SERVED: list[tuple[Any, type[Any], dict[str, Any]]] = [
    (cluster_services._HOST_COMMAND, HostedPartition, {}),
    (cluster_services._CHANGE, PartitionChange, {}),
    (cluster_services._REGISTRATION, Registration, {"protocol_version": 1, "cluster_id": "c"}),
    (loads_service._WISH, LoadWish, {"cluster_id": "c", "only_check": False}),
    (loads_service._COMMIT, CommitLoad, {"cluster_id": "c"}),
    (admin_service.PROGRESS, Progress, {}),
    (admin_service._ALTERATION, Alteration, {}),
    (admin_service._REFUSAL, Refusal, {}),
    (admin_service._PLAN, Plan, {"table_version": 5}),
]


@pytest.mark.parametrize(
    ("codec", "record", "filled"), SERVED, ids=[record.__name__ for _, record, _ in SERVED]
)
@given(data=st.data())
def test_any_record_of_the_services_comes_back_whole(
    codec: Any, record: type[Any], filled: dict[str, Any], data: st.DataObject
) -> None:
    special = {**SPECIAL, "mode": st.integers(0, 2)} if record is LoadWish else SPECIAL
    served = data.draw(records(record, special))
    given = {"owner": served.owner} if isinstance(served, LoadWish) else {}  # known otherwise
    assert codec.decode(codec.encode(served, **filled), **given) == served


def test_every_codec_of_the_services_is_tried() -> None:
    written_only = {"_PLANNED_MOVE", "_MOVE", "_INFO"}  # which the services' own tests read
    tried = {id(codec) for codec, _, _ in SERVED}
    for module in (admin_service, cluster_services, loads_service):
        for name, value in vars(module).items():
            if isinstance(value, Codec):
                assert id(value) in tried or name in written_only, name


def test_stage_of_a_newer_node_is_read_as_waiting() -> None:
    message = membership_pb2.ReplicaProgress(partition_id=1, stage=9)  # type: ignore[arg-type]
    assert admin_service.PROGRESS.decode(message).stage is Stage.WAITING


@given(before=records(StateImage, SPECIAL), after=records(StateImage, SPECIAL))
def test_snapshot_is_what_protobuf_writes_whatever_rows_are_known(
    before: StateImage, after: StateImage
) -> None:
    forms = RowForms()
    for image in (before, after, before):
        encoded = image_to_bytes(image, forms)
        message = state_pb2.StateSnapshot.FromString(encoded)
        assert message.SerializeToString(deterministic=True) == encoded
        assert image_from_bytes(encoded) == image


def test_row_forms_make_a_row_once_and_let_others_go_on() -> None:
    state = bootstrapped([(1, 2, 3)] * 600, nodes=3)
    forms = RowForms()
    let_go: list[None] = []
    rows = state.image().rows
    first = forms.of(rows, lambda: let_go.append(None))
    assert len(let_go) == 600 // 256
    assert forms.of(rows, lambda: let_go.append(None)) == first
    assert len(let_go) == 600 // 256
    many = replace(rows[1], replicas=tuple(map(NodeNumber, range(1, 300))), partition_epoch=1 << 50)
    changed = forms.of((rows[0], many))
    update = table_pb2.TableUpdate.FromString(changed)
    assert list(map(_ROW.decode, update.rows)) == [rows[0], many]


def test_replicated_state_restored_from_a_snapshot_goes_on_alike() -> None:
    first, second = ReplicatedState(), ReplicatedState()
    first.state = bootstrapped([(1,), (2,)], nodes=2)
    second.restore(first.capture()())
    command = command_to_bytes(register("n1", last=1, known=1, registration="r2"))
    assert first.apply(9, command) == second.apply(9, command)
    assert first.capture()() == second.capture()()
    assert isinstance(second.state, ClusterState)
