"""Tests of the tail of recent changes: what it tells is whole, in order, and bounded."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from koinon_node.core.formats import records
from koinon_node.core.writes.change_tail import Change, ChangeTail, size_of
from koinon_node.core.writes.commit_group import CommitGroup
from koinon_proto.contract.table import first_sequence

EPOCH = 3
START = first_sequence(EPOCH)
ALL = 1 << 20


def group_of(
    *rows: tuple[int, bytes, bytes | None, int], claims: tuple[int, ...] = ()
) -> CommitGroup:
    """Return a durable group of rows (partition, key, value or None, counter)."""
    lasts: dict[int, int] = dict.fromkeys(claims, START)
    written: dict[bytes, bytes | None] = {}
    for p, key, value, counter in rows:
        sequence = START + counter
        lasts[p] = max(lasts.get(p, 0), sequence)
        record = records.encode_tombstone(sequence, 9)
        if value is not None:
            record = records.encode_record(sequence, value)
        written[records.head_of(p) + key] = record
    group = CommitGroup(1)
    group.touched = np.array(list(lasts), np.uint32)
    group.lasts = np.array(list(lasts.values()), np.uint64)
    group.records = written
    group.claims = set(map(records.prefix_of, claims))
    return group


def tail_of(*groups: CommitGroup, bytes_max: int = ALL) -> ChangeTail:
    tail = ChangeTail(bytes_max)
    tail.follow(0, EPOCH, START)
    for group in groups:
        tail.append(group)
    return tail


def told(tail: ChangeTail, after: int, through: int, bytes_max: int = ALL) -> list[int] | None:
    """Return the counters of the changes that are told."""
    found = tail.read(0, EPOCH, START + after, START + through, bytes_max=bytes_max)
    return None if found is None else [change.sequence - START for change in found[0]]


def test_changes_are_told_by_sequence_and_only_through_what_is_complete() -> None:
    tail = tail_of(group_of((0, b"b", b"2", 2), (0, b"a", None, 1)), group_of((0, b"c", b"3", 3)))
    assert told(tail, 0, 2) == [1, 2]
    assert told(tail, 1, 3) == [2, 3]
    found = tail.read(0, EPOCH, START, START + 2, bytes_max=ALL)
    assert found == (
        [Change(START + 1, b"a", None, 0), Change(START + 2, b"b", b"2", 0)],
        START + 2,
    )


def test_versions_of_one_batch_are_never_cut_apart() -> None:
    rows = [(0, b"%d" % n, b"x" * 50, 1) for n in range(5)]
    tail = tail_of(group_of(*rows, (0, b"after", b"", 2)))
    assert told(tail, 0, 2, bytes_max=1) == [1] * 5
    assert told(tail, 1, 2, bytes_max=1) == [2]


def test_other_partitions_and_staged_rows_are_not_told() -> None:
    group = group_of((0, b"a", b"1", 1), (1, b"b", b"2", 1))
    group.records[records.head_of(0, records.STAGED) + b"chunk"] = records.encode_record(START, b"")
    assert told(tail_of(group), 0, 1) == [1]


def test_what_is_pushed_out_or_merged_or_of_another_epoch_is_not_known() -> None:
    one, two = group_of((0, b"a", b"1", 1)), group_of((0, b"b", b"2", 2))
    tail = tail_of(one, two, bytes_max=size_of(Change(1, b"a", b"1", 0)))
    assert told(tail, 0, 2) is None
    assert told(tail, 1, 2) == [2]
    tail = tail_of(one, group_of((0, b"b", b"2", 2), claims=(0,)))
    assert told(tail, 1, 2) is None
    assert told(tail, 2, 2) == []
    tail = tail_of(one)
    assert tail.read(0, EPOCH + 1, START, START + 1, bytes_max=ALL) is None
    tail.follow(0, EPOCH + 1, first_sequence(EPOCH + 1))
    assert told(tail, 0, 1) is None


def test_partition_is_let_go_with_its_last_reader() -> None:
    tail = tail_of(group_of((0, b"a", b"1", 1)))
    tail.follow(0, EPOCH, START + 1)
    tail.leave((0,))
    assert told(tail, 0, 1) == [1]
    tail.leave((0,))
    assert not tail
    assert tail.size == 0
    assert told(tail, 0, 1) is None


@given(
    groups=st.lists(
        st.lists(
            st.tuples(st.integers(0, 2), st.sampled_from([b"a", b"b", b"c"]), st.integers(0, 40)),
            min_size=1,
            max_size=4,
        ),
        max_size=20,
    ),
    bytes_max=st.integers(0, 3_000),
    forgotten=st.sets(st.integers(0, 19)),
    message=st.integers(1, 600),
)
def test_reader_misses_nothing_whatever_is_let_go(
    groups: list[list[tuple[int, bytes, int]]],
    bytes_max: int,
    forgotten: set[int],
    message: int,
) -> None:
    tail = ChangeTail(bytes_max)
    for p in range(3):
        tail.follow(p, EPOCH, START)
    counters, written = [0] * 3, [[] for _ in range(3)]  # type: ignore[var-annotated]
    for number, group in enumerate(groups):
        rows, newest = [], {}
        for p, key, size in group:
            counters[p] += 1
            rows.append((p, key, b"x" * size, counters[p]))
            newest[p, key] = counters[p]
        tail.append(group_of(*rows))
        for (p, _), counter in newest.items():
            written[p].append(counter)
        if number in forgotten:
            tail.restart((0,), (START + counters[0],))
    assert tail.size <= bytes_max
    for p in range(3):
        for after in range(counters[p] + 1):
            found: list[int] = []
            at = START + after
            while at < START + counters[p]:
                part = tail.read(p, EPOCH, at, START + counters[p], bytes_max=message)
                if part is None:
                    assert not found, "what was known is still known"
                    break
                found += [change.sequence - START for change in part[0]]
                assert part[1] > at
                at = part[1]
            else:
                assert found == sorted(c for c in written[p] if c > after)
