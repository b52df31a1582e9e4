"""``load``, ``ingest`` and Spark's writer make the same records of the same files."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from pyarrow import orc
from pyarrow import parquet as pq
from typer.testing import CliRunner

from koinon.client import Client
from koinon.ingest.opened_rows import Part
from koinon.ingest.row_groups import groups_of
from koinon.ingest.settings import Settings
from koinon.local import LocalCluster
from koinon.sources.opening import open_source
from koinon.spark.writing.planning import plan_rows
from koinon.spark.writing.rows import encode_rows
from tests.kit.command_line import koinon_app
from tests.spark.test_ingest import Ingest, ingest, stored

__all__ = ["ingest"]

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

AT = dt.datetime(2024, 1, 31, 12, 30, 0, 250_000)
TYPES: dict[str, tuple[pa.Array, str]] = {
    "bool": (pa.array([True, None]), "true"),
    "int8": (pa.array([-7, None], pa.int8()), "-7"),
    "int64": (pa.array([1 << 62, None]), str(1 << 62)),
    "uint8": (pa.array([255, None], pa.uint8()), "255"),
    "uint64": (pa.array([(1 << 64) - 1, None], pa.uint64()), str((1 << 64) - 1)),
    "half": (pa.array([1.5, None], pa.float16()), "1.5"),
    "float": (pa.array([0.1, None], pa.float32()), "0.1"),
    "double": (pa.array([1e20, None]), "1e+20"),
    "nan": (pa.array([float("nan"), None]), '"NaN"'),
    "decimal": (pa.array([Decimal("12.30"), None], pa.decimal128(10, 2)), '"12.30"'),
    "wide": (pa.array([Decimal("0.5"), None], pa.decimal256(50, 20)), '"0.50000000000000000000"'),
    "string": (pa.array(['say "é"', None]), '"say \\"é\\""'),
    "large": (pa.array(["x", None], pa.large_string()), '"x"'),
    "view": (pa.array(["x", None], pa.string_view()), '"x"'),
    "coded": (pa.array(["x", None]).dictionary_encode(), '"x"'),
    "binary": (pa.array([b"abcd", None]), '"YWJjZA=="'),
    "fixed": (pa.array([b"\xff\x00", None], pa.binary(2)), '"/wA="'),
    "date": (pa.array([AT.date(), None]), '"2024-01-31"'),
    "date64": (pa.array([AT.date(), None], pa.date64()), '"2024-01-31"'),
    "s": (pa.array([0, None], pa.timestamp("s", "UTC")), '"1970-01-01T00:00:00.000000Z"'),
    "us": (pa.array([AT, None], pa.timestamp("us", "UTC")), '"2024-01-31T12:30:00.250000Z"'),
    "zone": (
        pa.array([0, None], pa.timestamp("us", "Asia/Tokyo")),
        '"1970-01-01T00:00:00.000000Z"',
    ),
    "local": (pa.array([AT, None], pa.timestamp("ms")), '"2024-01-31T12:30:00.250000"'),
    "ns": (pa.array([5, None], pa.timestamp("ns", "UTC")), '"1970-01-01T00:00:00.000000005Z"'),
    "time": (pa.array([dt.time(12, 30), None], pa.time64("us")), '"12:30:00.000000"'),
    "list": (pa.array([[1, None], None]), "[1,null]"),
    "large_list": (pa.array([["a"], None], pa.large_list(pa.string())), '["a"]'),
    "fixed_list": (pa.array([[1, 2], None], pa.list_(pa.int8(), 2)), "[1,2]"),
    "map": (pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int64())), '{"a":1}'),
    "struct": (pa.array([{"x": 1, "y": b"z"}, None]), '{"x":1,"y":"eg=="}'),
    "null": (pa.nulls(2), "null"),
}
"""By a name: a column, and the JSON text of its first value; the second one is null."""
KEYS = pa.array(["doors/1", "doors/2"])
SETTINGS = Settings(coordinators="127.0.0.1:9", key="id")
NESTED = ("list", "large_list", "fixed_list", "map", "struct")


def table_of(names: Sequence[str]) -> pa.Table:
    return pa.table({"id": KEYS, **{name: TYPES[name][0] for name in names}})


def by_load(path: Path, key: str, value: str | None) -> tuple[list[bytes], list[bytes]]:
    (slab,) = open_source(path, "parquet", key, value)
    return slab.keys, slab.values


def by_ingest(path: Path, key: str, value: str | None) -> tuple[list[bytes], list[bytes]]:
    found = groups_of([path])
    assert found is not None
    encoding = "json" if value is None else None
    options = Settings(coordinators="127.0.0.1:9", key=key, value=value, encoding=encoding)
    plan = plan_rows(options.write_options(), list(found.fields.items()))
    (batch,) = Part(found.reader, tuple(found.sizes)).batches(list(found.fields))
    keys, values = encode_rows(batch, plan, options.write_options())
    return keys.to_pylist(), values.to_pylist()


@pytest.mark.parametrize("name", TYPES)
def test_column_of_any_type_has_its_text_by_either_door(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(table_of([name]), path)
    text = TYPES[name][1]
    assert by_load(path, "id", None) == by_ingest(path, "id", None)
    assert by_load(path, "id", None)[1] == [
        f'{{"id":"doors/{n}","{name}":{shown}}}'.encode() for n, shown in ((1, text), (2, "null"))
    ]
    if name == "null":
        return
    plain = TYPES[name][0][0].as_py() if name in ("binary", "fixed") else None
    plain = plain or (text if name in NESTED else str(json.loads(text, parse_int=str))).encode()
    plain = {"bool": b"true", "float": b"0.1", "double": text.encode()}.get(name, plain)
    assert by_load(path, "id", name)[1] == [plain]
    assert by_ingest(path, "id", name)[1] == [plain, None]
    if name not in NESTED:
        assert by_load(path, name, "id")[0] == [plain]
        assert by_ingest(path, name, "id")[0] == [plain, None]


def load(cluster: LocalCluster, path: Path, *arguments: str) -> None:
    environment = {"KOINON_COORDINATORS": cluster.coordinators, "COLUMNS": "200"}
    ended = CliRunner().invoke(koinon_app(), ["load", str(path), *arguments], env=environment)
    assert ended.exit_code == 0, ended.output


def test_rows_of_every_type_are_alike_by_each_door_and_come_back_typed(
    ingest: Ingest, spark: SparkSession, cluster: LocalCluster, client: Client, tmp_path: Path
) -> None:
    whole, sparks = tmp_path / "whole.parquet", tmp_path / "sparks.parquet"
    pq.write_table(table_of(list(TYPES)), whole)
    load(cluster, whole, "--key", "id")
    loaded = stored(client, b"doors/")
    assert json.loads(loaded[b"doors/2"]) == {"id": "doors/2"} | dict.fromkeys(TYPES)
    client.put(b"doors/1", b"other")
    code, _, messages = ingest(whole, "--key", "id")
    assert code == 0, messages
    assert stored(client, b"doors/") == loaded

    typed = {
        "bool": "boolean",
        "int8": "byte",
        "int64": "long",
        "float": "float",
        "double": "double",
        "decimal": "decimal(10,2)",
        "string": "string",
        "binary": "binary",
        "date": "date",
        "us": "timestamp",
        "local": "timestamp_ntz",
        "list": "array<long>",
    }
    at = {"coordinators": cluster.coordinators, "valueEncoding": "json"}
    schema = ", ".join(f"`{name}` {kind}" for name, kind in typed.items())
    reading = spark.read.format("koinon").options(**at, prefix="doors/1").schema(schema)
    expected = {name: TYPES[name][0][0].as_py() for name in typed}
    expected["float"] = pytest.approx(0.1)
    for _ in ("what load and ingest wrote", "what Spark writes"):
        (row,) = reading.load().collect()
        found = row.asDict()
        found["us"] = found["us"].astimezone(dt.UTC)
        assert found == expected
        pq.write_table(table_of([*typed, "map", "struct"]), sparks)
        frame = spark.read.parquet(str(sparks))
        frame.write.format("koinon").options(**at, keyColumn="id").mode("append").save()
    names = ["id", *typed, "map", "struct"]
    for key, value in stored(client, b"doors/").items():
        as_loaded = json.loads(loaded[key])
        assert json.loads(value) == {name: as_loaded[name] for name in names}


MIXED = """{"id":"mixed/1", "v":1,"big":12345678901234567890}
{"id":"mixed/2","v":"a", "ID":2}

