"""Checkers of what must hold in a Raft group, after every event of a simulation.

The checkers see members from outside (their core's public facts, their disks, the messages that
leave and arrive) and keep their own account of what happened; they share nothing with the workload.
Names and numbers are those of the Raft paper, figure 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from koinon_coordinator.core.raft import (
    AppendReply,
    Entry,
    EntryKind,
    HardState,
    Message,
    RaftCore,
    Role,
    SnapshotReply,
    VoteReply,
    VoteRequest,
)

from .memory import MemoryRaftStorage

_ACKNOWLEDGEMENTS = (AppendReply, SnapshotReply)


class ViolationError(AssertionError):
    """A property does not hold."""


class Disk(MemoryRaftStorage):
    """A member's storage, open to a look from outside."""

    @property
    def hard_state(self) -> HardState:
        return self._hard_state

    @property
    def last_index(self) -> int:
        return max(self._snapshot.index, self._base.index + len(self._entries))

    def holds(self, index: int, term: int | None) -> bool:
        entry = self._entries.get(index)
        return self._snapshot.index >= index or (entry is not None and entry.term == term)


class Observed(Protocol):
    """A member as the checkers see it."""

    @property
    def member_id(self) -> str: ...
    @property
    def core(self) -> RaftCore | None: ...


class GroupChecker:
    """The checker of a group: it keeps all that is known to be true of it so far."""

    def __init__(self, disks: Mapping[str, Disk]) -> None:
        self._disks = disks
        self._leader_of_term: dict[int, str] = {}
        self._entries: dict[tuple[int, int], tuple[int, EntryKind, bytes]] = {}
        self._logs: dict[str, dict[int, int]] = {}  # index -> term, as last seen in each member
        self._commits: dict[str, int] = {}
        self._terms: dict[str, int] = {}
        self.chosen: dict[int, Entry] = {}
        self._chosen_in_term: dict[int, int] = {}
        self._votes: dict[tuple[str, int], str] = {}
        self._handled: dict[tuple[str, int, str], float] = {}
        self.linearized_index = 0

    # -- after every event

    def after_event(self, member: Observed, now: float) -> None:
        core = member.core
        if core is None:
            return
        if core.term < self._terms.get(member.member_id, 0):
            raise ViolationError(f"{member.member_id}: the term went back to {core.term}")
        self._terms[member.member_id] = core.term
        self._check_log(member.member_id, core)
        self._check_commit(member.member_id, core)
        if core.role is Role.LEADER:
            self._check_leader(member.member_id, core, now)

    def on_restart(self, member_id: str) -> None:
        """Note a restart: what was not durable may be gone; what was durable may not."""
        self._logs.pop(member_id, None)
        self._commits.pop(member_id, None)
        self._terms[member_id] = self._disks[member_id].hard_state.term

    def _check_log(self, member_id: str, core: RaftCore) -> None:
        """Log Matching: an index and a term name one entry, and one predecessor."""
        seen = self._logs.setdefault(member_id, {})
        log = core.log
        index = log.last_index
        while index > log.base.index:
            (entry,) = log.slice(index, index)
            if seen.get(index) == entry.term:
                break
            previous_term = log.term_at(index - 1)
            assert previous_term is not None
            fact = (previous_term, entry.kind, entry.data)
            known = self._entries.setdefault((index, entry.term), fact)
            if known != fact:
                raise ViolationError(
                    f"log matching: {member_id} has {fact} at {index} in term {entry.term}, "
                    f"another had {known}"
                )
            seen[index] = entry.term
            index -= 1

    def _check_commit(self, member_id: str, core: RaftCore) -> None:
        """State Machine Safety, and that what a leader counts is durable at a quorum."""
        before = self._commits.get(member_id, core.log.snapshot.index)
        commit_index = core.log.commit_index
        if commit_index < before:
            raise ViolationError(f"{member_id}: commit went back from {before} to {commit_index}")
        if commit_index == before:
            return
        self._commits[member_id] = commit_index
        for index in range(max(before, core.log.base.index) + 1, commit_index + 1):
            (entry,) = core.log.slice(index, index)
            known = self.chosen.setdefault(index, entry)
            if known != entry:
                raise ViolationError(
                    f"state machine safety: {member_id} committed {entry}, another {known}"
                )
            self._chosen_in_term.setdefault(index, core.term)
        if core.role is Role.LEADER:
            self._check_durable_at_quorum(member_id, core, commit_index)

    def _check_durable_at_quorum(self, leader_id: str, core: RaftCore, index: int) -> None:
        term = core.log.term_at(index)
        holders = [v for v in core.configuration.voters if self._disks[v].holds(index, term)]
        if len(holders) < core.configuration.quorum:
            raise ViolationError(
                f"{leader_id} counts {index} as committed; durable only at {holders} of "
                f"{sorted(core.configuration.voters)}"
            )

    def _check_leader(self, member_id: str, core: RaftCore, now: float) -> None:
        known = self._leader_of_term.get(core.term)
        if known is None:
            self._leader_of_term[core.term] = member_id
            self._check_completeness(member_id, core)
        elif known != member_id:
            raise ViolationError(f"election safety: {known} and {member_id} lead {core.term}")
        self._check_contact(member_id, core, now)

    def _check_completeness(self, member_id: str, core: RaftCore) -> None:
        """Leader Completeness: what was committed in an earlier term is in this leader's log."""
        for index, entry in self.chosen.items():
            if self._chosen_in_term[index] >= core.term or index <= core.log.base.index:
                continue
            if core.log.term_at(index) != entry.term:
                raise ViolationError(
                    f"leader completeness: {member_id} leads {core.term} without {entry}"
                )

    # -- contact

    def on_handled(self, message: Message, sent_at: float) -> None:
        """A member that runs has taken in `message`."""
        key = (message.sender, message.term, message.to)
        self._handled[key] = max(self._handled.get(key, sent_at), sent_at)

    def _check_contact(self, member_id: str, core: RaftCore, now: float) -> None:
        """A leader never claims to have reached a quorum later than it can have."""
        claimed = core.quorum_contact_at(now)
        if claimed is None:
            return
        voters = core.configuration.voters
        reached = [
            now if voter == member_id else self._handled.get((member_id, core.term, voter), -1.0)
            for voter in voters
        ]
        possible = sorted(reached, reverse=True)[core.configuration.quorum - 1]
        previous_quorum = sorted(reached, reverse=True)[: max(1, core.configuration.quorum - 1)]
        # Just after a voter was added or removed, a claim may rest on the quorum before.
        floor = previous_quorum[-1] if core.log.has_uncommitted_configuration else possible
        if claimed > max(possible, floor):
            raise ViolationError(
                f"{member_id} claims contact with a quorum at {claimed}, possible is {possible}"
            )

    # -- messages

    def on_sent(self, messages: Iterable[Message]) -> None:
        """Check that no message leaves that rests on what is not durable."""
        for message in messages:
            disk = self._disks[message.sender]
            is_question = isinstance(message, VoteRequest) and message.pre_vote
            if message.term > disk.hard_state.term and not is_question:
                raise ViolationError(f"sent before its term was durable: {message}")
            if isinstance(message, VoteReply):
                self._check_vote(message, disk.hard_state)
            elif isinstance(message, _ACKNOWLEDGEMENTS) and disk.last_index < message.match_index:
                raise ViolationError(f"acknowledged before it was durable: {message}")

    def _check_vote(self, reply: VoteReply, stored: HardState) -> None:
        if reply.pre_vote or not reply.granted:
            return
        if stored.term == reply.term and stored.vote != reply.to:
            raise ViolationError(f"voted before the vote was durable: {reply}")
        known = self._votes.setdefault((reply.sender, reply.request_term), reply.to)
        if known != reply.to:
            raise ViolationError(f"two votes in one term: {reply}, and one for {known}")

    # -- clients

    def on_acknowledged(self, index: int) -> None:
        self.linearized_index = max(self.linearized_index, index)

    def on_read(self, member_id: str, index: int, applied_index: int, floor: int) -> None:
        """A read must see all that was acknowledged, or read, before it began."""
        if min(index, applied_index) < floor:
            raise ViolationError(
                f"stale read at {member_id}: index {index}, applied {applied_index}, "
                f"but {floor} was acknowledged before it began"
            )
        self.linearized_index = max(self.linearized_index, index)

    def on_restored(self, member_id: str, index: int, commands: list[bytes]) -> None:
        """A state machine restored at `index` is what applying the chosen commands gives."""
        expected = [
            self.chosen[i].data
            for i in range(1, index + 1)
            if i in self.chosen and self.chosen[i].kind is EntryKind.COMMAND
        ]
        if commands != expected:
            raise ViolationError(
                f"{member_id}: restored at {index} to {commands}, expected {expected}"
            )
