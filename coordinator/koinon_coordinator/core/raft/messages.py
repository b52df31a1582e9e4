"""The messages between the members of a group.

Every message names its sender, its receiver and the sender's term; a vote request alone names the
term that it campaigns for, which for a pre-vote no member has entered yet. Replies echo what they
answer, so that one from an earlier round, term or chunk is never taken for another.
"""

from dataclasses import dataclass
from typing import TypeAlias

from koinon_coordinator.core.raft.configuration import Configuration
from koinon_coordinator.core.raft.log import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """The fields of every message: the sender's term, and the ids of sender and receiver."""

    term: int
    sender: str
    to: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteRequest(Envelope):
    """May I lead `term`? With `pre_vote`: would you vote so? No term changes by asking."""

    last_index: int
    last_term: int
    pre_vote: bool
    transfer: bool  # the leader itself asked for this campaign: stickiness does not apply


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteReply(Envelope):
    """The term of the message is the voter's own."""

    request_term: int  # the term of the request that this answers
    pre_vote: bool
    granted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendRequest(Envelope):
    previous_index: int
    previous_term: int
    entries: tuple[Entry, ...]
    commit_index: int
    round_id: int  # sent no earlier than this quorum round was begun


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendReply(Envelope):
    """Success: everything up to `match_index` is the leader's, and durable here.

    Refusal: nothing matched at `rejected_index`; the leader should look at or below `hint_index`,
    where the follower's log has `hint_term`.
    """

    round_id: int
    success: bool
    match_index: int = 0
    rejected_index: int = 0
    hint_index: int = 0
    hint_term: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatRequest(Envelope):
    commit_index: int  # never above what the receiver has acknowledged
    round_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatReply(Envelope):
    round_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotChunk(Envelope):
    """A part of a snapshot; index, term, size and checksum together say of which one."""

    round_id: int
    snapshot_index: int
    snapshot_term: int
    configuration: Configuration
    size_bytes: int
    checksum: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotReply(Envelope):
    """`next_offset` is what the receiver wants next; `match_index` > 0 once it is installed."""

    round_id: int
    snapshot_index: int
    chunk_offset: int
    next_offset: int
    match_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutNow(Envelope):
    """Campaign at once: the leader hands over to the receiver."""


LeaderMessage: TypeAlias = AppendRequest | HeartbeatRequest | SnapshotChunk
FollowerReply: TypeAlias = AppendReply | HeartbeatReply | SnapshotReply
Message: TypeAlias = VoteRequest | VoteReply | LeaderMessage | FollowerReply | TimeoutNow
