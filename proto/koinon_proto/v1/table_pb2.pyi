from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodeStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_STATUS_UNSPECIFIED: _ClassVar[NodeStatus]
    NODE_STATUS_FENCED: _ClassVar[NodeStatus]
    NODE_STATUS_ACTIVE: _ClassVar[NodeStatus]
    NODE_STATUS_DRAINING: _ClassVar[NodeStatus]
    NODE_STATUS_LEFT: _ClassVar[NodeStatus]

class PartitionStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PARTITION_STATUS_UNSPECIFIED: _ClassVar[PartitionStatus]
    PARTITION_STATUS_ASSIGNED: _ClassVar[PartitionStatus]
    PARTITION_STATUS_ONLINE: _ClassVar[PartitionStatus]
    PARTITION_STATUS_OFFLINE: _ClassVar[PartitionStatus]

class OfflineReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OFFLINE_REASON_UNSPECIFIED: _ClassVar[OfflineReason]
    OFFLINE_REASON_NO_LIVE_REPLICA: _ClassVar[OfflineReason]
    OFFLINE_REASON_STORE_LOST: _ClassVar[OfflineReason]
NODE_STATUS_UNSPECIFIED: NodeStatus
NODE_STATUS_FENCED: NodeStatus
NODE_STATUS_ACTIVE: NodeStatus
NODE_STATUS_DRAINING: NodeStatus
NODE_STATUS_LEFT: NodeStatus
PARTITION_STATUS_UNSPECIFIED: PartitionStatus
PARTITION_STATUS_ASSIGNED: PartitionStatus
PARTITION_STATUS_ONLINE: PartitionStatus
PARTITION_STATUS_OFFLINE: PartitionStatus
OFFLINE_REASON_UNSPECIFIED: OfflineReason
OFFLINE_REASON_NO_LIVE_REPLICA: OfflineReason
OFFLINE_REASON_STORE_LOST: OfflineReason

class GetTableRequest(_message.Message):
    __slots__ = ("cluster_id", "known_version")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    KNOWN_VERSION_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    known_version: int
    def __init__(self, cluster_id: _Optional[str] = ..., known_version: _Optional[int] = ...) -> None: ...

class ClusterConfig(_message.Message):
    __slots__ = ("cluster_id", "partitioner", "partition_count", "replication_factor", "min_in_sync", "bootstrap_nodes", "max_value_bytes", "heartbeat_interval_ms", "session_timeout_ms", "lease_ms", "check_quorum_ms", "replica_timeout_ms", "rereplicate_after_ms", "partitioner_fingerprint")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITIONER_FIELD_NUMBER: _ClassVar[int]
    PARTITION_COUNT_FIELD_NUMBER: _ClassVar[int]
    REPLICATION_FACTOR_FIELD_NUMBER: _ClassVar[int]
    MIN_IN_SYNC_FIELD_NUMBER: _ClassVar[int]
    BOOTSTRAP_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_VALUE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    SESSION_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    CHECK_QUORUM_MS_FIELD_NUMBER: _ClassVar[int]
    REPLICA_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    REREPLICATE_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    PARTITIONER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    partitioner: str
    partition_count: int
    replication_factor: int
    min_in_sync: int
    bootstrap_nodes: int
    max_value_bytes: int
    heartbeat_interval_ms: int
    session_timeout_ms: int
    lease_ms: int
    check_quorum_ms: int
    replica_timeout_ms: int
    rereplicate_after_ms: int
    partitioner_fingerprint: bytes
    def __init__(self, cluster_id: _Optional[str] = ..., partitioner: _Optional[str] = ..., partition_count: _Optional[int] = ..., replication_factor: _Optional[int] = ..., min_in_sync: _Optional[int] = ..., bootstrap_nodes: _Optional[int] = ..., max_value_bytes: _Optional[int] = ..., heartbeat_interval_ms: _Optional[int] = ..., session_timeout_ms: _Optional[int] = ..., lease_ms: _Optional[int] = ..., check_quorum_ms: _Optional[int] = ..., replica_timeout_ms: _Optional[int] = ..., rereplicate_after_ms: _Optional[int] = ..., partitioner_fingerprint: _Optional[bytes] = ...) -> None: ...

