"""Keys sort like the columns that they are made of, and no two rows of columns share one."""

from __future__ import annotations

import datetime as dt
import decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from koinon.spark.encoding.keys import encode_keys, key_bytes
from koinon.spark.writing.order_values import orders_of
from koinon_proto.contract.errors import InvalidArgumentError

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
BYTES = st.binary(max_size=12)


def encoded(*columns: pa.Array, encoding: str = "binary") -> list[bytes | None]:
    found: list[bytes | None] = encode_keys(columns, encoding).to_pylist()
    return found


def test_keys_integers_have_the_documented_bytes() -> None:
    numbers = pa.array([0, -1, 1, -(1 << 63), (1 << 63) - 1])
    assert [key.hex() for key in encoded(numbers) if key] == [
        "8000000000000000",
        "7fffffffffffffff",
        "8000000000000001",
        "0000000000000000",
        "ffffffffffffffff",
    ]


def test_keys_integers_as_text_are_decimal_digits() -> None:
    assert encoded(pa.array([0, -17, 42], pa.int32()), encoding="text") == [b"0", b"-17", b"42"]


def test_keys_strings_and_bytes_are_as_they_are() -> None:
    assert encoded(pa.array(["é", "", None])) == ["é".encode(), b"", None]
    assert encoded(pa.array(["a"], pa.large_string())) == [b"a"]
    assert encoded(pa.array([b"\x00\xff", None], pa.binary())) == [b"\x00\xff", None]
    assert encoded(pa.array([b"a"], pa.large_binary())) == [b"a"]


def test_keys_of_several_columns_have_the_documented_bytes() -> None:
    key = encoded(pa.array(["a\x00b"]), pa.array([1]), pa.array([b"\xff"]))
    assert key == [b"a\x00\xffb\x00\x00" + b"\x80" + bytes(6) + b"\x01" + b"\xff\x00\x00"]


def test_keys_of_several_columns_are_null_where_a_part_is() -> None:
    assert encoded(pa.array(["a", None]), pa.array([None, 1])) == [None, None]


@pytest.mark.parametrize(
    ("column", "key"),
    [
        (pa.array([dt.date(2024, 1, 31)]), b"2024-01-31"),
        (pa.array([decimal.Decimal("12.30")]), b"12.30"),
        (
            pa.array([dt.datetime(2024, 1, 31, 12)], pa.timestamp("ms")),
            b"2024-01-31T12:00:00.000000",
        ),
        (pa.array([0], pa.timestamp("s", "Asia/Tokyo")), b"1970-01-01T00:00:00.000000Z"),
        (pa.array([dt.time(12, 30)], pa.time32("s")), b"12:30:00.000000"),
        (pa.array([True]), b"true"),
        (pa.array([0.1], pa.float32()), b"0.1"),
        (pa.array([float("nan")]), b"NaN"),
        (pa.array(["é"]).dictionary_encode(), "é".encode()),
        (pa.array([b"ab"], pa.binary(2)), b"ab"),
        (pa.array([(1 << 64) - 1], pa.uint64()), b"18446744073709551615"),
        (pa.array([7], pa.uint8()), b"\x80" + bytes(6) + b"\x07"),
    ],
    ids=lambda given: str(getattr(given, "type", "")),
)
def test_keys_of_other_types_are_their_json_text_without_quotes(
    column: pa.Array, key: bytes
) -> None:
    assert encoded(pa.concat_arrays([column, pa.nulls(1, column.type)])) == [key, None]


@pytest.mark.parametrize("kind", [pa.list_(pa.int8()), pa.struct([("a", pa.int8())])])
def test_keys_of_nested_types_are_refused(kind: pa.DataType) -> None:
    with pytest.raises(InvalidArgumentError, match="cast it to a string"):
        encode_keys([pa.nulls(1, kind)], "binary")


@given(st.lists(INT64, min_size=2))
def test_keys_of_integers_sort_like_the_numbers(numbers: list[int]) -> None:
    keys = encoded(pa.array(numbers, pa.int64()))
    assert sorted(keys) == encoded(pa.array(sorted(numbers), pa.int64()))  # type: ignore[type-var]


