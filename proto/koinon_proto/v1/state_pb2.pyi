from koinon_proto.v1 import access_pb2 as _access_pb2
from koinon_proto.v1 import groups_pb2 as _groups_pb2
from koinon_proto.v1 import loads_pb2 as _loads_pb2
from koinon_proto.v1 import table_pb2 as _table_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Command(_message.Message):
    __slots__ = ("format_version", "create_cluster", "register_node", "confirm_registration", "assign_partitions", "fence_node", "partitions_hosted", "alter_partitions", "accept_plan", "start_moves", "finish_moves", "cancel_moves", "set_move_settings", "set_node_status", "want_primaries", "force_primary", "set_replication_factor", "open_load", "commit_load", "abort_load", "partitions_merged", "put_role", "drop_role", "put_user", "drop_user", "add_token", "drop_token", "revoke_certificate", "restore_certificate", "create_keyspace", "alter_keyspace", "drop_keyspace", "forget_keyspace", "create_group", "raise_generation", "delete_group")
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    CREATE_CLUSTER_FIELD_NUMBER: _ClassVar[int]
    REGISTER_NODE_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    ASSIGN_PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    FENCE_NODE_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_HOSTED_FIELD_NUMBER: _ClassVar[int]
    ALTER_PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_PLAN_FIELD_NUMBER: _ClassVar[int]
    START_MOVES_FIELD_NUMBER: _ClassVar[int]
    FINISH_MOVES_FIELD_NUMBER: _ClassVar[int]
    CANCEL_MOVES_FIELD_NUMBER: _ClassVar[int]
    SET_MOVE_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    SET_NODE_STATUS_FIELD_NUMBER: _ClassVar[int]
    WANT_PRIMARIES_FIELD_NUMBER: _ClassVar[int]
    FORCE_PRIMARY_FIELD_NUMBER: _ClassVar[int]
    SET_REPLICATION_FACTOR_FIELD_NUMBER: _ClassVar[int]
    OPEN_LOAD_FIELD_NUMBER: _ClassVar[int]
    COMMIT_LOAD_FIELD_NUMBER: _ClassVar[int]
    ABORT_LOAD_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_MERGED_FIELD_NUMBER: _ClassVar[int]
    PUT_ROLE_FIELD_NUMBER: _ClassVar[int]
    DROP_ROLE_FIELD_NUMBER: _ClassVar[int]
    PUT_USER_FIELD_NUMBER: _ClassVar[int]
    DROP_USER_FIELD_NUMBER: _ClassVar[int]
    ADD_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DROP_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REVOKE_CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    RESTORE_CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    CREATE_KEYSPACE_FIELD_NUMBER: _ClassVar[int]
    ALTER_KEYSPACE_FIELD_NUMBER: _ClassVar[int]
    DROP_KEYSPACE_FIELD_NUMBER: _ClassVar[int]
    FORGET_KEYSPACE_FIELD_NUMBER: _ClassVar[int]
    CREATE_GROUP_FIELD_NUMBER: _ClassVar[int]
    RAISE_GENERATION_FIELD_NUMBER: _ClassVar[int]
    DELETE_GROUP_FIELD_NUMBER: _ClassVar[int]
    format_version: int
    create_cluster: CreateClusterCommand
    register_node: RegisterNodeCommand
    confirm_registration: ConfirmRegistrationCommand
    assign_partitions: AssignPartitionsCommand
    fence_node: FenceNodeCommand
    partitions_hosted: PartitionsHostedCommand
    alter_partitions: AlterPartitionsCommand
    accept_plan: AcceptPlanCommand
    start_moves: StartMovesCommand
    finish_moves: FinishMovesCommand
    cancel_moves: CancelMovesCommand
    set_move_settings: SetMoveSettingsCommand
    set_node_status: SetNodeStatusCommand
    want_primaries: WantPrimariesCommand
    force_primary: ForcePrimaryCommand
    set_replication_factor: SetReplicationFactorCommand
    open_load: OpenLoadCommand
    commit_load: CommitLoadCommand
    abort_load: AbortLoadCommand
    partitions_merged: PartitionsMergedCommand
    put_role: PutRoleCommand
    drop_role: DropRoleCommand
    put_user: PutUserCommand
    drop_user: DropUserCommand
    add_token: AddTokenCommand
    drop_token: DropTokenCommand
    revoke_certificate: RevokeCertificateCommand
    restore_certificate: RestoreCertificateCommand
    create_keyspace: CreateKeyspaceCommand
    alter_keyspace: AlterKeyspaceCommand
    drop_keyspace: DropKeyspaceCommand
    forget_keyspace: ForgetKeyspaceCommand
    create_group: CreateGroupCommand
    raise_generation: RaiseGenerationCommand
    delete_group: DeleteGroupCommand
    def __init__(self, format_version: _Optional[int] = ..., create_cluster: _Optional[_Union[CreateClusterCommand, _Mapping]] = ..., register_node: _Optional[_Union[RegisterNodeCommand, _Mapping]] = ..., confirm_registration: _Optional[_Union[ConfirmRegistrationCommand, _Mapping]] = ..., assign_partitions: _Optional[_Union[AssignPartitionsCommand, _Mapping]] = ..., fence_node: _Optional[_Union[FenceNodeCommand, _Mapping]] = ..., partitions_hosted: _Optional[_Union[PartitionsHostedCommand, _Mapping]] = ..., alter_partitions: _Optional[_Union[AlterPartitionsCommand, _Mapping]] = ..., accept_plan: _Optional[_Union[AcceptPlanCommand, _Mapping]] = ..., start_moves: _Optional[_Union[StartMovesCommand, _Mapping]] = ..., finish_moves: _Optional[_Union[FinishMovesCommand, _Mapping]] = ..., cancel_moves: _Optional[_Union[CancelMovesCommand, _Mapping]] = ..., set_move_settings: _Optional[_Union[SetMoveSettingsCommand, _Mapping]] = ..., set_node_status: _Optional[_Union[SetNodeStatusCommand, _Mapping]] = ..., want_primaries: _Optional[_Union[WantPrimariesCommand, _Mapping]] = ..., force_primary: _Optional[_Union[ForcePrimaryCommand, _Mapping]] = ..., set_replication_factor: _Optional[_Union[SetReplicationFactorCommand, _Mapping]] = ..., open_load: _Optional[_Union[OpenLoadCommand, _Mapping]] = ..., commit_load: _Optional[_Union[CommitLoadCommand, _Mapping]] = ..., abort_load: _Optional[_Union[AbortLoadCommand, _Mapping]] = ..., partitions_merged: _Optional[_Union[PartitionsMergedCommand, _Mapping]] = ..., put_role: _Optional[_Union[PutRoleCommand, _Mapping]] = ..., drop_role: _Optional[_Union[DropRoleCommand, _Mapping]] = ..., put_user: _Optional[_Union[PutUserCommand, _Mapping]] = ..., drop_user: _Optional[_Union[DropUserCommand, _Mapping]] = ..., add_token: _Optional[_Union[AddTokenCommand, _Mapping]] = ..., drop_token: _Optional[_Union[DropTokenCommand, _Mapping]] = ..., revoke_certificate: _Optional[_Union[RevokeCertificateCommand, _Mapping]] = ..., restore_certificate: _Optional[_Union[RestoreCertificateCommand, _Mapping]] = ..., create_keyspace: _Optional[_Union[CreateKeyspaceCommand, _Mapping]] = ..., alter_keyspace: _Optional[_Union[AlterKeyspaceCommand, _Mapping]] = ..., drop_keyspace: _Optional[_Union[DropKeyspaceCommand, _Mapping]] = ..., forget_keyspace: _Optional[_Union[ForgetKeyspaceCommand, _Mapping]] = ..., create_group: _Optional[_Union[CreateGroupCommand, _Mapping]] = ..., raise_generation: _Optional[_Union[RaiseGenerationCommand, _Mapping]] = ..., delete_group: _Optional[_Union[DeleteGroupCommand, _Mapping]] = ...) -> None: ...

