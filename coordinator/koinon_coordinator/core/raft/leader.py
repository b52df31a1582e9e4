"""A leader's work: replicates, commits, serves reads, sends snapshots, transfers leadership.

A `Leader` lives for one term of leadership, and so does its knowledge of the followers. Inputs only
change its state; `flush` then sends the messages that are due, so that all proposals between two
flushes share one message per follower, and all reads share one round.

Without proposals a no-op is appended now and then: only writing shows that a disk, the leader's or
a follower's, is dead or hangs.

Commitment (Raft paper, 5.4.2): only entries of the leader's own term are committed by counting, and
only durable copies count, the leader's own included.
"""

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass

from koinon_coordinator.core.raft.configuration import Configuration
from koinon_coordinator.core.raft.core_config import RaftCoreConfig, Refusal
from koinon_coordinator.core.raft.log import EntryKind, LogPosition, RaftLog
from koinon_coordinator.core.raft.messages import (
    AppendReply,
    AppendRequest,
    FollowerReply,
    HeartbeatReply,
    HeartbeatRequest,
    Message,
    SnapshotChunk,
    SnapshotReply,
    TimeoutNow,
)
from koinon_coordinator.core.raft.progress import (
    Progress,
    ProgressState,
    QuorumRounds,
    quorum_value,
)


@dataclass(slots=True, kw_only=True)
class LeadershipTransfer:
    """A transfer of leadership to `to`; proposals are refused until `deadline`."""

    to: str
    deadline: float
    told: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRound:
    """Reads that may be answered at `index` once a quorum has answered `round_id`."""

    round_id: int
    index: int
    contexts: tuple[object, ...]


