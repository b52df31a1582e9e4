"""Raft as a pure state machine: `raft` has the core, `ready` its output."""

from koinon_coordinator.core.raft.configuration import Configuration, ConfigurationFormatError
from koinon_coordinator.core.raft.core_config import (
    TERM_JUMP_MAX,
    TERM_MAX,
    RaftCoreConfig,
    Refusal,
)
from koinon_coordinator.core.raft.log import (
    Entry,
    EntryKind,
    InvariantError,
    LogPosition,
    LostEntriesError,
    RaftLog,
    Snapshot,
)
from koinon_coordinator.core.raft.messages import (
    AppendReply,
    AppendRequest,
    FollowerReply,
    HeartbeatReply,
    HeartbeatRequest,
    LeaderMessage,
    Message,
    SnapshotChunk,
    SnapshotReply,
    TimeoutNow,
    VoteReply,
    VoteRequest,
)
from koinon_coordinator.core.raft.progress import ProgressState
from koinon_coordinator.core.raft.raft import RaftCore
from koinon_coordinator.core.raft.ready import (
    Event,
    HardState,
    Ready,
    RemovedFromGroup,
    RestoredState,
    Role,
    RoleChange,
    SnapshotWrite,
    TransferGivenUp,
)

__all__ = [
    "TERM_JUMP_MAX",
    "TERM_MAX",
    "AppendReply",
    "AppendRequest",
    "Configuration",
    "ConfigurationFormatError",
    "Entry",
    "EntryKind",
    "Event",
    "FollowerReply",
    "HardState",
    "HeartbeatReply",
    "HeartbeatRequest",
    "InvariantError",
    "LeaderMessage",
    "LogPosition",
    "LostEntriesError",
    "Message",
    "ProgressState",
    "RaftCore",
    "RaftCoreConfig",
    "RaftLog",
    "Ready",
    "Refusal",
    "RemovedFromGroup",
    "RestoredState",
    "Role",
    "RoleChange",
    "Snapshot",
    "SnapshotChunk",
    "SnapshotReply",
    "SnapshotWrite",
    "TimeoutNow",
    "TransferGivenUp",
    "VoteReply",
    "VoteRequest",
]
