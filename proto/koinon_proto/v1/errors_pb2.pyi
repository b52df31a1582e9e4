from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Error(_message.Message):
    __slots__ = ("message", "invalid_argument", "condition_failed", "not_primary", "table_behind", "wrong_partition", "lease_expired", "partition_offline", "cluster_not_ready", "wrong_cluster", "unsupported_version", "not_leader", "duplicate_node", "unknown_node", "node_fenced", "registration_pending", "membership_change", "resource_exhausted", "storage_full", "not_enough_replicas", "unavailable", "unknown_fate", "internal", "configuration", "reply_too_large", "plan_stale", "fenced_epoch", "load_closed", "load_incomplete", "not_a_number", "number_overflow", "unauthenticated", "permission_denied", "check_failed", "unknown_keyspace", "keyspace_change", "quota_exceeded", "cut_failed", "backup_stopped", "snapshot_needed", "history_branched", "stale_generation", "member_fenced", "unknown_group", "group_in_use", "cursor_moved", "certificate_not_valid", "deadline_passed")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    INVALID_ARGUMENT_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FAILED_FIELD_NUMBER: _ClassVar[int]
    NOT_PRIMARY_FIELD_NUMBER: _ClassVar[int]
    TABLE_BEHIND_FIELD_NUMBER: _ClassVar[int]
    WRONG_PARTITION_FIELD_NUMBER: _ClassVar[int]
    LEASE_EXPIRED_FIELD_NUMBER: _ClassVar[int]
    PARTITION_OFFLINE_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_NOT_READY_FIELD_NUMBER: _ClassVar[int]
    WRONG_CLUSTER_FIELD_NUMBER: _ClassVar[int]
    UNSUPPORTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    NOT_LEADER_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_NODE_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_NODE_FIELD_NUMBER: _ClassVar[int]
    NODE_FENCED_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_PENDING_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_CHANGE_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_EXHAUSTED_FIELD_NUMBER: _ClassVar[int]
    STORAGE_FULL_FIELD_NUMBER: _ClassVar[int]
    NOT_ENOUGH_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    UNAVAILABLE_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FATE_FIELD_NUMBER: _ClassVar[int]
    INTERNAL_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    REPLY_TOO_LARGE_FIELD_NUMBER: _ClassVar[int]
    PLAN_STALE_FIELD_NUMBER: _ClassVar[int]
    FENCED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LOAD_CLOSED_FIELD_NUMBER: _ClassVar[int]
    LOAD_INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    NOT_A_NUMBER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_OVERFLOW_FIELD_NUMBER: _ClassVar[int]
    UNAUTHENTICATED_FIELD_NUMBER: _ClassVar[int]
    PERMISSION_DENIED_FIELD_NUMBER: _ClassVar[int]
    CHECK_FAILED_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_KEYSPACE_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_CHANGE_FIELD_NUMBER: _ClassVar[int]
    QUOTA_EXCEEDED_FIELD_NUMBER: _ClassVar[int]
    CUT_FAILED_FIELD_NUMBER: _ClassVar[int]
    BACKUP_STOPPED_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_NEEDED_FIELD_NUMBER: _ClassVar[int]
    HISTORY_BRANCHED_FIELD_NUMBER: _ClassVar[int]
    STALE_GENERATION_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FENCED_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_GROUP_FIELD_NUMBER: _ClassVar[int]
    GROUP_IN_USE_FIELD_NUMBER: _ClassVar[int]
    CURSOR_MOVED_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_NOT_VALID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_PASSED_FIELD_NUMBER: _ClassVar[int]
    message: str
    invalid_argument: InvalidArgumentError
    condition_failed: ConditionFailedError
    not_primary: NotPrimaryError
    table_behind: TableBehindError
    wrong_partition: WrongPartitionError
    lease_expired: LeaseExpiredError
    partition_offline: PartitionOfflineError
    cluster_not_ready: ClusterNotReadyError
    wrong_cluster: WrongClusterError
    unsupported_version: UnsupportedVersionError
    not_leader: NotLeaderError
    duplicate_node: DuplicateNodeError
    unknown_node: UnknownNodeError
    node_fenced: NodeFencedError
    registration_pending: RegistrationPendingError
    membership_change: MembershipChangeError
    resource_exhausted: ResourceExhaustedError
    storage_full: StorageFullError
    not_enough_replicas: NotEnoughReplicasError
    unavailable: UnavailableError
    unknown_fate: UnknownFateError
    internal: InternalError
    configuration: ConfigurationError
    reply_too_large: ReplyTooLargeError
    plan_stale: PlanStaleError
    fenced_epoch: FencedEpochError
    load_closed: LoadClosedError
    load_incomplete: LoadIncompleteError
    not_a_number: NotANumberError
    number_overflow: NumberOverflowError
    unauthenticated: UnauthenticatedError
    permission_denied: PermissionDeniedError
    check_failed: CheckFailedError
    unknown_keyspace: UnknownKeyspaceError
    keyspace_change: KeyspaceChangeError
    quota_exceeded: QuotaExceededError
    cut_failed: CutFailedError
    backup_stopped: BackupStoppedError
    snapshot_needed: SnapshotNeededError
    history_branched: HistoryBranchedError
    stale_generation: StaleGenerationError
    member_fenced: MemberFencedError
    unknown_group: UnknownGroupError
    group_in_use: GroupInUseError
    cursor_moved: CursorMovedError
    certificate_not_valid: CertificateNotValidError
    deadline_passed: DeadlinePassedError
    def __init__(self, message: _Optional[str] = ..., invalid_argument: _Optional[_Union[InvalidArgumentError, _Mapping]] = ..., condition_failed: _Optional[_Union[ConditionFailedError, _Mapping]] = ..., not_primary: _Optional[_Union[NotPrimaryError, _Mapping]] = ..., table_behind: _Optional[_Union[TableBehindError, _Mapping]] = ..., wrong_partition: _Optional[_Union[WrongPartitionError, _Mapping]] = ..., lease_expired: _Optional[_Union[LeaseExpiredError, _Mapping]] = ..., partition_offline: _Optional[_Union[PartitionOfflineError, _Mapping]] = ..., cluster_not_ready: _Optional[_Union[ClusterNotReadyError, _Mapping]] = ..., wrong_cluster: _Optional[_Union[WrongClusterError, _Mapping]] = ..., unsupported_version: _Optional[_Union[UnsupportedVersionError, _Mapping]] = ..., not_leader: _Optional[_Union[NotLeaderError, _Mapping]] = ..., duplicate_node: _Optional[_Union[DuplicateNodeError, _Mapping]] = ..., unknown_node: _Optional[_Union[UnknownNodeError, _Mapping]] = ..., node_fenced: _Optional[_Union[NodeFencedError, _Mapping]] = ..., registration_pending: _Optional[_Union[RegistrationPendingError, _Mapping]] = ..., membership_change: _Optional[_Union[MembershipChangeError, _Mapping]] = ..., resource_exhausted: _Optional[_Union[ResourceExhaustedError, _Mapping]] = ..., storage_full: _Optional[_Union[StorageFullError, _Mapping]] = ..., not_enough_replicas: _Optional[_Union[NotEnoughReplicasError, _Mapping]] = ..., unavailable: _Optional[_Union[UnavailableError, _Mapping]] = ..., unknown_fate: _Optional[_Union[UnknownFateError, _Mapping]] = ..., internal: _Optional[_Union[InternalError, _Mapping]] = ..., configuration: _Optional[_Union[ConfigurationError, _Mapping]] = ..., reply_too_large: _Optional[_Union[ReplyTooLargeError, _Mapping]] = ..., plan_stale: _Optional[_Union[PlanStaleError, _Mapping]] = ..., fenced_epoch: _Optional[_Union[FencedEpochError, _Mapping]] = ..., load_closed: _Optional[_Union[LoadClosedError, _Mapping]] = ..., load_incomplete: _Optional[_Union[LoadIncompleteError, _Mapping]] = ..., not_a_number: _Optional[_Union[NotANumberError, _Mapping]] = ..., number_overflow: _Optional[_Union[NumberOverflowError, _Mapping]] = ..., unauthenticated: _Optional[_Union[UnauthenticatedError, _Mapping]] = ..., permission_denied: _Optional[_Union[PermissionDeniedError, _Mapping]] = ..., check_failed: _Optional[_Union[CheckFailedError, _Mapping]] = ..., unknown_keyspace: _Optional[_Union[UnknownKeyspaceError, _Mapping]] = ..., keyspace_change: _Optional[_Union[KeyspaceChangeError, _Mapping]] = ..., quota_exceeded: _Optional[_Union[QuotaExceededError, _Mapping]] = ..., cut_failed: _Optional[_Union[CutFailedError, _Mapping]] = ..., backup_stopped: _Optional[_Union[BackupStoppedError, _Mapping]] = ..., snapshot_needed: _Optional[_Union[SnapshotNeededError, _Mapping]] = ..., history_branched: _Optional[_Union[HistoryBranchedError, _Mapping]] = ..., stale_generation: _Optional[_Union[StaleGenerationError, _Mapping]] = ..., member_fenced: _Optional[_Union[MemberFencedError, _Mapping]] = ..., unknown_group: _Optional[_Union[UnknownGroupError, _Mapping]] = ..., group_in_use: _Optional[_Union[GroupInUseError, _Mapping]] = ..., cursor_moved: _Optional[_Union[CursorMovedError, _Mapping]] = ..., certificate_not_valid: _Optional[_Union[CertificateNotValidError, _Mapping]] = ..., deadline_passed: _Optional[_Union[DeadlinePassedError, _Mapping]] = ...) -> None: ...

