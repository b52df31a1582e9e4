from koinon_proto.v1 import access_pb2 as _access_pb2
from koinon_proto.v1 import raft_pb2 as _raft_pb2
from koinon_proto.v1 import table_pb2 as _table_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegisterRequest(_message.Message):
    __slots__ = ("protocol_version", "cluster_id", "node_id", "address", "rack", "store_id", "last_node_epoch", "registration_id", "weight", "redis_address", "pool", "redis_ports")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RACK_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_NODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    REDIS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    REDIS_PORTS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    cluster_id: str
    node_id: str
    address: str
    rack: str
    store_id: str
    last_node_epoch: int
    registration_id: str
    weight: int
    redis_address: str
    pool: str
    redis_ports: _containers.RepeatedCompositeFieldContainer[_table_pb2.RedisPort]
    def __init__(self, protocol_version: _Optional[int] = ..., cluster_id: _Optional[str] = ..., node_id: _Optional[str] = ..., address: _Optional[str] = ..., rack: _Optional[str] = ..., store_id: _Optional[str] = ..., last_node_epoch: _Optional[int] = ..., registration_id: _Optional[str] = ..., weight: _Optional[int] = ..., redis_address: _Optional[str] = ..., pool: _Optional[str] = ..., redis_ports: _Optional[_Iterable[_Union[_table_pb2.RedisPort, _Mapping]]] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("cluster_id", "node_epoch", "term", "heartbeat_interval_ms", "lease_ms", "table", "access", "known_node_epoch")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ACCESS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_NODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    node_epoch: int
    term: int
    heartbeat_interval_ms: int
    lease_ms: int
    table: _table_pb2.TableUpdate
    access: _access_pb2.AccessState
    known_node_epoch: int
    def __init__(self, cluster_id: _Optional[str] = ..., node_epoch: _Optional[int] = ..., term: _Optional[int] = ..., heartbeat_interval_ms: _Optional[int] = ..., lease_ms: _Optional[int] = ..., table: _Optional[_Union[_table_pb2.TableUpdate, _Mapping]] = ..., access: _Optional[_Union[_access_pb2.AccessState, _Mapping]] = ..., known_node_epoch: _Optional[int] = ...) -> None: ...

class HostCommand(_message.Message):
    __slots__ = ("partition_id", "primary_epoch", "partition_epoch")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    PRIMARY_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PARTITION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    primary_epoch: int
    partition_epoch: int
    def __init__(self, partition_id: _Optional[int] = ..., primary_epoch: _Optional[int] = ..., partition_epoch: _Optional[int] = ...) -> None: ...

class NodeStats(_message.Message):
    __slots__ = ("records", "used_bytes", "map_bytes", "reads_per_second", "writes_per_second", "disk_free_bytes", "disk_bytes", "commit_out_ms", "commit_ms", "tls_mode", "open_addresses", "reusable_bytes", "clock_ahead_ms", "old_store", "scarce")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    READS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    WRITES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    DISK_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMMIT_OUT_MS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_MS_FIELD_NUMBER: _ClassVar[int]
    TLS_MODE_FIELD_NUMBER: _ClassVar[int]
    OPEN_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    REUSABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CLOCK_AHEAD_MS_FIELD_NUMBER: _ClassVar[int]
    OLD_STORE_FIELD_NUMBER: _ClassVar[int]
    SCARCE_FIELD_NUMBER: _ClassVar[int]
    records: int
    used_bytes: int
    map_bytes: int
    reads_per_second: float
    writes_per_second: float
    disk_free_bytes: int
    disk_bytes: int
    commit_out_ms: int
    commit_ms: int
    tls_mode: str
    open_addresses: _containers.RepeatedScalarFieldContainer[str]
    reusable_bytes: int
    clock_ahead_ms: int
    old_store: str
    scarce: _containers.RepeatedCompositeFieldContainer[ScarceResource]
    def __init__(self, records: _Optional[int] = ..., used_bytes: _Optional[int] = ..., map_bytes: _Optional[int] = ..., reads_per_second: _Optional[float] = ..., writes_per_second: _Optional[float] = ..., disk_free_bytes: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., commit_out_ms: _Optional[int] = ..., commit_ms: _Optional[int] = ..., tls_mode: _Optional[str] = ..., open_addresses: _Optional[_Iterable[str]] = ..., reusable_bytes: _Optional[int] = ..., clock_ahead_ms: _Optional[int] = ..., old_store: _Optional[str] = ..., scarce: _Optional[_Iterable[_Union[ScarceResource, _Mapping]]] = ...) -> None: ...

class ScarceResource(_message.Message):
    __slots__ = ("name", "used", "limit")
    NAME_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    name: str
    used: int
    limit: int
    def __init__(self, name: _Optional[str] = ..., used: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class PartitionSizes(_message.Message):
    __slots__ = ("partition_ids", "bytes")
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, partition_ids: _Optional[_Iterable[int]] = ..., bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class NodeLoad(_message.Message):
    __slots__ = ("observed_ms", "busy", "lag_us", "work", "partition_ids", "lead", "follow", "rest_lead", "rest_follow")
    OBSERVED_MS_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    LAG_US_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    LEAD_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    REST_LEAD_FIELD_NUMBER: _ClassVar[int]
    REST_FOLLOW_FIELD_NUMBER: _ClassVar[int]
    observed_ms: int
    busy: int
    lag_us: int
    work: int
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    lead: _containers.RepeatedScalarFieldContainer[int]
    follow: _containers.RepeatedScalarFieldContainer[int]
    rest_lead: int
    rest_follow: int
    def __init__(self, observed_ms: _Optional[int] = ..., busy: _Optional[int] = ..., lag_us: _Optional[int] = ..., work: _Optional[int] = ..., partition_ids: _Optional[_Iterable[int]] = ..., lead: _Optional[_Iterable[int]] = ..., follow: _Optional[_Iterable[int]] = ..., rest_lead: _Optional[int] = ..., rest_follow: _Optional[int] = ...) -> None: ...

class ReplicaProgress(_message.Message):
    __slots__ = ("partition_id", "stage", "records", "bytes", "records_total", "bytes_total")
    class Stage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STAGE_UNSPECIFIED: _ClassVar[ReplicaProgress.Stage]
        STAGE_WAITING: _ClassVar[ReplicaProgress.Stage]
        STAGE_SNAPSHOT: _ClassVar[ReplicaProgress.Stage]
        STAGE_CATCH_UP: _ClassVar[ReplicaProgress.Stage]
        STAGE_LIVE: _ClassVar[ReplicaProgress.Stage]
    STAGE_UNSPECIFIED: ReplicaProgress.Stage
    STAGE_WAITING: ReplicaProgress.Stage
    STAGE_SNAPSHOT: ReplicaProgress.Stage
    STAGE_CATCH_UP: ReplicaProgress.Stage
    STAGE_LIVE: ReplicaProgress.Stage
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    RECORDS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    stage: ReplicaProgress.Stage
    records: int
    bytes: int
    records_total: int
    bytes_total: int
    def __init__(self, partition_id: _Optional[int] = ..., stage: _Optional[_Union[ReplicaProgress.Stage, str]] = ..., records: _Optional[int] = ..., bytes: _Optional[int] = ..., records_total: _Optional[int] = ..., bytes_total: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("cluster_id", "node_id", "node_epoch", "table_version", "hosted", "stats", "progress", "registration_id", "access_version", "erased_keyspaces", "call_number", "sizes", "load")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    HOSTED_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_ID_FIELD_NUMBER: _ClassVar[int]
    ACCESS_VERSION_FIELD_NUMBER: _ClassVar[int]
    ERASED_KEYSPACES_FIELD_NUMBER: _ClassVar[int]
    CALL_NUMBER_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    node_id: str
    node_epoch: int
    table_version: int
    hosted: _containers.RepeatedCompositeFieldContainer[HostCommand]
    stats: NodeStats
    progress: _containers.RepeatedCompositeFieldContainer[ReplicaProgress]
    registration_id: str
    access_version: int
    erased_keyspaces: _containers.RepeatedScalarFieldContainer[int]
    call_number: int
    sizes: PartitionSizes
    load: NodeLoad
    def __init__(self, cluster_id: _Optional[str] = ..., node_id: _Optional[str] = ..., node_epoch: _Optional[int] = ..., table_version: _Optional[int] = ..., hosted: _Optional[_Iterable[_Union[HostCommand, _Mapping]]] = ..., stats: _Optional[_Union[NodeStats, _Mapping]] = ..., progress: _Optional[_Iterable[_Union[ReplicaProgress, _Mapping]]] = ..., registration_id: _Optional[str] = ..., access_version: _Optional[int] = ..., erased_keyspaces: _Optional[_Iterable[int]] = ..., call_number: _Optional[int] = ..., sizes: _Optional[_Union[PartitionSizes, _Mapping]] = ..., load: _Optional[_Union[NodeLoad, _Mapping]] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("term", "lease_ms", "table", "commands", "access", "call_number", "wall_ms")
    TERM_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    ACCESS_FIELD_NUMBER: _ClassVar[int]
    CALL_NUMBER_FIELD_NUMBER: _ClassVar[int]
    WALL_MS_FIELD_NUMBER: _ClassVar[int]
    term: int
    lease_ms: int
    table: _table_pb2.TableUpdate
    commands: _containers.RepeatedCompositeFieldContainer[HostCommand]
    access: _access_pb2.AccessState
    call_number: int
    wall_ms: int
    def __init__(self, term: _Optional[int] = ..., lease_ms: _Optional[int] = ..., table: _Optional[_Union[_table_pb2.TableUpdate, _Mapping]] = ..., commands: _Optional[_Iterable[_Union[HostCommand, _Mapping]]] = ..., access: _Optional[_Union[_access_pb2.AccessState, _Mapping]] = ..., call_number: _Optional[int] = ..., wall_ms: _Optional[int] = ...) -> None: ...

class PartitionChange(_message.Message):
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

class AlterPartitionsRequest(_message.Message):
    __slots__ = ("cluster_id", "node_id", "node_epoch", "table_version", "changes", "registration_id")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_ID_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    node_id: str
    node_epoch: int
    table_version: int
    changes: _containers.RepeatedCompositeFieldContainer[PartitionChange]
    registration_id: str
    def __init__(self, cluster_id: _Optional[str] = ..., node_id: _Optional[str] = ..., node_epoch: _Optional[int] = ..., table_version: _Optional[int] = ..., changes: _Optional[_Iterable[_Union[PartitionChange, _Mapping]]] = ..., registration_id: _Optional[str] = ...) -> None: ...

class AlterPartitionsResponse(_message.Message):
    __slots__ = ("rejected", "table")
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    rejected: _containers.RepeatedScalarFieldContainer[int]
    table: _table_pb2.TableUpdate
    def __init__(self, rejected: _Optional[_Iterable[int]] = ..., table: _Optional[_Union[_table_pb2.TableUpdate, _Mapping]] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("cluster_id", "node_id", "node_epoch", "registration_id")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_ID_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    node_id: str
    node_epoch: int
    registration_id: str
    def __init__(self, cluster_id: _Optional[str] = ..., node_id: _Optional[str] = ..., node_epoch: _Optional[int] = ..., registration_id: _Optional[str] = ...) -> None: ...

class LeaveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
