"""Decides whether and when a failed attempt is tried again, by the error's class, never by text.

What an attempt may end with, beside a reply:

- a typed refusal: nothing was applied. Retried if its class says ``retriable``.
- ``QuotaExceededError``, one of these: after the time that it names, and a back-off on top that
  grows with what waits, so that those who wait together do not all come together; within a second
  anyway, since a limit may be lifted, and those who wait are not told.
- ``NotSentError``: the request never left, because there was no connection. Retried.
- ``UnknownFateError``: it left, and no answer came. A read is retried. A write is not, unless the
  caller opted in and it is unconditional: its effect then is that of writing once or twice.
- ``InternalError``: a defect on the other side, whose extent is unknown. Never retried; to a write
  its fate is unknown.
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
    """Try again when the table has news, at the latest after ``delay_s``. Before ``not_before_s``
    the answer would be the same, as far as is known: whose deadline is sooner need not wait.
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
"""Those that an operation ends with, as they are, when its deadline passes."""


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Backoff doubles from ``first_s`` to ``max_s``, each delay jittered down to its half. Where
    the partition is about to be served, here or elsewhere, it stays below ``changing_hands_s_max``;
    over a quota, whatever that asks for, below ``quota_s_max``. The jitter is ``random``'s.
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
        """Return how long to wait where a quota asks for ``not_before_s``."""
        wanted_s = not_before_s + self._jittered_s(attempt, self.quota_s_max)
        if wanted_s <= self.quota_s_max:
            return wanted_s
        return self.quota_s_max * self.random.uniform(0.5, 1.0)

    def _jittered_s(self, attempt: int, most_s: float) -> float:
        ceiling = min(most_s, self.first_s * (1 << min(attempt, 16)))
        return ceiling * self.random.uniform(0.5, 1.0)

    def decide(self, error: KoinonError, *, attempt: int, idempotent: bool) -> RetryAfter | None:
        """Return when to try again; None: the error is final.

        ``idempotent`` says that an attempt of unknown fate may be repeated: true of reads, and of
        unconditional writes whose caller opted in.
        """
        unknown = isinstance(error, UnknownFateError)
        moved = isinstance(error, WrongClusterError)  # others use an address of the table now
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
    """Return what the caller is told.

    ``maybe_applied`` says that an earlier attempt of this write has an unknown fate; then so has
    the write, whatever came of the last attempt. ``timed_out_ms`` is the deadline, if it passed.
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
