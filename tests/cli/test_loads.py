"""admin loads from the command line, against a coordinator of this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from koinon.cli.app import make_app
from koinon.cli.console import output, progress
from koinon.cli.operate import following
from koinon_proto.contract.cluster_errors import LoadClosedError
from koinon_proto.contract.errors import UnavailableError
from koinon_proto.v1 import loads_pb2
from tests.cli.fake_operator import FakeOperator

Run = Callable[..., Any]
OPEN, MERGING = loads_pb2.LOAD_STATE_OPEN, loads_pb2.LOAD_STATE_MERGING
DONE, ABORTED = loads_pb2.LOAD_STATE_DONE, loads_pb2.LOAD_STATE_ABORTED


def load_of(load_id: int, state: Any, **fields: Any) -> loads_pb2.LoadInfo:
    return loads_pb2.LoadInfo(
        **{
            "load_id": load_id,
            "job_id": f"job-{load_id}",
            "state": state,
            "mode": loads_pb2.LOAD_MODE_APPEND,
            "timeout_ms": 1_800_000,
            **fields,
        }
    )


OPENED = load_of(41, OPEN, rows=1_200, bytes=3_400_000, idle_ms=2_500, description="new [orders]")
MERGED_HALF = load_of(
    42,
    MERGING,
    mode=loads_pb2.LOAD_MODE_OVERWRITE,
    prefix=b"o/\xff",
    keyspace="carts",
    stream_batch=loads_pb2.StreamBatch(query_id="q7", batch_id=0),
    partitions=1_024,
    partitions_merged=512,
    rows=7,
    bytes=70,
)
FAILED = load_of(40, ABORTED, reason="nobody touched it")


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeOperator]:
    made = FakeOperator(nodes=1)
    made.loads.loads = [FAILED, OPENED, MERGED_HALF]
    monkeypatch.setattr(following, "POLL_S", 0.01)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    yield made
    made.close()


@pytest.fixture
def koinon(operator: FakeOperator, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs ``koinon admin loads ARGS``; ``typed`` is what a person types."""

    def run(*arguments: str, typed: str | None = None) -> Any:
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(output, "somebody_is_there", lambda: typed is not None)
        where = ["--coordinators", operator.address]
        return CliRunner().invoke(make_app(), ["admin", "loads", *arguments, *where], input=typed)

    return run


def test_loads_are_listed_with_how_far_they_are(koinon: Run) -> None:
    ended = koinon()
    assert ended.exit_code == 0, ended.output
    header, *lines = ended.stdout.splitlines()
    titles = "LOAD STATE MODE PREFIX ROWS BYTES MERGED IDLE WHAT KEYSPACE WHY"
    assert " ".join(header.split()) == titles
    assert lines[0].split()[:3] == ["40", "aborted", "append"]
    assert lines[0].endswith("nobody touched it")
    assert "1,200" in lines[1]
    assert "3.4 MB" in lines[1]
    assert "2.5 s" in lines[1]
    assert "new [orders]" in lines[1]
    assert "o/\\xff" in lines[2]
    assert "512 of 1,024" in lines[2]
    assert lines[2].endswith("carts")
    assert "job-42 (batch 0 of q7)" in lines[2]
    assert lines[3] == "3 loads: 1 aborted, 1 open, 1 merging"


def test_loads_that_ended_are_shown_up_to_a_few_or_all(operator: FakeOperator, koinon: Run) -> None:
    operator.loads.loads = [load_of(n, DONE) for n in range(1, 31)] + [OPENED]
    few = koinon().stdout
    assert [line.split()[0] for line in few.splitlines()[1:12]] == (
        [*map(str, range(21, 31)), "41"]
    )
    assert "… and 20 more that ended before (--all)" in few
    assert len(koinon("--all").stdout.splitlines()) == 1 + 31 + 1


def test_loads_none_is_said_in_words(operator: FakeOperator, koinon: Run) -> None:
    operator.loads.loads = []
    assert koinon().stdout == "No bulk load is known.\n"
    assert json.loads(koinon("--json").stdout) == {"loads": []}


