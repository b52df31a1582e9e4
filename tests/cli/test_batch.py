"""koinon batch: what a file may say, and what comes of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from koinon.local import LocalCluster, Setup
from tests.client.kit.fake_cluster import FakeCluster
from tests.kit.clusters import running_cluster
from tests.kit.command_line import koinon_app

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def routed() -> Iterator[LocalCluster]:
    with running_cluster(nodes=1, coordinators=1, setup=Setup(router="until:2f")) as cluster:
        yield cluster


@pytest.fixture
def batch(routed: LocalCluster, tmp_path: Path) -> Run:
    """Runs ``koinon batch`` with a file of these lines; ``-`` among the options: from there."""

    def run(lines: list[Any], *options: str) -> Any:
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        file = tmp_path / "batch.jsonl"
        file.write_text(text)
        source = [] if "-" in options else [str(file)]
        arguments = ["batch", *source, *options, "--coordinators", routed.coordinators]
        return CliRunner().invoke(koinon_app(), arguments, input=text)

    return run


def test_file_is_carried_out_in_one_step(routed: LocalCluster, batch: Run) -> None:
    with routed.client() as client:
        version = client.put(b"a/cart", b"lamp")
        client.put(b"a/n", b"40")
        lines: list[Any] = [
            {"check": "a/cart", "version": version},
            {"check": "a/order", "version": 0},
            "",
            {"put": "a/order", "value": "lamp"},
            {"put": "a/photo", "value": {"base64": "/wA="}, "ttl_ms": 60_000},
            {"put": {"base64": "YS//"}, "value": "ä"},
            {"delete": "a/cart"},
            {"increment": "a/n", "by": 2},
            {"increment": "a/m", "ttl_ms": 60_000},
        ]
        ended = batch(lines)
        assert (ended.exit_code, ended.stdout) == (0, "a/n\t42\na/m\t1\n"), ended.output
        found = client.get_entries([b"a/order", b"a/photo", b"a/\xff", b"a/m"])
        written = [entry for entry in found if entry]
        assert [entry.value for entry in written] == [b"lamp", b"\xff\0", "ä".encode(), b"1"]
        assert len({entry.version for entry in written}) == 1
        assert [bool(entry.expires_at_ms) for entry in written] == [False, True, False, True]
        assert client.get(b"a/cart") is None


def test_answer_for_programs_has_version_and_results(routed: LocalCluster, batch: Run) -> None:
    lines = [{"put": "b/k", "value": "v"}, {"delete": "b/gone"}, {"increment": "b/n", "by": -3}]
    ended = batch(lines, "-", "--json")
    answer = json.loads(ended.stdout)
    assert answer["results"] == [None, False, -3]
    with routed.client() as client:
        entry = client.get_entry(b"b/k")
    assert entry is not None
    assert entry.version == answer["version"]


def test_check_that_does_not_hold_ends_with_1_and_nothing_is_written(
    routed: LocalCluster, batch: Run
) -> None:
    ended = batch([{"put": "c/k", "value": "v"}, {"check": "c/k", "version": 7}])
    assert ended.exit_code == 1
    assert "c/k" in ended.stderr
    with routed.client() as client:
        assert client.get(b"c/k") is None


def test_refused_update_ends_with_3_and_nothing_is_written(
    routed: LocalCluster, batch: Run
) -> None:
    with routed.client() as client:
        client.put(b"d/k", b"text")
        ended = batch([{"put": "d/new", "value": "v"}, {"increment": "d/k"}], "--json")
        assert ended.exit_code == 3
        assert "integer" in json.loads(ended.stdout)["error"]
        assert client.get(b"d/new") is None


def test_dry_run_says_where_the_keys_lie_and_writes_nothing(
    routed: LocalCluster, batch: Run
) -> None:
    lines = [{"put": "e/k", "value": "v"}, {"increment": "e/n"}]
    ended = batch(lines, "--dry-run")
    assert ended.stdout.startswith("2 operations on keys that are routed by e, in partition ")
    answer = json.loads(batch(lines, "--dry-run", "--json").stdout)
    assert (answer["operations"], answer["routing_bytes"]) == (2, "e")
    with routed.client() as client:
        assert client.get_many([b"e/k", b"e/n"]) == [None, None]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "operation: is no JSON"),
        ("[" * 100_000, "operation: is no JSON"),
        ("7", "must be an object with one of check, put, delete, increment"),
        ({"get": "f/k"}, "must be an object with one of"),
        ({"put": "f/k", "delete": "f/k", "value": ""}, "must be an object with one of"),
        ({"put": "f/k"}, "value: is missing"),
        ({"check": "f/k"}, "version: is missing"),
        ({"check": "f/k", "version": -1}, "version"),
        ({"check": "f/k", "version": None}, "version must be"),
        ({"check": "f/k", "version": "1"}, "version"),
        ({"put": "f/k", "value": "v", "ttl": 1}, "ttl: is unknown; put takes ttl_ms and value"),
        ({"delete": "f/k", "value": "v"}, "value: is unknown; delete takes nothing but a key"),
        ({"put": "f/k", "value": 7}, "value: must be text or"),
        ({"put": 7, "value": "v"}, "put: must be text or"),
        ({"put": "f/k", "value": {"base64": "?"}}, "value: is no base64"),
        ('{"put": "f/\\ud800", "value": "v"}', "put: is no text"),
        ({"put": "f/k", "value": "v", "ttl_ms": 0}, "ttl_ms"),
        ({"increment": "f/k", "by": 1.5}, "by must be"),
        ({"increment": "f/k", "by": 1 << 63}, "by"),
        ({"put": "", "value": "v"}, "key"),
        ({"put": "g/k", "value": "v"}, "same routing bytes"),
    ],
)
def test_line_that_is_no_operation_is_named_and_nothing_is_written(
    routed: LocalCluster, batch: Run, line: Any, words: str
) -> None:
    ended = batch([{"put": "f/first", "value": "v"}, "", line])
    assert ended.exit_code == 2, ended.output
    assert "batch.jsonl, line 3: " in ended.stderr
    assert words in ended.stderr
    with routed.client() as client:
        assert client.get(b"f/first") is None


def test_no_operations_and_no_file_end_with_2(batch: Run, tmp_path: Path) -> None:
    ended = batch(["", ""])
    assert ended.exit_code == 2
    assert "has no operations" in ended.stderr
    ended = CliRunner().invoke(koinon_app(), ["batch", str(tmp_path / "missing")])
    assert ended.exit_code == 2
    assert "No such file" in ended.stderr


def test_unknown_fate_says_that_all_or_nothing_was_written(
    tmp_path: Path,
) -> None:
    cluster = FakeCluster(nodes=1)
    try:
        cluster.exhausted_replies = {"CommitBatch"}
        file = tmp_path / "batch.jsonl"
        file.write_text('{"increment": "n"}')
        where = ["--coordinators", cluster.seeds]
        ended = CliRunner().invoke(koinon_app(), ["batch", str(file), *where])
    finally:
        cluster.close()
    assert ended.exit_code == 3
    assert "all of it was written, or nothing" in ended.stderr
