"""Decides whether and when a failed attempt is retried, by the error's class, never by its text.

An attempt ends with a reply or with one of these errors:

- a typed refusal: nothing was applied. Retried if its class says ``retriable``.
- ``QuotaExceededError``, one of these: retried after the time that it names plus a back-off that
  grows with the attempts, so that waiting operations do not all come back together. The wait is a
  second at most, since a quota may be lifted meanwhile without notice to the client.
- ``NotSentError``: the request never left, because there was no connection. Retried.
- ``UnknownFateError``: it left, and no reply came. A read is retried. A write is not, unless
  the caller opted in and it is unconditional: it is then applied once or twice.
- ``InternalError``: a defect of the server, whose extent is unknown. Never retried; a write then
  has an unknown fate.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from koinon_proto.contract.errors import (
    ClusterNotReadyError,
    InternalError,
    KoinonError,
    LeaseExpiredError,
    NotPrimaryError,
    NotSentError,
    PartitionOfflineError,
    QuotaExceededError,
    ResourceExhaustedError,
    TableBehindError,
    UnavailableError,
    UnknownFateError,
    WrongClusterError,
)


@dataclass(frozen=True, slots=True)
class RetryAfter:
    """Retry when the table has changed, after ``delay_s`` at the latest. Before ``not_before_s``
    the answer would be the same, as far as is known: an operation with an earlier deadline fails at
    once.
    """

    delay_s: float
    refresh: bool
    not_before_s: float = 0.0


AT_ONCE = RetryAfter(delay_s=0.0, refresh=False)


_CHANGING_HANDS = (
    LeaseExpiredError,
    NotPrimaryError,
    NotSentError,
    PartitionOfflineError,
    TableBehindError,
)


_ENDS_AS_IT_IS = (ClusterNotReadyError, QuotaExceededError, ResourceExhaustedError)
"""Errors that an operation reports unchanged when its deadline passes."""


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """The back-off doubles from ``first_s`` to ``max_s``; each delay is jittered between its half
    and its whole, by ``random``. While the partition changes its primary, the delay stays below
    ``changing_hands_s_max``; over a quota, whatever the quota asks for, below ``quota_s_max``.
    """

    first_s: float = 0.02
    max_s: float = 0.5
    changing_hands_s_max: float = 0.1
    quota_s_max: float = 1.0
    random: Random = field(default_factory=Random, repr=False, compare=False)

    def backoff_s(self, attempt: int, *, changing_hands: bool = False) -> float:
        most_s = min(self.max_s, self.changing_hands_s_max) if changing_hands else self.max_s
        return self._jittered_s(attempt, most_s)

    def over_quota_s(self, not_before_s: float, attempt: int) -> float:
        """Return the delay in seconds where a quota asks for ``not_before_s``."""
        wanted_s = not_before_s + self._jittered_s(attempt, self.quota_s_max)
        if wanted_s <= self.quota_s_max:
            return wanted_s
        return self.quota_s_max * self.random.uniform(0.5, 1.0)

    def _jittered_s(self, attempt: int, most_s: float) -> float:
        ceiling = min(most_s, self.first_s * (1 << min(attempt, 16)))
        return ceiling * self.random.uniform(0.5, 1.0)

    def decide(self, error: KoinonError, *, attempt: int, idempotent: bool) -> RetryAfter | None:
        """Return the conditions of the next attempt, or None if the error is final.

        ``idempotent``: an attempt of unknown fate may be repeated. True for reads, and for
        unconditional writes whose caller opted in.
        """
        unknown = isinstance(error, UnknownFateError)
        # another operation has moved to an address of the table by now
        moved = isinstance(error, WrongClusterError)
        if not error.retriable and not moved and not (unknown and idempotent):
            return None
        if isinstance(error, QuotaExceededError):
            not_before_s = error.retry_after_ms / 1000
            delay_s = self.over_quota_s(not_before_s, attempt)
            return RetryAfter(delay_s, refresh=False, not_before_s=not_before_s)
        lost = unknown or moved or isinstance(error, NotSentError)
        delay_s = self.backoff_s(attempt, changing_hands=isinstance(error, _CHANGING_HANDS))
        return RetryAfter(delay_s, refresh=error.stale_table or lost)


def final_error(
    error: KoinonError, *, write: bool, maybe_applied: bool, timed_out_ms: int | None = None
) -> KoinonError:
    """Return the error that the caller gets.

    ``maybe_applied``: an earlier attempt of this write has an unknown fate, and so has the write,
    whatever the last attempt's error. ``timed_out_ms``: the timeout, if the deadline passed.
    """
    if write and (maybe_applied or isinstance(error, InternalError)):
        if isinstance(error, UnknownFateError):
            return error
        return _caused(UnknownFateError(reason=str(error)), error)
    if isinstance(error, UnknownFateError) and not write:
        return _caused(UnavailableError(reason=error.reason), error)
    if isinstance(error, NotSentError) or (
        timed_out_ms is not None and error.retriable and not isinstance(error, _ENDS_AS_IT_IS)
    ):
        within = f"not served within {timed_out_ms} ms: " if timed_out_ms is not None else ""
        return _caused(UnavailableError(reason=f"{within}{error}"), error)
    return error


def _caused(error: KoinonError, cause: KoinonError) -> KoinonError:
    error.__cause__ = cause
    return error
