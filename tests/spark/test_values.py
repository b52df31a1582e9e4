"""Whole rows as JSON and MessagePack, read back by the libraries that anybody would use."""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import json
import math
from typing import Any

import msgpack
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from koinon.spark.encoding.values import ENCODERS, encode_column
from koinon_proto.contract.errors import InvalidArgumentError

UTC = dt.UTC
INSTANT = dt.datetime(2024, 1, 31, 12, 30, 0, 250_000, UTC)


def decoded(batch: Any, encoding: str) -> list[Any]:
    values = ENCODERS[encoding](batch).to_pylist()
    if encoding == "json":
        return [json.loads(value) for value in values]
    return [msgpack.unpackb(value, timestamp=3, strict_map_key=False) for value in values]


def both(batch: Any) -> tuple[list[Any], list[Any]]:
    return decoded(batch, "json"), decoded(batch, "msgpack")


def batch_of(**columns: Any) -> Any:
    return pa.RecordBatch.from_pydict(columns)


def test_values_every_flat_type_has_its_documented_form() -> None:
    batch = batch_of(
        yes=pa.array([True, False]),
        tiny=pa.array([-128, 127], pa.int8()),
        short=pa.array([-300, 300], pa.int16()),
        int=pa.array([-70_000, 70_000], pa.int32()),
        long=pa.array([-(1 << 63), (1 << 63) - 1]),
        single=pa.array([0.5, -2.25], pa.float32()),
        double=pa.array([0.1, 1e300]),
        price=pa.array([decimal.Decimal("12.30"), decimal.Decimal("-0.05")], pa.decimal128(15, 2)),
        text=pa.array(['say "hé"\n', ""]),
        data=pa.array([b"\x00\xff", b""], pa.binary()),
        day=pa.array([dt.date(2024, 1, 31), dt.date(1969, 12, 31)]),
        at=pa.array(
            [INSTANT, dt.datetime(1970, 1, 1, tzinfo=UTC)], pa.timestamp("us", "Asia/Tokyo")
        ),
        local=pa.array([dt.datetime(2024, 1, 31, 12), dt.datetime(1, 1, 1)], pa.timestamp("us")),
    )
    as_json, as_msgpack = both(batch)
    common = {
        "yes": True,
        "tiny": -128,
        "short": -300,
        "int": -70_000,
        "long": -(1 << 63),
        "single": 0.5,
        "double": 0.1,
        "price": "12.30",
        "text": 'say "hé"\n',
        "day": "2024-01-31",
        "local": "2024-01-31T12:00:00.000000",
    }
    assert as_json[0] == {
        **common,
        "data": base64.b64encode(b"\x00\xff").decode(),
        "at": "2024-01-31T12:30:00.250000Z",
    }
    assert as_msgpack[0] == {**common, "data": b"\x00\xff", "at": INSTANT}
    assert as_json[1]["price"] == as_msgpack[1]["price"] == "-0.05"
    assert as_json[1]["double"] == as_msgpack[1]["double"] == 1e300
    assert as_json[1]["local"] == "0001-01-01T00:00:00.000000"
    assert list(as_json[0]) == list(as_msgpack[0]) == batch.schema.names


def test_values_nulls_are_null_in_every_column() -> None:
    kinds = [
        pa.bool_(),
        pa.int8(),
        pa.int64(),
        pa.float64(),
        pa.decimal128(5, 1),
        pa.string(),
        pa.binary(),
        pa.date32(),
        pa.timestamp("us", "UTC"),
        pa.timestamp("us"),
        pa.list_(pa.int32()),
        pa.struct([("x", pa.int32())]),
    ]
    batch = pa.RecordBatch.from_arrays(
        [pa.nulls(2, kind) for kind in kinds], names=[f"c{i}" for i in range(len(kinds))]
    )
    expected = [dict.fromkeys(batch.schema.names)] * 2
    assert both(batch) == (expected, expected)


def test_values_nulls_among_others_stay_apart() -> None:
    batch = batch_of(
        a=pa.array([1, None, 3]), b=pa.array(["x", "y", None]), c=pa.array([None, 2.5, 3.5])
    )
    expected = [
        {"a": 1, "b": "x", "c": None},
        {"a": None, "b": "y", "c": 2.5},
        {"a": 3, "b": None, "c": 3.5},
    ]
    assert both(batch) == (expected, expected)


