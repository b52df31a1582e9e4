"""Measures this node's own disk: for how long it has not answered, and how long it takes.

A commit group is *out* from when it was handed to the writer until that has answered. A disk that
hangs fails nothing: the group is just out, for as long as it hangs, and so is all behind it. (The
time begins anew when the disk has answered something that came before the group: what the store
takes over from the log.)

Time counts in looks, by small steps: a pause of this process, in which no answer could be taken, is
not the disk's. Pure: the driver hands over, answers and looks, each with the time.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from koinon_node.core.writes.commit_group import CommitGroup

_STEP_S_MAX = 0.25  # from one look to the next
_RECENT, _RECENT_S = 64, 60.0  # commits that tell how long one usually takes
_NEVER = float("-inf")


class DiskHealth:
    """``hangs``: the oldest group has been out for longer than the time-out of the newest look."""

    def __init__(self) -> None:
        self.hangs = False
        self.out_s = 0.0  # for how long the oldest group has been out
        self._out: deque[CommitGroup] = deque()  # oldest first; ``sent_at``: when handed over
        self._looked_at = _NEVER  # monotonic seconds
        self._progressed_at = _NEVER  # monotonic seconds
        self._seen = 0  # the group that was the oldest at the last look; 0: none was out
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RECENT)  # (when, seconds)

    @property
    def oldest(self) -> int:
        """The number of the oldest group that is out; 0 if none is."""
        return self._out[0].number if self._out else 0

    @property
    def out_since(self) -> float:
        """Return when the oldest group was handed over, or when the disk answered something after
        that which came before it; only while one is out.
        """
        return max(self._out[0].sent_at, self._progressed_at)

    def handed_over(self, group: CommitGroup) -> None:
        self._out.append(group)

    def answered(self, now: float) -> float:
        """The oldest group has been answered; return how long it was out, in seconds."""
        took_s = max(0.0, now - self._out.popleft().sent_at)
        self._recent.append((now, took_s))
        self.hangs, self.out_s = False, 0.0
        return took_s

    def progressed(self, now: float) -> None:
        """The disk has answered something that came before what is out."""
        self.hangs, self.out_s, self._progressed_at = False, 0.0, now

    def look(self, now: float, timeout_s: float) -> None:
        """Let time pass."""
        step_s = min(now - self._looked_at, _STEP_S_MAX)
        self._looked_at = now
        oldest = self.oldest
        self.out_s = self.out_s + step_s if oldest and oldest == self._seen else 0.0
        self._seen = oldest
        self.hangs = self.out_s > timeout_s

    def typical_s(self, now: float) -> float:
        """Return the median of how long the last commits took; 0 where the last minute had none."""
        recent = [took_s for at, took_s in list(self._recent) if now - at <= _RECENT_S]
        return median(recent) if recent else 0.0