def test_loads_json_has_every_field(koinon: Run) -> None:
    answer = json.loads(koinon("--json").stdout)["loads"]
    assert [load["load_id"] for load in answer] == [40, 41, 42]
    assert answer[2] == {
        "load_id": 42,
        "job_id": "job-42",
        "state": "merging",
        "mode": "overwrite",
        "prefix": {"base64": "by//"},
        "keyspace": "carts",
        "stream_batch": {"query_id": "q7", "batch_id": 0},
        "description": "",
        "rows": 7,
        "bytes": 70,
        "partitions": 1_024,
        "partitions_merged": 512,
        "idle_ms": None,
        "timeout_ms": 1_800_000,
        "reason": None,
    }
    assert (answer[1]["idle_ms"], answer[1]["prefix"]) == (2_500, "")
    assert answer[1]["keyspace"] is None
    assert (answer[0]["reason"], answer[0]["stream_batch"]) == ("nobody touched it", None)


def test_watch_follows_the_loads_until_none_is_under_way(
    operator: FakeOperator, koinon: Run
) -> None:
    def fail_over() -> None:
        raise UnavailableError(reason="the leader is gone")

    def finish() -> None:
        operator.loads.loads = [FAILED, load_of(41, DONE), load_of(42, DONE)]

    operator.loads.steps = [lambda: None, fail_over, lambda: None, finish]
    ended = koinon("--watch")
    assert ended.exit_code == 0, ended.output
    said = ended.stderr.splitlines()
    assert said[0] == (
        "load 41: 1,200 rows staged; load 42: 512 of 1,024 partitions merged, 7 rows"
    )
    assert "3 loads: 1 aborted, 2 done" in ended.stdout


def test_watch_for_programs_says_nothing_before_the_end(
    operator: FakeOperator, koinon: Run
) -> None:
    def finish() -> None:
        operator.loads.loads = [load_of(42, DONE)]

    operator.loads.steps = [lambda: None, lambda: None, finish]
    ended = koinon("--watch", "--json")
    assert ended.exit_code == 0, ended.output
    assert [load["state"] for load in json.loads(ended.stdout)["loads"]] == ["done"]
    assert ended.stderr == ""


def test_abort_asks_first_and_says_what_was_done(operator: FakeOperator, koinon: Run) -> None:
    refused = koinon("abort", "41", typed="n\n")
    assert refused.exit_code == 2
    assert operator.loads.aborted == []
    done = koinon("abort", "41", "--reason", "wrong file", typed="y\n")
    assert done.exit_code == 0, done.output
    assert "new [orders]" in done.stdout
    assert "Load 41 is aborted." in done.stdout
    assert operator.loads.aborted == [(41, "wrong file")]


def test_abort_where_nobody_can_be_asked_needs_leave(operator: FakeOperator, koinon: Run) -> None:
    refused = koinon("abort", "41", "--json")
    assert refused.exit_code == 2
    assert json.loads(refused.stdout) == {"error": "not carried out: --yes is missing"}
    assert "without asking." in refused.stderr  # and no option that this command does not have
    done = koinon("abort", "41", "--yes", "--json")
    assert (done.exit_code, json.loads(done.stdout)) == (0, {"aborted": 41})
    assert operator.loads.aborted == [(41, "an operator aborted it")]


def test_abort_of_a_load_that_is_not_known_says_so(operator: FakeOperator, koinon: Run) -> None:
    ended = koinon("abort", "99", "--yes")
    assert ended.exit_code == 1
    assert "there is no load 99" in ended.stderr
    assert operator.loads.aborted == []


def test_abort_of_a_committed_load_is_refused(koinon: Run) -> None:
    ended = koinon("abort", "42", "--yes")
    assert ended.exit_code == 3
    assert str(LoadClosedError(load_id=42, state="merging", reason="it is committed")) in (
        ended.stderr
    )
