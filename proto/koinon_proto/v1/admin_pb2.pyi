from koinon_proto.v1 import access_pb2 as _access_pb2
from koinon_proto.v1 import membership_pb2 as _membership_pb2
from koinon_proto.v1 import table_pb2 as _table_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PlanKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLAN_KIND_UNSPECIFIED: _ClassVar[PlanKind]
    PLAN_KIND_REBALANCE: _ClassVar[PlanKind]
    PLAN_KIND_DRAIN: _ClassVar[PlanKind]
    PLAN_KIND_REPLACE: _ClassVar[PlanKind]
    PLAN_KIND_REPLICATION_FACTOR: _ClassVar[PlanKind]

class PlanBy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLAN_BY_COUNT: _ClassVar[PlanBy]
    PLAN_BY_LOAD: _ClassVar[PlanBy]
    PLAN_BY_BYTES: _ClassVar[PlanBy]
PLAN_KIND_UNSPECIFIED: PlanKind
PLAN_KIND_REBALANCE: PlanKind
PLAN_KIND_DRAIN: PlanKind
PLAN_KIND_REPLACE: PlanKind
PLAN_KIND_REPLICATION_FACTOR: PlanKind
PLAN_BY_COUNT: PlanBy
PLAN_BY_LOAD: PlanBy
PLAN_BY_BYTES: PlanBy

class GetStatusRequest(_message.Message):
    __slots__ = ("cluster_id", "known_version")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    KNOWN_VERSION_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    known_version: int
    def __init__(self, cluster_id: _Optional[str] = ..., known_version: _Optional[int] = ...) -> None: ...

class CoordinatorStatus(_message.Message):
    __slots__ = ("member_id", "address", "voter", "leader", "active", "match_index")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    VOTER_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    MATCH_INDEX_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    address: str
    voter: bool
    leader: bool
    active: bool
    match_index: int
    def __init__(self, member_id: _Optional[str] = ..., address: _Optional[str] = ..., voter: bool = ..., leader: bool = ..., active: bool = ..., match_index: _Optional[int] = ...) -> None: ...

class NodeSession(_message.Message):
    __slots__ = ("node_number", "live", "heard_ms_ago", "stats")
    NODE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    HEARD_MS_AGO_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    node_number: int
    live: bool
    heard_ms_ago: int
    stats: _membership_pb2.NodeStats
    def __init__(self, node_number: _Optional[int] = ..., live: bool = ..., heard_ms_ago: _Optional[int] = ..., stats: _Optional[_Union[_membership_pb2.NodeStats, _Mapping]] = ...) -> None: ...

class ClusterStatus(_message.Message):
    __slots__ = ("member_id", "is_leader", "leader_id", "leader_address", "term", "commit_index", "applied_index", "coordinators", "sessions", "table", "lease_ms", "session_timeout_ms", "elections", "tls_mode", "open_addresses", "disk_free_bytes", "disk_bytes", "room_waits", "advertised_address")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    IS_LEADER_FIELD_NUMBER: _ClassVar[int]
    LEADER_ID_FIELD_NUMBER: _ClassVar[int]
    LEADER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    COMMIT_INDEX_FIELD_NUMBER: _ClassVar[int]
    APPLIED_INDEX_FIELD_NUMBER: _ClassVar[int]
    COORDINATORS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    SESSION_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    ELECTIONS_FIELD_NUMBER: _ClassVar[int]
    TLS_MODE_FIELD_NUMBER: _ClassVar[int]
    OPEN_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    DISK_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROOM_WAITS_FIELD_NUMBER: _ClassVar[int]
    ADVERTISED_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    is_leader: bool
    leader_id: str
    leader_address: str
    term: int
    commit_index: int
    applied_index: int
    coordinators: _containers.RepeatedCompositeFieldContainer[CoordinatorStatus]
    sessions: _containers.RepeatedCompositeFieldContainer[NodeSession]
    table: _table_pb2.TableUpdate
    lease_ms: int
    session_timeout_ms: int
    elections: RecentElections
    tls_mode: str
    open_addresses: _containers.RepeatedScalarFieldContainer[str]
    disk_free_bytes: int
    disk_bytes: int
    room_waits: _containers.RepeatedCompositeFieldContainer[RoomWait]
    advertised_address: str
    def __init__(self, member_id: _Optional[str] = ..., is_leader: bool = ..., leader_id: _Optional[str] = ..., leader_address: _Optional[str] = ..., term: _Optional[int] = ..., commit_index: _Optional[int] = ..., applied_index: _Optional[int] = ..., coordinators: _Optional[_Iterable[_Union[CoordinatorStatus, _Mapping]]] = ..., sessions: _Optional[_Iterable[_Union[NodeSession, _Mapping]]] = ..., table: _Optional[_Union[_table_pb2.TableUpdate, _Mapping]] = ..., lease_ms: _Optional[int] = ..., session_timeout_ms: _Optional[int] = ..., elections: _Optional[_Union[RecentElections, _Mapping]] = ..., tls_mode: _Optional[str] = ..., open_addresses: _Optional[_Iterable[str]] = ..., disk_free_bytes: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., room_waits: _Optional[_Iterable[_Union[RoomWait, _Mapping]]] = ..., advertised_address: _Optional[str] = ...) -> None: ...

