"""Local Parquet files, read by Spark's Python tasks themselves, as ``load`` reads them.

Spark reads Parquet in Java and passes each row to Python, which costs about as much as Python's own
work on it. Spark still reads files that Arrow would read differently; ``groups_of`` decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from koinon.sources.row_batches import batches_of
from koinon_proto.contract.errors import InvalidArgumentError

_OTHER_CALENDAR: Final = b"org.apache.spark.legacyDateTime"
# Spark before 3 wrote dates in the other calendar, too
_SPARK: Final = b"org.apache.spark.version"
_SPARK_TYPES: Final = {
    "bool": "boolean",
    "int8": "byte",
    "int16": "short",
    "int32": "integer",
    "int64": "long",
    "uint8": "short",
    "uint16": "integer",
    "uint32": "long",
    "uint64": "decimal(20,0)",
    "float": "float",
    "double": "double",
    "string": "string",
    "binary": "binary",
    "date32[day]": "date",
}
_INTEGERS: Final = ("byte", "short", "integer", "long")


@dataclass(frozen=True, slots=True)
class Groups:
    """Row groups ``[first, end)`` of a file."""

    path: str
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class GroupReader:
    """Reads row groups in a task. ``types``: the Arrow types of all columns of all files."""

    types: Mapping[str, Any]

    def batches(self, groups: Groups, names: Sequence[str]) -> Iterator[Any]:
        """Yield the rows as record batches of these columns; a column that the file lacks is null.

        Raises:
            OSError: the file cannot be read, or is damaged.
        """
        return batches_of(Path(groups.path), range(groups.first, groups.end), names, self.types)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedFiles:
    """Parquet files. ``fields``: their columns, from name to type as Spark's schema writes it in
    JSON; ``sizes``: the bytes of each row group.
    """

    reader: GroupReader
    fields: dict[str, Any]
    sizes: dict[Groups, int]


def groups_of(files: Sequence[Path]) -> GroupedFiles | None:
    """Return the row groups of the files. None: a file has dates in the other calendar, which Spark
    must read.

    Raises:
        InvalidArgumentError: a file cannot be read, or a column has another type than in the files
            before it, or a type that cannot be encoded.
    """
    from koinon.spark.encoding.plain_types import plain_type

    fields: dict[str, Any] = {}
    sizes: dict[Groups, int] = {}
    first: dict[str, Path] = {}  # the file in which a column was first seen
    types: dict[str, Any] = {}
    for file in files:
        schema, metadata = _opened(file)
        written_by = metadata.metadata or {}
        if _OTHER_CALENDAR in written_by or written_by.get(_SPARK, b"3")[:2] in (b"1.", b"2."):
            return None
        for field in schema:
            kind = _spark_type(plain_type(field.type))
            if kind is None:
                raise _refused(file, f"column {field.name!r} of type {field.type} has no form")
            if (before := fields.get(field.name, kind)) != kind:
                kind = _wider(before, kind)
            if kind is None:
                raise _refused(
                    file,
                    f"column {field.name!r} has type {field.type}, but {_shown(before)} in "
                    f"{first[field.name]}; ingest them one by one",
                )
            fields[field.name] = kind
            first.setdefault(field.name, file)
            types.setdefault(field.name, plain_type(field.type))
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            columns = map(group.column, range(group.num_columns))
            size = sum(column.total_compressed_size for column in columns)
            sizes[Groups(str(file), number, number + 1)] = size
    return GroupedFiles(reader=GroupReader(types), fields=fields, sizes=sizes)


def _opened(file: Path) -> tuple[Any, Any]:
    import pyarrow as pa
    from pyarrow import parquet as pq

    try:
        with pq.ParquetFile(file) as opened:
            return opened.schema_arrow, opened.metadata
    except (OSError, pa.ArrowException) as error:
        raise _refused(file, str(error)) from error


def _refused(file: Path, reason: str) -> InvalidArgumentError:
    return InvalidArgumentError(field="file", reason=f"{file}: {reason}")


def _shown(kind: Any) -> str:
    return kind if isinstance(kind, str) else str(kind["type"])


def _wider(one: Any, other: Any) -> Any:
    """Return the integer type that holds both types; None if there is none."""
    if one in _INTEGERS and other in _INTEGERS:
        return max(one, other, key=_INTEGERS.index)
    return None


def _spark_type(kind: Any) -> Any:
    """Return Spark's type for a plain Arrow type, as its schema writes it in JSON; None if there is
    none. Times of day are strings.
    """
    import pyarrow as pa

    if pa.types.is_decimal(kind):
        return f"decimal({min(kind.precision, 38)},{kind.scale})"
    if pa.types.is_timestamp(kind):
        return "timestamp" if kind.tz else "timestamp_ntz"
    if pa.types.is_time(kind):
        return "string"
    if not pa.types.is_nested(kind):
        return _SPARK_TYPES.get(str(kind))
    parts = [_spark_type(kind.field(at).type) for at in range(kind.num_fields)]
    if pa.types.is_map(kind):
        parts = [_spark_type(kind.key_type), _spark_type(kind.item_type)]
    if None in parts:
        return None
    if pa.types.is_struct(kind):
        return {
            "type": "struct",
            "fields": [spark_field(kind.field(at).name, part) for at, part in enumerate(parts)],
        }
    if pa.types.is_map(kind):
        return {
            "type": "map",
            "keyType": parts[0],
            "valueType": parts[1],
            "valueContainsNull": True,
        }
    return {"type": "array", "elementType": parts[0], "containsNull": True}


def spark_field(name: str, kind: Any) -> dict[str, Any]:
    """Return a column as Spark's schema writes it in JSON."""
    return {"name": name, "type": kind, "nullable": True, "metadata": {}}
