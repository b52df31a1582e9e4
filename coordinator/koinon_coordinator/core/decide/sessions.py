"""The sessions of nodes that the leader of one term believes alive: soft state, never in the log.

Decides when a node's session is over (then it may be fenced) and when the last lease that it may
hold is over (then its next process may register). Times are float seconds on a clock that runs
through suspend; ``now`` is an argument.

Why no stale lease can outlive what is decided here (``L`` lease, ``Q`` check-quorum, ``S``
session, ``Q + L < S``): a node serves until it *sent* an acknowledged heartbeat + ``L``, hence at
most until we *received* it + ``L``. A leader acknowledges only within ``Q`` of the send time of a
round that a quorum answered. A later leader was elected by a quorum that shares a member with that
one, and which voted after it had answered; so the leases of all earlier leaders end by
(this leader's beginning) + ``Q`` + ``L``, before the full session that everyone gets first.

A leader that was itself paused (its ticks are further apart than ``pause_s``) could receive nothing
in between, so that time does not count: sessions end later by as much, but at most a full session
from now. Without that limit, short pauses every second would keep dead nodes alive. A session is
over only when two ticks in a row find it so, and the event loop could deliver heartbeats between
them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from koinon_proto.contract.table import NodeNumber

NEVER = float("-inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionTimes:
    """The times of sessions, in seconds. ``pause_s``: ticks further apart mean that this process
    was paused.
    """

    heartbeat_interval_s: float
    session_timeout_s: float
    lease_s: float
    check_quorum_s: float
    pause_s: float


@dataclass(slots=True)
class _Session:
    ends_at: float
    lease_ends_at: float  # after it no process of this node holds a lease
    heard_at: float = NEVER  # the last heartbeat to this leader
    held: bool = False  # a command that ends this epoch is proposed: acknowledge no heartbeat
    challenger: str = ""  # another process that wants this id
    challenged_at: float = NEVER  # when it asked first


def may_acknowledge(now: float, quorum_contact_at: float | None, times: SessionTimes) -> bool:
    """Return whether a leader may give out leases now: a quorum answered it within check-quorum."""
    return quorum_contact_at is not None and now - quorum_contact_at <= times.check_quorum_s


class Sessions:
    """The sessions of one leader's term."""

    def __init__(
        self, times: SessionTimes, now: float, *, live: Iterable[tuple[NodeNumber, bool]] = ()
    ) -> None:
        """Begin a term: every live node gets a full session. ``live`` says of each whether its
        epoch is confirmed; under an unconfirmed one there was never a lease.
        """
        self.times = times
        self._ticked_at = now
        self._suspects: frozenset[NodeNumber] = frozenset()
        inherited = now + times.check_quorum_s + times.lease_s
        self._sessions = {
            number: _Session(now + times.session_timeout_s, inherited if confirmed else NEVER)
            for number, confirmed in live
        }

    def open(self, number: NodeNumber, now: float) -> None:
        """Open a new session for a node that registered. All leases of its earlier epochs are
        over.
        """
        self._sessions[number] = _Session(now + self.times.session_timeout_s, NEVER)

    def close(self, number: NodeNumber) -> None:
        """End the session of a node that was fenced."""
        self._sessions.pop(number, None)

    def hold(self, number: NodeNumber) -> None:
        """Note that a fence or registration of this node is proposed: acknowledge no heartbeat, and
        propose no second one.
        """
        if number in self._sessions:
            self._sessions[number].held = True

    def release(self, number: NodeNumber) -> None:
        """Continue the session: the proposed command had no effect, and never will."""
        if number in self._sessions:
            self._sessions[number].held = False

    def is_held(self, number: NodeNumber) -> bool:
        session = self._sessions.get(number)
        return session is not None and session.held

    def heard(self, number: NodeNumber, now: float) -> None:
        """Note a heartbeat of the current epoch, acknowledged or not."""
        session = self._sessions.get(number)
        if session is not None:
            session.heard_at = max(session.heard_at, now)
            session.ends_at = max(session.ends_at, now + self.times.session_timeout_s)

    def acknowledge(self, number: NodeNumber, received_at: float) -> bool:
        """Count the lease that an acknowledgement gives. Return False if the heartbeat must not be
        acknowledged.
        """
        session = self._sessions.get(number)
        if session is None or session.held:
            return False
        lease_ends_at = received_at + self.times.lease_s
        session.lease_ends_at = max(session.lease_ends_at, lease_ends_at)
        return True

    def heard_since_challenge(self, number: NodeNumber, challenger: str, now: float) -> bool:
        """Return whether the node has been heard since this challenger first asked for its id.

        This distinguishes a live node from one that just died and comes back elsewhere. True ends
        the challenge; so does a challenger that stays away for two session times.
        """
        session = self._sessions.get(number)
        if session is None:
            return False
        stale = now - session.challenged_at > 2 * self.times.session_timeout_s
        if session.challenger != challenger or stale:
            session.challenger, session.challenged_at = challenger, now
            return False
        if session.heard_at <= session.challenged_at:
            return False
        session.challenger, session.challenged_at = "", NEVER
        return True

    def is_live(self, number: NodeNumber, now: float) -> bool:
        session = self._sessions.get(number)
        return session is not None and now <= session.ends_at

    def heard_at(self, number: NodeNumber) -> float | None:
        """Return the time of the last heartbeat of the node's current epoch to this leader, or
        None.
        """
        session = self._sessions.get(number)
        return None if session is None or session.heard_at == NEVER else session.heard_at

    def ends_at(self, number: NodeNumber) -> float:
        session = self._sessions.get(number)
        return NEVER if session is None else session.ends_at

    def lease_ends_at(self, number: NodeNumber) -> float:
        """Return when the last possible lease under the node's current epoch is over."""
        session = self._sessions.get(number)
        return NEVER if session is None else session.lease_ends_at

    def due_at(self) -> float:
        """Return when the next session ends without a heartbeat; a past time if one has ended and
        ``tick`` has to confirm it. Held sessions are ended by their proposed command instead.
        """
        ends = (session.ends_at for session in self._sessions.values() if not session.held)
        return min(ends, default=float("inf"))

    def tick(self, now: float, *, quorum: bool = True) -> list[NodeNumber]:
        """Return the nodes whose sessions are over and that have no command proposed yet.

        Without a ``quorum`` nothing can be committed, so no session ends.
        """
        gap, self._ticked_at = now - self._ticked_at, now
        paused = gap > self.times.pause_s
        if paused:
            full = now + self.times.session_timeout_s
            for session in self._sessions.values():
                session.ends_at = max(session.ends_at, min(session.ends_at + gap, full))
        if paused or not quorum:
            self._suspects = frozenset()
            return []
        silent = frozenset(n for n, s in self._sessions.items() if now > s.ends_at and not s.held)
        expired = silent & self._suspects
        self._suspects = silent
        return sorted(expired)
