"""A job and its load, side by side: Spark and the coordinators are played."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from koinon.ingest import session
from koinon.ingest.job import Job
from koinon.ingest.progress import Phase, Snapshot
from koinon.ingest.settings import Settings
from koinon.operate.loads_client import LoadsClient, LoadState, LoadView
from koinon_proto.contract.cluster_errors import LoadClosedError
from koinon_proto.contract.errors import UnavailableError
from tests.ingest.test_progress import view

pytest.importorskip("pyspark", reason="the spark extra is not installed")

WAIT_S = 60.0


@dataclass
class PlayedLoads:
    """The coordinators: they know at most one load."""

    load: LoadView | None = None
    aborted: list[str] = field(default_factory=list)
    silent: bool = False

    def loads(self) -> tuple[LoadView, ...]:
        if self.silent:
            raise UnavailableError(reason="nobody")
        other = replace(view(LoadState.OPEN, rows=99), description="somebody else's", load_id=3)
        return (other,) if self.load is None else (other, self.load)

    def abort(self, load_id: int, *, reason: str = "") -> None:
        assert self.load is not None
        if self.load.state is not LoadState.OPEN:
            raise LoadClosedError(load_id=load_id, state=self.load.state.name.lower())
        self.aborted.append(reason)
        self.load = replace(self.load, state=LoadState.ABORTED)


class PlayedSpark:
    """A DataFrame whose ``save`` is a function of the test; cancelling sets ``cancelled``."""

    def __init__(self, save: Callable[[PlayedSpark], None]) -> None:
        self.options_given: dict[str, str] = {}
        self.mode_given = ""
        self.cancelled = threading.Event()
        self.status = "RUNNING"
        self._save = save
        tracker = SimpleNamespace(
            getJobIdsForGroup=lambda group: [1],
            getJobInfo=lambda number: SimpleNamespace(status=self.status),
        )
        context = SimpleNamespace(
            defaultParallelism=2,
            setJobGroup=lambda *args, **options: None,
            cancelJobGroup=lambda group: self.cancelled.set(),
            statusTracker=lambda: tracker,
        )
        self.sparkSession = SimpleNamespace(sparkContext=context)

    @property
    def write(self) -> PlayedSpark:
        return self

    def format(self, name: str) -> PlayedSpark:
        assert name == "koinon"
        return self

    def options(self, **given: str) -> PlayedSpark:
        self.options_given = given
        return self

    def mode(self, name: str) -> PlayedSpark:
        self.mode_given = name
        return self

    def save(self) -> None:
        self._save(self)


SETTINGS = Settings(coordinators="h:1", key="id", encoding="json", bytes_per_second=1000)


def job(spark: PlayedSpark, loads: PlayedLoads) -> Job:
    return Job(frame=spark, settings=SETTINGS, loads=cast(LoadsClient, loads), rows_total=10)


class Phases:
    """Collects the phases that are shown; a test waits for one."""

    def __init__(self) -> None:
        self.shown: list[Phase] = []
        self._seen = {phase: threading.Event() for phase in Phase}

    def __call__(self, snapshot: Snapshot) -> None:
        if self.shown[-1:] != [snapshot.phase]:
            self.shown.append(snapshot.phase)
        self._seen[snapshot.phase].set()

    def wait(self, phase: Phase) -> None:
        assert self._seen[phase].wait(WAIT_S)


def ours(spark: PlayedSpark, state: LoadState, **fields: int) -> LoadView:
    return replace(view(state, **fields), description=spark.options_given["description"])


def test_job_that_ends_well_shows_every_phase_and_counts_its_own_load() -> None:
    loads, phases = PlayedLoads(), Phases()

    def save(spark: PlayedSpark) -> None:
        phases.wait(Phase.STARTING)
        loads.load = ours(spark, LoadState.OPEN, rows=4)
        phases.wait(Phase.STAGING)
        spark.status = "SUCCEEDED"
        phases.wait(Phase.PREPARING)
        loads.load = ours(spark, LoadState.MERGING, rows=10, partitions=4)
        phases.wait(Phase.MERGING)
        loads.load = ours(spark, LoadState.DONE, rows=10, bytes=500)

    spark = PlayedSpark(save)
    outcome = job(spark, loads).run(phases)
    assert (outcome.state, outcome.rows, outcome.bytes) == (LoadState.DONE, 10, 500)
    assert outcome.error is None
    assert phases.shown == [
        Phase.STARTING,
        Phase.STAGING,
        Phase.PREPARING,
        Phase.MERGING,
        Phase.DONE,
    ]
    assert not loads.aborted
    assert spark.mode_given == "append"
    assert spark.options_given["keyColumn"] == "id"
    assert spark.options_given["maxBytesPerSecond"] == "500"
    assert "valueColumn" not in spark.options_given


def test_job_that_fails_aborts_its_load_and_tells_why() -> None:
    loads = PlayedLoads()

    def save(spark: PlayedSpark) -> None:
        loads.load = ours(spark, LoadState.OPEN, rows=4)
        raise RuntimeError("koinon_proto.contract.errors.InvalidArgumentError: column id: null key")

    outcome = job(PlayedSpark(save), loads).run()
    assert str(outcome.error) == "column id: null key"
    assert outcome.state is LoadState.ABORTED
    assert len(loads.aborted) == 1


def test_interrupted_job_is_cancelled_and_leaves_no_load() -> None:
    loads, phases = PlayedLoads(), Phases()

    def save(spark: PlayedSpark) -> None:
        loads.load = ours(spark, LoadState.OPEN, rows=4)
        spark.cancelled.wait(WAIT_S)
        raise RuntimeError("cancelled")

    spark = PlayedSpark(save)
    outcome = job(spark, loads).run(phases, lambda: Phase.STAGING in phases.shown)
    assert spark.cancelled.is_set()
    assert outcome.interrupted
    assert outcome.state is LoadState.ABORTED
    assert len(loads.aborted) == 1


def test_interruption_of_a_committed_job_waits_for_its_merge() -> None:
    loads, phases, asked = PlayedLoads(), Phases(), threading.Event()

    def interrupted() -> bool:
        if Phase.MERGING in phases.shown:
            asked.set()
        return asked.is_set()

    def save(spark: PlayedSpark) -> None:
        loads.load = ours(spark, LoadState.MERGING, rows=10, partitions=4)
        assert asked.wait(WAIT_S)
        loads.load = ours(spark, LoadState.DONE, rows=10)

    spark = PlayedSpark(save)
    outcome = job(spark, loads).run(phases, interrupted)
    assert (outcome.state, outcome.interrupted) == (LoadState.DONE, False)
    assert not loads.aborted
    assert not spark.cancelled.is_set()


def test_second_interruption_leaves_a_committed_job_to_itself() -> None:
    loads, phases = PlayedLoads(), Phases()

    def save(spark: PlayedSpark) -> None:
        loads.load = ours(spark, LoadState.MERGING, rows=10, partitions=4)
        phases.wait(Phase.MERGING)
        raise KeyboardInterrupt

    outcome = job(PlayedSpark(save), loads).run(phases)
    assert (outcome.state, outcome.interrupted) == (LoadState.MERGING, True)
    assert outcome.error is None
    assert not loads.aborted


def test_job_goes_on_while_no_coordinator_answers() -> None:
    loads, phases = PlayedLoads(), Phases()

    def save(spark: PlayedSpark) -> None:
        loads.load = ours(spark, LoadState.OPEN, rows=4)
        phases.wait(Phase.STAGING)
        loads.silent = True
        spark.status = "SUCCEEDED"
        loads.load = ours(spark, LoadState.DONE, rows=10)
        loads.silent = False

    outcome = job(PlayedSpark(save), loads).run(phases)
    assert (outcome.state, outcome.rows) == (LoadState.DONE, 10)


def test_descriptions_are_short_and_never_the_same() -> None:
    made: list[Any] = []

    def save(spark: PlayedSpark) -> None:
        made.append(spark.options_given["description"])

    for _ in range(2):
        long = job(PlayedSpark(save), PlayedLoads())
        long.what = "x" * 1000
        long.run()
    assert made[0] != made[1]
    assert all(len(text) <= 200 for text in made)


def test_java_that_is_starting_ends_with_an_interruption() -> None:
    java_gateway = pytest.importorskip("pyspark.java_gateway")
    popen, started = java_gateway.Popen, []

    def interrupted() -> None:
        with session._java_ended_unless_started():
            started.append(java_gateway.Popen(["sleep", "600"]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert started[0].poll() is not None
    with session._java_ended_unless_started():
        started.append(java_gateway.Popen(["sleep", "600"]))
    assert started[1].poll() is None
    started[1].kill()
    started[1].wait()
    assert java_gateway.Popen is popen
