"""Measures this node's own disk: how long the oldest commit has been out, and how long commits
take.

A commit group is *out* from its hand-over to the writer until the writer's answer. A hanging disk
raises no error: the group and all behind it are out for as long as it hangs. (The time begins again
when the disk completes other work in front of the group, like a take-over of the log.)

Time is counted by calls of ``look`` in small steps: a pause of this process, during which it could
receive no answer, does not count against the disk. Pure: the driver reports each event with its
time.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from koinon_node.core.writes.commit_group import CommitGroup

_STEP_S_MAX = 0.25  # counted per look at most
_RECENT, _RECENT_S = 64, 60.0  # commits and seconds of the median commit time
_NEVER = float("-inf")


class DiskHealth:
    """``hangs``: at the last look the oldest group had been out for longer than the timeout."""

    def __init__(self) -> None:
        self.hangs = False
        self.out_s = 0.0  # how long the oldest group has been out, seconds
        self._out: deque[CommitGroup] = deque()  # oldest first; ``sent_at``: time of hand-over
        self._looked_at = _NEVER  # time of the last look, monotonic seconds
        self._progressed_at = _NEVER  # time of the last ``progressed``, monotonic seconds
        self._seen = 0  # number of the oldest group at the last look; 0: none was out
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RECENT)  # (time, duration in s)

    @property
    def oldest(self) -> int:
        """The number of the oldest group that is out; 0 if none is out."""
        return self._out[0].number if self._out else 0

    @property
    def out_since(self) -> float:
        """Return the time of the oldest group's hand-over, or of later progress of the disk. Only
        valid while a group is out.
        """
        return max(self._out[0].sent_at, self._progressed_at)

    def handed_over(self, group: CommitGroup) -> None:
        self._out.append(group)

    def answered(self, now: float) -> float:
        """Note the answer to the oldest group; return how long it was out, in seconds."""
        took_s = max(0.0, now - self._out.popleft().sent_at)
        self._recent.append((now, took_s))
        self.hangs, self.out_s = False, 0.0
        return took_s

    def progressed(self, now: float) -> None:
        """Note that the disk completed other work in front of the groups that are out."""
        self.hangs, self.out_s, self._progressed_at = False, 0.0, now

    def look(self, now: float, timeout_s: float) -> None:
        """Count the time since the last look."""
        step_s = min(now - self._looked_at, _STEP_S_MAX)
        self._looked_at = now
        oldest = self.oldest
        self.out_s = self.out_s + step_s if oldest and oldest == self._seen else 0.0
        self._seen = oldest
        self.hangs = self.out_s > timeout_s

    def typical_s(self, now: float) -> float:
        """Return the median duration of the last commits, in seconds; 0 if the last minute had
        none.
        """
        recent = [took_s for at, took_s in list(self._recent) if now - at <= _RECENT_S]
        return median(recent) if recent else 0.0
