"""The rows of files to ingest: local files are read by Spark's Python tasks themselves, all others
by Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

from koinon.ingest import files
from koinon.ingest.row_groups import Groups, groups_of, spark_field
from koinon.ingest.settings import Settings
from koinon.ingest.text_rows import TEXT_KINDS, TYPES, TextReader, fitting
from koinon.sources.opening import pieces_of
from koinon.sources.taken import Taken

PART_BYTES_MIN, PART_BYTES_MAX = 4 * 1024 * 1024, 128 * 1024 * 1024
_HADOOPS: Final = (".snappy", ".lz4", ".deflate", ".lzo")
"""Suffixes of compressed text that only Hadoop reads."""


class Reader(Protocol):
    """Reads pieces of files in a task."""

    def batches(self, piece: Any, names: Sequence[str]) -> Iterator[Any]:
        """Yield the rows of a piece as record batches of these columns."""


@dataclass(frozen=True, slots=True)
class Part:
    """The part of the files that one task reads."""

    reader: Reader
    pieces: tuple[Any, ...]

    def batches(self, names: Sequence[str]) -> Iterator[Any]:
        """Yield the rows as record batches of these columns."""
        for piece in self.pieces:
            yield from self.reader.batches(piece, names)


@dataclass(frozen=True)
class LocalFrame:
    """Rows that tasks read themselves, with the methods of a DataFrame that a load uses."""

    sparkSession: Any  # noqa: N815 - as a DataFrame's
    parts: Sequence[Part]
    schema: Any

    def mapInArrow(  # noqa: N802 - as a DataFrame's
        self, function: Callable[[Iterator[Any]], Iterator[Any]], schema: str
    ) -> Any:
        """Return the DataFrame that a function makes from the record batches of each part."""
        parts, names = self.parts, self.schema.names

        def mapped(batches: Iterator[Any]) -> Iterator[Any]:
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    yield from function(parts[number].batches(names))

        numbers = self.sparkSession.range(0, len(parts), 1, max(1, len(parts)))
        return numbers.mapInArrow(mapped, schema)


@dataclass(frozen=True, kw_only=True)
class OpenedRows:
    """Rows of files. ``settings``: how to write them, with the columns of ``frame``. ``malformed``:
    a DataFrame of rows that Spark could not parse, or None. ``parts``: the rows, if tasks read
    them. ``inferred``: True if Spark has parsed JSON, and writes it in its own form.
    """

    frame: Any
    settings: Settings
    malformed: Any = None
    parts: Sequence[Part] | None = None
    inferred: bool = False


def open_rows(
    spark: Any,
    paths: Sequence[str],
    kind: str,
    settings: Settings,
    *,
    conf: Mapping[str, str],
    keep_malformed: bool,
) -> OpenedRows:
    """Open the files. ``conf``: the given settings of Spark.

    Raises:
        InvalidArgumentError: a file cannot be read; the reason names it.
    """
    local = all(map(files.is_local, paths)) and not files.have_columns_in_names(paths)
    given = any(name.startswith(("spark.sql.", "spark.hadoop.")) for name in conf)
    found = files.local_files(paths) if local else []
    if local and kind == "parquet" and not given and (groups := groups_of(found)) is not None:
        parts = packed(groups.reader, groups.sizes, _tasks(spark))
        frame = LocalFrame(spark, parts, _schema(list(groups.fields.items())))
        return OpenedRows(frame=frame, settings=settings, parts=parts)
    if kind in TEXT_KINDS and local and not any(f.suffix.lower() in _HADOOPS for f in found):
        return _text_rows(spark, found, kind, settings, keep=keep_malformed)
    files.refuse_remote_lake_tables(spark, paths)
    beside = settings.beside
    if kind == "jsonl" and not beside and not (found or files.have_columns_in_names(paths)):
        reader, its_settings = _reader(spark, kind, settings, keep=keep_malformed)
        frame, malformed = files.read_lines(spark, paths, reader)
        return OpenedRows(frame=frame, malformed=malformed, settings=its_settings)
    named = files.named_for_spark(spark, paths)
    frame, malformed = files.read(
        spark, named, kind, keep_malformed=keep_malformed, typed=list(beside)
    )
    return OpenedRows(frame=frame, malformed=malformed, settings=settings, inferred=kind == "jsonl")


def _text_rows(
    spark: Any, found: Sequence[Path], kind: str, settings: Settings, *, keep: bool
) -> OpenedRows:
    reader, named = _reader(spark, kind, settings, keep=keep)
    tasks = _tasks(spark)
    wanted = _wanted(sum(file.stat().st_size for file in found), tasks)
    pieces = [piece for file in found for piece in pieces_of(file, kind, wanted)]
    sizes = {piece: (piece.end or piece.path.stat().st_size) - piece.start for piece in pieces}
    if reader.taken.beside:
        reader = replace(
            reader, types=_types(spark, packed(replace(reader, keep=True), sizes, tasks))
        )
    parts = packed(reader, sizes, tasks)
    frame = LocalFrame(spark, parts, _schema(reader.fields))
    return OpenedRows(frame=frame, settings=named, parts=parts)


def _reader(
    spark: Any, kind: str, settings: Settings, *, keep: bool
) -> tuple[TextReader, Settings]:
    """Return the reader of text files, and the settings for writing its columns."""
    keys = settings.write_options().key_columns
    taken = Taken(
        key=keys,
        key_encoding=settings.key_encoding,
        value=settings.value,
        encoding=settings.encoding or "json",
        beside=settings.beside,
    )
    key = _free(keys[0] if len(keys) == 1 else "key", taken.beside)
    value = _free(settings.value or "row", (key, *taken.beside))
    reader = TextReader(
        kind=kind,
        taken=taken,
        names=(key, value, *taken.beside),
        zone=spark.conf.get("spark.sql.session.timeZone"),
        keep=keep,
    )
    return reader, replace(settings, key=key, value=value, encoding=None)


def _free(name: str, used: Sequence[str]) -> str:
    while name in used or "," in name:
        name = name.replace(",", "_") + "_"
    return name


def _types(spark: Any, parts: Sequence[Part]) -> dict[str, str]:
    """Return the types of the columns other than key and value, by name: the simplest type that all
    cells of a column fit, or string.
    """

    def fits(part: Part) -> list[list[str]]:
        reader = part.reader
        assert isinstance(reader, TextReader)
        left = [list(TYPES) for _ in reader.taken.beside]
        for batch in part.batches(reader.taken.beside):
            for at, column in enumerate(batch.columns):
                fit = fitting(column, reader.zone)
                left[at] = [kind for kind in left[at] if kind in fit]
        return left

    if not parts:
        return {}
    reader = parts[0].reader
    assert isinstance(reader, TextReader)
    found = spark.sparkContext.parallelize(list(parts), len(parts)).map(fits).collect()
    types = {}
    for name, *by_part in zip(reader.taken.beside, *found, strict=True):
        common = [kind for kind in by_part[0] if all(kind in others for others in by_part)]
        if common:
            types[name] = common[0]
    return types


def packed(reader: Reader, sizes: Mapping[Any, int], tasks: int) -> list[Part]:
    """Pack pieces, in their order, into parts of similar size: one for each of the concurrent
    tasks, or more if these would be large.
    """
    wanted = _wanted(sum(sizes.values()), tasks)
    parts: list[Part] = []
    gathered: list[Any] = []
    size = 0
    for piece, piece_size in sizes.items():
        if gathered and size + piece_size / 2 > wanted:
            parts.append(Part(reader, _joined(gathered)))
            gathered, size = [], 0
        gathered.append(piece)
        size += piece_size
    return [*parts, Part(reader, _joined(gathered))] if gathered else parts


def _wanted(total: int, tasks: int) -> int:
    return min(PART_BYTES_MAX, max(PART_BYTES_MIN, -(-total // max(1, tasks))))


def _joined(pieces: Sequence[Any]) -> tuple[Any, ...]:
    """Return adjacent row groups of a file merged into one range."""
    runs: list[Any] = []
    for one in pieces:
        last = runs[-1] if runs else None
        if isinstance(last, Groups) and (last.path, last.end) == (one.path, one.first):
            runs[-1] = Groups(one.path, last.first, one.end)
        else:
            runs.append(one)
    return tuple(runs)


def _tasks(spark: Any) -> int:
    return int(spark.sparkContext.defaultParallelism)


def _schema(fields: Sequence[tuple[str, Any]]) -> Any:
    from pyspark.sql.types import StructType

    columns = [spark_field(name, kind) for name, kind in fields]
    return StructType.fromJson({"type": "struct", "fields": columns})
