"""What the members of a group say to one another.

Every message names its sender, its receiver and the sender's term; a vote request alone names the
term that it campaigns for, which for a pre-vote nobody has entered yet. Replies echo what they
answer, so that one from an earlier round, term or chunk is never taken for another.
"""

from dataclasses import dataclass
from typing import TypeAlias

from koinon_coordinator.core.raft.configuration import Configuration
from koinon_coordinator.core.raft.log import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteRequest:
    """May I lead `term`? With `pre_vote`: would you vote so? Nobody's term changes by asking."""

    term: int
    sender: str
    to: str
    last_index: int
    last_term: int
    pre_vote: bool
    transfer: bool  # the leader itself asked for this campaign: stickiness does not apply


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteReply:
    term: int  # the voter's own
    sender: str
    to: str
    request_term: int  # the term of the request that this answers
    pre_vote: bool
    granted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendRequest:
    term: int
    sender: str
    to: str
    previous_index: int
    previous_term: int
    entries: tuple[Entry, ...]
    commit_index: int
    round_id: int  # sent no earlier than this quorum round was begun


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendReply:
    """Success: everything up to `match_index` is the leader's, and durable here.

    Refusal: nothing matched at `rejected_index`; the leader should look at or below `hint_index`,
    where the follower's log has `hint_term`.
    """

    term: int
    sender: str
    to: str
    round_id: int
    success: bool
    match_index: int = 0
    rejected_index: int = 0
    hint_index: int = 0
    hint_term: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatRequest:
    term: int
    sender: str
    to: str
    commit_index: int  # never above what the receiver has acknowledged
    round_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatReply:
    term: int
    sender: str
    to: str
    round_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotChunk:
    """A part of a snapshot; index, term, size and checksum together say of which one."""

    term: int
    sender: str
    to: str
    round_id: int
    snapshot_index: int
    snapshot_term: int
    configuration: Configuration
    size_bytes: int
    checksum: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotReply:
    """`next_offset` is what the receiver wants next; `match_index` > 0 once it is installed."""

    term: int
    sender: str
    to: str
    round_id: int
    snapshot_index: int
    chunk_offset: int
    next_offset: int
    match_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutNow:
    """Campaign at once: the leader hands over to the receiver."""

    term: int
    sender: str
    to: str


LeaderMessage: TypeAlias = AppendRequest | HeartbeatRequest | SnapshotChunk
FollowerReply: TypeAlias = AppendReply | HeartbeatReply | SnapshotReply
Message: TypeAlias = VoteRequest | VoteReply | LeaderMessage | FollowerReply | TimeoutNow
