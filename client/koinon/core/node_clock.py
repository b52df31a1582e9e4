"""A node's clock, as one connection knows it: it tells the node until when a write may be taken up.

A write that is delayed on its way (a network that holds packets back, a node that stood still) must
not be applied long after its caller was told that its fate is unknown. So each write names a time
of the node's own clock, after which the node refuses it. The node has told its time as the
connection was opened:

    client   asks at s ----------------- has the answer ------- write with deadline d
    node              reads its clock: t                          takes it up until t + (d - s)

The node read its clock after s. So it takes up nothing before its time, and nothing later than d
plus the time that the opening took, plus what the two clocks have drifted apart since: a connection
older than ``AGE_S_MAX`` is replaced.
"""

from __future__ import annotations

from dataclasses import dataclass

AGE_S_MAX = 3_600.0
_MS_MAX = (1 << 62) - 1


@dataclass(frozen=True, slots=True)
class NodeClock:
    """``node_ms`` was the node's time, in ms, at some moment after ``asked_at`` (seconds, as
    deadlines have it).
    """

    asked_at: float
    node_ms: int

    def ms_at(self, deadline: float) -> int:
        """Return the node's time, in ms, after which it may not take up a write with this
        deadline.
        """
        return max(1, min(_MS_MAX, self.node_ms + int(1000 * (deadline - self.asked_at)) + 1))

    def is_old(self, now: float) -> bool:
        """Return whether the two clocks may have drifted apart too far."""
        return now - self.asked_at > AGE_S_MAX


def of_welcome(reply: bytes, asked_at: float) -> NodeClock | None:
    """Return the clock that a node's answer to KOINON.HELLO tells; None: it tells none."""
    _, _, told = reply.partition(b" ")
    return NodeClock(asked_at, int(told)) if told.isdigit() and len(told) < 19 else None
