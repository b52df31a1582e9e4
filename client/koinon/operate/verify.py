"""Compares the copies of each partition while clients write to them.

A copy is compared with its primary's only if both are complete through the same sequence: then they
must hold the same records. If they are not, a write came between or the copy is behind; such
partitions are read again, a few times, in smaller groups. A difference counts once it was seen
twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from koinon.operate.replicas import Checksum, Replicas
from koinon_proto.contract.table import NO_NODE, NodeStatus, PartitionRow, Table

LOOKS_MAX = 6
STEP_PARTITIONS = (32, 8, 2, 1)
"""The number of partitions that are compared together, by round; the last number also applies to
later rounds.
"""


class Verdict(Enum):
    """The result of comparing one copy, or all copies of a partition."""

    IDENTICAL = "identical"
    DIFFERENT = "different"
    NOT_COMPARABLE = "not_comparable"


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyVerdict:
    """One replica compared with its primary; ``checksum`` is None if the node did not report it."""

    node_number: int
    verdict: Verdict
    reason: str = ""
    checksum: Checksum | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionVerdict:
    """One partition: the worst verdict of its copies, which include the primary's."""

    partition_id: int
    primary: int
    copies: tuple[CopyVerdict, ...]

    @property
    def verdict(self) -> Verdict:
        found = {copy.verdict for copy in self.copies}
        if Verdict.DIFFERENT in found:
            return Verdict.DIFFERENT
        return Verdict.NOT_COMPARABLE if Verdict.NOT_COMPARABLE in found else Verdict.IDENTICAL

    @property
    def reasons(self) -> list[str]:
        """The reasons for which copies are not identical, each once."""
        return list(dict.fromkeys(copy.reason for copy in self.copies if copy.reason))


@dataclass(kw_only=True)
class Report:
    """The verdicts by partition."""

    partitions: dict[int, PartitionVerdict] = field(default_factory=dict)

    def of(self, verdict: Verdict) -> list[PartitionVerdict]:
        return [p for _, p in sorted(self.partitions.items()) if p.verdict is verdict]


def verify(
    table_now: Callable[[], Table],
    replicas: Replicas,
    partition_ids: Sequence[int],
    *,
    on_progress: Callable[[int], None] = lambda _done: None,
    pause: Callable[[], None] = lambda: None,
) -> Report:
    """Compare the copies of these partitions.

    Args:
        table_now: returns the cluster's table; called before each round.
        on_progress: called with the number of settled partitions.
        pause: called between rounds, so that writes can settle.
    """
    report = Report()
    suspected: set[int] = set()
    settled = 0
    left = list(partition_ids)
    for look in range(LOOKS_MAX):
        if look:
            pause()
        step = STEP_PARTITIONS[min(look, len(STEP_PARTITIONS) - 1)]
        open_ones: list[int] = []
        table = table_now()
        for start in range(0, len(left), step):
            for found in _look(table, replicas, left[start : start + step]):
                report.partitions[found.partition_id] = found
                again = found.verdict is Verdict.NOT_COMPARABLE
                if found.verdict is Verdict.DIFFERENT and found.partition_id not in suspected:
                    suspected.add(found.partition_id)
                    again = True
                if again:
                    open_ones.append(found.partition_id)
                else:
                    settled += 1
            on_progress(settled)
        left = open_ones
        if not left:
            break
    return report


def _look(table: Table, replicas: Replicas, partition_ids: Iterable[int]) -> list[PartitionVerdict]:
    rows = [table.rows[p] for p in partition_ids]
    wanted: dict[int, list[int]] = {}
    for row in rows:
        for number in row.replicas:
            node = table.nodes.get(number)
            if node is not None and node.status is not NodeStatus.FENCED:
                wanted.setdefault(number, []).append(row.partition_id)
    found, silent = replicas.checksums(table, wanted)
    return [judge(row, found, silent) for row in rows]


def judge(
    row: PartitionRow,
    found: dict[tuple[int, int], Checksum],
    silent: dict[int, str],
) -> PartitionVerdict:
    """Compare one partition's copies. Pure."""
    partition_id = int(row.partition_id)
    first = found.get((row.primary, partition_id))
    unfit = ""
    if row.primary == NO_NODE:
        unfit = "it has no primary now"
    elif first is None or not first.usable:
        unfit = f"its primary does not say: {silent.get(row.primary, 'it has no usable copy')}"
    copies = []
    for number in row.replicas:
        own = found.get((number, partition_id))
        verdict, reason = Verdict.NOT_COMPARABLE, unfit
        if not unfit:
            assert first is not None
            verdict, reason = _compare(row, number, first, own, silent)
        copies.append(CopyVerdict(node_number=number, verdict=verdict, reason=reason, checksum=own))
    return PartitionVerdict(
        partition_id=partition_id, primary=int(row.primary), copies=tuple(copies)
    )


def _compare(
    row: PartitionRow, number: int, first: Checksum, own: Checksum | None, silent: dict[int, str]
) -> tuple[Verdict, str]:
    if number == row.primary:
        return Verdict.IDENTICAL, ""
    if own is None:
        return Verdict.NOT_COMPARABLE, silent.get(number, "its node is down")
    if not own.usable:
        moving = "it is still being copied" if number in row.adding else "it has no usable copy"
        return Verdict.NOT_COMPARABLE, moving
    if own.complete_through != first.complete_through:
        if number in row.in_sync:
            return Verdict.NOT_COMPARABLE, "it was written to each time"
        return Verdict.NOT_COMPARABLE, "it is catching up"
    if (own.records, own.digest) == (first.records, first.digest):
        return Verdict.IDENTICAL, ""
    return Verdict.DIFFERENT, (
        f"{own.records:,} records where the primary has {first.records:,}"
        if own.records != first.records
        else f"{own.records:,} records like the primary, but not all the same ones"
    )
