"""Counts the elections of the last minutes, so that operators see unstable leadership.

Pure: times are arguments, in seconds by a monotonic clock. It keeps a bounded number of events; if
there were more, the counts are too small, but still far above the threshold of a warning.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WINDOW_S = 600.0
_EVENTS_MAX = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class RecentElections:
    """The elections that a member has seen in the last ``watched_s`` seconds: how often the leader
    changed (or the same leader won a later term), and by how much the term has risen. ``quiet_s``:
    seconds since the last of both.
    """

    leader_changes: int
    terms: int
    watched_s: float
    quiet_s: float


class ElectionHistory:
    """The terms and leaders that one member has seen since it started."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._leader: tuple[int, str] | None = None  # term and id of the last known leader
        self._changes: deque[float] = deque(maxlen=_EVENTS_MAX)
        # When each term began here, the oldest first. The first entry is before the window, or the
        # very first term: the rise counts from it.
        self._terms: deque[tuple[float, int]] = deque(maxlen=_EVENTS_MAX)

    def note(self, now: float, term: int, leader_id: str | None) -> None:
        """Note the member's term and leader (None: unknown) at this time."""
        if not self._terms or term > self._terms[-1][1]:
            self._terms.append((now, term))
        if leader_id is None or self._leader == (term, leader_id):
            return
        if self._leader is not None:  # the first known leader may have led for long: no change
            self._changes.append(now)
        self._leader = term, leader_id

    def recent(self, now: float) -> RecentElections:
        """Return the counts of the last ``WINDOW_S`` seconds, or since the start."""
        since = now - WINDOW_S
        while self._changes and self._changes[0] < since:
            self._changes.popleft()
        while len(self._terms) > 1 and self._terms[1][0] < since:
            self._terms.popleft()
        last = max([self._began, *list(self._changes)[-1:], *(at for at, _ in self._terms)])
        return RecentElections(
            leader_changes=len(self._changes),
            terms=self._terms[-1][1] - self._terms[0][1] if self._terms else 0,
            watched_s=min(WINDOW_S, now - self._began),
            quiet_s=now - last,
        )
