"""A member's settings, checked against one another."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from koinon_coordinator.config import MESSAGE_BYTES_MAX
from koinon_coordinator.core.raft import RaftCoreConfig
from koinon_proto.contract.errors import ConfigurationError

TICKS_APART_MAX = 3  # in intervals: ticks that would find nothing to do are left out
STEP_TICKS = 5  # a member whose ticks are further apart was kept from running
BATCH_ROOM_BYTES = 2 << 20  # what a batch holds beside its largest message


@dataclass(frozen=True, kw_only=True, slots=True)
class RaftConfig:
    """One member of a Raft group. Refused, naming both values, if it contradicts itself."""

    member_id: str
    data_dir: Path
    initial_members: Mapping[str, str] = field(default_factory=dict)
    """Voters of a new group (id -> host:port); used for a fresh directory only. Empty: this
    member joins a group that adds it as a learner."""
    election_timeout_min_ms: int = 300
    election_timeout_max_ms: int = 600
    heartbeat_interval_ms: int = 75
    check_quorum_ms: int = 400
    save_timeout_ms: int = 1500  # a leader whose disk takes longer for one save steps down
    quiet_ms_max: int = 3000  # without an entry: then a leader appends one, to try all disks
    tick_interval_ms: int = 15
    snapshot_every_entries: int = 20_000
    snapshot_every_bytes: int = 64 << 20
    snapshot_every_apply_ms: int = 200  # of CPU: a few entries may change all of a large table
    retained_entries_max: int = 2000
    pending_proposals_max: int = 16_384
    pending_proposal_bytes_max: int = 32 << 20
    pending_reads_max: int = 16_384
    append_bytes_max: int = 1 << 20  # also the largest command
    snapshot_chunk_bytes: int = 256 << 10
    map_bytes: int = 256 << 20  # to begin with; doubled when full
    map_bytes_max: int = 16 << 30

    def __post_init__(self) -> None:
        voters = self.initial_members
        if voters and len(voters) % 2 == 0:
            raise ConfigurationError(
                reason=f"initial_members has {len(voters)} voters ({', '.join(sorted(voters))}): "
                f"an even number tolerates no more failures than {len(voters) - 1}"
            )
        if voters and self.member_id not in voters:
            raise ConfigurationError(
                reason=f"member_id={self.member_id!r} is not among initial_members={sorted(voters)}"
            )
        if len(set(voters.values())) != len(voters):
            raise ConfigurationError(
                reason=f"initial_members={dict(voters)} gives two members one address"
            )
        if self.tick_interval_ms * 2 > self.heartbeat_interval_ms:
            raise ConfigurationError(
                reason=f"tick_interval_ms={self.tick_interval_ms} must be at most half of "
                f"heartbeat_interval_ms={self.heartbeat_interval_ms}"
            )
        if self.map_bytes > self.map_bytes_max:
            raise ConfigurationError(
                reason=f"map_bytes={self.map_bytes} exceeds map_bytes_max={self.map_bytes_max}"
            )
        message_bytes_max = MESSAGE_BYTES_MAX - BATCH_ROOM_BYTES
        for name in ("append_bytes_max", "snapshot_chunk_bytes"):
            if getattr(self, name) > message_bytes_max:
                raise ConfigurationError(
                    reason=f"{name}={getattr(self, name)} exceeds a message's limit "
                    f"of {message_bytes_max} bytes"
                )
        self.core_config()  # checks the rest

    def core_config(self) -> RaftCoreConfig:
        same = set(RaftCoreConfig.__slots__) & set(RaftConfig.__slots__)
        return RaftCoreConfig(
            **{name: getattr(self, name) for name in same},
            step_ms_max=STEP_TICKS * self.tick_interval_ms,
            inflight_bytes_max=8 * self.append_bytes_max,
            uncommitted_entries_max=self.pending_proposals_max,
            uncommitted_bytes_max=self.pending_proposal_bytes_max,
        )
