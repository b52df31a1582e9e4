"""The core's output to its driver, and the stored state with which the driver starts the core."""

from dataclasses import dataclass
from enum import Enum

from koinon_coordinator.core.raft.configuration import Configuration
from koinon_coordinator.core.raft.log import Entry, LogPosition, Snapshot
from koinon_coordinator.core.raft.messages import Message


class Role(Enum):
    FOLLOWER = "follower"
    PRE_CANDIDATE = "pre-candidate"
    CANDIDATE = "candidate"
    LEADER = "leader"


@dataclass(frozen=True, slots=True, kw_only=True)
class HardState:
    """The term and the vote, which a member must never forget."""

    term: int = 0
    vote: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredState:
    """The durable contents of storage when a member starts."""

    hard_state: HardState
    snapshot: Snapshot
    base: LogPosition
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotWrite:
    """Replaces the stored snapshot by `snapshot`; the log then begins after `base`.

    `installed`: the snapshot came from the leader; it replaces the whole log, and the state machine
    must be restored from it. Otherwise it was taken here, and only entries up to `base` are
    dropped.
    """

    snapshot: Snapshot
    base: LogPosition
    installed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleChange:
    role: Role
    term: int
    leader_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedFromGroup:
    """A committed configuration leaves this member out."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferGivenUp:
    """The chosen successor did not take over in time; this member stays leader."""

    to: str


Event = RoleChange | RemovedFromGroup | TransferGivenUp


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """One batch of output. The driver, in this order:

    1. sends `messages`;
    2. restores the state machine if `snapshot_write.installed`, then applies `committed`;
    3. answers `finished_reads`: what their callers must see is applied by now;
    4. makes `hard_state`, `snapshot_write` and `entries` durable, in one transaction;
    5. only then sends `messages_after_persist`, and calls `advance(ready)`.

    1 to 3 need not wait for 4, which may run elsewhere: until `advance`, further outputs have only
    parts that need no disk.
    """

    hard_state: HardState | None
    snapshot_write: SnapshotWrite | None
    entries: tuple[Entry, ...]
    messages: tuple[Message, ...]
    messages_after_persist: tuple[Message, ...]
    committed: tuple[Entry, ...]
    finished_reads: tuple[tuple[int, object], ...]  # (index, context)
    events: tuple[Event, ...]
    configuration: Configuration | None  # set if another one is in force now

    @property
    def needs_persist(self) -> bool:
        return bool(self.hard_state or self.snapshot_write or self.entries)
