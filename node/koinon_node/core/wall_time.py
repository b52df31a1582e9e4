"""The time of day for expiry: the machine's wall clock, filtered against jumps.

NTP, hypervisors and people step a machine's clock, sometimes by a year and for a minute. Applied at
once, such a step would delete all records that expire within that year. If the clock were only kept
from going back, as is usual, expiry would stop for the following year. So this clock advances with
CLOCK_BOOTTIME, which is never set, and approaches the machine's clock:

- An error of up to 10 s is corrected gradually: time passes at half to one and a half the pace.
- A larger error, a *jump*, changes nothing until it has lasted for ten minutes, with the clock
  running evenly meanwhile. Then the jump is accepted, and time is stepped, forward or back.

What a read has told as expired is never served again, while this process leads it. That rests on
the removal for which the read waits (rule 13), and on this clock until then, and for as long as it
lives where the removal was not made durable (a full disk, say):

1. Time goes back by steps only: else it passes at half the pace at least.
2. There is no step back while the time is *held*, and none to before ``told_ms``.
3. A read that finds a record expired, by a ``now_ms`` that is not less than its expiry, holds the
   time from then on until the removal is durable. If it is not, it keeps ``told_ms`` at ``now_ms``
   before it lets go. So no later ``now_ms`` is less than the expiry of a record that is still there
   and was told as expired.

Pure: the driver reads both clocks.
"""

from __future__ import annotations

from enum import Enum, auto

JUMP_MS = 10_000
BELIEVED_AFTER_S = 600.0


class Change(Enum):
    """A change in the judgement of the machine's clock."""

    DOUBTED = auto()  # the clock jumped
    TAKEN_BACK = auto()  # the jump was undone before it was accepted
    BELIEVED = auto()  # the jump has lasted and was accepted


class WallTime:
    """The filtered Unix time in milliseconds."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.told_ms = 0.0
        """The earliest time to which a step may go back."""
        self._looked_at_s: float | None = None  # the last look, by CLOCK_BOOTTIME
        self._jump_ms = 0.0  # wall time minus boot time after the jump
        self._jumped_at_s: float | None = None  # when the jump began; None: no jump

    def look(self, wall_ms: float, boot_s: float, *, held: bool) -> Change | None:
        """Set ``now_ms``; return a change of the judgement. ``wall_ms`` is the machine's Unix time,
        ``boot_s`` the time by CLOCK_BOOTTIME in seconds.
        """
        if self._looked_at_s is None:
            self._looked_at_s, self.now_ms = boot_s, wall_ms
            return None
        passed_ms = max(0.0, boot_s - self._looked_at_s) * 1000
        self._looked_at_s = boot_s
        self.now_ms += passed_ms
        error_ms = wall_ms - self.now_ms
        if abs(error_ms) <= JUMP_MS:
            self.now_ms += min(max(error_ms, -passed_ms / 2), passed_ms / 2)
            returned = self._jumped_at_s is not None
            self._jumped_at_s = None
            return Change.TAKEN_BACK if returned else None
        jump_ms = wall_ms - boot_s * 1000
        if self._jumped_at_s is None or abs(jump_ms - self._jump_ms) > JUMP_MS:
            first = self._jumped_at_s is None
            self._jump_ms, self._jumped_at_s = jump_ms, boot_s
            return Change.DOUBTED if first else None
        back = error_ms < 0
        if boot_s - self._jumped_at_s < BELIEVED_AFTER_S or (back and held):
            return None
        # As far back as allowed; the rest counts as another jump.
        self.now_ms = max(wall_ms, min(self.told_ms, self.now_ms))
        self._jumped_at_s = None
        return Change.BELIEVED
