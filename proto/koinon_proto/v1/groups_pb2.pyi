from koinon_proto.v1 import feed_pb2 as _feed_pb2
from koinon_proto.v1 import kv_pb2 as _kv_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GroupStrategy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GROUP_STRATEGY_UNSPECIFIED: _ClassVar[GroupStrategy]
    GROUP_STRATEGY_RANGE: _ClassVar[GroupStrategy]
    GROUP_STRATEGY_ROUND_ROBIN: _ClassVar[GroupStrategy]
    GROUP_STRATEGY_STICKY: _ClassVar[GroupStrategy]
GROUP_STRATEGY_UNSPECIFIED: GroupStrategy
GROUP_STRATEGY_RANGE: GroupStrategy
GROUP_STRATEGY_ROUND_ROBIN: GroupStrategy
GROUP_STRATEGY_STICKY: GroupStrategy

class Held(_message.Message):
    __slots__ = ("keyspace_id", "partition_ids", "generations")
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    keyspace_id: int
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, keyspace_id: _Optional[int] = ..., partition_ids: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ...) -> None: ...

class AttendGroupRequest(_message.Message):
    __slots__ = ("cluster_id", "group", "member_id", "incarnation", "number", "is_static", "client_name", "keyspace_ids", "strategy", "session_ms", "known_revision", "held", "is_joining")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    IS_STATIC_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_IDS_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    SESSION_MS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_REVISION_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    IS_JOINING_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    group: str
    member_id: str
    incarnation: int
    number: int
    is_static: bool
    client_name: str
    keyspace_ids: _containers.RepeatedScalarFieldContainer[int]
    strategy: GroupStrategy
    session_ms: int
    known_revision: int
    held: _containers.RepeatedCompositeFieldContainer[Held]
    is_joining: bool
    def __init__(self, cluster_id: _Optional[str] = ..., group: _Optional[str] = ..., member_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., number: _Optional[int] = ..., is_static: bool = ..., client_name: _Optional[str] = ..., keyspace_ids: _Optional[_Iterable[int]] = ..., strategy: _Optional[_Union[GroupStrategy, str]] = ..., session_ms: _Optional[int] = ..., known_revision: _Optional[int] = ..., held: _Optional[_Iterable[_Union[Held, _Mapping]]] = ..., is_joining: bool = ...) -> None: ...

class AttendGroupResponse(_message.Message):
    __slots__ = ("group_id", "generation", "revision", "granted", "members", "is_idle", "strategy")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    IS_IDLE_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    group_id: int
    generation: int
    revision: int
    granted: _containers.RepeatedCompositeFieldContainer[Held]
    members: int
    is_idle: bool
    strategy: GroupStrategy
    def __init__(self, group_id: _Optional[int] = ..., generation: _Optional[int] = ..., revision: _Optional[int] = ..., granted: _Optional[_Iterable[_Union[Held, _Mapping]]] = ..., members: _Optional[int] = ..., is_idle: bool = ..., strategy: _Optional[_Union[GroupStrategy, str]] = ...) -> None: ...

