"""A node's clock, as one connection knows it: a write carries a time of this clock after which the
node must refuse it.

A write that is delayed on its way (packets held back in the network, a node that stood still) must
not be applied long after its caller was told that its fate is unknown. So each write carries a time
of the node's own clock, after which the node refuses it. The node has told its time when the
connection was opened:

    client   asks at s ------------- has the reply ------- write with deadline d
    node              reads its clock: t                   accepts it until t + (d - s)

The node read its clock after s. So it never refuses a write before d, and accepts none later than d
plus the time that the opening took, plus the drift between the two clocks since: a connection older
than ``AGE_S_MAX`` is replaced.
"""

from __future__ import annotations

from dataclasses import dataclass

AGE_S_MAX = 3_600.0
_MS_MAX = (1 << 62) - 1


@dataclass(frozen=True, slots=True)
class NodeClock:
    """The node's time ``node_ms`` (ms) at some moment after ``asked_at`` (seconds, by the client's
    clock).
    """

    asked_at: float
    node_ms: int

    def ms_at(self, deadline: float) -> int:
        """Return the node's time in ms after which it must refuse a write with this deadline."""
        return max(1, min(_MS_MAX, self.node_ms + int(1000 * (deadline - self.asked_at)) + 1))

    def is_old(self, now: float) -> bool:
        """Return whether the two clocks may have drifted apart too far."""
        return now - self.asked_at > AGE_S_MAX


def of_welcome(reply: bytes, asked_at: float) -> NodeClock | None:
    """Return the clock in a node's reply to KOINON.HELLO; None: the reply has none."""
    _, _, told = reply.partition(b" ")
    return NodeClock(asked_at, int(told)) if told.isdigit() and len(told) < 19 else None
