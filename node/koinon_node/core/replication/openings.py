"""Chooses the partitions that a follower opens next, and reports the progress of copies to
operators. Pure.

A returning node has thousands of partitions to open, and most may lack nothing: each of those costs
a message and a part of a transaction, so they are opened by the hundred. A partition that has to
pull records costs memory, since streamed batches are kept back meanwhile: few of those are opened
at a time. Only the primary's answer tells the two apart. So the follower opens as many partitions
as will, by the share in recent answers, bring a few to pull.
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
"""The most partitions on this node that may pull at once, by rank; there is no limit for in-sync
partitions. No partition that a move adds is opened while partitions of the other ranks are on their
way. Of the partitions that a move adds, only those count whose pass is not over. Their limit is a
little above the passes at once (stream_context.py), so that passes never wait for an answer.
"""
SETTLED_MAX = 1_024
"""The most ``SETTLED`` partitions that may be on their way at once, if none has to pull."""
_SHARE_AT_FIRST = 0.5  # the assumed share of partitions that have to pull, before any answer
_SHARE_OF = 32  # the share is averaged over about so many openings
REPORTED_MAX = 256
"""The most replicas whose progress a heartbeat reports: coordinators parse each on their event
loop."""


class SettledBound:
    """The limit of ``SETTLED`` partitions on their way at once, estimated from the answers so
    far.
    """

    def __init__(self) -> None:
        self._pulled_share = _SHARE_AT_FIRST  # of recently opened partitions that had to pull

    @property
    def most(self) -> int:
        """The limit: so many openings lead to about ``PULLED_MAX`` passes."""
        share = max(self._pulled_share, PULLED_MAX[Rank.SETTLED] / SETTLED_MAX)
        return int(PULLED_MAX[Rank.SETTLED] / share)

    def opened(self, followed: Followed) -> None:
        """Count an answered opening: its stage says whether it has to pull."""
        if followed.want.rank is Rank.SETTLED:
            has_to_be_pulled = followed.stage is not Stage.JOINING
            self._pulled_share += (has_to_be_pulled - self._pulled_share) / _SHARE_OF


class Opener(Protocol):
    """The partitions followed at a primary, for ``choose_openings`` (``ReplicaSync``)."""

    def due(self, rank: Rank, now: float) -> Iterable[Followed]: ...


def on_the_way(followed: Iterable[ReplicaSync]) -> dict[Rank, int]:
    """Count the partitions on their way at all primaries, by rank, as the limits count them."""
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
    """Return the waiting partitions to open now, in-sync ones first."""
    most = {Rank.SETTLED: settled_most, Rank.ADDING: PULLED_MAX[Rank.ADDING]}
    chosen: list[Followed] = []
    begun = 0  # partitions of the ranks so far that are on their way
    for rank in Rank:
        if rank is Rank.ADDING and (paused or begun):
            break
        known = on_the_way.get(rank, 0)
        room = max(0, most[rank] - known) if rank in most else None
        taken = list(islice(candidates.due(rank, now), room))
        begun += known + len(taken)
        chosen += taken
    return chosen


# --- progress for operators --------------------------------------------------------------------


class ProgressStage(IntEnum):
    """The stages that operators see, with their numbers on the wire."""

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
    """The progress of a replica that is not in sync. The totals are the primary's estimate."""

    partition_id: int
    stage: ProgressStage
    records: int
    bytes: int
    records_total: int
    bytes_total: int


def reported(followed: Iterable[Followed]) -> list[Progress]:
    """Return the progress of replicas that are not in sync, for a heartbeat: first the ones that a
    move adds, then the others that have begun.
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
