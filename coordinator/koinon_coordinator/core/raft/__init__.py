"""Raft as a pure state machine: see `raft` for the core, `ready` for what it puts out."""

from .config import TERM_JUMP_MAX, TERM_MAX, RaftCoreConfig, Refusal
from .configuration import Configuration, ConfigurationFormatError
from .log import (
    Entry,
    EntryKind,
    InvariantError,
    LogPosition,
    LostEntriesError,
    RaftLog,
    Snapshot,
)
from .messages import (
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
from .progress import ProgressState
from .raft import RaftCore
from .ready import (
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