class RoomWait(_message.Message):
    __slots__ = ("node_number", "moves", "needs_bytes", "has_bytes", "limit")
    NODE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    NEEDS_BYTES_FIELD_NUMBER: _ClassVar[int]
    HAS_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    node_number: int
    moves: int
    needs_bytes: int
    has_bytes: int
    limit: str
    def __init__(self, node_number: _Optional[int] = ..., moves: _Optional[int] = ..., needs_bytes: _Optional[int] = ..., has_bytes: _Optional[int] = ..., limit: _Optional[str] = ...) -> None: ...

class RecentElections(_message.Message):
    __slots__ = ("leader_changes", "terms", "watched_ms", "quiet_ms")
    LEADER_CHANGES_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    WATCHED_MS_FIELD_NUMBER: _ClassVar[int]
    QUIET_MS_FIELD_NUMBER: _ClassVar[int]
    leader_changes: int
    terms: int
    watched_ms: int
    quiet_ms: int
    def __init__(self, leader_changes: _Optional[int] = ..., terms: _Optional[int] = ..., watched_ms: _Optional[int] = ..., quiet_ms: _Optional[int] = ...) -> None: ...

class AddCoordinatorRequest(_message.Message):
    __slots__ = ("member_id", "address", "cluster_id")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    address: str
    cluster_id: str
    def __init__(self, member_id: _Optional[str] = ..., address: _Optional[str] = ..., cluster_id: _Optional[str] = ...) -> None: ...

class AddCoordinatorResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RemoveCoordinatorRequest(_message.Message):
    __slots__ = ("member_id", "cluster_id")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    cluster_id: str
    def __init__(self, member_id: _Optional[str] = ..., cluster_id: _Optional[str] = ...) -> None: ...

class RemoveCoordinatorResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TransferLeadershipRequest(_message.Message):
    __slots__ = ("member_id", "cluster_id")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    cluster_id: str
    def __init__(self, member_id: _Optional[str] = ..., cluster_id: _Optional[str] = ...) -> None: ...

class TransferLeadershipResponse(_message.Message):
    __slots__ = ("leader_id",)
    LEADER_ID_FIELD_NUMBER: _ClassVar[int]
    leader_id: str
    def __init__(self, leader_id: _Optional[str] = ...) -> None: ...

class PlanRequest(_message.Message):
    __slots__ = ("kind", "node_id", "with_node_id", "replication_factor", "cluster_id", "keyspace", "by", "target_percent", "leaders_only")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    WITH_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICATION_FACTOR_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    TARGET_PERCENT_FIELD_NUMBER: _ClassVar[int]
    LEADERS_ONLY_FIELD_NUMBER: _ClassVar[int]
    kind: PlanKind
    node_id: str
    with_node_id: str
    replication_factor: int
    cluster_id: str
    keyspace: str
    by: PlanBy
    target_percent: int
    leaders_only: bool
    def __init__(self, kind: _Optional[_Union[PlanKind, str]] = ..., node_id: _Optional[str] = ..., with_node_id: _Optional[str] = ..., replication_factor: _Optional[int] = ..., cluster_id: _Optional[str] = ..., keyspace: _Optional[str] = ..., by: _Optional[_Union[PlanBy, str]] = ..., target_percent: _Optional[int] = ..., leaders_only: bool = ...) -> None: ...