def test_values_json_has_text_for_floats_that_it_lacks() -> None:
    batch = batch_of(x=pa.array([math.nan, math.inf, -math.inf, None, 1.5]))
    assert [row["x"] for row in decoded(batch, "json")] == [
        "NaN",
        "Infinity",
        "-Infinity",
        None,
        1.5,
    ]
    found = [row["x"] for row in decoded(batch, "msgpack")]
    assert math.isnan(found[0])
    assert found[1:] == [math.inf, -math.inf, None, 1.5]


def test_values_nested_types_become_objects_and_arrays() -> None:
    struct = pa.struct([("x", pa.int32()), ("at", pa.timestamp("us", "UTC")), ("d", pa.binary())])
    batch = batch_of(
        s=pa.array([{"x": 1, "at": INSTANT, "d": b"\x00"}, None], struct),
        a=pa.array([[1.5, math.nan], []], pa.list_(pa.float64())),
        m=pa.array([[(1, "one")], [(2, None)]], pa.map_(pa.int32(), pa.string())),
        p=pa.array([[decimal.Decimal("1.10")], None], pa.list_(pa.decimal128(4, 2))),
    )
    as_json, as_msgpack = both(batch)
    assert as_json == [
        {
            "s": {"x": 1, "at": "2024-01-31T12:30:00.250000Z", "d": "AA=="},
            "a": [1.5, "NaN"],
            "m": {"1": "one"},
            "p": ["1.10"],
        },
        {"s": None, "a": [], "m": {"2": None}, "p": None},
    ]
    assert as_msgpack[0]["s"] == {"x": 1, "at": INSTANT, "d": b"\x00"}
    assert as_msgpack[0]["m"] == {1: "one"}
    assert as_msgpack[1] == {"s": None, "a": [], "m": {2: None}, "p": None}


def test_values_nested_instants_of_early_years_have_four_digits_too() -> None:
    early = dt.datetime(1, 1, 1, tzinfo=dt.UTC)
    batch = batch_of(a=pa.array([[early]], pa.list_(pa.timestamp("us", "UTC"))))
    assert both(batch)[0] == [{"a": ["0001-01-01T00:00:00.000000Z"]}]


def as_json_text(column: pa.Array) -> list[str]:
    """Return a column's JSON texts, as they stand in the object ``{"x":…}``."""
    values = ENCODERS["json"](batch_of(x=column)).to_pylist()
    return [value.decode()[len('{"x":') : -1] for value in values]


def listed(column: pa.Array) -> pa.Array:
    """Return a column of lists of one item each."""
    offsets = pa.array(range(len(column) + 1), pa.int32())
    return pa.ListArray.from_arrays(offsets, column)


FLOATS = [0.1, 3.0, -0.0, 1e16, 1e300, 5e-324, 16777216.0, math.nan, -math.inf]


@pytest.mark.parametrize(
    "column",
    [
        pa.array(FLOATS),
        pa.array(FLOATS, pa.float32()),
        pa.array([decimal.Decimal(0), decimal.Decimal("1E-18")], pa.decimal128(38, 18)),
        pa.array([INSTANT, None], pa.timestamp("us", "UTC")),
        pa.array([b"\x00\xff", None]),
        pa.array(['"', "é\n", None]),
        pa.array([True, False, None]),
        pa.array([[1, None], [], None], pa.list_(pa.int64())),
        pa.array([{"a": 1}, None], pa.struct([("a", pa.int8())])),
    ],
    ids=lambda column: str(column.type),
)
def test_values_json_is_the_same_within_others_as_by_itself(column: pa.Array) -> None:
    alone = as_json_text(column)
    assert as_json_text(listed(column)) == [f"[{text}]" for text in alone]
    structs = pa.StructArray.from_arrays([column], names=["s"])
    assert as_json_text(structs) == [f'{{"s":{text}}}' for text in alone]
    offsets = pa.array(range(len(column) + 1), pa.int32())
    maps = pa.MapArray.from_arrays(offsets, pa.array(["k"] * len(column)), column)
    assert as_json_text(maps) == [f'{{"k":{text}}}' for text in alone]


def test_values_json_floats_are_floats_again_and_float32_as_written() -> None:
    found = as_json_text(pa.array(FLOATS))
    assert found[:3] == ["0.1", "3.0", "-0.0"]
    assert [json.loads(text) for text in found[:7]] == FLOATS[:7]
    assert all(isinstance(json.loads(text), float) for text in found[:7])
    assert math.copysign(1, json.loads(found[2])) == -1
    assert as_json_text(pa.array([0.1, 1.0], pa.float32())) == ["0.1", "1.0"]


