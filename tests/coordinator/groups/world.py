"""A world of consumers and leaders in virtual time, from one seed: the rules of ``group_members``
under late, lost and repeated messages, pauses, deaths, restarts and changes of leaders.

Consumers keep the contract of ``groups.proto``. After each step the invariants are checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from koinon_coordinator.core.groups import group_members
from koinon_coordinator.core.groups.group_members import Attendance, GroupMembers
from koinon_proto.contract.errors import KoinonError, MemberFencedError
from koinon_proto.contract.groups import GroupStrategy
from koinon_proto.contract.keyspaces import KeyspaceId
from koinon_proto.contract.table import PartitionId

STEP_S = 0.05
PAUSE_S = 1.0  # of a leader: a longer time between ticks counts as a pause of its process
LATENCY_S_MAX = 0.1


@dataclass
class Consumer:
    """A consumer by the contract: ``held`` has the generations of the partitions it holds."""

    member_id: str
    incarnation: int
    session_s: float
    keyspace_ids: frozenset[KeyspaceId]
    is_up: bool = True
    paused_until: float = 0.0
    held: dict[PartitionId, int] = field(default_factory=dict)
    letting_go: dict[PartitionId, float] = field(default_factory=dict)  # until when
    number: int = 0
    sent_at: float = float("-inf")  # of the newest request
    good_from: float = float("-inf")  # when the newest answered request was sent
    known_revision: int = 0
    is_waiting: bool = False
    has_news: bool = True

    def owns(self, now: float) -> list[PartitionId]:
        """Return the partitions that this consumer believes to own."""
        in_session = now < self.good_from + self.session_s
        return list(self.held) if self.is_up and in_session else []


@dataclass
class Poll:
    """A request at the leader that waits for news."""

    request: Attendance
    answer_by: float


class World:
    """One group, its consumers and its leader."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.now = 100.0
        self.strategy = random.choice(list(GroupStrategy))
        self.partitions = {
            KeyspaceId(k): range(100 * k, 100 * k + random.randint(1, 8))
            for k in range(random.randint(1, 3))
        }
        self.generation = 0  # replicated
        self.session_s = 0.0  # replicated, with the generation
        self.raises = 0
        self.consumers: list[Consumer] = []
        self.cursors: dict[PartitionId, int] = {}
        self.seen: dict[tuple[PartitionId, int], tuple[str, int]] = {}  # grants, ever
        self.last: dict[PartitionId, int] = {}  # the generation of the last new grant
        self.messages: list[tuple[float, int, tuple[Any, ...]]] = []
        self.polls: dict[str, Poll] = {}
        self.raising_until: float | None = None
        self.loss = 0.1
        self.leader = GroupMembers("g", self.strategy, self.partitions, self.now, 0.0)
        self.term = 1

    # --- what happens -------------------------------------------------------------------------

    def run(self, seconds: float, *, chaos: bool) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += STEP_S
            if chaos:
                self._disturb()
            self._deliver()
            for consumer in self.consumers:
                self._live(consumer)
            self._lead()
            self.check()

    def _disturb(self) -> None:
        random = self.random
        chance = random.random()
        if chance < 0.02 and len(self.consumers) < 8:
            self._start(f"m{len(self.consumers)}", 1)
        elif chance < 0.03:
            self._restart(random.choice(self.consumers or [None]))
        elif chance < 0.04 and self.consumers:
            consumer = random.choice(self.consumers)
            consumer.paused_until = self.now + random.uniform(0.1, 8.0)
        elif chance < 0.045 and self.consumers:
            random.choice(self.consumers).is_up = False
        elif chance < 0.052:
            self.change_leader()
        elif chance < 0.056 and self.consumers:
            consumer = random.choice(self.consumers)
            consumer.keyspace_ids, consumer.has_news = self._some_keyspaces(), True
        elif chance < 0.058:
            self.leader.pause(self.now, 2.0)
            self.generation += 1

    def _some_keyspaces(self) -> frozenset[KeyspaceId]:
        wanted = [k for k in self.partitions if self.random.random() < 0.8]
        return frozenset(wanted or list(self.partitions)[:1])

    def _start(self, member_id: str, incarnation: int) -> None:
        session_s = self.random.choice([2.0, 3.0, 5.0])
        wanted = self._some_keyspaces()
        self.consumers.append(Consumer(member_id, incarnation, session_s, wanted))

    def _restart(self, consumer: Consumer | None) -> None:
        """Have a process take the place of another under the same member id; the old one is dead,
        as whoever gives members their ids sees to.
        """
        if consumer is not None:
            self.consumers.remove(consumer)
            self._start(consumer.member_id, self.random.getrandbits(32))  # clocks differ

    def change_leader(self) -> None:
        """Begin a term: the new leader knows what is replicated, and nothing else."""
        self.term += 1
        self.polls.clear()
        self.raising_until = None
        waits_until = self.now + self.session_s if self.session_s else 0.0
        self.leader = GroupMembers("g", self.strategy, self.partitions, self.now, waits_until)

    # --- messages -----------------------------------------------------------------------------

    def _send(self, message: tuple[Any, ...]) -> None:
        copies = self.random.choices([0, 1, 2], [self.loss, 1 - self.loss, self.loss / 2])[0]
        for _ in range(copies):
            at = self.now + self.random.uniform(0.0, LATENCY_S_MAX)
            self.messages.append((at, len(self.messages), message))

    def _deliver(self) -> None:
        due = [m for m in self.messages if m[0] <= self.now]
        self.messages = [m for m in self.messages if m[0] > self.now]
        for _, _, message in sorted(due, key=lambda m: m[:2]):
            (self._attend if len(message) == 2 else self._answered)(*message)

    def _attend(self, request: Attendance, held: dict[PartitionId, int]) -> None:
        try:
            member = self.leader.attend(request, held, self.generation, self.now)
        except MemberFencedError:  # the consumer ends, and is started anew
            fenced = self._consumer(request)
            if fenced is not None and fenced.is_up:
                self._restart(fenced)
            return
        except KoinonError:
            return
        poll = Poll(request, self.now + request.session_s / 3)
        self.polls[request.member_id] = poll
        if request.known_revision != member.revision:
            self._answer(poll)

    def _answer(self, poll: Poll) -> None:
        request = poll.request
        self.polls.pop(request.member_id, None)
        member = self.leader.members.get(request.member_id)
        if member is not None and member.newest is request:
            granted = dict(self.leader.answer(member))
            self._send((request, granted, member.revision))

    # --- consumers ----------------------------------------------------------------------------

    def _consumer(self, request: Attendance) -> Consumer | None:
        wanted = request.member_id, request.incarnation
        return next((c for c in self.consumers if (c.member_id, c.incarnation) == wanted), None)

    def _answered(
        self, request: Attendance, granted: dict[PartitionId, int], revision: int
    ) -> None:
        consumer = self._consumer(request)
        if consumer is None or not consumer.is_up or consumer.number != request.number:
            return
        if not consumer.is_waiting or self.now < consumer.paused_until:
            return  # given up, or lost in a process that is paused
        consumer.is_waiting, consumer.has_news = False, consumer.known_revision != revision
        if self.now >= consumer.sent_at + consumer.session_s:
            return  # an answer as late as that says nothing any more
        consumer.good_from, consumer.known_revision = consumer.sent_at, revision
        for partition_id in consumer.held.keys() - granted.keys():
            until = self.now + self.random.uniform(0.0, 1.0)
            consumer.letting_go.setdefault(partition_id, until)
        for partition_id, generation in granted.items():
            consumer.letting_go.pop(partition_id, None)
            if consumer.held.get(partition_id) != generation:
                if generation < self.cursors.get(partition_id, 0):
                    consumer.held.pop(partition_id, None)  # refused: it is given back
                    consumer.has_news = True
                    continue
                self.cursors[partition_id] = generation
                consumer.held[partition_id] = generation

    def _live(self, consumer: Consumer) -> None:
        if not consumer.is_up or self.now < consumer.paused_until:
            return
        if consumer.held and self.now >= consumer.good_from + consumer.session_s:
            consumer.held, consumer.letting_go, consumer.known_revision = {}, {}, 0
            consumer.has_news = True
        for partition_id, until in list(consumer.letting_go.items()):
            if self.now >= until:
                del consumer.letting_go[partition_id]
                consumer.held.pop(partition_id, None)
                consumer.has_news = True
        is_silent = self.now >= consumer.sent_at + 0.76 * consumer.session_s
        if (not consumer.is_waiting or consumer.has_news or is_silent) and (
            self.now >= consumer.sent_at + STEP_S
        ):
            consumer.number += 1
            consumer.sent_at, consumer.is_waiting = self.now, True
            consumer.has_news = False
            request = Attendance(
                member_id=consumer.member_id,
                incarnation=consumer.incarnation,
                number=consumer.number,
                keyspace_ids=consumer.keyspace_ids,
                session_s=consumer.session_s,
                known_revision=consumer.known_revision,
                is_joining=consumer.good_from < 0.0,
            )
            self._send((request, dict(consumer.held)))

    # --- the leader ---------------------------------------------------------------------------

    def _lead(self) -> None:
        leader = self.leader
        leader.tick(self.now, pause_s=PAUSE_S, quorum=True)
        if self.raising_until is None:
            if leader.act(self.now):
                self.raising_until = self.now + self.random.uniform(0.0, 0.2)
                self._raised_session_s = leader.session_s
        elif self.now >= self.raising_until:
            self.raising_until = None
            self.raise_generation()
            self.session_s = self._raised_session_s
            leader.grant(self.generation, self.session_s, self.now)
        news = leader.take_news()
        for member_id, poll in list(self.polls.items()):
            member = leader.members.get(member_id)
            changed = member is not None and member.revision != poll.request.known_revision
            if (member_id in news and changed) or self.now >= poll.answer_by:
                self._answer(poll)

    def raise_generation(self) -> None:
        self.generation += 1
        self.raises += 1

    # --- checks -------------------------------------------------------------------------------

    def check(self) -> None:
        """Check the invariants."""
        owners: dict[PartitionId, str] = {}
        for consumer in self.consumers:
            for partition_id in consumer.owns(self.now):
                other = owners.setdefault(partition_id, consumer.member_id)
                assert other == consumer.member_id, f"{partition_id} has two owners"
        granted: set[PartitionId] = set()
        for member_id, member in self.leader.members.items():
            assert granted.isdisjoint(member.granted), "a partition is granted twice"
            granted |= member.granted.keys()
            for partition_id, generation in member.granted.items():
                who = member_id, member.newest.incarnation
                is_new = (partition_id, generation) not in self.seen
                assert self.seen.setdefault((partition_id, generation), who) == who
                if is_new:
                    assert generation > self.last.get(partition_id, 0), "generations rise"
                    self.last[partition_id] = generation

    def check_settled(self) -> None:
        """Check that each subscribed partition is held by the member it is granted to."""
        live = {c.member_id: c for c in self.consumers if c.is_up}
        assert set(self.leader.members) == set(live)
        wanted = {p for c in live.values() for k in c.keyspace_ids for p in self.partitions[k]}
        held = {p: c.member_id for c in live.values() for p in c.owns(self.now)}
        assert set(held) == wanted
        for consumer in live.values():
            assert consumer.held == self.leader.members[consumer.member_id].granted
            assert all(
                any(p in self.partitions[k] for k in consumer.keyspace_ids) for p in consumer.held
            )
        assert self.leader.unowned() == 0


def run(seed: int, *, chaos_s: float = 60.0) -> World:
    """Run one world through faults, and then until it must have settled."""
    world = World(seed)
    world.run(chaos_s, chaos=True)
    world.loss = 0.0
    for consumer in world.consumers:
        consumer.paused_until = 0.0
    world.run(18.0 + group_members.GATHER_S_MAX, chaos=False)
    world.check_settled()
    return world