{"id":"mixed/3","v":true,"big":5e0}
"""


def test_json_lines_are_kept_by_either_door(
    ingest: Ingest, cluster: LocalCluster, client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "mixed.jsonl"
    path.write_text(MIXED)
    lines = [line.encode() for line in MIXED.splitlines() if line]
    kept = {b"mixed/%d" % n: line for n, line in enumerate(lines, start=1)}
    load(cluster, path, "--key", "id")
    assert stored(client, b"mixed/") == kept
    client.delete_many(kept)
    code, _, messages = ingest(path, "--key", "id")
    assert code == 0, messages
    assert stored(client, b"mixed/") == kept
    path.write_text(MIXED + "oops\n")
    code, _, messages = ingest(path, "--key", "id")
    assert code == 2
    assert f"a malformed row: {path} line 5: not JSON" in " ".join(messages.split())


def test_json_lines_of_elsewhere_are_kept(spark: SparkSession, tmp_path: Path) -> None:
    """As Spark hands them over, of whatever file system."""
    from koinon.ingest.opened_rows import open_rows

    path = tmp_path / "mixed.jsonl"
    path.write_text(MIXED + "oops\n")
    settings = Settings(coordinators="127.0.0.1:9", key="id", encoding="json")
    opened = open_rows(spark, [f"file://{path}"], "jsonl", settings, conf={}, keep_malformed=True)
    assert opened.parts is None
    rows = {row.id: row.row for row in opened.frame.collect()}
    assert list(rows.values()) == [line for line in MIXED.splitlines() if line]
    assert [row._koinon_malformed for row in opened.malformed.collect()] == [
        "not JSON: Expecting value: line 1 column 1 (char 0): oops"
    ]


NAMES = (
    *("_orders", ".orders", "x:y", "orders[1]", "o{1}", "sp ace", "per%20cent", "ha#sh"),
    *("q?mark", "zażółć", "com,ma", "back\\slash", "star*", "-dash"),
)


@pytest.mark.parametrize("kind", ["parquet", "orc", "csv", "jsonl"])
def test_file_of_any_name_is_that_file(
    ingest: Ingest, client: Client, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = [tmp_path / f"{name}.{kind}" for name in NAMES]
    for number, path in enumerate(paths):
        key = f"names/{kind}/{number}"
        if kind == "csv":
            path.write_text(f"id\n{key}\n")
        elif kind == "jsonl":
            path.write_text(json.dumps({"id": key}))
        else:
            {"parquet": pq, "orc": orc}[kind].write_table(pa.table({"id": [key]}), path)
    expected = {b"names/%b/%d" % (kind.encode(), n) for n in range(len(NAMES))}
    first, *others = [f"./{path.name}" for path in paths]
    code, _, messages = ingest(Path(first), *others, "--key", "id", "--value", "id")
    assert code == 0, messages
    assert set(stored(client, b"names/" + kind.encode())) == expected
    if kind != "orc":
        rows = (open_source(Path(path.name), kind, "id", None) for path in paths)
        assert {key for slabs in rows for slab in slabs for key in slab.keys} == expected


def test_columns_beside_keys_and_values_are_typed_by_all_of_their_cells(
    ingest: Ingest, client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "o.jsonl"
    lines = ['{"id":"beside/1","at":9,"gone":false}', '{"id":"beside/1","at":10.5}']
    path.write_text("\n".join([*lines, '{"id":"beside/2","gone":true}']))
    client.put(b"beside/2", b"old")
    arguments = ("--key", "id", "--order-by", "at", "--delete-column", "gone")
    code, _, messages = ingest(path, *arguments)
    assert code == 0, messages
    assert stored(client, b"beside/") == {b"beside/1": lines[1].encode()}


def test_rows_whose_text_is_not_utf_8_are_told_by_file_and_line(
    ingest: Ingest, client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "latin1.csv"
    path.write_bytes(b"id,name\nlatin/1,x\nlatin/2,M\xfcnchen\n")
    code, _, messages = ingest(path, "--key", "id")
    assert code == 2
    assert f"{path} line 3: column 'name' is not UTF-8" in " ".join(messages.split())
    code, _, messages = ingest(path, "--key", "id", "--value", "name")
    assert code == 0, messages
    assert client.get(b"latin/2") == b"M\xfcnchen"