class CreateClusterCommand(_message.Message):
    __slots__ = ("config",)
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    config: _table_pb2.ClusterConfig
    def __init__(self, config: _Optional[_Union[_table_pb2.ClusterConfig, _Mapping]] = ...) -> None: ...

class RegisterNodeCommand(_message.Message):
    __slots__ = ("node_id", "address", "rack", "store_id", "last_node_epoch", "registration_id", "known_node_epoch", "weight", "redis_address", "pool", "redis_ports")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RACK_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_NODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_ID_FIELD_NUMBER: _ClassVar[int]
    KNOWN_NODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    REDIS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    REDIS_PORTS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    address: str
    rack: str
    store_id: str
    last_node_epoch: int
    registration_id: str
    known_node_epoch: int
    weight: int
    redis_address: str
    pool: str
    redis_ports: _containers.RepeatedCompositeFieldContainer[_table_pb2.RedisPort]
    def __init__(self, node_id: _Optional[str] = ..., address: _Optional[str] = ..., rack: _Optional[str] = ..., store_id: _Optional[str] = ..., last_node_epoch: _Optional[int] = ..., registration_id: _Optional[str] = ..., known_node_epoch: _Optional[int] = ..., weight: _Optional[int] = ..., redis_address: _Optional[str] = ..., pool: _Optional[str] = ..., redis_ports: _Optional[_Iterable[_Union[_table_pb2.RedisPort, _Mapping]]] = ...) -> None: ...

