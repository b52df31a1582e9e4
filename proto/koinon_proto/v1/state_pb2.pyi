from koinon_proto.v1 import table_pb2 as _table_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Command(_message.Message):
    __slots__ = ("format_version", "create_cluster", "register_node", "confirm_registration", "assign_partitions", "fence_node", "partitions_hosted")
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    CREATE_CLUSTER_FIELD_NUMBER: _ClassVar[int]
    REGISTER_NODE_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    ASSIGN_PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    FENCE_NODE_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_HOSTED_FIELD_NUMBER: _ClassVar[int]
    format_version: int
    create_cluster: CreateClusterCommand
    register_node: RegisterNodeCommand
    confirm_registration: ConfirmRegistrationCommand
    assign_partitions: AssignPartitionsCommand
    fence_node: FenceNodeCommand
    partitions_hosted: PartitionsHostedCommand
    def __init__(self, format_version: _Optional[int] = ..., create_cluster: _Optional[_Union[CreateClusterCommand, _Mapping]] = ..., register_node: _Optional[_Union[RegisterNodeCommand, _Mapping]] = ..., confirm_registration: _Optional[_Union[ConfirmRegistrationCommand, _Mapping]] = ..., assign_partitions: _Optional[_Union[AssignPartitionsCommand, _Mapping]] = ..., fence_node: _Optional[_Union[FenceNodeCommand, _Mapping]] = ..., partitions_hosted: _Optional[_Union[PartitionsHostedCommand, _Mapping]] = ...) -> None: ...

class CreateClusterCommand(_message.Message):
    __slots__ = ("config",)
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    config: _table_pb2.ClusterConfig
    def __init__(self, config: _Optional[_Union[_table_pb2.ClusterConfig, _Mapping]] = ...) -> None: ...

class RegisterNodeCommand(_message.Message):
    __slots__ = ("node_id", "address", "rack", "store_id", "last_node_epoch", "registration_id", "known_node_epoch")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RACK_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_NODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_ID_FIELD_NUMBER: _ClassVar[int]
    KNOWN_NODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    address: str
    rack: str
    store_id: str
    last_node_epoch: int
    registration_id: str
    known_node_epoch: int
    def __init__(self, node_id: _Optional[str] = ..., address: _Optional[str] = ..., rack: _Optional[str] = ..., store_id: _Optional[str] = ..., last_node_epoch: _Optional[int] = ..., registration_id: _Optional[str] = ..., known_node_epoch: _Optional[int] = ...) -> None: ...

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

class StateSnapshot(_message.Message):
    __slots__ = ("format_version", "cluster", "table_version", "last_node_number", "nodes", "rows")
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    LAST_NODE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    format_version: int
    cluster: _table_pb2.ClusterConfig
    table_version: int
    last_node_number: int
    nodes: _containers.RepeatedCompositeFieldContainer[NodeRecord]
    rows: _containers.RepeatedCompositeFieldContainer[_table_pb2.PartitionRow]
    def __init__(self, format_version: _Optional[int] = ..., cluster: _Optional[_Union[_table_pb2.ClusterConfig, _Mapping]] = ..., table_version: _Optional[int] = ..., last_node_number: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[NodeRecord, _Mapping]]] = ..., rows: _Optional[_Iterable[_Union[_table_pb2.PartitionRow, _Mapping]]] = ...) -> None: ...

class NodeRecord(_message.Message):
    __slots__ = ("info", "registration_id", "base_node_epoch", "confirmed", "left_behind_store_id", "left_behind_node_epoch")
    INFO_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_NODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    LEFT_BEHIND_STORE_ID_FIELD_NUMBER: _ClassVar[int]
    LEFT_BEHIND_NODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    info: _table_pb2.NodeInfo
    registration_id: str
    base_node_epoch: int
    confirmed: bool
    left_behind_store_id: str
    left_behind_node_epoch: int
    def __init__(self, info: _Optional[_Union[_table_pb2.NodeInfo, _Mapping]] = ..., registration_id: _Optional[str] = ..., base_node_epoch: _Optional[int] = ..., confirmed: bool = ..., left_behind_store_id: _Optional[str] = ..., left_behind_node_epoch: _Optional[int] = ...) -> None: ...