@pytest.mark.parametrize(
    ("unit", "count", "text"),
    [
        ("s", 316_590_595_200, "+12002-05-11T00:00:00.000000"),
        ("ms", 10**17, "+3170843-11-07T09:46:40.000000"),
        ("us", -(1 << 63), "-290308-12-21T19:59:05.224192"),
        ("ns", 1, "1970-01-01T00:00:00.000000001"),
    ],
)
def test_values_of_years_beyond_four_digits_have_a_sign(unit: str, count: int, text: str) -> None:
    days = pa.array([3664329, -735604, 12687428], pa.int32()).cast(pa.date32())
    assert as_json_text(days) == ['"+12002-08-05"', '"-0045-12-27"', '"+36707-01-01"']
    assert as_json_text(pa.array([count], pa.timestamp(unit))) == [f'"{text}"']


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_values_decimals_have_no_exponent(encoding: str) -> None:
    kind = pa.decimal128(38, 18)
    given = [decimal.Decimal(text) for text in ("0", "1E-18", "-1E-7", "1.5")]
    batch = batch_of(
        x=pa.array([None, *given], kind), y=pa.array([[]] + [[d] for d in given], pa.list_(kind))
    )
    texts = [
        "0.000000000000000000",
        "0.000000000000000001",
        "-0.000000100000000000",
        "1.500000000000000000",
    ]
    assert decoded(batch, encoding) == [
        {"x": None, "y": []},
        *({"x": text, "y": [text]} for text in texts),
    ]


def test_values_json_keys_of_maps_are_texts() -> None:
    def keyed(kind: pa.DataType, *keys: Any) -> list[str]:
        column = pa.array([[(key, 1)] for key in keys], pa.map_(kind, pa.int8()))
        return [next(iter(json.loads(text))) for text in as_json_text(column)]

    assert keyed(pa.float64(), 1.5, -0.0, math.nan) == ["1.5", "-0.0", "NaN"]
    assert keyed(pa.bool_(), True) == ["true"]
    assert keyed(pa.string(), 'a "b"') == ['a "b"']
    assert keyed(pa.date32(), dt.date(2024, 1, 31)) == ["2024-01-31"]
    assert keyed(pa.binary(), b"\x00") == ["AA=="]


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_values_maps_with_keys_that_are_not_plain_are_refused_by_name(encoding: str) -> None:
    for kind in (pa.list_(pa.int8()), pa.struct([("a", pa.int8())])):
        within = pa.list_(pa.map_(kind, pa.int8()))
        for wanted in (pa.map_(kind, pa.int8()), within):
            with pytest.raises(InvalidArgumentError, match="column 'm': a map's key of type"):
                ENCODERS[encoding](batch_of(m=pa.nulls(1, wanted)))


def test_values_nested_slices_are_those_of_the_slice() -> None:
    struct = pa.struct([("x", pa.list_(pa.int8()))])
    batch = batch_of(
        a=pa.array([["u"], ["v", None], None, []], pa.list_(pa.string())),
        m=pa.array([[("k", 1)], [("l", 2), ("m", 3)], None, []], pa.map_(pa.string(), pa.int8())),
        s=pa.array([{"x": [1]}, {"x": [2, 3]}, None, {"x": None}], struct),
    ).slice(1)
    expected = [
        {"a": ["v", None], "m": {"l": 2, "m": 3}, "s": {"x": [2, 3]}},
        {"a": None, "m": None, "s": None},
        {"a": [], "m": {}, "s": {"x": None}},
    ]
    assert both(batch) == (expected, expected)


@pytest.mark.parametrize("length", [31, 32, 255, 256, 65_535, 65_536])
def test_values_msgpack_heads_fit_the_longest(length: int) -> None:
    batch = batch_of(t=pa.array(["x" * length, "short"]), b=pa.array([b"y" * length, b""]))
    assert decoded(batch, "msgpack") == [
        {"t": "x" * length, "b": b"y" * length},
        {"t": "short", "b": b""},
    ]


@pytest.mark.parametrize("count", [15, 16, 300])
def test_values_maps_of_many_columns_are_whole(count: int) -> None:
    batch = pa.RecordBatch.from_arrays(
        [pa.array([i]) for i in range(count)],
        names=[f"a long name of a column {i}" for i in range(count)],
    )
    expected = [{f"a long name of a column {i}": i for i in range(count)}]
    assert both(batch) == (expected, expected)


