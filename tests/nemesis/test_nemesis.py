"""The nemesis finds a defect that was planted into real processes: a stale read.

That healthy processes show none is for ``make nemesis``, which takes minutes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkers.linearizability import check
from tests.nemesis import means
from tests.nemesis.cluster import NemesisCluster
from tests.nemesis.defects import DEFECTS, SHOWN_BY
from tests.nemesis.journal import operations, read_history
from tests.nemesis.run import HISTORY, run_schedule
from tests.nemesis.schedules import BEGINS_S, KINDS, Schedule, Step, available

SPLIT_S = 5.5
SCHEDULES_MAX = 5


def needs(*kinds: str) -> pytest.MarkDecorator:
    """Skip, by name, what this machine does not allow."""
    why = means.missing(means.NAMESPACES)
    _, left_out = available(kinds)
    reason = "; ".join([why, *left_out.values()]).strip("; ")
    return pytest.mark.skipif(bool(reason), reason=f"not tested here: {reason}")


def test_defects_are_shown_by_kinds_that_there_are() -> None:
    assert SHOWN_BY.keys() <= DEFECTS.keys()
    assert {kind for kinds in SHOWN_BY.values() for kind in kinds} <= KINDS.keys()


@needs("split")
def test_lease_that_is_not_looked_at_is_found(tmp_path: Path) -> None:
    """Almost always in the first schedule; a write that was under way through the primary when it
    was cut off, of every key that it led, would hide it there.
    """
    split = Step(at_s=BEGINS_S, kind="split", lasts_s=SPLIT_S, targets=("primary", "w1"))
    schedule = Schedule(seed=1, seconds=BEGINS_S + SPLIT_S + 1.0, steps=(split,))
    defect = "serves-without-a-lease"
    with NemesisCluster(tmp_path, nodes=3, coordinators=1, defect=defect) as cluster:
        for number in range(SCHEDULES_MAX):
            directory = tmp_path / f"s{number}"
            result = run_schedule(schedule, cluster, directory)
            if result.violations:
                break
            assert result.failure == ""
        noted = {put.value.decode() for put in cluster.applied()}
    assert result.violations, f"no stale read in {SCHEDULES_MAX} schedules"
    assert "stale" in result.violations[0] or "lost" in result.violations[0]
    history = read_history(directory / HISTORY)
    assert check(operations(history))
    written = [line for line in history if line["type"] == "ok" and line["f"] == "write"]
    assert written
    assert {line["value"] for line in written} <= noted, "nodes note what they write"


@pytest.mark.long
@needs("kill", "isolate")
def test_client_that_sends_a_write_twice_is_found(tmp_path: Path) -> None:
    """Almost always in the first schedule: all that waits for news of the table goes on twice."""
    steps = (
        Step(at_s=BEGINS_S, kind="kill", lasts_s=1.0, targets=("primary",)),
        Step(at_s=BEGINS_S + 2.0, kind="isolate", lasts_s=SPLIT_S, targets=("primary",)),
    )
    schedule = Schedule(seed=1, seconds=BEGINS_S + SPLIT_S + 3.0, steps=steps)
    with NemesisCluster(tmp_path, coordinators=1, defect="resumes-waiters-twice") as cluster:
        for number in range(SCHEDULES_MAX):
            result = run_schedule(schedule, cluster, tmp_path / f"s{number}")
            if result.violations:
                break
            assert result.failure == ""
    assert any("version" in violation for violation in result.violations), result.violations
