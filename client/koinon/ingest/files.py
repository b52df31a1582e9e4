"""Finds files, their format and their number of rows, and reads them as a DataFrame if Spark has to
read them (``opened_rows``).

Spark reads CSV nearly as ``koinon load`` does: a header row; every cell is its text (``007`` stays
``007``, an empty cell is an empty string); quotes are doubled inside quotes. A malformed row ends
the job, unless bad rows are to be kept: then it is written to their directory and left out.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from koinon.spark.writing.planning import MALFORMED
from koinon_proto.contract.errors import InvalidArgumentError

FORMATS = ("parquet", "csv", "tsv", "jsonl", "orc")
SUFFIXES = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".orc": "orc",
}
COMPRESSED = (".gz", ".bz2", ".zst", ".snappy", ".lz4")

if TYPE_CHECKING:
    from koinon.ingest.text_rows import TextReader

_HADOOPS_OWN = re.compile(r"[:*?\[\]{}\\]")
_LAKE_TABLES = {
    "_delta_log": "Delta Lake",
    ".hoodie": "Hudi",
    "metadata/*.metadata.json": "Iceberg",
}
"""Kinds of tables, by a name that only their directories contain."""
_BYTEWISE = "ISO-8859-1"
"""Spark replaces bytes that are not UTF-8. In this encoding each byte is one character, and none is
lost.
"""
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://")


def is_local(path: str) -> bool:
    """Return whether the path is in this machine's file system, not one like ``s3a://…``."""
    return _REMOTE.match(path) is None


def local_path(path: str) -> Path:
    return Path(path.removeprefix("file://"))


def format_of(paths: Sequence[str], given: str | None) -> str:
    """Return the format of all files, from the option or else from their suffixes.

    Raises:
        InvalidArgumentError: a name has no known suffix, or the files have different formats.
        FileNotFoundError: a local path does not exist.
    """
    if given is not None and given not in FORMATS:
        raise InvalidArgumentError(field="format", reason=f"{given}: {_listed_formats()}")
    found: dict[str, str] = {}
    for path in paths:
        _refuse_local_lake_table(path)
        for name in _names(path):
            kind = given or _by_suffix(name)
            if kind is None:
                raise InvalidArgumentError(
                    field="file",
                    reason=f"{path}: cannot tell the format from the name; say --format "
                    + _listed_formats(),
                )
            found.setdefault(kind, path)
    if len(found) > 1:
        (one, first), (other, second) = list(found.items())[:2]
        raise InvalidArgumentError(
            field="file",
            reason=f"{first} is {one}, {second} is {other}: ingest one format at a time",
        )
    return next(iter(found))


def _refuse_local_lake_table(path: str) -> None:
    """Refuse a directory, or matches of a pattern, that are a table with a log of its valid
    files.
    """
    if not is_local(path) or local_path(path).is_file():
        return
    for root in _roots(path):
        inside = [file for file in root.rglob("*") if file.is_dir()] if root.is_dir() else []
        for folder in (root, *root.absolute().parents, *inside):
            for marker, kind in _LAKE_TABLES.items():
                if next(folder.glob(marker), None) is not None:
                    raise _lake_table_error(str(folder), kind)


def refuse_remote_lake_tables(spark: Any, paths: Sequence[str]) -> None:
    """Raise InvalidArgumentError if a remote directory is a table of Delta Lake, Hudi or
    Iceberg.
    """
    for path in paths:
        if is_local(path):
            continue
        for marker, kind in _LAKE_TABLES.items():
            pattern = spark._jvm.org.apache.hadoop.fs.Path(f"{path.rstrip('/')}/{marker}")
            system = pattern.getFileSystem(spark._jsc.hadoopConfiguration())
            if system.globStatus(pattern):
                raise _lake_table_error(path, kind)


def _lake_table_error(path: str, kind: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        field="file",
        reason=f"{path} is a table of {kind}, whose directory also has files that the table has "
        f'removed; read it by its own library (spark.read.format("{kind.split()[0].lower()}")) and '
        'write the DataFrame by format("koinon")',
    )


def rows_of(spark: Any, paths: Sequence[str], kind: str) -> int | None:
    """Return the number of rows if the files record it; None if only reading would tell."""
    if kind not in ("parquet", "orc"):
        return None
    if not all(is_local(path) for path in paths):
        return int(spark.read.format(kind).load(list(paths)).count())
    files = local_files(paths)
    if kind == "parquet":
        import pyarrow.parquet as pq

        return sum(int(pq.read_metadata(file).num_rows) for file in files)
    from pyarrow import orc

    return sum(int(orc.ORCFile(file).nrows) for file in files)