class PlannedMove(_message.Message):
    __slots__ = ("partition_id", "origin", "target", "reason")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    origin: _containers.RepeatedScalarFieldContainer[int]
    target: _containers.RepeatedScalarFieldContainer[int]
    reason: str
    def __init__(self, partition_id: _Optional[int] = ..., origin: _Optional[_Iterable[int]] = ..., target: _Optional[_Iterable[int]] = ..., reason: _Optional[str] = ...) -> None: ...

class NodeBalance(_message.Message):
    __slots__ = ("node_number", "replicas", "primaries", "load", "capacity")
    NODE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    PRIMARIES_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    node_number: int
    replicas: int
    primaries: int
    load: float
    capacity: float
    def __init__(self, node_number: _Optional[int] = ..., replicas: _Optional[int] = ..., primaries: _Optional[int] = ..., load: _Optional[float] = ..., capacity: _Optional[float] = ...) -> None: ...

class PlanRefusal(_message.Message):
    __slots__ = ("code", "reason", "node_number", "partition_ids")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NODE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    code: str
    reason: str
    node_number: int
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, code: _Optional[str] = ..., reason: _Optional[str] = ..., node_number: _Optional[int] = ..., partition_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("plan_id", "table_version", "moves", "before", "after", "refusals")
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    plan_id: str
    table_version: int
    moves: _containers.RepeatedCompositeFieldContainer[PlannedMove]
    before: _containers.RepeatedCompositeFieldContainer[NodeBalance]
    after: _containers.RepeatedCompositeFieldContainer[NodeBalance]
    refusals: _containers.RepeatedCompositeFieldContainer[PlanRefusal]
    def __init__(self, plan_id: _Optional[str] = ..., table_version: _Optional[int] = ..., moves: _Optional[_Iterable[_Union[PlannedMove, _Mapping]]] = ..., before: _Optional[_Iterable[_Union[NodeBalance, _Mapping]]] = ..., after: _Optional[_Iterable[_Union[NodeBalance, _Mapping]]] = ..., refusals: _Optional[_Iterable[_Union[PlanRefusal, _Mapping]]] = ...) -> None: ...

class ExecutePlanRequest(_message.Message):
    __slots__ = ("plan", "plan_id", "cluster_id")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    plan: PlanRequest
    plan_id: str
    cluster_id: str
    def __init__(self, plan: _Optional[_Union[PlanRequest, _Mapping]] = ..., plan_id: _Optional[str] = ..., cluster_id: _Optional[str] = ...) -> None: ...

class ExecutePlanResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetMovesRequest(_message.Message):
    __slots__ = ("cluster_id",)
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    def __init__(self, cluster_id: _Optional[str] = ...) -> None: ...

class MoveStatus(_message.Message):
    __slots__ = ("move", "plan_id", "plan_moves", "running", "cancelled", "progress_nodes", "progress", "waits_for")
    MOVE_FIELD_NUMBER: _ClassVar[int]
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    PLAN_MOVES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_NODES_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    move: PlannedMove
    plan_id: str
    plan_moves: int
    running: bool
    cancelled: bool
    progress_nodes: _containers.RepeatedScalarFieldContainer[int]
    progress: _containers.RepeatedCompositeFieldContainer[_membership_pb2.ReplicaProgress]
    waits_for: str
    def __init__(self, move: _Optional[_Union[PlannedMove, _Mapping]] = ..., plan_id: _Optional[str] = ..., plan_moves: _Optional[int] = ..., running: bool = ..., cancelled: bool = ..., progress_nodes: _Optional[_Iterable[int]] = ..., progress: _Optional[_Iterable[_Union[_membership_pb2.ReplicaProgress, _Mapping]]] = ..., waits_for: _Optional[str] = ...) -> None: ...

class MovesStatus(_message.Message):
    __slots__ = ("settings", "moves")
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    settings: _table_pb2.MoveSettings
    moves: _containers.RepeatedCompositeFieldContainer[MoveStatus]
    def __init__(self, settings: _Optional[_Union[_table_pb2.MoveSettings, _Mapping]] = ..., moves: _Optional[_Iterable[_Union[MoveStatus, _Mapping]]] = ...) -> None: ...

