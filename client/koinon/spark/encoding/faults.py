"""Rows that cannot be stored: found column by column, then refused or set aside.

A bad row has one fault, the first of: it could not be read; a null key, an empty or over-long one,
one outside the prefix that is being overwritten; a null value, an over-long one; in a whole row, a
string that is not valid UTF-8 (Spark allows any bytes, JSON and MessagePack do not); an invalid
time to live. In rows that delete their keys only the keys are checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from koinon.spark.encoding import arrays
from koinon.spark.encoding.arrays import BoolArray, I64Array
from koinon.spark.encoding.plain import plain_values
from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.contract.table import MAX_KEY_BYTES

EXAMPLES: Final = 3
EXAMPLE_CHARS: Final = 200
CHUNK_BYTES_MAX: Final = 8 * 1024 * 1024
"""The bound of one chunk; a row has to fit into one."""


Found = tuple[BoolArray, str, str]
"""A mask of the faulty rows; the fault's column and its reason."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of rows; ``key_name`` and ``value_name`` are the columns' names in messages."""

    key_name: str
    value_name: str
    max_value_bytes: int
    prefix: bytes = b""

    @property
    def value_bytes_max(self) -> int:
        return min(self.max_value_bytes, CHUNK_BYTES_MAX - MAX_KEY_BYTES - 100)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Rows of one batch that have the same fault, ascending."""

    column: str
    reason: str
    rows: I64Array


class BadRows(Protocol):
    """Handles bad rows: refuses them, or sets them aside."""

    def take(self, batch: Any, faults: list[Fault], rows_before: int) -> None:
        """Handle the faults of a record batch; ``rows_before``: the number of rows read before
        it.
        """

    def close(self) -> None:
        """Finish: the task has read all its rows."""

    def discard(self) -> None:
        """Discard the rows set aside: the task has failed."""


def find_faults(
    keys: Any,
    values: Any,
    limits: Limits,
    whole: Any = None,
    *,
    malformed: BoolArray | None = None,
    deleted: BoolArray | None = None,
    others: Iterable[Found] = (),
) -> list[Fault]:
    """Return the faults of rows (``binary`` arrays of one length); usually none. ``whole``: the
    record batch, if whole rows are the values; ``malformed``: rows that could not be read;
    ``deleted``: rows that delete their keys, whose values are empty; ``others``: faults that the
    caller has found.
    """
    faults: list[Fault] = []
    fine: list[BoolArray] = []

    def note(bad: BoolArray, column: str, reason: str) -> None:
        if fine:
            bad &= fine[-1]
        if bad.any():
            faults.append(Fault(column=column, reason=reason, rows=np.flatnonzero(bad)))
            fine.append(~bad if not fine else fine[-1] & ~bad)

    value, value_lengths = limits.value_name, arrays.lengths_of(values)
    if malformed is not None:
        note(malformed, "file", "malformed row")
    for bad, name, reason in _key_faults(keys, limits):
        note(bad, name, reason)
    if values.null_count:
        note(_nulls(values), value, "null value")
    if len(keys) and int(value_lengths.max()) > limits.value_bytes_max:
        long = value_lengths > limits.value_bytes_max
        note(long, value, f"value of more than {limits.value_bytes_max} bytes")
    for name, bad in undecodable_columns(whole):
        stored = bad if deleted is None else bad & ~deleted
        note(stored, name, "string that is not valid UTF-8")
    for bad, name, reason in others:
        note(bad, name, reason)
    return faults


def _key_faults(keys: Any, limits: Limits) -> Iterator[Found]:
    key, lengths = limits.key_name, arrays.lengths_of(keys)
    if keys.null_count:
        yield _nulls(keys), key, "null key"
    if len(keys) and not int(lengths.min()):
        yield lengths == 0, key, "empty key"
    if len(keys) and int(lengths.max()) > MAX_KEY_BYTES:
        yield lengths > MAX_KEY_BYTES, key, f"key of more than {MAX_KEY_BYTES} bytes"
    if limits.prefix:
        begins = pc.fill_null(pc.starts_with(keys, pattern=limits.prefix), False)
        outside = ~begins.to_numpy(zero_copy_only=False)
        yield outside, key, f"key outside the prefix {limits.prefix!r} that is overwritten"