class ConfirmRegistrationCommand(_message.Message):
    __slots__ = ("node_number", "node_epoch")
    NODE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    NODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    node_number: int
    node_epoch: int
    def __init__(self, node_number: _Optional[int] = ..., node_epoch: _Optional[int] = ...) -> None: ...

class AssignPartitionsCommand(_message.Message):
    __slots__ = ("rows",)
    class Replicas(_message.Message):
        __slots__ = ("node_numbers",)
        NODE_NUMBERS_FIELD_NUMBER: _ClassVar[int]
        node_numbers: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, node_numbers: _Optional[_Iterable[int]] = ...) -> None: ...
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[AssignPartitionsCommand.Replicas]
    def __init__(self, rows: _Optional[_Iterable[_Union[AssignPartitionsCommand.Replicas, _Mapping]]] = ...) -> None: ...

class FenceNodeCommand(_message.Message):
    __slots__ = ("node_number", "node_epoch")
    NODE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    NODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    node_number: int
    node_epoch: int
    def __init__(self, node_number: _Optional[int] = ..., node_epoch: _Optional[int] = ...) -> None: ...

class PartitionsHostedCommand(_message.Message):
    __slots__ = ("node_number", "node_epoch", "partition_ids", "primary_epochs", "partition_epochs")
    NODE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    NODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    PRIMARY_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    PARTITION_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    node_number: int
    node_epoch: int
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    primary_epochs: _containers.RepeatedScalarFieldContainer[int]
    partition_epochs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, node_number: _Optional[int] = ..., node_epoch: _Optional[int] = ..., partition_ids: _Optional[_Iterable[int]] = ..., primary_epochs: _Optional[_Iterable[int]] = ..., partition_epochs: _Optional[_Iterable[int]] = ...) -> None: ...

class AlterPartitionsCommand(_message.Message):
    __slots__ = ("node_number", "node_epoch", "changes")
    class Change(_message.Message):
        __slots__ = ("partition_id", "primary_epoch", "partition_epoch", "in_sync", "hand_over_to")
        PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
        PRIMARY_EPOCH_FIELD_NUMBER: _ClassVar[int]
        PARTITION_EPOCH_FIELD_NUMBER: _ClassVar[int]
        IN_SYNC_FIELD_NUMBER: _ClassVar[int]
        HAND_OVER_TO_FIELD_NUMBER: _ClassVar[int]
        partition_id: int
        primary_epoch: int
        partition_epoch: int
        in_sync: _containers.RepeatedScalarFieldContainer[int]
        hand_over_to: int
        def __init__(self, partition_id: _Optional[int] = ..., primary_epoch: _Optional[int] = ..., partition_epoch: _Optional[int] = ..., in_sync: _Optional[_Iterable[int]] = ..., hand_over_to: _Optional[int] = ...) -> None: ...
    NODE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    NODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    node_number: int
    node_epoch: int
    changes: _containers.RepeatedCompositeFieldContainer[AlterPartitionsCommand.Change]
    def __init__(self, node_number: _Optional[int] = ..., node_epoch: _Optional[int] = ..., changes: _Optional[_Iterable[_Union[AlterPartitionsCommand.Change, _Mapping]]] = ...) -> None: ...

