"""``*_many`` writes: chunks, duplicate keys, bounds, the result."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koinon.core.row_chunks import FAILURES_MAX, Chunk, LoadProgress, delete_chunks, put_chunks
from koinon_proto.contract.errors import (
    InvalidArgumentError,
    KoinonError,
    StorageFullError,
    UnknownFateError,
)

FULL = StorageFullError(node_id="n1", reason="map")
UNKNOWN = UnknownFateError(reason="cut")
Pairs = list[tuple[bytes, bytes]]


def chunks_of(items: object, *, rows_max: int = 100, bytes_max: int = 10_000) -> list[Chunk]:
    return list(
        put_chunks(
            items,  # type: ignore[arg-type]
            rows_max=rows_max,
            bytes_max=bytes_max,
            max_value_bytes=1_000,
        )
    )


PAIRS = st.lists(st.tuples(st.binary(min_size=1, max_size=3), st.binary(max_size=90)), max_size=400)


@given(pairs=PAIRS, rows_max=st.integers(1, 200), as_iterator=st.booleans())
def test_put_chunks_any_input_covers_every_row_within_bounds(
    pairs: Pairs, rows_max: int, as_iterator: bool
) -> None:
    chunks = chunks_of(iter(pairs) if as_iterator else pairs, rows_max=rows_max, bytes_max=2_000)
    assert sum(chunk.rows for chunk in chunks) == len(pairs)
    row = 0
    for chunk in chunks:
        assert chunk.first_row == row
        assert chunk.rows <= rows_max
        size = sum(map(len, [*chunk.keys, *(chunk.values or ())]))
        assert size <= 2_000 or chunk.rows == 1
        assert len(set(chunk.keys)) == len(chunk.keys) == len(chunk.values or ())
        covered = pairs[row : row + chunk.rows]
        assert dict(zip(chunk.keys, chunk.values or (), strict=True)) == dict(covered)
        row += chunk.rows


def test_put_chunks_reads_an_iterator_only_as_far_as_needed() -> None:
    taken = 0

    def source() -> Iterator[tuple[bytes, bytes]]:
        nonlocal taken
        for taken in range(1, 1_000_000):
            yield b"%d" % taken, b"v"

    chunks = put_chunks(source(), rows_max=1_000, bytes_max=1 << 20, max_value_bytes=10)
    assert next(chunks).rows > 900
    assert taken <= 1_000


def test_put_chunks_large_values_are_cut_by_bytes() -> None:
    pairs = [(b"%d" % i, b"x" * 1_000) for i in range(1_000)]
    for items in (pairs, iter(pairs)):
        assert max(chunk.rows for chunk in chunks_of(items)) <= 10


@pytest.mark.parametrize(
    ("bad", "named"),
    [((b"", b"v"), "key of row 150"), ((b"k" * 501, b"v"), "501"), ((b"k", b"v" * 1_001), "1001")],
)
def test_put_chunks_bad_row_of_a_list_is_refused_before_the_first_chunk(
    bad: tuple[bytes, bytes], named: str
) -> None:
    pairs = [(b"%d" % i, b"v") for i in range(150)] + [bad]
    with pytest.raises(InvalidArgumentError, match="row 150") as caught:
        next(put_chunks(pairs, rows_max=10, bytes_max=1_000, max_value_bytes=1_000))
    assert named in str(caught.value)


@pytest.mark.parametrize("bad", [("k", b"v"), (b"k", "v"), (b"k", None), (b"k", [1])])
@pytest.mark.parametrize("as_iterator", [False, True])
def test_put_chunks_not_bytes_is_a_type_error_naming_the_row(
    bad: object, as_iterator: bool
) -> None:
    pairs = [(b"a", b"v"), bad]
    with pytest.raises(TypeError, match="row 1 must be bytes"):
        chunks_of(iter(pairs) if as_iterator else pairs)


def test_put_chunks_not_a_pair_is_a_type_error_naming_the_row() -> None:
    with pytest.raises(TypeError, match="row 1"):
        chunks_of([(b"a", b"v"), (b"a", b"v", b"w")])


def test_delete_chunks_repeated_key_is_sent_once() -> None:
    (chunk,) = delete_chunks([b"a", b"b", b"a"], rows_max=10)
    assert sorted(chunk.keys) == [b"a", b"b"]
    assert chunk.rows == 3
    assert chunk.values is None


def test_progress_chunks_with_a_common_key_never_run_together() -> None:
    progress = LoadProgress(in_flight_max=8)
    first, second, third = chunks_of(
        [(b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (b"c", b"2"), (b"d", b"3")], rows_max=2
    )
    progress.start(first)
    assert not progress.may_start(second)
    assert progress.may_start(third)
    progress.finish(first, {}, 0)
    assert progress.may_start(second)


def test_progress_bounds_what_is_in_flight() -> None:
    progress = LoadProgress(in_flight_max=2)
    chunks = chunks_of([(b"%d" % i, b"") for i in range(6)], rows_max=2)
    for chunk in chunks[:2]:
        progress.start(chunk)
    assert not progress.may_start(chunks[2])


def test_progress_result_names_failed_rows_by_their_place_in_the_input() -> None:
    progress = LoadProgress(in_flight_max=8)
    chunks = chunks_of([(b"%d" % i, b"") for i in range(6)], rows_max=3)
    for chunk in chunks:
        progress.start(chunk)
    progress.finish(chunks[1], {2: UNKNOWN, 0: FULL}, 0)
    progress.finish(chunks[0], {1: FULL}, 2)
    result = progress.end(input_left=False)
    assert (result.rows, result.applied, result.absent) == (6, 3, 2)
    assert [(f.row, f.key) for f in result.refused] == [(1, b"1"), (3, b"3")]
    assert [(f.row, f.key) for f in result.unknown] == [(5, b"5")]
    assert not result.ok
    with pytest.raises(UnknownFateError, match="1 of 6 rows"):
        result.raise_for_errors()


def test_progress_superseded_rows_share_the_fate_of_the_last() -> None:
    progress = LoadProgress(in_flight_max=8)
    (chunk,) = chunks_of([(b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (b"a", b"3")])
    assert dict(zip(chunk.keys, chunk.values or (), strict=True)) == {b"a": b"3", b"b": b"1"}
    progress.start(chunk)
    failures: dict[int, KoinonError] = {list(chunk.keys).index(b"a"): FULL}
    progress.finish(chunk, failures, 0)
    result = progress.end(input_left=False)
    assert result.applied == 1
    assert [failure.row for failure in result.refused] == [0, 2, 3]


def test_progress_too_many_failures_stop_the_reading() -> None:
    progress = LoadProgress(in_flight_max=8)
    pairs = [(b"%d" % i, b"") for i in range(FAILURES_MAX)]
    (chunk,) = chunks_of(pairs, rows_max=FAILURES_MAX, bytes_max=1 << 30)
    progress.start(chunk)
    assert not progress.stopped
    progress.finish(chunk, dict.fromkeys(range(FAILURES_MAX), FULL), 0)
    assert progress.stopped
    assert not progress.end(input_left=True).complete
