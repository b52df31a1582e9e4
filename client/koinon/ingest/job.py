"""One bulk load by Spark, watched from beside it.

The job runs on the caller's thread (Spark finds Python data sources by the thread's session);
beside it, a watcher asks the coordinators how far its load is. An interruption aborts the load and
cancels Spark's tasks, unless it is committed by then: a committed load ends merged, even if no
program waits for it.
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
    """The end of a job. ``state`` is its load's: None if it failed before one was opened, or
    unknown; ``error`` why Spark gave up; seconds by phase.
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
    """Writes one DataFrame. ``rows_total``: how many rows it has, where that is known; ``what``
    says to people what is loaded. ``parts``: the same rows, for tasks to read (``opened_rows``).
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
        """Write, and return what became of it; errors of the job are in the outcome.

        Args:
            on_progress: called several times a second, by another thread.
            interrupted: asked as often; once it says so, the job is called off. A
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
        # A closed terminal ends Spark's JVM too: the error is then of the connection to it.
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
            from koinon.ingest.parts import save  # these need the spark extra
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
        """Watch the load for the length of the block, and raise what the watcher raised."""
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
                        self._call_off(view)
            except (Py4JError, OSError):  # Spark is gone, as the job's own call says
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

    def _call_off(self, view: LoadView | None) -> None:
        """Abort the load and cancel Spark's tasks, unless the load is committed."""
        if view is not None and view.state is not LoadState.OPEN:
            return
        if view is not None:
            with contextlib.suppress(KoinonError):  # at the latest when the job has ended
                self.loads.abort(view.load_id, reason=ABORT_REASON)
        self._context.cancelJobGroup(self._token)

    def _view(self) -> LoadView | None:
        """Our load, as the coordinators know it; None while they do not answer."""
        with contextlib.suppress(KoinonError):
            return self._ours()
        return None

    def _ours(self) -> LoadView | None:
        """Our load; None if there is none, or none any more. Raises as LoadsClient does."""
        ours = [view for view in self.loads.loads() if view.description.endswith(self._token)]
        return ours[-1] if ours else None

    def _tasks_ended(self) -> bool:
        tracker = self._context.statusTracker()
        jobs = [tracker.getJobInfo(number) for number in tracker.getJobIdsForGroup(self._token)]
        return bool(jobs) and all(job is not None and job.status == "SUCCEEDED" for job in jobs)

    def _final_view(self, *, abort: bool) -> LoadView | None:
        """Return our load now that the job has ended; one that is open is aborted first."""
        deadline = time.monotonic() + SETTLE_S
        view: LoadView | None = None
        while time.monotonic() < deadline:
            with contextlib.suppress(KoinonError):  # coordinators that fail over are waited for
                view = self._ours()
                if view is None or not abort or view.state is not LoadState.OPEN:
                    return view
                with contextlib.suppress(LoadClosedError):  # the job itself was faster
                    self.loads.abort(view.load_id, reason=ABORT_REASON)
                continue
            time.sleep(POLL_S)
        return view
