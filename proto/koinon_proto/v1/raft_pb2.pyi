from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RaftEntryKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RAFT_ENTRY_KIND_UNSPECIFIED: _ClassVar[RaftEntryKind]
    RAFT_ENTRY_KIND_COMMAND: _ClassVar[RaftEntryKind]
    RAFT_ENTRY_KIND_NOOP: _ClassVar[RaftEntryKind]
    RAFT_ENTRY_KIND_CONFIGURATION: _ClassVar[RaftEntryKind]
RAFT_ENTRY_KIND_UNSPECIFIED: RaftEntryKind
RAFT_ENTRY_KIND_COMMAND: RaftEntryKind
RAFT_ENTRY_KIND_NOOP: RaftEntryKind
RAFT_ENTRY_KIND_CONFIGURATION: RaftEntryKind

class GetPeerPortRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPeerPortResponse(_message.Message):
    __slots__ = ("peer_port",)
    PEER_PORT_FIELD_NUMBER: _ClassVar[int]
    peer_port: int
    def __init__(self, peer_port: _Optional[int] = ...) -> None: ...

class RaftHello(_message.Message):
    __slots__ = ("protocol_version", "group", "member_id", "store_id", "address", "receiver_id")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_ID_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    group: str
    member_id: str
    store_id: str
    address: str
    receiver_id: str
    def __init__(self, protocol_version: _Optional[int] = ..., group: _Optional[str] = ..., member_id: _Optional[str] = ..., store_id: _Optional[str] = ..., address: _Optional[str] = ..., receiver_id: _Optional[str] = ...) -> None: ...

class RaftBatch(_message.Message):
    __slots__ = ("hello", "messages")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    hello: RaftHello
    messages: _containers.RepeatedCompositeFieldContainer[RaftMessage]
    def __init__(self, hello: _Optional[_Union[RaftHello, _Mapping]] = ..., messages: _Optional[_Iterable[_Union[RaftMessage, _Mapping]]] = ...) -> None: ...

