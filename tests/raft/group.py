"""A group of cores moved by hand: the test says who ticks, what arrives and what is saved.

Time is one number for all. Saves happen at once unless a member is told to hold them. Messages
wait in `network` until the test lets them through.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

from koinon_coordinator.core.raft import (
    Configuration,
    Entry,
    EntryKind,
    Event,
    HardState,
    LogPosition,
    Message,
    RaftCore,
    RaftCoreConfig,
    Ready,
    Refusal,
    RestoredState,
    Role,
    Snapshot,
    VoteReply,
    VoteRequest,
)

from .checkers import Disk

QUIET_S = 0.7  # longer than any election timeout
RUNS_FREELY_MS = 60_000  # all time that a schedule lets pass is time in which the members ran


def addresses(members: Iterable[str]) -> dict[str, str]:
    return {member_id: f"host-{member_id}:1" for member_id in members}


def entries_of(terms: Iterable[int], first: int = 1) -> tuple[Entry, ...]:
    """A log with these terms; what an entry says follows from its index and term."""
    return tuple(
        Entry(index, term, EntryKind.COMMAND, b"%d in %d" % (index, term))
        for index, term in enumerate(terms, first)
    )


class Group:
    """Cores, their disks, the messages between them, and what they have put out so far."""

    def __init__(
        self,
        voters: str = "abc",
        *,
        learners: str = "",
        logs: dict[str, list[int]] | None = None,
        terms: dict[str, int] | None = None,
        **settings: Any,
    ) -> None:
        """`logs`: the terms of the entries that a member starts with; `terms`: its own term."""
        self.now = 100.0
        self.settings = settings
        self.network: list[Message] = []
        self.disks: dict[str, Disk] = {}
        self.cores: dict[str, RaftCore] = {}
        self.applied: dict[str, list[Entry]] = {}
        self.reads: list[tuple[str, int, object]] = []
        self.events: dict[str, list[Event]] = {}
        self.held: dict[str, list[Ready]] = {}
        configuration = Configuration(voters=addresses(voters), learners=addresses(learners))
        for member_id in configuration.members:
            self.disks[member_id] = Disk(configuration)
            self.disks[member_id].save(
                hard_state=HardState(term=(terms or {}).get(member_id, 0)),
                snapshot_write=None,
                entries=entries_of((logs or {}).get(member_id, [])),
            )
            self.boot(member_id)

    def add_process(self, member_id: str) -> None:
        """A member that does not know its group yet."""
        self.disks[member_id] = Disk(Configuration())
        self.boot(member_id)

    def boot(self, member_id: str) -> RaftCore:
        """Start, or start again with what is on disk."""
        core = RaftCore(
            RaftCoreConfig(member_id=member_id, **{"step_ms_max": RUNS_FREELY_MS, **self.settings}),
            self.disks[member_id].load(),
            random.Random(member_id),
            self.now,
        )
        self.cores[member_id] = core
        self.applied[member_id] = []
        self.events[member_id] = []
        self.held.pop(member_id, None)
        return core

    def __getitem__(self, member_id: str) -> RaftCore:
        return self.cores[member_id]

    def role(self, member_id: str) -> Role:
        return self.cores[member_id].role

    # -- output

    def take(self, member_id: str) -> None:
        """Carry out what a member puts out, as its driver would."""
        core = self.cores[member_id]
        while (ready := core.ready(self.now)) is not None:
            self.network += ready.messages
            self.applied[member_id] += ready.committed
            self.reads += [(member_id, index, context) for index, context in ready.finished_reads]
            self.events[member_id] += ready.events
            if not ready.needs_persist:
                self.network += ready.messages_after_persist
            elif member_id in self.held:
                self.held[member_id].append(ready)
            else:
                self._save(member_id, ready)

    def _save(self, member_id: str, ready: Ready) -> None:
        self.disks[member_id].save(
            hard_state=ready.hard_state,
            snapshot_write=ready.snapshot_write,
            entries=ready.entries,
        )
        self.network += ready.messages_after_persist
        self.cores[member_id].advance(ready)

    def hold_saves(self, member_id: str) -> None:
        """Save nothing that this member wants saved, from now on."""
        self.held[member_id] = []

    def release_saves(self, member_id: str) -> None:
        for ready in self.held.pop(member_id):
            self._save(member_id, ready)
        self.take(member_id)

    # -- input

    def tick(self, *member_ids: str, after_s: float = 0.0) -> None:
        self.now += after_s
        for member_id in member_ids:
            self.cores[member_id].tick(self.now)
            self.take(member_id)

    def deliver(self, message: Message) -> None:
        if message in self.network:
            self.network.remove(message)
        if message.to in self.cores:
            self.cores[message.to].step(message, self.now)
            self.take(message.to)

    def deliver_to(self, member_id: str) -> None:
        """Deliver what waits for this member; all else waits on."""
        for message in self.waiting(object, to=member_id):
            self.deliver(message)

    def pump(self, allowed: Callable[[Message], bool] = lambda _: True) -> None:
        """Deliver, in order, until nothing is left; what is not allowed is lost."""
        while self.network:
            message = self.network.pop(0)
            if allowed(message):
                self.deliver(message)

    def pump_between(self, members: str) -> None:
        self.pump(lambda m: m.sender in members and m.to in members)

    def waiting(self, kind: type[Any], *, to: str = "", sender: str = "") -> list[Any]:
        """Messages of a kind that have been sent and not been delivered or lost."""
        return [
            m
            for m in self.network
            if isinstance(m, kind) and m.to.startswith(to) and m.sender.startswith(sender)
        ]

    # -- shorthands

    def elect(self, member_id: str, *, among: str = "") -> RaftCore:
        """Let a member win an election, after a silence, with the votes of `among`."""
        self.tick(member_id, after_s=QUIET_S)
        if among:
            self.pump_between(among)
        else:
            self.pump()
        core = self.cores[member_id]
        assert core.role is Role.LEADER
        return core

    def elect_running(self, member_id: str) -> RaftCore:
        """The same where only so much time counts at once: tick by tick, with a round answered."""
        core = self.cores[member_id]
        while core.role is not Role.LEADER:
            self.tick(member_id, after_s=0.015)
            self.pump()
        self.heartbeat(member_id)
        self.pump()
        return core

    def propose(self, member_id: str, command: bytes = b"command") -> LogPosition:
        outcome = self.cores[member_id].propose(command, self.now)
        assert not isinstance(outcome, Refusal), outcome
        self.take(member_id)
        return outcome

    def heartbeat(self, member_id: str) -> None:
        """Let a leader send a round of heartbeats."""
        self.tick(member_id, after_s=0.08)

    def compact(self, member_id: str, state: bytes = b"state") -> None:
        core = self.cores[member_id]
        core.compact(core.log.applied_index, state)
        self.take(member_id)


def restored(
    snapshot: Snapshot, entries: tuple[Entry, ...] = (), hard_state: HardState | None = None
) -> RestoredState:
    return RestoredState(
        hard_state=hard_state or HardState(),
        snapshot=snapshot,
        base=LogPosition(snapshot.index, snapshot.term),
        entries=entries,
    )


def vote_request(term: int, sender: str, to: str, last: tuple[int, int] = (0, 0)) -> VoteRequest:
    """`last` is (term, index)."""
    return VoteRequest(
        term=term,
        sender=sender,
        to=to,
        last_term=last[0],
        last_index=last[1],
        pre_vote=False,
        transfer=False,
    )


def granted(group: Group, request: VoteRequest) -> bool:
    group.deliver(request)
    replies = group.waiting(VoteReply, to=request.sender, sender=request.to)
    group.network.clear()
    return bool(replies) and replies[-1].granted