class CancelMovesRequest(_message.Message):
    __slots__ = ("partition_ids", "cluster_id")
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    cluster_id: str
    def __init__(self, partition_ids: _Optional[_Iterable[int]] = ..., cluster_id: _Optional[str] = ...) -> None: ...

class CancelMovesResponse(_message.Message):
    __slots__ = ("dropped", "turned_back")
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    TURNED_BACK_FIELD_NUMBER: _ClassVar[int]
    dropped: int
    turned_back: int
    def __init__(self, dropped: _Optional[int] = ..., turned_back: _Optional[int] = ...) -> None: ...

class SetMovesRequest(_message.Message):
    __slots__ = ("paused", "bytes_per_second", "moves_per_node", "cluster_id")
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    MOVES_PER_NODE_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    paused: bool
    bytes_per_second: int
    moves_per_node: int
    cluster_id: str
    def __init__(self, paused: bool = ..., bytes_per_second: _Optional[int] = ..., moves_per_node: _Optional[int] = ..., cluster_id: _Optional[str] = ...) -> None: ...

class SetNodeStatusRequest(_message.Message):
    __slots__ = ("node_id", "status", "cluster_id")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    status: _table_pb2.NodeStatus
    cluster_id: str
    def __init__(self, node_id: _Optional[str] = ..., status: _Optional[_Union[_table_pb2.NodeStatus, str]] = ..., cluster_id: _Optional[str] = ...) -> None: ...

class SetNodeStatusResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RestorePrimariesRequest(_message.Message):
    __slots__ = ("cluster_id",)
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    def __init__(self, cluster_id: _Optional[str] = ...) -> None: ...

class RestorePrimariesResponse(_message.Message):
    __slots__ = ("wanted",)
    WANTED_FIELD_NUMBER: _ClassVar[int]
    wanted: int
    def __init__(self, wanted: _Optional[int] = ...) -> None: ...

class PrimaryToForce(_message.Message):
    __slots__ = ("partition_id", "node_id")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    node_id: str
    def __init__(self, partition_id: _Optional[int] = ..., node_id: _Optional[str] = ...) -> None: ...

class ForcePrimariesRequest(_message.Message):
    __slots__ = ("primaries", "cluster_id")
    PRIMARIES_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    primaries: _containers.RepeatedCompositeFieldContainer[PrimaryToForce]
    cluster_id: str
    def __init__(self, primaries: _Optional[_Iterable[_Union[PrimaryToForce, _Mapping]]] = ..., cluster_id: _Optional[str] = ...) -> None: ...

class ForcedPrimary(_message.Message):
    __slots__ = ("partition_id", "primary_epoch", "refused")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    PRIMARY_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    primary_epoch: int
    refused: str
    def __init__(self, partition_id: _Optional[int] = ..., primary_epoch: _Optional[int] = ..., refused: _Optional[str] = ...) -> None: ...

class ForcePrimariesResponse(_message.Message):
    __slots__ = ("primaries",)
    PRIMARIES_FIELD_NUMBER: _ClassVar[int]
    primaries: _containers.RepeatedCompositeFieldContainer[ForcedPrimary]
    def __init__(self, primaries: _Optional[_Iterable[_Union[ForcedPrimary, _Mapping]]] = ...) -> None: ...

class CreateKeyspaceRequest(_message.Message):
    __slots__ = ("cluster_id", "keyspace")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    keyspace: _table_pb2.Keyspace
    def __init__(self, cluster_id: _Optional[str] = ..., keyspace: _Optional[_Union[_table_pb2.Keyspace, _Mapping]] = ...) -> None: ...

class AlterKeyspaceRequest(_message.Message):
    __slots__ = ("cluster_id", "name", "min_in_sync", "max_value_bytes", "pool", "default_ttl_ms", "max_ttl_ms", "max_rows_per_s", "max_bytes_per_s")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MIN_IN_SYNC_FIELD_NUMBER: _ClassVar[int]
    MAX_VALUE_BYTES_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_PER_S_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    name: str
    min_in_sync: int
    max_value_bytes: int
    pool: str
    default_ttl_ms: int
    max_ttl_ms: int
    max_rows_per_s: int
    max_bytes_per_s: int
    def __init__(self, cluster_id: _Optional[str] = ..., name: _Optional[str] = ..., min_in_sync: _Optional[int] = ..., max_value_bytes: _Optional[int] = ..., pool: _Optional[str] = ..., default_ttl_ms: _Optional[int] = ..., max_ttl_ms: _Optional[int] = ..., max_rows_per_s: _Optional[int] = ..., max_bytes_per_s: _Optional[int] = ...) -> None: ...

