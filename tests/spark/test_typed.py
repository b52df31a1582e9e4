"""Rows as values come back as typed columns, of which only those that are asked for are made."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import re
from collections.abc import Sequence
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
PLAIN = pa.struct([("x", pa.int64()), ("y", pa.list_(pa.string()))])
FAR = [3664329, -735604, 12687428]  # +12002-08-05, year -45, a year beyond Arrow's texts
MIDNIGHTS = [86_400_000_000 * days for days in FAR[:2]]
OTHERS = [
    pa.array([float("nan"), float("inf"), -float("inf")], pa.float64()),
    pa.array(FAR, pa.int32()).cast(pa.date32()),
    pa.array([*MIDNIGHTS, None], pa.timestamp("us")),
    pa.array([*MIDNIGHTS, (1 << 63) - 1], pa.timestamp("us", "UTC")),
    pa.array([[{"k": 1}], [], None], pa.list_(pa.struct([("k", pa.int32())]))),
    pa.array([{"x": 1, "y": ["a", None]}, None, {"x": None, "y": None}], PLAIN),
    pa.array([[("a", b"\x00")], [], None], pa.map_(pa.string(), pa.binary())),
    pa.array([[(1, [FAR[0]])], [(-2, None)], []], pa.map_(pa.int32(), pa.list_(pa.date32()))),
    pa.array([[(True, 1.5)], [(False, None)], None], pa.map_(pa.bool_(), pa.float64())),
    pa.array(
        [{"at": MIDNIGHTS[0], "p": decimal.Decimal("1.50")}, {"at": MIDNIGHTS[1], "p": None}, None],
        pa.struct([("at", pa.timestamp("us", "UTC")), ("p", pa.decimal128(9, 2))]),
    ),
]


def decoded(values: Sequence[bytes] | Any, fields: Any, encoding: str, **form: Any) -> Any:
    """Return the columns, and the rows that stay."""
    row_form = typed.RowForm(fields=fields, encoding=encoding, **form)
    return typed.decode_rows(KEYS, pa.array(values, pa.binary()), row_form)


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_every_column_comes_back_as_it_was_written(encoding: str) -> None:
    values = ENCODERS[encoding](ROWS)
    columns, kept = decoded(values, ROWS.schema, encoding)
    assert kept is None
    for field in ROWS.schema:
        assert columns[field.name].equals(ROWS.column(field.name)), field
    some = pa.schema([pa.field("int", pa.int32()), pa.field("lacking", pa.string())])
    columns, _ = decoded(values, some, encoding)
    assert columns["int"].equals(ROWS.column("int"))
    assert columns["lacking"].null_count == 3


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
@pytest.mark.parametrize("column", OTHERS, ids=lambda column: str(column.type))
def test_columns_that_arrows_reader_does_not_read_come_back_too(column: Any, encoding: str) -> None:
    for batch in (
        pa.RecordBatch.from_arrays([column], names=["x"]),
        pa.RecordBatch.from_arrays([pa.StructArray.from_arrays([column], names=["in"])], ["x"]),
    ):
        columns, _ = decoded(ENCODERS[encoding](batch), batch.schema, encoding)
        found, written = columns["x"], batch.column("x")
        assert found.equals(written) or str(found) == str(written)  # NaN is not equal


def test_json_goes_by_columns_and_only_what_arrow_cannot_read_row_by_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(typed, "_decode_one_by_one")
    plain = pa.RecordBatch.from_arrays([*ROWS.columns, OTHERS[5]], [*ROWS.schema.names, "s"])
    columns, _ = decoded(ENCODERS["json"](plain), plain.schema, "json")
    assert columns["s"].equals(OTHERS[5])
    many = pa.RecordBatch.from_pydict({"n": range(50_000)})
    form = typed.RowForm(fields=many.schema, encoding="json")
    columns, _ = typed.decode_rows(None, ENCODERS["json"](many), form)
    assert columns["n"].equals(many.column("n"))


ROW = b'{"n": 1}'
MALFORMED: dict[str, tuple[Any, str]] = {
    "nothing": (b"", "the value of key b'b': "),
    "no document": (b"\xc1", "the value of key b'b': "),
    "a list": ([1], "the value of key b'b': a list, not a row"),
    "a text": ({"n": "seven"}, "the value of key b'b': field 'n' is no int64"),
    "too large": ({"n": 1 << 63}, "the value of key b'b': field 'n' is no int64"),
    "null": ({"n": None}, "field 'n' is NOT NULL"),
    "without it": ({}, "field 'n' is NOT NULL"),
}
MALFORMED_JSON = {
    "two rows": ROW * 2,
    "two lines": ROW + b"\n" + ROW,
    "a row and a part": ROW + b' {"n":',
    "a comma": ROW + b",",
    "a byte order mark": b"\xef\xbb\xbf" + ROW,
    "not UTF-8": b'{"n": 1, "t": "\xff"}',
    "half a pair": rb'{"n": 1, "t": "\ud800"}',
}
FIELDS = pa.schema([pa.field("n", pa.int64(), nullable=False), pa.field("t", pa.string())])


def test_values_with_no_or_several_documents_lend_no_row_to_other_keys() -> None:
    """Three values, three documents: by their number alone nobody would notice."""
    for values, kept_rows in (
        ([ROW * 2, b" ", ROW], [2]),
        ([ROW * 2, b'{"n": 1, "m":', b'{"n": 3}}'], []),  # the second ends with the third
    ):
        with pytest.raises(InvalidArgumentError, match="the value of key b'a': "):
            decoded(values, FIELDS, "json")
        columns, kept = decoded(values, FIELDS, "json", mode="dropmalformed")
        assert kept.to_pylist() == kept_rows
        assert columns["n"].to_pylist() == [1] * len(kept_rows)


@pytest.mark.parametrize(
    ("encoding", "value", "told"),
    [
        *(("json", *given) for given in MALFORMED.values()),
        *(("msgpack", *given) for given in MALFORMED.values()),
        *(("json", given, "the value of key b'b': ") for given in MALFORMED_JSON.values()),
        ("msgpack", msgpack.packb({"n": 1}) * 2, "the value of key b'b': "),
    ],
)
def test_malformed_value_is_refused_dropped_or_set_apart(
    encoding: str, value: Any, told: str
) -> None:
    def dump(row: Any) -> bytes:
        return json.dumps(row).encode() if encoding == "json" else msgpack.packb(row)

    made = value if isinstance(value, bytes) else dump(value)
    values = [dump({"n": 1}), made, dump({"n": 3})]
    with pytest.raises(InvalidArgumentError) as caught:
        decoded(values, FIELDS, encoding)
    assert told in str(caught.value)
    columns, kept = decoded(values, FIELDS, encoding, mode="dropmalformed")
    assert (columns["n"].to_pylist(), kept.to_pylist()) == ([1, 3], [0, 2])
    for kind in (pa.string(), pa.binary()):
        corrupt = pa.field("_corrupt_record", kind)
        columns, kept = decoded(values, FIELDS, encoding, mode="permissive", corrupt=corrupt)
        assert kept is None
        assert columns["n"].to_pylist() == [1, None, 3]
        shown = made if kind == pa.binary() else made.decode(errors="backslashreplace")
        assert columns["_corrupt_record"].to_pylist() == [None, shown, None]
    columns, _ = decoded([values[0]] * 3, FIELDS, encoding, mode="permissive", corrupt=corrupt)
    assert columns["_corrupt_record"].null_count == 3


def reader_of(fake: LoadsCluster, schema: str, **options: str) -> KoinonReader:
    given = {"coordinators": fake.seeds, "timeout": "5s", "valueEncoding": "json", **options}
    columns = [
        {"name": name, "type": kind, "nullable": not strict, "metadata": {}}
        for name, kind, strict in re.findall(r"(\w+) (.+?)(?: (not null))?(?:; |$)", schema)
    ]
    return KoinonDataSource(given).reader(types.StructType.fromJson({"fields": columns}))


def rows(reader: KoinonReader) -> list[tuple[Any, ...]]:
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    return sorted(row for batch in batches for row in zip(*batch.to_pydict().values(), strict=True))


def test_reader_decodes_the_fields_of_its_schema_and_of_single_keys(fake: LoadsCluster) -> None:
    for n in range(20):
        fake.write(b"k%02d" % n, json.dumps({"n": n, "price": "1.50"}).encode(), 0)
    schema, given = "n long; _key binary; price decimal(9,2)", {"metadata": "true"}
    expected = [(n, b"k%02d" % n, decimal.Decimal("1.50")) for n in range(20)]
    assert rows(reader_of(fake, schema, **given)) == expected
    assert rows(reader_of(fake, schema, **given, keys="k03,k07,none")) == [expected[3], expected[7]]


def test_reader_of_rows_has_every_field_by_its_name_and_metadata_only_if_asked(
    fake: LoadsCluster,
) -> None:
    row = {"key": "k", "value": 2, "version": 3, "expires_at": "e", "_version": 4}
    version = fake.write(b"r", json.dumps(row).encode(), 0)
    fields = "key string; value integer; version long; expires_at string"
    assert rows(reader_of(fake, f"{fields}; _version integer")) == [tuple(row.values())]
    (both,) = rows(reader_of(fake, f"{fields}; _version long; _key binary", metadata="true"))
    assert both == ("k", 2, 3, "e", version, b"r")


def test_reader_of_the_key_alone_reads_no_values(fake: LoadsCluster) -> None:
    fake.write(b"k", b"no row at all", 0)
    asked: list[bool] = []

    async def look(method: str, request: Any) -> None:
        if isinstance(request, loads_pb2.ReadColumnsRequest):
            asked.append(request.keys_only)

    for node in fake.nodes:
        node.before = look
    assert rows(reader_of(fake, "_key binary not null", metadata="true")) == [(b"k",)]
    assert set(asked) == {True}


def test_reader_leaves_malformed_values_out_of_every_column(fake: LoadsCluster) -> None:
    for n in range(9):
        fake.write(b"good%d" % n, b'{"n": %d}' % n, 0)
        fake.write(b"bad%d" % n, b"none", 0)
    schema, given = "n long; _key binary", {"metadata": "true"}
    assert rows(reader_of(fake, schema, **given, mode="DROPMALFORMED")) == [
        (n, b"good%d" % n) for n in range(9)
    ]
    found = reader_of(fake, f"{schema}; bad string", mode="PERMISSIVE", **given)
    assert found.wanted.rows is not None
    assert found.wanted.rows.corrupt is None
    given["columnNameOfCorruptRecord"] = "bad"
    found = reader_of(fake, "_key binary; bad string", mode="PERMISSIVE", **given)
    expected = [(b"bad%d" % n, "none") for n in range(9)]
    assert rows(found) == [*expected, *((b"good%d" % n, None) for n in range(9))]


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ("i interval day", "column 'i' of type interval day is not read from rows"),
        ("_key string", "column '_key' has type binary"),
        ("_corrupt_record integer", "column '_corrupt_record' has type string or binary"),
        ("n long not null", "column 'n' is NOT NULL: mode permissive"),
    ],
)
def test_schema_that_cannot_be_read_is_refused_by_column(
    fake: LoadsCluster, schema: str, told: str
) -> None:
    with pytest.raises(ConfigurationError, match=told):
        reader_of(fake, schema, metadata="true", mode="PERMISSIVE")


def test_value_encoding_without_a_schema_asks_for_one() -> None:
    source = KoinonDataSource({"coordinators": "a:1", "valueEncoding": "json"})
    with pytest.raises(ConfigurationError, match=r"say which fields .* \.schema"):
        source.schema()


def test_partitions_of_no_rows_make_no_batches(fake: LoadsCluster) -> None:
    reader = reader_of(fake, "n long")
    assert list(reader.read(Partitions(tuple(range(16))))) == []
