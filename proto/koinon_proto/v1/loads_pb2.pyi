from koinon_proto.v1 import kv_pb2 as _kv_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LoadMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOAD_MODE_UNSPECIFIED: _ClassVar[LoadMode]
    LOAD_MODE_APPEND: _ClassVar[LoadMode]
    LOAD_MODE_OVERWRITE: _ClassVar[LoadMode]

class LoadState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOAD_STATE_UNSPECIFIED: _ClassVar[LoadState]
    LOAD_STATE_OPEN: _ClassVar[LoadState]
    LOAD_STATE_MERGING: _ClassVar[LoadState]
    LOAD_STATE_DONE: _ClassVar[LoadState]
    LOAD_STATE_ABORTED: _ClassVar[LoadState]
LOAD_MODE_UNSPECIFIED: LoadMode
LOAD_MODE_APPEND: LoadMode
LOAD_MODE_OVERWRITE: LoadMode
LOAD_STATE_UNSPECIFIED: LoadState
LOAD_STATE_OPEN: LoadState
LOAD_STATE_MERGING: LoadState
LOAD_STATE_DONE: LoadState
LOAD_STATE_ABORTED: LoadState

class StreamBatch(_message.Message):
    __slots__ = ("query_id", "batch_id")
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    query_id: str
    batch_id: int
    def __init__(self, query_id: _Optional[str] = ..., batch_id: _Optional[int] = ...) -> None: ...

class OpenLoadRequest(_message.Message):
    __slots__ = ("cluster_id", "job_id", "mode", "prefix", "stream_batch", "description", "timeout_ms", "keyspace_id", "only_check")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    STREAM_BATCH_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    ONLY_CHECK_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    job_id: str
    mode: LoadMode
    prefix: bytes
    stream_batch: StreamBatch
    description: str
    timeout_ms: int
    keyspace_id: int
    only_check: bool
    def __init__(self, cluster_id: _Optional[str] = ..., job_id: _Optional[str] = ..., mode: _Optional[_Union[LoadMode, str]] = ..., prefix: _Optional[bytes] = ..., stream_batch: _Optional[_Union[StreamBatch, _Mapping]] = ..., description: _Optional[str] = ..., timeout_ms: _Optional[int] = ..., keyspace_id: _Optional[int] = ..., only_check: bool = ...) -> None: ...

class OpenLoadResponse(_message.Message):
    __slots__ = ("load_id", "state", "table_version", "cluster_id")
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    load_id: int
    state: LoadState
    table_version: int
    cluster_id: str
    def __init__(self, load_id: _Optional[int] = ..., state: _Optional[_Union[LoadState, str]] = ..., table_version: _Optional[int] = ..., cluster_id: _Optional[str] = ...) -> None: ...