class DropKeyspaceRequest(_message.Message):
    __slots__ = ("cluster_id", "name", "keyspace_id")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    name: str
    keyspace_id: int
    def __init__(self, cluster_id: _Optional[str] = ..., name: _Optional[str] = ..., keyspace_id: _Optional[int] = ...) -> None: ...

class KeyspaceResponse(_message.Message):
    __slots__ = ("keyspace", "nodes_behind", "behind_serve_ms")
    KEYSPACE_FIELD_NUMBER: _ClassVar[int]
    NODES_BEHIND_FIELD_NUMBER: _ClassVar[int]
    BEHIND_SERVE_MS_FIELD_NUMBER: _ClassVar[int]
    keyspace: _table_pb2.Keyspace
    nodes_behind: _containers.RepeatedScalarFieldContainer[str]
    behind_serve_ms: int
    def __init__(self, keyspace: _Optional[_Union[_table_pb2.Keyspace, _Mapping]] = ..., nodes_behind: _Optional[_Iterable[str]] = ..., behind_serve_ms: _Optional[int] = ...) -> None: ...

class GetAccessRequest(_message.Message):
    __slots__ = ("cluster_id",)
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    def __init__(self, cluster_id: _Optional[str] = ...) -> None: ...

class GetAccessResponse(_message.Message):
    __slots__ = ("access",)
    ACCESS_FIELD_NUMBER: _ClassVar[int]
    access: _access_pb2.AccessState
    def __init__(self, access: _Optional[_Union[_access_pb2.AccessState, _Mapping]] = ...) -> None: ...

class ChangeAccessRequest(_message.Message):
    __slots__ = ("cluster_id", "expected_access_version", "put_role", "drop_role", "put_user", "drop_user", "add_token", "drop_token", "revoke_certificate", "restore_certificate")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_ACCESS_VERSION_FIELD_NUMBER: _ClassVar[int]
    PUT_ROLE_FIELD_NUMBER: _ClassVar[int]
    DROP_ROLE_FIELD_NUMBER: _ClassVar[int]
    PUT_USER_FIELD_NUMBER: _ClassVar[int]
    DROP_USER_FIELD_NUMBER: _ClassVar[int]
    ADD_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DROP_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REVOKE_CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    RESTORE_CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    expected_access_version: int
    put_role: _access_pb2.Role
    drop_role: str
    put_user: _access_pb2.User
    drop_user: str
    add_token: _access_pb2.Token
    drop_token: str
    revoke_certificate: str
    restore_certificate: str
    def __init__(self, cluster_id: _Optional[str] = ..., expected_access_version: _Optional[int] = ..., put_role: _Optional[_Union[_access_pb2.Role, _Mapping]] = ..., drop_role: _Optional[str] = ..., put_user: _Optional[_Union[_access_pb2.User, _Mapping]] = ..., drop_user: _Optional[str] = ..., add_token: _Optional[_Union[_access_pb2.Token, _Mapping]] = ..., drop_token: _Optional[str] = ..., revoke_certificate: _Optional[str] = ..., restore_certificate: _Optional[str] = ...) -> None: ...

class ChangeAccessResponse(_message.Message):
    __slots__ = ("access_version", "nodes_behind", "behind_serve_ms")
    ACCESS_VERSION_FIELD_NUMBER: _ClassVar[int]
    NODES_BEHIND_FIELD_NUMBER: _ClassVar[int]
    BEHIND_SERVE_MS_FIELD_NUMBER: _ClassVar[int]
    access_version: int
    nodes_behind: _containers.RepeatedScalarFieldContainer[str]
    behind_serve_ms: int
    def __init__(self, access_version: _Optional[int] = ..., nodes_behind: _Optional[_Iterable[str]] = ..., behind_serve_ms: _Optional[int] = ...) -> None: ...
