from koinon_proto.v1 import membership_pb2 as _membership_pb2
from koinon_proto.v1 import table_pb2 as _table_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CoordinatorStatus(_message.Message):
    __slots__ = ("member_id", "address", "voter", "leader", "active", "match_index")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    VOTER_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    MATCH_INDEX_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    address: str
    voter: bool
    leader: bool
    active: bool
    match_index: int
    def __init__(self, member_id: _Optional[str] = ..., address: _Optional[str] = ..., voter: bool = ..., leader: bool = ..., active: bool = ..., match_index: _Optional[int] = ...) -> None: ...

class NodeSession(_message.Message):
    __slots__ = ("node_number", "live", "heard_ms_ago", "stats")
    NODE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    HEARD_MS_AGO_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    node_number: int
    live: bool
    heard_ms_ago: int
    stats: _membership_pb2.NodeStats
    def __init__(self, node_number: _Optional[int] = ..., live: bool = ..., heard_ms_ago: _Optional[int] = ..., stats: _Optional[_Union[_membership_pb2.NodeStats, _Mapping]] = ...) -> None: ...

class ClusterStatus(_message.Message):
    __slots__ = ("member_id", "is_leader", "leader_id", "leader_address", "term", "commit_index", "applied_index", "coordinators", "sessions", "table", "lease_ms", "session_timeout_ms")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    IS_LEADER_FIELD_NUMBER: _ClassVar[int]
    LEADER_ID_FIELD_NUMBER: _ClassVar[int]
    LEADER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    COMMIT_INDEX_FIELD_NUMBER: _ClassVar[int]
    APPLIED_INDEX_FIELD_NUMBER: _ClassVar[int]
    COORDINATORS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    SESSION_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    is_leader: bool
    leader_id: str
    leader_address: str
    term: int
    commit_index: int
    applied_index: int
    coordinators: _containers.RepeatedCompositeFieldContainer[CoordinatorStatus]
    sessions: _containers.RepeatedCompositeFieldContainer[NodeSession]
    table: _table_pb2.TableUpdate
    lease_ms: int
    session_timeout_ms: int
    def __init__(self, member_id: _Optional[str] = ..., is_leader: bool = ..., leader_id: _Optional[str] = ..., leader_address: _Optional[str] = ..., term: _Optional[int] = ..., commit_index: _Optional[int] = ..., applied_index: _Optional[int] = ..., coordinators: _Optional[_Iterable[_Union[CoordinatorStatus, _Mapping]]] = ..., sessions: _Optional[_Iterable[_Union[NodeSession, _Mapping]]] = ..., table: _Optional[_Union[_table_pb2.TableUpdate, _Mapping]] = ..., lease_ms: _Optional[int] = ..., session_timeout_ms: _Optional[int] = ...) -> None: ...

class AddCoordinatorRequest(_message.Message):
    __slots__ = ("member_id", "address")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    address: str
    def __init__(self, member_id: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class AddCoordinatorResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RemoveCoordinatorRequest(_message.Message):
    __slots__ = ("member_id",)
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    def __init__(self, member_id: _Optional[str] = ...) -> None: ...

class RemoveCoordinatorResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TransferLeadershipRequest(_message.Message):
    __slots__ = ("member_id",)
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    def __init__(self, member_id: _Optional[str] = ...) -> None: ...

class TransferLeadershipResponse(_message.Message):
    __slots__ = ("leader_id",)
    LEADER_ID_FIELD_NUMBER: _ClassVar[int]
    leader_id: str
    def __init__(self, leader_id: _Optional[str] = ...) -> None: ...