def read(
    spark: Any,
    paths: Sequence[str],
    kind: str,
    *,
    keep_malformed: bool,
    typed: Sequence[str] = (),
) -> tuple[Any, Any]:
    """Return the files as one DataFrame, and the malformed rows as another: None if the format
    cannot have any, or if one is to fail the job (``keep_malformed`` False). The last column,
    ``MALFORMED``, holds the original text of malformed rows.

    Args:
        typed: CSV columns to read as numbers, dates, timestamps or booleans if all their cells are.
    """
    reader = spark.read.options(**_lookup(paths))
    if kind == "parquet":
        return reader.option("mergeSchema", "true").parquet(*paths), None
    if kind == "orc":
        return reader.option("mergeSchema", "true").orc(list(paths)), None
    read_one = _json_lines if kind == "jsonl" else _delimited
    reader = reader.options(**_options(kind))
    if kind != "jsonl" and typed:
        reader = reader.schema(_typed_schema(spark, paths, kind, typed))
    if not keep_malformed:
        return read_one(reader.option("mode", "FAILFAST"), paths), None
    reader = reader.option("columnNameOfCorruptRecord", MALFORMED)
    frame = read_one(reader, paths)
    if MALFORMED not in frame.columns:
        frame = read_one(reader.schema(frame.schema.add(MALFORMED, "string")), paths)
    return _parted(frame, keep=True)


def read_lines(spark: Any, paths: Sequence[str], reader: TextReader) -> tuple[Any, Any]:
    """Return remote JSON lines with the columns of the reader, and the malformed lines."""
    columns = ", ".join(f"`{name}` {kind}" for name, kind in reader.fields)
    lines = spark.read.text(list(paths))
    return _parted(lines.mapInArrow(reader.batches_of_lines, columns), keep=reader.keep)


def _parted(frame: Any, *, keep: bool) -> tuple[Any, Any]:
    """Return the good rows and the malformed rows."""
    if not keep:
        return frame, None
    malformed = frame[MALFORMED]
    bad = frame.filter(malformed.isNotNull()).select(
        *(name for name in frame.columns if name != MALFORMED), MALFORMED
    )
    return frame.filter(malformed.isNull()).drop(MALFORMED), bad


def keep(malformed: Any, directory: str | None) -> int:
    """Write malformed rows, if any, to ``<directory>/malformed`` as JSON lines (None: write
    nothing); return their number.
    """
    if malformed is None:
        return 0
    malformed = malformed.persist()  # with all columns, in one pass over the files
    try:
        number = int(malformed.count())
        if number and directory is not None:
            malformed.write.mode("append").json(f"{directory.rstrip('/')}/malformed")
        return number
    finally:
        malformed.unpersist()


def set_aside(directory: str, job_id: str) -> int | None:
    """Return the number of bad rows that a job's tasks wrote under the directory; None if it is
    remote.
    """
    if not is_local(directory):
        return None
    folder = local_path(directory) / job_id.replace(":", "-")
    return sum(file.read_bytes().count(b"\n") for file in folder.glob("*.jsonl"))


def _options(kind: str) -> dict[str, str]:
    if kind == "jsonl":
        return {"multiLine": "false"}
    return {
        "header": "true",
        "inferSchema": "false",
        "encoding": _BYTEWISE,
        "sep": "\t" if kind == "tsv" else ",",
        "quote": '"',
        "escape": '"',
        "enforceSchema": "false",
        "maxCharsPerColumn": "-1",
        "columnPruning": "false",  # a row is malformed whichever of its columns are read
    }


def _typed_schema(spark: Any, paths: Sequence[str], kind: str, typed: Sequence[str]) -> Any:
    """Return a schema with all columns as strings except those in ``typed``."""
    from pyspark.sql.types import StringType, StructField, StructType

    options = {**_options(kind), **_lookup(paths), "inferSchema": "true"}
    inferred = spark.read.options(**options).csv(list(paths)).schema
    return StructType(
        [
            StructField(name, column.dataType if _utf8(name) in typed else StringType())
            for name, column in zip(inferred.names, inferred, strict=True)
        ]
    )


def _delimited(reader: Any, paths: Sequence[str]) -> Any:
    """Return the rows of CSV; strings hold the bytes of their cells, UTF-8 or not."""
    from pyspark.sql import functions as f

    frame = reader.csv(list(paths))
    of_paths = _names_in_path(next(iter(frame.inputFiles()), ""))
    columns = []
    for name, kind in frame.dtypes:
        column = frame[f"`{name.replace('`', '``')}`"]
        if name not in of_paths:
            name = _utf8(name)
            if kind == "string":
                column = f.encode(column, _BYTEWISE).cast("string")
        if kind == "string" and name != MALFORMED:
            column = f.coalesce(column, f.lit(""))
        columns.append(column.alias(name))
    return frame.select(columns)


