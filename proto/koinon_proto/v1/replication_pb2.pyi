from koinon_proto.v1 import errors_pb2 as _errors_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FollowRequest(_message.Message):
    __slots__ = ("hello", "open", "ack", "positions", "close")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    hello: FollowHello
    open: OpenPartitions
    ack: BatchAck
    positions: PositionAcks
    close: ClosePartitions
    def __init__(self, hello: _Optional[_Union[FollowHello, _Mapping]] = ..., open: _Optional[_Union[OpenPartitions, _Mapping]] = ..., ack: _Optional[_Union[BatchAck, _Mapping]] = ..., positions: _Optional[_Union[PositionAcks, _Mapping]] = ..., close: _Optional[_Union[ClosePartitions, _Mapping]] = ...) -> None: ...

class FollowHello(_message.Message):
    __slots__ = ("protocol_version", "cluster_id", "node_number", "node_epoch", "to_node_number", "registration_id")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    NODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TO_NODE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_ID_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    cluster_id: str
    node_number: int
    node_epoch: int
    to_node_number: int
    registration_id: str
    def __init__(self, protocol_version: _Optional[int] = ..., cluster_id: _Optional[str] = ..., node_number: _Optional[int] = ..., node_epoch: _Optional[int] = ..., to_node_number: _Optional[int] = ..., registration_id: _Optional[str] = ...) -> None: ...

class EpochStart(_message.Message):
    __slots__ = ("primary_epoch", "previous_sequence")
    PRIMARY_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    primary_epoch: int
    previous_sequence: int
    def __init__(self, primary_epoch: _Optional[int] = ..., previous_sequence: _Optional[int] = ...) -> None: ...

class OpenPartition(_message.Message):
    __slots__ = ("partition_id", "primary_epoch", "complete_through", "needs_snapshot", "history", "unchanged_from")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    PRIMARY_EPOCH_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_THROUGH_FIELD_NUMBER: _ClassVar[int]
    NEEDS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    UNCHANGED_FROM_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    primary_epoch: int
    complete_through: int
    needs_snapshot: bool
    history: _containers.RepeatedCompositeFieldContainer[EpochStart]
    unchanged_from: int
    def __init__(self, partition_id: _Optional[int] = ..., primary_epoch: _Optional[int] = ..., complete_through: _Optional[int] = ..., needs_snapshot: bool = ..., history: _Optional[_Iterable[_Union[EpochStart, _Mapping]]] = ..., unchanged_from: _Optional[int] = ...) -> None: ...

class OpenPartitions(_message.Message):
    __slots__ = ("partitions",)
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    partitions: _containers.RepeatedCompositeFieldContainer[OpenPartition]
    def __init__(self, partitions: _Optional[_Iterable[_Union[OpenPartition, _Mapping]]] = ...) -> None: ...

class BatchAck(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class PositionAcks(_message.Message):
    __slots__ = ("partition_ids", "primary_epochs", "sequences")
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    PRIMARY_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    primary_epochs: _containers.RepeatedScalarFieldContainer[int]
    sequences: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, partition_ids: _Optional[_Iterable[int]] = ..., primary_epochs: _Optional[_Iterable[int]] = ..., sequences: _Optional[_Iterable[int]] = ...) -> None: ...

class ClosePartitions(_message.Message):
    __slots__ = ("partition_ids", "leaves")
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    leaves: bool
    def __init__(self, partition_ids: _Optional[_Iterable[int]] = ..., leaves: bool = ...) -> None: ...

class FollowResponse(_message.Message):
    __slots__ = ("opened", "batch", "closed", "floors")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    FLOORS_FIELD_NUMBER: _ClassVar[int]
    opened: OpenedPartitions
    batch: Batch
    closed: ClosedPartitions
    floors: PurgeFloors
    def __init__(self, opened: _Optional[_Union[OpenedPartitions, _Mapping]] = ..., batch: _Optional[_Union[Batch, _Mapping]] = ..., closed: _Optional[_Union[ClosedPartitions, _Mapping]] = ..., floors: _Optional[_Union[PurgeFloors, _Mapping]] = ...) -> None: ...

