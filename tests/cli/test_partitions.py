"""Commands that show where keys are, and what is known of one partition."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from koinon.cli.app import make_app
from koinon_proto.contract.table import (
    NodeNumber,
    NodeStatus,
    OfflineReason,
    PartitionStatus,
    first_sequence,
)
from koinon_proto.partitioner import murmur2, partitioner
from tests.cli.conftest import Run, three
from tests.cli.fake_operator import PARTITIONS, FakeOperator


def where(operator: FakeOperator, *arguments: str) -> Any:
    at = ["--coordinators", operator.address]
    runner = CliRunner(env={"COLUMNS": "200"})  # workers of the test suite have 80
    return runner.invoke(make_app(), ["where", *arguments, *at])


def test_where_names_partition_and_nodes_of_each_key(operator: FakeOperator) -> None:
    hashed = partitioner("murmur2", PARTITIONS).partition_of
    operator.change_row(hashed(b"b"), in_sync=three(hashed(b"b"))[:2])
    ended = where(operator, "a", "b")
    assert ended.exit_code == 0, ended.output
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert [line[:6] for line in lines[1:]] == [
        [key, key, str(murmur2(key.encode())), str(p), "online", f"n{three(p)[0]}"]
        for key, p in (("a", hashed(b"a")), ("b", hashed(b"b")))
    ]
    for answer in (where(operator, "--hex", "62", "--json"), where(operator, "b", "--json")):
        row = json.loads(answer.stdout)
        assert (row["key"], row["partition_id"]) == ("b", hashed(b"b"))
        assert (row["routing_bytes"], row["hash"]) == ("b", str(murmur2(b"b")))
        assert row["in_sync"] == [f"n{number}" for number in three(hashed(b"b"))[:2]]


def test_partition_shows_its_size_and_how_far_each_copy_is(
    operator: FakeOperator, koinon: Run
) -> None:
    primary, second, third = three(1)
    operator.change_row(1, in_sync=(primary, second), replicas=(*three(1), NodeNumber(4)))
    operator.change_row(1, adding=(NodeNumber(4),), removing=(third,))
    operator.change_node(third, status=NodeStatus.FENCED)
    operator.copies[primary].stale = {1}
    operator.copies[4].not_usable = {1}
    ended = koinon("partition", "1")
    assert ended.exit_code == 0, ended.output
    first, _, *rows = ended.stdout.splitlines()
    assert first == (
        f"Partition 1 is online; n{primary} leads it, in epoch 1. ~11 records, ~11.0 MB a copy."
    )
    through = f"{first_sequence(1) + 1:,}"
    words = [" ".join(row.split()) for row in rows]
    assert words[0].endswith(f"primary in sync {through}")
    assert words[1].endswith(f"backup in sync {through}")
    assert words[2].endswith("backup down - being removed")
    assert words[3].endswith("backup being added -")
    answer = json.loads(koinon("partition", "1", "--json").stdout)
    assert (answer["records"], answer["bytes"], answer["guessed"]) == (11, 11_000_000, True)
    assert [copy["state"] for copy in answer["copies"]] == [
        *("in_sync", "in_sync", "down", "being_added")
    ]
    assert answer["copies"][0]["complete_through"] == first_sequence(1) + 1


def test_partition_that_nobody_leads_says_why_and_has_no_size(
    operator: FakeOperator, koinon: Run
) -> None:
    offline: dict[str, Any] = {
        "status": PartitionStatus.OFFLINE,
        "primary": NodeNumber(0),
        "offline_reason": OfflineReason.NO_LIVE_REPLICA,
    }
    operator.change_row(2, **offline)
    shown = koinon("partition", "2").stdout
    assert shown.startswith("Partition 2 is offline (no live replica); nobody leads it")
    assert json.loads(koinon("partition", "2", "--json").stdout)["bytes"] is None


def test_partitions_by_number_are_those_alone(koinon: Run) -> None:
    rows = [json.loads(line) for line in koinon("partitions", "6,1-2", "--json").stdout.split()]
    assert [row["partition_id"] for row in rows] == [1, 2, 6]


def test_partition_that_there_is_not_is_refused(koinon: Run) -> None:
    for called in (("partition", "8"), ("partitions", "3", "7-8")):
        ended = koinon(*called)
        assert ended.exit_code == 1
        assert "there is no partition 8" in ended.stderr