class Leader:
    """One term of leadership."""

    def __init__(
        self,
        *,
        config: RaftCoreConfig,
        term: int,
        log: RaftLog,
        outbox: list[Message],
        now: float,
    ) -> None:
        self._config = config
        self._id = config.member_id
        self._term = term
        self._log = log
        self._outbox = outbox  # the core's messages that need a durable term and vote
        self._rounds = QuorumRounds()
        self._elected_at = now  # monotonic seconds, like all times here
        self._heartbeat_due_at = now
        self._new_reads: list[object] = []  # contexts that wait for the next round
        self._open_reads: deque[ReadRound] = deque()  # rounds without a quorum's answers yet
        self._open_read_count = 0
        self._uncommitted_bytes = 0  # of this leader's proposals; bounded
        self._finished_reads: list[tuple[int, object]] = []  # (index, context)
        self.transfer: LeadershipTransfer | None = None
        self.progress: dict[str, Progress] = {}
        self._log.append(term, EntryKind.NOOP, b"")
        self._quiet_from = log.last_index, now  # the newest entry, and when it was first seen
        self._follow_configuration(now)

    # -- facts

    @property
    def quorum_contact_at(self) -> float | None:
        """The sending time of the newest round that a quorum has answered; None before the
        first.
        """
        return self._rounds.answered_sent_at

    def has_quorum_contact(self, now: float) -> bool:
        if self.is_sole_voter:
            return True
        contact = self._rounds.answered_sent_at
        last_contact = self._elected_at if contact is None else contact
        return now - last_contact <= self._config.check_quorum_ms / 1000

    def can_be_spared(self, now: float) -> bool:
        """Return whether the reachable other voters that have saved the entries which this leader
        could not save are a majority without it. Heartbeats need no disk: if the others' disks hang
        as well (all may share one), no member could be elected.
        """
        configuration = self._log.configuration
        others = [m for m in configuration.voters if m != self._id and self.is_active(m, now)]
        able = (m for m in others if self.progress[m].match_index >= self._log.saving_through)
        return sum(1 for _ in able) >= configuration.quorum

    @property
    def has_committed_in_term(self) -> bool:
        return self._log.term_at(self._log.commit_index) == self._term

    @property
    def is_sole_voter(self) -> bool:
        voters = self._log.configuration.voters
        return len(voters) == 1 and self._id in voters

    def is_active(self, member_id: str, now: float) -> bool:
        progress = self.progress.get(member_id)
        if progress is None or progress.heard_at is None:
            return False
        return now - progress.heard_at <= self._config.check_quorum_ms / 1000

    # -- proposals and configuration changes

    def propose(self, command: bytes) -> LogPosition | Refusal:
        if self.transfer is not None:
            return Refusal.TRANSFERRING
        size_bytes = len(command)
        if size_bytes > self._config.append_bytes_max:
            return Refusal.TOO_LARGE
        log = self._log
        if log.last_index - log.applied_index >= self._config.uncommitted_entries_max:
            return Refusal.QUEUE_FULL
        if self._uncommitted_bytes + size_bytes > self._config.uncommitted_bytes_max:
            return Refusal.QUEUE_BYTES_FULL
        self._uncommitted_bytes += size_bytes
        entry = log.append(self._term, EntryKind.COMMAND, command)
        return LogPosition(entry.index, entry.term)

    def add_learner(self, member_id: str, address: str, now: float) -> LogPosition | Refusal:
        current = self._log.configuration
        if member_id in current:
            return Refusal.ALREADY_MEMBER
        if address in current.members.values():
            return Refusal.ADDRESS_IN_USE
        return self._change(current.with_learner(member_id, address), now)

    def change_own_address(self, address: str, now: float) -> LogPosition | Refusal:
        """Change the address of the only member: no other member has to find it to commit that."""
        assert set(self._log.configuration.members) == {self._id}
        return self._change(Configuration(voters={self._id: address}), now)

    def promote(self, member_id: str, now: float) -> LogPosition | Refusal:
        current = self._log.configuration
        if member_id not in current.learners:
            return Refusal.NOT_A_LEARNER
        lag = self._log.commit_index - self.progress[member_id].match_index
        if lag > self._config.promote_lag_entries_max:
            return Refusal.LEARNER_BEHIND
        return self._change(current.with_promoted(member_id), now)

    def remove(self, member_id: str, now: float) -> LogPosition | Refusal:
        """Remove a member, unless too few reachable voters would be left to commit the removal."""
        current = self._log.configuration
        if member_id not in current:
            return Refusal.NOT_A_MEMBER
        if set(current.voters) == {member_id}:
            return Refusal.LAST_VOTER
        changed = current.without(member_id)
        in_touch = sum(m == self._id or self.is_active(m, now) for m in changed.voters)
        if in_touch < changed.quorum and member_id in current.voters:
            return self._change_refusal() or Refusal.NO_MAJORITY
        return self._change(changed, now)

    def _change(self, changed: Configuration, now: float) -> LogPosition | Refusal:
        """Append a configuration one member away from the current one.

        Quorums of two such configurations overlap only if the older one is committed, and in
        this leader's own term: without the second condition two leaders of different terms can
        each commit a change that the other does not know (the single-server bug of 2015).
        """
        refusal = self._change_refusal()
        if refusal is not None:
            return refusal
        entry = self._log.append(self._term, EntryKind.CONFIGURATION, changed.encode())
        self._follow_configuration(now)
        return LogPosition(entry.index, entry.term)

    def _change_refusal(self) -> Refusal | None:
        if self.transfer is not None:
            return Refusal.TRANSFERRING
        if self._log.has_uncommitted_configuration:
            return Refusal.CHANGE_IN_FLIGHT
        if not self.has_committed_in_term:
            return Refusal.TERM_NOT_COMMITTED
        return None

    def _follow_configuration(self, now: float) -> None:
        members = self._log.configuration.members
        for member_id in members:
            known = self.progress.get(member_id)
            if member_id != self._id and (known is None or known.removed_at_index is not None):
                progress = Progress(member_id, self._log.last_index, self._config)
                self.progress[member_id] = progress
        for member_id, progress in self.progress.items():
            if member_id not in members and progress.removed_at_index is None:
                # Serve it a little longer, so that it learns of its removal.
                progress.removed_at_index = self._log.last_index
                progress.removal_deadline = now + self._config.election_timeout_max_ms / 1000
        if self.transfer is not None and self.transfer.to not in members:
            self.transfer = None

    # -- reads

    def read_index(self, context: object) -> Refusal | None:
        if self._open_read_count >= self._config.pending_reads_max:
            return Refusal.READS_FULL
        self._open_read_count += 1
        self._new_reads.append(context)
        return None

    def _begin_reads(self, now: float) -> None:
        """Give the waiting reads an index and a round of their own, which begins after their
        arrival.

        Before an entry of this term is committed, the commit index may be behind what an earlier
        leader acknowledged; the reads wait (dissertation, 6.4).
        """
        if self._new_reads and self.has_committed_in_term:
            round_id = self._begin_round(now)
            contexts = tuple(self._new_reads)
            self._new_reads.clear()
            self._open_reads.append(
                ReadRound(round_id=round_id, index=self._log.commit_index, contexts=contexts)
            )

    def _settle_rounds(self) -> None:
        voters = self._log.configuration.voters
        acked = [
            self._rounds.current if member_id == self._id else self.progress[member_id].acked_round
            for member_id in voters
        ]
        self._rounds.answer(quorum_value(acked, self._log.configuration.quorum))
        while self._open_reads and self._open_reads[0].round_id <= self._rounds.answered:
            finished = self._open_reads.popleft()
            self._open_read_count -= len(finished.contexts)
            self._finished_reads.extend((finished.index, c) for c in finished.contexts)

    # -- time

    def take_finished_reads(self) -> tuple[tuple[int, object], ...]:
        """Return (index, context) of the reads whose round is answered and whose index was handed
        out for apply, each once.
        """
        finished = self._finished_reads
        count = bisect_right(finished, self._log.applied_index, key=lambda read: read[0])
        taken = tuple(finished[:count])
        del finished[:count]
        return taken

    def tick(self, now: float) -> str | None:
        """Send heartbeats and check deadlines; return the target of a transfer that was given up,
        if any.
        """
        if now >= self._heartbeat_due_at:
            self._begin_round(now)
            if self.transfer is not None:
                self.transfer.told = False
        for progress in list(self.progress.values()):
            deadline = progress.removal_deadline
            if deadline is not None and now >= deadline and self._removal_committed(progress):
                del self.progress[progress.member_id]
        if self.transfer is not None and now >= self.transfer.deadline:
            given_up, self.transfer = self.transfer.to, None
            return given_up
        self._try_disks(now)
        return None

    def _try_disks(self, now: float) -> None:
        """Append a no-op if nothing was written for a while, so that every member writes to its
        disk.
        """
        log, (last_index, since) = self._log, self._quiet_from
        if log.last_index > last_index:
            self._quiet_from = log.last_index, now
            return
        is_quiet = now - since >= self._config.quiet_ms_max / 1000
        if is_quiet and log.commit_index == last_index and self.transfer is None:
            log.append(self._term, EntryKind.NOOP, b"")
            self._quiet_from = log.last_index, now

    @property
    def tick_due_at(self) -> float:
        """The time at which ``tick`` has work next."""
        removals = (p.removal_deadline for p in self.progress.values())
        transfer = self.transfer.deadline if self.transfer is not None else None
        deadlines = (self._heartbeat_due_at, transfer, *removals)
        return min(at for at in deadlines if at is not None)

    def _begin_round(self, now: float) -> int:
        """Send all followers a heartbeat whose answers count as contact from `now`."""
        self._heartbeat_due_at = now + self._config.heartbeat_interval_ms / 1000
        round_id = self._rounds.begin(now)
        for progress in self.progress.values():
            self._send_heartbeat(progress)
        return round_id

    def _send_heartbeat(self, progress: Progress) -> None:
        self._outbox.append(
            HeartbeatRequest(
                term=self._term,
                sender=self._id,
                to=progress.member_id,
                commit_index=min(self._log.commit_index, progress.match_index),
                round_id=self._rounds.current,
            )
        )

    # -- transfer

    def begin_transfer(self, to: str | None, now: float) -> str | Refusal:
        """Transfer leadership to `to`, or to the most advanced voter; return its id."""
        if self.transfer is not None:
            return Refusal.TRANSFERRING
        voters = [m for m in self._log.configuration.voters if m != self._id]
        if to is None:
            in_touch = [m for m in voters if self.is_active(m, now)]
            if not in_touch:
                return Refusal.NO_TARGET
            to = max(in_touch, key=lambda m: self.progress[m].match_index)
        if to not in voters:
            return Refusal.NOT_A_VOTER
        deadline = now + self._config.election_timeout_max_ms / 1000
        self.transfer = LeadershipTransfer(to=to, deadline=deadline)
        return to

    def _tell_transfer_target(self) -> None:
        transfer = self.transfer
        if transfer is None or transfer.told:
            return
        if self._log.applied_index < self._log.last_index:
            return  # proposers should first get their results
        if self.progress[transfer.to].match_index == self._log.last_index:
            transfer.told = True
            self._outbox.append(TimeoutNow(term=self._term, sender=self._id, to=transfer.to))

    def nominate_successor(self) -> None:
        """On leaving the group, have the most advanced voter campaign at once."""
        voters = [self.progress[m] for m in self._log.configuration.voters if m != self._id]
        successor = max(voters, key=lambda progress: progress.match_index)
        self._outbox.append(TimeoutNow(term=self._term, sender=self._id, to=successor.member_id))

    # -- replies

    def on_reply(self, reply: FollowerReply, now: float) -> bool:
        """Handle a follower's reply; return whether it completes a quorum's answers to another
        round.
        """
        progress = self.progress.get(reply.sender)
        if progress is None:
            return False
        answered = self._rounds.answered
        progress.heard_at = now
        progress.acked_round = max(progress.acked_round, reply.round_id)
        if isinstance(reply, AppendReply):
            self._on_append_reply(progress, reply)
        elif isinstance(reply, HeartbeatReply):
            progress.on_alive(self._log.last_index)
            self._resend_chunk_if_lost(progress, now)
        else:
            self._on_snapshot_reply(progress, reply)
        self._settle_rounds()
        return self._rounds.answered > answered

    def _on_append_reply(self, progress: Progress, reply: AppendReply) -> None:
        if reply.success:
            progress.on_match(reply.match_index)
            self.advance_commit()
            if progress.state is ProgressState.SNAPSHOT:
                self._leave_snapshot_if_matched(progress)
            return
        if progress.state is ProgressState.SNAPSHOT or reply.rejected_index <= progress.match_index:
            return
        if (
            progress.state is ProgressState.PROBE
            and reply.rejected_index != progress.next_index - 1
        ):
            return  # the answer to an earlier probe
        agreed = self._log.last_at_or_below(reply.hint_index, reply.hint_term)
        if agreed.index > reply.hint_index or agreed.term > reply.hint_term:
            # They agree, if at all, on what is compacted here: only a snapshot helps.
            progress.probe_from(self._log.base.index)
        else:
            progress.probe_from(agreed.index + 1)

    def advance_commit(self) -> None:
        log = self._log
        matches = [
            log.persisted_index if member_id == self._id else self.progress[member_id].match_index
            for member_id in log.configuration.voters
        ]
        index = quorum_value(matches, log.configuration.quorum)
        before = log.commit_index
        if index > before and log.term_at(index) == self._term:
            log.commit_to(index)
            committed = log.slice(before + 1, index)
            self._uncommitted_bytes -= sum(
                len(entry.data)
                for entry in committed
                if entry.term == self._term and entry.kind is EntryKind.COMMAND
            )

    # -- sending

    def flush(self, now: float) -> None:
        """Send all messages that are due; called before each output is taken."""
        if self.is_sole_voter:
            self.advance_commit()
        self._begin_reads(now)
        if self.is_sole_voter:
            self._settle_rounds()
        for progress in list(self.progress.values()):
            self._replicate(progress, now)
            if progress.removed_at_index is not None:
                self._say_goodbye(progress)
        self._tell_transfer_target()

    def _replicate(self, progress: Progress, now: float) -> None:
        last_index = self._log.last_index
        while progress.may_append and (
            progress.next_index <= last_index or progress.tail_check_due
        ):
            previous_index = progress.next_index - 1
            previous_term = self._log.term_at(previous_index)
            if previous_term is None:
                progress.start_snapshot(self._log.snapshot)
                break
            entries = self._log.batch_from(
                progress.next_index, self._config.append_entries_max, self._config.append_bytes_max
            )
            self._outbox.append(
                AppendRequest(
                    term=self._term,
                    sender=self._id,
                    to=progress.member_id,
                    previous_index=previous_index,
                    previous_term=previous_term,
                    entries=entries,
                    commit_index=self._log.commit_index,
                    round_id=self._rounds.current,
                )
            )
            progress.on_append_sent(entries)
        if progress.transfer is not None and progress.transfer.sent_at is None:
            self._send_chunk(progress, now)

    def _removal_committed(self, progress: Progress) -> bool:
        index = progress.removed_at_index
        return index is not None and index <= self._log.commit_index

    def _say_goodbye(self, progress: Progress) -> None:
        """Tell a removed member that its removal is committed, then forget it."""
        assert progress.removed_at_index is not None
        if self._removal_committed(progress) and progress.match_index >= progress.removed_at_index:
            self._send_heartbeat(progress)
            del self.progress[progress.member_id]

    # -- snapshots

    def _send_chunk(self, progress: Progress, now: float) -> None:
        transfer = progress.transfer
        assert transfer is not None
        transfer.sent_at = now
        snapshot = transfer.snapshot
        end = transfer.offset + self._config.snapshot_chunk_bytes
        self._outbox.append(
            SnapshotChunk(
                term=self._term,
                sender=self._id,
                to=progress.member_id,
                round_id=self._rounds.current,
                snapshot_index=snapshot.index,
                snapshot_term=snapshot.term,
                configuration=snapshot.configuration,
                size_bytes=len(snapshot.data),
                checksum=snapshot.checksum,
                offset=transfer.offset,
                data=snapshot.data[transfer.offset : end],
            )
        )

    def _resend_chunk_if_lost(self, progress: Progress, now: float) -> None:
        transfer = progress.transfer
        if transfer is None or transfer.sent_at is None:
            return
        if now - transfer.sent_at >= self._config.check_quorum_ms / 1000:
            transfer.sent_at = None

    def _on_snapshot_reply(self, progress: Progress, reply: SnapshotReply) -> None:
        if reply.match_index:
            progress.match_index = max(progress.match_index, reply.match_index)
            self.advance_commit()
            self._leave_snapshot_if_matched(progress)
            return
        transfer = progress.transfer
        if (
            transfer is not None
            and reply.snapshot_index == transfer.snapshot.index
            and reply.chunk_offset == transfer.offset
            and reply.next_offset <= len(transfer.snapshot.data)
        ):
            transfer.offset = reply.next_offset
            transfer.sent_at = None

    def _leave_snapshot_if_matched(self, progress: Progress) -> None:
        """Continue with appends, or (if the log was compacted meanwhile) with the next snapshot."""
        transfer = progress.transfer
        if transfer is not None and progress.match_index >= min(
            transfer.snapshot.index, self._log.base.index
        ):
            progress.probe_from(progress.match_index + 1)