class InvalidArgumentError(_message.Message):
    __slots__ = ("field", "reason", "limit", "actual")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    ACTUAL_FIELD_NUMBER: _ClassVar[int]
    field: str
    reason: str
    limit: int
    actual: int
    def __init__(self, field: _Optional[str] = ..., reason: _Optional[str] = ..., limit: _Optional[int] = ..., actual: _Optional[int] = ...) -> None: ...

class ConfigurationError(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class ConditionFailedError(_message.Message):
    __slots__ = ("expected_version", "current_version", "version_hidden")
    EXPECTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    CURRENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_HIDDEN_FIELD_NUMBER: _ClassVar[int]
    expected_version: int
    current_version: int
    version_hidden: bool
    def __init__(self, expected_version: _Optional[int] = ..., current_version: _Optional[int] = ..., version_hidden: bool = ...) -> None: ...

class CheckFailedError(_message.Message):
    __slots__ = ("expected_version", "current_version", "key", "version_hidden")
    EXPECTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    CURRENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VERSION_HIDDEN_FIELD_NUMBER: _ClassVar[int]
    expected_version: int
    current_version: int
    key: bytes
    version_hidden: bool
    def __init__(self, expected_version: _Optional[int] = ..., current_version: _Optional[int] = ..., key: _Optional[bytes] = ..., version_hidden: bool = ...) -> None: ...

class UnauthenticatedError(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class CertificateNotValidError(_message.Message):
    __slots__ = ("reason", "holder", "valid_from_s", "valid_until_s", "clock_s")
    REASON_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    VALID_FROM_S_FIELD_NUMBER: _ClassVar[int]
    VALID_UNTIL_S_FIELD_NUMBER: _ClassVar[int]
    CLOCK_S_FIELD_NUMBER: _ClassVar[int]
    reason: str
    holder: str
    valid_from_s: int
    valid_until_s: int
    clock_s: int
    def __init__(self, reason: _Optional[str] = ..., holder: _Optional[str] = ..., valid_from_s: _Optional[int] = ..., valid_until_s: _Optional[int] = ..., clock_s: _Optional[int] = ...) -> None: ...

class PermissionDeniedError(_message.Message):
    __slots__ = ("principal", "action", "what", "rows")
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    principal: str
    action: str
    what: str
    rows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, principal: _Optional[str] = ..., action: _Optional[str] = ..., what: _Optional[str] = ..., rows: _Optional[_Iterable[int]] = ...) -> None: ...

class UnknownKeyspaceError(_message.Message):
    __slots__ = ("keyspace",)
    KEYSPACE_FIELD_NUMBER: _ClassVar[int]
    keyspace: str
    def __init__(self, keyspace: _Optional[str] = ...) -> None: ...

class KeyspaceChangeError(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class NotANumberError(_message.Message):
    __slots__ = ("expected",)
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    expected: str
    def __init__(self, expected: _Optional[str] = ...) -> None: ...

class NumberOverflowError(_message.Message):
    __slots__ = ("expected",)
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    expected: str
    def __init__(self, expected: _Optional[str] = ...) -> None: ...

class NotPrimaryError(_message.Message):
    __slots__ = ("partition_id", "primary", "primary_address", "primary_epoch", "table_version")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    PRIMARY_FIELD_NUMBER: _ClassVar[int]
    PRIMARY_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PRIMARY_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    primary: str
    primary_address: str
    primary_epoch: int
    table_version: int
    def __init__(self, partition_id: _Optional[int] = ..., primary: _Optional[str] = ..., primary_address: _Optional[str] = ..., primary_epoch: _Optional[int] = ..., table_version: _Optional[int] = ...) -> None: ...

class TableBehindError(_message.Message):
    __slots__ = ("table_version", "required_version")
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_VERSION_FIELD_NUMBER: _ClassVar[int]
    table_version: int
    required_version: int
    def __init__(self, table_version: _Optional[int] = ..., required_version: _Optional[int] = ...) -> None: ...

class WrongPartitionError(_message.Message):
    __slots__ = ("partition_id", "expected_partition_id")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    expected_partition_id: int
    def __init__(self, partition_id: _Optional[int] = ..., expected_partition_id: _Optional[int] = ...) -> None: ...

class LeaseExpiredError(_message.Message):
    __slots__ = ("node_id",)
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    def __init__(self, node_id: _Optional[str] = ...) -> None: ...

class DeadlinePassedError(_message.Message):
    __slots__ = ("late_ms",)
    LATE_MS_FIELD_NUMBER: _ClassVar[int]
    late_ms: int
    def __init__(self, late_ms: _Optional[int] = ...) -> None: ...

class PartitionOfflineError(_message.Message):
    __slots__ = ("partition_id", "reason")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    reason: str
    def __init__(self, partition_id: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ClusterNotReadyError(_message.Message):
    __slots__ = ("registered_nodes", "bootstrap_nodes")
    REGISTERED_NODES_FIELD_NUMBER: _ClassVar[int]
    BOOTSTRAP_NODES_FIELD_NUMBER: _ClassVar[int]
    registered_nodes: int
    bootstrap_nodes: int
    def __init__(self, registered_nodes: _Optional[int] = ..., bootstrap_nodes: _Optional[int] = ...) -> None: ...

class WrongClusterError(_message.Message):
    __slots__ = ("expected_cluster_id", "actual_cluster_id")
    EXPECTED_CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    ACTUAL_CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    expected_cluster_id: str
    actual_cluster_id: str
    def __init__(self, expected_cluster_id: _Optional[str] = ..., actual_cluster_id: _Optional[str] = ...) -> None: ...

class UnsupportedVersionError(_message.Message):
    __slots__ = ("what", "version", "supported")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SUPPORTED_FIELD_NUMBER: _ClassVar[int]
    what: str
    version: int
    supported: int
    def __init__(self, what: _Optional[str] = ..., version: _Optional[int] = ..., supported: _Optional[int] = ...) -> None: ...

class NotLeaderError(_message.Message):
    __slots__ = ("leader_id", "leader_address", "term")
    LEADER_ID_FIELD_NUMBER: _ClassVar[int]
    LEADER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    leader_id: str
    leader_address: str
    term: int
    def __init__(self, leader_id: _Optional[str] = ..., leader_address: _Optional[str] = ..., term: _Optional[int] = ...) -> None: ...

class DuplicateNodeError(_message.Message):
    __slots__ = ("node_id", "address", "other_address")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    OTHER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    address: str
    other_address: str
    def __init__(self, node_id: _Optional[str] = ..., address: _Optional[str] = ..., other_address: _Optional[str] = ...) -> None: ...

class UnknownNodeError(_message.Message):
    __slots__ = ("node_id",)
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    def __init__(self, node_id: _Optional[str] = ...) -> None: ...

class NodeFencedError(_message.Message):
    __slots__ = ("node_id", "node_epoch", "current_node_epoch")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CURRENT_NODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    node_epoch: int
    current_node_epoch: int
    def __init__(self, node_id: _Optional[str] = ..., node_epoch: _Optional[int] = ..., current_node_epoch: _Optional[int] = ...) -> None: ...

class RegistrationPendingError(_message.Message):
    __slots__ = ("node_id", "retry_after_ms")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    retry_after_ms: int
    def __init__(self, node_id: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class MembershipChangeError(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class ResourceExhaustedError(_message.Message):
    __slots__ = ("resource", "limit")
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    resource: str
    limit: int
    def __init__(self, resource: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class QuotaExceededError(_message.Message):
    __slots__ = ("keyspace", "unit", "limit", "retry_after_ms")
    KEYSPACE_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    keyspace: str
    unit: str
    limit: int
    retry_after_ms: int
    def __init__(self, keyspace: _Optional[str] = ..., unit: _Optional[str] = ..., limit: _Optional[int] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class ReplyTooLargeError(_message.Message):
    __slots__ = ("limit", "actual")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    ACTUAL_FIELD_NUMBER: _ClassVar[int]
    limit: int
    actual: int
    def __init__(self, limit: _Optional[int] = ..., actual: _Optional[int] = ...) -> None: ...

class StorageFullError(_message.Message):
    __slots__ = ("node_id", "reason")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    reason: str
    def __init__(self, node_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class NotEnoughReplicasError(_message.Message):
    __slots__ = ("partition_id", "in_sync", "min_in_sync")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    IN_SYNC_FIELD_NUMBER: _ClassVar[int]
    MIN_IN_SYNC_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    in_sync: int
    min_in_sync: int
    def __init__(self, partition_id: _Optional[int] = ..., in_sync: _Optional[int] = ..., min_in_sync: _Optional[int] = ...) -> None: ...

class UnavailableError(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class UnknownFateError(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class InternalError(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class PlanStaleError(_message.Message):
    __slots__ = ("plan_id", "current_plan_id")
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    CURRENT_PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    plan_id: str
    current_plan_id: str
    def __init__(self, plan_id: _Optional[str] = ..., current_plan_id: _Optional[str] = ...) -> None: ...

class FencedEpochError(_message.Message):
    __slots__ = ("partition_id", "primary_epoch", "current_primary_epoch")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    PRIMARY_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CURRENT_PRIMARY_EPOCH_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    primary_epoch: int
    current_primary_epoch: int
    def __init__(self, partition_id: _Optional[int] = ..., primary_epoch: _Optional[int] = ..., current_primary_epoch: _Optional[int] = ...) -> None: ...

class LoadClosedError(_message.Message):
    __slots__ = ("load_id", "state", "reason")
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    load_id: int
    state: str
    reason: str
    def __init__(self, load_id: _Optional[int] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class LoadIncompleteError(_message.Message):
    __slots__ = ("load_id", "partition_id", "expected_rows", "staged_rows")
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_ROWS_FIELD_NUMBER: _ClassVar[int]
    STAGED_ROWS_FIELD_NUMBER: _ClassVar[int]
    load_id: int
    partition_id: int
    expected_rows: int
    staged_rows: int
    def __init__(self, load_id: _Optional[int] = ..., partition_id: _Optional[int] = ..., expected_rows: _Optional[int] = ..., staged_rows: _Optional[int] = ...) -> None: ...

class CutFailedError(_message.Message):
    __slots__ = ("node_id", "reason")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    reason: str
    def __init__(self, node_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class BackupStoppedError(_message.Message):
    __slots__ = ("node_id", "reason")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    reason: str
    def __init__(self, node_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class SnapshotNeededError(_message.Message):
    __slots__ = ("partition_id", "sequence", "purge_floor")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PURGE_FLOOR_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    sequence: int
    purge_floor: int
    def __init__(self, partition_id: _Optional[int] = ..., sequence: _Optional[int] = ..., purge_floor: _Optional[int] = ...) -> None: ...

class HistoryBranchedError(_message.Message):
    __slots__ = ("partition_id", "sequence", "common_sequence")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    COMMON_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    sequence: int
    common_sequence: int
    def __init__(self, partition_id: _Optional[int] = ..., sequence: _Optional[int] = ..., common_sequence: _Optional[int] = ...) -> None: ...

class StaleGenerationError(_message.Message):
    __slots__ = ("partition_id", "generation", "current_generation")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CURRENT_GENERATION_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    generation: int
    current_generation: int
    def __init__(self, partition_id: _Optional[int] = ..., generation: _Optional[int] = ..., current_generation: _Optional[int] = ...) -> None: ...

class CursorMovedError(_message.Message):
    __slots__ = ("partition_id", "expected_sequence", "current_sequence")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CURRENT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    expected_sequence: int
    current_sequence: int
    def __init__(self, partition_id: _Optional[int] = ..., expected_sequence: _Optional[int] = ..., current_sequence: _Optional[int] = ...) -> None: ...

class MemberFencedError(_message.Message):
    __slots__ = ("group", "member_id")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    group: str
    member_id: str
    def __init__(self, group: _Optional[str] = ..., member_id: _Optional[str] = ...) -> None: ...

class UnknownGroupError(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: str
    def __init__(self, group: _Optional[str] = ...) -> None: ...

class GroupInUseError(_message.Message):
    __slots__ = ("group", "members")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    group: str
    members: int
    def __init__(self, group: _Optional[str] = ..., members: _Optional[int] = ...) -> None: ...
