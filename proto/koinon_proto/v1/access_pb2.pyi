from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GrantEffect(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GRANT_EFFECT_UNSPECIFIED: _ClassVar[GrantEffect]
    GRANT_EFFECT_ALLOW: _ClassVar[GrantEffect]
    GRANT_EFFECT_DENY: _ClassVar[GrantEffect]

class Action(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACTION_UNSPECIFIED: _ClassVar[Action]
    ACTION_READ: _ClassVar[Action]
    ACTION_WRITE: _ClassVar[Action]
    ACTION_SCAN: _ClassVar[Action]
    ACTION_LOAD: _ClassVar[Action]
    ACTION_FEED: _ClassVar[Action]
    ACTION_VIEW: _ClassVar[Action]
    ACTION_OPERATE: _ClassVar[Action]
    ACTION_ACCESS: _ClassVar[Action]
    ACTION_BACKUP: _ClassVar[Action]
GRANT_EFFECT_UNSPECIFIED: GrantEffect
GRANT_EFFECT_ALLOW: GrantEffect
GRANT_EFFECT_DENY: GrantEffect
ACTION_UNSPECIFIED: Action
ACTION_READ: Action
ACTION_WRITE: Action
ACTION_SCAN: Action
ACTION_LOAD: Action
ACTION_FEED: Action
ACTION_VIEW: Action
ACTION_OPERATE: Action
ACTION_ACCESS: Action
ACTION_BACKUP: Action

class Grant(_message.Message):
    __slots__ = ("effect", "actions", "prefix", "keyspace_id")
    EFFECT_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    effect: GrantEffect
    actions: _containers.RepeatedScalarFieldContainer[Action]
    prefix: bytes
    keyspace_id: int
    def __init__(self, effect: _Optional[_Union[GrantEffect, str]] = ..., actions: _Optional[_Iterable[_Union[Action, str]]] = ..., prefix: _Optional[bytes] = ..., keyspace_id: _Optional[int] = ...) -> None: ...

class Role(_message.Message):
    __slots__ = ("name", "grants")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    grants: _containers.RepeatedCompositeFieldContainer[Grant]
    def __init__(self, name: _Optional[str] = ..., grants: _Optional[_Iterable[_Union[Grant, _Mapping]]] = ...) -> None: ...

class User(_message.Message):
    __slots__ = ("name", "roles", "blocked", "certificates_from_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATES_FROM_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    roles: _containers.RepeatedScalarFieldContainer[str]
    blocked: bool
    certificates_from_s: int
    def __init__(self, name: _Optional[str] = ..., roles: _Optional[_Iterable[str]] = ..., blocked: bool = ..., certificates_from_s: _Optional[int] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("id", "user", "sha256", "created_s", "expires_s", "description")
    ID_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    CREATED_S_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_S_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    id: str
    user: str
    sha256: bytes
    created_s: int
    expires_s: int
    description: str
    def __init__(self, id: _Optional[str] = ..., user: _Optional[str] = ..., sha256: _Optional[bytes] = ..., created_s: _Optional[int] = ..., expires_s: _Optional[int] = ..., description: _Optional[str] = ...) -> None: ...

class AccessState(_message.Message):
    __slots__ = ("access_version", "roles", "users", "tokens", "revoked_serials")
    ACCESS_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    USERS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REVOKED_SERIALS_FIELD_NUMBER: _ClassVar[int]
    access_version: int
    roles: _containers.RepeatedCompositeFieldContainer[Role]
    users: _containers.RepeatedCompositeFieldContainer[User]
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    revoked_serials: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, access_version: _Optional[int] = ..., roles: _Optional[_Iterable[_Union[Role, _Mapping]]] = ..., users: _Optional[_Iterable[_Union[User, _Mapping]]] = ..., tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ..., revoked_serials: _Optional[_Iterable[str]] = ...) -> None: ...