def _utf8(name: str) -> str:
    """Decode the name of a column that Spark has read with one character for each byte."""
    try:
        return name.encode(_BYTEWISE).decode()
    except UnicodeError as error:
        raise InvalidArgumentError(
            field="column", reason=f"{name!r} in a header row is not UTF-8: iconv makes it so"
        ) from error


def _names_in_path(uri: str) -> set[str]:
    """Return the columns that Spark derives from a file's path, such as ``day=1``."""
    return {unquote(part.split("=")[0]) for part in uri.split("/")[:-1] if "=" in part}


def _json_lines(reader: Any, paths: Sequence[str]) -> Any:
    return reader.json(list(paths))


def _names(path: str) -> list[str]:
    """Return the names that show the format of a path: for a directory, the names inside it."""
    if not is_local(path):
        return [path.rstrip("/")]
    names = []
    for root in _roots(path):
        if _by_suffix(root.name) is not None or root.is_file():
            names.append(root.name)
        else:
            names += [file.name for file in _data_files(root)] or [root.name]
    return names


def _roots(path: str) -> list[Path]:
    """Return the file or directory at this path; if there is none, the matches of the pattern.

    Raises:
        FileNotFoundError: there are none.
    """
    local = local_path(path)
    if local.exists():
        return [local]
    if not any(character in path for character in "*?["):
        raise FileNotFoundError(2, "no such file or directory", path)
    found = sorted(Path(local.anchor or ".").glob(str(local.relative_to(local.anchor))))
    if not found:
        raise FileNotFoundError(2, "no file matches", path)
    return found


def _data_files(root: Path) -> list[Path]:
    """Return the file, or the data files under a directory as Spark finds them, without hidden
    ones.
    """
    if root.is_file():
        return [root]
    return [
        file
        for file in sorted(root.rglob("*"))
        if file.is_file()
        and not any(part.startswith(("_", ".")) for part in file.relative_to(root).parts)
    ]


def named_for_spark(spark: Any, paths: Sequence[str]) -> list[str]:
    """Return the paths in the form that Spark needs. Local files whose names Hadoop would read as
    patterns, URIs or hidden files get links with other names, in the session's own directory.

    Raises:
        InvalidArgumentError: there is such a file, but tasks run on other machines.
    """
    named = []
    for path in paths:
        for root in _roots(path) if is_local(path) else ():
            found = _data_files(root)
            hidden = root.is_file() and root.name.startswith(("_", "."))
            if not hidden and not any(map(_HADOOPS_OWN.search, map(str, (root, *found)))):
                named.append(str(root.absolute()))
                continue
            if not spark.sparkContext.master.startswith("local"):
                raise InvalidArgumentError(
                    field="file",
                    reason=f"{root}: Hadoop takes such a name for a pattern, a URI or a hidden "
                    "file; rename it, or use --master local[*]",
                )
            directory = Path(
                tempfile.mkdtemp(prefix="links-", dir=spark.conf.get("spark.local.dir"))
            )
            for number, file in enumerate(found):
                folder = directory / (file.relative_to(root).parent if root.is_dir() else "")
                folder.mkdir(parents=True, exist_ok=True)
                suffix = file.suffix if file.suffix.isascii() and file.suffix[1:].isalnum() else ""
                (folder / f"{number:06}{suffix}").symlink_to(file.absolute())
            named.append(str(directory))
        if not is_local(path):
            named.append(path)
    return named


def _directories(path: str) -> list[tuple[str, ...]]:
    """Return the directories between a path and each data file under it."""
    return [
        file.relative_to(root).parts[:-1]
        for root in _roots(path)
        if root.is_dir()
        for file in _data_files(root)
    ]


def have_columns_in_names(paths: Sequence[str]) -> bool:
    """Return whether Spark derives columns from local directories' names, such as ``day=1``."""
    below = (parts for path in filter(is_local, paths) for parts in _directories(path))
    return any("=" in name for parts in below for name in parts)


def local_files(paths: Iterable[str]) -> list[Path]:
    """Return the data files of local paths, each once; for a directory all files under it."""
    found = (file for path in paths for root in _roots(path) for file in _data_files(root))
    return list(dict.fromkeys(file.absolute() for file in found))


def _lookup(paths: Sequence[str]) -> dict[str, str]:
    """Return the option by which Spark also reads plain subdirectories, which it skips by default.
    (It always reads those like ``day=1``.)
    """
    if not have_columns_in_names(paths) and any(
        parts for path in filter(is_local, paths) for parts in _directories(path)
    ):
        return {"recursiveFileLookup": "true"}
    return {}


def _by_suffix(name: str) -> str | None:
    suffixes = [s.lower() for s in Path(name).suffixes if s.lower() not in COMPRESSED]
    return SUFFIXES.get(suffixes[-1]) if suffixes else None


def _listed_formats() -> str:
    return ", ".join(FORMATS[:-1]) + f" or {FORMATS[-1]}"