class OpenedPartition(_message.Message):
    __slots__ = ("partition_id", "primary_epoch", "refusal", "take_snapshot", "common_point", "stream_from", "history", "records", "bytes", "required", "unchanged_from")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    PRIMARY_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    TAKE_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    COMMON_POINT_FIELD_NUMBER: _ClassVar[int]
    STREAM_FROM_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_FIELD_NUMBER: _ClassVar[int]
    UNCHANGED_FROM_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    primary_epoch: int
    refusal: _errors_pb2.Error
    take_snapshot: bool
    common_point: int
    stream_from: int
    history: _containers.RepeatedCompositeFieldContainer[EpochStart]
    records: int
    bytes: int
    required: bool
    unchanged_from: int
    def __init__(self, partition_id: _Optional[int] = ..., primary_epoch: _Optional[int] = ..., refusal: _Optional[_Union[_errors_pb2.Error, _Mapping]] = ..., take_snapshot: bool = ..., common_point: _Optional[int] = ..., stream_from: _Optional[int] = ..., history: _Optional[_Iterable[_Union[EpochStart, _Mapping]]] = ..., records: _Optional[int] = ..., bytes: _Optional[int] = ..., required: bool = ..., unchanged_from: _Optional[int] = ...) -> None: ...

class OpenedPartitions(_message.Message):
    __slots__ = ("partitions",)
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    partitions: _containers.RepeatedCompositeFieldContainer[OpenedPartition]
    def __init__(self, partitions: _Optional[_Iterable[_Union[OpenedPartition, _Mapping]]] = ...) -> None: ...

class ClosedPartitions(_message.Message):
    __slots__ = ("partition_ids", "reason")
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    reason: _errors_pb2.Error
    def __init__(self, partition_ids: _Optional[_Iterable[int]] = ..., reason: _Optional[_Union[_errors_pb2.Error, _Mapping]] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ("number", "partition_ids", "primary_epochs", "previous", "last", "keys", "records", "crc32", "merges")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    PRIMARY_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    MERGES_FIELD_NUMBER: _ClassVar[int]
    number: int
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    primary_epochs: _containers.RepeatedScalarFieldContainer[int]
    previous: _containers.RepeatedScalarFieldContainer[int]
    last: _containers.RepeatedScalarFieldContainer[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    records: _containers.RepeatedScalarFieldContainer[bytes]
    crc32: int
    merges: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, number: _Optional[int] = ..., partition_ids: _Optional[_Iterable[int]] = ..., primary_epochs: _Optional[_Iterable[int]] = ..., previous: _Optional[_Iterable[int]] = ..., last: _Optional[_Iterable[int]] = ..., keys: _Optional[_Iterable[bytes]] = ..., records: _Optional[_Iterable[bytes]] = ..., crc32: _Optional[int] = ..., merges: _Optional[_Iterable[bytes]] = ...) -> None: ...

class MergeStep(_message.Message):
    __slots__ = ("partition_id", "sequence", "load_id", "attempts", "numbers", "after_key", "until_key", "rows", "bytes", "replace", "prefix", "tombstone_at_ms", "last")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    AFTER_KEY_FIELD_NUMBER: _ClassVar[int]
    UNTIL_KEY_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    TOMBSTONE_AT_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    sequence: int
    load_id: int
    attempts: _containers.RepeatedScalarFieldContainer[int]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    after_key: bytes
    until_key: bytes
    rows: int
    bytes: int
    replace: bool
    prefix: bytes
    tombstone_at_ms: int
    last: bool
    def __init__(self, partition_id: _Optional[int] = ..., sequence: _Optional[int] = ..., load_id: _Optional[int] = ..., attempts: _Optional[_Iterable[int]] = ..., numbers: _Optional[_Iterable[int]] = ..., after_key: _Optional[bytes] = ..., until_key: _Optional[bytes] = ..., rows: _Optional[int] = ..., bytes: _Optional[int] = ..., replace: bool = ..., prefix: _Optional[bytes] = ..., tombstone_at_ms: _Optional[int] = ..., last: bool = ...) -> None: ...

class PurgeFloors(_message.Message):
    __slots__ = ("partition_ids", "sequences")
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    sequences: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, partition_ids: _Optional[_Iterable[int]] = ..., sequences: _Optional[_Iterable[int]] = ...) -> None: ...

