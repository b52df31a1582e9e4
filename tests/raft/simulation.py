"""A whole Raft group in one thread, driven by one seed through faults, then healed.

    python -m tests.raft.simulation --seeds 0-5000

Virtual time. Messages are dropped, doubled, delayed and so reordered; members are cut off (also
one way only), crash before or after a save takes effect, restart from their disks, are paused
with everything that comes in waiting, compact, catch up by chunked snapshots; members join, are
promoted and removed; leadership is handed over; single ones are starved: they run only now and
then. Then all faults end, and the group must converge and make progress. In some runs all its
members are starved after that, by nothing worse: they must not go on electing. Checkers (see
`checkers`) look on after every event.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from koinon_coordinator.core.raft import (
    Configuration,
    EntryKind,
    Message,
    RaftCore,
    RaftCoreConfig,
    Ready,
    Refusal,
    RemovedFromGroup,
    Role,
    RoleChange,
)

from .checkers import Disk, GroupChecker, ViolationError

TICK_S = 0.04
FAULTS_S = 5.0
HEALED_S_MAX = 15.0
MEMBERS_MAX = 6
RUNS_S = (0.05, 0.2)  # how long a starved member runs, and how long it does not
STARVED_S = (0.1, 0.5)
ALL_STARVED_S = 6.0
ALL_STARVED_SHARE = 0.15  # of runs
LEADERS_WHILE_STARVED_MAX = 1


@dataclass(frozen=True, slots=True)
class Weather:
    """The faults of network and disks, and how frequent they are; drawn per seed."""

    drop: float
    double: float
    slow: float
    fault_interval_s: float
    save_s_max: float

    @classmethod
    def draw(cls, rng: random.Random) -> Weather:
        return cls(
            drop=rng.choice([0.0, 0.02, 0.1]),
            double=rng.choice([0.0, 0.02, 0.1]),
            slow=rng.choice([0.01, 0.05, 0.2]),
            fault_interval_s=rng.choice([0.1, 0.2, 0.4]),
            save_s_max=rng.choice([0.003, 0.02, 0.15]),
        )


@dataclass(slots=True)
class SimulatedMember:
    """A process and its disk; the disk outlives the process."""

    member_id: str
    storage: Disk
    core: RaftCore | None = None
    commands: list[bytes] = field(default_factory=list)
    proposals: dict[int, int] = field(default_factory=dict)  # index -> term
    incarnation: int = 0
    is_paused: bool = False
    is_removed: bool = False
    deferred: list[Callable[[], None]] = field(default_factory=list)


class Simulation:
    """One seed's run."""

    core_class: type[RaftCore] = RaftCore

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.weather = Weather.draw(self.rng)
        self.is_healed = False
        self.blocked: set[tuple[str, str]] = set()
        self.stats: Counter[str] = Counter()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._command_count = 0
        self.members: dict[str, SimulatedMember] = {}
        self.disks: dict[str, Disk] = {}
        self.checker = GroupChecker(self.disks)
        voters = {f"m{n}": f"host:{n}" for n in range(self.rng.choice([3, 3, 4, 5]))}
        for member_id in voters:
            self._add_member(member_id, Configuration(voters=voters))

    def _add_member(self, member_id: str, configuration: Configuration) -> None:
        storage = self.disks[member_id] = Disk(configuration)
        member = self.members[member_id] = SimulatedMember(member_id, storage)
        self._boot(member)

    # -- time

    def _at(self, delay_s: float, action: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._sequence, action))

    def _next_event(self) -> None:
        self.now, _, action = heapq.heappop(self._queue)
        action()

    def run(self) -> Counter[str]:
        self._at(0.01, self._client)
        self._at(0.3, self._fault)
        while self.now < FAULTS_S:
            self._next_event()
        self._heal()
        deadline = self.now + HEALED_S_MAX
        while not self._has_converged():
            if self.now > deadline:
                raise ViolationError(f"no convergence within {HEALED_S_MAX} s of healing")
            self._next_event()
        if self.rng.random() < ALL_STARVED_SHARE:
            self._starve_all()
        return self.stats

    # -- processes

    def _config(self, member_id: str) -> RaftCoreConfig:
        return RaftCoreConfig(
            member_id=member_id,
            append_entries_max=4,
            inflight_messages_max=3,
            uncommitted_entries_max=40,
            apply_entries_max=7,
            snapshot_chunk_bytes=24,
            retained_entries_max=self.rng.choice([0, 3]),
            promote_lag_entries_max=5,
        )

    def _boot(self, member: SimulatedMember) -> None:
        restored = member.storage.load()
        member.core = self.core_class(
            self._config(member.member_id),
            restored,
            random.Random(self.rng.random()),
            self.now,
        )
        member.commands = _commands_in(restored.snapshot.data)
        member.proposals = {}
        member.incarnation += 1
        member.is_paused = False
        member.deferred = []
        self.checker.on_restart(member.member_id)
        incarnation = member.incarnation
        self._at(self.rng.random() * TICK_S, lambda: self._tick(member, incarnation))

    def _crash(self, member: SimulatedMember) -> None:
        """Crash a member: all but its disk is gone; a save under way has not happened."""
        member.core = None
        member.incarnation += 1
        self.stats["crashes"] += 1
        if not member.is_removed:
            self._at(self.rng.uniform(0.01, 1.0), lambda: self._restart(member))

    def _restart(self, member: SimulatedMember) -> None:
        if member.core is None and not member.is_removed:
            self._boot(member)
            self._process(member)

    def _on_process(
        self, member: SimulatedMember, incarnation: int, action: Callable[[RaftCore], None]
    ) -> None:
        """Let `action` happen in that process: later if it is paused, never if it is gone."""
        if member.core is None or member.incarnation != incarnation:
            return
        if member.is_paused:
            member.deferred.append(lambda: self._on_process(member, incarnation, action))
            return
        action(member.core)
        self._process(member)

    def _tick(self, member: SimulatedMember, incarnation: int) -> None:
        def tick(core: RaftCore) -> None:
            core.tick(self.now)
            self._at(TICK_S, lambda: self._tick(member, incarnation))

        self._on_process(member, incarnation, tick)

    # -- the driver's part

    def _process(self, member: SimulatedMember) -> None:
        core = member.core
        assert core is not None
        self.checker.after_event(member, self.now)
        while (ready := core.ready(self.now)) is not None:
            self.checker.after_event(member, self.now)
            self._send(ready.messages)
            if ready.needs_persist:
                self._save_later(member, ready)
            else:
                self._send(ready.messages_after_persist)
            self._carry_out(member, core, ready)
            if member.core is None:
                return

    def _save_later(self, member: SimulatedMember, ready: Ready) -> None:
        incarnation = member.incarnation
        crashes = not self.is_healed and self.rng.random() < 0.004

        def saved(core: RaftCore) -> None:
            member.storage.save(
                hard_state=ready.hard_state,
                snapshot_write=ready.snapshot_write,
                entries=ready.entries,
            )
            if crashes:
                self._crash(member)
                return
            self._send(ready.messages_after_persist)
            core.advance(ready)

        def finish() -> None:
            if member.core is None or member.incarnation != incarnation:
                return
            if member.is_paused:
                member.deferred.append(finish)
                return
            saved(member.core)
            if member.core is not None:
                self._process(member)

        self._at(self.rng.uniform(0.0002, self.weather.save_s_max), finish)

    def _carry_out(self, member: SimulatedMember, core: RaftCore, ready: Ready) -> None:
        if ready.snapshot_write is not None and ready.snapshot_write.installed:
            snapshot = ready.snapshot_write.snapshot
            member.commands = _commands_in(snapshot.data)
            self.checker.on_restored(member.member_id, snapshot.index, member.commands)
            self.stats["snapshots installed"] += 1
        for entry in ready.committed:
            if entry.kind is EntryKind.COMMAND:
                member.commands.append(entry.data)
            if member.proposals.pop(entry.index, None) == entry.term:
                self.checker.on_acknowledged(entry.index)
                self.stats["acknowledged"] += 1
        for index, context in ready.finished_reads:
            assert isinstance(context, int)
            self.checker.on_read(member.member_id, index, core.log.applied_index, context)
            self.stats["reads"] += 1
        for event in ready.events:
            if isinstance(event, RoleChange):
                member.proposals = {
                    i: t
                    for i, t in member.proposals.items()
                    if event.role is Role.LEADER and t == event.term
                }
                self.stats[f"became {event.role.value}"] += 1
            elif isinstance(event, RemovedFromGroup):
                member.is_removed = True
                self.stats["removed"] += 1
                self._crash(member)
                return

    # -- the network

    def _send(self, messages: tuple[Message, ...]) -> None:
        self.checker.on_sent(messages)
        for message in messages:
            copies = 1
            if not self.is_healed:
                if self.rng.random() < self.weather.drop:
                    copies = 0
                elif self.rng.random() < self.weather.double:
                    copies = 2
            for _ in range(copies):
                self._at(self._delay_s(), self._delivery(message, self.now))

    def _delay_s(self) -> float:
        if not self.is_healed and self.rng.random() < self.weather.slow:
            return self.rng.choice([0.03, 0.2, 0.8]) * self.rng.random()
        return self.rng.uniform(0.0005, 0.005)

    def _delivery(self, message: Message, sent_at: float) -> Callable[[], None]:
        def deliver() -> None:
            if (message.sender, message.to) in self.blocked:
                return
            member = self.members[message.to]

            def step(core: RaftCore) -> None:
                if core.listens_to(message.sender, self.now):
                    self.checker.on_handled(message, sent_at)
                    core.step(message, self.now)
                else:
                    self.stats["not listened to"] += 1

            self._on_process(member, member.incarnation, step)

        return deliver

    # -- the workload

    def _running_leaders(self) -> list[SimulatedMember]:
        """Return the members that believe to lead and are not paused."""
        return [
            m
            for m in self.members.values()
            if m.core is not None and m.core.role is Role.LEADER and not m.is_paused
        ]

    def _client(self) -> None:
        self._at(self.rng.expovariate(1 / 0.025), self._client)
        leaders = self._running_leaders()
        if leaders:
            self._request(self.rng.choice(leaders))

    def _request(self, member: SimulatedMember) -> None:
        core = member.core
        assert core is not None
        if self.rng.random() < 0.3:
            core.read_index(self.checker.linearized_index, self.now)
        else:
            for _ in range(self.rng.choice([1, 1, 3, 9])):
                self._command_count += 1
                outcome = core.propose(b"c%d" % self._command_count, self.now)
                if not isinstance(outcome, Refusal):
                    member.proposals[outcome.index] = outcome.term
        self._process(member)

    # -- faults

    def _fault(self) -> None:
        if self.is_healed:
            return
        self._at(self.rng.expovariate(1 / self.weather.fault_interval_s), self._fault)
        faults: list[tuple[int, Callable[[], None]]] = [
            (4, self._crash_one),
            (3, self._crash_leader),
            (4, self._isolate),
            (3, self._reconnect),
            (3, self._pause_one),
            (5, self._compact_one),
            (6, self._change_membership),
            (2, self._transfer),
            (2, self._starve_one),
        ]
        weights = [weight for weight, _ in faults]
        self.rng.choices([fault for _, fault in faults], weights)[0]()

    def _pick_running(self) -> SimulatedMember | None:
        running = [m for m in self.members.values() if m.core is not None and not m.is_paused]
        return self.rng.choice(running) if running else None

    def _crash_one(self) -> None:
        member = self._pick_running()
        if member is not None:
            self._crash(member)

    def _crash_leader(self) -> None:
        for member in self._running_leaders()[:1]:
            self._crash(member)

    def _isolate(self) -> None:
        """Cut the group in two, one member off, or single directions."""
        ids = list(self.members)
        self.stats["isolations"] += 1
        if self.rng.random() < 0.3:
            self.blocked |= {(a, b) for a in ids for b in ids if self.rng.random() < 0.25}
            return
        leaders = [m.member_id for m in self._running_leaders()]
        if leaders and self.rng.random() < 0.5:
            apart = {leaders[0]}
        else:
            apart = set(self.rng.sample(ids, self.rng.randrange(1, len(ids))))
        one_way = self.rng.random() < 0.25
        for a in ids:
            for b in ids:
                if (a in apart) != (b in apart) and (a in apart or not one_way):
                    self.blocked.add((a, b))

    def _reconnect(self) -> None:
        self.blocked.clear()

    def _pause_one(self) -> None:
        leaders = self._running_leaders()
        member = leaders[0] if leaders and self.rng.random() < 0.5 else self._pick_running()
        if member is None:
            return
        member.is_paused = True
        self.stats["pauses"] += 1
        incarnation = member.incarnation
        pause_s = self.rng.choice([0.1, 0.5, 1.5]) * self.rng.random()
        self._at(pause_s, lambda: self._resume(member, incarnation))

    def _resume(self, member: SimulatedMember, incarnation: int) -> None:
        """Go on; in half of the cases a client comes before all that has waited."""
        if not member.is_paused or member.incarnation != incarnation or member.core is None:
            return
        member.is_paused = False
        if self.rng.random() < 0.5:
            self._request(member)
        deferred, member.deferred = member.deferred, []
        for action in deferred:
            action()

    def _starve_one(self) -> None:
        member = self._pick_running()
        if member is not None:
            self._starve(member, self.now + 4 * self.rng.random())

    def _starve(self, member: SimulatedMember, until: float) -> None:
        """Let this process run only now and then."""
        incarnation = member.incarnation
        self.stats["starved"] += 1

        def run() -> None:
            self._resume(member, incarnation)
            if self.now < until:
                self._at(self.rng.uniform(*RUNS_S), stop)

        def stop() -> None:
            if member.core is not None and member.incarnation == incarnation:
                member.is_paused = True
                self._at(self.rng.uniform(*STARVED_S), run)

        self._at(self.rng.uniform(*RUNS_S), stop)

    def _starve_all(self) -> None:
        """A group that is merely slow keeps its leader, or changes it once."""
        until = self.now + ALL_STARVED_S
        for member in self.members.values():
            if member.core is not None:
                self._starve(member, until)
        before = self.stats["became leader"]
        while self.now < until:
            self._next_event()
        self.stats["all starved"] += 1
        leaders = self.stats["became leader"] - before
        if leaders > LEADERS_WHILE_STARVED_MAX:
            raise ViolationError(f"{leaders} leaders in {ALL_STARVED_S} s of a starved group")

    def _compact_one(self) -> None:
        member = self._pick_running()
        if member is None or member.core is None:
            return
        log = member.core.log
        if log.applied_index > log.snapshot.index:
            member.core.compact(log.applied_index, b"\n".join(member.commands))
            self.stats["compactions"] += 1
            self._process(member)

    def _change_membership(self) -> None:
        for member in self._running_leaders()[:1]:
            core = member.core
            assert core is not None
            outcome: Any = None
            choice = self.rng.random()
            configuration = core.configuration
            if choice < 0.4 and len(self.members) < MEMBERS_MAX:
                new_id = f"m{len(self.members)}"
                outcome = core.add_learner(new_id, f"host:{len(self.members)}", self.now)
                if not isinstance(outcome, Refusal):
                    self._add_member(new_id, Configuration())
            elif choice < 0.75 and configuration.learners:
                outcome = core.promote(self.rng.choice(sorted(configuration.learners)), self.now)
            elif len(configuration.voters) > 2 or configuration.learners:
                outcome = core.remove_member(
                    self.rng.choice(sorted(configuration.members)), self.now
                )
            if outcome is not None:
                refused = isinstance(outcome, Refusal)
                self.stats["changes refused" if refused else "changes"] += 1
            self._process(member)

    def _transfer(self) -> None:
        for member in self._running_leaders()[:1]:
            assert member.core is not None
            member.core.transfer_leadership(None, self.now)
            self.stats["transfers"] += 1
            self._process(member)

    # -- healing

    def _heal(self) -> None:
        self.is_healed = True
        self.blocked.clear()
        self.weather = Weather(
            drop=0.0, double=0.0, slow=0.0, fault_interval_s=1.0, save_s_max=0.003
        )
        for member in list(self.members.values()):
            self._resume(member, member.incarnation)
            self._restart(member)
        self._healed_floor = self.checker.linearized_index

    def _has_converged(self) -> bool:
        """One leader; something acknowledged since; all its members have applied the same."""
        leaders = self._running_leaders()
        if len(leaders) != 1 or self.checker.linearized_index <= self._healed_floor:
            return False
        leader = leaders[0]
        assert leader.core is not None
        if leader.core.log.has_uncommitted_configuration:
            return False
        for member_id in leader.core.configuration.members:
            core = self.members[member_id].core
            if core is None or core.log.applied_index <= self._healed_floor:
                return False
        self._check_same_state(leader)
        return True

    def _check_same_state(self, leader: SimulatedMember) -> None:
        assert leader.core is not None
        for member_id in leader.core.configuration.members:
            member = self.members[member_id]
            assert member.core is not None
            self.checker.on_restored(member_id, member.core.log.applied_index, member.commands)


def _commands_in(state: bytes) -> list[bytes]:
    return state.split(b"\n") if state else []


def run_seed(seed: int) -> Counter[str]:
    """Run one seed; whatever goes wrong names it."""
    try:
        return Simulation(seed).run()
    except Exception as error:
        raise ViolationError(f"seed {seed}: {type(error).__name__}: {error}") from error


def main() -> int:
    parser = argparse.ArgumentParser(description="Run seeds of the Raft simulation.")
    parser.add_argument("--seeds", default="0-1000", metavar="A-B", help="from A up to before B")
    options = parser.parse_args()
    first, last = (int(part) for part in options.seeds.split("-"))
    totals: Counter[str] = Counter()
    began_at = time.perf_counter()
    failures = 0
    for seed in range(first, last):
        try:
            totals.update(run_seed(seed))
        except ViolationError as error:
            failures += 1
            print(error, file=sys.stderr)
    seconds = time.perf_counter() - began_at
    print(f"{last - first} seeds, {failures} failures, {seconds:.1f} s")
    for name, count in sorted(totals.items()):
        print(f"  {name}: {count}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
