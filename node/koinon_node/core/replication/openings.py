"""The choice of the partitions that a follower opens next, and what operators see of those on their
way. Pure.

A returning node has thousands to open, of which most may lack nothing: then each costs no more than
a message and a part of a transaction, and they are opened by the hundred. What has to be pulled is
opened a few at a time, since what is streamed of it is kept back meanwhile. Only the answer says
which of the two it is. So as many are opened as, by the last answers, bring a few to pull.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from itertools import islice
from typing import NamedTuple, Protocol

from koinon_node.core.replication.replica_sync import (
    ON_THE_WAY,
    PULLING,
    Followed,
    Rank,
    ReplicaSync,
    Stage,
)

PULLED_MAX = {Rank.SETTLED: 16, Rank.ADDING: 32}
"""The most partitions that have to be pulled and may be on their way at once on this node, by rank;
there is no limit for those in sync. While others are on their way, none is begun that a move adds.
Of those that a move adds only the ones count that have not been pulled: a few more than are pulled
at once, so that pulling never waits for an answer, and no more.
"""
SETTLED_MAX = 1_024
"""The most ``SETTLED`` partitions that may be on their way at once, if none has to be pulled."""
_SHARE_AT_FIRST = 0.5  # taken to have to be pulled, of those that are opened before any answer
_SHARE_OF = 32  # openings, about, are what is known of the share that has to be pulled
REPORTED_MAX = 256
"""The most replicas that a heartbeat tells of: coordinators read each on their event loop."""


class SettledBound:
    """The limit of ``SETTLED`` partitions that are on their way at once, by what answers said."""

    def __init__(self) -> None:
        self._pulled_share = _SHARE_AT_FIRST  # of those opened lately that had to be pulled

    @property
    def most(self) -> int:
        """The limit: as many as bring ``PULLED_MAX`` to pull."""
        share = max(self._pulled_share, PULLED_MAX[Rank.SETTLED] / SETTLED_MAX)
        return int(PULLED_MAX[Rank.SETTLED] / share)

    def opened(self, followed: Followed) -> None:
        """Note that it was opened: its stage says what comes first."""
        if followed.want.rank is Rank.SETTLED:
            has_to_be_pulled = followed.stage is not Stage.JOINING
            self._pulled_share += (has_to_be_pulled - self._pulled_share) / _SHARE_OF


class Opener(Protocol):
    """The partitions followed at a primary, for ``choose_openings`` (``ReplicaSync``)."""

    def due(self, rank: Rank, now: float) -> Iterable[Followed]: ...


def on_the_way(followed: Iterable[ReplicaSync]) -> dict[Rank, int]:
    """Count what counts against the bounds, at all primaries."""
    counts = dict.fromkeys(Rank, 0)
    for one in followed:
        for (rank, stage), count in one.index.counts.items():
            if stage in (PULLING if rank is Rank.ADDING else ON_THE_WAY):
                counts[rank] += count
    return counts


def choose_openings(
    candidates: Opener,
    on_the_way: Mapping[Rank, int],
    now: float,
    *,
    settled_most: int = PULLED_MAX[Rank.SETTLED],
    paused: bool,
) -> list[Followed]:
    """Return which of the waiting partitions to open now, those in sync first."""
    most = {Rank.SETTLED: settled_most, Rank.ADDING: PULLED_MAX[Rank.ADDING]}
    chosen: list[Followed] = []
    begun = 0  # of ranks before
    for rank in Rank:
        if rank is Rank.ADDING and (paused or begun):
            break
        known = on_the_way.get(rank, 0)
        room = max(0, most[rank] - known) if rank in most else None
        taken = list(islice(candidates.due(rank, now), room))
        begun += known + len(taken)
        chosen += taken
    return chosen


# --- what operators see ------------------------------------------------------------------------


class ProgressStage(IntEnum):
    """The stages that operators see; numbers are those of the wire."""

    WAITING = 1
    SNAPSHOT = 2
    CATCH_UP = 3
    LIVE = 4


_SHOWN = {
    Stage.WAITING: ProgressStage.WAITING,
    Stage.OPENING: ProgressStage.WAITING,
    Stage.SNAPSHOT: ProgressStage.SNAPSHOT,
    Stage.LIVE: ProgressStage.LIVE,
}


class Progress(NamedTuple):
    """The progress of a replica that is not in sync. Totals are the primary's estimate."""

    partition_id: int
    stage: ProgressStage
    records: int
    bytes: int
    records_total: int
    bytes_total: int


def reported(followed: Iterable[Followed]) -> list[Progress]:
    """Return the progress of the replicas that a heartbeat tells of, none of them in sync: those
    that a move adds, then those of others that have begun.
    """
    adding: list[Followed] = []
    begun: list[Followed] = []
    for one in followed:
        rank = one.want.rank
        if rank is Rank.ADDING:
            adding.append(one)
        elif rank is Rank.SETTLED and one.stage not in (Stage.WAITING, Stage.OPENING):
            begun.append(one)
    return list(map(_progress_of, (adding + begun)[:REPORTED_MAX]))


def _progress_of(followed: Followed) -> Progress:
    return Progress(
        partition_id=followed.partition_id,
        stage=_SHOWN.get(followed.stage, ProgressStage.CATCH_UP),
        records=followed.records,
        bytes=followed.size,
        records_total=followed.opened.records,
        bytes_total=followed.opened.size,
    )