def undecodable_columns(batch: Any) -> Iterator[tuple[str, BoolArray]]:
    """Yield the columns of a batch with strings that are not UTF-8, each with a mask of these
    rows.
    """
    if batch is not None:
        for field, column in zip(batch.schema, batch.columns, strict=True):
            if not _is_text(column):
                yield field.name, _undecodable(column)


def _is_text(column: Any) -> bool:
    """True if all strings in a column are valid UTF-8."""
    kind = column.type
    if not (pa.types.is_nested(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        return True
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _undecodable(column: Any) -> BoolArray:
    """Return a mask of the values with a string that is not valid UTF-8, by checking each value."""
    bad = np.zeros(len(column), np.bool_)
    for at, scalar in enumerate(column):
        try:
            scalar.as_py()
        except UnicodeDecodeError:
            bad[at] = True
    return bad


def without(faults: list[Fault], rows: int) -> Any:
    """Return the rows without a fault, as an array for ``take``."""
    fine = np.ones(rows, np.bool_)
    for fault in faults:
        fine[fault.rows] = False
    return pa.array(np.flatnonzero(fine))


def _nulls(array: Any) -> BoolArray:
    nulls: BoolArray = array.is_null().to_numpy(zero_copy_only=False).copy()
    return nulls


class Refusing:
    """Lets bad rows fail the task."""

    def take(self, batch: Any, faults: list[Fault], rows_before: int) -> None:
        """Raise InvalidArgumentError with the columns, the number of rows and a few examples."""
        said = []
        for fault in faults:
            shown = ", ".join(
                f"row {rows_before + row}: {_example(batch, row)}"
                for row in fault.rows[:EXAMPLES].tolist()
            )
            count = len(fault.rows)
            said.append(f"{fault.reason} in {count} row{'s' if count > 1 else ''} ({shown})")
        raise InvalidArgumentError(
            field=f"column {faults[0].column}",
            reason=f"{'; '.join(said)}, of the {rows_before + len(batch)} rows that this task has "
            "read so far. Filter such rows out, or set option badRecordsPath to set them aside",
        )

    def close(self) -> None:
        """Do nothing: no file is open."""

    def discard(self) -> None:
        """Do nothing: no row was written."""


class SettingAside:
    """Writes bad rows to a file of JSON lines: ``{"column": …, "reason": …, "row": {…}}``. The file
    is created with the first of them.
    """

    def __init__(self, path: str, name: str) -> None:
        self._path = path
        self._name = name
        self._out: Any = None
        self._remove: Callable[[], None] = lambda: None

    def take(self, batch: Any, faults: list[Fault], rows_before: int) -> None:
        """Write the rows.

        Raises:
            OSError: the file cannot be written.
        """
        if self._out is None:
            self._open()
        for line in _lines(batch, faults):
            self._out.write(line)

    def _open(self) -> None:
        from pyarrow import fs

        if "://" in self._path:
            filesystem, base = fs.FileSystem.from_uri(self._path)
        else:
            filesystem, base = fs.LocalFileSystem(), self._path
        path = f"{base.rstrip('/')}/{self._name}"
        filesystem.create_dir(path.rsplit("/", 1)[0], recursive=True)
        self._out = filesystem.open_output_stream(path)
        self._remove = lambda: filesystem.delete_file(path)

    def close(self) -> None:
        """Finish the file, if there is one."""
        if self._out is not None:
            self._out.close()

    def discard(self) -> None:
        """Delete the file: the attempt has failed, and another one writes these rows again."""
        if self._out is not None:
            self._out.close()
            self._remove()


def _lines(batch: Any, faults: list[Fault]) -> Iterator[bytes]:
    for fault in faults:
        for row in _dicts(batch.take(pa.array(fault.rows))):
            record = {"column": fault.column, "reason": fault.reason, "row": row}
            text = json.dumps(record, ensure_ascii=False, default=str)
            yield text.encode(errors="replace") + b"\n"


def _dicts(batch: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch as dicts; bytes as base64, types that JSON lacks as text."""
    columns = [plain_values(column, json=True) for column in batch.columns]
    for values in zip(*columns, strict=True):
        yield dict(zip(batch.schema.names, values, strict=True))


def _example(batch: Any, row: int) -> str:
    shown = json.dumps(next(_dicts(batch.slice(row, 1))), ensure_ascii=False, default=str)
    return shown if len(shown) <= EXAMPLE_CHARS else f"{shown[:EXAMPLE_CHARS]}…"