class Move(_message.Message):
    __slots__ = ("partition_id", "origin", "target", "reason", "plan_id", "running", "cancelled", "plan_moves")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    PLAN_MOVES_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    origin: _containers.RepeatedScalarFieldContainer[int]
    target: _containers.RepeatedScalarFieldContainer[int]
    reason: str
    plan_id: str
    running: bool
    cancelled: bool
    plan_moves: int
    def __init__(self, partition_id: _Optional[int] = ..., origin: _Optional[_Iterable[int]] = ..., target: _Optional[_Iterable[int]] = ..., reason: _Optional[str] = ..., plan_id: _Optional[str] = ..., running: bool = ..., cancelled: bool = ..., plan_moves: _Optional[int] = ...) -> None: ...

class AcceptPlanCommand(_message.Message):
    __slots__ = ("plan_id", "moves")
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    plan_id: str
    moves: _containers.RepeatedCompositeFieldContainer[Move]
    def __init__(self, plan_id: _Optional[str] = ..., moves: _Optional[_Iterable[_Union[Move, _Mapping]]] = ...) -> None: ...

class StartMovesCommand(_message.Message):
    __slots__ = ("partition_ids",)
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, partition_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class FinishMovesCommand(_message.Message):
    __slots__ = ("partition_ids",)
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, partition_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CancelMovesCommand(_message.Message):
    __slots__ = ("partition_ids",)
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, partition_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SetMoveSettingsCommand(_message.Message):
    __slots__ = ("settings",)
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    settings: _table_pb2.MoveSettings
    def __init__(self, settings: _Optional[_Union[_table_pb2.MoveSettings, _Mapping]] = ...) -> None: ...

class SetNodeStatusCommand(_message.Message):
    __slots__ = ("node_number", "status")
    NODE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    node_number: int
    status: _table_pb2.NodeStatus
    def __init__(self, node_number: _Optional[int] = ..., status: _Optional[_Union[_table_pb2.NodeStatus, str]] = ...) -> None: ...

class WantPrimariesCommand(_message.Message):
    __slots__ = ("wishes",)
    class Wish(_message.Message):
        __slots__ = ("partition_id", "node_number")
        PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
        NODE_NUMBER_FIELD_NUMBER: _ClassVar[int]
        partition_id: int
        node_number: int
        def __init__(self, partition_id: _Optional[int] = ..., node_number: _Optional[int] = ...) -> None: ...
    WISHES_FIELD_NUMBER: _ClassVar[int]
    wishes: _containers.RepeatedCompositeFieldContainer[WantPrimariesCommand.Wish]
    def __init__(self, wishes: _Optional[_Iterable[_Union[WantPrimariesCommand.Wish, _Mapping]]] = ...) -> None: ...

class ForcePrimaryCommand(_message.Message):
    __slots__ = ("partition_id", "node_number", "partition_epoch")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    PARTITION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    node_number: int
    partition_epoch: int
    def __init__(self, partition_id: _Optional[int] = ..., node_number: _Optional[int] = ..., partition_epoch: _Optional[int] = ...) -> None: ...

class SetReplicationFactorCommand(_message.Message):
    __slots__ = ("replication_factor", "keyspace_id")
    REPLICATION_FACTOR_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    replication_factor: int
    keyspace_id: int
    def __init__(self, replication_factor: _Optional[int] = ..., keyspace_id: _Optional[int] = ...) -> None: ...

