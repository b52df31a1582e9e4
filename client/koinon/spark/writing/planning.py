"""Decides the use of each DataFrame column in a write, before any row is read. Pure.

Types are those of Spark's schema in JSON: a name such as ``long`` or ``decimal(15,2)``, or a dict
for arrays, maps and structs.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

from koinon.spark.options import WriteOptions
from koinon_proto.contract.errors import ConfigurationError

INTEGERS: Final = ("byte", "short", "integer", "long")
TEXTS: Final = ("string", "char", "varchar")
ORDER_TYPES: Final = (*INTEGERS, "float", "double", "boolean", "date", "timestamp", "timestamp_ntz")
TTL_TYPES: Final = (*INTEGERS, "timestamp")
KEY_TYPES: Final = ("binary", *TEXTS, *ORDER_TYPES, "decimal", "time")
MALFORMED: Final = "_koinon_malformed"
"""The column with the place and the text of a row that could not be read; null in other rows. A
column of this name is never stored.
"""
_NESTED: Final = {
    "array": ("elementType",),
    "map": ("keyType", "valueType"),
}

Field = tuple[str, Any]
"""A column's name and type."""


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """The places of the columns for the key, the value, the order, the time to live, the deletion,
    and the malformed text; -1: none. Without a value column whole rows are the values, except the
    last three columns.
    """

    names: tuple[str, ...]
    key_columns: tuple[int, ...]
    value_column: int
    order_column: int
    ttl_column: int = -1
    delete_column: int = -1
    malformed_column: int = -1

    @property
    def used(self) -> list[int]:
        """The named columns, ascending."""
        single = (self.value_column, self.order_column, self.ttl_column, self.delete_column)
        return sorted({*self.key_columns, *single, self.malformed_column} - {-1})

    @property
    def stored(self) -> list[int]:
        """The columns that are in the values."""
        if self.value_column >= 0:
            return [self.value_column]
        apart = (self.ttl_column, self.delete_column, self.malformed_column)
        return [at for at in range(len(self.names)) if at not in apart]

    @property
    def key_name(self) -> str:
        return ", ".join(self.names[at] for at in self.key_columns)

    @property
    def value_name(self) -> str:
        """The value's column, or a phrase for whole rows."""
        return self.names[self.value_column] if self.value_column >= 0 else "the row as a value"


def plan_rows(options: WriteOptions, fields: Sequence[Field]) -> RowPlan:
    """Return the use of the columns of a DataFrame.

    Raises:
        ConfigurationError: an option is missing, or names a missing column, or one of a wrong type.
    """
    names = tuple(name for name, _ in fields)
    options = _with_defaults(options, names)
    listed = ", ".join(names) or "none"
    if not options.key_columns:
        _refuse("keyColumn", f"is required; the columns are {listed}")
    if not options.value_column and not options.value_encoding:
        _refuse(
            "valueColumn",
            f"is required, or valueEncoding for whole rows; the columns are {listed}",
        )
    key_columns = tuple(find_column("keyColumn", name, names) for name in options.key_columns)
    for at in key_columns:
        _check_type("keyColumn", fields[at], KEY_TYPES, "cast it to a string or an integer")
    value_column = order_column = ttl_column = delete_column = -1
    if options.value_column:
        value_column = find_column("valueColumn", options.value_column, names)
        _check_form("valueColumn", fields[value_column])
    else:
        _check_rows(fields)
    if options.order_column:
        order_column = find_column("orderBy", options.order_column, names)
        advice = "use a number, a date or a timestamp"
        _check_type("orderBy", fields[order_column], ORDER_TYPES, advice)
    if options.ttl_column:
        ttl_column = find_column("ttlColumn", options.ttl_column, names)
        advice = "use an integer (milliseconds) or a timestamp"
        _check_type("ttlColumn", fields[ttl_column], TTL_TYPES, advice)
    if options.delete_column:
        delete_column = find_column("deleteColumn", options.delete_column, names)
        _check_type("deleteColumn", fields[delete_column], ("boolean",), "cast it to boolean")
    return RowPlan(
        names=names,
        key_columns=key_columns,
        value_column=value_column,
        order_column=order_column,
        ttl_column=ttl_column,
        delete_column=delete_column,
        malformed_column=names.index(MALFORMED) if MALFORMED in names else -1,
    )


def _with_defaults(options: WriteOptions, names: Sequence[str]) -> WriteOptions:
    """Return the options with ``key`` and ``value`` as default columns, if these are exactly the
    columns.
    """
    if sorted(name.lower() for name in names) != ["key", "value"]:
        return options
    return replace(
        options,
        key_columns=options.key_columns or ("key",),
        value_column=options.value_column or ("" if options.value_encoding else "value"),
    )


def find_column(option: str, name: str, names: Sequence[str]) -> int:
    """Return the place of a column: by its exact name, or else ignoring case.

    Raises:
        ConfigurationError: there is no such column, or more than one.
    """
    exact = [at for at, other in enumerate(names) if other == name]
    found = exact or [at for at, other in enumerate(names) if other.lower() == name.lower()]
    if len(found) > 1:
        _refuse(option, f"there are {len(found)} columns {name!r}; rename all but one")
    if not found:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        listed = ", ".join(names) or "none"
        _refuse(option, f"there is no column {name!r} among {listed}{hint}")
    return found[0]


def _check_type(option: str, field: Field, allowed: Sequence[str], advice: str) -> None:
    if _base(field[1]) not in allowed:
        _refuse(option, f"column {field[0]!r} has type {_shown(field[1])}: {advice}")


def _check_rows(fields: Sequence[Field]) -> None:
    """Check whole rows: names must be distinct, and types must have a form in the encodings."""
    names = [name for name, _ in fields]
    for name in names:
        if names.count(name) > 1:
            _refuse("valueEncoding", f"there are several columns {name!r}; rename all but one")
    for field in fields:
        _check_form("valueEncoding", field)


def _check_form(option: str, field: Field) -> None:
    name, kind = field
    if bad := _without_form(kind):
        _refuse(option, f"column {name!r} holds {bad}: cast it to a string")


def _without_form(kind: Any) -> str:
    """Return the first type inside a type that cannot be encoded; '' if all can."""
    if not isinstance(kind, dict):
        return "" if _base(kind) in KEY_TYPES else _shown(kind)
    if kind.get("type") == "struct":
        parts = [field["type"] for field in kind["fields"]]
    elif kind.get("type") == "map" and isinstance(kind["keyType"], dict):
        return f"a map whose keys are of type {_shown(kind['keyType'])}"
    elif kind.get("type") in _NESTED:
        parts = [kind[part] for part in _NESTED[kind["type"]]]
    else:
        return _shown(kind)
    return next(filter(None, map(_without_form, parts)), "")


def _base(kind: Any) -> str:
    """Return a type's name without its parameters."""
    return kind.split("(")[0].split(" ")[0] if isinstance(kind, str) else ""


def _shown(kind: Any) -> str:
    return kind if isinstance(kind, str) else str(kind.get("type"))


def _refuse(option: str, reason: str) -> NoReturn:
    raise ConfigurationError(reason=f"option {option}: {reason}")
