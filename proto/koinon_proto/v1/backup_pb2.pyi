from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class OpenCutRequest(_message.Message):
    __slots__ = ("cluster_id", "table_version", "cut", "keyspace_ids")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_IDS_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    table_version: int
    cut: int
    keyspace_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, cluster_id: _Optional[str] = ..., table_version: _Optional[int] = ..., cut: _Optional[int] = ..., keyspace_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CutEvent(_message.Message):
    __slots__ = ("grown_bytes",)
    GROWN_BYTES_FIELD_NUMBER: _ClassVar[int]
    grown_bytes: int
    def __init__(self, grown_bytes: _Optional[int] = ...) -> None: ...

class CutRequest(_message.Message):
    __slots__ = ("cluster_id", "cut")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    cut: int
    def __init__(self, cluster_id: _Optional[str] = ..., cut: _Optional[int] = ...) -> None: ...

class MadeCut(_message.Message):
    __slots__ = ("partition_ids", "sequences", "table_version")
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    sequences: _containers.RepeatedScalarFieldContainer[int]
    table_version: int
    def __init__(self, partition_ids: _Optional[_Iterable[int]] = ..., sequences: _Optional[_Iterable[int]] = ..., table_version: _Optional[int] = ...) -> None: ...

class ReleaseCutResponse(_message.Message):
    __slots__ = ("held_ms",)
    HELD_MS_FIELD_NUMBER: _ClassVar[int]
    held_ms: int
    def __init__(self, held_ms: _Optional[int] = ...) -> None: ...

class ReadCutRequest(_message.Message):
    __slots__ = ("cluster_id", "cut", "partition_id")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    cut: int
    partition_id: int
    def __init__(self, cluster_id: _Optional[str] = ..., cut: _Optional[int] = ..., partition_id: _Optional[int] = ...) -> None: ...

class CutPage(_message.Message):
    __slots__ = ("columns",)
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    columns: bytes
    def __init__(self, columns: _Optional[bytes] = ...) -> None: ...
