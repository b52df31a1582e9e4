"""The lease, which limits until when a node may serve; a watchdog of the event loop; and the clock
difference that heartbeats show.

Invariant: a lease ends ``lease_s`` after the node *sent* the heartbeat that was acknowledged, on a
clock that runs through suspend (CLOCK_BOOTTIME in the driver), so that it always ends before the
coordinator's session for the node does. A lease belongs to one ``node_epoch``.
"""

from __future__ import annotations

from dataclasses import dataclass

from koinon_proto.process.running_time import RunningTime

PATIENCE_LEASES = 3.0
"""The event loop may be silent for so many lease times: far longer than its longest step."""
_STEP_S_MAX = 0.5
"""Counted per call at most: after a pause of the process its event loop gets time to answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """The right to serve as ``node_epoch`` until ``until_s``."""

    node_epoch: int
    until_s: float

    def valid(self, now: float) -> bool:
        return now < self.until_s

    def renewed(self, node_epoch: int, sent_at: float, lease_s: float) -> Lease:
        """Return the lease after the acknowledgement of a heartbeat sent at ``sent_at``. Within an
        epoch a lease never gets shorter.
        """
        until_s = sent_at + lease_s
        if node_epoch == self.node_epoch:
            until_s = max(until_s, self.until_s)
        return Lease(node_epoch=node_epoch, until_s=until_s)


def heartbeat_timeout_s(lease_s: float, interval_s: float) -> float:
    """Return the timeout of a heartbeat's answer: it leaves, after an interval
    and the timeout, a tenth of the lease to find another leader in.

    A leader short of CPU answers late, and never processes a heartbeat whose sender has given up:
    with a shorter timeout leases would be lost, and the node would count as silent.
    """
    return max(lease_s / 3, 0.9 * lease_s - interval_s)


NO_LEASE = Lease(node_epoch=0, until_s=float("-inf"))


class LoopWatchdog:
    """Measures how long the event loop has not answered, in time during which this process ran."""

    def __init__(self, now: float) -> None:
        self._running = RunningTime(now, _STEP_S_MAX)
        self._answers = 0  # the count at the last call
        self._answered_at = 0.0  # when the count grew last, in running time

    def silent_s(self, answers: int, now: float) -> float:
        """Return the seconds since the number of answers last grew. To be called several times a
        second.
        """
        ran_s = self._running.at(now)
        if answers != self._answers:
            self._answers, self._answered_at = answers, ran_s
        return ran_s - self._answered_at


def clock_ahead_ms(leader_ms: float, now_ms: float, round_trip_ms: float) -> int:
    """Return the least number of milliseconds by which this node's wall clock is ahead of the
    leader's; negative: behind.

    The leader read its clock between the heartbeat's sending and the answer's arrival, so the
    difference is known up to the round trip. The certain part of it is returned: a slow round trip
    makes it smaller, never larger, and causes no alert.

    ``leader_ms`` is the leader's clock in its answer, ``now_ms`` this clock when the answer came.
    """
    least, most = now_ms - round_trip_ms - leader_ms, now_ms - leader_ms
    if least > 0:
        return round(least)
    return round(most) if most < 0 else 0
