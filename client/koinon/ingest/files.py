"""Files as a DataFrame: which format they have, how many rows, and what of them is malformed.

CSV is read as ``koinon load`` reads it: a header row, every cell the text that it is (``007`` stays
``007``, an empty cell is an empty string), quotes doubled inside quotes. A malformed row ends the
job, unless bad rows are to be kept: then it is written where they go, and left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

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
MALFORMED = "_koinon_malformed"
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://")


def is_local(path: str) -> bool:
    """Return whether the path is of this machine's file system, rather than ``s3a://…``."""
    return _REMOTE.match(path) is None


def local_path(path: str) -> Path:
    return Path(path.removeprefix("file://"))


def format_of(paths: Sequence[str], given: str | None) -> str:
    """Return the one format of all files, by option or by their suffixes.

    Raises:
        InvalidArgumentError: it cannot be told, or there is more than one.
        FileNotFoundError: a local path does not exist.
    """
    if given is not None and given not in FORMATS:
        raise InvalidArgumentError(field="format", reason=f"{given}: {_listed_formats()}")
    found: dict[str, str] = {}
    for path in paths:
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


def rows_of(spark: Any, paths: Sequence[str], kind: str) -> int | None:
    """Return how many rows there are where their files say so; None where only reading would."""
    if kind not in ("parquet", "orc"):
        return None
    if not all(is_local(path) for path in paths):
        reader = spark.read.parquet if kind == "parquet" else spark.read.orc
        return int(reader(*paths).count())
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
    """Return the files as one DataFrame, and the malformed rows as another: None where the format
    has none, or where one is to fail the job (``keep_malformed`` false). What was malformed stands,
    as it was, in the last column, ``MALFORMED``.

    Args:
        typed: columns of CSV that are numbers, dates, timestamps or truths if their cells are.
    """
    reader = spark.read.options(**_lookup(paths))
    if kind == "parquet":
        return reader.parquet(*paths), None
    if kind == "orc":
        return reader.orc(*paths), None
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
    malformed = frame[MALFORMED]
    bad = frame.filter(malformed.isNotNull()).select(
        *(name for name in frame.columns if name != MALFORMED), MALFORMED
    )
    return frame.filter(malformed.isNull()).drop(MALFORMED), bad


def keep(malformed: Any, directory: str | None) -> int:
    """Write malformed rows to ``<directory>/malformed`` as JSON lines, if there are any (None: do
    not); return how many there are.
    """
    if malformed is None:
        return 0
    malformed = malformed.persist()  # of all columns, in one pass over the files
    try:
        number = int(malformed.count())
        if number and directory is not None:
            malformed.write.mode("append").json(f"{directory.rstrip('/')}/malformed")
        return number
    finally:
        malformed.unpersist()


def set_aside(directory: str, job_id: str) -> int | None:
    """Return how many bad rows a job's tasks wrote under the directory; None if it is remote."""
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
        "sep": "\t" if kind == "tsv" else ",",
        "quote": '"',
        "escape": '"',
        "enforceSchema": "false",
        "maxCharsPerColumn": "-1",
        "columnPruning": "false",  # a row is malformed whatever is taken of it
    }


def _typed_schema(spark: Any, paths: Sequence[str], kind: str, typed: Sequence[str]) -> Any:
    """All columns as strings, but for some."""
    from pyspark.sql.types import StringType, StructField, StructType

    options = {**_options(kind), **_lookup(paths), "inferSchema": "true"}
    inferred = spark.read.options(**options).csv(list(paths)).schema
    return StructType(
        [
            StructField(column.name, column.dataType if column.name in typed else StringType())
            for column in inferred
        ]
    )


def _delimited(reader: Any, paths: Sequence[str]) -> Any:
    frame = reader.csv(list(paths))
    texts = [name for name, kind in frame.dtypes if kind == "string" and name != MALFORMED]
    return frame.na.fill("", texts)


def _json_lines(reader: Any, paths: Sequence[str]) -> Any:
    return reader.json(list(paths))


def _names(path: str) -> list[str]:
    """The names by which the format of a path is told: of a directory, those in it."""
    if not is_local(path):
        return [path.rstrip("/")]
    local = local_path(path)
    if any(character in path for character in "*?["):
        found = sorted(Path(local.anchor or ".").glob(str(local.relative_to(local.anchor))))
        if not found:
            raise FileNotFoundError(2, "no file matches", path)
        return [name for file in found for name in _names(str(file))]
    if not local.exists():
        raise FileNotFoundError(2, "no such file or directory", path)
    if _by_suffix(local.name) is not None or local.is_file():
        return [local.name]
    return [file.name for file in _data_files(local)] or [local.name]


def _data_files(path: Path) -> list[Path]:
    """The file, or the data files under a directory, as Spark takes them: nothing hidden."""
    if any(character in str(path) for character in "*?["):
        found = Path(path.anchor or ".").glob(str(path.relative_to(path.anchor)))
        return [file for one in sorted(found) for file in _data_files(one)]
    if path.is_file():
        return [path]
    return [
        file
        for file in sorted(path.rglob("*"))
        if file.is_file()
        and not any(part.startswith(("_", ".")) for part in file.relative_to(path).parts)
    ]


def local_files(paths: Iterable[str]) -> list[Path]:
    """Return the data files of local paths, each once: of a directory all under it."""
    found = (file for path in paths for file in _data_files(local_path(path)))
    return list({file.absolute(): file for file in found}.values())


def _lookup(paths: Sequence[str]) -> dict[str, str]:
    """Have Spark take what is in plain subdirectories too, which it passes over by itself; those
    such as ``day=1`` are its own.
    """
    for path in filter(is_local, paths):
        root = local_path(path)
        if any(character in path for character in "*?[") or not root.is_dir():
            continue
        below = [file.relative_to(root).parts[:-1] for file in _data_files(root)]
        if any(below) and not any("=" in name for parts in below for name in parts):
            return {"recursiveFileLookup": "true"}
    return {}


def _by_suffix(name: str) -> str | None:
    suffixes = [s.lower() for s in Path(name).suffixes if s.lower() not in COMPRESSED]
    return SUFFIXES.get(suffixes[-1]) if suffixes else None


def _listed_formats() -> str:
    return ", ".join(FORMATS[:-1]) + f" or {FORMATS[-1]}"
