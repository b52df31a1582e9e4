"""Row groups of a Parquet file as record batches, with a limit on their bytes in memory.

A file of some kB may hold gigabytes: each distinct value once, and for each row the number of its
value. The size of a row is estimated for each row group, from the sizes in the file's metadata and
the longest value in each dictionary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, Final

from koinon.sources.taken import Cells, Made, Maker, Taken, check_columns

BATCH_ROWS: Final = 65_536
BATCH_BYTES: Final = 16 * 1024 * 1024
READ_BYTES: Final = 1024 * 1024
_PROBED_ROWS: Final = 1_024
_WIDTHS: Final = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}


def batches_of(
    path: Path, groups: Sequence[int], names: Sequence[str], types: Mapping[str, Any]
) -> Iterator[Any]:
    """Yield the rows of row groups as record batches of these columns, in plain types
    (``plain_types``). A column that the file lacks is null, with its type from ``types``.

    Raises:
        OSError: the file cannot be read, or is damaged.
    """
    import pyarrow.parquet as pq

    from koinon.spark.encoding.plain_types import plain_batch

    with pq.ParquetFile(path, pre_buffer=False, buffer_size=READ_BYTES) as file:
        had = [name for name in names if name in file.schema_arrow.names]
        for group in groups:
            rows = _rows_at_once(path, file, group, had)
            for batch in file.iter_batches(
                rows, row_groups=[group], columns=had, use_threads=False
            ):
                yield _completed(plain_batch(batch.select(had)), names, types)


def _completed(batch: Any, names: Sequence[str], types: Mapping[str, Any]) -> Any:
    """Return the batch with all of these columns, in this order."""
    import pyarrow as pa

    if batch.schema.names == list(names):
        return batch
    columns = [
        batch.column(name) if name in batch.schema.names else pa.nulls(len(batch), types[name])
        for name in names
    ]
    return pa.RecordBatch.from_arrays(columns, names=list(names))


def _rows_at_once(path: Path, file: Any, group: int, names: Sequence[str]) -> int:
    """Return the number of a row group's rows that take about ``BATCH_BYTES``, one at least."""
    found = file.metadata.row_group(group)
    leaves = [
        (found.column(at), file.schema.column(at).length, _top(found.column(at), names))
        for at in range(found.num_columns)
    ]
    leaves = [(leaf, width, top) for leaf, width, top in leaves if top in names]
    probed = [
        leaf.path_in_schema
        for leaf, _, _ in leaves
        if leaf.physical_type == "BYTE_ARRAY" and leaf.has_dictionary_page
    ]
    longest = _longest(path, file, group, probed) if probed else {}
    sizes = (_bytes_of(leaf, width, longest.get(top)) for leaf, width, top in leaves)
    row_bytes = sum(sizes) / max(1, found.num_rows)
    return max(1, min(BATCH_ROWS, int(BATCH_BYTES / max(1, row_bytes))))


def _top(leaf: Any, names: Sequence[str]) -> str:
    """Return the column in ``names`` that a leaf belongs to; else the leaf's first name. Names may
    contain dots.
    """
    path = str(leaf.path_in_schema)
    while path not in names and "." in path:
        path = path.rpartition(".")[0]
    return path


def _bytes_of(leaf: Any, width: int, longest: int | None) -> int:
    """Return an upper bound of the memory that a column's values in a row group take, in bytes.
    ``longest``: of the values in its dictionary, if known.
    """
    stored, values = int(leaf.total_uncompressed_size), int(leaf.num_values)
    if leaf.physical_type != "BYTE_ARRAY":
        return values * _WIDTHS.get(leaf.physical_type, width)
    if leaf.has_dictionary_page:  # values that are not in the dictionary are stored directly
        return values * (stored if longest is None else longest) + stored
    # delta encoding: a value may repeat all of the one before it, plus a few bytes
    return values * stored if "DELTA_BYTE_ARRAY" in leaf.encodings else stored


def _longest(path: Path, file: Any, group: int, leaves: list[str]) -> dict[str, int]:
    """Return the length of the longest value in the columns' dictionaries, for columns that do not
    begin with nulls only.
    """
    import pyarrow.parquet as pq

    with pq.ParquetFile(
        path, metadata=file.metadata, read_dictionary=leaves, pre_buffer=False
    ) as coded:
        rows = coded.iter_batches(
            _PROBED_ROWS, row_groups=[group], columns=leaves, use_threads=False
        )
        batch = next(rows, None)
    if batch is None:
        return {}
    lengths = {
        name: [_length_max(found) for found in _dictionaries(column)]
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }
    return {name: max(some) for name, some in lengths.items() if some and all(some)}


def _dictionaries(column: Any) -> Iterator[Any]:
    """Yield the dictionaries of a column, and of the columns inside it."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_dictionary(kind):
        yield column.dictionary
    elif pa.types.is_struct(kind):
        for at in range(kind.num_fields):
            yield from _dictionaries(column.field(at))
    elif pa.types.is_map(kind):
        yield from _dictionaries(column.keys)
        yield from _dictionaries(column.items)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        yield from _dictionaries(column.values)


def _length_max(values: Any) -> int:
    import pyarrow.compute as pc

    return int(pc.max(pc.binary_length(values)).as_py() or 0)


# --- rows for load -------------------------------------------------------------------------------


def parquet_rows(path: Path, taken: Taken, maker: Maker[Made]) -> Iterator[Made]:
    """Yield the rows of a Parquet file, in lots."""
    import pyarrow.parquet as pq

    size = path.stat().st_size
    with pq.ParquetFile(path) as file:
        names, metadata = list(file.schema_arrow.names), file.metadata
    check_columns(path.name, names, taken.named)
    rows = max(1, metadata.num_rows)
    for batch in batches_of(path, range(metadata.num_row_groups), taken.columns or names, {}):
        for row in rows_of(batch, taken):
            give(row, maker)
            if maker.full:
                yield maker.take(size * maker.row // rows)
    yield maker.take(size)


Row = tuple[bytes | None, bytes | None, Cells, str]
"""A key, a value, the other cells, and why the row cannot be stored: "" if it can."""


def give(row: Row, maker: Maker[Any]) -> None:
    """Add a row to the maker, or refuse it."""
    key, value, beside, fault = row
    if fault:
        maker.refuse(fault)
    else:
        maker.add(key, value, beside)


def rows_of(batch: Any, taken: Taken) -> Iterator[Row]:
    """Yield the rows of a record batch of plain types.

    Raises:
        InvalidArgumentError: a column has a type that cannot be encoded.
    """
    from koinon.spark.encoding.faults import undecodable_columns
    from koinon.spark.encoding.keys import encode_keys
    from koinon.spark.encoding.values import ENCODERS, encode_column

    keys = encode_keys([batch.column(name) for name in taken.key], taken.key_encoding)
    beside: Iterable[Cells] = repeat(())
    if taken.beside:
        columns = (encode_column(batch.column(name), name) for name in taken.beside)
        beside = zip(*(column.to_pylist() for column in columns), strict=True)
    faults: Iterable[str] = repeat("")
    if taken.value is not None:
        values = encode_column(batch.column(taken.value), taken.value)
    else:
        values = ENCODERS[taken.encoding](batch)
        found: dict[int, str] = {}
        for name, bad in undecodable_columns(batch):
            for at in bad.nonzero()[0].tolist():
                found.setdefault(at, f"column {name!r} is not UTF-8")
        if found:
            faults = (found.get(at, "") for at in range(len(batch)))
    return zip(keys.to_pylist(), values.to_pylist(), beside, faults, strict=False)
