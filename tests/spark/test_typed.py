"""Rows as values come back as typed columns, of which only those that are asked for are made."""

from __future__ import annotations

import datetime as dt
import decimal
import json
from collections.abc import Mapping
from typing import Any

import msgpack
import pyarrow as pa
import pytest
from pyspark.sql import types

from koinon.spark.datasource import KoinonDataSource, KoinonReader, Partitions
from koinon.spark.encoding import typed
from koinon.spark.encoding.values import ENCODERS
from koinon_proto.contract.errors import ConfigurationError, InvalidArgumentError
from koinon_proto.v1 import loads_pb2
from tests.spark.fake_loads import LoadsCluster

UTC = dt.UTC
KEY, TEXT = types.BinaryType(), types.StringType()
ROWS = pa.RecordBatch.from_pydict(
    {
        "long": pa.array([1, None, -3], pa.int64()),
        "int": pa.array([2**31 - 1, None, 0], pa.int32()),
        "text": pa.array(['a\n"b', "", None], pa.string()),
        "double": pa.array([1.5, -0.0, None], pa.float64()),
        "float": pa.array([0.1, None, 2.0], pa.float32()),
        "truth": pa.array([True, None, False]),
        "price": pa.array([decimal.Decimal("12.30"), None, decimal.Decimal("-0.01")]).cast(
            pa.decimal128(15, 2)
        ),
        "day": pa.array([dt.date(2024, 1, 31), None, dt.date(1, 1, 1)], pa.date32()),
        "at": pa.array(
            [dt.datetime(2024, 1, 31, 12, 0, 0, 5, UTC), None, dt.datetime(1960, 1, 1, tzinfo=UTC)],
            pa.timestamp("us", "UTC"),
        ),
        "local": pa.array([dt.datetime(2024, 1, 31), None, None], pa.timestamp("us")),
        "raw": pa.array([b"\x00\xff", None, b""], pa.binary()),
        "list": pa.array([[1, 2], None, []], pa.list_(pa.int64())),
    }
)
KEYS = pa.array([b"a", b"b", b"c"], pa.binary())
NO_NUMBERS = pa.RecordBatch.from_pydict(
    {"x": pa.array([float("nan"), float("inf"), -float("inf")], pa.float64())}
)


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_every_column_comes_back_as_it_was_written(encoding: str) -> None:
    values = ENCODERS[encoding](ROWS)
    columns = typed.decode_rows(KEYS, values, ROWS.schema, encoding)
    for field, column in zip(ROWS.schema, columns, strict=True):
        assert column.equals(ROWS.column(field.name)), field
    some = pa.schema([pa.field("int", pa.int32()), pa.field("lacking", pa.string())])
    chosen, lacking = typed.decode_rows(KEYS, values, some, encoding)
    assert chosen.equals(ROWS.column("int"))
    assert lacking.null_count == 3


def test_json_goes_by_columns_and_only_what_arrow_cannot_read_row_by_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched:
        patched.delattr(typed, "_decode_one_by_one")
        typed.decode_rows(KEYS, ENCODERS["json"](ROWS), ROWS.schema, "json")
    (column,) = typed.decode_rows(KEYS, ENCODERS["json"](NO_NUMBERS), NO_NUMBERS.schema, "json")
    assert str(column.to_pylist()) == "[nan, inf, -inf]"


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
@pytest.mark.parametrize(
    ("row", "told"),
    [
        (b"", "the value of key b'b': "),
        (b"\xc1", "the value of key b'b': "),
        ([1], "the value of key b'b': a list, not a row"),
        ({"n": "seven"}, "the value of key b'b': field 'n' is no int64"),
        ({"n": 1 << 63}, "the value of key b'b': field 'n' is no int64"),
    ],
)
def test_value_that_is_no_such_row_is_refused_by_its_key(
    encoding: str, row: Any, told: str
) -> None:
    dump = json.dumps if encoding == "json" else msgpack.packb
    made = row if isinstance(row, bytes) else dump(row)
    good = dump({"n": 1})
    values = [v.encode() if isinstance(v, str) else v for v in (good, made, good)]
    fields = pa.schema([pa.field("n", pa.int64())])
    with pytest.raises(InvalidArgumentError) as caught:
        typed.decode_rows(KEYS, pa.array(values, pa.binary()), fields, encoding)
    assert told in str(caught.value)


def reader_of(
    fake: LoadsCluster, fields: Mapping[str, types.DataType], **options: str
) -> KoinonReader:
    given = {"coordinators": fake.seeds, "timeout": "5s", "valueEncoding": "json", **options}
    schema = types.StructType([types.StructField(*field) for field in fields.items()])
    return KoinonDataSource(given).reader(schema)


def rows(reader: KoinonReader) -> list[tuple[Any, ...]]:
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    return sorted(row for batch in batches for row in zip(*batch.to_pydict().values(), strict=True))


def test_reader_decodes_the_fields_of_its_schema_and_of_single_keys(fake: LoadsCluster) -> None:
    for n in range(20):
        fake.write(b"k%02d" % n, json.dumps({"n": n, "price": "1.50"}).encode(), 0)
    schema = {"n": types.LongType(), "key": KEY, "price": types.DecimalType(9, 2)}
    expected = [(n, b"k%02d" % n, decimal.Decimal("1.50")) for n in range(20)]
    assert rows(reader_of(fake, schema)) == expected
    assert rows(reader_of(fake, schema, keys="k03,k07,none")) == [expected[3], expected[7]]


def test_reader_of_the_key_alone_reads_no_values(
    fake: LoadsCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.write(b"k", b"no row at all", 0)
    asked: list[bool] = []

    async def look(method: str, request: Any) -> None:
        if isinstance(request, loads_pb2.ReadColumnsRequest):
            asked.append(request.keys_only)

    for node in fake.nodes:
        node.before = look
    assert rows(reader_of(fake, {"key": KEY})) == [(b"k",)]
    assert set(asked) == {True}


@pytest.mark.parametrize(
    ("name", "kind", "told"),
    [
        ("m", types.MapType(TEXT, TEXT), "column 'm' of type map.* is not read from rows"),
        ("s", types.StructType().add("a", TEXT), "column 's' of type struct.* is not read from"),
        ("key", TEXT, "column 'key' has type binary"),
    ],
)
def test_schema_that_cannot_be_read_is_refused_by_column(
    fake: LoadsCluster, name: str, kind: types.DataType, told: str
) -> None:
    with pytest.raises(ConfigurationError, match=told):
        reader_of(fake, {name: kind})


def test_value_encoding_without_a_schema_asks_for_one() -> None:
    source = KoinonDataSource({"coordinators": "a:1", "valueEncoding": "json"})
    with pytest.raises(ConfigurationError, match=r"say which fields .* \.schema"):
        source.schema()


def test_partitions_of_no_rows_make_no_batches(fake: LoadsCluster) -> None:
    reader = reader_of(fake, {"n": types.LongType()})
    assert list(reader.read(Partitions(tuple(range(16))))) == []
