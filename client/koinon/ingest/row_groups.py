"""Parquet files of this machine, read by Spark's Python tasks themselves.

Spark reads Parquet in Java and hands each row on to Python, which costs about what Python does with
it then. Where tasks can open the files, and where Arrow is sure to give the same values as Spark, a
job's tasks are given row groups instead of rows. Everything else goes by Spark's reader:
``parts_of`` says which it is to be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from koinon.ingest.files import is_local, local_files

BATCH_ROWS: Final = 65_536
PART_BYTES_MIN, PART_BYTES_MAX = 4 * 1024 * 1024, 128 * 1024 * 1024
READ_BYTES: Final = 1024 * 1024
_OTHER_CALENDAR: Final = b"org.apache.spark.legacyDateTime"
_SPARK: Final = b"org.apache.spark.version"  # before 3 it wrote dates by the other calendar, too
_STRINGS: Final = ("string", "large_string", "string_view")
_BINARIES: Final = ("binary", "large_binary", "binary_view")
_SAME_AS: Final = {
    "boolean": ("bool",),
    "byte": ("int8",),
    "short": ("int16",),
    "integer": ("int32",),
    "long": ("int64",),
    "float": ("float",),
    "double": ("double",),
    "date": ("date32[day]",),
    "string": _STRINGS,
    "binary": _BINARIES,
}
"""By a type of Spark's, as its schema writes it, the types of Arrow's that hold the same values."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Row groups ``[first, end)`` of a file."""

    path: str
    first: int
    end: int


Part = tuple[Groups, ...]
"""The part of the files that one task reads."""


def parts_of(
    paths: Sequence[str],
    fields: Mapping[str, Any],
    *,
    kind: str,
    master: str,
    conf: Mapping[str, str],
    tasks: int,
) -> list[Part] | None:
    """Return the files in parts, for ``tasks`` that run at once; None where Spark has to read them:
    they are not Parquet, tasks may run on other machines, Spark's own settings may change what it
    reads, a file has other columns than all files together, or one that Arrow might read
    differently.

    Args:
        fields: the columns of all files, from name to type as Spark's schema writes it in JSON.
    """
    if kind != "parquet" or not master.startswith("local") or not all(map(is_local, paths)):
        return None
    if any(name.startswith(("spark.sql.", "spark.hadoop.")) for name in conf):
        return None
    files = local_files(paths)
    sizes: dict[Groups, int] = {}
    for file in files:
        found = _groups_of(file, fields)
        if found is None:
            return None
        sizes.update(found)
    return _packed(sizes, tasks)


def fields_of(schema: Any) -> dict[str, Any]:
    """Return the columns of a Spark schema: from name to type as it writes it in JSON."""
    return {field["name"]: field["type"] for field in schema.jsonValue()["fields"]}


def batches_of(part: Part, names: Sequence[str]) -> Iterator[Any]:
    """Yield the rows of a part as record batches of these columns, typed as Spark types them.

    Raises:
        OSError: a file cannot be read, or is damaged.
    """
    import pyarrow.parquet as pq

    for groups in part:
        with pq.ParquetFile(groups.path, pre_buffer=False, buffer_size=READ_BYTES) as file:
            numbers = list(range(groups.first, groups.end))
            for batch in file.iter_batches(
                BATCH_ROWS, row_groups=numbers, columns=list(names), use_threads=False
            ):
                yield _as_spark_types(batch.select(list(names)))


def _as_spark_types(batch: Any) -> Any:
    import pyarrow as pa

    plain = [
        field.with_type(pa.string())
        if str(field.type) in _STRINGS
        else field.with_type(pa.binary())
        if str(field.type) in _BINARIES
        else field
        for field in batch.schema
    ]
    return batch.cast(pa.schema(plain))


def _groups_of(file: Path, fields: Mapping[str, Any]) -> dict[Groups, int] | None:
    """Return a file's row groups, one each, with their sizes; None if Spark has to read it."""
    import pyarrow as pa
    from pyarrow import parquet as pq

    try:
        with pq.ParquetFile(file) as opened:
            schema, metadata = opened.schema_arrow, opened.metadata
    except (OSError, pa.ArrowException):
        return None  # Spark tells what is wrong with it
    written_by = metadata.metadata or {}
    if _OTHER_CALENDAR in written_by or written_by.get(_SPARK, b"3")[:2] in (b"1.", b"2."):
        return None
    if any("=" in directory.name for directory in file.parents):
        return None  # a column of Spark's
    if sorted(schema.names) != sorted(fields) or any("." in name for name in fields):
        return None
    if not all(_is_same(field.type, fields[field.name]) for field in schema):
        return None
    sizes = {}
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        columns = map(group.column, range(group.num_columns))
        size = sum(column.total_compressed_size for column in columns)
        sizes[Groups(str(file), number, number + 1)] = size
    return sizes


def _is_same(ours: Any, sparks: Any) -> bool:
    if not isinstance(sparks, str):
        return False
    if sparks.startswith("decimal("):
        return str(ours) == sparks.replace("decimal(", "decimal128(").replace(",", ", ")
    return str(ours) in _SAME_AS.get(sparks, ())


def _packed(sizes: Mapping[Groups, int], tasks: int) -> list[Part]:
    """Return row groups in parts of like size, in their order: as many as can run at once, or more
    where these would be large.
    """
    total = sum(sizes.values())
    wanted = min(PART_BYTES_MAX, max(PART_BYTES_MIN, -(-total // max(1, tasks))))
    parts: list[Part] = []
    gathered: list[Groups] = []
    size = 0
    for groups, group_size in sizes.items():
        if gathered and size + group_size / 2 > wanted:
            parts.append(_joined(gathered))
            gathered, size = [], 0
        gathered.append(groups)
        size += group_size
    return [*parts, _joined(gathered)] if gathered else parts


def _joined(groups: Sequence[Groups]) -> Part:
    """Return row groups that follow one another in a file as one run."""
    runs: list[Groups] = []
    for one in groups:
        if runs and (runs[-1].path, runs[-1].end) == (one.path, one.first):
            runs[-1] = Groups(one.path, runs[-1].first, one.end)
        else:
            runs.append(one)
    return tuple(runs)