class LeaveGroupRequest(_message.Message):
    __slots__ = ("cluster_id", "group", "member_id", "incarnation")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    group: str
    member_id: str
    incarnation: int
    def __init__(self, cluster_id: _Optional[str] = ..., group: _Optional[str] = ..., member_id: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class LeaveGroupResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetGroupsRequest(_message.Message):
    __slots__ = ("cluster_id", "group")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    group: str
    def __init__(self, cluster_id: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class GroupMember(_message.Message):
    __slots__ = ("member_id", "incarnation", "client_name", "peer", "user", "is_static", "session_ms", "heard_ms_ago", "keyspace_ids", "granted", "releasing")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    IS_STATIC_FIELD_NUMBER: _ClassVar[int]
    SESSION_MS_FIELD_NUMBER: _ClassVar[int]
    HEARD_MS_AGO_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_IDS_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    RELEASING_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    incarnation: int
    client_name: str
    peer: str
    user: str
    is_static: bool
    session_ms: int
    heard_ms_ago: int
    keyspace_ids: _containers.RepeatedScalarFieldContainer[int]
    granted: _containers.RepeatedCompositeFieldContainer[Held]
    releasing: _containers.RepeatedCompositeFieldContainer[Held]
    def __init__(self, member_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., client_name: _Optional[str] = ..., peer: _Optional[str] = ..., user: _Optional[str] = ..., is_static: bool = ..., session_ms: _Optional[int] = ..., heard_ms_ago: _Optional[int] = ..., keyspace_ids: _Optional[_Iterable[int]] = ..., granted: _Optional[_Iterable[_Union[Held, _Mapping]]] = ..., releasing: _Optional[_Iterable[_Union[Held, _Mapping]]] = ...) -> None: ...

class GroupStatus(_message.Message):
    __slots__ = ("group_id", "name", "strategy", "generation", "created_at_ms", "member_count", "members", "partition_count", "unowned_count", "changed_ms_ago", "waits_ms")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    MEMBER_COUNT_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    PARTITION_COUNT_FIELD_NUMBER: _ClassVar[int]
    UNOWNED_COUNT_FIELD_NUMBER: _ClassVar[int]
    CHANGED_MS_AGO_FIELD_NUMBER: _ClassVar[int]
    WAITS_MS_FIELD_NUMBER: _ClassVar[int]
    group_id: int
    name: str
    strategy: GroupStrategy
    generation: int
    created_at_ms: int
    member_count: int
    members: _containers.RepeatedCompositeFieldContainer[GroupMember]
    partition_count: int
    unowned_count: int
    changed_ms_ago: int
    waits_ms: int
    def __init__(self, group_id: _Optional[int] = ..., name: _Optional[str] = ..., strategy: _Optional[_Union[GroupStrategy, str]] = ..., generation: _Optional[int] = ..., created_at_ms: _Optional[int] = ..., member_count: _Optional[int] = ..., members: _Optional[_Iterable[_Union[GroupMember, _Mapping]]] = ..., partition_count: _Optional[int] = ..., unowned_count: _Optional[int] = ..., changed_ms_ago: _Optional[int] = ..., waits_ms: _Optional[int] = ...) -> None: ...

class GetGroupsResponse(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[GroupStatus]
    def __init__(self, groups: _Optional[_Iterable[_Union[GroupStatus, _Mapping]]] = ...) -> None: ...

class RaiseGenerationRequest(_message.Message):
    __slots__ = ("cluster_id", "group", "forced", "pause_ms")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    FORCED_FIELD_NUMBER: _ClassVar[int]
    PAUSE_MS_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    group: str
    forced: bool
    pause_ms: int
    def __init__(self, cluster_id: _Optional[str] = ..., group: _Optional[str] = ..., forced: bool = ..., pause_ms: _Optional[int] = ...) -> None: ...

class RaiseGenerationResponse(_message.Message):
    __slots__ = ("group_id", "generation")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    group_id: int
    generation: int
    def __init__(self, group_id: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class DeleteGroupRequest(_message.Message):
    __slots__ = ("cluster_id", "group")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    group: str
    def __init__(self, cluster_id: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class DeleteGroupResponse(_message.Message):
    __slots__ = ("group_id",)
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    group_id: int
    def __init__(self, group_id: _Optional[int] = ...) -> None: ...

class Cursor(_message.Message):
    __slots__ = ("position", "is_committed", "generation", "member_id", "committed_at_ms", "completed_sequence")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    IS_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    position: _feed_pb2.FeedPosition
    is_committed: bool
    generation: int
    member_id: str
    committed_at_ms: int
    completed_sequence: int
    def __init__(self, position: _Optional[_Union[_feed_pb2.FeedPosition, _Mapping]] = ..., is_committed: bool = ..., generation: _Optional[int] = ..., member_id: _Optional[str] = ..., committed_at_ms: _Optional[int] = ..., completed_sequence: _Optional[int] = ...) -> None: ...

class ClaimCursorsRequest(_message.Message):
    __slots__ = ("table_version", "cluster_id", "keyspace_id", "group_id", "member_id", "partition_ids", "generations", "from_now", "take_by_ms")
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    FROM_NOW_FIELD_NUMBER: _ClassVar[int]
    TAKE_BY_MS_FIELD_NUMBER: _ClassVar[int]
    table_version: int
    cluster_id: str
    keyspace_id: int
    group_id: int
    member_id: str
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    from_now: bool
    take_by_ms: int
    def __init__(self, table_version: _Optional[int] = ..., cluster_id: _Optional[str] = ..., keyspace_id: _Optional[int] = ..., group_id: _Optional[int] = ..., member_id: _Optional[str] = ..., partition_ids: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., from_now: bool = ..., take_by_ms: _Optional[int] = ...) -> None: ...

class ClaimCursorsResponse(_message.Message):
    __slots__ = ("cursors", "refusals")
    CURSORS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    cursors: _containers.RepeatedCompositeFieldContainer[Cursor]
    refusals: _containers.RepeatedCompositeFieldContainer[_kv_pb2.Refusal]
    def __init__(self, cursors: _Optional[_Iterable[_Union[Cursor, _Mapping]]] = ..., refusals: _Optional[_Iterable[_Union[_kv_pb2.Refusal, _Mapping]]] = ...) -> None: ...

class CommitCursorsRequest(_message.Message):
    __slots__ = ("table_version", "cluster_id", "keyspace_id", "group_id", "member_id", "positions", "generations", "take_by_ms")
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    TAKE_BY_MS_FIELD_NUMBER: _ClassVar[int]
    table_version: int
    cluster_id: str
    keyspace_id: int
    group_id: int
    member_id: str
    positions: _containers.RepeatedCompositeFieldContainer[_feed_pb2.FeedPosition]
    generations: _containers.RepeatedScalarFieldContainer[int]
    take_by_ms: int
    def __init__(self, table_version: _Optional[int] = ..., cluster_id: _Optional[str] = ..., keyspace_id: _Optional[int] = ..., group_id: _Optional[int] = ..., member_id: _Optional[str] = ..., positions: _Optional[_Iterable[_Union[_feed_pb2.FeedPosition, _Mapping]]] = ..., generations: _Optional[_Iterable[int]] = ..., take_by_ms: _Optional[int] = ...) -> None: ...

class CommitCursorsResponse(_message.Message):
    __slots__ = ("refusals",)
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    refusals: _containers.RepeatedCompositeFieldContainer[_kv_pb2.Refusal]
    def __init__(self, refusals: _Optional[_Iterable[_Union[_kv_pb2.Refusal, _Mapping]]] = ...) -> None: ...

class CommitBatchWithCursorRequest(_message.Message):
    __slots__ = ("batch", "group_id", "generation", "position", "after", "take_by_ms")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    TAKE_BY_MS_FIELD_NUMBER: _ClassVar[int]
    batch: _kv_pb2.CommitBatchRequest
    group_id: int
    generation: int
    position: _feed_pb2.FeedPosition
    after: _feed_pb2.FeedPosition
    take_by_ms: int
    def __init__(self, batch: _Optional[_Union[_kv_pb2.CommitBatchRequest, _Mapping]] = ..., group_id: _Optional[int] = ..., generation: _Optional[int] = ..., position: _Optional[_Union[_feed_pb2.FeedPosition, _Mapping]] = ..., after: _Optional[_Union[_feed_pb2.FeedPosition, _Mapping]] = ..., take_by_ms: _Optional[int] = ...) -> None: ...

class ReadCursorsRequest(_message.Message):
    __slots__ = ("table_version", "cluster_id", "keyspace_id", "group_id", "partition_ids")
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    table_version: int
    cluster_id: str
    keyspace_id: int
    group_id: int
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, table_version: _Optional[int] = ..., cluster_id: _Optional[str] = ..., keyspace_id: _Optional[int] = ..., group_id: _Optional[int] = ..., partition_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReadCursorsResponse(_message.Message):
    __slots__ = ("cursors", "refusals")
    CURSORS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    cursors: _containers.RepeatedCompositeFieldContainer[Cursor]
    refusals: _containers.RepeatedCompositeFieldContainer[_kv_pb2.Refusal]
    def __init__(self, cursors: _Optional[_Iterable[_Union[Cursor, _Mapping]]] = ..., refusals: _Optional[_Iterable[_Union[_kv_pb2.Refusal, _Mapping]]] = ...) -> None: ...

class ResetCursorsRequest(_message.Message):
    __slots__ = ("table_version", "cluster_id", "keyspace_id", "group_id", "generation", "positions", "take_by_ms")
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    TAKE_BY_MS_FIELD_NUMBER: _ClassVar[int]
    table_version: int
    cluster_id: str
    keyspace_id: int
    group_id: int
    generation: int
    positions: _containers.RepeatedCompositeFieldContainer[_feed_pb2.FeedPosition]
    take_by_ms: int
    def __init__(self, table_version: _Optional[int] = ..., cluster_id: _Optional[str] = ..., keyspace_id: _Optional[int] = ..., group_id: _Optional[int] = ..., generation: _Optional[int] = ..., positions: _Optional[_Iterable[_Union[_feed_pb2.FeedPosition, _Mapping]]] = ..., take_by_ms: _Optional[int] = ...) -> None: ...

class ResetCursorsResponse(_message.Message):
    __slots__ = ("refusals",)
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    refusals: _containers.RepeatedCompositeFieldContainer[_kv_pb2.Refusal]
    def __init__(self, refusals: _Optional[_Iterable[_Union[_kv_pb2.Refusal, _Mapping]]] = ...) -> None: ...

class DeleteCursorsRequest(_message.Message):
    __slots__ = ("table_version", "cluster_id", "keyspace_id", "group_id", "partition_ids", "take_by_ms")
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    TAKE_BY_MS_FIELD_NUMBER: _ClassVar[int]
    table_version: int
    cluster_id: str
    keyspace_id: int
    group_id: int
    partition_ids: _containers.RepeatedScalarFieldContainer[int]
    take_by_ms: int
    def __init__(self, table_version: _Optional[int] = ..., cluster_id: _Optional[str] = ..., keyspace_id: _Optional[int] = ..., group_id: _Optional[int] = ..., partition_ids: _Optional[_Iterable[int]] = ..., take_by_ms: _Optional[int] = ...) -> None: ...

class DeleteCursorsResponse(_message.Message):
    __slots__ = ("refusals",)
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    refusals: _containers.RepeatedCompositeFieldContainer[_kv_pb2.Refusal]
    def __init__(self, refusals: _Optional[_Iterable[_Union[_kv_pb2.Refusal, _Mapping]]] = ...) -> None: ...