class RaftExchangeReply(_message.Message):
    __slots__ = ("refusal", "detail", "group")
    class Refusal(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REFUSAL_UNSPECIFIED: _ClassVar[RaftExchangeReply.Refusal]
        REFUSAL_VERSION: _ClassVar[RaftExchangeReply.Refusal]
        REFUSAL_GROUP: _ClassVar[RaftExchangeReply.Refusal]
        REFUSAL_RECEIVER: _ClassVar[RaftExchangeReply.Refusal]
        REFUSAL_STORE_CHANGED: _ClassVar[RaftExchangeReply.Refusal]
        REFUSAL_MALFORMED: _ClassVar[RaftExchangeReply.Refusal]
        REFUSAL_NOT_MEMBER: _ClassVar[RaftExchangeReply.Refusal]
    REFUSAL_UNSPECIFIED: RaftExchangeReply.Refusal
    REFUSAL_VERSION: RaftExchangeReply.Refusal
    REFUSAL_GROUP: RaftExchangeReply.Refusal
    REFUSAL_RECEIVER: RaftExchangeReply.Refusal
    REFUSAL_STORE_CHANGED: RaftExchangeReply.Refusal
    REFUSAL_MALFORMED: RaftExchangeReply.Refusal
    REFUSAL_NOT_MEMBER: RaftExchangeReply.Refusal
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    refusal: RaftExchangeReply.Refusal
    detail: str
    group: str
    def __init__(self, refusal: _Optional[_Union[RaftExchangeReply.Refusal, str]] = ..., detail: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class RaftMessage(_message.Message):
    __slots__ = ("term", "vote_request", "vote_reply", "append_request", "append_reply", "heartbeat_request", "heartbeat_reply", "snapshot_chunk", "snapshot_reply", "timeout_now")
    class VoteRequest(_message.Message):
        __slots__ = ("last_index", "last_term", "pre_vote", "transfer")
        LAST_INDEX_FIELD_NUMBER: _ClassVar[int]
        LAST_TERM_FIELD_NUMBER: _ClassVar[int]
        PRE_VOTE_FIELD_NUMBER: _ClassVar[int]
        TRANSFER_FIELD_NUMBER: _ClassVar[int]
        last_index: int
        last_term: int
        pre_vote: bool
        transfer: bool
        def __init__(self, last_index: _Optional[int] = ..., last_term: _Optional[int] = ..., pre_vote: bool = ..., transfer: bool = ...) -> None: ...
    class VoteReply(_message.Message):
        __slots__ = ("request_term", "pre_vote", "granted")
        REQUEST_TERM_FIELD_NUMBER: _ClassVar[int]
        PRE_VOTE_FIELD_NUMBER: _ClassVar[int]
        GRANTED_FIELD_NUMBER: _ClassVar[int]
        request_term: int
        pre_vote: bool
        granted: bool
        def __init__(self, request_term: _Optional[int] = ..., pre_vote: bool = ..., granted: bool = ...) -> None: ...
    class AppendRequest(_message.Message):
        __slots__ = ("previous_index", "previous_term", "entry_terms", "entry_kinds", "entry_data", "commit_index", "round_id")
        PREVIOUS_INDEX_FIELD_NUMBER: _ClassVar[int]
        PREVIOUS_TERM_FIELD_NUMBER: _ClassVar[int]
        ENTRY_TERMS_FIELD_NUMBER: _ClassVar[int]
        ENTRY_KINDS_FIELD_NUMBER: _ClassVar[int]
        ENTRY_DATA_FIELD_NUMBER: _ClassVar[int]
        COMMIT_INDEX_FIELD_NUMBER: _ClassVar[int]
        ROUND_ID_FIELD_NUMBER: _ClassVar[int]
        previous_index: int
        previous_term: int
        entry_terms: _containers.RepeatedScalarFieldContainer[int]
        entry_kinds: _containers.RepeatedScalarFieldContainer[RaftEntryKind]
        entry_data: _containers.RepeatedScalarFieldContainer[bytes]
        commit_index: int
        round_id: int
        def __init__(self, previous_index: _Optional[int] = ..., previous_term: _Optional[int] = ..., entry_terms: _Optional[_Iterable[int]] = ..., entry_kinds: _Optional[_Iterable[_Union[RaftEntryKind, str]]] = ..., entry_data: _Optional[_Iterable[bytes]] = ..., commit_index: _Optional[int] = ..., round_id: _Optional[int] = ...) -> None: ...
    class AppendReply(_message.Message):
        __slots__ = ("round_id", "success", "match_index", "rejected_index", "hint_index", "hint_term")
        ROUND_ID_FIELD_NUMBER: _ClassVar[int]
        SUCCESS_FIELD_NUMBER: _ClassVar[int]
        MATCH_INDEX_FIELD_NUMBER: _ClassVar[int]
        REJECTED_INDEX_FIELD_NUMBER: _ClassVar[int]
        HINT_INDEX_FIELD_NUMBER: _ClassVar[int]
        HINT_TERM_FIELD_NUMBER: _ClassVar[int]
        round_id: int
        success: bool
        match_index: int
        rejected_index: int
        hint_index: int
        hint_term: int
        def __init__(self, round_id: _Optional[int] = ..., success: bool = ..., match_index: _Optional[int] = ..., rejected_index: _Optional[int] = ..., hint_index: _Optional[int] = ..., hint_term: _Optional[int] = ...) -> None: ...
    class HeartbeatRequest(_message.Message):
        __slots__ = ("commit_index", "round_id")
        COMMIT_INDEX_FIELD_NUMBER: _ClassVar[int]
        ROUND_ID_FIELD_NUMBER: _ClassVar[int]
        commit_index: int
        round_id: int
        def __init__(self, commit_index: _Optional[int] = ..., round_id: _Optional[int] = ...) -> None: ...
    class HeartbeatReply(_message.Message):
        __slots__ = ("round_id",)
        ROUND_ID_FIELD_NUMBER: _ClassVar[int]
        round_id: int
        def __init__(self, round_id: _Optional[int] = ...) -> None: ...
    class SnapshotChunk(_message.Message):
        __slots__ = ("round_id", "snapshot_index", "snapshot_term", "configuration", "size_bytes", "checksum", "offset", "data")
        ROUND_ID_FIELD_NUMBER: _ClassVar[int]
        SNAPSHOT_INDEX_FIELD_NUMBER: _ClassVar[int]
        SNAPSHOT_TERM_FIELD_NUMBER: _ClassVar[int]
        CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
        SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
        CHECKSUM_FIELD_NUMBER: _ClassVar[int]
        OFFSET_FIELD_NUMBER: _ClassVar[int]
        DATA_FIELD_NUMBER: _ClassVar[int]
        round_id: int
        snapshot_index: int
        snapshot_term: int
        configuration: bytes
        size_bytes: int
        checksum: int
        offset: int
        data: bytes
        def __init__(self, round_id: _Optional[int] = ..., snapshot_index: _Optional[int] = ..., snapshot_term: _Optional[int] = ..., configuration: _Optional[bytes] = ..., size_bytes: _Optional[int] = ..., checksum: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...
    class SnapshotReply(_message.Message):
        __slots__ = ("round_id", "snapshot_index", "chunk_offset", "next_offset", "match_index")
        ROUND_ID_FIELD_NUMBER: _ClassVar[int]
        SNAPSHOT_INDEX_FIELD_NUMBER: _ClassVar[int]
        CHUNK_OFFSET_FIELD_NUMBER: _ClassVar[int]
        NEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
        MATCH_INDEX_FIELD_NUMBER: _ClassVar[int]
        round_id: int
        snapshot_index: int
        chunk_offset: int
        next_offset: int
        match_index: int
        def __init__(self, round_id: _Optional[int] = ..., snapshot_index: _Optional[int] = ..., chunk_offset: _Optional[int] = ..., next_offset: _Optional[int] = ..., match_index: _Optional[int] = ...) -> None: ...
    class TimeoutNow(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    TERM_FIELD_NUMBER: _ClassVar[int]
    VOTE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    VOTE_REPLY_FIELD_NUMBER: _ClassVar[int]
    APPEND_REQUEST_FIELD_NUMBER: _ClassVar[int]
    APPEND_REPLY_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_REQUEST_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_REPLY_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_CHUNK_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_REPLY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_NOW_FIELD_NUMBER: _ClassVar[int]
    term: int
    vote_request: RaftMessage.VoteRequest
    vote_reply: RaftMessage.VoteReply
    append_request: RaftMessage.AppendRequest
    append_reply: RaftMessage.AppendReply
    heartbeat_request: RaftMessage.HeartbeatRequest
    heartbeat_reply: RaftMessage.HeartbeatReply
    snapshot_chunk: RaftMessage.SnapshotChunk
    snapshot_reply: RaftMessage.SnapshotReply
    timeout_now: RaftMessage.TimeoutNow
    def __init__(self, term: _Optional[int] = ..., vote_request: _Optional[_Union[RaftMessage.VoteRequest, _Mapping]] = ..., vote_reply: _Optional[_Union[RaftMessage.VoteReply, _Mapping]] = ..., append_request: _Optional[_Union[RaftMessage.AppendRequest, _Mapping]] = ..., append_reply: _Optional[_Union[RaftMessage.AppendReply, _Mapping]] = ..., heartbeat_request: _Optional[_Union[RaftMessage.HeartbeatRequest, _Mapping]] = ..., heartbeat_reply: _Optional[_Union[RaftMessage.HeartbeatReply, _Mapping]] = ..., snapshot_chunk: _Optional[_Union[RaftMessage.SnapshotChunk, _Mapping]] = ..., snapshot_reply: _Optional[_Union[RaftMessage.SnapshotReply, _Mapping]] = ..., timeout_now: _Optional[_Union[RaftMessage.TimeoutNow, _Mapping]] = ...) -> None: ...
