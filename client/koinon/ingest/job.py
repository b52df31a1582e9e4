"""One bulk load by Spark, observed while it runs.

The job runs on the caller's thread (Spark finds Python data sources by the thread's session). A
watcher thread asks the coordinators for the load's progress. An interruption aborts the load and
cancels Spark's tasks, unless the load is committed by then: a committed load is merged in any case,
even if no program waits for it.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from koinon.ingest.failures import explained
from koinon.ingest.opened_rows import Part
from koinon.ingest.progress import LoadTracker, Phase, Snapshot
from koinon.ingest.settings import Settings
from koinon.operate.loads_client import LoadsClient, LoadState, LoadView
from koinon.spark.options import write_options
from koinon_proto.contract.cluster_errors import LoadClosedError
from koinon_proto.contract.errors import KoinonError

POLL_S = 0.1
SETTLE_S = 30.0
DESCRIPTION_CHARS_MAX = 160
ABORT_REASON = "koinon ingest gave up"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a job. ``state`` is its load's: None if it failed before a load was opened, or
    if unknown; ``error``: why Spark failed; seconds by phase.
    """

    load_id: int
    job_id: str
    state: LoadState | None
    rows: int
    bytes: int
    seconds: dict[Phase, float]
    interrupted: bool
    error: KoinonError | None


@dataclass(kw_only=True)
class Job:
    """Writes one DataFrame. ``rows_total``: its number of rows, if known. ``what``: the data's
    description for people. ``parts``: the same rows, if tasks read them themselves
    (``opened_rows``).
    """

    frame: Any
    settings: Settings
    loads: LoadsClient
    rows_total: int | None = None
    what: str = "a DataFrame"
    parts: Sequence[Part] | None = None
    _token: str = field(default_factory=lambda: f"[{uuid.uuid4().hex[:12]}]")

    def run(
        self,
        on_progress: Callable[[Snapshot], None] = lambda _snapshot: None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """Write the rows; return the outcome, which includes errors of the job.

        Args:
            on_progress: called several times a second, on another thread.
            interrupted: asked several times a second; once it returns True, the job is cancelled. A
                KeyboardInterrupt ends the waiting at once.
        """
        tracker = LoadTracker(rows_total=self.rows_total)
        tracker.start(time.monotonic())
        error: BaseException | None = None
        with self._watched(tracker, on_progress, interrupted):
            try:
                self._save()
            except (Exception, KeyboardInterrupt) as raised:
                error = raised
        view = self._final_view(abort=error is not None)
        now = time.monotonic()
        on_progress(tracker.update(view, now))
        state = None if view is None else view.state
        # A closed terminal also ends Spark's JVM: the error is then one of its connection.
        stopped = isinstance(error, KeyboardInterrupt) or (error is not None and interrupted())
        return Outcome(
            load_id=0 if view is None else view.load_id,
            job_id="" if view is None else view.job_id,
            state=LoadState.DONE if error is None else state,
            rows=tracker.rows if view is None else view.rows,
            bytes=tracker.bytes if view is None else view.bytes,
            seconds=tracker.seconds(now),
            interrupted=stopped,
            error=explained(error) if error is not None and not stopped else None,
        )

    def _save(self) -> None:
        context = self._context
        options = self.settings.options(context.defaultParallelism)
        description = f"{self.what[:DESCRIPTION_CHARS_MAX]} {self._token}"
        context.setJobGroup(self._token, "koinon ingest", interruptOnCancel=True)
        if self.parts is not None:
            overwrite = self.settings.mode == "overwrite"
            parsed = write_options({**options, "description": description}, overwrite=overwrite)
            columns = self.frame.schema.jsonValue()["fields"]
            fields = [(column["name"], column["type"]) for column in columns]
            from koinon.ingest.parts import save  # these imports need the spark extra
            from koinon.spark.cluster import opened

            save(context, self.parts, fields, opened(parsed), overwrite=overwrite)
            return
        writer = self.frame.write.format("koinon").options(**options, description=description)
        writer.mode(self.settings.mode).save()

    @property
    def _context(self) -> Any:
        return self.frame.sparkSession.sparkContext

    @contextlib.contextmanager
    def _watched(
        self,
        tracker: LoadTracker,
        on_progress: Callable[[Snapshot], None],
        interrupted: Callable[[], bool],
    ) -> Iterator[None]:
        """Watch the load during the block, and raise the watcher's exception, if any."""
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]

        ended = threading.Event()
        raised: list[BaseException] = []

        def watch() -> None:
            try:
                while not ended.wait(POLL_S):
                    view = self._view()
                    ours = self._tasks_ended()
                    on_progress(tracker.update(view, time.monotonic(), tasks_ended=ours))
                    if interrupted():
                        self._cancel_job(view)
            except (Py4JError, OSError):  # Spark is gone; the job's own call reports it
                return
            except BaseException as error:
                raised.append(error)

        watcher = threading.Thread(target=watch, name="ingest-watch", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
        if raised:
            raise raised[0]

    def _cancel_job(self, view: LoadView | None) -> None:
        """Abort the load and cancel Spark's tasks, unless the load is committed."""
        if view is not None and view.state is not LoadState.OPEN:
            return
        if view is not None:
            with contextlib.suppress(KoinonError):  # at the latest when the job has ended
                self.loads.abort(view.load_id, reason=ABORT_REASON)
        self._context.cancelJobGroup(self._token)

    def _view(self) -> LoadView | None:
        """Return this job's load as the coordinators know it; None if they do not answer."""
        with contextlib.suppress(KoinonError):
            return self._ours()
        return None

    def _ours(self) -> LoadView | None:
        """Return this job's load; None if it does not exist, or no longer. Raises as LoadsClient
        does.
        """
        ours = [view for view in self.loads.loads() if view.description.endswith(self._token)]
        return ours[-1] if ours else None

    def _tasks_ended(self) -> bool:
        tracker = self._context.statusTracker()
        jobs = [tracker.getJobInfo(number) for number in tracker.getJobIdsForGroup(self._token)]
        return bool(jobs) and all(job is not None and job.status == "SUCCEEDED" for job in jobs)

    def _final_view(self, *, abort: bool) -> LoadView | None:
        """Return this job's load after the job has ended; abort it first if it is open."""
        deadline = time.monotonic() + SETTLE_S
        view: LoadView | None = None
        while time.monotonic() < deadline:
            with contextlib.suppress(KoinonError):  # coordinators may be failing over
                view = self._ours()
                if view is None or not abort or view.state is not LoadState.OPEN:
                    return view
                with contextlib.suppress(LoadClosedError):  # the job itself closed it first
                    self.loads.abort(view.load_id, reason=ABORT_REASON)
                continue
            time.sleep(POLL_S)
        return view
