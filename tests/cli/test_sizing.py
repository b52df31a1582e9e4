"""koinon admin size, and the remedies of admin hot."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from koinon.operate.judge.hotspots import (
    MEASURES,
    READS,
    WRITES,
    KeySample,
    RankBy,
    Rates,
    SampledKey,
    blame,
    hottest,
)
from koinon.operate.judge.remedies import advice
from koinon.operate.judge.sizing import size
from koinon.operate.traffic import Survey
from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.contract.keyspaces import KeyspaceList
from tests.kit.command_line import koinon_app
from tests.kit.tables import config_of, node_of, row_of, table_with


@pytest.mark.parametrize(
    ("peak_mb_s", "nodes", "partitions"),
    [
        (1, 1, 16),
        (50, 1, 16),
        (400, 1, 16),
        (401, 1, 32),  # 9 partitions, 16, doubled
        (3_000, 3, 128),
        (1, 3, 64),
        (1, 64, 1_024),
        (0.5, 65, 2_048),
    ],
)
def test_partitions_are_a_power_of_two_for_peak_and_nodes(
    peak_mb_s: float, nodes: int, partitions: int
) -> None:
    advised = size(peak_mb_s, 1_000_000, nodes, 3)
    assert advised.partitions == partitions
    assert advised.partitions >= 16 * nodes
    assert advised.peak_mb_s <= 25
    assert advised.rows * partitions >= 1_000_000


@pytest.mark.parametrize("peak_mb_s", [4e9, float("inf"), float("nan")])
def test_what_no_cluster_can_have_is_refused(peak_mb_s: float) -> None:
    with pytest.raises(InvalidArgumentError, match="peak-mb-s"):
        size(peak_mb_s, 1, 1, 1)


def test_command_says_the_number_its_reasons_and_what_it_costs() -> None:
    arguments = ["admin", "size", "--peak-mb-s", "400", "--rows", "2000000000", "--nodes", "12"]
    ended = CliRunner().invoke(koinon_app(), arguments)
    assert ended.exit_code == 0, ended.output
    assert ended.stdout.startswith("256 partitions")
    for words in ("--partitions 256", "7,812,500 rows", "leads 22 and holds 64 copies", "7.2 kB"):
        assert words in ended.stdout
    answer = json.loads(CliRunner().invoke(koinon_app(), [*arguments, "--json"]).stdout)
    assert (answer["partitions"], answer["for_peak"], answer["for_nodes"]) == (256, 16, 256)


# --- remedies ------------------------------------------------------------------------------------


def survey_of(partitioner: str, keys: dict[bytes, tuple[float, float]]) -> tuple[Survey, Any]:
    """A partition of sixteen that is hot by these keys: their reads and writes a second."""
    columns = np.ones((MEASURES, 16))
    columns[READS, 3] = sum(reads for reads, _ in keys.values())
    columns[WRITES, 3] = sum(writes for _, writes in keys.values())
    sampled = [
        SampledKey(partition_id=3, key=k, reads_per_second=r, writes_per_second=w, taken=100)
        for k, (r, w) in keys.items()
    ]
    rates = Rates(partitions=columns, rows=100_000)
    survey = Survey(rates=rates, sample=KeySample(keys=sampled), seconds=5.0, silent={})
    rows = [row_of(p, 1) for p in range(16)]
    return survey, table_with(rows, [node_of(1)], config=config_of(16, partitioner=partitioner))


def advice_of(partitioner: str, keys: dict[bytes, tuple[float, float]]) -> str:
    survey, table = survey_of(partitioner, keys)
    found = hottest(survey.rates, RankBy.ALL, 5, sample=survey.sample, keys_max=3)
    return "\n".join(advice(blame(found, survey.rates.rows), survey, table))


def test_key_that_is_written_is_to_be_sharded_and_one_that_is_read_cached() -> None:
    text = advice_of("murmur2", {b"visits": (10, 900), b"x": (10, 10)})
    assert "partition 3 is hot by one key, visits" in text
    assert "client.sharded(b'visits', 8)" in text
    assert "let clients cache it" in advice_of("murmur2", {b"front": (900, 10)})


def test_group_that_a_router_leads_together_is_named() -> None:
    keys = {b"shop7/%d" % n: (20.0, 20.0) for n in range(50)}
    text = advice_of("murmur2(until:2f)", keys)
    assert "the router until:2f leads together by shop7 (100% of the sampled" in text
    assert "comes from many keys" in advice_of("murmur2", keys)
    assert "comes from many keys" in advice_of("murmur2(not-known-here)", keys)


@pytest.mark.parametrize(
    ("partitioner", "key", "command"),
    [
        ("murmur2(until:2f)", b"shop7/%d", "--to NAME --prefix shop7/'"),
        ("murmur2(first:4)", b"-sh 7/%d", "--to NAME --hex --prefix 2d736820'"),
        ("crc16", b"{shop7}:%d", "--to NAME --hex --prefix 7b73686f70377d'"),
        ("crc16", b"%d:{shop7}", "--to NAME --prefix …'"),
    ],
)
def test_group_has_the_command_that_copies_just_it(
    partitioner: str, key: bytes, command: str
) -> None:
    text = advice_of(partitioner, {key % n: (20.0, 20.0) for n in range(50)})
    assert "koinon admin keyspaces create NAME --router whole" in text
    assert f"koinon copy --from default {command}" in text


def test_key_of_another_keyspace_is_sharded_there() -> None:
    survey, table = survey_of("murmur2", {b"visits": (10, 900)})
    default = table.keyspaces.default
    rooms = KeyspaceList(changed_at=1, keyspaces=(replace(default, name="rides"),))
    found = hottest(survey.rates, RankBy.ALL, 5, sample=survey.sample, keys_max=3)
    (line,) = advice(blame(found, survey.rates.rows), survey, replace(table, keyspace_list=rooms))
    assert "client.keyspace('rides').sharded(b'visits', 8)" in line
