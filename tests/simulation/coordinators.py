"""Coordinators over a simulated Raft group: the real ``Leadership``, and what Raft promises it.

The group is one log. A leader's proposal is committed after a random time, in order, while the
leader reaches a quorum; when its place is lost, a prefix of what it had proposed may still be
committed by the next leader, and the proposers never hear of it. A deposed leader goes on to
believe in its place until it hears of a higher term, or its check-quorum time is over. What it
says of its contact with a quorum is the time at which it sent the newest round that was answered.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from koinon_coordinator.config import BootstrapConfig, TimingConfig
from koinon_coordinator.core.cluster.commands import AccessCommand, Command, PartitionChange
from koinon_coordinator.core.decide.registrations import Sender
from koinon_coordinator.leader.change_barrier import ChangeBarrier
from koinon_coordinator.leader.context import LeaderContext
from koinon_coordinator.leader.leadership import Leadership
from koinon_coordinator.leader.membership import NodeReport
from koinon_coordinator.state_machine import ReplicatedState
from koinon_coordinator.wire.state_codec import command_from_bytes
from koinon_proto.contract.access import AccessState
from koinon_proto.contract.cluster_errors import NotLeaderError
from koinon_proto.contract.errors import UnknownFateError
from koinon_proto.contract.table import Table, TableUpdate
from tests.simulation.loop import Process, VirtualLoop
from tests.simulation.network import Network

ROUND_S = 0.075
WATCH_S = 0.05
ELECTION_S = (0.3, 0.6)
PUSH_S_MAX = 1.0


@dataclass(eq=False)
class _Proposal:
    term: int
    command: bytes
    fate: asyncio.Future[object]
    due_at: float
    index: int = 0  # once it is committed


class Member:
    """One coordinator: a process, and all that Raft keeps durable for it."""

    def __init__(self, group: RaftGroup, name: str) -> None:
        self.group = group
        self.name = name
        self.machine = group.network.add(name)
        self.machine.services = {
            "register": self._register,
            "heartbeat": self._heartbeat,
            "leave": self._leave,
            "alter": self._alter,
            "table": self._table,
            "watch": self._watch_table,
            "admin": self._admin,
            "loads": self._loads,
            "access": self._change_access,
            "access_state": self._access_state,
        }
        self.offset_s = group.rng.uniform(0, 1000)
        self.process: Process
        self.replicated: ReplicatedState
        self.applied = 0
        self.term = 0  # that it knows of
        self.leadership: Leadership | None = None
        self.proposals: list[_Proposal] = []
        self._contact_at: float | None = None
        self._running: asyncio.Task[None] | None = None
        self._snapshot: tuple[int, bytes] | None = None
        self.boot()

    # --- life --------------------------------------------------------------------------------

    def boot(self) -> None:
        self.process = Process(self.group.loop, self.name)
        self.machine.process = self.process
        self.replicated = ReplicatedState()
        self.applied = 0
        if self._snapshot is not None:
            self.applied, image = self._snapshot
            self.replicated.restore(image)
        self.leadership, self._running = None, None
        self.proposals = []
        self._contact_at = None
        self.process.call_soon(self.apply)
        self.process.spawn(self._watch())

    def kill(self) -> None:
        if self.group.leader is self:
            self.group.end_term()
        self.process.kill()
        self.machine.process = None
        if self.group.rng.random() < 0.5:
            self._snapshot = (self.applied, self.replicated.capture()())
        self.group.network.on_killed(self.process)

    def clock(self) -> float:
        return self.group.loop.now + self.offset_s

    async def _watch(self) -> None:
        """Step down when another member leads, or none has answered for too long."""
        while True:
            await asyncio.sleep(WATCH_S * self.group.rng.uniform(0.5, 1.5))
            if self.leadership is None:
                continue
            contact_at = self._contact_at
            lonely = contact_at is None or self.clock() - contact_at > 2 * ELECTION_S[1]
            if lonely or self.group.hears_of_higher_term(self):
                self.step_down()

    def lead(self, term: int) -> None:
        """The term's no-op is committed: apply all before it, then lead."""
        self.step_down()
        self.term = term
        self.apply()
        self._contact_at = self.clock()
        context = LeaderContext(
            number=term,
            group=_Seat(self, term),
            replicated=self.replicated,
            clock=self.clock,
            random=random.Random(self.group.rng.random()),
        )
        self.leadership = Leadership(context, self.group.bootstrap, self.group.timing)
        self._running = asyncio.ensure_future(self.leadership.run())
        self.group.stats["leaders"] += 1
        self.group.trace(f"{self.name} leads the coordinators, term {term}")

    def step_down(self) -> None:
        if self.group.leader is self and self.group.term == self.term:
            self.group.end_term()
        self.leadership = None
        proposals, self.proposals = self.proposals, []
        for proposal in proposals:
            if not proposal.fate.done():
                proposal.fate.set_exception(UnknownFateError(reason="leadership was lost"))
                proposal.fate.exception()  # who proposed it may have been cancelled
        if self._running is not None:
            self._running.cancel()
            self._running = None

    def answered(self, term: int, sent_at: float) -> None:
        """A quorum has answered the round that was sent then."""
        if self.term == term and self.leadership is not None:
            self._contact_at = max(self._contact_at or 0.0, sent_at + self.offset_s)

    def contact_at(self, term: int) -> float | None:
        return self._contact_at if self.term == term and self.leadership is not None else None

    def apply(self) -> None:
        """Apply what is committed; whoever proposed it here hears of it."""
        log = self.group.log
        waiting = {p.index: p for p in self.proposals if p.index}
        while self.applied < len(log):
            self.applied += 1
            result = self.replicated.apply(self.applied, log[self.applied - 1])
            proposal = waiting.get(self.applied)
            if proposal is not None:
                self.proposals.remove(proposal)
                if not proposal.fate.done():
                    proposal.fate.set_result(result)

    # --- services ----------------------------------------------------------------------------

    def led(self) -> Leadership:
        if self.leadership is None:
            raise self.not_leader()
        return self.leadership

    def not_leader(self) -> NotLeaderError:
        leader = self.group.leader
        name = leader.name if leader is not None and self.group.rng.random() < 0.8 else ""
        return NotLeaderError(leader_id=name, leader_address=name, term=self.term)

    def table(self) -> Table | None:
        return self.replicated.state.table()

    def newer(self, version: int) -> TableUpdate | None:
        table = self.table()
        if table is None or not table.bootstrapped or version >= table.table_version:
            return None
        return table.since(version)

    def newer_access(self, version: int) -> AccessState | None:
        state = self.replicated.state.access.state
        return state if state.version > version else None

    async def _register(self, request: Any, cluster_id: str) -> Any:
        leadership = self.led()
        registered = await leadership.members.register(request, cluster_id)
        table = self.table()
        assert table is not None
        return registered, table.cluster, self.newer(0), self.newer_access(0)

    async def _heartbeat(self, sender: Sender, report: NodeReport) -> Any:
        leadership = self.led()
        commands = await leadership.members.heartbeat(sender, report, self.clock())
        access = self.newer_access(report.access_version)
        return commands, self.newer(report.table_version), access, leadership.timing.lease_ms

    async def _leave(self, sender: Sender) -> None:
        await self.led().members.leave(sender)

    async def _alter(self, version: int, sender: Sender, changes: list[PartitionChange]) -> Any:
        rejected = await self.led().members.alter_partitions(sender, changes)
        return rejected, self.newer(version)

    async def _table(self, version: int) -> TableUpdate | None:
        return self.newer(version)

    async def _watch_table(self, version: int) -> TableUpdate | None:
        """Answer at the next change; as one step of WatchTable."""
        with self.replicated.watching() as changed:
            try:
                async with asyncio.timeout(PUSH_S_MAX):
                    while (update := self.newer(version)) is None:
                        await changed.wait()
                        changed.clear()
            except TimeoutError:
                return None
        return update

    async def _loads(self, method: str, *arguments: Any) -> Any:
        staged = {"attempt": 0, "rows": 0, "size_bytes": 0} if method == "touch" else {}
        return await getattr(self.led().loading, method)(*arguments, **staged)

    async def _change_access(self, command: AccessCommand) -> ChangeBarrier:
        return await self.led().access.change(command)

    async def _access_state(self) -> AccessState:
        return self.led().access.state()

    async def _admin(self, work: Callable[[Leadership], Any]) -> Any:
        return await work(self.led())


