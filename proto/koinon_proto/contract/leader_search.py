"""Finds the coordinators' leader: decides which member to ask next, and when to give up a call.

Only the leader answers; the other members refuse with ``NotLeaderError``, which names it where they
know it. A :class:`Route` remembers which member is believed to lead, for all calls of one caller. A
:class:`LeaderSearch` is one call: after each failure it says how long to wait before the next
attempt, or that there is none. Pure: ``server/leader_calls.py`` carries it out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from koinon_proto.contract.cluster_errors import NotLeaderError
from koinon_proto.contract.errors import (
    KoinonError,
    NotSentError,
    UnavailableError,
    UnknownFateError,
)

AGAIN_S_MIN = 0.1
"""A call is not made with less time: what is known of its fate is worth more than another try."""


class Repeat(Enum):
    """The failures after which a call is attempted again, besides a request that was not sent, or
    was sent to a member that does not lead.
    """

    NOTHING = "nothing"
    """The call may not be made twice: its first answer counts, or that there was none."""
    UNANSWERED = "unanswered"
    """The call does no harm twice; the leader's refusals are the caller's to deal with."""
    CHANGE = "change"
    """The call may be made twice, and passing refusals are waited out. It may have been applied
    if any attempt had no answer.
    """
    READ = "read"
    """As CHANGE, but the call changes nothing."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The time that an attempt may take, and the pause before the next; both grow up to their
    ``_max`` (0: they stay).
    """

    attempt_s: float = math.inf
    attempt_s_max: float = 0.0
    pause_s: float = 0.0
    pause_s_max: float = 0.0

    def slower(self) -> Pace:
        """Return the pace after one more failure."""
        return Pace(
            attempt_s=max(self.attempt_s, min(2 * self.attempt_s, self.attempt_s_max)),
            attempt_s_max=self.attempt_s_max,
            pause_s=max(self.pause_s, min(1.5 * self.pause_s, self.pause_s_max)),
            pause_s_max=self.pause_s_max,
        )


class Route:
    """The coordinators' addresses, and the member that is believed to lead.

    With addresses, members are asked in turn. Without, ``current`` is '' while it is not known who
    leads, and the caller finds that out by other means.
    """

    def __init__(self, addresses: Sequence[str] = (), current: str = "") -> None:
        self.addresses = list(addresses)
        self.current = current or next(iter(addresses), "")

    def follow(self, error: NotLeaderError, asked: str) -> None:
        """Go to the leader that a member has named; to the next member if it named none."""
        leader = error.leader_address
        if not leader or leader == asked:
            self.pass_over(asked)
            return
        self.current = leader
        if self.addresses and leader not in self.addresses:
            self.addresses.append(leader)

    def pass_over(self, asked: str) -> None:
        """Go to the next member."""
        places = {address: place for place, address in enumerate(self.addresses)}
        after = places.get(asked, -1) + 1
        self.current = self.addresses[after % len(places)] if places else ""


class LeaderSearch:
    """One call, from its first attempt to its end."""

    def __init__(
        self,
        route: Route,
        repeat: Repeat,
        *,
        pace: Pace = Pace(),
        deadline: float = math.inf,
        once_around: bool = False,
    ) -> None:
        """``deadline`` is by the clock that the driver reads. ``once_around``: as many attempts
        as there are addresses, and one more for a hint.
        """
        self.route = route
        self.asked = route.current  # whom the attempt under way asks; its driver may know better
        self._repeat = repeat
        self._pace = pace  # of the attempt under way
        self._deadline = deadline
        self._attempts_left = len(route.addresses) + 1 if once_around else math.inf
        self._error: KoinonError = UnavailableError(reason="no coordinator was asked")
        self._unknown = False  # an attempt was sent and had no answer

    def timeout_s(self, now: float) -> float:
        """Return how long the attempt that begins now may take."""
        return min(max(AGAIN_S_MIN, self._deadline - now), self._pace.attempt_s)

    def on_answer(self) -> None:
        """Note that the asked member has answered: it leads."""
        self.route.current = self.asked

    def on_failure(self, error: KoinonError, now: float) -> float | None:
        """Return the pause in seconds before ``asked`` is to be asked; None: the call has ended,
        with the error of ``failure``.
        """
        self._error = error
        self._unknown = self._unknown or error.maybe_applied
        goes_on = self._goes_on(error)
        if isinstance(error, NotLeaderError):
            self.route.follow(error, self.asked)
        elif goes_on or error.maybe_applied:
            self.route.pass_over(self.asked)
        self._attempts_left -= 1
        pause_s = self._pace.pause_s
        if not goes_on or self._attempts_left < 1 or self._deadline - now - pause_s < AGAIN_S_MIN:
            return None
        self._pace = self._pace.slower()
        self.asked = self.route.current
        return pause_s

    def _goes_on(self, error: KoinonError) -> bool:
        if self.found_no_leader:
            return True
        if error.maybe_applied:
            return self._repeat is not Repeat.NOTHING
        return error.retriable and self._repeat in (Repeat.CHANGE, Repeat.READ)

    @property
    def found_no_leader(self) -> bool:
        """Return whether the last attempt met no leader: nothing was done."""
        return isinstance(self._error, NotLeaderError | NotSentError)

    def failure(self) -> KoinonError:
        """Return the error with which the call ends: UnknownFateError if an attempt may have
        changed something, unless the leader has refused since, for good; otherwise the last
        attempt's error; UnavailableError for a read without an answer.
        """
        error = self._error
        if not (error.retriable or error.maybe_applied):
            return error
        reason = error.reason if isinstance(error, UnknownFateError) else str(error)
        if self._unknown and self._repeat in (Repeat.NOTHING, Repeat.CHANGE):
            return UnknownFateError(reason=f"the coordinators' leader: {reason}")
        if error.maybe_applied:
            return UnavailableError(reason=f"the coordinators' leader: {reason}")
        return error
