"""The members of one group in one leader's term: who is in session, who is granted what. Pure.

A *grant* gives a partition to a member, with a generation. A member *may hold* a partition from the
answer that grants it until a later request of the member does not list it, or until the member's
session is over. Invariants, with all members honest:

* a partition is granted to one member at a time, and only while no other member may hold it;
* the generation of a grant is higher than those of all earlier grants of its group: whoever calls
  ``grant`` has had the group's generation raised for this one call.

How a partition goes from a member to another::

    target            granted to A   A may hold it
    A                 yes            yes
    B (B has joined)  no             yes             A's poll is answered: released, please
    B                 no             no              A's next request does not list it
    B                 to B, g + 1    no              the generation was raised to g + 1

Changes are gathered for a moment (``QUIET_S``, ``GATHER_S_MAX``), so that many joins or releases
together make one target or one generation.

A new leader knows no member. It waits for the longest session that an earlier leader may have given
(``waits_until``; ``core/decide/sessions.py`` proves the same for nodes). Until then it adopts what
members say they hold; of two members that say they hold one partition, the one with the higher
generation keeps it. It grants no partition that nobody has said to hold, and makes no target before
each partition that members subscribe to is accounted for.

Times are float seconds; ``now`` is an argument.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from koinon_coordinator.core.groups.assignors import MemberId, PartitionsOf, assign
from koinon_proto.contract.errors import (
    InvalidArgumentError,
    MemberFencedError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnavailableError,
)
from koinon_proto.contract.groups import GroupStrategy
from koinon_proto.contract.keyspaces import KeyspaceId
from koinon_proto.contract.table import PartitionId

QUIET_S = 0.2
"""A change is acted on once there was no other change for so long."""
GATHER_S_MAX = 1.0
"""A change is acted on after this time, however many others follow."""
MEMBERS_MAX = 2_000
FORMER_MAX = 64
"""So many of a member's replaced incarnations are known."""
NEVER = float("inf")
Held = Mapping[PartitionId, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Attendance:
    """A member's request, without what it holds. ``known_revision``: of the last answer that it has
    seen.
    """

    member_id: MemberId
    incarnation: int
    number: int
    keyspace_ids: frozenset[KeyspaceId]
    session_s: float
    known_revision: int = 0
    is_static: bool = False
    is_joining: bool = False  # no request of the incarnation was answered yet
    client_name: str = ""
    peer: str = ""
    user: str = ""


@dataclass(slots=True)
class Member:
    """A member in session. ``granted`` has the generation of each grant."""

    newest: Attendance
    heard_at: float
    former: tuple[int, ...] = ()  # incarnations that were replaced
    granted: dict[PartitionId, int] = field(default_factory=dict)
    # Partitions that an answer has named or this leader has adopted, and that no later request of
    # the member has left out.
    may_hold: set[PartitionId] = field(default_factory=set)
    is_suspect: bool = False  # its session was over at the last tick
    _revision: int | None = None  # derived from ``granted``, on demand

    @property
    def revision(self) -> int:
        """A digest of the grants: equal grants have equal revisions, under all leaders."""
        if self._revision is None:
            pairs = sorted(self.granted.items())
            packed = b"".join(struct.pack("<QQ", p, generation) for p, generation in pairs)
            digest = hashlib.blake2b(packed, digest_size=8).digest()
            self._revision = int.from_bytes(digest, "little") or 1
        return self._revision

    def set_grant(self, partition_id: PartitionId, generation: int) -> None:
        """Set the generation of a grant; 0: there is none any more."""
        if generation:
            self.granted[partition_id] = generation
        else:
            del self.granted[partition_id]
        self._revision = None


class GroupMembers:
    """The members of one group, and their grants. The driver calls ``act`` when ``due_at`` is
    reached, has the generation raised if ``act`` says so, and calls ``grant`` with it.
    """

    def __init__(
        self,
        name: str,
        strategy: GroupStrategy,
        partitions: PartitionsOf,
        now: float,
        waits_until: float,
    ) -> None:
        """Begin the term. ``partitions``: of all keyspaces that can be used."""
        self.name = name
        self.strategy = strategy
        self.members: dict[MemberId, Member] = {}
        self.waits_until = waits_until
        self.changed_at = now  # when a grant was made or taken last
        self.paused_until = 0.0  # until then nothing is granted
        self._partitions = dict(partitions)
        self._owner: dict[PartitionId, MemberId] = {}  # by grant
        self._target: dict[PartitionId, MemberId] = {}
        self._is_stale = False  # whether the target has to be made anew
        # While waiting: the highest known generation of each partition's grants.
        self._accounted: dict[PartitionId, int] = {}
        self._first_change_at = self._act_at = NEVER  # of the changes that are gathered
        self._ticked_at = now
        self._news: set[MemberId] = set()  # members whose grants have changed

    # --- requests -----------------------------------------------------------------------------

    def attend(self, request: Attendance, held: Held, generation: int, now: float) -> Member:
        """Take a member's request in. ``held``: the partitions that it holds, and the generations
        of their grants. ``generation``: the group's.

        Raises:
            MemberFencedError: another incarnation has taken the member's place.
            PermissionDeniedError: the member is another user's.
            ResourceExhaustedError: the group has too many members.
            UnavailableError: a later request of the member has been heard.
            InvalidArgumentError: the member holds what was never granted.
        """
        for partition_id, held_by_grant in held.items():
            if not 0 < held_by_grant <= generation:
                raise InvalidArgumentError(
                    field="held",
                    reason=f"partition {partition_id} was never granted with this generation",
                    limit=generation,
                    actual=held_by_grant,
                )
        member = self._seated(request, now)
        if member.newest.keyspace_ids != request.keyspace_ids:
            self._outdate_target(now)
        member.newest, member.heard_at, member.is_suspect = request, now, False
        if now < self.waits_until:
            self._adopt(member, held, now)
        if request.known_revision == member.revision:
            for partition_id in member.granted.keys() - held.keys():
                self._take(partition_id, now)  # it is given back
        if member.may_hold - held.keys():
            self._note_change(now)  # something was released
        member.may_hold &= held.keys()
        return member

    def _seated(self, request: Attendance, now: float) -> Member:
        """Return the member, which joins if it is new. An incarnation that joins replaces the one
        before, whatever their numbers, and that one never comes back. Where the order is not known,
        since both joined under an earlier leader, the greater incarnation stays.
        """
        former: tuple[int, ...] = ()
        member = self.members.get(request.member_id)
        if member is not None:
            newest = member.newest
            if request.user != newest.user:
                raise PermissionDeniedError(
                    principal=f"user {request.user or 'nobody'}",
                    action="attend",
                    what=f"as member {request.member_id!r}, who is another user",
                )
            is_earlier = request.incarnation < newest.incarnation and not request.is_joining
            if is_earlier or request.incarnation in member.former:
                raise MemberFencedError(group=self.name, member_id=request.member_id)
            if request.incarnation == newest.incarnation:
                if request.number <= newest.number:
                    raise UnavailableError(reason="a later request of this member has been heard")
                if request.session_s != newest.session_s:
                    raise InvalidArgumentError(
                        field="session_ms", reason="cannot change while the member is in session"
                    )
                return member
            former = (*member.former, newest.incarnation)[-FORMER_MAX:]
            self._forget(request.member_id, now)
        elif len(self.members) >= MEMBERS_MAX:
            raise ResourceExhaustedError(resource="members of a group", limit=MEMBERS_MAX)
        member = self.members[request.member_id] = Member(request, now, former)
        self._outdate_target(now)
        return member

    def answer(self, member: Member) -> dict[PartitionId, int]:
        """Return the member's grants to be sent: from now on it may hold them."""
        member.may_hold |= member.granted.keys()
        return member.granted

    def leave(self, member_id: MemberId, incarnation: int, user: str, now: float) -> None:
        """End the session of a member that holds nothing any more. Another incarnation is left as
        it is.

        Raises:
            PermissionDeniedError: the member is another user's.
        """
        member = self.members.get(member_id)
        if member is None or member.newest.incarnation != incarnation:
            return
        if member.newest.user != user:
            raise PermissionDeniedError(
                principal=f"user {user or 'nobody'}",
                action="remove",
                what=f"member {member_id!r} of another user",
            )
        self._forget(member_id, now)
        self._outdate_target(now)

    def _adopt(self, member: Member, held: Held, now: float) -> None:
        """Take over what a member says it holds, from an earlier leader's grants."""
        for partition_id, generation in held.items():
            is_newest = generation > self._accounted.get(partition_id, 0)
            if is_newest and self._is_subscribed(member, partition_id):
                self._give(partition_id, member, generation, now)
                member.may_hold.add(partition_id)

    # --- time ---------------------------------------------------------------------------------

    def tick(self, now: float, *, pause_s: float, quorum: bool) -> None:
        """End the sessions that are over. Ticks further apart than ``pause_s`` mean that this
        process was paused: no request could arrive, so that time does not count. Without a
        ``quorum`` no session ends, since no grant can follow.
        """
        gap, self._ticked_at = now - self._ticked_at, now
        was_paused = gap > pause_s
        for member_id, member in list(self.members.items()):
            if was_paused:
                member.heard_at = min(member.heard_at + gap, now)
            is_over = now - member.heard_at > member.newest.session_s
            if is_over and member.is_suspect and quorum:
                self._forget(member_id, now)
                self._outdate_target(now)
            member.is_suspect = is_over and not was_paused and quorum

    def due_at(self, now: float) -> float:
        """Return when ``act`` has something to do; never: infinity."""
        if self._act_at == NEVER:
            return NEVER
        if now < self.waits_until and not self._is_accounted_for():
            return self.waits_until
        return max(self._act_at, self.paused_until)

    def act(self, now: float) -> bool:
        """Make the target anew if need be, and take from members what is not theirs any more.
        Return whether partitions can be granted: with a generation that is raised for it.
        """
        if now < self.due_at(now):
            return False
        self._first_change_at = self._act_at = NEVER
        if self._is_stale:
            self._renew_target(now)
        return bool(self._grantable(now))

    def retry(self, now: float) -> None:
        """Note that the generation could not be raised: ``act`` is due again."""
        self._note_change(now)

    def grant(self, generation: int, session_s: float, now: float) -> int:
        """Grant whatever can be granted by now; return the number of new grants. ``generation`` was
        raised for this call, and no other call ever has it. A later leader will wait for
        ``session_s``: members with longer sessions are granted nothing yet.
        """
        if now < self.paused_until:
            self._note_change(now)
            return 0
        count = 0
        for partition_id, member_id in self._grantable(now):
            member = self.members[member_id]
            if member.newest.session_s <= session_s:
                self._give(partition_id, member, generation, now)
                count += 1
            else:
                self._note_change(now)
        return count

    def pause(self, now: float, pause_s: float) -> None:
        """Take all grants, and grant nothing for so long."""
        for partition_id in list(self._owner):
            self._take(partition_id, now)
        self.paused_until = now + pause_s
        self._note_change(now)

    def set_partitions(self, partitions: PartitionsOf, now: float) -> None:
        """Take in the keyspaces as they are now. Partitions of dropped ones are nobody's."""
        if self._partitions == partitions:
            return
        self._partitions = dict(partitions)
        for member in self.members.values():
            for p in [p for p in member.granted if not self._is_subscribed(member, p)]:
                self._take(p, now)
            member.may_hold = {
                p for p in member.may_hold if any(p in ids for ids in partitions.values())
            }
        self._outdate_target(now)

    # --- reading ------------------------------------------------------------------------------

    @property
    def session_s(self) -> float:
        """The longest session of all members; 0: there is none."""
        return max((member.newest.session_s for member in self.members.values()), default=0.0)

    def take_news(self) -> set[MemberId]:
        """Return the members whose grants have changed since the last call, or who are gone."""
        news, self._news = self._news, set()
        return news

    def subscribed(self) -> dict[KeyspaceId, range]:
        """Return the partitions of the keyspaces that members subscribe to."""
        wanted = {k for member in self.members.values() for k in member.newest.keyspace_ids}
        return {k: self._partitions[k] for k in sorted(wanted) if k in self._partitions}

    def unowned(self) -> int:
        """Return the number of subscribed partitions that are granted to nobody."""
        return sum(map(len, self.subscribed().values())) - len(self._owner)

    def is_idle(self, member_id: MemberId) -> bool:
        """Return whether the shares are settled, and none is left for the member."""
        member = self.members[member_id]
        is_settled = not self._is_stale and not member.granted
        return is_settled and member_id not in self._target.values()

    # --- changes ------------------------------------------------------------------------------

    def _is_subscribed(self, member: Member, partition_id: PartitionId) -> bool:
        """Return whether the partition is one of a keyspace that the member subscribes to."""
        return any(partition_id in self._partitions.get(k, ()) for k in member.newest.keyspace_ids)

    def _is_accounted_for(self) -> bool:
        """Return whether some member has reported that it holds the partition, for each partition
        that members subscribe to by now.
        """
        return all(self._accounted.keys() >= set(ids) for ids in self.subscribed().values())

    def _renew_target(self, now: float) -> None:
        """Share the partitions anew, and take grants that do not fit. A partition without a grant
        counts as that of the member it was meant for.
        """
        members = {m: member.newest.keyspace_ids for m, member in self.members.items()}
        owners = {**self._target, **self._owner}
        self._target = assign(self.strategy, members, self._partitions, owners)
        self._is_stale = False
        for partition_id, owner in list(self._owner.items()):
            if self._target.get(partition_id) != owner:
                self._take(partition_id, now)

    def _grantable(self, now: float) -> list[tuple[PartitionId, MemberId]]:
        """Return the partitions that nobody is granted, and nobody else may hold, with the members
        they are meant for.
        """
        is_waiting = now < self.waits_until
        held_by: dict[PartitionId, Set[MemberId]] = {}
        for member_id, member in self.members.items():
            for partition_id in member.may_hold:
                held_by[partition_id] = {member_id, *held_by.get(partition_id, ())}
        return [
            (partition_id, member_id)
            for partition_id, member_id in self._target.items()
            if partition_id not in self._owner
            and member_id in self.members
            and (not is_waiting or partition_id in self._accounted)
            and held_by.get(partition_id, frozenset()) <= {member_id}
        ]

    def _forget(self, member_id: MemberId, now: float) -> None:
        """End a member's session: it holds nothing, and is granted nothing."""
        for partition_id in list(self.members[member_id].granted):
            self._take(partition_id, now)
        del self.members[member_id]
        self._news.add(member_id)
        self._note_change(now)

    def _give(self, partition_id: PartitionId, member: Member, generation: int, now: float) -> None:
        if partition_id in self._owner:
            self._take(partition_id, now)
        if now < self.waits_until:
            self._accounted[partition_id] = generation
        member.set_grant(partition_id, generation)
        self._owner[partition_id] = member.newest.member_id
        self._news.add(member.newest.member_id)
        self.changed_at = now

    def _take(self, partition_id: PartitionId, now: float) -> None:
        owner = self._owner.pop(partition_id)
        self.members[owner].set_grant(partition_id, 0)
        self._news.add(owner)
        self.changed_at = now
        self._note_change(now)

    def _outdate_target(self, now: float) -> None:
        self._is_stale = True
        self._note_change(now)

    def _note_change(self, now: float) -> None:
        """Have ``act`` called soon: at once after a quiet moment."""
        self._first_change_at = min(self._first_change_at, now)
        self._act_at = min(self._first_change_at + GATHER_S_MAX, now + QUIET_S)
