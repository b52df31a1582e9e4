from koinon_proto.v1 import kv_pb2 as _kv_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FeedPosition(_message.Message):
    __slots__ = ("partition_id", "sequence", "bound", "after_key")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    AFTER_KEY_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    sequence: int
    bound: int
    after_key: bytes
    def __init__(self, partition_id: _Optional[int] = ..., sequence: _Optional[int] = ..., bound: _Optional[int] = ..., after_key: _Optional[bytes] = ...) -> None: ...

class ChangesRequest(_message.Message):
    __slots__ = ("table_version", "cluster_id", "keyspace_id", "positions", "prefix", "keys_only")
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    KEYS_ONLY_FIELD_NUMBER: _ClassVar[int]
    table_version: int
    cluster_id: str
    keyspace_id: int
    positions: _containers.RepeatedCompositeFieldContainer[FeedPosition]
    prefix: bytes
    keys_only: bool
    def __init__(self, table_version: _Optional[int] = ..., cluster_id: _Optional[str] = ..., keyspace_id: _Optional[int] = ..., positions: _Optional[_Iterable[_Union[FeedPosition, _Mapping]]] = ..., prefix: _Optional[bytes] = ..., keys_only: bool = ...) -> None: ...

class ChangesResponse(_message.Message):
    __slots__ = ("keys", "values", "versions", "expires_at_ms", "deletes", "advances", "refusals")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_MS_FIELD_NUMBER: _ClassVar[int]
    DELETES_FIELD_NUMBER: _ClassVar[int]
    ADVANCES_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    values: _containers.RepeatedScalarFieldContainer[bytes]
    versions: _containers.RepeatedScalarFieldContainer[int]
    expires_at_ms: _containers.RepeatedScalarFieldContainer[int]
    deletes: _containers.RepeatedScalarFieldContainer[int]
    advances: _containers.RepeatedCompositeFieldContainer[FeedAdvance]
    refusals: _containers.RepeatedCompositeFieldContainer[_kv_pb2.Refusal]
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., values: _Optional[_Iterable[bytes]] = ..., versions: _Optional[_Iterable[int]] = ..., expires_at_ms: _Optional[_Iterable[int]] = ..., deletes: _Optional[_Iterable[int]] = ..., advances: _Optional[_Iterable[_Union[FeedAdvance, _Mapping]]] = ..., refusals: _Optional[_Iterable[_Union[_kv_pb2.Refusal, _Mapping]]] = ...) -> None: ...

class FeedAdvance(_message.Message):
    __slots__ = ("position", "rows", "caught_up")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CAUGHT_UP_FIELD_NUMBER: _ClassVar[int]
    position: FeedPosition
    rows: int
    caught_up: bool
    def __init__(self, position: _Optional[_Union[FeedPosition, _Mapping]] = ..., rows: _Optional[int] = ..., caught_up: bool = ...) -> None: ...
