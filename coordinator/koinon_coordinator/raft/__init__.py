"""The Raft core's drivers: durable storage, transport between members, and the asyncio member."""

from koinon_coordinator.raft.errors import (
    MemberRemovedError,
    MemberStoppedError,
    ProposalQueueFullError,
    ProposalUnknownError,
    StorageFailedError,
    StoreChangedError,
)
from koinon_coordinator.raft.member import RaftMember, StateMachine
from koinon_coordinator.raft.member_config import RaftConfig
from koinon_coordinator.raft.peer_stream import RAFT_COMMAND, TransportConfig
from koinon_coordinator.raft.status import MemberStatus, RaftCounters, RaftStatus
from koinon_coordinator.raft.storage import LmdbRaftStorage, RaftStorage
from koinon_coordinator.raft.transport import RaftTransport, StreamRaftTransport

__all__ = [
    "RAFT_COMMAND",
    "LmdbRaftStorage",
    "MemberRemovedError",
    "MemberStatus",
    "MemberStoppedError",
    "ProposalQueueFullError",
    "ProposalUnknownError",
    "RaftConfig",
    "RaftCounters",
    "RaftMember",
    "RaftStatus",
    "RaftStorage",
    "RaftTransport",
    "StateMachine",
    "StorageFailedError",
    "StoreChangedError",
    "StreamRaftTransport",
    "TransportConfig",
]