class Keyspace(_message.Message):
    __slots__ = ("keyspace_id", "name", "base", "partition_count", "partitioner", "partitioner_fingerprint", "replication_factor", "min_in_sync", "max_value_bytes", "pool", "is_dropping", "default_ttl_ms", "max_ttl_ms", "max_rows_per_s", "max_bytes_per_s", "first_epoch")
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    PARTITION_COUNT_FIELD_NUMBER: _ClassVar[int]
    PARTITIONER_FIELD_NUMBER: _ClassVar[int]
    PARTITIONER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    REPLICATION_FACTOR_FIELD_NUMBER: _ClassVar[int]
    MIN_IN_SYNC_FIELD_NUMBER: _ClassVar[int]
    MAX_VALUE_BYTES_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    IS_DROPPING_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_PER_S_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    keyspace_id: int
    name: str
    base: int
    partition_count: int
    partitioner: str
    partitioner_fingerprint: bytes
    replication_factor: int
    min_in_sync: int
    max_value_bytes: int
    pool: str
    is_dropping: bool
    default_ttl_ms: int
    max_ttl_ms: int
    max_rows_per_s: int
    max_bytes_per_s: int
    first_epoch: int
    def __init__(self, keyspace_id: _Optional[int] = ..., name: _Optional[str] = ..., base: _Optional[int] = ..., partition_count: _Optional[int] = ..., partitioner: _Optional[str] = ..., partitioner_fingerprint: _Optional[bytes] = ..., replication_factor: _Optional[int] = ..., min_in_sync: _Optional[int] = ..., max_value_bytes: _Optional[int] = ..., pool: _Optional[str] = ..., is_dropping: bool = ..., default_ttl_ms: _Optional[int] = ..., max_ttl_ms: _Optional[int] = ..., max_rows_per_s: _Optional[int] = ..., max_bytes_per_s: _Optional[int] = ..., first_epoch: _Optional[int] = ...) -> None: ...

class KeyspaceList(_message.Message):
    __slots__ = ("changed_at", "keyspaces")
    CHANGED_AT_FIELD_NUMBER: _ClassVar[int]
    KEYSPACES_FIELD_NUMBER: _ClassVar[int]
    changed_at: int
    keyspaces: _containers.RepeatedCompositeFieldContainer[Keyspace]
    def __init__(self, changed_at: _Optional[int] = ..., keyspaces: _Optional[_Iterable[_Union[Keyspace, _Mapping]]] = ...) -> None: ...

class MoveSettings(_message.Message):
    __slots__ = ("paused", "bytes_per_second", "moves_per_node")
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    MOVES_PER_NODE_FIELD_NUMBER: _ClassVar[int]
    paused: bool
    bytes_per_second: int
    moves_per_node: int
    def __init__(self, paused: bool = ..., bytes_per_second: _Optional[int] = ..., moves_per_node: _Optional[int] = ...) -> None: ...