class _Seat:
    """A leader's access to the group, for one term."""

    def __init__(self, member: Member, term: int) -> None:
        self._member = member
        self._term = term

    def quorum_contact_at(self) -> float | None:
        return self._member.contact_at(self._term)

    async def read_barrier(self) -> int:
        """Wait for a round that was sent after this call and answered by a quorum: by then no
        other member leads, so all that was committed before is in the log here.
        """
        member = self._member
        asked_at = member.clock()
        while (contact_at := self.quorum_contact_at()) is None or contact_at < asked_at:
            if member.term != self._term or member.leadership is None:
                raise member.not_leader()
            await asyncio.sleep(WATCH_S)
        member.apply()
        return member.applied

    async def propose(self, command: bytes) -> object:
        member = self._member
        if member.term != self._term or member.leadership is None:
            raise member.not_leader()
        return await member.group.propose(member, command)


class RaftGroup:
    """See the module's text."""

    def __init__(
        self,
        loop: VirtualLoop,
        rng: random.Random,
        network: Network,
        bootstrap: BootstrapConfig,
        timing: TimingConfig,
        stats: Counter[str],
    ) -> None:
        self.loop = loop
        self.rng = rng
        self.network = network
        self.bootstrap = bootstrap
        self.timing = timing
        self.stats = stats
        self.log: list[bytes] = []
        self.trace: Callable[[str], None] = lambda _: None
        self.on_committed: Callable[[Command], None] = lambda _: None
        self._observer = ReplicatedState()
        self._watched = 0
        self._left_over: list[bytes] = []
        self.term = 0
        self.leader: Member | None = None  # of the newest term
        self.leads = False  # its no-op is committed
        self.heard_at = loop.now
        self._patience_s = 0.1
        self.members = [Member(self, f"c{n}") for n in range(1, 4)]
        loop.call_later(0.0, self._round)

    def newest_state(self) -> ReplicatedState:
        """The state after all that is committed; for checkers."""
        while self._watched < len(self.log):
            self._watched += 1
            self._observer.apply(self._watched, self.log[self._watched - 1])
        return self._observer

    def _append(self, command: bytes) -> int:
        """Commit; return the index."""
        self.log.append(command)
        self.stats["commands"] += 1
        self.newest_state()
        decoded = command_from_bytes(command)
        self.trace(f"committed {len(self.log)}: {_brief(decoded)}")
        self.on_committed(decoded)
        return len(self.log)

    # --- what Raft does ----------------------------------------------------------------------

    def _reachable(self, member: Member) -> list[Member]:
        if not member.process.alive or member.process.paused:
            return []
        return [
            other
            for other in self.members
            if other.process.alive
            and not other.process.paused
            and self.network.connected(member.name, other.name)
        ]

    def _has_quorum(self, member: Member) -> bool:
        return 2 * len(self._reachable(member)) > len(self.members)

    def _round(self) -> None:
        """One round of the leader's heartbeats; an election, if no member has heard one."""
        now, leader = self.loop.now, self.leader
        self.loop.call_later(ROUND_S * self.rng.uniform(0.3, 1.2), self._round)
        if leader is not None and self._has_quorum(leader):
            self.loop.call_later(self.network.delay_s(), self._heard, leader, self.term, now)
            for member in self._reachable(leader):
                if member is not leader:
                    member.process.call_later(self.network.delay_s(), member.apply)
        elif now - self.heard_at > self._patience_s:
            self._elect([m for m in self.members if self._has_quorum(m)])

    def _heard(self, leader: Member, term: int, sent_at: float) -> None:
        """A quorum has the round; its answers are on their way."""
        if self.term == term and self._has_quorum(leader):
            self.heard_at = self.loop.now
            delay_s = self.network.delay_s()
            leader.process.call_later(delay_s, leader.answered, term, sent_at)

    def _elect(self, candidates: list[Member]) -> None:
        if not candidates:
            return
        elected = self.rng.choice(candidates)
        self.end_term()
        self.term += 1
        self.leader, self.leads = elected, False
        self.heard_at = self.loop.now
        self._patience_s = self.rng.uniform(*ELECTION_S)
        delay_s = self.rng.uniform(0.002, 0.05)
        self.loop.call_later(delay_s, self._commit_noop, elected, self.term)

    def end_term(self) -> None:
        """The leader's place is lost; some of what it proposed has reached the next leader."""
        leader, leads = self.leader, self.leads
        self.leader, self.leads = None, False
        if leader is None or not leads:
            return
        open_proposals = [p for p in leader.proposals if not p.index and p.term == self.term]
        for proposal in open_proposals[: self.rng.randrange(len(open_proposals) + 1)]:
            self._left_over.append(proposal.command)
            proposal.term = -1  # its fate will not be known here

    def _commit_noop(self, member: Member, term: int) -> None:
        if self.term != term or not member.process.alive:
            return
        if not self._has_quorum(member):
            self.loop.call_later(0.02, self._commit_noop, member, term)
            return
        for command in self._left_over:
            self._append(command)
            self.stats["commands committed by the next leader"] += 1
        self._left_over.clear()
        self.leads = True
        member.process.call_soon(member.lead, term)

    def transfer(self) -> None:
        """The leader hands its place over."""
        if self.leader is not None:
            others = [m for m in self.members if m is not self.leader and self._has_quorum(m)]
            self._elect(others)

    def hears_of_higher_term(self, member: Member) -> bool:
        leader = self.leader
        return (
            leader is not None
            and self.term > member.term
            and self.network.connected(member.name, leader.name)
        )

    async def propose(self, member: Member, command: bytes) -> object:
        fate: asyncio.Future[object] = self.loop.create_future()
        last = member.proposals[-1].due_at if member.proposals else 0.0
        delay_s = self.rng.uniform(0.5, 3) * self.network.delay_s() + 0.001
        proposal = _Proposal(member.term, command, fate, max(last, self.loop.now + delay_s))
        member.proposals.append(proposal)
        self.loop.call_at(proposal.due_at, self._commit, member, proposal)
        return await fate

    def _commit(self, member: Member, proposal: _Proposal) -> None:
        if proposal.fate.done() or proposal.term != self.term or member is not self.leader:
            return
        if not self._has_quorum(member):
            self.loop.call_later(0.02, self._commit, member, proposal)
            return
        for earlier in member.proposals:
            if not earlier.index and earlier.term == self.term:
                earlier.index = self._append(earlier.command)
            if earlier is proposal:
                break
        member.process.call_soon(member.apply)


def _brief(command: Command) -> str:
    """The command on one line, without what is as it always is."""
    text = str(command)
    return text if len(text) < 400 else text[:400] + "..."