@given(st.lists(st.tuples(TEXT, INT64, BYTES), min_size=1, max_size=20))
def test_keys_of_several_columns_sort_like_the_rows(rows: list[tuple[str, int, bytes]]) -> None:
    def keys_of(some: list[tuple[str, int, bytes]]) -> list[bytes | None]:
        texts, numbers, data = zip(*some, strict=True)
        return encoded(pa.array(texts), pa.array(numbers, pa.int64()), pa.array(data, pa.binary()))

    in_order = sorted(rows, key=lambda row: (row[0].encode(), row[1], row[2]))
    keys = keys_of(in_order)
    assert keys == sorted(keys)  # type: ignore[type-var]
    assert len(set(keys)) == len(set(rows))


@given(st.lists(st.tuples(TEXT, INT64, BYTES), min_size=1, max_size=5), st.booleans())
def test_key_bytes_makes_the_keys_that_columns_make(
    rows: list[tuple[str, int, bytes]], as_text: bool
) -> None:
    encoding = "text" if as_text else "binary"
    texts, numbers, data = zip(*rows, strict=True)
    columns = pa.array(texts), pa.array(numbers, pa.int64()), pa.array(data, pa.binary())
    assert encoded(*columns, encoding=encoding) == [
        key_bytes(*row, encoding=encoding) for row in rows
    ]
    for column, parts in zip(columns, zip(*rows, strict=True), strict=True):
        assert encoded(column, encoding=encoding) == [
            key_bytes(part, encoding=encoding) for part in parts
        ]


def test_key_bytes_refuses_what_makes_no_key() -> None:
    for parts in ((), (1.5,), (True,), (1 << 63,)):
        with pytest.raises(InvalidArgumentError):
            key_bytes(*parts)


def test_keys_of_sliced_columns_are_those_of_the_slice() -> None:
    numbers, texts = pa.array([1, None, 3, 4]), pa.array(["a", "b\x00", "c\x00", None])
    assert encoded(numbers.slice(1, 2)) == [None, key_bytes(3)]
    assert encoded(texts.slice(1, 2)) == [b"b\x00", b"c\x00"]
    assert encoded(texts.slice(2, 2), numbers.slice(2, 2)) == [key_bytes("c\x00", 3), None]


# --- orders -------------------------------------------------------------------------------------


@given(st.lists(st.one_of(st.none(), st.floats(allow_nan=False)), min_size=2))
def test_orders_of_floats_sort_like_them_and_null_is_least(numbers: list[float | None]) -> None:
    orders = orders_of(pa.array(numbers, pa.float64()), "x").tolist()
    for a, order_a in zip(numbers, orders, strict=True):
        for b, order_b in zip(numbers, orders, strict=True):
            if a is None or b is None:
                assert (order_a < order_b) == (a is None and b is not None)
            else:
                assert (order_a < order_b) == (a < b)


def test_orders_nan_is_the_greatest_and_zeros_are_equal() -> None:
    values = pa.array([float("nan"), float("inf"), 0.0, -0.0], pa.float32())
    nan, infinity, zero, minus_zero = orders_of(values, "x").tolist()
    assert nan > infinity > zero == minus_zero


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([None, -128, -1, 0, 127], pa.int8()),
        ([None, -(1 << 63), -1, 0, (1 << 63) - 1], pa.int64()),
        ([None, -5, 0, 20_000], pa.date32()),
        ([None, -1, 0, 1 << 50], pa.timestamp("us", "Europe/Berlin")),
        ([None, -1, 0, 1 << 50], pa.timestamp("us")),
        ([None, False, True], pa.bool_()),
    ],
)
def test_orders_ascend_as_the_values_do(values: list[int | None], kind: pa.DataType) -> None:
    orders = orders_of(pa.array(values, kind), "x").tolist()
    assert orders == sorted(set(orders))


def test_orders_of_text_are_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match="column 'at' of type string"):
        orders_of(pa.array(["x"]), "at")