class CreateKeyspaceCommand(_message.Message):
    __slots__ = ("keyspace", "rows")
    KEYSPACE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    keyspace: _table_pb2.Keyspace
    rows: _containers.RepeatedCompositeFieldContainer[AssignPartitionsCommand.Replicas]
    def __init__(self, keyspace: _Optional[_Union[_table_pb2.Keyspace, _Mapping]] = ..., rows: _Optional[_Iterable[_Union[AssignPartitionsCommand.Replicas, _Mapping]]] = ...) -> None: ...

class AlterKeyspaceCommand(_message.Message):
    __slots__ = ("keyspace",)
    KEYSPACE_FIELD_NUMBER: _ClassVar[int]
    keyspace: _table_pb2.Keyspace
    def __init__(self, keyspace: _Optional[_Union[_table_pb2.Keyspace, _Mapping]] = ...) -> None: ...

class DropKeyspaceCommand(_message.Message):
    __slots__ = ("keyspace_id",)
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    keyspace_id: int
    def __init__(self, keyspace_id: _Optional[int] = ...) -> None: ...

class ForgetKeyspaceCommand(_message.Message):
    __slots__ = ("keyspace_id",)
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    keyspace_id: int
    def __init__(self, keyspace_id: _Optional[int] = ...) -> None: ...

class OpenLoadCommand(_message.Message):
    __slots__ = ("job_id", "mode", "prefix", "stream_batch", "description", "timeout_ms", "owner", "keyspace_id")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    STREAM_BATCH_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    mode: _loads_pb2.LoadMode
    prefix: bytes
    stream_batch: _loads_pb2.StreamBatch
    description: str
    timeout_ms: int
    owner: str
    keyspace_id: int
    def __init__(self, job_id: _Optional[str] = ..., mode: _Optional[_Union[_loads_pb2.LoadMode, str]] = ..., prefix: _Optional[bytes] = ..., stream_batch: _Optional[_Union[_loads_pb2.StreamBatch, _Mapping]] = ..., description: _Optional[str] = ..., timeout_ms: _Optional[int] = ..., owner: _Optional[str] = ..., keyspace_id: _Optional[int] = ...) -> None: ...

