from koinon_proto.v1 import table_pb2 as _table_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegisterRequest(_message.Message):
    __slots__ = ("protocol_version", "cluster_id", "node_id", "address", "rack", "store_id", "last_node_epoch", "registration_id")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RACK_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_NODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_ID_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    cluster_id: str
    node_id: str
    address: str
    rack: str
    store_id: str
    last_node_epoch: int
    registration_id: str
    def __init__(self, protocol_version: _Optional[int] = ..., cluster_id: _Optional[str] = ..., node_id: _Optional[str] = ..., address: _Optional[str] = ..., rack: _Optional[str] = ..., store_id: _Optional[str] = ..., last_node_epoch: _Optional[int] = ..., registration_id: _Optional[str] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("cluster_id", "node_epoch", "term", "heartbeat_interval_ms", "lease_ms", "table")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    node_epoch: int
    term: int
    heartbeat_interval_ms: int
    lease_ms: int
    table: _table_pb2.TableUpdate
    def __init__(self, cluster_id: _Optional[str] = ..., node_epoch: _Optional[int] = ..., term: _Optional[int] = ..., heartbeat_interval_ms: _Optional[int] = ..., lease_ms: _Optional[int] = ..., table: _Optional[_Union[_table_pb2.TableUpdate, _Mapping]] = ...) -> None: ...

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
    __slots__ = ("records", "used_bytes", "map_bytes", "reads_per_second", "writes_per_second")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    READS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    WRITES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    records: int
    used_bytes: int
    map_bytes: int
    reads_per_second: float
    writes_per_second: float
    def __init__(self, records: _Optional[int] = ..., used_bytes: _Optional[int] = ..., map_bytes: _Optional[int] = ..., reads_per_second: _Optional[float] = ..., writes_per_second: _Optional[float] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("cluster_id", "node_id", "node_epoch", "table_version", "hosted", "stats")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    HOSTED_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    node_id: str
    node_epoch: int
    table_version: int
    hosted: _containers.RepeatedCompositeFieldContainer[HostCommand]
    stats: NodeStats
    def __init__(self, cluster_id: _Optional[str] = ..., node_id: _Optional[str] = ..., node_epoch: _Optional[int] = ..., table_version: _Optional[int] = ..., hosted: _Optional[_Iterable[_Union[HostCommand, _Mapping]]] = ..., stats: _Optional[_Union[NodeStats, _Mapping]] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("term", "lease_ms", "table", "commands")
    TERM_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    term: int
    lease_ms: int
    table: _table_pb2.TableUpdate
    commands: _containers.RepeatedCompositeFieldContainer[HostCommand]
    def __init__(self, term: _Optional[int] = ..., lease_ms: _Optional[int] = ..., table: _Optional[_Union[_table_pb2.TableUpdate, _Mapping]] = ..., commands: _Optional[_Iterable[_Union[HostCommand, _Mapping]]] = ...) -> None: ...
