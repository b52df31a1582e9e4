"""A leader's knowledge of each follower, and of the rounds that a quorum has answered.

A follower is in one of three states:
    PROBE      the point where the logs agree is unknown: one append at a time, until one succeeds
    REPLICATE  appends are pipelined optimistically, bounded in number and bytes
    SNAPSHOT   the needed entries are compacted: chunks of a snapshot, one at a time
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from koinon_coordinator.core.raft.core_config import RaftCoreConfig
from koinon_coordinator.core.raft.log import Entry, Snapshot


class ProgressState(Enum):
    PROBE = auto()
    REPLICATE = auto()
    SNAPSHOT = auto()


@dataclass(slots=True, kw_only=True)
class SnapshotTransfer:
    """One snapshot being sent. It outlives a compaction, since the leader's log moves on
    meanwhile.
    """

    snapshot: Snapshot
    offset: int = 0
    sent_at: float | None = None  # None: the chunk at `offset` is due


class Progress:
    """One follower, as seen by the leader."""

    def __init__(self, member_id: str, next_index: int, config: RaftCoreConfig) -> None:
        self.member_id = member_id
        self.match_index = 0
        self.next_index = next_index
        self.state = ProgressState.PROBE
        self.transfer: SnapshotTransfer | None = None
        self.acked_round = 0
        self.heard_at: float | None = None
        self.removed_at_index: int | None = None  # its removal is in the log at this index
        self.removal_deadline: float | None = None
        self.tail_check_due = False
        self._awaits_probe = False
        self._inflight: deque[tuple[int, int]] = deque()  # (last index, bytes) per append
        self._inflight_bytes = 0
        self._config = config

    @property
    def may_append(self) -> bool:
        if self.state is ProgressState.REPLICATE:
            return (
                len(self._inflight) < self._config.inflight_messages_max
                and self._inflight_bytes < self._config.inflight_bytes_max
            )
        return self.state is ProgressState.PROBE and not self._awaits_probe

    def on_append_sent(self, entries: Sequence[Entry]) -> None:
        self.tail_check_due = False
        if self.state is ProgressState.PROBE:
            self._awaits_probe = True
        elif entries:
            size_bytes = sum(entry.size_bytes for entry in entries)
            self._inflight.append((entries[-1].index, size_bytes))
            self._inflight_bytes += size_bytes
            self.next_index = entries[-1].index + 1

    def on_match(self, index: int) -> None:
        """Note that the follower durably agrees with the leader up to `index`."""
        self.match_index = max(self.match_index, index)
        while self._inflight and self._inflight[0][0] <= index:
            self._inflight_bytes -= self._inflight.popleft()[1]
        if self.state is ProgressState.PROBE:
            self._enter(ProgressState.REPLICATE)
            self.next_index = self.match_index + 1
        elif self.state is ProgressState.REPLICATE:
            self.next_index = max(self.next_index, self.match_index + 1)

    def probe_from(self, next_index: int) -> None:
        self._enter(ProgressState.PROBE)
        self.next_index = max(next_index, self.match_index + 1)

    def start_snapshot(self, snapshot: Snapshot) -> None:
        self._enter(ProgressState.SNAPSHOT)
        self.transfer = SnapshotTransfer(snapshot=snapshot)

    def on_alive(self, last_index: int) -> None:
        """Note a heartbeat's reply: check now whether appends or their replies were lost."""
        self._awaits_probe = False
        if self.match_index < last_index:
            self.tail_check_due = True
            if self._inflight and not self.may_append:
                self._inflight_bytes -= self._inflight.popleft()[1]

    def _enter(self, state: ProgressState) -> None:
        self.state = state
        self.transfer = None
        self._awaits_probe = False
        self._inflight.clear()
        self._inflight_bytes = 0


class QuorumRounds:
    """Numbered rounds of contact with the followers, and the newest that a quorum answered.

    A message carries the number of the newest round begun before its sending, so its answer proves
    contact after the round's beginning. Leases may count from that time, not from the answers'
    arrival.
    """

    def __init__(self) -> None:
        self.current = 0
        self.answered = 0
        self.answered_sent_at: float | None = None
        self._open: deque[tuple[int, float]] = deque()

    def begin(self, now: float) -> int:
        self.current += 1
        self._open.append((self.current, now))
        return self.current

    def answer(self, round_id: int) -> None:
        """Note that a quorum has answered every round up to `round_id`."""
        while self._open and self._open[0][0] <= round_id:
            self.answered, self.answered_sent_at = self._open.popleft()


def quorum_value(values: list[int], quorum: int) -> int:
    """The greatest value that at least `quorum` of `values` have reached."""
    return sorted(values, reverse=True)[quorum - 1]