class CommitLoadCommand(_message.Message):
    __slots__ = ("load_id", "attempts", "partition_ids", "rows", "bytes")
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    load_id: int
    attempts: _containers.RepeatedScalarFieldContainer[int]
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    rows: int
    bytes: int
    def __init__(self, load_id: _Optional[int] = ..., attempts: _Optional[_Iterable[int]] = ..., partition_ids: _Optional[_Iterable[int]] = ..., rows: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class AbortLoadCommand(_message.Message):
    __slots__ = ("load_id", "reason")
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    load_id: int
    reason: str
    def __init__(self, load_id: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class PartitionsMergedCommand(_message.Message):
    __slots__ = ("load_id", "partition_ids")
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    load_id: int
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, load_id: _Optional[int] = ..., partition_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PutRoleCommand(_message.Message):
    __slots__ = ("role", "expected_version")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    role: _access_pb2.Role
    expected_version: int
    def __init__(self, role: _Optional[_Union[_access_pb2.Role, _Mapping]] = ..., expected_version: _Optional[int] = ...) -> None: ...

class DropRoleCommand(_message.Message):
    __slots__ = ("name", "expected_version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    expected_version: int
    def __init__(self, name: _Optional[str] = ..., expected_version: _Optional[int] = ...) -> None: ...

class PutUserCommand(_message.Message):
    __slots__ = ("user", "expected_version")
    USER_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    user: _access_pb2.User
    expected_version: int
    def __init__(self, user: _Optional[_Union[_access_pb2.User, _Mapping]] = ..., expected_version: _Optional[int] = ...) -> None: ...

class DropUserCommand(_message.Message):
    __slots__ = ("name", "expected_version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    expected_version: int
    def __init__(self, name: _Optional[str] = ..., expected_version: _Optional[int] = ...) -> None: ...

class AddTokenCommand(_message.Message):
    __slots__ = ("token", "expected_version")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    token: _access_pb2.Token
    expected_version: int
    def __init__(self, token: _Optional[_Union[_access_pb2.Token, _Mapping]] = ..., expected_version: _Optional[int] = ...) -> None: ...

class DropTokenCommand(_message.Message):
    __slots__ = ("token_id", "expected_version")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    token_id: str
    expected_version: int
    def __init__(self, token_id: _Optional[str] = ..., expected_version: _Optional[int] = ...) -> None: ...

class RevokeCertificateCommand(_message.Message):
    __slots__ = ("serial", "expected_version")
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    serial: str
    expected_version: int
    def __init__(self, serial: _Optional[str] = ..., expected_version: _Optional[int] = ...) -> None: ...

class RestoreCertificateCommand(_message.Message):
    __slots__ = ("serial", "expected_version")
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    serial: str
    expected_version: int
    def __init__(self, serial: _Optional[str] = ..., expected_version: _Optional[int] = ...) -> None: ...

class CreateGroupCommand(_message.Message):
    __slots__ = ("name", "strategy", "created_at_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    strategy: _groups_pb2.GroupStrategy
    created_at_ms: int
    def __init__(self, name: _Optional[str] = ..., strategy: _Optional[_Union[_groups_pb2.GroupStrategy, str]] = ..., created_at_ms: _Optional[int] = ...) -> None: ...

class RaiseGenerationCommand(_message.Message):
    __slots__ = ("group_id", "generation", "session_ms")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_MS_FIELD_NUMBER: _ClassVar[int]
    group_id: int
    generation: int
    session_ms: int
    def __init__(self, group_id: _Optional[int] = ..., generation: _Optional[int] = ..., session_ms: _Optional[int] = ...) -> None: ...

class DeleteGroupCommand(_message.Message):
    __slots__ = ("group_id",)
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    group_id: int
    def __init__(self, group_id: _Optional[int] = ...) -> None: ...

class StateSnapshot(_message.Message):
    __slots__ = ("format_version", "cluster", "table_version", "last_node_number", "nodes", "rows", "moves", "move_settings", "stranded", "loads", "ended_loads", "stream_batches", "load_id_base", "access", "keyspaces", "last_keyspace_id", "groups")
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    LAST_NODE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    MOVE_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    STRANDED_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    ENDED_LOADS_FIELD_NUMBER: _ClassVar[int]
    STREAM_BATCHES_FIELD_NUMBER: _ClassVar[int]
    LOAD_ID_BASE_FIELD_NUMBER: _ClassVar[int]
    ACCESS_FIELD_NUMBER: _ClassVar[int]
    KEYSPACES_FIELD_NUMBER: _ClassVar[int]
    LAST_KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    format_version: int
    cluster: _table_pb2.ClusterConfig
    table_version: int
    last_node_number: int
    nodes: _containers.RepeatedCompositeFieldContainer[NodeRecord]
    rows: _containers.RepeatedCompositeFieldContainer[_table_pb2.PartitionRow]
    moves: _containers.RepeatedCompositeFieldContainer[Move]
    move_settings: _table_pb2.MoveSettings
    stranded: _containers.RepeatedCompositeFieldContainer[StrandedPartition]
    loads: _containers.RepeatedCompositeFieldContainer[Load]
    ended_loads: _containers.RepeatedCompositeFieldContainer[Load]
    stream_batches: _containers.RepeatedCompositeFieldContainer[_loads_pb2.StreamBatch]
    load_id_base: int
    access: _access_pb2.AccessState
    keyspaces: _table_pb2.KeyspaceList
    last_keyspace_id: int
    groups: _containers.RepeatedCompositeFieldContainer[ConsumerGroup]
    def __init__(self, format_version: _Optional[int] = ..., cluster: _Optional[_Union[_table_pb2.ClusterConfig, _Mapping]] = ..., table_version: _Optional[int] = ..., last_node_number: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[NodeRecord, _Mapping]]] = ..., rows: _Optional[_Iterable[_Union[_table_pb2.PartitionRow, _Mapping]]] = ..., moves: _Optional[_Iterable[_Union[Move, _Mapping]]] = ..., move_settings: _Optional[_Union[_table_pb2.MoveSettings, _Mapping]] = ..., stranded: _Optional[_Iterable[_Union[StrandedPartition, _Mapping]]] = ..., loads: _Optional[_Iterable[_Union[Load, _Mapping]]] = ..., ended_loads: _Optional[_Iterable[_Union[Load, _Mapping]]] = ..., stream_batches: _Optional[_Iterable[_Union[_loads_pb2.StreamBatch, _Mapping]]] = ..., load_id_base: _Optional[int] = ..., access: _Optional[_Union[_access_pb2.AccessState, _Mapping]] = ..., keyspaces: _Optional[_Union[_table_pb2.KeyspaceList, _Mapping]] = ..., last_keyspace_id: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[ConsumerGroup, _Mapping]]] = ...) -> None: ...

class ConsumerGroup(_message.Message):
    __slots__ = ("group_id", "name", "strategy", "generation", "session_ms", "created_at_ms")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_MS_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    group_id: int
    name: str
    strategy: _groups_pb2.GroupStrategy
    generation: int
    session_ms: int
    created_at_ms: int
    def __init__(self, group_id: _Optional[int] = ..., name: _Optional[str] = ..., strategy: _Optional[_Union[_groups_pb2.GroupStrategy, str]] = ..., generation: _Optional[int] = ..., session_ms: _Optional[int] = ..., created_at_ms: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("load_id", "job_id", "mode", "prefix", "stream_batch", "description", "timeout_ms", "state", "attempts", "attempts_digest", "partitions", "unmerged", "rows", "bytes", "reason", "committed_at", "owner", "keyspace_id")
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    STREAM_BATCH_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    UNMERGED_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_AT_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    load_id: int
    job_id: str
    mode: _loads_pb2.LoadMode
    prefix: bytes
    stream_batch: _loads_pb2.StreamBatch
    description: str
    timeout_ms: int
    state: _loads_pb2.LoadState
    attempts: _containers.RepeatedScalarFieldContainer[int]
    attempts_digest: bytes
    partitions: int
    unmerged: _containers.RepeatedScalarFieldContainer[int]
    rows: int
    bytes: int
    reason: str
    committed_at: int
    owner: str
    keyspace_id: int
    def __init__(self, load_id: _Optional[int] = ..., job_id: _Optional[str] = ..., mode: _Optional[_Union[_loads_pb2.LoadMode, str]] = ..., prefix: _Optional[bytes] = ..., stream_batch: _Optional[_Union[_loads_pb2.StreamBatch, _Mapping]] = ..., description: _Optional[str] = ..., timeout_ms: _Optional[int] = ..., state: _Optional[_Union[_loads_pb2.LoadState, str]] = ..., attempts: _Optional[_Iterable[int]] = ..., attempts_digest: _Optional[bytes] = ..., partitions: _Optional[int] = ..., unmerged: _Optional[_Iterable[int]] = ..., rows: _Optional[int] = ..., bytes: _Optional[int] = ..., reason: _Optional[str] = ..., committed_at: _Optional[int] = ..., owner: _Optional[str] = ..., keyspace_id: _Optional[int] = ...) -> None: ...

class StrandedPartition(_message.Message):
    __slots__ = ("partition_id", "node_number", "store_id", "node_epoch", "registration_id", "base_node_epoch")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_NODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    node_number: int
    store_id: str
    node_epoch: int
    registration_id: str
    base_node_epoch: int
    def __init__(self, partition_id: _Optional[int] = ..., node_number: _Optional[int] = ..., store_id: _Optional[str] = ..., node_epoch: _Optional[int] = ..., registration_id: _Optional[str] = ..., base_node_epoch: _Optional[int] = ...) -> None: ...

class NodeRecord(_message.Message):
    __slots__ = ("info", "registration_id", "base_node_epoch", "confirmed", "draining")
    INFO_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_NODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    info: _table_pb2.NodeInfo
    registration_id: str
    base_node_epoch: int
    confirmed: bool
    draining: bool
    def __init__(self, info: _Optional[_Union[_table_pb2.NodeInfo, _Mapping]] = ..., registration_id: _Optional[str] = ..., base_node_epoch: _Optional[int] = ..., confirmed: bool = ..., draining: bool = ...) -> None: ...
