"""The core's settings, and its refusals of inputs."""

from dataclasses import dataclass
from enum import Enum

from koinon_proto.contract.errors import ConfigurationError


class Refusal(Enum):
    """The reason why the core refused an input. Nothing was appended or changed."""

    NOT_LEADER = "not the leader"
    TRANSFERRING = "handing leadership over"
    QUEUE_FULL = "too many commands wait to be committed"
    QUEUE_BYTES_FULL = "too many bytes wait to be committed"
    READS_FULL = "too many reads wait to be answered"
    TOO_LARGE = "the command is larger than an append message may be"
    TERM_NOT_COMMITTED = "no entry of the leader's own term is committed yet"
    CHANGE_IN_FLIGHT = "a configuration change is not committed yet"
    ALREADY_MEMBER = "already a member"
    NOT_A_MEMBER = "not a member"
    NOT_A_LEARNER = "not a learner"
    NOT_A_VOTER = "not a voter"
    LEARNER_BEHIND = "the learner has not caught up"
    NO_MAJORITY = "too few of the voters that would be left are in touch"
    LAST_VOTER = "the last voter cannot be removed"
    ADDRESS_IN_USE = "another member has this address"
    NO_TARGET = "no other voter is in touch"


TERM_MAX = (1 << 62) - 1
"""The highest term in messages (koinon_proto/v1/options.proto). Terms must fit into 64 bits, with
room for later terms.
"""
TERM_JUMP_MAX = 1 << 32
"""The most by which a message's term may exceed the receiver's: more elections than are
possible."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RaftCoreConfig:
    """Times, and bounds on everything that could grow. Contradictory values are refused."""

    member_id: str
    election_timeout_min_ms: int = 300
    election_timeout_max_ms: int = 600
    heartbeat_interval_ms: int = 75
    check_quorum_ms: int = 400
    save_timeout_ms: int = 1500  # after it a disk that has not saved counts as hanging
    quiet_ms_max: int = 3000  # without entries: then a leader appends a no-op, to test all disks
    leaderless_ms: int = 5000  # without a leader: then messages of unknown senders count
    step_ms_max: int = 60  # counted as waiting between two readings of the clock at most
    append_entries_max: int = 1024
    append_bytes_max: int = 1 << 20
    inflight_messages_max: int = 64
    inflight_bytes_max: int = 8 << 20
    uncommitted_entries_max: int = 16_384
    uncommitted_bytes_max: int = 32 << 20
    apply_entries_max: int = 64  # in one output, so that the driver can do other work in between
    pending_reads_max: int = 16_384
    snapshot_chunk_bytes: int = 256 << 10
    snapshot_bytes_max: int = 1 << 30
    retained_entries_max: int = 2000  # kept before a snapshot, for slightly late followers
    promote_lag_entries_max: int = 1000

    @property
    def step_down_s(self) -> float:
        """Seconds for which a leader without a quorum's answers stays leader (and accepts no
        input): until the others may have elected another one.
        """
        return max(self.check_quorum_ms, self.election_timeout_max_ms) / 1000

    def __post_init__(self) -> None:
        if not self.member_id:
            raise ConfigurationError(reason="member_id is empty")
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, int) and value < (0 if name == "retained_entries_max" else 1):
                raise ConfigurationError(reason=f"{name}={value} is too small")
        _require_below(self, "election_timeout_min_ms", "election_timeout_max_ms")
        _require_below(self, "heartbeat_interval_ms", "election_timeout_min_ms")
        _require_below(self, "heartbeat_interval_ms", "check_quorum_ms", factor=2)
        _require_below(self, "append_bytes_max", "inflight_bytes_max")
        _require_below(self, "append_bytes_max", "uncommitted_bytes_max")
        _require_below(self, "snapshot_chunk_bytes", "snapshot_bytes_max")


def _require_below(config: RaftCoreConfig, low: str, high: str, *, factor: int = 1) -> None:
    low_value, high_value = getattr(config, low), getattr(config, high)
    if low_value * factor >= high_value:
        times = f"{factor} * " if factor > 1 else ""
        raise ConfigurationError(
            reason=f"{times}{low}={low_value} must be below {high}={high_value}"
        )
