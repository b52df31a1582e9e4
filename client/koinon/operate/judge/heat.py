"""Answers about traffic: the hottest partitions and keys, and how uneven the traffic is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from koinon.operate.json_form import HIDDEN
from koinon.operate.judge.hotspots import (
    READ_BYTES,
    READS,
    WRITES,
    WRITTEN_BYTES,
    Columns,
    HotPartition,
    RankBy,
    SampledRows,
    Skew,
    blame,
    hottest,
    skew_of,
)
from koinon.operate.judge.remedies import advice
from koinon.operate.traffic import Survey
from koinon.operate.views import view
from koinon.operate.wording import node_name
from koinon_proto.contract.table import Table


@dataclass(frozen=True, kw_only=True)
class RatesAnswer:
    """Rates a second by measure."""

    reads_per_second: float
    writes_per_second: float
    read_bytes_per_second: int
    written_bytes_per_second: int

    @property
    def bytes_per_second(self) -> int:
        return self.read_bytes_per_second + self.written_bytes_per_second


def rates_of(columns: Columns) -> RatesAnswer:
    return RatesAnswer(
        reads_per_second=round(float(columns[READS]), 1),
        writes_per_second=round(float(columns[WRITES]), 1),
        read_bytes_per_second=round(float(columns[READ_BYTES])),
        written_bytes_per_second=round(float(columns[WRITTEN_BYTES])),
    )


@dataclass(frozen=True, kw_only=True)
class NodeRates(RatesAnswer):
    """The rates of one node."""

    id: str


@dataclass(frozen=True, kw_only=True)
class HotKeyAnswer:
    """A key and its share of the rows of its partition."""

    key: bytes
    reads_per_second: float
    writes_per_second: float
    share_of_partition: float


@dataclass(frozen=True, kw_only=True)
class HotPartitionAnswer(RatesAnswer):
    """One hot partition; ``share`` is a part of 1."""

    partition_id: int
    primary: str | None
    share: float
    times_mean: float
    keys: list[HotKeyAnswer]


def hot_partition(one: HotPartition, table: Table) -> HotPartitionAnswer:
    primary = table.rows[one.partition_id].primary
    return view(
        HotPartitionAnswer,
        rates_of(one.per_second),
        partition_id=one.partition_id,
        primary=node_name(table, primary) if primary else None,
        share=round(one.share, 4),
        times_mean=round(one.times_mean, 2),
        keys=[
            HotKeyAnswer(
                key=key.key,
                reads_per_second=round(key.reads_per_second, 1),
                writes_per_second=round(key.writes_per_second, 1),
                share_of_partition=round(key.share, 4),
            )
            for key in one.keys
        ],
    )


@dataclass(frozen=True, kw_only=True)
class SkewAnswer:
    """The unevenness of partitions, and the unevenness that chance alone would cause for so many
    rows.
    """

    max_over_mean: float
    coefficient_of_variation: float
    by_chance: float


@dataclass(frozen=True, kw_only=True)
class HotAnswer:
    """The traffic of the measured seconds."""

    seconds: float
    by: RankBy
    rows: int
    total: RatesAnswer
    skew: SkewAnswer
    nodes: list[NodeRates]
    silent: dict[str, str]
    partitions: list[HotPartitionAnswer]
    sampled: dict[str, SampledRows]
    advice: list[str]
    partitions_used: int = field(metadata=HIDDEN)


def hot_answer(survey: Survey, table: Table, by: RankBy, *, shown: int, keys: int) -> HotAnswer:
    """Build the answer from a survey: at most ``shown`` partitions with ``keys`` keys each."""
    rates, sample = survey.rates, survey.sample if keys else None
    found: Sequence[HotPartition] = hottest(rates, by, shown, sample=sample, keys_max=keys)
    skew: Skew = skew_of(rates.heat(by))
    return HotAnswer(
        seconds=round(survey.seconds, 3),
        by=by,
        rows=rates.rows,
        total=rates_of(rates.total),
        skew=SkewAnswer(
            max_over_mean=round(skew.max_over_mean, 3),
            coefficient_of_variation=round(skew.coefficient_of_variation, 3),
            by_chance=round(rates.by_chance(), 3),
        ),
        nodes=[
            view(NodeRates, rates_of(columns), id=node_name(table, number))
            for number, columns in sorted(rates.nodes.items())
        ],
        silent={node_name(table, n): reason for n, reason in sorted(survey.silent.items())},
        partitions=[hot_partition(one, table) for one in found],
        sampled={"reads": survey.sample.read, "writes": survey.sample.written},
        advice=advice(blame(found, rates.rows), survey, table),
        partitions_used=len(table.used_rows),
    )
