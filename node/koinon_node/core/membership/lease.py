"""The lease: until when a node may serve; and what heartbeats show beside it: whether the event
loop turns, and how far the wall clocks are apart.

Invariant: a lease ends ``lease_s`` after the node *sent* the heartbeat that was acknowledged, on a
clock that runs through suspend (CLOCK_BOOTTIME in the driver), so that it always ends before the
coordinator's session for the node does. A lease belongs to one ``node_epoch``.
"""

from __future__ import annotations

from dataclasses import dataclass

from koinon_proto.process.running_time import RunningTime

PATIENCE_LEASES = 3.0
"""For so many leases the loop may give no sign: far longer than its longest piece of work."""
_STEP_S_MAX = 0.5
"""Between two looks no more than this counts: a process that was paused finds its loop as it left
it, and gives it time to answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """Leave to serve as ``node_epoch`` until ``until_s``."""

    node_epoch: int
    until_s: float

    def valid(self, now: float) -> bool:
        return now < self.until_s

    def renewed(self, node_epoch: int, sent_at: float, lease_s: float) -> Lease:
        """Return the lease after a heartbeat sent at ``sent_at`` was acknowledged; never a shorter
        one of the same epoch.
        """
        until_s = sent_at + lease_s
        if node_epoch == self.node_epoch:
            until_s = max(until_s, self.until_s)
        return Lease(node_epoch=node_epoch, until_s=until_s)


def heartbeat_timeout_s(lease_s: float, interval_s: float) -> float:
    """Return for how long a heartbeat's answer is waited for: as long as leaves, after an interval
    and this, a tenth of the lease to find another leader in.

    A leader that is short of CPU answers late, and never hears of a heartbeat that was given up
    before it came to it: to wait for less would lose leases, and the node would count as silent.
    """
    return max(lease_s / 3, 0.9 * lease_s - interval_s)


NO_LEASE = Lease(node_epoch=0, until_s=float("-inf"))


class LoopWatchdog:
    """Counts for how long the loop has answered nothing, in time in which this process ran."""

    def __init__(self, now: float) -> None:
        self._running = RunningTime(now, _STEP_S_MAX)
        self._answers = 0  # that were known at the last look
        self._answered_at = 0.0  # by the running time

    def silent_s(self, answers: int, now: float) -> float:
        """Return for how many seconds the number of answers has not grown. To be asked several
        times a second.
        """
        ran_s = self._running.at(now)
        if answers != self._answers:
            self._answers, self._answered_at = answers, ran_s
        return ran_s - self._answered_at


def clock_ahead_ms(leader_ms: float, now_ms: float, round_trip_ms: float) -> int:
    """Return by how many milliseconds this node's wall clock is ahead of the leader's, at least;
    negative: behind.

    The leader read its clock at some moment between the heartbeat's sending and its answer's
    arrival, so the difference is known up to the length of that round trip. Only the part that is
    sure is returned: a slow round trip makes it smaller, never larger, and sets off no alert.

    ``leader_ms`` is the leader's clock in its answer, ``now_ms`` this clock when the answer came.
    """
    least, most = now_ms - round_trip_ms - leader_ms, now_ms - leader_ms
    if least > 0:
        return round(least)
    return round(most) if most < 0 else 0
