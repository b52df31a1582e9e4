"""A consumer's membership in a group: what it holds, what it must give back, what it may commit.

A partition that is granted goes through these phases:

    granted > CLAIMING > CLAIMED > OWNED > REVOKED > given back
                 |          \\________________/
                 |       the session is over, or the cursor was claimed by another member
                 v                             v
               given back                    lost

``answered`` takes the coordinators' answers, ``claimed`` those of the partitions' primaries.
``changes`` says what to tell the consumer; ``told`` gives back what was revoked before. A revoked
partition is given back only once the consumer was told, so the consumer can commit what it has
done; a consumer that does not ask for more within a session loses the partition.

A generation is held once: a grant that was lost or given back is not claimed again, even if an
answer names it again. Else a commit of changes that were delivered before the loss would move the
cursor under the feed that began after it. The coordinators see that the partition is not held, and
grant it with a higher generation.

Between members, safety does not rest on this module: a commit carries the generation of its grant,
and the primary refuses it once another member has claimed the cursor.

Pure: all times are seconds of one clock that never goes back, given by the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

from koinon.core.feeds import ChangeBatch, FeedPart, PartitionPosition
from koinon.core.target import Target

BEGINNING: Final = PartitionPosition()
PROGRESS_S: Final = 60.0
"""A position that advances without changes is committed at most so often, in seconds."""
PROGRESS_MIN: Final = 64
"""A position that advances by fewer sequences without a change is not committed: commits advance
the sequences of their partitions themselves.
"""


class Phase(Enum):
    """The phase of a partition that a consumer holds."""

    CLAIMING = "claiming"
    CLAIMED = "claimed"  # and the consumer was not told yet
    OWNED = "owned"
    REVOKED = "revoked"  # the consumer is to be told, and then it is given back


class Grant(NamedTuple):
    """A partition that the coordinators have granted."""

    keyspace_id: int
    generation: int


@dataclass(slots=True)
class Holding:
    """A partition that the consumer holds."""

    grant: Grant
    phase: Phase = Phase.CLAIMING
    committed: PartitionPosition = BEGINNING
    delivered: PartitionPosition = BEGINNING
    """The position after the last change that was delivered."""
    handled: PartitionPosition = BEGINNING
    """The position that was delivered when the consumer last asked for more."""
    committed_at: float = 0.0
    revoked_at: float = 0.0
    is_paused: bool = False


@dataclass(slots=True)
class OwnershipChange:
    """The news for the consumer, which come before more changes."""

    granted: list[int] = field(default_factory=list)
    revoked: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.granted or self.revoked)


class Membership:
    """The state of one member. ``session_s``: so long after it asked the coordinators last, and was
    answered, it counts as gone.
    """

    def __init__(self, session_s: float) -> None:
        self.session_s = session_s
        self.holdings: dict[int, Holding] = {}
        self.known_revision = 0  # of the last answer; 0: there was none in this session
        self.number = 0  # of the last request
        self.valid_until = 0.0  # the end of the session; 0: none has begun
        self._spent: dict[int, int] = {}  # the generation in which a partition was held last
        self._lost: set[int] = set()  # lost, and the consumer was not told
        self._told: dict[int, Grant] = {}  # the consumer is being told that these are revoked

    # --- the coordinators ------------------------------------------------------------------

    def next_number(self) -> int:
        """Return the number of the next request."""
        self.number += 1
        return self.number

    def held(self) -> dict[int, list[tuple[int, int]]]:
        """Return the (partition, generation) pairs that the next request names as held, by
        keyspace and in ascending order.
        """
        held: dict[int, list[tuple[int, int]]] = {}
        for p, holding in sorted(self.holdings.items()):
            grant = holding.grant
            held.setdefault(grant.keyspace_id, []).append((p, grant.generation))
        return held

    def answered(
        self, granted: Mapping[int, Grant], revision: int, asked_at: float, now: float
    ) -> list[int]:
        """Take the answer to the request that was sent at ``asked_at``. Return the partitions to
        claim.
        """
        self.valid_until = asked_at + self.session_s
        self.known_revision = revision
        for p, holding in list(self.holdings.items()):
            if granted.get(p) == holding.grant:
                continue
            if holding.phase in (Phase.CLAIMING, Phase.CLAIMED):
                self._drop(p)
            elif holding.phase is Phase.OWNED:
                holding.phase, holding.revoked_at = Phase.REVOKED, now
        fresh = [
            p
            for p, grant in granted.items()
            if p not in self.holdings and grant.generation > self._spent.get(p, 0)
        ]
        self.holdings.update((p, Holding(granted[p])) for p in fresh)
        return fresh

    def expire(self, now: float) -> bool:
        """Lose everything if the session is over; return whether it is."""
        if not self.valid_until or now < self.valid_until:
            return False
        self.lose(list(self.holdings))
        self.valid_until, self.known_revision = 0.0, 0
        return True

    def overdue(self, now: float) -> list[int]:
        """Lose the partitions that were revoked a session ago, and that the consumer has not given
        back; return them.
        """
        late = [
            p
            for p, holding in self.holdings.items()
            if holding.phase is Phase.REVOKED and now - holding.revoked_at >= self.session_s
        ]
        self.lose(late)
        return late

    # --- the partitions' primaries ---------------------------------------------------------

    def claimed(self, p: int, grant: Grant, position: PartitionPosition, now: float) -> bool:
        """Note that the cursor was claimed, and is at this position. Return whether the grant still
        holds.
        """
        holding = self.holdings.get(p)
        if holding is None or holding.grant != grant or holding.phase is not Phase.CLAIMING:
            return False
        holding.phase = Phase.CLAIMED
        holding.committed = holding.delivered = holding.handled = position
        holding.committed_at = now
        return True

    def holds(self, p: int, generation: int) -> bool:
        """Return whether the partition is held by a grant of this generation."""
        holding = self.holdings.get(p)
        return holding is not None and holding.grant.generation == generation

    def refused(self, p: int, generation: int) -> None:
        """Note that another member has claimed the cursor since the grant of this generation."""
        if self.holds(p, generation):
            self.lose((p,))

    def lose(self, partition_ids: Iterable[int]) -> None:
        """Hold these partitions no more; tell the consumer if it knew of them."""
        for p in partition_ids:
            if self._drop(p).phase in (Phase.OWNED, Phase.REVOKED):
                self._lost.add(p)

    def _drop(self, p: int) -> Holding:
        holding = self.holdings.pop(p)
        self._spent[p] = holding.grant.generation
        return holding

    # --- the consumer ----------------------------------------------------------------------

    def owned(self) -> list[int]:
        """Return the partitions whose changes may be delivered."""
        return sorted(p for p, one in self.holdings.items() if one.phase is Phase.OWNED)

    def changes(self) -> OwnershipChange:
        """Return the news for the consumer. Granted partitions are owned from now on."""
        change = OwnershipChange(revoked=sorted(self._lost))
        for p, holding in sorted(self.holdings.items()):
            if holding.phase is Phase.REVOKED:
                change.revoked.append(p)
                self._told[p] = holding.grant
            elif holding.phase is Phase.CLAIMED and p not in self._lost:
                holding.phase = Phase.OWNED
                change.granted.append(p)
        self._lost = set()
        return change

    def told(self) -> list[int]:
        """Note that the consumer was told of the last changes; return the partitions that are given
        back by this.
        """
        back = [
            p
            for p, grant in self._told.items()
            if p in self.holdings and self.holdings[p].grant == grant
        ]
        for p in back:
            self._drop(p)
        self._told = {}
        return back

    def asked(self) -> None:
        """Note that the consumer asks for more: it has handled what was delivered."""
        for holding in self.holdings.values():
            holding.handled = holding.delivered

    def deliver(self, parts: Iterable[FeedPart]) -> None:
        """Note that these changes are delivered."""
        for part in parts:
            if part.rows and part.partition_id in self.holdings:
                self.holdings[part.partition_id].delivered = part.after

    def committed(self, p: int, generation: int, position: PartitionPosition, now: float) -> None:
        """Note that the position was committed."""
        if self.holds(p, generation):
            holding = self.holdings[p]
            holding.committed, holding.committed_at = max(position, holding.committed), now

    def begun_again(self, p: int, generation: int, now: float) -> None:
        """Note that the cursor was put back to the beginning, and that changes come from there."""
        if self.holds(p, generation):
            holding = self.holdings[p]
            holding.committed = holding.delivered = holding.handled = BEGINNING
            holding.committed_at = now

    def is_news(self, p: int, generation: int, position: PartitionPosition) -> bool:
        """Return whether a commit of this position may move the cursor: not if it or a later one
        was committed, nor if it is of changes before the partition began again.
        """
        if not self.holds(p, generation):
            return True  # the primary decides
        holding = self.holdings[p]
        return holding.committed < position <= holding.delivered

    def uncommitted(self) -> dict[int, tuple[int, PartitionPosition]]:
        """Return the generation and position of each partition of which changes were handled that
        are not committed.
        """
        return {
            p: (holding.grant.generation, holding.handled)
            for p, holding in self.holdings.items()
            if holding.handled > holding.committed
        }

    def progress(
        self, reached: Mapping[int, PartitionPosition], now: float
    ) -> dict[int, tuple[int, PartitionPosition]]:
        """Return the generation and position to commit of each partition that has advanced far
        without a change, and of which all changes are committed. ``reached``: how far each was
        read.
        """
        due: dict[int, tuple[int, PartitionPosition]] = {}
        for p, place in reached.items():
            holding = self.holdings.get(p)
            if holding is None or holding.phase is not Phase.OWNED:
                continue
            is_settled = holding.delivered <= holding.committed
            is_far = place.sequence >= holding.committed.sequence + PROGRESS_MIN
            if is_settled and is_far and now - holding.committed_at >= PROGRESS_S:
                due[p] = holding.grant.generation, place
        return due


def split(
    part: FeedPart, keys: Sequence[bytes], versions: Sequence[int], at_most: int
) -> list[FeedPart]:
    """Split a part into parts of at most so many rows, each with the position after it. ``keys``
    and ``versions`` are those of the whole batch. Rows of one version (an atomic batch) stay
    together.

    Outside a backfill rows come in the order of their versions, and a position is a version. In a
    backfill they come in the order of their keys, and a position names the last key.
    """
    rows = range(part.start, part.end)
    before = part.before
    in_order = all(versions[row] <= versions[row + 1] for row in rows[:-1])
    if before.bound or part.after.bound or not in_order:
        bound = before.bound or part.after.bound or part.after.sequence
        places = [PartitionPosition(before.sequence, bound, b"\0" + keys[row]) for row in rows]
    else:
        places = [PartitionPosition(versions[row]) for row in rows]
    found: list[FeedPart] = []
    start = part.start
    for row, place in zip(rows[:-1], places, strict=False):
        is_whole = before.bound or part.after.bound or versions[row] != versions[row + 1]
        if row + 1 - start >= at_most and is_whole:
            found.append(FeedPart(part.partition_id, start, row + 1, before, place))
            start, before = row + 1, place
    return [*found, FeedPart(part.partition_id, start, part.end, before, part.after)]


@dataclass(frozen=True, slots=True)
class KeyspaceChanges:
    """Changes of one keyspace, and the parts of partitions with their generations."""

    target: Target
    batch: ChangeBatch
    parts: Sequence[FeedPart]
    generations: Mapping[int, int]
