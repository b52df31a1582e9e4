from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RankBy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RANK_BY_ROWS: _ClassVar[RankBy]
    RANK_BY_READS: _ClassVar[RankBy]
    RANK_BY_WRITES: _ClassVar[RankBy]
    RANK_BY_BYTES: _ClassVar[RankBy]
RANK_BY_ROWS: RankBy
RANK_BY_READS: RankBy
RANK_BY_WRITES: RankBy
RANK_BY_BYTES: RankBy

class GetTrafficRequest(_message.Message):
    __slots__ = ("cluster_id",)
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    def __init__(self, cluster_id: _Optional[str] = ...) -> None: ...

class TrafficCounters(_message.Message):
    __slots__ = ("elapsed_us", "partition_ids", "reads", "writes", "read_bytes", "written_bytes", "followers")
    ELAPSED_US_FIELD_NUMBER: _ClassVar[int]
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    FOLLOWERS_FIELD_NUMBER: _ClassVar[int]
    elapsed_us: int
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    reads: _containers.RepeatedScalarFieldContainer[int]
    writes: _containers.RepeatedScalarFieldContainer[int]
    read_bytes: _containers.RepeatedScalarFieldContainer[int]
    written_bytes: _containers.RepeatedScalarFieldContainer[int]
    followers: _containers.RepeatedCompositeFieldContainer[FollowerLag]
    def __init__(self, elapsed_us: _Optional[int] = ..., partition_ids: _Optional[_Iterable[int]] = ..., reads: _Optional[_Iterable[int]] = ..., writes: _Optional[_Iterable[int]] = ..., read_bytes: _Optional[_Iterable[int]] = ..., written_bytes: _Optional[_Iterable[int]] = ..., followers: _Optional[_Iterable[_Union[FollowerLag, _Mapping]]] = ...) -> None: ...

class FollowerLag(_message.Message):
    __slots__ = ("node_number", "records", "bytes", "oldest_us")
    NODE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    OLDEST_US_FIELD_NUMBER: _ClassVar[int]
    node_number: int
    records: int
    bytes: int
    oldest_us: int
    def __init__(self, node_number: _Optional[int] = ..., records: _Optional[int] = ..., bytes: _Optional[int] = ..., oldest_us: _Optional[int] = ...) -> None: ...

class SampleKeysRequest(_message.Message):
    __slots__ = ("cluster_id", "duration_ms", "partition_ids", "partitions_max", "keys_max", "rank_by")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_MAX_FIELD_NUMBER: _ClassVar[int]
    KEYS_MAX_FIELD_NUMBER: _ClassVar[int]
    RANK_BY_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    duration_ms: int
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    partitions_max: int
    keys_max: int
    rank_by: RankBy
    def __init__(self, cluster_id: _Optional[str] = ..., duration_ms: _Optional[int] = ..., partition_ids: _Optional[_Iterable[int]] = ..., partitions_max: _Optional[int] = ..., keys_max: _Optional[int] = ..., rank_by: _Optional[_Union[RankBy, str]] = ...) -> None: ...

class KeySample(_message.Message):
    __slots__ = ("elapsed_us", "partition_ids", "keys", "reads", "writes", "read", "written")
    ELAPSED_US_FIELD_NUMBER: _ClassVar[int]
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    elapsed_us: int
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    reads: _containers.RepeatedScalarFieldContainer[int]
    writes: _containers.RepeatedScalarFieldContainer[int]
    read: SampledRows
    written: SampledRows
    def __init__(self, elapsed_us: _Optional[int] = ..., partition_ids: _Optional[_Iterable[int]] = ..., keys: _Optional[_Iterable[bytes]] = ..., reads: _Optional[_Iterable[int]] = ..., writes: _Optional[_Iterable[int]] = ..., read: _Optional[_Union[SampledRows, _Mapping]] = ..., written: _Optional[_Union[SampledRows, _Mapping]] = ...) -> None: ...

class SampledRows(_message.Message):
    __slots__ = ("rows", "taken", "missed_max")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    MISSED_MAX_FIELD_NUMBER: _ClassVar[int]
    rows: int
    taken: int
    missed_max: int
    def __init__(self, rows: _Optional[int] = ..., taken: _Optional[int] = ..., missed_max: _Optional[int] = ...) -> None: ...
