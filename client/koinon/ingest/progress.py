"""The progress of a bulk load, from the coordinators' answers over time. Pure: time is an argument.

Each phase follows from the load's state, except *prepare*: it begins when every task of the job has
ended, which Spark knows, and ends with the commit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from koinon.core.rate_window import RateWindow
from koinon.operate.loads_client import LoadState, LoadView

RATE_WINDOW_S = 4.0


class Phase(Enum):
    """The phase of a job; its value is its name for people."""

    STARTING = "starting"
    STAGING = "reading and staging"
    PREPARING = "preparing"
    MERGING = "merging"
    DONE = "done"
    ABORTED = "aborted"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A job's progress at one moment. ``rows_total`` and ``seconds_left`` are None if unknown;
    rates are recent rows per second. ``share`` is the done part of the phase, 0 to 1.
    """

    phase: Phase
    rows: int
    rows_total: int | None
    rows_per_second: float
    partitions: int
    partitions_merged: int
    share: float | None
    seconds_left: float | None


@dataclass(kw_only=True)
class LoadTracker:
    """Computes progress from successive views of a job's load. ``rows_total``: the number of rows
    in the source.
    """

    rows_total: int | None = None
    _began: dict[Phase, float] = field(default_factory=dict)
    _shares: RateWindow = field(default_factory=lambda: RateWindow(RATE_WINDOW_S))
    _phase: Phase = Phase.STARTING
    rows: int = 0
    bytes: int = 0

    def start(self, now: float) -> None:
        """Note the start of the job."""
        self._began = {Phase.STARTING: now}

    def update(self, view: LoadView | None, now: float, *, tasks_ended: bool = False) -> Snapshot:
        """Apply the present view of the load (None: it does not exist yet); return the job's
        progress.
        """
        phase = self._phase_of(view, tasks_ended=tasks_ended)
        self._phase = phase
        self._began.setdefault(phase, now)
        if view is not None:
            self.rows = max(self.rows, view.rows)
            self.bytes = max(self.bytes, view.bytes)
        return self._snapshot(view, now)

    def seconds(self, now: float) -> dict[Phase, float]:
        """Return the duration of each phase so far; the last one until ``now``."""
        marks = sorted(self._began.items(), key=lambda mark: mark[1])
        ends = [began for _, began in marks[1:]] + [now]
        return {phase: end - began for (phase, began), end in zip(marks, ends, strict=True)}

    def _phase_of(self, view: LoadView | None, *, tasks_ended: bool) -> Phase:
        if view is None:
            return self._phase
        match view.state:
            case LoadState.OPEN if tasks_ended:
                return Phase.PREPARING
            case LoadState.OPEN:
                return Phase.STAGING
            case LoadState.MERGING:
                return Phase.MERGING
            case LoadState.DONE:
                return Phase.DONE
            case LoadState.ABORTED:
                return Phase.ABORTED
            case _:
                return self._phase

    def _snapshot(self, view: LoadView | None, now: float) -> Snapshot:
        partitions = 0 if view is None else view.partitions
        merged = 0 if view is None else view.partitions_merged
        share = None
        if self._phase is Phase.STAGING and self.rows_total:
            share = min(1.0, self.rows / self.rows_total)
        elif self._phase is Phase.MERGING and partitions:
            share = merged / partitions
        elif self._phase is Phase.DONE:
            share = 1.0
        rows_per_second = self._rows_per_second(now)
        return Snapshot(
            phase=self._phase,
            rows=self.rows,
            rows_total=self.rows_total,
            rows_per_second=rows_per_second,
            partitions=partitions,
            partitions_merged=merged,
            share=share,
            seconds_left=self._seconds_left(share, rows_per_second, now),
        )

    def _seconds_left(
        self, share: float | None, rows_per_second: float, now: float
    ) -> float | None:
        """Return the seconds left in the phase. During staging the average rate is used, since
        tasks report at long intervals.
        """
        if share is None:
            return None
        if self._phase is Phase.STAGING:
            rows_left = (1 - share) * (self.rows_total or 0)
            return rows_left / rows_per_second if rows_per_second else None
        rate = self._shares.rate(share, now)
        return (1 - share) / rate if rate else None

    def _rows_per_second(self, now: float) -> float:
        """Return rows staged a second, from the load's first view to the end of staging."""
        began = self._began.get(Phase.STAGING)
        if began is None:
            return 0.0
        over = [self._began[phase] for phase in _AFTER_STAGING if phase in self._began]
        ended = min(over, default=now)
        return self.rows / (ended - began) if ended > began else 0.0


_AFTER_STAGING = (Phase.PREPARING, Phase.MERGING, Phase.DONE, Phase.ABORTED)