class TouchLoadRequest(_message.Message):
    __slots__ = ("cluster_id", "load_id", "attempt", "rows", "bytes")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    load_id: int
    attempt: int
    rows: int
    bytes: int
    def __init__(self, cluster_id: _Optional[str] = ..., load_id: _Optional[int] = ..., attempt: _Optional[int] = ..., rows: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class TouchLoadResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: LoadState
    def __init__(self, state: _Optional[_Union[LoadState, str]] = ...) -> None: ...

class CommitLoadRequest(_message.Message):
    __slots__ = ("cluster_id", "load_id", "attempts", "partition_ids", "rows", "bytes")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    load_id: int
    attempts: _containers.RepeatedScalarFieldContainer[int]
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    rows: int
    bytes: int
    def __init__(self, cluster_id: _Optional[str] = ..., load_id: _Optional[int] = ..., attempts: _Optional[_Iterable[int]] = ..., partition_ids: _Optional[_Iterable[int]] = ..., rows: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class CommitLoadResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: LoadState
    def __init__(self, state: _Optional[_Union[LoadState, str]] = ...) -> None: ...

class AbortLoadRequest(_message.Message):
    __slots__ = ("cluster_id", "load_id", "reason")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    load_id: int
    reason: str
    def __init__(self, cluster_id: _Optional[str] = ..., load_id: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class AbortLoadResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: LoadState
    def __init__(self, state: _Optional[_Union[LoadState, str]] = ...) -> None: ...

class EmptyKeyspaceRequest(_message.Message):
    __slots__ = ("cluster_id", "job_id", "keyspace_id", "description")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    job_id: str
    keyspace_id: int
    description: str
    def __init__(self, cluster_id: _Optional[str] = ..., job_id: _Optional[str] = ..., keyspace_id: _Optional[int] = ..., description: _Optional[str] = ...) -> None: ...

class EmptyKeyspaceResponse(_message.Message):
    __slots__ = ("state", "load_id", "table_version")
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    state: LoadState
    load_id: int
    table_version: int
    def __init__(self, state: _Optional[_Union[LoadState, str]] = ..., load_id: _Optional[int] = ..., table_version: _Optional[int] = ...) -> None: ...

class LoadInfo(_message.Message):
    __slots__ = ("load_id", "job_id", "state", "mode", "prefix", "stream_batch", "description", "partitions", "partitions_merged", "rows", "bytes", "idle_ms", "timeout_ms", "reason", "owner", "keyspace")
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    STREAM_BATCH_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_MERGED_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    IDLE_MS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_FIELD_NUMBER: _ClassVar[int]
    load_id: int
    job_id: str
    state: LoadState
    mode: LoadMode
    prefix: bytes
    stream_batch: StreamBatch
    description: str
    partitions: int
    partitions_merged: int
    rows: int
    bytes: int
    idle_ms: int
    timeout_ms: int
    reason: str
    owner: str
    keyspace: str
    def __init__(self, load_id: _Optional[int] = ..., job_id: _Optional[str] = ..., state: _Optional[_Union[LoadState, str]] = ..., mode: _Optional[_Union[LoadMode, str]] = ..., prefix: _Optional[bytes] = ..., stream_batch: _Optional[_Union[StreamBatch, _Mapping]] = ..., description: _Optional[str] = ..., partitions: _Optional[int] = ..., partitions_merged: _Optional[int] = ..., rows: _Optional[int] = ..., bytes: _Optional[int] = ..., idle_ms: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., reason: _Optional[str] = ..., owner: _Optional[str] = ..., keyspace: _Optional[str] = ...) -> None: ...

class GetLoadsRequest(_message.Message):
    __slots__ = ("cluster_id", "load_id")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    load_id: int
    def __init__(self, cluster_id: _Optional[str] = ..., load_id: _Optional[int] = ...) -> None: ...

class GetLoadsResponse(_message.Message):
    __slots__ = ("loads",)
    LOADS_FIELD_NUMBER: _ClassVar[int]
    loads: _containers.RepeatedCompositeFieldContainer[LoadInfo]
    def __init__(self, loads: _Optional[_Iterable[_Union[LoadInfo, _Mapping]]] = ...) -> None: ...

class GetManifestRequest(_message.Message):
    __slots__ = ("cluster_id", "load_id")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    load_id: int
    def __init__(self, cluster_id: _Optional[str] = ..., load_id: _Optional[int] = ...) -> None: ...

class LoadManifest(_message.Message):
    __slots__ = ("load_id", "mode", "prefix", "attempts", "partition_ids", "keyspace_id")
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    load_id: int
    mode: LoadMode
    prefix: bytes
    attempts: _containers.RepeatedScalarFieldContainer[int]
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    keyspace_id: int
    def __init__(self, load_id: _Optional[int] = ..., mode: _Optional[_Union[LoadMode, str]] = ..., prefix: _Optional[bytes] = ..., attempts: _Optional[_Iterable[int]] = ..., partition_ids: _Optional[_Iterable[int]] = ..., keyspace_id: _Optional[int] = ...) -> None: ...

class ReportMergedRequest(_message.Message):
    __slots__ = ("cluster_id", "load_id", "partition_ids")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    load_id: int
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, cluster_id: _Optional[str] = ..., load_id: _Optional[int] = ..., partition_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReportMergedResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: LoadState
    def __init__(self, state: _Optional[_Union[LoadState, str]] = ...) -> None: ...

class StageRequest(_message.Message):
    __slots__ = ("cluster_id", "table_version", "load_id", "attempt", "partition_ids", "numbers", "chunks")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    table_version: int
    load_id: int
    attempt: int
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    chunks: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, cluster_id: _Optional[str] = ..., table_version: _Optional[int] = ..., load_id: _Optional[int] = ..., attempt: _Optional[int] = ..., partition_ids: _Optional[_Iterable[int]] = ..., numbers: _Optional[_Iterable[int]] = ..., chunks: _Optional[_Iterable[bytes]] = ...) -> None: ...

class StageResponse(_message.Message):
    __slots__ = ("refusals",)
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    refusals: _containers.RepeatedCompositeFieldContainer[_kv_pb2.Refusal]
    def __init__(self, refusals: _Optional[_Iterable[_Union[_kv_pb2.Refusal, _Mapping]]] = ...) -> None: ...

class PrepareRequest(_message.Message):
    __slots__ = ("cluster_id", "table_version", "load_id", "attempts", "partition_ids", "rows", "duplicates_allowed")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DUPLICATES_ALLOWED_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    table_version: int
    load_id: int
    attempts: _containers.RepeatedScalarFieldContainer[int]
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    duplicates_allowed: bool
    def __init__(self, cluster_id: _Optional[str] = ..., table_version: _Optional[int] = ..., load_id: _Optional[int] = ..., attempts: _Optional[_Iterable[int]] = ..., partition_ids: _Optional[_Iterable[int]] = ..., rows: _Optional[_Iterable[int]] = ..., duplicates_allowed: bool = ...) -> None: ...

class PrepareResponse(_message.Message):
    __slots__ = ("refusals", "duplicate_rows", "duplicate_keys")
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_ROWS_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_KEYS_FIELD_NUMBER: _ClassVar[int]
    refusals: _containers.RepeatedCompositeFieldContainer[_kv_pb2.Refusal]
    duplicate_rows: int
    duplicate_keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, refusals: _Optional[_Iterable[_Union[_kv_pb2.Refusal, _Mapping]]] = ..., duplicate_rows: _Optional[int] = ..., duplicate_keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ReadColumnsRequest(_message.Message):
    __slots__ = ("cluster_id", "table_version", "partition_ids", "prefix", "cursor", "bytes_max", "keys_only", "want_versions", "keyspace_id")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    KEYS_ONLY_FIELD_NUMBER: _ClassVar[int]
    WANT_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    table_version: int
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    prefix: bytes
    cursor: _kv_pb2.ScanCursor
    bytes_max: int
    keys_only: bool
    want_versions: bool
    keyspace_id: int
    def __init__(self, cluster_id: _Optional[str] = ..., table_version: _Optional[int] = ..., partition_ids: _Optional[_Iterable[int]] = ..., prefix: _Optional[bytes] = ..., cursor: _Optional[_Union[_kv_pb2.ScanCursor, _Mapping]] = ..., bytes_max: _Optional[int] = ..., keys_only: bool = ..., want_versions: bool = ..., keyspace_id: _Optional[int] = ...) -> None: ...

class ReadColumnsResponse(_message.Message):
    __slots__ = ("columns", "partition_ids", "row_counts", "versions", "expires_at_ms", "next", "refusals")
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNTS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_MS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    columns: bytes
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    row_counts: _containers.RepeatedScalarFieldContainer[int]
    versions: _containers.RepeatedScalarFieldContainer[int]
    expires_at_ms: _containers.RepeatedScalarFieldContainer[int]
    next: _kv_pb2.ScanCursor
    refusals: _containers.RepeatedCompositeFieldContainer[_kv_pb2.Refusal]
    def __init__(self, columns: _Optional[bytes] = ..., partition_ids: _Optional[_Iterable[int]] = ..., row_counts: _Optional[_Iterable[int]] = ..., versions: _Optional[_Iterable[int]] = ..., expires_at_ms: _Optional[_Iterable[int]] = ..., next: _Optional[_Union[_kv_pb2.ScanCursor, _Mapping]] = ..., refusals: _Optional[_Iterable[_Union[_kv_pb2.Refusal, _Mapping]]] = ...) -> None: ...