class ReadPageRequest(_message.Message):
    __slots__ = ("cluster_id", "partition_id", "primary_epoch", "after_sequence", "after_key", "reach", "bytes_max", "snapshot")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    PRIMARY_EPOCH_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    AFTER_KEY_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    partition_id: int
    primary_epoch: int
    after_sequence: int
    after_key: bytes
    reach: int
    bytes_max: int
    snapshot: bool
    def __init__(self, cluster_id: _Optional[str] = ..., partition_id: _Optional[int] = ..., primary_epoch: _Optional[int] = ..., after_sequence: _Optional[int] = ..., after_key: _Optional[bytes] = ..., reach: _Optional[int] = ..., bytes_max: _Optional[int] = ..., snapshot: bool = ...) -> None: ...

class RecordPage(_message.Message):
    __slots__ = ("keys", "records", "crc32", "bound", "last_key", "end", "purge_floor")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    LAST_KEY_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    PURGE_FLOOR_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    records: _containers.RepeatedScalarFieldContainer[bytes]
    crc32: int
    bound: int
    last_key: bytes
    end: bool
    purge_floor: int
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., records: _Optional[_Iterable[bytes]] = ..., crc32: _Optional[int] = ..., bound: _Optional[int] = ..., last_key: _Optional[bytes] = ..., end: bool = ..., purge_floor: _Optional[int] = ...) -> None: ...

class ReadKeysRequest(_message.Message):
    __slots__ = ("cluster_id", "partition_id", "primary_epoch", "keys")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    PRIMARY_EPOCH_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    partition_id: int
    primary_epoch: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, cluster_id: _Optional[str] = ..., partition_id: _Optional[int] = ..., primary_epoch: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ChecksumsRequest(_message.Message):
    __slots__ = ("cluster_id", "partition_ids", "positions_only")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_ONLY_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    positions_only: bool
    def __init__(self, cluster_id: _Optional[str] = ..., partition_ids: _Optional[_Iterable[int]] = ..., positions_only: bool = ...) -> None: ...

class CopyChecksum(_message.Message):
    __slots__ = ("partition_id", "usable", "complete_through", "records", "bytes", "digest")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    USABLE_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_THROUGH_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    usable: bool
    complete_through: int
    records: int
    bytes: int
    digest: int
    def __init__(self, partition_id: _Optional[int] = ..., usable: bool = ..., complete_through: _Optional[int] = ..., records: _Optional[int] = ..., bytes: _Optional[int] = ..., digest: _Optional[int] = ...) -> None: ...

class ChecksumsResponse(_message.Message):
    __slots__ = ("copies",)
    COPIES_FIELD_NUMBER: _ClassVar[int]
    copies: _containers.RepeatedCompositeFieldContainer[CopyChecksum]
    def __init__(self, copies: _Optional[_Iterable[_Union[CopyChecksum, _Mapping]]] = ...) -> None: ...

class PartitionSizesRequest(_message.Message):
    __slots__ = ("cluster_id",)
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    def __init__(self, cluster_id: _Optional[str] = ...) -> None: ...

class PartitionSizesResponse(_message.Message):
    __slots__ = ("partition_ids", "records", "bytes", "stale")
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    records: _containers.RepeatedScalarFieldContainer[int]
    bytes: _containers.RepeatedScalarFieldContainer[int]
    stale: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, partition_ids: _Optional[_Iterable[int]] = ..., records: _Optional[_Iterable[int]] = ..., bytes: _Optional[_Iterable[int]] = ..., stale: _Optional[_Iterable[bool]] = ...) -> None: ...
