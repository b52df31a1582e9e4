"""The Raft core's drivers: durable storage, transport between members, and the asyncio member."""

from .config import RaftConfig
from .errors import (
    MemberRemovedError,
    MemberStoppedError,
    ProposalQueueFullError,
    ProposalUnknownError,
    StorageFailedError,
    StoreChangedError,
)
from .member import RaftMember, StateMachine
from .memory_transport import MemoryRaftNetwork, MemoryRaftTransport
from .status import MemberStatus, RaftCounters, RaftStatus
from .storage import LmdbRaftStorage, MemoryRaftStorage, RaftStorage
from .transport import GrpcRaftTransport, RaftTransport, TransportConfig

__all__ = [
    "GrpcRaftTransport",
    "LmdbRaftStorage",
    "MemberRemovedError",
    "MemberStatus",
    "MemberStoppedError",
    "MemoryRaftNetwork",
    "MemoryRaftStorage",
    "MemoryRaftTransport",
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
    "TransportConfig",
]
