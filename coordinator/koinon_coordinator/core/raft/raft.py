"""Raft without I/O: terms, votes, roles and time (Ongaro and Ousterhout, 2014; Ongaro's
dissertation for pre-vote, check-quorum, transfer, membership, reads).

Inputs: `tick`, `step`, `propose`, `read_index`, `transfer_leadership`, the configuration changes
and `compact`. Output: `ready`, confirmed by `advance`. The core has no clock, disk, network or
thread: `now` (seconds, monotonic, through suspend) and the random source are arguments.

Two rules make every answer reliable:
- A message leaves only when the term and the vote that it rests on are durable, and an
  acknowledgement only when the acknowledged entries are (`ready` holds them back until then).
- A leader checks the time of its last quorum contact before it handles an input, so that a leader
  that was stopped and resumed answers nothing before a quorum has answered it.

Campaigns and stepping down without a quorum go by the time in which this member ran
(`RunningTime`): a starved member has unread messages. `Patience` lengthens these times.

A member whose disk hangs still answers heartbeats, which need no disk, but as a leader it would
commit nothing. So it leaves the lead to the others if they are a majority without it, and does not
campaign before its save has ended.
"""

import random
from collections.abc import Callable, Mapping
from typing import TypeVar

from koinon_coordinator.core.raft.configuration import Configuration
from koinon_coordinator.core.raft.core_config import TERM_JUMP_MAX, RaftCoreConfig, Refusal
from koinon_coordinator.core.raft.follower import SnapshotAssembly, accept_append
from koinon_coordinator.core.raft.leader import Leader
from koinon_coordinator.core.raft.log import Entry, InvariantError, LogPosition, RaftLog, Snapshot
from koinon_coordinator.core.raft.messages import (
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
from koinon_coordinator.core.raft.patience import Patience
from koinon_coordinator.core.raft.progress import Progress
from koinon_coordinator.core.raft.ready import (
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
from koinon_proto.process.running_time import RunningTime

_WIDER_MAX = 4  # times the longest election time-out, after elections without a winner
_FROM_LEADER = (AppendRequest, HeartbeatRequest, SnapshotChunk, TimeoutNow)


class RaftCore:
    """One member of one group."""

    def __init__(
        self, config: RaftCoreConfig, restored: RestoredState, rng: random.Random, now: float
    ) -> None:
        self._config = config
        self._id = config.member_id
        self._rng = rng
        self.term = restored.hard_state.term
        self._vote = restored.hard_state.vote  # in ``term``; None: none given yet
        self.log = RaftLog(restored.snapshot, restored.base, restored.entries)
        self.role = Role.FOLLOWER
        self.leader_id: str | None = None
        self._leader: Leader | None = None
        self._votes: dict[str, bool] = {}  # answers to the present campaign, by voter
        self._assembly = SnapshotAssembly(config)
        self._had_leader_at = now  # when it last knew a leader, itself included; real time
        self._running = RunningTime(now, config.step_ms_max / 1000)
        # In running time: the last message of a leader; when to campaign without another one; when
        # a quorum last answered this leader. And the number of campaigns in a row.
        self._heard_leader_at = 0.0
        self._election_due_at = 0.0
        self._quorum_heard_at = 0.0
        self._campaigns = 0
        self._heard = (0, "")  # term and id of the leader whose message came last
        self._patience = Patience(_WIDER_MAX * config.election_timeout_max_ms / 1000)
        self._restart_election_timer(now)
        # Output that waits to be taken.
        self._messages: list[Message] = []  # these need a durable term and vote
        self._messages_after_entries: list[Message] = []  # these need durable entries as well
        self._snapshot_write: SnapshotWrite | None = None
        self._events: list[Event] = []
        self._persisting: Ready | None = None  # output that was taken and is not durable yet
        self._persisting_since = now  # when it was taken, monotonic seconds
        self._durable_hard_state = restored.hard_state
        self._reported_role = RoleChange(role=self.role, term=self.term, leader_id=None)
        self._reported_configuration: Configuration | None = None
        self._noted_commit_index = self.log.commit_index
        self._was_member = self._id in self.log.configurations.at(self.log.commit_index)
        self._handlers: Mapping[type[Message], Callable[..., None]] = {
            VoteReply: self._on_vote_reply,
            AppendRequest: self._on_append,
            HeartbeatRequest: self._on_heartbeat,
            SnapshotChunk: self._on_snapshot_chunk,
            AppendReply: self._on_follower_reply,
            HeartbeatReply: self._on_follower_reply,
            SnapshotReply: self._on_follower_reply,
            TimeoutNow: self._on_timeout_now,
        }

    # -- facts for the driver

    @property
    def configuration(self) -> Configuration:
        """The configuration in force: the newest appended one, committed or not."""
        return self.log.configuration

    @property
    def progress(self) -> Mapping[str, Progress]:
        """The leader's view of its followers; empty elsewhere."""
        return self._leader.progress if self._leader else {}

    @property
    def transfer_target(self) -> str | None:
        return self._leader.transfer.to if self._leader and self._leader.transfer else None

    def saving_s(self, now: float) -> float:
        """The duration of the save under way, in seconds; 0 if there is none."""
        return 0.0 if self._persisting is None else now - self._persisting_since

    def is_save_late(self, now: float) -> bool:
        """Return whether the save under way takes so long that the disk counts as hanging."""
        return self.saving_s(now) > self._config.save_timeout_ms / 1000

    def is_active(self, member_id: str, now: float) -> bool:
        """Return whether this leader has heard from the member within check-quorum."""
        return self._leader is not None and self._leader.is_active(member_id, now)

    def is_member(self, member_id: str) -> bool:
        """Return whether the newest or the committed configuration has this member (a leader that
        is being removed leads until that is committed), or this leader still serves it to tell it
        of its removal.
        """
        known = member_id == self.leader_id or member_id in self.progress
        return known or self.log.is_configured(member_id)

    def listens_to(self, sender: str, now: float) -> bool:
        """Return whether messages of this sender count; the driver ignores others."""
        return self.is_member(sender) or self.listens_to_strangers(now)

    def listens_to_strangers(self, now: float) -> bool:
        """Return whether messages of senders outside this member's configuration count.

        The configuration may be empty. Or it may be old: its members may have left while this one
        was away (dissertation, 4.2.2), so that it does not know the present leader. Then this
        member has no leader; a member with a leader ignores strangers.
        """
        if not self.configuration.members:
            return True
        quiet_s = now - self._had_leader_at
        return self._leader is None and quiet_s > self._config.leaderless_ms / 1000

    def quorum_contact_at(self, now: float) -> float | None:
        """Return the sending time of the newest round that a quorum has answered.

        None for a follower, and before the first such round. A sole voter is its own quorum.
        """
        if self._leader is None:
            return None
        if set(self.configuration.voters) == {self._id}:
            return now
        return self._leader.quorum_contact_at

    # -- inputs

    def tick(self, now: float) -> None:
        """Advance the time. Call it several times per heartbeat interval."""
        self._step_down_if_unfit(now)
        if self._leader is not None:
            self._had_leader_at = now
            given_up = self._leader.tick(now)
            if given_up is not None:
                self._events.append(TransferGivenUp(to=given_up))
        elif self._running.at(now) >= self._election_due_at:
            if self._may_campaign() and not self.is_save_late(now):
                self._campaign(now, pre_vote=True)
            else:
                self._restart_election_timer(now)

    def tick_due_at(self, now: float) -> float:
        """Return when a tick has work next, unless a message comes before. Members that count
        silence need ticks more often: within ``step_ms_max``.
        """
        if self._leader is not None:
            return self._leader.tick_due_at
        return now + max(0.0, self._election_due_at - self._running.at(now))

    def step(self, message: Message, now: float) -> None:
        """Handle one message. Late, duplicate and foreign messages do no harm."""
        self._step_down_if_unfit(now)
        if message.to != self._id or message.sender == self._id:
            return
        if message.term - self.term > TERM_JUMP_MAX:
            return  # such a vote request would use up most of all terms
        if isinstance(message, HeartbeatRequest) and self._is_strangers_commit(message):
            return
        if isinstance(message, VoteRequest):
            self._on_vote_request(message, now)
        else:
            from_leader = isinstance(message, _FROM_LEADER)
            if message.term > self.term:
                self._follow(message.term, message.sender if from_leader else None, now)
            if message.term == self.term or isinstance(message, VoteReply):
                self._handlers[type(message)](message, now)
            elif from_leader:
                self._tell_term(message.sender)

    def _is_strangers_commit(self, request: HeartbeatRequest) -> bool:
        """Return whether a sender that may be no member claims a commit index beyond this log. From
        a member that means that this one has lost entries, and it stops.
        """
        beyond = request.commit_index > self.log.last_index
        return beyond and not self.log.is_configured(request.sender)

    def propose(self, command: bytes, now: float) -> LogPosition | Refusal:
        """Append a command; return its position in the log, or the refusal."""
        leader = self._leader_in_touch(now)
        return leader.propose(command) if leader else Refusal.NOT_LEADER

    def read_index(self, context: object, now: float) -> Refusal | None:
        """Ask for a linearizable read; `context` comes back in a Ready once it may be answered.

        If leadership ends first, it never comes back.
        """
        leader = self._leader_in_touch(now)
        return leader.read_index(context) if leader else Refusal.NOT_LEADER

    def transfer_leadership(self, to: str | None, now: float) -> str | Refusal:
        """Begin to transfer leadership to a voter (None: the most advanced one); return its id."""
        leader = self._leader_in_touch(now)
        return leader.begin_transfer(to, now) if leader else Refusal.NOT_LEADER

    def add_learner(self, member_id: str, address: str, now: float) -> LogPosition | Refusal:
        leader = self._leader_in_touch(now)
        return leader.add_learner(member_id, address, now) if leader else Refusal.NOT_LEADER

    def change_own_address(self, address: str, now: float) -> LogPosition | Refusal:
        """Change the address of the only member of the group."""
        leader = self._leader_in_touch(now)
        return leader.change_own_address(address, now) if leader else Refusal.NOT_LEADER

    def promote(self, member_id: str, now: float) -> LogPosition | Refusal:
        """Make a caught-up learner a voter."""
        leader = self._leader_in_touch(now)
        return leader.promote(member_id, now) if leader else Refusal.NOT_LEADER

    def remove_member(self, member_id: str, now: float) -> LogPosition | Refusal:
        leader = self._leader_in_touch(now)
        return leader.remove(member_id, now) if leader else Refusal.NOT_LEADER

    def compact(self, index: int, state: bytes) -> None:
        """Replace the log up to `index` (applied) by the state machine's state there."""
        snapshot = self.log.compact(index, state, self._config.retained_entries_max)
        self._snapshot_write = SnapshotWrite(snapshot=snapshot, base=self.log.base, installed=False)

    # -- roles

    def _restart_election_timer(self, now: float) -> None:
        """Choose the time of the next campaign. After elections without a winner the range is
        wider: on slow members a vote may take longer than the timeout, and simultaneous campaigns
        would repeat.
        """
        wider = min(1 << max(0, self._campaigns - 2), _WIDER_MAX)
        config, running = self._config, self._running.at(now)
        spread_ms = wider * config.election_timeout_max_ms - config.election_timeout_min_ms
        least_s = self._leader_silence_s(running)
        self._election_due_at = running + least_s + self._rng.uniform(0, spread_ms) / 1000

    def _leader_silence_s(self, running: float) -> float:
        """How long a leader must be silent to count as gone, in seconds."""
        return self._patience.least_s(self._config.election_timeout_min_ms / 1000, running)

    def _follow(self, term: int, leader_id: str | None, now: float) -> None:
        if term > self.term:
            self.term, self._vote = term, None
            # An acknowledgement of the old term must not leave any more: by then a leader of the
            # new term may have replaced the acknowledged entries.
            self._messages[:] = [m for m in self._messages if m.term >= term]
            self._messages_after_entries.clear()
        self.role = Role.FOLLOWER
        self.leader_id = leader_id
        self._leader = None
        self._votes = {}
        self._restart_election_timer(now)

    def _step_down_if_unfit(self, now: float) -> None:
        leader = self._leader
        if leader is None:
            return
        hangs = self.is_save_late(now) and leader.can_be_spared(now)
        if leader.is_sole_voter:
            self._quorum_heard_at = self._running.at(now)  # gives a second voter time to answer
        running = self._running.at(now)
        step_down_s = self._patience.least_s(self._config.step_down_s, running)
        if hangs or running - self._quorum_heard_at > step_down_s:
            self._follow(self.term, None, now)

    def _leader_in_touch(self, now: float) -> Leader | None:
        """Return the leader's part if this member leads and a quorum has answered it recently. A
        leader that was paused stays leader, but accepts no input before a quorum's answer.
        """
        self._step_down_if_unfit(now)
        leader = self._leader
        return leader if leader is not None and leader.has_quorum_contact(now) else None

    def _may_campaign(self) -> bool:
        """Return whether this member is a voter. A voter whose removal is not known to be committed
        counts, since no other member may have the removal's entry (dissertation, 4.2.2).
        """
        committed = self.log.configurations.at(self.log.commit_index)
        return self._id in self.configuration.voters or self._id in committed.voters

    def _campaign(self, now: float, *, pre_vote: bool, transfer: bool = False) -> None:
        """Ask for votes, or first for pre-votes (dissertation, 9.6)."""
        self.role = Role.PRE_CANDIDATE if pre_vote else Role.CANDIDATE
        self.leader_id = None
        self._campaigns += pre_vote
        self._restart_election_timer(now)
        if not pre_vote:
            self.term, self._vote = self.term + 1, self._id
        self._votes = {self._id: True}
        last = self.log.last_position
        for member_id in self.configuration.voters:
            if member_id != self._id:
                self._messages.append(
                    VoteRequest(
                        term=self.term + 1 if pre_vote else self.term,
                        sender=self._id,
                        to=member_id,
                        last_index=last.index,
                        last_term=last.term,
                        pre_vote=pre_vote,
                        transfer=transfer,
                    )
                )
        self._count_votes(now)

    def _count_votes(self, now: float) -> None:
        voters = self.configuration.voters
        granted = sum(self._votes.get(member_id, False) for member_id in voters)
        refused = sum(not self._votes.get(member_id, True) for member_id in voters)
        if granted >= self.configuration.quorum:
            if self.role is Role.PRE_CANDIDATE:
                self._campaign(now, pre_vote=False)
            else:
                self._lead(now)
        elif refused >= self.configuration.quorum:
            self._follow(self.term, None, now)

    def _lead(self, now: float) -> None:
        self.role = Role.LEADER
        self.leader_id = self._id
        self._votes = {}
        self._campaigns = 0
        self._quorum_heard_at = self._running.at(now)
        self._leader = Leader(
            config=self._config, term=self.term, log=self.log, outbox=self._messages, now=now
        )
        self._leader.tick(now)

    # -- votes

    def _hears_leader(self, now: float) -> bool:
        """Return whether a leader is at work, as far as this member knows (leader stickiness)."""
        if self._leader is not None:
            return True
        running = self._running.at(now)
        silent_from = self._heard_leader_at + self._leader_silence_s(running)
        return self.leader_id is not None and running < silent_from

    def _on_vote_request(self, request: VoteRequest, now: float) -> None:
        """Grant at most one vote per term, to a log at least as good as this one.

        A learner answers as well: it may have been promoted without knowing it yet. The candidate's
        configuration decides whether its vote counts.
        """
        granted = False
        if request.transfer or not self._hears_leader(now):
            if request.term > self.term and not request.pre_vote:
                self._follow(request.term, None, now)
            last = self.log.last_position
            up_to_date = (request.last_term, request.last_index) >= (last.term, last.index)
            if request.pre_vote:
                granted = up_to_date and request.term > self.term
            else:
                may_vote = request.term == self.term and self._vote in (None, request.sender)
                granted = up_to_date and may_vote
            if granted and not request.pre_vote:
                self._vote = request.sender
                self._restart_election_timer(now)
        self._messages.append(
            VoteReply(
                term=self.term,
                sender=self._id,
                to=request.sender,
                request_term=request.term,
                pre_vote=request.pre_vote,
                granted=granted,
            )
        )

    def _on_vote_reply(self, reply: VoteReply, now: float) -> None:
        role, term = (
            (Role.PRE_CANDIDATE, self.term + 1) if reply.pre_vote else (Role.CANDIDATE, self.term)
        )
        if self.role is role and reply.request_term == term:
            self._votes[reply.sender] = reply.granted
            self._count_votes(now)

    def _on_timeout_now(self, message: TimeoutNow, now: float) -> None:
        is_voter = self._id in self.configuration.voters
        if self.role is Role.FOLLOWER and is_voter and not self.is_save_late(now):
            self._campaign(now, pre_vote=False, transfer=True)

    # -- following

    def _hear_leader(self, message: LeaderMessage, now: float) -> None:
        if self._leader is not None:
            raise InvariantError(
                f"two leaders in term {self.term}: {self._id} and {message.sender}"
            )
        if self.role is not Role.FOLLOWER or self.leader_id != message.sender:
            self._follow(self.term, message.sender, now)
        running, leader = self._running.at(now), (self.term, message.sender)
        if self._heard == leader:  # even if this member had counted it as gone
            self._patience.ended(running - self._heard_leader_at, running)
        self._heard, self._heard_leader_at = leader, running
        self._had_leader_at = now
        self._campaigns = 0
        self._restart_election_timer(now)

    def _tell_term(self, sender: str) -> None:
        """Answer a leader of an old term, so that it learns the newer term."""
        self._messages.append(
            HeartbeatReply(term=self.term, sender=self._id, to=sender, round_id=0)
        )

    def _on_append(self, request: AppendRequest, now: float) -> None:
        self._hear_leader(request, now)
        reply = accept_append(self.log, request, self.term)
        self._answer(reply, reply.match_index)

    def _on_heartbeat(self, request: HeartbeatRequest, now: float) -> None:
        self._hear_leader(request, now)
        self.log.commit_to(request.commit_index)
        self._answer(
            HeartbeatReply(
                term=self.term, sender=self._id, to=request.sender, round_id=request.round_id
            ),
            0,
        )

    def _on_snapshot_chunk(self, chunk: SnapshotChunk, now: float) -> None:
        self._hear_leader(chunk, now)
        reply, snapshot = self._assembly.accept(self.log, chunk, self.term)
        if snapshot is not None:
            self._install(snapshot)
        self._answer(reply, reply.match_index)

    def _install(self, snapshot: Snapshot) -> None:
        self.log.install(snapshot)
        self._snapshot_write = SnapshotWrite(snapshot=snapshot, base=self.log.base, installed=True)

    def _answer(self, reply: FollowerReply, match_index: int) -> None:
        """Send a reply that claims durability up to `match_index`, as soon as that is true."""
        durable = match_index <= self.log.persisted_index
        (self._messages if durable else self._messages_after_entries).append(reply)

    # -- leading

    def _on_follower_reply(self, reply: FollowerReply, now: float) -> None:
        if self._leader is not None and self._leader.on_reply(reply, now):
            running = self._running.at(now)
            self._patience.ended(running - self._quorum_heard_at, running)
            self._quorum_heard_at = running

    def _note_commit(self, now: float) -> None:
        """Act on a committed configuration that is durable here: forget members that it leaves
        out.
        """
        commit_index = min(self.log.commit_index, self.log.persisted_index)
        if commit_index <= self._noted_commit_index:
            return
        self._noted_commit_index = commit_index
        committed = self.log.configurations.at(commit_index)
        if self._id in committed:
            self._was_member = True
        elif self._was_member:
            self._was_member = False
            self._events.append(RemovedFromGroup(index=commit_index))
        if self._leader is not None and self._id not in committed.voters:
            self._leader.flush(now)
            self._leader.nominate_successor()
            self._follow(self.term, None, now)

    # -- output

    def ready(self, now: float) -> Ready | None:
        """Return all output that is due, or None; see `Ready` for its handling.

        While one output is being persisted, further outputs have only parts that need no disk. The
        other parts gather and go with the next output, in one transaction.
        """
        if self._leader is not None:
            self._leader.flush(now)
        self._note_commit(now)
        hard_state = HardState(term=self.term, vote=self._vote)
        is_durable = hard_state == self._durable_hard_state
        messages = _take(self._messages) if is_durable else ()
        later: tuple[Message, ...] = ()
        snapshot_write: SnapshotWrite | None = None
        entries: tuple[Entry, ...] = ()
        if self._persisting is None:
            if not is_durable:
                later = _take(self._messages)
            later += _take(self._messages_after_entries)
            snapshot_write, self._snapshot_write = self._snapshot_write, None
            if snapshot_write is not None or self.log.has_unpersisted:
                entries = self.log.hand_out_unpersisted()
        ready = Ready(
            hard_state=None if is_durable or self._persisting else hard_state,
            snapshot_write=snapshot_write,
            entries=entries,
            messages=messages,
            messages_after_persist=later,
            committed=self.log.take_committed(self._config.apply_entries_max),
            finished_reads=self._leader.take_finished_reads() if self._leader else (),
            events=self._take_events(),
            configuration=self._take_configuration(),
        )
        if ready.needs_persist:
            self._persisting, self._persisting_since = ready, now
        return None if ready == _NOTHING else ready

    def advance(self, ready: Ready) -> None:
        """Note that `ready` is durable: messages that rest on it may leave."""
        if self._persisting is not ready:
            return
        self._persisting = None
        if ready.hard_state is not None:
            self._durable_hard_state = ready.hard_state
        self.log.confirm_persisted()
        if self._leader is not None:
            self._leader.advance_commit()

    def _take_events(self) -> tuple[Event, ...]:
        role = RoleChange(role=self.role, term=self.term, leader_id=self.leader_id)
        if role != self._reported_role:
            self._reported_role = role
            self._events.append(role)
        return _take(self._events)

    def _take_configuration(self) -> Configuration | None:
        current = self.log.configuration
        if current is self._reported_configuration:
            return None
        self._reported_configuration = current
        return current


_Item = TypeVar("_Item")


def _take(items: list[_Item]) -> tuple[_Item, ...]:
    taken = tuple(items)
    items.clear()
    return taken


_NOTHING = Ready(
    hard_state=None,
    snapshot_write=None,
    entries=(),
    messages=(),
    messages_after_persist=(),
    committed=(),
    finished_reads=(),
    events=(),
    configuration=None,
)
