from koinon_proto.v1 import errors_pb2 as _errors_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Durability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DURABILITY_ALL_IN_SYNC: _ClassVar[Durability]
    DURABILITY_PRIMARY: _ClassVar[Durability]
DURABILITY_ALL_IN_SYNC: Durability
DURABILITY_PRIMARY: Durability

class GetRequest(_message.Message):
    __slots__ = ("key", "table_version", "cluster_id", "keyspace")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    table_version: int
    cluster_id: str
    keyspace: str
    def __init__(self, key: _Optional[bytes] = ..., table_version: _Optional[int] = ..., cluster_id: _Optional[str] = ..., keyspace: _Optional[str] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("found", "value", "version", "expires_at_ms")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_MS_FIELD_NUMBER: _ClassVar[int]
    found: bool
    value: bytes
    version: int
    expires_at_ms: int
    def __init__(self, found: bool = ..., value: _Optional[bytes] = ..., version: _Optional[int] = ..., expires_at_ms: _Optional[int] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("key", "value", "table_version", "ttl_ms", "if_version", "cluster_id", "durability", "keyspace")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    IF_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    value: bytes
    table_version: int
    ttl_ms: int
    if_version: int
    cluster_id: str
    durability: Durability
    keyspace: str
    def __init__(self, key: _Optional[bytes] = ..., value: _Optional[bytes] = ..., table_version: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., if_version: _Optional[int] = ..., cluster_id: _Optional[str] = ..., durability: _Optional[_Union[Durability, str]] = ..., keyspace: _Optional[str] = ...) -> None: ...

class PutResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("key", "table_version", "if_version", "cluster_id", "durability", "keyspace")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    IF_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    table_version: int
    if_version: int
    cluster_id: str
    durability: Durability
    keyspace: str
    def __init__(self, key: _Optional[bytes] = ..., table_version: _Optional[int] = ..., if_version: _Optional[int] = ..., cluster_id: _Optional[str] = ..., durability: _Optional[_Union[Durability, str]] = ..., keyspace: _Optional[str] = ...) -> None: ...

class DeleteResponse(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: bool = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("partition_id", "error")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    error: _errors_pb2.Error
    def __init__(self, partition_id: _Optional[int] = ..., error: _Optional[_Union[_errors_pb2.Error, _Mapping]] = ...) -> None: ...

class RowError(_message.Message):
    __slots__ = ("row", "error")
    ROW_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    row: int
    error: _errors_pb2.Error
    def __init__(self, row: _Optional[int] = ..., error: _Optional[_Union[_errors_pb2.Error, _Mapping]] = ...) -> None: ...

class BatchGetRequest(_message.Message):
    __slots__ = ("table_version", "keys", "partition_ids", "want_versions", "cluster_id", "keys_only", "keyspace_id")
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    WANT_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_ONLY_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    table_version: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    want_versions: bool
    cluster_id: str
    keys_only: bool
    keyspace_id: int
    def __init__(self, table_version: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., partition_ids: _Optional[_Iterable[int]] = ..., want_versions: bool = ..., cluster_id: _Optional[str] = ..., keys_only: bool = ..., keyspace_id: _Optional[int] = ...) -> None: ...

class BatchGetResponse(_message.Message):
    __slots__ = ("values", "missing", "versions", "expires_at_ms", "refusals")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_MS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[bytes]
    missing: _containers.RepeatedScalarFieldContainer[int]
    versions: _containers.RepeatedScalarFieldContainer[int]
    expires_at_ms: _containers.RepeatedScalarFieldContainer[int]
    refusals: _containers.RepeatedCompositeFieldContainer[Refusal]
    def __init__(self, values: _Optional[_Iterable[bytes]] = ..., missing: _Optional[_Iterable[int]] = ..., versions: _Optional[_Iterable[int]] = ..., expires_at_ms: _Optional[_Iterable[int]] = ..., refusals: _Optional[_Iterable[_Union[Refusal, _Mapping]]] = ...) -> None: ...

class BatchWriteRequest(_message.Message):
    __slots__ = ("table_version", "keys", "values", "partition_ids", "deletes", "ttl_ms", "conditions", "want_versions", "cluster_id", "durability", "keyspace_id", "list_present", "take_by_ms")
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    DELETES_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    WANT_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    LIST_PRESENT_FIELD_NUMBER: _ClassVar[int]
    TAKE_BY_MS_FIELD_NUMBER: _ClassVar[int]
    table_version: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    values: _containers.RepeatedScalarFieldContainer[bytes]
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    deletes: _containers.RepeatedScalarFieldContainer[int]
    ttl_ms: _containers.RepeatedScalarFieldContainer[int]
    conditions: _containers.RepeatedCompositeFieldContainer[Condition]
    want_versions: bool
    cluster_id: str
    durability: Durability
    keyspace_id: int
    list_present: bool
    take_by_ms: int
    def __init__(self, table_version: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., values: _Optional[_Iterable[bytes]] = ..., partition_ids: _Optional[_Iterable[int]] = ..., deletes: _Optional[_Iterable[int]] = ..., ttl_ms: _Optional[_Iterable[int]] = ..., conditions: _Optional[_Iterable[_Union[Condition, _Mapping]]] = ..., want_versions: bool = ..., cluster_id: _Optional[str] = ..., durability: _Optional[_Union[Durability, str]] = ..., keyspace_id: _Optional[int] = ..., list_present: bool = ..., take_by_ms: _Optional[int] = ...) -> None: ...

class Condition(_message.Message):
    __slots__ = ("row", "if_version")
    ROW_FIELD_NUMBER: _ClassVar[int]
    IF_VERSION_FIELD_NUMBER: _ClassVar[int]
    row: int
    if_version: int
    def __init__(self, row: _Optional[int] = ..., if_version: _Optional[int] = ...) -> None: ...

class BatchWriteResponse(_message.Message):
    __slots__ = ("versions", "absent", "refusals", "row_errors", "present")
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    ROW_ERRORS_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedScalarFieldContainer[int]
    absent: _containers.RepeatedScalarFieldContainer[int]
    refusals: _containers.RepeatedCompositeFieldContainer[Refusal]
    row_errors: _containers.RepeatedCompositeFieldContainer[RowError]
    present: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, versions: _Optional[_Iterable[int]] = ..., absent: _Optional[_Iterable[int]] = ..., refusals: _Optional[_Iterable[_Union[Refusal, _Mapping]]] = ..., row_errors: _Optional[_Iterable[_Union[RowError, _Mapping]]] = ..., present: _Optional[_Iterable[int]] = ...) -> None: ...

class BatchUpdateRequest(_message.Message):
    __slots__ = ("table_version", "keys", "partition_ids", "updates", "cluster_id", "durability", "keyspace_id", "take_by_ms")
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TAKE_BY_MS_FIELD_NUMBER: _ClassVar[int]
    table_version: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    updates: _containers.RepeatedCompositeFieldContainer[Update]
    cluster_id: str
    durability: Durability
    keyspace_id: int
    take_by_ms: int
    def __init__(self, table_version: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., partition_ids: _Optional[_Iterable[int]] = ..., updates: _Optional[_Iterable[_Union[Update, _Mapping]]] = ..., cluster_id: _Optional[str] = ..., durability: _Optional[_Union[Durability, str]] = ..., keyspace_id: _Optional[int] = ..., take_by_ms: _Optional[int] = ...) -> None: ...

class Update(_message.Message):
    __slots__ = ("increment", "touch", "get_or_put")
    INCREMENT_FIELD_NUMBER: _ClassVar[int]
    TOUCH_FIELD_NUMBER: _ClassVar[int]
    GET_OR_PUT_FIELD_NUMBER: _ClassVar[int]
    increment: Increment
    touch: Touch
    get_or_put: GetOrPut
    def __init__(self, increment: _Optional[_Union[Increment, _Mapping]] = ..., touch: _Optional[_Union[Touch, _Mapping]] = ..., get_or_put: _Optional[_Union[GetOrPut, _Mapping]] = ...) -> None: ...

class Increment(_message.Message):
    __slots__ = ("by", "ttl_ms")
    BY_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    by: int
    ttl_ms: int
    def __init__(self, by: _Optional[int] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class Touch(_message.Message):
    __slots__ = ("ttl_ms",)
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    ttl_ms: int
    def __init__(self, ttl_ms: _Optional[int] = ...) -> None: ...

class GetOrPut(_message.Message):
    __slots__ = ("value", "ttl_ms")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    value: bytes
    ttl_ms: int
    def __init__(self, value: _Optional[bytes] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class UpdateResult(_message.Message):
    __slots__ = ("version", "number", "found", "value")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    version: int
    number: int
    found: bool
    value: bytes
    def __init__(self, version: _Optional[int] = ..., number: _Optional[int] = ..., found: bool = ..., value: _Optional[bytes] = ...) -> None: ...

class BatchUpdateResponse(_message.Message):
    __slots__ = ("results", "refusals", "row_errors")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    ROW_ERRORS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[UpdateResult]
    refusals: _containers.RepeatedCompositeFieldContainer[Refusal]
    row_errors: _containers.RepeatedCompositeFieldContainer[RowError]
    def __init__(self, results: _Optional[_Iterable[_Union[UpdateResult, _Mapping]]] = ..., refusals: _Optional[_Iterable[_Union[Refusal, _Mapping]]] = ..., row_errors: _Optional[_Iterable[_Union[RowError, _Mapping]]] = ...) -> None: ...

class CommitBatchRequest(_message.Message):
    __slots__ = ("table_version", "cluster_id", "partition_id", "operations", "durability", "keyspace_id", "take_by_ms")
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TAKE_BY_MS_FIELD_NUMBER: _ClassVar[int]
    table_version: int
    cluster_id: str
    partition_id: int
    operations: _containers.RepeatedCompositeFieldContainer[Operation]
    durability: Durability
    keyspace_id: int
    take_by_ms: int
    def __init__(self, table_version: _Optional[int] = ..., cluster_id: _Optional[str] = ..., partition_id: _Optional[int] = ..., operations: _Optional[_Iterable[_Union[Operation, _Mapping]]] = ..., durability: _Optional[_Union[Durability, str]] = ..., keyspace_id: _Optional[int] = ..., take_by_ms: _Optional[int] = ...) -> None: ...

class Operation(_message.Message):
    __slots__ = ("key", "check", "put", "delete", "increment")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    PUT_FIELD_NUMBER: _ClassVar[int]
    DELETE_FIELD_NUMBER: _ClassVar[int]
    INCREMENT_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    check: CheckVersion
    put: PutValue
    delete: DeleteRecord
    increment: Increment
    def __init__(self, key: _Optional[bytes] = ..., check: _Optional[_Union[CheckVersion, _Mapping]] = ..., put: _Optional[_Union[PutValue, _Mapping]] = ..., delete: _Optional[_Union[DeleteRecord, _Mapping]] = ..., increment: _Optional[_Union[Increment, _Mapping]] = ...) -> None: ...

class CheckVersion(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class PutValue(_message.Message):
    __slots__ = ("value", "ttl_ms")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    value: bytes
    ttl_ms: int
    def __init__(self, value: _Optional[bytes] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class DeleteRecord(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OperationResult(_message.Message):
    __slots__ = ("number", "found")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    number: int
    found: bool
    def __init__(self, number: _Optional[int] = ..., found: bool = ...) -> None: ...

class CommitBatchResponse(_message.Message):
    __slots__ = ("version", "results")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    version: int
    results: _containers.RepeatedCompositeFieldContainer[OperationResult]
    def __init__(self, version: _Optional[int] = ..., results: _Optional[_Iterable[_Union[OperationResult, _Mapping]]] = ...) -> None: ...

class ScanCursor(_message.Message):
    __slots__ = ("partition_id", "after_key")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_KEY_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    after_key: bytes
    def __init__(self, partition_id: _Optional[int] = ..., after_key: _Optional[bytes] = ...) -> None: ...

class ScanRequest(_message.Message):
    __slots__ = ("table_version", "partition_ids", "prefix", "cursor", "limit", "keys_only", "want_versions", "cluster_id", "start", "reverse", "keyspace_id")
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    KEYS_ONLY_FIELD_NUMBER: _ClassVar[int]
    WANT_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    REVERSE_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    table_version: int
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    prefix: bytes
    cursor: ScanCursor
    limit: int
    keys_only: bool
    want_versions: bool
    cluster_id: str
    start: bytes
    reverse: bool
    keyspace_id: int
    def __init__(self, table_version: _Optional[int] = ..., partition_ids: _Optional[_Iterable[int]] = ..., prefix: _Optional[bytes] = ..., cursor: _Optional[_Union[ScanCursor, _Mapping]] = ..., limit: _Optional[int] = ..., keys_only: bool = ..., want_versions: bool = ..., cluster_id: _Optional[str] = ..., start: _Optional[bytes] = ..., reverse: bool = ..., keyspace_id: _Optional[int] = ...) -> None: ...

class ScanResponse(_message.Message):
    __slots__ = ("keys", "values", "partition_ids", "versions", "expires_at_ms", "next", "refusals", "in_range")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_MS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    IN_RANGE_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    values: _containers.RepeatedScalarFieldContainer[bytes]
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    versions: _containers.RepeatedScalarFieldContainer[int]
    expires_at_ms: _containers.RepeatedScalarFieldContainer[int]
    next: ScanCursor
    refusals: _containers.RepeatedCompositeFieldContainer[Refusal]
    in_range: bool
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., values: _Optional[_Iterable[bytes]] = ..., partition_ids: _Optional[_Iterable[int]] = ..., versions: _Optional[_Iterable[int]] = ..., expires_at_ms: _Optional[_Iterable[int]] = ..., next: _Optional[_Union[ScanCursor, _Mapping]] = ..., refusals: _Optional[_Iterable[_Union[Refusal, _Mapping]]] = ..., in_range: bool = ...) -> None: ...

class AttendRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AttendResponse(_message.Message):
    __slots__ = ("leaving", "clock_ms")
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    CLOCK_MS_FIELD_NUMBER: _ClassVar[int]
    leaving: bool
    clock_ms: int
    def __init__(self, leaving: bool = ..., clock_ms: _Optional[int] = ...) -> None: ...