def test_values_instants_outside_the_short_format_are_exact() -> None:
    instants = [
        dt.datetime(1960, 1, 1, 0, 0, 0, 1, UTC),
        dt.datetime(2600, 1, 1, tzinfo=UTC),
        INSTANT,
    ]
    batch = batch_of(at=pa.array(instants, pa.timestamp("us", "UTC")))
    as_json, as_msgpack = both(batch)
    assert [row["at"] for row in as_msgpack] == instants
    assert [dt.datetime.fromisoformat(row["at"]) for row in as_json] == instants


def test_values_of_slices_are_those_of_the_slice() -> None:
    batch = batch_of(
        n=pa.array([1, 2, None, 4]), t=pa.array(["a", 'b"', None, "d\n"]), f=pa.array([True] * 4)
    ).slice(1, 3)
    expected = [
        {"n": 2, "t": 'b"', "f": True},
        {"n": None, "t": None, "f": True},
        {"n": 4, "t": "d\n", "f": True},
    ]
    assert both(batch) == (expected, expected)


def test_values_names_are_escaped_and_may_be_empty() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([1]), pa.array(["x"])], names=['a "b"\té', ""])
    expected = [{'a "b"\té': 1, "": "x"}]
    assert both(batch) == (expected, expected)


ROWS = st.lists(
    st.tuples(
        st.one_of(st.none(), st.integers(-(1 << 63), (1 << 63) - 1)),
        st.one_of(st.none(), st.text(st.characters(codec="utf-8"), max_size=40)),
        st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False)),
        st.one_of(st.none(), st.binary(max_size=40)),
    ),
    min_size=1,
    max_size=30,
)


@given(ROWS)
def test_values_any_rows_come_back_as_they_were(rows: list[tuple[Any, ...]]) -> None:
    numbers, texts, floats, data = zip(*rows, strict=True)
    batch = batch_of(
        n=pa.array(numbers, pa.int64()),
        t=pa.array(texts, pa.string()),
        f=pa.array(floats, pa.float64()),
        d=pa.array(data, pa.binary()),
    )
    as_json, as_msgpack = both(batch)
    for row, from_json, from_msgpack in zip(rows, as_json, as_msgpack, strict=True):
        assert tuple(from_msgpack.values()) == row
        in_base64 = None if row[3] is None else base64.b64encode(row[3]).decode()
        assert tuple(from_json.values()) == (*row[:3], in_base64)


def test_values_nanoseconds_have_nine_digits_and_whole_microseconds_six() -> None:
    batch = batch_of(
        at=pa.array([1, 1_000, None], pa.timestamp("ns", "UTC")),
        local=pa.array([1, -1_000, None], pa.timestamp("ns")),
        time=pa.array([1, 1_000, None], pa.time64("ns")),
    )
    as_json, as_msgpack = both(batch)
    assert [row["at"] for row in as_json] == [
        "1970-01-01T00:00:00.000000001Z",
        "1970-01-01T00:00:00.000001Z",
        None,
    ]
    assert [row["local"] for row in as_json][1] == "1969-12-31T23:59:59.999999"
    assert [row["time"] for row in as_json] == ["00:00:00.000000001", "00:00:00.000001", None]
    assert [row["at"] for row in as_msgpack][1:] == [dt.datetime(1970, 1, 1, 0, 0, 0, 1, UTC), None]
    for name in ("local", "time"):
        assert [row[name] for row in as_msgpack] == [row[name] for row in as_json]


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_values_types_without_a_form_are_refused_by_name(encoding: str) -> None:
    batch = batch_of(wait=pa.array([dt.timedelta(1)]))
    with pytest.raises(InvalidArgumentError, match="column 'wait': type duration"):
        ENCODERS[encoding](batch)


def test_values_of_a_column_are_its_bytes() -> None:
    assert encode_column(pa.array(["é", None]), "v").to_pylist() == ["é".encode(), None]
    assert encode_column(pa.array([b"x"], pa.large_binary()), "v").to_pylist() == [b"x"]
    assert encode_column(pa.array([1, None]), "v").to_pylist() == [b"1", None]
    assert encode_column(pa.array([dt.date(2024, 1, 31)]), "v").to_pylist() == [b"2024-01-31"]
    assert encode_column(pa.array([math.inf, 1.0]), "v").to_pylist() == [b"Infinity", b"1.0"]
    assert encode_column(pa.array([["é", None], None]), "v").to_pylist() == [
        '["é",null]'.encode(),
        None,
    ]
    with pytest.raises(InvalidArgumentError, match="column 'v': type duration"):
        encode_column(pa.array([dt.timedelta(1)]), "v")