class RedisPort(_message.Message):
    __slots__ = ("keyspace", "address")
    KEYSPACE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    keyspace: str
    address: str
    def __init__(self, keyspace: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class NodeInfo(_message.Message):
    __slots__ = ("node_number", "node_id", "address", "rack", "node_epoch", "status", "store_id", "changed_at", "weight", "registration_digest", "redis_address", "pool", "redis_ports")
    NODE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RACK_FIELD_NUMBER: _ClassVar[int]
    NODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    CHANGED_AT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_DIGEST_FIELD_NUMBER: _ClassVar[int]
    REDIS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    REDIS_PORTS_FIELD_NUMBER: _ClassVar[int]
    node_number: int
    node_id: str
    address: str
    rack: str
    node_epoch: int
    status: NodeStatus
    store_id: str
    changed_at: int
    weight: int
    registration_digest: bytes
    redis_address: str
    pool: str
    redis_ports: _containers.RepeatedCompositeFieldContainer[RedisPort]
    def __init__(self, node_number: _Optional[int] = ..., node_id: _Optional[str] = ..., address: _Optional[str] = ..., rack: _Optional[str] = ..., node_epoch: _Optional[int] = ..., status: _Optional[_Union[NodeStatus, str]] = ..., store_id: _Optional[str] = ..., changed_at: _Optional[int] = ..., weight: _Optional[int] = ..., registration_digest: _Optional[bytes] = ..., redis_address: _Optional[str] = ..., pool: _Optional[str] = ..., redis_ports: _Optional[_Iterable[_Union[RedisPort, _Mapping]]] = ...) -> None: ...

class PartitionRow(_message.Message):
    __slots__ = ("partition_id", "replicas", "in_sync", "primary", "primary_epoch", "partition_epoch", "adding", "removing", "status", "offline_reason", "changed_at", "wanted_primary")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    IN_SYNC_FIELD_NUMBER: _ClassVar[int]
    PRIMARY_FIELD_NUMBER: _ClassVar[int]
    PRIMARY_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PARTITION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDING_FIELD_NUMBER: _ClassVar[int]
    REMOVING_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    OFFLINE_REASON_FIELD_NUMBER: _ClassVar[int]
    CHANGED_AT_FIELD_NUMBER: _ClassVar[int]
    WANTED_PRIMARY_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    replicas: _containers.RepeatedScalarFieldContainer[int]
    in_sync: _containers.RepeatedScalarFieldContainer[int]
    primary: int
    primary_epoch: int
    partition_epoch: int
    adding: _containers.RepeatedScalarFieldContainer[int]
    removing: _containers.RepeatedScalarFieldContainer[int]
    status: PartitionStatus
    offline_reason: OfflineReason
    changed_at: int
    wanted_primary: int
    def __init__(self, partition_id: _Optional[int] = ..., replicas: _Optional[_Iterable[int]] = ..., in_sync: _Optional[_Iterable[int]] = ..., primary: _Optional[int] = ..., primary_epoch: _Optional[int] = ..., partition_epoch: _Optional[int] = ..., adding: _Optional[_Iterable[int]] = ..., removing: _Optional[_Iterable[int]] = ..., status: _Optional[_Union[PartitionStatus, str]] = ..., offline_reason: _Optional[_Union[OfflineReason, str]] = ..., changed_at: _Optional[int] = ..., wanted_primary: _Optional[int] = ...) -> None: ...

class TableUpdate(_message.Message):
    __slots__ = ("format_version", "cluster", "base_version", "table_version", "nodes", "rows", "moves", "loads", "keyspaces")
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    KEYSPACES_FIELD_NUMBER: _ClassVar[int]
    format_version: int
    cluster: ClusterConfig
    base_version: int
    table_version: int
    nodes: _containers.RepeatedCompositeFieldContainer[NodeInfo]
    rows: _containers.RepeatedCompositeFieldContainer[PartitionRow]
    moves: MoveSettings
    loads: _containers.RepeatedCompositeFieldContainer[ActiveLoad]
    keyspaces: KeyspaceList
    def __init__(self, format_version: _Optional[int] = ..., cluster: _Optional[_Union[ClusterConfig, _Mapping]] = ..., base_version: _Optional[int] = ..., table_version: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[NodeInfo, _Mapping]]] = ..., rows: _Optional[_Iterable[_Union[PartitionRow, _Mapping]]] = ..., moves: _Optional[_Union[MoveSettings, _Mapping]] = ..., loads: _Optional[_Iterable[_Union[ActiveLoad, _Mapping]]] = ..., keyspaces: _Optional[_Union[KeyspaceList, _Mapping]] = ...) -> None: ...

class ActiveLoad(_message.Message):
    __slots__ = ("load_id", "merging", "committed_at", "owner_digest", "keyspace_id")
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    MERGING_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_AT_FIELD_NUMBER: _ClassVar[int]
    OWNER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    load_id: int
    merging: bool
    committed_at: int
    owner_digest: bytes
    keyspace_id: int
    def __init__(self, load_id: _Optional[int] = ..., merging: bool = ..., committed_at: _Optional[int] = ..., owner_digest: _Optional[bytes] = ..., keyspace_id: _Optional[int] = ...) -> None: ...
